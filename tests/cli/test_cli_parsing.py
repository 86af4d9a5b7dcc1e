"""Flags, their defaults and their help come from the typed groups of ``core.request``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing

import docstring_parser
import pytest

from snugfit._cli.app import CLUSTER_COMMANDS, COMMAND_GROUPS, COMMANDS, LATER, build
from snugfit._core.request import Request

GROUPS = typing.get_type_hints(Request)
OPTIONS = [(name, field) for name, kind in GROUPS.items() for field in dataclasses.fields(kind)]
IDS = [field.name for _, field in OPTIONS]
OTHER = {int: 7, float: 0.25, str: "word", bool: None}


def parse(*tokens: str) -> dict[str, typing.Any]:
    _, bound, _ = build().parse_args(list(tokens), exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def request_of(*tokens: str) -> Request:
    return parse(*tokens)["flags"].request()


def different_value(group: str, field: dataclasses.Field[typing.Any]) -> typing.Any:
    hint = typing.get_type_hints(GROUPS[group])[field.name]
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    kinds = list(typing.get_args(kinds[0])) or kinds  # choices, where None is allowed beside them
    if isinstance(kinds[0], str):
        return next(choice for choice in kinds if choice != field.default)
    return not field.default if kinds[0] is bool else OTHER[kinds[0]]


def test_no_flags_give_the_defaults_of_the_dataclasses():
    assert request_of("plan", "--epochs", "10") == Request()


@pytest.mark.parametrize(("group", "field"), OPTIONS, ids=IDS)
def test_every_option_is_a_flag_that_sets_its_field_alone(group, field):
    value = different_value(group, field)
    if field.name in ("memory", "total_memory", "host_memory", "storage"):
        value = "100MB"
    if field.name == "strategy":
        value = "blockwise"
    value = {
        "prune": "0.5",
        "tiles": "2x3",
        "forward_groups": "0-4 | 4-11",
        "backward_groups": "one",
        "device": "cpu",
        "model": "vgg8",
        "data": "mnist",
        "retrain_data": "pets",
        "local_loss": "lls:basis=cosine",
        "module_units": "3",
        "workers": "3",
        "profile_time": "10s",
        "class_weights": "1,2.5",
        "input_shape": "3x32x32",
        "image_size": "96x160",
        "cluster": __file__,
    }.get(field.name, value)
    flag = "--" + ("no-" if value is False else "") + field.name.replace("_", "-")
    needed = {
        "input_shape": {"classes": 7},
        "focal_gamma": {"loss": "focal"},
        "tile_sizes": {"cluster": __file__},
    }.get(field.name, {})
    more = [f"--{name}={number}" for name, number in needed.items()]
    request = request_of("train", flag, *([] if isinstance(value, bool) else [str(value)]), *more)
    given = dataclasses.replace(GROUPS[group](), **{field.name: value}, **needed)
    expected = dataclasses.replace(Request(), **{group: given})
    assert request == expected


@pytest.mark.parametrize("command", ["plan", "train", "profile"])
def test_help_describes_every_option(command, snugfit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shown = " ".join(snugfit(command, "--help-all").out.split())
    for kind in GROUPS.values():
        for entry in docstring_parser.parse(kind.__doc__).params:
            assert "--" + entry.arg_name.replace("_", "-") in shown
            assert " ".join(entry.description.replace("``", "").split()) in shown


@pytest.mark.parametrize(
    "command", ["plan", "train", "evaluate", "predict", "profile", "estimate", "report", "export", "verify"]
)
def test_every_command_has_an_example_and_the_common_flags(command, snugfit):
    shown = snugfit(command, "--help-all").out
    assert f"snugfit {command} " in shown.partition("For example")[2]
    assert all(flag in shown for flag in ("--json", "--quiet", "--debug", "--config"))


NEEDED = {
    "plan": {"--model", "--config", "--data", "--memory", "--strategy"},
    "train": {"--model", "--config", "--data", "--memory", "--strategy", "--out"},
    "profile": {"--model", "--config", "--data", "--input-shape", "--tensors"},
    "estimate": {"--model", "--config", "--input-shape", "--memory"},
    "evaluate": {"--data", "--split", "--json"},
    "predict": {"--out", "--top", "--json"},
    "report": {"--pictures", "--json"},
    "export": {"--format", "--out", "--int8", "--json"},
    "verify": {"--json"},
    "cluster launch": {"--processes", "--hosts", "--dry-run", "--max-restarts"},
    "cluster doctor": {"--processes", "--hosts", "--out", "--json"},
    "cluster plan": {"--model", "--image-size", "--cluster", "--tiles", "--json"},
}
"""Flags of the short help that may not be missing."""


@pytest.mark.parametrize("command", [*COMMANDS, *(f"cluster {each}" for each in CLUSTER_COMMANDS)])
def test_the_short_help_is_a_screen_with_a_line_for_each_common_flag(command, snugfit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = command.split()
    shown = snugfit(*words, "--help")
    lines = shown.out.splitlines()
    assert shown.code == 0 and len(lines) <= 20 and max(map(len, lines)) <= 80
    assert lines[-1] == f"All flags: snugfit {command} --help-all"
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert NEEDED[command] <= {*flags} <= {*snugfit(*words, "--help-all").out.split()}
    whole = shown.out.replace(" \\\n", "").splitlines()
    examples = [line.split()[1:] for line in whole if line.startswith("  snugfit ")]
    assert 1 <= len(examples) <= 3 and all(parse(*example) for example in examples)
    assert snugfit(*words, "-h").out == snugfit(*words, "--quiet", "--help").out == shown.out


@pytest.mark.parametrize(
    ("command", "usage", "places"),
    [
        ("train", "train [OPTIONS]", ()),
        ("export", "export RUN [OPTIONS]", ("RUN",)),
        ("predict", "predict RUN FOLDER [OPTIONS]", ("RUN", "FOLDER")),
        ("cluster launch", "cluster launch [OPTIONS] -- COMMAND", ("-- COMMAND",)),
        ("cluster plan", "cluster plan [OPTIONS]", ()),
    ],
)
def test_the_short_help_names_what_a_command_needs(command, usage, places, snugfit):
    shown = snugfit(*command.split(), "--help").out
    assert shown.startswith(f"Usage: snugfit {usage}\n")
    for place in places:
        assert f"\n  {place} " in shown


def test_the_short_help_breaks_lines_between_words(snugfit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    whole = snugfit("train", "--help").out
    monkeypatch.setenv("COLUMNS", "60")
    narrow = snugfit("train", "--help").out
    assert narrow.replace(" \\\n", " ").split() == whole.split() and max(map(len, narrow.splitlines())) <= 60


def test_an_unknown_flag_points_to_the_help_that_lists_all(snugfit):
    assert "`snugfit train --help-all` lists the options." in snugfit("train", "--epocs", "3").err
    assert "`snugfit report --help-all` lists the options." in snugfit("report", "--epocs", "3").err
    assert "`snugfit cluster doctor --help-all` lists the options." in snugfit("cluster", "doctor", "--epocs", "3").err


def test_alone_it_prints_a_screen_for_beginners(snugfit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = snugfit()
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and len(lines) <= 20 and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ") and "snugfit" not in line] == [
        name for name in COMMANDS if name not in LATER
    ]
    assert lines[-1].endswith("All commands: snugfit --help-all")
    assert outcome.out == snugfit("--help").out == snugfit("-h").out


def test_cluster_alone_prints_a_screen_with_its_commands(snugfit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = snugfit("cluster")
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and len(lines) <= 20 and max(map(len, lines)) <= 80
    whole = outcome.out.replace(" \\\n", "").splitlines()
    examples = [line.split()[1:] for line in whole if line.startswith("  snugfit ")]
    assert [example[1] for example in examples] == ["doctor", "plan", "launch"]
    assert all(parse(*example) for example in examples)
    assert all(f"\n  {name} " in outcome.out for name in CLUSTER_COMMANDS)
    assert outcome.out == snugfit("cluster", "--help").out == snugfit("cluster", "-h").out
    assert "for networks that you trust" in snugfit("cluster", "--help-all").out


def test_all_help_has_every_command_in_its_group(snugfit):
    shown = snugfit("--help-all").out
    titles = {title: shown.index(f"─ {title} ─") for title in COMMAND_GROUPS}
    assert [*titles] == sorted(titles, key=titles.__getitem__)
    for title, commands in COMMAND_GROUPS.items():
        part = shown[titles[title] :].partition("╰")[0]
        assert all(f"│ {command} " in part for command in commands)
    assert "│ cluster " in shown[titles["Training"] :].partition("╰")[0]


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_the_examples_of_the_help_parse(flag, snugfit):
    shown = snugfit(flag).out
    examples = [words[1:] for line in shown.splitlines() if line[:1] == " " and (words := line.split())[0] == "snugfit"]
    assert [example[0] for example in examples] == ["plan", "estimate", "train", "predict"]
    for example in examples:
        assert parse(*example)


def test_version(snugfit):
    import snugfit as package

    assert snugfit("--version").out.split() == ["snugfit", package.__version__]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["train", "--epocs", "3"], "--epochs"),
        (["trian"], '"train"'),
        (["train", "--optimizer", "sdg"], "unknown --optimizer 'sdg'. Did you mean 'sgd'?"),
        (["train", "--epochs", "many"], "--epochs must be a whole number from 1 to 1,000,000,000, not 'many'"),
        (["train", "--augment=maybe"], "--augment must be true or false, not 'maybe'"),
        (["train", "--memory", "100"], "not '100'. Did you mean 100MB or 100MiB?"),
        (["train", "--epochs"], "error: --epochs needs a value.\n`snugfit train --help-all`"),
        (["estimate", "--model", "vgg8"], "error: snugfit estimate needs --input-shape.\n"),
        (["estimate", "--input-shap", "3x8x8"], "Did you mean --input-shape"),
        (["evaluate"], "error: snugfit evaluate needs RUN.\n"),
        (["train", "stray"], "stray"),
        (["predict", "run"], "FOLDER"),
        (["plan", "--memory", "12parsecs"], "must be a positive size"),
        (["plan", "--memory", "0"], "positive"),
        (["plan", "--time-ratio", "2"], "above 0 and at most 1, not 2"),
        (["plan", "--aim", "speed"], "Known: accuracy, memory, time"),
        (["plan", "--devices", "0"], "--devices must be"),
        (["plan", "--compare", "--compare-steps", "-1"], "--compare-steps must be"),
        (["plan", "--compare-steps", "3"], "add --compare"),
        (["plan", "--loss", "focal", "--label-smoothing", "0.1"], "--label-smoothing applies to cross entropy"),
        (["train", "--class-weights", "1,0"], "--class-weights must be balanced, or a number above 0 for each class"),
        (["plan", "--optimizer", "schedulefree", "--schedule", "cosine"], "has no --schedule cosine"),
        (
            ["plan", "--schedule", "one-cycle", "--warmup-epochs", "1"],
            "--warmup-epochs 1 is not supported with --schedule",
        ),
        (
            ["plan", "--optimizer", "schedulefree", "--weight-dtype", "bfloat16"],
            "which averages weights; use sgd or adamw",
        ),
        (["plan", "--strategy", "blockwize"], "'blockwise'"),
        (["predict", "run", "folder", "--top", "0"], "--top must be"),
        (["evaluate", "run", "--split", "tst"], "Did you mean 'test'?"),
        (["export", "run", "--format", "onxx"], "Did you mean 'onnx'?"),
        (["report", "run", "--threads", "1.5"], "--threads must be"),
        (["cluster", "doctor", "--port", "70000"], "--port must be"),
        (["cluster", "doctor", "--timeout", "10"], "--timeout must be a duration"),
        (["cluster", "plan", "--model", "m", "--image-size", "-1"], "--image-size must be"),
        (["train", "--resume", "run", "--epochs", "3", "--lr", "1"], "--epochs, --lr"),
        (["train", "--resume", "run", "--epochs", "10"], "leave out all other options of a run"),
    ],
)
def test_usage_errors_are_two_lines_at_most_and_exit_2(tokens, says, snugfit):
    outcome = snugfit(*tokens)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and says in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    answered = snugfit(*tokens, "--json")
    assert answered.code == 2
    assert answered.json["error"]["code"] == 2


def test_help_loads_no_command_and_the_worker_no_parser():
    shown = "print(*[name for name in {names} if name in sys.modules], file=sys.stderr)"
    for code, names in (
        (
            "from snugfit._cli.app import run; run(['--help']); run(['--help-all'])",
            ["snugfit._cli.options", "psutil", "torch"],
        ),
        ("import snugfit._cli.worker, snugfit._api", ["cyclopts", "attrs", "snugfit._cli.options", "matplotlib"]),
    ):
        command = [sys.executable, "-c", f"import sys; {code}; {shown.format(names=names)}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
        assert done.stderr.split() == []


def test_a_summary_is_the_first_paragraph_of_the_commands_own_help(snugfit):
    shown = " ".join(snugfit("--help-all").out.replace("│", " ").split())
    for command in COMMANDS:
        first = snugfit(command, "--help").out.partition("\n\n")[2].partition("\n\n")[0]
        assert " ".join(first.split()) in shown, command
