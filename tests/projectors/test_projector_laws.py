"""Laws of every projector by name: the kits; gradients of any dtype, order, form and place; what is refused.

tests/goldens holds vectors of every projector.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from projection_cases import (
    MAKERS,
    ORIGINAL,
    SHAPES,
    Operators,
    accumulated,
    assert_close,
    dense_blocks,
    factors,
    formed,
    lookups,
    made,
    random,
    random_gradients,
)

from trak_lite.errors import InvalidInputError
from trak_lite.projectors import (
    AbstractProjector,
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CountSketchProjector,
    CudaProjector,
    FastJLProjector,
    GaussianProjector,
    GraSSProjector,
    MaskProjector,
    NoOpProjector,
    RademacherProjector,
    TwoSidedProjector,
)
from trak_lite.testing import ProjectorTests, RandomProjectorTests
from trak_lite.types import DenseBlock, FactoredBlock, FeatureLayout, LookupBlock, SummedBlock

NOT_JOHNSON_LINDENSTRAUSS = {"none", "two_sided", "mask", "grass"}
"""Names whose inner products are not unbiased with one joint segment. Add yours."""

OTHERS = [name for name in MAKERS if name.split()[0] in NOT_JOHNSON_LINDENSTRAUSS]
DENSE = {"fast_jl", "gaussian", "rademacher", *ORIGINAL}
EXACT = sorted(MAKERS.keys() - DENSE - {"two_sided", "two_sided gaussian joint"})
"""Features of dense gradients with the same bits in any batch, on any device."""

NUM_ENTRIES = sum(map(math.prod, SHAPES.values()))
LOW = [torch.float32, torch.float16, torch.bfloat16]
gradients = functools.partial(random_gradients, SHAPES)
accumulate = functools.partial(accumulated, parameters=SHAPES)
every_projector = pytest.mark.parametrize("name", [n for n in MAKERS if n not in ("SingleBlock", "Cuda")])
"""These two are ``Basic`` by other names: the kits, and test_original_projectors.py."""


def double(grads):
    return {key: grad.double() for key, grad in grads.items()}


def flat(grads):
    return torch.cat([grad.reshape(len(grad), grad[0].numel()) for grad in double(grads).values()], 1)


@pytest.fixture
def threads():
    """Sets the number of threads of torch."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- the kits
class TestRandomProjectors(RandomProjectorTests):
    """Unbiased with one joint segment, without the scale under the names of the original."""

    num_seeds = 100

    @pytest.fixture(autouse=True, params=[name for name in MAKERS if name not in OTHERS])
    def _named(self, request):
        self.name = request.param

    def make_projector(self, proj_dim, *, seed):
        return made(self.name, proj_dim, seed)

    def gain(self, proj_dim):
        return float(proj_dim) if self.name in ORIGINAL else 1.0


class Written(AbstractProjector):
    """As for the original TRAK, with ``__init__`` and ``project`` alone."""

    def __init__(self, proj_dim, seed):
        super().__init__(0, proj_dim, seed, "normal", "cpu")

    def project(self, grads, model_id):
        return GaussianProjector(self.proj_dim, seed=self.seed).project(grads, model_id)


