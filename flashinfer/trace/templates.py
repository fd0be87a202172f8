"""Templates of this package's functions, by flashinfer-bench's names of axes and tensors."""

from __future__ import annotations

from typing import Any

from flashinfer.trace import references
from flashinfer.trace.attached import attach
from flashinfer.trace.template import Const, Scalar, Tensor, TraceTemplate, Var


def _tensor(axes: str, **more) -> Tensor:
    return Tensor(axes.split(), **more)


def _template(op_type: str, name: str, axes: dict, inputs: dict, outputs: dict, *tags: str, **more) -> TraceTemplate:
    """One with a reference is "verified", as flashinfer-bench calls it."""
    verified = ["status:verified"] if "reference" in more else []
    return TraceTemplate(op_type, axes, inputs, outputs, name_prefix=name, tags=[*verified, *tags], **more)


def _norm(name: str, reference, *, add: bool = False, out: str | None = None) -> TraceTemplate:
    rows = "batch_size hidden_size"
    inputs = {"hidden_states": _tensor(rows, param="input")}
    inputs |= {"residual": _tensor(rows)} if add else {}
    written = "input" if add and out is None else out
    dtype = {"dtype_from": "input"} if out is None else {"dtype": "float8_e4m3fn"}
    outputs = {"output": _tensor(rows, param=written, **dtype)}
    outputs |= {"residual": _tensor(rows, param="residual", dtype_from="residual")} if add else {}
    scale = {"scale": Scalar("float32")} if out is not None else {}
    axes = {"batch_size": Var(), "hidden_size": Const(abbrev="h")}
    tags = ("fused",) if add else ()
    return _template("rmsnorm", name, axes, inputs | {"weight": _tensor("hidden_size")} | scale, outputs, *tags,
                     reference=reference, description="Over the last dimension; epsilon is 1e-6.")  # fmt: skip


def _layernorm() -> TraceTemplate:
    rows = "batch_size hidden_size"
    inputs = {"hidden_states": _tensor(rows, param="input"), "weight": _tensor("hidden_size", param="gemma"),
              "bias": _tensor("hidden_size", param="beta")}  # fmt: skip
    axes = {"batch_size": Var(), "hidden_size": Const(abbrev="h")}
    outputs = {"output": _tensor(rows, dtype_from="input")}
    said = "Over the last dimension; epsilon is 1e-6."
    return _template("layernorm", "layernorm", axes, inputs, outputs, reference=references.layernorm, description=said)


def _product(name: str, params: str, batch: str = "", **more) -> TraceTemplate:
    """Products into bfloat16, or into the dtype that a call names."""
    axes = {**{axis: Var() for axis in (*batch.split(), "M")}, "N": Const(), "K": Const()}
    inputs = {part: _tensor(f"{batch} {part_axes}", param=param)
              for part, param, part_axes in zip("AB", params.split(), ("M K", "K N"), strict=True)}  # fmt: skip
    outputs = {"C": _tensor(f"{batch} M N", dtype="bfloat16", dtype_from_scalar="out_dtype")}
    return _template(name, name, axes, inputs, outputs, reference=references.matrix_product, **more)


def _rope(name: str, reference, *, ragged: bool, stretched: bool, in_place: bool) -> TraceTemplate:
    parts = {"q": "nnz num_q_heads head_dim", "k": "nnz num_k_heads head_dim"}
    at = {"indptr": _tensor("batch_size_plus_1", dtype="int32"), "offsets": _tensor("batch_size", dtype="int32")}
    at = at if ragged else {"pos_ids": _tensor("nnz", dtype="int32")}
    numbers = {"rotary_dim": "int32", "interleave": "int32", "rope_scale": "float32", "rope_theta": "float32"}
    if stretched:
        numbers |= {"low_freq_factor": "float32", "high_freq_factor": "float32", "old_context_len": "int32"}
    axes: dict[str, Var | Const] = {"nnz": Var()}
    axes |= {"batch_size": Var(), "batch_size_plus_1": Var()} if ragged else {}
    axes |= {"num_q_heads": Const(abbrev="h"), "num_k_heads": Const(abbrev="kv"), "head_dim": Const(abbrev="d")}
    inputs = {part: _tensor(rows) for part, rows in parts.items()} | at
    inputs |= {number: Scalar(dtype, optional=True) for number, dtype in numbers.items()}
    more = {"constraints": ["batch_size_plus_1 == batch_size + 1"]} if ragged else {}
    return _template("rope", name, axes, inputs, _turned(parts, "_rope", in_place), reference=reference, **more)


