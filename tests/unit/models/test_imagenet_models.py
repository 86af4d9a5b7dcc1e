"""Networks that torchvision's ImageNet weights are for: sizes, names, shapes, and the same outputs."""

import importlib.util

import pytest
import torch

from snugfit._models import build
from snugfit._models.resnet import BottleneckResNet
from snugfit._models.vgg import ImageNetVGG
from snugfit._models.vit import VisionTransformer, image_size_of
from snugfit.errors import ModelError

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


def norm(name, width):
    vectors = {f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}
    return {**vectors, f"{name}.num_batches_tracked": ()}


def linear(name, outputs, inputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def published_resnet50():
    shapes = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64), **linear("fc", 1000, 2048)}
    before = 64
    for stage, (width, count) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for block in range(count):
            name, convs = f"layer{stage}.{block}", ((width, before, 1), (width, width, 3), (4 * width, width, 1))
            for place, (out, into, side) in enumerate(convs, start=1):
                shapes |= {f"{name}.conv{place}.weight": (out, into, side, side), **norm(f"{name}.bn{place}", out)}
            if block == 0:
                shapes[f"{name}.downsample.0.weight"] = (4 * width, before, 1, 1)
                shapes |= norm(f"{name}.downsample.1", 4 * width)
            before = 4 * width
    return shapes


