"""What the ranks of ``test_sharded_models`` do; imported by each of them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.store import ZarrFeatureStore, _grid

R = 32
"""Rows of a commit here, so that ranks have something to share."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Tokens to classes. Widths that no number of ranks divides."""

    def __init__(self, width: int = 10, classes: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(17, width), nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def transformer() -> nn.Module:
    torch.manual_seed(1)
    return Transformer()


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def tokens(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(17, (count, 5), generator=generator), torch.arange(count) % 3)


def points(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard every block and the rest, as one does for training."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    parts = model.blocks if isinstance(model, Transformer) else [m for m in model if list(m.parameters())]
    for part in parts:
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def attributor(model: nn.Module, path: str | Path | None, **settings: Any) -> Attributor:
    defaults = {"proj_dim": 16, "projector": "two_sided", "dtype": "float32", "progress": False}
    return Attributor(model, "image_classification", path, **{**defaults, **settings})


def rank_of(
    answers: Any, rank: int, world: int, file: str, job: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Run a job as one rank; answer with the rank and what the job returned, or its error."""
    torch.set_num_threads(1)
    _grid._FEWEST_ROWS_PER_COMMIT = R
    os.fsync = lambda fd: None  # type: ignore[assignment]  # nothing is killed here
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        answers.put((rank, job(*arguments)))
    except Exception:
        answers.put((rank, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


def contents(path: Path | str) -> dict[str, np.ndarray]:
    """Every number of a finished store."""
    with ZarrFeatureStore.open(path) as store:
        return {
            f"{name}/{column.name}": store.open_table(name).read(column.name)
            for name in store.table_names()
            for column in store.open_table(name).spec.columns
        }
