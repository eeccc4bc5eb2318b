"""What the CPU backend takes beside torch's own operators, in milliseconds.

Attention beside `scaled_dot_product_attention`, forward and backward, of a batch, of packed
sequences (torch's is called for each) and over a cache; a block-sparse product beside torch's CSR
and BSR layouts. Both have the same number of threads and take turns in one process; the medians
count. A ratio above 1 says that blockflash is the faster one. Build the wheel in the release
profile before (`maturin build --release`), and keep other processes off the cores.

    RAYON_NUM_THREADS=2 python benches/cpu.py [--only decode] [--rounds 15] [--out cpu.jsonl]
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rounds import Records, interleaved, median
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

import blockflash
from blockflash import sparse

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Name, batch, length, heads of queries and of keys, head_dim, causal.
PREFILL = [
    ("1x1024x8x64 causal", 1, 1024, 8, 8, 64, True),
    ("1x2048x8x128", 1, 2048, 8, 8, 128, False),
    ("2x512x8/2x64 causal", 2, 512, 8, 2, 64, True),
]
DECODE = [("8x2048x8x128", 8, 2048, 8, 8, 128), ("4x4096x16/4x64", 4, 4096, 16, 4, 64)]
VARLEN = [("37,512,129,900,256 x8x64 causal", [37, 512, 129, 900, 256], 8, 64)]
BACKWARD = [
    ("1x1024x8x64 causal", 1, 1024, 8, 8, 64, True),
    ("1x1024x4x128", 1, 1024, 4, 4, 128, False),
]
# Rows of W, columns of W, columns of X.
PRODUCT = (2048, 2048, 512)

Case = tuple[str, dict[str, Callable[[], Any]]]


def by_head(*tensors: Tensor) -> list[Tensor]:
    """As SDPA takes them."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def draw(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normally distributed tensors."""
    return [torch.randn(shape).to(dtype) for shape in shapes]


def qkv(dtype: torch.dtype, shape: tuple[Any, ...]) -> list[Tensor]:
    """Queries, keys and values of a case."""
    _, batch, length, heads, heads_k, head_dim, _ = shape
    kv = (batch, length, heads_k, head_dim)
    return draw(dtype, (batch, length, heads, head_dim), kv, kv)


def prefill(dtype: torch.dtype) -> Iterator[Case]:
    """Forward of a batch."""
    for shape in PREFILL:
        name, _, _, heads, heads_k, _, causal = shape
        tensors = qkv(dtype, shape)
        kinds = {"is_causal": causal, "enable_gqa": heads != heads_k}
        yield (
            name,
            {
                "ours": partial(blockflash.attention, *tensors, causal=causal),
                "torch": partial(torchs, *by_head(*tensors), **kinds),
            },
        )


def decode(dtype: torch.dtype) -> Iterator[Case]:
    """One query of each sequence over a full cache."""
    for name, batch, length, heads, heads_k, head_dim in DECODE:
        kv = (batch, length, heads_k, head_dim)
        q, k, v = draw(dtype, (batch, 1, heads, head_dim), kv, kv)
        yield (
            name,
            {
                "ours": partial(blockflash.attention_decode, q, k, v),
                "torch": partial(torchs, *by_head(q, k, v), enable_gqa=heads != heads_k),
            },
        )


def each(parts: list[list[Tensor]]) -> None:
    """Causal attention by torch of each sequence."""
    for part in parts:
        torchs(*part, is_causal=True)


def varlen(dtype: torch.dtype) -> Iterator[Case]:
    """Packed sequences, for each of which torch is called."""
    for name, lengths, heads, head_dim in VARLEN:
        total = (sum(lengths), heads, head_dim)
        q, k, v = draw(dtype, total, total, total)
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        parts = [by_head(*t) for t in zip(*(x[None].split(lengths, 1) for x in (q, k, v)))]
        cu_seqlens = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        most = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

        ours = partial(blockflash.attention, q, k, v, causal=True, **cu_seqlens, **most)
        yield name, {"ours": ours, "torch": partial(each, parts)}


def backward(dtype: torch.dtype) -> Iterator[Case]:
    """The gradients alone, of a graph that is kept."""
    for shape in BACKWARD:
        name, causal = shape[0], shape[-1]
        leaves = [x.requires_grad_() for x in qkv(dtype, shape)]
        o = blockflash.attention(*leaves, causal=causal)
        o_torch = torchs(*by_head(*leaves), is_causal=causal).transpose(1, 2)
        d_o = torch.randn(o.shape).to(dtype)
        gradients = partial(torch.autograd.grad, inputs=leaves, retain_graph=True)
        yield (
            name,
            {
                "ours": partial(gradients, o, grad_outputs=d_o),
                "torch": partial(gradients, o_torch, grad_outputs=d_o),
            },
        )


def bsr(dtype: torch.dtype) -> Iterator[Case]:
    """`X Wᵀ` with a tenth of the blocks of W, drawn."""
    rows, columns, tokens = PRODUCT
    (x,) = draw(dtype, (tokens, columns))
    for block in (32, 64, 128):
        kept = (torch.rand(rows // block, columns // block) < 0.1).to(dtype)
        kept[0, 0] = 1
        w = kept.repeat_interleave(block, 0).repeat_interleave(block, 1)
        w = w * torch.randn(rows, columns).to(dtype)
        layer = sparse.BlockSparseLinear.from_sparse_bsr(w.to_sparse_bsr((block, block)))
        calls: dict[str, Callable[[], Any]] = {"ours": partial(layer, x)}
        for layout, made in (
            ("CSR", w.to_sparse_csr()),
            ("BSR", w.to_sparse_bsr((block, block))),
        ):
            call = partial(torch.matmul, made, x.t())
            try:
                call()
            except RuntimeError:
                continue
            calls[f"torch {layout}"] = call
        yield f"{rows}x{columns}x{tokens}, block {block}", calls


GROUPS = {f.__name__: f for f in (prefill, decode, varlen, backward, bsr)}


def milliseconds(call: Callable[[], Any]) -> float:
    """Time of one call, after a pause in which idle threads of both libraries stop spinning."""
    time.sleep(0.02)
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse")
    torch.set_num_threads(int(os.environ.get("RAYON_NUM_THREADS", os.cpu_count() or 1)))
    torch.manual_seed(0)
    records = Records(args.out, "cpu")
    print(f"{torch.get_num_threads()} threads, medians of {args.rounds} rounds\n")
    print("| what | type | shape | ours, ms | torch, ms | torch / ours |")
    print("|---|---|---|---:|---:|---:|")
    for group in args.only:
        for name, dtype in ((name, TYPES[name]) for name in args.types):
            for shape, calls in GROUPS[group](dtype):
                with torch.set_grad_enabled(group == "backward"):
                    measures = {of: partial(milliseconds, call) for of, call in calls.items()}
                    interleaved(measures, 2)
                    found = {
                        of: median(times)
                        for of, times in interleaved(measures, args.rounds).items()
                    }
                ours = found.pop("ours")
                records.add(what=group, type=name, shape=shape, ours=ours, **found)
                best = min(found.values(), default=float("nan"))
                print(
                    f"| {group} | {name} | {shape} | {ours:.2f} | {best:.2f} | {best / ours:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
