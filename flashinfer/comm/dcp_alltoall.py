"""All-to-all of decode context parallelism: partial attention results go to the ranks whose heads they are."""

from __future__ import annotations

import weakref

import torch

from flashinfer._core.arguments import checked, checked_late
from flashinfer._core.checks import check_spans, require, same_device
from flashinfer.comm._workspaces import own_device
from flashinfer.comm.comm_backend import TorchDistBackend, ranks_named
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.ops.comm import alltoall as room
from flashinfer.ops.comm.alltoall import config
from flashinfer.ops.comm.capability import connect
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.spoil import spoiled
from flashinfer.ops.comm.symmetric import Link, header

# The link behind a workspace tensor, by its address; it lives as long as the tensor, which holds it.
_LINKS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def decode_cp_a2a_allocate_mnnvl_workspace(
    mapping: Mapping, *, mnnvl_config: MnnvlConfig | None = None
) -> torch.Tensor:
    """Allocate what `decode_cp_a2a_alltoall` exchanges through. A collective call.

    Parameters
    ----------
    mapping : Mapping
        Its cp_rank and cp_size are the ranks that exchange.
    mnnvl_config : MnnvlConfig, optional
        Its comm_backend has these ranks, or all ranks of the mapping, and is split then. By default the default process
        group.

    Returns
    -------
    torch.Tensor
        int64 [cp_size, words]. Row cp_rank is this rank's memory; peers' are not mapped into a tensor, and the other
        rows show this rank's again. It serves rows of any number, in rounds of 64 KiB.

    Raises
    ------
    ValueError
        A group that has not got these ranks.
    """
    backend = None if mnnvl_config is None else mnnvl_config.comm_backend
    if backend is None and mapping.cp_size > 1:
        backend = TorchDistBackend()
    if backend is not None and backend.Get_size() != mapping.cp_size:
        backend = backend.Split(mapping.pp_rank * mapping.tp_size + mapping.tp_rank, mapping.cp_rank)
    ranks = ranks_named(backend, mapping.cp_size, mapping.cp_rank, "mapping.cp_size", "mapping.cp_rank")
    return adopt(blocks_link(ranks, own_device()))


def adopt(link) -> torch.Tensor:
    """A workspace tensor that stands for a link, int64 [ranks, words]."""
    own = link.memory.own if isinstance(link, Link) else torch.zeros(8, dtype=torch.uint8, device=link.device)
    workspace = own.view(torch.int64)[None].expand(link.world, -1)
    setattr(workspace, "link", link)
    _LINKS[workspace.data_ptr()] = link
    return workspace


@checked
def decode_cp_a2a_workspace_size(cp_size: int) -> int:
    """Bytes of a workspace on each rank.

    Parameters
    ----------
    cp_size : int
        Ranks of the group.

    Returns
    -------
    int
        Bytes on each rank.

    Raises
    ------
    ValueError
        An argument other than the above.

    Examples
    --------
    >>> from flashinfer.comm import decode_cp_a2a_workspace_size
    >>> decode_cp_a2a_workspace_size(2)
    33587200
    """
    require(cp_size > 0, "cp_size", cp_size, "at least 1")
    return header(cp_size, config.ROUND)


