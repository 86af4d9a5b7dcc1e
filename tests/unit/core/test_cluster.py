"""A cluster as data."""

import json

import pytest

from snugfit.core.cluster import Cluster, Link, Rank
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
    assert TWO.size == 2 and TWO.speeds() == (0.75, 0.25)
    assert TWO.link(1, 0).seconds(2e6) == pytest.approx(1.02)
    assert TWO.slowest_link(1) == TWO.slowest_link() == TWO.link(0, 1)
    assert Cluster(RANKS[:1]).slowest_link(0) is None
    with pytest.raises(UsageError, match="was not measured"):
        TWO.link(0, 0)


def test_versions_that_differ():
    assert TWO.differing_versions() == {"torch": ("2.13", "2.12")}
