"""``python -m snugfit``."""

from snugfit._cli import main

main()
