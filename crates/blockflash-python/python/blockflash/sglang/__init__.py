"""An attention backend of SGLang: `--attention-backend blockflash --page-size 64`.

SGLang finds `register` by the entry point `sglang.srt.plugins` of this package, in each of its
processes. `_backend` is the backend of a model, `_draft` that of the steps of a drafting model,
`_metadata` what a batch is to the kernels, and `_refusals` what is not served, with reasons.
`_listed` is attention by an index inside of SGLang's own backend.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ._names import LISTED, REPLACES

NAME = "blockflash"
TESTED = "0.5.23"
"""The version of SGLang whose interface this is. It is not stable, other versions are warned of."""

_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Make `blockflash` a choice of SGLang's options for attention, of models and of drafts."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _warn_of_other_versions()
    replaced = os.environ.get(REPLACES) or NAME
    if replaced not in (NAME, *ATTENTION_BACKENDS):
        names = ", ".join(sorted(ATTENTION_BACKENDS))
        raise ValueError(f"{REPLACES} is {replaced}, not one of {names}")
    ATTENTION_BACKENDS[NAME] = _create
    if replaced not in LISTED:
        ATTENTION_BACKENDS[replaced] = _create
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        choices.add_draft_attention_backend_choices([NAME])
        # SGLang has a list of backends of drafts in the function that makes them.
        HookRegistry.register(_DRAFTS, _create_for_draft, HookType.AROUND)
        if replaced in LISTED:
            from ._listed import register as attend_to_lists

            attend_to_lists()


def _create(runner: Any) -> Any:
    from ._backend import BlockflashBackend

    return BlockflashBackend(runner)


def _create_for_draft(
    original: Callable[..., Any],
    factory: Any,
    name: str,
    makers: dict[str, Callable[[], Any]],
    *rest: Any,
    **options: Any,
) -> Any:
    def make() -> tuple[str, Any]:
        runner = factory.draft_model_runner
        if not options.get("stamps_children"):
            return NAME, _create(runner)
        from ._draft import BlockflashDraftBackend

        return NAME, BlockflashDraftBackend(runner, factory.topk, factory.speculative_num_steps)

    replaced = os.environ.get(REPLACES)
    names = [NAME] if not replaced or replaced in LISTED else [NAME, replaced]
    return original(factory, name, {**makers, **dict.fromkeys(names, make)}, *rest, **options)


def _warn_of_other_versions() -> None:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return
    if found.partition("+")[0] != TESTED:
        logging.getLogger(__name__).warning(
            "blockflash's attention backend is for SGLang %s, but this is %s", TESTED, found
        )
