"""RoPE in torch: angles in float64, the rotation in float32, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.rope import Problem, Quantize, Video
from flashinfer.ops.rope.frequencies import radians

_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def run(problem, config, *args):
    _RUN[type(problem)](problem, *args)


def rotate_heads(problem, q, k, q_out, k_out, positions, offsets, source):
    """Rotate q into q_out and k into k_out; all are [tokens, heads, head_dim].

    positions : [tokens]; or, where offsets [batch] is given, the indptr [batch + 1] of a ragged batch whose request i
    begins at position offsets[i].
    source : cosines and sines [positions, rotary_dim], or Frequencies.
    """
    if problem.ragged:
        token = torch.arange(len(q), dtype=torch.int32, device=q.device)
        request = torch.searchsorted(positions[1:], token, right=True)
        positions = token + (offsets - positions[:-1])[request]
    if problem.cached:
        cos, sin = source[positions].chunk(2, dim=-1)
    else:
        angle = positions[:, None] * radians(source, q.device)
        cos, sin = angle.cos().float(), angle.sin().float()
    for x, out in ((q, q_out), (k, k_out)):
        out[..., : problem.rotary_dim] = _rotated(x[..., : problem.rotary_dim], cos, sin, problem.interleave)
        if not problem.inplace:
            out[..., problem.rotary_dim :] = x[..., problem.rotary_dim :]


def _rotated(x, cos, sin, interleave: bool) -> torch.Tensor:
    """x [tokens, heads, 2 * pairs] rotated by cos and sin [tokens, pairs]; float32."""
    # The two of a pair lie along `axis`.
    axis, shape = (-1, (-1, 2)) if interleave else (-2, (2, -1))
    pairs = x.unflatten(-1, shape)
    cos, sin = cos[:, None].unsqueeze(axis), torch.stack((-sin, sin), axis)[:, None]
    return (pairs * cos + pairs.flip(axis) * sin).flatten(-2)


def quantize(problem, q, k, v, pos_ids, cache, q_scale, kv_scale, pages=None):
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
        write(_rotated(heads.rope.float(), cos, sin, problem.interleave), heads.rope_out, scale, key)
        if heads.rest is not None:
            write(heads.rest, heads.rest_out, scale, key)
    if v is not None:
        write(v.rope, v.rope_out, kv_scale, True)


def video(problem, rows, weights, outputs, space, axes, eps, scales):
    """Rows [tokens, n] of queries, keys and values to `outputs`, [tokens, heads, head_dim] each.

    weights : of the norms of queries and keys, or None. space : Space; videos follow one another. axes : Axes.
    scales : of queries and keys, and of values, where the problem has another formatat.
    """
    at = torch.arange(len(rows), device=rows.device)
    width, height = at % space.width, at // space.width % space.height
    frame = at // (space.width * space.height) % space.frames
    pairs = space.frame_pairs, space.height_pairs, problem.head_dim // 2 - space.frame_pairs - space.height_pairs
    each = torch.tensor(pairs, dtype=torch.int64, device=rows.device)
    place = torch.stack((frame, height, width), 1).repeat_interleave(each, 1)
    angle = place * radians(axes, rows.device)
    cos, sin = angle.cos().float(), angle.sin().float()
    parts = rows.float().split([out.shape[1] * problem.head_dim for out in outputs], 1)
    for x, weight, out, scale in zip(parts, (*weights, None), outputs, (scales[0], *scales)):
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * weight.float()
        x = x.view(out.shape)
        x = x if out is outputs[2] else _rotated(x, cos, sin, problem.interleave)
        out.copy_(narrow.to_fp8(x * scale, torch.float8_e4m3fn) if problem.out else x)


_RUN = {Problem: rotate_heads, Quantize: quantize, Video: video}

IMPLEMENTATION = Implementation(run)
