"""Nothing but a version: upstream's distribution of binaries has a module of this name, and vLLM looks for it.

vLLM takes FlashInfer for absent where it finds neither nvcc nor this module. `flashinfer` needs neither: it has no
binaries, and compiles its kernels without nvcc.
"""

from flashinfer.version import __version__

__all__ = ["__version__"]
