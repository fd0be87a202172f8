"""run() of the wrappers in a compiled program: one graph, and the plan of the moment."""

from functools import partial

import pytest
import torch

import flashinfer
from flashinfer._core.packed import joined
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.ops.attention import single
from flashinfer.ops.attention.traced import attention_run
from flashinfer.testing.compare import assert_bitwise
from tests.ops.attention.cases import workspace
from tests.ops.attention.mla.latents import latents
from tests.ops.attention.samples_variants import same_document

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8


def planned(device, kv_lens, wrapper=None):
    """A decode wrapper planned for such lengths on a cache of 32 pages."""
    wrapper = wrapper or flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    pages = torch.tensor([-(-n // PAGE) for n in kv_lens])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), pages.cumsum(0)]).int()
    last = torch.tensor([(n - 1) % PAGE + 1 for n in kv_lens], dtype=torch.int32)
    indices = torch.randperm(32)[: int(indptr[-1])].int()
    wrapper.plan(indptr, indices.to(device), last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
    return wrapper


def inputs(device, batch=3):
    q = torch.randn(batch, HEADS, DIM, dtype=torch.float16, device=device)
    return q, torch.randn(32, 2, PAGE, KV_HEADS, DIM, dtype=torch.float16, device=device)


def compiled(function):
    # torch.compile comes first: from it on factories are torch's own, which its compiler knows by identity.
    made = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    return made


def test_a_compiled_call_follows_each_plan(device):
    q, cache = inputs(device)
    wrapper = planned(device, [5, 17, 40])
    step = compiled(lambda q, cache: wrapper.run(q * 2, cache) + 1)
    first = step(q, cache)
    assert_bitwise(first, wrapper.run(q * 2, cache) + 1)
    planned(device, [33, 1, 9], wrapper)
    second = step(q, cache)
    assert_bitwise(second, wrapper.run(q * 2, cache) + 1)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged", "latent"])
def test_a_program_that_plans_is_broken_at_the_plan(kind, device):
    """Without fullgraph: what plan() does is not traced, and its refusals are the caller's errors."""
    rows, indptr = torch.randn(3, HEADS, DIM, dtype=torch.float16, device=device), torch.arange(4, dtype=torch.int32)
    q, cache = inputs(device)
    last, sizes = torch.full((3,), PAGE, dtype=torch.int32), (HEADS, KV_HEADS, DIM)
    x = latents([1, 3], [17, 5], HEADS, device=device)
    space = workspace(device)

    def step(page_size=PAGE):
        if kind == "decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space)
            wrapper.plan(indptr, indptr[:3], last, *sizes, page_size, q_data_type=torch.float16)
            return wrapper.run(q * 2, cache)
        if kind == "paged":
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space)
            wrapper.plan(indptr, indptr, indptr[:3], last, *sizes, page_size, causal=True, q_data_type=torch.float16)
            return wrapper.run(q * 2, cache)
        if kind == "ragged":
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space)
            wrapper.plan(indptr, indptr, *sizes, q_data_type=torch.float16)
            return wrapper.run(q * 2, rows[:, :KV_HEADS], rows[:, :KV_HEADS])
        wrapper = BatchMLAPagedAttentionWrapper(space)
        wrapper.plan(*x.tables, HEADS, 64, 16, page_size, True, 0.1, torch.float16, torch.float16)
        return wrapper.run(*x.parts())

    made = torch.compile(step, backend="eager")
    torch._dynamo.reset()
    assert_bitwise(made(), step())
    if kind != "ragged":
        with pytest.raises(ValueError, match="^page_size: got 0"):
            made(0)


def test_outputs_and_scales(device):
    q, cache = inputs(device)
    wrapper = planned(device, [5, 17, 40])
    scale = torch.full((KV_HEADS,), 0.5, device=device)

    def both(q, cache, out, lse):
        return wrapper.run(q, cache, out=out, lse=lse, return_lse=True, k_scale=scale, v_scale=2.0)

    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    wanted = both(q, (cache[:, 0], cache[:, 1]), torch.empty_like(out), torch.empty_like(lse))
    found = compiled(both)(q, (cache[:, 0], cache[:, 1]), out, lse)
    for a, b, given in zip(found, wanted, (out, lse), strict=True):
        assert_bitwise(a, b)
        assert_bitwise(given, b)


def test_ragged_prefill(device):
    indptr = torch.tensor([0, 3, 10], dtype=torch.int32)
    q = torch.randn(10, HEADS, DIM, dtype=torch.float16, device=device)
    k, v = (torch.randn(10, KV_HEADS, DIM, dtype=torch.float16, device=device) for _ in range(2))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr, indptr, HEADS, KV_HEADS, DIM, causal=True, q_data_type=torch.float16)
    out, lse = compiled(lambda q, k, v: wrapper.run(q, k, v, return_lse=True))(q, k, v)
    for found, wanted in zip((out, lse), wrapper.run(q, k, v, return_lse=True), strict=True):
        assert_bitwise(found, wanted)


def test_parameters_of_a_variant(device):
    given = {"documents": torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 2], dtype=torch.int32, device=device), "longest": 10}
    variant = flashinfer.AttentionVariant(mask=same_document, params={"documents": "*i32", "longest": "i32"})
    indptr = torch.tensor([0, 10], dtype=torch.int32)
    q = torch.randn(10, HEADS, DIM, dtype=torch.float16, device=device)
    k, v = (torch.randn(10, KV_HEADS, DIM, dtype=torch.float16, device=device) for _ in range(2))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), variant=variant)
    wrapper.plan(indptr, indptr, HEADS, KV_HEADS, DIM, q_data_type=torch.float16)
    found = compiled(lambda q, k, v: wrapper.run(q, k, v, params=given))(q, k, v)
    assert_bitwise(found, wrapper.run(q, k, v, params=given))
    one = torch.zeros(10, dtype=torch.int32, device=device)
    assert not torch.equal(found, wrapper.run(q, k, v, params=given | {"documents": one}))


