"""Recording of the torch operations of a computation, and their replay without Python, autograd or hooks.

A tape records the operations below autograd, of the forward and of the backward pass, in the order in which they ran.
The recording is one generated function that calls them again with other inputs. A value that Python read becomes a
condition: a replay that reads another value raises :class:`OtherPathError`. What a tape cannot see (values read through
NumPy, results whose shape depends on values, random numbers, writes into tensors from outside) it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["OtherPathError", "Recording", "Tape", "UnrecordableError"]

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}
"""Operations whose result is their argument, once autograd is out of the way."""
_UNSEEN_READS = frozenset({"__array__", "__dlpack__", "__format__", "__repr__", "numpy", "tolist"})
_MOST_OPERATIONS = 50_000
_MOST_BUFFER_BYTES = 1 << 20


class UnrecordableError(Exception):
    """A computation that a replay might not repeat; the message says why."""


class OtherPathError(Exception):
    """Python would read other values in this batch than in the recorded one, and might run other operations."""


class _Step:
    """One operation."""

    __slots__ = ("args", "function", "kwargs", "outputs", "value", "writes")

    def __init__(self, function: OpOverload, args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.outputs: list[int | None] = []
        self.writes: list[int] = []
        self.value: Any = None


class _Variable:
    """A tensor, in place of which arguments hold its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@final
class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run inside the block.

    Args:
        inputs: The tensors that differ from replay to replay.
        outside: Tensors whose values may change between replays (parameters, buffers), which replays read anew.
        is_scratch: Whether a tensor is memory whose values nobody reads later, so that replays may write there.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outside: Iterable[Tensor],
        is_scratch: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        """Start with nothing recorded."""
        super().__init__()
        self._is_scratch = is_scratch
        self._numbers: Any = WeakTensorKeyDictionary()  # type: ignore[no-untyped-call]
        self._steps: list[_Step] = []
        self._roots: list[int] = []
        """By variable, the first variable of the same memory."""
        self._varies: list[bool] = []
        """By variable, whether its values may differ from replay to replay."""
        self._constants: dict[int, Tensor] = {}
        self._held: dict[int, Tensor] = {}
        """Results that are the same in every replay, unless something writes into their memory."""
        self._refusal: str | None = None
        self._reading = _UnseenReads(self)
        self._num_inputs = len(inputs)
        for tensor in inputs:
            self._new(tensor, varies=True)
        for tensor in outside:
            if tensor not in self._numbers:
                self._constants[self._new(tensor, varies=True)] = tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch._dynamo is imported at the first operation

    def __enter__(self) -> Tape:
        """Start to record."""
        self._reading.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reading.__exit__(*error)  # type: ignore[no-untyped-call]

    def refuse(self, reason: str) -> None:
        """Note why a replay might not repeat what runs; the computation goes on."""
        self._refusal = self._refusal or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        if self._refusal is not None:
            return func(*args, **kwargs)
        if (
            not isinstance(func, OpOverload)
            or func.namespace not in ("aten", "prims")
            or torch.Tag.dynamic_output_shape in func.tags
            or torch.Tag.inplace_view in func.tags
            or torch.Tag.nondeterministic_seeded in func.tags
            or len(self._steps) >= _MOST_OPERATIONS
        ):
            self.refuse(f"it runs {func}")
            return func(*args, **kwargs)
        step = _Step(func, self._with_numbers(args), self._with_numbers(kwargs))
        result = func(*args, **kwargs)
        if func in _READS:
            step.value = result
            self._steps.append(step)
            return result
        read = [v.number for v in _variables((step.args, step.kwargs))]
        varies = any(self._varies[number] for number in read)
        if func in _SAME:
            self._numbers[result] = read[0]
            return result
        if func._schema.is_mutable:
            step.writes = [
                variable.number
                for value, argument in _arguments(step)
                if argument.alias_info is not None and argument.alias_info.is_write
                for variable in _variables(value)
            ]
            if varies:
                for number in step.writes:
                    self._varies[self._roots[number]] = self._varies[number] = True
        aliases = any(returned.alias_info is not None for returned in func._schema.returns)
        roots = {_memory(leaf): self._numbers[leaf] for leaf in _tensors((args, kwargs))} if aliases else {}
        for leaf in _leaves(result):
            if not isinstance(leaf, Tensor):
                step.outputs.append(None)
                continue
            number = self._numbers.get(leaf)
            if number is None:
                root = roots.get(_memory(leaf)) if aliases else None
                number = self._new(
                    leaf, varies or (root is not None and self._varies[self._roots[root]]), root
                )
                if not self._varies[number] and leaf.numel() * leaf.element_size() <= _MOST_BUFFER_BYTES:
                    self._held[number] = leaf
            step.outputs.append(number)
        self._steps.append(step)
        return result

    def _new(self, tensor: Tensor, varies: bool, root: int | None = None) -> int:
        number = len(self._roots)
        self._numbers[tensor] = number
        self._roots.append(number if root is None else self._roots[root])
        self._varies.append(varies)
        return number

    def _with_numbers(self, value: Any) -> Any:
        """Return arguments with variables in place of tensors; an unknown tensor is a constant."""
        if isinstance(value, Tensor):
            number = self._numbers.get(value)
            if number is None:
                number = self._new(value, varies=False)
                self._constants[number] = value
            return _Variable(number)
        if isinstance(value, list | tuple):
            return [self._with_numbers(entry) for entry in value]
        if isinstance(value, dict):
            return {key: self._with_numbers(entry) for key, entry in value.items()}
        return value

    def finish(self, outputs: Sequence[Tensor]) -> Recording:
        """Return the recording, whose replays return these tensors.

        Raises:
            UnrecordableError: If a replay might not repeat the computation.
        """
        written = {self._roots[number] for step in self._steps for number in step.writes}
        for root in written:
            if root < self._num_inputs or (
                root in self._constants and not self._is_scratch(self._constants[root])
            ):
                self.refuse("it writes into a tensor that it did not make")
        if self._refusal is not None:
            raise UnrecordableError(self._refusal)
        found = []
        for output in outputs:
            number = self._numbers.get(output)
            if number is None:
                raise UnrecordableError("a result is no result of an operation")
            found.append(number)
        fixed = {
            number: tensor
            for number, tensor in (*self._constants.items(), *self._held.items())
            if number in self._constants or self._roots[number] not in written
        }
        return Recording(self._steps, range(self._num_inputs), fixed, found)


