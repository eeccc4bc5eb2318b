"""Calls the targets of XLA for GPUs with frames made here, on the fake of the driver.

A program: it loads the fake from the path that it is given, before anything looks for the driver,
and prints for each GPU and each call the error, and what was allocated and freed, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Callable
from typing import Any

P, SIZE = ctypes.c_void_p, ctypes.c_size_t
TYPES = {"bool": (1, 1), "i32": (4, 4), "f32": (11, 4), "bf16": (16, 2)}
"""XLA's numbers of element types, and their bytes."""
HEAD = [("struct_size", SIZE), ("extension", P)]


def struct(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Struct", (ctypes.Structure,), {"_fields_": [*fields]})


U32, I64 = ctypes.c_uint32, ctypes.c_int64
Buffer = struct(*HEAD, ("dtype", U32), ("data", P), ("rank", I64), ("dims", P))
Scalar = struct(("dtype", U32), ("value", P))
Span = struct(("ptr", ctypes.c_char_p), ("len", SIZE))
Args = struct(*HEAD, ("size", I64), ("types", P), ("args", P))
Attrs = struct(*HEAD, ("size", I64), ("types", P), ("names", P), ("attrs", P))
LISTS = [("args", Args), ("rets", Args), ("attrs", Attrs), ("future", P)]
Frame = struct(*HEAD, ("api", P), ("context", P), ("stage", U32), *LISTS)
FUNCTIONS = (
    "error_create", "error_message", "error_destroy", "register", "stream_get", "type_register",
    "context_get", "state_set", "state_get", "allocate", "free", "schedule", "threads",
    "future_create", "future_available", "future_error", "run_id", "ordinal_get",
)  # fmt: skip
VERSION = [*HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int)]
Api = struct(*HEAD, ("version", struct(*VERSION)), ("internal", P), *((f, P) for f in FUNCTIONS))
ErrorArgs = struct(*HEAD, ("message", ctypes.c_char_p), ("code", U32))
# What follows the context in the arguments of a function.
Word = struct(*HEAD, ("context", P), ("word", P))
Int = struct(*HEAD, ("context", P), ("number", ctypes.c_int32))
Allocation = struct(*HEAD, ("context", P), ("bytes", SIZE), ("alignment", SIZE), ("data", P))
Freed = struct(*HEAD, ("context", P), ("bytes", SIZE), ("data", P))
Function = ctypes.CFUNCTYPE(P, P)


class Runtime:
    """What handlers ask of XLA, with one GPU and one stream."""

    def __init__(self, fake: ctypes.CDLL, gpu: int) -> None:
        self.gpu, self.errors, self.log, self.live = gpu, [], [], {}
        self.full = False
        self.stream = P()
        context = P()
        assert fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), min(gpu, 3)) == 0
        assert fake.cuStreamCreate(ctypes.byref(self.stream), 1) == 0
        functions = ("error_create", "error_destroy", "stream_get", "ordinal_get")
        self.kept = {f: Function(getattr(self, f"_{f}")) for f in (*functions, "allocate", "free")}
        pointers = {name: ctypes.cast(f, P) for name, f in self.kept.items()}
        self.api = Api(struct_size=ctypes.sizeof(Api), **pointers)

    def _error_create(self, args: int) -> int:
        given = ErrorArgs.from_address(args)
        self.errors.append((given.code, given.message.decode()))
        return 1

    def _error_destroy(self, args: int) -> int:
        self.log.append("destroy")
        return 0

    def _stream_get(self, args: int) -> int:
        Word.from_address(args).word = self.stream.value
        return 0

    def _ordinal_get(self, args: int) -> int:
        Int.from_address(args).number = self.gpu
        return 0

    def _allocate(self, args: int) -> int:
        given = Allocation.from_address(args)
        if self.full:
            return 1
        memory, given.data = aligned(given.bytes)
        self.live[given.data] = memory
        self.log.append(f"allocate {given.bytes} {given.alignment}")
        return 0

    def _free(self, args: int) -> int:
        given = Freed.from_address(args)
        del self.live[given.data]
        self.log.append(f"free {given.bytes}")
        return 0


