"""Code written for the original runs after a change of its imports: its tests, its examples, classes of one's own."""

import functools
import importlib

import numpy as np
import pytest
import torch
import traker_cases as cases
from numpy.lib.format import open_memmap
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trak_lite
import trak_lite.projectors
from trak_lite import test_install as check_installation
from trak_lite import utils
from trak_lite.errors import InvalidInputError, ManifestMismatchError, UnsupportedModelError
from trak_lite.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_lite.modelout_functions import CLIPModelOutput
from trak_lite.projectors import AbstractProjector, NoOpProjector, ProjectionType


@pytest.mark.parametrize(
    "module", ["traker", "gradient_computers", "modelout_functions", "projectors", "utils"]
)
def test_public_names_are_where_the_original_has_them(module):
    """But for helpers of its score computer."""
    cases.original()
    theirs = importlib.import_module(f"trak.{module}")
    own = {name for name, one in vars(theirs).items() if getattr(one, "__module__", "") == theirs.__name__}
    left_out = {name for name in own if name.startswith(("_", "get_matrix_mult", "get_free", "get_output_m"))}
    expected = own - left_out | ({"TASK_TO_MODELOUT"} if module == "modelout_functions" else set())
    assert expected
    ours = importlib.import_module(f"trak_lite.{module}")
    here = {name for name, value in vars(ours).items() if getattr(value, "__module__", "") == ours.__name__}
    assert expected <= set(getattr(ours, "__all__", here))  # packages list their names, modules do not


def test_the_original_arguments_and_attributes_are_there(tmp_path):
    theirs, ours = cases.make_original(tmp_path / "original"), cases.make_traker(tmp_path / "ours")
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


def quickstart(traker):
    """The original's quickstart, word for word but for the data."""
    loader_train = DataLoader(TensorDataset(*cases.train_batch()), batch_size=24)
    loader_targets = DataLoader(TensorDataset(*cases.target_batch()), batch_size=4)
    for model_id, checkpoint in enumerate(cases.checkpoints()):
        traker.load_checkpoint(checkpoint, model_id=model_id)
        for batch in loader_train:
            traker.featurize(batch=[x.cpu() for x in batch], num_samples=batch[0].shape[0])
    traker.finalize_features()
    for model_id, checkpoint in enumerate(cases.checkpoints()):
        given = {"model_id": model_id, "num_targets": len(loader_targets.dataset)}
        traker.start_scoring_checkpoint(exp_name="quickstart", checkpoint=checkpoint, **given)
        for batch in loader_targets:
            traker.score(batch=batch, num_samples=batch[0].shape[0])
    return np.array(traker.finalize_scores(exp_name="quickstart"))


def test_the_quickstart_needs_another_import_and_nothing_else(tmp_path, monkeypatch):
    """In the folder that it stores in by default."""
    monkeypatch.chdir(tmp_path)
    settings = {"task": "image_classification", "train_set_size": cases.N, "use_half_precision": False}

    def made(package):
        count = cases.num_kept(cases.make_model(), None)
        projector = cases.injected(package.projectors.AbstractProjector, count)
        return package.TRAKer(cases.make_model(), projector=projector, **settings)

    scores = quickstart(made(trak_lite))
    np.testing.assert_array_equal(open_memmap("./trak_results/scores/quickstart.mmap"), scores)
    settings |= {"device": "cpu", "save_dir": "./original"}
    with cases.quiet():
        cases.assert_scores_close(scores, quickstart(made(cases.original())), rtol=1e-4)


class Asking(nn.Linear):
    """Looks at values on its way, as masks of Hugging Face's networks do: vmap cannot."""

    def forward(self, x):
        return super().forward(x if (x < 100).all() else x / 100)


def asked(folder, count=1, **changes):
    torch.manual_seed(0)
    model = Asking(4, 5)
    traker = cases.make_traker(folder, model=model, **changes)
    cases.featurize(traker, [model.state_dict()] * count)
    return traker


def test_a_model_that_vmap_cannot_transform_is_featurized_by_another_computer(tmp_path, caplog):
    default = asked(tmp_path / "default", count=2)
    iterative = asked(tmp_path / "iterative", count=2, gradient_computer=IterativeGradientComputer)
    made = default, iterative
    rows = [np.concatenate([cases.stored(one, model_id) for model_id in (0, 1)]) for one in made]
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
    traker = cases.at("featurized", cases.make_traker(folder, projector=NoOpProjector(), **changes))
    return cases.stored(traker), cases.stored(traker, column="out_to_loss")


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


@pytest.mark.parametrize("changes", [
    {"gradient_computer": LoopComputer},
    {"gradient_computer": functools.partial(LoopComputer)},
    {"gradient_computer": IterativeGradientComputer, "task": "iterative_image_classification"},
], ids=["class", "partial", "iterative"])  # fmt: skip
def test_another_computer_or_one_of_ones_own_works(tmp_path, changes):
    """All parameters are kept, frozen ones too; a class of one's own never hears of ``grad_wrt``."""
    found, expected = featurized(tmp_path / "a", **changes), featurized(tmp_path / "b")
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


