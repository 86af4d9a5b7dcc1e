"""Images that are found to predict: those that training would find."""

from PIL import Image

from snugfit._engine.inference import _image_paths


def test_links_are_followed_and_hidden_folders_are_not(tmp_path):
    for name in ("real/a/0.jpg", "real/b/1.gif", "photos/.hidden/2.jpg", "photos/.3.jpg", "photos/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name, format="PNG")
    for name in "ab":
        (tmp_path / "photos" / name).symlink_to(tmp_path / "real" / name)
    found = [str(path.relative_to(tmp_path / "photos")) for path in _image_paths(tmp_path / "photos")]
    assert found == ["a/0.jpg", "b/1.gif"]
