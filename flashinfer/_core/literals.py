"""Types of arguments that are one of a few words: editors complete them and type checkers refuse others.

`checked` takes any string for them: the rule that reads an argument says which words it allows.
"""

from typing import Literal

# Order of axes in a page of a KV cache: tokens, heads, head_dim, or heads, tokens, head_dim.
KvLayout = Literal["NHD", "HND"]
PosEncodingMode = Literal["NONE", "ROPE_LLAMA", "ALIBI"]
# Keys of VARIANTS_OF in flashinfer/_core/backends.py, which says what they admit.
Backend = Literal[
    "auto", "fa2", "fa3", "cudnn", "cudnn-native", "cutlass", "trtllm-gen", "trtllm-native", "cute-dsl",
    "cute-dsl-prims", "cutile", "fmha_v2", "xqa", "cake", "cake_cute", "prims-ts", "cubin",
    "vsa_sm100_blk64", "vsa_sm100_blk128", "vsa_sm120_blk64",
    "reference", "portable", "sm80", "sm90",
]  # fmt: skip
# Of recurrent layers, beside the names that upstream allows in a place.
OwnBackend = Literal["auto", "portable", "reference", "sm90"]
# Base of log-sum-exps, and the order of their rows and heads.
LseBase = Literal["log2", "ln"]
LseLayout = Literal["NH", "HN"]
# Whether scales of blocks have rows and columns as their matrix has, or K first.
ScaleMajorMode = Literal["MN", "K"]
BitOrder = Literal["big", "little"]
FilterApplyOrder = Literal["top_k_first", "joint"]
