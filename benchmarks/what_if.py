"""Effects of removed sets: coverage of the intervals of ``what_if`` on fresh retrainings, and sizes of repairs.

A problem of ``benchmarks.lds`` is attributed with the defaults over the checkpoints of one run. ``try_removals``
retrains without 60 sets, with the classes as groups. Then models are retrained with fresh seeds without other sets:

* ``random`` rows, the rows most ``helpful`` or ``harmful`` for a random target, those most ``harmful to all`` in the
  mean, rows of one ``class`` (then of the next, if it has too few), and ``near`` duplicates: the rows whose inputs are
  nearest to those of a random row;
* of 1, 5 and 20 % of the rows, six sets each, one model per set.

``coverage`` is the share of (set, target) whose change lies in the 90 % interval, ``own`` that of the targets that the
set was chosen for; ``half_width`` the median, to compare with ``noise``, the deviation between seeds. ``verdict`` are
intervals from 40 random halves of the train rows instead of trials, as ``verify`` leaves them, before ``what_if``
widens them: ``refused`` is the share of sets without an interval.

``repair``: for ten targets, f is to fall by one standard deviation of f over targets. Rows are removed in the order of
the scores, of EK-FAC at the last checkpoint, of the similarity of inputs (``nearest``; BM25 for words), or at random:
the share of targets where the mean of two fresh retrainings reaches the goal, by size, and the smallest size with 80 %.
``found`` are the sets that ``repair`` chooses itself.

Run:  python -m benchmarks.what_if [--settings digits_tailed ...] [--no-repair]
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.lds.removal import similarity
from benchmarks.lds.settings import SETTINGS, Setting
from benchmarks.lds.training import Weights, outputs, train, trained
from benchmarks.lds.truth import full_runs, load
from benchmarks.measuring import parser_of, save_parts, surroundings
from trak_lite import Attributor, Scores, repair, try_removals, what_if
from trak_lite.evaluation.trials import Trials
from trak_lite.methods import EKFAC
from trak_lite.retraining.what_if import SummedEffects

PROBLEMS = (
    *("digits_tailed", "digits_lr", "digits_gelu_adam", "digits_relu", "digits_gelu_sgd", "digits_mlp"),
    *("package_words", "affairs"),
)
SHARES, SETS_EACH, FULL_MODELS = (0.01, 0.05, 0.2), 6, 10
VERDICT_SUBSETS = 40
REPAIRED, REPAIR_SHARES, REPAIR_SEEDS = 10, (0.01, 0.02, 0.04, 0.08, 0.16, 0.32), 2
CHANCES = (0.6, 0.8)
FRESH_SEED = 30_000_000


def retrained(setting: Setting, masks: np.ndarray, first_seed: int) -> np.ndarray:
    """Return f of every target for one model per mask, ``(S, M)``; no two models share a seed."""
    models = trained(setting, masks, range(first_seed, first_seed + len(masks)))
    return np.stack([outputs(setting, weights) for weights in models]).astype(np.float64)


def without(sets: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Return a mask per set that keeps the other rows."""
    masks = np.ones((len(sets), num_rows), bool)
    for mask, rows in zip(masks, sets, strict=True):
        mask[rows] = False
    return masks


def vectors(inputs: Tensor) -> Tensor:
    """Return inputs as vectors; texts as counts of words."""
    if inputs.is_floating_point():
        return inputs.flatten(1)
    return torch.zeros(len(inputs), int(inputs.max()) + 1).scatter_add_(1, inputs, torch.ones(inputs.shape))


