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


def test_every_script_is_tested_here_or_by_itself() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))

    assert [
        path.stem for path in EXAMPLES.glob("*.py") if f'{path.stem}"' not in tests and path.name not in tests
    ] == []


def test_chosen_halves_train_better_models_than_neighbours_and_random_halves() -> None:
    """The example asserts the other comparisons."""
    accuracy = example("selection").main(epochs=20, seeds=(0, 1))

    assert accuracy["top"].mean() > accuracy["a random half"].mean() + 0.02


def test_rows_chosen_for_three_modules_teach_them_better_than_bm25_and_chance() -> None:
    """The example asserts it."""
    losses = example("selection_lm").main(epochs=6, rows_per_module=20, seeds=(0,), proj_dim=128)

    assert losses["top"].shape == (1,)


def test_a_ported_script_and_the_native_interface_give_the_same_scores() -> None:
    assert example("porting_trak").main(num_train=300, epochs=2, proj_dim=64) < 1e-4


def test_scores_of_an_own_model_output_predict_retraining() -> None:
    assert own_model_output.main(budget=6).lds.low > 0.1


def test_an_own_projector_ranks_train_rows_as_the_gradients_do() -> None:
    few, many = own_projector.main(proj_dims=(64, 1024))

    assert few < many


def test_derivatives_through_training_predict_repetitions_of_the_run(tmp_path: Path) -> None:
    """The example asserts the change of a target without its most helpful rows."""
    verdict = example("unrolled").main(num_train=400, epochs=8, budget=8, out=tmp_path)

    assert verdict.metasmoothness > 0.9
    assert verdict.lds[0][1].mean > 0.9


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of peft with transformers
def test_derivatives_through_a_fine_tuning_of_gpt2_predict_its_repetition() -> None:
    """With LoRA and AdamW."""
    pytest.importorskip("peft", reason="needs transformers and peft (extra: hf)")

    assert example("unrolled_lm").main(pretraining=40, rows_per_module=4, epochs=2) < 0.2


def test_two_ranks_score_as_the_whole_model_does() -> None:
    """The example of a sharded model, launched as its users launch it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*launcher, str(EXAMPLES / "fsdp.py")], capture_output=True, text=True, timeout=900, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "300 rows scored for 5 targets on 2 ranks" in finished.stdout
