"""Plan of a model: the operations that use kept parameters, and the batch axis of their tensors.

The model runs on two and on three copies of one sample, and the operations of both runs are compared. An axis that
grows with the batch is the batch axis. A result without a batch axis is shared by all samples (a transposed weight,
position embeddings). The gradient of each f(z_i) shows which entries belong to sample i.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trak_lite.data.batches import batch_size, take_rows
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis, batch_axis, by_sample
from trak_lite.gradient_computers.hooks.plan.recorder import RECURRENT, Record, Recorder, grows_twice
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.gradient_computers.reference import naming_graph_failures
from trak_lite.models.tree import ModelTree
from trak_lite.types import Batch


@dataclass(slots=True)
class Site:
    """One operation of the forward pass that reads kept parameters."""

    function: Any
    """The operation; the module if a gradient rule is registered for it."""
    names: tuple[str, ...]
    """The kept parameters that reach it."""
    batched: bool
    """Whether its result has a batch axis; a result without one is shared by all samples."""
    leaf_axes: tuple[BatchAxis | None, ...] = ()
    """Batch axis of every tensor argument, in order."""
    output_axes: tuple[BatchAxis | None, ...] = ()
    """Batch axis of every differentiable result; if the site is routed, only where its rows are expected."""
    sliceable: bool = True
    """Whether no argument counts the samples."""
    routed: bool = False
    """Whether its rows may belong to any sample, so that weighted backward passes have to identify them."""
    dims: tuple[int, ...] = ()
    """Number of axes of every tensor argument of an operation."""

    @property
    def use(self) -> Any:
        """Key of this use of parameters if operations do not run in a fixed order."""
        return self.function, frozenset(self.names), self.dims

    def fits(self, tensors: Sequence[Tensor], num_samples: int) -> bool:
        """Whether tensor arguments have the sizes of ``num_samples`` samples."""
        pairs = zip(self.leaf_axes, tensors, strict=False)
        return all(axis is None or axis.for_shape(t.shape, num_samples) is not None for axis, t in pairs)


@dataclass(slots=True)
class Plan:
    """The operations on kept parameters in a forward pass, for one batch structure.

    The operations run in the order of ``sites``. If rows are routed, experts without rows may be missing and others may
    appear; operations are then identified by ``Site.use``.
    """

    sites: list[Site] = field(default_factory=list)
    routed: bool = False
    """Whether the rows of some operation may belong to any sample."""
    uses: dict[Any, list[Site]] = field(default_factory=dict)
    """Sites by ``Site.use``."""
    chooses_in_python: bool = False
    """Whether values are read before the last operation, so that a branch may depend on the other samples."""
    reads_only_quantifiers: bool = False
    """Whether it reads values of ``all`` and ``any`` only, so that some sample alone takes the branch of a batch."""
    dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes of the results of operations on parameters."""
    only_in_model: bool = False
    """Whether all of them ran while the model did, so that the output function's need not be intercepted."""
    methods: Mapping[str, Mapping[str, None]] = field(default_factory=dict)
    """The rules that computed each parameter's gradient in the last pass."""
    escaped: Sequence[str] = ()
    """Parameters that f depended on in another way in the last pass."""
    runs_functions: bool = False
    """Whether an operation ran functions that it was given, such as the branches of ``torch.cond``."""
    has_other_leaves: bool = True
    """Whether f may depend on tensors that require grad and are no parameters, as far as autograd knows."""

    @property
    def flattened(self) -> bool:
        """Whether several rows of some tensor belong to one sample, so that a wrong plan could misassign them."""
        axes = [axis for site in self.sites for axis in (*site.leaf_axes, *site.output_axes)]
        return self.routed or any(axis is not None and axis.multiple > 1 for axis in axes)

    @property
    def may_mix(self) -> bool:
        """Whether a choice by values may depend on the other samples of a batch, such as one within a capacity."""
        return self.routed or (self.chooses_in_python and not self.reads_only_quantifiers)

    def route(self) -> None:
        """Identify operations by ``Site.use`` instead of their order from now on."""
        self.routed = True
        for first, *others in self.uses.values():
            if any(site.batched != first.batched for site in others):
                raise mixed(first, "the same operation runs on samples and on what all samples share")
            first.routed |= any(site != first for site in others)

    def doubt(self) -> None:
        """Mark all sites as routed, because shapes do not identify the samples of their rows."""
        for site in self.sites:
            site.routed = site.batched
        self.route()


