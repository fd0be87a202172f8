"""Dependent launches: which kernels have them, that these wait before all else, and that results stay the same."""

import re
import subprocess

import pytest
import torch

import flashinfer
from flashinfer import activation, norm, quantization, rope
from flashinfer._core.dispatch import explain
from flashinfer._core.precompile import catalog_jobs
from flashinfer._core.target import named
from flashinfer.ops import all_ops
from flashinfer.testing.compare import assert_bitwise
from tests.core.card_process import card_process

BF16 = torch.bfloat16
ALLOWED = {6: 1}  # programmatic stream serialization, in cuda.h


@pytest.fixture(scope="module")
def on_card_in_machine_code(tmp_path_factory):
    with card_process(tmp_path_factory.mktemp("card"), machine_code=True) as call:
        yield call


# -- what a kernel does first -----------------------------------------------------------------------------------------


def machine_code(card):
    """{kernel: (begins by waiting, instructions)} of a kernel of each launcher that waits, on Hopper."""
    from importlib import import_module

    from triton import knobs

    found = {}
    for job in catalog_jobs(all_ops(), ["90a"]):
        launcher = next(x for x in import_module(job.module).IMPLEMENTATION.launchers if x.name == job.launcher)
        build = launcher.build(job.problem, job.config)
        kernel = build.kernel.__name__
        if build.constants.get("PDL") and (job.launcher, kernel) not in found:
            entry = launcher.entry(job.problem, job.config, "90a")
            command = [knobs.nvidia.nvdisasm.path, "-c", str(entry.path.with_suffix(".cubin"))]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            instructions = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", text)
            found[job.launcher, kernel] = entry.kernel["waits"], instructions
    return found


@pytest.mark.matrix
def test_kernels_wait_before_all_else(on_card_in_machine_code):
    """By their machine code: no memory but parameters, no branch and no end before the wait (ACQBULK), which all do."""
    found = on_card_in_machine_code(machine_code)
    assert {launcher for launcher, _ in found} == {
        "norm", "act_and_mul", "rope", "rope_quantize", "quantize", "dequantize", "page", "concat_mla_k", "attend_sm80",
        "top_k_list", "top_k_emit_list", "modulated_layernorm", "pack_mla_kv_fp8", "quantize_groups", "mhc_pre",
        "mhc_post", "moe_hash_route", "norm_gated", "page_positions", "page_seq_lens", "prefix_bracket",
        "prefix_gather", "prefix_resolve", "delta_step", "ssm_update",
    }  # fmt: skip
    for kernel, (waits, instructions) in found.items():
        assert waits and "ACQBULK" in instructions, kernel
        before = instructions[: instructions.index("ACQBULK")]
        reaching = [i for i in before if re.match("(?!LDC)LD|ST|ATOM|RED|BRA|BRX|EXIT|RET|CALL|BAR|UT?MA|CCTL", i)]
        assert not reaching, (kernel, reaching)
        assert instructions.index("PREEXIT") > len(before), kernel


# -- enable_pdl -------------------------------------------------------------------------------------------------------


def _calls():
    x, residual, gate = (torch.randn(4, 256, dtype=BF16) for _ in range(3))
    w, stream, row = torch.ones(256, dtype=BF16), torch.randn(4, 256), torch.ones(256)
    fp8, one = torch.empty(4, 256, dtype=torch.float8_e4m3fn), torch.ones(1)
    blocks, normed = torch.empty(2, 4), torch.empty_like(x)
    q, k = torch.randn(4, 2, 64, dtype=BF16), torch.randn(4, 64, dtype=BF16)
    pos, table = torch.arange(4), row.view(4, 64)
    return {
        "rmsnorm": lambda **p: norm.rmsnorm(x, w, **p),
        "gemma_rmsnorm": lambda **p: norm.gemma_rmsnorm(x, w, **p),
        "fused_add_rmsnorm": lambda **p: norm.fused_add_rmsnorm(x, residual, w, **p),
        "gemma_fused_add_rmsnorm": lambda **p: norm.gemma_fused_add_rmsnorm(x, residual, w, **p),
        "rmsnorm_quant": lambda **p: norm.rmsnorm_quant(fp8, x, w, one, **p),
        "fused_add_rmsnorm_quant": lambda **p: norm.fused_add_rmsnorm_quant(fp8, x, residual, w, one, **p),
        "block_quant": lambda **p: norm.fused_add_rmsnorm_fp8_block_quant(fp8, blocks, normed, x, residual, w, **p),
        "rmsnorm_fp4quant": lambda **p: norm.rmsnorm_fp4quant(x, w, **p),
        "add_rmsnorm_fp4quant": lambda **p: norm.add_rmsnorm_fp4quant(x, residual, w, **p),
        "sigmoid_gate": lambda **p: norm.rmsnorm_sigmoid_gate(x, gate, **p),
        "gated_residual": lambda **p: norm.gated_residual_rmsnorm(x, stream, w, row, row, **p),
        "gated_residual_next": lambda **p: norm.gated_residual_next_rmsnorm(x, stream, w, 1.0, row, **p),
        "silu_and_mul": lambda **p: activation.silu_and_mul(x, **p),
        "gelu_and_mul": lambda **p: activation.gelu_and_mul(x, **p),
        "gelu_tanh_and_mul": lambda **p: activation.gelu_tanh_and_mul(x, **p),
        "fp4_quantize": lambda **p: quantization.fp4_quantize(x, one, **p),
        "nvfp4_quantize": lambda **p: quantization.nvfp4_quantize(x, one, **p),
        "mxfp4_quantize": lambda **p: quantization.mxfp4_quantize(x, **p),
        "mxfp8_quantize": lambda **p: quantization.mxfp8_quantize(x, **p),
        "rope_quantize_fp8": lambda **p: rope.rope_quantize_fp8(q, k, None, None, table, pos, **p),
        "mla_rope_quantize_fp8": lambda **p: rope.mla_rope_quantize_fp8(q, k, q, k, table, pos, **p),
    }


