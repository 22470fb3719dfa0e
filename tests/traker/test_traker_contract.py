"""The six verbs: the cursor, resuming, what is refused, and what a refusal leaves behind."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from traker_cases import (
    M,
    N,
    checkpoints,
    featurize,
    make_model,
    make_traker,
    part,
    refused,
    run,
    score,
    scores_of_pseudo_inverses,
    snapshot,
    target_batch,
    train_batch,
)

from trak_lite.errors import (
    CheckpointError,
    InvalidInputError,
    ManifestMismatchError,
    NonFiniteError,
    PrecisionError,
    ReadOnlyStoreError,
    SingularKernelError,
    StateError,
    UnknownTaskError,
)
from trak_lite.projectors import NoOpProjector
from trak_lite.run.tables import FEATURES


def loaded(folder, **changes):
    """Return a TRAKer with a checkpoint loaded as id 0."""
    traker = make_traker(folder, **changes)
    traker.load_checkpoint(checkpoints(count=1)[0], 0)
    return traker


def finalized(folder, **changes):
    """Return a TRAKer whose id 0 is featurized and finalized."""
    traker = make_traker(folder, **changes)
    featurize(traker, checkpoints(count=1), train_batch())
    traker.finalize_features()
    return traker


def scoring(folder, **changes):
    """Return a TRAKer that is ready to score for id 0."""
    traker = finalized(folder, **changes)
    traker.start_scoring_checkpoint("test", checkpoints(count=1)[0], 0, num_targets=M)
    return traker


def stored(traker, path="ckpt-0"):
    return traker._workspace.table(path).read(FEATURES)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Features of id 0, and the scores that belong to them, from one undisturbed run."""
    traker = make_traker(tmp_path_factory.mktemp("expected"))
    scores = run(traker, count=1)
    return stored(traker), scores


def assert_same(found, wanted):
    """Rows in other batches differ by rounding only."""
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


# --- Where rows go ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, np.asarray, torch.as_tensor], ids=["list", "array", "tensor"])
def test_rows_may_be_named_in_any_order_and_form(tmp_path, expected, form):
    traker, order = loaded(tmp_path), np.random.default_rng(0).permutation(N)
    for rows in np.array_split(order, 3):
        traker.featurize(part(train_batch(), rows), inds=form(rows.tolist()))

    assert_same(stored(traker), expected[0])


def test_targets_may_be_named_in_any_order(tmp_path, expected):
    traker = scoring(tmp_path)
    for rows in ([6, 0, 3], [1, 5, 4, 2]):
        traker.score(part(target_batch(), rows), inds=torch.tensor(rows))

    assert_same(traker.finalize_scores("test"), expected[1])


def test_numbers_may_be_numpy_integers(tmp_path, expected):
    traker = make_traker(tmp_path, train_set_size=np.int64(N), proj_dim=np.int32(12))
    (state,) = checkpoints(count=1)
    traker.load_checkpoint(state, np.int64(0))
    traker.featurize(train_batch(), num_samples=np.int64(N))
    traker.finalize_features(model_ids=np.arange(1))
    traker.start_scoring_checkpoint("test", state, np.int64(0), num_targets=torch.tensor(M))
    traker.score(target_batch(), num_samples=np.int32(M))

    assert_same(traker.finalize_scores("test", model_ids=np.array([0, 0])), expected[1])


def test_the_cursor_advances_over_rows_that_are_done(tmp_path, expected):
    traker, batch = loaded(tmp_path), train_batch()
    traker.featurize(part(batch, slice(0, 30)), inds=np.arange(30))
    for start in range(0, N, 20):
        traker.featurize(part(batch, slice(start, start + 20)), num_samples=20)

    assert_same(stored(traker), expected[0])
    with pytest.raises(InvalidInputError, match=rf"Rows \[{N}\] of the train data .* do not exist"):
        traker.featurize(part(batch, slice(0, 1)), num_samples=1)


def test_loading_a_checkpoint_sets_the_cursor_back(tmp_path):
    traker, batch = loaded(tmp_path), train_batch()
    traker.featurize(part(batch, slice(0, 30)), num_samples=30)
    traker.load_checkpoint(checkpoints(count=1)[0], 0)
    traker.featurize(batch, num_samples=N)

    assert traker._workspace.table("ckpt-0").complete


