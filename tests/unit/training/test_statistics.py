"""Statistics taken anew, against those of all that a norm has read, put together in float64."""

import pytest
import torch
from torch import nn

from snugfit._chain import tracking_norms
from snugfit._training.statistics import recompute_statistics
from snugfit.lean import use_lean

CPU = torch.device("cpu")
LAYERS = {
    1: (nn.Conv1d, nn.BatchNorm1d, (12,)),
    2: (nn.Conv2d, nn.BatchNorm2d, (6, 5)),
    3: (nn.Conv3d, nn.BatchNorm3d, (4, 3, 5)),
}


def network(dimensions=2, **norm):
    torch.manual_seed(0)
    convolution, kind, _ = LAYERS[dimensions]
    return nn.Sequential(
        convolution(2, 4, 3, padding=1), kind(4, **norm), nn.ReLU(), convolution(4, 3, 3, padding=1), kind(3, **norm),
        nn.Flatten(), nn.LazyLinear(5), nn.BatchNorm1d(5, **norm),
    )  # fmt: skip


def batches(*sizes, dimensions=2):
    """Batches whose means differ much, of all sizes."""
    torch.manual_seed(1)
    shape = LAYERS[dimensions][2]
    return [(3 * index + torch.randn(size, 2, *shape), torch.zeros(size)) for index, size in enumerate(sizes)]


def told(module, seen):
    """Mean and unbiased variance of what every norm reads in training mode, of all values together."""
    read = {}
    norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    hooks = [
        norm.register_forward_pre_hook(
            lambda norm, given: read.setdefault(norm, []).append(given[0].transpose(0, 1).flatten(1).double())
        )
        for norm in norms
    ]
    with torch.no_grad():
        for inputs, _ in seen:
            module.train()(inputs)
    for hook in hooks:
        hook.remove()
    whole = {norm: torch.cat(parts, 1) for norm, parts in read.items()}
    return [(whole[norm].mean(1), whole[norm].var(1)) for norm in norms if norm in whole]


def held(module):
    return [(norm.running_mean.double(), norm.running_var.double()) for norm in module.modules() if stats(norm)]


def stats(layer):
    return getattr(layer, "running_mean", None) is not None


def taken(module, seen, **options):
    norms = tracking_norms(module.train())
    recompute_statistics(norms, module.eval(), iter(seen), CPU, **options)
    return module


@pytest.mark.parametrize("dimensions", LAYERS)
@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
def test_statistics_are_those_of_all_batches_together(dimensions, momentum):
    module, seen = network(dimensions, momentum=momentum), batches(8, 3, 2, dimensions=dimensions)
    module(seen[0][0])
    expected = told(module, seen)
    torch.testing.assert_close(held(taken(module, seen)), expected, rtol=1e-5, atol=1e-5)
    assert [norm.momentum for norm in module.modules() if stats(norm)] == [momentum] * 3
    apart = expected[0][0] - told(module, seen[:1])[0][0]
    assert apart.abs().max() > 0.5, "an average of variances would be another"


def test_neither_counts_of_batches_nor_hooks_nor_training_modes_are_left():
    module, seen = network(), batches(8, 8)
    module(seen[0][0])
    counts = [int(norm.num_batches_tracked) for norm in module.modules() if stats(norm)]
    taken(module, seen)
    assert [int(norm.num_batches_tracked) for norm in module.modules() if stats(norm)] == counts
    assert not any(layer.training or layer._forward_hooks for layer in module.modules())


def test_what_went_before_is_forgotten_even_where_it_was_not_finite():
    module, seen = network(), batches(8, 4)
    module(seen[0][0])
    expected = [(mean.clone(), variance.clone()) for mean, variance in held(taken(module, seen))]
    module[1].running_var.fill_(1e30)
    module[4].running_mean.fill_(-1e30)
    torch.testing.assert_close(held(taken(module, seen)), expected, rtol=0, atol=0)


def test_dropout_is_off_as_when_weights_are_judged():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(2))
    seen = batches(8, 8)
    taken(module, seen)
    whole = torch.cat([inputs for inputs, _ in seen]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(module[1].running_var, whole.var(1))


def test_frozen_norms_and_those_without_statistics_stay_as_they_are():
    module, seen = network(), batches(8, 8)
    module[4] = nn.BatchNorm2d(3, track_running_stats=False)
    module(seen[0][0])
    before = module[1].running_mean.clone()
    norms = [norm for norm in tracking_norms(module.train()) if norm is not module[1]]
    assert [type(norm) for norm in norms] == [nn.BatchNorm1d]
    recompute_statistics(norms, module.eval(), iter(seen), CPU)
    assert torch.equal(module[1].running_mean, before) and module[4].running_mean is None


def test_without_norms_no_batch_is_read():
    drawn = iter(batches(8, 8))
    taken(nn.Sequential(nn.Flatten(), nn.Linear(60, 3)), drawn)
    assert len(list(drawn)) == 2


def test_a_norm_that_is_not_reached_keeps_its_statistics():
    module = nn.Sequential(nn.BatchNorm2d(2), nn.Identity())
    module[1].unused = nn.BatchNorm2d(7)
    module[1].unused.running_mean.fill_(5.0)
    taken(module, batches(8))
    assert torch.equal(module[1].unused.running_mean, torch.full((7,), 5.0)) and module[0].running_mean.any()


def test_a_norm_that_is_called_twice_has_the_statistics_of_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(2)

        def forward(self, inputs):
            return self.norm(self.norm(inputs) * 3 + 7)

    module, seen = Twice(), batches(8, 5)
    expected = told(module, seen)
    torch.testing.assert_close(held(taken(module, seen)), expected, rtol=1e-5, atol=1e-5)


def test_norms_among_lean_operators_are_reached():
    module, seen = network(), batches(8, 4)
    module(seen[0][0])
    expected = told(module, seen)
    use_lean(module)
    torch.testing.assert_close(held(taken(module, seen)), expected, rtol=1e-5, atol=1e-5)


def test_an_interrupted_pass_leaves_momentum_and_counts():
    module, seen = network(), batches(8, 4)
    module(seen[0][0])

    def failing():
        yield seen[0]
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        taken(module, failing())
    assert [(norm.momentum, int(norm.num_batches_tracked)) for norm in module.modules() if stats(norm)] == [
        (0.1, 1)
    ] * 3


def test_a_norm_that_is_called_with_a_keyword_is_taken_too():
    norm, inputs = nn.BatchNorm2d(3), torch.randn(6, 3, 2, 2)
    recompute_statistics([norm], lambda x: norm(input=x), [(inputs, None)], CPU)
    torch.testing.assert_close(norm.running_mean, inputs.mean((0, 2, 3)))
