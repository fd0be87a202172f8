"""User variants: the functions of samples_variants.py in the kernels and on the CPU, against float64 formulas."""

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Callable

import pytest
import torch

import flashinfer
from flashinfer import AttentionVariant
from flashinfer._core.checks import UnsupportedConfig
from flashinfer.ops.attention.decode import decode
from flashinfer.ops.attention.evaluate import evaluate
from flashinfer.ops.attention.prefill import prefill
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests import forked
from tests.core.conftest import forget_interpreter
from tests.ops.attention import compiling_variants as compiling
from tests.ops.attention import samples_arithmetic as arithmetic
from tests.ops.attention import samples_variants as samples
from tests.ops.attention.cases import backends, workspace
from tests.ops.attention.oracle import weigh
from tests.ops.attention.samples_variants import VARIANTS

LONGEST = 1024


@dataclass
class Case:
    """A variant, what its functions are given, and the same in torch on [q_len, kv_len] of one request and head."""

    variant: AttentionVariant
    logits: Callable = lambda s, batch, q, k, head, p: s
    mask: Callable = lambda s, batch, q, k, head, p: torch.ones_like(s, dtype=torch.bool)
    params: dict = field(default_factory=dict)
    plan: dict = field(default_factory=dict)

    def given(self, device):
        return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in self.params.items()}


DOCUMENTS = (torch.arange(8)[:, None] + torch.arange(LONGEST)[None] // 7).int().flatten()
CASES = {
    "soft cap": Case(
        VARIANTS["soft cap"],
        lambda s, batch, q, k, head, p: p["cap"] * torch.tanh(s / p["cap"]), params={"cap": 1.5}, plan={"causal": True},
    ),
    "alibi": Case(
        VARIANTS["alibi"],
        lambda s, batch, q, k, head, p: s + p["slopes"][head].to(s.dtype) * (k - q),
        params={"slopes": torch.tensor([0.5, 0.25, 0.0625, 0.125])}, plan={"logits_soft_cap": 3.0},
    ),
    "documents": Case(
        VARIANTS["documents"],
        mask=lambda s, batch, q, k, head, p: p["documents"].view(-1, LONGEST)[batch][q]
        == p["documents"].view(-1, LONGEST)[batch][k],
        params={"documents": DOCUMENTS, "longest": LONGEST}, plan={"causal": True},
    ),
    "both, under a window": Case(
        VARIANTS["both"],
        lambda s, batch, q, k, head, p: (s / math.log(10)).masked_fill((head % 2 == 1) & (k % 2 == 1), -math.inf),
        lambda s, batch, q, k, head, p: torch.fmod(k - q, 3) == -(batch % 2),
        plan={"causal": True, "window_left": 11},
    ),
    "sigmoid": Case(
        VARIANTS["sigmoid"],
        lambda s, batch, q, k, head, p: torch.sigmoid(s + p["bias"]), params={"bias": -1.0}, plan={"causal": True},
    ),
    "a mask in the place of causal": Case(
        VARIANTS["own mask"],
        mask=lambda s, batch, q, k, head, p: torch.fmod(k - q, 3) == -(batch % 2), plan={"causal": True},
    ),
}  # fmt: skip


def formula(x, case, dtype):
    """out and base-2 lse of every request, by definition, on the CPU; products take `dtype`, the rest is wider."""
    wide = torch.promote_types(dtype, torch.float32)
    outs, lses = [], []
    variant, plan = case.variant, case.plan
    params = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in case.params.items()}
    for batch in range(len(x.qo_indptr) - 1):
        q, k, v = (t.cpu().to(dtype).to(wide) for t in x.request(batch))
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_full(q.shape[:2], -math.inf)
        q_pos, k_pos = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0], torch.arange(k.shape[0])[None]
        for head in range(q.shape[1] if k.shape[0] else 0):
            kv_head = head * k.shape[1] // q.shape[1]
            s = q[:, head] @ k[:, kv_head].T / math.sqrt(q.shape[2])
            if "logits_soft_cap" in plan:
                s = plan["logits_soft_cap"] * torch.tanh(s / plan["logits_soft_cap"])
            given = batch, q_pos.expand_as(s), k_pos.expand_as(s), head, params
            seen = case.mask(s, *given)
            if plan.get("causal") and not variant.owns_mask:
                seen = seen & (k_pos <= q_pos)
            if "window_left" in plan:
                seen = seen & (k_pos >= q_pos - plan["window_left"])
            s = case.logits(s, *given)
            if not variant.use_softmax:
                out[:, head] = s.masked_fill(~seen, 0).to(dtype).to(wide) @ v[:, kv_head]
                continue
            s = s.masked_fill(~seen, -math.inf)
            p, total = weigh(s, dtype)
            out[:, head] = p @ v[:, kv_head] / total
            lse[:, head] = torch.logsumexp(s, 1) / math.log(2)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def batch(device, qo=(3, 0, 17, 1), kv=(5, 7, 40, 0), dim=32, dtype=torch.float16):
    return generate.ragged_batch(list(qo), list(kv), 4, 2, dim, dtype=dtype, device=device)