class TestOtherProjectors(ProjectorTests):
    @pytest.fixture(autouse=True, params=[*OTHERS, "identity for the rest", "chunks", "written"])
    def _named(self, request):
        self.name = request.param

    def make_projector(self, proj_dim, *, seed):
        if self.name == "chunks":  # of the kit's own parameters: 15 + 1 and 24 + 7 entries
            parts = [CudaProjector(0, proj_dim, seed + i, "rademacher", "cpu", 32) for i in range(2)]
            return ChunkedCudaProjector(parts, 31, [16, 31], 8, "cpu", torch.float32)
        if self.name == "written":
            return Written(proj_dim, seed)
        if self.name == "identity for the rest":
            return TwoSidedProjector(2, seed=seed, rest=NoOpProjector())
        return made(self.name, proj_dim // 4, seed)


class Signs(AbstractProjector):
    """A matrix of signs of which a change of gradients or features makes another map."""

    def __init__(
        self,
        proj_dim,
        seed,
        gradients=lambda grad: grad,
        features=lambda rows: rows,
        matrix=RademacherProjector,
    ):
        super().__init__(0, proj_dim, seed, "rademacher", "cpu")
        self.change_gradients, self.change_features, self.matrix = gradients, features, matrix

    def project(self, grads, model_id):
        changed = {key: self.change_gradients(DenseBlock(key, grad).dense()) for key, grad in grads.items()}
        return self.change_features(self.matrix(self.proj_dim, seed=self.seed).project(changed, model_id))


class SparseSigns(AbstractProjector):
    """A matrix whose entries are 0 in six of seven cases: norms of single entries vary more than a Gaussian's."""

    def __init__(self, proj_dim, seed):
        super().__init__(0, proj_dim, seed, "rademacher", "cpu")

    def project(self, grads, model_id):
        generator = torch.Generator().manual_seed(self.seed)
        rows = torch.cat([DenseBlock(key, grad).dense() for key, grad in grads.items()], 1).double()
        drawn = torch.randint(14, (rows.shape[1], self.proj_dim), generator=generator)
        return rows @ ((drawn == 0).double() - (drawn == 1).double()) * math.sqrt(7 / self.proj_dim)


def without_last(grad):
    return grad * (torch.arange(grad.shape[1]) < grad.shape[1] - 1)


def nan_for_zero(rows):
    return torch.where(rows.any(1, keepdim=True), rows, math.nan)


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, []),
        ({"gradients": without_last}, ["entries"]),
        ({"gradients": lambda grad: torch.cat([2 * grad[:, :1], grad[:, 1:]], 1)}, ["entries"]),
        ({"features": nan_for_zero}, ["zeros"]),
        ({"matrix": SparseSigns}, []),
        ({"matrix": lambda k, seed: RademacherProjector(k, seed=seed + hash("weight"))}, ["process"]),
        ({"matrix": lambda k, seed: RademacherProjector(k, seed=hash((seed, 5)) % 2**31)}, []),
        ({"gradients": lambda grad: grad if grad.dtype == torch.float64 else -grad}, ["dtype"]),
        ({"gradients": lambda grad: grad + 0 * torch.rand(1)}, ["generator"]),
    ],
)
def test_the_kit_fails_for_maps_that_are_not_what_rows_and_targets_share(change, fails, monkeypatch):
    class Kit(RandomProjectorTests):
        num_seeds = 50

        def make_projector(self, proj_dim, *, seed):
            return Signs(proj_dim, seed, **change)

    kit, failed = Kit(), []
    laws = {
        "entries": kit.test_inner_products_are_unbiased,
        "zeros": lambda: kit.test_a_gradient_of_zeros_has_features_of_zeros(Signs(24, 0, **change)),
        "process": lambda: kit.test_another_process_has_the_same_map(monkeypatch),
        "dtype": lambda: kit.test_the_dtype_of_gradients_does_not_choose_the_map(Signs(24, 0, **change)),
        "generator": lambda: kit.test_the_generator_of_torch_is_left_as_it_is(Signs(24, 0, **change)),
    }
    for name, law in laws.items():
        try:
            law()
        except AssertionError:
            failed.append(name)
    assert failed == fails


def transposed(block):
    """The factors of a convolution's kernel taken for those of a kernel (d_in, d_out)."""
    if not isinstance(block, FactoredBlock) or block.name != "body.weight":
        return block
    grad = torch.einsum("bti,bto->bio", block.inputs, block.output_grads)
    return DenseBlock(block.name, grad.reshape(-1, 4, 3, 2), block.start)


def first_positions(block):
    if not isinstance(block, FactoredBlock):
        return block
    return dataclasses.replace(block, inputs=block.inputs[:, :4], output_grads=block.output_grads[:, :4])


