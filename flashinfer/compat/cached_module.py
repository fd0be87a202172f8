"""The object that engines call in the place of plan(), once they have written a wrapper's tables themselves."""

from __future__ import annotations

import torch

from flashinfer._core.checks import check_indptr, require

_WORKSPACES = ("float_workspace_buffer", "int_workspace_buffer", "pin_memory_int_workspace_buffer")
# By position. Older callers leave out what was added at the end, from window_left on.
_PREFILL = (
    *_WORKSPACES, "qo_indptr", "kv_indptr", "kv_lens", "total_num_rows", "batch_size", "num_qo_heads", "num_kv_heads",
    "page_size", "enable_cuda_graph", "head_dim_qk", "head_dim_vo", "causal", "window_left", "fixed_split_size",
    "disable_split_kv", "num_colocated_ctas", "uniform_q_len",
)  # fmt: skip
_DECODE = (
    *_WORKSPACES, "kv_indptr", "batch_size", "num_qo_heads", "num_kv_heads", "page_size", "enable_cuda_graph",
    "window_left", "logits_soft_cap", "head_dim_qk", "head_dim_vo", "empty_q", "empty_kv",
)  # fmt: skip
_LATENT = (*_WORKSPACES, "qo_indptr", "kv_indptr", "kv_lens", "num_heads", "head_dim_ckv", "causal")
_FEWEST_PREFILL = 15


def offsets(count: int, device: str | torch.device) -> torch.Tensor:
    """int32 [count], 0, 1, 2 ...: qo_indptr of requests with one query each."""
    return torch.arange(count, dtype=torch.int32, device=device)


class CachedModule:
    """Plans a wrapper again."""

    def __init__(self, wrapper):
        self._wrapper = wrapper

    def plan(self, *args) -> tuple:
        """Plan from the tables that lie in the wrapper, with the options of its last plan.

        The tables are on the device and stay there; the host tensors are read for bounds alone. The options are those
        of the last plan: `causal`, `window_left`, `logits_soft_cap`, `total_num_rows` and what follows
        `disable_split_kv` are upstream's scheduling hints here, and change nothing.

        Parameters
        ----------
        *args
            In the order of upstream's modules: of prefill (15 to 20 arguments, which decode on tensor cores takes
            too), of decode without tensor cores (15, the fifth a number), or of latent attention (9). Workspaces come
            first, then indptr and length tensors on the host, then sizes and flags.

        Returns
        -------
        tuple
            Empty: what was planned stays in the wrapper.

        Raises
        ------
        ValueError
            An argument that contradicts the wrapper, by name.
        """
        given = dict(zip(_parameters_of(args), args, strict=False))
        wrapper = self._wrapper
        base = wrapper._base
        self._check_sizes(given, base.options)
        entries = wrapper._shown.kv_indptr.shape[0] - 1
        batch = given["batch_size"] if "batch_size" in given else given["kv_lens"].shape[0]
        require(batch == entries, "batch_size", batch, f"{entries}, as the wrapper's kv_indptr has it")
        if "enable_cuda_graph" in given:
            mode, asked = wrapper.is_cuda_graph_enabled, bool(given["enable_cuda_graph"])
            require(asked == mode, "enable_cuda_graph", asked, f"{mode}, as the wrapper is")
        rows, longest = _rows(given.get("qo_indptr"), batch)
        _check_keys(given["kv_indptr"], given.get("kv_lens"), batch, wrapper._shown.kv_indices, base.options.page_size)
        q_len = base.table.each_q
        require(not q_len or rows in (None, batch * q_len), "qo_indptr", f"{rows} rows", f"{batch * q_len}, as planned")
        wrapper._replan(rows, longest)
        return ()

    def _check_sizes(self, given: dict, options) -> None:
        planned = dict(
            num_qo_heads=options.num_qo_heads, num_kv_heads=options.num_kv_heads, page_size=options.page_size,
            head_dim_qk=options.head_dim_qk, head_dim_vo=options.head_dim_vo, disable_split_kv=options.disable_split_kv,
            num_heads=options.num_qo_heads, head_dim_ckv=options.head_dim_vo,
        )  # fmt: skip
        for name, value in planned.items():
            if name in given:
                require(given[name] == value, name, given[name], f"{value}, as planned")
        if "num_heads" in given:
            require(bool(given["causal"]) == options.causal, "causal", given["causal"], f"{options.causal}, as planned")
        if "fixed_split_size" in given:
            was, now = (-1 if size is None else size for size in (options.fixed_split_size, given["fixed_split_size"]))
            require(now == was, "fixed_split_size", now, f"{was}, as planned")


def _parameters_of(args: tuple) -> tuple[str, ...]:
    """The names of positional arguments."""
    count = len(args)
    if count == len(_LATENT):
        return _LATENT
    if count == len(_DECODE) and not isinstance(args[4], torch.Tensor):
        return _DECODE
    allowed = f"{len(_LATENT)} (latent), or {_FEWEST_PREFILL} to {len(_PREFILL)}"
    require(_FEWEST_PREFILL <= count <= len(_PREFILL), "*args", f"{count} arguments", allowed)
    return _PREFILL


def _rows(indptr: torch.Tensor | None, batch: int) -> tuple[int | None, int]:
    """Query rows in all and of the longest request, as far as the host knows."""
    if indptr is None:
        return None, 0
    require(indptr.shape == (batch + 1,), "qo_indptr", tuple(indptr.shape), f"[{batch + 1}], batch_size + 1")
    if indptr.is_cuda:
        return -1, 0
    values = indptr.numpy()
    check_indptr("qo_indptr", values, sliced=True)
    return int(values[-1]), int((values[1:] - values[:-1]).max(initial=1))


def _check_keys(indptr: torch.Tensor, lens: torch.Tensor | None, batch: int, indices, page_size: int) -> None:
    """Check lengths of keys in host tensors."""
    require(indptr.shape == (batch + 1,), "kv_indptr", tuple(indptr.shape), f"[{batch + 1}], batch_size + 1")
    if lens is not None:
        require(lens.shape == (batch,), "kv_lens", tuple(lens.shape), f"[{batch}], batch_size")
    if indptr.is_cuda:
        return
    begins = indptr.numpy()
    if indices is None:
        check_indptr("kv_indptr", begins, sliced=True)
    else:
        check_indptr("kv_indptr", begins, indices.shape[0], "the length of the page ids", sliced=True)
    if lens is None or lens.is_cuda or not batch:
        return
    # A ragged batch has a row of keys for each entry.
    room, keys = (begins[1:] - begins[:-1]).astype("int64") * max(page_size, 1), lens.numpy()
    fits = bool(((keys >= 0) & (keys <= room)).all())
    most = f"0 ... what its entries of kv_indptr hold, {room.max()} at most"
    require(fits, "kv_lens", f"{keys.min()} ... {keys.max()}", most)
