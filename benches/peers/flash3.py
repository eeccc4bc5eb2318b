"""The competitor `flash_attention_3`, from a folder fa3/ with xf_C.so (the extension of the
xformers wheel).

`python3 flash3.py DEVICE DTYPE HEAD_DIM` ends with status 0 if this build can split the keys over
several blocks.
"""

import ctypes
import os
import subprocess
import sys

import torch

from attention import Inputs
from measure import Absent, Call, needs_cuda

# Fewer queries than this part of the keys: the library decides whether it splits the keys. Else it
# never should.
FEW_QUERIES = 1 / 8


def arguments(operator, **known):
    """Arguments of an operator. Builds differ in them, so each is given by the name in the schema,
    the rest by its default."""
    values = []
    for argument in operator._schema.arguments:
        if argument.name in known:
            values.append(known[argument.name])
        elif argument.has_default_value():
            values.append(argument.default_value)
        elif argument.type.kind() == "OptionalType":
            values.append(None)
        else:
            raise TypeError(
                f"{operator} wants {argument.name}: {argument.type}, which is not known here"
            )
    return values


class FlashAttention3(Call):
    """FlashAttention-3's forward, for Hopper."""

    Inputs = Inputs
    operator = None
    splits = {}  # (dtype, head dimension) -> whether the build has kernels that split the keys

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
        places = [
            os.path.join(place or ".", "fa3")
            for place in [os.path.dirname(os.path.abspath(__file__)), *sys.path]
        ]
        folder = next((p for p in places if os.path.exists(os.path.join(p, "xf_C.so"))), None)
        if folder is None:
            raise Absent("no folder fa3/ with xf_C.so beside the peers or on PYTHONPATH")
        runtime = os.path.join(folder, "libcudart.so.12")
        if os.path.exists(runtime):  # the extension is linked against CUDA 12
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(os.path.join(folder, "xf_C.so"))
        cls.operator = torch.ops.flash_attn_3.fwd.default

    def __init__(self, inputs, options):
        self.load()
        self.out = inputs.empty_output()
        num_splits = options.get("num_splits", 1)
        if "num_splits" not in options and inputs.seqlen_q < FEW_QUERIES * inputs.seqlen_kv:
            if self.can_split(inputs):
                num_splits, self.settings = 0, "num_splits=0: the library chooses"
            else:
                self.settings = "num_splits=1: this build has no kernels that split the keys"
        self.arguments = arguments(
            self.operator,
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            out=self.out,
            softmax_scale=inputs.scale,
            is_causal=inputs.causal,
            num_splits=num_splits,  # more than 1 needs a second kernel
            window_size_left=-1 if inputs.window is None else inputs.window - 1,
            window_size_right=0 if inputs.causal else -1,
        )
        if not any(argument is self.out for argument in self.arguments):
            raise TypeError(
                "flash_attn_3::fwd takes no output tensor: " + str(self.operator._schema)
            )

    @classmethod
    def can_split(cls, inputs):
        """Asks another process: where the kernels are missing, the library ends its own."""
        name = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(inputs.dtype)
        key = (name, inputs.head_dim)
        if key not in cls.splits:
            command = [
                sys.executable,
                __file__,
                str(inputs.device),
                str(name),
                str(inputs.head_dim),
            ]
            try:
                child = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), timeout=90
                )
                cls.splits[key] = child.returncode == 0
            except subprocess.TimeoutExpired:
                cls.splits[key] = False
        return cls.splits[key]

    def run(self):
        self.operator(*self.arguments)

    def output(self):
        return self.out


def main():
    device, dtype, head_dim = torch.device(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.cuda.set_device(device)
    case = dict(
        batch=1, num_heads_q=8, num_heads_kv=2, seqlen_q=1, seqlen_kv=2048, head_dim=head_dim
    )
    inputs = Inputs(dict(case, mask="full", dtype=dtype), device)
    call = FlashAttention3(inputs, {"num_splits": 4})
    call.poison()
    call.run()
    torch.cuda.synchronize()
    return 0 if inputs.relative_error(call.out) <= inputs.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
