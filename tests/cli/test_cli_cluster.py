"""``snugfit cluster``: the command lines that it builds, and two real processes."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from command_line import start

from snugfit._cli import app, launch, launcher
from snugfit._core.hardware import Cluster

HOSTS = """
hosts:
  - address: 10.0.0.1
    user: pi
    python: /opt/env/bin/python
    directory: my work
  - address: 10.0.0.2
    processes: 2
    interface: eth1
"""


@pytest.fixture
def snug(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "GLOO_DEVICE_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cluster.yaml").write_text(HOSTS)

    def call(*tokens):
        code = app.run(["cluster", *tokens])
        return code, *capfd.readouterr()

    return call


def test_processes_of_this_machine_listen_on_loopback(snug):
    code, out, _ = snug(
        "launch", "--processes", "3", "--timeout", "4s", "--dry-run", "--", "train", "--json", "--epochs", "2"
    )
    words = shlex.split(out)
    assert code == 0 and words[:2] == [f"GLOO_SOCKET_IFNAME={launch.LOOPBACK}", "SNUGFIT_TIMEOUT=4s"]
    assert words[2:6] == ["SNUGFIT_JOIN_TIMEOUT=60s", sys.executable, "-m", "snugfit._cli.agent"]
    assert words[words.index("--nproc-per-node") + 1] == "3" and words[words.index("--serve") + 1] == "127.0.0.1:0"
    assert words[words.index("--max-restarts") + 1] == "3"
    assert words[words.index("--module") + 1 :] == ["snugfit", "train", "--json", "--epochs", "2"]


def test_hosts_are_reached_by_ssh_and_meet_on_the_first(snug, monkeypatch):
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    code, out, _ = snug(
        "launch", "--hosts", "cluster.yaml", "--min-hosts", "2", "--join-timeout", "3min", "--dry-run", "--", "train",
        "--out", "a b",
    )  # fmt: skip
    first, second = (shlex.split(line) for line in out.splitlines())
    assert code == 0 and first[0] == "ssh" and (first[-2], second[-2]) == ("pi@10.0.0.1", "10.0.0.2")
    assert first[-1].startswith(
        "cd 'my work' && exec env GLOO_DEVICE_TRANSPORT=TCP_TLS SNUGFIT_TIMEOUT=10s SNUGFIT_JOIN_TIMEOUT=3min "
        "/opt/env/bin/python -m"
    )
    there = shlex.split(second[-1])
    assert "--serve 10.0.0.1:29400" in first[-1] and "--serve" not in there
    assert there[there.index("--nnodes") + 1] == "2:2" and there[there.index("--rdzv-endpoint") + 1] == "10.0.0.1:29400"
    assert there[there.index("--nproc-per-node") + 1] == "2" and "GLOO_SOCKET_IFNAME=eth1" in there
    assert "c10d" not in there, "whose rendezvous unpickles what the store holds"
    assert there[-5:] == ["--module", "snugfit", "train", "--out", "a b"]


def test_paths_of_a_host_may_begin_with_its_home(snug, tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        HOSTS.replace("/opt/env/bin/", "~/my env/bin/").replace("my work", "~/my work")
    )
    code, out, _ = snug("launch", "--hosts", "cluster.yaml", "--dry-run", "--", "train")
    there = shlex.split(out.splitlines()[0])[-1]
    assert code == 0 and there.startswith("cd ~/'my work' && exec env ") and " ~/'my env/bin/python' -m " in there


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--", "train"], "name the processes"),
        (["--processes", "2"], "no command"),
        (["--processes", "0", "--", "train"], "--processes must be a whole number from 1"),
        (["--processes", "2", "--hosts", "cluster.yaml", "--", "train"], "name the processes"),
        (["--processes", "2", "--timeout", "soon", "--", "train"], "--timeout must be a duration"),
        (["--processes", "2", "--join-timeout", "soon", "--", "train"], "--join-timeout must be a duration"),
        (["--processes", "2", "--interface", "nope0", "--", "train"], "unknown network interface 'nope0'"),
        (["--hosts", "cluster.yaml", "--min-hosts", "3", "--", "train"], "names 2"),
        (["--hosts", "nowhere.yaml", "--", "train"], "cannot read nowhere.yaml"),
    ],
)  # fmt: skip
def test_calls_that_mean_nothing(snug, options, words):
    code, _, err = snug("launch", "--dry-run", *options)
    assert code == 2 and words in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts: []", "must hold a list"),
        ("[", "bad.yaml is not valid YAML"),
        ("hosts: [{user: pi}]", "needs an address"),
        ("hosts: [{address: 10.0.0.1, proceses: 2}]", "Did you mean 'processes'"),
        ("hosts: [{address: 10.0.0.1, processes: 0}]", "count from 1"),
        ("hosts: [{address: -oProxyCommand=x}]", "is no text"),
        ('hosts: [{address: 10.0.0.1, python: "python\\0"}]', "is no text"),
        ("hosts: [10.0.0.1, 10.0.0.1]", "appears twice"),
        ("hosts: [1.1.1.1]", "is a public address"),
        ("hosts: [" + "x" * 64 + "]", "cannot find the address"),
    ],
)
def test_hosts_files_that_are_refused(snug, tmp_path, text, words):
    (tmp_path / "bad.yaml").write_text(text)
    code, _, err = snug("launch", "--hosts", "bad.yaml", "--dry-run", "--", "train")
    assert code == 2 and words in err and len(err.strip().splitlines()) <= 2


def test_public_addresses_take_a_flag(snug, tmp_path):
    (tmp_path / "public.yaml").write_text("hosts: [1.1.1.1]")
    assert snug("launch", "--hosts", "public.yaml", "--public", "--dry-run", "--", "train")[0] == 0
    launch.refuse_public(["127.0.0.1", "192.168.1.4", "fd00::2", "100.64.0.1"], public=False)


def test_exit_codes_of_several_hosts():
    verdict = launcher.exit_code
    assert verdict([8, 4]) == 4 and verdict([255, 0]) == 8 and verdict([-9, 130]) == 8 and verdict([130]) == 130
    assert verdict([]) == verdict([127]) == 8, "a host that could not be started"


def test_doctor_measures_two_processes(snug, tmp_path):
    code, out, err = snug("doctor", "--processes", "2", "--json", "--out", "cluster.json")
    assert code == 0, err
    cluster = Cluster.from_json(json.loads(out))
    assert cluster == Cluster.from_json(json.loads((tmp_path / "cluster.json").read_text()))
    assert [(link.source, link.target) for link in cluster.links] == [(0, 1), (1, 0)]
    assert all(link.bytes_per_second > 1e6 and link.latency_seconds < 1 for link in cluster.links)
    assert all(rank.macs_per_second > 1e6 and abs(rank.clock_offset_seconds) < 1 for rank in cluster.ranks)
    assert not cluster.differing_versions() and "Mbit/s" in err


TINY = ("plan", "--model", "smallconv", "--image-size", "32")


def two(**changes):
    ranks = [{"rank": n, "host": f"host{n}", "threads": 1, "macs_per_second": 1e9, "free_bytes": 10**9} for n in (0, 1)]
    links = [{"from": s, "to": 1 - s, "bytes_per_second": 1e6, "latency_seconds": 1e-3} for s in (0, 1)]
    return json.dumps({"ranks": ranks, "links": links} | changes)


def test_plan_tells_groups_seconds_and_what_devices_do(snug, tmp_path):
    (tmp_path / "cluster.json").write_text(two())
    code, out, err = snug(*TINY, "--cluster", "cluster.json", "--batch-size", "4", "--tiles", "2x1", "--json")
    assert code == 0, err
    found = json.loads(out)
    predicted, (first, second) = found["predicted"], found["devices"]
    parts = sum(predicted[f"{part}_seconds"] for part in ("forward", "backward", "weight"))
    assert predicted["seconds"] == pytest.approx(parts)
    assert predicted["seconds"] == pytest.approx(predicted["computing_seconds"] + predicted["sending_seconds"])
    assert first["sent_bytes"] == second["received_bytes"] and (first["tiles"], second["host"]) == (1, "host1")
    chosen, one, every = found["compared"]
    assert (one["halo_bytes"], one["forward_groups"]) == (0, f"0-{len(found['tiled_layers'])}")
    assert chosen["seconds"] <= min(one["seconds"], every["seconds"]) and every["halo_bytes"] > 0
    assert every["macs"] < one["macs"] and "Groups compared" in err and found["forward_groups"] in err
    assert found["measured"] and found["tiles"] == "2x1"


def test_plan_for_typical_processes(snug):
    code, out, err = snug(*TINY, "--processes", "4", "--forward-groups", "one", "--json", "--quiet")
    found = json.loads(out)
    assert code == 0 and not found["measured"] and len(found["devices"]) == 4 and found["tiles"] == "2x2" and not err
    assert found["compared"][0]["forward_groups"] == found["compared"][1]["forward_groups"]


def test_plan_compares_who_computes_the_rest(snug):
    found = {}
    for rest in ("gateway", "replicated"):
        code, out, err = snug(*TINY, "--processes", "4", "--rest", rest, "--json", "--quiet")
        assert code == 0, err
        found[rest] = json.loads(out)
    gateway, everywhere = found["gateway"], found["replicated"]
    assert (gateway["rest"], everywhere["rest"]) == ("gateway", "replicated")
    rest = everywhere["predicted"]["rest_seconds"]
    assert gateway["predicted"]["rest_seconds"] == rest > 0  # typical processes are alike
    assert everywhere["devices"][3]["macs"] > gateway["devices"][3]["macs"]
    assert everywhere["predicted"]["last_map_seconds"] < gateway["predicted"]["last_map_seconds"]


@pytest.mark.parametrize(
    ("tokens", "code", "words"),
    [
        ((), 2, "name the processes"),
        (("--processes", "1"), 2, "name the processes"),
        (("--cluster", "none.json"), 2, "cannot read none.json"),
        (("--cluster", "cluster.yaml"), 2, "cluster.yaml is damaged"),
        (("--cluster", "two.json", "--processes", "3"), 2, "describes 2 processes, but there are 3"),
        (("--processes", "2", "--tile-sizes", "speed"), 2, "needs the devices' speeds"),
        (("--processes", "4", "--replicas", "2"), 2, "--replicas 2 requires a --batch-size"),
        (("--processes", "2", "--tiles", "99x1"), 4, "use a smaller grid"),
        (("--processes", "2", "--forward-groups", "0-1"), 2, "grouping profile"),
    ],
)
def test_plans_that_are_refused(snug, tmp_path, tokens, code, words):
    (tmp_path / "two.json").write_text(two())
    found, _, err = snug(*TINY, *tokens)
    assert found == code and words in err and len(err.strip().splitlines()) <= 2


def test_the_help_of_plan_teaches(snug):
    code, out, _ = snug("plan", "--help-all")
    assert code == 0 and all(word in out for word in ("halo", "cluster doctor", "--batch-size", "--tile-sizes"))


SLOW = """
import time

