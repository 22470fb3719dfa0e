"""Scores of unprojected gradients, streamed or of candidates, against loops of autograd and stored whole gradients."""

import logging
from functools import cache

import numpy as np
import pytest
import reference
import torch
from tiny_runs import Counting, labelled, random_states
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Normalization, Refine, Rows, clip
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


def streamed(method="GradDot", made=None, targets=TARGETS, **options):
    given = {"checkpoints": STATES, **({} if method is None else {"method": method}), **options}
    return (made or attributor()).stream_scores(TRAIN, targets, **given)


@cache
def whole(normalize):
    """Stores whole gradients in float32."""
    made = attributor(projector="none", layout="module", normalize=normalize)
    made.featurize(TRAIN, STATES)
    return made


@pytest.fixture(scope="module")
def expected():
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


def gradients(state, data):
    """Gradients ``(n, P)`` and q of every sample, one backward pass each, in float64."""
    net = model().double().eval()
    net.load_state_dict(state)
    inputs, labels = data.tensors
    logits = net(inputs.double())
    outputs, parameters = reference.margin(logits, labels), list(net.parameters())
    rows = [torch.autograd.grad(f, parameters, retain_graph=True) for f in outputs]
    flat = torch.stack([torch.cat([grad.flatten() for grad in row]) for row in rows])
    return flat.numpy(), reference.out_to_loss_grad(logits, labels)


@pytest.mark.quick
@pytest.mark.parametrize("q", ["inside", "outside", "off"])
def test_graddot_is_the_product_of_gradients_of_autograd(q):
    train, method = Rows(TRAIN, batch_size=7), GradDot(q=q)
    found = attributor().stream_scores(train, TARGETS, method=method, checkpoints=STATES)
    products, weights = [], []
    for state in STATES:
        (rows, out_to_loss), (targets, _) = gradients(state, TRAIN), gradients(state, TARGETS)
        products.append(rows @ targets.T * (out_to_loss[:, None] if q == "inside" else 1))
        weights.append(out_to_loss)
    expected = np.mean(products, 0) * (np.mean(weights, 0)[:, None] if q == "outside" else 1)
    close(found, expected)


@pytest.mark.quick
def test_equal_weights_are_one_checkpoint(made):
    given, method = [STATES[0], {name: one.clone() for name, one in STATES[0].items()}, STATES[1]], GradDot()
    found = made.stream_scores(TRAIN, TARGETS, method=method, checkpoints=given)
    refined = made.score(TARGETS, checkpoints=given, refine=Refine(candidates=N, method=method))
    alone = [streamed(method, checkpoints=[state]).numpy() for state in STATES]
    for scores in (found, refined):
        close(scores, np.mean(alone, 0))
        assert scores.settings["checkpoints"] == 2
    rates = TracIn(learning_rates=(0.1, 0.5))
    close(streamed(rates, checkpoints=given), 0.1 * alone[0] + 0.5 * alone[1])
    with pytest.raises(InvalidInputError, match="has 3 numbers, but 2 checkpoints"):
        streamed(TracIn(learning_rates=(0.1, 0.2, 0.3)), checkpoints=given)


METHODS = [
    (EKFAC(damping=0.1), {}),
    (EKFAC(damping=1.0, fisher="empirical", correct_eigenvalues=False, q="outside"), {}),
    (EKFAC(damping=0.5, checkpoint_weights=(1.0, -0.5)), {}),
    (TracIn(learning_rates=(0.1, 0.02)), {}),
    (GradDot(q="off"), {}),
    (GradCos(), {}),
    (GradCos(layout="joint", q="inside"), {}),
    *(
        (GradCos(layout="joint"), {"normalize": n})
        for n in (Normalization("unit", scope="module"), clip(0.5))
    ),
    *((m, {"normalize": clip(0.2, scope="module")}) for m in (GradCos(), GradCos(layout="joint"))),
    *((GradDot(), {"normalize": n}) for n in ("unit", clip(0.2, scope="module"), clip(0.5))),
    *((EKFAC(damping=0.3), {"normalize": n}) for n in ("unit", clip(0.2, scope="module"), clip(0.5))),
    (EKFAC(), {"proj_dim": 3, "dtype": "int8", "layout": "joint"}),  # which are settings of stored rows
]


@pytest.mark.parametrize(("method", "settings"), METHODS, ids=str)
def test_streamed_scores_are_those_of_stored_whole_gradients(method, settings):
    default = None if method == EKFAC() else method
    found = streamed(default, attributor(**settings), Rows(TARGETS, batch_size=2))
    close(found, whole(settings.get("normalize", "none")).score(TARGETS, method=method))
    refined = whole(settings.get("normalize", "none")).score(
        TARGETS, refine=Refine(candidates=N, method=method)
    )
    close(refined, found)
    assert found.method == method
    assert found.to_pandas().shape == (N, M)
    assert (found.stored, found.location, found.verdict) == (True, None, None)
    assert method.name in repr(found)
    assert found.manifest.fingerprint["task"]


