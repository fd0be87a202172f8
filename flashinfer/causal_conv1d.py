"""The short causal convolution in front of a recurrent layer; ours, with the parameters that engines' own have."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import named
from flashinfer._core.checks import check_apart, check_indptr, check_values, dtype_name, require, same_device
from flashinfer._core.custom_op import one_op
from flashinfer._core.literals import OwnBackend
from flashinfer._delta import INDICES, INPUTS, require_dtype, require_shape, variant_for
from flashinfer.ops.recurrent import conv as room
from flashinfer.ops.recurrent.layouts import whole_rows

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

_ACTIVATIONS = {None: False, False: False, True: True, "silu": True, "swish": True}


def _output(its: dict) -> torch.Tensor:
    return its["x"].new_empty(its["x"].shape) if its["out"] is None else its["out"]


def _output_like(its: dict) -> torch.Tensor:
    return torch.empty_like(its["x"]) if its["out"] is None else its["out"]


@one_op(written=("conv_state", "out"), given={"out": _output}, returned=lambda its: its["out"])
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    out: torch.Tensor | None = None,
    backend: OwnBackend = "auto",
) -> torch.Tensor:
    """The next tokens of each sequence through a causal convolution of each channel, in place on its state.

    ``out[t] = bias + sum over j of weight[:, j] x[t - width + 1 + j]``, where inputs before the first are the state's.

    Parameters
    ----------
    x : torch.Tensor
        [batch, channels], [batch, T, channels], or [tokens, channels] with `query_start_loc`; bfloat16, float16 or
        float32, any strides.
    conv_state : torch.Tensor
        [slots, channels, width - 1], any strides: the last inputs, updated in place. A longer one is a window for
        drafts: inputs are read from column num_accepted_tokens - 1 on; all of them but the first, and then the new
        inputs, become its first columns. It has at least width - 2 + T of them.
    weight : torch.Tensor
        [channels, width], any strides; width 2 to 4.
    bias : torch.Tensor, optional
        [channels].
    activation : str, bool or None
        "silu" (or "swish", True), or None for none.
    conv_state_indices : torch.Tensor, optional
        [batch], int32 or int64: the slot of each sequence.
    num_accepted_tokens : torch.Tensor, optional
        [batch]; 1 if not given.
    query_start_loc : torch.Tensor, optional
        [sequences + 1]: packed sequences. Tokens of no sequence have output 0.
    pad_slot_id : int
        Slots up to this one are padding: nothing is read or written, and the output is 0.
    out : torch.Tensor, optional
        Receives the result; it may not overlap x.
    backend : str
        "auto", "portable" or "reference".

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor like x.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.causal_conv1d.causal_conv1d_update(torch.ones(1, 2), torch.zeros(1, 2, 3), torch.ones(2, 4))
    tensor([[1., 1.]])
    """
    require(x.dim() in (2, 3), "x", f"shape {tuple(x.shape)}", "[batch, channels] or [batch, T, channels]")
    packed = query_start_loc is not None
    require(not packed or x.dim() == 2, "x", f"shape {tuple(x.shape)}", "[tokens, channels] with query_start_loc")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    require_shape("out", out, *x.shape)
    wide = [t[None] if packed else t[:, None] if t.dim() == 2 else t for t in (x, out)]
    require(weight.dim() == 2, "weight", f"shape {tuple(weight.shape)}", "[channels, width]")
    rolling = conv_state.dim() == 3 and conv_state.shape[2] > weight.shape[1] - 1
    if rolling and not packed:
        least = weight.shape[1] - 2 + wide[0].shape[1]
        require(conv_state.shape[2] >= least, "conv_state", f"{conv_state.shape[2]} columns", f"at least {least}")
    call = room.Call(wide[0], weight.T[None], bias, conv_state, wide[1], conv_state_indices, num_accepted_tokens, None,
                     query_start_loc, pad_slot_id)  # fmt: skip
    run_conv(call, activation, rolling=rolling, long=False, backend=backend)
    return out


@one_op(written=("conv_states", "out"), given={"out": _output_like}, returned=lambda its: its["out"])
@named(conv_state="conv_states", conv_state_indices="cache_indices")
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    out: torch.Tensor | None = None,
    backend: OwnBackend = "auto",
) -> torch.Tensor:
    """Whole prompts through a causal convolution of each channel.

    Parameters
    ----------
    x : torch.Tensor
        [channels, tokens] of packed sequences, or [batch, channels, T]; bfloat16, float16 or float32, any strides.
    weight, bias, activation, pad_slot_id, out, backend
        As of `causal_conv1d_update`.
    conv_states : torch.Tensor, optional
        [slots, channels, width - 1 or more], any strides: the last inputs before the prompt, in columns 0 to width - 2;
        then the last ones of the prompt are there. Zeros if not given.
    query_start_loc : torch.Tensor, optional
        [sequences + 1], int32 or int64, with x [channels, tokens].
    cache_indices : torch.Tensor, optional
        [sequences]: the slot of each sequence.
    has_initial_state : torch.Tensor, optional
        [sequences], bool: whether the state is read; else the prompt begins with zeros.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor like x.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> offsets = torch.tensor([0, 2, 3])
    >>> conv = flashinfer.causal_conv1d.causal_conv1d_fn
    >>> conv(torch.ones(1, 3), torch.ones(1, 4), query_start_loc=offsets, activation=None)
    tensor([[1., 2., 1.]])
    """
    packed = query_start_loc is not None
    require(x.dim() == (2 if packed else 3), "x", f"shape {tuple(x.shape)}",
            "[channels, tokens] with query_start_loc, else [batch, channels, T]")  # fmt: skip
    out = torch.empty_like(x) if out is None else out
    require_shape("out", out, *x.shape)
    rows = [t.T[None] if packed else t.transpose(1, 2) for t in (x, out)]
    require(weight.dim() == 2, "weight", f"shape {tuple(weight.shape)}", "[channels, width]")
    fresh = has_initial_state
    call = room.Call(rows[0], weight.T[None], bias, conv_states, rows[1], cache_indices, None, fresh, query_start_loc,
                     pad_slot_id)  # fmt: skip
    run_conv(call, activation, rolling=False, long=True, backend=backend)
    return out


def run_conv(call: room.Call, activation, *, rolling: bool, long: bool, backend: str) -> None:
    """Check the tensors of a convolution, and run it."""
    if call.offsets is not None:
        require(call.offsets.dim() == 1, "query_start_loc", f"shape {tuple(call.offsets.shape)}", "[sequences + 1]")
    x, weight, state, n = call.x, call.weight, call.state, call.sequences
    require(activation in _ACTIVATIONS, "activation", repr(activation), ", ".join(map(repr, _ACTIVATIONS)))
    width, channels = weight.shape[1], x.shape[2]
    require(2 <= width <= 4, "weight", f"width {width}", "2 to 4")
    require(weight.shape[0] * weight.shape[2] == channels, "weight", f"{weight.shape[0] * weight.shape[2]} channels",
            f"{channels}, those of x")  # fmt: skip
    require_shape("bias", call.bias, channels)
    inputs = {"x": x, "weight": weight, "bias": call.bias, "conv_state": state, "out": call.out}
    for argument, t in inputs.items():
        require_dtype(argument, t, INPUTS)
    tables = {"query_start_loc": call.offsets, "conv_state_indices": call.slots, "num_accepted_tokens": call.accepted}
    for argument, t in tables.items():
        require_shape(argument, t, n + (argument == "query_start_loc"), dtypes=INDICES)
    require_shape("has_initial_state", call.fresh, n)
    if state is not None:
        require_shape("conv_state", state, n if call.slots is None else None, channels, None)
        require(state.shape[2] >= width - 1, "conv_state", f"{state.shape[2]} columns", f"at least {width - 1}")
    read = dict(x=x, weight=weight, bias=call.bias, has_initial_state=call.fresh, **tables)
    device = same_device(**read, conv_state=state, out=call.out)
    check_apart([("conv_state", state), ("out", call.out)], read.items(), in_place=() if long else None)
    if call.offsets is not None and call.offsets.device.type == "cpu":
        check_indptr("query_start_loc", call.offsets.numpy(), x.shape[1], "the tokens of x", sliced=True)
    if call.slots is not None and state is not None:
        check_values("conv_state_indices", call.slots.clamp(min=call.null), call.null, len(state) - 1)
    backend = variant_for(backend)
    if not n or not x.numel():
        call.out.zero_()
        return
    given = {field: getattr(call, field) for field in ("slots", "accepted", "fresh", "offsets")}
    given = {field: t for field, t in given.items() if t is not None}
    index = torch.int64 if any(t.dtype == torch.int64 for t in given.values()) else torch.int32
    call = call._replace(**{field: t.to(index).contiguous() for field, t in given.items()})
    if call.bias is not None:
        call = call._replace(bias=call.bias.contiguous())

    def name(t):
        return "" if t is None else dtype_name(t.dtype)

    dense = state is not None and state.stride(1) == 1
    problem = room.Problem(
        width, name(x), name(weight), name(call.out), name(call.bias), name(state), _ACTIVATIONS[activation], long,
        rolling, dtype_name(index), "offsets" in given, "slots" in given, "accepted" in given, "fresh" in given, dense,
        x.stride(2) == 1 and call.out.stride(2) == 1 and x.dtype == call.out.dtype and whole_rows(x, call.out),
    )  # fmt: skip
    room.causal_conv1d(problem, device, backend).run(call)
