"""Scores of unprojected gradients, streamed or of candidates, against loops of autograd and stored whole gradients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import labelled, random_states
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Refine, Rows, Scores, clip
from trak_lite.errors import InvalidInputError, ManifestMismatchError, NonFiniteError, StateError
from trak_lite.featurizing.unprojected import ProductProjector
from trak_lite.methods import EKFAC, TRAK, AbstractMethod, Fisher, GaussNewton, GradCos, GradDot, TracIn
from trak_lite.types import DenseBlock, FactoredBlock, LookupBlock, SummedBlock

N, M = 40, 5
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


STATES = random_states(model)


def attributor(path: Path | None = None, **changes: Any) -> Attributor:
    settings = {"proj_dim": 16, "dtype": "float32", "progress": False, **changes}
    return Attributor(model(), "image_classification", path, **settings)


def whole(**changes: Any) -> Attributor:
    """An attributor that stores whole gradients in float32."""
    made = attributor(projector="none", **changes)
    made.featurize(TRAIN, STATES)
    return made


def close(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=rtol, atol=1e-5 * np.abs(expected).max())


def margin(net: nn.Module, inputs: Tensor, label: Tensor) -> tuple[Tensor, float]:
    """f and q of one sample."""
    logits = net(inputs[None])[0]
    others = torch.cat([logits[:label], logits[label + 1 :]])
    return logits[label] - others.logsumexp(0), 1 - logits.softmax(0)[label].item()


def gradients(state: dict[str, Tensor], data: TensorDataset) -> tuple[np.ndarray, np.ndarray]:
    """Gradients ``(n, P)`` and q of every sample, one backward pass each, in float64."""
    net = model().double().eval()
    net.load_state_dict(state)
    rows, weights = [], []
    for inputs, label in data:
        f, q = margin(net, inputs.double(), label)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(f, list(net.parameters()))]))
        weights.append(q)
    return torch.stack(rows).numpy(), np.array(weights)


@pytest.mark.quick
@pytest.mark.parametrize("q", ["inside", "outside", "off"])
def test_graddot_is_the_product_of_gradients_of_autograd(q: str) -> None:
    found = attributor().stream_scores(
        Rows(TRAIN, batch_size=7), TARGETS, method=GradDot(q=q), checkpoints=STATES
    )

    products, weights = [], []
    for state in STATES:
        (rows, out_to_loss), (targets, _) = gradients(state, TRAIN), gradients(state, TARGETS)
        products.append(rows @ targets.T * (out_to_loss[:, None] if q == "inside" else 1))
        weights.append(out_to_loss)
    expected = np.mean(products, 0) * (np.mean(weights, 0)[:, None] if q == "outside" else 1)
    close(found, expected)


METHODS = [
    EKFAC(damping=0.1),
    EKFAC(damping=1.0, fisher="empirical", correct_eigenvalues=False, q="outside"),
    EKFAC(damping=0.5, checkpoint_weights=(1.0, -0.5)),
    TracIn(learning_rates=(0.1, 0.02)),
    GradDot(q="off"),
    GradCos(),
    GradCos(layout="joint", q="inside"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_streamed_scores_are_those_of_stored_whole_gradients(method: AbstractMethod) -> None:
    stored = whole(layout="module").score(TARGETS, method=method)

    streamed = attributor().stream_scores(
        TRAIN, Rows(TARGETS, batch_size=2), method=method, checkpoints=STATES
    )

    close(streamed, stored)
    assert streamed.method == method


@pytest.mark.parametrize("normalize", ["adam", "adam_update"])
def test_rows_of_the_state_of_adam_are_refused(normalize: str) -> None:
    method = GradDot(q="off")
    with pytest.raises(InvalidInputError, match=f"do not support normalize='{normalize}'"):
        attributor(normalize=normalize).stream_scores(TRAIN, TARGETS, method=method)


@pytest.mark.parametrize("normalize", ["unit", clip(0.5), clip(0.2, scope="module")], ids=str)
def test_normalisation_is_that_of_stored_rows(normalize: Any) -> None:
    for method in (GradDot(), EKFAC(damping=0.3)):
        stored = whole(normalize=normalize).score(TARGETS, method=method)
        streamed = attributor(normalize=normalize).stream_scores(
            TRAIN, TARGETS, method=method, checkpoints=STATES
        )
        close(streamed, stored)


class Words(nn.Module):
    """A tied embedding, so that blocks are lookups, factors and sums of both."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(ids))))


