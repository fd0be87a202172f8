"""Sampling tokens: softmax, drawing from probabilities or logits, top-k, top-p and min-p filters.

Every function here that draws takes its random numbers from a seed and an offset, and from nothing else: equal seeds
and offsets give equal tokens. `sampling_from_probs` says how they are given.
"""

from flashinfer.sampling.draw import (
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)
from flashinfer.sampling.filters import softmax, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs
from flashinfer.sampling.speculative import chain_speculative_sampling

# Upstream's older names.
top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs
from flashinfer.trace.templates import describe

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

describe(__name__, globals())
