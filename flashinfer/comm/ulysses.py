"""Ulysses context parallelism: sequences are split between attentions, heads within them."""

from __future__ import annotations

import itertools

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import require
from flashinfer.comm._workspaces import own_device
from flashinfer.comm.dcp_alltoall import exchange_blocks
from flashinfer.comm.ulysses_chunks import kept, merge_ulysses_output_head_chunk, pack_ulysses_qkv_head_chunk
from flashinfer.comm.ulysses_topology import ULYSSES_BACKENDS, UlyssesBackendDecision, UlyssesBackendError
from flashinfer.ops.comm.alltoall import config
from flashinfer.ops.comm.capability import Capability, connect
from flashinfer.ops.comm.collective import Collective
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import Link, PeerMemory, header

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HANDLES: dict[int, Link] = {}
_next_handle = itertools.count(1)


class UlyssesWorkspace:
    """Room of `max_elems` elements of a dtype. Exchanges here need none; calls check that theirs would fit.

    Parameters
    ----------
    max_elems : int
        Elements, 1 or more.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    device : torch.device, str or int, optional
        By default the current CUDA device, or the CPU where there is none; nothing is allocated on it.

    Raises
    ------
    ValueError
        An argument other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.comm import UlyssesWorkspace
    >>> UlyssesWorkspace(max_elems=1024, dtype=torch.float16).max_elems
    1024
    """

    def __init__(self, *, max_elems: int, dtype: torch.dtype, device: torch.device | str | int | None = None):
        require(isinstance(max_elems, int) and max_elems > 0, "max_elems", max_elems, "an int of at least 1")
        require(dtype in _DTYPES, "dtype", dtype, "float16, bfloat16, float32")
        self.max_elems, self.dtype = max_elems, dtype
        self.device = own_device() if device is None else _device(device)


