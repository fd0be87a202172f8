"""Kimi delta attention: a gated delta rule with a decay for each key channel."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import NoPlan, WrongKind, check_both, require
from flashinfer._core.custom_op import one_op
from flashinfer._core.literals import OwnBackend
from flashinfer._delta import (
    INDICES,
    STATES,
    default_scale,
    output_like,
    require_dtype,
    require_shape,
    require_tree,
    run_step,
    variant_for,
)
from flashinfer._kda import BACKENDS, check_inputs, gates_of, kda_chunks
from flashinfer.kda_prefill import RecurrentKDAPrefillWorkspace
from flashinfer.ops.recurrent.delta.operands import Kept, Pool, Tokens

__all__ = ["RecurrentKDAPrefillWrapper", "recurrent_kda"]


def _output(its: dict) -> torch.Tensor:
    shape = *its["q"].shape[:2], *its["v"].shape[2:]
    return its["q"].new_empty(shape) if its["output"] is None else its["output"]


def _state(its: dict) -> torch.Tensor | None:
    """New states are made for a caller who wants them; how many slots `ssm_state_indices` name is not known."""
    q, v, slots = its["q"], its["v"], its["ssm_state_indices"]
    if its["initial_state"] is not None or not its["output_final_state"] or slots is not None:
        return its["initial_state"]
    n = q.shape[0] if its["cu_seqlens"] is None else len(its["cu_seqlens"]) - 1
    return q.new_zeros(n * (1 + (its["num_spec_tokens"] or 0)), *v.shape[2:], q.shape[3])


def _has_marks(its: dict) -> bool:
    names = "checkpoint_every_n_tokens", "state_checkpoints", "checkpoint_cu_starts"
    return bool(its[names[0]]) or any(its[name] is not None for name in names[1:])


def _marks(its: dict) -> torch.Tensor | None:
    # Their number is only on the device where none are given.
    missing = _has_marks(its) and its["state_checkpoints"] is None
    require(not missing, "state_checkpoints", None, "a tensor under torch.compile")
    return its["state_checkpoints"]


def _results(its: dict) -> tuple:
    missing = its["output_final_state"] and its["initial_state"] is None
    require(not missing, "initial_state", None, "a tensor under torch.compile, with ssm_state_indices")
    result = its["output"], its["initial_state"] if its["output_final_state"] else None
    return (*result, its["state_checkpoints"]) if _has_marks(its) else result


@one_op(
    written=("initial_state", "output", "state_checkpoints", "correction_cache", "kg_cache"),
    given={
        "output": _output,
        "initial_state": _state,
        "state_checkpoints": _marks,
        # It has no effect, and no op takes one.
        "prefill_workspace": lambda its: None,
    },
    returned=_results,
)
@named(state="initial_state")
def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    seq_order: torch.Tensor | None = None,
    prefill_workspace: RecurrentKDAPrefillWorkspace | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_state_indices: torch.Tensor | None = None,
    *,
    disable_state_update: bool = False,
    correction_cache: torch.Tensor | None = None,
    kg_cache: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    backend: OwnBackend
    | Literal["cute-dsl", "cute-dsl-persistent", "tirx", "ptx", "cake", "small-bh", "cudnn"] = "auto",
) -> tuple:
    """Decode, verification of drafts, or prefill of Kimi delta attention, in place on its states.

    Per head, with S stored [V, K]: ``S = S diag(exp(g)); S += beta (v - S k) k^T; out = scale S q``. One token for each
    sequence, drafts and frozen states go token by token; more tokens without `num_spec_tokens` go by chunks.

    Parameters
    ----------
    q, k : torch.Tensor
        [batch, T, query heads, K], or [1, tokens, query heads, K] with `cu_seqlens`; bfloat16, float16 or float32, any
        strides. K up to 256 on a GPU, in prefill up to 128.
    v : torch.Tensor
        [batch, T, heads, V] of that dtype; heads is a multiple of the query heads.
    g : torch.Tensor
        [batch, T, heads, K]: the logarithm of the decay, or the raw gate with `use_gate_in_kernel`.
        Decays below exp(-64) are taken for that in prefill.
    beta : torch.Tensor
        [batch, T, heads]; its sigmoid is taken with `beta_is_logit`.
    A_log : torch.Tensor, optional
        [query heads] or [heads]; required with `use_gate_in_kernel`.
    dt_bias : torch.Tensor, optional
        [query heads or heads, K], or flat.
    scale : float, optional
        Of the output; 1 / sqrt(K) if not given.
    initial_state : torch.Tensor, optional
        [sequences, heads, V, K], or a pool [slots, heads, V, K] with `ssm_state_indices`; float32, bfloat16, float16 or
        float8, any strides. Updated in place. Zero if not given.
    output_final_state : bool
        Whether to return the states.
    use_qk_l2norm_in_kernel : bool
        q and k are divided by sqrt(sum of squares + 1e-6) first.
    use_gate_in_kernel : bool
        The decay is exp(-exp(A_log) softplus(g + dt_bias)), or with a `lower_bound`
        exp(lower_bound sigmoid(exp(A_log) (g + dt_bias))).
    lower_bound : float, optional
        Less than 0.
    cu_seqlens : torch.Tensor, optional
        [sequences + 1], int32 or int64. Tokens of no sequence have output 0.
    ssm_state_indices : torch.Tensor, optional
        [sequences]: slots of the pool; a negative one is padding: nothing is read or written, the output is 0. With
        drafts [sequences, 1 + num_spec_tokens]: the slot of the state after each token; none for a negative one.
    num_spec_tokens : int, optional
        Drafts after the first token of each sequence.
    num_accepted_tokens : torch.Tensor, optional
        [sequences]: with drafts, a sequence begins with the state in column num_accepted_tokens - 1, else column 0.
    output : torch.Tensor, optional
        Shape of v; receives the result.
    initial_state_source, initial_state_indices : torch.Tensor, optional
        A pool that is only read, and [sequences] slots of it, in place of `initial_state` for the first state.
    beta_is_logit : bool
        See `beta`.
    seq_order, prefill_workspace
        How upstream orders and captures prefills; they have no effect here.
    state_checkpoints : torch.Tensor, optional
        [checkpoints, heads, V, K]: states before tokens 0, N, 2 N, ... of each sequence. With
        `checkpoint_state_indices`, the states after N, 2 N, ... tokens. A new tensor if not given.
    checkpoint_cu_starts : torch.Tensor, optional
        [sequences + 1]: the first checkpoint of each sequence, ceil(length / N) apart, or floor(length / N).
    checkpoint_every_n_tokens : int
        N, a multiple of 16; 0: no checkpoints.
    checkpoint_state_indices : torch.Tensor, optional
        The row of `state_checkpoints` for each checkpoint.
    disable_state_update : bool
        Verification that only reads states, from `initial_state_source` or `initial_state`.
    correction_cache : torch.Tensor, optional
        With `disable_state_update`: [slots, heads, T or more, V], float32, receives beta (v - S k) of each token.
    kg_cache : torch.Tensor, optional
        With that: [slots, heads, T or more, 2 K], receives k and g as they came.
    parents : torch.Tensor, optional
        [sequences, T], int32 or int64, ours: the drafts are a tree, and token t follows token parents[:, t] < t, or the
        first state where that is negative. T up to 64; with `num_spec_tokens` 1 + that, and num_accepted_tokens - 1 is
        the token whose state a sequence begins with. Else with `disable_state_update`, T the most tokens of a sequence.
        Decays below exp(-64) are taken for that.
    backend : str
        "auto", one of upstream's names (all of which are ours), "portable" or "reference".

    Returns
    -------
    (torch.Tensor, torch.Tensor or None) or (torch.Tensor, torch.Tensor or None, torch.Tensor)
        The output, the states with `output_final_state` (the pool, if it is one), and the checkpoints if there are any.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    References
    ----------
    Kimi Team, Kimi Linear, 2025, https://arxiv.org/abs/2510.26692

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v, g = torch.randn(4, 2, 1, 4, 64).unbind(0)
    >>> out, state = flashinfer.recurrent_kda(q, k, v, -g.abs(), torch.ones(2, 1, 4), output_final_state=True)
    >>> out.shape, state.shape
    (torch.Size([2, 1, 4, 64]), torch.Size([2, 4, 64, 64]))
    """
    check_inputs(q, k, v, g, beta)
    rows, count, _, key_dim = q.shape
    require_shape("cu_seqlens", cu_seqlens, None, dtypes=INDICES)
    require(
        cu_seqlens is None or rows == 1 and cu_seqlens.shape[0] > 0,
        "cu_seqlens",
        "a tensor",
        "offsets, with q of 1 row",
    )
    if not isinstance(prefill_workspace, RecurrentKDAPrefillWorkspace | None):
        given = type(prefill_workspace).__name__
        raise WrongKind(f"prefill_workspace: got {given}; allowed: None, or a RecurrentKDAPrefillWorkspace")
    tokens = Tokens(q, k, v, g, beta, cu_seqlens)
    require_shape("seq_order", seq_order, tokens.sequences)
    kind, gates = gates_of(use_gate_in_kernel, A_log, dt_bias, lower_bound, (q.shape[2], v.shape[2]), key_dim)
    given = {
        "tokens": tokens,
        "gates": gates,
        "kind": kind,
        "scale": default_scale(scale, key_dim),
        "out": output_like(output, (rows, count, *v.shape[2:]), q.dtype, q.device),
        "beta": "logit" if beta_is_logit else "value",
        "normalize": use_qk_l2norm_in_kernel,
        "backend": variant_for(backend, *BACKENDS),
    }
    check_both("initial_state_indices", initial_state_indices, "initial_state_source", initial_state_source)
    has_drafts = disable_state_update or num_spec_tokens is not None
    require(parents is None or has_drafts, "parents", "a tensor", "None if there are no drafts")
    if parents is not None:
        require_shape("parents", parents, None, None)
        require_tree(parents, tokens.sequences, parents.shape[1] if cu_seqlens is not None else count)
    caches = correction_cache, kg_cache
    check_both("kg_cache", kg_cache, "correction_cache", correction_cache)
    require(disable_state_update or kg_cache is None, "kg_cache", "a tensor", "None without disable_state_update")
    source = initial_state_source, initial_state_indices
    on_the_way = state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, checkpoint_state_indices
    has_marks = bool(checkpoint_every_n_tokens) or state_checkpoints is not None or checkpoint_cu_starts is not None
    if disable_state_update:
        require(not has_marks, "checkpoint_every_n_tokens", "checkpoints", "none with disable_state_update")
        require(not output_final_state, "output_final_state", True, "False with disable_state_update")
        return _frozen(given, initial_state, source, ssm_state_indices, caches, parents), None
    if num_spec_tokens is not None:
        require(not has_marks, "checkpoint_every_n_tokens", "checkpoints", "none with num_spec_tokens")
        state = _drafts(given, initial_state, source, ssm_state_indices, num_spec_tokens, num_accepted_tokens, parents)
        return given["out"], state if output_final_state else None
    require(num_accepted_tokens is None, "num_accepted_tokens", "a tensor", "None without num_spec_tokens")
    raw = A_log, dt_bias, lower_bound, use_gate_in_kernel, scale
    state, states = _plain(given, initial_state, output_final_state, source, ssm_state_indices, raw, on_the_way)
    result = given["out"], state if output_final_state else None
    return (*result, states) if has_marks else result


def _plain(given: dict, initial_state, wanted: bool, source: tuple, slots, raw: tuple, marks: tuple) -> tuple:
    """One token a sequence, or whole prompts: the states, and those on the way."""
    tokens = given["tokens"]
    q, k, v, g, beta, offsets = tokens
    n, count, has_marks = tokens.sequences, q.shape[1], bool(marks[2]) or marks[0] is not None or marks[1] is not None
    state = initial_state
    if state is None and (wanted or source[0] is not None):
        require(slots is None, "initial_state", None, "a pool with ssm_state_indices")
        state = torch.zeros(n, tokens.heads, v.shape[3], q.shape[3], dtype=q.dtype, device=q.device)
    prompts = count > 1 if offsets is None else count > n
    if has_marks or prompts and source[0] is None:
        require(source[0] is None, "initial_state_source", "a tensor", "None with checkpoints")
        A_log, dt_bias, lower_bound, raw_gate, scale = raw
        states = kda_chunks(
            q, k, v, g, beta, given["out"], initial_state, state, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            raw_gate=raw_gate, beta_is_logit=given["beta"] == "logit", normalize=given["normalize"], scale=scale,
            offsets=offsets, slots=slots, backend=given["backend"], marks=marks,
        )  # fmt: skip
        return state, states
    pool = Pool(initial_state, state, slots)
    if source[0] is not None:
        own = torch.arange(n, dtype=torch.int32, device=q.device) if slots is None else slots
        pool = Pool(source[0], state, source[1], write=own)
    _run(given, pool, final=state is not None)
    return state, None


def _run(given: dict, pool: Pool, final: bool, kept: Kept | None = None, parents=None) -> None:
    """Check the states and tables, and go token by token."""
    tokens = given["tokens"]
    n, shape = tokens.sequences, (tokens.heads, tokens.v.shape[3], tokens.k.shape[3])
    for name, x in (("initial_state", pool.source), ("initial_state", pool.state)):
        alone = pool.read is None and pool.write is None and pool.rows is None
        require_shape(name, x, n if alone else None, *shape, dtypes=STATES)
    columns = () if pool.read is None or pool.read.dim() < 2 else (pool.read.shape[1],)
    require_shape("ssm_state_indices", pool.read, n, *columns)
    require_shape("ssm_state_indices", pool.write, n)
    require_shape("num_accepted_tokens", pool.accepted, n)
    run_step(
        tokens,
        given["gates"],
        pool,
        given["out"],
        given["scale"],
        gate=given["kind"],
        beta=given["beta"],
        normalize=given["normalize"],
        final=final,
        backend=given["backend"],
        keep="corrections" if kept else "",
        kept=kept,
        parents=parents,
        slots_name="ssm_state_indices",
    )


def _frozen(given: dict, state, source: tuple, indices, caches: tuple, parents) -> torch.Tensor:
    """Outputs from states that stay as they are, and what is kept to commit the tokens later."""
    states = state if source[0] is None else source[0]
    require(states is not None, "initial_state_source", None, "a pool with disable_state_update")
    slots = indices if source[1] is None else source[1]
    tokens = given["tokens"]
    kept = None
    if caches[0] is not None:
        count, longest = states.shape[0], caches[0].shape[2] if caches[0].dim() == 4 else 0
        require_shape("correction_cache", caches[0], count, tokens.heads, longest, tokens.v.shape[3])
        require_shape("kg_cache", caches[1], count, tokens.heads, longest, 2 * tokens.k.shape[3])
        require_dtype("correction_cache", caches[0], (torch.float32,))
        for name, x in zip(("correction_cache", "kg_cache"), caches):
            require(count == 0 or x[0].is_contiguous(), name, f"strides {x.stride()}", "contiguous slots")
        require(
            tokens.offsets is not None or tokens.k.shape[1] <= longest,
            "correction_cache",
            f"{longest} tokens",
            f"at least {tokens.k.shape[1]}",
        )
        kept = Kept(*caches)
    _run(given, Pool(states, None, slots), final=False, kept=kept, parents=parents)
    return given["out"]


def _drafts(given: dict, state, source: tuple, indices, drafts: int, accepted, parents) -> torch.Tensor:
    """Drafts in a chain or a tree, the state after each of which goes to a slot."""
    tokens = given["tokens"]
    n, each = tokens.sequences, 1 + drafts
    require(drafts >= 1, "num_spec_tokens", drafts, "at least 1")
    require_tree(parents, n, each)
    if tokens.offsets is None:
        require(tokens.k.shape[1] == each, "q", f"{tokens.k.shape[1]} tokens", f"{each}, 1 + num_spec_tokens")
        if indices is None:
            indices = torch.arange(n * each, dtype=torch.int32, device=tokens.k.device).view(n, each)
            enough = state is None or state.shape[0] >= n * each
            require(enough, "initial_state", "fewer slots", f"at least {n * each}, batch * (1 + num_spec_tokens)")
    require(indices is not None, "ssm_state_indices", None, "a tensor with num_spec_tokens and cu_seqlens")
    require_shape("ssm_state_indices", indices, n, each)
    if state is None:
        slots = n * each if not indices.numel() else max(int(indices.max()) + 1, 1)
        shape = slots, tokens.heads, tokens.v.shape[3], tokens.k.shape[3]
        state = torch.zeros(shape, dtype=given["out"].dtype, device=tokens.k.device)
    if source[0] is not None:
        pool = Pool(source[0], state, source[1], rows=indices)
    else:
        pool = Pool(state, state, indices, accepted, rows=indices)
    _run(given, pool, final=False, parents=parents)
    return state


class RecurrentKDAPrefillWrapper:
    """Prefill of Kimi delta attention whose offsets have an address of their own, for CUDA graphs.

    Parameters
    ----------
    device : torch.device or str
        Of the tensors.

    Examples
    --------
    >>> import torch, flashinfer
    >>> wrapper = flashinfer.RecurrentKDAPrefillWrapper("cpu")
    >>> wrapper.plan(torch.tensor([0, 3, 10]))
    >>> q, k, v, g = torch.randn(4, 1, 10, 2, 32).unbind(0)
    >>> out, _ = wrapper.run(q, k, v, -g.abs(), torch.ones(1, 10, 2))
    >>> out.shape
    torch.Size([1, 10, 2, 32])
    """

    def __init__(self, device):
        self.device = torch.device(device)
        self._offsets = None

    @checked
    def plan(self, cu_seqlens: torch.Tensor, *, non_blocking: bool = True) -> None:
        """Copy the offsets of a batch; not while a graph is captured.

        The copy keeps its address from plan to plan while the number of sequences stays the same: a graph captured over
        run() reads the new offsets. Another number takes a new copy, and a new capture.

        Parameters
        ----------
        cu_seqlens : torch.Tensor
            [sequences + 1] int32 or int64, on the host or the device: where each sequence begins in the tokens of
            run().
        non_blocking : bool
            The host does not wait for the copy.

        Raises
        ------
        ValueError
            Another shape or dtype.
        """
        require_shape("cu_seqlens", cu_seqlens, None, dtypes=INDICES)
        if self._offsets is None or self._offsets.shape != cu_seqlens.shape:
            self._offsets = torch.empty(cu_seqlens.shape, dtype=torch.int64, device=self.device)
        self._offsets.copy_(cu_seqlens, non_blocking=non_blocking)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = True,
        use_gate_in_kernel: bool = False,
        lower_bound: float | None = None,
        output: torch.Tensor | None = None,
        beta_is_logit: bool = False,
        state_checkpoints: torch.Tensor | None = None,
        checkpoint_cu_starts: torch.Tensor | None = None,
        checkpoint_every_n_tokens: int = 0,
        checkpoint_state_indices: torch.Tensor | None = None,
        ssm_state_indices: torch.Tensor | None = None,
    ) -> tuple:
        """`recurrent_kda` with the planned offsets.

        Parameters
        ----------
        q, k, v, g, beta : torch.Tensor
            As in `recurrent_kda`, of all sequences one after another: [1, tokens, ...].
        A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel
            As in `recurrent_kda`.
        lower_bound, output, beta_is_logit, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens
            As in `recurrent_kda`.
        checkpoint_state_indices, ssm_state_indices
            As in `recurrent_kda`.

        Returns
        -------
        output : torch.Tensor
            [1, tokens, heads, V].
        state : torch.Tensor or None
            The states, with output_final_state.

        Raises
        ------
        ValueError
            Before plan(); as `recurrent_kda`.
        """
        if self._offsets is None:
            raise NoPlan("RecurrentKDAPrefillWrapper.run: got no plan; allowed: after plan()")
        return recurrent_kda(
            q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, lower_bound, self._offsets, ssm_state_indices, output=output,
            beta_is_logit=beta_is_logit, state_checkpoints=state_checkpoints, checkpoint_cu_starts=checkpoint_cu_starts,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens, checkpoint_state_indices=checkpoint_state_indices,
        )  # fmt: skip
