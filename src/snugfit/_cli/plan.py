"""``snugfit plan``: which strategies fit the budget, and what each costs."""

from __future__ import annotations

from typing import Any

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.options import NO_FLAGS, PLAN_ALONE, SHOW_ALL, OutputOptions, PlanOptions, RequestFlags
from snugfit._cli.output import FailedError, note, print_json, show_error
from snugfit._cli.plan_cache import Answer
from snugfit._cli.retries import plan_again
from snugfit._core.plan import Plan
from snugfit._core.record import Trial
from snugfit._core.request import Request
from snugfit._core.serial import from_data
from snugfit._storage.outputs import require_places


def plan(*, flags: RequestFlags = NO_FLAGS, trials: PlanOptions = PLAN_ALONE, output: OutputOptions = SHOW_ALL) -> int:
    """Say which strategies fit the budget, and what each costs, before anything runs.

    For example:

    ```
    snugfit plan --model vgg16 --data digits --memory 100MB
    snugfit plan --model vgg16 --data digits --memory 300MB --aim memory --compare
    ```

    Args:
        flags: the options of the run.
        trials: short real runs.
        output: what is shown.

    Returns:
        The exit code: 3 if nothing fits.
    """
    request, steps = flags.request(), trials.steps()
    require_places(request.machine.out, request.machine.cache_dir)
    found = _planned(request, steps, output) if steps else _answered(request, output)
    from snugfit._report.tables import print_comparison, print_plan

    print_plan(Plan.from_json(found["plan"]))
    if found["infeasible"] is None:
        if steps:
            print_comparison([from_data(Trial, each) for each in found["comparison"]])
        if output.json:
            print_json({**found["plan"], **({"comparison": found["comparison"]} if steps else {})})
        return 0
    error = FailedError.from_json(found["infeasible"])
    if output.json:
        print_json({**found["plan"], "error": error.to_json()})
    return show_error(error, as_json=False, debug=False)


def _answered(request: Request, output: OutputOptions) -> dict[str, Any]:
    """The cached answer, or else that of a child process."""
    answer = Answer(request)
    known = answer.find()
    if known is not None:
        note("this plan is cached on this machine; --profile-cache renew measures again")
        return known
    found = _planned(request, 0, output)
    answer.keep(found)
    return found


def _planned(request: Request, steps: int, output: OutputOptions) -> dict[str, Any]:
    def ask(each: Request) -> dict[str, Any]:
        return planned(each, output, steps)

    return plan_again(request, ask(request), ask, lambda each: planned(each, output, smallest=True))


def planned(request: Request, output: OutputOptions, steps: int = 0, *, smallest: bool = False) -> dict[str, Any]:
    """A plan from a fresh process.

    Args:
        request: the options.
        output: what is shown.
        steps: steps of a trial of each strategy that fits.
        smallest: whether to add the smallest memory budget by its measurements.
    """
    asked = {"request": request.to_json(), "compare_steps": steps, "smallest": smallest}
    return run_job(make_job("plan", output, request.machine.threads, **asked))
