"""Blocks that run sample by sample: the whole batch's numbers, in the memory of one sample."""

import copy

import pytest
import torch
from small_networks import nodes_of
from torch import nn

from snugfit import _models as models
from snugfit._chain import Chain, find_blocks
from snugfit.errors import ModelError, UsageError
from snugfit.lean import run_per_sample, store_int8, use_lean
from snugfit.memory.tensors import LiveBytes, saved_bytes
from snugfit.surgery import attach_side_network

SHAPE = (3, 16, 16)


class Overwriting(nn.Module):
    """It overwrites what it is given, and reads it again."""

    def __init__(self):
        super().__init__()
        self.activation, self.conv = nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        y = self.activation(x)
        return self.conv(y) + x


class Inverted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True),
            nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12), nn.ReLU(inplace=True),
            nn.Dropout(0.5), nn.Conv2d(12, 6, 1), nn.BatchNorm2d(6),
        )  # fmt: skip

    def forward(self, x):
        return x + self.layers(x)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(Inverted(), Overwriting(), nn.Conv2d(6, 6, 3, stride=2), Inverted())
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def network(dtype=torch.float64, last=False):
    """A network in evaluation mode of which stem and head train, and its blocks."""
    torch.manual_seed(0)
    model = Small()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    model = model.to(dtype).eval()
    model = model.to(memory_format=torch.channels_last) if last else model
    module = Chain.from_module(model, SHAPE).to_module()
    module.get_submodule("blocks").requires_grad_(False)
    return module, find_blocks(module, SHAPE)


def images(dtype=torch.float64, last=False, batch=4):
    made = torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return made.contiguous(memory_format=torch.channels_last) if last else made


def step(module, inputs):
    """Output, and gradients of inputs and parameters."""
    module.zero_grad()
    leaf = inputs.clone().requires_grad_()
    output = module(leaf)
    output.square().sum().backward()
    return [output.detach(), leaf.grad, *(each.grad for each in module.parameters() if each.requires_grad)]


