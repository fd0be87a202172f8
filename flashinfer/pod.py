"""Prefill and decode of one step, planned together (POD-Attention, Kamath et al., 2024)."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import NoPlan, renamed, require
from flashinfer._core.literals import KvLayout, PosEncodingMode
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.ops.attention.copies import MadeOfWrappers, OneWorkspace
from flashinfer.ops.attention.host_tables import host_lengths
from flashinfer.ops.attention.joined import PREFILL_NAMES, check_offsets, from_zero, joined_offsets, same_cache
from flashinfer.ops.attention.options import both_dtypes, check_flag
from flashinfer.ops.attention.variants import AttentionVariant
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.prefill.single import single_prefill_with_kv_cache

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

# qo_indptr, kv_indptr, kv_indices and last_page_len of one part.
_Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _part_names(part: str, tables: bool = False) -> dict[str, str]:
    """What the arguments of one part, "p" or "d", are called here, by their names in the wrapper of the part."""
    if tables:
        return dict(qo_indptr=f"qo_indptr_{part}", paged_kv_indptr=f"kv_indptr_{part}",
                    paged_kv_indices=f"kv_indices_{part}", paged_kv_last_page_len=f"last_page_len_{part}",
                    head_dim_qk="head_dim", head_dim_vo="head_dim")  # fmt: skip
    cache = f"paged_kv_cache_{part}"
    return dict(q=f"q_{part}", k=cache, v=cache, paged_kv_cache=cache, paged_kv_indices=cache)


def _of_part(part: str, function, tables: bool = False, others: dict[str, str] | None = None):
    """`function` with errors that name the arguments of one part; `others` are names beside those of its tensors."""
    return named(**_part_names(part, tables) | (others or {}))(function)


# Arguments of the request that is prefilled, by their names in single_prefill_with_kv_cache.
_ALONE = dict(scale_q="q_scale") | {name: f"{name}_p" for name in (
    "q", "k", "v", "custom_mask", "packed_custom_mask", "causal", "kv_layout", "pos_encoding_mode", "sm_scale",
    "window_left", "rope_scale", "rope_theta", "return_lse",
)}  # fmt: skip


class PODWithPagedKVCacheWrapper(OneWorkspace):
    """One request's prefill over contiguous keys, and a batch's decode over pages.

    They are two launches in the order of the stream, since their keys lie in different tensors; `BatchAttention` has
    prefill and decode in one.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer,
    paged_kv_last_page_len_buffer, jit_args
        As of `BatchDecodeWithPagedKVCacheWrapper`, for the decode.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.PODWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> indptr, pages, last = torch.tensor([0, 2]).int(), torch.tensor([3, 1]).int(), torch.tensor([4]).int()
    >>> wrapper.plan(indptr, pages, last, 8, 2, 64, 16, q_data_type="float32")
    >>> q, k, v = torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    >>> prefill, decode = wrapper.run(q, k, v, torch.randn(1, 8, 64), torch.randn(4, 2, 16, 2, 64), causal_p=True)
    >>> prefill.shape, decode.shape
    (torch.Size([5, 8, 64]), torch.Size([1, 8, 64]))
    """

    _workspace_of = "_decode"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: AttentionVariant | None = None,
    ):
        require(jit_args is None, "jit_args", "a variant", "None: the two parts have no variant in common")
        self._kv_layout = kv_layout
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )  # fmt: skip

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the decode keeps its tables in fixed buffers."""
        return self._decode.is_cuda_graph_enabled

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: PosEncodingMode = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Describe the decode; run() takes the prefill as it comes.

        Parameters
        ----------
        indptr : int Tensor [batch_size + 1]
            Where each request's entries begin in `indices`; on the host or the device, as are the next two.
        indices : int Tensor [pages used]
            Page ids.
        last_page_len : int Tensor [batch_size]
            Tokens in each request's last page.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Of the decode.
        pos_encoding_mode, window_left, sm_scale, rope_scale, rope_theta
            Options of the decode's logits, unless run() is given others; as in `single_decode_with_kv_cache`.
        q_data_type, kv_data_type, data_type : dtype or its name
            As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        non_blocking : bool
            Copies to the device never wait here; False changes nothing else.

        Raises
        ------
        ValueError
            As `BatchDecodeWithPagedKVCacheWrapper.plan`, which also says what is copied and what is kept.
        """
        options: dict[str, Any] = dict(
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, sm_scale=sm_scale, rope_scale=rope_scale,
            rope_theta=rope_theta,
        )  # fmt: skip
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=q_data_type,
            kv_data_type=kv_data_type, data_type=data_type, non_blocking=non_blocking, **options,
        )  # fmt: skip
        # Only now: what is refused leaves the plan before it as it was.
        self._options = options

    begin_forward = plan

    @named(custom_mask="custom_mask_p", causal="causal_p")
    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: KvLayout = "NHD",
        pos_encoding_mode_p: PosEncodingMode = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: KvLayout = "NHD",
        pos_encoding_mode_d: PosEncodingMode | None = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int | None = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args,
    ):
        """Attention of both parts.

        Parameters
        ----------
        q_p, k_p, v_p, custom_mask_p, packed_custom_mask_p, causal_p, kv_layout_p, pos_encoding_mode_p, sm_scale_p,
        window_left_p, rope_scale_p, rope_theta_p, return_lse_p
            As of `single_prefill_with_kv_cache`.
        q_d, paged_kv_cache_d, return_lse_d
            As of `BatchDecodeWithPagedKVCacheWrapper.run`.
        custom_mask_d, packed_custom_mask_d : optional
            Refused: a decode's one query sees all of its keys.
        causal_d : bool
            Changes nothing for one query.
        kv_layout_d : str
            The constructor's, or left at its default.
        pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d
            In the place of the planned ones; their defaults, and None, leave those.
        q_scale, k_scale, v_scale : float or Tensor, optional
            Scales of quantised q, k and v, of both parts.
        use_fp16_qk_reduction, enable_pdl
            Permissions that change no result.
        *args
            Refused.

        Returns
        -------
        prefill, decode : Tensor or (Tensor, Tensor)
            Shaped as q_p and as q_d; each with its base-2 log-sum-exp where that is asked for.

        Raises
        ------
        ValueError
            Before plan(); a mask of the decode; another kv_layout_d; extra arguments; as the functions behind both
            parts.
        """
        require(not args, "*args", f"{len(args)} extra arguments", "none")
        for name, mask in (("custom_mask_d", custom_mask_d), ("packed_custom_mask_d", packed_custom_mask_d)):
            require(mask is None, name, "a mask", "None: a decode's one query sees all of its keys")
        require(kv_layout_d in ("NHD", self._kv_layout), "kv_layout_d", repr(kv_layout_d), f"{self._kv_layout!r}")
        self._decode._planned()
        asked = dict(
            pos_encoding_mode=None if pos_encoding_mode_d == "NONE" else pos_encoding_mode_d, sm_scale=sm_scale_d,
            window_left=None if window_left_d == -1 else window_left_d, rope_scale=rope_scale_d,
            rope_theta=rope_theta_d,
        )  # fmt: skip
        self._decode._change_plan(**self._options | {name: x for name, x in asked.items() if x is not None})
        prefill = _of_part("p", single_prefill_with_kv_cache, others=_ALONE)(
            q_p, k_p, v_p, q_scale_of(q_scale, q_p), custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p,
            causal=causal_p, kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p,
            window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p, return_lse=return_lse_p,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        decode = _of_part("d", self._decode.run, others=dict(return_lse="return_lse_d"))(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse_d
        )
        return prefill, decode


def q_scale_of(scale, q: torch.Tensor) -> torch.Tensor | None:
    """A scale of q as a tensor, as single_prefill_with_kv_cache takes it."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.tensor([float(scale)], dtype=torch.float32, device="cpu")


