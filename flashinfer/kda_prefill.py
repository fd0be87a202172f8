"""Kimi delta attention over prompts: what engines hand from call to call, and prepared launches."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer._kda import kda_chunks

__all__ = [
    "KDAPrefillPlanCache",
    "RecurrentKDAPrefillWorkspace",
    "kda_prefill_supports_fp32_checkpoints",
    "prepare_bf16_kda_prefill",
    "prepare_tf32_kda_prefill",
]


class RecurrentKDAPrefillWorkspace:
    """What a captured prefill of upstream's needs. Ours needs none: it is taken and has no effect.

    Parameters
    ----------
    device : torch.device or str
        Of the tensors of the call.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.RecurrentKDAPrefillWorkspace("cpu").device.type
    'cpu'
    """

    def __init__(self, device):
        self.device = torch.device(device)


def kda_prefill_supports_fp32_checkpoints(device=None, *, lower_bound: float | None = None) -> bool:
    """Whether states on the way can be float32: they can, with either gate and on every device.

    Parameters
    ----------
    device : torch.device, optional
        Not read: every device.
    lower_bound : float, optional
        Not read: either gate.

    Returns
    -------
    bool
        True.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.kda_prefill_supports_fp32_checkpoints()
    True
    """
    return True


@checked
def prepare_bf16_kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    cu_seqlens: torch.Tensor | None = None,
    sequence_lengths=None,
    state_indices: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    beta_is_logit: bool = True,
    plan_cache: KDAPrefillPlanCache | None = None,
) -> PreparedKDAPrefill:
    """A prefill of Kimi delta attention that is launched later, with the tensors that are given now.

    Parameters
    ----------
    q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, cu_seqlens, beta_is_logit
        As of `recurrent_kda`, with raw gates and normalized q and k; packed inputs may lack the leading 1.
    out : torch.Tensor
        Shape of v; receives the result.
    initial_state : torch.Tensor, optional
        [sequences, heads, V, K], or a pool with `state_indices`; zero if not given.
    final_state : torch.Tensor, optional
        Like `initial_state`, receives the final states; it may be `initial_state`.
    sequence_lengths : sequence of int, optional
        The lengths that `cu_seqlens` says; their sum is checked.
    state_indices : torch.Tensor, optional
        [sequences]: slots in the pools.
    state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens
        As of `recurrent_kda`; the first checkpoint of a sequence is its initial state.
    plan_cache : KDAPrefillPlanCache, optional
        Where prepared launches are looked up and left.

    Returns
    -------
    PreparedKDAPrefill
        Its `launch()` submits the work.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above, at launch at the latest.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v, g = torch.nn.functional.normalize(torch.randn(4, 1, 8, 2, 64), dim=-1).bfloat16()
    >>> out = torch.empty_like(v)
    >>> prepared = flashinfer.prepare_bf16_kda_prefill(
    ...     q, k, v, g, g[..., 0], A_log=torch.zeros(2), dt_bias=torch.zeros(2 * 64), out=out)
    >>> prepared.launch() is out
    True
    """
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "out": out,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": initial_state,
        "final_state": final_state,
        "cu_seqlens": cu_seqlens,
        "state_indices": state_indices,
        "state_checkpoints": state_checkpoints,
        "checkpoint_cu_starts": checkpoint_cu_starts,
    }
    require(q.dim() in (3, 4), "q", tuple(q.shape), "[batch, T, heads, K], or [tokens, heads, K]")
    offsets = cu_seqlens is None or cu_seqlens.dim() == 1
    require(offsets, "cu_seqlens", None if cu_seqlens is None else tuple(cu_seqlens.shape), "[sequences + 1]")
    lengths = None if sequence_lengths is None else tuple(sequence_lengths)
    whole = lengths is None or all(isinstance(n, (int, np.integer)) for n in lengths)
    require(whole, "sequence_lengths", lengths, "integers")
    scalars = {
        "scale": scale,
        "lower_bound": lower_bound,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens,
        "beta_is_logit": beta_is_logit,
        "sequence_lengths": lengths,
    }
    if lengths is not None:
        tokens = q.shape[0] * q.shape[1] if q.dim() == 4 else q.shape[0]
        require(sum(lengths) <= tokens, "sequence_lengths", f"{sum(lengths)} tokens", f"at most {tokens}, those of q")
        count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        require(len(lengths) == count, "sequence_lengths", f"{len(lengths)} sequences", str(count))
    found = None if plan_cache is None else plan_cache.get(inputs, **scalars)
    if found is not None:
        return found
    prepared = PreparedKDAPrefill(inputs, scalars)
    if plan_cache is not None:
        plan_cache.put(prepared, inputs, **scalars)
    return prepared


@checked
def prepare_tf32_kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    cu_seqlens: torch.Tensor | None = None,
    sequence_lengths=None,
    state_indices: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    beta_is_logit: bool = True,
) -> PreparedKDAPrefill:
    """`prepare_bf16_kda_prefill` with inputs in float32, whose products are not rounded to bfloat16.

    Parameters
    ----------
    q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, cu_seqlens, beta_is_logit, out, initial_state, final_state
        As in `prepare_bf16_kda_prefill`.
    sequence_lengths, state_indices, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens
        As in `prepare_bf16_kda_prefill`.

    Returns
    -------
    PreparedKDAPrefill
        As of `prepare_bf16_kda_prefill`.

    Raises
    ------
    ValueError
        As `prepare_bf16_kda_prefill` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v, g = torch.nn.functional.normalize(torch.randn(4, 1, 8, 2, 64), dim=-1)
    >>> out = torch.empty_like(v)
    >>> prepared = flashinfer.prepare_tf32_kda_prefill(
    ...     q, k, v, g, g[..., 0], A_log=torch.zeros(2), dt_bias=torch.zeros(2 * 64), out=out)
    >>> prepared.launch() is out
    True
    """
    q, k, v = (x.float() for x in (q, k, v))
    return prepare_bf16_kda_prefill(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        out=out,
        initial_state=initial_state,
        final_state=final_state,
        scale=scale,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
        sequence_lengths=sequence_lengths,
        state_indices=state_indices,
        state_checkpoints=state_checkpoints,
        checkpoint_cu_starts=checkpoint_cu_starts,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        beta_is_logit=beta_is_logit,
    )


class PreparedKDAPrefill:
    """A prefill with its tensors; `launch()` submits it on the current stream."""

    def __init__(self, inputs: dict, scalars: dict):
        self.inputs, self.scalars = dict(inputs), dict(scalars)

    def rebind(self, inputs: dict) -> PreparedKDAPrefill:
        """The same call with other tensors."""
        self.inputs = dict(inputs)
        return self

    def launch(self) -> torch.Tensor:
        """Run it; returns `out`."""
        given = dict(self.inputs)
        packed = given["q"].dim() == 3
        if packed:
            require(given["cu_seqlens"] is not None, "cu_seqlens", None, "a tensor, for packed inputs")
            for name in ("q", "k", "v", "g", "beta", "out"):
                given[name] = given[name][None]
        every = self.scalars["checkpoint_every_n_tokens"]
        kda_chunks(
            given["q"],
            given["k"],
            given["v"],
            given["g"],
            given["beta"],
            given["out"],
            given["initial_state"],
            given["final_state"],
            A_log=given["A_log"],
            dt_bias=given["dt_bias"],
            lower_bound=self.scalars["lower_bound"],
            raw_gate=True,
            beta_is_logit=self.scalars["beta_is_logit"],
            normalize=True,
            scale=self.scalars["scale"],
            offsets=given["cu_seqlens"],
            slots=given["state_indices"],
            backend="auto",
            marks=(given["state_checkpoints"], given["checkpoint_cu_starts"], every, None),
        )
        return self.inputs["out"]

    def close(self) -> None:
        """Let go of the tensors."""
        self.inputs = {}


class KDAPrefillPlanCache:
    """Prepared prefills, the least recently used of which go first.

    Parameters
    ----------
    capacity : int
        Most prefills.
    max_bytes : int, optional
        Most bytes that they may retain on the device, as `put` counts them; no bound if not given.

    Raises
    ------
    ValueError
        A capacity or max_bytes below 1.

    Examples
    --------
    >>> import flashinfer
    >>> cache = flashinfer.KDAPrefillPlanCache(capacity=8)
    >>> len(cache), cache.hits
    (0, 0)
    """

    def __init__(self, capacity: int = 64, max_bytes: int | None = None):
        require(capacity > 0, "capacity", capacity, "at least 1")
        require(max_bytes is None or max_bytes > 0, "max_bytes", max_bytes, "None, or at least 1")
        self.capacity, self.max_bytes = capacity, max_bytes
        self.bytes = self.hits = self.misses = self.evictions = 0
        self._entries: OrderedDict = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.bytes = 0

    def get(self, inputs: dict, **scalars) -> PreparedKDAPrefill | None:
        """Look up the prefill that was prepared for tensors and numbers like these, and bind it to these tensors.

        Parameters
        ----------
        inputs : dict of str to torch.Tensor or None
            By name; shapes, strides, dtypes and devices tell one prefill from another. They are kept by reference.
        **scalars
            Numbers and flags, which tell it too.

        Returns
        -------
        PreparedKDAPrefill or None
            None if there is none; `hits` or `misses` counts the call.

        Raises
        ------
        ValueError
            As `PreparedKDAPrefill.rebind`.
        """
        key = _signature(inputs, scalars)
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0].rebind(inputs)

    def put(self, prepared: PreparedKDAPrefill, inputs: dict, *, retained_bytes: int = 0, **scalars) -> bool:
        """Keep a prefill; the least recently used ones beyond `capacity` and `max_bytes` go, the newest never does.

        Parameters
        ----------
        prepared : PreparedKDAPrefill
            Kept by reference, in the place of one that was kept for the same key.
        inputs, **scalars
            The key, as in `get`.
        retained_bytes : int
            Bytes on the device that it keeps alive, as the caller counts them.

        Returns
        -------
        bool
            True: it is kept.
        """
        key = _signature(inputs, scalars)
        self.bytes -= self._entries.pop(key, (None, 0))[1]
        self._entries[key] = prepared, retained_bytes
        self.bytes += retained_bytes
        while len(self._entries) > 1 and (
            len(self._entries) > self.capacity or self.max_bytes is not None and self.bytes > self.max_bytes
        ):
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed
            self.evictions += 1
        return True


def _signature(inputs: dict, scalars: dict) -> tuple:
    tensors = ((name, None if x is None else (x.shape, x.stride(), x.dtype, x.device)) for name, x in inputs.items())
    return tuple(sorted(tensors)), tuple(sorted(scalars.items(), key=lambda item: item[0]))