_Evaluate = Callable[[Batch], Tensor]


def make_plan(
    model: nn.Module, kept: Kept, batch: Batch, evaluate: _Evaluate, *, may_repeat: bool = True
) -> Plan:
    """Return the plan of a model, whose kept parameters require grad, for batches like this one.

    ``evaluate`` returns f, ``(B,)``, of a batch. If the model's first run differs from the second one, and it
    ``may_repeat``, it runs again.
    """

    def recorded(count: int, smaller: Recorder | None = None) -> tuple[Recorder, Tensor]:
        try:
            return _recorded(model, kept, take_rows(batch, [0] * count), evaluate, smaller)
        except InvalidInputError as error:
            if batch_size(batch) > 1:
                raise
            evaluate(batch)  # the error of the sample, if it has one alone
            raise UnsupportedModelError(
                f"f takes one sample alone: {error} Use gradient_computer='functional' or 'iterative'."
            ) from error

    with torch.enable_grad():
        two, _ = recorded(2)
        three, outputs = recorded(3, two)
        if may_repeat and not three.ran_like(two):
            # The first run may have computed what the model caches, so that its operations cannot be compared.
            again, _ = recorded(2)
            if three.ran_like(again):
                two = again
                three, outputs = recorded(3, two)
        plan = Plan(
            runs_functions=two.runs_functions or three.runs_functions,
            dtypes=frozenset(tensor.dtype for record in three.records for tensor in record.outputs),
        )
        pairs = _relevant(two, three, plan)
        last_of_two, last_of_three = pairs[-1] if pairs else (-1, -1)
        choices = _choices(two, last_of_two)
        plan.chooses_in_python = bool(choices)
        plan.reads_only_quantifiers = all(choices + _choices(three, last_of_three))
        plan.only_in_model = all(three.records[index].in_model for _, index in pairs)
        if [record.function for record in two.records] != [record.function for record in three.records]:
            plan.doubt()  # a loop over samples outside the operations on parameters may move their rows
        _assign_owners(plan, [three.records[index] for _, index in pairs], outputs)
        if any(site.routed for site in plan.sites):
            plan.route()
        if _numbers_before(two, last_of_two) != _numbers_before(three, last_of_three):
            plan.doubt()  # Python read values per sample, and may have sliced or ordered rows by them
    return plan


def sample_on_path(model: nn.Module, kept: Kept, batch: Batch, evaluate: _Evaluate) -> int | None:
    """Return a sample whose copies run the same operations on parameters as the batch; ``None`` if there is none.

    A model that reads ``all`` or ``any`` in Python chooses a path by all samples of a batch, such as one without a mask
    if no sample is padded.
    """

    def path(rows: Sequence[int] | None) -> list[Any]:
        part = batch if rows is None else take_rows(batch, rows)
        return [record.function for record in _recorded(model, kept, part, evaluate)[0].records]

    with torch.enable_grad():
        expected = path(None)
        return next((row for row in range(batch_size(batch)) if path([row, row]) == expected), None)


def _numbers_before(recorder: Recorder, last: int) -> int:
    """Return how many tensor values Python read before record ``last``, the last one that reads parameters."""
    return sum(count for index, count, _, _ in recorder.reads if index <= last)


