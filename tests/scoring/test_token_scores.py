"""Scores split over tokens, against one backward pass per token."""

import copy

import numpy as np
import pytest
import torch
from tiny_runs import CubeWithoutForwardMode, LanguageModel
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows, token_scores
from trak_lite.errors import InvalidInputError, ManifestMismatchError
from trak_lite.methods import TRAK, Fisher, GradDot, TracIn
from trak_lite.modelout_functions import CausalLanguageModelingModelOutput, QuestionsModelOutput

VOCABULARY, LENGTH, N, M = 7, 6, 5, 3


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 2] = -100
    labels[0, 4:] = -100
    return TensorDataset(ids, labels)


TRAIN, TARGETS = tokens(N, 0), tokens(M, 1)
WEIGHTS = [LanguageModel(seed=seed).state_dict() for seed in (0, 1)]


def attributor(**settings):
    given = {"proj_dim": 64, "dtype": "float32", "task": "causal_language_modeling", **settings}
    made = Attributor(LanguageModel(), path=None, **given)
    made.featurize(Rows(TRAIN, batch_size=4), checkpoints=WEIGHTS)
    return made


@pytest.fixture(scope="module")
def plain():
    """Featurized once: scores of every view are kept beside each other, and no test changes its rows."""
    return attributor()


def close(found, expected, rtol=1e-3, atol=1e-5):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol * np.abs(expected).max())


def token_gradients(model, ids, labels, names=None, output="log_prob"):
    """Return the gradient of the term of every token of a row, ``(T, *shape)``; zero where nothing is predicted."""
    kept = {name: p for name, p in model.named_parameters() if names is None or name in names}
    found = {name: torch.zeros(LENGTH, *p.shape, dtype=torch.float64) for name, p in kept.items()}
    for position in range(1, LENGTH):
        if labels[position] == -100:
            continue
        log_p = model(ids[None])[0, position - 1].double().log_softmax(0)[labels[position]]
        f = log_p if output == "log_prob" else log_p - torch.log1p(-log_p.exp())
        for name, grad in zip(kept, torch.autograd.grad(f, [*kept.values()]), strict=True):
            found[name][position] = grad
    return found


@pytest.mark.parametrize(("output", "settings", "in_one_pass"), [
    ("log_prob", {}, True),
    ("margin", {"layout": "joint"}, True),
    ("log_prob", {"grad_wrt": ["head.weight"]}, True),
    ("log_prob", {"projector": "none"}, True),
    ("log_prob", {"projector": "gaussian", "layout": "joint"}, False),
], ids=str)  # fmt: skip
def test_tokens_add_the_product_of_their_own_gradient_with_the_target(output, settings, in_one_pass):
    """By one forward pass for each target and checkpoint, or by the gradients of the tokens for all targets."""
    made = attributor(proj_dim=16, task=CausalLanguageModelingModelOutput(output=output), **settings)
    scores = made.score(TARGETS, method=GradDot(q="off"))
    passes = []
    made.model.register_forward_pre_hook(lambda *_: passes.append(1))
    counts = []
    for targets in ([1], [1, 2]):
        del passes[:]
        found = token_scores(scores, Rows(TRAIN, batch_size=4), [4], targets=targets)[4]
        counts.append(len(passes))
    assert counts[1] - counts[0] == (len(WEIGHTS) if in_one_pass else 0)
    expected = np.zeros((LENGTH, 2))
    for model_id, weights in enumerate(WEIGHTS):
        model = LanguageModel()
        model.load_state_dict(weights)

        def features(row):
            gradients = token_gradients(model, *row, made.parameters, output)  # noqa: B023
            parts = {name: grad.float() for name, grad in gradients.items()}
            return made.projector.project(parts, model_id).double().numpy()  # noqa: B023

        targets = np.stack([features(TARGETS[number]).sum(0) for number in (1, 2)])
        expected += features(TRAIN[4]) @ targets.T / len(WEIGHTS)
    close(found, expected, rtol=1e-4)
    assert not found[[0, 2]].any()


