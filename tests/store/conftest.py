"""The process that forks victims, shared by the tests of this folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


class Victims:
    """Starts actions of ``store_victims`` in processes of their own."""

    def __init__(self):
        here = Path(__file__).parent
        paths = [str(here), str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(here / "store_victims.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def start(self, action, *arguments, failpoint=None):
        environment = {} if failpoint is None else {"TRAK_LITE_FAILPOINT": failpoint}
        return self._ask({"action": action, "arguments": arguments, "environment": environment})

    def wait(self, pid):
        """Return exit status (negative: the signal) and answer."""
        return self._ask({"wait": pid})

    def run(self, action, *arguments):
        """Run to the end and return the answer."""
        status, answer = self.wait(self.start(action, *arguments))
        assert status == 0
        return answer

    def killed(self, failpoint, action, *arguments):
        """Return whether the process died at the failpoint (and did not just get to the end)."""
        status, _ = self.wait(self.start(action, *arguments, failpoint=failpoint))
        assert status in (0, -signal.SIGKILL)
        return status != 0

    def close(self):
        self._process.communicate()

    def _ask(self, order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def victims():
    started = Victims()
    yield started
    started.close()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.zarr")
