"""The conformance kits on every registered projector and on the original's names."""

from __future__ import annotations

import pytest
import torch

from trak_lite.projectors import (
    PROJECTORS,
    AbstractProjector,
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CountSketchProjector,
    CudaProjector,
)
from trak_lite.testing.projectors import ProjectorTests, RandomProjectorTests


class TestIdentityProjector(ProjectorTests):
    def make_projector(self, proj_dim: int, *, seed: int) -> AbstractProjector:
        return PROJECTORS["none"](proj_dim, seed=seed, device=None)


NOT_JOHNSON_LINDENSTRAUSS = {"none", "two_sided", "mask", "grass"}
"""Projectors whose inner products are not unbiased with one joint segment. Add yours, with ``ProjectorTests``."""


class TestRandomProjectors(RandomProjectorTests):
    """Unbiased with one joint segment; what is not has its laws in its own file."""

    @pytest.fixture(autouse=True, params=sorted(PROJECTORS.keys() - NOT_JOHNSON_LINDENSTRAUSS))
    def _registered(self, request):
        self.factory = PROJECTORS[request.param]

    def make_projector(self, proj_dim: int, *, seed: int) -> AbstractProjector:
        return self.factory(proj_dim, seed=seed, device=None)


class TestCountSketchSettings(RandomProjectorTests):
    num_seeds = 100  # test_countsketch_statistics holds mean and variance more tightly, at 400

    @pytest.fixture(
        autouse=True,
        params=[{"copies": 3}, {"factors": "form"}, {"factors": "fourier"}],
        ids=["copies", "form", "fourier"],
    )
    def _set(self, request):
        self.settings = request.param

    def make_projector(self, proj_dim: int, *, seed: int) -> AbstractProjector:
        return CountSketchProjector(proj_dim, seed=seed, **self.settings)


class TestOriginalNames(RandomProjectorTests):
    """Unscaled: the norm grows by K."""

    @pytest.fixture(
        autouse=True,
        params=[
            lambda k, seed: BasicProjector(0, k, seed, "normal", "cpu", dtype=torch.float64),
            lambda k, seed: BasicSingleBlockProjector(0, k, seed, "rademacher", "cpu"),
            lambda k, seed: CudaProjector(0, k, seed, "rademacher", "cpu", 32),
        ],
        ids=["Basic", "BasicSingleBlock", "Cuda"],
    )
    def _named(self, request):
        self.factory = request.param

    def make_projector(self, proj_dim: int, *, seed: int) -> AbstractProjector:
        return self.factory(proj_dim, seed)

    def gain(self, proj_dim: int) -> float:
        return float(proj_dim)


class TestChunkedProjector(ProjectorTests):
    """Chunks of the kit's own parameters: 15 + 1 and 24 + 7 entries."""

    def make_projector(self, proj_dim: int, *, seed: int) -> AbstractProjector:
        chunks = [CudaProjector(0, proj_dim, seed + i, "rademacher", "cpu", 32) for i in range(2)]
        return ChunkedCudaProjector(chunks, 31, [16, 31], 8, "cpu", torch.float32)
