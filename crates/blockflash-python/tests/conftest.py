"""Both ways to register the operators: native kernels, and kernels in Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from blockflash import _attention, _ops

# Where a native kernel is not possible, `blockflash` is this, too.
_LIBRARY = _ops.register("blockflash_library", native=False)


@pytest.fixture(params=["native", "library"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have `blockflash.attention` call the operators of this registration."""
    if request.param == "library":
        monkeypatch.setattr(_attention, "_OPS", torch.ops.blockflash_library)
    yield request.param