def check(x, case, result):
    out, lse = result if isinstance(result, tuple) else (result, None)
    truth, truth_lse = formula(x, case, torch.float64)
    same, _ = formula(x, case, x.q.dtype)
    assert_close(out.cpu(), same.to(out.dtype), truth, "out")
    if lse is not None:
        assert_close(lse.cpu(), formula(x, case, torch.float32)[1], truth_lse, "lse")


def planned_ragged(x, case, backend, **plan):
    heads = x.q.shape[1], x.k.shape[1], x.q.shape[2]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(x.q.device), backend=backend, variant=case.variant
    )
    wrapper.plan(x.qo_indptr, x.kv_indptr, *heads, q_data_type=x.q.dtype, **case.plan, **plan)
    return wrapper


def run_ragged(x, case, backend, **plan):
    wrapper = planned_ragged(x, case, backend, **plan)
    return wrapper.run(x.q, x.k, x.v, return_lse=case.variant.use_softmax, params=case.given(x.q.device))


@pytest.mark.parametrize("name", CASES)
def test_ragged(name, device):
    x = batch(device)
    for backend in backends(device):
        check(x, CASES[name], run_ragged(x, CASES[name], backend))


@pytest.mark.parametrize("name", CASES)
def test_paged_with_split_keys(name, device):
    x, case = batch(device, (5, 1, 0, 19), (48, 33, 7, 19)), CASES[name]
    pages = generate.paged(x, 5)
    for backend in backends(device):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(device), backend=backend, variant=case.variant
        )
        wrapper.plan(
            x.qo_indptr, pages.indptr, pages.indices, pages.last_page_len, 4, 2, 32, 5, q_data_type=x.q.dtype,
            fixed_split_size=32, **case.plan,
        )  # fmt: skip
        given = case.given(device)
        check(x, case, wrapper.run(x.q, pages.kv_cache, return_lse=case.variant.use_softmax, params=given))


@pytest.mark.parametrize("name", ("alibi", "documents", "sigmoid"))
def test_decode(name, device):
    x, case = batch(device, (1,) * 4, (40, 1, 0, 33)), CASES[name]
    pages = generate.paged(x, 8)
    plan = {n: v for n, v in case.plan.items() if n != "causal"}
    for backend in backends(device):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(device), backend=backend, jit_args=case.variant
        )
        wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, 4, 2, 32, 8, q_data_type=x.q.dtype, **plan)
        # upstream's arguments: tensors and scalars in the variant's order
        run = wrapper.run_return_lse if case.variant.use_softmax else wrapper.run
        check(x, case, run(x.q, pages.kv_cache, *case.given(device).values()))


@pytest.mark.parametrize("name", ("alibi", "sigmoid"))
def test_single(name, device):
    case = replace(CASES[name], plan={"causal": True})
    x = batch(device, (6,), (21,), dtype=torch.float32)
    given = case.given(device)
    for backend in backends(device):
        out = flashinfer.single_prefill_with_kv_cache(
            x.q, x.k, x.v, causal=True, backend=backend, variant=case.variant, params=given
        )
        check(x, case, out)
    module = flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module
    assert_bitwise(module(case.variant, x.q, x.k, x.v, *given.values(), mask_mode=1), jit_free(x, case, given, True))
    last = replace(x, q=x.q[-1:], qo_indptr=torch.tensor([0, 1], dtype=torch.int32))
    out = flashinfer.single_decode_with_kv_cache(last.q[0], x.k, x.v, variant=case.variant, params=given)
    check(last, replace(case, plan={}), out[None])
    module = flashinfer.decode.single_decode_with_kv_cache_with_jit_module
    assert_bitwise(module(case.variant, last.q[0], x.k, x.v, *given.values()), out)


