"""Attention for JAX, forward and backward, on the kernels of blockflash.

```python
import jax
from blockflash import jax as bj

o = bj.attention(q, k, v, causal=True)  # [batch, seqlen, heads, head_dim]
dq, dk, dv = jax.grad(lambda *qkv: bj.attention(*qkv).sum(), (0, 1, 2))(q, k, v)
```

The functions are custom calls of XLA, on the CPU and on GPUs of NVIDIA, and need no torch. They
work under `jit`, `grad` and `vmap`, which computes all entries in one call where the batch can take
them. XLA cannot divide a custom call among devices, so under `jit` alone sharded operands are
gathered first: `shard_map` along the batch or the heads divides the work.

| function | what it computes |
|---|---|
| `attention` | softmax attention, with gradients |
| `block_sparse_attention` | the same where a `BlockMask` says which blocks are visited |
| `attention_decode` | attention over a cache of keys and values, in pages or not |
| `attention_append` | the same after new keys and values were written into the cache |

What is wrong with shapes, types and numbers raises while JAX traces: `TypeError` or `ValueError`.
What only the device knows raises `jax.errors.JaxRuntimeError` when the call runs: `UNIMPLEMENTED`
where no kernel takes it, such as float32 on a GPU. Gradients are the same bit for bit in repeats;
there is no gradient of a gradient and no derivative in forward mode.
"""

from __future__ import annotations

from ._attention import attention, block_sparse_attention
from ._block_mask import BlockMask
from ._decode import attention_append, attention_decode

__all__ = [
    "BlockMask",
    "attention",
    "attention_append",
    "attention_decode",
    "block_sparse_attention",
]
