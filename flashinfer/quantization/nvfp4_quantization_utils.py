"""NVFP4's global scale, and the recipe that maps a block to 4 or to 6."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields
from enum import IntEnum

import torch

from flashinfer._core import env
from flashinfer._core.arguments import checked
from flashinfer._core.checks import require

__all__ = [
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "current_nvfp4_4over6_config",
    "make_nvfp4_global_scale",
    "nvfp4_4over6_code",
    "nvfp4_4over6_from_code",
    "nvfp4_e4m3_max",
    "resolve_nvfp4_4over6",
]

_E2M1_MAX = 6.0
_E4M3_MAX = 448
_FLOAT32_MAX = torch.finfo(torch.float32).max


class Unset:
    """The default of `nvfp4_4over6`: the environment decides."""

    def __repr__(self) -> str:
        return "<unset: FLASHINFER_NVFP4_4OVER6 decides>"


UNSET = Unset()

class NVFP44Over6ErrMode(IntEnum):
    """The error that chooses between a block's two candidates: of magnitudes, or of squares."""

    MAE = 0
    MSE = 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


@dataclass(frozen=True, repr=False)
class NVFP44Over6Config:
    """The NVFP4 recipe "four over six": a block's largest value is mapped to 4 or to 6, whichever errs less.

    Parameters
    ----------
    e4m3_max : int
        448 or 256: the factor that `make_nvfp4_global_scale` gives the block with the largest value of all when that is
        mapped to 6. 256 leaves room for the 384 that mapping to 4 needs.
    err_mode : NVFP44Over6ErrMode or str
        "MAE" or "MSE", in any case. Equal errors take 6.
    err_use_fast_math : bool
        Permits float16 for the error. It is computed in float32 either way.

    Raises
    ------
    ValueError
        Another e4m3_max or err_mode.

    References
    ----------
    Cook et al., Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling, 2025,
    https://arxiv.org/abs/2512.02010

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.NVFP44Over6Config(256, "MSE").err_mode_name
    'MSE'
    """

    e4m3_max: int = _E4M3_MAX
    err_mode: NVFP44Over6ErrMode | str = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def __post_init__(self):
        require(self.e4m3_max in (256, 448), "e4m3_max", self.e4m3_max, "256, 448")
        modes = NVFP44Over6ErrMode.__members__
        if isinstance(self.err_mode, str):
            require(self.err_mode.upper() in modes, "err_mode", repr(self.err_mode), ", ".join(modes))
            object.__setattr__(self, "err_mode", modes[self.err_mode.upper()])
        else:
            require(self.err_mode in list(modes.values()), "err_mode", self.err_mode, ", ".join(modes))
            object.__setattr__(self, "err_mode", NVFP44Over6ErrMode(self.err_mode))

    @property
    def err_mode_name(self) -> str:
        """ "MAE" or "MSE"."""
        return NVFP44Over6ErrMode(self.err_mode).name

    def __repr__(self) -> str:
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(given)})"


def current_nvfp4_4over6_config() -> NVFP44Over6Config | None:
    """The recipe of the environment; None where FLASHINFER_NVFP4_4OVER6 is not 1.

    Raises
    ------
    ValueError
        A variable with another value than it may have.
    """
    if not env.NVFP4_4OVER6.is_on():
        return None
    largest = 256 if env.NVFP4_4OVER6_E4M3_USE_256.is_on() else _E4M3_MAX
    fast = env.NVFP4_4OVER6_ERR_USE_FAST_MATH.is_on()
    return NVFP44Over6Config(largest, env.NVFP4_4OVER6_ERR_MODE.get(), fast)


def resolve_nvfp4_4over6(setting: NVFP44Over6Config | Unset | None = UNSET) -> NVFP44Over6Config | None:
    """What an argument `nvfp4_4over6` means.

    Parameters
    ----------
    setting : NVFP44Over6Config or None
        A recipe, or None for none; left out, the environment decides, with a FutureWarning where it names one.

    Returns
    -------
    NVFP44Over6Config or None
        The recipe; None for none.

    Raises
    ------
    ValueError
        Anything else.

    Examples
    --------
    >>> import flashinfer
    >>> print(flashinfer.resolve_nvfp4_4over6(None))
    None
    """
    if setting is None or isinstance(setting, NVFP44Over6Config):
        return setting
    require(setting is UNSET, "nvfp4_4over6", repr(setting), "an NVFP44Over6Config, or None")
    found = current_nvfp4_4over6_config()
    if found is not None:
        message = f"{env.NVFP4_4OVER6.name} chooses the NVFP4 recipe; pass nvfp4_4over6="
        warnings.warn(message, FutureWarning, stacklevel=3)
    return found