def aligned(count: int) -> tuple[Any, int]:
    """Memory, and an address in it that is a multiple of 256."""
    memory = ctypes.create_string_buffer(count + 256)
    return memory, -(-ctypes.addressof(memory) // 256) * 256


class Call:
    """The memory of a call."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep(self, value: Any) -> int:
        """The address of a value, which lives as long as the call."""
        self.kept.append(value)
        return ctypes.addressof(value)

    def array(self, kind: Any, values: list[Any]) -> int:
        """The address of an array."""
        return self.keep((kind * len(values))(*values))

    def buffer(self, text: str) -> int:
        """A buffer such as `bf16 2,64`."""
        kind, sizes = text.split()
        dims = [int(size) for size in sizes.split(",")]
        number, size = TYPES[kind]
        memory, address = aligned(math.prod(dims) * size)
        self.keep(memory)
        dims_at = self.array(I64, dims)
        return self.keep(Buffer(ctypes.sizeof(Buffer), None, number, address, len(dims), dims_at))

    def attribute(self, value: Any) -> tuple[int, int]:
        """The kind of an attribute, and its address."""
        if isinstance(value, str):
            return 4, self.keep(Span(value.encode(), len(value)))
        number, kind = {bool: (1, ctypes.c_bool), int: (5, I64), float: (12, ctypes.c_double)}[
            type(value)
        ]
        return 3, self.keep(Scalar(number, self.keep(kind(value))))

    def frame(self, api: Any, ops: list[int], outs: list[int], attributes: dict[str, Any]) -> int:
        """The address of a frame with these operands, results and attributes."""
        lists = []
        for buffers in (ops, outs):
            types = self.array(U32, [1] * len(buffers))
            at = self.array(P, buffers)
            lists.append(Args(ctypes.sizeof(Args), None, len(buffers), types, at))
        kinds, values = zip(*(self.attribute(attributes[name]) for name in sorted(attributes)))
        names = [self.keep(Span(name.encode(), len(name))) for name in sorted(attributes)]
        arrays = (self.array(U32, list(kinds)), self.array(P, names), self.array(P, list(values)))
        attrs = Attrs(ctypes.sizeof(Attrs), None, len(names), *arrays)
        size = Frame.future.offset
        return self.keep(Frame(size, None, ctypes.addressof(api), None, 3, *lists, attrs))


def call(
    runtime: Runtime, target: str, operands: dict[str, str], results: list[str], attributes: Any
) -> dict[str, Any]:
    """What comes of a call; a result may be the name of an operand, in whose memory it is."""
    from blockflash import _native

    addresses = {(name, on): address for name, on, address in _native.xla_targets()}
    memory = Call()
    ops = {name: memory.buffer(text) for name, text in operands.items()}
    outs = [ops[text] if text in ops else memory.buffer(text) for text in results]
    attributes = attributes | {"operands": ",".join(ops)}
    frame = memory.frame(runtime.api, list(ops.values()), outs, attributes)
    runtime.errors.clear()
    runtime.log.clear()
    refused = Function(addresses[f"blockflash_{target}", "CUDA"])(frame)
    assert bool(refused) == bool(runtime.errors)
    return {"errors": list(runtime.errors), "log": list(runtime.log), "live": len(runtime.live)}


Q, KV, LSE = "bf16 2,256,8,64", "bf16 2,256,2,64", "f32 2,8,256"
QKV = {"q": Q, "k": KV, "v": KV}
KEPT = QKV | {"o": Q, "lse": LSE, "d_o": Q}
ROWS = ["bf16 2,1,8,64", "f32 2,8,1"]
CACHE = {"q": ROWS[0], "k_cache": "bf16 1024,16,2,64", "v_cache": "bf16 1024,16,2,64"}
CACHE |= {"seqused_k": "i32 2", "block_table": "i32 2,512"}
NEW = CACHE | {"k": "bf16 2,1,2,64", "v": "bf16 2,1,2,64"}
SQUARES = {"block_q": 64, "block_k": 64}
F32 = "f32 2,256,8,64"


def mapped(buffers: Any, first: str = "3") -> Any:
    """The buffers with a dimension of vmap."""
    return {name: text.replace(" ", f" {first},") for name, text in buffers.items()}


CASES: dict[str, tuple[str, dict[str, str], list[str], dict[str, Any]]] = {
    "causal": ("attention", QKV, [Q, LSE], {"right": 0}),
    "float32": ("attention", dict.fromkeys("qkv", F32), [F32, LSE], {}),
    "blocks": ("attention", QKV | {"blocks": "bool 1,1,4,4"}, [Q, LSE], SQUARES),
    "options": (
        "attention",
        QKV | {"sink": "f32 8", "alibi_slopes": "f32 8"},
        [Q, LSE],
        {"scale": 0.2, "softcap": 3.0},
    ),
    "vmap": ("attention", mapped(QKV), [*mapped({"o": Q, "lse": LSE}).values()], {}),
    "vmap of q": (
        "attention",
        mapped(QKV, "1") | mapped({"q": Q}),
        [*mapped({"o": Q, "lse": LSE}).values()],
        {},
    ),
    "gradients": ("attention_backward", KEPT, [Q, KV, KV], {"right": 0}),
    "gradients of options": (
        "attention_backward",
        KEPT | {"sink": "f32 8", "bias": "f32 1,8,256,256"},
        [Q, KV, KV, "f32 8", "f32 1,8,256,256"],
        {"bias_gradient": True},
    ),
    "gradients of blocks": (
        "attention_backward",
        KEPT | {"blocks": "bool 2,8,4,4"},
        [Q, KV, KV],
        SQUARES,
    ),
    "no memory": ("attention_backward", KEPT, [Q, KV, KV], {}),
    "decode": ("attention_decode", CACHE, ROWS, {}),
    "append": ("attention_decode", NEW, [*ROWS, "k_cache", "v_cache"], {"right": 0}),
    "append elsewhere": ("attention_decode", NEW, [*ROWS, *[CACHE["k_cache"]] * 2], {}),
}


def main(library: str, show: Callable[[str], Any] = print) -> None:
    fake = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    assert fake.cuInit(0) == 0
    found = {}
    for gpu in range(4):
        runtime = Runtime(fake, gpu)
        for name, case in CASES.items():
            runtime.full = name == "no memory"
            found[f"{name} on {gpu}"] = call(runtime, *case)
    found["no GPU"] = call(Runtime(fake, 9), *CASES["causal"])
    show(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
