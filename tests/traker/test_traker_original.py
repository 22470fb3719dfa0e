"""Code written for the original runs after a change of its imports: its tests, its examples, classes of one's own."""

from __future__ import annotations

import functools
import importlib
import logging

import numpy as np
import pytest
import torch
from numpy.lib.format import open_memmap
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from traker_cases import (
    CLASSES,
    N,
    assert_scores_close,
    at,
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
    stored,
    target_batch,
    train_batch,
)

import trak_lite
import trak_lite.projectors
from trak_lite import Attributor, TRAKer
from trak_lite import test_install as check_installation
from trak_lite.errors import ManifestMismatchError, UnsupportedModelError
from trak_lite.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_lite.modelout_functions import AbstractModelOutput, CLIPModelOutput, ImageClassificationModelOutput
from trak_lite.projectors import AbstractProjector, BasicProjector, NoOpProjector, ProjectionType


@pytest.mark.parametrize(
    "module", ["traker", "gradient_computers", "modelout_functions", "projectors", "utils"]
)
def test_public_names_are_where_the_original_has_them(module):
    """But for helpers of its score computer."""
    original()
    theirs = importlib.import_module(f"trak.{module}")
    own = {
        name for name, value in vars(theirs).items() if getattr(value, "__module__", "") == theirs.__name__
    }
    left_out = {name for name in own if name.startswith(("_", "get_matrix_mult", "get_free", "get_output_m"))}
    expected = own - left_out | ({"TASK_TO_MODELOUT"} if module == "modelout_functions" else set())

    assert expected
    assert expected <= set(importlib.import_module(f"trak_lite.{module}").__all__)


def test_the_original_arguments_and_attributes_are_there(tmp_path):
    theirs, ours = make_original(tmp_path / "original"), make_traker(tmp_path / "ours")

    for name in ("proj_dim", "train_set_size", "lambda_reg", "dtype", "num_params_for_grad", "proj_seed"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert float(theirs.normalize_factor) == pytest.approx(ours.normalize_factor)
    verbs = ("load_checkpoint", "featurize", "finalize_features", "start_scoring_checkpoint", "score")
    for verb in (*verbs, "__init__", "finalize_scores", "init_projector"):
        own, expected = (getattr(type(traker), verb).__code__ for traker in (ours, theirs))
        assert own.co_varnames[: own.co_argcount] == expected.co_varnames[: expected.co_argcount]


def test_the_installation_test_passes_on_a_cpu_only_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    check_installation()
    check_installation(use_fast_jl=True)


def test_block_100_of_id_0_differs_from_block_0_of_id_1():
    """Those of the original are equal."""
    made = [
        BasicProjector(grad_dim=64, proj_dim=120, seed=0, proj_type="normal", device="cpu", block_size=1)
        for _ in range(2)
    ]
    first, second = (
        projector.project(torch.eye(64), model_id=number) for number, projector in enumerate(made)
    )
    assert (first.T @ second).abs().max() < 0.9 * 64


def network():
    """In train mode, as torchvision makes its own."""
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def narrow():
    width = sum(p.numel() for p in network().parameters())
    return BasicProjector(grad_dim=width, proj_dim=20, seed=0, proj_type="rademacher", device="cpu")


CONSTRUCTED = {
    "a projector": lambda: {"projector": narrow()},
    "a task of one's own": lambda: {"projector": narrow(), "task": ImageClassificationModelOutput},
    "the identity": lambda: {"projector": NoOpProjector(device="cpu")},
    "an iterative computer": lambda: {
        "projector": NoOpProjector(),
        "proj_dim": 0,
        "task": "iterative_image_classification",
        "use_half_precision": False,
        "gradient_computer": IterativeGradientComputer,
    },
    "a largest batch": lambda: {"proj_max_batch_size": 16},
    "the last layer": lambda: {"grad_wrt": ["5.weight", "5.bias"]},
    "full precision": lambda: {"use_half_precision": False},
    "the defaults": lambda: {},
}


@pytest.mark.parametrize(("ids", "asked", "anew"), [(2, None, True), (2, [0], False), (1, None, False)])
@pytest.mark.parametrize("how", CONSTRUCTED)
def test_every_sequence_of_calls_of_its_tests(tmp_path, how, ids, asked, anew, caplog):
    """Few rows come in parts; one id, some or all are scored, by the TRAKer that featurized them or another one."""

    def made(**changes):
        settings = {"model": network(), "task": "image_classification", "proj_dim": 64, **changes}
        plain = {"train_set_size": 10, "logging_level": logging.DEBUG, "device": "cpu"}
        return TRAKer(save_dir=tmp_path, **plain, **settings)

    changes = CONSTRUCTED[how]()
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randn(10, 3, 8, 8, generator=generator), torch.randint(10, (10,), generator=generator)]
    traker = made(**changes)
    state = traker.model.state_dict()
    for model_id in range(ids):
        traker.load_checkpoint(state, model_id=model_id)
        for rows in (slice(0, 3), slice(3, 6), slice(6, 10)):
            some = [x[rows] for x in batch]
            traker.featurize(some, num_samples=len(some[0]))
    traker.finalize_features()
    for model_id in range(ids) if asked is None else asked:
        traker.start_scoring_checkpoint("test_experiment", state, model_id, num_targets=5)
        traker.score([x[:5] for x in batch], num_samples=5)
    if anew:
        traker = made(**{**changes, "model": traker.model})
    scores = traker.finalize_scores(exp_name="test_experiment", model_ids=asked)

    assert scores.shape == (10, 5)
    assert np.isfinite(scores).all()
    assert (np.diagonal(scores) > 0).any()
    assert caplog.text.count("Their pseudo-inverses are used") == (2 if anew else 1)
    np.testing.assert_array_equal(open_memmap(tmp_path / "scores" / "test_experiment.mmap"), scores)


