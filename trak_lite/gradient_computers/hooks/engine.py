"""Per-sample gradients in one forward and one backward pass.

Each operation that reads a kept parameter receives it detached, so that autograd forms no summed weight gradient. The
gradient of the operation's result is taken by a hook, or returned by the backward pass if the model is small. A rule
computes per-sample gradients from it and the operation's inputs. A use of a parameter that is not intercepted gives the
parameter an ordinary gradient, which is reported as escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MethodWrapperType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import Contribution, Factors, OperationCall
from trak_lite.gradient_computers.hooks.ledger import GradientLedger
from trak_lite.gradient_computers.hooks.owners import SampleCode
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis
from trak_lite.gradient_computers.hooks.plan.interception import (
    AbstractInterceptor,
    ClassDispatch,
    Function,
    undispatched,
)
from trak_lite.gradient_computers.hooks.plan.probe import Plan, Site, describe
from trak_lite.gradient_computers.hooks.plan.rearranging import RECURRENT, flattened, rebuilt
from trak_lite.gradient_computers.hooks.plan.recorder import differentiable, is_in_place, written
from trak_lite.gradient_computers.hooks.plan.steps import Step
from trak_lite.gradient_computers.hooks.randomness import RandomState
from trak_lite.gradient_computers.hooks.registry import GradientRule
from trak_lite.gradient_computers.hooks.routing import (
    RowScales,
    RowTags,
    contributions_in_place,
    expected_axis,
    routed_contributions,
    row_layout,
    summed_by_owner,
)
from trak_lite.gradient_computers.hooks.rules.generic import generic_rule
from trak_lite.gradient_computers.hooks.rules.operations import MAY_DRAW, RULES, reads_nothing
from trak_lite.gradient_computers.hooks.rules.recurrent import run_recurrent
from trak_lite.gradient_computers.self_check import naming_graph_failures
from trak_lite.models.sharded import class_of

__all__ = ["GradientPass", "UnexpectedPathError", "UnexpectedRowsError"]

_COLLECTED_BYTES = 1 << 24
"""Largest size of all steps' results for which their gradients are kept until the end of the backward pass."""

_TRANSPOSITIONS = frozenset(
    {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__, Tensor.transpose, torch.transpose}  # type: ignore[attr-defined]
)


class UnexpectedRowsError(UnsupportedModelError):
    """A tensor has another number of rows than the plan expects; raised before any block is streamed."""


class UnexpectedPathError(UnsupportedModelError):
    """The forward pass runs other operations than the plan expects; raised before any block is streamed."""


