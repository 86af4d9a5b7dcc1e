"""Hosts with slow links, cables that are pulled and uninvited guests, as network namespaces of this machine."""

import json
import os
import re
import sys
import time

import pytest
import torch
from benchmarks import netns
from benchmarks.hostfaults import Trial, epochs, harm, leftovers, run_trial, started
from command_line import NETWORKS, run, snug
from safetensors.torch import load_file

from snugfit._core.hardware import Cluster

REASON = netns.why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(300)]
TRAIN = (
    "train", "--model", "tiny_nets:cnn", "--data", "digits", "--image-size", "16", "--max-train", "96", "--max-val",
    "40", "--batch-size", "32", "--seed", "3", "--threads", "1", "--out", "run", "--no-report", "--quiet",
)  # fmt: skip


def test_doctor_measures_what_the_links_were_made_for(tmp_path):
    with netns.hosts(2, rate="10mbit") as made:
        there = {"python": sys.executable, "directory": str(tmp_path)}
        hosts = [{"address": each.address, **there} for each in made]
        (tmp_path / "cluster.yaml").write_text(json.dumps({"hosts": hosts}))
        environment = {**os.environ, **netns.ssh_into(made, tmp_path)}
        done = run("cluster", "doctor", "--hosts", "cluster.yaml", "--json", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    found = Cluster.from_json(json.loads(done.stdout))
    rates = [link.bytes_per_second * 8 / 1e6 for link in found.links]
    assert len(rates) == 2 and all(8 < rate < 11 for rate in rates), rates
    assert [rank.host for rank in found.ranks] == [f"{os.uname().nodename} ({each.address})" for each in made], (
        "hosts that share a name are told apart"
    )


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param((("cut", 2),), id="cut", marks=pytest.mark.slow),  # below, with its weights
        pytest.param((("kill host", 0),), id="gateway"),
        pytest.param((("stop host", 1), ("kill worker", 2)), id="two at once", marks=pytest.mark.slow),
        pytest.param((("slow", 1),), id="slow", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_after_a_fault(tmp_path, fault):
    """While two agents and more remain, except for the gateway's faults; ``benchmarks.clusterfaults`` has more."""
    found = run_trial(Trial(0, 3, fault, epochs=1, seconds=0.0), tmp_path, limit=60.0, timeout="4s")
    assert found["went_on_seconds"] is not None, found["said"]
    assert found["leftovers"] == [] and found["launch_code"] == 130, found


def test_a_run_that_loses_a_host_ends_with_the_weights_of_one_process(tmp_path, monkeypatch):
    """Its tiles are cut anew for the hosts that are left, and it goes on from the last checkpoint."""
    monkeypatch.setenv("PYTHONPATH", str(NETWORKS), prepend=os.pathsep)
    alone = tmp_path / "alone"
    alone.mkdir()
    snug(*TRAIN, "--epochs", "4", "--lr", "0.002", "--strategy", "backprop", cwd=alone)
    with netns.hosts(3) as made:
        launch = started(
            made, tmp_path, "--timeout", "4s", "--", *TRAIN, "--epochs", "4", "--lr", "0.002", "--strategy", "tiled"
        )
        while epochs(tmp_path) < 1:
            assert launch.poll() is None, launch.communicate()
            time.sleep(0.05)
        harm("cut", made[2])
        said, _ = launch.communicate(timeout=200)
        assert launch.returncode == 0, said
        assert leftovers(made) == []
    assert re.search(r"host \S+ is lost|lost rank 2", said) and "with 2 of 3 hosts" in said, said
    assert "3 processes are 2 now" in said
    wanted, found = (load_file(folder / "run" / "model.safetensors") for folder in (alone, tmp_path))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


OUTSIDER = """
import base64, os, pickle, sys, time
from torch.distributed import TCPStore


class Payload:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[2]}",)


raw = pickle.dumps(Payload())
store = TCPStore(sys.argv[1], 29400, is_master=False, wait_for_workers=False)
known = ["torch.rendezvous.snugfit", "torch.rendezvous.snugfit.0/torchelastic/role_info/0"]
for _ in range(5):
    keys = {*known, *store.list_keys()}
    for key in sorted(keys):
        for said in (raw, base64.b64encode(raw)):
            store.set(key.removeprefix("/"), said)
            time.sleep(0.02)
    time.sleep(1)
print("attacked", len(keys), flush=True)
"""


def test_an_outsider_who_reaches_the_port_runs_no_code(tmp_path, monkeypatch):
    """torch's c10d rendezvous unpickles what the store holds; here every key of it is overwritten with a pickle."""
    monkeypatch.setenv("PYTHONPATH", str(NETWORKS), prepend=os.pathsep)
    with netns.hosts(3) as made:
        options = ("--timeout", "4s", "--max-restarts", "1", "--")
        launch = started(made[:2], tmp_path, *options, *TRAIN, "--strategy", "tiled", "--epochs", "100000")
        while epochs(tmp_path) < 1:
            assert launch.poll() is None, launch.communicate()
            time.sleep(0.05)
        (tmp_path / "outsider.py").write_text(OUTSIDER)
        marker = tmp_path / "ran"
        attack = made[2].run(
            sys.executable,
            str(tmp_path / "outsider.py"),
            made[0].address,
            str(marker),
            capture_output=True,
            timeout=100,
        )
        time.sleep(2.0)
        launch.terminate()
        said, _ = launch.communicate(timeout=100)
        assert leftovers(made) == []
    assert not marker.exists(), "code of somebody else ran"
    assert "attacked" in attack.stdout or "Connection" in attack.stderr, attack.stderr
    assert launch.returncode in (8, 130), said