def jit_free(x, case, given, causal):
    return flashinfer.single_prefill_with_kv_cache(x.q, x.k, x.v, causal=causal, variant=case.variant, params=given)


def test_a_window_of_the_jit_module(device):
    x, case = batch(device, (6,), (21,)), CASES["alibi"]
    given = case.given(device)
    module = flashinfer.prefill.single_prefill_with_kv_cache_with_jit_module
    case = replace(case, plan={"causal": True, "window_left": 5})
    result = module(case.variant, x.q, x.k, x.v, *given.values(), mask_mode=1, window_left=5, return_lse=True)
    check(x, case, result)
    with pytest.raises(UnsupportedConfig, match="jit_module"):
        module(object(), x.q, x.k, x.v)
    with pytest.raises(ValueError, match="mask_mode"):
        module(case.variant, x.q, x.k, x.v, *given.values(), mask_mode=2)


def test_a_parameter_changes_the_result_and_is_not_kept(device):
    """A held launch must not serve another number, another tensor, or one that was changed in place."""
    x, case = batch(device, (9,), (30,)), CASES["alibi"]
    for backend in backends(device):
        wrapper = planned_ragged(x, case, backend)
        outs = []
        slopes = torch.tensor([0.5, 0.25, 0.0625, 0.125], device=device)
        for factor in (1.0, 1.0, 2.0, 0.0):
            given = {"slopes": slopes * factor}
            outs.append(wrapper.run(x.q, x.k, x.v, params=given))
            check(x, replace(case, params=given), outs[-1])
        assert_bitwise(outs[0], outs[1])
        assert not torch.equal(outs[1], outs[2]) and not torch.equal(outs[2], outs[3])
        slopes.zero_()
        assert_bitwise(wrapper.run(x.q, x.k, x.v, params={"slopes": slopes}), outs[3])


def test_two_requests_of_one_batch_see_their_own_numbers(device):
    """`batch` is the request's number: alike requests differ under a mask that reads it."""
    x = batch(device, (4, 4), (20, 20))
    x = replace(x, q=x.q[:4].repeat(2, 1, 1), k=x.k[:20].repeat(2, 1, 1), v=x.v[:20].repeat(2, 1, 1))
    for backend in backends(device):
        out = run_ragged(x, CASES["a mask in the place of causal"], backend)[0]
        assert not torch.equal(out[:4], out[4:])


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("logits: got NoneType|logits: got None", {}),
        ("logits: got function", {"logits": lambda *six: six}),
        ("logits: got tanh of 1 parameters", {"logits": samples.tanh}),
        ("use_softmax", {"mask": samples.strided, "use_softmax": False}),
        ("owns_mask", {"logits": samples.alibi, "owns_mask": True}),
        ("params: got 'values'", {"logits": samples.alibi, "params": {"values": "fp32"}}),
        ("params: got 'a b'", {"logits": samples.alibi, "params": {"a b": "fp32"}}),
        (r"params\['slopes'\]: got 'float'", {"logits": samples.alibi, "params": {"slopes": "float"}}),
        (r"params\['slopes'\]: got '\*fp8'", {"logits": samples.alibi, "params": {"slopes": "*fp8"}}),
    ],
)
def test_what_is_no_variant(message, arguments):
    with pytest.raises(ValueError, match=message):
        AttentionVariant(**arguments)


SLOPES = torch.tensor([0.5, 0.25, 0.0625, 0.125])


@pytest.mark.parametrize(
    ("message", "params"),
    [
        ("nothing", None),
        ("nothing", {}),
        ("a value", {"slopes": SLOPES, "cap": 1.0}),
        ("0.5", {"slopes": 0.5}),
        ("torch.float64", {"slopes": SLOPES.double()}),
        ("contiguous", {"slopes": SLOPES[::2]}),
        ("meta", {"slopes": SLOPES.to("meta")}),
    ],
)
def test_parameters_that_do_not_fit(message, params, device):
    x, case = batch(device, (2,), (3,)), CASES["alibi"]
    if params and torch.is_tensor(slopes := params.get("slopes")) and not slopes.is_meta:
        # A copy to another device is contiguous; the strides are what one case is about.
        there = torch.empty(8, dtype=slopes.dtype, device=device)[:: 1 if slopes.is_contiguous() else 2]
        params = params | {"slopes": there[: len(slopes)].copy_(slopes)}
    wrapper = planned_ragged(x, case, "auto")
    with pytest.raises(ValueError, match=message):
        wrapper.run(x.q, x.k, x.v, params=params)


