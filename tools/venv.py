"""Builds .venv for make's goals: python3 tools/venv.py demo, test, types or docs. Needs Python 3.10 alone.

torch comes first, in the version of constraints.txt: the CPU build where an index has it (TORCH_INDEX, then those that
pip is configured with), otherwise the default build of that version, which is larger. On a machine with an NVIDIA
driver the default build is the first choice.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
# The highest supported Triton, beside the installed one: kernels are compiled by both. 3.9 needs Python 3.11.
HIGHEST_TRITON = "3.9.0" if sys.version_info >= (3, 11) else "3.8.0"
EXTRAS = {"demo": ".[demo]", "test": ".[dev]", "types": ".[dev,types]", "docs": ".[docs]"}

# Bytes that have to be free, downloads included. The default build is 2.8 GB of wheels.
NEEDED = {"cpu": 3e9, "default": 9e9}

# What pip prints, and why it failed; the first that is found counts.
REASONS = {
    "space": r"No space left on device|Errno 28\b|Disk quota exceeded",
    "network": r"NewConnectionError|NameResolutionError|Connect(ion)?Timeout|ReadTimeout|ProxyError|SSLError"
    r"|Connection (refused|reset|broken)|Network is unreachable|name resolution",
    "version": r"No matching distribution found|ResolutionImpossible",
}


class Failed(Exception):
    """The environment cannot be built. The text says why."""


class Machine:
    """What building an environment asks of a machine; tests give their own."""

    index = os.environ.get("TORCH_INDEX", "")
    has_driver = Path("/proc/driver/nvidia/version").exists()

    def free(self):
        """Bytes free where .venv is."""
        return shutil.disk_usage(ROOT).free

    def say(self, line):
        print(line, flush=True)

    def pip(self, arguments, constraints, quiet=True):
        """`pip install` in .venv. Returns its exit status and its errors; without `quiet` all of it is shown."""
        pinned = VENV / "constraints.txt"
        pinned.write_text(constraints)
        options = ["--disable-pip-version-check", "install", "--constraint", str(pinned)]
        command = [str(PYTHON), "-m", "pip", *(["--quiet"] if quiet else []), *options, *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=str(ROOT))
        lines = []
        for line in process.stderr:
            lines.append(line)
            if not quiet:
                sys.stderr.write(line)
        return process.wait(), "".join(lines)


def constraints_for(build, text):
    """constraints.txt beside a build of torch: the default build brings the one Triton that it was made with."""
    return text if build == "cpu" else re.sub(r"^triton==.*\n", "", text, flags=re.MULTILINE)


def requirement(build, version):
    """What pip is asked for. It takes 2.13.0+cpu for torch==2.13.0, by preference: the default build excludes it."""
    return "torch==" + version + ("+cpu" if build == "cpu" else ",!=" + version + "+cpu")


def check_space(machine, build):
    free, needed = machine.free(), NEEDED[build]
    if free < needed:
        raise Failed(f"no space: {needed / 1e9:.0f} GB have to be free where .venv is, {free / 1e9:.1f} GB are")


def reason(errors):
    """Why pip failed: space, network, version or, if it does not say one of these, other."""
    return next((why for why, pattern in REASONS.items() if re.search(pattern, errors)), "other")


def explain(errors, wanted, index):
    """One line on a failed pip."""
    where = " and ".join(filter(None, (index, "the indexes that pip is configured with")))
    last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
    return {
        "space": f"no space: the disk filled up while pip installed {wanted}",
        "network": f"no network: pip did not reach {where} for {wanted}; check the connection and the proxy",
        "version": f"no such version: {where} have no {wanted} for this machine and Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}; TORCH_INDEX=URL names an index that has torch",
        "other": f"pip could not install {wanted}: {last}",
    }[reason(errors)]


def install_torch(machine, text):
    """Install one build of the torch that constraints.txt pins; returns which build."""
    version = re.search(r"^torch==(\S+)", text, re.MULTILINE)[1]
    order = ("default", "cpu") if machine.has_driver else ("cpu", "default")
    for build in order:
        check_space(machine, build)
        if build == "default":
            why = "this machine has an NVIDIA driver" if machine.has_driver else "no index has the CPU build"
            machine.say(f"{why}: installing the default build of torch {version}, which is larger (2.8 GB to download)")
        elif machine.has_driver:
            machine.say(f"no index has the default build: installing the CPU build of torch {version}")
        wanted = requirement(build, version)
        given = ["--extra-index-url", machine.index] if machine.index else []
        status, errors = machine.pip([*given, wanted, "setuptools"], constraints_for(build, text), build == "cpu")
        if not status:
            return build
        # Another build helps where an index has none of this one, and nowhere else.
        if reason(errors) != "version" or build == order[-1]:
            raise Failed(explain(errors, wanted.split(",")[0], machine.index))


def make(goal, machine):
    """Bring .venv to what `make demo` or `make test` needs; .venv/.torch names the build of torch in it."""
    text, chosen = CONSTRAINTS.read_text(), VENV / ".torch"
    if not chosen.exists() or chosen.stat().st_mtime < CONSTRAINTS.stat().st_mtime:
        check_space(machine, "cpu")
        machine.say("building .venv, once; this takes a few minutes")
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode:
            raise Failed(f"{sys.executable} -m venv failed; Debian and Ubuntu have it in the package python3-venv")
        chosen.write_text(install_torch(machine, text))
    # The build runs in .venv with the pinned setuptools, and torch is there already: nothing here replaces it.
    steps = [["--no-build-isolation", "--editable", EXTRAS[goal]]]
    if goal == "test":
        folder = VENV / "triton-highest"
        steps.append(["--no-deps", "--upgrade", "--target", str(folder), "triton==" + HIGHEST_TRITON])
    for step in steps:
        # The second Triton is not the one that constraints.txt pins.
        status, errors = machine.pip(step, "" if "--target" in step else constraints_for(chosen.read_text(), text))
        if status:
            raise Failed(explain(errors, step[-1], ""))
    (VENV / ("." + goal)).touch()


def main(arguments):
    if sys.version_info < (3, 10):
        print("python3 is %d.%d here, and 3.10 or newer is needed: make PYTHON=python3.11" % sys.version_info[:2])
        return 1
    if len(arguments) != 1 or arguments[0] not in EXTRAS:
        print("usage: python3 tools/venv.py " + "|".join(EXTRAS))
        return 2
    try:
        make(arguments[0], Machine())
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
