"""Helpers for trained models: check them, and featurize what a training saves."""

from __future__ import annotations

from typing import Any

from torch import nn

from trak_lite.attributor import Attributor
from trak_lite.core.devices import undisturbed
from trak_lite.data.datasets import rows_of
from trak_lite.errors import InvalidInputError
from trak_lite.models.borrowing import model_device


def refuse_other_model(attributor: Attributor, trained: nn.Module) -> None:
    """Raise if the attributor's parameters are another model's, or training has replaced (sharded) or moved them."""
    parameter_ids = {id(p) for p in trained.parameters()}
    foreign = [name for name, p in attributor.model.named_parameters() if id(p) not in parameter_ids]
    if foreign:
        raise InvalidInputError(
            f"{len(foreign)} parameters of the attributor's {type(attributor.model).__name__} ({foreign[:3]}) are not "
            f"among those of the {type(trained).__name__} that is trained. Expected an attributor on the same model "
            "object, not sharded (FSDP, DeepSpeed). Build it from this trainer, or featurize the saved checkpoints "
            "afterwards."
        )
    here, there = attributor.device, model_device(attributor.model)
    if here.type != there.type or (here.index is not None and here != there):
        raise InvalidInputError(
            f"The attributor runs on {here}, but the model is trained on {there}, so every checkpoint would move the "
            f"model. Pass device={str(there)!r} to the attributor."
        )


class SavedFeatures:
    """What callbacks of training libraries have in common: they featurize what the training saves."""

    def __init__(self, attributor: Attributor, data: Any) -> None:
        """Check the data and store the arguments.

        Args:
            attributor: Attributor of the trained model.
            data: The train rows, as for :meth:`~trak_lite.Attributor.featurize`.

        Raises:
            InvalidInputError: If the data have no fixed order of rows.
        """
        rows_of(data, what="the train data")  # raise here, not after the first checkpoint has been trained
        self._attributor, self._data = attributor, data
        self._is_resumed = False

    def _featurize(self, checkpoints: Any, **settings: Any) -> None:
        """Featurize what has just been saved, within :func:`undisturbed`.

        In a resumed training, a file that is saved again with other weights is a warning and not an error, as it is for
        the files that this attributor has featurized.
        """
        run = self._attributor._run
        run.is_resumed = self._is_resumed
        try:
            with undisturbed():
                self._attributor.featurize(self._data, checkpoints, **settings)
        finally:
            run.is_resumed = False
