"""Scores split over tokens, against one backward pass per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows, token_scores
from trak_lite.errors import InvalidInputError, ManifestMismatchError
from trak_lite.methods import TRAK, AbstractMethod, Fisher, GradDot, TracIn
from trak_lite.modelout_functions import CausalLanguageModelingModelOutput, QuestionsModelOutput

VOCABULARY, LENGTH, N, M = 7, 6, 5, 3


class LanguageModel(nn.Module):
    """Says the next token from the mean of those before."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        counts = torch.arange(1, input_ids.shape[1] + 1).view(1, -1, 1)
        return self.head(torch.tanh(self.embedding(input_ids).cumsum(1) / counts))


def tokens(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 2] = -100
    labels[0, 4:] = -100
    return TensorDataset(ids, labels)


TRAIN, TARGETS = tokens(N, 0), tokens(M, 1)
WEIGHTS = [LanguageModel(seed).state_dict() for seed in (0, 1)]


def attributor(**settings: Any) -> Attributor:
    given = {"proj_dim": 64, "dtype": "float32", "task": "causal_language_modeling", **settings}
    made = Attributor(LanguageModel(), path=None, **given)
    made.featurize(Rows(TRAIN, batch_size=4), checkpoints=WEIGHTS)
    return made


@pytest.fixture(scope="module")
def plain() -> Attributor:
    """Featurized once: scores of every view are kept beside each other, and no test changes its rows."""
    return attributor()


def token_gradient(model: nn.Module, ids: Tensor, label: int, position: int) -> np.ndarray:
    """Return the gradient of log p of one label."""
    p = model(ids[None])[0, position - 1].double().softmax(0)[label]
    grads = torch.autograd.grad(torch.log(p), list(model.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads]).double().numpy()


def gradients(model: nn.Module, data: TensorDataset, row: int) -> np.ndarray:
    """Return the gradient of every token of a row, ``(T, P)``; zero where nothing is predicted."""
    ids, labels = data[row]
    size = sum(p.numel() for p in model.parameters())
    out = np.zeros((LENGTH, size))
    for position in range(1, LENGTH):
        if labels[position] != -100:
            out[position] = token_gradient(model, ids, int(labels[position]), position)
    return out


def test_tokens_add_the_product_of_their_own_gradient_with_the_target() -> None:
    made = attributor(projector="none", proj_dim=63)
    scores = made.score(TARGETS, method=GradDot(q="off"))

    found = token_scores(scores, Rows(TRAIN, batch_size=2), [3, 0])

    expected = {row: np.zeros((LENGTH, M)) for row in (0, 3)}
    for weights in WEIGHTS:
        model = LanguageModel()
        model.load_state_dict(weights)
        targets = np.stack([gradients(model, TARGETS, target).sum(0) for target in range(M)])
        for row in expected:
            expected[row] += gradients(model, TRAIN, row) @ targets.T / len(WEIGHTS)
    assert list(found) == [0, 3]
    for row, values in found.items():
        np.testing.assert_allclose(values, expected[row], rtol=1e-4, atol=1e-6)
        assert not values[[0, 2]].any()


@pytest.mark.parametrize(
    "method",
    [
        None,
        Fisher(q="outside"),
        TRAK(damping=0.1, layout="stored"),
        Fisher(checkpoint_weights=(1.0, -0.5), q="off"),
        TracIn(learning_rates=(0.5, 0.1)),
    ],
    ids=str,
)
def test_tokens_add_up_to_the_score_of_their_row(plain: Attributor, method: AbstractMethod | None) -> None:
    scores = plain.score(TARGETS, method=method)

    found = token_scores(scores, TRAIN, range(N))

    summed = np.stack([found[row].sum(0) for row in range(N)])
    np.testing.assert_allclose(summed, scores.numpy(), rtol=1e-3, atol=1e-5 * np.abs(scores.numpy()).max())


def test_curvature_of_layers_splits_over_tokens_too(plain: Attributor) -> None:
    scores = plain.score(TARGETS, method="EKFAC")

    found = token_scores(scores, TRAIN, [1], targets=[2, -3])

    np.testing.assert_allclose(found[1].sum(0), scores.numpy()[1, [2, 0]], rtol=1e-3)


def test_labels_that_are_not_shifted_keep_their_place() -> None:
    task = CausalLanguageModelingModelOutput(shift=False)
    made = attributor(task=task)
    scores = made.score(TARGETS)

    found = token_scores(scores, TRAIN, [1])[1]

    assert np.flatnonzero(found.any(1)).tolist() == [0, 1, 3, 4, 5]
    np.testing.assert_allclose(found.sum(0), scores.numpy()[1], rtol=1e-3)


