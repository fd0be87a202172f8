"""Custom ops: opaque and correct under torch.compile, absent from eager calls."""

from typing import NamedTuple

import pytest
import torch

from flashinfer._core.custom_op import custom_op

calls = []


@custom_op("flashinfer_test::add_scaled", mutates_args=("out",))
def add_scaled(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None, scale: float = 2.0) -> None:
    """out += scale * x + y"""
    calls.append(torch.compiler.is_compiling())
    out.add_(x, alpha=scale)
    if y is not None:
        out.add_(y)


def halves_fake(x: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0] // parts), x.new_empty(x.shape, dtype=torch.int32)


@custom_op("flashinfer_test::halves", fake=halves_fake)
def halves(x: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[: x.shape[0] // parts].clone(), x.to(torch.int32)


def operands(n=6):
    return torch.randn(n), torch.randn(n), torch.randn(n)


@pytest.mark.parametrize("with_y", [True, False])
def test_operator_is_what_torch_demands(with_y):
    out, x, y = operands()
    torch.library.opcheck(add_scaled.op, (out, x, y if with_y else None), {"scale": 0.5})
    torch.library.opcheck(halves.op, (x, 2))


def test_eager_call_runs_the_function(monkeypatch):
    monkeypatch.setattr(add_scaled, "op", None)
    out, x, y = operands()
    expected = out + 3.0 * x + y
    calls.clear()
    assert add_scaled(out, x, y, scale=3.0) is None
    torch.testing.assert_close(out, expected)
    assert calls == [False]
    assert add_scaled.__doc__ == "out += scale * x + y" and add_scaled.__name__ == "add_scaled"


def traced(function, *args):
    """(result, targets of the graph's calls) of a function that dynamo traced whole."""
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)(*args), targets


def test_traced_call_is_one_opaque_op():
    def program(out, x, y):
        add_scaled(out, x * 1, y, 0.5)
        return out + 1

    out, x, y = operands()
    expected = out + 0.5 * x + y + 1
    result, targets = traced(program, out, x, y)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(out, expected - 1)
    assert [target for target in targets if "add_scaled" in target] and not [t for t in targets if "alpha" in t]
    assert len(targets) == 3


def test_traced_functional_op_by_its_fake():
    def program(x):
        first, whole = halves(x, 2)
        return first.shape[0] + whole.dtype.itemsize, first, whole

    x = torch.arange(6.0)
    (number, first, whole), targets = traced(program, x)
    assert number == 3 + 4 and torch.equal(first, x[:3]) and torch.equal(whole, x.int())
    assert sum("halves" in target for target in targets) == 1


class Inside(NamedTuple):
    third: str
    scale: float


class Words(NamedTuple):
    x: torch.Tensor
    first: str
    second: str
    inside: Inside


@custom_op("flashinfer_test::count_words", mutates_args=("out",))
def count_words(record: Words, out: torch.Tensor) -> None:
    out.copy_(record.x * record.inside.scale + len(record.first) + 10 * len(record.second))
    assert record.inside.third == "c:c|c"


def test_an_output_that_shares_memory_in_part_is_refused():
    whole = torch.zeros(7)
    add_scaled(whole[1:], torch.ones(6), None)
    with pytest.raises(ValueError, match="^out: got some of the memory of x"):
        add_scaled(whole[1:], whole[:-1], None)
    with pytest.raises(ValueError, match="^out: got some of the memory of y"):
        add_scaled(whole[1:], torch.ones(6), y=whole[:-1])
    with pytest.raises(ValueError, match="^out: got some of the memory of x"):
        count_words(Words(whole[:-1], "", "", Inside("c:c|c", 2.0)), whole[1:])


def test_texts_of_a_record_are_one_line():
    """The compiler writes nodes of its graph into comments of the code that it makes."""
    lines = []

    def program(x):
        out = torch.empty_like(x)
        count_words(Words(x, "a a", "", Inside("c:c|c", 2.0)), out)
        return out

    def backend(graph, inputs):
        lines.extend(node.format_node() for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    x = torch.arange(3.0)
    assert torch.equal(torch.compile(program, backend=backend, fullgraph=True)(x), 2 * x + 3)
    lines = [line for line in lines if line and "count_words" in line]
    assert len(lines) == 1 and "\n" not in lines[0]


def test_op_without_a_fake_is_refused():
    with pytest.raises(TypeError, match="flashinfer_test::lonely.*fake"):

        @custom_op("flashinfer_test::lonely")
        def lonely(x: torch.Tensor) -> torch.Tensor:
            return x.clone()


@custom_op("flashinfer_test::scaled_into", mutates_args=("out",))
def scaled_into(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, weight, out=out)


def test_traced_call_takes_parameters_where_gradients_are_recorded():
    x, weight = torch.randn(4), torch.nn.Parameter(torch.randn(4))

    def call(x, weight):
        out = torch.empty_like(x)
        scaled_into(x, weight, out)
        return out

    got = torch.compile(call, fullgraph=True, backend="eager")(x, weight)
    torch.testing.assert_close(got, x * weight.detach())
