"""Cases for tasks whose f is made of logits and labels; losses are plain loops, independent of the package."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trak_lite import modelout_functions as tasks
from trak_lite.testing import ModelOutputCase
from trak_lite.types import OutputTerms

B, C, D, T, V = 4, 3, 5, 6, 7
IGNORED = -100


def randn(*shape: int, seed: int) -> Tensor:
    return torch.as_tensor(np.random.RandomState(seed).standard_normal(shape))


def randint(high: int, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).randint(high, size=shape).astype(np.int64))


def prepared(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and eval mode with seeded parameters."""
    model, random = model.double().eval(), np.random.RandomState(seed)
    for parameter in model.parameters():
        parameter.data.copy_(0.5 * randn(*parameter.shape, seed=random.randint(2**31)))
    return model


# Models


class Answer(nn.Module):
    """Gives the same answer whatever the input."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer


def mlp(outputs: int) -> nn.Module:
    return prepared(nn.Sequential(nn.Flatten(), nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, outputs)))


class TextModel(nn.Module):
    """Masked mean of token and type embeddings; answers as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.types, self.head = nn.Embedding(V, 4), nn.Embedding(2, 4), nn.Linear(4, C)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        mask = attention_mask.unsqueeze(-1).double()
        states = (self.tokens(input_ids) + self.types(token_type_ids)) * mask
        return SimpleNamespace(logits=self.head(states.sum(1) / mask.sum(1)))


class LanguageModel(nn.Module):
    """Causal running mean of token embeddings; answers with a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask.unsqueeze(-1).double()
        sums = (self.tokens(input_ids) * mask).cumsum(1)
        return {"logits": self.head(torch.tanh(sums / mask.cumsum(1).clamp(min=1.0)))}


class EncoderDecoder(nn.Module):
    """The running mean of the decoder's tokens, shifted by the mean of the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> dict[str, Tensor]:
        counts = torch.arange(1, decoder_input_ids.shape[1] + 1).double()[:, None]
        states = self.tokens(decoder_input_ids).cumsum(1) / counts
        return {"logits": self.head(torch.tanh(states + self.tokens(input_ids).mean(1, keepdim=True)))}


class PixelModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, C, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"out": self.last(torch.tanh(self.first(image)))}


