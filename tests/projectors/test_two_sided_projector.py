"""The two-sided projector: against dense Kronecker products, from factors and from gradients, random and fitted."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import projection_reference as reference
import pytest
import torch
from projection_cases import LargestTensor, accumulated, dense_blocks, random, random_gradients
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import CountSketchProjector, GaussianProjector, NoOpProjector
from trak_lite.projectors.random.hash import Stream
from trak_lite.projectors.two_sided.principal_axes import PrincipalAxes
from trak_lite.projectors.two_sided.projector import TwoSidedProjector
from trak_lite.testing.projectors import ProjectorTests
from trak_lite.types import DenseBlock, FactoredBlock, FeatureLayout

SHAPES = {
    "fc.weight": (6, 9),
    "fc.bias": (6,),
    "conv.weight": (5, 2, 3, 2),
    "thin.weight": (2, 11),
    "small.weight": (3, 2),
    "scale": (),
}
MATRICES = {"fc.weight": (6, 9), "conv.weight": (5, 12), "thin.weight": (2, 11), "small.weight": (3, 2)}
STREAMS = {"in": 16, "out": 17}
gradients = functools.partial(random_gradients, SHAPES)
accumulate = functools.partial(accumulated, parameters=SHAPES)


class BlockStream:
    """A gradient computer whose batches are lists of blocks."""

    def __init__(self, parameters) -> None:
        self.parameters = parameters

    def stream_gradients(self, batch, sink):
        for block in batch:
            sink(block)


def fitted_axes(k_in, k_out=None, *, seed=0, shapes=SHAPES, **options) -> PrincipalAxes:
    batches = [dense_blocks(random_gradients(shapes, seed=100 * seed + i)) for i in range(3)]
    return PrincipalAxes.fit(BlockStream(shapes), batches, k_in=k_in, k_out=k_out, **options)


# ---- the laws of every projector


class TestLaws(ProjectorTests):
    @pytest.fixture(autouse=True, params=["rademacher", "gaussian joint", "fitted", "identity for the rest"])
    def _kind(self, request):
        self.kind = request.param

    def make_projector(self, proj_dim: int, *, seed: int) -> TwoSidedProjector:
        if self.kind == "rademacher":
            return TwoSidedProjector.of_width(proj_dim, seed=seed)
        if self.kind == "gaussian joint":
            return TwoSidedProjector(2, 3, matrices="gaussian", layout="joint", seed=seed)
        if self.kind == "fitted":
            shapes = {"embed": (5, 3), "norm.scale": (), "body.weight": (4, 3, 2), "head.bias": (7,)}
            return TwoSidedProjector(2, 3, matrices=fitted_axes(2, 3, shapes=shapes), seed=seed)
        return TwoSidedProjector(2, seed=seed, rest=NoOpProjector())


# ---- which numbers


def side_matrix(kind: str, name: str, side: str, shape: tuple[int, int], *, seed: int, model_id: int):
    """Entries of one side, written again with plain integers; the identity where nothing is saved."""
    size, width = shape
    if width >= size:
        return np.eye(size)
    key = reference.stream_key(seed, model_id, name, STREAMS[side])

    def entry(row: int, column: int) -> float:
        if kind == "rademacher":
            word = reference.matrix_word(key, row, column // 32)
            return -1.0 if word >> (column % 32) & 1 else 1.0
        word = reference.matrix_word(key, row, column)
        total = reference.quantiles()[word % 2**16] + reference.quantiles()[word // 2**16]
        return float(np.float32(total) * reference.normal_scale())

    return np.array([[entry(i, j) for j in range(width)] for i in range(size)]) / math.sqrt(width)


def kronecker_features(kind, grads, k_in, k_out, *, seed, model_id, matrices=MATRICES):
    """The features of the matrices as one product with a dense Kronecker matrix each."""
    parts = []
    for name, (d_out, d_in) in matrices.items():
        p_out = side_matrix(kind, name, "out", (d_out, k_out), seed=seed, model_id=model_id)
        p_in = side_matrix(kind, name, "in", (d_in, k_in), seed=seed, model_id=model_id)
        parts.append(grads[name].flatten(1).numpy() @ np.kron(p_out, p_in))
    return np.concatenate(parts, 1)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize(("k_in", "k_out"), [(4, 3), (1, 5), (40, 2)])
@pytest.mark.parametrize(("seed", "model_id"), [(0, 0), (7, 3)])
def test_features_equal_the_dense_kronecker_product(kind, k_in, k_out, seed, model_id):
    grads = gradients()
    projector = TwoSidedProjector(k_in, k_out, rest_dim=8, matrices=kind, seed=seed)
    features = projector.project(grads, model_id)

    expected = kronecker_features(kind, grads, k_in, k_out, seed=seed, model_id=model_id)
    assert features.dtype == torch.float64
    np.testing.assert_allclose(features[:, :-8].numpy(), expected, rtol=1e-10, atol=1e-12)


def test_the_matrix_of_a_long_side_is_drawn_in_tiles_that_join(monkeypatch):
    grads = {"w": random(2, 3, 70)}
    whole = TwoSidedProjector(5, matrices="gaussian").project(grads, 0)
    monkeypatch.setattr("trak_lite.projectors.two_sided.sides._DRAW_BYTES", 400)

    assert torch.equal(TwoSidedProjector(5, matrices="gaussian").project(grads, 0), whole)


def test_what_is_no_matrix_goes_to_the_other_projector():
    grads = gradients()
    features = TwoSidedProjector(3, rest_dim=8, seed=5).project(grads, 2)

    rest = {name: grads[name] for name in ("fc.bias", "scale")}
    assert torch.equal(features[:, -8:], CountSketchProjector(8, seed=5).project(rest, 2))


def test_small_matrices_come_out_exactly():
    grads = {"w": random(3, 2, 3), "v": random(3, 2, 3, seed=1)}
    features = TwoSidedProjector(3, 2).project(grads, 0)

    assert torch.equal(features, torch.cat([grads["w"].flatten(1), grads["v"].flatten(1)], 1))


def test_a_wider_projection_begins_with_the_same_columns():
    grads = {"w": random(3, 20, 30)}
    narrow = TwoSidedProjector(4, 5).project(grads, 0).view(3, 5, 4) * math.sqrt(4 * 5)
    wide = TwoSidedProjector(7, 9).project(grads, 0).view(3, 9, 7) * math.sqrt(7 * 9)

    torch.testing.assert_close(wide[:, :5, :4], narrow, rtol=1e-10, atol=1e-10)


# ---- from factors


def factored_and_dense(dtype=torch.float64, num_samples=4, positions=6):
    factors, grads = {}, {}
    for i, (name, (d_out, d_in)) in enumerate(MATRICES.items()):
        x = random(num_samples, positions, d_in, seed=i, dtype=dtype)
        g = random(num_samples, positions, d_out, seed=50 + i, dtype=dtype)
        factors[name] = FactoredBlock(name, x, g)
        product = torch.einsum("bto,bti->boi", g.double(), x.double())
        grads[name] = product.reshape(num_samples, *SHAPES[name])
    return factors, grads


@pytest.mark.parametrize("matrices", ["rademacher", "gaussian", "fitted"])
@pytest.mark.parametrize("piece_bytes", [1, 3000, 1 << 26])
def test_factors_give_what_their_gradient_gives(matrices, piece_bytes, monkeypatch):
    monkeypatch.setattr("trak_lite.projectors._factored._PIECE_BYTES", piece_bytes)
    factors, grads = factored_and_dense()
    kind = fitted_axes(3) if matrices == "fitted" else matrices
    projector = TwoSidedProjector(3, matrices=kind)

    from_factors = accumulate(projector, factors.values())
    from_gradients = accumulate(projector, dense_blocks(grads))
    torch.testing.assert_close(from_factors, from_gradients, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_factors_are_multiplied_in_float32(dtype):
    factors, grads = factored_and_dense(dtype)
    features = accumulate(TwoSidedProjector(3), factors.values())

    assert features.dtype == torch.float32
    expected = accumulate(TwoSidedProjector(3), dense_blocks(grads))
    torch.testing.assert_close(features.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_factors_is_never_formed():
    x, g = random(4, 3, 600, dtype=torch.float32), random(4, 3, 500, dtype=torch.float32)
    projector = TwoSidedProjector(8)
    accumulator = projector.accumulator(4, model_id=0, parameters={"w": (500, 600)})
    with LargestTensor() as largest:
        accumulator.add(FactoredBlock("w", x, g))

    assert bool(accumulator.features().any())
    assert largest.nbytes < 4 * 500 * 600  # of one sample, and there are four


def test_two_blocks_of_the_same_rows_add_up():
    factors, grads = factored_and_dense()
    projector = TwoSidedProjector(3)
    both = accumulate(projector, [*factors.values(), *dense_blocks(grads)])

    torch.testing.assert_close(both, 2 * accumulate(projector, dense_blocks(grads)), rtol=1e-10, atol=1e-11)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.norm = nn.LayerNorm(5)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x).flatten(2).transpose(1, 2).tanh()).mean(1))


def tiny_case():
    torch.manual_seed(0)
    return Tiny().double(), (random(6, 2, 8, 8), torch.arange(6) % 4)


@pytest.mark.parametrize("matrices", ["rademacher", "fitted"])
def test_hook_and_functional_gradients_give_the_same_features(matrices):
    model, batch = tiny_case()
    hook, functional = (
        computer(model, ImageClassificationModelOutput())
        for computer in (HookGradientComputer, FunctionalGradientComputer)
    )
    kind = matrices if matrices != "fitted" else PrincipalAxes.fit(hook, [batch], k_in=3)
    projector = TwoSidedProjector(3, rest_dim=8, matrices=kind)
    features = []
    for computer in (hook, functional):
        accumulator = projector.accumulator(6, model_id=0, parameters=computer.parameters)
        computer.stream_gradients(batch, accumulator.add)
        features.append(accumulator.features())

    assert features[0].shape == (6, 9 + 9 + 8)
    torch.testing.assert_close(features[0], features[1], rtol=1e-10, atol=1e-12)


# ---- random matrices


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_inner_products_are_unbiased_over_the_row_and_in_each_segment(kind):
    """400 seeds: the mean error is within 4 standard errors."""
    shapes = {"a": (5, 7), "b": (6, 2, 2), "bias": (9,)}
    x, y = random_gradients(shapes, 1, 0), random_gradients(shapes, 1, 1)
    both = {name: torch.cat([x[name], y[name] + 0.7 * x[name]]) for name in shapes}
    projectors = [TwoSidedProjector(3, 2, rest_dim=4, matrices=kind, seed=seed) for seed in range(400)]
    segments = projectors[0].layout(shapes).segments
    features = [projector.project(both, 0) for projector in projectors]

    segments = [(segment.start, segment.stop) for segment in segments]
    true = [grad.flatten(1) @ grad.flatten(1).T for grad in both.values()]
    for (start, stop), expected in [*zip(segments, true, strict=True), ((0, 16), sum(true))]:
        products = torch.stack([f[:, start:stop] @ f[:, start:stop].T for f in features])
        standard_error = products.std(0) / math.sqrt(400)
        assert bool(((products.mean(0) - expected).abs() < 4 * standard_error).all())


def test_seeds_models_and_names_have_independent_matrices():
    grad = random(1, 64, 64)
    projectors = {seed: TwoSidedProjector(32, seed=seed) for seed in (0, 1, 1000, -1, 1 << 32, 1 << 64)}
    features = [projector.project({"w": grad}, 0) for projector in projectors.values()]
    features += [projectors[0].project({"w": grad}, model_id) for model_id in (1, 100_000)]
    features += [projectors[0].project({"v": grad}, 0), projectors[0].project({"w": grad.mT}, 0)]

    rows = torch.cat(features)
    rows = rows / rows.norm(dim=1, keepdim=True)
    cosines = rows @ rows.T - torch.eye(len(rows), dtype=torch.float64)
    assert float(cosines.abs().max()) < 5 / math.sqrt(1024)


def test_the_two_sides_of_a_square_matrix_have_matrices_of_their_own():
    grad = random(1, 40, 40)
    features = TwoSidedProjector(16).project({"w": grad}, 0).view(16, 16)
    of_transposed = TwoSidedProjector(16).project({"w": grad.mT}, 0).view(16, 16)

    assert not torch.allclose(features, of_transposed.T)


def test_a_matrix_keeps_its_features_among_other_parameters():
    grads = gradients()
    alone = TwoSidedProjector(3).project({"conv.weight": grads["conv.weight"]}, 0)
    projector = TwoSidedProjector(3)
    among = {segment.name: segment for segment in projector.layout(SHAPES).segments}["conv.weight"]

    assert torch.equal(projector.project(grads, 0)[:, among.start : among.stop], alone)


def test_two_models_in_turn_keep_their_matrices_apart():
    grads = gradients()
    projector = TwoSidedProjector(3)
    alone = [TwoSidedProjector(3).project(grads, model_id) for model_id in (0, 1)]
    accumulators = [projector.accumulator(4, model_id=i, parameters=SHAPES) for i in (0, 1)]
    for block in dense_blocks(grads):
        for accumulator in accumulators:
            accumulator.add(block)

    for accumulator, expected in zip(accumulators, alone, strict=True):
        assert torch.equal(accumulator.features(), expected)


# ---- layouts, and what counts as a matrix


def test_every_matrix_and_the_rest_have_a_segment():
    layout = TwoSidedProjector(4, 3, rest_dim=8).layout(SHAPES)

    assert layout.to_json() == [
        ["fc.weight", 0, 12],
        ["conv.weight", 12, 24],
        ["thin.weight", 24, 32],
        ["small.weight", 32, 38],
        ["rest", 38, 46],
    ]


def test_a_joint_layout_is_one_segment_of_the_same_columns():
    grads = gradients()
    module, joint = (TwoSidedProjector(4, 3, rest_dim=8, layout=kind) for kind in ("module", "joint"))

    assert joint.layout(SHAPES) == FeatureLayout.joint(46)
    assert torch.equal(joint.project(grads, 0), module.project(grads, 0))


def test_without_a_rest_there_is_no_segment_for_it():
    assert TwoSidedProjector(2).layout({"w": (4, 4)}).to_json() == [["w", 0, 4]]


def test_with_nothing_but_a_rest_all_columns_are_its_own():
    grads = {"b": random(3, 5).float()}
    projector = TwoSidedProjector(2, rest_dim=6)

    assert projector.layout({"b": (5,)}).to_json() == [["rest", 0, 6]]
    assert torch.equal(projector.project(grads, 0), CountSketchProjector(6).project(grads, 0))


def test_no_parameters_have_no_columns():
    projector = TwoSidedProjector(2, layout="joint")

    assert projector.layout({}).width == 0
    assert accumulate(projector, [], parameters={}).shape == (4, 0)


def test_a_long_side_an_empty_matrix_and_a_vector_belong_to_the_rest():
    shapes = {"tokens": (50, 4), "head": (4, 51), "empty": (0, 4), "scale": (4,), "fits": (49, 49)}
    layout = TwoSidedProjector(2, max_side=49, rest_dim=5).layout(shapes)

    assert layout.to_json() == [["fits", 0, 4], ["rest", 4, 9]]


def test_a_rest_with_segments_of_its_own_keeps_them():
    rest = TwoSidedProjector(1, max_side=8, rest_dim=3)
    layout = TwoSidedProjector(2, max_side=4, rest=rest).layout({"a": (3, 3), "b": (7, 7), "c": (5,)})

    assert layout.to_json() == [["a", 0, 4], ["rest.b", 4, 5], ["rest.rest", 5, 8]]


def test_the_projector_of_a_width_is_that_of_its_own_proj_dim():
    projector = TwoSidedProjector.of_width(2048)

    assert (projector.k_in, projector.k_out, projector.proj_dim) == (45, 45, 2025)
    assert TwoSidedProjector.of_width(projector.proj_dim).fingerprint() == projector.fingerprint()


# ---- dtypes and devices


def test_mixed_precision_gives_the_widest_features_in_either_order():
    grads = gradients()
    grads["fc.weight"] = grads["fc.weight"].float()
    grads["fc.bias"] = grads["fc.bias"].bfloat16()
    blocks = dense_blocks(grads)
    forward, backward = (accumulate(TwoSidedProjector(3), order) for order in (blocks, blocks[::-1]))

    assert forward.dtype == torch.float64
    torch.testing.assert_close(forward, backward, rtol=1e-6, atol=1e-6)


def test_no_block_at_all_gives_zeros():
    projector = TwoSidedProjector(3, rest_dim=2)

    assert torch.equal(accumulate(projector, []), torch.zeros(4, projector.layout(SHAPES).width))


def test_features_can_be_read_twice_and_leave_no_graph():
    projector = TwoSidedProjector(3)
    accumulator = projector.accumulator(4, model_id=0, parameters=SHAPES)
    accumulator.add(DenseBlock("fc.weight", random(4, 6, 9).requires_grad_()))

    assert torch.equal(accumulator.features(), accumulator.features())
    assert not accumulator.features().requires_grad


def test_a_projector_first_used_in_inference_mode_works_outside_of_it():
    grads = gradients()
    projector = TwoSidedProjector(3)
    with torch.inference_mode():
        inside = projector.project(grads, 0)

    torch.testing.assert_close(projector.project(grads, 0), inside, rtol=1e-12, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("matrices", ["rademacher", "gaussian", "fitted"])
def test_features_are_the_same_on_cuda_up_to_rounding(matrices):
    kind = fitted_axes(3) if matrices == "fitted" else matrices
    factors, _ = factored_and_dense()
    host = accumulate(TwoSidedProjector(3, matrices=kind), factors.values())
    device = accumulate(TwoSidedProjector(3, matrices=kind, device="cuda"), factors.values())

    assert device.is_cuda
    torch.testing.assert_close(device.cpu(), host, rtol=1e-10, atol=1e-11)


# ---- principal axes


def low_rank_factors(seed: int, num_samples: int = 5, positions: int = 4):
    """Factors in a plane of the input side and a 3-space of the output side; the spaces do not depend on the seed."""
    x = random(num_samples, positions, 2, seed=seed) @ random(2, 9, seed=90)
    g = random(num_samples, positions, 3, seed=seed + 1) @ random(3, 8, seed=91)
    return FactoredBlock("w", x, g)


@pytest.mark.parametrize("covariances", ["factors", "gradients"])
def test_axes_keep_a_gradient_of_low_rank_without_loss(covariances):
    """Also gradients that they were not fitted on, from the same spaces: all inner products stay."""
    stream = BlockStream({"w": (8, 9)})
    axes = PrincipalAxes.fit(stream, [[low_rank_factors(0)]], k_in=2, k_out=3, covariances=covariances)
    block = low_rank_factors(7)
    features = accumulate(
        TwoSidedProjector(2, 3, matrices=axes), [block], num_samples=5, parameters=stream.parameters
    )

    rows = block.dense()
    scale = float(rows.square().sum(1).max())
    torch.testing.assert_close(features @ features.T, rows @ rows.T, rtol=1e-6, atol=1e-6 * scale)


def test_axes_are_the_leading_singular_vectors_of_all_positions():
    blocks = [FactoredBlock("w", random(3, 4, 9, seed=i), random(3, 4, 7, seed=i + 50)) for i in range(3)]
    axes = PrincipalAxes.fit(BlockStream({"w": (7, 9)}), [[block] for block in blocks], k_in=4, k_out=2)

    for side, values, count in (
        (Stream.TWO_SIDED_IN, [b.inputs for b in blocks], 4),
        (Stream.TWO_SIDED_OUT, [b.output_grads for b in blocks], 2),
    ):
        positions = np.concatenate([v.flatten(0, 1).numpy() for v in values])
        expected = np.linalg.svd(positions, full_matrices=False)[2][:count].T
        found = axes.axes("w", side).double().numpy()
        np.testing.assert_allclose(np.abs((expected * found).sum(0)), 1, atol=1e-6)
        assert (found[np.abs(found).argmax(0), np.arange(count)] > 0).all()


def test_axes_of_gradient_covariances_do_not_depend_on_how_gradients_come():
    factors, grads = factored_and_dense()
    stream = BlockStream(MATRICES)
    from_factors, from_gradients = (
        PrincipalAxes.fit(stream, [blocks], k_in=2, k_out=3, covariances="gradients")
        for blocks in (list(factors.values()), dense_blocks(grads))
    )

    for name, (d_out, d_in) in MATRICES.items():
        for side, size, k in ((Stream.TWO_SIDED_IN, d_in, 2), (Stream.TWO_SIDED_OUT, d_out, 3)):
            if size > k:
                torch.testing.assert_close(from_factors.axes(name, side), from_gradients.axes(name, side))


def test_fitted_matrices_are_the_same_for_every_model_and_seed():
    grads = {name: grad for name, grad in gradients().items() if name in MATRICES}
    axes = fitted_axes(3)
    features = [
        TwoSidedProjector(3, matrices=axes, seed=seed).project(grads, model_id)
        for seed, model_id in ((0, 0), (0, 1), (4, 0))
    ]

    assert torch.equal(features[0], features[1])
    assert torch.equal(features[0], features[2])


def test_axes_come_back_from_a_file_bit_by_bit(tmp_path):
    axes = fitted_axes(3, 2)
    axes.save(tmp_path / "axes.safetensors")
    loaded = PrincipalAxes.load(tmp_path / "axes.safetensors")

    assert [path.name for path in tmp_path.iterdir()] == ["axes.safetensors"]
    assert (loaded.k_in, loaded.k_out, loaded.shapes) == (3, 2, MATRICES)
    one, other = (TwoSidedProjector(3, 2, matrices=a) for a in (axes, loaded))
    assert one.fingerprint() == other.fingerprint()
    assert torch.equal(one.project(gradients(), 0), other.project(gradients(), 0))


def test_one_changed_bit_changes_the_digest():
    axes = fitted_axes(3)
    columns = {key: axes._columns[key].clone() for key in axes._columns}
    columns["fc.weight:in"].view(torch.int32)[0, 0] ^= 1

    assert PrincipalAxes(axes.shapes, columns, k_in=3, k_out=3).digest != axes.digest
    assert fitted_axes(3).digest == axes.digest


def test_changing_the_given_axes_afterwards_changes_nothing():
    given = torch.eye(4)[:, :2].contiguous()
    axes = PrincipalAxes({"w": (2, 4)}, {"w:in": given}, k_in=2, k_out=2)
    given.zero_()

    assert torch.equal(axes.axes("w", Stream.TWO_SIDED_IN), torch.eye(4)[:, :2])


def contents(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118 (no mapping)


@pytest.mark.parametrize("content", [None, b"", b"no safetensors file at all"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "axes.safetensors"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidInputError, match=r"Cannot read principal axes from .*axes\.safetensors"):
        PrincipalAxes.load(path)


def test_a_file_with_something_else_in_it_is_refused(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "weights.safetensors")

    with pytest.raises(InvalidInputError, match=r"has format None, expected 'trak_lite\.principal_axes"):
        PrincipalAxes.load(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    "sizes",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"k_in": 1, "k_out": 1, "shapes": {"w": [1]}}',
        '{"k_in": 1, "k_out": 1, "shapes": 1}',
    ],
)
def test_a_file_without_its_sizes_is_refused(tmp_path, sizes):
    metadata = {"format": "trak_lite.principal_axes.1", **({} if sizes is None else {"sizes": sizes})}
    save_file({"w": torch.zeros(2)}, tmp_path / "axes.safetensors", metadata)

    with pytest.raises(InvalidInputError, match="does not contain the sizes"):
        PrincipalAxes.load(tmp_path / "axes.safetensors")


def test_a_file_that_lost_an_axis_is_refused(tmp_path):
    path = tmp_path / "axes.safetensors"
    fitted_axes(3).save(path)
    columns, metadata = contents(path)
    del columns["fc.weight:in"]
    save_file(columns, path, metadata)

    with pytest.raises(
        InvalidInputError, match=r"\['fc\.weight:in'\] have shapes \[None\], expected \[\(9, 3\)\]"
    ):
        PrincipalAxes.load(path)


def test_a_file_with_a_changed_bit_is_refused(tmp_path):
    path = tmp_path / "axes.safetensors"
    fitted_axes(3).save(path)
    columns, metadata = contents(path)
    columns["fc.weight:in"].view(torch.int32)[0, 0] ^= 1
    save_file(columns, path, metadata)

    with pytest.raises(InvalidInputError, match="changed after it was written"):
        PrincipalAxes.load(path)


def test_axes_that_are_not_finite_are_refused():
    with pytest.raises(InvalidInputError, match=r"\['w:in'\] hold NaN or infinity"):
        PrincipalAxes({"w": (1, 3)}, {"w:in": torch.full((3, 1), math.nan)}, k_in=1, k_out=1)


def test_fitting_without_gradients_is_refused():
    with pytest.raises(
        InvalidInputError, match=r"The batches gave no gradient of \['w:out', 'w:in'\], so no axes"
    ):
        PrincipalAxes.fit(BlockStream({"w": (3, 4)}), [], k_in=2)


def test_fitting_on_gradients_that_are_not_finite_is_refused():
    grads = {"w": torch.full((1, 3, 4), math.inf)}

    with pytest.raises(NonFiniteError, match="covariance of 'w:out' holds NaN or infinity"):
        PrincipalAxes.fit(BlockStream({"w": (3, 4)}), [dense_blocks(grads)], k_in=2)


def test_factor_covariances_refuse_a_parameter_that_comes_in_two_forms():
    factors, grads = factored_and_dense()
    blocks = [[factors["fc.weight"]], [DenseBlock("fc.weight", grads["fc.weight"])]]
    stream = BlockStream({"fc.weight": (6, 9)})

    with pytest.raises(InvalidInputError, match="factored in one block and formed in another"):
        PrincipalAxes.fit(stream, blocks, k_in=2)
    assert PrincipalAxes.fit(stream, blocks, k_in=2, covariances="gradients").k_out == 2


def test_an_unknown_kind_of_covariance_is_refused():
    with pytest.raises(InvalidInputError, match="covariances must be one of"):
        PrincipalAxes.fit(BlockStream({}), [], k_in=2, covariances="gradient")


@pytest.mark.parametrize("parameters", [{"other": (6, 9)}, {"fc.weight": (6, 10)}])
def test_axes_of_other_matrices_are_refused(parameters):
    projector = TwoSidedProjector(3, matrices=fitted_axes(3))

    with pytest.raises(InvalidInputError, match="The principal axes have the shape"):
        projector.layout(parameters)
    with pytest.raises(InvalidInputError, match="The principal axes have the shape"):
        projector.accumulator(2, model_id=0, parameters=parameters)


def test_axes_of_another_number_are_refused():
    with pytest.raises(InvalidInputError, match="fitted with k_in=3 and k_out=2, expected 3 and 3"):
        TwoSidedProjector(3, matrices=fitted_axes(3, 2))


# ---- settings and errors


def test_every_setting_is_in_the_fingerprint():
    settings = [
        {},
        {"k_in": 3},
        {"k_out": 3},
        {"rest_dim": 5},
        {"matrices": "gaussian"},
        {"matrices": fitted_axes(2)},
        {"matrices": fitted_axes(2, seed=1)},
        {"seed": 1},
        {"layout": "joint"},
        {"max_side": 100},
        {"rest": GaussianProjector(4)},
    ]
    fingerprints = {
        json.dumps(TwoSidedProjector(**{"k_in": 2, "k_out": 2, **setting}).fingerprint(), sort_keys=True)
        for setting in settings
    }

    assert len(fingerprints) == len(settings)


def test_the_rest_is_as_wide_as_a_matrix_unless_told():
    make = functools.partial(TwoSidedProjector, 3, 2)

    assert make().fingerprint() == make(rest_dim=6).fingerprint()
    assert make().rest.proj_dim == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k_in": 0}, "k_in must be an integer of at least 1"),
        ({"k_in": 2, "k_out": 1.5}, "k_out must be an integer of at least 1"),
        ({"k_in": 2, "rest_dim": 0}, "rest_dim must be an integer of at least 1"),
        ({"k_in": 2, "max_side": 0}, "max_side must be an integer of at least 1"),
        ({"k_in": 2, "seed": 1.5}, "seed must be an integer"),
        ({"k_in": 2, "matrices": "rademacer"}, "Did you mean 'rademacher'"),
        ({"k_in": 2, "layout": "modules"}, "Did you mean 'module'"),
        ({"k_in": 2, "rest": NoOpProjector(), "rest_dim": 4}, "Both rest and rest_dim=4 were given"),
    ],
)
def test_a_setting_out_of_range_is_refused(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        TwoSidedProjector(**arguments)


def test_a_gradient_tensor_has_no_matrices_and_is_refused():
    with pytest.raises(InvalidInputError, match=r"shape \(2, 30\) has no matrices in it"):
        TwoSidedProjector(2).project(random(2, 30), 0)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (DenseBlock("other", torch.zeros(4, 6)), "'other', which is not among"),
        (DenseBlock("fc.weight", torch.zeros(4, 9, 6)), r"has shape \(9, 6\) per sample, expected \(6, 9\)"),
        (DenseBlock("fc.weight", torch.zeros(3, 6, 9), start=2), "covers rows 2 to 5 of a batch of 4"),
        (FactoredBlock("fc.weight", torch.zeros(4, 2, 6), torch.zeros(4, 2, 9)), r"expected \(6, 9\)"),
        (FactoredBlock("fc.weight", torch.zeros(4, 2, 9), torch.zeros(4, 2, 6), 1), "covers rows 1 to 5"),
        (FactoredBlock("fc.weight", torch.zeros(4, 2, 9), torch.zeros(4, 3, 6)), "with the same b and T"),
        (
            FactoredBlock("fc.weight", torch.zeros(4, 2, 9), torch.zeros(4, 2, 6, dtype=torch.int32)),
            "Expected floating-point factors",
        ),
    ],
)
def test_a_block_that_does_not_fit_is_refused(block, message):
    with pytest.raises(InvalidInputError, match=message):
        accumulate(TwoSidedProjector(3), [block])
