"""The Fisher kernel: its gram against one backward pass per drawn label, and how it is fitted, kept and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_product import matrices_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Normalization, Rows
from trak_lite._random import row_noise
from trak_lite.errors import (
    InvalidInputError,
    MissingStoreError,
    NonFiniteError,
    ReadOnlyStoreError,
    StateError,
    StoreError,
)
from trak_lite.featurizing import fisher
from trak_lite.featurizing import rows as pipeline
from trak_lite.featurizing.fisher import FisherFits
from trak_lite.gradient_computers import FunctionalGradientComputer
from trak_lite.methods import TRAK, Fisher, GaussNewton
from trak_lite.modelout_functions import ModelCall, MultiLabelModelOutput
from trak_lite.modelout_functions._sampling import LossModelOutput
from trak_lite.store import RemotePlace, ZarrFeatureStore, check_store

N, M, K, VOCABULARY, LENGTH = 7, 3, 4, 5, 4
LM = "causal_language_modeling"


class LanguageModel(nn.Module):
    """Says the next token from the sum of those before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 3)
        self.head = nn.Linear(3, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))


def model() -> nn.Module:
    return LanguageModel().double()


def tokens(count: int, seed: int) -> TensorDataset:
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 2] = -100
    return TensorDataset(ids, labels)


TRAIN, TARGETS = tokens(N, 0), tokens(M, 1)
LONGER = TensorDataset(*(torch.cat([part, part[:3]]) for part in TRAIN.tensors))


def states(count: int = 2) -> list[dict[str, Tensor]]:
    shapes = model().state_dict()  # which seeds
    return [{name: torch.randn_like(value) for name, value in shapes.items()} for _ in range(count)]


def attributor(path: Any = None, net: nn.Module | None = None, task: Any = LM, **changes: Any) -> Attributor:
    settings = {"proj_dim": K, "dtype": "float32", "progress": False, **changes}
    return Attributor(model() if net is None else net, task, path, **settings)


def grams(made: Attributor, model_id: int = 0, method: Fisher | None = None) -> list[np.ndarray]:
    method = made._settings.scored_by(method)
    assert isinstance(method, Fisher)
    with made._workspace.reading() as store:
        kept = FisherFits(store, method).grams(f"ckpt-{model_id}", made.layout, device=made.device)
        return [matrix.numpy() for matrix in kept]


