"""Conformance kit for attribution methods: the laws that a subclass of ``AbstractMethod`` must obey.

Subclass it in a test file and return the method; pytest runs the laws::

    class TestMyMethod(MethodTests):
        def make_method(self):
            return MyMethod(strength=0.5)

The scores come from a small classifier whose rows are stored in float32, once for all laws. For a method whose
``check_rows`` refuses plain gradients, its train rows are Adam updates.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite.attributor import Attributor
from trak_lite.errors import InvalidInputError
from trak_lite.methods import AbstractMethod
from trak_lite.scoring.scores import Scores
from trak_lite.types import FeatureLayout

_NUM_ROWS, _NUM_TARGETS, _CLASSES = 40, 6, 3


class MethodTests(ABC):
    """Laws of every method: an immutable value whose scores depend only on rows, targets and its fields."""

    @abstractmethod
    def make_method(self) -> AbstractMethod:
        """Return the method under test."""

    def test_it_is_a_value(self) -> None:
        """Two methods with the same fields are equal, and no field can be changed."""
        method = self.make_method()

        assert method == self.make_method()
        assert hash(method) == hash(self.make_method())
        name = next(field.name for field in dataclasses.fields(method))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, name, None)

    def test_its_identity_is_plain_and_complete(self) -> None:
        """``to_json`` holds the name and every field that can be set, but for defaults, and survives JSON."""
        method = self.make_method()
        values = method.to_json()

        assert json.loads(json.dumps(values, allow_nan=False)) == values
        fields = {field.name: field.default for field in dataclasses.fields(method) if field.init}
        assert set(values) - {"version", *fields} == {"name"}
        assert [name for name in fields.keys() - values if getattr(method, name) != fields[name]] == []

    def test_deciding_twice_changes_nothing(self) -> None:
        method = self.make_method()
        layout = _featurized(_kind_of_rows(method)).layout
        decided = method.decided(layout)

        assert decided.decided(layout) == decided

    def test_rows_are_transformed_one_by_one(self) -> None:
        """``transform`` of a row does not depend on the rows beside it, and keeps its shape."""
        method = self.make_method()
        layout = _featurized(_kind_of_rows(method)).layout
        rows = _normal_rows(layout)
        whole = method.transform(rows.clone(), layout)

        assert whole.shape == rows.shape
        alone = torch.cat([method.transform(rows[[row]], layout) for row in range(len(rows))])
        torch.testing.assert_close(alone, whole)

    def test_rows_of_float16_are_transformed_as_wider_ones(self) -> None:
        """Rows are float16 by default, whose squares overflow above 256."""
        method = self.make_method()
        layout = _featurized(_kind_of_rows(method)).layout
        rows = (1000 * _normal_rows(layout)).half()

        for transform in (method.transform, method.transform_targets):
            expected = transform(rows.float(), layout)
            found = transform(rows.clone(), layout).float()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))

    def test_a_method_that_is_said_to_be_linear_transforms_rows_linearly(self) -> None:
        """If ``linear`` is true, ``transform(2.5 x - 0.5 y)`` is ``2.5 transform(x) - 0.5 transform(y)``."""
        method = self.make_method()
        if method.kernel is not None or not method.linear:
            pytest.skip("the method does not transform rows, or is not linear")
        layout = _featurized(_kind_of_rows(method)).layout
        x, y = _normal_rows(layout), _normal_rows(layout).flip(0)

        expected = 2.5 * method.transform(x.clone(), layout) - 0.5 * method.transform(y.clone(), layout)
        _assert_near(method.transform(2.5 * x - 0.5 * y, layout), expected)

    def test_transform_divides_by_the_norms_of_the_unit_scope(self) -> None:
        """Scores of unprojected gradients divide those of rows and targets by these norms, and call no ``transform``.

        With ``"module"`` each segment is divided by its norm, with ``"global"`` the whole row, as always if the layout
        has one segment for all modules.
        """
        method = self.make_method()
        modules = _featurized(_kind_of_rows(method)).layout
        joint = FeatureLayout.joint(modules.width)
        rows = _normal_rows(modules)
        for layout, divided in (
            (modules, {"module": modules, "global": joint}),
            (joint, {"global": joint}),
        ):
            if method.kernel is not None or (scope := method.unit_scope(layout)) is None:
                continue
            assert scope in divided
            parts = [rows[:, one.start : one.stop] for one in divided[scope].segments]
            expected = torch.cat([part / part.norm(dim=1, keepdim=True) for part in parts], 1)
            for transform in (method.transform, method.transform_targets):
                _assert_near(transform(rows.clone(), method.layout_of(layout)), expected)

    def test_scores_are_finite_and_not_all_zero(self) -> None:
        """Every train row has a finite score for every target, and some score is not zero."""
        scores = self._scores().numpy()

        assert scores.shape == (_NUM_ROWS, _NUM_TARGETS)
        assert np.isfinite(scores).all()
        assert scores.any()

    def test_scores_computed_when_read_are_those_that_are_stored(self) -> None:
        """Scores with ``dense=False`` are bitwise equal to stored scores."""
        assert self._scores(dense=False).numpy().tobytes() == self._scores().numpy().tobytes()

    def test_a_target_has_the_same_scores_beside_others(self) -> None:
        alone = self._scores(targets=slice(2, 3)).numpy()

        np.testing.assert_allclose(alone, self._scores().numpy()[:, 2:3], rtol=1e-4, atol=_small(alone))

    def test_self_influence_is_the_score_of_a_row_for_itself(self) -> None:
        """Self-influence is the diagonal of the scores with the train rows as targets.

        EK-FAC does not have it, and neither have Adam updates.
        """
        method = self.make_method()
        if method.inverse is not None or _kind_of_rows(method) != "none":
            pytest.skip("self-influence needs the target rows of the train data, which are not stored")
        scores = _featurized("none").score(_data(_NUM_ROWS, 0), _new_name(), method=method)

        diagonal = np.diagonal(scores.numpy())
        np.testing.assert_allclose(scores.self_influence(), diagonal, rtol=2e-4, atol=_small(diagonal))

    def _scores(self, *, dense: bool = True, targets: slice = slice(None)) -> Scores:
        method = self.make_method()
        chosen = TensorDataset(*(part[targets] for part in _data(_NUM_TARGETS, 1).tensors))
        return _featurized(_kind_of_rows(method)).score(chosen, _new_name(), method=method, dense=dense)


def _data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs: Tensor = torch.randn(count, 4, generator=generator, device="cpu")
    return TensorDataset(inputs, torch.randint(_CLASSES, (count,), generator=generator, device="cpu"))


def _kind_of_rows(method: AbstractMethod) -> Literal["none", "adam_update"]:
    """Return the ``normalize`` that makes the rows that the method needs."""
    try:
        method.check_rows("none")
    except InvalidInputError:
        return "adam_update"
    return "none"


_NUMBERS = itertools.count()


def _new_name() -> str:
    """Return a name of targets that no other law has used, so that none finds the scores of another."""
    return f"targets-{next(_NUMBERS)}"


@functools.cache
def _featurized(kind: Literal["none", "adam_update"]) -> Attributor:
    """Return train rows in memory, which all laws of all methods share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, _CLASSES))
    attributor = Attributor(
        model, "image_classification", None, proj_dim=8, dtype="float32", progress=False, normalize=kind
    )
    train = _data(_NUM_ROWS, 0)
    inputs, labels = train.tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # fills the moments, keeps the weights
    torch.autograd.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
    attributor.featurize(train, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return attributor


def _normal_rows(layout: FeatureLayout) -> Tensor:
    return torch.randn(5, layout.width, generator=torch.Generator().manual_seed(0), device="cpu")


def _assert_near(actual: Tensor, expected: Tensor) -> None:
    """Compare rows of float32, relative to the largest entry."""
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol, check_dtype=False)


def _small(values: NDArray[np.float32]) -> float:
    return 1e-5 * float(np.abs(values).max())
