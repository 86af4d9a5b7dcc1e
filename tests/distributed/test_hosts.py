"""Hosts with slow links and cables that are pulled, as network namespaces of this machine."""

import json
import os
import subprocess
import sys

import pytest
from benchmarks import netns

from snugfit.core.cluster import Cluster

REASON = netns.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TRAIN = """
import sys, time
import torch, torch.distributed as dist
from snugfit.errors import SnugfitError
from snugfit.training.launch import Heartbeat, join, naming_lost, world

here = world()
print(f"start {here.rank} of {here.size} restart {here.restarts}", flush=True)
try:
    with join(here) as group, Heartbeat(here) as heartbeat, naming_lost(heartbeat):
        for step in range(60 if here.size == 1 else 10**9):
            dist.all_reduce(torch.ones(100))
            if step == 50:
                print(f"ready {here.rank} of {here.size}", flush=True)
            time.sleep(0.02)
except SnugfitError as error:
    print(f"rank {here.rank}:", error, flush=True)
    sys.exit(error.exit_code)
"""


LAUNCH = """
import sys
from snugfit.cli.launching import Wanted, run_all, starts
sys.exit(run_all(starts(Wanted(None, "cluster.yaml", 3, "3s", None, False, 1, 29400), ("train_loop",), ".")))
"""


def start(made, folder, *python):
    """Start a command of Python that finds these hosts by ssh and in a file."""
    there = {"python": sys.executable, "directory": str(folder)}
    (folder / "cluster.yaml").write_text(json.dumps({"hosts": [{"address": each.address, **there} for each in made]}))
    environment = {**os.environ, **netns.ssh_into(made, folder)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *python], cwd=folder, env=environment, **pipes)


def test_doctor_measures_what_the_links_were_made_for(tmp_path):
    with netns.hosts(2, rate="10mbit") as made:
        process = start(made, tmp_path, *["-m", "snugfit", "cluster", "doctor", "--hosts", "cluster.yaml", "--json"])
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = Cluster.from_json(json.loads(out))
    rates = [link.bytes_per_second * 8 / 1e6 for link in found.links]
    assert len(rates) == 2 and all(8 < rate < 11 for rate in rates), rates


@pytest.mark.slow
def test_a_host_whose_cable_is_pulled_is_named_and_the_others_go_on(tmp_path):
    (tmp_path / "train_loop.py").write_text(TRAIN)
    with netns.hosts(2) as made:
        process = start(made, tmp_path, "-c", LAUNCH)
        while "ready 0" not in (line := process.stdout.readline()):
            assert line or process.poll() is None, process.stderr.read()
        made[1].cut()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    assert "rank 0: lost rank 1 (process" in out and made[1].address in out
    assert "start 0 of 1 restart 1" in out and "ready 0 of 1" in out
