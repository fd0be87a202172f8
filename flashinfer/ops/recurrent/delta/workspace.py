"""What lies between the two kernels of prefill by chunks, and the types and constants that both have.

For each chunk and head, at place p of the workspace, tokens [64] and rows in the products' dtype:

    solved [64, 64]    (1 + L)^-1 diag(beta)
    scores [64, 64]    P, the products of queries and keys with their decay
    factors            one decay a head: float32 [4, 64], what multiplies products of keys and of queries with the state
                       before the chunk (decay, norm, scale), and corrections on their way to its end (decay, norm
                       of the key); and the decay of the whole chunk, 64 times. Finite for tokens outside, too
                       one a channel: float32 [K], the decay of the whole chunk; and rows of k, q, and k to the end,
                       [64, K] each, which have their decays, norms and scale

Both matrices are whole: 0 above the diagonal.
"""

import triton.language as tl

from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent.delta import CHUNK

_TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
INPUT = ("row", "token", "head")
STATE = ("slot", "head", "row", "column")


def common(problem, config) -> dict:
    """Constants of both kernels."""
    precision = "tf32x3" if problem.dtype == "fp32" else "tf32"
    constants = {"CHANNELS": problem.channels, "PRECISION": precision}
    constants |= {"STRIDE": problem.stride, "TOKENS": CHUNK, "KEYS": power_of_two(problem.key_dim, 16)}
    return constants | {"OPERAND": _TYPES[config.operand]}


def workspace(problem, narrow: str) -> dict:
    """Dtypes of the tensors above; `narrow` is that of products. "" is one that there is not."""
    rows = narrow if problem.channels else ""
    kinds = {"solved": narrow, "scores": narrow, "factors": "fp32"}
    return kinds | {"rows_k": rows, "rows_q": rows, "rows_last": rows}
