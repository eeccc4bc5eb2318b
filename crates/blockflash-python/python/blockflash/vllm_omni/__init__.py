"""Dense attention of the diffusion models of vLLM-Omni 0.30, in place of its backend TORCH_SDPA.

The names of its backends are a closed list, so blockflash takes the place of one of them, where
the environment says `BLOCKFLASH_VLLM_OMNI=1`: vLLM-Omni calls `register` by the entry point
`vllm_omni.general_plugins` of the package, and `--diffusion-attention-backend TORCH_SDPA` selects
the backend. What no kernel takes is left to vLLM-Omni's own, with a warning once for each reason.
"""

from __future__ import annotations

import os

__all__ = ["VARIABLE", "register"]

VARIABLE = "BLOCKFLASH_VLLM_OMNI"
"""The environment variable: 1 replaces TORCH_SDPA, and 0 or nothing does not."""

_CLASS = "blockflash.vllm_omni._backend.BlockflashBackend"


def register() -> None:
    """Replaces TORCH_SDPA if the environment says so; again and again, if vLLM-Omni likes.

    Raises:
        ImportError: vLLM-Omni's registry is not where it was.
        ValueError: The variable is neither 0 nor 1.

    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}, not 0 or 1")
    if value != "1":
        return
    from vllm_omni.diffusion.attention.backends.registry import (
        DiffusionAttentionBackendEnum,
        register_diffusion_backend,
    )

    register_diffusion_backend(DiffusionAttentionBackendEnum.TORCH_SDPA, _CLASS)
