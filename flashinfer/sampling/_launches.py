"""The launches of draws, which a trace sees as one op each."""

from __future__ import annotations

import torch

from flashinfer._core.checks import dtype_name, is_aligned, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.ops import sampling as room
from flashinfer.sampling.arguments import given, kind_of, place_of, randomness_of


@custom_op("flashinfer::sampling", mutates_args=("samples", "valid"))
def draw(
    x: torch.Tensor, source: str, min_p: float | None, min_ps: torch.Tensor | None, numbers: list[int],
    seeds: torch.Tensor | None, offsets: torch.Tensor | None, indices: torch.Tensor | None, samples: torch.Tensor,
    valid: torch.Tensor,
) -> None:  # fmt: skip
    """`numbers` are seed and offset, where they are not in tensors."""
    same_device(probs=x, min_p=min_ps)
    if not len(samples):
        return
    x = rows_of(x)
    problem = room.Draw(
        source,
        dtype_name(x.dtype),
        kind_of(min_p, min_ps),
        place_of(seeds),
        place_of(offsets),
        "" if indices is None else dtype_name(indices.dtype),
        dtype_name(samples.dtype),
        is_aligned(x),
    )
    drawn = randomness_of(numbers, seeds, offsets)
    room.draw(problem, x.device).run(x, given(min_p, min_ps), drawn, indices, samples, valid)


@custom_op("flashinfer::prefix_sampling", mutates_args=("samples", "valid"))
def draw_prefix(
    x: torch.Tensor, ordered: str, top_k: int | None, top_ks: torch.Tensor | None, top_p: float | None,
    top_ps: torch.Tensor | None, numbers: list[int], seeds: torch.Tensor | None, offsets: torch.Tensor | None,
    indices: torch.Tensor | None, samples: torch.Tensor, valid: torch.Tensor,
) -> None:  # fmt: skip
    """`ordered` is the source, and the order of the filters behind it; `numbers` as in `draw`."""
    same_device(probs=x, top_k=top_ks, top_p=top_ps)
    if not len(samples):
        return
    x = rows_of(x)
    source, _, order = ordered.partition(" ")
    problem = room.Prefix(
        "draw",
        source,
        dtype_name(x.dtype),
        kind_of(top_k, top_ks),
        kind_of(top_p, top_ps),
        order == "top_k_first",
        place_of(seeds),
        place_of(offsets),
        "" if indices is None else dtype_name(indices.dtype),
        dtype_name(samples.dtype),
        is_aligned(x),
    )
    k, p, drawn = given(top_k, top_ks), given(top_p, top_ps), randomness_of(numbers, seeds, offsets)
    room.prefix(problem, x.device).run(x, k, p, drawn, indices, samples, valid)
