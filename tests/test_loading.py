"""Policy and reference are the model in the files, whatever its architecture and dtype, and take no more
memory than their shards and the files' pages."""

import json
import shutil

import pytest
import torch
from conftest import TOY, run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {},  # tied, with softcaps and a scaled embedding
    "gpt2": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # tied, absolute positions
    "mixtral": {"num_local_experts": 4},
    "mamba": {"state_size": 8},  # its blocks contain further units
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Each model in a bf16 file, and one whose file is fp32 though its config.json says bf16."""
    found = []
    kinds = [(name, torch.bfloat16) for name in MODELS]
    for name, dtype in [*kinds, ("llama", torch.float32)]:
        torch.manual_seed(0)
        found.append(str(tmp_path_factory.mktemp(name)))
        config = AutoConfig.for_model(name, **SIZES | MODELS[name])
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(found[-1])
    path = tmp_path_factory.getbasetemp() / found[-1] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sharded_models_have_the_logits_of_the_unsharded_one_bit_for_bit(folders, ranks):
    run_ranks(ranks, [["compare", folder] for folder in folders], "loading_worker.py")


def test_the_ranks_of_a_machine_share_the_pages_of_the_files(tmp_path):
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    for name, layers in (("model", 12), ("model-small", 1)):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(vocab_size=8000, num_hidden_layers=layers, **sizes), dtype=torch.bfloat16
        )
        model.save_pretrained(tmp_path / name, max_shard_size="80MB")
        AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path / name)
    said = run_ranks(4, [["memory", str(tmp_path / "model")]], "loading_worker.py")
    found = json.loads(next(line for line in said.splitlines() if line.startswith('{"peak"')))
    shutil.rmtree(tmp_path)
    assert found["parameters"] > 1e8
    # The policy takes 4 bytes a parameter, the reference 2, as the files; a whole copy on every rank 8 more.
    assert found["peak"] < 1.2 * (4 + 2 + 2) * found["parameters"]