@pytest.mark.parametrize("method", [
    None,
    Fisher(q="outside"),
    TRAK(damping=0.1, layout="stored"),
    Fisher(checkpoint_weights=(1.0, -0.5), q="off"),
    TracIn(learning_rates=(0.5, 0.1)),
    "EKFAC",
], ids=str)  # fmt: skip
def test_tokens_add_up_to_the_score_of_their_row(plain, method):
    """And the model and the store stay as they were."""
    scores, weights = plain.score(TARGETS, method=method), copy.deepcopy(plain.model.state_dict())
    before = scores.numpy()
    found = token_scores(scores, TRAIN, range(N), targets=[2, 0, -2])
    close(np.stack([found[row].sum(0) for row in range(N)]), before[:, [2, 0, 1]])
    assert token_scores(scores, TRAIN, [1], targets=[])[1].shape == (LENGTH, 0)
    np.testing.assert_array_equal(plain.score(TARGETS, method=method).numpy(), before)
    assert all(torch.equal(value, weights[name]) for name, value in plain.model.state_dict().items())


def test_labels_that_are_not_shifted_keep_their_place():
    task = CausalLanguageModelingModelOutput(shift=False)
    made = attributor(task=task)
    scores = made.score(TARGETS)
    found = token_scores(scores, TRAIN, [1])[1]
    assert np.flatnonzero(found.any(1)).tolist() == [0, 1, 3, 4, 5]
    close(found.sum(0), scores.numpy()[1])


def gap(model_call, batch):
    logits = model_call(batch[0])
    last = logits[:, -1] if logits.dim() == 3 else logits
    return last[:, 1] - 2 * last[:, 0]


@pytest.mark.parametrize("asked", ["keyword", "questions", "opened"])
def test_tokens_are_scored_for_another_output_of_the_model(asked, tmp_path):
    """f of the targets is a question; f of a train row is still the sum over its tokens."""
    settings = {"projector": "none", "proj_dim": 63, "dtype": "float32", "progress": False}
    lm = "causal_language_modeling"
    task = QuestionsModelOutput(lm, {"gap": gap}) if asked == "questions" else lm
    made = Attributor(LanguageModel(), task, tmp_path / "rows.zarr", **settings)
    made.featurize(TRAIN, checkpoints=WEIGHTS)
    if asked == "questions":
        scores = made.score(task.ask("gap", TARGETS), method=GradDot(q="off"))
    else:
        scores = made.score(TARGETS, method=GradDot(q="off"), task=gap)
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
            grads = token_gradients(model, *TRAIN[row])
            own = torch.cat([grad.flatten(1) for grad in grads.values()], 1).numpy()
            expected[row] += own @ np.stack(targets).T / len(WEIGHTS)
    for row, values in found.items():
        np.testing.assert_allclose(values, expected[row], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(values.sum(0), scores.numpy()[row], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", [None, gap])
def test_images_have_no_tokens(task):
    data = TensorDataset(torch.randn(4, 3), torch.arange(4) % 2)
    made = Attributor(nn.Linear(3, 2), "image_classification", None, proj_dim=4)
    made.featurize(data)
    with pytest.raises(InvalidInputError, match="'image_classification', whose output is not a sum"):
        token_scores(made.score(data, task=task), data, [0])


NORMS = "divide train rows by their norms"


@pytest.mark.parametrize(
    ("error", "said", "made", "asked"),
    [
        (InvalidInputError, NORMS, lambda plain: plain.score(TARGETS, method="GradCos"), {}),
        (InvalidInputError, NORMS, lambda _: attributor(normalize="unit").score(TARGETS), {}),
        (InvalidInputError, "rows must be whole numbers from 0 to 4", None, {"rows": [N]}),
        (InvalidInputError, "no target 3", None, {"targets": [3]}),
        (ManifestMismatchError, "dataset", None, {"data": TARGETS}),
    ],
)
def test_what_cannot_be_split_over_tokens_is_refused(plain, error, said, made, asked):
    scores = plain.score(TARGETS) if made is None else made(plain)
    with pytest.raises(error, match=said):
        token_scores(scores, **{"data": TRAIN, "rows": [0], **asked})


class BackwardOnly(LanguageModel):
    """Has no forward mode for rows of more than some tokens."""

    def __init__(self, most=0):
        super().__init__()
        self.most = most

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return CubeWithoutForwardMode.apply(logits) if input_ids.shape[1] > self.most else logits


class Half(LanguageModel):
    def forward(self, input_ids):
        return super().forward(input_ids).float()


LENGTHS = [(torch.arange(length) % VOCABULARY,) * 2 for length in (4, LENGTH, 3)]


@pytest.mark.parametrize(("model", "data", "method", "tolerance"), [
    (BackwardOnly(), TRAIN, "auto", 1e-3),
    (BackwardOnly(4), LENGTHS, "auto", 1e-3),
    (Half().half(), TRAIN, TRAK(damping=1e8), 1e-2),
], ids=["none", "for some rows", "float16"])  # fmt: skip
def test_tokens_of_models_without_forward_mode_or_in_float16(model, data, method, tolerance):
    """Preconditioned targets of the last one are about 1e-8, which float16 rounds to zero."""
    settings = {"proj_dim": 64, "dtype": "float32", "method": method}
    made = Attributor(model, "causal_language_modeling", None, **settings)
    train = Rows(data, batch_size=1) if data is LENGTHS else Rows(data)
    made.featurize(train)
    scores = made.score(TARGETS)
    found = token_scores(scores, train, range(len(data)))
    summed = np.stack([found[row].sum(0) for row in range(len(data))])
    close(summed, scores.numpy(), tolerance, tolerance / 2)


class ChangedGradients(LanguageModel):
    """Another backward pass than that of its forward pass."""

    def __init__(self, change):
        super().__init__()
        self.states = lambda gradient: gradient
        if change == "frequency":
            self.embedding.scale_grad_by_freq = True
        elif change == "module":
            self.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.3,))
        elif change in ("scaled", "zero"):
            self.head.weight.register_hook(lambda gradient: gradient * (0.3 if change == "scaled" else 0.0))
        else:
            self.states = {
                "states": lambda gradient: gradient * 0.3,
                "normed": lambda gradient: gradient / gradient.norm(),
            }[change]

    def forward(self, input_ids):
        counts = torch.arange(1, input_ids.shape[1] + 1).view(1, -1, 1)
        states = torch.tanh(self.embedding(input_ids).cumsum(1) / counts)
        if states.requires_grad:
            states.register_hook(self.states)
        return self.head(states)


