"""Conformance kits for projectors: laws of linear maps from gradients to features.

Subclass a kit in a test file and return a projector; pytest runs the laws::

    class TestMyProjector(RandomProjectorTests):
        def make_projector(self, proj_dim, *, seed):
            return MyProjector(proj_dim, seed=seed)

:class:`ProjectorTests` holds for every projector. :class:`RandomProjectorTests` adds the laws of a random projector
that is a Johnson-Lindenstrauss map with one joint segment. Gradients are float64. The relative tolerance is 1e-4 for
float32 features and 1e-10 for float64 features. Every seed is fixed, so results do not change from run to run.
"""

from __future__ import annotations

import builtins
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from trak_lite.projectors import AbstractProjector
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock, LookupBlock, SummedBlock

_SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (5, 3),
    "norm.scale": (),
    "body.weight": (4, 3, 2),
    "head.bias": (7,),
}
_NUM_SAMPLES = 6


class ProjectorTests(ABC):
    """Laws of every projector: linear, row by row, and independent of the order and chunks of gradient blocks."""

    proj_dim: ClassVar[int] = 24
    """K that :meth:`make_projector` is called with; a projector may choose another K."""

    @abstractmethod
    def make_projector(self, proj_dim: int, *, seed: int) -> AbstractProjector:
        """Return a new projector."""

    @pytest.fixture
    def projector(self) -> AbstractProjector:
        """The projector with seed 0."""
        return self.make_projector(self.proj_dim, seed=0)

    def test_features_fill_the_layout(self, projector: AbstractProjector) -> None:
        """Features are finite, with one row per sample and as many columns as the layout is wide."""
        features = _project(projector, _gradients(0))

        assert features.shape == (_NUM_SAMPLES, projector.layout(_SHAPES).width)
        assert bool(features.isfinite().all())
        assert bool(features.any())

    def test_projection_is_linear(self, projector: AbstractProjector) -> None:
        x, y = _gradients(0), _gradients(1)
        combined = {name: 2.5 * x[name] - 0.5 * y[name] for name in x}

        expected = 2.5 * _project(projector, x) - 0.5 * _project(projector, y)
        _assert_close(_project(projector, combined), expected)

    def test_the_adjoint_is_the_transposed_map(self, projector: AbstractProjector) -> None:
        """If the projector defines the adjoint, <R x, p> = <x, adjoint(p)> for all gradients x and feature rows p."""
        grads = _gradients(0)
        features = _project(projector, grads)
        rows = _random(1, 3, features.shape[1])
        adjoint = projector.adjoint(rows, model_id=0, parameters=_SHAPES)
        if adjoint is None:
            return

        shapes = {name: (3, *shape) for name, shape in _SHAPES.items()}
        assert {name: tuple(part.shape) for name, part in adjoint.items()} == shapes
        products = [
            grad.reshape(_NUM_SAMPLES, -1) @ adjoint[name].reshape(3, -1).T for name, grad in grads.items()
        ]
        _assert_close(features.double() @ rows.T, torch.stack(products).sum(0))

    def test_a_row_does_not_depend_on_its_batch(self, projector: AbstractProjector) -> None:
        grads = _gradients(0)
        samples = [{name: grad[row : row + 1] for name, grad in grads.items()} for row in range(_NUM_SAMPLES)]
        alone = [_project(projector, sample) for sample in samples]

        _assert_close(torch.cat(alone), _project(projector, grads))

    def test_the_order_of_blocks_does_not_matter(self, projector: AbstractProjector) -> None:
        grads = _gradients(0)
        backward = [DenseBlock(name, grads[name]) for name in reversed(grads)]

        _assert_close(_accumulate(projector, backward), _project(projector, grads))

    def test_rows_may_come_in_chunks(self, projector: AbstractProjector) -> None:
        grads = _gradients(0)
        blocks = [(name, grad, start) for start in (4, 0) for name, grad in grads.items()]
        chunks = [DenseBlock(name, grad[start : start + 4], start) for name, grad, start in blocks]

        _assert_close(_accumulate(projector, chunks), _project(projector, grads))

    def test_a_block_of_any_form_counts_as_its_dense_gradient(self, projector: AbstractProjector) -> None:
        """Factors of one and of many positions, of a matrix and of a convolution, rows of a table, and their sum.

        They are those of samples 2 to 5.
        """
        for block in _blocks_of_every_form():
            dense = block.dense().reshape(-1, *_SHAPES[block.name])

            _assert_close(
                _accumulate(projector, [block]),
                _accumulate(projector, [DenseBlock(block.name, dense, block.start)]),
            )

    def test_a_missing_parameter_counts_as_zero(self, projector: AbstractProjector) -> None:
        grads = _gradients(0)
        some = [DenseBlock(name, grad) for name, grad in grads.items() if name != "body.weight"]
        zero = {**grads, "body.weight": torch.zeros_like(grads["body.weight"])}

        _assert_close(_accumulate(projector, some), _project(projector, zero))

    def test_a_gradient_of_zeros_has_features_of_zeros(self, projector: AbstractProjector) -> None:
        """Also among other samples."""
        grads = _gradients(0)
        for grad in grads.values():
            grad[2] = 0.0

        assert _project(projector, grads).any(1).tolist() == [row != 2 for row in range(_NUM_SAMPLES)]

    def test_project_gives_what_the_accumulator_gives(self, projector: AbstractProjector) -> None:
        grads = _gradients(0)

        _assert_close(projector.project(grads, 3), _project(projector, grads, model_id=3))

    def test_a_batch_without_samples_gives_no_rows(self, projector: AbstractProjector) -> None:
        """For B = 0 the features have shape (0, K)."""
        empty = {name: torch.zeros(0, *shape) for name, shape in _SHAPES.items()}

        assert _project(projector, empty).shape == (0, projector.layout(_SHAPES).width)

    def test_memory_can_be_freed_at_any_time(self, projector: AbstractProjector) -> None:
        """Features are bitwise the same after ``free_memory``."""
        before = _project(projector, _gradients(0))
        projector.free_memory()

        assert torch.equal(_project(projector, _gradients(0)), before)

    def test_two_projectors_with_equal_settings_are_one_map(self) -> None:
        one, other = (self.make_projector(self.proj_dim, seed=5) for _ in range(2))
        _project(one, _gradients(1), model_id=9)  # must not change later features

        assert torch.equal(_project(one, _gradients(0)), _project(other, _gradients(0)))
        assert one.fingerprint() == other.fingerprint()

    def test_another_process_has_the_same_map(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Python's ``hash`` of a text, which is another one in every process, has no part in the features."""
        expected = _project(self.make_projector(self.proj_dim, seed=0), _gradients(0))
        with monkeypatch.context() as patched:
            patched.setattr(builtins, "hash", _hash_of_another_process)
            features = _project(self.make_projector(self.proj_dim, seed=0), _gradients(0))

        assert torch.equal(features, expected)

    def test_the_dtype_of_gradients_does_not_choose_the_map(self, projector: AbstractProjector) -> None:
        """Rows and targets may have gradients of different dtypes."""
        narrow = {name: grad.float() for name, grad in _gradients(0).items()}
        wide = {name: grad.double() for name, grad in narrow.items()}

        _assert_close(_project(projector, narrow).float(), _project(projector, wide).float())

    def test_the_generator_of_torch_is_left_as_it_is(self, projector: AbstractProjector) -> None:
        """A training that :meth:`~trak_lite.Attributor.capture` follows draws from it."""
        before = torch.get_rng_state()
        _project(projector, _gradients(0))

        assert torch.equal(torch.get_rng_state(), before)

    def test_the_fingerprint_survives_json(self) -> None:
        """The fingerprint can be stored in a manifest and compared."""
        fingerprint = self.make_projector(self.proj_dim, seed=-1).fingerprint()

        assert json.loads(json.dumps(fingerprint, allow_nan=False)) == fingerprint
        assert {"kind", "proj_dim", "seed", "version"} <= set(fingerprint)


class RandomProjectorTests(ProjectorTests):
    """Laws of a random projector with one joint segment: unbiased, concentrated, independent per name."""

    num_seeds: ClassVar[int] = 400
    """Number of seeds in the test of mean and variance."""

    def gain(self, proj_dim: int) -> float:
        """Return E||phi||^2 / ||g||^2: 1 unless the projector is not scaled."""
        return 1.0

    def test_inner_products_are_unbiased(self) -> None:
        """Test <phi x, phi y>, ||phi x||^2, ||phi y||^2 and the ||phi e||^2 of every entry e alone over many seeds.

        The mean is within 4 standard errors of the true value; the variance is at most that of a dense Gaussian matrix.
        The mean of an entry alone is within 5 standard errors as well, so no entry is ignored.
        """
        x, y = _gradients(0, 1), _gradients(1, 1)
        y = {name: grad + 0.7 * x[name] for name, grad in y.items()}
        both = {name: torch.cat([x[name], y[name]]) for name in x}
        flat = torch.cat([grad.reshape(2, -1) for grad in both.values()], 1)
        true = flat @ flat.T
        sizes = [math.prod(shape) for shape in _SHAPES.values()]
        units = torch.split(torch.eye(sum(sizes), dtype=torch.float64), sizes, 1)
        rows = {
            name: torch.cat([both[name], unit.reshape(-1, *shape)])
            for (name, shape), unit in zip(_SHAPES.items(), units, strict=True)
        }
        proj_dim, gain = 16, self.gain(16)
        products, alone = [], []
        for seed in range(self.num_seeds):
            features = self.make_projector(proj_dim, seed=seed).project(rows, 0).double()
            products.append(features[:2] @ features[:2].T / gain)
            alone.append(features[2:].square().sum(1) / gain)

        errors = torch.stack(products) - true
        standard_error = errors.std(0) / math.sqrt(self.num_seeds)
        assert bool((errors.mean(0).abs() < 4 * standard_error).all())
        norms = true.diagonal()
        gaussian = (norms[:, None] * norms[None, :] + true.square()) / proj_dim
        slack = 1 + 5 * math.sqrt(2 / self.num_seeds)  # the variance of a variance, at 5 standard errors
        assert bool((errors.var(0) < slack * gaussian).all())
        spread, entries = torch.std_mean(torch.stack(alone), 0)
        # 1e-3 is the rounding of float16: some maps give every entry the same norm.
        assert bool(((entries - 1).abs() < 5 * spread / math.sqrt(self.num_seeds) + 1e-3).all()), entries

    def test_inner_products_obey_the_johnson_lindenstrauss_bound(self) -> None:
        """For all pairs of 24 vectors and 5 seeds, the error at K = 1024 is at most 0.35 |x||y|.

        The bound fails with probability below 4 * pairs * exp(-K (eps^2 - eps^3) / 4) = 2e-6 per seed.
        """
        shapes = {"first": (40, 11), "second": (13,)}
        generator = torch.Generator().manual_seed(0)
        common = {name: torch.randn(1, *shape, generator=generator) for name, shape in shapes.items()}
        noise = {name: torch.randn(24, *shape, generator=generator) for name, shape in shapes.items()}
        grads = {name: common[name] + noise[name] for name in shapes}
        flat = torch.cat([grad.flatten(1) for grad in grads.values()], 1).double()
        norms = flat.norm(dim=1)
        for seed in range(5):
            features = self.make_projector(1024, seed=seed).project(grads, 0).double()
            errors = features @ features.T / self.gain(1024) - flat @ flat.T

            assert bool((errors.abs() <= 0.35 * norms[:, None] * norms[None, :]).all())

    def test_seeds_models_and_names_have_independent_matrices(self) -> None:
        """The same gradient under another seed, model_id or name gives uncorrelated features."""
        proj_dim = 1024
        grad = _random(0, 1, 60)
        maps = [(0, "weight", 0), (0, "weight", 1), (0, "weight", 100_000), (0, "bias", 0)]
        maps += [(seed, "weight", 0) for seed in (1, 1000, -1, 1 << 32, 1 << 64)]
        features = [
            self.make_projector(proj_dim, seed=seed).project({name: grad}, model_id)
            for seed, name, model_id in maps
        ]
        rows = torch.cat(features).double()
        rows = rows / rows.norm(dim=1, keepdim=True)
        cosines = rows @ rows.T - torch.eye(len(rows), dtype=torch.float64)

        assert float(cosines.abs().max()) < 5 / math.sqrt(proj_dim)

    def test_columns_do_not_repeat_across_wide_blocks_and_models(self) -> None:
        """For K > 10,000 the columns of two models have no block of 100 in common at any multiple of 100."""
        projector = self.make_projector(10_400, seed=0)
        grad = {"weight": _random(0, 16, 16)}
        blocks = [projector.project(grad, model_id).T.reshape(104, -1).double() for model_id in (0, 1)]
        rows = torch.cat(blocks)
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)  # a sparse map leaves columns empty
        cosines = (rows @ rows.T).fill_diagonal_(0)

        assert float(cosines.abs().max()) < 0.5

    def test_a_name_keeps_its_matrix_among_other_parameters(self, projector: AbstractProjector) -> None:
        """The contribution of a parameter does not depend on the other parameters or on their order."""
        grads = _gradients(0)
        order = dict(reversed(_SHAPES.items()))
        parts = [projector.project({name: grad}, 0) for name, grad in grads.items()]

        _assert_close(_project(projector, grads, parameters=order), torch.stack(parts).sum(0))

    def test_the_fingerprint_depends_on_seed_and_size(self) -> None:
        settings = [(self.proj_dim, 0), (self.proj_dim, 1), (2 * self.proj_dim, 0)]
        fingerprints = [
            json.dumps(self.make_projector(proj_dim, seed=seed).fingerprint(), sort_keys=True)
            for proj_dim, seed in settings
        ]

        assert len(set(fingerprints)) == len(settings)


