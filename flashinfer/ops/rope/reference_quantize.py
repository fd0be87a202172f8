"""RoPE and FP8 in torch: the rotation in float32, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.rope.reference import rotated

_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def run(problem, config, q, k, v, pos_ids, cache, q_scale, kv_scale, pages=None):
    """Rotate q and k, multiply q by q_scale, k and v by kv_scale, and write them in FP8.

    q, k, v : Heads; v may be None. pages : Pages, where keys and values are appended.
    """
    cos, sin = cache[pos_ids].chunk(2, dim=-1)
    dtype, place = _FP8[problem.out_dtype], None
    kept = torch.arange(len(pos_ids), device=pos_ids.device)
    if pages is not None:
        kept = ((pages.batch_indices >= 0) & (pages.positions >= 0)).nonzero().flatten()
        request, position = pages.batch_indices[kept], pages.positions[kept]
        page_size = k.rope_out.shape[1]
        page = pages.kv_indices[pages.kv_indptr[request] + position // page_size]
        place = page.long(), (position % page_size).long()

    def write(x, out, scale, key):
        codes = narrow.to_fp8(x.float() * scale, dtype).view(torch.uint8)
        if key and place is not None:
            out[place] = codes[kept]
        else:
            out.copy_(codes)

    for heads, scale, key in ((q, q_scale, False), (k, kv_scale, True)):
        write(rotated(heads.rope.float(), cos, sin, problem.interleave), heads.rope_out, scale, key)
        if heads.rest is not None:
            write(heads.rest, heads.rest_out, scale, key)
    if v is not None:
        write(v.rope, v.rope_out, kv_scale, True)


IMPLEMENTATION = Implementation(run)
