"""Checkpoints from files, folders, state dicts or a callable; only one is in memory at a time.

A checkpoint is identified by the digest of its weights, never by its file name or its position in a list.
"""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import os
import pickle
import re
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trak_lite.core.fingerprint import tensor_bytes
from trak_lite.core.json_text import parse_json
from trak_lite.core.validate import require_function, some_of
from trak_lite.errors import CheckpointError, refuse_signal, summary
from trak_lite.models._adapters import ADAPTER_FILES, named_adapters
from trak_lite.models.memory import layout_of
from trak_lite.models.sharded import of_all_ranks, reshard

logger = logging.getLogger(__name__)

CheckpointSource: TypeAlias = Any
"""``None`` (the model's current weights), a state dict, a path to a ``.safetensors`` or ``.pt`` file or to a folder of
such files, a :class:`Checkpoint`, or an iterable of these.

A state dict may stand in a mapping beside that of the optimizer: ``{"model": ..., "optimizer": ...}``."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
"""End the names of files of weights."""
INDEX = ".index.json"
"""Ends the name of a list of shards."""
HUGGING_FACE_FILES = (
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
    *ADAPTER_FILES,
)
"""Names of weights in a folder saved by Hugging Face, the first that exists being used."""
_COLLECTIONS: tuple[type[Any], ...] = (list, tuple, deque, type({}.values()), type(OrderedDict().values()))
"""Hold their items, so that no code of the user makes these while they are read."""
_STEP_FOLDER = re.compile(r"checkpoint-\d+")
EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
"""Ends the names of what ``get_extra_state`` returned."""
_WRAPPERS = ("state_dict", "model_state_dict", "model")
LIGHTNING = "checkpoint_loader=partial(ckpt_weights, {}) of trak_lite.integrations.lightning"
"""What messages advise for files of Lightning, with its argument left open."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    LookupError,
    TypeError,
    AssertionError,
    struct.error,
    pickle.UnpicklingError,
    safetensors.SafetensorError,
)
"""What torch and safetensors raise for damaged files."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One set of weights, loaded on demand."""

    name: str
    """Name for messages: a file's stem, a folder's name, or a number."""
    source: str | None
    """Absolute path of the file; ``None`` if the weights do not come from a file."""
    load: Callable[[], Mapping[str, Tensor]] | None
    """Function that returns the state dict, or a mapping with it under ``"model"``; ``None`` means the model's current
    weights."""
    is_captured: bool = False
    """Whether the capture of this name has computed its train rows, with the weights before each step."""
    is_held: bool = False
    """Whether the state dict is there before the first checkpoint is loaded, and no code of the user makes it later."""
    has_loader: bool = False
    """Whether a function of the user makes the state dict, which may be another one than the file has."""


