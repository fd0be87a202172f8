"""Whether a call is recorded in place of being made."""

import torch

_KEYS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_traced() -> bool:
    """Under torch's compiler, or a mode of its tracers, as those of fake tensors and of make_fx.

    What is no op would launch kernels on tensors without memory there.
    """
    if torch.compiler.is_compiling():
        return True
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _KEYS)
