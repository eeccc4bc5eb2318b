"""Rivals of dense attention forward. Tensors are [batch, seqlen, heads, head_dim], contiguous, as ours are measured."""
import ctypes
import math
import os
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from measure import DTYPES, TOLERANCE, Absent, Call, needs_cuda, relative


class Inputs:
    """q, k, v ~ N(0, 1), and the f64 reference on sampled rows."""

    def __init__(self, case, device):
        generator = torch.Generator(device=device).manual_seed(case.get("seed", 0))
        dtype = DTYPES[case["dtype"]]
        self.batch, self.heads_q, self.heads_kv = case["batch"], case["num_heads_q"], case["num_heads_kv"]
        self.seqlen_q, self.seqlen_kv, self.head_dim = case["seqlen_q"], case["seqlen_kv"], case["head_dim"]
        if case["mask"] not in ("full", "causal"):
            raise ValueError(f"mask {case['mask']!r}: rivals know full and causal")
        self.causal = case["mask"] == "causal"
        if self.causal and self.seqlen_q != self.seqlen_kv:
            raise ValueError("causal with seqlen_q != seqlen_kv: rivals align the diagonal differently")
        self.scale = 1 / math.sqrt(self.head_dim)
        self.tolerance = TOLERANCE[case["dtype"]]

        def draw(seqlen, heads):
            shape = (self.batch, seqlen, heads, self.head_dim)
            return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)

        self.q = draw(self.seqlen_q, self.heads_q)
        self.k = draw(self.seqlen_kv, self.heads_kv)
        self.v = draw(self.seqlen_kv, self.heads_kv)

    def relative_error(self, out):
        """Largest over two heads, on rows from the start, the middle and the end; NaN anywhere in the output counts."""
        if torch.isnan(out).any():
            return math.nan
        length, group, worst = self.seqlen_q, self.heads_q // self.heads_kv, 0.0
        starts = (0, max(length // 2 - 32, 0), max(length - 64, 0))
        rows = torch.cat([torch.arange(s, min(s + 64, length)) for s in starts]).unique().to(out.device)
        for b, h in {(0, 0), (self.batch - 1, self.heads_q - 1)}:
            scores = self.q[b, rows, h].double() @ self.k[b, :, h // group].double().T * self.scale
            if self.causal:
                future = torch.arange(self.seqlen_kv, device=out.device)[None] > rows[:, None]
                scores = scores.masked_fill(future, -math.inf)
            expected = torch.softmax(scores, -1) @ self.v[b, :, h // group].double()
            worst = max(worst, relative(out[b, rows, h], expected))
        return worst


class Sdpa(Call):
    """torch's scaled_dot_product_attention, held to one backend. Its output is allocated by torch."""

    Inputs = Inputs
    backend = None

    def __init__(self, inputs, _options):
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        self.options = dict(is_causal=inputs.causal, scale=inputs.scale, enable_gqa=inputs.heads_q != inputs.heads_kv)
        self.out = None

    def run(self):
        with sdpa_kernel(self.backend):
            self.out = torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, **self.options)

    def output(self):
        return self.out.transpose(1, 2)


class SdpaFlash(Sdpa):
    """FlashAttention-2 on a GPU."""

    backend = SDPBackend.FLASH_ATTENTION


class SdpaCudnn(Sdpa):
    backend = SDPBackend.CUDNN_ATTENTION

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        if not torch.backends.cudnn.is_available():
            raise Absent("torch has no cuDNN")


class SdpaEfficient(Sdpa):
    backend = SDPBackend.EFFICIENT_ATTENTION

    @classmethod
    def available(cls, device):
        needs_cuda(device)


class FlashAttention3(Call):
    """FlashAttention-3's forward from a folder fa3/ with xf_C.so (the extension of the xformers wheel)."""

    Inputs = Inputs
    operator = None

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise Absent("FlashAttention-3 is for Hopper")
        cls.load()

    @classmethod
    def load(cls):
        if cls.operator is not None:
            return
        places = [os.path.join(place or ".", "fa3") for place in [os.path.dirname(os.path.abspath(__file__)), *sys.path]]
        folder = next((p for p in places if os.path.exists(os.path.join(p, "xf_C.so"))), None)
        if folder is None:
            raise Absent("no folder fa3/ with xf_C.so beside the peers or on PYTHONPATH")
        runtime = os.path.join(folder, "libcudart.so.12")
        if os.path.exists(runtime):  # the extension is linked against CUDA 12
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(os.path.join(folder, "xf_C.so"))
        cls.operator = torch.ops.flash_attn_3.fwd.default

    def __init__(self, inputs, _options):
        self.load()
        self.out = torch.empty_like(inputs.q)
        known = {
            "q": inputs.q,
            "k": inputs.k,
            "v": inputs.v,
            "out": self.out,
            "softmax_scale": inputs.scale,
            "is_causal": inputs.causal,
            "num_splits": 1,  # 0 would let it split the keys over several blocks, which needs a second kernel
        }
        # Builds differ in their arguments, so each is given by the name in the schema, the rest by its default.
        self.arguments = []
        for argument in self.operator._schema.arguments:
            if argument.name in known:
                self.arguments.append(known[argument.name])
            elif argument.has_default_value():
                self.arguments.append(argument.default_value)
            elif argument.type.kind() == "OptionalType":
                self.arguments.append(None)
            else:
                raise TypeError(f"flash_attn_3::fwd wants {argument.name}: {argument.type}, which is not known here")
        if not any(argument is self.out for argument in self.arguments):
            raise TypeError("flash_attn_3::fwd takes no output tensor: " + str(self.operator._schema))

    def run(self):
        self.operator(*self.arguments)

    def output(self):
        return self.out
