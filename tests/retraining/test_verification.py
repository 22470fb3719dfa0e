"""Verdicts on scores: what is trained and kept, against dense NumPy; calibration, baselines, refusals."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_runs import perceptron
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, calibrated_scores, token_scores, verify
from trak_lite.errors import InvalidInputError, ManifestMismatchError, RetrainingError, StateError
from trak_lite.evaluation import (
    Verdict,
    bm25,
    compare_datamodeling_scores,
    linear_datamodeling_score,
    seed_noise_ceiling,
    subset_masks,
)
from trak_lite.methods import TRAK, Fisher, GaussNewton, GradDot
from trak_lite.retraining import Retrained, calibrated
from trak_lite.retraining.calibrated import VIEWS, SubsetSums, calibrated_matrix
from trak_lite.retraining.verify import evaluate
from trak_lite.run.settings import StoredSettings
from trak_lite.run.tables import complete_tables
from trak_lite.scoring.stored import ScoredRows, store_verdict, stored_scores
from trak_lite.store import ZarrFeatureStore

N, M, K = 60, 7, 12
RESAMPLES = 100


def dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    noise = torch.randn(count, 3, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] + noise).argmax(1))


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)


class Training:
    """Trains by a few steps of gradient descent, counts its calls and stops on request."""

    def __init__(self, fail_at=None, model=None, error=KeyboardInterrupt):
        self.calls, self.fail_at, self.model, self.error = [], fail_at, model, error

    def __call__(self, indices, seed):
        if len(self.calls) == self.fail_at:
            raise self.error("no luck")
        self.calls.append((indices, seed))
        model = perceptron() if self.model is None else self.model
        model.load_state_dict(perceptron().state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * seed)
        for _ in range(8):
            inputs, labels = TRAIN[indices]
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.5 * p.grad
        return model


def outputs_of(model):
    with torch.no_grad():
        logits = model(TARGETS.tensors[0])
        others = logits.scatter(1, TARGETS.tensors[1][:, None], -torch.inf)
        chosen = logits.gather(1, TARGETS.tensors[1][:, None])[:, 0]
        return (chosen - others.logsumexp(1)).double().numpy()


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(calibrated, "_NUM_RESAMPLES", RESAMPLES)


@pytest.fixture(scope="module")
def trained():
    whole = Training()(np.arange(N), 0)
    return [whole.state_dict(), perceptron().state_dict()]


@pytest.fixture
def attributor(tmp_path, trained):
    made = Attributor(
        perceptron(),
        "image_classification",
        tmp_path / "a.zarr",
        proj_dim=K,
        dtype="float32",
        layout="joint",
        method=GaussNewton(damping=1.0),
        progress=False,
    )
    made.featurize(TRAIN, checkpoints=trained)
    made.score(TARGETS, "test")
    return made


def rows_of(attributor, store, method=None):
    method = attributor.method if method is None else method
    digests = store.open_table("scores/test").spec.fingerprint["checkpoints"]
    return ScoredRows(
        store=store,
        train=complete_tables(store, digests),
        name="test",
        method=method,
        layout=attributor.layout,
        device=torch.device("cpu"),
    )


def dense_features(store):
    pairs = [(store.open_table(f"ckpt-{c}"), store.open_table(f"targets/test/ckpt-{c}")) for c in (0, 1)]
    return [
        (
            table.read("features").astype(float),
            table.read("out_to_loss").astype(float),
            other.read("features"),
        )
        for table, other in pairs
    ]


# ------------------------------------------------------------------------ verifying


def test_the_verdict_is_the_datamodeling_score_of_retrained_models(attributor):
    training = Training()
    scores = attributor.scores("test")
    verdict = verify(scores, training, TARGETS, budget=6, seeds=(0, 1), alpha=0.4, subset_seed=3)

    masks = subset_masks(N, 6, alpha=0.4, seed=3)
    expected = [(np.flatnonzero(mask).tolist(), seed) for mask in masks for seed in (0, 1)]
    assert [(indices.tolist(), seed) for indices, seed in training.calls] == expected
    outputs = np.array([[outputs_of(Training()(np.flatnonzero(m), s)) for s in (0, 1)] for m in masks])
    found = linear_datamodeling_score(
        attributor.scores("test").numpy(), masks, outputs.mean(axis=1), num_resamples=RESAMPLES
    )
    assert verdict.lds.mean == pytest.approx(found.mean, abs=1e-6)
    assert (verdict.lds.low, verdict.lds.high) == pytest.approx(found.interval, abs=1e-6)
    assert verdict.ceiling == pytest.approx(seed_noise_ceiling(outputs).ceiling, abs=1e-6)
    assert (verdict.num_subsets, verdict.num_seeds, verdict.num_targets) == (6, 2, M)
    assert verdict.alpha == pytest.approx(0.4)


def test_the_verdict_stays_with_the_scores_and_is_printed_with_them(attributor, tmp_path):
    before = attributor.scores("test")
    assert before.verdict is None
    assert "tested" not in repr(before)

    verdict = verify(attributor.scores("test"), Training(), TARGETS, budget=3)

    opened = Attributor.open(tmp_path / "a.zarr", perceptron()).scores("test")
    assert opened.verdict == before.verdict == verdict
    assert f"tested: LDS {verdict.lds} on 3 subsets x 1 seeds of 50% of the rows, 7 targets" in repr(opened)
    assert f"gradient dot product, no kernel: LDS {verdict.baselines[0].lds}" in repr(opened)


def test_other_scores_of_the_same_targets_have_no_verdict_and_need_no_training(attributor):
    verify(attributor.scores("test"), Training(), TARGETS, budget=3)
    method = TRAK(damping=0.1, layout="stored")
    scores = attributor.score(TARGETS, "test", method=method)
    again = Training()

    assert attributor.scores("test", method=method).verdict is None
    verdict = verify(scores, again, TARGETS, budget=3)
    assert len(again.calls) == 1, "a stored one is repeated"
    assert attributor.scores("test", method=method).verdict == scores.verdict == verdict
    assert attributor.scores("test").verdict != verdict


@pytest.mark.parametrize("featurized", [True, False])
def test_scores_of_a_fitted_curvature_are_verified(attributor, featurized):
    name = "test" if featurized else "only-ekfac"
    scores = attributor.score(TARGETS, name, method="EKFAC")

    verdict = verify(scores, Training(), TARGETS, budget=4)

    masks = subset_masks(N, 4, alpha=0.5, seed=0)
    outputs = np.array([outputs_of(Training()(np.flatnonzero(mask), 0)) for mask in masks])
    found = linear_datamodeling_score(scores.numpy(), masks, outputs, num_resamples=RESAMPLES)
    assert verdict.lds.mean == pytest.approx(found.mean, abs=1e-6)
    assert attributor.scores(name, method="EKFAC").verdict == verdict
    assert [baseline.name for baseline in verdict.baselines][:1] == (
        ["gradient dot product, no kernel"] if featurized else ["loss of the train row (its q)"]
    )


def test_after_a_kill_only_what_is_missing_is_trained(attributor):
    with pytest.raises(KeyboardInterrupt):
        verify(attributor.scores("test"), Training(2), TARGETS, budget=3)
    rest = Training()

    verify(attributor.scores("test"), rest, TARGETS, budget=3)

    assert (
        len(rest.calls) == 1 + 1
    )  # the first one is repeated: is it the same training, but for its fail_at?


def test_scores_in_memory_can_be_verified(trained):
    made = Attributor(perceptron(), "image_classification", None, proj_dim=K, progress=False)
    made.featurize(TRAIN, checkpoints=trained)
    scores = made.score(TARGETS, "test")

    assert verify(scores, Training(), TARGETS, budget=3) == scores.verdict == made.scores("test").verdict


def test_a_training_may_use_the_attributed_model_itself_or_return_a_state_dict(attributor):
    class States(Training):
        def __call__(self, indices, seed):
            return super().__call__(indices, seed).state_dict()

    scores = attributor.scores("test")
    expected = verify(scores, Training(), TARGETS, budget=3)
    assert verify(scores, States(), TARGETS, budget=3, train_id="states") == expected
    itself = Training(model=attributor.model)
    assert verify(scores, itself, TARGETS, budget=3, train_id="itself") == expected
    assert len(itself.calls) == 3


def test_the_model_is_given_back_as_it_was(attributor):
    attributor.model.train()
    before = copy.deepcopy(attributor.model.state_dict())

    verify(attributor.scores("test"), Training(), TARGETS, budget=2)

    assert attributor.model.training
    for name, value in attributor.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_training_that_fails_names_its_subset(attributor):
    with pytest.raises(RetrainingError, match="subset 1, seed 0"):
        verify(attributor.scores("test"), Training(1, error=ValueError), TARGETS, budget=2)


def test_weights_of_another_architecture_are_refused(attributor):
    with pytest.raises(RetrainingError, match=r"subset 0, seed 0 .*does not fit Sequential"):
        verify(attributor.scores("test"), lambda rows, seed: nn.Linear(4, 3), TARGETS, budget=2)


@pytest.mark.parametrize(
    ("changes", "error", "seen"),
    [
        ({"budget": 1}, InvalidInputError, "budget must be an integer of at least 2, got 1"),
        ({"budget": 5, "calibrate": True}, InvalidInputError, "at least 6 with calibrate=True, got 5"),
        ({"targets": dataset(M, 5)}, ManifestMismatchError, "targets.tensors"),
        ({"texts": (["a"], ["b"])}, InvalidInputError, "60 train texts and 7 target texts, got 1 and 1"),
    ],
)
def test_what_cannot_be_verified_is_refused(attributor, changes, error, seen):
    training = Training()
    given = {"train_fn": training, "targets": TARGETS, "budget": 3, **changes}

    with pytest.raises(error, match=seen):
        verify(attributor.scores("test"), **given)
    assert training.calls == [] or "texts" in changes


def test_scores_without_a_stored_matrix_a_model_or_a_name_in_the_store_are_refused(attributor):
    training = Training()
    with pytest.raises(StateError, match="There are no scores 'other'"):
        verify(attributor.scores("other"), training, TARGETS)
    with pytest.raises(StateError, match=r"computed when they are read.*score\(\.\.\., dense=True\)"):
        verify(attributor.scores("test", dense=False), training, TARGETS)
    settings = StoredSettings(attributor.layout, attributor.method, torch.device("cpu"))
    without_a_model = stored_scores(attributor._workspace, settings, "test", attributor.method)
    with pytest.raises(StateError, match=r"opened without a model.*Attributor\.open"):
        verify(without_a_model, training, TARGETS)
    with pytest.raises(StateError, match=r"opened without a model.*Attributor\.open"):
        token_scores(without_a_model, TRAIN, [0])
    assert training.calls == []


def test_scores_without_a_kernel_are_verified_but_not_calibrated(attributor):
    scores = attributor.score(TARGETS, "test", method=GradDot())
    verify(scores, Training(), TARGETS, budget=6)
    training = Training()

    with pytest.raises(InvalidInputError, match="Scores of GradDot have no kernel to calibrate"):
        verify(scores, training, TARGETS, budget=6, calibrate=True)
    assert training.calls == []


def test_quantised_rows_are_verified_as_the_scores_read_them(tmp_path, trained):
    verdicts = []
    for dtype in ("float32", "int8"):
        made = Attributor(
            perceptron(),
            "image_classification",
            tmp_path / dtype,
            proj_dim=K,
            dtype=dtype,
            progress=False,
        )
        made.featurize(TRAIN, checkpoints=trained)
        scores = made.score(TARGETS, "test")
        verdicts.append(verify(scores, Training(), TARGETS, budget=6, calibrate=True))

    for one, other in zip(verdicts[0].baselines, verdicts[1].baselines, strict=True):
        assert one.lds.mean == pytest.approx(other.lds.mean, abs=0.1)
    assert verdicts[0].lds.mean == pytest.approx(verdicts[1].lds.mean, abs=0.1)


# ------------------------------------------------------------------------ baselines


def test_baselines_are_those_of_dense_features(attributor):
    texts = [f"row {i % 5} {i % 3}" for i in range(N)], [f"{j % 5} {j}" for j in range(M)]
    verdict = verify(attributor.scores("test"), Training(), TARGETS, budget=8, texts=texts)

    masks = subset_masks(N, 8)
    outputs = np.array([outputs_of(Training()(np.flatnonzero(mask), 0)) for mask in masks])
    with ZarrFeatureStore.open(attributor.path) as store:
        dense = dense_features(store)
    q = np.mean([q for _, q, _ in dense], axis=0)
    cosine = [
        (rows / np.linalg.norm(rows, axis=1)[:, None]) @ (t / np.linalg.norm(t, axis=1)[:, None]).T
        for rows, _, t in dense
    ]
    methods = [
        sum(rows @ t.T for rows, _, t in dense) * q[:, None],
        sum(cosine),
        np.tile(q[:, None], M),
        bm25(*texts),
    ]
    scores = attributor.scores("test").numpy()
    assert [one.name[:4] for one in verdict.baselines] == ["grad", "near", "loss", "BM25"]
    for one, method in zip(verdict.baselines, methods, strict=True):
        assert one.lds.mean == pytest.approx(linear_datamodeling_score(method, masks, outputs).mean, abs=1e-6)
        lead = compare_datamodeling_scores(scores, method, masks, outputs, num_resamples=RESAMPLES)
        assert (one.lead.mean, one.lead.low) == pytest.approx((lead.mean, lead.interval[0]), abs=1e-6)


@pytest.mark.parametrize("q", VIEWS)
def test_sums_over_subsets_predict_what_summed_scores_predict(attributor, q):
    masks = subset_masks(N, 5)
    method = GaussNewton(damping=1.0, q=q)
    scores = attributor.score(TARGETS, "test", method=method).numpy()
    with ZarrFeatureStore.open(attributor.path) as store:
        rows = rows_of(attributor, store, method)
        targets = [rows.preconditioned(table, 1.0) / 2 for table in rows.train.values()]

        predicted = SubsetSums(rows, masks).predict(targets, q)

    np.testing.assert_allclose(predicted, masks @ scores.astype(float), rtol=1e-3, atol=1e-4)


def test_a_fitted_kernel_predicts_and_is_calibrated_like_one_of_the_rows(attributor):
    method = Fisher(damping=1.0)
    scores = attributor.score(TARGETS, "test", method=method).numpy()
    with ZarrFeatureStore.open(attributor.path) as store:
        rows = rows_of(attributor, store, method)
        targets = [rows.preconditioned(table, 1.0) / 2 for table in rows.train.values()]

        predicted = SubsetSums(rows, masks := subset_masks(N, 5)).predict(targets, "outside")

    np.testing.assert_allclose(predicted, masks @ scores.astype(float), rtol=1e-3, atol=1e-4)
    retrained = synthetic(scores, 8, 0.5)
    assert judged(attributor, retrained, method)[0].calibration.dampings == (0.1, 1.0, 10.0)


# ------------------------------------------------------------------------ calibration


def synthetic(scores, num_subsets, noise, seed=0):
    """Outputs of retrainings as if ``scores`` were exact up to noise."""
    masks = subset_masks(N, num_subsets, seed=seed)
    clean = masks @ scores.astype(float)
    clean = clean / clean.std(axis=0)
    outputs = clean + noise * np.random.default_rng(seed).normal(size=clean.shape)
    return Retrained(outputs[:, None].astype(np.float32), masks, (0,))


def judged(attributor, retrained, method=None):
    with ZarrFeatureStore.open(attributor.path) as store:
        rows = rows_of(attributor, store, method)
        scores = attributor.scores("test", method=method)
        verdict = evaluate(scores, rows, retrained, calibrate=True, texts=None, confidence=0.95)
        calibration = verdict.calibration
        return verdict, calibrated_matrix(rows, calibration) if calibration.kept else None


def test_a_better_kernel_is_found_and_kept_after_its_test(attributor):
    method = GaussNewton(q="off", damping=0.1, checkpoint_weights=(1, 0))
    best = attributor.score(TARGETS, "test", method=method).numpy()
    retrained = synthetic(best, 60, 0.3)

    verdict, scores = judged(attributor, retrained)

    held_out = np.arange(1, 60, 2)
    masks, outputs = retrained.masks[held_out], retrained.mean[held_out]
    found = verdict.calibration
    assert found.kept
    assert found.num_held_out == 30
    assert found.gain.low > 0
    assert found.calibrated.mean > found.default.mean + 0.05
    default = attributor.scores("test").numpy()
    again = [linear_datamodeling_score(s, masks, outputs).mean for s in (default, scores)]
    assert (found.default.mean, found.calibrated.mean) == pytest.approx(again, abs=1e-3)


def test_a_kernel_that_is_right_already_stays(attributor):
    verdict, _ = judged(attributor, synthetic(attributor.scores("test").numpy(), 30, 2.0))

    assert not verdict.calibration.kept
    assert verdict.calibration.gain.low <= 0


def test_weights_of_the_default_kernel_give_the_scores_themselves(attributor):
    retrained = synthetic(attributor.scores("test").numpy(), 8, 0.5)
    with ZarrFeatureStore.open(attributor.path) as store:
        rows = rows_of(attributor, store)
        calibration = judged(attributor, retrained)[0].calibration
        shape = (len(calibration.views), 2, len(calibration.segments), len(calibration.dampings))
        weights = np.zeros(shape)
        weights[calibration.views.index("outside"), :, :, calibration.dampings.index(1.0)] = 0.5
        given = replace(calibration, kept=True, weights=tuple(weights.reshape(-1).tolist()))

        found = calibrated_matrix(rows, given)

    np.testing.assert_allclose(found, attributor.scores("test").numpy(), rtol=1e-3, atol=1e-4)


def test_modules_get_weights_of_their_own_unless_they_are_too_many(tmp_path, trained, monkeypatch):
    made = Attributor(
        perceptron(),
        "image_classification",
        tmp_path / "m.zarr",
        proj_dim=6,
        layout="module",
        method=GaussNewton(damping=1.0),
        progress=False,
    )
    made.featurize(TRAIN, checkpoints=trained)
    retrained = synthetic(made.score(TARGETS, "test").numpy(), 8, 0.5)
    segments = [(segment.start, segment.stop) for segment in made.layout.segments]

    single = judged(made, retrained)[0].calibration
    assert list(single.segments) == segments
    assert len(single.weights) == 3 * 2 * len(segments) * 3

    monkeypatch.setattr(calibrated, "_MOST_PARTS", 20)
    shared = judged(made, retrained)[0].calibration
    assert shared.segments == ((0, made.layout.width),)
    assert len(shared.weights) == 3 * 2 * 3


def test_a_damping_of_ones_own_is_among_those_tried(tmp_path, trained):
    made = Attributor(
        perceptron(),
        "image_classification",
        tmp_path / "d.zarr",
        proj_dim=K,
        method=GaussNewton(damping=0.5),
        progress=False,
    )
    made.featurize(TRAIN, checkpoints=trained)
    scores = made.score(TARGETS, "test")

    verdict = verify(scores, Training(), TARGETS, budget=6, calibrate=True)

    assert verdict.calibration.dampings == (0.1, 0.5, 1.0, 10.0)


def test_calibrated_scores_are_those_of_the_kept_verdict_or_refused(attributor):
    scores = attributor.scores("test")
    with pytest.raises(StateError, match="were not calibrated"):
        calibrated_scores(scores)
    verdict = verify(scores, Training(), TARGETS, budget=6, calibrate=True)
    assert Verdict.from_json(verdict.to_json()) == verdict
    kept = replace(verdict, calibration=replace(verdict.calibration, kept=True))
    refused = replace(kept, calibration=replace(verdict.calibration, kept=False))
    with ZarrFeatureStore.open(attributor.path, "r+") as store:
        store_verdict(store, "scores/test", refused)
        with pytest.raises(StateError, match=r"was not significantly better .*, so it was not stored"):
            calibrated_scores(scores)
        store_verdict(store, "scores/test", kept)
        expected = calibrated_matrix(rows_of(attributor, store), kept.calibration)

    np.testing.assert_array_equal(calibrated_scores(attributor.scores("test")), expected)
    assert expected.shape == (N, M)
    assert "calibrated kernel kept: gain" in str(attributor.scores("test"))
