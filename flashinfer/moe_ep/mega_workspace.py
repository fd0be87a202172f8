"""The memory of calls of a layer over ranks: what moves the tokens, and what keeps its address from call to call."""

from __future__ import annotations

import weakref

import torch

from flashinfer.moe_ep.communication import NVLinkOneSidedAlltoAll
from flashinfer.moe_ep.config import BootstrapConfig, MoEEpCommParams


def check_not_captured(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("MoEEpMegaLayer: memory is made before a graph is captured, by the same calls on every rank")


class Buffers:
    """What keeps its address from call to call, made at its first use. Layers of one workspace have one of these.

    made : by name and dtype. owner : the layer that has staged last.
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows, self.device = rows, device
        self.made: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.owner: weakref.ref | None = None

    def get(self, name: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns]."""
        if (name, dtype) not in self.made:
            check_not_captured(self.device)
            self.made[name, dtype] = torch.empty(self.rows, columns, dtype=dtype, device=self.device)
        return self.made[name, dtype]


# {(address of a workspace, sizes): its buffers}
_POOL: weakref.WeakValueDictionary[tuple, Buffers] = weakref.WeakValueDictionary()


class MoEEpMegaWorkspace:
    """Memory for calls of up to so many tokens a rank: what `MoEEpMegaLayer.create_workspace` returns.

    Parameters
    ----------
    max_tokens_per_rank : int
        The most tokens of a rank in one call.
    ep : NVLinkOneSidedAlltoAll
        What moves the tokens.
    buffers
        Of results and of staged inputs.
    """

    def __init__(self, max_tokens_per_rank: int, ep: NVLinkOneSidedAlltoAll, buffers: Buffers):
        self.max_tokens_per_rank, self.ep, self.buffers = max_tokens_per_rank, ep, buffers
        self.is_destroyed = False

    def destroy(self) -> None:
        """Free the memory; once is enough. On every rank, after the calls and graphs that use it."""
        if not self.is_destroyed:
            self.is_destroyed = True
            self.ep.destroy()


def made(bootstrap: BootstrapConfig, params: MoEEpCommParams, device: torch.device) -> MoEEpMegaWorkspace:
    """A workspace for calls of these sizes. A collective call."""
    check_not_captured(device)
    ep, most = NVLinkOneSidedAlltoAll(bootstrap, params), params.max_tokens_per_rank
    key = (ep.alltoall.workspace.data_ptr(), device, most, params.hidden_size, params.top_k, params.dispatch_format)
    return MoEEpMegaWorkspace(most, ep, _POOL.setdefault(key, Buffers(most, device)))
