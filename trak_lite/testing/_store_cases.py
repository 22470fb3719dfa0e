"""Fixtures of the conformance kit for stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

import pytest

from trak_lite.store import AbstractFeatureStore, Manifest

__all__ = ["MANIFEST", "AbstractStoreTests"]

MANIFEST = Manifest({"proj_dim": 3, "projector": {"kind": "rademacher", "seed": 0}}, {"trak_lite": "test"})


class AbstractStoreTests(ABC):
    """Each test gets a fresh folder."""

    @abstractmethod
    def create(self, path: str, manifest: Manifest) -> AbstractFeatureStore:
        """Create a store at the path, or open an existing one for writing."""

    @abstractmethod
    def open(self, path: str, mode: Literal["r", "r+"]) -> AbstractFeatureStore:
        """Open the existing store at the path."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        """Path of the store."""
        return str(tmp_path / "run.zarr")

    @pytest.fixture
    def store(self, path: str) -> AbstractFeatureStore:
        """An empty store."""
        return self.create(path, MANIFEST)
