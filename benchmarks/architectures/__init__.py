"""What an entry of the zoo is: a published architecture in a tiny configuration, its samples and its f."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.whole_path import Samples

VOCABULARY, PAD, CLASSES, TOKENS = 40, 0, 3, 8

MakeSample = Callable[[torch.Generator, int], Any]
"""``(generator, number)`` gives one sample."""


@dataclass(frozen=True)
class Architecture:
    """A published architecture; ``build`` draws its weights from torch's random numbers."""

    name: str
    domain: str
    build: Callable[[], nn.Module]
    sample: MakeSample
    task: Any
    output: Callable[[nn.Module, Any], Tensor]
    """f, written without trak_lite."""
    tokens: bool = False
    """Whether the task is causal language modelling."""
    draws: bool = False
    """Whether the model draws random numbers in eval mode."""

    def make(self) -> nn.Module:
        """Return the model, the same one at each call, without a change of the random numbers around it."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of those who build the model; what trak_lite does comes later
            torch.manual_seed(0)
            model = self.build()
            # Many configurations begin with zeros or ones in biases, norms and gates, where mistakes cancel.
            with torch.no_grad():
                for p in model.parameters():
                    if p.is_floating_point() and p.requires_grad:
                        p.add_(torch.randn_like(p), alpha=0.02)
        return model

    def samples(self, count: int, seed: int) -> Samples:
        generator = torch.Generator().manual_seed(seed)
        return Samples([self.sample(generator, number) for number in range(count)])


# --- Samples ---------------------------------------------------------------------------------------------


def ids(generator: torch.Generator, length: int = TOKENS, *, low: int = 4, high: int = VOCABULARY) -> Tensor:
    return torch.randint(low, high, (length,), generator=generator)


def label(generator: torch.Generator, classes: int = CLASSES) -> Tensor:
    return torch.randint(classes, (), generator=generator)


def padded(values: Tensor, length: int, fill: int) -> Tensor:
    """Return the values with everything from ``length`` on replaced."""
    return torch.where(torch.arange(len(values)) < length, values, torch.tensor(fill))


def text(generator: torch.Generator, number: int) -> dict[str, Tensor]:
    """Ids with padding on the right, and a class."""
    length = TOKENS - number % 3
    mask = padded(torch.ones(TOKENS, dtype=torch.long), length, 0)
    return {
        "input_ids": padded(ids(generator), length, PAD),
        "attention_mask": mask,
        "labels": label(generator),
    }


def continued_text(generator: torch.Generator, number: int) -> dict[str, Tensor]:
    """Ids with padding on the right; labels are the ids."""
    length = TOKENS - number % 3
    row = ids(generator)
    mask = padded(torch.ones(TOKENS, dtype=torch.long), length, 0)
    return {
        "input_ids": padded(row, length, PAD),
        "attention_mask": mask,
        "labels": padded(row, length, -100),
    }


def unmasked(sample: MakeSample) -> MakeSample:
    """Leave the attention mask out, for models that take none."""

    def made(generator: torch.Generator, number: int) -> dict[str, Tensor]:
        return {key: value for key, value in sample(generator, 0).items() if key != "attention_mask"}

    return made


def translation(generator: torch.Generator, number: int) -> dict[str, Tensor]:
    source = text(generator, number)
    target = ids(generator, TOKENS - 2)
    return {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "decoder_input_ids": torch.cat([torch.tensor([2]), target[:-1]]),
        "labels": target,
    }


def image(size: int = 32, channels: int = 3) -> MakeSample:
    def made(generator: torch.Generator, number: int) -> tuple[Tensor, Tensor]:
        return torch.randn(channels, size, size, generator=generator), label(generator)

    return made


def tensors(*shape: int) -> MakeSample:
    """One tensor of this shape, and a class."""

    def made(generator: torch.Generator, number: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, generator=generator), label(generator)

    return made


def named(**shapes: tuple[int, ...]) -> MakeSample:
    """Tensors of these shapes by name: ids where the name says so, ones for masks, else normal numbers; a class."""

    def drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if "mask" in name:
            return torch.ones(shape, dtype=torch.long)
        if name.endswith(("ids", "labels")):
            return torch.randint(4, VOCABULARY, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    def made(generator: torch.Generator, number: int) -> dict[str, Tensor]:
        return {name: drawn(name, shape, generator) for name, shape in shapes.items()} | {
            "labels": label(generator)
        }

    return made


# --- f, twice: as trak_lite is told, and as the reference has it -----------------------------------------


def logits_of(answer: Any) -> Tensor:
    if isinstance(answer, Tensor):
        return answer
    if isinstance(answer, Mapping):
        return answer["logits"] if "logits" in answer else next(iter(answer.values()))
    return answer[0]


def call_with_labels(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return logits_of(model(**inputs)), batch["labels"]
    *inputs, labels = batch
    return logits_of(model(*inputs)), labels


def class_margin(model: nn.Module, batch: Any) -> Tensor:
    """Log p - log (1 - p) of the label, by a loop over samples."""
    logits, labels = call_with_labels(model, batch)
    rows = []
    for row, chosen in zip(logits, labels.tolist(), strict=True):
        others = torch.cat([row[:chosen], row[chosen + 1 :]])
        rows.append(row[chosen] - others.logsumexp(0))
    return torch.stack(rows)


def next_token_log_prob(model: nn.Module, batch: Any) -> Tensor:
    """Sum of log p of the predicted tokens, by a loop over samples and positions."""
    logits, labels = call_with_labels(model, batch)
    rows = []
    for row, wanted in zip(logits, labels.tolist(), strict=True):
        terms = [
            row[position].log_softmax(0)[token] for position, token in enumerate(wanted[1:]) if token != -100
        ]
        rows.append(torch.stack(terms).sum())
    return torch.stack(rows)


def token_log_prob(call: Any, batch: Any) -> Tensor:
    """Sum of log p of every label at its own position: decoders with inputs of their own, taggers, pixels."""
    logits, labels = call_with_labels(call, batch)
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).flatten(1).sum(1)


def last_tokens_log_prob(call: Any, batch: Any) -> Tensor:
    """As language models are trained, where the model puts tokens of its own in front of those that it is given."""
    logits, labels = call_with_labels(call, batch)
    logits, wanted = logits[:, -labels.shape[1] : -1], labels[:, 1:]
    found = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (found * (wanted >= 0)).sum(1)


def squares(call: Any, batch: Any) -> Tensor:
    """A number that every entry of the first output enters differently, for models without labels."""
    inputs = (
        {key: value for key, value in batch.items() if key != "labels"} if isinstance(batch, Mapping) else {}
    )
    answer = call(**inputs) if inputs else call(*batch[:-1])
    values = logits_of(answer).flatten(1)
    weights = torch.cos(torch.arange(values.shape[1], dtype=values.dtype))
    return (values * weights + values.square()).sum(1)


def classifier(
    name: str,
    domain: str,
    build: Callable[[], nn.Module],
    sample: MakeSample,
    task: str = "image_classification",
) -> Architecture:
    return Architecture(name, domain, build, sample, task, class_margin)


def language_model(
    name: str, domain: str, build: Callable[[], nn.Module], sample: MakeSample, **more: Any
) -> Architecture:
    task = "causal_language_modeling"
    return Architecture(name, domain, build, sample, task, next_token_log_prob, tokens=True, **more)


def with_own_f(
    name: str,
    domain: str,
    build: Callable[[], nn.Module],
    sample: MakeSample,
    f: Callable[..., Tensor],
    **more: Any,
) -> Architecture:
    return Architecture(name, domain, build, sample, f, f, **more)
