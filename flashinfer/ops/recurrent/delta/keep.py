"""What a verification keeps of a token, from which a later call makes the state of those that were accepted.

"replay": key and value as they came, the logarithm of the decay, and beta. "corrections": beta (v - u) in float32, and
key and gate as they came. Operands: `Kept` of operands.py.
"""

import triton
import triton.language as tl


@triton.jit
def keep_token(
    kept, kept_by, slot, t, head, kh, block, row, column, in_rows, in_columns, value, key, gate, log, beta,
    correction, of,
):  # fmt: skip
    """Token t of a slot, by all programs of a head: each has some rows of the value, and the first has the rest."""
    fits = t < of.kept
    one = fits & (block == 0)
    place = head.to(tl.int64) * of.kept + t
    at_v = kept.v + slot * kept_by.v + place * of.value_dim + row
    if kept.KIND == "replay":
        tl.store(at_v, value.to(kept.v.dtype.element_ty), in_rows & fits)
        tl.store(kept.gate + slot * kept_by.gate + place, log, one)
        tl.store(kept.beta + slot * kept_by.beta + place, beta, one)
        one &= kh * of.k_group == head
        at_k = kept.k + slot * kept_by.k + (kh.to(tl.int64) * of.kept + t) * of.key_dim + column
        tl.store(at_k, key.to(kept.k.dtype.element_ty), in_columns & one)
    else:
        tl.store(at_v, correction, in_rows & fits)
        at_k = kept.k + slot * kept_by.k + place * 2 * of.key_dim + column
        tl.store(at_k, key.to(kept.k.dtype.element_ty), in_columns & one)
        tl.store(at_k + of.key_dim, gate.to(kept.k.dtype.element_ty), in_columns & one)