def test_finalizing_sets_the_cursors_back(tmp_path):
    traker = loaded(tmp_path)
    traker.featurize(train_batch(), num_samples=N)
    traker.finalize_features()
    traker.featurize(train_batch(), num_samples=N)
    score(traker, checkpoints(count=1), target_batch())
    first = traker.finalize_scores("test")
    traker.score(target_batch(), num_samples=M)

    np.testing.assert_array_equal(traker.finalize_scores("test"), first)


def test_a_refused_batch_does_not_move_the_cursor(tmp_path, expected):
    traker, batch = loaded(tmp_path), train_batch()
    spoiled = (batch[0].clone(), batch[1])
    spoiled[0][3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"rows \[3\] of the train data \(model id 0\)"):
        traker.featurize(spoiled, num_samples=N)
    traker.featurize(batch, num_samples=N)

    assert_same(stored(traker), expected[0])


def test_checkpoints_may_be_featurized_by_turns(tmp_path):
    """Each load goes on where the id was."""
    traker, batch = make_traker(tmp_path), train_batch()
    for rows in (range(40), range(40, N)):
        for model_id, state in enumerate(checkpoints(count=2)):
            traker.load_checkpoint(state, model_id)
            traker.featurize(part(batch, list(rows)), inds=list(rows))
    together = make_traker(tmp_path / "together")
    featurize(together, checkpoints(count=2), batch)

    for name in ("ckpt-0", "ckpt-1"):
        assert_same(stored(traker, name), stored(together, name))


def test_the_model_keeps_the_loaded_weights_in_eval_mode(tmp_path):
    traker = make_traker(tmp_path)
    (state,) = checkpoints(count=1)
    traker.model.train()
    traker.load_checkpoint(state, 0)
    traker.featurize(train_batch(), num_samples=N)

    assert not any(module.training for module in traker.model.modules())
    for name, value in traker.model.state_dict().items():
        assert torch.equal(value, state[name])
    assert [p.requires_grad for p in traker.model.parameters()] == [True, False, True, True]


# --- Resuming --------------------------------------------------------------------------------------------


def test_a_new_instance_goes_on_where_the_last_one_was(tmp_path, expected):
    batch = train_batch()
    for rows in (slice(0, 10), slice(0, 50), slice(0, N)):
        traker = loaded(tmp_path)
        traker.featurize(part(batch, rows), num_samples=len(range(N)[rows]))
        traker.close()
    make_traker(tmp_path).finalize_features()
    traker = make_traker(tmp_path)
    score(traker, checkpoints(count=1), target_batch())
    assert_same(traker.finalize_scores("test"), expected[1])

    before = snapshot(tmp_path)
    np.testing.assert_array_equal(make_traker(tmp_path).finalize_scores("test"), traker.scores)
    assert snapshot(tmp_path) == before


def test_of_rows_that_are_done_only_a_few_are_computed_again(tmp_path, monkeypatch):
    loaded(tmp_path).featurize(train_batch(), num_samples=N)
    traker = loaded(tmp_path)
    stream, passes = traker.gradient_computer.stream_gradients, []

    def counting(batch, sink):
        passes.append(len(batch[0]))
        return stream(batch, sink)

    monkeypatch.setattr(traker.gradient_computer, "stream_gradients", counting)
    traker.featurize(train_batch(), num_samples=N)
    assert passes == [8]

    traker.featurize(train_batch(), inds=np.arange(N))
    assert passes == [8]


@pytest.mark.parametrize("change", ["samples", "attribute"])
def test_rows_of_other_samples_or_another_model_are_not_added(tmp_path, change):
    (images, labels), half = train_batch(), N // 2
    loaded(tmp_path).featurize((images[:half], labels[:half]), num_samples=half)
    traker = loaded(tmp_path)
    if change == "samples":
        images = images + 1
    else:
        traker.model.register_forward_hook(lambda module, inputs, output: output * 1.5)

    with pytest.raises(
        ManifestMismatchError,
        match=r"ckpt-0: row 0 of the train data \(model id 0\), computed again, "
        r"differs from the stored row: features by",
    ):
        traker.featurize((images, labels), num_samples=N)


