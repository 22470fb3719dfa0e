"""FSDP2: train a sharded model, and score with its shards.

Three residual blocks learn scikit-learn's digits under FSDP2. Each rank featurizes different rows with the sharded
model, and the scores of 300 train rows for 5 targets are computed. The script asserts that they equal the scores of
the unsharded model in one process.

Run:  torchrun --nproc-per-node=2 examples/fsdp.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from trak_lite import Attributor


class Block(nn.Module):
    """A residual layer, which FSDP2 gathers and frees as a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next block, ``(B, width)``."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build_model(width: int = 32, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 10))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 300 train rows and 5 targets."""
    images, labels = load_digits(return_X_y=True)
    inputs, classes = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return TensorDataset(inputs[:300], classes[:300]), TensorDataset(inputs[300:305], classes[300:305])


def train(model: nn.Module, data: TensorDataset, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs, labels = data.tensors
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def explain(model: nn.Module, path: Path, *, distributed: bool | None = None) -> np.ndarray:
    """Return the scores of all train rows for the targets; with a sharded model, all ranks must call this."""
    rows, targets = digits()
    attributor = Attributor(
        model, "image_classification", path, proj_dim=64, projector="two_sided", distributed=distributed
    )
    attributor.featurize(rows)
    return attributor.score(targets).numpy()


def main(steps: int = 30) -> None:
    """Train and score the sharded model, and compare with the unsharded model on rank 0."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = build_model()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, digits()[0], steps)

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    scores = explain(model, Path(folder[0]) / "sharded.zarr")

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        whole = build_model()
        whole.load_state_dict(weights)
        expected = explain(whole, Path(folder[0]) / "whole.zarr", distributed=False)
        np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
        parts = f"{dist.get_world_size()} ranks"
        print(
            f"{scores.shape[0]} rows scored for {scores.shape[1]} targets on {parts}, equal to the unsharded model."
        )
    dist.barrier()  # a rank that exits while others still compute may abort, and torchrun then ends all
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
