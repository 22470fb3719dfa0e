"""Conformance kits for third-party extensions: subclass a kit, return your object, run pytest.

``ProjectorTests``, ``RandomProjectorTests``, ``ModelOutputTests``, ``GradientComputerTests``,
``GradientRuleTests`` and ``MethodTests`` test the same laws that the package's own classes obey. They need pytest,
which the package does not install; no other module of the package imports pytest.
"""

import pytest

_KITS = ("gradients", "methods", "modelout", "projectors")
pytest.register_assert_rewrite(*(f"{__name__}.{kit}" for kit in _KITS))  # a failing law shows its values

from trak_lite.testing.gradients import GradientComputerTests as GradientComputerTests
from trak_lite.testing.gradients import GradientRuleTests as GradientRuleTests
from trak_lite.testing.methods import MethodTests as MethodTests
from trak_lite.testing.modelout import ModelOutputCase as ModelOutputCase
from trak_lite.testing.modelout import ModelOutputTests as ModelOutputTests
from trak_lite.testing.projectors import ProjectorTests as ProjectorTests
from trak_lite.testing.projectors import RandomProjectorTests as RandomProjectorTests

__all__ = [
    "GradientComputerTests",
    "GradientRuleTests",
    "MethodTests",
    "ModelOutputCase",
    "ModelOutputTests",
    "ProjectorTests",
    "RandomProjectorTests",
]
