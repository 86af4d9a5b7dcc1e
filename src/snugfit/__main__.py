"""``python -m snugfit``."""

from snugfit.cli import main

main()