@pytest.mark.parametrize(("kind", "value"), [("i32", 0.5), ("i32", 1 << 31), ("fp32", True), ("fp32", torch.ones(1))])
def test_numbers_that_do_not_fit(kind, value):
    variant = AttentionVariant(samples.soft_cap, params={"cap": kind})
    with pytest.raises(ValueError, match=r"params\['cap'\]"):
        variant.values({"cap": value}, torch.device("cpu"))


def test_what_cannot_go_with_a_variant(device):
    x, given = batch(device, (2,), (3,)), CASES["sigmoid"].given(device)
    wrapper = planned_ragged(x, CASES["sigmoid"], "auto")
    with pytest.raises(ValueError, match="return_lse"):
        wrapper.run(x.q, x.k, x.v, return_lse=True, params=given)
    pages = generate.paged(x, 4)
    owned = AttentionVariant(mask=samples.strided, owns_mask=True)
    table = x.qo_indptr, pages.indptr, pages.indices, pages.last_page_len, 4, 2, 32, 4
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), variant=CASES["sigmoid"].variant)
    wrapper.plan(*table, q_data_type=x.q.dtype)
    with pytest.raises(ValueError, match="sinks"):
        wrapper.run(x.q, pages.kv_cache, sinks=torch.zeros(4, device=device), params=given)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), variant=owned)
    with pytest.raises(ValueError, match="window_left"):
        wrapper.plan(*table, q_data_type=x.q.dtype, window_left=3)
    with pytest.raises(ValueError, match="custom_mask"):
        wrapper.plan(*table, q_data_type=x.q.dtype, custom_mask=torch.ones(6, dtype=torch.bool, device=device))
    wrapper.plan(*table, q_data_type=x.q.dtype)
    with pytest.raises(ValueError, match="window_left"):
        wrapper.run(x.q, pages.kv_cache, window_left=3)
    plain = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    plain.plan(*table, q_data_type=x.q.dtype)
    with pytest.raises(ValueError, match="params"):
        plain.run(x.q, pages.kv_cache, params={"cap": 1.0})
    with pytest.raises(ValueError, match="docs/variants.md"):
        plain.run(x.q, pages.kv_cache, 1.0)


# -- upstream's class --------------------------------------------------------------------------------------------------


def upstream_list(tensors, scalars, declaration):
    half = torch.float16
    return ["name", half, half, half, torch.int32, 32, 32, tensors, ["int32_t"] * len(tensors), scalars,
            ["int64_t"] * len(scalars), "Name", declaration]  # fmt: skip


def test_jit_args(device):
    x, case = batch(device, (5, 9), (17, 30)), CASES["documents"]
    swapped = AttentionVariant(mask=samples.same_document, params={"longest": "i32", "documents": "*i32"})
    given = case.given(device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), jit_args=upstream_list(["documents"], ["longest"], swapped),
        jit_kwargs={"use_sliding_window": False, "pos_encoding_mode": 0},
    )  # fmt: skip
    wrapper.plan(x.qo_indptr, x.kv_indptr, 4, 2, 32, causal=True, q_data_type=x.q.dtype)
    check(x, case, wrapper.run(x.q, x.k, x.v, given["documents"], given["longest"], return_lse=True))
    check(x, case, wrapper.run(x.q, x.k, x.v, given["documents"], return_lse=True, params={"longest": LONGEST}))
    with pytest.raises(ValueError, match="3 arguments"):
        wrapper.run(x.q, x.k, x.v, *given.values(), 1)
    with pytest.raises(ValueError, match="second value"):
        wrapper.run(x.q, x.k, x.v, given["documents"], params=given)