class PairModel(nn.Module):
    """Two linear towers on the sphere and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image_tower, self.text_tower = nn.Linear(D, 3), nn.Linear(4, 3)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        phi = F.normalize(self.image_tower(image), dim=-1)
        psi = F.normalize(self.text_tower(text), dim=-1)
        return phi, psi, self.log_scale.exp()


# Losses of one sample, from the logits and the label of each of its positions

Pairs = list[tuple[Tensor, int]]


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def log_odds(logits: Tensor, label: int) -> Tensor:
    """log(p / (1 - p)) from the softmax itself."""
    p = torch.softmax(logits, -1)[label]
    return torch.log(p / (1 - p))


def loss_of_pairs(output: str, pairs: Pairs) -> Tensor:
    """The summed cross-entropy, or n log(1 + exp(-mean margin)); the same thing for n = 1."""
    if output == "margin" and len(pairs) > 1:
        return len(pairs) * softplus(-sum(log_odds(logits, y) for logits, y in pairs) / len(pairs))
    return -sum(torch.log(torch.softmax(logits, -1)[label]) for logits, label in pairs)


def pairs_of(logits: Tensor, labels: Tensor, *, offset: int = 0, ignored: int = IGNORED) -> list[Pairs]:
    """Pairs of each row of logits ``(B, T, V)`` and labels ``(B, T)``; logits lie ``offset`` before their label."""
    return [
        [(row[t - offset], y) for t, y in enumerate(some) if t >= offset and y != ignored]
        for row, some in zip(logits, labels.tolist(), strict=True)
    ]


def binary_pairs(logits: Tensor, labels: Tensor) -> list[Pairs]:
    """A logit l is the pair of logits (0, l) of two classes."""
    return pairs_of(torch.stack([torch.zeros_like(logits), logits], -1), labels)


def case_of(task, model, batch, pairs, *, output="margin", invalid=()):
    counts = torch.tensor([len(some) for some in pairs(model)])
    return ModelOutputCase(
        task=task,
        model=model,
        batch=batch,
        loss=lambda model, batch: torch.stack([loss_of_pairs(output, some) for some in pairs(model)]),
        loss_of_output=(lambda f: counts * softplus(-f / counts)) if output == "margin" else torch.neg,
        invalid=invalid,
    )


def changed(part: Tensor, place: tuple[Any, ...], value: float) -> Tensor:
    part = part.clone()
    part[place] = value
    return part


# Cases


@dataclass
class ImageBatch:
    input: Tensor
    label: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda images, labels: (images, labels),
    "dict": lambda images, labels: {"label": labels, "input": images},
    "dataclass": ImageBatch,
}


def image_case(task: tasks.AbstractModelOutput, form: str = "tuple") -> ModelOutputCase:
    images, labels, batch = randn(B, D, seed=1), torch.tensor([0, 2, 1, 2]), FORMS[form]
    return case_of(
        task,
        mlp(C),
        batch(images, labels),
        lambda model: pairs_of(model(images)[:, None], labels[:, None]),
        invalid=[(batch(images, changed(labels, (row,), value)), row) for row, value in ((2, C), (1, -1))],
    )


def text_parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = torch.tensor([[1] * T, [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1] * T])
    return randint(V, (B, T), 2), randint(2, (B, T), 3), mask, torch.tensor([1, 0, 2, 2])


def text_case(*, as_dict: bool) -> ModelOutputCase:
    ids, types, mask, labels = text_parts()

    def batch(labels: Tensor) -> Any:
        if as_dict:
            return {"labels": labels, "input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return ids, types, mask, labels

    return case_of(
        tasks.TextClassificationModelOutput(),
        prepared(TextModel()),
        batch(labels),
        lambda model: pairs_of(model(ids, types, mask).logits[:, None], labels[:, None]),
        invalid=[(batch(changed(labels, (3,), 99)), 3)],
    )


def binary_case(*, column: bool) -> ModelOutputCase:
    inputs, labels = randn(B, D, seed=4), torch.tensor([0, 1, 1, 0])
    return case_of(
        tasks.BinaryClassificationModelOutput(),
        mlp(1) if column else nn.Sequential(mlp(1), nn.Flatten(0)),
        (inputs, labels),
        lambda model: binary_pairs(model(inputs).reshape(B, 1), labels[:, None]),
        invalid=[((inputs, changed(labels, (2,), 2)), 2), ((inputs, changed(labels.double(), (3,), 0.5)), 3)],
    )


def multilabel_case(output: str) -> ModelOutputCase:
    inputs, labels = randn(B, D, seed=5), randint(2, (B, C), 6)
    return case_of(
        tasks.MultiLabelModelOutput(output=output),
        mlp(C),
        (inputs, labels),
        lambda model: binary_pairs(model(inputs), labels),
        output=output,
        invalid=[((inputs, changed(labels, (1, 2), -1)), 1)],
    )


def regression_case(output: str, outputs: int = 1) -> ModelOutputCase:
    """Predictions ``(B, 1)`` have targets ``(B,)``."""
    scalar = output == "prediction"
    inputs, targets = randn(B, D, seed=7), randn(B, *() if scalar else (outputs,), seed=8)
    return ModelOutputCase(
        task=tasks.RegressionModelOutput(output=output),
        model=mlp(outputs),
        batch=(inputs, targets),
        loss=lambda model, batch: (model(batch[0]) - batch[1].reshape(B, -1)).pow(2).sum(1) / 2,
        loss_of_output=(lambda f: (f - targets).pow(2) / 2) if scalar else torch.neg,
        invalid=[((inputs, changed(targets, (2, ...), torch.nan)), 2)],
    )


def language_labels(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[1, 3:] = IGNORED
    labels[2, :4] = IGNORED
    return labels


def language_case(output: str, *, shift: bool = True, form: str = "dict") -> ModelOutputCase:
    ids = randint(V, (B, T), 9)
    mask, labels, offset = (
        changed(torch.ones_like(ids), (1, slice(3, None)), 0),
        language_labels(ids),
        int(shift),
    )

    def batch(labels: Tensor) -> Any:
        if form == "dict":
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return (ids, labels) if form == "pair" else (ids, mask, labels)

    return case_of(
        tasks.CausalLanguageModelingModelOutput(output=output, shift=shift),
        prepared(LanguageModel()),
        batch(labels),
        lambda model: pairs_of(model(ids, None if form == "pair" else mask)["logits"], labels, offset=offset),
        output=output,
        invalid=[
            (batch(changed(labels, (3, 2), V)), 3),
            (batch(changed(labels, (0, slice(offset, None)), IGNORED)), 0),
        ],
    )


def masked_case(output: str) -> ModelOutputCase:
    ids, labels = randint(V, (B, T), 20), language_labels(randint(V, (B, T), 21))
    wrong = (changed(labels, (3, 0), V), 3), (changed(labels, (0,), IGNORED), 0)
    return case_of(
        tasks.MaskedLanguageModelingModelOutput(output=output),
        prepared(LanguageModel()),
        {"input_ids": ids, "labels": labels},
        lambda model: pairs_of(model(ids)["logits"], labels),
        output=output,
        invalid=[({"input_ids": ids, "labels": some}, row) for some, row in wrong],
    )


def seq2seq_case(output: str, *, explicit: bool) -> ModelOutputCase:
    """Start token 1, padding token 0."""
    ids, labels = randint(V, (B, 3), 22), language_labels(randint(V, (B, T), 23))
    decoder = torch.tensor([[1, *(0 if y == IGNORED else y for y in row[:-1])] for row in labels.tolist()])
    more = {"decoder_input_ids": decoder} if explicit else {}
    # The last label: any other one is an input of the decoder, whose embedding would fail first.
    wrong = (changed(labels, (3, T - 1), V), 3), (changed(labels, (0,), IGNORED), 0)
    tokens = {} if explicit else {"decoder_start_token_id": 1, "pad_token_id": 0}
    return case_of(
        tasks.SequenceToSequenceModelOutput(output=output, **tokens),
        prepared(EncoderDecoder()),
        {"input_ids": ids, "labels": labels, **more},
        lambda model: pairs_of(model(ids, decoder)["logits"], labels),
        output=output,
        invalid=[({"input_ids": ids, "labels": some, **more}, row) for some, row in wrong],
    )


def dense_case(output: str) -> ModelOutputCase:
    """Images of 4 x 5 pixels, 255 for no label."""
    images, labels = randn(B, 1, 4, 5, seed=24), randint(C, (B, 4, 5), 25)
    labels[1, :2] = 255
    labels[2, 1:, :4] = 255
    return case_of(
        tasks.DenseClassificationModelOutput(output=output, ignore_index=255),
        prepared(PixelModel()),
        (images, labels),
        lambda model: pairs_of(
            model(images)["out"].flatten(2).transpose(1, 2), labels.flatten(1), ignored=255
        ),
        output=output,
        invalid=[((images, changed(labels, (3, 2, 2), C)), 3), ((images, changed(labels, (2,), 255)), 2)],
    )


def dense_token_case() -> ModelOutputCase:
    """Classes on the last axis, as of tokens or of a detector's queries."""
    ids, labels = randint(V, (B, T), 26), language_labels(randint(V, (B, T), 27))
    return case_of(
        tasks.DenseClassificationModelOutput(class_axis=-1),
        prepared(LanguageModel()),
        {"input_ids": ids, "labels": labels},
        lambda model: pairs_of(model(ids)["logits"], labels),
        output="log_prob",
    )