def quickstart(traker):
    """The original's quickstart, word for word but for the data."""
    loader_train = DataLoader(TensorDataset(*train_batch()), batch_size=24)
    loader_targets = DataLoader(TensorDataset(*target_batch()), batch_size=4)
    for model_id, checkpoint in enumerate(checkpoints()):
        traker.load_checkpoint(checkpoint, model_id=model_id)
        for batch in loader_train:
            traker.featurize(batch=[x.cpu() for x in batch], num_samples=batch[0].shape[0])
    traker.finalize_features()

    for model_id, checkpoint in enumerate(checkpoints()):
        traker.start_scoring_checkpoint(
            exp_name="quickstart",
            checkpoint=checkpoint,
            model_id=model_id,
            num_targets=len(loader_targets.dataset),
        )
        for batch in loader_targets:
            traker.score(batch=batch, num_samples=batch[0].shape[0])
    return np.array(traker.finalize_scores(exp_name="quickstart"))


def test_the_quickstart_needs_another_import_and_nothing_else(tmp_path, monkeypatch):
    """In the folder that it stores in by default."""
    monkeypatch.chdir(tmp_path)
    settings = {"task": "image_classification", "train_set_size": N, "use_half_precision": False}

    def made(package):
        projector = injected(package.projectors.AbstractProjector, num_kept(make_model(), None))
        return package.TRAKer(make_model(), projector=projector, **settings)

    scores = quickstart(made(trak_lite))
    np.testing.assert_array_equal(open_memmap("./trak_results/scores/quickstart.mmap"), scores)
    settings |= {"device": "cpu", "save_dir": "./original"}
    with quiet():
        assert_scores_close(scores, quickstart(made(original())), rtol=1e-4)


class Asking(nn.Module):
    """Looks at values on its way, as masks of Hugging Face's networks do: vmap cannot."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(x if (x < 100).all() else x / 100)


def asked(folder, count=1, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Asking()
    traker = make_traker(folder, model=model, **changes)
    featurize(traker, [model.state_dict()] * count)
    return traker


def test_a_model_that_vmap_cannot_transform_is_featurized_by_another_computer(tmp_path, caplog):
    default = asked(tmp_path / "default", count=2)
    iterative = asked(tmp_path / "iterative", count=2, gradient_computer=IterativeGradientComputer)

    rows = [
        np.concatenate([stored(traker, model_id) for model_id in (0, 1)]) for traker in (default, iterative)
    ]
    np.testing.assert_allclose(*rows, rtol=1e-5, atol=1e-6 * np.abs(rows[0]).max())
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "Using HookGradientComputer instead" in warning
    assert "vmap cannot transform Asking" in warning


def test_the_computer_that_replaces_another_has_its_precision(tmp_path):
    precision = {"autocast_dtype": torch.bfloat16, "float32_products": "tf32"}
    computer = functools.partial(FunctionalGradientComputer, **precision)

    found = asked(tmp_path, gradient_computer=computer).gradient_computer

    assert type(found) is not FunctionalGradientComputer
    assert found.fingerprint() == {"autocast_dtype": "bfloat16", "float32_products": "tf32"}


def test_a_computer_of_ones_own_is_not_replaced(tmp_path):
    class Own(FunctionalGradientComputer):
        pass

    with pytest.raises(UnsupportedModelError, match="vmap cannot transform Asking"):
        asked(tmp_path, gradient_computer=Own)


def featurized(folder, **changes):
    traker = at("featurized", make_traker(folder, **{"projector": NoOpProjector(), **changes}))
    return stored(traker), stored(traker, column="out_to_loss")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return featurized(tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("grad_wrt", [None, ["second.weight", "first.bias"]], ids=["frozen", "grad_wrt"])
def test_the_iterative_computer_honours_grad_wrt_and_frozen_parameters(tmp_path, grad_wrt):
    """It stores the rows that the functional computer stores; the original's raises."""
    settings = {"grad_wrt": grad_wrt}
    found = featurized(tmp_path / "i", gradient_computer=IterativeGradientComputer, **settings)
    np.testing.assert_allclose(found[0], featurized(tmp_path / "f", **settings)[0], rtol=1e-5, atol=1e-6)


