"""Other packages as released, on the same models, data and targets as trak_lite.

All attribute the measured output f (for language models the sum of the tokens' margins; "of log p" the sum of log p,
which is the default of trak_lite). If a package needs a loss, it is that of a sample: the cross-entropy, summed over
tokens, or half the squared error. Scores of packages that attribute a loss are multiplied by -1: positive is helpful.

Settings are those that a package documents as its default or uses in its own examples, unless said otherwise:

traker: K = 512 (its default is 2048; undamped, 512 is better with N = 1200), without ``lambda_reg``, as by default.
dattri: TRAK with K = 512 and ``regularization`` 0 (default) or 0.1 (our choice); IF-CG as in its example of LDS on
    MNIST (10 iterations, regularization 5e-3); DataInf and Arnoldi as in its example of noisy labels (regularization
    1e-2, Arnoldi with 10 iterations: with its default of 100 scores were NaN on digits_lr); EK-FAC with damping 1e-3
    (our choice), which fits the Fisher information of the function of the targets, here f; LoGra as in its example of
    LDS (damping 5e-3), GraSS (``FactGraSSAttributor``) with the same damping (our choice), both at their default
    K = 4096. LoGra, GraSS and EK-FAC use linear layers only.
kronfluence: EK-FAC at the default damping 1e-8 and at its heuristic of 0.1 mean eigenvalues, K-FAC at the heuristic;
    linear and convolution layers only.
captum: TracInCP on all parameters and TracInCPFast on the last layer, with the learning rate of each checkpoint;
    cosine similarity of the inputs of the last layer.
bergson: dot products of gradients projected to 16 x 16 per linear layer, with the inverse of their autocorrelation
    at its default damping; language models only, because it fails on layers whose inputs are not (B, T, features).

The GRU of digits_gru is given to all of them in linear layers, with the same weights: with shared weights and many
samples ``torch.func`` raises an error for ``nn.GRU``, and kronfluence would read its head alone. Its layer of the
states is called once per step, which kronfluence is told (``has_shared_parameters``).

LoGra, GraSS, kronfluence and bergson take one checkpoint: for a run, their scores are averaged over checkpoints.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.lds.methods import BATCH, LOG_P, Attribution, Method, Problem
from benchmarks.lds.settings import RowsGRU, RowsGRUInSteps
from benchmarks.lds.training import losses
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall

PROJ_DIM = 512
BLOCK_DIM = 4096
"""K of LoGra and GraSS per layer."""
BERGSON_DIM = 16
"""Rows and columns that bergson projects each layer's gradient to, as in its TrackStar configuration."""


