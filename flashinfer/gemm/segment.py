"""Products of segments of rows with a weight each, as LoRA adapters are applied."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_values, present, require, require_fit
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import grouped


class SegmentGEMMWrapper:
    """Products of segments of rows, each with a weight: ``x[segment i] @ weights[i]``.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Upstream's scratch memory; this implementation needs none, and leaves it alone.
    backend : str
        "auto", "sm80" or "sm90": upstream's kernels for one function; every chip runs it here.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.SegmentGEMMWrapper(torch.empty(0, dtype=torch.int8))
    >>> x, weights = torch.ones(3, 64).half(), torch.ones(2, 32, 64).half()
    >>> wrapper.run(x, weights, 2, True, seg_indptr=torch.tensor([0, 1, 3]))[:, 0]
    tensor([64., 64., 64.], dtype=torch.float16)
    """

    @checked
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto"):
        require(backend in ("auto", "sm80", "sm90"), "backend", repr(backend), "auto, sm80, sm90")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Keep other workspaces, by reference. Nothing is read from them or written to them.

        Parameters
        ----------
        float_workspace_buffer, int_workspace_buffer : torch.Tensor
            Of any size.
        """
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    @checked
    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: torch.Tensor | None = None,
        seg_lens: torch.Tensor | None = None,
        seg_indptr: torch.Tensor | None = None,
        weight_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of each segment with its weight.

        Parameters
        ----------
        x : torch.Tensor
            [M, d_in] bfloat16, float16, float8_e4m3fn or float8_e5m2, rows contiguous: the segments, one after another.
        weights : torch.Tensor
            [weights, d_in, d_out], or [weights, d_out, d_in] with `weight_column_major`; dtype of x, rows contiguous.
        batch_size : int
            Segments.
        weight_column_major : bool
            Which of the two.
        out : torch.Tensor, optional
            [M, d_out] in the dtype of x, bfloat16 or float16 where that is FP8, rows contiguous.
        seg_lens : torch.Tensor, optional
            [batch_size] int32 or int64: the lengths of segments, one after another from row 0, up to M in all. This or
            `seg_indptr`.
        seg_indptr : torch.Tensor, optional
            [batch_size + 1] int32 or int64: not decreasing, from 0 or later, up to M. It stands for `seg_lens` where
            both are given.
        weight_indices : torch.Tensor, optional
            [batch_size] int32 or int64: which weight each segment has; by default its own number.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor [M, d_out], bfloat16 where x is FP8. Summed in float32 and rounded once. Rows of no
            segment are 0 in a new tensor, and stay as they are in `out`.

        Raises
        ------
        ValueError
            A shape, dtype, stride or device other than the above. Segments beyond M, offsets that decrease, and weights
            that do not exist, where their tensor is on the CPU. On a GPU these are not read by the host: such rows
            count as rows of no segment.
        """
        floats = torch.bfloat16, torch.float16
        given.check_matrix("x", x, 2, (*floats, *given.FP8))
        given.check_matrix("weights", weights, 3, (x.dtype,))
        n, k = weights.shape[1:] if weight_column_major else weights.shape[:0:-1]
        given.same("weights", k, "x", x.shape[1], "d_in")
        if seg_indptr is not None:
            kind, name, groups = "offsets", "seg_indptr", seg_indptr
        else:
            kind, name, groups = "lengths", "seg_lens", present("seg_lens", seg_lens, "a tensor, or seg_indptr")
        _check_index(name, groups, batch_size + (kind == "offsets"))
        _check_segments(name, groups, kind, x.shape[0])
        groups = groups.to(x.device, non_blocking=True)
        if weight_indices is None:
            require(batch_size <= len(weights), "weights", len(weights), f"{batch_size}, one a segment, or more")
        else:
            _check_index("weight_indices", weight_indices, batch_size)
            check_values("weight_indices", weight_indices, 0, len(weights) - 1)
            weight_indices = weight_indices.to(x.device, non_blocking=True)
        narrow = x.dtype in given.FP8
        if out is None:
            out = torch.zeros(x.shape[0], n, dtype=torch.bfloat16 if narrow else x.dtype, device=x.device)
        require(not narrow or out.dtype in floats, "out", out.dtype, "bfloat16, float16, with x in FP8")
        out = given.result(out, (x.shape[0], n), None if narrow else x.dtype, x)
        grouped(
            x, weights, None, None, None, out, groups, weight_indices, kind,
            width=1, columns_first=not weight_column_major, expected=-(-x.shape[0] // max(batch_size, 1)),
        )  # fmt: skip
        return out

    forward = run


def _check_index(name: str, x: torch.Tensor, count: int) -> None:
    require_fit(name, x, x.shape == (count,), f"[{count}]", torch.int32, torch.int64)


def _check_segments(name: str, x: torch.Tensor, kind: str, rows: int) -> None:
    """Refuses segments outside the rows. Values on a GPU are read by the kernel alone."""
    if x.device.type != "cpu" or not x.numel():
        return
    if kind == "lengths":
        least, total = int(x.min()), int(x.sum())
        require(least >= 0, name, least, "lengths of 0 or more")
        require(total <= rows, name, f"a sum of {total}", f"at most {rows}, the rows of x")
        return
    require(int(x[0]) >= 0, name, f"first offset {int(x[0])}", "0 or more")
    require(bool((x.diff() >= 0).all()), name, x.tolist(), "offsets that do not decrease")
    require(int(x[-1]) <= rows, name, f"last offset {int(x[-1])}", f"at most {rows}, the rows of x")
