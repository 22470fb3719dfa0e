"""A perceptron, its data and its weights, for tests that need some run and not a special one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trak_lite.store import Manifest


def perceptron(width: int = 8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def labelled(count: int, seed: int = 0) -> TensorDataset:
    """Rows of four numbers with labels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)
    )


def random_states(build: Callable[[], nn.Module], count: int = 2) -> list[dict[str, Tensor]]:
    """Weights of a model, drawn from seed 1."""
    shapes = build().state_dict()  # building may seed
    torch.manual_seed(1)
    return [{name: torch.randn_like(value) for name, value in shapes.items()} for _ in range(count)]


def adam_scale(state: Any) -> Tensor:
    """What ``normalize="adam"`` multiplies the gradients of a parameter by, flat in float64."""
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"]).double()
    root = (second / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
    return torch.where(second > 0, root.rsqrt(), 0).flatten()


class LanguageModel(nn.Module):
    """Says the next token from the mean of those before."""

    def __init__(self, vocabulary: int = 7, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        counts = torch.arange(1, input_ids.shape[1] + 1).view(1, -1, 1)
        return self.head(torch.tanh(self.embedding(input_ids).cumsum(1) / counts))


class Merging(nn.Module):
    """Adds a second weight to its first in eval mode and takes it out in train mode, as adapters do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.more = (nn.Parameter(torch.eye(width) * scale) for scale in (1.0, 0.1))
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        if self.merged == mode:
            self.weight.data += self.more.data * (-1 if mode else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.merged else self.weight + self.more)


class CubeWithoutForwardMode(torch.autograd.Function):
    """x**3, which has a backward pass only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rewrite_settings(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a store says of the settings that it was made with."""
    document = json.loads((path / "zarr.json").read_text())
    record = document["attributes"]["trak_lite"]
    del record["checksum"]
    change(record["made_with"]["settings"])
    record["checksum"] = Manifest(record).digest()[:32]
    (path / "zarr.json").write_text(json.dumps(document))


class Counting(Dataset[Any]):
    """Remembers which rows were loaded, and is interrupted at one on request."""

    def __init__(self, inner: Any, fail_at: int | None = None) -> None:
        self.inner, self.loaded, self.fail_at = inner, list[int](), fail_at

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        if index == self.fail_at:
            raise KeyboardInterrupt
        self.loaded.append(index)
        return self.inner[index]
