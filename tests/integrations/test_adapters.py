"""Checkpoints of PEFT: each active adapter gets its own weights, and they mean what they meant when they were saved."""

import copy
import json
import shutil
from functools import partial

import hub_models as hub
import numpy as np
import pytest
import torch
from hub_models import peft
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.errors import CheckpointError
from trak_lite.gradient_computers import select_parameters

ROWS = TensorDataset(torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def adapted(*names, active=None, scale=1.0, **settings):
    """A model with these adapters, all weights of which are multiplied by ``scale``."""
    model = base()
    layers = {"target_modules": ["0", "2"], "r": 2, "init_lora_weights": False, "lora_alpha": 4}
    config = peft.LoraConfig(**{**layers, **settings})
    model = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    model.set_adapter(active[0] if active else names[0])
    model.base_model.set_adapter(active or names[0])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(scale if "lora" in name else 1)
    return model.double()


def output(call, batch):
    return call(batch[0])[:, 0]


def gradients(model):
    weights = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(model(x[None]).sum(), weights) for (x,) in ROWS]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def attributor_of(path, model):
    return Attributor(model, output, path / "a.zarr", **hub.EXACT)


def check_rows(path, model, checkpoints, saved, number=0):
    attributor_of(path, model).featurize(ROWS, checkpoints)
    expected = gradients(saved)
    found = torch.from_numpy(hub.stored_rows(path / "a.zarr", number))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("names", "active", "kept"),
    [
        (("default", "b"), ["b"], None),
        (("default", "b"), ["default"], None),
        (("default", "b"), ["default", "b"], None),
        (("default", "b"), ["b"], ["b"]),
        (("b", "c"), ["c"], None),
        (("b", "c"), ["b", "c"], None),
    ],
)
def test_active_adapters_get_their_own_weights_from_a_folder(tmp_path, names, active, kept):
    """New targets are scored with them, too: the store names the file, which may be missing beside the folders."""
    saved, model = (adapted(*names, active=active, scale=scale) for scale in (1.0, 2.0))
    saved.save_pretrained(tmp_path / "run" / "checkpoint-1", selected_adapters=kept)
    check_rows(tmp_path, model, tmp_path / "run", saved)
    again = attributor_of(tmp_path / "again", saved)
    again.featurize(ROWS)
    scores = attributor_of(tmp_path, model).score(ROWS)
    np.testing.assert_array_equal(scores.numpy(), again.score(ROWS).numpy())


def test_an_adapter_of_another_name_is_taken_for_the_only_one(tmp_path):
    saved = adapted("b")
    saved.save_pretrained(tmp_path / "run" / "checkpoint-1")
    check_rows(tmp_path, adapted("default", scale=2.0), tmp_path / "run", saved)
    with pytest.raises(CheckpointError, match="Sequential has no adapter"):
        attributor_of(tmp_path / "plain", base().double()).featurize(ROWS, tmp_path / "run")


@pytest.mark.parametrize(
    ("active", "moved", "folder"),
    [
        (["b"], "b", ""),
        (["default", "b"], "b", ""),
        (["default"], "adapter_model.safetensors", ""),
        (["default"], "", "b"),
    ],
)
def test_an_adapter_that_was_not_saved_is_refused(tmp_path, active, moved, folder):
    model = adapted("default", "b", active=active)
    model.save_pretrained(tmp_path / "checkpoint-1")
    if moved:
        shutil.move(tmp_path / "checkpoint-1" / moved, tmp_path / "elsewhere")
    said = r"has the adapters \['default', 'b'\], and .* active. Found \['/"
    with pytest.raises(CheckpointError, match=said):
        attributor_of(tmp_path, model).featurize(ROWS, tmp_path / "checkpoint-1" / folder)


@pytest.mark.parametrize(
    ("here", "match"),
    [
        ({"lora_alpha": 16}, "lora_alpha is 4 there, 16 here"),
        ({"use_rslora": True}, "use_rslora is False there, True here"),
        ({"alpha_pattern": {"2": 9}}, r"alpha_pattern is \{\} there, \{'2': 9\} here"),
        ({"target_modules": "[02]"}, None),
        ({"lora_dropout": 0.5, "bias": "none", "revision": "main"}, None),
    ],
)
def test_settings_that_change_what_an_adapter_computes_are_those_of_its_file(tmp_path, here, match):
    saved = adapted("default")
    saved.save_pretrained(tmp_path / "a")
    model = adapted("default", scale=2.0, **here)
    if match is None:
        check_rows(tmp_path, model, tmp_path / "a", saved)
        return
    said = f"adapter_config.json has other settings .* 'default' .*: {match}"
    with pytest.raises(CheckpointError, match=said):
        attributor_of(tmp_path, model).featurize(ROWS, tmp_path / "a")


