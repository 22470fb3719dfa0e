"""Per-sample gradients at about the cost of one backward pass.

Source: Goodfellow, "Efficient Per-Example Gradient Computations" (arXiv:1510.01799), captures each layer's input and
output gradient; this module captures those of operations instead of modules.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from trak_lite.core.devices import Float32Products
from trak_lite.data.batches import batch_size, take_rows
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    UnsupportedModelError,
    refuse_machine_failure,
    summary,
)
from trak_lite.gradient_computers.comparison import compare
from trak_lite.gradient_computers.hooks.engine import GradientPass, UnexpectedPathError, UnexpectedRowsError
from trak_lite.gradient_computers.hooks.ledger import GradientLedger
from trak_lite.gradient_computers.hooks.plan.probe import Plan, make_plan, sample_on_path
from trak_lite.gradient_computers.parameters import (
    Kept,
    differentiating_only,
    select_parameters,
)
from trak_lite.gradient_computers.randomness import depends_on_batch, outputs_of, refusal_of_mixing
from trak_lite.gradient_computers.reach import Coverage, ParameterCoverage
from trak_lite.gradient_computers.reference import WRONG_ALONE, SeenDtypes
from trak_lite.gradient_computers.replays import Replays
from trak_lite.gradient_computers.samples import Samples
from trak_lite.gradient_computers.self_check import SelfCheckError, draws_masks
from trak_lite.gradient_computers.streaming import AbstractStreamingComputer, joined_terms, refuse_detached
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.models.sharded import ShardedModel, is_sharded, reshard
from trak_lite.models.tree import ModelTree
from trak_lite.types import Batch, BlockSink, OutputTerms, ParameterChoice

logger = logging.getLogger(__name__)

_MAX_PLANS = 256
"""Largest number of cached plans; each batch structure, such as a sequence length, has a plan."""
_MAX_PATHS = 8
"""Largest number of further plans of one structure, for a model that chooses operations by values."""


class _Part(NamedTuple):
    """Samples that go through the model in one pass."""

    batch: Batch
    kept: Kept
    """The tensors that operations read, by the names of the kept parameters."""
    sink: BlockSink
    start: int
    """Row in the whole batch of the first sample."""


class HookGradientComputer(AbstractStreamingComputer):
    """Per-sample gradients by hooks on the operations that read parameters: one forward and one backward pass.

    The model may be in train or eval mode; no module is wrapped, and all hooks are removed after a pass. Blocks reach
    the sink during the backward pass; those of linear and convolution weights stay factored. The first batch of every
    structure (shapes without the sample axis, dtypes, and flags beside the tensors) is probed to find each tensor's
    sample axis. A kept parameter that f does not depend on has gradient zero, and :meth:`explain` lists it.

    The self-check is that of :class:`AbstractStreamingComputer`, with two additions. If samples are flattened into one
    axis, or the forward pass reads values in Python, one sample of every batch is compared. If the forward pass reads
    values, all samples of the first batch of every size are compared.

    If rows are selected, sorted or moved by values (routed experts, masks, sorted or ragged samples), additional
    backward passes find the sample of every row: one per factor of 64 in the batch size. Rows that mix samples are
    refused. On the schedule of the self-check, f of a batch is compared with f of its two halves, since an expert with
    a capacity drops samples of some batches: if a float64 copy of the model, which decides, fits, and no module is in
    train mode. An index into an axis that does not grow with the batch (a label's logit, the last token) needs none of
    this.

    In :meth:`run`, which the package's own loops use, the torch operations of a batch are recorded and replayed for
    later ones of the same shape, if enough batches follow for this to save time. The first replay is compared bit by
    bit with the pass; later ones are compared in the batches of the self-check, in every 8th if samples are flattened
    into one axis or the forward pass reads values, and at the end. At most 64 recordings, which hold about 256 MiB, are
    kept. Models with hooks, random numbers, or Python state that a pass changes are not replayed; the log says why
    (level INFO).

    The model runs more than once per batch: two to four times more for a new structure, and once for every compared
    sample. State that its forward pass writes in eval mode (a counter, the table of an embedding with ``max_norm``) is
    written each time; in train mode buffers are restored.

    If a batch runs other operations than the first one because the forward pass reads ``all`` or ``any`` of a tensor (a
    mask that is left out if no sample is padded), it is planned again from one of its samples. If it reads other
    values, such a batch is refused.

    If the model is sharded by FSDP2 (``fully_shard``), every rank that holds a shard must call each method equally
    often, each with its own samples. The self-check does not run, because its reference is a gradient as large as the
    model; check a small model of the same kind that is not sharded. Routed rows are refused for a sharded model.
    """

    runs_sharded: ClassVar[bool] = True
    advice: ClassVar[str] = (
        "The model may mix samples, or be random. Use gradient_computer='functional' or 'iterative'."
    )

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        grad_wrt: ParameterChoice | None = None,
        *,
        chunk_size: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        float32_products: Float32Products = "ieee",
        strict: bool | None = None,
        self_check: bool = True,
        keep_factors: bool = False,
    ) -> None:
        """Store the settings; the arguments are those of :class:`AbstractStreamingComputer`, and two more.

        ``strict=True`` raises for every kept parameter without a per-sample gradient. ``False`` sets its gradient to
        zero, and :meth:`explain` reports it. ``None`` raises if f depends on the parameter in a way that hooks cannot
        split by sample, and sets it to zero if f does not depend on it (an unused layer). A parameter that a routed
        batch does not reach (an expert without rows) is zero in all three cases.

        ``keep_factors=True`` streams a convolution's inputs and output gradients as factors even if its gradients have
        fewer entries. Slower.
        """
        super().__init__(
            *(model, task, grad_dim, dtype, device, grad_wrt),
            chunk_size=chunk_size,
            autocast_dtype=autocast_dtype,
            float32_products=float32_products,
            self_check=self_check,
        )
        self.strict, self.keep_factors = strict, keep_factors
        self._plans: dict[Any, Plan] = {}
        self._paths: dict[Any, Any] = {}
        """By structure, the key of the plan that the last batch ran with."""
        self._replays = Replays() if type(self) is HookGradientComputer else None
        self._sharded: ShardedModel | None = None
        """The model's shards; set in the first pass of a sharded model."""

    def load_model_params(self, model: nn.Module) -> None:
        """Differentiate this model's parameters from now on; values are looked up at every call."""
        super().load_model_params(model)
        self._replays = self._replays and Replays()
        self._plans.clear()  # a plan depends on the weights: zero weights hide which sample a row belongs to
        self._paths.clear()
        self._sharded = None

    def advice_for(self, batch: Batch) -> str:
        """Return the end of the message of a failed self-check; see the base class."""
        if batch_size(batch) > 1:
            return refusal_of_mixing(self.model) if depends_on_batch(self, batch) else self.advice
        return f"{WRONG_ALONE}, use other batch sizes, which leave no row alone, or gradient_computer='functional'."

    def repeated(self, batch: Batch, positions: Sequence[int]) -> Iterator[tuple[Self, Batch, list[int]]]:
        """Yield one computer without self-check for the whole batch, because its samples may be mixed."""
        yield self._unchecked(), batch, list(positions)

    def enough_for(self, batch: Batch, positions: Sequence[int]) -> tuple[Batch, list[int]]:
        """Return a part with these samples, and their places in it, if they do not depend on the other samples."""
        count = batch_size(batch)
        if count > len(positions):
            # A sample alone could not show that it depends on another one.
            rows = [*([(positions[0] + 1) % count] if len(positions) == 1 else []), *positions]
            part = take_rows(batch, rows)
            try:
                with SeenDtypes() as mode:
                    whole, part_outputs = outputs_of(self, [batch])[rows], outputs_of(self, [part])
            except MODEL_FAILURES as error:  # of a model for batches of one size
                refuse_machine_failure(error)
            else:
                # Mixing of inputs is seen by f alone: hooks follow what depends on parameters.
                rounding = max(torch.finfo(dtype).eps for dtype in mode.dtypes)
                most = 64 * rounding * float(whole.abs().max())
                if rounding <= torch.finfo(torch.float32).eps and (whole - part_outputs).abs().max() <= most:
                    return part, list(range(len(rows) - len(positions), len(rows)))
        return batch, list(positions)

    def _unchecked(self) -> Self:
        again = super()._unchecked()
        again._plans, again._paths = {}, {}
        return again

    def structure(self, batch: Batch) -> tuple[Any, int]:
        """Return the key of the checks of such a batch, and the most batches from one compared to the next.

        The number is 0 if other batches may run the same operations on rows of other samples.
        """
        structure = self._structure(batch, select_parameters(self.model, self.grad_wrt))
        key = self._paths.get(structure, structure)
        plan = self._plans.get(key)
        if plan is None or plan.routed or self._sharded is not None:
            return key, 0
        return self.checks.key(key), 8 if plan.flattened or plan.chooses_in_python else 64

    def _stream_samples(self, batch: Batch, count: int, kept: Kept, sink: BlockSink) -> OutputTerms:
        if names := [name for name, p in kept.items() if p.is_complex()]:
            raise UnsupportedModelError(
                f"{names[:5]} are complex, but gradient rules need real parameters. Use two real parameters with "
                "torch.view_as_complex."
            )
        with self._refusing(batch), self._prepared(kept) as read:
            structure = self._structure(batch, kept)
            self.checks.refuse_failed(structure)
            key = self._paths.get(structure, structure)
            plan = self._planned(key, read, batch)
            terms = []
            for rows in self._chunks(count):
                part = _Part(take_rows(batch, rows), read, sink, rows.start)
                try:
                    terms.append(self._checked_run(key, plan, part))
                except UnexpectedPathError as error:
                    # Otherwise a path may depend on sums over samples.
                    if self._sharded is not None or not (
                        plan.chooses_in_python and plan.reads_only_quantifiers
                    ):
                        raise
                    _put(self._plans, key, plan)
                    key, plan, part_terms = self._run_on_other_path(error, structure, key, part)
                    terms.append(part_terms)
            _put(self._plans, key, plan)
            _put(self._paths, structure, key)
        return joined_terms(terms)

    _stream_checked = _stream_samples  # it compares chunk by chunk

    def _planned(self, key: Any, read: Kept, batch: Batch) -> Plan:
        plan = self._plans.pop(key, None)
        if plan is None:
            self.checks.forget(key)
        if self._sharded is not None and self._sharded.lockstep.any(plan is None):
            # Also if this rank has a plan: other ranks need the collective passes.
            made = self._plan_in_step(self._sharded, read, batch)
            return plan or made
        return plan or make_plan(self.model, read, batch, self._output)

    def _run_on_other_path(
        self, error: UnexpectedPathError, structure: Any, failed: Any, part: _Part
    ) -> tuple[Any, Plan, OutputTerms]:
        """Run a batch with the plan of a sample on its path; raise ``error`` if no sample alone takes this path.

        The plan of every path is checked like that of a new structure. Returns its key, the plan, and f, q and w.
        """
        for number in range(_MAX_PATHS + 1):
            key = (number, *structure) if number else structure
            if key == failed or (number == 0 and key not in self._plans):
                continue
            stored = plan = self._plans.pop(key, None)
            if plan is None:
                row = sample_on_path(self.model, part.kept, part.batch, self._output)
                if row is None:
                    break
                self.checks.forget(key)
                plan = make_plan(self.model, part.kept, take_rows(part.batch, [row]), self._output)
            try:
                return key, plan, self._checked_run(key, plan, part)
            except UnexpectedPathError:
                if stored is None:
                    raise
                _put(self._plans, key, stored)
        raise error

    def _plan_in_step(self, sharded: ShardedModel, read: Kept, batch: Batch) -> Plan:
        """Make a plan on all ranks at once; raise on all of them if one rank refuses its samples."""
        plan, refusal = Plan(), None
        with torch.no_grad():
            self._output(take_rows(batch, [0]))  # not recorded: FSDP2 initialises in its first pass
        try:
            plan = make_plan(self.model, read, batch, self._output, may_repeat=False)
            plan.only_in_model = False  # hooks of FSDP2 run parts of the model before and after it
            if plan.routed:
                refusal = UnsupportedModelError(
                    "The model is sharded, and selects, sorts or moves rows depending on values, which hooks support "
                    "only for a model that is not sharded. Use a whole model on one device."
                )
        except UnsupportedModelError as error:
            refusal = error
        if sharded.lockstep.any(refusal is not None):
            raise refusal or UnsupportedModelError(
                "The samples of another rank were refused. See the error of that rank, and pass valid samples on all "
                "ranks."
            )
        return plan

    def explain(self, batch: Batch) -> Coverage:
        """Return how each kept parameter's gradient is computed; ``print`` the result for a table.

        Args:
            batch: At least one sample; two are used, and compared with plain autograd by the self-check.

        Raises:
            InvalidInputError: If the batch is empty, or it or the output function's result has the wrong form.
        """
        kept = select_parameters(self.model, self.grad_wrt)
        if not batch_size(batch):
            raise InvalidInputError("The batch is empty. Pass at least one sample.")
        again = self._unchecked()
        again.self_check, again.strict, again._is_repeatable = self.self_check, False, True
        try:
            again._stream(take_rows(batch, [0, min(1, batch_size(batch) - 1)]), lambda _: None)
        except UnsupportedModelError as error:
            return Coverage(tuple(ParameterCoverage(name, "refused", str(error)) for name in kept))
        (*_, plan) = again._plans.values()
        unread = "no row of these samples reaches it, or f" if plan.routed else "f"
        hidden = "read by something that is not an operation of torch"
        if self.strict is False:
            hidden += ": its rows are zero, as strict=False asks for"

        def line(name: str) -> ParameterCoverage:
            methods = plan.methods[name]
            if name in plan.escaped:
                return ParameterCoverage(name, "refused", hidden)
            if not methods:
                return ParameterCoverage(name, "zero", f"{unread} does not depend on it")
            runs_again = any("operation" in method for method in methods)
            return ParameterCoverage(name, "fallback" if runs_again else "rule", "; ".join(methods))

        return Coverage(tuple(map(line, kept)))

    def _message(self, error: BaseException) -> str:
        return (
            f"Hooks cannot follow {type(self.model).__name__} ({summary(error)}). The model itself "
            "runs. Use gradient_computer='functional' or 'iterative'."
        )

    @contextmanager
    def _prepared(self, kept: Kept) -> Iterator[Kept]:
        """Let only the kept parameters require grad, and yield what operations read: these, or gathered shards."""
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # without this import, nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            tree = self._tree or ModelTree(self.model)
            stack.enter_context(differentiating_only(tree.parameters.values(), kept))
            stack.enter_context(torch.enable_grad())
            if self._sharded is None and is_sharded(tree):
                if self.chunk_size is not None:
                    raise UnsupportedModelError(
                        f"chunk_size={self.chunk_size} is not supported for a sharded model, because all its ranks "
                        "make one pass per batch. Leave chunk_size out, and use a smaller batch_size."
                    )
                self._sharded = ShardedModel(self.model)
            yield kept if self._sharded is None else self._sharded.gathered(kept)

    def _output(self, batch: Batch) -> Tensor:
        reshard(self._tree or self.model)  # otherwise a pass would depend on the previous one
        return self.terms(batch).output

    def _refuse_hidden(self, plan: Plan, kept: Kept) -> None:
        """Raise for parameters without a per-sample gradient, according to ``strict``."""
        if plan.escaped and self.strict is not False:
            raise UnsupportedModelError(
                f"f depends on {list(plan.escaped)[:5]} through operations that hooks cannot see: an "
                "autograd.Function, a scripted module, a transform of torch.func or other code that does not use torch "
                "operations reads them, the model keeps a tensor of an earlier pass (a state that is not reset), or "
                "the output function reads them in some batches only. Register a gradient rule for the module "
                "(register_gradient_rule), use gradient_computer='functional' or 'iterative', or pass strict=False to "
                "leave that part out."
            )
        unread = [name for name in kept if not plan.methods[name] and name not in plan.escaped]
        if self.strict and unread and not plan.routed:
            raise UnsupportedModelError(
                f"f depends on no operation that reads {unread[:5]}, so they have no gradient. strict=True expects one "
                "for every kept parameter. Leave them out of grad_wrt, or pass strict=False to use zeros for them."
            )

    def _checked_run(self, key: Any, plan: Plan, part: _Part) -> OutputTerms:
        """Run a pass; if a check is due, compare some samples, with one plain backward pass each."""
        structure, size, kept = key, batch_size(part.batch), part.kept
        key = self.checks.key(structure)
        in_python = plan.chooses_in_python  # a branch may depend on any sample of the batch
        positions: list[int] = []
        if self.self_check and self._sharded is None and not draws_masks(self._tree or ModelTree(self.model)):
            # Flags of this batch alone may choose operations.
            often = plan.flattened or in_python or key != structure
            positions = self.checks.positions(key, size, kept, always=often, whole=in_python)
        samples = Samples(positions, kept, part.start)
        is_due, is_first = self.checks.is_due(key, size), self.checks.is_first(key, size)
        with self.checks.batch(key, size, positions, confirms=is_due or not plan.may_mix):
            terms = self._run(plan, part, samples.passing(part.sink))
            if not terms.output.requires_grad:
                refuse_detached(self.model, self.modelout_fn, part.batch, kept)
            hooked = {name: p for name, p in kept.items() if name not in plan.escaped}
            if hooked and positions:
                # Without torch.compile, functions inside an operator have no gradient of the tensors that they capture.
                with torch.compiler.set_stance("default") if plan.runs_functions else nullcontext():
                    whole = plan.may_mix or plan.flattened
                    compare(self, part.batch, hooked, samples, list(plan.dtypes), needs_whole=whole)
            if positions and (is_due if plan.may_mix else is_first):
                self._compare_halves(part.batch, together=terms.output.detach())
        self._refuse_hidden(plan, kept)
        return OutputTerms(*(term.detach() for term in terms))

    def look_at_halves(self, batch: Batch) -> None:
        """Refuse a model whose f of a sample is another one in half of its batch."""
        if not is_sharded(ModelTree(self.model)):
            with self._prepared(select_parameters(self.model, self.grad_wrt)):
                super().look_at_halves(batch)

    def look_at_mixing(self) -> None:
        """Refuse a model whose f of a sample depends on the other samples of its batch."""
        raise SelfCheckError(refusal_of_mixing(self.model))

    def _run(self, plan: Plan, part: _Part, sink: BlockSink) -> OutputTerms:
        """Run forward and backward with hooks, and remove these; find the samples of an unexpected number of rows."""
        ledger = GradientLedger(part.kept, batch_size(part.batch), sink, part.start, self.keep_factors)
        grad_pass = GradientPass(plan, part.kept, ledger)
        try:
            with grad_pass.installed(self._tree or ModelTree(self.model)):
                with nullcontext() if plan.only_in_model else grad_pass:
                    terms = self.terms(part.batch)
                with grad_pass:
                    grad_pass.backward(terms.output)
        except UnexpectedRowsError as error:
            if self._sharded is not None:
                raise UnsupportedModelError(
                    "The model is sharded, and the number of rows per sample differs from the first batch, which "
                    "hooks support only for a model that is not sharded. Use a whole model on one device."
                ) from error
            logger.info("%s", error)
        else:
            plan.methods, plan.escaped = ledger.methods, list(grad_pass.escaped)
            return terms
        plan.doubt()  # the second pass does not assume a number of rows
        return self._run(plan, part, sink)


def _put(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Cache a value; drop the oldest if there are too many."""
    cache[key] = value
    if len(cache) > _MAX_PLANS:
        del cache[next(iter(cache))]
