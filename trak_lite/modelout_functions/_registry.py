"""Resolves task names, classes and functions to model output functions."""

from __future__ import annotations

import difflib
import inspect

from torch import nn

from trak_lite.errors import UnknownTaskError
from trak_lite.modelout_functions._base import AbstractModelOutput, CallableModelOutput, TaskFunction
from trak_lite.modelout_functions.classification import (
    BinaryClassificationModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    MultiLabelModelOutput,
    TextClassificationModelOutput,
)
from trak_lite.modelout_functions.contrastive import CLIPModelOutput, ContrastiveModelOutput
from trak_lite.modelout_functions.diffusion import DiffusionModelOutput
from trak_lite.modelout_functions.language_modeling import (
    CausalLanguageModelingModelOutput,
    DenseClassificationModelOutput,
    MaskedLanguageModelingModelOutput,
    SequenceToSequenceModelOutput,
)
from trak_lite.modelout_functions.post_training import (
    AnswerDifferenceModelOutput,
    DPOModelOutput,
    PolicyGradientModelOutput,
    RewardModelOutput,
)
from trak_lite.modelout_functions.regression import RegressionModelOutput

__all__ = ["MODEL_OUTPUTS", "TASK_TO_MODELOUT", "resolve_task"]

MODEL_OUTPUTS: dict[str, type[AbstractModelOutput]] = {
    cls.name: cls
    for cls in (
        ImageClassificationModelOutput,
        IterativeImageClassificationModelOutput,
        TextClassificationModelOutput,
        BinaryClassificationModelOutput,
        MultiLabelModelOutput,
        RegressionModelOutput,
        CausalLanguageModelingModelOutput,
        MaskedLanguageModelingModelOutput,
        SequenceToSequenceModelOutput,
        DPOModelOutput,
        RewardModelOutput,
        AnswerDifferenceModelOutput,
        PolicyGradientModelOutput,
        DenseClassificationModelOutput,
        DiffusionModelOutput,
        ContrastiveModelOutput,
        CLIPModelOutput,
    )
}
"""Built-in model output functions by task name."""

TASK_TO_MODELOUT = MODEL_OUTPUTS
"""Alias of :data:`MODEL_OUTPUTS` with the original TRAK's name."""

_ACCEPTED = (
    "a task name, an AbstractModelOutput (instance or class), or a function f(model_call, batch) -> (B,)"
)


def resolve_task(
    task: str | AbstractModelOutput | type[AbstractModelOutput] | TaskFunction,
) -> AbstractModelOutput:
    """Return the model output function of a task.

    Args:
        task: A name in :data:`MODEL_OUTPUTS`, an instance or class of :class:`AbstractModelOutput`, or a
            function.

    Raises:
        UnknownTaskError: For an unknown name (the message gives the nearest known one), a class that needs
            arguments, or any other type, such as a model.

    Example:
        >>> resolve_task("regression").settings()
        {'output': 'prediction'}
    """
    if isinstance(task, str):
        if task in MODEL_OUTPUTS:
            return MODEL_OUTPUTS[task]()
        # A part of several names ("classification") is none of them: their batches and outputs differ.
        near = [name for name in MODEL_OUTPUTS if task and task.casefold() in name]
        near = near or difflib.get_close_matches(task, MODEL_OUTPUTS, n=1)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UnknownTaskError(
            f"Unknown task {task!r}.{hint} Known names: {sorted(MODEL_OUTPUTS)}. Expected {_ACCEPTED}."
        )
    if isinstance(task, AbstractModelOutput) and type(task) is not AbstractModelOutput:
        return task
    if isinstance(task, type):
        if not issubclass(task, AbstractModelOutput) or task is AbstractModelOutput:
            raise UnknownTaskError(
                f"The task is the class {_type_name(task)}. Expected {_ACCEPTED}.{_hint(task)}"
            )
        parameters = inspect.signature(task).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
        if needed:
            raise UnknownTaskError(
                f"The task class {_type_name(task)} needs the arguments {needed}. Pass an instance instead of the "
                "class."
            )
        return task()
    if callable(task) and not isinstance(task, nn.Module | AbstractModelOutput):
        return CallableModelOutput(task)
    raise UnknownTaskError(
        f"The task is a {_type_name(type(task))}. Expected {_ACCEPTED}.{_hint(type(task))}"
    )


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _hint(cls: type) -> str:
    """Return a hint for the error message if the mistake is a known one."""
    if issubclass(cls, nn.Module):
        return " Pass the model as the argument `model`."
    if callable(getattr(cls, "get_output", None)):
        return " Derive it from trak_lite.modelout_functions.AbstractModelOutput; its methods need no change."
    return ""
