"""A wrapper in CUDA-graph mode: fixed buffers, and bounds that later plans have to keep to."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.ops.attention.batch import Batch
from flashinfer.ops.attention.kind import Kind, effective
from flashinfer.ops.attention.request import Request
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, QO_INDPTR, Stage


class Captured:
    """What a wrapper whose run() may have been captured does for a plan."""

    def _captured(self, request: Request, kind: Kind, limits: Limits) -> tuple[Kind, Limits]:
        """Kind and bounds of the batch that a graph may have been captured over; the new one must fit them all."""
        old = self._base
        if kind is not old.kind:
            self._check_captured(old.kind, kind)
        require(request.q_len == old.request.q_len, "q_len_per_req", request.q_len, f"{old.request.q_len}, as captured")
        for other in self._batches.values():
            self._bounded(other, limits)
        return old.kind, self._bounded(old, limits)

    def _bounded(self, old: Batch, limits: Limits) -> Limits:
        """Bounds of a batch that a graph may have been captured over; the new ones must fit them."""
        if not old.limits.known:
            return limits
        bounds = [("qo_indptr", limits.q_rows, old.limits.q_rows, self._first[0])]
        if old.options.splits:
            bounds.append(("kv_indptr", limits.kv_tokens, old.limits.kv_tokens, self._first[1]))
        for name, now, most, first in bounds:
            bound = f"at most {most} rows, what this CUDA-graph wrapper was first planned for"
            require(now <= most, name, f"{now} rows", bound)
            require(now >= 0 or first < 0, name, "a tensor on the device", f"one on the host, which tells: {bound}")
        return old.limits

    def _check_captured(self, old: Kind, kind: Kind) -> None:
        """A captured graph keeps its kernel, its scalars and the size of its buffers."""
        for name, was in effective(old).items():
            now = effective(kind)[name]
            require(was == now, name, now, f"{was}, as first planned: a captured graph cannot follow")
        custom = old.problem.mask == "custom"
        require(
            custom == (kind.problem.mask == "custom"), "custom_mask", "None" if custom else "a mask",
            f"{'a mask' if custom else 'None'}, as first planned: a captured graph cannot follow",
        )  # fmt: skip
        now, was = kind.choice.variant.name, old.choice.variant.name
        require(now == was, "backend", now, f"{was}, as first planned: a captured graph cannot follow")

    @property
    def _tables_fixed(self) -> tuple[torch.Tensor | None, ...]:
        fixed = self._shown
        lens = fixed.kv_lens if self._lengths_in_tokens else fixed.last_page_len
        return fixed.qo_indptr, fixed.kv_indptr, lens, fixed.kv_indices

    def _room(self, request: Request, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths of host tables as they go into the fixed buffers: requests past the batch are empty."""
        most = self._shown.kv_indptr.shape[0] - 1
        if request.batch_size > most and not self._lengths_in_tokens:
            require(False, "batch_size", request.batch_size, f"at most {most}, what the CUDA-graph buffers hold")
        lengths = list(counts)
        for i, (buffer, given) in enumerate(zip(self._tables_fixed, request.tables, strict=True)):
            if given is not None and given.shape[0] > buffer.shape[0]:
                n, most = given.shape[0], buffer.shape[0]
                require(False, request.names[i], f"{n} elements", f"at most {most}, the buffer's length")
            if counts[i] and (i in (QO_INDPTR, KV_INDPTR) or i == LENGTHS and self._lengths_in_tokens):
                lengths[i] = buffer.shape[0]
        return tuple(lengths)

    def _fill_buffers(self, request: Request, counts: tuple[int, ...], stage: Stage, stream: int | None) -> None:
        """Copy the tables into the fixed buffers."""
        for i, (buffer, given) in enumerate(zip(self._tables_fixed, request.tables, strict=True)):
            if given is None:
                continue
            if counts[i] and self._on_gpu:
                # Offsets past the batch too; page ids have more room than there are.
                stage.send_into(i, buffer, counts[i] if i == KV_INDICES else stage.counts[i], stream)
                continue
            n = given.shape[0]
            if buffer.data_ptr() != given.data_ptr():
                buffer[:n].copy_(given, non_blocking=True)
            if i in (QO_INDPTR, KV_INDPTR) and n < buffer.shape[0]:
                buffer[n:].copy_(buffer[n - 1 : n].expand(buffer.shape[0] - n))
            elif i == LENGTHS and self._lengths_in_tokens:
                buffer[n:].zero_()
