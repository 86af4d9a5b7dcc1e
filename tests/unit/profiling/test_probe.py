"""Probes on synthetic meters and limits: which batch sizes are measured, and what a refusal does."""

import sys
from dataclasses import replace

import pytest
import torch
from fake_device import FakeMemory
from probe_samples import Machine, probe

from snugfit._core.profile import ProbeLine
from snugfit.memory import device as devices
from snugfit.memory.process import PageMapping
from snugfit.profiling import Measurements, Probe, alone, measure_probe, measure_probes
from snugfit.profiling.measuring import FIRST_GROWTH
from snugfit.profiling.probe import LAYER_GROWTH, META_PASS_BYTES, PROBE_GROWTH


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    """Collecting garbage takes a tenth of a second, and nothing here makes any."""
    for module in ("probe", "measuring"):
        monkeypatch.setattr(f"snugfit.profiling.{module}.release_memory", lambda: None)


def test_the_line_is_that_of_the_step():
    machine = Machine()
    made, ran = probe(machine, fixed=500, sample=10)
    line = measure_probe(made, machine, machine)
    assert line.fixed_bytes == pytest.approx(500) and line.sample_bytes == pytest.approx(10)
    assert [point.batch for point in line.points] == [2, 8, 64]
    assert [point.peak_bytes for point in line.points] == [520, 580, 1140]
    assert ran == [2, 2, 8, 8, 64, 64], "every batch is warmed up once and measured once"


def make_every_step_long(monkeypatch):
    for name in ("LONG_STEP_SECONDS", "LONG_LAYER_SECONDS"):
        monkeypatch.setattr(f"snugfit.profiling.probe.{name}", 0.0)


@pytest.mark.parametrize(("device", "steps"), [("cpu", 1), ("cuda:0", 2)])
def test_on_a_device_the_second_step_counts_however_long_the_first_takes(device, steps, monkeypatch):
    """A GPU loads kernels in the first."""
    make_every_step_long(monkeypatch)
    monkeypatch.setattr(devices, "KINDS", {"cuda": lambda device: FakeMemory()})
    monkeypatch.setattr(devices, "_at_rest", {})
    machine = Machine()
    machine.device = torch.device(device)
    made, ran = probe(machine, fixed=500, sample=10)
    measure_probe(made, machine, machine)
    assert ran == [2, 2, *[8] * steps, *[64] * steps]


def test_what_building_takes_counts_to_every_step():
    """Weights may be stored in less than they come in."""
    machine = Machine()
    made, _ = probe(machine, fixed=500, sample=10)

    def build():
        machine.take(900)
        return made.build()

    line = measure_probe(replace(made, build=build), machine, machine)
    assert [point.peak_bytes for point in line.points] == [900, 900, 1140]


def test_kernels_of_a_batch_size_count_once_and_those_of_a_new_one_are_predicted():
    """What a step takes does not shrink by the kernels of other sizes, which a run does not make."""
    machine, seen = Machine(budget=10_000), set()

    def generate(batch):
        machine.resting += 0 if batch in seen else 400
        seen.add(batch)

    made, _ = probe(machine, fixed=500, sample=10, limit=16, kept=300, on_step=generate)
    line = measure_probe(made, machine, machine)
    assert machine.resting == 1000 + 3 * 400 and line.shape_bytes == 400
    assert [point.peak_bytes for point in line.points] == [300 + 500 + 10 * batch for batch in (2, 8, 16)]
    assert line.bytes_at(8) == pytest.approx(880, abs=2) and line.bytes_at(9) == pytest.approx(890 + 400, abs=2)


@pytest.mark.parametrize(("kernels", "steps"), [(400, 2), (5, 1)])
def test_kernels_that_the_first_step_makes_after_its_peak_count(kernels, steps, monkeypatch):
    """Later steps have them at their peak. A long step is run again only if they are many."""
    make_every_step_long(monkeypatch)
    machine, ran = Machine(), []

    def step(batch):
        machine.take(1000 + 10 * batch)
        machine.resting += 0 if batch in ran else kernels
        ran.append(batch)

    made, _ = probe(machine, fixed=1000, sample=10, limit=16)
    line = measure_probe(replace(made, build=lambda: step), machine, machine)
    assert [point.peak_bytes for point in line.points] == [1020, 1080, 1160]
    assert ran == [2, 2, *[8] * steps, *[16] * steps]


