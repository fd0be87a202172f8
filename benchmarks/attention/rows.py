"""The rows of the attention benchmark, with their targets. Both processes, ours and a peer's, read them here.

32 query heads, 8 KV heads, head_dim 128 and bfloat16 unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from composed import Mixed, Shared
from workload import Attention

# Batches whose host time is taken; every request has this many keys.
HOST_BATCHES, HOST_KV_LEN = (1, 8, 64, 128, 1024), 1024


@dataclass(frozen=True)
class Row:
    """One line: what it measures, the part of the table, targets as (of, value), and whether the README quotes it."""

    what: Attention | Shared | Mixed | Host
    group: str
    targets: tuple[tuple[str, float], ...] = ()
    headline: bool = False

    @property
    def name(self) -> str:
        return self.what.name


@dataclass(frozen=True)
class Host:
    """Time on the host: `what` is "plan" or "run" at a batch size, "import", or the first "decode" and, after it, the
    first "prefill" of a process, whose kernel cache is empty if `cold`."""

    name: str
    what: str
    batch: int = 0
    cold: bool = False


def rows(on_gpu: bool) -> list[Row]:
    """The rows for a GPU; on a CPU a few small ones, which show that the benchmark works."""
    if on_gpu:
        return [*_prefill(), *_paged_prefill(), *_decode(), *_composed(), *_host(HOST_BATCHES)]
    small = dict(qo_heads=4, kv_heads=2, head_dim_qk=64, head_dim_vo=64)
    return [
        Row(Attention("ragged prefill 2x64, causal", 2, 64, 64, causal=True, **small), "prefill", (("peers", 1.1),)),
        Row(Attention("chunked prefill, 16 on 256", 1, 16, 256, **small), "prefill"),
        Row(Attention("paged prefill 2x64, page 16, causal", 2, 64, 64, page_size=16, causal=True, **small), "prefill",
            (("ragged prefill 2x64, causal", 0.98),)),
        Row(Attention("ragged prefill 2x64, window 20", 2, 64, 64, causal=True, window_left=20, **small), "prefill"),
        *_shared(requests=3, prefix=64, unique=16, heads=2, head_dim=64),
        *_mixed(2, 20, 40, 3, 40, **small),
        Row(Attention("paged decode 4x100, page 16", 4, 1, 100, page_size=16, **small), "decode", (("copy", 0.96),)),
        *_host((1,)),
    ]  # fmt: skip


def _prefill():
    yield _ragged(4, 4096, True, [("peers", 1.10)], headline=True)
    yield _ragged(4, 4096, False, [("peers", 1.10)], headline=True)
    yield _ragged(1, 16384, True, [("flashinfer", 1.10)], headline=True)
    yield _ragged(1, 16384, False, [("flashinfer", 1.10), ("matmul", 0.95)], headline=True)
    # 1.05 x the figures that FlashAttention-3 publishes; flashinfer's fa3 stands beside them in the run
    yield _ragged(1, 16384, True, [("TFLOP/s", 497)], ", head_dim 64", head_dim_qk=64, head_dim_vo=64)
    yield _ragged(1, 16384, True, [("TFLOP/s", 780)], ", head_dim 256", head_dim_qk=256, head_dim_vo=256)
    yield _ragged(1, 16384, True, [("TFLOP/s", 680)], ", head_dim 192/128, 32/32 heads", head_dim_qk=192, kv_heads=32)
    fp8 = dict(q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    yield _ragged(1, 16384, False, [("TFLOP/s", 1058)], ", FP8", headline=True, **fp8)
    for causal in (True, False):
        yield _ragged(1, 1024, causal, [("cudnn", 1.1)], ", 32/32 heads", kv_heads=32)
    for heads in ((64, 8), (8, 1)):
        for causal in (True, False):
            size = dict(qo_heads=heads[0], kv_heads=heads[1], causal=causal)
            name = f"chunked prefill, 512 on 65536, {heads[0]}/{heads[1]} heads, {_mask(causal)}"
            yield Row(Attention(name, 1, 512, 65536, **size), "prefill", (("TFLOP/s", 600),), heads[1] == 1 and causal)


    # cuDNN's published 135 TFLOP/s, of an H200, twice over
    small = dict(head_dim_qk=64, head_dim_vo=64, window_left=128, qo_heads=64)
    yield _ragged(4, 8192, True, [("TFLOP/s", 270)], ", head_dim 64, 64/8 heads, window 128", headline=True, **small)


def _paged_prefill():
    for causal in (True, False):
        yield _paged(4, 4096, 16, causal, 0.98, headline=causal)
    for page_size, least in ((16, 0.98), (64, 0.98), (1, 0.92)):
        yield _paged(1, 16384, page_size, True, least, headline=page_size == 1)


def _decode():
    for requests, kv_len, target in (
        (64, 4096, ("copy", 0.96)), (128, 8192, ("copy", 0.98)), (8, 65536, ("copy", 0.98)),
        (16, 1024, ("us", 28)), (1, 4096, ("us", 9)),
    ):  # fmt: skip
        name = f"paged decode {requests}x{kv_len}, page 16"
        yield Row(Attention(name, requests, 1, kv_len, page_size=16), "decode", (target,), headline=True)
    few = Attention("decode 1x2048, 16/2 heads, page 16", 1, 1, 2048, 16, 2, page_size=16)
    yield Row(few, "decode", (("us", 4.5), ("cudnn", 1.0)), headline=True)
    for dim in (256, 512):
        name = f"paged decode 64x4096, page 16, 16/2 heads of {dim}"
        wide = Attention(name, 64, 1, 4096, 16, 2, page_size=16, head_dim_qk=dim, head_dim_vo=dim)
        yield Row(wide, "decode", (("copy", 0.90),))
    for tokens in (2, 4, 8):
        name = f"paged decode 64x4096, page 16, {tokens} query tokens"
        several = Attention(name, 64, tokens, 4096, page_size=16, causal=True)
        yield Row(several, "decode", (("copy", 0.80),), headline=tokens == 4)
    for requests, kv_len in ((64, 4096), (8, 65536)):
        name = f"paged decode {requests}x{kv_len}, page 16"
        fp8 = Attention(f"{name}, FP8 KV", requests, 1, kv_len, page_size=16, kv_dtype="float8_e4m3fn")
        yield Row(fp8, "decode", ((name, 1.8),), headline=requests == 64)


def _composed():
    yield from _shared()
    yield from _mixed(4, 1024, 4096, 128, 4096)


def _shared(**sizes):
    """All requests read one prefix: once each, and once for all of them."""
    flat = Shared("", False, **sizes)
    name = f"decode {flat.requests} x ({flat.prefix} shared + {flat.unique}), {flat.heads}/{flat.heads} heads"
    yield Row(replace(flat, name=f"{name}, flat"), "composed")
    yield Row(replace(flat, name=f"{name}, cascade", cascade=True), "composed", ((f"{name}, flat", 60),), True)


def _mixed(chunks, rows, keys, decodes, length, **dims):
    what = f"{chunks} chunks of {rows} on {keys} and {decodes} decodes at {length}"
    chunk = Attention("", chunks, rows, keys, page_size=16, causal=True, **dims)
    decode = Attention("", decodes, 1, length, page_size=16, **dims)
    yield Row(Mixed(f"{what}, in turn", "in turn", chunk, decode), "composed")
    for way in ("BatchAttention", "POD"):
        target = ((f"{what}, in turn", 1.15),)
        yield Row(Mixed(f"{what}, {way}", way, chunk, decode), "composed", target, way == "BatchAttention")


def _host(batches):
    for batch in batches:
        yield Row(Host(f"plan(), batch {batch}", "plan", batch), "host", (("us", 20),), headline=batch in (64, 1024))
    for batch in batches:
        yield Row(Host(f"run(), batch {batch}", "run", batch), "host", (("us", 6),), headline=batch == 64)
    for what in ("decode", "prefill"):
        yield Row(Host(f"first {what}, cold cache", what, cold=True), "host", (("us", 5e6),), headline=what == "decode")
        yield Row(Host(f"first {what}, warm cache", what), "host", (("us", 2e5),), headline=what == "decode")
    yield Row(Host("import flashinfer, beyond torch", "import"), "host", (("us", 5e5),))


def _mask(causal):
    return "causal" if causal else "full"


def _ragged(requests, length, causal, targets, extra="", headline=False, **dims):
    name = f"ragged prefill {requests}x{length}{extra}, {_mask(causal)}"
    return Row(Attention(name, requests, length, length, causal=causal, **dims), "prefill", tuple(targets), headline)


def _paged(requests, length, page_size, causal, least, headline):
    name = f"paged prefill {requests}x{length}, page {page_size}, {_mask(causal)}"
    what = Attention(name, requests, length, length, page_size=page_size, causal=causal)
    ragged = f"ragged prefill {requests}x{length}, {_mask(causal)}"
    return Row(what, "prefill", ((ragged, least),), headline)
