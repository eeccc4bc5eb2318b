"""Attention and block-sparse matrix multiplication for PyTorch on precompiled kernels.

Names are loaded when they are first used, so `import blockflash` is cheap and works without torch.
"""

from __future__ import annotations

import importlib

from ._native import DeviceError, Unsupported

TYPE_CHECKING = False  # Known to type checkers, without the cost of importing `typing`.
if TYPE_CHECKING:
    from typing import Any

    from ._attention import attention
    from ._info import info, usable

# The module of each public name.
_MODULES = {"attention": "._attention", "info": "._info", "usable": "._info"}

__all__ = ["DeviceError", "Unsupported", "attention", "info", "usable"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"blockflash.{name} needs PyTorch: pip install 'torch>=2.10'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_MODULES))
