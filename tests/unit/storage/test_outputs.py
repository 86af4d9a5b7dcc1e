"""Places that are to be written: checked without a trace, and files that are whole or not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from snugfit._storage.outputs import require_file, require_folder, require_run_folder, whole_file
from snugfit.errors import OutOfStorageError, UsageError


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    """A folder with a file, links that lead nowhere, in a circle and to the file, and a pipe."""
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").write_text("kept")
    Path("nowhere").symlink_to("missing/place")
    Path("circle").symlink_to("circle")
    Path("link").symlink_to("full/file")
    os.mkfifo("pipe")
    return tmp_path


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


FOLDERS = ["/proc/x", "/proc/x/y", "nowhere", "nowhere/x", "circle", "full/file", "full/file/x", "/dev/null", "pipe",
           "x" * 300]  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_cannot_be_is_refused(folder, there):
    before = listing(there)
    for check in (require_folder, require_run_folder):
        with pytest.raises(UsageError, match=f"cannot write {folder}.*Choose another --out") as error:
            check(folder)
        assert error.value.exit_code == 2 and len(str(error.value).splitlines()) == 1
    assert listing(there) == before


@pytest.mark.parametrize("folder", ["new", "new/deep/er", "full", ".", "full/sub"])
def test_a_folder_that_can_be_leaves_no_trace(folder, there):
    before = listing(there)
    require_folder(folder)
    assert listing(there) == before


def test_a_run_folder_is_new_or_empty(there):
    require_run_folder("new/run")
    (there / "empty").mkdir()
    require_run_folder("empty")
    with pytest.raises(UsageError, match="full is not empty; choose another --out, or continue it with --resume full"):
        require_run_folder("full")


@pytest.mark.parametrize(
    "path", ["/proc/x.csv", "nowhere", "circle", "full", "new/x.csv", "full/file/x", "x" * 300, "no/"]
)
def test_a_file_that_cannot_be_is_refused(path, there):
    before = listing(there)
    with pytest.raises(UsageError, match=f"cannot write {path}.*Choose another --out"):
        require_file(path)
    with pytest.raises(UsageError, match=f"cannot write {path}"), whole_file(path):
        pass
    assert listing(there) == before


@pytest.mark.parametrize("path", ["new.csv", "full/file", "full/new", "link", "/dev/null", "/dev/full", "pipe"])
def test_a_file_that_can_be_is_not_touched(path, there):
    before = listing(there)
    require_file(path)
    assert listing(there) == before and Path("full/file").read_text() == "kept"


def test_a_link_stays_a_link(there):
    with whole_file("link") as file:
        file.write("new")
        assert Path("full/file").read_text() == "kept", "until it is complete"
    assert Path("link").is_symlink() and Path("full/file").read_text() == "new"
    (there / "missing").mkdir()
    with whole_file("nowhere") as file:
        file.write("new")
    assert Path("missing/place").read_text() == "new" and Path("nowhere").is_symlink()


def test_what_breaks_off_leaves_the_old_file_alone(there):
    before = listing(there)
    with pytest.raises(ValueError), whole_file("full/file") as file:
        file.write("half")
        raise ValueError
    assert Path("full/file").read_text() == "kept" and listing(there) == before


def test_devices_and_pipes_are_written_into():
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    with whole_file("pipe") as file:
        file.write("through")
    reader.join(30)
    assert read == ["through"] and Path("pipe").is_fifo()
    with pytest.raises(OutOfStorageError, match="no space left to write /dev/full"), whole_file("/dev/full") as file:
        file.write("lost")
    assert Path("/dev/full").is_char_device()
