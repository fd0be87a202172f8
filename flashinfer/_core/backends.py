"""The one table between upstream's backend names and our variants.

Upstream's names say which of its kernels would take a problem. Here they promise a result and refuse nothing: the
variants of an op stand best first for each chip, so the first that takes the problem is the nearest to what was named
(on Hopper "fa3" is `sm90`, and `portable` where that does not take the problem). Only our own names pin one variant:
where it refuses, it is an error. `explain()` and the log say what ran.
"""

from __future__ import annotations

from flashinfer._core.checks import require
from flashinfer._core.literals import Backend

ANY = None

VARIANTS_OF: dict[Backend, tuple[str, ...] | None] = {
    "auto": ANY,
    "fa2": ANY,
    "fa3": ANY,
    "cudnn": ANY,
    "cudnn-native": ANY,
    "cutlass": ANY,
    "trtllm-gen": ANY,
    "trtllm-native": ANY,
    "cute-dsl": ANY,
    "cute-dsl-prims": ANY,
    "cutile": ANY,
    "fmha_v2": ANY,
    "xqa": ANY,
    "cake": ANY,
    "cake_cute": ANY,
    "prims-ts": ANY,
    "cubin": ANY,
    # of block-sparse attention
    "vsa_sm100_blk64": ANY,
    "vsa_sm100_blk128": ANY,
    "vsa_sm120_blk64": ANY,
    # our own names
    "reference": ("reference",),
    "portable": ("portable",),
    "sm80": ("sm80",),
    "sm90": ("sm90",),
}

# The backend that a wrapper reports; engines compare it with upstream's strings.
REPORTED_AS = {
    "reference": "fa2",
    "portable": "fa2",
    "sm80": "fa2",
    "sm90": "fa3",
}


def variants_of(backend: str) -> tuple[str, ...] | None:
    """Names of the variants that `backend` admits; None where it admits all. ValueError for an unknown name."""
    known = isinstance(backend, str) and backend in VARIANTS_OF
    require(known, "backend", repr(backend), ", ".join(VARIANTS_OF))
    return VARIANTS_OF[backend]
