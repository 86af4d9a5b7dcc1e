"""A meter and limit of known figures, and probes of known steps."""

from contextlib import contextmanager, nullcontext

import torch

from snugfit.profiling import Probe


class Machine:
    """Meter and limit of a synthetic process: a step takes its bytes, and more than the budget is refused."""

    metric = "synthetic"

    kernel_bytes = 0
    device = torch.device("cpu")

    def __init__(self, budget=None, resting=1000):
        self.budget_bytes, self.resting = budget, resting
        self.current_bytes = self.peak_bytes = resting
        self.kept = 0
        self.reserves = self.address_space = 0

    @contextmanager
    def allow_address_space(self, extra_bytes):
        self.address_space += extra_bytes
        yield
        self.address_space -= extra_bytes

    def restart(self):
        self.current_bytes = self.peak_bytes = self.resting + self.kept

    def mark(self):
        return self.peak_bytes

    def refresh(self):
        return 0

    def allow_kernels(self):
        return nullcontext()

    def take(self, count):
        used = self.resting + self.kept + count
        if self.budget_bytes is not None and used > self.budget_bytes:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        self.peak_bytes = max(self.peak_bytes, used)


def probe(machine, fixed, sample, limit=64, kept=0, floor=None, sizes=(), on_step=None):
    """A probe that keeps ``kept`` bytes from when it is built until it is dropped."""
    ran = []

    class Step:
        def __init__(self):
            machine.take(kept)
            machine.kept += kept

        def __call__(self, batch):
            ran.append(batch)
            if on_step:
                on_step(batch)
            machine.take(fixed + sample * batch)

        def __del__(self):
            machine.kept -= kept

    made = Probe("p", Step, floor or (lambda batch: sample * batch), limit, kept_bytes=kept, sizes=sizes)
    return made, ran
