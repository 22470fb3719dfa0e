"""Accuracy of standard errors and reliability: comparison with the scores of other training runs.

Digits with noise and 10 % flipped labels, an MLP, 6 runs with different seeds, 5 checkpoints each. The ground truth
is the scores of other runs, not the effect of retraining without some rows.

``expected``: the correlation that ``Scores.reliability`` predicts, mean over targets; ``actual``: Spearman's
correlation between the rankings of disjoint runs; ``told``: Spearman's correlation between the two across targets.
``error ratio``: root mean square of the difference of two disjoint halves, divided by the one that the standard
errors predict; ``within two``: share of differences of at most two standard errors.

Run:  python -m benchmarks.score_reliability
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import measuring, models
from trak_lite import Attributor, Scores
from trak_lite.evaluation import spearman

NUM_TRAIN, NUM_TARGETS, NUM_RUNS = 600, 120, 6
EPOCHS, SAVE_EVERY, PROJ_DIM = 30, 6, 512


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return train set and targets."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    noisy = (images[order] / 16).astype(np.float32)
    noisy += 0.3 * rng.normal(size=noisy.shape).astype(np.float32)
    labels = labels[order]
    flipped = rng.permutation(NUM_TRAIN)[: NUM_TRAIN // 10]
    targets = slice(NUM_TRAIN, NUM_TRAIN + NUM_TARGETS)
    held_out = TensorDataset(torch.from_numpy(noisy[targets]), torch.from_numpy(labels[targets]))
    labels[flipped] = (labels[flipped] + rng.integers(1, 10, len(flipped))) % 10
    return TensorDataset(torch.from_numpy(noisy[:NUM_TRAIN]), torch.from_numpy(labels[:NUM_TRAIN])), held_out


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def checkpoints_of(seed: int, train: TensorDataset) -> list[dict[str, Tensor]]:
    """Train one model and return its weights along the run."""
    torch.manual_seed(seed)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    states = models.train(model, *train.tensors, optimizer, epochs=EPOCHS, batch_size=50)
    return states[SAVE_EVERY - 1 :: SAVE_EVERY]


def correlations(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    return np.array([spearman(a, b) for a, b in zip(here.T, there.T, strict=True)])


def compared(here: Scores, there: Scores, runs: list[int] | None) -> dict[str, float]:
    """Return the agreement of two disjoint halves, and the prediction of each half."""
    difference = here.numpy() - there.numpy()
    errors = np.hypot(here.standard_error(runs=runs), there.standard_error(runs=runs))
    actual = correlations(here.numpy(), there.numpy())
    found = [scores.reliability(runs=runs) for scores in (here, there)]
    return {
        "agreement": float(np.mean([f.agreement.mean() for f in found])),
        "expected": float(np.mean([f.expected.mean() for f in found])),
        "actual": float(actual.mean()),
        "told": float(np.mean([spearman(f.expected, actual) for f in found])),
        "error ratio": float(np.sqrt((difference**2).mean() / (errors**2).mean())),
        "within two": float((np.abs(difference) <= 2 * errors).mean()),
    }


def measured() -> dict[str, dict[str, float]]:
    train, targets = datasets()
    runs = [checkpoints_of(seed, train) for seed in range(NUM_RUNS)]
    attributor = Attributor(build_model(), "image_classification", None, proj_dim=PROJ_DIM, progress=False)
    attributor.featurize(train, checkpoints=[state for run in runs for state in run])

    def scored(seeds: list[int]) -> Scores:
        states = [state for seed in seeds for state in runs[seed]]
        return attributor.score(targets, "-".join(map(str, seeds)), checkpoints=states)

    single = [scored([seed]) for seed in range(NUM_RUNS)]
    pairs = [compared(single[i], single[j], None) for i in range(NUM_RUNS) for j in range(i)]
    half, other = scored([0, 1, 2]), scored([3, 4, 5])
    labels = [run for run in range(3) for _ in runs[run]]
    return {
        "1 run, over its checkpoints": {key: float(np.mean([p[key] for p in pairs])) for key in pairs[0]},
        "3 runs, over all checkpoints": compared(half, other, None),
        "3 runs, over runs": compared(half, other, labels),
    }


def main() -> None:
    """Measure, write JSON."""
    parser = measuring.parser_of(__doc__, "score_reliability.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"machine": measuring.surroundings()["machine"], "torch": torch.__version__}
    measuring.save_parts(args.out, facts, measured())


if __name__ == "__main__":
    main()
