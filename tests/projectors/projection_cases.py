"""Every projector by name, and gradients, blocks and probes that the tests of several projectors share."""

import functools
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trak_lite import projectors
from trak_lite.types import DenseBlock, FactoredBlock, LookupBlock

SHAPES = {
    "b.weight": (5, 4),
    "wide.weight": (3, 70),
    "scale": (),
    "b.bias": (5,),
    "empty": (0, 4),
    "conv.weight": (3, 2, 2),
}
ORIGINAL = {
    "Basic": projectors.BasicProjector,
    "SingleBlock": projectors.BasicSingleBlockProjector,
    "Cuda": projectors.CudaProjector,
}
"""They do not divide by the root of K; the last two are the first one by other names."""


def original(name, k, *, seed, device):
    options = {"max_batch_size": 32} if name == "Cuda" else {}
    kind = "normal" if name == "Basic" else "rademacher"
    return ORIGINAL[name](0, k, seed, kind, device, dtype=None, **options)


def gaussian_sides(k, *, seed, device):
    options = {"matrices": "gaussian", "layout": "joint"}
    return projectors.TwoSidedProjector(math.isqrt(k), seed=seed, device=device, **options)


MAKERS = {
    **projectors.PROJECTORS,
    "copies": functools.partial(projectors.CountSketchProjector, copies=3),
    "form": functools.partial(projectors.CountSketchProjector, factors="form"),
    "fourier": functools.partial(projectors.CountSketchProjector, factors="fourier"),
    **{name: functools.partial(original, name) for name in ORIGINAL},
    "mask by module": functools.partial(projectors.MaskProjector, layout="module"),
    "grass by module": functools.partial(projectors.GraSSProjector, layout="module"),
    "two_sided gaussian joint": gaussian_sides,
}
DRAWN = [name for name in MAKERS if name not in ("form", "fourier", "fast_jl")]
"""Of the others, two are countsketch, and one has another matrix where its extension is installed."""


def made(name, k, seed=0, device=None):
    return MAKERS[name](k, seed=seed, device=device)


def random(*shape, seed=0, dtype=torch.float64):
    """Normal numbers drawn in float64, which tensors of narrower dtypes round."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random32(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_gradients(shapes, num_samples=4, seed=0, dtype=torch.float64):
    return {
        name: random(num_samples, *shape, seed=10 * seed + i, dtype=dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def dense_blocks(grads):
    return [DenseBlock(name, grad) for name, grad in grads.items()]


def factors(shape, positions, num_samples=3, dtype=torch.float64):
    """Factors of the gradient of a parameter ``w``."""
    d_in = torch.Size(shape[1:]).numel()
    x = random(num_samples, positions, d_in, seed=1, dtype=dtype)
    return FactoredBlock("w", x, random(num_samples, positions, shape[0], seed=2, dtype=dtype))


def lookups(shape, positions, num_samples=3, dtype=torch.float64):
    """Gradients of rows of a table ``w``, one of which is read three times."""
    generator = torch.Generator().manual_seed(positions)
    rows = torch.randint(shape[0], (num_samples, positions), generator=generator)
    rows[:, 1:3] = rows[:, :1]
    return LookupBlock("w", rows, random(num_samples, positions, shape[1], dtype=dtype), shape[0])


def formed(block, shape):
    """The gradient itself, in float64."""
    if isinstance(block, LookupBlock):
        grad = torch.zeros(block.num_samples, *shape, dtype=torch.float64)
        for sample, rows in enumerate(block.rows.tolist()):
            for position, row in enumerate(rows):
                grad[sample, row] += block.values[sample, position].double()
        return DenseBlock(block.name, grad, block.start)
    product = torch.einsum("bto,bti->boi", block.output_grads.double(), block.inputs.double())
    return DenseBlock(block.name, product.reshape(-1, *shape), block.start)


def accumulated(projector, blocks, *, num_samples=4, parameters, model_id=0):
    accumulator = projector.accumulator(num_samples, model_id=model_id, parameters=parameters)
    for block in blocks:
        accumulator.add(block)
    return accumulator.features()


def assert_close(actual, expected, tolerance):
    """Relative to the largest feature: rounding of a sum or a transform is spread over all of them."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    atol = tolerance * max(scale, 1e-300)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=atol)


class Operators(TorchDispatchMode):
    """Counts operators and words of the hash; remembers the largest storage and number of entries that one returned."""

    def __init__(self):
        super().__init__()
        self.count = self.nbytes = self.entries = self.words = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
                self.entries = max(self.entries, tensor.numel())
                self.words += tensor.numel() * ("bitwise_xor" in str(func))
        return result
