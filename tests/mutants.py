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
_PORTABLE = f"{_TESTS}/attention/test_attention.py"
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
    Mutant("mask: bits from the other end", _REFERENCE, "(bit & 7)) & 1 == 0", "7 - (bit & 7)) & 1 == 0",
           f"{_TESTS}/attention/test_attention.py -k custom_mask"),
    Mutant("merge: the LSE of the first state", f"{_OPS}/attention/merge/reference.py",
           "base + torch.log2(total)", "base", f"{_TESTS}/attention/merge"),
    Mutant("mask, portable: the diagonal is hidden", f"{_OPS}/attention/_device/logits.py",
           "ok = ok & (kv_pos <= q_pos)", "ok = ok & (kv_pos < q_pos)", _PORTABLE),
    Mutant("window, portable: one key less", f"{_OPS}/attention/_device/logits.py",
           "(kv_pos + window_left >= q_pos)", "(kv_pos + window_left > q_pos)", _PORTABLE),
    Mutant("mask, portable: bits from the other end", f"{_OPS}/attention/_device/logits.py",
           "(byte >> (bit & 7).to(tl.int32)", "(byte >> (7 - (bit & 7)).to(tl.int32)", _PORTABLE),
    Mutant("scale: none under a soft cap, portable", f"{_OPS}/attention/_device/logits.py",
           "s = s * (scale / soft_cap)", "s = s / soft_cap", f"{_TESTS}/attention/test_attention.py"),
    Mutant("sink: its weight before the maximum", f"{_OPS}/attention/_device/logits.py",
           "tl.exp2(sink - base))", "tl.exp2(sink - top))", f"{_TESTS}/attention/test_attention.py"),
    Mutant("pages: the slot of the page before", _REFERENCE,
           "positions // problem.page_size).clamp(max", "(positions - 1).clamp(min=0) // problem.page_size).clamp(max",
           _ATTENTION),
    Mutant("merge, portable: an empty state is no identity", f"{_OPS}/attention/merge/portable.py",
           "y = tl.where(empty_b[:, None], 0.0, y)\n        merged", "merged", f"{_TESTS}/attention/merge"),
    Mutant("pages: appended one request on", f"{_OPS}/page/reference.py",
           "table.kv_indptr[request] + position // page_size]",
           "table.kv_indptr[request] + (position + 1) // page_size]", f"{_TESTS}/page/test_page.py"),
    Mutant("pages: a full last page counts as empty", f"{_OPS}/page/reference.py",
           "torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)",
           "torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len % page_size, 0)",
           f"{_TESTS}/page/test_page.py"),
    Mutant("formats: e2m1 rounds ties up", f"{_OPS}/narrow.py", "& (i % 2 == 1))", "& (i % 2 < 2))",
           "tests/fuzz/test_fuzz.py -k 'test_reference and formats' tests/ops/quantize"),
    Mutant("formats: a scale of mx that is one too small", f"{_OPS}/narrow.py",
           "(mantissa > peak_mantissa)", "(mantissa > 1.0)", f"{_TESTS}/quantize"),
    Mutant("formats: e4m3 wraps instead of saturating", f"{_OPS}/narrow.py",
           "x.clamp(-largest, largest).to(dtype)", "x.clamp(-largest, 2 * largest).to(dtype)", f"{_TESTS}/quantize"),
    Mutant("top-p: the column that reaches the sum is left out", f"{_OPS}/sampling/reference.py",
           "(before < goal)", "(before + mass.gather(1, rank) <= goal)", f"{_TESTS}/sampling"),
    Mutant("min-p: columns at the threshold are left out", f"{_OPS}/sampling/reference.py",
           "kept = weights >= share *", "kept = weights > share *", f"{_TESTS}/sampling"),
    Mutant("top-k: ties the other way round", f"{_OPS}/topk/reference.py",
           "    if problem.last:\n        values", "    if not problem.last:\n        values", f"{_TESTS}/topk"),
    Mutant("top-k: a page's offset within it", f"{_OPS}/topk/reference.py",
           "entry * page_size + order % page_size", "entry * page_size + order", f"{_TESTS}/topk/test_topk.py"),
    Mutant("gate: the decay comes after the correction", f"{_OPS}/recurrent/delta/reference.py",
           "(v[:, t] - (new * k[:, t, :, None, :]).sum(-1))", "(v[:, t] - (before * k[:, t, :, None, :]).sum(-1))",
           f"{_TESTS}/recurrent/delta/test_delta.py"),
    Mutant("gate: beta without its sigmoid", f"{_OPS}/recurrent/delta/reference.py",
           'beta.sigmoid() if problem.beta == "logit" else beta\n    state', "beta\n    state",
           f"{_TESTS}/recurrent/delta/test_delta.py"),
    Mutant("gate: no softplus", f"{_OPS}/recurrent/ssm/reference.py",
           "softplus(dt) if problem.softplus else dt", "dt", f"{_TESTS}/recurrent/ssm/test_ssm.py"),
    Mutant("rope: half a turn the other way", f"{_OPS}/rope/reference.py",
           "torch.stack((-sin, sin), axis)", "torch.stack((sin, -sin), axis)", f"{_TESTS}/rope/test_rope.py"),
    Mutant("routing: a group is as good as its best", f"{_OPS}/moe/routing/reference.py",
           "values[..., :2].sum(2)", "values[..., :1].sum(2)", f"{_TESTS}/moe/routing"),
    Mutant("limits: offsets may pass the page ids", f"{_OPS}/attention/host_tables.py",
           "page_ids is None or entries <= page_ids", "True", f"{_TESTS}/attention/test_bad_input.py"),
    Mutant("limits: a value past the last is taken", "flashinfer/_core/checks.py",
           "require(least <= low and high <= most, name", "require(least <= low, name",
           f"{_TESTS}/attention/test_engines.py"),
    Mutant("deadline: a late rank is not named", f"{_OPS}/comm/meeting.py",
           "if clock.is_over() or gone.is_set():\n                    self.session",
           "if False:\n                    self.session",
           "tests/comm/test_faults.py -k barrier"),
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
