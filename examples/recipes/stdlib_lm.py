"""A byte-level language model on the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CHUNK = 128
MODULES = (
    "bisect heapq colorsys textwrap cmd sched shlex fnmatch getopt calendar csv difflib statistics fractions graphlib "
    "pprint queue stat tabnanny timeit"
)


@cache
def chunks(folder: str | None, num_train: int, num_targets: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return train chunks ``(N, 128)`` and target chunks ``(M, 128)`` of bytes, and the position of each chunk."""
    sources = Path(folder or sysconfig.get_path("stdlib"))
    texts = {module: (sources / f"{module}.py").read_bytes() for module in MODULES.split()}
    places = [
        (module, start) for module, text in texts.items() for start in range(0, len(text) - CHUNK + 1, CHUNK)
    ]
    order = np.random.default_rng(0).permutation(len(places))[: num_train + num_targets]
    chosen = [places[i] for i in order]
    ids = torch.tensor([list(texts[module][start : start + CHUNK]) for module, start in chosen])
    titles = tuple(f"{module}.py, byte {start}" for module, start in chosen)
    return ids[:num_train], ids[num_train:], titles


class Block(nn.Module):
    """Attention, as plain matrix products that every gradient computer supports, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(B, T, width)``."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        weights = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        later = torch.ones(weights.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = weights.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A causal language model over bytes."""

    def __init__(self, width: int, layers: int, heads: int = 4) -> None:
        """Make the layers."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CHUNK, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.2)
        nn.init.normal_(self.positions.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(B, T, 256)`` of bytes ``(B, T)``."""
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(places))))


def build_model(width: int = 64, layers: int = 2) -> nn.Module:
    """Return the untrained model.

    Args:
        width: Features per byte.
        layers: Number of blocks.
    """
    return GPT(width, layers)


def train_data(folder: str | None = None, num_train: int = 600, num_targets: int = 50) -> TensorDataset:
    """Return train chunks of source code; the labels are the chunks themselves.

    Args:
        folder: Folder of the library's source; null uses that of the running Python.
        num_train: Number of train chunks.
        num_targets: Number of target chunks.
    """
    ids = chunks(folder, num_train, num_targets)[0]
    return TensorDataset(ids, ids)


def target_data(folder: str | None = None, num_train: int = 600, num_targets: int = 50) -> TensorDataset:
    """Return target chunks, which are not in the train data."""
    ids = chunks(folder, num_train, num_targets)[1]
    return TensorDataset(ids, ids)


def train(
    indices: NDArray[np.int64],
    seed: int,
    *,
    folder: str | None = None,
    num_train: int = 600,
    num_targets: int = 50,
    width: int = 64,
    layers: int = 2,
    steps: int = 800,
    num_checkpoints: int = 4,
) -> Iterator[dict[str, Tensor]]:
    """Train on some chunks and yield the weights along the run.

    Args:
        indices: Rows of the train data.
        seed: Seed of weights and order.
        folder: Folder of the library's source.
        num_train: Number of train chunks.
        num_targets: Number of target chunks.
        width: Features per byte.
        layers: Number of blocks.
        steps: Number of batches of 16 chunks.
        num_checkpoints: Number of checkpoints to yield, evenly spaced; the last has the final weights.
    """
    ids = train_data(folder, num_train, num_targets).tensors[0][torch.as_tensor(indices)]
    torch.manual_seed(seed)
    model = build_model(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    save_after = set(np.linspace(0, steps, num_checkpoints + 1).round().astype(int)[1:].tolist())
    for step in range(1, steps + 1):
        batch = ids[torch.randint(len(ids), (16,))]
        optimizer.zero_grad()
        functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
        if step in save_after:
            yield model.state_dict()


def render(index: int, *, folder: str | None = None, num_train: int = 600, num_targets: int = 50) -> str:
    """Return the position of a train chunk and its text."""
    ids, _, titles = chunks(folder, num_train, num_targets)
    return _text(ids[index], titles[index])


def render_target(
    index: int, *, folder: str | None = None, num_train: int = 600, num_targets: int = 50
) -> str:
    """Return the position of a target chunk and its text."""
    _, ids, titles = chunks(folder, num_train, num_targets)
    return _text(ids[index], titles[num_train + index])


def _text(ids: Tensor, title: str) -> str:
    return f"{title}\n{bytes(ids.tolist()).decode('utf-8', 'replace')}"


def columns(
    *, folder: str | None = None, num_train: int = 600, num_targets: int = 50
) -> dict[str, list[str]]:
    """Return the module of every train chunk; the pages of ``serve`` filter by it."""
    titles = chunks(folder, num_train, num_targets)[2]
    return {"source": [title.partition(",")[0] for title in titles[:num_train]]}


def sample(text: str) -> tuple[Tensor, Tensor]:
    """Return the first 128 bytes of a text as a target of ``serve``; a shorter text follows newlines."""
    ids = torch.tensor(list(text.encode()[:CHUNK].rjust(CHUNK, b"\n")))
    return ids, ids


def predict(model: nn.Module, sample: tuple[Tensor, Tensor]) -> list[tuple[str, float]]:
    """Return the bytes of a target with their log-probabilities."""
    ids, _ = sample
    log_p = model(ids.unsqueeze(0))[0, :-1].log_softmax(-1)
    return list(zip(_bytes(ids), [0.0, *log_p.gather(-1, ids[1:, None])[:, 0].tolist()], strict=True))


def tokens(
    index: int, *, folder: str | None = None, num_train: int = 600, num_targets: int = 50
) -> list[str]:
    """Return the bytes of a train chunk as texts."""
    return _bytes(chunks(folder, num_train, num_targets)[0][index])


def _bytes(ids: Tensor) -> list[str]:
    return [bytes([byte]).decode("ascii", "replace") for byte in ids.tolist()]
