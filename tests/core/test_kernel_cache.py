"""The disk cache against faults, other users and other processes. What it must never do is give back a wrong entry."""

import fcntl
import hashlib
import json
import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flashinfer._core import cache_folders, env, kernel_cache, trusted
from flashinfer._core.kernel_cache import FrozenError
from flashinfer.version import __version__

KEY = {"name": "norm", "arch": "90a", "problem": {"dtype": "bf16"}, "config": {"block": 128}, "source": "abc"}
CUBIN = b"\x7fELF" + bytes(range(256)) * 8
KERNEL = {
    "symbol": "norm_kernel", "shared": 1024, "threads": 128, "parameters": [["u64", 8, 8]], "waits": False,
    "tensor_maps": [], "global_scratch": 0, "profile_scratch": 0, "registers": 32, "stack_bytes": 0,
}  # fmt: skip


class Compiler:
    """Stands in for a compilation, and counts."""

    def __init__(self, cubin=CUBIN, kernel=KERNEL):
        self.calls = 0
        self.cubin, self.kernel = cubin, kernel

    def __call__(self):
        self.calls += 1
        return self.cubin, self.kernel


@pytest.fixture
def said(caplog):
    """The messages of warnings so far."""
    caplog.set_level(logging.INFO, "flashinfer")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def op_folder(base):
    return base / ".cache" / "flashinfer" / __version__ / "90a" / "cached_ops" / "norm"


def store(key=KEY, **kind):
    return kernel_cache.obtain(key, Compiler(**kind))


def test_entry_is_kept_and_found(op_folder, said):
    compiler = Compiler()
    first = kernel_cache.obtain(KEY, compiler)
    again = kernel_cache.obtain(KEY, compiler)
    assert compiler.calls == 1
    assert (first.cached, again.cached) == (False, True)
    assert again.cubin == CUBIN and again.kernel == KERNEL and again.key == KEY
    files = sorted(path.name for path in op_folder.iterdir() if path.is_file())
    digest = kernel_cache.digest_of(KEY)
    assert files == [f"{digest}.cubin", f"{digest}.json"]
    record = json.loads((op_folder / f"{digest}.json").read_text())
    assert record["key"] == KEY and record["kernel"] == KERNEL
    assert record["cubin_sha256"] == hashlib.sha256((op_folder / f"{digest}.cubin").read_bytes()).hexdigest()
    assert again.path == op_folder / f"{digest}.json"
    assert not said()


def test_each_compilation_is_one_line_of_the_log(caplog):
    caplog.set_level(logging.INFO, "flashinfer")
    store()
    store()
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.INFO
    assert "norm" in message and kernel_cache.digest_of(KEY) in message and " s" in message


@pytest.mark.parametrize("part", KEY)
def test_digest_depends_on_every_part(part):
    assert kernel_cache.digest_of(KEY | {part: "other"}) != kernel_cache.digest_of(KEY)


def test_digest_does_not_depend_on_order():
    assert kernel_cache.digest_of(dict(reversed(KEY.items()))) == kernel_cache.digest_of(KEY)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def empty(path):
    path.write_bytes(b"")


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_link(path):
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def let_others_write(path):
    path.chmod(0o666)


def remove(path):
    path.unlink()


FAULTS = (
    truncate, empty, flip_one_bit, replace_by_link, replace_by_pipe, replace_by_folder, let_others_write, remove,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_damaged_entry_is_a_miss(fault, suffix, said):
    path = store().path
    fault(path.with_suffix(suffix))
    assert kernel_cache.lookup(KEY) is None
    assert kernel_cache.lookup(KEY) is None
    expected = 0 if (fault, suffix) == (remove, ".json") else 1
    assert len([text for text in said() if str(path) in text]) == expected
    compiler = Compiler()
    assert kernel_cache.obtain(KEY, compiler).cubin == CUBIN
    assert compiler.calls == 1
    if fault is not replace_by_folder:
        assert kernel_cache.lookup(KEY).cubin == CUBIN
        assert not kernel_cache.verify()


def rewritten(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["kernel"].update(shared=0),
        lambda record: record["kernel"].update(threads=64),
        lambda record: record["key"].update(source="other"),
        lambda record: record.update(cubin_sha256="0" * 64),
        lambda record: record.pop("sha256"),
        lambda record: record.pop("kernel"),
        lambda record: record.clear(),
    ],
)
def test_altered_record_is_a_miss(change, said):
    path = store().path
    rewritten(path, change)
    assert kernel_cache.lookup(KEY) is None
    assert any(str(path) in text for text in said())