def make(classes):
    print("MODEL", flush=True)
    time.sleep(100)
"""


def started(folder, *tokens):
    return start("cluster", "launch", "--processes", "2", "--timeout", "3s", *tokens, cwd=folder)


def test_both_processes_run_and_what_cannot_get_better_is_not_tried_again(tmp_path):
    process = started(tmp_path, "--", "--version")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and out.split() == ["snugfit", out.split()[1]] * 2, err
    process = started(tmp_path, "--", "plan", "--strategy", "nonsense")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and err.count("error: unknown --strategy 'nonsense'") <= 2, err


def test_an_agent_that_is_interrupted_while_it_begins_says_so_in_a_line(tmp_path):
    command = [sys.executable, "-m", "snugfit._cli.agent", "--nproc-per-node", "1", "--module", "snugfit", "--version"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, cwd=tmp_path, **pipes)
    asleep, began = 0, psutil.Process(process.pid)
    while asleep < 20:  # it waits for its first order
        asleep = asleep + 1 if began.status() == psutil.STATUS_SLEEPING else 0
        time.sleep(0.03)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and len(err.strip().splitlines()) == 1 and "interrupted" in err, err


def test_ctrl_c_reaches_all(tmp_path):
    (tmp_path / "snugfit_slow.py").write_text(SLOW)
    process = started(tmp_path, "--", "plan", "--model", "snugfit_slow:make", "--image-size", "8")
    deadline = time.monotonic() + 100
    while "MODEL" not in process.stderr.readline():
        assert time.monotonic() < deadline and process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not any("snugfit_slow:make" in line for line in lines)
