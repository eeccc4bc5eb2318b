"""The attention backend `BLOCKFLASH` of vLLM 0.32 and 0.33.

vLLM finds `register` by the entry point `vllm.general_plugins` of the package and calls it in each
of its processes; `vllm serve MODEL --attention-backend BLOCKFLASH` then selects the backend. It is
never selected otherwise.
"""

from __future__ import annotations

import logging

__all__ = ["NAME", "register"]

NAME = "BLOCKFLASH"
"""The name to give as `--attention-backend`."""

_CLASS = "blockflash.vllm._backend.BlockflashBackend"
_logger = logging.getLogger(__name__)


def register() -> None:
    """Make the name known to vLLM; again and again, if it likes.

    It imports neither torch nor the backend. vLLM calls it even where another backend is used, so
    it warns rather than raises where vLLM's registry is not the one that it knows.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        known = NAME in AttentionBackendEnum.__members__
        register_backend(AttentionBackendEnum[NAME] if known else NAME, _CLASS)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _logger.warning("vLLM does not take the attention backend %s: %r", NAME, error)
