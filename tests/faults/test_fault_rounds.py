"""A few rounds of every kind of fault; ``benchmarks/fault_campaign.py`` runs the same ones for as long as one likes."""

import re
from pathlib import Path

import pytest
from campaign import KINDS, Campaign

from benchmarks.fault_mounts import NEED_MOUNTS

ONLY_LONG = ("every_power_cut", *NEED_MOUNTS)
QUICK = [kind for kind in KINDS if kind not in ONLY_LONG]


@pytest.fixture(scope="module")
def campaign():
    with Campaign(seed=0, size=30) as started:
        yield started


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("kind", QUICK)
def test_no_fault_breaks_a_promise(campaign, kind, number):
    """No acknowledged row is lost, none is wrong, and the run can be finished."""
    broken = campaign.run(kind, number)
    assert broken is None, broken.trace


def test_power_cuts_before_some_changes_break_no_promise(campaign):
    """The standard tier's part of every_power_cut."""
    broken = campaign.run("every_power_cut", 0, every=14)
    assert broken is None, broken.trace


def test_every_fault_has_a_test():
    """Every test and every round that the README names is there, every round is named, and no fault has neither."""
    here = Path(__file__).parent
    table = [line for line in (here / "README.md").read_text().splitlines() if line.startswith("| ")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]  # below the head
    folders = (here, here.parent / "store")
    sources = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    written = set(re.findall(r"(?:def|class) (\w+)", sources))
    assert len(lines) > 30
    for fault, tests, _ in lines:
        assert set(re.findall(r"`(\w+)`", tests)) <= written, fault
    rounds = [re.findall(r"`(\w+)`(\*?)", rounds) for _, _, rounds in lines]
    assert {name for names in rounds for name, _ in names} == {*KINDS, *NEED_MOUNTS}
    assert {name for names in rounds for name, star in names if star} == set(ONLY_LONG)
    assert all(tests or names for (_, tests, _), names in zip(lines, rounds, strict=True))
