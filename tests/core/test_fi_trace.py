"""Definitions of calls: upstream's documented form, this package's templates, and their references as programs."""

import inspect
import json
import sys
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import flashinfer
from flashinfer.api_logging import flashinfer_api
from flashinfer.fi_trace import fi_trace
from flashinfer.testing.generate import randn
from flashinfer.trace import Const, Scalar, Tensor, TraceTemplate, Var, attached
from flashinfer.trace.templates import TEMPLATES

ALL = [(module, name) for module, names in TEMPLATES.items() for name in names]
everything = pytest.mark.parametrize(("module", "name"), ALL, ids=[name for _, name in ALL])


@pytest.fixture(autouse=True)
def nothing_written(monkeypatch):
    monkeypatch.setattr(attached, "_written", set())
    for variable in ("FLASHINFER_TRACE_DUMP", "FLASHINFER_TRACE_DUMP_DIR"):
        monkeypatch.delenv(variable, raising=False)


def arguments_of(name):
    """Arguments of a call, and the lengths of Const axes."""
    half = torch.float16
    probs = torch.rand(3, 50).softmax(-1)
    x, w, r = randn(3, 64, dtype=half), randn(64, dtype=half), randn(3, 64, dtype=half)
    v, s = randn(3, 2, 4, 16, dtype=half), randn(3, 2, 4)
    fp8 = torch.empty(3, 64, dtype=torch.float8_e4m3fn)
    draw = {"seed": 1, "offset": 0}
    tables = dict(batch_indices=torch.zeros(2).int(), positions=torch.arange(2).int(), kv_indices=torch.ones(1).int(),
                  kv_indptr=torch.tensor([0, 1]).int(), kv_last_page_len=torch.tensor([2]).int())  # fmt: skip
    norm, row, merge = {"hidden_size": 64}, {"vocab_size": 50}, {"num_heads": 4, "head_dim": 16}
    pair = dict(v_a=v[:, 0], s_a=s[:, 0], v_b=v[:, 1], s_b=s[:, 1])
    key, pages = randn(2, 4, 16, dtype=half), tuple(torch.zeros(3, 8, 4, 16, dtype=half) for _ in range(2))
    each = dict(top_k=torch.tensor([3, 4, 5]).int()), dict(top_p=torch.tensor([0.3, 0.4, 0.5]))
    cases = {
        "rmsnorm": (dict(input=x, weight=w), norm),
        "gemma_rmsnorm": (dict(input=x, weight=w), norm),
        "fused_add_rmsnorm": (dict(input=x, residual=r, weight=w), norm),
        "gemma_fused_add_rmsnorm": (dict(input=x, residual=r, weight=w), norm),
        "rmsnorm_quant": (dict(out=fp8, input=x, weight=w, scale=0.5), norm),
        "fused_add_rmsnorm_quant": (dict(out=fp8, input=x, residual=r, weight=w, scale=0.5), norm),
        "silu_and_mul": (dict(input=x), norm),
        "gelu_and_mul": (dict(input=x), norm),
        "gelu_tanh_and_mul": (dict(input=x), norm),
        "merge_state": (pair, merge),
        "merge_state_in_place": (dict(v=v[:, 0].clone(), s=s[:, 0].clone(), v_other=v[:, 1], s_other=s[:, 1]), merge),
        "merge_states": (dict(v=v, s=s), merge),
        "append_paged_kv_cache": (
            dict(append_key=key, append_value=key.clone(), paged_kv_cache=pages, **tables),
            {"num_kv_heads": 4, "head_dim": 16, "page_size": 8},
        ),
        "append_paged_mla_kv_cache": (
            dict(append_ckv=key[:, 0].clone(), append_kpe=key[:, 1, :8].clone(), ckv_cache=pages[0][:, :, 0],
                 kpe_cache=pages[1][:, :, 0, :8], **tables),
            {"head_dim_ckv": 16, "head_dim_kpe": 8, "page_size": 8},
        ),
        "layernorm": (dict(input=x, gemma=randn(64), beta=randn(64)), norm),
        "mm_bf16": (dict(a=x.bfloat16(), b=randn(40, 64, dtype=torch.bfloat16).T), {"N": 40, "K": 64}),
        "bmm_bf16": (dict(A=v[:, 0].bfloat16(), B=randn(3, 16, 24, dtype=torch.bfloat16)), {"N": 24, "K": 16}),
        "softmax": (dict(logits=randn(3, 50), temperature=0.5), row),
        "top_p_renorm_probs": (dict(probs=probs, top_p=0.5), row),
        "top_k_renorm_probs": (dict(probs=probs, top_k=3), row),
        "top_k_mask_logits": (dict(logits=probs.log(), top_k=3), row),
        "sampling_from_probs": (dict(probs=probs, **draw), row),
        "sampling_from_logits": (dict(logits=probs.log(), **draw), row),
        "min_p_sampling_from_probs": (dict(probs=probs, min_p=0.1, **draw), row),
        "top_k_sampling_from_probs": (dict(probs=probs, **each[0], **draw), row),
        "top_p_sampling_from_probs": (dict(probs=probs, **each[1], **draw), row),
        "top_k_top_p_sampling_from_probs": (dict(probs=probs, **each[0], **each[1], **draw), row),
        "top_k_top_p_sampling_from_logits": (dict(logits=probs.log(), top_k=3, top_p=0.5, **draw), row),
        "chain_speculative_sampling": (
            dict(draft_probs=probs[None, :2], draft_token_ids=torch.tensor([[1, 2]]), target_probs=probs[None], **draw),
            row,
        ),
    }  # fmt: skip
    return cases[name] if name in cases else arguments_of_rope(name)


