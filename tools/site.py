"""Hooks of the documentation site: pages made of the repository's own files, and one page of the API for each task.

The site shows docs/ as it is, README.md as its first page, CONTRIBUTING.md, CHANGELOG.md and SECURITY.md, and under
api/ the docstrings of every public name. A public name stands in the `__all__` of a public module.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flashinfer"
# The repository's files, and their pages.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# task -> (title, public modules)
API = {
    "attention": ("Attention", ("decode", "prefill", "attention", "cascade", "sparse", "pod", "xqa", "cudnn")),
    "latent": (
        "Latent and sparse attention",
        ("mla", "attn_scores", "dense_mqa", "paged_mqa", "dsa_indexer", "dsa_sparse_attention", "msa_ops"),
    ),
    "recurrent": (
        "Recurrent layers",
        ("gdn_prefill", "gdn_decode", "gdn_kernels", "gdn2_prefill", "gdp_prefill", "kda", "kda_prefill", "kda_decode",
         "causal_conv1d", "mamba", "mhc"),
    ),
    "cache": ("KV caches", ("core", "page", "mla_kv_pack")),
    "tokens": ("Norms, rotation, activations", ("norm", "rope", "activation", "concat_ops", "diffusion_ops")),
    "sampling": ("Sampling and top-k", ("sampling", "topk", "logits_processor")),
    "quantization": ("Quantisation", ("quantization", "fp8_quantization", "fp4_quantization", "gated_act_mxfp8")),
    "gemm": ("Matrix products", ("gemm", "grouped_mm", "trtllm_low_latency_gemm")),
    "moe": ("Mixtures of experts", ("fused_moe", "tllm_enums")),
    "comm": ("Collectives", ("comm", "moe_ep")),
    "tools": (
        "Tuning, timing, logging",
        ("autotuner", "autotune_cache", "testing", "api_logging", "trace_apply", "collect_env"),
    ),
}


def source(module):
    """The file of a public module, or None."""
    for path in (PACKAGE / f"{module}.py", PACKAGE / module / "__init__.py"):
        if path.exists():
            return path
    return None


def public_names(path):
    """What `__all__` lists; without one, the functions and classes that a file defines."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            return sorted(name for name in names if not name.startswith("_"))
    kinds = ast.FunctionDef, ast.ClassDef
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def api_page(task):
    title, modules = API[task]
    lines, seen = [f"# {title}", ""], set()
    for module in modules:
        path = source(module)
        if path is None:
            continue
        lines += [f"## flashinfer.{module}", "", ast.get_docstring(ast.parse(path.read_text())) or "", ""]
        for name in public_names(path):
            if name not in seen:
                lines += [f"::: flashinfer.{module}.{name}", ""]
            seen.add(name)
    return "\n".join(lines)


def on_files(files, config):
    # Only building the site needs it; a test reads the table of modules.
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "LICENSE.txt", content=(ROOT / "LICENSE").read_text()))
    for task in API:
        files.append(File.generated(config, f"api/{task}.md", content=api_page(task)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links between the repository's files, as links between their pages."""
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(name)}(#[\w-]+)?\)", rf"]({up}{target}\1)", markdown)
    markdown = markdown.replace("](LICENSE)", f"]({up}LICENSE.txt)")
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace("](docs/", "](")
    return markdown
