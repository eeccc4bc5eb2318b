"""`context_parallel`: unchanged models over processes, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import blockflash

SEQLEN = 21


class Attention(nn.Module):
    """Shared heads, and a table of positions that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(32, 64), nn.Linear(32, 32)
        self.register_buffer("table", torch.randn(SEQLEN, 32))
        self.attend = scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the layer."""
        rows = (x + self.table).unflatten(-1, (4, 8))
        q, k, v = self.project(rows.flatten(-2)).unflatten(-1, (8, 8)).split((4, 2, 2), -2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = self.attend(q, k, v, is_causal=True, enable_gqa=True)
        return self.back(o.transpose(1, 2).flatten(-2))


class Encoder(nn.Module):
    """torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the layer."""
        return self.layer(x)


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention()

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the layer."""
        return checkpoint(self.layer, x, use_reentrant=False)


def tables(model: nn.Module) -> list[Tensor]:
    return list(model.buffers())


def _trains(rank: int, world: int) -> None:
    from blockflash.distributed import context_parallel, shard

    for kind in (Attention, Encoder, Checkpointed):
        torch.manual_seed(3)
        model = kind()
        x, weights = torch.randn(2, 2, SEQLEN, 32)
        expected = model(x)
        wanted = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
        buffers = [x, weights, *tables(model)]
        before = [buffer.clone() for buffer in buffers]
        dims = (1, 1, *(0 for _ in tables(model)))
        for check, scheme in ((True, "auto"), (False, "keys")):
            settings = {"buffers": buffers, "buffer_seq_dims": dims, "check": check}
            with context_parallel(scheme=scheme, **settings):
                assert x.shape == shard(before[0]).shape
                o = model(x)
                assert torch.allclose(o, shard(expected), 0, 1e-5)
                grads = torch.autograd.grad((o * weights).sum(), list(model.parameters()))
            for found, grad in zip(grads, wanted, strict=True):
                dist.all_reduce(found)
                assert torch.allclose(found, grad, 0, 1e-4)
            assert all(map(torch.equal, buffers, before))
        # The fast path of inference.
        mesh = init_device_mesh("cpu", (world,))
        for mode in (torch.no_grad, torch.inference_mode):
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims), mode():
                assert torch.allclose(model.eval()(x), shard(expected), 0, 1e-5)
        assert torch.equal(model(x), expected) or kind is Encoder


def _of_transformers(rank: int, world: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from blockflash.distributed import context_parallel, shard

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(64, (2, SEQLEN))
    positions = torch.arange(SEQLEN).repeat(2, 1)
    expected = model(tokens).logits
    with context_parallel(buffers=[tokens, positions], buffer_seq_dims=(1, 1)):
        found = model(tokens, position_ids=positions).logits
        # Without a cache it takes the jump between two chunks for packing, and makes a mask.
        with pytest.raises(blockflash.Unsupported, match="attn_mask"):
            model(tokens, position_ids=positions, use_cache=False)
    assert torch.allclose(found, shard(expected), 0, 1e-5)


def _compiles(rank: int, world: int) -> None:
    from blockflash.distributed import context_parallel, shard

    torch.manual_seed(3)
    model = Attention()
    x = torch.randn(2, SEQLEN, 32)
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(x), expected, 0, 1e-6)
    with context_parallel(buffers=[x, model.table], buffer_seq_dims=(1, 0)):
        assert torch.allclose(compiled(x), shard(expected), 0, 1e-5)
    assert torch.allclose(compiled(x), expected, 0, 1e-6)


def _refuses(rank: int, world: int) -> None:
    from blockflash.distributed import context_parallel, shard

    whole = torch.randn(1, 4, 12, 8)
    x = shard(whole, dim=2)
    sdpa = functional.scaled_dot_product_attention

    def refused(kind: type[Exception], words: str, *tensors: Tensor, **options: Any) -> None:
        with context_parallel(), pytest.raises(kind, match=words):
            sdpa(*tensors, **options)

    mask = torch.ones(6, 6, dtype=torch.bool)
    refused(blockflash.Unsupported, "rank 0: attn_mask", x, x, x, attn_mask=mask)
    refused(blockflash.Unsupported, "rank 1: attn_mask", x, x, x, attn_mask=mask if rank else None)
    refused(blockflash.Unsupported, "dropout", x, x, x, dropout_p=0.5)
    refused(ValueError, "of equal rows", x, whole, whole)
    refused(ValueError, "rank 1 has", x, x, x, is_causal=bool(rank))
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    with context_parallel():
        with pytest.raises(blockflash.Unsupported, match="need_weights"):
            layer(x[0], x[0], x[0])
        o, _ = layer(x[0], x[0], x[0], need_weights=False)
    expected = layer(whole[0], whole[0], whole[0], need_weights=False)[0]
    assert torch.allclose(o, shard(expected), 0, 1e-5)

    def wrong(words: str, buffers: list[Tensor], dims: tuple[int, ...], **options: Any) -> None:
        before = [buffer.clone() for buffer in buffers]
        with pytest.raises(ValueError, match=words):
            with context_parallel(buffers=buffers, buffer_seq_dims=dims, **options):
                pass
        assert all(map(torch.equal, buffers, before))

    wrong("2 buffers, but 1", [x, whole], (1,))
    wrong("named twice", [x, x], (1, 1))
    wrong("not in buffers", [x], (1,), no_restore_buffers=[whole])
    wrong("has requires_grad", [whole.clone().requires_grad_()], (2,))
    wrong(r"\[4, 12\] rows", [whole, whole.clone()], (2, 1))
    wrong("needs a buffer", [], (), check=False)
    # After an error inside, too, buffers are restored, but those that are not to be.
    kept, restored = whole.clone(), whole.clone()
    with pytest.raises(KeyError):
        both = {"buffers": [kept, restored], "buffer_seq_dims": (2, 2)}
        with context_parallel(dist.group.WORLD, no_restore_buffers=[kept], **both):
            raise KeyError
    assert torch.equal(restored, whole) and torch.equal(kept, x)
    local = blockflash.scaled_dot_product_attention(x, x, x)
    with context_parallel(), pytest.raises(ValueError, match="inside of"), context_parallel():
        pass
    assert torch.allclose(sdpa(x, x, x), local, 0, 1e-5)


def _works(rank: int, world: int) -> None:
    _trains(rank, world)
    _refuses(rank, world)
    _compiles(rank, world)
    _of_transformers(rank, world)


def test_context_parallel() -> None:
    run(2, _works)