def test_the_op_is_what_it_says(device):
    q, cache = inputs(device)
    wrapper = planned(device, [5, 17, 40])
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    given = [q, cache], [2.0], [], "q kv v_scale", ""
    torch.library.opcheck(attention_run.op, (wrapper._number, "_run", out, lse, *given))


@pytest.mark.parametrize("cls", (flashinfer.BatchDecodeWithPagedKVCacheWrapper,
                                 flashinfer.BatchPrefillWithPagedKVCacheWrapper))  # fmt: skip
def test_options_of_the_older_forward(cls, device):
    """They replace those of the plan in the op, as they do outside of a trace."""
    q, cache = inputs(device)
    wrapper, other = (cls(workspace(device)) for _ in range(2))
    tables = [torch.arange(4, dtype=torch.int32) * n for n in (1, 2)]
    indices, last = torch.randperm(6, dtype=torch.int32), torch.tensor([3, 8, 1], dtype=torch.int32)
    decode = cls is flashinfer.BatchDecodeWithPagedKVCacheWrapper
    for w in (wrapper, other):
        w.plan(*tables[decode:], indices, last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
    changes = dict(sm_scale=0.3, logits_soft_cap=2.0, window_left=4) | ({} if decode else dict(causal=True))
    step = compiled(lambda q, cache: wrapper.forward(q * 2, cache, k_scale=0.5, **changes))
    for _ in range(2):
        found = step(q, cache)
        assert_bitwise(found, other.forward(q * 2, cache, k_scale=0.5, **changes))
    plain = dict(sm_scale=0.1) | ({} if decode else dict(causal=False))
    assert not torch.equal(found, other.forward(q * 2, cache, **plain))
    both = compiled(lambda q, cache: wrapper.forward_return_lse(q * 2, cache, **plain))
    for a, b in zip(both(q, cache), other.forward_return_lse(q * 2, cache, **plain), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("given_as", ("parts", "joined", "scales", "given"))
def test_latent_attention(given_as, device):
    first, second = latents([1, 2], [9, 20], 4, device=device), latents([1, 2], [30, 4], 4, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))

    def run(x, out, lse):
        q_nope, q_pe, ckv, kpe = x
        if given_as == "joined":
            return wrapper.run(query=(q_nope, q_pe), kv_cache=(ckv, kpe), return_lse=True, return_lse_base_on_e=True)
        if given_as == "scales":
            return wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True, bmm1_scale=scale, bmm2_scale=2.0)
        if given_as == "given":
            return wrapper.run(q_nope, q_pe, ckv, kpe, out, lse, True)
        return wrapper.run(q_nope, q_pe, ckv, kpe), lse

    scale = torch.full((1,), 0.25, device=device)
    step = compiled(run)
    for x in (first, second):
        wrapper.plan(*x.tables, 4, 64, 16, 8, False, 0.1, x.q.dtype, x.cache.dtype)
        made = [[torch.zeros(3, 4, 64, device=device).half(), torch.zeros(3, 4, device=device)] for _ in range(2)]
        found, wanted = step(x.parts(), *made[0]), run(x.parts(), *made[1])
        for a, b in zip(found, wanted, strict=True):
            assert_bitwise(a, b)
        if given_as == "given":
            assert_bitwise(made[0][0], wanted[0])


