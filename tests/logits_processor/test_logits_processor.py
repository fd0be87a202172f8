"""Pipelines against the functions that they stand for, fused and not."""

import pytest
import torch

from flashinfer import sampling
from flashinfer.logits_processor import (
    CompileError,
    Compiler,
    FusionRule,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Op,
    ParameterizedOp,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
)
from flashinfer.logits_processor import operators as ops
from flashinfer.logits_processor.legalization import infer_initial_type
from flashinfer.testing.compare import assert_bitwise, assert_close

SEEDS = dict(seed=3, offset=4)
FUSED = {
    "probs": ([Sample()], "ProbsSampleOp", lambda p: sampling.sampling_from_probs(p, **SEEDS), {}),
    "top_k": ([TopK(), Sample()], "FusedProbsTopKSampleOp",
              lambda p: sampling.top_k_sampling_from_probs(p, 5, **SEEDS), dict(top_k=5)),
    "top_p": ([TopP(), Sample()], "FusedProbsTopPSampleOp",
              lambda p: sampling.top_p_sampling_from_probs(p, 0.8, **SEEDS), dict(top_p=0.8)),
    "min_p": ([MinP(), Sample()], "FusedProbsMinPSampleOp",
              lambda p: sampling.min_p_sampling_from_probs(p, 0.2, **SEEDS), dict(min_p=0.2)),
    "top_k then top_p": ([TopK(), TopP(), Sample()], "FusedProbsTopKTopPSampleOp",
                         lambda p: sampling.top_k_top_p_sampling_from_probs(p, 5, 0.8, **SEEDS),
                         dict(top_k=5, top_p=0.8)),
    "joint": ([TopK(joint_topk_topp=True), TopP(), Sample()], "FusedProbsTopKTopPSampleOp",
              lambda p: sampling.top_k_top_p_sampling_from_probs(p, 5, 0.8, filter_apply_order="joint", **SEEDS),
              dict(top_k=5, top_p=0.8)),
}  # fmt: skip


@pytest.fixture
def probs(device):
    return torch.softmax(torch.randn(200, 40, device=device) * 2, -1)


@pytest.mark.parametrize("name", FUSED)
def test_fused_draws(probs, name):
    processors, op, function, parameters = FUSED[name]
    pipe = LogitsPipe(processors, input_type=TensorType.PROBS)
    assert [repr(step) for step in pipe.compiled_ops] == [op]
    assert_bitwise(pipe(probs, **parameters, **SEEDS), function(probs))


@pytest.mark.parametrize("name", [name for name in FUSED if name != "joint"])
def test_unfused_draws_are_the_same(probs, name):
    """The steps one by one renormalise on the way, which may turn a race in a thousand."""
    processors, _, function, parameters = FUSED[name]
    pipe = LogitsPipe(processors, compile=False, input_type=TensorType.PROBS)
    assert pipe.compiled_ops is None
    assert (pipe(probs, **parameters, **SEEDS) == function(probs)).float().mean() >= 0.99
    pipe.compile()
    assert_bitwise(pipe(probs, **parameters, **SEEDS), function(probs))


def test_logits_to_tokens(device):
    logits = torch.randn(5, 60, device=device) * 3
    temperature = torch.tensor([0.5, 1, 2, 3, 0.1], device=device)
    pipe = LogitsPipe([Temperature(), Softmax(enable_pdl=True), TopK(), TopP(), Sample(deterministic=False)])
    assert pipe.initial_type is TensorType.LOGITS
    ks = torch.tensor([1, 3, 9, 60, 20], device=device)
    tokens = pipe(logits, temperature=temperature, top_k=ks, top_p=0.9, **SEEDS)
    probs = sampling.softmax(logits, temperature)
    assert_bitwise(tokens, sampling.top_k_top_p_sampling_from_probs(probs, ks, 0.9, **SEEDS))
    assert tokens[0] == logits[0].argmax()
    direct = LogitsPipe([Sample()], input_type=TensorType.LOGITS)
    assert_bitwise(direct(logits, **SEEDS), sampling.sampling_from_logits(logits, **SEEDS))
    generator = torch.Generator(device)
    drawn = [direct(logits, generator=generator.manual_seed(1)) for _ in range(2)]
    assert_bitwise(*drawn)
    rows = torch.tensor([4, 0], device=device)
    assert direct(logits, indices=rows, **SEEDS).dtype == torch.int64


