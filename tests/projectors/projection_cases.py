"""Gradients, blocks and probes that the tests of several projectors share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trak_lite.projectors import AbstractProjector
from trak_lite.types import DenseBlock, GradientBlock

Shapes = Mapping[str, tuple[int, ...]]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers drawn in float64, which tensors of narrower dtypes round."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random32(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers drawn in float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_gradients(
    shapes: Shapes, num_samples: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    return {
        name: random(num_samples, *shape, seed=10 * seed + i, dtype=dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def dense_blocks(grads: Mapping[str, torch.Tensor]) -> list[DenseBlock]:
    return [DenseBlock(name, grad) for name, grad in grads.items()]


def accumulated(
    projector: AbstractProjector,
    blocks: Iterable[GradientBlock],
    *,
    num_samples: int = 4,
    parameters: Shapes,
    model_id: int = 0,
) -> torch.Tensor:
    """Features of blocks that are added in this order."""
    accumulator = projector.accumulator(num_samples, model_id=model_id, parameters=parameters)
    for block in blocks:
        accumulator.add(block)
    return accumulator.features()


class LargestTensor(TorchDispatchMode):
    """Remembers the largest storage, and the largest number of entries, that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
                self.entries = max(self.entries, tensor.numel())
        return result


def set_threads() -> Iterator[Callable[[int], None]]:
    """A fixture that sets the number of threads of torch; a sketch slices rows over them, from eight rows on."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
