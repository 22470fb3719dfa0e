"""A segment for every matrix or module: two-sided projections, principal axes, and the choice of a projector by name.

The laws of all projectors hold what concerns two-sided projections with random matrices.
"""

import functools
import math

import numpy as np
import pytest
import torch
from projection_cases import accumulated, dense_blocks, factors, formed, random, random_gradients
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import (
    PROJECTORS,
    CountSketchProjector,
    GaussianProjector,
    NoOpProjector,
    RademacherProjector,
    TwoSidedProjector,
)
from trak_lite.projectors.per_module import PerModuleProjector
from trak_lite.projectors.random.hash import Stream
from trak_lite.projectors.select import select_projector
from trak_lite.projectors.two_sided.principal_axes import PrincipalAxes
from trak_lite.testing import ProjectorTests
from trak_lite.types import DenseBlock, FactoredBlock

SHAPES = {
    "fc.weight": (6, 9),
    "fc.bias": (6,),
    "conv.weight": (5, 2, 3, 2),
    "thin.weight": (2, 11),
    "small.weight": (3, 2),
    "scale": (),
}
MATRICES = {"fc.weight": (6, 9), "conv.weight": (5, 12), "thin.weight": (2, 11), "small.weight": (3, 2)}
SEGMENTS = [["fc.weight", 0, 12], ["conv.weight", 12, 24], ["thin.weight", 24, 32], ["small.weight", 32, 38]]
SIDES = (Stream.TWO_SIDED_OUT, Stream.TWO_SIDED_IN)
gradients = functools.partial(random_gradients, SHAPES)
accumulate = functools.partial(accumulated, parameters=SHAPES)


class BlockStream:
    """A gradient computer whose batches are lists of blocks."""

    def __init__(self, parameters):
        self.parameters = parameters

    def stream_gradients(self, batch, sink):
        for block in batch:
            sink(block)


def fitted_axes(k_in, k_out=None, *, seed=0, shapes=SHAPES, **options):
    batches = [dense_blocks(random_gradients(shapes, seed=100 * seed + i)) for i in range(3)]
    return PrincipalAxes.fit(BlockStream(shapes), batches, k_in=k_in, k_out=k_out, **options)


INNER = {
    "countsketch": lambda k, seed: CountSketchProjector(k, seed=seed),
    "gaussian": lambda k, seed: GaussianProjector(k, seed=seed),
    "identity": lambda k, seed: NoOpProjector(),
}


