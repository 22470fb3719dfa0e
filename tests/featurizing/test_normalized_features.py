"""Normalised rows and stored norms, against gradients of one sample at a time, divided by hand in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import reference
import torch
from dense_cases import columns, projection
from tiny_runs import Counting
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from trak_lite import Attributor, Normalization, Rows, clip, clipping_threshold
from trak_lite.errors import (
    InvalidInputError,
    MissingStoreError,
    NonFiniteError,
    StateError,
)
from trak_lite.featurizing.normalized import RowNormalizer
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer
from trak_lite.methods import GaussNewton
from trak_lite.modelout_functions import resolve_task
from trak_lite.projectors import CountSketchProjector
from trak_lite.store import Manifest

N, M, K, CLASSES = 40, 5, 6, 3
NONE, UNIT, UNIT_BY_MODULE = Normalization(), Normalization("unit"), Normalization("unit", scope="module")
CLIP, CLIP_BY_MODULE = clip(1.5), clip(0.8, scope="module")
EVERY = [NONE, UNIT, UNIT_BY_MODULE, CLIP, CLIP_BY_MODULE]


def name_of(normalize):
    return f"{normalize.kind}-{normalize.scope}"


by_kind = pytest.mark.parametrize("normalize", EVERY, ids=name_of)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES)).double()


def dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 3, generator=generator, dtype=torch.float64)
    sizes = torch.linspace(0.1, 3, count, dtype=torch.float64).view(-1, 1, 1)
    return TensorDataset(inputs * sizes, torch.randint(CLASSES, (count,), generator=generator))


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)
ROWS = {"name": "d", "batch_size": 10}


@by_kind
def test_a_batch_that_is_streamed_again_has_the_same_rows_and_norms(normalize):
    """As after a pass that failed half way, and for comparisons."""
    computer = HookGradientComputer(model(), resolve_task("image_classification"))
    batch, parameters = default_collate([dataset(4, 0)[i] for i in range(4)]), computer.parameters
    normalizer, found = RowNormalizer(normalize, 4), []
    for _ in range(2):
        accumulator = CountSketchProjector(8).accumulator(4, model_id=0, parameters=parameters)
        normalizer.stream(computer, batch, accumulator.add)
        found.append((normalizer.scale(accumulator.features()), normalizer.norms()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def states():
    first = {name: value.clone() for name, value in model().state_dict().items()}
    return [first, {name: -1.3 * value for name, value in first.items()}]


def attributor(path, net=None, **changes):
    settings = {
        "proj_dim": K,
        "dtype": "float32",
        "projector": "gaussian",
        "store_norms": True,
        "progress": False,
    }
    settings = {**settings, "method": GaussNewton(damping=1.0), **changes}
    return Attributor(net or model(), "image_classification", path, **settings)


def gradients(state, data):
    """One backward pass per sample, in float64."""
    net = model()
    net.load_state_dict(state)
    samples = reference.samples_of(data.tensors)
    names = [name for name, _ in net.named_parameters()]
    return reference.per_sample_gradients(net, lambda m, b: reference.margin(m(b[0]), b[1]), samples, names)


GRADIENTS = {
    (c, d): gradients(state, (TRAIN, TARGETS)[d]) for c, state in enumerate(states()) for d in (0, 1)
}
"""Of both checkpoints, for train rows and targets."""


def by_hand(grads, normalize):
    """Every sample's gradient, or its part in each module, over its norm or brought down to C."""
    modules = {name: "all" if normalize.scope == "global" else name.split(".")[0] for name in grads}
    scaled = {name: grad.copy() for name, grad in grads.items()}
    for module in set(modules.values()):
        own = [name for name in grads if modules[name] == module]
        for i in range(len(grads[own[0]])):
            norm = np.sqrt(sum((grads[name][i] ** 2).sum() for name in own))
            ratio = (normalize.threshold or (1 if normalize.kind == "unit" else np.inf)) / norm
            factor = ratio if normalize.kind == "unit" else min(1.0, ratio)
            for name in own:
                scaled[name][i] = grads[name][i] * factor
    return scaled


