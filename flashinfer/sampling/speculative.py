"""Speculative sampling of chains: a draft model proposes tokens, the target model's distribution decides."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.ops import sampling as room
from flashinfer.sampling.arguments import INDICES, as_values, place_of, randomness_of, take_randomness


@checked
@named(accepted="maybe_output_accepted_token_num", emitted="maybe_output_emitted_draft_token_num")
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept a chain of draft tokens up to the first that the target model refuses, and draw one token more.

    A token is accepted with probability min(1, target / draft). The one after the accepted ones is drawn from what the
    target has beyond the draft there, or, if all were accepted, from the target's last distribution. So tokens are
    distributed as if the target alone had drawn them.

    Parameters
    ----------
    draft_probs : torch.Tensor
        [batch, num_speculate_tokens, vocab_size]; float32, bfloat16, float16, or float64, which is rounded to float32.
    draft_token_ids : torch.Tensor
        int32 or int64 [batch, num_speculate_tokens]; what lies outside the vocabulary is refused.
    target_probs : torch.Tensor
        [batch, num_speculate_tokens + 1, vocab_size]; of these dtypes.
    maybe_output_accepted_token_num : torch.Tensor, optional
        int32 [batch]: how many tokens the target accepts, each looked at by itself, is added to it. It measures how
        well the models agree.
    maybe_output_emitted_draft_token_num : torch.Tensor, optional
        int32 [batch]: how many draft tokens are emitted is added to it; one more token is, besides.
    deterministic, generator, seed, offset
        As those of `sampling_from_probs`, with a request for an output.

    Returns
    -------
    output_token_ids : torch.Tensor
        int32 [batch, num_speculate_tokens + 1]: the accepted tokens, the one drawn, then -1. The one drawn is -1, too,
        where the target's row holds NaN or inf, or no probability above 0.
    output_accepted_token_num, output_emitted_draft_token_num : torch.Tensor
        The tensors given, or new ones counted from 0.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023,
    https://arxiv.org/abs/2302.01318

    Examples
    --------
    >>> import torch, flashinfer
    >>> draft, target = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    >>> tokens, accepted, emitted = flashinfer.chain_speculative_sampling(draft, torch.tensor([[1]]).int(), target)
    >>> tokens, accepted, emitted
    (tensor([[1, 0]], dtype=torch.int32), tensor([1], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    batch, count = _check(draft_probs, draft_token_ids, target_probs)
    draft_probs, target_probs = as_values("draft_probs", draft_probs), as_values("target_probs", target_probs)
    device = draft_probs.device
    accepted, emitted = maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num
    accepted = _counter("maybe_output_accepted_token_num", accepted, batch, device)
    emitted = _counter("maybe_output_emitted_draft_token_num", emitted, batch, device)
    randomness = take_randomness(device, batch, generator, seed, offset)
    if target_probs.dtype != draft_probs.dtype:
        draft_probs, target_probs = draft_probs.float(), target_probs.float()
    tokens = torch.empty((batch, count + 1), dtype=draft_token_ids.dtype, device=device)
    _chain(draft_probs, draft_token_ids, target_probs, *randomness, tokens, accepted, emitted)
    return tokens.to(torch.int32), accepted, emitted


def _check(draft_probs, draft_token_ids, target_probs):
    require(draft_probs.dim() == 3, "draft_probs", tuple(draft_probs.shape), "[batch, tokens, vocab_size]")
    batch, count, columns = draft_probs.shape
    require(0 < columns < 1 << 30, "draft_probs", tuple(draft_probs.shape), "1 to 2^30 tokens in the vocabulary")
    wanted = batch, count + 1, columns
    require(target_probs.shape == wanted, "target_probs", tuple(target_probs.shape), str(wanted))
    require(draft_token_ids.shape == (batch, count), "draft_token_ids", tuple(draft_token_ids.shape), f"{batch, count}")
    require(draft_token_ids.dtype in INDICES, "draft_token_ids", draft_token_ids.dtype, "int32, int64")
    same_device(draft_probs=draft_probs, draft_token_ids=draft_token_ids, target_probs=target_probs)
    return batch, count


def _counter(name, given, batch, device):
    if given is None:
        return torch.zeros(batch, dtype=torch.int32, device=device)
    require_fit(name, given, given.shape == (batch,), f"[{batch}]", torch.int32)
    require(given.device == device, name, f"a tensor on {given.device}", str(device))
    require(given.is_contiguous(), name, given.stride(), "contiguous")
    return given


@custom_op("flashinfer::chain_speculative_sampling", mutates_args=("tokens", "accepted", "emitted"))
def _chain(
    draft: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, numbers: list[int], seeds: torch.Tensor | None,
    offsets: torch.Tensor | None, tokens: torch.Tensor, accepted: torch.Tensor, emitted: torch.Tensor,
) -> None:  # fmt: skip
    """`numbers` are seed and offset, where they are not in tensors."""
    if not len(tokens):
        return
    draft, target, ids = rows_of(draft), rows_of(target), rows_of(ids)
    problem = room.Chain(
        dtype_name(draft.dtype), dtype_name(ids.dtype), place_of(seeds), place_of(offsets), is_aligned(draft, target)
    )
    drawn = randomness_of(numbers, seeds, offsets)
    room.chain(problem, draft.device).run(draft, ids, target, drawn, tokens, accepted, emitted)
