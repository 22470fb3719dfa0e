"""Base classes of projectors: gradient blocks in, feature rows out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from trak_lite.core.json_text import module_name
from trak_lite.errors import InvalidInputError
from trak_lite.types import (
    DenseBlock,
    FactoredBlock,
    FeatureLayout,
    GradientBlock,
    LookupBlock,
    ParameterShapes,
    Segment,
    SummedBlock,
    collect,
    num_entries,
)

_PIECE_BYTES = 64 << 20  # size of the temporaries of a block that exist at once


class ProjectionType(StrEnum):
    """Distribution of the projection matrix's entries."""

    normal = "normal"
    rademacher = "rademacher"


class Accumulator:
    """Accumulates the gradient blocks of one batch, in any order, into feature rows, by two functions.

    Requirements: the result does not depend, beyond rounding, on the order of the blocks or on how rows and
    parameters are split over calls; a parameter without a block counts as zero.
    """

    def __init__(self, add: Callable[[GradientBlock], None], features: Callable[[], Tensor]) -> None:
        """Store the functions; the first one runs without autograd."""
        self._add, self._features = add, features

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        """Add one block; it may be freed as soon as this returns."""
        self._add(block)

    def features(self) -> Tensor:
        """Return the feature rows ``(B, K)``; call it once, after the last block."""
        return self._features()


class AbstractProjector(ABC):
    """Linear map from gradients (P numbers per sample) to features (K numbers per sample).

    A native projector defines :meth:`accumulator`. A projector written for the original TRAK defines only
    :meth:`project` and works unchanged: the blocks of a batch are collected and projected together.

    Requirements, tested by ``trak_lite.testing.ProjectorTests``: the map is linear; it depends only on
    (seed, model_id, parameter name, coordinates), never on batch size, block order, chunking or device.
    """

    @abstractmethod
    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device | None,
    ) -> None:
        """Store the settings (the original TRAK's signature).

        Args:
            grad_dim: P, number of gradient entries per sample; 0 to derive it from the blocks.
            proj_dim: K, number of features per sample; 0 for the identity, whose K is P.
            seed: Seed of every random entry.
            proj_type: Distribution of the entries.
            device: Device of the projection; ``None`` for the gradients' device.
        """
        self.grad_dim = grad_dim
        self.proj_dim = proj_dim
        self.seed = seed
        self.proj_type = proj_type
        self.device = device

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project collected gradients.

        Args:
            grads: Per-sample gradients by parameter name, each ``(B, *parameter.shape)``, or one
                ``(B, P)`` tensor, which counts as one parameter with an empty name.
            model_id: Number of the checkpoint; each checkpoint has its own projection matrix.

        Returns:
            Features ``(B, K)`` on the projector's device, or on the gradients' device if it has none.

        Raises:
            InvalidInputError: If there is no gradient, or the gradients differ in B, are not floating point or do
                not have ``grad_dim`` entries; or if the class defines neither this method nor ``accumulator``.
        """
        if type(self).accumulator is AbstractProjector.accumulator:  # which calls this method
            raise InvalidInputError(
                f"{type(self).__qualname__} defines neither accumulator nor project. Define accumulator, or project "
                "as for the original TRAK."
            )
        return project_named(self, grads, model_id)

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch.

        Args:
            num_samples: B, rows of the batch.
            model_id: Number of the checkpoint; each checkpoint has its own projection matrix.
            parameters: Shapes of the differentiated parameters by canonical name, in model order.
        """
        return _collecting(self, num_samples, model_id, parameters)

    def adjoint(
        self, features: Tensor, *, model_id: int, parameters: ParameterShapes
    ) -> dict[str, Tensor] | None:
        r"""Return the transposed map applied to feature rows, ``None`` if the projector does not define it.

        With the projection R, the result is :math:`R^\top p` for every row p: its inner product with a gradient is that
        of p with the features of the gradient.

        Args:
            features: ``(m, K)`` float32 or float64.
            model_id: Number of the checkpoint.
            parameters: Shapes of the differentiated parameters by canonical name, in model order.

        Returns:
            Tensors ``(m, *shape)`` by parameter name, in the dtype and on the device of the features.
        """
        return None

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return the segments of a feature row for these parameters."""
        return FeatureLayout.joint(self.proj_dim or num_entries(parameters))

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the features, for the store's manifest.

        Entries: ``kind`` (class name), ``proj_dim``, ``seed`` and ``version`` of the algorithm.
        """
        return {
            "kind": f"{module_name(type(self).__module__)}.{type(self).__qualname__}",
            "proj_dim": int(self.proj_dim),
            "seed": int(self.seed),
            "version": 1,
        }

    def free_memory(self) -> None:
        """Free cached matrices; they are generated again when needed."""
        return


