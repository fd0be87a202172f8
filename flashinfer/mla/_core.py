"""The path and the name by which engines replace upstream's allocation of counters."""

from flashinfer.compat.buffers import _get_trtllm_gen_multi_ctas_kv_counter_buffer

__all__ = ["_get_trtllm_gen_multi_ctas_kv_counter_buffer"]
