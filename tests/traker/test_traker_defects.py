"""The defects of the original that must not come back; where it is cheap, the original is shown to have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.lib.format import open_memmap
from torch import nn
from traker_cases import (
    K,
    M,
    N,
    assert_scores_close,
    checkpoints,
    featurize,
    injected,
    make_model,
    make_original,
    make_traker,
    num_kept,
    original,
    part,
    quiet,
    refused,
    run,
    score,
    scores_of_pseudo_inverses,
    target_batch,
    train_batch,
)

import trak_lite.projectors
from trak_lite import test_install as check_installation
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError
from trak_lite.gradient_computers import IterativeGradientComputer
from trak_lite.modelout_functions import CLIPModelOutput, ImageClassificationModelOutput
from trak_lite.projectors import BasicProjector, NoOpProjector
from trak_lite.run.tables import FEATURES


def stored_features(traker, model_id=0):
    return traker._workspace.table(f"ckpt-{model_id}").read(FEATURES)


# --- Order of steps --------------------------------------------------------------------------------------


def test_a_half_done_batch_resumes(tmp_path):
    """The rows that are done are skipped, the others are made; the original fails on the shape."""
    batch, (state,) = train_batch(), checkpoints(count=1)
    whole, halved = make_traker(tmp_path / "whole"), make_traker(tmp_path / "halved")
    for traker in (whole, halved):
        traker.load_checkpoint(state, 0)
    whole.featurize(batch, num_samples=N)
    halved.featurize(part(batch, slice(10, 25)), inds=np.arange(10, 25))
    halved.featurize(batch, num_samples=N)

    np.testing.assert_allclose(stored_features(halved), stored_features(whole), rtol=1e-5, atol=1e-6)

    theirs = make_original(tmp_path / "original")
    theirs.load_checkpoint(state, 0)
    with quiet():
        theirs.featurize(part(batch, slice(0, 4)), inds=np.arange(4))
        with pytest.raises((RuntimeError, ValueError)):
            theirs.featurize(part(batch, slice(0, 8)), inds=np.arange(8))


def test_score_before_finalize_features_raises(tmp_path):
    """The original logs a line and goes on; its scores are NaN."""
    traker, states = make_traker(tmp_path / "ours"), checkpoints(count=1)
    featurize(traker, states, train_batch())
    with refused(tmp_path / "ours", StateError, "Model id 0 is not finalized. Call finalize_features"):
        score(traker, states, target_batch())

    theirs = make_original(tmp_path / "original")
    with quiet():
        featurize(theirs, states, train_batch())
        score(theirs, states, target_batch())
        assert np.isnan(theirs.finalize_scores("test")).all()


def test_allow_skip_leaves_out_ids_without_targets(tmp_path, caplog):
    states = checkpoints(count=2)
    traker = make_traker(tmp_path / "ours")
    featurize(traker, states, train_batch())
    traker.finalize_features()
    score(traker, states[1:], target_batch(), first_id=1)

    with pytest.raises(StateError, match=r"Targets of experiment 'test' are missing for model ids \[0\]"):
        traker.finalize_scores("test")
    scores = traker.finalize_scores("test", allow_skip=True)

    assert "left out model ids [0]" in caplog.text
    np.testing.assert_array_equal(scores, traker.finalize_scores("test", model_ids=[1]))

    theirs = make_original(tmp_path / "original", projector=original().projectors.NoOpProjector(device="cpu"))
    with quiet():
        featurize(theirs, states, train_batch())
        theirs.finalize_features()
        score(theirs, states[1:], target_batch(), first_id=1)
        with pytest.raises((RuntimeError, TypeError)):
            theirs.finalize_scores("test", allow_skip=True)


def test_a_second_finalize_features_changes_nothing_and_scoring_goes_on(tmp_path):
    """The original frees its projection matrix and misses it afterwards."""
    states = checkpoints(count=1)
    traker = make_traker(tmp_path / "ours")
    featurize(traker, states, train_batch())
    traker.finalize_features()
    score(traker, states, target_batch())
    first = traker.finalize_scores("test")
    traker.finalize_features()
    score(traker, states, target_batch(), exp_name="again")

    np.testing.assert_array_equal(traker.finalize_scores("again"), first)

    theirs = make_original(tmp_path / "original")
    with quiet():
        featurize(theirs, states, train_batch())
        theirs.finalize_features()
        with pytest.raises(AttributeError, match="proj_matrix"):
            score(theirs, states, target_batch())
        with pytest.raises(AttributeError, match="proj_matrix"):
            theirs.finalize_features()


def test_adding_a_checkpoint_to_a_finished_experiment_keeps_its_scores_right(tmp_path):
    """The original opens the scores anew when a checkpoint comes, which zeroes what is there."""
    states = checkpoints(count=2)
    num_params = num_kept(make_model(), None)
    projector = injected(trak_lite.projectors.AbstractProjector, num_params)
    at_once = run(make_traker(tmp_path / "at_once", projector=projector), count=2)
    traker = make_traker(tmp_path / "ours", projector=projector)
    alone = run(traker, count=1)
    kept = alone.copy()
    for step in (featurize, score):
        step(traker, states[1:], train_batch() if step is featurize else target_batch(), first_id=1)
        traker.finalize_features()

    np.testing.assert_array_equal(traker.finalize_scores("test", model_ids=[0]), kept)
    np.testing.assert_array_equal(traker.finalize_scores("test"), at_once)
    np.testing.assert_array_equal(alone, kept)

    theirs = make_original(
        tmp_path / "original", projector=injected(original().projectors.AbstractProjector, num_params)
    )
    assert run(theirs, count=1).any()
    with quiet():
        featurize(theirs, states[1:], train_batch(), first_id=1)
        theirs.finalize_features(model_ids=[1])
        theirs.start_scoring_checkpoint("test", states[1], 1, num_targets=M)
    assert not open_memmap(tmp_path / "original" / "scores" / "test.mmap", mode="r").any()


# --- Mixing what does not belong together ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"projector_seed": 1}, r"projector\.seed is 0 there, 1 here"),
        ({"use_half_precision": True}, "dtype is 'float32' there, 'float16' here"),
        ({"grad_wrt": ["second.weight"]}, r"parameters\.first\.weight is \[2, 4\] there, 'absent' here"),
        ({"proj_dim": K - 1}, f"feature_width is {K} there, {K - 1} here"),
        ({"projector": NoOpProjector()}, r"projector\.kind is 'dense_rademacher.*' there, 'identity' here"),
        ({"train_set_size": N + 1}, rf"dataset\.num_rows is {N} there, {N + 1} here"),
        ({"task": ImageClassificationModelOutput(2.0)}, r"task\.settings\.temperature is 1\.0 there, 2\.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_resuming_with_another_setting_is_refused_naming_the_key(tmp_path, changes, key):
    traker = make_traker(tmp_path)
    traker.load_checkpoint(checkpoints(count=1)[0], 0)
    traker.featurize(part(train_batch(), slice(0, 4)), num_samples=4)
    traker.close()

    with refused(tmp_path, ManifestMismatchError, key):
        make_traker(tmp_path, **changes)


def test_the_original_resumes_with_another_seed_and_other_parameters_without_a_word(tmp_path):
    make_original(tmp_path)

    make_original(tmp_path, projector_seed=1, grad_wrt=["second.weight"])


def test_resuming_with_another_checkpoint_is_refused_naming_the_weights(tmp_path):
    """The model then holds the other weights, so nothing can be put before a checkpoint is loaded again."""
    first, second = checkpoints(count=2)
    traker = make_traker(tmp_path)
    traker.load_checkpoint(first, 0)
    traker.featurize(part(train_batch(), slice(0, 4)), num_samples=4)

    with refused(
        tmp_path, ManifestMismatchError, "Model id 0 was featurized with other weights: the stored digest"
    ):
        traker.load_checkpoint(second, 0)
    with refused(tmp_path, StateError, "No checkpoint is loaded"):
        traker.featurize(part(train_batch(), slice(4, 8)), inds=np.arange(4, 8))

    theirs = make_original(tmp_path / "original")
    for state in (first, second):
        theirs.load_checkpoint(state, 0)


def test_scoring_with_another_checkpoint_is_refused_naming_the_weights(tmp_path):
    first, second = checkpoints(count=2)
    traker = make_traker(tmp_path)
    featurize(traker, [first], train_batch())
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", first, 0, num_targets=M)

    with refused(tmp_path, ManifestMismatchError, "Model id 0 was featurized with other weights"):
        traker.start_scoring_checkpoint("test", second, 0, num_targets=M)
    with refused(tmp_path, StateError, "No scoring was started"):
        traker.score(target_batch(), num_samples=M)


def test_a_batch_of_one_is_refused_for_more_rows(tmp_path):
    """The original writes the one gradient to all of them."""
    traker, (state,) = make_traker(tmp_path / "ours"), checkpoints(count=1)
    traker.load_checkpoint(state, 0)
    one = part(train_batch(), slice(0, 1))
    with refused(tmp_path, InvalidInputError, "The batch has 1 samples, but 4 rows were given"):
        traker.featurize(one, num_samples=4)

    theirs = make_original(tmp_path / "original")
    theirs.load_checkpoint(state, 0)
    theirs.featurize(one, num_samples=4)
    rows = theirs.saver.current_store["grads"][:4]
    assert rows[0].any()
    assert (rows == rows[0]).all()


def test_block_100_of_id_0_differs_from_block_0_of_id_1():
    gradient = torch.eye(64)

    def columns(make, model_id, width):
        projector = make(grad_dim=64, proj_dim=width, seed=0, proj_type="normal", device="cpu", block_size=1)
        return projector.project(gradient, model_id=model_id)

    first, second = columns(BasicProjector, 0, 120), columns(BasicProjector, 1, 120)
    assert (first.T @ second).abs().max() < 0.9 * 64

    theirs = original().projectors.BasicProjector
    assert torch.equal(columns(theirs, 0, 101)[:, 100], columns(theirs, 1, 1)[:, 0])


# --- Arguments -------------------------------------------------------------------------------------------


def test_a_torch_device_and_a_string_are_the_same(tmp_path):
    named = run(make_traker(tmp_path / "named", device="cpu"), count=1)
    meant = run(make_traker(tmp_path / "meant", device=torch.device("cpu")), count=1)
    found = run(make_traker(tmp_path / "found", device="auto"), count=1)

    np.testing.assert_array_equal(named, meant)
    np.testing.assert_array_equal(named, found)

    kinds = {
        make_original(tmp_path / f"{device!r}", device=device).projector.proj_type.value
        for device in ("cpu", torch.device("cpu"))
    }
    assert kinds == {"normal", "rademacher"}


def test_the_task_may_be_a_class(tmp_path):
    by_name = run(make_traker(tmp_path / "name"), count=1)
    by_class = run(make_traker(tmp_path / "class", task=ImageClassificationModelOutput), count=1)

    np.testing.assert_array_equal(by_name, by_class)

    theirs = make_original(
        tmp_path / "original", task=original().modelout_functions.ImageClassificationModelOutput
    )
    with pytest.raises(TypeError):
        run(theirs, count=1)


def test_dict_batches_are_accepted(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, pixels):
            return self.inner(pixels)

    (images, labels), model = train_batch(), Named()
    rows = []
    for name, batch in (("dict", {"pixels": images, "labels": labels}), ("tuple", (images, labels))):
        traker = make_traker(tmp_path / name, model=model)
        traker.load_checkpoint(model.state_dict(), 0)
        traker.featurize(batch, num_samples=N)
        rows.append(stored_features(traker))

    np.testing.assert_array_equal(*rows)

    theirs = make_original(tmp_path / "original", model=model)
    theirs.load_checkpoint(model.state_dict(), 0)
    with pytest.raises((TypeError, ValueError)):
        theirs.featurize({"pixels": images, "labels": labels}, num_samples=N)


def test_the_installation_test_passes_on_a_cpu_only_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    check_installation()
    check_installation(use_fast_jl=True)

    if not torch.backends.cuda.is_built():
        with pytest.raises((AssertionError, RuntimeError)):
            original().test_install()


# --- The iterative computer ------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_wrt", [None, ["second.weight", "first.bias"]], ids=["frozen", "grad_wrt"])
def test_the_iterative_computer_honours_grad_wrt_and_frozen_parameters(tmp_path, grad_wrt):
    """It stores the rows that the functional computer stores; the original's raises."""
    settings = {"grad_wrt": grad_wrt, "projector": NoOpProjector()}
    functional = make_traker(tmp_path / "functional", **settings)
    iterative = make_traker(tmp_path / "iterative", gradient_computer=IterativeGradientComputer, **settings)
    for traker in (functional, iterative):
        featurize(traker, checkpoints(count=1), train_batch())
    np.testing.assert_allclose(stored_features(iterative), stored_features(functional), rtol=1e-5, atol=1e-6)

    model = make_model().requires_grad_(grad_wrt is not None)
    theirs = make_original(
        tmp_path / "original",
        model=model,
        task="iterative_image_classification",
        gradient_computer=original().gradient_computers.IterativeGradientComputer,
        **(settings | {"projector": original().projectors.NoOpProjector(device="cpu")}),
    )
    with quiet(), pytest.raises(RuntimeError):
        featurize(theirs, checkpoints(count=1), train_batch())


