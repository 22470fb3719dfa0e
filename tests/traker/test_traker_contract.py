"""The six verbs: the cursor, resuming, targets, and what the original got wrong in them."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import contents
from torch import nn
from traker_cases import (
    K,
    M,
    N,
    assert_scores_close,
    at,
    checkpoints,
    featurize,
    injected,
    make_model,
    make_traker,
    num_kept,
    part,
    refused,
    run,
    score,
    scores_of_pseudo_inverses,
    stored,
    target_batch,
    train_batch,
)

from trak_lite import TRAKer, errors
from trak_lite.gradient_computers import GRADIENT_COMPUTERS
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import AbstractProjector, BasicProjector, NoOpProjector
from trak_lite.store import open_store


def made(folder, stage, **changes):
    return at(stage, make_traker(folder, **changes))


def put(traker, rows, batch=None):
    some = part(train_batch() if batch is None else batch, rows)
    traker.featurize(some, num_samples=np.int64(len(some[0])))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Features of id 0, and the scores that belong to them, from one undisturbed run."""
    traker = make_traker(tmp_path_factory.mktemp("expected"))
    scores = run(traker, count=1)
    return stored(traker), scores


def assert_same(found, wanted):
    """Rows in other batches differ by rounding only."""
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "context",
    [partial(torch.autocast, "cpu", torch.bfloat16), torch.inference_mode],
    ids=["autocast", "inference"],
)
def test_contexts_of_the_caller_change_no_number(tmp_path, expected, context):
    traker = make_traker(tmp_path)
    with context():
        scores = run(traker, count=1)
    np.testing.assert_array_equal(stored(traker), expected[0])
    np.testing.assert_array_equal(scores, expected[1])


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values())
def test_a_batch_may_be_made_in_inference_mode(tmp_path, expected, computer):
    """Such as one of embeddings, which autograd cannot save as they are."""
    traker = make_traker(tmp_path, gradient_computer=computer)
    with torch.inference_mode():
        batches = [tuple(tensor.clone() for tensor in batch) for batch in (train_batch(), target_batch())]
    featurize(traker, checkpoints(count=1), batches[0])
    traker.finalize_features()
    score(traker, checkpoints(count=1), batches[1])
    assert_same(stored(traker), expected[0])
    assert_scores_close(traker.finalize_scores("test"), expected[1], rtol=1e-3)


@pytest.mark.quick
def test_rows_and_targets_may_be_named_in_any_order_and_form(tmp_path, expected):
    """Numbers may be those of NumPy and torch."""
    traker = make_traker(tmp_path / "new", train_set_size=np.int64(N), proj_dim=np.int32(K))
    order = np.random.default_rng(0).permutation(N)
    traker.load_checkpoint(checkpoints(count=1)[0], np.int64(0))
    assert not (tmp_path / "new").exists()
    for form, rows in zip((list, np.asarray, torch.as_tensor), np.array_split(order, 3), strict=True):
        traker.featurize(part(train_batch(), rows), inds=form(rows.tolist()))
    traker.finalize_features(model_ids=np.arange(1))
    traker.start_scoring_checkpoint("test", checkpoints(count=1)[0], np.int64(0), num_targets=torch.tensor(M))
    for rows in ([6, 0, 3], [1, 5, 4, 2]):
        traker.score(part(target_batch(), rows), inds=torch.tensor(rows))
    assert_same(stored(traker), expected[0])
    assert_same(traker.finalize_scores("test", model_ids=np.array([0, 0])), expected[1])


@pytest.mark.parametrize("changes", ["torch device", "task class", "projector"])
def test_the_cursor_advances_over_rows_that_are_done(tmp_path, expected, changes):
    """Also over a half done batch, whose other rows are made: the original fails on its shape.

    The original chooses another projection for a torch.device.
    """
    width = num_kept(make_model(), None)
    given = {
        "torch device": {"device": torch.device("cpu")},
        "task class": {"device": "auto", "task": ImageClassificationModelOutput, "proj_max_batch_size": 16},
        "projector": {"projector": BasicProjector(width, K, 0, "rademacher", "cpu"), "proj_dim": 512},
    }
    traker = make_traker(tmp_path, **given[changes])
    traker.model.train()
    at("loaded", traker)
    traker.featurize(part(train_batch(), slice(0, 30)), inds=np.arange(30))
    for start in range(0, N, 20):
        put(traker, slice(start, start + 20))
    assert_same(stored(traker), expected[0])
    with pytest.raises(errors.InvalidInputError, match=rf"Rows \[{N}\] of the train data .* do not exist"):
        put(traker, slice(0, 1))
    # The model keeps the loaded weights, in eval mode.
    assert not any(module.training for module in traker.model.modules())
    for name, value in traker.model.state_dict().items():
        assert torch.equal(value, checkpoints(count=1)[0][name])
    assert [p.requires_grad for p in traker.model.parameters()] == [True, False, True, True]