def test_kernels_of_a_refused_batch_size_do_not_shrink_what_a_step_takes():
    machine, seen = Machine(budget=3000), set()

    def generate(batch):
        machine.resting += 0 if batch in seen else 200
        seen.add(batch)
        if batch > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    made, _ = probe(machine, fixed=500, sample=10, limit=16, kept=300, on_step=generate)
    line = measure_probe(made, machine, machine)
    assert len(seen) > len(line.points) == 2
    assert [point.peak_bytes for point in line.points] == [820, 880]


@pytest.mark.parametrize(("budget", "largest"), [(None, 34), (2400, 28)])
def test_the_line_holds_at_batches_that_threads_share(monkeypatch, budget, largest):
    """Even batches from 32 on need 300 bytes more, which 35 would not show, nor 28, the most that the budget holds."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    machine = Machine(budget)

    def needed(batch):
        return 500 + 20 * batch + (300 if batch >= 32 and batch % 2 == 0 else 0)

    made, _ = probe(machine, fixed=500, sample=20, limit=35)
    made = replace(made, build=lambda: lambda batch: machine.take(needed(batch)), partial_bytes=300)
    line = measure_probe(made, machine, machine)
    assert line.measured_batch == largest
    assert all(line.bytes_at(batch) >= needed(batch) for batch in (2, 8, 28, 32, 33, 34, 35))


@pytest.mark.parametrize("machine_bytes", [1_000_000, 3000])
def test_bounds_between_measured_batches_hold_and_are_those_of_the_points(machine_bytes):
    """Amounts that grow linearly with the batch, and the largest of them: a line through all is too high in between."""
    machine = Machine(machine_bytes)

    def needed(batch):
        return max(900 + 4 * batch, 500 + 20 * batch)

    made, _ = probe(machine, fixed=500, sample=20, limit=100)
    line = measure_probe(replace(made, build=lambda: lambda batch: machine.take(needed(batch))), machine, machine)
    fitted = [line.fixed_bytes + line.sample_bytes * batch + line.residual_bytes for batch in range(101)]
    bounds = [line.bytes_at(batch) for batch in range(101)]
    assert all(bounds[batch] >= needed(batch) for batch in range(2, line.measured_batch + 1))
    assert bounds == sorted(bounds)
    assert all(bound <= most + 2 + line.shape_bytes for bound, most in zip(bounds, fitted, strict=True))
    assert [line.bytes_at(point.batch) for point in line.points] == [point.peak_bytes + 1 for point in line.points]
    assert bounds[8] < fitted[8] - 30
    for available in range(900, 2600, 7):
        fitting = [batch for batch in range(1, 101) if bounds[batch] <= available]
        assert line.largest_batch(available, 100) == max(fitting, default=0)


def test_what_the_probe_keeps_counts_to_it():
    machine = Machine()
    made, _ = probe(machine, fixed=500, sample=10, kept=300)
    line = measure_probe(made, machine, machine)
    assert line.fixed_bytes == pytest.approx(800)
    assert machine.kept == 0 and machine.current_bytes == machine.resting


def test_a_small_limit_is_measured_as_it_is():
    for limit, batches in ((1, [1]), (2, [2]), (5, [2, 5]), (8, [2, 8]), (9, [2, 8, 9])):
        machine = Machine()
        made, _ = probe(machine, fixed=500, sample=10, limit=limit)
        assert [point.batch for point in measure_probe(made, machine, machine).points] == batches


def test_only_one_sample_fits():
    machine = Machine(budget=1000 + 500 + 10)
    made, _ = probe(machine, fixed=500, sample=10)
    line = measure_probe(made, machine, machine)
    assert [(point.batch, point.peak_bytes) for point in line.points] == [(1, 510)]


@pytest.mark.parametrize(
    ("room", "least", "sizes", "seconds", "expected"),
    [
        (2150, 500, (), 0.01, [2, 2, 5, 5]),
        (2150, 500, (1, 2, 4, 8), 0.01, [2, 2, 4, 4]),
        (2150, 500, (), 0.3, [2, 2, 3]),
        (2150, 500, (), 0.9, [2, 2]),
        (1600, 500, (), 0.01, [2, 2]),
        (2150, 0, (), 0.01, [2, 2, 8, 5, 5]),
    ],
)
def test_a_second_size_is_measured_below_one_without_room(monkeypatch, room, least, sizes, seconds, expected):
    """It is one that micro-batches may have, whose step is short, and that surely has room."""
    monkeypatch.setattr("snugfit.profiling.probe._timed", lambda step, batch, device: timed(step, batch, seconds))
    machine = Machine(budget=1000 + room)
    made, ran = probe(machine, fixed=1000, sample=200, floor=lambda batch: least + 200 * batch, sizes=sizes)
    line = measure_probe(made, machine, machine)
    assert ran == expected
    assert [point.batch for point in line.points] == sorted(set(expected) - {8})


def timed(step, batch, seconds):
    step(batch)
    return seconds * batch, PageMapping(0.0, 0)


def test_a_single_point_says_nothing_of_smaller_batches():
    """The line through it would promise half of the fixed bytes at one sample."""
    machine = Machine(budget=2500)
    made, _ = probe(machine, fixed=1000, sample=200, floor=lambda batch: 150 * batch)
    line = measure_probe(made, machine, machine)
    assert [point.batch for point in line.points] == [2] and line.bytes_at(2) >= 1400
    assert line.smallest_batch == 2 and line.largest_batch(1399, 64) == 0


@pytest.mark.parametrize("long_step", [0.0, 1e9])
def test_optimizer_state_that_the_first_step_makes_counts(long_step, monkeypatch):
    """However long the first step takes, another one is run: only then is there optimizer state."""
    monkeypatch.setattr("snugfit.profiling.probe.LONG_STEP_SECONDS", long_step)
    machine = Machine()

    class Step:
        state = 0

        def __call__(self, batch):
            machine.take(self.state + 10 * batch)
            self.state = 700

    line = measure_probe(Probe("p", Step, lambda batch: 10 * batch, 64), machine, machine)
    assert line.points[0].peak_bytes == 720


def test_a_probe_that_is_refused_at_one_sample_has_no_line():
    machine = Machine(budget=1500)
    made, ran = probe(machine, fixed=500, sample=10)
    assert measure_probe(made, machine, machine) is None
    assert ran


def test_a_probe_that_cannot_be_built_has_no_line():
    machine = Machine(budget=2000)
    made, ran = probe(machine, fixed=0, sample=1, kept=1500)
    machine_kept = machine.kept
    assert measure_probe(made, machine, machine) is None
    assert ran == [] and machine_kept == 0


def test_a_probe_whose_floor_is_above_the_budget_is_not_run():
    machine = Machine(budget=2000)
    made, ran = probe(machine, fixed=0, sample=1, floor=lambda batch: 1001)
    assert measure_probe(made, machine, machine) is None
    assert ran == []


def test_floors_are_told_in_any_budget_and_steps_are_not():
    """What is looked at takes no memory to speak of, but the smallest budget may have none left for looking."""
    machine, looked, stepped = Machine(budget=3000), [], []

    def floor(batch):
        looked.append(machine.address_space)
        return 1

    def needed(lines, available):
        looked.append(machine.address_space)
        return True

    def step(batch):
        stepped.append(machine.address_space)

    made, _ = probe(machine, fixed=500, sample=20, floor=floor, on_step=step)
    measure_probes([replace(made, needed=needed)], machine, machine, lambda *_: None)
    measure_probe(made, machine, machine)
    assert len(looked) > 2 and set(looked) == {META_PASS_BYTES}
    assert stepped and set(stepped) == {0} and machine.address_space == 0


def test_other_errors_pass_through():
    machine = Machine()

    def broken(batch):
        raise RuntimeError("shapes differ")

    made, _ = probe(machine, fixed=0, sample=1, on_step=broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        measure_probe(made, machine, machine)


def one_value_per_channel(batch):
    if batch == 1:
        raise ValueError("Expected more than 1 value per channel when training")
    return 10 * batch


def test_batch_norm_on_a_single_value_starts_at_two_samples():
    machine = Machine(budget=1000 + 500 + 25)
    made, ran = probe(machine, fixed=500, sample=10, floor=one_value_per_channel)
    profile = measure_probes([made], machine, machine, lambda *_: None)
    assert profile.floors == {"p": 20}
    line = profile.lines["p"]
    assert line.smallest_batch == 2 and min(ran) == 2
    assert line.largest_batch(512, 64) == 0


def test_several_probes_make_a_profile():
    machine, told = Machine(budget=2000), []
    fits, _ = probe(machine, fixed=500, sample=1, kept=70)
    refused, _ = probe(machine, fixed=5000, sample=1)
    refused = Probe("q", refused.build, refused.floor, refused.batch_limit)
    profile = measure_probes([fits, refused], machine, machine, lambda *event: told.append(event))
    assert set(profile.lines) == {"p"} and isinstance(profile.lines["p"], ProbeLine)
    assert profile.floors == {"p": 1, "q": 1} and profile.kept == {"p": 70, "q": 0}
    assert profile.base_bytes == 1000 and profile.units == ()
    assert alone(profile, [fits, refused]).base_bytes == 1000 + FIRST_GROWTH + 2 * PROBE_GROWTH
    assert told == [("p", 1, 2), ("q", 2, 2)]


def test_ways_of_running_one_network_leave_its_kernels_behind_once():
    machine = Machine(budget=2000)
    refused = [
        Probe(str(layers), lambda: None, lambda batch: 10**6, 64, layers=layers, network="one") for layers in (1, 3, 2)
    ]
    grown = PROBE_GROWTH + 2 * LAYER_GROWTH
    profile = measure_probes(refused, machine, machine, lambda *_: None)
    assert profile.base_bytes == 1000
    assert alone(profile, refused).base_bytes == 1000 + max(FIRST_GROWTH + grown, 2 * grown)


def test_memory_of_other_probes_counts_to_this_process_only(tmp_path):
    """Two networks leave 50 and 30 bytes; the third probe is refused, and counts where it would be measured."""

    def base(names, known=None):
        machine = Machine(budget=3000)

        def probe_leaving(name, size):
            def build():
                machine.kept += size
                return machine.take

            floor = 10**6 if name == "refused" else 1
            return Probe(name, build, lambda batch: floor, 64, same=name)

        sizes = {"a": 50, "b": 30, "refused": 0}
        probes = {name: probe_leaving(name, sizes[name]) for name in names}
        profile = measure_probes([*probes.values()], machine, machine, lambda *_: None, known)
        own = {name: alone(profile, [probe]).base_bytes - 1000 for name, probe in probes.items()}
        return profile.base_bytes - 1000, own

    grown = FIRST_GROWTH + PROBE_GROWTH
    for known in (None, Measurements(tmp_path), Measurements(tmp_path)):
        assert base(["a", "b", "refused"], known) == (80, {"a": 50, "b": 30, "refused": grown})
    assert base(["refused"]) == (0, {"refused": grown})


def test_what_measuring_left_elsewhere_counts_once_however_many_processes_come_and_go(tmp_path):
    """Looking leaves 100 bytes in a process that looks; measuring leaves 50 for one network and 30 for the other."""

    def base(*left):
        machine = Machine(budget=3000)

        def look(batch):
            machine.kept = max(machine.kept, 100)
            return batch

        def probe_leaving(size):
            def build():
                machine.kept += size
                return machine.take

            return Probe(f"{size}", build, look, 64, same=f"{size}")

        probes = [probe_leaving(size) for size in left]
        return measure_probes(probes, machine, machine, lambda *_: None, Measurements(tmp_path)).base_bytes - 1000

    assert [base(50), base(50), base(50, 30), base(50, 30), base(30)] == [150, 50, 180, 80, 30]


def test_the_only_size_that_may_be_chosen_is_measured_alone():
    machine = Machine(budget=2540)
    made, ran = probe(machine, fixed=500, sample=10, limit=64, sizes=(64,))
    line = measure_probe(made, machine, machine)
    assert ran == [64, 64] and line.smallest_batch == 64 and line.bytes_at(64) >= 1140
    made, ran = probe(machine, fixed=500, sample=100, limit=64, sizes=(64,))
    assert measure_probe(made, machine, machine) is None and ran == [], "it is known not to fit"


def test_an_only_size_that_cannot_train_is_not_run():
    """Of two images, parts are of one, which batch norms refuse; a step that takes long asks for its floor again."""
    machine = Machine()
    made, ran = probe(machine, fixed=500, sample=10, limit=2, floor=one_value_per_channel, sizes=(1,))
    assert measure_probe(replace(made, longest_seconds=-1.0), machine, machine) is None and ran == []


def test_a_first_batch_that_cannot_fit_is_not_tried():
    machine = Machine(budget=1000 + 150)
    made, ran = probe(machine, fixed=0, sample=100)
    line = measure_probe(made, machine, machine)
    assert set(ran) == {1} and line.points[0].batch == 1


def test_without_a_listener_only_floors_are_taken():
    machine = Machine()
    made, ran = probe(machine, fixed=500, sample=10)
    profile = measure_probes([made], machine, machine, None)
    assert profile.lines == {} and profile.floors == {"p": 10} and ran == []


def measure_known_steps():
    import torch

    from snugfit.memory import MemoryLimit, make_meter, prepare_process
    from snugfit.profiling import Probe, measure_probe

    kept, sample = 8_000_000, 2_000_000

    def build():
        weights = torch.ones(kept // 4)

        def step(batch):
            torch.ones(batch * sample // 4).add_(float(weights[0]))

        return step

    baseline = prepare_process(1)
    meter = make_meter(baseline, torch.device("cpu"))
    with MemoryLimit(61_000_000, baseline, torch.device("cpu")) as limit:
        line = measure_probe(Probe("p", build, lambda batch: kept + sample * batch, 128), meter, limit)
        hopeless = measure_probe(Probe("q", build, lambda batch: 70_000_000, 128), meter, limit)
        greedy = Probe("r", lambda: lambda batch: torch.ones(20_000_000), lambda batch: 1, 128)
        refused = measure_probe(greedy, meter, limit)
    return {
        "fixed": line.fixed_bytes, "sample": line.sample_bytes, "batches": [point.batch for point in line.points],
        "none": hopeless is None and refused is None,
    }  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_DATA")
def test_real_allocations_of_a_known_size_give_their_line(fresh_process):
    seen = fresh_process(measure_known_steps)["measure_known_steps"]
    assert seen["sample"] == pytest.approx(2_000_000, rel=0.01)
    assert seen["fixed"] == pytest.approx(8_000_000, abs=1_000_000)
    assert seen["batches"][:2] == [2, 8] and seen["batches"][2] in (23, 24)  # 61 MB less room for kernels
    assert seen["none"]


def test_probes_that_run_the_same_are_measured_once():
    machine = Machine(budget=100_000)
    first, ran = probe(machine, 1000, 10)
    twin, ran_by_twin = probe(machine, 1000, 10)
    found = measure_probes(
        [replace(first, same="conv"), replace(twin, name="q", same="conv")], machine, machine, lambda *_: None
    )
    assert ran and not ran_by_twin
    assert found.lines["q"] == replace(found.lines["p"], name="q") and found.floors["q"] == found.floors["p"]
