"""Who the ranks are, what a token is, and what a backend may be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from flashinfer._core.checks import require
from flashinfer.comm.comm_backend import CommBackend
from flashinfer.fused_moe import QuantFormat
from flashinfer.moe_ep import formats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


@dataclass(frozen=True)
class BootstrapConfig:
    """The ranks of an expert-parallel group, and this one of them.

    Parameters
    ----------
    world_size, rank : int
        Of the group.
    process_group : ProcessGroup, optional
        The group; by default the default process group.
    device : int, optional
        The CUDA device of this rank; by default the current one.
    stream, auto_bootstrap, nccl_comm, tcp_store
        Of upstream's other transports. They have no effect here: calls go to the current stream.

    Raises
    ------
    ValueError
        A rank outside the group, or a negative device.
    """

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: int | None = field(default=None, kw_only=True)
    nccl_comm: int | None = None
    process_group: torch.distributed.ProcessGroup | None = field(default=None, compare=False, hash=False)
    tcp_store: TCPStore | None = None

    def __post_init__(self):
        for name in ("world_size", "rank", "device"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole or name == "device" and value is None, name, repr(value), "an int")
        require(self.world_size > 0, "world_size", self.world_size, "at least 1")
        require(0 <= self.rank < self.world_size, "rank", self.rank, f"0 to {self.world_size - 1}")
        require(self.device is None or self.device >= 0, "device", self.device, "None, or at least 0")


@dataclass(frozen=True)
class MoEEpCommParams:
    """What travels: the same on every rank.

    Parameters
    ----------
    num_experts : int
        On all ranks together; a multiple of their number. Expert e is on rank ``e // (num_experts / ranks)``.
    top_k : int
        Experts of a token.
    max_tokens_per_rank : int
        The most tokens that a rank dispatches in one call.
    hidden_size : int
        Elements of a token's row.
    dtype : torch.dtype, optional
        Of rows that are not quantised, and of what experts hand to the combine: bfloat16 (the default), float16 or
        float32.
    dispatch_format : QuantFormat, optional
        What rows travel as: None, BF16 or FP16 as they are; DeepSeekFp8 (e4m3 and a float32 scale for each 128
        columns), MXFP8, NVFP4, MXFP4 or FP8PerTensor. `dispatch` quantises rows that are not.
    invalid_expert_id : int
        The id, outside 0 to num_experts - 1, of received rows that are no token's.

    Raises
    ------
    ValueError
        A field other than the above.

    Examples
    --------
    >>> from flashinfer.fused_moe import QuantFormat
    >>> from flashinfer.moe_ep import MoEEpCommParams
    >>> params = MoEEpCommParams(8, 2, 16, 256, dispatch_format=QuantFormat.DeepSeekFp8)
    >>> params.dispatch_bytes_per_token
    264
    """

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: QuantFormat | None = None
    invalid_expert_id: int = -1

    def __post_init__(self):
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value > 0, name, value, "an int of at least 1")
        require(self.top_k <= self.num_experts, "top_k", self.top_k, f"at most {self.num_experts}, the experts")
        outside = not 0 <= self.invalid_expert_id < self.num_experts
        require(outside, "invalid_expert_id", self.invalid_expert_id, f"outside 0 to {self.num_experts - 1}")
        allowed = (torch.bfloat16, torch.float16, torch.float32)
        require(self.token_dtype in allowed, "dtype", self.dtype, "bfloat16, float16, float32")
        number_format = self.dispatch_format
        if number_format is not None:
            known = isinstance(number_format, QuantFormat) and number_format.name in formats.FORMATS
            require(known, "dispatch_format", number_format, "None, or a QuantFormat of " + ", ".join(formats.FORMATS))

    @property
    def token_dtype(self) -> torch.dtype:
        """`dtype`, or bfloat16."""
        return torch.bfloat16 if self.dtype is None else self.dtype

    @property
    def dispatch_bytes_per_token(self) -> int:
        """Bytes of a token's row as it travels, with its scales."""
        if self.dispatch_format is None:
            return self.hidden_size * self.token_dtype.itemsize
        return formats.FORMATS[self.dispatch_format.name].bytes_of(self.hidden_size)


@dataclass
class NVLinkOneSidedConfig:
    """Options of `NVLinkOneSidedAlltoAll`.

    Attributes
    ----------
    backend_name : str
        "nvlink_one_sided".
    extra_payload_bytes_per_token : int
        Bytes of room beside the row, its scales, ids and weights.
    eplb_stats_num_experts : int
        Experts whose statistics a dispatch gathers from all ranks.
    enable_rank_mask : bool
        Only False: all ranks take part.
    use_low_precision_combine : bool
        Round rows to e4m3 before a combine adds them.
    comm_backend : CommBackend, optional
        The ranks, in place of the bootstrap's process group.
    """

    backend_name: str = "nvlink_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: CommBackend | None = None
