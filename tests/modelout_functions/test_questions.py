"""Questions as targets: other outputs of the model, single or grouped, against plain gradients in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from modelout_cases import B, LanguageModel, T, V, prepared, randint, randn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trak_lite import Attributor, Rows, verify
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError, UnknownTaskError
from trak_lite.evaluation import subset_masks
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer, collect_gradients
from trak_lite.methods import GradCos, GradDot, Mean
from trak_lite.modelout_functions import (
    ActivationModelOutput,
    CausalLanguageModelingModelOutput,
    ModelCall,
    MultiLabelModelOutput,
    QuestionsModelOutput,
)
from trak_lite.modelout_functions._describe import describe_task

N, M, D, C = 10, 6, 4, 3
EXACT = {"projector": "none", "dtype": "float32", "progress": False, "layout": "joint"}


def classifier() -> nn.Module:
    return prepared(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)))


def data(count: int, seed: int) -> TensorDataset:
    return TensorDataset(randn(count, D, seed=seed), randint(C, (count,), seed + 1))


def gap(model_call: Any, batch: Any) -> Tensor:
    logits = model_call(batch[0])
    return logits[:, 0] - 2 * logits[:, 1]


def asking(**questions: Any) -> QuestionsModelOutput:
    return QuestionsModelOutput("image_classification", {"gap": gap, **questions})


def flat_gradient(value: Tensor, model: nn.Module) -> np.ndarray:
    parts = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts]).numpy()


def plain_gradients(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Minus the loss gradients of the train rows, and the gradients of the question for the targets."""
    train, targets = data(N, 1), data(M, 3)
    rows = [-flat_gradient(nn.functional.cross_entropy(model(x[None]), y[None]), model) for x, y in train]
    asked = [flat_gradient(model(x)[0] - 2 * model(x)[1], model) for x, _ in targets]
    return np.stack(rows), np.stack(asked)


def test_scores_are_products_of_loss_gradients_and_gradients_of_the_question() -> None:
    model, task = classifier(), asking()
    attributor = Attributor(model, task, None, method=GradDot(), **EXACT)
    attributor.featurize(data(N, 1))

    scores = attributor.score(task.ask("gap", data(M, 3)), name="asked").numpy()

    rows, asked = plain_gradients(model)
    np.testing.assert_allclose(scores, rows @ asked.T, rtol=1e-4, atol=1e-5)


def test_a_group_is_one_target_for_every_method() -> None:
    """A sum of targets for inner products, the cosine of the summed gradient for cosines."""
    model, task, groups = classifier(), asking(), ["b", "a", "b", "b", "c", "a"]
    attributor = Attributor(model, task, None, method=GradDot(), **EXACT)
    attributor.featurize(data(N, 1))
    rows, asked = plain_gradients(model)
    members = np.array([[0, 2, 3], [1, 5, 1], [4, 4, 4]])
    means = np.stack([asked[sorted(set(some))].mean(0) for some in members.tolist()])

    grouped = task.ask("gap", Rows(data(M, 3), batch_size=2), groups=groups)
    product = attributor.score(grouped, name="grouped").numpy()
    cosine = attributor.score(grouped, name="grouped", method=GradCos(layout="joint")).numpy()
    summed = attributor.score(
        task.ask("gap", data(M, 3), groups=groups, reduction="sum"), name="summed"
    ).numpy()
    alone = attributor.score(task.ask("gap", data(M, 3)), name="alone")

    np.testing.assert_allclose(product, rows @ means.T, rtol=1e-4, atol=1e-5)
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (rows, means)]
    np.testing.assert_allclose(cosine, unit[0] @ unit[1].T, rtol=1e-4, atol=1e-5)
    by_label = alone.group(targets=groups)
    order = [list(by_label.target_groups).index(label) for label in ("b", "a", "c")]
    np.testing.assert_allclose(summed, by_label.sums[:, order], rtol=1e-4, atol=1e-5)


def test_groups_of_the_task_itself_are_its_own_targets() -> None:
    model, task = classifier(), asking()
    attributor = Attributor(model, task, None, proj_dim=16, progress=False)
    attributor.featurize(data(N, 1))

    grouped = attributor.score(task.ask("", data(M, 3), groups=[0] * M, reduction="sum"), name="all").numpy()

    alone = attributor.score(data(M, 3), name="alone").numpy()
    np.testing.assert_allclose(grouped[:, 0], alone.sum(1), rtol=2e-2, atol=2e-3 * float(abs(alone).max()))


