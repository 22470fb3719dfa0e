"""Questions as targets: other outputs of the model, single or grouped, against plain gradients in float64."""

import modelout_cases as cases
import numpy as np
import pytest
import torch
from modelout_cases import B, T, V, check_gradients, gradients_of, identity_of, prepared, randint, randn
from reference import margin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trak_lite import Attributor, Rows, verify
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    ShortageError,
    StateError,
    UnknownTaskError,
)
from trak_lite.evaluation import subset_masks
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer
from trak_lite.methods import GradCos, GradDot, Mean
from trak_lite.modelout_functions import (
    ActivationModelOutput,
    ImageClassificationModelOutput,
    ModelCall,
    QuestionsModelOutput,
)

N, M, D, C = 10, 6, 4, 3
EXACT = {"projector": "none", "dtype": "float32", "layout": "joint", "method": GradDot()}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def classifier():
    return prepared(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)))


def data(count, seed):
    return TensorDataset(randn(count, D, seed=seed), randint(C, (count,), seed + 1))


TRAIN, TARGETS = data(N, 1), data(M, 3)


def gap(model_call, batch):
    logits = model_call(batch[0])
    return logits[:, 0] - 2 * logits[:, 1]


def third(model_call, batch):
    return model_call(batch[0])[:, 2]


def neuron():
    return ActivationModelOutput("1", torch.eye(5)[2])


def asking(**questions):
    return QuestionsModelOutput("image_classification", {"gap": gap, **questions})


def featurized(task="image_classification", path=None, model=None, **settings):
    settings = {"proj_dim": 8, **settings} if "projector" not in settings else settings
    attributor = Attributor(model or classifier(), task, path, progress=False, **settings)
    attributor.featurize(TRAIN)
    return attributor


def flat_gradient(value, model):
    return torch.cat(list(gradients_of(value, model).values())).numpy()


@pytest.fixture(scope="module")
def plain():
    """Minus the loss gradients of the train rows, and gradients of the gap and of the margin for the targets."""
    model = classifier()
    loss = nn.functional.cross_entropy
    return {
        "rows": np.stack([-flat_gradient(loss(model(x[None]), y[None]), model) for x, y in TRAIN]),
        "gap": np.stack([flat_gradient(model(x)[0] - 2 * model(x)[1], model) for x, _ in TARGETS]),
        "margin": np.stack([flat_gradient(margin(model(x[None]), y[None]), model) for x, y in TARGETS]),
    }


def test_a_question_or_a_task_of_targets_gives_products_with_its_gradients(plain):
    products, attributor = plain["rows"] @ plain["gap"].T, featurized(asking(), **EXACT)
    asked = attributor.score(asking().ask("gap", TARGETS), name="asked")
    attributor = featurized(**EXACT)
    given = attributor.score(Rows(TARGETS, batch_size=4), name="gap", task=gap)
    streamed = attributor.stream_scores(TRAIN, TARGETS, method=GradDot(), task=gap)
    for scores in (asked, given, streamed):
        np.testing.assert_allclose(scores.numpy(), products, **CLOSE)
    mean = attributor.score(TARGETS, name="gap", task=gap, method=Mean(GradDot(), GradDot())).numpy()
    standard = (products - products.mean(0)) / products.std(0)
    np.testing.assert_allclose(mean, standard, rtol=1e-3, atol=1e-4)
    margins = attributor.score(TARGETS, name="plain").numpy()
    np.testing.assert_allclose(margins, plain["rows"] @ plain["margin"].T, **CLOSE)


def test_a_group_is_one_target_for_every_method(plain):
    """A sum of targets for inner products, the cosine of the summed gradient for cosines."""
    task, groups = asking(), ["b", "a", "b", "b", "c", "a"]
    attributor, rows = featurized(task, **EXACT), plain["rows"]
    means = np.stack([plain["gap"][members].mean(0) for members in ([0, 2, 3], [1, 5], [4])])
    grouped = task.ask("gap", Rows(TARGETS, batch_size=2), groups=groups)
    product = attributor.score(grouped, name="grouped").numpy()
    cosine = attributor.score(grouped, name="grouped", method=GradCos(layout="joint")).numpy()
    sums = task.ask("gap", TARGETS, groups=groups, reduction="sum")
    whole = task.ask("", TARGETS, groups=[0] * M, reduction="sum")
    np.testing.assert_allclose(product, rows @ means.T, **CLOSE)
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (rows, means)]
    np.testing.assert_allclose(cosine, unit[0] @ unit[1].T, **CLOSE)
    summed = attributor.score(sums, name="summed").numpy()
    np.testing.assert_allclose(summed, rows @ means.T * [3, 2, 1], **CLOSE)
    own = attributor.score(whole, name="own").numpy()
    np.testing.assert_allclose(own[:, 0], rows @ plain["margin"].sum(0), **CLOSE)