def _as_batch(problem: Problem, sample: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a batch; packages call a function with one sample in some places and with a batch in others."""
    is_one = sample[1].dim() < problem.setting.data()[1].dim()
    return tuple(part.unsqueeze(0) for part in sample) if is_one else tuple(sample)


def output_of(problem: Problem, model: nn.Module, weights: Any, sample: tuple[Tensor, ...]) -> Tensor:
    """Return f of one sample, or its mean over a batch, as a function of the weights."""
    task = problem.measured()
    parameters = weights[0] if isinstance(weights, tuple) else weights
    return task.evaluate(ModelCall(model, parameters, {}), _as_batch(problem, sample)).output.mean()


def loss_of(problem: Problem, model: nn.Module, weights: Any, sample: tuple[Tensor, ...]) -> Tensor:
    """Return the loss of one sample, or its mean over a batch, as a function of the weights."""
    inputs, labels = _as_batch(problem, sample)
    parameters = weights[0] if isinstance(weights, tuple) else weights
    return losses(functional_call(model, parameters, (inputs,)), labels).mean()


def measured_from(task: AbstractModelOutput, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return f of every sample, ``(B,)``, from the model's outputs."""

    def call(*_: Any, **__: Any) -> Tensor:
        return outputs

    return task.evaluate(call, (labels, labels)).output  # type: ignore[arg-type]


def averaged_over(
    problem: Problem, checkpoints: str, of_one: Callable[[nn.Module], Attribution]
) -> Attribution:
    """Return the mean of the scores of every checkpoint, for packages that take one model."""
    states = problem.checkpoints(checkpoints)
    found = [of_one(problem.model(state)) for state in states]
    bytes_of_one = found[0].row_bytes
    return Attribution(
        np.mean([one.scores for one in found], axis=0),
        len(states),
        found[0].proj_dim,
        None if bytes_of_one is None else bytes_of_one * len(states),
        found[0].note,
    )


def traker(problem: Problem, *, checkpoints: str = "final", lambda_reg: float = 0.0) -> Attribution:
    """Return the scores of the original TRAK, in float32; its float16 is too slow on many processors."""
    from trak import TRAKer

    states = problem.checkpoints(checkpoints)
    is_its_own = problem.setting.task == "image_classification"
    with tempfile.TemporaryDirectory() as folder:
        tool = TRAKer(
            problem.model(),
            "image_classification" if is_its_own else _traker_output(problem),
            train_set_size=len(problem.train),
            save_dir=folder,
            device="cpu",
            proj_dim=PROJ_DIM,
            lambda_reg=lambda_reg,
            use_half_precision=False,
            logging_level=100,
        )
        for model_id, state in enumerate(states):
            tool.load_checkpoint(state, model_id=model_id)
            for batch in DataLoader(problem.train, batch_size=BATCH):
                tool.featurize(batch, num_samples=len(batch[0]))
        tool.finalize_features()
        for model_id, state in enumerate(states):
            tool.start_scoring_checkpoint("targets", state, model_id, num_targets=len(problem.targets))
            for batch in DataLoader(problem.targets, batch_size=BATCH):
                tool.score(batch, num_samples=len(batch[0]))
        scores = np.array(tool.finalize_scores("targets"))
    return Attribution(scores, len(states), PROJ_DIM, 4 * PROJ_DIM * len(states))


def _traker_output(problem: Problem) -> Any:
    """Return the setting's f and q as a model output function of the original's kind."""
    from trak.modelout_functions import AbstractModelOutput

    task = problem.measured()

    class Output(AbstractModelOutput):
        def __init__(self) -> None:
            pass

        def get_output(self, model, weights, buffers, *sample):
            return output_of(problem, model, weights, sample)

        def get_out_to_loss_grad(self, model, weights, buffers, batch):
            return task.evaluate(ModelCall(model, weights, buffers), batch).out_to_loss_grad[:, None]

    return Output()


def _attribution_task(problem: Problem, checkpoints: str, model: nn.Module, *, of_loss: bool) -> Any:
    """Return the task in dattri's interface: train rows by f or by their loss, targets by f."""
    from dattri.task import AttributionTask

    output = partial(output_of, problem, model)
    return AttributionTask(
        partial(loss_of, problem, model) if of_loss else output,
        model,
        problem.checkpoints(checkpoints),
        target_func=output,
    )


def dattri_trak(problem: Problem, *, checkpoints: str = "final", regularization: float = 0.0) -> Attribution:
    """Return the scores of dattri's TRAK."""
    from dattri.algorithm import TRAKAttributor

    model, task = problem.model(), problem.measured()

    def probability(weights: Any, sample: Any) -> Tensor:
        batch = tuple(part.unsqueeze(0) for part in sample)
        return 1 - task.evaluate(ModelCall(model, weights, {}), batch).out_to_loss_grad.squeeze(0)

    attributor = TRAKAttributor(
        task=_attribution_task(problem, checkpoints, model, of_loss=False),
        correct_probability_func=probability,
        projector_kwargs={"proj_dim": PROJ_DIM},
        regularization=regularization,
    )
    attributor.cache(DataLoader(problem.train, batch_size=BATCH))
    scores = attributor.attribute(DataLoader(problem.targets, batch_size=BATCH))
    num_models = len(problem.checkpoints(checkpoints))
    return Attribution(scores.detach().numpy(), num_models, PROJ_DIM, 4 * PROJ_DIM * num_models)


def dattri_influence(
    problem: Problem, name: str, *, checkpoints: str = "final", **settings: Any
) -> Attribution:
    """Return the scores of one of dattri's influence functions.

    The train rows are one batch, as its documentation advises: for each batch of train rows it transforms the targets
    again, with a Hessian that is summed over batches of inverses.
    """
    from dattri import algorithm

    model = problem.model()
    attributor = getattr(algorithm, name)(
        task=_attribution_task(problem, checkpoints, model, of_loss=True), **settings
    )
    rows = DataLoader(problem.train, batch_size=len(problem.train))
    attributor.cache(rows)
    with torch.no_grad():
        scores = attributor.attribute(rows, DataLoader(problem.targets, batch_size=BATCH))
    return Attribution(-scores.detach().numpy(), len(problem.checkpoints(checkpoints)))


class _WithValue(nn.Module):
    """A model that returns the summed value of a batch as its ``loss``, as dattri's block projections take it."""

    def __init__(self, inner: nn.Module, value: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.value = inner, value

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=self.value(self.inner(inputs), labels).sum())


class _Fields(Dataset):
    """Rows as mappings of inputs and labels."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.rows[index]
        return {"inputs": inputs, "labels": labels}


def dattri_blocks(problem: Problem, name: str, *, checkpoints: str = "final", **settings: Any) -> Attribution:
    """Return the scores of LoGra or GraSS: train rows by their loss, targets by f."""
    from dattri import algorithm
    from dattri.task import AttributionTask

    def loss(model: nn.Module, batch: Any, device: str) -> Tensor:
        return losses(model.inner(batch["inputs"]), batch["labels"]).sum()

    def of_one(model: nn.Module) -> Attribution:
        torch.manual_seed(0)
        wrapped = _WithValue(model, partial(measured_from, problem.measured())).eval()
        task = AttributionTask(loss, wrapped, wrapped.state_dict())
        rows, targets = (
            DataLoader(_Fields(part), batch_size=BATCH) for part in (problem.train, problem.targets)
        )
        with tempfile.TemporaryDirectory() as folder:  # else it writes to, and reads from, the current folder
            attributor = getattr(algorithm, name)(task=task, cache_dir=folder, **settings)
            attributor.cache(rows)
            scores = attributor.attribute(rows, targets)
        return Attribution(-scores.detach().numpy(), 1, BLOCK_DIM, 4 * attributor.total_proj_dim)

    return averaged_over(problem, checkpoints, of_one)


def kronfluence(
    problem: Problem, *, checkpoints: str = "final", strategy: str = "ekfac", damping: float | None = 1e-8
) -> Attribution:
    """Return kronfluence's scores, averaged over checkpoints; damping ``None`` is its heuristic."""

    def of_one(model: nn.Module) -> Attribution:
        torch.manual_seed(0)
        factors = {"strategy": strategy, "has_shared_parameters": isinstance(model, RowsGRUInSteps)}
        data = problem.train, problem.targets
        scores = kronfluence_scores(model, problem.measured(), *data, BATCH, damping, **factors)
        return Attribution(scores.numpy(), 1)

    return averaged_over(problem, checkpoints, of_one)


def kronfluence_scores(
    model: nn.Module,
    task: AbstractModelOutput,
    train: TensorDataset,
    targets: TensorDataset,
    batch_size: int,
    damping: float | None,
    **factors: Any,
) -> Tensor:
    """Return kronfluence's scores ``(N, M)`` of the task's f; ``factors`` are its arguments of a fit."""
    from kronfluence import ScoreArguments

    with tempfile.TemporaryDirectory() as folder:
        analyzer = kronfluence_fit(model, task, train, batch_size, folder, **factors)
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            targets,
            train,
            per_device_query_batch_size=batch_size,
            per_device_train_batch_size=batch_size,
            score_args=ScoreArguments(damping_factor=damping),
        )
        return -analyzer.load_pairwise_scores("scores")["all_modules"].T.float()