def _collecting(
    projector: AbstractProjector, num_samples: int, model_id: int, parameters: ParameterShapes
) -> Accumulator:
    """Return an accumulator of dense gradients in model order for a projector that defines only ``project``."""
    grads: dict[str, Tensor] = {}

    def add(block: GradientBlock) -> None:
        check_block(block, num_samples, parameters)
        collect(block, grads, num_samples)

    def features() -> Tensor:
        some = next(iter(grads.values()), torch.empty(0, device="cpu"))
        shapes = {name: (num_samples, *shape) for name, shape in parameters.items()}
        whole = {
            name: grads[name].reshape(shape) if name in grads else some.new_zeros(shape)
            for name, shape in shapes.items()
        }
        return projector.project(whole, model_id)

    return Accumulator(add, features)


def routed(
    parts: Sequence[tuple[AbstractProjector, ParameterShapes]],
    num_samples: int,
    model_id: int,
    join: Callable[[list[Tensor]], Tensor],
) -> Accumulator:
    """Return an accumulator that passes each block to that of its parameter, and joins the features of all."""
    parameters = {name: shape for _, shapes in parts for name, shape in shapes.items()}
    accumulators = [
        projector.accumulator(num_samples, model_id=model_id, parameters=shapes)
        for projector, shapes in parts
    ]
    by_name = {name: part for part, (_, shapes) in zip(accumulators, parts, strict=True) for name in shapes}

    def add(block: GradientBlock) -> None:
        check_block(block, num_samples, parameters)
        by_name[block.name].add(block)

    return Accumulator(add, lambda: join([part.features() for part in accumulators]))


def named_gradients(grads: Mapping[str, Tensor] | Tensor) -> tuple[dict[str, Tensor], int]:
    """Return gradients by name, each ``(B, *parameter.shape)``, and B; a tensor ``(B, P)`` has an empty name.

    None at all, a missing sample axis, or several B raise InvalidInputError.
    """
    named = {"": grads} if isinstance(grads, Tensor) else dict(grads)
    if isinstance(grads, Tensor) and grads.dim() != 2:
        raise InvalidInputError(f"A gradient tensor must be (B, P), got shape {tuple(grads.shape)}.")
    sizes = {grad.shape[0] if grad.dim() else None for grad in named.values()}
    (num_samples, *others) = sizes or {None}
    if num_samples is None or others:
        shapes = {name: tuple(grad.shape) for name, grad in list(named.items())[:5]}
        raise InvalidInputError(
            "Expected gradients that agree on the number of samples on axis 0, "
            f"got {shapes or 'none at all'}."
        )
    return named, num_samples


def project_named(
    projector: AbstractProjector, grads: Mapping[str, Tensor] | Tensor, model_id: int
) -> Tensor:
    """Return the features ``(B, K)`` of collected gradients, computed by the projector's accumulator."""
    named, num_samples = named_gradients(grads)
    parameters = {name: tuple(grad.shape[1:]) for name, grad in named.items()}
    accumulator = projector.accumulator(num_samples, model_id=model_id, parameters=parameters)
    for name, grad in named.items():
        accumulator.add(DenseBlock(name, grad))
    return accumulator.features()