def test_questions_use_the_stored_rows_of_the_task(tmp_path):
    model, path, task = classifier(), tmp_path / "rows.zarr", asking(neuron=neuron())
    before = featurized(path=path, model=model).score(TARGETS, name="plain").numpy()
    attributor = Attributor(model, task, path, proj_dim=8, progress=False)
    assert attributor.featurize(TRAIN).rows_written == 0
    first = attributor.score(task.ask("gap", TARGETS), name="gap").numpy()
    other = attributor.score(task.ask("neuron", TARGETS), name="neuron").numpy()
    assert not np.allclose(first, other)
    again = Attributor.open(path, model, task)
    assert again.score(task.ask("gap", TARGETS), name="gap").numpy().tobytes() == first.tobytes()
    for asked in (task.ask("neuron", TARGETS), task.ask("gap", TARGETS, groups=[0] * M)):
        with pytest.raises(ManifestMismatchError):
            again.score(asked, name="gap")
    without = Attributor.open(path, model)
    assert without.task.name == "image_classification"
    assert without.score(TARGETS, name="plain").numpy().tobytes() == before.tobytes()


def test_scores_of_different_tasks_do_not_mix(tmp_path):
    model, path = classifier(), tmp_path / "rows.zarr"
    asked = featurized(path=path, model=model).score(TARGETS, name="gap", task=gap)
    first = asked.numpy().tobytes()

    opened = Attributor.open(path, model)
    assert opened.score(TARGETS, name="gap", task=gap).numpy().tobytes() == first
    assert opened.scores("gap").numpy().tobytes() == first
    assert opened.scores("gap").settings["task"] == "callable"
    hot = ImageClassificationModelOutput(temperature=2.0)
    assert opened.score(TARGETS, name="hot", task=hot).settings["task_settings"] == {"temperature": 2.0}
    assert "task" not in opened.score(TARGETS, name="plain").settings
    for dense in (True, False):
        for task in (None, third, neuron()):
            with pytest.raises(ManifestMismatchError, match=r"targets\.task"):
                opened.score(TARGETS, name="gap", task=task, dense=dense)
        with pytest.raises(ManifestMismatchError, match="Pass the task that these targets were scored with"):
            opened.scores("gap", task=third, dense=dense)
        assert opened.scores("gap", task=gap, dense=dense).task.evaluate is not None
        with pytest.raises(StateError, match=r"scored with task='callable'"):
            _ = opened.scores("gap", dense=dense).task
    with pytest.raises(ManifestMismatchError, match=r"targets\.task"):
        opened.score(TARGETS, name="plain", task=gap)
    assert asked.task.function is gap  # type: ignore[attr-defined]


@pytest.mark.parametrize("targets", [{"task": "dpo"}, {"task": {"name": ["dpo"]}}, {"task": 3}, ["task"]])
def test_a_task_that_a_store_of_somebody_else_names_is_only_shown(targets, monkeypatch):
    attributor = featurized()
    kind = type(attributor.score(TARGETS).source)

    def source(*args, **kwargs):
        return kind(*args, **{**kwargs, "target_identity": targets})

    monkeypatch.setattr("trak_lite.scoring.stored.ScoreSource", source)
    shown = attributor.scores(dense=False).settings
    assert shown.get("task") == ("custom" if isinstance(targets, dict) else None)


