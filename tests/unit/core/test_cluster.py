"""A cluster as data."""

import json

import pytest

from snugfit._core.hardware import Cluster, Link, Rank, read_cluster, uniform_cluster
from snugfit.errors import UsageError

RANKS = (
    Rank(0, "a", 4, 3e9, 10**9, cores=4, versions={"torch": "2.13", "python": "3.11"}),
    Rank(1, "b", 1, 1e9, 10**8, clock_offset_seconds=0.5, versions={"torch": "2.12", "python": "3.11"}),
)
TWO = Cluster(RANKS, (Link(0, 1, 1e6, 0.01), Link(1, 0, 2e6, 0.02)))


def test_survives_json():
    data = json.loads(json.dumps(TWO.to_json()))
    assert data["links"][0] == {"from": 0, "to": 1, "bytes_per_second": 1e6, "latency_seconds": 0.01}
    assert Cluster.from_json(data) == TWO
    assert Cluster.from_json({"ranks": [], "links": []}) == Cluster(())


def test_what_a_cost_model_asks():
    assert TWO.size == 2
    assert TWO.link(1, 0).seconds(2e6) == pytest.approx(1.02)
    with pytest.raises(UsageError, match="was not measured"):
        TWO.link(0, 0)


def test_versions_that_differ():
    assert TWO.differing_versions() == {"torch": ("2.13", "2.12")}


def written(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_files_are_read_back(tmp_path):
    cluster = uniform_cluster(2, Rank(0, "pi", 4, 1e9, 10**9), Link(0, 1, 1e7, 1e-3))
    path = written(tmp_path / "cluster.json", cluster.to_json())
    assert read_cluster(path) == read_cluster(path, 2) == cluster


def changed(**values):
    data = uniform_cluster(2, Rank(0, "pi", 4, 1e9, 10**9), Link(0, 1, 1e7, 1e-3)).to_json()
    for name, value in values.items():
        group, key = name.split("_", 1)
        data[group][0][key] = value
    return data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("{", "damaged or not what it should be"), ("[]", "damaged"), ("{}", "'links' is missing"),
        ({"ranks": []}, "'links' is missing"),
        ({"ranks": [], "links": []}, "no processes"), (changed(ranks_rank=1), "order of their ranks"),
        (changed(ranks_macs_per_second=0), "not above 0"), (changed(links_bytes_per_second="a"), "must be a number"),
        ({**changed(), "links": []}, "was not measured"), (changed(), "describes 2 processes, but there are 3"),
    ],
)  # fmt: skip
def test_files_that_hold_something_else(tmp_path, data, why):
    with pytest.raises(UsageError, match=why):
        read_cluster(written(tmp_path / "cluster.json", data), 3)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*No such file.*cluster doctor"):
        read_cluster(str(tmp_path / "none.json"))
