"""The one table between upstream's backend names and our variants.

`fa3` names an algorithm for one class of chips, so it selects the variant of ours that stands in its place, and nothing
else. `fa2` is what upstream runs on every chip and engines ask for to be safe (SGLang and mini-sglang always do): like
the names of libraries that upstream calls it promises a result, and any variant of ours answers to it. An explicit name
never falls back: where its variants refuse, it is an error.
"""

from __future__ import annotations

ANY = None

VARIANTS_OF = {
    "auto": ANY,
    "fa2": ANY,
    "fa3": ("sm90",),
    "cudnn": ANY,
    "cudnn-native": ANY,
    "cutlass": ANY,
    "trtllm-gen": ANY,
    "trtllm-native": ANY,
    "cute-dsl": ANY,
    "xqa": ANY,
    # our own names
    "reference": ("reference",),
    "portable": ("portable",),
    "sm80": ("sm80",),
    "sm90": ("sm90",),
    "sm100": ("sm100",),
    "sm120": ("sm120",),
}

# What a wrapper reports as its backend: engines compare it with upstream's strings.
REPORTED_AS = {
    "reference": "fa2",
    "portable": "fa2",
    "sm80": "fa2",
    "sm90": "fa3",
    "sm100": "trtllm-gen",
    "sm120": "fa2",
}


def variants_of(backend: str) -> tuple[str, ...] | None:
    """Names of the variants that `backend` admits; None where it admits all. ValueError for an unknown name."""
    if backend not in VARIANTS_OF:
        raise ValueError(f"backend: got {backend!r}; allowed: {', '.join(VARIANTS_OF)}")
    return VARIANTS_OF[backend]
