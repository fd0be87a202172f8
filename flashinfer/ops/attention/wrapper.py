"""The one wrapper: plan, run, CUDA-graph buffers and workspace of every batch attention class."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashinfer._core.backends import REPORTED_AS, variants_of
from flashinfer._core.checks import UnsupportedConfig, require
from flashinfer._core.kv_layout import check_layout
from flashinfer.ops.attention.batch import Batch, Call, Request, custom_mask_table
from flashinfer.ops.attention.problem import Table


@dataclass
class GraphBuffers:
    """Fixed device buffers of a wrapper in CUDA-graph mode; None where the wrapper has no such table.

    The names with a leading underscore on the wrapper are those that engines copy into.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None

    def check(self, device: torch.device, needed: tuple[str, ...]) -> None:
        for name in needed:
            tensor = getattr(self, name)
            require(tensor is not None, name, None, "a buffer, with use_cuda_graph=True")
            require(tensor.device == device, name, f"a buffer on {tensor.device}", str(device))
            wide = torch.uint8 if name == "custom_mask" else torch.int32
            require(tensor.dtype == wide, name, tensor.dtype, str(wide))
            require(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "contiguous")


class AttentionWrapper:
    """plan() and run() for a batch; public classes add their signatures.

    In CUDA-graph mode the given buffers hold the tables and are never replaced: plan() copies into them, so that a
    graph captured over run() serves every later batch of up to as many requests, pages and query rows. A smaller batch
    is padded with empty requests.
    """

    _paged = True

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str, buffers: GraphBuffers | None
    ):
        check_layout(kv_layout)
        variants_of(backend)
        self._kv_layout = kv_layout
        self._float_workspace_buffer = float_workspace_buffer
        # Engines share and replace it; our work lists are small and live with the batch they belong to.
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=float_workspace_buffer.device)
        self.device = float_workspace_buffer.device
        self._backend = backend
        self._use_cuda_graph = buffers is not None
        self._buffers = buffers or GraphBuffers()
        self._batch: Batch | None = None
        self._scratch: torch.Tensor | None = None
        # Decode's query rows follow from the batch size alone: nothing is copied for them.
        self._fixed_qo_indptr: torch.Tensor | None = None
        self._qo_indptr_buf = self._buffers.qo_indptr
        self._paged_kv_indptr_buf = self._buffers.kv_indptr
        self._paged_kv_indices_buf = self._buffers.kv_indices
        self._paged_kv_last_page_len_buf = self._buffers.last_page_len
        self._custom_mask_buf = self._buffers.custom_mask
        self._mask_indptr_buf = self._buffers.mask_indptr

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper keeps its tables in fixed buffers."""
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """Upstream's name of the variant that the planned batch runs on; the asked-for name before plan()."""
        return self._backend if self._batch is None else REPORTED_AS[self._batch.choice.variant.name]

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspace buffers; takes effect at the next plan()."""
        require(
            float_workspace_buffer.device == self.device, "float_workspace_buffer",
            f"a tensor on {float_workspace_buffer.device}", str(self.device),
        )  # fmt: skip
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def explain(self):
        """The Choice of the planned batch: variant, config, and why the others were refused."""
        self._planned()
        return self._batch.choice

    def _partials(self, count: int) -> torch.Tensor:
        """Scratch for partial results: the caller's workspace if it is large enough, else ours.

        Ours only grows, and a buffer that a captured graph uses stays alive in the schedule that refers to it.
        """
        given = self._float_workspace_buffer
        given = given.view(torch.uint8) if given.is_contiguous() else given.new_empty(0, dtype=torch.uint8)
        if given.numel() >= count and given.data_ptr() % 16 == 0:
            return given[:count]
        if self._scratch is None or self._scratch.numel() < count:
            self._scratch = torch.empty(count, dtype=torch.uint8, device=self.device)
        return self._scratch[:count]

    def _plan(self, request: Request) -> None:
        request.check()
        table = self._tables(request)
        rows, limits, schedules = 0, None, None
        if self._use_cuda_graph and self._batch is not None:
            rows, limits, schedules = self._captured_shape(request)
        batch = Batch(request, table, self._backend, self._partials, rows=rows, limits=limits, schedules=schedules)
        if schedules and batch.choice.config != self._batch.choice.config:
            raise UnsupportedConfig(
                f"plan: a CUDA-graph wrapper keeps its kernel, {self._batch.choice.config}; these arguments need "
                f"{batch.choice.config}. Use another wrapper for them."
            )
        self._batch = batch
        # Engines assert these on a planned wrapper.
        self._window_left = request.window_left
        self._logits_soft_cap = request.logits_soft_cap or 0.0
        self._sm_scale = request.sm_scale
        self._causal = request.causal

    def _captured_shape(self, request: Request):
        """Tile, bounds and work lists of the batch a graph may have been captured over; the new one must fit them."""
        old = self._batch
        same = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "q_dtype", "kv_dtype")
        for name in same + ("o_dtype", "pos_encoding_mode", "causal"):
            was, now = getattr(old.request, name), getattr(request, name)
            require(was == now, name, now, f"{was}, as first planned: a captured graph cannot follow")
        if not old.limits.known:
            return old.problem.rows, None, None
        if not request.qo_indptr.is_cuda and not request.q_len:
            rows = int(request.qo_indptr[-1])
            require(rows <= old.limits.q_rows, "qo_indptr", f"{rows} query rows", f"at most {old.limits.q_rows}, the "
                    "rows this CUDA-graph wrapper was first planned for")  # fmt: skip
        return old.problem.rows, old.limits, old.schedules

    def _tables(self, request: Request) -> Table:
        """The request's tensors as int32 on the compute device: in the fixed buffers, or wherever they come to lie."""
        if self._use_cuda_graph:
            table = self._fill_buffers(request)
        else:
            qo_indptr, *others = self._given(request)
            qo_indptr = self._to_device(qo_indptr) if self._fixed_qo_indptr is None else self._fixed_qo_indptr
            table = Table(qo_indptr, *(self._to_device(t) for t in others))
        if self._use_cuda_graph and self._buffers.custom_mask is not None:
            self._fill_mask(request, table)
        else:
            custom_mask_table(request, table)
        self._qo_indptr_buf = table.qo_indptr
        if self._paged:
            self._paged_kv_indptr_buf = table.kv_indptr
            self._paged_kv_indices_buf = table.kv_indices
            self._paged_kv_last_page_len_buf = table.last_page_len
        else:
            self._kv_indptr_buf = table.kv_indptr
        self._custom_mask_buf, self._mask_indptr_buf = table.mask, table.mask_indptr
        return table

    @staticmethod
    def _given(request: Request):
        return request.qo_indptr, request.kv_indptr, request.kv_indices, request.last_page_len

    def _to_device(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return tensor.to(self.device, torch.int32, non_blocking=True).contiguous()

    def _fill_buffers(self, request: Request) -> Table:
        batch = request.qo_indptr.shape[0] - 1
        fixed = self._buffers
        most = fixed.kv_indptr.shape[0] - 1
        require(batch <= most, "batch_size", batch, f"at most {most}, what the CUDA-graph buffers hold")
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
        table = Table(*(getattr(fixed, name) for name in names))
        if self._fixed_qo_indptr is not None:
            table.qo_indptr = self._fixed_qo_indptr
        for name, given in zip(names, self._given(request)):
            buffer = getattr(fixed, name)
            if buffer is None or given is None or buffer.data_ptr() == given.data_ptr():
                continue
            n = given.shape[0]
            require(n <= buffer.shape[0], name, f"{n} elements", f"at most {buffer.shape[0]}, the buffer's length")
            buffer[:n].copy_(given, non_blocking=True)
            if name in ("qo_indptr", "kv_indptr") and n < buffer.shape[0]:
                # Requests past the batch are empty.
                buffer[n:].copy_(buffer[n - 1 : n].expand(buffer.shape[0] - n))
        return table

    def _fill_mask(self, request: Request, table: Table) -> None:
        fixed = self._buffers
        custom_mask_table(request, table)
        if table.mask is None:
            return
        most = fixed.custom_mask.shape[0]
        length = table.mask.shape[0]
        if request.custom_mask is not None:
            # pack() pads for the worst rounding; what is past the bits is zero and may be left out.
            length = min(length, (request.custom_mask.shape[0] + 7) // 8 + table.batch_size)
        require(length <= most, "custom_mask", f"{length} bytes packed", f"at most {most}, custom_mask_buf's length")
        fixed.custom_mask[:length].copy_(table.mask[:length])
        fixed.mask_indptr[: table.mask_indptr.shape[0]].copy_(table.mask_indptr)
        table.mask, table.mask_indptr = fixed.custom_mask, fixed.mask_indptr

    def _planned(self) -> Batch:
        if self._batch is None:
            raise ValueError(f"{type(self).__name__}.run: got no plan; allowed: after plan()")
        return self._batch

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call):
        return self._planned().run(q, k, v, call)

    def _change_plan(self, **changes) -> None:
        """What the older forward() takes over from plan(): the same tables under other options."""
        old = self._planned()
        if any(getattr(old.request, name) != value for name, value in changes.items()):
            request = replace(old.request, **changes)
            request.check()
            self._batch = Batch(request, old.table, self._backend, self._partials, rows=old.problem.rows)

    def end_forward(self) -> None:
        """Kept for callers of older versions; there is nothing to release."""


def refuse_jit(jit_args, jit_kwargs=None, variant_owns_mask: bool = False) -> None:
    """User variants in CUDA C++ cannot run here, where nothing compiles C++."""
    for name, value in (("jit_args", jit_args), ("jit_kwargs", jit_kwargs), ("variant_owns_mask", variant_owns_mask)):
        if value:
            raise UnsupportedConfig(f"{name}: got {value!r}; allowed: none: CUDA C++ variants are not compiled")


def refuse_block_scales(name: str, value) -> None:
    """Block-scaled (nvfp4) KV caches are refused by name."""
    if value is not None:
        raise UnsupportedConfig(f"{name}: got {type(value).__name__}; allowed: None, as of bf16, fp16, fp32, fp8")