class UlyssesCommunicator:
    """The two exchanges of Ulysses attention, [B, S, H, D]. A collective constructor.

    As a context manager it is closed at the end of the block.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group, if None.
    max_elems : int
        The most elements of a call.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    backend : str
        "auto": peers' memory where a probe finds that it works, else the process group. "nvlink": UlyssesBackendError
        where it does not. "nccl": the process group.
    device : torch.device, str or int, optional
        This rank's; by default the current CUDA device, or the CPU where there is none.

    Attributes
    ----------
    backend : str
        "nvlink" or "nccl".
    fallback_reason : str or None
        Why it is not peers' memory; None where it is, or "nccl" was asked for.
    decision : UlyssesBackendDecision
        The backend, and why.
    rank, world_size : int

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """

    def __init__(
        self,
        group=None,
        *,
        max_elems: int,
        dtype: torch.dtype,
        backend: str = "auto",
        device: torch.device | str | int | None = None,
    ):
        require(backend in ULYSSES_BACKENDS, "backend", repr(backend), ", ".join(map(repr, ULYSSES_BACKENDS)))
        require(isinstance(max_elems, int) and max_elems > 0, "max_elems", max_elems, "an int of at least 1")
        require(dtype in _DTYPES, "dtype", dtype, "float16, bfloat16, float32")
        self.device = own_device() if device is None else _device(device)
        group = torch.distributed.group.WORLD if group is None else group
        ranks = Ranks(group)
        asked = ranks.gather(backend)
        require(len(set(asked)) == 1, "backend", sorted(set(asked)), "the same on every rank")
        self.rank, self.world_size, self.max_elems, self.dtype = ranks.rank, ranks.size, max_elems, dtype
        if backend == "nccl":
            self._link = Collective(ranks, self.device, "the process group was asked for")
            found = Capability("collective", "", "")
        else:
            self._link, found = connect(ranks, config.ROUND, self.device)
        self.backend = "nvlink" if found.transport == "peer" else "nccl"
        self.fallback_reason = found.reason or None
        reason = found.reason or ("every rank reaches the others' memory" if self.backend == "nvlink" else "requested")
        self.decision = UlyssesBackendDecision(self.backend, reason)
        if backend == "nvlink" and self.backend != "nvlink":
            raise UlyssesBackendError(f"backend 'nvlink': {found.reason}")

    def __enter__(self) -> UlyssesCommunicator:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def check(self) -> None:
        """Raise what went wrong in a call of this rank: it waits for its kernels, which end by the deadline."""
        link = self._opened()
        link.settle()
        link.check()

    def close(self) -> None:
        """Free what the object holds; once is enough. Peers must be done."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def create_workspace(self, *, max_elems: int | None = None) -> UlyssesWorkspace:
        """Room for a call.

        Parameters
        ----------
        max_elems : int, optional
            Elements of the call, 1 to the communicator's max_elems, which is the default.

        Returns
        -------
        UlyssesWorkspace

        Raises
        ------
        ValueError
            Another number.
        RuntimeError
            The communicator is closed.
        """
        self._opened()
        max_elems = self.max_elems if max_elems is None else max_elems
        fits = isinstance(max_elems, int) and 1 <= max_elems <= self.max_elems
        require(fits, "max_elems", max_elems, f"1 to {self.max_elems}, of the communicator")
        return UlyssesWorkspace(max_elems=max_elems, dtype=self.dtype, device=self.device)

    @checked_late
    def scatter_heads(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, workspace: UlyssesWorkspace | None = None
    ) -> torch.Tensor:
        """[B, S_local, H, D] becomes [B, S_global, H_local, D]: a share of the heads of all tokens. A collective call.

        Parameters
        ----------
        x : torch.Tensor
            Contiguous, with H a multiple of the ranks.
        out : torch.Tensor, optional
            Receives the result, contiguous.
        workspace : UlyssesWorkspace, optional

        Returns
        -------
        torch.Tensor
            `x` itself, if there is one rank and no `out`.

        Raises
        ------
        ValueError
            A shape, stride, dtype or device other than the above, more elements than max_elems, or a workspace that is
            too small.
        RuntimeError
            The communicator is closed.
        TimeoutError
            A rank did not come within the deadline; an earlier call's error is raised at the start of a later one.
        """
        self._check("x", x, workspace)
        batch, tokens, heads, dim = x.shape
        share = self._share(heads)
        if self.world_size == 1 and out is None:
            return x
        rows = x.reshape(batch * tokens, self.world_size, share * dim)
        got = self._exchange(rows).view(batch, tokens, self.world_size, share, dim).transpose(1, 2)
        return kept(got.reshape(batch, self.world_size * tokens, share, dim), out)

    @checked_late
    def gather_heads(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, workspace: UlyssesWorkspace | None = None
    ) -> torch.Tensor:
        """[B, S_global, H_local, D] becomes [B, S_local, H, D]: all heads of a share of the tokens. A collective call.

        The inverse of `scatter_heads`.

        Parameters
        ----------
        x : torch.Tensor
            Contiguous, with S_global a multiple of the ranks; dtype and device of the communicator.
        out : torch.Tensor, optional
            Receives the result, contiguous.
        workspace : UlyssesWorkspace, optional
            Not used, but checked to be large enough.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor; `x` itself, if there is one rank and no `out`.

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As in `scatter_heads`.
        """
        self._check("x", x, workspace)
        batch, tokens, heads, dim = x.shape
        require(tokens % self.world_size == 0, "x", tuple(x.shape), f"tokens in a multiple of {self.world_size}")
        if self.world_size == 1 and out is None:
            return x
        local = tokens // self.world_size
        rows = x.view(batch, self.world_size, local, heads * dim).transpose(1, 2)
        got = self._exchange(rows.reshape(batch * local, self.world_size, heads * dim))
        return kept(got.view(batch, local, self.world_size * heads, dim), out)

    def scatter_qkv_head_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        head_offset: int,
        head_count: int,
        out: torch.Tensor | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """`pack_ulysses_qkv_head_chunk`, then `scatter_heads`. A collective call.

        Parameters
        ----------
        query, key, value : torch.Tensor
            [B, S_local, H, D], as `pack_ulysses_qkv_head_chunk` takes them.
        head_offset, head_count : int
            Which of each rank's heads go: from head_offset on, so many.
        out, workspace
            As in `gather_heads`.

        Returns
        -------
        torch.Tensor
            [B, S_global, head_count, 3 D].

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As in `scatter_heads`.
        """
        packed = pack_ulysses_qkv_head_chunk(
            query, key, value, world_size=self.world_size, head_offset=head_offset, head_count=head_count
        )
        return self.scatter_heads(packed, out=out, workspace=workspace)

    def gather_output_head_chunk(
        self,
        x: torch.Tensor,
        *,
        local_heads: int,
        head_offset: int,
        out: torch.Tensor,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """`gather_heads`, then `merge_ulysses_output_head_chunk`. A collective call.

        Parameters
        ----------
        x : torch.Tensor
            [B, S_global, heads of the chunk, D], contiguous.
        local_heads : int
            Heads of each rank in all.
        head_offset : int
            Where the chunk begins among them.
        out : torch.Tensor
            [B, S_local, H, D]: the chunk's heads are written, others stay.
        workspace : UlyssesWorkspace, optional
            Not used, but checked to be large enough.

        Returns
        -------
        torch.Tensor
            `out`.

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As in `scatter_heads`.
        """
        received = self.gather_heads(x, workspace=workspace)
        return merge_ulysses_output_head_chunk(
            received, world_size=self.world_size, local_heads=local_heads, head_offset=head_offset, out=out
        )

    def _opened(self):
        if self._link is None:
            raise RuntimeError("UlyssesCommunicator: it is closed")
        return self._link

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        return _exchanged(self._opened(), rows)

    def _check(self, name: str, x: torch.Tensor, workspace) -> None:
        self._opened()
        require(x.dim() == 4 and x.is_contiguous(), name, tuple(x.shape), "[B, S, H, D], contiguous")
        require(x.dtype == self.dtype, name, x.dtype, f"{self.dtype}, of the communicator")
        require(x.device == self.device, name, x.device, f"{self.device}, of the communicator")
        require(x.numel() <= self.max_elems, name, f"{x.numel()} elements", f"at most {self.max_elems}")
        if workspace is not None:
            fits = workspace.dtype == self.dtype and x.numel() <= workspace.max_elems
            got = f"{workspace.dtype}, {workspace.max_elems} elements"
            require(fits, "workspace", got, f"{self.dtype}, at least {x.numel()} elements")

    def _share(self, heads: int) -> int:
        require(heads % self.world_size == 0, "x", f"{heads} heads", f"a multiple of {self.world_size}")
        return heads // self.world_size


def _exchanged(link, rows: torch.Tensor) -> torch.Tensor:
    """Row [i, r] of rows [n, ranks, m] goes to rank r."""
    if rows.numel() == 0:
        return torch.empty_like(rows)
    beside = torch.zeros(*rows.shape[:2], 4, dtype=torch.uint8, device=rows.device)
    rows = rows.contiguous()
    return exchange_blocks(link, (rows, beside), (torch.empty_like(rows), torch.empty_like(beside)))[0]


def _device(device) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def init_ulysses_a2a(
    out_ipc_ptrs: list[int], signal_ipc_ptrs: list[int], rank: int, world_size: int, full_nvlink: bool
) -> int:
    """Set up `ulysses_a2a` over buffers that ranks share, zero at first.

    Parameters
    ----------
    out_ipc_ptrs : list of int
        Addresses of every rank's staging buffer. It is not needed: rows go through the signal buffers.
    signal_ipc_ptrs : list of int
        Addresses of every rank's buffer of `flashinfer.comm.vllm_meta_size()` bytes.
    rank, world_size : int
    full_nvlink : bool
        Whether all GPUs are linked. Kernels are the same either way.

    Returns
    -------
    int
        A handle.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    from flashinfer.comm.cuda_ipc import tensor_at
    from flashinfer.comm.vllm_ar import vllm_meta_size

    count = len(signal_ipc_ptrs)
    require(count == world_size, "signal_ipc_ptrs", f"{count} addresses", f"{world_size}, one a rank")
    require(0 <= rank < world_size, "rank", rank, f"0 to {world_size - 1}")
    nbytes = vllm_meta_size()
    area = (nbytes - header(world_size, 0)) // (header(world_size, 1) - header(world_size, 0)) // 16 * 16
    memory = PeerMemory(tensor_at(signal_ipc_ptrs[rank], nbytes), list(signal_ipc_ptrs), "addresses")
    handle = next(_next_handle)
    _HANDLES[handle] = Link(None, memory, area, rank)
    return handle


