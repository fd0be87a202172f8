"""Examples of public docstrings run as they stand, and docstrings have what a reader looks for."""

import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import flashinfer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
# Functions that raise nothing of their own: they state facts, or have nothing to refuse.
RAISE_NOTHING = {
    "api_logging.flashinfer_api", "autotune_cache.autotune_v2_reload", "autotuner.autotuner_initializer_empty",
    "autotuner.autotuner_initializer_ones", "autotuner.autotuner_initializer_rand",
    "autotuner.autotuner_initializer_rand_scaled", "autotuner.autotuner_initializer_randn",
    "autotuner.autotuner_initializer_zeros", "autotuner.get_autotune_process_group",
    "autotuner.is_in_profile_measurement",
    "collect_env.collect_env_info", "collect_env.format_report", "collect_env.main", "comm.probe_ulysses_rank_topology",
    "comm.vllm_meta_size",
    "fused_moe.get_scratchpad_size_bytes", "fused_moe.has_monomoe", "gdn_kernels.gdn_fused_decode_step_supported",
    "kda_prefill.kda_prefill_supports_fp32_checkpoints", "moe_ep.available_communication_backends",
    "norm.supports_gated_residual_next_rmsnorm", "norm.supports_gated_residual_rmsnorm",
    "norm.supports_rmsnorm_sigmoid_gate", "quantization.nvfp4_4over6_code", "quantization.nvfp4_e4m3_max",
    "topk.can_implement_filtered_topk", "trace_apply.disable_apply", "trace_apply.stats",
}  # fmt: skip
# Methods with parameters that raise nothing of their own.
METHODS_RAISE_NOTHING = {
    "attention._core.BatchAttention.prewarm_paged_kv_stride_variant",
    "autotuner.autotuner.AutoTuner.prepare_tactic_profile",
    "autotuner.kept.Kept.save_configs",
    "autotuner.profiles.TunableRunner.get_cache_key_extras",
    "cascade.multi_level.MultiLevelCascadeAttentionWrapper.prewarm_paged_kv_stride_variant",
    "cascade.shared_prefix.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.prewarm_paged_kv_stride_variant",
    "comm._workspaces.AllReduceFusionWorkspace.is_buffer_size_sufficient",
    "comm._workspaces.MNNVLAllReduceFusionWorkspace.is_buffer_size_sufficient",
    "comm.cuda_ipc.CudaRTLibrary.cudaGetErrorString", "comm.mapping.Mapping.get_local_rank",
    "comm.mapping.Mapping.get_node_rank", "comm.mapping.Mapping.pp_layers",
    "decode.batch.BatchDecodeWithPagedKVCacheWrapper.prewarm_paged_kv_stride_variant",
    "gemm.segment.SegmentGEMMWrapper.reset_workspace_buffer", "kda_prefill.KDAPrefillPlanCache.put",
    "logits_processor.types.TaggedTensor.indices", "logits_processor.types.TaggedTensor.logits",
    "logits_processor.types.TaggedTensor.probs", "moe_ep.backend.MoEEpCommunication.get_combine_input_buffer",
    "moe_ep.backend.MoEEpCommunication.is_workload_feasible",
    "prefill.paged.BatchPrefillWithPagedKVCacheWrapper.prewarm_paged_kv_stride_variant",
}  # fmt: skip
# Classes without an example: of several processes, bases, and records that other calls return.
CLASSES_WITHOUT_EXAMPLE = {
    "autotuner.ConstraintSpec", "autotuner.DynamicTensorSpec", "autotuner.TuningConfig",
    "comm.AllReduceFusionWorkspace", "comm.Capability", "comm.CudaRTLibrary", "comm.MNNVLAllReduceFusionWorkspace",
    "comm.McastGPUBuffer", "comm.MnnvlConfig", "comm.MoEAlltoallInfo", "comm.MoeAlltoAll",
    "comm.PcieIpcAllReduceWorkspace", "comm.PcieIpcLaunchConfig", "comm.TRTLLMAllReduceFusionWorkspace",
    "comm.TorchDistBackend", "comm.UlyssesBackendDecision", "comm.UlyssesCommunicator", "comm.UlyssesRankTopology",
    "core.OutOfPages", "core.Sequence", "core.Tables",
    "logits_processor.LogitsProcessor", "logits_processor.Op", "logits_processor.ParameterizedOp",
    "moe_ep.BootstrapConfig", "moe_ep.MoEEpCommunication", "moe_ep.MoEEpDispatchResult",
    "moe_ep.MoEEpMegaWorkspace", "moe_ep.NVLinkOneSidedConfig",
}  # fmt: skip
# Functions without an example, most of them of several processes; one that gets one leaves the list.
NO_EXAMPLE = {
    "api_logging.replay", "api_logging.replay_from_dump", "api_logging.replay_sequence", "collect_env.main",
    "comm.all_ranks_agree", "comm.allreduce_fusion", "comm.create_allreduce_fusion_workspace",
    "comm.create_shared_buffer", "comm.decide_ulysses_backend", "comm.decode_cp_a2a_allocate_mnnvl_workspace",
    "comm.decode_cp_a2a_alltoall", "comm.decode_cp_a2a_init_workspace", "comm.decode_cp_a2a_lse_reduce",
    "comm.decode_cp_a2a_lse_reduce_create_workspace", "comm.dispose_ulysses_a2a", "comm.free_shared_buffer",
    "comm.init_ulysses_a2a", "comm.is_mnnvl_fabric_supported", "comm.is_multicast_supported",
    "comm.merge_ulysses_output_head_chunk", "comm.moe_a2a_combine", "comm.moe_a2a_dispatch",
    "comm.moe_a2a_initialize", "comm.moe_a2a_sanitize_expert_ids", "comm.pack_strided_memory", "comm.probe",
    "comm.probe_ulysses_rank_topology", "comm.resolve_pcie_ipc_profile", "comm.resolve_ulysses_backend",
    "comm.trtllm_allreduce_fusion", "comm.trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "comm.trtllm_destroy_ipc_workspace_for_all_reduce", "comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "comm.trtllm_lamport_initialize", "comm.trtllm_lamport_initialize_all", "comm.trtllm_moe_allreduce_fusion",
    "comm.trtllm_moe_finalize_allreduce_fusion", "comm.ulysses_a2a", "comm.vllm_all_reduce", "comm.vllm_dispose",
    "comm.vllm_get_graph_buffer_ipc_meta", "comm.vllm_init_custom_ar", "comm.vllm_meta_size",
    "comm.vllm_register_buffer", "comm.vllm_register_graph_buffers", "cudnn.cudnn_chunk_gated_delta_product",
    "cudnn.cudnn_chunk_gated_delta_rule", "cudnn.cudnn_chunk_gated_delta_rule2", "cudnn.cudnn_recurrent_kda",
    "gdn_decode.ugpu_state_pool", "mamba.checkpointing_ssu", "mamba.replayssm_materialize",
    "moe_ep.create_communication", "msa_ops.msa_proxy_score_fp4", "testing.bench_gpu_time",
    "testing.bench_gpu_time_with_cuda_event", "testing.bench_gpu_time_with_cudagraph",
    "testing.bench_gpu_time_with_cupti",
}  # fmt: skip


