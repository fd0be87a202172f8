"""The same prompts through Hugging Face's own Gemma 3 and `generate`, greedy."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .engine import common_prefix


class HuggingFace:
    """transformers' model, read from the same GGUF file by transformers' own loader."""

    def __init__(self, path: Path, device, dtype, eos_id: int, pad_id: int):
        options = {"gguf_file": path.name, "dtype": dtype, "local_files_only": True}
        self.model: Any = AutoModelForCausalLM.from_pretrained(path.parent, **options).to(device)
        self.device, self.eos_id, self.pad_id = device, eos_id, pad_id

    def generate(self, prompts: list[list[int]], max_new_tokens: int, batch_size: int) -> tuple[list[list[int]], float]:
        """New tokens of each prompt, to its end-of-sequence token, and the seconds taken. Batches are padded left."""
        outputs, start = [], time.perf_counter()
        for i in range(0, len(prompts), batch_size):
            batch = prompts[i : i + batch_size]
            padding = [max(map(len, batch)) - len(prompt) for prompt in batch]
            ids = [[self.pad_id] * pad + prompt for pad, prompt in zip(padding, batch)]
            mask = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(padding, batch)]
            inputs = torch.tensor([ids, mask], device=self.device)
            options = {"max_new_tokens": max_new_tokens, "eos_token_id": self.eos_id, "pad_token_id": self.pad_id}
            sequences = self.model.generate(inputs[0], attention_mask=inputs[1], do_sample=False, **options)
            for tokens in sequences[:, len(ids[0]) :].tolist():
                outputs.append(tokens[: tokens.index(self.eos_id) + 1] if self.eos_id in tokens else tokens)
        return outputs, time.perf_counter() - start

    @torch.inference_mode()
    def differences(self, prompts, outputs, others) -> list[dict]:
        """Where `others` first leave this model's `outputs`, and how far its logits are apart on the two tokens."""
        found = []
        for number, (prompt, mine, other) in enumerate(zip(prompts, outputs, others, strict=True)):
            if mine != other:
                at = common_prefix(mine, other)
                context = torch.tensor([prompt + mine[:at]], device=self.device)
                logits = self.model(context, logits_to_keep=1).logits[0, -1].float()
                gap = float(logits[mine[at]] - logits[other[at]])
                found.append({"prompt": number, "new token": at, "logit gap": gap})
        return found
