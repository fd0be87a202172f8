"""The path by which callers of upstream reach the names of `flashinfer.gemm`, and the size of upstream's workspace."""

from flashinfer.compat.buffers import _get_cache_buf as _get_cache_buf
from flashinfer.compat.paths import names_of

# Bytes, upstream's number. Products here need no workspace.
DEFAULT_WORKSPACE_SIZE = 40 * 1024 * 1024

__all__ = ["DEFAULT_WORKSPACE_SIZE"]
__getattr__ = names_of("flashinfer.gemm", __name__)
