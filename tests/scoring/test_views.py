"""Methods through the facade: stored rows are read again, never computed again; what is kept where; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import labelled, perceptron, random_states
from torch import Tensor, nn

from trak_lite import Attributor, Scores
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError
from trak_lite.featurizing import session as featurizing
from trak_lite.featurizing.fisher import FisherFits
from trak_lite.featurizing.kronecker_fits import KroneckerFits
from trak_lite.methods import EKFAC, TRAK, AbstractMethod, Fisher, GaussNewton, GradCos, GradDot, TracIn
from trak_lite.projectors import NoOpProjector

N, M = 30, 4
DAMPED_TRAK = TRAK(damping=None, layout="stored")
model = partial(perceptron, 5)
states = partial(random_states, model, 3)


TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)


def featurized(path: Path | None = None, **changes: Any) -> Attributor:
    made = Attributor(
        model(), "image_classification", path, **{"proj_dim": 16, "dtype": "float32", **changes}
    )
    made.featurize(TRAIN, checkpoints=states())
    return made


def rows_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows which each later pass over data writes."""
    written: list[int] = []
    compute = featurizing.featurize_rows

    def counted(*args: Any, **options: Any) -> int:
        written.append(compute(*args, **options))
        return written[-1]

    monkeypatch.setattr(featurizing, "featurize_rows", counted)
    return written


def no_more_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("A gradient was computed that is stored already.")

    monkeypatch.setattr("trak_lite.featurizing.session.featurize_rows", refuse)


# ------------------------------------------------------------------------ reading the same rows again


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    "method",
    [
        DAMPED_TRAK,
        TRAK(damping=0.5),
        GradDot(q="inside", checkpoint_weights=[0.1, 0.2, 0.3]),
        TracIn(learning_rates=[0.1, 0.2, 0.3]),
        GradCos(),
        GaussNewton(damping=20.0),
        GaussNewton(layout="joint"),
    ],
    ids=lambda method: "-".join(map(str, method.to_json().values())),
)
def test_another_method_stores_no_gradient(
    monkeypatch: pytest.MonkeyPatch, method: AbstractMethod, dense: bool
) -> None:
    made = featurized(layout="module")
    first = made.score(TARGETS, name="test")
    before = first.numpy()
    written = rows_written(monkeypatch)

    other = made.score(TARGETS, name="test", dense=dense, method=method)
    assert written == [0]  # the targets of one checkpoint are compared, nothing is computed anew

    assert not np.allclose(other.numpy(), before)
    np.testing.assert_array_equal(made.scores("test").numpy(), before)
    np.testing.assert_allclose(made.scores("test", dense=dense, method=method).numpy(), other.numpy())
    assert other.method == method.decided(made.layout)
    said = {key: value for key, value in method.to_json().items() if key != "name" and value is not None}
    assert all(other.settings[key] == value for key, value in said.items())
    assert (other.settings["method"], other.settings["checkpoints"]) == (method.name, 3)


def test_settings_that_say_what_holds_anyway_give_the_same_table(tmp_path: Path) -> None:
    made = featurized(tmp_path / "a.zarr", layout="joint")
    made.score(TARGETS, name="test")

    for method in (
        GaussNewton(damping=None, layout="joint", q="outside"),
        "gaussnewton",
        {"name": "GaussNewton", "layout": "joint"},
    ):
        assert "a.zarr:scores/test" in repr(made.score(TARGETS, name="test", method=method))


def test_tracin_is_the_product_of_loss_gradients_and_target_gradients() -> None:
    """The sum over checkpoints of rate times (minus the loss gradient of a row) times (gradient of a target's f)."""
    rates = [0.3, 0.1, 0.02]
    made = featurized(projector=NoOpProjector(grad_dim=43, device="cpu"), dtype="float32")

    scores = made.score(TARGETS, method=TracIn(learning_rates=rates)).numpy()

    network, expected = model(), np.zeros((N, M))
    for rate, state in zip(rates, states(), strict=True):
        network.load_state_dict(state)
        losses = [nn.functional.cross_entropy(network(x[None]), y[None]) for x, y in TRAIN]
        down = [torch.cat([-g.flatten() for g in gradient(network, loss)]) for loss in losses]
        margins = [margin(network(x[None])[0], int(y)) for x, y in TARGETS]
        up = [torch.cat([g.flatten() for g in gradient(network, value)]) for value in margins]
        expected += rate * (torch.stack(down) @ torch.stack(up).T).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-5)