CHILD = """
import os, sys
sys.path[:0] = sys.argv[2:]
from traker_cases import checkpoints, make_traker, train_batch
traker = make_traker(sys.argv[1])
traker.load_checkpoint(checkpoints(count=1)[0], 0)
for start in (0, 20):
    traker.featurize(tuple(t[start:start + 20] for t in train_batch()), num_samples=20)
os._exit(9)
"""


def test_a_killed_process_is_continued_by_another(tmp_path, expected):
    """The rows that it put are kept: only the others are computed."""
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", CHILD, str(tmp_path), str(here), str(here.parents[1])]
    child = subprocess.run(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert child.returncode == 9

    traker = loaded(tmp_path)
    traker.featurize(train_batch(), num_samples=N)

    assert_same(stored(traker), expected[0])
    table = traker._workspace.table("ckpt-0")
    alone = loaded(tmp_path / "alone")
    alone.featurize(part(train_batch(), slice(0, 20)), inds=np.arange(20))
    alone.featurize(part(train_batch(), slice(20, N)), inds=np.arange(20, N))
    np.testing.assert_array_equal(table.read(FEATURES)[:20], stored(alone)[:20])


ENDING = """
import sys
sys.path[:0] = sys.argv[3:]
from traker_cases import checkpoints, make_traker, train_batch
traker = make_traker(sys.argv[1])
traker.load_checkpoint(checkpoints(count=1)[0], 0)
traker.featurize(tuple(t[:20] for t in train_batch()), num_samples=20)
if sys.argv[2] == "two":
    other = make_traker(sys.argv[1] + "/other")
    other.load_checkpoint(checkpoints(count=1)[0], 0)
    other.featurize(tuple(t[:20] for t in train_batch()), num_samples=20)
if sys.argv[2] == "raised":
    traker.featurize(tuple(t[20:] for t in train_batch()), num_samples=1)
"""


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("ends", 0, r"\A\Z"),
        ("two", 0, r"\A\Z"),
        ("raised", 1, r"\ATraceback.*\n[\w.]+InvalidInputError: .*\n\Z"),
    ],
)
def test_a_process_may_end_with_rows_that_are_not_done(tmp_path, expected, how, code, last):
    """No file is closed twice at exit, nothing but its own error is printed, and the next process goes on."""
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", ENDING, str(tmp_path), how, str(here), str(here.parents[1])]
    child = subprocess.run(
        arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True
    )
    assert child.returncode == code
    assert child.stdout == ""
    assert child.stderr.count("Traceback") == code
    assert re.search(last, child.stderr, re.DOTALL), child.stderr

    for folder in (tmp_path, tmp_path / "other") if how == "two" else (tmp_path,):
        traker = loaded(folder)
        left = traker._workspace.table("ckpt-0").pending()
        np.testing.assert_array_equal(left, np.arange(20, N))
        traker.featurize(train_batch(), num_samples=N)
        assert_same(stored(traker), expected[0])


def test_a_traker_in_an_old_traceback_holds_no_locks(tmp_path, expected):
    """As in a notebook: the run fails, its frames live on in the traceback, and the cell is run again."""
    batch = train_batch()
    spoiled = (batch[0].clone(), batch[1])
    spoiled[0][60] = torch.nan
    first = loaded(tmp_path)
    first.featurize(part(batch, slice(0, 10)), num_samples=10)
    with pytest.raises(NonFiniteError):
        first.featurize(part(spoiled, slice(10, N)), num_samples=N - 10)

    second = loaded(tmp_path)
    second.featurize(part(batch, slice(0, 40)), num_samples=40)
    second.close()
    first.load_checkpoint(checkpoints(count=1)[0], 0)
    first.featurize(batch, num_samples=N)

    assert_same(stored(first), expected[0])


def test_an_interrupted_finalize_scores_holds_no_locks(tmp_path, monkeypatch, expected):
    first = scoring(tmp_path)
    first.score(target_batch(), num_samples=M)

    def stop(table, *arguments, **settings):
        table.put(np.arange(2), {"scores": np.zeros((2, M), np.float32)})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trak_lite.traker.score_rows", stop)
        with pytest.raises(KeyboardInterrupt):
            first.finalize_scores("test")
    second = make_traker(tmp_path).finalize_scores("test")

    assert not second[:2].any()
    assert_same(second[2:], expected[1][2:])


