"""Small wrong changes to the source, each of which a narrow set of tests has to notice: `make mutants`.

    python tests/mutants.py            all of them; prints the score and the survivors
    python tests/mutants.py chain      those whose name has the word

A mutant is one replacement in a copy of the tree. It dies if its tests fail; it survives if they pass. A mutant whose
text is not there any more is an error: its line moved, and the list follows.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


_OPS, _TESTS = "flashinfer/ops", "tests/ops"
_CHAIN = f"{_TESTS}/sampling/test_chain.py {_TESTS}/sampling/test_extremes.py"
_ATTENTION = "tests/fuzz/test_fuzz.py -k 'test_reference and attend'"
_REFERENCE = f"{_OPS}/attention/reference.py"
MUTANTS = (
    Mutant("chain accepts a tenth more", f"{_OPS}/sampling/speculative.py",
           "< tl.maximum(q, 0.0))", "< 1.1 * tl.maximum(q, 0.0))", _CHAIN),
    Mutant("chain accepts a tenth more, in the reference", f"{_OPS}/sampling/reference.py",
           "* p < q) & known", "* p < 1.1 * q) & known", _CHAIN),
    Mutant("the last column is never drawn", f"{_OPS}/sampling/portable.py",
           "score = tl.where((column < length) &", "score = tl.where((column < length - 1) &",
           f"{_TESTS}/sampling/test_extremes.py"),
    Mutant("the last column is never drawn, in the reference", f"{_OPS}/sampling/reference.py",
           "kept = kept & (weights > 0)\n    row,", "kept = kept & (weights > 0)\n    kept[:, -1] = False\n    row,",
           f"{_TESTS}/sampling/test_extremes.py"),
    Mutant("chain never draws the last column", f"{_OPS}/sampling/speculative.py",
           "column < columns\n        q = load_values", "column < columns - 1\n        q = load_values",
           _CHAIN),
    Mutant("replay: aliasing is left out of the key", "flashinfer/_core/replay.py",
           "        if len(set(addresses)) < len(addresses):\n", "        if False:\n",
           "tests/core/test_replay.py -k one_tensor"),
    Mutant("replay: alignment is left out of the key", "flashinfer/_core/replay.py",
           "key.append(tuple(low) if any(low) else None)", "key.append(None)", "tests/core/test_replay.py -k differ"),
    Mutant("replay: the stream is left out of the key", "flashinfer/_core/replay.py",
           "key.append(torch._C._cuda_getCurrentRawStream(tensors[0].get_device()))", "key.append(0)",
           "tests/core/test_replay.py -k streams"),
    Mutant("cache: the owner of a link", "flashinfer/_core/trusted.py",
           "        if not any_owner and state.st_uid", "        if False and state.st_uid",
           "tests/core/test_kernel_cache.py -k link"),
    Mutant("cache: the owner of a link's target", "flashinfer/_core/trusted.py",
           "def _judge(state: os.stat_result, place, any_owner: bool) -> None:\n    if not any_owner and state.st_uid",
           "def _judge(state: os.stat_result, place, any_owner: bool) -> None:\n    if False and state.st_uid",
           "tests/core/test_kernel_cache.py -k 'link or another'"),
    Mutant("cache: others may write", "flashinfer/_core/trusted.py",
           "if state.st_mode & OTHERS_WRITE:", "if False:", "tests/core/test_kernel_cache.py -k 'link or write'"),
    Mutant("mask: the diagonal is hidden", _REFERENCE, "kv_pos[:, None, :] > q_pos", "kv_pos[:, None, :] >= q_pos",
           _ATTENTION),
    Mutant("window: one key less", _REFERENCE, "window_left < q_pos", "window_left <= q_pos", _ATTENTION),
    Mutant("mask: bits from the other end", _REFERENCE, "(bit & 7)) & 1 == 0", "7 - (bit & 7)) & 1 == 0", _ATTENTION),
    Mutant("merge: the LSE of the first state", f"{_OPS}/attention/merge/reference.py",
           "base + torch.log2(total)", "base", f"{_TESTS}/attention/merge"),
    Mutant("norm: eps outside of the root", f"{_OPS}/norm/reference.py",
           "torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)",
           "(torch.rsqrt(x.square().mean(-1, keepdim=True)) + eps)", f"{_TESTS}/norm/test_norm.py"),
    Mutant("arguments: tensors on the meta device", "flashinfer/_core/arguments.py",
           ' and x.device.type != "meta"', "", "tests/core/test_arguments.py"),
    Mutant("dispatch: a refused variant runs", "flashinfer/_core/dispatch.py",
           "            if not why:\n", "            if True:\n", f"{_TESTS}/attention/test_bad_input.py"),
)  # fmt: skip


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether the tests pass with the change in place; ends the run where there is nothing to change."""
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        sys.exit(f"{mutant.name}: {mutant.file} has the text {text.count(mutant.old)} times, and not once")
    path.write_text(text.replace(mutant.old, mutant.new))
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider {mutant.tests}"
    try:
        done = subprocess.run(command, shell=True, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if done.returncode not in (0, 1):
        sys.exit(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 0


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listing.splitlines():
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, tree / name)
        for mutant in chosen:
            lives = survives(mutant, tree)
            print(f"{'SURVIVES' if lives else 'dies':9} {mutant.name}", flush=True)
            alive += [mutant.name] * lives
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants died")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