def test_jit_args_that_are_refused(device):
    make, variant = flashinfer.BatchPrefillWithRaggedKVCacheWrapper, CASES["documents"].variant
    for jit_args in (upstream_list([], [], "struct Name : AttentionVariantBase {};"), ["name"], []):
        with pytest.raises(UnsupportedConfig, match="jit_args.*docs/variants.md"):
            make(workspace(device), jit_args=jit_args)
    with pytest.raises(ValueError, match="jit_args"):
        make(workspace(device), jit_args=upstream_list(["documents"], [], variant))
    with pytest.raises(ValueError, match="jit_args"):
        make(workspace(device), jit_args=[1, variant])
    with pytest.raises(ValueError, match="jit_args"):
        make(workspace(device), jit_args=variant, variant=variant)
    with pytest.raises(UnsupportedConfig, match="pos_encoding_mode"):
        make(workspace(device), jit_args=variant, jit_kwargs={"pos_encoding_mode": 2})
    with pytest.raises(ValueError, match="variant_owns_mask"):
        make(workspace(device), variant_owns_mask=True)


def test_variant_owns_mask_is_the_variants(device):
    x, case = batch(device, (5,), (17,)), CASES["a mask in the place of causal"]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), jit_args=[AttentionVariant(mask=samples.strided)], variant_owns_mask=True
    )
    wrapper.plan(x.qo_indptr, x.kv_indptr, 4, 2, 32, causal=True, q_data_type=x.q.dtype)
    check(x, case, wrapper.run(x.q, x.k, x.v, return_lse=True))


# -- what the CPU backend makes of functions ---------------------------------------------------------------------------


def line_of(function, text):
    """The line of the file of `function` on which `text` stands."""
    lines, first = inspect.getsourcelines(function.fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("variant", "text", "why"),
    [
        (VARIANTS["wrong"], "params.nowhere", "nowhere"),
        (AttentionVariant(samples.sorted_logits), "tl.sort", "sort is not evaluated on the CPU"),
        (AttentionVariant(samples.past_the_end, params={"slopes": "*fp32"}), "+ 100", "params.slopes: element 1"),
    ],
)
def test_the_reference_names_the_line(variant, text, why):
    x = batch("cpu", (2,), (3,))
    function = variant.logits
    with pytest.raises(UnsupportedConfig, match=why) as caught:
        run_ragged(x, Case(variant, params={"slopes": SLOPES} if variant.params else {}), "reference")
    assert f"samples_variants.py:{line_of(function, text)} ({function.fn.__name__})" in str(caught.value)


def test_a_mask_that_is_no_boolean(device):
    x, case = batch(device, (2,), (3,)), Case(VARIANTS["not boolean"])
    for backend in backends(device):
        with pytest.raises(Exception, match="boolean"):
            run_ragged(x, case, backend)


@pytest.mark.parametrize("function", arithmetic.ALL, ids=lambda f: f.fn.__name__)
def test_the_reference_computes_as_triton_does(function, device):
    n = 64
    x = torch.randn(n, device=device)
    i, j = torch.randint(-20, 20, (2, n), dtype=torch.int32, device=device)
    j = torch.where(j == 0, 3, j)
    expected = torch.empty(n, dtype=torch.float64, device=device)
    arithmetic.apply[(1,)](function, x, i, j, expected, n)
    torch.testing.assert_close(evaluate(function, x, i, j).double(), expected, rtol=2e-6, atol=2e-6)


# -- compile keys, and compiling ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_triton():
    """Calls a module-level function in a process where kernels are compiled."""
    with forked.process(forget_interpreter) as call:
        yield call


def test_key():
    one = AttentionVariant(samples.alibi, params={"slopes": "*fp32"})
    assert one == AttentionVariant(samples.alibi, params={"slopes": "*fp32"}) and hash(one) == hash(replace(one))
    others = (
        replace(one, params={"slopes": "*fp16"}), replace(one, params={"slopes": "*fp32", "cap": "fp32"}),
        replace(one, use_softmax=False), replace(one, mask=samples.strided),
        replace(one, mask=samples.strided, owns_mask=True), replace(one, logits=samples.soft_cap),
        replace(one, logits=samples.shifted_by(1)), replace(one, logits=samples.shifted_by(2)),
    )  # fmt: skip
    assert len({one, *others}) == 1 + len(others)
    assert replace(one, logits=samples.shifted_by(1)) == replace(one, logits=samples.shifted_by(1))


