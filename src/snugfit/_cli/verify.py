"""``snugfit verify``: whether the files of a run are unchanged."""

from __future__ import annotations

from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import SCHEMA, print_json
from snugfit._core.serial import to_data
from snugfit._storage.verify import Verification
from snugfit._storage.verify import verify as look
from snugfit.errors import CheckpointError


def verify(run: str, /, *, output: OutputOptions = SHOW_ALL) -> int:
    """Compare every file of a run folder with the digest that was recorded when it was written.

    Names each file that is damaged, missing or extra; exits with 4 if one is damaged or missing.

    For example:

    ```
    snugfit verify runs/first
    ```

    Args:
        run: folder of a run, finished or not.
        output: what is shown.

    Returns:
        The exit code.
    """
    found = look(run)
    if output.json:
        print_json({"schema": SCHEMA, "sound": found.sound, **to_data(found)})
    else:
        print("\n".join(_lines(found)))
    return 0 if found.sound else CheckpointError.exit_code


def _lines(found: Verification) -> list[str]:
    lines = [f"damaged  {name}: it {words}" for name, words in found.damaged.items()]
    lines += [f"missing  {name}" for name in found.missing]
    lines += [f"extra    {name}" for name in found.extra]
    bad = len(found.damaged) + len(found.missing)
    state = f"{bad} of them not as written" if bad else "all as written"
    return [*lines, f"{found.files} files, {state}"]
