"""In a tight budget training begins in a process that measured nothing, and in which more images fit."""

import json

from command_line import snug


def options():
    return {
        **{"model": "resnet20", "data": "digits", "strategy": "checkpoint", "image_size": 32, "memory": "28MB"},
        **{"batch_size": 64, "max_train": 64, "max_val": 20, "epochs": 1, "threads": 1, "profile_cache": "off"},
    }


def planned_here():
    """Micro-batch, and bytes in use before a step, where training would begin in the process that measured."""
    import snugfit
    from snugfit._core import forking

    forking.LEAST_FREE_BYTES = 2**60
    snugfit.prepare_process(1)
    planned = snugfit.plan(**options())
    return [planned.plan.choice.settings["micro_batch"], planned.profile.base_bytes]


def test_more_images_fit_where_nothing_was_measured(tmp_path, fresh_process):
    flags = [text for name, value in options().items() for text in (f"--{name.replace('_', '-')}", str(value))]
    run = json.loads(snug("train", *flags, "--out", "run", "--json", "--quiet", cwd=tmp_path).stdout)
    images, base = fresh_process(planned_here, helpers=(options,), folder=tmp_path)["planned_here"]
    assert run["settings"]["micro_batch"] > images and run["profile"]["base_bytes"] < base
    (phase,) = run["phases"]
    assert phase["measured_peak_bytes"] <= phase["predicted_peak_bytes"] <= 28_000_000
    assert run["measured"]["peak_bytes"] == phase["measured_peak_bytes"] and (tmp_path / "run" / "report.html").exists()


def images_of(strategy):
    """Images at a time of each strategy that fits, in a budget that has room for few."""
    import snugfit

    snugfit.prepare_process(1)
    planned = snugfit.plan(**{**options(), "strategy": strategy})
    return {each.strategy: min(each.batches) for each in planned.plan.candidates if each.feasible}


def beside_others():
    return images_of("auto")


def alone():
    return images_of("backprop")


def test_a_strategy_has_as_much_room_beside_others_as_alone(fresh_process, tmp_path):
    """Memory at rest differs by 0.2 MB between two processes, which is one image here."""
    found = [fresh_process(each, helpers=(options, images_of), folder=tmp_path) for each in (beside_others, alone)]
    together, (by_itself,) = found[0]["beside_others"], found[1]["alone"].values()
    assert set(together) == {"backprop", "checkpoint", "blockwise"}
    assert abs(together["backprop"] - by_itself) <= 1
