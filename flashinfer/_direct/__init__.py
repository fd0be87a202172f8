"""Attention in the forms of other libraries that engines call through upstream: TensorRT-LLM's, of all variants."""