class TestLaws(ProjectorTests):
    @pytest.fixture(autouse=True, params=["fitted", *INNER])
    def _kind(self, request):
        self.kind = request.param

    def make_projector(self, proj_dim, *, seed):
        if self.kind == "fitted":
            shapes = {"embed": (5, 3), "norm.scale": (), "body.weight": (4, 3, 2), "head.bias": (7,)}
            return TwoSidedProjector(2, 3, matrices=fitted_axes(2, 3, shapes=shapes), seed=seed)
        return PerModuleProjector(INNER[self.kind](proj_dim // 2, seed))


# ---- two-sided
@pytest.mark.parametrize(
    ("projector", "shapes", "expected"),
    [
        (TwoSidedProjector(4, 3, rest_dim=8), SHAPES, [*SEGMENTS, ["rest", 38, 46]]),
        (TwoSidedProjector(4, 3, rest_dim=8), MATRICES, SEGMENTS),
        (TwoSidedProjector(4, 3, rest_dim=8, layout="joint"), SHAPES, [["joint", 0, 46]]),
        (TwoSidedProjector(2, layout="joint"), {}, []),
        (TwoSidedProjector(3, 2), {"b": (5,)}, [["rest", 0, 6]]),
        (TwoSidedProjector(2, max_side=49, rest_dim=5),
         {"tokens": (50, 4), "head": (4, 51), "empty": (0, 4), "scale": (4,), "fits": (49, 49)},
         [["fits", 0, 4], ["rest", 4, 9]]),
        (TwoSidedProjector(2, max_side=4, rest=TwoSidedProjector(1, max_side=8, rest_dim=3)),
         {"a": (3, 3), "b": (7, 7), "c": (5,)}, [["a", 0, 4], ["rest.b", 4, 5], ["rest.rest", 5, 8]]),
    ],
)  # fmt: skip
def test_every_matrix_and_the_rest_have_a_segment(projector, shapes, expected):
    assert projector.layout(shapes).to_json() == expected
    grads = random_gradients(shapes)
    if expected:
        assert projector.project(grads, 0).shape == (4, expected[-1][-1])


# ---- principal axes
def low_rank_factors(seed):
    """Factors in a plane of the input side and a 3-space of the output side; the spaces do not depend on the seed."""
    x = random(5, 4, 2, seed=seed) @ random(2, 9, seed=90)
    g = random(5, 4, 3, seed=seed + 1) @ random(3, 8, seed=91)
    return FactoredBlock("w", x, g)


@pytest.mark.parametrize("covariances", ["factors", "gradients"])
def test_axes_keep_a_gradient_of_low_rank_without_loss(covariances):
    """Also gradients that they were not fitted on, from the same spaces: all inner products stay."""
    stream, block = BlockStream({"w": (8, 9)}), low_rank_factors(7)
    axes = PrincipalAxes.fit(stream, [[low_rank_factors(0)]], k_in=2, k_out=3, covariances=covariances)
    projector = TwoSidedProjector(2, 3, matrices=axes)
    rows = block.dense()
    scale = float(rows.square().sum(1).max())
    for given in (block, formed(block, (8, 9))):
        features = accumulated(projector, [given], num_samples=5, parameters=stream.parameters)
        torch.testing.assert_close(features @ features.T, rows @ rows.T, rtol=1e-6, atol=1e-6 * scale)


def assert_leading(axes, positions):
    """The axes are the first right singular vectors of all positions, with the largest entry positive."""
    expected = np.linalg.svd(positions.flatten(0, -2).numpy(), full_matrices=False)[2][: axes.shape[1]].T
    found = axes.double().numpy()
    np.testing.assert_allclose(np.abs((expected * found).sum(0)), 1, atol=1e-6)
    assert (found[np.abs(found).argmax(0), np.arange(axes.shape[1])] > 0).all()


def test_axes_are_the_leading_singular_vectors_of_all_positions():
    blocks = [FactoredBlock("w", random(3, 4, 9, seed=i), random(3, 4, 7, seed=i + 50)) for i in range(3)]
    axes = PrincipalAxes.fit(BlockStream({"w": (7, 9)}), [[block] for block in blocks], k_in=4, k_out=2)
    assert_leading(axes.axes("w", SIDES[1]), torch.cat([block.inputs for block in blocks]))
    assert_leading(axes.axes("w", SIDES[0]), torch.cat([block.output_grads for block in blocks]))
    model, batch = nn.Linear(5, 4).double(), (random(6, 5), torch.arange(6) % 4)
    axes = PrincipalAxes.fit(HookGradientComputer(model, ImageClassificationModelOutput()), [batch], k_in=3)
    assert_leading(axes.axes("weight", SIDES[1]), batch[0])


def test_axes_of_gradient_covariances_do_not_depend_on_how_gradients_come():
    stream, block = BlockStream({"w": (6, 9)}), factors((6, 9), 5)
    settings = {"k_in": 2, "k_out": 3, "covariances": "gradients"}
    fits = [PrincipalAxes.fit(stream, [[one]], **settings) for one in (block, formed(block, (6, 9)))]
    for side in SIDES:
        torch.testing.assert_close(fits[0].axes("w", side), fits[1].axes("w", side))


def test_fitted_matrices_are_the_same_for_every_model_and_seed():
    grads, axes = {name: gradients()[name] for name in MATRICES}, fitted_axes(3)
    first = TwoSidedProjector(3, matrices=axes).project(grads, 0)
    assert torch.equal(TwoSidedProjector(3, matrices=axes).project(grads, 1), first)
    assert torch.equal(TwoSidedProjector(3, matrices=axes, seed=4).project(grads, 0), first)
    fingerprints = [TwoSidedProjector(3, matrices=m).fingerprint() for m in (axes, fitted_axes(3, seed=1))]
    assert fingerprints[0] != fingerprints[1] != TwoSidedProjector(3).fingerprint()


def test_axes_come_back_from_a_file_bit_by_bit(tmp_path):
    axes, path = fitted_axes(3, 2), tmp_path / "axes.safetensors"
    axes.save(path)
    loaded = PrincipalAxes.load(path)
    assert list(tmp_path.iterdir()) == [path]
    assert (loaded.k_in, loaded.k_out, loaded.shapes) == (3, 2, MATRICES)
    one, other = (TwoSidedProjector(3, 2, matrices=a) for a in (axes, loaded))
    assert one.fingerprint() == other.fingerprint()
    assert torch.equal(one.project(gradients(), 0), other.project(gradients(), 0))


def test_changing_the_given_axes_afterwards_changes_nothing():
    given = torch.eye(4)[:, :2].contiguous()
    axes = PrincipalAxes({"w": (2, 4)}, {"w:in": given}, k_in=2, k_out=2)
    digest = axes.digest
    given[0, 0] = 2
    assert torch.equal(axes.axes("w", Stream.TWO_SIDED_IN), torch.eye(4)[:, :2])
    assert PrincipalAxes({"w": (2, 4)}, {"w:in": given}, k_in=2, k_out=2).digest != digest


def written(path, change=lambda columns: None, **metadata):
    """A file of axes with changed columns and other metadata."""
    fitted_axes(3).save(path)
    with safe_open(path, framework="pt") as file:
        columns, before = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    change(columns)
    save_file(columns, path, {"metadata": before, **metadata}["metadata"])


def flip(columns):
    columns["fc.weight:in"].view(torch.int32)[0, 0] ^= 1


HEADER = {"format": "trak_lite.principal_axes.1"}
UNREADABLE = r"Cannot read principal axes from .*axes\.safetensors"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, UNREADABLE),
        (lambda path: path.write_bytes(b""), UNREADABLE),
        (lambda path: path.write_bytes(b"no safetensors file at all"), UNREADABLE),
        (lambda path: written(path, lambda columns: columns.pop("fc.weight:in")),
         r"\['fc\.weight:in'\] have shapes \[None\], expected \[\(9, 3\)\]"),
        (lambda path: written(path, flip), "changed after it was written"),
        (lambda path: written(path, metadata=None),
         r"has format None, expected 'trak_lite\.principal_axes"),
        *((lambda path, given=given: written(path, metadata=HEADER | given), "does not contain the sizes")
          for given in ({}, *({"sizes": sizes} for sizes in (
              "{", "[]", "{}", '{"k_in": 1, "k_out": 1, "shapes": {"w": [1]}}', '{"k_in": 1, "k_out": 1, "shapes": 1}',
          )))),
    ],
)  # fmt: skip
def test_a_file_of_axes_that_is_not_as_it_was_written_is_refused(write, message, tmp_path):
    write(tmp_path / "axes.safetensors")
    with pytest.raises(InvalidInputError, match=message):
        PrincipalAxes.load(tmp_path / "axes.safetensors")


