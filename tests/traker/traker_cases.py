"""What the tests of TRAKer share: small models, checkpoints, one injected matrix, and one run of the six verbs."""

import warnings
from collections.abc import Mapping
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tiny_runs import contents
from torch import nn

import trak_lite
from trak_lite.store import open_store

N, M, K, B = 80, 7, 12, 32
CLASSES = 5


@contextmanager
def quiet():
    """Ignore the warnings of the original, which tests would take for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def original():
    """Return the original release; the test is skipped where it is not installed."""
    with quiet():
        module = pytest.importorskip("trak", reason="needs the original TRAK (extra: test)")
        pytest.importorskip("trak.projectors")
    return module


class Mlp(nn.Module):
    """Two layers before a fixed readout, so that no direction of the parameters is without effect."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)
        self.register_buffer("readout", _readout(2))
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(3.0)  # far from linear: the kernel of all parameters can be inverted in float32

    def forward(self, x):
        return self.second(self.first(x).tanh()) @ self.readout


class Cnn(nn.Module):
    """One convolution and one layer before a fixed readout, with batch normalisation in eval mode."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2, affine=False)
        self.head = nn.Linear(8, 2)
        self.conv.bias.requires_grad_(False)
        self.register_buffer("readout", _readout(2))

    def forward(self, x):
        h = self.norm(self.conv(x)).tanh()
        return self.head(h.flatten(1)) @ self.readout


def _readout(width):
    return torch.randn(width, CLASSES, generator=torch.Generator().manual_seed(5))


MODELS = {
    "mlp": (Mlp, (4,), ["second.weight", "first.bias", "first.weight"]),
    "cnn": (Cnn, (1, 4, 4), ["head.bias", "conv.bias", "conv.weight"]),
}
"""Model class, shape of an input, and some parameters in another order than the model's, a frozen one among them."""


def batch_of(name, count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, *MODELS[name][1], generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def train_batch(name="mlp"):
    return batch_of(name, N, seed=1)


def target_batch(name="mlp"):
    return batch_of(name, M, seed=2)


def make_model(name="mlp", seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name][0]().eval()


def checkpoints(name="mlp", count=3):
    return [dict(make_model(name, seed=10 + number).state_dict()) for number in range(count)]


def num_kept(model, grad_wrt):
    return sum(p.numel() for name, p in model.named_parameters() if grad_wrt is None or name in grad_wrt)


def matrix(num_params, model_id, width=K):
    return torch.randn(num_params, width, generator=torch.Generator().manual_seed(100 + model_id))


def injected(base, num_params, *, width=K, seed=0):
    """Return a projector, derived from the original's base class or from ours, that multiplies by the matrix."""

    class Injected(base):
        def __init__(self):
            super().__init__(num_params, width, seed, "normal", "cpu")

        def project(self, grads, model_id):
            if isinstance(grads, Mapping):
                count = len(next(iter(grads.values())))
                grads = torch.cat([grad.reshape(count, -1) for grad in grads.values()], dim=1)
            return grads @ matrix(num_params, model_id, width).to(grads)

    return Injected()


def make_traker(folder, **changes):
    return trak_lite.TRAKer(**_settings(folder, changes))


def make_original(folder, **changes):
    plain = {"device": "cpu", "logging_level": 100, **changes}
    return original().TRAKer(**_settings(str(folder), plain))


def _settings(folder, changes):
    plain = {"task": "image_classification", "train_set_size": N, "proj_dim": K, "use_half_precision": False}
    return {"model": make_model(), "save_dir": folder, **plain, **changes}


STAGES = ("new", "loaded", "featurized", "finalized", "scoring", "scored")


def at(stage, traker):
    """Take a new TRAKer, ours or the original's, to a stage with id 0, and return it."""
    (state,) = checkpoints(count=1)
    steps = [
        lambda: traker.load_checkpoint(state, model_id=0),
        lambda: traker.featurize(train_batch(), num_samples=N),
        lambda: traker.finalize_features(),
        lambda: traker.start_scoring_checkpoint("test", state, 0, num_targets=M),
        lambda: traker.score(target_batch(), num_samples=M),
    ]
    for step in steps[: STAGES.index(stage)]:
        step()
    return traker


def featurize(traker, states, batch=None, *, first_id=0):
    batch = train_batch() if batch is None else batch
    for model_id, state in enumerate(states, start=first_id):
        traker.load_checkpoint(state, model_id=model_id)
        for start in range(0, len(batch[0]), B):
            rows = part(batch, slice(start, start + B))
            traker.featurize(batch=rows, num_samples=len(rows[0]))


def score(traker, states, batch=None, *, exp_name="test", first_id=0):
    batch = target_batch() if batch is None else batch
    for model_id, state in enumerate(states, start=first_id):
        given = {"exp_name": exp_name, "model_id": model_id, "num_targets": len(batch[0])}
        traker.start_scoring_checkpoint(checkpoint=state, **given)
        traker.score(batch=batch, num_samples=len(batch[0]))


def run(traker, name="mlp", count=3, dtype=torch.float32):
    """Call the six verbs, the same way for the original and for ours, and return the scores."""
    states = checkpoints(name, count)
    train, target = ((batch[0].to(dtype), batch[1]) for batch in (train_batch(name), target_batch(name)))
    with quiet():
        featurize(traker, states, train)
        traker.finalize_features()
        score(traker, states, target)
        return np.array(traker.finalize_scores(exp_name="test"))


def assert_scores_close(ours, expected, rtol):
    """Compare relative to the largest score, and each score of at least a hundredth of it by itself."""
    largest = np.abs(expected).max()
    assert largest > 0
    np.testing.assert_allclose(ours, expected, rtol=0, atol=rtol * largest)
    sizable = np.abs(expected) > largest / 100
    np.testing.assert_allclose(ours[sizable], expected[sizable], rtol=100 * rtol)


def stored(traker, model_id=0, column="features", targets=""):
    """Return a column of the rows of an id: of its train rows, or of the targets of an experiment."""
    path = f"targets/{targets}/ckpt-{model_id}" if targets else f"ckpt-{model_id}"
    with open_store(str(traker.save_dir / "trak.zarr")) as store:
        return store.open_table(path).read(column)


def scores_of_pseudo_inverses(traker, count):
    """Return the scores of the kernels by NumPy's pseudo-inverse, from the rows that are stored."""
    q = np.mean([stored(traker, model_id, "out_to_loss").astype(float) for model_id in range(count)], axis=0)
    products = 0.0
    for model_id in range(count):
        rows = stored(traker, model_id).astype(float)
        damped = rows.T @ rows + traker.lambda_reg * np.eye(rows.shape[1])
        inverse = np.linalg.pinv(damped, rcond=1e-9, hermitian=True)
        targets = stored(traker, model_id, targets="test").astype(float)
        products = products + rows @ (inverse / np.abs(inverse).mean()) @ targets.T
    return products / count * q[:, None]


@contextmanager
def refused(folder, error, match):
    """Expect an error whose message matches, and not a byte changed on disk."""
    before = contents(folder)
    with pytest.raises(error, match=match):
        yield
    assert contents(folder) == before


def part(batch, rows):
    return tuple(tensor[rows] for tensor in batch)