@pytest.mark.parametrize(
    ("change", "is_wrong"),
    [
        (lambda block: block, False),
        (lambda block: None if isinstance(block, LookupBlock) else block, True),
        (lambda block: None if isinstance(block, SummedBlock) else block, True),
        (lambda block: block.parts[0], True),
        (lambda block: block if isinstance(block, DenseBlock) else block.samples(slice(None)), True),
        (transposed, True),
        (first_positions, True),
    ],
    ids=["none", "no lookups", "no sums", "first term", "row 0", "transposed", "first positions"],
)
def test_the_kit_fails_for_a_block_that_is_lost_moved_transposed_or_cut(change, is_wrong):
    class Changed(GaussianProjector):
        def accumulator(self, num_samples, *, model_id, parameters):
            whole = super().accumulator(num_samples, model_id=model_id, parameters=parameters)

            def add(block):
                if (changed := change(block)) is not None:
                    whole.add(changed)

            return SimpleNamespace(add=add, features=whole.features)

    law = ProjectorTests.test_a_block_of_any_form_counts_as_its_dense_gradient
    with pytest.raises(AssertionError) if is_wrong else contextlib.nullcontext():
        law(None, Changed(16, seed=0))


@pytest.mark.parametrize("name", ["countsketch", *(name for name in OTHERS if name != "none")])
def test_inner_products_are_unbiased_over_the_row(name):
    """100 seeds: the mean error is within 4 standard errors; that of a sketched matrix has the variance of a vector."""
    x, y = gradients(1, 0), gradients(1, 1)
    both = {key: torch.cat([x[key], y[key] + 0.7 * x[key]]) for key in x}
    products = [(f := made(name, 9, seed).project(both, 0)) @ f.T for seed in range(100)]
    true = flat(both) @ flat(both).T
    errors = torch.stack(products) - true
    assert bool((errors.mean(0).abs() < 4 * errors.std(0) / math.sqrt(100)).all())
    if name == "countsketch":
        norms = true.diagonal()
        gaussian = (norms[:, None] * norms + true.square()) / 9
        assert bool((errors.var(0) < (1 + 5 * math.sqrt(2 / 100)) * gaussian).all())


# ---- gradients of any dtype and place in memory
@every_projector
@pytest.mark.parametrize("dtype", LOW)
def test_lower_precision_gradients_are_added_up_in_float32(name, dtype):
    """Also where a product or a sum is beyond the range of float16."""
    grads, projector = gradients(dtype=dtype), made(name, 7)
    grads["wide.weight"] += 500
    large = {"wide.weight": torch.full((2, 3, 70), 60_000.0).to(dtype)}
    for some, tolerance in ((grads, 1e-6), (large, 1e-5)):
        features = projector.project(some, 0)
        assert features.dtype == (dtype if name == "none" else torch.float32)
        assert_close(features, projector.project(double(some), 0), tolerance)
        if name in EXACT and name != "none":
            single = {key: grad.float() for key, grad in some.items()}
            assert torch.equal(features, projector.project(single, 0))


@every_projector
def test_mixed_precision_gives_the_widest_features_in_either_order_and_no_graph(name):
    grads, projector = gradients(), made(name, 16)
    grads["wide.weight"], grads["b.bias"] = grads["wide.weight"].float(), grads["b.bias"].bfloat16()
    grads = {key: grad.requires_grad_() for key, grad in grads.items()}
    for blocks in (dense_blocks(grads), dense_blocks(grads)[::-1]):
        features = accumulate(projector, blocks)
        assert (features.dtype, features.requires_grad) == (torch.float64, False)
        assert_close(features, projector.project(double(grads), 0), 1e-6)


@every_projector
def test_how_gradients_lie_in_memory_does_not_matter(name):
    grads, projector = gradients(), made(name, 16)
    others = [
        {key: torch.stack([grad, grad], -1)[..., 0] for key, grad in grads.items()},
        {key: grad.movedim(0, -1).contiguous().movedim(-1, 0) for key, grad in grads.items()},
        {key: grad[:1].expand_as(grad) for key, grad in grads.items()},
    ]
    for other in others:
        assert not other["wide.weight"].is_contiguous()
        plain = {key: grad.contiguous() for key, grad in other.items()}
        assert_close(projector.project(other, 0), projector.project(plain, 0), 1e-13)


@every_projector
def test_a_row_that_is_not_finite_spoils_no_other(name):
    grads, projector = gradients(), made(name, 16)
    clean = projector.project(grads, 0)
    for grad in grads.values():
        grad[1] = math.nan
    features = projector.project(grads, 0)
    assert features[1].isnan().any()
    assert torch.equal(features[[0, 2, 3]], clean[[0, 2, 3]])


