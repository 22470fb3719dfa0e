"""The hash of ``hash.py`` for Triton kernels, with bitwise the same words.

Triton has ``uint32``, so multiplication wraps and shifts are logical. Import this module only before a kernel runs,
because triton is an optional package. With ``TRITON_INTERPRET=1`` in the environment at import, the kernels run on CPU
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from trak_lite.projectors.random import hash as _hash

_FIRST = tl.constexpr(_hash._MULTIPLIERS[0])
_SECOND = tl.constexpr(_hash._MULTIPLIERS[1])
_COLUMN_STEP = tl.constexpr(_hash._COLUMN_STEP)
_ONE = tl.constexpr(_hash._ONE)


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Return Triton's decorator, with a type; values of the named arguments do not select a compiled variant."""
    return triton.jit(do_not_specialize=list(do_not_specialize))  # type: ignore[no-any-return]


def kernel(function: Callable[..., None]) -> Any:
    """Compile one variant for all numbers; only the stride of entries selects another one, for entries in a row."""
    names = [name for name, kind in function.__annotations__.items() if kind == "tl.tensor"]
    numbers = [name for name in names if not name.endswith("_ptr") and name != "entry_stride"]
    return jit(do_not_specialize=numbers)(function)


@jit()
def mix32(word: tl.tensor) -> tl.tensor:
    """Scramble uint32 words: ``_hash.mix32`` in a kernel."""
    word ^= word >> 16
    word *= _FIRST
    word ^= word >> 15
    word *= _SECOND
    return word ^ (word >> 15)


@jit()
def hash_word(index: tl.tensor, key: tl.tensor, high_key: tl.tensor) -> tl.tensor:
    """Return the words ``h(key, i)`` of ``_hash.hash_words_`` for the low 32 bits of i, uint32.

    ``high_key`` is ``key32(key, i >> 32)``, computed on the host, so a launch must not cross a multiple of 2**32.
    """
    return mix32(mix32(index ^ high_key.to(tl.uint32)) + key.to(tl.uint32))


@jit()
def rademacher_word(row_word: tl.tensor, column_word: tl.tensor) -> tl.tensor:
    """Return the words with the signs of rows, of which ``row_word`` is the ``hash_word``, in 32 columns from 32 j on.

    ``column_word`` is the number j, uint32; it must broadcast against ``row_word``.
    """
    return mix32(row_word ^ mix32(column_word * _COLUMN_STEP))


@jit()
def sign_floats(words: tl.tensor, shifts: tl.tensor) -> tl.tensor:
    """Return float32 -1 where the chosen bit of uint32 words is set and +1 where it is not.

    ``shifts`` is 31 minus the number of the bit, uint32; it must broadcast against ``words``.
    """
    bits = ((words << shifts) & 0x80000000) | _ONE  # the bit becomes the sign bit of 1.0
    return bits.to(tl.float32, bitcast=True)
