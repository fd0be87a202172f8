"""A plugin of SGLang, found by its entry point in `sglang.srt.plugins`: this library's attention, without a flag.

SGLang asks its server arguments for an attention backend where none is given, and takes "fa3" or "triton" on a GPU that
this library runs on. The plugin answers "flashinfer" there, and leaves other answers as they are. `--attention-backend`
overrides it, and SGLANG_PLUGINS, which lists the plugins to load, leaves it out.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("flashinfer")
FLAG = "--attention-backend flashinfer"
REPLACED = ("fa3", "triton")


def prefer() -> None:
    """Make "flashinfer" SGLang's default attention backend, in this process."""
    from sglang.srt.server_args import ServerArgs

    default = getattr(ServerArgs, "_get_default_attn_backend", None)
    if default is None:
        _log.warning("this SGLang has no _get_default_attn_backend to answer for; give it %s", FLAG)
    elif default.__module__ != __name__:

        def ours_first(self, *args, **kwargs):
            chosen = default(self, *args, **kwargs)
            return "flashinfer" if chosen in REPLACED else chosen

        ServerArgs._get_default_attn_backend = ours_first
