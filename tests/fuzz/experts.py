"""Random calls of mixtures of experts, their routing, adapters and sums."""

import torch

from flashinfer import ActivationType, fused_moe
from flashinfer.fused_moe import RoutingMethodType as Method
from flashinfer.fused_moe.routing import finalize
from flashinfer.testing.compare import assert_close
from flashinfer.testing.fuzz import Call
from flashinfer.tllm_enums import Fp8QuantizationType
from tests.ops.moe.experts import layers
from tests.ops.moe.experts.test_experts import check as check_layer
from tests.ops.moe.finalize import test_finalize as sums
from tests.ops.moe.lora.test_lora import products, summed
from tests.ops.moe.routing.test_routing import check as check_routing

ENCODINGS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def chosen(draw, tokens, experts, top_k):
    """ids [tokens, top_k], some of them left out, and weights."""
    ids = torch.rand(tokens, experts, device=draw.device).topk(top_k).indices.to(draw.index())
    ids[torch.rand(tokens, top_k, device=draw.device) < 0.1] = -1
    return ids, torch.rand(tokens, top_k, device=draw.device) + 0.1


def layer(draw):
    """SwiGLU of any rank of expert parallelism, with and without biases."""
    dtype, tokens = draw.float(), draw.pick(1, 3, 5)
    experts, top_k = draw.pick((4, 2), (6, 1), (8, 6))
    hidden, middle = draw.pick(16, 64, 70), draw.pick(16, 45, 64)
    ranks = draw.pick(1, 2)
    rank, mine = draw.integer(0, ranks - 1), experts // ranks
    x, _, wide_x = layers.random(ENCODINGS[dtype], tokens, hidden, device=draw.device)
    w1, _, wide_1 = layers.weights(ENCODINGS[dtype], mine, 2 * middle, hidden, draw.device)
    w2, _, wide_2 = layers.weights(ENCODINGS[dtype], mine, hidden, middle, draw.device)
    b1 = b2 = None
    if draw.chance(0.3):
        b1, b2 = (draw.values(mine, n, dtype=dtype, kinds=("normal",)) for n in (2 * middle, hidden))
    ids, weights = chosen(draw, tokens, experts, top_k)
    arguments = dict(
        input=draw.laid(x), token_selected_experts=ids, token_final_scales=weights, fc1_expert_weights=w1,
        fc2_expert_weights=w2, output_dtype=dtype, quant_scales=None, fc1_expert_biases=b1, fc2_expert_biases=b2,
        ep_size=ranks, ep_rank=rank,
    )  # fmt: skip

    def check(result):
        given = dict(b1=b1, b2=b2, offset=rank * mine, dtype=dtype)
        check_layer(result[0], wide_x, wide_1, wide_2, ids, weights, **given)

    return Call(fused_moe.cutlass_fused_moe, arguments, check)


def shaped(draw, experts):
    """An activation of TensorRT-LLM's names, what its numbers are, and the same as a function of y and an expert."""
    name = draw.pick("Swiglu", "Swiglu", "SwigluStep", "Geglu", "Relu2", "Identity")
    if name not in ("Swiglu", "SwigluStep"):
        return name, {}, lambda y, e: layers.ACTS[name](y)
    drawn = {
        each: torch.rand(experts, device=draw.device) + 0.5
        for each in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
        if draw.chance() and (name == "Swiglu" or each == "gemm1_clamp_limit")
    }

    def act(y, e):
        of = {each: float(drawn[each][e]) for each in drawn}
        limit = of.get("gemm1_clamp_limit", 7.0 if name == "SwigluStep" else float("inf"))
        if name == "Swiglu":
            return layers.swiglu(y, of.get("gemm1_alpha", 1.0), of.get("gemm1_beta", 0.0), limit)
        up, gate = y.chunk(2)
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    return name, drawn, act