def fit(blocks=(), shape=(3, 4), **options):
    return PrincipalAxes.fit(BlockStream({"w": shape}), blocks, k_in=2, **options)


def with_axes(*sizes, shapes):
    return TwoSidedProjector(3, matrices=fitted_axes(*sizes)).layout(shapes)


def select(projector, layout="auto"):
    return select_projector(projector, proj_dim=8, layout=layout)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PrincipalAxes({"w": (1, 3)}, {"w:in": torch.full((3, 1), math.nan)}, k_in=1, k_out=1),
         InvalidInputError, r"\['w:in'\] hold NaN or infinity"),
        (fit, InvalidInputError, r"The batches gave no gradient of \['w:out', 'w:in'\], so no axes"),
        (lambda: fit([[DenseBlock("w", torch.full((1, 3, 4), math.inf))]]), NonFiniteError,
         "covariance of 'w:out' holds NaN or infinity"),
        (lambda: fit([[factors((3, 4), 5)], [formed(factors((3, 4), 5), (3, 4))]]), InvalidInputError,
         "factored in one block and formed in another"),
        (lambda: fit(covariances="gradient"), InvalidInputError, "covariances must be one of"),
        (lambda: with_axes(3, 2, shapes=SHAPES), InvalidInputError, "fitted with k_in=3 and k_out=2, expected 3 and 3"),
        *((lambda shapes=shapes: with_axes(3, shapes=shapes), InvalidInputError, "The principal axes have the shape")
          for shapes in ({"other": (6, 9)}, {"fc.weight": (6, 10)})),
        (lambda: accumulate(TwoSidedProjector(3, matrices=fitted_axes(3)), [], parameters={"fc.weight": (6, 10)}),
         InvalidInputError, "The principal axes have the shape"),
        (lambda: select("gausian"), InvalidInputError, "got 'gausian'.*Did you mean 'gaussian'"),
        (lambda: select("gaussian", "modules"), InvalidInputError, "Did you mean 'module'"),
        (lambda: select(RademacherProjector(4), "joint"), InvalidInputError, "which has its own layout"),
        *((lambda given=given: select(given), InvalidInputError, "or an AbstractProjector, got")
          for given in (None, 3, RademacherProjector)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- a segment for every module
MODULES = {"a.weight": (3, 2), "head": (5,), "a.bias": (3,), "b.c.weight": (2, 70)}
NAMES = {"a": ["a.weight", "a.bias"], "(model)": ["head"], "b.c": ["b.c.weight"]}


@pytest.mark.parametrize("proj_dim", [8, 9, 139, 140])
@pytest.mark.parametrize("inner", INNER)
def test_a_segment_holds_what_the_projector_makes_of_its_module_alone(inner, proj_dim):
    """A module with no more parameters than features is stored whole."""
    grads = random_gradients(MODULES, dtype=torch.float32)
    projector = INNER[inner](proj_dim, 1)
    made = PerModuleProjector(projector)
    row, segments = made.project(grads, 2), made.layout(MODULES).segments
    assert [segment.name for segment in segments] == list(NAMES)
    for segment, names in zip(segments, NAMES.values(), strict=True):
        own = {name: grads[name] for name in names}
        size = sum(grad[0].numel() for grad in own.values())
        whole = size <= proj_dim or inner == "identity"
        assert segment.width == (size if whole else proj_dim)
        alone = NoOpProjector().project(own, 2) if whole else projector.project(own, 2)
        torch.testing.assert_close(row[:, segment.start : segment.stop], alone, rtol=1e-6, atol=1e-6)


def test_modules_have_names_fingerprints_and_errors_of_their_own():
    two_sided = PerModuleProjector(TwoSidedProjector(2, rest_dim=3))
    names = [segment.name for segment in two_sided.layout(MODULES).segments]
    assert names == ["a/a.weight", "a/rest", "(model)", "b.c"]
    inner = [CountSketchProjector(8), CountSketchProjector(8, seed=1), GaussianProjector(8)]
    fingerprints = [repr(p.fingerprint()) for one in inner for p in (one, PerModuleProjector(one))]
    assert len(set(fingerprints)) == len(fingerprints)
    with pytest.raises(InvalidInputError, match="which is not among the 4 parameters"):
        accumulated(two_sided, [DenseBlock("a.other", torch.zeros(4, 3))], parameters=MODULES)


# ---- the choice by name
@pytest.mark.quick
def test_names_objects_and_layouts_are_taken_as_documented():
    for name, make in PROJECTORS.items():
        made = select_projector(name, proj_dim=8, seed=3, device="cpu")
        module = select_projector(name, proj_dim=8, seed=3, layout="module")
        assert made.fingerprint() == make(8, seed=3, device="cpu").fingerprint()
        expected = made if name == "two_sided" else PerModuleProjector(made)
        assert module.fingerprint() == expected.fingerprint()
    auto = select_projector("auto", proj_dim=8, seed=3)
    assert auto.fingerprint() == CountSketchProjector(8, seed=3).fingerprint()
    assert select_projector("none", proj_dim=8).layout({"w": (3, 4)}).width == 12
    joint = select_projector("two_sided", proj_dim=8, layout="joint")
    assert joint.fingerprint() == TwoSidedProjector(2, layout="joint").fingerprint()
    projector = RademacherProjector(4)
    assert select_projector(projector, proj_dim=8, seed=0) is projector


@pytest.mark.quick
def test_a_projector_that_is_entered_under_a_name_gets_a_device_only_if_it_takes_one(monkeypatch):
    taken = {"proj_dim": 8, "seed": 3}
    for make, device in (
        (lambda proj_dim, *, seed: CountSketchProjector(proj_dim, seed=seed), None),
        (
            lambda proj_dim, *, seed, device="cpu": CountSketchProjector(proj_dim, seed=seed, device=device),
            "meta",
        ),
        (functools.partial(CountSketchProjector, copies=2), "meta"),
        (lambda *args, **kwargs: CountSketchProjector(*args, **kwargs), "meta"),
    ):
        monkeypatch.setitem(PROJECTORS, "own", make)
        made = select_projector("own", **taken, device="meta")
        assert (made.proj_dim, made.seed, made.device) == (8, 3, device)


@pytest.mark.cuda
def test_fitted_features_are_the_same_on_cuda_up_to_rounding():
    axes, block = fitted_axes(3, shapes={"w": (6, 9)}), factors((6, 9), 5)
    both = (TwoSidedProjector(3, matrices=axes, device=where) for where in (None, "cuda"))
    host, device = (accumulated(one, [block], num_samples=3, parameters={"w": (6, 9)}) for one in both)
    assert device.is_cuda
    torch.testing.assert_close(device.cpu(), host, rtol=1e-10, atol=1e-11)
