#!/usr/bin/env python3
"""One attention layer end to end: Python writes it, the blockflash command computes it, and the
result is compared with PyTorch's.

usage: compare_with_torch.py [PATH_TO_BLOCKFLASH] [--seqlen 4096] [--device cuda:0]

The shape is that of a layer of Llama 3 8B: 32 query heads, 8 key/value heads, head_dim 128, bf16,
causal. Q and K get rotary position embeddings and a few large channels, as trained models have, so
the softmax is neither uniform nor one-hot. The reference is PyTorch's scaled_dot_product_attention
in fp32 on the same bf16 inputs; PyTorch's own bf16 result stands beside it. Needs torch and
safetensors. Exit code 1 when the error exceeds twice that of PyTorch's bf16 result.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file


def rotary(x):
    """Rotary position embedding of [batch, seqlen, heads, head_dim], base 500000."""
    seqlen, dim = x.shape[1], x.shape[3]
    angle = torch.arange(seqlen)[:, None] * 500000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def layer(seqlen, heads, kv_heads, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    gain = torch.ones(dim)
    gain[:: dim // 4] = 6.0  # trained layers have a few large channels
    q = rotary(torch.randn(1, seqlen, heads, dim, generator=generator) * gain)
    k = rotary(torch.randn(1, seqlen, kv_heads, dim, generator=generator) * gain)
    v = torch.randn(1, seqlen, kv_heads, dim, generator=generator)
    return [x.to(torch.bfloat16).contiguous() for x in (q, k, v)]


def sdpa(q, k, v, dtype, device):
    q, k, v = [x.to(device=device, dtype=dtype).transpose(1, 2) for x in (q, k, v)]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2).float().cpu()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("blockflash", nargs="?", default="target/release/blockflash")
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    q, k, v = layer(args.seqlen, 32, 8, 128, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = Path(folder, "qkv.safetensors"), Path(folder, "o.safetensors")
        save_file({"q": q, "k": k, "v": v}, inputs)
        command = [args.blockflash, "attention", "--input", inputs, "--out", output]
        command += ["--mask", "causal", "--dtype", "bf16", "--device", args.device, "--json"]
        run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{run.stderr.strip()}\nblockflash failed with exit code {run.returncode}")
        report = json.loads(run.stdout)
        ours = next(iter(load_file(output).values())).float()

    torch.backends.cuda.matmul.allow_tf32 = False
    exact = sdpa(q, k, v, torch.float32, args.device)
    theirs = sdpa(q, k, v, torch.bfloat16, args.device)
    rows = {}
    for name, out in (("blockflash bf16", ours), ("torch SDPA bf16", theirs)):
        error = out - exact
        largest, relative = error.abs().max().item(), (error.norm() / exact.norm()).item()
        rows[name] = (largest, relative)
        print(f"{name}: max error {largest:.2e}, relative error {relative:.2e}", end=" ")
        print("against torch SDPA in fp32")
    case = {"shape": list(q.shape), "kv_heads": 8, "device": args.device}
    print(json.dumps({**case, "errors": rows, "command": report}))
    ok = rows["blockflash bf16"][1] <= 2 * rows["torch SDPA bf16"][1]
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
