"""What an attributor was told and what was decided of it: every ``"auto"``, and what a store's manifest says of it.

Source: TRAK (arXiv:2303.14186), with damping and curvature weights as in the native method of trak_lite.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, final

import numpy as np
import torch
from torch import Tensor, nn

from trak_lite._session import resolve_device
from trak_lite._validate import one_of, positive_int
from trak_lite._version import __version__
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    AbstractGradientComputer,
    FunctionalGradientComputer,
    Normalization,
    ParameterChoice,
    as_normalization,
    choose_gradient_computer,
    select_parameters,
)
from trak_lite.modelout_functions import AbstractModelOutput, describe_task, resolve_task
from trak_lite.pipeline import feature_table_spec, target_table_spec
from trak_lite.projectors import AbstractProjector, projector_name, select_projector
from trak_lite.scoring import DEFAULT_DAMPING, KernelSettings, ScoreSettings, ScoreView
from trak_lite.store import DTYPES, Manifest, TableSpec, dtype_fingerprint
from trak_lite.types import Batch, FeatureLayout, ParameterShapes, num_entries

__all__ = ["AttributorSettings", "GradientComputerFactory", "Task", "stored_arguments", "versions"]

logger = logging.getLogger(__name__)

GradientComputerFactory = Callable[..., AbstractGradientComputer]
Task = str | AbstractModelOutput | type[AbstractModelOutput] | Callable[..., Tensor]
"""A model output function: its name, one of one's own, or a callable ``f(model_call, batch) -> (B,)``."""


@final
class AttributorSettings:
    """Every setting behind rows and scores, decided; only the gradient computer may have to wait for first samples."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        *,
        proj_dim: int,
        seed: int,
        device: str | torch.device,
        dtype: Literal["float32", "float16", "int8", "int4"],
        grad_wrt: ParameterChoice | None,
        gradient_computer: str | GradientComputerFactory,
        normalize: Literal["none", "unit"] | Normalization,
        store_norms: bool,
        projector: str | AbstractProjector,
        layout: Literal["auto", "joint", "module"],
        kernel: Literal["auto", "curvature", "trak"],
        damping: float | Literal["auto"],
    ) -> None:
        """Check and decide every setting; the arguments are those of :class:`~trak_lite.Attributor`.

        Raises:
            InvalidInputError: If a setting is not among the allowed ones, or a name in ``grad_wrt`` is unknown.
            UnknownTaskError: If the task is unknown.
        """
        self._model = model
        self.task = resolve_task(task)
        self.dtype = one_of(DTYPES, dtype=dtype)
        self.device = resolve_device(device, model)
        self.parameters: ParameterShapes = {
            name: tuple(p.shape) for name, p in select_parameters(model, grad_wrt).items()
        }
        self.projector = select_projector(
            projector,
            proj_dim=positive_int(proj_dim=proj_dim),
            seed=seed,
            device=self.device,
            layout=layout,
        )
        computer_name, self._make_computer = _decide_computer(gradient_computer)
        self.normalization = as_normalization(normalize)
        self.kernel = _decide_kernel(kernel, damping, self.task)
        self._store_norms = store_norms
        self._arguments = {  # None stands for what only the user can give again
            "task": self.task.name or None,
            "proj_dim": self.projector.proj_dim or self.layout.width,
            "seed": int(self.projector.seed),
            "dtype": self.dtype,
            "gradient_computer": computer_name,
            "normalize": self.normalization.to_json(),
            "store_norms": store_norms,
            "projector": projector_name(projector),
            "layout": layout,
            "kernel": self._default_kernel,
            "damping": self.kernel.damping,
        }
        self._made_with: dict[str, Any] = {**versions(self.device), "settings": self._arguments}
        self._log()

    def _log(self) -> None:
        """Say once what was decided."""
        logger.info(
            "Settings: %d parameters in %d tensors, %s, rows of %d numbers.",
            num_entries(self.parameters),
            len(self.parameters),
            self._arguments,
            self.layout.width,
        )

    @property
    def layout(self) -> FeatureLayout:
        """Segments of a feature row."""
        return self.projector.layout(self.parameters)

    # ---------------------------------------------------------------- gradients

    @property
    def computer_is_chosen(self) -> bool:
        """Whether it is known how gradients are computed; otherwise the first samples decide."""
        return self._make_computer is not None

    def computer(self) -> AbstractGradientComputer:
        """Return a gradient computer with the weights that the model has now."""
        return (self._make_computer or FunctionalGradientComputer)(
            model=self._model,
            task=self.task,
            grad_dim=num_entries(self.parameters),
            dtype=None,
            device=self.device,
            grad_wrt=list(self.parameters),
        )

    def choose_computer(self, batch: Batch) -> AbstractGradientComputer:
        """Decide ``gradient_computer="auto"`` by trying the first samples; return the one that was tried."""
        name, reason, computer = choose_gradient_computer(
            self._model, self.task, batch, list(self.parameters)
        )
        self._make_computer = GRADIENT_COMPUTERS[name]
        # The manifest of a store not yet made refers to both.
        self._arguments["gradient_computer"] = name
        self._made_with["gradient_computer_reason"] = reason
        return computer

    # ---------------------------------------------------------------- what is stored, and what it is compared by

    def manifest(self, dataset: Mapping[str, Any] | None) -> Manifest:
        """Return the manifest of these settings; without a dataset, only what the settings determine.

        Raises:
            InvalidInputError: If the gradient computer and ``normalize`` would both normalise.
        """
        fingerprint: dict[str, Any] = {
            **dtype_fingerprint(self.dtype),
            "feature_width": self.layout.width,
            "gradients": self._gradient_fingerprint(),
            "layout": self.layout.to_json(),
            "mode": "eval",
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "projector": self.projector.fingerprint(),
            "task": describe_task(self.task),
        }
        if dataset is not None:
            fingerprint["dataset"] = dict(dataset)
        return Manifest(fingerprint, self._made_with)

    def train_table(self, num_rows: int, fingerprint: Mapping[str, Any]) -> TableSpec:
        """Return the table of the train rows' features of one checkpoint."""
        return feature_table_spec(
            num_rows, self.layout.width, self.dtype, fingerprint, norms=self._store_norms
        )

    def target_table(
        self, num_targets: int, fingerprint: Mapping[str, Any], *, preconditioned: bool
    ) -> TableSpec:
        """Return the table of the targets' features of one checkpoint."""
        # an inverse curvature is beyond float16's range
        dtype = "float32" if preconditioned else self.dtype
        return target_table_spec(num_targets, self.layout.width, dtype, fingerprint)

    def row_fingerprint(self, model_id: int, digest: str) -> dict[str, Any]:
        """Return what determines a checkpoint's rows: its weights, and the task's state if it has any."""
        state = self.task.state_digest()
        fingerprint = {"model_id": model_id, "weights": digest}
        return fingerprint if state is None else {**fingerprint, "task_state": state}

    def _gradient_fingerprint(self) -> dict[str, Any]:
        """Return what determines the gradients: the computer's settings, and how they are normalised."""
        computed, normalized = self.computer().fingerprint(), self.normalization.fingerprint()
        if computed.keys() & normalized.keys():
            raise InvalidInputError(
                f"The gradient computer normalises already ({computed['normalization']}), and normalize="
                f"{normalized['normalization']} would do it again. Leave out one of the two."
            )
        return {**computed, **normalized}

    # ---------------------------------------------------------------- how scores are made

    @property
    def default_scores(self) -> ScoreSettings:
        """How scores are made where a call does not say otherwise."""
        return ScoreSettings(kernel=self._default_kernel, damping=self.kernel.damping)

    def score_settings(self, **view: Unpack[ScoreView]) -> ScoreSettings:
        """Return how one call makes scores: as it says, and as by default where it leaves that open.

        Raises:
            InvalidInputError: If a value is unknown, or the task has no curvature to weigh rows by.
        """
        default = self.default_scores
        kernel = view.get("kernel") or default.kernel
        damping = view.get("damping")
        if kernel in ("curvature", "trak"):
            damping = default.damping if damping is None else damping
            _decide_kernel(kernel, DEFAULT_DAMPING if damping is None else damping, self.task)
        layout = "stored" if len(self.layout.segments) == 1 else view.get("layout", "stored")
        return ScoreSettings(
            kernel=kernel,
            damping=damping,
            layout=layout,
            q=view.get("q", "outside"),
            checkpoint_weights=view.get("checkpoint_weights"),
        )

    @property
    def _default_kernel(self) -> Literal["curvature", "trak"]:
        return "curvature" if self.kernel.weighting == "curvature" else "trak"


