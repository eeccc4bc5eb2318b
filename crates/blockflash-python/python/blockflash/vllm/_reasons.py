"""Why a configuration is refused, in words that tell what to do instead."""

from __future__ import annotations

ELSEWHERE = "leave out --attention-backend, or name FLASH_ATTN, for this model"
ELSEWHERE_MLA = "leave out --attention-backend, or name TRITON_MLA, for this model"
ELSEWHERE_SPARSE = "leave out --attention-backend for this model"

PREFIX = f"a mask over pages cannot let the tokens of an image see each other: {ELSEWHERE}"
RSWA = f"kernels have one window, which no prompt is excepted from: {ELSEWHERE}"
ENCODERS = f"it attends to pages of a cache that is causal in time, as decoders do: {ELSEWHERE}"

MORE = {
    "head_size not supported": "it takes multiples of 8 up to 512",
    "dtype not supported": "it takes float16 and bfloat16: give --dtype",
    "kv_cache_dtype not supported": "give --kv-cache-dtype auto, fp8, fp8_e5m2, fp8_per_token_head "
    "or int8_per_token_head",
    "block_size not supported": "give --block-size as a multiple of 16",
    "partial multimodal token full attention not supported": PREFIX,
    "MLA not supported": "give --attention-backend BLOCKFLASH_MLA, which decodes latent rows",
    "sparse not supported": f"it takes no choice of keys for each query: {ELSEWHERE}",
    "compute capability not supported": "it needs a GPU of compute capability 8.0 or newer",
    "R-SWA not supported": RSWA,
    "batch invariance not supported": "the bits of a token depend on no other request, but on how "
    "many tokens of its own request a step computes, which chunks of prompts and cached prefixes "
    "change: unset VLLM_BATCH_INVARIANT, or use FLASH_ATTN",
    "PCP not supported": "give --prefill-context-parallel-size 1",
    "DCP not supported": "give --decode-context-parallel-size 1",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": ""
    "turn enable_adaptive_verification off",
}
"""What is added to the reasons of vLLM's `validate_configuration`."""


MORE_MLA = MORE | {
    "head_size not supported": f"it takes latent rows of 576 and of 512: {ELSEWHERE_MLA}",
    "kv_cache_dtype not supported": "give --kv-cache-dtype auto or fp8_ds_mla",
    "non-MLA not supported": "give --attention-backend BLOCKFLASH",
    "sparse not supported": "give --attention-backend BLOCKFLASH_MLA_SPARSE",
    "attention sinks not supported": ELSEWHERE_MLA,
    "sliding window not supported": ELSEWHERE_MLA,
    "non-causal attention not supported": ELSEWHERE_MLA,
    "per-head quant scales not supported": "give --kv-cache-dtype auto",
}
"""The same for latent rows."""


MORE_SPARSE = MORE_MLA | {
    "head_size not supported": f"it takes latent rows of 576 and of 512: {ELSEWHERE_SPARSE}",
    "kv_cache_dtype not supported": "give --kv-cache-dtype bfloat16 or fp8_ds_mla",
    "non-MLA not supported": f"it takes no lists of keys but of latent rows: {ELSEWHERE_SPARSE}",
    "non-sparse not supported": "give --attention-backend BLOCKFLASH_MLA",
    "attention sinks not supported": ELSEWHERE_SPARSE,
    "sliding window not supported": ELSEWHERE_SPARSE,
    "non-causal attention not supported": ELSEWHERE_SPARSE,
    "batch invariance not supported": "the bits of a token depend on the order of its list, which "
    f"the indexer chooses: unset VLLM_BATCH_INVARIANT, or {ELSEWHERE_SPARSE}",
}
"""The same for latent rows that lists name."""


def explained(reason: str, more: dict[str, str] = MORE) -> str:
    """A reason of vLLM with what to do."""
    if reason.startswith("attention type"):
        return f"{reason}: {ENCODERS}"
    return f"{reason}: {more[reason]}" if reason in more else reason
