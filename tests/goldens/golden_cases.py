"""Small runs whose results are committed: six models in float64, every method, projections, and a store.

Every number is drawn by ``numpy.random.RandomState``, whose stream NumPy does not change, so that neither the version
of torch nor the processor changes an input. Everything is made through public names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference
import torch
from post_training_cases import BY_NAME
from projection_cases import DRAWN, SHAPES, made
from tiny_runs import Counting
from torch import Tensor, nn

from trak_lite import Attributor, Rows, methods
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.projectors import PROJECTORS

FOLDER = Path(__file__).parent
NUMBERS, VECTORS, STORE = (FOLDER / name for name in ("numbers.npz", "vectors.npz", "store.zip"))
N, M, FIRST, K, CHECKPOINTS = 40, 3, 33, 12, 2
"""Train rows, targets, train rows before others are appended, width of features, checkpoints."""
RATES = (0.1, 0.05)


# --- Models, data and f ------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A language model of one causal attention layer, with a normalisation and a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.tokens(input_ids)
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(1, 2) / 2).masked_fill(later, -torch.inf).softmax(-1)
        return self.head(h + self.out(weights @ v))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1]).squeeze(1)


class Bag(nn.Module):
    """Classes of bags of ids, called by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.table(input_ids).mean(1).tanh())


def normals(random: np.random.RandomState, *shape: int) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape))


def integers(random: np.random.RandomState, high: int, *shape: int) -> Tensor:
    return torch.from_numpy(random.randint(high, size=shape).astype(np.int64))


@dataclass(frozen=True)
class Case:
    """A model, what a task is called, the columns of its data, and f of a batch, written without trak_lite."""

    build: Callable[[], nn.Module]
    task: str
    columns: Callable[[np.random.RandomState, int], Any]
    output: Callable[[nn.Module, Any], Tensor]


def margins(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch.values() if isinstance(batch, Mapping) else batch
    return reference.margin(model(inputs), labels)


def token_log_probs(model: nn.Module, batch: Any) -> Tensor:
    logs = model(batch["input_ids"])[:, :-1].log_softmax(-1)
    return logs.gather(2, batch["labels"][:, 1:, None]).sum((1, 2))


def binary_margins(model: nn.Module, batch: Any) -> Tensor:
    return (2 * batch[1] - 1) * model(batch[0])


def predictions(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).squeeze(1)


def texts(random: np.random.RandomState, count: int) -> dict[str, Tensor]:
    ids = integers(random, 7, count, 5)
    return {"input_ids": ids, "labels": ids}


def bags(random: np.random.RandomState, count: int) -> dict[str, Tensor]:
    return {"input_ids": integers(random, 7, count, 4), "labels": integers(random, 3, count)}


CASES: dict[str, Case] = {
    "perceptron": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        "image_classification",
        lambda random, count: (normals(random, count, 4), integers(random, 3, count)),
        margins,
    ),
    "convolution": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU(), nn.Flatten(), nn.Linear(8, 3)
        ),
        "image_classification",
        lambda random, count: (normals(random, count, 1, 4, 4), integers(random, 3, count)),
        margins,
    ),
    "recurrent": Case(
        Recurrent,
        "binary_classification",
        lambda random, count: (normals(random, count, 4, 3), integers(random, 2, count)),
        binary_margins,
    ),
    "bag": Case(Bag, "text_classification", bags, margins),
    "regression": Case(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 1)),
        "regression",
        lambda random, count: (normals(random, count, 4), normals(random, count)),
        predictions,
    ),
    "attention": Case(Attention, "causal_language_modeling", texts, token_log_probs),
}
METHODS: dict[str, methods.AbstractMethod] = {
    "GaussNewton": methods.GaussNewton(),
    "Fisher": methods.Fisher(samples_per_feature=8),
    "TRAK": methods.TRAK(damping=0.1),
    "EKFAC": methods.EKFAC(damping=0.1),
    "CG": methods.CG(damping=2.0, tolerance=1e-3, max_iterations=6),
    "LiSSA": methods.LiSSA(damping=10.0, depth=8, rows=20),
    "TracIn": methods.TracIn(learning_rates=RATES),
    "LESS": methods.LESS(learning_rates=RATES),
    "GradDot": methods.GradDot(),
    "GradCos": methods.GradCos(),
}


def samples_of(columns: Any) -> list[Any]:
    """Return the rows of columns."""
    if isinstance(columns, Mapping):
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return list(zip(*columns, strict=True))


def train_of(name: str, count: int = N, fail_at: int | None = None) -> Counting:
    """Return rows whose loading is interrupted at one of them on request."""
    return Counting(samples_of(CASES[name].columns(np.random.RandomState(1), N))[:count], fail_at)


def batch_of(name: str) -> Any:
    return CASES[name].columns(np.random.RandomState(2), M)


def targets_of(name: str) -> list[Any]:
    return samples_of(batch_of(name))


