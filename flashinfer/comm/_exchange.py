"""What the interfaces of the MoE all-to-all share: checks, Problems, and the spaces behind workspace tensors."""

from __future__ import annotations

import weakref

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, same_device
from flashinfer._core.sizes import power_of_two
from flashinfer.comm._workspaces import own_device
from flashinfer.comm.comm_backend import CommBackend, ranks_named
from flashinfer.comm.mapping import Mapping
from flashinfer.ops import narrow
from flashinfer.ops.comm import alltoall as room
from flashinfer.ops.comm.alltoall import config
from flashinfer.ops.comm.alltoall.space import ALIGNMENT, Space, aligned
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.spoil import spoiled

# The space behind a workspace tensor, by its address; it lives as long as the tensor, which holds it.
_SPACES: weakref.WeakValueDictionary[int, Space] = weakref.WeakValueDictionary()
# The workspaces of layers, by ranks and sizes; each lives as long as a layer that has it.
_SHARED: weakref.WeakValueDictionary[tuple, Shared] = weakref.WeakValueDictionary()
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def only(name: str, value, allowed) -> None:
    require(value == allowed, name, repr(value), repr(allowed))


def space_of(workspace: torch.Tensor, ep_rank: int, ep_size: int) -> Space:
    space = _SPACES.get(workspace.data_ptr())
    if space is None:
        raise ValueError("workspace: got a tensor of another origin; allowed: one that MoeAlltoAll.get_workspace gave")
    require(ep_size == space.ranks.size, "ep_size", ep_size, f"{space.ranks.size}, the ranks of the workspace")
    require(ep_rank == space.ranks.rank, "ep_rank", ep_rank, f"{space.ranks.rank}, the rank of the workspace")
    space.link.check()
    return space


