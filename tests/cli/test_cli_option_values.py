"""Every option takes and refuses the same values in Python, in YAML and on the command line, in the same words."""

from __future__ import annotations

import dataclasses
import json
import math
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snugfit._cli.app import run
from snugfit._core.explanation import flags_of
from snugfit._core.known import check_names
from snugfit._core.options import read
from snugfit._core.request import Request
from snugfit.errors import UsageError

GROUPS = typing.get_type_hints(Request)
OPTIONS = {field.name: (group, kind) for group, kind in GROUPS.items() for field in dataclasses.fields(kind)}
COUNTS = [
    "classes", "max_train", "max_val", "devices", "epochs", "batch_size", "batch_limit",
    "block_units", "views", "interval", "importance_batch", "replicas", "threads", "patience",
]  # fmt: skip
SWITCHES = ["augment", "crop", "adaptive_batch", "saturation_stop", "accumulate", "lean"]
NAMES = [
    "task", "optimizer", "optimizer_state", "schedule", "keep", "precision", "weight_dtype", "strategy", "aim",
    "residency", "cache", "cache_dtype", "feedback_rule", "scheme", "importance", "prune_importance", "sample_wise",
    "weight_storage", "recompute", "weight_update", "rest", "tile_sizes", "scratch", "activations",
    "batch_norm", "loss",
]  # fmt: skip
PATHS = [
    "model", "weights", "data", "data_dir", "local_loss", "cache_dir", "retrain_data", "cluster", "out",
    "profile_cache",
]  # fmt: skip
SIZES = ["memory", "total_memory", "host_memory", "storage"]
REFUSED = {
    **{key: [0, -1, 1.5, 2.0, True, "3", "", 10**12, math.nan, math.inf, [1], b"1"] for key in COUNTS},
    **{key: [0, 1, 1.0, "maybe", "", []] for key in SWITCHES},
    **{key: ["float23", "", 16, True, 1.5, ["sgd"]] for key in NAMES},
    **{key: ["", " ", "a\x00b", 3, 1.5, True, [], b"runs"] for key in PATHS},
    **{key: ["100", "0", "0MB", "12parsecs", "-1MB", "", 100, 0, -1, 999999, 1.5, True, math.nan, []] for key in SIZES},
    "image_size": [0, -1, 1.5, 2.0, True, "", "0", "96x", "x96", "8x8x8", "1x70000", 10**12, math.nan, [1, 2, 3], b"1"],
    "profile_time": ["soon", "", "0s", "-1s", 10, True],
    "workers": [-1, 1025, 0.5, True, "two", "", "Auto"],
    "seed": [-1, 2**32, 0.5, True, "0"],
    "retrain_epochs": [-1, 1.5, True, "8"],
    "time_ratio": [0, -0.5, 1.01, "0.5", True, math.nan, math.inf],
    "warmup_epochs": [-0.5, 10, "1", True, math.nan, math.inf],
    "lr": [0, -0.1, "0.1", True, math.nan, math.inf, 10**400],
    **{key: [-1e-9, "0", True, math.nan, math.inf] for key in ["weight_decay", "focal_gamma"]},
    **{key: [-0.01, 1.01, "0.5", True, math.nan] for key in ["erase", "rho", "exit_tolerance"]},
    **{key: [-0.1, 1, "0.1", True, math.nan] for key in ["lasso", "label_smoothing"]},
    **{key: [0, -1, "1", True, math.nan, math.inf] for key in ["side_width", "side_lr"]},
    **{key: [0, -1, "1", True, math.nan, math.inf] for key in ["clip_norm", "mixup", "cutmix"]},
    "ema": [0, 1, -0.5, "0.9", True, math.nan],
    "class_weights": ["unbalanced", "", "1,", "0,1", "-1,2", "nan,1", 2, 1.5, True, [], [0, 1], ["1"], b"12"],
    "prune": ["auto ", "0", "1", "-0.5", "nan", 0, 1, True, "half"],
    "module_units": ["0", "-1", "1.5", "", "Auto", "all", True],
    "tiles": ["2", "2x", "0x2", "2X2", "2x3x4", 4, True],
    **{key: ["0", "0-", "0-4,4-8", "none", 4, True] for key in ["forward_groups", "backward_groups"]},
    "device": ["tpu", "meta", "cuda:", "cuda:x", "CPU", 0, True],
    "input_shape": [
        "3x32",
        "3x32x32x32",
        "0x32x32",
        "3x32x-1",
        "1025x8x8",
        "3x32x65537",
        "3,32,32",
        "x",
        "",
        3,
        True,
        [],
        (3, 32),
        (3, 32.0, 32),
        (True, 8, 8),
        (0, 8, 8),
        b"333",
    ],
}
TAKEN = {
    **{key: [1, 7] for key in COUNTS},
    **{key: [True, False] for key in SWITCHES},
    **{key: ["a", "a b", "ü.png", "x=y", "[1]", "{", "none", "-"] for key in PATHS},
    **{key: ["1B", "100MB", "1.5 GB", "512MiB"] for key in SIZES},
    "total_memory": ["auto", "400MB"],
    "profile_time": ["10s", "1m30s"],
    "workers": ["auto", "0", "1", "1024"],
    "seed": [0, 2**32 - 1],
    "retrain_epochs": [0, 3],
    "time_ratio": [1e-3, 1],
    "warmup_epochs": [0, 0.5, 3],
    "lr": [1e-9, 0.1, 100],
    **{key: [0, 1e-4] for key in ["weight_decay"]},
    "focal_gamma": [],
    **{key: [0, 0.5, 1] for key in ["erase", "rho", "exit_tolerance"]},
    **{key: [0, 0.999] for key in ["lasso", "label_smoothing"]},
    **{key: [0.25, 2] for key in ["side_width", "side_lr"]},
    "class_weights": ["balanced", "2", "1,2.5"],
    **{key: [1e-3, 1, 5.5] for key in ["clip_norm", "mixup", "cutmix"]},
    "ema": [0.5, 0.9999],
    "prune": ["auto", "on", "off", "0.5", "1e-2"],
    "module_units": ["auto", "1", "12"],
    "tiles": ["auto", "2x3"],
    **{key: ["auto", "one", "every", "0-4 | 4-11"] for key in ["forward_groups", "backward_groups"]},
    "device": ["cpu", "cuda", "cuda:1"],
    "image_size": ["1", "96x160", "96X96", "65536"],
    "input_shape": ["1x1x1", "3x224x224", "3X32X64"],
}


