"""`checkpointing_ssu`: Mamba2's recurrence from a checkpoint of the state and a ring of the tokens since."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_apart, check_values, dtype_name, require, same_device
from flashinfer._core.custom_op import one_op
from flashinfer.autotuner import TunableRunner, TuningConfig
from flashinfer.mamba._operands import check_seed, check_tables, is_tied, operands
from flashinfer.ops.recurrent import ssm as room
from flashinfer.ops.recurrent.layouts import whole_rows

__all__ = ["CheckpointingSSURunner", "allocate_checkpointing_ssu_scratch", "checkpointing_ssu"]

_ALGORITHMS = ("auto", "monolith", "two-kernel")
# Tokens of a call, and of a window, that upstream's kernels take.
_MOST = 16


@checked
def allocate_checkpointing_ssu_scratch(
    batch_size: int,
    num_heads: int,
    num_predicted_tokens: int,
    max_window: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three scratch tensors that `checkpointing_ssu` takes for upstream's pair of kernels.

    The kernel here needs none: they are taken, and left alone.

    Parameters
    ----------
    batch_size, num_heads : int
        1 or more.
    num_predicted_tokens, max_window : int
        1 to 16: new tokens of a call, and tokens of the ring that are replayed.
    dtype : torch.dtype
        Of x.
    device : torch.device or str

    Returns
    -------
    cb_scaled, cumAdt_vec, cb_old : torch.Tensor
        [batch, heads, 32, p / 2] in `dtype`, float32 [batch, heads, p] with p = 16, and [batch, heads, 32, w / 2] with
        w the window rounded up to a multiple of 8.

    Raises
    ------
    ValueError
        A number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> scratch = flashinfer.mamba.allocate_checkpointing_ssu_scratch(2, 8, 4, 8, torch.bfloat16, "cpu")
    >>> len(scratch)
    3
    """
    for name, value in (("batch_size", batch_size), ("num_heads", num_heads)):
        require(value >= 1, name, value, "1 or more")
    for name, value in (("num_predicted_tokens", num_predicted_tokens), ("max_window", max_window)):
        require(1 <= value <= _MOST, name, value, f"1 to {_MOST}")
    lead, window = (batch_size, num_heads), -(-max_window // 8) * 8
    return (
        torch.empty(*lead, 32, _MOST // 2, dtype=dtype, device=device),
        torch.empty(*lead, _MOST, dtype=torch.float32, device=device),
        torch.empty(*lead, 32, window // 2, dtype=dtype, device=device),
    )


@one_op(
    written=("out", "state", "state_scale", "x_cache", "B_cache", "dt_cache"), given={}, returned=lambda its: its["out"]
)
def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: torch.Tensor | None = None,
    cumAdt_vec: torch.Tensor | None = None,
    cb_old: torch.Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> torch.Tensor:
    """New tokens of each sequence, from a checkpoint of its state and a ring of the tokens that were accepted since.

    With p = prev_num_accepted_tokens of a slot, T new tokens and R rows of the ring: the p tokens from ring_start
    on are applied to the checkpoint; if p + 2 T > R, the result replaces the checkpoint, and the caller moves
    ring_start by p; then the new tokens are applied, their results written, and their x, B and dt kept in the T
    rows behind the p. Which of them are accepted the caller says at the next call. The recurrence is that of
    `selective_state_update`.

    Parameters
    ----------
    state : torch.Tensor
        Checkpoints, [slots, heads, dim, dstate]; dtypes of `selective_state_update`.
    x_cache : torch.Tensor
        [slots, heads, R, dim], dtype of x. R is 2 T or more.
    B_cache : torch.Tensor
        [slots, groups, R, dstate], dtype of x.
    dt_cache : torch.Tensor
        float32 [slots, heads, R]: dt after bias and softplus.
    ring_start : torch.Tensor
        int32 [slots], the row of the oldest token. It is not written.
    prev_num_accepted_tokens : torch.Tensor
        int32 [slots], at most R - T. It is not written.
    x, z, out : torch.Tensor
        [batch, T, heads, dim], or [1, tokens, heads, dim] with `cu_seqlens`. bfloat16, float16 or float32.
    dt : torch.Tensor
        The same shape; one value for a head, repeated by a stride of 0, as A and dt_bias have it.
    A : torch.Tensor
        [heads, dim, dstate].
    B, C : torch.Tensor
        [batch, T, groups, dstate], or [1, tokens, groups, dstate].
    D, dt_bias : torch.Tensor, optional
        [heads, dim].
    dt_softplus : bool
        dt becomes ``log(1 + exp(dt))``, after the bias.
    state_batch_indices : torch.Tensor, optional
        int32 or int64 [batch]: slots. None: sequence i has slot i.
    pad_slot_id : int
        Such a slot, a negative one and one past the last are neither read nor written; the result is 0.
    state_scale, rand_seed, philox_rounds
        As in `selective_state_update`.
    cu_seqlens : torch.Tensor, optional
        int32 or int64 [batch + 1], of packed sequences.
    max_seqlen : int, optional
        With `cu_seqlens`: T, the most tokens of a sequence.
    enable_pdl, d_split, precompute_heads_per_cta
        Choices of upstream's kernels. They have no effect on results, and none on the launch.
    cb_scaled, cumAdt_vec, cb_old : torch.Tensor, optional
        Upstream's scratch: all three or none. Left alone.
    algorithm : str
        "auto", "monolith" or "two-kernel": one result.

    Returns
    -------
    torch.Tensor
        `out`.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or combination other than the above.
    """
    require(algorithm in _ALGORITHMS, "algorithm", repr(algorithm), ", ".join(map(repr, _ALGORITHMS)))
    scratch = {"cb_scaled": cb_scaled, "cumAdt_vec": cumAdt_vec, "cb_old": cb_old}
    given = [name for name, tensor in scratch.items() if tensor is not None]
    require(len(given) in (0, 3), "cb_scaled, cumAdt_vec, cb_old", given or None, "all three or none")
    allowed = "'auto', 'monolith' without scratch"
    require(algorithm != "two-kernel" or bool(given), "algorithm", repr(algorithm), allowed)
    packed = cu_seqlens is not None
    fits = x.dim() == 4 and (not packed or len(x) == 1)
    require(fits, "x", tuple(x.shape), "[batch, T, heads, dim], or [1, tokens, heads, dim] with cu_seqlens")
    require(packed == (max_seqlen is not None), "max_seqlen", max_seqlen, "a number with cu_seqlens, None without")
    lead = (lambda t: None if t is None else t[0]) if packed else (lambda t: t)
    _, tokens, layer, state, state_scale = operands(
        state, lead(x), lead(dt), A, lead(B), lead(C), D, lead(z), dt_bias, state_scale, lead(out), cu_seqlens
    )
    inputs = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    require(is_tied(tokens.dt, layer), "dt, A, dt_bias", "strides", "one value for a head, repeated by strides of 0")
    most = x.shape[1] if max_seqlen is None else max_seqlen
    ring = room.Ring(x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, most)
    _check_ring(ring, tokens, state)
    index = check_tables({"state_batch_indices": state_batch_indices}, tokens)
    check_seed(rand_seed, philox_rounds)
    written = dict(out=out, state=state, state_scale=state_scale, x_cache=x_cache, B_cache=B_cache, dt_cache=dt_cache)
    inputs |= dict(ring_start=ring_start, prev_num_accepted_tokens=prev_num_accepted_tokens)
    check_apart(written.items(), inputs.items(), in_place=())
    same_device(
        state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state_scale=state_scale, out=out,
        cu_seqlens=cu_seqlens, rand_seed=rand_seed, state_batch_indices=state_batch_indices, x_cache=x_cache,
        B_cache=B_cache, dt_cache=dt_cache, ring_start=ring_start, prev_num_accepted_tokens=prev_num_accepted_tokens,
    )  # fmt: skip
    if not (tokens.sequences and out.numel()):
        return out.zero_()
    read = None if state_batch_indices is None else state_batch_indices.to(index)
    tokens = tokens._replace(offsets=None if tokens.offsets is None else tokens.offsets.to(index).contiguous())
    problem = room.Replay(
        dim=x.shape[-1],
        dstate=state.shape[3],
        dtype=dtype_name(x.dtype),
        dt_dtype=dtype_name(dt.dtype),
        a_dtype=dtype_name(A.dtype),
        d_dtype="" if D is None else dtype_name(D.dtype),
        bias_dtype="" if dt_bias is None else dtype_name(dt_bias.dtype),
        state_dtype=dtype_name(state.dtype),
        gated=z is not None,
        softplus=dt_softplus,
        index=dtype_name(index),
        packed=packed,
        read=read is not None,
        rounds=0 if rand_seed is None else philox_rounds,
        aligned=whole_rows(state, tokens.B, tokens.C, B_cache),
    )
    pool = room.Pool(state, state_scale, None, None, read, None, None, None, pad_slot_id, rand_seed)
    room.replay(problem, x.device).run(tokens, layer, pool, ring)
    return out


def _check_ring(ring: room.Ring, tokens: room.Tokens, state: torch.Tensor) -> None:
    slots, heads, dim, dstate = state.shape
    groups, dtype = tokens.B.shape[2], tokens.x.dtype
    require(ring.x.dim() == 4, "x_cache", tuple(ring.x.shape), "[slots, heads, R, dim]")
    fits = ring.length >= 2 * ring.most
    require(fits, "x_cache", tuple(ring.x.shape), f"{2 * ring.most} rows or more, twice the tokens of a call")
    shapes = {
        "x_cache": (ring.x, (slots, heads, ring.length, dim), dtype),
        "B_cache": (ring.B, (slots, groups, ring.length, dstate), dtype),
        "dt_cache": (ring.dt, (slots, heads, ring.length), torch.float32),
        "ring_start": (ring.start, (slots,), torch.int32),
        "prev_num_accepted_tokens": (ring.count, (slots,), torch.int32),
    }
    for name, (tensor, shape, wanted) in shapes.items():
        require(tuple(tensor.shape) == shape, name, tuple(tensor.shape), f"{shape}")
        require(tensor.dtype == wanted, name, tensor.dtype, str(wanted))
        rows = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        require(rows or name == "dt_cache", name, f"strides {tensor.stride()}", "a last stride of 1")
    check_values("ring_start", ring.start, 0, ring.length - 1)
    check_values("prev_num_accepted_tokens", ring.count, 0, ring.length - ring.most)


class CheckpointingSSURunner(TunableRunner):
    """The call as upstream's tuner sees it. There is one way to run it here, so there is one tactic, -1.

    Parameters
    ----------
    module_base_args : tuple
        What upstream compiles for; part of the key of a tuned choice.
    dt_softplus, pad_slot_id
        As in `checkpointing_ssu`.
    requested_algorithm, requested_d_split, precompute_heads_per_cta, heads_per_group : int
        Choices of upstream's kernels; part of the key, and without effect on results.
    optional_tensor_presence : tuple of bool
        Which optional inputs there are.
    """

    # The names of `inputs`, in upstream's order.
    _NAMES = (
        "state", "x", "dt", "A", "B", "C", "out", "x_cache", "B_cache", "dt_cache", "ring_start",
        "prev_num_accepted_tokens", "D", "z", "dt_bias", "state_batch_indices", "state_scale", "rand_seed",
        "cu_seqlens", "cb_scaled", "cumAdt_vec", "cb_old",
    )  # fmt: skip

    @checked
    def __init__(
        self,
        module_base_args: tuple,
        *,
        dt_softplus: bool,
        pad_slot_id: int,
        requested_algorithm: int,
        requested_d_split: int,
        precompute_heads_per_cta: int,
        heads_per_group: int,
        optional_tensor_presence: tuple[bool, ...],
    ):
        self._options = {"dt_softplus": dt_softplus, "pad_slot_id": pad_slot_id}
        self._key = (
            module_base_args, dt_softplus, pad_slot_id, requested_algorithm, requested_d_split,
            precompute_heads_per_cta, heads_per_group, optional_tensor_presence,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other) -> bool:
        return isinstance(other, CheckpointingSSURunner) and self._key == other._key

    def get_valid_tactics(self, inputs: list, profile) -> list[int]:
        """The one tactic."""
        return [-1]

    def get_cache_key_extras(self, inputs: list) -> tuple:
        """What a choice depends on beside the shapes of the inputs."""
        return self._key

    def get_tuning_config(self, inputs: list) -> TuningConfig:
        """A configuration without dynamic dimensions: nothing is tuned."""
        return TuningConfig()

    def precompile_tactics(self, inputs: list, tactics: list, profile, **kwargs) -> None:
        """Nothing: a kernel compiles at its first launch, or by `flashinfer precompile`."""

    def forward(self, inputs: list, tactic: int = -1, do_preparation: bool = False, **kwargs) -> torch.Tensor:
        """`checkpointing_ssu` of `inputs`, tensors in upstream's order: state, x, dt, A, B, C, out, the ring, D, z,
        dt_bias, state_batch_indices, state_scale, rand_seed, cu_seqlens and the scratch. kwargs are options by name."""
        require(tactic == -1, "tactic", tactic, "-1")
        given = dict(zip(self._NAMES, inputs, strict=False))
        options = {**self._options, **{name: value for name, value in kwargs.items() if name != "tactic"}}
        if given.get("cu_seqlens") is not None:
            options.setdefault("max_seqlen", given["x_cache"].shape[2] // 2)
        return checkpointing_ssu(**given, **options)

    def __call__(self, inputs: list, **kwargs) -> torch.Tensor:
        """`forward`."""
        return self.forward(inputs, **kwargs)
