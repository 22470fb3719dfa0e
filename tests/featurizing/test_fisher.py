"""The Fisher kernel by one backward pass per drawn label; how its fit and that of EK-FAC are kept and refused."""

import numpy as np
import pytest
import torch
from dense_cases import close, columns, gradients, projection, recording
from tiny_runs import Counting, LanguageModel
from torch import nn
from torch.nn.functional import logsigmoid
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Normalization, Rows, errors
from trak_lite.featurizing import fisher
from trak_lite.gradient_computers import FunctionalGradientComputer
from trak_lite.methods import EKFAC, TRAK, Fisher, GaussNewton
from trak_lite.modelout_functions import ImageClassificationModelOutput, MultiLabelModelOutput
from trak_lite.store import RemotePlace, ZarrFeatureStore, check_store

N, M, K, VOCABULARY, LENGTH = 7, 3, 4, 5, 4
LM, MULTI = "causal_language_modeling", "multilabel_classification"


def tokens(count, seed):
    ids = torch.randint(VOCABULARY - 1, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 2] = -100
    return TensorDataset(ids, labels)


def model():
    return LanguageModel(VOCABULARY, 3).double()


def several_labels():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()


TRAIN, TARGETS = tokens(N, 0), tokens(M, 1)
LONGER = TensorDataset(*(torch.cat([part, part[:3]]) for part in TRAIN.tensors))


def states(build=model):
    shapes = build().state_dict()  # which seeds
    return [{name: torch.randn_like(value) for name, value in shapes.items()} for _ in range(2)]


def attributor(path=None, net=None, task=LM, **changes):
    settings = {"proj_dim": K, "dtype": "float32", "progress": False, **changes}
    return Attributor(model() if net is None else net, task, path, **settings)


def scored(made, **settings):
    return made.score(TARGETS, **settings).numpy()


@pytest.fixture
def lm(monkeypatch):
    """A task, and one batch of drawn labels per fit."""
    return recording(LM, monkeypatch)


def token_log_likelihood(logits, labels):
    log_p = logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:, None].clamp(min=0))[:, :, 0]
    return torch.where(labels[:, 1:] == -100, 0, log_p).sum(1)


def label_log_likelihood(logits, labels):
    return logsigmoid(torch.where(labels > 0, logits, -logits)).sum(1)


@pytest.mark.parametrize(
    ("task", "batch_size", "damping"),
    [(LM, 3, None), (LM, N, 0.5), pytest.param(MULTI, 1, None, marks=pytest.mark.quick)],
)
def test_scores_are_those_of_the_gram_of_drawn_labels(task, batch_size, damping, tmp_path, monkeypatch):
    """Without a damping, lambda is a share of the root mean square of the eigenvalues."""
    build, log_likelihood, train, targets = model, token_log_likelihood, TRAIN, TARGETS
    if task == MULTI:
        build, log_likelihood = several_labels, label_log_likelihood
        pairs = [(torch.randn(n, 3, dtype=torch.float64), torch.randint(2, (n, 3))) for n in (N, M)]
        train, targets = (TensorDataset(*pair) for pair in pairs)
    known, drawn = recording(task, monkeypatch)
    method = Fisher() if damping is None else Fisher(damping=damping)
    made = attributor(tmp_path / "a.zarr", build(), known, method=method)
    own = states(build)
    made.featurize(Rows(train, batch_size=batch_size), own)
    found = made.score(targets, "t").numpy()

    net, products, q = build(), np.zeros((N, M)), np.zeros((N, 1))
    draws = 3  # of 7 rows are 4 samples for each of 4 features of a module
    calls = len(drawn) // 2
    for model_id, state in enumerate(own):
        net.load_state_dict(state)
        inputs, labels = (torch.cat(part) for part in zip(*drawn[model_id * calls :][:calls], strict=True))
        assert torch.equal(inputs, torch.cat([train.tensors[0]] * draws))
        grads = gradients(net, log_likelihood(net(inputs), labels))
        matrices = projection(made.projector, made.parameters, model_id)
        samples = sum(grad.reshape(draws * N, -1) @ matrices[name] for name, grad in grads.items())
        rows = columns(tmp_path / "a.zarr", f"ckpt-{model_id}")
        features = columns(tmp_path / "a.zarr", f"targets/t/ckpt-{model_id}")["features"].astype(float)
        for segment in made.layout.segments:
            part = slice(segment.start, segment.stop)
            gram = samples[:, part].T @ samples[:, part] / draws
            unit = 0.02 * np.sqrt(np.mean(np.linalg.eigvalsh(gram) ** 2))
            lam = unit if damping is None else damping * np.trace(gram) / len(gram)
            solved = np.linalg.solve(gram + lam * np.eye(len(gram)), features[:, part].T)
            products += rows["features"][:, part].astype(float) @ solved / 2
        q += rows["out_to_loss"][:, None] / 2
    assert len(made.layout.segments) == 2
    close(found, q * products)