def test_a_traker_that_is_gone_holds_no_locks(tmp_path):
    traker = loaded(tmp_path)
    traker.featurize(part(train_batch(), slice(0, 10)), num_samples=10)
    traker = loaded(tmp_path)

    traker.featurize(train_batch(), num_samples=N)


def test_trakers_opened_before_there_was_a_store_share_it(tmp_path):
    """One process per checkpoint, and one at the end that scores."""
    parts = [make_traker(tmp_path) for _ in range(2)]
    last = make_traker(tmp_path)
    for model_id, state in enumerate(checkpoints(count=2)):
        parts[model_id].load_checkpoint(state, model_id)
        parts[model_id].featurize(train_batch(), num_samples=N)
    parts[0].finalize_features()
    del last
    traker = make_traker(tmp_path)
    score(traker, checkpoints(count=2), target_batch())

    together = make_traker(tmp_path / "together")
    np.testing.assert_allclose(
        traker.finalize_scores("test"),
        run(together, count=2),
        rtol=1e-4,
        atol=1e-6 * np.abs(traker.scores).max(),
    )


def test_a_read_only_folder_still_gives_its_scores(tmp_path, monkeypatch):
    traker = make_traker(tmp_path)
    first = run(traker, count=1)
    traker.close()
    monkeypatch.setattr("os.access", lambda path, mode, **_: not mode & os.W_OK)

    reader = make_traker(tmp_path)

    np.testing.assert_array_equal(reader.finalize_scores("test"), first)
    reader.load_checkpoint(checkpoints(count=2)[1], 1)
    with refused(tmp_path, ReadOnlyStoreError, "opened for reading"):
        reader.featurize(train_batch(), num_samples=N)


def test_another_lambda_is_another_result_of_the_same_experiment(tmp_path):
    traker = make_traker(tmp_path)
    first = run(traker, count=1)
    traker.close()
    damped = make_traker(tmp_path, lambda_reg=1.0)
    second = damped.finalize_scores("test")
    damped.close()
    at_once = run(make_traker(tmp_path / "at_once", lambda_reg=1.0), count=1)

    np.testing.assert_array_equal(second, at_once)
    assert np.abs(second - first).max() > 1e-3 * np.abs(first).max()
    np.testing.assert_array_equal(make_traker(tmp_path).finalize_scores("test"), first)


# --- Targets ---------------------------------------------------------------------------------------------


def test_scores_are_rows_by_targets_and_averages_of_the_ids(tmp_path):
    """Ids average: (mean of products) times (mean of q)."""
    traker = make_traker(tmp_path)
    both = run(traker, count=2)
    single = [traker.finalize_scores("test", model_ids=[model_id]) for model_id in (0, 1)]
    q = [traker._workspace.table(f"ckpt-{model_id}").read("out_to_loss")[:, None] for model_id in (0, 1)]

    assert both.shape == (N, M)
    assert both.dtype == np.float32
    np.testing.assert_array_equal(traker.finalize_scores("test", model_ids=[0, 1, 1]), both)
    mean = (single[0] / q[0] + single[1] / q[1]) / 2 * (q[0] + q[1]) / 2
    np.testing.assert_allclose(both, mean, rtol=1e-4, atol=1e-6 * np.abs(both).max())


def test_targets_that_were_scored_are_not_computed_again(tmp_path, monkeypatch):
    traker = scoring(tmp_path)
    traker.score(part(target_batch(), slice(0, 4)), num_samples=4)
    traker.start_scoring_checkpoint("test", checkpoints(count=1)[0], 0, num_targets=M)
    traker.score(target_batch(), num_samples=M)
    first = traker.finalize_scores("test")
    monkeypatch.setattr(traker.gradient_computer, "stream_gradients", None)
    traker.score(target_batch(), num_samples=M)

    np.testing.assert_array_equal(traker.finalize_scores("test"), first)


def test_other_targets_under_a_used_name_are_refused(tmp_path):
    """They would be skipped as done, and the scores be those of the first ones."""
    traker = scoring(tmp_path)
    traker.score(target_batch(), num_samples=M)
    traker.finalize_scores("test")
    images, labels = target_batch()
    images[2] += 1
    traker.start_scoring_checkpoint("test", checkpoints(count=1)[0], 0, num_targets=M)

    with refused(tmp_path, InvalidInputError, r"Rows \[2\] of the targets of 'test'.*use another exp_name"):
        traker.score((images, labels), num_samples=M)


