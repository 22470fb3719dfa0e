"""Capture of a replay as a CUDA graph: all its kernels start at once, for which the host takes longer than they do."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trak_lite.core.garbage import no_collection

Replay = Callable[..., list[Tensor]]


def captured(
    replay: Replay, inputs: Sequence[Tensor], constants: Sequence[Tensor], pool: Any
) -> Replay | None:
    """Return a function that repeats the kernels of a replay, ``None`` if it would save little or nothing.

    It copies its inputs to memory of its own, and returns copies of its results. It calls the replay if a constant has
    other memory than now.

    Args:
        replay: Runs on the device of the inputs alone, and waits for nothing.
        inputs: Inputs of such a replay, on one CUDA device.
        constants: All else that the replay reads or overwrites.
        pool: ``torch.cuda.graph_pool_handle()``, for graphs that never run at the same time.

    Raises:
        RuntimeError: If an operation cannot be captured; torch's own message.
    """
    device = inputs[0].device
    with torch.cuda.device(device):
        kept = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
        moved = any(one.stride() != other.stride() for one, other in zip(kept, inputs, strict=True))
        if moved or not _waits_for_the_host(replay, kept):
            return None
        graph, stream = torch.cuda.CUDAGraph(), _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # A capture that fails leaves torch's allocator and generators in a state of capture: find it out before.
            # And cuBLAS takes memory at its first product on a stream, which is not to be that of the graph.
            with _refusing_waits():
                replay(*kept)
            with no_collection():  # which might free what belongs to CUDA
                # Other threads (of loaders, of pinned memory) may call CUDA meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    results = replay(*kept)
                finally:
                    graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
    addresses = [tensor.data_ptr() for tensor in constants]

    def run(*inputs: Tensor) -> list[Tensor]:
        if addresses != [tensor.data_ptr() for tensor in constants]:
            return replay(*inputs)
        with torch.no_grad(), torch.cuda.device(device):
            torch._foreach_copy_(kept, list(inputs))
            graph.replay()
            return [result.clone() for result in results]

    return run


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: every stream on which cuBLAS multiplies has memory of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Raise RuntimeError where torch waits for the device inside the block."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not notice all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _waits_for_the_host(replay: Replay, inputs: Sequence[Tensor]) -> bool:
    """Whether the device is idle soon after the host has started the last kernel."""
    shares = []
    for _ in range(3):  # other processes may use the device
        torch.cuda.synchronize()
        begin = time.perf_counter()
        replay(*inputs)
        started = time.perf_counter()
        torch.cuda.synchronize()
        shares.append((time.perf_counter() - started) / (started - begin))
    return min(shares) < 0.5
