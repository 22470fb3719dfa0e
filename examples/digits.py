"""Which training digits made the model say this? Real scans, wrong labels planted, found again.

Trains a small CNN on scikit-learn's digits with 10 % of the train labels flipped, attributes what it says
about held-out digits to train rows, and checks the answer where the truth is known: are the flipped labels
the rows that stand out? Kill it at any moment and start it again: it continues.
Measured: AUC 0.997 for self-influence, 0.918 for the loss of the final model.

Run:  python examples/digits.py            (about half a minute on two cores; results in runs/digits/)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Scores
from trak_lite.evaluation import auc

NUM_TRAIN = 1500
FLIPPED = 0.10
CONFIG = Path(__file__).parents[1] / "configs" / "digits.json"


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset, np.ndarray]:
    """Return train set with flipped labels, held-out set, and which train labels were flipped."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order] / 16.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target[order]).long()
    flipped = np.zeros(NUM_TRAIN, dtype=bool)
    flipped[rng.choice(NUM_TRAIN, int(FLIPPED * NUM_TRAIN), replace=False)] = True
    shift = torch.from_numpy(rng.integers(1, 10, NUM_TRAIN))
    train_labels = torch.where(
        torch.from_numpy(flipped), (labels[:NUM_TRAIN] + shift) % 10, labels[:NUM_TRAIN]
    )
    train = TensorDataset(images[:NUM_TRAIN], train_labels)
    return train, TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:]), flipped


def build_model() -> nn.Module:
    """Return a small CNN for 8x8 images, about 20,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 28),
        nn.ReLU(),
        nn.Linear(28, 10),
    )


def train(train_set: TensorDataset, folder: Path, *, epochs: int, num_checkpoints: int, seed: int) -> None:
    """Train one model and save checkpoints along the run; a finished run is not repeated."""
    settings = json.dumps({"epochs": epochs, "num_checkpoints": num_checkpoints, "seed": seed})
    begun, done = folder / "begun", folder / "done"
    if begun.exists() and begun.read_text() != settings:
        raise SystemExit(f"{folder} was trained with {begun.read_text()}, not {settings}. Use another --out.")
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "unfinished").write_text(settings)
    (folder / "unfinished").rename(begun)
    torch.manual_seed(seed)
    model = build_model()
    images, labels = train_set.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    save_after = set(np.linspace(0, epochs, num_checkpoints + 1).round().astype(int)[1:].tolist())
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(labels)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        if epoch in save_after:
            # Written aside and renamed, so that a kill never leaves half a file under the name.
            save_file(model.state_dict(), folder / "unfinished")
            (folder / "unfinished").rename(folder / f"epoch-{epoch}.safetensors")
            print(f"epoch {epoch:3d}  saved {folder}/epoch-{epoch}.safetensors")
    done.touch()


@torch.no_grad()
def final_loss(train_set: TensorDataset, folder: Path) -> np.ndarray:
    """Return each train row's loss under the last checkpoint: the plain baseline."""
    model = build_model().eval()
    model.load_state_dict(
        load_file(max(folder.glob("*.safetensors"), key=lambda p: int(p.stem.split("-")[1])))
    )
    images, labels = train_set.tensors
    return nn.functional.cross_entropy(model(images), labels, reduction="none").numpy()


def explain(scores: Scores, train_set: TensorDataset, held_out: TensorDataset, path: Path, show: int) -> None:
    """Print the strongest train rows of the first targets, and write those of all of them to a file."""
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
    """Draw targets on the left, their most helpful and most harmful train rows on the right."""
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
    """Run the whole job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help="settings; the options below override them"
    )
    parser.add_argument("--out", help="folder for everything that is made")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--proj-dim", type=int)
    parser.add_argument("--show", type=int, help="targets to print")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    config |= {key: value for key in ("out", "epochs", "show") if (value := getattr(args, key)) is not None}
    if args.proj_dim is not None:
        config["attributor"]["proj_dim"] = args.proj_dim

    out, seed = Path(config["out"]), config["seed"]
    train_set, held_out, flipped = load_data(seed)
    checkpoints = out / "checkpoints"
    train(
        train_set,
        checkpoints,
        epochs=config["epochs"],
        num_checkpoints=config["num_checkpoints"],
        seed=seed,
    )

    attributor = Attributor(build_model(), path=out / "digits.zarr", progress=True, **config["attributor"])
    attributor.featurize(train_set, checkpoints=checkpoints)
    scores = attributor.score(held_out, name="held-out")
    print(scores)

    explain(scores, train_set, held_out, out / "explanations.txt", config["show"])
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
