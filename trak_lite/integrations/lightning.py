"""Lightning: featurizes at each checkpoint that a trainer saves, and reads weights of ``.ckpt`` files.

Example::

    attributor = Attributor(lit_module, "image_classification", "runs/digits.zarr")
    trainer = L.Trainer(callbacks=[ModelCheckpoint(save_top_k=-1), FeaturizeCallback(attributor, train_data)])
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from trak_lite.attributor import Attributor
from trak_lite.core.validate import require_packages
from trak_lite.errors import CheckpointError, InvalidInputError
from trak_lite.integrations._training import SavedFeatures, refuse_other_model
from trak_lite.models.checkpoints import module_versions, read_weights, with_versions

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    require_packages("lightning", extra="lightning")
    raise

__all__ = ["FeaturizeCallback", "ckpt_weights"]


@final
class FeaturizeCallback(SavedFeatures, Callback):
    """Featurizes the train rows at each checkpoint that a ``ModelCheckpoint`` of the same trainer saves.

    A saved file is featurized before the next training batch, or at the end of training. If a path is overwritten in
    between, only the last file is featurized; of a file that is overwritten later, also by a resumed run, the store has
    the rows of both weights, with a warning. The callback restores weights, modes and all random states, so training
    is bitwise the same as without it. Scoring new targets later needs the files, so keep them (``save_top_k=-1``).
    """

    def __init__(self, attributor: Attributor, data: Any) -> None:
        """Check the data. The attributor is that of the trained ``LightningModule``, or of a module inside it."""
        super().__init__(attributor, data)
        self._prefix = ""
        self._seen: set[tuple[Path, int]] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the attributor's model is trained, and saved by a ``ModelCheckpoint``.

        Raises:
            InvalidInputError: If another model is trained, it is sharded or on another device, or there is no
                ``ModelCheckpoint``.
        """
        refuse_other_model(self._attributor, pl_module)
        self._is_resumed = trainer.global_step > 0
        names = [name for name, module in pl_module.named_modules() if module is self._attributor.model]
        if not names or not _savers(trainer):
            module = type(self._attributor.model).__name__
            missing = "no ModelCheckpoint" if names else f"a model without the {module} of the attributor"
            raise InvalidInputError(
                f"The trainer has {missing}, so no checkpoint can be featurized when it is saved. Expected "
                "an attributor on the LightningModule or a module inside it, and callbacks=[ModelCheckpoint(...), ...]."
            )
        self._prefix = f"{names[0]}." if names[0] else ""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Featurize the checkpoints that were saved since the last batch."""
        self._featurize_new(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Featurize the checkpoints that were saved at the end of training."""
        self._featurize_new(trainer)

    def _featurize_new(self, trainer: Trainer) -> None:
        new = sorted(_saved_files(trainer) - self._seen, key=lambda file: (file[1], file[0]))
        for path, changed in new:
            self._featurize([path], checkpoint_loader=partial(ckpt_weights, prefix=self._prefix))
            self._seen.add((path, changed))


def ckpt_weights(path: str | Path, *, prefix: str = "", weights_only: bool = True) -> dict[str, Tensor]:
    """Return the weights of a module from a Lightning checkpoint.

    Use ``checkpoint_loader=partial(ckpt_weights, prefix="model.")`` if the attributor's model is ``self.model`` of the
    ``LightningModule``. If it is the ``LightningModule`` itself, ``checkpoints="a.ckpt"`` needs no loader.

    Args:
        path: A ``.ckpt`` file.
        prefix: Prefix of the names to return (``"model."``), which is removed; other weights are left out.
        weights_only: Run no code from the file. Checkpoints with hyperparameters of custom classes need ``False``,
            which unpickles the whole file and can run any code in it: use it only for files that you trust.

    Raises:
        CheckpointError: If the file cannot be read, or has no weight with the prefix.
    """
    state: Mapping[str, Tensor] = read_weights(Path(path), weights_only=weights_only)
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not weights:
        raise CheckpointError(
            f"{path} has no weight with the prefix {prefix!r}: found {list(state)[:5]}. Pass the name of the "
            "attributor's model inside the LightningModule, with a dot at the end."
        )
    versions = {
        f"{name}.".removeprefix(prefix).removesuffix("."): version
        for name, version in module_versions(state).items()
        if f"{name}.".startswith(prefix)
    }
    return with_versions(weights, versions)


def _savers(trainer: Trainer) -> list[Any]:
    """Return the ``ModelCheckpoint`` callbacks, which are of another class in the package ``pytorch_lightning``."""
    return [saver for saver in trainer.checkpoint_callbacks if hasattr(saver, "best_k_models")]


def _saved_files(trainer: Trainer) -> set[tuple[Path, int]]:
    """Return the existing files that the trainer has saved, with their modification times."""
    paths = {
        path
        for saver in _savers(trainer)
        for path in (saver.best_model_path, saver.last_model_path, *saver.best_k_models)
        if path
    }
    remote = [path for path in paths if "://" in path]
    if remote:
        raise CheckpointError(
            f"The trainer saves checkpoints to {remote[0]}, which is not a local path. Save them to a folder, or "
            "featurize them afterwards with checkpoint_loader=...."
        )
    files = {Path(path).resolve() for path in paths}
    return {(file, file.stat().st_mtime_ns) for file in files if file.exists()}
