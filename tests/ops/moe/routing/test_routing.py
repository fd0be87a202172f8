"""Routing against choices and weights worked out token by token in float64, and the map against its definition."""

import pytest
import torch

from flashinfer.fused_moe import RoutingMethodType as Method
from flashinfer.fused_moe import fused_topk_deepseek
from flashinfer.fused_moe.routing import route, token_map
from flashinfer.ops.moe.token_map import most_tiles
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.norm.variants import variant  # the fixture

RENORMED = (Method.RenormalizeNaive, Method.SigmoidRenorm, Method.MiniMax2, Method.DeepSeekV3)
SCALED = (Method.MiniMax2, Method.DeepSeekV3)
BY_SIGMOID = (Method.Sigmoid, Method.SigmoidRenorm, Method.MiniMax2, Method.DeepSeekV3)


def choose(logits, method, k, bias=None, groups=1, kept=1):
    """Experts of one token, best first, worked out expert by expert: logits is a list."""
    scores = [float(torch.tensor(x).sigmoid()) for x in logits] if method in BY_SIGMOID else logits
    if bias is not None:
        scores = [float(torch.tensor(s) + torch.tensor(b)) for s, b in zip(scores, bias)]
    size = len(logits) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]

    def two_best(group):
        return sum(sorted((scores[e] for e in members[group]), reverse=True)[:2])

    best = sorted(range(groups), key=lambda g: (-two_best(g), g))[:kept]
    return sorted((e for g in best for e in members[g]), key=lambda e: (-scores[e], e))[:k]


# Scores of sigmoids in float32, each of a few operations: sums of two that are as near as this may go either way.
NEAR = 2.0**-20


