"""A plugin of vLLM, found by its entry point in `vllm.general_plugins`: this library before the others, without a flag.

vLLM tries attention backends in an order, and takes the first that validates the model. The plugin puts those named
FLASHINFER in front; what they refuse goes on as before. `--attention-backend` overrides it, and VLLM_PLUGINS, which
lists the plugins to load, leaves it out. vLLM samples with FlashInfer on its own.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("flashinfer")
FLAG = "--attention-backend FLASHINFER"


def prefer() -> None:
    """Put the FLASHINFER backends in front of vLLM's order, in this process; without a CUDA device, do nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.platforms import cuda

    order = getattr(cuda, "_get_backend_priorities", None)
    if order is None:
        _log.warning("this vLLM has no _get_backend_priorities to order backends by; give it %s", FLAG)
    elif order.__module__ != __name__:

        def ours_first(*args, **kwargs):
            return sorted(order(*args, **kwargs), key=lambda backend: not backend.name.startswith("FLASHINFER"))

        cuda._get_backend_priorities = ours_first
