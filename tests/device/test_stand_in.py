"""Runs the tests of this folder on the stand-in accelerator, in processes: a device's name is a process's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in

FOLDER = Path(__file__).parent
LIBRARY = "TRAK_LITE_STAND_IN"
COUNTS = FOLDER / "test_device_counts.py"
OTHERS = sorted(set(FOLDER.glob("test_device_*.py")) - {COUNTS})
pytestmark = [
    pytest.mark.skipif(stand_in.why_unbuildable() is not None, reason=str(stand_in.why_unbuildable())),
    pytest.mark.skipif(LIBRARY in os.environ, reason="runs on the stand-in already"),
]


@pytest.mark.parametrize("files", [[COUNTS], OTHERS], ids=["device_counts", "others"])
def test_the_product_runs_on_an_accelerator(files, library):
    options = ["-q", "-p", "no:xdist", "--tb=short", "-rs"]
    environment = {**os.environ, LIBRARY: str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.quick
def test_a_machine_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "g++" in str(stand_in.why_unbuildable())
