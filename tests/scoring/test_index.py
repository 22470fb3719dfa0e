"""Top rows by an index, against all scores in NumPy: their scores, the recall that is stated, and what may go wrong."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from forked import forkserver
from index_cases import (
    METHOD,
    C,
    K,
    N,
    add_targets,
    brute_force,
    build_and_die,
    factors,
    features,
    make,
    source_of,
    top,
    write,
)
from tiny_runs import labelled, perceptron, random_states
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.topk import TopK
from trak_lite.methods import AbstractMethod, GaussNewton, GradCos, GradDot
from trak_lite.run.tables import FEATURES, drop_checkpoint
from trak_lite.scoring import index
from trak_lite.scoring.index import mean_lower_bound
from trak_lite.store import Column, Manifest, MemoryFeatureStore, TableSpec, ZarrFeatureStore

ENDS = ("helpful", "harmful")
METHODS: dict[str, AbstractMethod] = {
    "GaussNewton": METHOD,
    "q inside, weights of both signs": GaussNewton(damping=0.3, q="inside", checkpoint_weights=(1.5, -1.0)),
    "GradDot": GradDot(),
    "GradCos": GradCos(),
}


def exact_rows(scores: np.ndarray, k: int, sign: str) -> np.ndarray:
    return reference.top_k(scores.astype(np.float32), k, sign=sign)[0]


def recall_of(found: np.ndarray, scores: np.ndarray, k: int) -> list[float]:
    """Return the recall of both ends, mean over targets."""
    return [
        float(np.mean([np.isin(a, b).mean() for a, b in zip(exact_rows(scores, k, sign), rows, strict=True)]))
        for sign, rows in zip(ENDS, found[:, 0], strict=True)
    ]


def check_scores(found: np.ndarray, scores: np.ndarray) -> None:
    """Check the scores of the found rows, their order, and that no row is repeated."""
    for end, factor in enumerate((1, -1)):
        rows = found[end, 0].astype(int)
        assert all(len(set(one)) == len(one) for one in rows)
        expected = np.take_along_axis(scores.T, rows, axis=1)
        np.testing.assert_allclose(found[end, 1], expected, rtol=1e-3, atol=1e-5 * abs(scores).max())
        assert (np.diff(found[end, 1] * factor, axis=1) <= 0).all()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ZarrFeatureStore:
    """A store with a set of targets of which a quarter is measured."""
    store = make(tmp_path_factory.mktemp("index") / "run.zarr")
    add_targets(store, "many", 560, seed=1)
    return store


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_an_index_have_their_scores_and_the_recall_is_not_overstated(
    made: ZarrFeatureStore, name: str
) -> None:
    method = METHODS[name]

    found = top(made, "many", 10, 0.9, method)

    assert found.candidates is not None
    assert found.measured == 128
    scores = brute_force(made, "many", method)
    check_scores(found.ends, scores)
    assert 0.9 <= found.at_least <= found.recall
    assert min(recall_of(found.ends, scores, 10)) >= found.at_least


@pytest.mark.quick
def test_the_measured_recall_is_that_of_numpy(made: ZarrFeatureStore) -> None:
    """Also with so few candidates that rows are lost."""
    method = GaussNewton(damping=0.1)
    found = top(made, "many", 10, 0.5, method)
    again = top(made, "many", 10, 0.5, method)

    assert found.candidates == again.candidates == 10
    assert found.report() == again.report()
    check_scores(found.ends, brute_force(made, "many", method))
    known = min(recall_of(found.ends, brute_force(made, "many", method), 10))
    assert 0.5 < known < 1
    # It was measured on 128 of these 560 targets.
    assert abs(found.recall - known) < 0.03


def test_a_bound_is_stated_for_no_set_but_the_measured_one(tmp_path: Path) -> None:
    """The index keeps the plane in which most rows are; targets of the second set are off the plane."""
    store = ZarrFeatureStore.create(tmp_path / "run.zarr", Manifest({}))
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(N, K)).astype(np.float32)
    rows[generator.random(N) > 0.03, 2:] *= 1e-4
    for c in range(C):
        write(store, f"ckpt-{c}", c, rows, *factors(N, c, 0), "float32")
    plane, other = generator.normal(size=(2, 200, K)).astype(np.float32)
    plane[:, 2:], other[:, :2] = 0, 0
    for name, targets in (("plane", plane), ("other", other), ("small", other[:128]), ("both", plane)):
        for c in range(C):
            write(store, f"targets/{name}/ckpt-{c}", c, targets, *factors(len(targets), c, 3), "float32")
    # The same name, for other targets.
    first = top(store, "both", 10, 0.9, GradDot())
    for c in range(C):
        store.drop_table(f"targets/both/ckpt-{c}")
        write(store, f"targets/both/ckpt-{c}", c, other, *factors(200, c, 3), "float32")

    found = {name: top(store, name, 10, 0.9, GradDot()) for name in ("plane", "other", "small", "both")}

    assert first.candidates is not None
    assert found["plane"].candidates == first.candidates
    for name, one in found.items():
        assert min(recall_of(one.ends, brute_force(store, name, GradDot()), 10)) >= one.at_least
        assert (one.candidates is None) == (name != "plane")


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_quantised_rows_are_scored_as_they_are_stored(tmp_path: Path, dtype: str) -> None:
    store = make(tmp_path / "run.zarr", dtype=dtype)
    add_targets(store, "new", 160, seed=2)

    found = top(store, "new", 10, 0.9)

    assert found.candidates is not None
    check_scores(found.ends, brute_force(store, "new"))


def test_equal_rows_are_returned_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    store = ZarrFeatureStore.create(tmp_path / "run.zarr", Manifest({}))
    for c in range(2):
        q, w = factors(N // 4, c, 0)
        write(store, f"ckpt-{c}", c, *(np.tile(x.T, 4).T for x in (features(N // 4, c, 0), q, w)), "float32")
    add_targets(store, "new", 160, seed=2)

    found = top(store, "new", 8, 0.96)

    assert found.candidates is not None
    rows, scores = found.ends[:, 0].astype(int).reshape(-1, 8), found.ends[:, 1].reshape(-1, 8)
    for own, values in zip(rows, scores, strict=True):
        # Two groups of four equal rows each, in ascending order.
        for group in (own[:4], own[4:]):
            assert len(set(group % (N // 4))) == 1
            assert (np.diff(group) > 0).all()
        assert len(set(values[:4])) == 1


def test_the_bound_is_not_above_the_mean_more_often_than_stated() -> None:
    generator = np.random.default_rng(0)
    for draw in (
        lambda n: (generator.random(n) < 0.98).astype(float),
        lambda n: generator.binomial(10, 0.97, n) / 10,
        lambda n: np.where(generator.random(n) < 0.05, 0.4, 1.0),
    ):
        mean = draw(1_000_000).mean()
        wrong = np.mean([mean_lower_bound(draw(128), 0.1) > mean for _ in range(1000)])
        assert wrong <= 0.1
    # Without a failure it is the exact bound of Clopper and Pearson.
    assert mean_lower_bound(np.ones(512), 0.01) == pytest.approx(0.01 ** (1 / 512), abs=1e-9)
    assert mean_lower_bound(np.zeros(9), 0.01) == mean_lower_bound(np.ones(0), 0.01) == 0.0


def test_a_recall_is_stated_only_when_enough_targets_were_measured(made: ZarrFeatureStore) -> None:
    method = GaussNewton(damping=0.7)
    add_targets(made, "few", 128, 11)
    found = [top(made, name, 10, 0.9, method) for name in ("few", "few", "many")]

    assert [one.candidates is None for one in found] == [True, True, False]
    assert recall_of(found[1].ends, brute_force(made, "few", method), 10) == [1.0, 1.0]


def test_a_recall_that_cannot_be_reached_gives_exact_rows(made: ZarrFeatureStore) -> None:
    found = top(made, "many", 10, 0.9999, METHODS["GradDot"])

    assert found.candidates is None
    assert recall_of(found.ends, brute_force(made, "many", METHODS["GradDot"]), 10) == [1.0, 1.0]


def test_few_rows_are_all_scored_and_no_index_is_built(tmp_path: Path) -> None:
    store = make(tmp_path / "run.zarr", num_rows=640)
    add_targets(store, "few", 130, seed=1)

    found = [top(store, "few", 10, 0.5) for _ in range(2)]

    assert all(one.candidates is None for one in found)
    assert recall_of(found[1].ends, brute_force(store, "few"), 10) == [1.0, 1.0]
    assert store.table_names("index") == []


def test_rows_of_rank_one_and_zero_rows_have_an_index(tmp_path: Path) -> None:
    store = ZarrFeatureStore.create(tmp_path / "run.zarr", Manifest({}))
    for c in range(2):
        rows = np.outer(np.arange(1000), np.ones(K)).astype(np.float32)
        write(store, f"ckpt-{c}", c, rows * c, *factors(1000, c, 0), "float32")
    add_targets(store, "new", 160, seed=2)

    found = top(store, "new", 3, 0.9, GradDot())

    assert found.candidates is not None
    check_scores(found.ends, brute_force(store, "new", GradDot()))


def test_a_killed_build_is_continued(tmp_path: Path) -> None:
    whole, killed = make(tmp_path / "whole.zarr"), make(tmp_path / "killed.zarr")
    for store in (whole, killed):
        add_targets(store, "new", 160, seed=2)
        source_of(store, "new").terms()  # computes the gram matrices
    # The first put stores the directions; the others store rows.
    for puts in (1, 2, 3):
        process = forkserver().Process(target=build_and_die, args=(killed.path, "new", puts))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    with ZarrFeatureStore.open(killed.path) as reader:
        assert not reader.open_table(reader.table_names("index")[-1]).complete
        assert top(reader, "new", 10, 0.9).candidates is None

    found = [top(store, "new", 10, 0.9) for store in (whole, killed)]

    assert found[0].candidates == found[1].candidates is not None
    np.testing.assert_array_equal(found[0].ends, found[1].ends)
    tables = [path for path in whole.table_names("index") if path.endswith("/rows")]
    assert tables == [path for path in killed.table_names("index") if path.endswith("/rows")]
    for path in tables:
        np.testing.assert_array_equal(
            whole.open_table(path).read(FEATURES), killed.open_table(path).read(FEATURES)
        )


def test_later_processes_find_the_index_and_readers_write_nothing(tmp_path: Path) -> None:
    with make(tmp_path / "run.zarr") as store:
        add_targets(store, "new", 160, seed=2)
        source_of(store, "new").terms()
        with ZarrFeatureStore.open(store.path) as reader:
            assert top(reader, "new", 10, 0.9).candidates is None
            assert reader.table_names("index") == []
        top(store, "new", 10, 0.9)
    with ZarrFeatureStore.open(tmp_path / "run.zarr") as reader:
        found = top(reader, "new", 10, 0.9)
    assert found.candidates is not None
    assert found.measured == 128


def test_the_index_of_other_rows_is_dropped_and_that_of_a_dropped_checkpoint_too(tmp_path: Path) -> None:
    store = make(tmp_path / "run.zarr", num_rows=1000)
    add_targets(store, "measured", 160, seed=1)
    top(store, "measured", 3, 0.9)
    before = store.table_names("index")
    for c in range(2):
        q, w = factors(1100, c, 0)
        table = store.grow_table(f"ckpt-{c}", 1100)
        table.put(
            1000,
            {
                FEATURES: features(1100, c, 0)[1000:] * 50,
                "out_to_loss": q[1000:],
                "loss_curvature": w[1000:],
            },
        )

    found = top(store, "measured", 3, 0.9)

    assert found.candidates is not None
    check_scores(found.ends, brute_force(store, "measured"))
    assert min(recall_of(found.ends, brute_force(store, "measured"), 3)) >= 0.9
    after = store.table_names("index")
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)
    assert len(store.entry_names("index")) == 1
    drop_checkpoint(store, "ckpt-1")
    assert store.table_names("index") == store.entry_names("index") == []


@pytest.mark.parametrize("width", [1, 2, 7, 12])
def test_products_of_packed_rows_are_those_of_the_decoded_ones(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    store = MemoryFeatureStore(Manifest({}))
    table = store.create_table("rows", TableSpec(50, (Column(FEATURES, width, "int4"),), 16))
    table.put(0, {FEATURES: torch.randn(50, width, generator=generator).numpy()})
    targets = torch.randn(3, width, generator=generator)

    found = index._products(table, range(5, 43), targets)

    expected = table.read(FEATURES)[5:43].astype(np.float64) @ targets.double().numpy().T
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sign", ENDS)
@pytest.mark.parametrize("backwards", [False, True])
def test_top_rows_of_tiles_with_few_good_rows_are_those_of_a_stable_sort(sign: Any, backwards: bool) -> None:
    scores = np.random.default_rng(0).integers(-40, 40, size=(4000, 3)).astype(np.float32)
    best = TopK(3, 60, sign=sign)

    for start in sorted(range(0, 4000, 500), reverse=backwards):
        best.update(start, torch.from_numpy(scores[start : start + 500]))

    expected = reference.top_k(scores, 60, sign=sign)
    for found, wanted in zip(best.result(), expected, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted)


def attributor(path: Path | None) -> Attributor:
    settings: dict[str, Any] = {"proj_dim": 8, "dtype": "float32", "progress": False}
    return Attributor(perceptron(), "image_classification", path, **settings)


@pytest.mark.parametrize("in_memory", [False, True])
def test_score_reports_the_recall(tmp_path: Path, in_memory: bool) -> None:
    made = attributor(None if in_memory else tmp_path / "run.zarr")
    made.featurize(labelled(400), random_states(perceptron))
    first = made.score(labelled(128, 1), "few", dense=False, k=2, recall=0.9)
    targets = labelled(200, 2)

    scores = made.score(targets, "new", dense=False, k=2, recall=0.9)

    exact = made.score(targets, "new", dense=False, k=2)
    assert first.settings["recall"] == 1.0
    assert "candidates" not in first.settings
    assert scores.settings["recall_at_least"] >= 0.9
    assert scores.settings["candidates"] >= 2
    assert scores.settings["recall_targets"] == 128
    assert "recall" not in exact.settings
    both = zip(scores.top(2).indices, exact.top(2).indices, strict=True)
    assert np.mean([np.isin(one, other).mean() for one, other in both]) >= 0.9
    rows = scores.top(2).indices
    found = np.take_along_axis(made.score(targets, "new").numpy().T, rows, axis=1)
    np.testing.assert_allclose(scores.top(2).scores, found, rtol=1e-4, atol=1e-6)
    # Exact rows are known now, and suffice.
    assert made.score(targets, "new", dense=False, k=2, recall=0.9).settings["recall"] == 1.0


def test_appended_rows_are_found(tmp_path: Path) -> None:
    inputs, labels = labelled(420).tensors
    made = attributor(tmp_path / "run.zarr")
    made.featurize(Rows(TensorDataset(inputs[:400], labels[:400]), name="rows"), random_states(perceptron))
    made.score(labelled(160, 1), "measured", dense=False, k=2, recall=0.9)
    made.featurize(Rows(TensorDataset(inputs, labels), name="rows"), random_states(perceptron), append=True)

    scores = made.score(labelled(160, 2), "new", dense=False, k=420 // 64, recall=0.9)

    exact = made.score(labelled(160, 2), "new", dense=False, k=420 // 64)
    both = zip(scores.top(3).indices, exact.top(3).indices, strict=True)
    assert np.mean([np.isin(one, other).mean() for one, other in both]) >= 0.9


@pytest.mark.parametrize(
    "arguments", [{"recall": 0.9}, {"recall": 0.9, "k": 3}, {"recall": 1.0, "dense": False, "k": 3}]
)
def test_a_recall_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    made = attributor(None)
    made.featurize(labelled(20))
    with pytest.raises(InvalidInputError, match="recall"):
        made.score(labelled(3), **arguments)
