"""Scripts in processes of their own that are forked off one that has imported torch, so that no start costs an import.

What is forked off never ran anything before: random states, hooks and registries are those of a new process. For what
importing does, or what ``-W error`` says of it, start an interpreter instead.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

PRELOADED = ["trak_lite", "torch.distributed.fsdp", "torch._dynamo"]  # fully_shard imports the latter


def forkserver() -> ForkServerContext:
    """Return the context of processes forked off one that has imported the package, and never run it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def answers_of(size: int, target: Callable[..., None], *arguments: Any) -> list[Any]:
    """Run ``target(answers, rank, *arguments)`` in so many processes; return what each put with its rank, in order."""
    context = forkserver()
    answers = context.SimpleQueue()
    started = [context.Process(target=target, args=(answers, rank, *arguments)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join(600)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()  # one that waits for ever must not keep the others waiting
    found = {}
    while not answers.empty():
        rank, found[rank] = answers.get()
    assert codes == [0] * size, found
    return [found[rank] for rank in sorted(found)]


def start_script(
    script: Path, *arguments: str, output: Path, folder: Path | None = None, warnings_are_errors: bool = False
) -> ForkServerProcess:
    """Run a script as ``python script arguments``; what it prints goes to the file ``output``."""
    process = forkserver().Process(
        target=_run,
        args=(str(script), arguments, str(output), str(folder or Path.cwd()), warnings_are_errors),
    )
    process.start()
    return process


def _run(
    script: str, arguments: tuple[str, ...], output: str, folder: str, warnings_are_errors: bool
) -> None:
    import torch

    with open(output, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    if warnings_are_errors:
        for package in ("matplotlib.pyplot", "sklearn.datasets"):  # what they warn of is not the script's
            importlib.import_module(package)

        warnings.simplefilter("error")
    runpy.run_path(script, run_name="__main__")
