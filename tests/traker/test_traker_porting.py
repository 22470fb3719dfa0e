"""Code written for the original runs after a change of its imports."""

from __future__ import annotations

import functools
import importlib

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from traker_cases import (
    CLASSES,
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
    quiet,
    run,
    target_batch,
    train_batch,
)

import trak_lite.projectors
from trak_lite import Attributor, TRAKer
from trak_lite.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.projectors import AbstractProjector, NoOpProjector, ProjectionType
from trak_lite.run.tables import FEATURES, OUT_TO_LOSS


def quickstart(traker_class, folder, projector):
    """The original's quickstart, word for word but for the model and the data."""
    model, states = make_model(), checkpoints()
    loader_train = DataLoader(TensorDataset(*train_batch()), batch_size=24, shuffle=False)
    loader_targets = DataLoader(TensorDataset(*target_batch()), batch_size=4, shuffle=False)

    traker = traker_class(
        model=model,
        task="image_classification",
        train_set_size=len(loader_train.dataset),
        save_dir=str(folder),
        device="cpu",
        projector=projector,
        use_half_precision=False,
    )
    for model_id, checkpoint in enumerate(states):
        traker.load_checkpoint(checkpoint, model_id=model_id)
        for batch in loader_train:
            traker.featurize(batch=batch, num_samples=batch[0].shape[0])
    traker.finalize_features()

    for model_id, checkpoint in enumerate(states):
        traker.start_scoring_checkpoint(
            exp_name="quickstart",
            checkpoint=checkpoint,
            model_id=model_id,
            num_targets=len(loader_targets.dataset),
        )
        for batch in loader_targets:
            traker.score(batch=batch, num_samples=batch[0].shape[0])
    return traker.finalize_scores(exp_name="quickstart")


def test_the_quickstart_needs_another_import_and_nothing_else(tmp_path):
    num_params = num_kept(make_model(), None)
    with quiet():
        theirs = injected(original().projectors.AbstractProjector, num_params)
        expected = quickstart(original().TRAKer, tmp_path / "original", theirs)
    ours = injected(AbstractProjector, num_params)

    assert_scores_close(quickstart(TRAKer, tmp_path / "ours", ours), np.array(expected), rtol=1e-4)


NAMES = {
    "traker": ["TRAKer"],
    "gradient_computers": [
        "AbstractGradientComputer",
        "FunctionalGradientComputer",
        "IterativeGradientComputer",
    ],
    "modelout_functions": [
        "AbstractModelOutput",
        "CLIPModelOutput",
        "ImageClassificationModelOutput",
        "IterativeImageClassificationModelOutput",
        "TASK_TO_MODELOUT",
        "TextClassificationModelOutput",
    ],
    "projectors": [
        "AbstractProjector",
        "BasicProjector",
        "BasicSingleBlockProjector",
        "ChunkedCudaProjector",
        "CudaProjector",
        "NoOpProjector",
        "ProjectionType",
    ],
    "utils": [
        "get_num_params",
        "get_parameter_chunk_sizes",
        "is_not_buffer",
        "parameters_to_vector",
        "test_install",
        "vectorize",
    ],
}
LEFT_OUT = {
    "utils": {
        "get_free_memory",
        "get_matrix_mult",
        "get_matrix_mult_blockwise",
        "get_matrix_mult_standard",
        "get_output_memory",
    }
}
"""What only served the original's score computer."""


@pytest.mark.parametrize("module", list(NAMES))
def test_public_names_are_where_the_original_has_them(module):
    original()
    theirs = importlib.import_module(f"trak.{module}")
    ours = importlib.import_module(f"trak_lite.{module}")
    defined = {
        name
        for name, value in vars(theirs).items()
        if getattr(value, "__module__", None) == theirs.__name__ and not name.startswith("_")
    }

    assert defined - LEFT_OUT.get(module, set()) == set(NAMES[module]) - {"TASK_TO_MODELOUT"}
    assert set(NAMES[module]) <= set(ours.__all__)


