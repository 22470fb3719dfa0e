"""Other packages as released: traker 0.3.2, dattri 0.3.0 and kronfluence 1.0.1, on the same models, data and targets.

All attribute the measured output f (for the language model the sum of the tokens' margins; "of log p" the sum of log
p, which is the default of trak_lite). If a package needs a loss, it is the summed cross-entropy of a sample.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.lds.methods import BATCH, LOG_P, Attribution, Method, Problem
from trak_lite.modelout_functions import ModelCall

PROJ_DIM = 512
"""Of traker and dattri by default: 2048 and 512. Undamped, 512 is the better of the two with N = 1200."""


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
    """Return the cross-entropy of one sample, summed over its tokens, or its mean over a batch."""
    inputs, labels = _as_batch(problem, sample)
    parameters = weights[0] if isinstance(weights, tuple) else weights
    logits, rows = functional_call(model, parameters, (inputs,)), len(inputs)
    if logits.dim() == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(logits, labels, reduction="sum") / rows


def traker(problem: Problem, *, checkpoints: str = "final", lambda_reg: float = 0.0) -> Attribution:
    """Return the scores of the original TRAK, in float32; its float16 is too slow on many processors."""
    from trak import TRAKer

    states = problem.checkpoints(checkpoints)
    is_text = problem.setting.task != "image_classification"
    with tempfile.TemporaryDirectory() as folder:
        tool = TRAKer(
            problem.model(),
            _traker_output(problem) if is_text else "image_classification",
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


def _attribution_task(problem: Problem, checkpoints: str, *, of_loss: bool) -> Any:
    """Return the task in dattri's interface: train rows by f or by their loss, targets by f."""
    from dattri.task import AttributionTask

    model = problem.model()
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
        task=_attribution_task(problem, checkpoints, of_loss=False),
        correct_probability_func=probability,
        projector_kwargs={"proj_dim": PROJ_DIM},
        regularization=regularization,
    )
    attributor.cache(DataLoader(problem.train, batch_size=BATCH))
    scores = attributor.attribute(DataLoader(problem.targets, batch_size=BATCH))
    num_models = len(problem.checkpoints(checkpoints))
    return Attribution(scores.detach().numpy(), num_models, PROJ_DIM)


def dattri_influence(
    problem: Problem, name: str, *, checkpoints: str = "final", **settings: Any
) -> Attribution:
    """Return the scores of one of dattri's influence functions."""
    from dattri import algorithm
    from dattri.algorithm import influence_function

    make = getattr(algorithm, name, None) or getattr(influence_function, name)
    attributor = make(_attribution_task(problem, checkpoints, of_loss=True), **settings)
    attributor.cache(DataLoader(problem.train, batch_size=BATCH))
    scores = attributor.attribute(
        DataLoader(problem.train, batch_size=BATCH), DataLoader(problem.targets, batch_size=BATCH)
    )
    return Attribution(-scores.detach().numpy(), len(problem.checkpoints(checkpoints)))


def kronfluence(problem: Problem, *, checkpoints: str = "final", strategy: str = "ekfac") -> Attribution:
    """Return kronfluence's scores at its default damping, averaged over checkpoints."""
    states = problem.checkpoints(checkpoints)
    parts = [_kronfluence_of_one(problem, problem.model(state), strategy) for state in states]
    return Attribution(np.mean(parts, axis=0), len(states))


def _kronfluence_of_one(problem: Problem, model: nn.Module, strategy: str) -> np.ndarray:
    from kronfluence import Analyzer, FactorArguments, ScoreArguments, prepare_model

    torch.manual_seed(0)
    task = _kronfluence_task(problem)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(copy.deepcopy(model), task)
        analyzer = Analyzer("lds", prepared, task, cpu=True, disable_tqdm=True, output_dir=folder)
        analyzer.fit_all_factors(
            "factors",
            problem.train,
            factor_args=FactorArguments(strategy=strategy),
            per_device_batch_size=BATCH,
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            problem.targets,
            problem.train,
            per_device_query_batch_size=BATCH,
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(),
        )
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    return -scores.T.float().numpy()


def _kronfluence_task(problem: Problem) -> Any:
    from kronfluence import Task

    task = problem.measured()

    class Output(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits, labels = model(batch[0]), batch[1]
            if logits.dim() == 3:
                logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            if sample:
                labels = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(1)
            return functional.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return task.evaluate(ModelCall(model), tuple(batch)).output.sum()

    return Output()


PEERS: dict[str, Method] = {
    "traker 0.3.2, final model": traker,
    "traker 0.3.2, run": partial(traker, checkpoints="run"),
    "traker 0.3.2, 5 final models": partial(traker, checkpoints="finals"),
    "dattri 0.3.0 TRAK, final model": dattri_trak,
    "dattri 0.3.0 TRAK, run": partial(dattri_trak, checkpoints="run"),
    "dattri 0.3.0 TRAK, 5 final models": partial(dattri_trak, checkpoints="finals"),
    "dattri 0.3.0 TRAK, regularization 0.1, final model": partial(dattri_trak, regularization=0.1),
    "dattri 0.3.0 TRAK, regularization 0.1, run": partial(dattri_trak, checkpoints="run", regularization=0.1),
    "dattri 0.3.0 IF-CG, final model": partial(dattri_influence, name="IFAttributorCG", regularization=1e-2),
    "dattri 0.3.0 DataInf, final model": partial(
        dattri_influence, name="IFAttributorDataInf", regularization=1e-2
    ),
    "kronfluence 1.0.1 EK-FAC, final model": kronfluence,
    "kronfluence 1.0.1 EK-FAC, run": partial(kronfluence, checkpoints="run"),
    "kronfluence 1.0.1 EK-FAC, 5 final models": partial(kronfluence, checkpoints="finals"),
}
TEXT_PEERS: dict[str, Method] = {
    "traker 0.3.2 of log p, run": lambda problem: traker(replace(problem, output=LOG_P), checkpoints="run"),
    "kronfluence 1.0.1 EK-FAC of log p, final model": lambda problem: kronfluence(
        replace(problem, output=LOG_P)
    ),
    "kronfluence 1.0.1 EK-FAC of log p, run": lambda problem: kronfluence(
        replace(problem, output=LOG_P), checkpoints="run"
    ),
}
"""For the language model alone."""