def by_tensorrt_names(draw):
    """Layers by logits and by ids, of any rank of expert parallelism, finished by the call or by what it returns."""
    encoding = draw.pick("bf16", "mxfp8", "fp8_block")
    tokens, (experts, top_k) = draw.pick(1, 3, 5), draw.pick((4, 2), (6, 1), (8, 6))
    wide = encoding == "fp8_block"
    hidden, middle = (draw.pick(128, 256), 128) if wide else (draw.pick(64, 128), draw.pick(64, 96))
    mine = experts // draw.pick(1, 2)
    offset = draw.pick(0, experts - mine)
    name, numbers, act = shaped(draw, mine)
    rows = middle * (1 + ActivationType[name].is_gated)
    x, x_scale, wide_x = layers.random(encoding, tokens, hidden, device=draw.device)
    (w1, s1, wide_1), (w2, s2, wide_2) = (
        layers.weights(encoding, mine, n, k, draw.device) for n, k in ((rows, hidden), (hidden, middle))
    )
    arguments = dict(num_experts=experts, top_k=top_k, n_group=None, topk_group=None, intermediate_size=middle,
                     local_expert_offset=offset, local_num_experts=mine, routed_scaling_factor=None, weight_layout=0,
                     use_shuffled_weight=False, activation_type=ActivationType[name].value)  # fmt: skip
    arguments |= numbers | dict(hidden_states=x, gemm1_weights=w1, gemm2_weights=w2)
    if encoding != "bf16":
        kind = Fp8QuantizationType.MxFp8 if encoding == "mxfp8" else Fp8QuantizationType.DeepSeekFp8
        x_scale = x_scale if encoding == "mxfp8" else x_scale.T.contiguous()
        arguments |= dict(hidden_states_scale=x_scale, gemm1_weights_scale=s1, gemm2_weights_scale=s2,
                          fp8_quantization_type=kind, routing_bias=None)  # fmt: skip
    replay = torch.full((tokens + 2, top_k), -7, dtype=torch.int16, device=draw.device) if draw.chance(0.4) else None
    if by_logits := draw.chance():
        logits = torch.randn(tokens, experts, device=draw.device)
        method = draw.pick(Method.Renormalize, Method.Default, Method.TopK)
        ids, weights = fused_moe.routing.route(logits, None, method, top_k)
        arguments |= dict(routing_logits=logits, routing_bias=None, routing_method_type=method)
        arguments |= dict(routing_replay_out=replay)
    else:
        ids, weights = chosen(draw, tokens, experts, top_k)
        ids = ids.int()
        pair = draw.chance()
        if not pair:
            weights = weights.bfloat16()
            ids = ids.clamp(min=0)
        packed = ids << 16 | weights.bfloat16().view(torch.int16).int() & 0xFFFF
        arguments |= dict(topk_ids=(ids, weights) if pair else packed)
        if encoding == "bf16":
            arguments |= dict(routing_replay_out=replay)
        else:
            replay = None
    finished = draw.chance(0.7)
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=draw.device) if draw.chance() and finished else None
    arguments |= dict(do_finalize=finished, output=out)
    of = "bf16" if encoding == "bf16" else "fp8_block_scale"
    function = getattr(fused_moe, f"trtllm_{of}_moe" if by_logits else f"trtllm_{of}_routed_moe")

    def check(result):
        if replay is not None:
            assert torch.equal(replay[:tokens].long(), ids.long()) and bool((replay[tokens:] == -7).all()), "replay"
        assert out is None or result is out
        if not finished:
            each, s, row = result
            assert torch.equal(row.view(ids.shape) >= 0, (ids >= offset) & (ids < offset + mine)), "rows"
            total = torch.zeros(tokens, hidden, dtype=torch.float64, device=draw.device)
            for place, at in enumerate(row.tolist()):
                if at >= 0:
                    token, choice = divmod(place, top_k)
                    total[token] += each[at].double() * s[token, choice].double()
            result = total.to(torch.bfloat16)
        through = None if encoding == "bf16" else layers.between(encoding)
        # Between the products a value near the border of two codes is a whole step of e4m3 off. Sums of FP8 on Hopper
        # keep 13 bits, and a value that they move to the next bfloat16 passes such a border.
        narrow = {} if through is None else dict(through=through, spacing=2**-2, nudge=2**-8)
        check_layer(result, wide_x, wide_1, wide_2, ids, weights, act=act, of_expert=True, offset=offset, **narrow)

    return Call(function, arguments, check)