def test_a_projector_of_ones_own_gets_gradients_in_model_order(tmp_path):
    class Recording(AbstractProjector):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.calls = []

        def project(self, grads, model_id):
            self.calls.append((list(grads), model_id))
            return torch.cat([grad.flatten(1) for grad in grads.values()], dim=1)[:, : self.proj_dim]

    projector = Recording(grad_dim=0, proj_dim=3, seed=7, proj_type=ProjectionType.normal, device="cpu")
    traker = cases.make_traker(tmp_path, projector=projector, grad_wrt=["second.bias", "first.weight"])
    traker.load_checkpoint(cases.checkpoints(count=1)[0], 4)
    traker.featurize(cases.train_batch(), num_samples=cases.N)

    assert projector.calls == [(["first.weight", "second.bias"], 4)]
    assert cases.stored(traker, 4).shape == (cases.N, 3)


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
    torch.manual_seed(0)
    model, task = Pairs(), CLIPModelOutput(simulated_batch_size=6)
    traker = cases.make_traker(folder, model=model, task=task, train_set_size=count, proj_dim=8)
    traker.load_checkpoint(model.state_dict(), 0)
    traker.task.get_embeddings(model, [pairs(30, seed=9)], batch_size=30, embedding_dim=3, size=30)
    return traker


def test_clip_works_for_batches_of_more_than_one_and_refuses_other_negatives(tmp_path):
    """Negatives may be set after the checkpoint is loaded, and are part of what its rows are made from."""
    traker, batch = clip_traker(tmp_path), pairs(24, seed=1)
    traker.featurize(cases.part(batch, slice(0, 12)), num_samples=12)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=10)])
    with cases.refused(tmp_path, ManifestMismatchError, "task_state is '.*' there, '.*' here"):
        traker.featurize(cases.part(batch, slice(12, 24)), num_samples=12)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)])
    traker.featurize(cases.part(batch, slice(12, 24)), num_samples=12)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", traker.model.state_dict(), 0, num_targets=5)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=10)])
    with cases.refused(tmp_path, ManifestMismatchError, "Model id 0 .*task_state is '.*' there, '.*' here"):
        traker.score(pairs(5, seed=2), num_samples=5)
    traker.task.get_embeddings(traker.model, [pairs(30, seed=9)])
    traker.score(pairs(5, seed=2), num_samples=5)
    assert np.abs(traker.finalize_scores("test")).min() > 0


def test_clip_has_a_q_for_a_batch_of_one(tmp_path):
    """With a batch of one, the original's softmax over the batch is 1, and q is 0."""
    traker = clip_traker(tmp_path, count=1)
    traker.featurize(pairs(1, seed=1), num_samples=1)
    assert cases.stored(traker, column="out_to_loss")[0] > 0.01


def test_vectorize_puts_gradients_side_by_side_also_into_a_given_tensor():
    theirs, shapes = cases.original().utils, {"weight": (2, 3), "scale": (), "bias": (4,)}
    gradients, arr = {name: torch.randn(5, *shape) for name, shape in shapes.items()}, torch.empty(5, 11)
    expected = theirs.vectorize(gradients, device="cpu")
    assert utils.vectorize(gradients, arr) is arr
    for found in (utils.vectorize(gradients), utils.vectorize(gradients, device="cpu"), arr):
        assert torch.equal(found, expected)
    with pytest.raises(InvalidInputError, match=r"different numbers of samples: \[2, 3\]"):
        utils.vectorize({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)})


def test_parameters_are_counted_and_flattened_in_order_and_buffers_told_by_name():
    model, theirs = cases.make_model("cnn"), cases.original().utils
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    assert utils.get_num_params(model) == theirs.get_num_params(model)
    assert utils.get_num_params(tied) == 9
    parameters = list(model.parameters())
    assert torch.equal(utils.parameters_to_vector(parameters), theirs.parameters_to_vector(parameters))
    for name in ("bn.running_mean", "running_var", "a.num_batches_tracked", "conv.weight"):
        assert utils.is_not_buffer(0, [name]) == theirs.is_not_buffer(0, [name])


@pytest.mark.parametrize("batch_size", [8, 2**26, 2**27, 2**28])
def test_chunks_hold_whole_parameters_below_the_limit(batch_size):
    """The limit is 2^32 - 1 over the batch size."""
    layers = nn.Linear(3, 3, bias=False), nn.Linear(5, 6, bias=False), nn.Linear(4, 5), nn.Linear(2, 2)
    model, theirs, sizes = nn.ModuleList(layers), cases.original().utils, [9, 30, 20, 5, 4, 2]
    limit, chunks = utils.get_parameter_chunk_sizes(model, batch_size)
    assert limit == (2**32 - 1) // batch_size
    assert sum(chunks) == utils.get_num_params(model)
    boundaries = torch.tensor([0, *sizes]).cumsum(0).tolist()
    assert set(torch.tensor(chunks).cumsum(0).tolist()) <= set(boundaries)
    assert all(size < limit or size in sizes for size in chunks)
    if max(sizes) < limit:
        assert (limit, chunks) == tuple(theirs.get_parameter_chunk_sizes(model, batch_size))
