"""Tests benchmark/step.py at toy size: it runs the scripts, TRL and another checkout on the same data."""

import json
import shutil
from statistics import median

import memory
import pytest
import step
from conftest import ROOT
from transformers import AutoConfig

import utils

PAIRS = step.PAIRS[:8]
TOKENS = sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in PAIRS)
COMPLETION = sum(chosen + rejected for _, chosen, rejected in PAIRS)
RUN = ["--model", "toy", "--pairs", "8", "--lr", "1e-3", "--beta", "0.5", "--max-grad-norm", "1"]


def measure(*flags) -> dict:
    return step.measure([*RUN, *flags])


@pytest.fixture(scope="module")
def found() -> dict:
    return measure("--arms", "k=1", "--trl")


def test_figures_by_hand(found):
    assert json.loads(json.dumps(found)) == found
    assert (found["tokens"], found["completion_tokens"]) == (TOKENS, COMPLETION)
    ours, trl = found["arms"].values()
    for arm in (ours, trl):
        assert len(arm["seconds"]) == 4 and len(arm["loss"]) == 3  # two rounds; one round with its first step
        assert arm["tokens_per_second"] == pytest.approx(TOKENS / median(arm["seconds"]))
        assert 0 < arm["efficiency"] < 1 and 0.2 < arm["peak"] < 4 and arm["cpu"] > sum(arm["seconds"]) / 2
    assert ours["time"] == ours["memory"] == 1
    assert trl["time"] == median(b / a for a, b in zip(ours["seconds"], trl["seconds"]))
    assert trl["memory"] == trl["peak"] / ours["peak"]


def test_trl_trains_on_the_same_tokens(found):
    """The first gradient depends on every token, mask and weight. The second loss depends on the update."""
    ours, trl = found["arms"].values()
    assert trl["grad_norm"][0] == pytest.approx(ours["grad_norm"][0], rel=1e-5) and ours["grad_norm"][0] > 0.1
    assert trl["loss"][:2] == pytest.approx(ours["loss"][:2], rel=1e-3) and ours["loss"][1] < 0.5


def test_two_ranks_and_arms_do_what_they_are_named_for(found, capsys):
    """Both arms have the same reference up to the second step. Then offline's reference is behind."""
    one = found["arms"]["k=1"]
    two = measure("--arms", "k=1", "offline", "--ranks", "2", "--steps", "3")["arms"]
    for arm in two.values():
        assert arm["loss"][:2] == pytest.approx(one["loss"][:2], rel=1e-3)
    assert two["k=1"]["loss"][2] == pytest.approx(one["loss"][2], rel=1e-3)
    assert two["offline"]["loss"][2] < 0.5 * one["loss"][2]
    turns = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if line.endswith("] s")]
    assert turns == ["k=1", "offline"] * 2


@pytest.mark.parametrize("preset", memory.PRESETS)
def test_every_preset_trains_with_one_layer(preset, monkeypatch):
    """In a folder of Qwen2, transformers replaced the tokenizer, and the rows lost their words."""
    layers = memory.SHAPE.index("num_hidden_layers")
    shape = list(memory.PRESETS[preset])
    shape[layers] = 1
    for name, size in {"vocab_size": 600, "hidden_size": 96, "intermediate_size": 96, "head_dim": 16}.items():
        shape[memory.SHAPE.index(name)] = size
    monkeypatch.setitem(memory.PRESETS, preset, tuple(shape))
    flags = ["--pairs", "2", "--together", "2", "--arms", "k=1", "--rounds", "1", "--steps", "1"]
    found = step.measure(["--model", preset, "--dtype", "float32", *flags])
    assert found["arms"]["k=1"]["grad_norm"][0] > 0 and found["model"] == preset


def test_several_arms_of_trl_and_kto():
    flags = ["--script", "kto", "--arms", "k=1", "--rounds", "1", "--steps", "1", "--trl"]
    ours, two, four = measure(*flags, "--trl-together", "2", "4")["arms"].items()
    assert (two[0], four[0]) == ("TRL, 2 pairs", "TRL, 4 pairs")
    expected = ours[1]
    for _, arm in (two, four):  # at first the policy is the reference, so every z_0 is 0
        assert arm["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-4)
        assert arm["grad_norm"][0] == pytest.approx(expected["grad_norm"][0], rel=1e-4)


def test_grpo():
    (arm,) = measure("--script", "grpo", "--arms", "k=1", "--rounds", "1", "--steps", "1")["arms"].values()
    assert len(arm["seconds"]) == 1 and arm["grad_norm"][0] > 0


def test_an_arm_of_another_checkout_runs_its_own_code(tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "support", tmp_path / "support")
    loss = "-F.logsigmoid(chosen - rejected)"
    text = (tmp_path / "dpo_humanline.py").read_text()
    assert text.count(loss) == 1
    (tmp_path / "dpo_humanline.py").write_text(text.replace(loss, f"2 * {loss}"))
    flags = ["--arms", "offline", "--rounds", "1", "--steps", "1", "--against", str(tmp_path)]
    arms = measure(*flags)["arms"]
    assert list(arms) == ["offline", f"offline in {tmp_path}"]
    ours, theirs = arms.values()
    assert theirs["loss"][0] == pytest.approx(2 * ours["loss"][0], rel=1e-6)


@pytest.mark.parametrize("kto, each", [(False, 8), (True, 12)])
def test_flops_by_hand(kto, each):
    config = AutoConfig.for_model(**dict(zip(memory.SHAPE, memory.PRESETS["llama-26m"])))
    decoder = 8 * (4 * 384 * 384 + 3 * 384 * 1024 + 2 * 384) + 384
    assert step.needed_flops(config, 7, 3, kto) == each * (decoder * 7 + 32000 * 384 * 3)


def test_what_is_refused_and_an_arm_that_fails():
    for flags, told in (
        ("--arms k=0", "--arms k=0: an arm is offline or k=N"),
        ("--script grpo --trl", "--trl needs --script dpo or kto"),
        ("--trl --pairs 16 --trl-together 8 3", "must divide --pairs"),
        ("--arms k=1 --lr -1", f"k=1 in {ROOT}: error: --lr -1.0 is out of range"),
    ):
        with pytest.raises(utils.InputError) as error:
            measure(*flags.split())
        assert told in str(error.value)
