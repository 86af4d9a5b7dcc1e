"""Words in the store are obeyed only where a member of the launch wrote them."""

import json
import pickle
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import snugfit
from snugfit._training.launch import Commands, World
from snugfit._training.launch.group import _wait_for_all
from snugfit._training.launch.store import connect, names, seal, sealed_get, sealed_set, unseal
from snugfit.errors import WorkerLostError


def test_what_is_sealed_is_read_back():
    assert unseal("s", "key", seal("s", "key", "wörds\n")) == "wörds\n"
    assert unseal("s", "key", seal("s", "key", "")) == ""


@pytest.mark.parametrize(
    ("secret", "key", "text"),
    [
        ("s", "key", "other" + seal("s", "key", "words")),
        ("s", "key", seal("s", "key", "words") + "!"),
        ("s", "key", seal("guess", "key", "words")),
        ("s", "key", seal("s", "kex", "words")),
        ("s", "key", seal("s", "keyw", "ords")),
        ("s", "key", "words"),
        ("s", "key", ""),
        ("s", "key", "\ufffd" * 70),
    ],
)
def test_what_others_write_is_refused(secret, key, text):
    with pytest.raises(WorkerLostError, match="was not written by this launch"):
        unseal(secret, key, text)


@pytest.fixture
def two():
    """Ranks 0 and 1 of a launch with a secret, and the store that outsiders reach too."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = World(
        0, 2, 0, 2, 0, "127.0.0.1", server.port, run_id="x", timeout_seconds=2.0, join_seconds=2.0, secret="hush"
    )
    return server, first, replace(first, rank=1)


class Beating:
    """A heartbeat that hears everybody."""

    def __init__(self, here):
        self.here, self.limit, self.interval = here, 2.0, 0.1

    def lost(self, limit=None):
        return []


def test_commands_reach_their_rank(two):
    _, first, second = two
    with Commands(Beating(first)) as gives, Commands(Beating(second)) as takes:
        for command in ("{}", json.dumps({"plan": 1})):
            gives.send(command)
            assert takes.receive() == command


def test_a_command_from_an_outsider_is_not_obeyed(two):
    """Who reaches the port can write any key; a model's name in a command would be imported."""
    server, _, second = two
    with Commands(Beating(second)) as takes:
        outsider = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        outsider.set("snugfit/x/0/command/1/0", json.dumps({"workload": {"model": "os:getcwd"}}))
        with pytest.raises(WorkerLostError, match="was not written by this launch"):
            takes.receive()


def test_a_command_of_an_earlier_round_or_for_another_rank_is_not_obeyed(two):
    _, first, second = two
    sealed_set(first, connect(first, 2), "command/1/0", "stop")
    said = connect(first, 2).get("command/1/0")
    later = replace(second, restarts=1)
    connect(later, 2).set("command/1/0", said)
    connect(second, 2).set("command/0/0", said)
    for here, key in ((later, "command/1/0"), (second, "command/0/0")):
        with pytest.raises(WorkerLostError):
            sealed_get(here, connect(here, 2), key)


def test_names_are_the_launchs_own(two):
    _, first, second = two
    meeting = [threading.Thread(target=_wait_for_all, args=(each, connect(each, 2))) for each in (first, second)]
    for each in meeting:
        each.start()
    for each in meeting:
        each.join()
    assert set(names(first, connect(first, 2), 2.0)) == {0, 1}
    connect(first, 2).set("joined/1", pickle.dumps("me"))
    with pytest.raises(WorkerLostError, match="was not written by this launch"):
        names(first, connect(first, 2), 2.0)


def test_no_collective_of_this_package_pickles():
    """torch's collectives of objects and the rendezvous named c10d unpickle what comes over the network."""
    pickling = re.compile(r"_object\(|_object_list\(|(import|from) (pickle|cloudpickle|dill|marshal|shelve)\b|c10d")
    folder = Path(snugfit.__file__).parent
    found = [
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in folder.rglob("*.py") for line in path.read_text().splitlines() if pickling.search(line)
    ]  # fmt: skip
    assert [each for each in found if "torch's ``c10d`` rendezvous" not in each] == []