def test_filters_without_a_draw(device):
    logits = torch.randn(3, 50, device=device)
    scaled = LogitsPipe([Temperature()])(logits, temperature=2.0)
    assert_bitwise(scaled, logits / 2)
    fused, apart = (LogitsPipe([Temperature(), Softmax()], compile=fuse) for fuse in (True, False))
    assert len(fused.compiled_ops) == 1 and len(apart.ops) == 2
    truth = torch.softmax(logits.double() / 0.75, -1)
    for pipe in (fused, apart):
        assert_close(pipe(logits, temperature=0.75), torch.softmax(logits / 0.75, -1), truth)
    masked = LogitsPipe([TopK()], input_type=TensorType.LOGITS)(logits, top_k=4)
    assert masked.isfinite().sum(1).tolist() == [4] * 3
    probs = torch.softmax(logits, -1)
    assert_bitwise(LogitsPipe([TopP()])(probs, top_p=0.5), sampling.top_p_renorm_probs(probs, 0.5))
    shares = torch.tensor([0.1, 0.5, 1.0], device=device)
    kept = LogitsPipe([MinP()])(probs, min_p=shares)
    assert_bitwise(kept > 0, probs >= shares[:, None] * probs.amax(1, keepdim=True))
    ones = torch.ones(3, dtype=torch.float64, device=device)
    assert_close(kept.sum(1), ones.float(), ones)


def test_show():
    pipe = LogitsPipe([TopK(), Sample()], input_type=TensorType.PROBS)
    assert repr(pipe) == (
        "LogitsPipe([TopK -> Sample], ops=[ProbsTopKOp -> ProbsSampleOp], compiled_ops=[FusedProbsTopKSampleOp])"
    )


class Shift(LogitsProcessor):
    def legalize(self, input_type):
        return [ShiftOp(**self.params)]


class ShiftOp(Op):
    IN = OUT = TensorType.LOGITS

    def __call__(self, tensor, **kwargs):
        return TaggedTensor.logits(tensor.data + kwargs.get("shift", self.params["by"]))


def test_processors_rules_and_checks_of_users(device):
    logits = torch.randn(2, 9, device=device)
    pipe = LogitsPipe([Shift(by=1.0), Softmax()])
    assert pipe.initial_type is TensorType.LOGITS
    assert_bitwise(pipe(logits), sampling.softmax(logits + 1.0))
    assert_bitwise(LogitsPipe([Shift(by=1.0)])(logits, shift=2.0), logits + 2.0)
    rule = FusionRule((ShiftOp, ShiftOp), lambda window: len(window) == 2,
                      lambda window: ShiftOp(by=sum(op.params["by"] for op in window)), prio=50)  # fmt: skip
    twice = LogitsPipe([Shift(by=1.0), Shift(by=2.0)], custom_fusion_rules=[rule])
    assert len(twice.compiled_ops) == 1
    assert_bitwise(twice(logits), logits + 3.0)
    never = FusionRule(rule.pattern, lambda window: False, rule.build, prio=50)
    assert len(LogitsPipe([Shift(by=1.0), Shift(by=2.0)], custom_fusion_rules=[never]).compiled_ops) == 2

    def refuse(steps):
        raise ValueError(f"steps: got {len(steps)}")

    with pytest.raises(ValueError, match="steps: got 1"):
        LogitsPipe([Softmax()], custom_validity_checks=[refuse])


def test_what_a_rule_built_is_a_neighbour_again(device):
    rule = FusionRule((ShiftOp, ShiftOp), lambda window: True,
                      lambda window: ShiftOp(by=sum(op.params["by"] for op in window)))  # fmt: skip
    pipe = LogitsPipe([Shift(by=1.0), Shift(by=2.0), Shift(by=4.0), Shift(by=8.0)], custom_fusion_rules=[rule])
    assert len(pipe.compiled_ops) == 1
    assert pipe(torch.zeros(1, 2, device=device)).tolist() == [[15.0, 15.0]]


def test_a_rule_takes_subclasses_but_ours_do_not(device):
    class MyTopK(ops.ProbsTopKOp):
        pass

    steps = [MyTopK(top_k=1), ops.ProbsSampleOp()]
    assert compile_pipeline(steps) == steps
    rule = FusionRule((ops.ProbsTopKOp, ops.ProbsSampleOp), lambda window: True,
                      lambda window: ops.FusedProbsTopKSampleOp(**window[0].params))  # fmt: skip
    fused, = compile_pipeline(steps, [rule])
    assert fused(TaggedTensor.probs(torch.eye(3, device=device))).data.tolist() == [0, 1, 2]


