"""Facts of units by hand: parameters, multiply-accumulates, saved bytes."""

from torch import nn

from snugfit._chain import Chain
from snugfit.profiling import unit_stats


def chain():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 16, 5),
    )  # fmt: skip
    return Chain.from_module(network.to("meta"), (3, 8, 8), "net")


def test_by_hand():
    first, second, head = unit_stats(chain())
    conv = 3 * 4 * 9 + 4
    assert first.parameters == conv + 2 * 4
    assert first.weight_bytes == 4 * (conv + 2 * 4 + 2 * 4) + 8
    assert first.macs == 3 * 4 * 9 * 64
    assert (first.output_shape, first.output_bytes) == ((4, 8, 8), 4 * 4 * 64)
    assert first.saved_bytes == 4 * 64 * (3 + 4 + 4) + 2 * 4 * 4 // 2

    assert second.parameters == 2 * 4 * 9
    assert second.macs == 2 * 4 * 9 * 16
    assert second.saved_bytes == 4 * 4 * (64 + 16)
    assert second.output_bytes == 4 * 4 * 16

    assert (head.parameters, head.macs, head.output_shape) == (64 * 5 + 5, 64 * 5, (5,))
    assert head.saved_bytes == 4 * 64
    assert (first.tracks, second.tracks, head.tracks) == (True, False, False)


def test_names_and_order_are_the_chains_and_parameters_add_up():
    made = chain()
    stats = unit_stats(made)
    assert [fact.name for fact in stats] == [unit.name for unit in made.all_units]
    assert sum(fact.parameters for fact in stats) == made.parameters


def test_nothing_is_allocated_or_changed():
    made = chain()
    unit_stats(made)
    assert all(p.is_meta and p.grad is None for unit in made.all_units for p in unit.module.parameters())
