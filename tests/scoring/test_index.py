"""Top rows by an index, against all scores in NumPy: their scores, the recall that is stated, and what may go wrong."""

import math

import numpy as np
import pytest
import reference
from view_cases import Drawn, Given, GivenTerms, checkpoint_products, scores_of, with_q

from trak_lite import Attributor
from trak_lite.methods import GaussNewton, GradCos, GradDot
from trak_lite.store import ZarrFeatureStore

N, C, WIDTHS = 3000, 2, (40, 24)
K = sum(WIDTHS)
ENDS = ("helpful", "harmful")
METHOD = GaussNewton(damping=0.3)


def features(count, seed):
    """Draw rows ``(C, N, K)`` that share directions between checkpoints; variances fall like 1 / j."""
    shared = np.random.default_rng((seed, 0)).normal(size=(count, K)) / np.sqrt(np.arange(1, K + 1))
    rows = []
    for c in range(C):
        mixing = np.random.default_rng((c, 99)).normal(size=(K, K))
        own = np.random.default_rng((seed, c, 1)).normal(size=(count, K)) * 0.05
        rows.append((shared @ mixing + own).astype(np.float32))
    return np.stack(rows)


def decaying(num_rows, num_targets):
    q, w = np.random.default_rng(2).uniform(0.2, 1, size=(2, C, num_rows)).astype(np.float32)
    return Drawn(features(num_rows, 0), features(num_targets, 1), q, w, WIDTHS)


def brute_force(rows, method=METHOD):
    """Return all scores ``(N, M)`` by NumPy in float64."""
    products = checkpoint_products(rows, method.name, getattr(method, "damping", 0.0))
    return with_q(products, rows, method.q, method.checkpoint_weights)


MANY = decaying(N, 560)
METHODS = {
    "GaussNewton": (METHOD, 0.9),
    "q inside, weights of both signs": (GaussNewton(damping=0.3, q="inside", checkpoint_weights=(1.5, -1.0)), 0.9),
    "GradDot": (GradDot(), 0.9),
    "GradCos": (GradCos(), 0.9),
    "so few candidates that rows are lost": (GaussNewton(damping=0.1), 0.5),
}  # fmt: skip


def indexed(made, targets, name, k=3, recall=0.9, **more):
    return scores_of(made, targets, name, dense=False, k=k, recall=recall, **more)


def recall_of(found, scores, k):
    """Return the recall of the worse end, mean over targets."""
    shares = []
    for sign in ENDS:
        exact = reference.top_k(scores.astype(np.float32), k, sign=sign)[0]
        both = zip(exact, found.top(k, sign=sign).indices, strict=True)
        shares.append(np.mean([np.isin(one, other).mean() for one, other in both]))
    return min(shares)


def check_scores(found, scores, k):
    """Check the scores of the found rows, their order, and that no row is repeated."""
    for sign, factor in zip(ENDS, (1, -1), strict=True):
        rows, values = found.top(k, sign=sign)
        assert all(len(set(one)) == len(one) for one in rows)
        expected = np.take_along_axis(scores.T, rows, axis=1)
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-5 * abs(scores).max())
        assert (np.diff(values * factor, axis=1) <= 0).all()


def lower_bound(mean, count):
    """Hoeffding 1963, theorem 1: below the smallest p with n KL(mean, p) = log(6 / 0.05), by trying all."""
    p = np.linspace(1e-6, mean - 1e-9, 2_000_001)
    divergence = mean * np.log(mean / p)
    if mean < 1:
        divergence += (1 - mean) * np.log((1 - mean) / (1 - p))
    return float(p[divergence * count <= math.log(6 / 0.05)][0])


