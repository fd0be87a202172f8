"""Decode attention of a batch over a paged KV cache."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import require
from flashinfer._core.literals import Backend, KvLayout, LseBase, PosEncodingMode
from flashinfer._core.signatures import returning_lse, sized_by
from flashinfer.compat.wrappers import PagedNames
from flashinfer.ops.attention.agree import as_count, check_agrees, check_buffers
from flashinfer.ops.attention.operands import by_name, is_plain
from flashinfer.ops.attention.options import both_dtypes, check_flag, plan_options
from flashinfer.ops.attention.variants import AttentionVariant, chosen
from flashinfer.ops.attention.wrapper import device_of


def _is_causal(window_right: int, is_causal: bool | None, q_len_per_req: int) -> bool:
    """Whether queries of a request see no later one."""
    require(window_right in (0, -1), "window_right", window_right, "0 (no key behind a query's position) or -1 (all)")
    require(is_causal in (None, True, False), "is_causal", repr(is_causal), "None, True or False")
    contradicts = is_causal is True and window_right == -1 and q_len_per_req > 1
    require(not contradicts, "is_causal", True, "None or False with window_right=-1")
    return q_len_per_req > 1 and window_right == 0 and is_causal is not False


_BUFFERS = dict(
    kv_indptr="paged_kv_indptr_buffer", kv_indices="paged_kv_indices_buffer",
    last_page_len="paged_kv_last_page_len_buffer",
)  # fmt: skip
# Backends of upstream that take any number of queries of a request, whatever was planned.
_ANY_Q_LEN = "trtllm-gen", "cute-dsl"


class BatchDecodeWithPagedKVCacheWrapper(PagedNames):
    """Decode attention of a batch over a paged KV cache: plan() once per step, run() once per layer.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, variant
        As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    use_tensor_cores : bool
        Upstream's hint between two kernels; one kernel serves both here.
    paged_kv_indptr_buffer : int32 Tensor [max_batch + 1], optional
    paged_kv_indices_buffer : int32 Tensor [max pages], optional
    paged_kv_last_page_len_buffer : int32 Tensor [max_batch], optional
        The buffers, with use_cuda_graph.
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).
    jit_args : optional
        An AttentionVariant, or upstream's list with one for its declaration; CUDA C++ is refused.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> indptr, last = torch.tensor([0, 2, 5]), torch.tensor([3, 16])
    >>> wrapper.plan(indptr, torch.arange(5), last, 8, 2, 64, 16, q_data_type="float32")
    >>> q, kv = torch.randn(2, 8, 64), torch.randn(5, 2, 16, 2, 64)
    >>> wrapper.run(q, kv).shape
    torch.Size([2, 8, 64])
    """

    _names = "qo_indptr", "indptr", "last_page_len", "indices"

    _renames = {"head_dim_qk": "head_dim", "head_dim_vo": "head_dim"}

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: Backend = "auto",
        jit_args=None,
        variant: AttentionVariant | None = None,
    ):
        check_flag("use_cuda_graph", use_cuda_graph)
        buffers = None
        if use_cuda_graph:
            buffers = check_buffers(
                device_of(float_workspace_buffer), _BUFFERS, kv_indptr=paged_kv_indptr_buffer,
                kv_indices=paged_kv_indices_buffer, last_page_len=paged_kv_last_page_len_buffer,
            )  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, backend, buffers, chosen(variant, jit_args))
        self._use_tensor_cores = use_tensor_cores

    @property
    def use_tensor_cores(self) -> bool:
        """The hint given to the constructor."""
        return self._use_tensor_cores

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
        window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Describe a batch; every later run() uses it.

        Parameters
        ----------
        indptr : int Tensor [batch_size + 1]
            Where each request's entries begin in `indices`; on the host or the device. It may be a slice of a larger
            batch's, whose first is not 0, beside all of that batch's page ids.
        indices : int Tensor [pages used]
            Page ids.
        last_page_len : int Tensor [batch_size]
            Tokens in each request's last page, 1 ... page_size (0 for a request without pages).
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            num_qo_heads is a multiple of num_kv_heads; any page_size from 1 up.
        pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
            As in `single_decode_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type : dtype or its name
            kv defaults to q's, out to q's (bfloat16 for fp8 q); kv may be a format with factors, of
            `run`: "nvfp4" (or uint8), "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head",
            "int4_group_64".
        data_type : dtype or its name, optional
            Older name for both: q's and kv's, where they are left at their defaults. FP8 leaves q's at float16.
        non_blocking, fixed_split_size, disable_split_kv
            As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.
        block_tables, seq_lens : Tensor, optional
            The same tables as other libraries have them. `indptr`, `indices` and `last_page_len` are enough; what is
            on the host has to agree with them.
        q_len_per_req : int
            Query tokens of each request (speculative decoding); run() takes q [batch_size * q_len_per_req, ...], and
            the queries of a request are causal among themselves, unless the next two say otherwise.
        window_right : int
            0: a query sees no key behind its position; -1: it sees all of them.
        is_causal : bool, optional
            The same in other words; None for what window_right says.

        Raises
        ------
        ValueError
            An argument out of its range, by name; in CUDA-graph mode, more than the buffers hold.

        Notes
        -----
        What is read here and what is kept by reference is as in `flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        if type(q_len_per_req) is not int or q_len_per_req < 1:
            q_len_per_req = as_count("q_len_per_req", q_len_per_req)
            require(q_len_per_req >= 1, "q_len_per_req", q_len_per_req, "at least 1")
        check_flag("non_blocking", non_blocking)
        causal = q_len_per_req > 1
        if window_right or is_causal is not None:
            causal = _is_causal(window_right, is_causal, q_len_per_req)
        if data_type is not None:
            q_data_type, kv_data_type = both_dtypes(q_data_type, kv_data_type, data_type)
        asked = plan_options(
            source="paged", num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim,
            head_dim_vo=head_dim, page_size=page_size, q_dtype=q_data_type, kv_dtype=kv_data_type, o_dtype=o_data_type,
            causal=causal, window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta,
            fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        )  # fmt: skip
        tables = None, indptr, last_page_len, indices
        if seq_lens is not None or block_tables is not None:
            check_agrees(tables, self._names, page_size, seq_lens=seq_lens, block_tables=block_tables)
        self._plan(asked, tables, q_len=q_len_per_req)
        self._drafts_causal = not window_right and is_causal is not False

    begin_forward = plan

    workspace_size = sized_by(plan, "non_blocking", "window_right", "is_causal")

    def _probe(self) -> BatchDecodeWithPagedKVCacheWrapper:
        """A wrapper as this one, to plan and throw away."""
        workspace, layout = self._float_workspace_buffer, self._kv_layout
        return BatchDecodeWithPagedKVCacheWrapper(workspace, layout, backend=self._backend, variant=self._variant)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides are arguments of kernels here, and no variant of them needs warming.

        Parameters
        ----------
        variant : str
            Not read.
        """

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf=None,
        kv_block_scales=None,
        params: dict | None = None,
        lse_base: LseBase = "log2",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Parameters
        ----------
        q : Tensor [batch_size * q_len_per_req, num_qo_heads, head_dim]
        paged_kv_cache : Tensor or (Tensor, Tensor)
            NHD [pages, 2, page_size, num_kv_heads, head_dim] or HND [pages, 2, num_kv_heads, page_size, head_dim], or
            (k, v) without the second axis. Any strides, head_dim contiguous. With pages of one token the page axis may
            be left out: [slots, 2, num_kv_heads, head_dim] or (k, v) [slots, num_kv_heads, head_dim], in both layouts.
        *args
            The variant's parameters, in its order; or by name in `params`. Without one, of FP8 queries, 3 scales.
        q_scale, k_scale, v_scale : float or Tensor, optional
            Scales of quantised q, k and v; a tensor has 1, num_kv_heads or num_qo_heads elements.
        out : Tensor, optional
            Where to write, shaped as q.
        lse : float32 Tensor [rows, num_qo_heads], optional
            Where to write the log-sum-exp.
        return_lse : bool
        enable_pdl : bool, optional
            Programmatic dependent launch: no effect on results.
        window_left : int, optional
            Narrows the planned window; with backend "trtllm-gen" it stands in its place.
        sinks : float Tensor [num_qo_heads], optional
            A logit per head that takes part in the softmax without a value.
        q_len_per_req : int, optional
            The planned one, or 1. With backend "trtllm-gen" or "cute-dsl", q may have another number of queries of each
            request than was planned, outside CUDA graphs: the batch is then planned for it, from the planned tables;
            those that the caller gave on the GPU are read as they are then.
        skip_softmax_threshold_scale_factor : float, optional
            Upstream's permission to skip small probabilities; the result here is exact with and without it.
        kv_block_scales, kv_cache_sf : (Tensor, Tensor) or Tensor, optional
            Two names of one argument: the factors of a cache that is planned so, laid out as the cache, with those of a
            row last. A value is code * factor, times k_scale or v_scale.

            "fp8_per_token_head", "int8_per_token_head": a cache of float8_e4m3fn or int8, or of its bytes; float32
            factors, one a row (1 last). "int4_per_token_head": uint8 with head_dim / 2 last, two's complement, two a
            byte, the first in the low half; float32 factors, one a row. "int4_group_64": a factor for each 64 of a row.
            Factors may lie anywhere, also between rows of codes: only their last axis is dense.
            `flashinfer.page.quantize_append_paged_kv_cache` writes them.

            "nvfp4": uint8 with head_dim / 2 last, two e2m1 a byte, the first in the low half; factors float8_e4m3fn or
            uint8 with head_dim / 16 last. The backend says how the
            factors of V lie: with "trtllm-gen" as `nvfp4_quantize_paged_kv_cache` writes them, four tokens interleaved;
            with any other row by row, as `nvfp4_quantize_append_paged_kv_cache_with_slot_mapping` does.
        params : dict, optional
            What the variant's functions are given.
        lse_base : str
            Base of the log-sum-exp: "log2" or "ln".

        Returns
        -------
        out : Tensor, as q with the output dtype
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            Base 2, unless lse_base says otherwise; -inf for a request without keys, whose out is 0.

        Raises
        ------
        ValueError
            As in `flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if args:
            scales = q_scale, k_scale, v_scale
            params, (q_scale, k_scale, v_scale) = by_name(args, self._variant, q, params, scales)
        if self._backend in _ANY_Q_LEN:
            self._plan_for(q, self._drafts_causal)
        if q_len_per_req is not None and q_len_per_req != 1:
            planned = self._planned().table.each_q
            require(q_len_per_req == planned, "q_len_per_req", q_len_per_req, f"{planned}, as planned")
        call = q, paged_kv_cache, out, lse, return_lse, q_scale, k_scale, v_scale, window_left
        plain = is_plain(lse_base)
        if plain and sinks is None and params is None and kv_block_scales is None and kv_cache_sf is None:
            return self._run(*call)
        given = dict(sinks=sinks, params=params, **self._factors(kv_block_scales, kv_cache_sf))
        return self._run(*call, **given) if plain else self._run_with_lse(lse_base, "NH", *call, **given)

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: PosEncodingMode = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Older name of `run`; these options replace the planned ones, for this call and later ones.

        An option that is left out takes its default here, not what plan() was given.

        Parameters
        ----------
        q : Tensor [batch_size * q_len_per_req, num_qo_heads, head_dim]
        paged_kv_cache : Tensor or (Tensor, Tensor)
            Pages of keys and values, as in `run`.
        q_scale, k_scale, v_scale : float, optional
            Scales of quantised q, k and v.
        pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
            As in `plan`.
        return_lse : bool

        Returns
        -------
        out : Tensor [rows, num_qo_heads, head_dim]
        lse : float32 Tensor [rows, num_qo_heads], with return_lse
            Base 2; -inf for a row that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            As `run`; an option out of its range, by name.
        """
        self._change_plan(
            pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = returning_lse(forward)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with use_cuda_graph=True.

    plan() copies a batch of up to max_batch requests into the buffers; a graph captured over run() then serves it.

    Parameters
    ----------
    workspace_buffer : uint8 Tensor
        Scratch on the compute device, for partial results; any size. Its device is the wrapper's.
    indptr_buffer : int32 Tensor [max_batch + 1]
    indices_buffer : int32 Tensor [max pages]
    last_page_len_buffer : int32 Tensor [max_batch]
        Contiguous buffers on that device, which the wrapper keeps and writes into.
    kv_layout : str
        "NHD": pages of [page_size, num_kv_heads, head_dim]; "HND": [num_kv_heads, page_size, head_dim].
    use_tensor_cores : bool
        A hint between two kernels of upstream; one kernel serves both here.

    Raises
    ------
    ValueError
        A buffer that is missing, not int32, not contiguous or on another device, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> buffers = (torch.empty(n, dtype=torch.int32) for n in (3, 64, 2))  # 2 requests, up to 64 pages
    >>> workspace = torch.empty(0, dtype=torch.uint8)
    >>> wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    >>> indptr, pages, last = torch.tensor([0, 2, 3]).int(), torch.tensor([3, 1, 0]).int(), torch.tensor([4, 9]).int()
    >>> wrapper.plan(indptr, pages, last, 8, 2, 64, 16, q_data_type="float32")
    >>> wrapper.run(torch.randn(2, 8, 64), torch.randn(4, 2, 16, 2, 64)).shape
    torch.Size([2, 8, 64])
    """

    @named(float_workspace_buffer="workspace_buffer", **{x: x.removeprefix("paged_kv_") for x in _BUFFERS.values()})
    def __init__(
        self, workspace_buffer: torch.Tensor, indptr_buffer: torch.Tensor, indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor, kv_layout: KvLayout = "NHD", use_tensor_cores: bool = False,
    ):  # fmt: skip
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )
