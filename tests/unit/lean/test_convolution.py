"""The lean convolution against torch's own, in float64."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensors import assert_same
from torch import nn

from snugfit.lean import LeanConv2d, by_position, convolution, use_lean_convolutions
from snugfit.lean.by_position import SMALL_MAP, Choice, Geometry, choose, weight_gradient

SQUARE = Geometry((1, 1), (0, 0), (1, 1), 1)


@st.composite
def cases(draw):
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    reach = [d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    size = tuple(max(1, r) + draw(st.integers(0, 5)) for r in reach)
    return {
        "size": size, "kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation,
        "batch": draw(st.integers(1, 5)), "channels": draw(st.integers(1, 3)), "filters": draw(st.integers(1, 6)),
        "bias": draw(st.booleans()), "channels_last": draw(st.booleans()),
        "train_weight": draw(st.booleans()), "train_input": draw(st.booleans()),
    }  # fmt: skip


def stock_and_lean(channels=3, filters=4, kernel=3, dtype=torch.float64, **options):
    torch.manual_seed(0)
    stock = nn.Conv2d(channels, filters, kernel, dtype=dtype, **options)
    lean = copy.deepcopy(stock)
    use_lean_convolutions(lean)
    assert isinstance(lean, LeanConv2d)
    return stock, lean


def gradients(conv, images, channels_last=False, train_input=True):
    images = images.clone()
    if channels_last:
        images, conv = images.to(memory_format=torch.channels_last), conv.to(memory_format=torch.channels_last)
    images.requires_grad_(train_input)
    output = conv(images)
    torch.manual_seed(2)
    if output.requires_grad:
        (output * torch.randn(output.shape, dtype=output.dtype)).sum().backward()
    return [output.detach(), images.grad, *(parameter.grad for parameter in conv.parameters())]


@settings(deadline=None, max_examples=50)
@given(cases())
def test_outputs_and_gradients_equal_torchs(case):
    stock, lean = stock_and_lean(
        case["channels"], case["filters"], case["kernel"], bias=case["bias"], stride=case["stride"],
        padding=case["padding"], dilation=case["dilation"],
    )  # fmt: skip
    for conv in (stock, lean):
        conv.weight.requires_grad_(case["train_weight"])
    images = torch.randn(case["batch"], case["channels"], *case["size"], dtype=torch.float64)
    options = {"channels_last": case["channels_last"], "train_input": case["train_input"]}
    assert_same(gradients(lean, images, **options), gradients(stock, images, **options))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from([by_position.PRODUCTS, 0]))
def test_outputs_and_gradients_of_depthwise_convolutions_equal_torchs(monkeypatch, case, products):
    monkeypatch.setattr(by_position, "depthwise_workspace", lambda *given: 1)
    monkeypatch.setattr(by_position, "PRODUCTS", products)
    channels = case["channels"]
    stock, lean = stock_and_lean(
        channels, channels, case["kernel"], groups=channels, bias=case["bias"], stride=case["stride"],
        padding=case["padding"], dilation=case["dilation"],
    )  # fmt: skip
    for conv in (stock, lean):
        conv.weight.requires_grad_(case["train_weight"])
    images = torch.randn(case["batch"], channels, *case["size"], dtype=torch.float64)
    options = {"channels_last": case["channels_last"], "train_input": case["train_input"]}
    assert_same(gradients(lean, images, **options), gradients(stock, images, **options))


@pytest.mark.parametrize(
    ("kernel", "size", "filters", "slow"),
    [
        (3, (2, 2), 8, True),
        (3, (2, 8), 8, True),
        (3, (3, 3), 8, False),
        (3, (8, 2), 8, False),
        (3, (2, 2), 16, False),
        (5, (4, 4), 8, True),
        (5, (5, 5), 8, False),
    ],
)
def test_gradients_of_depthwise_weights_are_computed_by_position_where_onednn_is_slow(kernel, size, filters, slow):
    inputs = torch.empty(4, 8, *size, device="meta", memory_format=torch.channels_last)
    weight = torch.empty(filters, 1, kernel, kernel, device="meta")
    geometry = Geometry((1, 1), (kernel // 2, kernel // 2), (1, 1), 8)
    assert choose(inputs, weight, geometry) == Choice(weight_gradient=slow, others=False)


@pytest.fixture
def always(monkeypatch):
    """All about small feature maps in channels_last is computed by kernel position, and of one image at a time."""
    for name, value in {"LEAST_WEIGHTS": 0, "PADDING_SHARE": 0.0, "COPIED_VALUES": 0}.items():
        monkeypatch.setattr(by_position, name, value)


@given(cases())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_outputs_and_gradients_equal_torchs_by_kernel_position(always, case):
    test_outputs_and_gradients_equal_torchs.hypothesis.inner_test({**case, "channels_last": True})


@given(cases())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_by_onednn_in_float32_equal_torchs_in_float64(always, monkeypatch, case):
    monkeypatch.setattr(by_position, "ONEDNN_PIXELS", 1)
    names = ("stride", "padding", "dilation", "bias")
    stock, _ = stock_and_lean(case["channels"], case["filters"], case["kernel"], **{name: case[name] for name in names})
    lean = copy.deepcopy(stock).float()
    use_lean_convolutions(lean)
    images = torch.randn(case["batch"], case["channels"], *case["size"], dtype=torch.float64)
    wanted = gradients(stock, images)
    with monkeypatch.context() as patched:  # the same factors of the outputs
        patched.setattr(torch, "randn", lambda *sizes, dtype: _randn(*sizes, dtype=torch.float64).to(dtype))
        found = gradients(lean, images.float(), channels_last=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


_randn = torch.randn


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
@pytest.mark.parametrize(
    ("images", "options", "expected"),
    [(12, {}, True), (11, {}, False), (12, {"dtype": torch.float64}, False), (12, {"device": "meta"}, False)],
)
def test_products_of_many_pixels_in_float32_are_made_by_onednn(images, options, expected):
    pixels = torch.empty(images, 4, 4, 8, **options)
    assert by_position._is_for_onednn(images * 4 * 4, pixels) == expected
    weight = torch.empty(16, 8, 1, 1, **options)
    chosen = choose(pixels.permute(0, 3, 1, 2), weight, Geometry((1, 1), (0, 0), (1, 1), 1))
    assert chosen == Choice(weight_gradient=not expected, others=False), "a 1x1 kernel is a product and nothing else"


@pytest.mark.parametrize(("kernel", "stride", "products"), [(1, 1, 1), (1, 2, 5), (3, 1, 45)])
def test_images_are_divided_only_where_pixels_are_copied(monkeypatch, kernel, stride, products):
    made = []
    monkeypatch.setattr(by_position, "COPIED_VALUES", 0)
    monkeypatch.setattr(by_position, "_add_product", lambda *each: made.append(each))
    images, size = torch.randn(5, 4, 4, 4).to(memory_format=torch.channels_last), -(-4 // stride)
    gradient = torch.randn(5, 2, size, size).to(memory_format=torch.channels_last)
    weight_gradient(gradient, images, (kernel, kernel), Geometry((stride,) * 2, (kernel // 2,) * 2, (1, 1), 1))
    assert len(made) == products


def test_without_gradients_outputs_are_the_same(always):
    stock, lean = (each.to(memory_format=torch.channels_last) for each in stock_and_lean(padding=1, stride=2))
    images = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(lean(images), stock(images))
        assert lean(images[:0]).shape == (0, 4, 2, 2)


@pytest.mark.parametrize(
    ("images", "side", "channels", "faster"),
    [
        (128, 2, 256, True),
        (2, 4, 512, True),
        (64, 4, 512, True),
        (2, 4, 64, False),
        (128, 2, 64, False),
        (1, 5, 512, False),
    ],
)
def test_where_padding_or_the_weight_is_most_of_the_work_it_is_faster(images, side, channels, faster):
    inputs, weight = torch.empty(images, channels, side, side), torch.empty(channels, channels, 3, 3)
    weight = weight.contiguous(memory_format=torch.channels_last)
    padded = SQUARE._replace(padding=(1, 1))
    assert choose(inputs.to("meta"), weight.to("meta").requires_grad_(), padded).others == faster
    assert choose(inputs, weight, padded).others == faster, "frozen weights, too"
    assert not choose(inputs, weight.bfloat16(), padded).others
    assert not choose(inputs, weight.requires_grad_(), padded._replace(groups=2)).others


def test_any_number_of_images_is_convolved_by_kernel_position_where_the_weight_is_large(monkeypatch):
    calls = []
    monkeypatch.setattr(
        convolution, "convolve", lambda *given: calls.append(len(given[0])) or by_position.convolve(*given)
    )
    conv = nn.Conv2d(512, 512, 3, padding=1).to(memory_format=torch.channels_last)
    use_lean_convolutions(conv)
    for images in (2, 4):
        conv(torch.randn(images, 512, 4, 4)).sum().backward()
    conv.requires_grad_(False)(torch.randn(2, 512, 4, 4))
    assert calls == [2, 4, 2]


def took_the_lean_path(conv, images):
    return type(conv(images).grad_fn).__name__ == "_LeanConvolutionBackward"


@pytest.mark.parametrize(("side", "lean"), [(4, True), (5, False)])
def test_it_applies_to_small_maps_only(side, lean):
    _, conv = stock_and_lean(padding=1)
    assert (side * side <= SMALL_MAP) == lean
    assert took_the_lean_path(conv, torch.randn(2, 3, side, side, dtype=torch.float64)) == lean


def test_the_size_that_counts_is_the_outputs():
    _, conv = stock_and_lean(stride=2, padding=1)
    assert took_the_lean_path(conv, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    _, conv = stock_and_lean(dilation=2)
    assert took_the_lean_path(conv, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert not took_the_lean_path(conv, torch.randn(2, 3, 9, 9, dtype=torch.float64))


@pytest.mark.parametrize(
    "options", [{"groups": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}], ids=str
)
def test_other_convolutions_are_torchs_own(options):
    stock, conv = stock_and_lean(channels=4, **options)
    images = torch.randn(2, 4, 4, 4, dtype=torch.float64)
    assert not took_the_lean_path(conv, images)
    assert_same(gradients(conv, images), gradients(stock, images))


def test_under_autocast_it_is_torchs_own_where_all_trains():
    _, conv = stock_and_lean(dtype=torch.float32)
    images = torch.randn(2, 3, 4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not took_the_lean_path(conv, images)
        assert conv(images).dtype == torch.bfloat16
    assert took_the_lean_path(conv, images)


def test_an_image_without_a_batch_axis_works():
    stock, conv = stock_and_lean()
    image = torch.randn(3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(conv(image), stock(image), rtol=0, atol=0)


def test_wrong_channels_are_refused_as_ever(always):
    _, conv = stock_and_lean()
    conv.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="channels"):
        conv(torch.randn(2, 5, 4, 4, dtype=torch.float64))


def test_the_gradient_by_hand():
    """One 2x2 image, a 2x2 kernel, one pixel of output: the weight gradient is the image, scaled."""
    image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    got = weight_gradient(torch.tensor([[[[5.0]], [[-1.0]]]]), image, (2, 2), SQUARE)
    assert got.tolist() == [[[[5, 10], [15, 20]]], [[[-1, -2], [-3, -4]]]]


def test_every_image_counts_however_the_batch_is_cut():
    torch.manual_seed(0)
    gradient, images = torch.randn(7, 2, 2, 2, dtype=torch.float64), torch.randn(7, 3, 4, 4, dtype=torch.float64)
    whole = weight_gradient(gradient, images, (3, 3), SQUARE)
    one_by_one = sum(weight_gradient(gradient[i : i + 1], images[i : i + 1], (3, 3), SQUARE) for i in range(7))
    torch.testing.assert_close(whole, one_by_one, rtol=1e-12, atol=1e-12)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(),
        nn.Linear(16, 2),
    )  # fmt: skip


def test_the_state_dict_is_the_same():
    stock, lean = network(), network()
    use_lean_convolutions(lean)
    assert list(stock.state_dict()) == list(lean.state_dict())
    lean.load_state_dict(stock.state_dict())
    stock.load_state_dict(lean.state_dict())
    assert [type(layer) for layer in lean][0::3] == [LeanConv2d, LeanConv2d]


def test_subclasses_keep_their_own_convolution():
    class Mine(nn.Conv2d):
        pass

    module = nn.Sequential(Mine(3, 4, 3), nn.ConvTranspose2d(4, 3, 3))
    use_lean_convolutions(module)
    assert [type(layer) for layer in module] == [Mine, nn.ConvTranspose2d]


def test_it_can_be_copied_and_pickled_by_torch(tmp_path):
    lean = network()
    use_lean_convolutions(lean)
    images = torch.randn(2, 3, 4, 4)
    copied = copy.deepcopy(lean)
    assert torch.equal(copied.eval()(images), lean.eval()(images))
    assert copied[0].weight is not lean[0].weight
    torch.save(lean.state_dict(), tmp_path / "weights.pth")
    copied.load_state_dict(torch.load(tmp_path / "weights.pth", weights_only=True))


def test_it_runs_on_the_meta_device():
    lean = network().to("meta")
    use_lean_convolutions(lean)
    images = torch.empty(2, 3, 4, 4, device="meta", requires_grad=True)
    lean(images).sum().backward()
    assert images.grad.shape == images.shape and images.grad.is_meta
    assert lean[0].weight.grad.shape == (4, 3, 3, 3)


def test_a_frozen_weight_keeps_no_input():
    _, conv = stock_and_lean(bias=False)
    images = torch.randn(8, 3, 4, 4, dtype=torch.float64, requires_grad=True)

    def saved(train_weight):
        conv.weight.requires_grad_(train_weight)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
            conv(images)
        return images.data_ptr() in kept

    assert saved(True) and not saved(False)