@pytest.mark.parametrize(
    ("normalize", "computer"),
    [
        pytest.param(normalize, computer, id=f"{name_of(normalize)}-{computer}", marks=marks)
        for row, normalize in enumerate(EVERY)
        for column, computer in enumerate(("hook", "functional", "iterative"))
        for marks in [() if row % 3 == column or normalize is UNIT_BY_MODULE else pytest.mark.campaign]
    ],
)
def test_rows_norms_and_scores_are_those_of_gradients_divided_by_hand(tmp_path, normalize, computer):
    made = attributor(tmp_path / "a.zarr", normalize=normalize, gradient_computer=computer)
    made.featurize(Rows(TRAIN, batch_size=16), checkpoints=states())
    scores = made.score(Rows(TARGETS, batch_size=2), name="test").numpy()

    rows: dict[str, list[np.ndarray]] = {"train": [], "targets": [], "q": [], "w": []}
    for model_id, state in enumerate(states()):
        matrices = projection(made.projector, made.parameters, model_id)
        for d, (name, table) in enumerate((("train", "ckpt"), ("targets", "targets/test/ckpt"))):
            expected = reference.features(by_hand(GRADIENTS[model_id, d], normalize), matrices)
            found = columns(tmp_path / "a.zarr", f"{table}-{model_id}")["features"]
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
            rows[name].append(expected)
        net = model()
        net.load_state_dict(state)
        logits, labels = net(TRAIN.tensors[0]), TRAIN.tensors[1]
        rows["q"].append(reference.out_to_loss_grad(logits, labels))
        rows["w"].append(reference.loss_curvature(logits, labels))
    expected = reference.kernel_scores(
        rows["train"], rows["q"], rows["w"], rows["targets"], segments=[(0, K), (K, 2 * K)], damping=1.0
    )
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())

    norms = made.gradient_norms()  # of what nothing divided
    assert (norms.shape, norms.dtype) == ((2, N), np.float32)
    whole = [np.linalg.norm(reference.flatten(GRADIENTS[c, 0]), axis=1) for c in (0, 1)]
    np.testing.assert_allclose(norms, whole, rtol=1e-6)


@by_kind
def test_q_and_w_keep_their_bits_and_keeping_norms_those_of_the_features(tmp_path, normalize):
    attributor(tmp_path / "plain.zarr").featurize(TRAIN)
    attributor(tmp_path / "a.zarr", normalize=normalize).featurize(TRAIN)
    attributor(tmp_path / "without.zarr", normalize=normalize, store_norms=False).featurize(TRAIN)

    plain, found, without = (columns(tmp_path / f"{name}.zarr") for name in ("plain", "a", "without"))
    for name in ("out_to_loss", "loss_curvature", "gradient_norm"):
        np.testing.assert_array_equal(found[name], plain[name])
    assert found.keys() - without.keys() == {"gradient_norm"}
    np.testing.assert_array_equal(found["features"], without["features"])


@by_kind
def test_one_pass_over_the_data_is_enough(normalize):
    counts = []
    for setting in (NONE, normalize):
        mine, calls = model(), list[int]()
        mine.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        made = attributor(None, mine, normalize=setting, gradient_computer="hook")
        made.featurize(Rows(TRAIN, batch_size=10))
        counts.append(len(calls))

    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("normalize", "fail_at"), [(NONE, 5), (UNIT, 25), (UNIT_BY_MODULE, 39), (CLIP, 25), (CLIP_BY_MODULE, 15)]
)
def test_an_interrupted_run_is_continued_by_what_opens_the_store(tmp_path, normalize, fail_at):
    whole = attributor(tmp_path / "whole.zarr", normalize=normalize)
    whole.featurize(Rows(TRAIN, **ROWS))
    made = attributor(tmp_path / "a.zarr", normalize=normalize)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, fail_at), **ROWS))

    opened = made if fail_at < 10 else Attributor.open(tmp_path / "a.zarr", model(), store_norms=True)
    assert opened.normalization == normalize
    opened.featurize(Rows(TRAIN, **ROWS))
    assert opened.featurize(Rows(TRAIN, **ROWS)).rows_written == 0

    found, expected = columns(tmp_path / "a.zarr"), columns(tmp_path / "whole.zarr")
    assert found.keys() == expected.keys() == {"features", "out_to_loss", "loss_curvature", "gradient_norm"}
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column)
    np.testing.assert_array_equal(opened.score(TARGETS).numpy(), whole.score(TARGETS).numpy())


def forget(path, *settings):
    """Make a store say what an older version would have said."""
    file = path / "zarr.json"
    document = json.loads(file.read_text())
    record = document["attributes"]["trak_lite"]
    del record["checksum"]
    for name in settings:
        del record["made_with"]["settings"][name]
    record["checksum"] = Manifest(record).digest()[:32]
    file.write_text(json.dumps(document))


def test_a_store_of_an_older_version_opens_resumes_and_scores(tmp_path):
    whole = attributor(tmp_path / "whole.zarr")
    whole.featurize(Rows(TRAIN, **ROWS), checkpoints=states())
    made = attributor(tmp_path / "a.zarr", store_norms=False)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, 35), **ROWS), checkpoints=states()[:1])
    forget(tmp_path / "a.zarr", "normalize", "store_norms")

    opened = Attributor.open(tmp_path / "a.zarr", model(), store_norms=True)
    summary = opened.featurize(Rows(TRAIN, **ROWS), checkpoints=states())

    assert opened.normalization == NONE
    assert summary.rows_found > 0
    assert "gradient_norm" not in columns(tmp_path / "a.zarr", "ckpt-0")
    np.testing.assert_array_equal(opened.score(TARGETS).numpy(), whole.score(TARGETS).numpy())
    with pytest.raises(StateError, match=r"ckpt-0 has no gradient norms.*another path"):
        opened.gradient_norms()
    norms = columns(tmp_path / "a.zarr", "ckpt-1")["gradient_norm"]
    np.testing.assert_array_equal(norms, whole.gradient_norms()[1])