@pytest.mark.parametrize("text", ["[]", "null", "3", '"entry"', "{", "\x00"])
def test_record_that_is_no_entry_is_a_miss(text):
    path = store().path
    path.write_text(text)
    assert kernel_cache.lookup(KEY) is None


def signed(record):
    record.pop("sha256", None)
    return record | {"sha256": kernel_cache._sha256(kernel_cache._canonical(record))}


@pytest.mark.parametrize(
    "kernel",
    [
        {}, None, [], "kernel", KERNEL | {"threads": "128"}, KERNEL | {"shared": True}, KERNEL | {"parameters": None},
        KERNEL | {"threads": 0}, KERNEL | {"shared": -1}, KERNEL | {"parameters": [["u64", 8]]},
        KERNEL | {"tensor_maps": [3]},
    ],  # fmt: skip
)
def test_whole_record_whose_kernel_no_launch_can_use_is_a_miss(kernel, said):
    path = store().path
    path.write_text(json.dumps(signed(json.loads(path.read_text()) | {"kernel": kernel})))
    assert kernel_cache.lookup(KEY) is None
    assert "its kernel" in said()[0]
    assert [fault["path"] for fault in kernel_cache.verify()] == [str(path)]


@pytest.mark.parametrize("text", ["[" * 200_000, '{"key":' * 100_000])
def test_record_that_nests_deeper_than_python_is_a_miss(text, said):
    path = store().path
    path.write_text(text)
    assert kernel_cache.lookup(KEY) is None
    assert "RecursionError" in said()[0] and len(kernel_cache.verify()) == 1


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_huge_file_is_a_miss_and_is_not_read(suffix, said):
    path = store().path
    os.truncate(path.with_suffix(suffix), 8 << 30)
    assert kernel_cache.lookup(KEY) is None
    assert "8589934592 bytes, more than" in said()[0]


def test_whole_entry_under_another_keys_name_is_a_miss(said):
    other = KEY | {"source": "other"}
    ours, theirs = store().path, store(other, cubin=b"other").path
    for suffix in (".json", ".cubin"):
        theirs.with_suffix(suffix).replace(ours.with_suffix(suffix))
    assert kernel_cache.lookup(KEY) is None
    assert "another key" in said()[-1]
    assert [fault["path"] for fault in kernel_cache.verify()] == [str(ours)]


def test_entries_cubin_of_another_key_is_a_miss():
    ours, theirs = store().path, store(KEY | {"source": "other"}, cubin=b"other").path
    theirs.with_suffix(".cubin").replace(ours.with_suffix(".cubin"))
    assert kernel_cache.lookup(KEY) is None


# -- places -----------------------------------------------------------------------------------------------------------


LEVELS = ("flashinfer", __version__, "90a", "cached_ops", "norm")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_folder_that_others_can_write_is_refused(level, mode, op_folder, said):
    store()
    folder = next(path for path in (op_folder, *op_folder.parents) if path.name == level)
    folder.chmod(mode)
    before = sorted(op_folder.iterdir())
    compiler = Compiler(cubin=b"fresh")
    entry = kernel_cache.obtain(KEY, compiler)
    assert (compiler.calls, entry.cubin) == (1, b"fresh")
    assert sorted(op_folder.iterdir()) == before and not entry.path.is_relative_to(op_folder)
    assert kernel_cache.obtain(KEY, compiler).cached and compiler.calls == 1
    assert len(said()) == 1 and str(folder) in said()[0]
    assert stat.S_IMODE(entry.path.parents[3].stat().st_mode) == 0o700


