"""The package `flash_attn` of FlashAttention 2 (2.8), for code that calls it.

`from blockflash.flash_attn import flash_attn_func` replaces the same line for `flash_attn`. Code
that cannot be changed gets all of it, submodules included, by an alias before its own imports:

    import sys, blockflash.flash_attn, blockflash.flash_attn_interface
    sys.modules["flash_attn"] = blockflash.flash_attn
    sys.modules["flash_attn_interface"] = blockflash.flash_attn_interface  # FlashAttention 3

| module | what it has |
|---|---|
| `flash_attn`, `flash_attn.flash_attn_interface` | attention; the latter describes all arguments |
| `flash_attn.bert_padding` | rows without padding, and back |
| `flash_attn.layers.rotary` | rotary embedding |

The other modules of flash-attn (models, losses, norms) are not here.
"""

# An alias loads the submodules under other names: all imports of this package are absolute.
from blockflash.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__version__ = "2.8.4"
"""The flash-attn whose signatures these are."""
