"""Triton's kernels, interpreted or found usable on a GPU."""

from __future__ import annotations

import logging

import pytest
from triton_cases import choose_anew, in_the_interpreter, recorded_launches


@pytest.fixture(scope="module")
def interpreter():
    with in_the_interpreter() as kernels:
        yield kernels


@pytest.fixture
def launches(interpreter, monkeypatch):
    return recorded_launches(monkeypatch)


@pytest.fixture
def forget_choices():
    """Each device's choice of the kernels is made anew, and again after the test."""
    choose_anew()
    yield
    choose_anew()


@pytest.fixture
def no_warning(forget_choices, caplog):
    """The kernels are chosen: where they are not, there is a warning."""
    with caplog.at_level(logging.WARNING, "trak_lite"):
        yield
    assert not caplog.records, caplog.text
