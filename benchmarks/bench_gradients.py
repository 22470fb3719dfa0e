"""Per-sample gradient engines: time relative to a plain forward and backward pass, and peak memory.

Every (model, engine) runs in a separate process, on one thread. Time is CPU time. The ratio is the median over
interleaved pairs (engine, plain forward and backward pass on the same batch). It can be below 1.00, because the
plain pass sums the weight gradients over the batch and ``stream`` does not. Peak memory is the growth of the
resident set during one run of the engine, including gradients, beyond model, batch and libraries; the engine has run
on two samples before (Linux only). Error: the largest relative error over parameters, in the Frobenius norm, against
one plain backward pass per sample. An engine above 2 % has failed.

``stream`` passes blocks to a sink that discards them. Linear weights stay factored there, so it measures the input
of a projector that accepts factors, not a materialised gradient. All other engines materialise (B, P). ``dense`` is
``stream`` with a sink that contracts factors into memory that is reused for every batch. ``collect`` is
``collect_gradients``, which returns new tensors, like every peer. Opacus cannot differentiate ``nn.LSTM``; its
``ModuleValidator`` replaces it.

Peers (all but ``stream``, ``dense``, ``collect``, ``functional``, ``iterative``): traker 0.3.2, Opacus, torch's
private ExpandedWeights, BackPACK. A peer that is not installed, or that fails, is reported as such.

Run:  python -m benchmarks.bench_gradients [--models cnn ...] [--engines dense ...] [--rounds 5]
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.measuring import cpu_seconds, memory_growth, parser_of, run_worker, save_parts, surroundings
from trak_lite.gradient_computers import (
    FunctionalGradientComputer,
    HookGradientComputer,
    IterativeGradientComputer,
    collect_gradients,
)
from trak_lite.modelout_functions import CallableModelOutput
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock, LookupBlock, SummedBlock

TOLERANCE = 2e-2  # a ReLU or max-pool that ties the other way in float32; a wrong gradient is off by more
BATCH_SECONDS = 0.15  # short passes are repeated until one measurement takes about this long
Gradients = dict[str, Tensor]
Engine = Callable[..., "Gradients | None"]


def margin(call: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return log(p / (1 - p)) of the label, ``(B,)``."""
    inputs, labels = batch
    logits, index = call(inputs), labels.unsqueeze(1)
    others = logits.scatter(1, index, -torch.inf).logsumexp(1)
    return logits.gather(1, index).squeeze(1) - others


def log_likelihood(call: Callable[..., Tensor], batch: tuple[Tensor]) -> Tensor:
    """Return the mean log-likelihood of tokens 1, 2, ... of each sequence, ``(B,)``."""
    (ids,) = batch
    log_probs = call(ids[:, :-1]).log_softmax(-1)
    return log_probs.gather(2, ids[:, 1:].unsqueeze(2)).mean((1, 2))


def _images(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, *shape), torch.randint(10, (count,))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "cnn": (models.SimpleCNN, lambda: _images(64, 1, 28, 28), margin),
    "resnet9_gn": (models.resnet9, lambda: _images(32, 3, 32, 32), margin),
    "vit": (models.ViT, lambda: _images(16, 3, 32, 32), margin),
    "gpt": (
        lambda: models.GPT(1000, 64, 128, 4, 4),
        lambda: (torch.randint(1000, (16, 65)),),
        log_likelihood,
    ),
    "lstm": (models.LSTMClassifier, lambda: _images(32, 32, 64), margin),
    "mlp": (models.mlp, lambda: _images(64, 784), margin),
    "gpt768": (
        lambda: models.GPT(4000, 128, 768, 2, 12),
        lambda: (torch.randint(4000, (8, 129)),),
        log_likelihood,
    ),
}
SLOW = ("gpt768",)


def stream(model: nn.Module, output: Callable[..., Tensor]) -> Engine:
    """trak_lite: passes blocks to a sink that discards them."""
    computer = HookGradientComputer(model, CallableModelOutput(output))

    def run(batch: Any) -> None:
        computer.stream_gradients(batch, lambda _: None)

    return run


def dense(model: nn.Module, output: Callable[..., Tensor]) -> Engine:
    """trak_lite: every block dense, with factors contracted into reused memory."""
    computer = HookGradientComputer(model, CallableModelOutput(output))
    shapes = computer.parameters
    kept: Gradients = {}

    def run(batch: Any) -> Gradients:
        found: dict[str, list[Tensor]] = {}

        def sink(block: GradientBlock) -> None:  # one or several blocks of a parameter
            found.setdefault(block.name, []).append(contracted(block, kept, shapes[block.name]))

        computer.stream_gradients(batch, sink)
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()}

    return run