def arguments_of_rope(name):
    q, k = randn(5, 4, 32, dtype=torch.float16), randn(5, 2, 32, dtype=torch.float16)
    heads = {"num_q_heads": 4, "num_k_heads": 2, "head_dim": 32}
    if "cos_sin_cache" in name:
        table = torch.cat([f(torch.outer(torch.arange(9.0), torch.rand(12))) for f in (torch.cos, torch.sin)], -1)
        given = dict(positions=torch.tensor([0, 8, 3, 3, 7]), query=q.flatten(1), key=k.flatten(1), head_size=32)
        return given | dict(cos_sin_cache=table, is_neox=False), {"head_size": 32}
    if "pos_ids" in name:
        return dict(q=q, k=k, pos_ids=torch.tensor([0, 9000, 3, 70, 7]).int(), rotary_dim=24, interleave=True), heads
    return dict(q=q, k=k, indptr=torch.tensor([0, 2, 2, 5]).int(), offsets=torch.tensor([3, 1, 90]).int()), heads


def test_the_documented_example(tmp_path):
    x, weight = torch.zeros(32, 7168, dtype=torch.bfloat16), torch.ones(7168, dtype=torch.bfloat16)
    found = flashinfer.norm.rmsnorm.fi_trace(hidden_states=x, weight=weight, save_dir=tmp_path / "new")
    assert found["name"] == "rmsnorm_h7168" and found["op_type"] == "rmsnorm"
    assert found["tags"] == ["fi_api:flashinfer.norm.rmsnorm", "status:verified"]
    assert found["axes"] == {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 7168}}
    rows = {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"}
    assert found["inputs"] == {"hidden_states": rows, "weight": {"shape": ["hidden_size"], "dtype": "bfloat16"}}
    assert found["outputs"] == {"output": rows} and "def rmsnorm(" in found["reference"]
    assert json.loads((tmp_path / "new" / "rmsnorm_h7168.json").read_text()) == found
    assert fi_trace(flashinfer.rmsnorm, input=x, weight=weight) == found
    assert flashinfer.fi_trace(flashinfer.rmsnorm, input=x, weight=weight) == found
    assert sys.modules["flashinfer.fi_trace"](flashinfer.rmsnorm, input=x, weight=weight) == found


def test_a_tensor_with_more_axes_than_its_template_is_not_believed_first():
    """Norms take [batch, heads, hidden], too: the weight tells the hidden size."""
    x, weight = torch.zeros(2, 8, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    assert fi_trace(flashinfer.rmsnorm, input=x, weight=weight)["name"] == "rmsnorm_h128"
    # Where nothing else tells the axis, it is the first tensor that does.
    alone = TraceTemplate("alone", {"rows": Const()}, {"x": Tensor(["rows"])}, {})
    assert alone.definition("mine.alone", {"x": torch.zeros(3, 4)})["name"] == "alone_rows3"


@everything
def test_templates_fit_their_functions(module, name):
    """Parameters exist, and real arguments, which the function takes, tell every axis' length and every dtype."""
    function, template = getattr(import_module(module), name), TEMPLATES[module][name]
    parameters = inspect.signature(function).parameters
    for key, part in template.inputs.items():
        assert (part.param or key) in parameters
    given, lengths = arguments_of(name)
    found = function.fi_trace(**given)
    assert found["tags"][0] == f"fi_api:{module}.{name}"
    values = {axis: entry["value"] for axis, entry in found["axes"].items() if entry["type"] == "const"}
    named = {axis: axis if template.axes[axis].abbrev is None else template.axes[axis].abbrev for axis in values}
    assert {axis: n for axis, n in values.items() if named[axis]} == lengths
    entries = {**found["inputs"], **found["outputs"]}
    assert all(entry["dtype"] != "unknown" for entry in entries.values())
    known = set(found["axes"])
    assert all(set(entry["shape"] or []) <= known for entry in entries.values())
    assert found["name"].endswith("_".join(f"{named[axis]}{n}" for axis, n in lengths.items()))
    function(**given)
    if isinstance(given.get("probs", given.get("logits")), torch.Tensor):
        assert found["outputs"].keys() <= {"samples", "output", "renormalized", "masked_logits"}


@pytest.mark.parametrize(("module", "name"), [each for each in ALL if TEMPLATES[each[0]][each[1]].reference])
def test_references_are_the_functions(module, name):
    function, template = getattr(import_module(module), name), TEMPLATES[module][name]
    given, _ = arguments_of(name)
    program: dict = {}
    exec(function.fi_trace(**given)["reference"], program)
    parts = {key: given[part.param or key] for key, part in template.inputs.items() if (part.param or key) in given}
    said = program[template.reference.__name__](**parts)
    result = function(**given)
    if result is None:
        result = tuple(given[part.param] for part in template.outputs.values())
    for out, expected in zip(*(x if isinstance(x, tuple) else (x,) for x in (result, said)), strict=True):
        # Both are float32 maths rounded once: a unit in the last place.
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out.float(), expected.float(), rtol=2 * torch.finfo(out.dtype).eps, atol=1e-6)


def test_a_callers_own_template(monkeypatch, tmp_path):
    wide = TraceTemplate(
        "scale",
        {"rows": Var("of a batch"), "columns": Const("of a row", abbrev=""), "k": Const(), "two": Const(value=2)},
        {"x": Tensor(["rows", "columns"], param="data"), "k": Scalar("int32", optional=True),
         "extra": Tensor(["rows"], optional=True, dtype="int8", description="A mask.")},
        {"y": Tensor(["rows", "columns"], dtype_from="nothing", dtype_from_scalar="dtype", dtype="int32"),
         "z": Scalar("float64")},
        constraints=["two == 2"], description="Twice.",
    )  # fmt: skip
    narrow = TraceTemplate("scale", {"rows": Const()}, {"x": Tensor(["rows"], param="data")}, {}, name_prefix="narrow")

    def scale(data, k=3, dtype=None):
        return k * data

    by_shape = flashinfer_api(trace=lambda data, **more: {2: wide, 1: narrow}.get(data.dim()))(scale)
    assert by_shape(torch.ones(2), 4).tolist() == [4, 4]
    found = by_shape.fi_trace(data=torch.ones(2, 5).half(), k=7)
    assert found["name"] == "scale_k7_two2" and found["constraints"] == ["two == 2"]
    assert found["description"] == "Twice." and "reference" not in found
    assert found["axes"]["rows"] == {"type": "var", "description": "of a batch"}
    assert found["axes"]["columns"] == {"type": "const", "value": 5, "description": "of a row"}
    assert found["inputs"]["k"] == {"shape": None, "dtype": "int32", "optional": True}
    extra = {"shape": ["rows"], "dtype": "int8", "optional": True, "description": "A mask."}
    assert found["inputs"]["extra"] == extra and found["inputs"]["x"]["dtype"] == "float16"
    assert found["outputs"] == {"y": {"shape": ["rows", "columns"], "dtype": "int32"},
                                "z": {"shape": None, "dtype": "float64"}}  # fmt: skip
    said = by_shape.fi_trace(data=torch.ones(2, 5), dtype=torch.bfloat16, name="mine")
    assert said["outputs"]["y"]["dtype"] == "bfloat16" and said["name"] == "mine"
    assert by_shape.fi_trace(data=torch.ones(4))["name"] == "narrow_rows4"
    with pytest.raises(ValueError, match="^kwargs: got"):
        by_shape.fi_trace(data=torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="^name: got"):
        by_shape.fi_trace(data=torch.ones(4), name="../out", save_dir=tmp_path)
    with pytest.raises(ValueError, match="^func_or_method: got .*has a template"):
        fi_trace(torch.relu)
    with pytest.raises(TypeError, match="^value: got True"):
        Const(value=True)


def test_a_result_has_the_dtype_of_an_argument_with_an_axis_in_common():
    inputs = {"weight": Tensor(["k"]), "x": Tensor(["rows", "columns"]), "n": Scalar("int32")}
    axes = {"rows": Var(), "columns": Const(abbrev="c"), "k": Const(), "n": Const()}
    template = TraceTemplate("scale", axes, inputs, {"y": Tensor(["rows"]), "z": Tensor(["n"])})
    given = {"weight": torch.ones(4), "x": torch.ones(2, 3).half(), "n": torch.tensor([7]).numpy()[0]}
    found = template.definition("mine.scale", given)
    assert found["outputs"]["y"]["dtype"] == "float16" and found["outputs"]["z"]["dtype"] == "unknown"
    assert found["name"] == "scale_c3_k4_n7"


def test_sources_stand_for_themselves_or_are_left_out():
    class Rows: ...

    def softly(x: Rows):
        return F.relu(x)

    typed: dict = {}
    exec("def typed(x): return x", typed)
    axes, x = {"n": Var()}, {"x": Tensor(["n"])}
    found = TraceTemplate("relu", axes, x, x, reference=softly, check=typed["typed"], init=torch.relu)
    found = found.definition("mine.relu", {"x": torch.ones(2)})
    assert "check" not in found and "init" not in found
    # Indented, as a function of a test is; one of a module is not.
    begin, source = found["reference"].split("    def softly", 1)
    program: dict = {}
    exec(begin + "if True:\n    def softly" + source, program)
    assert program["softly"](torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_methods_give_their_object():
    class Doubler:
        width = 3

        def run(self, x): ...

    template = TraceTemplate("double", {"n": Const(value=1)}, {}, {})
    Doubler.run = flashinfer_api(Doubler.run, trace=lambda self, x: template if self.width == 3 else None)
    assert fi_trace(Doubler().run, x=1)["name"] == "double_n1"


def cache_of(layout, dtype=torch.bfloat16):
    shape = {"NHD": (9, 16, 8, 128), "HND": (9, 8, 16, 128), "": (9, 8, 128)}[layout]
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("layout", ["NHD", "HND", ""])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_wrappers_over_pages(layout, one, stage):
    kind = {"decode": flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            "prefill": flashinfer.BatchPrefillWithPagedKVCacheWrapper}[stage]  # fmt: skip
    wrapper = kind(torch.empty(64, dtype=torch.uint8), layout or "HND")
    pair, q = cache_of(layout), torch.zeros(4, 32, 128, dtype=torch.bfloat16)
    given = dict(q=q, paged_kv_cache=torch.stack(pair, 1) if one else pair)
    found = flashinfer.fi_trace(wrapper.run, **given)
    assert found["name"] == f"gqa_paged_{stage}_h32_kv8_d128_ps{16 if layout else 1}"
    assert found["op_type"] == "gqa_paged" and f"stage:{stage}" in found["tags"]
    assert found["tags"][0] == f"fi_api:flashinfer.{stage}.{kind.__name__}.run"
    named = {"NHD": ["page_size", "num_kv_heads"], "HND": ["num_kv_heads", "page_size"], "": ["num_kv_heads"]}[layout]
    rows = {"shape": ["batch_size" if stage == "decode" else "total_q", "num_qo_heads", "head_dim"]}
    assert found["inputs"]["q"] == found["outputs"]["output"] == {**rows, "dtype": "bfloat16"}
    for name in ("k_cache", "v_cache"):
        assert found["inputs"][name] == {"shape": ["num_pages", *named, "head_dim"], "dtype": "bfloat16"}
    assert found["inputs"]["kv_indptr"]["optional"] and found["outputs"]["lse"]["dtype"] == "float32"
    if layout != "HND":
        assert kind.run.fi_trace(**given) == found


def test_the_other_wrappers():
    q, latents = torch.zeros(4, 32, 128), (torch.zeros(2, 16, 512), torch.zeros(2, 16, 64))
    pages = torch.zeros(9, 64, 512), torch.zeros(9, 64, 64)
    ragged, mla = flashinfer.BatchPrefillWithRaggedKVCacheWrapper, flashinfer.mla.BatchMLAPagedAttentionWrapper
    for layout, k in (("NHD", torch.zeros(7, 8, 128)), ("HND", torch.zeros(8, 7, 128))):
        wrapper = ragged(torch.empty(64, dtype=torch.uint8), layout)
        assert fi_trace(wrapper.run, q=q, k=k, v=k)["name"] == "gqa_ragged_h32_kv8_d128"
    names = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), (*latents, *pages), strict=True))
    found = mla.run.fi_trace(**names)
    assert found["name"] == "mla_paged_decode_h16_ckv512_kpe64_ps64"
    assert found["outputs"]["output"]["shape"] == ["batch_size", "num_qo_heads", "head_dim_ckv"]
    assert mla.run.fi_trace(query=latents, kv_cache=pages)["inputs"] == found["inputs"]


