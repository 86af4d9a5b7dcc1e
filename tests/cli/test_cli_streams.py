"""Streams that are missing, full or without a reader, a working folder that is gone, and signals while modules load."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snugfit._cli.app import BROKEN_PIPE


@pytest.mark.parametrize(
    ("command", "closed"),
    [("train --out run", ">&-"), ("predict r photos", "2>&-"), ("plan --json", "<&- >&- 2>&-"), ("--help", ">&-")],
)
def test_a_missing_stream_is_as_if_nobody_read_it(command, closed, shell):
    found = shell(f"snugfit {command} {closed}")
    assert found.returncode == 0
    assert "rror" not in found.stderr


@pytest.mark.parametrize(("command", "told"), [("train --out run", "run"), ("profile --json", "units"), ("plan", "")])
def test_what_cannot_be_told_on_stderr_harms_nothing(command, told, shell):
    full = shell(f"snugfit {command} 2>/dev/full")
    assert full.returncode == 0 and told in full.stdout


@pytest.mark.parametrize("command", ["train --out run", "plan --json", "predict r photos", "--help"])
def test_a_full_stdout_is_out_of_storage(command, shell):
    found = shell(f"snugfit {command} >/dev/full")
    errors = [line for line in found.stderr.splitlines() if "rror" in line]
    assert found.returncode == 6
    assert errors == ["error: cannot write the result to stdout: No space left on device. Redirect it elsewhere."]
    assert "Traceback" not in found.stderr


def test_a_stdout_that_cannot_be_written_at_all(shell):
    found = shell("snugfit plan --json 1</dev/null")
    assert found.returncode == 2 and "error: cannot write the result to stdout: Bad file descriptor" in found.stderr


@pytest.mark.parametrize("command", ["evaluate r --json", "predict r photos --out p.csv", "--help"])
def test_a_reader_that_went_away_is_no_error(command, shell):
    found = shell(f"snugfit {command} | true")
    assert found.returncode == BROKEN_PIPE and "rror" not in found.stderr


def test_a_first_line_is_enough(shell):
    found = shell("snugfit predict r many | head -1")
    assert (found.returncode, found.stdout) == (BROKEN_PIPE, "path,class,probability\n")
    assert "rror" not in found.stderr


@pytest.mark.parametrize("stream", [">/dev/full", "| true", ">&-"])
def test_an_error_keeps_its_code_where_its_json_cannot_be_told(stream, shell):
    found = shell(f"snugfit plan --precision float8 --json {stream}")
    assert found.returncode == 2
    assert found.stderr.startswith("error: unknown --precision 'float8'") and len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["train", "cluster plan --model m --image-size 8 --json"])
def test_a_working_folder_that_is_gone(command, shell):
    found = shell(f"mkdir gone; cd gone; rmdir ../gone; snugfit {command}")
    assert found.returncode == 2
    assert found.stderr == "error: the working folder no longer exists; change to another one.\n"
    assert not found.stdout or json.loads(found.stdout)["error"]["code"] == 2


SLOW = """
import sys, time
class Slow:
    def find_spec(self, name, path, target=None):
        if name == NAME:
            print("loading", file=sys.stderr, flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from snugfit._cli import main
main()
"""


@pytest.mark.parametrize(
    ("module", "as_json", "number"),
    [
        ("snugfit._cli.app", True, signal.SIGINT),
        ("cyclopts", False, signal.SIGTERM),
        ("snugfit._cli.startup", False, signal.SIGINT),
        ("snugfit._cli.startup", True, signal.SIGTERM),
    ],
)
def test_a_signal_while_the_command_loads(module, as_json, number, fakes, tmp_path):
    code = SLOW.replace("NAME", repr(module))
    command = [sys.executable, "-c", code, "plan", *(["--json"] if as_json else [])]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "loading\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: interrupted.\n")
    assert (json.loads(out)["error"]["code"] == 130) if as_json else out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_worker_loads_what_swallows_exceptions(number, start, tmp_path, monkeypatch):
    """As native modules do, which make ImportErrors of whatever comes while they load."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "fake_api.py").write_text(
        "import time\nfrom pathlib import Path\ntry:\n    Path('loading').touch()\n    time.sleep(60)\n"
        "except BaseException:\n    raise ImportError('swallowed')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "slow"), prepend=os.pathsep)
    process = start("train", "--json")
    while not (tmp_path / "loading").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["error"]["code"]) == (130, 130)
    assert err == f"error: interrupted by {signal.Signals(number).name}.\n"


def test_streams_are_three_descriptors_whatever_was_closed(shell, tmp_path: Path):
    """No file that is opened later may take the number of a stream that is missing."""
    line = "import os, sys; from snugfit._cli.startup import prepare_streams; prepare_streams(); "
    line += "f = open('later', 'w'); os.write(1, b'x'); print(f.fileno() > 2, file=f)"
    found = shell(f"{shlex.quote(sys.executable)} -c {shlex.quote(line)} <&- >&- 2>&-")
    assert found.returncode == 0 and (tmp_path / "later").read_text() == "True\n"


NO_JOB = '{"command": "", "debug": false}'
ENDING = """
import os, signal, sys
from snugfit._cli import worker
reading, writing = os.pipe()
sys.argv = ["worker", str(writing), str(os.getppid())]
worker.die_with_parent = lambda: None
worker._work = {work}
code = worker.main()
for number in worker.FORWARDED:
    os.kill(os.getpid(), number)
print(code, os.read(reading, 1000).decode())
"""


@pytest.mark.parametrize(("work", "said"), [("lambda job, send: 7", '0 {"result": 7}'), ("None", "1 {")])
def test_a_worker_that_is_done_ends_in_silence_whatever_signals_come(work: str, said: str) -> None:
    """A signal while the interpreter ends would show a traceback of whatever module is being torn down."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(work=work)], input=NO_JOB, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(said)


def test_the_command_ends_with_its_code_whatever_signals_come_at_its_end() -> None:
    script = """
import atexit, os, signal, sys
atexit.register(lambda: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
from snugfit._cli import app
app.run = lambda tokens: 3
app.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (3, "")


SWALLOWED = """
import os, signal, sys, time
from snugfit._cli import worker
reading, writing = os.pipe()
sys.argv = ["worker", str(writing), str(os.getppid())]
worker.die_with_parent = lambda: None
start_timer = signal.setitimer
signal.setitimer = lambda which, seconds: start_timer(which, {delay})

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(100))

def work(job, send):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Dying()
    time.sleep({seconds})
    return 7

worker._work = work
print(worker.main(), os.read(reading, 1000).decode())
"""


@pytest.mark.parametrize(("seconds", "delay", "said"), [(60, 0.01, "130 {"), (0, 60, '0 {"result": 7}')])
def test_an_interrupt_in_a_finalizer_interrupts_without_a_traceback(seconds: int, delay: float, said: str) -> None:
    """Unless the work is done before it is delivered again."""
    code = SWALLOWED.format(seconds=seconds, delay=delay)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=NO_JOB,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(said)


def test_a_quick_exit_keeps_code_output_threads_and_exit_handlers():
    script = (
        "import atexit, sys, threading, time; from snugfit._cli.startup import quick_exit\n"
        "def main():\n"
        "    atexit.register(print, 'handler')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "    sys.never_freed = type('Noisy', (), {'__del__': lambda self: print('freed')})()\n"
        "    print('main')\n"
        "    return 7\n"
        "leave = quick_exit()\nleave(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (7, ["main", "thread", "handler"], "")


def test_a_main_that_raises_exits_as_usual():
    script = "from snugfit._cli.startup import quick_exit\nquick_exit()(1 // 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