@pytest.mark.parametrize("tied", [False, True])
def test_language_models_with_lookups_and_tied_weights(tied: bool) -> None:
    torch.manual_seed(0)
    net = Words(tied)
    ids = torch.randint(11, (15, 7))
    data, targets = TensorDataset(ids[:12], ids[:12]), TensorDataset(ids[12:], ids[12:])
    settings: dict[str, Any] = {"dtype": "float32", "progress": False}
    stored = Attributor(net, "causal_language_modeling", None, projector="none", **settings)
    stored.featurize(data)

    for method in (GradDot(), EKFAC(damping=0.2)):
        expected = stored.score(targets, method=method)
        made = Attributor(net, "causal_language_modeling", None, **settings)
        close(made.stream_scores(data, targets, method=method), expected)


def test_products_of_every_kind_of_block() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(3, 4, 5, generator=generator), torch.randn(3, 4, 6, generator=generator)
    looked = LookupBlock("w", torch.randint(6, (3, 4), generator=generator), x, 6)
    targets = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    factored = FactoredBlock("w", x, g)

    for block in (factored, looked, SummedBlock("w", (factored, looked)), DenseBlock("w", looked.grad)):
        accumulator = ProductProjector({"w": targets}).accumulator(3, model_id=0, parameters={"w": (6, 5)})
        accumulator.add(block)
        torch.testing.assert_close(accumulator.features(), block.dense().double() @ targets.flatten(1).T)


def test_the_default_is_ekfac_and_the_settings_of_rows_have_no_effect() -> None:
    default = attributor().stream_scores(TRAIN, TARGETS)

    assert default.method == EKFAC()
    other = attributor(proj_dim=3, dtype="int8", layout="joint").stream_scores(TRAIN, TARGETS, method=EKFAC())
    np.testing.assert_array_equal(np.asarray(default), np.asarray(other))


