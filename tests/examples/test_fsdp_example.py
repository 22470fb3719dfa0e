"""The example of a sharded model, launched as its users launch it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp.py"


def test_two_ranks_score_as_the_whole_model_does() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    finished = subprocess.run(
        [*launcher, str(SCRIPT)], capture_output=True, text=True, timeout=900, check=False
    )

    assert finished.returncode == 0, finished.stderr
    assert "300 rows scored for 5 targets on 2 ranks" in finished.stdout