def test_a_name_that_is_an_attributes_too_is_not_read(monkeypatch):
    key = VARIANTS["soft cap"].key
    monkeypatch.setattr(samples, "cap", 30.0, raising=False)
    assert AttentionVariant(samples.soft_cap, params={"cap": "fp32"}).key == key
    monkeypatch.setattr(samples, "cap", torch.ones(1))
    x, case = batch("cpu", (2,), (5,)), replace(CASES["soft cap"], plan={})
    check(x, case, run_ragged(x, case, "reference"))


def test_functions_of_one_name_and_two_meanings():
    with pytest.raises(TypeError, match="two functions are both called"):
        hash(AttentionVariant(samples.shifted_by(1), samples.shifted_by(2)))


@pytest.mark.matrix
def test_processes_share_an_entry_and_functions_do_not(in_triton, tmp_path):
    """Each call compiles in a new process, which finds the functions by the problem alone."""
    alibi, cap = CASES["alibi"].variant, CASES["soft cap"].variant
    assert in_triton(compiling.key_of, "alibi") == alibi.key
    first, other = in_triton(compiling.compiled, ("alibi", "soft cap"), "decode", "portable", "90a", tmp_path, rows=16)
    again = in_triton(compiling.compiled, ("alibi",), "decode", "portable", "90a", tmp_path, rows=16)[0]
    assert [first["error"], other["error"], again["error"]] == ["", "", ""]
    assert [first["cached"], other["cached"], again["cached"]] == [False, False, True]
    assert first["path"] == again["path"] != other["path"]
    assert alibi.key != cap.key


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("op", "kernel", "changes"),
    [("prefill", "sm90", {"rows": 128, "mask": "causal"}), ("decode", "sm80", {"rows": 16})],
)
def test_compiles_for_hopper(op, kernel, changes, in_triton, tmp_path):
    """A mask with logits beside it, and weights that are no softmax; Hopper's own kernel has branches for each."""
    names = {"sm90": ("both", "sigmoid"), "sm80": ("both",)}[kernel]
    used = next(v for v in (prefill if op == "prefill" else decode).variants if v.name == kernel).load()
    for record in in_triton(compiling.compiled, names, op, kernel, "90a", tmp_path, **changes):
        assert record["error"] == ""
        assert record["shared"] <= 227 << 10
        assert record["stack_bytes"] <= used.stack_budget


def test_a_function_that_does_not_compile_names_its_line(in_triton):
    message = in_triton(compiling.compile_error, "wrong")
    assert f"samples_variants.py:{line_of(samples.wrong, 'params.nowhere')}: in wrong: " in message
    assert "return shifted * params.nowhere" in message and "nowhere" in message.splitlines()[-1]
    assert "the mask function of a variant must return booleans" in in_triton(compiling.compile_error, "not boolean")


# -- at the sizes that chips' own kernels take -------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_long_prefill_and_decode(name, dtype, device):
    case = CASES[name]
    for qo, kv in (((300, 0, 129, 5), (700, 3, 129, 1000)), ((1, 1, 1, 1), (1000, 1, 64, 333))):
        x = batch(device, qo, kv, dim=128, dtype=dtype)
        for backend in backends(device):
            check(x, case, run_ragged(x, case, backend))
            pages = generate.paged(x, 16)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace(device), backend=backend, variant=case.variant
            )
            wrapper.plan(
                x.qo_indptr, pages.indptr, pages.indices, pages.last_page_len, 4, 2, 128, 16, q_data_type=dtype,
                **case.plan,
            )  # fmt: skip
            given = case.given(device)
            check(x, case, wrapper.run(x.q, pages.kv_cache, return_lse=case.variant.use_softmax, params=given))


@pytest.mark.gpu
def test_a_captured_graph_reads_the_tensor_again(device):
    x, case = batch(device, (1,) * 3, (200, 17, 64), dim=128), CASES["alibi"]
    pages = generate.paged(x, 16)
    tables = pages.indptr.clone(), pages.indices.clone(), pages.last_page_len.clone()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", True, False, *tables, variant=case.variant
    )
    wrapper.plan(*tables, 4, 2, 128, 16, q_data_type=x.q.dtype, **case.plan)
    slopes = case.given(device)["slopes"].clone()
    out = wrapper.run(x.q, pages.kv_cache, params={"slopes": slopes})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(x.q, pages.kv_cache, out=out, params={"slopes": slopes})
    slopes.mul_(3)
    graph.replay()
    check(x, replace(case, params={"slopes": slopes.cpu()}), out)