@pytest.mark.parametrize("max_bytes", [1, 4000])
def test_few_bytes_take_more_passes_and_give_the_same_scores(
    max_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = attributor().stream_scores(TRAIN, TARGETS, method="EKFAC", checkpoints=STATES)

    with caplog.at_level(logging.INFO, "trak_lite"):
        found = attributor().stream_scores(
            TRAIN, TARGETS, method="EKFAC", checkpoints=iter(STATES), max_bytes=max_bytes
        )

    assert "the train rows are read" in caplog.text
    close(found, expected, rtol=1e-5)


def test_the_k_strongest_rows_are_those_of_all_scores() -> None:
    scores = attributor().stream_scores(TRAIN, TARGETS, method="GradDot", checkpoints=STATES)
    few = attributor().stream_scores(TRAIN, TARGETS, method="GradDot", checkpoints=STATES, k=4)

    for sign in ("helpful", "harmful"):
        for count in (1, 4):
            np.testing.assert_array_equal(
                few.top(count, sign=sign).indices, scores.top(count, sign=sign).indices
            )
            close(few.top(count, sign=sign).scores, scores.top(count, sign=sign).scores)
        np.testing.assert_array_equal(
            few.top(3, target=2, sign=sign).indices, scores.top(3, target=2, sign=sign).indices
        )
    known = ~np.isnan(few.numpy())
    assert (known.sum(0) == 8).all()
    close(few.numpy()[known], scores.numpy()[known])
    np.testing.assert_array_equal(few.rows([3, 0]), few.numpy()[[3, 0]])
    assert few.shape == scores.shape == (N, M)
    with pytest.raises(InvalidInputError, match=r"hold the 4 most helpful .* top\(5\)"):
        few.top(5)


def test_more_rows_than_there_are_return_all() -> None:
    few = attributor().stream_scores(TRAIN, TARGETS, method="GradDot", k=1000)

    assert few.top(2000).indices.shape == (M, N)


def test_the_result_is_a_scores_object_that_says_what_it_lacks() -> None:
    scores = attributor().stream_scores(TRAIN, TARGETS, method=EKFAC(damping=0.1))

    assert isinstance(scores, Scores)
    assert scores.to_pandas().shape == (N, M)
    assert scores.stored
    assert (scores.location, scores.verdict) == (None, None)
    assert "EKFAC" in repr(scores)
    assert "memory" in repr(scores)
    assert scores.group([0] * N).sums.shape == (1, M)
    assert scores.manifest.fingerprint["task"]
    for call in (
        lambda: scores.self_influence(),
        lambda: scores.reliability(),
        lambda: scores.damping_path([1.0]),
        lambda: scores.run,
    ):
        with pytest.raises(StateError, match="not computed from stored rows"):
            call()


def test_only_the_fit_is_stored_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    attributor(path).stream_scores(TRAIN, TARGETS, method="GradDot")
    assert not path.exists()
    first = attributor(path).stream_scores(TRAIN, TARGETS, method="EKFAC")
    monkeypatch.setattr("trak_lite.featurizing.kronecker_fits.fit_curvature", None)

    made = attributor(path)
    second = made.stream_scores(TRAIN, TARGETS, method=EKFAC())
    made.featurize(TRAIN)

    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
    assert made.score(TARGETS, method="EKFAC").shape == (N, M)  # with the same fit
    with pytest.raises(ManifestMismatchError, match="dataset"):
        made.stream_scores(labelled(N, 7), TARGETS, method="EKFAC")
    assert made.stream_scores(labelled(7, 7), TARGETS, method="GradDot").shape == (7, M)


@pytest.mark.parametrize("method", [GaussNewton(), Fisher(), TRAK()], ids=lambda method: method.name)
def test_methods_in_feature_space_are_refused_with_advice(method: AbstractMethod) -> None:
    with pytest.raises(InvalidInputError, match=r"needs stored feature rows.*EKFAC"):
        attributor().stream_scores(TRAIN, TARGETS, method=method)
    with pytest.raises(InvalidInputError, match=r"needs stored feature rows.*EKFAC"):
        Refine(method=method)


def test_other_invalid_input_is_refused() -> None:
    made = attributor()
    broken = TensorDataset(TRAIN.tensors[0].clone(), TRAIN.tensors[1])
    broken.tensors[0][17] = torch.nan

    with pytest.raises(NonFiniteError, match=r"17.*train data"):
        made.stream_scores(broken, TARGETS, method="GradDot")
    with pytest.raises(InvalidInputError, match="learning_rates has 3 numbers"):
        made.stream_scores(TRAIN, TARGETS, method=TracIn(learning_rates=(1, 2, 3)), checkpoints=STATES)
    with pytest.raises(InvalidInputError, match="checkpoints is empty"):
        made.stream_scores(TRAIN, TARGETS, checkpoints=[])
    for values in ({"k": 0}, {"max_bytes": -1}):
        with pytest.raises(InvalidInputError, match=next(iter(values))):
            made.stream_scores(TRAIN, TARGETS, method="GradDot", **values)


def test_the_model_is_as_it_was() -> None:
    made = attributor()
    made.model.train()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}

    made.stream_scores(TRAIN, TARGETS, checkpoints=STATES)

    assert made.model.training
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())


def test_a_second_question_in_memory_may_be_about_other_train_data() -> None:
    made, other = attributor(), labelled(N, 7)
    first = made.stream_scores(TRAIN, TARGETS, checkpoints=STATES).numpy()

    second = made.stream_scores(other, TARGETS, checkpoints=STATES).numpy()

    close(second, attributor().stream_scores(other, TARGETS, checkpoints=STATES).numpy(), rtol=1e-6)
    assert not np.allclose(first, second)
    close(made.stream_scores(TRAIN, TARGETS, checkpoints=STATES).numpy(), first, rtol=1e-6)
