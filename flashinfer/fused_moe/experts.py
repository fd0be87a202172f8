"""What every call of a mixture of experts runs: map, product, activation, product, weighted sum; and their checks."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import NamedTuple

import torch

from flashinfer._core.checks import dtype_name, is_aligned, present, require, same_device, torch_dtype
from flashinfer._core.custom_op import custom_op
from flashinfer.fused_moe import routing
from flashinfer.ops import layouts, narrow
from flashinfer.ops.formats import ELEMENTS
from flashinfer.ops.moe import experts as room
from flashinfer.ops.moe.experts import fragments
from flashinfer.ops.moe.token_map import TokenMap, most_tiles
from flashinfer.tllm_enums import ActivationType

_ACTS = {
    ActivationType.Gelu: "gelu",
    ActivationType.Relu: "relu",
    ActivationType.Silu: "silu",
    ActivationType.Swiglu: "swiglu",
    ActivationType.SwigluBias: "swiglu",
    ActivationType.Geglu: "geglu",
    ActivationType.GegluTanh: "geglu_tanh",
    ActivationType.SwigluStep: "swiglu_step",
    ActivationType.Situ: "situ",
    ActivationType.Relu2: "relu2",
    ActivationType.ClampedRelu2: "clamped_relu2",
    ActivationType.Identity: "",
}
# The limit of SwigluStep where none is given: Step-3.5's.
STEP_LIMIT = 7.0
# Formats between the products that are e4m3 without factors of blocks.
_OF_FP8 = ("fp8", "fp8_rows", "fp8_columns")
# Programs of 128 rows of weights below which tiles are cut in two: about as many as a chip has multiprocessors.
_FEW = 128


class Tokens(NamedTuple):
    """Rows [tokens, .], one for each token, their format, and their scale factors in a layout; the argument's name.

    row_scale : float32 [tokens], a factor of each row; NVFP4 between the products has scales of its rows, too.
    of_pairs : codes has a row for each pair of a token and its expert, in the order of the pairs.
    """

    codes: torch.Tensor
    encoding: str
    scale: torch.Tensor | None = None
    layout: str = "linear"
    row_scale: torch.Tensor | None = None
    name: str = "hidden_states"
    of_pairs: bool = False


class Weight(NamedTuple):
    """An expert's weights: stored, with their format, scale factors in a layout, bias, and the places of rows.

    channels : float32 [experts, rows], a factor of each row, in their order.

    `paired`, `shuffle`, `block` and `fragments` are those of the room's Problem; `name` is the argument's.
    """

    name: str
    codes: torch.Tensor
    encoding: str
    scale: torch.Tensor | None = None
    layout: str = "linear"
    bias: torch.Tensor | None = None
    paired: int = 0
    shuffle: int = 0
    block: int = 0
    channels: torch.Tensor | None = None
    fragments: bool = False


class Numbers(NamedTuple):
    """alpha, beta and limit of an activation without tensors, as the room's Finish has them."""

    alpha: float = 0.0
    beta: float = 0.0
    limit: float = 0.0


class Activation(NamedTuple):
    """act : a name of the room's. alpha, beta, limit : float32 [experts]. numbers : where there are no tensors.

    by_number : those of "A", "B" and "L" whose numbers the activation has.
    """

    act: str
    alpha: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    numbers: Numbers = Numbers()
    by_number: str = ""


class Between(NamedTuple):
    """The rows between the products: their format, NVFP4's global scale, and factors of both products.

    global_scale : where rows have scales of their own, times a row's largest magnitude its scale.

    scale, scale_out : of the first, as the room's Problem has them. second : of the second.

    encoding : a format of the room's; or e4m3 without factors as "fp8", the first product's own result, as "fp8_rows",
    each row over its largest magnitude, or as "fp8_columns", times `columns`, float32 [1 or experts, n].
    """

    encoding: str = ""
    global_scale: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    scale_out: torch.Tensor | None = None
    ratio: bool = False
    second: torch.Tensor | None = None
    columns: torch.Tensor | None = None