def test_the_iterative_computer_keeps_float64(tmp_path):
    images, labels = train_batch()
    batch = (images[:3].double(), labels[:3])

    def gradients(package, task):
        model = make_model().double().requires_grad_(True)
        computer = package.gradient_computers.IterativeGradientComputer(
            model, task, num_kept(model, None), torch.float32, "cpu"
        )
        return computer.compute_per_sample_grad(batch)

    ours = gradients(trak_lite, ImageClassificationModelOutput())
    assert {grad.dtype for grad in ours.values()} == {torch.float64}

    theirs = gradients(original(), original().modelout_functions.IterativeImageClassificationModelOutput())
    assert theirs.dtype == torch.float32


# --- Numbers ---------------------------------------------------------------------------------------------


def test_fewer_rows_than_features_without_lambda_give_scores_that_mean_something(tmp_path, caplog):
    """Those of the pseudo-inverse, with one warning; the original's change when the rows come in reverse."""
    states, few = checkpoints(count=2), part(train_batch(), slice(0, K - 2))
    found = []
    for name, order in (("forth", slice(None)), ("back", torch.arange(K - 3, -1, -1))):
        caplog.clear()
        traker = make_traker(tmp_path / f"our_{name}", train_set_size=K - 2)
        featurize(traker, states, part(few, order))
        traker.finalize_features()
        score(traker, states, target_batch())
        found.append(traker.finalize_scores("test")[order])
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert f"model ids [0, 1] have no inverse at lambda_reg=0: ranks [{K - 2}, {K - 2}]" in warning
        assert f"of {K} features from {K - 2} train rows. Their pseudo-inverses are used" in warning
        assert "set lambda_reg > 0" in warning
        expected = scores_of_pseudo_inverses(traker, 2)[order]
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-4 * np.abs(found[0]).max())

    caplog.clear()
    again = make_traker(tmp_path / "our_forth", train_set_size=K - 2)
    np.testing.assert_array_equal(again.finalize_scores("test"), found[0])
    damped = make_traker(tmp_path / "damped", train_set_size=K - 2, lambda_reg=0.1)
    featurize(damped, states, few)
    damped.finalize_features()
    assert caplog.text == ""

    states, found = states[:1], []
    for name, order in (("forth", slice(None)), ("back", torch.arange(K - 3, -1, -1))):
        projector = injected(original().projectors.AbstractProjector, num_kept(make_model(), None))
        theirs = make_original(tmp_path / name, train_set_size=K - 2, projector=projector)
        with quiet():
            featurize(theirs, states, part(few, order))
            theirs.finalize_features()
            score(theirs, states, target_batch())
            found.append(np.array(theirs.finalize_scores("test"))[order])
    assert np.isfinite(found).all()
    assert np.abs(found[0] - found[1]).max() > 0.05 * np.abs(found[0]).max()