def assert_near_choice(logits, chosen, bias, groups, kept):
    """Another choice than `choose` is right where scores, or sums of groups, differ by less than their rounding."""
    scores = (torch.tensor(logits).double().sigmoid() + torch.tensor(bias or [0.0]).double()).tolist()
    size = len(logits) // groups
    sums = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    last = sorted(sums)[-kept]
    used = {e // size for e in chosen} | {g for g in range(groups) if sums[g] > last + NEAR}
    assert len(used) <= kept and all(sums[g] >= last - NEAR for g in used), (chosen, sums)
    in_order = [scores[e] for e in chosen]
    assert all(a >= b - NEAR for a, b in zip(in_order, in_order[1:])), (chosen, in_order)
    others = (e for g in used for e in range(g * size, (g + 1) * size) if e not in chosen)
    assert len({*chosen}) == len(chosen) and all(scores[e] <= in_order[-1] + NEAR for e in others), (chosen, scores)


def weigh(logits, ids, method, normed=True, scale=1.0):
    """Weights of the chosen experts by the method's definition, in the dtype of logits [tokens, experts]."""
    chosen = logits.gather(1, ids.long())
    if method in (Method.Default, Method.RenormalizeNaive):
        weights = logits.softmax(1).gather(1, ids.long())
    elif method == Method.Renormalize:
        weights = chosen.softmax(1)
    else:
        weights = chosen if method == Method.TopK else chosen.sigmoid()
    if method in RENORMED and (normed or method != Method.SigmoidRenorm):
        weights = weights / weights.sum(1, keepdim=True)
    return weights * (scale if method in SCALED else 1.0)


def check(logits, method, k, bias=None, groups=1, kept=1, normed=True, scale=1.0, result=None):
    ids, weights = result or route(
        logits, bias, method, k, n_group=groups, topk_group=kept, norm_topk_prob=normed, routed_scaling_factor=scale
    )
    given = [None if bias is None else bias.float().tolist()]
    for row, chosen in zip(logits.float().tolist(), ids.tolist(), strict=True):
        expected = choose(row, method, k, *given, groups, kept)
        if chosen != expected and method in BY_SIGMOID:
            assert_near_choice(row, chosen, *given, groups, kept)
        else:
            assert chosen == expected
    truth = weigh(logits.double(), ids, method, normed, scale)
    same = weigh(logits.float(), ids, method, normed, scale).to(weights.dtype)
    assert_close(weights, same, truth)


def logits_of(tokens, experts, dtype=torch.float32, device="cpu"):
    """Distinct in each row and far enough apart that no rounding changes their order."""
    order = torch.rand(tokens, experts, device=device).argsort(1)
    return ((order - experts // 2) * (16.0 / experts)).to(dtype)


def test_near_choices():
    """sigmoid(x) + sigmoid(-x) is 1 for every x, but for rounding: all groups of such pairs tie. Others do not."""
    logits = [1.0, -1.0, 3.0, -3.0, 2.0, -2.0, -4.0, -5.0]
    for chosen in ([0, 1], [2, 3], [4, 5]):
        assert_near_choice(logits, chosen, None, 4, 1)
    for chosen in ([6, 7], [1, 0], [0, 2], [0, 0]):
        with pytest.raises(AssertionError):
            assert_near_choice(logits, chosen, None, 4, 1)


@pytest.mark.parametrize("method", [m for m in Method if m not in (Method.Unspecified, Method.DeepSeekV3)])
def test_methods(variant, device, method):
    k = 1 if method == Method.Llama4 else 6
    bias = torch.randn(60, device=device) / 2 if method == Method.MiniMax2 else None
    check(logits_of(5, 60, device=device), method, k, bias)
    check(logits_of(1, 8, torch.bfloat16, device), method, min(k, 2), scale=2.5)
    # Of these two, and of a bias, methods read what upstream's read; callers hand all of them to each method.
    check(logits_of(3, 60, torch.float16, device), method, k, normed=False)
    if method != Method.MiniMax2:
        logits, unread = logits_of(3, 60, device=device), torch.randn(60, device=device) * 9
        check(logits, method, k, result=route(logits, unread, method, k, norm_topk_prob=True))


@pytest.mark.parametrize(
    "experts, groups, kept, k",
    [(64, 8, 4, 8), (60, 3, 2, 32), (24, 12, 1, 2), (48, 1, 1, 5)],
)
def test_deepseek(variant, device, experts, groups, kept, k):
    """Few distinct scores: groups and experts tie, and the lower index goes first."""
    logits = (torch.randn(7, experts, device=device) * 2).round()
    bias = (torch.randn(experts, device=device) * 2).round().div(4)
    values = torch.empty(7, k, device=device)
    ids = torch.empty(7, k, dtype=torch.int64, device=device)
    replay = torch.full((9, k), -5, dtype=torch.int16, device=device)
    fused_topk_deepseek(logits, bias, groups, kept, k, 2.5, values, ids, routing_replay_out=replay)
    check(logits, Method.DeepSeekV3, k, bias, groups, kept, scale=2.5, result=(ids, values))
    assert_bitwise(replay[:7], ids.to(torch.int16))
    assert (replay[7:] == -5).all()
    again = route(logits, bias, Method.DeepSeekV3, k, n_group=groups, topk_group=kept, routed_scaling_factor=2.5)
    assert_bitwise(again[0].long(), ids)
    assert_bitwise(again[1], values)
    half, narrow = values.half(), ids.int()
    strided = generate.strided(logits, 1, 3)
    fused_topk_deepseek(strided, bias, groups, kept, k, 2.5, half.zero_(), narrow.zero_())
    assert_bitwise(narrow, ids.int())
    assert_bitwise(half, values.half())


def test_shared_experts_come_last(variant, device):
    logits = logits_of(3, 16, device=device)
    replay = torch.empty(3, 4, dtype=torch.int16, device=device)
    alone = route(logits, None, Method.DeepSeekV3, 4)
    ids, weights = route(
        logits, None, Method.DeepSeekV3, 4, num_fused_shared_experts=2, routing_replay_out=replay
    )
    assert_bitwise(ids[:, :4], alone[0])
    assert_bitwise(weights[:, :4], alone[1])
    assert_bitwise(replay, ids[:, :4].to(torch.int16))
    assert ids[:, 4:].tolist() == [[16, 17]] * 3 and (weights[:, 4:] == 1).all()


@pytest.mark.parametrize("method", [Method.Default, Method.Renormalize, Method.DeepSeekV3, Method.TopKSigmoid])
def test_extreme_logits(variant, device, method):
    """All very negative, all equal, infinite; NaN in a row stays there, and its ids are experts, each once."""
    rows = torch.stack([
        torch.linspace(-300, -200, 32), torch.full((32,), -90.0), torch.full((32,), 3.0), torch.full((32,), torch.nan)
    ]).to(device)  # fmt: skip
    rows[2, 5] = -torch.inf
    groups = (4, 2) if method == Method.DeepSeekV3 else (None, None)
    ids, weights = route(rows, None, method, 4, n_group=groups[0], topk_group=groups[1])
    for row in range(3):
        assert ids[row].tolist() == choose(rows[row].tolist(), method, 4, None, *(groups if groups[0] else (1, 1)))
    assert weights[:3].isfinite().all() and weights[3].isnan().all()
    assert all(len(set(row)) == 4 and 0 <= min(row) and max(row) < 32 for row in ids.tolist())
    rows[3] = 1.0
    clean = route(rows, None, method, 4, n_group=groups[0], topk_group=groups[1])
    assert_bitwise(ids[:3], clean[0][:3])
    assert_bitwise(weights[:3], clean[1][:3])


def test_no_tokens(variant, device):
    ids, weights = route(torch.empty(0, 8, device=device), None, Method.Default, 2)
    assert ids.shape == weights.shape == (0, 2)
    made, _ = token_map(ids, 8, 0, 16)
    assert made.first.tolist() == [0] * 9 and made.count.tolist() == [0] * 8 and made.tiles.tolist() == [0]


def expected_map(ids, experts, offset, tile):
    """The map by its definition: the pairs of each expert, and its padding."""
    pairs = [[] for _ in range(experts)]
    for pair, id in enumerate(ids.flatten().tolist()):
        if offset <= id < offset + experts:
            pairs[id - offset].append(pair)
    first, rows, tiles, ends = [0], [], [], []
    for expert, mine in enumerate(pairs):
        padding = -len(mine) % tile
        tiles += [expert] * ((len(mine) + padding) // tile)
        ends += [first[-1] + len(mine)] * ((len(mine) + padding) // tile)
        rows += mine + [-1] * padding
        first.append(len(rows))
    return first, [len(mine) for mine in pairs], rows, tiles, ends


def check_map(ids, experts, offset, tile, packed=None):
    given = ids if packed is None else packed
    made, weights = token_map(given, experts, offset, tile, packed=packed is not None)
    first, count, rows, tiles, ends = expected_map(ids, experts, offset, tile)
    assert made.first.tolist() == first and made.count.tolist() == count and made.tiles.tolist() == [len(tiles)]
    most = most_tiles(ids.numel(), experts, tile)
    assert len(tiles) <= most == len(made.tile_expert)
    assert made.tile_expert.tolist() == tiles + [-1] * (most - len(tiles))
    assert made.tile_end[: len(tiles)].tolist() == ends
    assert made.row_pair[: len(rows)].tolist() == rows
    row_of = {pair: row for row, pair in enumerate(rows) if pair >= 0}
    assert made.pair_row.flatten().tolist() == [row_of.get(pair, -1) for pair in range(ids.numel())]
    return weights, made.pair_row >= 0


@pytest.mark.parametrize(
    "tokens, top_k, experts, offset, tile",
    [(1, 8, 32, 0, 16), (37, 5, 7, 3, 8), (600, 4, 5, 2, 16), (130, 1, 1, 0, 64), (9, 3, 40, 100, 128)],
)
def test_token_map(variant, device, tokens, top_k, experts, offset, tile):
    """Ids of -1, of other ranks' experts on both sides, repeated ones; 2400 pairs are counted in a launch apart."""
    ids = torch.randint(-1, experts + 2 * offset, (tokens, top_k), device=device, dtype=torch.int32)
    ids[:, -1] = ids[:, 0]
    check_map(ids, experts, offset, tile)
    check_map(ids.long(), experts, offset, tile)
    weights = torch.randn(tokens, top_k, device=device).bfloat16()
    packed = (ids << 16) | (weights.view(torch.int16).int() & 0xFFFF)
    unpacked, mapped = check_map(ids, experts, offset, tile, packed)
    assert_bitwise(unpacked[mapped], weights.float()[mapped])


def test_most_tiles_is_reached():
    for pairs, experts, tile in ((5, 8, 4), (100, 8, 16), (7, 3, 2), (64, 1, 16)):
        used = min(pairs, experts)
        # One pair more than whole tiles for all experts but one, the rest for that one.
        counts = [1] * used
        counts[0] += pairs - used
        assert sum(-(-count // tile) for count in counts) <= most_tiles(pairs, experts, tile)
    assert most_tiles(5, 8, 4) == 5 and most_tiles(64, 1, 16) == 4 and most_tiles(0, 8, 16) == 0


L, B = torch.zeros(3, 16), torch.zeros(16)
BAD_ROUTES = [
    (dict(routing_logits=torch.zeros(16)), "routing_logits"),
    (dict(routing_logits=L.double()), "routing_logits"),
    (dict(routing_logits=torch.zeros(1, 1025)), "routing_logits"),
    (dict(routing_method=Method.Unspecified), "routing_method"),
    (dict(routing_method=11), "routing_method"),
    (dict(top_k=0), "top_k"),
    (dict(top_k=17), "top_k"),
    (dict(routing_method=Method.Llama4, top_k=2), "top_k"),
    (dict(routing_bias=B[:8]), "routing_bias"),
    (dict(routing_method=Method.MiniMax2, routing_bias=B[:8]), "routing_bias"),
    (dict(routing_method=Method.MiniMax2, routing_bias=B.to("meta")), "routing_bias"),
    (dict(n_group=4, topk_group=2), "n_group"),
    (dict(routing_method=Method.DeepSeekV3, n_group=3, topk_group=1), "n_group"),
    (dict(routing_method=Method.DeepSeekV3, n_group=16, topk_group=1), "n_group"),
    (dict(routing_method=Method.DeepSeekV3, n_group=4, topk_group=5), "topk_group"),
    (dict(routing_method=Method.DeepSeekV3, topk_group=2), "topk_group"),
    (dict(routing_method=Method.DeepSeekV3, n_group=4, topk_group=1, top_k=5), "top_k"),
    (dict(num_fused_shared_experts=1), "num_fused_shared_experts"),
    (dict(routing_replay_out=torch.zeros(3, 2)), "routing_replay_out"),
    (dict(routing_replay_out=torch.zeros(2, 2, dtype=torch.int16)), "routing_replay_out"),
]


@pytest.mark.parametrize(("changed", "argument"), BAD_ROUTES, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_routes(changed, argument):
    good = dict(routing_logits=L, routing_bias=None, routing_method=Method.Default, top_k=2)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        route(**(good | changed))


BAD_DEEPSEEK = [
    (dict(backend="cuda"), "backend"),
    (dict(scores=torch.zeros(3)), "scores"),
    (dict(bias=B[:3]), "bias"),
    (dict(topk=9), "topk"),
    (dict(topk_values=torch.zeros(3, 1)), "topk_values"),
    (dict(topk_values=torch.zeros(2, 3).T), "topk_values"),
    (dict(topk_indices=torch.zeros(3, 2)), "topk_indices"),
]


@pytest.mark.parametrize(("changed", "argument"), BAD_DEEPSEEK, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_deepseek(changed, argument):
    ids = torch.zeros(3, 2, dtype=torch.int32)
    good = dict(scores=L, bias=B, n_group=4, topk_group=2, topk=2, routed_scaling_factor=1.0)
    good |= dict(topk_values=torch.zeros(3, 2), topk_indices=ids)
    if changed.get("topk"):
        good |= dict(topk_values=torch.zeros(3, 9), topk_indices=torch.zeros(3, 9, dtype=torch.int32))
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        fused_topk_deepseek(**(good | changed))


def test_the_other_name_of_deepseeks_routing():
    results = []
    for backend in ("default", "cake"):
        results.append((torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)))
        fused_topk_deepseek(L, B, 4, 2, 2, 1.0, *results[-1], backend=backend)
    assert_bitwise(results[1][0], results[0][0])
    assert_bitwise(results[1][1], results[0][1])


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        (dict(topk_ids=torch.zeros(3, 2)), "topk_ids"),
        (dict(topk_ids=torch.zeros(3, dtype=torch.int32)), "topk_ids"),
        (dict(topk_ids=torch.zeros(3, 2, dtype=torch.int64), packed=True), "topk_ids"),
        (dict(local_num_experts=0), "local_num_experts"),
        (dict(local_expert_offset=-1), "local_expert_offset"),
        (dict(tile=0), "tile"),
    ],
)
def test_bad_maps(changed, argument):
    good = dict(topk_ids=torch.zeros(3, 2, dtype=torch.int32), local_num_experts=4, local_expert_offset=0, tile=16)
    with pytest.raises(ValueError, match=f"^{argument}: got .*allowed: "):
        token_map(**(good | changed))


def test_is_a_registered_op():
    from flashinfer.fused_moe.routing import _route

    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    arguments = (L, None, ids, weights, None, [1, 1, 2, 0], 1.0, "logit", "softmax")
    torch.library.opcheck(_route.op, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("experts, groups, kept, k", [(256, 8, 4, 8), (384, 1, 1, 8), (512, 1, 1, 32)])
def test_real_shapes(device, experts, groups, kept, k):
    logits, bias = torch.randn(777, experts, device=device), torch.randn(experts, device=device) / 8
    ids, weights = route(logits, bias, Method.DeepSeekV3, k, n_group=groups, topk_group=kept)
    slow = route(logits.cpu(), bias.cpu(), Method.DeepSeekV3, k, n_group=groups, topk_group=kept)
    # Sums of sigmoids that differ in their last bit may rank otherwise: nearly all rows do not.
    same = (ids.cpu() == slow[0]).all(1)
    assert same.float().mean() > 0.98
    truth = weigh(logits.double(), ids, Method.DeepSeekV3)
    assert_close(weights, weigh(logits, ids, Method.DeepSeekV3), truth)
    check_map(ids, experts // 2, experts // 4, 64)
    check_map(ids[:16], experts, 0, 16)


@pytest.mark.gpu
def test_in_a_graph(device):
    logits = torch.randn(33, 128, device=device)
    ids, weights = route(logits, None, Method.Renormalize, 8)
    token_map(ids, 128, 0, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = route(logits, None, Method.Renormalize, 8)
        made, _ = token_map(ids, 128, 0, 16)
    logits.copy_(torch.randn(33, 128, device=device))
    graph.replay()
    eager = route(logits, None, Method.Renormalize, 8)
    assert_bitwise(ids, eager[0])
    assert_bitwise(weights, eager[1])
    rows = int(made.tiles) * 16
    again, _ = token_map(ids, 128, 0, 16)
    assert_bitwise(made.row_pair[:rows], again.row_pair[:rows])
    assert_bitwise(made.pair_row, again.pair_row)


def test_llama4_takes_a_bias_and_ranks_without_it(device):
    """As upstream, whose callers give one; a method that would rank by it otherwise refuses it."""
    logits, bias = torch.randn(5, 16, device=device), torch.full((16,), 100.0, device=device)
    bias[::2] = -100
    with_bias = route(logits, bias, Method.Llama4, 1)
    for given, expected in zip(with_bias, route(logits, None, Method.Llama4, 1)):
        assert_bitwise(given, expected)
    assert torch.equal(with_bias[0][:, 0].long(), logits.argmax(1))
    with pytest.raises(ValueError, match="^routing_bias"):
        route(logits, bias[:3], Method.Llama4, 1)
