"""Routing of tokens to experts and back: choosing, grouping by expert, and the weighted sum."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import check_apart, dtype_name, is_aligned, present, require, require_fit, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.compat.queries import answering
from flashinfer.ops.moe import finalize as finalize_room
from flashinfer.ops.moe import routing as room
from flashinfer.ops.moe.token_map import TokenMap, empty_map
from flashinfer.tllm_enums import RoutingMethodType

__all__ = ["finalize", "fused_topk_deepseek", "route", "token_map"]

MOST_EXPERTS, MOST_CHOICES = 1024, 32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# method -> what is ranked and what a weight is, as the room's Route says
_M = RoutingMethodType
_METHODS = {
    _M.Default: ("logit", "softmax"),
    _M.Renormalize: ("logit", "softmax_kept"),
    _M.DeepSeekV3: ("sigmoid", "sigmoid_sum"),
    _M.Llama4: ("logit", "sigmoid"),
    _M.RenormalizeNaive: ("logit", "softmax_kept"),
    _M.TopK: ("logit", "logit"),
    _M.SigmoidRenorm: ("sigmoid", "sigmoid_sum"),
    _M.MiniMax2: ("sigmoid", "sigmoid_sum"),
    _M.Sigmoid: ("sigmoid", "sigmoid"),
    _M.TopKSigmoid: ("logit", "sigmoid"),
}
# Those that have a bias and a factor of the weights. Callers hand both to every method, and others do not read them.
_BIASED = (_M.DeepSeekV3, _M.MiniMax2)


@answering("default", "cake")
@checked
@named(weights="topk_values", ids="topk_indices", replay="routing_replay_out")
def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    *,
    backend: str = "default",
) -> None:
    """DeepSeek-V3's choice of experts, without an auxiliary loss.

    Experts are ranked by ``sigmoid(scores) + bias``. A group of consecutive experts counts what its two best have
    together; the `topk` best experts of the `topk_group` best groups are chosen, of equal ones the lower index. A
    chosen expert's weight is ``sigmoid(scores)``, without the bias, over the sum of those chosen, times
    `routed_scaling_factor`.

    Parameters
    ----------
    scores : torch.Tensor
        Router logits [tokens, experts]; float32, bfloat16 or float16, any strides. Up to 1024 experts.
    bias : torch.Tensor
        [experts]; float32, bfloat16 or float16.
    n_group : int
        Groups: a divisor of experts, each of at least two. 1 is no grouping.
    topk_group : int
        Groups to choose from.
    topk : int
        Experts to choose: up to 32, and no more than `topk_group` groups have.
    routed_scaling_factor : float
        A factor of all weights.
    topk_values : torch.Tensor
        Receives the weights [tokens, topk], best-ranked first; float32, bfloat16 or float16.
    topk_indices : torch.Tensor
        Receives the experts [tokens, topk]; int32 or int64.
    launch_with_pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.
    routing_replay_out : torch.Tensor, optional
        int16 [at least tokens, topk]; receives the experts, too.
    backend : str
        "default" or "cake", which are the same.

    Returns
    -------
    None
        topk_values and topk_indices are written.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437

    Examples
    --------
    >>> import torch, flashinfer
    >>> scores, bias = torch.tensor([[0.0, 2.0, 1.0, -1.0]]), torch.zeros(4)
    >>> weights, experts = torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int32)
    >>> flashinfer.fused_moe.fused_topk_deepseek(scores, bias, 1, 1, 2, 1.0, weights, experts)
    >>> experts.tolist(), weights.sum().item()
    ([[1, 2]], 1.0)
    """
    require(backend in ("default", "cake"), "backend", repr(backend), "'default', 'cake'")
    _check_logits("scores", scores)
    shape = (len(scores), topk)
    require_fit("topk_values", topk_values, topk_values.shape == shape, f"[tokens, topk], {shape}", *_DTYPES)
    require(topk_indices.shape == shape, "topk_indices", tuple(topk_indices.shape), f"[tokens, topk], {shape}")
    require(topk_indices.dtype in (torch.int32, torch.int64), "topk_indices", topk_indices.dtype, "int32, int64")
    for name, tensor in (("topk_values", topk_values), ("topk_indices", topk_indices)):
        require(topk == 1 or tensor.stride(1) == 1, name, f"strides {tensor.stride()}", "contiguous rows")
    _check_bias("bias", bias, scores)
    groups, kept = _check_groups(n_group, topk_group, scores.shape[1])
    _check_top_k("topk", topk, scores.shape[1] // groups * kept)
    replay = check_replay(routing_replay_out, shape)
    same_device(scores=scores, bias=bias, topk_values=topk_values, topk_indices=topk_indices, routing_replay_out=replay)
    numbers = [groups, kept, topk, 0]
    scale = float(routed_scaling_factor)
    _route(scores, bias, topk_indices, topk_values, replay, numbers, scale, "sigmoid", "sigmoid_sum")


@checked
@named(routing_method_type="routing_method")
def route(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    routing_method: RoutingMethodType | int,
    top_k: int,
    *,
    n_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float | None = None,
    norm_topk_prob: bool = True,
    num_fused_shared_experts: int = 0,
    routing_replay_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of each token, by any method.

    ================  ===================  ====================================================================
    method            ranked               weight
    ================  ===================  ====================================================================
    Default           logit                softmax over all experts
    Renormalize       logit                softmax over the chosen ones
    RenormalizeNaive  logit                softmax over all, divided by the sum of the chosen: as Renormalize
    TopK              logit                logit
    Llama4            logit, top_k is 1    sigmoid
    TopKSigmoid       logit                sigmoid
    Sigmoid           sigmoid              sigmoid
    SigmoidRenorm     sigmoid              sigmoid, divided by the sum of the chosen
    MiniMax2          sigmoid + bias       sigmoid, divided by the sum of the chosen
    DeepSeekV3        sigmoid + bias,      sigmoid, divided by the sum of the chosen
                      the best groups
    ================  ===================  ====================================================================

    Of equally ranked experts the lower index is chosen. Logits rank as their softmax does, and where it rounds to
    equal probabilities or to zero, better. The sigmoid is ranked as float32 has it: above logits of 17 it is 1.

    Parameters
    ----------
    routing_logits : torch.Tensor
        [tokens, experts]; float32, bfloat16 or float16, any strides. Up to 1024 experts.
    routing_bias : torch.Tensor, optional
        [experts]; float32, bfloat16 or float16. Of DeepSeekV3 and MiniMax2. As upstream, the other methods do not read
        it.
    routing_method : RoutingMethodType or int
        Any but Unspecified.
    top_k : int
        Experts to choose: up to 32.
    n_group, topk_group : int, optional
        For DeepSeekV3: groups of consecutive experts, a divisor of experts, and how many of them are chosen from, by
        the sum of their two best. None, 0 and 1 are no groups.
    routed_scaling_factor : float, optional
        A factor of all weights of DeepSeekV3 and MiniMax2; None is 1. As upstream, the other methods do not read it.
    norm_topk_prob : bool
        False: SigmoidRenorm does not divide by the sum of the chosen. As upstream, the other methods do not read it.
    num_fused_shared_experts : int
        Experts that every token has beside the chosen, with weight 1: `experts`, `experts` + 1 and so on. For
        DeepSeekV3 only.
    routing_replay_out : torch.Tensor, optional
        int16 [at least tokens, top_k]; receives the chosen experts, without shared ones.

    Returns
    -------
    ids : torch.Tensor
        int32 [tokens, top_k + num_fused_shared_experts], best-ranked first.
    weights : torch.Tensor
        float32, of the same shape. NaN logits give NaN weights, and in their own row only.

    Raises
    ------
    ValueError
        A method, shape, dtype, device or number other than the above.
    """
    _check_logits("routing_logits", routing_logits)
    require(routing_method in _METHODS, "routing_method_type", routing_method, f"{', '.join(m.name for m in _METHODS)}")
    method = RoutingMethodType(routing_method)
    rank, weight = _METHODS[method]
    experts, shared = routing_logits.shape[1], num_fused_shared_experts
    if method == _M.SigmoidRenorm and not norm_topk_prob:
        weight = "sigmoid"
    if routing_bias is not None:
        _check_bias("routing_bias", routing_bias, routing_logits)
        routing_bias = routing_bias if method in _BIASED else None
    grouped = method == _M.DeepSeekV3
    require(grouped or n_group in (None, 0, 1), "n_group", n_group, f"None, 0 or 1 with {method.name}")
    require(shared >= 0 and (grouped or not shared), "num_fused_shared_experts", shared, "0 or, with DeepSeekV3, more")
    groups, kept = _check_groups(n_group, topk_group, experts)
    _check_top_k("top_k", top_k, 1 if method == _M.Llama4 else experts // groups * kept)
    require(top_k + shared <= MOST_CHOICES, "num_fused_shared_experts", shared, f"{MOST_CHOICES} with the chosen")
    tokens, device = len(routing_logits), routing_logits.device
    replay = check_replay(routing_replay_out, (tokens, top_k))
    same_device(routing_logits=routing_logits, routing_bias=routing_bias, routing_replay_out=replay)
    ids = torch.empty(tokens, top_k + shared, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, top_k + shared, dtype=torch.float32, device=device)
    scale = 1.0 if routed_scaling_factor is None or method not in _BIASED else float(routed_scaling_factor)
    numbers = [groups, kept, top_k, shared]
    _route(routing_logits, routing_bias, ids, weights, replay, numbers, scale, rank, weight)
    return ids, weights


def token_map(
    topk_ids: torch.Tensor, local_num_experts: int, local_expert_offset: int, tile: int, packed: bool = False
) -> tuple[TokenMap, torch.Tensor | None]:
    """The rows in which this rank's experts have their tokens; `flashinfer.ops.moe.token_map` states the layout.

    Parameters
    ----------
    topk_ids : torch.Tensor
        [tokens, top_k]; int32 or int64. A negative id, or one of another rank's experts, has no row; a repeated one has
        a row each time.
    local_num_experts, local_expert_offset : int
        This rank's experts are those from the offset on.
    tile : int
        Rows of a tile; each expert's rows are padded to a multiple.
    packed : bool
        `topk_ids` is int32 with an expert in each upper half, and its weight as bfloat16 in the lower.

    Returns
    -------
    TokenMap
    torch.Tensor or None
        float32 [tokens, top_k] of packed ids, written where there is a row.

    Raises
    ------
    ValueError
        A shape, dtype or number other than the above.
    """
    require(topk_ids.dim() == 2, "topk_ids", tuple(topk_ids.shape), "[tokens, top_k]")
    allowed = (torch.int32,) if packed else (torch.int32, torch.int64)
    require(topk_ids.dtype in allowed, "topk_ids", topk_ids.dtype, "int32" if packed else "int32, int64")
    require(topk_ids.numel() < 1 << 30, "topk_ids", tuple(topk_ids.shape), "fewer than 2^30 elements")
    require(1 <= local_num_experts <= MOST_EXPERTS, "local_num_experts", local_num_experts, f"1 to {MOST_EXPERTS}")
    require(local_expert_offset >= 0, "local_expert_offset", local_expert_offset, "0 or more")
    require(tile >= 1, "tile", tile, "1 or more")
    topk_ids = topk_ids.contiguous()
    ids = "packed" if packed else dtype_name(topk_ids.dtype)
    bins = max(_power_of_two(local_num_experts), 32)
    problem = room.Map(ids, bins, few=topk_ids.numel() <= room.config.FEW)
    tokens, top_k = topk_ids.shape
    out = empty_map(tokens, top_k, local_num_experts, tile, topk_ids.device)
    weights = torch.empty(topk_ids.shape, dtype=torch.float32, device=topk_ids.device) if packed else None
    room.token_map(problem, topk_ids.device).run(topk_ids, local_expert_offset, tile, out, weights)
    return out, weights


def finalize(y: torch.Tensor, pair_row: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write to each token the weighted sum of its rows.

    Parameters
    ----------
    y : torch.Tensor
        [rows, hidden]; float32, bfloat16 or float16, contiguous rows.
    pair_row : torch.Tensor
        int32 [tokens, top_k]: rows of y; a negative one gives nothing. Of a TokenMap.
    weights : torch.Tensor, optional
        [tokens, top_k]; float32, bfloat16 or float16. None is 1.
    out : torch.Tensor
        [tokens, hidden]; float32, bfloat16 or float16, contiguous rows. Summed in float32 in the order of pair_row, and
        rounded once; zero where no row is.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.
    """
    of_rows = f"{pair_row.dtype} {tuple(pair_row.shape)}"
    require(pair_row.dim() == 2 and pair_row.dtype == torch.int32, "pair_row", of_rows, "int32 [tokens, top_k]")
    tokens, top_k = pair_row.shape
    require(out.dim() == 2 and len(out) == tokens, "out", tuple(out.shape), f"[{tokens}, hidden]")
    require(y.dim() == 2 and y.shape[1] == out.shape[1], "y", tuple(y.shape), f"[rows, {out.shape[1]}]")
    require(1 <= top_k <= MOST_CHOICES, "pair_row", tuple(pair_row.shape), f"1 to {MOST_CHOICES} choices")
    for name, tensor in (("y", y), ("out", out)) if weights is None else (("y", y), ("out", out), ("weights", weights)):
        require(tensor.dtype in _DTYPES, name, tensor.dtype, "float32, bfloat16, float16")
        contiguous = tensor.shape[1] == 1 or tensor.stride(1) == 1
        require(contiguous, name, f"strides {tensor.stride()}", "contiguous rows")
    if weights is not None:
        fits = weights.shape == pair_row.shape
        require(fits, "weights", tuple(weights.shape), f"{tuple(pair_row.shape)}, the shape of pair_row")
    same_device(y=y, pair_row=pair_row, weights=weights, out=out)
    if out.numel() == 0:
        return
    least = min(y.element_size(), out.element_size())
    problem = finalize_room.Problem(
        dtype=dtype_name(y.dtype),
        out=dtype_name(out.dtype),
        weights="" if weights is None else dtype_name(weights.dtype),
        together=min(_power_of_two(top_k), finalize_room.MOST_TOGETHER),
        aligned=out.shape[1] * least % 16 == 0 and is_aligned(y, out),
    )
    pair_row = pair_row if top_k == 1 or pair_row.stride(1) == 1 else pair_row.contiguous()
    finalize_room.finalize(problem, y.device).run(y, pair_row, weights, out)


@custom_op("flashinfer::moe_route", mutates_args=("ids", "weights", "replay"))
def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    replay: torch.Tensor | None,
    numbers: list[int],
    scale: float,
    rank: str,
    weight: str,
) -> None:
    """numbers : groups, groups kept, experts chosen and shared ones."""
    if len(logits) == 0:
        return
    groups, kept, top_k, shared = numbers
    problem = room.Route(
        dtype=dtype_name(logits.dtype),
        rank=rank,
        weight=weight,
        bias="" if bias is None else dtype_name(bias.dtype),
        groups=_power_of_two(groups),
        size=max(_power_of_two(logits.shape[1] // groups), 1 if groups > 1 else 8),
        slots=_power_of_two(top_k + shared),
        ids=dtype_name(ids.dtype),
        weights=dtype_name(weights.dtype),
        replay=replay is not None,
    )
    bias = None if bias is None else bias.contiguous()
    more = () if replay is None else (replay,)
    room.route(problem, logits.device).run(logits, bias, groups, kept, top_k, shared, scale, ids, weights, *more)


def _power_of_two(n: int) -> int:
    """The smallest power of two from n on."""
    return 1 << (n - 1).bit_length()


def _check_logits(name, logits) -> None:
    require_fit(name, logits, logits.dim() == 2, "[tokens, experts]", *_DTYPES)
    require(1 <= logits.shape[1] <= MOST_EXPERTS, name, tuple(logits.shape), f"1 to {MOST_EXPERTS} experts")


def _check_bias(name, bias, logits) -> None:
    experts = logits.shape[1]
    require_fit(name, bias, bias.shape == (experts,), f"[{experts}], the experts", *_DTYPES)


def _check_groups(n_group, topk_group, experts) -> tuple[int, int]:
    """Groups, and how many are chosen from."""
    groups = n_group or 1
    if groups == 1:
        require(topk_group in (None, 0, 1), "topk_group", topk_group, "None, 0 or 1 without groups")
        return 1, 1
    fits = 1 < groups <= experts // 2 and experts % groups == 0
    require(fits, "n_group", n_group, f"a divisor of {experts} experts, with two or more in each group")
    topk_group = present("topk_group", topk_group, f"1 to {groups}")
    require(1 <= topk_group <= groups, "topk_group", topk_group, f"1 to {groups}")
    return groups, topk_group


def _check_top_k(name, top_k, most) -> None:
    most = min(most, MOST_CHOICES)
    require(1 <= top_k <= most, name, top_k, f"1 to {most}")


def check_replay(replay, shape):
    if replay is None:
        return None
    tokens, top_k = shape
    fits = replay.dim() == 2 and len(replay) >= tokens and replay.shape[1] == top_k
    require_fit("routing_replay_out", replay, fits, f"[{tokens} or more, {top_k}]", torch.int16)
    require(top_k == 1 or replay.stride(1) == 1, "routing_replay_out", f"strides {replay.stride()}", "contiguous rows")
    check_apart([("routing_replay_out", replay)])
    return replay[:tokens]