class Routed(NamedTuple):
    """ids [tokens, top_k], weights or None of packed ids; this rank's experts. on_input : weights scale the input.

    delta : [tokens, top_k, n1], added to the first product of each pair: adapters'.

    by_logits : weights are this call's, which unfinalized results have as bfloat16.

    ids_name, weights_name : the arguments.
    """

    ids: torch.Tensor
    weights: torch.Tensor | None
    offset: int
    experts: int
    on_input: bool = False
    delta: torch.Tensor | None = None
    by_logits: bool = False
    ids_name: str = "topk_ids"
    weights_name: str = "topk_weights"


class Layer(NamedTuple):
    """A whole call: dtype : name of the result's. tile : rows of a tile; 0 leaves it to `tile_of`."""

    tokens: Tokens
    routed: Routed
    first: Weight
    activation: Activation
    between: Between
    second: Weight
    dtype: str
    tile: int


def activation_of(argument: str, value, **given) -> tuple[str, bool]:
    """The room's name of an activation, and whether it is gated. given : tensors of SwiGLU and SiTU alone, by name."""
    known = [int(kind) for kind in _ACTS]
    fits = isinstance(value, Integral) and int(value) in known
    require(fits, argument, repr(value), ", ".join(f"{kind.name} ({int(kind)})" for kind in _ACTS))
    kind = ActivationType(int(value))
    act = _ACTS[kind]
    for name, tensor in given.items():
        takes = act in ("swiglu", "situ") or (act == "swiglu_step" and "limit" in name)
        require(tensor is None or takes, name, "a tensor", f"None with {kind.name}")
    return act, kind.is_gated