def test_labels_come_as_often_as_the_model_says_and_anew_in_every_draw(monkeypatch):
    torch.manual_seed(3)
    net, task, count, draws = nn.Linear(3, 3), "image_classification", 1500, 3
    known, drawn = recording(task, monkeypatch)
    inputs = torch.randn(1, 3).expand(count, 3)
    made = attributor(None, net, known, proj_dim=3, method=Fisher(samples_per_feature=count * draws // 3))
    made.featurize(Rows(TensorDataset(inputs, torch.zeros(count, dtype=torch.int64)), batch_size=count))
    p = net(inputs[:1]).softmax(1).detach()[0]
    labels = torch.cat([one[1] for one in drawn]).reshape(draws, count)
    shares = torch.stack([(labels == label).float().mean(1) for label in range(3)], 1)
    assert float(((shares - p) / (p * (1 - p) / count).sqrt()).abs().max()) < 4.5, (shares, p)
    together = torch.corrcoef(labels.double())
    assert float((together - torch.eye(draws)).abs().max()) < 4.5 / count**0.5, together


def test_rows_that_are_far_apart_come_in_whole_batches(lm):
    attributor(task=lm[0]).featurize(Rows(tokens(100, 2), batch_size=6))
    assert [len(batch[0]) for batch in lm[1]] == [6, 6, 4], "4 * K of 100 rows"


def test_a_chunk_has_all_draws_of_its_rows_and_batches_end_where_a_group_of_rows_does():
    for num_rows, draws, width, at_once, chunk_rows in (
        (600, 14, 21_000, 30, 420),
        (601, 14, 21_000, 32, 448),
        (8192, 1, 21_000, 32, 256),
        (600, 14, 400_000, 3, 42),
    ):
        spec, size = fisher.drawn_spec(num_rows, draws, width, {})
        assert (spec.num_rows, spec.chunk_rows, size) == (num_rows * draws, chunk_rows, at_once)
    cases = [(50, 14, 30), (256, 14, 32), (256, 13, 32), (100, 13, 32), (16, 14, 32), (8, 1, 4)]
    assert [fisher.drawn_batch_size(*case) for case in cases] == [30, 224, 256, 32, 16, 4]


@pytest.mark.parametrize(
    ("batch_size", "passes", "loaded"), [(3, 32, 96), (12, 4, 60), (24, 4, 96), (40, 4, 96)]
)
def test_all_labels_of_a_text_are_drawn_from_one_pass_of_the_model(
    batch_size, passes, loaded, lm, monkeypatch
):
    """48 rows are four groups of 12, each with two draws; the batch that creates the table is a round of its own."""
    monkeypatch.setattr(fisher, "_ROWS_AT_ONCE", 12)
    net, texts, drawing = model(), Counting(tokens(48, 2)), []
    net.register_forward_hook(lambda *_: drawing.append(not torch.is_grad_enabled()))
    made = attributor(net=net, task=lm[0], method=Fisher(samples_per_feature=24))
    made.featurize(Rows(texts, name="texts", batch_size=batch_size))
    tried = min(batch_size, 8)  # before the first pass
    assert (sum(drawing), len(texts.loaded) - 48 - tried) == (passes, loaded)


@pytest.mark.parametrize(("kind", "draws"), [(Fisher, (1, 2, 3, 4)), (EKFAC, (3, 9, 12, 16))])
def test_a_checkpoint_that_is_fitted_is_not_fitted_again(kind, draws, tmp_path, lm):
    """Other settings of the fit share neither targets nor scores. Reopened stores: tests/scoring/test_views.py.

    EK-FAC draws labels three times for a fit, and once when it compares one with the present model.
    """
    (one, two), (task, drawn) = states(), lm
    made, other = attributor(tmp_path / "a.zarr", task=task, method=kind()), kind(seed=1)
    made.featurize(TRAIN, [one])
    first = scored(made, name="test")
    assert len(drawn) == draws[0]
    made.featurize(TRAIN, [one, two])
    attributor(tmp_path / "a.zarr", task=task, method=kind()).featurize(TRAIN, [one, two])
    both, damped = (scored(made, method=method) for method in (kind(), kind(damping=0.5)))
    assert len(drawn) == draws[1], "the fit is that of any damping"
    assert not np.allclose(both, damped)
    second = scored(made, name="test", method=other, checkpoints=[one])
    assert len(drawn) == draws[2]
    latest = scored(made, name="two", method=other)
    assert len(drawn) == draws[3]
    assert not np.allclose(first, second)
    alone = attributor(method=other)
    alone.featurize(TRAIN, [one, two])
    np.testing.assert_array_equal(latest, scored(alone))
    np.testing.assert_array_equal(scored(made, name="test", checkpoints=[one]), first)
    np.testing.assert_array_equal(made.scores("test", method=other).numpy(), second)
    opened = Attributor.open(tmp_path / "a.zarr", model())
    np.testing.assert_array_equal(opened.scores().numpy(), both)
    np.testing.assert_array_equal(opened.scores(method=kind(damping=0.5)).numpy(), damped)
    assert len(drawn) == draws[3]
    np.testing.assert_array_equal(scored(made, name="new", checkpoints=[one]), first)


def test_it_reads_the_rows_of_another_method_and_is_fitted_by_score(lm):
    expected, made = attributor(), attributor(task=lm[0], method=TRAK(damping=None, layout="stored"))
    for one in (expected, made):
        one.featurize(TRAIN, states())
    assert lm[1] == []
    found = scored(made, method="Fisher")
    np.testing.assert_array_equal(found, scored(expected))
    path = made.scores(method="Fisher", dense=False).damping_path([None, 1.0]).numpy()
    np.testing.assert_allclose(path[0], found, rtol=1e-3, atol=1e-5 * np.abs(found).max())


def test_a_fit_that_was_set_aside_is_made_again_by_the_call_that_the_error_names(tmp_path, lm):
    path, method = tmp_path / "a.zarr", Fisher()
    made = attributor(path, task=lm[0], method=TRAK())
    made.featurize(TRAIN)
    expected = made.score(TARGETS, method=method).self_influence()
    (chunk,) = (path / "fisher").glob("**/gram/gram/c.0.0")
    chunk.write_bytes(chunk.read_bytes()[::-1])
    assert check_store(path, repair=True).ok
    for dense in (True, False):
        with pytest.raises(errors.StateError, match=r"not fitted .*method=\.\.\., dense=False"):
            made.scores(method=method).self_influence()
        made.score(TARGETS, method=method, dense=dense)
    np.testing.assert_array_equal(made.scores(method=method).self_influence(), expected)


def failing(monkeypatch, method, error, when):
    """Let a method of the stores on disk fail for some tables."""
    real = getattr(ZarrFeatureStore, method)

    def maybe(self, path, *given):
        if when(path):
            raise error
        return real(self, path, *given)

    monkeypatch.setattr(ZarrFeatureStore, method, maybe)


def test_a_fit_that_was_killed_is_made_by_the_next_call(tmp_path, monkeypatch, lm):
    """After the labels were drawn, and before the gram matrices: only these are computed."""
    whole, (task, drawn) = attributor(), lm
    whole.featurize(TRAIN)
    with monkeypatch.context() as patch:
        failing(patch, "create_table", KeyboardInterrupt(), lambda path: "gram" in path)
        with pytest.raises(KeyboardInterrupt):
            attributor(tmp_path / "a.zarr", task=task).featurize(Rows(TRAIN, batch_size=3))
    made = attributor(tmp_path / "a.zarr", task=task)
    with pytest.raises(errors.StateError, match=r"Fisher has to be fitted .* Call featurize\(train_data"):
        scored(made)
    again = made.featurize(Rows(TRAIN, batch_size=3))
    assert (again.rows_written, again.rows_found) == (0, N)
    assert len(drawn) <= 7 + 3, "some batches are compared with the stored rows"
    close(scored(made), scored(whole), rtol=1e-5)


def test_what_a_fit_was_made_of_is_named_and_dropped_after_a_kill(tmp_path, monkeypatch, lm):
    """Killed between the last row of the gram matrices and the dropping of the samples."""
    path, (task, drawn) = tmp_path / "a.zarr", lm
    with monkeypatch.context() as patch:
        failing(patch, "drop_table", KeyboardInterrupt(), lambda path: True)
        with pytest.raises(KeyboardInterrupt):
            attributor(path, task=task).featurize(TRAIN)
    (left,) = (name for name in ZarrFeatureStore.open(path).table_names() if name.endswith("/drawn"))
    report = check_store(path)
    assert report.ok
    assert [(finding.level, finding.table) for finding in report.findings] == [("note", left)]
    assert "left over" in report.findings[0].finding
    attributor(path, task=task).featurize(TRAIN)
    assert left not in ZarrFeatureStore.open(path).table_names()
    assert check_store(path).findings == ()
    assert len(drawn) == 1


def test_a_fit_that_others_complete_meanwhile_is_taken_over(tmp_path, monkeypatch, lm):
    """The process that completes the matrices drops the table they are made of, from under others too."""
    method, (task, drawn) = Fisher(samples_per_feature=6, seed=3), lm
    expected = attributor(method=method)
    expected.featurize(TRAIN)
    made = attributor(tmp_path / "a.zarr", task=task, method=TRAK(damping=None, layout="stored"))
    made.featurize(TRAIN)
    error = errors.StoreError("Listing drawn/features failed: No such file or directory.")
    real = ZarrFeatureStore.create_table

    def completed(self, path, *given):
        if not path.endswith("drawn"):
            return real(self, path, *given)
        monkeypatch.setattr(ZarrFeatureStore, "create_table", real)
        attributor(tmp_path / "a.zarr", task=task, method=method).featurize(TRAIN)
        raise error

    monkeypatch.setattr(ZarrFeatureStore, "create_table", completed)
    np.testing.assert_array_equal(scored(made, method=method), scored(expected))
    assert len(drawn) == 2
    failing(monkeypatch, "create_table", error, lambda path: path.endswith("drawn"))
    with pytest.raises(errors.StoreError, match="No such file"):
        scored(made, method=Fisher(seed=4))


def test_draws_that_others_drop_when_they_have_been_found_are_made(tmp_path, monkeypatch):
    """Another process completes the fit, and drops them, between the two questions."""
    expected, found = scored_by_fisher(tmp_path / "a.zarr"), []
    has_table = ZarrFeatureStore.has_table

    def finds_once(self, path):
        return (path.endswith("/drawn") and not found and not found.append(path)) or has_table(self, path)

    monkeypatch.setattr(ZarrFeatureStore, "has_table", finds_once)
    np.testing.assert_array_equal(scored_by_fisher(tmp_path / "b.zarr"), expected)
    assert found


def scored_by_fisher(path):
    made = attributor(path, method=Fisher())
    made.featurize(TRAIN)
    return scored(made)


@pytest.mark.parametrize("method", [Fisher(), EKFAC()], ids=lambda method: method.name)
def test_other_rows_and_other_weights_are_fitted_anew(method, tmp_path):
    one, two = states()
    made = attributor(tmp_path / "a.zarr", method=method)
    made.featurize(TRAIN, [one])
    scored(made, name="one")
    for data, state, append in ((LONGER, one, True), (LONGER, two, False)):
        fresh = attributor(method=method)
        fresh.featurize(data, [state])
        if state is two:  # takes the number of the other
            made.drop_checkpoint("ckpt-0")
        made.featurize(data, [state], append=append)
        name = "longer" if append else "other"
        close(scored(made, name=name, checkpoints=[state]), scored(fresh), rtol=1e-5)


def test_train_data_that_another_process_has_appended_to_are_not_fitted_to(tmp_path):
    made, other = attributor(tmp_path / "a.zarr"), attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN)
    other.featurize(LONGER, append=True)
    with pytest.raises(errors.ManifestMismatchError, match=r"dataset.*featurize"):
        scored(made, method=EKFAC())


def test_every_machine_finds_it_in_an_object_store(tmp_path, lm):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    url, (task, drawn) = f"memory://{tmp_path.name}/fisher.zarr", lm
    local, here, there = (
        attributor(RemotePlace(url, staging=tmp_path / place) if place else None, task=task)
        for place in ("", "here", "there")
    )
    for made in (local, here):
        made.featurize(TRAIN)
    np.testing.assert_array_equal(scored(here), scored(local))
    assert there.featurize(TRAIN).rows_written == 0
    np.testing.assert_array_equal(scored(there, name="there"), scored(local))
    assert len(drawn) == 2


class NormalisingComputer(FunctionalGradientComputer):
    def fingerprint(self):
        return {**super().fingerprint(), **Normalization("unit").fingerprint()}


NORMALISED = "The rows are normalised, and Fisher needs gradients that are not"


@pytest.mark.parametrize(("changes", "said"), [
    ({"task": lambda call, batch: call(batch[0]).sum((1, 2))}, "does not define their distribution"),
    ({"normalize": "unit"}, NORMALISED),
    ({"gradient_computer": NormalisingComputer}, NORMALISED),
], ids=["no-labels", "normalised", "normalised-by-the-computer"])  # fmt: skip
def test_what_labels_cannot_be_drawn_for_is_refused(changes, said):
    with pytest.raises(errors.InvalidInputError, match=said):
        attributor(method="Fisher", **changes)
    made = attributor(**changes)
    made.featurize(TRAIN)
    with pytest.raises(errors.InvalidInputError, match=said):
        scored(made, method="Fisher")


def test_rows_that_only_their_own_batches_stack_are_refused_before_they_are_computed(tmp_path):
    """Where a fit has the same batches, it is made."""
    texts = [torch.zeros(3 + number // 32, dtype=torch.int64) for number in range(64)]
    samples = [{"input_ids": text, "labels": text} for text in texts]
    assert attributor().featurize(Rows(samples, batch_size=8)).rows_written == 64
    with pytest.raises(errors.InvalidInputError, match="different lengths"):
        attributor(tmp_path / "a.zarr").featurize(Rows(samples[:60], batch_size=8))
    assert not (tmp_path / "a.zarr").exists()


def test_normalised_rows_take_the_next_best_kernel():
    assert attributor(normalize="unit").method == TRAK(damping=None, layout="stored")
    margin = MultiLabelModelOutput(output="margin")
    assert attributor(net=several_labels(), task=margin, normalize="unit").method == GaussNewton()
    with pytest.raises(errors.InvalidInputError, match=r"Unknown fields of Fisher: \['layout'\]"):
        attributor(method={"name": "Fisher", "layout": "joint"})


def test_a_gradient_that_is_not_finite_is_refused_and_its_row_named(monkeypatch):
    """Token 4 is in no row, but in row 4 for every draw of labels."""
    net, (task, _) = model(), recording(LM, monkeypatch)
    net.embedding.weight.data[4] = torch.nan
    draw = task.sample_labels

    def overflowing(*given):
        ids, labels = draw(*given)
        return torch.where(torch.arange(len(ids))[:, None] % N == 4, 4, ids), labels

    monkeypatch.setattr(task, "sample_labels", overflowing)
    with pytest.raises(errors.NonFiniteError, match=r"rows \[4, 4, 4\] of the train data"):
        attributor(net=net, task=task).featurize(TRAIN)


def test_a_store_that_cannot_be_written_is_refused_before_a_label_is_drawn(tmp_path, monkeypatch, lm):
    methods = Fisher(), Fisher(seed=1)
    made, other = (attributor(tmp_path / "a.zarr", task=lm[0], method=method) for method in methods)
    made.featurize(TRAIN)
    scored(made, name="test")
    monkeypatch.setattr(ZarrFeatureStore, "writable", property(lambda _: False))
    for call in (
        lambda: scored(made, name="test", method=Fisher(seed=1)),
        lambda: scored(made, name="test", method=EKFAC()),
        lambda: other.featurize(TRAIN),
    ):
        said = "open for reading only, and a fit must be stored"
        with pytest.raises(errors.ReadOnlyStoreError, match=said):
            call()
    assert len(lm[1]) == 1


ROWS = [{"x": torch.randn(5, generator=torch.Generator().manual_seed(i)), "label": i % 3} for i in range(8)]


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def draw(logits, noise):
    return (logits - torch.log(-torch.log(noise((3,))))).argmax(1)


def pure(call, batch, noise):
    return {**batch, "label": draw(call(batch["x"]), noise)}


def replaces(call, batch, noise):
    batch["label"] = draw(call(batch["x"]), noise)
    return batch


def overwrites(call, batch, noise):
    batch["label"].copy_(draw(call(batch["x"]), noise))
    return {**batch}


def writes_to_outputs(call, batch, noise):
    call(batch["x"]).mul_(-1)
    return {**batch, "label": draw(call(batch["x"].clone()), noise)}


def asks_something_else_first(call, batch, noise):
    call(batch["x"].flip(0))
    return pure(call, batch, noise)


def pure_with_other_inputs(call, batch, noise):
    x = batch["x"].clone()
    x[:, 0] += draw(call(x), noise)
    return {**batch, "x": x, "label": draw(call(x), noise)}


def changes_inputs(call, batch, noise):
    batch["x"][:, 0] += draw(call(batch["x"]), noise)
    return {**batch, "label": draw(call(batch["x"]), noise)}


def scores_of(sample):
    class Sampling(ImageClassificationModelOutput):
        def sample_labels(self, model_call, batch, noise):
            return sample(model_call, batch, noise)

    torch.manual_seed(0)
    settings = {"method": Fisher(samples_per_feature=8), "proj_dim": 4, "progress": False}
    made = Attributor(Linear(5, 3), Sampling(), None, **settings)
    made.featurize(Rows(ROWS, batch_size=8))
    return made.score(ROWS).numpy()


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (replaces, pure),
        (overwrites, pure),
        (writes_to_outputs, pure),
        (asks_something_else_first, pure),
        (changes_inputs, pure_with_other_inputs),
    ],
)
def test_what_a_task_writes_to_changes_no_later_draw(sample, expected):
    """Labels of four draws come from one pass of the model."""
    np.testing.assert_array_equal(scores_of(sample), scores_of(expected))
