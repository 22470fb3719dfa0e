"""Normalised rows and stored norms, against gradients of one sample at a time, divided by hand in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trak_lite import Attributor, Normalization, Rows, clip, clipping_threshold
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    NonFiniteError,
    StateError,
)
from trak_lite.gradient_computers import FunctionalGradientComputer
from trak_lite.methods import GaussNewton
from trak_lite.store import ZarrFeatureStore
from trak_lite.store.disk.documents import sealed
from trak_lite.types import Batch

N, M, K, CLASSES = 70, 5, 6, 3
NONE, UNIT, UNIT_BY_MODULE = Normalization(), Normalization("unit"), Normalization("unit", scope="module")
CLIP, CLIP_BY_MODULE = clip(1.5), clip(0.8, scope="module")
EVERY = [NONE, UNIT, UNIT_BY_MODULE, CLIP, CLIP_BY_MODULE]
by_kind = pytest.mark.parametrize("normalize", EVERY, ids=lambda n: f"{n.kind}-{n.scope}")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES)).double()


def dataset(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(
        inputs * torch.linspace(0.1, 3, count, dtype=torch.float64).view(-1, 1, 1),
        torch.randint(CLASSES, (count,), generator=generator),
    )


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)


def states() -> list[dict[str, Tensor]]:
    first = {name: value.clone() for name, value in model().state_dict().items()}
    return [first, {name: -1.3 * value for name, value in first.items()}]


def attributor(path: Path | None, **changes: Any) -> Attributor:
    settings = {
        "proj_dim": K,
        "dtype": "float32",
        "projector": "gaussian",
        "store_norms": True,
        "method": GaussNewton(damping=1.0),
        **changes,
    }
    return Attributor(settings.pop("model", None) or model(), "image_classification", path, **settings)


def gradients(state: dict[str, Tensor], data: TensorDataset) -> dict[str, np.ndarray]:
    """One backward pass per sample, in float64."""
    net = model()
    net.load_state_dict(state)
    samples = reference.samples_of(data.tensors)
    return reference.per_sample_gradients(
        net,
        lambda m, b: reference.margin(m(b[0]), b[1]),
        samples,
        [name for name, _ in net.named_parameters()],
    )


def by_hand(grads: dict[str, np.ndarray], normalize: Normalization) -> dict[str, np.ndarray]:
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


def matrices(made: Attributor, model_id: int) -> dict[str, np.ndarray]:
    """The projection as explicit matrices: what it makes of every unit vector."""
    found = {}
    for name, shape in made.parameters.items():
        size = int(np.prod(shape))
        units = {
            other: torch.zeros(size, *other_shape, dtype=torch.float64)
            for other, other_shape in made.parameters.items()
        }
        units[name] = torch.eye(size, dtype=torch.float64).view(size, *shape)
        found[name] = made.projector.project(units, model_id).numpy()
    return found


def columns(path: Path, table: str = "ckpt-0") -> dict[str, np.ndarray]:
    with ZarrFeatureStore.open(path, mode="r") as store:
        opened = store.open_table(table)
        return {column.name: opened.read(column.name) for column in opened.spec.columns}


class Interrupted(Dataset[Any]):
    """Ctrl-C at one row."""

    def __init__(self, fail_at: int) -> None:
        self.fail_at = fail_at

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if index == self.fail_at:
            raise KeyboardInterrupt
        return TRAIN[index]


# ------------------------------------------------------------------------ what is stored


@by_kind
@pytest.mark.parametrize("computer", ["hook", "functional", "iterative"])
def test_rows_of_train_set_and_targets_are_those_of_gradients_divided_by_hand(
    tmp_path: Path, normalize: Normalization, computer: str
) -> None:
    made = attributor(tmp_path / "a.zarr", normalize=normalize, gradient_computer=computer)
    made.featurize(Rows(TRAIN, batch_size=16), checkpoints=states())
    made.score(Rows(TARGETS, batch_size=2), name="test")

    for model_id, state in enumerate(states()):
        for table, data in ((f"ckpt-{model_id}", TRAIN), (f"targets/test/ckpt-{model_id}", TARGETS)):
            expected = reference.features(
                by_hand(gradients(state, data), normalize), matrices(made, model_id)
            )
            found = columns(tmp_path / "a.zarr", table)["features"]
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@by_kind
def test_stored_norms_are_those_of_whole_gradients_that_nothing_divided(normalize: Normalization) -> None:
    made = attributor(None, normalize=normalize)
    made.featurize(Rows(TRAIN, batch_size=16), checkpoints=states())

    norms = made.gradient_norms()

    expected = [np.linalg.norm(reference.flatten(gradients(state, TRAIN)), axis=1) for state in states()]
    assert norms.shape == (2, N)
    assert norms.dtype == np.float32
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


@by_kind
def test_scores_are_those_of_gradients_divided_by_hand(normalize: Normalization) -> None:
    made = attributor(None, normalize=normalize)
    made.featurize(TRAIN, checkpoints=states())

    scores = made.score(TARGETS).numpy()

    rows: dict[str, list[np.ndarray]] = {"train": [], "targets": [], "q": [], "w": []}
    for model_id, state in enumerate(states()):
        for name, data in (("train", TRAIN), ("targets", TARGETS)):
            scaled = by_hand(gradients(state, data), normalize)
            rows[name].append(reference.features(scaled, matrices(made, model_id)))
        net = model()
        net.load_state_dict(state)
        logits, labels = net(TRAIN.tensors[0]), TRAIN.tensors[1]
        rows["q"].append(reference.out_to_loss_grad(logits, labels))
        rows["w"].append(reference.loss_curvature(logits, labels))
    expected = reference.kernel_scores(
        rows["train"], rows["q"], rows["w"], rows["targets"], segments=[(0, K), (K, 2 * K)], damping=1.0
    )
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@by_kind
def test_q_and_w_keep_their_bits(tmp_path: Path, normalize: Normalization) -> None:
    attributor(tmp_path / "plain.zarr").featurize(TRAIN)
    attributor(tmp_path / "a.zarr", normalize=normalize).featurize(TRAIN)

    plain, found = columns(tmp_path / "plain.zarr"), columns(tmp_path / "a.zarr")

    for name in ("out_to_loss", "loss_curvature", "gradient_norm"):
        np.testing.assert_array_equal(found[name], plain[name])


def test_keeping_norms_leaves_the_bits_of_the_features_alone(tmp_path: Path) -> None:
    attributor(tmp_path / "with.zarr").featurize(TRAIN)
    attributor(tmp_path / "without.zarr", store_norms=False).featurize(TRAIN)

    found, plain = columns(tmp_path / "with.zarr"), columns(tmp_path / "without.zarr")

    assert found.keys() - plain.keys() == {"gradient_norm"}
    np.testing.assert_array_equal(found["features"], plain["features"])


def test_each_module_of_a_row_has_norm_one_where_that_was_asked_for(tmp_path: Path) -> None:
    attributor(tmp_path / "a.zarr", projector="none", normalize=UNIT_BY_MODULE).featurize(TRAIN)

    rows = columns(tmp_path / "a.zarr")["features"]

    for part in (rows[:, :20], rows[:, 20:]):  # the convolution's 16 + 4 entries, the linear layer's 24 + 3
        np.testing.assert_allclose(np.linalg.norm(part, axis=1), 1, rtol=1e-6)


@by_kind
def test_one_pass_over_the_data_is_enough(normalize: Normalization) -> None:
    counts = []
    for setting in (NONE, normalize):
        mine, calls = model(), list[int]()
        mine.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        made = attributor(None, model=mine, normalize=setting, gradient_computer="hook")
        made.featurize(Rows(TRAIN, batch_size=10))
        counts.append(len(calls))

    assert counts[0] == counts[1]


# ------------------------------------------------------------------------ resuming


@by_kind
@pytest.mark.parametrize("fail_at", [5, 40, 69])
def test_an_interrupted_run_ends_with_the_same_rows_and_norms(
    tmp_path: Path, normalize: Normalization, fail_at: int
) -> None:
    settings = {"name": "d", "batch_size": 10}
    attributor(tmp_path / "whole.zarr", normalize=normalize).featurize(Rows(TRAIN, **settings))
    with pytest.raises(KeyboardInterrupt):
        attributor(tmp_path / "a.zarr", normalize=normalize).featurize(Rows(Interrupted(fail_at), **settings))

    attributor(tmp_path / "a.zarr", normalize=normalize).featurize(Rows(TRAIN, **settings))

    found, whole = columns(tmp_path / "a.zarr"), columns(tmp_path / "whole.zarr")
    assert found.keys() == whole.keys() == {"features", "out_to_loss", "loss_curvature", "gradient_norm"}
    for name in whole:
        np.testing.assert_array_equal(found[name], whole[name])


def forget(path: Path, *settings: str) -> None:
    """Make a store say what an older version would have said."""
    file = path / "zarr.json"
    document = json.loads(file.read_text())
    for name in settings:
        del document["attributes"]["trak_lite"]["made_with"]["settings"][name]
    document["attributes"]["trak_lite"] = sealed(document["attributes"]["trak_lite"])
    file.write_text(json.dumps(document))


def test_a_store_of_an_older_version_opens_resumes_and_scores(tmp_path: Path) -> None:
    settings = {"name": "d", "batch_size": 10}
    whole = attributor(tmp_path / "whole.zarr")
    whole.featurize(Rows(TRAIN, **settings), checkpoints=states())
    with pytest.raises(KeyboardInterrupt):
        attributor(tmp_path / "a.zarr", store_norms=False).featurize(
            Rows(Interrupted(40), **settings), checkpoints=states()[:1]
        )
    forget(tmp_path / "a.zarr", "normalize", "store_norms")

    opened = Attributor.open(tmp_path / "a.zarr", model(), store_norms=True)
    summary = opened.featurize(Rows(TRAIN, **settings), checkpoints=states())

    assert opened.normalization == NONE
    assert summary.rows_found > 0
    assert "gradient_norm" not in columns(tmp_path / "a.zarr", "ckpt-0")
    np.testing.assert_array_equal(opened.score(TARGETS).numpy(), whole.score(TARGETS).numpy())
    with pytest.raises(StateError, match=r"ckpt-0 has no gradient norms.*another path"):
        opened.gradient_norms()
    np.testing.assert_array_equal(
        columns(tmp_path / "a.zarr", "ckpt-1")["gradient_norm"], whole.gradient_norms()[1]
    )


# ------------------------------------------------------------------------ settings


@by_kind
def test_open_restores_the_normalisation(tmp_path: Path, normalize: Normalization) -> None:
    made = attributor(tmp_path / "a.zarr", normalize=normalize, store_norms=False)
    made.featurize(TRAIN)
    scores = made.score(TARGETS, name="first").numpy()

    opened = Attributor.open(tmp_path / "a.zarr", model())

    assert opened.normalization == normalize
    assert opened.featurize(TRAIN).rows_written == 0
    np.testing.assert_array_equal(opened.score(TARGETS, name="again").numpy(), scores)
    with pytest.raises(StateError, match="store_norms=False"):
        opened.gradient_norms()


@pytest.mark.parametrize(
    ("stored", "given", "message"),
    [
        ("none", "unit", r"gradients\.normalization.* is 'absent' there"),
        ("unit", "none", r"gradients\.normalization.*'absent' here"),
        ("unit", UNIT_BY_MODULE, r"normalization\.scope is 'global' there, 'module' here"),
        (CLIP, clip(2.5), r"normalization\.threshold is 1\.5 there, 2\.5 here"),
    ],
)
def test_rows_of_another_normalisation_are_refused(
    tmp_path: Path, stored: Any, given: Any, message: str
) -> None:
    attributor(tmp_path / "a.zarr", normalize=stored).featurize(TRAIN)
    other = attributor(tmp_path / "a.zarr", normalize=given)

    with pytest.raises(ManifestMismatchError, match=message):
        other.featurize(TRAIN)
    with pytest.raises(ManifestMismatchError, match=message):
        other.score(TARGETS)


@pytest.mark.parametrize("normalize", ["clip", "unity", 2.0, clip])
def test_a_normalisation_that_means_nothing_is_refused_at_once(tmp_path: Path, normalize: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"normalize must be 'none', 'unit', clip\(C\)"):
        attributor(tmp_path / "a.zarr", normalize=normalize)

    assert not (tmp_path / "a.zarr").exists()


class ComputerThatNormalises(FunctionalGradientComputer):
    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        grads = super().compute_per_sample_grad(batch)
        norms = torch.cat([grad.flatten(1) for grad in grads.values()], 1).norm(dim=1)
        return {name: (grad.flatten(1) / norms[:, None]).view_as(grad) for name, grad in grads.items()}

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), **UNIT.fingerprint()}


def test_normalising_twice_is_refused_and_once_in_the_computer_is_the_same(tmp_path: Path) -> None:
    twice = attributor(tmp_path / "a.zarr", normalize=CLIP, gradient_computer=ComputerThatNormalises)
    with pytest.raises(InvalidInputError, match=r"already normalises .*Leave out one of the two"):
        twice.featurize(TRAIN)
    assert not (tmp_path / "a.zarr").exists()

    attributor(tmp_path / "a.zarr", normalize="unit").featurize(TRAIN)
    other = attributor(tmp_path / "b.zarr", gradient_computer=ComputerThatNormalises)
    other.featurize(TRAIN)
    np.testing.assert_allclose(
        columns(tmp_path / "b.zarr")["features"],
        columns(tmp_path / "a.zarr")["features"],
        rtol=1e-5,
        atol=1e-7,
    )


# ------------------------------------------------------------------------ norms, and a threshold from them


def test_a_threshold_from_stored_norms_clips_the_share_that_was_asked_for(tmp_path: Path) -> None:
    plain = attributor(tmp_path / "plain.zarr", projector="none")
    plain.featurize(TRAIN, checkpoints=states())
    norms = Attributor.open(tmp_path / "plain.zarr", model()).gradient_norms()

    threshold = clipping_threshold(norms, quantile=0.75)
    attributor(tmp_path / "clipped.zarr", projector="none", normalize=clip(threshold)).featurize(
        TRAIN, checkpoints=states()
    )

    long = norms > threshold
    assert long.mean() == pytest.approx(0.25)
    for model_id in (0, 1):
        before, after = (
            columns(tmp_path / name, f"ckpt-{model_id}")["features"]
            for name in ("plain.zarr", "clipped.zarr")
        )
        np.testing.assert_array_equal(after[~long[model_id]], before[~long[model_id]])
        np.testing.assert_allclose(np.linalg.norm(after[long[model_id]], axis=1), threshold, rtol=1e-6)


def test_norms_in_memory_are_those_on_disk_and_leave_the_store_writable(tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path / "a.zarr"):
        made = attributor(path)
        made.featurize(TRAIN, checkpoints=states()[:1])
        assert made.gradient_norms().shape == (1, N)
        made.featurize(TRAIN, checkpoints=states())
        found.append(made.gradient_norms())

    np.testing.assert_array_equal(*found)


def test_norms_that_are_not_there_yet_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="featurize"):
        attributor(None).gradient_norms()
    with pytest.raises(MissingStoreError, match="nowhere"):
        attributor(tmp_path / "nowhere.zarr").gradient_norms()
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Interrupted(40), name="d"))
    with pytest.raises(StateError, match=r"ckpt-0 has 32 of 70 train rows"):
        made.gradient_norms()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store_norms": True}, r"gradient norm of rows \[3\] of the train data is NaN or beyond float32"),
        ({"normalize": "unit"}, r"feature of rows \[3\] of the train data is NaN"),
    ],
)
def test_a_norm_beyond_float32_is_refused_before_anything_is_on_disk(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    inputs = torch.ones(8, 4)
    inputs[3] = 1e25  # a gradient that float32 holds, with a squared norm that it does not
    made = Attributor(
        nn.Linear(4, 1, bias=False),
        lambda call, batch: call(batch[0])[:, 0],
        tmp_path / "a.zarr",
        dtype="float32",
        projector="none",
        **changes,
    )

    with pytest.raises(NonFiniteError, match=message):
        made.featurize(TensorDataset(inputs))

    assert not (tmp_path / "a.zarr").exists()


def test_a_gradient_of_zero_is_a_row_of_zeros_with_norm_zero(tmp_path: Path) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    inputs[2] = 0
    for name, normalize in (("unit", UNIT), ("module", UNIT_BY_MODULE), ("clip", CLIP)):
        made = Attributor(
            nn.Linear(4, 1, bias=False),
            lambda call, batch: call(batch[0])[:, 0],
            tmp_path / f"{name}.zarr",
            dtype="float32",
            projector="none",
            normalize=normalize,
            store_norms=True,
        )
        made.featurize(TensorDataset(inputs))

        found = columns(tmp_path / f"{name}.zarr")
        np.testing.assert_allclose(found["gradient_norm"], inputs.norm(dim=1), rtol=1e-6)
        assert not found["features"][2].any()
        assert found["features"][[0, 1, 3]].any(axis=1).all()
