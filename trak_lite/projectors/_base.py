"""Base classes of projectors: gradient blocks in, feature rows out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, final

import torch
from torch import Tensor

from trak_lite.errors import InvalidInputError
from trak_lite.projectors._blocks import block_rows, check_block
from trak_lite.types import DenseBlock, FeatureLayout, GradientBlock, ParameterShapes, num_entries

__all__ = [
    "AbstractFeatureAccumulator",
    "AbstractProjector",
    "ProjectionType",
    "RoutedAccumulator",
    "named_gradients",
    "project_named",
]


class ProjectionType(StrEnum):
    """Distribution of the projection matrix's entries."""

    normal = "normal"
    rademacher = "rademacher"


class AbstractFeatureAccumulator(ABC):
    """Accumulates the gradient blocks of one batch, in any order, into feature rows.

    Requirements: the result does not depend, beyond rounding, on the order of the blocks or on how rows and
    parameters are split over calls; a parameter without a block counts as zero.
    """

    @abstractmethod
    def add(self, block: GradientBlock) -> None:
        """Add one block; it may be freed as soon as this returns."""

    @abstractmethod
    def features(self) -> Tensor:
        """Return the feature rows ``(B, K)``; call it once, after the last block."""


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

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch.

        Args:
            num_samples: B, rows of the batch.
            model_id: Number of the checkpoint; each checkpoint has its own projection matrix.
            parameters: Shapes of the differentiated parameters by canonical name, in model order.
        """
        return _CollectingAccumulator(self, num_samples, model_id, parameters)

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
        del features, model_id, parameters
        return None

    def layout(self, parameters: ParameterShapes) -> FeatureLayout:
        """Return the segments of a feature row for these parameters."""
        return FeatureLayout.joint(self.proj_dim or num_entries(parameters))

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the features, for the store's manifest.

        Entries: ``kind`` (class name), ``proj_dim``, ``seed`` and ``version`` of the algorithm.
        """
        return {
            "kind": f"{type(self).__module__}.{type(self).__qualname__}",
            "proj_dim": int(self.proj_dim),
            "seed": int(self.seed),
            "version": 1,
        }

    def free_memory(self) -> None:
        """Free cached matrices; they are generated again when needed."""
        return


@final
@dataclass(eq=False)
class _CollectingAccumulator(AbstractFeatureAccumulator):
    """Collects dense gradients in model order for a projector that defines only ``project``."""

    _projector: AbstractProjector
    _num_samples: int
    _model_id: int
    _parameters: ParameterShapes
    _grads: dict[str, Tensor] = field(default_factory=dict)

    def add(self, block: GradientBlock) -> None:
        rows = block_rows(block, self._num_samples, self._parameters)
        if rows.shape[0] == self._num_samples:
            self._grads[block.name] = rows
            return
        whole = self._grads.get(block.name)
        if whole is None:
            whole = rows.new_zeros(self._num_samples, rows.shape[1])
            self._grads[block.name] = whole
        whole[block.start : block.start + rows.shape[0]] = rows

    def features(self) -> Tensor:
        some = next(iter(self._grads.values()), torch.empty(0, device="cpu"))
        grads = {}
        for name, shape in self._parameters.items():
            rows = self._grads.get(name)
            if rows is None:
                rows = some.new_zeros(self._num_samples, math.prod(shape))
            grads[name] = rows.reshape(self._num_samples, *shape)
        return self._projector.project(grads, self._model_id)


@final
class RoutedAccumulator(AbstractFeatureAccumulator):
    """Passes each block to the accumulator of its parameter and joins the features of all accumulators."""

    def __init__(
        self,
        parts: Sequence[tuple[AbstractProjector, ParameterShapes]],
        num_samples: int,
        model_id: int,
        join: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._num_samples = num_samples
        self._join = join
        self._parameters = {name: shape for _, own in parts for name, shape in own.items()}
        self._parts = [
            projector.accumulator(num_samples, model_id=model_id, parameters=own) for projector, own in parts
        ]
        self._by_name = {
            name: part for part, (_, own) in zip(self._parts, parts, strict=True) for name in own
        }

    def add(self, block: GradientBlock) -> None:
        check_block(block, self._num_samples, self._parameters)
        self._by_name[block.name].add(block)

    def features(self) -> Tensor:
        return self._join([part.features() for part in self._parts])


def named_gradients(grads: Mapping[str, Tensor] | Tensor) -> tuple[dict[str, Tensor], int]:
    """Return gradients by name and their common number of samples B.

    Args:
        grads: Per-sample gradients by parameter name, each ``(B, *parameter.shape)``, or one ``(B, P)``
            tensor, which becomes one parameter with an empty name.

    Raises:
        InvalidInputError: If there is no gradient, a sample axis is missing, or the gradients differ in B.
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
