"""Search for the fastest launch parameters of a competitor on one case."""

import math
import time

import torch

from measure import Capture


def quick_time(call, inputs):
    """Microseconds of a launch in a short graph; a wrong result is an error."""
    try:
        capture = Capture(call.run, inputs.device, graph_us=500, max_launches=32)
        call.poison()
        capture.replay()
        rel_err = inputs.quick_error(call.output())
        if not rel_err <= inputs.tolerance:
            raise RuntimeError(f"wrong result: relative error {rel_err}")
        return capture.window(5)["us"]
    finally:
        if inputs.device.type == "cuda":
            # What the graph allocated is not needed again, and other processes share the GPU.
            capture = None
            torch.cuda.empty_cache()


class Sweep:
    """Times candidates (anything hashable) in the order they are given, until the time is over."""

    def __init__(self, trial, seconds):
        """trial(candidate) returns microseconds, and raises when the candidate does not run
        or is wrong."""
        self.trial, self.deadline = trial, time.monotonic() + seconds
        self.us, self.failed = {}, {}

    def over(self):
        """Never before something has run."""
        return bool(self.us) and time.monotonic() > self.deadline

    def run(self, candidates):
        for candidate in candidates:
            if self.over():
                return
            if candidate not in self.us and candidate not in self.failed:
                self.attempt(candidate)

    def attempt(self, candidate):
        try:
            self.us[candidate] = min(self.trial(candidate), self.us.get(candidate, math.inf))
        except Exception as error:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a lost context is not ours to hide
            self.us.pop(candidate, None)
            self.failed[candidate] = " ".join(str(error).split())[
                :200
            ]  # the exception would keep tensors alive

    def best(self, count=1):
        """Candidates, the fastest first."""
        return sorted(self.us, key=self.us.get)[:count]

    def winner(self):
        """The fastest; the first ones run twice, since short windows are noisy."""
        for candidate in self.best(3):
            self.attempt(candidate)
        if not self.us:
            reason = next(reversed(self.failed.values()), "there was none to try")
            raise RuntimeError(f"none of {len(self.failed)} candidates ran: {reason}")
        return self.best()[0]


class Tuned:
    """Mixed into a competitor with launch parameters: `search(sweep)` runs candidates,
    `use(candidate)` takes one."""

    def tune(self, inputs, options):
        """To the fastest candidate; asked again for the same inputs, to the one that was
        found before."""
        self.inputs, name = inputs, type(self).__name__
        if name not in inputs.tuned:
            sweep = Sweep(self.trial, options.get("tune_seconds", 60))
            self.search(sweep)
            inputs.tuned[name] = sweep.winner(), len(sweep.us)
        best, count = inputs.tuned[name]
        self.use(best)
        self.settings = f"{self.describe(best)}, best of {count}"

    def trial(self, candidate):
        self.use(candidate)
        return quick_time(self, self.inputs)

    def describe(self, candidate):
        """For people: pairs of a name and a value."""
        return " ".join(f"{name}={value}" for name, value in candidate)
