"""The ways to divide attention among GPUs that `distributed.py` measures, and their processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import experimental
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import blockflash
from blockflash import distributed

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Ranks:
    """The processes, and the groups by which they talk."""

    rank: int
    world: int
    device: torch.device
    groups: dict[str, Any]
    mesh: Any
    start: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        if self.rank == 0:
            print(f"{time.perf_counter() - self.start:6.1f} s  {text}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def largest(self, value: float) -> float:
        """The largest one of all processes."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def seconds(self, call: Callable[[], Any], context: Context) -> float:
        """Time until the slowest process has computed it."""
        with context():
            self.wait()
            dist.barrier()
            self.wait()
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                self.wait()
                elapsed = start.elapsed_time(end) / 1e3
            else:
                before = time.perf_counter()
                call()
                elapsed = time.perf_counter() - before
        return self.largest(elapsed)


@dataclass(eq=False)
class Entry:
    """A way to compute a case. Its forward call gives O, `[1, rows, heads, D]`."""

    scheme: str
    implementation: str
    forward: Callable[[list[Tensor]], Tensor]
    operands: Callable[[], list[Tensor]]
    rows: Callable[[Tensor], Tensor]  # Of a tensor with all rows, those that it computes.
    by_head: bool = False  # Whether operands and their gradients are `[1, heads, rows, D]`.
    context: Context = nullcontext

    @property
    def name(self) -> str:
        """Scheme and implementation."""
        return f"{self.scheme}, {self.implementation}"

    @property
    def is_ours(self) -> bool:
        """Whether it is blockflash."""
        return self.implementation.startswith("blockflash")


def sdpa(operands: list[Tensor]) -> Tensor:
    """The function of torch, looked up at each call: `context_parallel` replaces it."""
    return functional.scaled_dot_product_attention(*operands, is_causal=True).transpose(1, 2)


def ulysses(world: int, operands: list[Tensor]) -> Tensor:
    """Rows for heads and back around SDPA, with as few copies as torch's collective allows."""
    whole = []
    for x in operands:
        _, heads, rows, head_dim = x.shape
        sent = x.view(world, heads // world, rows, head_dim)
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        whole.append(come.transpose(0, 1).reshape(1, heads // world, world * rows, head_dim))
    o = functional.scaled_dot_product_attention(*whole, is_causal=True)
    sent = o.view(heads // world, world, rows, head_dim).transpose(0, 1).contiguous()
    come = torch.empty_like(sent)
    dist.all_to_all_single(come, sent)
    return come.view(1, heads, rows, head_dim).transpose(1, 2)


@contextmanager
def context_parallel(ranks: Ranks, seqlen: int, backend: SDPBackend) -> Iterator[None]:
    """The one of torch, which is told the length of the sequence by a buffer of little memory."""
    buffer = torch.zeros(seqlen, device=ranks.device)
    with ExitStack() as stack:
        stack.enter_context(
            experimental.context_parallel(ranks.mesh, buffers=[buffer], buffer_seq_dims=[0])
        )
        stack.enter_context(sdpa_kernel(backend))
        yield


def entries(ranks: Ranks, whole: list[Tensor], backward: bool) -> Iterator[Entry]:
    """The ways, the one that is the reference first."""
    seqlen, world = whole[0].shape[1], ranks.world

    def all_rows(x: Tensor) -> Tensor:
        return x

    def part(x: Tensor) -> Tensor:
        return x[:, ranks.rank * seqlen // world : (ranks.rank + 1) * seqlen // world]

    def by_head(rows: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [rows(x).transpose(1, 2).contiguous() for x in whole]

    def one(operands: list[Tensor]) -> Tensor:
        return blockflash.attention(*operands, causal=True)

    yield Entry("one GPU", "blockflash", one, lambda: whole, all_rows)
    for name, group in ranks.groups.items():
        for scheme in ("heads", "keys"):
            options = {"scheme": scheme, "group": group, "seqlen": seqlen, "check": False}

            def ours(operands: list[Tensor], options: dict[str, Any] = options) -> Tensor:
                return distributed.attention(*operands, causal=True, **options)

            mine = [distributed.shard(x) for x in whole]
            yield Entry(scheme, name, ours, lambda mine=mine: mine, distributed.shard)
    for name, backend in BACKENDS.items():
        context = partial(sdpa_kernel, backend)
        alone = partial(by_head, all_rows)
        yield Entry("one GPU", f"torch {name}", sdpa, alone, all_rows, True, context)
        if not backward:
            exchanged, rows = partial(ulysses, world), partial(by_head, part)
            yield Entry("heads", f"torch {name}, Ulysses", exchanged, rows, part, True, context)
    for name, backend in BACKENDS.items():
        # Its chunks are ours: one from the front and one from the back.
        context = partial(context_parallel, ranks, seqlen, backend)
        rows, title = partial(by_head, distributed.shard), f"torch {name}, context_parallel"
        yield Entry("keys", title, sdpa, rows, distributed.shard, True, context)
