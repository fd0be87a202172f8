"""The commit of replay windows: the accepted tokens of a verification are folded into the states of all layers."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.checks import (
    check_apart,
    check_both,
    check_values,
    dtype_name,
    present,
    require,
    same_device,
)
from flashinfer._core.custom_op import one_op
from flashinfer._core.literals import OwnBackend
from flashinfer._delta import INDICES, INPUTS, STATES, require_dtype, require_shape, variant_for
from flashinfer.ops.recurrent import delta as room
from flashinfer.ops.recurrent.delta.operands import Accepted, Window
from flashinfer.ops.recurrent.layouts import whole_rows


@one_op(written=("checkpoint_state",), given={}, returned=lambda its: its["checkpoint_state"])
def gated_delta_rule_replayssm_commit(
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    track_state_indices: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    null_block_id: int = -1,
    backend: OwnBackend | Literal["simt", "tcgen05"] = "auto",
    accept_path: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fold the accepted tokens of the replay windows into the states of all layers, in place.

    Parameters
    ----------
    checkpoint_state : torch.Tensor
        [layers, slots, heads, V, K], each state contiguous; float32, bfloat16 or float16.
    rawv_cache : torch.Tensor
        [layers, slots, heads, T, V]; what `gated_delta_rule_mtp` kept, like the three that follow. Each slot of each
        layer is contiguous.
    rawk_cache : torch.Tensor
        [layers, slots, query heads, T, K], dtype of `rawv_cache`.
    g_cache, beta_cache : torch.Tensor
        [layers, slots, heads, T], float32.
    state_indices : torch.Tensor
        [batch], int32 or int64: slots, which differ. Up to `null_block_id` they are padding.
    accept_lens : torch.Tensor
        [batch]: tokens to fold, 0 to T.
    track_state_indices, track_steps : torch.Tensor, optional
        [batch] both: the state after token track_steps[i] of those folded also goes to slot track_state_indices[i]. A
        step outside the folded tokens, or a slot of padding, changes nothing.
    use_qk_l2norm : bool
        As in the verification.
    null_block_id : int
        The largest slot that is padding, at least -1.
    backend : str
        "auto", "simt", "tcgen05" (which are ours), "portable" or "reference".
    accept_path : torch.Tensor, optional
        [batch, T], ours: the i-th accepted token is accept_path[:, i] of the window, for drafts in a tree.

    Returns
    -------
    torch.Tensor
        `checkpoint_state`.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> state, v, k = torch.zeros(1, 3, 4, 64, 64), torch.randn(1, 3, 4, 2, 64), torch.randn(1, 3, 4, 2, 64)
    >>> g, beta, slots = torch.zeros(1, 3, 4, 2), torch.ones(1, 3, 4, 2), torch.tensor([2, 0])
    >>> accepted, commit = torch.tensor([1, 2]), flashinfer.gdn_decode.gated_delta_rule_replayssm_commit
    >>> state = commit(state, v, k, g, beta, slots, accepted)
    >>> bool(state[0, 2].any()), bool(state[0, 1].any())
    (True, False)
    """
    windows = {"rawv_cache": rawv_cache, "rawk_cache": rawk_cache, "g_cache": g_cache, "beta_cache": beta_cache}
    require(
        checkpoint_state.dim() == 5,
        "checkpoint_state",
        f"shape {tuple(checkpoint_state.shape)}",
        "[layers, slots, heads, V, K]",
    )
    layers, slots, heads, value_dim, key_dim = checkpoint_state.shape
    require(rawv_cache.dim() == 5, "rawv_cache", f"shape {tuple(rawv_cache.shape)}", "[layers, slots, heads, T, V]")
    tokens = rawv_cache.shape[3]
    require_shape("rawv_cache", rawv_cache, layers, slots, heads, tokens, value_dim)
    require_shape("rawk_cache", rawk_cache, layers, slots, None, tokens, key_dim)
    key_heads = rawk_cache.shape[2]
    require(key_heads > 0 and heads % key_heads == 0, "rawk_cache", f"{key_heads} heads", f"a divisor of {heads}")
    for name in ("g_cache", "beta_cache"):
        require_shape(name, windows[name], layers, slots, heads, tokens, dtypes=(torch.float32,))
    require_dtype("checkpoint_state", checkpoint_state, STATES[:3])
    require_dtype("rawv_cache", rawv_cache, INPUTS)
    require_dtype("rawk_cache", rawk_cache, (rawv_cache.dtype,))
    require(null_block_id >= -1, "null_block_id", null_block_id, "at least -1")
    check_both("track_steps", track_steps, "track_state_indices", track_state_indices)
    tables = {
        "state_indices": state_indices,
        "accept_lens": accept_lens,
        "track_state_indices": track_state_indices,
        "track_steps": track_steps,
    }
    batch = state_indices.shape[0] if state_indices.dim() else 0
    for name, x in tables.items():
        require_shape(name, x, batch, dtypes=INDICES)
    check_values("accept_lens", accept_lens, 0, tokens)
    check_apart([("checkpoint_state", checkpoint_state)], (tables | windows).items())
    for name in ("state_indices", "track_state_indices"):
        if tables[name] is not None:
            check_values(name, tables[name].clamp(min=null_block_id), null_block_id, slots - 1)
    require_shape("accept_path", accept_path, batch, tokens, dtypes=INDICES)
    device = same_device(checkpoint_state=checkpoint_state, **windows, **tables, accept_path=accept_path)
    if accept_path is not None and accept_path.device.type == "cpu":
        # What is behind a request's accepted tokens, and of padding, is not read.
        counts = accept_lens.masked_fill(state_indices <= null_block_id, 0)
        read = torch.arange(tokens, device=device)[None] < counts[:, None]
        check_values("accept_path", accept_path.masked_fill(~read, 0), 0, tokens - 1)
    if checkpoint_state.numel():
        state = checkpoint_state[0, 0, 0]
        require(state.stride(1) == 1, "checkpoint_state", f"strides {checkpoint_state.stride()}", "contiguous states")
        for name, x in windows.items():
            require(x[0, 0].is_contiguous(), name, f"strides {x.stride()}", "contiguous slots")
    narrow = {name: None if x is None else x.to(torch.int32).contiguous() for name, x in tables.items()}
    path = None if accept_path is None else accept_path.to(torch.int32).contiguous()
    problem = room.Commit(
        key_dim,
        value_dim,
        dtype_name(rawv_cache.dtype),
        dtype_name(checkpoint_state.dtype),
        bool(use_qk_l2norm),
        path is not None,
        track_steps is not None,
        whole_rows(checkpoint_state, rawv_cache, rawk_cache),
    )
    variant = variant_for(backend, "simt", "tcgen05")
    if checkpoint_state.numel() and batch:
        accepted = Accepted(
            present("state_indices", narrow["state_indices"]),
            present("accept_lens", narrow["accept_lens"]),
            path,
            narrow["track_state_indices"],
            narrow["track_steps"],
            null_block_id,
        )
        choice = room.delta_commit(problem, device, variant)
        choice.run(checkpoint_state, Window(*windows.values()), accepted)
    return checkpoint_state
