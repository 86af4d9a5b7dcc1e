"""What the test of an exit holds, compared with a pass of whole exit models on the meta device."""

import copy

import pytest
import torch
from strategy_samples import HARDWARE, profile, workload
from torch import nn

from snugfit._chain import Chain
from snugfit.local.assignment import Layout
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.blockwise.exit_costs import bytes_of_test, exit_costs, in_memory
from snugfit.strategies.blockwise.strategy import TEST_IMAGES, Blockwise

SHAPE = (3, 16, 16)


def conv(width, outputs):
    return nn.Conv2d(width, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def chain():
    network = nn.Sequential(
        *conv(3, 8), *conv(8, 16), nn.MaxPool2d(2), *conv(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)
    )
    return Chain.from_module(network.to("meta"), SHAPE)


def exit_peak(layout, index, images):
    """Peak tensor bytes of a whole exit model, without its weights."""
    model = copy.deepcopy(layout.exit_model(index)).eval()
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    with torch.no_grad():
        return tensor_peak_bytes(lambda: model(torch.empty((images, *SHAPE), device="meta")), [model]) - held


@pytest.mark.parametrize("loss", ["aan", "classic", "lls-mxm", "auglocal:depth=1"])
def test_no_exit_holds_more_and_the_largest_nearly_as_much(loss):
    """The bound is looser by one layer's weights, and by the images as read; they are smaller than a feature map."""
    layout, images = Layout.of(chain(), loss, 10), 5
    bound = max(weights + size * images for weights, size in exit_costs(layout))
    peaks = [exit_peak(layout, index, images) for index in range(len(layout))]
    models = [layout.exit_model(index) for index in range(len(layout))]
    largest_layer = max(tensor.nbytes for model in models for tensor in model.parameters())
    assert max(peaks) <= bound <= max(peaks) + largest_layer + 2 * images * 3 * 16 * 16 * 5


def test_weights_of_functional_calls_count_as_those_of_layers_do():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(64, 8, 3, 3))

        def forward(self, x):
            return nn.functional.conv2d(x, self.weight, padding=1)

    def weights_of(layer):
        network = nn.Sequential(*conv(3, 8), layer, *conv(64, 4), nn.Flatten(), nn.Linear(1024, 2)).to("meta")
        return max(weights for weights, _ in exit_costs(Layout.of(Chain.from_module(network, SHAPE), "aan", 2)))

    assert weights_of(Functional()) >= weights_of(nn.Conv2d(8, 64, 3, padding=1, bias=False))


def test_one_exit_holds_what_its_own_model_does():
    layout, images = Layout.of(chain(), "aan", 10), 5
    for index in range(len(layout)):
        size = max(size for _, size in exit_costs(layout, index))
        assert 0 <= size * images - exit_peak(layout, index, images) <= 2 * images * 3 * 16 * 16 * 5


def test_layers_that_others_exceed_are_left_out():
    found = exit_costs(Layout.of(chain(), "aan", 10))
    assert list(found) == sorted(found, reverse=True)
    assert [size for _, size in found] == sorted({size for _, size in found})


def test_weights_are_mapped_and_in_memory_twice_on_the_processor_and_whole_elsewhere():
    made, layers = profile({}, units=("a", "b", "head")), ((100, 1), (10, 7))
    assert [bytes_of_test(in_memory(layers, made, "cpu"), images) for images in (1, 100)] == [201, 720]
    resident = sum(unit.weight_bytes for unit in made.units)
    assert bytes_of_test(in_memory(layers, made, "cuda"), 3) == resident + 21


@pytest.mark.parametrize(
    ("headroom", "limit", "layers", "images"),
    [
        (90, 64, ((10, 7),), 10),
        (250, 64, ((100, 1), (10, 7)), 28),
        (1e9, 64, ((10, 7),), TEST_IMAGES),
        (1e9, 9, ((10, 7),), 9),
        (5, 64, ((10, 7),), 1),
        (float("inf"), 64, ((10, 7),), TEST_IMAGES),
    ],
)
def test_as_many_images_as_fit_and_weights_take_anyway(headroom, limit, layers, images):
    """Twice 100 bytes of weights take as much as 28 images."""
    made = Blockwise(local_loss="aan", exit_costs=(("aan", layers),))
    assert made._tested_images(profile({}, units=("a", "head")), HARDWARE, headroom, limit) == images


def test_a_prepared_strategy_knows_each_loss_that_it_considers():
    small = Chain.from_module(
        nn.Sequential(*conv(3, 4), *conv(4, 4), nn.Flatten(), nn.Linear(256, 10)).to("meta"), (3, 8, 8)
    )
    for loss in ("aan", "auto"):
        made = Blockwise(local_loss=loss).prepared(workload(), small)
        named = [name for name, _ in made.exit_costs]
        assert named == (["aan"] if loss == "aan" else [name for name, *_ in made.loss_costs])
