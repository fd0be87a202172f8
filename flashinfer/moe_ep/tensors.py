"""What a layer over ranks is given: the tensors of a call, and the weights of a rank's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.checks import require, require_tensor


@dataclass(eq=False)
class MoEEpTensors:
    """The tensors of one call of a layer over ranks. Fields may be set again for the next call.

    Parameters
    ----------
    hidden_states : torch.Tensor
        [tokens, hidden] of this rank: bfloat16, or float8_e4m3fn where `MegaConfig` has no quantize_input.
    topk_ids : torch.Tensor
        [tokens, top_k], int32 or int64: experts of all ranks. One outside 0 to num_experts - 1 gives nothing.
    topk_weights : torch.Tensor
        [tokens, top_k], float32, bfloat16 or float16.
    scales : torch.Tensor, optional
        float32 [tokens, hidden / 128], of hidden_states that are float8_e4m3fn in blocks; they multiply.
    fc1_alpha, fc2_alpha, fc1_norm_const
        Of NVFP4 kernels. Only None.
    recv_count, num_tokens_per_expert
        What transports of two halves write. Only None.
    output : torch.Tensor, optional
        bfloat16 [at least tokens, hidden], contiguous: receives the result in its first rows.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.moe_ep import MoEEpTensors
    >>> MoEEpTensors(torch.zeros(3, 64).bfloat16(), torch.zeros(3, 2).int(), torch.ones(3, 2)).num_tokens
    3
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scales: torch.Tensor | None = None
    fc1_alpha: torch.Tensor | None = None
    fc2_alpha: torch.Tensor | None = None
    fc1_norm_const: torch.Tensor | None = None
    recv_count: torch.Tensor | None = None
    num_tokens_per_expert: torch.Tensor | None = None
    output: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank in the call."""
        return self.hidden_states.shape[0]


@dataclass(frozen=True, eq=False)
class MoEWeightPack:
    """The weights of a rank's experts, in the order of checkpoints.

    Parameters
    ----------
    w13 : torch.Tensor
        [experts of the rank, 2 * intermediate, hidden]: the gate's rows, then the up-projection's.
    w2 : torch.Tensor
        [experts of the rank, hidden, intermediate].
    w13_scale, w2_scale : torch.Tensor, optional
        Scales of weights that are quantised, which multiply: both or neither. Their shapes are those of
        `Fp8MegaMoeConfig`.

    Raises
    ------
    ValueError
        Something other than a tensor, or one scale without the other.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.moe_ep import MoEWeightPack
    >>> pack = MoEWeightPack(torch.zeros(2, 256, 128).bfloat16(), torch.zeros(2, 128, 128).bfloat16())
    >>> pack.w13_scale is None
    True
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None

    def __post_init__(self):
        require_tensor("w13", self.w13)
        require_tensor("w2", self.w2)
        require_tensor("w13_scale", self.w13_scale, optional=True)
        require_tensor("w2_scale", self.w2_scale, optional=True)
        both = (self.w13_scale is None) == (self.w2_scale is None)
        given, other = ("w2_scale", "w13_scale") if self.w2_scale is None else ("w13_scale", "w2_scale")
        require(both, given, None, f"a tensor, as {other} is given")
