"""All-reduce, all-gather and reduce-scatter between GPUs without NVLink, by upstream's names. The exchange is that of
`flashinfer.comm.allreduce_fusion`: its flags need no atomic operation on a link."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashinfer._core.checks import require
from flashinfer.comm._workspaces import TRTLLMAllReduceFusionWorkspace, own_device
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.comm_backend import TorchDistBackend
from flashinfer.comm.dcp_alltoall import blocks_link, exchange_blocks
from flashinfer.comm.pcie_ipc_profile import (
    PROFILES,
    PcieIpcProfileDecision,
    PcieIpcRankTopology,
    probe_pcie_ipc_rank_topology,
    resolve_pcie_ipc_profile,
)
from flashinfer.comm.pcie_ipc_tuning import (
    MOST_BLOCKS,
    PcieIpcLaunchConfig,
    PcieIpcVariant,
    default_cache_path,
    get_pcie_ipc_all_gather_launch_config,
    get_pcie_ipc_launch_config,
    get_pcie_ipc_reduce_scatter_launch_config,
)
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern
from flashinfer.ops.comm.meeting import Ranks

_DTYPES = (torch.bfloat16, torch.float16)
# Bytes of a row that blocks are cut into.
_ROW = 2048


class PcieIpcAllReduceWorkspace:
    """What the collectives of one group and one stream exchange through. A collective constructor.

    Peers' memory is used where a probe finds that it works, else the process group carries the rows. Waits end by a
    deadline, as those of `flashinfer.comm.AllReduceFusionWorkspace` do.

    Parameters
    ----------
    group : ProcessGroup
    max_numel : int
        The most elements of a call.
    dtype : torch.dtype
        bfloat16 or float16.
    max_blocks : int
        The most programs that `launch_config` names: 1 to 128.
    profile : str, optional
        Of `resolve_pcie_ipc_profile`. It is kept as `profile`, and launches do not depend on it.
    tune_batches, tune_cache
        Only None: launches are functions of sizes, and nothing is measured.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """

    def __init__(
        self,
        group,
        max_numel: int,
        dtype: torch.dtype = torch.bfloat16,
        max_blocks: int = MOST_BLOCKS,
        profile: str | None = None,
        tune_batches: Sequence[int] | None = None,
        tune_cache: str | None = None,
    ):
        for name, value in (("tune_batches", tune_batches), ("tune_cache", tune_cache)):
            require(value is None, name, value, "None: launches are functions of sizes")
        require(dtype in _DTYPES, "dtype", dtype, "bfloat16, float16")
        require(isinstance(max_numel, int) and max_numel > 0, "max_numel", max_numel, "an int of at least 1")
        require(1 <= max_blocks <= MOST_BLOCKS, "max_blocks", max_blocks, f"1 to {MOST_BLOCKS}")
        self.profile = resolve_pcie_ipc_profile(group, profile).profile
        backend = TorchDistBackend(group)
        self.group, self.dtype, self.max_numel, self.max_blocks = group, dtype, max_numel, max_blocks
        self.rank, self.world_size = backend.Get_rank(), backend.Get_size()
        self.device = own_device()
        self._reduce = TRTLLMAllReduceFusionWorkspace(self.world_size, self.rank, 1, max_numel, dtype, backend)
        self._blocks = blocks_link(Ranks(group), self.device)

    @property
    def handle(self) -> int:
        """A number of this workspace in this process."""
        return id(self._reduce)

    @property
    def deadline(self) -> float:
        """Seconds that a rank waits for another; may be set."""
        return self._reduce.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self._reduce.deadline = self._blocks.deadline = seconds

    def check(self, wait: bool = True) -> None:
        """Raise what went wrong in a call of this rank.

        Parameters
        ----------
        wait : bool
            For the kernels of this rank, which end by the deadline; nothing is waited for inside a graph capture.

        Raises
        ------
        TimeoutError
            A rank did not come within the deadline.
        ValueError
            A rank came with other sizes, or the workspace is destroyed.
        """
        self._reduce.check(wait)
        self._blocks.check()

    def reset(self) -> None:
        """Make the workspace usable after an error. A collective call."""
        self._reduce.reset()
        self._blocks.reset()

    def rebind_stream(self) -> None:
        """The calls from here on are of another stream, which waits for the one before. Nothing is bound to a stream:
        it is for the caller to order them."""

    def launch_config(self, inp: torch.Tensor) -> PcieIpcLaunchConfig | None:
        """The launch of `all_reduce`.

        Parameters
        ----------
        inp : torch.Tensor
            What `all_reduce` would be given, on the workspace's device.


        Returns
        -------
        PcieIpcLaunchConfig or None
            None for a tensor that is not taken.

        Raises
        ------
        ValueError
            Another device.
        """
        require(inp.device == self.device, "inp", inp.device, f"{self.device}, the workspace's")
        fits = inp.dtype in _DTYPES and inp.is_contiguous() and inp.numel() <= self.max_numel
        if not fits:
            return None
        return get_pcie_ipc_launch_config(self.world_size, inp.numel(), inp.element_size(), self.max_blocks)

    def supports(self, inp: torch.Tensor) -> bool:
        """Whether `all_reduce` takes a tensor.

        Parameters
        ----------
        inp : torch.Tensor
            What `all_reduce` would be given, on the workspace's device.


        Returns
        -------
        bool

        Raises
        ------
        ValueError
            Another device.
        """
        return self.launch_config(inp) is not None

    def tuned_launch_config(self, inp: torch.Tensor) -> PcieIpcLaunchConfig | None:
        """`launch_config`: there is nothing to tune.

        Parameters
        ----------
        inp : torch.Tensor
            What `all_reduce` would be given, on the workspace's device.


        Returns
        -------
        PcieIpcLaunchConfig or None
            None for a tensor that is not taken.

        Raises
        ------
        ValueError
            Another device.
        """
        return self.launch_config(inp)

    def all_reduce(
        self,
        inp: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        config: PcieIpcLaunchConfig | None = None,
        enable_pdl: bool = False,
    ) -> torch.Tensor:
        """The sum of `inp` over ranks, in float32 and rank order. A collective call.

        Parameters
        ----------
        inp : torch.Tensor
            That `supports` takes: contiguous, bfloat16 or float16, a multiple of 16 bytes.
        out : torch.Tensor, optional
            Receives the sum.
        config : PcieIpcLaunchConfig, optional
            Its variant says how rows travel; blocks and threads are those of `launch_config`.
        enable_pdl : bool
            Only False.

        Returns
        -------
        torch.Tensor
            Shape and dtype of inp: `out`, or a new tensor.

        Raises
        ------
        ValueError
            An argument other than the above.
        TimeoutError
            As `flashinfer.comm.allreduce_fusion` raises it.
        """
        own = self.launch_config(inp)
        if own is None:
            raise ValueError(f"inp: got {inp.dtype} {tuple(inp.shape)}; allowed: what supports() takes")
        require(not enable_pdl, "enable_pdl", True, "False")
        one_shot = None
        if config is not None:
            same = (config.blocks, config.threads) == (own.blocks, own.threads)
            require(same, "config", config, f"blocks={own.blocks}, threads={own.threads}")
            one_shot = config.variant == PcieIpcVariant.UNSTAGED
        out = torch.empty_like(inp) if out is None else out
        return allreduce_fusion(
            inp, self._reduce, AllReduceFusionPattern.kAllReduce, output=out, use_oneshot=one_shot
        )  # fmt: skip

    def all_gather(self, inp: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather `inp` of every rank. A collective call.

        Parameters
        ----------
        inp : torch.Tensor
            Any shape and dtype, the same on every rank; contiguous, on the workspace's device.
        out : torch.Tensor, optional
            [world, *shape] of that dtype; receives the result.

        Returns
        -------
        torch.Tensor
            [world, *shape] in rank order: `out`, or a new tensor.

        Raises
        ------
        ValueError
            An argument other than the above.
        TimeoutError
            A rank did not come within the deadline.
        """
        shape = (self.world_size, *inp.shape)
        rows = self._rows(inp)
        sent = rows[:, None].expand(-1, self.world_size, -1).contiguous()
        return self._received(sent, inp, shape, out)

    def reduce_scatter(self, inp: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Add `inp` of every rank in float32 and rank order, and keep this rank's block of the sum. A collective call.

        Parameters
        ----------
        inp : torch.Tensor
            [world, ...] bfloat16, float16 or float32, contiguous, on the workspace's device.
        out : torch.Tensor, optional
            [...] of that dtype; receives the result.

        Returns
        -------
        torch.Tensor
            [...]: `out`, or a new tensor. The sum is rounded once.

        Raises
        ------
        ValueError
            An argument other than the above.
        TimeoutError
            A rank did not come within the deadline.
        """
        floating = inp.dtype in (*_DTYPES, torch.float32)
        require(floating, "inp", inp.dtype, "bfloat16, float16, float32")
        fits = inp.dim() > 0 and len(inp) == self.world_size
        require(fits, "inp", tuple(inp.shape), f"[{self.world_size}, ...]")
        sent = torch.stack([self._rows(part) for part in inp], 1).contiguous()
        parts = self._received(sent, inp[0], tuple(inp.shape), None)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        out = torch.empty_like(inp[0]) if out is None else out
        fits = out.shape == inp.shape[1:] and out.dtype == inp.dtype
        require(fits, "out", f"{out.dtype} {tuple(out.shape)}", f"{inp.dtype} {tuple(inp.shape[1:])}")
        return out.copy_(total)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor in rows, the last one padded."""
        require(x.device == self.device, "inp", x.device, f"{self.device}, the workspace's")
        require(x.is_contiguous(), "inp", f"strides {x.stride()}", "a contiguous tensor")
        flat = x.view(-1).view(torch.uint8)
        return torch.nn.functional.pad(flat, (0, -flat.numel() % _ROW)).view(-1, _ROW)

    def _received(self, sent: torch.Tensor, like: torch.Tensor, shape, out) -> torch.Tensor:
        beside = torch.zeros(*sent.shape[:2], 4, dtype=torch.uint8, device=sent.device)
        got, _ = exchange_blocks(self._blocks, (sent, beside), (torch.empty_like(sent), torch.empty_like(beside)))
        parts = like.new_empty(shape)
        if parts.numel():
            rows = got.transpose(0, 1).reshape(self.world_size, -1)[:, : like.nbytes]
            parts.view(self.world_size, -1).view(torch.uint8).copy_(rows)
        if out is None:
            return parts
        fits = tuple(out.shape) == tuple(shape) and out.dtype == like.dtype
        require(fits, "out", f"{out.dtype} {tuple(out.shape)}", f"{like.dtype} {tuple(shape)}")
        return out.copy_(parts)

    def prepare(
        self, shapes: Sequence[tuple[int, int]], *, dtype: torch.dtype = torch.bfloat16
    ) -> dict[tuple[int, int], PcieIpcLaunchConfig | None]:
        """The launch of each shape; the same on every rank.

        Parameters
        ----------
        shapes : sequence of (int, int)
            (batch, hidden).
        dtype : torch.dtype
            bfloat16 or float16.

        Returns
        -------
        dict of (int, int) to PcieIpcLaunchConfig or None
            By shape; None for one that is not taken.

        Raises
        ------
        ValueError
            Another dtype.
        """
        require(dtype in _DTYPES, "dtype", dtype, "bfloat16, float16")
        found = {}
        for batch, hidden in shapes:
            fits = batch * hidden <= self.max_numel
            config = get_pcie_ipc_launch_config(self.world_size, batch * hidden, dtype.itemsize, self.max_blocks)
            found[batch, hidden] = config if fits else None
        return found

    def tune(
        self,
        hiddens: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        cache: str | None = None,
        tune_group=None,
        warmup: int = 0,
        repeat: int = 0,
    ) -> dict[tuple[int, int], PcieIpcLaunchConfig]:
        """The launch of each hidden size, for batches of powers of two that fit. Nothing is measured.

        Parameters
        ----------
        hiddens : sequence of int
            Hidden sizes.
        dtype : torch.dtype
            bfloat16 or float16.
        cache, tune_group, warmup, repeat : optional
            Upstream's, for its measurements; not read.

        Returns
        -------
        dict of (int, int) to PcieIpcLaunchConfig
            By (hidden, batch).

        Raises
        ------
        ValueError
            No hidden size fits, or another dtype.
        """
        found = {}
        for hidden in hiddens:
            batch = 1
            while batch * hidden <= self.max_numel:
                found[hidden, batch] = self.prepare([(batch, hidden)], dtype=dtype)[batch, hidden]
                batch *= 2
        found = {key: config for key, config in found.items() if config is not None}
        require(bool(found), "hiddens", list(hiddens), f"one of which fits {self.max_numel} elements")
        return found

    def destroy(self) -> None:
        """Free the memory; once is enough. A collective call."""
        try:
            self._reduce.destroy()
        finally:
            self._blocks.close()

    def __enter__(self) -> PcieIpcAllReduceWorkspace:
        return self

    def __exit__(self, *_) -> None:
        self.destroy()


__all__ = [
    "PROFILES",
    "PcieIpcAllReduceWorkspace",
    "PcieIpcLaunchConfig",
    "PcieIpcProfileDecision",
    "PcieIpcRankTopology",
    "PcieIpcVariant",
    "default_cache_path",
    "get_pcie_ipc_all_gather_launch_config",
    "get_pcie_ipc_launch_config",
    "get_pcie_ipc_reduce_scatter_launch_config",
    "probe_pcie_ipc_rank_topology",
    "resolve_pcie_ipc_profile",
]
