"""The README says what is so: its code runs, its commands work, its table is what was measured."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
MAIN_JOB, TESTS = (text for language, text in BLOCKS if language == "bash")


def test_the_readme_is_short_and_has_two_commands_and_one_picture() -> None:
    assert len(README.splitlines()) <= 110
    assert len(BLOCKS) == len(PYTHON) + 2
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert len(pictures) == 1
    assert (ROOT / pictures[0]).is_file()


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run_as_they_stand_and_again(code: str, tmp_path: Path) -> None:
    printed = []
    for _ in range(2):
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert "TopRows" in printed[0]
    assert printed[1].startswith(printed[0])
    added = printed[1][
        len(printed[0]) :
    ]  # the verdict is of stored trainings, and says how they were compared
    said = "Stored outputs were used. Trained again, to compare: subset 0, seed 0"
    assert not added or added.startswith(said)


def link_dependencies(package: Distribution, extras: Iterable[str], folder: Path, seen: set[str]) -> None:
    """Link the installed packages that a package names as its dependencies, and theirs, into a folder."""
    for text in package.requires or ():
        needed = Requirement(text)
        wanted = needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *extras))
        keys = {f"{needed.name}[{extra}]" for extra in ("", *needed.extras)}
        if not wanted or keys <= seen:
            continue
        seen |= keys
        found = distribution(needed.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        link_dependencies(found, needed.extras, folder, seen)


@pytest.mark.slow
def test_the_main_job_command_works_in_a_fresh_folder(tmp_path: Path) -> None:
    """The command word for word: a new environment, an installation from this tree, the example.

    What the package names as its dependencies, and nothing else that is installed here, stands for a download of it.
    """
    for name in ("setup.py", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("trak_lite", "examples", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    named = tmp_path / "named"
    named.mkdir()
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tmp_path, check=True)
    link_dependencies(Distribution.at(tmp_path / "trak_lite.egg-info"), ["demo"], named, set())
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    # What is imported is compiled then: a small part of what is installed.
    environment |= {"PIP_COMPILE": "0", "PIP_NO_DEPS": "1", "PYTHONPATH": str(named)}
    command = ["bash", "-euo", "pipefail", "-c", MAIN_JOB]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "flipped labels, AUC" in done.stdout
    assert (tmp_path / "runs" / "digits" / "gallery.png").is_file()
    assert list((tmp_path / ".venv").rglob("site-packages/trak_lite/attributor.py"))
    assert (named / "sklearn").is_dir()
    assert not list(named.glob("fast_jl*"))


def test_the_tests_command_is_the_one_that_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()

    assert "pytest" in TESTS
    assert 'block for block in blocks if "pytest" in block' in script


def test_the_speed_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "attributor.json").read_text())["cases"]
    text = " ".join(README.split())

    ratios = [f"1/{case['ratio']:.0f}" for case in measured]
    ours, theirs = (
        [f"{case[tool]['peak_mib']:.0f}" for case in measured] for tool in ("trak_lite", "original")
    )
    assert f"take {listed(ratios)} of the CPU time" in text
    assert f"and {listed(ours)} MiB of memory in place of {listed(theirs)}." in text
    assert all(case["ratio"] >= 4 for case in measured)


def listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def lds() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "lds.json").read_text())["parts"]


def test_the_accuracy_table_is_what_was_measured() -> None:
    for name, methods in ACCURACY.items():
        assert accuracy_row(name, methods) in README.splitlines()


def test_the_text_says_how_often_the_default_is_ahead_of_the_best_other_package() -> None:
    path = ROOT / "benchmarks" / "results" / "lds_summary.json"
    problems = json.loads(path.read_text())["parts"]["problems"]
    intervals = [found["peer"]["difference"]["interval"] for found in problems.values() if found.get("peer")]
    ahead, behind = sum(low > 0 for low, _ in intervals), sum(high < 0 for _, high in intervals)
    text = " ".join(README.split())
    assert f"ahead on {ahead} of {len(intervals)} problems and behind on {behind}" in text


SETTINGS = ("digits_relu", "affairs", "python_lm")
ACCURACY = {
    "trak_lite, default": ["default, run"],
    "kronfluence 1.0.1": [
        "kronfluence 1.0.1 EK-FAC, run",
        "kronfluence 1.0.1 EK-FAC, heuristic damping, run",
        "kronfluence 1.0.1 EK-FAC of log p, run",
        "kronfluence 1.0.1 EK-FAC, heuristic damping of log p, run",
    ],
    "dattri 0.3.0, TRAK": ["dattri 0.3.0 TRAK, run", "dattri 0.3.0 TRAK, regularization 0.1, run"],
    "traker 0.3.2, TRAK": ["traker 0.3.2, run"],
    "TRAK, undamped": ["undamped TRAK, run"],
}


def accuracy_row(name: str, methods: list[str]) -> str:
    """Return the row of what a package reached at best, over all the ways in which it was asked."""
    cells = []
    for setting in SETTINGS:
        found = [lds().get(f"{setting} / {method}", {}) for method in methods]
        means = [part["lds_all"]["mean"] for part in found if "lds_all" in part]
        cells.append(f"{max(means):.2f}" if means else "-")
    return f"| {name} | {' | '.join(cells)} |"