def run(
    tokens: Tokens, routed: Routed, first: Weight, activation: Activation, between: Between, second: Weight,
    out: torch.Tensor, do_finalize: bool = True, tile: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """[out], or without finalize [rows, weights, row of each pair]. `out` gives dtype and shape either way.

    With a delta also what the activation gave in these rows, in the end, and the row of each pair in both cases.

    tile : rows of a tile; 0 leaves it to `tile_of`.
    """
    _check(tokens, routed, first, activation, between, second, out)
    layer = Layer(tokens, routed, first, activation, between, second, dtype_name(out.dtype), tile)
    if do_finalize and routed.delta is None:
        _experts(layer, out)
        return [out]
    if do_finalize:
        return [out, *_with_delta(layer, out)]
    rows, pair_row, *activated = _unfinalized(layer)
    return [rows, _weights_of(routed), pair_row, *activated]


def _weights_of(routed: Routed) -> torch.Tensor:
    """Weights beside an unfinalized result: those given, or else as bfloat16."""
    if routed.weights is not None:
        return routed.weights.to(torch.bfloat16) if routed.by_logits else routed.weights
    # The lower half of each id, which is the first of its two in memory.
    return routed.ids.contiguous().view(torch.int16)[:, ::2].contiguous().view(torch.bfloat16)


def tile_of(pairs: int, experts: int, encoding: str) -> int:
    """Rows of a tile: so many that most experts have one tile, and read their weights once, while rows are few.

    16 is the least of a tensor core. H100: of larger tiles more is padding, which with FP8 rows costs more than smaller
    products do until an expert has about 192 rows; with others until about 96.
    """
    mean = -(-pairs // max(experts, 1))
    most = 192 if encoding.startswith("fp8") else 96
    return 16 if mean <= 10 else 32 if mean <= 40 else 64 if mean <= most else 128


@custom_op("flashinfer::moe_experts", mutates_args=("out",))
def _experts(layer: Layer, out: torch.Tensor) -> None:
    _finalize(layer, *_rows(layer)[:3], out)


def _finalize(layer: Layer, rows, weights, token_map, out) -> None:
    weights = None if layer.routed.on_input else weights
    routing.finalize(rows[:, : out.shape[1]], token_map.pair_row, weights, out)


def _like_activated(layer: Layer):
    ids, first = layer.routed.ids, layer.first
    n, _ = room.extents(first.codes, first.encoding, first.block)
    shape = _most_rows(layer), n // 2 if layer.activation.act in room.GATED else n
    return ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(shape, dtype=torch_dtype(layer.dtype))


@custom_op(
    "flashinfer::moe_experts_with_delta", mutates_args=("out",), fake=lambda layer, out: _like_activated(layer)
)
def _with_delta(layer: Layer, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each pair, and what the activation gave."""
    rows, weights, token_map, activated = _rows(layer)
    _finalize(layer, rows, weights, token_map, out)
    return token_map.pair_row.view(-1), activated


def _like_unfinalized(layer: Layer):
    ids = layer.routed.ids
    result = ids.new_empty(_most_rows(layer), _columns(layer.second), dtype=torch_dtype(layer.dtype))
    activated = [] if layer.routed.delta is None else _like_activated(layer)[1:]
    return [result, ids.new_empty(ids.numel(), dtype=torch.int32), *activated]


@custom_op("flashinfer::moe_experts_unfinalized", fake=_like_unfinalized)
def _unfinalized(layer: Layer) -> list[torch.Tensor]:
    """Rows, the row of each pair, and with a delta what the activation gave."""
    rows, _, token_map, activated = _rows(layer)
    return [rows, token_map.pair_row.view(-1), *([] if layer.routed.delta is None else [activated])]


def _tile(layer: Layer) -> int:
    return layer.tile or tile_of(layer.routed.ids.numel(), layer.routed.experts, layer.tokens.encoding)


def _most_rows(layer: Layer) -> int:
    tile = _tile(layer)
    return most_tiles(layer.routed.ids.numel(), layer.routed.experts, tile) * tile


def _columns(second: Weight) -> int:
    """Columns of the second product; a result without its padding has fewer."""
    return second.codes.shape[2 if second.block else 1]


def _rows(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, TokenMap, torch.Tensor]:
    """Rows of the second product, weights of the pairs, the map of the rows, and what the activation gave in them."""
    tokens, routed, first, activation, between, second, dtype, _ = layer
    x, row_scale, device = tokens.codes, tokens.row_scale, tokens.codes.device
    pairs, tile = routed.ids.numel(), _tile(layer)
    packed = routed.weights is None
    token_map, unpacked = routing.token_map(routed.ids, routed.experts, routed.offset, tile, packed=packed)
    weights = present("weights", unpacked if routed.weights is None else routed.weights)
    rows = token_map.row_pair.numel()
    factor = row_scale
    if routed.on_input:
        factor = weights if row_scale is None else (weights * row_scale[:, None]).contiguous()
    limits = (("a", activation.alpha), ("b", activation.beta), ("l", activation.limit))
    problem1 = room.Problem(
        rows=tokens.encoding, weights=first.encoding, out="fp8" if between.encoding == "fp8" else dtype, tile=tile,
        gather=True, act=activation.act, paired=first.paired, shuffle=first.shuffle, block=first.block,
        row_layout=tokens.layout, weight_layout=first.layout, fragments=first.fragments,
        bias="" if first.bias is None else dtype_name(first.bias.dtype, f"{first.name}_bias"),
        scale="" if between.scale is None else "tensor", channels=first.channels is not None,
        scale_out="" if between.scale_out is None else "ratio" if between.ratio else "tensor",
        shape="".join(name for name, t in limits if t is not None) or activation.by_number,
        weighted="pair" if routed.on_input else "row" if row_scale is not None else "",
        delta="" if routed.delta is None else dtype_name(routed.delta.dtype),
    )  # fmt: skip
    weights1 = room.Weights(first.codes, first.scale, first.bias, first.channels)
    weights2 = room.Weights(second.codes, second.scale, second.bias, second.channels)
    n1, _ = room.extents(weights1.codes, problem1.weights, problem1.block)
    between_dtype = torch.float8_e4m3fn if between.encoding == "fp8" else torch_dtype(dtype)
    columns = n1 // 2 if activation.act in room.GATED else n1
    middle = torch.empty(rows, columns, dtype=between_dtype, device=device)
    problem1 = _fitted(problem1, x, weights1, pairs)
    numbers = activation.numbers
    finish = room.Finish(
        scale=between.scale, scale_out=between.scale_out, alpha=activation.alpha, beta=activation.beta,
        limit=activation.limit, weight=factor, numbers=(numbers.alpha, numbers.beta, numbers.limit),
        delta=routed.delta,
    )  # fmt: skip
    given = room.Rows(x, tokens.scale, 1 if tokens.of_pairs else routed.ids.shape[1])
    room.product(problem1, device).run(given, weights1, finish, token_map, middle)
    activated = middle if routed.delta is None else _unscaled(middle, between, token_map, tile)
    own = between.encoding == "fp8_rows" or row_scale is not None and between.encoding == "nvfp4"
    row_scale = torch.empty(rows, dtype=torch.float32, device=device) if own else None
    middle, factors = _quantized(middle, between, token_map, tile, row_scale)
    problem2 = room.Problem(
        rows="fp8" if between.encoding in _OF_FP8 else between.encoding or dtype, weights=second.encoding, out=dtype,
        tile=tile, shuffle=second.shuffle, block=second.block, weight_layout=second.layout, fragments=second.fragments,
        bias="" if second.bias is None else dtype_name(second.bias.dtype, f"{second.name}_bias"),
        scale="" if between.second is None else "tensor", channels=second.channels is not None,
        weighted="" if row_scale is None else "row",
    )  # fmt: skip
    out = torch.empty(rows, _columns(second), dtype=torch_dtype(dtype), device=device)
    problem2 = _fitted(problem2, middle, weights2, pairs)
    finish = room.Finish(scale=between.second, weight=row_scale)
    room.product(problem2, device).run(room.Rows(middle, factors), weights2, finish, token_map, out)
    return out, weights, token_map, activated


def _unscaled(middle, between: Between, token_map: TokenMap, tile: int) -> torch.Tensor:
    """What the activation gave, without the factor that its result has for the format between the products."""
    if between.scale_out is None:
        return middle
    factor = between.scale_out
    if between.ratio and between.scale is not None:
        factor = factor / between.scale
    row = torch.arange(len(middle), device=middle.device)
    expert = token_map.tile_expert[row // tile].clamp(min=0) if len(factor) > 1 else row.new_zeros(len(middle))
    return (middle.float() / factor[expert][:, None]).to(middle.dtype)


def _fitted(problem: room.Problem, x, weights: room.Weights, pairs: int) -> room.Problem:
    """The problem with what depends on addresses, lengths and the number of rows."""
    n, k = room.extents(weights.codes, problem.weights, problem.block)
    experts = min(pairs, len(weights.codes))
    few = experts * -(-n // 128) < _FEW
    aligned = is_aligned(x, weights.codes) and x.shape[1] * x.element_size() % 16 == 0
    stored = weights.codes.shape[-1] * weights.codes.element_size()
    aligned = aligned and stored % 16 == 0 and n % 32 == 0
    # Halves of gated weights are whole blocks of factors, or whole tiles.
    tile = 128 if problem.rows == "fp8_block" else fragments.SIDE if problem.fragments else 1
    whole = problem.act not in room.GATED or n // 2 % tile == 0
    full = problem.tile < room.config.SM90_TILE or room.config.is_full(problem.rows, pairs, len(weights.codes))
    return replace(problem, aligned=aligned, experts="few" if few else "many", whole=whole, full=full)


def quantized_tokens(x, encoding: str, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the input in a format with scale factors, for calls that quantise it themselves."""
    codes, factors = _for_codes(x, encoding)
    _quantize(x, global_scale, codes, factors, encoding)
    return codes if encoding == "nvfp4" else codes.view(torch.float8_e4m3fn), factors


@custom_op("flashinfer::moe_quantize", mutates_args=("codes", "factors"))
def _quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None, codes: torch.Tensor, factors: torch.Tensor, encoding: str
) -> None:
    _run_quantize(x, encoding, global_scale, None, 0, codes, factors)


def tokens_over_rows(x) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as e4m3 over scales of their own, float32 [rows]."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    row_scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _quantize_over_rows(x, codes, row_scale)
    return codes.view(torch.float8_e4m3fn), row_scale


@custom_op("flashinfer::moe_quantize_over_rows", mutates_args=("codes", "row_scale"))
def _quantize_over_rows(x: torch.Tensor, codes: torch.Tensor, row_scale: torch.Tensor) -> None:
    if len(x):
        _run_quantize(x, "fp8", _over_largest(x), None, 0, codes, None, row_scale)


def _over_largest(x) -> torch.Tensor:
    return torch.full((1,), 1 / ELEMENTS["fp8e4nv"].largest, dtype=torch.float32, device=x.device)


def _quantized(x, between: Between, token_map: TokenMap, tile: int, row_scale=None):
    """Rows of the map in the format between the products; "", "bf16" and "fp8" are as they are."""
    encoding = between.encoding
    if encoding == "fp8_columns":
        row = torch.arange(len(x), device=x.device)
        columns = present("quant_scales: a2", between.columns)
        expert = token_map.tile_expert[row // tile].clamp(min=0) if len(columns) > 1 else row.new_zeros(1)
        return narrow.to_fp8(x.float() * columns[expert], torch.float8_e4m3fn), None
    if encoding == "fp8_rows":
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        _run_quantize(x, "fp8", _over_largest(x), token_map, tile, codes, None, row_scale)
        return codes.view(torch.float8_e4m3fn), None
    if encoding not in ("fp8_block", "mxfp8", "nvfp4"):
        return x, None
    codes, factors = _for_codes(x, encoding)
    _run_quantize(x, encoding, between.global_scale, token_map, tile, codes, factors, row_scale)
    return codes if encoding == "nvfp4" else codes.view(torch.float8_e4m3fn), factors


def _for_codes(x, encoding: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, n = x.shape
    dtype = torch.float32 if encoding == "fp8_block" else torch.uint8
    codes = torch.empty(rows, n // 2 if encoding == "nvfp4" else n, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(rows, -(-n // room.WIDTH[encoding]), dtype=dtype, device=x.device)


def _run_quantize(x, encoding, global_scale, token_map, tile, codes, factors, row_scale=None) -> None:
    aligned = is_aligned(x) and x.shape[1] * x.element_size() % 16 == 0
    scaled = global_scale is not None
    problem = room.Quantize(encoding, dtype_name(x.dtype), tile, scaled, row_scale is not None, aligned)
    room.quantize(problem, x.device).run(x, global_scale, token_map, codes, factors, row_scale)


def expert_factors(name: str, scale, experts: int, n: int, blocks: int, layout: str) -> torch.Tensor:
    """Scale factors of a byte of weights [experts, .]: [experts, n, blocks], or flat for each expert if tiled."""
    high, wide = layouts.padded(n, blocks, layout)
    fits = scale.shape[:1] == (experts,) and scale.is_contiguous()
    fits = fits and layouts.holds(scale, n, blocks, layout, experts)
    allowed = f"{high} x {wide} bytes for each of {experts} experts, contiguous: {n} rows of {blocks}, {layout}"
    require(fits, name, f"{scale.dtype} {tuple(scale.shape)}", allowed)
    scale = scale.view(torch.uint8)
    return scale.view(experts, n, blocks) if layout == "linear" else scale.view(experts, high * wide)


def per_expert(name: str, value, experts: int, device, one: bool = False) -> torch.Tensor | None:
    """A float32 vector with an element for each expert, or, if `one` allows it, for all."""
    if value is None:
        return None
    require(isinstance(value, torch.Tensor), name, type(value).__name__, "a float32 tensor")
    require(value.dtype == torch.float32, name, value.dtype, "float32")
    sizes = (1, experts) if one else (experts,)
    require(value.numel() in sizes, name, tuple(value.shape), " or ".join(f"[{size}]" for size in sizes))
    require(value.device == device, name, f"a tensor on {value.device}", f"{device}, where the rows are")
    return value.reshape(-1).contiguous()


def result(name: str, output, tokens: int, hidden: int, dtype, device) -> torch.Tensor:
    """The caller's tensor for the result, or a new one."""
    if output is None:
        return torch.empty(tokens, hidden, dtype=dtype, device=device)
    require(output.shape == (tokens, hidden), name, tuple(output.shape), f"[{tokens}, {hidden}]")
    require(output.dtype == dtype, name, output.dtype, str(dtype))
    require(hidden == 1 or output.stride(1) == 1, name, f"strides {output.stride()}", "contiguous rows")
    return output


def _check(tokens, routed, first, activation, between, second, out) -> None:
    x, ids = tokens.codes, routed.ids
    rows, ids_name, weights_name = tokens.name, routed.ids_name, routed.weights_name
    require(x.dim() == 2, rows, tuple(x.shape), "[tokens, hidden]")
    require(x.stride(1) == 1 or x.shape[1] == 1, rows, f"strides {x.stride()}", "contiguous rows")
    fits = ids.dim() == 2 and (ids.numel() if tokens.of_pairs else len(ids)) == len(x)
    # A size in a text that is made is one that torch.compile makes a graph for.
    got = f"{len(ids)} rows" if routed.by_logits and not fits else tuple(ids.shape)
    require(fits, ids_name, got, f"[tokens, top_k], a row for each token of {rows}")
    fits = 1 <= ids.shape[1] <= routing.MOST_CHOICES
    require(fits, ids_name, tuple(ids.shape), f"1 to {routing.MOST_CHOICES} experts of each token")
    if routed.weights is not None:
        require(routed.weights.shape == ids.shape, weights_name, tuple(routed.weights.shape), f"{tuple(ids.shape)}")
    same_device(
        **{rows: x, f"{rows}_scale": tokens.scale, ids_name: ids, weights_name: routed.weights, "output": out},
        gemm1_lora_delta=routed.delta,
        **{weight.name: weight.codes for weight in (first, second)},
        **{f"{weight.name}_scale": weight.scale for weight in (first, second)},
        **{f"{weight.name}_bias": weight.bias for weight in (first, second)},
        **{f"{weight.name}_channels": weight.channels for weight in (first, second)},
        gemm1_alpha=activation.alpha, gemm1_beta=activation.beta, gemm1_clamp_limit=activation.limit,
    )  # fmt: skip
    shapes = []
    for weight in (first, second):
        dims = 4 if weight.block else 3
        shape = tuple(weight.codes.shape)
        require(len(shape) == dims, weight.name, shape, f"{dims} dimensions")
        require(len(weight.codes) == routed.experts, weight.name, shape, f"{routed.experts} experts, this rank's")
        rows = weight.codes.stride(-1) == 1 and (not weight.block or weight.codes.stride(2) == weight.block)
        require(rows, weight.name, f"strides {weight.codes.stride()}", "contiguous rows")
        shapes.append(room.extents(weight.codes, weight.encoding, weight.block))
        if weight.shuffle:
            fits = shapes[-1][0] % weight.shuffle == 0
            require(fits, weight.name, shape, f"a multiple of {weight.shuffle} rows, as they are shuffled")
        if weight.bias is not None:
            expected = (routed.experts, shapes[-1][0])
            require(weight.bias.shape == expected, f"{weight.name}_bias", tuple(weight.bias.shape), str(expected))
            require(weight.bias.is_contiguous(), f"{weight.name}_bias", "strides", "contiguous")
    (n1, k1), (n2, k2) = shapes
    if routed.delta is not None:
        expected = (*ids.shape, n1)
        require(routed.delta.shape == expected, "gemm1_lora_delta", tuple(routed.delta.shape), str(expected))
    hidden = x.shape[1] * (2 if tokens.encoding in room.PACKED else 1)
    middle = n1 // 2 if activation.act in room.GATED else n1
    require(activation.act not in room.GATED or n1 % 2 == 0, first.name, (n1, k1), "an even number of rows")
    halves = activation.act not in room.GATED or first.encoding != "fp8_block" or middle % 64 == 0
    require(halves, first.name, (n1, k1), "halves of a multiple of 64 rows, as scales are of 128")
    require(k1 == hidden, first.name, (n1, k1), f"rows of {hidden} elements, the hidden size")
    require(k2 == middle, second.name, (n2, k2), f"rows of {middle} elements, the intermediate size")
    require(n2 >= out.shape[1], second.name, (n2, k2), f"{out.shape[1]} rows, the size of a result")
    encodings = [(first.encoding, first.name, k1)]
    encodings += [(second.encoding, second.name, k2), (between.encoding, second.name, k2)]
    for encoding, name, k in encodings:
        width = 1 if encoding == "fp8_block" else room.WIDTH.get(encoding, 1)
        require(k % width == 0, name, k, f"rows of a multiple of {width} elements, as {encoding} has them")
