"""Ground truth: outputs of models retrained on half-subsets, and the weights of runs on all data.

Outputs are cached in ``benchmarks/data/lds_<setting>.npz`` with the values that determine them. The weights of runs
on all data are trained again, in seconds to minutes, and stored in ``runs/lds``, which git ignores. With ``--one-run``
models are retrained on the first of these subsets with the seed of the first run on all data, which most methods
attribute: ``lds_one_run_<setting>.npz``.

Run:  python -m benchmarks.lds.truth [--one-run] [--settings digits_mlp ...]
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.lds.settings import SETTINGS, Setting, digest
from benchmarks.lds.training import Weights, outputs, train
from benchmarks.measuring import ROOT, parser_of, surroundings
from trak_lite.evaluation import linear_datamodeling_score

DATA = Path(__file__).parents[1] / "data"
RUNS = ROOT / "runs" / "lds"
FULL_RUN_SEED = 10_000_000
"""First seed of the runs on all data: no model of the ground truth over seeds shares one."""
ONE_RUN_SUBSETS, ONE_RUN_TEXT_SUBSETS = 40, 20


class Truth(NamedTuple):
    """The ground truth for scores. S subsets, R seeds, N train rows, M targets."""

    masks: np.ndarray
    """``(S, N)`` booleans."""
    outputs: np.ndarray
    """``(S, R, M)`` float32: f of every target."""


def estimate(found: Any) -> dict[str, Any]:
    """Return the mean and the interval of a score, of a difference, or of a rise as JSON values."""
    return {"mean": found.mean, "interval": list(found.interval)}


def lds(scores: np.ndarray, truth: Truth) -> dict[str, Any]:
    """Return the linear datamodeling score of scores ``(N, M)``; outputs are averaged over seeds."""
    return estimate(linear_datamodeling_score(scores, truth.masks, truth.outputs.mean(1)))


def subset_masks(num_rows: int, num_subsets: int) -> np.ndarray:
    """Return random halves, ``(S, N)`` booleans; a larger S keeps the first masks."""
    masks = np.zeros((num_subsets, num_rows), dtype=bool)
    for k, mask in enumerate(masks):
        mask[np.random.default_rng((k, 2)).permutation(num_rows)[: num_rows // 2]] = True
    return masks


def identity(setting: Setting) -> str:
    """Return the values that determine the ground truth, as JSON: data, model and training."""
    weights = setting.make_model().named_parameters()
    fields = {name: getattr(setting, name) for name in ("task", "optimizer", "learning_rate", "weight_decay")}
    if setting.momentum != 0.9:
        fields["momentum"] = setting.momentum
    fields |= {"batch_size": setting.batch_size, "epochs": setting.epochs, "data": digest(*setting.data())}
    return json.dumps({**fields, "parameters": {name: list(p.shape) for name, p in weights}}, sort_keys=True)


def load(setting: Setting) -> Truth:
    """Return the cached ground truth.

    Raises:
        FileNotFoundError: If there is none, or it was made with other data or training.
    """
    return _read(setting, DATA / f"lds_{setting.name}.npz")


def load_one_run(setting: Setting) -> Truth | None:
    """Return outputs ``(S, 1, M)`` of models retrained with the seed of the first run on all data; ``None`` if none.

    Raises:
        FileNotFoundError: If they were made with other data or training.
    """
    path = DATA / f"lds_one_run_{setting.name}.npz"
    return _read(setting, path) if path.exists() else None


def _read(setting: Setting, path: Path) -> Truth:
    remedy = f"Run: python -m benchmarks.lds.truth --settings {setting.name}"
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}. {remedy}")
    with np.load(path) as stored:
        if str(stored["identity"]) != identity(setting):
            raise FileNotFoundError(
                f"{path} was made with other data, model or training (Python's standard library differs between "
                f"versions). {remedy}"
            )
        masks = np.unpackbits(stored["masks"], axis=1, count=len(setting.data()[0])).astype(bool)
        return Truth(masks, stored["outputs"])


def generate(setting: Setting) -> Path:
    """Retrain on every subset with every seed, and cache the outputs."""
    count = setting.subsets
    seeds = [[seed * count + k for k in range(count)] for seed in range(setting.seeds)]
    return _generate(setting, subset_masks(len(setting.data()[0]), count), seeds, f"lds_{setting.name}.npz")


def generate_one_run(setting: Setting) -> Path:
    """Retrain on the first subsets with the seed of the first run on all data, and cache the outputs."""
    is_text = setting.task == "causal_language_modeling"
    masks = subset_masks(len(setting.data()[0]), ONE_RUN_TEXT_SUBSETS if is_text else ONE_RUN_SUBSETS)
    return _generate(setting, masks, [[FULL_RUN_SEED] * len(masks)], f"lds_one_run_{setting.name}.npz")


def _generate(setting: Setting, masks: np.ndarray, seeds: list[list[int]], name: str) -> Path:
    """Retrain on every subset with each of its seeds, ``(R, S)``, and cache the outputs."""
    found = np.empty((len(masks), len(seeds), len(setting.data()[2])), dtype=np.float32)
    start = time.perf_counter()
    for place, seeds_of_subsets in enumerate(seeds):
        for first in range(0, len(masks), setting.stack):
            some = slice(first, min(first + setting.stack, len(masks)))
            for k, run in enumerate(train(setting, masks[some], seeds_of_subsets[some]), first):
                found[k, place] = outputs(setting, run[-1])
            print(f"{name} seed {place}: {some.stop} of {len(masks)}", flush=True)
    path = DATA / name
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        path,
        masks=np.packbits(masks, axis=1),
        outputs=found,
        identity=identity(setting),
        seconds=time.perf_counter() - start,
        surroundings=json.dumps(surroundings()),
    )
    return path


def full_runs(setting: Setting, num_runs: int) -> list[list[Weights]]:
    """Return the checkpoints of runs on all data; train those that are not stored. The last is the final model."""
    path = RUNS / f"{setting.name}.pt"
    key = identity(setting) + str(setting.checkpoint_epochs)
    kept = torch.load(path) if path.exists() else {"key": key, "runs": []}
    runs = kept["runs"] if kept["key"] == key else []
    while len(runs) < num_runs:
        everything = np.ones((1, len(setting.data()[0])), dtype=bool)
        runs += train(setting, everything, [FULL_RUN_SEED + len(runs)])
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"key": key, "runs": runs}, path)
    return runs[:num_runs]


def main() -> None:
    """Generate the ground truth of the settings."""
    parser = parser_of(__doc__)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--one-run", action="store_true", help="with the seed of the first run on all data")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.settings:
        print((generate_one_run if args.one_run else generate)(SETTINGS[name]))


if __name__ == "__main__":
    main()
