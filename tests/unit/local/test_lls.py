"""LLS: equations 4 to 6 of the paper by hand, its modes, and its options."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit.errors import SnugfitError, UnknownNameError, UsageError
from snugfit.local import NetworkStats, UnitShape, build_local_loss, check_local_loss
from snugfit.local.lls import make_basis

NETWORK = NetworkStats(narrowest=4, widest=8, classes=5)
SLOPE = 0.01
LABELS = torch.tensor([0, 4, 2, 2, 1, 3])


def build(name, shape, options="mode=paper"):
    torch.manual_seed(1)
    loss = build_local_loss(f"{name}:{options}", UnitShape(shape), NETWORK)
    if loss.mixing is not None:
        nn.init.normal_(loss.mixing)
    return loss.double()


def basis_in_use(loss):
    """d of section 3.2: b itself, M * b, or M b."""
    if loss.mixing is None:
        return loss.basis()
    mixing = loss.mixing.detach()
    return mixing[:, None] * loss.basis() if mixing.dim() == 1 else mixing @ loss.basis()


def errors(latents, basis):
    """e = softmax(h b^T) - y*, (N, K)."""
    return (latents @ basis.T).softmax(1) - F.one_hot(LABELS, NETWORK.classes).double()


def expected_mixing(loss, latents, error):
    """Equations 5 and 6: the update of M."""
    projection = latents @ loss.basis().T
    if loss.mixing.dim() == 1:
        return (error * projection).sum(0) / len(LABELS)
    return error.T @ projection / len(LABELS)


def slope(z):
    """Derivative of LeakyReLU."""
    return SLOPE + (1 - SLOPE) * (z > 0).double()


def assert_equal(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["lls", "lls-m", "lls-mxm"])
def test_equations_4_to_6_for_a_linear_layer(name):
    layer, inputs = nn.Linear(7, 12).double(), torch.randn(6, 7, dtype=torch.float64)
    loss = build(name, (12,))
    z = layer(inputs)
    loss(F.leaky_relu(z, SLOPE), LABELS).loss.backward()

    latents = F.leaky_relu(z, SLOPE).detach()
    error = errors(latents, basis_in_use(loss))
    slopes = slope(z)
    signal = (error @ basis_in_use(loss)) * slopes
    assert_equal(layer.weight.grad, signal.T @ inputs / len(LABELS))
    if loss.mixing is not None:
        assert_equal(loss.mixing.grad, expected_mixing(loss, latents, error))


@pytest.mark.parametrize("name", ["lls", "lls-m", "lls-mxm"])
def test_equations_4_to_6_for_a_convolution_by_loops(name):
    """The map, 700 x 4 x 4, is pooled to 1 x 1 (2048 / 700 is below 4), and the update summed over pixels and taps."""
    layer, inputs = nn.Conv2d(2, 700, 3, padding=1).double(), torch.randn(6, 2, 4, 4, dtype=torch.float64)
    loss = build(name, (700, 4, 4))
    z = layer(inputs)
    loss(F.leaky_relu(z, SLOPE), LABELS).loss.backward()

    latents = F.leaky_relu(z, SLOPE).detach().mean((2, 3))
    error = errors(latents, basis_in_use(loss))
    spread = (error @ basis_in_use(loss))[:, :, None, None] / 16
    signal = spread * slope(z)
    padded, expected = F.pad(inputs, (1, 1, 1, 1)), torch.zeros_like(layer.weight)
    for row in range(3):
        for column in range(3):
            window = padded[:, :, row : row + 4, column : column + 4]
            expected[:, :, row, column] = torch.einsum("nohw,nihw->oi", signal, window) / len(LABELS)
    assert loss.latents.length == 700
    assert_equal(layer.weight.grad, expected)
    if loss.mixing is not None:
        assert_equal(loss.mixing.grad, expected_mixing(loss, latents, error))


def test_equation_3_is_the_loss():
    loss, latents = build("lls", (12,)), torch.randn(6, 12, dtype=torch.float64)
    terms = [-(latents[n] @ loss.basis().T).log_softmax(0)[LABELS[n]] for n in range(6)]
    assert_equal(loss(latents, LABELS).loss, torch.stack(terms).mean())


def test_the_published_mode_sees_directions_only_and_halves_the_temperature():
    loss, latents = build("lls", (12,), "mode=published"), torch.randn(6, 12, dtype=torch.float64)
    unit = latents / latents.norm(dim=1, keepdim=True)
    assert_equal(loss.predict(latents), unit @ loss.basis().T / 0.5)
    assert_equal(loss.predict(latents), loss.predict(7 * latents))


def test_nothing_but_m_is_trained():
    counts = {name: sum(p.numel() for p in build(name, (12,)).parameters()) for name in ("lls", "lls-m", "lls-mxm")}
    assert counts == {"lls": 0, "lls-m": 5, "lls-mxm": 25}


@pytest.mark.parametrize("basis", ["cosine", "square", "random"])
def test_a_generated_basis_is_the_stored_one(basis):
    kept, made = (build("lls", (64, 8, 8), f"basis={basis},stored={value}") for value in ("true", "false"))
    assert "stored" in kept.state_dict() and "stored" not in made.state_dict()
    assert torch.equal(kept.basis(), made.basis().double())


def test_a_random_basis_follows_its_seed():
    one, other = (build_local_loss(f"lls:basis=random,seed={seed}", UnitShape((9,)), NETWORK) for seed in (3, 4))
    assert torch.equal(one.basis(), make_basis("random", "spread", 5, 9, seed=3))
    assert not torch.equal(one.basis(), other.basis())


def test_it_reads_the_map_before_the_pool():
    loss = build_local_loss("lls", UnitShape((16, 2, 2), before_pool=(16, 32, 32)), NETWORK)
    assert loss.latents.length == 16 * 4 * 4


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("lls:mode=papper", UsageError, "^mode of a local loss is paper or published"),
        ("lls:basis=sine", UsageError, "^basis of a local loss is cosine or square or random"),
        ("lls:limit=many", UsageError, "limit=2048"),
        ("lls:frequencies=many", UsageError, "^frequencies of a local loss is spread or published"),
        ("lls:limit=0", UsageError, "at least 1"),
        ("lls:window=0", UsageError, "at least 1"),
        ("lls:stored=maybe", UsageError, "stored=true"),
        ("lls:seed=99999999999999999999", UsageError, "2\\^63"),
        ("lls:basis=cosine,basis=square", UsageError, "twice"),
        ("lls:base=square", UnknownNameError, "basis"),
        ("aan:basis=square", UsageError, "no options"),
        ("lsl", UnknownNameError, "lls"),
    ],
)
def test_unusable_options_are_refused_before_there_is_a_network(text, error, words):
    with pytest.raises(error, match=words) as caught:
        check_local_loss(text)
    assert isinstance(caught.value, SnugfitError)


@pytest.mark.parametrize("options", ["limit=1", "window=1"])
def test_limit_and_window_may_be_one(options):
    assert build_local_loss(f"lls:{options}", UnitShape((4, 2, 2)), NETWORK).latents.length == (
        4 if "limit" in options else 16
    )


def test_a_generated_basis_is_kept_in_evaluation_only():
    loss = build_local_loss("lls:stored=false", UnitShape((9,)), NETWORK)
    assert loss.basis() is not loss.basis()
    assert loss.eval().basis() is loss.basis() is not None
    kept = loss.basis()
    assert loss.train().training and loss.basis() is not kept
    assert not loss.eval().training and loss.basis() is not kept, "training forgets it"


@pytest.mark.parametrize(("dtype", "given"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_projections_are_at_least_in_float32(dtype, given):
    assert build_local_loss("lls", UnitShape((9,)), NETWORK).project(torch.ones(2, 9, dtype=dtype)).dtype == given


def test_options_may_be_written_with_blanks_and_capitals():
    loss = build_local_loss("lls: basis = cosine, stored = False", UnitShape((9,)), NETWORK)
    assert loss.stored is None and torch.equal(loss.basis(), make_basis("cosine", "published", 5, 9))