def test_other_targets_than_those_of_a_killed_run_are_noticed(tmp_path):
    traker = scoring(tmp_path)
    traker.score(part(target_batch(), slice(0, 3)), num_samples=3)
    images, labels = target_batch()
    images[2] += 1
    traker.start_scoring_checkpoint("test", checkpoints(count=1)[0], 0, num_targets=M)

    with pytest.raises(ManifestMismatchError, match=r"row 2 of the targets of 'test'"):
        traker.score((images, labels), num_samples=M)


# --- Refused: settings -----------------------------------------------------------------------------------


class Foreign:
    """An object of a class that is not ours."""

    def __init__(self, **settings):
        self.settings = settings


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"saver": "MmapSaver"}, InvalidInputError, "saver='MmapSaver' is not supported"),
        ({"score_computer": dict}, InvalidInputError, "score_computer=<class 'dict'> is not supported"),
        ({"task": "image_clasification"}, UnknownTaskError, "Did you mean 'image_classification'"),
        ({"train_set_size": 0}, InvalidInputError, "train_set_size must be an integer of at least 1, got 0"),
        ({"train_set_size": 2.0}, InvalidInputError, "train_set_size must be an integer"),
        ({"proj_dim": 0}, InvalidInputError, "proj_dim must be an integer of at least 1, got 0"),
        ({"device": "gpu"}, InvalidInputError, "Unknown device 'gpu'"),
        ({"grad_wrt": ["first.wieght"]}, InvalidInputError, r"Nearest known: \['first.weight'\]"),
        ({"grad_wrt": []}, InvalidInputError, "grad_wrt is empty"),
        ({"lambda_reg": -1.0}, InvalidInputError, "lambda_reg must be a finite number of at least 0, got -1"),
        (
            {"lambda_reg": None},
            InvalidInputError,
            "lambda_reg must be a finite number of at least 0, got None",
        ),
        (
            {"projector": Foreign()},
            InvalidInputError,
            r"projector is a .*Foreign, expected .*AbstractProjector",
        ),
        (
            {"gradient_computer": Foreign},
            InvalidInputError,
            r"gradient_computer returned a .*Foreign, expected",
        ),
    ],
)
def test_a_bad_setting_is_refused(tmp_path, changes, error, match):
    with refused(tmp_path, error, match):
        make_traker(tmp_path, **changes)


def test_making_a_traker_and_loading_a_checkpoint_write_nothing(tmp_path):
    loaded(tmp_path / "new")

    assert not (tmp_path / "new").exists()


# --- Refused: checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_id", [-1, True, "0", 1.0, None])
def test_a_model_id_is_an_integer_of_at_least_0(tmp_path, model_id):
    traker = finalized(tmp_path)
    (state,) = checkpoints(count=1)
    for call in (
        lambda: traker.load_checkpoint(state, model_id),
        lambda: traker.finalize_features([model_id]),
        lambda: traker.start_scoring_checkpoint("test", state, model_id, num_targets=M),
        lambda: traker.finalize_scores("test", [model_id]),
    ):
        with refused(tmp_path, InvalidInputError, "model_id must be an integer of at least 0, got"):
            call()


def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_loaded(tmp_path):
    traker = make_traker(tmp_path)
    before = copy.deepcopy(traker.model.state_dict())
    for checkpoint, match in ((None, "gave NoneType, expected a mapping"), ({}, "missing")):
        with pytest.raises(CheckpointError, match=match):
            traker.load_checkpoint(checkpoint, 0)

    for name, value in traker.model.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(StateError, match="No checkpoint is loaded"):
        traker.featurize(train_batch(), num_samples=N)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_prefixes_of_wrappers_are_ignored(tmp_path, expected, prefix):
    traker = make_traker(tmp_path)
    (state,) = checkpoints(count=1)
    featurize(traker, [{prefix + name: value for name, value in state.items()}], train_batch())

    assert_same(stored(traker), expected[0])


