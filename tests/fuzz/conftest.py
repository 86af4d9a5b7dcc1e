"""Makes ``benchmarks`` importable, which is not part of the installed package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