def gradient(network: nn.Module, value: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, list(network.parameters()))


def margin(logits: Tensor, label: int) -> Tensor:
    return logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).logsumexp(0)


def test_a_base_model_is_subtracted_by_a_negative_weight() -> None:
    base, tuned, _ = states()
    made = featurized()
    each = [
        made.score(TARGETS, name=name, checkpoints=[state]).numpy()
        for name, state in (("base", base), ("tuned", tuned))
    ]

    difference = made.score(
        TARGETS,
        checkpoints=[base, tuned],
        method=replace(made.method, checkpoint_weights=(-1, 1), q="inside"),
    ).numpy()

    np.testing.assert_allclose(difference, each[1] - each[0], rtol=1e-4, atol=1e-5)


def test_other_targets_are_refused_with_every_method() -> None:
    made = featurized()
    made.score(TARGETS, name="test", method="GradDot")

    for view in ({"method": "GradDot"}, {"method": "TRAK"}, {"dense": False}):
        with pytest.raises(ManifestMismatchError, match=r"targets.*another name"):
            made.score(labelled(M, 5), name="test", **view)


def test_a_store_opened_again_answers_with_any_method_without_data(tmp_path: Path, monkeypatch: Any) -> None:
    expected = featurized(tmp_path / "a.zarr").score(TARGETS, name="test", method="GradDot").numpy()
    no_more_gradients(monkeypatch)

    again = Attributor.open(tmp_path / "a.zarr", model())

    np.testing.assert_array_equal(again.scores("test", method="GradDot").numpy(), expected)
    np.testing.assert_array_equal(again.scores("test", method="GradDot", dense=False).numpy(), expected)


def test_scores_of_an_attributor_with_another_method_are_not_taken_for_these(tmp_path: Path) -> None:
    expected = featurized(tmp_path / "a.zarr").score(TARGETS, name="test").numpy()

    again = Attributor.open(tmp_path / "a.zarr", model(), method="GradDot")

    with pytest.raises(ManifestMismatchError, match=r"method\.name is 'GaussNewton' there, 'GradDot' here"):
        again.scores("test")
    with pytest.raises(ManifestMismatchError, match=r"method\.name is 'GaussNewton' there, 'GradDot' here"):
        again.score(TARGETS, name="test")
    other = again.score(TARGETS, name="other", checkpoints=states()).numpy()
    assert not np.allclose(other, expected)


# ------------------------------------------------------------------------ methods that are fitted


