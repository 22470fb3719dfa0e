"""Per-sample gradients in one forward and one backward pass.

Each operation that reads a kept parameter receives it detached, so that autograd forms no summed weight gradient. A
hook takes the gradient of the operation's result, from which, with the operation's inputs, a rule computes per-sample
gradients. A use of a parameter that is not intercepted gives the parameter an ordinary gradient, which is reported as
escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import (
    Contribution,
    OperationCall,
    flattened,
    is_transpose,
    rebuilt,
    refuse_changes,
)
from trak_lite.gradient_computers.hooks.ledger import GradientLedger
from trak_lite.gradient_computers.hooks.owners import SampleCode
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis
from trak_lite.gradient_computers.hooks.plan.interception import AbstractInterceptor, Function, undispatched
from trak_lite.gradient_computers.hooks.plan.probe import Plan, Site, describe
from trak_lite.gradient_computers.hooks.plan.recorder import RECURRENT, differentiable, is_in_place, written
from trak_lite.gradient_computers.hooks.registry import GradientRule, parts_of
from trak_lite.gradient_computers.hooks.routing import RowTags, routed_contributions, summed_by_sample
from trak_lite.gradient_computers.hooks.rules.generic import generic_rule
from trak_lite.gradient_computers.hooks.rules.operations import MAY_DRAW, RULES, reads_nothing
from trak_lite.gradient_computers.hooks.rules.recurrent import is_recurrence, num_sequences, run_recurrent
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.gradient_computers.randomness import RandomState
from trak_lite.gradient_computers.recording import tensors_of
from trak_lite.gradient_computers.reference import leaves_of_graph, naming_graph_failures
from trak_lite.models.sharded import class_of

ITERATIVE = "Use gradient_computer='iterative', which continues the same store."
"""Remedy for operations that depend on values: ``vmap`` does not follow these either."""
_Parts = list[tuple[Tensor, Contribution]]
_Form = Callable[[Sequence[Tensor | None], RowTags | None], tuple[str, _Parts]]
"""Returns the method and the contributions of one use, from the gradients of its results."""


class UnexpectedRowsError(UnsupportedModelError):
    """A tensor has another number of rows than the plan expects; raised before any block is streamed."""


class UnexpectedPathError(UnsupportedModelError):
    """The forward pass runs other operations than the plan expects; raised before any block is streamed."""


class GradientPass(AbstractInterceptor):
    """Intercepts the uses of kept parameters in one forward pass, and streams blocks during the backward pass.

    Use it as a context manager around both passes, inside :meth:`installed`.
    """

    def __init__(self, plan: Plan, kept: Kept, ledger: GradientLedger) -> None:
        """Prepare a pass; ``kept`` are the parameters of plan and ledger by name, which require grad."""
        super().__init__()
        self.watched = {id(p): p for p in kept.values()}
        self.escaped: dict[str, Tensor] = {}
        """Ordinary gradients of parameters from uses that were not intercepted, by name; set by :meth:`backward`."""
        self._plan, self._kept, self._ledger = plan, kept, ledger
        self._num_samples = ledger.num_samples
        self._cursor = 0
        """Position in the plan of the next operation, unless rows are routed."""
        self._in_backward = self._tagging = False
        self._code = SampleCode(ledger.num_samples)
        self._tags: list[RowTags] = []
        self._taps: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    # Forward

    def model_runs(self, by: int, *_: Any) -> None:
        """Start or stop the interception with the model, if nothing else reads parameters."""
        before, self.depth = self.depth, self.depth + by
        if self._plan.only_in_model and not (before and self.depth):
            self.__exit__(None, None, None) if before else self.__enter__()  # type: ignore[no-untyped-call]

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on parameters; detach them if it reads samples, otherwise track its result."""
        if self.inside:
            watched = self.watched
            args, kwargs = tree_map(lambda v: v.detach() if id(v) in watched else v, (args, dict(kwargs)))
            return function(*args, **kwargs)
        if type(function) is MethodWrapperType:  # an attribute, often a shape
            value = function(*args)
            if not isinstance(value, Tensor):
                return value
        if "input" in kwargs and is_in_place(function):  # what it overwrites is the first of the leaves
            args, kwargs = (kwargs["input"],), {key: kwargs[key] for key in kwargs if key != "input"}
        leaves, spec = flattened(args, kwargs)
        site = self._next_site(function, leaves)
        if site is not None and site.batched:
            return self._use(site, function, leaves, spec)
        if site is None:
            result = function(*args, **kwargs)  # a shape, a detached value
            if any(tensor.requires_grad for tensor in differentiable(written(function, args, result))):
                raise self._another_path(function)
            return result
        # Save tensors even inside a checkpoint, which would otherwise recompute its whole part for this gradient.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            result = function(*args, **kwargs)
        for tensor in differentiable(written(function, args, result)):
            again = is_in_place(function) and not tensor.is_leaf  # not requires_grad_ of a parameter
            if tensor.requires_grad and (id(tensor) not in self.watched or again):
                parents = [id(leaf) for leaf in leaves if id(leaf) in self.watched]
                self._ledger.share(tensor, parents, is_transpose=is_transpose(function, args, kwargs, tensor))
                self.watched[id(tensor)] = tensor
        return result

    def hide(self, module: nn.Module, hidden: bool) -> None:
        """Exclude the module's parameters from autograd during its forward pass."""
        # Code outside torch's operations may read the parameters, so they cannot be detached per operation.
        for parameter in module.parameters():
            parameter.requires_grad_(not hidden and id(parameter) in self.watched)

    def _another_path(self, function: Any) -> UnsupportedModelError:
        kind = UnsupportedModelError if self._in_backward else UnexpectedPathError
        return kind(
            f"The operations of the model differ from those of the first batch: operation {self._cursor} on the "
            f"parameters is {describe(function)} now. Expected the same operations for every batch. {ITERATIVE}"
        )

    def _next_site(self, function: Any, leaves: Sequence[Any]) -> Site | None:
        """Return the plan's site for the current operation, or ``None`` if the plan expects another one."""
        if self._plan.routed or self._in_backward:
            return self._site_of_use(function, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        sites = self._plan.sites
        if self._cursor >= len(sites) or sites[self._cursor].function != function:
            return None
        self._cursor += 1
        return sites[self._cursor - 1]

    def _site_of_use(self, function: Any, tensors: Sequence[Tensor]) -> Site | None:
        """Return the plan's site of a use in no fixed order: rows are routed, or a checkpoint recomputes its part.

        If rows are routed, a use that is not in the plan (a new expert) gets a routed site.
        """
        if isinstance(function, nn.Module):
            read = [id(p) for p in function.parameters() if id(p) in self.watched]
            site = Site(function, self._ledger.names_of(read), True, routed=True)
        else:
            read = [id(leaf) for leaf in tensors if id(leaf) in self.watched]
            batched = len(read) < len(tensors)
            dims = tuple(leaf.dim() for leaf in tensors)
            site = Site(function, self._ledger.names_of(read), batched, routed=batched, dims=dims)
        sites = self._plan.uses.get(site.use, [])
        if self._plan.routed:
            planned_site = next(iter(sites), site)
            reads_samples = any(leaf.requires_grad and id(leaf) not in self.watched for leaf in tensors)
            return site if reads_samples and not planned_site.batched else planned_site
        # The same use may be one of samples and one of what all samples share: their sizes differ.
        fitting = [s for s in sites if s.batched and s.fits(tensors, self._num_samples)]
        return next(iter(fitting or sites), None)

    def _use(self, site: Site, function: Function, leaves: list[Any], spec: Any) -> Any:
        """Run an operation with its parameters detached, and save what their gradients need."""
        watched = self.watched
        run = [leaf.detach() if id(leaf) in watched else leaf for leaf in leaves]
        targets = {id(new): old for new, old in zip(run, leaves, strict=True) if new is not old}
        args, kwargs = rebuilt(run, spec)
        if function in RECURRENT and is_recurrence(RECURRENT[function], args):
            return self._run_recurrent(site, function, args, targets)
        in_place = is_in_place(function)
        lean = not site.routed and reads_nothing(function, args)
        saved = _saved(run, targets, lean, in_place)
        # An operation without a rule runs again in the backward pass with the same random numbers.
        ruled = function in RULES and function not in MAY_DRAW
        before = None if ruled or self._in_backward else RandomState.of(run)
        result = function(*args, **kwargs)
        results = self._tapped(written(function, args, result), in_place)
        outputs = differentiable(results)
        if outputs and not self._in_backward:
            tensors = [leaf for leaf in saved if isinstance(leaf, Tensor)]
            axes: Sequence[BatchAxis | None] = ()
            output_axes = site.output_axes
            if not site.routed:
                if not lean:
                    axes = _fitted(site, site.leaf_axes, [leaf.shape for leaf in tensors], self._num_samples)
                output_axes = _fitted(site, output_axes, [t.shape for t in outputs], self._num_samples)
            call = OperationCall(
                *(function, *rebuilt(saved, spec), self._num_samples, targets),
                axes=dict(zip(map(id, tensors), axes, strict=False)),
                output_axes=output_axes,
                keep_factors=self._ledger.keep_factors,
                sliceable=site.sliceable,
                outputs=tuple(results) if function is torch.embedding_bag else (),
                random=before if before is not None and before.has_moved() else None,
                versions=[(leaf, leaf._version) for leaf in tensors if id(leaf) not in targets],
            )
            self._catch(site, outputs, targets.values(), partial(self._contributions, call), call=call)
        return results if not in_place or result is not None else None

    def _tapped(self, results: Any, in_place: bool) -> Any:
        """Add results to autograd's graph if they do not require grad yet."""
        if isinstance(results, Tensor):
            if results.requires_grad or not (in_place or differentiable(results)):
                return results
            # The tap has the dtype of the result: the self-check trusts float64 only if no other dtype occurs.
            key = results.device, results.dtype
            if key not in self._taps:
                self._taps[key] = torch.zeros((), dtype=key[1], device=key[0], requires_grad=True)
            return results.add_(self._taps[key]) if in_place else results + self._taps[key]
        leaves, spec = tree_flatten(results)
        # One result may be computed from another (the states of an LSTM cell); a view receives only its own gradient.
        tapped = [self._tapped(leaf, False) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten(
            [t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t for t in tapped], spec
        )

    def _catch(
        self,
        site: Site,
        outputs: Sequence[Tensor],
        targets: Iterable[Tensor],
        form: _Form,
        *,
        call: OperationCall | None = None,
        trailing: int = 0,
        tagged: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Count a use of parameters, and deposit its contributions when the gradients of its results arrive.

        ``form`` is called once, with the gradients of the plain backward pass; what it holds is freed then. Of a module
        or a recurrent layer, which is no ``call``, a row of the result has ``trailing`` axes. ``tagged`` converts the
        gradient of a weighted pass to what identifies rows.
        """
        tags: RowTags | None = None
        if site.routed:
            tags = RowTags.of(site, outputs, call, trailing, self._num_samples)
            self._tags.append(tags)
        unique = list({id(target): target for target in targets}.values())
        for target in unique:
            self._ledger.expect(target)
        waiting = [form]

        def arrived(grads: Sequence[Tensor | None]) -> None:
            if not self._in_backward:
                raise UnsupportedModelError(
                    f"The model itself computes a gradient through {describe(site.function)}, which uses "
                    f"{list(site.names)[:3]}, before f is known (torch.autograd.grad in the forward pass). This "
                    "gradient is not a gradient of f. Use gradient_computer='functional' or 'iterative'."
                )
            with torch._C.DisableTorchFunction():
                if self._tagging:
                    if tags is not None:
                        tags.add(grads if tagged is None else [tagged(_only(grads))])
                elif waiting:
                    method, parts = waiting.pop()(grads, tags)
                    self._ledger.deposit(unique, parts, method)

        _on_gradients(outputs, arrived, call)

    def _run_recurrent(
        self, site: Site, function: Any, args: Sequence[Any], targets: Mapping[int, Tensor]
    ) -> Any:
        rows = num_sequences(args)
        if not site.routed:
            _fitted(site, [BatchAxis(0)], [(rows,)], self._num_samples)

        def tap(value: Tensor, weights: Sequence[Any], parts: Callable[[Tensor], list[Any]]) -> Tensor:
            value = self._tapped(value, False)
            if self._in_backward:
                return value
            wanted = [targets.get(id(weight)) for weight in weights]

            def form(grads: Sequence[Tensor | None], tags: RowTags | None) -> tuple[str, _Parts]:
                rows = parts(_only(grads))
                every = summed_by_sample(rows, rows[0].output_grads, tags, self._code)
                return "recurrence", [(t, p) for t, p in zip(wanted, every, strict=True) if t is not None]

            read = [target for target in wanted if target is not None]
            # The rows of the input's part, in (B, T, d).
            self._catch(
                site, [value], read, form, trailing=2, tagged=lambda grad: parts(grad)[0].output_grads
            )
            return value

        return run_recurrent(RECURRENT[function], args, order=self.packed_order, tap=tap)

    def ruled_module(
        self, module: nn.Module, rule: GradientRule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Hook the result of a module, and apply the module's rule to its gradient."""
        parameters = {name: p for name, p in module.named_parameters() if id(p) in self.watched}
        if not parameters:
            return out
        site = self._next_site(module, [])
        if site is None:
            raise self._another_path(module)
        if not site.routed:
            _fitted(site, site.output_axes, [out.shape], self._num_samples)
        out = self._tapped(out, False)
        if self._in_backward:
            return out
        args, kwargs = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, (args, kwargs))
        versions = [(tensor, tensor._version) for tensor in tensors_of((args, kwargs))]

        def form(grads: Sequence[Tensor | None], tags: RowTags | None) -> tuple[str, _Parts]:
            refuse_changes(module, versions)
            grad = _only(grads)
            by_name = parts_of(module, parameters, rule(module, args, kwargs, grad))
            parts = summed_by_sample(list(by_name.values()), grad, tags, self._code)
            deposited: _Parts = [(parameters[name], part) for name, part in zip(by_name, parts, strict=True)]
            return f"rule of {class_of(module).__name__}", deposited

        self._catch(site, [out], parameters.values(), form, trailing=out.dim() - 1)
        return out

    # Backward

    def backward(self, output: Tensor) -> None:
        """Run the backward pass of ``output.sum()``."""
        if self._cursor != len(self._plan.sites) and not self._plan.routed:
            raise UnexpectedPathError(
                f"The model ran {self._cursor} operations on its parameters, but {len(self._plan.sites)} for the first "
                f"batch. Expected the same operations for every batch. {ITERATIVE}"
            )
        if output.requires_grad:
            self._in_backward = True
            inputs = [*self._kept.values(), *self._taps.values()]
            with torch._C.DisableTorchFunction():
                total = output.sum()
                if self._plan.has_other_leaves:
                    # Autograd calls hooks only on the way to tensors that it is asked for.
                    asked = set(map(id, inputs))
                    others = [leaf for leaf in leaves_of_graph(total) if id(leaf) not in asked]
                    self._plan.has_other_leaves = bool(others)
                    inputs += others
            if self._tags:  # weighted passes identify the samples of routed rows
                dtypes = [dtype for tags in self._tags for dtype in tags.dtypes]
                self._code = SampleCode.for_gradients(self._num_samples, dtypes)
                self._tagging = True
                for weights in self._code.weights(output):
                    _run_backward(output, inputs, weights)
                self._tagging = False
            grads = _run_backward(total, inputs)
            self.escaped = {name: g for name, g in zip(self._kept, grads, strict=False) if g is not None}
        self._ledger.finish()

    def _contributions(
        self, call: OperationCall, grads: Sequence[Tensor | None], tags: RowTags | None
    ) -> tuple[str, _Parts]:
        """Return the method, and the operation's contribution to each parameter that it read."""
        refuse_changes(call.function, call.versions)
        if tags is not None:
            method, parts = routed_contributions(call, grads, tags, self._code)
            for target in call.targets.values():
                self._ledger.note(target, method)  # also to those that no row reaches
            return method, parts
        method, rule = RULES.get(call.function, ("", None))
        pairs = list(rule(call, grads[0])) if rule is not None and grads[0] is not None else []
        if not pairs:
            method, pairs = generic_rule(call, grads)
            method += f" ({describe(call.function)})"
        return method, [(call.targets[id(argument)], part) for argument, part in pairs]


def _on_gradients(
    outputs: Sequence[Tensor], arrived: Callable[[Sequence[Tensor | None]], None], call: OperationCall | None
) -> None:
    """Call ``arrived`` with the gradients of results after the model's hooks; it may write into the results later."""
    if len(outputs) > 1:
        torch.autograd.graph.register_multi_grad_hook(
            [tensor for tensor in outputs if tensor.requires_grad], arrived, mode="all"
        )
        return
    (result,) = outputs
    base = result._base
    strides: tuple[torch.Size, tuple[int, ...]] | None = None
    if base is not None and call is not None and _is_whole_of_new(result, base, call):
        # A write into a view (`x += y`) replaces its autograd history, so a hook on the view would not be called.
        strides = result.size(), result.stride()
        result = base
    node, output_nr = result.grad_fn, result.output_nr
    assert node is not None

    def take(grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[output_nr]
        if grad is not None:
            arrived((grad if strides is None else grad.contiguous().as_strided(*strides),))

    node.register_prehook(take)  # a tensor's own hook takes three times as long


def _is_whole_of_new(result: Tensor, base: Tensor, call: OperationCall) -> bool:
    """Whether a view covers all of a tensor that the operation itself allocated."""
    if not base.is_contiguous() or base.numel() != result.numel():
        return False
    memory = base.untyped_storage().data_ptr()
    read = (leaf for leaf in flattened(call.args, call.kwargs)[0] if isinstance(leaf, Tensor))
    return all(leaf.untyped_storage().data_ptr() != memory for leaf in read)


def _run_backward(
    total: Tensor, inputs: Sequence[Tensor], weights: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    with naming_graph_failures():
        return undispatched(torch.autograd.grad)(  # type: ignore[misc, no-any-return]
            total, inputs, weights, retain_graph=weights is not None, allow_unused=True
        )


def _fitted(
    site: Site, axes: Sequence[BatchAxis | None], shapes: Sequence[Sequence[int]], count: int
) -> tuple[BatchAxis | None, ...]:
    """Return the batch axes of tensors in a batch of this size; raise if a shape does not match the plan."""
    fitted = []
    for axis, shape in zip(axes, shapes, strict=True):
        fitted_axis = None if axis is None else axis.for_shape(shape, count)
        if axis is not None and fitted_axis is None:
            raise UnexpectedRowsError(
                f"{describe(site.function)}, which uses {list(site.names)[:3]}, has shape {tuple(shape)} for "
                f"{count} samples, expected them on axis {axis.axis}. From now on, weighted backward passes find the "
                "sample of each row."
            )
        fitted.append(fitted_axis)
    return tuple(fitted)


def _saved(run: list[Any], targets: Mapping[int, Tensor], lean: bool, in_place: bool) -> list[Any]:
    """Return the arguments for the rule: detached, and a copy of one that the operation overwrites."""
    if lean:
        return [leaf if not isinstance(leaf, Tensor) or id(leaf) in targets else None for leaf in run]
    saved = [leaf.detach() if isinstance(leaf, Tensor) and id(leaf) not in targets else leaf for leaf in run]
    if in_place:
        saved[0] = saved[0].clone()
    return saved


def _only(grads: Sequence[Tensor | None]) -> Tensor:
    """Return the gradient of an operation's only result."""
    (grad,) = grads
    assert grad is not None
    return grad
