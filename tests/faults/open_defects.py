"""Defects that the campaign has found and that are not mended yet, as small as they get.

Run them with ``pytest tests/faults/open_defects.py``. Not part of the suite.
When one is mended, its test goes to the tests of the store without its mark.
"""

import json
import os
import re

import numpy as np
import pytest
from fault_cases import MANIFEST, NAME, Case, open_for_writing

from trak_lite.errors import StoreError
from trak_lite.store import ZarrFeatureStore
from trak_lite.store._checksums import crc32c

CASE = Case(12, 2, 4, "float16")


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return str(tmp_path / "run.zarr")


def edit(path, change):
    with open(path) as file:
        document = json.load(file)
    change(document["attributes"]["trak_lite"])
    with open(path, "w") as file:
        json.dump(document, file)


@pytest.mark.xfail(strict=True, reason="store.attributes takes what stands there for a mapping")
@pytest.mark.parametrize("noted", [7, [[]], "x"])
def test_attributes_that_are_none_are_refused(path, noted):
    open_for_writing(path, CASE)
    edit(os.path.join(path, NAME, "zarr.json"), lambda record: record.update(attributes=noted))
    with pytest.raises(StoreError, match=r"zarr\.json"):
        ZarrFeatureStore.open(path).attributes(NAME)


@pytest.mark.xfail(strict=True, reason="the stored fingerprint goes into canonical_json unchecked")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_fingerprint_with_a_number_that_json_has_not_is_refused(path, value):
    open_for_writing(path, CASE)
    edit(os.path.join(path, "zarr.json"), lambda record: record["fingerprint"].update(seed=value))
    with pytest.raises(StoreError):
        ZarrFeatureStore.create(path, MANIFEST)


@pytest.mark.xfail(strict=True, reason="_derived._parse trusts the header of a .npy under a right checksum")
@pytest.mark.parametrize("dtype", [b"'|O'", b"'<f9'", b"(((("])
def test_a_derived_array_that_is_no_array_is_as_good_as_none(path, dtype):
    store, _ = open_for_writing(path, CASE)
    store.cache("gram", "key", np.eye(2))
    kept = os.path.join(path, ".cache", "gram.npy")
    with open(kept, "rb") as file:
        array = re.sub(rb"'<f8'", dtype, file.read()[:-1].rpartition(b"\n")[0])
    with open(kept, "wb") as file:
        file.write(array + b"\n" + json.dumps({"key": "key", "crc32c": crc32c(array)}).encode() + b"\n")
    assert store.cached("gram", "key") is None


@pytest.mark.xfail(
    strict=True, reason="the table in the way is taken for a mistake in the name that was asked for"
)
def test_a_group_with_the_metadata_of_a_table_is_refused(path):
    open_for_writing(path, CASE)
    with open(os.path.join(path, NAME, "zarr.json"), "rb") as file:
        foreign = file.read()
    with open(os.path.join(path, "targets", "zarr.json"), "wb") as file:
        file.write(foreign)
    with pytest.raises(StoreError):
        ZarrFeatureStore.open(path).open_table(NAME)
