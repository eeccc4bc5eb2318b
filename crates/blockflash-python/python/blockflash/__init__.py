"""Attention and block-sparse matrix multiplication for PyTorch on precompiled kernels.

Names are loaded when they are first used, so `import blockflash` is cheap and works without torch.
"""

from __future__ import annotations

import importlib

from ._native import DeviceError, Unsupported
from ._native import __version__ as __version__

TYPE_CHECKING = False  # Known to type checkers, without the cost of importing `typing`.
if TYPE_CHECKING:
    from typing import Any

    from . import distributed as distributed
    from . import jax as jax
    from . import sparse as sparse
    from ._append import append_kv
    from ._attention import attention, block_sparse_attention
    from ._codes import quantize
    from ._decode import attention_decode, attention_merge
    from ._index import index_attention
    from ._index_choice import block_scores, top_k
    from ._info import info, set_checks, usable
    from ._mla import mla_append, mla_decode
    from ._pages import choose_pages, summarize_pages
    from ._stats import reset_stats, stats, strict
    from .block_mask import BlockMask
    from .sdpa import activate_sdpa, restore_sdpa, scaled_dot_product_attention

# The module of each public name.
_MODULES = {
    "BlockMask": ".block_mask",
    "activate_sdpa": ".sdpa",
    "append_kv": "._append",
    "attention": "._attention",
    "attention_decode": "._decode",
    "attention_merge": "._decode",
    "block_scores": "._index_choice",
    "block_sparse_attention": "._attention",
    "choose_pages": "._pages",
    "distributed": ".distributed",
    "index_attention": "._index",
    "info": "._info",
    "jax": ".jax",
    "mla_append": "._mla",
    "mla_decode": "._mla",
    "quantize": "._codes",
    "reset_stats": "._stats",
    "restore_sdpa": ".sdpa",
    "scaled_dot_product_attention": ".sdpa",
    "set_checks": "._info",
    "sparse": ".sparse",
    "stats": "._stats",
    "strict": "._stats",
    "summarize_pages": "._pages",
    "top_k": "._index_choice",
    "usable": "._info",
}

# What a user installs beside the package.
_NEEDED = {
    "jax": "JAX: pip install 'jax>=0.10'",
    "torch": "PyTorch: pip install 'torch>=2.10'",
}

__all__ = [
    "BlockMask",
    "DeviceError",
    "Unsupported",
    "activate_sdpa",
    "append_kv",
    "attention",
    "attention_decode",
    "attention_merge",
    "block_scores",
    "block_sparse_attention",
    "choose_pages",
    "index_attention",
    "info",
    "mla_append",
    "mla_decode",
    "quantize",
    "reset_stats",
    "restore_sdpa",
    "scaled_dot_product_attention",
    "set_checks",
    "stats",
    "strict",
    "summarize_pages",
    "top_k",
    "usable",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name], __name__)
        value = module if _MODULES[name] == f".{name}" else getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        raise ImportError(f"blockflash.{name} needs {_NEEDED[error.name]}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_MODULES))