def test_one_tensor_of_keys_and_values_tells_their_axes():
    given, lengths = arguments_of("append_paged_kv_cache")
    given["paged_kv_cache"] = torch.stack(given["paged_kv_cache"], 1)
    found = flashinfer.append_paged_kv_cache.fi_trace(**given)
    assert {axis: entry["value"] for axis, entry in found["axes"].items() if entry["type"] == "const"} == lengths
    assert found["outputs"]["paged_k_cache"]["dtype"] == "float16"


def test_a_folder_by_the_environment_has_each_once(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_TRACE_DUMP_DIR", str(tmp_path / "out"))
    given, _ = arguments_of("rmsnorm")
    path = tmp_path / "out" / "rmsnorm_h64.json"
    flashinfer.rmsnorm.fi_trace(**given)
    path.unlink()
    flashinfer.rmsnorm.fi_trace(**given)
    assert not path.exists()
    flashinfer.rmsnorm.fi_trace(**given, save_dir=tmp_path / "out")
    assert path.exists()


@pytest.mark.parametrize("named", [True, False])
def test_calls_write_their_definitions(named, tmp_path, run_python):
    code = """
import torch, flashinfer
x, w = torch.ones(2, 64), torch.ones(64)
for _ in range(2):
    assert flashinfer.rmsnorm(x, w).shape == (2, 64)
flashinfer.norm.rmsnorm(torch.ones(5, 32), torch.ones(32), 1e-5)
flashinfer.get_seq_lens(torch.tensor([0, 1]), torch.tensor([1]), 16)
flashinfer.top_k_sampling_from_probs(x / 64, torch.tensor([1, 2]))
wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), "HND")
ones, one, two = (torch.tensor(t, dtype=torch.int32) for t in ([0, 1], [0], [2]))
wrapper.plan(ones, one, two, 4, 2, 64, 8, q_data_type=torch.float16)
wrapper.run(torch.ones(1, 4, 64).half(), torch.ones(1, 2, 2, 8, 64).half())
"""
    named_folder = {"FLASHINFER_TRACE_DUMP_DIR": str(tmp_path / "named")} if named else {}
    done = run_python(f"import os; os.chdir({str(tmp_path)!r}){code}", FLASHINFER_TRACE_DUMP="1", **named_folder)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / ("named" if named else "fi_trace_out")
    assert sorted(path.name for path in folder.iterdir()) == [
        "gqa_paged_decode_h4_kv2_d64_ps8.json", "rmsnorm_h32.json", "rmsnorm_h64.json", "top_k_sampling_v64.json",
    ]  # fmt: skip
    assert done.stdout == ""