# --- Refused: batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ({}, "Exactly one of num_samples and inds should be specified, got neither"),
        (
            {"inds": [0, 1], "num_samples": 2},
            "Exactly one of num_samples and inds should be specified, got both",
        ),
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"num_samples": 3}, "The batch has 2 samples, but 3 rows were given"),
        ({"inds": [0]}, "The batch has 2 samples, but 1 rows were given"),
        ({"inds": [0, 0]}, r"Rows \[0\] are given more than once"),
        ({"inds": [0, N]}, rf"Rows \[{N}\] of the .* do not exist: there are rows 0 to"),
        ({"inds": [-1, 0]}, r"Rows \[-1\] of the .* do not exist"),
        ({"inds": [0.0, 1.0]}, "inds must be integers, got float64"),
        ({"inds": torch.tensor([True, False])}, "inds must be integers, got bool"),
    ],
)
def test_rows_that_do_not_fit_the_batch_are_refused(tmp_path, where, match):
    traker = scoring(tmp_path)
    traker.load_checkpoint(checkpoints(count=1)[0], 0)
    with refused(tmp_path, InvalidInputError, match):
        traker.featurize(part(train_batch(), slice(0, 2)), **where)

    traker.start_scoring_checkpoint("test", checkpoints(count=1)[0], 0, num_targets=M)
    with refused(tmp_path, InvalidInputError, match):
        traker.score(part(target_batch(), slice(0, 2)), **where)


def test_a_label_out_of_range_is_refused(tmp_path):
    traker, (images, labels) = loaded(tmp_path), train_batch()
    labels[4] = 99
    with refused(tmp_path, InvalidInputError, "99"):
        traker.featurize((images, labels), num_samples=N)


def test_rows_that_float16_cannot_hold_are_refused(tmp_path):
    (state,) = checkpoints(count=1)
    state = {name: value * (1e6 if name == "readout" else 1.0) for name, value in state.items()}
    traker = make_traker(tmp_path, use_half_precision=True)
    traker.load_checkpoint(state, 0)
    with refused(tmp_path, PrecisionError, r"float16 cannot hold.*TRAKer: use_half_precision=False"):
        traker.featurize(train_batch(), num_samples=N)


# --- Refused: order of steps -----------------------------------------------------------------------------


def test_steps_before_their_time_are_refused(tmp_path):
    traker = make_traker(tmp_path)
    (state,) = checkpoints(count=1)
    batch = part(train_batch(), slice(0, 2))

    def start():
        traker.start_scoring_checkpoint("test", state, 0, num_targets=M)

    def check(call, match):
        with refused(tmp_path, StateError, match):
            call()

    check(lambda: traker.featurize(batch, num_samples=2), "No checkpoint is loaded. Load a checkpoint")
    check(lambda: traker.score(batch, num_samples=2), "No scoring was started. Call start_scoring_checkpoint")
    check(traker.finalize_features, "There is no store at .*trak.zarr. Call featurize")
    check(start, "Model id 0 was never featurized")
    check(lambda: traker.finalize_scores("test"), "There is no store at")
    traker.load_checkpoint(state, 0)
    traker.featurize(batch, num_samples=2)
    check(traker.finalize_features, rf"Model id 0 has 2 of {N} train rows. Featurize the other rows")
    check(lambda: traker.finalize_features([3]), "Model id 3 was never featurized")
    check(start, f"Model id 0 has 2 of {N} train rows")
    traker.load_checkpoint(state, 0)
    traker.featurize(train_batch(), num_samples=N)
    check(start, r"Model id 0 is not finalized. Call finalize_features\(\)")
    traker.finalize_features()
    check(lambda: traker.finalize_scores("test"), "There is no experiment 'test' for model ids")
    check(lambda: traker.finalize_scores("test", []), r"There is no experiment 'test' for model ids \[\]")
    start()
    traker.score(part(target_batch(), slice(0, 2)), num_samples=2)
    check(lambda: traker.finalize_scores("test"), r"missing for model ids \[0\]")
    check(lambda: traker.finalize_scores("test", allow_skip=True), r"missing for model ids \[0\]")


def test_an_experiment_keeps_its_number_of_targets(tmp_path):
    traker = scoring(tmp_path)
    traker.score(target_batch(), num_samples=M)
    (state,) = checkpoints(count=1)

    with refused(tmp_path, InvalidInputError, f"'test' has {M} targets, got num_targets={M + 1}"):
        traker.start_scoring_checkpoint("test", state, 0, num_targets=M + 1)
    with refused(tmp_path, InvalidInputError, "num_targets must be an integer of at least 1, got 0"):
        traker.start_scoring_checkpoint("other", state, 0, num_targets=0)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("a/b", "exp_name must be a string without '/', got 'a/b'"),
        (3, "exp_name"),
        ("a b", "'a b' cannot be"),
    ],
)
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name, match):
    traker = finalized(tmp_path)
    with refused(tmp_path, InvalidInputError, match):
        traker.start_scoring_checkpoint(name, checkpoints(count=1)[0], 0, num_targets=M)


