"""Small models of every kind with their data, made from fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trak_lite.modelout_functions import CLIPModelOutput

NUM_ROWS, NUM_TARGETS, CLASSES, TOKENS = 14, 5, 4, 20
RECURRENT = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
}


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.group = nn.Conv2d(8, 12, 3, stride=2, groups=2), nn.GroupNorm(3, 12)
        self.head = nn.Linear(12 * 9, CLASSES)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.head(self.group(self.second(x)).relu().flatten(1))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.token, self.places = (nn.Parameter(torch.randn(1, n, 16) * 0.1) for n in (1, 5))
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class LanguageModel(nn.Module):
    """One block of a GPT, its head tied to its embedding; its positions are made on the default device or named."""

    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(8, width)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
        )  # fmt: skip
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        parts = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(x + self.out(attended.transpose(1, 2).flatten(2)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 6)
        self.layer = kind(6, 8, batch_first=True, **options)
        self.head = nn.Linear(8 * (1 + self.layer.bidirectional), CLASSES)

    def forward(self, x):
        return self.head(self.layer(self.tokens(x))[0].mean(1))


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 8))
        self.tokens, self.text = nn.Embedding(TOKENS, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        image, text = self.image(image), self.text(self.tokens(text).mean(1))
        return functional.normalize(image, dim=-1), functional.normalize(text, dim=-1), self.scale.exp()


def collate_text(rows):
    """Return sequences whose first label is not predicted."""
    ids = torch.stack([row[0] for row in rows])
    return {"input_ids": ids, "labels": ids.where(torch.arange(ids.shape[1], device=ids.device) > 1, -100)}


@dataclass
class Case:
    model: nn.Module
    task: Any
    train: TensorDataset
    targets: TensorDataset
    collate: Any = None


def _perceptron(outputs):
    return nn.Sequential(nn.Linear(10, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, outputs))


def make(name):
    """Return a case, the same at every call, on the CPU."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, device="cpu")

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator, device="cpu")

    def both(*makers):
        return [TensorDataset(*(make(n) for make in makers)) for n in (NUM_ROWS, NUM_TARGETS)]

    inputs, images = (lambda n: numbers(n, 10)), (lambda n: numbers(n, 3, 8, 8))
    tokens, labels = (lambda n: integers(TOKENS, n, 7)), (lambda n: integers(CLASSES, n))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        match name:
            case "mlp":
                return Case(_perceptron(CLASSES), "image_classification", *both(inputs, labels))
            case "cnn":
                return Case(Images(), "image_classification", *both(images, labels))
            case "vit":
                return Case(VisionTransformer(), "image_classification", *both(images, labels))
            case "gpt":
                return Case(LanguageModel(), "causal_language_modeling", *both(tokens), collate_text)
            case "lstm" | "gru" | "rnn":
                kind, options = RECURRENT[name]
                return Case(Recurrent(kind, **options), "image_classification", *both(tokens, labels))
            case "regression":
                return Case(_perceptron(1), "regression", *both(inputs, numbers))
            case "multilabel":
                answers = both(inputs, lambda n: integers(2, n, 6).float())
                return Case(_perceptron(6), "multilabel_classification", *answers)
            case "binary":
                return Case(_perceptron(1), "binary_classification", *both(inputs, lambda n: integers(2, n)))
            case "clip":
                train, targets = both(images, tokens)
                task = CLIPModelOutput(simulated_batch_size=6, pairs=DataLoader(train, batch_size=8))
                return Case(Contrastive(), task, train, targets)
    raise KeyError(name)
