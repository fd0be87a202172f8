"""`attn_implementation="flashinfer"` for Hugging Face transformers: padded batches, caches, continuous batching.

    from flashinfer.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashinfer")

transformers calls two functions: `mask` once a forward for each kind of layer, and `attention` in each layer. Every
call is one batch of `BatchPrefillWithPagedKVCacheWrapper` with pages of one token, so keys and values are read where
transformers' caches hold them. The first layer of a kind plans, the others run that plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

NAME = "flashinfer"
_WORKSPACE_BYTES = 128 << 20
# What is added to a logit that is not seen: the least number of the mask's dtype, in float16 -65504, or -inf.
_MASKED = -1e4
# Arguments of transformers' models that change what attention computes or returns, and have no counterpart here.
_REFUSED = ("dropout", "position_bias", "output_attentions", "head_mask")


def register() -> None:
    """Make `attn_implementation="flashinfer"` known to transformers, in this process.

    It holds for models that take transformers' flash attention: transformers then prepares no mask for continuous
    batching and passes offsets instead. Attention is for inference: under autograd, with dropout or with an additive
    bias it raises.

    Examples
    --------
    >>> from flashinfer.integrations.transformers import register
    >>> register()
    >>> from transformers import AttentionInterface
    >>> "flashinfer" in AttentionInterface()
    True
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    choose = PreTrainedModel._check_and_adjust_attn_implementation
    if hasattr(choose, "__wrapped__"):
        return

    # transformers takes every name with "flash" in it for a package or a hub kernel that it has to load itself.
    def chosen(self, attn_implementation, *args, **kwargs):
        if attn_implementation != NAME:
            return choose(self, attn_implementation, *args, **kwargs)
        if not self._supports_flash_attn:
            raise ValueError(f'attn_implementation: got "{NAME}"; {type(self).__name__} does not take flash attention')
        return NAME

    chosen.__wrapped__ = choose
    PreTrainedModel._check_and_adjust_attn_implementation = chosen


@torch.compiler.disable
def mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function, attention_mask=None,
    device="cpu", **kwargs,
):  # fmt: skip
    """What `attention` has to know of a batch beside its lengths, in transformers' mask interface.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Of the queries, and of the keys as the cache gives them, a static cache with its unwritten end.
    q_offset, kv_offset : int or Tensor
        Positions of the first query and of the first key.
    mask_function : callable
        Which keys a query sees.
    attention_mask : bool Tensor [batch_size, positions], optional
        False where a token is padding.
    device : torch.device
        Of the result.
    **kwargs
        Passed to transformers' own mask function.

    Returns
    -------
    None, bool Tensor [batch_size, keys] or bool Tensor [batch_size, 1, q_length, kv_length]
        No padding; which of the first keys are tokens, where the rest follows from causality and the window; or all of
        it, where it does not.
    """
    end = int(q_offset) + q_length
    keys = min(end - int(kv_offset), kv_length)
    window = _window(mask_function)
    padding, valid = attention_mask, None
    if padding is not None and window is not None:
        # A mask that this function has made begins at the first key already.
        first = 0 if padding.shape[1] == keys else int(kv_offset)
        valid = padding.bool()[:, first : first + keys]
        valid = torch.nn.functional.pad(valid, (0, keys - valid.shape[1]))
        # Tokens behind the last one of a text are seen by none of it.
        valid = valid | ~valid.flip(1).cummax(1).values.flip(1)
        if valid.all():
            valid = None
        elif not (valid[:, 1:] >= valid[:, :-1]).all() and (window or not valid[:, -q_length:].all()):
            window = None
    if window is None:
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        dense = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*sizes, mask_function=mask_function, attention_mask=padding, device=device, **dense)
    if valid is None and keys < kv_length:
        valid = torch.ones(batch_size, keys, dtype=torch.bool, device=device)
    return valid


def _window(mask_function) -> int | None:
    """The window of causal attention, 0 without one; None of another pattern, which only a dense mask states."""
    if mask_function is causal_mask_function:
        return 0
    # transformers makes a windowed mask as and_masks(sliding_window_overlay(window), causal_mask_function).
    parts = _closure(mask_function, "and_masks.")
    if len(parts) == 1 and len(parts[0]) == 2 and parts[0][1] is causal_mask_function:
        return next(iter(_closure(parts[0][0], "sliding_window_overlay.")), None)
    return None


def _closure(function, maker: str) -> list:
    """What a function that `maker` returned holds; [] of another function."""
    made = getattr(function, "__qualname__", "").startswith(maker)
    return [cell.cell_contents for cell in function.__closure__ or ()] if made else []


