"""A host that speaks the launcher's protocol and does, round after round, what its argument says."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

writing = threading.Lock()
plan = json.loads(sys.argv[1])


def say(said, **more):
    with writing:
        print(json.dumps({"said": said, **more}), flush=True)


def beat():
    while True:
        say("beat", age=plan.get("age", 0.0))
        time.sleep(0.1)


def act(what):
    if what == "done":
        say("done")
    elif what.startswith("fail"):
        say("failed", codes=[int(what.split()[1])])
    elif what.startswith("exit"):
        os._exit(int(what.split()[1]))
    elif what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)


marker = plan.get("once")
if marker and Path(marker).exists():  # started again: from now on all is well
    plan["rounds"] = ["done"] * 9
elif marker:
    Path(marker).touch()
begin = json.loads(sys.stdin.readline())
assert begin["order"] == "begin" and len(begin["secret"]) == 64 and begin["secret"] not in " ".join(sys.argv)
if plan.get("absent"):
    sys.exit(plan["absent"])
print("a greeting of the shell")
say("ready", pid=os.getpid(), store=plan.get("store"))
threading.Thread(target=beat, daemon=True).start()
for line in sys.stdin:
    order = json.loads(line)
    if order["order"] == "probe":
        ok = order["round"] not in plan.get("unreached", [])
        if not ok and plan.get("mended"):
            plan["unreached"].remove(order["round"])
        say("reached", round=order["round"], ok=ok, why=None if ok else "no route to host")
    elif order["order"] == "round":
        words = " ".join(f"{name}={order[name]}" for name in ("round", "host", "hosts", "first", "ranks"))
        say("out", line=f"{plan['name']}: {words}\n")
        act(plan["rounds"][order["round"]])
    elif order["order"] == "signal":
        say("out", line=f"{plan['name']}: {order['name']}\n")
        os._exit(130)
    elif order["order"] == "end":
        break