def test_bad_pipelines():
    for build, error, message in (
        (lambda: LogitsPipe([]), ValueError, "processors: got "),
        (lambda: LogitsPipe([TopK()]), ValueError, "input_type: got "),
        (lambda: LogitsPipe([TopK()], input_type=TensorType.INDICES), ValueError, "input_type: got "),
        (lambda: LogitsPipe([TopP()], input_type=TensorType.LOGITS), LegalizationError, "TopP: got LOGITS"),
        (lambda: LogitsPipe([Softmax(), Temperature()]), LegalizationError, "Temperature: got PROBS"),
        (lambda: LogitsPipe([Softmax(), Softmax()]), LegalizationError, "Softmax: got PROBS"),
        (lambda: LogitsPipe([Softmax(), Sample(), TopK()]), CompileError, "TopK: follows"),
        (lambda: LogitsPipe([Softmax(), Shift(by=1.0)]), CompileError, "ShiftOp: gets PROBS"),
        (lambda: LogitsPipe([Softmax(), Shift(by=1.0), Softmax()]), CompileError, "gets PROBS"),
        (lambda: LogitsPipe([Softmax(), TopK(joint_topk_topp=True), Sample()]), CompileError, "joint_topk_topp: got"),
    ):
        with pytest.raises(error, match=message):
            build()


