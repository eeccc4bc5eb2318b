"""What the backend does not serve, with the reason and the option that helps."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.radix_attention import AttentionType

from ._names import LISTED, REPLACES

CACHES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
ELSE = "use another --attention-backend"


def refuse(reason: str) -> None:
    """Raises with this reason."""
    raise ValueError(f"--attention-backend blockflash: {reason}")


def check_runner(runner: Any, trees: bool, context_parallel: int) -> None:
    """Raises for a model or a configuration that is not served.

    `trees` says whether drafted tokens that are verified form trees, not chains, and
    `context_parallel` how many ranks share the keys of a sequence.
    """
    config, page, dtype = runner.model_config, runner.page_size, runner.kv_cache_dtype
    if page <= 0 or page % 16:
        refuse(f"page_size is {page}, not a multiple of 16: pass --page-size 64")
    if config.is_encoder_decoder:
        refuse(f"there is no cross attention to an encoder: {ELSE}")
    if config.is_local_attention_model:
        refuse(f"there is no attention within chunks of the context: {ELSE}")
    if is_deepseek_dsa(config.hf_config):
        refuse(
            "the model lists the keys of each query (DSA), for SGLang's own backend alone: set "
            f"{REPLACES}={LISTED[0]} and pass --attention-backend {LISTED[0]}"
        )
    if getattr(runner, "prefill_aware_swa", False):
        refuse(f"there is no window that excepts the prompt: {ELSE}")
    if dtype not in CACHES or runner.kv_cache_dtype_str == "mxfp8":
        names = "auto, bf16, fp8_e4m3 or fp8_e5m2"
        refuse(f"kv_cache_dtype is {runner.kv_cache_dtype_str}: pass --kv-cache-dtype {names}")
    if runner.kv_index_translator.is_translating:
        refuse("page tables of a unified pool are not read: leave out --enable-unified-memory")
    if context_parallel > 1:
        refuse(
            f"{context_parallel} ranks share the keys of a sequence: leave out context parallelism "
            "(--attn-cp-size, --dcp-size)"
        )
    spec = runner.spec_algorithm
    served = spec.is_none() or spec.is_eagle() or spec.is_standalone() or spec.is_ngram()
    if not served or spec.is_frozen_kv_mtp():
        refuse(
            f"speculative_algorithm is {spec.name}, not EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM"
        )
    if trees and not runner.is_draft_worker:
        if (runner.sliding_window_size or -1) >= 0:
            refuse(
                "the window of a token in a tree depends on its depth, which the kernels do not "
                "know: pass --speculative-eagle-topk 1, and not NGRAM, for this model"
            )
        if dtype.itemsize == 1 and torch.device(runner.device).type == "cuda":
            refuse(
                "trees of drafted tokens beside a cache of 8 bits have no kernel: pass "
                "--kv-cache-dtype auto, or --speculative-eagle-topk 1 and not NGRAM"
            )


def check_modes(modes: Any) -> None:
    """Raises for options of SGLang's group `exec` that are not served."""
    if modes.dllm.dllm_algorithm is not None:
        refuse(f"there are no models of --dllm-algorithm: {ELSE}")
    if modes.deterministic.enable_deterministic_inference:
        # SGLang refuses it itself, unless this backend has the name of another one.
        refuse(
            "bits of a token depend on how many tokens of its sequence a step computes: leave out "
            "--enable-deterministic-inference"
        )


def check_layer(layer: Any, options: dict[str, Any]) -> None:
    """Raises for a layer, or options of its call, that the kernels do not know."""
    if layer.is_cross_attention:
        refuse(f"layer {layer.layer_id} is cross attention to an encoder: {ELSE}")
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        refuse(f"layer {layer.layer_id} sees prompts in both directions, then decodes: {ELSE}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        refuse(f"logit_capping_method is {layer.logit_capping_method}, not tanh: {ELSE}")
    if layer.xai_temperature_len > 0:
        refuse(f"layer {layer.layer_id} scales scores by positions (xai_temperature): {ELSE}")
    if layer.pos_encoding_mode != "NONE":
        refuse(f"pos_encoding_mode is {layer.pos_encoding_mode}, not NONE: {ELSE}")
    for name, value in options.items():
        if value is not None and value is not False:
            refuse(f"the model passes {name}, which the kernels do not know: {ELSE}")
