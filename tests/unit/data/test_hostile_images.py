"""Images that would take too much memory or time, or that make decoders raise what they never document."""

import contextlib
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from snugfit._data import Decoder, from_dataset
from snugfit._data.decode import check_headers, decode
from snugfit.errors import DataError


def refused(path, match, use=lambda path: decode(path, 8)):
    with pytest.raises(DataError, match=match) as caught:
        use(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def claim(path, width, height, **options):
    """A small JPEG whose header says that it is larger."""
    Image.new("L", (16, 16)).save(path, **options)
    data = bytearray(path.read_bytes())
    frame = data.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("use", [lambda path: decode(path, 8), lambda path: check_headers([path])])
def test_a_png_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch, use):
    Image.new("1", (8000, 8000)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    refused(tmp_path / "large.png", "8000 x 8000 pixels are more than 50,000,000. Replace it", use)


def test_a_plain_jpeg_of_as_many_is_shrunk_while_it_is_decoded(tmp_path):
    Image.new("L", (8000, 8000), 200).save(tmp_path / "large.jpg")
    assert np.abs(np.asarray(decode(tmp_path / "large.jpg", 8)).astype(int) - 200).max() <= 2


def test_a_plain_jpeg_that_cannot_be_shrunk_enough_is_refused(tmp_path):
    refused(claim(tmp_path / "wide.jpg", 60000, 1000), "60000 x 1000 pixels", lambda path: decode(path, 1000))


def test_a_progressive_jpeg_cannot_be_shrunk(tmp_path):
    """Its coefficients are held as a whole."""
    refused(claim(tmp_path / "large.jpg", 9000, 9000, progressive=True), "9000 x 9000 pixels are more")


def test_a_progressive_jpeg_of_very_many_scans_is_refused(tmp_path):
    path = tmp_path / "slow.jpg"
    Image.new("L", (16, 16)).save(path, progressive=True)
    data = path.read_bytes()
    end = data.index(b"\xff\xd9")
    scan = data[data.rindex(b"\xff\xda") : end]
    path.write_bytes(data[:end] + scan * 200 + data[end:])
    refused(path, "over 100 scans")


@pytest.mark.parametrize("kind", [b"VP8X", b"VP8L", b"VP8 "])
def test_a_webp_of_too_many_pixels_is_refused_before_it_is_opened(tmp_path, monkeypatch, kind):
    head = {
        b"VP8X": bytes(4) + (12000 - 1).to_bytes(3, "little") * 2,
        b"VP8L": b"\x2f" + ((12000 - 1) | (12000 - 1) << 14).to_bytes(4, "little") + bytes(5),
        b"VP8 ": b"\0\0\0\x9d\x01\x2a" + (12000).to_bytes(2, "little") * 2,
    }[kind]
    (tmp_path / "large.webp").write_bytes(b"RIFF\0\0\0\0WEBP" + kind + bytes(4) + head + bytes(90))
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was opened"))
    refused(tmp_path / "large.webp", "12000 x 12000 pixels are more")


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0"}])
def test_an_ordinary_webp_is_read(tmp_path, options):
    Image.new("RGB", (40, 30), (9, 99, 200)).save(tmp_path / "fine.webp", **options)
    assert np.abs(np.asarray(decode(tmp_path / "fine.webp", 8)).astype(int) - (9, 99, 200)).max() <= 4


def test_a_file_larger_than_any_image_is_refused(tmp_path):
    path = tmp_path / "huge.webp"
    with path.open("wb") as file:
        file.write(b"RIFF\0\0\0\0WEBPVP8X")
        file.truncate(1 << 29)
    refused(path, "536,870,912 bytes are more than")


def test_text_that_asks_for_too_much_memory_is_no_lack_of_memory(tmp_path, monkeypatch):
    """Pillow's own error says 'memory', which counted as an exceeded budget."""
    text = PngImagePlugin.PngInfo()
    for index in range(9):
        text.add_text(f"key{index}", "x" * 500, zip=True)
    Image.new("L", (9, 9)).save(tmp_path / "text.png", pnginfo=text)
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 1000)
    refused(tmp_path / "text.png", "Too much memory used in text chunks")


@pytest.mark.parametrize(
    "error", [OverflowError("x"), TypeError("x"), KeyError("x"), AssertionError(), RecursionError()]
)
def test_whatever_a_decoder_raises_is_one_error(tmp_path, monkeypatch, error):
    def fail(self):
        raise error

    Image.new("L", (9, 9)).save(tmp_path / "odd.png")
    monkeypatch.setattr(Image.Image, "getexif", fail)
    refused(tmp_path / "odd.png", "cannot read the image")


def test_lack_of_memory_stays_one(tmp_path, monkeypatch):
    def fail(self):
        raise OSError("out of memory error when reading image file")

    Image.new("L", (9, 9)).save(tmp_path / "fine.png")
    monkeypatch.setattr(Image.Image, "getexif", fail)
    with pytest.raises(MemoryError):
        Decoder(8, workers=0)([tmp_path / "fine.png"])


def test_images_of_a_data_set_of_ones_own_have_the_same_limit():
    data = [(Image.new("1", (8000, 8000)), label) for label in (0, 1)]
    splits = from_dataset(data, data, image_size=8)
    with pytest.raises(DataError, match=r"cannot read image 0 of the data set: 8000 x 8000 pixels are more"):
        splits.train.images([0])


def test_a_chunk_that_promises_gigabytes_takes_no_memory(tmp_path):
    """Pillow asks for as many bytes as a PNG says that there are, and Python allocates them before it reads."""
    Image.new("RGB", (9, 9)).save(path := tmp_path / "chunk.png")
    data = bytearray(path.read_bytes())
    start = data.index(b"IDAT") - 4
    data[start : start + 4] = struct.pack(">I", 0x7FFFFFFF)
    path.write_bytes(data)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 28), before[1]))
    try:
        with contextlib.suppress(DataError):  # not MemoryError
            decode(path, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
