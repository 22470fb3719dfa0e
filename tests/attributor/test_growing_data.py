"""Rows appended to featurized data, checkpoints dropped, and processes that meet on one store in this process."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_runs import Counting, contents, perceptron, random_states
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trak_lite import Attributor, Rows, errors
from trak_lite.store import MemoryFeatureStore, ZarrFeatureStore, check_store

N, R = 70, 32
MORE = [R, 1, R - 1, R + 1]
model = perceptron
states = partial(random_states, model)
generator = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(N + R + 1, 4, generator=generator), torch.arange(N + R + 1) % 3
TARGETS = TensorDataset(torch.randn(5, 4, generator=generator), torch.arange(5) % 3)


def rows(count):
    return TensorDataset(INPUTS[:count], LABELS[:count])


def attributor(path, **changes):
    settings = {"proj_dim": 16, "dtype": "float32", **changes}
    return Attributor(model(), "image_classification", path, **settings)


def features(path, table="ckpt-0"):
    with ZarrFeatureStore.open(path) as store:
        return store.open_table(table).read("features")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr("trak_lite.store._grid._FEWEST_ROWS_PER_COMMIT", R)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.zarr"
    attributor(path).featurize(rows(N + R + 1), states())
    return path


@pytest.mark.parametrize("more", MORE)
def test_only_appended_rows_are_featurized_and_a_reader_from_before_sees_what_it_saw(tmp_path, whole, more):
    path, longer = tmp_path / "a.zarr", Counting(rows(N + more))
    attributor(path).featurize(Rows(Counting(rows(N)), name="d"), states())
    before = features(path)
    with ZarrFeatureStore.open(path) as store:
        held = list(store.open_table("ckpt-0").chunks("features"))
        assert [len(chunk) for _, chunk in held] == [R, R, N - 2 * R]
        summary = attributor(path).featurize(Rows(longer, name="d"), states(), append=True)
        np.testing.assert_array_equal(store.open_table("ckpt-0").read("features"), before)
        np.testing.assert_array_equal(np.concatenate([chunk for _, chunk in held]), before)
    assert (summary.rows_written, summary.rows_found) == (2 * more, 2 * N)
    compared = longer.loaded[:8]
    assert max(compared) < N
    assert longer.loaded == 2 * [*compared, *range(N, N + more)]
    after = features(path)
    np.testing.assert_array_equal(after[:N], before)
    np.testing.assert_allclose(after, features(whole)[: N + more], rtol=1e-4, atol=1e-5)
    assert check_store(path).findings == ()


@pytest.mark.parametrize("in_memory", [False, True])
def test_scores_of_grown_data_are_those_of_the_whole_and_older_ones_are_refused(tmp_path, in_memory):
    made = attributor(None if in_memory else tmp_path / "a.zarr")
    made.featurize(rows(N), states())
    old = made.score(TARGETS, "test")
    made.featurize(rows(N + 3), states(), append=True)
    fresh = attributor(None)
    fresh.featurize(rows(N + 3), states())
    expected = fresh.score(TARGETS, "test").numpy()
    np.testing.assert_allclose(made.score(TARGETS, "new").numpy(), expected, rtol=1e-4, atol=1e-6)
    assert old.shape == (N, 5)
    for call in (lambda: made.scores("test"), lambda: made.score(TARGETS, "test")):
        said = r"have 70 train rows, but the store has 73 now.* drop_scores\('test'\)"
        with pytest.raises(errors.StateError, match=said):
            call()
    without_q = replace(made.method, q="off")
    made.score(TARGETS, "new", method=without_q)
    made.drop_scores("new")
    with pytest.raises(errors.StateError, match="no scores 'new' made with"):
        made.scores("new", method=without_q)
    made.drop_scores("test")
    np.testing.assert_allclose(made.score(TARGETS, "test").numpy(), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(errors.StateError, match="no scores 'other'"):
        made.drop_scores("other")


@pytest.mark.parametrize("method", ["EKFAC", {"name": "CG", "tolerance": 1e-3}], ids=["EKFAC", "CG"])
def test_targets_by_the_curvature_of_fewer_rows_score_no_grown_data(method):
    made, fresh = attributor(None, projector="none"), attributor(None, projector="none")
    made.featurize(rows(N), states())
    before = made.score(TARGETS, "test", method=method, dense=False).numpy()
    options = {"method": method, "dense": False}
    np.testing.assert_array_equal(made.scores("test", **options).numpy(), before)
    made.featurize(rows(N + 30), states(), append=True)
    with pytest.raises(errors.StateError, match=r"fitted to fewer train rows.* drop_scores\('test'\)"):
        made.scores("test", **options)
    with pytest.raises(errors.ManifestMismatchError, match=r"curvature\.dataset"):
        made.score(TARGETS, "test", checkpoints=states()[1:], **options)
    made.drop_scores("test")
    fresh.featurize(rows(N + 30), states())
    expected = fresh.score(TARGETS, **options).numpy()
    close = {"rtol": 1e-4, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(made.score(TARGETS, "test", **options).numpy(), expected, **close)
    np.testing.assert_allclose(made.scores("test", **options).numpy(), expected, **close)
    assert not np.allclose(before, expected[:N], **close)


class OfBatches(nn.Linear):
    """Has other last bits in batches of one, as kernels of another size give."""

    def forward(self, inputs):
        return super().forward(inputs) * (1 + 1e-6 * (len(inputs) == 1))


def test_scores_of_rows_that_were_computed_again_say_so():
    made = Attributor(OfBatches(4, 3), "image_classification", None, proj_dim=8, progress=False)
    made.featurize(rows(N))
    made.score(TARGETS, "test")
    made.drop_checkpoint("ckpt-0")
    made.featurize(rows(N), batch_size=1)
    with pytest.raises(
        errors.ManifestMismatchError, match=r"computed again since.*batch size.*drop_scores\('test'\)"
    ):
        made.score(TARGETS, "test")
    made.drop_scores("test")
    assert made.score(TARGETS, "test").shape == (N, 5)


def test_scores_with_a_checkpoint_that_was_lost_and_made_again_say_so():
    made = attributor(None)
    made.featurize(rows(N), states())
    made.score(TARGETS, "test")
    made.drop_checkpoint("ckpt-0")
    made.featurize(rows(N), states())
    with pytest.raises(
        errors.ManifestMismatchError, match=r"a checkpoint that was lost .*drop_scores\('test'\)"
    ):
        made.score(TARGETS, "test")


@pytest.mark.parametrize("grown", [False, True])
def test_a_growth_that_was_interrupted_is_finished_by_the_next_run(tmp_path, monkeypatch, grown):
    """Before the first table grows, or after it."""
    made = attributor(tmp_path / "a.zarr")
    made.featurize(rows(N), states())
    grow = ZarrFeatureStore.grow_table

    def stop(self, path, num_rows):
        if grown:
            grow(self, path, num_rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ZarrFeatureStore, "grow_table", stop)
        with pytest.raises(KeyboardInterrupt):
            made.featurize(rows(N + 5), states(), append=True)
    with pytest.raises(errors.StateError, match="ckpt-0 has 70 of 75 train rows"):
        made.score(TARGETS)
    with pytest.raises(errors.ManifestMismatchError, match=r"dataset\.num_rows is 75 there, 70 here"):
        made.featurize(rows(N), states())
    summary = attributor(tmp_path / "a.zarr").featurize(rows(N + 5), states())
    assert (summary.rows_written, summary.rows_found) == (10, 2 * N)


def changed(row):
    inputs = INPUTS[: N + 3].clone()
    inputs[row] += 1
    return TensorDataset(inputs, LABELS[: N + 3])


OTHER = {
    "dataset.tensors": Rows(changed(0)),
    r"dataset\.tensors": Rows(changed(N - 1)),
    "dataset.indices": Rows(rows(N + 3), indices=[1, 0, *range(2, N + 3)]),
    "dataset.id": Rows(rows(N + 3), name="mine"),
    "dataset.samples": Rows(Counting(rows(N + 3))),
}


def test_rows_are_appended_by_a_flag_alone_and_to_the_same_rows_and_settings(tmp_path, monkeypatch):
    made = attributor(tmp_path / "a.zarr")
    assert made.featurize(rows(N), append=True).rows_written == N
    before = contents(tmp_path)
    for said, call in (
        (r"^The data have more.*num_rows is 70 there, 71 here.*pass append=True", lambda: made.featurize(rows(N + 1))),
        (r"num_rows is 70 there, 69 here;.* Use the stored settings",
         lambda: made.featurize(rows(N - 1), append=True)),
        (r"projector\.seed is 0 there, 1 here",
         lambda: attributor(tmp_path / "a.zarr", seed=1).featurize(rows(N + 1), append=True)),
    ):  # fmt: skip
        with pytest.raises(errors.ManifestMismatchError, match=said):
            call()
    for key, data in OTHER.items():
        with pytest.raises(errors.ManifestMismatchError, match=key) as caught:
            made.featurize(data, append=True)
        assert "num_rows" not in str(caught.value)
        assert "to the same data in the same order" in str(caught.value)
    assert made.featurize(rows(N), append=True).rows_written == 0
    monkeypatch.setattr("os.access", lambda *args: False)
    said = r"a\.zarr was opened for reading: it cannot be written"
    with pytest.raises(errors.ReadOnlyStoreError, match=said):
        attributor(tmp_path / "a.zarr").featurize(rows(N + 1), append=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        (Rows(rows(N)), Rows(changed(N + 2))),
        (Rows(Counting(rows(N))), Rows(Counting(rows(N + 3)))),
        (Rows(rows(N + 3), indices=range(2, N)), Rows(rows(N + 3), indices=range(2, N + 3))),
        (Rows(Subset(rows(N), range(N))), Rows(Subset(changed(N + 1), range(N + 3)))),
        (Subset(rows(N + 9), range(N)), Subset(changed(N + 1), range(N + 3))),
        ([*rows(N)], Subset([*rows(N + 9)], range(N + 3))),
    ],
)
def test_appended_rows_are_told_from_the_stored_ones_by_any_identity(shorter, longer):
    made = attributor(None)
    count = made.featurize(shorter).rows_written
    summary = made.featurize(longer, append=True)
    assert (summary.rows_written, summary.rows_found) == (3, count)


def test_whoever_fills_the_last_chunk_is_waited_for_before_a_table_grows(monkeypatch):
    made, grow, waits = attributor(None), MemoryFeatureStore.grow_table, list[float]()
    made.featurize(rows(N))

    def busy(self, path, num_rows):
        if num_rows > N + 1:
            raise errors.HeldHereError("held here")
        if len(waits) < 3:
            raise errors.BusyError("held")
        return grow(self, path, num_rows)

    monkeypatch.setattr(MemoryFeatureStore, "grow_table", busy)
    monkeypatch.setattr("time.sleep", waits.append)
    assert made.featurize(rows(N + 1), append=True).rows_written == 1
    assert waits == sorted(waits)
    with pytest.raises(errors.HeldHereError):
        made.featurize(rows(N + 2), append=True)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_dropped_checkpoint_takes_part_in_no_later_score(tmp_path, in_memory):
    made = attributor(None if in_memory else tmp_path / "a.zarr")
    first, second = states()
    made.featurize(rows(N), [first, second])
    made.score(TARGETS, "both")
    made.score(TARGETS, "both", method="EKFAC")
    kept = made.score(TARGETS, "ckpt-0", checkpoints=[second]).numpy()
    held = made.score(TARGETS, "both", dense=False)
    made.drop_checkpoint("ckpt-0")
    with pytest.raises(
        errors.MissingStoreError, match="There is no table" if in_memory else "was dropped after"
    ):
        held.top(3)
    if not in_memory:
        with ZarrFeatureStore.open(tmp_path / "a.zarr") as store:
            assert store.table_names("targets") == ["targets/both/ckpt-1", "targets/ckpt-0/ckpt-1"]
            (left,) = store.table_names("preconditioned")  # of the targets multiplied by an inverse curvature
        assert left.endswith("/ckpt-1")
    np.testing.assert_array_equal(made.scores("ckpt-0").numpy(), kept)
    alone = attributor(None)
    alone.featurize(rows(N), [first])
    alone.featurize(rows(N), [second])
    expected = alone.score(TARGETS, checkpoints=[second]).numpy()
    np.testing.assert_array_equal(made.score(TARGETS, "one").numpy(), expected)
    with pytest.raises(errors.StateError, match="no features for 1 of the 2 checkpoints"):
        made.scores("both")
    assert made.featurize(rows(N), [first]).rows_written == N
    assert made.score(TARGETS, "again").shape == (N, 5)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_name_with_scores_keeps_its_targets_after_its_checkpoints_were_dropped(tmp_path, in_memory):
    made = attributor(None if in_memory else tmp_path / "a.zarr")
    made.featurize(rows(N), states())
    before = made.score(TARGETS, "a").standard_error()
    for name in ("ckpt-0", "ckpt-1"):
        made.drop_checkpoint(name)
    made.featurize(rows(N), states())
    for options in ({}, {"checkpoints": states()}):
        with pytest.raises(errors.ManifestMismatchError, match=r"scores/a was .*another name"):
            made.score(rows(5), "a", method="GradDot", **options)
    made.score(TARGETS, "a", method="GradDot")
    np.testing.assert_array_equal(made.scores("a").standard_error(), before)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("of", ["targets", "weights"])
def test_held_scores_read_no_features_that_took_the_place_of_theirs(tmp_path, in_memory, of):
    made = attributor(None if in_memory else tmp_path / "a.zarr")
    first, second = states()
    made.featurize(rows(N), states())
    made.score(TARGETS, "a")

    def calls():
        dense, lazy = made.scores("a"), made.scores("a", dense=False)
        return lazy.numpy, lambda: dense.damping_path([0.1]).numpy(), dense.standard_error

    before, held = [call() for call in calls()], calls()
    if of == "targets":
        made.drop_scores("a", features=True)
        made.score(rows(5), "a")
    else:
        made.drop_checkpoint("ckpt-1")
        other = {name: value + 0.5 for name, value in second.items()}
        made.featurize(rows(N), other)
        made.score(TARGETS, "a", method="GradDot", checkpoints=[first, other])
    for call in held:
        with pytest.raises(errors.StateError, match=r"'a' at ckpt-|was dropped .* and created again"):
            call()
    if of == "targets" and in_memory:  # the same ones again
        made.drop_scores("a", features=True)
        made.score(TARGETS, "a")
        for call, expected in zip(held, before, strict=True):
            np.testing.assert_array_equal(call(), expected)


def test_finished_scores_are_read_after_drop_checkpoint_was_killed_between_targets_and_train_rows(tmp_path):
    made = attributor(tmp_path / "a.zarr")
    made.featurize(rows(N), states())
    scores = made.score(TARGETS).numpy()
    with ZarrFeatureStore.open(tmp_path / "a.zarr", "r+") as store:
        store.drop_table("targets/targets/ckpt-0")  # the first table that drop_checkpoint removes

    again = attributor(tmp_path / "a.zarr")
    again.featurize(rows(N), states())
    np.testing.assert_array_equal(again.score(TARGETS).numpy(), scores)
    np.testing.assert_array_equal(again.scores("targets").numpy(), scores)


def test_a_checkpoint_is_dropped_by_its_name_if_only_one_has_it(tmp_path):
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(errors.StateError, match="no store"):
        made.drop_checkpoint("ckpt-0")
    for state in states():  # two of one name
        (twice,) = made.featurize(rows(N), state).checkpoints
    (once,) = made.featurize(rows(N)).checkpoints
    with pytest.raises(errors.InvalidInputError, match=r"0 checkpoints have the name 'epoch 9'.*ckpt-2"):
        made.drop_checkpoint("epoch 9")
    with pytest.raises(errors.InvalidInputError, match="2 checkpoints have the name"):
        made.drop_checkpoint(twice)
    made.drop_checkpoint(once)
    with ZarrFeatureStore.open(tmp_path / "a.zarr") as store:
        assert store.table_names() == ["ckpt-0", "ckpt-1"]


class Meanwhile(Counting):
    """Rows before the first of which another run on the same path featurizes its checkpoint."""

    def __init__(self, path, checkpoint, **changes):
        super().__init__(rows(N))
        self.path, self.checkpoint, self.changes = path, checkpoint, changes

    def __getitem__(self, index):
        if not self.loaded:
            self.loaded.append(index)
            data = Rows(Counting(rows(N)), name="d")
            attributor(self.path, **self.changes).featurize(data, self.checkpoint)
        return super().__getitem__(index)


def test_runs_that_begin_at_the_same_moment_share_a_checkpoint_or_get_a_number_each(tmp_path):
    """The projection depends on the number: the rows of the slower one are computed for the one that it gets."""
    (first, second), path = states(), tmp_path / "a.zarr"
    summary = attributor(path).featurize(Rows(Meanwhile(path, first), name="d"), first)
    assert (summary.rows_written, summary.rows_found) == (0, N)
    path = tmp_path / "b.zarr"
    assert attributor(path).featurize(Rows(Meanwhile(path, first), name="d"), second).rows_written == N
    attributor(tmp_path / "c.zarr").featurize(Rows(Counting(rows(N)), name="d"), [first, second])
    for table in ("ckpt-0", "ckpt-1"):
        np.testing.assert_array_equal(*(features(tmp_path / f"{name}.zarr", table) for name in "bc"))
    path = tmp_path / "d.zarr"
    other = Meanwhile(path, first, store_norms=True)  # the same weights: no other number helps
    with pytest.raises(errors.ManifestMismatchError, match="table columns"):
        attributor(path).featurize(Rows(other, name="d"), first)


def test_rows_that_another_process_appends_meanwhile_are_told(tmp_path):
    first, second = states()
    path = tmp_path / "a.zarr"
    attributor(path).featurize(rows(N), [first])

    def meanwhile(new):
        yield first
        attributor(path).featurize(rows(N + R), [first, new], append=True)
        yield new

    with pytest.raises(errors.StateError, match=rf"ckpt-1 has {N + R} rows, and the data has {N}"):
        attributor(path).featurize(rows(N), meanwhile(second))
    assert attributor(path).score(TARGETS, checkpoints=[first, second]).shape == (N + R, 5)
    attributor(path).featurize(rows(N + R + 1), [first], append=True)
    with pytest.raises(errors.StateError, match=rf"ckpt-1 has {N + R} of {N + R + 1} train rows"):
        attributor(path).score(TARGETS, checkpoints=[first, second])
    assert attributor(path).score(TARGETS, "one", checkpoints=[first]).shape == (N + R + 1, 5)
