"""Gated linear recurrences over a state: with the delta rule, of state-space models, and the short convolution."""
