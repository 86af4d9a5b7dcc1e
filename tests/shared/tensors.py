"""Lists of tensors, such as an output and its gradients, against those of another way to compute them."""

import torch


def assert_same(got, want, tolerance=1e-10):
    """Each is the other's within the tolerance, absolute and relative; or both are None."""
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