def _of_handle(fa: int) -> Link:
    require(fa in _HANDLES, "fa", fa, "a handle of init_ulysses_a2a that is not disposed of")
    return _HANDLES[fa]


@checked_late
def ulysses_a2a(fa: int, inp: torch.Tensor, out: torch.Tensor, B: int, S_local: int, H: int, D: int, mode: int) -> None:
    """`UlyssesCommunicator.scatter_heads` (mode 0) or `gather_heads` (mode 1), over a handle. A collective call.

    Parameters
    ----------
    fa : int
        A handle of `init_ulysses_a2a`.
    inp, out : torch.Tensor
        [B, S_local, H, D] and [B, ranks * S_local, H / ranks, D] of mode 0; exchanged of mode 1. One dtype, contiguous.
    B, S_local, H, D : int
        Batch, tokens of one rank, heads of all ranks, and elements of a head.
    mode : int
        0 or 1.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline of a call.
    """
    link = _of_handle(fa)
    require(mode in (0, 1), "mode", mode, "0, 1")
    require(H % link.world == 0, "H", H, f"a multiple of {link.world}")
    share = H // link.world
    shapes = (B, S_local, H, D), (B, S_local * link.world, share, D)
    for name, x, shape in (("inp", inp, shapes[mode]), ("out", out, shapes[1 - mode])):
        fits = tuple(x.shape) == shape and x.is_contiguous() and x.dtype == inp.dtype
        require(fits, name, f"{x.dtype} {tuple(x.shape)}", f"{inp.dtype} {shape}, contiguous")
    row = share * D * inp.element_size() + 4
    require(row <= link.area, "inp", f"rows of {row} bytes", f"at most {link.area}")
    if mode == 0:
        got = _exchanged(link, inp.view(B * S_local, link.world, share * D))
        out.copy_(got.view(B, S_local, link.world, share, D).transpose(1, 2).reshape(out.shape))
    else:
        rows = inp.view(B, link.world, S_local, share * D).transpose(1, 2)
        got = _exchanged(link, rows.reshape(B * S_local, link.world, share * D))
        out.copy_(got.view(out.shape))


def dispose_ulysses_a2a(fa: int) -> None:
    """Forget a handle. The buffers are the caller's.

    Parameters
    ----------
    fa : int
        A handle of `init_ulysses_a2a`.

    Raises
    ------
    ValueError
        A handle that is none or was disposed of.
    """
    _of_handle(fa).close()
    del _HANDLES[fa]
