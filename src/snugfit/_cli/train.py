"""``snugfit train``: plan, train inside the budget, report."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from snugfit._cli.child_process import is_finished, make_job, resume_hint, run_job
from snugfit._cli.finished_runs import draw_after_training
from snugfit._cli.options import NO_FLAGS, SHOW_ALL, OutputOptions, RequestFlags, require_files
from snugfit._cli.output import FailedError, note, print_json
from snugfit._cli.plan import planned
from snugfit._cli.retries import plan_again
from snugfit._cli.worker_processes import fork_server
from snugfit._core.documents import read_data
from snugfit._core.known import require_data
from snugfit._core.launchers import name_process
from snugfit._core.options import ANY_STRATEGY, Common
from snugfit._core.registry import find_config
from snugfit._core.request import Request
from snugfit._storage.outputs import require_folder
from snugfit.errors import CheckpointError, InterruptedRunError, UsageError

Resume = Annotated[
    str | None,
    Parameter(group=Group("Machine", sort_key=6)),
    Common("FOLDER", "continue an interrupted run, with its own options"),
]


Report = Annotated[bool, Parameter(group=Group("Machine", sort_key=6))]


def train(
    *, flags: RequestFlags = NO_FLAGS, resume: Resume = None, report: Report = True, output: OutputOptions = SHOW_ALL
) -> None:
    """Train with the best strategy that fits the budget, and never use more.

    Prints the run folder; `--json` prints the record instead. `Ctrl-C` stops a run so that it can be resumed.

    For example:

    ```
    snugfit train --model vgg16 --memory 100MB --out runs/first
    snugfit train --resume runs/first
    ```

    Args:
        flags: the options of the run.
        resume: continue the run in this folder, with the options that it was started with.
        report: draw the report of the finished run; `snugfit report` draws it later, too.
        output: what is shown.
    """
    record = _resumed(resume, flags, output) if resume else _started(_new_request(flags), output)
    if "run_dir" not in record:  # a process that has served another one's run
        return
    page = draw_after_training(record["run_dir"]) if report else None
    if page and not output.quiet:
        note(f"report: {page}")
    if output.json:
        print_json(record)
    else:
        print(record["run_dir"])


def _take_part(request: Request) -> None:
    """Take part in the job of a launcher, such as srun, if several processes can train: the strategy is one for them.

    Other strategies train alone, whatever the launcher's variables, which a shell inside a job has, too.
    """
    name = request.strategy.strategy
    if request.budget.devices > 1 or (name not in ANY_STRATEGY and find_config(name).worker):
        name_process(os.environ)


def _new_request(flags: RequestFlags) -> Request:
    """The request, after a check that it has data and that its folders can be written."""
    require_data(flags.data)
    request = flags.request()
    _take_part(request)
    if "WORLD_SIZE" not in os.environ:  # the gateway of a launch checks itself
        require_files(request)
        if request.machine.out is None:
            require_folder("runs", "Give a folder that can be written with --out.")
    return request


def _started(request: Request, output: OutputOptions) -> dict[str, Any]:
    """The record of a new run; if nothing fits, or nothing exact, strategies are planned in processes of their own."""
    with fork_server(request.budget, request.machine.threads) as server:

        def ask(each: Request, **asked: Any) -> dict[str, Any]:
            job = {"request": each.to_json(), "resume": None, **asked}
            return run_job(make_job("train", output, each.machine.threads, **job), server=server)

        found = ask(request, settled=False, noted=False)
        if "retries" in found:
            found = plan_again(request, found, partial(planned, output=output, noted=True, server=server))
            if not found["infeasible"]:
                chosen = Request.from_json(found["request"]) if "request" in found else request
                found = ask(chosen, settled=True, noted=True)
        if found.get("infeasible"):
            raise FailedError.from_json(found["infeasible"])
        if "begun" in found:  # memory that measuring left in that process would count to the budget
            try:
                found = ask(request, resume=found["begun"])
            except KeyboardInterrupt as error:
                raise InterruptedRunError(f"interrupted.{resume_hint(found['begun'])}") from error
        return found


def _resumed(run_dir: str, flags: RequestFlags, output: OutputOptions) -> dict[str, Any]:
    if flags is not NO_FLAGS:  # a flag was given; its value may be the default
        names = ", ".join(flags.changed()) or "all other options of a run"
        raise UsageError(f"--resume continues a run as it was started; leave out {names}.")
    request = _request_of(run_dir)
    if request is not None:
        _take_part(request)
    threads, device = (None, None) if request is None else (request.machine.threads, request.machine.device)
    job = make_job("train", output, threads, request=None, resume=run_dir, device=device)
    return _unreported(run_dir) or run_job(job)


def _unreported(run_dir: str) -> dict[str, Any] | None:
    """The record of a run that was interrupted after training, before its report was drawn."""
    if not is_finished(run_dir) or (Path(run_dir) / "report.html").exists() or "WORLD_SIZE" in os.environ:
        return None
    from snugfit._storage.run_folder import read_record

    record = read_record(Path(run_dir))
    if record.excess is not None:
        return None  # it ended with exit code 5
    note(f"the run in {run_dir} is finished; only its report was missing")
    return {**record.to_json(), "run_dir": run_dir}


def _request_of(run_dir: str) -> Request | None:
    """What a run was started with; None if its folder does not say (the child explains why)."""
    try:
        return read_data(Request, Path(run_dir) / "request.json")
    except CheckpointError:
        return None
