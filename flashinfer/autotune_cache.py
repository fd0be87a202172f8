"""Tuned choices that are kept from process to process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flashinfer._core.checks import require
from flashinfer.autotuner.autotuner import AutoTuner, tuning
from flashinfer.autotuner.measure import MeasurementPolicy
from flashinfer.autotuner.store import Folder

__all__ = ["MeasurementPolicy", "autotune_v2", "autotune_v2_reload"]

_open = False


@contextmanager
def autotune_v2(
    mode: str = "tune",
    persistent_cache: bool = True,
    cache_root: str | None = None,
    measurement_policy: MeasurementPolicy | None = None,
    *,
    tuning_buckets: Iterable[int] | None = None,
    round_up: bool | None = None,
    skip_ops: str | Iterable[str] | None = None,
) -> Iterator[None]:
    """As `flashinfer.autotune`, with choices kept in a folder: each is written as it is made, by a rename.

    The folder's place depends on the versions of the libraries, the device and the policy. It stays attached after the
    block, until another `autotune_v2` ends that, so that calls outside find what was tuned inside.

    Parameters
    ----------
    mode : str
        "tune" measures what has no choice; "replay" only uses what is kept.
    persistent_cache : bool
        Whether there is a folder; without one choices last as long as the process.
    cache_root : str, optional
        Where the folder is; default: FLASHINFER_AUTOTUNE_DIR, or this library's cache, which `flashinfer show-config`
        names. Files of other users are not read.
    measurement_policy : MeasurementPolicy, optional
        How candidates are timed.
    tuning_buckets, round_up, skip_ops
        As in `flashinfer.autotune`.

    Yields
    ------
    None
        A context manager.

    Raises
    ------
    ValueError
        Another mode, or `cache_root` without a folder.
    RuntimeError
        Inside another `autotune_v2`.

    Examples
    --------
    >>> import flashinfer
    >>> with flashinfer.autotune_v2("replay", persistent_cache=False):
    ...     pass  # calls in here use choices that this process made
    """
    global _open
    require(mode in ("tune", "replay"), "mode", repr(mode), "'tune', 'replay'")
    require(persistent_cache or cache_root is None, "cache_root", repr(cache_root), "None without persistent_cache")
    if _open:
        raise RuntimeError("autotune_v2 does not nest: which folder a choice goes to would not be clear")
    policy = measurement_policy or MeasurementPolicy()
    tuner = AutoTuner.get()
    tuner.folder = Folder(cache_root, policy.manifest_fields()) if persistent_cache else None
    tuner.policy = policy
    _open = True
    try:
        with tuning(mode == "tune", tuning_buckets=tuning_buckets, round_up=round_up, skip_ops=skip_ops):
            yield
    finally:
        _open = False


def autotune_v2_reload() -> None:
    """Forget the choices of this process, so that they are read from the attached folder: after tuning and a barrier,
    all ranks have the same.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.autotune_v2_reload()
    """
    tuner = AutoTuner.get()
    if tuner.folder is not None:
        tuner.profiling_cache.clear()
        tuner.folder.forget()