def fresh_sets(setting: Setting, scores: np.ndarray) -> Iterator[tuple[str, float, np.ndarray, int | None]]:
    """Yield kind, share, rows and target of every set."""
    rng, inputs, labels = np.random.default_rng(1), vectors(setting.data()[0]), setting.data()[1].numpy()
    num_rows, num_targets = scores.shape
    for share in SHARES:
        for _ in range(SETS_EACH):
            order, target = rng.permutation(num_rows), int(rng.integers(num_targets))
            classes = rng.permutation(int(labels.max()) + 1)
            orders = {
                "random": order,
                "helpful": np.argsort(-scores[:, target]),
                "harmful": np.argsort(scores[:, target]),
                "harmful to all": np.argsort(scores.mean(axis=1)),
                "class": order[np.argsort(classes[labels[order]], kind="stable")],
                "near": torch.cdist(inputs[order[:1]], inputs)[0].argsort().numpy(),
            }
            for kind, rows in orders.items():
                own = target if kind in ("helpful", "harmful") else None
                yield kind, share, rows[: round(share * num_rows)], own


def covered(setting: Setting, scores: Scores, before: np.ndarray) -> dict[str, Any]:
    """Return coverage and widths by kind and share, with trials and with the subsets of a verdict."""
    truth = load(setting)
    masks = truth.masks[:VERDICT_SUBSETS]
    effects = SummedEffects(scores)
    summed = masks.astype(float) @ scores.numpy().astype(float)
    halves = Trials.of_subsets(summed, truth.outputs[:VERDICT_SUBSETS, 0], 0.5, 1)
    sets = list(fresh_sets(setting, scores.numpy()))
    changes = retrained(
        setting, without([rows for _, _, rows, _ in sets], len(scores)), FRESH_SEED
    ) - before.mean(0)
    cells: dict[str, list[list[float]]] = {}
    for (kind, share, rows, own), change in zip(sets, changes, strict=True):
        figures = []
        found = what_if(scores, rows)
        if found.lower is None or found.upper is None:
            figures += [np.nan] * 3
        else:
            inside = (found.lower <= change) & (change <= found.upper)
            figures += [
                inside.mean(),
                np.nan if own is None else inside[own],
                np.median(found.upper - found.lower) / 2,
            ]
        predicted = -effects.sum(rows)
        half = halves.interval(predicted, effects.standardised(rows, predicted), len(rows) / len(scores))
        is_inside = np.abs(change - half.predicted) <= half.half_width
        figures += (
            [np.nan, np.nan]
            if np.isinf(half.half_width).any()
            else [is_inside.mean(), np.median(half.half_width)]
        )
        figures += [np.corrcoef(predicted, change)[0, 1], np.sqrt(np.mean(change**2))]
        cells.setdefault(f"{kind} {share:.0%}", []).append(figures)
    names = (
        "coverage",
        "own",
        "half_width",
        "verdict coverage",
        "verdict half_width",
        "correlation",
        "size of change",
    )
    return {cell: _means(np.array(values), names) for cell, values in cells.items()}


def _means(values: np.ndarray, names: Sequence[str]) -> dict[str, float | None]:
    """Return means without NaN, and the shares of sets without an interval."""
    means = {
        name: None if np.isnan(column).all() else float(f"{np.nanmean(column):.3g}")
        for name, column in zip(names, values.T, strict=True)
    }
    refused = {
        name: float(np.isnan(values[:, place]).mean())
        for name, place in (("refused", 0), ("verdict refused", 3))
    }
    return {**means, **refused}