def published_vgg16():
    shapes, before = {}, 3
    places = [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
    for place, width in zip(places, [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6, strict=True):
        shapes |= {f"features.{place}.weight": (width, before, 3, 3), f"features.{place}.bias": (width,)}
        before = width
    for place, inputs, outputs in ((0, 25088, 4096), (3, 4096, 4096), (6, 4096, 1000)):
        shapes |= linear(f"classifier.{place}", outputs, inputs)
    return shapes


def published_vit_b_16():
    shapes = {
        "class_token": (1, 1, 768),
        "conv_proj.weight": (768, 3, 16, 16),
        "conv_proj.bias": (768,),
        "encoder.pos_embedding": (1, 197, 768),
        "encoder.ln.weight": (768,),
        "encoder.ln.bias": (768,),
        **linear("heads.head", 1000, 768),
    }
    for layer in range(12):
        name = f"encoder.layers.encoder_layer_{layer}"
        shapes |= {f"{name}.{ln}.{part}": (768,) for ln in ("ln_1", "ln_2") for part in ("weight", "bias")}
        shapes |= {
            f"{name}.self_attention.in_proj_weight": (2304, 768),
            f"{name}.self_attention.in_proj_bias": (2304,),
            **linear(f"{name}.self_attention.out_proj", 768, 768),
            **linear(f"{name}.mlp.0", 3072, 768),
            **linear(f"{name}.mlp.3", 768, 3072),
        }
    return shapes


PUBLISHED = [
    ("resnet50", "resnet50", published_resnet50, 25_557_032),
    ("vgg16_imagenet", "vgg16", published_vgg16, 138_357_544),
    ("vit_b_16", "vit_b_16", published_vit_b_16, 86_567_656),
]


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("name", "theirs", "published", "parameters"), PUBLISHED)
def test_names_shapes_and_parameters_are_the_published_ones(name, theirs, published, parameters):
    with torch.device("meta"):
        model = build(name, 1000, 224)
    assert shapes_of(model) == published()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@needs_torchvision
@pytest.mark.parametrize(("name", "theirs", "published", "parameters"), PUBLISHED)
def test_names_and_shapes_are_torchvisions(name, theirs, published, parameters):
    from torchvision import models

    with torch.device("meta"):
        assert shapes_of(models.get_model(theirs, weights=None)) == shapes_of(build(name, 1000, 224))


def small_pair(name):
    """One of our networks made small, and torchvision's of the same size."""
    from torchvision import models

    if name == "resnet50":
        theirs = models.resnet.ResNet(models.resnet.Bottleneck, [1, 2, 1, 1], num_classes=5)
        return BottleneckResNet(5, 3, (1, 2, 1, 1)), theirs
    if name == "vgg16_imagenet":
        layers = models.vgg.make_layers([8, "M", 16, 16, "M"])
        theirs = models.vgg.VGG(layers, num_classes=5)
        theirs.classifier[0] = torch.nn.Linear(16 * 49, 4096)
        return ImageNetVGG((8, "pool", 16, 16, "pool"), 5, 70, 3), theirs
    theirs = models.VisionTransformer(64, 16, 2, 4, 32, 48, num_classes=5)
    torch.nn.init.normal_(theirs.heads.head.weight)
    return VisionTransformer(5, 64, 3, layers=2, heads=4, width=32, hidden=48), theirs


@needs_torchvision
@pytest.mark.parametrize(("name", "size"), [("resnet50", 70), ("vgg16_imagenet", 70), ("vit_b_16", 64)])
def test_outputs_are_torchvisions(name, size):
    torch.manual_seed(0)
    ours, theirs = small_pair(name)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


def test_the_stride_of_resnet50_is_in_the_3x3_convolution():
    with torch.device("meta"):
        block = build("resnet50", 10, 64).layer2[0]
    assert (block.conv1.stride, block.conv2.stride, block.conv3.stride) == ((1, 1), (2, 2), (1, 1))


def tiny_vit(size=32):
    return VisionTransformer(3, size, 3, layers=1, heads=2, width=8, hidden=16)


def test_attention_is_softmax_of_scaled_products():
    torch.manual_seed(0)
    attention, x = tiny_vit().encoder.layers[0].self_attention, torch.randn(2, 5, 8)
    query, key, value = (x @ attention.in_proj_weight[8 * i : 8 * i + 8].T for i in range(3))
    heads = []
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        heads.append(torch.softmax(query[..., part] @ key[..., part].mT / 2, -1) @ value[..., part])
    expected = torch.cat(heads, -1) @ attention.out_proj.weight.T
    torch.testing.assert_close(attention(x), expected, rtol=1e-5, atol=1e-6)


def test_position_embeddings_follow_the_image_size():
    for size in (16, 32, 224, 384):
        with torch.device("meta"):
            assert image_size_of(tiny_vit(size).encoder.pos_embedding.shape) == size
    assert image_size_of((1, 8, 8)) is None and image_size_of((1, 1, 8)) is None and image_size_of((7,)) is None


@pytest.mark.parametrize(("size", "nearest"), [(8, 16), (100, 96), (225, 224)])
def test_images_that_do_not_divide_into_patches_are_refused(size, nearest):
    with pytest.raises(ModelError, match=rf"multiple of 16 pixels, not {size}; use --image-size {nearest}"):
        build("vit_b_16", 10, size)


def test_a_vit_trains():
    torch.manual_seed(0)
    model = tiny_vit()
    x, labels = torch.randn(6, 3, 32, 32), torch.arange(6) % 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(x), labels))
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_vit_starts_as_torchvisions_does_but_for_a_classifier_that_is_not_zero():
    torch.manual_seed(0)
    model = VisionTransformer(50, 32, 3, layers=1, heads=2, width=64, hidden=128)
    layer = model.encoder.layers[0]
    assert not model.class_token.any() and not layer.self_attention.in_proj_bias.any()
    assert model.encoder.pos_embedding.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.conv_proj.weight.std().item() == pytest.approx((1 / 768) ** 0.5, rel=0.05)
    assert layer.self_attention.in_proj_weight.abs().max() <= (6 / 256) ** 0.5  # Xavier's uniform bounds
    assert layer.mlp[0].weight.abs().max() <= (6 / 192) ** 0.5
    assert 0 < layer.mlp[0].bias.abs().max() < 1e-5
    assert not layer.self_attention.out_proj.bias.any()
    assert model.heads.head.weight.std().item() == pytest.approx(0.02, rel=0.1)