# Gradient blocks


def block_rows(block: GradientBlock, num_samples: int, parameters: ParameterShapes) -> Tensor:
    """Check a block as :func:`check_block` and return its detached rows ``(b, parameter.numel())``; b may be 0."""
    check_block(block, num_samples, parameters)
    return block.dense().detach()


def check_block(block: GradientBlock, num_samples: int, parameters: ParameterShapes) -> None:
    """Raise if a block does not fit the parameters and the batch of the accumulator.

    Raises:
        InvalidInputError: If the name is unknown, the shape is not the parameter's, rows are outside the
            batch, the gradient is not real floating point, or its factors disagree.
    """
    if block.name not in parameters:
        raise InvalidInputError(
            f"Got a gradient block of parameter {block.name!r}, which is not among the {len(parameters)} "
            "parameters of this accumulator. Pass its shape in `parameters`."
        )
    if not 0 <= block.start <= block.start + block.num_samples <= num_samples:
        raise InvalidInputError(
            f"A block of {block.name!r} covers rows {block.start} to {block.start + block.num_samples} "
            f"of a batch of {num_samples}. Set `start` to the position of its first sample in the batch."
        )
    shape = tuple(parameters[block.name])
    if isinstance(block, SummedBlock):
        for part in block.parts:
            check_block(part, num_samples, parameters)
        return
    if isinstance(block, DenseBlock):
        grad_shape, rows = tuple(block.grad.shape[1:]), block.grad
    elif isinstance(block, LookupBlock):
        grad_shape, rows = (block.num_rows, block.values.shape[-1]), block.values
    else:
        grad_shape, rows = (block.output_grads.shape[-1], block.inputs.shape[-1]), block.inputs
    as_matrix = (shape[0], math.prod(shape[1:])) if shape else ()  # shape of the factors of a convolution
    if grad_shape not in (shape, (math.prod(shape),), as_matrix):
        raise InvalidInputError(
            f"The gradient of {block.name!r} has shape {grad_shape} per sample, expected {shape}. "
            "Axis 0 of a gradient is the sample, the rest is the parameter's shape."
        )
    if not rows.is_floating_point():
        raise InvalidInputError(
            f"The gradient of {block.name!r} has dtype {rows.dtype}, expected floating point. Leave it out of "
            "grad_wrt, or use two real parameters with torch.view_as_complex."
        )
    if isinstance(block, FactoredBlock):
        inputs, output_grads = block.inputs, block.output_grads
        if inputs.shape[:2] != output_grads.shape[:2] or not output_grads.is_floating_point():
            raise InvalidInputError(
                f"The factors of {block.name!r} have shapes {tuple(inputs.shape)} and {tuple(output_grads.shape)} and "
                f"dtypes {inputs.dtype} and {output_grads.dtype}. Expected floating-point factors (b, T, d_in) and "
                "(b, T, d_out) with the same b and T."
            )


def by_module(parameters: ParameterShapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the parameters by the module that owns them, in model order; the root module has the name ``""``."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in parameters.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = tuple(shape)
    return groups


def side_by_side(widths: Iterable[tuple[str, int]]) -> FeatureLayout:
    """Return the layout of segments with these names and widths."""
    segments: list[Segment] = []
    for name, width in widths:
        start = segments[-1].stop if segments else 0
        segments.append(Segment(name, start, start + width))
    return FeatureLayout(tuple(segments))


def sample_pieces(num_samples: int, bytes_per_sample: int) -> Iterator[slice]:
    """Yield consecutive slices of samples, each of at most about 64 MiB, or of one sample."""
    step = max(1, _PIECE_BYTES // max(1, bytes_per_sample))
    return (slice(start, min(start + step, num_samples)) for start in range(0, num_samples, step))
