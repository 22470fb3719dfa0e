"""Methods on the same stored rows, paths of dampings, standard errors and agreement, against plain NumPy."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import reference
import torch
import view_cases as cases
from tiny_runs import Counting

from trak_lite import Attributor, Rows
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    PrecisionError,
    SingularKernelError,
)
from trak_lite.methods import TRAK, AbstractKernelMethod, GaussNewton, GradCos, GradDot

QS = ("outside", "inside", "off")
WEIGHTS = {"mean": None, "rates": (0.1, 0.02, 3.0), "base": (1.0, -1.0, 0.0)}
READINGS = [
    *((name, {}) for name in cases.METHODS),
    *((name, {"layout": "joint"}) for name in cases.WITH_LAYOUT),
]


def close(found, expected, atol=1e-5):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


@pytest.fixture(scope="module")
def made():
    """The rows ``drawn()``; scores of every method are kept beside each other."""
    return cases.drawn().attributor()


@pytest.mark.parametrize(("name", "layout"), READINGS, ids=str)
@pytest.mark.parametrize("q", QS)
def test_every_method_equals_its_definition(made, name, layout, q):
    """All segments under one kernel with a joint layout; the score of a row for itself is its self-influence."""
    rows = cases.drawn()
    products = cases.checkpoint_products(rows, name, joint=bool(layout))
    itself = cases.checkpoint_products(
        cases.Drawn(rows.train, rows.train, rows.q, rows.w), name, joint=bool(layout)
    )
    for weights in WEIGHTS.values():
        method = cases.METHODS[name](q=q, checkpoint_weights=weights, **layout)
        scores = cases.scores_of(made, rows.targets, method=method, dense=weights is not None)
        close(scores.numpy(), cases.with_q(products, rows, q, weights))
        close(scores.self_influence(), np.diagonal(cases.with_q(itself, rows, q, weights)))


@pytest.mark.parametrize("method", [GaussNewton(damping=1.0), GradDot(q="inside"), GradCos(q="off")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_rows_of_several_tiles_are_scored_as_they_are_stored(method, dtype):
    """Targets of quantised rows keep their digits."""
    rows = cases.drawn(num_checkpoints=2, num_rows=1500)
    stored = cases.Drawn(rounded(rows.train, dtype), rows.targets, rows.q, rows.w)
    if dtype == "float16":
        stored.targets = rows.targets.astype(dtype)
    expected = cases.with_q(cases.checkpoint_products(stored, method.name), rows, method.q)
    made = rows.attributor(dtype=dtype)
    scores = cases.scores_of(made, rows.targets, method=method, dense=False)
    assert [table.spec.row_bytes for table in scores.source.train] == [made.row_bytes] * 2
    assert made.row_bytes == {"float32": 20, "float16": 10, "int8": 9, "int4": 7}[dtype] + 8
    for table, wanted in zip(scores.source.train, stored.train, strict=True):
        np.testing.assert_array_equal(table.read("features"), wanted)
    close(scores.numpy(), expected)
    np.testing.assert_array_equal(cases.scores_of(made, rows.targets, method=method).numpy(), scores.numpy())
    itself = cases.Drawn(stored.train, stored.train, rows.q, rows.w)
    own = cases.with_q(cases.checkpoint_products(itself, method.name), rows, method.q)
    close(scores.self_influence(), np.diagonal(own))
    close(scores.rows([4, 1499, 4, 1024]), expected[[4, 1499, 4, 1024]])
    best = np.argsort(-scores.numpy(), axis=0, kind="stable")[:9].T
    np.testing.assert_array_equal(scores.top(9).indices, best)
    errors = scores.standard_error()
    close(scores.standard_error([1499, 1023, 3], target=1), errors[[1499, 1023, 3], 1])
    pairs = np.array([[0, 1499, 4], [1025, 5, 1], [7, 1200, 1023], [1, 3, 3]])
    close(scores.standard_error(pairs), np.take_along_axis(errors.T, pairs, 1))


def rounded(rows, dtype):
    """Rows as they are stored: each has a scale of its own where they are quantised."""
    if dtype.startswith("float"):
        return rows.astype(dtype)
    mantissa, exponent = np.frexp(np.abs(rows).max(axis=-1) / np.float32({"int8": 127, "int4": 7}[dtype]))
    scale = np.ldexp(np.floor(mantissa * 2.0**16), exponent.astype(int) - 16)[..., None]
    return np.rint(rows / scale) * scale


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("factor", [1e8, 1e-12])
def test_rows_beyond_the_range_of_float16_are_kept_as_well_as_others(dtype, factor):
    rows = cases.drawn()
    rows.train[0, 3] *= factor
    table = cases.scores_of(rows.attributor(dtype=dtype), rows.targets).source.train[0]
    np.testing.assert_array_equal(table.read("features"), rounded(rows.train[0], dtype))
    if factor > 1:
        with pytest.raises(PrecisionError, match=r"float16 cannot hold the features of rows \[3\]"):
            rows.attributor(dtype="float16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_a_module_that_storage_loses_is_told_once_per_call_where_it_counts_by_itself(dtype, recwarn, caplog):
    rows = cases.drawn(num_rows=4)
    for factor, layout in ((1.0, "module"), (0.0, "module"), (1e-7, "joint"), (1e-7, "module")):
        assert not list(recwarn)
        scaled = rows.scaled([1.0, factor])
        made = scaled.attributor(dtype=dtype, layout=layout)
    lost = np.linalg.norm((rounded(scaled.train[0], dtype) - scaled.train[0])[:, 3:])
    share = lost / np.linalg.norm(scaled.train[0][:, 3:])
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == (dtype != "float32")
    for text in said:
        assert f"{dtype} loses {share:.2g} of the norm of the features of module 'parts.1'" in text
        assert "in 1 of 2 modules" in text
        assert "dtype='float32'" in text
    cases.scores_of(made, scaled.targets)
    assert (f"perhaps because rows are stored in {dtype}" in caplog.text) == dtype.startswith("int")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_store_of_quantised_rows_goes_on_and_refuses_another_dtype_and_rows_that_are_not_finite(
    tmp_path, dtype
):
    rows, state = cases.drawn(1, 300), {**cases.Given(cases.WIDTHS).state_dict(), "number": torch.tensor(0)}
    path = tmp_path / "a.zarr"
    made = rows.attributor(dtype=dtype, path=path, featurized=False)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(rows.samples(), fail_at=290), name="train", batch_size=32), state)
    found = cases.scores_of(rows.attributor(path, dtype=dtype), rows.targets).numpy()
    np.testing.assert_array_equal(found, cases.scores_of(rows.attributor(dtype=dtype), rows.targets).numpy())
    opened = Attributor.open(path, cases.Given(cases.WIDTHS), cases.GivenTerms())
    assert opened.dtype == dtype
    again = cases.scores_of(opened, rows.targets, "again", checkpoints=[state], method=cases.DEFAULT)
    np.testing.assert_array_equal(again.numpy(), found)
    other = {"int8": "int4", "int4": "int8"}[dtype]
    with pytest.raises(ManifestMismatchError, match=f"dtype is '{dtype}' there, '{other}' here"):
        rows.attributor(path, dtype=other)
    with pytest.raises(ManifestMismatchError, match="quantisation is 1 there, 'absent' here"):
        rows.attributor(path, dtype="float32")
    rows.train[0, 3] = np.inf
    with pytest.raises(NonFiniteError, match=r"\b3\b"):
        rows.attributor(tmp_path / "new.zarr", dtype=dtype)
    assert not (tmp_path / "new.zarr").exists()


@pytest.mark.parametrize("powers", [(-7, 6), (-66, -66), (-110, -110)])
@pytest.mark.parametrize("name", cases.WITH_LAYOUT)
def test_the_scale_of_the_features_changes_nothing(name, powers):
    """Also that of all: the output may be in other units."""
    scaled = cases.drawn().scaled((2.0 ** powers[0], 2.0 ** powers[1])).scores(cases.METHODS[name]())
    close(
        scaled.numpy(),
        cases.with_q(cases.checkpoint_products(cases.drawn(), name), cases.drawn(), scaled.method.q),
    )


@pytest.mark.parametrize("layout", ["stored", "joint"])
@pytest.mark.parametrize("name", cases.KERNELS)
def test_a_path_of_dampings_equals_separate_solves(made, name, layout):
    rows, dampings = cases.drawn(), [1e-3, 0.7, 1e3]
    scores = cases.scores_of(made, rows.targets, method=cases.METHODS[name](layout=layout))
    path = scores.damping_path(dampings)
    for found, damping in zip(path.numpy(), dampings, strict=True):
        products = cases.checkpoint_products(rows, name, damping, joint=layout == "joint")
        expected = cases.with_q(products, rows, scores.method.q)
        close(found, expected, 1e-5 * np.abs(expected).max())
    close(path.rows([3, 19]), path.numpy()[:, [3, 19]])


@pytest.mark.parametrize("copies", [1, 10])
@pytest.mark.parametrize("damping", [1e-3, 1e-7])
def test_a_small_damping_costs_no_digits_where_the_rows_do_not_span_the_features(copies, damping):
    """The part of a target that is orthogonal to all rows is divided by lambda, and has products of zero."""
    rows = cases.drawn(num_rows=2)
    rows = rows.part(rows=np.tile([0, 1], copies))
    scores = rows.scores(cases.METHODS["GaussNewton"](damping=damping, layout="joint"))
    expected = cases.with_q(cases.checkpoint_products(rows, damping=damping, joint=True), rows, "outside")
    for found in (scores.numpy(), scores.damping_path([damping]).numpy()[0]):
        close(found, expected, 2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("setting", ["damping", "lambda_reg"])
def test_without_damping_no_digits_are_lost_to_rows_of_nearly_one_direction(setting):
    class Undamped(AbstractKernelMethod):
        name, weighting = "undamped", "none"

        @property
        def kernel(self):
            return replace(TRAK().kernel, **{setting: 0.0})

    rows = cases.drawn()
    rows.train[..., 1] = rows.train[..., 0] + 1e-4 * rows.train[..., 1]
    expected = cases.with_q(cases.checkpoint_products(rows, "TRAK", 0.0), rows, "outside")
    scores = rows.scores(Undamped())
    for found in (scores.numpy(), scores.damping_path([0.0]).numpy()[0]):
        close(found, expected, 2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_a_singular_kernel_without_damping_that_rounding_makes_regular_is_told(dtype, caplog):
    rows = cases.drawn(num_rows=200)
    regular, damped = (cases.METHODS["TRAK"](damping=damping, layout="joint") for damping in (0.0, 0.01))
    cases.scores_of(rows.attributor(dtype=dtype), rows.targets, method=regular).numpy()
    rows.train[..., 4] = 0.7 * rows.train[..., 0] - 0.7 * rows.train[..., 2]
    made = rows.attributor(dtype=dtype)
    scores = cases.scores_of(made, rows.targets, method=damped)
    scores.numpy(), scores.damping_path([0.01, 1.0])
    assert "rounding" not in caplog.text
    scores.damping_path([0.01, 0.0])
    assert caplog.text.count(f"no larger than the rounding of rows to {dtype}") == 1
    caplog.clear()
    cases.scores_of(made, rows.targets, method=regular).numpy()
    assert caplog.text.count(f"no larger than the rounding of rows to {dtype}") == 1
    with pytest.raises(SingularKernelError):
        cases.scores_of(rows.attributor(), rows.targets, method=regular).numpy()


def test_a_path_answers_for_one_target_and_for_the_best_rows(made):
    scores = cases.scores_of(made, cases.drawn().targets)
    path, some = scores.damping_path([0.1, 10]), scores.damping_path([0.1, 10], targets=slice(None, None, 2))
    dense = path.numpy()
    assert some.shape == (2, 20, 2)
    close(some.numpy(), dense[:, :, ::2])
    close(some.rows([5, 1]), dense[:, [5, 1], ::2])
    np.testing.assert_array_equal(some.top(2).indices, path.top(2).indices[:, ::2])
    assert dense.shape == path.shape == (2, 20, 4)
    assert "20 train rows x 4 targets at" in repr(path)
    np.testing.assert_array_equal(path.numpy(target=-1), dense[:, :, 3])
    order = np.argsort(-dense, axis=1, kind="stable")[:, :5].swapaxes(1, 2)
    np.testing.assert_array_equal(path.top(5).indices, order)
    worst = path.top(5, target=2, sign="harmful").scores
    np.testing.assert_array_equal(worst, np.sort(dense[:, :, 2])[:, :5])


def test_a_segment_without_signal_adds_nothing_at_any_damping():
    rows = cases.drawn()
    rows.train[:, :, 3:] = 0
    alone = cases.Drawn(rows.train[..., :3], rows.targets[..., :3], rows.q, rows.w, (3,))
    path = rows.scores().damping_path([0.5]).numpy()[0]
    close(path, cases.with_q(cases.checkpoint_products(alone, damping=0.5), rows, "outside"), 1e-6)


@pytest.mark.parametrize(
    ("error", "message", "method", "dampings"),
    [
        (InvalidInputError, "dampings is empty", None, []),
        (InvalidInputError, "finite number of at least 0", None, [1, -1]),
        (InvalidInputError, "no kernel, so it has no damping", GradDot(), [1]),
        (SingularKernelError, "no inverse at lambda = 0", None, [0]),
    ],
)
def test_dampings_without_an_answer_are_refused(error, message, method, dampings):
    with pytest.raises(error, match=message):
        cases.drawn(num_rows=2).scores(method).damping_path(dampings)


RUNS, MEMBERS = ["x", "y", "x", "z"], ([0, 2], [1], [3])


def of_groups(rows, members, name="GaussNewton", q="outside"):
    """What each group of checkpoints alone scores, ``(G, N, M)``, with the mean q of the group."""
    parts = [rows.part(list(group)) for group in members]
    return np.stack([cases.with_q(cases.checkpoint_products(part, name), part, q) for part in parts])


def mean_spearman(groups):
    """The mean over pairs of groups ``(G, n, M)``, for each target."""
    pairs = [*combinations(groups, 2)]
    each = [[reference.spearman(*columns) for columns in zip(a.T, b.T, strict=True)] for a, b in pairs]
    return np.mean(each, axis=0)


@pytest.mark.parametrize("name", ["GaussNewton", "GradDot", "GradCos"])
@pytest.mark.parametrize("q", ["inside", "off"])
def test_a_mean_has_the_standard_error_of_leaving_out_one_checkpoint(name, q):
    """The exact jackknife: each checkpoint is left out, and the rest is scored again."""
    rows = cases.drawn(num_checkpoints=4)
    left = of_groups(rows, combinations(range(4), 3), name, q)
    expected = np.sqrt(3 / 4 * ((left - left.mean(0)) ** 2).sum(0))
    errors = rows.scores(cases.METHODS[name](q=q)).standard_error()
    np.testing.assert_allclose(errors, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("q", ["outside", "off"])
@pytest.mark.parametrize("runs", [None, RUNS])
@pytest.mark.parametrize("weights", [None, (0.1, 0.05, 0, 0.01), (-1, -2, -3, -4)])
def test_checkpoints_or_runs_are_the_unit_of_a_product_of_two_means(q, runs, weights):
    """The jackknife in the first order: each group is left out of both means, with its weights."""
    rows = cases.drawn(num_checkpoints=4)
    members = MEMBERS if runs else [[c] for c in range(4)]
    a = np.full(4, 1 / 4) if weights is None else np.array(weights)
    k, factors = cases.checkpoint_products(rows), np.ones((4, 1, 1))
    if q == "outside":
        factors = rows.q.astype(np.float64)[:, :, None]

    def means(left_out):
        kept = [c for c in range(4) if c not in left_out]
        return np.einsum("c,cnm->nm", a[kept], k[kept]) * a.sum() / a[kept].sum(), factors[kept].mean(0)

    mean, factor = means([])
    count, weighted = len(members), sum(bool(a[group].any()) for group in members)
    ratio = np.sqrt((1 - 1 / weighted) / (1 - 1 / count))  # a group of weight 0 is none of the weighted mean
    change = [ratio * factor * (part - mean) + mean * (other - factor) for part, other in map(means, members)]
    expected = np.sqrt((1 - 1 / count) * np.square(change).sum(0))
    scores = rows.scores(replace(cases.DEFAULT, q=q, checkpoint_weights=weights))

    def check(found, wanted):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)

    check(scores.standard_error(runs=runs), expected)
    check(scores.standard_error([19, 3, 3], runs=runs), expected[[19, 3, 3]])
    check(scores.standard_error([3, 7], target=-1, runs=runs), expected[[3, 7], 3])
    check(scores.standard_error(target=1, runs=runs), expected[:, 1])
    pairs = np.array([[0, 19], [5, 5], [7, 2], [1, 3]])
    check(scores.standard_error(pairs, runs=runs), np.take_along_axis(expected.T, pairs, 1))


@pytest.mark.quick
@pytest.mark.parametrize("q", ["outside", "inside", "off"])
def test_reliability_ranks_what_each_run_alone_scores(q):
    """Some scores are zero, and tie; the expected agreement of means is by the formula of Spearman and Brown.

    A mean over runs of 2, 1 and 1 checkpoints is as noisy as one over 4^2 / (2^2 + 1 + 1) equal runs.
    """
    rows = cases.drawn(num_checkpoints=4)
    rows.train[:, 3:9] = 0
    scores, alone = rows.scores(replace(cases.DEFAULT, q=q)), of_groups(rows, MEMBERS, q=q).astype(np.float32)
    expected = mean_spearman(alone)
    found = scores.reliability(runs=RUNS, threshold=0.2)
    np.testing.assert_allclose(found.agreement, expected, atol=1e-12)
    positive = expected.clip(min=0)
    np.testing.assert_allclose(found.expected, 8 * positive / (3 + 5 * positive))
    np.testing.assert_array_equal(found.reliable, found.expected >= 0.2)
    assert f"{found.reliable.sum()} of {len(found.reliable)} targets have a reliable ranking" in str(found)
    assert f"agree by {np.median(found.agreement):.2f} ({found.agreement.min():.2f} to " in str(found)
    assert f"others by {np.median(found.expected):.2f} (" in str(found)
    # The kernel is that of all rows: only the rows that are ranked are fewer.
    some = scores.reliability(runs=RUNS, max_rows=10)
    np.testing.assert_allclose(some.agreement, mean_spearman(alone[:, ::2]), atol=1e-12)


@pytest.mark.parametrize("q", ["outside", "inside", "off"])
def test_checkpoints_of_weight_0_change_no_uncertainty(q):
    """All results are those of the other checkpoints alone, if the mean q, which counts each, is the same."""
    rows = cases.drawn(num_checkpoints=5)
    if q == "outside":
        rows.q[:] = rows.q[0]
    method = replace(cases.DEFAULT, q=q, checkpoint_weights=(0.1, 0, 0.1, 0, 0))
    with_others = rows.scores(method)
    alone = rows.part([0, 2]).scores(replace(method, checkpoint_weights=(0.1, 0.1)))
    np.testing.assert_allclose(with_others.standard_error(), alone.standard_error(), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(with_others.reliability().expected, alone.reliability().expected)
    equal = rows.scores(replace(method, checkpoint_weights=(0.1,) * 5)).reliability()
    positive = equal.agreement.clip(min=0)
    np.testing.assert_array_equal(equal.expected, 5 * positive / (1 + 4 * positive))  # to the last bit


def test_the_weights_of_checkpoints_are_not_noise():
    """A checkpoint of weight 0 has no ranking; the others are one checkpoint with other weights."""
    rows, other = cases.drawn(num_checkpoints=1), cases.drawn(num_checkpoints=1, seed=1)
    parts = zip(*(vars(one).values() for one in (rows, other, rows)), strict=True)
    three = cases.Drawn(*(np.concatenate(each) for each in [*parts][:4]))
    scores = three.scores(replace(cases.DEFAULT, q="inside", checkpoint_weights=(1, 0, 3)))
    assert scores.standard_error().max() < 1e-6 * np.abs(scores.numpy()).max()
    np.testing.assert_allclose(scores.reliability().agreement, 1)


def test_scores_without_an_order_agree_with_nothing():
    rows = cases.drawn()
    rows.train[0] = 0
    with pytest.warns(UserWarning, match="Featurizing 0: all .* are zero"):
        scores = rows.scores(cases.METHODS["GradDot"](q="off"))
    agreement = scores.checkpoint_agreement()
    np.testing.assert_array_equal(agreement[0, 1:], 0)
    assert agreement[1, 2] != 0


def test_subtracted_base_models_have_errors_over_runs():
    rows = cases.drawn(num_checkpoints=4)
    k = cases.checkpoint_products(rows)
    each = np.stack([2 * (k[0] - k[1]), 2 * (k[2] - k[3])])
    scores = rows.scores(replace(cases.DEFAULT, q="off", checkpoint_weights=(1, -1, 1, -1)))
    expected = each.std(0, ddof=1) / np.sqrt(2)
    np.testing.assert_allclose(scores.standard_error(runs=[0, 0, 1, 1]), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("message", "checkpoints", "weights", "runs"),
    [
        ("runs has 2 labels, but 4 checkpoints", 4, None, ["a", "b"]),
        ("at least 2 runs, got 1", 4, None, ["a"] * 4),
        ("the checkpoints are not repeats of one measurement", 4, (1, -1, 1, -1), None),
        ("at least 2 checkpoints, got 1", 1, None, None),
        ("got 1 with a weight other than 0 of 4", 4, (0, 2, 0, 0), None),
    ],
)
def test_groups_that_mean_nothing_are_refused(message, checkpoints, weights, runs):
    scores = cases.drawn(num_checkpoints=checkpoints).scores(
        replace(cases.DEFAULT, checkpoint_weights=weights)
    )
    with pytest.raises(InvalidInputError, match=message):
        scores.standard_error(runs=runs)
    with pytest.raises(InvalidInputError, match=message):
        scores.reliability(runs=runs)
