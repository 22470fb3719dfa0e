"""Scores of unprojected gradients, streamed or of candidates, against loops of autograd and stored whole gradients."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import Counting, labelled, random_states
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Refine, Rows, clip
from trak_lite.errors import InvalidInputError, ManifestMismatchError, NonFiniteError, StateError
from trak_lite.methods import CG, EKFAC, TRAK, Fisher, GaussNewton, GradCos, GradDot, TracIn

N, M = 30, 5  # one batch
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
METHOD = EKFAC(damping=0.2)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


STATES = random_states(model)


def attributor(path=None, **changes):
    settings = {"proj_dim": 16, "dtype": "float32", "progress": False, **changes}
    return Attributor(model(), "image_classification", path, **settings)


def streamed(method="GradDot", made=None, **options):
    options = {"checkpoints": STATES, **options}
    return (made or attributor()).stream_scores(TRAIN, TARGETS, method=method, **options)


@pytest.fixture(scope="module")
def whole():
    """Stores whole gradients in float32."""
    made = attributor(projector="none", layout="module")
    made.featurize(TRAIN, STATES)
    return made


@pytest.fixture(scope="module")
def expected():
    """Unprojected scores of all rows by EK-FAC."""
    return streamed(METHOD)


@pytest.fixture(scope="module")
def made():
    """Featurized with few columns, to find candidates."""
    made = attributor(proj_dim=8)
    made.featurize(TRAIN, STATES)
    return made


def close(found, expected, rtol=1e-4):
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=rtol, atol=1e-5 * np.abs(expected).max())


def margin(net, inputs, label):
    """f and q of one sample."""
    logits = net(inputs[None])[0]
    others = torch.cat([logits[:label], logits[label + 1 :]])
    return logits[label] - others.logsumexp(0), 1 - logits.softmax(0)[label].item()


def gradients(state, data):
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
def test_graddot_is_the_product_of_gradients_of_autograd(q):
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
def test_streamed_scores_are_those_of_stored_whole_gradients(whole, method):
    targets = Rows(TARGETS, batch_size=2)

    found = attributor().stream_scores(TRAIN, targets, method=method, checkpoints=STATES)

    close(found, whole.score(TARGETS, method=method))
    assert found.method == method


@pytest.mark.parametrize("normalize", ["unit", clip(0.2, scope="module"), clip(0.5)], ids=str)
def test_normalisation_is_that_of_stored_rows(normalize):
    stored = attributor(projector="none", normalize=normalize)
    stored.featurize(TRAIN, STATES)
    for method in (GradDot(), EKFAC(damping=0.3)):
        close(streamed(method, attributor(normalize=normalize)), stored.score(TARGETS, method=method))


class Words(nn.Module):
    """A tied embedding, so that blocks are lookups, factors and sums of both."""

    def __init__(self, tied):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.table(ids))))


@pytest.mark.parametrize("tied", [False, True])
def test_language_models_with_lookups_and_tied_weights(tied):
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


def test_the_default_is_ekfac_and_the_settings_of_rows_have_no_effect():
    default = attributor().stream_scores(TRAIN, TARGETS)

    assert default.method == EKFAC()
    other = attributor(proj_dim=3, dtype="int8", layout="joint").stream_scores(TRAIN, TARGETS, method=EKFAC())
    np.testing.assert_array_equal(np.asarray(default), np.asarray(other))


@pytest.mark.parametrize("max_bytes", [1, 3000])
def test_few_bytes_take_more_passes_and_give_the_same_scores(expected, max_bytes):
    train = Counting(TRAIN)

    found = attributor().stream_scores(
        train, TARGETS, method=METHOD, checkpoints=iter(STATES), max_bytes=max_bytes
    )

    assert len(train.loaded) > 4 * 2 * N  # two passes of the fit, and more than two of the products
    close(found, expected, rtol=1e-5)


def test_the_k_strongest_rows_are_those_of_all_scores():
    scores, few = streamed(), streamed(k=4)

    for sign in ("helpful", "harmful"):
        for count in (1, 4):
            one, other = few.top(count, sign=sign), scores.top(count, sign=sign)
            np.testing.assert_array_equal(one.indices, other.indices)
            close(one.scores, other.scores)
        one, other = (found.top(3, target=2, sign=sign) for found in (few, scores))
        np.testing.assert_array_equal(one.indices, other.indices)
    known = ~np.isnan(few.numpy())
    assert (known.sum(0) == 8).all()
    close(few.numpy()[known], scores.numpy()[known])
    np.testing.assert_array_equal(few.rows([3, 0]), few.numpy()[[3, 0]])
    assert few.shape == scores.shape == (N, M)
    with pytest.raises(InvalidInputError, match=r"hold the 4 most helpful .* top\(5\)"):
        few.top(5)
    assert streamed(k=1000).top(2000).indices.shape == (M, N)


def test_the_result_is_a_scores_object_that_says_what_it_lacks():
    scores = streamed(EKFAC(damping=0.1))

    assert scores.to_pandas().shape == (N, M)
    assert scores.stored
    assert (scores.location, scores.verdict) == (None, None)
    assert "EKFAC" in repr(scores)
    assert scores.manifest.fingerprint["task"]
    for call in (
        lambda: scores.self_influence(),
        lambda: scores.reliability(),
        lambda: scores.damping_path([1.0]),
        lambda: scores.run,
    ):
        with pytest.raises(StateError, match="not computed from stored rows"):
            call()


def test_only_the_fit_is_stored_and_found_again(tmp_path):
    path = tmp_path / "store"
    streamed(made=attributor(path))
    assert not path.exists()
    train, again = Counting(TRAIN), Counting(TRAIN)
    first = attributor(path).stream_scores(Rows(train, name="train"), TARGETS, method="EKFAC")

    made = attributor(path)
    second = made.stream_scores(Rows(again, name="train"), TARGETS, method=EKFAC())

    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))
    assert len(again.loaded) <= len(train.loaded) - 2 * N + 8  # without the two passes of the fit
    made.featurize(Rows(again, name="train"))
    assert made.score(TARGETS, method="EKFAC").shape == (N, M)  # with the same fit
    with pytest.raises(ManifestMismatchError, match="dataset"):
        made.stream_scores(labelled(N, 7), TARGETS, method="EKFAC")
    assert made.stream_scores(labelled(7, 7), TARGETS, method="GradDot").shape == (7, M)


def without_row_17():
    broken = TRAIN.tensors[0].clone()
    broken[17] = torch.nan
    return TensorDataset(broken, TRAIN.tensors[1])


SPACE = r"needs stored feature rows.*EKFAC"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        *((lambda m=m: streamed(m), InvalidInputError, SPACE) for m in (GaussNewton(), Fisher(), TRAK())),
        (lambda: Refine(method=GaussNewton()), InvalidInputError, SPACE),
        (lambda: Refine(candidates=0), InvalidInputError, "candidates"),
        *(
            (
                lambda n=n: streamed(GradDot(q="off"), attributor(normalize=n)),
                InvalidInputError,
                f"do not support normalize='{n}'",
            )
            for n in ("adam", "adam_update")
        ),
        (
            lambda: attributor().stream_scores(without_row_17(), TARGETS, method="GradDot"),
            NonFiniteError,
            r"17.*train data",
        ),
        (
            lambda: streamed(TracIn(learning_rates=(1, 2, 3))),
            InvalidInputError,
            "learning_rates has 3 numbers",
        ),
        (lambda: streamed(checkpoints=[]), InvalidInputError, "checkpoints is empty"),
        (lambda: streamed(k=0), InvalidInputError, "k must"),
        (lambda: streamed(max_bytes=-1), InvalidInputError, "max_bytes"),
    ],
)
def test_what_cannot_be_streamed_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_the_model_is_as_it_was():
    made = attributor()
    made.model.train()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}

    streamed("EKFAC", made)

    assert made.model.training
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())


def test_a_second_question_in_memory_may_be_about_other_train_data(expected):
    made, other = attributor(), labelled(N, 7)
    streamed(METHOD, made)

    second = made.stream_scores(other, TARGETS, checkpoints=STATES, method=METHOD).numpy()

    fresh = attributor().stream_scores(other, TARGETS, checkpoints=STATES, method=METHOD)
    close(second, fresh, rtol=1e-6)
    assert not np.allclose(expected, second)
    close(streamed(METHOD, made), expected, rtol=1e-6)


@pytest.mark.quick
def test_candidates_have_their_unprojected_scores_and_the_others_none(made, expected):
    coarse = made.score(TARGETS, dense=False)

    refined = made.score(TARGETS, refine=Refine(candidates=5, method=METHOD))

    exact, found = expected.numpy(), refined.numpy()
    known = ~np.isnan(found)
    np.testing.assert_allclose(found[known], exact[known], rtol=1e-4, atol=1e-5 * abs(exact).max())
    for sign in ("helpful", "harmful"):
        for target, rows in enumerate(coarse.top(5, sign=sign).indices):
            assert known[rows, target].all()
    assert (known.sum(0) == 10).all()
    for target in range(M):
        order = np.argsort(-np.where(known, exact, -np.inf)[:, target])
        np.testing.assert_array_equal(refined.top(5, target=target).indices, order[:5])
    assert refined.method == METHOD
    assert refined.settings["candidates"] == 5
    with pytest.raises(InvalidInputError, match="larger k"):
        refined.top(6)


@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
def test_all_rows_as_candidates_give_all_unprojected_scores(made, expected, max_bytes):
    refined = made.score(TARGETS, refine=Refine(candidates=1000, method=METHOD, max_bytes=max_bytes))

    close(refined.numpy(), expected)
    assert refined.top(N + 1).indices.shape == (M, N)


def test_only_the_candidates_are_loaded_and_the_change_is_reported(caplog):
    train = Counting(TRAIN)
    made = attributor()
    made.featurize(Rows(train, batch_size=4, name="train"))
    coarse = made.score(TARGETS, dense=False)
    ends = [coarse.top(3, sign=sign).indices for sign in ("helpful", "harmful")]
    train.loaded.clear()

    with caplog.at_level(logging.INFO, "trak_lite"):
        refined = made.score(TARGETS, refine=Refine(candidates=3, method={"name": "GradDot"}))

    assert set(train.loaded) <= set(np.concatenate(ends, 1).flatten()) | set(range(8)), "and a few compared"
    pairs = zip(refined.top(3).indices, ends[0], strict=True)
    overlap = np.mean([len(set(a) & set(b)) / 3 for a, b in pairs])
    assert refined.settings["top3_overlap"] == pytest.approx(overlap, abs=1e-3)
    share = len(np.unique(np.concatenate(ends, 1))) / N
    assert refined.settings["train_passes"] == pytest.approx(share, abs=1e-3)
    assert "most helpful rows before and after agree" in caplog.text
    with pytest.raises(StateError):
        made.scores()  # the scores that found the candidates were not stored
    with pytest.raises(InvalidInputError, match="Leave k out"):
        made.score(TARGETS, k=3, dense=False, refine=Refine())


def test_a_process_without_the_train_data_is_refused_with_advice(tmp_path):
    attributor(tmp_path / "store").featurize(TRAIN)
    again = Attributor.open(tmp_path / "store", model())

    with pytest.raises(StateError, match=r"refine computes gradients.*Call featurize\(train_data"):
        again.score(TARGETS, refine=Refine(candidates=3, method="GradDot"))

    assert again.featurize(TRAIN).rows_written == 0
    assert again.score(TARGETS, refine=Refine(candidates=3, method="GradDot")).shape == (N, M)


def test_fewer_candidates_after_more_are_fewer(made):
    """The store caches the larger result."""
    many = made.score(TARGETS, refine=Refine(candidates=8, method=GradDot()))

    few = made.score(TARGETS, refine=Refine(candidates=2, method=GradDot()))

    assert (np.isfinite(many.numpy()).sum(0) > 8).all()
    assert (np.isfinite(few.numpy()).sum(0) == 4).all()
    assert few.top(2).indices.shape == (M, 2)
    assert few._repr_html_()  # shows at most the rows that are known


def test_convergence_is_in_the_order_of_the_checkpoints(made):
    method = CG(tolerance=0.03)
    reverse = [*STATES][::-1]

    refined = made.score(TARGETS, "reverse", checkpoints=reverse, refine=Refine(candidates=3, method=method))
    others = streamed(method, checkpoints=reverse)

    assert len(refined.convergence) == len(STATES)
    for one, other in zip(refined.convergence, others.convergence, strict=True):
        np.testing.assert_array_equal(one.iterations, other.iterations)
