"""Cases for every registered model output function, with losses written independently of the package."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trak_lite.modelout_functions import (
    AbstractModelOutput,
    BinaryClassificationModelOutput,
    CallableModelOutput,
    CausalLanguageModelingModelOutput,
    CLIPModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    ModelCall,
    MultiLabelModelOutput,
    RegressionModelOutput,
    TextClassificationModelOutput,
)
from trak_lite.testing.modelout import ModelOutputCase
from trak_lite.types import OutputTerms

B, C, D, T, V = 4, 3, 5, 6, 7


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def randint(high: int, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(0, high, shape, generator=seeded(seed))


def prepared(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and eval mode with seeded parameters."""
    model = model.double().eval()
    generator = seeded(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(0.5 * drawn)
    return model


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


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def mean_margin_loss(margins: list[Tensor]) -> Tensor:
    """n * log(1 + exp(-mean margin)) of one sample's margins."""
    return len(margins) * softplus(-sum(margins) / len(margins))


def log_odds(logits: Tensor, label: int) -> Tensor:
    """log(p / (1 - p)) from the softmax itself."""
    p = torch.softmax(logits, -1)[label]
    return torch.log(p / (1 - p))


def image_case(task) -> ModelOutputCase:
    images, labels = randn(B, D, seed=1), torch.tensor([0, 2, 1, 2])
    return ModelOutputCase(
        task=task,
        model=mlp(C),
        batch=(images, labels),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        loss_of_output=lambda f: softplus(-f),
        invalid=[((images, torch.tensor([0, 1, C, 2])), 2), ((images, torch.tensor([0, -1, 1, 2])), 1)],
    )


def image_dict_case() -> ModelOutputCase:
    case = image_case(ImageClassificationModelOutput())
    images, labels = case.batch
    return ModelOutputCase(
        task=case.task,
        model=case.model,
        batch={"label": labels, "input": images},
        loss=lambda model, batch: F.cross_entropy(model(batch["input"]), batch["label"], reduction="none"),
        loss_of_output=case.loss_of_output,
        invalid=[({"label": bad[1], "input": bad[0]}, sample) for bad, sample in case.invalid],
    )


@dataclass
class ImageBatch:
    input: Tensor
    label: Tensor


def image_dataclass_case() -> ModelOutputCase:
    case = image_case(ImageClassificationModelOutput())
    return ModelOutputCase(
        task=case.task,
        model=case.model,
        batch=ImageBatch(*case.batch),
        loss=lambda model, batch: F.cross_entropy(model(batch.input), batch.label, reduction="none"),
        loss_of_output=case.loss_of_output,
        invalid=[(ImageBatch(*bad), sample) for bad, sample in case.invalid],
    )


def text_parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = torch.tensor([[1] * T, [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1] * T])
    return randint(V, (B, T), 2), randint(2, (B, T), 3), mask, torch.tensor([1, 0, 2, 2])


def text_case(*, as_dict: bool) -> ModelOutputCase:
    ids, types, mask, labels = text_parts()

    def batch(labels: Tensor):
        if as_dict:
            return {"labels": labels, "input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return ids, types, mask, labels

    def loss(model: nn.Module, batch) -> Tensor:
        return F.cross_entropy(model(ids, types, mask).logits, labels, reduction="none")

    return ModelOutputCase(
        task=TextClassificationModelOutput(),
        model=prepared(TextModel()),
        batch=batch(labels),
        loss=loss,
        loss_of_output=lambda f: softplus(-f),
        invalid=[(batch(torch.tensor([1, 0, 2, 99])), 3)],
    )


def binary_case(*, column: bool) -> ModelOutputCase:
    inputs, labels = randn(B, D, seed=4), torch.tensor([0, 1, 1, 0])
    model = mlp(1) if column else nn.Sequential(mlp(1), nn.Flatten(0))

    def loss(model: nn.Module, batch) -> Tensor:
        flat = model(batch[0]).reshape(-1)
        return F.binary_cross_entropy_with_logits(flat, batch[1].double(), reduction="none")

    return ModelOutputCase(
        task=BinaryClassificationModelOutput(),
        model=model,
        batch=(inputs, labels),
        loss=loss,
        loss_of_output=lambda f: softplus(-f),
        invalid=[
            ((inputs, torch.tensor([0, 1, 2, 0])), 2),
            ((inputs, torch.tensor([0.0, 1.0, 0.0, 0.5])), 3),
        ],
    )


def multilabel_case(output: str) -> ModelOutputCase:
    inputs, labels = randn(B, D, seed=5), randint(2, (B, C), 6)
    invalid = labels.clone()
    invalid[1, 2] = -1

    def loss(model: nn.Module, batch) -> Tensor:
        logits = model(batch[0])
        if output == "log_prob":
            return F.binary_cross_entropy_with_logits(logits, batch[1].double(), reduction="none").sum(1)
        return torch.stack(
            [
                mean_margin_loss([logit if y else -logit for logit, y in zip(row, ys, strict=True)])
                for row, ys in zip(logits, batch[1].tolist(), strict=True)
            ]
        )

    return ModelOutputCase(
        task=MultiLabelModelOutput(output=output),
        model=mlp(C),
        batch=(inputs, labels),
        loss=loss,
        loss_of_output=(lambda f: C * softplus(-f / C)) if output == "margin" else torch.neg,
        invalid=[((inputs, invalid), 1)],
    )


def regression_case(output: str, outputs: int = 1) -> ModelOutputCase:
    inputs, targets = randn(B, D, seed=7), randn(B, outputs, seed=8)
    invalid = targets.clone()
    invalid[2, 0] = torch.nan
    scalar = output == "prediction"
    return ModelOutputCase(
        task=RegressionModelOutput(output=output),
        model=mlp(outputs),
        batch=(inputs, targets),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).pow(2).sum(1) / 2,
        loss_of_output=(lambda f: (f - targets[:, 0]).pow(2) / 2) if scalar else torch.neg,
        invalid=[((inputs, invalid), 2)],
    )


def language_labels(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[1, 3:] = -100
    labels[2, :4] = -100
    return labels


def language_case(output: str, *, shift: bool = True, form: str = "dict") -> ModelOutputCase:
    ids = randint(V, (B, T), 9)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    labels = language_labels(ids)
    offset = 1 if shift else 0

    def batch(labels: Tensor):
        if form == "dict":
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return (ids, labels) if form == "pair" else (ids, mask, labels)

    def sample_loss(logits: Tensor, row: list[int]) -> Tensor:
        tokens = [(logits[t - offset], y) for t, y in enumerate(row) if t >= offset and y != -100]
        if output == "margin":
            return mean_margin_loss([log_odds(logit, y) for logit, y in tokens])
        return sum(F.cross_entropy(logit, torch.tensor(y)) for logit, y in tokens)

    def loss(model: nn.Module, batch) -> Tensor:
        logits = model(ids, None if form == "pair" else mask)["logits"]
        return torch.stack([sample_loss(*pair) for pair in zip(logits, labels.tolist(), strict=True)])

    counts = (labels[:, offset:] != -100).sum(1)
    out_of_range, empty = labels.clone(), labels.clone()
    out_of_range[3, 2] = V
    empty[0, 1:] = -100
    empty[0, 0] = -100 if not shift else empty[0, 0]
    return ModelOutputCase(
        task=CausalLanguageModelingModelOutput(output=output, shift=shift),
        model=prepared(LanguageModel()),
        batch=batch(labels),
        loss=loss,
        loss_of_output=(lambda f: counts * softplus(-f / counts)) if output == "margin" else torch.neg,
        invalid=[(batch(out_of_range), 3), (batch(empty), 0)],
    )


def clip_case(temperature: float | None = None) -> ModelOutputCase:
    model = prepared(PairModel())
    task = CLIPModelOutput(temperature, simulated_batch_size=4, seed=3)
    bank_image, bank_text = randn(9, 3, seed=10), randn(9, 3, seed=11)
    task.set_embeddings(bank_image, bank_text)
    chosen = torch.randperm(9, generator=seeded(3))[:4].tolist()
    s = model.log_scale.exp().item() if temperature is None else temperature

    def loss(model: nn.Module, batch) -> Tensor:
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


def mean_of_squares(model_call, batch) -> Tensor:
    return model_call(batch[0]).square().mean(1)


def callable_case() -> ModelOutputCase:
    return ModelOutputCase(
        task=CallableModelOutput(mean_of_squares),
        model=mlp(C),
        batch=(randn(B, D, seed=14),),
        loss=lambda model, batch: -sum(model(batch[0])[:, j] ** 2 for j in range(C)) / C,
        loss_of_output=torch.neg,
    )


CASES: dict[str, dict[str, Callable[[], ModelOutputCase]]] = {
    "image_classification": {
        "tuple": lambda: image_case(ImageClassificationModelOutput()),
        "dict": image_dict_case,
        "dataclass": image_dataclass_case,
    },
    "iterative_image_classification": {
        "tuple": lambda: image_case(IterativeImageClassificationModelOutput())
    },
    "text_classification": {
        "positional": lambda: text_case(as_dict=False),
        "dict": lambda: text_case(as_dict=True),
    },
    "binary_classification": {
        "column": lambda: binary_case(column=True),
        "flat": lambda: binary_case(column=False),
    },
    "multilabel_classification": {
        "margin": lambda: multilabel_case("margin"),
        "log_prob": lambda: multilabel_case("log_prob"),
    },
    "regression": {
        "prediction": lambda: regression_case("prediction"),
        "neg_squared_error": lambda: regression_case("neg_squared_error", outputs=C),
    },
    "causal_language_modeling": {
        "margin": lambda: language_case("margin"),
        "log_prob": lambda: language_case("log_prob"),
        "unshifted": lambda: language_case("margin", shift=False, form="triple"),
        "pair": lambda: language_case("margin", form="pair"),
    },
    "clip": {"model-scale": clip_case, "temperature": lambda: clip_case(2.5)},
}
"""Builders by task name and variant; a test fails if a registered task has none."""

BUILDERS = {f"{name}-{variant}": build for name, some in CASES.items() for variant, build in some.items()}
BUILDERS["callable"] = callable_case


def terms_of_logits(task: AbstractModelOutput, logits: Any, labels: Any) -> OutputTerms:
    """Terms for a model that answers with its input."""
    return task.evaluate(ModelCall(nn.Identity()), (logits, labels))