def test_the_iterative_computer_keeps_float64():
    """The original's gives float32."""
    images, labels = part(train_batch(), slice(0, 3))
    model, task = make_model().double().requires_grad_(True), ImageClassificationModelOutput()
    computer = IterativeGradientComputer(model, task, num_kept(model, None), torch.float32, "cpu")

    found = computer.compute_per_sample_grad((images.double(), labels))
    assert {grad.dtype for grad in found.values()} == {torch.float64}


@pytest.mark.parametrize("base", [FunctionalGradientComputer, IterativeGradientComputer])
def test_a_subclass_of_a_computer_that_changes_its_results_is_not_bypassed(tmp_path, expected, base):
    class Doubling(base):
        def compute_per_sample_grad(self, batch):
            return {name: 2 * grad for name, grad in super().compute_per_sample_grad(batch).items()}

    class Halving(base):
        def compute_loss_grad(self, batch):
            return super().compute_loss_grad(batch) / 2

    for computer, factors in ((Doubling, (2, 1)), (Halving, (1, 0.5))):
        found = featurized(tmp_path / computer.__name__, gradient_computer=computer)
        for one, other, factor in zip(found, expected, factors, strict=True):
            np.testing.assert_allclose(one, factor * other, rtol=1e-5, atol=1e-6)


def test_a_subclass_of_a_computer_serves_the_attributor_too(tmp_path):
    """The native facade streams from overridden methods as well."""

    class Zeroing(FunctionalGradientComputer):
        def compute_loss_grad(self, batch):
            return torch.zeros(len(batch[0]), 1)

    attributor = Attributor(
        make_model(), "image_classification", tmp_path / "run.zarr", proj_dim=8, gradient_computer=Zeroing
    )
    attributor.featurize(TensorDataset(*train_batch()))

    assert not attributor.score(TensorDataset(*target_batch())).numpy().any()


class LoopComputer(AbstractGradientComputer):
    """A computer as the original's documentation has it: no ``grad_wrt`` for the base class, one tensor back."""

    def __init__(self, model, task, grad_dim=None, dtype=torch.float16, device="cuda", grad_wrt=None):
        super().__init__(model, task, grad_dim, dtype, device)
        self.load_model_params(model)

    def load_model_params(self, model):
        self.model = model

    def compute_per_sample_grad(self, batch):
        rows = []
        for image, label in zip(*batch, strict=True):
            weights = {name: p.detach().requires_grad_() for name, p in self.model.named_parameters()}
            buffers = dict(self.model.named_buffers())
            output = self.modelout_fn.get_output(self.model, weights, buffers, image, label)
            grads = torch.autograd.grad(output, list(weights.values()))
            rows.append(torch.cat([grad.reshape(-1) for grad in grads]))
        return torch.stack(rows)

    def compute_loss_grad(self, batch):
        return self.modelout_fn.get_out_to_loss_grad(self.model, None, None, batch)


