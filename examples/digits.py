"""Data attribution on scikit-learn's digits: find train rows with wrong labels.

Trains a small CNN with 10 % of the train labels flipped, scores the train rows for held-out digits, and checks
whether self-influence finds the flipped labels. If it is killed, start it again: it resumes. Measured, by processor:
AUC 0.995 and 0.998 for self-influence, 0.898 and 0.918 for the loss of the final model.

Data, model and training are in ``recipes/digits.py``, which ``trak-lite run configs/digits.yaml`` also uses: it finds
the checkpoints and the rows of this script, and the other way round.

Run:  python examples/digits.py            (about half a minute on two cores; results in runs/digits/)
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from recipes.digits import build_model, load_data, train
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Scores
from trak_lite.evaluation import auc


def save_checkpoints(
    train_set: TensorDataset, folder: Path, *, epochs: int, num_checkpoints: int, seed: int
) -> None:
    """Train one model and save checkpoints along the run, unless a finished run exists."""
    settings = json.dumps({"epochs": epochs, "num_checkpoints": num_checkpoints, "seed": seed})
    note = folder / "settings.json"
    if note.exists() and note.read_text() != settings:
        raise SystemExit(f"{folder} was trained with {note.read_text()}, not {settings}. Use another --out.")
    if folder.exists():
        return
    # Save to another folder and rename it, so that a kill never leaves an incomplete run there.
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    rows = np.arange(len(train_set))
    states = train(rows, seed, data_seed=seed, epochs=epochs, num_checkpoints=num_checkpoints)
    for number, state in enumerate(states, start=1):
        save_file(state, unfinished / f"checkpoint-{number}.safetensors")
    (unfinished / note.name).write_text(settings)
    unfinished.rename(folder)
    print(f"saved {num_checkpoints} checkpoints in {folder}")


@torch.no_grad()
def final_loss(train_set: TensorDataset, folder: Path) -> np.ndarray:
    """Return each train row's loss under the last checkpoint, as a baseline."""
    model = build_model().eval()
    model.load_state_dict(
        load_file(max(folder.glob("*.safetensors"), key=lambda p: int(p.stem.split("-")[1])))
    )
    images, labels = train_set.tensors
    return nn.functional.cross_entropy(model(images), labels, reduction="none").numpy()


def explain(scores: Scores, train_set: TensorDataset, held_out: TensorDataset, path: Path, show: int) -> None:
    """Print the top train rows of the first targets, and write those of all targets to a file."""
    train_labels, labels = train_set.tensors[1], held_out.tensors[1]
    helpful, harmful = scores.top(5, sign="helpful"), scores.top(5, sign="harmful")

    def rows(indices: np.ndarray, values: np.ndarray) -> str:
        return "  ".join(f"{i} ({train_labels[i]}) {v:+.1e}" for i, v in zip(indices, values, strict=True))

    lines = []
    for target, label in enumerate(labels.tolist()):
        lines.append(f"target {target}, a {label}")
        lines.append(f"  most helpful: {rows(helpful.indices[target], helpful.scores[target])}")
        lines.append(f"  most harmful: {rows(harmful.indices[target], harmful.scores[target])}")
    path.write_text("\n".join(lines) + "\n")
    print("\ntrain row (its label) score")
    print("\n".join(lines[: 3 * show]))
    print(f"... all {len(labels)} targets in {path}")


def draw_gallery(
    scores: Scores, train_set: TensorDataset, held_out: TensorDataset, flipped: np.ndarray, path: Path
) -> None:
    """Draw targets on the left, and their most helpful and most harmful train rows on the right."""
    targets = range(0, 6)
    shown = 5
    figure, axes = plt.subplots(
        len(targets), 2 * shown + 2, figsize=(12, 7.2), width_ratios=[1.2, *[1] * shown, 0.25, *[1] * shown]
    )

    def draw(axis: plt.Axes, image: Tensor, text: str, color: str = "black") -> None:
        axis.imshow(image[0], cmap="gray_r")
        axis.set_xlabel(text, fontsize=7, color=color, labelpad=2)

    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_frame_on(False)
    for row, target in enumerate(targets):
        image, label = held_out[target]
        draw(axes[row, 0], image, f"target {target}: a {label}")
        for sign, first in (("helpful", 1), ("harmful", shown + 2)):
            top = scores.top(shown, target=target, sign=sign)
            for column, (index, score) in enumerate(zip(top.indices, top.scores, strict=True)):
                image, label = train_set[index]
                wrong = bool(flipped[index])
                note = f"says {label}{' (flipped)' if wrong else ''}\n{score:+.1e}"
                draw(axes[row, first + column], image, note, "firebrick" if wrong else "black")
    axes[0, 0].set_title("target", fontsize=9)
    axes[0, 3].set_title("most helpful train rows", fontsize=9)
    axes[0, shown + 4].set_title("most harmful train rows", fontsize=9)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.95, bottom=0.06, hspace=0.45)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run the whole example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for all results")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--proj-dim", type=int, default=1024)
    parser.add_argument("--show", type=int, default=6, help="targets to print")
    args = parser.parse_args()

    out, seed = args.out, 0
    train_set, held_out, flipped = load_data(seed)
    checkpoints = out / "checkpoints"
    save_checkpoints(train_set, checkpoints, epochs=args.epochs, num_checkpoints=5, seed=seed)

    attributor = Attributor(
        build_model(), "image_classification", out / "digits.zarr", proj_dim=args.proj_dim, progress=True
    )
    attributor.featurize(train_set, checkpoints=checkpoints)
    scores = attributor.score(held_out, name="held-out")
    print(scores)

    explain(scores, train_set, held_out, out / "explanations.txt", args.show)
    draw_gallery(scores, train_set, held_out, flipped, out / "gallery.png")
    attribution_auc = auc(scores.self_influence(), flipped)
    loss_auc = auc(final_loss(train_set, checkpoints), flipped)
    print(
        f"\nfinding the {flipped.sum()} flipped labels, AUC: "
        f"self-influence {attribution_auc:.3f}, loss of the final model {loss_auc:.3f}"
    )
    assert attribution_auc > 0.9
    np.save(out / "scores.npy", scores.numpy())
    print(f"scores in {out}/scores.npy, gallery in {out}/gallery.png")


if __name__ == "__main__":
    main()
