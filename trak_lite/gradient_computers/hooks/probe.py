"""The plan of a model: which operations use kept parameters, and where each one has its samples.

The model runs on two and on three copies of one sample. Operations are compared one by one: an axis that grows
with the batch is the batch axis, a result without one is a value that all samples share (a transposed weight,
the positions' embedding), and the gradient of each f(z_i) shows whose entries are whose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from trak_lite._batches import take_rows
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.axes import BatchAxis, batch_axis, by_sample
from trak_lite.gradient_computers.hooks.interception import (
    AbstractInterceptor,
    Function,
    chooses_by_value,
    is_in_place,
    num_read_out,
    ordered_size,
)
from trak_lite.gradient_computers.hooks.recurrent import PACKED
from trak_lite.gradient_computers.hooks.registry import GradientRule
from trak_lite.types import Batch

__all__ = [
    "Plan",
    "Site",
    "describe",
    "differentiable",
    "make_plan",
    "mixed",
    "refusing_reentrant_checkpoints",
    "written",
]


def differentiable(result: Any) -> list[Tensor]:
    """Return the floating-point tensors of a result, in order."""
    leaves = tree_flatten(result)[0]
    return [t for t in leaves if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]


def written(function: Function, args: Sequence[Any], result: Any) -> Any:
    """Return what an operation wrote: its result, or its first argument where it works in place."""
    return args[0] if is_in_place(function) and isinstance(args[0], Tensor) else result


@dataclass(slots=True)
class Site:
    """One place of the forward pass at which kept parameters are read."""

    function: Any
    """The operation; for a module with a rule of its own, the module."""
    names: tuple[str, ...]
    """The kept parameters that reach it."""
    batched: bool
    """Whether its result has a batch axis; without one it makes a value that all samples share."""
    leaf_axes: tuple[BatchAxis | None, ...] = ()
    """Batch axis of every tensor argument, in order."""
    output_axes: tuple[BatchAxis | None, ...] = ()
    """Batch axis of every differentiable result."""
    sliceable: bool = True
    """Whether no argument counts the samples."""
    routed: bool = False
    """Whether its rows may be anyone's, so that the gradient has to tell their samples."""
    dims: tuple[int, ...] = ()
    """Number of axes of every tensor argument of an operation."""

    @property
    def use(self) -> Any:
        """What tells this use of parameters from others where operations do not come in a fixed order."""
        return self.function, frozenset(self.names), self.dims


@dataclass(slots=True)
class Plan:
    """What a run of the model on one structure of batch will do with the kept parameters.

    The operations come in the order of ``sites``, unless rows are routed: then experts without rows may be left out,
    others may appear, and an operation is known by its function and its parameters.
    """

    sites: list[Site] = field(default_factory=list)
    routed: bool = False
    """Whether some operation's rows may be anyone's."""
    uses: dict[Any, Site] = field(default_factory=dict)
    """Where rows are routed, what is known of each use."""
    chooses_in_python: bool = False
    """Whether the model's forward pass reads values, so that a branch may depend on the other samples."""
    checked_sizes: set[int] = field(default_factory=set)
    """Batch sizes at which samples' gradients were found equal to plain autograd's."""

    @property
    def flattened(self) -> bool:
        """Whether positions of samples are rows of some tensor, so that rows of unequal samples could be mixed up."""
        axes = [axis for site in self.sites for axis in (*site.leaf_axes, *site.output_axes)]
        return self.routed or any(axis is not None and axis.multiple > 1 for axis in axes)

    def route(self) -> None:
        """Know operations by what they read from now on.

        Raises:
            UnsupportedModelError: If the same use has samples once, and none another time.
        """
        self.routed = True
        for site in self.sites:
            known = self.uses.setdefault(site.use, site)
            if known.batched != site.batched:
                raise mixed(site, "the same operation runs on samples and on what all samples share")
            if known != site:
                known.routed = True

    def doubt(self) -> None:
        """Let the gradient tell the samples of all rows, as shapes do not."""
        for site in self.sites:
            site.routed = site.batched
        self.route()


@dataclass(slots=True)
class _Record:
    function: Any
    sources: list[Any]
    """Per tensor argument: the record that made it, a parameter name, or None."""
    shapes: list[tuple[int, ...]]
    others: list[Any]
    outputs: list[Tensor]
    output_shapes: list[tuple[int, ...]]
    taints: frozenset[Any]


