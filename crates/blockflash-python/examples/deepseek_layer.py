"""The attention layer of DeepSeek-V3 (MLA): prefill with heads of 192 and 128, absorbed decoding.

Weights are random, in the shape of the model: queries and the pair of keys and values go through a
low rank, and 64 elements of each key are turned by their position. A prompt goes through
`blockflash.attention` with keys of 192 and values of 128 for each head. Further tokens, one at a
time, go through `blockflash.mla_decode` with absorbed weights: the cache in pages has one latent
row of 512 + 64 elements for each token, which `blockflash.mla_append` writes. Beside both is
torch's SDPA, whose cache has the keys and values of all heads. An error, against a plain layer in
float64, that exceeds its bound ends the program. Times are of the whole layer with its projections,
of a step on a GPU in a CUDA graph.

    python deepseek_layer.py --small     # a few seconds, no GPU, in float32
    python deepseek_layer.py             # on a GPU, in bfloat16
    python deepseek_layer.py --full      # there with 128 heads and the width of DeepSeek-V3
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import blockflash

KV_RANK, NOPE, ROPE, VALUE = 512, 128, 64, 128
ROW, PAGE = KV_RANK + ROPE, 64
SCALE = (NOPE + ROPE) ** -0.5  # A model with YaRN has a further factor.
# What a token's output may differ from that of float64, relative to its norm.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@dataclass
class Sizes:
    """Of the layer and of what goes through it."""

    width: int
    heads: int
    q_rank: int
    batch: int
    prompt: int
    """Tokens of each sequence that go through the layer at once."""
    tokens: int
    """Tokens behind them, one at a time."""


SMALL = Sizes(256, 4, 96, 2, 120, 16)
MEDIUM = Sizes(2048, 16, 768, 4, 2048, 64)
FULL = Sizes(7168, 128, 1536, 4, 4096, 64)


class Layer(nn.Module):
    """Multi-head latent attention; without a norm in front and a residual, which are no part."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        heads = self.heads = sizes.heads
        self.q_a = nn.Linear(sizes.width, sizes.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(sizes.q_rank, eps=1e-6)
        self.q_b = nn.Linear(sizes.q_rank, heads * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(sizes.width, ROW, bias=False)
        self.kv_norm = nn.RMSNorm(KV_RANK, eps=1e-6)
        self.kv_b = nn.Linear(KV_RANK, heads * (NOPE + VALUE), bias=False)
        self.out = nn.Linear(heads * VALUE, sizes.width, bias=False)
        for linear in (self.q_a, self.q_b, self.kv_a, self.kv_b, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts of the queries of tokens, `[.., heads, 128]` and `[.., heads, 64]`."""
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (self.heads, -1))
        nope, rope = q.split([NOPE, ROPE], -1)
        return nope, turned(rope, positions[..., None])

    def rows(self, x: Tensor, positions: Tensor) -> Tensor:
        """The latent rows of tokens, `[.., 576]`, which a cache keeps."""
        latent, rope = self.kv_a(x).split([KV_RANK, ROPE], -1)
        return torch.cat([self.kv_norm(latent), turned(rope, positions)], -1)

    def keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[.., heads, 192]` and values `[.., heads, 128]` of latent rows."""
        latent, rope = rows.split([KV_RANK, ROPE], -1)
        nope, v = self.kv_b(latent).unflatten(-1, (self.heads, -1)).split([NOPE, VALUE], -1)
        rope = rope[..., None, :].expand(*nope.shape[:-1], -1)
        return torch.cat([nope, rope], -1), v

    def forward(
        self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Whole sequences `[batch, tokens, width]` to the same, and their latent rows."""
        positions = torch.arange(x.shape[1], device=x.device)
        rows = self.rows(x, positions)
        q, (k, v) = torch.cat(self.queries(x, positions), -1), self.keys_and_values(rows)
        return self.out(attend(q, k, v).flatten(2)), rows

    def step(self, x: Tensor, cache: Cache, lengths: Tensor) -> Tensor:
        """The last token of sequences, `[batch, 1, width]`, over latent rows."""
        positions = (lengths - 1)[:, None]
        q_nope, q_rope = self.queries(x, positions)
        cache.put(self.rows(x, positions), lengths)
        # [heads, 128, 512] twice: from the queries into the space of the rows, and out of it.
        up = self.kv_b.weight.unflatten(0, (self.heads, -1))
        up_k, up_v = up.split([NOPE, VALUE], 1)
        q_nope = torch.einsum("bshn,hnr->bshr", q_nope, up_k)
        o = blockflash.mla_decode(
            q_nope, q_rope, cache.rows, cache.block_table, lengths, scale=SCALE
        )
        return self.out(torch.einsum("bshr,hvr->bshv", o, up_v).flatten(2))

    def step_of_all_heads(self, x: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """The same over keys and values of all heads, `[batch, capacity, heads, ..]`."""
        positions = (lengths - 1)[:, None]
        entries = torch.arange(len(x), device=x.device)[:, None]
        k[entries, positions], v[entries, positions] = self.keys_and_values(self.rows(x, positions))
        q = torch.cat(self.queries(x, positions), -1)
        seen = torch.arange(k.shape[1], device=x.device) < lengths[:, None, None, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=SCALE)
        return self.out(o.transpose(1, 2).flatten(2))


class Cache:
    """Latent rows in pages that belong to the sequences in any order."""

    def __init__(self, sizes: Sizes, like: Tensor) -> None:
        pages = -(-(sizes.prompt + sizes.tokens) // PAGE)
        self.rows = like.new_zeros(sizes.batch * pages, PAGE, ROW)
        order = torch.randperm(sizes.batch * pages, dtype=torch.int32)
        self.block_table = order.view(sizes.batch, pages).to(like.device)

    def put(self, rows: Tensor, lengths: Tensor) -> None:
        """Rows `[batch, tokens, 576]` of the last tokens of sequences."""
        blockflash.mla_append(rows, None, self.rows, self.block_table, lengths)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs of neighbours turned by their positions, as DeepSeek has them."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates = torch.arange(0, ROPE, 2, device=x.device).double() * (-math.log(10_000.0) / ROPE)
    angles = positions[..., None] * rates.exp()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    left, right = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([left * cos - right * sin, left * sin + right * cos], -1)
    return pairs.flatten(-2).to(x.dtype)


def by_blockflash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of prompts, with keys of 192 elements and values of 128."""
    return blockflash.attention(q, k, v, causal=True, scale=SCALE)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same as it is defined, a head of a sequence at a time, which bounds the memory."""
    o, length = torch.empty_like(v), q.shape[1]
    unseen = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    for entry in range(len(q)):
        for head in range(q.shape[2]):
            scores = q[entry, :, head] @ k[entry, :, head].T * SCALE
            weights = scores.masked_fill_(unseen, -torch.inf).softmax(-1)
            o[entry, :, head] = weights @ v[entry, :, head]
    return o


def timed(run: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    """What a call gives, and its milliseconds behind a first one."""
    result = run()
    wait(result)
    begin = time.perf_counter()
    for _ in range(repeats):
        result = run()
    wait(result)
    return result, (time.perf_counter() - begin) / repeats * 1e3


def generated(
    step: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, prompt: int
) -> tuple[Tensor, float]:
    """Outputs of tokens `[batch, tokens, width]` behind prompts, and milliseconds of each step."""
    x, results = tokens[:, :1].clone(), torch.empty_like(tokens)
    lengths = torch.full((len(x),), prompt + 1, dtype=torch.int32, device=x.device)
    o = step(x, lengths)  # Its row is written again below.

    def run() -> None:
        o.copy_(step(x, lengths))

    if x.is_cuda:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    run()
    wait(x)
    begin = time.perf_counter()
    for at in range(tokens.shape[1]):
        x.copy_(tokens[:, at : at + 1])
        lengths.fill_(prompt + at + 1)
        run()
        results[:, at : at + 1] = o
    wait(x)
    return results, (time.perf_counter() - begin) / tokens.shape[1] * 1e3


def wait(tensor: Tensor) -> None:
    """Waits for the GPU of a tensor."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@torch.no_grad()
def compare(sizes: Sizes, device: str, dtype: torch.dtype) -> None:
    """Prints errors and times, and raises if an error is beyond its bound."""
    torch.manual_seed(0)
    layer = Layer(sizes).to(device, dtype)
    x = torch.randn(sizes.batch, sizes.prompt + sizes.tokens, sizes.width).to(device, dtype)
    prompt, tokens = x.split([sizes.prompt, sizes.tokens], 1)
    expected, _ = copy.deepcopy(layer).double()(x.double(), plain)

    cache, (_, rows) = Cache(sizes, x), layer(prompt, by_blockflash)
    cache.put(rows, torch.full((sizes.batch,), sizes.prompt, dtype=torch.int32, device=device))
    capacity = (sizes.batch, sizes.prompt + sizes.tokens)
    k, v = (x.new_zeros(*capacity, sizes.heads, columns) for columns in (NOPE + ROPE, VALUE))
    k[:, : sizes.prompt], v[:, : sizes.prompt] = layer.keys_and_values(rows)
    repeats = 10 if x.is_cuda else 3
    found = {
        "prefill, SDPA": timed(lambda: layer(prompt, by_sdpa)[0], repeats),
        "prefill, attention": timed(lambda: layer(prompt, by_blockflash)[0], repeats),
        "a token, SDPA": generated(
            lambda x, lengths: layer.step_of_all_heads(x, k, v, lengths), tokens, sizes.prompt
        ),
        "a token, mla_decode": generated(
            lambda x, lengths: layer.step(x, cache, lengths), tokens, sizes.prompt
        ),
    }
    kept = {
        "a token, SDPA": k[0, 0].nbytes + v[0, 0].nbytes,
        "a token, mla_decode": ROW * x.itemsize,
    }

    bound, wrong = BOUNDS[dtype], []
    print(f"{sizes.heads} heads, {sizes.batch} prompts of {sizes.prompt} tokens and {sizes.tokens} "
          f"more, {device}, {str(dtype)[6:]}; errors may be up to {bound}:")  # fmt: skip
    print(f"{'':>20} {'greatest error':>15} {'ms':>10} {'bytes for a token':>18}")
    for name, (o, milliseconds) in found.items():
        part = expected[:, : sizes.prompt] if "prefill" in name else expected[:, sizes.prompt :]
        error = ((o - part).norm(dim=-1) / part.norm(dim=-1)).max().item()
        print(f"{name:>20} {error:15.2e} {milliseconds:10.3f} {kept.get(name, ''):>18}")
        if not error <= bound:
            wrong.append(f"{name}: {error:.2e}")
    if wrong:
        raise SystemExit("errors are too great: " + "; ".join(wrong))
    print("Every error is within its bound.")


def main() -> None:
    """Chooses sizes by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="a size for a machine without a GPU")
    sizes.add_argument("--full", action="store_true", help="the sizes of DeepSeek-V3")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not arguments.small
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    chosen = FULL if arguments.full else MEDIUM if on_gpu else SMALL
    if chosen is SMALL:
        torch.set_num_threads(1)  # Further threads would only wait for each other.
    compare(chosen, device, dtype)


if __name__ == "__main__":
    main()
