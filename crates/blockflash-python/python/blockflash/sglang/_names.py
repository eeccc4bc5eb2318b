"""Names that several modules know."""

from __future__ import annotations

REPLACES = "BLOCKFLASH_SGLANG_REPLACES"
"""The environment variable with the name of a backend of SGLang that this one takes the place of.

Some models and options are for backends in lists of SGLang alone, and this is not among them.
"""

LISTED = ("dsa", "nsa")
"""SGLang's names of its backend of models with an indexer, of which attention alone is replaced."""
