"""The example scripts keep their claims, on less data or for fewer epochs: each asserts its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from late import script

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    return script(EXAMPLES / f"{name}.py")


own_model_output, own_projector = example("own_model_output"), example("own_projector")
TestPoissonModelOutput = own_model_output.TestPoissonModelOutput
TestAchlioptasProjector = own_projector.TestAchlioptasProjector
CLAIMS = {
    "selection": (
        {"epochs": 20, "seeds": (0, 1)},
        lambda accuracy: accuracy["top"].mean() > accuracy["a random half"].mean() + 0.02,
    ),
    "selection_lm": (
        {"epochs": 6, "rows_per_module": 20, "seeds": (0,), "proj_dim": 128},
        lambda losses: losses["top"].shape == (1,),
    ),
    "porting_trak": ({"num_train": 300, "epochs": 2, "proj_dim": 64}, lambda difference: difference < 1e-4),
    "own_model_output": ({"budget": 6}, lambda verdict: verdict.lds.low > 0.1),
    "own_projector": ({"proj_dims": (64, 1024)}, lambda ranks: ranks[0] < ranks[1]),
    "unrolled": (
        {"num_train": 400, "epochs": 8, "budget": 8},
        lambda verdict: verdict.metasmoothness > 0.9 and verdict.lds[0][1].mean > 0.9,
    ),
    "unrolled_lm": ({"pretraining": 40, "rows_per_module": 4, "epochs": 2}, lambda error: error < 0.2),
}
"""Arguments of a script, and what holds of its result beside what it asserts itself."""


def test_every_script_is_tested_here_or_by_itself() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert [name for name in names if f'"{name}"' not in tests and f"{name}.py" not in tests] == []


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of peft with transformers
@pytest.mark.parametrize("name", CLAIMS)
def test_an_example_keeps_what_it_claims(name: str, tmp_path: Path) -> None:
    if name == "unrolled_lm":
        pytest.importorskip("peft", reason="needs transformers and peft (extra: hf)")
    arguments, claim = CLAIMS[name]
    found = example(name).main(**arguments, **({"out": tmp_path} if name == "unrolled" else {}))
    assert claim(found), found


def test_two_ranks_score_as_the_whole_model_does() -> None:
    """The example of a sharded model, launched as its users launch it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*launcher, str(EXAMPLES / "fsdp.py")], capture_output=True, text=True, timeout=900, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "300 rows scored for 5 targets on 2 ranks" in finished.stdout
