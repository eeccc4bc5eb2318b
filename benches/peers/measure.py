"""What every competitor shares: its interface, how its launches are captured and timed, and how its
output is judged."""

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Iterator

import torch

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
# Relative error (Frobenius) that a correct kernel with f32 accumulation stays under: a few
# roundings to the type.
TOLERANCE = {"f16": 2e-3, "bf16": 1e-2, "f32": 1e-4}


class Absent(Exception):
    """A competitor that this machine does not have; the text says what is missing."""


class Call:
    """One competitor on one case: `run` launches once on the current stream, `output` is what the
    last launch wrote."""

    Inputs = None
    settings = ""
    # The same bits at each launch, where others of the operation do without; this is checked.
    deterministic = False

    @classmethod
    def available(cls, device):
        """Raises Absent when the machine lacks something."""

    def run(self):
        raise NotImplementedError

    def output(self):
        raise NotImplementedError

    def relative_error(self, inputs):
        """Of the output, to be overridden by a call that does not take the inputs that all
        share."""
        return inputs.relative_error(self.output())

    def poison(self):
        """NaN everywhere, so that an element that is not written is seen."""
        self.output().fill_(math.nan)

    def repeats(self, capture: "Capture") -> bool:
        """Whether another replay gives the same bits of all tensors of the output."""
        first = [tensor.clone() for tensor in self.output()]
        capture.replay()
        return all(map(torch.equal, first, self.output()))


def needs_cuda(device):
    if device.type != "cuda":
        raise Absent("needs a CUDA GPU")


def needs_triton():
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Absent("python3 has no triton") from error


def relative(out, reference):
    """‖out − reference‖ / ‖reference‖ in f64, piece by piece; NaN when the output holds one."""
    out, reference = out.reshape(-1, out.shape[-1]), reference.reshape(-1, reference.shape[-1])
    rows = max(1, 2**24 // out.shape[-1])
    difference = total = 0.0
    for o, r in zip(out.split(rows), reference.split(rows)):
        r = r.double()
        difference += (o.double() - r).square().sum().item()
        total += r.square().sum().item()
    if total == 0:
        return difference  # whatever is not zero is too much
    return math.sqrt(difference / total)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which launches are captured."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    """Queues work on that stream, in order with the current one. A backward pass runs on the
    stream of its forward pass, so a forward pass whose backward pass is captured belongs here."""
    if device.type != "cuda":
        yield
        return
    stream, current = capture_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class Capture:
    """Launches of one call in a CUDA graph, replayed and timed between events; on a CPU a timed
    loop.

    With `flush`, a scratch tensor larger than the L2 cache, the graph holds one launch, and the
    tensor is overwritten
    before each, so that a launch finds nothing of its data in the cache.
    """

    def __init__(self, run, device, graph_us, max_launches, flush=None):
        self.run, self.device, self.flush, self.events = run, device, flush, []
        if device.type != "cuda":
            self.launches = 1
            run()
            start = time.perf_counter()
            self._overwrite()
            run()
            self.turn_us = (time.perf_counter() - start) * 1e6
            return
        with on_capture_stream(device):
            for _ in range(3):
                run()
        torch.cuda.synchronize(device)
        if flush is not None:
            self._record(1)
        else:
            # A short graph first: timed outside a graph, a small kernel would count its launch from
            # Python.
            self._record(8)
            estimate = min(self._timed_turn() for _ in range(3)) / 8
            launches = max(1, min(max_launches, round(graph_us / max(estimate, 1e-3))))
            if launches != self.launches:
                self._record(launches)
        self.turn_us = min(self._timed_turn() for _ in range(2))

    def _record(self, launches):
        self.graph = torch.cuda.CUDAGraph()
        # Relaxed, since a library may still load a kernel.
        options = dict(stream=capture_stream(self.device), capture_error_mode="relaxed")
        with torch.cuda.graph(self.graph, **options):
            for _ in range(launches):
                self.run()
        self.launches = launches
        self.graph.replay()
        torch.cuda.synchronize(self.device)

    def _overwrite(self):
        if self.flush is not None:
            self.flush.zero_()

    def _pair(self, index):
        while len(self.events) <= index:
            self.events.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
        return self.events[index]

    def _timed_turn(self):
        """Microseconds of a turn: the overwriting, if any, and a replay."""
        begin, end = self._pair(0)
        begin.record()
        self._overwrite()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def replay(self):
        """One replay, complete when it returns."""
        if self.device.type != "cuda":
            self.run()
            return
        self.graph.replay()
        torch.cuda.synchronize(self.device)

    def window(self, ms):
        """Turns for about `ms`, all queued at once; microseconds per launch. The first turn
        warms up and is not counted."""
        count = max(2, min(5000, 1 + round(ms * 1e3 / self.turn_us)))
        if self.device.type == "cuda":
            for index in range(count):
                begin, end = self._pair(index)
                self._overwrite()
                begin.record()
                self.graph.replay()
                end.record()
            torch.cuda.synchronize(self.device)
            times = [begin.elapsed_time(end) * 1e3 for begin, end in self.events[:count]]
            self.turn_us = (
                self.events[0][1].elapsed_time(self.events[count - 1][1]) * 1e3 / (count - 1)
            )
        else:
            times = []
            for _ in range(count):
                self._overwrite()
                start = time.perf_counter()
                self.run()
                times.append((time.perf_counter() - start) * 1e6)
            if self.flush is None:
                self.turn_us = statistics.median(times[1:])
        times = [t / self.launches for t in times[1:]]
        return {
            "us": statistics.median(times),
            "us_min": min(times),
            "us_max": max(times),
            "replays": len(times),
            "launches": self.launches,
        }
