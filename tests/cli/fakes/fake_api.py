"""What the worker calls, without torch. The model's name says what happens."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from snugfit import errors
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Cost, Plan
from snugfit._core.record import Record, Trial
from snugfit._core.request import Request
from snugfit._core.workload import Workload
from snugfit._training.events import RunStarted

prepared = []
HARDWARE = Hardware(
    device="cpu", name="fake", threads=1, memory_bytes=10**9, system="Linux", torch="none", enforces=True
)
COST = Cost(peak_bytes=90, seconds_per_epoch=1.0, seconds=10.0)


def prepare_process(threads, waiting):
    prepared.append(threads)


class FakePlan:
    apart = False

    def __init__(self, request):
        self.request = request
        self.fresh = request.model.model == "fresh"
        workload = Workload("m", "d", (1, 8, 8), 10, 100, 10, 10)
        alone = request.strategy.strategy != "auto"
        fits = request.model.model != "too-big" and (request.model.model != "fits-alone" or alone)
        candidate = Candidate("backprop", fits, predicted=COST, smallest_bytes=None if fits else 200)
        self.plan = Plan(workload, Budget(request.budget.memory), HARDWARE, (candidate,), 0 if fits else None)
        self.plan.__dict__["error"] = errors.InfeasibleBudgetError(
            "nothing fits.", closest="backprop", lacking_bytes=100, smallest_bytes=200
        )

    def to_json(self):
        print("measuring", file=sys.stderr)
        return self.plan.to_json()

    def compare(self, steps, subscribers=()):
        failed = Trial("tiled", 8, 1, 100, 9, 1.0, error="no [room].")
        return [Trial("backprop", 8 * steps, 1, 100, 90, 1.0, 80, 2.0), failed]

    def begin(self):
        return Path("runs/begun")

    def run(self, subscribers=()):
        run_dir = self.request.machine.out or "runs/fake"
        started = RunStarted(run_dir, "backprop", "m", "d", 100, True, COST)
        for subscriber in subscribers:
            subscriber(started)
        BEHAVIOURS[self.request.model.model](self.request)
        return record(run_dir, {"request": self.request.to_json(), "threads": prepared})


def plan_request(request, subscribers=(), *, measures="all", fresh=False):
    assert isinstance(request, Request) and prepared, "the process must be prepared before planning"
    assert not (fresh and "WORLD_SIZE" in os.environ), "processes of a launch train where they plan"
    return FakePlan(request)


def resume(run_dir, subscribers=()):
    if run_dir.endswith("abort"):
        os.abort()
    if run_dir.endswith("interrupted"):
        raise KeyboardInterrupt
    return record(run_dir, {"resumed": True, "threads": prepared})


def profile_request(
    request, subscribers=(), learning_signal=False, tensors=False, activation_memory=False, trained=None
):
    unit = {"name": "unit0", "parameters": 1234, "macs": 5678, "output_bytes": 4096, "saved_bytes": 0, "seconds": 0.5}
    data = {"model": request.model.model, "input_shape": [3, 32, 32], "units": [unit]}
    if learning_signal:
        whole = {"macs": 4_000_000, "additional_parameters": 0, "peak_bytes": 2_500_000}
        local = {"macs": 30_000, "additional_parameters": 1400, "peak_bytes": 700_000}
        data["batch_size"] = request.training.batch_size or 128
        data["learning_signal"] = {"backprop": whole, "lls-m": local}
    if tensors:
        row = {"name": "conv.weight", "operator": "conv", "kind": "Conv2d", "t_dw": 0.0125, "t_dy": 0.0000314,
               "update_seconds": 0.001, "parameters": 4608, "macs": 9, "saved_bytes": 65536}  # fmt: skip
        steps = {"batch": 8, "stock": 1.25, "full": 1.0, "head": 0.5} if request.budget.memory is None else None
        data["tensors"], data["tensor_timing"] = [row], {"batch": 16, "forward_seconds": 0.0451, "steps": steps}
    if activation_memory:
        data["activation_memory"] = activations(trained or "sidenet")
    return data


def activations(trained):
    """As ``profile_request`` gives it, of two blocks."""
    stem = {"name": "stem", "temporary_bytes": 5_720_064, "cumulative_bytes": 100_352, "peak_bytes": 5_720_064,
            "layers": []}  # fmt: skip
    head = {"name": "head", "temporary_bytes": 5160, "cumulative_bytes": 1_532_912, "peak_bytes": 1_533_000,
            "layers": []}  # fmt: skip
    figure = {"peak_bytes": 5_720_064, "peak_block": 0, "cumulative_bytes": 1_532_912, "total_bytes": 49_555_912,
              "batch": 8, "parameter_bytes": 3_795_400, "blocks": [stem, head]}  # fmt: skip
    return {
        **figure, "trained": trained, "side_first": {"peak_bytes": 5_855_696, "total_bytes": 50_640_968},
        "resident": {"weights": 9_000_000, "optimizer": 3_100_000},
        "measured": {"batch": 8, "tensor_peak_bytes": 95_500_000 if trained == "sidenet" else None},
    }  # fmt: skip


def evaluate(run, data=None, data_dir=None, split="test"):
    classes = {"cat": 1.0, "dog": float("nan")}
    return {"accuracy": 0.75, "top5": 1.0, "count": 8, "per_class": classes, "asked": [data, data_dir, split]}


def predict(run, images, top=1):
    if images == "empty":
        raise errors.DataError("there are no images in empty.")
    for index in range(100_000 if images == "many" else 2):
        yield Path(images) / f"{index}, of.png", "cat", 0.5
        if images == "broken":
            raise errors.DataError("1.png cannot be decoded; remove it.")


def export(run, out=None, format="safetensors", check=True, **onnx):
    found = {"files": [f"{out or run}/model.{format}"], "onnx_max_difference": 1e-6 if check else None}
    if onnx["int8"]:
        found["int8"] = {"bytes": 2_000_000, "split": "test", "count": 9, "accuracy": 0.5, "float_accuracy": 0.625}
    return found


def draw_report(run, pictures, data, data_dir):
    assert pictures
    missing = ["No t-SNE of M: none."] if (data, data_dir) == (None, None) else []
    return {"report": f"{run}/report.html", "missing": missing}


def record(run_dir, settings):
    empty = {"peak_bytes": 90}
    return Record(
        "backprop", "m", "d", "cpu", {"memory_bytes": 100}, True, empty, empty, {"val": 0.9, "test": float("nan")},
        {"full": 1, "trained_model": 1}, None, settings, run_dir,
    )  # fmt: skip


def _fail(error):
    def behave(request):
        raise error

    return behave


def _die(number):
    def behave(request):
        os.kill(os.getpid(), number)
        time.sleep(30)

    return behave


def _sleep(request):
    Path(request.machine.out, "started").touch()
    time.sleep(30)


def _save_and_stop(request):
    """Stop like the training loop does, and count how often the signal comes."""
    seen = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: seen.append(number))
    Path(request.machine.out, "started").touch()
    while not seen:
        time.sleep(0.01)
    time.sleep(0.3)
    raise errors.InterruptedRunError(f"stopped by {seen}; --resume continues.")


def _noisy(request):
    print("a library prints to stdout")
    os.write(1, b"so does native code\n")


def _record_and_die(request):
    Path(request.machine.out).mkdir()
    Path(request.machine.out, "record.json").touch()
    _die(signal.SIGTERM)(request)


def _others():
    """Number of processes below the command line's that use memory, beside this one."""
    found = psutil.Process(os.getppid()).children(recursive=True)
    return sum(each.status() != psutil.STATUS_ZOMBIE for each in found) - 1


BEHAVIOURS = {
    "recorded": _record_and_die,
    "vgg16": lambda request: None,
    "noisy": _noisy,
    "fits-alone": lambda request: None,
    "sleep": _sleep,
    "stop": _save_and_stop,
    "sigkill": _die(signal.SIGKILL),
    "sigsegv": _die(signal.SIGSEGV),
    "sigbus": _die(signal.SIGBUS),
    "sigabrt": _die(signal.SIGABRT),
    "exit": lambda request: os._exit(9),
    "interrupted": _fail(KeyboardInterrupt()),
    "diverged": _fail(errors.DivergedError("the loss became NaN; lower --lr.")),
    "internal": _fail(ValueError("first line\nsecond line")),
    "memory": _fail(MemoryError()),
    "allocator": _fail(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")),
    "disk": _fail(OSError(errno.ENOSPC, "No space left on device", "cache.bin")),
    "sysexit": lambda request: sys.exit(4),
    "others": lambda request: Path("others").write_text(str(_others())),
}
