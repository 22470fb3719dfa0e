"""A segment for every module."""

from __future__ import annotations

import functools

import pytest
import torch
from projection_cases import random_gradients

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import CountSketchProjector, GaussianProjector, NoOpProjector, TwoSidedProjector
from trak_lite.projectors.per_module import PerModuleProjector
from trak_lite.testing.projectors import ProjectorTests
from trak_lite.types import DenseBlock

SHAPES = {"a.weight": (3, 2), "head": (5,), "a.bias": (3,), "b.c.weight": (2, 70)}
gradients = functools.partial(random_gradients, SHAPES, 4, dtype=torch.float32)
INNER = {
    "countsketch": lambda k, seed: CountSketchProjector(k, seed=seed),
    "gaussian": lambda k, seed: GaussianProjector(k, seed=seed),
    "identity": lambda k, seed: NoOpProjector(),
}


class TestPerModule(ProjectorTests):
    @pytest.fixture(autouse=True, params=INNER)
    def _inner(self, request):
        self.make = INNER[request.param]

    def make_projector(self, proj_dim, *, seed):
        return PerModuleProjector(self.make(proj_dim, seed))


@pytest.mark.parametrize("inner", INNER)
def test_a_segment_holds_what_the_projector_makes_of_its_module_alone(inner):
    grads = gradients()
    projector = INNER[inner](8, 1)
    row = PerModuleProjector(INNER[inner](8, 1)).project(grads, 2)
    layout = PerModuleProjector(projector).layout(SHAPES)

    assert [segment.name for segment in layout.segments] == ["a", "(model)", "b.c"]
    for segment, names in zip(
        layout.segments, (["a.weight", "a.bias"], ["head"], ["b.c.weight"]), strict=True
    ):
        own = {name: grads[name] for name in names}
        is_small = sum(gradient[0].numel() for gradient in own.values()) <= 8
        alone = NoOpProjector().project(own, 2) if is_small else projector.project(own, 2)
        torch.testing.assert_close(row[:, segment.start : segment.stop], alone, rtol=1e-6, atol=1e-6)


def test_the_sum_of_the_segments_is_the_joint_row():
    grads = gradients()
    row = PerModuleProjector(CountSketchProjector(4)).project(grads, 0)

    joint = CountSketchProjector(4).project(grads, 0)
    torch.testing.assert_close(row.view(-1, 3, 4).sum(1), joint, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("proj_dim", [8, 9, 139, 140])
@pytest.mark.parametrize("inner", ["countsketch", "gaussian"])
def test_a_module_with_no_more_parameters_than_features_is_stored_whole(inner, proj_dim):
    projector = PerModuleProjector(INNER[inner](proj_dim, 0))
    grads = gradients()

    segments = projector.layout(SHAPES).segments
    row = projector.project(grads, 0)

    assert [segment.width for segment in segments] == [min(size, proj_dim) for size in (9, 5, 140)]
    for segment, names in zip(segments, (["a.weight", "a.bias"], ["head"], ["b.c.weight"]), strict=True):
        whole = torch.cat([grads[name].flatten(1) for name in names], 1)
        if whole.shape[1] <= proj_dim:
            assert torch.equal(row[:, segment.start : segment.stop], whole)


def test_segments_of_a_projector_keep_their_names_below_the_module():
    layout = PerModuleProjector(TwoSidedProjector(2, rest_dim=3)).layout(SHAPES)

    assert [segment.name for segment in layout.segments] == ["a/a.weight", "a/rest", "(model)", "b.c"]


def test_the_fingerprint_differs_from_the_joint_one_and_with_the_projector():
    inner = [CountSketchProjector(8), CountSketchProjector(8, seed=1), GaussianProjector(8)]
    fingerprints = [repr(p.fingerprint()) for one in inner for p in (one, PerModuleProjector(one))]

    assert len(set(fingerprints)) == len(fingerprints)


def test_a_block_of_an_unknown_parameter_is_refused():
    accumulator = PerModuleProjector(CountSketchProjector(8)).accumulator(2, model_id=0, parameters=SHAPES)

    with pytest.raises(InvalidInputError, match="which is not among the 4 parameters"):
        accumulator.add(DenseBlock("a.other", torch.zeros(2, 3)))
