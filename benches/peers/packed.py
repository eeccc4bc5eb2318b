"""Competitors of attention of packed sequences, [tokens, heads, head_dim], one behind another; each
query sees keys of its own sequence."""

import math
from typing import Any

import torch

import attention
import flash3
from measure import Call, needs_cuda, relative


class Inputs(attention.Inputs):
    """q, k and v as of one sequence, where each begins, and the f64 reference on sampled rows of
    the first, the longest and the last one."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        lengths = case["lengths"]
        self.longest, tokens = max(lengths), sum(lengths)
        super().__init__(dict(case, batch=1, seqlen_q=tokens, seqlen_kv=tokens), device)
        self.starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self.sampled = {0, lengths.index(self.longest), len(lengths) - 1}
        self.offsets = torch.tensor(self.starts, dtype=torch.int32, device=device)
        # Keys before and after a query that it sees, -1 for all: as competitors take them.
        self.sides = (-1 if self.window is None else self.window - 1, 0 if self.causal else -1)

    def hidden(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Which keys of a sequence these of its queries do not see."""
        keys = torch.arange(length, device=rows.device)[None]
        before, after = self.sides
        hidden = keys > rows[:, None] + (length if after < 0 else after)
        return hidden | (keys < rows[:, None] - (length if before < 0 else before))

    def relative_error(self, out: torch.Tensor) -> float:
        """Largest over these sequences and two heads; NaN anywhere in the output counts."""
        if torch.isnan(out).any():
            return math.nan
        worst = 0.0
        for at in self.sampled:
            start, end = self.starts[at : at + 2]
            length = end - start
            first = (0, max(length // 2 - 32, 0), max(length - 64, 0))
            rows = torch.cat([torch.arange(s, min(s + 64, length)) for s in first]).unique()
            rows = rows.to(out.device)
            hidden = self.hidden(rows, length)
            for head in {0, self.heads_q - 1}:
                exact = self.exact(0, head, start + rows, slice(start, end), hidden)
                worst = max(worst, relative(out[start + rows, head], exact))
        return worst


class Flash3(Call):
    """FlashAttention-3's forward with offsets."""

    Inputs = Inputs

    @classmethod
    def available(cls, device: torch.device) -> None:
        flash3.FlashAttention3.available(device)

    def __init__(self, inputs: Inputs, _options: dict[str, Any]) -> None:
        flash3.FlashAttention3.load()
        self.operator = flash3.FlashAttention3.operator
        q, k, v = (t[0] for t in (inputs.q, inputs.k, inputs.v))
        self.out = torch.empty_like(q)
        before, after = inputs.sides
        self.arguments = flash3.arguments(
            self.operator,
            q=q,
            k=k,
            v=v,
            out=self.out,
            cu_seqlens_q=inputs.offsets,
            cu_seqlens_k=inputs.offsets,
            max_seqlen_q=inputs.longest,
            max_seqlen_k=inputs.longest,
            softmax_scale=inputs.scale,
            is_causal=inputs.causal,
            window_size_left=before,
            window_size_right=after,
            num_splits=1,
        )

    def run(self) -> None:
        self.operator(*self.arguments)

    def output(self) -> torch.Tensor:
        return self.out


class TorchVarlen(Call):
    """torch's operator for packed sequences, FlashAttention-2. Its output is allocated by torch."""

    Inputs = Inputs

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)

    def __init__(self, inputs: Inputs, _options: dict[str, Any]) -> None:
        tensors = [t[0] for t in (inputs.q, inputs.k, inputs.v)]
        offsets, longest = [inputs.offsets] * 2, [inputs.longest] * 2
        # No dropout; whether it is causal; no mask for debugging.
        causal = inputs.causal and inputs.window is None
        self.arguments = (*tensors, *offsets, *longest, 0.0, causal, False)
        before, after = inputs.sides
        self.options = dict(scale=inputs.scale, window_size_left=before, window_size_right=after)
        self.out = None

    def run(self) -> None:
        self.out = torch.ops.aten._flash_attention_forward(*self.arguments, **self.options)[0]

    def output(self) -> torch.Tensor:
        return self.out
