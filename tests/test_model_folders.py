"""Model folders that are not what their flag or config.json says, and models whose blocks are nested."""

import json
import shutil

import pytest
import torch
from conftest import PAIRS, TOY, metrics, run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dpo_humanline
import utils
from support import run

RUN = ["--dataset", PAIRS, "--num-steps", "2", "--batch-size", "4", "--checkpoint-every", "0", "--k", "1"]
RUN += ["--engine", "hf", "--max-new-tokens", "4", "--lr", "1e-3", "--dtype", "float64"]


def with_surplus(folder, surplus: dict, **config) -> str:
    """The toy policy with further weights, and another config."""
    shutil.copytree(TOY / "policy", folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | surplus, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return str(folder)


@pytest.fixture
def last_layer() -> tuple[dict, int]:
    """The weights of a further layer of the toy policy, and its number."""
    weights = load_file(TOY / "policy" / "model.safetensors")
    number = json.loads((TOY / "policy/config.json").read_text())["num_hidden_layers"]
    layer = {name: weight for name, weight in weights.items() if ".layers.0." in name}
    return {name.replace(".0.", f".{number}."): weight.clone() for name, weight in layer.items()}, number


def test_weights_that_the_model_does_not_use_are_named(tmp_path, last_layer, one_rank, capsys):
    """A shallower model, or one without its biases, was trained without a word."""
    layer, number = last_layer
    bias = {"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}
    for name, surplus, first in (
        ("layer", layer, f"model.layers.{number}.input_layernorm.weight"),
        ("bias", bias, "model.layers.1.self_attn.q_proj.bias"),
    ):
        model = with_surplus(tmp_path / name, surplus)
        run.load_pretrained(AutoModelForCausalLM, model, "auto", False)
        said = f"--model {model}: {len(surplus)} weights of its files are not used: {first} ...\n"
        assert said in capsys.readouterr().out
    run.load_pretrained(AutoModelForCausalLM, str(TOY / "policy"), "auto", False)
    assert "not used" not in capsys.readouterr().out


def test_a_prediction_head_and_other_extras_stay_allowed(tmp_path, last_layer, one_rank):
    layer, _ = last_layer
    head = {f"mtp.{name.removeprefix('model.')}": weight for name, weight in layer.items()}
    for name, surplus, config in (
        ("mtp", head, {}),
        ("vision", {"vision_tower.layers.0.weight": torch.ones(2)}, {}),
        ("layer", layer, {"num_nextn_predict_layers": 1}),  # as DeepSeek V3 stores it
    ):
        model = with_surplus(tmp_path / name, surplus, **config)
        loaded = run.load_pretrained(AutoModelForCausalLM, model, "auto", False)
        assert {*loaded.state_dict()} == {*load_file(TOY / "policy" / "model.safetensors")}


@pytest.mark.parametrize("flag", ["--model", "--reward-model"])
def test_an_adapter_says_what_to_do(flag, tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text("{}")
    message = f"^{flag} {tmp_path} is an adapter: merge it into its model"
    with pytest.raises(utils.InputError, match=message):
        run.check_folder(flag, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run.check_folder("--reward-model", "")  # no reward model is no folder
    monkeypatch.undo()
    args = dpo_humanline.Args(dataset=PAIRS, model=str(TOY / "policy"))
    setattr(args, flag[2:].replace("-", "_"), str(tmp_path))
    with pytest.raises(utils.InputError, match=message):
        run.check_flags(args, 32)


def test_a_misspelt_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/finall", "./absent", f"{tmp_path}/absent", "../absent", "/absent", "a/b/c", "/a/b"):
        with pytest.raises(utils.InputError, match=f"^--model {name}: there is no such folder$"):
            run.check_folder("--model", name)
    for name in ("gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "runs", "runs/", str(TOY / "policy")):
        run.check_folder("--model", name)


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_blocks_within_blocks_are_sharded(tmp_path, kind):
    """transformers lists Mamba's blocks and the mixers in them as units: the inner ones come first."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, eos_token_id=tokenizer.eos_token_id, pad_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = [*RUN, "--model", str(tmp_path / "model"), "--eval-dataset", PAIRS, "--eval-samples", "2"]
    for ranks in (1, 2):
        run_ranks(ranks, [[*flags, "--output-dir", str(tmp_path / str(ranks))]])
    one, two = (metrics(tmp_path / str(ranks), True) for ranks in (1, 2))
    for a, b in zip(one, two, strict=True):
        # The mixers compute in fp32.
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-6)
    assert one[1]["loss"] != one[0]["loss"]