def test_questions_use_the_stored_rows_of_the_task(tmp_path: Any) -> None:
    model, path = classifier(), tmp_path / "rows.zarr"
    Attributor(model, "image_classification", path, proj_dim=8, progress=False).featurize(data(N, 1))
    task = asking(neuron=ActivationModelOutput("1", torch.eye(5)[2]))
    attributor = Attributor(model, task, path, proj_dim=8, progress=False)

    assert attributor.featurize(data(N, 1)).rows_written == 0
    first = attributor.score(task.ask("gap", data(M, 3)), name="gap").numpy()
    other = attributor.score(task.ask("neuron", data(M, 3)), name="neuron").numpy()

    assert not np.allclose(first, other)
    again = Attributor.open(path, model, task)
    assert again.score(task.ask("gap", data(M, 3)), name="gap").numpy().tobytes() == first.tobytes()
    with pytest.raises(ManifestMismatchError):
        again.score(task.ask("neuron", data(M, 3)), name="gap")
    with pytest.raises(ManifestMismatchError):
        again.score(task.ask("gap", data(M, 3), groups=[0] * M), name="gap")
    assert describe_task(task) == describe_task(task.task)


def other_gap(model_call: Any, batch: Any) -> Tensor:
    return model_call(batch[0])[:, 2]