def test_loading_and_finalizing_set_the_cursors_back(tmp_path):
    traker = made(tmp_path, "loaded")
    put(traker, slice(0, 30))
    at("finalized", traker)
    put(traker, slice(0, N))
    score(traker, checkpoints(count=1))
    first = traker.finalize_scores("test")
    traker.score(target_batch(), num_samples=M)
    np.testing.assert_array_equal(traker.finalize_scores("test"), first)


def test_a_refused_batch_does_not_move_the_cursor_and_holds_no_locks(tmp_path, expected):
    """As in a notebook: the run fails, its frames live on in the traceback, and the cell is run again."""
    batch = train_batch()
    spoiled = (batch[0].clone(), batch[1])
    spoiled[0][60] = torch.nan
    first = made(tmp_path, "loaded")
    put(first, slice(0, 10))
    with pytest.raises(errors.NonFiniteError, match=r"rows \[60\] of the train data \(model id 0\)"):
        put(first, slice(10, N), spoiled)
    second = made(tmp_path, "loaded")
    put(second, slice(0, 40))
    second.close()
    put(first, slice(10, N))
    assert_same(stored(first), expected[0])


def test_dict_batches_are_accepted(tmp_path, expected):
    (images, labels), traker = train_batch(), made(tmp_path, "loaded")
    traker.featurize({"x": images, "labels": labels}, num_samples=N)
    assert_same(stored(traker), expected[0])


def test_a_new_instance_goes_on_where_the_last_one_was(tmp_path, expected):
    for rows in (slice(0, 10), slice(0, 50), slice(0, N)):
        traker, backwards = made(tmp_path, "loaded"), np.arange(N)[rows][::-1].copy()
        traker.featurize(part(train_batch(), backwards), inds=backwards)  # those that are done come last
        if rows.stop > 10:  # the first one is only let go
            traker.close()
    made(tmp_path, "new").finalize_features()
    traker = made(tmp_path, "new")
    score(traker, checkpoints(count=1))
    assert_same(traker.finalize_scores("test"), expected[1])
    before = contents(tmp_path)
    np.testing.assert_array_equal(made(tmp_path, "new").finalize_scores("test"), traker.scores)
    assert contents(tmp_path) == before


def test_of_rows_that_are_done_only_a_few_are_computed_again_and_no_targets(tmp_path, monkeypatch):
    made(tmp_path, "featurized")
    traker = made(tmp_path, "loaded")
    stream, passes = traker.gradient_computer.stream_gradients, []

    def counting(batch, sink):
        passes.append(len(batch[0]))
        return stream(batch, sink)

    monkeypatch.setattr(traker.gradient_computer, "stream_gradients", counting)
    put(traker, slice(0, N))
    assert passes == [8]
    for expected in ([8, 8], [8, 8, 8], [8, 8, 8], [8, 8, 8, 8]):  # of the batches 1, 2 and 4
        traker.featurize(train_batch(), inds=np.arange(N))
        assert passes == expected
    at("scoring", traker)
    traker.score(part(target_batch(), slice(0, 4)), num_samples=4)
    at("scored", traker)
    first, known = traker.finalize_scores("test"), len(passes)
    traker.score(target_batch(), num_samples=M)
    np.testing.assert_array_equal(traker.finalize_scores("test"), first)
    assert len(passes) == known


