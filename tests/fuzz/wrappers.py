"""Random calls of the wrappers with a plan, with what engines bring to them: tables of other dtypes, devices and
strides, caches in parts, FP8 keys, scales of each head, sinks, outputs of the caller's, an earlier plan, the older
names, and the fixed buffers of CUDA graphs."""

import inspect
import math

import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.fuzz import PAGE_SIZES, Call, Draw, described
from tests.fuzz.attend import batch_of, masks_of, names_of, options_of
from tests.ops.attention import cases
from tests.ops.attention.oracle import Extras

FP8 = torch.float8_e4m3fn


def workspace(draw):
    return torch.empty(1 << 16, dtype=torch.uint8, device=draw.device)


def placed(draw, x):
    """x, or the same values with gaps, where no vector load may begin, or with any stride of an axis of 1."""
    if 1 in x.shape and x.numel() and draw.chance(0.15):
        return x.as_strided(x.shape, [draw.pick(1, 3, 64) if n == 1 else x.stride(i) for i, n in enumerate(x.shape)])
    if x.dtype.itemsize == 1 or not x.numel() or not draw.chance(0.15):
        return draw.laid(x) if x.dtype.itemsize > 1 else x
    skip = draw.pick(1, 2, 4)
    return torch.cat((x.new_full((skip,), math.nan), x.flatten()))[skip:].view(x.shape)


def narrow_keys(draw, x):
    """The batch, sometimes with keys and values in FP8."""
    if not draw.chance(0.25):
        return x
    return generate.Ragged(x.q, x.k.to(FP8), x.v.to(FP8), x.qo_indptr, x.kv_indptr)


def table(draw, given):
    """A table as it may come: int32 or int64, on the host or the device, with a gap after each element."""
    given = given.to(draw.pick(torch.int32, torch.int64), copy=True)
    if draw.chance(0.3):
        given = given.cpu()
    if given.numel() and draw.chance(0.2):
        given = torch.stack((given, torch.full_like(given, 1 << 20)), 1)[:, 0]
    return given


def offsets_within(draw, indptr, indices):
    """The page table of a batch within a larger one: page ids before and behind its own."""
    if not draw.chance(0.3):
        return indptr, indices
    first, behind = draw.integer(0, 3), draw.integer(0, 3)
    # These ids are of no request, and of no page.
    other = indices.new_full((1,), 1 << 20)
    return indptr + first, torch.cat((other.expand(first), indices, other.expand(behind)))


def cache_of(draw, paged):
    """A cache in one tensor or two, with gaps, or as a view of the other layout's memory."""
    cache = paged.kv_cache
    if isinstance(cache, tuple) or draw.chance():
        parts = [t.clone() if draw.chance() else t for t in paged.caches]
        parts = [t.transpose(1, 2).contiguous().transpose(1, 2) if draw.chance(0.3) else t for t in parts]
        parts = [placed(draw, t) for t in parts]
        if paged.page_size == 1 and draw.chance():
            parts = [t.squeeze(1 if paged.kv_layout == "NHD" else 2) for t in parts]
        return draw.pick(tuple, list)(parts)
    return placed(draw, cache)


class Scales:
    """Scales of q, k and v for run(), and the batch that has them in its values."""

    def __init__(self, draw, heads, kv_heads):
        self.given, self.factors, self.group = {}, {}, heads // kv_heads
        for name in ("q_scale", "k_scale", "v_scale"):
            kind = draw.pick(None, None, None, "number", "one", "kv heads", "heads")
            if kind is None:
                continue
            count = {"kv heads": kv_heads, "heads": heads}.get(kind, 1)
            value = torch.tensor([draw.pick(0.5, 2.0, 1.25) for _ in range(count)], dtype=torch.float32)
            shared = count == kv_heads and kv_heads > 1
            self.factors[name] = value.repeat_interleave(self.group) if shared else value
            if kind == "number":
                value = float(value)
            elif draw.chance(0.2):
                value = value.double()
            if isinstance(value, torch.Tensor):
                value = value.to(draw.device) if draw.chance(0.7) else value
                value = value.view(-1, 1) if draw.chance(0.2) else value
                value = value.reshape(()) if count == 1 and draw.chance(0.3) else value
            self.given[name] = value

    def truth(self, x):
        """The batch with a KV head for each query head, its keys and values scaled in float64."""
        if not self.factors:
            return x
        factor = {name: value.double().to(x.q.device)[:, None] for name, value in self.factors.items()}
        keys, values = (t.double().repeat_interleave(self.group, 1) for t in (x.k, x.v))
        keys = keys * factor.get("q_scale", 1.0) * factor.get("k_scale", 1.0)
        return generate.Ragged(x.q, keys, values * factor.get("v_scale", 1.0), x.qo_indptr, x.kv_indptr)


