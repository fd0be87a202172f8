"""The plugins of vLLM and SGLang, with modules of ours that choose as those of the engines do."""

import functools
import importlib.util
import logging
import os
import re
import shutil
import sys
import types
from enum import Enum
from pathlib import Path

import pytest

from flashinfer.integrations import sglang, vllm

ROOT = Path(__file__).resolve().parents[2]
Backend = Enum("Backend", "FLASH_ATTN FLASHINFER TRITON_ATTN FLASHMLA FLASHINFER_MLA TRITON_MLA")


def module(monkeypatch, name, **content):
    made = types.ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def fake_vllm(monkeypatch, is_cuda=True):
    """Of Hopper: the order by kind of attention, kept by its arguments."""

    @functools.cache
    def order(use_mla, device_capability, num_heads=None, kv_cache_dtype=None, use_non_causal=False):
        mla = [Backend.FLASHMLA, Backend.FLASHINFER_MLA, Backend.TRITON_MLA]
        return mla if use_mla else [Backend.FLASH_ATTN, Backend.FLASHINFER, Backend.TRITON_ATTN]

    cuda = module(monkeypatch, "vllm.platforms.cuda", _get_backend_priorities=order)
    platform = types.SimpleNamespace(is_cuda=lambda: is_cuda)
    platforms = module(monkeypatch, "vllm.platforms", current_platform=platform, cuda=cuda)
    module(monkeypatch, "vllm", platforms=platforms)
    return cuda


def first_valid(cuda, valid, use_mla=False):
    return next(b for b in cuda._get_backend_priorities(use_mla, (9, 0), kv_cache_dtype="auto") if b in valid)


def has_flashinfer():
    """Whether vLLM takes the library for usable: the module, and its binaries or what builds them."""
    if importlib.util.find_spec("flashinfer") is None:
        return False
    binaries = bool(os.environ.get("VLLM_HAS_FLASHINFER_CUBIN")) or importlib.util.find_spec("flashinfer_cubin")
    return bool(binaries) or (shutil.which("nvcc") is not None and shutil.which("ninja") is not None)


def test_vllm_takes_the_library_for_usable_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("VLLM_HAS_FLASHINFER_CUBIN", raising=False)
    assert has_flashinfer()


def test_vllm_tries_ours_first_and_goes_on_where_it_is_refused(monkeypatch):
    cuda = fake_vllm(monkeypatch)
    everything = set(Backend)
    assert first_valid(cuda, everything) is Backend.FLASH_ATTN
    vllm.prefer()
    vllm.prefer()
    assert first_valid(cuda, everything) is Backend.FLASHINFER
    assert first_valid(cuda, everything - {Backend.FLASHINFER}) is Backend.FLASH_ATTN
    assert first_valid(cuda, everything - {Backend.FLASHINFER_MLA}, use_mla=True) is Backend.FLASHMLA
    assert cuda._get_backend_priorities(True, (9, 0)) == [Backend.FLASHINFER_MLA, Backend.FLASHMLA, Backend.TRITON_MLA]


def test_vllm_elsewhere_is_left_alone(monkeypatch, caplog):
    cuda = fake_vllm(monkeypatch, is_cuda=False)
    vllm.prefer()
    assert first_valid(cuda, set(Backend)) is Backend.FLASH_ATTN
    cuda = fake_vllm(monkeypatch)
    del cuda._get_backend_priorities
    with caplog.at_level(logging.WARNING):
        vllm.prefer()
    assert vllm.FLAG in caplog.text


class ServerArgs:
    """Of SGLang: a backend that is given stays, another is asked for."""

    default = "fa3"

    def __init__(self, attention_backend=None):
        self.attention_backend = attention_backend or self._get_default_attn_backend(False, model_config=None)

    def _get_default_attn_backend(self, use_mla_backend, model_config):
        return self.default


def test_sglang_answers_ours_where_it_would_be_another_of_this_gpu(monkeypatch):
    args = type("ServerArgs", (ServerArgs,), {"_get_default_attn_backend": ServerArgs._get_default_attn_backend})
    module(monkeypatch, "sglang.srt.server_args", ServerArgs=args)
    sglang.prefer()
    sglang.prefer()
    assert args().attention_backend == "flashinfer"
    assert args("triton").attention_backend == "triton"
    args.default = "trtllm_mha"
    assert args().attention_backend == "trtllm_mha"


def test_sglang_of_another_kind_is_left_alone(monkeypatch, caplog):
    module(monkeypatch, "sglang.srt.server_args", ServerArgs=type("ServerArgs", (), {}))
    with caplog.at_level(logging.WARNING):
        sglang.prefer()
    assert sglang.FLAG in caplog.text


@pytest.mark.parametrize(("group", "plugin"), [("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)])
def test_engines_find_the_plugins(group, plugin):
    text = (ROOT / "pyproject.toml").read_text()
    (target,) = re.findall(rf'^\[project\.entry-points\."{re.escape(group)}"\]\nflashinfer = "(.+)"$', text, re.M)
    assert target == f"{plugin.__name__}:prefer"