def same(one: list[np.ndarray], other: list[np.ndarray], rtol: float = 1e-6) -> bool:
    return all(np.allclose(a, b, rtol=rtol, atol=rtol * a.max()) for a, b in zip(one, other, strict=True))


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that are fitted, in order."""
    fitted: list[str] = []
    fit = FisherFits.fit

    def noting(self: FisherFits, path: str, *given: Any, **named: Any) -> None:
        fitted.append(path)
        fit(self, path, *given, **named)

    monkeypatch.setattr(FisherFits, "fit", noting)
    return fitted


# ------------------------------------------------------------------------ the numbers


def draws_labels(computer: Any) -> bool:
    return isinstance(computer.modelout_fn, LossModelOutput)


def token_log_likelihood(net: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    log_p = net(ids[None])[0].log_softmax(-1)
    return sum(log_p[t - 1, y] for t, y in enumerate(labels.tolist()) if t > 0 and y != -100)


def label_log_likelihood(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    logits = net(inputs[None])[0]
    return sum(torch.log(torch.sigmoid(x if y else -x)) for x, y in zip(logits, labels.tolist(), strict=True))


def many_labels() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    return net, TensorDataset(torch.randn(N, 3, dtype=torch.float64), torch.randint(2, (N, 3)))


@pytest.mark.parametrize("task", [LM, "multilabel_classification"])
def test_the_kept_gram_is_that_of_one_backward_pass_per_drawn_label(task: str) -> None:
    net, data = (model(), TRAIN) if task == LM else many_labels()
    log_likelihood = token_log_likelihood if task == LM else label_log_likelihood
    made = attributor(net=net, task=task)
    made.featurize(Rows(data, batch_size=3))

    draws = 3  # of 7 rows are at least 4 samples for each of the 4 features of a module
    matrices = matrices_of(made.projector, made.parameters, 0)
    expected = np.zeros((2 * K, 2 * K))
    for draw in range(draws):
        noise = row_noise(np.arange(N), seed=0, draw=draw)
        *_, labels = made.task.sample_labels(ModelCall(net), data.tensors, noise)
        for inputs, label in zip(data.tensors[0], labels, strict=True):
            grads = torch.autograd.grad(log_likelihood(net, inputs, label), list(net.parameters()))
            row = sum(
                grad.reshape(-1).numpy() @ matrices[name]
                for name, grad in zip(made.parameters, grads, strict=True)
            )
            expected += np.outer(row, row) / draws
    assert made.method == Fisher()
    assert same([expected[:K, :K], expected[K:, K:]], grams(made))


def test_the_gram_is_in_expectation_the_gauss_newton_matrix() -> None:
    """Entries are within 4.5 of their own standard errors, which the enumerated labels give."""
    torch.manual_seed(3)
    net, repeats, draws, width = nn.Linear(3, 4).double(), 400, 3, 3
    inputs = torch.randn(5, 3, dtype=torch.float64)
    data = TensorDataset(inputs.repeat(repeats, 1), torch.zeros(5 * repeats, dtype=torch.int64))
    made = attributor(net=net, task="image_classification", method=GaussNewton(), proj_dim=width)
    made.featurize(Rows(data, batch_size=1000))
    method = Fisher(samples_per_feature=5 * repeats * draws // width)
    made.score(TensorDataset(inputs, torch.arange(5) % 4), method=method)

    matrices = matrices_of(made.projector, made.parameters, 0)
    mean, square = np.zeros((2, width, width))
    for x in inputs:
        log_p = net(x[None])[0].log_softmax(-1)
        squares = []
        for y in range(4):  # every label there is
            grads = torch.autograd.grad(log_p[y], list(net.parameters()), retain_graph=True)
            row = sum(g.reshape(-1).numpy() @ m for g, m in zip(grads, matrices.values(), strict=True))
            squares.append(np.outer(row, row))
        p = log_p.detach().exp().numpy()
        mean += np.einsum("y,yab->ab", p, squares)
        square += np.einsum("y,yab->ab", p, (squares - np.einsum("y,yab->ab", p, squares)) ** 2)
    (found,) = grams(made, method=method)
    z = (found - repeats * mean) / np.sqrt(repeats * square / draws)
    assert np.abs(z).max() < 4.5
    assert np.linalg.norm(found - repeats * mean) < 0.1 * np.linalg.norm(repeats * mean)


def test_scores_are_those_of_a_dense_solve_with_a_share_of_the_trace(tmp_path: Path) -> None:
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN, states())

    scores = made.score(TARGETS, "test").numpy()

    expected = np.zeros((N, M))
    with ZarrFeatureStore.open(tmp_path / "a.zarr") as store:
        for c in range(2):
            train = store.open_table(f"ckpt-{c}")
            rows, q = train.read("features").astype(float), train.read("out_to_loss").astype(float)
            targets = store.open_table(f"targets/test/ckpt-{c}").read("features").astype(float)
            for start, gram in zip((0, K), grams(made, c), strict=True):
                gram = gram.astype(float)
                eigenvalues = np.linalg.eigvalsh(gram)
                damped = gram + 0.02 * np.sqrt(np.mean(eigenvalues**2)) * np.eye(K)
                own = slice(start, start + K)
                expected += q[:, None] * (rows[:, own] @ np.linalg.solve(damped, targets[:, own].T)) / 2
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_the_gram_does_not_depend_on_the_batch_size() -> None:
    found = []
    for batch_size in (1, 3, N):
        made = attributor()
        made.featurize(Rows(TRAIN, batch_size=batch_size))
        found.append(grams(made))

    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_rows_that_are_far_apart_come_in_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    compute = pipeline.compute_features

    def noting(computer: Any, *given: Any, rows: np.ndarray, **named: Any) -> Any:
        if draws_labels(computer):
            sizes.append(len(rows))
        return compute(computer, *given, rows=rows, **named)

    monkeypatch.setattr(pipeline, "compute_features", noting)

    attributor().featurize(Rows(tokens(100, 2), batch_size=6))

    assert sizes == [6, 6, 4], "4 * K of 100 rows"


# ------------------------------------------------------------------------ what is kept


def test_a_checkpoint_that_is_fitted_is_not_fitted_again(tmp_path: Path, fits: list[str]) -> None:
    one, two = states()
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN, [one])
    made.featurize(TRAIN, [one, two])
    assert fits == ["ckpt-0", "ckpt-1"]

    attributor(tmp_path / "a.zarr").featurize(TRAIN, [one, two])
    made.score(TARGETS)
    made.score(TARGETS, method=Fisher(damping=0.5))

    assert fits == ["ckpt-0", "ckpt-1"]


def test_a_fit_that_was_killed_is_made_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: list[str]
) -> None:
    whole = attributor(tmp_path / "whole.zarr")
    whole.featurize(TRAIN)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fisher, "_gram_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            attributor(tmp_path / "a.zarr").featurize(TRAIN)
    made = attributor(tmp_path / "a.zarr")
    with pytest.raises(StateError, match=r"of ckpt-0 is not fitted with"):
        grams(made)
    with pytest.raises(StateError, match=r"Fisher has to be fitted .* Call featurize\(train_data"):
        made.score(TARGETS)
    again = made.featurize(TRAIN)

    assert (again.rows_written, again.rows_found) == (0, N)
    assert fits == ["ckpt-0"] * 3
    for one, other in zip(grams(made), grams(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_fit_was_made_of_is_named_and_dropped_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: list[str]
) -> None:
    """Killed between the last row of the gram matrices and the dropping of the samples."""
    path = tmp_path / "a.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(FisherFits, "sweep", lambda *_: None)
        attributor(path).featurize(TRAIN)
    (left,) = (name for name in ZarrFeatureStore.open(path).table_names() if name.endswith("/drawn"))
    report = check_store(path)
    assert report.ok
    assert [(finding.level, finding.table) for finding in report.findings] == [("note", left)]
    assert "left over" in report.findings[0].finding

    attributor(path).featurize(TRAIN)

    assert left not in ZarrFeatureStore.open(path).table_names()
    assert check_store(path).findings == ()
    assert fits == ["ckpt-0"]


def test_a_fit_that_others_complete_at_this_moment_is_not_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.zarr"
    made = attributor(path)
    made.featurize(TRAIN)
    with ZarrFeatureStore.open(path, mode="r+") as store:
        (gram,) = store.table_names("fisher")
        held, names = FisherFits(store, Fisher()), ZarrFeatureStore.table_names

        def before_it_was_dropped(self: ZarrFeatureStore, prefix: str = "") -> list[str]:
            found = names(self, prefix)
            return [*found, gram.replace("gram", "drawn")] if prefix.startswith("fisher/") else found

        monkeypatch.setattr(ZarrFeatureStore, "table_names", before_it_was_dropped)
        has = iter([False, True, False, False])
        monkeypatch.setattr(FisherFits, "has", lambda *_: next(has))
        assert not held.is_left_alone("ckpt-0", made.layout)
        with pytest.raises(MissingStoreError):
            held.is_left_alone("ckpt-0", made.layout)


def test_a_reopened_store_scores_without_the_train_data(tmp_path: Path, fits: list[str]) -> None:
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN)
    expected = made.score(TARGETS, "test").numpy()

    opened = Attributor.open(tmp_path / "a.zarr", model())

    assert opened.method == made.method
    np.testing.assert_array_equal(opened.scores("test").numpy(), expected)
    np.testing.assert_array_equal(opened.score(TARGETS, "again").numpy(), expected)
    streamed = opened.score(TARGETS, "third", dense=False)
    np.testing.assert_allclose(streamed.numpy(), expected, rtol=1e-6)
    assert fits == ["ckpt-0"]


def test_appended_rows_are_fitted_anew(tmp_path: Path) -> None:
    made, fresh = attributor(tmp_path / "a.zarr"), attributor(None)
    made.featurize(TRAIN)
    shorter = grams(made)

    made.featurize(LONGER, append=True)
    fresh.featurize(LONGER)

    assert same(grams(made), grams(fresh))
    assert not same(grams(made), shorter)


def test_fits_with_several_settings_are_kept_side_by_side(tmp_path: Path, fits: list[str]) -> None:
    one, two = states()
    made, other = attributor(tmp_path / "a.zarr"), Fisher(seed=1)
    made.featurize(TRAIN, [one])
    first, before = made.score(TARGETS, "test").numpy(), grams(made)

    second = made.score(TARGETS, "test", method=other).numpy()
    made.featurize(TRAIN, [two])
    made.score(TARGETS, "two", method=other, checkpoints=[two])

    assert fits == ["ckpt-0", "ckpt-0", "ckpt-1", "ckpt-1"]
    assert not same(grams(made, method=other), before)
    assert not np.allclose(first, second)
    for found, expected in zip(grams(made), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(made.score(TARGETS, "test", checkpoints=[one]).numpy(), first)
    np.testing.assert_array_equal(made.scores("test", method=other).numpy(), second)
    assert len(fits) == 4


def test_it_reads_the_rows_of_another_method_and_is_fitted_by_score(fits: list[str]) -> None:
    expected = attributor()
    expected.featurize(TRAIN, states())
    made = attributor(method=TRAK(damping=None, layout="stored"))
    made.featurize(TRAIN, states())
    assert len(fits) == 2

    found = made.score(TARGETS, method="Fisher").numpy()

    assert len(fits) == 4
    np.testing.assert_array_equal(found, expected.score(TARGETS).numpy())
    path = made.scores(method="Fisher", dense=False).damping_path([None, 1.0]).numpy()
    np.testing.assert_allclose(path[0], found, rtol=1e-3, atol=1e-5 * np.abs(found).max())


def test_a_number_that_is_given_again_does_not_bring_an_old_gram_back(tmp_path: Path) -> None:
    one, two = states()
    made, fresh = attributor(tmp_path / "a.zarr"), attributor(None)
    made.featurize(TRAIN, [one])
    made.drop_checkpoint("ckpt-0")

    made.featurize(TRAIN, [two])
    fresh.featurize(TRAIN, [two])

    assert same(grams(made), grams(fresh))


def test_every_machine_finds_it_in_an_object_store(tmp_path: Path, fits: list[str]) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    url = f"memory://{tmp_path.name}/fisher.zarr"
    local = attributor(None)
    here, there = (attributor(RemotePlace(url, staging=tmp_path / name)) for name in ("here", "there"))
    for made in (local, here):
        made.featurize(TRAIN)
    expected = local.score(TARGETS).numpy()

    assert fits == ["ckpt-0"] * 2
    np.testing.assert_array_equal(here.score(TARGETS).numpy(), expected)
    assert there.featurize(TRAIN).rows_written == 0
    np.testing.assert_array_equal(there.score(TARGETS, "there").numpy(), expected)
    assert fits == ["ckpt-0"] * 2


# ------------------------------------------------------------------------ what is refused


class NormalisingComputer(FunctionalGradientComputer):
    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), **Normalization("unit").fingerprint()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"task": lambda model_call, batch: model_call(batch[0]).sum((1, 2))},
            "does not define their distribution",
        ),
        ({"normalize": "unit"}, "The rows are normalised, and Fisher needs gradients that are not"),
        (
            {"gradient_computer": NormalisingComputer},
            "The rows are normalised, and Fisher needs gradients that are not",
        ),
    ],
    ids=["no-labels", "normalised", "normalised-by-the-computer"],
)
def test_what_labels_cannot_be_drawn_for_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        attributor(method="Fisher", **changes)
    made = attributor(**changes)
    made.featurize(TRAIN)
    with pytest.raises(InvalidInputError, match=said):
        made.score(TARGETS, method="Fisher")


def test_normalised_rows_take_the_next_best_kernel() -> None:
    assert attributor(normalize="unit").method == TRAK(damping=None, layout="stored")
    margin = MultiLabelModelOutput(output="margin")
    assert attributor(net=many_labels()[0], task=margin, normalize="unit").method == GaussNewton()


def test_one_kernel_for_rows_of_several_segments_is_refused() -> None:
    made = attributor()
    made.featurize(TRAIN)

    with pytest.raises(InvalidInputError, match=r"Unknown fields of Fisher: \['layout'\]"):
        made.score(TARGETS, method={"name": "Fisher", "layout": "joint"})


def test_a_gradient_that_is_not_finite_is_refused_and_its_row_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = pipeline.compute_features

    def overflowing(computer: Any, *given: Any, rows: np.ndarray, **named: Any) -> Any:
        features, terms = compute(computer, *given, rows=rows, **named)
        if draws_labels(computer):
            features[rows == 4] = torch.inf
        return features, terms

    monkeypatch.setattr(pipeline, "compute_features", overflowing)

    with pytest.raises(NonFiniteError, match=r"rows \[4, 4, 4\] of the train data"):
        attributor().featurize(TRAIN)


def test_no_samples_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="samples_per_feature"):
        Fisher(samples_per_feature=0)


def test_a_store_that_cannot_be_written_is_refused_before_a_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = attributor(tmp_path / "a.zarr"), attributor(tmp_path / "a.zarr", method=Fisher(seed=1))
    made.featurize(TRAIN)
    made.score(TARGETS, "test")
    monkeypatch.setattr(ZarrFeatureStore, "writable", property(lambda _: False))
    monkeypatch.setattr(FisherFits, "_lazy_table", lambda *_, **__: pytest.fail("a table of drawn labels"))

    with pytest.raises(ReadOnlyStoreError, match="open for reading only, and a fit must be stored"):
        made.score(TARGETS, "test", method=Fisher(seed=1))
    monkeypatch.setattr(pipeline, "compute_features", lambda *_, **__: pytest.fail("a gradient"))
    with pytest.raises(ReadOnlyStoreError, match="open for reading only, and a fit must be stored"):
        other.featurize(TRAIN)


def test_a_fit_that_others_complete_meanwhile_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: list[str]
) -> None:
    """The process that completes the matrices drops the table they are made of, from under others too."""
    method = Fisher(samples_per_feature=6, seed=3)
    expected = attributor(None, method=method)
    expected.featurize(TRAIN)
    made = attributor(tmp_path / "a.zarr", method=TRAK(damping=None, layout="stored"))
    made.featurize(TRAIN)
    fill = fisher.featurize_rows

    def completed(*given: Any, **named: Any) -> int:
        monkeypatch.setattr(fisher, "featurize_rows", fill)
        attributor(tmp_path / "a.zarr", method=method).featurize(TRAIN)
        raise StoreError("Listing drawn/features failed: No such file or directory.")

    monkeypatch.setattr(fisher, "featurize_rows", completed)
    found = made.score(TARGETS, method=method).numpy()

    np.testing.assert_array_equal(found, expected.score(TARGETS).numpy())
    assert fits == ["ckpt-0"] * 3

    def failed(*given: Any, **named: Any) -> int:
        raise StoreError("Listing drawn/features failed: No such file or directory.")

    monkeypatch.setattr(fisher, "featurize_rows", failed)
    with pytest.raises(StoreError, match="No such file"):
        made.score(TARGETS, method=Fisher(seed=4))
