"""The real worker with a fake API and a silent console."""

import contextlib
import sys
import types
from dataclasses import replace

from snugfit._cli import worker


class FakeProgress(contextlib.nullcontext):
    def __init__(self):
        super().__init__(self)

    def __call__(self, event):
        print(f"event {type(event).__name__}", file=sys.stderr)


def retry_requests(planned):
    request = planned.request
    if request.strategy.strategy != "auto" or (planned.plan.choice is not None and request.model.model != "inexact"):
        return []
    return [replace(request, strategy=replace(request.strategy, strategy="backprop"))]


def smallest_fitting(planned):
    return 150_000_000


def placeholder(name, **members):
    """A module that would import torch."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(members)


placeholder("snugfit._report.console", ConsoleProgress=FakeProgress)
placeholder("snugfit._planner", infeasible_error=lambda plan: plan.error)
placeholder("snugfit._engine.retries", retry_requests=retry_requests, smallest_fitting=smallest_fitting)

worker.API_MODULE = "fake_api"

if __name__ == "__main__":
    sys.exit(worker.main())
