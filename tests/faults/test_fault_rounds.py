"""A few rounds of every kind of fault; ``benchmarks/fault_campaign.py`` runs the same ones for as long as one likes."""

import pytest
from campaign import KINDS, NEED_MOUNTS, Campaign

QUICK = {
    "failpoint": 3,
    "power_cut": 2,
    "failing_disk": 3,
    "full_disk": 2,
    "refused_put": 2,
    "read_only": 2,
    "damage": 5,
    "hostile_bytes": 2,
    "mutation": 1,
}
BY_THE_CLOCK = ("kill", "interrupt", "race", "fork", "creation")
"""What happens in these rounds depends on the load of the machine; tests/store draws such moments by step instead."""
ONLY_LONG = ("every_power_cut", *BY_THE_CLOCK, *NEED_MOUNTS)


@pytest.fixture(scope="module")
def campaign():
    with Campaign(seed=0, size=30) as started:
        yield started


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, n) for kind, count in QUICK.items() for n in range(count)]
)
def test_no_fault_breaks_a_promise(campaign, kind, number):
    """No acknowledged row is lost, none is wrong, and the finished run scores bitwise as an undisturbed one."""
    broken = campaign.run(kind, number)
    assert broken is None, broken.trace


def test_every_kind_of_fault_has_its_rounds():
    assert set(KINDS) == {*QUICK, *ONLY_LONG}
