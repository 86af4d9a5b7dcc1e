"""``snugfit report --pictures`` on a real run, from the command line."""

from __future__ import annotations

import json

from command_line import snug

NETS = """
from torch import nn

def make(classes):
    parts = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 36, classes))
"""


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
