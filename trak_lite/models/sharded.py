"""Support for models sharded by FSDP2 (``torch.distributed.fsdp.fully_shard``).

Every parameter is a ``DTensor`` of which each rank holds a part. A module's parameters are gathered for its forward
pass and again for its backward pass, so every pass is a collective operation: all ranks must make the same passes in
the same order, although each processes different rows.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (arXiv:2304.11277).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trak_lite.core.ranks import Lockstep
from trak_lite.errors import RankError, UnsupportedModelError
from trak_lite.models.tree import ModelTree

_FSDP, _TENSOR, _FLAT = "torch.distributed.fsdp", "torch.distributed.tensor", "FullyShardedDataParallel"
_PAUSE = 0.02  # seconds, between looks of ranks that are done


def _imported(module: str, name: str) -> Any:
    """Return a class of torch's, or no class if its module is not imported: nothing is sharded before that."""
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor of which each rank holds a part."""
    return isinstance(value, _imported(_TENSOR, "DTensor"))


def _modules_of(model: nn.Module | ModelTree, name: str) -> list[Any]:
    """Return the modules that are of a class of FSDP, outermost first."""
    kind = _imported(_FSDP, name)
    if not kind or (isinstance(model, ModelTree) and not any(issubclass(cls, kind) for cls in model.classes)):
        return []  # asked several times in every pass
    modules = model.modules if isinstance(model, ModelTree) else model.modules()
    return [module for module in modules if isinstance(module, kind)]


def sharded_modules(model: nn.Module | ModelTree) -> list[Any]:
    """Return the modules that ``fully_shard`` was called on, outermost first."""
    return _modules_of(model, "FSDPModule")


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the original class of a module, which ``fully_shard`` replaces by a subclass."""
    kinds: list[type[nn.Module]] = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
    return kinds[1] if sharded_modules(module)[:1] == [module] else kinds[0]


def is_sharded(model: nn.Module | ModelTree) -> bool:
    """Return whether parameters of a model are sharded over devices in any way."""
    if _FSDP not in sys.modules and _TENSOR not in sys.modules:
        return False
    parameters = model.parameters.values() if isinstance(model, ModelTree) else model.parameters()
    kinds = {type(p): p for p in parameters}
    return any(map(is_dtensor, kinds.values())) or bool(sharded_modules(model) or _modules_of(model, _FLAT))


def reshard(model: nn.Module | ModelTree) -> None:
    """Free parameters that a forward pass left gathered, so that all modules hold their sharded parameters."""
    modules = sharded_modules(model)
    if modules:
        with torch._C.DisableTorchFunction():  # no part of the model's own operations
            for module in modules:
                module.reshard()


def reset_passes(model: nn.Module) -> None:
    """Reset FSDP2's state after an error interrupted a pass; needs torch 2.13 or newer."""
    inside: set[int] = set()
    for module in sharded_modules(model):
        if id(module) not in inside and hasattr(module, "reset_iter_state"):
            with contextlib.suppress(AttributeError):  # of one that has never run: there is nothing to forget
                module.reset_iter_state()
        inside |= {id(child) for child in module.modules()}


# Refusals


def refuse_sharded(model: nn.Module, what: str, instead: str) -> None:
    """Raise UnsupportedModelError if a model is sharded, which ``what`` does not support; ``instead`` is advice."""
    if is_sharded(model):
        raise UnsupportedModelError(
            f"{what} was called with {class_of(model).__name__}, whose parameters are sharded. Expected a model that "
            f"is whole on one device. {instead}."
        )


def refuse_sharded_parts(module: nn.Module) -> None:
    """Raise UnsupportedModelError if submodules of a module with a gradient rule are sharded separately.

    Their parameters would not be gathered when the rule needs them.
    """
    if any(part is not module for part in sharded_modules(module)):
        raise UnsupportedModelError(
            f"{class_of(module).__name__} has a gradient rule, and fully_shard was called on modules inside it. "
            "Expected the parameters of such a module to be gathered together. Call fully_shard on the module itself."
        )