# ---- accumulators, models and copies
@every_projector
def test_nothing_at_all_gives_zeros_and_parameters_that_come_again_add_up(name):
    projector, blocks = made(name, 16), dense_blocks(gradients())
    for parameters in (SHAPES, {"empty": (0, 3)}):
        width = 0 if name == "none" and "scale" not in parameters else projector.layout(parameters).width
        assert torch.equal(accumulate(projector, [], parameters=parameters), torch.zeros(4, width))
    assert torch.equal(projector.project({"empty": torch.zeros(4, 0, 3)}, 0), torch.zeros(4, width))
    twice = accumulate(projector, [*reversed(blocks), blocks[-1], blocks[1]])
    again = accumulate(projector, [blocks[-1], blocks[1]])
    assert_close(twice, accumulate(projector, blocks) + again, 1e-12)


@every_projector
def test_a_tensor_of_gradients_is_one_parameter_without_a_name(name):
    projector, grads = made(name, 8), random(3, 50)
    if "two_sided" in name:
        with pytest.raises(InvalidInputError, match=r"shape \(3, 50\) has no matrices in it"):
            projector.project(grads, 0)
    else:
        assert torch.equal(projector.project(grads, 0), projector.project({"": grads}, 0))


@every_projector
def test_models_in_turn_inference_mode_and_copies_change_nothing(name):
    grads, projector = gradients(), made(name, 16)
    alone = [made(name, 16).project(grads, model_id) for model_id in (0, 1)]
    with torch.inference_mode():
        assert torch.equal(projector.project(grads, 0), alone[0])
    accumulators = [projector.accumulator(4, model_id=i, parameters=SHAPES) for i in (0, 1)]
    for number, block in enumerate(dense_blocks(grads)):
        with torch.inference_mode(number % 2 == 1):
            for accumulator in accumulators:
                accumulator.add(block)
    for accumulator, expected in zip(accumulators, alone, strict=True):
        assert torch.equal(accumulator.features(), expected)
    assert (name == "none") == torch.equal(*alone)
    for other in (copy.deepcopy(projector), pickle.loads(pickle.dumps(projector))):
        assert other.fingerprint() == projector.fingerprint()
        assert torch.equal(other.project(grads, 1), alone[1])


@pytest.mark.parametrize("name", EXACT)
def test_bits_do_not_depend_on_batch_order_chunks_layout_and_threads(name, threads):
    settings = {"num_samples": 27, "parameters": {**SHAPES, "tall": (150, 70), "vector": (3000,)}}
    grads = random_gradients(settings["parameters"], 27, dtype=torch.float32)
    projector, blocks = made(name, 100, 4), dense_blocks(grads)
    threads(1)
    whole = projector.project(grads, 0)
    transposed = {key: grad.movedim(0, -1).contiguous().movedim(-1, 0) for key, grad in grads.items()}
    repeated = {key: grad[:1].expand_as(grad) for key, grad in grads.items()}
    for count in (1, 3):
        threads(count)
        for rows in ([4], [26, 3, 4], list(range(9, 25)), list(reversed(range(27)))):
            some = projector.project({key: grad[rows] for key, grad in grads.items()}, 0)
            assert torch.equal(some, whole[rows])
        assert torch.equal(projector.project(transposed, 0), whole)
        assert torch.equal(projector.project(repeated, 0), whole[:1].expand_as(whole))
        for order in (blocks[::-1], blocks[3:] + blocks[:3], blocks[::2] + blocks[1::2]):
            assert torch.equal(accumulated(projector, order, **settings), whole)
        chunks = [DenseBlock(b.name, b.grad[i : i + 10], i) for i in (20, 0, 10) for b in blocks]
        assert torch.equal(accumulated(projector, chunks, **settings), whole)
        with torch.inference_mode():
            assert torch.equal(projector.project(grads, 0), whole)
        projector.free_memory()


# ---- masks
@pytest.mark.parametrize("name", ["mask", "grass"])
def test_entries_are_the_same_in_any_order_of_parameters_and_all_of_them_where_there_is_room(name):
    grads = gradients()
    other = dict(reversed(grads.items()))
    assert_close(made(name, 9).project(other, 0), made(name, 9).project(grads, 0), 1e-13)
    for k in (NUM_ENTRIES, NUM_ENTRIES + 50):
        features = made(name, k).project(grads, 0)
        assert features.shape == (4, made(name, k).layout(SHAPES).width) == (4, NUM_ENTRIES)
        assert torch.equal(features.sort(1).values, flat(grads).sort(1).values)


