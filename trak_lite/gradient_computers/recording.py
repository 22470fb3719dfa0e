"""A recording of torch operations, and the function that runs them again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten

UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
BUFFERS = frozenset({"new_zeros", "zeros", "zeros_like"}) | UNINITIALISED
_OTHER_NAMES = {"self": "input", "x": "input", "a": "input", "x1": "input", "x2": "other", "axis": "dim"}
"""Names of arguments in ``torch.ops`` and in NumPy, which torch's functions take too."""


def by_name(names: Sequence[str], args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a torch function's arguments by name; ``names`` are those of the positional ones.

    Example:
        >>> by_name(("input", "dim"), [3], {"axis": 0})
        {'input': 3, 'dim': 0}
    """
    bound = dict(zip(names, args, strict=False))
    return bound | {key if key in names else _OTHER_NAMES.get(key, key): kwargs[key] for key in kwargs}


class UnrecordableError(Exception):
    """A computation that a replay might not repeat; the message says why."""


class OtherPathError(Exception):
    """Python would read other values in this batch than in the recorded one, and might run other operations."""


class Step:
    """One operation."""

    __slots__ = ("args", "function", "is_between_devices", "kwargs", "outputs", "reads", "value", "writes")

    def __init__(self, function: OpOverload, args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.reads = _numbers((args, kwargs))
        self.writes = _numbers(self._written()) if function._schema.is_mutable else []
        self.outputs: list[int | None] = []
        self.value: Any = None
        """What Python read."""
        self.is_between_devices = False

    @property
    def name(self) -> str:
        """Name of the operation, without that of its overload."""
        return str(self.function.overloadpacket.__name__)

    @property
    def only_checks(self) -> bool:
        """Whether it returns and writes nothing: it raises for some values."""
        return not (self.function._schema.returns or self.writes)

    def _written(self) -> list[Any]:
        aliases = {argument.name: argument.alias_info for argument in self.function._schema.arguments}
        arguments = {**dict(zip(aliases, self.args, strict=False)), **self.kwargs}
        return [value for name, value in arguments.items() if (alias := aliases[name]) and alias.is_write]


@dataclass(slots=True)
class Variable:
    """A tensor, in place of which arguments hold its number."""

    number: int


_REPEATING: ContextVar[bool] = ContextVar("inputs are repeated", default=False)


@contextmanager
def repeating_inputs() -> Iterator[None]:
    """Let replays keep what depends on inputs that stay, while no weight or input changes except by torch's operations.

    The caller runs no code of a user between batches: fused optimizers, memory of other processes, and running
    statistics change values without a new version.
    """
    token = _REPEATING.set(True)
    try:
        yield
    finally:
        _REPEATING.reset(token)


@final
class Recording:
    """The operations of a computation; call it with new inputs to run them again."""

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Iterable[int],
        fixed: dict[int, Tensor],
        outputs: Sequence[int],
        own: Iterable[int],
        roots: Sequence[int],
        steady: Iterable[tuple[Tensor, bool]],
    ) -> None:
        """Write the function that replays the steps; those whose results are ``fixed`` are left out.

        Args:
            steps: The operations, in order.
            inputs: Numbers of the tensors that differ from replay to replay.
            fixed: Tensors that all replays share, by number.
            outputs: Numbers of the results.
            own: Numbers of those fixed tensors that only the recording holds.
            roots: For every number, that of the first tensor of the same memory.
            steady: Tensors that replays expect at the same place, and whether they read their values anew.
        """
        steps = [step for step in steps if not _is_done(step, fixed)]
        made = {*inputs, *fixed}
        for step in steps:
            if not made.issuperset(step.reads):
                raise UnrecordableError(f"{step.function} reads what no operation has made")
            made.update(number for number in step.outputs if number is not None)
        self.num_operations = len(steps)
        self.num_bytes = sum(fixed[number].nbytes for number in own)
        """Memory that the recording holds between replays."""
        solves = any("linalg" in step.name and "norm" not in step.name for step in steps)
        self.may_wait = solves or any(s.value is not None or s.is_between_devices for s in steps)
        """Whether a replay may wait for a device: for values that Python or a solver reads, or for copies."""
        self._steps, self._inputs, self._outputs = steps, [*inputs], outputs
        self._fixed, self._roots = fixed, roots
        self._steady = [
            (tensor, None if varies else version_of(tensor), _place_of(tensor)) for tensor, varies in steady
        ]
        self._replay, self.constants = _compiled(steps, self._inputs, fixed, outputs)
        """The function, and the tensors that every replay reads or overwrites, beside its inputs."""
        self._before: list[tuple[weakref.ref[Tensor], int | None]] = []
        """Inputs of the last replay, and their versions."""
        self._halves: _Halves | None = None
        self._divisions: dict[frozenset[int], _Halves] = {}
        self._last_unchanged: frozenset[int] = frozenset()

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run the operations.

        Inside :func:`repeating_inputs`, if some inputs are the objects of the last call, unchanged (texts for which
        only other labels are drawn), what depends on them alone is computed once and kept until :meth:`forget`.

        Raises:
            OtherPathError: If Python would read other values than in the recorded batch.
        """
        if not _REPEATING.get():
            self.forget()
            return self.whole(*inputs)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            unchanged = self._unchanged(inputs)
            self._before = [(weakref.ref(tensor), version_of(tensor)) for tensor in inputs]
            if 0 < len(unchanged) < len(inputs):
                self._divide(unchanged)
            return self._replay(*inputs) if self._halves is None else self._halves(inputs, unchanged)

    def is_outdated(self) -> bool:
        """Whether a tensor that replays do not read anew was written to, or one from outside has another place."""
        return any(
            _place_of(tensor) != place or version not in (None, version_of(tensor))
            for tensor, version, place in self._steady
        )

    def _divide(self, unchanged: frozenset[int]) -> None:
        """Choose the halves; a set of inputs that has lost some waits for its second call, as at the next text."""
        last_unchanged, self._last_unchanged = self._last_unchanged, unchanged
        if self._halves is None or unchanged == last_unchanged or not unchanged <= self._halves.places:
            before, self._halves = self._halves, self._divisions.get(unchanged) or _Halves(self, unchanged)
            self._divisions[unchanged] = self._halves
            if before is not None and before is not self._halves:
                before.kept = None

    def whole(self, *inputs: Tensor) -> list[Tensor]:
        """Run all operations, whatever the last call was given; see :meth:`__call__`."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return self._replay(*inputs)

    def forget(self) -> None:
        """Free what is kept from call to call."""
        self._before = []
        if self._halves is not None:
            self._halves.kept = None

    def _unchanged(self, inputs: Sequence[Tensor]) -> frozenset[int]:
        """Return the positions of the inputs that the last replay had as well."""
        return frozenset(
            position
            for position, (tensor, (last, version)) in enumerate(zip(inputs, self._before, strict=False))
            if tensor is last()
            and version is not None
            and version == version_of(tensor)
            # NumPy writes to memory that it shares without a new version; torch does not resize such memory.
            and tensor.untyped_storage().resizable()
        )


@final
class _Halves:
    """A replay in two halves: what depends on some inputs alone, which is kept while these stay, and the rest."""

    def __init__(self, whole: Recording, positions: frozenset[int]) -> None:
        """Divide the steps of a recording; ``positions`` are those of the inputs that stay.

        What is written to, or returned, belongs to the second half, so that what is kept stays as it is.
        """
        self.places = positions
        steps, inputs, fixed, roots = whole._steps, whole._inputs, whole._fixed, whole._roots
        written = {roots[number] for step in steps for number in step.writes}
        written |= {roots[number] for number in whole._outputs}
        stable = {number for number in (*fixed, *(inputs[position] for position in positions))}
        stable = {number for number in stable if roots[number] not in written}
        first, second, made = list[Step](), list[Step](), set[int]()
        for step in steps:
            outputs = [number for number in step.outputs if number is not None]
            is_kept = not (step.writes or any(n in fixed or roots[n] in written for n in outputs))
            if is_kept and stable.issuperset(step.reads):
                first.append(step)
                stable.update(outputs)
                made.update(outputs)
            else:
                second.append(step)
        live = sorted(made.intersection(number for step in second for number in step.reads))
        # Zeros, which every replay sets again, and their views are no constants.
        results = {roots[number] for step in steps for number in step.outputs if number is not None}
        read = {number for step in first for number in step.reads}
        self._constants = [fixed[n] for n in sorted(read.intersection(fixed)) if roots[n] not in results]
        self._first, _ = _compiled(first, inputs, fixed, live)
        self._second, _ = _compiled(second, [*inputs, *live], fixed, whole._outputs)
        self.kept: list[Tensor] | None = None
        """Results of the first half that the second reads."""
        self._versions: list[int | None] = []

    def __call__(self, inputs: Sequence[Tensor], unchanged: frozenset[int]) -> list[Tensor]:
        """Run the second half, and before it the first if one of its inputs has changed, or a weight."""
        versions = [version_of(tensor) for tensor in self._constants]
        stays = self.places <= unchanged and versions == self._versions and None not in versions
        if self.kept is None or not stays:
            self.kept = None  # freed before the next ones are made
            self.kept, self._versions = self._first(*inputs), versions
        return self._second(*inputs, *self.kept)


def _compiled(
    steps: Sequence[Step], inputs: Sequence[int], fixed: dict[int, Tensor], outputs: Sequence[int]
) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """Return the function that runs the steps, and the fixed tensors that it reads or overwrites."""
    writer = _Writer(fixed)
    body = writer.body(steps, outputs)
    text = "\n".join([f"def replay({', '.join(f'v{number}' for number in inputs)}):", *body])
    namespace = {**writer.values, "OtherPathError": OtherPathError}
    exec(compile(text, "<recorded operations>", "exec"), namespace)
    replay: Callable[..., list[Tensor]] = namespace.pop("replay")  # no cycle holds the tensors
    return replay, [value for value in writer.values.values() if isinstance(value, Tensor)]


def _place_of(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Return where the values of a tensor are; views that a recording holds are made for this."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def version_of(tensor: Tensor) -> int | None:
    """Return a number that changes with the values of a tensor; ``None`` if it has none."""
    return None if tensor.is_inference() else tensor._version


def _is_done(step: Step, fixed: dict[int, Tensor]) -> bool:
    """Whether replays leave a step out, because its results are fixed."""
    if step.value is not None or step.only_checks or step.name in BUFFERS - UNINITIALISED:
        return False  # it raises for some values, or is initialised again
    return not step.writes and all(number is None or number in fixed for number in step.outputs)


class _Writer:
    """Writes the text of a replay; ``values`` are its global names."""

    def __init__(self, fixed: dict[int, Tensor]) -> None:
        self._fixed = fixed
        self.values: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def body(self, steps: Sequence[Step], outputs: Sequence[int]) -> list[str]:
        last = {n: index for index, step in enumerate(steps) for n in (*step.reads, *step.outputs)}
        dying: list[list[int]] = [[] for _ in steps]
        for number, index in last.items():
            if number is not None and number not in self._fixed and number not in outputs:
                dying[index].append(number)
        lines = []
        for step, names in zip(steps, dying, strict=True):
            lines.append(f"    {self._line(step)}")
            if names:
                lines.append(f"    del {', '.join(f'v{number}' for number in names)}")
        # A fixed tensor is returned as a copy, because the caller may write into it.
        results = [f"{self._name(n)}.clone()" if n in self._fixed else self._name(n) for n in outputs]
        return [*lines, f"    return [{', '.join(results)}]"]

    def _line(self, step: Step) -> str:
        (made,) = step.outputs if len(step.outputs) == 1 else (None,)
        if made in self._fixed and step.name in BUFFERS:
            return f"{self._name(made)}.zero_()"
        words = [self._text(value) for value in step.args]
        words += [f"{name}={self._text(value)}" for name, value in step.kwargs.items()]
        call = f"{self._value(step.function._op)}({', '.join(words)})"
        if step.value is not None:
            # As texts: -0.0 and 0.0 are equal.
            return f"if repr({call}) != {repr(step.value)!r}: raise OtherPathError"
        names = ["_" if n is None or n in self._fixed else f"v{n}" for n in step.outputs]
        if not names or set(names) == {"_"}:
            return call
        returns = step.function._schema.returns
        is_list = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
        joined = ", ".join(names)
        return f"{joined if len(names) > 1 else f'{joined},' if is_list else joined} = {call}"

    def _text(self, value: Any) -> str:
        if isinstance(value, Variable):
            return self._name(value.number)
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if value is None or type(value) in (int, bool):
            return repr(value)
        return self._value(value)

    def _name(self, number: int) -> str:
        return self._value(self._fixed[number]) if number in self._fixed else f"v{number}"

    def _value(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"k{len(self.values)}"
            self.values[name] = value
        return name


ENTRIES = frozenset({int, float, bool, str, type(None), type(...), torch.dtype, torch.device})
"""Types of arguments that are leaves."""


def leaves_of(values: Any) -> list[Any]:
    """Return the leaves of nested containers, like ``tree_flatten`` but ten times as fast."""
    kind = type(values)
    if kind is tuple or kind is list:
        return [leaf for value in values for leaf in leaves_of(value)]
    if kind is dict:
        return [leaf for value in values.values() for leaf in leaves_of(value)]
    return [values] if kind in ENTRIES or isinstance(values, Tensor) else tree_flatten(values)[0]


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]


def _numbers(values: Any) -> list[int]:
    return [leaf.number for leaf in leaves_of(values) if isinstance(leaf, Variable)]
