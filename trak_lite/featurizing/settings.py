"""Settings of an attributor, with every ``"auto"`` resolved, and their representation in a store's manifest.

Source: TRAK (arXiv:2303.14186), with damping and curvature weights as in the native method of trak_lite.
"""

from __future__ import annotations

import copy
import logging
import math
import platform
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import torch
from torch import nn

from trak_lite.core.devices import Float32Products
from trak_lite.core.normalization import Normalization, NormalizationKind, as_normalization
from trak_lite.core.validate import flag, one_of, positive_int
from trak_lite.core.version import __version__
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    AbstractGradientComputer,
    FunctionalGradientComputer,
    choose_gradient_computer,
    select_parameters,
)
from trak_lite.gradient_computers._base import products_fingerprint
from trak_lite.gradient_computers.choice import require_computer
from trak_lite.methods import LESS, METHODS, TRAK, AbstractMethod, Fisher, GaussNewton, Method, as_method
from trak_lite.modelout_functions import AbstractModelOutput, QuestionsModelOutput, resolve_task
from trak_lite.modelout_functions._base import Task as Task
from trak_lite.modelout_functions._base import fisher_task
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.models.borrowing import refuse_expanded, refuse_without_values, resolve_device
from trak_lite.models.optimizers import AdamStates
from trak_lite.models.sharded import is_sharded, refuse_sharded, refuse_unsupported_sharding
from trak_lite.projectors import AbstractProjector
from trak_lite.projectors.select import projector_name, select_projector
from trak_lite.run.tables import FEATURES, GRADIENT_NORM, LOSS_CURVATURE, OUT_TO_LOSS, feature_table_spec
from trak_lite.store import Column, Manifest, TableSpec
from trak_lite.store._columns import DTYPES, dtype_fingerprint
from trak_lite.types import Batch, FeatureLayout, ParameterChoice, ParameterShapes, num_entries

logger = logging.getLogger(__name__)

DEFAULT_ROW_WIDTH: Final = 32768
"""Total features of a row over all modules, for ``proj_dim="auto"``."""
MOST_FEATURES: Final = 2048
FEWEST_FEATURES: Final = 64
"""Bounds of the features per module, for ``proj_dim="auto"``."""
WIDEST_FITTED: Final = 4096
"""Widest segment for which ``method="auto"`` chooses Fisher: the time of the fit grows with the cube of the width."""
_ASKED: Final = "task"
"""Name of the question of ``score(..., task=...)``."""

GradientComputerFactory = Callable[..., AbstractGradientComputer]
ProjectorChoice: TypeAlias = str | AbstractProjector


