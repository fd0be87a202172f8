"""Attention over prefixes shared on several levels, all in one paged KV cache."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import NoPlan, UnsupportedConfig, as_dtype, present, require
from flashinfer._core.literals import KvLayout, PosEncodingMode
from flashinfer.ops.attention.copies import MadeOfWrappers
from flashinfer.ops.attention.host_tables import host_lengths
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from .merge import V_DTYPES, merge_states

# Each has a wrapper of its own.
_MOST_LEVELS = 1024


class MultiLevelCascadeAttentionWrapper(MadeOfWrappers):
    """Attention over a paged KV cache whose requests share prefixes, on any number of levels.

    The keys of a request are those of its nodes from level 0, the widest shared, to the last level, its own. Each level
    is a batch of nodes: a node has consecutive rows of q, those of all requests below it, and pages of keys, which it
    reads once for all of them. The levels' results are merged. A level may hold nodes without keys, or no keys at all.

    Parameters
    ----------
    num_levels : int
        1 to 1024; 1 is plain paged attention.
    float_workspace_buffer : torch.Tensor
        uint8 scratch on the compute device, shared by the levels, which run one after another.
    kv_layout : str
        "NHD" or "HND", of every page.
    use_cuda_graph : bool
        Keep the tables in the buffers below, so that a captured `run` serves every later `plan` that fits them.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr : list of torch.Tensor, optional
    paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr : list of torch.Tensor, optional
        With use_cuda_graph, one int32 tensor per level: [max nodes + 1], [max nodes + 1], [max pages], [max nodes].

    Raises
    ------
    ValueError
        num_levels out of its range; with use_cuda_graph, a list that has not one tensor per level.

    Notes
    -----
    The method is Cascade Inference (Ye et al., 2024; FlashInfer, arXiv:2501.01005, section 3.2).

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(0, dtype=torch.uint8))
    >>> def table(*values): return torch.tensor(values, dtype=torch.int32)
    >>> shared, own = table(0, 2), table(0, 1, 2)  # two queries: pages that both see, and one page of each
    >>> wrapper.plan([table(0, 2), table(0, 1, 2)], [shared, own], [table(0, 1), table(2, 3)],
    ...     [table(16), table(4, 7)], 8, 2, 64, 16, q_data_type="float32")
    >>> wrapper.run(torch.randn(2, 8, 64), torch.randn(4, 2, 16, 2, 64)).shape
    torch.Size([2, 8, 64])
    """

    @checked
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ):
        require(1 <= num_levels <= _MOST_LEVELS, "num_levels", num_levels, f"1 ... {_MOST_LEVELS}")
        self._num_levels = num_levels
        self._use_cuda_graph = use_cuda_graph
        self._has_plan = False
        buffers = dict(
            qo_indptr_buf=qo_indptr_buf_arr,
            paged_kv_indptr_buf=paged_kv_indptr_buf_arr,
            paged_kv_indices_buf=paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf_arr,
        )
        levels = [{} for _ in range(num_levels)]
        if use_cuda_graph:
            for name, per_level in buffers.items():
                self._require_levels(f"{name}_arr", per_level)
                for level, buffer in zip(levels, per_level or []):
                    level[name] = buffer
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **level)
            for level in levels
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the tables are kept in fixed buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Replace the workspace buffers.

        Every level keeps them by reference; partial results go into the new one from the next plan() on.

        Parameters
        ----------
        float_workspace_buffer : uint8 Tensor
            On the wrapper's device, of any size; shared by all levels.
        int_workspace_buffers : list of Tensor
            One per level. Not used: work lists belong to their plan.

        Raises
        ------
        ValueError
            Another number of int_workspace_buffers than levels; float_workspace_buffer is not a tensor, or on another
            device.
        """
        self._require_levels("int_workspace_buffers", int_workspace_buffers)
        for level, int_workspace_buffer in zip(self._levels, int_workspace_buffers):
            level.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @checked
    @named(qo_indptr="qo_indptr_arr", paged_kv_indptr="paged_kv_indptr_arr", paged_kv_indices="paged_kv_indices_arr",
           paged_kv_last_page_len="paged_kv_last_page_len", head_dim_qk="head_dim", head_dim_vo="head_dim")  # fmt: skip
    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Describe a batch; every later `run` uses it.

        Parameters
        ----------
        qo_indptr_arr : list of torch.Tensor
            Per level, int32 [nodes + 1]: rows of q of each node. Every level begins and ends at the same rows.
        paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : list of torch.Tensor
            Per level, the page table of its nodes: int32 [nodes + 1], [pages], [nodes]; a node without keys has no
            pages and a last_page_len of 0.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Alike on all levels; num_qo_heads is a multiple of num_kv_heads.
        causal : bool
            Applies to the last level: the last row of a request stands at its last key there. The keys of all other
            levels are seen whole.
        pos_encoding_mode : str
            "NONE"; with one level also "ROPE_LLAMA" and "ALIBI".
        use_fp16_qk_reduction : bool
            As of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        sm_scale : float, optional
            Factor of the logits; None is 1 / sqrt(head_dim).
        window_left : int
            A query sees no key more than this many positions before its own, positions running through all levels;
            -1 is no window. With tables on a GPU and two levels or more this waits for the device.
        logits_soft_cap : float, optional
            Logits become cap * tanh(logits / cap).
        rope_scale, rope_theta : float, optional
            For ROPE_LLAMA.
        q_data_type, kv_data_type : torch.dtype or str
            float16, bfloat16 or float32 of q; kv defaults to q's.

        Raises
        ------
        UnsupportedConfig
            Two levels or more with a position encoding, whose positions would start at 0 on each level: apply it to
            the keys before they are cached; or, with use_cuda_graph, with a window.
        ValueError
            A list that has not one tensor per level; levels that end at different rows; whatever
            `BatchPrefillWithPagedKVCacheWrapper.plan` refuses.
        """
        tables = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        for name, per_level in zip(names, tables):
            self._require_levels(name, per_level)
        self._check_rows(qo_indptr_arr)
        allowed = ", ".join(map(str, V_DTYPES))
        q_dtype = present("q_data_type", as_dtype(q_data_type), allowed)
        require(q_dtype in V_DTYPES, "q_data_type", q_dtype, allowed)
        masks = [None] * self._num_levels
        if self._num_levels > 1:
            if pos_encoding_mode != "NONE":
                raise UnsupportedConfig(
                    f"pos_encoding_mode: got {pos_encoding_mode!r}; allowed: 'NONE' with two levels or more, positions "
                    "applied to the keys before they are cached"
                )
            if window_left >= 0 and self._use_cuda_graph:
                raise UnsupportedConfig(
                    f"window_left: got {window_left}; allowed: -1 with two levels or more and use_cuda_graph"
                )
            if window_left >= 0:
                for i, level in enumerate(self._levels):
                    host_lengths(tuple(tables[j][i] for j in (0, 1, 3, 2)), level._names, page_size, 0)
                masks = _window_masks(tables, page_size, window_left, self._levels[0].device)
        # Where a level refuses its tables, those before it have new ones already.
        self._has_plan = False
        for i, (level, mask) in enumerate(zip(self._levels, masks)):
            last = i == self._num_levels - 1
            level.plan(
                tables[0][i], tables[1][i], tables[2][i], tables[3][i], num_qo_heads, num_kv_heads, head_dim, page_size,
                custom_mask=mask,
                causal=causal and last,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                # On the other levels the mask hides the keys outside the window.
                window_left=window_left if last else -1,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_dtype,
                kv_data_type=kv_data_type,
            )
        self._has_plan = True

    begin_forward = plan

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides are arguments of kernels here, and no variant of them needs warming.

        Parameters
        ----------
        variant : str
            Not read.
        """
        for level in self._levels:
            level.prewarm_paged_kv_stride_variant(variant)

    @checked
    @named(k="paged_kv_cache", v="paged_kv_cache", paged_kv_indices="paged_kv_cache")
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            [rows, num_qo_heads, head_dim].
        paged_kv_cache : torch.Tensor or (torch.Tensor, torch.Tensor)
            The pages of all levels, as of `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        torch.Tensor
            Shape and dtype of q; 0 where a row has no keys on any level.

        Raises
        ------
        ValueError
            Before `plan`, or after one that a level refused; tensors other than planned.
        """
        if not self._has_plan:
            raise NoPlan("MultiLevelCascadeAttentionWrapper.run: got no plan; allowed: after plan()")
        if self._num_levels == 1:
            return self._levels[0].run(q, paged_kv_cache)
        require(q.dim() == 3, "q", tuple(q.shape), "[rows, num_qo_heads, head_dim]")
        v = torch.empty((self._num_levels, *q.shape), dtype=q.dtype, device=q.device)
        s = torch.empty(v.shape[:-1], dtype=torch.float32, device=q.device)
        for level, out, lse in zip(self._levels, v, s):
            level.run(q, paged_kv_cache, out=out, lse=lse, return_lse=True)
        return merge_states(v.transpose(0, 1), s.transpose(0, 1))[0]

    forward = run

    def _require_levels(self, name, per_level) -> None:
        count = 0 if per_level is None else len(per_level)
        require(count == self._num_levels, name, f"{count} tensors", f"{self._num_levels}, one per level")

    def _check_rows(self, qo_indptr_arr) -> None:
        """Of tables on the host: looking at others would wait for the device."""
        for indptr in qo_indptr_arr:
            require(indptr.dim() == 1, "qo_indptr_arr", tuple(indptr.shape), "[batch + 1] for each level")
        for name, at in (("ending", -1), ("beginning", 0)):
            ends = [int(indptr[at]) for indptr in qo_indptr_arr if indptr.numel() and not indptr.is_cuda]
            alike = all(end == ends[0] for end in ends)
            require(alike, "qo_indptr_arr", f"levels {name} at rows {ends}", "the same rows on every level")


def _window_masks(tables, page_size: int, window_left: int, device: torch.device) -> list[torch.Tensor | None]:
    """Custom masks of all levels but the last that keep the keys of a window; None where it ends on a later level.

    Windows are counted back from positions in the whole request, which a level's own plan does not know.
    """
    qo_indptrs, kv_indptrs, _, last_page_lens = ([t.cpu().long() for t in per_level] for per_level in tables)
    row = torch.arange(int(qo_indptrs[-1][0]), int(qo_indptrs[-1][-1]), dtype=torch.int64, device="cpu")
    # Of each row: the keys of its node on each level, and its own node's end on the last.
    nodes = [torch.searchsorted(indptr, row, right=True) - 1 for indptr in qo_indptrs]
    kv_lens = []
    for node, indptr, last in zip(nodes, kv_indptrs, last_page_lens):
        pages = indptr.diff()
        kv_lens.append(torch.where(pages > 0, (pages - 1) * page_size + last, 0)[node])
    end = qo_indptrs[-1][nodes[-1] + 1]
    position = sum(kv_lens) - (end - row)
    masks, before = [], torch.zeros_like(row)
    for kv_len in kv_lens[:-1]:
        first = position - window_left - before
        before = before + kv_len
        if not bool((first > 0).any()):
            masks.append(None)
            continue
        total = int(kv_len.sum())
        start = kv_len.cumsum(0) - kv_len
        spread = dict(repeats=kv_len.to(device), output_size=total)
        key = torch.arange(total, dtype=torch.int64, device=device) - start.to(device).repeat_interleave(**spread)
        masks.append(key >= first.to(device).repeat_interleave(**spread))
    return [*masks, None]
