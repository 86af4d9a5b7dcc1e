"""Made-up workloads, lines and profiles."""

from snugfit._core.hardware import Hardware
from snugfit._core.profile import ProbeLine, ProbePoint, Profile, UnitStats
from snugfit._core.workload import Workload

MB = 10**6
HARDWARE = Hardware("cpu", "a processor", 1, 10**9, "Linux", "2.13", True)


def workload(**changes):
    settings = {"train_count": 1000, "val_count": 200, "test_count": 100, "epochs": 3, "batch_size": 64}
    settings |= changes
    settings.setdefault("batch_limit", settings["batch_size"])
    return Workload("net", "data", (3, 8, 8), 10, **settings)


def line(fixed, sample, seconds=0.01, smallest=1, name="p"):
    points = tuple(ProbePoint(b, int(fixed + sample * b), seconds * b) for b in (2, 8))
    return ProbeLine(name, fixed, sample, 0.0, 0.0, seconds, points, smallest)


def facts(name="u", saved=0, output=0, weights=0, shape=(4, 8, 8)):
    return UnitStats(name, weights // 4, weights, 0, shape, output, saved)


def profile(lines, floors=None, base=0, units=("a", "b"), kept=None):
    floors = floors or {name: 1 for name in lines}
    return Profile(tuple(facts(name) for name in units), lines, floors, kept or {}, base)