@pytest.mark.parametrize(
    "computer", [LoopComputer, functools.partial(LoopComputer)], ids=["class", "partial"]
)
def test_a_computer_of_ones_own_works(tmp_path, expected, computer):
    """All parameters are kept, frozen ones too, although this class never hears of ``grad_wrt``."""
    features, q = featurized(tmp_path, gradient_computer=computer)

    np.testing.assert_allclose(features, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(q, expected[1], rtol=1e-5)


class LabelLogit(AbstractModelOutput):
    """A task as the original's documentation has it."""

    @staticmethod
    def get_output(model, weights, buffers, image, label):
        logits = functional_call(model, (weights, buffers), image.unsqueeze(0))
        return logits[torch.arange(1), label.unsqueeze(0)].sum()

    def get_out_to_loss_grad(self, model, weights, buffers, batch):
        images, labels = batch
        logits = functional_call(model, (weights, buffers), images)
        return (1 - logits.softmax(-1)[torch.arange(len(labels)), labels]).detach().unsqueeze(-1)


class TheirLabelLogit:
    """The same methods; the base class comes with the original."""

    def __init__(self):
        """The original's base class asks for one."""

    get_output = staticmethod(LabelLogit.get_output)
    get_out_to_loss_grad = LabelLogit.get_out_to_loss_grad


def test_a_task_of_ones_own_scores_as_with_the_original(tmp_path):
    theirs = type("Task", (TheirLabelLogit, original().modelout_functions.AbstractModelOutput), {})
    bases = AbstractProjector, original().projectors.AbstractProjector
    ours, expected = (
        run(make(tmp_path / str(task), task=task(), lambda_reg=0.1, projector=injected(base, 16)), count=2)
        for make, task, base in zip((make_traker, make_original), (LabelLogit, theirs), bases, strict=True)
    )

    assert_scores_close(ours, expected, rtol=1e-4)


def test_a_task_may_be_a_function(tmp_path):
    def margin(model_call, batch):
        images, labels = batch
        logits = model_call(images)
        chosen = labels[:, None] == torch.arange(CLASSES)
        own = (logits * chosen).sum(1)
        return own - torch.where(chosen, -torch.inf, logits).logsumexp(1)

    found, named = (featurized(tmp_path / str(task), task=task) for task in (margin, "image_classification"))

    np.testing.assert_allclose(found[0], named[0], rtol=1e-4, atol=1e-5)


def test_a_projector_of_ones_own_gets_gradients_in_model_order(tmp_path):
    class Recording(AbstractProjector):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.calls = []

        def project(self, grads, model_id):
            self.calls.append((list(grads), model_id))
            return torch.cat([grad.flatten(1) for grad in grads.values()], dim=1)[:, : self.proj_dim]

    projector = Recording(grad_dim=0, proj_dim=3, seed=7, proj_type=ProjectionType.normal, device="cpu")
    traker = make_traker(tmp_path, projector=projector, grad_wrt=["second.bias", "first.weight"])
    traker.load_checkpoint(checkpoints(count=1)[0], 4)
    traker.featurize(train_batch(), num_samples=N)

    assert projector.calls == [(["first.weight", "second.bias"], 4)]
    assert stored(traker, 4).shape == (N, 3)


class Pairs(nn.Module):
    """A contrastive model with the original's call: ``model(image=..., text=...)``."""

    def __init__(self):
        super().__init__()
        self.image = nn.Linear(4, 3)
        self.text = nn.Linear(5, 3)

    def forward(self, image, text):
        return self.image(image), self.text(text), torch.tensor(2.0)


def pairs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 5, generator=generator)


def clip_traker(folder, count=24):
    """Return a TRAKer with a checkpoint loaded, whose task has embeddings of other pairs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Pairs()
    task = CLIPModelOutput(simulated_batch_size=6)
    traker = make_traker(folder, model=model, task=task, train_set_size=count, proj_dim=8)
    traker.load_checkpoint(model.state_dict(), 0)
    traker.task.get_embeddings(model, [pairs(30, seed=9)], batch_size=30, embedding_dim=3, size=30)
    return traker


def test_clip_works_for_batches_of_more_than_one_and_refuses_other_negatives(tmp_path):
    """Negatives may be set after the checkpoint is loaded, and are part of what its rows are made from."""
    traker, batch = clip_traker(tmp_path), pairs(24, seed=1)
    traker.featurize(part(batch, slice(0, 12)), num_samples=12)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=10)])
    with refused(tmp_path, ManifestMismatchError, "task_state is '.*' there, '.*' here"):
        traker.featurize(part(batch, slice(12, 24)), num_samples=12)

    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)])
    traker.featurize(part(batch, slice(12, 24)), num_samples=12)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", traker.model.state_dict(), 0, num_targets=5)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=10)])
    with refused(tmp_path, ManifestMismatchError, "Model id 0 .*task_state is '.*' there, '.*' here"):
        traker.score(pairs(5, seed=2), num_samples=5)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)])
    traker.score(pairs(5, seed=2), num_samples=5)

    assert np.abs(traker.finalize_scores("test")).min() > 0


def test_clip_has_a_q_for_a_batch_of_one(tmp_path):
    """With a batch of one, the original's softmax over the batch is 1, and q is 0."""
    traker = clip_traker(tmp_path, count=1)
    traker.featurize(pairs(1, seed=1), num_samples=1)

    assert stored(traker, column="out_to_loss")[0] > 0.01