def kronfluence_fit(
    model: nn.Module,
    task: AbstractModelOutput,
    train: TensorDataset,
    batch_size: int,
    folder: str,
    **factors: Any,
) -> Any:
    """Return kronfluence's analyzer after fitting its factors."""
    from kronfluence import Analyzer, FactorArguments, Task, prepare_model

    class Output(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            outputs, labels = model(batch[0]), batch[1]
            if sample and labels.is_floating_point():
                labels = torch.normal(outputs.detach().squeeze(-1), 1.0)  # the density whose loss this is
            elif sample:
                probabilities = outputs.detach().softmax(-1)
                drawn = torch.multinomial(probabilities.flatten(0, -2), 1).reshape(outputs.shape[:-1])
                labels = (
                    drawn.roll(1, 1) if outputs.dim() == 3 else drawn
                )  # labels are compared one place later
            return losses(outputs, labels).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return measured_from(task, model(batch[0]), batch[1]).sum()

    output = Output()
    prepared = prepare_model(copy.deepcopy(model), output)
    analyzer = Analyzer("run", prepared, output, cpu=True, disable_tqdm=True, output_dir=folder)
    arguments = FactorArguments(**factors)
    analyzer.fit_all_factors("factors", train, factor_args=arguments, per_device_batch_size=batch_size)
    return analyzer


def _last_linear(model: nn.Module) -> tuple[str, str]:
    """Return the names of the last linear layer and of the module with parameters or activations before it."""
    leaves = [name for name, part in model.named_modules() if not list(part.children())]
    linear = [name for name in leaves if isinstance(model.get_submodule(name), nn.Linear)][-1]
    return linear, leaves[leaves.index(linear) - 1]


def captum_tracin(problem: Problem, *, checkpoints: str = "final", fast: bool = False) -> Attribution:
    """Return the influence of captum's TracInCP, or of TracInCPFast, which uses the last linear layer only."""
    from captum.influence import TracInCP, TracInCPFast

    states, model = problem.checkpoints(checkpoints), problem.model()
    rates = _learning_rates(problem)[-len(states) :]

    def load(module: nn.Module, number: str) -> float:
        module.load_state_dict(states[int(number)])
        return rates[int(number)]

    def minus_output(outputs: Tensor, labels: Tensor) -> Tensor:
        return -measured_from(problem.measured(), outputs, labels)

    def summed(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda outputs, labels: function(outputs, labels).sum()

    # Its fast per-sample gradients exist for linear and convolution layers that are called once per sample; their
    # losses must be summed.
    own = [part for part in model.modules() if list(part.parameters(recurse=False))]
    by_hooks = all(isinstance(part, nn.Linear | nn.Conv2d) for part in own)
    by_hooks = by_hooks and not isinstance(model, RowsGRUInSteps)
    of_train, of_targets = (
        (summed(losses), summed(minus_output)) if fast or by_hooks else (losses, minus_output)
    )
    settings = {
        "train_dataset": problem.train,
        "checkpoints": [str(number) for number in range(len(states))],
        "checkpoints_load_func": load,
        "loss_fn": of_train,
        "test_loss_fn": of_targets,
        "batch_size": BATCH,
    }
    if fast:
        last = model.get_submodule(_last_linear(model)[0])
        tool: Any = TracInCPFast(model, last, **settings)
    else:
        tool = TracInCP(model, sample_wise_grads_per_batch=by_hooks, **settings)
    influence = tool.influence(problem.setting.data()[2:])
    return Attribution(influence.T.detach().numpy(), len(states))


def _learning_rates(problem: Problem) -> list[float]:
    """Return the learning rate at the end of the epoch of every checkpoint; the last, which is 0, as that before."""
    setting = problem.setting
    shares = [epoch / setting.epochs for epoch in setting.checkpoint_epochs]
    shares[-1] = 1 - 0.5 / setting.epochs
    return [setting.learning_rate * (1 + math.cos(math.pi * share)) / 2 for share in shares]


def captum_similarity(problem: Problem) -> Attribution:
    """Return the cosine similarity of what the last linear layer of the final model receives."""
    from captum.influence import SimilarityInfluence

    class Inputs(Dataset):
        def __len__(self) -> int:
            return len(problem.train)

        def __getitem__(self, index: int) -> Tensor:
            return problem.train[index][0]

    model = problem.model()
    last, layer = _last_linear(model)
    num_rows = len(problem.train)
    with tempfile.TemporaryDirectory() as folder:
        # With one layer it fails: it makes a list of one of what is a list already.
        tool = SimilarityInfluence(model, [layer, last], Inputs(), folder, "lds", batch_size=num_rows)
        order, values = tool.influence(problem.setting.data()[2], top_k=num_rows)[layer]
    scores = np.empty((num_rows, len(problem.targets)), np.float32)
    np.put_along_axis(scores, order.numpy().T, values.detach().numpy().T, axis=0)
    return Attribution(scores, 1)


class _WithLogits(nn.Module):
    """A language model with the parts of Hugging Face's interface that bergson uses."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(ids))


def bergson(problem: Problem, *, checkpoints: str = "final", of_targets: str = "log_odds") -> Attribution:
    """Return the scores of bergson for a language model: targets by log odds (margins) or "ce" (log p)."""
    import bergson as package
    from bergson.collector.collector import CollectorComputer
    from bergson.config.config import InversionConfig
    from bergson.hessians.preconditioner import DensePreconditioner
    from datasets import Dataset as Table

    def collected(model: nn.Module, rows: TensorDataset, loss: str, processor: Any) -> Any:
        table = Table.from_dict({"input_ids": rows.tensors[0].tolist()})
        is_train = rows.tensors[0] is problem.setting.data()[0]
        batches = [list(range(i, min(i + BATCH, len(table)))) for i in range(0, len(table), BATCH)]
        with tempfile.TemporaryDirectory() as folder:
            cfg = package.IndexConfig(run_path=f"{folder}/run", loss_fn=loss, projection_dim=BERGSON_DIM)
            cfg.partial_run_path.mkdir()
            collector = package.InMemoryCollector(
                model=model, processor=processor, data=table, cfg=cfg, skip_hessians=not is_train
            )
            CollectorComputer(
                model, table, collector=collector, batches=batches, cfg=cfg
            ).run_with_collector_hooks()
        return {name: values.float() for name, values in collector.gradients.items()}

    def of_one(model: nn.Module) -> Attribution:
        wrapped = _WithLogits(model).eval()
        processor = package.GradientProcessor(projection_dim=BERGSON_DIM)
        rows = collected(wrapped, problem.train, "ce", processor)
        targets = collected(wrapped, problem.targets, of_targets, processor)
        inverse = DensePreconditioner.from_processor(processor, inversion_cfg=InversionConfig())
        changed = inverse.apply(targets)
        scores = sum(rows[name] @ changed[name].T for name in rows)
        width = sum(values.shape[1] for values in rows.values())
        return Attribution(scores.numpy(), 1, BERGSON_DIM**2, 4 * width)

    return averaged_over(problem, checkpoints, of_one)


_FINAL: dict[str, Method] = {
    "traker 0.3.2": traker,
    "dattri 0.3.0 TRAK": dattri_trak,
    "dattri 0.3.0 TRAK, regularization 0.1": partial(dattri_trak, regularization=0.1),
    "kronfluence 1.0.1 EK-FAC": kronfluence,
    "kronfluence 1.0.1 EK-FAC, heuristic damping": partial(kronfluence, damping=None),
    "kronfluence 1.0.1 K-FAC, heuristic damping": partial(kronfluence, strategy="kfac", damping=None),
    "dattri 0.3.0 LoGra": partial(dattri_blocks, name="LoGraAttributor", proj_dim=BLOCK_DIM, damping=5e-3),
    "dattri 0.3.0 GraSS": partial(
        dattri_blocks, name="FactGraSSAttributor", proj_dim=BLOCK_DIM, damping=5e-3
    ),
    "captum 0.9.0 TracInCP": captum_tracin,
    "captum 0.9.0 TracInCPFast": partial(captum_tracin, fast=True),
}
PEERS: dict[str, Method] = {
    **{f"{name}, final model": method for name, method in _FINAL.items()},
    "captum 0.9.0 similarity, final model": captum_similarity,
    **{f"{name}, run": partial(method, checkpoints="run") for name, method in _FINAL.items()},
    "dattri 0.3.0 EK-FAC, final model": partial(dattri_influence, name="IFAttributorEKFAC", damping=1e-3),
    "dattri 0.3.0 DataInf, final model": partial(
        dattri_influence, name="IFAttributorDataInf", regularization=1e-2
    ),
    "dattri 0.3.0 Arnoldi, final model": partial(
        dattri_influence, name="IFAttributorArnoldi", regularization=1e-2, max_iter=10
    ),
    "dattri 0.3.0 IF-CG, final model": partial(
        dattri_influence, name="IFAttributorCG", regularization=5e-3, max_iter=10
    ),
}
PEERS["dattri 0.3.0 IF-CG, run"] = partial(PEERS["dattri 0.3.0 IF-CG, final model"], checkpoints="run")
"""In the order of their cost: influence functions of dattri take minutes to hours."""


def _in_steps(method: Method) -> Method:
    def on_linear_layers(problem: Problem) -> Attribution:
        if problem.setting.make_model is RowsGRU:
            setting = replace(problem.setting, make_model=RowsGRUInSteps)
            runs = [[RowsGRUInSteps.weights(state) for state in run] for run in problem.runs]
            problem = replace(problem, setting=setting, runs=runs)
        return method(problem)

    return on_linear_layers


PEERS = {name: _in_steps(method) for name, method in PEERS.items()}


def _of_log_p(method: Method) -> Method:
    return lambda problem: method(replace(problem, output=LOG_P))


TEXT_PEERS: dict[str, Method] = {
    f"{name} of log p, {models}": _of_log_p(partial(method, checkpoints=checkpoints))
    for models, checkpoints in (("final model", "final"), ("run", "run"))
    for name, method in {
        "traker 0.3.2": traker,
        "kronfluence 1.0.1 EK-FAC": kronfluence,
        "kronfluence 1.0.1 EK-FAC, heuristic damping": partial(kronfluence, damping=None),
    }.items()
} | {
    "bergson 2.5.1, final model": bergson,
    "bergson 2.5.1, run": partial(bergson, checkpoints="run"),
    "bergson 2.5.1 of log p, run": partial(bergson, checkpoints="run", of_targets="ce"),
}
"""For language models alone."""
