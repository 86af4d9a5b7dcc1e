"""What a machine and its control groups have for a run, read from files that a test writes."""

from pathlib import Path

import pytest

from snugfit._core.machine_memory import MachineMemory, has_core_quota, machine_memory

MB = 10**6
V1, V2 = "9:cpu:/a\n4:memory:/app/one\n0::/\n", "0::/app/one\n"
NO_LIMIT = "9223372036854771712\n"


def stat(prefix="", anon=0, inactive=0, active=0):
    return f"{prefix}anon {anon}\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\n"


def v1(limit, used, **kinds):
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n",
            "memory.stat": "inactive_file 7\n" + stat("total_", **kinds)}  # fmt: skip


def v2(limit, used, high="max", **kinds):
    return {"memory.max": f"{limit}\n", "memory.high": f"{high}\n", "memory.current": f"{used}\n",
            "memory.stat": stat(**kinds)}  # fmt: skip


def read(tmp_path, cgroup, folders, own=0, available=8_000_000):
    """Memory by fake files: control groups by folder, each a dictionary of contents."""
    files = {"p/self/cgroup": cgroup, "p/meminfo": f"MemTotal: 9000000 kB\nMemAvailable: {available} kB\n"}
    files |= {f"g/{folder}/{name}": text for folder, given in folders.items() for name, text in given.items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return machine_memory(own, tmp_path / "p", tmp_path / "g")


def test_without_a_limit_the_machine_decides(tmp_path):
    found = read(tmp_path, V1, {"memory/app/one": v1(NO_LIMIT.strip(), 5 * MB)}, own=1024)
    assert found == MachineMemory(8_000_001 * 1024, None, 9_000_000 * 1024) and found.free_bytes == 8_000_001 * 1024
    assert read(tmp_path, V2, {"app/one": v2("max", 5 * MB)}) == MachineMemory(8_000_000 * 1024, None, 9_000_000 * 1024)


@pytest.mark.parametrize(
    ("cgroup", "folder", "make"), [(V1, "memory/app/one", v1), (V2, "app/one", v2)], ids=["version 1", "version 2"]
)
def test_a_limit_less_what_others_use(tmp_path, cgroup, folder, make):
    """Others use 512 MB: 900 in use, of which the kernel can drop 88, and 300 are the caller's own."""
    group = make(2000 * MB, 900 * MB, inactive=80 * MB, active=8 * MB)
    found = read(tmp_path, cgroup, {folder: group}, own=300 * MB)
    assert found.group_bytes == found.free_bytes == (2000 - 512) * MB and found.size_bytes == 2000 * MB


def test_the_smaller_of_limit_and_machine(tmp_path):
    found = read(tmp_path, V2, {"app/one": v2(2000 * MB, 0)}, available=1_000_000)
    assert (found.group_bytes, found.free_bytes) == (2000 * MB, 1_000_000 * 1024)
    assert found.size_bytes == 9_000_000 * 1024


def test_version_2_slows_down_above_high(tmp_path):
    assert read(tmp_path, V2, {"app/one": v2(2000 * MB, 0, high=900 * MB)}).group_bytes == 900 * MB
    assert read(tmp_path, V2, {"app/one": v2("max", 0, high=800 * MB)}).group_bytes == 800 * MB


@pytest.mark.parametrize(("cgroup", "root", "make"), [(V1, "memory", v1), (V2, ".", v2)])
def test_an_outer_group_may_leave_less(tmp_path, cgroup, root, make):
    outer = {f"{root}/app": make(600 * MB, 500 * MB), f"{root}/app/one": make(900 * MB, 100 * MB)}
    assert read(tmp_path, cgroup, outer, own=50 * MB).group_bytes == 150 * MB


@pytest.mark.parametrize(("cgroup", "root", "make"), [(V1, "memory", v1), ("0::/../../docker\n", ".", v2)])
def test_in_a_container_that_sees_its_own_group_as_the_root(tmp_path, cgroup, root, make):
    """The path is that of the host, and the files of the group lie at the top."""
    assert read(tmp_path, cgroup, {root: make(512 * MB, 12 * MB)}).group_bytes == 500 * MB


def test_a_group_that_is_full_has_nothing(tmp_path):
    assert read(tmp_path, V2, {"app/one": v2(100 * MB, 130 * MB)}).free_bytes == 0


@pytest.mark.parametrize("cgroup", ["", "rubbish\n", "4:memory:/gone\n", "0::/gone\n"])
def test_control_groups_that_cannot_be_read_do_not_limit(tmp_path, cgroup):
    assert read(tmp_path, cgroup, {}).group_bytes is None


def test_this_machine():
    found = machine_memory(0)
    assert 0 < found.free_bytes <= found.ram_bytes and found.free_bytes <= found.size_bytes


@pytest.mark.parametrize(
    ("cgroup", "folder", "text", "limited"),
    [
        (V1, "cpu/a/cpu.cfs_quota_us", "-1\n", False),
        (V1, "cpu/a/cpu.cfs_quota_us", "150000\n", True),
        (V1, "cpu/cpu.cfs_quota_us", "150000\n", True),
        (V1, "cpu/other/cpu.cfs_quota_us", "150000\n", False),
        (V2, "app/one/cpu.max", "max 100000\n", False),
        (V2, "app/one/cpu.max", "150000 100000\n", True),
        (V2, "app/cpu.max", "150000 100000\n", True),
        (V2, "app/one/cpu.max", "", False),
    ],
)
def test_a_quota_of_processor_time(tmp_path, cgroup, folder, text, limited):
    read(tmp_path, cgroup, {Path(folder).parent: {Path(folder).name: text}})
    assert has_core_quota(tmp_path / "p", tmp_path / "g") == limited
