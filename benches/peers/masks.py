"""Competitors of attention under masks inside of blocks, and with what is added to scores: torch's
FlexAttention, compiled, with the mask as a function."""

import math

import torch
from torch.nn.attention import flex_attention as flex

import attention
import backward
from flex import OPTIONS, fresh_compiler
from measure import Call, needs_cuda, needs_triton, relative
from tune import Tuned


def ends(tokens, count):
    """Where documents end, as ours do."""
    weights = [1 / (1 + 5 * at % count) for at in range(count)]
    total = sum_ = 0.0
    for weight in weights:
        total += weight
    result = []
    for weight in weights:
        sum_ += weight
        result.append(int(tokens * sum_ / total))
    return [*result[:-1], tokens]


class Inputs(attention.Inputs):
    """q, k, v, and what `pairs` of the case says: a mask, a bias or slopes."""

    def __init__(self, case, device):
        super().__init__(case, device)
        fresh_compiler()
        self.pairs, self.bias, self.slopes = case["pairs"], None, None
        self.diagonal = self.seqlen_kv - self.seqlen_q  # query i stands at key i + diagonal
        if self.pairs.endswith("bias"):
            entries = 1 if self.pairs == "sharedbias" else self.batch
            generator = torch.Generator(device=device).manual_seed(case.get("seed", 0) + 2)
            shape = (entries, self.heads_q, self.seqlen_q, self.seqlen_kv)
            self.bias = torch.randn(shape, device=device, dtype=self.dtype, generator=generator)
        elif self.pairs == "alibi":
            exponents = torch.arange(1, self.heads_q + 1, device=device) * (-8 / self.heads_q)
            self.slopes = torch.exp2(exponents)
        self.mask = self.mask_of(device)

    def mask_of(self, device):
        """A function that says whether a query sees a key by `pairs`; None for all."""
        diagonal, name = self.diagonal, self.pairs
        if self.bias is not None or self.slopes is not None:
            return None
        if name == f"tree{name[4:]}":
            # Ancestors of each node, itself among them.
            nodes = torch.zeros(self.seqlen_q, self.seqlen_q, dtype=torch.bool)
            for node in range(self.seqlen_q):
                at = node
                while True:
                    nodes[node, at] = True
                    if at == 0:
                        break
                    at = (at - 1) // 2
            nodes = nodes.to(device)
            return lambda _b, _h, q, k: (k < diagonal) | nodes[q, (k - diagonal).clamp(min=0)]
        kind = name[: name.rindex("b")]
        if kind.startswith("documents"):
            of_token = torch.zeros(self.seqlen_kv, dtype=torch.int32)
            start = 0
            for at, end in enumerate(ends(self.seqlen_kv, int(kind.removeprefix("documents")))):
                of_token[start:end], start = at, end
            of_token = of_token.to(device)
            return lambda _b, _h, q, k: of_token[q + diagonal] == of_token[k]
        if kind.startswith("prefix"):
            first = int(kind.removeprefix("prefix"))
            return lambda _b, _h, q, k: (k < first) | (k <= q + diagonal)
        if kind.startswith("grid"):
            reach = int(kind.removeprefix("grid")) // 2
            width = 1 << (self.seqlen_kv.bit_length() - 1) // 2

            def near(_b, _h, q, k):
                q = q + diagonal
                rows, columns = q // width - k // width, q % width - k % width
                return (rows.abs() <= reach) & (columns.abs() <= reach)

            return near
        if kind.startswith("dilated"):
            count, step = map(int, kind.removeprefix("dilated").split("x"))

            def apart(_b, _h, q, k):
                back = q + diagonal - k
                return (back >= 0) & (back % step == 0) & (back < count * step)

            return apart
        raise ValueError(f"no competitor knows {name!r}")

    def visible(self):
        """A function that says whether a query sees a key."""
        mask, diagonal, causal = self.mask, self.diagonal, self.causal
        if mask is None:
            reach = diagonal if causal else self.seqlen_kv
            return lambda _b, _h, q, k: k <= q + reach
        if causal:
            return lambda b, h, q, k: mask(b, h, q, k) & (k <= q + diagonal)
        return mask

    def added(self):
        """The score_mod, or None."""
        bias, slopes, diagonal = self.bias, self.slopes, self.diagonal
        if slopes is not None:
            return lambda score, _b, h, q, k: score - slopes[h] * (q + diagonal - k).abs()
        if bias is None:
            return None
        if bias.shape[0] == 1:
            return lambda score, _b, h, q, k: score + bias[0, h, q, k]
        return lambda score, b, h, q, k: score + bias[b, h, q, k]

    def adjusted(self, scores, b, head, rows, keys):
        """Scores with what is added to them."""
        added = self.added()
        return scores if added is None else added(scores, b, head, rows[:, None], keys[None])

    def relative_error(self, out):
        """As for dense attention, with the mask and what is added."""
        if torch.isnan(out).any():
            return math.nan
        length, worst, visible = self.seqlen_q, 0.0, self.visible()
        starts = (0, max(length // 2 - 32, 0), max(length - 64, 0))
        rows = torch.cat([torch.arange(s, min(s + 64, length)) for s in starts]).unique()
        rows, keys = rows.to(out.device), torch.arange(self.seqlen_kv, device=out.device)
        for b, h in self.samples():
            group = self.heads_q // self.heads_kv
            k, v = (t[b, :, h // group].double() for t in (self.k, self.v))
            scores = self.adjusted(self.q[b, rows, h].double() @ k.T * self.scale, b, h, rows, keys)
            hidden = ~visible(b, h, rows[:, None], keys[None]).expand_as(scores)
            weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
            worst = max(worst, relative(out[b, rows, h], weights @ v))
        return worst

    quick_error = relative_error


class BackwardInputs(backward.WithGradients, Inputs):
    """The same with gradients; a bias has none here."""


class FlexAttention(Call):
    """With torch's own tiles. Its output is allocated by torch."""

    Inputs = Inputs

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        needs_triton()

    def __init__(self, inputs, options):
        self.inputs, self.out, self.kernel_options = inputs, None, None
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        self.block_mask, self.score_mod = None, inputs.added()
        if inputs.mask is not None or inputs.causal:
            lengths = (inputs.seqlen_q, inputs.seqlen_kv)
            make = torch.compile(flex.create_block_mask)  # all pairs at once do not fit
            self.block_mask = make(inputs.visible(), None, None, *lengths, device=inputs.device)
        self.attend = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
        self.choose(options)

    def choose(self, _options):
        """The first run, which compiles."""
        self.run()

    def run(self):
        with torch.set_grad_enabled(self.q.requires_grad):
            self.out = self.attend(
                self.q,
                self.k,
                self.v,
                score_mod=self.score_mod,
                block_mask=self.block_mask,
                enable_gqa=self.inputs.heads_q != self.inputs.heads_kv,
                kernel_options=self.kernel_options,
            )

    def output(self):
        return self.out.transpose(1, 2)


class FlexAttentionTuned(Tuned, FlexAttention):
    """With the fastest tiles of a sweep, made for each case, in blocks of 128."""

    def choose(self, options):
        self.tune(self.inputs, options)

    def search(self, sweep):
        names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
        tiles = OPTIONS.get(self.inputs.head_dim, OPTIONS[128])
        sweep.run([tuple(zip(names, values)) for values in tiles])
        for best in sweep.best(2):
            sweep.run([(*best, ("PRESCALE_QK", True))])

    def use(self, candidate):
        self.kernel_options = dict(candidate)
        self.run()  # compiles before anything is captured


class FlexForward(FlexAttention):
    """Whose backward pass runs more than once."""

    def choose(self, _options):
        torch._functorch.config.donated_buffer = False


class Flex(backward.Autograd):
    """torch's FlexAttention, compiled: gradients of q, k and v."""

    Inputs = BackwardInputs
    forward = FlexForward
    deterministic = True
