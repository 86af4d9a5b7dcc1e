"""``--config``: any flag in a flat YAML file, under the command line's own."""

from __future__ import annotations

import pytest

from snugfit._cli.app import build
from snugfit._core.option_groups import BudgetOptions, MachineOptions, ModelOptions, TrainingOptions
from snugfit._core.request import Request
from snugfit.errors import UnknownNameError, UsageError


@pytest.fixture
def parse(tmp_path):
    """Parse tokens with a config file of the given text."""

    def run(text: str, *tokens: str):
        path = tmp_path / "options.yaml"
        path.write_text(text)
        line = ["train", *tokens, "--config", str(path)]
        _, bound, _ = build().parse_args(line, exit_on_error=False, print_error=False)
        return bound.arguments

    return run


def test_snake_and_kebab_keys_of_every_type(parse):
    text = "batch_size: 64\nweight-decay: 1e-3\naugment: false\nlr: null\noptimizer: adamw\nimage_size: 32\njson: true"
    arguments = parse(text)
    assert arguments["flags"].request() == Request(
        model=ModelOptions(image_size=32),
        training=TrainingOptions(batch_size=64, weight_decay=1e-3, augment=False, optimizer="adamw"),
    )
    assert arguments["output"].json is True


def test_on_and_off_are_words_and_truths_where_an_option_takes_them(parse):
    flags = parse("prune: on\nrecompute: off\naugment: off\ncrop: no\naccumulate: on")["flags"]
    assert (flags.strategy.prune, flags.strategy.recompute, flags.strategy.accumulate) == ("on", "off", True)
    assert (flags.training.augment, flags.training.crop) == (False, False)


@pytest.mark.parametrize(
    "text", ["epochs: &a [*a]", "[" * 999, "lr: !!float .nan", "epochs: 1\nepochs: 2", "seed: !!int " + "9" * 30]
)
def test_hostile_files_are_one_line_that_names_them(parse, text):
    with pytest.raises(UsageError, match=r"options\.yaml is not valid YAML") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_flags_win_over_the_file(parse):
    flags = parse("epochs: 3\nseed: 4\naugment: false\n", "--epochs", "5", "--augment")["flags"]
    assert flags.training == TrainingOptions(epochs=5, seed=4, augment=True)


def test_negative_flags_may_stand_in_the_file(parse):
    assert parse("no_augment: true")["flags"].training.augment is False
    assert parse("no-augment: false")["flags"].training.augment is True


def test_sizes_and_resume_and_an_empty_file(parse):
    assert parse("memory: 100MB")["flags"].budget.memory == "100MB"
    with pytest.raises(UsageError, match=r"--memory must be a positive size with its unit.*not '100000000'"):
        parse("memory: 100000000")
    assert parse("resume: runs/a")["resume"] == "runs/a"
    assert parse("# nothing\n", "--threads", "2")["flags"].machine == MachineOptions(threads=2)


def test_plain_words_and_numbers_are_read_as_on_the_command_line(parse):
    strategy = parse("prune: 0.5\nlasso: 1e-3\nscratch: on\nsample_wise: off")["flags"].strategy
    assert (strategy.prune, strategy.lasso, strategy.scratch, strategy.sample_wise) == ("0.5", 1e-3, "on", "off")


def test_numbers_that_are_names_keep_their_form(parse):
    text = "out: 2026_11_26\ndata_dir: 007\nweights: 1.10\ncache_dir: 12:30:00\nbatch_size: 010\nlr: 1e-2"
    request = parse(text)["flags"].request()
    folders = (request.machine.out, request.data.data_dir, request.model.weights, request.machine.cache_dir)
    assert folders == ("2026_11_26", "007", "1.10", "12:30:00")
    assert (request.training.batch_size, request.training.lr) == (10, 0.01), "as on the command line"


def test_unknown_keys_are_named_with_the_nearest_option(parse):
    with pytest.raises(UnknownNameError, match=r"unknown option 'batchsize'\. Did you mean 'batch-size'\?"):
        parse("batchsize: 3")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b", "not a list"),
        ("epochs: [1, 2]", "single value"),
        ("epochs: 1\nbatch_size: 2\nbatch-size: 3", "twice"),
        ("a: b: c", "not valid YAML"),
        ("config: other.yaml", "unknown option 'config'"),
        ("lr: .nan", r"--lr must be .*, not '\.nan'"),
        (f"seed: {'9' * 30}", "--seed must be a whole number"),
    ],
)
def test_unusable_files_are_usage_errors(text, says, parse):
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_exit_codes_of_bad_files_and_values(snugfit, tmp_path):
    (tmp_path / "bad.yaml").write_text("epochs: many\n")
    missing, bad = snugfit("train", "--config", "no.yaml"), snugfit("train", "--config", "bad.yaml")
    assert (missing.code, bad.code) == (2, 2)
    assert "no.yaml" in missing.err and "bad.yaml" in bad.err and "epochs" in bad.err


def test_json_in_the_file_makes_errors_json_too(snugfit, tmp_path):
    (tmp_path / "o.yaml").write_text("json: true\nmodel: diverged\n")
    outcome = snugfit("train", "--config", "o.yaml")
    assert outcome.code == 7
    assert outcome.json["error"]["type"] == "DivergedError"


def test_a_budget_of_all_processes_in_a_file_and_on_the_command_line(parse):
    assert parse("total_memory: auto")["flags"].budget == BudgetOptions(total_memory="auto")
    assert parse("total-memory: 400MB", "--total-memory", "300MB")["flags"].budget.total_memory == "300MB"
    with pytest.raises(UsageError, match="--memory 100MB and --total-memory 400MB"):
        parse("total_memory: 400MB", "--memory", "100MB")
