"""Every method of the package, and three of a user's own, against the conformance kit."""

import contextlib
import json
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tiny_runs import labelled
from torch import nn

from trak_lite import Attributor, methods
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.testing import MethodTests


@dataclass(frozen=True, kw_only=True)
class SignedDot(methods.AbstractMethod):
    """A method as a user would write one: products of the signs of features, times a number."""

    strength: float = 1.0
    linear: ClassVar[bool] = False

    @property
    def kernel(self):
        return None

    def transform(self, rows, layout):
        return rows.sign() * self.strength


@dataclass(frozen=True, kw_only=True)
class RelativeDot(methods.AbstractMethod):
    """Products with train rows of norm 1 and targets as they are."""

    linear: ClassVar[bool] = False

    @property
    def kernel(self):
        return None

    def transform(self, rows, layout):
        return rows / rows.norm(dim=1, keepdim=True)

    def transform_targets(self, rows, layout):
        return rows


@dataclass(frozen=True, kw_only=True)
class InPlaceDot(SignedDot):
    """The same, written into the rows that it is given."""

    def transform(self, rows, layout):
        return rows.sign_().mul_(self.strength)


@dataclass(frozen=True, kw_only=True)
class Fitted(RelativeDot):
    """A method that holds the result of a fit."""

    fit: tuple


CONFORMING = {
    "GaussNewton": methods.GaussNewton(),
    "GaussNewtonJointly": methods.GaussNewton(layout="joint", damping=0.1, q="outside"),
    "Fisher": methods.Fisher(samples_per_feature=8),
    "TRAK": methods.TRAK(damping=0.01),
    "EKFAC": methods.EKFAC(damping=0.1),
    "CG": methods.CG(damping=0.5, tolerance=1e-5, max_iterations=200),
    "LiSSA": methods.LiSSA(damping=3.0, depth=40, rows=30),
    "TracIn": methods.TracIn(learning_rates=[0.1]),
    "LESS": methods.LESS(learning_rates=[0.1]),
    "GradDot": methods.GradDot(),
    "GradCos": methods.GradCos(),
    "OneOfAUsersOwn": SignedDot(strength=0.5),
    "OneThatChangesOneSide": RelativeDot(),
    "OneThatWritesIntoItsRows": InPlaceDot(strength=2.0),
}
"""Name of the class ``Test<Name>(MethodTests)`` that is made below, and the method that it tests."""
for name, method in CONFORMING.items():
    marks = [pytest.mark.campaign] if name in ("CG", "LiSSA") else []  # the goldens hold these as well
    content = {"make_method": lambda self, method=method: method, "pytestmark": marks}
    vars()[f"Test{name}"] = type(f"Test{name}", (MethodTests,), content)


@dataclass(frozen=True, kw_only=True)
class Stretched(methods.AbstractMethod):
    kernel = None

    def transform(self, rows, layout):
        return rows * torch.arange(layout.width)


class Positive(Stretched):
    def transform(self, rows, layout):
        return rows.abs()


class Moved(Stretched):
    def transform(self, rows, layout):
        return rows + 1


class Narrow(Stretched):
    def transform(self, rows, layout):
        return rows / rows.square().sum(1, keepdim=True).sqrt()


class SaysModules(methods.GradDot):
    def unit_scope(self, layout):
        return "module"


class AlwaysModules(methods.GradCos):
    def unit_scope(self, layout):
        return "module"


class AlwaysWhole(methods.GradCos):
    def unit_scope(self, layout):
        return "global"


class PlainTargets(methods.GradCos):
    def transform_targets(self, rows, layout):
        return rows


@pytest.mark.parametrize(
    ("law", "wrong", "right"),
    [
        ("test_a_method_that_is_said_to_be_linear_transforms_rows_linearly", (Positive, Moved), (Stretched,)),
        (
            "test_transform_divides_by_the_norms_of_the_unit_scope",
            (SaysModules, AlwaysModules, AlwaysWhole, PlainTargets),
            (methods.GradDot, methods.GradCos),
        ),
        ("test_rows_of_float16_are_transformed_as_wider_ones", (Narrow,), (Stretched, methods.GradCos)),
    ],
)
def test_the_kit_fails_for_what_a_method_says_of_its_transform_wrongly(law, wrong, right):
    for cls in (*wrong, *right):

        class Kit(MethodTests):
            def make_method(self, cls=cls):
                return cls()

        with pytest.raises(AssertionError) if cls in wrong else contextlib.nullcontext():
            getattr(Kit(), law)()


@pytest.mark.parametrize("strength", [float("inf"), (0.5, float("nan")), torch.ones(2), {1.0}])
def test_a_field_that_cannot_identify_scores_is_named(strength):
    with pytest.raises(InvalidInputError, match=r"SignedDot\.strength must be a text, a finite number"):
        SignedDot(strength=strength).to_json()


@pytest.mark.parametrize("strength", [((1.0, 2.0), (3.0, 4.0)), [(0.5,)], {1: 0.5}, ({"a": (1,)},)])
def test_an_identity_with_nested_fields_is_equal_to_what_a_store_returns(strength):
    method = SignedDot(strength=strength)
    assert method.to_json() == json.loads(json.dumps(method.to_json()))


@pytest.mark.parametrize("nested", [False, True])
def test_a_long_fit_in_a_field_is_shown_by_its_first_values_its_size_and_a_digest(nested, tmp_path):
    data = labelled(12)
    made = Attributor(nn.Linear(4, 3), "image_classification", tmp_path / "a.zarr", proj_dim=4)
    made.featurize(data)
    values = tuple(float(value) for value in range(1000))
    fits = values, (*values[:-1], 0.5)
    first, other = (Fitted(fit=(fit,) * 20 if nested else fit) for fit in fits)
    shown = r"\[\[0.0, 1.0, .*20 values, digest" if nested else r"\[0.0, 1.0, ... 1000 values, digest"
    with pytest.raises(StateError, match=shown) as refused:
        made.scores("targets", method=first)
    texts = [str(first), str(other), str(refused.value), str(made.score(data, method=first))]
    texts += [repr(Attributor(nn.Linear(4, 3), "image_classification", None, proj_dim=4, method=first))]
    assert max(map(len, texts)) < 1500
    assert texts[0] != texts[1]
    assert all(re.search(shown, text) for text in texts)
    with pytest.raises(StateError, match=f"made with method=.*fit': {shown}"):
        made.scores("targets", method=other)


NUMBERS = {str(number): float(number) for number in range(5000)}


@pytest.mark.parametrize(
    ("fit", "other"),
    [
        (NUMBERS, {**NUMBERS, "4999": 0.5}),
        ("x" * 5000, "x" * 4999 + "y"),
        ([{(0, 1): [0.0] * 1000}] * 9, [{(0, 1): [0.5] * 1000}] * 9),
    ],
)
def test_a_long_text_and_a_long_dict_in_a_field_are_shown_short(fit, other):
    texts = [str(Fitted(fit=one)) for one in (fit, other)]
    assert max(map(len, texts)) < 600
    assert texts[0] != texts[1]


def test_a_method_with_a_repr_is_shown_by_it():
    @dataclass(frozen=True, kw_only=True)
    class Named(Fitted):
        def __repr__(self):
            return f"the fit of {len(self.fit)} numbers"

    assert str(Named(fit=(0.0,) * 5000)) == "the fit of 5000 numbers"


def test_no_name_of_a_method_can_be_entered():
    with pytest.raises(TypeError):
        methods.METHODS["SignedDot"] = SignedDot


@pytest.mark.quick
def test_every_method_of_the_package_is_in_this_file():
    assert set(methods.METHODS.values()) <= {type(method) for method in CONFORMING.values()}
