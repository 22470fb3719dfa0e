"""Mixtures of experts of transformers: experts that every token and every row reaches, against a plain loop."""

import hub_models as hub
import numpy as np
import pytest
import torch
from hub_models import transformers
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, IterativeGradientComputer, gradient_reach
from trak_lite.modelout_functions import DPOModelOutput, resolve_task

EXPERTS = 6
ROWS = ([5, 9, 7], [11, 4, 23, 8, 9, 30], [17, 3, 22], [38, 21, 6, 5])
SIZES = {**hub.SIZES, "num_key_value_heads": 1, "num_experts_per_tok": 2}
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
DEEPSEEK = {
    "n_routed_experts": EXPERTS, "moe_intermediate_size": 12, "first_k_dense_replace": 1,
    "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen2_moe": ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 12}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN, "head_dim": 8}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 8}),
}


def mixture(name, experts="eager"):
    kind, settings = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    model = hub.spread(lambda: getattr(transformers, f"{kind}ForCausalLM")(config), by=0.2)
    model.set_experts_implementation(experts)
    return model


def batch_of(rows=ROWS):
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)).long() for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain_gradients(model, row):
    """Of the log-probability of one row alone, without padding."""
    logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
    total = logits.log_softmax(-1)[torch.arange(len(row) - 1), torch.tensor(row[1:])].sum()
    flat = hub.gradients_of(total, model)
    return {name: flat[name].view_as(p) for name, p in model.named_parameters()}


def plain_routing(model, row):
    """Experts of each token of one row, as the blocks around the experts give them: by name of the experts' module."""
    found = {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        inner = module.forward

        def watched(*args, name=name, inner=inner, **kwargs):
            tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
            (chosen,) = (v for v in tensors if v.dtype == torch.int64)
            found[name] = [sorted(token) for token in chosen.tolist()]
            return inner(*args, **kwargs)

        module.forward = watched
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([row]))
    finally:
        for name in found:
            del model.get_submodule(name).forward
    return found


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_report_is_what_a_plain_loop_finds(name, experts):
    model = mixture(name, experts)
    computer = HookGradientComputer(model, resolve_task("causal_language_modeling"))
    gradients = {}
    computer.stream_gradients(batch_of(), lambda block: gradients.update({block.name: block.dense()}))

    reach = gradient_reach(computer, batch_of())

    plain = [plain_gradients(model, row) for row in ROWS]
    fused = [line for line in reach if line.experts is not None]
    assert {line.name.rsplit(".", 1)[1] for line in fused} >= {"gate_up_proj", "down_proj"}
    assert [line.name for line in reach] == [name for name, _ in model.named_parameters()]
    for line in reach:
        expected = [grads[line.name] for grads in plain]
        assert line.rows.tolist() == [bool((grad != 0).any()) for grad in expected], line.name
        assert line.num_zero == sum(not bool((grad != 0).any()) for grad in expected)
        if line.experts is not None:
            assert line.experts.tolist() == [(grad != 0).flatten(1).any(1).tolist() for grad in expected]
        for row, grad in enumerate(expected):
            ours = gradients[line.name][row] if line.name in gradients else torch.zeros(grad.numel()).double()
            atol = 1e-6 * float(grad.abs().max() + 1)
            torch.testing.assert_close(ours, grad.flatten(), rtol=1e-5, atol=atol)
    assert reach.num_zero == sum(line.num_zero for line in reach)
    assert any(not line.experts.all() for line in fused)  # some experts are reached by no token of some row

    for row, ids in enumerate(ROWS):
        routed = plain_routing(model, ids)
        assert set(reach.experts_of_tokens) == set(routed)
        for module, tokens in routed.items():
            found = np.sort(reach.experts_of_tokens[module][row, : len(ids)]).tolist()
            assert found == tokens
            line = reach[f"{module}.down_proj"]
            # The last token predicts nothing, so an expert of it alone has no gradient in the last layer.
            assert set(line.experts[row].nonzero()[0]) <= {expert for token in tokens for expert in token}


def test_a_task_that_calls_the_model_twice_has_the_tokens_of_both_calls():
    model = mixture("olmoe")
    chosen, rejected = batch_of(), batch_of([row[::-1] for row in ROWS])
    sides = {"chosen": chosen, "rejected": rejected}
    batch = {f"{side}_{name}": column for side, part in sides.items() for name, column in part.items()}
    batch |= {f"ref_{side}_logps": torch.zeros(len(ROWS)) for side in sides}
    reach = gradient_reach(HookGradientComputer(model, DPOModelOutput()), batch)
    longest = max(map(len, ROWS))
    for row, ids in enumerate(ROWS):
        for start, tokens in ((0, ids), (longest, ids[::-1])):
            routed = plain_routing(model, tokens)
            for module, expected in routed.items():
                found = reach.experts_of_tokens[module][row, start : start + len(tokens)]
                assert np.sort(found).tolist() == expected


def test_the_table_counts_rows_and_experts():
    model = mixture("qwen3_moe")
    computer = IterativeGradientComputer(
        model, resolve_task("causal_language_modeling"), grad_wrt=["model.layers.0.mlp.*", "lm_head.weight"]
    )
    reach = gradient_reach(computer, batch_of())
    lines = {line.split()[0]: line.split("4 of 4")[1].split() for line in str(reach).splitlines()[1:]}
    name = "model.layers.0.mlp.experts.down_proj"
    assert lines[name] == [str(count) for count in reach[name].experts.sum(0)]
    assert lines["lm_head.weight"] == []
    assert len(lines) == len(reach.parameters) == 4


class TokensFirst(nn.Module):
    """Flattens ``(T, B)`` tokens before its experts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(hub.VOCABULARY, 4)
        self.experts = Experts()

    def forward(self, ids):
        states = self.embed(ids).transpose(0, 1).flatten(0, 1)
        mixed = self.experts(states, (ids.T.flatten() % 3)[:, None])
        return mixed.view(ids.shape[1], ids.shape[0], 4).sum((0, 2))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.up = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, states, chosen):
        return torch.einsum("ni,nij->nj", states, self.up[chosen[:, 0]])


@pytest.mark.quick
def test_tokens_in_another_order_and_empty_batches_are_refused():
    torch.manual_seed(0)
    computer = IterativeGradientComputer(TokensFirst(), resolve_task(lambda call, batch: call(batch[0])))
    with pytest.raises(UnsupportedModelError, match="The order of the tokens in the model is unknown"):
        gradient_reach(computer, (torch.tensor([[0, 3, 2], [1, 4, 7]]),))
    with pytest.raises(InvalidInputError, match="batch is empty"):
        gradient_reach(computer, (torch.zeros(0, 3, dtype=torch.int64),))