def test_a_float16_gram_does_not_overflow(tmp_path):
    """Sums of squares beyond 65504: the original's are infinite, and its scores are not numbers."""
    states = [
        {name: value * (400.0 if name == "readout" else 1.0) for name, value in state.items()}
        for state in checkpoints(count=1)
    ]
    num_params = num_kept(make_model(), None)
    results = []
    for half in (True, False):
        projector = injected(trak_lite.projectors.AbstractProjector, num_params)
        traker = make_traker(tmp_path / f"{half}", use_half_precision=half, projector=projector)
        featurize(traker, states, train_batch())
        assert (stored_features(traker).astype(np.float64) ** 2).sum(0).max() > 65504
        traker.finalize_features()
        score(traker, states, target_batch())
        results.append(traker.finalize_scores("test"))
    assert_scores_close(*results, rtol=5e-3)

    theirs = make_original(
        tmp_path / "original",
        use_half_precision=True,
        projector=injected(original().projectors.AbstractProjector, num_params),
    )
    with quiet():
        featurize(theirs, states, train_batch())
        try:
            theirs.finalize_features()
            score(theirs, states, target_batch())
            broken = not np.isfinite(theirs.finalize_scores("test")).all()
        except RuntimeError:  # some builds of torch refuse to invert infinity
            broken = True
    assert broken