@pytest.fixture(scope="module")
def made():
    return MANY.attributor(method=METHOD)


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_an_index_have_their_scores_and_the_stated_recall_is_that_of_numpy(made, name):
    method, recall = METHODS[name]
    found = indexed(made, MANY.targets, "many", 10, recall, method=method)
    again = indexed(made, MANY.targets, "many", 10, recall, method=method)
    scores, said = brute_force(MANY, method), found.settings
    check_scores(found, scores, 10)
    known = recall_of(found, scores, 10)
    assert said["recall_targets"] == 128
    assert recall <= said["recall_at_least"] <= min(said["recall"], known)
    assert said["recall_at_least"] == pytest.approx(lower_bound(said["recall"], 128), abs=3e-5)
    assert again.settings == said
    if recall == 0.5:
        assert said["candidates"] == 10
        assert 0.5 < known < 1
        assert abs(said["recall"] - known) < 0.03  # of 128 of these 560 targets


def test_a_bound_is_stated_for_no_set_but_the_measured_one():
    """The index keeps the plane in which most rows are; targets of the second set are off the plane."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(N, K)).astype(np.float32)
    rows[generator.random(N) > 0.03, 2:] *= 1e-4
    plane, other = generator.normal(size=(2, 1, 200, K)).astype(np.float32)
    plane[..., 2:], other[..., :2] = 0, 0
    one = Drawn(rows[None], plane, MANY.q[:1], MANY.w[:1], WIDTHS)
    made = one.attributor(method=GradDot())
    first = indexed(made, plane, "both", 10)
    made.drop_scores("both", features=True)
    for name, targets in (("plane", plane), ("other", other), ("small", other[:, :128]), ("both", other)):
        found = indexed(made, targets, name, 10)
        scores = brute_force(Drawn(rows[None], targets, one.q, one.w, WIDTHS), GradDot())
        assert recall_of(found, scores, 10) >= found.settings.get("recall_at_least", 1.0)
        candidates = first.settings["candidates"] if name == "plane" else None
        assert found.settings.get("candidates") == candidates


@pytest.mark.filterwarnings("ignore:.* all 1,000 computed rows")
@pytest.mark.parametrize("rows", ["int4", "int8", "float16", "rank one and zero"])
def test_narrow_rows_and_rows_of_low_rank_are_scored_as_they_are_stored(rows):
    few, dtype, method = decaying(1000, 160), "float32", METHOD
    if rows == "rank one and zero":
        line = np.outer(np.arange(1000), np.ones(K)).astype(np.float32)
        few.train, method = np.stack([line * c for c in range(C)]), GradDot()
    else:
        dtype = rows
    found = indexed(few.attributor(dtype=dtype, method=method), few.targets, "new")
    assert "candidates" in found.settings
    stored = np.stack([table.read("features") for table in found.source.train])
    assert np.array_equal(stored, few.train) == (dtype == "float32")
    few.train, few.targets = stored, few.targets.astype("float16" if dtype == "float16" else "float32")
    check_scores(found, brute_force(few, method), 3)


def test_equal_rows_are_returned_in_the_order_of_their_numbers():
    few = decaying(N // 4, 160)
    rows = Drawn(np.tile(few.train, (1, 4, 1)), few.targets, np.tile(few.q, 4), np.tile(few.w, 4), WIDTHS)
    found = indexed(rows.attributor(method=METHOD), few.targets, "new", 8, 0.96)
    assert "candidates" in found.settings
    for sign in ENDS:
        for own, values in zip(*found.top(8, sign=sign), strict=True):
            # Two groups of four equal rows each, in ascending order.
            for group in (own[:4], own[4:]):
                assert len(set(group % (N // 4))) == 1
                assert (np.diff(group) > 0).all()
            assert len(set(values[:4])) == 1


def test_a_recall_is_stated_only_when_enough_targets_were_measured():
    """Exact rows are given for few targets, for a recall that cannot be reached, and for few train rows."""
    rows = decaying(1000, 560)
    made = rows.attributor(method=METHOD)
    scores = brute_force(rows)
    for name, count, recall, k, is_indexed in (
        ("few", 128, 0.9, 3, False),
        ("few", 128, 0.9, 3, False),
        ("many", 560, 0.9, 3, True),
        ("many", 560, 0.9999, 3, False),
        ("many", 560, 0.5, 1000 // 64, True),
        ("many", 560, 0.5, 1000 // 64 + 1, False),
    ):
        found = indexed(made, rows.targets[:, :count], name, k, recall)
        if name == "few":
            assert found.source.store.table_names("index") == []
        assert ("candidates" in found.settings) == is_indexed, (name, recall, k)
        if not is_indexed:
            assert found.settings["recall"] == 1.0
            assert recall_of(found, scores[:, :count], k) == 1.0
    # Exact rows that are known suffice later.
    assert indexed(made, rows.targets, "many", 3).settings["recall"] == 1.0


@pytest.mark.parametrize("puts", [1, 2])  # the first put stores the directions; the others store rows
def test_an_interrupted_build_is_continued_and_readers_take_a_complete_index(tmp_path, monkeypatch, puts):
    rows = decaying(1000, 160)
    whole, broken = (rows.attributor(tmp_path / name, method=METHOD) for name in ("whole", "broken"))
    for made in (whole, broken):
        scores_of(made, rows.targets, "test", dense=False).numpy()  # computes the gram matrices
    with monkeypatch.context() as patched:
        stop_after(puts, patched)
        with pytest.raises(KeyboardInterrupt):
            indexed(broken, rows.targets, "test")
    with monkeypatch.context() as patched:
        patched.setattr(ZarrFeatureStore, "writable", property(lambda self: False))
        for made in (whole, broken):
            assert "candidates" not in indexed(made, rows.targets, "test").settings

    found = [indexed(made, rows.targets, "test") for made in (whole, broken)]

    assert found[0].settings == found[1].settings
    assert "candidates" in found[0].settings
    for sign in ENDS:
        for one, other in zip(*(scores.top(3, sign=sign) for scores in found), strict=True):
            np.testing.assert_array_equal(one, other)
    stores = [scores.source.store for scores in found]
    names = (store.table_names("index") for store in stores)
    tables, others = ([path for path in own if path.endswith("/rows")] for own in names)
    assert tables == others
    for path in tables:
        np.testing.assert_array_equal(*(store.open_table(path).read("features") for store in stores))
    monkeypatch.setattr(ZarrFeatureStore, "writable", property(lambda self: False))
    later = Attributor.open(tmp_path / "whole", Given(WIDTHS), GivenTerms())
    assert indexed(later, rows.targets, "test", 2).settings["recall_targets"] == 128


def stop_after(puts, patched):
    """Interrupt the process after some puts into tables of an index."""
    create, left = ZarrFeatureStore.create_table, [puts]

    def created(self, path, *args):
        table = create(self, path, *args)
        if not path.startswith("index/"):
            return table
        patched.setattr(ZarrFeatureStore, "create_table", create)
        put = type(table).put

        def counted(self, *given):
            put(self, *given)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        patched.setattr(type(table), "put", counted)
        return table

    patched.setattr(ZarrFeatureStore, "create_table", created)


def test_the_index_of_other_rows_is_dropped_and_that_of_a_dropped_checkpoint_too():
    rows, longer = decaying(1000, 160), decaying(1100, 160)
    made = rows.attributor(method=METHOD)
    store = indexed(made, rows.targets, "measured").source.store
    before = store.table_names("index")
    for part in ("train", "q", "w"):
        getattr(longer, part)[:, :1000] = getattr(rows, part)
    longer.train[:, 1000:] = features(1100, 0)[:, 1000:] * 50
    longer.featurize(made, append=True)
    found = indexed(made, rows.targets, "measured")
    assert "candidates" in found.settings
    check_scores(found, brute_force(longer), 3)
    assert recall_of(found, brute_force(longer), 3) >= 0.9
    after = store.table_names("index")
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)
    assert len(store.entry_names("index")) == 1
    made.drop_checkpoint("ckpt-1")
    assert store.table_names("index") == store.entry_names("index") == []
