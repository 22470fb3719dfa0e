"""The choice of a projector by name."""

from __future__ import annotations

import pytest

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import PROJECTORS, CountSketchProjector, RademacherProjector
from trak_lite.projectors.select import select_projector

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", PROJECTORS)
def test_every_registered_name_makes_its_projector(name):
    projector = select_projector(name, proj_dim=8, seed=3, device="cpu")

    assert projector.fingerprint() == PROJECTORS[name](8, seed=3, device="cpu").fingerprint()


def test_auto_is_a_countsketch_of_the_given_size_and_seed():
    chosen = select_projector("auto", proj_dim=8, seed=3)

    assert chosen.fingerprint() == CountSketchProjector(8, seed=3).fingerprint()


def test_none_keeps_the_gradients():
    projector = select_projector("none", proj_dim=8, seed=0)

    assert projector.layout({"w": (3, 4)}).width == 12


def test_a_projector_is_taken_as_it_is():
    projector = RademacherProjector(4)

    assert select_projector(projector, proj_dim=8, seed=0) is projector


def test_an_unknown_name_is_refused_with_the_nearest_known():
    with pytest.raises(InvalidInputError, match=r"got 'gausian'.*Did you mean 'gaussian'"):
        select_projector("gausian", proj_dim=8)


@pytest.mark.parametrize("projector", [None, 3, RademacherProjector])
def test_what_is_neither_a_name_nor_a_projector_is_refused(projector):
    with pytest.raises(InvalidInputError, match="or an AbstractProjector, got"):
        select_projector(projector, proj_dim=8)
