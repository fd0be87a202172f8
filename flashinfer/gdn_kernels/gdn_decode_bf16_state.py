"""Several tokens of each sequence through a gated delta rule, by upstream's kernel name."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import present, require
from flashinfer._delta import require_shape
from flashinfer.gdn_decode import decode_tokens
from flashinfer.ops.recurrent.delta.operands import Pool

__all__ = ["gated_delta_rule_bf16state_cooprow_mtp", "gated_delta_rule_mtp"]


@checked
@named(state="initial_state")
def gated_delta_rule_mtp(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    accepted_steps: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
) -> torch.Tensor:
    """T tokens of each sequence from a pool of states stored K last.

    Parameters
    ----------
    A_log, dt_bias, a, b, scale, output
        As in `flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose`.
    softplus_beta, softplus_threshold : float
        softplus(x) is log(1 + exp(beta x)) / beta, and x where beta x is above the threshold.
    q, k : torch.Tensor
        [batch, T, query heads, K]; bfloat16, float16 or float32.
    v : torch.Tensor
        [batch, T, heads, V] of that dtype.
    initial_state_source : torch.Tensor
        A pool [slots, heads, V, K].
    initial_state_indices : torch.Tensor
        [batch], int32 or int64: the slot of each sequence; a negative one is padding, whose output is 0.
    output_state_indices : torch.Tensor, optional
        [batch]: slots for the last state, if not those that were read; none for a negative one. With
        `ssm_state_indices` the last state goes there, too, if this is another tensor than `initial_state_indices`.
    intermediate_states_buffer : torch.Tensor, optional
        [batch or more, T or more, heads, V, K] of the pool's dtype; receives the state after every token.
    accepted_steps : torch.Tensor, optional
        [batch]: the state after token accepted_steps[i] is the one that is written, and states after later tokens go
        nowhere. Outputs are those of all T tokens.
    ssm_state_indices : torch.Tensor, optional
        [batch, T], T > 1: the slots of the pool that receive the state after every token.
    disable_state_update : bool
        States are read only.
    use_qk_l2norm_in_kernel : bool
        q and k are divided by sqrt(sum of squares + 1e-6) first.
    disable_output : bool
        Only states are wanted: `output` stays as it is.
    recovery_steps : int
        If not 0, the state after that many tokens is the one that is written, 0 to T. Outputs are those of all tokens.

    Returns
    -------
    torch.Tensor
        `output`, or a new tensor in the dtype of q.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 2, 3, 4, 64).unbind(0)  # 2 sequences, 3 tokens, 4 heads
    >>> pool, slots, raw = torch.zeros(3, 4, 64, 64), torch.tensor([2, 0]), torch.zeros(2, 3, 4)
    >>> flashinfer.gdn_kernels.gated_delta_rule_bf16state_cooprow_mtp(
    ...     torch.zeros(4), raw, torch.zeros(4), q=q, k=k, v=v, b=raw,
    ...     initial_state_source=pool, initial_state_indices=slots).shape
    torch.Size([2, 3, 4, 64])
    """
    given = {
        "q": q,
        "k": k,
        "v": v,
        "b": b,
        "initial_state_source": initial_state_source,
        "initial_state_indices": initial_state_indices,
    }
    given = {name: present(name, x) for name, x in given.items()}
    q = given["q"]
    batch, tokens = q.shape[:2]
    rows, each = ssm_state_indices, intermediate_states_buffer
    require(0 <= recovery_steps <= tokens, "recovery_steps", recovery_steps, f"0 to {tokens}")
    if recovery_steps:
        require(
            each is None and rows is None,
            "recovery_steps",
            recovery_steps,
            "0 with intermediate_states_buffer or ssm_state_indices",
        )
        require(not disable_state_update, "disable_state_update", True, "False with recovery_steps")
    if rows is not None:
        require(each is None, "ssm_state_indices", "a tensor", "None with intermediate_states_buffer")
        require(not disable_state_update, "disable_state_update", True, "False with ssm_state_indices")
        require(tokens > 1, "ssm_state_indices", "a tensor", "None for T = 1")
    stop = None
    if accepted_steps is not None:
        require_shape("accepted_steps", accepted_steps, batch, dtypes=(torch.int32, torch.int64))
        stop = accepted_steps + 1
    elif recovery_steps:
        stop = torch.full((batch,), recovery_steps, dtype=torch.int32, device=q.device)
    pool = Pool(
        initial_state_source,
        initial_state_source,
        initial_state_indices,
        write=output_state_indices,
        stop=stop,
        each=each,
        rows=rows,
    )
    elsewhere = output_state_indices is not None and output_state_indices is not initial_state_indices
    final = not disable_state_update and (rows is None or elsewhere)
    result = decode_tokens(
        q,
        k,
        v,
        (A_log, a, dt_bias, b),
        pool,
        scale,
        None if disable_output else output,
        use_qk_l2norm_in_kernel,
        final,
        "auto",
        soft=(softplus_beta, softplus_threshold),
    )
    return output if disable_output and output is not None else result


gated_delta_rule_bf16state_cooprow_mtp = gated_delta_rule_mtp