def test_an_entry_that_is_not_finite_reaches_only_its_own_feature():
    grad, projector = random(1, 400), GraSSProjector(50)
    before = projector.project({"w": grad}, 0)
    for first in range(40):
        spoilt = grad.clone()
        spoilt[0, first::40] = math.nan
        after = projector.project({"w": spoilt}, 0)
        assert torch.equal(after.isnan(), after != before)
        assert int(after.isnan().sum()) <= 10


@pytest.mark.parametrize("name", ["mask", "grass"])
def test_entries_are_chosen_once_per_model_whatever_tiles_and_bound_they_are_searched_in(name, monkeypatch):
    grads, projector = {"w": random(2, 3000), "v": random(2, 100, seed=1)}, made(name, 500)
    expected, drawn = projector.project(grads, 0), []
    for model_id in (0, 1):
        with Operators() as seen:
            projector.project(grads, model_id)
        drawn.append(seen.words)
    assert drawn[0] == 0 < drawn[1]
    for tile in (1, 7):
        monkeypatch.setattr("trak_lite.projectors.mask._TILE", 100 * tile)
        assert torch.equal(made(name, 500).project(grads, 0), expected)
    too_few = SimpleNamespace(isqrt=lambda n: -(n + 8) // 8, sqrt=math.sqrt)  # 500 - 8 * 64 + 16 = 4 at first
    monkeypatch.setattr("trak_lite.projectors.mask.math", too_few)
    assert torch.equal(made(name, 500).project(grads, 0), expected)


# ---- gradients in factors and rows of tables
@every_projector
@pytest.mark.parametrize(
    ("shape", "k"),
    [((6, 9), 64), ((70, 80), 33), ((8, 3, 5, 5), 500), ((5, 300), 64), ((300, 64), 33), ((90, 150), 64)],
)
def test_factors_and_rows_of_tables_have_the_features_of_their_gradient(name, shape, k):
    projector, blocks = made(name, k), [factors(shape, positions, 4) for positions in (1, 2, 7)]
    if len(shape) == 2:
        blocks += [lookups(shape, positions, 4) for positions in (0, 7, 100)]
        blocks.append(SummedBlock("w", (blocks[-1], blocks[0])))
    for block in blocks:
        parts = block.parts if isinstance(block, SummedBlock) else (block,)
        whole = DenseBlock("w", sum(formed(part, shape).grad for part in parts))
        expected, features = (accumulated(projector, [b], parameters={"w": shape}) for b in (whole, block))
        assert features.dtype == torch.float64
        assert_close(features, expected, 1e-10)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - DENSE - {"none"}))
@pytest.mark.parametrize("dtype", LOW)
def test_factors_of_lower_precision_are_multiplied_in_float32(name, dtype):
    """Also beyond the range of float16, under autocast, and beside a factor of float64."""
    shape, projector = (70, 80), made(name, 64)
    product = factors(shape, 4, 4, dtype)
    large = FactoredBlock("w", 600 * product.inputs.sign(), 700 * product.output_grads.sign())
    wide = FactoredBlock("w", product.inputs, product.output_grads.double())
    blocks = [product, large, wide]
    if name in {"countsketch", "copies"}:
        blocks += [lookups(shape, count, 4, dtype) for count in (7, 100)]
    for block in blocks:
        expected, features = (
            accumulated(projector, [some], parameters={"w": shape}) for some in (formed(block, shape), block)
        )
        assert features.dtype == (torch.float64 if block is wide else torch.float32)
        assert_close(features, expected, 1e-11 if block is wide else 1e-5)
    if not name.startswith("two_sided"):  # its products are matrix products, which autocast rounds
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = accumulated(projector, [product], parameters={"w": shape})
        assert torch.equal(inside, accumulated(projector, [product], parameters={"w": shape}))


def piece_of(block, rows):
    if isinstance(block, LookupBlock):
        return LookupBlock("w", block.rows[rows], block.values[rows], block.num_rows, rows.start)
    strided = block.output_grads[rows].mT.contiguous().mT
    return FactoredBlock("w", block.inputs[rows], strided, rows.start)