def clip_case(temperature: float | None = None) -> ModelOutputCase:
    model, bank_image, bank_text = prepared(PairModel()), randn(9, 3, seed=10), randn(9, 3, seed=11)
    task = tasks.CLIPModelOutput(temperature, simulated_batch_size=4, seed=3)
    task.set_embeddings(bank_image, bank_text)
    chosen = torch.randperm(9, generator=torch.Generator().manual_seed(3))[:4].tolist()
    s = model.log_scale.exp().item() if temperature is None else temperature

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = []
        for phi, psi in zip(*model(**batch)[:2], strict=True):
            by_text = sum(torch.exp(-(phi @ (psi - bank_text[j]))) for j in chosen)
            by_image = sum(torch.exp(-(psi @ (phi - bank_image[j]))) for j in chosen)
            losses.append(2 / s * softplus(s / 2 * (torch.log(by_text) + torch.log(by_image))))
        return torch.stack(losses)

    return ModelOutputCase(
        task=task,
        model=model,
        batch={"image": randn(B, D, seed=12), "text": randn(B, 4, seed=13)},
        loss=loss,
        loss_of_output=lambda f: 2 / s * softplus(-s * f / 2),
    )


def mean_of_squares(model_call: Any, batch: Any) -> Tensor:
    return model_call(batch[0]).square().mean(1)