class Results:
    """How run() is asked for out and lse, and both as the oracle has them."""

    def __init__(self, draw, rows, heads, dim, o_dtype, layouts=("NH", "HN")):
        self.given, self.rows, self.heads = dict(return_lse=True), rows, heads
        self.base, self.layout = draw.pick("log2", "log2", "ln"), draw.pick(*layouts)
        if self.base != "log2" or draw.chance(0.2):
            self.given["lse_base"] = self.base
        if self.layout != "NH":
            self.given["lse_layout"] = self.layout
        self.out = self.lse = None
        if draw.chance(0.3):
            out = torch.empty(rows, heads, dim, dtype=o_dtype, device=draw.device)
            self.out = self.given["out"] = placed(draw, out)
        if draw.chance(0.3):
            shape = (heads, rows) if self.layout == "HN" else (rows, heads)
            self.lse = self.given["lse"] = torch.empty(shape, dtype=torch.float32, device=draw.device)

    def plain(self, result):
        out, lse = result
        for given, got in ((self.out, out), (self.lse, lse)):
            assert given is None or given.data_ptr() == got.data_ptr(), "a new tensor where one was given"
        lse = lse.t() if self.layout == "HN" else lse
        assert lse.shape == (self.rows, self.heads) and lse.dtype == torch.float32, lse.shape
        return out, lse / math.log(2.0) if self.base == "ln" else lse


def sinks_of(draw, heads):
    if not draw.chance(0.25):
        return None
    sinks = torch.tensor([draw.pick(-3.0, 0.0, 2.5, -math.inf) for _ in range(heads)], dtype=torch.float32)
    return sinks.to(draw.device, draw.pick(torch.float32, torch.bfloat16))


def splits_of(draw):
    return dict(fixed_split_size=draw.pick(None, None, -1, 1, 32, 1000), disable_split_kv=draw.chance(0.3))


class Asked:
    """What the families of wrappers have in common: a batch, its options, scales, sinks and results."""

    def __init__(self, draw, decode=False, layouts=("NH", "HN"), grow=0):
        batch = draw.pick(0, 1, 2, 3)
        x, self.qo, self.kv = batch_of(draw, batch, decode=decode)
        if grow:
            self.kv = [n + grow for n in self.kv]
            sizes = x.q.shape[1], x.k.shape[1], x.q.shape[2]
            x = generate.ragged_batch(self.qo, self.kv, *sizes, dtype=x.q.dtype, device=draw.device)
        self.x = narrow_keys(draw, x)
        self.rows, self.heads, self.dim = self.x.q.shape
        self.kv_heads = self.x.k.shape[1]
        self.options = options_of(draw, self.dim)
        self.scales, self.sinks = Scales(draw, self.heads, self.kv_heads), sinks_of(draw, self.heads)
        self.o_dtype = draw.pick(None, None, torch.float32, self.x.q.dtype)
        self.results = Results(draw, self.rows, self.heads, self.dim, self.o_dtype or self.x.q.dtype, layouts)
        self.q = placed(draw, self.x.q)
        self.run = self.scales.given | self.results.given
        if self.sinks is not None:
            self.run["sinks"] = self.sinks

    def dtypes(self, draw):
        """q_data_type, kv_data_type and o_data_type, as dtypes or names."""
        kv = draw.pick(None, self.x.k.dtype) if self.x.k.dtype == self.x.q.dtype else self.x.k.dtype
        given = dict(q_data_type=self.x.q.dtype, kv_data_type=kv, o_data_type=self.o_dtype)
        if draw.chance(0.3):
            given = {name: dtype and str(dtype).removeprefix("torch.") for name, dtype in given.items()}
        return given

    def check(self, masks=()):
        def check(result):
            extras = Extras(masks=list(masks), sinks=self.sinks)
            cases.check(self.results.plain(result), self.scales.truth(self.x), self.options, extras, self.x.q.dtype)

        return check