def _random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _blocks_of_every_form() -> list[GradientBlock]:
    """Return gradients of samples 2 to 5 in the forms that layers produce, other than the dense one."""

    def factored(name: str, positions: int) -> FactoredBlock:
        d_out, *rest = _SHAPES[name]
        inputs = _random(0, 4, positions, math.prod(rest))
        return FactoredBlock(name, inputs, _random(1, 4, positions, d_out), start=2)

    rows = torch.arange(4 * 9, device="cpu").reshape(4, 9).square() % 5  # some rows several times, some never
    looked_up = LookupBlock("embed", rows, _random(2, 4, 9, 3), num_rows=5, start=2)
    factors = [factored(name, positions) for name in ("embed", "body.weight") for positions in (1, 40)]
    return [*factors, looked_up, SummedBlock("embed", (looked_up, factored("embed", 40)))]


def _gradients(seed: int, num_samples: int = _NUM_SAMPLES) -> dict[str, Tensor]:
    numbered = enumerate(_SHAPES.items())
    return {name: _random(100 * seed + i, num_samples, *shape) for i, (name, shape) in numbered}


def _hash_of_another_process(value: object, _original: Callable[[object], int] = hash) -> int:
    """``hash`` as another process has it: that of numbers is the same; ``__hash__`` keeps its value, for dicts."""
    is_same = all(isinstance(item, int | float) for item in (value if isinstance(value, tuple) else [value]))
    return _original(value) ^ (not is_same and sys._getframe(1).f_code.co_name != "__hash__")


def _project(projector: AbstractProjector, grads: Mapping[str, Tensor], **settings: Any) -> Tensor:
    """Project one block per parameter, in model order."""
    return _accumulate(projector, [DenseBlock(name, grad) for name, grad in grads.items()], **settings)


def _accumulate(
    projector: AbstractProjector,
    blocks: Sequence[GradientBlock],
    model_id: int = 0,
    parameters: Mapping[str, tuple[int, ...]] = _SHAPES,
) -> Tensor:
    """Add the blocks to one accumulator in this order and return the features."""
    num_samples = max(block.start + block.num_samples for block in blocks)
    accumulator = projector.accumulator(num_samples, model_id=model_id, parameters=parameters)
    for block in blocks:
        accumulator.add(block)
    return accumulator.features()


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare features relative to the largest one, with a tolerance that depends on their dtype."""
    tolerance = 1e-10 if actual.dtype == torch.float64 else 1e-4
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-300))
