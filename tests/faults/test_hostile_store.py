"""A part of ``benchmarks/hostile_store.py``: a store from a stranger, changed at some places, and every command."""

import pytest

from benchmarks.hostile_store import KINDS, MUST_BE_ZERO, Campaign

EVERY = {"links": 61, "values": 1409, "flips": 24001}
NAMED = {"zarr.json attributes/trak_lite/fingerprint/dataset/num_rows = 'x', sealed"}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    return Campaign(str(tmp_path_factory.mktemp("hostile").resolve()))


@pytest.mark.parametrize("kind", EVERY)
def test_a_hostile_store_harms_nothing(campaign, kind):
    """No write outside of the store, no code of it, no other result without an error, no foreign exception, no hang."""
    for number, case in enumerate(KINDS[kind](campaign.root, campaign.other)):
        if number % EVERY[kind] == 0 or case[0] in NAMED:
            campaign.run(kind, case)
    assert not any(campaign.counts[name] for name in MUST_BE_ZERO), (campaign.counts, campaign.broken)