def refuse_unsupported_sharding(model: nn.Module) -> None:
    """Raise unless the model is unsharded or sharded by FSDP2 over one mesh axis, with or without replication."""
    if not is_sharded(model):
        return
    from torch.distributed.tensor import Shard

    reshard(model)
    if _modules_of(model, _FLAT):
        raise _unsupported("FullyShardedDataParallel (FSDP1) is in it")
    held = {name: p for name, p in model.named_parameters() if is_dtensor(p)}
    managed = {id(p) for module in sharded_modules(model) for p in module.parameters()}
    for name, p in held.items():
        *others, last = p.placements  # type: ignore[attr-defined]
        if id(p) not in managed or type(last) is not Shard or not all(one.is_replicate() for one in others):
            raise _unsupported(
                f"{name!r} has placements {p.placements} (tensor or expert parallelism)"  # type: ignore[attr-defined]
            )
        if p.device_mesh != next(iter(held.values())).device_mesh:  # type: ignore[attr-defined]
            raise _unsupported(f"{name!r} is on another device mesh than the first parameter")
        if p.device.type != p.device_mesh.device_type:  # type: ignore[attr-defined]
            raise _unsupported(
                f"{name!r} is on {p.device.type}, and its mesh on {p.device_mesh.device_type}"  # type: ignore[attr-defined]
            )


def _unsupported(cause: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model is sharded in a way that is not supported: {cause}. Expected torch.distributed.fsdp.fully_shard on "
        "blocks and model over one device mesh, in the parameters' own dtype and without offloading. Shard it so, or "
        "use a model that is whole on one device."
    )


# Weights


def of_all_ranks(tensor: Tensor) -> Tensor:
    """Return a whole tensor, gathered from all ranks if it is sharded; all ranks must call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(value: Any, held: Any) -> Any:
    """Return a checkpoint's weight in the model's form: sharded like ``held``, or whole if ``held`` is.

    A whole weight must be identical on all ranks.
    """
    if not is_dtensor(held):
        return of_all_ranks(value)
    if is_dtensor(value) and value.device_mesh == held.device_mesh and value.placements == held.placements:
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = of_all_ranks(value).to(held.device)
    return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)


# Passes


@final
class ShardedModel:
    """Access for hooks to a sharded model: the gathered parameters that its operations read, and the ranks."""

    def __init__(self, model: nn.Module) -> None:
        """Gather each module once to find its parameters, or refuse the sharding; all ranks must call this."""
        refuse_unsupported_sharding(model)
        self.lockstep = lockstep_of(model)
        self._model = model
        self._gathered = self._gather()
        again = self._gather()
        if any(again[name] is not p for name, p in self._gathered.items()):
            raise _unsupported("gathering a parameter twice gave two parameters")

    def gathered(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the gathered parameters that operations read; their values exist only during a pass."""
        gathered = {name: self._gathered.get(name, p) for name, p in parameters.items()}
        for p in gathered.values():
            p.requires_grad_(True)  # as FSDP2 sets it from the sharded one whenever it gathers
        return gathered

    def _gather(self) -> dict[str, nn.Parameter]:
        reshard(self._model)
        sharded = dict(self._model.named_parameters())
        gathered: dict[str, nn.Parameter] = {}
        for module in sharded_modules(self._model):
            module.unshard()
            for name, p in self._model.named_parameters():
                if p is not sharded[name]:
                    gathered[name] = p
            module.reshard()
        for name, p in gathered.items():
            if p.dtype != sharded[name].dtype:
                raise _unsupported(
                    f"its MixedPrecisionPolicy runs {name!r} in {p.dtype}, not {sharded[name].dtype}"
                )
        return gathered


class Watcher(Protocol):
    """Observes the operations of a forward pass."""

    looks_away: bool
    """Whether to ignore the current operations because they are FSDP2's, not the model's."""

    def renamed(self, old: Tensor, new: Tensor, /) -> None:
        """Record that tensor ``new`` replaces ``old``, an input or result of a sharded module."""


def watch_borders(model: nn.Module | ModelTree, watcher: Watcher) -> list[Any]:
    """Hook sharded modules so that the watcher ignores FSDP2's own operations; return the hooks' handles.

    An unsharded model gets no hooks.
    """
    return [handle for module in sharded_modules(model) for handle in _Border(watcher).install(module)]


