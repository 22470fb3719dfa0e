"""Cost of capturing rows in a training, and of featurizing the same rows afterwards, in times of the plain training.

Processor time of whole epochs on one thread. Plain and captured epochs alternate (A B A B ...) in one process, and the
ratios are those of the medians.

Run:  python -m benchmarks.capture [MODEL ...]     (some minutes)
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.measuring import RESULTS, cpu_seconds, parser_of, save_parts, surroundings
from benchmarks.plan import gpt, images, texts
from trak_lite import Attributor

TURNS = 3
Loss = Callable[[Any, list[Tensor]], Tensor]


def of_labels(logits: Tensor, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(logits, batch[1])


def of_tokens(output: Any, batch: list[Tensor]) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch[1][:, 1:])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[Tensor, ...], Loss, int]] = {
    "MLP 256-256-256-10": (mlp, "image_classification", images(16_000, 256), of_labels, 64),
    "CNN, 8x8": (models.digits_cnn, "image_classification", images(4_000, 1, 8, 8), of_labels, 32),
    "transformer": (gpt, "causal_language_modeling", texts(1_600, 256, 64), of_tokens, 16),
}


def measured(name: str) -> dict[str, Any]:
    """Return the seconds of an epoch and the ratios of one model."""
    make, task, parts, loss, size = CASES[name]
    torch.manual_seed(0)
    model, train = make(), torch.utils.data.TensorDataset(*parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    order = torch.randperm(len(train)).split(size)

    def epoch(capture: Callable[..., None] | None = None) -> None:
        model.train()
        for rows in order:
            batch = [part[rows] for part in parts]
            if capture is not None:
                capture(batch, rows)
            loss(model(batch[0]), batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def captured() -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = attributor(folder)
            with made.capture(train, "epoch") as capture:
                epoch(capture)

    def attributor(folder: str) -> Attributor:
        settings = {"proj_dim": 512, "batch_size": size, "progress": False, "method": "TRAK"}
        return Attributor(model, task, Path(folder, "run.zarr"), **settings)

    def featurized() -> None:
        with tempfile.TemporaryDirectory() as folder:
            attributor(folder).featurize(train)

    ways = {"plain": epoch, "captured": captured, "featurize": featurized}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, run in ways.items():
            seconds[way].append(cpu_seconds(run))
    middle = {way: statistics.median(found) for way, found in seconds.items()}
    steps = len(order)
    return {
        "rows": len(train),
        "batch_size": size,
        "plain_step_cpu_ms": 1e3 * middle["plain"] / steps,
        "captured_step_over_plain": middle["captured"] / middle["plain"],
        "featurize_over_plain": middle["featurize"] / middle["plain"],
        "captured_over_plain_and_featurize": middle["captured"] / (middle["plain"] + middle["featurize"]),
        "turns_cpu_s": seconds,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", choices=[*CASES, []])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = RESULTS / "capture.json"
    for name in parser.parse_args().models or CASES:
        save_parts(path, surroundings(), {name: measured(name)})


if __name__ == "__main__":
    main()