class _Batch(NamedTuple):
    """Keys and values [slots, heads, dim] of a call, and its requests.

    `tables` gives offsets of queries, offsets of keys, and the slots of each request's keys; two batches with the same
    `key` have the same. `dense` is the part of a 4D mask.
    """

    key: tuple
    k: torch.Tensor
    v: torch.Tensor
    tables: Callable[[], tuple]
    dense: torch.Tensor | None = None

    def is_planned_by(self, key: tuple, before: int | None, layer: int | None) -> bool:
        """Whether a plan for the batch of `key`, by a layer `before` this one, is one for this.

        Tensors and objects count by identity. A tensor may have been written to between two forwards, and not all
        writes are counted: a later layer is one of the same forward.
        """
        if layer is not None and before is not None:
            if layer <= before:
                return False
        elif any(isinstance(x, torch.Tensor) and x.is_inference() for x in key):
            return False
        return len(key) == len(self.key) and all(a is b or isinstance(a, int) and a == b for a, b in zip(key, self.key))


class _Planned(threading.local):
    """Each thread's wrappers, by what they are planned with: the key of the batch that each has planned, the wrapper,
    and the layer that called it last."""

    def __init__(self):
        self.workspaces, self.wrappers = {}, {}


_planned = _Planned()


@torch.compiler.disable
def attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, is_causal=None,
    s_aux=None, cache=None, **kwargs,
):  # fmt: skip
    """Attention of one layer, in transformers' attention interface.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; its `is_causal` holds where `is_causal` is None.
    query : Tensor [batch, num_qo_heads, q_length, head_dim]
    key, value : Tensor [batch, num_kv_heads, kv_length, head_dim]
        As a cache gives them. The last query stands at the last key.
    attention_mask : Tensor, optional
        From `mask`, or of the caller: bool or additive [batch or 1, 1, q_length, kv_length], which is then all that
        counts, without `is_causal` and `sliding_window`.
    scaling : float, optional
        Default head_dim ** -0.5.
    sliding_window : int, optional
        Keys that a query sees, its own included.
    softcap : float, optional
        Logits become softcap * tanh(logits / softcap).
    is_causal : bool, optional
        Whether a query sees no later key.
    s_aux : float Tensor [num_qo_heads], optional
        Sinks: a logit of each head that takes part in the softmax without a value.
    cache : PagedAttentionCache, optional
        Of continuous batching; `kwargs` then holds its `cu_seq_lens_q`, `cu_seq_lens_k`, `read_index`, `write_index`.
    **kwargs
        `cu_seq_lens_q`, `cu_seq_lens_k` of packed requests without a cache; the rest of a model's arguments.

    Returns
    -------
    out : Tensor [batch, q_length, num_qo_heads, head_dim]
        0 where a query sees no key.
    None
        In the place of attention weights.

    Raises
    ------
    ValueError
        For an argument that would change the result and is not taken, by name.
    """
    for name in _REFUSED:
        given = kwargs.get(name)
        if isinstance(given, torch.Tensor) or given:
            raise ValueError(f"{name}: got {given!r:.40}; not taken here: use another attn_implementation")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise ValueError("query, key, value: they require gradients, and this attention has none; use torch.no_grad()")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    batch = _batch(module, query, key, value, attention_mask, cache, kwargs)
    if batch.dense is not None:
        causal, sliding_window = False, None
    if sliding_window is not None and not causal:
        raise ValueError(f"sliding_window: got {sliding_window} without is_causal; allowed: with it, or in a 4D mask")
    heads, kv_heads = query.shape[1], batch.k.shape[1]
    layer = getattr(module, "layer_idx", None)
    wrapper = _plan(
        batch, layer, query.device, heads, kv_heads, query.shape[-1], head_dim_vo=batch.v.shape[-1], causal=causal,
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling), q_data_type=query.dtype,
        window_left=sliding_window - 1 if sliding_window else -1, logits_soft_cap=softcap, kv_data_type=batch.k.dtype,
    )  # fmt: skip
    rows = query.transpose(1, 2).reshape(-1, heads, query.shape[-1])
    out = wrapper.run(rows, (batch.k, batch.v), sinks=None if s_aux is None else s_aux.float())
    return out.view(query.shape[0], -1, *out.shape[1:]), None


def _plan(batch: _Batch, layer: int | None, device, *shape, **options) -> BatchPrefillWithPagedKVCacheWrapper:
    """A wrapper that has planned the batch."""
    if device not in _planned.workspaces:
        _planned.workspaces[device] = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    kind = (device, shape, *options.values(), batch.dense is None)
    if kind not in _planned.wrappers:
        _planned.wrappers[kind] = [(), BatchPrefillWithPagedKVCacheWrapper(_planned.workspaces[device]), None]
    made = _planned.wrappers[kind]
    known, wrapper, before = made
    if not batch.is_planned_by(known, before, layer):
        made[0] = ()
        qo_indptr, kv_indptr, slots = batch.tables()
        last = kv_indptr.diff().clamp(max=1)  # 0 for a request without keys
        wrapper.plan(qo_indptr, kv_indptr, slots, last, *shape, 1, custom_mask=batch.dense, **options)
        made[0] = batch.key
    made[2] = layer
    return wrapper