def _turned(parts: dict[str, str], ending: str, in_place: bool) -> dict[str, Tensor]:
    """Results like the tensors that are rotated, or these."""
    if in_place:
        return {part: _tensor(axes, param=part, dtype_from=part) for part, axes in parts.items()}
    return {f"{part}{ending}": _tensor(axes, dtype_from=part) for part, axes in parts.items()}


def _rope_of_table(name: str, in_place: bool) -> TraceTemplate:
    parts = {"query": "nnz num_q_heads_x_head_size", "key": "nnz num_k_heads_x_head_size"}
    axes = {"nnz": Var(), "num_q_heads_x_head_size": Const(abbrev=""), "num_k_heads_x_head_size": Const(abbrev=""),
            "head_size": Const(abbrev="d"), "max_seq_len": Var(), "rotary_dim": Const(abbrev="")}  # fmt: skip
    inputs = {"positions": _tensor("nnz", dtype="int32"), **{part: _tensor(rows) for part, rows in parts.items()},
              "head_size": Scalar("int32"), "cos_sin_cache": _tensor("max_seq_len rotary_dim", dtype="float32"),
              "is_neox": Scalar("int32", optional=True)}  # fmt: skip
    return _template("rope", name, axes, inputs, _turned(parts, "_out", in_place),
                     reference=references.rope_cos_sin_cache)  # fmt: skip


def _ropes() -> dict[str, TraceTemplate]:
    """Of each function of rotation, whose names are made of what it takes."""
    found = {}
    for in_place in (False, True):
        ending = "_inplace" if in_place else ""
        for ragged in (True, False):
            for stretched in (False, True):
                kind = f"{'llama31_' if stretched else ''}rope{'' if ragged else '_pos_ids'}"
                found[f"apply_{kind}{ending}"] = _rope(f"{kind}{ending}", getattr(references, kind), ragged=ragged,
                                                       stretched=stretched, in_place=in_place)  # fmt: skip
        found[f"apply_rope_with_cos_sin_cache{ending}"] = _rope_of_table(f"rope_cos_sin_cache{ending}", in_place)
    return found


def _gate(name: str, reference) -> TraceTemplate:
    axes = {"num_tokens": Var(), "hidden_size": Const(abbrev="h"), "hidden_div_2": Var()}
    inputs = {"input": _tensor("num_tokens hidden_size")}
    outputs = {"output": _tensor("num_tokens hidden_div_2", dtype_from="input")}
    return _template("activation", name, axes, inputs, outputs, "fused", reference=reference,
                     constraints=["hidden_size == 2 * hidden_div_2"])  # fmt: skip


_ROWS = {"batch_size": Var(), "vocab_size": Const(abbrev="v")}


def _rows(name: str, source: str, filters: dict, result: str, reference=None) -> TraceTemplate:
    """Rows of a vocabulary become rows."""
    outputs = {result: _tensor("batch_size vocab_size", dtype_from=source)}
    more = {} if reference is None else {"reference": reference}
    return _template("sampling", name, _ROWS, {source: _tensor("batch_size vocab_size"), **filters}, outputs, **more)


def _draws(name: str, source: str, filters: dict) -> TraceTemplate:
    inputs = {source: _tensor("batch_size vocab_size"), **filters}
    inputs["indices"] = _tensor("num_indices", dtype="int32", optional=True)
    axes = {**_ROWS, "num_indices": Var()}
    return _template("sampling", name, axes, inputs, {"samples": _tensor("batch_size", dtype="int32")})


