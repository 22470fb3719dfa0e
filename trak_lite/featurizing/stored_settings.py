"""The settings in a manifest: what reads a store without its model, and what an attributor of the store needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, Self, final

import torch
from torch import nn

from trak_lite.core.json_text import canonical_json, parse_json
from trak_lite.core.normalization import Normalization
from trak_lite.core.ranks import Ranks
from trak_lite.errors import CorruptStoreError, InvalidInputError, ManifestMismatchError, RankError
from trak_lite.featurizing.settings import AttributorSettings, Task
from trak_lite.methods import AbstractMethod, Method, as_method
from trak_lite.modelout_functions import MODEL_OUTPUTS, AbstractModelOutput
from trak_lite.run.tables import row_kind
from trak_lite.store import Manifest
from trak_lite.store.manifest import compare_fingerprints
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
        try:
            layout = FeatureLayout.from_json(manifest.fingerprint["layout"])
            method = as_method(manifest.made_with.get("settings", {})["method"])
            kind = row_kind(manifest)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptStoreError(
                f"The manifest of {where} does not contain a layout and a method ({error!r:.200}). Open the store in "
                "Python with the model: Attributor.open(path, model); one of TRAKer with TRAKer."
            ) from error
        return cls(layout, method, device, kind)

    def scored_by(self, method: Method | None) -> AbstractMethod:
        """Return the method of one call; see :meth:`AttributorSettings.scored_by`."""
        if method is None:
            return self.method
        decided = as_method(method).decided(self.layout)
        decided.check_rows(self.row_kind)
        return decided


def stored_arguments(
    manifest: Manifest, task: Task | None, overrides: Mapping[str, Any], *, where: str
) -> tuple[Task, dict[str, Any]]:
    """Return the task and the keyword arguments of the attributor that a store was made with.

    The user's task and overrides replace stored values; those that are ``None`` are left out. ``where`` is the name of
    the store in messages.
    """
    try:
        stored = manifest.made_with.get("settings", {})  # none of TRAKer
        arguments = {name: stored[name] for name in _STORED_SETTINGS}
        arguments["grad_wrt"] = list(manifest.fingerprint["parameters"])
        arguments["normalize"] = Normalization(**arguments["normalize"])
        stored_task: Task | None = arguments.pop("task")
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
            f"The manifest of {where} does not hold the settings of an attributor ({error!r:.200}). Open a "
            "store of TRAKer with TRAKer. For any other, restore zarr.json from a backup, or pass the settings: "
            "Attributor(model, task, path, ...)."
        ) from error
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


def refuse_other_settings(settings: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise :class:`RankError` on all ranks if one has other JSON values than rank 0; names what differs."""
    if ranks.size == 1:
        return
    of_rank_0 = ranks.broadcast("the settings", lambda: canonical_json(dict(settings)))
    try:
        compare_fingerprints(
            parse_json(of_rank_0.encode("utf-8", "surrogatepass"), finite=False),
            settings,
            where="The call of rank 0",
            remedy="Pass the same model, settings and data to all ranks, which divide the rows by themselves.",
        )
    except ManifestMismatchError as error:
        raise RankError(f"Rank {ranks.rank} differs from rank 0. {error}") from None
