"""Which problems the Ampere decode kernel takes, and its tiles."""

from __future__ import annotations

from flashinfer._core.target import Target
from flashinfer.ops.attention.config import SIZE, Config, refuses_everywhere
from flashinfer.ops.attention.problem import REQUESTS, Problem


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _padded(n: int) -> int:
    return max(16, _power(n))


def warps_of_columns(p: Problem) -> int:
    """Warps that share the columns of V, 128 each."""
    return max(1, _padded(p.head_dim_vo) // 128)


def refuses(p: Problem, target: Target) -> str:
    """Why the kernel does not take the problem; '' if it does."""
    why = refuses_everywhere(p)
    if why:
        return why
    if target.is_cpu:
        return "Gluon does not run in Triton's interpreter"
    if target.capability < 80:
        return f"cp.async needs compute capability 8.0, this is {target.capability / 10}"
    if p.q_dtype not in ("bf16", "fp16"):
        return f"q dtype {p.q_dtype}: it multiplies bf16 and fp16"
    if p.kv_dtype not in (p.q_dtype, "fp8e4nv", "fp8e5"):
        return f"kv dtype {p.kv_dtype} with q dtype {p.q_dtype}"
    # Queries of 512 columns take 128 registers of a thread, which leaves none for FP8's conversion.
    widest = 512 if p.rows == 16 and p.kv_dtype == p.q_dtype else 256
    for name in ("head_dim_qk", "head_dim_vo"):
        dim = getattr(p, name)
        if dim > widest or dim % (16 // SIZE[p.kv_dtype]):
            return f"{name} {dim}: it takes 16 to {widest} in steps of 16 bytes, since wider ones spill"
    if p.kv_dtype == "fp8e4nv" and target.capability < 89 and warps_of_columns(p) > 1:
        return "fp8e4nv in bit arithmetic: warps that share the columns of values convert all keys, each again"
    if p.o_dtype == "fp8e4nv" and target.capability < 89:
        return "output fp8e4nv: this chip has no conversion to it"
    if not p.aligned:
        return "rows of q, k, v or out do not start on 16 bytes"
    if p.rows > 64:
        return f"tiles of {p.rows} rows: it takes 64"
    if p.requests and (p.requests not in REQUESTS or not p.page_size or p.mask == "custom" or p.variant):
        return f"lengths of {p.requests} requests: of pages, without a user's mask or functions, {REQUESTS}"
    if p.pos_encoding == "ROPE_LLAMA":
        return "ROPE_LLAMA: keys go from shared memory to the tensor cores as they are"
    return ""


def choose(p: Problem, target: Target) -> Config:
    """Measured on one H200 with head_dim 128; above it, by arithmetic. See docs/rooms/attention-decode.md."""
    narrow = p.kv_dtype != p.q_dtype
    wide = max(p.head_dim_qk, p.head_dim_vo) > 128
    warps_m = p.rows // 16
    warps_d = warps_of_columns(p)
    # Warps along keys: 4 warps of 16 keys for tiles of 16 rows. With more rows, and with FP8, whose conversion takes
    # registers and time, 2 warps and more resident programs.
    warps_n = 4 if warps_m == 1 and not narrow else 2
    block_n = 32 if narrow else 64
    programs = 4 if narrow else 2
    if wide:
        # Up to 255 registers a thread: two programs of 4 warps take all of a multiprocessor's, as one of 8 does.
        warps_n = max(1, 4 // (warps_m * warps_d))
        block_n = 16 * warps_n
    slot_bytes = block_n * (_padded(p.head_dim_qk) + _padded(p.head_dim_vo)) * SIZE[p.kv_dtype]
    num_warps = warps_m * warps_n * warps_d
    if wide:
        programs = 2 if num_warps == 4 and 4 * slot_bytes <= target.smem else 1
    # Two resident programs, four with FP8, hide each other's latency.
    stages = max(2, min(6, target.smem // programs // slot_bytes))
    # One round of the combination takes 128 registers of each thread.
    rows = min(p.rows, 8, _power(p.group))
    splits = _power(max(1, min(16, 128 * 32 * num_warps // (rows * _padded(p.head_dim_vo)))))
    return Config(
        block_m=p.rows,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=stages,
        native_fp8=target.capability >= 89,
        combine_splits=splits,
        combine_rows=rows,
        programs_per_sm=programs,
        # Splits below 256 keys cost more in combination than they save: 1 x 4096 takes 12.3 us with 256 and 13.1 with
        # 128. Where multiprocessors are idle, 128 is better: 1 x 2048 with 2 KV heads takes 7.6 us with 256, 7.2 with
        # 128 and 8.45 with 64 (H100).
        least_split=256,
        least_alone=128,
        # Without splitting, 16 x 1024 takes 28.4 us instead of 29.6, and 12 x 1024 23.8 instead of 25.95 (H100). FP8
        # was not measured.
        whole=1024 if warps_n == 4 else 0,
        pdl=target.capability >= 90,
    )
