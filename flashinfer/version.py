"""The version of this package, and the versions of Python packages that it supports."""

import re
import warnings
from importlib import metadata

from flashinfer._core import env

try:
    # Written into a wheel that is built with FLASHINFER_PUBLIC_VERSION (setup.py).
    from flashinfer._core.public_version import PUBLIC
except ImportError:
    PUBLIC = "0.7.2.post1"

# The public part is the upstream API that this package answers to, the local part is its own count.
__version__ = f"{PUBLIC}+py.2"

# distribution names that provide the module, first supported (major, minor), first unsupported one or None
SUPPORTED = {
    "torch": (("torch",), (2, 10), None),
    "triton": (("triton", "pytorch-triton"), (3, 6), (3, 10)),
}


def installed(module: str) -> str:
    """Version of the distribution that provides `module`, '' if none is installed; imports nothing."""
    for distribution in SUPPORTED[module][0]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def supported_range(module: str) -> str:
    """The supported versions as a requirement specifier, such as '>=3.6,<3.10'."""
    _, low, high = SUPPORTED[module]
    return f">={low[0]}.{low[1]}" + (f",<{high[0]}.{high[1]}" if high else "")


def is_supported(module: str, version: str) -> bool:
    """Whether `version` lies in the supported range; builds such as '2.10.0a0+git1234' count by major and minor."""
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None:
        return False
    _, low, high = SUPPORTED[module]
    number = (int(release[1]), int(release[2]))
    return number >= low and (high is None or number < high)


def check_supported() -> None:
    """Raise ImportError if torch or Triton is absent or outside the supported range.

    With FLASHINFER_DISABLE_VERSION_CHECK set to anything, it is a warning.
    """
    found = {module: installed(module) for module in SUPPORTED}
    if all(is_supported(module, version) for module, version in found.items()):
        return
    message = (
        f"flashinfer {__version__} supports "
        + " and ".join(f"{module} {supported_range(module)}" for module in SUPPORTED)
        + "; found "
        + " and ".join(f"{module} {version or '(not installed)'}" for module, version in found.items())
        + f". {env.DISABLE_VERSION_CHECK.name}=1 turns this error into a warning."
    )
    if env.DISABLE_VERSION_CHECK.get():
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return
    raise ImportError(message)
