"""An all-reduce whose rows travel in FP8."""

from __future__ import annotations

import weakref

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import require
from flashinfer.ops import narrow
from flashinfer.ops.comm.collective import Collective
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.spoil import spoiled

SCALE_GROUP_DEFAULT = 256
_LINKS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def reset() -> None:
    """Forget what the calls before have kept of their groups."""
    _LINKS.clear()


@checked_late
def quantized_all_reduce(
    inp: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    scale_group: int = SCALE_GROUP_DEFAULT,
    block_size: int | None = None,
    num_warps: int | None = None,
    max_num_blocks: int | None = None,
    p2p_phase3: bool | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of `inp` over ranks, sent as e4m3 codes with a float32 scale for each group. A collective call.

    Each rank quantises its rows, and adds its share of them in float32 and rank order; the sums are quantised again and
    gathered, so that every rank has the same bits. Two roundings to e4m3 make an error of up to 2^-4 of a group's
    largest magnitude each. The process group carries the codes, about half the bytes of 16-bit rows.

    Parameters
    ----------
    inp : torch.Tensor
        Contiguous, bfloat16, float16 or float32, of any shape; the same on every rank.
    group : ProcessGroup
    scale_group : int
        Elements that share a scale.
    block_size, num_warps, max_num_blocks, p2p_phase3
        Of upstream's kernel. They have no effect.
    output : torch.Tensor, optional
        Receives the sum; it may be `inp`.

    Returns
    -------
    torch.Tensor
        In the shape and dtype of `inp`.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        On CPUs, a rank did not come within 10 s. On GPUs the process group's own timeout counts.

    Examples
    --------
    >>> quantized_all_reduce(torch.ones(512), torch.distributed.group.WORLD)[:2]  # one rank
    tensor([1., 1.])
    """
    floating = inp.dtype in (torch.bfloat16, torch.float16, torch.float32)
    require(floating, "inp", inp.dtype, "bfloat16, float16, float32")
    require(inp.is_contiguous(), "inp", f"strides {inp.stride()}", "a contiguous tensor")
    require(isinstance(scale_group, int) and scale_group > 0, "scale_group", scale_group, "an int of at least 1")
    output = torch.empty_like(inp) if output is None else output
    fits = output.shape == inp.shape and output.dtype == inp.dtype and output.is_contiguous()
    require(fits, "output", f"{output.dtype} {tuple(output.shape)}", f"{inp.dtype} {tuple(inp.shape)}, contiguous")
    if inp.numel() == 0:
        return output
    link = _link_of(group, inp.device)
    with spoiled(output):
        share = -(-inp.numel() // (link.world * scale_group)) * scale_group
        flat = torch.nn.functional.pad(inp.view(-1).float(), (0, share * link.world - inp.numel()))
        parts = link.all_to_all(_codes(flat.view(link.world, share), scale_group), "all-reduce")
        mine = torch.zeros(share, dtype=torch.float32, device=inp.device)
        for part in parts:
            mine = mine + _values(part[None], share, scale_group)[0]
        sums = link.all_gather(_codes(mine[None], scale_group)[0], "all-reduce")
        output.view(-1).copy_(_values(sums, share, scale_group).view(-1)[: inp.numel()])
    return output


def _link_of(group, device: torch.device) -> Collective:
    links = _LINKS.setdefault(group, {})
    if device not in links:
        links[device] = Collective(Ranks(group), device, "codes go through the process group")
    return links[device]


def _codes(x: torch.Tensor, width: int) -> torch.Tensor:
    """float32 [n, share] as bytes [n, .]: codes, and behind them scales."""
    codes, scales = narrow.quantize_fp8(x, width, torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), scales.contiguous().view(torch.uint8)), 1)


def _values(rows: torch.Tensor, share: int, width: int) -> torch.Tensor:
    codes = rows[:, :share].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, share:].contiguous().view(torch.float32)
    return (codes.unflatten(1, (-1, width)) * scales[..., None]).flatten(1)
