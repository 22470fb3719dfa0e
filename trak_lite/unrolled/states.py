"""States of a training in files: written atomically, so that a killed process leaves a complete file or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trak_lite.core.devices import to_device
from trak_lite.core.folders import whole_file
from trak_lite.core.json_text import parse_json
from trak_lite.core.sealed import BLANK, SEAL, seal, sealed_content
from trak_lite.errors import CorruptStoreError, StoreError
from trak_lite.unrolled.optimizers import Named, State

_PARAMETERS = "parameters"
_SUFFIX = ".safetensors"


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


def save_tensors(path: Path, tensors: Mapping[str, Tensor], step: int, run: str) -> None:
    """Write tensors of a step to a file with a checksum, as :func:`whole_file`; ``run`` is the identity of the run."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_file(path) as partial:
        try:
            # One member: the order of several is random.
            save_file(plain, partial, {SEAL: f"{BLANK} {json.dumps([step, list(plain)])}"})
        except SafetensorError as error:
            raise StoreError(
                f"{path} cannot be written ({error!s:.200}). Check the disk, and make the call again."
            ) from error
        seal(str(partial), f"{run}/{path.parent.name}/{path.name}")


def load_tensors(path: Path, device: torch.device, run: str) -> tuple[Named, int]:
    """Return the tensors of a file on a device, in the order in which they were saved, and the number of their step.

    Raises:
        CorruptStoreError: If the file is damaged, or was written for another run or under another name.
        StoreError: If it cannot be opened.
    """
    sealed_content(str(path), f"{run}/{path.parent.name}/{path.name}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:  # the format does not know every device
            # Bits depend on the order, in which a norm is summed, and on the alignment, which a mapped file has not.
            step, names = parse_json(file.metadata()[SEAL][len(BLANK) :].encode())
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        raise CorruptStoreError(
            f"{path} cannot be read ({error!s:.200}). Delete it, and make the call again."
        ) from error
    return {name: to_device(tensor, device) for name, tensor in tensors.items()}, int(step)


class StateFiles:
    """The states of a run by step number, in a folder or in memory."""

    def __init__(self, folder: Path | None, device: torch.device, run: str) -> None:
        """Take the folder, which need not exist (``None`` keeps the states in memory), and the identity of the run."""
        self._folder, self._device, self._run = folder, device, run
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
            save_tensors(self._path(number), flat(state), number, self._run)

    def get(self, number: int) -> State:
        """Return a stored state."""
        if self._folder is None:
            return self._held[number]
        return unflat(load_tensors(self._path(number), self._device, self._run)[0])

    def _path(self, number: int) -> Path:
        assert self._folder is not None  # the callers use it with a folder only
        return self._folder / f"{number:09d}{_SUFFIX}"
