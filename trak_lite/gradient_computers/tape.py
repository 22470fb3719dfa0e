"""Recording of the torch operations of a computation, and their replay without Python, autograd or hooks.

A tape records the operations below autograd, of the forward and of the backward pass, in the order in which they ran.
The recording is one generated function that calls them again with other inputs. A value that Python read becomes a
condition: a replay that reads another value raises :class:`OtherPathError`. What a tape cannot see (values read through
NumPy, results whose shape depends on values, random numbers, writes into tensors from outside) it refuses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from trak_lite.core.devices import is_scratch, rng_state
from trak_lite.errors import refuse_signal
from trak_lite.gradient_computers.recording import (
    BUFFERS,
    UNINITIALISED,
    Recording,
    Step,
    UnrecordableError,
    Variable,
    leaves_of,
    tensors_of,
)

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._nested_tensor_from_mask_left_aligned.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.q_scale.default,
    torch.ops.aten.q_zero_point.default,
}
"""Operations that return values of tensors to Python."""
_SAME = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift.default,
    torch.ops.aten.lift_fresh.default,
}
"""Operations whose result is their argument, once autograd is out of the way."""
_UNSEEN_READS = {"__array__", "__dlpack__", "__format__", "__repr__", "data_ptr", "numpy", "tolist"}
_UNSEEN_READS |= {"apply_", "map2_", "map_"}
_CONSTRUCTORS = frozenset({"as_tensor", "asarray", "new", "new_tensor", "tensor"})
_INDEXES = frozenset({"__getitem__", "__setitem__"})
"""Functions that read the tensors in a list (of an index, in a list in its tuple) without an operation."""
_CONVERSIONS = frozenset({"__bool__", "__complex__", "__float__", "__index__", "__int__", "item"})
"""Functions that read by an operation, but not where torch calls them for the entries of a list."""
_READ_SIZES = frozenset({"_pad_packed_sequence", "gru", "lstm", "rnn_relu", "rnn_tanh", "tensor_split"})
"""Functions that divide their first argument by a tensor of integers, which they read without an operation."""
_MOST_OPERATIONS = 50_000
_MOST_BUFFER_BYTES, _MOST_HELD_BYTES = 1 << 20, 1 << 25


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has strided memory of its own, and no class that sees operations (sparse, nested, DTensor)."""
    dispatched = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return tensor.layout == torch.strided and not (tensor.is_nested or dispatched)