@pytest.mark.parametrize("name", [None, "targets of today"])
@pytest.mark.parametrize("given", ["constructor", "call"])
def test_questions_may_be_asked_before_the_attributor_is_made(given, name, tmp_path):
    """The captured model is then the attributed one, whatever its weights are; a reference counts with its weights."""
    model, reference = classifier(), classifier()

    def penalised(model_call, batch):
        logits = reference(batch[0]).detach()
        return gap(model_call, batch) - logits[:, 0] - model[0].weight.detach().square().sum()

    def score():
        task, settings = asking(penalised=penalised), {"proj_dim": 8, "progress": False}
        asked = task.ask("penalised", Rows(TARGETS, name=name))
        own = task if given == "constructor" else task.task
        attributor = Attributor(model, own, tmp_path / "rows.zarr", **settings)
        attributor.featurize(TRAIN, checkpoints=states)
        return attributor.score(asked, name="asked", task=task).numpy()

    states = [{key: value * scale for key, value in model.state_dict().items()} for scale in (0.5, 1.5)]
    first, expected = score(), Attributor(model, "image_classification", None, proj_dim=8, progress=False)
    expected.featurize(TRAIN, checkpoints=states)
    np.testing.assert_allclose(expected.score(TARGETS, task=penalised).numpy(), first, **CLOSE)
    with torch.no_grad():
        model[2].bias.add_(1.0)
    np.testing.assert_array_equal(score(), first)
    np.testing.assert_allclose(expected.score(TARGETS, task=penalised).numpy(), first, **CLOSE)
    with torch.no_grad():
        reference[2].bias.add_(1.0)
    with pytest.raises(ManifestMismatchError):
        score()


@pytest.mark.parametrize("given", ["constructor", "call"])
@pytest.mark.parametrize("name", [None, "targets of today"])
def test_attributors_of_two_models_share_questions_that_capture_one_of_them(given, name):
    """Each score is that of the question itself, whichever attributor asked last."""
    models = [classifier(), classifier()]
    states = [{key: value * scale for key, value in models[0].state_dict().items()} for scale in (0.5, 1.5)]

    def penalised(model_call, batch):
        return gap(model_call, batch) - models[0][0].weight.detach().square().sum()

    def made(model, task):
        attributor = Attributor(model, task, None, proj_dim=8, progress=False)
        attributor.featurize(TRAIN, checkpoints=states)
        return attributor

    task = asking(penalised=penalised)
    asked = task.ask("penalised", Rows(TARGETS, name=name))
    expected = [
        made(model, "image_classification").score(TARGETS, task=penalised).numpy() for model in models
    ]
    tasks = [task, task if given == "constructor" else task.task]
    attributors = [made(*pair) for pair in zip(models, tasks, strict=True)]

    def score(index, **settings):
        settings |= {"task": task} if index and given == "call" else {}
        return attributors[index].score(asked, name="asked", **settings).numpy()

    for index in (0, 1, 0, 1):
        np.testing.assert_allclose(score(index), expected[index], **CLOSE)
    score(0, method=Mean(GradCos(), GradDot()))


def test_a_reference_is_hashed_once_per_checkpoint_and_seen_to_change_between_calls(monkeypatch):
    reference, hashed = nn.Linear(D, C).double(), []

    def state_dict(module, *args, **kwargs):
        hashed.append(module is reference)
        return nn.Module.state_dict(module, *args, **kwargs)

    monkeypatch.setattr(nn.Linear, "state_dict", state_dict)
    task = asking(apart=lambda call, batch: (call(batch[0]) * reference(batch[0]).detach()).sum(1))
    attributor = featurized(task, gradient_computer="iterative")
    asked = task.ask("apart", DataLoader(TARGETS, batch_size=2))
    before = sum(hashed)
    attributor.score(asked, "asked")
    assert sum(hashed) - before <= 2
    with torch.no_grad():
        reference.bias.add_(1.0)
    with pytest.raises(InvalidInputError, match="the question 'apart' of this task"):
        attributor.score(asked, "again")


def test_the_task_of_the_train_rows_is_no_other_task():
    attributor, task = featurized(), asking()
    own = attributor.score(TARGETS, name="t").numpy()
    given = attributor.score(TARGETS, name="t", task="image_classification").numpy()
    grouped = attributor.score(task.ask("gap", TARGETS, groups=[0] * M), name="g", task=task).numpy()
    single = attributor.score(TARGETS, name="s", task=gap).numpy()
    assert given.tobytes() == own.tobytes()
    assert grouped.shape == (N, 1)
    np.testing.assert_allclose(grouped[:, 0], single.mean(1), rtol=2e-2, atol=2e-3 * abs(single).max())
    with pytest.raises(InvalidInputError, match="adds questions to another task"):
        attributor.score(TARGETS, task=QuestionsModelOutput("regression", {"gap": gap}))
    with pytest.raises(UnknownTaskError):
        attributor.score(TARGETS, task="image_clasification")