ENDING = """
import os, sys
sys.path[:0] = sys.argv[3:]
from traker_cases import at, make_traker, part, train_batch
some = part(train_batch(), slice(0, 20))
for folder in (sys.argv[1], sys.argv[1] + "/other"):
    traker = at("loaded", make_traker(folder))
    traker.featurize(some, num_samples=20)
if sys.argv[2] == "killed":
    os._exit(9)
if sys.argv[2] == "raised":
    traker.featurize(some, num_samples=1)
"""


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("ends", 0, r"\A\Z"),
        ("raised", 1, r"\ATraceback.*\n[\w.]+InvalidInputError: .*\n\Z"),
        ("killed", 9, r"\A\Z"),
    ],
)
def test_a_process_may_end_with_rows_that_are_not_done(tmp_path, expected, how, code, last):
    """No file is closed twice at exit, nothing but its own error is printed, and the next process goes on."""
    here = Path(__file__).parent
    folders = map(str, (tmp_path, how, here, here.parent, here.parents[1]))
    told = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    child = subprocess.run([sys.executable, "-c", ENDING, *folders], check=False, **told)
    assert (child.returncode, child.stdout) == (code, "")
    assert re.search(last, child.stderr, re.DOTALL), child.stderr
    alone = made(tmp_path / "alone", "loaded")
    put(alone, slice(0, 20))
    put(alone, slice(20, N))
    for folder in (tmp_path, tmp_path / "other"):
        with open_store(str(folder / "trak.zarr")) as store:
            np.testing.assert_array_equal(store.open_table("ckpt-0").pending(), np.arange(20, N))
        traker = made(folder, "loaded")
        put(traker, slice(0, N))
        assert_same(stored(traker), expected[0])
        np.testing.assert_array_equal(stored(traker)[:20], stored(alone)[:20])


def test_an_interrupted_finalize_scores_holds_no_locks(tmp_path, monkeypatch, expected):
    first = made(tmp_path, "scored")

    def stop(table, *arguments, **settings):
        table.put(np.arange(2), {"scores": np.zeros((2, M), np.float32)})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trak_lite.traker.score_rows", stop)
        with pytest.raises(KeyboardInterrupt):
            first.finalize_scores("test")
    second = made(tmp_path, "new").finalize_scores("test")
    assert not second[:2].any()
    assert_same(second[2:], expected[1][2:])


def test_trakers_by_turns_and_opened_before_there_was_a_store_share_it(tmp_path):
    """Two ids in one TRAKer that take turns, one in another, and a new one at the end that scores."""
    states = checkpoints(count=3)
    first, other = make_traker(tmp_path), make_traker(tmp_path)
    for rows in (range(40), range(40, N)):
        for model_id, state in enumerate(states[:2]):
            first.load_checkpoint(state, model_id)
            first.featurize(part(train_batch(), list(rows)), inds=list(rows))
    featurize(other, states[2:], first_id=2)
    first.finalize_features()
    score(make_traker(tmp_path), states)
    together = run(make_traker(tmp_path / "together"), count=3)
    assert_same(make_traker(tmp_path).finalize_scores("test"), together)


def test_a_read_only_folder_still_gives_its_scores(tmp_path, monkeypatch, expected):
    first = made(tmp_path, "scored")
    scores = first.finalize_scores("test")
    first.close()
    monkeypatch.setattr("os.access", lambda path, mode, **_: not mode & os.W_OK)
    reader = made(tmp_path, "new")
    np.testing.assert_array_equal(reader.finalize_scores("test"), scores)
    assert_same(scores, expected[1])
    reader.load_checkpoint(checkpoints(count=2)[1], 1)
    with refused(tmp_path, errors.ReadOnlyStoreError, "opened for reading"):
        put(reader, slice(0, N))


def test_another_lambda_is_another_result_of_the_same_experiment(tmp_path):
    found = {}
    for name, reg in (("first", 0.0), ("damped", 1.0), ("again", 0.0)):
        traker = made(tmp_path, "scored" if name == "first" else "new", lambda_reg=reg)
        found[name] = traker.finalize_scores("test")
        traker.close()
    at_once = made(tmp_path / "at_once", "scored", lambda_reg=1.0).finalize_scores("test")
    np.testing.assert_array_equal(found["damped"], at_once)
    assert np.abs(found["damped"] - found["first"]).max() > 1e-3 * np.abs(found["first"]).max()
    np.testing.assert_array_equal(found["again"], found["first"])


def test_resuming_with_another_setting_is_refused_naming_the_key(tmp_path):
    """The original resumes without a word."""
    traker = made(tmp_path, "loaded")
    put(traker, slice(0, 4))
    traker.close()
    for key, changes in (
        (r"projector\.seed is 0 there, 1 here", {"projector_seed": 1}),
        ("dtype is 'float32' there, 'float16' here", {"use_half_precision": True}),
        (r"parameters\.first\.weight is \[2, 4\] there, 'absent' here", {"grad_wrt": ["second.weight"]}),
        (f"feature_width is {K} there, {K - 1} here", {"proj_dim": K - 1}),
        (r"projector\.kind is 'dense_rademacher.*' there, 'identity' here", {"projector": NoOpProjector()}),
        (rf"dataset\.num_rows is {N} there, {N + 1} here", {"train_set_size": N + 1}),
        (r"temperature is 1\.0 there, 2\.0 here", {"task": ImageClassificationModelOutput(2.0)}),
    ):
        with refused(tmp_path, errors.ManifestMismatchError, key):
            make_traker(tmp_path, **changes)


