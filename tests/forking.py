"""A process that forks another for every order, so that no start costs an import, and who gives the orders."""

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

SYNC = os.fsync
answers = -1
"""The pipe for the answer; a child that outlives its parent closes it."""


def serve(actions):
    """Read orders from stdin until it ends.

    ``{"wait": pid}`` prints the exit status and the answer of a fork. Any other order is carried out by a fork, whose
    process id is printed: its answer is what the function of this name returns, or how it failed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.fsync = lambda fd: None  # a kill leaves the page cache alone: no need to wait for the disk
    pipes = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            pid = order["wait"]
            with os.fdopen(pipes.pop(pid), "rb") as pipe:
                answer = pipe.read()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(json.dumps([status, json.loads(answer or b"null")]), flush=True)
            continue
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _carry_out(order, theirs, actions)
        os.close(theirs)
        pipes[pid] = ours
        print(pid, flush=True)


def _carry_out(order, pipe, actions):
    global answers
    answers, status = pipe, 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(order["patience"])
    try:
        os.environ.update(order["environment"])
        if order["synced"]:
            os.fsync = SYNC
        answer = actions[order["action"]](*order["arguments"])
    except BaseException as error:  # whatever it is, the one who gave the order wants to know
        traceback.print_exc()
        answer, status = {"failed": traceback.format_exc(), **getattr(error, "counts", {})}, 1
    os.write(pipe, json.dumps(answer).encode())
    os._exit(status)


class Forks:
    """Gives orders to a script that serves them; ``patience`` is the number of seconds until SIGALRM ends a fork."""

    def __init__(self, script, *, patience=0):
        here = Path(__file__).parent
        folders = [str(Path(script).parent), str(here), str(here / "store"), str(here.parent)]
        paths = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))
        self._patience = patience
        self._process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": paths},
        )

    def start(self, action, *arguments, failpoint=None, synced=False):
        """Start an action and return its process id."""
        environment = {} if failpoint is None else {"TRAK_LITE_FAILPOINT": failpoint}
        order = {"action": action, "arguments": arguments, "environment": environment}
        return self._ask({**order, "synced": synced, "patience": self._patience})

    def wait(self, pid):
        """Return exit status (negative: the signal) and answer."""
        return self._ask({"wait": pid})

    def close(self):
        self._process.communicate()

    def _ask(self, order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())