def test_verify_compares_with_the_output_that_was_asked():
    train = data(30, 1)
    attributor = Attributor(nn.Linear(D, C).double(), "image_classification", None, projector="none")
    attributor.featurize(train)

    def train_fn(rows, seed):
        made = nn.Linear(D, C).double()
        with torch.no_grad():
            made.weight.fill_(0.0)
            made.bias.fill_(0.0)
            for row in rows.tolist():
                made.weight[train.tensors[1][row]] += train.tensors[0][row]
        return made

    verdict = verify(attributor.score(TARGETS, task=gap), train_fn, TARGETS, budget=6)
    found = attributor.scores(task=gap).predictions
    assert (verdict.num_subsets, found is None) == (6, False)
    models = [train_fn(np.flatnonzero(mask), 0) for mask in subset_masks(30, 6)]
    outputs = np.array([gap(made, TARGETS.tensors).tolist() for made in models])
    np.testing.assert_allclose(found.retrained, outputs, rtol=1e-5)
    with pytest.raises(ManifestMismatchError, match="task"):
        verify(attributor.scores(), train_fn, TARGETS, budget=6)


def test_rows_by_name_index_and_loader_are_asked_the_same():
    """A name does not hide another question."""
    task = asking(neuron=neuron())
    attributor = featurized(task)
    named = Rows(TARGETS, name="targets of today", indices=[2, 0, 1], batch_size=2)
    found = attributor.score(task.ask("gap", named), name="t").numpy()
    whole = attributor.score(task.ask("gap", TARGETS), name="whole").numpy()
    loaded = attributor.score(task.ask("gap", DataLoader(TARGETS, batch_size=4)), name="loaded").numpy()
    np.testing.assert_allclose(found, whole[:, [2, 0, 1]], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(loaded, whole, rtol=1e-3, atol=1e-5)
    with pytest.raises(ManifestMismatchError):
        attributor.score(task.ask("neuron", named), name="t")


def loader(collate):
    return DataLoader(TARGETS, batch_size=4, collate_fn=collate)


@pytest.mark.parametrize(
    ("own", "score", "expected"),
    [
        (None, lambda made, collate: made.score(TARGETS, "t", task=gap, batch_size=2), 2),
        (None, lambda made, collate: made.score(loader(collate), "t", task=gap, batch_size=2), 2),
        (2, lambda made, collate: made.score(TARGETS, "t", task=gap), 2),
        (2, lambda made, collate: made.score(asking().ask("gap", TARGETS, collate=collate), "t"), 2),
        (2, lambda made, collate: made.score(loader(collate), "t", task=gap), 4),
        (2, lambda made, collate: made.score(asking().ask("gap", loader(collate)), "t"), 4),
    ],
)  # fmt: skip
def test_batch_sizes_hold_for_questions(own, score, expected):
    """That of the call, then that of the data, then that of the attributor."""
    sizes = []

    def collate(samples):
        sizes.append(len(samples))
        return torch.utils.data.default_collate(samples)

    attributor = featurized(asking(), batch_size=own, collate=collate)
    sizes.clear()
    score(attributor, collate)
    assert max(sizes) == expected


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, states):
        return torch.tanh(self.layer(states)), None


