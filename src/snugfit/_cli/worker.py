"""The child process: plans, trains and evaluates under the enforced limit, and reports to the parent through a pipe."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from snugfit._cli.output import FailedError, explain, note
from snugfit._cli.startup import (
    ignore_signals,
    keep_niceness,
    prepare_streams,
    quick_exit,
    redeliver_swallowed_interrupts,
)
from snugfit._cli.worker_processes import end_server, forked_job, import_api
from snugfit._core.forking import FORWARDED, die_with_parent
from snugfit._core.own_cores import bind_compute_threads
from snugfit._core.request import Request
from snugfit._training.events import Event, Notice, RunStarted, without_notices
from snugfit.errors import InterruptedRunError

API_MODULE = "snugfit._api"

Send = Callable[..., None]
Subscribers = tuple[Callable[[Event], Any], ...]


def main() -> int:
    """Do the job that is on stdin as JSON. Arguments: file descriptor of the pipe, and process id of the parent.

    The job ``serve`` forks processes for others, which come from a socket.

    Returns:
        The exit code, which is also in the ``error`` message.
    """
    prepare_streams()
    keep_niceness()
    die_with_parent()
    if os.getppid() != int(sys.argv[2]):  # the parent was killed while this process started
        return InterruptedRunError.exit_code
    descriptor = int(sys.argv[1])
    job = json.load(sys.stdin)
    bind_compute_threads(job.get("threads"))
    is_forked = job["command"] == "serve"
    if is_forked:
        forked = forked_job(descriptor, int(sys.argv[2]), API_MODULE)
        if forked is None:
            return 0
        job, descriptor = forked
    os.set_inheritable(descriptor, False)

    def send(**message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(descriptor, line) :]

    if is_forked:
        send(pid=os.getpid())
    failed = _attempt(job, send)
    if failed is not None:
        with suppress(BrokenPipeError):  # the parent ended because the reader of its output went away
            send(error=failed.to_json())
    return failed.exit_code if failed is not None else 0


def _attempt(job: dict[str, Any], send: Send) -> FailedError | None:
    try:
        redeliver_swallowed_interrupts()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # modules that are being imported may swallow an exception
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        result = _work(job, send)
        ignore_signals()
        send(result=result)
    except (Exception, KeyboardInterrupt) as error:
        ignore_signals()
        if job["debug"]:
            traceback.print_exc()
        return explain(error)
    return None


def _work(job: dict[str, Any], send: Send) -> Any:
    api = import_api(API_MODULE)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def announce(event: Event) -> None:
        if isinstance(event, RunStarted):
            send(run_dir=event.run_dir)

    with _progress(job["quiet"]) as progress:
        if job["command"] == "train" and "WORLD_SIZE" in os.environ:
            return _train_in_launch(api, job, (announce, progress))
        api.prepare_process(job["threads"], waiting=os.getppid())
        return COMMANDS[job["command"]](api, job, (announce, progress), send)


def _progress(quiet: bool) -> AbstractContextManager[Callable[[Event], None]]:
    """What shows events: bars, or notices alone, which take no rich."""
    if quiet:
        return nullcontext(_show_notice)
    from snugfit._report.console import ConsoleProgress

    return ConsoleProgress()


def _show_notice(event: Event) -> None:
    if isinstance(event, Notice):
        note(f"note  {event.message}")


def _planning(job: dict[str, Any], subscribers: Subscribers) -> Subscribers:
    """The subscribers of planning; they get no notices if a first process has shown them."""
    return without_notices(subscribers) if job.get("noted") else subscribers


def _plan(api: Any, job: dict[str, Any], subscribers: Subscribers, send: Send) -> Any:
    request, shown = Request.from_json(job["request"]), _planning(job, subscribers)
    planned = api.plan_request(request, subscribers=shown, fresh=_may_be_fresh() and not job["compare_steps"])
    if planned.plan.choice is None:
        return {**_refused(planned), "comparison": []}
    from snugfit._engine.retries import retry_requests, smallest_fitting

    trials = planned.compare(job["compare_steps"], subscribers) if job["compare_steps"] else []
    smallest = smallest_fitting(planned) if job["smallest"] else None
    comparison = [trial.to_json() for trial in trials]
    return {**_fitting(planned, retry_requests(planned)), "comparison": comparison, "smallest": smallest}


def _refused(planned: Any) -> dict[str, Any]:
    """A plan in which nothing fits, the error, and the requests to plan again in fresh processes."""
    from snugfit._engine.retries import retry_requests
    from snugfit._planner import infeasible_error

    error = explain(infeasible_error(planned.plan))
    return {**_fitting(planned, retry_requests(planned)), "infeasible": error.to_json()}


def _fitting(planned: Any, retries: Sequence[Request]) -> dict[str, Any]:
    """A plan, and the requests to plan again in fresh processes."""
    again = [each.to_json() for each in retries]
    return {"plan": planned.to_json(), "infeasible": None, "retries": again, "apart": planned.apart}


def _train_in_launch(api: Any, job: dict[str, Any], subscribers: Subscribers) -> Any:
    """Train with the other processes of a launch: its gateway trains, and the others serve it."""
    from snugfit._engine.distributed import connected, serve
    from snugfit._training.launch import share_of_threads, world

    device = job["device"] if job["resume"] else Request.from_json(job["request"]).machine.device
    with connected(device) as commands:
        api.prepare_process(share_of_threads(world(), job["threads"]))
        if commands is not None and not commands.heartbeat.here.is_gateway:
            return serve(commands)
        return _train_at_gateway(api, job, subscribers)


def _train(api: Any, job: dict[str, Any], subscribers: Subscribers, send: Send) -> Any:
    if job["resume"]:
        end_server()
        return api.resume(job["resume"], subscribers=subscribers).to_json()
    from snugfit._engine.retries import retry_requests

    asked = Request.from_json(job["request"])
    shown = _planning(job, subscribers)
    plan = api.plan_request(asked, subscribers=shown, measures="decisive", fresh=_may_be_fresh())
    if _may_be_fresh():
        if plan.plan.choice is None:
            return _refused(plan)
        retries = [] if job["settled"] else retry_requests(plan)
        if retries:
            return _fitting(plan, retries)
        if plan.fresh:
            return {"begun": str(plan.begin())}
    end_server()
    return plan.run(subscribers=subscribers).to_json()


def _may_be_fresh() -> bool:
    """Whether training may run in another process than planning: not in that of a launch, which is connected."""
    return "WORLD_SIZE" not in os.environ


def _train_at_gateway(api: Any, job: dict[str, Any], subscribers: Subscribers) -> Any:
    """Train, or continue the run that this launch, or an interrupted launch with the same request, began."""
    from snugfit._engine.running import begun, finished, for_launch
    from snugfit._training.launch import world

    here = world()
    if here is None or job["resume"]:
        return _train(api, job, subscribers, _unsent)
    request = for_launch(Request.from_json(job["request"]), here)
    job = {**job, "request": request.to_json(), "resume": begun(request, here)}
    return finished(request, here) or _train(api, job, subscribers, _unsent)


def _unsent(**message: Any) -> None:
    """Send nothing: the gateway of a launch reports its result only."""


def _profile(api: Any, job: dict[str, Any], subscribers: Subscribers, send: Send) -> Any:
    return api.profile_request(Request.from_json(job["request"]), subscribers=subscribers, **job["tables"])


def _estimate(api: Any, job: dict[str, Any], subscribers: Subscribers, send: Send) -> Any:
    return api.estimate(**job["arguments"]).to_json()


def _predict(api: Any, job: dict[str, Any], subscribers: Subscribers, send: Send) -> Any:
    count = 0
    for path, name, *numbers in api.predict(**job["arguments"]):
        send(row=[str(path), str(name), *map(float, numbers)])
        count += 1
    return {"rows": count}


def _call(api: Any, job: dict[str, Any], subscribers: Subscribers, send: Send) -> Any:
    """Call the public function of a command."""
    function = getattr(api, {"report": "draw_report"}.get(job["command"], job["command"]))
    return function(**job["arguments"])


COMMANDS: dict[str, Callable[[Any, dict[str, Any], Subscribers, Send], Any]] = {
    "plan": _plan,
    "train": _train,
    "profile": _profile,
    "estimate": _estimate,
    "evaluate": _call,
    "predict": _predict,
    "export": _call,
    "report": _call,
}


if __name__ == "__main__":
    leave = quick_exit()
    leave(main())