def site():
    """tools/site.py, whose table says which modules are public."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public():
    """(dotted name, value) of every public function, class and constant, at the first module that has it."""
    pages, seen = site(), set()
    for name in (module for _, modules in pages.API.values() for module in modules):
        path = pages.source(name)
        module = importlib.import_module(f"flashinfer.{name}")
        for public in pages.public_names(path):
            value = getattr(module, public)
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{name}.{public}", value


PUBLIC = dict(public())
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}


def documented():
    """(dotted name, docstring) of every public function, class and method."""
    for name, value in PUBLIC.items():
        yield name, inspect.getdoc(value) or ""
        for method, found in vars(value).items() if inspect.isclass(value) else ():
            if not method.startswith("_"):
                text = getattr(found, "__doc__", None)
                yield f"{name}.{method}", inspect.cleandoc(text) if isinstance(text, str) else ""


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
    assert not [name for name, x in kinds.items() if ">>>" not in (inspect.getdoc(x) or "")]


def sections(text):
    """Section title -> its lines."""
    found = list(re.finditer(r"^([A-Z][A-Za-z ]*)\n-{3,}\n", text, re.MULTILINE))
    ends = [section.start() for section in found[1:]] + [len(text)]
    return {section[1]: text[section.end() : end] for section, end in zip(found, ends)}


def unnamed(signature, found, *titles):
    """Parameters that none of these sections names."""
    lines = [line for title in titles for line in found.get(title, "").splitlines()]
    heads = [line.split(" : ")[0] for line in lines if not line.startswith(" ")]
    named = {name.strip(" *") for head in heads for name in head.split(",")}
    return [f"parameter {name}" for name in signature.parameters if name not in named]


def lacking(function):
    """What of its sections the docstring of a function does not have, and which parameters they do not name."""
    found, signature = sections(inspect.getdoc(function) or ""), inspect.signature(function)
    missing = unnamed(signature, found, "Parameters")
    nothing = str(signature.return_annotation) in ("None", "NoReturn")
    missing += ["Returns"] if not nothing and not found.keys() & {"Returns", "Yields"} else []
    return missing + [title for title in ("Raises", "Examples") if title not in found]


def test_functions_have_their_sections():
    """Every public function: all of its parameters, what it returns and raises, and an example."""
    found = {name: lacking(function) for name, function in FUNCTIONS.items()}
    assert {name for name, missing in found.items() if "Raises" in missing} == RAISE_NOTHING
    assert {name for name, missing in found.items() if "Examples" in missing} == NO_EXAMPLE
    others = {name: set(missing) - {"Raises", "Examples"} for name, missing in found.items()}
    assert not {name: missing for name, missing in others.items() if missing}


def members():
    """(name, member) of the public methods and properties of public classes, each where it is defined."""
    found = {}
    for kind in filter(inspect.isclass, PUBLIC.values()):
        for base in (base for base in kind.__mro__ if base.__module__.startswith("flashinfer")):
            for name, member in vars(base).items():
                if not name.startswith("_"):
                    found.setdefault(id(member), (f"{base.__module__[11:]}.{base.__qualname__}.{name}", member))
    return dict(found.values())


def lacking_of_method(member):
    """Of a method or property, as `lacking`. Whoever has no parameters may have nothing to raise."""
    function = getattr(member, "__func__", member)
    if isinstance(member, property):
        return [] if member.__doc__ else ["a sentence"]
    if not inspect.isfunction(function):
        return []
    if not function.__doc__:
        return ["a sentence"]
    first = [] if isinstance(member, staticmethod) else list(inspect.signature(function).parameters)[:1]
    missing = [what for what in lacking(function) if what not in ("Examples", *(f"parameter {name}" for name in first))]
    bare = len(inspect.signature(function).parameters) == len(first)
    return [what for what in missing if not (bare and what == "Raises")]


def test_methods_have_their_sections():
    """Every public method of a public class: its parameters, what it returns and raises; a property: a sentence."""
    found = {name: lacking_of_method(member) for name, member in members().items()}
    assert {name for name, missing in found.items() if "Raises" in missing} == METHODS_RAISE_NOTHING
    others = {name: set(missing) - {"Raises"} for name, missing in found.items()}
    assert not {name: missing for name, missing in others.items() if missing}


def test_classes_name_what_they_are_made_of():
    """Every public class: the parameters of its constructor; fields may stand under Attributes."""
    kinds = {name: kind for name, kind in PUBLIC.items() if inspect.isclass(kind) and not is_enum(kind)}
    own = {name: kind for name, kind in kinds.items() if inspect.isfunction(kind.__init__)}
    found = {name: (inspect.signature(kind), sections(inspect.getdoc(kind) or "")) for name, kind in own.items()}
    missing = {name: unnamed(*given, "Parameters", "Attributes") for name, given in found.items()}
    assert not {name: names for name, names in missing.items() if names}
    assert {name for name, kind in own.items() if ">>>" not in (inspect.getdoc(kind) or "")} == CLASSES_WITHOUT_EXAMPLE


def test_what_a_docstring_lacks_is_seen():
    def bare(x, *rest, y=1):
        """Nothing."""

    def whole(x, *rest, y=1) -> None:
        """All.

        Parameters
        ----------
        x, *rest : int
        y : int
            A number.

        Raises
        ------
        ValueError

        Examples
        --------
        >>> whole(1)
        """

    assert lacking(bare) == ["parameter x", "parameter rest", "parameter y", "Returns", "Raises", "Examples"]
    assert lacking(whole) == []


def test_what_a_method_lacks_is_seen():
    class Some:
        def bare(self, x) -> int:
            """Nothing."""

        def none(self): ...

        def whole(self) -> None:
            """All, as it has no parameters."""

        @staticmethod
        def alone(x) -> None:
            """Nothing."""

        @property
        def fact(self): ...

    members = {name: lacking_of_method(vars(Some)[name]) for name in ("bare", "none", "whole", "alone", "fact")}
    assert members["bare"] == ["parameter x", "Returns", "Raises"] and members["alone"] == ["parameter x", "Raises"]
    assert members["none"] == members["fact"] == ["a sentence"] and not members["whole"]


def is_enum(kind):
    return hasattr(kind, "__members__")
