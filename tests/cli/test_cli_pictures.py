"""``snugfit report --pictures`` on a real run, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NETS = """
from torch import nn

def make(classes):
    parts = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 36, classes))
"""


def snug(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snugfit", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_a_run_with_lls_mxm_has_all_three_pictures(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    options = ["--model", "nets:make", "--image-size", "16", "--max-train", "64", "--max-val", "20", "--epochs", "1"]
    snug(
        "train",
        "--strategy",
        "blockwise",
        "--module-units",
        "1",
        "--local-loss",
        "lls-mxm",
        *options,
        "--out",
        "run",
        cwd=tmp_path,
    )
    page = tmp_path / "run" / "report.html"
    assert "<h2>Pictures" not in page.read_text()
    said = json.loads(snug("report", "run", "--pictures", "--json", cwd=tmp_path).stdout)
    assert said == {"schema": 1, "report": "run/report.html", "missing": []}
    section = page.read_text().partition("<h2>Pictures</h2>")[2].partition("</section>")[0]
    for label in ("Spectra of class vectors", "t-SNE of the learned", "Grad-CAM heat maps"):
        assert f'aria-label="{label}' in section
