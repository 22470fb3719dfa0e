"""Masks and GraSS: against a plain sort of plain hashes, for every way that gradients come."""

from __future__ import annotations

import functools
import json
import math
from types import SimpleNamespace

import projection_reference as reference
import pytest
import torch
from projection_cases import LargestTensor, accumulated, random, random_gradients

from trak_lite.errors import InvalidInputError
from trak_lite.projectors.mask.projectors import GraSSProjector, MaskProjector
from trak_lite.testing.projectors import ProjectorTests
from trak_lite.types import DenseBlock, FactoredBlock

KINDS = {"mask": MaskProjector, "grass": GraSSProjector}
SHAPES = {"b.weight": (5, 4), "a.weight": (3, 2, 3), "a.bias": (3,), "scale": (), "empty": (0, 2)}
gradients = functools.partial(random_gradients, SHAPES)
accumulate = functools.partial(accumulated, parameters=SHAPES)
NUM_ENTRIES = 20 + 18 + 3 + 1
STREAM, CHOICE, BUCKET, SIGN = 18, 1, 2, 3


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# ---- the laws of every projector


class TestLaws(ProjectorTests):
    @pytest.fixture(
        autouse=True,
        params=[
            lambda k, seed: MaskProjector(k, seed=seed),
            lambda k, seed: MaskProjector(k // 4, seed=seed, layout="module"),
            lambda k, seed: GraSSProjector(k // 4, seed=seed),
            lambda k, seed: GraSSProjector(k // 8, mask_dim=7, seed=seed, layout="module"),
        ],
        ids=["mask", "mask by module", "grass", "grass by module"],
    )
    def _kind(self, request):
        self.factory = request.param

    def make_projector(self, proj_dim: int, *, seed: int):
        return self.factory(proj_dim, seed)


# ---- which numbers


def key_of(seed: int, model_id: int, name: str, part: int) -> int:
    """The key of a stream and one more number, folded again with plain integers."""
    key = reference.stream_key(seed, model_id, name, STREAM)
    for word in (part, 0):
        key = reference.mix(key ^ word) ^ (key * 0x85EBCA6B % reference.WORD)
    return key


def chosen_entries(parameters, count: int, *, seed: int, model_id: int) -> list[tuple[str, int]]:
    """All entries sorted by their words, the first ``count``."""
    words = [
        (reference.word_at(key_of(seed, model_id, name, CHOICE), i), name, i)
        for name, shape in parameters.items()
        for i in range(math.prod(shape))
    ]
    return [(name, i) for _, name, i in sorted(words)[:count]]


def masked(grads, parameters, count, *, seed, model_id):
    size = sum(math.prod(shape) for shape in parameters.values())
    chosen = chosen_entries(parameters, min(count, size), seed=seed, model_id=model_id)
    columns = [grads[name].reshape(len(grads[name]), -1)[:, i] for name, i in chosen]
    return torch.stack(columns, 1) * math.sqrt(size / len(chosen))


def sketched(entries, proj_dim, segment, *, seed, model_id):
    """One feature and one sign per entry, in plain loops."""
    features = torch.zeros(len(entries), proj_dim, dtype=torch.float64)
    for j in range(entries.shape[1]):
        bucket = reference.word_at(key_of(seed, model_id, segment, BUCKET), j) * proj_dim // 2**32
        word = reference.word_at(key_of(seed, model_id, segment, SIGN), j // 32)
        features[:, bucket] += entries[:, j] * (-1 if word >> (j % 32) & 1 else 1)
    return features


@pytest.mark.parametrize("proj_dim", [1, 7, 41])
@pytest.mark.parametrize(("seed", "model_id"), [(0, 0), (7, 3)])
def test_a_mask_keeps_the_entries_with_the_smallest_words(proj_dim, seed, model_id):
    grads = gradients()
    features = MaskProjector(proj_dim, seed=seed).project(grads, model_id)

    expected = masked(grads, SHAPES, proj_dim, seed=seed, model_id=model_id)
    torch.testing.assert_close(features, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("proj_dim", "mask_dim"), [(1, 5), (5, None), (7, 41), (3, 1000)])
@pytest.mark.parametrize(("seed", "model_id"), [(0, 0), (7, 3)])
def test_grass_adds_each_chosen_entry_to_one_feature(proj_dim, mask_dim, seed, model_id):
    grads = gradients()
    features = GraSSProjector(proj_dim, mask_dim=mask_dim, seed=seed).project(grads, model_id)

    entries = masked(grads, SHAPES, mask_dim or 4 * proj_dim, seed=seed, model_id=model_id)
    expected = sketched(entries, proj_dim, "joint", seed=seed, model_id=model_id)
    torch.testing.assert_close(features, expected, rtol=1e-10, atol=1e-12)


def test_by_module_every_module_has_its_own_entries():
    grads = gradients()
    projector = MaskProjector(6, layout="module")
    features = projector.project(grads, 0)

    modules = [{"b.weight": (5, 4)}, {"a.weight": (3, 2, 3), "a.bias": (3,)}, {"scale": ()}]
    expected = [masked(grads, module, 6, seed=0, model_id=0) for module in modules]
    torch.testing.assert_close(features, torch.cat(expected, 1), rtol=1e-12, atol=0)
    assert projector.layout(SHAPES).to_json() == [["b", 0, 6], ["a", 6, 12], ["", 12, 13]]


def test_by_module_grass_sketches_each_module_by_itself():
    grads = gradients()
    projector = GraSSProjector(4, mask_dim=10, layout="module")
    features = projector.project(grads, 0)

    modules = {"b": {"b.weight": (5, 4)}, "a": {"a.weight": (3, 2, 3), "a.bias": (3,)}}
    expected = [
        sketched(masked(grads, module, 10, seed=0, model_id=0), 4, name, seed=0, model_id=0)
        for name, module in modules.items()
    ]
    expected.append(grads["scale"].reshape(4, 1))
    torch.testing.assert_close(features, torch.cat(expected, 1), rtol=1e-10, atol=1e-12)
    assert projector.layout(SHAPES).to_json() == [["b", 0, 4], ["a", 4, 8], ["", 8, 9]]


@pytest.mark.parametrize("proj_dim", [NUM_ENTRIES, 100])
def test_with_room_for_all_entries_nothing_is_lost(kind, proj_dim):
    grads = gradients()
    projector = KINDS[kind](proj_dim)
    features = projector.project(grads, 0)

    flat = torch.cat([grad.reshape(4, math.prod(SHAPES[name])) for name, grad in grads.items()], 1)
    assert features.shape == (4, projector.layout(SHAPES).width) == (4, NUM_ENTRIES)
    assert torch.equal(features.sort(1).values, flat.sort(1).values)


def test_a_larger_mask_only_appends_entries():
    grads = gradients()
    few, many = (MaskProjector(k).project(grads, 0) * math.sqrt(k) for k in (10, 30))

    torch.testing.assert_close(many[:, :10], few, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tile", [1, 7, 1 << 20])
def test_the_choice_does_not_depend_on_the_tiles_it_is_made_in(kind, tile, monkeypatch):
    grads = {"w": random(2, 300), "v": random(2, 100, seed=1)}
    expected = KINDS[kind](9).project(grads, 0)
    monkeypatch.setattr("trak_lite.projectors.mask.plan._TILE", tile)

    assert torch.equal(KINDS[kind](9).project(grads, 0), expected)


def test_too_low_a_bound_on_the_words_is_raised_until_enough_are_found(monkeypatch):
    grads = {"w": random(2, 3000)}
    expected = MaskProjector(500).project(grads, 0)
    too_few = SimpleNamespace(isqrt=lambda n: -(n + 8) // 8, sqrt=math.sqrt)  # 500 - 8 * 64 + 16 = 4 at first
    monkeypatch.setattr("trak_lite.projectors.mask.plan.math", too_few)

    assert torch.equal(MaskProjector(500).project(grads, 0), expected)


def test_the_order_of_parameters_does_not_matter(kind):
    grads = gradients()
    backward = dict(reversed(grads.items()))

    assert torch.equal(KINDS[kind](9).project(backward, 0), KINDS[kind](9).project(grads, 0))


def test_every_entry_is_equally_likely():
    """1000 seeds: each of 60 entries is kept by a binomial number of them, within 5 standard deviations."""
    grads = {"w": torch.eye(40), "v": torch.eye(20)}
    counts = torch.zeros(60)
    for seed in range(1000):
        for name, offset in (("w", 0), ("v", 40)):
            accumulator = MaskProjector(15, seed=seed).accumulator(
                len(grads[name]), model_id=0, parameters={"w": (40,), "v": (20,)}
            )
            accumulator.add(DenseBlock(name, grads[name]))
            counts[offset : offset + len(grads[name])] += (accumulator.features() != 0).sum(1)

    assert counts.sum() == 15 * 1000
    assert bool(((counts - 250).abs() < 5 * math.sqrt(1000 * 0.25 * 0.75)).all())


# ---- random


@pytest.mark.parametrize("layout", ["joint", "module"])
def test_inner_products_are_unbiased(kind, layout):
    """600 seeds: the mean error is within 4 standard errors."""
    x, y = gradients(1, 0), gradients(1, 1)
    both = {name: torch.cat([x[name], y[name] + 0.7 * x[name]]) for name in x}
    flat = torch.cat([grad.reshape(2, math.prod(SHAPES[name])) for name, grad in both.items()], 1)
    products = []
    for seed in range(600):
        features = KINDS[kind](5, seed=seed, layout=layout).project(both, 0)
        products.append(features @ features.T)

    errors = torch.stack(products) - flat @ flat.T
    assert bool((errors.mean(0).abs() < 4 * errors.std(0) / math.sqrt(600)).all())


def test_seeds_models_and_names_choose_independent_entries():
    """The values 1 .. 4096 tell which of 4096 entries were kept."""
    grad = torch.arange(1.0, 4097).unsqueeze(0).double()
    rows = [MaskProjector(512, seed=seed).project({"w": grad}, 0) for seed in (0, 1, 1000, -1, 1 << 32)]
    rows += [MaskProjector(512).project({"w": grad}, model_id) for model_id in (1, 100_000)]
    rows += [MaskProjector(512).project({"v": grad}, 0)]
    kept = [set(row.round(decimals=3).flatten().tolist()) for row in rows]

    for i, one in enumerate(kept):
        assert len(one) == 512
        for other in kept[:i]:
            assert abs(len(one & other) - 64) < 5 * math.sqrt(64)  # 512 * 512 / 4096 by chance


def test_grass_signs_and_features_differ_between_seeds_models_and_names():
    grad = random(1, 4000)
    rows = [GraSSProjector(1000, seed=seed).project({"w": grad}, 0) for seed in (0, 1, -1)]
    rows += [GraSSProjector(1000).project({"w": grad}, 1), GraSSProjector(1000).project({"v": grad}, 0)]
    rows = torch.cat(rows)
    rows = rows / rows.norm(dim=1, keepdim=True)
    cosines = rows @ rows.T - torch.eye(len(rows), dtype=torch.float64)

    assert float(cosines.abs().max()) < 5 / math.sqrt(1000)


# ---- how gradients come


@pytest.mark.parametrize("piece_bytes", [1, 2000, 1 << 26])
def test_factors_give_what_their_gradient_gives(kind, piece_bytes, monkeypatch):
    monkeypatch.setattr("trak_lite.projectors._factored._PIECE_BYTES", piece_bytes)
    factors, grads = [], []
    for i, (name, (d_out, d_in)) in enumerate({"b.weight": (5, 4), "a.weight": (3, 6)}.items()):
        x, g = random(4, 6, d_in, seed=i), random(4, 6, d_out, seed=i + 9)
        factors.append(FactoredBlock(name, x, g))
        product = torch.einsum("bto,bti->boi", g, x)
        grads.append(DenseBlock(name, product.reshape(4, *SHAPES[name])))
    projector = KINDS[kind](9)

    from_factors = accumulate(projector, factors)
    torch.testing.assert_close(from_factors, accumulate(projector, grads), rtol=1e-10, atol=1e-12)


def test_the_gradient_of_factors_is_never_formed(kind):
    block = FactoredBlock("w", random(4, 3, 600).float(), random(4, 3, 500).float())
    accumulator = KINDS[kind](64).accumulator(4, model_id=0, parameters={"w": (500, 600)})
    with LargestTensor() as largest:
        accumulator.add(block)

    assert bool(accumulator.features().any())
    assert largest.nbytes < 4 * 500 * 600  # of one sample, and there are four


def test_a_row_has_the_same_bits_in_every_batch(kind):
    grads = gradients(num_samples=8, dtype=torch.float32)
    projector = KINDS[kind](6)
    whole = projector.project(grads, 0)
    alone = [projector.project({name: g[row : row + 1] for name, g in grads.items()}, 0) for row in range(8)]

    assert torch.equal(torch.cat(alone), whole)


def test_two_blocks_of_the_same_rows_add_up(kind):
    blocks = [DenseBlock(name, grad) for name, grad in gradients().items()]
    projector = KINDS[kind](6)

    twice = accumulate(projector, [*blocks, *blocks])
    torch.testing.assert_close(twice, 2 * accumulate(projector, blocks), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_gradients_are_added_in_float32(kind, dtype):
    grads = gradients(dtype=dtype)
    features = KINDS[kind](6).project(grads, 0)

    assert features.dtype == torch.float32
    expected = KINDS[kind](6).project({name: grad.double() for name, grad in grads.items()}, 0)
    torch.testing.assert_close(features.double(), expected, rtol=1e-5, atol=1e-5)


def test_mixed_precision_gives_the_widest_features_in_either_order(kind):
    grads = gradients()
    grads["a.weight"] = grads["a.weight"].float()
    blocks = [DenseBlock(name, grad) for name, grad in grads.items()]
    forward, backward = (accumulate(KINDS[kind](9), order) for order in (blocks, blocks[::-1]))

    assert forward.dtype == torch.float64
    torch.testing.assert_close(forward, backward, rtol=1e-6, atol=1e-6)


def test_no_block_at_all_gives_zeros(kind):
    assert torch.equal(accumulate(KINDS[kind](9), []), torch.zeros(4, 9))


def test_no_parameters_have_no_columns(kind):
    assert KINDS[kind](9).layout({"empty": (0, 3)}).width == 0
    assert accumulate(KINDS[kind](9), [], parameters={"empty": (0, 3)}).shape == (4, 0)


def test_features_can_be_read_twice_and_leave_no_graph(kind):
    accumulator = KINDS[kind](9).accumulator(4, model_id=0, parameters=SHAPES)
    accumulator.add(DenseBlock("b.weight", random(4, 5, 4).requires_grad_()))

    assert torch.equal(accumulator.features(), accumulator.features())
    assert not accumulator.features().requires_grad


def test_a_tensor_of_gradients_is_one_parameter_without_a_name(kind):
    grads = random(3, 50)

    assert torch.equal(KINDS[kind](8).project(grads, 0), KINDS[kind](8).project({"": grads}, 0))


def test_an_entry_that_is_not_finite_reaches_only_its_own_feature():
    grad = random(1, 400)
    projector = GraSSProjector(50)
    before = projector.project({"w": grad}, 0)
    broken = grad.clone()
    broken[0, 17::40] = math.nan
    after = projector.project({"w": broken}, 0)

    same = after == before
    assert bool(torch.equal(after.isnan(), ~same))
    assert 0 < int(after.isnan().sum()) <= 10


def test_two_models_in_turn_keep_their_entries_apart(kind):
    grads = gradients()
    projector = KINDS[kind](9)
    alone = [KINDS[kind](9).project(grads, model_id) for model_id in (0, 1)]
    accumulators = [projector.accumulator(4, model_id=i, parameters=SHAPES) for i in (0, 1)]
    for name, grad in grads.items():
        for accumulator in accumulators:
            accumulator.add(DenseBlock(name, grad))

    for accumulator, expected in zip(accumulators, alone, strict=True):
        assert torch.equal(accumulator.features(), expected)


def test_entries_are_chosen_once_per_model(kind, monkeypatch):
    calls = []
    choose = KINDS[kind].accumulator.__globals__["make_plan"]
    monkeypatch.setattr(
        "trak_lite.projectors.mask.projectors.make_plan",
        lambda *args, **kwargs: calls.append(1) or choose(*args, **kwargs),
    )
    projector = KINDS[kind](9)
    for model_id in (0, 0, 1, 1):
        projector.project(gradients(), model_id)

    assert len(calls) == 2


@pytest.mark.cuda
def test_features_have_the_same_bits_on_cuda(kind):
    grads = gradients(dtype=torch.float32)
    device = KINDS[kind](6, device="cuda").project(grads, 0)

    assert device.is_cuda
    assert torch.equal(device.cpu(), KINDS[kind](6).project(grads, 0))


# ---- settings and errors


def test_every_setting_is_in_the_fingerprint():
    projectors = [
        MaskProjector(5),
        MaskProjector(6),
        MaskProjector(5, seed=1),
        MaskProjector(5, layout="module"),
        GraSSProjector(5),
        GraSSProjector(5, mask_dim=5),
        GraSSProjector(6, mask_dim=20),
        GraSSProjector(5, seed=1),
        GraSSProjector(5, layout="module"),
    ]
    fingerprints = {json.dumps(projector.fingerprint(), sort_keys=True) for projector in projectors}

    assert len(fingerprints) == len(projectors)
    assert GraSSProjector(5).fingerprint() == GraSSProjector(5, mask_dim=20).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"proj_dim": 0}, "proj_dim must be an integer of at least 1"),
        ({"proj_dim": 2, "seed": 1.5}, "seed must be an integer"),
        ({"proj_dim": 2, "layout": "modules"}, "Did you mean 'module'"),
    ],
)
def test_a_setting_out_of_range_is_refused(kind, arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        KINDS[kind](**arguments)


def test_a_mask_smaller_than_its_sketch_is_refused():
    with pytest.raises(InvalidInputError, match="mask_dim=4 entries cannot fill proj_dim=5"):
        GraSSProjector(5, mask_dim=4)
    with pytest.raises(InvalidInputError, match="mask_dim must be an integer of at least 1"):
        GraSSProjector(5, mask_dim=0)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (DenseBlock("other", torch.zeros(4, 6)), "'other', which is not among"),
        (DenseBlock("b.weight", torch.zeros(4, 4, 5)), r"has shape \(4, 5\) per sample, expected \(5, 4\)"),
        (DenseBlock("empty", torch.zeros(4, 1, 2)), r"has shape \(1, 2\) per sample, expected \(0, 2\)"),
        (FactoredBlock("b.weight", torch.zeros(4, 2, 4), torch.zeros(4, 2, 5), 1), "covers rows 1 to 5"),
        (FactoredBlock("b.weight", torch.zeros(4, 2, 4), torch.zeros(4, 3, 5)), "with the same b and T"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(kind, block, message):
    with pytest.raises(InvalidInputError, match=message):
        accumulate(KINDS[kind](9), [block])