def asked(call, **given):
    """Whether the problem of a call's choice may be launched dependently."""
    for op in all_ops().values():
        op._choices.clear()
    before = len(explain())
    call(**given)
    (choice,) = explain()[before:]
    return choice.problem.pdl


@pytest.mark.parametrize("name", _calls())
def test_enable_pdl_reaches_the_problem(name):
    call, default = _calls()[name], "rope" not in name  # upstream's rotations into FP8 have it off unless asked
    assert asked(call) is default and asked(call, enable_pdl=True) is True and asked(call, enable_pdl=False) is False
    if default:
        assert asked(call, enable_pdl=None) is True


def launched(card):
    before = len(card.attributes)
    x, w = torch.randn(4, 256, dtype=BF16), torch.ones(256, dtype=BF16)
    for given in ({}, {"enable_pdl": True}, {"enable_pdl": False}):
        for _ in range(4):
            norm.rmsnorm(x, w, out=x, **given)
    return card.attributes[before:]


def test_enable_pdl_reaches_the_launch(on_card):
    """Calls that are checked, and calls that are replayed."""
    assert on_card(launched) == [ALLOWED] * 8 + [{}] * 4


def decoded(card):
    """Of a plan and two calls of run(), the second one held."""
    before = len(card.attributes)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    tables = torch.tensor([0, 1, 3], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    wrapper.plan(*tables, torch.tensor([16, 1], dtype=torch.int32), 32, 8, 128, 16, q_data_type=BF16)
    q, cache = torch.zeros(2, 32, 128, dtype=BF16), torch.zeros(3, 2, 16, 8, 128, dtype=BF16)
    wrapper.run(q, cache)
    wrapper.run(q, cache)
    return card.attributes[before:]


@pytest.mark.matrix
def test_decodes_are_dependent(on_card):
    """The work list is not: it does not begin by waiting."""
    assert on_card(decoded) == [{}, ALLOWED, ALLOWED]


# -- order ------------------------------------------------------------------------------------------------------------


class Layer:
    """Small kernels of a layer, each of which reads what the one before it wrote, or writes what that one reads."""

    def __init__(self, rows, device, enable_pdl):
        draw = torch.Generator(device).manual_seed(rows)

        def randn(*shape):
            return torch.randn(*shape, device=device, generator=draw).to(BF16)

        self.x, self.residual, self.up, self.w = randn(rows, 4096), randn(rows, 4096), randn(rows, 8192), randn(4096)
        self.y, self.k = torch.empty_like(self.x), randn(rows, 8, 128)
        self.fp8 = torch.empty(rows, 4096, dtype=torch.float8_e4m3fn, device=device)
        self.cache = torch.zeros(rows, 2, 16, 8, 128, dtype=BF16, device=device)
        self.rotation, self.scale = randn(64, 128).float(), torch.full((1,), 0.05, device=device)
        index = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.place = index[:-1], torch.zeros_like(index[:-1])
        self.table = index[:-1], index, torch.ones_like(index[:-1])
        self.pdl = {"enable_pdl": enable_pdl}

    def step(self):
        x, y, residual, w, k, pdl = self.x, self.y, self.residual, self.w, self.k, self.pdl
        norm.fused_add_rmsnorm(x, residual, w, **pdl)
        norm.rmsnorm(x, w, out=y, **pdl)
        flashinfer.apply_rope_with_cos_sin_cache_inplace(self.place[0], y, k.view(len(y), -1), 128, self.rotation)
        flashinfer.append_paged_kv_cache(k, k, *self.place, self.cache, *self.table)
        norm.rmsnorm_quant(self.fp8, y, w, self.scale, **pdl)
        activation.silu_and_mul(self.up, out=x, **pdl)
        norm.fused_add_rmsnorm(y, residual, w, **pdl)
        codes, factors = quantization.nvfp4_quantize(y, self.scale, **pdl)
        norm.rmsnorm(y, w, out=x, **pdl)
        # Kernels of torch, which wait for all before them to end.
        self.up[:, :4096] = x
        self.up[:, 4096:].copy_(residual)
        residual.mul_(0.5)
        k.add_(y[:, :1024].view_as(k)).mul_(0.25)
        self.state = x, y, residual, k, self.fp8, self.cache, codes, factors

    def bits(self):
        return [tensor.view(torch.uint8).clone() for tensor in self.state]

    def eager(self, steps):
        for i in range(steps):
            if i % 16 == 0:
                torch.cuda._sleep(6_000_000)  # so that launches wait for the card, and not the card for launches
            self.step()
        return self.bits()

    def replayed(self, steps):
        self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                self.step()
        for _ in range(steps // 4):
            graph.replay()
        return self.bits()


@pytest.mark.gpu
@pytest.mark.parametrize("way, steps", [("eager", 640), ("replayed", 8000)])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_chain_of_dependent_launches(device, rows, way, steps):
    plain, dependent, again = (getattr(Layer(rows, device, pdl), way)(steps) for pdl in (False, True, None))
    for a, b, c in zip(plain, dependent, again, strict=True):
        assert_bitwise(a, b)
        assert_bitwise(a, c)


@pytest.mark.gpu
def test_order_goes_through_a_launch_between(device):
    """What a large kernel writes last, the one after the next reads; the next has nothing to do with either."""
    source = torch.arange(1.0, 4.0, device=device).to(BF16)[:, None, None].expand(3, 16384, 8192).contiguous()
    large, out = torch.empty(16384, 4096, dtype=BF16, device=device), torch.empty(4, 2048, dtype=BF16, device=device)
    other, w = torch.ones(1, 4096, dtype=BF16, device=device), torch.ones(4096, dtype=BF16, device=device)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    once = activation.silu_and_mul(source[:, 0], enable_pdl=False)
    truth = activation.silu_and_mul(once, enable_pdl=False)
    torch.cuda.synchronize(device)
    for _ in range(60):
        for i in range(3):
            activation.silu_and_mul(source[i], out=large)
            norm.rmsnorm(other, w)
            activation.silu_and_mul(large[-4:], out=out)
            wrong += (out != truth[i]).any()
    assert not wrong.item()


@pytest.mark.gpu
@pytest.mark.parametrize("requests, keys", [(1, 4096), (16, 1000)])
def test_a_chain_of_decodes(device, requests, keys):
    """Each reads what the one before it wrote, splits of a request that others combine too; against calls that wait."""
    draw = torch.Generator(device).manual_seed(requests)
    pages = -(-keys // 16)
    cache = torch.randn(requests * pages, 2, 16, 8, 128, device=device, generator=draw).to(BF16)
    first = torch.randn(requests, 32, 128, device=device, generator=draw).to(BF16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64 << 20, dtype=torch.uint8, device=device))
    indices = torch.randperm(requests * pages, device=device, generator=draw).int()
    last = torch.full((requests,), keys - (pages - 1) * 16, dtype=torch.int32)
    indptr = torch.arange(requests + 1, dtype=torch.int32) * pages
    wrapper.plan(indptr, indices, last, 32, 8, 128, 16, q_data_type=BF16, kv_data_type=BF16)
    x = [torch.empty_like(first) for _ in range(4)]

    def steps(count, settle):
        for _ in range(count):
            for source, target in zip(x, x[1:]):
                wrapper.run(source, cache, out=target)
                settle()
            x[0].copy_(x[3]).mul_(20.0).add_(first)
            settle()

    x[0].copy_(first)
    steps(40, lambda: torch.cuda.synchronize(device))
    waited = [y.clone() for y in x]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps(5, lambda: None)
    for ways in (lambda: steps(40, lambda: None), lambda: [graph.replay() for _ in range(8)]):
        x[0].copy_(first)
        ways()
        for a, b in zip(waited, x, strict=True):
            assert_bitwise(a, b)
