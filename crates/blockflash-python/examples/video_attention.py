"""A video transformer of diffusers whose attention visits only tiles of the latent grid.

One step of Wan with each kind of attention: the share of blocks that attention of the video to
itself visits, the error of the output against dense attention, and the time.

    python video_attention.py --small                        # a few seconds, no GPU
    python video_attention.py --latent 21 60 104             # Wan 2.1 1.3B, random weights
    python video_attention.py --model some/pipeline          # its own weights

Random weights and noise show the time. The error of a trained model is what counts, and of its
whole pipeline: the first steps and layers are often left dense (`dense_layers`).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from blockflash.diffusers import Dense, SlidingTile, TopK, set_attention

KINDS = {
    "dense": Dense(),
    "sliding tile 3": SlidingTile(3),
    "sliding tile 1 x 3 x 3": SlidingTile((1, 3, 3)),
    "top 50 %": TopK(0.5),
    "top 20 %": TopK(0.2),
    "top 20 %, 128 tokens": TopK(0.2, (4, 4, 8)),
}


def watched(kind: Any, shares: list[float]) -> Any:
    """The same kind, that notes the share of blocks that each call visits."""
    if isinstance(kind, Dense):
        shares.append(1.0)
        return kind

    class Watched(type(kind)):
        def block_mask(self, q: Tensor, k: Tensor, grid: tuple[int, int, int]) -> Any:
            mask = super().block_mask(q, k, grid)
            shares.append(mask.density)
            return mask

    return Watched(**vars(kind))


@torch.no_grad()
def timed(model: nn.Module, inputs: dict[str, Tensor], repeats: int) -> float:
    """The best time of a step in milliseconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        model(**inputs)
        if inputs["hidden_states"].is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def random_model(small: bool) -> nn.Module:
    """Wan 2.1 1.3B, or a tiny one with weights so large that attention is uneven."""
    if not small:
        sizes = {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30}
        return WanTransformer3DModel(**sizes, text_dim=4096, ffn_dim=8960)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2}
    model = WanTransformer3DModel(**sizes, text_dim=32, ffn_dim=64)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.3)
    return model


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a size for a machine without a GPU")
    parser.add_argument("--model", help="a folder or name with a subfolder `transformer` of Wan")
    parser.add_argument(
        "--latent", type=int, nargs=3, metavar=("FRAMES", "HEIGHT", "WIDTH"), default=[21, 60, 104]
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if args.small else ("cuda", torch.bfloat16)
    torch.manual_seed(0)
    if args.model is None:
        model = random_model(args.small)
        model = model if args.small else model.to(device, dtype)
    else:
        model = WanTransformer3DModel.from_pretrained(
            args.model, subfolder="transformer", torch_dtype=dtype
        ).to(device)
    model, latent = model.eval(), [8, 32, 16] if args.small else args.latent
    inputs = {
        "hidden_states": torch.randn(1, model.config.in_channels, *latent),
        "encoder_hidden_states": torch.randn(1, 64, model.config.text_dim),
    }
    inputs = {name: tensor.to(device, dtype) for name, tensor in inputs.items()}
    inputs["timestep"] = torch.tensor([500], device=device)

    print(f"a latent of {' x '.join(map(str, latent))}, {device}")
    print(f"{'attention':>24} {'visited':>8} {'error':>10} {'ms':>10}")
    dense = None
    for name, kind in KINDS.items():
        shares: list[float] = []
        with torch.no_grad(), set_attention(model, watched(kind, shares)):
            output = model(**inputs).sample.float()
        with set_attention(model, kind):
            elapsed = timed(model, inputs, args.repeats)
        dense = output if dense is None else dense
        error = ((output - dense).norm() / dense.norm()).item()
        print(f"{name:>24} {sum(shares) / len(shares):8.1%} {error:10.2e} {elapsed:10.1f}")


if __name__ == "__main__":
    main()
