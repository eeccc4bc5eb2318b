"""Processes that are forked from one that has computed, and what queries leave to them."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from blockflash import _info, _native

PARENT = """
import os, signal, sys
import torch
import blockflash

torch.set_num_threads(1)  # The threads of torch itself do not survive a fork either.
torch.manual_seed(0)


def forked(work):
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        signal.alarm(60)  # ends a child that waits for ever
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


def run(script: str) -> None:
    """Run the script in a process of its own, whose text is shown if it fails."""
    command = [sys.executable, "-c", PARENT + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_children_and_their_children_compute() -> None:
    """On threads of their own; the parent goes on with its own."""
    run("""
q = torch.randn(1, 300, 4, 64, requires_grad=True)
scores = torch.randn(1, 1, 5, 5)


def work():
    o = blockflash.attention(q, q, q, causal=True)
    (gradient,) = torch.autograd.grad(o.sum(), q)
    mask = blockflash.BlockMask.top_k(scores, 2, seqlens=(300, 300), block=64)
    masked = blockflash.attention(q.detach(), q.detach(), q.detach(), block_mask=mask)
    means = blockflash.BlockMask.top_k_means(q, q, 2, block=64).to_dense()
    decoded = blockflash.attention_decode(q[:, :1].detach(), q.detach(), q.detach())
    return [o.detach(), gradient, masked, means, decoded]


expected = work()


def same():
    assert all(map(torch.equal, work(), expected))


forked(lambda: (same(), forked(lambda: (same(), same())), same()))
forked(lambda: forked(same))
same()
""")


def test_workers_of_a_loader_compute() -> None:
    run("""
from torch.utils.data import DataLoader

rows = torch.randn(8, 64, 2, 64)


class Attended:
    def __len__(self):
        return len(rows)

    def __getitem__(self, index):
        row = rows[index : index + 1]
        return blockflash.attention(row, row, row)[0]


expected = torch.stack([Attended()[index] for index in range(8)])
loader = DataLoader(Attended(), 4, num_workers=2, timeout=60, multiprocessing_context="fork")
torch.testing.assert_close(torch.cat(list(loader)), expected)
""")


def test_queries_ask_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is no driver, or CUDA is in use already."""
    told: dict[str, Any] = {"gpu_problem": "told by this process", "gpus": []}
    native = SimpleNamespace(
        driver_problem=lambda: None, initialised=lambda: False, describe=lambda: told
    )
    monkeypatch.setattr(_info, "_native", native)
    _info._asked.cache_clear()
    found = _info.info()
    assert found["version"] and found["gpu_problem"] == _native.gpu_problem()
    assert _info.usable() is not None and _info._asked.cache_info().misses == 1
    for name, value in (("initialised", True), ("driver_problem", "none is installed")):
        with monkeypatch.context() as patch:
            patch.setattr(native, name, lambda value=value: value)
            assert str(_info.usable()) == "told by this process"
    _info._asked.cache_clear()
    monkeypatch.setattr(sys, "executable", "")
    assert str(_info.usable()) == "told by this process"
    _info._asked.cache_clear()


@pytest.mark.gpu
def test_queries_leave_cuda_to_children() -> None:
    run("""
assert blockflash.usable() and blockflash.info()["gpus"]
assert not blockflash._native.initialised() and not torch.cuda.is_initialized()


def work():
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert blockflash.attention(q, q, q).isfinite().all()


forked(work)
work()
""")


@pytest.mark.gpu
def test_children_of_a_process_that_uses_cuda_say_why_they_cannot() -> None:
    run("""
q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
o = blockflash.attention(q, q, q)
blockflash.attention_decode(q, q, q)
cpu = q.float().cpu()
mask = blockflash.BlockMask.causal(seqlens=(64, 64), block=64)


def work():
    assert blockflash.attention(cpu, cpu, cpu).isfinite().all()
    assert blockflash.usable() and blockflash.info()["gpus"]
    for call in (
        lambda: blockflash.attention(q, q, q),
        lambda: blockflash.attention(q, q, q, out=o),
        lambda: blockflash.attention_decode(q, q, q),
    ):
        try:
            call()
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError("no error")


forked(work)
""")
