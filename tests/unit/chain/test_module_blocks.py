"""Module blocks: numbered as the papers number them, entered and left by one tensor."""

import pytest
import torch
from torch import Tensor, nn

from snugfit import _models as models
from snugfit._chain import Chain, find_blocks


def blocks_of(name: str, size: int):
    with torch.device("meta"):
        module = models.build(name, 10, size)
    whole = Chain.from_module(module, (3, size, size), name).to_module()
    return whole, find_blocks(whole, (3, size, size))


def test_mobilenet_blocks_are_its_features_and_the_classifier():
    _, blocks = blocks_of("mobilenet_v2", 224)
    assert [block.name for block in blocks[1:18]] == [f"features.{index}" for index in range(1, 18)]
    assert [block.output_shape[0] for block in blocks[1:5]] == [16, 24, 24, 32]
    assert blocks[2].input_shape == (16, 112, 112) and blocks[2].output_shape == (24, 56, 56)
    assert len(blocks) == 20 and blocks[-1].output_shape == (10,)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("resnet50", 224, ["conv1", "layer1.0", "layer1.1", "layer1.2", "layer2.0"]),
        ("resnet18", 32, ["conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
        ("vgg16_imagenet", 224, ["features.0", "features.2", "features.5", "features.7", "features.10"]),
    ],
)
def test_names_follow_the_modules(name: str, size: int, expected: list[str]):
    assert [block.name for block in blocks_of(name, size)[1][:5]] == expected


@pytest.mark.parametrize(("name", "size"), [("mobilenet_v2", 96), ("resnet50", 64), ("vgg16", 32), ("vit_b_16", 32)])
def test_every_node_lies_in_one_block_and_one_value_crosses(name: str, size: int):
    whole, blocks = blocks_of(name, size)
    nodes = [node for block in blocks for node in block.nodes]
    assert nodes == [n for n in whole.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    for block in blocks:
        inside = set(block.nodes)
        assert all(user in inside for node in block.nodes[:-1] for user in node.users)
        outside = {
            source for node in block.nodes for source in node.all_input_nodes if source.op != "get_attr"
        } - inside
        assert outside == {block.entry}


def test_blocks_between_which_two_tensors_cross_are_one():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
            self.fc = nn.Linear(3, 10)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = self.c(self.b(y) + y)
            return self.fc(z.mean((2, 3)))

    whole = Chain.from_module(Skips(), (3, 8, 8)).to_module()
    assert [block.name for block in find_blocks(whole, (3, 8, 8))] == ["a", "b", "c", "fc"]
