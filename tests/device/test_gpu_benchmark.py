"""``python -m benchmarks.gpu``: rehearsed on the stand-in, resumed, and with cases that crash and hang."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stand_in

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.checks import summary
from benchmarks.gpu.parts import PARTS, Part

ROOT = Path(__file__).parents[2]
LIBRARY = "TRAK_LITE_STAND_IN"
OPTIONS = argparse.Namespace(device="stand_in", small=True)


def rehearse(library, out, part):
    """Run the command and return the lines that it added."""
    before = len(out.read_text().splitlines()) if out.exists() else 0
    run = [sys.executable, "-m", "benchmarks.gpu", "--device", "stand_in", "--small", "--out", str(out)]
    environment = {**os.environ, LIBRARY: str(library), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, "--parts", part], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return [json.loads(line) for line in out.read_text().splitlines()[before:]]


on_the_stand_in = [
    pytest.mark.slow,
    pytest.mark.skipif(stand_in.why_unbuildable() is not None, reason=str(stand_in.why_unbuildable())),
    pytest.mark.skipif(LIBRARY in os.environ, reason="runs on the stand-in already"),
]


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=on_the_stand_in) for part in PARTS if part != "tests"]
)
def test_every_part_is_rehearsed_and_not_measured_twice(part, library, tmp_path):
    lines = rehearse(library, tmp_path / "gpu.jsonl", part)
    assert all(line.get("equal", True) and line.get("within", True) for line in lines)
    if part == "projection":
        assert all(line["device"] == "stand_in" and line["small"] for line in lines)
        found = [(line["part"], line["case"]) for line in lines]
        assert found == [(part, case) for case in PARTS[part].cases(True)]
        not_run = [line for line in lines if "not run" in line]
        assert {line["case"].split()[0] for line in not_run} == {"traker,"}
        assert all("needs CUDA" in line["not run"] for line in not_run)
        again = rehearse(library, tmp_path / "gpu.jsonl", part)
        assert [line["case"] for line in again] == [line["case"] for line in not_run]


def test_a_case_that_crashes_or_hangs_costs_only_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAK_LITE_CHILD", str(tmp_path / "pid"))
    monkeypatch.setattr(command, "WORKER", "tests.device.gpu_victims")
    monkeypatch.setitem(PARTS, "victims", Part(lambda small: {}, 60, 2))
    cases = ["first", "crashes", "second", "hangs", "exits", "last"]
    lines = command.run_part("victims", cases, OPTIONS, time.monotonic() + 60)
    found = {line.pop("case"): line for line in lines}
    assert list(found) == cases
    assert found["first"] == found["second"] == found["last"] == {"ms": 1}
    assert found["crashes"]["fails"].startswith("the process ended with status -11")
    assert found["hangs"]["fails"] == "did not end within its time"
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"
    assert found["exits"]["fails"] == "the process ended with status 1: no memory"


def test_only_what_has_time_and_no_result_of_this_device_is_measured(tmp_path):
    found = list(command.run_part("features", ["a", "b"], OPTIONS, time.monotonic()))
    assert found == [{"case": case, "not run": "the time of the part is over"} for case in "ab"]
    line = {"part": "features", "case": "a", "device": "H", "small": False}
    lines = [line, {**line, "case": "b", "fails": "x"}, {**line, "case": "c", "not run": "x"}]
    lines += [{**line, "case": "d", "device": "other"}, {**line, "case": "e", "small": True}]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command.measured(tmp_path / "gpu.jsonl", "H", False) == {("features", "a")}
    assert command.measured(tmp_path / "none", "H", False) == set()


def test_counts_and_failures_are_read_from_the_output_of_pytest():
    failure = "FAILED tests/projectors/test_triton_sketch.py::test_a[1] - assert False"
    output = f"..F\n=== short ===\n{failure}\n1 failed, 12 passed, 2 skipped, 40 deselected in 3.21s\n"
    assert summary(output) == {"passed": 12, "failed": 1, "skipped": 2, "failures": [failure]}
    with pytest.raises(RuntimeError, match="without counts: no such file"):
        summary("no such file")