def tuned(kind, *, by, **settings):
    """A model with an adapter of any kind, whose trained weights are multiplied by ``by``."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = peft.get_peft_model(base, getattr(peft, f"{kind}Config")(target_modules=["0"], **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn(p.shape, generator=generator) * p.requires_grad)
    return model.double().eval()


LORA, VERA, UNI = {"r": 2}, {"r": 2, "d_initial": 1.0}, {"r": 2, "theta_d_length": 8}
UNSAVED = {**VERA, "save_projection": False}


@pytest.mark.filterwarnings("ignore:Specified to not save:UserWarning")
@pytest.mark.parametrize(
    ("kind", "shared", "there", "here", "match"),
    [
        ("Lora", LORA, {"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa' there, True here"),
        ("Lora", LORA, {}, {"init_lora_weights": "olora"}, "init_lora_weights is True there, 'olora' here"),
        ("Lora", {**LORA, "init_lora_weights": "pissa"}, {}, {}, None),
        ("Lora", {**LORA, "init_lora_weights": "olora"}, {}, {}, None),
        ("Lora", LORA, {"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"}, None),
        ("Lora", LORA, {"exclude_modules": {"2"}, "lora_dropout": 0.5}, {"revision": "main"}, None),
        ("Road", {}, {"group_size": 2}, {"group_size": 4}, "group_size is 2 there, 4 here"),
        ("Miss", LORA, {"init_weights": "bat"}, {}, "init_weights is 'bat' there, True here"),
        ("Vera", UNSAVED, {"projection_prng_key": 1}, {}, "projection_prng_key is 1 there, 0 here"),
        ("Vera", VERA, {"projection_prng_key": 1}, {}, None),
        ("UniLora", UNI, {"proj_seed": 1}, {"proj_seed": 2}, "proj_seed is 1 there, 2 here"),
        ("UniLora", {**UNI, "save_indices": True}, {"proj_seed": 1}, {"proj_seed": 2}, None),
    ],
)
def test_every_setting_is_compared_but_those_that_change_nothing(tmp_path, kind, shared, there, here, match):
    saved = tuned(kind, by=0.5, **shared, **there)
    saved.save_pretrained(tmp_path / "a")
    model = tuned(kind, by=1.0, **shared, **here)
    assert not torch.equal(gradients(model), gradients(saved))
    if match is None:
        check_rows(tmp_path, model, tmp_path / "a", saved)
        return
    with pytest.raises(CheckpointError, match=f"has other settings .*: {match}"):
        attributor_of(tmp_path, model).featurize(ROWS, tmp_path / "a")


def test_settings_that_an_old_version_did_not_save_have_their_defaults(tmp_path):
    saved = adapted("default", lora_alpha=8)
    saved.save_pretrained(tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "alpha_pattern": None, "r": 2.0}))
    check_rows(tmp_path, adapted("default", scale=2.0, lora_alpha=8), tmp_path / "a", saved)
    with pytest.raises(CheckpointError, match="use_rslora is False there, True here"):
        attributor_of(tmp_path, adapted("default", lora_alpha=8, use_rslora=True)).featurize(
            ROWS, tmp_path / "a"
        )
    for broken in ("[1]", '{"peft_type": "NONE"}'):
        config.write_text(broken)
        with pytest.raises(CheckpointError, match="Cannot read the settings of an adapter"):
            attributor_of(tmp_path, saved).featurize(ROWS, tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("AdaLora", {"init_r": 2, "target_r": 1, "total_step": 9}), ("Shira", {"r": 1, "random_seed": 1})],
)
def test_what_an_adapter_has_besides_its_trained_weights_is_the_models(tmp_path, kind, settings):
    saved = tuned(kind, by=0.5, **settings)
    saved.save_pretrained(tmp_path / "a")
    check_rows(tmp_path, tuned(kind, by=1.0, **settings), tmp_path / "a", saved)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = peft.PeftModel.from_pretrained(layers, tmp_path / "a")
    check_rows(tmp_path / "again", model, None, saved)


def test_weights_that_stand_for_other_entries_are_refused(tmp_path):
    tuned("Shira", by=0.5, r=1, random_seed=1).save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"other entries of base_model.model.0 there .*from_pretrained"):
        attributor_of(tmp_path, tuned("Shira", by=1.0, r=1, random_seed=2)).featurize(ROWS, tmp_path / "a")


def test_weights_without_the_adapters_are_refused_as_these(tmp_path):
    made = attributor_of(tmp_path, adapted("default"))
    with pytest.raises(CheckpointError, match=r"weights of the model without its adapters.*adapter_model"):
        made.featurize(ROWS, [base().double().state_dict()])
    with pytest.raises(CheckpointError, match="Build the model that the checkpoint was saved from"):
        made.featurize(ROWS, [{"conv.weight": torch.zeros(3)}])


OF_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = TensorDataset(torch.arange(3, 27).reshape(4, 6))


def last_outputs(call, batch):
    """f of the last positions, which virtual tokens in front of the text do not move."""
    return call(input_ids=batch[0]).logits[:, -4:].log_softmax(-1)[..., 5].sum(1)


def text_gradients(model):
    weights = [p for p in model.eval().parameters() if p.requires_grad]
    rows = [torch.autograd.grad(last_outputs(model, [ids[None]]).sum(), weights) for (ids,) in IDS]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def prompted(kind, seed, **settings):
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)
    return spread_adapter(peft.get_peft_model(hub.made(hub.llama), config), seed)


def with_own_adapter(seed):
    model = hub.made(hub.llama)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return spread_adapter(model, seed)


def spread_adapter(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * p.requires_grad)
    return model.double().eval()


@OF_PEFT
@pytest.mark.parametrize(
    "build", [partial(prompted, "PromptTuning"), partial(prompted, "PrefixTuning"), with_own_adapter]
)
def test_prompts_and_adapters_of_transformers_are_loaded_from_their_folders(tmp_path, build):
    saved = build(1)
    saved.save_pretrained(tmp_path / "a")
    Attributor(build(2), last_outputs, tmp_path / "a.zarr", **hub.EXACT).featurize(IDS, tmp_path / "a")
    found = torch.from_numpy(hub.stored_rows(tmp_path / "a.zarr"))
    torch.testing.assert_close(found, text_gradients(saved), **hub.ROUNDED)


@OF_PEFT
@pytest.mark.parametrize(
    ("build", "task", "rows", "computed"),
    [
        (
            partial(prompted, "PromptEncoder", 1, encoder_hidden_size=4),
            last_outputs,
            IDS,
            "prompt_embeddings",
        ),
        (
            partial(
                tuned, "VBLoRA", by=1.0, r=2, num_vectors=6, vector_length=2, save_only_topk_weights=True
            ),
            output,
            ROWS,
            "vblora_logits_A_topk_weights",
        ),
    ],
)
def test_folders_without_the_trained_weights_say_what_to_save(tmp_path, build, task, rows, computed):
    build().save_pretrained(tmp_path / "a")
    attributor = Attributor(build(), task, None, proj_dim=8, progress=False)
    with pytest.raises(
        CheckpointError, match=rf"has \['.*{computed}'.*\. PEFT saves only what .*model.state_dict\(\)"
    ):
        attributor.featurize(rows, tmp_path / "a")


@pytest.mark.parametrize("name", ["0", "model"])
def test_an_adapter_may_have_the_name_of_a_module_of_the_base_model(tmp_path, name):
    parts = {"target_modules": ["0"], "modules_to_save": ["2"]}
    saved = adapted(name, **parts)
    saved.save_pretrained(tmp_path / "a")
    model = peft.PeftModel.from_pretrained(base().double(), tmp_path / "a" / name, adapter_name=name)
    check_rows(tmp_path, model, None, saved)
    check_rows(tmp_path / "again", adapted(name, scale=2.0, **parts), tmp_path / "a", saved)


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_biases_that_were_trained_with_an_adapter_are_kept_beside_it(tmp_path, bias):
    """PEFT freezes the matrices of an adapter that it loads for inference, and leaves these biases."""
    saved = adapted("default", bias=bias, target_modules=["0"])
    saved.save_pretrained(tmp_path / "a")
    model = peft.PeftModel.from_pretrained(base().double(), tmp_path / "a")
    check_rows(tmp_path, model, None, saved)
    head = next(p for name, p in model.named_parameters() if name.endswith("2.weight"))
    head.requires_grad_()  # trained on top of the frozen adapter
    again = attributor_of(tmp_path / "again", model)
    assert set(again.parameters) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_state_dict_of_the_only_adapter_is_loaded_over_the_models_own_weights(tmp_path):
    """The weights of a checkpoint that was loaded before do not stay below it."""
    saved = adapted("default")
    state = copy.deepcopy(peft.get_peft_model_state_dict(saved))
    before = {name: 2 * value for name, value in saved.state_dict().items()}
    check_rows(tmp_path, adapted("default", scale=2.0), [before, state], saved, 1)
    with pytest.raises(CheckpointError, match=r"without its name, .* adapters \['default', 'b'\]"):
        attributor_of(tmp_path, adapted("default", "b")).featurize(ROWS, [state])
    del state["base_model.model.0.lora_A.weight"]
    with pytest.raises(CheckpointError, match=r"missing: \['base_model.model.0.lora_A.default.weight'\]"):
        attributor_of(tmp_path, adapted("default")).featurize(ROWS, [state])


class WithHeads(nn.Sequential):
    """A base model with a dict whose key is the name of the adapter; its layer is checkpointed."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.heads = nn.ModuleDict({"default": nn.Linear(2, 2)})

    def forward(self, x):
        return self[2](self[1](self[0](x)))


def checkpointed(model):
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return model.double()


def test_names_of_the_base_model_and_of_activation_checkpointing_are_not_those_of_an_adapter(tmp_path):
    config = peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
    saved = peft.get_peft_model(WithHeads(), config).double()
    saved.save_pretrained(tmp_path / "a")
    model = checkpointed(peft.PeftModel.from_pretrained(WithHeads(), tmp_path / "a"))
    check_rows(tmp_path, model, None, saved)
    fresh = checkpointed(peft.get_peft_model(WithHeads(), config))
    check_rows(tmp_path / "again", fresh, tmp_path / "a", saved)


def test_biases_that_are_chosen_by_hand_stay_the_only_ones():
    model = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["0"], r=2, bias="all"))
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    assert all("bias" in name for name in select_parameters(model, None))
