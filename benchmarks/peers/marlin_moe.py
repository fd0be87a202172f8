"""vLLM's Marlin kernels for experts with MXFP4 weights."""

from types import SimpleNamespace

import peer_marlin_moe as peer
import torch


def experts(given: dict) -> dict:
    """Sizes are padded as vLLM pads them: hidden to whole 256s, intermediate to whole 128s. It sorts by itself."""
    middle, hidden = given["up"].shape[1] // 2, given["up"].shape[2] * 2
    n, k = -(-middle // 128) * 128, -(-hidden // 256) * 256
    up, of_up, up_bias = (gates_between(given[name]) for name in ("up", "of_up", "up_bias"))
    packed = peer._f.prepare_moe_mxfp4_layer_for_marlin(
        SimpleNamespace(params_dtype=torch.bfloat16),
        peer._pad(up, 2 * n, k // 2), peer._pad(given["down"], k, n // 2),
        peer._pad(of_up, 2 * n, k // 32), peer._pad(given["of_down"], k, n // 32),
        torch.nn.functional.pad(up_bias, (0, 2 * (n - middle))),
        torch.nn.functional.pad(given["down_bias"], (0, k - hidden)),
    )  # fmt: skip
    w1, w2, of_w1, of_w2, bias1, bias2 = packed
    x = torch.nn.functional.pad(given["x"], (0, k - hidden))
    activation = peer.MoEActivation.from_str("swigluoai")

    def run():
        return peer.fused_marlin_moe(
            x, w1, w2, bias1, bias2, of_w1, of_w2, given["s"], given["ids"], activation=activation,
            quant_type_id=peer.scalar_types.float4_e2m1f.id, moe_sum=peer._sum, workspace=peer._locks(x.device),
        )  # fmt: skip

    return {"": run}


def gates_between(rows: torch.Tensor) -> torch.Tensor:
    """Rows of up-projection, then of gate -> a row of gate, its row of up-projection, the next of gate, ..."""
    up, gate = rows.chunk(2, 1)
    return torch.stack([gate, up], 2).flatten(1, 2)


PROBLEMS = {"experts mxfp4": experts}