@final
class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run inside the block.

    Args:
        inputs: The tensors that differ from replay to replay.
        outside: Tensors whose values may change between replays (parameters, buffers), which replays read anew.
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: Sequence[Tensor], outside: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: Any = WeakTensorKeyDictionary()
        self._steps: list[Step] = []
        self._roots: list[int] = []
        """By variable, the first variable of the same memory."""
        self._varies: list[bool] = []
        """By variable, whether its values may differ from replay to replay."""
        self._memory: dict[int, int] = {}
        """Roots of the tensors from outside, by their storage."""
        self._made: dict[int, tuple[int, StorageWeakRef]] = {}
        """Roots of the results, by their storage; while a weak reference is held, no other one has its address."""
        self._constants: dict[int, Tensor] = {}
        """Tensors from outside."""
        self._lifted: set[int] = set()
        """Those that Python has made in this thread, from numbers or arrays."""
        self._anchored: set[int] = set()
        """Tensors from outside, accumulators, and their views: replays find them at the same place."""
        self._held: dict[int, Tensor] = {}
        """Results that are the same in every replay, unless something writes into their memory."""
        self._bytes_left = _MOST_HELD_BYTES
        self._refusal: str | None = None
        self._reading: _UnseenReads | None = None
        self._collects = True
        """Whether Python collected garbage by itself before the block."""
        self._collections = 0
        """Number of collections of garbage before the block."""
        self._ignores_reads = False
        self._num_inputs = len(inputs)
        self._devices = {torch.device("cpu"), *(tensor.device for tensor in inputs)}
        self._states: list[Tensor] = []
        """Random states of the devices before the block."""
        for tensor in (*inputs, *outside):
            if tensor not in self._numbers:
                self._outside(tensor)
        self._num_named = len(self._roots)
        """Number of the inputs and of the tensors that are known before the block."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch._dynamo is imported at the first operation

    def __enter__(self) -> Tape:
        self._collects = gc.isenabled()
        gc.collect(0)
        gc.disable()  # so that the youngest objects are what this block makes, in whichever thread
        self._collections = _num_collections()
        self._states = self._random_states()
        self._reading = _UnseenReads(self)
        self._reading.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
            assert self._reading is not None
            self._reading.__exit__(*error)  # type: ignore[no-untyped-call]
            self._reading = None  # no cycle holds the tensors
            if not all(map(torch.equal, self._states, self._random_states())):
                self.refuse("it draws random numbers where operations are not seen, as in another thread")
            young = set(map(id, gc.get_objects(generation=0)))
            if _num_collections() > self._collections:
                self.refuse("Python collects garbage in it, so that new objects cannot be told from old ones")
            constants = self._constants.items()
            made = [
                tensor for number, tensor in constants if id(tensor) in young and self._is_unknown(number)
            ]
            if made:
                gc.collect(0)  # graphs of autograd, which hold tensors as a traced module holds its own
        finally:
            if self._collects:
                gc.enable()
        bases = [id(view._base) for view in self._held.values()]  # each holds the tensor once more
        if any(tensor._use_count() - bases.count(id(tensor)) == 1 for tensor in made):  # type: ignore[attr-defined]
            self.refuse("it reads a tensor that was made where operations are not seen, as in another thread")

    def _is_unknown(self, number: int) -> bool:
        """Whether a tensor from outside that the block has made is none of Python's numbers, NumPy or known memory."""
        tensor = self._constants[number]
        is_data = self._roots[number] != number and not tensor._is_view()  # ``weight.data``
        return number not in self._lifted and tensor.untyped_storage().resizable() and not is_data

    def _random_states(self) -> list[Tensor]:
        return [rng_state(device) for device in self._devices]

    def refuse(self, reason: str) -> None:
        """Note why a replay might not repeat what runs; the computation goes on."""
        self._refusal = self._refusal or reason

    @contextmanager
    def reads_ignored(self) -> Iterator[None]:
        """Record no conditions inside the block, which only checks the values that it reads."""
        self._ignores_reads = True
        try:
            yield
        except Exception:
            self.refuse("a check of values fails in the recorded batch, which the model may catch")
            raise
        finally:
            self._ignores_reads = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._refusal is not None or (self._ignores_reads and func in _READS):
            return func(*args, **kwargs)
        if len(self._steps) >= _MOST_OPERATIONS or not _is_repeatable(func, args, kwargs):
            self.refuse(f"it runs {func}")
            return func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags  # attention does if it drops
        states = self._random_states() if draws else []
        try:
            result = func(*args, **kwargs)
        except Exception:
            if not _fails_without_values(func, args, kwargs):
                self.refuse(f"{func} fails in the recorded batch, which the model may catch")
            raise
        if draws and not all(map(torch.equal, states, self._random_states())):
            self.refuse(f"{func} draws random numbers")  # the pass may put the state back
        tensors = tensors_of((args, kwargs, result))
        if not all(map(is_plain, tensors)):
            self.refuse(f"{func} reads or returns a sparse or nested tensor, or one of another class")
            return result
        step = Step(func, self._with_numbers(args), self._with_numbers(kwargs))
        step.is_between_devices = len({tensor.device for tensor in tensors}) > 1
        if func in _SAME:
            (number,) = step.reads
            if step.name.startswith("lift"):
                self._lifted.add(number)
                is_new = number >= self._num_named and number in self._constants
                has_own_memory = self._roots[number] == number and tensors[0].untyped_storage().resizable()
                if is_new and has_own_memory:
                    self._varies[number] = False  # Python has made it from numbers
            self._numbers[result] = number
            return result
        if func in _READS:
            step.value = result
        self._note_outputs(step, leaves_of(result))
        self._steps.append(step)
        return result

    def _note_outputs(self, step: Step, results: list[Any]) -> None:
        """Number the results of a step, and hold those that every replay may share."""
        anchored = all(number in self._anchored for number in step.reads)
        is_view = any(returned.alias_info is not None for returned in step.function._schema.returns)
        varies = any(self._varies[number] for number in step.reads)
        for number in step.writes:
            self._varies[self._roots[number]] |= varies
        makes_buffer = step.name in BUFFERS
        for leaf in results:
            if not isinstance(leaf, Tensor):
                step.outputs.append(None)
                continue
            number = self._numbers.get(leaf)
            if number is None:
                storage = leaf.untyped_storage()
                cdata, root = storage._cdata, next((self._roots[n] for n in step.reads if is_view), None)
                if root is None:  # some views do not say so, such as _unsafe_view after a product
                    root = self._memory.get(cdata, self._made[cdata][0] if cdata in self._made else None)
                number = self._new(leaf, varies if root is None else varies or self._varies[root], root)
                if cdata not in self._memory and cdata not in self._made:
                    self._made[cdata] = self._roots[number], StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                num_bytes = leaf.numel() * leaf.element_size()
                small = num_bytes <= min(_MOST_BUFFER_BYTES, self._bytes_left)
                if is_view and anchored and not step.writes:
                    self._anchored.add(number)
                    self._held[number] = leaf
                elif small and (makes_buffer or not self._varies[number]):
                    if makes_buffer:
                        self._anchored.add(number)
                    self._held[number] = leaf
                    self._bytes_left -= num_bytes
            step.outputs.append(number)

    def _new(self, tensor: Tensor, varies: bool, root: int | None = None) -> int:
        number = len(self._roots)
        self._numbers[tensor] = number
        self._roots.append(number if root is None else root)
        self._varies.append(varies)
        return number

    def _outside(self, tensor: Tensor) -> int:
        """Number a tensor that the computation did not make; tensors of the same memory have one root."""
        number = self._new(tensor, varies=True)
        storage = tensor.untyped_storage()._cdata
        self._roots[number] = self._memory.setdefault(storage, number)
        if storage in self._made or self._roots[number] < min(number, self._num_inputs):
            self.refuse("a tensor of the batch is given another identity without an operation")
        self._varies[self._roots[number]] = True
        self._constants[number] = tensor
        self._anchored.add(number)
        return number

    def _with_numbers(self, value: Any) -> Any:
        """Return arguments with variables in place of tensors; an unknown tensor is a constant."""
        if isinstance(value, Tensor):
            number = self._numbers.get(value)
            return Variable(self._outside(value) if number is None else number)
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
        if any(root in self._constants and not is_scratch(self._constants[root]) for root in written):
            self.refuse("it writes into a tensor that it did not make")
        if not all(output in self._numbers for output in outputs):
            self.refuse("a result is no result of an operation")
        if self._refusal is not None:
            raise UnrecordableError(self._refusal)
        numbers = [self._numbers[output] for output in outputs]
        fixed = self._fixed(written, {self._roots[number] for number in numbers})
        for number in range(self._num_inputs):
            del fixed[number]
        intermediates = [n for n in fixed if n not in self._constants and self._roots[n] == n]
        unnamed = [number for number in self._constants if number >= self._num_named]
        return Recording(
            *(self._steps, range(self._num_inputs), fixed, numbers, intermediates, self._roots),
            steady=[
                (tensor, self._varies[number])
                for number in unnamed
                if not is_scratch(tensor := self._constants[number])
            ],
        )

    def _fixed(self, written: set[int], returned: set[int]) -> dict[int, Tensor]:
        """Return the tensors that all replays share.

        These are the tensors from outside; results that depend on constants only; accumulators of known initial
        values, which each replay initialises again, if no result is part of them; and views of all these.
        """
        fixed = dict(self._constants)
        inputs = {self._roots[number] for number in range(self._num_inputs)}
        for step in self._steps:
            reads_fixed = all(number in fixed for number in step.reads)
            steady = reads_fixed and not any(
                self._varies[self._roots[n]] or self._roots[n] in written for n in step.reads
            )
            for number in step.outputs:
                held = self._held.get(number) if number is not None else None
                if number is None or held is None or number in fixed or step.writes:
                    continue
                root = self._roots[number]
                if root == number:  # no view
                    keeps = step.name in BUFFERS and root not in returned
                    keeps = keeps or (steady and root not in written and step.name not in UNINITIALISED)
                else:
                    keeps = reads_fixed and root in fixed and root not in inputs
                if keeps:
                    fixed[number] = held
        return fixed