class ComputerThatNormalises(FunctionalGradientComputer):
    def compute_per_sample_grad(self, batch):
        grads = super().compute_per_sample_grad(batch)
        norms = torch.cat([grad.flatten(1) for grad in grads.values()], 1).norm(dim=1)
        return {name: (grad.flatten(1) / norms[:, None]).view_as(grad) for name, grad in grads.items()}

    def fingerprint(self):
        return {**super().fingerprint(), **UNIT.fingerprint()}


def test_every_normalisation_has_rows_of_its_own():
    found = [json.dumps(normalize.fingerprint()) for normalize in (*EVERY, clip(2.5))]
    assert len(set(found)) == len(found), found


def test_normalising_twice_is_refused_and_once_in_the_computer_is_the_same(tmp_path):
    twice = attributor(tmp_path / "a.zarr", normalize=CLIP, gradient_computer=ComputerThatNormalises)
    with pytest.raises(InvalidInputError, match=r"already normalises .*Leave out one of the two"):
        twice.featurize(TRAIN)
    assert not (tmp_path / "a.zarr").exists()

    attributor(tmp_path / "a.zarr", normalize="unit").featurize(TRAIN)
    attributor(tmp_path / "b.zarr", gradient_computer=ComputerThatNormalises).featurize(TRAIN)
    found, expected = (columns(tmp_path / f"{name}.zarr")["features"] for name in ("b", "a"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_threshold_from_stored_norms_clips_the_share_that_was_asked_for(tmp_path):
    """Norms in memory are those on disk."""
    made = attributor(tmp_path / "plain.zarr", projector="none")
    made.featurize(TRAIN, checkpoints=states()[:1])
    assert made.gradient_norms().shape == (1, N)
    made.featurize(TRAIN, checkpoints=states())
    memory = attributor(None)
    memory.featurize(TRAIN, checkpoints=states())
    norms = Attributor.open(tmp_path / "plain.zarr", model()).gradient_norms()
    np.testing.assert_array_equal(memory.gradient_norms(), norms)

    threshold = clipping_threshold(norms, quantile=0.75)
    clipped = attributor(tmp_path / "clipped.zarr", projector="none", normalize=clip(threshold))
    clipped.featurize(TRAIN, checkpoints=states())

    long = norms > threshold
    assert long.mean() == pytest.approx(0.25)
    for model_id in (0, 1):
        paths = (tmp_path / "plain.zarr", tmp_path / "clipped.zarr")
        before, after = (columns(path, f"ckpt-{model_id}")["features"] for path in paths)
        np.testing.assert_array_equal(after[~long[model_id]], before[~long[model_id]])
        np.testing.assert_allclose(np.linalg.norm(after[long[model_id]], axis=1), threshold, rtol=1e-6)


def test_norms_that_are_not_there_yet_are_asked_for(tmp_path):
    with pytest.raises(StateError, match="featurize"):
        attributor(None).gradient_norms()
    with pytest.raises(MissingStoreError, match="nowhere"):
        attributor(tmp_path / "nowhere.zarr").gradient_norms()
    without = attributor(None, store_norms=False)
    without.featurize(TRAIN)
    with pytest.raises(StateError, match="store_norms=False"):
        without.gradient_norms()
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Counting(TRAIN, 35), name="d"))
    with pytest.raises(StateError, match=r"ckpt-0 has 32 of 40 train rows"):
        made.gradient_norms()


def linear(path, inputs, **settings):
    """The rows of a linear model, whose gradients are its inputs."""
    made = Attributor(
        nn.Linear(4, 1, bias=False),
        lambda call, batch: call(batch[0])[:, 0],
        path,
        dtype="float32",
        projector="none",
        **settings,
    )
    made.featurize(TensorDataset(inputs))
    return columns(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store_norms": True}, r"gradient norm of rows \[3\] of the train data is NaN or beyond float32"),
        ({"normalize": "unit"}, r"feature of rows \[3\] of the train data is NaN"),
    ],
)
def test_a_norm_beyond_float32_is_refused_before_anything_is_on_disk(tmp_path, changes, message):
    inputs = torch.ones(8, 4)
    inputs[3] = 1e25  # a gradient that float32 holds, with a squared norm that it does not
    with pytest.raises(NonFiniteError, match=message):
        linear(tmp_path / "a.zarr", inputs, **changes)

    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize("normalize", [UNIT, UNIT_BY_MODULE, CLIP], ids=name_of)
def test_a_gradient_of_zero_is_a_row_of_zeros_with_norm_zero(tmp_path, normalize):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    inputs[2] = 0
    found = linear(tmp_path / "a.zarr", inputs, normalize=normalize, store_norms=True)

    np.testing.assert_allclose(found["gradient_norm"], inputs.norm(dim=1), rtol=1e-6)
    assert not found["features"][2].any()
    assert found["features"][[0, 1, 3]].any(axis=1).all()
