"""Attention backends of vLLM 0.32 and 0.33, whose names begin with `BLOCKFLASH`.

vLLM finds `register` by the entry point `vllm.general_plugins` of the package and calls it in each
of its processes; `vllm serve MODEL --attention-backend BLOCKFLASH` then selects the backend,
`BLOCKFLASH_MLA` that of models with latent rows, and `BLOCKFLASH_MLA_SPARSE` that of such models
with an indexer. They are never selected otherwise.
"""

from __future__ import annotations

import logging

__all__ = ["MLA_NAME", "NAME", "SPARSE_MLA_NAME", "register"]

NAME = "BLOCKFLASH"
"""The name to give as `--attention-backend`."""

MLA_NAME = "BLOCKFLASH_MLA"
"""The name for models with multi-head latent attention, such as DeepSeek's."""

SPARSE_MLA_NAME = "BLOCKFLASH_MLA_SPARSE"
"""The name for those whose indexer lists the tokens of each query, such as DeepSeek V3.2."""

_CLASSES = {
    NAME: "blockflash.vllm._backend.BlockflashBackend",
    MLA_NAME: "blockflash.vllm._mla.BlockflashMLABackend",
    SPARSE_MLA_NAME: "blockflash.vllm._sparse_mla.BlockflashSparseMLABackend",
}
_logger = logging.getLogger(__name__)


def register() -> None:
    """Make the names known to vLLM; again and again, if it likes.

    It imports neither torch nor the backend. vLLM calls it even where another backend is used, so
    it warns rather than raises where vLLM's registry is not the one that it knows.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for name, path in _CLASSES.items():
            known = name in AttentionBackendEnum.__members__
            register_backend(AttentionBackendEnum[name] if known else name, path)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _logger.warning("vLLM does not take the attention backend %s: %r", NAME, error)
