"""A plain activation profile: a layer's input and output (by groups) are temporary, some bits per ReLU are kept."""

from types import SimpleNamespace

from torch import nn

from snugfit._chain import find_blocks
from snugfit._chain.propagation import node_shapes


def numel(shape):
    total = 1
    for size in shape[1:]:
        total *= size
    return total


def profile_by(shape, bits=1):
    """Function of a network: its blocks with temporary, cumulative and peak bytes per image."""

    def profile(module):
        shapes, blocks, kept = node_shapes(module, shape), [], 0
        for block in find_blocks(module, shape):
            peak = temporary = 0
            for node in block.nodes:
                layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    made = numel(shapes[node]) // getattr(layer, "groups", 1)
                    needed = 4 * (numel(shapes[node.all_input_nodes[0]]) + made)
                    temporary, peak = max(temporary, needed), max(peak, needed + kept)
                elif isinstance(layer, nn.ReLU | nn.ReLU6):
                    kept += bits * numel(shapes[node]) // 8
            blocks.append(SimpleNamespace(temporary_bytes=temporary, cumulative_bytes=kept, peak_bytes=peak))
        return SimpleNamespace(blocks=blocks, peak_bytes=max(block.peak_bytes for block in blocks))

    return profile
