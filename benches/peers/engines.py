"""Kernels of inference engines, loaded from their files alone.

The Triton kernels of vLLM and SGLang are plain files that import a few names of the engine around
them. The engine itself takes half a minute to import and wants dozens of packages, so its other
modules are replaced by empty ones here: names that launches ask for have the values below, and any
other name is a function that raises when it is called. Files are taken from a folder `engines/`
beside this file, beside its folder or on PYTHONPATH (`engines/vllm/...`), else from the installed
package, whose `__init__` is not run either way.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch

from measure import Absent

PACKAGES = ("vllm", "sglang", "native_sparse_attention", "fla", "fsa", "nsa_ref")


def capability() -> tuple[int, int]:
    """Of the current GPU; Hopper's where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


class Platform:
    """What vLLM's kernels ask of `current_platform`: a GPU of NVIDIA."""

    def is_cuda(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_cpu = is_fp8_fnuz = is_rocm

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return capability()

    def is_device_capability(self, wanted: Any, *_: Any) -> bool:
        return capability() == tuple(wanted)

    def is_device_capability_family(self, family: int, *_: Any) -> bool:
        return capability()[0] == family // 10

    def has_device_capability(self, wanted: int, *_: Any) -> bool:
        return capability()[0] * 10 + capability()[1] >= wanted

    def is_arch_support_pdl(self) -> bool:
        return torch.cuda.is_available() and capability()[0] >= 9

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


class Workspace:
    """vLLM's workspace: tensors that a launch writes and the next launch may overwrite."""

    def get_simultaneous(self, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]


def processors(device: int = 0) -> int:
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def known() -> dict[str, Any]:
    """Names with the values that a GPU of NVIDIA gives them."""
    import triton
    import triton.language as tl

    workspace = Workspace()
    no = (
        "is_gfx95_supported",
        "is_hip",
        "is_xpu",
        "is_fp8_fnuz",
        "is_batch_invariant_mode_enabled",
    )
    same = ("contiguous", "autocast_custom_fwd", "autocast_custom_bwd")
    unset = types.SimpleNamespace(get=lambda: False)
    return {
        "triton": triton,
        "tl": tl,
        "HAS_TRITON": True,
        "LOG2E": 1.4426950408889634,
        "LOGE2": 0.6931471805599453,
        "current_platform": Platform(),
        "current_workspace_manager": lambda: workspace,
        "round_up": lambda number, step: (number + step - 1) // step * step,
        "get_device_core_count": processors,
        "get_platform": lambda: types.SimpleNamespace(is_sm90=capability() == (9, 0)),
        "init_logger": lambda _name: types.SimpleNamespace(info_once=print),
        "envs": types.SimpleNamespace(SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX=unset),
        "eager_break_during_capture": lambda function: function,
        "direct_register_custom_op": lambda *_, **__: None,
        "autotune_cache_kwargs": {},
        "check_shared_mem": lambda *_: True,
        "IS_GATHER_SUPPORTED": True,
        "IS_NVIDIA_BLACKWELL": capability()[0] >= 10,
        **{name: (lambda function: function) for name in same},
        **{name: (lambda *_: False) for name in no},
    }


class Module(types.ModuleType):
    """An empty module of an engine."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = known()
        if name in names:
            return names[name]

        def missing(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} is not among the kernels that are loaded")

        return missing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of an engine: those with a file that `load` asked for, or that stand
    beside it, are that file; all others are empty."""

    def __init__(self, package: str, folder: Path) -> None:
        self.package, self.folder, self.files = package, folder, set()

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        first, *rest = name.split(".")
        if first != self.package:
            return None
        file = self.folder.joinpath(*rest).with_suffix(".py")
        if rest and file.is_file() and self.wanted(name):
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def wanted(self, name: str) -> bool:
        """Whether the file is loaded: it is in the folder of kernels of one that was asked for."""
        return any(name.startswith(root) for root in self.files)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, _module: types.ModuleType) -> None:
        pass


FINDERS: dict[str, Finder] = {}


def folder(package: str) -> Path:
    """Where the files of an engine are."""
    here = Path(__file__).resolve().parent
    for place in (here, here.parent, *map(Path, sys.path)):
        if (found := place / "engines" / package).is_dir():
            return found
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise Absent(f"neither a folder engines/{package} nor the package {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def load(name: str, *beside: str) -> types.ModuleType:
    """The module of that name; of the engine's other modules only those whose names start with one
    of `beside` are loaded from their files."""
    for one in (name, *beside):
        package = one.split(".")[0]
        assert package in PACKAGES, f"{package} is no engine"
        if package not in FINDERS:
            FINDERS[package] = Finder(package, folder(package))
            sys.meta_path.insert(0, FINDERS[package])
        FINDERS[package].files.add(one)
    try:
        return importlib.import_module(name)
    except FileNotFoundError as error:
        raise Absent(f"there is no {name}") from error