@pytest.fixture
def of_another(monkeypatch):
    """Makes a file or folder look like another user's to who asks of its descriptor or name."""
    theirs, fstat, stat_ = set(), os.fstat, os.stat

    def altered(state):
        fields = list(state)
        fields[4] += (state.st_dev, state.st_ino) in theirs
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", lambda handle: altered(fstat(handle)))
    monkeypatch.setattr(os, "stat", lambda *args, **named: altered(stat_(*args, **named)))

    def give(path):
        state = os.lstat(path)
        theirs.add((state.st_dev, state.st_ino))

    return give


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_file_of_another_user_is_a_miss(suffix, of_another, said):
    path = store().path
    of_another(path.with_suffix(suffix))
    assert kernel_cache.lookup(KEY) is None
    assert "belongs to user" in said()[0]
    assert [fault["path"] for fault in kernel_cache.verify()] == [str(path)]
    assert store().cubin == CUBIN


def test_precompiled_files_may_be_another_users(tmp_path, base, monkeypatch, of_another):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "shipped"))
    path = store().path
    for part in (path, path.with_suffix(".cubin"), *path.parents[:5]):
        of_another(part)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(base))
    monkeypatch.setenv("FLASHINFER_PRECOMPILED_DIR", str(tmp_path / "shipped"))
    assert kernel_cache.lookup(KEY).cubin == CUBIN
    assert kernel_cache.verify(tmp_path / "shipped") == []


@pytest.mark.parametrize("level", LEVELS)
def test_link_of_another_user_is_refused(level, op_folder, of_another, said):
    """Its target is ours: who made the link chose what is read."""
    store()
    folder = next(path for path in (op_folder, *op_folder.parents) if path.name == level)
    moved = folder.with_name("moved")
    folder.rename(moved)
    folder.symlink_to(moved)
    if level == "flashinfer":
        assert kernel_cache.lookup(KEY) is not None
        of_another(folder)
    assert kernel_cache.lookup(KEY) is None
    assert len(said()) == 1 and ("belongs to user" in said()[0] if level == "flashinfer" else "is a link" in said()[0])


def test_link_of_ones_own_to_another_users_folder_is_refused(base, tmp_path, of_another, said):
    store()
    folder, target = base / ".cache" / "flashinfer", tmp_path / "target"
    folder.rename(target)
    folder.symlink_to(target)
    assert kernel_cache.lookup(KEY) is not None
    of_another(target)
    assert kernel_cache.lookup(KEY) is None and "belongs to user" in said()[0]


@pytest.mark.parametrize("opens", [1, 2])
def test_folder_swapped_while_it_is_open_is_not_read(opens, op_folder, monkeypatch, of_another):
    """After it was judged, its name comes to stand for another user's, with a whole entry of his under our key."""
    path = store().path
    theirs = signed(json.loads(path.read_text()) | {"cubin_sha256": hashlib.sha256(b"theirs").hexdigest()})
    judge, judged = trusted._judge, []

    def swap(state, place, any_owner):
        judge(state, place, any_owner)
        judged.append(place)
        if judged.count(op_folder) == opens and place == op_folder:
            op_folder.rename(op_folder.with_name("moved"))
            op_folder.mkdir()
            (op_folder / path.name).write_text(json.dumps(theirs))
            (op_folder / path.name).with_suffix(".cubin").write_bytes(b"theirs")
            of_another(op_folder)

    monkeypatch.setattr(trusted, "_judge", swap)
    found = kernel_cache.lookup(KEY)
    assert op_folder.with_name("moved").exists()
    # The folder that was judged before it was renamed is read on; the other one is not.
    assert found.cubin == CUBIN if opens == 2 else found is None


def test_folder_of_another_user_is_refused(op_folder, said, of_another):
    store()
    of_another(op_folder)
    compiler = Compiler()
    assert not kernel_cache.obtain(KEY, compiler).path.is_relative_to(op_folder)
    assert compiler.calls == 1 and len(said()) == 1 and "belongs to user" in said()[0]


def test_link_to_a_folder_that_others_can_write_is_refused(base, tmp_path, said):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    (base / ".cache").mkdir(parents=True)
    (base / ".cache" / "flashinfer").symlink_to(elsewhere)
    assert not store().path.is_relative_to(base)
    assert not list(elsewhere.iterdir()) and len(said()) == 1


def test_link_to_a_folder_of_ones_own_is_used(base, tmp_path, said):
    (tmp_path / "disk").mkdir(mode=0o755)
    (base / ".cache").mkdir(parents=True)
    (base / ".cache" / "flashinfer").symlink_to(tmp_path / "disk")
    assert store().path.resolve().is_relative_to(tmp_path / "disk")
    assert not said()


