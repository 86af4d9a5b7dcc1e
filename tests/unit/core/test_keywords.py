"""Typed keywords are the options of a function, and so is the signature that editors complete from.

That type checkers know them is in ``typed_calls.py``, beside this file, which mypy reads.
"""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import snugfit
from snugfit._api.loop import LoopOptions
from snugfit._core.estimate import EstimateOptions
from snugfit._core.keywords import (
    DatasetKeywords,
    EstimateKeywords,
    ExportKeywords,
    LoopKeywords,
    PictureKeywords,
    PlanKeywords,
    ResumeKeywords,
    SplitKeywords,
)
from snugfit._core.option_groups import OnnxOptions, PictureOptions
from snugfit._core.request import Request
from snugfit._data.split import SplitOptions
from snugfit._data.user import DatasetOptions
from snugfit._training.own_parts import OwnParts

OPTIONS = {
    name: kind
    for group in fields(Request())
    for name, kind in get_type_hints(type(getattr(Request(), group.name)), include_extras=True).items()
}
WIDER = {
    str: (int, float, Path, Sequence[int], Sequence[float], Sequence[Any], Mapping[str, Any], tuple[int, int]),
    int: (tuple[int, int],),
}
"""Types of values that mean what a flag's text means."""
OTHERS = {
    "fit": (snugfit.fit, LoopKeywords, LoopOptions),
    "estimate": (snugfit.estimate, EstimateKeywords, EstimateOptions),
    "resume": (snugfit.resume, ResumeKeywords, OwnParts),
    "export": (snugfit.export, ExportKeywords, OnnxOptions),
    "draw_report": (snugfit.draw_report, PictureKeywords, PictureOptions),
    "from_dataset": (snugfit.from_dataset, DatasetKeywords, DatasetOptions),
    "load_boxed": (snugfit.load_boxed, SplitKeywords, SplitOptions),
}
"""Other functions with their keywords and options."""


def alternatives(kind):
    """The types of a union, each without what it is annotated with; a literal's values."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return {each for part in get_args(kind) for each in alternatives(part)}
    return set(get_args(kind)) if get_origin(kind) is Literal else {kind}


def plain(kind):
    """The types of a union, of functions and mappings without those of arguments, results and items."""
    return {each if get_origin(each) not in (Callable, Mapping) else get_origin(each) for each in alternatives(kind)}


def test_every_option_is_a_keyword_and_the_other_way_round():
    assert set(get_type_hints(PlanKeywords)) == {*OPTIONS, "metrics"} - {"model", "data"}


@pytest.mark.parametrize("name", sorted({*OPTIONS} - {"model", "data", "loss", "schedule", "optimizer"}))
def test_types_are_those_of_the_options_or_wider(name):
    here, there = alternatives(get_type_hints(PlanKeywords)[name]), alternatives(OPTIONS[name])
    assert there <= here and here - there <= {each for kind in there for each in WIDER.get(kind, ())}


@pytest.mark.parametrize("name", ["loss", "schedule", "optimizer"])
def test_functions_stand_for_what_python_alone_can_pass(name):
    here, there = alternatives(get_type_hints(PlanKeywords)[name]), alternatives(OPTIONS[name])
    functions = {each for each in here if get_origin(each) is Callable}
    assert len(functions) == 1 and here - functions == there - {"python"}


def test_the_signature_has_all_of_them_with_their_defaults():
    found = inspect.signature(snugfit.plan).parameters
    assert {*get_type_hints(PlanKeywords)} <= set(found)
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in found.values())
    assert [*found][:4] == ["model", "data", "budget", "subscribers"] and found["model"].default == "vgg16"
    defaults = {name: found[name].default for name in ("epochs", "memory", "strategy", "metrics")}
    assert defaults == {"epochs": 10, "memory": None, "strategy": "auto", "metrics": None}


def written_in(function):
    """Parameters that the function itself writes, by its code."""
    code = inspect.unwrap(function).__code__
    return {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}


@pytest.mark.parametrize(("function", "keywords", "kind"), OTHERS.values(), ids=OTHERS)
def test_keywords_of_other_functions_are_their_options(function, keywords, kind):
    options = {each.name: {} if each.default is MISSING else each.default for each in fields(kind)}
    hints, declared = get_type_hints(keywords), get_type_hints(kind, include_extras=True)
    assert {*hints} == {*options} - {*written_in(function), "input_shape"}
    for name, hint in hints.items():
        here, there = plain(hint), plain(declared[name])
        assert there <= here and here - there <= {each for one in there for each in WIDER.get(one, ())}
    found = inspect.signature(function).parameters
    assert {*found} == {*written_in(function), *hints}
    assert {name: found[name].default for name in hints} == {name: options[name] for name in hints}


def test_other_functions_call_their_options_as_a_plan_does():
    assert {*get_type_hints(LoopKeywords), "memory"} - {"keep_freed"} <= {*get_type_hints(PlanKeywords)}
    assert {*get_type_hints(EstimateKeywords)} - {"measure"} <= {*get_type_hints(PlanKeywords)}
    assert {*get_type_hints(ResumeKeywords)} <= {*get_type_hints(PlanKeywords)}
    assert {*get_type_hints(SplitKeywords)} - {"val_fraction"} <= {*get_type_hints(PlanKeywords)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", 100_000_000), ("input_shape", (3, 32, 32)), ("input_shape", {"a": (3, 9, 9), "b": "int64"}),
        ("image_size", (32, 48)), ("class_weights", [1.0, 2.0]),
        ("module_units", 2), ("prune", 0.5), ("out", Path("run")),
    ],
)  # fmt: skip
def test_values_that_mean_what_a_text_means_are_taken(name, value):
    assert Request.of(**{name: value}) != Request()


def test_what_is_no_option_is_still_refused_by_name():
    with pytest.raises(snugfit.errors.UsageError, match="unknown option 'epoch'"):
        snugfit.plan(epoch=3)
