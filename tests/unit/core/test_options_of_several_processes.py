"""Options that only several processes have: contradictions are found before anything runs."""

import pytest

from snugfit._core.known import check_names
from snugfit._core.request import Request
from snugfit.errors import UsageError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": "nofile.json"}, "there is no file nofile.json"),
        ({"tile_sizes": "speed"}, "requires the speeds of a --cluster"),
        ({"strategy": "tiled", "tile_sizes": "speed"}, "requires the speeds of a --cluster"),
        ({"strategy": "backprop", "devices": 4}, "backprop trains in one process, and not over --devices 4"),
    ],
)
def test_contradictions_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        check_names(Request.of(**options))


def test_several_devices_are_for_tiles():
    check_names(Request.of(strategy="tiled", devices=2, memory="100MB"))