def _choices(recorder: Recorder, last: int) -> list[bool]:
    """Return the kinds of reads that may choose a path: by the model, or before the last record that reads parameters.

    The output function may order samples by their values before it calls the model.
    """
    reads = recorder.reads
    return [is_quantifier for index, _, in_model, is_quantifier in reads if in_model or index <= last]


def _recorded(
    model: nn.Module, kept: Kept, batch: Batch, evaluate: _Evaluate, smaller: Recorder | None = None
) -> tuple[Recorder, Tensor]:
    """Return the recorder of a forward pass over a batch, and f."""
    recorder = Recorder(kept, smaller)
    with recorder.installed(ModelTree(model)), recorder:
        return recorder, evaluate(batch)


def _relevant(two: Recorder, three: Recorder, plan: Plan) -> list[tuple[int, int]]:
    """Add a site for each operation that reads a parameter or shared value; return the record indices of both runs."""
    shared: tuple[dict[int, tuple[str, ...]], ...] = ({}, {})
    reading = _reading_parameters(two.records, shared[0]), _reading_parameters(three.records, shared[1])
    pairs = []
    for (first, a), (second, b) in itertools.zip_longest(*reading, fillvalue=(-1, None)):
        if a is None or b is None or a.function != b.function:
            raise UnsupportedModelError(
                f"The model runs different operations on its parameters for 2 samples ({len(two.records)} in all) and "
                f"for 3 ({len(three.records)}), so operations cannot be matched between batches. Expected a forward "
                "pass over the whole batch, without a loop over samples. Use gradient_computer='functional' or "
                "'iterative'."
            )
        roots = [_roots(source, shared[1]) for source in b.sources]
        names = tuple(dict.fromkeys(name for part in roots for name in part))
        reads_samples = any(
            source is not None and not part for source, part in zip(b.sources, roots, strict=True)
        )
        site = _site(a, b, names, reads_samples)
        if not site.batched:
            if reads_samples:
                raise mixed(site, "its result has no batch axis although it reads the samples' activations")
            shared[0][first] = shared[1][second] = names
        of_no_sample = all(part or free for part, free in zip(roots, b.value_free, strict=True))
        if site.batched and of_no_sample and three.moves_rows:
            # Its row i comes from no sample, and may be combined with a row moved there from another sample.
            site.routed = True
        plan.sites.append(site)
        plan.uses.setdefault(site.use, []).append(site)
        pairs.append((first, second))
    return pairs


def _reading_parameters(
    records: Sequence[Record], shared: Mapping[int, tuple[str, ...]]
) -> Iterator[tuple[int, Record]]:
    """Yield the records that read a parameter or a shared value; the caller adds to ``shared`` meanwhile."""
    for index, record in enumerate(records):
        if any(_roots(source, shared) for source in record.sources):
            yield index, record


