"""Published denoisers and the noise schedule of diffusers, against a plain loop over its own ``add_noise``."""

import pytest
import torch
from modelout_cases import check_gradients, identity_of

from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import DiffusionModelOutput

WHY = "diffusion models are tested where their package is installed: pip install diffusers"
diffusers = pytest.importorskip("diffusers", reason=WHY)
SIZE, NUM_CLASSES, TEXT_WIDTH, DRAWS = 8, 10, 24, 2
TIMESTEPS = torch.tensor([[10, 500], [20, 700], [999, 0]])
SMALL = {"sample_size": SIZE, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}


def unet():
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return diffusers.UNet2DModel(**SMALL, down_block_types=down, up_block_types=up)


def unet_with_text():
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    more = {"in_channels": 3, "out_channels": 3, "cross_attention_dim": TEXT_WIDTH, "attention_head_dim": 8}
    return diffusers.UNet2DConditionModel(**SMALL, **more, down_block_types=down, up_block_types=up)


def transformer():
    more = {"in_channels": 3, "out_channels": 3, "num_layers": 2, "num_embeds_ada_norm": NUM_CLASSES}
    more |= {"num_attention_heads": 2, "attention_head_dim": 16, "sample_size": SIZE}
    return diffusers.DiTTransformer2DModel(**more)


CONDITIONS = {
    "encoder_hidden_states": torch.randn(3, 5, TEXT_WIDTH, generator=torch.Generator().manual_seed(2)).double(),
    "class_labels": torch.tensor([3, 0, 9]),
}  # fmt: skip
MODELS = [(unet, ""), (unet_with_text, "encoder_hidden_states"), (transformer, "class_labels")]


@pytest.mark.parametrize(("build", "condition"), MODELS, ids=lambda part: getattr(part, "__name__", ""))
def test_gradients_are_those_of_the_squared_error_under_the_noise_of_the_scheduler(build, condition):
    torch.manual_seed(0)
    model = build().double().eval()
    scheduler = diffusers.DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    levels = scheduler.alphas_cumprod.double()
    task = DiffusionModelOutput(schedule=levels.tolist(), draws=DRAWS)
    more = {condition: CONDITIONS[condition]} if condition else {}
    clean = torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64)
    batch = {"sample": clean, "seed": torch.arange(3), "timestep": TIMESTEPS, **more}
    seen = []
    watch = model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    output = task.evaluate(model, batch).output
    watch.remove()
    expected = torch.zeros(3, dtype=torch.float64)
    for steps, noisy in zip(TIMESTEPS.T, seen, strict=True):
        level = levels[steps].view(-1, 1, 1, 1)
        noise = (noisy - level.sqrt() * clean) / (1 - level).sqrt()
        torch.testing.assert_close(
            scheduler.add_noise(clean, noise, steps), noisy, rtol=0, atol=1e-6
        )  # the scheduler's levels are float32
        assert abs(float(noise.mean())) < 0.15
        assert abs(float(noise.std()) - 1) < 0.15
        expected = expected - 0.5 * (model(noisy, steps, **more).sample - noise).square().sum((1, 2, 3))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=0)
    check_gradients(HookGradientComputer(model, task), batch, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("build", [diffusers.DDPMScheduler, unet])
def test_a_task_that_captures_a_part_of_diffusers_is_the_same_in_every_process(build):
    """The configuration names its defaults in the order of a set, which another process has in another order."""

    def task_of(held):
        return lambda model_call, batch: model_call(held, batch)

    torch.manual_seed(0)
    part = build()
    before = identity_of(task_of(part))
    names = part.config["_use_default_values"]
    part.register_to_config(_use_default_values=names[::-1])
    assert len(names) > 1
    assert identity_of(task_of(part)) == before
    part.register_to_config(prediction_type="another")
    assert identity_of(task_of(part)) != before
