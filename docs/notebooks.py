"""Executes the notebooks of ``examples/`` and stores their outputs in them.

A notebook runs in a kernel of its own, in a temporary copy of ``examples/``. Run after each change of a notebook, or of
what it shows; the tests compare the stored outputs with new ones. Needs nbclient and ipykernel (extra ``dev``).

Run:  python docs/notebooks.py [NAME ...]      (without names: all of them)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

EXAMPLES = Path(__file__).parents[1] / "examples"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""All metadata of a stored notebook: versions and times would differ with every execution."""

ENVIRONMENT = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "OMP_NUM_THREADS": "1"}
"""Another backend of the caller would draw no pictures, and several threads add in another order."""


def execute(name: str, *, more: str = "") -> NotebookNode:
    """Return a notebook of ``examples/`` with new outputs.

    Args:
        name: Name of the notebook, without its extension.
        more: Source of one more cell at the end.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises an exception.
    """
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    if more:
        notebook.cells.append(nbformat.v4.new_code_cell(more))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "examples"
        shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        client = NotebookClient(notebook, km=kernel, timeout=600, record_timing=False, coalesce_streams=True)
        client.execute(
            cwd=str(copy), cleanup_kc=True, env={**os.environ, **ENVIRONMENT, "IPYTHONDIR": folder}
        )
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main(names: list[str]) -> None:
    """Execute the notebooks in place."""
    import nbformat

    for name in names or sorted(path.stem for path in EXAMPLES.glob("*.ipynb")):
        notebook = execute(name)
        nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")
        print(f"executed {name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
