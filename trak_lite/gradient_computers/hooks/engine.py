"""One forward and one backward pass that give the gradients of every sample.

Each operation that reads a kept parameter is given the parameter detached, so that autograd forms no summed weight
gradient; a hook on the operation's result catches the gradient, and a rule makes per-sample gradients of it and of the
operation's inputs. Whatever escapes this shows as an ordinary gradient of the parameter itself: nothing is lost in
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.axes import BatchAxis
from trak_lite.gradient_computers.hooks.calls import (
    Contribution,
    Factors,
    Lookups,
    OperationCall,
    Summed,
    dense_of,
    merged,
    transposed,
)
from trak_lite.gradient_computers.hooks.generic import generic_rule
from trak_lite.gradient_computers.hooks.interception import AbstractInterceptor, Function, is_in_place
from trak_lite.gradient_computers.hooks.operations import READS_NOTHING, RULES
from trak_lite.gradient_computers.hooks.owners import SampleCode
from trak_lite.gradient_computers.hooks.probe import (
    Plan,
    Site,
    describe,
    differentiable,
    refusing_reentrant_checkpoints,
    written,
)
from trak_lite.gradient_computers.hooks.recurrent import RECURRENT, run_recurrent
from trak_lite.gradient_computers.hooks.registry import GradientRule
from trak_lite.gradient_computers.hooks.routing import (
    RowTags,
    routed_contributions,
    row_layout,
    summed_by_owner,
)
from trak_lite.types import BlockSink, DenseBlock, FactoredBlock, LookupBlock, SummedBlock

__all__ = ["GradientPass", "UnexpectedRowsError"]

_TRANSPOSITIONS = frozenset(
    {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__, Tensor.transpose, torch.transpose}  # type: ignore[attr-defined]
)


@dataclass(slots=True)
class _Uses:
    """What is known of one parameter, or of a value made of parameters, during a pass."""

    tensor: Tensor
    name: str | None
    """The parameter's name; ``None`` for a value made of parameters."""
    roots: list[int] = field(default_factory=list)
    """``id`` of the parameters that a value is made of."""
    transpose_of: int | None = None
    pending: int = 0
    """Uses whose gradient has not come yet."""
    parts: list[Contribution] = field(default_factory=list)


class UnexpectedRowsError(UnsupportedModelError):
    """The forward pass met another number of rows than the plan says; nothing has been streamed yet."""


