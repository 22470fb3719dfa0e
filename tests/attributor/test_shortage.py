"""A shortage of memory, threads or descriptors, or a killed loader process, is a named error, not an unsupported model.

The failures are real ones: each is caused in the place named by the test, in a process of its own where a limit of the
process is needed.
"""

import contextlib
import functools
import itertools
import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import forkserver
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from trak_lite import Attributor, Rows
from trak_lite.errors import ShortageError, WorkerLostError, refuse_machine_failure
from trak_lite.store import ZarrFeatureStore

N = 24
TRAIN = TensorDataset(torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3)
TARGETS = TensorDataset(*TRAIN[:3])
BEYOND = 1 << 47
"""Bytes: more than any address space gives."""


def no_memory():
    torch.empty(BEYOND, dtype=torch.uint8)


def no_array():
    np.empty(BEYOND, np.uint8)


def no_thread():
    before = threading.stack_size(BEYOND)
    try:
        threading.Thread(target=print).start()
    finally:
        threading.stack_size(before)


class Failing(nn.Module):
    """A model during whose pass the machine refuses something, once ``passes`` are over."""

    def __init__(self, fail, passes):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.fail, self.passes = fail, iter(range(passes))  # a count would be undone after each pass

    def forward(self, inputs):
        if next(self.passes, None) is None:
            self.fail()
        return self.linear(inputs)


def attributor(path, model, engine="hook", **settings):
    return Attributor(model, "image_classification", path, proj_dim=8, gradient_computer=engine, **settings)


def finished(path):
    """Featurize what is left, with a model that does not fail, and return the scores."""
    made = attributor(path, Failing(None, 10**9))
    made.featurize(Rows(TRAIN, batch_size=8))
    return made.score(Rows(TARGETS, batch_size=8)).numpy()


@pytest.mark.parametrize("passes", [0, 3])
@pytest.mark.parametrize("engine", ["auto", "hook", "functional", "iterative"])
def test_a_shortage_during_a_pass_is_not_taken_for_an_unsupported_model(engine, passes, tmp_path):
    for fail in (no_memory, no_array, no_thread):
        made = attributor(tmp_path / fail.__name__, Failing(fail, passes), engine)
        with pytest.raises(ShortageError, match=r"ulimit"):
            made.featurize(Rows(TRAIN, batch_size=8))


@pytest.mark.parametrize("passes", [5, 2])
def test_rows_done_before_a_shortage_are_kept_and_the_others_are_right(passes, tmp_path):
    with pytest.raises(ShortageError):
        attributor(tmp_path / "a.zarr", Failing(no_memory, passes)).featurize(Rows(TRAIN, batch_size=8))
    assert finished(tmp_path / "a.zarr").tobytes() == finished(tmp_path / "b.zarr").tobytes()


