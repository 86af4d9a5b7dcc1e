"""A made-up profile with the tensors of ResNet-50, whose times and bytes follow its shapes."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Profile:
    """Columns of the tensors in the order of execution."""

    rng: np.random.Generator
    t_dw: list = field(default_factory=list)
    t_dy: list = field(default_factory=list)
    own: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    input_bytes: list = field(default_factory=list)
    passing: list = field(default_factory=list)

    def tensor(self, t_dw, t_dy, own, saved, passing=0):
        for column, entry in zip(
            (self.t_dw, self.t_dy, self.own, self.inputs, self.passing), (t_dw, t_dy, own, saved, passing), strict=True
        ):
            column.append(entry)

    def save(self, values):
        self.input_bytes.append(16 * values)
        return len(self.input_bytes) - 1

    def conv(self, channels, filters, kernel, side_in, side, saved=None):
        """A convolution and its norm's gamma and beta; returns the saved input's index."""
        saved = self.save(channels * side_in**2) if saved is None else saved
        weights, outputs = channels * filters * kernel**2, filters * side**2
        time = weights * side**2 * 1e-11 + 2e-5
        self.tensor(time * self.rng.uniform(0.8, 1.5), time * self.rng.uniform(0.8, 1.5), 8 * weights, saved)
        self.tensor(outputs * 1e-10 + self.rng.uniform(1e-5, 5e-5), 0, 8 * filters, self.save(outputs))
        self.tensor(self.rng.uniform(1e-5, 5e-5), outputs * 3e-10 + 1e-5, 8 * filters, -1, outputs // 2)
        return saved

    def arrays(self):
        """t_dw, t_dy, and the four arrays of bytes."""
        times = np.array(self.t_dw), np.array(self.t_dy)
        return times, tuple(np.array(part) for part in (self.own, self.inputs, self.input_bytes, self.passing))


def resnet50(seed):
    """161 tensors; in each stage, the first block's first convolution and its shortcut share their input."""
    profile = Profile(np.random.default_rng(seed))
    profile.conv(3, 64, 7, 224, 112)
    channels, side = 64, 56
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            out = side // stride if block == 0 else side
            saved = profile.conv(channels, width, 1, side, side)
            profile.conv(width, width, 3, side, out)
            profile.conv(width, 4 * width, 1, out, out)
            if block == 0:
                profile.conv(channels, 4 * width, 1, side, out, saved)
            channels, side = 4 * width, out
    profile.tensor(2e-4, 2e-4, 8 * 2048 * 1000, profile.save(2048))
    profile.tensor(2e-5, 0, 8 * 1000, -1)
    return profile.arrays()
