"""States of a training in files: written atomically, so that a killed process leaves a complete file or none."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trak_lite._devices import to_device
from trak_lite._validate import parse_json
from trak_lite.errors import CorruptStoreError, StoreError
from trak_lite.store.disk.files import named_errors, open_file, open_folder, rename
from trak_lite.store.disk.folders import make_folders
from trak_lite.unrolled.optimizers import Named, State

__all__ = ["StateFiles", "flat", "load_tensors", "save_tensors", "unflat", "whole_file"]

_PARAMETERS = "parameters"
_SUFFIX = ".safetensors"
_ORDER = "order"
"""Entry of the metadata with the names in order, which the format does not keep."""


def flat(state: State) -> Named:
    """Return all tensors of a state by ``group/name``."""
    groups = {_PARAMETERS: state.parameters, **state.slots}
    return {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}


def unflat(tensors: Mapping[str, Tensor]) -> State:
    """Return the state that :func:`flat` flattened."""
    groups: dict[str, Named] = {_PARAMETERS: {}}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return State(groups.pop(_PARAMETERS), groups)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, whose file then replaces the one at ``path``: after a crash it is the old or the new.

    Raises:
        ReadOnlyStoreError: If the folder is not writable.
        StoreError: If writing fails for another reason.
    """
    with named_errors("Writing", str(path)):
        make_folders(str(path.parent))
        os.close(open_folder(str(path.parent)))  # raises if it is a link
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            partial.open("wb").close()  # safetensors raises no OSError
            mode = partial.stat().st_mode
            yield partial
            partial.chmod(mode)  # safetensors lets the owner alone read
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            rename(str(partial), str(path))
        finally:
            partial.unlink(missing_ok=True)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a file, as :func:`whole_file`."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_file(path) as partial:
        try:
            save_file(plain, partial, {**(metadata or {}), _ORDER: json.dumps(list(plain))})
        except SafetensorError as error:
            raise StoreError(
                f"{path} cannot be written ({error!s:.200}). Check the disk, and make the call again."
            ) from error


def load_tensors(path: Path, device: torch.device) -> tuple[Named, dict[str, str]]:
    """Return the tensors of a file on a device, in the order in which they were saved, and its metadata.

    Raises:
        CorruptStoreError: If the file is damaged.
        StoreError: If it cannot be opened.
    """
    with named_errors("Reading", str(path)):
        # safetensors says that a file without permission does not exist, and waits for the writer of a pipe.
        os.close(open_file(str(path), os.O_RDONLY))
    try:
        with safe_open(path, framework="pt", device="cpu") as file:  # the format does not know every device
            metadata = file.metadata()
            # Bits depend on the order, in which a norm is summed, and on the alignment, which a mapped file has not.
            names = parse_json(metadata.pop(_ORDER).encode())
            found = {name: file.get_tensor(name).clone() for name in names}
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        raise CorruptStoreError(
            f"{path} cannot be read ({error!s:.200}). Delete it, and make the call again."
        ) from error
    return {name: to_device(tensor, device) for name, tensor in found.items()}, metadata


class StateFiles:
    """The states of a run by step number, in a folder or in memory."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        """Take the folder, which need not exist; ``None`` keeps the states in memory."""
        self._folder, self._device = folder, device
        self._held: dict[int, State] = {}

    def numbers(self) -> list[int]:
        """Return the numbers of the stored states in order: state t is the one before step t."""
        if self._folder is None:
            return sorted(self._held)
        return sorted(int(path.stem) for path in self._folder.glob(f"[0-9]*{_SUFFIX}"))

    def put(self, number: int, state: State) -> None:
        """Store a state."""
        if self._folder is None:
            self._held[number] = state
        else:
            save_tensors(self._path(number), flat(state))

    def get(self, number: int) -> State:
        """Return a stored state."""
        if self._folder is None:
            return self._held[number]
        return unflat(load_tensors(self._path(number), self._device)[0])

    def _path(self, number: int) -> Path:
        assert self._folder is not None  # the callers use it with a folder only
        return self._folder / f"{number:09d}{_SUFFIX}"