def limited(folder, report):
    """Featurize and score with few file descriptors, and with more and more; write what came of it."""
    outcomes, (_, most) = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in (0, 4, 8, 64):
        used = len(os.listdir("/proc/self/fd")) - 1  # one is that of the listing
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, most))
        try:
            finished(Path(folder, f"{spare}.zarr"))
            outcomes.append("finished")
        except Exception as error:  # any kind: the test says which one it has to be
            outcomes.append(f"{type(error).__name__}: {error}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Path(report).write_text(json.dumps(outcomes))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_few_file_descriptors_are_named_wherever_they_run_out(tmp_path):
    report = tmp_path / "outcomes.json"
    process = forkserver().Process(target=limited, args=(str(tmp_path), str(report)))
    process.start()
    process.join()
    outcomes = json.loads(report.read_text())
    short = [outcome for outcome in outcomes if outcome != "finished"]
    assert outcomes[-1] == "finished"
    assert len(short) > 1
    assert all(outcome.startswith("ShortageError: No file descriptor is left") for outcome in short)


class KilledLoading(Dataset[Any]):
    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == 17:
            assert get_worker_info() is not None, "this would end the test itself"
            os.kill(os.getpid(), signal.SIGKILL)
        return TRAIN[index]


def test_a_killed_loader_process_is_not_taken_for_an_unsupported_model(tmp_path):
    loader = DataLoader(KilledLoading(), batch_size=8, num_workers=1, multiprocessing_context="fork")
    made = attributor(tmp_path / "a.zarr", Failing(None, 10**9), "auto")
    with pytest.raises(WorkerLostError, match="num_workers"):
        made.featurize(Rows(loader, name="mine"))
    with ZarrFeatureStore.open(tmp_path / "a.zarr") as store:
        assert store.table_names() in ([], ["ckpt-0"])


class EndedError(Exception):
    """What the launcher of a training raises in a rank that it ends."""


class Handler:
    """Handlers of a signal, of every form that Python takes."""

    def __init__(self, error):
        self.error = error

    def __call__(self, number, frame):
        raise self.error("ended by a signal")

    def method(self, number, frame):
        raise self.error("ended by a signal")


HANDLERS = {
    "a launcher's": lambda: Handler(EndedError),
    "a timeout": lambda: Handler(TimeoutError).method,
    "an error as of a model": lambda: functools.partial(Handler(RuntimeError).method),
}


@pytest.fixture
def handled():
    """Set the handler of a signal until the end of the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield functools.partial(signal.signal, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("handler", "moments"),
    [(name, range(2, 7, 4) if number else range(1000)) for number, name in enumerate(HANDLERS)],
    ids=HANDLERS,
)
def test_an_error_of_a_signal_handler_ends_the_call_at_any_moment(handler, moments, tmp_path, handled):
    """It is neither lost nor an answer of the model: torchrun's agent ends forked ranks by such an error."""
    handled(HANDLERS[handler]())

    def interrupted(passes):
        """Whether the signal came; the call ends with the error of its handler then."""
        sent = []
        model = Failing(lambda: sent or sent.append(0) or signal.raise_signal(signal.SIGUSR1), passes)
        made = attributor(tmp_path / f"{passes}.zarr", model, "auto")
        error = None
        try:
            made.featurize(Rows(TRAIN, batch_size=8))
            made.score(Rows(TARGETS, batch_size=8))
        except (EndedError, TimeoutError, RuntimeError) as raised:
            error = raised
        assert (str(error) == "ended by a signal") == bool(sent), f"pass {passes}"
        return bool(sent)

    seen = sum(1 for _ in itertools.takewhile(interrupted, moments))
    assert seen == 2 if len(moments) == 2 else 8 < seen < len(moments)


class Interrupted:
    """An extra state; the signal comes while it is copied, or while its content is read."""

    def __init__(self, name):
        self.name = name

    def __deepcopy__(self, memo):
        if self.name == "copied":
            signal.raise_signal(signal.SIGUSR1)
        return Interrupted(self.name)

    def __reduce__(self):
        if self.name == "read":
            signal.raise_signal(signal.SIGUSR1)
        return Interrupted, (self.name,)


@pytest.mark.parametrize("when", ["copied", "read", ""])
def test_an_error_of_a_signal_handler_ends_the_call_at_an_extra_state(when, tmp_path, handled):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return Interrupted(when)

        def set_extra_state(self, state):
            pass

    handled(Handler(RuntimeError))
    made = attributor(tmp_path / "a.zarr", Extra(4, 3), "auto")
    with pytest.raises(RuntimeError, match="ended by") if when else contextlib.nullcontext():
        made.featurize(Rows(TRAIN, batch_size=8))


@pytest.mark.parametrize("is_before", [False, True])
def test_an_error_of_a_handler_that_a_model_replaces_ends_the_call_but_not_one_of_before(
    is_before, tmp_path, handled
):
    """A program may catch a timeout and attribute then; an error of its model is that of the model."""

    def replaced():
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Exception:
            raise ValueError("no prediction")  # noqa: B904 - as models do

    def refused():
        raise ValueError("no prediction")

    handled(Handler(TimeoutError))
    made = attributor(tmp_path / "a.zarr", Failing(refused if is_before else replaced, 1), "auto")

    def run():
        try:
            if is_before:
                signal.raise_signal(signal.SIGUSR1)
        except TimeoutError:
            made.featurize(Rows(TRAIN, batch_size=8))
        made.featurize(Rows(TRAIN, batch_size=8))

    with pytest.raises(ValueError, match="no prediction") as info:
        run()
    assert (type(info.value) is ValueError) == (not is_before)


def test_an_error_of_a_model_is_not_that_of_a_handler_with_the_same_decorator(handled):
    """The frames of a decorator are in both tracebacks; an error may be its own cause."""

    @torch.no_grad()
    def of_the_model():
        raise ValueError("sequence too short")

    @torch.no_grad()
    def of_the_handler(number, frame):
        raise ValueError("ended by a signal")

    handled(of_the_handler)
    for call, is_raised in ((of_the_model, False), (lambda: signal.raise_signal(signal.SIGUSR1), True)):
        with pytest.raises(ValueError, match=r".") as info:
            call()
        info.value.__cause__ = info.value
        with pytest.raises(ValueError, match="signal") if is_raised else contextlib.nullcontext():
            refuse_machine_failure(info.value)