def test_names_that_no_step_takes():
    for build, name in (
        (lambda: TopP(top_q=0.5), "top_q"),
        (lambda: TopK(joint=True), "joint"),
        (lambda: Temperature(top_k=3), "top_k"),
        (lambda: Softmax(pdl=True), "pdl"),
        (lambda: MinP(p=0.1), "p"),
        (lambda: Sample(seeds=3), "seeds"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got .*; allowed: the parameters "):
            build()


def test_is_deterministic_when_it_runs(probs):
    fused, apart = (LogitsPipe([TopP(), Sample()], compile=fuse) for fuse in (True, False))
    for pipe in (fused, apart):
        tokens = [pipe(probs, top_p=0.5, is_deterministic=flag, **SEEDS) for flag in (True, False)]
        assert_bitwise(*tokens)
    renorm = LogitsPipe([TopP()])
    assert_bitwise(renorm(probs, top_p=0.5, is_deterministic=True), renorm(probs, top_p=0.5))


def test_rules_given_to_compile(device):
    rule = FusionRule((ShiftOp, ShiftOp), lambda window: True, lambda window: ShiftOp(by=5.0), prio=50)
    pipe = LogitsPipe([Shift(by=1.0), Shift(by=2.0)], compile=False)
    pipe.compile(custom_fusion_rules=[rule])
    assert len(pipe.compiled_ops) == 1

    def refuse(steps):
        raise ValueError("steps: refused")

    with pytest.raises(ValueError, match="steps: refused"):
        pipe.compile(custom_validity_checks=[refuse])


def test_masked_logits_stay_masked_at_any_temperature(device):
    logits = torch.tensor([[0.0, -torch.inf, 3.0]], device=device)
    assert LogitsPipe([Temperature()])(logits, temperature=torch.inf).tolist() == [[0.0, -torch.inf, 0.0]]


@pytest.mark.parametrize("compile", [True, False])
def test_one_temperature_for_each_row_in_either_shape(device, compile):
    """Users who divide logits by hand have temperatures as a column."""
    logits, each = torch.randn(3, 20, device=device), torch.tensor([0.5, 1.0, 4.0], device=device)
    truth = logits.double() / each.double()[:, None]
    for given in (each, each[:, None], each.double()[:, None]):
        scaled = LogitsPipe([Temperature()], compile)(logits, temperature=given)
        assert_close(scaled.float(), logits / each[:, None], truth)
        probs = LogitsPipe([Temperature(), Softmax()], compile)(logits, temperature=given)
        assert_close(probs, torch.softmax(logits / each[:, None], -1), torch.softmax(truth, -1))


@pytest.mark.parametrize("compile", [True, False])
def test_impossible_temperatures_are_nan_in_their_rows_alone(device, compile):
    logits, each = torch.randn(4, 9, device=device), torch.tensor([1.0, 0.0, -2.0, torch.nan], device=device)
    for steps in ([Temperature()], [Temperature(), Softmax()]):
        result = LogitsPipe(steps, compile)(logits, temperature=each)
        assert result.isnan().all(1).tolist() == [False, False, True, True] and result[0].isfinite().all()


@pytest.mark.parametrize("compile", [True, False])
def test_a_rows_temperature_of_zero_gives_equal_probabilities(device, compile):
    """As upstream's softmax has it; a masked logit stays masked."""
    logits = torch.tensor([[1.0, -torch.inf, 9.0], [1.0, 2.0, 3.0]], device=device)
    for zero in (torch.zeros(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)):
        probs = LogitsPipe([Temperature(), Softmax()], compile)(logits, temperature=zero)
        torch.testing.assert_close(probs, torch.tensor([[1, 0, 1], [2 / 3] * 3], device=device) / 2)
    with pytest.raises(ValueError, match="^temperature: got 0.0; allowed: above 0"):
        LogitsPipe([Temperature(), Softmax()], compile)(logits, temperature=0.0)


def test_min_p_of_rows(device):
    probs = torch.tensor([[0.5, 0.4, 0.1], [0.5, 0.4, 0.1], [0.0, 0.0, 0.0], [torch.nan, 0.5, 0.5]], device=device)
    wanted = torch.tensor([[1.0, 0.0, 0.0], [0.5 / 0.9, 0.4 / 0.9, 0.0], [0.0, 0.0, 0.0]], device=device)
    each = torch.tensor([0.9, 0.5, 0.5, 0.5], device=device)
    for given in (each, each[:, None]):
        kept = LogitsPipe([MinP()])(probs, min_p=given)
        torch.testing.assert_close(kept[:3], wanted)
        assert kept[3].isnan().all()
    impossible = torch.tensor([-0.5, 1.5, torch.nan], device=device)
    assert not LogitsPipe([MinP()])(probs[[0, 0, 0]], min_p=impossible).any()
    for compile in (True, False):
        drawn = LogitsPipe([MinP(), Sample()], compile)(probs[[0, 0, 0]].flip(1), min_p=impossible, **SEEDS)
        assert drawn.tolist() == [0, 0, 0]


def test_bad_calls():
    logits = torch.randn(2, 8)
    alone, three = LogitsPipe([Temperature()]), torch.tensor([1.0, 2.0, 3.0])
    pipe = LogitsPipe([Temperature(), Softmax()])
    for call, argument in (
        (lambda: pipe(logits), "temperature"),
        (lambda: pipe(logits, temperature=0.0), "temperature"),
        (lambda: pipe(logits, temperature=1.0, topk=3), "topk"),
        (lambda: pipe(TaggedTensor.probs(logits), temperature=1.0), "x"),
        (lambda: alone(logits, temperature=-1.0), "temperature"),
        (lambda: alone(logits, temperature=three), "temperature"),
        (lambda: alone(logits[:1], temperature=three), "temperature"),
        (lambda: alone(logits, temperature="1"), "temperature"),
        (lambda: alone(logits, temperature=True), "temperature"),
        (lambda: LogitsPipe([Softmax(), MinP()])(logits[:1], min_p=three / 3), "min_p"),
        (lambda: LogitsPipe([Softmax(), TopK()])(logits, top_k=0), "top_k"),
        (lambda: LogitsPipe([Softmax(), MinP()])(logits, min_p=1.5), "min_p"),
        (lambda: LogitsPipe([Softmax(), MinP()])(logits, min_p=0.0), "min_p"),
        (lambda: LogitsPipe([Softmax(), TopP()])(logits, top_p=1.5), "top_p"),
        (lambda: LogitsPipe([Softmax(), TopP(), Sample()])(logits, top_p=1.5), "top_p"),
        (lambda: LogitsPipe([Softmax(), MinP(), Sample()])(logits, min_p=0.0), "min_p"),
        (lambda: LogitsPipe([Softmax(), TopK(True), TopP(), Sample()], False)(logits, top_k=2), "joint_topk_topp"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
            call()
    fixed = LogitsPipe([Temperature(temperature=2.0), Softmax()])
    assert_bitwise(fixed(logits), sampling.softmax(logits, 2.0))
    tagged = TaggedTensor.logits(logits)
    assert tagged.size(1) == 8 and tagged.shape == logits.shape and tagged.size() == logits.size()
    assert tagged.dtype == logits.dtype and tagged.device == logits.device


class Scale(LogitsProcessor):
    def legalize(self, input_type):
        if input_type is not TensorType.LOGITS:
            raise ValueError("logits only")
        return [ScaleOp(**self.params)]


class ScaleOp(ParameterizedOp):
    """As users write one: it lists no parameters, and reads them when it runs."""

    IN = OUT = TensorType.LOGITS

    def __call__(self, tensor, **kwargs):
        kind = self._validate_input_type(tensor)
        bias = self._get_param("bias", kwargs, required=False)
        scaled = tensor.data * self._get_param("factor", kwargs)
        return TaggedTensor(scaled if bias is None else scaled + bias, kind)


def test_a_step_of_a_user_reads_parameters_of_the_call(device):
    logits = torch.randn(2, 9, device=device)
    pipe = LogitsPipe([Scale(factor=2.0), Softmax()])
    assert pipe.initial_type is infer_initial_type([Scale()]) is TensorType.LOGITS
    assert pipe.ops[0].default_params == {"factor": 2.0}
    assert_bitwise(pipe(logits), sampling.softmax(logits * 2))
    assert_bitwise(pipe(logits, factor=3.0, bias=1.0), sampling.softmax(logits * 3 + 1))
    with pytest.raises(ValueError, match="^factor: got None; allowed: a value, which ScaleOp needs"):
        LogitsPipe([Scale()])(logits)
    with pytest.raises(ValueError, match="^tensor: got PROBS; allowed: LOGITS"):
        ScaleOp(factor=1.0)(TaggedTensor.probs(logits))


def test_a_step_names_what_it_takes_and_gives():
    class Untyped(Op):
        OUT = TensorType.LOGITS

        def __call__(self, tensor, **kwargs):
            return tensor

    with pytest.raises(ValueError, match="^IN: got None; allowed: a TensorType in Untyped"):
        Untyped()


def test_stages():
    """Processors become steps, and these are checked and fused, apart from any pipeline."""
    steps = legalize_processors([Temperature(), Softmax(), TopP(), Sample()])
    assert list(map(repr, compile_pipeline(steps))) == ["FusedTemperatureSoftmaxOp", "FusedProbsTopPSampleOp"]
    assert len(steps) == 4
    rule = FusionRule((ShiftOp, ShiftOp), lambda window: True, lambda window: ShiftOp(by=5.0))
    shifts = [ShiftOp(by=1.0), ShiftOp(by=2.0)]
    compiler = Compiler()
    assert len(compiler.compile(shifts)) == 2
    compiler.register_fusion_rule(rule)
    assert len(compiler.compile(shifts)) == len(compile_pipeline(shifts, [rule])) == 1
    seen = []
    compiler.register_validity_check(lambda given: seen.append(len(given)))
    compiler.compile(shifts)
    assert set(seen) == {2}
    for build, error in ((legalize_processors, LegalizationError), (compile_pipeline, CompileError)):
        with pytest.raises(error, match="got none; allowed: one or more"):
            build([])
    for build, name in ((legalize_processors, "processors"), (compile_pipeline, "ops"), (compiler.compile, "ops")):
        with pytest.raises(ValueError, match=f"^{name}: got 'n'; allowed: "):
            build("no step")


def test_tensors_that_know_what_they_mean(device):
    x = torch.randn(2, 3, device=device)
    assert_bitwise(torch.softmax(TaggedTensor.logits(x), dim=-1), torch.softmax(x, dim=-1))
    assert str(TensorType.LOGITS) == "LOGITS" and repr(TensorType.PROBS) == "TensorType.PROBS"


def test_a_parameter_of_other_pipelines_changes_nothing():
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(64, 1)
    for kind in (TensorType.LOGITS, TensorType.PROBS):
        pipe = LogitsPipe([Sample(deterministic=True)], input_type=kind)
        x = logits if kind is TensorType.LOGITS else torch.softmax(logits, -1)
        others = ({}, dict(top_k=1), dict(top_p=0.1, temperature=2.0))
        drawn = [pipe(x, seed=1, offset=0, **given) for given in others]
        assert drawn[0].equal(drawn[1]) and drawn[0].equal(drawn[2])
