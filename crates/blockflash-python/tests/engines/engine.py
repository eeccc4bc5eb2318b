"""Whether the engine of a file of tests is there."""

from __future__ import annotations

import importlib
import os

import pytest

ABSENT = "the engine cannot be imported"


def needs(name: str, *modules: str) -> None:
    """Skip the file that calls this unless these modules of an engine can be imported."""
    try:
        for module in (name, *modules):
            importlib.import_module(module)
    except ImportError as error:
        if os.environ.get("BLOCKFLASH_REQUIRE_ENGINE") == name:
            raise
        pytest.skip(f"{ABSENT}: {error}", allow_module_level=True)