def callable_case() -> ModelOutputCase:
    return ModelOutputCase(
        task=tasks.CallableModelOutput(mean_of_squares),
        model=mlp(C),
        batch=(randn(B, D, seed=14),),
        loss=lambda model, batch: -sum(model(batch[0])[:, j] ** 2 for j in range(C)) / C,
        loss_of_output=torch.neg,
    )


BUILDERS: dict[str, Callable[[], ModelOutputCase]] = {
    **{
        f"image_classification-{form}": lambda form=form: image_case(
            tasks.ImageClassificationModelOutput(), form
        )
        for form in FORMS
    },
    "iterative_image_classification-tuple": lambda: image_case(tasks.IterativeImageClassificationModelOutput()),
    "text_classification-positional": lambda: text_case(as_dict=False),
    "text_classification-dict": lambda: text_case(as_dict=True),
    "binary_classification-column": lambda: binary_case(column=True),
    "binary_classification-flat": lambda: binary_case(column=False),
    "multilabel_classification-margin": lambda: multilabel_case("margin"),
    "multilabel_classification-log_prob": lambda: multilabel_case("log_prob"),
    "regression-prediction": lambda: regression_case("prediction"),
    "regression-neg_squared_error": lambda: regression_case("neg_squared_error", outputs=C),
    "causal_language_modeling-margin": lambda: language_case("margin"),
    "causal_language_modeling-log_prob": lambda: language_case("log_prob"),
    "causal_language_modeling-unshifted": lambda: language_case("margin", shift=False, form="triple"),
    "causal_language_modeling-pair": lambda: language_case("margin", form="pair"),
    "clip-model-scale": clip_case,
    "clip-temperature": lambda: clip_case(2.5),
    "callable": callable_case,
}  # fmt: skip
"""By task name and variant; what ``tests/attributor`` scores as well."""
POSITIONS: dict[str, Callable[[], ModelOutputCase]] = {
    "masked_language_modeling-margin": lambda: masked_case("margin"),
    "masked_language_modeling-log_prob": lambda: masked_case("log_prob"),
    "sequence_to_sequence-margin": lambda: seq2seq_case("margin", explicit=True),
    "sequence_to_sequence-log_prob": lambda: seq2seq_case("log_prob", explicit=False),
    "dense_classification-margin": lambda: dense_case("margin"),
    "dense_classification-log_prob": lambda: dense_case("log_prob"),
    "dense_classification-tokens": dense_token_case,
}


def terms_of_logits(task: tasks.AbstractModelOutput, logits: Any, labels: Any) -> OutputTerms:
    """Terms for a model that answers with its input."""
    return task.evaluate(tasks.ModelCall(nn.Identity()), (logits, labels))


def identity_of(task: Any) -> dict[str, Any]:
    """What tells targets that a task asks from those of another one, for the same data; a task may be a function."""
    asked = tasks.QuestionsModelOutput("regression", {"f": task}).ask("f", TensorDataset(torch.zeros(1, 1)))
    return asked.identity()


# Gradients


def gradients_of(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The flat gradient of each trained parameter."""
    kept = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(
        value, list(kept.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return {name: grad.flatten() for name, grad in zip(kept, grads, strict=True)}


def check_gradients(computer: Any, batch: Any, values: Iterable[Tensor], **close: float) -> None:
    """Hold q times the gradients of f against those of one value for each row."""
    found: dict[str, Tensor] = {}
    terms = computer.stream_gradients(batch, lambda block: found.update({block.name: block.dense()}))
    for row, (q, value) in enumerate(zip(terms.out_to_loss_grad, values, strict=True)):
        for name, expected in gradients_of(value, computer.model).items():
            ours = found[name][row] if name in found else torch.zeros_like(expected)
            torch.testing.assert_close(q * ours, expected, **close)