def _roots(source: Any, shared: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    if isinstance(source, str):
        return (source,)
    return shared.get(source, ()) if source is not None else ()


def _site(two: Record, three: Record, names: tuple[str, ...], reads_samples: bool) -> Site:
    """Return the site of an operation; if its rows are unknown, it is routed unless it depends on no sample."""
    unknown = three.has_unknown_rows
    pairs = list(zip(two.output_shapes, three.output_shapes, strict=True))
    outputs = [batch_axis(a, b) for a, b in pairs]
    dims = () if isinstance(three.function, nn.Module) else tuple(map(len, three.shapes))
    site = Site(three.function, names, any(axis is not None for axis in outputs), dims=dims)
    for axis, (a, b) in zip(outputs, pairs, strict=True):
        if isinstance(axis, str) and (grows_twice(a, b) or not unknown):
            raise mixed(site, axis)
    site.output_axes = tuple(axis for axis in outputs if not isinstance(axis, str))
    if unknown:
        grows, empty = any(a != b for a, b in pairs), any(0 in b for _, b in pairs)
        site.batched = site.routed = grows or empty or reads_samples
        if not site.routed or not all(isinstance(axis, BatchAxis) for axis in outputs):
            site.output_axes = ()
        return site
    leaves = [batch_axis(a, b) for a, b in zip(two.shapes, three.shapes, strict=True)]
    site.leaf_axes = tuple(None if isinstance(axis, str) else axis for axis in leaves)
    if site.batched and site.function in RECURRENT and len(three.shapes[0]) != 2:
        # The sequences are not packed, and may be others than the samples in order.
        site.routed = leaves[0] != BatchAxis(int(not three.others[-1]))
    has_axes = not any(isinstance(axis, str) for axis in leaves)
    # An index such as arange(B), which is the same in all batches, numbers the samples.
    of_tensors = [*zip(three.value_free, leaves, strict=True)]  # the first one is what is indexed
    numbers = three.has_index and bool(leaves[0]) and any(free and axis for free, axis in of_tensors[1:])
    site.sliceable = has_axes and two.others == three.others and not numbers
    if isinstance(site.function, nn.Module) and site.batched and site.output_axes[0] != BatchAxis(0):
        raise mixed(site, "its gradient rule needs one result with the samples on axis 0")
    return site


def mixed(site: Site, reason: str) -> UnsupportedModelError:
    """Return the error for an operation that cannot be split into samples."""
    return UnsupportedModelError(
        f"The operation {describe(site.function)}, which uses {list(site.names)[:3]}, cannot be split into samples: "
        f"{reason}. Use gradient_computer='functional' or 'iterative', or leave these parameters out of grad_wrt."
    )


def describe(function: Any) -> str:
    """Return the name of an operation, or the class name of a module with a rule."""
    return getattr(function, "__name__", None) or type(function).__name__


def _assign_owners(plan: Plan, records: Sequence[Record], outputs: Tensor) -> None:
    """Check the batch axes with the gradient of each f; find the order of flattened axes.

    Where all gradients are zero (dead units), the order is unknown, and the rows of the operation are identified.
    """
    batched = [
        (site, record)
        for site, record in zip(plan.sites, records, strict=True)
        if site.batched
        and not site.routed
        and site.function not in RECURRENT
        and record.outputs[0].requires_grad
    ]
    if not batched or not outputs.requires_grad:
        return
    # The first result with a batch axis, and the axis.
    firsts = [next((n, axis) for n, axis in enumerate(site.output_axes) if axis) for site, _ in batched]
    tensors = [record.outputs[index] for (_, record), (index, _) in zip(batched, firsts, strict=True)]
    orders = [[axis] for _, axis in firsts]
    for possible in orders:
        if possible[0].multiple > 1:
            possible.append(replace(possible[0], sample_major=False))
    for sample in range(len(outputs)):
        with naming_graph_failures():
            grads = torch.autograd.grad(outputs[sample], tensors, retain_graph=True, allow_unused=True)
        others = [i for i in range(len(outputs)) if i != sample]
        for index, grad in enumerate(grads):
            if grad is not None:  # it is zero at all other samples; NaN and infinity are ignored
                values = grad.detach().nan_to_num(0.0, 0.0, 0.0)
                orders[index] = [
                    axis for axis in orders[index] if not by_sample(values, axis, len(outputs))[others].any()
                ]
    for (site, _), possible, grad in zip(batched, orders, grads, strict=True):
        if not possible:
            raise mixed(site, "f of one sample depends on values of another sample")
        if len(possible) > 1 and grad is not None and not grad.any():
            site.routed = True
        if possible[0].multiple > 1 or not possible[0].sample_major:
            site.output_axes = tuple(_ordered(axis, possible[0]) for axis in site.output_axes)
        site.leaf_axes = tuple(_ordered(axis, possible[0]) for axis in site.leaf_axes)


def _ordered(axis: BatchAxis | None, like: BatchAxis) -> BatchAxis | None:
    return axis if axis is None or axis.multiple == 1 else replace(axis, sample_major=like.sample_major)
