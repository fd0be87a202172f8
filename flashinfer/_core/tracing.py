"""Whether a call is recorded in place of being made."""

import torch

# Bound here: every call asks, and attributes take as long as the answer.
_is_compiling = torch.compiler.is_compiling
_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_KEYS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_traced() -> bool:
    """Under torch's compiler, or a mode of its tracers, as those of fake tensors and of make_fx.

    What is no op would launch kernels on tensors without memory there.
    """
    return _is_compiling() or _modes() > 0 and any(_mode(key) is not None for key in _KEYS)