def test_functions_without_a_plan_are_called_between_two_graphs(device):
    """What they do is not traced: their planning would take the compiler half a minute, and nothing of it is an op."""
    q = torch.randn(2, HEADS, DIM, dtype=torch.float16, device=device)
    cache = torch.randn(8, 2, KV_HEADS, PAGE, DIM, dtype=torch.float16, device=device)
    table = torch.randperm(8, dtype=torch.int32, device=device).view(2, 4)
    graphs = []

    def step(q, lens):
        out = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            q * 2, cache, workspace(device), table, lens, 32, bmm1_scale=0.125, bmm2_scale=1.0
        )
        return out + 1

    def look(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    torch._dynamo.reset()
    traced = torch.compile(step, backend=look)
    for lens in ([5, 17], [32, 1]):
        lens = torch.tensor(lens, dtype=torch.int32, device=device)
        assert_bitwise(traced(q, lens), step(q, lens))
    assert len(graphs) == 2 and all(len(ops) <= 2 for ops in graphs)


@pytest.mark.parametrize("call", ["plain", "options", "variant", "factors", "empty"])
def test_single_requests_are_one_op(call, device):
    """In one graph, with what each argument means; the op keeps nothing that it allocates."""
    rows = 0 if call == "empty" else 5
    q = torch.randn(rows, HEADS, DIM, dtype=torch.float16, device=device)
    k, v = (torch.randn(9, KV_HEADS, DIM, dtype=torch.float16, device=device) for _ in range(2))
    more = {}
    if call == "options":
        more = dict(causal=True, return_lse=True, logits_soft_cap=8.0, window_left=3, sm_scale=0.3)
        more |= dict(o_dtype=torch.float32)
    if call == "variant":
        documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.int32, device=device)
        kinds = {"documents": "*i32", "longest": "i32"}
        more = dict(variant=flashinfer.AttentionVariant(mask=same_document, params=kinds))
        more |= dict(params={"documents": documents, "longest": 9})
    if call == "factors":
        k, v = (torch.randint(256, (9, KV_HEADS, DIM // 2), device=device).to(torch.uint8) for _ in range(2))
        factors = (torch.rand(9, KV_HEADS, DIM // 16, device=device) + 0.5).to(torch.float8_e4m3fn)
        more = dict(kv_cache_sf=(factors, factors.clone()), k_scale=0.5)

    def prefill(q, k, v):
        return flashinfer.single_prefill_with_kv_cache(q + 0, k, v, **more)

    def decode(q, k, v):
        return flashinfer.single_decode_with_kv_cache(q[0] + 0, k, v, return_lse=True)

    for function in (prefill,) if call != "plain" else (prefill, decode):
        kept = single._kept_indptr.cache_info().currsize
        found = compiled(function)(q, k, v)
        assert single._kept_indptr.cache_info().currsize == kept
        wanted = function(q, k, v)
        for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, wanted)), strict=True):
            assert_bitwise(a, b)


def test_arguments_of_an_op_are_one_line(device):
    """The compiler writes nodes of its graph into comments of the code that it makes."""
    q = torch.randn(5, HEADS, DIM, dtype=torch.float16, device=device)
    k, v = (torch.randn(9, KV_HEADS, DIM, dtype=torch.float16, device=device) for _ in range(2))
    variant = flashinfer.AttentionVariant(mask=same_document, params={"documents": "*i32", "longest": "i32"})
    params = {"documents": torch.zeros(9, dtype=torch.int32, device=device), "longest": 9}
    q_rows, cache = inputs(device)
    wrapper = planned(device, [5, 17, 40])
    lines = []

    def step(q, k, v, q_rows, cache):
        out = flashinfer.single_prefill_with_kv_cache(q, k, v, variant=variant, params=params, causal=False)
        return out, wrapper.run(q_rows, cache, v_scale=2.0)

    def look(module, inputs):
        lines.extend(node.format_node() for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compile(step, fullgraph=True, backend=look)(q, k, v, q_rows, cache)
    ops = [line for line in lines if "flashinfer.attention" in line]
    assert len(ops) == 2 and not any("\n" in line for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
def test_single_requests_in_graphs_of_the_compiler(rows, device):
    """mode="reduce-overhead": all live allocations of a graph's pool are results."""
    k, v = (torch.randn(300, KV_HEADS, DIM, dtype=torch.float16, device=device) for _ in range(2))

    @partial(torch.compile, mode="reduce-overhead", fullgraph=True)
    def step(q, k, v):
        if rows == 1:
            return flashinfer.single_decode_with_kv_cache(q[0] * 2, k, v) + 1
        return flashinfer.single_prefill_with_kv_cache(q * 2, k, v, causal=True) + 1

    for _ in range(5):
        q = torch.randn(rows, HEADS, DIM, dtype=torch.float16, device=device)
        wanted = flashinfer.single_prefill_with_kv_cache(q * 2, k, v, causal=True) + 1
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(step(q, k, v).view_as(wanted), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name, text", [("kv_layout", "NHD"), ("backend", "auto"), ("pos_encoding_mode", "NONE")])
def test_a_text_that_would_be_read_as_several_is_refused(name, text, device):
    q, k = torch.zeros(4, 2, 64, device=device), torch.zeros(8, 2, 64, device=device)
    for more in (";other.causal=bool:1", "\n"):
        given = {name: text + more}
        step = torch.compile(partial(flashinfer.single_prefill_with_kv_cache, **given), backend="eager")
        with pytest.raises(ValueError, match=f"^{name}: got .*{text}"):
            step(q, k, k)


def test_texts_of_a_record_differ():
    texts = [("dtype", "bf16"), ("layout", "")]
    assert joined(texts) == "bf16;"
    for text in ("a;b", "a\nb", "a\x85b"):
        with pytest.raises(ValueError, match="layout"):
            joined([*texts, ("layout", text)])
