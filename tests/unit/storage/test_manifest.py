"""The manifest of a run folder: true at every moment, whenever the process that writes is killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from snugfit._chain import UnitStore
from snugfit._storage.activation_cache import CacheWriter
from snugfit._storage.checkpoint import CheckpointStore
from snugfit._storage.digests import Digester, FileDigest
from snugfit._storage.files import write_json_atomic
from snugfit._storage.manifest import MANIFEST_FILE, Manifest, check_files
from snugfit._training.events import StepDone
from snugfit._training.metrics import MetricsWriter
from snugfit.errors import CheckpointError, OutOfStorageError


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, OutOfStorageError), (errno.EIO, CheckpointError)])
def test_a_manifest_that_cannot_be_written_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    write_json_atomic(tmp_path / "plan.json", {}, manifest := Manifest.reopen(tmp_path))
    manifest.settle()
    before = (tmp_path / MANIFEST_FILE).read_bytes()

    def fail(file: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("snugfit._storage.manifest.sync_file", fail)
    for change in (manifest.settle, lambda: manifest.add(tmp_path / "plan.json"), manifest.rewriting("plan").__enter__):
        with pytest.raises(kind, match=MANIFEST_FILE):
            change()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [MANIFEST_FILE, "plan.json"]
    assert (tmp_path / MANIFEST_FILE).read_bytes() == before and manifest.names == ("plan.json",)


class KilledError(BaseException):
    """The process has ended: nothing that follows has any effect."""


def work(folder: Path, cache: Path) -> None:
    """What a run writes: descriptions, weights anew, a cache, checkpoints, and what it removes."""
    manifest = Manifest.reopen(folder, cache)
    metrics = MetricsWriter(folder / "metrics.csv")
    metrics.truncate(0)
    write_json_atomic(folder / "request.json", {"seed": 1}, manifest)
    weights = UnitStore(folder / "weights", manifest)
    with manifest.rewriting("weights"):
        for index in range(2):
            weights.save(index, {"w": torch.zeros(3)})
    checkpoints = CheckpointStore(folder / "checkpoint", manifest)
    for epoch in range(2):
        metrics(StepDone("p", epoch, *[1] * 8))
        weights.save(0, {"w": torch.full((3,), float(epoch + 1))})
        with CacheWriter(cache, "block", 2, (3,), dtype="float32", manifest=manifest) as writer:
            writer.write(torch.full((2, 3), float(epoch)), torch.zeros(2, dtype=torch.int64))
            writer.close().close()
        checkpoints.save({"model": {"w": torch.full((2,), float(epoch))}}, {"epoch": epoch}, metrics.written())
    manifest.remove([cache / "block.rows", cache / "block.json"])
    manifest.announce(metrics.written(grows=False))
    write_json_atomic(folder / "record.json", {"accuracy": 1.0}, manifest)
    manifest.settle()


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """End the process at the ``moment``-th change of names or contents; returns the changes that were made."""
    made: list[str] = []

    def guard(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def act(*arguments: object, **options: object) -> object:
            if len(made) >= moment:
                raise KilledError
            made.append(f"{name} {arguments[0]}")
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, act)

    for name in ("replace", "rename", "unlink", "mkdir"):
        guard(Path, name)
    guard(os, "fsync")
    guard(Digester, "write")
    guard(shutil, "rmtree")
    return made


def test_whenever_it_is_killed_every_file_is_sound_and_the_work_can_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    moment, ended = 0, False
    while not ended:
        folder = tmp_path / str(moment)
        folder.mkdir()
        cache = tmp_path / f"cache{moment}" if moment % 2 else folder / "cache"
        with pytest.MonkeyPatch.context() as patch:
            made = kill_at(patch, moment)
            with suppress(KilledError):
                work(folder, cache)
                ended = True
        for _ in range(2):  # whoever takes it up
            manifest = Manifest.reopen(folder, cache)
            assert not list(manifest.flaws()), made[-3:]
            drafts = [path for place in (folder, cache) for path in place.rglob("*.tmp") if path.is_file()]
            assert not drafts, made[-3:]
            manifest.settle()
        if moment % 5:
            moment += 1
            continue
        work(folder, cache)
        manifest = Manifest.read(folder, cache)
        assert not list(manifest.flaws()) and "record.json" in manifest.names
        assert not [path for path in manifest.unlisted() if "cache" not in str(path)], made[-3:]
        moment += 1
    assert moment > 60, "the work makes many changes, each of which was tried"


@pytest.fixture
def written(tmp_path):
    work(tmp_path, tmp_path / "cache")
    return tmp_path


FILES = ("request.json", "record.json", "metrics.csv", "weights/unit_000.safetensors", "weights/unit_001.safetensors",
         "checkpoint/000001/model.safetensors", "checkpoint/000001/position.json")  # fmt: skip


def test_it_lists_every_file(written):
    manifest = Manifest.read(written)
    assert set(manifest.names) == set(FILES) and not list(manifest.unlisted())
    assert manifest.listed("request.json") == FileDigest.of(written / "request.json")


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_truncation_or_removal_is_noticed_and_named(written, name):
    path = written / name
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match=f"{path} is damaged or was changed"):
            check_files(written, name)
    for damaged in (content[:-1], content + b"x", b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{path} was truncated or changed"):
            Manifest.read(written).check_all()
    path.unlink()
    assert [flaw.missing for flaw in Manifest.read(written).flaws()] == [True]
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"{path} is no regular file"):
        check_files(written, name)


def test_any_damage_to_the_manifest_itself_is_noticed_or_changes_nothing(written):
    path = written / MANIFEST_FILE
    content, noticed = path.read_bytes(), 0
    files = Manifest.read(written)._files
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 7)]) + content[place + 1 :])
        try:
            assert Manifest.read(written)._files == files
        except CheckpointError as error:
            assert str(path) in str(error)
            noticed += 1
    assert noticed > 0.8 * len(content) / 3
    path.write_text(json.dumps({"format": 2, "digest": "", "files": {}}))
    with pytest.raises(CheckpointError, match="format 2"):
        Manifest.read(written)


def test_files_of_others_are_not_read_as_the_runs(written):
    (written / "weights" / "unit_000_a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a file of this run"):
        check_files(written, "weights/unit_000_a.safetensors")
    assert [path.name for path in Manifest.read(written).unlisted()] == ["unit_000_a.safetensors"]


def test_a_log_may_have_grown_but_not_changed(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("a,b\n1,2\n")
    grown = FileDigest(4, FileDigest.of(log).blake2b, grows=True)
    assert "damaged" in grown.flaw(log)
    metrics = MetricsWriter(tmp_path / "m.csv")
    metrics(StepDone("p", *range(9)))
    (digest,) = metrics.written().values()
    metrics(StepDone("p", *range(9)))
    assert digest.grows and digest.flaw(metrics.path) is None and digest.bytes < metrics.path.stat().st_size
    metrics.truncate(digest.bytes)
    assert metrics.written() == {metrics.path: digest}


def test_a_folder_whose_manifest_is_lost_is_refused_and_left_alone(tmp_path):
    (tmp_path / "request.json").write_text("{}")
    for use in (lambda: check_files(tmp_path, "request.json"), lambda: Manifest.read(tmp_path),
                lambda: Manifest.reopen(tmp_path)):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"not a run folder, or incomplete: it has no manifest\.json"):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["request.json"]


def test_an_empty_folder_is_begun_with_an_empty_manifest(tmp_path):
    (tmp_path / "manifest.json.tmp").write_text("{")  # its process was killed while it wrote the first
    assert Manifest.reopen(tmp_path / "new").names == Manifest.reopen(tmp_path).names == ()


def test_files_are_listed_as_they_are(tmp_path):
    (tmp_path / "request.json").write_text("{}")
    assert Manifest.of(tmp_path).names == ("request.json",)
    check_files(tmp_path, "request.json")
    (tmp_path / "request.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"request\.json is damaged or was changed"):
        check_files(tmp_path, "request.json")


@pytest.mark.parametrize("name", ["a\0b", "../x", "/etc/passwd", "", ".", "n" * 5000])
def test_a_manifest_that_names_what_no_run_folder_holds_is_refused(tmp_path, name):
    manifest = Manifest(tmp_path)
    manifest._write({name: (FileDigest(1, "x"),)})
    with pytest.raises(CheckpointError, match="no file of a run"):
        Manifest.read(tmp_path)


def test_a_manifest_of_a_file_without_a_digest_is_refused(tmp_path):
    Manifest(tmp_path)._write({"a": ()})
    with pytest.raises(CheckpointError, match="no file of a run"):
        Manifest.read(tmp_path)