@checked
def nvfp4_4over6_code(config: NVFP44Over6Config | None) -> int:
    """A recipe as one number, as upstream's kernels take it.

    Parameters
    ----------
    config : NVFP44Over6Config, optional
        A recipe.

    Returns
    -------
    int
        0 for None; otherwise bit 0, bit 1 for an e4m3_max of 256, bits 2 and 3 the err_mode, bit 4 err_use_fast_math.

    Examples
    --------
    >>> from flashinfer.quantization import NVFP44Over6Config, nvfp4_4over6_code
    >>> nvfp4_4over6_code(NVFP44Over6Config(256, "MSE"))
    7
    """
    if config is None:
        return 0
    return 1 | (config.e4m3_max == 256) << 1 | int(config.err_mode) << 2 | bool(config.err_use_fast_math) << 4


@checked
def nvfp4_4over6_from_code(code: int) -> NVFP44Over6Config | Unset | None:
    """The recipe of a number of `nvfp4_4over6_code`.

    Parameters
    ----------
    code : int
        Such a number, or -1: the environment decides.

    Returns
    -------
    NVFP44Over6Config or None
        The recipe, None without bit 0; for -1 what `resolve_nvfp4_4over6` takes as an argument that was left out.

    Raises
    ------
    ValueError
        Another number below 0, one of more than five bits, or an unknown error.

    Examples
    --------
    >>> from flashinfer.quantization import nvfp4_4over6_from_code
    >>> nvfp4_4over6_from_code(7)
    NVFP44Over6Config(e4m3_max=256, err_mode=NVFP44Over6ErrMode.MSE)
    """
    require(-1 <= code < 32, "code", code, "-1, or five bits")
    if code == -1:
        return UNSET
    if not code & 1:
        return None
    mode = code >> 2 & 3
    require(mode < 2, "code", code, "an err_mode, bits 2 and 3, of 0 or 1")
    return NVFP44Over6Config(256 if code & 2 else _E4M3_MAX, NVFP44Over6ErrMode(mode), bool(code & 16))


def nvfp4_e4m3_max(nvfp4_4over6_config: NVFP44Over6Config | None = None) -> float:
    """The largest block factor that a global scale aims at: 448, or the recipe's. The environment is not read.

    Parameters
    ----------
    nvfp4_4over6_config : NVFP44Over6Config, optional
        A recipe.

    Returns
    -------
    float
        448, or the recipe's.

    Examples
    --------
    >>> from flashinfer.quantization import nvfp4_e4m3_max
    >>> nvfp4_e4m3_max()
    448.0
    """
    known = nvfp4_4over6_config is None or isinstance(nvfp4_4over6_config, NVFP44Over6Config)
    require(known, "nvfp4_4over6_config", repr(nvfp4_4over6_config), "an NVFP44Over6Config, or None")
    return float(_E4M3_MAX if nvfp4_4over6_config is None else nvfp4_4over6_config.e4m3_max)


@checked
def make_nvfp4_global_scale(
    input_tensor: torch.Tensor,
    per_token_activation: bool,
    global_scale: float | None = None,
    nvfp4_4over6_config: NVFP44Over6Config | None = None,
) -> torch.Tensor:
    """The global scale that `nvfp4_quantize` takes, for a recipe.

    Parameters
    ----------
    input_tensor : torch.Tensor
        What is to be quantised; bfloat16, float16 or float32.
    per_token_activation : bool
        Each row is to have a scale of its own: the result is then 1 / (e4m3_max x 6), whatever the input and
        `global_scale`.
    global_scale : float, optional
        The scale, where it is known, above 0; instead of e4m3_max x 6 / (largest magnitude), which takes a pass over
        the input.
    nvfp4_4over6_config : NVFP44Over6Config, optional
        The recipe that `nvfp4_quantize` is given. The environment is not read.

    Returns
    -------
    torch.Tensor
        float32 [1], on the device of `input_tensor`. Of an input of zeros it is the largest float32.

    Raises
    ------
    ValueError
        Another dtype or number.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.make_nvfp4_global_scale(torch.full((1, 16), 6.0).bfloat16(), False)
    tensor([448.])
    """
    floats = (torch.bfloat16, torch.float16, torch.float32)
    require(input_tensor.dtype in floats, "input_tensor", input_tensor.dtype, ", ".join(map(str, floats)))
    peak = nvfp4_e4m3_max(nvfp4_4over6_config) * _E2M1_MAX
    device = input_tensor.device
    if per_token_activation:
        return torch.full((1,), 1 / peak, dtype=torch.float32, device=device)
    if global_scale is not None:
        scale = float(global_scale)
        require(0 < scale < math.inf, "global_scale", scale, "a finite number above 0")
        return torch.full((1,), scale, dtype=torch.float32, device=device)
    if input_tensor.numel() == 0:
        return torch.full((1,), _FLOAT32_MAX, dtype=torch.float32, device=device)
    amax = input_tensor.abs().amax().float().view(1)
    return (peak / amax).clamp(max=_FLOAT32_MAX)