def logit_gap(model_call: Any, batch: Any) -> Tensor:
    logits = model_call(batch[0])
    last = logits[:, -1] if logits.dim() == 3 else logits
    return last[:, 1] - 2 * last[:, 0]


@pytest.mark.parametrize("asked", ["keyword", "questions", "opened"])
def test_tokens_are_scored_for_another_output_of_the_model(asked: str, tmp_path: Any) -> None:
    """f of the targets is a question; f of a train row is still the sum over its tokens."""
    settings = {"projector": "none", "proj_dim": 63, "dtype": "float32", "progress": False}
    lm = "causal_language_modeling"
    task = QuestionsModelOutput(lm, {"gap": logit_gap}) if asked == "questions" else lm
    made = Attributor(LanguageModel(), task, tmp_path / "rows.zarr", **settings)
    made.featurize(TRAIN, checkpoints=WEIGHTS)
    if asked == "questions":
        scores = made.score(task.ask("gap", TARGETS), method=GradDot(q="off"))
    else:
        scores = made.score(TARGETS, method=GradDot(q="off"), task=logit_gap)
    if asked == "opened":  # the train rows need no task of targets
        scores = made.scores(method=GradDot(q="off"))

    found = token_scores(scores, TRAIN, [3, 0])

    expected = {row: np.zeros((LENGTH, M)) for row in (0, 3)}
    for weights in WEIGHTS:
        model = LanguageModel()
        model.load_state_dict(weights)
        model.double()
        targets = []
        for ids, _ in TARGETS:
            last = model(ids[None])[0, -1]
            grads = torch.autograd.grad(last[1] - 2 * last[0], list(model.parameters()))
            targets.append(torch.cat([grad.reshape(-1) for grad in grads]).numpy())
        for row in expected:
            expected[row] += gradients(model, TRAIN, row) @ np.stack(targets).T / len(WEIGHTS)
    for row, values in found.items():
        np.testing.assert_allclose(values, expected[row], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(values.sum(0), scores.numpy()[row], rtol=1e-4, atol=1e-6)


def test_the_store_and_the_model_stay_as_they_were(plain: Attributor) -> None:
    scores = plain.score(TARGETS)
    before, weights = scores.numpy(), {n: v.clone() for n, v in plain.model.state_dict().items()}

    token_scores(scores, TRAIN, [1])

    np.testing.assert_array_equal(plain.score(TARGETS).numpy(), before)
    assert all(torch.equal(value, weights[name]) for name, value in plain.model.state_dict().items())


def test_scores_divided_by_norms_are_refused(plain: Attributor) -> None:
    for made, method in ((plain, "GradCos"), (attributor(normalize="unit"), None)):
        with pytest.raises(InvalidInputError, match="divide train rows by their norms"):
            token_scores(made.score(TARGETS, method=method), TRAIN, [0])


def test_a_task_without_tokens_is_refused() -> None:
    data = TensorDataset(torch.randn(4, 3), torch.arange(4) % 2)
    made = Attributor(nn.Linear(3, 2), "image_classification", None, proj_dim=4)
    made.featurize(data)

    for scores in (made.score(data), made.score(data, name="gap", task=logit_gap)):
        with pytest.raises(
            InvalidInputError, match="'image_classification', whose output is not a sum over tokens"
        ):
            token_scores(scores, data, [0])


@pytest.mark.parametrize("rows", [[], [N], [-1], [0.5]])
def test_rows_that_are_not_there_are_refused(plain: Attributor, rows: list[Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"rows must be whole numbers from 0 to 4"):
        token_scores(plain.score(TARGETS), TRAIN, rows)


def test_targets_and_data_that_are_not_those_of_the_scores_are_refused(plain: Attributor) -> None:
    scores = plain.score(TARGETS)

    with pytest.raises(InvalidInputError, match="no target 3"):
        token_scores(scores, TRAIN, [0], targets=[3])
    with pytest.raises(ManifestMismatchError, match="dataset"):
        token_scores(scores, TARGETS, [0])


class _Doubled(torch.autograd.Function):
    """Has a backward pass only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Nothing is needed for the backward pass."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class BackwardOnly(LanguageModel):
    def forward(self, input_ids: Tensor) -> Tensor:
        return _Doubled.apply(super().forward(input_ids))


class SometimesBackwardOnly(LanguageModel):
    """Has no forward mode for rows of more than four tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return _Doubled.apply(logits) if input_ids.shape[1] > 4 else logits


class Half(LanguageModel):
    """Has weights in float16."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.half()

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids).float()


class Loops(Exception):
    """A gradient per token is computed."""


@pytest.mark.parametrize(
    ("output", "settings", "in_one_pass"),
    [
        ("log_prob", {}, True),
        ("margin", {}, True),
        ("log_prob", {"layout": "joint", "dtype": "float16"}, True),
        ("log_prob", {"grad_wrt": ["head.weight"]}, True),
        ("log_prob", {"projector": "gaussian", "layout": "joint"}, False),
    ],
    ids=str,
)
def test_one_forward_pass_gives_what_a_gradient_per_token_gives(
    monkeypatch: pytest.MonkeyPatch, output: str, settings: dict[str, Any], in_one_pass: bool
) -> None:
    """The features of a token are computed here by autograd and the projector, and multiplied with the target."""
    made = attributor(proj_dim=16, task=CausalLanguageModelingModelOutput(output=output), **settings)
    scores = made.score(TARGETS, method=TracIn(learning_rates=(0.5, 0.1)))
    names = list(made.parameters)
    expected = np.zeros((LENGTH, 2))
    for model_id, weights in enumerate(WEIGHTS):
        model = LanguageModel()
        model.load_state_dict(weights)
        ids, labels = TRAIN[4]
        target = scores.source.terms(slice(1, 3))[model_id].targets.double().numpy()
        for position in (1, 3, 4, 5):
            logits = model(ids[None])[0, position - 1].double()
            log_p = logits.log_softmax(0)[labels[position]]
            f = log_p if output == "log_prob" else log_p - torch.log1p(-log_p.exp())
            kept = dict(model.named_parameters())
            grads = torch.autograd.grad(f, [kept[name] for name in names])
            features = made.projector.project(
                {name: grad[None] for name, grad in zip(names, grads, strict=True)}, model_id
            )
            q = scores.source.row_factors(np.array([4]))[model_id, 0]
            expected[position] += q * (features.double().numpy() @ target.T)[0]
    if in_one_pass:
        monkeypatch.setattr("trak_lite.featurizing.session.FeaturizingSession.features", _refuse)

    found = token_scores(scores, TRAIN, [4], targets=[1, 2])[4]

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    if not in_one_pass:
        monkeypatch.setattr("trak_lite.featurizing.session.FeaturizingSession.features", _refuse)
        with pytest.raises(Loops):
            token_scores(scores, TRAIN, [4], targets=[1, 2])


def _refuse(*_: Any, **__: Any) -> Tensor:
    raise Loops


def test_a_model_without_forward_mode_gets_a_gradient_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Attributor(BackwardOnly(), "causal_language_modeling", None, proj_dim=64, dtype="float32")
    made.featurize(TRAIN)
    scores = made.score(TARGETS)

    found = token_scores(scores, TRAIN, [1])[1]

    np.testing.assert_allclose(found.sum(0), scores.numpy()[1], rtol=1e-3)
    monkeypatch.setattr("trak_lite.featurizing.session.FeaturizingSession.features", _refuse)
    with pytest.raises(Loops):
        token_scores(scores, TRAIN, [1])


def test_a_model_without_forward_mode_for_some_rows_gets_a_gradient_per_token() -> None:
    rows = [
        (torch.arange(length) % VOCABULARY, torch.arange(length) % VOCABULARY) for length in (4, LENGTH, 3)
    ]
    made = Attributor(SometimesBackwardOnly(), "causal_language_modeling", None, proj_dim=64, dtype="float32")
    train = Rows(rows, batch_size=1)
    made.featurize(train)
    scores = made.score(TARGETS)

    found = token_scores(scores, train, range(3))

    summed = np.stack([found[row].sum(0) for row in range(3)])
    np.testing.assert_allclose(summed, scores.numpy(), rtol=1e-3, atol=1e-5 * np.abs(scores.numpy()).max())


def test_small_targets_reach_the_tokens_of_a_model_in_float16() -> None:
    """The preconditioned targets are about 1e-8, which float16 rounds to zero."""
    made = Attributor(
        Half(), "causal_language_modeling", None, proj_dim=64, dtype="float32", method=TRAK(damping=1e8)
    )
    made.featurize(TRAIN)
    scores = made.score(TARGETS)

    found = token_scores(scores, TRAIN, range(N))

    summed = np.stack([found[row].sum(0) for row in range(N)])
    np.testing.assert_allclose(summed, scores.numpy(), rtol=1e-2, atol=5e-3 * np.abs(scores.numpy()).max())


def test_no_targets_give_no_columns(plain: Attributor) -> None:
    assert token_scores(plain.score(TARGETS), TRAIN, [1], targets=[])[1].shape == (LENGTH, 0)
