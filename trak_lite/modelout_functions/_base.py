"""Base class of model output functions: f, q and w of every sample from one forward pass."""

from __future__ import annotations

import difflib
import inspect
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from trak_lite.core.devices import Float32Products, model_pass
from trak_lite.core.eval_caches import drop_eval_caches, hooks_noted, own_forwards, passes_undone
from trak_lite.data.batches import batch_size, map_tensors, take_rows, with_own_containers
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError, UnknownTaskError
from trak_lite.modelout_functions._inputs import precise, shape_texts
from trak_lite.modelout_functions._margins import UniformNoise, linear_terms
from trak_lite.types import Batch, OutputTerms


class ModelCall:
    """Calls a model with its own parameters and buffers or with replacements.

    A model output function receives a ``ModelCall`` instead of the model, so that the same function works with
    gradient computers that use ``torch.func`` and with those that call the module directly.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        *,
        modules: Sequence[nn.Module] | None = None,
        float32_products: Float32Products = "ieee",
    ) -> None:
        """Store the model and the optional replacements.

        Args:
            model: The module to call.
            parameters: Tensors by parameter name that replace the model's parameters; ``None`` for no replacement.
            buffers: Tensors by buffer name that replace the model's buffers; ``None`` for no replacement.
            modules: ``model.modules()``, if the caller has collected them.
            float32_products: ``"tf32"`` lets an accelerator round the factors of float32 products.
        """
        self.model = model
        self._modules = modules
        self._float32_products = float32_products
        self._parameters, self._buffers = parameters, buffers

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The tensors that the model runs with, by parameter name."""
        return dict(self.model.named_parameters()) if self._parameters is None else self._parameters

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The tensors that the model runs with, by buffer name."""
        return dict(self.model.named_buffers()) if self._buffers is None else self._buffers

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"A model call has no attribute {name!r} of the model. It calls the model, model_call(inputs), and has "
            "`parameters` and `buffers`, dicts of the tensors that it runs with, and `model`, which may hold other ones"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Otherwise values cached by an earlier pass would be used instead of the parameters.
        drop_eval_caches(self.model.modules() if self._modules is None else self._modules)
        with model_pass(self.model, self._float32_products), hooks_noted():
            if self._parameters is None and self._buffers is None:
                return self.model(*args, **kwargs)
            # functional_call does not restore the tensors of a module that is registered under two names.
            before = [(m, dict(m._parameters), dict(m._buffers)) for m in self.model.modules()]
            try:
                return functional_call(self.model, (dict(self.parameters), dict(self.buffers)), args, kwargs)
            finally:
                for module, parameters, buffers in before:
                    module._parameters.update(parameters)
                    module._buffers.update(buffers)


TaskFunction: TypeAlias = Callable[[ModelCall, Batch], Tensor]
"""A model output function as a plain callable: ``f(model_call, batch)`` returns one number per sample."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode, without gradients and Accelerate's mixed precision; what changes is restored."""
    modes = {module: module.training for module in model.modules()}
    put_forwards_back = own_forwards(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        put_forwards_back()
        for module, training in modes.items():
            module.training = training


class AbstractModelOutput(ABC):  # noqa: B024 - a subclass defines either of two contracts
    r"""Model output function :math:`f(z; \theta)`, its out-to-loss gradient q and its loss curvature w.

    A subclass defines :meth:`evaluate`. A subclass written for the original TRAK defines ``get_output`` (one
    sample without batch axis) and ``get_out_to_loss_grad`` instead, and works unchanged.

    Requirements, tested by ``trak_lite.testing.ModelOutputTests``: with L the loss as a function of f,
    :math:`\nabla L = -q\,\nabla f` and :math:`w = \partial^2 L / \partial f^2`. The terms of a sample do not
    depend on the other samples of its batch. An invalid sample (a label out of range) raises
    :class:`~trak_lite.errors.InvalidInputError` when run eagerly, and gives a NaN f with a NaN gradient under
    ``torch.func`` transforms.

    The package's own tasks are dataclasses of their settings, and raise ``InvalidInputError`` if one is not allowed.

    Source: TRAK (arXiv:2303.14186), sections 2 and 3.4.
    """

    name: ClassVar[str] = ""
    """The task's name for ``task=...``; empty for a class that is passed as an object."""
    version: ClassVar[int] = 1
    """Incremented whenever the values of a built-in function change; part of the store's fingerprint."""
    has_curvature: bool = True
    """False if the loss is linear in f or its curvature is unknown; w is then zero and is not used as a weight."""
    _checks: ClassVar[Mapping[str, Callable[..., Any] | None]] = {}
    """Of a task of this package, which is a dataclass: the fields that are settings, and what checks each alone."""

    def __post_init__(self) -> None:
        for name, check in self._checks.items():
            if check is not None:
                setattr(self, name, check(**{name: getattr(self, name)}))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Choose between the native and the original TRAK's interface by the methods that the subclass defines.

        Raises:
            TypeError: If it defines neither interface, or only one of the original TRAK's two methods.
        """
        super().__init_subclass__(**kwargs)
        evaluate = _definer(cls, "evaluate")
        overrides = [_definer(cls, name) < evaluate for name in ("get_output", "get_out_to_loss_grad")]
        native = cls.__mro__[evaluate] is not AbstractModelOutput
        if any(overrides) != all(overrides) or not (native or all(overrides)):
            raise TypeError(
                f"{cls.__name__} must define evaluate(model_call, batch), or both get_output and "
                "get_out_to_loss_grad as in the original TRAK."
            )
        if all(overrides):
            # A native base class's evaluate() would silently ignore the two methods defined here.
            cls.evaluate = AbstractModelOutput.evaluate  # type: ignore[method-assign]
            cls.has_curvature = bool(vars(cls).get("has_curvature", False))

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w of every sample of the batch, from one forward pass if possible.

        Args:
            model_call: Calls the model; use ``model_call(*inputs)`` for the forward pass.
            batch: B samples.

        Returns:
            Three tensors of shape ``(B,)``; q and w are detached.

        Raises:
            InvalidInputError: If the batch is not what the task expects.
        """
        # The two methods of the original TRAK, the first sample by sample; w is zero.
        count = batch_size(batch)
        model_args = model_call.model, model_call.parameters, model_call.buffers
        samples = (take_rows(batch, index) for index in range(count))
        outputs = [
            self.get_output(*model_args, *(sample if isinstance(sample, tuple | list) else (sample,)))
            for sample in samples
        ]
        output = torch.stack([value.reshape(()) for value in outputs])
        with torch.no_grad():
            grad = self.get_out_to_loss_grad(*model_args, batch)
        grad = grad.detach().reshape(count)
        return OutputTerms(output, grad, torch.zeros_like(grad))

    def get_output(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        *sample: Any,
    ) -> Tensor:
        """Return f of one sample without a batch axis, as a scalar (the original TRAK's method).

        Args:
            model: The module to call.
            weights: Parameters by name that replace the model's; ``None`` for no replacement.
            buffers: Buffers by name that replace the model's; ``None`` for no replacement.
            sample: The parts of a positional sample, or one mapping or dataclass of parts.
        """
        single = len(sample) == 1 and not isinstance(sample[0], Tensor)
        batch = map_tensors(lambda part: part.unsqueeze(0), sample[0] if single else sample)
        return self.evaluate(ModelCall(model, weights, buffers), batch).output.sum()

    def get_out_to_loss_grad(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        batch: Batch,
    ) -> Tensor:
        """Return q of shape ``(B, 1)`` (the original TRAK's method)."""
        terms = self.evaluate(ModelCall(model, weights, buffers), batch)
        return terms.out_to_loss_grad.unsqueeze(-1)

    def prepare(self, model: nn.Module) -> None:
        """Update state that depends on the model's weights; does nothing by default.

        ``Attributor`` and ``TRAKer`` call it after loading each checkpoint, before they call
        :meth:`state_digest` and before any sample is evaluated. A task whose state is computed by the
        model (such as CLIP's negatives) recomputes it here and leaves the model unchanged.

        Args:
            model: The model with the checkpoint's weights, on its device.
        """
        return

    @property
    def can_sample(self) -> bool:
        """Whether :meth:`sample_labels` is defined."""
        return type(self).sample_labels is not AbstractModelOutput.sample_labels

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Return the batch with labels drawn from the model's predictive distribution.

        Args:
            model_call: Calls the model.
            batch: B samples; their labels are replaced and at most mark which positions get a label.
            noise: ``noise(shape)`` returns uniform numbers in (0, 1), float64, ``(B, *shape)``. Those of a sample
                depend only on its row.

        Raises:
            InvalidInputError: If the task has no distribution of labels, or the batch is not what it expects.
        """
        raise InvalidInputError(
            f"{type(self).__name__} does not define the distribution of its labels, so none can be drawn. Use "
            "fisher='empirical', which takes the labels of the data, or define sample_labels."
        )

    def log_likelihood(self) -> AbstractModelOutput | None:
        """Return a task whose f is log p of the labels, if q times the gradient of f is not its gradient.

        Otherwise return ``None``. A sum of margins of several tokens or labels has no scalar q for the summed loss.
        """
        return None

    def train_task(self) -> AbstractModelOutput:
        """Return the task of the train rows, whose description identifies stored rows; by default this task.

        A task that only adds other outputs for targets returns the task without them, so that stored rows stay valid.
        """
        return self

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the results (a temperature, a choice of f) as JSON values."""
        values = {name: getattr(self, name) for name in self._checks}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def state_digest(self) -> str | None:
        """Return a digest of stored tensors that may differ per checkpoint; ``None`` if there are none."""
        return None


def _definer(cls: type, name: str) -> int:
    """Return the index in ``cls.__mro__`` of the class that provides ``name``."""
    return next(index for index, base in enumerate(cls.__mro__) if name in vars(base))


@final
@dataclass(eq=False)
class CallableModelOutput(AbstractModelOutput):
    """Computes f by ``function(model_call, batch) -> (B,)``. The loss is L = -f, so q = 1 and w = 0.

    The function calls the model through ``model_call(*inputs)``. Its value for a sample must not depend on
    the other samples of the batch. For another loss write a class with :meth:`AbstractModelOutput.evaluate`.
    """

    has_curvature = False

    function: TaskFunction
    """Returns f of every sample, given a :class:`ModelCall` and a batch."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidInputError(
                f"The model output function is a {type(self.function).__name__}. Expected a callable "
                "f(model_call, batch)."
            )

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        # The function may take entries out of its batch, which other passes need.
        output = self.function(model_call, with_own_containers(batch))
        expected = (batch_size(batch),)
        if not isinstance(output, Tensor) or output.shape != expected:
            shape = output.shape if isinstance(output, Tensor) else ()
            returned, wanted = shape_texts(shape, expected)
            result = f"shape {returned}" if isinstance(output, Tensor) else type(output).__name__
            raise InvalidInputError(
                f"The model output function returned {result}. Expected a tensor of shape {wanted}, one "
                "number per sample and no mean or sum over the batch."
            )
        return linear_terms(precise(output, what="The model output function's result"))


LossWeight: TypeAlias = Literal["out_to_loss_grad", "loss_curvature"]


@final
class LossModelOutput(AbstractModelOutput):
    r"""Another task's output f, weighted so that the outer product of its gradient is a curvature term.

    ``"out_to_loss_grad"``: :math:`q f` with q held constant, whose gradient is :math:`-\nabla L`; if the task defines
    :meth:`AbstractModelOutput.log_likelihood`, that task's :math:`q f`.
    ``"loss_curvature"``: :math:`\sqrt{w} f`; the outer product of its gradient is a sample's term of the Gauss-Newton
    matrix of L as a function of f.

    The caller must call ``prepare`` of the wrapped task.
    """

    def __init__(self, task: AbstractModelOutput, *, weight: LossWeight = "out_to_loss_grad") -> None:
        likelihood = task.log_likelihood() if weight == "out_to_loss_grad" else None
        self.task = task if likelihood is None else likelihood
        self.weight = weight

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return the weighted f, with q = 1 and w = 0; see :meth:`AbstractModelOutput.evaluate`."""
        terms = self.task.evaluate(model_call, batch)
        weight = terms.out_to_loss_grad if self.weight == "out_to_loss_grad" else terms.loss_curvature.sqrt()
        return linear_terms(terms.output * weight.detach())


def fisher_task(task: AbstractModelOutput) -> AbstractModelOutput:
    """Return a task whose output has the gradient of the log-likelihood; raise if the task cannot draw labels."""
    if not task.can_sample:
        others = "'GaussNewton' or 'TRAK'" if task.has_curvature else "'TRAK'"
        raise InvalidInputError(
            f"method='Fisher' draws labels from the model, and {type(task).__name__} does not define their "
            f"distribution. Use method={others}, or define sample_labels."
        )
    return LossModelOutput(task)


Task: TypeAlias = str | AbstractModelOutput | type[AbstractModelOutput] | TaskFunction
"""A model output function: its name, a custom one, or a callable ``f(model_call, batch) -> (B,)``."""

MODEL_OUTPUTS: dict[str, type[AbstractModelOutput] | AbstractModelOutput | Callable[..., Any]] = {}
"""Model output functions by task name: the classes of the built-in ones, and classes, instances or functions of a
user's own."""
TASK_TO_MODELOUT = MODEL_OUTPUTS
"""Alias of :data:`MODEL_OUTPUTS` with the original TRAK's name."""
_ACCEPTED = (
    "a task name, an AbstractModelOutput (instance or class), or a function f(model_call, batch) -> (B,)"
)


def resolve_task(task: Task) -> AbstractModelOutput:
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
            entry: Any = MODEL_OUTPUTS[task]
            is_object = isinstance(entry, type | nn.Module | AbstractModelOutput)
            # A partial class, or a function that makes the task: a task takes two arguments.
            makes_task = callable(entry) and not is_object and not _needed(entry)
            return resolve_task(entry() if makes_task else entry)
        # A part of several names ("language_modeling") is none of them: their batches and outputs differ.
        near = [name for name in MODEL_OUTPUTS if task and task.casefold() in name]
        near = near or difflib.get_close_matches(task, MODEL_OUTPUTS, n=1)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UnknownTaskError(
            f"Unknown task {task!r}.{hint} Known names: {sorted(MODEL_OUTPUTS)}. Expected {_ACCEPTED}."
        )
    cls = task if isinstance(task, type) else type(task)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if issubclass(cls, AbstractModelOutput) and cls is not AbstractModelOutput:
        if isinstance(task, AbstractModelOutput):
            return task
        if needed := _needed(cls):
            raise UnknownTaskError(
                f"The task class {name} needs the arguments {needed}. Pass an instance instead of the class."
            )
        return cls()
    if callable(task) and not isinstance(task, type | nn.Module | AbstractModelOutput):
        return CallableModelOutput(task)
    what = "the class" if isinstance(task, type) else "a"
    raise UnknownTaskError(f"The task is {what} {name}. Expected {_ACCEPTED}.{_hint(cls)}")


def outputs_of_model(model: nn.Module, task: AbstractModelOutput, rows: Rows, device: torch.device) -> Tensor:
    """Return f of every target, ``(M,)`` float64, for a model in eval mode."""
    task.prepare(model)
    outputs = []
    with torch.no_grad():
        for _, batch in rows.moved(np.arange(len(rows)), device):
            with passes_undone(model):
                outputs.append(task.evaluate(ModelCall(model), batch).output.cpu().double())
    return torch.cat(outputs)


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function or class needs."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _hint(cls: type) -> str:
    if issubclass(cls, nn.Module):
        return " Pass the model as the argument `model`."
    if callable(getattr(cls, "get_output", None)):
        return " Derive it from trak_lite.modelout_functions.AbstractModelOutput; its methods need no change."
    return ""