def test_present_weights_that_the_store_does_not_have_are_a_warning():
    made = attributor()
    made.featurize(TRAIN, STATES)
    with pytest.warns(UserWarning, match=r"present weights of the model.* those of 2 checkpoint\(s\)"):
        streamed(made=made, checkpoints=None)
    streamed(made=made, checkpoints=[made.model.state_dict()])
    some = TensorDataset(*TRAIN[: N - 1])
    made.stream_scores(some, TARGETS, method="GradDot")  # rows that are not those of the store
    made.model.load_state_dict(STATES[1])
    streamed(made=made, checkpoints=None)


def test_no_warning_of_present_weights_whose_rows_are_unfinished_or_damaged(tmp_path):
    class Interrupted(TensorDataset):
        is_whole = True

        def __getitem__(self, index):
            if index == N - 1 and not self.is_whole:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    rows, path = Rows(Interrupted(*TRAIN[:]), batch_size=2, name="rows"), tmp_path / "a.zarr"
    made = attributor(path)
    made.featurize(rows, STATES[:1])
    rows.dataset.is_whole = False
    with pytest.raises(KeyboardInterrupt):
        made.featurize(rows)
    streamed(made=made, checkpoints=None)
    for file in path.rglob("ckpt-0/zarr.json"):
        file.write_text("{")
    streamed(made=attributor(path), checkpoints=None)


@pytest.mark.parametrize("max_bytes", [1, 3000])
def test_few_bytes_take_more_passes_and_give_the_same_scores(made, expected, max_bytes):
    """All rows are candidates too."""
    train = Counting(TRAIN)
    settings = {"method": METHOD, "checkpoints": iter(STATES), "max_bytes": max_bytes}
    found = attributor().stream_scores(train, TARGETS, **settings)
    assert len(train.loaded) > 4 * 2 * N  # two passes of the fit, and more than two of the products
    close(found, expected, rtol=1e-5)
    refined = made.score(TARGETS, refine=Refine(candidates=1000, method=METHOD, max_bytes=max_bytes))
    close(refined, expected)
    assert refined.top(N + 1).indices.shape == (M, N)


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


SPACE, PLAIN = r"needs stored feature rows.*EKFAC", GradDot(q="off")


@pytest.mark.parametrize(
    ("said", "call"),
    [
        *((SPACE, lambda m=m: streamed(m)) for m in (GaussNewton(), Fisher(), TRAK())),
        (SPACE, lambda: Refine(method=GaussNewton())),
        ("candidates", lambda: Refine(candidates=0)),
        ("do not support normalize='adam'", lambda: streamed(PLAIN, attributor(normalize="adam"))),
        *(
            ("support normalize='adam_update'", lambda m=m: streamed(m, attributor(normalize="adam_update")))
            for m in (PLAIN, GradDot())
        ),
        ("learning_rates has 3 numbers", lambda: streamed(TracIn(learning_rates=(1, 2, 3)))),
        ("checkpoints is empty", lambda: streamed(checkpoints=[])),
        ("k must", lambda: streamed(k=0)),
        ("max_bytes", lambda: streamed(max_bytes=-1)),
    ],
)
def test_what_cannot_be_streamed_is_refused(call, said):
    with pytest.raises(InvalidInputError, match=said):
        call()


def test_a_row_whose_gradient_is_not_finite_is_named():
    broken = TRAIN.tensors[0].clone()
    broken[17] = torch.nan
    for method in ("GradDot", "GradCos"):
        with pytest.raises(NonFiniteError, match=r"output of rows \[17\] of the train data is NaN"):
            attributor().stream_scores(TensorDataset(broken, TRAIN.tensors[1]), TARGETS, method=method)


def test_a_cosine_of_a_gradient_whose_norm_is_beyond_float32_names_the_norm():
    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    x[2] = 1e20
    data = TensorDataset(x, torch.ones(4, 1))
    made = Attributor(model, "regression", None, progress=False)
    with pytest.raises(NonFiniteError, match=r"norm of the gradient of rows \[2\] of the targets"):
        made.stream_scores(data, data, method="GradCos")


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
    with pytest.raises(StateError, match=r"not computed from stored rows.*Score without refine=\.$"):
        refined.self_influence()
    with pytest.raises(InvalidInputError, match="larger k"):
        refined.top(6)


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
