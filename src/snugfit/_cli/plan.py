"""``snugfit plan``: which strategies fit the budget, and what each costs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from snugfit._cli.child_process import make_job, run_job
from snugfit._cli.options import NO_FLAGS, PLAN_ALONE, SHOW_ALL, OutputOptions, PlanOptions, RequestFlags, require_files
from snugfit._cli.output import FailedError, note, print_json, show_error
from snugfit._cli.plan_cache import PlanCache
from snugfit._cli.retries import plan_again
from snugfit._cli.worker_processes import ForkServer, fork_server
from snugfit._core.known import require_data
from snugfit._core.machine_memory import machine_memory, private_bytes
from snugfit._core.plan import Plan
from snugfit._core.record import Trial
from snugfit._core.request import Request
from snugfit._core.serial import from_data


def plan(*, flags: RequestFlags = NO_FLAGS, trials: PlanOptions = PLAN_ALONE, output: OutputOptions = SHOW_ALL) -> int:
    """Say which strategies fit the budget, and what each costs, before anything runs.

    For example:

    ```
    snugfit plan --model vgg16 --data digits --memory 100MB
    snugfit plan --model vgg16 --data digits --memory 300MB --aim memory --compare
    snugfit plan --model resnet18 --input-shape 3x32x32 --classes 100
    ```

    Args:
        flags: the options of the run.
        trials: short real runs, and the choice as a job of a cluster.
        output: what is shown.
    """
    request, steps = flags.request(), trials.steps()
    trials.require_one_result(as_json=output.json)
    if trials.sbatch or trials.kubernetes:
        require_data(flags.data)  # a job trains
    if steps:
        request.budget.check_trials()
    require_files(request)
    found = _planned(request, steps, output) if steps else _cached_or_planned(request, output)
    from snugfit._report.cluster_jobs import kubernetes_manifest, sbatch_script
    from snugfit._report.tables import print_comparison, print_plan

    answer = Plan.from_json(found["plan"])
    print_plan(answer)
    if found["infeasible"] is None:
        if trials.sbatch:
            print(sbatch_script(answer))
        if trials.kubernetes:
            print(kubernetes_manifest(answer, trials.kubernetes))
        if steps:
            print_comparison([from_data(Trial, each) for each in found["comparison"]])
        if output.json:
            print_json({**found["plan"], **({"comparison": found["comparison"]} if steps else {})})
        return 0
    error = FailedError.from_json(found["infeasible"])
    if output.json:
        print_json({**found["plan"], "error": error.to_json()})
    return show_error(error, as_json=False, debug=False)


def _cached_or_planned(request: Request, output: OutputOptions) -> dict[str, Any]:
    """The cached plan, or else that of a child process."""
    cache = PlanCache(request)
    known = cache.find()
    if known is not None:
        note("this plan is cached on this machine; --profile-cache renew measures again")
        return {**known, "plan": _with_memory_now(Plan.from_json(known["plan"])).to_json()}
    found = _planned(request, 0, output)
    plan = Plan.from_json(found["plan"])
    refused_by_machine = plan.budget.memory_bytes is None or plan.free_bytes < plan.budget.memory_bytes
    if plan.chosen is not None or plan.memory is None or not refused_by_machine:
        cache.keep(found)
    return found


def _with_memory_now(cached: Plan) -> Plan:
    """A cached plan with the memory that the machine has now."""
    if cached.memory is None:
        return cached
    return replace(cached, memory=replace(cached.memory, machine=machine_memory(private_bytes())))


def _planned(request: Request, steps: int, output: OutputOptions) -> dict[str, Any]:
    with fork_server(request.budget, request.machine.threads) as server:
        plan_once = partial(planned, output=output, steps=steps, server=server)
        return plan_again(request, plan_once(request), partial(plan_once, noted=True))


def planned(
    request: Request,
    output: OutputOptions,
    steps: int = 0,
    *,
    smallest: bool = False,
    noted: bool = False,
    server: ForkServer | None = None,
) -> dict[str, Any]:
    """A plan from a fresh process: with trials of so many steps, or with the smallest budget by its measurements.

    With ``noted`` an earlier process has shown the notices of planning. ``server`` forks the process.
    """
    asked = {
        "request": request.to_json(),
        "compare_steps": 0 if smallest else steps,
        "smallest": smallest,
        "noted": noted,
    }
    return run_job(make_job("plan", output, request.machine.threads, **asked), server=server)