class _Recorder(AbstractInterceptor):
    """Writes down every operation that has a kept parameter behind it, and runs it as it is."""

    def __init__(self, kept: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.records: list[_Record] = []
        self.sources: dict[int, Any] = {}
        self.taints: dict[int, tuple[Any, frozenset[Any]]] = {}
        """Tensors whose rows may be anyone's, and what is computed from them, each with the reasons."""
        self.ordered: list[int] = []
        """Sizes of what was ordered by value; the place in this list is the reason."""
        self.read_out = 0
        """Numbers that Python got to see."""
        self.read_by_model = 0
        """Those that it got to see while the model ran, not the output function."""
        self._running = False
        for name, parameter in kept.items():
            self.watched[id(parameter)] = parameter
            self.sources[id(parameter)] = name

    def install(self, model: nn.Module) -> list[Any]:
        """Hook the modules, and the model to know when it runs; the handles undo it."""

        def starts(module: nn.Module, args: Any) -> None:
            self._running = True

        def ends(module: nn.Module, args: Any, result: Any) -> None:
            self._running = False

        own = [model.register_forward_pre_hook(starts), model.register_forward_hook(ends, always_call=True)]
        return [*super().install(model), *own]

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        num_read = num_read_out(func, args)
        self.read_out += num_read
        self.read_by_model += num_read if self._running else 0
        reasons = set(self._taints_of((args, dict(kwargs or {}))))
        if chooses_by_value(func, args):
            reasons.add(_CHOSEN)
        size = ordered_size(func, args, kwargs or {})
        if size is not None:
            reasons.add(len(self.ordered))
            self.ordered.append(size)
        if func is torch._pack_padded_sequence:
            reasons.add(_PACKED_ROWS)
        if func is torch._pad_packed_sequence:
            reasons.discard(_PACKED_ROWS)
        if reasons:
            self._taint(func, written(func, args, result), frozenset(reasons))
        return result

    def _taint(self, function: Function, result: Any, reasons: frozenset[Any]) -> None:
        for place, tensor in enumerate(tree_flatten(result)[0]):
            # The last states of a recurrent layer have a batch axis again.
            own = reasons - {_PACKED_ROWS} if function in PACKED and place else reasons
            if isinstance(tensor, Tensor) and own:
                self.taints[id(tensor)] = (tensor, own)

    def _taints_of(self, arguments: Any) -> frozenset[Any]:
        if not self.taints:
            return frozenset()
        found = [self.taints[id(leaf)][1] for leaf in tree_flatten(arguments)[0] if id(leaf) in self.taints]
        return frozenset().union(*found)

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.inside:
            return function(*args, **kwargs)
        leaves = tree_flatten((args, dict(kwargs)))[0]
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        sources = [self.sources.get(id(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        taints = self._taints_of(leaves)
        result = function(*args, **kwargs)
        outputs = differentiable(written(function, args, result))
        if not any(tensor.requires_grad for tensor in outputs):  # a shape, a device, a detached value
            return result
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self._record(_Record(function, sources, shapes, others, outputs, _shapes(outputs), taints))
        return result

    def ruled_module(
        self, module: nn.Module, rule: GradientRule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        names = [self.sources[id(p)] for p in module.parameters() if id(p) in self.sources]
        if names:
            shapes = [tuple(p.shape) for p in module.parameters() if id(p) in self.sources]
            outputs = differentiable(out)
            taints = self._taints_of((args, kwargs))
            self._record(_Record(module, names, shapes, [], outputs, _shapes(outputs), taints))
        return out

    def _record(self, record: _Record) -> None:
        place = len(self.records)
        self.records.append(record)
        for tensor in record.outputs:
            if tensor.requires_grad:
                self.watched[id(tensor)] = tensor
                self.sources[id(tensor)] = place


def _shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


_CHOSEN, _PACKED_ROWS = "chosen by value", "packed"
Evaluate = Callable[[Batch], Tensor]


def make_plan(model: nn.Module, kept: Mapping[str, nn.Parameter], batch: Batch, evaluate: Evaluate) -> Plan:
    """Return the plan of a model for batches like this one.

    Args:
        model: The module; its kept parameters require grad.
        kept: The parameters to keep gradients for, by name.
        batch: At least one sample.
        evaluate: Gives f, ``(B,)``, of a batch.

    Raises:
        UnsupportedModelError: If samples are mixed, or their place cannot be found.
    """
    with torch.enable_grad():
        two, _ = _recorded(model, kept, take_rows(batch, [0, 0]), evaluate)
        three, outputs = _recorded(model, kept, take_rows(batch, [0, 0, 0]), evaluate)
        _same_operations(two, three)
        plan = Plan(chooses_in_python=two.read_by_model > 0)
        pairs = _relevant(two, three, plan)
        _assign_owners(plan, pairs, outputs)
        if any(site.routed for site in plan.sites):
            plan.route()
        if plan.flattened and two.read_out != three.read_out:
            plan.doubt()  # Python saw a number of every sample, by which it may have cut the sample's rows
    return plan


def _recorded(
    model: nn.Module, kept: Mapping[str, nn.Parameter], batch: Batch, evaluate: Evaluate
) -> tuple[_Recorder, Tensor]:
    recorder = _Recorder(kept)
    handles = recorder.install(model)
    try:
        with recorder:
            return recorder, evaluate(batch)
    finally:
        for handle in handles:
            handle.remove()


def _same_operations(two: _Recorder, three: _Recorder) -> None:
    same = len(two.records) == len(three.records) and all(
        a.function == b.function for a, b in zip(two.records, three.records, strict=True)
    )
    if not same:
        raise UnsupportedModelError(
            f"The model runs {len(two.records)} operations on its parameters for 2 samples and "
            f"{len(three.records)} for 3, so an operation cannot be told from its samples. Expected a forward pass "
            "over the whole batch, without a loop over samples. Use another gradient computer."
        )


def _relevant(two: _Recorder, three: _Recorder, plan: Plan) -> list[_Record]:
    """Add the operations that read a parameter, or a value made of parameters alone; return their records."""
    shared: dict[int, tuple[str, ...]] = {}
    found = []
    samples_ordered = {
        place
        for place, sizes in enumerate(zip(two.ordered, three.ordered, strict=False))
        if len({*sizes}) > 1
    }
    for place, (a, b) in enumerate(zip(two.records, three.records, strict=True)):
        roots = [_roots(source, shared) for source in b.sources]
        names = tuple(dict.fromkeys(name for part in roots for name in part))
        if not names:
            continue
        reads_samples = any(
            source is not None and not part for source, part in zip(b.sources, roots, strict=True)
        )
        unknown = _unknown_rows(b, samples_ordered)
        site = _routed_site(a, b, names, reads_samples) if unknown else _site(a, b, names)
        if not site.batched:
            if reads_samples:
                raise mixed(site, "its result has no batch axis although it reads the samples' activations")
            shared[place] = names
        plan.sites.append(site)
        found.append(b)
    return found


def _roots(source: Any, shared: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    if isinstance(source, str):
        return (source,)
    return shared.get(source, ()) if source is not None else ()


def _site(two: _Record, three: _Record, names: tuple[str, ...]) -> Site:
    outputs = [batch_axis(a, b) for a, b in zip(two.output_shapes, three.output_shapes, strict=True)]
    leaves = [batch_axis(a, b) for a, b in zip(two.shapes, three.shapes, strict=True)]
    site = Site(three.function, names, any(axis is not None for axis in outputs), dims=_dims(three))
    for axis in outputs:
        if isinstance(axis, str):
            raise mixed(site, axis)
    site.output_axes = tuple(axis for axis in outputs if not isinstance(axis, str))
    site.leaf_axes = tuple(None if isinstance(axis, str) else axis for axis in leaves)
    site.routed = site.batched and site.function in PACKED and not _sequences_are_samples(three, leaves[0])
    known = not any(isinstance(axis, str) for axis in leaves)
    site.sliceable = known and two.others == three.others
    if isinstance(site.function, nn.Module) and site.batched and site.output_axes[0] != BatchAxis(0):
        raise mixed(site, "its gradient rule needs one result with the samples on axis 0")
    return site


def _dims(record: _Record) -> tuple[int, ...]:
    return () if isinstance(record.function, nn.Module) else tuple(len(shape) for shape in record.shapes)


def _routed_site(two: _Record, three: _Record, names: tuple[str, ...], reads_samples: bool) -> Site:
    """Return the site of an operation whose rows may be anyone's, or of one that only looks as if."""
    grows = two.output_shapes != three.output_shapes
    empty = any(0 in shape for shape in three.output_shapes)
    routed = grows or empty or reads_samples
    return Site(three.function, names, routed, routed=routed, dims=_dims(three))


def _unknown_rows(record: _Record, samples_ordered: set[int]) -> bool:
    """Whether the probed samples, all equal, cannot tell whose rows the operation will read in another batch."""
    packed = _PACKED_ROWS in record.taints and record.function not in PACKED
    return _CHOSEN in record.taints or packed or bool(record.taints & samples_ordered)


def _sequences_are_samples(record: _Record, axis: BatchAxis | str | None) -> bool:
    """Whether a recurrent layer's sequences are the samples, one by one; a packed sequence keeps their order."""
    return len(record.shapes[0]) == 2 or axis == BatchAxis(int(not record.others[-1]))


def mixed(site: Site, reason: str) -> UnsupportedModelError:
    """Return the error for an operation that cannot be split into samples."""
    return UnsupportedModelError(
        f"The operation {describe(site.function)}, which uses {list(site.names)[:3]}, cannot be split into "
        f"samples: {reason}. Use another gradient computer, or keep no gradients for these parameters."
    )


def describe(function: Any) -> str:
    """Return the name of an operation or of a module with a rule of its own."""
    return getattr(function, "__name__", None) or type(function).__name__


def _assign_owners(plan: Plan, records: Sequence[_Record], outputs: Tensor) -> None:
    """Check with the gradient of each f that entries belong to the sample they are taken for; order flattened axes."""
    batched = [
        (site, record)
        for site, record in zip(plan.sites, records, strict=True)
        if site.batched
        and not site.routed
        and site.function not in PACKED
        and record.outputs[0].requires_grad
    ]
    if not batched or not outputs.requires_grad:
        return
    tensors = [record.outputs[_first(site)] for site, record in batched]
    orders = [_orders(site) for site, _ in batched]
    for sample in range(len(outputs)):
        with refusing_reentrant_checkpoints():
            grads = torch.autograd.grad(outputs[sample], tensors, retain_graph=True, allow_unused=True)
        for place, grad in enumerate(grads):
            if grad is not None:
                orders[place] = [axis for axis in orders[place] if _owned(grad, axis, sample, len(outputs))]
    for (site, _), possible in zip(batched, orders, strict=True):
        if not possible:
            raise mixed(site, "f of one sample depends on what it computes for another")
        if possible[0].multiple > 1 or not possible[0].sample_major:
            site.output_axes = tuple(_ordered(axis, possible[0]) for axis in site.output_axes)
        site.leaf_axes = tuple(_ordered(axis, possible[0]) for axis in site.leaf_axes)


@contextmanager
def refusing_reentrant_checkpoints() -> Iterator[None]:
    """Turn torch's error for a reentrant checkpoint into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error) or isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(
            "The model uses checkpoint(..., use_reentrant=True), which hides its operations until the backward "
            "pass. Use checkpoint(..., use_reentrant=False)."
        ) from error


def _first(site: Site) -> int:
    """Return the place of the first result with a batch axis."""
    return next(place for place, axis in enumerate(site.output_axes) if axis is not None)


def _orders(site: Site) -> list[BatchAxis]:
    axis = site.output_axes[_first(site)]
    assert axis is not None
    return [axis] if axis.multiple == 1 else [axis, replace(axis, sample_major=False)]


def _owned(grad: Tensor, axis: BatchAxis, sample: int, count: int) -> bool:
    """Whether a gradient of one sample's f is zero for all others, NaN and infinity aside."""
    others = [i for i in range(count) if i != sample]
    return not bool(by_sample(grad.detach(), axis, count)[others].nan_to_num(0.0, 0.0, 0.0).any())


def _ordered(axis: BatchAxis | None, like: BatchAxis) -> BatchAxis | None:
    return axis if axis is None or axis.multiple == 1 else replace(axis, sample_major=like.sample_major)
