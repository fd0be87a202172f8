"""Solutions in place of functions: which calls they run, what they are given, and where their results go."""

import threading

import pytest
import torch

import flashinfer
from flashinfer import trace_apply
from flashinfer.trace.templates import TEMPLATES
from tests.core.test_fi_trace import ALL, arguments_of


@pytest.fixture(autouse=True)
def none_applied():
    yield
    trace_apply.disable_apply()


def rows(width=64):
    return torch.randn(3, width).half(), torch.randn(width).half()


def test_only_calls_of_the_definition(device):
    x, weight = (t.to(device) for t in rows())
    wide, wide_weight = (t.to(device) for t in rows(128))
    true, true_wide = flashinfer.rmsnorm(x, weight), flashinfer.rmsnorm(wide, wide_weight)
    original, seen = flashinfer.norm.rmsnorm, []

    def seven(hidden_states, weight):
        seen.append((hidden_states, weight))
        return torch.full_like(hidden_states, 7)

    assert trace_apply.enable_apply({"rmsnorm_h64": seven, "silu_and_mul_h64": lambda input: input[:, :32]}) == 2
    assert flashinfer.rmsnorm(x, weight).eq(7).all() and flashinfer.norm.rmsnorm(x[:1], weight=weight).eq(7).all()
    assert seen[0][0] is x and seen[0][1] is weight
    assert torch.equal(flashinfer.rmsnorm(wide, wide_weight), true_wide)
    assert torch.equal(flashinfer.silu_and_mul(x), x[:, :32])
    assert original(x, weight).ne(7).any(), "taken before"
    assert trace_apply.stats() == {
        "flashinfer.norm.rmsnorm": {"hit": 2, "fallback": 1, "error": 0},
        "flashinfer.activation.silu_and_mul": {"hit": 1, "fallback": 0, "error": 0},
    }
    # Others take their place; and none.
    assert trace_apply.enable_apply({"rmsnorm_h128": seven}) == 1
    assert torch.equal(flashinfer.rmsnorm(x, weight), true) and flashinfer.rmsnorm(wide, wide_weight).eq(7).all()
    assert trace_apply.enable_apply() == 0 and trace_apply.stats() == {}
    assert flashinfer.rmsnorm is flashinfer.norm.rmsnorm is original
    assert flashinfer.fi_trace(flashinfer.rmsnorm, input=x, weight=weight)["name"] == "rmsnorm_h64"


def test_arguments_that_the_definition_does_not_have(device):
    """They go to solutions that have a parameter for them; the function runs where a solution has none."""
    x, weight = (t.to(device) for t in rows())
    true = flashinfer.rmsnorm(x, weight, 0.5)
    given = []

    def with_eps(hidden_states, weight, eps=1e-6):
        given.append(eps)
        return hidden_states * 0

    trace_apply.enable_apply({"rmsnorm_h64": with_eps})
    assert not flashinfer.rmsnorm(x, weight).any()
    assert not flashinfer.rmsnorm(x, weight, eps=0.5, enable_pdl=True).any()
    assert given == [1e-6, 0.5]
    trace_apply.enable_apply({"rmsnorm_h64": lambda hidden_states, weight: hidden_states * 0})
    assert torch.equal(flashinfer.rmsnorm(x, weight, 0.5), true) and not flashinfer.rmsnorm(x, weight, 1e-6).any()
    trace_apply.enable_apply({"rmsnorm_h64": lambda **inputs: inputs["hidden_states"] * inputs["eps"]})
    assert torch.equal(flashinfer.rmsnorm(x, weight, 0.5), x * 0.5)


def test_results_go_where_the_function_writes_them(device):
    x, weight = (t.to(device) for t in rows())
    out = torch.full_like(x, torch.nan)
    trace_apply.enable_apply({
        "rmsnorm_h64": lambda hidden_states, weight: hidden_states + 1,
        "fused_add_rmsnorm_h64": lambda hidden_states, residual, weight: (residual * 2, hidden_states * 3),
        "merge_state_h4_d16": lambda v_a, s_a, v_b, s_b: (v_a - v_b, s_a - s_b),
    })  # fmt: skip
    assert flashinfer.rmsnorm(x, weight, out=out) is out and torch.equal(out, x + 1)
    a, b = x.clone(), (x + 2).clone()
    assert flashinfer.fused_add_rmsnorm(a, b, weight) is None
    assert torch.equal(a, (x + 2) * 2) and torch.equal(b, x * 3)
    v, s = torch.randn(3, 4, 16, device=device).half(), torch.randn(3, 4, device=device)
    merged = flashinfer.merge_state(v, s, v / 2, s / 2)
    assert isinstance(merged, tuple) and torch.equal(merged[0], v - v / 2) and torch.equal(merged[1], s - s / 2)