@every_projector
@pytest.mark.parametrize("shape", [(70, 80), (8, 3, 5, 5), (5, 300), (300, 64), (40, 6)])
def test_factors_and_rows_of_tables_may_come_in_pieces_of_any_size(name, shape, monkeypatch):
    """Rows of the batch in chunks, memory for a part of a sample, any layout in memory; also without positions."""
    projector, settings = made(name, 33), {"num_samples": 20, "parameters": {"w": shape}}
    blocks = [factors(shape, 2, 20)]
    if len(shape) == 2:
        blocks += [lookups(shape, positions, 20, torch.float32) for positions in (7, 400)]
    expected = [accumulated(projector, [block], **settings) for block in blocks]
    for limit, budget in (("_scratch._CPU_SCRATCH_BYTES", 3000), ("_base._PIECE_BYTES", 4000)):
        monkeypatch.setattr(f"trak_lite.projectors.{limit}", budget)
    for block, whole in zip(blocks, expected, strict=True):
        pieces = [piece_of(block, rows) for rows in (slice(17, 20), slice(0, 17))]
        found, is_table = accumulated(projector, pieces, **settings), isinstance(block, LookupBlock)
        if is_table and name in EXACT:
            assert torch.equal(found, whole)
        assert_close(found, whole, 1e-5 if is_table else 1e-11)
    for empty, count in ((factors(shape, 0, 3), 3), (factors(shape, 2, 0), 0)):
        found = accumulated(projector, [empty], num_samples=count, parameters={"w": shape})
        width = projector.layout({"w": shape}).width
        assert torch.equal(found, torch.zeros(count, width, dtype=torch.float64))


@pytest.mark.parametrize("name", ["mask", "grass", "two_sided", "form", "fourier"])
def test_the_gradient_of_factors_is_never_formed(name, monkeypatch):
    """``form`` takes 128 rows of one sample."""
    monkeypatch.setattr("trak_lite.projectors._scratch._CPU_SCRATCH_BYTES", 64 << 10)
    shape, projector = (512, 300), made(name, 64)
    accumulator = projector.accumulator(4, model_id=0, parameters={"w": shape})
    with Operators() as seen:
        accumulator.add(factors(shape, 3, 4, torch.float32))
    assert bool(accumulator.features().any())
    assert seen.entries <= 512 * 300 / 3  # of one sample, and there are four


# ---- devices
@pytest.mark.cuda
@every_projector
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_features_on_a_gpu_are_those_of_the_cpu(name, dtype):
    if name == "fast_jl":
        pytest.skip("has another matrix where the extension is installed")
    grads = gradients(dtype=dtype)
    host, found = (made(name, 100, 0, device).project(grads, 0) for device in (None, "cuda"))
    assert found.is_cuda
    if name in EXACT:
        assert torch.equal(found.cpu(), host)
    assert_close(found.cpu(), host, 1e-11 if dtype == torch.float64 else 1e-4)
    wide = factors((70, 80), 5, 4)
    both = (made(name, 64, 0, device) for device in ("cpu", "cuda"))
    host, found = (accumulated(one, [wide], parameters={"w": (70, 80)}) for one in both)
    assert_close(found.cpu(), host, 1e-10)


@pytest.mark.cuda
@every_projector
def test_a_projector_without_a_device_follows_the_gradients(name):
    projector = made(name, 8)
    for device in ("cpu", "cuda", "cpu"):
        found = projector.project({"w": random(2, 3, 30).to(device)}, 0)
        assert found.device.type == device or name == "fast_jl"


