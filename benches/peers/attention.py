"""Competitors of dense attention forward. Tensors are [batch, seqlen, heads, head_dim], contiguous,
as ours are measured. Where a case has a `head_dim_v`, v and the output have that."""

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from measure import DTYPES, TOLERANCE, Absent, Call, needs_cuda, relative


class Inputs:
    """q, k, v ~ N(0, 1), and the f64 reference on sampled rows. A causal diagonal ends at the
    last key."""

    def __init__(self, case, device):
        generator = torch.Generator(device=device).manual_seed(case.get("seed", 0))
        self.device, self.dtype = device, DTYPES[case["dtype"]]
        self.batch, self.heads_q, self.heads_kv = (
            case["batch"],
            case["num_heads_q"],
            case["num_heads_kv"],
        )
        self.seqlen_q, self.seqlen_kv, self.head_dim = (
            case["seqlen_q"],
            case["seqlen_kv"],
            case["head_dim"],
        )
        self.head_dim_v = case.get("head_dim_v", self.head_dim)
        mask = case["mask"]
        self.window = int(mask.removeprefix("window")) if mask.startswith("window") else None
        if self.window is None and mask not in ("full", "causal"):
            raise ValueError(f"mask {mask!r}: competitors know full, causal and windows")
        self.causal = mask != "full"
        if self.causal and self.seqlen_q > self.seqlen_kv:
            raise ValueError("causal with more queries than keys: the first queries see nothing")
        self.scale = 1 / math.sqrt(self.head_dim)
        self.tolerance, self.tuned = TOLERANCE[case["dtype"]], {}

        def draw(seqlen, heads, head_dim):
            shape = (self.batch, seqlen, heads, head_dim)
            return torch.randn(shape, device=device, dtype=self.dtype, generator=generator)

        self.q = draw(self.seqlen_q, self.heads_q, self.head_dim)
        self.k = draw(self.seqlen_kv, self.heads_kv, self.head_dim)
        self.v = draw(self.seqlen_kv, self.heads_kv, self.head_dim_v)

    def empty_output(self):
        """A tensor for the output."""
        return self.q.new_empty((*self.q.shape[:-1], self.head_dim_v))

    def one_head_dim(self):
        """For competitors that know no other head dimension of v."""
        if self.head_dim_v != self.head_dim:
            raise ValueError("this competitor takes one head_dim for q, k and v")

    def samples(self):
        """Index pairs of a batch entry and a head."""
        return {(0, 0), (self.batch - 1, self.heads_q - 1)}

    def exact(self, b, h, rows, keys=slice(None), hidden=None):
        """f64 attention of some queries of one head to some of its keys, without the
        `hidden` pairs."""
        group = self.heads_q // self.heads_kv
        scores = self.q[b, rows, h].double() @ self.k[b, keys, h // group].double().T * self.scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ self.v[b, keys, h // group].double()

    def adjusted(self, scores, _b, _head, _rows, _keys):
        """Scores with what is added to them: nothing here."""
        return scores

    def relative_error(self, out):
        """Largest over two heads, on rows from the start, the middle and the end; NaN
        anywhere in the output counts."""
        if torch.isnan(out).any():
            return math.nan
        length, worst = self.seqlen_q, 0.0
        starts = (0, max(length // 2 - 32, 0), max(length - 64, 0))
        rows = (
            torch.cat([torch.arange(s, min(s + 64, length)) for s in starts])
            .unique()
            .to(out.device)
        )
        hidden = None
        if self.causal:
            last = rows + self.seqlen_kv - self.seqlen_q
            keys = torch.arange(self.seqlen_kv, device=out.device)[None]
            hidden = keys > last[:, None]
            if self.window is not None:
                hidden |= keys <= last[:, None] - self.window
        for b, h in self.samples():
            worst = max(worst, relative(out[b, rows, h], self.exact(b, h, rows, hidden=hidden)))
        return worst

    quick_error = relative_error  # it takes samples anyway

    def without_window(self):
        """For competitors that know no windows."""
        if self.window is not None:
            raise ValueError("this competitor takes no window")


class Sdpa(Call):
    """torch's scaled_dot_product_attention, held to one backend. Its output is allocated by
    torch."""

    Inputs = Inputs
    backend = None

    def __init__(self, inputs, _options):
        inputs.without_window()
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        self.options = dict(scale=inputs.scale, enable_gqa=inputs.heads_q != inputs.heads_kv)
        if inputs.causal and inputs.seqlen_q != inputs.seqlen_kv:
            # `is_causal` would let the diagonal begin at the first key.
            self.options["attn_mask"] = self.lower_right(inputs)
        else:
            self.options["is_causal"] = inputs.causal
        self.out = None

    def lower_right(self, inputs):
        return causal_lower_right(inputs.seqlen_q, inputs.seqlen_kv)

    def run(self):
        with sdpa_kernel(self.backend):
            self.out = torch.nn.functional.scaled_dot_product_attention(
                self.q, self.k, self.v, **self.options
            )

    def output(self):
        return self.out.transpose(1, 2)


class SdpaFlash(Sdpa):
    """FlashAttention-2 on a GPU."""

    backend = SDPBackend.FLASH_ATTENTION

    def __init__(self, inputs, options):
        inputs.one_head_dim()
        super().__init__(inputs, options)


class SdpaCudnn(Sdpa):
    backend = SDPBackend.CUDNN_ATTENTION

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        if not torch.backends.cudnn.is_available():
            raise Absent("torch has no cuDNN")

    def lower_right(self, inputs):
        raise ValueError("torch's cuDNN attention has no causal diagonal that ends at the last key")


class SdpaEfficient(Sdpa):
    backend = SDPBackend.EFFICIENT_ATTENTION

    @classmethod
    def available(cls, device):
        needs_cuda(device)
