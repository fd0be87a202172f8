"""Decode with the signature of TensorRT-LLM's XQA: its axes for batch and beam, its scales, an output to write."""

from __future__ import annotations

import inspect
import sys
import types

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import check_apart, require
from flashinfer._core.custom_op import one_op
from flashinfer._core.direct_replay import direct
from flashinfer._core.literals import KvLayout
from flashinfer._direct.given import scale, whole, with_pages
from flashinfer._direct.trtllm_decode import trtllm_batch_decode_with_kv_cache
from flashinfer.mla.decode import xqa_mla
from flashinfer.ops.kv_layout import check_layout

__all__ = ["xqa", "xqa_mla"]


@direct(writes=("output",))
@one_op(("output",), {}, lambda its: None, between=True)
@named(query="q", kv_cache="k_cache", block_tables="page_table", out="output", kv_block_scales="k_sf_cache",
       kv_cache_sf="k_sf_cache", o_data_type="output", q_data_type="q", kv_data_type="k_cache",
       bmm1_scale="q_scale", bmm2_scale="kv_scale", window_left="sliding_win_size", q_len_per_req="q_seq_len",
       max_q_len="q_seq_len", cum_seq_lens_q="q_cu_seq_lens")  # fmt: skip
def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: KvLayout = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
) -> None:
    """Decode attention of a batch that only the device knows, into `output`.

    Logits are q . k * q_scale * kv_scale / sqrt(head_dim), and the output is scaled by kv_scale * rcp_out_scale.

    Parameters
    ----------
    q : Tensor
        [batch, 1, num_q_heads, head_dim], [batch, 1, q_seq_len, num_q_heads, head_dim], or, with q_cu_seq_lens,
        [tokens, num_q_heads, head_dim]. The second axis is the beam, of width 1. bf16, fp16 or fp8.
    k_cache, v_cache : Tensor
        [pages, page_size, num_kv_heads, head_dim] (NHD) or [pages, num_kv_heads, page_size, head_dim] (HND); q's dtype,
        or fp8.
    page_table : int32 Tensor [batch, max_pages]
        Page ids of each request; past its keys anything.
    seq_lens : uint32 or int32 Tensor [batch, 1] or [batch]
        Keys of each request, those of its queries among them.
    output : Tensor, as q
        Written; its dtype may be another, fp8 too, which saturates.
    workspace_buffer, semaphores, sm_count, enable_pdl
        Scratch and hints that change no result.
    num_kv_heads, page_size : int
        As the caches have them.
    sinks : float32 Tensor [num_kv_heads, num_q_heads / num_kv_heads] or [num_q_heads], optional
        A logit per head that takes part in the softmax without a value.
    q_scale, kv_scale : float or float32 Tensor [1]
    sliding_win_size : int
        A query sees this many keys, itself among them; 0 for all.
    kv_layout : str
        "NHD" or "HND": the axes of the caches.
    rcp_out_scale : float
        Factor of the output.
    q_seq_len : int
        Queries of every request, causal among themselves; with q_cu_seq_lens, the most of any.
    mask : Tensor, optional
        As in `trtllm_batch_decode_with_kv_cache`.
    q_cu_seq_lens : int32 Tensor [batch + 1], optional
        First token of each request, for requests of different numbers of queries.
    k_sf_cache, v_sf_cache : Tensor, optional
        Factors of nvfp4 caches, those of V row by row (`trtllm_batch_decode_with_kv_cache` with backend "xqa").

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    UnsupportedConfig
        What is refused above, or a problem that no variant takes.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(2, 1, 8, 64).half(), torch.randn(4, 16, 2, 64).half(), torch.randn(4, 16, 2, 64).half()
    >>> pages, lens = torch.tensor([[3, 1], [0, 0]]).int(), torch.tensor([[20], [5]]).int()
    >>> out, scratch = torch.empty_like(q), torch.empty(0, dtype=torch.uint8)
    >>> flashinfer.xqa(q, k, v, pages, lens, out, scratch, scratch, 2, 16)
    >>> bool(out.isfinite().all())
    True
    """
    for name, given, other in (("k_sf_cache", k_sf_cache, v_sf_cache), ("v_sf_cache", v_sf_cache, k_sf_cache)):
        require(given is not None or other is None, name, None, "a tensor: K and V are nvfp4 both, or neither")
    check_layout(kv_layout)
    num_kv_heads, page_size = whole("num_kv_heads", num_kv_heads, 1), whole("page_size", page_size, 1)
    sliding_win_size, q_seq_len = whole("sliding_win_size", sliding_win_size, 0), whole("q_seq_len", q_seq_len, 1)
    if page_size == 1:
        k_cache, v_cache = with_pages((k_cache, v_cache), kv_layout)
    got = tuple(k_cache.shape[1:3] if kv_layout == "NHD" else k_cache.shape[2:0:-1])
    expected = (page_size, num_kv_heads)
    require(got == expected, "k_cache", f"{got} tokens and heads a page", f"{expected}, page_size and num_kv_heads")
    axes = 3 if q_cu_seq_lens is not None else 4 if q.dim() == 4 else 5
    allowed = "[batch, 1, (q_seq_len,) num_q_heads, head_dim], or [tokens, num_q_heads, head_dim] with q_cu_seq_lens"
    fits = q.dim() == axes and (axes == 3 or q.shape[1] == 1) and (axes < 5 or q.shape[2] == q_seq_len)
    require(fits, "q", tuple(q.shape), allowed)
    require(output.shape == q.shape, "output", tuple(output.shape), str(tuple(q.shape)))
    require(axes != 4 or q_seq_len == 1, "q_seq_len", q_seq_len, "1 without an axis for it in q")
    read = dict(q=q, k_cache=k_cache, v_cache=v_cache, k_sf_cache=k_sf_cache, v_sf_cache=v_sf_cache)
    check_apart([("output", output)], read.items())
    # Where the strides of requests and of their queries do not make one, rows are a copy.
    rows, results = q.reshape(-1, *q.shape[-2:]), output.reshape(-1, *q.shape[-2:])
    q_scale, kv_scale = scale("q_scale", q_scale, q.device), scale("kv_scale", kv_scale, q.device)
    of_out = scale("rcp_out_scale", rcp_out_scale, q.device)
    trtllm_batch_decode_with_kv_cache(
        rows, (k_cache, v_cache), workspace_buffer, page_table, seq_lens, 0,
        q_scale * kv_scale * q.shape[-1] ** -0.5, kv_scale * of_out, sliding_win_size - 1, results,
        sinks=sinks, kv_layout=kv_layout, q_len_per_req=q_seq_len, mask=mask,
        max_q_len=None if q_cu_seq_lens is None else q_seq_len, cum_seq_lens_q=q_cu_seq_lens, backend="xqa",
        kv_cache_sf=None if k_sf_cache is None else (k_sf_cache, v_sf_cache),
    )  # fmt: skip
    if results.data_ptr() != output.data_ptr():
        output.copy_(results.view(output.shape))


class _Callable(types.ModuleType):
    """This module, whose function upstream's root gives the module's own name: whichever is found can be called."""

    __signature__ = inspect.signature(xqa)

    def __call__(self, *args, **kwargs):
        return xqa(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