# ---- settings and errors
@pytest.mark.quick
def test_fingerprints_differ_where_the_features_do_and_only_there():
    settings = {
        RademacherProjector: [{"seed": 3}, {"precision": "tf32"}, {"proj_dim": 9}],
        GaussianProjector: [],
        CountSketchProjector: [{"seed": 1}, {"copies": 2}],
        MaskProjector: [{"seed": 1}, {"layout": "module"}, {"proj_dim": 9}],
        GraSSProjector: [{"mask_dim": 8}, {"seed": 1}, {"layout": "module"}, {"proj_dim": 9, "mask_dim": 32}],
        TwoSidedProjector: [
            *({"k_out": 3}, {"rest_dim": 5}, {"matrices": "gaussian"}, {"seed": 1}, {"layout": "joint"}),
            *({"max_side": 100}, {"k_in": 3}, {"rest": GaussianProjector(4)}),
        ],
    }
    makers = [
        cls(**{"k_in" if cls is TwoSidedProjector else "proj_dim": 8, **changes})
        for cls, some in settings.items()
        for changes in ({}, *some)
    ]
    makers += [BasicProjector(0, 8, 0, kind, None) for kind in ("rademacher", "normal")]
    found = [json.dumps(one.fingerprint(), sort_keys=True) for one in [*makers, NoOpProjector()]]

    assert len(set(found)) == len(found)
    for one, other in [
        (GraSSProjector(5), GraSSProjector(5, mask_dim=20)),
        (TwoSidedProjector(3, 2), TwoSidedProjector(3, 2, rest_dim=6)),
        (NoOpProjector(5, 6, 7), NoOpProjector()),
        (RademacherProjector(4, seed=np.int64(3), device="cpu"), RademacherProjector(4, seed=3)),
        (CountSketchProjector(4, seed=3, factors="form"), CountSketchProjector(4, seed=np.int64(3))),
        (CudaProjector(30, 4, 0, "normal", "cpu", 8), BasicProjector(0, 4, 0, "normal", None)),
        (BasicSingleBlockProjector(30, 4, 0, "normal", "cpu"), BasicProjector(0, 4, 0, "normal", None)),
    ]:
        assert one.fingerprint() == other.fingerprint()


@pytest.mark.quick
def test_fingerprints_and_layouts_of_stored_features_stay():
    """Stores are found again by them."""
    countsketch = {"kind": "countsketch", "proj_dim": 8, "seed": 3, "copies": 2, "version": 1}
    dense = {"proj_dim": 8, "seed": 3, "version": 1, "scaled": True}
    assert CountSketchProjector(8, seed=3, copies=2).fingerprint() == countsketch
    assert RademacherProjector(8, seed=3).fingerprint() == {"kind": "dense_rademacher", **dense}
    assert GaussianProjector(8, seed=3).fingerprint() == {"kind": "dense_gaussian", **dense}
    assert NoOpProjector().fingerprint() == {"kind": "identity", "proj_dim": 0, "seed": 0, "version": 1}
    assert CountSketchProjector(7).layout(SHAPES) == FeatureLayout.joint(7)
    assert NoOpProjector(grad_dim=3, proj_dim=99).layout(SHAPES) == FeatureLayout.joint(NUM_ENTRIES)
    modules = [["b", 0, 9], ["wide", 9, 18], ["", 18, 19], ["conv", 19, 28]]
    for make in (MaskProjector, GraSSProjector):
        assert make(9, layout="module").layout(SHAPES).to_json() == modules


