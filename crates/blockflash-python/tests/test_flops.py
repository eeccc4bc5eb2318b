"""What torch's `FlopCounterMode` counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import blockflash

B, S, SK, H, HK, D = 2, 30, 50, 4, 2, 16
FORWARD = 4 * B * S * SK * H * D


def operands(device: str = "cpu") -> list[torch.Tensor]:
    shapes = [(B, S, H, D), (B, SK, HK, D), (B, SK, HK, D)]
    return [torch.randn(s, device=device, requires_grad=True) for s in shapes]


def count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_forward_and_backward() -> None:
    q, k, v = operands()
    with torch.no_grad():
        assert count(lambda: blockflash.attention(q, k, v)) == FORWARD
        assert count(lambda: blockflash.attention(q, k, v, causal=True)) == FORWARD
        assert count(lambda: blockflash.attention(q, k, v, return_lse=True)) == FORWARD
        out = torch.empty_like(q)
        assert count(lambda: blockflash.attention(q, k, v, out=out)) == FORWARD
    train = lambda: blockflash.attention(q, k, v).sum().backward()  # noqa: E731
    assert count(train) == FORWARD + FORWARD * 5 // 2
    # The same as torch counts for its own: its kernel for CPUs is not always among them, its
    # products are.
    by_head = [t.detach().transpose(1, 2) for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        assert count(lambda: sdpa(*by_head, enable_gqa=True)) == FORWARD


def test_packed_and_masks() -> None:
    q = torch.randn(40, H, D)
    cu = torch.tensor([0, 10, 40], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 30, "max_seqlen_k": 30}
    found = count(lambda: blockflash.attention(q, q, q, **lengths))
    assert found == 4 * H * D * (10 * 10 + 30 * 30)
    q = torch.randn(1, 256, H, D)
    mask = blockflash.BlockMask.causal(seqlens=(256, 256), block=64)
    found = count(lambda: blockflash.attention(q, q, q, block_mask=mask))
    assert found == 4 * H * D * 256 * 256 * 10 // 16


def test_decode() -> None:
    q, cache = torch.randn(B, 1, H, D), torch.randn(2, 8, 16, HK, D)
    table = torch.arange(6, dtype=torch.int32).view(B, 3)
    found = count(lambda: blockflash.attention_decode(q, *cache, block_table=table))
    assert found == 4 * B * H * D * 48


def test_on_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        q, k, v = operands("cuda" if torch.cuda.is_available() else "cpu")
        assert count(lambda: blockflash.attention(q, k, v)) == FORWARD


def test_first_use_in_a_counter() -> None:
    """Operators are made when they are first used, here with a counter that is there already."""
    program = """
import torch, blockflash
from torch.utils.flop_counter import FlopCounterMode
q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16)
with FlopCounterMode(display=False) as counter:
    blockflash.attention_decode(q, cache, cache)
    blockflash.attention(q, cache, cache)
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [str(2 * 4 * (2 * 4 * 16) * 32)], done.stderr