def test_a_solution_that_writes_by_itself(device):
    x, weight = (t.to(device) for t in rows())

    def in_place(hidden_states, residual, weight):
        hidden_states.zero_()
        residual.fill_(1)

    trace_apply.enable_apply({"fused_add_rmsnorm_h64": in_place})
    a, b = x.clone(), x.clone()
    assert flashinfer.fused_add_rmsnorm(a, b, weight) is None and not a.any() and b.eq(1).all()


def test_a_solution_may_call_the_function(device):
    x, weight = (t.to(device) for t in rows())
    true = flashinfer.rmsnorm(x, weight)
    trace_apply.enable_apply({"rmsnorm_h64": lambda hidden_states, weight: -flashinfer.rmsnorm(hidden_states, weight)})
    assert torch.equal(flashinfer.rmsnorm(x, weight), -true)
    found = []
    thread = threading.Thread(target=lambda: found.append(flashinfer.rmsnorm(x, weight)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], -true)
    assert trace_apply.stats()["flashinfer.norm.rmsnorm"] == {"hit": 2, "fallback": 0, "error": 0}


def test_errors(device):
    x, weight = (t.to(device) for t in rows())

    def broken(hidden_states, weight):
        raise KeyError("mine")

    trace_apply.enable_apply({"rmsnorm_h64": broken, "merge_state_h4_d16": lambda **inputs: inputs["v_a"]})
    with pytest.raises(KeyError, match="mine"):
        flashinfer.rmsnorm(x, weight)
    v, s = torch.randn(3, 4, 16, device=device).half(), torch.randn(3, 4, device=device)
    with pytest.raises(ValueError, match="results of the solution for flashinfer.cascade.merge_state: got 1 of them"):
        flashinfer.merge_state(v, s, v, s)
    trace_apply.enable_apply({"rmsnorm_h64": lambda hidden_states, weight: hidden_states[:1]})
    with pytest.raises(ValueError, match=r"output of the solution for flashinfer.norm.rmsnorm: got \(1, 64\)"):
        flashinfer.rmsnorm(x, weight, out=torch.empty_like(x))
    trace_apply.enable_apply({"rmsnorm_h64": lambda hidden_states, weight: None})
    with pytest.raises(ValueError, match="output of the solution for flashinfer.norm.rmsnorm: got NoneType"):
        flashinfer.rmsnorm(x, weight)
    assert trace_apply.stats()["flashinfer.norm.rmsnorm"] == {"hit": 0, "fallback": 0, "error": 1}
    # A wrong call is the function's to refuse.
    with pytest.raises(TypeError):
        flashinfer.rmsnorm(x)
    trace_apply.enable_apply({"rmsnorm_h128": broken})
    with pytest.raises(ValueError, match="weight"):
        flashinfer.rmsnorm(x, weight[:5])


def test_names_that_no_definition_has():
    for name in ("rmsnorm", "rmsnorm_h", "rmsnorm_h64_d3", "gqa_paged_decode_h32_kv8_d128_ps16", "Rmsnorm_h64"):
        with pytest.raises(ValueError, match=f"^solutions: got {name!r}; allowed: the name of a definition: "):
            trace_apply.enable_apply({name: print})
    with pytest.raises(ValueError, match=r"^solutions\['rmsnorm_h64'\]: got str; allowed: a callable"):
        trace_apply.enable_apply({"rmsnorm_h64": "mine"})
    assert trace_apply.stats() == {}


@pytest.mark.parametrize(("module", "name"), ALL, ids=[name for _, name in ALL])
def test_every_template_by_the_name_of_its_definition(module, name):
    """The call of a definition reaches its solution, by the inputs that the definition lists."""
    arguments, _ = arguments_of(name)
    function = getattr(flashinfer.__getattr__(module.split(".")[1]), name)
    definition = flashinfer.fi_trace(function, **arguments)

    class Reached(Exception):
        """Raised by the solution, with what it was given."""

    def solution(**inputs):
        raise Reached(sorted(inputs))

    assert trace_apply.enable_apply({definition["name"]: solution}) == 1
    with pytest.raises(Reached) as reached:
        getattr(flashinfer.__getattr__(module.split(".")[1]), name)(**arguments)
    needed = {key for key, part in definition["inputs"].items() if not part.get("optional")}
    assert needed <= set(reached.value.args[0]) and name in TEMPLATES[module]
