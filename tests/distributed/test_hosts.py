"""Hosts with slow links and cables that are pulled, as network namespaces of this machine."""

import json
import os
import subprocess
import sys
import time

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


def cluster(made, folder, *words):
    """Start ``snugfit cluster`` over these hosts."""
    there = {"python": sys.executable, "directory": str(folder)}
    (folder / "cluster.yaml").write_text(json.dumps({"hosts": [{"address": each.address, **there} for each in made]}))
    return subprocess.Popen(
        [sys.executable, "-m", "snugfit", "cluster", words[0], "--hosts", "cluster.yaml", *words[1:]], cwd=folder,
        env={**os.environ, **netns.ssh_into(made, folder)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_doctor_measures_what_the_links_were_made_for(tmp_path):
    with netns.hosts(2, rate="10mbit") as made:
        process = cluster(made, tmp_path, "doctor", "--json")
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = Cluster.from_json(json.loads(out))
    rates = [link.bytes_per_second * 8 / 1e6 for link in found.links]
    assert len(rates) == 2 and all(8 < rate < 11 for rate in rates), rates


@pytest.mark.slow
def test_a_host_whose_cable_is_pulled_is_named_and_the_others_go_on(tmp_path):
    (tmp_path / "train_module.py").write_text(TRAIN)
    with netns.hosts(2) as made:
        process = cluster(made, tmp_path, "launch", "--timeout", "3s", "--", "train")
        while "ready" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        made[1].cut()
        since = time.monotonic()
        out, err = process.communicate(timeout=200)
        print(time.monotonic() - since, out, err)
    assert process.returncode == 0, (out, err)
