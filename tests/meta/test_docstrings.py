"""Examples of public docstrings run as they stand, and every name of the root has one."""

import doctest
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

import flashinfer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
# Names of the root that have no example; one that gets one leaves the list.
NO_EXAMPLE = {
    "AttentionVariant", "CuteDslMoEWrapper", "KDAPrefillPlanCache", "MeasurementPolicy",
    "RecurrentKDAPrefillWorkspace", "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace",
    "autotune_v2", "cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4", "e2m1_and_ufp8sf_scale_to_float", "explain",
    "fp4_paged_mqa_logits", "fp4_quantize", "fused_kda_decode", "gdn_fused_decode_step",
    "gdn_fused_decode_step_supported", "grouped_mm_fp4", "grouped_mm_mxfp8",
    "kda_prefill_supports_fp32_checkpoints", "mxfp4_quantize", "next_positive_power_of_2",
    "nvfp4_batched_quantize", "nvfp4_quantize_append_paged_mla_kv_cache", "packed_fused_kda_decode",
    "precompile_paged_mqa_logits", "prepare_bf16_kda_prefill", "prepare_tf32_kda_prefill",
    "scaled_fp4_grouped_quantize", "trtllm_bf16_routed_moe", "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe", "trtllm_fp8_block_scale_moe", "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe", "trtllm_fp8_per_tensor_scale_routed_moe",
}  # fmt: skip


def site():
    """tools/site.py, whose table says which modules are public."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented():
    """(dotted name, docstring) of every public function, class and method."""
    pages, seen = site(), set()
    for name in (module for _, modules in pages.API.values() for module in modules):
        path = pages.source(name)
        module = importlib.import_module(f"flashinfer.{name}")
        for public in pages.public_names(path):
            value = getattr(module, public)
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{name}.{public}", inspect.getdoc(value) or ""
            for method, found in vars(value).items() if inspect.isclass(value) else ():
                if not method.startswith("_"):
                    text = getattr(found, "__doc__", None)
                    yield f"{name}.{public}.{method}", inspect.cleandoc(text) if isinstance(text, str) else ""


DOCUMENTED = dict(documented())


def failures(name, text):
    """What a doctest of `text` prints, in a namespace that has nothing but what it imports."""
    said = []
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", [name for name, text in DOCUMENTED.items() if ">>>" in text])
def test_example_runs_as_it_stands(name):
    said = failures(name, DOCUMENTED[name])
    assert not said, said


def test_a_wrong_example_is_seen():
    assert "Expected" in failures("wrong", ">>> 1 + 1\n3\n")
    assert "NameError" in failures("unimported", ">>> torch.ones(1)\ntensor([1.])\n")


def test_every_module_of_the_root_has_a_page():
    # jit and cute_dsl stand for what upstream compiles; utils are helpers of its engines
    listed = {module for _, modules in site().API.values() for module in modules}
    assert set(flashinfer._ROOT_NAMES) - listed == {"cute_dsl", "jit", "utils"}


def test_every_public_name_has_a_docstring():
    undocumented = [name for name, text in DOCUMENTED.items() if not text and name.count(".") == 1]
    assert not undocumented


def test_every_name_of_the_root_has_an_example():
    kinds = {name: getattr(flashinfer, name) for name in flashinfer._MODULE_OF}
    kinds = {name: x for name, x in kinds.items() if inspect.isfunction(x) or inspect.isclass(x) and not is_enum(x)}
    without = {name for name, x in kinds.items() if ">>>" not in (inspect.getdoc(x) or "")}
    assert without == NO_EXAMPLE


def is_enum(kind):
    return hasattr(kind, "__members__")
