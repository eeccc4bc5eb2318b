#!/usr/bin/env python3
"""How exact the log-sum-exp is: blockflash beside PyTorch's FlashAttention-2 and cuDNN, all of them
against float64.

usage: lse_compared_with_torch.py [PATH_TO_BLOCKFLASH] [--seqlen 1024]

Inputs are N(0, 1), batch 1, 4 heads; `q x 8` makes peaked rows. Each path of blockflash is asked by
the command: the selected kernel and the portable one, dense, causal, with a sink, under a block
mask, and packed. Needs a GPU, torch and safetensors. Exit code 1 when an error is more than twice
that of FlashAttention-2 on the same input.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HEADS = 4


def exact(q, k, causal, sink):
    """Log-sum-exp [heads, seqlen] in float64 of [seqlen, heads, head_dim] tensors."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    if causal:
        above = torch.ones(scores.shape[-2:], device=q.device).triu(1).bool()
        scores.masked_fill_(above, -torch.inf)
    if sink is not None:
        column = sink.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    return scores.logsumexp(-1)


def torch_lse(name, q, k, v, causal):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if name == "fa2":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[1][0]
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[1][0]
    return lse.reshape(lse.shape[0], lse.shape[1])


def largest(lse, reference):
    """The largest error of an lse."""
    return (lse.double() - reference).abs().max().item()


def run(command, qkv, sink):
    """The lse by the blockflash command; raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = Path(folder, "in.safetensors"), Path(folder, "lse.safetensors")
        tensors = {name: x.cpu().contiguous() for name, x in zip("qkv", qkv)}
        save_file({**tensors, "sink": sink.cpu()}, inputs)
        words = [inputs if word == "SINK" else word for word in command]
        words = [str(word) for word in [*words, "--input", inputs, "--lse", output]]
        subprocess.run(words, capture_output=True, text=True, check=True)
        return load_file(output)["lse"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("blockflash", nargs="?", default="target/release/blockflash")
    parser.add_argument("--seqlen", type=int, default=1024)
    args = parser.parse_args()
    s, failed = args.seqlen, 0
    cuts = [0, s // 3 // 8 * 8, s // 2, s]
    # Name, options of the command, and whether it is causal, has a sink, is packed.
    paths = [
        ("selected", [], 0, 0, 0),
        ("portable", ["--kernel", "attention_fwd_sm80"], 0, 0, 0),
        ("causal", ["--mask", "causal"], 1, 0, 0),
        ("portable causal", ["--mask", "causal", "--kernel", "attention_fwd_sm80"], 1, 0, 0),
        ("sink", ["--sink", "SINK"], 0, 1, 0),
        ("portable sink", ["--sink", "SINK", "--kernel", "attention_fwd_sm80"], 0, 1, 0),
        ("all blocks", ["--block-mask", "window:100", "--block", "128"], 0, 0, 0),
        ("packed", ["--cu-seqlens", ",".join(map(str, cuts))], 0, 0, 1),
    ]
    print(f"largest |error| of lse, S {s}, {HEADS} heads, {torch.cuda.get_device_name()}")
    print(f"{'type':5} {'D':>4} {'q':>4}  {'path':16} {'blockflash':>10} {'FA2':>10}", end=" ")
    print(f"{'cuDNN':>10}  ours/FA2")
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (64, 96, 128, 192, 256):
            for gain in (1, 8):
                torch.manual_seed(dim + gain)
                q, k, v = (torch.randn(s, HEADS, dim, device="cuda") for _ in range(3))
                q, k, v = (q * gain).to(dtype), k.to(dtype), v.to(dtype)
                sink = torch.randn(HEADS, device="cuda")
                for name, options, causal, has_sink, packed in paths:
                    lengths = zip(cuts, cuts[1:]) if packed else [(0, s)]
                    pieces = [[x[a:b] for x in (q, k, v)] for a, b in lengths]
                    # FlashAttention-2 has no sink: its lse without one stands for it.
                    plain = torch.cat([exact(q, k, causal, None) for q, k, _ in pieces], 1)
                    fa2 = torch.cat([torch_lse("fa2", *piece, bool(causal)) for piece in pieces], 1)
                    of_fa2 = largest(fa2, plain)
                    try:
                        lses = [torch_lse("cudnn", *piece, bool(causal)) for piece in pieces]
                        of_cudnn = f"{largest(torch.cat(lses, 1), plain):10.2e}"
                    except RuntimeError:
                        of_cudnn = f"{'-':>10}"
                    asked = [args.blockflash, "attention", "--repeat", "1", *options]
                    try:
                        lse = run(asked, [x if packed else x[None] for x in (q, k, v)], sink)
                    except subprocess.CalledProcessError as error:
                        print(f"{name}: {error.stderr.strip()[-300:]}")
                        failed += 1
                        continue
                    used = sink if has_sink else None
                    reference = torch.cat([exact(q, k, causal, used) for q, k, _ in pieces], 1)
                    ours = largest(lse.reshape(HEADS, s).cuda(), reference)
                    bad = not ours <= 2 * of_fa2
                    failed += bad
                    print(f"{str(dtype)[6:]:5.5} {dim:4} {'x' + str(gain):>4}  {name:16}", end=" ")
                    print(f"{ours:10.2e} {of_fa2:10.2e} {of_cudnn}  {ours / of_fa2:5.2f}", end="")
                    print("  MORE THAN TWICE" if bad else "")
    print(f"{failed} failed" if failed else "all within twice the error of FlashAttention-2")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
