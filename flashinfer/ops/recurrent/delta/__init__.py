"""The gated delta rule: a state per head that decays, is corrected towards each value, and is read by each query.

S <- S decay;  u = S k;  S <- S + beta (v - u) k^T;  o = scale S q        (S is [V, K])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant, portable_only
from flashinfer.ops.recurrent.delta import config


@dataclass(frozen=True)
class Step:
    """Token by token from a state: decode, and verification of draft tokens in a chain or in a tree.

    Attributes
    ----------
    key_dim, value_dim : int
        K and V.
    dtype, out_dtype : str
        Of q, k and v, and of the result.
    gate : str
        Meaning of the gate: "" for no decay, "log" for the logarithm of the decay, "linear" for the decay; "softplus"
        or "bounded" for a raw gate with the formula of Qwen's or Kimi's layers.
    channels : bool
        A decay for each key channel, else one for each head.
    gate_dtype, bias_dtype : str
        Dtypes of the gate and its bias; "" for none.
    beta : str
        Meaning of beta: "" for 1, "value", or "logit", of which the sigmoid is taken.
    beta_dtype : str
        Dtype of beta.
    source_dtype, state_dtype : str
        Dtypes of the states that are read and written; "" for none.
    layout : str
        The contiguous dimension of the states: "k", "v", or "" for neither.
    index : str
        Dtype of slots and offsets.
    packed : bool
        Sequences are packed by offsets, else each row is one.
    single : bool
        Every row has one token.
    normalize : bool
        q and k are divided by their L2 norms first.
    each : str
        Where the states after each token are stored: "" nowhere, "buffer" a tensor, "pool" slots of the pool.
    final : bool
        The state after the last token is written.
    keep : str
        What is stored of the tokens for a later commit: "" nothing, "replay" or "corrections" (operands.Kept).
    kept_dtype : str
        Dtype of the stored keys.
    norm : bool
        A gated RMSNorm follows.
    tokens : int
        Tokens of a tree, rounded up to a power of two; each token's parent is among those before it. 0 for a chain.
    read, accepted, write, stop : bool
        Which of these tables of operands.Pool are given.
    aligned : bool
        Rows can be read 16 bytes at a time.
    dense : bool
        Rows of a state lie one after another without gaps, and K is a power of two.
    """

    key_dim: int
    value_dim: int
    dtype: str
    out_dtype: str
    gate: str = ""
    channels: bool = False
    gate_dtype: str = ""
    bias_dtype: str = ""
    beta: str = ""
    beta_dtype: str = ""
    source_dtype: str = ""
    state_dtype: str = ""
    layout: str = "k"
    index: str = "i32"
    packed: bool = False
    single: bool = False
    normalize: bool = False
    each: str = ""
    final: bool = True
    keep: str = ""
    kept_dtype: str = ""
    norm: bool = False
    tokens: int = 0
    read: bool = True
    accepted: bool = False
    write: bool = False
    stop: bool = False
    aligned: bool = True
    dense: bool = False


@dataclass(frozen=True)
class Commit:
    """Apply the accepted tokens of replay windows to the states of all layers.

    Attributes
    ----------
    key_dim, value_dim : int
        K and V.
    dtype, state_dtype : str
        Dtypes of the windows' keys and values, and of the states.
    normalize : bool
        Keys are divided by their L2 norm first.
    path, track : bool
        Whether a table lists the accepted tokens, and whether the state after one of them is also written.
    aligned : bool
        Rows of states, keys and values can be read 16 bytes at a time.
    """

    key_dim: int
    value_dim: int
    dtype: str
    state_dtype: str
    normalize: bool = True
    path: bool = False
    track: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class Layer:
    """One token of a whole layer: convolution with SiLU, raw gates, recurrence with normalized q and k, gated RMSNorm.

    Attributes
    ----------
    dim : int
        K and V, which are the same.
    width : int
        Width of the convolution, 2 to 4.
    dtype, out_dtype, weight_dtype, conv_dtype, gate_dtype, beta_dtype, bias_dtype, state_dtype : str
        Dtypes of x and the norm's gate, of the result, of the convolution's weight and state, of the raw gates and
        their bias ("" for none), and of the states.
    gate : str
        "softplus" or "bounded".
    layout : str
        Which dimension of the states is contiguous: "k", "v", or "" neither.
    index : str
        Type of slots.
    aligned : bool
        Rows of the states can be read 16 bytes at a time.
    """

    dim: int
    width: int
    dtype: str
    out_dtype: str
    weight_dtype: str
    conv_dtype: str
    gate_dtype: str
    beta_dtype: str
    state_dtype: str
    bias_dtype: str = ""
    gate: str = "bounded"
    layout: str = "k"
    index: str = "i32"
    aligned: bool = True

    # A decay for each key channel.
    channels = True


# Tokens of a chunk.
CHUNK = 64


@dataclass(frozen=True)
class Chunks:
    """Prefill by chunks of 64 tokens: packed sequences, or one in each row.

    Attributes
    ----------
    key_dim, value_dim, dtype, out_dtype, gate, channels, gate_dtype, bias_dtype, beta_dtype, source_dtype,
    state_dtype, index, packed, normalize, read, aligned
        As in Step; normalized q and k are rounded to their dtype.
    beta : str
        As in Step, or "channels": an erase gate for each key channel, with the correction w v - S (beta k).
    write_dtype : str
        Dtype of w, the write gate of each value; "" for none.
    bounded : bool
        Decays are at least exp(-5) a token, so that decays over 16 tokens are in the range of the operands.
    marks_dtype : str
        Dtype of the checkpoints (operands.Marks), states at multiples of some tokens; "" for none.
    first_mark : bool
        The first checkpoint is the initial state.
    mark_slots : bool
        A table gives the checkpoints' rows.
    stride : int
        Tokens of a chunk: 64, or less if checkpoints are needed at other multiples.
    segments : bool
        Long sequences are split into segments of some chunks, which are processed in parallel. Only for packed
        sequences with at most one decay a head and no write gate.
    """

    key_dim: int
    value_dim: int
    dtype: str
    out_dtype: str
    gate: str = ""
    channels: bool = False
    bounded: bool = False
    gate_dtype: str = ""
    bias_dtype: str = ""
    beta: str = ""
    beta_dtype: str = ""
    source_dtype: str = ""
    state_dtype: str = ""
    index: str = "i32"
    packed: bool = True
    normalize: bool = False
    read: bool = False
    marks_dtype: str = ""
    first_mark: bool = False
    mark_slots: bool = False
    stride: int = CHUNK
    write_dtype: str = ""
    segments: bool = False
    aligned: bool = True


def _long_rows(problem, target) -> str:
    if max(problem.key_dim, problem.value_dim) > 256:
        return "a state of more than 256 rows or columns does not fit in registers"
    return ""


def _steps() -> Iterator[Step]:
    raw = {"gate": "softplus", "gate_dtype": "bf16", "bias_dtype": "fp32", "beta": "logit", "beta_dtype": "bf16"}
    gdn = {"normalize": True, **raw}
    fp32, bf16 = ({"source_dtype": t, "state_dtype": t, "dense": True} for t in ("fp32", "bf16"))
    yield Step(128, 128, "bf16", "bf16", **gdn, **fp32, single=True)
    yield Step(128, 128, "bf16", "bf16", **gdn, **bf16, single=True, write=True, index="i64")
    yield Step(128, 128, "bf16", "bf16", **gdn, **fp32 | {"dense": False}, single=True, layout="v", read=False)
    yield Step(128, 128, "bf16", "bf16", **gdn, **fp32, each="buffer", final=False)
    yield Step(128, 128, "bf16", "bf16", **gdn, **bf16, stop=True)
    yield Step(128, 128, "bf16", "bf16", **gdn, source_dtype="fp32", final=False, keep="replay", kept_dtype="bf16",
               dense=True)  # fmt: skip
    kda = {**gdn, "channels": True, "gate": "bounded"}
    yield Step(128, 128, "bf16", "bf16", **kda, **bf16, packed=True, accepted=True, each="pool", final=False)
    yield Step(128, 128, "bf16", "bf16", **kda, **fp32, single=True, norm=True)
    frozen = {"source_dtype": "bf16", "final": False, "keep": "corrections", "kept_dtype": "bf16", "dense": True}
    yield Step(128, 128, "bf16", "bf16", **kda, **frozen)
    tree = {"source_dtype": "fp32", "final": False, "tokens": 16, "dense": True}
    yield Step(128, 128, "bf16", "bf16", **gdn, **tree, each="buffer", state_dtype="fp32")
    yield Step(128, 128, "bf16", "bf16", **gdn, **tree | {"tokens": 64}, keep="replay", kept_dtype="bf16")
    yield Step(128, 128, "bf16", "bf16", **kda, **bf16, packed=True, accepted=True, each="pool", final=False, tokens=16)
    yield Step(128, 128, "bf16", "bf16", **kda, **frozen, tokens=64)
    log = {"gate": "log", "gate_dtype": "bf16", "channels": True, "beta": "value", "beta_dtype": "bf16"}
    yield Step(64, 64, "fp16", "fp16", **log, **fp32 | {"dense": False}, packed=True, aligned=False, layout="",
               read=False)  # fmt: skip


def _commits() -> Iterator[Commit]:
    yield Commit(128, 128, "bf16", "fp32")
    yield Commit(128, 128, "bf16", "fp32", normalize=False, path=True, track=True)
    yield Commit(80, 48, "fp16", "fp16", aligned=False)


def _long_keys(problem, target) -> str:
    if problem.key_dim > 128:
        return "keys of more than 128 do not fit in registers"
    if (
        problem.channels
        and problem.dtype == "fp16"
        and problem.key_dim > 64
        and target.smem < 110 << 10
        and target.smem
    ):
        return "float16 keys of more than 64 with a decay for each channel do not fit in shared memory"
    return ""


def _prefills() -> Iterator[Chunks]:
    linear = {"gate": "linear", "gate_dtype": "fp32", "beta": "value", "beta_dtype": "fp32"}
    fp32 = {"source_dtype": "fp32", "state_dtype": "fp32"}
    yield Chunks(128, 128, "bf16", "bf16", **linear, **fp32, index="i64")
    yield Chunks(128, 128, "bf16", "bf16", **linear, **fp32, normalize=True, segments=True)
    yield Chunks(64, 128, "fp16", "fp16", **linear, **fp32, read=True, marks_dtype="fp32", segments=True)
    yield Chunks(128, 128, "bf16", "bf16", **linear, **fp32, read=True, marks_dtype="fp32", normalize=True)
    raw = {"gate": "bounded", "gate_dtype": "bf16", "bias_dtype": "fp32", "beta": "logit", "beta_dtype": "bf16"}
    kda = {**raw, "channels": True, "normalize": True}
    yield Chunks(128, 128, "bf16", "bf16", **kda, bounded=True, source_dtype="bf16", state_dtype="bf16")
    soft = {**kda, "gate": "softplus", "source_dtype": "fp32", "state_dtype": "fp32", "packed": False}
    yield Chunks(128, 128, "bf16", "bf16", **soft, marks_dtype="bf16", first_mark=True, stride=32)
    log = {"gate": "log", "gate_dtype": "fp16", "beta": "value", "beta_dtype": "fp16", "channels": True}
    second = {"gate": "log", "gate_dtype": "fp32", "channels": True, "beta": "channels", "beta_dtype": "bf16"}
    yield Chunks(128, 128, "bf16", "bf16", **second, **fp32, normalize=True, write_dtype="bf16")
    yield Chunks(64, 64, "fp16", "fp16", **log, **fp32, marks_dtype="fp32", mark_slots=True, aligned=False)


def _layers() -> Iterator[Layer]:
    bf16 = ("bf16",) * 2
    yield Layer(128, 4, *bf16, "fp32", *bf16, "bf16", "fp32", "fp32")
    yield Layer(128, 4, *bf16, "fp32", *bf16, "bf16", "bf16", "bf16", gate="softplus", index="i64", layout="v")
    yield Layer(64, 3, "fp32", "fp32", "fp32", "fp32", "fp32", "fp32", "fp32", layout="", aligned=False)
    yield Layer(32, 2, "fp16", "fp16", "fp16", "fp16", "fp16", "fp16", "fp8e4nv", "fp16")


def _long_rows_of_layers(problem, target) -> str:
    return "a state of more than 128 rows does not fit in registers" if problem.dim > 128 else ""


_sm90 = Variant("sm90", f"{__name__}.sm90", config.refuses_chunks_sm90, config.chunks_sm90)
delta_step = Op("delta_step", Step, portable_only(__name__, config.step, refuses=_long_rows), _steps)
delta_commit = Op("delta_commit", Commit, portable_only(__name__, config.commit, refuses=_long_rows), _commits)
delta_chunks = Op(
    "delta_chunks", Chunks, (_sm90, *portable_only(__name__, config.chunks, "chunks", refuses=_long_keys)), _prefills
)
delta_layer = Op(
    "delta_layer", Layer,
    portable_only(__name__, config.layer, "layer", "reference_layer", _long_rows_of_layers), _layers,
)  # fmt: skip
