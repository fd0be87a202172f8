"""Which problems the Ampere decode kernel takes, and its tiles."""

from __future__ import annotations

from flashinfer._core.target import Target
from flashinfer.ops.attention.config import SIZE, Config, refuses_everywhere
from flashinfer.ops.attention.problem import Problem


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _padded(n: int) -> int:
    return max(16, _power(n))


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
    for name in ("head_dim_qk", "head_dim_vo"):
        dim = getattr(p, name)
        if dim > 128 or dim % (16 // SIZE[p.kv_dtype]):
            return f"{name} {dim}: it takes 16 to 128 in steps of 16 bytes, since an accumulator stays in registers"
    if p.o_dtype == "fp8e4nv" and target.capability < 89:
        return "output fp8e4nv: this chip has no conversion to it"
    if not p.aligned:
        return "rows of q, k, v or out do not start on 16 bytes"
    if p.rows > 64:
        return f"tiles of {p.rows} rows: it takes 64"
    if p.pos_encoding == "ROPE_LLAMA":
        return "ROPE_LLAMA: keys go from shared memory to the tensor cores as they are"
    return ""


def choose(p: Problem, target: Target) -> Config:
    """Measured on one H200 with head_dim 128; see docs/rooms/attention-decode.md."""
    narrow = p.kv_dtype != p.q_dtype
    warps_m = p.rows // 16
    # Along keys: for one row tile 4 warps of 16 keys; with more row tiles, or FP8, whose conversion takes registers and
    # time, 2 warps and more blocks on a multiprocessor.
    warps_n = 4 if warps_m == 1 and not narrow else 2
    block_n = 32 if narrow else 64
    slot_bytes = block_n * (_padded(p.head_dim_qk) + _padded(p.head_dim_vo)) * SIZE[p.kv_dtype]
    # Two blocks on a multiprocessor, four of FP8: what one waits for, the others hide.
    stages = max(2, min(6, target.smem // (4 if narrow else 2) // slot_bytes))
    num_warps = warps_m * warps_n
    # A round of the combination takes 128 registers of each thread.
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
        programs_per_sm=4 if narrow else 2,
        # Halving a split of 256 keys saves less than the combination of twice as many splits costs: 1 x 4096 takes
        # 12.3 us with it and 13.1 with 128; but 1 x 2048 with 2 KV heads, where multiprocessors are left over, 7.6 and
        # 7.2 (an H100; with 64 keys 8.45).
        least_split=256,
        least_alone=128,
        # 16 x 1024 in 28.4 us, not 29.6, and 12 x 1024 in 23.8, not 25.95 (an H100). FP8 was not tried.
        whole=1024 if warps_n == 4 else 0,
        pdl=target.capability >= 90,
    )
