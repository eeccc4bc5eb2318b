"""Attention over a sequence that is divided among all GPUs of the machine, beside torch's own.

`blockflash.distributed` over heads and over keys, torch's `context_parallel`, and an exchange of
rows for heads around SDPA (Ulysses), each on FlashAttention 2 and on cuDNN, and all of them on one
GPU. Causal, bfloat16, head_dim 128, batch 1. There is a process for each GPU. Times are taken in
rounds with a changing order, and the slowest process counts; the median of the rounds is shown.
Some rows of each result are compared with those of blockflash on one GPU.

`scaling` is the time on one GPU by the same kernel / (GPUs x the time on all of them).

    python benches/distributed.py [--out distributed.jsonl]
    python benches/distributed.py --small            # a few seconds, on the CPU by gloo
"""

from __future__ import annotations

import argparse
import datetime
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_ways import Entry, Ranks, entries
from rounds import Records, interleaved, median
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

HEAD_DIM = 128
# Length, heads, backward, rounds.
CASES = [(32768, 32, False, 7), (131072, 32, False, 5), (262144, 8, False, 5)]
CASES += [(131072, 32, True, 3)]
SMALL = [(64, 4, False, 2), (64, 4, True, 2)]
# Relative errors of bfloat16: of each row of an output, and of all rows of a gradient.
LIMIT = 2e-2


def error_of(found: Tensor, expected: Tensor, of_rows: bool) -> float:
    """The relative error of some rows: of the worst one, or of all together."""
    rows = found.shape[1]
    torch.manual_seed(1)
    chosen = torch.randint(rows, (512,)).clamp(max=rows - 1).to(found.device)
    found, expected = (x[:, chosen].float() for x in (found, expected))
    over = (2, 3) if of_rows else (0, 1, 2, 3)
    ratio = (found - expected).square().sum(over) / expected.square().sum(over)
    return ratio.sqrt().nan_to_num(torch.inf).max().item()


class Case:
    """A length and a number of heads, forward or backward."""

    def __init__(self, ranks: Ranks, seqlen: int, heads: int, backward: bool) -> None:
        self.ranks, self.seqlen, self.heads, self.backward = ranks, seqlen, heads, backward
        self.dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self.whole = [self.random() for _ in range(3)]
        self.grad_o = self.random() if backward else None
        self.reference: list[Tensor] = []
        self.errors: dict[str, float] = {}
        self.call_of: dict[str, Callable[[], list[Tensor]]] = {}

    def random(self) -> Tensor:
        """A tensor with all rows, the same on all ranks."""
        shape = (1, self.seqlen, self.heads, HEAD_DIM)
        return torch.randn(shape, device=self.ranks.device, dtype=self.dtype)

    def call(self, entry: Entry) -> Callable[[], list[Tensor]]:
        """What is measured: the forward pass, or the backward pass of one before."""
        operands = entry.operands()
        if not self.backward:

            def forward() -> list[Tensor]:
                with torch.no_grad():
                    return [entry.forward(operands)]

            return forward
        leaves = [x.detach().requires_grad_() for x in operands]
        grad_o = entry.rows(self.grad_o)
        with entry.context():
            o = entry.forward(leaves)

        def differentiate() -> list[Tensor]:
            grads = torch.autograd.grad(o, leaves, grad_o, retain_graph=True)
            return [x.transpose(1, 2) for x in grads] if entry.by_head else list(grads)

        return differentiate

    def tried(self, entry: Entry) -> Callable[[], list[Tensor]] | None:
        """The call after a first one, whose result is compared; none if it does not run."""
        wrong, error = "", 0.0
        try:
            call = self.call(entry)
            with entry.context():
                found = call()
            self.ranks.wait()
            self.reference = self.reference or found
            for x, all_rows in zip(found, self.reference, strict=True):
                error = max(error, error_of(x, entry.rows(all_rows), not self.backward))
        except Exception as raised:  # Of a competitor, whatever it is.
            wrong = f"{type(raised).__name__}: {raised}".replace("\n", " ")[:300]
            if entry.is_ours:
                raise
        if self.ranks.largest(float(bool(wrong))) > 0:
            self.ranks.say(f"{entry.name} does not run: {wrong}")
            self.errors[entry.name] = torch.inf
            return None
        self.errors[entry.name] = self.ranks.largest(error)
        self.call_of[entry.name] = call
        return call