# --- CLIP ------------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """A contrastive model with the original's call: ``model(image=..., text=...)``."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(4, 3)
        self.text = nn.Linear(5, 3)

    def forward(self, image, text):
        return self.image(image), self.text(text), torch.tensor(2.0)


def pairs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 5, generator=generator)


def pair_model(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Pairs()


def clip_traker(folder, *, count=24, **changes):
    task = CLIPModelOutput(simulated_batch_size=6)
    return make_traker(folder, model=pair_model(), task=task, train_set_size=count, proj_dim=8, **changes)


def clip_original(folder, count):
    task = original().modelout_functions.CLIPModelOutput(simulated_batch_size=6)
    model = pair_model()
    return make_original(folder, model=model, task=task, train_set_size=count, proj_dim=8)


@pytest.fixture
def original_clip(monkeypatch):
    """The original keeps embeddings in the class; they are put back after the test."""
    task = original().modelout_functions.CLIPModelOutput
    for name in ("image_embeddings", "text_embeddings", "num_computed_embeddings", "sim_batch_size"):
        monkeypatch.setattr(task, name, getattr(task, name))
    return task


def give_embeddings(task, count=30):
    image, text, _ = pair_model()(*pairs(count, seed=9))
    task.image_embeddings, task.text_embeddings = image.detach(), text.detach()
    task.num_computed_embeddings = count


def test_clip_works_for_batches_of_more_than_one(tmp_path, original_clip):
    traker, batch = clip_traker(tmp_path / "ours"), pairs(24, seed=1)
    state = dict(pair_model(3).state_dict())
    traker.load_checkpoint(state, 0)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)], batch_size=30, embedding_dim=3, size=30)
    traker.featurize(batch, num_samples=24)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", state, 0, num_targets=5)
    traker.score(pairs(5, seed=2), num_samples=5)

    assert np.abs(traker.finalize_scores("test")).min() > 0

    theirs = clip_original(tmp_path / "original", 24)
    theirs.load_checkpoint(state, 0)
    give_embeddings(original_clip)
    with quiet(), pytest.raises((RuntimeError, ValueError)):
        theirs.featurize(batch, num_samples=24)


