"""Models with weights of their own kind: without a gradient, kept in fp32, missing in the files."""

import shutil

import pytest
import torch
from conftest import PAIRS, TOY, metrics, run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dpo_humanline
import utils
from support import run, sampling

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
EXPERTS = dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=16)
DEEPSEEK = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
DEEPSEEK |= dict(first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16)
DEEPSEEK |= dict(qk_nope_head_dim=16, head_dim=8, n_shared_experts=1)
KINDS = {
    "ernie4_5_moe": SIZES | EXPERTS,
    "deepseek_v3": SIZES | DEEPSEEK,
    "granite": SIZES | dict(logits_scaling=1.02),
    "cohere": SIZES | dict(logit_scale=0.9),
    "gpt_bigcode": dict(n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2),
    "openai-gpt": dict(n_embd=32, n_layer=2, n_head=2, n_positions=128),
}
RUN = ["--num-steps", "4", "--batch-size", "4", "--eval-samples", "0", "--dataset", PAIRS, "--lr", "1e-3"]
RUN += ["--max-new-tokens", "8", "--max-prompt-length", "16", "--max-length", "64", "--checkpoint-every", "2"]


def make(folder, kind: str, dtype=torch.float32) -> str:
    """A tiny random model of a kind, with the toy's tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **KINDS[kind])
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_with_weights_that_get_no_gradient_resumes_bit_for_bit(tmp_path):
    model = make(tmp_path / "model", "ernie4_5_moe")
    flags = [*RUN, "--dtype", "float32", "--model", model]
    run_ranks(2, [[*flags, "--output-dir", str(tmp_path / "run")]])
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    checkpoints = tmp_path / "cut/checkpoints"
    # As a run leaves it that is killed while it writes.
    (checkpoints / "step-4").rename(checkpoints / "unfinished")
    run_ranks(2, [["--resume", str(tmp_path / "cut")]])
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-4"}
    assert metrics(tmp_path / "cut", True) == metrics(tmp_path / "run", True)
    weights = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("cut", "run")]
    assert weights[0] == weights[1]


def test_final_has_what_the_model_keeps_in_fp32_in_fp32(tmp_path):
    model = make(tmp_path / "model", "deepseek_v3", torch.bfloat16)
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    for name in biases:
        weights[name] = torch.linspace(0.1, 0.7, 4)  # no bf16 numbers
    save_file(weights, file, {"format": "pt"})
    run_ranks(1, [[*RUN, "--lr", "0", "--model", model, "--output-dir", str(tmp_path / "run")]])
    final = load_file(tmp_path / "run/final/model.safetensors")
    assert biases and final.keys() == weights.keys()
    for name, tensor in weights.items():
        assert final[name].dtype == tensor.dtype and torch.equal(final[name], tensor), name


@pytest.mark.parametrize("kind", ["gpt_bigcode", "openai-gpt"])
def test_a_weight_that_is_called_like_a_buffer_must_be_there(tmp_path, kind):
    model = make(tmp_path / "model", kind)
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    missing = next(name for name in sorted(weights) if name.endswith("attn.bias"))
    save_file({name: weights[name] for name in weights if name != missing}, file, {"format": "pt"})
    with pytest.raises(utils.InputError, match=f"its files have no {missing}"):
        run.load_pretrained(AutoModelForCausalLM, model, "auto", False)


@pytest.mark.parametrize(("kind", "factor"), [("granite", "logits_scaling"), ("cohere", "logit_scale")])
def test_a_factor_of_the_logits_is_refused_by_name_in_bf16_too(tmp_path, one_rank, kind, factor):
    folder = make(tmp_path / "model", kind, torch.bfloat16)
    model = run.load_pretrained(AutoModelForCausalLM, folder, "auto", False)
    with pytest.raises(utils.InputError, match=f"its logits have a factor, {factor}"):
        utils.choose_attention(model, 64)


def test_a_reward_model_that_does_not_know_the_words_says_so(one_rank):
    judge = sampling.load_reward_model(dpo_humanline.Args(reward_model=str(TOY / "reward_model")))
    sample = utils.Example("what is that", [1], text="nothing that a bouquet has", finished=False)
    with pytest.raises(utils.InputError, match="--reward-model: most tokens of all samples are unknown"):
        sampling.reward_scores(*judge, torch.device("cpu"), "\n", [sample])