class GradientPass(AbstractInterceptor):
    """Catches what each kept parameter does in one forward pass, then streams blocks during the backward pass.

    Use it as a context around both, with the handles of :meth:`install` removed afterwards.
    """

    def __init__(
        self,
        plan: Plan,
        kept: Mapping[str, nn.Parameter],
        num_samples: int,
        *,
        sink: BlockSink,
        start: int = 0,
    ) -> None:
        """Prepare a pass.

        Args:
            plan: What the model does, by :func:`make_plan`.
            kept: Parameters to keep gradients for, by name; they require grad.
            num_samples: B.
            sink: Takes the blocks.
            start: Row of the batch that sample 0 of this pass has.
        """
        super().__init__()
        self.methods: dict[str, dict[str, None]] = {name: {} for name in kept}
        """The rules that gave each parameter's gradient."""
        self._plan = plan
        self._kept = dict(kept)
        self._num_samples = num_samples
        self._sink = sink
        self._start = start
        self._cursor = 0
        self._in_backward = False
        self._code = SampleCode(num_samples)
        self._tags: list[RowTags] = []
        self._tagging = False
        self._taps: dict[torch.device, Tensor] = {}
        self._uses = {id(p): _Uses(p, name) for name, p in kept.items()}
        self._emitted: set[str] = set()
        self._shared: dict[Any, Site] = {}
        self.watched = {id(p): p for p in kept.values()}

    # Forward

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on parameters: detached where it reads samples, tracked where it does not."""
        if self.inside:
            args, kwargs = tree_map(self._detached, (args, dict(kwargs)))
            return function(*args, **kwargs)
        site = self._next_site(function, args, kwargs)
        if site is None:
            return self._unplanned(function, args, kwargs)
        if site.batched:
            return self._use(site, function, args, kwargs)
        # A checkpoint around it keeps no value, and would run its whole part again to carry a gradient back.
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            result = function(*args, **kwargs)
        for tensor in differentiable(written(function, args, result)):
            if tensor.requires_grad:
                self._share(function, args, kwargs, tensor)
        return result

    def hide(self, module: nn.Module) -> None:
        """Keep the module's own forward pass from differentiating its parameters."""
        # Its parameters may be read by what is no operation of torch, so they cannot be replaced one by one.
        for parameter in module.parameters():
            parameter.requires_grad_(False)

    def show(self, module: nn.Module) -> None:
        """Undo :meth:`hide`."""
        if not self.inside:
            for parameter in module.parameters():
                parameter.requires_grad_(id(parameter) in self.watched)

    def _detached(self, value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) and id(value) in self.watched else value

    def _another_path(self, function: Any) -> UnsupportedModelError:
        return UnsupportedModelError(
            "The model took another path than with the batch that it was examined with: "
            f"{describe(function)} came as operation {self._cursor} on the parameters. "
            "Expected the same operations for every batch. Use another gradient computer."
        )

    def _unplanned(self, function: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run what the plan leaves out: a shape, a device, a detached value; nothing that carries a gradient."""
        result = function(*args, **kwargs)
        if any(tensor.requires_grad for tensor in differentiable(written(function, args, result))):
            raise self._another_path(function)
        return result

    def _next_site(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Site | None:
        """Return the plan's entry for the operation that comes now, if it is the one that the plan expects."""
        if self._plan.routed:
            return self._site_of_use(function, args, kwargs)
        key = (function, tuple(_signature(args)), tuple(_signature(tuple(kwargs.values()))))
        if self._in_backward:  # a checkpointed part runs again
            return self._shared.get(key)
        sites = self._plan.sites
        if self._cursor >= len(sites) or sites[self._cursor].function != function:
            return None
        site = sites[self._cursor]
        self._cursor += 1
        self._shared[key] = site
        return site

    def _site_of_use(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Site:
        """Return what the plan knows of such a use; an expert that it never saw has rows that may be anyone's."""
        leaves = [leaf for leaf in tree_flatten((args, dict(kwargs)))[0] if isinstance(leaf, Tensor)]
        if isinstance(function, nn.Module):
            read = [id(p) for p in function.parameters() if id(p) in self.watched]
            site = Site(function, self._names_of(read), True, routed=True)
        else:
            read = [id(leaf) for leaf in leaves if id(leaf) in self.watched]
            batched = len(read) < len(leaves)
            dims = tuple(leaf.dim() for leaf in leaves)
            site = Site(function, self._names_of(read), batched, routed=batched, dims=dims)
        known = self._plan.uses.get(site.use, site)
        reads_samples = any(leaf.requires_grad and id(leaf) not in self.watched for leaf in leaves)
        return site if reads_samples and not known.batched else known

    def _names_of(self, read: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the parameters behind these watched tensors."""
        roots = [root for tensor in read for root in self._uses[tensor].roots or [tensor]]
        return tuple(dict.fromkeys(name for root in roots if (name := self._uses[root].name) is not None))

    def _share(self, function: Function, args: Any, kwargs: Mapping[str, Any], tensor: Tensor) -> None:
        """Watch a value made of parameters alone."""
        if id(tensor) in self.watched:
            return
        parents = [
            id(leaf)
            for leaf in tree_flatten((args, dict(kwargs)))[0]
            if isinstance(leaf, Tensor) and id(leaf) in self.watched
        ]
        uses = _Uses(tensor, None)
        for parent in parents:
            known = self._uses[parent]
            uses.roots += [root for root in known.roots or [parent] if root not in uses.roots]
        if _is_transpose(function, args, tensor):
            uses.transpose_of = parents[0]
        self.watched[id(tensor)] = tensor
        self._uses[id(tensor)] = uses

    def _use(self, site: Site, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation with its parameters detached, and catch what their gradients will need."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        run = [self._detached(leaf) for leaf in leaves]
        targets = {id(new): old for new, old in zip(run, leaves, strict=True) if new is not old}
        run_args, run_kwargs = tree_unflatten(run, spec)
        if function in RECURRENT and _is_recurrence(function, run_args):
            return self._run_recurrent(site, function, run_args, targets)
        in_place = is_in_place(function)
        saved = self._saved(site, run, targets, in_place)
        result = function(*run_args, **run_kwargs)
        results = written(function, run_args, result)
        results = self._tapped(results, in_place)
        if not self._in_backward and differentiable(results):
            call = self._call(site, function, saved, spec, targets)
            call.outputs = (
                tuple(results)
                if isinstance(results, tuple | list) and function is torch.embedding_bag
                else ()
            )
            call.in_place = in_place
            self._catch(site, call, differentiable(results))
        return results if not in_place or result is not None else None

    def _saved(self, site: Site, run: list[Any], targets: Mapping[int, Tensor], in_place: bool) -> list[Any]:
        """Return the arguments as the rule will want them: detached, old values where the operation overwrites them."""
        if site.function in READS_NOTHING and not site.routed:
            return [leaf if not isinstance(leaf, Tensor) or id(leaf) in targets else None for leaf in run]
        saved = [
            leaf.detach() if isinstance(leaf, Tensor) and id(leaf) not in targets else leaf for leaf in run
        ]
        if in_place:
            saved[0] = saved[0].clone()
        return saved

    def _call(
        self, site: Site, function: Any, saved: list[Any], spec: Any, targets: dict[int, Tensor]
    ) -> OperationCall:
        args, kwargs = tree_unflatten(saved, spec)
        tensors = iter(site.leaf_axes)
        axes: dict[int, BatchAxis | None] = {}
        if function not in READS_NOTHING and not site.routed:
            for leaf in saved:
                if isinstance(leaf, Tensor):
                    axes[id(leaf)] = self._fitted(site, next(tensors), leaf.shape)
        call = OperationCall(
            function, args, kwargs, self._num_samples, targets, axes, site.output_axes, spec, site.sliceable
        )
        call.versions = [
            (leaf, leaf._version) for leaf in saved if isinstance(leaf, Tensor) and id(leaf) not in targets
        ]
        return call

    def _fitted(self, site: Site, axis: BatchAxis | None, shape: Sequence[int]) -> BatchAxis | None:
        """Return the batch axis of a tensor of this shape, or raise where the plan does not fit."""
        if axis is None:
            return None
        fitted = axis.for_size(shape[axis.axis], self._num_samples) if axis.axis < len(shape) else None
        if fitted is None:
            raise UnexpectedRowsError(
                f"{describe(site.function)}, which uses {list(site.names)[:3]}, has shape {tuple(shape)} for "
                f"{self._num_samples} samples, expected them on axis {axis.axis}"
                + ". Which row belongs to which sample is found by weighted backward passes from now on."
            )
        return fitted

    def _tapped(self, results: Any, in_place: bool) -> Any:
        """Make results part of autograd's graph where nothing before them is."""
        if in_place:
            return results if results.requires_grad else results.add_(self._tap(results))
        if isinstance(results, Tensor):
            return (
                results
                if results.requires_grad or not results.is_floating_point()
                else results + self._tap(results)
            )
        leaves, spec = tree_flatten(results)
        return tree_unflatten(
            [self._tapped(leaf, False) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )

    def _tap(self, like: Tensor) -> Tensor:
        """Return the zero on this tensor's device that the backward pass leads to."""
        if like.device not in self._taps:
            self._taps[like.device] = torch.zeros((), device=like.device, requires_grad=True)
        return self._taps[like.device]

    def _catch(self, site: Site, call: OperationCall, outputs: list[Tensor]) -> None:
        """Hook the results; the gradient sets the rule off."""
        layout = row_layout(call, outputs[0]) if site.routed and len(outputs) == 1 else None
        tags = self._new_tags(site, outputs, 0 if layout is None else layout.trailing)
        del layout  # it holds the arguments, which are freed during the backward pass
        if not site.routed:
            axes = zip(call.output_axes, outputs, strict=True)
            call.output_axes = tuple(self._fitted(site, axis, tensor.shape) for axis, tensor in axes)
        targets = list({id(t): t for t in call.targets.values()}.values())
        for target in targets:
            self._expect(target)

        def arrived(*grads: Tensor | None) -> None:
            if self._tagging:
                tags.add(grads)
            if self._tagging or not call.targets:
                return
            with torch.no_grad(), torch._C.DisableTorchFunction():
                parts = self._contributions(call, grads, tags)
                call.targets, call.args, call.kwargs, call.versions = {}, (), {}, []
                self._deposit(targets, parts)

        if len(outputs) == 1:
            outputs[0].register_hook(arrived)  # type: ignore[no-untyped-call]
        else:
            torch.autograd.graph.register_multi_grad_hook(
                [t for t in outputs if t.requires_grad], lambda grads: arrived(*grads), mode="all"
            )

    def _new_tags(self, site: Site, outputs: Sequence[Tensor], trailing: int) -> RowTags:
        """Return what will keep the tags of an operation's rows, if these may be anyone's."""
        tags = RowTags(site, tuple(tensor.dtype for tensor in outputs), trailing)
        if site.routed:
            self._tags.append(tags)
        return tags

    def _run_recurrent(
        self, site: Site, function: Any, args: Sequence[Any], targets: Mapping[int, Tensor]
    ) -> Any:
        rows = _num_sequences(args)
        if not site.routed:
            self._fitted(site, BatchAxis(0), (rows,))

        def tap(value: Tensor, weights: Sequence[Any], parts: Callable[[Tensor], list[Any]]) -> Tensor:
            if not value.requires_grad:
                value = value + self._tap(value)
            if self._in_backward:
                return value
            wanted = [targets.get(id(weight)) for weight in weights]
            for target in wanted:
                if target is not None:
                    self._expect(target)

            tags = self._new_tags(site, [value], 2)

            def arrived(grad: Tensor) -> None:
                if self._tagging and not site.routed:
                    return
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    every = parts(grad)
                    by_row = every[0].output_grads  # of the input's part, whatever axis has the sequences
                    if self._tagging:
                        tags.add([by_row])
                        return
                    every = self._summed(every, tags, by_row)
                    found = [(t, p) for t, p in zip(wanted, every, strict=True) if t is not None]
                    for target, _ in found:
                        self._note(target, "recurrence")
                    self._deposit([t for t in wanted if t is not None], found)

            value.register_hook(arrived)  # type: ignore[no-untyped-call]
            return value

        return run_recurrent(RECURRENT[function], args, num_samples=rows, order=self.packed_order, tap=tap)

    def ruled_module(
        self, module: nn.Module, rule: GradientRule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Catch the gradient of a module's result for the module's rule."""
        own = {name: p for name, p in module.named_parameters() if id(p) in self.watched}
        if not own:
            return out
        site = self._next_site(module, args, kwargs)
        if site is None:
            raise self._another_path(module)
        if not site.routed:
            self._fitted(site, site.output_axes[0], out.shape)
        out = self._tapped(out, False)
        if self._in_backward:
            return out
        args, kwargs = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, (args, kwargs))
        versions = [(v, v._version) for v in tree_flatten((args, kwargs))[0] if isinstance(v, Tensor)]
        for parameter in own.values():
            self._expect(parameter)
        tags = self._new_tags(site, [out], out.dim() - 1)

        def arrived(grad: Tensor) -> None:
            if self._tagging:
                tags.add([grad])
                return
            with torch.no_grad(), torch._C.DisableTorchFunction():
                _refuse_changes(module, versions)
                found = _parts_of(module, own, rule(module, args, kwargs, grad))
                parts = self._summed(list(found.values()), tags, grad)
                for parameter in own.values():
                    self._note(parameter, f"rule of {type(module).__name__}")
                self._deposit(list(own.values()), [(own[n], p) for n, p in zip(found, parts, strict=True)])

        out.register_hook(arrived)
        return out

    def _summed(self, parts: list[Contribution], tags: RowTags, grad: Tensor) -> list[Contribution]:
        """Sum per-row contributions over the rows of each sample, where rows are not the samples one by one."""
        if not tags.site.routed:
            return parts
        (owner,) = tags.owners([grad], self._code)
        assert owner is not None
        return [summed_by_owner(part, owner, self._num_samples) for part in parts]

    # Backward

    def backward(self, output: Tensor) -> dict[str, Tensor]:
        """Run the backward pass of ``output.sum()``; return the gradients that escaped, by parameter name.

        Raises:
            UnsupportedModelError: If the plan was not run to its end, or an operation cannot be split.
        """
        if self._cursor != len(self._plan.sites) and not self._plan.routed:
            raise UnsupportedModelError(
                f"The model ran {self._cursor} operations on its parameters, and {len(self._plan.sites)} when it was "
                "examined. Expected the same for every batch. Use another gradient computer."
            )
        escaped: dict[str, Tensor] = {}
        if output.requires_grad:
            self._in_backward = True
            inputs = [*self._kept.values(), *self._taps.values()]
            self._tag_rows(output, inputs)
            with torch._C.DisableTorchFunction():
                total = output.sum()
            found = self._run_backward(total, inputs)
            escaped = {name: grad for name, grad in zip(self._kept, found, strict=False) if grad is not None}
        self._finish()
        return escaped

    def _tag_rows(self, output: Tensor, inputs: list[Tensor]) -> None:
        """Run the weighted backward passes that tell whose rows are whose, where that is not known."""
        if not self._tags:
            return
        dtypes = [dtype for tags in self._tags for dtype in tags.dtypes]
        self._code = SampleCode.for_gradients(self._num_samples, dtypes)
        self._tagging = True
        for weights in self._code.weights(output):
            self._run_backward(output, inputs, weights)
        self._tagging = False

    def _run_backward(
        self, total: Tensor, inputs: list[Tensor], weights: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        with refusing_reentrant_checkpoints():
            return torch.autograd.grad(
                total, inputs, weights, retain_graph=weights is not None, allow_unused=True
            )

    def _contributions(
        self, call: OperationCall, grads: Sequence[Tensor | None], tags: RowTags
    ) -> list[tuple[Tensor, Contribution]]:
        """Return what the operation gives to each parameter that it read."""
        _refuse_changes(call.function, call.versions)
        if tags.site.routed:
            method, routed = routed_contributions(call, grads, tags.owners(grads, self._code))
            for target in call.targets.values():
                self._note(target, method)
            return routed
        name, rule = RULES.get(call.function, ("", None))
        parts = rule(call, grads[0]) if rule is not None and grads[0] is not None else None
        found = list(generic_rule(call, grads)) if parts is None else list(parts)
        for argument, _ in found:
            self._note(
                call.targets[id(argument)],
                name if parts is not None else f"{call.method} ({describe(call.function)})",
            )
        return [(call.targets[id(argument)], part) for argument, part in found]

    def _note(self, target: Tensor, method: str) -> None:
        uses = self._uses[id(target)]
        for root in uses.roots or [id(target)]:
            name = self._uses[root].name
            if name is not None:
                self.methods[name][method if not uses.roots else f"{method}, through a value made of it"] = (
                    None
                )

    def _expect(self, target: Tensor) -> None:
        """Count one more use; the first use of a shared value is one use of what it is made of."""
        uses = self._uses[id(target)]
        uses.pending += 1
        if uses.transpose_of is not None:
            self._expect(self._uses[uses.transpose_of].tensor)
        elif uses.name is None and uses.pending == 1:
            for root in uses.roots:
                self._expect(self._uses[root].tensor)

    def _deposit(self, targets: Sequence[Tensor], parts: Sequence[tuple[Tensor, Contribution]]) -> None:
        """Book one use of every target, with what it gave."""
        for target, part in parts:
            place, value = self._uses[id(target)], part
            while place.transpose_of is not None:
                place, value = self._uses[place.transpose_of], transposed(value)
            place.parts.append(_cast(value, target.dtype))
        for target in targets:
            self._arrived(self._uses[id(target)])

    def _arrived(self, uses: _Uses) -> None:
        uses.pending -= 1
        if uses.transpose_of is not None:
            self._arrived(self._uses[uses.transpose_of])
        elif uses.pending == 0:
            self._settle(uses)

    def _settle(self, uses: _Uses) -> None:
        """Emit a parameter's block, or hand the gradients of a shared value on to what it is made of."""
        parts, uses.parts = uses.parts, []
        if uses.name is not None:
            if parts and uses.name not in self._emitted:
                self._emitted.add(uses.name)
                self._emit(uses.name, merged(parts, uses.tensor.shape))
            return
        roots = [self._uses[root] for root in uses.roots]
        if parts:
            grads = dense_of(merged(parts, uses.tensor.shape))
            grads = grads.reshape(self._num_samples, *uses.tensor.shape)
            for root, part in zip(
                roots, _pulled_back(uses.tensor, [r.tensor for r in roots], grads), strict=True
            ):
                if part is not None:
                    root.parts.append(part)
        for root in roots:
            self._arrived(root)

    def _emit(self, name: str, part: Contribution) -> None:
        if isinstance(part, Factors):
            self._sink(FactoredBlock(name, *part, self._start))
        elif isinstance(part, Lookups):
            self._sink(LookupBlock(name, *part, self._start))
        elif isinstance(part, Summed):
            lookups = LookupBlock(name, *part.lookups, self._start)
            self._sink(SummedBlock(name, (lookups, FactoredBlock(name, *part.factors, self._start))))
        else:
            shape = self._kept[name].shape
            self._sink(DenseBlock(name, part.reshape(self._num_samples, *shape), self._start))

    def _finish(self) -> None:
        """Settle what waits for gradients that never came: those uses do not reach f."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            waiting = [uses for uses in self._uses.values() if uses.name is None and uses.pending > 0]
            for uses in reversed(waiting):
                if uses.transpose_of is None:
                    uses.pending = 0
                    self._settle(uses)
            for uses in self._uses.values():
                if uses.name is not None and uses.name not in self._emitted:
                    uses.pending = 0
                    self._settle(uses)
            for name, parameter in self._kept.items():
                if name not in self._emitted:
                    self._emit(name, parameter.new_zeros(()).expand(self._num_samples, *parameter.shape))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _parts_of(
    module: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor | tuple[Tensor, Tensor]]
) -> dict[str, Contribution]:
    """Return what a module's rule gave to each of its kept parameters, if that is all of them."""
    missing = sorted(set(own) - set(found))
    if missing:
        raise UnsupportedModelError(
            f"The gradient rule of {type(module).__name__} gave no gradient for {missing}. "
            "Expected one for every parameter that gradients are kept for."
        )
    return {
        name: Factors(*part) if isinstance(part, tuple) else part
        for name, part in found.items()
        if name in own
    }


def _num_sequences(args: Sequence[Any]) -> int:
    """Return how many sequences a recurrent operation reads."""
    if isinstance(args[3], list | tuple):  # packed: the first step has all of them
        return int(args[1][0])
    return int(args[0].shape[int(not args[-1])])


def _is_transpose(function: Function, args: Any, result: Tensor) -> bool:
    """Whether the result is the transpose of the first argument, a matrix."""
    if function not in _TRANSPOSITIONS or args[0].dim() != 2:
        return False
    axes = [axis % 2 for axis in args[1:] if isinstance(axis, int)]
    return result.dim() == 2 and axes in ([], [0, 1], [1, 0])


def _signature(values: Any) -> list[Any]:
    """Return what tells one operation from another when a part of the model runs again."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(tuple(value.shape))
        elif isinstance(value, tuple | list):
            found += _signature(value)
    return found


def _is_recurrence(function: Any, args: Sequence[Any]) -> bool:
    """Whether a recurrent operation has no projection of its state."""
    packed = isinstance(args[3], list | tuple)
    state = args[2] if packed else args[1]
    if RECURRENT[function] != "lstm" or state[0].shape[-1] == state[1].shape[-1]:
        return True
    if packed:
        raise UnsupportedModelError(
            "An LSTM with proj_size reads a packed sequence, whose rows cannot be told apart here. "
            "Pad the sequence, or use another gradient computer."
        )
    return False


def _refuse_changes(function: Any, versions: Sequence[tuple[Tensor, int]]) -> None:
    if any(tensor._version != version for tensor, version in versions):
        raise UnsupportedModelError(
            f"An input of {describe(function)} was changed in place after the operation read it, so its "
            "gradient cannot be formed. Make the later operation out of place (x = x + y, inplace=False)."
        )


def _cast_factors(part: Factors, dtype: torch.dtype) -> Factors:
    return Factors(part.inputs.to(dtype), part.output_grads.to(dtype))


def _cast(part: Contribution, dtype: torch.dtype) -> Contribution:
    if isinstance(part, Factors):
        return _cast_factors(part, dtype)
    if isinstance(part, Lookups):
        return part._replace(values=part.values.to(dtype))
    if isinstance(part, Summed):
        return Summed(
            part.lookups._replace(values=part.lookups.values.to(dtype)), _cast_factors(part.factors, dtype)
        )
    return part.to(dtype)


def _pulled_back(value: Tensor, roots: Sequence[Tensor], grads: Tensor) -> tuple[Tensor | None, ...]:
    """Carry per-sample gradients ``(B, *value.shape)`` of a shared value back to the parameters it is made of."""
    try:
        return torch.autograd.grad(
            value, list(roots), grads, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except RuntimeError:
        # An operation without a batching rule (a sparse gradient): torch raises no narrower type. The loop gives the
        # same numbers, or the operation's own error.
        rows = [
            torch.autograd.grad(value, list(roots), grad, retain_graph=True, allow_unused=True)
            for grad in grads
        ]
        return tuple(
            None if column[0] is None else torch.stack([part.to_dense() for part in column])
            for column in zip(*rows, strict=True)
        )
