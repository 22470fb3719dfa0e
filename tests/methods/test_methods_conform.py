"""Every method of the package, and one of a user's own, against the conformance kit."""

from dataclasses import dataclass

import pytest

from trak_lite import methods
from trak_lite.testing import MethodTests


@dataclass(frozen=True, kw_only=True)
class SignedDot(methods.AbstractMethod):
    """A method as a user would write one: products of the signs of features, times a number."""

    strength: float = 1.0

    @property
    def kernel(self):
        return None

    def transform(self, rows, layout):
        return rows.sign() * self.strength


class TestGaussNewton(MethodTests):
    def make_method(self):
        return methods.GaussNewton()


class TestGaussNewtonJointly(MethodTests):
    def make_method(self):
        return methods.GaussNewton(layout="joint", damping=0.1, q="outside")


class TestFisher(MethodTests):
    def make_method(self):
        return methods.Fisher(samples_per_feature=8)


class TestTRAK(MethodTests):
    def make_method(self):
        return methods.TRAK(damping=0.01)


class TestEKFAC(MethodTests):
    def make_method(self):
        return methods.EKFAC(damping=0.1)


class TestCG(MethodTests):
    def make_method(self):
        return methods.CG(damping=0.5, tolerance=1e-5, max_iterations=200)


class TestLiSSA(MethodTests):
    def make_method(self):
        return methods.LiSSA(damping=3.0, depth=40, rows=30)


class TestTracIn(MethodTests):
    def make_method(self):
        return methods.TracIn(learning_rates=[0.1])


class TestLESS(MethodTests):
    def make_method(self):
        return methods.LESS(learning_rates=[0.1])


class TestGradDot(MethodTests):
    def make_method(self):
        return methods.GradDot()


class TestGradCos(MethodTests):
    def make_method(self):
        return methods.GradCos()


class TestOneOfAUsersOwn(MethodTests):
    def make_method(self):
        return SignedDot(strength=0.5)


@dataclass(frozen=True, kw_only=True)
class RelativeDot(methods.AbstractMethod):
    """Products with train rows of norm 1 and targets as they are."""

    @property
    def kernel(self):
        return None

    def transform(self, rows, layout):
        return rows / rows.norm(dim=1, keepdim=True)

    def transform_targets(self, rows, layout):
        return rows


class TestOneThatChangesOneSide(MethodTests):
    def make_method(self):
        return RelativeDot()


@pytest.mark.quick
def test_every_method_of_the_package_is_in_this_file():
    """Add ``class Test<Name>(MethodTests)`` above."""
    here = {type(cls().make_method()) for cls in MethodTests.__subclasses__()}
    assert set(methods.METHODS.values()) <= here