@pytest.mark.parametrize("change", ["frequency", "module", "scaled", "zero", "states", "normed"])
def test_tokens_of_a_model_that_changes_gradients_add_up_to_its_rows(change):
    """Forward mode knows nothing of it. Gradients of tokens add up, unless the change is not linear."""
    settings = {"gradient_computer": "iterative", "projector": "none", "dtype": "float32"}
    lm = "causal_language_modeling"
    made = Attributor(ChangedGradients(change), lm, None, method=GradDot(), **settings)
    made.featurize(TRAIN)
    scores = made.score(TARGETS)
    if change == "normed":
        with pytest.warns(RuntimeWarning, match=r"do not add up to those of rows 0, 1, .*hook that clips"):
            token_scores(scores, TRAIN, range(N))
    else:
        found = token_scores(scores, TRAIN, range(N))
        close(np.stack([found[row].sum(0) for row in range(N)]), scores.numpy(), 1e-5)


class Weighted(LanguageModel):
    """Multiplies the embedded tokens of a text by the number of its source, which is a tensor or a list of strings."""

    def forward(self, input_ids, source):
        scale = torch.tensor([float(one) for one in source]) if isinstance(source, list) else source
        return self.head(torch.tanh(self.embedding(input_ids) * scale[:, None, None]))


@pytest.mark.parametrize("method", [GradDot(), TRAK(damping=0.1)])
def test_tokens_of_texts_with_a_column_of_strings_have_the_scores_of_numbers(method):
    found = []
    for as_source in (str, lambda number: torch.tensor(float(number))):
        sources = [as_source(row % 3 + 1) for row in range(len(TRAIN))]
        data = [{"input_ids": x, "labels": y, "source": s} for (x, y), s in zip(TRAIN, sources, strict=True)]
        settings = {"proj_dim": 64, "dtype": "float32", "batch_size": 4, "progress": False}
        made = Attributor(Weighted(), "causal_language_modeling", None, **settings)
        made.featurize(Rows(data, name="texts"))
        scores = made.score(Rows(data, name="targets"), method=method)
        found.append(token_scores(scores, Rows(data, name="texts"), [0, 1, 2, 4]))
    for row in (0, 1, 2, 4):
        close(found[0][row], found[1][row])