def stored_arguments(
    manifest: Manifest, task: Task | None, overrides: Mapping[str, Any], *, where: str
) -> tuple[Task, dict[str, Any]]:
    """Return the task, and the keywords of an attributor, that a store was made with.

    Args:
        manifest: Of the store.
        task: The user's; ``None`` takes the stored one.
        overrides: Keywords that take the place of stored ones.
        where: How messages name the store.

    Raises:
        InvalidInputError: If the store was made with something of the user's own that was not passed.
    """
    arguments = dict(manifest.made_with.get("settings", {}))
    arguments["grad_wrt"] = list(manifest.fingerprint["parameters"])
    # Stores of older versions say nothing of it, and hold gradients as they are.
    arguments["normalize"] = Normalization(**arguments.get("normalize", {}))
    arguments.update(overrides)
    stored_task: Task | None = arguments.pop("task", None)
    found = stored_task if task is None else task
    needed = [name for name, value in arguments.items() if value is None]
    if found is None:
        needed.append("task")
    if found is None or needed:
        raise InvalidInputError(
            f"{where} was made with {needed} of the user's own, which a store cannot keep. Pass "
            f"{', '.join(f'{name}=...' for name in needed)} to Attributor.open."
        )
    return found, arguments


def _decide_computer(
    choice: str | GradientComputerFactory,
) -> tuple[str | None, GradientComputerFactory | None]:
    """Return the gradient computer's name and how to make one.

    The name is ``None`` for one of the user's own; how to make it is ``None`` until the first samples decide.
    """
    if callable(choice):
        return None, choice
    name = one_of(("auto", *GRADIENT_COMPUTERS), gradient_computer=choice)
    return name, None if name == "auto" else GRADIENT_COMPUTERS[name]


def _decide_kernel(kernel: str, damping: float | str, task: AbstractModelOutput) -> KernelSettings:
    """Return the kernel settings with every ``"auto"`` decided."""
    name = one_of(("auto", "curvature", "trak"), kernel=kernel)
    if name == "curvature" and not task.has_curvature:
        raise InvalidInputError(
            f"kernel='curvature' needs a loss that is curved in f, but the loss of {type(task).__name__} is linear in "
            "it: every weight would be zero. Use kernel='trak'."
        )
    curved = name == "curvature" or (name == "auto" and task.has_curvature)
    lam = DEFAULT_DAMPING if damping == "auto" else damping
    return KernelSettings(weighting="curvature" if curved else "none", damping=lam)  # type: ignore[arg-type]


def versions(device: torch.device) -> dict[str, Any]:
    """Return the versions of what computes, and the device, as JSON values."""
    return {
        "trak_lite": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": str(device),
    }
