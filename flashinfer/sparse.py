"""Attention with block-sparse masks: only the blocks that a map names are read."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named, untraced
from flashinfer._core.checks import present, require
from flashinfer._core.literals import LseBase, PosEncodingMode
from flashinfer.ops.attention.engine import integers, refuse
from flashinfer.ops.attention.masks import as_bool
from flashinfer.ops.attention.operands import check_given, is_plain, with_lse
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.sparse import (
    block_mask_bits, check_blocks, check_sizes, convert_bsr_mask_layout, of_groups, per_head_blocks, uniform_blocks,
)  # fmt: skip
from flashinfer.ops.attention.sparse_wrapper import (
    BlockSparseWrapper, as_they_are, filled, refuse_positions, run_per_head,
)  # fmt: skip

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]
_SCALES = "q_scale", "k_scale", "v_scale"


class BlockSparseAttentionWrapper(BlockSparseWrapper):
    """Attention of M queries to N keys under a block-sparse mask in BSR form (as scipy.sparse.bsr_matrix).

    A block row is a request of a plan and its blocks are pages, so that only they are read. Any block sizes.

    Parameters
    ----------
    float_workspace_buffer : uint8 Tensor
        Scratch on the compute device, for partial results; any size (a small one is replaced by our own). Its device is
        the wrapper's.
    backend : str
        "auto", or one of upstream's names (see flashinfer/_core/backends.py).

    Attributes
    ----------
    M, N, R, C : int, optional
        The sizes of the last plan().

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(0, dtype=torch.uint8))
    >>> indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
    >>> wrapper.plan(indptr, indices, 4, 8, 2, 4, 2, 2, 16, q_data_type="float32", o_data_type="float32")
    >>> q, k, v = torch.randn(4, 2, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    >>> wrapper.run(q, k, v).shape
    torch.Size([4, 2, 16])
    """

    M: int | None = None
    N: int | None = None
    R: int | None = None
    C: int | None = None

    @checked
    @named(head_dim_qk="head_dim", head_dim_vo="head_dim", packed_custom_mask="packed_mask", page_size="C")
    def plan(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
        kv_block_lens: torch.Tensor | None = None,
        q2k_indices: torch.Tensor | None = None,
        q2k_num: torch.Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Describe the mask; every later run() uses it.

        Parameters
        ----------
        indptr : int Tensor [ceil(M / R) + 1]
            Where the blocks of each block row begin in `indices`; on the host or the device. The first may be any.
        indices : int Tensor [blocks]
            Block columns.
        M, N, R, C : int
            Queries and keys, and the rows and columns of a block. C divides N; the last block row has what R leaves.
        num_qo_heads, num_kv_heads, head_dim : int
        mask : bool Tensor [blocks, R, C], optional
            Within each block, True where a query sees a key.
        packed_mask : uint8 Tensor, optional
            The same in bits, low bit first: [R, keys of the block row] of each block row, row-major, from a byte of its
            own. Takes precedence.
        causal : bool
            Without a mask: a query sees keys at its position and before, the last query standing at the last key.
        pos_encoding_mode, rope_scale, rope_theta
            Only "NONE": another is refused.
        logits_soft_cap : float, optional
            Logits become cap * tanh(logits / cap).
        sm_scale : float, optional
            Default 1 / sqrt(head_dim).
        q_data_type, kv_data_type, o_data_type : dtype or its name
            kv defaults to q's.
        block_mask : bool Tensor [ceil(M / R), N / C] or [heads, ceil(M / R), N / C], optional
            The blocks, in the place of indptr and indices, which then stand for nothing; for all heads, for each KV
            head, or for each query head, those of a KV head alike. With one, plan() waits for the device, and run()
            copies q and out, heads first, where heads differ.
        kv_block_lens, q2k_indices, q2k_num : optional
            Refused.
        kv_splits : int or str, optional
            A hint of "vsa_sm100_blk64" alone, which changes no result: "auto", or 1 ... 256.
        q_scale, k_scale, v_scale : float or Tensor, optional
            Scales of quantised q, k and v, unless run() is given others.
        use_fp16_qk_reduction, non_blocking, use_clc
            Permissions and hints that change no result.

        Raises
        ------
        ValueError
            An argument out of its range, by name.
        UnsupportedConfig
            What is refused above.

        Notes
        -----
        The maps are kept by reference where they are contiguous int32 tensors on the wrapper's device, and must not
        change before the last run(). Others are copied, and so are masks in bool.
        """
        refuse_positions(pos_encoding_mode)
        for name, value in (("kv_block_lens", kv_block_lens), ("q2k_indices", q2k_indices), ("q2k_num", q2k_num)):
            refuse(name, value, "None: maps are indptr and indices, or block_mask")
        if kv_splits is not None:
            splits = self._backend == "vsa_sm100_blk64"
            require(splits, "kv_splits", kv_splits, f"None of backend={self._backend!r}")
            known = kv_splits == "auto" or isinstance(kv_splits, int) and 1 <= kv_splits <= 256
            require(known, "kv_splits", repr(kv_splits), "'auto', 1 ... 256")
        require(R > 0, "R", R, "at least 1")
        require(C > 0 and N % C == 0, "C", C, f"a divisor of N = {N}")
        common: dict = dict(
            source="paged", head_dim_qk=head_dim, head_dim_vo=head_dim, q_dtype=q_data_type, kv_dtype=kv_data_type,
            o_dtype=o_data_type, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        block_rows, per_head = -(-M // R), block_mask is not None and block_mask.dim() == 3
        if block_mask is not None:
            given = mask is not None or packed_mask is not None
            require(not given, "block_mask", "a tensor beside a mask", "one of them alone")
            divides = num_kv_heads > 0 and 0 < num_qo_heads < 1 << 31 and num_qo_heads % num_kv_heads == 0
            require(divides, "num_qo_heads", num_qo_heads, f"a multiple of num_kv_heads = {num_kv_heads}")
            group, block_mask = num_qo_heads // num_kv_heads, as_bool("block_mask", block_mask).to("cpu")
            if per_head and group > 1 and block_mask.shape[0] == num_qo_heads:
                block_mask = of_groups(block_mask, group)
            shape = (num_kv_heads,) * per_head + (block_rows, N // C)
            require(tuple(block_mask.shape) == shape, "block_mask", tuple(block_mask.shape), str(shape))
        if block_mask is not None and per_head:
            rows = torch.full((num_kv_heads, block_rows), R, dtype=torch.int64, device="cpu")
            rows[:, -1:] -= -M % R
            columns = torch.full((num_kv_heads, N // C), C, dtype=torch.int64, device="cpu")
            blocks = per_head_blocks(block_mask, rows, columns, group, self.device)
            asked = PlanOptions(num_qo_heads=group, num_kv_heads=1, page_size=blocks.page_size, **common).checked()
        else:
            if block_mask is not None:
                indices = block_mask.nonzero()[:, 1]
                indptr = torch.nn.functional.pad(block_mask.sum(1).cumsum(0), (1, 0))
            indptr, indices = (present("indptr, indices", x, "tensors, or block_mask") for x in (indptr, indices))
            given = indptr, indices
            indptr = integers(indptr, "indptr", self.device, (block_rows + 1,)).contiguous()
            indices = integers(indices, "indices", self.device, (None,)).contiguous()
            first = check_blocks(*given, N // C)
            if mask is not None and packed_mask is None:
                shape = (indices.shape[0], R, C)
                require(tuple(mask.shape) == shape, "mask", tuple(mask.shape), str(shape))
                mask = block_mask_bits(as_bool("mask", mask[first:]).to(self.device), indptr - first)
                if M % R:
                    # Of the last block row, drop the bits of rows past M, which are no queries.
                    mask = mask[: mask.numel() - -M % R * C * int(indptr[-1] - indptr[-2])]
            blocks = uniform_blocks(indptr, indices, R, C, M, N)
            asked = PlanOptions(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, page_size=C, **common).checked()
        self._plan(asked, blocks, causal, mask, packed_mask)
        # Only now: what is refused leaves the plan before it as it was.
        self.M, self.N, self.R, self.C = M, N, R, C
        self._shape, self._kv_heads, self._per_head = (M, N), num_kv_heads, per_head
        self._scales = q_scale, k_scale, v_scale

    begin_forward = plan

    @untraced
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: float | torch.Tensor | None = None,
        scale_k: float | torch.Tensor | None = None,
        scale_v: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        lse_base: LseBase = "log2",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention under the planned mask.

        Parameters
        ----------
        q : Tensor [M, num_qo_heads, head_dim]
        k, v : Tensor [N, num_kv_heads, head_dim]
        scale_q, scale_k, scale_v : float or Tensor, optional
            Scales of quantised q, k and v, of 1 element; of num_kv_heads or num_qo_heads where heads share a map.
        out : Tensor [M, num_qo_heads, head_dim], optional
        lse : float32 Tensor [M, num_qo_heads], optional
        return_lse : bool
        enable_pdl : bool, optional
            Programmatic dependent launch: no effect on results.
        lse_base : str
            Base of the log-sum-exp: "log2" or "ln".

        Returns
        -------
        out : Tensor [M, num_qo_heads, head_dim]
        lse : float32 Tensor [M, num_qo_heads], with return_lse
            Base 2, unless lse_base says otherwise; -inf for a query that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            Before plan(); an operand whose shape, dtype, device or strides are not as planned, by name; out or lse
            of another shape or dtype. Nothing is written then.
        """
        if not is_plain(lse_base):
            attend = lambda lse, flag: self.run(q, k, v, scale_q, scale_k, scale_v, out, lse, flag)
            return with_lse(attend, q, lse, return_lse, lse_base)
        plan, (m, n) = self._planned(), self._shape
        require(q.dim() == 3 and q.shape[0] == m, "q", tuple(q.shape), f"[{m}, num_qo_heads, head_dim], as planned")
        for name, x in (("k", k), ("v", v)):
            fits = x.dim() == 3 and x.shape[0] == n
            require(fits, name, tuple(x.shape), f"[{n}, num_kv_heads, head_dim], as planned")
        given = (planned if now is None else now for planned, now in zip(self._scales, (scale_q, scale_k, scale_v)))
        call: dict = dict(zip(_SCALES, given), return_lse=return_lse, params=self._params)
        if self._per_head:
            call["return_lse"] = return_lse or lse is not None
            check_given("lse", lse, q.shape[:2], torch.float32)
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            result = run_per_head(plan, q, k, v, self._blocks.page_size, self._kv_heads, call)
            out = filled(out, "out", result[0].transpose(0, 1))
            lse = None if result[1] is None else filled(lse, "lse", result[1].transpose(0, 1))
            return out if lse is None or not return_lse else (out, lse)
        pages = k.unflatten(0, (-1, self._blocks.page_size)), v.unflatten(0, (-1, self._blocks.page_size))
        return plan.run(q, pages, as_they_are, out=out, lse=lse, **call)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: float | torch.Tensor | None = None,
        scale_k: float | torch.Tensor | None = None,
        scale_v: float | torch.Tensor | None = None,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Older name of `run`; these options replace the planned ones, for this call and later ones.

        Parameters
        ----------
        q : Tensor [M, num_qo_heads, head_dim]
        k, v : Tensor [N, num_kv_heads, head_dim]
        scale_q, scale_k, scale_v : float or Tensor, optional
            Scales of quantised q, k and v.
        pos_encoding_mode : str
            Only "NONE": another is refused.
        use_fp16_qk_reduction, rope_scale, rope_theta
            Not read.
        logits_soft_cap : float, optional
            None: no cap.
        sm_scale : float, optional
            None: 1 / sqrt(head_dim).

        Returns
        -------
        Tensor [M, num_qo_heads, head_dim]
            As `run` without return_lse.

        Raises
        ------
        ValueError
            As `run`; an option out of its range, by name.
        """
        self._change(pos_encoding_mode, logits_soft_cap, sm_scale)
        return self.run(q, k, v, scale_q, scale_k, scale_v)


class VariableBlockSparseAttentionWrapper(BlockSparseWrapper):
    """Attention under a map of blocks for each KV head, the blocks of any sizes.

    A (KV head, block row) is a request of a plan, whose keys are pages of the greatest common divisor of the
    column sizes, so that only chosen blocks are read.

    Parameters
    ----------
    float_workspace_buffer, backend
        As of `BlockSparseAttentionWrapper`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0, dtype=torch.uint8))
    >>> chosen = torch.tensor([[[True, False, True], [False, True, False]]])
    >>> wrapper.plan(chosen, torch.tensor([[3, 2]]), torch.tensor([[4, 2, 6]]), 2, 1, 16, q_data_type="float32")
    >>> wrapper.run(torch.randn(2, 5, 16), torch.randn(1, 12, 16), torch.randn(1, 12, 16)).shape
    torch.Size([2, 5, 16])
    """

    @checked
    @named(head_dim_qk="head_dim", head_dim_vo="head_dim", page_size="block_col_sz")
    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Describe the maps; every later run() uses them. It waits for tensors on a device.

        Parameters
        ----------
        block_mask_map : bool Tensor [num_kv_heads, block_rows, block_columns]
            True where the queries of a block row see the keys of a block column.
        block_row_sz : int Tensor [num_kv_heads, block_rows]
            Queries of each block row; the same sum, qo_len, for every head.
        block_col_sz : int Tensor [num_kv_heads, block_columns]
            Keys of each block column; the same sum, kv_len, for every head.
        num_qo_heads, num_kv_heads, head_dim : int
        causal : bool
            A query sees keys at its position and before, the last query standing at the last key.
        pos_encoding_mode, rope_scale, rope_theta, logits_soft_cap, sm_scale
            As in `BlockSparseAttentionWrapper.plan`.
        q_data_type, kv_data_type : dtype or its name
            kv defaults to q's.
        use_fp16_qk_reduction, non_blocking
            Permissions that change no result.

        Raises
        ------
        ValueError
            An argument out of its range, by name.
        UnsupportedConfig
            What is refused above.
        """
        refuse_positions(pos_encoding_mode)
        divides = num_kv_heads > 0 and num_qo_heads > 0 and num_qo_heads % num_kv_heads == 0
        require(divides, "num_qo_heads", num_qo_heads, f"a multiple of num_kv_heads = {num_kv_heads}")
        shape = tuple(block_mask_map.shape)
        require(len(shape) == 3 and shape[0] == num_kv_heads, "block_mask_map", shape,
                f"[{num_kv_heads}, block_rows, block_columns]")  # fmt: skip
        rows = check_sizes("block_row_sz", block_row_sz, (shape[0], shape[1]))
        columns = check_sizes("block_col_sz", block_col_sz, (shape[0], shape[2]))
        group = num_qo_heads // num_kv_heads
        blocks = per_head_blocks(as_bool("block_mask_map", block_mask_map).to("cpu"), rows, columns, group, self.device)
        asked = PlanOptions(
            source="paged", num_qo_heads=group, num_kv_heads=1, head_dim_qk=head_dim, head_dim_vo=head_dim,
            page_size=blocks.page_size, q_dtype=q_data_type, kv_dtype=kv_data_type, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
        ).checked()  # fmt: skip
        self._plan(asked, blocks, causal)
        self._kv_heads, self._shape = num_kv_heads, (int(rows[0].sum()), int(columns[0].sum()))

    begin_forward = plan

    @untraced
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        lse_base: LseBase = "log2",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention under the planned maps.

        Parameters
        ----------
        q : Tensor [num_qo_heads, qo_len, head_dim]
        k, v : Tensor [num_kv_heads, kv_len, head_dim]
            Copied where heads do not lie one after another.
        out : Tensor [num_qo_heads, qo_len, head_dim], optional
        lse : float32 Tensor [num_qo_heads, qo_len], optional
        return_lse : bool
        enable_pdl, lse_base
            As in `BlockSparseAttentionWrapper.run`.

        Returns
        -------
        out : Tensor [num_qo_heads, qo_len, head_dim]
        lse : float32 Tensor [num_qo_heads, qo_len], with return_lse
            Base 2, unless lse_base says otherwise; -inf for a query that sees no key, whose out is 0.

        Raises
        ------
        ValueError
            Before plan(); an operand whose shape, dtype, device or strides are not as planned, by name; out or lse
            of another shape or dtype. Nothing is written then.
        """
        if not is_plain(lse_base):
            return with_lse(lambda lse, flag: self.run(q, k, v, out, lse, flag), q, lse, return_lse, lse_base)
        plan, (m, n) = self._planned(), self._shape
        require(q.dim() == 3 and q.shape[1] == m, "q", tuple(q.shape), f"[num_qo_heads, {m}, head_dim], as planned")
        for name, x in (("k", k), ("v", v)):
            fits = x.dim() == 3 and x.shape[1] == n
            require(fits, name, tuple(x.shape), f"[num_kv_heads, {n}, head_dim], as planned")
        call = dict(return_lse=return_lse or lse is not None, params=self._params)
        check_given("lse", lse, q.shape[:2], torch.float32)
        result, result_lse = run_per_head(plan, q, k, v, self._blocks.page_size, self._kv_heads, call, out)
        out = result if out is None or result is out else filled(out, "out", result)
        lse = None if result_lse is None else filled(lse, "lse", result_lse)
        return out if lse is None or not return_lse else (out, lse)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: PosEncodingMode = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Older name of `run`; these options replace the planned ones, for this call and later ones.

        Parameters
        ----------
        q : Tensor [num_qo_heads, qo_len, head_dim]
        k, v : Tensor [num_kv_heads, kv_len, head_dim]
        pos_encoding_mode, use_fp16_qk_reduction, rope_scale, rope_theta, logits_soft_cap, sm_scale
            As in `BlockSparseAttentionWrapper.forward`.

        Returns
        -------
        Tensor [num_qo_heads, qo_len, head_dim]
            As `run` without return_lse.

        Raises
        ------
        ValueError
            As `run`; an option out of its range, by name.
        """
        self._change(pos_encoding_mode, logits_soft_cap, sm_scale)
        return self.run(q, k, v)