def contracted(block: GradientBlock, kept: Gradients, shape: tuple[int, ...]) -> Tensor:
    """Return a block's gradients ``(b, *shape)``, in memory of ``kept`` unless they are dense already."""
    if isinstance(block, DenseBlock):
        return block.grad
    size = (block.num_samples, shape[0], math.prod(shape[1:]))
    parts = block.parts if isinstance(block, SummedBlock) else (block,)
    if block.name not in kept or kept[block.name].shape != size:
        like = parts[0].inputs if isinstance(parts[0], FactoredBlock) else parts[0].values
        kept[block.name] = like.new_empty(size)
    table = kept[block.name]
    factored = [part for part in parts if isinstance(part, FactoredBlock)]
    if not factored:
        table.zero_()
    for place, part in enumerate(factored):
        operands = part.output_grads.transpose(1, 2), part.inputs
        if place:
            table.baddbmm_(*operands)
        else:  # one position is an outer product, which a batched matrix product makes at half the speed
            product = torch.mul if part.inputs.shape[1] == 1 else torch.bmm
            product(*operands, out=table)
    for part in parts:
        if isinstance(part, LookupBlock):
            first = torch.arange(size[0], device=part.rows.device).unsqueeze(1) * size[1]
            table.view(-1, size[2]).index_add_(0, (first + part.rows).flatten(), part.values.flatten(0, 1))
    return table.view(-1, *shape)


def collecting(kind: Any) -> Callable[..., Engine]:
    """trak_lite: ``collect_gradients`` of a gradient computer of this kind."""

    def prepare(model: nn.Module, output: Callable[..., Tensor]) -> Engine:
        computer = kind(model, CallableModelOutput(output))
        return lambda batch: collect_gradients(computer, batch)

    return prepare


def of_one_sample(
    output: Callable[..., Tensor], model: nn.Module, weights: Any, sample: tuple[Tensor, ...]
) -> Tensor:
    """Return f of one sample as a scalar function of the weights."""
    parts = tuple(part.unsqueeze(0) for part in sample)
    return output(lambda x: torch.func.functional_call(model, weights, x), parts).squeeze(0)


def original_output(output: Callable[..., Tensor]) -> Any:
    """Return a model output function of the original's kind, with q = 1."""
    from trak.modelout_functions import AbstractModelOutput

    class Output(AbstractModelOutput):
        def __init__(self) -> None:
            pass

        def get_output(self, model, weights, buffers, *sample):
            if weights is None:  # of the iterative computer, with a batch
                return output(model, sample)
            return of_one_sample(output, model, (weights, buffers), sample)

        def get_out_to_loss_grad(self, model, weights, buffers, batch):
            return torch.ones(len(batch[0]), 1)

    return Output()


def traker(kind: str) -> Callable[..., Engine]:
    """The original TRAK's gradient computers."""

    def prepare(model: nn.Module, output: Callable[..., Tensor]) -> Engine:
        from trak import gradient_computers

        size, device = sum(p.numel() for p in model.parameters()), next(model.parameters()).device
        computer = getattr(gradient_computers, kind)(
            model, original_output(output), size, torch.float32, device
        )

        def run(batch: Any) -> Gradients:
            grads = computer.compute_per_sample_grad(batch)
            return grads if isinstance(grads, dict) else _cut(grads, model)

        return run

    return prepare


def opacus(model: nn.Module, output: Callable[..., Tensor]) -> Engine:
    """Opacus' GradSampleModule with its hooks; they act in train mode only."""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    fixed = ModuleValidator.fix(model).train()
    wrapped = GradSampleModule(fixed, batch_first=True, loss_reduction="sum")

    def run(batch: Any) -> Gradients:
        output(wrapped, batch).sum().backward()
        return dict(_taken(fixed, "grad_sample"))

    return run


def expanded_weights(model: nn.Module, output: Callable[..., Tensor]) -> Engine:
    """``torch.nn.utils._per_sample_grad``."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    def run(batch: Any) -> Gradients:
        call = call_for_per_sample_grads(model, batch_size=len(batch[0]), loss_reduction="sum")
        output(call, batch).sum().backward()
        return dict(_taken(model, "grad_sample"))

    return run


def backpack(model: nn.Module, output: Callable[..., Tensor]) -> Engine:
    """BackPACK's BatchGrad."""
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import BatchGrad

    extended = extend(model)

    def run(batch: Any) -> Gradients:
        with extensions(BatchGrad()):
            output(extended, batch).sum().backward()
        return dict(_taken(model, "grad_batch"))

    return run


ENGINES: dict[str, Callable[..., Engine]] = {
    "stream": stream,
    "dense": dense,
    "collect": collecting(HookGradientComputer),
    "functional": collecting(FunctionalGradientComputer),
    "iterative": collecting(IterativeGradientComputer),
    "traker functional": traker("FunctionalGradientComputer"),
    "traker iterative": traker("IterativeGradientComputer"),
    "opacus": opacus,
    "expanded weights": expanded_weights,
    "backpack": backpack,
}
ONCE = ("iterative", "traker iterative")
OURS = ("stream", "dense", "collect", "functional", "iterative")