class Results:
    """What was measured of a case, in records and as a table."""

    def __init__(self, case: Case, records: Records | None) -> None:
        self.case, self.records = case, records
        self.times: dict[str, float] = {}
        self.entries: dict[str, Entry] = {}
        direction = "backward" if case.backward else "forward"
        self.what = f"{case.seqlen} rows, {case.heads} heads, {direction}"
        self.show(f"\n{self.what}\n\n| scheme | implementation | ms | TFLOP/s | scaling | error |")
        self.show("|---|---|---:|---:|---:|---:|")

    def show(self, text: str) -> None:
        """Prints by one process."""
        if self.records is not None:
            print(text, flush=True)

    def measure(self, ways: list[Entry], again: list[str], rounds: int) -> None:
        """Adds entries, measured beside some that were before."""
        ranks, case, measures = self.case.ranks, self.case, {}
        for entry in ways:
            call = case.tried(entry)
            ranks.say(f"{self.what}: {entry.name}, error {case.errors[entry.name]:.1e}")
            if call is not None:
                measures[entry.name] = partial(ranks.seconds, call, entry.context)
                self.entries[entry.name] = entry
        new = list(measures)
        for name in again if new else ():
            measures[name] = partial(ranks.seconds, case.call_of[name], self.entries[name].context)
        found = interleaved(measures, rounds) if new else {}
        for name, seconds in found.items():
            self.times.setdefault(name, median(seconds))
        if self.records is not None:
            for name in new:
                self.add(name, rounds)

    def add(self, name: str, rounds: int) -> None:
        """A row."""
        case, entry, seconds = self.case, self.entries[name], self.times[name]
        flops = 4 * case.seqlen * case.seqlen / 2 * HEAD_DIM * case.heads
        flops *= 2.5 if case.backward else 1
        alone = self.times.get(f"one GPU, {entry.implementation.partition(',')[0]}")
        gpus = 1 if entry.scheme == "one GPU" else case.ranks.world
        scaling = None if alone is None or gpus == 1 else alone / gpus / seconds
        tflops, error = flops / seconds / 1e12, case.errors[name]
        self.records.add(
            case=[case.seqlen, case.heads], gpus=gpus, scheme=entry.scheme,
            implementation=entry.implementation, ms=1e3 * seconds, tflops=tflops, scaling=scaling,
            error=error, verified=error <= LIMIT, rounds=rounds,
            **{"pass": "backward" if case.backward else "forward"},
        )  # fmt: skip
        shown = "" if scaling is None else f"{scaling:.2f}"
        self.show(
            f"| {entry.scheme} | {entry.implementation} | {1e3 * seconds:.2f} | {tflops:.0f} "
            f"| {shown} | {error:.1e} |"
        )

    def goals(self) -> None:
        """Whether results are right, and faster than those of others."""
        if self.records is None:
            return
        ours = {name for name, each in self.entries.items() if each.is_ours}
        wrong = [name for name in self.entries if not self.case.errors[name] <= LIMIT]
        self.show(f"\nother results than one GPU: {'; '.join(wrong) or 'none'}")
        self.records.goal(f"{self.what}: results are those of one GPU", ours.isdisjoint(wrong))
        over = {n: t for n, t in self.times.items() if self.entries[n].scheme != "one GPU"}
        others = [seconds for name, seconds in over.items() if name not in ours]
        if others and self.case.ranks.device.type == "cuda":
            best = min(seconds for name, seconds in over.items() if name in ours)
            self.records.goal(f"{self.what}: faster than others", best < min(others))


def measure(case: Case, rounds: int, records: Records | None) -> None:
    """A case by all entries."""
    results, ways = Results(case, records), list(entries(case.ranks, case.whole, case.backward))
    # Others' backward passes over several GPUs come last: what they do is not ours to know.
    last = [each for each in ways if case.backward and each.scheme != "one GPU"]
    last = [each for each in last if not each.is_ours]
    results.measure([each for each in ways if each not in last], [], rounds)
    if last:
        results.measure(last, ["keys, blockflash"], rounds)
    results.goals()


def process(rank: int, world: int, port: int, args: argparse.Namespace) -> None:
    """One of the processes."""
    device = torch.device("cpu") if args.small else torch.device("cuda", rank)
    bound = {} if args.small else {"device_id": device}
    if args.small:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=90)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo" if args.small else "nccl",
        init_method=address, rank=rank, world_size=world, timeout=limit, **bound,
    )  # fmt: skip
    groups = {"blockflash": None}
    if not args.small:
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        groups["blockflash, exchange first"] = dist.new_group(timeout=limit, pg_options=options)
    ranks = Ranks(rank, world, device, groups, init_device_mesh(device.type, (world,)))
    records = Records(args.out, device.type) if rank == 0 else None
    if records is not None and not args.small:
        records.add(gpus=world, nccl=".".join(map(str, torch.cuda.nccl.version())))
    for seqlen, heads, backward, rounds in SMALL if args.small else CASES:
        measure(Case(ranks, seqlen, heads, backward), args.rounds or rounds, records)
        if not args.small:
            torch.cuda.empty_cache()
    sys.stdout.flush()
    ranks.wait()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="instead of 3 to 7, by the case")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--small", action="store_true", help="two processes on the CPU")
    args = parser.parse_args()
    world = 2 if args.small else torch.cuda.device_count()
    if world < 2:
        print("SKIPPED: there are fewer than 2 GPUs", flush=True)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, (world, port, args), nprocs=world)


if __name__ == "__main__":
    main()
