"""What lies between the two kernels of prefill by chunks, and the types and constants that both have.

For each chunk and head, at place p of the workspace, tokens [64] and rows in the products' dtype:

    solved [64, 64]    (1 + L)^-1 diag(beta)
    scores [64, 64]    P, the products of queries and keys with their decay
    sums               one decay a head: float32 [3, 64], sums of logarithms and inverse norms of k and q
                       one a channel: float32 [K], the chunk's sums; and rows of k, q, and k to the end, [64, K] each
"""

import triton.language as tl

from flashinfer.ops.recurrent.delta import CHUNK
from flashinfer.ops.recurrent.delta.config import power_of_two

_TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
INPUT = ("row", "token", "head")
STATE = ("slot", "head", "row", "column")


def common(problem, config) -> dict:
    """Constants of both kernels."""
    precision = "tf32x3" if problem.dtype == "fp32" else "tf32"
    constants = {"CHANNELS": problem.channels, "NORMALIZE": problem.normalize, "PRECISION": precision}
    constants |= {"STRIDE": problem.stride, "TOKENS": CHUNK, "KEYS": power_of_two(problem.key_dim)}
    return constants | {"OPERAND": _TYPES[config.operand]}


def workspace(problem, narrow: str) -> dict:
    """Dtypes of the tensors above; `narrow` is that of products. "" is one that there is not."""
    rows = narrow if problem.channels else ""
    kinds = {"solved": narrow, "scores": narrow, "sums": "fp32"}
    return kinds | {"rows_k": rows, "rows_q": rows, "rows_last": rows}