class _UnseenReads(TorchFunctionMode):
    """Refuses functions that read values without an operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]  # without that of an overload
        if any(map(_is_of_users, (func, *(cls.__torch_function__ for cls in types)))):
            self._tape.refuse(f"{name} runs code of a user, whose reads no mode of torch sees")
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            self._tape.refuse("a tensor is given the memory of another one without an operation")
        values = [*args, *kwargs.values()]
        index = values[1] if name in _INDEXES else ()
        sizes = values[1:] if args else [value for key, value in kwargs.items() if key != "input"]
        if (
            name in _UNSEEN_READS
            or (name in _CONSTRUCTORS and any(map(_lists_tensors, values)))
            or any(map(_lists_tensors, index if isinstance(index, tuple) else [index]))
            or (name in _READ_SIZES and any(tensor.dtype == torch.int64 for tensor in tensors_of(sizes)))
        ):
            self._tape.refuse(f"values are read by {name}, which is no operation")
        if name in _CONVERSIONS:
            num_steps = len(self._tape._steps)
            result = func(*args, **kwargs)
            if len(self._tape._steps) == num_steps:
                self._tape.refuse(
                    f"values are read by {name} without an operation, as for the entries of a list"
                )
            return result
        if func is torch.nn.functional.one_hot and values[-1] is not values[0] and values[-1] > 0:
            # It only refuses classes that do not fit, as its scatter does in a replay.
            with self._tape.reads_ignored():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_of_users(function: Any) -> bool:
    """Whether it is a function or a method in Python that is none of torch; torch runs it without its modes."""
    is_python = isinstance(function, FunctionType | MethodType)
    return is_python and str(function.__module__).partition(".")[0] != "torch"


def _num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def _lists_tensors(value: Any) -> bool:
    """Whether a sequence of any class holds tensors."""
    is_sequence = isinstance(value, Sized) and hasattr(value, "__getitem__")
    if isinstance(value, Tensor | str | bytes | np.ndarray) or not is_sequence:
        return False
    return any(isinstance(one, Tensor) or _lists_tensors(one) for one in value)


def _fails_without_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that failed does so for every batch of these shapes."""
    if func.namespace != "aten" or not all(map(is_plain, tensors_of((args, kwargs)))):
        return False
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    try:
        func(*args, **kwargs)
    except NotImplementedError:
        return False
    except Exception as error:
        refuse_signal(error)
        return True
    return False


def _is_repeatable(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation gives results of the same shapes for other values, and does not change what it is given."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims", "trak_lite"):
        return False
    if any(isinstance(leaf, torch.Generator) for leaf in (*args, *kwargs.values())):
        return False
    if func is torch.ops.aten.index.Tensor:  # a mask selects as many rows as it has true entries
        return all(index is None or index.dtype in (torch.int32, torch.int64) for index in args[1])
    if func is torch.ops.aten.as_strided_.default:  # sets what it returns, however often it is called
        return True
    if func is torch.ops.aten._pack_padded_sequence.default:  # has as many rows as the sum of the lengths
        return False
    return not {torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}.intersection(func.tags)
