"""Dropout whose masks are a pure function of seed, step and position, so that a training can be replayed.

The masks do not come from torch's generator: a replay differentiates the same step several times, in any order, and
models that are trained side by side need masks of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trak_lite.core.random import STEP, mixed, mixed_int, shifted
from trak_lite.errors import UnsupportedModelError

_WHOLE = {F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5}
"""Functions that drop whole channels, and the axes of a batched input."""
_RANDOM: dict[Callable[..., Any], tuple[str, int] | None] = {
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
    F.alpha_dropout: ("training", 2),
    F.feature_alpha_dropout: ("training", 2),
    F.rrelu: ("training", 3),
    F.gumbel_softmax: None,
    torch.bernoulli: None,
}
"""Functions that draw from torch's generator; name and position of the argument that must be set for it, if any."""


def step_key(seed: Tensor | int, step: int, part: int, device: torch.device) -> Tensor:
    """Return the int64 key of the masks of one step and one part of its batch, in the shape of the seed."""
    if isinstance(seed, Tensor):
        return mixed(mixed(mixed(seed + STEP) + step) + part)
    key = mixed_int(mixed_int(mixed_int(int(seed) + STEP) + step) + part)
    return torch.tensor(key, device=device)


@final
class SeededDropout(TorchFunctionMode):
    """Replaces the masks of dropout in its context by those of a key."""

    def __init__(self, key: Tensor) -> None:
        """Take the key of :func:`step_key`; it may have a batch axis of ``vmap``."""
        super().__init__()
        self._key = key
        self._calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; dropout uses the mask of the key."""
        kwargs = dict(kwargs or {})
        if func is F.dropout or func in _WHOLE:
            return self._dropout(func, *args, **kwargs)
        if func in _RANDOM and _is_random(func, args, kwargs):
            if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
                raise UnsupportedModelError(
                    f"{func.__name__} with dropout_p above 0 draws its mask from torch's generator, so the training "
                    "cannot be replayed. Set the attention's dropout to 0, or use an attention that calls nn.Dropout "
                    "(Hugging Face: attn_implementation='eager')."
                )
            raise UnsupportedModelError(
                f"{func.__name__} draws from torch's generator, so the training cannot be replayed. Of the random "
                "operations, dropout, dropout1d, dropout2d and dropout3d are supported."
            )
        return func(*args, **kwargs)

    def _dropout(
        self,
        func: Callable[..., Any],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return input
        shape = input.shape
        if func is F.dropout2d:  # reads three axes as (N, C, L), not as one image without a batch axis
            shape = shape[:2]
        elif func in _WHOLE:  # without the axes of a channel
            shape = shape[: len(shape) - _WHOLE[func] + 2]
        self._calls += 1
        positions = torch.arange(math.prod(shape), device=self._key.device).reshape(shape)
        bits = mixed(mixed(self._key + self._calls) + positions * STEP)
        uniform = shifted(bits, 40).to(torch.float32) * 2.0**-24  # 24 bits, which float32 holds exactly
        mask = (uniform >= p).to(input.dtype) / (1 - p if p < 1 else 1.0)
        mask = mask.reshape(*shape, *[1] * (input.dim() - len(shape)))
        return input.mul_(mask) if inplace else input * mask


def _is_random(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of one of these functions draws random numbers."""
    argument = _RANDOM[func]
    if argument is None:
        return True
    if func is F.multi_head_attention_forward and not kwargs.get("training", True):
        return False
    name, position = argument
    return bool(args[position] if len(args) > position else kwargs.get(name, False))