def test_a_second_finalize_features_changes_nothing_and_scoring_goes_on(tmp_path, caplog):
    """The original frees its projection matrix and misses it afterwards."""
    traker = made(tmp_path, "scored")
    first, rows = traker.finalize_scores("test"), stored(traker)
    traker.finalize_features(del_grads=True)
    score(traker, checkpoints(count=1), exp_name="again")
    np.testing.assert_array_equal(traker.finalize_scores("again"), first)
    assert "so the rows stay" in caplog.text
    np.testing.assert_array_equal(stored(traker), rows)


def test_adding_a_checkpoint_to_a_finished_experiment_keeps_its_scores_right(tmp_path, caplog):
    """The original opens the scores anew when a checkpoint comes, which zeroes what is there."""
    states, traker = checkpoints(count=2), make_traker(tmp_path)
    at_once = run(make_traker(tmp_path / "at_once"), count=2)
    alone = run(traker, count=1)
    kept = alone.copy()
    featurize(traker, states[1:], first_id=1)
    traker.finalize_features()
    said = r"Targets of experiment 'test' are missing for model ids \[1\]"
    with pytest.raises(errors.StateError, match=said):
        traker.finalize_scores("test")
    np.testing.assert_array_equal(traker.finalize_scores("test", allow_skip=True), kept)
    assert "left out model ids [1]" in caplog.text
    score(traker, states[1:], first_id=1)
    np.testing.assert_array_equal(traker.finalize_scores("test", model_ids=[0]), kept)
    np.testing.assert_array_equal(traker.finalize_scores("test"), at_once)
    np.testing.assert_array_equal(traker.finalize_scores("test", model_ids=[0, 1, 1]), at_once)
    np.testing.assert_array_equal(alone, kept)


@pytest.mark.parametrize(
    ("count", "error", "match"),
    [
        (M, errors.InvalidInputError, r"Rows \[2\] of the targets of 'test'.*use another exp_name"),
        (3, errors.ManifestMismatchError, r"row 2 of the targets of 'test'"),
    ],
)
def test_other_targets_under_a_used_name_are_refused(tmp_path, count, error, match):
    """They would be skipped as done, and the scores be those of the first ones; also after a kill."""
    traker, (images, labels) = made(tmp_path, "scoring"), target_batch()
    traker.score(part((images, labels), slice(0, count)), num_samples=count)
    at("scoring", traker)
    with refused(tmp_path, error, match):
        traker.score((images + (torch.arange(M) == 2)[:, None], labels), num_samples=M)


@pytest.mark.parametrize("first", [8, 16, 32, 64])
def test_other_train_rows_in_a_later_batch_are_refused(tmp_path, first):
    """Of ten batches of eight rows, all of which are done, those from ``first`` on are other rows."""
    traker, (images, labels) = made(tmp_path, "featurized"), train_batch()
    traker.close()
    traker = made(tmp_path, "loaded")
    changed = (images + (torch.arange(N) >= first)[:, None], labels)
    for start in range(0, first, 8):
        traker.featurize(part(changed, slice(start, start + 8)), num_samples=8)
    with refused(tmp_path, errors.ManifestMismatchError, f"row {first} of"):
        traker.featurize(part(changed, slice(first, first + 8)), num_samples=8)


