"""SGLang beside its tests: what it imports in place of packages that are not there, and a model.

The tests need its registry, batches and caches, none of which uses the packages that stand-ins
take the place of. Where they are installed nothing is replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import types
from typing import Any

ABSENT = (
    "IPython", "aiohttp", "compressed_tensors", "einops", "gguf",
    "partial_json_parser", "torchvision", "triton", "tvm_ffi",
)  # fmt: skip


class _Anything(types.ModuleType):
    """A module, class or function that has every attribute, and decorates nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return _Anything(name) if name != "__version__" else "0"

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        decorated = len(arguments) == 1 and isinstance(arguments[0], (types.FunctionType, type))
        return arguments[0] if decorated and not options else _Anything("result")

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> None:
    """Let SGLang be imported, if it is there at all."""
    import sys

    if importlib.util.find_spec("sglang") is None or any(
        isinstance(finder, _Finder) for finder in sys.meta_path
    ):
        return
    import torch
    import torch._inductor.config
    import torch.utils.flop_counter
    from torch.utils._triton import has_triton
    from transformers.utils import import_utils

    # torch and transformers look for packages once: before stand-ins are there.
    if has_triton():
        return
    for name in dir(import_utils):
        if name.startswith("is_") and name.endswith("_available"):
            try:
                getattr(import_utils, name)()
            except (TypeError, ImportError):
                pass
    import transformers.models.auto.processing_auto  # noqa: F401

    def compiled(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = compiled
    sys.meta_path.append(_Finder())
