"""Attention as engines call it through upstream, with signatures of other libraries: TensorRT-LLM's variants."""
