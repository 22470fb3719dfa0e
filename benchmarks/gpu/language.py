"""Part ``language``: featurizing language models in bfloat16, beside training steps on the same batches."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import models
from benchmarks.bench_gradients import log_likelihood
from benchmarks.gpu.bench import Bench, milliseconds, ratio
from trak_lite import Attributor
from trak_lite.featurizing.passes import compute_features
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import CallableModelOutput
from trak_lite.projectors import CountSketchProjector

Case = Callable[[Bench], dict[str, Any]]
FIRST, ALL = 8, 24  # batches; the first ones are checked against autograd at 1, 2, 4, 8
TOKENS = 1024

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], int, int]] = {
    # model, model of the rehearsal, vocabulary, sequences per batch
    "gpt2 small": (
        lambda: models.GPT(50_257, TOKENS, 768, 12, 12),
        lambda: models.GPT(50, 16, 32, 2, 4),
        50_257,
        8,
    ),
    "llama 1b": (models.Llama, lambda: models.Llama(50, 32, 2, 4, 2, 64), 128_256, 4),
}


def language_cases(small: bool) -> dict[str, Case]:
    return {f"passes of {name}": partial(passes, name) for name in MODELS} | {
        name: partial(language, name) for name in MODELS
    }


def passes(name: str, bench: Bench) -> dict[str, Any]:
    """Measure a pass to its features and its replay beside a plain pass, on two sequences, with K = 2048."""
    torch.manual_seed(0)
    make, make_small, vocabulary, _ = MODELS[name]
    with bench.device:
        model = (make_small if bench.small else make)().to(torch.bfloat16).eval()
    tokens, vocabulary = (16, 50) if bench.small else (TOKENS, vocabulary)
    batch = (torch.randint(vocabulary, (2, tokens + 1), device=bench.device),)
    params = list(model.parameters())

    def features(to_come: float) -> Callable[[], Tensor]:
        computer = HookGradientComputer(model, CallableModelOutput(log_likelihood))
        projector = CountSketchProjector(2048)
        settings = {"model_id": 0, "rows": np.arange(2), "what": "benchmark", "to_come": to_come}
        return lambda: compute_features(computer, projector, batch, **settings)[0]

    def plain_pass() -> None:
        torch.autograd.grad(log_likelihood(model, batch).sum(), params)

    calls: dict[str, Callable[[], Any]] = {"pass": features(0), "replay": features(math.inf)}
    for call in calls.values():
        for _ in range(6):  # the recording and its first comparisons
            call()
    times = bench.interleaved({**calls, "plain": plain_pass})
    return {
        "ms": milliseconds(times),
        "to_plain": {way: ratio(times, way, "plain") for way in calls},
        "batch": [2, tokens],
    }


def language(name: str, bench: Bench) -> dict[str, Any]:
    """Featurize with default settings, from loading to the rows on disk; f is the mean log-likelihood of tokens."""
    torch.manual_seed(0)
    make, make_small, vocabulary, batch = MODELS[name]
    first, count, tokens = (1, 6, 16) if bench.small else (FIRST, ALL, TOKENS)
    vocabulary, batch = (50, 2) if bench.small else (vocabulary, batch)
    with bench.device:
        model = (make_small if bench.small else make)().to(torch.bfloat16).eval()
    ids = torch.randint(vocabulary, (count * batch, tokens + 1))
    featurize(model, ids[:batch], batch)  # compiles kernels
    steps = [training_step(model, ids[:batch], bench)]
    begun = bench.seconds(lambda: featurize(model, ids[: first * batch], batch))
    whole: list[float] = []
    peak = bench.peak_mib(lambda: whole.append(bench.seconds(lambda: featurize(model, ids, batch))))
    steps.append(training_step(model, ids[:batch], bench))
    further, step = (whole[0] - begun) / (count - first), statistics.median(steps)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": [batch, tokens],
        "tokens_per_s": count * batch * tokens / whole[0],
        "further_tokens_per_s": batch * tokens / further,
        "training_tokens_per_s": batch * tokens / step,
        "of_a_training_step": further / step,
        "first_batches_s": begun,
        "peak_mib_beyond_model": peak,
    }


def featurize(model: nn.Module, ids: Tensor, batch: int) -> None:
    """Featurize sequences into a new store."""
    with tempfile.TemporaryDirectory() as folder:
        made = Attributor(model, log_likelihood, f"{folder}/run.zarr", batch_size=batch, progress=False)
        made.featurize(TensorDataset(ids))


def training_step(model: nn.Module, ids: Tensor, bench: Bench) -> float:
    """Return the seconds of a step of AdamW: forward and backward pass and update, with learning rate 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    some = ids.to(bench.device)

    def step() -> None:
        optimizer.zero_grad()
        (-log_likelihood(model, (some,)).mean()).backward()
        optimizer.step()

    seconds = statistics.median(bench.interleaved({"step": step})["step"])
    optimizer.zero_grad()
    return seconds
