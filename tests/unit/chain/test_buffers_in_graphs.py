"""Networks that compute with buffers are traced as before, or with the computation in the graph."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit._chain import Chain


class Blur(nn.Module):
    """A fixed filter per channel, whose size Python reads."""

    def __init__(self, reads="groups"):
        super().__init__()
        self.conv, self.head, self.reads = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), reads
        if reads != "computed":
            self.register_buffer("filter", torch.rand(4, 1, 3, 3))
        if reads in ("computed", "both"):
            self.register_buffer("scale", torch.rand(3))

    def forward(self, images):
        maps = self.conv(images)
        if self.reads == "branch" and self.filter.size(-1) != 3:
            return maps
        if self.reads == "computed":
            return self.head((maps * (self.scale.mean() + 1)).mean((2, 3)))
        if self.reads == "both":
            maps = maps * (self.scale.mean() + 1)
        return self.head(F.conv2d(maps, self.filter, groups=self.filter.shape[0]).mean((2, 3)))


@pytest.mark.parametrize("reads", ["groups", "branch", "computed", "both"])
def test_a_network_that_reads_a_buffer_is_divided_and_computes_the_same(reads):
    torch.manual_seed(0)
    module, images = Blur(reads), torch.randn(5, 3, 9, 9)
    expected = module(images)
    chain = Chain.from_module(module, (3, 9, 9))
    assert len(chain.all_units) > 1
    torch.testing.assert_close(chain.to_module()(images), expected)
