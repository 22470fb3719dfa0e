"""What TRAKer refuses, where code that was written for the original catches it, and not a byte changed on disk."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from traker_cases import (
    M,
    N,
    at,
    checkpoints,
    make_model,
    make_original,
    make_traker,
    original,
    part,
    quiet,
    refused,
    target_batch,
    train_batch,
)

import trak_lite
from trak_lite import cli
from trak_lite.errors import (
    CheckpointError,
    CorruptStoreError,
    InvalidInputError,
    ManifestMismatchError,
    PrecisionError,
    StateError,
    UnknownTaskError,
)

FIRST, SECOND = checkpoints(count=2)
ONE, TWO = part(train_batch(), slice(0, 1)), part(train_batch(), slice(0, 2))
WRONG_LABEL = (train_batch()[0], torch.full((N,), 99))
LARGE = FIRST | {"readout": 1e6 * FIRST["readout"]}


class Foreign:
    def __init__(self, **settings):
        self.settings = settings


@pytest.mark.quick
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
        ({"lambda_reg": None}, InvalidInputError, "lambda_reg must be a finite number .* got None"),
        ({"projector": Foreign()}, InvalidInputError, "projector is a .*Foreign, expected .*AbstractProj"),
        ({"gradient_computer": int}, InvalidInputError, "gradient_computer is the class int, expected"),
        (
            {"gradient_computer": partial(int)},
            InvalidInputError,
            "gradient_computer is the class int, expected",
        ),
        ({"gradient_computer": lambda **_: Foreign()}, InvalidInputError, "returned a Foreign, expected"),
    ],
)
def test_a_bad_setting_is_refused(tmp_path, changes, error, match):
    with refused(tmp_path, error, match):
        make_traker(tmp_path, **changes)


def load_otherwise(traker):
    """Loading to score replaces the weights that featurize() was going to use."""
    traker.load_checkpoint(SECOND, 1)
    traker.start_scoring_checkpoint("test", FIRST, 0, num_targets=M)


def start(traker, exp_name="test", state=FIRST, model_id=0, num_targets=M):
    traker.start_scoring_checkpoint(exp_name, state, model_id, num_targets=num_targets)


def featurize_all(traker):
    traker.featurize(train_batch(), num_samples=N)


def score_all(traker):
    traker.score(target_batch(), num_samples=M)


STEPS = [
    ("new", featurize_all, StateError, r"Load a checkpoint using traker\.load_checkpoint before featurizing"),
    ("new", score_all, StateError, "No scoring was started. Call start_scoring_checkpoint"),
    ("new", lambda t: t.finalize_features(), StateError, "There is no store at .*trak.zarr. Call featurize"),
    ("new", start, StateError, "Model id 0 was never featurized"),
    ("new", lambda t: t.finalize_scores("test"), StateError, "There is no store at"),
    ("new", lambda t: t.load_checkpoint(None, 0), CheckpointError, "gave NoneType, expected a mapping"),
    ("new", lambda t: t.load_checkpoint({}, 0), CheckpointError, "missing"),
    ("partly", lambda t: t.finalize_features(), StateError, f"Model id 0 has 2 of {N} train rows. Featurize"),
    ("partly", start, StateError, f"Model id 0 has 2 of {N} train rows"),
    ("partly", lambda t: t.finalize_features([3]), StateError, "Model id 3 was never featurized"),
    ("featurized", start, StateError, r"Model id 0 is not finalized. Call finalize_features\(\)"),
    ("finalized", lambda t: t.finalize_scores("test"), StateError, "There is no experiment 'test' for"),
    ("finalized", lambda t: t.finalize_scores("test", []), StateError, r"no experiment .* model ids \[\]"),
    ("scoring partly", lambda t: t.finalize_scores("test"), StateError, r"missing for model ids \[0\]"),
    ("scoring partly", lambda t: t.finalize_scores("test", allow_skip=True), StateError, r"missing .* \[0\]"),
    ("scored", lambda t: start(t, num_targets=M + 1), InvalidInputError, f"'test' has {M} targets, got num"),
    ("scored", lambda t: start(t, "b", num_targets=0), InvalidInputError, "num_targets must be .* got 0"),
    ("finalized", lambda t: start(t, "a/b"), InvalidInputError, "a string without '/', got 'a/b'"),
    ("finalized", lambda t: start(t, 3), InvalidInputError, "exp_name"),
    ("finalized", lambda t: start(t, "a b"), InvalidInputError, "'a b' cannot be"),
    ("loaded otherwise", featurize_all, StateError, r"another checkpoint, not those .* \(model id 1\)"),
    ("trained on", featurize_all, StateError, "weights of the model have changed since the checkpoint was"),
    ("extended", featurize_all, StateError, "weights of the model have changed since the checkpoint was"),
    ("in train mode", featurize_all, StateError, "The model is in train mode"),
    ("partly", lambda t: t.load_checkpoint(SECOND, 0), ManifestMismatchError, "with other weights: the stor"),
    ("scoring", lambda t: start(t, state=SECOND), ManifestMismatchError, "0 was featurized with other wei"),
    ("loaded", lambda t: t.featurize(WRONG_LABEL, num_samples=N), InvalidInputError, "99"),
    ("half precision", featurize_all, PrecisionError, r"float16 cannot hold.*TRAKer: use_half_precision=False"),
]  # fmt: skip
PREPARED = {
    "partly": ("loaded", lambda t: t.featurize(TWO, num_samples=2)),
    "scoring partly": ("scoring", lambda t: t.score(part(target_batch(), slice(0, 2)), num_samples=2)),
    "loaded otherwise": ("finalized", load_otherwise),
    "trained on": ("loaded", lambda t: nn.init.zeros_(t.model.first.weight)),
    "extended": ("loaded", lambda t: t.model.register_parameter("more", nn.Parameter(torch.ones(3)))),
    "half precision": ("new", lambda t: t.load_checkpoint(LARGE, 0)),
    "in train mode": ("loaded", lambda t: t.model.first.train()),
}


@pytest.mark.parametrize(("stage", "call", "error", "match"), STEPS)
def test_a_step_out_of_place_is_refused(tmp_path, stage, call, error, match):
    first, prepare = PREPARED.get(stage, (stage, lambda traker: None))
    traker = at(first, make_traker(tmp_path, use_half_precision=stage == "half precision"))
    prepare(traker)
    with refused(tmp_path, error, match):
        call(traker)


@pytest.mark.parametrize(
    ("match", "stage", "load", "error", "go_on"),
    [
        ("No checkpoint is", "new", lambda t: t.load_checkpoint({}, 0), CheckpointError, featurize_all),
        ("No c", "featurized", lambda t: t.load_checkpoint(SECOND, 0), ManifestMismatchError, featurize_all),
        ("No scoring was s", "scoring", lambda t: start(t, state=SECOND), ManifestMismatchError, score_all),
    ],
)
def test_after_a_refused_checkpoint_nothing_is_put(tmp_path, match, stage, load, error, go_on):
    traker = at(stage, make_traker(tmp_path))
    before = copy.deepcopy(traker.model.state_dict())
    with pytest.raises(error):
        load(traker)
    if error is CheckpointError:
        torch.testing.assert_close(dict(traker.model.state_dict()), dict(before), rtol=0, atol=0)
    with refused(tmp_path, StateError, match):
        go_on(traker)


@pytest.mark.parametrize("model_id", [-1, True, "0", 1.0, None])
def test_a_model_id_is_an_integer_of_at_least_0(tmp_path, model_id):
    traker = at("finalized", make_traker(tmp_path))
    for call in (
        lambda: traker.load_checkpoint(FIRST, model_id),
        lambda: traker.finalize_features([model_id]),
        lambda: start(traker, model_id=model_id),
        lambda: traker.finalize_scores("test", [model_id]),
    ):
        with refused(tmp_path, InvalidInputError, "model_id must be an integer of at least 0, got"):
            call()


def test_rows_that_do_not_fit_the_batch_are_refused(tmp_path):
    """A batch of one too, whose gradient the original writes to all rows."""
    traker = at("scoring", make_traker(tmp_path))
    traker.load_checkpoint(FIRST, 0)
    start(traker)
    for match, batch, where in (
        ("Exactly one of num_samples and inds should be specified, got neither", TWO, {}),
        ("Exactly one .* should be specified, got both", TWO, {"inds": [0, 1], "num_samples": 2}),
        ("num_samples must be an integer of at least 1, got 0", TWO, {"num_samples": 0}),
        ("The batch has 2 samples, but num_samples is 3. Pass num_samples=2.", TWO, {"num_samples": 3}),
        ("The batch has 1 samples, but num_samples is 4. Pass num_samples=1.", ONE, {"num_samples": 4}),
        ("The batch has 2 samples, but inds has 1 rows. Give one row per sample.", TWO, {"inds": [0]}),
        (r"Rows \[0\] are given more than once", TWO, {"inds": [0, 0]}),
        (rf"Rows \[{N}\] of the .* do not exist: there are rows 0 to", TWO, {"inds": [0, N]}),
        (r"Rows \[-1\] of the .* do not exist", TWO, {"inds": [-1, 0]}),
        ("inds must be integers, got float64", TWO, {"inds": [0.0, 1.0]}),
        ("inds must be integers, got bool", TWO, {"inds": torch.tensor([True, False])}),
    ):
        for put in (traker.featurize, traker.score):
            with refused(tmp_path, InvalidInputError, match):
                put(batch, **where)


def test_a_closed_traker_refuses_every_verb(tmp_path):
    traker = at("scoring", make_traker(tmp_path))
    traker.close()
    for call in (
        lambda: traker.load_checkpoint(FIRST, 0), lambda: featurize_all(traker), traker.finalize_features,
        lambda: start(traker), lambda: score_all(traker), lambda: traker.finalize_scores("test"),
    ):  # fmt: skip
        with refused(tmp_path, StateError, "This TRAKer was closed"):
            call()


BUILT_IN = [
    (AssertionError, "new", featurize_all),
    (AssertionError, "loaded", lambda t: t.featurize(train_batch())),
    (AssertionError, "loaded", lambda t: t.featurize(train_batch(), inds=np.arange(N), num_samples=N)),
    (AssertionError, "scoring", lambda t: t.score(target_batch())),
    (AssertionError, "scoring", lambda t: t.score(target_batch(), inds=np.arange(M), num_samples=M)),
    (Exception, "loaded", lambda t: t.finalize_features()),
    (Exception, "loaded", lambda t: t.finalize_features([3])),
    (Exception, "loaded", lambda t: start(t, model_id=3)),
    (AssertionError, "scoring", lambda t: t.finalize_scores("test", model_ids=[])),
    (ValueError, "scoring", lambda t: t.finalize_scores("other")),
    (RuntimeError, "new", lambda t: t.load_checkpoint({"weight": torch.zeros(1)}, model_id=0)),
    (AssertionError, "featurized", {"proj_dim": 13}),
    (AssertionError, "featurized", {"train_set_size": N + 1}),
    (KeyError, "new", {"task": "image_clasification"}),
    (KeyError, "new", {"grad_wrt": ["nothing.weight"]}),
]
"""Stage; call, or settings of a second TRAKer in the same folder; what is built in of the class of the error.

