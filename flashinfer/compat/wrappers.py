"""Attributes that engines read, write into and replace on wrappers, by upstream's names (docs/engines.md).

Who asks for a table by its name may write into it, and another may be put in its place: the next plan or run, whichever
comes first, goes by what is there then. So it is with options.
"""

from __future__ import annotations

from functools import cached_property

import torch

from flashinfer.compat.cached_module import CachedModule
from flashinfer.ops.attention.replaced import ReplaceableWrapper


class _TableName:
    """A table of the wrapper, by its name in `Table`."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, wrapper, owner=None):
        return self if wrapper is None else wrapper._read_table(self._name)

    def __set__(self, wrapper, tensor: torch.Tensor | None) -> None:
        wrapper._replace_table(self._name, tensor)


class _OptionName:
    """An option of the wrapper's plan, by its name in `PlanOptions`; `default` stands for None."""

    def __init__(self, name: str, default=None):
        self._name, self._default = name, default

    def __get__(self, wrapper, owner=None):
        if wrapper is None:
            return self
        value = wrapper._read_option(self._name)
        return self._default if value is None else value

    def __set__(self, wrapper, value) -> None:
        wrapper._replace_option(self._name, value)


class _PlannedName:
    """What a wrapper was planned with, for engines that read it. One that is set is the engine's own from then on."""

    def __init__(self, value):
        self._value = value

    def __get__(self, wrapper, owner=None):
        return self if wrapper is None else self._value(wrapper)


class PlannedNames(ReplaceableWrapper):
    """Names on every wrapper.

    `_float_workspace_buffer`, `_int_workspace_buffer` and `_backend` are plain attributes of the wrapper: the first is
    scratch from the next work list on, the second is not used, the third holds from the next plan on. `_plan_info`,
    which engines set to what `_cached_module.plan` gives, is not read.
    """

    _causal = _OptionName("causal")
    _sm_scale = _OptionName("sm_scale")
    _qo_indptr_buf = _TableName("qo_indptr")
    # Engines hand it from plan to run; nothing here reads it.
    _plan_info = None
    _jit_module = _PlannedName(lambda wrapper: wrapper._variant)
    _batch_size = _PlannedName(lambda wrapper: wrapper._base.table.batch_size)
    _num_qo_heads = _PlannedName(lambda wrapper: wrapper._base.options.num_qo_heads)
    _num_kv_heads = _PlannedName(lambda wrapper: wrapper._base.options.num_kv_heads)
    _cached_q_data_type = _PlannedName(lambda wrapper: wrapper._base.options.q_dtype)
    _cached_kv_data_type = _PlannedName(lambda wrapper: wrapper._base.options.kv_dtype)
    _cached_o_data_type = _PlannedName(lambda wrapper: wrapper._base.options.o_dtype)

    @property
    def _cached_module(self) -> CachedModule | None:
        """What plans again from the tables in place; None before the first plan."""
        return None if self._base is None else CachedModule(self)

    @cached_property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """Handed through by engines; there is nothing to stage in it."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")


class _MaskedNames(PlannedNames):
    _pos_encoding_mode = _OptionName("pos_encoding_mode")
    _rope_scale = _OptionName("rope_scale")
    _rope_theta = _OptionName("rope_theta")
    _window_left = _OptionName("window_left")
    _logits_soft_cap = _OptionName("logits_soft_cap", 0.0)
    _custom_mask_buf = _TableName("mask")
    _mask_indptr_buf = _TableName("mask_indptr")
    # Engines read and set it; bounds of a captured graph are those of the first plan here.
    _max_total_num_rows: int | None = None


class PagedNames(_MaskedNames):
    """Names on wrappers of paged keys and values."""

    _paged_kv_indptr_buf = _TableName("kv_indptr")
    _paged_kv_indices_buf = _TableName("kv_indices")
    _paged_kv_last_page_len_buf = _TableName("last_page_len")

    @property
    def _fixed_batch_size(self) -> int:
        """Requests that the buffers of CUDA-graph mode hold; 0 without."""
        indptr = self._shown.kv_indptr if self._use_cuda_graph else None
        return 0 if indptr is None else indptr.shape[0] - 1


class RaggedNames(_MaskedNames):
    """Names on wrappers of ragged keys and values."""

    _kv_indptr_buf = _TableName("kv_indptr")


class LatentNames(PlannedNames):
    """Names on wrappers of latent attention."""

    _page_size = _OptionName("page_size")
    _kv_indptr_buf = _TableName("kv_indptr")
    _kv_indices_buf = _TableName("kv_indices")
    _kv_len_arr_buf = _TableName("kv_lens")
