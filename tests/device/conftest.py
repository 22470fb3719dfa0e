"""The device that these tests run on: a CUDA GPU, or the stand-in where ``TRAK_LITE_STAND_IN`` names its library."""

import os
from collections import Counter
from pathlib import Path

import pytest
import stand_in
import torch
from tiers import is_of_today
from torch.nn.attention import SDPBackend, sdpa_kernel

LIBRARY = os.environ.get("TRAK_LITE_STAND_IN")
if LIBRARY:
    stand_in.load(Path(LIBRARY))


def pytest_collection_modifyitems(config, items):
    counts, left_out = Counter(), set()
    for item in items:
        if LIBRARY and hasattr(item, "callspec"):
            counts[item.function] += 1
            if not is_of_today(counts[item.function]):
                left_out.add(item)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_itemcollected(item):
    if "device" in item.fixturenames and not LIBRARY:
        item.add_marker("cuda")


@pytest.fixture(scope="session")
def library(tmp_path_factory, worker_id):
    """The stand-in, compiled once for all workers of the session; for tests that start processes of their own."""
    base = tmp_path_factory.getbasetemp()
    return stand_in.built((base if worker_id == "master" else base.parent) / "stand_in")


@pytest.fixture
def imitation():
    """The stand-in's operators; for tests of what no other device can be made to do."""
    if not LIBRARY:
        pytest.skip("for the stand-in accelerator, which runs in a process of its own (test_stand_in.py)")
    return torch.ops.stand_in


@pytest.fixture
def device():
    return torch.device("stand_in" if LIBRARY else "cuda", 0)


@pytest.fixture
def second_device(device):
    if torch.get_device_module(device).device_count() < 2:
        pytest.skip("needs two devices")
    return torch.device(device.type, 1)


@pytest.fixture(autouse=True)
def same_attention_everywhere():
    """Fused kernels round in other places: CPU and GPU have different ones."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