Of the original's own class ``ModelIDException`` nothing is built in but ``Exception``.
"""


@pytest.mark.parametrize(("expected", "stage", "call"), BUILT_IN)
def test_an_error_of_the_original_is_caught_as_there(tmp_path, stage, call, expected):
    original()
    raised = []
    for make, name in ((make_original, "theirs"), (make_traker, "ours")):
        with quiet():
            traker = at(stage, make(tmp_path / name))
            with pytest.raises(expected) as caught:
                make(tmp_path / name, **call) if isinstance(call, dict) else call(traker)
        raised.append(caught.value)
    theirs, ours = raised
    assert next(cls for cls in type(theirs).__mro__ if cls.__module__ == "builtins") is expected
    assert not str(ours).startswith(("'", '"'))


def test_errors_of_the_originals_parts_are_caught_as_there():
    theirs = original()
    g = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 1)}
    image, text, model = torch.zeros(2), torch.zeros(2), nn.Linear(2, 2)
    for package in (theirs, trak_lite):
        with pytest.raises(AssertionError):
            package.utils.vectorize(g, device="cpu")
        with pytest.raises(KeyError):
            package.projectors.BasicProjector(4, 2, 0, "other", "cpu").project(torch.zeros(1, 4), 0)
        task = package.modelout_functions.CLIPModelOutput(simulated_batch_size=2)
        with pytest.raises(AssertionError):
            task.get_output(model, {}, {}, image, text)


def test_targets_of_two_model_ids_are_the_same_samples_in_the_same_order(tmp_path):
    """The scores are means over model ids, target by target."""
    traker = make_traker(tmp_path)
    for number, weights in enumerate((FIRST, SECOND)):
        traker.load_checkpoint(weights, model_id=number)
        traker.featurize(train_batch(), num_samples=N)
    traker.finalize_features()
    batch = target_batch()
    for number, (weights, order) in enumerate(((FIRST, range(M)), (SECOND, range(M - 1, -1, -1)))):
        traker.start_scoring_checkpoint("shuffled", weights, number, M)
        traker.score(tuple(values[list(order)] for values in batch), num_samples=M)
    with pytest.raises(
        InvalidInputError, match=r"Targets \[0, 1, .*'shuffled' are other samples for model id 1"
    ):
        traker.finalize_scores("shuffled")
    assert traker.finalize_scores("shuffled", model_ids=[0]).shape == (N, M)


def test_a_store_of_traker_is_not_opened_as_one_of_an_attributor(tmp_path, capsys):
    at("finalized", make_traker(tmp_path))
    with pytest.raises(CorruptStoreError, match=r"does not hold the settings of an attributor.* with TRAKer"):
        trak_lite.Attributor.open(tmp_path / "trak.zarr", make_model())
    assert cli.main(["report", str(tmp_path / "trak.zarr")]) == 2
    assert "does not contain a layout and a method" in capsys.readouterr().err