def _batch(module, query, key, value, attention_mask, cache, kwargs) -> _Batch:
    if cache is not None:
        return _continuous(module, key, value, cache, kwargs)
    offsets = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if attention_mask is None and offsets[0] is not None:
        return _ragged(key, value, offsets, (*offsets, *map(_version, offsets)))
    size, q_length, kv_length = len(query), query.shape[2], key.shape[2]
    k, v, pitch = _slots(key, value)
    dense = valid = None
    if attention_mask is not None and attention_mask.dim() == 2:
        valid, kv_length = attention_mask.bool(), attention_mask.shape[1]
    elif attention_mask is not None:
        dense = _seen(attention_mask, size, q_length, kv_length)

    def tables():
        count = partial(torch.arange, dtype=torch.int32, device=key.device)
        slots = count(size)[:, None] * pitch + count(kv_length)
        if valid is None:
            return count(size + 1) * q_length, count(size + 1) * kv_length, slots.flatten()
        kv_indptr = torch.nn.functional.pad(valid.sum(1).cumsum(0), (1, 0)).int()
        return count(size + 1) * q_length, kv_indptr, slots[valid]

    return _Batch((attention_mask, _version(attention_mask), size, q_length, kv_length, pitch), k, v, tables, dense)


def _version(tensor) -> int:
    """Changes when a tensor is written to; 0 where torch does not count."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _slots(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values [batch, heads, length, dim] as [slots, heads, dim], where token (b, s) has slot b * pitch + s."""
    both = [key, value]
    size, heads, length, _ = key.shape
    pitches = [t.stride(0) / max(t.stride(2), 1) if size > 1 else length for t in both]
    steps = [t.stride()[1:3] for t in both]
    if pitches[0] != pitches[1] or pitches[0] % 1 or any(t.stride(3) != 1 or not t.stride(2) for t in both):
        both, pitches = [t.contiguous() for t in both], [heads * length]
        # Not what they say: of one token, the stride from token to token may be any.
        steps = [(length * t.shape[3], t.shape[3]) for t in both]
    pitch = int(pitches[0])
    slots = (size - 1) * pitch + length
    k, v = (
        t.as_strided((slots, heads, t.shape[3]), (of_token, of_head, 1), t.storage_offset())
        for t, (of_head, of_token) in zip(both, steps)
    )
    return k, v, pitch


def _seen(attention_mask: torch.Tensor, size: int, q_length: int, kv_length: int) -> torch.Tensor:
    """A caller's mask as one bool for each query and key of each request."""
    allowed = f"[{size} or 1, 1, {q_length}, {kv_length}]"
    shape = tuple(attention_mask.shape)
    if len(shape) != 4 or shape[0] not in (1, size) or shape[1:] != (1, q_length, kv_length):
        raise ValueError(f"attention_mask: got shape {list(shape)}; allowed: [{size}, keys] or {allowed}")
    if attention_mask.dtype == torch.bool:
        seen = attention_mask
    else:
        seen = attention_mask == 0
        if not (seen | (attention_mask <= _MASKED)).all():
            raise ValueError(f"attention_mask: got a bias; allowed: True and False, or 0 and {_MASKED:g} or less")
    return seen.expand(size, -1, -1, -1).flatten()


def _ragged(key, value, offsets, batch_key) -> _Batch:
    """Packed requests, one after another in key and value [1, heads, tokens, dim]."""
    k, v = (t.squeeze(0).transpose(0, 1) for t in (key, value))

    def tables():
        return *(indptr.int() for indptr in offsets), torch.arange(len(k), dtype=torch.int32, device=k.device)

    return _Batch((*batch_key, len(k)), k, v, tables)


def _continuous(module, key, value, cache, kwargs) -> _Batch:
    """A step of continuous batching: new keys and values enter the paged cache, and are read from there.

    Layers with a window keep their keys in a ring that the step may overwrite, so transformers gives a copy of what
    they see; so it does of the step's own keys where no request has earlier ones.
    """
    layer = module.layer_idx
    allocator = cache.layer_to_allocator[layer]
    read, write = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
    # transformers makes the dict of offsets for each step and gives it to all layers.
    step = kwargs["cu_seq_lens_k"]
    offsets, batch_key = (kwargs["cu_seq_lens_q"], step[allocator.layer_type]), (step, allocator)
    if not allocator.supports_block_table or not read.numel():
        key, value = cache.update(key, value, layer, kwargs)
        return _ragged(key, value, offsets, batch_key)
    k, v = [pages.flatten(0, 1) for pages in allocator.get_cache_for_block_table(layer)]
    for pool, new in ((k, key), (v, value)):
        pool.index_copy_(0, write, new.squeeze(0).transpose(0, 1))
    return _Batch(batch_key, k, v, lambda: (*(indptr.int() for indptr in offsets), read.int()))
