"""Enter a control group, then become snugfit: python -m benchmarks.boards_inside GROUP train ..."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, "-m", "snugfit", *sys.argv[2:]])