def middle(blocks):
    return [block for block in blocks if block.name.startswith("blocks.")]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_outputs_and_gradients_are_the_whole_batchs(dtype, tolerance, lean, last):
    module, blocks = network(dtype, last)
    if lean:
        use_lean(module)
    inputs = images(dtype, last)
    whole = step(module, inputs)
    run_per_sample(module, nodes_of(middle(blocks)))
    assert len(middle(blocks)) == 4
    for mine, theirs in zip(step(module, inputs), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        torch.testing.assert_close(module(inputs), whole[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_maps_keep_their_memory_format(gradient, last):
    """Outputs, and the gradient of the input."""
    module, blocks = network(last=last)
    run_per_sample(module, nodes_of(middle(blocks)))
    runner = next(node for node in module.graph.nodes if str(node.target).startswith("blocks_by_sample"))
    block = module.get_submodule(str(runner.target))
    maps = torch.randn(3, 6, 16, 16, dtype=torch.float64)
    maps = (maps.contiguous(memory_format=torch.channels_last) if last else maps).requires_grad_(gradient)
    output = block(maps)
    made = [output, *torch.autograd.grad(output.sum(), maps)] if gradient else [output]
    for each in made:
        assert each.is_contiguous(memory_format=torch.channels_last) == last and each.is_contiguous() != last


@pytest.mark.parametrize("gradient", [False, True])
def test_the_input_stays_as_it_is_where_a_block_overwrites_what_it_is_given(gradient):
    module, blocks = network()
    run_per_sample(module, nodes_of([block for block in blocks if block.name == "blocks.1"]))
    block = module.get_submodule("blocks_by_sample.blocks_1")
    maps = torch.randn(3, 6, 16, 16, dtype=torch.float64, requires_grad=gradient)
    before = maps.detach().clone()
    block(maps)
    assert torch.equal(maps.detach(), before) and not block.reads_only


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_one_and_none(batch):
    module, blocks = network()
    inputs = images(batch=batch)
    whole = step(module, inputs)
    run_per_sample(module, nodes_of(middle(blocks)))
    for mine, theirs in zip(step(module, inputs), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_on_and_off_again_and_everything_else_stays():
    module, blocks = network()
    state, code = {name: each.clone() for name, each in module.state_dict().items()}, module.code
    run_per_sample(module, nodes_of(middle(blocks)))
    changed = module.code
    assert changed != code and list(module.state_dict()) == list(state)
    run_per_sample(module, nodes_of(middle(blocks)[:1]))
    assert module.code not in (code, changed)
    run_per_sample(module, nodes_of(middle(blocks)))
    assert module.code == changed
    clone = copy.deepcopy(module)
    assert list(clone.state_dict()) == list(state)
    for each in clone.parameters():
        each.data.zero_()
    assert not clone(images()).any() and module(images()).any()
    use_lean(module)
    module.load_state_dict({name: each / 2 for name, each in state.items()})
    found = module(images())
    run_per_sample(module, {})
    assert module.code == code and list(module.state_dict()) == list(state)
    torch.testing.assert_close(module(images()), found, rtol=1e-12, atol=1e-12)
    run_per_sample(clone, {})
    assert clone.code == code and set(dict(clone.named_modules())) == set(dict(module.named_modules()))


def test_statistics_are_not_updated_and_training_mode_is_refused():
    module, blocks = network()
    run_per_sample(module, nodes_of(middle(blocks)[:1]))
    before = {name: each.clone() for name, each in module.named_buffers()}
    step(module, images())
    assert all(torch.equal(each, before[name]) for name, each in module.named_buffers())
    module.train()
    with pytest.raises(ModelError, match=r"block blocks.0 .*BatchNorm2d in training mode"):
        module(images())
    for layer in module.modules():
        layer.train(isinstance(layer, nn.Dropout))
    with pytest.raises(ModelError, match="Dropout in training mode"):
        module(images())


def test_parameters_that_train_are_refused():
    module, blocks = network()
    for name in ("stem", "fc"):
        block = next(block for block in blocks if name in block.name)
        with pytest.raises(ModelError, match=f"block {name} has trained parameters"):
            run_per_sample(module, nodes_of([block]))
    run_per_sample(module, nodes_of(middle(blocks)))
    module.get_submodule("blocks.0.layers.4").bias.requires_grad_(True)
    with pytest.raises(ModelError, match=r"block blocks.0 to blocks.3 has trained parameters"):
        module(images())
    with torch.no_grad():
        module(images())


def test_blocks_of_another_network_and_blocks_that_cannot_be():
    module, blocks = network()
    other = Chain.from_module(models.build("resnet18", 10, 32), (3, 32, 32)).to_module()
    with pytest.raises(ModelError, match="not part of the network"):
        run_per_sample(module, nodes_of(find_blocks(other, (3, 32, 32))[2:3]))
    module.get_submodule("blocks.0.layers.1").running_mean = None
    with pytest.raises(ModelError, match="norm without running statistics"):
        run_per_sample(module, nodes_of(middle(blocks)))
    attached = attach_side_network(other.requires_grad_(False), (3, 32, 32)).requires_grad_(False)
    position = 5
    with pytest.raises(ModelError, match="more than one tensor"):
        run_per_sample(attached, nodes_of(find_blocks(attached, (3, 32, 32))[position : position + 1]))


def test_a_block_that_reads_tensors_of_no_layer():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
            self.shift = nn.Parameter(torch.zeros(1, 3, 1, 1))

        def forward(self, x):
            return self.c(self.b(self.a(x)) + self.shift).mean((2, 3))

    module = Chain.from_module(Shifted(), SHAPE).to_module().requires_grad_(False)
    block = next(block for block in find_blocks(module, SHAPE) if block.name == "b")
    with pytest.raises(ModelError, match="reads tensors of no layer"):
        run_per_sample(module, nodes_of([block]))


def test_a_second_backward_pass_is_refused():
    module, blocks = network()
    run_per_sample(module, nodes_of(middle(blocks)))
    loss = module(images().requires_grad_()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="second backward pass"):
        loss.backward()


BATCH, SIDE = 8, 64


def mobilenet():
    """A frozen MobileNetV2 on the meta device with lean operators, and its blocks."""
    with torch.device("meta"):
        model = models.build("mobilenet_v2", 10, SIDE)
    module = Chain.from_module(model, (3, SIDE, SIDE)).to_module().requires_grad_(False).eval()
    use_lean(module)
    return module, find_blocks(module, (3, SIDE, SIDE))


def runner_of(module, block):
    run_per_sample(module, nodes_of([block]))
    return module.get_submodule(f"blocks_by_sample.{block.name.replace('.', '_')}")


def peak_of(run, entry):
    with LiveBytes() as live:
        live.add(entry)
        run(entry)
    return live.peak


def map_bytes(shape, batch=BATCH):
    return batch * torch.Size(shape).numel() * 4


def test_without_a_gradient_the_peak_is_input_and_output_and_one_samples_need():
    module, blocks = mobilenet()
    block = blocks[2]
    runner = runner_of(module, block)
    entry = torch.empty(BATCH, *block.input_shape, device="meta")
    whole, alone = (peak_of(runner.__dict__["body"], each) for each in (entry, entry[:1].clone()))
    peak = peak_of(runner, entry)
    fixed = map_bytes(block.input_shape) + map_bytes(block.output_shape)
    assert peak <= fixed + alone and 0.99 * BATCH * alone < whole <= BATCH * alone
    assert peak - fixed > 0.8 * (alone - map_bytes(block.input_shape, 1))
    assert peak < 0.35 * whole


def test_a_map_between_two_blocks_that_nothing_else_reads_is_never_there_for_the_whole_batch():
    module, blocks = mobilenet()
    run_per_sample(module, nodes_of(blocks[:3]))
    runner = module.get_submodule("blocks_by_sample.features_0_0_to_features_2")
    images_ = torch.empty(BATCH, 3, SIDE, SIDE, device="meta")
    alone = peak_of(runner.__dict__["body"], images_[:1].clone())
    peak = peak_of(runner, images_)
    assert peak <= map_bytes((3, SIDE, SIDE)) + map_bytes(blocks[2].output_shape) + alone
    assert peak < map_bytes((3, SIDE, SIDE)) + map_bytes(blocks[0].output_shape)


def test_blocks_stay_apart_where_a_side_module_reads_the_map_between_them():
    module, blocks = mobilenet()
    attached = attach_side_network(module, (3, SIDE, SIDE))
    run_per_sample(attached, nodes_of(blocks[:8]))
    names = [name for name, _ in attached.get_submodule("blocks_by_sample").named_children()]
    assert names == [
        "features_0_0_to_features_2", "features_3", "features_4", "features_5_to_features_6", "features_7"
    ]  # fmt: skip


def test_with_a_gradient_only_masks_are_kept_and_the_blocks_input_is_not():
    module, blocks = mobilenet()
    block = blocks[2]
    runner, body = runner_of(module, block), runner_of(module, block).__dict__["body"]
    entry = torch.empty(BATCH, *block.input_shape, device="meta").requires_grad_()
    held = [*module.parameters(), *module.buffers()]
    whole = saved_bytes(lambda: body(entry), held)
    masks = BATCH * 96 * (32 * 32 + 16 * 16) // 8
    assert masks <= whole < 1.01 * masks

    def kept(run):
        """Bytes that live between the passes, beside the output."""
        with LiveBytes() as live:
            made = run(torch.empty(1, device="meta", requires_grad=True).expand(entry.shape) + 0)
            between = live.live - made.untyped_storage().nbytes()
            made.sum().backward()
            return between, live.peak

    (sampled, peak), (batched, whole_peak) = kept(runner), kept(body)
    assert masks <= batched < 1.01 * masks and masks <= sampled < 1.1 * masks
    assert peak < 0.5 * whole_peak


def test_together_with_8_bit_weights_and_side_modules():
    torch.manual_seed(0)
    backbone = Chain.from_module(models.build("mobilenet_v2", 10, 64), (3, 64, 64)).to_module().double()
    blocks = find_blocks(backbone, (3, 64, 64))
    module = attach_side_network(backbone.requires_grad_(False).eval(), (3, 64, 64))
    nn.init.uniform_(module.get_submodule("side.2.scale").weight)
    module.get_submodule("side").train()
    store_int8(module)
    use_lean(module)
    inputs, found = torch.randn(3, 3, 64, 64, dtype=torch.float64), []
    for chosen in ((), blocks[1:5]):
        run_per_sample(module, nodes_of(chosen))
        module.zero_grad()
        output = module(inputs)
        output.square().sum().backward()
        found.append([output.detach(), *(each.grad for each in module.parameters() if each.requires_grad)])
    assert len(found[0]) == 1 + 6 * 6
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