def older(draw, a, wrapper, causal=True):
    """run(), or forward_return_lse() in its place, with the options that it takes over from the plan: (function, what
    it is given, options for the plan)."""
    known = a.options.as_kwargs()
    if not causal:
        known.pop("causal")
    if a.sinks is not None or a.results.given != dict(return_lse=True) or not draw.chance(0.2):
        return wrapper.run, a.run, known
    scales = [name for name in ("q_scale", "k_scale", "v_scale") if name in a.scales.given]
    accepts = inspect.signature(wrapper.forward_return_lse).parameters
    if not all(name in accepts for name in scales):
        return wrapper.run, a.run, known
    others = options_of(draw, a.dim).as_kwargs() | dict(causal=False)
    others = {name: value for name, value in others.items() if name in known}
    return wrapper.forward_return_lse, a.scales.given | known, others


def paged(draw, made=None, grow=0):
    a = Asked(draw, grow=grow)
    mask, masks = masks_of(draw, a.qo, a.kv)
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    wrapper, layout = made or (paged_wrapper(draw, layout), layout)
    pages = generate.paged(a.x, page, layout)
    function, run, known = older(draw, a, wrapper)
    indptr, indices = offsets_within(draw, pages.indptr, pages.indices)
    given = dict(custom_mask=mask)
    if mask is not None and draw.chance():
        given = dict(packed_custom_mask=generate.pack_mask(mask, a.qo, a.kv)[0])
    given |= dict(
        qo_indptr=table(draw, a.x.qo_indptr), paged_kv_indptr=table(draw, indptr),
        paged_kv_indices=table(draw, indices), paged_kv_last_page_len=table(draw, pages.last_page_len),
        num_qo_heads=a.heads, num_kv_heads=a.kv_heads, head_dim_qk=a.dim, page_size=page,
    )  # fmt: skip
    if draw.chance(0.3):
        given["max_token_per_sequence"] = max(a.qo, default=0) + draw.pick(0, 1, 100)
    cache = cache_of(draw, pages)

    def attend(**arguments):
        wrapper.plan(**{name: value for name, value in arguments.items() if name in planned})
        return function(a.q, cache, **run)

    planned = given | known | a.dtypes(draw) | splits_of(draw)
    also = names_of(flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    return Call(attend, planned | dict(q=a.q, cache=cache, called=function.__name__) | run, a.check(masks), also)


def ragged(draw, made=None, grow=0):
    a = Asked(draw, grow=grow)
    mask, masks = masks_of(draw, a.qo, a.kv)
    layout = draw.pick("NHD", "HND")
    wrapper, layout = made or (ragged_wrapper(draw, layout), layout)
    a.run.pop("sinks", None)
    a.sinks = None
    function, run, known = older(draw, a, wrapper)
    k, v = (t.transpose(0, 1).contiguous() if layout == "HND" else t for t in (a.x.k, a.x.v))
    k, v = placed(draw, k), placed(draw, v)
    if run is a.run and draw.chance(0.2):
        scale = draw.pick(0.5, 4.0)
        run = run | dict(o_scale=scale)
        a.scales.factors["v_scale"] = a.scales.factors.get("v_scale", torch.ones(1)) / scale
    given = dict(custom_mask=mask)
    if mask is not None and draw.chance():
        given = dict(packed_custom_mask=generate.pack_mask(mask, a.qo, a.kv)[0])
    given |= dict(
        qo_indptr=table(draw, a.x.qo_indptr), kv_indptr=table(draw, a.x.kv_indptr), num_qo_heads=a.heads,
        num_kv_heads=a.kv_heads, head_dim_qk=a.dim,
    )  # fmt: skip

    def attend(**arguments):
        wrapper.plan(**{name: value for name, value in arguments.items() if name in planned})
        return function(a.q, k, v, **run)

    planned = given | known | a.dtypes(draw) | splits_of(draw)
    also = names_of(flashinfer.BatchPrefillWithRaggedKVCacheWrapper)
    return Call(attend, planned | dict(q=a.q, k=k, v=v, called=function.__name__) | run, a.check(masks), also)


def decode(draw, made=None, grow=0):
    a = Asked(draw, decode=True, layouts=("NH",), grow=grow)
    layout, page = draw.pick("NHD", "HND"), draw.pick(*PAGE_SIZES)
    layout = made[1] if made else layout
    each = draw.pick(1, 1, 2, 3)
    if each > 1 and len(a.qo) and a.rows == len(a.qo):
        q = a.x.q.repeat_interleave(each, 0)
        q = q * torch.linspace(0.5, 1, len(q), device=draw.device, dtype=q.dtype)[:, None, None]
        a.qo = [each] * len(a.qo)
        a.x = generate.Ragged(q, a.x.k, a.x.v, generate.indptr(a.qo, draw.device), a.x.kv_indptr)
        a.rows, a.q = len(q), placed(draw, q)
        a.results = Results(draw, a.rows, a.heads, a.dim, a.o_dtype or q.dtype, ("NH",))
        a.run = a.scales.given | a.results.given | (dict(sinks=a.sinks) if a.sinks is not None else {})
    else:
        each = 1
    a.options.causal = each > 1
    pages = generate.paged(a.x, page, layout)
    most = max(len(a.qo), 1) + draw.pick(0, 2)
    graph = draw.chance(0.3) and made is None
    buffers = [torch.full((n,), 1 << 20, dtype=torch.int32, device=draw.device)
               for n in (most + 1, len(pages.indices) + 7, most)]
    if graph:
        most = len(a.qo)
        buffers[0], buffers[2] = buffers[0][: most + 1], buffers[2][:most]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(draw), layout, True, draw.chance(), *buffers, backend=draw.backend
        )
    else:
        wrapper = made[0] if made else decode_wrapper(draw, layout)
    function, run, known = older(draw, a, wrapper, causal=False)
    if function is wrapper.run and draw.chance(0.2):
        run = run | dict(q_len_per_req=each)
    indptr, indices = offsets_within(draw, pages.indptr, pages.indices)
    if graph:
        indptr, indices = pages.indptr, pages.indices
    given = dict(
        indptr=table(draw, indptr), indices=table(draw, indices), last_page_len=table(draw, pages.last_page_len),
        num_qo_heads=a.heads, num_kv_heads=a.kv_heads, head_dim=a.dim, page_size=page, q_len_per_req=each,
    )  # fmt: skip
    cache = cache_of(draw, pages)
    twice = draw.chance(0.3)

    def attend(**arguments):
        for _ in range(1 + twice):
            wrapper.plan(**{name: value for name, value in arguments.items() if name in planned})
        return function(a.q, cache, **run)

    planned = given | known | a.dtypes(draw) | splits_of(draw)
    also = names_of(flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    shown = dict(q=a.q, cache=cache, called=function.__name__, graph=graph, twice=twice)
    return Call(attend, planned | shown | run, a.check(), also)


def paged_wrapper(draw, layout):
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(draw), layout, backend=draw.backend)