def repaired(setting: Setting, scores: Scores, ekfac: np.ndarray, before: np.ndarray) -> dict[str, Any]:
    """Return success by method and size, and what ``repair`` finds."""
    num_rows, num_targets = scores.shape
    goal = -float(before.mean(0).std())
    targets = np.linspace(0, num_targets - 1, REPAIRED).astype(int)
    rng, near = np.random.default_rng(2), similarity(setting)
    orders = {
        "scores": [np.argsort(-scores.numpy()[:, target]) for target in targets],
        "EK-FAC": [np.argsort(-ekfac[:, target]) for target in targets],
        "nearest": [np.argsort(-near[:, target]) for target in targets],
        "random": [rng.permutation(num_rows) for _ in targets],
    }
    cells = [(method, share) for method in orders for share in REPAIR_SHARES]
    chosen = {
        chance: [repair(scores, target, goal, chance=chance) for target in targets] for chance in CHANCES
    }
    sets = [order[: round(share * num_rows)] for method, share in cells for order in orders[method]]
    sets += [one.rows for found in chosen.values() for one in found]
    masks = without(sets, num_rows)
    seeds = (FRESH_SEED + 1_000_000 * (1 + place) for place in range(REPAIR_SEEDS))
    change = np.mean([retrained(setting, masks, seed) for seed in seeds], axis=0) - before.mean(0)
    own = change[np.arange(len(sets)), np.tile(targets, len(sets) // REPAIRED)].reshape(-1, REPAIRED)
    success = (own <= goal).mean(axis=1)
    result: dict[str, Any] = {"goal": goal, "targets": REPAIRED, "seeds": REPAIR_SEEDS}
    for method in orders:
        rates = {share: success[place] for place, (name, share) in enumerate(cells) if name == method}
        enough = [share for share, rate in rates.items() if rate >= 0.8]
        result[method] = {
            "success": {f"{share:.0%}": float(rate) for share, rate in rates.items()},
            "80 % at": f"{enough[0]:.0%}" if enough else None,
        }
    for place, (chance, found) in enumerate(chosen.items(), len(cells)):
        is_predicted = np.array([one.reached for one in found])
        rows = change[place * REPAIRED : (place + 1) * REPAIRED]
        collateral = [
            np.sqrt(np.mean(np.delete(row, target) ** 2)) for row, target in zip(rows, targets, strict=True)
        ]
        reached = own[place] <= goal
        result[f"found with chance {chance}"] = {
            "predicted to be reached": float(is_predicted.mean()),
            "success of these": float(reached[is_predicted].mean()) if is_predicted.any() else None,
            "median share": float(np.median([len(one.rows) for one in found]) / num_rows),
            "collateral, root mean square": float(np.mean(collateral)),
        }
    return result


def measured(setting: Setting, *, with_repair: bool) -> dict[str, Any]:
    """Return all figures of a problem."""
    runs = full_runs(setting, 1)
    inputs, labels, target_inputs, target_labels = setting.data()
    model = setting.make_model()
    model.load_state_dict(runs[0][-1])

    def fit(rows: np.ndarray, seed: int) -> Weights:
        masks = np.zeros((1, len(inputs)), bool)
        masks[0, rows] = True
        # A seed of the library is one model; those of different sets shall not start alike.
        return train(setting, masks, [FRESH_SEED // 2 + 1000 * seed + int(rows.sum()) % 1000])[0][-1]

    with tempfile.TemporaryDirectory() as folder:
        attributor = Attributor(model, setting.task, f"{folder}/store.zarr", batch_size=50, progress=False)
        attributor.featurize(TensorDataset(inputs, labels), runs[0])
        targets = TensorDataset(target_inputs, target_labels)
        scores = attributor.score(targets, "targets")
        trials = try_removals(scores, fit, targets, groups=labels.numpy())
        everything = np.ones((FULL_MODELS, len(inputs)), bool)
        before = retrained(setting, everything, FRESH_SEED + 900_000)
        found: dict[str, Any] = {"noise": float(before.std(0, ddof=1).mean()), "trials": len(trials)}
        found["sets"] = covered(setting, scores, before)
        if with_repair:
            data, last = TensorDataset(inputs, labels), runs[0][-1:]
            ekfac = attributor.stream_scores(data, targets, method=EKFAC(), checkpoints=last).numpy()
            found["repair"] = repaired(setting, scores, ekfac, before)
    return found


def main() -> None:
    """Measure, write JSON after every problem."""
    parser = parser_of(__doc__, "what_if.json")
    parser.add_argument("--settings", nargs="*", default=list(PROBLEMS), choices=list(SETTINGS))
    parser.add_argument("--no-repair", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.settings:
        found = measured(SETTINGS[name], with_repair=not args.no_repair)
        save_parts(args.out, surroundings(peers=False), {name: found})


if __name__ == "__main__":
    main()