class _MixedPrefillWrapper(BatchPrefillWithPagedKVCacheWrapper):
    _mixed = True


class BatchPODWithPagedKVCacheWrapper(MadeOfWrappers):
    """A batch's prefill and another's decode, each over pages.

    Where both read one cache they are one launch, whose work list holds the tiles of both: blocks of threads that
    multiply run beside blocks that wait for memory. They are two launches, in the order of the stream, over two caches,
    with a custom mask, with query offsets on the device, or where a causal prefill stands beside requests of several
    queries, which see all their keys.

    Parameters
    ----------
    float_workspace_buffer : uint8 Tensor
        Scratch on the compute device, for partial results; any size. Both parts use it, one after the other.
    kv_layout : str
        "NHD" or "HND".

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> prefill = [torch.tensor(x).int() for x in ([0, 5], [0, 1], [2], [5])]  # queries, pages of requests, pages, last
    >>> decode = [torch.tensor(x).int() for x in ([0, 1], [0, 2], [3, 1], [4])]
    >>> wrapper.plan(*prefill, *decode, 8, 2, 64, 16, q_data_type="float32")
    >>> cache = torch.randn(4, 2, 16, 2, 64)
    >>> p, d = wrapper.run(torch.randn(5, 8, 64), cache, torch.randn(1, 8, 64), cache, causal_p=True)
    >>> p.shape, d.shape
    (torch.Size([5, 8, 64]), torch.Size([1, 8, 64]))
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: KvLayout = "NHD"):
        self._both = _MixedPrefillWrapper(float_workspace_buffer, kv_layout)
        self._prefill, self._decode = (
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(2)
        )
        self._causal = self._apart = False
        # Which wrappers hold the tables of the last plan().
        self._planned_both = self._planned_parts = False
        self._tables: tuple[_Tables, ...] = ()

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether tables are kept in fixed buffers: they are not."""
        return False

    @checked
    @named(head_dim_qk="head_dim", head_dim_vo="head_dim")
    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: PosEncodingMode = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Describe both batches; every later run() uses them.

        All tables are kept by reference until the next plan(): run() plans again where the mask or the caches ask for
        it.

        Parameters
        ----------
        qo_indptr_p, kv_indptr_p : int Tensor [prefill requests + 1]
            Query rows of each request of the prefill, and where its entries begin in `kv_indices_p`.
        kv_indices_p : int Tensor [pages used]
        last_page_len_p : int Tensor [prefill requests]
            Page ids, and tokens in each last page, of the prefill.
        qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d : int Tensor
            The same of the decode. On the host, qo_indptr_d shows how many queries its requests have: tiles are cut for
            them.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Alike in both batches.
        pos_encoding_mode, window_left, sm_scale, rope_scale, rope_theta
            Options of the logits of both, as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        q_data_type, kv_data_type, data_type : dtype or its name
            As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        non_blocking : bool
            Copies to the device never wait here; False changes nothing else.

        Raises
        ------
        ValueError
            As `BatchPrefillWithPagedKVCacheWrapper.plan`, with the names of the part.
        """
        check_flag("non_blocking", non_blocking)
        q_data_type, kv_data_type = both_dtypes(q_data_type, kv_data_type, data_type)
        self._tables = (
            (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p),
            (qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d),
        )
        self._sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._options: dict[str, Any] = dict(
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, sm_scale=sm_scale, rope_scale=rope_scale,
            rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip
        self._planned_both = self._planned_parts = False
        # The two parts cannot be joined if their tables are on a device, where the host does not see the offsets, or if
        # they are slices of a larger batch.
        for part, tables in zip("pd", self._tables, strict=True):
            _of_part(part, host_lengths, True)((*tables[:2], tables[3], tables[2]), PREFILL_NAMES, page_size, 0)
            _of_part(part, check_offsets, True)(*tables[:2])
        offsets = qo_indptr_p, kv_indptr_p, qo_indptr_d, kv_indptr_d
        self._joinable = all(t.device.type == "cpu" for t in offsets) and all(t.numel() for t in offsets)
        self._joinable = self._joinable and int(qo_indptr_d[0]) == 0
        self._rows = int(qo_indptr_p[-1]) if self._joinable else -1
        self._single = self._joinable and bool((qo_indptr_d[1:] - qo_indptr_d[:-1] <= 1).all())
        # Only run() says whether the prefill is causal, masked, or in a cache of its own: plan for the last such call.
        if self._apart or not self._joinable:
            self._plan_parts()
        else:
            self._plan_both()

    def _plan_both(self) -> None:
        qo_indptr = joined_offsets(*(part[0] for part in self._tables))
        # Drop pages of no request: they would lie between the pages of the two parts.
        parts = [(from_zero(kv), pages[int(kv[0]) : int(kv[-1])], last) for _, kv, pages, last in self._tables]
        kv_indptr = joined_offsets(*(part[0] for part in parts))
        indices, last_page_len = (torch.cat([p, d.to(p.device)]) for p, d in zip(parts[0][1:], parts[1][1:]))
        try:
            self._both.plan(qo_indptr, kv_indptr, indices, last_page_len, *self._sizes, causal=self._causal,
                            **self._options)  # fmt: skip
        except ValueError as error:
            # An error in the joined tables is one of a part, which is reported by that part's names, or of their sum.
            self._plan_parts()
            raise renamed(error, _part_names("p", True)) from None
        self._planned_both = True

    def _plan_parts(self) -> None:
        _of_part("p", self._prefill.plan, True)(*self._tables[0], *self._sizes, causal=self._causal, **self._options)
        _of_part("d", self._decode.plan, True)(*self._tables[1], *self._sizes, **self._options)
        self._planned_parts = True

    begin_forward = plan

    @checked
    @named(causal="causal_p", custom_mask="custom_mask_p")
    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        q_d: torch.Tensor,
        paged_kv_cache_d: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ):
        """Attention of both batches.

        Parameters
        ----------
        q_p, paged_kv_cache_p, q_d, paged_kv_cache_d
            As of `BatchPrefillWithPagedKVCacheWrapper.run`.
        custom_mask_p, packed_custom_mask_p, causal_p
            As of its plan(), for the prefill. A mask is planned at every call.
        q_scale, k_scale, v_scale : float or Tensor, optional
            Scales of quantised q, k and v, of both batches.
        return_lse : bool
        use_fp16_qk_reduction, enable_pdl
            Permissions that change no result.

        Returns
        -------
        prefill, decode : Tensor or (Tensor, Tensor)
            Shaped as q_p and as q_d; with return_lse each with its base-2 log-sum-exp.

        Raises
        ------
        ValueError
            Before plan(); an operand of one part, by its name here; as the functions behind both parts.
        """
        if not self._tables:
            raise NoPlan("BatchPODWithPagedKVCacheWrapper.run: got no plan; allowed: after plan()")
        for name, part in (("q_p", q_p), ("q_d", q_d)):
            require(part.dim() == 3, name, tuple(part.shape), "[rows, num_qo_heads, head_dim]")
        self._causal = causal_p
        masked = custom_mask_p is not None or packed_custom_mask_p is not None
        several = causal_p and not self._single
        joined = self._joinable and len(q_p) == self._rows and q_p.shape[1:] == q_d.shape[1:] and q_p.dtype == q_d.dtype
        self._apart = masked or several or not joined or not same_cache(paged_kv_cache_p, paged_kv_cache_d)
        call = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)
        if not self._apart:
            if not self._planned_both:
                self._plan_both()
            self._both._change_plan(causal=causal_p)
            # Both parts have the same dtypes and shapes, so errors name the prefill's arguments.
            out = _of_part("p", self._both.run)(torch.cat([q_p, q_d]), paged_kv_cache_p, **call)
            rows = (len(q_p), len(q_d))
            return tuple(zip(*(x.split(rows) for x in out))) if return_lse else out.split(rows)
        if not self._planned_parts:
            self._plan_parts()
        if masked or self._prefill._planned().table.mask is not None:
            self._prefill.plan(*self._tables[0], *self._sizes, custom_mask=custom_mask_p,
                               packed_custom_mask=packed_custom_mask_p, **self._options)  # fmt: skip
        self._prefill._change_plan(causal=causal_p)
        prefill = _of_part("p", self._prefill.run)(q_p, paged_kv_cache_p, **call)
        return prefill, _of_part("d", self._decode.run)(q_d, paged_kv_cache_d, **call)

    def end_forward(self) -> None:
        """Do nothing; kept for callers of older versions. There is nothing to release."""