_K, _P = {"top_k": Scalar("int32")}, {"top_p": Scalar("float32")}
_EACH_K, _EACH_P = {"top_k": _tensor("batch_size")}, {"top_p": _tensor("batch_size")}


def _merge(name: str, inputs: dict, outputs: dict, reference, **axes) -> TraceTemplate:
    axes = {"seq_len": Var(), **axes, "num_heads": Const(abbrev="h"), "head_dim": Const(abbrev="d")}
    return _template("cascade_merge", name, axes, inputs, outputs, reference=reference)


_V, _S = "seq_len num_heads head_dim", "seq_len num_heads"


def _append(name: str, inputs: dict, outputs: dict, **axes) -> TraceTemplate:
    tables = {
        "batch_indices": _tensor("nnz_kv", dtype="int32"),
        "positions": _tensor("nnz_kv", dtype="int32"),
        **inputs,
        "kv_indices": _tensor("num_kv_indices", dtype="int32"),
        "kv_indptr": _tensor("batch_size_plus_1", dtype="int32"),
        "kv_last_page_len": _tensor("batch_size", dtype="int32"),
    }
    axes = {"nnz_kv": Var(), **axes, "num_pages": Var(), "page_size": Const(abbrev="ps"), "batch_size": Var()}
    axes |= {"batch_size_plus_1": Var(), "num_kv_indices": Var()}
    constraints = ["batch_size_plus_1 == batch_size + 1"]
    return _template("page_append", name, axes, tables, outputs, constraints=constraints)


def _chain() -> TraceTemplate:
    axes: dict[str, Var | Const] = {name: Var() for name in ("batch_size", "num_speculative", "num_speculative_plus_1")}
    inputs = {
        "draft_probs": _tensor("batch_size num_speculative vocab_size"),
        "draft_token_ids": _tensor("batch_size num_speculative", dtype="int32"),
        "target_probs": _tensor("batch_size num_speculative_plus_1 vocab_size"),
    }
    outputs = {"accepted_token_ids": _tensor("batch_size num_speculative_plus_1", dtype="int32")}
    axes["vocab_size"] = Const(abbrev="v")
    return _template("sampling", "chain_speculative_sampling", axes, inputs, outputs, "speculative")


def _of_pages() -> TraceTemplate:
    rows, cache = "nnz_kv num_kv_heads head_dim", "num_pages page_size num_kv_heads head_dim"
    inputs = {"append_key": _tensor(rows), "append_value": _tensor(rows)}
    caches = {
        name: _tensor(cache, param="paged_kv_cache", tuple_idx=i)
        for i, name in enumerate(("paged_k_cache", "paged_v_cache"))
    }
    outputs = {
        name: _tensor(cache, param="paged_kv_cache", tuple_idx=i, dtype_from="append_key")
        for i, name in enumerate(caches)
    }
    return _append("append_paged_kv_cache", inputs | caches, outputs, num_kv_heads=Const(abbrev="kv"),
                   head_dim=Const(abbrev="d"))  # fmt: skip


def _of_latent_pages() -> TraceTemplate:
    parts, inputs, outputs = ("ckv", "kpe"), {}, {}
    for part in parts:
        inputs[f"append_{part}"] = _tensor(f"nnz_kv head_dim_{part}")
    for part in parts:
        cache = f"num_pages page_size head_dim_{part}"
        inputs[f"{part}_cache"] = _tensor(cache)
        outputs[f"{part}_cache"] = _tensor(cache, param=f"{part}_cache", dtype_from=f"append_{part}")
    return _append("append_paged_mla_kv_cache", inputs, outputs, head_dim_ckv=Const(abbrev="ckv"),
                   head_dim_kpe=Const(abbrev="kpe"))  # fmt: skip