@pytest.mark.parametrize("place", ["file", "file/below", "/dev/null", "/proc/nowhere"])
def test_base_that_cannot_be_written(place, tmp_path, monkeypatch, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / place))
    compiler = Compiler()
    for source in ("a", "b"):
        for _ in range(2):
            assert kernel_cache.obtain(KEY | {"source": source}, compiler).cubin == CUBIN
    assert compiler.calls == 2
    assert len(said()) == 1 and "cannot be written" in said()[0]


def test_private_folder_goes_with_its_process(tmp_path):
    (tmp_path / "file").write_text("")
    script = (
        f"from flashinfer._core import kernel_cache; print(kernel_cache.obtain({KEY!r}, lambda: (b'cubin', {{}})).path)"
    )
    environment = os.environ | {"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "file")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith(".json") and not Path(run.stdout.strip()).exists()


def test_private_folder_that_is_gone_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/dev/null")
    first = store().path
    shutil.rmtree(first.parents[3])
    second = store().path
    assert second.exists() and second.parents[3] != first.parents[3]
    assert kernel_cache.lookup(KEY).path == second


def test_private_folder_that_is_not_ours_alone_is_left(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/dev/null")
    first = store().path
    first.parents[3].chmod(0o777)
    assert kernel_cache.lookup(KEY) is None
    second = store().path
    assert not second.is_relative_to(first.parents[3])
    first.parents[3].chmod(0o700)


def test_fork_has_a_private_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/dev/null")
    first = store().path
    child = os.fork()
    if child == 0:
        apart = kernel_cache.lookup(KEY) is None and not store().path.is_relative_to(first.parents[3])
        shutil.rmtree(cache_folders._private[Path("/dev/null")][0])
        os._exit(0 if apart else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert kernel_cache.lookup(KEY).path == first


def test_no_home_and_no_entry_in_the_password_file(monkeypatch, said):
    for name in ("FLASHINFER_WORKSPACE_BASE", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(cache_folders, "_private", {})
    entry = store()
    assert entry.cubin == CUBIN and entry.path.exists()
    assert kernel_cache.lookup(KEY).path == entry.path and len(said()) == 1


def test_no_folder_at_all_costs_the_entry_only(monkeypatch, said):
    def no_folder(**named):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/dev/null")
    monkeypatch.setattr(tempfile, "mkdtemp", no_folder)
    monkeypatch.setattr(cache_folders, "_private", {})
    monkeypatch.setattr(cache_folders, "_said", set())
    compiler = Compiler()
    for calls in (1, 2):
        entry = kernel_cache.obtain(KEY, compiler)
        assert (entry.cubin, entry.path, compiler.calls) == (CUBIN, None, calls)
    assert kernel_cache.writable_root() is None and kernel_cache.entries() == []
    assert len(said()) == 1 and "not kept" in said()[0]


def test_memory_holds_temporary_files_where_no_folder_does(monkeypatch, tmp_path):
    def nowhere():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "tempdir", None)
    cache_folders.find_temporary()
    assert tempfile.tempdir == tempfile.gettempdir() != str(tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.setattr(cache_folders, "_MEMORY", str(tmp_path))
    cache_folders.find_temporary()
    assert tempfile.tempdir == str(tmp_path)


def test_folders_are_ours_alone_whatever_the_umask(base):
    before = os.umask(0)
    try:
        path = store().path
    finally:
        os.umask(before)
    made = [p for p in base.rglob("*")] + [base]
    assert path in made
    assert not [p for p in made if p.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    assert kernel_cache.lookup(KEY) is not None


def test_disk_that_is_full_costs_the_entry_only(monkeypatch, said):
    def full(at, name, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trusted, "replace", full)
    assert store().cubin == CUBIN
    assert kernel_cache.lookup(KEY) is None
    assert "No space left" in said()[0]


def test_precompiled_folders_are_read_in_order_and_not_written(tmp_path, base, monkeypatch, said):
    shipped = []
    for name, source in (("one", "a"), ("two", "b")):
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / name))
        store(KEY | {"source": source}, cubin=name.encode())
        store(KEY, cubin=name.encode())
        shipped.append(str(tmp_path / name))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(base))
    monkeypatch.setenv("FLASHINFER_PRECOMPILED_DIR", os.pathsep.join([*shipped, str(tmp_path / "missing")]))
    before = sorted(tmp_path.rglob("*"))
    assert kernel_cache.lookup(KEY | {"source": "b"}).cubin == b"two"
    assert kernel_cache.lookup(KEY).cubin == b"one"
    assert not base.exists()
    compiler = Compiler()
    assert kernel_cache.obtain(KEY | {"source": "c"}, compiler).path.is_relative_to(base)
    assert [path for path in sorted(tmp_path.rglob("*")) if not path.is_relative_to(base)] == before
    assert not said()


def test_precompiled_folder_that_others_can_write_is_refused(tmp_path, base, monkeypatch, said):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "shipped"))
    store().path.parent.chmod(0o777)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(base))
    monkeypatch.setenv("FLASHINFER_PRECOMPILED_DIR", str(tmp_path / "shipped"))
    assert kernel_cache.lookup(KEY) is None
    assert len(said()) == 1 and "precompiled" in said()[0]


