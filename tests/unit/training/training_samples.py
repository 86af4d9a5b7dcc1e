"""A made-up run: a trainable of one weight, a source of numbered samples, and a meter that reads what it is told."""

import math
from contextlib import nullcontext

import numpy
import torch
from torch import nn

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Phase
from snugfit._core.profile import Profile
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._training.run import Job, Machine, Run
from snugfit._training.task import StepResult
from snugfit.memory import Baseline, MemoryLimit

HARDWARE = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)
CPU = torch.device("cpu")


class Source:
    """Samples 0, 1, 2 ... as inputs (B, 1); labels are their parity; every epoch has an order of its own."""

    def __init__(self, count=10):
        self.count = count

    def __len__(self):
        return self.count

    def steps(self, batch_size):
        return max(1, self.count // batch_size)

    def order(self, epoch):
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(epoch)).tolist()

    def epoch(self, epoch, batch_size, start_step=0, parts=1, mixed=True):
        order = self.order(epoch)
        for step in range(start_step, self.steps(batch_size)):
            samples = order[step * batch_size : (step + 1) * batch_size]
            count = parts if len(samples) == batch_size else math.ceil(len(samples) / math.ceil(batch_size / parts))
            yield from map(self.batch, numpy.array_split(samples, count))

    def on_host(self):
        return self

    def in_order(self, batch_size, view=None):
        for first in range(0, self.count, batch_size):
            yield self.batch(range(first, min(first + batch_size, self.count)))

    def batch(self, samples):
        inputs = torch.tensor([[float(sample)] for sample in samples])
        return inputs, torch.tensor([sample % 2 for sample in samples])


class OneWeight:
    """Moves its weight by the mean of its inputs and some noise; its loss is the mean of its inputs."""

    def __init__(self, micro_batches=1, before_step=None):
        self.micro_batches, self.before_step = micro_batches, before_step or (lambda count: None)
        self.modules = [nn.Linear(1, 1)]
        self.weight, self.sum = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        self.factor = 1.0
        self.calls, self.factors = [], []

    def step(self, inputs, labels, share=1.0, update=True):
        self.before_step(len(self.calls) + 1)
        self.calls.append((inputs.flatten().tolist(), share, update))
        self.sum += share * (inputs.double().mean() + torch.rand(1, dtype=torch.float64))
        if update:
            self.weight = self.weight * 0.9 - self.factor * self.sum
            self.sum = torch.zeros_like(self.sum)
        return StepResult(inputs.mean().item(), int((labels == 0).sum()))

    def set_lr_factor(self, factor):
        self.factor = factor
        self.factors.append(factor)

    def state(self):
        return {"model": {"value": self.weight}}

    def settle(self, batches):
        """It has no statistics."""

    def load_state(self, load):
        self.weight = load("model")["value"].clone()


class ToldMeter:
    """A meter whose next peak is ``next_peak``."""

    metric = "told"

    def __init__(self):
        self.current_bytes = self.peak_bytes = self.total_bytes = 0
        self.next_peak, self.shares = 0, {}

    def mark(self):
        self.peak_bytes = max(self.peak_bytes, self.next_peak)
        return self.peak_bytes

    def restart(self):
        self.peak_bytes = self.current_bytes


class OpenLimit(MemoryLimit):
    """A limit that enforces nothing and notes how often it was refreshed."""

    def __init__(self):
        super().__init__(None, Baseline(0, 0), CPU)
        self.refreshes, self.spares = 0, []

    def refresh(self, extra_bytes=0):
        self.refreshes += 1
        self.spares.append(self.reserved_bytes)
        return 0

    def allow_kernels(self):
        return nullcontext()


def make_workload(**changes):
    settings = {
        "epochs": 3, "batch_size": 2, "batch_limit": 2, "optimizer": OptimizerSettings(lr=0.5, schedule="constant")
    }  # fmt: skip
    settings |= {"train_count": 10, "classes": 2} | changes
    return Workload("net", "data", (1, 1, 1), val_count=4, test_count=4, **settings)


def make_run(folder, subscribers=(), budget=None, **changes):
    job = Job(make_workload(**changes), Budget(budget), Cost(100, 1.0, 3.0, 7), Profile(()))
    return Run(folder, job, Machine(HARDWARE, CPU, ToldMeter(), OpenLimit()), subscribers=subscribers)


PHASE = Phase("network", 100, 3.0, 2, ("a", "b"))