@final
class AttributorSettings:
    """Resolved settings of rows and scores. Only the gradient computer may be chosen later, on the first samples."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        *,
        proj_dim: int | Literal["auto"],
        seed: int,
        device: str | torch.device,
        dtype: Literal["float32", "float16", "int8", "int4"],
        grad_wrt: ParameterChoice | None,
        gradient_computer: str | GradientComputerFactory,
        float32_products: Float32Products,
        normalize: NormalizationKind | Normalization,
        store_norms: bool,
        projector: ProjectorChoice,
        layout: Literal["auto", "joint", "module"],
        method: Method,
    ) -> None:
        """Check and resolve every setting; the arguments are those of :class:`~trak_lite.Attributor`."""
        refuse_without_values(model)
        refuse_expanded(model)
        self.device = resolve_device(device, model)
        refuse_unsupported_sharding(model)
        self._model = model
        self.task = resolve_task(task)
        if isinstance(self.task, QuestionsModelOutput):
            self.task.know_model(model)
        self.dtype = one_of(DTYPES, dtype=dtype)
        chosen = select_parameters(model, grad_wrt)
        self.parameters: ParameterShapes = {name: tuple(p.shape) for name, p in chosen.items()}
        if one_of(("auto", "joint", "module"), layout=layout) == "auto" and isinstance(projector, str):
            layout = "module"  # instances of projectors set their own layout
        self.projector = select_projector(
            projector,
            proj_dim=_decide_proj_dim(proj_dim, layout, self.parameters),
            seed=seed,
            device=self.device,
            layout=layout,
        )
        computer_name, self._make_computer = _decide_computer(gradient_computer, model)
        self._known_computer: tuple[str, str] | None = None
        """Name of the gradient computer that the store records, which ``"auto"`` tries first, and the reason."""
        self._is_own_computer = computer_name is None
        self._products = _decide_products(float32_products, gradient_computer)
        self.normalization = as_normalization(normalize)
        if self.normalization.reads_optimizer:
            refuse_sharded(model, f"normalize={self.normalization.kind!r}", "Use normalize='none'")
        self.method = self.scored_by(self._best_method() if method == "auto" else as_method(method))
        self._arguments = {  # None marks custom objects, which the user has to pass again
            "task": self.task.train_task().name or None,
            "proj_dim": self.projector.proj_dim or self.layout.width,
            "seed": int(self.projector.seed),
            "dtype": self.dtype,
            "gradient_computer": computer_name,
            "float32_products": self._products,
            "normalize": self.normalization.to_json(),
            "store_norms": flag(store_norms=store_norms),
            "projector": projector_name(projector),
            "layout": layout,
            "method": self.method.to_json() if type(self.method) in METHODS.values() else None,
        }
        self._made_with: dict[str, Any] = {**versions(self.device), "settings": self._arguments}
        logger.info(
            "Settings: %d parameters in %d tensors, %s, rows of %d numbers.",
            num_entries(self.parameters),
            len(self.parameters),
            self._arguments,
            self.layout.width,
        )

    @cached_property
    def layout(self) -> FeatureLayout:
        """Segments of a feature row."""
        return self.projector.layout(self.parameters)

    def asking(self, task: Task) -> tuple[AttributorSettings, str]:
        """Return these settings with another task for targets, and the name of its question.

        The train rows, their fits and the manifest stay those of the featurized task. The name is empty if the task is
        that of the train rows (or adds questions to it), so that targets are evaluated as they are.
        """
        resolved = resolve_task(task)
        is_same = describe_task(resolved, self._model) == describe_task(self.task, self._model)
        asked, name = copy.copy(self), ""
        if isinstance(resolved, QuestionsModelOutput):
            if not is_same:
                raise InvalidInputError(
                    "task adds questions to another task than that of the train rows. Pass QuestionsModelOutput(task "
                    "of the train rows, questions), or the question itself."
                )
        elif is_same:
            return self, ""
        else:
            own = self.task
            base, questions = (
                (own.task, own.questions) if isinstance(own, QuestionsModelOutput) else (own, {})
            )
            resolved, name = QuestionsModelOutput(base, {**questions, _ASKED: resolved}), _ASKED
        asked.task = resolved
        return asked, name

    def shown(self) -> dict[str, str]:
        """Return what an attributor with these settings does, as texts by name."""
        arguments, row = self._arguments, self.train_table(1, {}).row_bytes
        computer = "chosen by the first samples" if not self.computer_is_chosen else self.computer_choice
        return {
            "task": self.task.name or type(self.task).__name__,
            "parameters": f"{num_entries(self.parameters):,} in {len(self.parameters)} tensors, on {self.device}",
            "features": f"{row_widths(self.layout)} ({arguments['projector'] or 'a custom projector'}, "
            f"proj_dim={arguments['proj_dim']})",
            "rows": f"{self.dtype}, {row:,} bytes each per checkpoint",
            "gradients": computer,
            "method": str(self.method),
        }

    def trial(self) -> AttributorSettings:
        """Return these settings for a trial, whose choice of a gradient computer changes nothing here."""
        trial = copy.copy(self)
        trial._arguments = dict(self._arguments)
        trial._made_with = {**self._made_with, "settings": trial._arguments}
        return trial

    # ---------------------------------------------------------------- gradients

    @property
    def computer_is_chosen(self) -> bool:
        """Whether the gradient computer is chosen; otherwise the first samples decide."""
        return self._make_computer is not None

    @property
    def computer_choice(self) -> str:
        """The gradient computer, and why it was chosen if it was."""
        name = self._arguments["gradient_computer"] or "a custom one"
        reason = self._made_with.get("gradient_computer_reason")
        return str(name) if reason is None else f"{name} ({reason})"

    def computer(self, *, of_drawn_labels: bool = False) -> AbstractGradientComputer:
        """Return a gradient computer with the model's current weights; for drawn labels, of their log-likelihood."""
        more: dict[str, Any] = {} if self._is_own_computer else {"float32_products": self._products}
        made = (self._make_computer or FunctionalGradientComputer)(
            model=self._model,
            task=self._fisher_task() if of_drawn_labels else self.task,
            grad_dim=num_entries(self.parameters),
            dtype=None,
            device=self.device,
            grad_wrt=list(self.parameters),
            **more,
        )
        require_computer(made)
        return made

    @property
    def modules(self) -> FeatureLayout | None:
        """The layout of rows that are rounded, if the method weighs modules by themselves, whatever their size."""
        layout, method = self.layout, self.method
        by_module = method.kernel is not None or method.inverse is not None or method.unit_scope(layout)
        is_rounded = self.train_table(1, {}).columns[0].dtype != "float32"
        return layout if by_module and is_rounded and len(method.layout_of(layout).segments) > 1 else None

    def num_fit_rows(self, num_rows: int) -> int:
        """Return the number of gradients that ``featurize`` computes for the fit of a checkpoint; 0 without a fit."""
        fisher: Fisher | None = self.method.fisher_fit
        if fisher is None:
            return 0
        return math.prod(fisher.num_draws(num_rows, self.layout, self.projector.proj_dim))

    @property
    def _is_normalised(self) -> bool:
        """Whether rows are divided by their norms, by these settings or by a custom gradient computer."""
        return "normalization" in self._computed[1] or self.normalization.kind not in ("none", "adam")

    @cached_property
    def _computed(self) -> tuple[Float32Products, dict[str, Any]]:
        """Return how gradient computers compute float32 products, and their fingerprint.

        Only a custom one is made to be asked. It may have other products than the settings.
        """
        if not self._is_own_computer:
            return self._products, products_fingerprint(self._products)
        computer = self.computer()
        return computer.float32_products, computer.fingerprint()

    def _fisher_task(self) -> AbstractModelOutput:
        if self._is_normalised:
            raise InvalidInputError(
                "The rows are normalised, and Fisher needs gradients that are not. Use method='TRAK' or "
                "normalize='none'."
            )
        return fisher_task(self.task)

    def recall_computer(self, manifest: Manifest) -> None:
        """Let ``gradient_computer="auto"`` try the one that a store's manifest records first, if it records one.

        A resumed run begins with other samples, on which another one may be chosen.
        """
        made_with = manifest.made_with
        name = (made_with.get("settings") or {}).get("gradient_computer")
        if name is not None:
            why = made_with.get("gradient_computer_reason")
            self._known_computer = name, "taken from the store" + (f"; {why}" if why else "")

    def choose_computer(self, batch: Batch) -> AbstractGradientComputer:
        """Resolve ``gradient_computer="auto"`` on the first samples; return the chosen gradient computer."""
        name, reason, computer = choose_gradient_computer(
            self._model,
            self.task,
            batch,
            list(self.parameters),
            float32_products=self._products,
            known=self._known_computer,
        )
        self._make_computer = GRADIENT_COMPUTERS[name]
        # The manifest of a store that is created later contains both dicts.
        self._arguments["gradient_computer"] = name
        self._made_with["gradient_computer_reason"] = reason
        return computer

    # ---------------------------------------------------------------- manifest, tables and fingerprints

    def manifest(self, dataset: Mapping[str, Any] | None) -> Manifest:
        """Return the manifest of these settings; without a dataset, its fingerprint has no ``dataset`` entry."""
        products, computed = self._computed
        normalized = self.normalization.fingerprint()
        if computed.keys() & normalized.keys():
            raise InvalidInputError(
                f"The gradient computer already normalises ({computed['normalization']}), and "
                f"normalize={normalized['normalization']} would do it again. Leave out one of the two."
            )
        fingerprint: dict[str, Any] = {
            **dtype_fingerprint(self.dtype),
            "feature_width": self.layout.width,
            "gradients": {**computed, **normalized},
            "layout": self.layout.to_json(),
            "mode": "eval",
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "projector": self.projector.fingerprint(),
            "task": describe_task(self.task, self._model),
        }
        if dataset is not None:
            fingerprint["dataset"] = dict(dataset)
        self._made_with["float32_products"] = products
        return Manifest(fingerprint, self._made_with)

    def train_table(self, num_rows: int, fingerprint: Mapping[str, Any]) -> TableSpec:
        """Return the table of the train rows' features of one checkpoint."""
        beside = (OUT_TO_LOSS, LOSS_CURVATURE, *([GRADIENT_NORM] if self._arguments["store_norms"] else []))
        return feature_table_spec(num_rows, self.layout.width, self.dtype, fingerprint, beside=beside)

    def target_table(
        self, num_targets: int, fingerprint: Mapping[str, Any], *, preconditioned: bool
    ) -> TableSpec:
        """Return the table of the targets' features of one checkpoint."""
        # Features multiplied by an inverse curvature can exceed the range of float16. Targets are never quantised:
        # there are few, and the inverse kernel amplifies their rounding errors.
        dtype = "float32" if preconditioned else Column(FEATURES, self.layout.width, self.dtype).value_dtype
        return feature_table_spec(num_targets, self.layout.width, dtype, fingerprint, beside=())

    def row_fingerprint(self, model_id: int, digest: str, adam: AdamStates | None) -> dict[str, Any]:
        """Return the JSON values that determine a checkpoint's rows.

        These are its weights, and the state of the task and of Adam where rows depend on them.
        """
        more = {"task_state": self.task.state_digest(), "optimizer": None if adam is None else adam.digest}
        states = {name: state for name, state in more.items() if state is not None}
        return {"model_id": model_id, "weights": digest, **states}

    # ---------------------------------------------------------------- methods

    def scored_by(self, method: Method | None) -> AbstractMethod:
        """Return the method of one call, with every default resolved; ``None`` is the attributor's."""
        if method is None:
            return self.method
        decided = as_method(method).decided(self.layout)
        decided.check(self.task)
        decided.check_rows(self.normalization.kind)
        if decided.fisher_fit is not None:
            self._fisher_task()
        return decided

    def _best_method(self) -> AbstractMethod:
        """Return the default method: the one whose kernel is closest to the curvature of the training loss."""
        if self.normalization.kind == "adam_update":
            return LESS()
        if self.task.has_curvature and self.task.log_likelihood() is None:
            return GaussNewton()
        narrow = max(segment.width for segment in self.layout.segments) <= WIDEST_FITTED
        if self.task.can_sample and narrow and not self._is_normalised:
            return Fisher()
        return GaussNewton() if self.task.has_curvature else TRAK(damping=None, layout="stored")


