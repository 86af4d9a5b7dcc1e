"""LLS, its bases and latents, and the trained projection."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from snugfit.errors import SnugfitError, UnknownNameError, UsageError
from snugfit.local import Latents, NetworkStats, UnitShape, build_local_loss, check_local_loss, pooled_side
from snugfit.local.lls import cosine, frequencies, make_basis, random, square


@given(st.integers(2, 40), st.integers(8, 300))
def test_spread_frequencies_lie_between_one_period_and_nyquist_at_equal_distances(classes, length):
    found = frequencies("spread", classes, length)
    gaps = found.diff()
    assert 2 * math.pi / length < found[0] and found[-1] < math.pi
    torch.testing.assert_close(gaps, gaps[:1].expand_as(gaps))


def test_published_frequencies_are_those_of_the_authors():
    assert frequencies("published", 3, 77).tolist() == [50.0, 281.0, 512.0]


def test_waves_are_taken_at_the_samples_1_to_t():
    angular = torch.tensor([0.3, 1.1], dtype=torch.float64)
    by_hand = [[math.cos(f * t) for t in range(1, 6)] for f in (0.3, 1.1)]
    torch.testing.assert_close(cosine(angular, 5), torch.tensor(by_hand, dtype=torch.float64))
    signs = [[math.copysign(1, value) for value in row] for row in by_hand]
    assert square(angular, 5).tolist() == signs


@pytest.mark.parametrize("name", ["cosine", "square"])
def test_a_spread_basis_is_nearly_orthogonal(name):
    basis = make_basis(name, "spread", 10, 2048)
    rows = basis / basis.norm(dim=1, keepdim=True)
    overlap = (rows @ rows.T - torch.eye(10)).abs().max()
    assert overlap < 0.35


@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_published_square_rows_of_ten_classes_hardly_overlap(length):
    rows = make_basis("square", "published", 10, length)
    overlap = (rows @ rows.T / length - torch.eye(10)).abs().max()
    assert set(rows.unique().tolist()) == {-1.0, 1.0}
    assert overlap < 0.2


def test_the_random_basis_has_its_scale_and_its_seed():
    basis = make_basis("random", "spread", 10, 2048, seed=3)
    assert basis.std().item() == pytest.approx(0.1, rel=0.02)
    assert torch.equal(basis, make_basis("random", "published", 10, 2048, seed=3))
    assert not torch.equal(basis, make_basis("random", "spread", 10, 2048, seed=4))


def test_spread_frequencies_by_hand():
    """Of 8 samples one period is pi / 4, and Nyquist pi: two between them lie at a half and three quarters of pi."""
    found = frequencies("spread", 2, 8)
    torch.testing.assert_close(
        found, torch.tensor([math.pi / 2, 3 * math.pi / 4], dtype=torch.float64), rtol=1e-15, atol=0
    )


def test_bases_are_computed_in_float64_and_handed_out_in_float32():
    """Published phases reach 10^6 radians, of which float32 knows some hundredths."""
    for rule in ("spread", "published"):
        angular = frequencies(rule, 7, 2048)
        assert angular.dtype == torch.float64
        by_hand = [[math.cos(f * t) for t in range(1, 2049)] for f in angular.tolist()]
        torch.testing.assert_close(cosine(angular, 2048), torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=1e-9)
        assert square(angular, 5).dtype == torch.float64
        assert make_basis("cosine", rule, 7, 9).dtype == torch.float32
    assert random(2, 3, 0).dtype == torch.float64
    assert make_basis("random", "spread", 2, 3).tolist() == random(2, 3, 0).float().tolist()


def test_waves_follow_the_type_of_their_frequencies():
    angular = torch.tensor([0.5, 0.0], dtype=torch.float32)
    assert cosine(angular, 3).dtype == square(angular, 3).dtype == torch.float32
    assert square(angular, 3)[1].tolist() == [1.0, 1.0, 1.0]
    assert make_basis("cosine", "spread", 4, 6).tolist() == cosine(frequencies("spread", 4, 6), 6).float().tolist()


@pytest.mark.parametrize(
    ("shapes", "sides"),
    [
        ([(128, 32, 32), (256, 32, 32), (256, 16, 16), (512, 8, 8), (512, 4, 4)], [4, 2, 2, 2, 2]),
        ([(32, 32, 32), (64, 16, 16), (128, 8, 8)], [4, 2, 2]),
        ([(96, 32, 32), (192, 16, 16), (512, 8, 8)], [4, 2, 2]),
        ([(32, 64, 64), (64, 64, 64), (128, 32, 32), (256, 16, 16), (512, 8, 8), (1024, 4, 4)], [8, 4, 4, 2, 2, 1]),
    ],
    ids=["vgg8", "smallconv", "smallconvl", "mobilenet_v1"],
)
def test_sides_that_the_authors_set_by_hand(shapes, sides):
    assert [pooled_side(*shape) for shape in shapes] == sides


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3000))
def test_no_more_values_than_the_limit_and_no_more_pixels_than_there_are(channels, height, width, limit):
    side = pooled_side(channels, height, width, limit)
    assert 1 <= side <= min(height, width)
    assert channels * side**2 <= limit or side == 1
    assert side & (side - 1) == 0


@pytest.mark.parametrize("shape", [(6, 8, 8), (2000, 4, 4), (5, 7, 9), (3000,), (12,)])
def test_latents_are_what_adaptive_pooling_gives(shape):
    latents = Latents(shape)
    features = torch.randn(3, *shape)
    if len(shape) == 3:
        expected = F.adaptive_avg_pool2d(features, latents.side).flatten(1)
    else:
        expected = F.adaptive_avg_pool1d(features[:, None], latents.length)[:, 0]
    assert latents(features).shape == (3, latents.length)
    torch.testing.assert_close(latents(features), expected)
    assert latents.length <= 2048


def test_smaller_windows_leave_more_of_a_map():
    assert [pooled_side(32, 32, 32, window=window) for window in (16, 8, 4, 1)] == [2, 4, 8, 8]


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


TEN_CLASSES = NetworkStats(narrowest=64, widest=512, classes=10)


@pytest.mark.parametrize(
    ("shape", "values"), [((128, 32, 32), 2048), ((256, 8, 8), 1024), ((4096, 2, 2), 4096), ((12,), 12)]
)
def test_it_trains_one_projection_of_the_latents(shape, values):
    loss = build_local_loss("linear", UnitShape(shape), TEN_CLASSES)
    assert sum(p.numel() for p in loss.parameters()) == values * 10
    assert loss.predict(torch.randn(2, *shape)).shape == (2, 10)


def test_gradients_equal_the_hand_written_loss():
    torch.manual_seed(0)
    loss = build_local_loss("linear", UnitShape((512, 4, 4)), TEN_CLASSES).double()
    features = torch.randn(3, 512, 4, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 9, 0])
    loss(features, labels).loss.backward()
    latents = features.detach().unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean((3, 5)).flatten(1)
    error = (latents @ loss.linear.weight.T).softmax(1) - F.one_hot(labels, 10)
    torch.testing.assert_close(loss.linear.weight.grad, (error.T @ latents / 3).detach(), rtol=1e-12, atol=1e-12)
    pooled = (error @ loss.linear.weight / 3).detach().view(3, 512, 2, 2) / 4
    spread = pooled.repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(features.grad, spread, rtol=1e-12, atol=1e-12)
