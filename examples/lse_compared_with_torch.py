#!/usr/bin/env python3
"""How exact the log-sum-exp is: blockflash beside PyTorch's FlashAttention-2 and cuDNN, all against float64.

usage: lse_compared_with_torch.py [PATH_TO_BLOCKFLASH] [--seqlen 1024]

Inputs are N(0, 1), batch 1, 4 heads; `q x 8` makes peaked rows. Each path of blockflash is asked by the command: the selected
kernel and the portable one, dense, causal, with a sink, under a block mask, and packed. Needs a GPU, torch and safetensors. Exit
code 1 when an error is more than twice that of FlashAttention-2 on the same input.
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
        scores.masked_fill_(torch.ones(scores.shape[-2:], device=q.device).triu(1).bool(), -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    return scores.logsumexp(-1)


def torch_lse(name, q, k, v, causal):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if name == "fa2":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[1][0]
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[1][0]
    return lse.reshape(lse.shape[0], lse.shape[1])


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
    print(f"{'type':5} {'D':>4} {'q':>4}  {'path':16} {'blockflash':>10} {'FA2':>10} {'cuDNN':>10}  ours/FA2")
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (64, 96, 128, 192, 256):
            for gain in (1, 8):
                torch.manual_seed(dim + gain)
                q, k, v = (torch.randn(s, HEADS, dim, device="cuda") for _ in range(3))
                q, k, v = (q * gain).to(dtype), k.to(dtype), v.to(dtype)
                sink = torch.randn(HEADS, device="cuda")
                for name, options, causal, has_sink, packed in paths:
                    pieces = [slice(a, b) for a, b in zip(cuts, cuts[1:])] if packed else [slice(0, s)]
                    reference = torch.cat([exact(q[p], k[p], causal, sink if has_sink else None) for p in pieces], 1)
                    error = lambda lse: (lse.double() - reference).abs().max().item()
                    # FlashAttention-2 has no sink: its lse without one stands for it.
                    plain = torch.cat([exact(q[p], k[p], causal, None) for p in pieces], 1)
                    fa2 = torch.cat([torch_lse("fa2", q[p], k[p], v[p], bool(causal)) for p in pieces], 1)
                    of_fa2 = (fa2.double() - plain).abs().max().item()
                    try:
                        cudnn = torch.cat([torch_lse("cudnn", q[p], k[p], v[p], bool(causal)) for p in pieces], 1)
                        of_cudnn = f"{(cudnn.double() - plain).abs().max().item():10.2e}"
                    except RuntimeError:
                        of_cudnn = f"{'-':>10}"
                    with tempfile.TemporaryDirectory() as folder:
                        inputs, output = Path(folder, "in.safetensors"), Path(folder, "lse.safetensors")
                        shape = (lambda x: x) if packed else (lambda x: x[None])
                        tensors = {n: shape(x).cpu().contiguous() for n, x in (("q", q), ("k", k), ("v", v))}
                        save_file({**tensors, "sink": sink.cpu()}, inputs)
                        words = [str(inputs) if word == "SINK" else word for word in options]
                        command = [args.blockflash, "attention", "--input", inputs, "--lse", output, "--repeat", "1", *words]
                        run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
                        if run.returncode:
                            print(f"{name}: {run.stderr.strip()[-300:]}")
                            failed += 1
                            continue
                        ours = error(load_file(output)["lse"].reshape(HEADS, s).cuda())
                    bad = not ours <= 2 * of_fa2
                    failed += bad
                    print(
                        f"{str(dtype)[6:]:5.5} {dim:4} {'x' + str(gain):>4}  {name:16} {ours:10.2e} {of_fa2:10.2e} {of_cudnn}"
                        f"  {ours / of_fa2:5.2f}{'  MORE THAN TWICE' if bad else ''}"
                    )
    print(f"{failed} failed" if failed else "all within twice the error of FlashAttention-2")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
