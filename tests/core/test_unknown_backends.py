"""A name that is no backend is refused where there is nothing to compute, too."""

import pytest
import torch

import flashinfer
from flashinfer import gemm
from flashinfer.causal_conv1d import causal_conv1d_update
from flashinfer.concat_ops import concat_mla_k
from flashinfer.gdn_decode import gated_delta_rule_replayssm_commit
from flashinfer.quantization import per_token_group_quant_8bit

FP8, BYTES, NOBODY = torch.float8_e4m3fn, torch.uint8, {"backend": "nothing"}


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(*shape, dtype=torch.float32).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


CALLS = {
    "mm_fp4": lambda: flashinfer.mm_fp4(
        zeros(0, 32, dtype=BYTES), zeros(8, 32, dtype=BYTES).T, zeros(0, dtype=BYTES), zeros(512, dtype=BYTES), **NOBODY
    ),
    "masked_bmm": lambda: gemm.masked_bmm(zeros(1, 0, 64), zeros(1, 64, 8), ints(0), **NOBODY),
    "gemm_alpha_beta": lambda: gemm.gemm_alpha_beta(zeros(0, 64), zeros(8, 64), zeros(0, 8), **NOBODY),
    "mm_nvfp4_svdquant": lambda: gemm.mm_nvfp4_svdquant(
        zeros(0, 32, dtype=BYTES), zeros(8, 32, dtype=BYTES), zeros(0, dtype=BYTES), zeros(512, dtype=BYTES),
        torch.ones(1), zeros(0, 4), zeros(8, 4), **NOBODY,
    ),
    "fp4_quantize": lambda: flashinfer.fp4_quantize(zeros(0, 64), 1.0, **NOBODY),
    "per_token_group_quant_8bit": lambda: per_token_group_quant_8bit(zeros(0, 128), 128, **NOBODY),
    "rope_quantize_fp8": lambda: flashinfer.rope.rope_quantize_fp8(
        zeros(0, 2, 32), zeros(0, 1, 32), None, None, torch.zeros(4, 32), ints(), **NOBODY
    ),
    "concat_mla_k": lambda: concat_mla_k(zeros(0, 2, 48), zeros(0, 2, 32), zeros(0, 1, 16), **NOBODY),
    "concat_mla_kv_quant_fp8": lambda: flashinfer.concat_mla_kv_quant_fp8(
        zeros(0, 2, 48), zeros(0, 16), nope_dim=32, **NOBODY
    ),
    "causal_conv1d_update": lambda: causal_conv1d_update(
        zeros(0, 4), zeros(1, 4, 3), zeros(4, 4), conv_state_indices=ints(), **NOBODY
    ),
    "gated_delta_rule_replayssm_commit": lambda: gated_delta_rule_replayssm_commit(
        torch.zeros(1, 2, 2, 8, 8), zeros(1, 2, 2, 3, 8), zeros(1, 2, 2, 3, 8), torch.zeros(1, 2, 2, 3),
        torch.zeros(1, 2, 2, 3), ints(), ints(), **NOBODY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_refused(name):
    with pytest.raises(ValueError, match="^backend: got 'nothing'; allowed: "):
        CALLS[name]()