def test_dependent_features_are_scored_by_the_pseudo_inverse(tmp_path, caplog):
    """The margins of three classes do not change when all logits do: a third of the features tells nothing new."""
    model = nn.Linear(4, 3)
    batch, targets = ((x, y % 3) for x, y in (train_batch(), target_batch()))
    traker = make_traker(tmp_path, model=model, projector=NoOpProjector())
    finished(traker, [model.state_dict()], batch, targets)
    assert caplog.text.count("no inverse") == 1
    assert f"ranks [10], of 15 features from {N} train rows" in caplog.text
    expected = scores_of_pseudo_inverses(traker, 1)
    np.testing.assert_allclose(traker.scores, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def finished(traker, states, batch=None, targets=None):
    featurize(traker, states, batch)
    traker.finalize_features()
    score(traker, states, targets)
    traker.finalize_scores("test")
    return traker


def test_fewer_rows_than_features_without_lambda_give_scores_that_mean_something(tmp_path, caplog):
    """Those of the pseudo-inverse, with one warning; the original's change when the rows come in reverse."""
    states, count = checkpoints(count=2), K - 2
    few = part(train_batch(), slice(0, count))
    found = []
    for name, order in (("forth", slice(None)), ("back", torch.arange(count - 1, -1, -1))):
        caplog.clear()
        traker = finished(make_traker(tmp_path / name, train_set_size=count), states, part(few, order))
        found.append(traker.scores[order])
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert f"model ids [0, 1] have no inverse at lambda_reg=0: ranks [{count}, {count}]" in warning
        assert f"of {K} features from {count} train rows. Their pseudo-inverses are used" in warning
        assert "set lambda_reg > 0" in warning
        expected = scores_of_pseudo_inverses(traker, 2)[order]
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-4 * np.abs(found[0]).max())
    caplog.clear()
    again = make_traker(tmp_path / "forth", train_set_size=count)
    np.testing.assert_array_equal(again.finalize_scores("test"), found[0])
    traker = finished(make_traker(tmp_path / "damped", train_set_size=count, lambda_reg=1e-6), states, few)
    assert caplog.text == ""
    expected = scores_of_pseudo_inverses(traker, 2)
    np.testing.assert_allclose(traker.scores, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_features_that_are_all_zero_are_refused(tmp_path):
    """The output does not depend on what is kept: there is nothing to score with."""
    traker = make_traker(tmp_path, lambda_reg=1.0)
    (state,) = checkpoints(count=1)
    featurize(traker, [state | {"readout": 0 * state["readout"]}])
    with pytest.raises(errors.SingularKernelError, match="is zero"):
        traker.finalize_features()


def test_a_float16_gram_does_not_overflow(tmp_path):
    """Sums of squares beyond 65504: the original's are infinite, and its scores are not numbers."""
    (state,) = checkpoints(count=1)
    states = [state | {"readout": 400 * state["readout"]}]
    projector = injected(AbstractProjector, num_kept(make_model(), None))
    results = []
    for half in (True, False):
        traker = make_traker(tmp_path / f"{half}", use_half_precision=half, projector=projector)
        finished(traker, states)
        assert (stored(traker).astype(float) ** 2).sum(0).max() > 65504
        results.append(traker.scores)
    assert_scores_close(*results, rtol=5e-3)


def test_the_default_projection_is_rademacher_without_scaling(tmp_path):
    """X = G R / sqrt(P): with P orthogonal gradients as rows, the features show R itself."""
    traker = make_traker(tmp_path)
    num_params = traker.num_params_for_grad
    widths = [torch.Size(shape).numel() for shape in traker.parameters.values()]
    grads = torch.eye(num_params).split(widths, 1)
    named = zip(traker.parameters.items(), grads, strict=True)
    whole = {name: grad.reshape(num_params, *shape) for (name, shape), grad in named}
    drawn = traker.projector.project(whole, model_id=0)
    assert torch.equal(drawn.abs(), torch.ones(num_params, traker.proj_dim))
    assert traker.normalize_factor == pytest.approx(num_params**0.5)


def test_a_subclass_may_wrap_verbs_and_choose_the_projector(tmp_path):
    class Counting(TRAKer):
        seen = 0

        def init_projector(self, projector, proj_dim, proj_max_batch_size):
            self.projector = NoOpProjector()
            self.proj_dim = 0

        def featurize(self, batch, inds=None, num_samples=None):
            self.seen += len(batch[0])
            return super().featurize(batch, inds=inds, num_samples=num_samples)

    settings = {"save_dir": tmp_path, "proj_dim": 512, "use_half_precision": False}
    traker = at("featurized", Counting(make_model(), "image_classification", N, **settings))

    assert traker.seen == N
    assert traker.proj_dim == num_kept(make_model(), None)
    plain = made(tmp_path / "plain", "featurized", projector=NoOpProjector())
    np.testing.assert_array_equal(stored(traker), stored(plain))


@pytest.mark.cuda
@pytest.mark.parametrize("model_on", ["cpu", "cuda"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_model_and_kernels_may_be_on_different_devices(tmp_path, expected, model_on, device):
    """``device`` says where projections and kernels are computed; batches follow the model."""
    traker = make_traker(tmp_path, model=make_model().to(model_on), device=device)
    assert_same(run(traker, count=1), expected[1])