# -- frozen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["FLASHINFER_FROZEN", "FLASHINFER_DISABLE_JIT", "call"])
def test_frozen_mode_reads_and_does_not_compile(way, monkeypatch):
    store()
    if way == "call":
        kernel_cache.freeze()
    else:
        monkeypatch.setenv(way, "1")
    try:
        assert kernel_cache.frozen()
        compiler = Compiler()
        assert kernel_cache.obtain(KEY, compiler).cubin == CUBIN
        with pytest.raises(FrozenError, match="norm.*sm_90a.*frozen"):
            kernel_cache.obtain(KEY | {"source": "other"}, compiler)
        assert compiler.calls == 0
    finally:
        kernel_cache.freeze(False)
    for name in ("FLASHINFER_FROZEN", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    assert not kernel_cache.frozen()


def test_switch_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("FLASHINFER_FROZEN", "yes")
    with pytest.raises(ValueError, match="FLASHINFER_FROZEN.*'yes'.*0, 1"):
        kernel_cache.frozen()


def test_every_variable_is_in_the_table(monkeypatch):
    monkeypatch.setenv("FLASHINFER_DEBUG", "1")
    rows = {row["name"]: row for row in env.table()}
    assert rows["FLASHINFER_DEBUG"]["value"] == "1" and rows["FLASHINFER_FROZEN"]["default"] == "0"
    assert all(row["meaning"] for row in rows.values())


# -- list, verify, clear ----------------------------------------------------------------------------------------------


def test_entries_verify_and_clear(base):
    assert kernel_cache.entries() == [] and kernel_cache.verify() == []
    paths = [store(KEY | {"arch": arch, "name": name}).path for arch in ("80", "90a") for name in ("norm", "rope")]
    listed = kernel_cache.entries(base)
    assert {entry["path"] for entry in listed} == {str(path) for path in paths}
    for entry in listed:
        assert (entry["arch"], entry["op"]) == (entry["key"]["arch"], entry["key"]["name"])
        assert entry["version"] == __version__ and not entry["fault"]
        assert entry["bytes"] == sum(Path(entry["path"]).with_suffix(s).stat().st_size for s in (".json", ".cubin"))
    assert json.loads(json.dumps(listed)) == listed

    truncate(paths[0].with_suffix(".cubin"))
    paths[1].unlink()
    faults = {fault["path"]: fault["fault"] for fault in kernel_cache.verify()}
    assert faults.keys() == {str(paths[0]), str(paths[1].with_suffix(".cubin"))}

    beside = paths[2].with_name("notes.txt")
    beside.write_text("mine")
    assert kernel_cache.clear(arch="90a", op="norm")["files"] == 2
    assert {entry["path"] for entry in kernel_cache.entries()} == {str(paths[0]), str(paths[3])}
    kernel_cache.clear()
    assert kernel_cache.entries() == [] and kernel_cache.verify() == [] and beside.read_text() == "mine"


def test_clear_follows_no_link_and_leaves_what_is_anothers(base, tmp_path, of_another):
    mine, theirs = store().path, store(KEY | {"source": "theirs"}).path
    of_another(theirs)
    elsewhere = tmp_path / "elsewhere"
    kept = []
    for level, name in enumerate(("version", "arch", "op")):
        folder = elsewhere.joinpath(name, *(("90a", "cached_ops", "norm"), ("cached_ops", "norm"), ())[level])
        folder.mkdir(parents=True)
        kept.append(folder / f"{'0' * 32}.json")
        kept[-1].write_text("{}")
        place = mine.parents[(3, 2, 0)[level]]
        place.with_name("linked").symlink_to(elsewhere / name)
    for name in ("notes.json", "a.cubin"):
        kept.append(mine.with_name(name))
        kept[-1].write_text("mine")
    planted = mine.with_name(f"{'f' * 32}.json")
    planted.symlink_to(kept[0])
    assert kernel_cache.clear()["files"] == 4
    assert all(path.exists() for path in kept) and theirs.exists()
    assert not mine.exists() and not planted.is_symlink()


def test_wait_for_a_holder_that_was_stopped_ends(monkeypatch, said):
    monkeypatch.setattr(kernel_cache, "_LOCK_SECONDS", 0.2)
    path = store().path
    path.unlink()
    with kernel_cache._locked(cache_folders.in_cache(path.parents[6], path.parts[-4:-1]), path.stem):
        compiler = Compiler()
        assert kernel_cache.obtain(KEY, compiler).cubin == CUBIN and compiler.calls == 1
    assert "has been compiling" in said()[0]
    assert kernel_cache.lookup(KEY) is not None


def test_lock_ends_with_its_block_though_a_forked_child_lives_on(tmp_path):
    reading, writing = os.pipe()
    with kernel_cache._locked(cache_folders.Place(tmp_path, ()), "digest"):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    handle = os.open(tmp_path / ".locks" / "digest", os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)
        os.close(writing)
        os.waitpid(child, 0)


# -- many processes ---------------------------------------------------------------------------------------------------

STORM = """
import os, pathlib, random, signal, sys, threading, time
from tests.core.samples import Config, Problem, scale
from flashinfer._core import compiler, kernel_cache, trusted

log, processes, keys, victims = pathlib.Path(sys.argv[1]), 16, 4, 3
compile_kernel, replace = compiler.compile_kernel, trusted.replace


def note(*words):
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (" ".join(map(str, words)) + "\\n").encode())
    os.close(handle)


def wait_for(word, count):
    while not log.exists() or log.read_text().count(word) < count:
        time.sleep(0.01)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def child(number):
    def counted(build, arch):
        note("compile", build.constants["OFFSET"])
        if number < victims:
            wait_for("start", processes - victims)
        made = compile_kernel(build, arch)
        if number == 0:
            die()
        return made

    def fragile(at, name, content):
        if number == 1 or (number == 2 and name.endswith(".json")):
            handle = os.open(f".{name}.tmp", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=at)
            os.write(handle, content[: len(content) // 2])
            die()
        replace(at, name, content)

    compiler.compile_kernel, trusted.replace = counted, fragile
    order = list(range(keys))
    if number >= victims:
        random.Random(number).shuffle(order)
        wait_for("compile", victims)
        note("start", number)
    if number == victims:
        threading.Timer(0.1, die).start()
    for offset in order[number:] if number < victims else order:
        entry = scale.entry(Problem("bf16", offset=offset), Config(), "90a")
        assert entry.key["constants"]["OFFSET"] == offset and entry.cubin.startswith(b"\\x7fELF")
    os._exit(0)


children = [os.fork() or child(number) for number in range(processes)]
note("statuses", *(os.waitpid(pid, 0)[1] for pid in children))
"""


def test_sixteen_processes_some_killed(base, tmp_path):
    """All start cold, and wait for three that die: in compiling, in writing the cubin, and between cubin and JSON."""
    log = tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", STORM, str(log)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    statuses = [int(word) for word in lines[-1][1:]]
    assert statuses[:3] == [9, 9, 9] and statuses[3] in (0, 9) and statuses[4:] == [0] * 12
    compiled = [line[1] for line in lines if line[0] == "compile"]
    assert set(compiled) == {"0", "1", "2", "3"}
    assert len(compiled) <= 4 + statuses.count(9)
    whole = kernel_cache.entries(base)
    assert len(whole) == 4 and kernel_cache.verify(base) == []
    assert {entry["key"]["constants"]["OFFSET"] for entry in whole} == {0, 1, 2, 3}
    assert "not used" not in run.stderr
