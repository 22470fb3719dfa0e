"""Methods through the facade: stored rows are read again, never computed again; what is kept where; what is refused."""

import ast
import contextlib
import logging
import re
import shutil
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from tiny_runs import Counting, labelled, perceptron, random_states
from torch import nn

from trak_lite import Attributor, Refine, Rows
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError
from trak_lite.methods import CG, EKFAC, TRAK, Fisher, GaussNewton, GradCos, LiSSA, TracIn
from trak_lite.scoring import grams
from trak_lite.store import check_store, open_store

N, M = 30, 4
model = partial(perceptron, 5)
states = partial(random_states, model, 3)
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)


def featurized(path=None, data=TRAIN, net=None, **changes):
    settings = {"proj_dim": 16, "dtype": "float32", **changes}
    made = Attributor(model() if net is None else net, "image_classification", path, **settings)
    made.featurize(data, checkpoints=states() if net is None else None)
    return made


@pytest.fixture(scope="module")
def made():
    """Scores of every method are kept beside each other."""
    return featurized(layout="module")


@pytest.mark.parametrize("method", [
    TRAK(damping=None, layout="stored"),
    TracIn(learning_rates=[0.1, 0.2, 0.3]),
    GaussNewton(layout="joint"),
], ids=lambda method: method.name)  # fmt: skip
def test_another_method_stores_no_gradient(made, method):
    data = Counting(TARGETS)
    targets = Rows(data, name="targets")
    before = made.score(targets, name=method.name).numpy()
    said = {key: value for key, value in method.to_json().items() if key != "name" and value is not None}
    said |= {"method": method.name, "checkpoints": 3}
    for dense in (True, False):
        data.loaded.clear()
        other = made.score(targets, name=method.name, dense=dense, method=method)
        assert len(data.loaded) == M, "the targets of one checkpoint are compared, nothing is computed anew"
        assert not np.allclose(other.numpy(), before)
        found = made.scores(method.name, dense=dense, method=method)
        np.testing.assert_array_equal(found.numpy(), other.numpy())
        assert other.method == method.decided(made.layout)
        assert {key: other.settings[key] for key in said} == said
    np.testing.assert_array_equal(made.scores(method.name).numpy(), before)


def test_settings_that_say_what_holds_anyway_give_the_same_table():
    made = featurized(layout="joint")
    first, joint = made.score(TARGETS, name="test"), {"name": "GaussNewton", "layout": "joint"}
    for method in (GaussNewton(damping=None, layout="joint", q="outside"), "gaussnewton", joint):
        assert made.score(TARGETS, name="test", method=method).location == first.location
    assert first.source.store.table_names("scores") == ["scores/test"]
    assert first.source.store.table_names("views") == []


def test_a_store_opened_again_answers_with_any_method_without_data(tmp_path):
    made = featurized(tmp_path / "a.zarr")
    by_default = made.score(TARGETS, name="test").numpy()
    expected = made.score(TARGETS, name="test", method="GradDot").numpy()
    opened = Attributor.open(tmp_path / "a.zarr", model())
    again = Attributor.open(tmp_path / "a.zarr", model(), method="GradDot")
    for dense in (True, False):
        np.testing.assert_array_equal(opened.scores("test", method="GradDot", dense=dense).numpy(), expected)
    for scores in (again.scores("test"), again.score(TARGETS, name="test", checkpoints=states())):
        np.testing.assert_array_equal(scores.numpy(), expected)
        assert scores.location == opened.scores("test", method="GradDot").location
    for scores in (
        again.scores("test", method="GaussNewton"),
        again.score(TARGETS, "test", method="GaussNewton"),
    ):
        np.testing.assert_array_equal(scores.numpy(), by_default)
        assert scores.location == made.scores("test").location
    unlike = Attributor.open(tmp_path / "a.zarr", model(), method="TracIn")
    for call in (lambda: unlike.scores("test"), lambda: unlike.score(TARGETS, name="test")):
        said = r"method\.name is 'GaussNewton' there, 'TracIn' here.*[Pp]ass the .*method"
        with pytest.raises(ManifestMismatchError, match=said):
            call()
    other = again.score(TARGETS, name="other", checkpoints=states()).numpy()
    np.testing.assert_array_equal(other, expected)
    assert not np.allclose(other, by_default)
    for view in ({"method": "GradDot"}, {"method": "TRAK"}, {"dense": False}):
        with pytest.raises(ManifestMismatchError, match=r"targets.*another name"):
            made.score(labelled(M, 5), name="test", **view)


def test_scores_begun_in_other_chunks_are_dropped_and_made_again(tmp_path):
    made = featurized(tmp_path / "a.zarr")
    expected = made.score(TARGETS, "a").numpy()
    with open_store(tmp_path / "a.zarr", "r+") as store:
        spec = store.open_table("scores/a").spec
        store.drop_table("scores/a")
        store.create_table("scores/a", replace(spec, chunk_rows=8))
    with pytest.raises(ManifestMismatchError, match=r"chunks of 8 rows.* drop_scores\('a'\) and score again"):
        made.score(TARGETS, "a")
    made.drop_scores("a")
    np.testing.assert_array_equal(made.score(TARGETS, "a").numpy(), expected)


class Breaking(Counting):
    def __getitem__(self, index):
        if len(self.loaded) == self.fail_at:
            raise OSError("the disk went away")
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["GradDot", "EKFAC"])
def test_targets_that_lack_rows_of_a_checkpoint_are_refused(tmp_path, method):
    """Of a call that broke off in each row, or between two checkpoints, and of a file that was removed."""
    made = featurized(tmp_path / "a.zarr")
    view = {"method": method, "dense": False}
    whole = made.score(TARGETS, "whole", **view).numpy()
    made.featurize(TRAIN, checkpoints=[*states(), model().state_dict()])
    np.testing.assert_array_equal(made.scores("whole", **view).numpy(), whole)  # of three of four checkpoints
    made.drop_checkpoint("ckpt-3")
    for rows in range(2, 3 * M + 2, 2):
        breaking = Rows(Breaking(TARGETS, rows), name="rows", batch_size=2)
        with pytest.raises(OSError, match="went away") if rows < 3 * M else contextlib.nullcontext():
            made.score(breaking, f"{rows}", **view)
        if rows < 3 * M:
            with pytest.raises(StateError, match=rf"targets '{rows}' are not complete: .*/ckpt-2"):
                made.scores(f"{rows}", **view)
    np.testing.assert_allclose(made.scores(f"{rows}", **view).numpy(), whole, atol=1e-6)  # of other batches
    (file,) = (tmp_path / "a.zarr").glob("*/whole/**/ckpt-1/features/c.0.0")
    file.unlink()
    (pending,) = check_store(tmp_path / "a.zarr").findings
    assert "score (targets and fits: dense=False)" in pending.next_step
    with pytest.raises(StateError, match=r"targets 'whole' are not complete: [^,]*/ckpt-1\. "):
        made.scores("whole", **view)
    made.drop_checkpoint("ckpt-2")  # which the call had not begun
    alone = made.scores(f"{2 * M}", **view)
    assert alone.settings["checkpoints"] == 2
    np.testing.assert_allclose(made.score(TARGETS, "whole", **view).numpy(), alone.numpy(), atol=1e-6)


def squared_logits(model_call, batch):
    return (model_call(batch[0]) ** 2).sum(1)


@pytest.mark.parametrize("view", [
    {"method": "GradDot", "dense": False},
    {"method": "TracIn"},
    {"method": "EKFAC", "dense": False},
    {"method": "GradDot", "dense": False, "task": squared_logits},
], ids=["lazy", "another method", "curvature", "task"])  # fmt: skip
def test_targets_of_a_name_are_the_same_at_every_checkpoint(view):
    made, (first, second, _) = featurized(), states()
    whole = {"method": "EKFAC" if view["method"] == "EKFAC" else "GradDot", "dense": False}
    alone = [
        made.score(TARGETS, name, checkpoints=[state], **whole).numpy()
        for name, state in {"a": first, "b": second}.items()
    ]
    other = labelled(M + 1, 5) if "task" not in view else TARGETS
    with pytest.raises(ManifestMismatchError, match=r"/ckpt-0 .*under another name"):
        made.score(other, "a", checkpoints=[second], **view)
    np.testing.assert_array_equal(made.scores("a", **whole).numpy(), alone[0])
    made.score(TARGETS, "a", method="EKFAC", checkpoints=[first])
    made.score(TARGETS, "a", checkpoints=[second], **whole)
    both = made.scores("a", **whole).numpy()
    np.testing.assert_allclose(both, np.mean(alone, 0), rtol=1e-4, atol=1e-5 * np.abs(both).max())


@pytest.mark.parametrize("view", [
    {"method": "TracIn"}, {"method": "EKFAC"}, {"task": squared_logits},
], ids=["method", "curvature", "task"])  # fmt: skip
def test_targets_of_a_name_that_differ_between_merged_copies_are_refused(tmp_path, view):
    first, second, _ = states()
    ours = featurized(tmp_path / "a.zarr", method=view.get("method", "GradDot"))
    shutil.copytree(tmp_path / "a.zarr", tmp_path / "b.zarr")
    theirs = Attributor.open(tmp_path / "b.zarr", model())
    theirs.featurize(TRAIN, checkpoints=states())
    other = labelled(M + 1, 5) if "task" not in view else TARGETS
    ours.score(TARGETS, "a", checkpoints=[first], dense=False)
    theirs.score(other, "a", checkpoints=[second], dense=False, task=view.get("task"))
    with open_store(tmp_path / "a.zarr", "r+") as store, open_store(tmp_path / "b.zarr") as copy:
        store.merge([copy])
    with pytest.raises(ManifestMismatchError, match=r"'a' at ckpt-1 .* ckpt-0.*features=True"):
        ours.scores("a", dense=False)
    ours.drop_scores("a", features=True)
    ours.score(TARGETS, "a", dense=False)
    assert ours.scores("a", dense=False).shape == (N, M)


@pytest.mark.parametrize(("first", "second", "dense"), [
    ("GradDot", EKFAC(), True),
    (EKFAC(), "GradDot", False),
    (EKFAC(damping=0.5), EKFAC(), True),
], ids=["plain, fit", "fit, plain", "two fits"])  # fmt: skip
def test_a_name_has_the_same_targets_for_all_methods(tmp_path, first, second, dense):
    made = featurized(tmp_path / "a.zarr")
    made.score(TARGETS, "a", method=first, dense=dense)
    expected = made.score(TARGETS, "b", method=second).numpy()
    with pytest.raises(ManifestMismatchError, match=r"/a/.*another name"):
        made.score(labelled(M, 5), "a", method=second)
    np.testing.assert_array_equal(made.score(TARGETS, "a", method=second).numpy(), expected)


@pytest.mark.parametrize("default", ["GaussNewton", "Fisher"])
@pytest.mark.parametrize("method", [Fisher(samples_per_feature=6), EKFAC()], ids=lambda method: method.name)
def test_score_fits_what_its_method_needs_once_and_reopened_stores_give_the_same_bits(
    tmp_path, method, default
):
    """A fit reads the train rows: it is what loads more of them than are compared."""
    data = Counting(TRAIN)
    train, path = Rows(data, name="train"), tmp_path / "a.zarr"
    made, again = featurized(path, train, method=default), Attributor.open(path, model())
    said = rf"{method.name} has to be fitted.*Call featurize\(train_data, "
    for dense in (True, False):
        with pytest.raises(StateError, match=said):
            again.score(TARGETS, name="test", method=method, dense=dense, checkpoints=states())
    assert again.featurize(train, checkpoints=states()).rows_written == 0
    data.loaded.clear()
    first = again.score(TARGETS, name="test", method=method).numpy()
    assert len(data.loaded) >= 3 * N
    data.loaded.clear()
    opened = Attributor.open(path, model())
    for scores in (
        made.score(TARGETS, name="test", method=method),
        made.score(TARGETS, name="test", method=method, dense=False),
        opened.score(TARGETS, name="test", method=method.to_json()),
        opened.score(TARGETS, name="new", method=method, checkpoints=states()),
        opened.scores("test", method=method),
    ):
        np.testing.assert_array_equal(scores.numpy(), first)
    assert len(data.loaded) < N
    assert not np.allclose(made.score(TARGETS, name="test").numpy(), first)


@pytest.mark.parametrize("method", [None, GradCos()], ids=str)
def test_the_best_and_worst_rows_are_found_and_kept_without_the_matrix(tmp_path, monkeypatch, method):
    made = featurized(tmp_path / "a.zarr")
    sparse = made.score(TARGETS, name="test", method=method, dense=False, k=7)
    assert not any((tmp_path / "a.zarr" / folder).exists() for folder in ("scores", "views"))
    assert "not stored, computed from the rows in" in repr(sparse)
    dense = made.score(TARGETS, name="test", method=method)
    with monkeypatch.context() as patched:
        patched.setattr(type(sparse.source.train[0]), "blocks", None)  # no row is read again
        for found in (sparse, made.score(TARGETS, name="test", method=method, dense=False, k=5)):
            for sign in ("helpful", "harmful"):
                for k, target in ((7, None), (3, None), (7, 2)):
                    expected = dense.top(k, target=target, sign=sign)
                    best = found.top(k, target=target, sign=sign)
                    np.testing.assert_array_equal(best.indices, expected.indices)
                    np.testing.assert_array_equal(best.scores, expected.scores)
                    assert best.indices.dtype == np.int64
    np.testing.assert_array_equal(sparse.top(12).indices, dense.top(12).indices)
    # Rows of other settings, or more of them, are found anew.
    for k, damping in ((5, 1.0), (5, 0.01), (100, 0.01)):
        other = GaussNewton(damping=damping)
        sparse = made.score(TARGETS, name="test", dense=False, k=k, method=other)
        dense = made.score(TARGETS, name="test", method=other)
        np.testing.assert_array_equal(sparse.top(k).indices, dense.top(k).indices)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.standard_error([]), "rows must be whole numbers from 0 to 29"),
        (lambda s: s.standard_error([30]), "from 0 to 29"),
        (lambda s: s.standard_error([-1]), "from 0 to 29"),
        (lambda s: s.standard_error([0.5]), "whole numbers"),
        (lambda s: s.standard_error([[0], [1]]), r"for all targets \(4, k\), got int64 of shape \(2, 1\)"),
        (lambda s: s.standard_error(np.zeros((M, 1), int), target=1), r"\(4, k\)"),
        (lambda s: s.standard_error(target=4), "no target 4"),
        (lambda s: s.reliability(max_rows=0), "max_rows must be an integer of at least 1"),
        (lambda s: s.top(0), "k must be an integer of at least 1"),
        (lambda s: s.top(3, target=M), "no target 4: 'targets' has targets 0 to 3"),
        (lambda s: s.top(3, sign="good"), r"sign must be one of \['harmful', 'helpful'\]"),
        (lambda s: s.group([1, 2]), "must hold 30 labels, got an array of shape"),
        (lambda s: s.group([[0] * 30]), r"must hold 30 labels, got an array of shape \(1, 30\)"),
        (lambda s: s.group(targets=[0] * 5), "labels of targets must hold 4 labels"),
        (lambda s: s.group(), "No labels were given to group by"),
    ],
)
def test_questions_without_an_answer_are_refused(made, call, message):
    with pytest.raises(InvalidInputError, match=message):
        call(made.score(TARGETS))


def test_scores_by_an_inverse_curvature_have_no_damping_path_and_no_self_influence(made):
    scores = made.score(TARGETS, method="EKFAC")
    with pytest.raises(InvalidInputError, match="EKFAC has no kernel, so it has no damping"):
        scores.damping_path([0.1, 1])
    with pytest.raises(InvalidInputError, match="take the diagonal"):
        scores.self_influence()


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("k=3 needs dense=False", {"k": 3}),
        ("k must be an integer of at least 1", {"k": 0, "dense": False}),
        ("has 2 numbers, but 3 checkpoints", {"method": GaussNewton(checkpoint_weights=[1, 2])}),
        ("recall", {"recall": 0.9}),
        ("recall", {"recall": 0.9, "k": 3}),
        ("recall", {"recall": 1.0, "dense": False, "k": 3}),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_no_target_is_featurized(made, settings, message):
    with pytest.raises(InvalidInputError, match=message):
        made.score(TARGETS, name="refused", **settings)
    with pytest.raises(StateError, match="no features of targets 'refused'"):
        made.scores("refused", dense=False)


def test_scores_that_were_never_made_are_asked_for_by_name(made):
    made.score(TARGETS, name="asked")
    with pytest.raises(StateError, match=r"no scores 'asked' made with GradDot\(q='inside'"):
        made.scores("asked", method="GradDot")
    view = made.score(TARGETS, name="only-a-view", method=GradCos(q="off"))
    said = r"no scores 'only-a-view' made with GaussNewton\(.*; there are some made with method=(.*)\. Pass"
    with pytest.raises(StateError, match=said) as refused:
        made.scores("only-a-view")
    told = ast.literal_eval(re.search(said, str(refused.value))[1])
    np.testing.assert_array_equal(made.scores("only-a-view", method=told).numpy(), view.numpy())
    with pytest.raises(StateError, match=r"no features of targets 'other'; stored targets: \['"):
        made.scores("other", dense=False)


def test_gram_matrices_of_few_rows_are_summed_again_and_those_of_many_are_stored(tmp_path, monkeypatch):
    found = []
    for most, count in ((N + 1, 0), (N, 3)):
        monkeypatch.setattr(grams, "CACHED_ROWS", most)
        made = featurized(tmp_path / f"{most}", layout="module")
        found += [made.score(TARGETS, name).numpy() for name in ("first", "again")]
        assert len([*(tmp_path / f"{most}").glob(".cache/gram-*")]) == count
    for scores in found:
        np.testing.assert_array_equal(scores, found[0])


# Modules whose gradients are zero, or too small for float32, add nothing to scores
class Faint(nn.Module):
    """Logits of two linear layers, of which one is scaled; a third one is dead."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.side, self.dead = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.scale = scale

    def forward(self, x):
        return self.head(x) + self.side(x) * self.scale + torch.relu(self.dead(x) - 1e4)


@cache
def faint(scale, **changes):
    """Every method reads the same rows."""
    return featurized(net=Faint(scale), projector="none", layout="module", **changes)


METHODS = {
    "GaussNewton": GaussNewton(),
    "Fisher": Fisher(),
    "TRAK": TRAK(damping=0.1, layout="stored"),
    "EKFAC": EKFAC(),
    "CG": CG(),
    "LiSSA": LiSSA(damping=30.0, depth=20, rows=10),
    "TracIn": TracIn(),
    "GradCos": GradCos(),
}


@pytest.mark.parametrize("scale", [0.0, 1e-41, 1e-21])
@pytest.mark.parametrize("name", METHODS)
def test_scores_are_those_without_the_vanishing_modules(name, scale):
    made, method = faint(scale), METHODS[name]
    found = [made.score(TARGETS, method=method).numpy()]
    if name in ("EKFAC", "CG", "GradCos"):
        found.append(made.stream_scores(TRAIN, TARGETS, method=method).numpy())
        found.append(made.score(TARGETS, refine=Refine(candidates=N, method=method)).numpy())
    assert np.isfinite(found).all()
    if name not in ("Fisher", "LiSSA", "GradCos"):  # labels, vectors or cosines that depend on all modules
        expected = faint(scale, grad_wrt="head.*").score(TARGETS, method=method).numpy()
        for scores in found:
            np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "modules", "options"),
    [("GaussNewton", ["'side'", "'dead'"], {"dense": False, "k": 3}), ("EKFAC", ["side.weight"], {})],
)
def test_the_vanishing_modules_are_named_once(name, modules, options, caplog):
    made = faint(1e-21, seed=1)
    with caplog.at_level(logging.WARNING, "trak_lite"):
        made.score(TARGETS, method=METHODS[name], **options)
    (record,) = [one for one in caplog.records if "nothing" in one.message]
    assert all(module in record.message for module in modules)
    assert "head" not in record.message