def model_of(name: str, number: int = 0) -> nn.Module:
    """Return the model with the weights of a checkpoint, in float64 and eval mode."""
    model, random = CASES[name].build().double().eval(), np.random.RandomState(10 + number)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * normals(random, *p.shape) + (p.dim() == 1))
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(1 + normals(random, *buffer.shape) ** 2)
    return model


def checkpoints_of(name: str, *, moments: bool = False) -> list[Any]:
    """Return the weights; with moments, those and the state of an Adam that has made one step of length zero."""
    found = []
    for number in range(CHECKPOINTS):
        model = model_of(name, number)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        if moments:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
            random = np.random.RandomState(20 + number)
            for p in model.parameters():
                p.grad = normals(random, *p.shape)
            optimizer.step()
            state = {"model": state, "optimizer": copy.deepcopy(optimizer.state_dict())}
        found.append(state)
    return found


def attributor_of(name: str, path: Path | None = None, **changes: Any) -> Attributor:
    settings = {"proj_dim": K, "dtype": "float32", "progress": False, **changes}
    return Attributor(model_of(name), CASES[name].task, path, **settings)


# --- What is compared ----------------------------------------------------------------------------------------


def gradients(name: str) -> np.ndarray:
    """Return the gradients of the first checkpoint in float64, ``(M, P)``, by the default engine."""
    model = model_of(name)
    found = collect_gradients(HookGradientComputer(model, resolve_task(CASES[name].task)), batch_of(name))
    return reference.flatten({key: grad.detach().numpy() for key, grad in found.items()})


def reference_gradients(name: str) -> np.ndarray:
    """Return them by one backward pass per sample."""
    model = model_of(name)
    names = [key for key, _ in model.named_parameters()]
    samples = reference.samples_of(batch_of(name))
    return reference.flatten(reference.per_sample_gradients(model, CASES[name].output, samples, names))


def featurized(
    name: str, *, method: str = "GradDot", path: Path | None = None, batch_size: int = N
) -> Attributor:
    """Return an attributor with the rows that the method needs."""
    moments = method == "LESS"
    made = attributor_of(name, path, normalize="adam_update" if moments else "none")
    rows = Rows(train_of(name), name="train", batch_size=batch_size)
    made.featurize(rows, checkpoints_of(name, moments=moments))
    return made


def scores_of(name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the scores of every method, of rows that are computed once; of a method that is refused, an empty array."""
    plain = featurized(name)
    for method, value in METHODS.items():
        made = featurized(name, method=method) if method == "LESS" else plain
        try:
            yield method, made.score(targets_of(name), method, method=value).numpy()
        except InvalidInputError:
            yield method, np.empty(0)


def projections() -> Iterator[tuple[str, np.ndarray]]:
    """Yield what each projector makes of gradients with one entry, in float64: the matrix itself."""
    shapes = {"a": (3, 4), "b": (5,)}
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    units, start, grads = torch.eye(count, dtype=torch.float64), 0, {}
    for key, shape in shapes.items():
        width = int(np.prod(shape))
        grads[key] = units[:, start : start + width].reshape(count, *shape)
        start += width
    for kind, make in PROJECTORS.items():
        if kind == "fast_jl":
            continue  # needs a GPU
        for model_id in (0, 1):
            found = make(8, seed=3, device=None).project(grads, model_id=model_id)
            yield f"{kind}/{model_id}", found.numpy()


def vectors() -> Iterator[tuple[str, np.ndarray]]:
    """Yield features ``(2, K)`` of whole numbers by every projector for some K, seeds and models; terms of every task.

    Terms are f, q and w, ``(3, B)``, of the cases of tests/modelout_functions.
    """
    random = np.random.RandomState(5)
    grads = {name: integers(random, 17, 2, *shape).double() - 8 for name, shape in SHAPES.items()}
    for name in DRAWN:
        for k, seed, model_id in ((33, 0, 0), (7, 7, 3), (1, 2**40, 0), (300, 2**64 - 1, 1)):
            if k > 1 or name != "copies":
                yield f"features/{name}/{k}", made(name, k, seed).project(grads, model_id).numpy()
    for name, build in BY_NAME.items():
        case = build()
        terms = case.task.evaluate(ModelCall(case.model), case.batch)
        yield f"terms/{name}", torch.stack([term.detach() for term in terms]).numpy()


DTYPES = ("float32", "float16", "int8", "int4")


def fill_store(folder: Path) -> None:
    """Write one finished store for every dtype of rows, with stored scores."""
    for dtype in DTYPES:
        made = attributor_of("perceptron", folder / f"{dtype}.zarr", dtype=dtype, store_norms=True)
        made.featurize(Rows(train_of("perceptron"), name="train"), checkpoints_of("perceptron"))
        made.score(targets_of("perceptron"), "held-out")
        made.score(targets_of("perceptron"), "few", dense=False, k=4)
