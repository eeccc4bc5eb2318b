"""A small GPT that trains on sequences whose rows are divided among processes.

The model is written for one process. `context_parallel` gives each process its rows of the tokens
and of the tables of positions, and runs attention over all of them. The same steps on one process
are the measure: losses and parameters must agree, and on GPUs the time is compared.

    torchrun --nproc-per-node 2 context_parallel.py --small            # on the CPU, by gloo
    torchrun --nproc-per-node 8 context_parallel.py --tokens 131072    # a GPU for each, by NCCL
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import blockflash
from blockflash.distributed import context_parallel

VOCABULARY = 256


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[B, H, S, D]` by tables `[S, D / 2]`."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Layer(nn.Module):
    """Attention with shared heads, and two linear layers."""

    def __init__(self, dim: int, heads: int, heads_k: int) -> None:
        super().__init__()
        self.heads = (heads, heads_k, heads_k)
        self.head_dim = dim // heads
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.qkv = nn.Linear(dim, sum(self.heads) * self.head_dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The rows after the layer."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, 1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Scores of the next token, for each token of a sequence of a fixed length."""

    def __init__(self, tokens: int, dim: int, heads: int, heads_k: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, heads_k) for _ in range(layers))
        half = dim // heads // 2
        angles = torch.outer(torch.arange(tokens), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """The scores, `[B, S, vocabulary]`."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x @ self.embedding.weight.T


def train(
    model: Model, tokens: Tensor, labels: Tensor, steps: int, world: int, scheme: str
) -> tuple[list[float], float]:
    """The losses, and the seconds of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, device, total = [], tokens.device.type, labels.numel()
    for step in range(steps):
        start = time.perf_counter()
        buffers = [tokens, labels, model.cos, model.sin]
        over_ranks = context_parallel(
            buffers=buffers, buffer_seq_dims=(1, 1, 0, 0), scheme=scheme, check=step == 0
        )
        lower = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        with over_ranks if world > 1 else nullcontext():
            with lower:
                scores = model(tokens).flatten(0, 1)
            # The mean over all rows, not over those of this rank.
            sum_of_rows = functional.cross_entropy(
                scores.float(), labels.flatten(), reduction="sum"
            )
            loss = sum_of_rows / total
            loss.backward()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # Waits for the GPU.
        seconds = time.perf_counter() - start
    return losses, seconds


def main() -> None:
    """Trains on one process, then on all, and compares."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--small", action="store_true", help="sizes for the CPU")
    arguments.add_argument("--tokens", type=int, help="length of the sequence")
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--scheme", default="auto", choices=("auto", "heads", "keys"))
    chosen = arguments.parse_args()
    cuda = torch.cuda.is_available() and not chosen.small
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ and cuda:
        options = dist.ProcessGroupNCCL.Options()
        # An exchange starts before the attention beside which it runs.
        options.is_high_priority_stream = True
        dist.init_process_group("nccl", pg_options=options, device_id=device)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    if cuda:
        blockflash.activate_sdpa()
    # Any length will do. Here it is one that a single process can hold, too.
    length = chosen.tokens or (65536 if cuda else 201)
    sizes = (2048, 16, 8, 4) if cuda else (64, 4, 2, 2)

    torch.manual_seed(0)
    model = Model(length, *sizes).to(device)
    text = torch.randint(VOCABULARY, (1, length + 1), device=device).sort(-1).values
    tokens, labels = text[:, :-1].clone(), text[:, 1:].clone()
    alone = copy.deepcopy(model)
    expected, one = train(alone, tokens, labels, chosen.steps, 1, chosen.scheme)
    dist.barrier()
    losses, all_ranks = train(model, tokens, labels, chosen.steps, world, chosen.scheme)

    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max((a - b).abs().max().item() for a, b in pairs)
    size = max(a.abs().max().item() for a in alone.parameters())
    if rank == 0:
        print(f"{length} tokens on {world} processes, scheme {chosen.scheme}")
        for step, (loss, by_one) in enumerate(zip(losses, expected, strict=True)):
            print(f"step {step}: loss {loss:.6f}, on one process {by_one:.6f}")
        print(f"parameters differ by {apart / size:.1e} of the largest one")
        if cuda:
            print(f"one GPU takes {one:.3f} s for a step, {world} take {all_ranks:.3f} s")
            print(f"scaling {one / world / all_ranks:.2f}")
    dist.destroy_process_group()
    tolerance = 2e-2 if cuda else 1e-5
    if apart > tolerance * size:
        raise SystemExit("the processes do not agree with one")
    # Threads of gloo may abort an interpreter that ends (torch 2.15).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
