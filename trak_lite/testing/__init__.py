"""Conformance kits for what third parties write: subclass one, say how to build yours, run pytest.

``StoreTests``, ``ProjectorTests``, ``RandomProjectorTests``, ``ModelOutputTests``, ``GradientComputerTests``,
``GradientRuleTests`` and ``MethodTests`` hold the laws that the package's own classes are held to. They need pytest,
which the package does not install; nothing outside this room imports it.
"""

from trak_lite.testing.gradients import GradientComputerTests as GradientComputerTests
from trak_lite.testing.gradients import GradientRuleTests as GradientRuleTests
from trak_lite.testing.methods import MethodTests as MethodTests
from trak_lite.testing.modelout import ModelOutputCase as ModelOutputCase
from trak_lite.testing.modelout import ModelOutputTests as ModelOutputTests
from trak_lite.testing.projectors import ProjectorTests as ProjectorTests
from trak_lite.testing.projectors import RandomProjectorTests as RandomProjectorTests
from trak_lite.testing.store import StoreTests as StoreTests

__all__ = [
    "GradientComputerTests",
    "GradientRuleTests",
    "MethodTests",
    "ModelOutputCase",
    "ModelOutputTests",
    "ProjectorTests",
    "RandomProjectorTests",
    "StoreTests",
]