def ragged_wrapper(draw, layout):
    return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(draw), layout, backend=draw.backend)


def decode_wrapper(draw, layout):
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(draw), layout, backend=draw.backend)


def several(draw):
    """One wrapper for several batches, alike but for lengths, pages and values, or with nothing in common."""
    family, make = draw.pick((paged, paged_wrapper), (ragged, ragged_wrapper), (decode, decode_wrapper))
    layout = draw.pick("NHD", "HND")
    made, seed = (make(draw, layout), layout), draw.integer(0, 1 << 30)
    calls = []
    for i in range(draw.pick(2, 4, 6)):
        alike = draw.chance(0.7)
        shape = {name: getattr(draw, name) for name in ("device", "largest", "halves", "backend")}
        step = Draw(seed if alike else seed + 1 + i, **shape)
        torch.manual_seed(seed + i)
        calls.append(family(step, made, i if alike else 0))

    def attend(**arguments):
        for i, call in enumerate(calls):
            try:
                call.check(call.function(**call.arguments))
            except (AssertionError, ValueError) as error:
                raise type(error)(f"call {i}, {described(call.arguments)}: {error}") from error

    shown = {f"{name}{i}": value for i, call in enumerate(calls) for name, value in call.arguments.items()}
    return Call(attend, shown, lambda result: None, names_of(type(made[0])))


FAMILIES = (paged, ragged, decode, several)
