"""The switch that verifies offsets, lengths and tables on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import blockflash
from blockflash import flash_attn as fa2

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ROWS, HEADS, DIM = 24, 2, 64
PAGES, SLOTS = 4, 16


@pytest.fixture
def checks() -> Iterator[None]:
    """Verify data during a test."""
    blockflash.set_checks(True)
    yield
    blockflash.set_checks(False)


def ints(device: str, *values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def rows(device: str, *shape: int) -> Tensor:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(*shape, device=device, dtype=dtype)


def packed(device: str, offsets: tuple[int, ...], max_seqlen: int, grad: bool = False) -> Tensor:
    """Attention of packed sequences."""
    q = rows(device, ROWS, HEADS, DIM).requires_grad_(grad)
    cu = ints(device, *offsets)
    lengths = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return blockflash.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, **lengths)


def decode(device: str, lengths: tuple[int, int], table: Any, **options: Any) -> Tensor:
    """Attention of one query of two sequences to a cache in pages."""
    q, k = rows(device, 2, 1, HEADS, DIM), rows(device, PAGES, SLOTS, HEADS, DIM)
    given = {"seqused_k": ints(device, *lengths), "block_table": ints(device, *table)}
    return blockflash.attention_decode(q, k, k.clone(), **given, **options)


@DEVICES
@pytest.mark.parametrize(
    ("offsets", "max_seqlen", "match"),
    [
        ((0, 20, 24), 19, r"sequence 0 has 20 rows, the maximum is 19"),
        ((0, 20, 4), 24, r"must not descend"),
        ((1, 20, 24), 24, r"the first offset must be 0"),
        ((0, 20, 25), 24, r"the packed tensor has 24 rows"),
    ],
)
def test_packed(
    device: str, offsets: tuple[int, ...], max_seqlen: int, match: str, checks: None
) -> None:
    with pytest.raises(ValueError, match=match):
        packed(device, offsets, max_seqlen)
    assert packed(device, (0, 20, 24), 20).isfinite().all()
    # Rows behind the last offset belong to no sequence, which is no mistake.
    assert packed(device, (0, 3, 10), 7)[10:].eq(0).all()


@DEVICES
def test_gradients(device: str) -> None:
    o = packed(device, (0, 20, 24), 20, grad=True)
    blockflash.set_checks(True)
    try:
        o.sum().backward()
    finally:
        blockflash.set_checks(False)


@DEVICES
@pytest.mark.parametrize(
    ("lengths", "table", "match"),
    [
        ((33, 5), ((0, 1), (2, 3)), r"seqused_k\[0\] is 33: the capacity is 32, 2 pages of 16"),
        ((3, -1), ((0, 1), (2, 3)), r"seqused_k\[1\] is -1"),
        ((17, 5), ((0, 4), (2, 3)), r"block_table\[0, 1\] is 4: the cache has 4 pages"),
    ],
)
def test_caches(device: str, lengths: tuple[int, int], table: Any, match: str) -> None:
    decode(device, lengths, table)
    blockflash.set_checks(True)
    try:
        with pytest.raises(ValueError, match=match):
            decode(device, lengths, table)
        decode(device, (17, 5), ((0, 1), (2, 9)))
    finally:
        blockflash.set_checks(False)


@DEVICES
def test_appended_keys(device: str, checks: None) -> None:
    new = rows(device, 2, 3, HEADS, DIM)
    options = {"k": new, "v": new}
    decode(device, (17, 5), ((0, 1), (2, 3)), **options)
    with pytest.raises(ValueError, match="lengths count the 3 tokens that are appended"):
        decode(device, (17, 2), ((0, 1), (2, 3)), **options)
    with pytest.raises(ValueError, match="sequence 0 also appends to slots"):
        decode(device, (17, 16), ((0, 1), (0, 3)), **options)


@DEVICES
def test_lists_of_pages(device: str, checks: None) -> None:
    counts = ints(device, 2, 1)
    lists = ints(device, *[[[0, 1]] * HEADS] * 2)
    decode(device, (17, 5), ((0, 1), (2, 3)), pages=(lists, counts))
    with pytest.raises(ValueError, match=r"page_lists\[0, 0, 1\] is 0: columns must ascend"):
        decode(device, (17, 5), ((0, 1), (2, 3)), pages=(lists.flip(-1), counts))
    with pytest.raises(ValueError, match=r"page_counts\[0\] is 3"):
        decode(device, (17, 5), ((0, 1), (2, 3)), pages=(lists, counts + 1))


@pytest.mark.gpu
def test_a_capture_is_refused(checks: None) -> None:
    q, k = rows("cuda", 2, 1, HEADS, DIM), rows("cuda", 2, 32, HEADS, DIM)
    lengths = ints("cuda", 20, 30)
    blockflash.attention_decode(q, k, k, seqused_k=lengths)
    with (
        pytest.raises(blockflash.DeviceError, match="BLOCKFLASH_CHECK"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        blockflash.attention_decode(q, k, k, seqused_k=lengths)


@DEVICES
def test_the_environment(device: str) -> None:
    code = f"""
import torch, blockflash
dtype = torch.float32 if {device!r} == "cpu" else torch.bfloat16
k = torch.zeros(1, 16, 1, 64, device={device!r}, dtype=dtype)
length = torch.tensor([17], dtype=torch.int32, device={device!r})
try:
    blockflash.attention_decode(k[:, :1], k, k, seqused_k=length)
    print("passed")
except ValueError as error:
    print(error)
"""
    for value, expected in (
        ("1", "seqused_k[0] is 17: the capacity is 16"),
        ("0", "passed"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"BLOCKFLASH_CHECK": value},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert run.stdout.strip() == expected


@DEVICES
def test_the_longest_sequence_has_rows(device: str) -> None:
    """A maximum of 0 would leave out all rows; it is for tensors without any."""
    with pytest.raises(ValueError, match="max_seqlen_q is 0, but must be at least 1.*24 rows"):
        packed(device, (0, 20, 24), 0)
    q, k = rows(device, 3, HEADS, DIM), rows(device, 2, 16, HEADS, DIM)
    cu = ints(device, 0, 1, 3)
    with pytest.raises(ValueError, match="max_seqlen is 0, but must be at least 1.*3 rows"):
        blockflash.attention_decode(q, k, k, cu_seqlens_q=cu, max_seqlen_q=0)
    none = q[:0]
    empty = {"cu_seqlens_q": cu * 0, "cu_seqlens_k": cu * 0, "max_seqlen_q": 0, "max_seqlen_k": 0}
    assert blockflash.attention(none, none, none, **empty).shape == none.shape


@DEVICES
def test_flash_attn_refuses_sequences_that_are_longer_than_their_pages(device: str) -> None:
    q, k = rows(device, 2, 1, HEADS, DIM), rows(device, PAGES, SLOTS, HEADS, DIM)
    call = fa2.flash_attn_with_kvcache
    table = ints(device, (0, 1), (2, 3))
    for lengths in (32, ints(device, 32, 5)):
        call(q, k, k.clone(), cache_seqlens=lengths, block_table=table)
        with pytest.raises(ValueError, match="block_table: a sequence has 33 keys.*room for 32"):
            call(q, k, k.clone(), q, q, cache_seqlens=lengths, block_table=table)
        with pytest.raises(ValueError, match="block_table: a sequence has 33 keys.*room for 32"):
            call(q, k, k.clone(), cache_seqlens=lengths + 1, block_table=table)
