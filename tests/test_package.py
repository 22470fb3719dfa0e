"""The package: what a wheel holds, what it needs, and what importing it costs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    script = (
        "import setuptools, sys; sys.argv = ['setup.py', 'egg_info', '--egg-base', OUT, "
        "'build', '--build-base', OUT + '/build', 'bdist_wheel', '--dist-dir', OUT]; "
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py', '__name__': '__main__'})"
    ).replace("OUT", repr(str(out)))
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_a_wheel_builds_with_every_module_and_no_tests(wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]

    assert {name.split("/")[0] for name in names} == {"trak_lite"}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "trak_lite").rglob("*.py")}
    templates = {p.relative_to(ROOT).as_posix() for p in (ROOT / "trak_lite/report/templates").iterdir()}
    assert modules | templates | {"trak_lite/py.typed"} == set(names)
    assert "py3-none-any" in wheel.filename


def test_the_core_needs_six_packages_and_no_compiler(wheel: zipfile.ZipFile) -> None:
    metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    needed = [
        line.removeprefix("Requires-Dist: ")
        for line in wheel.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist") and "extra" not in line
    ]

    assert sorted(needed) == [
        "google-crc32c",
        "numpy",
        "safetensors>=0.7",
        "torch>=2.10",
        "tqdm",
        "zarr>=3.1.3",
    ]


def test_pyproject_holds_tool_settings_only() -> None:
    import tomllib

    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"tool"}


OPTIONAL = {"matplotlib", "pandas", "xarray", "pytest", "triton", "fast_jl", "jsonargparse", "jinja2", "PIL"}
OPTIONAL |= {"markupsafe", "starlette", "uvicorn", "transformers", "peft", "datasets", "accelerate"}
OPTIONAL |= {"lightning"}
SLOW = {"zarr", "zarr.storage", "numcodecs", "fsspec", "obstore", "scipy", "sklearn", "IPython"}
"""Each takes longer to import than this package; what torch imports itself does not count."""
IN_A_NEW_PROCESS = """
import logging, os, signal, sys, threading
import torch
before = set(sys.modules)
import trak_lite
print(*sorted(OPTIONAL & set(sys.modules) | SLOW & (set(sys.modules) - before)), flush=True)
logger = logging.getLogger("trak_lite.run.workspace")
logger.info("not heard")
logger.warning("first")
logging.basicConfig()
logger.warning("second")
from tqdm.auto import tqdm
lock = tqdm.get_lock()
child = os.fork()
if not child:
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
from trak_lite.core.progress import progress_bar
bar = threading.Thread(target=lambda: progress_bar(3, label="x", progress=False), daemon=True)
own = threading.Thread(target=lambda: tqdm(total=3, disable=True), daemon=True)
bar.start()
bar.join(60)
own.start()
own.join(1)
print(bar.is_alive(), own.is_alive(), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on POSIX alone")
def test_importing_is_light_and_quiet_and_a_killed_process_with_tqdms_lock_blocks_no_bar() -> None:
    """Warnings are seen whether logging is configured or not. A kill keeps tqdm's own lock; forks share it."""
    script = IN_A_NEW_PROCESS.replace("OPTIONAL", repr(OPTIONAL)).replace("SLOW", repr(SLOW))
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["", "False True"]
    assert found.stderr == "first\nWARNING:trak_lite.run.workspace:second\n"


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [("huggingface", "transformers", "hf"), ("lightning", "lightning", "lightning")],
)
def test_an_integration_without_its_library_names_the_extra(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"trak_lite.integrations.{module}"
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=rf"needs {library}.*pip install 'trak-lite\[{extra}\]'"):
        importlib.import_module(name)