NEEDS_A_FIT = [Fisher(samples_per_feature=6), EKFAC()]


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where something is fitted: the table or the digest of each checkpoint, in order."""
    fitted: list[str] = []

    def note(cls: Any) -> None:
        fit = cls.fit
        monkeypatch.setattr(
            cls, "fit", lambda self, at, *a, **k: (fitted.append(at), fit(self, at, *a, **k))[1]
        )

    for cls in (FisherFits, KroneckerFits):
        note(cls)
    return fitted


@pytest.mark.parametrize("default", ["GaussNewton", "Fisher"])
@pytest.mark.parametrize("method", NEEDS_A_FIT, ids=lambda method: method.name)
def test_score_fits_what_its_method_needs_once_and_reopened_stores_give_the_same_bits(
    tmp_path: Path, fits: list[str], method: AbstractMethod, default: Any
) -> None:
    made = featurized(tmp_path / "a.zarr", method=default)
    by_featurize = 3 if default == "Fisher" else 0
    assert len(fits) == by_featurize

    first = made.score(TARGETS, name="test", method=method).numpy()
    assert len(fits) == by_featurize + 3
    made.featurize(TRAIN, checkpoints=states())
    second = made.score(TARGETS, name="test", method=method).numpy()
    streamed = made.score(TARGETS, name="test", method=method, dense=False).numpy()
    again = Attributor.open(tmp_path / "a.zarr", model())
    third = again.score(TARGETS, name="test", method=method.to_json()).numpy()
    fourth = again.score(TARGETS, name="new", method=method, checkpoints=states()).numpy()

    assert len(fits) == by_featurize + 3
    np.testing.assert_array_equal(again.scores("test", method=method).numpy(), first)
    for found in (second, streamed, third, fourth):
        np.testing.assert_array_equal(found, first)
    assert not np.allclose(made.score(TARGETS, name="test").numpy(), first)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("method", NEEDS_A_FIT, ids=lambda method: method.name)
def test_an_attributor_without_train_data_asks_for_featurize_before_a_fit(
    tmp_path: Path, fits: list[str], method: AbstractMethod, dense: bool
) -> None:
    featurized(tmp_path / "a.zarr")
    again = Attributor.open(tmp_path / "a.zarr", model())

    with pytest.raises(
        StateError, match=rf"{method.name} has to be fitted.*Call featurize\(train_data, \.\.\.\)"
    ):
        again.score(TARGETS, name="test", method=method, dense=dense, checkpoints=states())
    assert not fits
    assert again.featurize(TRAIN, checkpoints=states()).rows_written == 0
    assert again.score(TARGETS, name="test", method=method, dense=dense).shape == (N, M)


# ------------------------------------------------------------------------ without the matrix


@pytest.mark.parametrize("method", [None, GradCos()], ids=str)
def test_the_best_and_worst_rows_are_found_and_kept_without_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    made = featurized(tmp_path / "a.zarr")
    sparse = made.score(TARGETS, name="test", method=method, dense=False, k=7)
    assert not any((tmp_path / "a.zarr" / folder).exists() for folder in ("scores", "views"))
    assert "not stored, computed from the rows in" in repr(sparse)
    dense = made.score(TARGETS, name="test", method=method)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("The rows were read again.")

    monkeypatch.setattr("trak_lite.scoring.source.score_tile", refuse)
    for found in (sparse, made.score(TARGETS, name="test", method=method, dense=False, k=5)):
        for sign in ("helpful", "harmful"):
            for k, target in ((7, None), (3, None), (7, 2)):
                expected = dense.top(k, target=target, sign=sign)
                best = found.top(k, target=target, sign=sign)
                np.testing.assert_array_equal(best.indices, expected.indices)
                np.testing.assert_array_equal(best.scores, expected.scores)
                assert best.indices.dtype == np.int64
    monkeypatch.undo()
    np.testing.assert_array_equal(sparse.top(12).indices, dense.top(12).indices)


def test_kept_rows_of_other_settings_or_fewer_of_them_are_found_anew() -> None:
    made = featurized()
    made.score(TARGETS, name="test", dense=False, k=2)

    for k, damping in ((5, 1.0), (5, 0.01), (100, 0.01)):
        sparse = made.score(TARGETS, name="test", dense=False, k=k, method=GaussNewton(damping=damping))
        dense = made.score(TARGETS, name="test", method=GaussNewton(damping=damping))
        np.testing.assert_array_equal(sparse.top(k).indices, dense.top(k).indices)


def test_no_tile_is_larger_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trak_lite.scoring.tiles._TILE_ROWS", 8)
    made = featurized()
    dense = made.score(TARGETS, name="test")
    sizes = []
    scores = made.score(TARGETS, name="test", dense=False)
    matrix = scores._matrix
    real = matrix.tiles
    monkeypatch.setattr(
        type(matrix), "tiles", lambda self, wanted: ((s, sizes.append(len(t)) or t) for s, t in real())
    )

    best = scores.top(4)

    assert max(sizes) == 8
    assert sum(sizes) == N
    np.testing.assert_array_equal(best.indices, dense.top(4).indices)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_scores_that_are_not_kept_answer_all_questions(dtype: Any) -> None:
    made = featurized(dtype=dtype)
    dense, sparse = made.score(TARGETS, name="test"), made.score(TARGETS, name="test", dense=False)

    np.testing.assert_array_equal(sparse.numpy(), dense.numpy())
    np.testing.assert_allclose(sparse.rows([4, 29, 4]), dense.rows([4, 29, 4]), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(sparse.self_influence(), dense.self_influence())
    labels = np.arange(N) % 3
    np.testing.assert_allclose(sparse.group(labels).sums, dense.group(labels).sums, rtol=1e-12)
    assert sparse.shape == dense.shape


# ------------------------------------------------------------------------ dampings


def test_a_path_of_dampings_needs_a_name_or_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    made, trak = featurized(), replace(DAMPED_TRAK, q="off")
    path = made.score(TARGETS, name="test", dense=False, method=trak).damping_path([0.1, 10.0])
    separate = [
        made.score(TARGETS, name="test", method=replace(trak, damping=d)).numpy() for d in (0.1, 10.0)
    ]
    no_more_gradients(monkeypatch)
    named = made.scores("test", dense=False, method=trak).damping_path([0.1, 10.0])

    np.testing.assert_allclose(path.numpy(), separate, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(named.numpy(), path.numpy())
    np.testing.assert_array_equal(
        made.scores("test", method=replace(trak, damping=0.1)).damping_path([10.0]).numpy()[0],
        path.numpy()[1],
    )


# ------------------------------------------------------------------------ uncertainty


def test_standard_errors_are_given_for_what_is_asked() -> None:
    scores = featurized().score(TARGETS, name="test")
    every = scores.standard_error()

    assert every.shape == (N, M)
    assert (every > 0).all()
    np.testing.assert_allclose(scores.standard_error(target=-1), every[:, M - 1], rtol=1e-4)
    np.testing.assert_allclose(scores.standard_error([3, 7]), every[[3, 7]], rtol=1e-4)
    np.testing.assert_allclose(scores.standard_error([3, 7], target=1), every[[3, 7], 1], rtol=1e-4)
    best = scores.top(5).indices
    np.testing.assert_allclose(scores.standard_error(best), np.take_along_axis(every.T, best, 1), rtol=1e-4)
    over_runs = scores.standard_error(target=0, runs=["a", "a", "b"])
    assert not np.allclose(over_runs, every[:, 0])


def test_reliability_is_given_per_target() -> None:
    found = featurized().score(TARGETS, name="test").reliability(threshold=0.3)

    assert found.agreement.shape == found.expected.shape == found.reliable.shape == (M,)
    np.testing.assert_array_equal(found.reliable, found.expected >= 0.3)


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.standard_error([]), "rows must be whole numbers from 0 to 29"),
        (lambda s: s.standard_error([30]), "from 0 to 29"),
        (lambda s: s.standard_error([0.5]), "whole numbers"),
        (lambda s: s.standard_error([[0], [1]]), r"for all targets \(4, k\), got int64 of shape \(2, 1\)"),
        (lambda s: s.standard_error(np.zeros((M, 1), int), target=1), r"\(4, k\)"),
        (lambda s: s.standard_error(target=4), "no target 4"),
        (lambda s: s.reliability(max_rows=0), "max_rows must be an integer of at least 1"),
        (lambda s: s.damping_path([]), "dampings is empty"),
        (lambda s: s.group([1, 2]), "one label for each of 30, got an array of shape"),
        (lambda s: s.group([[0] * 30]), r"one label for each of 30, got an array of shape \(1, 30\)"),
        (lambda s: s.group(targets=[0] * 5), "labels of targets must hold one label for each of 4"),
        (lambda s: s.group(), "No labels were given to group by"),
    ],
)
def test_questions_without_an_answer_are_refused(call: Callable[[Scores], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call(featurized().score(TARGETS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 3}, "k=3 needs dense=False"),
        ({"k": 0, "dense": False}, "k must be an integer of at least 1"),
        ({"method": "none"}, "method must be a name of"),
        ({"method": {"name": "GradDot", "damping": 1.0}}, "Unknown fields of GradDot"),
        ({"method": GaussNewton(checkpoint_weights=[1, 2])}, "has 2 numbers, but 3 checkpoints"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_no_target_is_featurized(
    settings: Any, message: str
) -> None:
    made = featurized()

    with pytest.raises(InvalidInputError, match=message):
        made.score(TARGETS, name="test", **settings)
    with pytest.raises(StateError, match="no features of targets 'test'"):
        made.scores("test", dense=False)


def test_scores_that_were_never_made_are_asked_for_by_name() -> None:
    made = featurized()
    made.score(TARGETS, name="test")

    with pytest.raises(StateError, match=r"no scores 'test' made with GradDot\(q='inside'"):
        made.scores("test", method="GradDot")
    with pytest.raises(StateError, match=r"no features of targets 'other'; stored targets: \['test'\]"):
        made.scores("other", dense=False)