def iterate_checkpoints(
    checkpoints: CheckpointSource,
    checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None,
    *,
    lacking: list[Exception] | None = None,
) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a source in order, without loading them.

    A folder yields its files in natural order (``epoch-2`` before ``epoch-10``). One saved by Hugging Face is one
    checkpoint, sharded or not; so is the folder of a PEFT adapter. ``checkpoint_loader`` turns each item of the source
    into a state dict, for other kinds of items. Paths without a checkpoint are left out if ``lacking`` is given, which
    receives their errors.

    Raises:
        CheckpointError: If a path does not exist, or a folder holds no checkpoint, or a folder holds weights as well as
            ``checkpoint-N`` folders, or two state dicts of a list share the memory of their tensors.
        InvalidInputError: If ``checkpoint_loader`` cannot be called.
    """
    require_function(checkpoint_loader=checkpoint_loader)
    if checkpoint_loader is not None:
        single = isinstance(checkpoints, str | os.PathLike | Mapping) or not _is_iterable(checkpoints)
        for number, item in enumerate([checkpoints] if single else checkpoints):
            path = Path(item) if isinstance(item, str | os.PathLike) else None
            name = str(number) if path is None else path.name if path.is_dir() else path.stem
            source = str(path.absolute()) if path is not None and path.exists() else None
            yield Checkpoint(name, source, lambda item=item: checkpoint_loader(item), has_loader=True)  # type: ignore[misc]
        return
    if checkpoints is None:
        yield Checkpoint("current", None, None)
    elif isinstance(checkpoints, Checkpoint):
        yield checkpoints
    elif isinstance(checkpoints, Mapping):
        yield Checkpoint("0", None, lambda: checkpoints, is_held=True)
    elif isinstance(checkpoints, str | os.PathLike):
        try:
            yield from _from_path(Path(os.path.expanduser(checkpoints)))
        except CheckpointError as error:
            if lacking is None:
                raise
            lacking.append(error)
    elif _is_iterable(checkpoints):
        is_collection = isinstance(checkpoints, _COLLECTIONS)
        if is_collection:
            _refuse_shared(list(checkpoints))
        for number, item in enumerate(checkpoints):
            for checkpoint in iterate_checkpoints(item, lacking=lacking):
                is_held = checkpoint.is_held and is_collection
                name = str(number) if isinstance(item, Mapping) else checkpoint.name
                yield replace(checkpoint, name=name, is_held=is_held)
    else:
        hint = " Pass its weights: model.state_dict()." if isinstance(checkpoints, nn.Module) else ""
        raise CheckpointError(
            f"Cannot take checkpoints from {type(checkpoints).__name__}.{hint} Expected a state dict, a path, a "
            "folder, an iterable of these, or checkpoint_loader=... to turn each item into a state dict."
        )


def _is_iterable(source: Any) -> bool:
    """Return whether a source has items that are checkpoints: not layers, lines of a file, or one number."""
    is_one = isinstance(source, nn.Sequential | bytes | io.IOBase) or getattr(source, "ndim", 1) == 0
    return isinstance(source, Iterable) and not is_one


def _refuse_shared(items: Sequence[Any]) -> None:
    """Raise if two state dicts of a list hold the same tensors, which ``Module.state_dict`` returns at each call.

    Those that share only some of them, or under other names, or have other versions or other entries that are no
    tensors, may differ.
    """
    numbers: dict[Any, int] = {}
    for number, item in enumerate(items):
        values = unwrapped(item) if isinstance(item, Mapping) else {}
        addresses = frozenset((bare_name(name), layout_of(value)) for name, value in values.items())
        if not addresses or not all(layout for _, layout in addresses):
            continue
        first = numbers.setdefault((addresses, repr(module_versions(unwrapped(item)))), number)
        if items[first] is not item:  # the same object again is meant
            raise CheckpointError(
                f"The state dicts {first} and {number} of the list share their tensors, so that both hold the "
                "same weights: model.state_dict() returns the tensors of the model, which training changes. Keep "
                "copies, copy.deepcopy(model.state_dict()), or save each one to a file."
            )


def count_checkpoints(
    checkpoints: CheckpointSource, checkpoint_loader: Callable[[Any], Mapping[str, Tensor]] | None = None
) -> int | None:
    """Return the number of checkpoints of a source; ``None`` if it might have to make them to be counted."""
    items = checkpoints if isinstance(checkpoints, _COLLECTIONS) else [checkpoints]
    plain = (str, os.PathLike, Mapping, Checkpoint, nn.Module, type(None))  # a module is refused
    if checkpoint_loader is None and not all(isinstance(item, plain) for item in items):
        return None
    if isinstance(checkpoints, Iterable) and not isinstance(checkpoints, (*plain, *_COLLECTIONS)):
        return None
    return sum(1 for _ in iterate_checkpoints(checkpoints, checkpoint_loader))


def noted_checkpoint(source: object) -> Checkpoint | None:
    """Return a checkpoint for the file that a store records as the source of its weights; ``None`` if there is none.

    The store may be untrusted: only a regular file with a known suffix of weight files is opened, and no code from it
    is run. The caller compares the digest of the weights.
    """
    if not isinstance(source, str) or not source.endswith((*SUFFIXES, INDEX)):
        return None
    try:
        path = Path(source)
        return _from_file(path, path.stem) if path.is_file() or path == weights_inside(path.parent) else None
    except (OSError, ValueError):
        return None  # not a valid path: too long, or with a null byte


def _natural(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


def weights_inside(folder: Path) -> Path | None:
    """Return the weights file or shard index of a folder saved by Hugging Face; ``None`` if it has neither.

    For a ``checkpoint-N`` that has only adapters in folders of their names, it is the missing file beside these.
    """
    is_split = _STEP_FOLDER.fullmatch(folder.name) and named_adapters(folder)
    missing = folder / ADAPTER_FILES[0] if is_split else None
    return next((folder / name for name in HUGGING_FACE_FILES if (folder / name).is_file()), missing)


def _from_path(path: Path) -> Iterator[Checkpoint]:
    if path.is_dir():
        inside = weights_inside(path)
        if inside is not None:
            steps = [entry for entry in path.iterdir() if _STEP_FOLDER.fullmatch(entry.name)]
            steps = sorted((entry for entry in steps if weights_inside(entry)), key=_natural)
            if steps:
                raise CheckpointError(
                    f"{path} holds {inside.name} and {len(steps)} checkpoint folders ({steps[0].name} ...). Expected "
                    "one or the other. Pass a list of the folders, or the path of the file."
                )
            yield _from_file(inside, path.name)
            return
        entries = [
            entry
            for entry in sorted(path.iterdir(), key=_natural)
            if (entry.is_file() and entry.suffix in SUFFIXES)
            or (entry.is_dir() and weights_inside(entry) is not None)
        ]
        if not entries:
            raise CheckpointError(
                f"{path} holds no checkpoint. Expected files ending in {', '.join(SUFFIXES)}, or folders with one "
                f"of {', '.join(HUGGING_FACE_FILES)} in them."
            )
        for entry in entries:
            yield from _from_path(entry)
    elif path.is_file():
        yield _from_file(path, path.stem)
    else:
        raise CheckpointError(
            f"There is no checkpoint at {path}. Check the path; it is relative to {Path.cwd()}."
        )


def _from_file(path: Path, name: str) -> Checkpoint:
    return Checkpoint(name, str(path.absolute()), partial(read_weights, path))


def read_weights(path: Path, *, weights_only: bool = True) -> Mapping[str, Tensor]:
    """Read the state dict of a ``.safetensors`` or ``torch.save`` file, or of the shards in a Hugging Face index.

    ``weights_only=False`` unpickles arbitrary objects, which can run code: use it only for trusted files.
    """
    listed = _shards(path) if path.name.endswith(INDEX) else {}
    files = sorted(set(listed.values())) or [path.name]
    shards = [(file, _read_file(path.parent / file, weights_only)) for file in files]
    versions = {name: version for _, shard in shards for name, version in module_versions(shard).items()}
    # A file may have others from before, such as a weight that is in another file now.
    read = ((name, shard[name]) for file, shard in shards for name in shard if listed.get(name, file) == file)
    return with_versions(dict(read), versions)


def _shards(index: Path) -> dict[str, str]:
    try:
        listed = dict(parse_json(index.read_bytes())["weight_map"])
        names = sorted(set(listed.values()))
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"Cannot read the list of shards {index} ({type(error).__name__}: {error}). Expected JSON with a "
            "'weight_map' from weights to files, as save_pretrained writes it."
        ) from error
    if outside or not names:
        raise CheckpointError(
            f"{index} lists {outside[:3] or 'no files'}. Expected names of files beside it; save the model again."
        )
    return listed


def _read_file(path: Path, weights_only: bool) -> Mapping[str, Tensor]:
    content = read_content(path, weights_only=weights_only)
    state: Mapping[str, Tensor] = unwrapped(content)
    is_plain = isinstance(content, Mapping) and content and all(_is_entry(*pair) for pair in content.items())
    if state is not content or is_plain:
        return state
    description = sorted(map(str, content))[:10] if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{path} holds no state dict: found {description}. Expected a mapping from names to tensors, alone or under "
        f"one of {list(_WRAPPERS)}. A checkpoint_loader reads other keys: lambda path: torch.load(path)[key]."
    )


def read_content(path: Path, *, weights_only: bool = True) -> Any:
    """Return the content of a file on the CPU, see :func:`read_weights`; raise CheckpointError if it is unreadable."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except _UNREADABLE as error:
        said, more = summary(error), ""
        if isinstance(error, pickle.UnpicklingError):
            said = said.partition(". ")[0] + "".join(re.findall(r": GLOBAL [\w.]+", str(error))[:1])
            if path.suffix == ".ckpt":
                loader = LIGHTNING.format("weights_only=False")
                more = f" Of a file that you trust, {loader} reads objects of custom classes (hyperparameters), too."
        raise CheckpointError(
            f"Cannot read the checkpoint {path} ({said}). Files are "
            f"read without running code from them; save a plain state dict, best with safetensors.{more}"
        ) from error