def decode_cp_a2a_init_workspace(workspace: torch.Tensor, cp_rank: int, cp_size: int) -> None:
    """Check a workspace. It is ready when it is allocated, and nothing is written: ranks need no barrier behind this.

    Parameters
    ----------
    workspace : torch.Tensor
        Of `decode_cp_a2a_allocate_mnnvl_workspace`.
    cp_rank, cp_size : int
        Those of its mapping.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    _link_of(workspace, cp_rank, cp_size)


def _link_of(workspace: torch.Tensor, cp_rank: int, cp_size: int):
    link = _LINKS.get(workspace.data_ptr())
    named = "one of decode_cp_a2a_allocate_mnnvl_workspace"
    if link is None:
        raise ValueError(f"workspace: got a tensor of another origin; allowed: {named}")
    require(cp_size == link.world, "cp_size", cp_size, f"{link.world}, as allocated")
    require(cp_rank == link.rank, "cp_rank", cp_rank, f"{link.rank}, as allocated")
    link.check()
    return link


@checked_late
def decode_cp_a2a_alltoall(
    partial_o: torch.Tensor,
    softmax_stats: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    enable_pdl: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send ``partial_o[..., peer, :]`` and ``softmax_stats[..., peer, :]`` to each peer. A collective call.

    Parameters
    ----------
    partial_o : torch.Tensor
        [..., cp_size, D], float16, bfloat16 or float32, contiguous.
    softmax_stats : torch.Tensor
        [..., cp_size, S], float32, contiguous; the same leading dimensions.
    workspace, cp_rank, cp_size
        As in `decode_cp_a2a_init_workspace`.
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.
    out : (torch.Tensor, torch.Tensor), optional
        Receive the results; not the inputs themselves.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        In the shapes and dtypes of the inputs: [..., peer, :] is what that peer had for this rank.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline: in this call on CPUs, in an earlier one on GPUs. The results of the
        call that failed are NaN.
    """
    link = _link_of(workspace, cp_rank, cp_size)
    floating = partial_o.dtype in (torch.float16, torch.bfloat16, torch.float32)
    require(floating, "partial_o", partial_o.dtype, "float16, bfloat16, float32")
    require(softmax_stats.dtype == torch.float32, "softmax_stats", softmax_stats.dtype, "float32")
    named = {"partial_o": partial_o, "softmax_stats": softmax_stats}
    for name, tensor in named.items():
        fits = tensor.dim() >= 2 and tensor.shape[-2] == cp_size and tensor.is_contiguous()
        require(fits, name, tuple(tensor.shape), f"[..., {cp_size}, n], contiguous")
    same = partial_o.shape[:-1] == softmax_stats.shape[:-1]
    require(same, "softmax_stats", tuple(softmax_stats.shape), f"{tuple(partial_o.shape[:-1])} and a last dimension")
    if out is None:
        out = torch.empty_like(partial_o), torch.empty_like(softmax_stats)
    require(len(out) == 2, "out", f"{len(out)} tensors", "two")
    out = out[0], out[1]
    for (name, tensor), result in zip(named.items(), out, strict=True):
        fits = result.shape == tensor.shape and result.dtype == tensor.dtype and result.is_contiguous()
        require(fits, "out", f"{result.dtype} {tuple(result.shape)}", f"as {name}, contiguous")
    check_spans((("out[0]", out[0]), ("out[1]", out[1])), named.items(), apart=("partial_o", "softmax_stats"))
    same_device(**named, out=out[0])
    same_device(partial_o=partial_o, out=out[1])
    require(partial_o.device == link.device, "partial_o", partial_o.device, f"{link.device}, the workspace's")
    if partial_o.numel() == 0 and softmax_stats.numel() == 0:
        return out
    given = [t.view(-1, cp_size, t.shape[-1]) for t in (partial_o, softmax_stats)]
    exchange_blocks(link, given, [t.view(-1, cp_size, t.shape[-1]) for t in out])
    return out


def blocks_link(ranks: Ranks, device: torch.device):
    """What `exchange_blocks` exchanges through. A collective call."""
    return connect(ranks, config.ROUND, device)[0]


def exchange_blocks(link, given, outs):
    """Row [i, r] of two tensors [rows, world, n] goes to rank r, as row [i, this rank] of `outs`. Returns `outs`."""
    link.check()
    rows = [t.shape[-1] * t.element_size() for t in given]
    require(sum(rows) <= config.ROUND, "partial_o", f"rows of {sum(rows)} bytes with their statistics",
            f"at most {config.ROUND}")  # fmt: skip
    # The second part of a row lies behind the first, and the next row behind both.
    both = rows[0] | rows[1]
    units = [both | t.data_ptr() | o.data_ptr() | 16 for t, o in zip(given, outs, strict=True)]
    problem = room.Blocks(
        transport=link.transport,
        world=link.world,
        units="".join(str((x & -x).bit_length() - 1) for x in units),
        block=config.block(max(rows) // 4),
    )
    choice = room.alltoall(problem, given[0].device, "portable" if link.transport == "peer" else "reference")
    with spoiled(*outs):
        choice.run(link, given, outs)
    return outs