class Tower(nn.Module):
    """States of tokens, after a layer that returns a tuple."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(V, 4), Pair(), nn.Linear(5, V)
        self.unused = nn.Identity()

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.block(self.embed(input_ids))[0])


@pytest.mark.parametrize("position", ["mean", "sum", "first", "last", 1, -2])
@pytest.mark.parametrize("computer", [HookGradientComputer, FunctionalGradientComputer])
def test_an_activation_along_a_direction_has_the_gradient_of_a_plain_loop(position, computer):
    model, direction = prepared(Tower()), randn(5, seed=60)
    ids, mask = randint(V, (B, T), 61), torch.ones(B, T, dtype=torch.long)
    mask[1, 4:] = 0
    mask[2, :2] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    task = ActivationModelOutput("block", direction, position=position)
    expected = []
    for i in range(B):
        along = torch.tanh(model.block.layer(model.embed(ids[i]))) @ direction
        kept = along[mask[i] == 1]
        named = {"mean": kept.mean(), "sum": kept.sum(), "first": kept[0], "last": kept[-1]}
        expected.append(named[position] if isinstance(position, str) else along[position])
    torch.testing.assert_close(task.evaluate(ModelCall(model), batch).output, torch.stack(expected))
    check_gradients(computer(model, task), batch, expected, rtol=1e-9, atol=1e-12)


def test_channels_of_convolutions_are_axis_one_and_states_of_samples_are_used_as_they_are():
    model = prepared(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)))
    images, direction = randn(B, 1, 4, 4, seed=62), randn(3, seed=63)
    task = ActivationModelOutput("1", direction, channels_first=True)
    expected = torch.einsum("bchw,c->bhw", torch.tanh(model[0](images)), direction).mean((1, 2))
    for batch in ((images, torch.zeros(B)), images):
        torch.testing.assert_close(task.evaluate(ModelCall(model), batch).output, expected)
    model, x = classifier(), randn(B, D, seed=64)
    found = ActivationModelOutput("0", torch.eye(5)[1].float()).evaluate(ModelCall(model), (x, x)).output
    torch.testing.assert_close(found, model[0](x)[:, 1])


def test_a_direction_is_part_of_the_identity_and_cannot_change():
    direction = torch.ones(3)
    task = ActivationModelOutput("0", direction)
    before = identity_of(task)
    direction[0] = 2.0
    assert identity_of(task) == before
    others = (direction, {}), (torch.ones(3), {"position": "last"})
    assert all(identity_of(ActivationModelOutput("0", one, **more)) != before for one, more in others)


def test_the_rest_is_that_of_the_task():
    names = "multilabel_classification", "causal_language_modeling", "clip"
    multilabel, text, clip = (QuestionsModelOutput(name, {"gap": gap}) for name in names)
    assert (multilabel.has_curvature, text.has_curvature) == (True, False)
    assert multilabel.log_likelihood().settings() == {"output": "log_prob"}
    assert (text.can_sample, clip.can_sample, clip.state_digest()) == (True, False, None)
    attributor = Attributor(prepared(cases.LanguageModel()), text, None, proj_dim=8, progress=False)
    assert attributor.method.name == "Fisher"


def activation(module, size, position="mean"):
    model, ids = prepared(Tower()), {"input_ids": randint(V, (B, T), 1)}
    try:
        ActivationModelOutput(module, torch.ones(size), position=position).evaluate(ModelCall(model), ids)
    finally:
        assert not any(part._forward_hooks for part in model.modules())


def test_texts_of_several_lengths_name_the_collate_function_of_ask():
    texts = [torch.ones(length) for length in (2, 3)]
    made = featurized(asking())
    with pytest.raises(InvalidInputError, match=r"equal size.*ask\(\.\.\., collate=\.\.\.\): the collate of"):
        made.score(asking().ask("gap", Rows(texts, name="texts")), "t")
    large = [torch.ones(1).expand(1 << 46)] * 2
    with pytest.raises(ShortageError, match="not enough memory"):
        made.score(asking().ask("gap", Rows(large, name="large")), "t")


def asked_another():
    other = QuestionsModelOutput("image_classification", {"gap": third})
    return featurized(asking()).score(other.ask("gap", TARGETS), name="other")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: asking(answers="answer_diference"), UnknownTaskError, "Did you mean 'answer_difference'"),
        (lambda: asking().ask("gab", TARGETS), InvalidInputError, r"Unknown questions: .*'gab'"),
        (lambda: asking().ask("gap", TARGETS, groups=[0, 1]), InvalidInputError, "2 labels of groups for 6 samples"),
        (lambda: asking().ask("gap", TARGETS, reduction="max"), InvalidInputError, "reduction must be one of"),
        (asked_another, InvalidInputError, "the question 'gap' of this task"),
        (lambda: activation("blok", 5), InvalidInputError,
         r"Unknown module: \['blok'\]. Nearest known: \['block'\]"),
        (lambda: activation("block", 4), InvalidInputError, "Expected 4 channels"),
        (lambda: activation("block", 5, T), InvalidInputError, f"position={T} does not exist"),
        (lambda: activation("unused", 5), InvalidInputError, "does not call its module 'unused'"),
    ],
)  # fmt: skip
def test_questions_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
