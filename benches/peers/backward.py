"""Competitors of attention backward, dense and under a block mask: from q, k, v, o, the log-sum-exp
and the gradient of o to the gradients of q, k and v. Each runs its own forward pass once, which is
not measured. Tensors are [batch, seqlen, heads, head_dim], contiguous, as ours are measured."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

import attention
import flash3
import flex
from measure import Call, needs_cuda, needs_triton, on_capture_stream, relative

# Queries whose scores the reference holds at once.
CHUNK = 1024

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class WithGradients:
    """Mixed into the inputs of a forward pass: d_o ~ N(0, 1), and the f64 gradients of the first
    and the last head of keys. These heads are compared completely."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        super().__init__(case, device)
        generator = torch.Generator(device=device).manual_seed(case.get("seed", 0) + 1)
        shape = (*self.q.shape[:-1], self.head_dim_v)
        self.d_o = torch.randn(shape, device=device, dtype=self.dtype, generator=generator)
        self.group = self.heads_q // self.heads_kv
        self.exact: dict[tuple[int, int], Gradients] = {}

    def differentiable(self) -> "WithGradients":
        """The same inputs with q, k and v of which autograd makes gradients."""
        inputs = copy.copy(self)
        inputs.q, inputs.k, inputs.v = (
            t.detach().requires_grad_() for t in (self.q, self.k, self.v)
        )
        return inputs

    def exact_gradients(self, b: int, head_kv: int) -> Gradients:
        """f64 gradients of a head of keys and the query heads that share it: dq [seqlen_q, group,
        head_dim], dk [seqlen_kv, head_dim] and dv [seqlen_kv, head_dim_v]."""
        visible, keys = self.visible(), torch.arange(self.seqlen_kv, device=self.device)
        k, v = (t[b, :, head_kv].double() for t in (self.k, self.v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dq = k.new_zeros(self.seqlen_q, self.group, self.head_dim)
        for rows in torch.arange(self.seqlen_q, device=self.device).split(CHUNK):
            for member in range(self.group):
                head = head_kv * self.group + member
                q, d_o = (t[b, rows, head].double() for t in (self.q, self.d_o))
                hidden = ~visible(b, head, rows[:, None], keys[None])
                scores = self.adjusted(q @ k.T * self.scale, b, head, rows, keys)
                scores = scores.masked_fill(hidden, -math.inf)
                p = torch.softmax(scores, -1).masked_fill_(hidden, 0)  # a row may see nothing
                dp = d_o @ v.T
                ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * self.scale
                dq[rows, member] = ds @ k
                dk += ds.T @ q
                dv += p.T @ d_o
        return dq, dk, dv

    def relative_error(self, gradients: Gradients) -> float:
        """Largest over these heads and the three gradients; NaN anywhere counts."""
        if any(torch.isnan(gradient).any() for gradient in gradients):
            return math.nan
        worst = 0.0
        for b, head_kv in {(0, 0), (self.batch - 1, self.heads_kv - 1)}:
            if (b, head_kv) not in self.exact:
                self.exact[b, head_kv] = self.exact_gradients(b, head_kv)
            members = slice(head_kv * self.group, (head_kv + 1) * self.group)
            found = [t[b, :, heads] for t, heads in zip(gradients, (members, head_kv, head_kv))]
            worst = max(worst, *map(relative, found, self.exact[b, head_kv]))
        return worst


class Inputs(WithGradients, attention.Inputs):
    """A dense case."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        super().__init__(case, device)
        self.without_window()

    def visible(self) -> Callable[..., torch.Tensor]:
        """A function that says whether a query sees a key."""
        reach = self.seqlen_kv - self.seqlen_q if self.causal else self.seqlen_kv
        return lambda _batch, _head, query, key: key <= query + reach


class BlockSparseInputs(WithGradients, flex.Inputs):
    """A case with lists of blocks, which has its own `visible`."""


class Backward(Call):
    """One backward pass. Its output is dq, dk and dv, [batch, seqlen, heads, head_dim] each."""

    Inputs = Inputs
    gradients: Gradients

    def output(self) -> Gradients:
        return self.gradients

    def poison(self) -> None:
        for gradient in self.gradients:
            gradient.fill_(math.nan)


class Autograd(Backward):
    """What autograd does for a competitor of the forward pass. Gradients are allocated by torch."""

    forward: type[Call]

    @classmethod
    def available(cls, device: torch.device) -> None:
        cls.forward.available(device)

    def __init__(self, inputs: WithGradients, options: dict[str, Any]) -> None:
        leaves = inputs.differentiable()
        with on_capture_stream(inputs.device):
            call = self.forward(leaves, options)
            call.run()
        self.settings = call.settings
        self.leaves, self.o, self.d_o = (leaves.q, leaves.k, leaves.v), call.output(), inputs.d_o

    def run(self) -> None:
        self.gradients = torch.autograd.grad(self.o, self.leaves, self.d_o, retain_graph=True)


class SdpaFlash(Autograd):
    """FlashAttention-2 in torch's scaled_dot_product_attention."""

    forward = attention.SdpaFlash


class SdpaFlashDeterministic(SdpaFlash):
    deterministic = True

    def run(self) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = False  # no launches of its own
        torch.use_deterministic_algorithms(True)
        try:
            super().run()
        finally:
            torch.use_deterministic_algorithms(False)


class SdpaCudnn(Autograd):
    forward = attention.SdpaCudnn


class FlexForward(flex.FlexAttention):
    """With tiles that fit into blocks of 64, where torch's own do not."""

    torchs_tiles: Callable[..., list[Any]] | None = None

    def choose(self, _options: dict[str, Any]) -> None:
        torch._functorch.config.donated_buffer = False  # the backward pass runs more than once
        block = min(self.inputs.block_q, self.inputs.block_kv)
        self.cut_tiles(block)
        if block < 128:
            self.kernel_options = {"fwd_BLOCK_M": block, "fwd_BLOCK_N": block}
            self.settings = f"tiles of at most {block}, as torch's own do not fit into the blocks"

    @classmethod
    def cut_tiles(cls, block: int) -> None:
        """Cuts the tiles of the backward pass to the blocks, as torch 2.15 does itself. An older
        one leaves out those that do not fit, whatever the options say, and has no other."""
        from torch._inductor.choices import InductorChoices as Choices

        torchs = cls.torchs_tiles or Choices.get_flex_attention_bwd_configs
        FlexForward.torchs_tiles = staticmethod(torchs)
        axes = ("block_m1", "block_n1", "block_m2", "block_n2")

        def cut(*arguments: Any) -> list[Any]:
            return [
                dataclasses.replace(tile, **{at: min(getattr(tile, at), block) for at in axes})
                for tile in torchs(*arguments)
            ]

        Choices.get_flex_attention_bwd_configs = cut


class Flex(Autograd):
    """torch's FlexAttention, compiled, on a mask of whole blocks."""

    Inputs = BlockSparseInputs
    forward = FlexForward
    deterministic = True

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)
        needs_triton()


class Flash3(Backward):
    """FlashAttention-3, for Hopper."""

    @classmethod
    def available(cls, device: torch.device) -> None:
        flash3.FlashAttention3.available(device)

    def __init__(self, inputs: Inputs, _options: dict[str, Any]) -> None:
        flash3.FlashAttention3.load()
        operators = torch.ops.flash_attn_3
        q, k, v = inputs.q, inputs.k, inputs.v
        common = dict(q=q, k=k, v=v, softmax_scale=inputs.scale, is_causal=inputs.causal)
        forward = operators.fwd.default
        o, lse, *_ = forward(*flash3.arguments(forward, num_splits=1, **common))
        self.gradients = tuple(torch.empty_like(t) for t in (q, k, v))
        names = dict(zip(("dq", "dk", "dv"), self.gradients))
        self.operator = operators.bwd.default
        self.arguments = flash3.arguments(
            self.operator,
            dout=inputs.d_o,
            out=o,
            softmax_lse=lse,
            deterministic=self.deterministic,
            **names,
            **common,
        )

    def run(self) -> None:
        self.operator(*self.arguments)


class Flash3Deterministic(Flash3):
    deterministic = True
