"""The campaign consists of tests that there are, and CI runs a part of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from late import Late
from tiers import CAMPAIGN, DAILY, EACH_VALUE, SOME

TESTS = Path(__file__).parent
WHOLE = [name for names in CAMPAIGN.values() for name in names]


def test_what_a_tier_names_is_there() -> None:
    for name in (*WHOLE, *SOME, *EACH_VALUE, *DAILY):
        file, *inside = name.split("::")
        if (TESTS / file).is_dir():
            continue
        text = (TESTS / file).read_text(encoding="utf-8")
        lost = [part for part in inside if not re.search(rf"^ *(def|class) {part}\b", text, re.M)]
        assert not lost, f"{file} has no {lost}"


def test_no_name_has_two_rules() -> None:
    names = [*WHOLE, *SOME, *EACH_VALUE]
    assert len(names) == len(set(names))


def test_contributing_names_every_part_of_the_campaign() -> None:
    text = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| `tests/", text, re.M)
    assert set(CAMPAIGN) <= set(rows)
    for what, names in CAMPAIGN.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {what} |"))
        listed = set(re.findall(r"`(tests/\w+(?:\.py)?)`", row))
        assert {f"tests/{name.split('::')[0].split('/')[0]}" for name in names} <= listed, what


def test_ci_runs_a_part_of_the_campaign_that_there_is() -> None:
    script = (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")
    paths = re.findall(r"\btests/[\w./]+", script)
    assert "-m campaign" in script
    assert [path for path in paths if not (TESTS.parent / path).exists()] == []


def test_collecting_imports_no_package_that_a_test_names_late() -> None:
    """pytest asks all that a file names for attributes that begin with an underscore."""
    package = Late("this")  # prints a poem when it is imported
    assert not hasattr(package, "__wrapped__")
    assert not hasattr(package, "_mock_name")
    assert "this" not in sys.modules
    assert package.d["A"] == "N"
    del sys.modules["this"]  # tests of security look for it
