"""Small calls of every room, for a memory checker to watch: each tensor is an allocation of its own.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python small_cases.py [NAME ...]
    TRITON_INTERPRET=1 python small_cases.py --device cpu [NAME ...]

The calls of `tests/rooms.py` are among the cases, by their room's name: a new room is in it without more. Beside them
stand calls with the lengths and dims that end within a tile.
"""

import argparse
import contextlib
from unittest import mock

import torch

import flashinfer
from flashinfer import comm
from flashinfer.comm import _exchange, _workspaces, allreduce
from flashinfer.ops.comm.alltoall import space
from tests import rooms
from tests.ops.comm import simulate
from tests.ops.comm.allreduce_fusion import cases as sums
from tests.ops.comm.alltoall import cases as exchanges

DEVICE = torch.device("cuda", 0)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def workspace():
    return torch.empty(1 << 22, dtype=torch.uint8, device=DEVICE)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def ragged(dim=128, **plan):
    """Lengths around tiles, and nothing."""
    q_lens, kv_lens = ints(0, 130, 1, 65, 0), ints(0, 130, 1, 129, 3)
    q_lens, kv_lens = (x.cumsum(0).to(torch.int32) for x in (q_lens, kv_lens))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(q_lens, kv_lens, 4, 2, dim, q_data_type=torch.bfloat16, **plan)
    rows, keys = int(q_lens[-1]), int(kv_lens[-1])
    wrapper.run(randn(rows, 4, dim), randn(keys, 2, dim), randn(keys, 2, dim), return_lse=True)


def paged(page_size, q_lens=(130, 1, 64), kv_lens=(150, 1, 129), decode=False, dim=128, kv_dtype=torch.bfloat16):
    """Full pages in no order; the last of each request partly filled."""
    pages = [-(-n // page_size) for n in kv_lens]
    indices = torch.randperm(sum(pages), device=DEVICE).to(torch.int32)
    indptr = ints(0, *pages).cumsum(0).to(torch.int32)
    last = ints(*((n - 1) % page_size + 1 for n in kv_lens))
    cache = randn(sum(pages), 2, page_size, 2, dim).to(kv_dtype)
    types = dict(q_data_type=torch.bfloat16, kv_data_type=kv_dtype)
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
        wrapper.plan(indptr, indices, last, 4, 2, dim, page_size, **types)
        return wrapper.run(randn(len(kv_lens), 4, dim), cache)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    qo_indptr = ints(0, *q_lens).cumsum(0).to(torch.int32)
    wrapper.plan(qo_indptr, indptr, indices, last, 4, 2, dim, page_size, causal=True, **types)
    return wrapper.run(randn(sum(q_lens), 4, dim), cache)


def latent(page_size):
    pages = 5
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace())
    lens = ints(3 * page_size - 1, 2 * page_size)
    indices = torch.randperm(pages, device=DEVICE).to(torch.int32)
    qo_indptr, kv_indptr = (x.to(DEVICE) for x in (ints(0, 1, 2), ints(0, 3, 5)))
    wrapper.plan(qo_indptr, kv_indptr, indices, lens.to(DEVICE), 16, 512, 64, page_size, False, 192**-0.5,
                 torch.bfloat16, torch.bfloat16)  # fmt: skip
    wrapper.run(randn(2, 16, 512), randn(2, 16, 64), randn(pages, page_size, 512), randn(pages, page_size, 64))


def merge():
    v, s = randn(7, 4, 128), randn(7, 4, dtype=torch.float32)
    flashinfer.merge_state(v, s, randn(7, 4, 128), randn(7, 4, dtype=torch.float32))
    flashinfer.merge_states(randn(7, 3, 4, 128), randn(7, 3, 4, dtype=torch.float32))


def tokens():
    x, w = randn(3, 1001), randn(1001)
    flashinfer.rmsnorm(x, w)
    flashinfer.fused_add_rmsnorm(x, randn(3, 1001), w)
    flashinfer.silu_and_mul(randn(5, 2 * 1008))
    flashinfer.apply_rope_pos_ids(randn(9, 4, 128), randn(9, 2, 128), torch.arange(9, device=DEVICE, dtype=torch.int32))
    cache = randn(6, 2, 5, 2, 128)
    batch, positions = flashinfer.get_batch_indices_positions(ints(0, 2, 9).to(DEVICE), ints(12, 14).to(DEVICE), 9)
    flashinfer.append_paged_kv_cache(randn(9, 2, 128), randn(9, 2, 128), batch, positions, cache,
                                     torch.arange(6, device=DEVICE, dtype=torch.int32), ints(0, 3, 6).to(DEVICE),
                                     ints(2, 4).to(DEVICE))  # fmt: skip
    for name, packed, blocks in (("int4_group_64", 2, 2), ("int8_per_token_head", 1, 1)):
        codes = torch.zeros(6, 2, 5, 2, 128 // packed, dtype=torch.uint8, device=DEVICE)
        factors = torch.zeros(6, 2, 5, 2, blocks, dtype=torch.float32, device=DEVICE)
        flashinfer.page.quantize_append_paged_kv_cache(
            randn(9, 2, 128), randn(9, 2, 128), batch, positions, codes, factors,
            torch.arange(6, device=DEVICE, dtype=torch.int32), ints(0, 3, 6).to(DEVICE), ints(2, 4).to(DEVICE), name,
        )  # fmt: skip
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE))
        wrapper.plan(ints(0, 3, 6), ints(0, 1, 2, 3, 4, 5), ints(2, 4), 4, 2, 128, 5, q_data_type=torch.bfloat16,
                     kv_data_type=name)  # fmt: skip
        wrapper.run(randn(2, 4, 128), codes, kv_cache_sf=factors)


