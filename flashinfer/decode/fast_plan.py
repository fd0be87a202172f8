"""plan() of batch decode, as the function that engines bind in its place."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.literals import PosEncodingMode
from flashinfer.decode.batch import BatchDecodeWithPagedKVCacheWrapper


@checked
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: PosEncodingMode = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`BatchDecodeWithPagedKVCacheWrapper.plan`, under the name engines bind in its place.

    Upstream's is faster than its plan() because it copies less; plan() here copies no more than this. With
    `global_override_indptr_cpu`, that host tensor is `indptr`. The output type is that of an earlier plan. Other
    parameters as in plan().

    Parameters
    ----------
    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode
        As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
    window_left, logits_soft_cap, q_data_type, kv_data_type, data_type, sm_scale, rope_scale, rope_theta
        As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
    non_blocking, fixed_split_size, disable_split_kv, q_len_per_req
        As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
    global_override_indptr_cpu : torch.Tensor, optional
        Host tensor [batch_size + 1] in the place of `indptr`.
    self : BatchDecodeWithPagedKVCacheWrapper
        The wrapper to plan.

    Raises
    ------
    ValueError
        As `BatchDecodeWithPagedKVCacheWrapper.plan` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> indptr, pages, last = torch.tensor([0, 2]).int(), torch.tensor([3, 1]).int(), torch.tensor([4]).int()
    >>> flashinfer.fast_decode_plan(wrapper, indptr, pages, last, 8, 2, 64, 16, q_data_type="float32")
    >>> wrapper.run(torch.randn(1, 8, 64), torch.randn(4, 2, 16, 2, 64)).shape
    torch.Size([1, 8, 64])
    """
    # Engines put this in the place of the wrapper's own plan().
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self, indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type, kv_data_type=kv_data_type, data_type=data_type, sm_scale=sm_scale,
        rope_scale=rope_scale, rope_theta=rope_theta, non_blocking=non_blocking, fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req,
        o_data_type=None if self._base is None else self._base.options.o_dtype,
    )  # fmt: skip