def unwrapped(content: Any) -> Any:
    """Return the state dict that stands under one of ``_WRAPPERS``; the content itself if there is none."""
    for key in _WRAPPERS if isinstance(content, Mapping) else ():
        inner = content.get(key)
        if isinstance(inner, Mapping):
            entries = {name: value for name, value in inner.items() if _is_entry(name, value)}
            return with_versions(entries, module_versions(inner))
    return content


def _is_entry(name: Any, value: Any) -> bool:
    """Return whether this may be an entry of a state dict: a tensor, or a value of a module (``get_extra_state``)."""
    return isinstance(value, Tensor) or (
        isinstance(name, str) and ("." in name or name.endswith(EXTRA_STATE))
    )


def module_versions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a state dict by module name: the version of each module's state dict format.

    The result is empty in a copy into a plain dict, which lacks the attribute that ``Module.state_dict`` sets.
    """
    return dict(getattr(state, "_metadata", None) or {})


def with_versions(values: Mapping[str, Any], versions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict with these values and versions, see :func:`module_versions`."""
    state = OrderedDict(values)
    if versions:
        state._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # as torch sets it
    return state


def bare_name(name: str) -> str:
    """Return a name without the prefixes of ``DataParallel`` and ``torch.compile``."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 over a model's state dict: names, shapes, dtypes and bytes of tensors, and other entries.

    Sharded parameters are gathered one at a time: all ranks must call this, and all get the unsharded model's digest.
    """
    reshard(model)
    return entries_digest(model.state_dict())


