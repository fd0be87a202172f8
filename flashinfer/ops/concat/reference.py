"""The concatenations in torch."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.concat import Pack, Problem


def _concat(problem, k, k_nope, k_rope):
    """k [tokens, heads, nope + rope] from k_nope [tokens, heads, nope] and k_rope [tokens, 1, rope]."""
    nope = k_nope.shape[2]
    k[..., :nope] = k_nope
    k[..., nope:] = k_rope


def _pack(problem, kv, k_rope, key, value):
    """kv [tokens, heads, .] and k_rope [tokens, rope] to key [tokens, heads, nope + rope] and value, bytes of e4m3."""
    nope = key.shape[2] - k_rope.shape[1]
    rope = k_rope[:, None].expand(-1, kv.shape[1], -1)
    for out, x in ((key, torch.cat((kv[..., :nope], rope), -1)), (value, kv[..., nope:])):
        out.copy_(narrow.to_fp8(x.float(), torch.float8_e4m3fn).view(torch.uint8))


IMPLEMENTATION = Implementation({Problem: _concat, Pack: _pack})