def _cut(rows: Tensor, model: nn.Module) -> Gradients:
    """Return ``(B, P)`` rows as views by parameter name."""
    named = dict(model.named_parameters())
    parts = rows.split([p.numel() for p in named.values()], 1)
    return {name: part.view(-1, *p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}


def _taken(model: nn.Module, attribute: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients that an engine stored on the parameters, and remove them."""
    for name, p in model.named_parameters():
        grad = getattr(p, attribute, None)
        if grad is None:
            raise RuntimeError(f"no per-sample gradient for {name}")
        yield name, grad
        p.grad = None
        setattr(p, attribute, None)


def largest_error(engine: Engine, case: tuple[nn.Module, Any, Callable[..., Tensor]]) -> float | None:
    """Compare with one backward pass per sample; the blocks of ``stream`` are collected."""
    model, batch, output = case
    found = engine(batch)
    if found is None:
        computer = HookGradientComputer(model, CallableModelOutput(output))
        found = collect_gradients(computer, batch)
    params = dict(model.named_parameters())
    wrong = dict.fromkeys(params, 0.0)
    total = dict.fromkeys(params, 0.0)
    for i in range(len(batch[0])):
        value = output(model, tuple(part[i : i + 1] for part in batch)).sum()
        for (name, p), grad in zip(
            params.items(), torch.autograd.grad(value, list(params.values())), strict=True
        ):
            if found[name].shape[1:] != p.shape:
                raise RuntimeError(f"{name} came as {tuple(found[name].shape)}")
            wrong[name] += float((found[name][i].detach() - grad).square().sum())
            total[name] += float(grad.square().sum())
    return max((wrong[name] / total[name]) ** 0.5 for name in params if total[name])


def peak_mib(engine: Engine, batch: Any) -> float | None:
    """Return the growth of the resident set while the engine runs on the batch, in MiB."""
    engine(tuple(part[:2] for part in batch))
    with memory_growth() as growth:
        engine(batch)
    return growth.mib


def worker(name: str, engine_name: str, rounds: int) -> dict[str, Any]:
    """Measure one engine on one model and return its figures."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    make_model, make_batch, output = CASES[name]
    model, batch = make_model().eval(), make_batch()
    params = list(model.parameters())
    engine = ENGINES[engine_name](model, output)
    figures: dict[str, Any] = {"peak_mib": peak_mib(engine, batch)}
    # BackPACK and Opacus leave hooks on the model that they were given: the plain passes run on another.
    torch.manual_seed(0)
    plain = make_model().eval()
    plain.load_state_dict(model.state_dict())
    params = list(plain.parameters())
    figures["error"] = largest_error(engine, (plain, batch, output))
    if figures["error"] > TOLERANCE:
        sys.exit(f"wrong gradients: relative error {figures['error']:.2g}")

    def baseline() -> None:
        torch.autograd.grad(output(plain, batch).sum(), params)

    baseline()
    repeats = max(1, min(10, round(BATCH_SECONDS / cpu_seconds(baseline, 1))))
    pairs = [
        (cpu_seconds(lambda: engine(batch), repeats), cpu_seconds(baseline, repeats)) for _ in range(rounds)
    ]
    ratios = [ours / plain_pass for ours, plain_pass in pairs]
    figures |= {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
    figures["plain_cpu_ms"] = 1e3 * statistics.median(plain_pass for _, plain_pass in pairs)
    return {**figures, "rounds": rounds}


def cell(figures: dict[str, Any]) -> str:
    """Return a table cell: ratio and peak memory."""
    if "fails" in figures:
        return "not installed" if "ModuleNotFoundError" in figures["fails"] else "fails"
    peak = figures["peak_mib"]
    return f"{figures['ratio']:.2f}" + ("" if peak is None else f" / {peak:.0f}")


def print_table(found: dict[str, dict[str, dict[str, Any]]], engines: list[str]) -> None:
    """Print the Markdown table (ratio to forward and backward / peak MiB), then the failures and their reasons."""
    print("| engine | " + " | ".join(found) + " |")
    print("|---" + "|--:" * len(found) + "|")
    for engine in engines:
        print(f"| {engine} | " + " | ".join(cell(rows[engine]) for rows in found.values()) + " |")
    for name, rows in found.items():
        for engine, figures in rows.items():
            if "fails" in figures:
                print(f"- {engine} on {name} fails: {figures['fails']}")


def main() -> None:
    """Measure every engine on every model, print a table, write JSON."""
    parser = parser_of(__doc__, "gradients.json")
    quick = [name for name in CASES if name not in SLOW]
    parser.add_argument("--models", nargs="*", default=quick, choices=list(CASES))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in args.models:
        found[name] = {}
        for engine in args.engines:
            found[name][engine] = run_worker(worker, name, engine, 1 if engine in ONCE else args.rounds)
            print(name, engine, cell(found[name][engine]), file=sys.stderr, flush=True)
    print_table(found, args.engines)
    parts = {f"{name}, {engine}": row for name, rows in found.items() for engine, row in rows.items()}
    save_parts(args.out, surroundings(), parts)


if __name__ == "__main__":
    main()