def test_clip_has_a_q_for_a_batch_of_one(tmp_path, original_clip):
    """With a batch of one, the original's softmax over the batch is 1, and q is 0."""
    traker, batch = clip_traker(tmp_path / "ours", count=1), pairs(1, seed=1)
    traker.load_checkpoint(traker.model.state_dict(), 0)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)])
    traker.featurize(batch, num_samples=1)
    assert traker._workspace.table("ckpt-0").read("out_to_loss")[0] > 0.01

    theirs = clip_original(tmp_path / "original", 1)
    theirs.load_checkpoint(theirs.model.state_dict(), 0)
    give_embeddings(original_clip)
    theirs.featurize(batch, num_samples=1)
    assert theirs.saver.current_store["out_to_loss"][0] == 0


def test_clip_draws_negatives_uniformly(original_clip, monkeypatch):
    """Over 300 seeds every pair is drawn equally often; the original weighs a pair by its place, 0 for the first."""
    numbered = torch.arange(12.0).reshape(12, 1)
    counts = torch.zeros(12)
    for seed in range(300):
        task = CLIPModelOutput(simulated_batch_size=6, seed=seed)
        task.set_embeddings(numbered, numbered)
        counts[task._negatives[0].flatten().long()] += 1
    # each count is binomial(300, 1/2): mean 150, standard deviation 8.7
    assert (counts - 150).abs().max() < 4 * 8.7

    asked = []
    draw = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda **given: asked.append(given["input"]) or draw(**given))
    original_clip(simulated_batch_size=6)
    give_embeddings(original_clip)
    model = pair_model()
    image, text = pairs(1, seed=1)
    original_clip.get_output(model, dict(model.named_parameters()), {}, image[0], text[0])
    assert asked[0].tolist() == list(range(30))


def test_clip_embeddings_belong_to_the_instance(original_clip):
    first, second = CLIPModelOutput(simulated_batch_size=6), CLIPModelOutput(simulated_batch_size=6)
    first.set_embeddings(*pair_model()(*pairs(30, seed=9))[:2])
    assert first.state_digest() is not None
    assert second.state_digest() is None

    one, other = original_clip(simulated_batch_size=6), original_clip(simulated_batch_size=6)
    give_embeddings(type(one))
    assert other.image_embeddings is one.image_embeddings is not None


def test_rows_of_other_negatives_are_refused_naming_the_task_state(tmp_path):
    """Negatives may be set after the checkpoint is loaded, and are part of what its rows are made from."""
    traker, batch = clip_traker(tmp_path), pairs(24, seed=1)
    state = dict(traker.model.state_dict())
    traker.load_checkpoint(state, 0)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)])
    traker.featurize(part(batch, slice(0, 12)), num_samples=12)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=10)])
    with refused(tmp_path, ManifestMismatchError, "task_state is '.*' there, '.*' here"):
        traker.featurize(part(batch, slice(12, 24)), num_samples=12)

    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)])
    traker.featurize(part(batch, slice(12, 24)), num_samples=12)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", state, 0, num_targets=5)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=10)])
    with refused(tmp_path, ManifestMismatchError, "Model id 0 .*task_state is '.*' there, '.*' here"):
        traker.score(pairs(5, seed=2), num_samples=5)
