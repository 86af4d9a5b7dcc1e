"""The real worker with a fake API and a silent console."""

import contextlib
import sys
import types

from snugfit._cli import worker


class FakeProgress(contextlib.nullcontext):
    def __init__(self, *, quiet):
        super().__init__(self)
        self.quiet = quiet

    def __call__(self, event):
        if not self.quiet:
            print(f"event {type(event).__name__}", file=sys.stderr)


planner = types.ModuleType("snugfit._planner")
planner.infeasible_error = lambda plan: plan.error
sys.modules["snugfit._planner"] = planner

worker.API_MODULE = "fake_api"
worker.ConsoleProgress = FakeProgress

if __name__ == "__main__":
    sys.exit(worker.main())
