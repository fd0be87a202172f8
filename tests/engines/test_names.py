"""Every name that an engine imports is there, and takes the call that the engine makes."""

import importlib
import inspect

import pytest

from tests.engines import calls


def entries(text):
    """(name, positional arguments or None, keywords) of each entry; an indented line goes on with the one above."""
    for entry in text.replace("\n    ", " ").split("\n"):
        if entry:
            name, *rest = entry.split()
            yield name, int(rest[0]) if rest else None, rest[1:]


ALL = [
    pytest.param(*entry, id=f"{engine}-{entry[0]}")
    for engine, text in (("sglang", calls.SGLANG), ("vllm", calls.VLLM), ("mini-sglang", calls.MINI_SGLANG))
    for entry in entries(text)
]


def resolve(name):
    module, path = name.split(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("name", "count", "keywords"), ALL)
def test_a_call_binds(name, count, keywords):
    found = resolve(name)
    if count is None:
        return
    assert callable(found)
    inspect.signature(found).bind(*range(count), **dict.fromkeys(keywords))


def test_the_table_is_read():
    assert len(ALL) > 200
    assert ("flashinfer:rmsnorm", 3, ["out"]) in list(entries(calls.MINI_SGLANG))


@pytest.mark.parametrize("name", ("xqa.xqa", "xqa.xqa_mla", "mla.xqa_batch_decode_with_kv_cache_mla",
                                  "mla.trtllm_batch_decode_with_kv_cache_mla"))  # fmt: skip
def test_decode_has_the_names_of_rooms_that_split_from_it(name):
    module, name = name.split(".")
    assert resolve(f"flashinfer.decode:{name}") is resolve(f"flashinfer.{module}:{name}")


def test_sglang_quietens_the_log():
    from flashinfer.jit.core import logger

    level = logger.level
    logger.setLevel("ERROR")
    assert resolve("flashinfer._core.env:logger").level == 40
    logger.setLevel(level)


def test_a_machine_without_kernels_says_so():
    from flashinfer._core import target
    from flashinfer.jit.core import check_cuda_arch

    import torch

    if torch.cuda.is_available():
        check_cuda_arch()
        with target.override(target.Target("75")), pytest.raises(RuntimeError, match="compute capability 7.5"):
            check_cuda_arch()
    else:
        with pytest.raises(RuntimeError, match="no CUDA device"):
            check_cuda_arch()


def test_environments_of_kept_choices():
    from flashinfer.autotuner.autotuner import _classify_metadata_mismatches, _collect_metadata

    here = _collect_metadata()
    assert _classify_metadata_mismatches(dict(here), here) == ({}, {})
    hard, soft = _classify_metadata_mismatches(here | {"gpu": "another"}, here)
    assert hard == {"gpu": ("another", here["gpu"])} and not soft
    unknown = {"gpu": "unknown", "cuda_version": None, "flashinfer_version": "*"}
    hard, soft = _classify_metadata_mismatches(unknown, here)
    assert not hard and soft == {name: (unknown.get(name), here[name]) for name in here if name != "flashinfer_version"}


def test_backends_that_engines_ask_for():
    """ "cute-dsl" is a name that they follow into the kernel's own modules."""
    for function in (resolve("flashinfer:mm_bf16"), resolve("flashinfer:mm_mxfp8")):
        assert function.is_backend_supported("cutlass", 90) and function.is_backend_supported("cudnn")
        assert not function.is_backend_supported("cute-dsl", 100) and not function.is_backend_supported("cutlass", 75)


def test_a_workspace_says_what_it_was_made_for():
    import torch

    from flashinfer.comm import create_allreduce_fusion_workspace

    for dtype in (torch.float32, torch.bfloat16):
        space = create_allreduce_fusion_workspace(
            "auto", world_size=1, rank=0, max_token_num=4, hidden_dim=64, dtype=dtype, use_fp32_lamport=True
        )
        assert space.backend == "trtllm" and space.metadata["use_fp32_lamport"] == (dtype == torch.float32)
        space.destroy()