class GradientPass(AbstractInterceptor):
    """Intercepts the uses of kept parameters in one forward pass, and streams blocks during the backward pass.

    Use it as a context manager around both passes. Remove the handles of :meth:`install` afterwards.
    """

    def __init__(
        self,
        plan: Plan,
        kept: Mapping[str, nn.Parameter],
        ledger: GradientLedger,
        *,
        by_class: bool = True,
    ) -> None:
        """Prepare a pass.

        Args:
            plan: The model's plan from :func:`make_plan`.
            kept: Parameters to keep gradients for, by name; they require grad.
            ledger: Counts the uses of the same parameters, and passes their blocks on.
            by_class: Intercept operations by the class of the parameters if these and the plan's tensors are plain;
                otherwise, and if false, by a mode.
        """
        super().__init__()
        self.by_class = by_class and plan.has_plain_tensors and ClassDispatch.supports(kept.values())
        self._dispatch: ClassDispatch | None = None
        """Intercepts the operations; ``None`` outside the pass, and if the mode does."""
        self._thread = get_ident()
        self._plan = plan
        self._kept = dict(kept)
        self._ledger = ledger
        self._num_samples = num_samples = ledger.num_samples
        self.escaped: dict[str, Tensor] = {}
        """Ordinary gradients of parameters from uses that were not intercepted, by name; set by :meth:`backward`."""
        self._cursor = 0
        self._in_backward = self._recomputes = False
        self._code = SampleCode(num_samples)
        self._scales = RowScales(self._code)
        self._tags: list[RowTags] = []
        self._tagging = False
        self._taps: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._shared: dict[Any, Site] = {}
        self._steps = plan.steps_for(num_samples)
        self._collects = self.by_class and plan.all_bound(num_samples, _COLLECTED_BYTES)
        """Whether the backward pass returns the gradients of all steps, instead of calling a hook for each."""
        self._uses: list[_Use] = []
        self._results: list[Tensor] = []
        self._edges: list[GradientEdge] = []
        self._expected: Step | None = None if plan.routed else self._steps.get(0)
        """The step of the next operation on parameters, if it is bound."""
        self.watched = {id(p): p for p in kept.values()}
        self._names: dict[int, Any] = {id(p): name for name, p in kept.items()} if plan.routed else {}
        """By ``id``, names of kept parameters, or of those that a value is made of; empty unless rows are routed."""

    @property
    def may_use_mode(self) -> bool:
        """Whether this pass failed before the backward pass, and may have because of the parameters' classes."""
        return self.by_class and not (self._in_backward or self._plan.chooses_in_python)

    @property
    def methods(self) -> Mapping[str, Mapping[str, None]]:
        """The rules that computed each parameter's gradient."""
        return self._ledger.methods

    # Forward

    def __enter__(self) -> Self:
        """Intercept operations from now on."""
        if not self.by_class:
            super().__enter__()  # type: ignore[no-untyped-call]
            return self
        self._dispatch = ClassDispatch(self._intercept)
        try:
            for parameter in self._kept.values():
                self._dispatch.watch(parameter)
        except BaseException:
            self._dispatch.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Intercept no further operations."""
        for held in (self._uses, self._results, self._edges):
            held.clear()  # they reference this pass
        if self._dispatch is None:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        else:
            self._dispatch.close()
            self._dispatch = None

    def _intercept(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that reads watched tensors; the expected one goes straight to its step."""
        with torch._C.DisableTorchFunctionSubclass():
            # A backward pass, which has a graph task, runs in threads of its own on accelerators.
            if not torch.is_grad_enabled() or (
                get_ident() != self._thread and torch._C._current_graph_task_id() == -1
            ):
                return func(*args, **(kwargs or {}))
            assert self._dispatch is not None
            if not self._dispatch.owns(types):
                raise UnexpectedPathError(
                    f"{describe(func)} reads a parameter and a tensor of a subclass, unlike in the first batch. "
                    "Expected the same classes of tensors for every batch. Use another gradient computer."
                )
            step = self._expected
            if self._names and func in RULES and not self._in_backward:
                step = self._steps.get(self._use_key(func, args))
            if (
                step is not None
                and func is step.function
                and not (kwargs or self.inside)
                and step.fits(args, self.watched)
            ):
                return self._run_step(step, args)
            if type(func) is MethodWrapperType:  # an attribute, often a shape
                value = func(*args)
                if not isinstance(value, Tensor):
                    return value
            body = None if self.inside else undispatched(func)
            if body is None:
                return self.operation(func, args, kwargs or {})
        return body(*args, **(kwargs or {}))  # its operations are intercepted

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on parameters; detach them if it reads samples, otherwise track its result."""
        if self.inside:
            args, kwargs = tree_map(self._detached, (args, dict(kwargs)))
            return function(*args, **kwargs)
        if self._names and function not in RULES and not _gives_tensors(function, args, kwargs):
            return function(*args, **kwargs)
        site = self._next_site(function, args, kwargs)
        if site is None:
            return self._unplanned(function, args, kwargs)
        if site.batched:
            return self._use(site, function, args, kwargs)
        # Save tensors even inside a checkpoint, which would otherwise recompute its whole part for this gradient.
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            result = function(*args, **kwargs)
        for tensor in differentiable(written(function, args, result)):
            if tensor.requires_grad:
                self._share(function, args, kwargs, tensor)
        return result

    def hide(self, module: nn.Module) -> None:
        """Exclude the module's parameters from autograd during its forward pass."""
        # Code outside torch's operations may read the parameters, so they cannot be detached per operation.
        for parameter in module.parameters():
            parameter.requires_grad_(False)

    def show(self, module: nn.Module) -> None:
        """Undo :meth:`hide`."""
        if not self.inside:
            for parameter in module.parameters():
                parameter.requires_grad_(id(parameter) in self.watched)

    def _detached(self, value: Any) -> Any:
        return value.detach() if id(value) in self.watched else value

    def _another_path(self, function: Any) -> UnsupportedModelError:
        kind = UnsupportedModelError if self._in_backward else UnexpectedPathError
        return kind(
            f"The operations of the model differ from those of the first batch: operation {self._cursor} on the "
            f"parameters is {describe(function)} now. Expected the same operations for every batch. Use another "
            "gradient computer."
        )

    def _unplanned(self, function: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operation outside the plan; raise if its result requires grad (unlike a shape or a detached value)."""
        result = function(*args, **kwargs)
        if any(tensor.requires_grad for tensor in differentiable(written(function, args, result))):
            raise self._another_path(function)
        return result

    def _next_site(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Site | None:
        """Return the plan's site for the current operation, or ``None`` if the plan expects another one."""
        if self._plan.routed:
            return self._site_of_use(function, args, kwargs)
        key = _key(function, args, kwargs)
        if self._in_backward:  # a checkpoint recomputes its part
            if not self._recomputes:
                self._recomputes = True
                self._shared |= {step.key: step.site for step in self._steps.values()}
            return self._shared.get(key)
        sites = self._plan.sites
        if self._cursor >= len(sites) or sites[self._cursor].function != function:
            return None
        site = sites[self._cursor]
        self._cursor += 1
        self._expected = self._steps.get(self._cursor)
        self._shared[key] = site
        return site

    def _site_of_use(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Site:
        """Return the plan's site for this use; a use that is not in the plan (a new expert) gets a routed site."""
        leaves = [leaf for leaf in flattened(args, kwargs)[0] if isinstance(leaf, Tensor)]
        if isinstance(function, nn.Module):
            read = [id(p) for p in function.parameters() if id(p) in self.watched]
            site = Site(function, self._ledger.names_of(read), True, routed=True)
        else:
            read = [id(leaf) for leaf in leaves if id(leaf) in self.watched]
            batched = len(read) < len(leaves)
            dims = tuple(leaf.dim() for leaf in leaves)
            site = Site(function, self._ledger.names_of(read), batched, routed=batched, dims=dims)
        known = self._plan.uses.get(site.use, site)
        reads_samples = any(leaf.requires_grad and id(leaf) not in self.watched for leaf in leaves)
        return site if reads_samples and not known.batched else known

    def _use_key(self, function: Any, args: Sequence[Any]) -> Any:
        """Return the key of a step if rows are routed; with a step's shapes it determines ``Site.use``."""
        names = self._names
        return (function, *[names[id(value)] for value in args if id(value) in names])

    def _share(self, function: Function, args: Any, kwargs: Mapping[str, Any], tensor: Tensor) -> None:
        """Watch a value computed from parameters only."""
        if id(tensor) in self.watched:
            return
        parents = [
            id(leaf)
            for leaf in flattened(args, kwargs)[0]
            if isinstance(leaf, Tensor) and id(leaf) in self.watched
        ]
        self._ledger.share(tensor, parents, is_transpose=_is_transpose(function, args, tensor))
        self.watched[id(tensor)] = tensor
        if self._dispatch is not None:
            self._dispatch.watch(tensor)
        if self._names:
            self._names[id(tensor)] = self._ledger.names_of([id(tensor)])

    def _use(self, site: Site, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation with its parameters detached, and save what their gradients need."""
        leaves, spec = flattened(args, kwargs)
        run = [self._detached(leaf) for leaf in leaves]
        targets = {id(new): old for new, old in zip(run, leaves, strict=True) if new is not old}
        run_args, run_kwargs = rebuilt(run, spec)
        if function in RECURRENT and _is_recurrence(function, run_args):
            return self._run_recurrent(site, function, run_args, targets)
        in_place = is_in_place(function)
        lean = not site.routed and reads_nothing(function, run_args)
        saved = _saved(run, targets, lean, in_place)
        # An operation without a rule runs again in the backward pass with the same random numbers.
        ruled = function in RULES and function not in MAY_DRAW
        before = RandomState.of(run) if not ruled and not self._in_backward else None
        result = function(*run_args, **run_kwargs)
        results = written(function, run_args, result)
        results = self._tapped(results, in_place)
        if not self._in_backward and differentiable(results):
            call = self._call(site, function, saved, spec, targets, lean)
            call.random = before if before is not None and before.has_moved() else None
            call.outputs = (
                tuple(results)
                if isinstance(results, tuple | list) and function is torch.embedding_bag
                else ()
            )
            call.in_place = in_place
            self._catch(site, call, differentiable(results))
            if ruled and not (in_place or kwargs):
                self._bind(site, args, call, results, lean)
        return results if not in_place or result is not None else None

    def _bind(self, site: Site, args: Sequence[Any], call: OperationCall, result: Any, lean: bool) -> None:
        """Keep what later passes over these shapes need of this operation."""
        nested = [leaf for arg in args if isinstance(arg, tuple | list) for leaf in arg]
        if not isinstance(result, Tensor) or any(isinstance(leaf, Tensor) for leaf in nested):
            return
        base = result._base
        covers_base = base is not None and _is_whole_of_new(result, base, call)
        if covers_base and not result.is_contiguous():
            return
        source = base if covers_base and base is not None else result
        if source.output_nr:  # a step reads its node's first output
            return
        key: Any = self._cursor - 1
        if self._names:
            key = self._use_key(site.function, args)
            # The rows of an expert vary in number. A site of its own may be shared by all samples elsewhere.
            if key in self._steps or self._plan.uses.get(site.use, site) is not site:
                return
        layout = row_layout(call, result) if site.routed else None
        inputs = [leaf for leaf in call.args if isinstance(leaf, Tensor) and not call.wants(leaf)]
        self._steps[key] = Step.bound(
            site,
            _key(site.function, args, {}),
            args,
            self.watched,
            [call.axis_of(leaf) for leaf in inputs],
            result,
            call.output_axes,
            lean,
            covers_base,
            self._num_samples,
            0 if layout is None else layout.trailing,
            expected_axis(site, layout, result, self._num_samples),
        )

    def _run_step(self, step: Step, args: Sequence[Any]) -> Any:
        """Run an operation as :meth:`_use` does, given what earlier passes found."""
        if not self._names:
            self._cursor += 1
            self._expected = self._steps.get(self._cursor)
        run = list(args)
        for place in step.targets:
            run[place] = args[place].detach()
        result = step.function(*run)
        if not result.requires_grad:
            result = result + self._tap(result)
        base = result._base
        if result.shape != step.shape or (base is not None) is not step.is_view:
            self._catch(step.site, self._call_of_step(step, args, run), [result])
            return result
        use: _Use
        if step.positions is not None:
            use = _LinearUse(self, step, args)
        else:
            use = _Use(self, step, self._call_of_step(step, args, run), result.dtype)
        for target in {id(args[place]): args[place] for place in step.targets}.values():
            self._ledger.expect(target)
        # Of a view that covers its base and lies in the same order, the base's gradient has the same entries.
        node = (result if base is None or not step.covers_base else base).grad_fn
        assert node is not None
        if self._collects:
            self._uses.append(use)
            self._results.append(result)
            self._edges.append(GradientEdge(node, 0))
        else:
            node.register_prehook(use)  # a tensor's own hook takes three times as long
        return result

    def _call_of_step(self, step: Step, args: Sequence[Any], run: list[Any]) -> OperationCall:
        """Return the call that a step's rule reads; ``run`` are its arguments, with the parameters detached."""
        targets = {id(run[place]): args[place] for place in step.targets}
        axes: dict[int, BatchAxis | None] = {}
        versions = []
        for place, axis in step.inputs:
            leaf = run[place] = None if step.lean else args[place].detach()
            if leaf is not None:
                axes[id(leaf)] = axis
                versions.append((leaf, leaf._version))
        return OperationCall(
            step.function,
            tuple(run),
            {},
            self._num_samples,
            targets,
            axes,
            step.output_axes,
            None,
            self._ledger.keep_factors,
            step.site.sliceable,
            versions=versions,
        )

    def _deposit(
        self, call: OperationCall, grads: Sequence[Tensor | None], tags: RowTags | None = None
    ) -> None:
        """Add the contributions of one operation, whose inputs are then freed."""
        targets = list({id(target): target for target in call.targets.values()}.values())
        method, parts = self._contributions(call, grads, tags)
        call.targets, call.args, call.kwargs, call.versions = {}, (), {}, []
        self._ledger.deposit(targets, parts, method)

    def _call(
        self, site: Site, function: Any, saved: list[Any], spec: Any, targets: dict[int, Tensor], lean: bool
    ) -> OperationCall:
        args, kwargs = rebuilt(saved, spec)
        tensors = iter(site.leaf_axes)
        axes: dict[int, BatchAxis | None] = {}
        if not lean and not site.routed:
            for leaf in saved:
                if isinstance(leaf, Tensor):
                    axes[id(leaf)] = self._fitted(site, next(tensors), leaf.shape)
        call = OperationCall(
            function,
            args,
            kwargs,
            self._num_samples,
            targets,
            axes,
            site.output_axes,
            spec,
            self._ledger.keep_factors,
            site.sliceable,
        )
        call.versions = [
            (leaf, leaf._version) for leaf in saved if isinstance(leaf, Tensor) and id(leaf) not in targets
        ]
        return call

    def _fitted(self, site: Site, axis: BatchAxis | None, shape: Sequence[int]) -> BatchAxis | None:
        """Return the batch axis of a tensor of this shape, or raise if the shape does not match the plan."""
        if axis is None:
            return None
        fitted = axis.for_size(shape[axis.axis], self._num_samples) if axis.axis < len(shape) else None
        if fitted is None:
            raise UnexpectedRowsError(
                f"{describe(site.function)}, which uses {list(site.names)[:3]}, has shape {tuple(shape)} for "
                f"{self._num_samples} samples, expected them on axis {axis.axis}"
                + ". From now on, weighted backward passes find the sample of each row."
            )
        return fitted

    def _tapped(self, results: Any, in_place: bool) -> Any:
        """Add results to autograd's graph if they do not require grad yet."""
        if in_place:
            return results if results.requires_grad else results.add_(self._tap(results))
        if isinstance(results, Tensor):
            tappable = differentiable(results) and not results.requires_grad
            return results + self._tap(results) if tappable else results
        leaves, spec = tree_flatten(results)
        # One result may be computed from another (the states of an LSTM cell); a view receives only its own gradient.
        tapped = [self._tapped(leaf, False) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten(
            [t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t for t in tapped], spec
        )

    def _tap(self, like: Tensor) -> Tensor:
        """Return a zero that requires grad, on this tensor's device; it makes a result part of autograd's graph.

        It has the tensor's dtype, because the self-check trusts float64 results only if no other dtype occurs.
        """
        key = like.device, like.dtype
        if key not in self._taps:
            self._taps[key] = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True)
        return self._taps[key]

    def _catch(self, site: Site, call: OperationCall, outputs: list[Tensor]) -> None:
        """Hook the results; their gradients trigger the rule."""
        layout = row_layout(call, outputs[0]) if site.routed and len(outputs) == 1 else None
        tags = self._new_tags(site, outputs, 0 if layout is None else layout.trailing)
        tags.axis = expected_axis(site, layout, outputs[0], self._num_samples)
        del layout  # it references the arguments, which are freed during the backward pass
        if not site.routed:
            axes = zip(call.output_axes, outputs, strict=True)
            call.output_axes = tuple(self._fitted(site, axis, tensor.shape) for axis, tensor in axes)
        for target in {id(t): t for t in call.targets.values()}.values():
            self._ledger.expect(target)

        def take(grads: Sequence[Tensor | None]) -> None:
            if call.targets:
                self._deposit(call, grads, tags)

        self._on_gradients(outputs, tags, take, call=call)

    def _on_gradients(
        self,
        outputs: Sequence[Tensor],
        tags: RowTags,
        take: Callable[[Sequence[Tensor | None]], None],
        rows: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]] | None = None,
        call: OperationCall | None = None,
    ) -> None:
        """Call ``take`` with the gradients of results; in a weighted pass, store them as tags of their rows.

        Args:
            outputs: The differentiable results of one operation.
            tags: Stores the gradients of the weighted passes.
            take: Called once, with the gradients of the plain pass.
            rows: Converts the gradients of a weighted pass to what is stored; by default, the gradients.
            call: The operation; ``None`` for modules and recurrent layers.
        """

        def arrived(*grads: Tensor | None) -> None:
            if not self._in_backward:
                raise _too_early(tags.site)
            if self._tagging and not tags.site.routed:
                return
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if self._tagging:
                    tags.add(grads if rows is None else rows(grads))
                else:
                    take(grads)

        if len(outputs) == 1:
            _hook(outputs[0], arrived, call)
        else:
            torch.autograd.graph.register_multi_grad_hook(
                [t for t in outputs if t.requires_grad], lambda grads: arrived(*grads), mode="all"
            )

    def _new_tags(self, site: Site, outputs: Sequence[Tensor], trailing: int) -> RowTags:
        """Return the storage for the tags of an operation's rows; it is registered if the site is routed."""
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
                    self._ledger.expect(target)

            tags = self._new_tags(site, [value], 2)

            def rows_of(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
                return [parts(_only(grads))[0].output_grads]  # of the input's part, in (B, T, d)

            def take(grads: Sequence[Tensor | None]) -> None:
                every = parts(_only(grads))
                every = self._summed(every, tags, every[0].output_grads)
                found = [(t, p) for t, p in zip(wanted, every, strict=True) if t is not None]
                self._ledger.deposit([t for t in wanted if t is not None], found, "recurrence")

            self._on_gradients([value], tags, take, rows_of)
            return value

        return run_recurrent(RECURRENT[function], args, num_samples=rows, order=self.packed_order, tap=tap)

    def ruled_module(
        self, module: nn.Module, rule: GradientRule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Hook the result of a module, and apply the module's rule to its gradient."""
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
            self._ledger.expect(parameter)
        tags = self._new_tags(site, [out], out.dim() - 1)

        def take(grads: Sequence[Tensor | None]) -> None:
            grad = _only(grads)
            _refuse_changes(module, versions)
            found = _parts_of(module, own, rule(module, args, kwargs, grad))
            parts = self._summed(list(found.values()), tags, grad)
            deposited = [(own[n], p) for n, p in zip(found, parts, strict=True)]
            self._ledger.deposit(list(own.values()), deposited, f"rule of {class_of(module).__name__}")

        self._on_gradients([out], tags, take)
        return out

    def _summed(self, parts: list[Contribution], tags: RowTags, grad: Tensor) -> list[Contribution]:
        """Sum per-row contributions over the rows of each sample if the site is routed."""
        if not tags.site.routed:
            return parts
        (owner,) = tags.owners([grad], self._code)
        assert owner is not None
        return [summed_by_owner(part, owner, self._num_samples) for part in parts]

    # Backward

    def backward(self, output: Tensor) -> None:
        """Run the backward pass of ``output.sum()``.

        Raises:
            UnsupportedModelError: If the model ran other operations than planned, or one cannot be split by sample.
        """
        if self._cursor != len(self._plan.sites) and not self._plan.routed:
            raise UnexpectedPathError(
                f"The model ran {self._cursor} operations on its parameters, but {len(self._plan.sites)} for the first "
                "batch. Expected the same operations for every batch. Use another gradient computer."
            )
        if output.requires_grad:
            self._in_backward, self._expected = True, None
            inputs = [*self._kept.values(), *self._taps.values()]
            with torch._C.DisableTorchFunction():
                total = output.sum()
                inputs += self._other_leaves(total, inputs)
            self._tag_rows(output, inputs)
            uses, edges = self._collected()
            found = self._run_backward(total, [*inputs, *edges])
            self.escaped = {name: g for name, g in zip(self._kept, found, strict=False) if g is not None}
            _take(uses, list(found[len(inputs) :]))
        self._ledger.finish()

    def _other_leaves(self, total: Tensor, known: Sequence[Tensor]) -> list[Tensor]:
        """Return the other leaves of f's graph: autograd calls hooks only on the way to tensors it is asked for."""
        plan = self._plan
        if self._collects or not plan.has_other_leaves:
            return []
        leaves, plan.runs_own_functions = _graph_of(total)
        asked = set(map(id, known))
        others = [leaf for leaf in leaves if id(leaf) not in asked]
        plan.has_other_leaves = bool(others)
        return others

    def _collected(self) -> tuple[list[_Use], list[GradientEdge]]:
        """Return the steps whose gradients the backward pass returns, and where it finds them.

        A result with a hook of the model has the gradient that this hook returns, which only another hook receives.
        """
        found: tuple[list[_Use], list[GradientEdge]] = [], []
        for use, result, edge in zip(self._uses, self._results, self._edges, strict=True):
            if result._backward_hooks:
                edge.node.register_prehook(use)
            else:
                found[0].append(use)
                found[1].append(edge)
        for held in (self._uses, self._results, self._edges):
            held.clear()
        return found

    def _tag_rows(self, output: Tensor, inputs: list[Tensor]) -> None:
        """Run the weighted backward passes that identify the samples of routed rows."""
        if not self._tags:
            return
        dtypes = [dtype for tags in self._tags for dtype in tags.dtypes]
        self._code = SampleCode.for_gradients(self._num_samples, dtypes)
        self._scales = RowScales(self._code)
        self._tagging = True
        for weights in self._code.weights(output):
            self._run_backward(output, inputs, weights)
        self._tagging = False

    def _run_backward(
        self, total: Tensor, inputs: Sequence[Tensor | GradientEdge], weights: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        with naming_graph_failures():
            return undispatched(torch.autograd.grad)(  # type: ignore[misc, no-any-return]
                total, inputs, weights, retain_graph=weights is not None, allow_unused=True
            )

    def _in_place(
        self, call: OperationCall, grad: Tensor | None, tags: RowTags
    ) -> tuple[str, list[tuple[Tensor, Contribution]]] | None:
        """Return the contributions of a routed operation whose rows are where the plan expects them."""
        if tags.axis is None or grad is None or not tags.are_in_place(grad, self._scales):
            return None
        found = contributions_in_place(call, grad, tags.axis)
        if found is not None:
            tags.passes.clear()
        return found

    def _contributions(
        self, call: OperationCall, grads: Sequence[Tensor | None], tags: RowTags | None
    ) -> tuple[str, list[tuple[Tensor, Contribution]]]:
        """Return the method, and the operation's contribution to each parameter that it read."""
        _refuse_changes(call.function, call.versions)
        if tags is not None and tags.site.routed:
            found_there = self._in_place(call, grads[0], tags)
            method, routed = found_there or routed_contributions(call, grads, tags.owners(grads, self._code))
            for target in call.targets.values():
                self._ledger.note(target, method)  # also to those that no row reaches
            return method, routed
        name, rule = RULES.get(call.function, ("", None))
        parts = rule(call, grads[0]) if rule is not None and grads[0] is not None else None
        found = [
            (call.targets[id(argument)], part)
            for argument, part in (generic_rule(call, grads) if parts is None else parts)
        ]
        return name if parts is not None else f"{call.method} ({describe(call.function)})", found


class _Use:
    """An operation that ran as its step says; it takes the gradient of its result."""

    __slots__ = ("call", "grad_pass", "step", "tags")

    def __init__(self, grad_pass: GradientPass, step: Step, call: OperationCall, dtype: torch.dtype) -> None:
        self.grad_pass, self.step, self.call = grad_pass, step, call
        self.tags = None
        if step.site.routed:
            self.tags = RowTags(step.site, (dtype,), step.trailing, step.row_axis)
            grad_pass._tags.append(self.tags)

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Take the gradient in the backward pass, as a hook of autograd, which disables gradients."""
        if not self.grad_pass._in_backward:
            raise _too_early(self.step.site)
        with torch._C.DisableTorchFunction():
            self.take(grads[0])

    def take(self, grad: Tensor | None) -> None:
        """Deposit the contributions of the operation; in a weighted pass, store the gradient as tags."""
        if grad is None:
            return
        grad_pass, tags = self.grad_pass, self.tags
        if not grad_pass._tagging:
            grad_pass._deposit(self.call, [grad.reshape(self.step.shape)], tags)
        elif tags is not None:
            tags.add([grad.reshape(self.step.shape)])


class _LinearUse(_Use):
    """``x W^T + b``, with its rule: most operations of a transformer are linear."""

    __slots__ = ("args", "version")

    def __init__(self, grad_pass: GradientPass, step: Step, args: Sequence[Any]) -> None:
        self.grad_pass, self.step, self.args = grad_pass, step, args
        self.version = args[0]._version

    def take(self, grad: Tensor | None) -> None:
        args, step = self.args, self.step
        if grad is None or self.grad_pass._tagging or not args:
            return
        self.args = ()  # the inputs are freed with their block
        x, ledger = args[0], self.grad_pass._ledger
        if x._version != self.version:
            _refuse_changes(step.function, [(x, self.version)])
        assert step.positions is not None
        count, length = step.positions
        parts: list[tuple[Tensor, Contribution]] = []
        grads = grad if length == 1 and x.dim() == 2 else grad.reshape(count, length, grad.shape[-1])
        for place in step.targets:
            if place != 1:
                parts.append((args[place], grads if grads.dim() == 2 else grads.sum(1)))
            elif grads.dim() == 2:
                parts.append((args[1], Factors(x.unsqueeze(1), grads.unsqueeze(1))))
            else:
                parts.append((args[1], Factors(x.reshape(count, length, x.shape[-1]), grads)))
        ledger.deposit([target for target, _ in parts], parts, "linear")


def _take(uses: list[_Use], grads: list[Tensor | None]) -> None:
    """Give every step the gradient of its result, the last step first, as autograd calls hooks."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        while grads:
            uses.pop().take(grads.pop())


def _graph_of(total: Tensor) -> tuple[list[Tensor], bool]:
    """Return the leaves of a tensor's graph, and whether it has an ``autograd.Function`` in Python."""
    seen: set[Any] = set()
    waiting: list[Any] = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    leaves = [node.variable for node in seen if hasattr(node, "variable")]
    return leaves, any(isinstance(node, BackwardCFunction) for node in seen)


def _saved(run: list[Any], targets: Mapping[int, Tensor], lean: bool, in_place: bool) -> list[Any]:
    """Return the arguments for the rule: detached, and a copy of one that the operation overwrites."""
    if lean:
        return [leaf if not isinstance(leaf, Tensor) or id(leaf) in targets else None for leaf in run]
    saved = [leaf.detach() if isinstance(leaf, Tensor) and id(leaf) not in targets else leaf for leaf in run]
    if in_place:
        saved[0] = saved[0].clone()
    return saved


def _hook(result: Tensor, arrived: Callable[[Tensor], None], call: OperationCall | None) -> None:
    """Hook the gradient of a result's current value, even if the result is written into later."""
    base = result._base
    if base is None or call is None or not _is_whole_of_new(result, base, call):
        _on_node(result, arrived)
        return
    # A write into a view (`x += y`) replaces its autograd history, so a hook on the view would not be called.
    size, stride = result.size(), result.stride()
    _on_node(base, lambda grad: arrived(grad.contiguous().as_strided(size, stride)))


def _on_node(tensor: Tensor, arrived: Callable[[Tensor], None]) -> None:
    """Call ``arrived`` with the gradient of a tensor after hooks of the model on the tensor have changed it."""
    node, place = tensor.grad_fn, tensor.output_nr
    assert node is not None

    def take(grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[place]
        if grad is not None:
            arrived(grad)

    node.register_prehook(take)


def _is_whole_of_new(result: Tensor, base: Tensor, call: OperationCall) -> bool:
    """Whether a view covers all of a tensor that the operation itself allocated."""
    if not base.is_contiguous() or base.numel() != result.numel():
        return False
    memory = base.untyped_storage().data_ptr()
    read = (leaf for leaf in flattened(call.args, call.kwargs)[0] if isinstance(leaf, Tensor))
    return all(leaf.untyped_storage().data_ptr() != memory for leaf in read)


def _too_early(site: Site) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model itself computes a gradient through {describe(site.function)}, which uses {list(site.names)[:3]}, "
        "before f is known (torch.autograd.grad in the forward pass). This gradient is not a gradient of f. Use "
        "gradient_computer='functional' or 'iterative'."
    )


def _gives_tensors(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a result may hold tensors, unlike the attributes ``shape``, ``dtype`` and ``device``."""
    return getattr(function, "__name__", "") != "__get__" or isinstance(function(*args, **kwargs), Tensor)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _only(grads: Sequence[Tensor | None]) -> Tensor:
    """Return the gradient of an operation's only result."""
    (grad,) = grads
    assert grad is not None
    return grad


def _parts_of(
    module: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor | tuple[Tensor, Tensor]]
) -> dict[str, Contribution]:
    """Return the rule's contributions to the module's kept parameters; raise if one is missing."""
    missing = sorted(set(own) - set(found))
    if missing:
        raise UnsupportedModelError(
            f"The gradient rule of {type(module).__name__} returned no gradient for {missing}. Expected one for every "
            "kept parameter."
        )
    return {
        name: Factors(*part) if isinstance(part, tuple) else part
        for name, part in found.items()
        if name in own
    }


def _num_sequences(args: Sequence[Any]) -> int:
    """Return how many sequences a recurrent operation reads."""
    if isinstance(args[3], list | tuple):  # packed: all sequences are in the first step
        return int(args[1][0])
    return int(args[0].shape[int(not args[-1])])


def _is_transpose(function: Function, args: Any, result: Tensor) -> bool:
    """Whether the result is the transpose of the first argument, a matrix."""
    if function not in _TRANSPOSITIONS or args[0].dim() != 2:
        return False
    axes = [axis % 2 for axis in args[1:] if isinstance(axis, int)]
    return result.dim() == 2 and axes in ([], [0, 1], [1, 0])


def _key(function: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the signature of a call."""
    return function, tuple(_signature(args)), tuple(_signature(tuple(kwargs.values())))


def _signature(values: Any) -> list[Any]:
    """Return the shapes of the tensors, which identify an operation when a checkpoint recomputes it."""
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
            "An LSTM with proj_size reads a packed sequence, whose rows hooks cannot assign to samples. Pad the "
            "sequence, or use another gradient computer."
        )
    return False


def _refuse_changes(function: Any, versions: Sequence[tuple[Tensor, int]]) -> None:
    for tensor, version in versions:
        if tensor._version != version:
            raise UnsupportedModelError(
                f"An input of {describe(function)} was changed in place after the operation read it, so its "
                "gradient cannot be formed. Make the later operation out of place (x = x + y, inplace=False)."
            )