SKETCHES = (CountSketchProjector, RademacherProjector, GaussianProjector, MaskProjector, GraSSProjector)
two_sided, cuda = functools.partial(TwoSidedProjector, 2), functools.partial(CudaProjector, 20, 16, 3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        *((make, {"proj_dim": k}, "proj_dim must be an integer of at least 1") for k in (0, -1, 2.0, True)
          for make in SKETCHES),
        *((make, {"proj_dim": 8, "seed": seed}, "seed must be an integer") for seed in (1.5, "0", None, True)
          for make in SKETCHES),
        (CountSketchProjector, {"proj_dim": 8, "copies": 0}, "copies must be an integer of at least 1"),
        (CountSketchProjector, {"proj_dim": 8, "factors": "fourrier"}, "Did you mean 'fourier'"),
        *((make, {"proj_dim": 4, "dtype": torch.int32},
           r"dtype must be a floating-point dtype or None, got torch\.int32")
          for make in (RademacherProjector, FastJLProjector)),
        (RademacherProjector, {"proj_dim": 8, "precision": "bf16"}, r"precision must be one of \['ieee', 'tf32'\]"),
        (GaussianProjector, {"proj_dim": 8, "precision": "tf32"}, "is for the signs of a Rademacher.*got normal"),
        (MaskProjector, {"proj_dim": 2, "layout": "modules"}, "Did you mean 'module'"),
        (GraSSProjector, {"proj_dim": 5, "mask_dim": 4}, "mask_dim=4 entries cannot fill proj_dim=5"),
        (GraSSProjector, {"proj_dim": 5, "mask_dim": 0}, "mask_dim must be an integer of at least 1"),
        *((two_sided, {name: value}, f"{name} must be an integer of at least 1")
          for name, value in {"k_in": 0, "k_out": 1.5, "rest_dim": 0, "max_side": 0}.items()),
        (two_sided, {"seed": 1.5}, "seed must be an integer"),
        (two_sided, {"matrices": "rademacer"}, "Did you mean 'rademacher'"),
        (two_sided, {"layout": "modules"}, "Did you mean 'module'"),
        (two_sided, {"rest": NoOpProjector(), "rest_dim": 4}, "Both rest and rest_dim=4 were"),
        (FastJLProjector, {"proj_dim": 16, "proj_type": "rademachr"}, "Did you mean 'rademacher'"),
        (FastJLProjector, {"proj_dim": 0}, "proj_dim must be an integer of at least 1"),
        (cuda, {"proj_type": "rademacher", "device": None, "max_batch_size": 64, "use_fast_jl": True},
         r"projects \[8, 16, 32\] rows at a time, got 64"),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused(make, settings, message):
    if make is two_sided and "k_in" in settings:
        make = TwoSidedProjector
    with pytest.raises(InvalidInputError, match=message):
        make(**settings)


def wide_factors(count, dtype=torch.float32, samples=3):
    return FactoredBlock("wide.weight", torch.zeros(3, count, 70), torch.zeros(samples, 1, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (DenseBlock("other", torch.zeros(3, 5)), "'other', which is not among the "),
        (DenseBlock("b.bias", torch.zeros(3, 6)), r"has shape \(6,\) per sample, expected \(5,\)"),
        (DenseBlock("b.weight", torch.zeros(3, 4, 5)), r"has shape \(4, 5\) per sample, expected \(5, 4\)"),
        (DenseBlock("empty", torch.zeros(3, 1, 4)), r"has shape \(1, 4\) per sample, expected \(0, 4\)"),
        (DenseBlock("b.bias", torch.zeros(4, 5)), "covers rows 0 to 4 of a batch of 3"),
        (DenseBlock("b.bias", torch.zeros(2, 5), start=2), "covers rows 2 to 4 of a batch of 3"),
        (DenseBlock("b.bias", torch.zeros(2, 5), start=-1), "covers rows -1 to 1 of a batch of 3"),
        (DenseBlock("wide.weight", torch.zeros(3, 3, 70).int()), r"dtype torch\.int32, expected floating"),
        (LookupBlock("b.weight", torch.zeros(3, 1).long(), torch.zeros(3, 1, 4), 6), r"has shape \(6, 4\) per"),
        (FactoredBlock("wide.weight", torch.zeros(3, 1, 3), torch.zeros(3, 1, 70)), r"expected \(3, 70\)"),
        (FactoredBlock("b.weight", torch.zeros(3, 2, 4), torch.zeros(3, 2, 5), 1), "covers rows 1 to 4"),
        (wide_factors(1, samples=1), "with the same b and T"),
        (wide_factors(2), "with the same b and T"),
        (wide_factors(1, torch.int32), "Expected floating-point factors"),
        (SummedBlock("wide.weight", (wide_factors(2),)), "with the same b and T"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)  # fmt: skip
@every_projector
def test_a_block_that_does_not_fit_is_refused(name, block, message):
    accumulator = made(name, 4).accumulator(3, model_id=0, parameters=SHAPES)
    with pytest.raises(InvalidInputError, match=message):
        accumulator.add(block)


@every_projector
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({}, "on axis 0, got none at all"),
        ({"a": torch.tensor(1.0)}, "agree on the number of samples on axis 0"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}, "agree on the number of samples on axis 0"),
        (torch.zeros(2, 3, 4), r"must be \(B, P\), got shape \(2, 3, 4\)|has no matrices in it"),
    ],
)
def test_gradients_without_a_common_sample_axis_are_refused(name, grads, message):
    with pytest.raises(InvalidInputError, match=message):
        made(name, 4).project(grads, 0)
