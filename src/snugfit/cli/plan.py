"""``snugfit plan``: what fits the budget, and what each way of training costs."""

from __future__ import annotations

from snugfit.cli.failures import FailedError, show_error
from snugfit.cli.job import make_job, run_job
from snugfit.cli.options import NO_FLAGS, SHOW_ALL, OutputOptions, RequestFlags
from snugfit.cli.output import print_json
from snugfit.core.plan import Plan


def plan(*, flags: RequestFlags = NO_FLAGS, output: OutputOptions = SHOW_ALL) -> int:
    """Say which ways of training fit the budget, and what each costs, before anything runs.

    For example:

    ```
    snugfit plan --model vgg16 --data digits --memory 100MB
    ```

    Args:
        flags: the options of the run.
        output: what is shown.

    Returns:
        The exit code: 3 where nothing fits.
    """
    request = flags.request()
    job = make_job("plan", output, request.machine.threads, request=request.to_json())
    found = run_job(job)
    from snugfit.report.table import print_plan

    print_plan(Plan.from_json(found["plan"]))
    if found["infeasible"] is None:
        if output.json:
            print_json(found["plan"])
        return 0
    error = FailedError.from_json(found["infeasible"])
    if output.json:
        print_json({**found["plan"], "error": error.to_json()})
    return show_error(error, as_json=False, debug=False)