def more_entries(model: nn.Module) -> OrderedDict[str, Any]:
    """Return copies of the entries of the state dict that are neither parameters nor buffers, and all versions.

    These are values of ``get_extra_state``, and the weights of quantised layers.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state, others = model.state_dict(), {}
    for name, value in state.items():
        if name in names:
            continue
        try:
            others[name] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        except (TypeError, RuntimeError, pickle.PicklingError) as error:  # of a lock: entries_digest names it
            refuse_signal(error)
    return with_versions(others, module_versions(state))


def entries_digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 over the entries of a state dict; see :func:`weights_digest`."""
    digest = hashlib.sha256()
    unknown = []
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):
            _add_tensor(digest, bare_name(name), value)
            continue
        try:
            content = _content(value)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            refuse_signal(error)
            content = type(value).__qualname__.encode()
            unknown.append(name)
        digest.update(f"{bare_name(name)}|{len(content)}|".encode() + content)
    if unknown:
        logger.warning(
            "The entries %s of the state dict cannot be compared, because they cannot be pickled: two checkpoints that "
            "differ in nothing else count as the same.",
            some_of(unknown),
        )
    return digest.hexdigest()


def _add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    value = of_all_ranks(tensor.detach())
    digest.update(f"{name}|{tuple(value.shape)}|{value.dtype}|".encode())
    if hasattr(value, "__tensor_flatten__"):  # such as the quantised weights of torchao, which have no bytes
        for part in value.__tensor_flatten__()[0]:
            _add_tensor(digest, part, getattr(value, part))
        return
    if value.layout in _SPARSE:
        entries = value.to_sparse(layout=torch.sparse_coo).coalesce()
        value = entries.values()
        digest.update(tensor_bytes(entries.indices()))
    digest.update(tensor_bytes(value.dequantize() if value.is_quantized else value))


def _content(value: Any) -> bytes:
    """Return bytes of an entry that is no tensor, the same for equal values in every process."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5)
    pickler.fast = True  # without references, which differ between equal values
    pickler.dump(value)
    return stream.getvalue()


@final
class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        """Return what replaces a value whose pickled bytes differ between processes, or that has none."""
        if isinstance(value, Tensor):
            digest = hashlib.sha256()
            _add_tensor(digest, "", value)
            return digest.hexdigest()
        if isinstance(value, torch.ScriptObject):
            return str(value._type()), _content(value.__getstate__())
        return sorted(map(repr, value)) if isinstance(value, set | frozenset) else None
