"""Entries: what cannot be computed again is kept where the rows are, and damage is named."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, methods, verify
from trak_lite.errors import CorruptStoreError, ManifestMismatchError, StateError
from trak_lite.store import Manifest, RemotePlace, ZarrFeatureStore, check_store, open_store
from trak_lite.store._content import encode_array
from trak_lite.store._failpoints import ENTRY_FAILPOINTS
from trak_lite.store.disk.documents import sealed
from trak_lite.store.places import create_store


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_entry_is_named_by_reading_and_by_a_check(tmp_path):
    path = tmp_path / "run.zarr"
    with ZarrFeatureStore.create(path, Manifest({})) as store:
        store.put_entry("verdicts/a", "key", np.arange(4.0))
    assert check_store(path).ok
    flip_last_byte(path / ".entries" / "verdicts%a.safetensors")

    with (
        open_store(path) as store,
        pytest.raises(CorruptStoreError, match="is damaged"),
    ):
        store.entry("verdicts/a", "key")
    report = check_store(path)
    assert not report.ok
    assert "the entry 'verdicts/a' is damaged" in str(report)
    with open_store(path, "r+") as store:
        store.put_entry("verdicts/a", "key", np.arange(4.0))
    assert check_store(path).ok


def test_every_flipped_bit_of_an_entry_is_noticed(tmp_path):
    path = tmp_path / "run.zarr"
    with ZarrFeatureStore.create(path, Manifest({})) as store:
        store.put_entry("a", "key", np.arange(3, dtype=np.float16))
    file = path / ".entries" / "a.safetensors"
    whole = file.read_bytes()
    with open_store(path) as store:
        for place in range(8 * len(whole)):
            content = bytearray(whole)
            content[place // 8] ^= 1 << place % 8
            file.write_bytes(content)
            try:
                found = store.entry("a", "key")
            except CorruptStoreError:
                continue
            # Blanks in the header may change, and nothing else.
            assert found is not None
            np.testing.assert_array_equal(found, np.arange(3, dtype=np.float16))


@pytest.fixture(params=["folder", "object store"])
def place_of(request, tmp_path):
    """Return the place of a store by its folder."""
    if request.param == "folder":
        return str
    local = pytest.importorskip("obstore.store").LocalStore
    return lambda root: RemotePlace(local(str(root), mkdir=True), staging=f"{root}-staging")


def take(name, source, target):
    """Replace a file or a folder of a store by that of another one."""
    if (target / name).is_dir():
        shutil.rmtree(target / name)
        shutil.copytree(source / name, target / name)
    else:
        shutil.copyfile(source / name, target / name)


FILE, MARK = ".entries/verdicts%a.safetensors", ".tables/.entries%verdicts%a"
B_FILE, B_MARK = FILE.replace("%a", "%b"), MARK.replace("%a", "%b")
EXCHANGES = {
    "the folder of another store": lambda own, other: take(".entries", other, own),
    "the folder of another store with its marks": lambda own, other: (
        take(".entries", other, own),
        take(".tables", other, own),
    ),
    "the entry of another store": lambda own, other: take(FILE, other, own),
    "the entry of another store with its mark": lambda own, other: (
        take(FILE, other, own),
        take(MARK, other, own),
    ),
    "another entry of the store": lambda own, other: shutil.copyfile(own / B_FILE, own / FILE),
    "another entry of the store with its mark": lambda own, other: (
        shutil.copyfile(own / B_FILE, own / FILE),
        shutil.copyfile(own / B_MARK, own / MARK),
    ),
    "an earlier one": lambda own, other: take(FILE, own.with_name("earlier"), own),
    "that of a copy of the store": lambda own, other: take(FILE, own.with_name("copy"), own),
    "removed": lambda own, other: (own / FILE).unlink(),
    "removed with its folder": lambda own, other: shutil.rmtree(own / ".entries"),
    "removed mark": lambda own, other: (own / MARK).unlink(),
    "damaged mark": lambda own, other: flip_last_byte(own / MARK),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_entry_that_the_store_has_not_written_is_refused(place_of, tmp_path, exchange):
    """Two stores of the same fingerprint, as two runs of one script make them."""
    own, other, names = tmp_path / "own", tmp_path / "other", ["verdicts/a", "verdicts/b"]

    def write(root, start):
        with create_store(place_of(root), Manifest({"seed": 0})) as store:
            for number, name in enumerate(names):
                store.put_entry(name, "key", np.arange(start + number, start + 4.0))

    write(own, 0)
    shutil.copytree(own, tmp_path / "earlier")
    shutil.copytree(own, tmp_path / "copy")
    for root, start in ((own, 1), (other, 2), (tmp_path / "copy", 3)):
        write(root, start)
    assert check_store(place_of(own)).ok
    EXCHANGES[exchange](own, other)

    with open_store(place_of(own)) as store:
        assert store.entry_names("verdicts") == names
        with pytest.raises(CorruptStoreError, match="entry 'verdicts/a' of"):
            store.entry("verdicts/a", "key")
    report = check_store(place_of(own))
    assert "the entry 'verdicts/a'" in str(report)
    assert not report.ok
    if place_of is str:
        assert check_store(own, repair=True).set_aside
        assert check_store(own).ok
        with open_store(own) as store:
            assert store.entry("verdicts/a", "key") is None
    write(own, 5)
    with open_store(place_of(own)) as store:
        np.testing.assert_array_equal(store.entry("verdicts/a", "key"), np.arange(5, 9.0))
    assert check_store(place_of(own)).ok


def test_entries_of_a_store_that_had_no_identifier_are_bound_by_a_repair(tmp_path, victims):
    """A store as an earlier version wrote it: no identifier, no mark, and entries of no store."""
    path = tmp_path / "run.zarr"
    ZarrFeatureStore.create(path, Manifest({})).close()
    document = json.loads((path / "zarr.json").read_text())
    record = document["attributes"]["trak_lite"]
    del record["id"]
    document["attributes"]["trak_lite"] = sealed(record)
    (path / "zarr.json").write_text(json.dumps(document))
    (path / ".entries").mkdir()
    (path / FILE).write_bytes(encode_array("verdicts/a", "key", np.arange(4.0)))

    with open_store(path) as store, pytest.raises(ManifestMismatchError, match="did not bind entries"):
        store.entry("verdicts/a", "key")
    assert "binds it" in str(check_store(path))
    assert victims.killed("entry_announced:1", "repair", str(path))
    assert "binds it" in str(check_store(path))
    assert check_store(path, repair=True).ok
    with open_store(path) as store:
        np.testing.assert_array_equal(store.entry("verdicts/a", "key"), np.arange(4.0))
    (path / FILE).write_bytes(encode_array("verdicts/a", "key", np.arange(5.0)))
    with open_store(path) as store, pytest.raises(CorruptStoreError, match="another store"):
        store.entry("verdicts/a", "key")


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_check_reads_no_entries_behind_a_link_or_in_a_file(tmp_path, kind):
    path = tmp_path / "run.zarr"
    with ZarrFeatureStore.create(path, Manifest({})) as store:
        store.put_entry("verdicts/a", "key", np.arange(4.0))
    (path / ".entries").rename(tmp_path / "away")
    if kind == "link":
        (path / ".entries").symlink_to(tmp_path / "away")
    else:
        (path / ".entries").write_bytes(b"")

    assert not check_store(path).ok
    assert not check_store(path, repair=True).ok
    assert (tmp_path / "away/verdicts%a.safetensors").exists()


@pytest.mark.parametrize("point", ENTRY_FAILPOINTS)
def test_a_killed_write_leaves_the_old_entry_or_the_new_one(tmp_path, victims, point):
    path = str(tmp_path / "run.zarr")
    with ZarrFeatureStore.create(path, Manifest({})) as store:
        store.put_entry("a", "key", np.zeros(3))

    assert victims.killed(point, "store_entry", path)

    assert check_store(path).ok
    with open_store(path, "r+") as store:
        found = store.entry("a", "key")
        assert found is None if point == "entry_removed" else found.tolist() in ([0] * 3, [1] * 3)
        store.put_entry("a", "key", np.full(3, 2.0))
        assert store.entry("a", "key").tolist() == [2] * 3


def data(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(2, (count,), generator=generator))


def trained(rows, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    inputs, labels = data(24)[torch.from_numpy(rows)]
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= p.grad
    return model


def attributor(place):
    torch.manual_seed(0)
    return Attributor(nn.Linear(4, 2), "image_classification", place, proj_dim=8, progress=False)


@pytest.fixture(params=["folder", "object store"])
def machines(request, tmp_path):
    """The place of one store, as one machine and as another one names it."""
    if request.param == "folder":
        return [tmp_path / "run.zarr"] * 2
    local = pytest.importorskip("obstore.store").LocalStore(str(tmp_path / "objects"), mkdir=True)
    return [RemotePlace(local, staging=str(tmp_path / f"staging-{number}")) for number in range(2)]


def test_verdicts_and_fits_are_where_the_rows_are(machines):
    """Another machine reads the verdict and the fit of the first one, and fits nothing again."""
    here, there = machines
    first = attributor(here)
    first.featurize(data(24))
    scores = first.score(data(5, 1), method="EKFAC")
    verdict = verify(scores, trained, data(5, 1), budget=4)

    second = attributor(there)
    found = second.scores(method="EKFAC")
    assert found.verdict == verdict
    assert found.predictions is not None
    with open_store(there) as store:
        fits = store.entry_names("ekfac")
        assert fits
        before = {name: store.entry_names(name) for name in fits}
    second.featurize(data(24))
    again = second.score(data(5, 2), "others", method=methods.EKFAC(damping=0.5))
    assert np.isfinite(again.numpy()).all()
    with open_store(there) as store:
        assert {name: store.entry_names(name) for name in store.entry_names("ekfac")} == before


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same model and data, with other columns and verdicts, and scores by an index."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("own", "other"):
        made = attributor(folder / name)
        made.featurize(data(200), columns={"source": ["web", "book"][:: 1 if name == "own" else -1] * 100})
        scores = made.score(data(5, 1))
        verify(scores, lambda rows, seed: trained(rows % 24, seed), data(5, 1), budget=4)
        made.score(data(150, 2), "many", dense=False, k=2, recall=0.5)
    return folder / "own", folder / "other"


READS = {
    "verdicts": lambda made: made.scores().verdict,
    "predictions": lambda made: made.scores().predictions,
    "columns": lambda made: made.scores().top(5, where={"source": "web"}),
    "index": lambda made: made.score(data(150, 2), "many", dense=False, k=1, recall=0.5),
}


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("change", ["exchanged", "removed", "folder exchanged"])
def test_verdicts_columns_and_bounds_of_another_run_are_not_used(runs, tmp_path, kind, change):
    own = tmp_path / "own"
    shutil.copytree(runs[0], own)
    READS[kind](attributor(own))
    (file,) = (own / ".entries").glob(f"{kind}%*")
    if change == "removed":
        file.unlink()
    elif change == "exchanged":
        take(f".entries/{file.name}", runs[1], own)
    else:
        take(".entries", runs[1], own)

    with pytest.raises(CorruptStoreError, match=f"entry '{kind}/"):
        READS[kind](attributor(own))
    report = check_store(own)
    assert not report.ok
    assert f"the entry '{kind}/" in str(report)


def test_what_belongs_to_a_dropped_checkpoint_or_to_dropped_scores_goes(machines):
    here, _ = machines
    made = attributor(here)
    made.featurize(data(24))
    verify(made.score(data(5, 1), method="EKFAC"), trained, data(5, 1), budget=4)
    made.drop_scores()
    with open_store(here) as store:
        assert store.entry_names("verdicts") == store.entry_names("predictions") == []
        assert store.entry_names("ekfac")
    made.drop_checkpoint("ckpt-0")
    with open_store(here) as store:
        assert store.entry_names() == []


def test_a_damaged_object_is_named_by_a_check(tmp_path):
    local = pytest.importorskip("obstore.store").LocalStore(str(tmp_path / "objects"), mkdir=True)
    place = RemotePlace(local, staging=str(tmp_path / "staging"))
    made = attributor(place)
    made.featurize(data(24))
    made.score(data(5, 1), method="EKFAC")
    assert check_store(place).ok
    flip_last_byte(next((tmp_path / "objects" / ".entries").iterdir()))
    report = check_store(place)
    assert not report.ok
    assert "is damaged" in str(report)


@pytest.mark.parametrize("dense", [True, False])
def test_scores_can_be_dropped_with_the_features_of_their_targets(machines, dense):
    here, _ = machines
    made = attributor(here)
    made.featurize(data(24))
    with open_store(here) as store:
        before = store.table_names()
    for method in (None, "EKFAC"):
        made.score(data(5, 1), "some", method=method, dense=dense)
    kept = made.score(data(5, 2), "other").numpy()

    made.drop_scores("some", features=True)

    with open_store(here) as store:
        left = set(store.table_names()) - set(before)
    assert left == {"scores/other", "targets/other/ckpt-0"}
    np.testing.assert_array_equal(made.scores("other").numpy(), kept)
    with pytest.raises(StateError, match="no scores 'some'"):
        made.drop_scores("some", features=True)
    made.score(data(6, 3), "some")  # other targets under the same name
