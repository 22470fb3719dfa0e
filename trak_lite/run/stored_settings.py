"""The settings in a manifest: what reads a store without its model, and what an attributor of the store needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, Self, final

import torch
from torch import nn

from trak_lite.errors import CorruptStoreError, InvalidInputError, ManifestMismatchError
from trak_lite.gradient_computers.normalization import Normalization
from trak_lite.methods import AbstractMethod, Method, as_method
from trak_lite.modelout_functions import MODEL_OUTPUTS, AbstractModelOutput
from trak_lite.run.settings import AttributorSettings, Task
from trak_lite.store import Manifest
from trak_lite.types import FeatureLayout

_NOT_STORED: Final = ("model", "device", "grad_wrt")
_STORED_SETTINGS: Final = [
    name for name in signature(AttributorSettings).parameters if name not in _NOT_STORED
]
"""Arguments of an attributor that a manifest stores among its settings."""


@final
@dataclass(frozen=True, slots=True)
class StoredSettings:
    """The settings in a store's manifest that are needed to read scores without the model or the task."""

    layout: FeatureLayout
    method: AbstractMethod
    device: torch.device
    """Device of products of stored rows."""
    row_kind: str = "none"
    """Kind of the normalisation of rows."""

    @classmethod
    def of(cls, manifest: Manifest, *, device: torch.device, where: str) -> Self:
        """Return the settings in a manifest; ``where`` is the name of the store in messages."""
        _refuse_older(manifest, where)
        try:
            layout = FeatureLayout.from_json(manifest.fingerprint["layout"])
            method = as_method(manifest.made_with["settings"]["method"])
            kind = row_kind(manifest)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptStoreError(
                f"The manifest of {where} does not contain a layout and a method ({error!r:.200}). Open the store in "
                "Python with the model: Attributor.open(path, model)."
            ) from error
        return cls(layout, method, device, kind)

    def scored_by(self, method: Method | None) -> AbstractMethod:
        """Return the method of one call; see :meth:`AttributorSettings.scored_by`."""
        if method is None:
            return self.method
        decided = as_method(method).decided(self.layout)
        decided.check_rows(self.row_kind)
        return decided


def row_kind(manifest: Manifest) -> str:
    """Return the kind of the normalisation of the rows of a store."""
    return str(manifest.fingerprint.get("gradients", {}).get("normalization", {}).get("kind", "none"))


def stored_arguments(
    manifest: Manifest, task: Task | None, overrides: Mapping[str, Any], *, where: str
) -> tuple[Task, dict[str, Any]]:
    """Return the task and the keyword arguments of the attributor that a store was made with.

    The user's task and overrides replace stored values; those that are ``None`` are left out. ``where`` is the name of
    the store in messages.
    """
    _refuse_older(manifest, where)
    try:
        stored = manifest.made_with.get("settings", {})
        arguments = {name: stored[name] for name in _STORED_SETTINGS if name in stored}
        arguments["grad_wrt"] = list(manifest.fingerprint["parameters"])
        # Stores of older versions have no such setting; their gradients are not normalised.
        arguments["normalize"] = Normalization(**arguments.get("normalize", {}))
        stored_task: Task | None = arguments.pop("task", None)
        described = manifest.fingerprint.get("task", {})
        if stored_task in MODEL_OUTPUTS and described.get("name") == stored_task:
            # With its stored settings, which may differ from the current defaults.
            entry = MODEL_OUTPUTS[stored_task]
            cls = type(entry) if isinstance(entry, AbstractModelOutput) else entry
            stored_task = cls(**described["settings"])
        elif stored_task not in MODEL_OUTPUTS:
            stored_task = None  # a class of the user's that has a name
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptStoreError(
            f"The manifest of {where} does not hold the settings of an attributor ({error!r:.200}). Restore its "
            "zarr.json from a backup, or pass the settings: Attributor(model, task, path, ...)."
        ) from error
    if arguments.get("layout") == "auto" and arguments.get("projector") not in (None, "two_sided"):
        arguments["layout"] = "joint"  # the meaning of "auto" in older versions
    # None is the default of the arguments that have one, and otherwise stands for the stored value.
    arguments.update({name: value for name, value in overrides.items() if value is not None})
    chosen = stored_task if task is None else task
    needed = [name for name, value in arguments.items() if value is None]
    if chosen is None:
        needed.append("task")
    if chosen is None or needed:
        raise InvalidInputError(
            f"{where} was made with custom objects, which a store does not contain: {needed}. Pass "
            f"{', '.join(f'{name}=...' for name in needed)} to Attributor.open."
        )
    return chosen, arguments


def refuse_other_model(model: nn.Module, parameters: Iterable[str], *, where: str) -> None:
    """Raise if a model lacks parameters that the rows of a store are of; ``where`` is its name in messages."""
    model_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := [name for name in parameters if name not in model_names]:
        # By DDP, torch.compile.
        wrapped = [name for name in model_names if name.endswith(f".{missing[0]}")]
        has = f" (it has {min(wrapped)!r})" if wrapped else ""
        raise ManifestMismatchError(
            f"The rows are of another model: {where} has gradients of {len(missing)} parameters that this "
            f"{type(model).__name__} lacks, such as {missing[0]!r}{has}. Pass a model of the store's architecture."
        )


def _refuse_older(manifest: Manifest, where: str) -> None:
    """Raise for stores of older versions of trak_lite, whose settings have no method."""
    settings = manifest.made_with.get("settings")
    if isinstance(settings, Mapping) and settings and "method" not in settings:
        raise ManifestMismatchError(
            f"{where} was written by an older version of trak_lite: its settings name no method. Featurize again into "
            "another path, or use the version that made it."
        )
