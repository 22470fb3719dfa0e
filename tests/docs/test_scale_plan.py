"""The plan for large runs: its arithmetic against a real store and against plain sums, its page, the job files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from test_docs import DOCS, ROOT, TEXTS
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows

sys.path.insert(0, str(DOCS))

import scale_plan
from scale_plan import Assumed, Run

PAGE = TEXTS["scale.md"]


def cells(table: str) -> list[list[str]]:
    """The rows of a marked table of the page."""
    text = re.search(rf"<!-- table: {table} -->\n(.*?)<!-- end -->", PAGE, re.S)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_bytes_chunks_and_files_are_those_of_a_real_store(tmp_path: Path, dtype: str) -> None:
    run = Run(1000, 1, segments=3, width=64, dtype=dtype)
    layers = [nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)]
    made = Attributor(nn.Sequential(*layers), "image_classification", tmp_path, proj_dim=64, dtype=dtype)
    made.featurize(Rows(TensorDataset(torch.randn(1000, 9), torch.arange(1000) % 9), batch_size=250))

    of_chunks = list((tmp_path / "ckpt-0").rglob("c.*"))
    padded = scale_plan.chunks(run) * scale_plan.chunk_rows(run)
    assert sum(path.stat().st_size for path in of_chunks) == padded * scale_plan.row_bytes(run)
    assert sum(path.parent.name == "features" for path in of_chunks) == scale_plan.chunks(run) == 4


def test_hours_are_those_of_plain_arithmetic() -> None:
    """10^8 rows of the GPT on 64 GPUs, K = 2048, from the files of results alone."""
    results = {
        name: json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["parts"]
        for name in ("featurize", "store", "scale_out")
    }
    ratio = results["featurize"]["gpt-512"]["tools"]["trak_lite"]["further_to_plain"]
    look = results["scale_out"]["rates"]["look_ms"] * 1e-3 / 10_000
    claim = results["scale_out"]["rates"]["claim_us"] * 1e-6
    chunks = -(-(10**8) // 16384)  # 64 MiB of 4 KiB each
    turns = -(-chunks // 64)

    found = scale_plan.stages(Run(10**8, 64), scale_plan.measured(), Assumed())

    expected = {
        "gradients": turns * 16384 * ratio * 6 * 124e6 * 512 / 1e14,
        "writing": 10**8 * 4104 / 2e10,
        "claims": turns * (claim + look * chunks),
        "gram": 2 * 10**8 * 2048**2 / 2e13 / 64,
        "all-reduce": 2 * 63 / 64 * 8 * 2048**2 / 1e9,
        "factorisation": 2048**3 / 3 / 2e13,
        "reading": 2 * 10**8 * 4104 / 2e10,
        "scores": 2 * 10**8 * 2048 * 1000 / 3e13 / 64,
        "top rows": 10**11 / 1e10 / 64,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    hours = next(row for row in cells("scale_hours") if row[:2] == ["1e+08", "64"])
    assert hours[2] == f"{found['gradients'] / 3600:.1f} h"


def test_single_processes_are_no_faster_than_was_measured_nor_more_of_them_than_chunks() -> None:
    found = scale_plan.measured()
    one = scale_plan.stages(Run(10**8, 1), found, replace(Assumed(), disk=1e15))
    few, many = (scale_plan.stages(Run(10**6, gpus), found, Assumed()) for gpus in (62, 1024))
    assert one["writing"] == pytest.approx(10**8 * 4104 / found.write)
    assert one["reading"] == pytest.approx(2 * 10**8 * 4104 / found.read)
    assert scale_plan.chunks(Run(10**6, 1)) == 62
    assert "10^6 rows are 62 chunks" in PAGE
    assert few["gradients"] == many["gradients"]


def test_the_page_says_of_every_assumption_that_it_is_one():
    rows = cells("scale_rates")
    assert sum(row[2] == "assumed" for row in rows) == len(fields(Assumed))
    assert {row[2] for row in rows} == {"assumed", "featurize.json", "store.json", "scale_out.json"}


def test_the_script_plans_with_other_numbers(monkeypatch, capsys):
    costs = []
    for price in ("2", "4"):
        arguments = ["scale_plan.py", "--rows", "1e8", "--gpus", "64", "--gpu-price", price]
        monkeypatch.setattr(sys, "argv", arguments)
        scale_plan.main()
        said = capsys.readouterr().out
        assert "410 GB in 6,104 chunks" in said
        costs.append(int(re.search(r"cost ([\d,]+)", said)[1].replace(",", "")))
    assert abs(costs[1] - 2 * costs[0]) <= 1


def test_job_files_are_sound_and_named_on_the_page():
    jobs = sorted((ROOT / "examples/slurm").glob("*.sbatch"))
    assert jobs
    for job in jobs:
        subprocess.run(["bash", "-n", job], check=True)
        assert f"(../../examples/slurm/{job.name})" in TEXTS["scaling.md"]