def _decide_computer(
    choice: str | GradientComputerFactory, model: nn.Module
) -> tuple[str | None, GradientComputerFactory | None]:
    """Return the gradient computer's name and factory.

    The name is ``None`` for a custom gradient computer. The factory is ``None`` for ``"auto"``, until the first samples
    decide. For a sharded model ``"auto"`` is ``"hook"``, the only one that supports it.
    """
    if callable(choice):
        made = getattr(choice, "func", choice)
        if isinstance(made, type):
            require_computer(made)
        if not getattr(made, "runs_sharded", False):
            refuse_sharded(model, f"gradient_computer={choice!r}", "Use gradient_computer='hook'")
        return None, choice
    name = one_of(("auto", *GRADIENT_COMPUTERS), gradient_computer=choice)
    if name == "auto" and is_sharded(model):
        name = "hook"
    if name != "auto" and not GRADIENT_COMPUTERS[name].runs_sharded:
        refuse_sharded(model, f"gradient_computer={name!r}", "Use gradient_computer='hook'")
    return name, None if name == "auto" else GRADIENT_COMPUTERS[name]


def _decide_products(products: Float32Products, computer: str | GradientComputerFactory) -> Float32Products:
    """Return how float32 products are computed; a custom gradient computer has this setting of its own."""
    decided: Float32Products = one_of(("ieee", "tf32"), float32_products=products)  # type: ignore[assignment]
    if decided != "ieee" and callable(computer):
        raise InvalidInputError(
            f"float32_products={decided!r} is for gradient computers that are chosen by name, and gradient_computer is "
            f"{computer!r}. Pass it to the gradient computer: gradient_computer=partial(HookGradientComputer, "
            f"float32_products={decided!r})."
        )
    return decided


def _decide_proj_dim(proj_dim: int | str, layout: str, parameters: ParameterShapes) -> int:
    """Return K; ``"auto"`` limits the total row width to ``DEFAULT_ROW_WIDTH`` where possible."""
    if proj_dim != "auto":
        return positive_int(proj_dim=proj_dim)
    modules = len({name.rpartition(".")[0] for name in parameters}) if layout == "module" else 1
    share = max(DEFAULT_ROW_WIDTH // max(modules, 1), 1)
    power_of_two = 1 << (share.bit_length() - 1)
    return max(FEWEST_FEATURES, min(MOST_FEATURES, power_of_two))


def row_widths(layout: FeatureLayout) -> int | str:
    """Return the number of features per row; of several segments ``"segments x width"``, or their widths' sum."""
    count, widths = len(layout.segments), {segment.width for segment in layout.segments}
    if count == 1:
        return layout.width
    return f"{count} x {widths.pop()}" if len(widths) == 1 else f"{layout.width} in {count} modules"


def versions(device: torch.device) -> dict[str, Any]:
    """Return the versions of trak_lite and its dependencies, and the device, as JSON values."""
    return {
        "trak_lite": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": str(device),
    }