@final
class _Border:
    """Hooks on the inputs and outputs of a sharded module, before and after FSDP2's own hooks."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._coming: list[list[Tensor]] = []
        self._going: list[list[Tensor]] = []

    def install(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(self._comes, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(self._has_come, with_kwargs=True),
            module.register_forward_hook(self._goes, prepend=True),
            module.register_forward_hook(self._has_gone),
        ]

    def _comes(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._watcher.looks_away = True
        self._coming.append(_tensors((args, kwargs)))

    def _has_come(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._watcher.looks_away = False
        for old, new in zip(self._coming.pop(), _tensors((args, kwargs)), strict=False):
            if new is not old:
                self._watcher.renamed(old, new)

    def _goes(self, module: nn.Module, args: Any, result: Any) -> Any:
        # FSDP2 gathers the parameters in a backward hook on the module's result. Clone the result, so that this hook
        # runs before the gradient rule of the operation that made it, which may need the parameters. (A view would
        # break with `+=`.)
        result = tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad else t, result)
        self._watcher.looks_away = True
        self._going.append(_tensors(result))
        return result

    def _has_gone(self, module: nn.Module, args: Any, result: Any) -> None:
        self._watcher.looks_away = False
        for old, new in zip(self._going.pop(), _tensors(result), strict=False):
            if new.dtype != old.dtype:
                raise _unsupported(
                    f"its MixedPrecisionPolicy converts a result of {class_of(module).__name__} from {old.dtype} to "
                    f"{new.dtype}"
                )


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


# Ranks in step


def lockstep_of(model: nn.Module) -> Lockstep:
    """Return the lockstep of the ranks over which a model is sharded."""
    if not is_sharded(model):
        return Lockstep()
    reshard(model)
    for p in model.parameters():
        if is_dtensor(p):
            mesh = p.device_mesh  # type: ignore[attr-defined]
            return Lockstep(mesh.get_group(mesh.ndim - 1), p.device)
    return Lockstep()


@final
@dataclass(eq=False)
class Turns:
    """Makes all ranks run the same number of passes, although they may have different numbers of batches.

    Before every pass the ranks exchange whether they have a batch. A rank without a batch runs a pass whose result is
    discarded; it never sleeps while another rank waits for it. Use it as a context manager around the batches of one
    table.
    """

    _lockstep: Lockstep
    _repeat: Callable[[], object]
    """Runs a pass whose result is discarded."""
    _in_pass: bool = False
    _knows_failure: bool = False
    """Whether another rank has signalled a failure."""

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run the pass of this rank's own batch inside the block; raises RankError if another rank has failed."""
        self._exchange(working=True, unfinished=True)
        self._in_pass = True
        yield
        self._in_pass = False

    def pause(self, seconds: float) -> None:
        """Wait for other ranks; if one has a batch, join its pass. Raises RankError if one has failed."""
        self._idle(seconds, unfinished=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Join the other ranks' passes until all are done; after an error outside a pass, signal it to them."""
        if self._lockstep.is_alone:
            return
        if kind is None:
            while self._idle(_PAUSE, unfinished=False):
                pass
        elif not (self._in_pass or self._knows_failure):
            self._lockstep.sums(False, False, True)

    def _idle(self, seconds: float, *, unfinished: bool) -> bool:
        """Join a pass without a batch, or sleep if no rank has one; return whether any rank is unfinished."""
        working, left = self._exchange(working=False, unfinished=unfinished)
        if working:
            self._in_pass = True
            self._repeat()
            self._in_pass = False
        elif left:
            time.sleep(seconds)
        return left > 0

    def _exchange(self, *, working: bool, unfinished: bool) -> tuple[int, int]:
        if self._lockstep.is_alone:
            return 0, 1
        with_batch, left, failed = self._lockstep.sums(working, unfinished, False)
        if failed:
            self._knows_failure = True
            raise RankError(
                f"{failed} other rank(s) that hold parts of the same model failed, and this rank cannot compute "
                "without them. See their errors. Rows that were written stay; make the same call again to continue."
            )
        return with_batch, left