class _UnseenReads(TorchFunctionMode):
    """Refuses methods by which Python reads values without an operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _UNSEEN_READS:
            self._tape.refuse(f"Python reads values by {func.__name__}")
        return func(*args, **(kwargs or {}))


@final
class Recording:
    """The operations of a computation; call it with new inputs to run them again."""

    def __init__(
        self, steps: Sequence[_Step], inputs: Iterable[int], fixed: dict[int, Tensor], outputs: Sequence[int]
    ) -> None:
        """Write the function that replays the steps; those whose results are ``fixed`` are left out."""
        steps = [
            step
            for step in steps
            if step.value is not None or step.writes or not all(n is None or n in fixed for n in step.outputs)
        ]
        steps = _needed(steps, outputs)
        self.num_operations = len(steps)
        writer = _Writer(fixed)
        body = writer.body(steps, outputs)
        names = [f"v{number}" for number in inputs]
        text = "\n".join([f"def replay({', '.join(names)}):", *body])
        namespace = {**writer.values, "OtherPathError": OtherPathError}
        exec(compile(text, "<recorded operations>", "exec"), namespace)
        self._replay: Callable[..., list[Tensor]] = namespace["replay"]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run the operations.

        Raises:
            OtherPathError: If Python would read other values than in the recorded batch.
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return self._replay(*inputs)


def _needed(steps: Sequence[_Step], outputs: Sequence[int]) -> list[_Step]:
    """Return the steps that outputs, conditions and writes depend on."""
    wanted, kept = set(outputs), []
    for step in reversed(steps):
        if step.value is not None or step.writes or any(number in wanted for number in step.outputs):
            wanted.update(variable.number for variable in _variables((step.args, step.kwargs)))
            kept.append(step)
    return kept[::-1]


class _Writer:
    """Writes the text of a replay; ``values`` are its global names."""

    def __init__(self, fixed: dict[int, Tensor]) -> None:
        self._fixed = fixed
        self.values: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def body(self, steps: Sequence[_Step], outputs: Sequence[int]) -> list[str]:
        last: dict[int, int] = {}
        for place, step in enumerate(steps):
            for variable in _variables((step.args, step.kwargs)):
                last[variable.number] = place
            for number in step.outputs:
                if number is not None:
                    last[number] = place
        for number in outputs:
            last[number] = len(steps)
        dying: dict[int, list[int]] = {}
        for number, place in last.items():
            if number not in self._fixed:
                dying.setdefault(place, []).append(number)
        lines = []
        for place, step in enumerate(steps):
            lines.append(f"    {self._line(step)}")
            if dying.get(place):
                lines.append(f"    del {', '.join(f'v{number}' for number in dying[place])}")
        return [*lines, f"    return [{', '.join(self._name(number) for number in outputs)}]"]

    def _line(self, step: _Step) -> str:
        words = [self._text(value) for value in step.args]
        words += [f"{name}={self._text(value)}" for name, value in step.kwargs.items()]
        call = f"{self._value(step.function._op)}({', '.join(words)})"
        if step.value is not None:
            return f"if {call} != {self._value(step.value)}: raise OtherPathError"
        names = ["_" if n is None or n in self._fixed else f"v{n}" for n in step.outputs]
        if not names or set(names) == {"_"}:
            return call
        returns = step.function._schema.returns
        is_list = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
        joined = ", ".join(names)
        return f"{joined if len(names) > 1 else f'{joined},' if is_list else joined} = {call}"

    def _text(self, value: Any) -> str:
        if isinstance(value, _Variable):
            return self._name(value.number)
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if value is None or type(value) in (int, bool):
            return repr(value)
        return self._value(value)

    def _name(self, number: int) -> str:
        return self._value(self._fixed[number]) if number in self._fixed else f"v{number}"

    def _value(self, value: Any) -> str:
        """Return the global name of a value."""
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"k{len(self.values)}"
            self.values[name] = value
        return name


def _arguments(step: _Step) -> Iterable[tuple[Any, Any]]:
    """Yield the arguments of a step with their descriptions in the operation's schema."""
    described = step.function._schema.arguments
    yield from zip(step.args, described, strict=False)
    by_name = {argument.name: argument for argument in described}
    yield from ((value, by_name[name]) for name, value in step.kwargs.items())


def _variables(value: Any) -> Iterable[_Variable]:
    if isinstance(value, _Variable):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _variables(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _variables(entry)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in _leaves(entry)]
    return [value]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in _tensors(entry)]
    return [value] if isinstance(value, Tensor) else []


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata
