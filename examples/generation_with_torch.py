#!/usr/bin/env python3
"""The decoding step of the example `generation` in PyTorch: the same shapes and the same work on
the host, with scaled_dot_product_attention over a padded cache, captured in a CUDA graph.

usage: generation_with_torch.py [--layers 4] [--heads 8] [--kv-heads 2] [--vocabulary 1024]
                          [--tokens 128] [--batch 1 2 4 8 16] [--steps 200]

Prints milliseconds per step and tokens per second for each batch, as the example does. Sequences
have between 1 and 2 * tokens keys. Needs torch and, for times that mean something, a GPU.
"""

import argparse
import time

import torch
import torch.nn.functional as F

HEAD_DIM = 64


class Model:
    def __init__(self, args, batch, device):
        self.heads, self.kv_heads = args.heads, args.kv_heads
        width, self.capacity = args.heads * HEAD_DIM, 2 * args.tokens
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def weights(outputs, inputs):
            return torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5

        rows = (args.heads + 2 * args.kv_heads) * HEAD_DIM
        shapes = [(rows, width), (width, width), (4 * width, width), (width, 4 * width)]
        self.layers = [[weights(*shape) for shape in shapes] for _ in range(args.layers)]
        self.head = weights(args.vocabulary, width)
        self.embedding = torch.randn(args.vocabulary, width, dtype=dtype)
        cache = (batch, args.kv_heads, self.capacity, HEAD_DIM)
        self.caches = [
            [torch.zeros(cache, device=device, dtype=dtype) for _ in "kv"] for _ in self.layers
        ]
        half = torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2)
        angles = torch.arange(self.capacity, device=device)[:, None] * 10_000.0**-half
        self.cos, self.sin = angles.cos(), angles.sin()
        self.x = torch.zeros(batch, width, device=device, dtype=dtype)
        self.lengths = torch.ones(batch, device=device, dtype=torch.long)
        self.rows = torch.arange(batch, device=device)
        self.keys = torch.arange(self.capacity, device=device)

    def turned(self, x, position):
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def step(self):
        """Logits of the next tokens; appends this token to the caches."""
        x, position = self.x, self.lengths - 1
        mask = (self.keys < self.lengths[:, None])[:, None, None]
        for (qkv, out, up, down), (k_cache, v_cache) in zip(self.layers, self.caches):
            heads = [self.heads, self.kv_heads, self.kv_heads]
            q, k, v = F.linear(x, qkv).unflatten(1, (-1, HEAD_DIM)).split(heads, 1)
            k_cache[self.rows, :, position] = self.turned(k, position)
            v_cache[self.rows, :, position] = v
            q = self.turned(q, position)[:, :, None]
            o = F.scaled_dot_product_attention(q, k_cache, v_cache, mask, enable_gqa=True)
            x = x + F.linear(o.flatten(1), out)
            x = x + F.linear(F.gelu(F.linear(x, up)), down)
        return F.linear(x, self.head).float()


def captured(model):
    """The step as a function that returns logits; a CUDA graph on a GPU."""
    if model.x.device.type == "cpu":
        return model.step
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            model.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.step()

    def replay():
        graph.replay()
        return logits

    return replay


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    print("step            steps   tokens  ms/step  tokens/s")
    with torch.inference_mode():
        for batch in args.batch:
            model = Model(args, batch, device)
            step = captured(model)
            tokens = torch.zeros(batch, dtype=torch.long)
            lengths = torch.randint(1, 2 * args.tokens, (batch,))
            start = time.perf_counter()
            for _ in range(args.steps):
                model.x.copy_(model.embedding[tokens])
                model.lengths.copy_(lengths)
                tokens = step().cpu().argmax(-1)
                lengths = lengths % model.capacity + 1
            seconds = time.perf_counter() - start
            ms, rate = seconds * 1e3 / args.steps, batch * args.steps / seconds
            name = f"batch of {batch}"
            print(f"{name:<14} {args.steps:>6} {batch * args.steps:>8} {ms:>8.3f} {rate:>9.0f}")


if __name__ == "__main__":
    main()
