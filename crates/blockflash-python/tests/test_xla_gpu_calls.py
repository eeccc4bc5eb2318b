"""What the targets of XLA for GPUs do on the host, with the fake of the driver and no JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIBRARY = os.environ.get("BLOCKFLASH_FAKE_DRIVER")
REFUSED = {
    "float32": (12, "kernels take f16 and bf16, but the tensors are f32"),
    "no memory": (8, "XLA_FFI_DeviceMemory_Allocate of XLA failed"),
    "append elsewhere": (3, "k_cache is not in the memory of its result"),
    "no GPU": (13, "there is no cuda:9"),
}
"""XLA's codes, and parts of the texts."""


@pytest.mark.skipif(not LIBRARY, reason="BLOCKFLASH_FAKE_DRIVER names no fake of the driver")
def test_calls_on_every_kind_of_gpu() -> None:
    program = Path(__file__).with_name("xla_frames.py")
    command = [sys.executable, str(program), str(LIBRARY)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(said)
    assert len(found) == 4 * 13 + 1
    for name, outcome in found.items():
        expected = REFUSED.get(name.split(" on ")[0])
        if expected is None:
            assert outcome["errors"] == [], name
        else:
            [(code, text)] = outcome["errors"]
            assert code == expected[0], name
            assert expected[1] in text, name
        # A workspace is given back.
        allocated = [line.split()[1] for line in outcome["log"] if line.startswith("allocate")]
        assert [line.split()[1] for line in outcome["log"] if line.startswith("free")] == allocated
        assert outcome["live"] == 0
        if name.startswith("gradients"):
            assert allocated, name