def test_the_original_arguments_and_attributes_are_there(tmp_path):
    theirs, ours = make_original(tmp_path / "original"), make_traker(tmp_path / "ours")

    for name in ("proj_dim", "train_set_size", "lambda_reg", "dtype", "num_params_for_grad", "proj_seed"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert float(theirs.normalize_factor) == pytest.approx(ours.normalize_factor)
    for verb in ("__init__", "load_checkpoint", "featurize", "finalize_features"):
        assert _arguments(getattr(type(ours), verb)) == _arguments(getattr(type(theirs), verb))
    for verb in ("start_scoring_checkpoint", "score", "finalize_scores", "init_projector"):
        assert _arguments(getattr(type(ours), verb)) == _arguments(getattr(type(theirs), verb))


def _arguments(function):
    return function.__code__.co_varnames[: function.__code__.co_argcount]


# --- Classes of one's own --------------------------------------------------------------------------------


def rows_of(traker):
    table = traker._workspace.table("ckpt-0")
    return table.read(FEATURES), table.read(OUT_TO_LOSS)


def featurized(folder, **changes):
    traker = make_traker(folder, **{"projector": NoOpProjector(), **changes})
    featurize(traker, checkpoints(count=1), train_batch())
    return rows_of(traker)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return featurized(tmp_path_factory.mktemp("expected"))


def test_a_subclass_of_traker_may_wrap_verbs_and_choose_the_projector(tmp_path, expected):
    class Counting(TRAKer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen = 0

        def init_projector(self, projector, proj_dim, proj_max_batch_size):
            self.projector = NoOpProjector()
            self.proj_dim = 0

        def featurize(self, batch, inds=None, num_samples=None):
            self.seen += len(batch[0])
            return super().featurize(batch, inds=inds, num_samples=num_samples)

    traker = Counting(
        make_model(), "image_classification", N, save_dir=tmp_path, proj_dim=512, use_half_precision=False
    )
    featurize(traker, checkpoints(count=1), train_batch())

    assert traker.seen == N
    assert traker.proj_dim == num_kept(make_model(), None)
    np.testing.assert_array_equal(rows_of(traker)[0], expected[0])


@pytest.mark.parametrize("base", [FunctionalGradientComputer, IterativeGradientComputer])
def test_a_subclass_of_a_computer_that_changes_its_gradients_is_not_bypassed(tmp_path, expected, base):
    class Doubling(base):
        def compute_per_sample_grad(self, batch):
            return {name: 2 * grad for name, grad in super().compute_per_sample_grad(batch).items()}

    features, q = featurized(tmp_path, gradient_computer=Doubling)

    np.testing.assert_allclose(features, 2 * expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(q, expected[1], rtol=1e-6)


def test_a_subclass_of_a_computer_that_changes_its_q_is_not_bypassed(tmp_path, expected):
    class Halving(FunctionalGradientComputer):
        def compute_loss_grad(self, batch):
            return super().compute_loss_grad(batch) / 2

    features, q = featurized(tmp_path, gradient_computer=Halving)

    np.testing.assert_array_equal(features, expected[0])
    np.testing.assert_allclose(q, expected[1] / 2, rtol=1e-6)


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


@pytest.mark.parametrize("bound", [False, True], ids=["class", "partial"])
def test_a_computer_of_ones_own_works(tmp_path, expected, bound):
    """All parameters are kept, frozen ones too, although this class never hears of ``grad_wrt``."""
    computer = functools.partial(LoopComputer) if bound else LoopComputer

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
    their_task = type("Task", (TheirLabelLogit, original().modelout_functions.AbstractModelOutput), {})
    num_params = num_kept(make_model(), None)
    theirs = make_original(
        tmp_path / "original",
        task=their_task(),
        lambda_reg=0.1,
        projector=injected(original().projectors.AbstractProjector, num_params),
    )
    ours = make_traker(
        tmp_path / "ours",
        task=LabelLogit(),
        lambda_reg=0.1,
        projector=injected(trak_lite.projectors.AbstractProjector, num_params),
    )

    assert_scores_close(run(ours), run(theirs), rtol=1e-4)


def test_a_task_may_be_a_function(tmp_path):
    def margin(model_call, batch):
        images, labels = batch
        logits = model_call(images)
        chosen = labels[:, None] == torch.arange(CLASSES)
        own = (logits * chosen).sum(1)
        return own - torch.where(chosen, -torch.inf, logits).logsumexp(1)

    traker = make_traker(tmp_path, task=margin, projector=NoOpProjector())
    scores = run(traker, count=1)

    assert scores.shape == (N, M)
    assert np.isfinite(scores).all()


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
    assert traker._workspace.table("ckpt-4").read(FEATURES).shape == (N, 3)
