"""Precision of rankings that find wrong labels: of as many rows as there are wrong labels, the share that has one.

Four tabular data sets of scikit-learn; 8 % of the labels are replaced by another class. A perceptron is trained for 30
epochs with AdamW, and its weights are kept five times along the run. ``label_suspicion`` and self-influence come from
one ``featurize`` over these checkpoints. cleanlab ranks by predictions for held-out rows of a 5-fold cross-validation,
by its default score. Mean over seeds, which draw labels, model and folds.

``effects``: the share of targets (a fifth of the rows, with right labels) whose change lies in the 90 % interval of
``what_if`` (60 trials, classes as groups) if the most suspect rows, those that ``select`` calls harmful, or random ones
are removed: three models with fresh seeds, against ten of all rows.

Run:  python -m benchmarks.wrong_labels [--seeds 5]     (needs scikit-learn, and cleanlab for its column)
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import measuring, models
from trak_lite import Attributor, Rows, select, try_removals, what_if
from trak_lite.evaluation import mislabel_detection

SETS = ("digits", "breast cancer", "wine", "synthetic")
EPOCHS, KEPT, FLIPPED, FOLDS = 30, 5, 0.08, 5
REMOVED, WITHOUT, WITH_ALL = (0.05, 0.1, 0.2), 3, 10

State = dict[str, Tensor]


def load(name: str) -> tuple[Any, Any]:
    """Return inputs and right labels."""
    from sklearn import datasets

    if name == "synthetic":
        return datasets.make_classification(
            1500, 20, n_informative=8, n_classes=4, class_sep=1.2, random_state=0
        )
    return getattr(datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)


def with_wrong_labels(name: str, seed: int) -> tuple[TensorDataset, np.ndarray]:
    """Return a standardised data set, and a mask of its wrong labels."""
    inputs, labels = load(name)
    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(labels), bool)
    wrong[rng.choice(len(labels), int(FLIPPED * len(labels)), replace=False)] = True
    classes = int(labels.max()) + 1
    labels[wrong] = (labels[wrong] + rng.integers(1, classes, wrong.sum())) % classes
    scaled = (inputs - inputs.mean(0)) / np.maximum(inputs.std(0), 1e-6)
    return TensorDataset(torch.tensor(scaled, dtype=torch.float32), torch.tensor(labels)), wrong


def build(data: TensorDataset) -> nn.Module:
    inputs, labels = data.tensors
    return nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.ReLU(), nn.Linear(64, int(labels.max()) + 1))


def train(data: TensorDataset, seed: int, rows: np.ndarray | None = None) -> tuple[nn.Module, list[State]]:
    """Train on some rows; return the model, and the weights that were kept."""
    torch.manual_seed(seed)
    model = build(data)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-4)
    inputs, labels = (tensor if rows is None else tensor[rows] for tensor in data.tensors)
    states = models.train(model, inputs, labels, optimizer, epochs=EPOCHS, batch_size=64)
    return model, states[EPOCHS // KEPT - 1 :: EPOCHS // KEPT]


def cross_validated(data: TensorDataset, seed: int) -> np.ndarray:
    """Return how little cleanlab trusts each label."""
    from cleanlab.rank import get_label_quality_scores
    from sklearn.model_selection import StratifiedKFold

    labels = data.tensors[1].numpy()
    predicted = np.zeros((len(labels), int(labels.max()) + 1))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    for rows, held_out in folds.split(labels, labels):
        model, _ = train(data, seed, rows)
        with torch.no_grad():
            predicted[held_out] = model(data.tensors[0][held_out]).softmax(1).numpy()
    return -np.asarray(get_label_quality_scores(labels, predicted))


def compared(name: str, seed: int) -> dict[str, dict[str, float]]:
    """Return precision and processor time of each ranking, without the training that all need."""
    data, wrong = with_wrong_labels(name, seed)
    model, states = train(data, seed)
    found = {}

    def measure(what: str, rank: Callable[[], Any], before: float = 0.0) -> float:
        start = time.process_time()
        suspicion = rank()
        seconds = before + time.process_time() - start
        found[what] = {"precision": mislabel_detection(suspicion, wrong).precision, "seconds": seconds}
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        attributor = Attributor(model, "image_classification", f"{folder}/run.zarr")
        start = time.process_time()
        attributor.featurize(Rows(data, batch_size=256), checkpoints=states)
        featurizing = time.process_time() - start
        few = TensorDataset(*(tensor[:4] for tensor in data.tensors))
        measure("label_suspicion", attributor.label_suspicion, featurizing)
        measure("self_influence", lambda: attributor.score(few).self_influence(), featurizing)
    if importlib.util.find_spec("cleanlab"):
        measure("cleanlab", lambda: cross_validated(data, seed))
    return found


def covered(name: str, seed: int) -> dict[str, float | None]:
    """Return the share of targets whose interval holds the measured change, ``None`` without intervals."""
    data, wrong = with_wrong_labels(name, seed)
    right = torch.tensor(load(name)[1])
    rng = np.random.default_rng(seed)
    held_out, kept = np.split(rng.permutation(len(wrong)), [len(wrong) // 5])
    targets = TensorDataset(data.tensors[0][held_out], right[held_out])
    data = TensorDataset(*(tensor[kept] for tensor in data.tensors))

    def outputs(rows: np.ndarray, seed: int) -> np.ndarray:
        inputs, labels = targets.tensors
        logits = train(data, seed, rows)[0](inputs).detach()
        own = logits.gather(1, labels[:, None])[:, 0]
        others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
        return (own - others).numpy()

    model, states = train(data, seed)
    attributor = Attributor(model, "image_classification", None, progress=False)
    attributor.featurize(Rows(data, batch_size=256), checkpoints=states)
    scores = attributor.score(targets)
    groups = data.tensors[1].numpy()
    try_removals(scores, lambda rows, seed: train(data, seed, rows)[0], targets, groups=groups)
    everything = np.arange(len(kept))
    before = np.mean([outputs(everything, 10_000 + number) for number in range(WITH_ALL)], axis=0)
    suspects, found = np.argsort(-attributor.label_suspicion()), {}
    for share in REMOVED:
        count = round(share * len(kept))
        sets = {
            "suspects": suspects[:count],
            "harmful": select(scores, count, sign="harmful").indices,
            "random": rng.permutation(len(kept))[:count],
        }
        for kind, rows in sets.items():
            effects = what_if(scores, remove=rows)
            cell = f"{kind} {share:.0%}"
            found[cell] = None
            if effects.lower is not None:
                left = np.setdiff1d(everything, rows)
                changes = np.stack([outputs(left, 20_000 + number) for number in range(WITHOUT)]) - before
                found[cell] = float(((effects.lower <= changes) & (changes <= effects.upper)).mean())
    return found


def main() -> None:
    """Measure, write JSON after every data set."""
    parser = measuring.parser_of(__doc__, "wrong_labels.json")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"machine": measuring.surroundings()["machine"], "torch": torch.__version__, "seeds": args.seeds}
    found: dict[str, Any] = {}
    for name in SETS:
        runs = [compared(name, seed) for seed in range(args.seeds)]
        found[name] = {
            ranking: {key: float(np.mean([run[ranking][key] for run in runs])) for key in figures}
            for ranking, figures in runs[0].items()
        }
        effects = [covered(name, seed) for seed in range(args.seeds)]
        found[name]["effects"] = {
            cell: [None if one[cell] is None else round(one[cell], 3) for one in effects]
            for cell in effects[0]
        }
        measuring.save_parts(args.out, facts, {name: found[name]})


if __name__ == "__main__":
    main()
