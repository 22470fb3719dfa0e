"""Verdicts, fits, columns and bounds are kept where the rows are, are their run's own, and go with what they are of."""

import contextlib
import shutil

import numpy as np
import pytest
import torch
from store_cases import copy_over, flip, raises, remote_place
from tiny_runs import labelled as data
from torch import nn

from trak_lite import Attributor, methods, verify
from trak_lite.errors import CorruptStoreError, StateError
from trak_lite.store import check_store, open_store


def trained(rows, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    inputs, labels = data(24)[torch.from_numpy(rows % 24)]
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= p.grad
    return model


def attributor(place):
    torch.manual_seed(0)
    return Attributor(nn.Linear(4, 3), "image_classification", place, proj_dim=8, progress=False)


@pytest.fixture(params=["folder", "object store"])
def machines(request, tmp_path):
    """The place of one store, as one machine and as another one names it."""
    if request.param == "folder":
        return [tmp_path / "run.zarr"] * 2
    return [remote_place(tmp_path, f"staging-{number}") for number in range(2)]


def test_verdicts_and_fits_are_beside_the_rows_until_their_scores_or_checkpoint_go(machines, tmp_path):
    """Another machine reads the verdict and the fit of the first one, and fits nothing again."""
    here, there = machines
    first = attributor(here)
    first.featurize(data(24))
    verdict = verify(first.score(data(5, 1), method="EKFAC"), trained, data(5, 1), budget=4)
    second = attributor(there)
    found = second.scores(method="EKFAC")
    assert found.verdict == verdict
    assert found.predictions is not None
    with open_store(there) as store:
        fits = store.entry_names("ekfac")
    assert fits
    second.featurize(data(24))
    again = second.score(data(5, 2), "others", method=methods.EKFAC(damping=0.5))
    assert np.isfinite(again.numpy()).all()
    with open_store(there) as store:
        assert store.entry_names("ekfac") == fits

    second.drop_scores("others")
    first.drop_scores()
    with open_store(here) as store:
        assert store.entry_names() == fits
    if here is not there:
        flip(next((tmp_path / "objects" / ".entries").iterdir()), -1)
        report = check_store(there)
        assert (report.ok, "is damaged" in str(report)) == (False, True)
    first.drop_checkpoint("ckpt-0")
    with open_store(here) as store:
        assert store.entry_names() == []


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
        assert set(store.table_names()) - set(before) == {"scores/other", "targets/other/ckpt-0"}
    np.testing.assert_array_equal(made.scores("other").numpy(), kept)
    raises(StateError, "no scores 'some'", made.drop_scores, "some", features=True)
    made.score(data(6, 3), "some")  # other targets under the same name


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("kept", range(3))
def test_scores_are_computed_again_after_a_kill_while_they_were_dropped(
    tmp_path, monkeypatch, kept, features
):
    """Killed before the first, second and third table; then the drop again, or the same script and the drop."""
    path = tmp_path / "run.zarr"

    def script():
        made = attributor(path)
        made.featurize(data(24))
        return made, made.score(data(5, 1), method="EKFAC").numpy()

    made, expected = script()
    store = type(open_store(path))
    whole, places = store.drop_table, iter(range(4))

    def drop(self, name):
        if next(places) == kept:
            raise KeyboardInterrupt
        whole(self, name)

    monkeypatch.setattr(store, "drop_table", drop)
    with contextlib.suppress(KeyboardInterrupt):
        made.drop_scores(features=features)
    monkeypatch.undo()
    if not features and kept < 2:
        made.drop_scores()
    again, found = script()
    np.testing.assert_array_equal(found, expected)
    again.drop_scores(features=True)
    with open_store(path) as opened:
        assert opened.table_names() == ["ckpt-0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same model and data, with other columns and verdicts, and scores by an index."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("own", "other"):
        made = attributor(folder / name)
        made.featurize(data(200), columns={"source": ["web", "book"][:: 1 if name == "own" else -1] * 100})
        verify(made.score(data(5, 1)), trained, data(5, 1), budget=4)
        made.score(data(150, 2), "many", dense=False, k=2, recall=0.5)
    return folder / "own", folder / "other"


READS = {
    "verdicts": lambda made: made.scores().verdict,
    "predictions": lambda made: made.scores().predictions,
    "columns": lambda made: made.scores().top(5, where={"source": "web"}),
    "index": lambda made: made.score(data(150, 2), "many", dense=False, k=1, recall=0.5),
}


@pytest.mark.parametrize("kind", READS)
def test_verdicts_columns_and_bounds_of_another_run_are_not_used(runs, tmp_path, kind):
    """Nor is one that was removed missed without a word."""
    READS[kind](attributor(runs[0]))
    for change in ("exchanged", "removed"):
        own = tmp_path / change
        shutil.copytree(runs[0], own)
        (file,) = (own / ".entries").glob(f"{kind}%*")
        if change == "removed":
            file.unlink()
        else:
            copy_over(runs[1] / ".entries" / file.name, file)
        raises(CorruptStoreError, f"entry '{kind}/", READS[kind], attributor(own))
        report = check_store(own)
        assert (report.ok, f"the entry '{kind}/" in str(report)) == (False, True)