def sampled():
    probs = randn(3, 5003, dtype=torch.float32).softmax(-1)
    flashinfer.sampling.top_k_top_p_sampling_from_probs(probs, 40, 0.9)
    flashinfer.sampling.top_k_renorm_probs(probs, 17)
    flashinfer.top_k(probs, 100)


def quantised():
    x = randn(130, 512)
    flashinfer.fp4_quantize(x, torch.ones(1, device=DEVICE))
    flashinfer.mxfp8_quantize(x)


@contextlib.contextmanager
def ranks(*patches):
    """Two ranks in this process: their kernels run phase by phase, one after another, so that none waits for one."""
    with contextlib.ExitStack() as stack:
        for module, name, new in patches:
            stack.enter_context(mock.patch.object(module, name, new))
        yield [simulate.Ranks(rank, 2) for rank in range(2)]


def connector():
    """Links on the device of the run, whose waits end soon."""
    found = []

    def connect(ranks, area, device, behind=0, deadline=0):
        if not found:
            found.extend(simulate.links(2, area, behind, DEVICE))
        return simulate.connector(found)(ranks, area, device)

    return connect


def all_reduces():
    recorder = simulate.Recorder(allreduce.op)
    with ranks((allreduce, "op", recorder), (_workspaces, "connect", connector())) as pair:
        made = [allreduce.AllReduceFusionWorkspace(2, rank) for rank in range(2)]
        for one, ws in zip(pair, made, strict=True):
            ws._open(one, 8 * 256 * 4, 256 * 4, DEVICE, True)
        for case, one_shot in (("plain", True), ("norm", False), ("fp4 out", True)):
            for rank, ws in enumerate(made):
                given = sums.inputs(case, rank, 2, (3, 256), torch.float16, DEVICE)
                out = sums.results(case, (3, 256), torch.float16, DEVICE)
                comm.allreduce_fusion(workspace=ws, **given, **out, use_oneshot=one_shot)
            recorder.run()
        for ws in made:
            ws.check()


def all_to_alls():
    steps = {name: simulate.Recorder(getattr(_exchange.room, name)) for name in ("moe_dispatch", "moe_combine")}
    patches = [(_exchange.room, name, recorder) for name, recorder in steps.items()]
    with ranks(*patches, (space, "connect", connector())) as pair:
        made = []
        for rank, one in enumerate(pair):
            with mock.patch("flashinfer.comm.trtllm_moe_alltoall.ranks_of_experts", lambda *_, one=one: one):
                mapping = comm.Mapping(2, rank, tp_size=2, moe_ep_size=2)
                made.append(
                    comm.MoeAlltoAll(mapping, 8, exchanges.TOP_K, 2 * exchanges.PER, hidden_size=2 * exchanges.HIDDEN)
                )
        given = [exchanges.inputs(rank, 2, tokens, torch.float16, DEVICE) for rank, tokens in enumerate((5, 3))]
        received = [a.dispatch(x[1], exchanges.payloads(*x), 8) for a, x in zip(made, given, strict=True)]
        steps["moe_dispatch"].run()
        for a, got in zip(made, received, strict=True):
            a.combine(torch.nan_to_num(got[0].float()).half(), 8)
        steps["moe_combine"].run()
        for a in made:
            a.check()


CASES = {
    "ragged": lambda: ragged(causal=True),
    "ragged, window and cap": lambda: ragged(64, causal=True, window_left=40, logits_soft_cap=20.0),
    "pages of 16": lambda: paged(16),
    "pages of 5": lambda: paged(5),
    "page size 1": lambda: paged(1),
    "decode": lambda: paged(16, kv_lens=(2000, 1, 17), decode=True),
    "decode, odd pages and dim": lambda: paged(3, kv_lens=(700, 1, 17), decode=True, dim=72),
    "decode, FP8": lambda: paged(16, kv_lens=(700, 1, 17), decode=True, kv_dtype=torch.float8_e4m3fn),
    "latent": lambda: latent(16),
    "latent, page size 1": lambda: latent(1),
    "merge": merge,
    "tokens": tokens,
    "wide rows": sampled,
    "quantisation": quantised,
    "comm.allreduce_fusion": all_reduces,
    "comm.alltoall": all_to_alls,
}
CASES |= {room: lambda call=call: call(DEVICE)() for room, call in rooms.CALLS.items()}


def main():
    global DEVICE
    parser = argparse.ArgumentParser(description="Make small calls of every room.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all of them without one")
    parser.add_argument("--device", default="cuda:0", help="cpu is Triton's interpreter")
    given = parser.parse_args()
    DEVICE = torch.device(given.device)
    on_gpu = DEVICE.type == "cuda"
    for name in given.names or CASES:
        with contextlib.nullcontext() if on_gpu else rooms.by("portable"):
            CASES[name]()
        if on_gpu:
            torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