@checked_late
def dispatch_in(
    space: Space, experts, payloads, most: int, top_k: int, num_experts: int, first: int = 0, local_stats=None
):  # fmt: skip
    """What arrived of each payload, and where rows to combine go. first : bytes of the space to leave before them.

    local_stats : int32 [n]; every rank's are then `gathered_stats` of the space.
    """
    require(experts.dtype == torch.int32, "token_selected_experts", experts.dtype, "int32")
    fits = experts.dim() == 2 and experts.shape[1] == top_k and experts.is_contiguous()
    require(fits, "token_selected_experts", tuple(experts.shape), f"[tokens, {top_k}], contiguous")
    named = f"{space.device}, the workspace's"
    require(experts.device == space.device, "token_selected_experts", experts.device, named)
    world, tokens = space.ranks.size, len(experts)
    require(0 < most <= space.most, "runtime_max_tokens_per_rank", most, f"1 to {space.most}, as allocated")
    require(tokens <= most, "token_selected_experts", f"{tokens} tokens", f"at most {most}, the runtime maximum")
    require(num_experts % world == 0, "num_experts", num_experts, f"a multiple of {world}, the ranks")
    count = len(payloads)
    require(0 < count <= room.MOST_PAYLOADS, "input_payloads", f"{count} tensors", f"1 to {room.MOST_PAYLOADS}")
    for i, payload in enumerate(payloads):
        fits = payload.dim() > 1 and len(payload) == tokens and payload.is_contiguous()
        require(fits, f"input_payloads[{i}]", tuple(payload.shape), f"[{tokens}, ...], contiguous")
        same_device(token_selected_experts=experts, **{f"input_payloads[{i}]": payload})
    rows = [payload.shape[1:].numel() * payload.element_size() for payload in payloads]
    stats = _stats_of(space, experts, local_stats)
    # A call without statistics leaves their place, so that payloads are where they are on the other ranks.
    kept = first + aligned(4 * world * space.stats_experts)
    places, at = space.arrange(rows, most, kept)
    problem = room.Dispatch(
        transport=space.link.transport,
        world=world,
        choices=power_of_two(top_k),
        units="".join(str(_unit(row, payload)) for row, payload in zip(rows, payloads, strict=True)),
        block=config.block(max(rows) // 4),
    )
    backend = "portable" if problem.transport == "peer" else "reference"
    choice = room.moe_dispatch(problem, space.device, backend)
    received = [
        space.view(p, (world, most, *payload.shape[1:]), payload.dtype)
        for p, payload in zip(places, payloads, strict=True)
    ]
    with spoiled(*received, *(stats or ())[1:]):
        choice.run(space, experts, payloads, places, most, num_experts // world, stats)
    return received, at


def _stats_of(space: Space, experts, local_stats):
    """This rank's statistics, and the place of the space for every rank's; None where there are none."""
    count = space.stats_experts
    if local_stats is None:
        return None
    require(count > 0, "eplb_local_stats", "a tensor", "None, for a workspace without eplb_stats_num_experts")
    fits = tuple(local_stats.shape) == (count,) and local_stats.dtype == torch.int32 and local_stats.is_contiguous()
    require(fits, "eplb_local_stats", f"{local_stats.dtype} {tuple(local_stats.shape)}", f"int32 [{count}], contiguous")
    same_device(token_selected_experts=experts, eplb_local_stats=local_stats)
    return local_stats, space.view(space.first, (space.ranks.size, count), torch.int32)


def gathered_stats(space: Space) -> torch.Tensor:
    """int32 [ranks, n]: the statistics of the last dispatch that had some."""
    return space.view(space.first, (space.ranks.size, space.stats_experts), torch.int32)


def _unit(row: int, payload: torch.Tensor) -> int:
    """The power of two, up to 4, of the bytes that divide rows and address of a payload."""
    both = row | payload.data_ptr() | 16
    return (both & -both).bit_length() - 1


def sanitize_in(space: Space, ids: torch.Tensor, invalid: int) -> None:
    fits = ids.dim() == 3 and ids.dtype == torch.int32 and ids.is_contiguous()
    require(fits, "expert_ids", f"{ids.dtype} {tuple(ids.shape)}", "int32 [ep_size, tokens, top_k], contiguous")
    if ids.numel() == 0:
        return
    if space.link.transport == "peer":
        from flashinfer.ops.comm.alltoall import portable

        portable.sanitize(ids, space.counts, ids.shape[1], invalid)
    else:
        row = torch.arange(ids.shape[1], device=ids.device)
        ids.masked_fill_((row >= space.counts[:, None])[..., None], invalid)


@checked_late
def combine_in(
    space: Space, payload, tokens: int, most: int, at: int, in_place: bool, dtype=None, output=None, narrowed=False
):  # fmt: skip
    """narrowed : rows are rounded to e4m3 before they are added."""
    world = space.ranks.size
    fits = payload.dim() == 3 and payload.shape[:2] == (world, most) and payload.is_contiguous()
    require_fit("payload", payload, fits, f"[{world}, {most}, hidden], contiguous", *_OUT_DTYPES)
    dtype = dtype or payload.dtype if output is None else dtype or output.dtype
    require(dtype in _OUT_DTYPES, "output_dtype", dtype, "bfloat16, float16, float32")
    require(0 <= tokens <= most, "local_num_tokens", tokens, f"0 to {most}, the runtime maximum")
    hidden = payload.shape[2]
    output = payload.new_empty(tokens, hidden, dtype=dtype) if output is None else output
    fits = output.shape == (tokens, hidden) and output.is_contiguous() and output.dtype == dtype
    require(fits, "output", f"{output.dtype} {tuple(output.shape)}", f"{dtype} {(tokens, hidden)}, contiguous")
    same_device(payload=payload, output=output)
    require(payload.device == space.device, "payload", payload.device, f"{space.device}, the workspace's")
    space.check_room(at + payload.nbytes)
    there = space.view(at, payload.shape, payload.dtype)
    if in_place:
        same = payload.data_ptr() == there.data_ptr()
        require(same, "payload_in_workspace", True, "False: payload is not at combine_payload_offset")
    if narrowed:
        payload = narrow.to_fp8(payload.float(), torch.float8_e4m3fn).to(payload.dtype)
    problem = room.Combine(
        transport=space.link.transport,
        world=world,
        dtype=dtype_name(payload.dtype),
        out_dtype=dtype_name(dtype),
        block=config.block(hidden),
        staged=narrowed or not in_place,
        aligned=hidden * payload.element_size() % 16 == 0
        and hidden * output.element_size() % 16 == 0
        and is_aligned(payload, output),
    )
    backend = "portable" if problem.transport == "peer" else "reference"
    choice = room.moe_combine(problem, space.device, backend)
    with spoiled(output):
        choice.run(space, payload, output, at, most)
    return output


def ranks_of_experts(backend: CommBackend | None, ep_rank: int, ep_size: int) -> Ranks:
    return ranks_named(backend, ep_size, ep_rank, "ep_size", "ep_rank")


def check_mapping(mapping: Mapping, ep_rank: int, ep_size: int) -> None:
    require(mapping.moe_ep_rank == ep_rank, "ep_rank", ep_rank, f"{mapping.moe_ep_rank}, the mapping's")
    require(mapping.moe_ep_size == ep_size, "ep_size", ep_size, f"{mapping.moe_ep_size}, the mapping's")


def metainfo(space: Space, most: int) -> torch.Tensor:
    """int64 [3] on the CPU: the offset of the counts of arrived rows, the most tokens, experts with statistics."""
    return torch.tensor([space.counts_at, most, space.stats_experts], dtype=torch.int64, device="cpu")


def allocate(ranks: Ranks, nbytes: int, most: int, stats_experts: int = 0) -> dict:
    space = Space(ranks, nbytes, most, own_device())
    space.stats_experts = stats_experts
    whole = space.view(space.counts_at, (ALIGNMENT + nbytes,), torch.uint8)
    workspace = whole[None].expand(ranks.size, -1)
    setattr(workspace, "space", space)
    _SPACES[workspace.data_ptr()] = space
    return {
        "workspace": workspace, "metainfo": metainfo(space, most), "max_num_tokens": most,
        "workspace_size_per_rank": nbytes, "ep_rank": ranks.rank, "ep_size": ranks.size,
    }  # fmt: skip


class Shared:
    """A workspace of layers that take turns: one dispatches and combines, then another.

    Attributes
    ----------
    memory : tuple or None
        The space, the workspace and its metainfo; None while they are given up.
    layers : WeakSet
        Who has it.
    opened : tuple or None
        The last dispatch, if it waits for its combine: a weakref to the layer, then what the layer keeps of it.
    """

    def __init__(self, nbytes: int, most: int, stats_experts: int):
        self.memory: tuple[Space, torch.Tensor, torch.Tensor] | None = None
        self._sizes, self._key = (nbytes, most, stats_experts), ()
        self.layers: weakref.WeakSet = weakref.WeakSet()
        self.opened: tuple | None = None

    def open(self, ranks: Ranks) -> None:
        made = allocate(ranks, *self._sizes)
        workspace = made["workspace"]
        self.memory = _SPACES[workspace.data_ptr()], workspace, made["metainfo"]
        self._key = _key(ranks, self._sizes)
        _SHARED[self._key] = self

    def close(self) -> None:
        if _SHARED.get(self._key) is self:
            del _SHARED[self._key]
        memory, self.memory, self.opened = self.memory, None, None
        if memory is not None:
            memory[0].close()


def _key(ranks: Ranks, sizes: tuple) -> tuple:
    # `whose` is unique as long as the space lives, since the space holds the ranks.
    return ranks.whose, ranks.rank, ranks.size, own_device(), *sizes


def shared(ranks: Ranks, nbytes: int, most: int, stats_experts: int = 0) -> Shared:
    """The workspace that layers of these ranks and sizes have, or a new one. A collective call."""
    found = _SHARED.get(_key(ranks, (nbytes, most, stats_experts)))
    # One rank's layers may have been collected while another's still live: all have it, or none uses it.
    if all(ranks.gather(found is not None)) and found is not None:
        return found
    made = Shared(nbytes, most, stats_experts)
    made.open(ranks)
    return made
