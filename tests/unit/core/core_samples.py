"""One filled-in example of each noun."""

from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Cost, Phase, Plan
from snugfit._core.profile import ProbeLine, ProbePoint, Profile, UnitStats
from snugfit._core.record import ExitRecord, PhaseRecord, Record
from snugfit._core.workload import OptimizerSettings, Workload

WORKLOAD = Workload(
    "vgg8", "digits", (1, 32, 32), 10, 1000, 100, 200, epochs=3, optimizer=OptimizerSettings("adamw", 0.001), seed=4
)
HARDWARE = Hardware("cpu", "a processor", 2, 8 * 2**30, "Linux x86_64", "2.13.0", True)
POINTS = (ProbePoint(2, 3_000_000, 0.01), ProbePoint(8, 9_000_000, 0.03))
LINE = ProbeLine("unit:a", 1e6, 1e6, 0.0, 0.003, 0.0033, POINTS, smallest_batch=2)
PROFILE = Profile(
    (UnitStats("a", 10, 40, 100, (4, 8, 8), 1024, 2048, 0.5),), {"unit:a": LINE}, {"unit:a": 7}, {"unit:a": 80}, 5, 3,
    {"unit:a": 2}, 1.5,
)  # fmt: skip
COST = Cost(
    90_000_000, 5400.0, 16_200.0, 2_000_000, 0,
    (Phase("block 1", 90_000_000, 8000.0, 64, ("a", "b"), 2_000_000), Phase("exit", 50_000_000, 200.0, 32)),
)  # fmt: skip
PLAN = Plan(
    WORKLOAD,
    Budget("100MB", "1GB", 0.5),
    HARDWARE,
    (
        Candidate("blockwise", True, {"rho": 0.4, "blocks": [[0, 1, 64]]}, COST),
        Candidate("backprop", False, {}, None, ("one sample needs 120 MB",), 120_000_000, exact=True),
    ),
    0,
)
RECORD = Record(
    "blockwise", "vgg8", "digits", "cpu",
    {"memory_bytes": 100_000_000, "storage_bytes": None, "time_ratio": None}, True,
    {"peak_bytes": 90_000_000, "seconds": 1.5, "storage_bytes": 0},
    {"peak_bytes": 88_000_000, "peak_metric": "RssAnon", "tensor_peak_bytes": 8, "seconds": 2.5, "storage_bytes": 0},
    {"val": 0.5, "test": None, "test_top5": None}, {"full": 100, "trained_model": 60},
    {"unit": "a", "index": 0, "of": 3}, {"rho": 0.4}, "runs/x",
    phases=(PhaseRecord("block 1", ("a", "b"), 64, 90, 80, 70, 1.0, 1.5, 3, 15, 9),),
    exits=(ExitRecord("a", 0, 0.5, 60), ExitRecord("b", 1, 0.25, 80)),
    overhead_seconds={"profiling": 1.25}, confusion=[[1, 0], [2, 3]], class_names=("x", "y"),
)  # fmt: skip