def test_a_task_of_targets_is_one_argument_of_score() -> None:
    model = classifier()
    attributor = Attributor(model, "image_classification", None, method=GradDot(), **EXACT)
    attributor.featurize(data(N, 1))
    rows, asked = plain_gradients(model)

    scores = attributor.score(Rows(data(M, 3), batch_size=4), name="gap", task=gap)
    streamed = attributor.stream_scores(data(N, 1), data(M, 3), method=GradDot(), task=gap)

    np.testing.assert_allclose(scores.numpy(), rows @ asked.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(streamed.numpy(), rows @ asked.T, rtol=1e-4, atol=1e-5)
    products = rows @ asked.T
    mean = attributor.score(data(M, 3), name="gap", task=gap, method=Mean(GradDot(), GradDot()))
    standard = (products - products.mean(0)) / products.std(0)
    np.testing.assert_allclose(mean.numpy(), standard, rtol=1e-3, atol=1e-4)
    plain = attributor.score(data(M, 3), name="plain").numpy()
    margins = np.stack([flat_gradient(margin(model, x, y), model) for x, y in data(M, 3)])
    np.testing.assert_allclose(plain, rows @ margins.T, rtol=1e-4, atol=1e-5)


def margin(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return logits[y] - torch.cat([logits[:y], logits[y + 1 :]]).logsumexp(0)


def test_scores_of_different_tasks_do_not_mix(tmp_path: Any) -> None:
    model, path = classifier(), tmp_path / "rows.zarr"
    attributor = Attributor(model, "image_classification", path, proj_dim=8, progress=False)
    attributor.featurize(data(N, 1))
    asked = attributor.score(data(M, 3), name="gap", task=gap)
    first = asked.numpy().tobytes()

    opened = Attributor.open(path, model)
    assert opened.score(data(M, 3), name="gap", task=gap).numpy().tobytes() == first
    assert opened.scores("gap").numpy().tobytes() == first
    assert opened.scores("gap").settings["task"] == "callable"
    assert "task" not in opened.score(data(M, 3), name="plain").settings
    for task in (None, other_gap, ActivationModelOutput("1", torch.eye(5)[2])):
        with pytest.raises(ManifestMismatchError, match=r"targets\.task"):
            opened.score(data(M, 3), name="gap", task=task)
        with pytest.raises(ManifestMismatchError, match=r"targets\.task"):
            opened.score(data(M, 3), name="gap", task=task, dense=False)
    with pytest.raises(ManifestMismatchError, match=r"targets\.task"):
        opened.score(data(M, 3), name="plain", task=gap)
    for dense in (True, False):
        with pytest.raises(ManifestMismatchError, match="Pass the task that these targets were scored with"):
            opened.scores("gap", task=other_gap, dense=dense)
        assert opened.scores("gap", task=gap, dense=dense).task.evaluate is not None
        with pytest.raises(StateError, match=r"scored with task='callable'"):
            _ = opened.scores("gap", dense=dense).task
    assert asked.task.function is gap  # type: ignore[attr-defined]


@pytest.mark.parametrize("targets", [{"task": "dpo"}, {"task": {"name": ["dpo"]}}, {"task": 3}, ["task"]])
def test_a_task_that_a_store_of_somebody_else_names_is_only_shown(
    targets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributor = Attributor(classifier(), "image_classification", None, proj_dim=8, progress=False)
    attributor.featurize(data(N, 1))
    attributor.score(data(M, 3))
    monkeypatch.setattr("trak_lite.scoring.source.ScoreSource.target_identity", targets)

    shown = attributor.scores(dense=False).settings

    assert shown.get("task") == ("custom" if isinstance(targets, dict) else None)


def test_the_task_of_the_train_rows_is_no_other_task() -> None:
    attributor = Attributor(classifier(), "image_classification", None, proj_dim=8, progress=False)
    attributor.featurize(data(N, 1))
    plain = attributor.score(data(M, 3), name="t").numpy()

    assert (
        attributor.score(data(M, 3), name="t", task="image_classification").numpy().tobytes()
        == plain.tobytes()
    )
    task = asking()
    grouped = attributor.score(task.ask("gap", data(M, 3), groups=[0] * M), name="g", task=task)
    single = attributor.score(data(M, 3), name="s", task=gap)
    assert grouped.shape == (N, 1)
    scale = float(abs(single.numpy()).max())
    np.testing.assert_allclose(grouped.numpy()[:, 0], single.numpy().mean(1), rtol=2e-2, atol=2e-3 * scale)
    with pytest.raises(InvalidInputError, match="adds questions to another task"):
        attributor.score(data(M, 3), task=QuestionsModelOutput("regression", {"gap": gap}))
    with pytest.raises(UnknownTaskError):
        attributor.score(data(M, 3), task="image_clasification")


def test_verify_compares_with_the_output_that_was_asked() -> None:
    train, targets = data(30, 1), data(M, 3)
    model = nn.Linear(D, C).double()
    attributor = Attributor(model, "image_classification", None, projector="none", progress=False)
    attributor.featurize(train)

    def train_fn(rows: np.ndarray, seed: int) -> nn.Module:
        made = nn.Linear(D, C).double()
        with torch.no_grad():
            made.weight.fill_(0.0)
            made.bias.fill_(0.0)
            for row in rows.tolist():
                made.weight[train.tensors[1][row]] += train.tensors[0][row]
        return made

    scores = attributor.score(targets, task=gap)
    verdict = verify(scores, train_fn, targets, budget=6)

    assert verdict.num_subsets == 6
    found = attributor.scores(task=gap).predictions
    assert found is not None
    masks = subset_masks(30, 6)
    models = [train_fn(np.flatnonzero(mask), 0) for mask in masks]
    outputs = np.array([[gap(m, (x[None],)).item() for x, _ in targets] for m in models])
    np.testing.assert_allclose(found.retrained, outputs, rtol=1e-5)
    with pytest.raises(ManifestMismatchError, match="task"):
        verify(attributor.scores(), train_fn, targets, budget=6)


def test_a_store_of_a_task_with_questions_opens_without_them(tmp_path: Any) -> None:
    model, path, task = classifier(), tmp_path / "rows.zarr", asking()
    attributor = Attributor(model, task, path, proj_dim=8, progress=False)
    attributor.featurize(data(N, 1))
    expected = attributor.score(data(M, 3), name="plain").numpy()

    opened = Attributor.open(path, model)

    assert opened.task.name == "image_classification"
    assert opened.score(data(M, 3), name="plain").numpy().tobytes() == expected.tobytes()


def test_names_of_rows_do_not_hide_another_question(tmp_path: Any) -> None:
    model = classifier()
    task = asking(neuron=ActivationModelOutput("1", torch.eye(5)[2]))
    attributor = Attributor(model, task, None, proj_dim=8, progress=False)
    attributor.featurize(data(N, 1))
    named = Rows(data(M, 3), name="targets of today", indices=[2, 0, 1], batch_size=2)
    found = attributor.score(task.ask("gap", named), name="t").numpy()

    plain = attributor.score(task.ask("gap", data(M, 3)), name="plain").numpy()
    np.testing.assert_allclose(found, plain[:, [2, 0, 1]], rtol=1e-3, atol=1e-5)
    with pytest.raises(ManifestMismatchError):
        attributor.score(task.ask("neuron", named), name="t")


class Lists(torch.utils.data.Dataset):
    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.rows[row]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad ids by 0 and labels by -100."""
    fill = {"labels": -100, "chosen_labels": -100, "rejected_labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=fill.get(name, 0)
        )
        for name in rows[0]
    }


def test_a_language_model_is_asked_which_answer_it_prefers() -> None:
    """Train rows are texts, targets are pairs of answers of other lengths; both are padded in their batches."""
    model = prepared(LanguageModel())
    texts = [{"input_ids": (ids := randint(V, (4 + i % 3,), 50 + i)), "labels": ids} for i in range(N)]
    pairs = [
        {
            "chosen_input_ids": (chosen := randint(V, (3 + i % 2,), 70 + i)),
            "chosen_labels": chosen,
            "rejected_input_ids": (rejected := randint(V, (5,), 90 + i)),
            "rejected_labels": rejected,
        }
        for i in range(4)
    ]
    task = QuestionsModelOutput("causal_language_modeling", {"answers": "answer_difference"})
    attributor = Attributor(model, task, None, method=GradDot(), collate=padded, batch_size=4, **EXACT)
    attributor.featurize(Lists(texts))

    loader = DataLoader(Lists(pairs), batch_size=3, collate_fn=padded)
    scores = attributor.score(task.ask("answers", loader), name="answers").numpy()

    def log_p(ids: Tensor) -> Tensor:
        logits = model(ids[None])["logits"][0, :-1]
        return -nn.functional.cross_entropy(logits, ids[1:], reduction="sum")

    rows = np.stack([flat_gradient(log_p(text["input_ids"]), model) for text in texts])
    asked = np.stack(
        [
            flat_gradient(log_p(pair["chosen_input_ids"]) - log_p(pair["rejected_input_ids"]), model)
            for pair in pairs
        ]
    )
    np.testing.assert_allclose(scores, rows @ asked.T, rtol=1e-4, atol=1e-4)


class Tower(nn.Module):
    """States of tokens, after a layer that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(V, 4), Pair(), nn.Linear(5, V)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.block(self.embed(input_ids))[0])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(self.layer(states)), None


COMPUTERS = {"hook": HookGradientComputer, "functional": FunctionalGradientComputer}


@pytest.mark.parametrize("position", ["mean", "sum", "first", "last", 1, -2])
@pytest.mark.parametrize("computer", COMPUTERS.values(), ids=COMPUTERS)
def test_an_activation_along_a_direction_has_the_gradient_of_a_plain_loop(
    position: Any, computer: Any
) -> None:
    model, direction = prepared(Tower()), randn(5, seed=60)
    ids, mask = randint(V, (B, T), 61), torch.ones(B, T, dtype=torch.long)
    mask[1, 4:] = 0
    mask[2, :2] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    task = ActivationModelOutput("block", direction, position=position)

    found = collect_gradients(computer(model, task), batch)
    output = task.evaluate(ModelCall(model), batch).output

    for i in range(B):
        along = torch.tanh(model.block.layer(model.embed(ids[i]))) @ direction
        kept = [t for t in range(T) if mask[i, t]]
        expected = {
            "mean": along[kept].mean(),
            "sum": along[kept].sum(),
            "first": along[kept[0]],
            "last": along[kept[-1]],
            1: along[1],
            -2: along[-2],
        }[position]
        torch.testing.assert_close(output[i], expected)
        plain = flat_gradient(expected, model)
        ours = [
            found[name][i].flatten() if name in found else torch.zeros(p.numel(), dtype=torch.float64)
            for name, p in model.named_parameters()
        ]
        np.testing.assert_allclose(torch.cat(ours).numpy(), plain, rtol=1e-9, atol=1e-12)
    assert not any(module._forward_hooks for module in model.modules())


def test_channels_of_convolutions_are_axis_one() -> None:
    model = prepared(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)))
    images, direction = randn(B, 1, 4, 4, seed=62), randn(3, seed=63)

    task = ActivationModelOutput("1", direction, channels_first=True)
    found = task.evaluate(ModelCall(model), (images, torch.zeros(B))).output
    alone = task.evaluate(ModelCall(model), images).output

    maps = torch.tanh(model[0](images))
    expected = torch.stack([(m * direction[:, None, None]).sum(0).mean() for m in maps])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(alone, expected)


