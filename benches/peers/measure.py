"""What every rival shares: its interface, how its launches are captured and timed, and how its output is judged."""
import math
import statistics
import time

import torch

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
# Relative error (Frobenius) that a correct kernel with f32 accumulation stays under: a few roundings to the type.
TOLERANCE = {"f16": 2e-3, "bf16": 1e-2, "f32": 1e-4}


class Absent(Exception):
    """A rival that this machine does not have; the text says what is missing."""


class Call:
    """One rival on one case: `run` launches once on the current stream, `output` is what the last launch wrote."""

    Inputs = None
    settings = ""

    @classmethod
    def available(cls, device):
        """Raises Absent when the machine lacks something."""

    def run(self):
        raise NotImplementedError

    def output(self):
        raise NotImplementedError

    def poison(self):
        """NaN everywhere, so that an element that is not written is seen."""
        self.output().fill_(math.nan)


def needs_cuda(device):
    if device.type != "cuda":
        raise Absent("needs a CUDA GPU")


def relative(out, reference):
    """‖out − reference‖ / ‖reference‖ in f64; NaN when the output holds one."""
    reference = reference.double()
    return ((out.double() - reference).norm() / reference.norm()).item()


class Capture:
    """Launches of one call in a CUDA graph, replayed and timed between events; on a CPU a timed loop."""

    def __init__(self, run, device, graph_us, max_launches):
        self.run, self.device, self.launches, self.events = run, device, 1, []
        if device.type != "cuda":
            run()
            start = time.perf_counter()
            run()
            self.replay_us = (time.perf_counter() - start) * 1e6
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        # A short graph first: timed outside a graph, a small kernel would count its launch from Python.
        self._record(8)
        estimate = min(self._timed_replay() for _ in range(3)) / 8
        launches = max(1, min(max_launches, round(graph_us / max(estimate, 1e-3))))
        if launches != self.launches:
            self._record(launches)
        self.replay_us = min(self._timed_replay() for _ in range(2))

    def _record(self, launches):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(launches):
                self.run()
        self.launches = launches
        self.graph.replay()
        torch.cuda.synchronize(self.device)

    def _pair(self, index):
        while len(self.events) <= index:
            self.events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        return self.events[index]

    def _timed_replay(self):
        begin, end = self._pair(0)
        begin.record()
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
        """Replays for about `ms`, all queued at once; microseconds per launch. The first replay warms up and is not counted."""
        count = max(2, min(5000, 1 + round(ms * 1e3 / self.replay_us)))
        times = []
        if self.device.type == "cuda":
            for index in range(count):
                begin, end = self._pair(index)
                begin.record()
                self.graph.replay()
                end.record()
            torch.cuda.synchronize(self.device)
            times = [begin.elapsed_time(end) * 1e3 for begin, end in self.events[:count]]
        else:
            for _ in range(count):
                start = time.perf_counter()
                self.run()
                times.append((time.perf_counter() - start) * 1e6)
        self.replay_us = statistics.median(times[1:])
        times = [t / self.launches for t in times[1:]]
        return {
            "us": statistics.median(times),
            "us_min": min(times),
            "us_max": max(times),
            "replays": len(times),
            "launches": self.launches,
        }