def route(draw):
    method = draw.pick(Method.Default, Method.Renormalize, Method.TopK, Method.Llama4, Method.SigmoidRenorm)
    experts, k = draw.pick((8, 2), (16, 4), (60, 6), (128, 8), (160, 6))
    k = 1 if method == Method.Llama4 else k
    logits = (torch.randn(draw.pick(1, 3, 7), experts, device=draw.device) * 2).to(draw.float())
    logits = logits.round() if draw.chance(0.3) else logits

    def check(result):
        check_routing(logits, method, k, result=result)

    arguments = dict(routing_logits=logits, routing_bias=None, routing_method=method, top_k=k)
    return Call(fused_moe.routing.route, arguments, check)


def hashed(draw):
    experts, top_k, shared = draw.pick((8, 2, 0), (40, 6, 1), (160, 8, 0))
    tokens, vocabulary, factor = draw.pick(0, 1, 7), draw.pick(1, 13), draw.pick(1.0, 2.5)
    logits = draw.tensor(tokens, experts, dtype=draw.pick(torch.float32, draw.half()))
    table = torch.stack([torch.randperm(experts)[:top_k] for _ in range(vocabulary)]).int().to(draw.device)
    ids = torch.randint(vocabulary, (tokens,), device=draw.device).to(draw.index())
    arguments = dict(router_logits=logits, input_ids=ids, tid2eid=table, num_fused_shared_experts=shared)

    def formula(t):
        mine = logits.to(t).gather(1, table[ids.long()].long())
        score = (torch.log1p(torch.exp(-mine.abs())) + mine.clamp(min=0)).sqrt()
        return score / score.sum(1, keepdim=True)

    def check(result):
        weights, found = result
        assert torch.equal(found[:, :top_k], table[ids.long()]) and (found[:, top_k:] == experts).all()
        assert_close(weights[:, :top_k], formula(torch.float32), formula(torch.float64))

    return Call(fused_moe.hash_topk, arguments | dict(routed_scaling_factor=factor), check)


def adapters(draw):
    dtype, tokens, hidden = draw.half(), draw.pick(1, 5), draw.pick(16, 64, 300)
    count, experts, rank, columns = draw.pick(1, 3), draw.pick(1, 4), draw.pick(4, 8, 16), draw.pick((16,), (24, 33))
    pairs = draw.pick(1, 4, 10)
    x = draw.values(tokens, hidden, dtype=dtype, kinds=("normal",))
    banks = [
        tuple((torch.randn(count, experts, *n, device=draw.device) * n[1] ** -0.5).to(dtype) for n in sizes)
        for sizes in (((rank, hidden), (c, rank)) for c in columns)
    ]
    given = [
        torch.randint(low, high, (n,), device=draw.device)
        for low, high, n in ((-1, tokens + 1, pairs), (-1, experts, pairs), (-1, count, tokens))
    ]
    weights = torch.rand(pairs, device=draw.device)
    names = ("sorted_token_ids", "expert_ids", "lora_indices")
    arguments = dict(x=x, lora_a_weights=[a for a, _ in banks], lora_b_weights=[b for _, b in banks])
    arguments |= dict(zip(names, given, strict=True)) | dict(topk_weights=weights, num_experts=experts)

    def of(t, between):
        rows, there = products(x, banks, given, t, between)
        return summed(torch.where(there[:, None], rows, 0), weights, given[0], tokens)

    return Call(
        fused_moe.bgmv_moe,
        arguments,
        lambda out: assert_close(out, of(torch.float32, dtype).to(dtype), of(torch.float64, None)),
    )


def weighted_sum(draw):
    shape = draw.pick(1, 5), draw.pick(1, 8, 11), draw.pick(16, 33, 1040)
    dtype, out_dtype = draw.float(), draw.float()
    y, row, weights = sums.case(*shape, dtype, torch.float32, draw.device)
    out = torch.empty(shape[0], shape[2], dtype=out_dtype, device=draw.device)
    weights = weights if draw.chance(0.8) else None
    arguments = dict(y=draw.laid(y), pair_row=row, weights=weights, out=out)

    def check(result):
        truth, same = (sums.by_torch(y, row, weights, t) for t in (torch.float64, torch.float32))
        assert_close(out, same.to(out_dtype), truth)

    return Call(finalize, arguments, check)


FAMILIES = (layer, by_tensorrt_names, route, hashed, adapters, weighted_sum)