def test_a_state_of_a_sample_is_used_as_it_is() -> None:
    model, x = classifier(), randn(B, D, seed=64)

    found = ActivationModelOutput("0", torch.eye(5)[1].float()).evaluate(ModelCall(model), (x, x)).output

    torch.testing.assert_close(found, model[0](x)[:, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": torch.ones(2, 2)}, "no vector of finite numbers"),
        ({"direction": torch.tensor([1.0, torch.nan])}, "no vector of finite numbers"),
        ({"direction": torch.ones(5, dtype=torch.long)}, "has dtype torch.int64"),
        ({"position": "middle"}, "position must be one of"),
        ({"position": True}, "position must be one of"),
    ],
)
def test_settings_of_activations_are_checked(options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ActivationModelOutput("0", **{"direction": torch.ones(5), **options})


@pytest.mark.parametrize(
    ("module", "size", "position", "message"),
    [
        ("blok", 5, "mean", r"Unknown module: \['blok'\]. Nearest known: \['block'\]"),
        ("block", 4, "mean", "Expected 4 channels"),
        ("block", 5, T, f"position={T} does not exist"),
        ("unused", 5, "mean", "does not call its module 'unused'"),
    ],
)
def test_activations_that_do_not_exist_are_refused(
    module: str, size: int, position: Any, message: str
) -> None:
    model = prepared(Tower())
    model.unused = nn.Identity()

    with pytest.raises(InvalidInputError, match=message):
        ActivationModelOutput(module, torch.ones(size), position=position).evaluate(
            ModelCall(model), {"input_ids": randint(V, (B, T), 1)}
        )
    assert not any(part._forward_hooks for part in model.modules())


def test_a_direction_is_part_of_the_description_and_cannot_change() -> None:
    direction = torch.ones(3)
    task = ActivationModelOutput("0", direction)
    before = describe_task(task)
    direction[0] = 2.0

    assert describe_task(task) == before
    assert describe_task(ActivationModelOutput("0", direction)) != before
    assert describe_task(ActivationModelOutput("0", torch.ones(3), position="last")) != before


def test_the_rest_is_that_of_the_task() -> None:
    multilabel = QuestionsModelOutput(MultiLabelModelOutput(), {"gap": gap})
    text = QuestionsModelOutput(CausalLanguageModelingModelOutput(), {"gap": gap})
    clip = QuestionsModelOutput("clip", {"gap": gap})

    assert multilabel.has_curvature
    assert not text.has_curvature
    assert multilabel.log_likelihood().settings() == {"output": "log_prob"}
    assert text.can_sample
    assert not clip.can_sample
    assert clip.state_digest() is None
    attributor = Attributor(prepared(LanguageModel()), text, None, proj_dim=8, progress=False)
    assert attributor.method.name == "Fisher"


def test_questions_that_do_not_fit_are_refused() -> None:
    task = asking()

    with pytest.raises(InvalidInputError, match="questions is empty"):
        QuestionsModelOutput("image_classification", {})
    with pytest.raises(UnknownTaskError, match="Did you mean 'answer_difference'"):
        asking(answers="answer_diference")
    with pytest.raises(InvalidInputError, match=r"Unknown questions: .*'gab'"):
        task.ask("gab", data(M, 3))
    with pytest.raises(InvalidInputError, match="2 labels of groups for 6 samples"):
        task.ask("gap", data(M, 3), groups=[0, 1])
    with pytest.raises(InvalidInputError, match="reduction must be one of"):
        task.ask("gap", data(M, 3), reduction="max")
    other = QuestionsModelOutput("image_classification", {"gap": lambda call, batch: call(batch[0])[:, 0]})
    attributor = Attributor(classifier(), task, None, proj_dim=8, progress=False)
    attributor.featurize(data(N, 1))
    with pytest.raises(InvalidInputError, match="the question 'gap' of this task"):
        attributor.score(other.ask("gap", data(M, 3)), name="other")