TEMPLATES: dict[str, dict[str, TraceTemplate]] = {
    "flashinfer.activation": {
        name: _gate(name, getattr(references, name)) for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    },
    "flashinfer.cascade": {
        "merge_state": _merge(
            "merge_state",
            {"v_a": _tensor(_V), "s_a": _tensor(_S), "v_b": _tensor(_V), "s_b": _tensor(_S)},
            {"v_merged": _tensor(_V, dtype_from="v_a"), "s_merged": _tensor(_S, dtype="float32")},
            references.merge_state,
        ),
        "merge_state_in_place": _merge(
            "merge_state_in_place",
            {"v": _tensor(_V), "s": _tensor(_S), "v_other": _tensor(_V), "s_other": _tensor(_S),
             "mask": _tensor("seq_len", dtype="bool", optional=True)},
            {"v": _tensor(_V, param="v", dtype_from="v"), "s": _tensor(_S, param="s", dtype="float32")},
            references.merge_state_in_place,
        ),
        "merge_states": _merge(
            "merge_states",
            {"v": _tensor("seq_len num_states num_heads head_dim"), "s": _tensor("seq_len num_states num_heads")},
            {"v_merged": _tensor(_V, dtype_from="v"), "s_merged": _tensor(_S, dtype="float32")},
            references.merge_states,
            num_states=Var(),
        ),
    },
    "flashinfer.gemm": {
        "mm_bf16": _product("gemm_bf16", "a b", description="Without a bias."),
        "bmm_bf16": _product("bmm_bf16", "A B", "batch_size"),
    },
    "flashinfer.norm": {
        "layernorm": _layernorm(),
        "rmsnorm": _norm("rmsnorm", references.rmsnorm),
        "gemma_rmsnorm": _norm("gemma_rmsnorm", references.gemma_rmsnorm),
        "fused_add_rmsnorm": _norm("fused_add_rmsnorm", references.fused_add_rmsnorm, add=True),
        "gemma_fused_add_rmsnorm": _norm("gemma_fused_add_rmsnorm", references.gemma_fused_add_rmsnorm, add=True),
        "rmsnorm_quant": _norm("rmsnorm_quant", references.rmsnorm_quant, out="out"),
        "fused_add_rmsnorm_quant": _norm(
            "fused_add_rmsnorm_quant", references.fused_add_rmsnorm_quant, add=True, out="out"
        ),
    },
    "flashinfer.page": {"append_paged_kv_cache": _of_pages(), "append_paged_mla_kv_cache": _of_latent_pages()},
    "flashinfer.rope": _ropes(),
    "flashinfer.sampling": {
        "softmax": _rows("softmax", "logits", {"temperature": Scalar("float32", optional=True)}, "output",
                         references.softmax),
        "top_p_renorm_probs": _rows("top_p_renorm_probs", "probs", _P, "renormalized"),
        "top_k_renorm_probs": _rows("top_k_renorm_probs", "probs", _K, "renormalized"),
        "top_k_mask_logits": _rows("top_k_mask_logits", "logits", _K, "masked_logits"),
        "sampling_from_probs": _draws("sampling_from_probs", "probs", {}),
        "sampling_from_logits": _draws("sampling_from_logits", "logits", {}),
        "min_p_sampling_from_probs": _draws("min_p_sampling", "probs", {"min_p": Scalar("float32")}),
        "top_k_sampling_from_probs": _draws("top_k_sampling", "probs", _EACH_K),
        "top_p_sampling_from_probs": _draws("top_p_sampling", "probs", _EACH_P),
        "top_k_top_p_sampling_from_probs": _draws("top_k_top_p_sampling", "probs", _EACH_K | _EACH_P),
        "top_k_top_p_sampling_from_logits": _draws("top_k_top_p_sampling_from_logits", "logits", _K | _P),
        "chain_speculative_sampling": _chain(),
    },
}  # fmt: skip


def describe(module: str, names: dict[str, Any]) -> None:
    """Give the functions of a public module, by its names, their `fi_trace`."""
    for name, template in TEMPLATES[module].items():
        attach(names[name], template, f"{module}.{name}")
