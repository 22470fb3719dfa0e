"""Verdicts on scores: what is trained and kept, against dense NumPy; calibration, baselines, refusals."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from held_scores import held_scores, scores_without_a_model
from report_cases import VERDICT, Parsed, in_a_notebook
from tiny_runs import Merging, perceptron
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trak_lite import Attributor, Rows, Scores, calibrate, calibrated_scores, evaluation, token_scores, verify
from trak_lite.errors import InvalidInputError, ManifestMismatchError, RetrainingError, StateError
from trak_lite.methods import EKFAC, TRAK, Fisher, GaussNewton, GradDot
from trak_lite.modelout_functions import QuestionsModelOutput
from trak_lite.report import write_report
from trak_lite.store import open_store
from trak_lite.unrolled import SGD, Recipe, unrolled

N, M, K = 60, 12, 12
RESAMPLES = 100  # of conftest.py
QUIET = {"proj_dim": K, "dtype": "float32", "progress": False}


def dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    noise = torch.randn(count, 3, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] + noise).argmax(1))


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)


class Training:
    """Trains by a few steps of gradient descent, and counts its calls."""

    def __init__(self, model=None):
        self.calls, self.model = [], model

    def __call__(self, indices, seed):
        self.calls.append((indices.tolist(), seed))
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


def outputs_of(masks, seeds=(0,)):
    """Margins of the targets after trainings on subsets, (S, R, M)."""
    labels = TARGETS.tensors[1][:, None]

    def margins(mask, seed):
        logits = Training()(np.flatnonzero(mask), seed)(TARGETS.tensors[0]).detach()
        others = logits.scatter(1, labels, -torch.inf).logsumexp(1)
        return (logits.gather(1, labels)[:, 0] - others).double().numpy()

    return np.array([[margins(mask, seed) for seed in seeds] for mask in masks])


@pytest.fixture(scope="module")
def trained():
    return [Training()(np.arange(N), 0).state_dict(), perceptron().state_dict()]


def opened(path=None, **settings):
    settings = {**QUIET, "layout": "joint", "method": GaussNewton(damping=1.0), **settings}
    return Attributor(perceptron(), settings.pop("task", "image_classification"), path, **settings)


def scored(trained, path=None, **settings):
    made = opened(path, **settings)
    made.featurize(TRAIN, checkpoints=trained)
    made.score(TARGETS, "test")
    return made


@pytest.fixture(scope="module")
def scored_store(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("scored") / "a.zarr"
    scored(trained, path)
    return path


@pytest.fixture
def attributor(tmp_path, scored_store):
    shutil.copytree(scored_store, tmp_path / "a.zarr")
    return opened(tmp_path / "a.zarr")


@pytest.fixture(scope="module")
def held(trained):
    return scored(trained)


# ------------------------------------------------------------------------ verifying
def test_the_verdict_is_the_datamodeling_score_of_retrained_models(attributor, tmp_path, monkeypatch):
    """It stays with the scores, and so do predictions of some targets; both are on a report of the opened store."""
    monkeypatch.setattr("trak_lite.retraining.verify._KEPT_TARGETS", 4)
    training, scores = Training(), attributor.scores("test")
    assert scores.verdict is None
    verdict = verify(scores, training, TARGETS, budget=6, seeds=(0, 1), alpha=0.4, subset_seed=3)
    masks = evaluation.subset_masks(N, 6, alpha=0.4, seed=3)
    assert training.calls == [(np.flatnonzero(mask).tolist(), seed) for mask in masks for seed in (0, 1)]
    outputs = outputs_of(masks, (0, 1))
    mean = outputs.mean(axis=1)
    found = evaluation.linear_datamodeling_score(scores.numpy(), masks, mean, num_resamples=RESAMPLES)
    assert verdict.lds.mean == pytest.approx(found.mean, abs=1e-6)
    assert (verdict.lds.low, verdict.lds.high) == pytest.approx(found.interval, abs=1e-6)
    assert verdict.ceiling == pytest.approx(evaluation.seed_noise_ceiling(outputs).ceiling, abs=1e-6)
    assert (verdict.num_subsets, verdict.num_seeds, verdict.num_targets) == (6, 2, M)
    assert verdict.alpha == pytest.approx(0.4)
    opened = Attributor.open(tmp_path / "a.zarr", perceptron()).scores("test")
    assert opened.verdict == scores.verdict == verdict
    assert f"tested: LDS {verdict.lds} on 6 subsets x 2 seeds of 40% of the rows, {M} targets" in repr(opened)
    kept, some = opened.predictions, slice(None, None, 3)
    summed = evaluation.summed_scores(scores.numpy().astype(float), masks)
    np.testing.assert_allclose(kept.summed, summed[:, some], rtol=1e-5)
    np.testing.assert_allclose(kept.retrained, outputs.mean(axis=1)[:, some], rtol=1e-4, atol=1e-5)
    assert attributor.scores("test", dense=False).predictions is None
    page = Parsed(write_report(opened, tmp_path / "r.html"))
    assert len(page.all("use", fill="var(--high)", fill_opacity="0.45")) == 6 * 4
    for said in (f"LDS {verdict.lds}", f"stored in{opened.location}", "rows: projector"):
        assert said in page.text


def merging():
    return nn.Sequential(nn.Linear(4, 3), Merging(3))


@pytest.mark.parametrize("returned", ["train", "eval", "state"])
def test_retrained_models_that_merge_weights_in_eval_mode_have_their_own_outputs(returned):
    def train(indices, seed):
        torch.manual_seed(indices.sum())
        model = merging()
        return model.state_dict() if returned == "state" else model.train(returned == "train")

    attributor = Attributor(merging(), "image_classification", None, **QUIET)
    attributor.featurize(TRAIN)
    scores = attributor.score(TARGETS)
    verify(scores, train, TARGETS, budget=3)
    labels, expected = TARGETS.tensors[1][:, None], []
    for mask in evaluation.subset_masks(N, 3):
        torch.manual_seed(np.flatnonzero(mask).sum())
        logits = merging().double()(TARGETS.tensors[0].double()).detach()
        others = logits.scatter(1, labels, -torch.inf).logsumexp(1)
        expected.append((logits.gather(1, labels)[:, 0] - others).numpy())
    np.testing.assert_allclose(scores.predictions.retrained, expected, rtol=1e-4, atol=1e-5)


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


STEP = [0.5]


def train_with_a_step(rows, seed):
    """Depends on what its source does not show."""
    made = Training()(rows, seed)
    made[-1].bias.data += STEP[0] * torch.arange(len(made[-1].bias))
    return made


def test_more_subsets_and_seeds_train_what_is_new_and_compare_what_is_stored(attributor, monkeypatch):
    scores, calls = attributor.scores("test"), []

    def counted(rows, seed):
        calls.append((rows.tolist(), seed))
        return train_with_a_step(rows, seed)

    def verified(budget, *seeds):
        calls.clear()
        verdict = verify(scores, counted, TARGETS, budget=budget, seeds=seeds)
        masks = evaluation.subset_masks(N, budget)
        fresh = verify(
            scores, counted, TARGETS, budget=budget, seeds=seeds, train_id=f"{budget} {seeds} {STEP}"
        )
        assert (verdict.lds, verdict.baselines) == (fresh.lds, fresh.baselines)
        half = len(calls) - budget * len(seeds)
        assert calls[half:] == [(np.flatnonzero(mask).tolist(), seed) for mask in masks for seed in seeds]
        return half, verdict.compared

    assert verified(4, 0) == (4, "")
    trained, compared = verified(6, 0)
    assert trained == 2 + 1
    assert "Trained again, to compare: subset 0, seed 0" in compared
    assert verified(7, 0, 3)[0] == 7 + 1 + 1
    assert verified(8, 0, 3)[0] == 2 + 2, "the first and the second subset are repeated"
    monkeypatch.setitem(globals(), "STEP", [2.0])
    trained, compared = verified(9, 0)
    assert trained == 9 + 2, (
        "a model of each number of seeds is repeated, and those of another training are not used"
    )
    assert "All models are trained again." in compared


def test_a_larger_budget_that_was_killed_takes_what_a_smaller_one_has_trained_since(attributor):
    scores, calls = attributor.scores("test"), []

    def verified(budget, stops_at=10**6):
        calls.clear()

        def stopping(rows, seed):
            if len(calls) == stops_at:
                raise KeyboardInterrupt
            calls.append(seed)
            return train_with_a_step(rows, seed)

        return verify(scores, stopping, TARGETS, budget=budget, train_id="mine")

    with pytest.raises(KeyboardInterrupt):
        verified(8, stops_at=1)
    assert (verified(5).num_subsets, len(calls)) == (5, 5)
    assert (verified(8).num_subsets, len(calls)) == (8, 3)


def test_a_damaged_table_of_other_retrainings_is_not_in_the_way(attributor):
    scores = attributor.scores("test")
    verify(scores, train_with_a_step, TARGETS, budget=5, train_id="of last year")
    (damaged,) = Path(attributor.path).glob("retrains/test/*/zarr.json")
    damaged.write_text("{")
    assert verify(scores, train_with_a_step, TARGETS, budget=6, train_id="of today").num_subsets == 6


@pytest.mark.parametrize("featurized", [True, False])
def test_scores_of_a_fitted_curvature_are_verified(trained, featurized):
    """Of an attributor in memory."""
    attributor = scored(trained)
    name = "test" if featurized else "only-ekfac"
    scores = attributor.score(TARGETS, name, method="EKFAC")
    verdict = verify(scores, Training(), TARGETS, budget=4)
    masks = evaluation.subset_masks(N, 4)
    outputs = outputs_of(masks)[:, 0]
    found = evaluation.linear_datamodeling_score(scores.numpy(), masks, outputs, num_resamples=1)
    assert verdict.lds.mean == pytest.approx(found.mean, abs=1e-6)
    assert attributor.scores(name, method="EKFAC").verdict == verdict
    first = "gradient dot product, no kernel" if featurized else "loss of the train row (its q)"
    assert verdict.baselines[0].name == first


def test_a_constant_q_is_no_baseline(trained):
    """As of a task whose f is minus the loss; scores without features of targets have no other one."""

    def minus_loss(model_call, batch):
        return -nn.functional.cross_entropy(model_call(batch[0]), batch[1], reduction="none")

    made = scored(trained, task=minus_loss, method="GradDot")
    names = [one.name for one in verify(made.scores("test"), Training(), TARGETS, budget=3).baselines]
    assert names == ["gradient dot product, no kernel", "nearest in feature space (cosine)"]
    scores = made.score(TARGETS, "only-ekfac", method=EKFAC(fisher="empirical"))
    assert verify(scores, Training(), TARGETS, budget=3).baselines == ()


def test_a_training_may_use_the_attributed_model_itself_or_return_a_state_dict(attributor):
    """The model is given back as it was, and scores in memory may be verified."""

    def states(rows, seed):
        return Training()(rows, seed).state_dict()

    scores = attributor.scores("test")
    attributor.model.train()
    before = copy.deepcopy(dict(attributor.model.state_dict()))
    expected = verify(scores, Training(), TARGETS, budget=3)
    assert attributor.model.training
    torch.testing.assert_close(dict(attributor.model.state_dict()), before, rtol=0, atol=0)
    assert verify(scores, states, TARGETS, budget=np.int64(3), train_id="states") == expected
    itself = Training(model=attributor.model)
    assert verify(scores, itself, TARGETS, budget=3, train_id="itself") == expected
    assert len(itself.calls) == 3


@pytest.mark.parametrize(
    ("changes", "error", "seen"),
    [
        ({"budget": 1}, InvalidInputError, "budget must be an integer of at least 2, got 1"),
        ({"budget": 5, "calibrate": True}, InvalidInputError, "at least 6 with calibrate=True, got 5"),
        ({"budget": 10**20}, InvalidInputError, "and at most 1,000,000, got 100000000000000000000"),
        # None would be other subsets in every call, which never find their stored retrainings.
        *(
            ({"subset_seed": seed}, InvalidInputError, f"subset_seed must be .* at least 0, got {seed}")
            for seed in (None, -1, 1.5)
        ),
        ({"targets": dataset(M, 5)}, ManifestMismatchError, "targets.tensors"),
        ({"texts": (["a"], ["b"])}, InvalidInputError, f"60 train texts and {M} target texts, got 1 and 1"),
        ({"train_fn": lambda *_: nn.Linear(4, 3)}, RetrainingError, "0, seed 0 .* not fit Sequential"),
    ],
)
def test_what_cannot_be_verified_is_refused(attributor, changes, error, seen):
    training = Training()
    given = {"train_fn": training, "targets": TARGETS, "budget": 3, **changes}
    with pytest.raises(error, match=seen):
        verify(attributor.scores("test"), **given)
    assert training.calls == [] or "texts" in changes


def test_scores_without_a_stored_matrix_a_model_or_a_kernel_are_refused(attributor):
    training = Training()
    with pytest.raises(StateError, match="There are no scores 'other'"):
        verify(attributor.scores("other"), training, TARGETS)
    with pytest.raises(StateError, match=r"computed when they are read.*score\(\.\.\., dense=True\)"):
        verify(attributor.scores("test", dense=False), training, TARGETS)
    for scores, match in (
        (held_scores(np.ones((N, M))), "not computed from stored rows"),
        (scores_without_a_model(attributor, "test"), r"opened without a model.*Attributor\.open"),
    ):
        with pytest.raises(StateError, match=match):
            verify(scores, training, TARGETS)
        with pytest.raises(StateError, match=match):
            token_scores(scores, TRAIN, [0])
    plain = attributor.score(TARGETS, "test", method=GradDot())
    for call in (
        lambda: verify(plain, training, TARGETS, budget=10, calibrate=True),
        lambda: calibrate(plain, held_scores(np.ones((N, 6)))),
    ):
        with pytest.raises(InvalidInputError, match="Scores of GradDot have no kernel to calibrate"):
            call()
    assert training.calls == []


# ------------------------------------------------------------------------ baselines
def test_baselines_are_those_of_dense_features(attributor, monkeypatch):
    texts = [f"row {i % 5} {i % 3}" for i in range(N)], [f"{j % 5} {j}" for j in range(M)]
    ranked, cumsum = [], np.cumsum
    with monkeypatch.context() as patched:
        patched.setattr("numpy.cumsum", lambda *given, **more: ranked.append(1) or cumsum(*given, **more))
        verdict = verify(attributor.scores("test"), Training(), TARGETS, budget=8, texts=texts)
    assert 0 < len(ranked) <= 6 * (RESAMPLES + 3)  # outputs, scores and 4 baselines, once per resample
    masks = evaluation.subset_masks(N, 8)
    outputs = outputs_of(masks)[:, 0]
    with open_store(str(attributor.path)) as store:
        train, targets = (
            [store.open_table(f"{folder}ckpt-{c}").read("features").astype(float) for c in (0, 1)]
            for folder in ("", "targets/test/")
        )
        q = np.mean([store.open_table(f"ckpt-{c}").read("out_to_loss").astype(float) for c in (0, 1)], axis=0)

    def unit(rows):
        return rows / np.linalg.norm(rows, axis=1)[:, None]

    methods = [
        sum(rows @ t.T for rows, t in zip(train, targets, strict=True)) * q[:, None],
        sum(unit(rows) @ unit(t).T for rows, t in zip(train, targets, strict=True)),
        np.tile(q[:, None], M),
        evaluation.bm25(*texts),
    ]
    scores = attributor.scores("test").numpy()
    assert [one.name[:4] for one in verdict.baselines] == ["grad", "near", "loss", "BM25"]
    for one, method in zip(verdict.baselines, methods, strict=True):
        own = evaluation.linear_datamodeling_score(method, masks, outputs, num_resamples=1)
        assert one.lds.mean == pytest.approx(own.mean, abs=1e-6)
        lead = evaluation.compare_datamodeling_scores(scores, method, masks, outputs, num_resamples=RESAMPLES)
        assert (one.lead.mean, one.lead.low) == pytest.approx((lead.mean, lead.interval[0]), abs=1e-6)


# ------------------------------------------------------------------------ calibration
OTHER_KERNELS = [
    GaussNewton(damping=0.1, q="inside"),
    GaussNewton(damping=10.0, q="off"),
    GaussNewton(damping=0.1, q="off", checkpoint_weights=(1, 0)),
]


@pytest.mark.parametrize("method", OTHER_KERNELS)
def test_another_kernel_is_found_again(held, method):
    """By a teacher of some targets, for all of them."""
    truth = held.score(TARGETS, "test", method=method).numpy()
    scores, columns = held.scores("test"), np.arange(2, 10)
    found = calibrate(scores, held_scores(truth[:, columns]), columns)
    assert found.kept
    assert found.gain.low > 0
    assert (found.across, found.num_held_out) == ("targets", 4)
    assert "held-out targets" in str(found)
    better = calibrated_scores(scores, found)
    assert isinstance(better, Scores)
    assert (better.name, better.method, better.task) == (scores.name, scores.method, scores.task)
    assert better.settings["calibrated_on"] == "4 held-out targets"
    np.testing.assert_array_equal(better.top(2).indices[0], np.argsort(-better.numpy()[:, 0])[:2])
    for target in range(M):
        assert np.corrcoef(better.numpy()[:, target], truth[:, target])[0, 1] > 0.98


@pytest.mark.quick
def test_a_teacher_of_noise_teaches_nothing_and_one_of_another_size_is_refused(held):
    scores = held.scores("test")
    found = calibrate(scores, held_scores(np.random.default_rng(0).normal(size=(N, M))))
    assert not found.kept
    with pytest.raises(StateError, match="not significantly better"):
        calibrated_scores(scores, found)
    wrong = [((N, 6), [0, 1, 2, 3, 4, 4]), ((N, 6), [0, 1])]
    wrong += [(shape, None) for shape in ((N - 1, M), (N, 3), (N, M + 1))]
    for shape, targets in wrong:
        with pytest.raises(InvalidInputError, match="The teacher must have the 60 train rows"):
            calibrate(scores, held_scores(np.ones(shape)), targets)


def first_logit(model_call, batch):
    return model_call(batch[0])[:, 0]


def teacher_of(train, targets, task="image_classification", dtype=None):
    """Scores of a replay of three steps."""

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    recipe = Recipe(lambda seed: perceptron().to(dtype), loss, train, SGD(lr=0.05), batch_size=N, epochs=3)
    return unrolled(recipe.train(), targets, task, progress=False)


LAST, LISTED = range(6, M), [*TARGETS]
TURNED_TWICE = Rows(TensorDataset(*[part.flip(0) for part in TRAIN.tensors]), indices=range(N)[::-1])


@pytest.mark.parametrize(
    ("train", "targets", "task", "columns", "message"),
    [
        (Rows(TRAIN, indices=range(N)[::-1]), TARGETS, "image_classification", None, "other train rows"),
        (dataset(N, 5), TARGETS, "image_classification", None, "other train rows"),
        (TRAIN, TARGETS, first_logit, None, r"another task \(.*\) than the scores \(image_classification\)"),
        (TRAIN, dataset(M, 6), "image_classification", None, "other targets"),
        (TRAIN, Rows(TARGETS, indices=range(M)[::-1]), "image_classification", None, "other targets"),
        (TRAIN, Rows(TARGETS, indices=LAST), "image_classification", None, r"columns \[0, 1, 2, 3, 4, 5\]"),
        (TRAIN, Rows(TARGETS, indices=LAST), "image_classification", LAST, None),
        (TRAIN, Rows(TARGETS, indices=range(M)[::-1]), "image_classification", range(M)[::-1], None),
        (TRAIN, TensorDataset(*TARGETS[6:]), "image_classification", LAST, None),
        (Subset(TRAIN, range(N)), LISTED, "image_classification", None, None),
        (TURNED_TWICE, TARGETS, "image_classification", None, None),
        (Rows(TRAIN, name="train"), Rows(TARGETS, name="targets"), "image_classification", None, None),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The training has metasmoothness")
def test_a_teacher_of_other_rows_targets_or_task_is_refused(held, train, targets, task, columns, message):
    """The same rows in another data set are not."""
    scores, teacher = held.scores("test"), teacher_of(train, targets, task)
    if message is None:
        assert calibrate(scores, teacher, columns).num_held_out == teacher.shape[1] // 2
    else:
        with pytest.raises(InvalidInputError, match=message):
            calibrate(scores, teacher, columns)


@pytest.mark.filterwarnings("ignore:The training has metasmoothness")
def test_a_teacher_may_be_trained_in_another_dtype(held):
    pairs = TRAIN.tensors, TARGETS.tensors
    teacher = teacher_of(*(TensorDataset(x.double(), y) for x, y in pairs), dtype=torch.float64)
    assert calibrate(held.scores("test"), teacher).num_held_out == M // 2


@pytest.mark.filterwarnings("ignore:The training has metasmoothness")
def test_a_teacher_may_be_asked_a_question_in_another_way(trained):
    """A question of the scores is a task of the replay, whose samples are the same."""
    task = QuestionsModelOutput("image_classification", {"first": first_logit})
    made, teacher = opened(task=task), teacher_of([*TRAIN], LISTED, first_logit)
    made.featurize([*TRAIN], checkpoints=trained)
    for scores in (
        made.score(task.ask("first", LISTED), "asked"),
        made.score(LISTED, "given", task=first_logit),
    ):
        assert calibrate(scores, teacher).num_held_out == M // 2


@pytest.mark.parametrize(
    "method", [GaussNewton(damping=1.0), GaussNewton(damping=1.0, q="inside"), Fisher(damping=1.0)]
)
def test_weights_of_the_default_kernel_give_the_scores_themselves(held, method):
    scores = held.score(TARGETS, "test", method=method)
    calibration = calibrate(scores, held_scores(scores.numpy()))
    assert not calibration.kept, "it is right already"
    assert calibration.dampings == (0.1, 1.0, 10.0)
    weights = np.zeros((len(calibration.views), 2, len(calibration.segments), len(calibration.dampings)))
    weights[calibration.views.index(method.q), :, :, calibration.dampings.index(1.0)] = 0.5
    given = replace(calibration, kept=True, weights=tuple(weights.reshape(-1).tolist()))
    found = calibrated_scores(scores, given)
    np.testing.assert_allclose(found.numpy(), scores.numpy(), rtol=1e-3, atol=1e-4)


def test_modules_get_weights_of_their_own_unless_they_are_too_many(trained, monkeypatch):
    made = scored(trained, proj_dim=6, layout="module", method=GaussNewton(damping=0.5))
    scores = made.scores("test")
    single = calibrate(scores, held_scores(scores.numpy()))
    assert single.dampings == (0.1, 0.5, 1.0, 10.0), "its own is among those tried"
    assert list(single.segments) == [(segment.start, segment.stop) for segment in made.layout.segments]
    assert len(single.weights) == 3 * 2 * len(made.layout.segments) * 4
    monkeypatch.setattr("trak_lite.retraining.calibrated._MOST_PARTS", 3 * 2 * 2 * 4 - 1)
    shared = calibrate(scores, held_scores(scores.numpy()))
    assert shared.segments == ((0, made.layout.width),)
    assert len(shared.weights) == 3 * 2 * 4


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_calibration_is_fitted_to_half_of_the_subsets_and_tested_on_the_others(tmp_path, trained, dtype):
    """The default kernel is a poor one, of the first steps alone: a better one is found, kept and stored."""
    poor = GaussNewton(damping=1e-4, checkpoint_weights=(0, 1))
    made = scored(trained, tmp_path / "a.zarr", method=poor, dtype=dtype)
    scores = made.scores("test")
    with pytest.raises(StateError, match="were not calibrated"):
        calibrated_scores(scores)
    verdict = verify(scores, Training(), TARGETS, budget=60, calibrate=True)
    masks = evaluation.subset_masks(N, 60)
    held_out, outputs = masks[1::2], outputs_of(masks[1::2])[:, 0]
    found = verdict.calibration
    assert (found.kept, found.num_held_out, found.across) == (True, 30, "subsets")
    assert found.gain.low > 0
    better = calibrated_scores(made.scores("test"))
    for one, matrix in ((found.default, scores.numpy()), (found.calibrated, better.numpy())):
        summed = evaluation.summed_scores(matrix, held_out)
        lds = evaluation.linear_datamodeling_score(summed, None, outputs, num_resamples=RESAMPLES)
        assert one.mean == pytest.approx(lds.mean, abs=1e-3)
    assert found.calibrated.mean > found.default.mean + 0.05
    assert better.shape == (N, M)
    assert evaluation.Verdict.from_json(verdict.to_json()) == verdict
    assert "calibrated kernel kept: gain" in str(made.scores("test"))


def test_a_calibration_that_is_not_better_is_not_stored(attributor):
    scores = attributor.scores("test")
    verdict = verify(scores, Training(), TARGETS, budget=6, calibrate=True)
    assert not verdict.calibration.kept
    with pytest.raises(StateError, match=r"was not significantly better .*, so it was not stored"):
        calibrated_scores(scores)


def test_a_verdict_says_in_a_sentence_what_follows():
    estimate, (baseline,) = type(VERDICT.lds), VERDICT.baselines

    def verdict(lds, *leads):
        named = ((f"baseline {k}", estimate(*lead)) for k, lead in enumerate(leads))
        baselines = (replace(baseline, name=name, lead=lead) for name, lead in named)
        return replace(VERDICT, lds=estimate(*lds), baselines=tuple(baselines))

    ahead, level, behind = (0.2, 0.1, 0.3), (0.1, -0.1, 0.3), (-0.2, -0.3, -0.1)
    said = {
        "No proven relation to retraining: do not act": verdict((0.1, -0.1, 0.3), ahead),
        "predict retraining better than every baseline: act on sets of rows": verdict((0.5, 0.4, 0.6), ahead, ahead),
        "predict retraining: act on sets of rows": verdict((0.5, 0.4, 0.6)),
        "without a proven lead over baseline 1: use more subsets": verdict((0.5, 0.4, 0.6), ahead, level),
        "but baseline 1 does so better: use it": verdict((0.5, 0.4, 0.6), level, behind),
        "Nothing follows from 4 subsets, whose order can be right by chance: do not act on these scores. Use at "
        "least 5 subsets, better 10 (budget=).": replace(verdict((0.5, 0.4, 0.6)), num_subsets=4),
    }  # fmt: skip
    for text, found in said.items():
        assert text in found.conclusion
        assert str(found).endswith(found.conclusion)
        assert found.conclusion in in_a_notebook(found).text
