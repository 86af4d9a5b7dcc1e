"""Networks of layers that can be tiled, what an untiled step makes of them, and a loss that tells pixels apart."""

import copy

import torch
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

ACTIVATIONS = (nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.SiLU(), nn.Identity())
LAYERS = st.one_of(
    st.tuples(
        st.just("conv"), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2),
        st.sampled_from((1, 2, 4)), st.booleans(),
    ),
    st.tuples(st.just("max"), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("average"), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1)),
    st.tuples(st.just("activation"), st.sampled_from(range(len(ACTIVATIONS)))),
    st.tuples(st.just("norm"), st.booleans()),
    st.tuples(st.just("residual"), st.integers(1, 3), st.booleans()),
)  # fmt: skip


class Residual(nn.Module):
    """A block with a shortcut, which may halve the map."""

    def __init__(self, kernel, halves):
        super().__init__()
        stride = 2 if halves else 1
        self.main = nn.Sequential(
            nn.Conv2d(4, 6, kernel, stride, kernel // 2), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, 1, 1)
        )
        self.shortcut = nn.Conv2d(4, 4, 1, stride, bias=False) if halves or kernel % 2 == 0 else nn.Identity()
        self.kernel = kernel

    def forward(self, x):
        y, z = self.main(x), self.shortcut(x)
        return F.relu(y[..., : z.shape[2], : z.shape[3]] + z) if self.kernel % 2 == 0 else F.relu(y + z)


def made(plan):
    kind, *rest = plan
    if kind == "conv":
        kernel, stride, padding, dilation, groups, bias = rest
        return nn.Conv2d(4, 4, kernel, stride, padding, dilation, groups, bias)
    if kind == "max":
        kernel, stride, padding, upwards = rest
        return nn.MaxPool2d(kernel, stride, min(padding, kernel // 2), ceil_mode=upwards)
    if kind == "average":
        kernel, stride, padding = rest
        return nn.AvgPool2d(kernel, stride, min(padding, kernel // 2))
    if kind == "activation":
        return copy.copy(ACTIVATIONS[rest[0]])
    if kind == "norm":
        return nn.BatchNorm2d(4, affine=rest[0])
    return Residual(2 * rest[0] - 1, rest[1])


def network(plans, seed=0):
    """Layers that keep four channels, behind a first one, in float64; norms have statistics of their own."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *(made(plan) for plan in plans)).double().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.5, 0.5)
            layer.running_var.uniform_(0.5, 2)
    return fx.symbolic_trace(module)


def untiled(module):
    """A copy that can always be trained: an activation may not overwrite what the one before it keeps."""
    other = copy.deepcopy(module)
    for layer in other.modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
    return other


def weighted(output):
    """A fixed random-weighted sum, so that no two pixels count the same."""
    generator = torch.Generator().manual_seed(5)
    return (output * torch.rand(output.shape, generator=generator, dtype=torch.float64)).sum()


def gradients(forward, module, images):
    module.zero_grad()
    images = images.clone().requires_grad_(True)
    output = forward(images)
    weighted(output).backward()
    return [output.detach(), images.grad, *(parameter.grad for parameter in module.parameters())]


def images(height, width, batch=2):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
