"""Serve Gemma 3 270M with continuous batching on flashinfer, and compare it with Hugging Face's `generate`."""

import argparse
import json
import platform
import random
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console

from . import report, weights
from .baseline import HuggingFace
from .engine import Engine, Request, common_prefix, top_p
from .model import Config
from .prompts import demo_prompts

MEAN_STEPS_BETWEEN_ARRIVALS = 1.5


def parse(arguments) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__)
    add = parser.add_argument
    add("--requests", type=positive, default=12, help="how many prompts to serve (default 12)")
    add("--max-new-tokens", type=positive, default=64, help="longest text of a request (default 64)")
    add("--chunk", type=positive, default=256, help="most tokens of one step (default 256)")
    add("--page-size", type=positive, default=16, help="tokens of a KV page (default 16)")
    device_and_dtype(parser)
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens that sum to P; default: greedy")
    add("--seed", type=int, default=0, help="of arrivals and of sampling (default 0)")
    add("--no-compare", action="store_true", help="do not run Hugging Face's generate")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(arguments)
    if args.top_p is not None and not 0 < args.top_p <= 1:
        parser.error(f"--top-p: got {args.top_p}; allowed: above 0, up to 1")
    return args


def device_and_dtype(parser: argparse.ArgumentParser) -> None:
    """The options --device and --dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    parser.add_argument("--device", type=torch.device, default=device, help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", type=kinds.get, choices=kinds.values(), default=dtype, metavar="{float32,bfloat16}",
        help="default: bfloat16 if there is a GPU, else float32",
    )  # fmt: skip


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: 1 or more")
    return int(text)


def build_engine(args, path, eos_id, prompts) -> Engine:
    generator = torch.Generator(args.device).manual_seed(args.seed)
    sample = partial(top_p, p=args.top_p, generator=generator) if args.top_p else partial(torch.argmax, dim=-1)
    lengths = [len(prompt) + args.max_new_tokens for prompt in prompts]
    num_pages = sum(-(-length // args.page_size) for length in lengths)
    tensors = weights.load_weights(path, args.device, args.dtype)
    return Engine(Config(), tensors, num_pages, args.page_size, max(lengths), args.chunk, eos_id, sample)


def poisson(args, prompts) -> list[Request]:
    """The prompts as requests that arrive at random."""
    source = random.Random(args.seed)
    arrivals = accumulate(source.expovariate(1 / MEAN_STEPS_BETWEEN_ARRIVALS) for _ in prompts)
    return [Request(prompt, args.max_new_tokens, int(step)) for prompt, step in zip(prompts, arrivals)]


def compare(console, args, path, tokenizer, requests, figures) -> bool:
    """Run the baseline, show the speeds, and say whether the greedy texts agree as they must."""
    console.print("Loading Hugging Face's model, with its own progress bars")
    model = HuggingFace(path, args.device, args.dtype, tokenizer.eos_token_id, tokenizer.pad_token_id)
    prompts, texts = [request.prompt for request in requests], [request.output for request in requests]
    ours, agreement = figures["engine"]["all"], {}
    speeds = {"flashinfer engine": {"seconds": ours["seconds"], "new tokens": ours["new tokens"]}}
    for name, batch_size in (("generate, one by one", 1), ("generate, padded batch", len(prompts))):
        with report.status(console, f"Hugging Face: {name}"):
            model.generate(sorted(prompts, key=len)[:2], 4, batch_size)
            outputs, seconds = model.generate(prompts, args.max_new_tokens, batch_size)
        speeds[name] = {"seconds": seconds, "new tokens": sum(map(len, outputs))}
        same = sum(map(common_prefix, texts, outputs))
        differences = model.differences(prompts, outputs, texts)
        agreement[name] = {"agree": same, "of": speeds[name]["new tokens"], "first differences": differences}
    for row in speeds.values():
        row["tokens/s"] = row["new tokens"] / row["seconds"]
        row["flashinfer / this"] = ours["new tokens/s"] / row["tokens/s"]
    figures["against Hugging Face"] = speeds
    report.show(console, "Against Hugging Face", speeds)
    if args.top_p:
        return True
    figures["greedy tokens that agree"] = agreement
    report.show(console, "Greedy tokens that agree", agreement)
    return args.dtype != torch.float32 or not any(row["first differences"] for row in agreement.values())


def main(arguments=None) -> int:
    args, console = parse(arguments), Console()
    with report.status(console, "Loading Gemma 3 270M, and a first request: minutes on a busy CPU"):
        path = weights.gguf_file()
        tokenizer = weights.load_tokenizer(path)
        prompts = [weights.encode(tokenizer, prompt) for prompt in demo_prompts(args.requests)]
        engine = build_engine(args, path, tokenizer.eos_token_id, prompts)
        # Prefill, a mixed step and decode, so that no first-use cost is timed.
        engine.serve([Request(max(prompts, key=len), 4), Request(min(prompts, key=len), 4, arrival=2)])
        engine.reset()
    on_gpu, threads = args.device.type == "cuda", torch.get_num_threads()
    device = torch.cuda.get_device_name(args.device) if on_gpu else f"{platform.machine()} CPU, {threads} threads"
    figures = {"device": device, "dtype": str(args.dtype), "torch": torch.__version__}
    console.print(f"Gemma 3 270M in {args.dtype} on {device}: {len(prompts)} requests")
    sampler = f"flashinfer.top_p_sampling_from_probs, top_p={args.top_p}" if args.top_p else "argmax (greedy)"
    console.print(f"Tokens are chosen by {sampler}")
    requests = poisson(args, prompts)
    report.serve_in_view(console, engine, requests, tokenizer)
    for name, part in report.engine_figures(engine).items():
        figures[name] = part
        report.show(console, name, part)
    agree = args.no_compare or compare(console, args, path, tokenizer, requests, figures)
    console.print(report.summary(figures))
    engine.reset()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if agree else 1