def in_python(name: str, value: object) -> Request | UsageError:
    group, kind = OPTIONS[name]
    try:
        return Request(**{group: kind(**{name: value})})
    except UsageError as error:
        return error


def test_every_option_has_its_table():
    assert set(OPTIONS) == set(REFUSED) == set(TAKEN) | set(NAMES)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_wrong_types_and_ranges_are_refused_by_flag_and_value(name, value):
    error = in_python(name, value)
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert f"--{name.replace('_', '-')} " in str(error)
    assert str(value)[:20].replace("\0", "\\x00") in str(error) and len(str(error).splitlines()) == 1


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in TAKEN.items() for value in values])
def test_right_values_are_kept(name, value):
    request = in_python(name, value)
    assert getattr(getattr(request, OPTIONS[name][0]), name) == value
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_class_weights_from_python_may_be_any_sequence_of_numbers():
    for value in ([1, 2.5], (1.0, 2.5), np.array([1, 2.5])):
        assert in_python("class_weights", value).training.class_weights == "1.0,2.5"


def test_a_shape_from_python_may_be_any_sequence_of_whole_numbers():
    for value in ([3, 32, 32], (3, 32, 32), np.array([3, 32, 32])):
        assert in_python("input_shape", value).data.input_shape == "3x32x32"


@pytest.fixture
def seen(monkeypatch, tmp_path, capfd):
    """Give options on the command line or in YAML: the request that comes of them, or exit code and message."""
    caught = []
    monkeypatch.setattr(
        "snugfit._cli.train.run_job", lambda job, server: caught.append(Request.from_json(job["request"])) or {}
    )
    monkeypatch.setattr("snugfit._cli.options.require_weights", lambda path: None)
    monkeypatch.chdir(tmp_path)

    def of(*tokens: str, yaml: str | None = None) -> Request | tuple[int, str]:
        caught.clear()
        capfd.readouterr()
        if yaml is not None:
            (tmp_path / "options.yaml").write_text(yaml, encoding="utf-8")
            tokens = (*tokens, "--config", "options.yaml")
        code = run(["train", *tokens])
        return caught[0] if caught else (code, capfd.readouterr().err.splitlines()[0])

    return of


plain = st.one_of(
    st.integers(-3, 300),
    st.integers(-(2**63), 2**63 - 1),  # YAML's; more is refused in words of its own
    st.floats(-2, 2),
    st.sampled_from([math.inf, math.nan, 1e-9]),
    st.sampled_from([value for values in (*REFUSED.values(), *TAKEN.values()) for value in values]),
).filter(lambda value: isinstance(value, (int, float, str)) and "\0" not in str(value)[:20])


def test_values_mean_the_same_wherever_they_are_given(seen):
    """On the command line and in YAML as text, what Python makes of the value that the text says."""

    @settings(max_examples=30, deadline=None)
    @given(name=st.sampled_from(sorted(OPTIONS.keys() - {"input_shape"})), value=plain)  # it is not for train
    def check(name, value):
        _group, kind = OPTIONS[name]
        hint = typing.get_type_hints(kind, include_extras=True)[name]
        text = f"{value:g}" if isinstance(value, float) else str(value)
        meant = read(hint, text)
        expected = in_python(name, meant)
        try:  # names, which Python checks when it plans
            check_names(expected) if isinstance(expected, Request) else None
        except UsageError as error:
            expected = error
        if isinstance(expected, UsageError):
            expected = (2, f"error: {expected}".splitlines()[0])
        flag = name.replace("_", "-")
        assert seen(f"--{flag}={text}") == expected
        assert seen(yaml=f"{name}: {json.dumps(text)}") == expected
        if meant == value and not isinstance(meant, str):
            assert seen(yaml=f"{name}: {json.dumps(meant)}") == expected
        if isinstance(expected, Request):
            assert seen(*flags_of(expected)) == expected

    check()