def test_rows_are_not_made_from_another_checkpoint_than_theirs(tmp_path):
    """Loading to score replaces the weights that featurize() was going to use."""
    traker = finalized(tmp_path)
    first, second = checkpoints(count=2)
    traker.load_checkpoint(second, 1)
    traker.start_scoring_checkpoint("test", first, 0, num_targets=M)
    with refused(
        tmp_path,
        StateError,
        r"has the weights of another checkpoint, not those for the train data \(model id 1\)",
    ):
        traker.featurize(train_batch(), num_samples=N)


def test_rows_are_not_made_from_weights_that_were_changed(tmp_path):
    traker = loaded(tmp_path)
    traker.featurize(part(train_batch(), slice(0, 10)), num_samples=10)
    optimizer = torch.optim.SGD(traker.model.parameters(), lr=0.1)
    images, labels = train_batch()
    nn.functional.cross_entropy(traker.model(images), labels).backward()
    optimizer.step()
    with refused(tmp_path, StateError, "weights of the model have changed since the checkpoint was loaded"):
        traker.featurize(part(train_batch(), slice(10, 20)), num_samples=10)


def test_rows_are_not_made_in_train_mode(tmp_path):
    traker = loaded(tmp_path)
    traker.model.first.train()
    with refused(tmp_path, StateError, "The model is in train mode"):
        traker.featurize(train_batch(), num_samples=N)


def test_a_closed_traker_refuses_every_verb(tmp_path):
    traker = scoring(tmp_path)
    (state,) = checkpoints(count=1)
    traker.close()
    for call in (
        lambda: traker.load_checkpoint(state, 0),
        lambda: traker.featurize(train_batch(), num_samples=N),
        traker.finalize_features,
        lambda: traker.start_scoring_checkpoint("test", state, 0, num_targets=M),
        lambda: traker.score(target_batch(), num_samples=M),
        lambda: traker.finalize_scores("test"),
    ):
        with refused(tmp_path, StateError, "This TRAKer was closed"):
            call()


def test_dependent_features_are_scored_by_the_pseudo_inverse(tmp_path, caplog):
    """The margins of three classes do not change when all logits do: a third of the features tells nothing new."""
    model = nn.Linear(4, 3)
    batch, targets = ((x, y % 3) for x, y in (train_batch(), target_batch()))
    traker = make_traker(tmp_path, model=model, projector=NoOpProjector())
    featurize(traker, [model.state_dict()], batch)
    traker.finalize_features()
    score(traker, [model.state_dict()], targets)
    scores = traker.finalize_scores("test")

    assert caplog.text.count("no inverse") == 1
    assert f"ranks [10], of 15 features from {N} train rows" in caplog.text
    expected = scores_of_pseudo_inverses(traker, 1)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_features_that_are_all_zero_are_refused(tmp_path):
    """The output does not depend on what is kept: there is nothing to score with."""
    model = make_model()
    traker = make_traker(tmp_path, model=model, lambda_reg=1.0)
    state = {name: value * (0.0 if name == "readout" else 1.0) for name, value in model.state_dict().items()}
    featurize(traker, [state], train_batch())
    with pytest.raises(SingularKernelError, match="is zero"):
        traker.finalize_features()


def test_del_grads_keeps_the_rows_and_says_so(tmp_path, caplog, expected):
    traker = make_traker(tmp_path)
    featurize(traker, checkpoints(count=1), train_batch())
    traker.finalize_features(del_grads=True)

    assert "so the rows stay" in caplog.text
    assert_same(stored(traker), expected[0])


@pytest.mark.cuda
@pytest.mark.parametrize("model_on", ["cpu", "cuda"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_model_and_kernels_may_be_on_different_devices(tmp_path, expected, model_on, device):
    """``device`` says where projections and kernels are computed; batches follow the model."""
    traker = make_traker(tmp_path, model=make_model().to(model_on), device=device)
    scores = run(traker, count=1)

    assert_same(scores, expected[1])
