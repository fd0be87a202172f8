"""The path by which callers of upstream reach DeepSeek-V3's routing."""

from flashinfer.fused_moe.routing import fused_topk_deepseek

__all__ = ["fused_topk_deepseek"]
