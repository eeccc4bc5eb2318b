"""Bad calls: each is an exception with a sentence, none is a crash or ignored."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from test_attention import operands
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import blockflash
from blockflash import _native
from blockflash._schema import ATTENTION

Q, K, V = operands()
STARTS = torch.tensor([0, 17], dtype=torch.int32)
PACKED = {
    "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 17, "max_seqlen_k": 17
}  # fmt: skip


def packed(**changes: Any) -> dict[str, Any]:
    """Options of a packed batch with these changes."""
    return {**PACKED, **changes}


BAD_VALUES = {
    "f64": ((Q.double(), K.double(), V.double()), {}, "q is float64"),
    "int8": ((Q.to(torch.int8), K, V), {}, "k is f32, expected i8"),
    "int32": ((Q.int(), K.int(), V.int()), {}, "q is i32"),
    "mixed types": ((Q, K.half(), V), {}, "k is f16"),
    "meta": ((Q, K.to("meta"), V), {}, "k on meta"),
    "heads": ((Q, K[:, :, :1].repeat(1, 1, 3, 1), V[:, :, :1].repeat(1, 1, 3, 1)), {}, "multiple"),
    "head_dim": ((Q, K[..., :8], V[..., :8]), {}, "k has shape"),
    "v": ((Q, K, V[:, :5]), {}, "v has shape"),
    "batch": ((Q, K[:1], V[:1]), {}, "k has shape"),
    "rank 3": ((Q[0], K[0], V[0]), {}, "q has shape"),
    "rank 0": ((torch.tensor(1.0), K, V), {}, "q has shape"),
    "rank 5": ((Q[None], K, V), {}, "q: "),
    "no head_dim": ((Q[..., :0], K[..., :0], V[..., :0]), {}, "head_dim of at least 1"),
    "last dimension": ((Q, K.transpose(1, 3).contiguous().transpose(1, 3), V), {}, "contiguous"),
    "negative window": ((Q, K, V), {"window": (-2, None)}, "window"),
    "causal window": ((Q, K, V), {"window": (None, 2), "causal": True}, "later keys"),
    "scale 0": ((Q, K, V), {"scale": 0.0}, "^scale is 0"),
    "scale nan": ((Q, K, V), {"scale": float("nan")}, "^scale is NaN"),
    "softcap 0": ((Q, K, V), {"softcap": 0.0}, "softcap is 0"),
    "softcap inf": ((Q, K, V), {"softcap": float("inf")}, "softcap is inf"),
    "sink shape": ((Q, K, V), {"sink": torch.zeros(3)}, "sink has shape"),
    "sink type": ((Q, K, V), {"sink": torch.zeros(4).half()}, "sink is f16"),
    "no max": ((Q[0], K[0], V[0]), packed(max_seqlen_q=None), "but max_seqlen_q is None"),
    "no lengths of k": ((Q[0], K[0], V[0]), packed(cu_seqlens_k=None), "but cu_seqlens_k is None"),
    "only max": ((Q, K, V), {"max_seqlen_q": 17}, "come together"),
    "negative max": ((Q[0], K[0], V[0]), packed(max_seqlen_q=-1), "max_seqlen_q is -1"),
    "small max": ((Q[0], K[0], V[0]), packed(max_seqlen_q=3), "the maximum is 3"),
    "i64 lengths": ((Q[0], K[0], V[0]), packed(cu_seqlens_q=STARTS.long()), "int64"),
    "beyond": ((Q[0], K[0], V[0]), packed(cu_seqlens_q=STARTS + 1), "first offset"),
    "packed rank": ((Q, K, V), packed(), "q has shape"),
    "out shape": ((Q, K, V), {"out": torch.empty(2, 17, 4, 8)}, "o has shape"),
    "out type": ((Q, K, V), {"out": Q.half()}, "o is f16"),
    "out expanded": ((Q, K, V), {"out": Q[:1, :, :1].expand_as(Q).clone()[:1].expand_as(Q)}, "o: "),
    "out is q": ((Q, K, V), {"out": Q}, "o shares memory with q"),
    "out overlaps": ((Q, K, V), {"out": Q[:, :, :, :]}, "o shares memory with q"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values(name: str, route: str) -> None:
    inputs, options, sentence = BAD_VALUES[name]
    with pytest.raises(ValueError, match=sentence):
        blockflash.attention(*inputs, **options)


@pytest.mark.parametrize("bad", [None, 1.0, [[1.0]], Q.numpy(), "q", torch.float32])
def test_types(bad: object) -> None:
    name = type(bad).__name__
    with pytest.raises(TypeError, match=f"q must be a torch.Tensor, not .*{name}"):
        blockflash.attention(bad, K, V)
    with pytest.raises(TypeError, match=f"q must be a torch.Tensor, not .*{name}"):
        native(bad, K, V)
    if bad is not None:
        with pytest.raises(TypeError, match=f"sink must be a torch.Tensor, not .*{name}"):
            blockflash.attention(Q, K, V, sink=bad)


def test_sparse() -> None:
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        blockflash.attention(Q, K.to_sparse(), V)


@pytest.mark.parametrize("option", ["attn_mask", "dropout_p", "alibi", "is_causal", "window_size"])
def test_unknown_options(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        blockflash.attention(Q, K, V, **{option: None})


def native(
    q: object, k: object, v: object, *, block_mask: int = 0, o: Tensor | None = None
) -> None:
    """Call the native function, which nothing stands before, with plain options."""
    o = torch.empty_like(Q) if o is None else o
    _native.attention(q, k, v, o, None, *ATTENTION.ordered({"block_mask": block_mask}))


def test_tensors_without_memory() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(Q)
    for bad in (fake, Q.to("meta"), torch.empty(0).as_subclass(torch.nn.Buffer)):
        with pytest.raises(ValueError, match="^[qko]"):
            native(bad, K, V)
    with pytest.raises(ValueError, match="^o"):
        native(Q, K, V, o=fake)


def test_block_mask_of_no_number() -> None:
    for number in (1, -1, 2**62):
        with pytest.raises(ValueError, match="no block mask"):
            native(Q, K, V, block_mask=number)


def test_misaligned_elements(route: str) -> None:
    storage = torch.frombuffer(
        bytearray(Q.numel() * 4 + 4), dtype=torch.float32, offset=1, count=Q.numel()
    )
    with pytest.raises(ValueError, match="q: .*not aligned"):
        blockflash.attention(storage.view_as(Q), K, V)


def test_no_memory_on_the_cpu(route: str) -> None:
    """Torch says so by a `RuntimeError`, which is no `OutOfMemoryError`; its text is kept."""
    huge = torch.zeros(1, 1, 1, 64).expand(1 << 20, 1 << 20, 1 << 8, 64)
    with pytest.raises(RuntimeError, match="can't allocate memory|not enough memory") as caught:
        blockflash.attention(huge, K[:1, :, :1, :8], V[:1, :, :1, :8])
    assert not isinstance(caught.value, torch.OutOfMemoryError)


def test_meta_tensors_give_shapes() -> None:
    q, k, v = (t.to("meta") for t in (Q, K, V))
    o, lse = blockflash.attention(q, k, v, return_lse=True)
    assert o.shape == Q.shape and lse.shape == (2, 4, 17) and o.is_meta


def test_names() -> None:
    assert set(blockflash.__all__) <= set(dir(blockflash))
    for name in blockflash.__all__:
        assert callable(getattr(blockflash, name))
    with pytest.raises(AttributeError, match="nothing"):
        _ = blockflash.nothing


def test_errors_release_the_operands(route: str) -> None:
    sink, starts = torch.zeros(4), torch.tensor([0, 17], dtype=torch.int32)
    good = {"sink": sink, **packed(cu_seqlens_q=starts), "scale": 0.5}
    before = [t._use_count() for t in (Q, sink, starts)]
    for q in [Q[0], Q[0, :, :3]] * 100:
        with contextlib.suppress(ValueError):
            blockflash.attention(q, K[0], V[0], **good)
    del q
    assert [t._use_count() for t in (Q, sink, starts)] == before


@pytest.mark.skipif(sys.platform != "linux", reason="kernels in Python elsewhere")
def test_native_kernels_are_in_use() -> None:
    """C++ keeps the kind of an error as text, which the step of autograd makes a type."""
    for name in ("attention", "attention_forward"):
        operator = getattr(torch.ops.blockflash, name)
        with pytest.raises(ValueError, match="^q is float64"):
            operator(Q.double(), K, V)
        with (
            torch._C._AutoDispatchBelowAutograd(),
            pytest.raises(RuntimeError, match="^Value: q is float64"),
        ):
            operator(Q.double(), K, V)
