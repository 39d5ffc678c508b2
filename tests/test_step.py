"""benchmark/step.py at toy size: the same work in all arms, ours and TRL's, in turns; figures by hand."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(ROOT / "benchmark"))
import memory  # noqa: E402
import step  # noqa: E402
import step_arm  # noqa: E402

PAIRS = list(zip(step.LENGTHS[::3], step.LENGTHS[1::3], step.LENGTHS[2::3]))[:8]
SEQUENCES = [prompt + side for prompt, *sides in PAIRS for side in sides]
TOKENS, COMPLETION = sum(SEQUENCES), sum(sum(sides) for _, *sides in PAIRS)
RUN = ["--model", "toy", "--lr", "1e-3", "--beta", "0.5", "--max-grad-norm", "1"]
RUNS = {
    "dpo": ["--batch-size", "8", "--arms", "k=1", "--trl", "--steps", "2"],
    "kto": ["--batch-size", "16", "--script", "kto", "--arms", "k=1", "--trl", "--steps", "1"],
    "grpo": ["--batch-size", "16", "--script", "grpo", "--arms", "offline", "--trl", "--steps", "1"],
    "two ranks": ["--batch-size", "8", "--arms", "offline", "--ranks", "2", "--steps", "2"],
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    return {name: step.measure([*RUN, *flags]) for name, flags in RUNS.items()}


def test_all_that_json_prints(found):
    keys = {"seconds", "tokens_per_second", "efficiency", "padding", "sync", "peak", "time", "memory", "idle"}
    keys |= {"loss", "grad_norm", "started", "ended"}
    for name, result in found.items():
        assert set("script model ranks threads dtype device commit versions".split()) < result.keys()
        assert json.loads(json.dumps(result)) == result
        assert (result["tokens"], result["threads"]) == (TOKENS, 1)
        assert result["completion_tokens"] == COMPLETION and result["ranks"] == 1 + (name == "two ranks")
        for arm in result["arms"].values():
            assert arm.keys() - {"mfu"} == keys
            assert len(arm["seconds"]) == result["steps"] == len(arm["loss"]) - 1
            speed = TOKENS / sorted(arm["seconds"])[0], TOKENS / sorted(arm["seconds"])[-1]
            assert speed[1] <= arm["tokens_per_second"] <= speed[0]
            share = result["flops"] / result["flops_per_second"] / result["ranks"] / TOKENS
            assert arm["efficiency"] == pytest.approx(arm["tokens_per_second"] * share)
            assert 0.2 < arm["peak"] < 4 and 0 < arm["efficiency"] < 1
    first, second = found["dpo"]["arms"].values()
    ratios = [b / a for a, b in zip(first["seconds"], second["seconds"])]
    assert second["time"] == pytest.approx(sum(ratios) / 2) and first["time"] == first["memory"] == 1


@pytest.mark.parametrize("script", ["dpo", "kto", "grpo"])
def test_trl_trains_on_the_same_tokens(found, script):
    """The first gradient depends on every token, mask, label and weight; so does the first loss of GRPO, and
    DPO's second. KTO's second has z_0 of a pass there, of the batch here."""
    (name, ours), (other, theirs) = found[script]["arms"].items()
    assert other == "TRL" and ours["grad_norm"][0] == pytest.approx(theirs["grad_norm"][0], rel=1e-5)
    assert ours["loss"][0] == pytest.approx(theirs["loss"][0], rel=1e-5)
    assert ours["grad_norm"][0] > 0.1 and abs(ours["loss"][0]) > 0.01
    if script == "dpo":
        assert ours["loss"][1] == pytest.approx(theirs["loss"][1], rel=1e-3) and ours["loss"][1] < 0.5


def test_two_ranks_do_the_same_work_and_arms_differ_in_what_they_are_named_for(found):
    """Up to the second step all have one reference, and two steps clip nothing."""
    one, two = found["dpo"]["arms"]["k=1"], found["two ranks"]["arms"]["offline"]
    for key in ("loss", "grad_norm"):
        assert two[key][:2] == pytest.approx(one[key][:2], rel=1e-3)
    assert two["loss"][2] < 0.5 * one["loss"][2] and two["sync"] == 0 < one["sync"] < 0.1


def test_an_arm_of_another_checkout_runs_its_own_code(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(ROOT / "benchmark", other / "benchmark")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, other)
    loss = "-torch.nn.functional.logsigmoid(chosen - rejected)"
    text = (other / "dpo_humanline.py").read_text()
    assert text.count(loss) == 1
    (other / "dpo_humanline.py").write_text(text.replace(loss, f"2 * {loss}"))
    flags = ["--batch-size", "8", "--arms", "offline", "--steps", "1", "--against", str(other)]
    result = step.measure([*RUN, *flags])
    assert list(result["arms"]) == ["offline", f"offline in {other}"]
    ours, theirs = result["arms"].values()
    assert theirs["loss"][0] == pytest.approx(2 * ours["loss"][0], rel=1e-6)


def test_one_arm_computes_at_a_time(found):
    """Steps do not overlap."""
    for result in found.values():
        arms = list(result["arms"].values())
        turns = [(arm["started"][i], arm["ended"][i]) for i in range(result["steps"] + 1) for arm in arms]
        assert all(a < b for a, b in turns) and all(a[1] <= b[0] for a, b in zip(turns, turns[1:]))


def test_padding_by_hand(found):
    """GRPOTrainer pads all prompts and all completions of a step, KTOTrainer each pass, of z_0 too."""
    longest = max(prompt for prompt, *_ in PAIRS) + max(max(sides) for _, *sides in PAIRS)
    assert found["grpo"]["arms"]["TRL"]["padding"] == pytest.approx(1 - TOKENS / (16 * longest))
    order = [(prompt, sides[i]) for i in (0, 1) for prompt, *sides in PAIRS]
    passes = [order[first : first + 8] for first in range(0, 16, 8)]
    rotated = [[(x[0], y[1]) for x, y in zip(part, [part[-1], *part])] for part in passes]
    positions = sum(8 * max(map(sum, part)) for part in passes + rotated)
    assert found["kto"]["arms"]["TRL"]["padding"] == pytest.approx(1 - 2 * TOKENS / positions)
    for script in ("dpo", "kto", "grpo"):
        ours, theirs = found[script]["arms"].values()
        assert 0 <= ours["padding"] < theirs["padding"]


@pytest.mark.parametrize("kto, each", [(False, 8), (True, 12)])
def test_flops_by_hand(kto, each):
    config = AutoConfig.for_model(**dict(zip(memory.SHAPE, memory.PRESETS["llama-26m"])))
    flops, attention = step.needed_flops(config, SEQUENCES, COMPLETION, kto)
    assert flops == each * (8 * (4 * 384 * 384 + 3 * 384 * 1024) * TOKENS + 32000 * 384 * COMPLETION)
    assert attention == each * 8 * 384 * sum(length**2 for length in SEQUENCES)


@pytest.mark.parametrize("hidden", [64, 128])
def test_flops_are_those_that_torch_counts(hidden):
    """In a forward pass, a quarter of a step's. Torch counts attention as if it were not causal: twice."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 512}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 32, dtype=torch.long), logits_to_keep=16)
    flops, attention = step.needed_flops(config, [32], 16, False)
    assert counter.get_total_flops() == pytest.approx((flops + 2 * attention) / 4)


def test_an_arm_that_fails_is_told_in_its_own_words(tmp_path):
    with (tmp_path / "log").open("w") as log:
        code = "print('error: no such thing', flush=True); raise SystemExit(1)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=log)
    with pytest.raises(RuntimeError, match="^k=1: error: no such thing$"):
        step_arm.Arm("k=1", process, tmp_path / "log").hear()


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--arms", "k=0"], "--arms k=0: they are offline or k=N"),
        (["--steps", "0"], "--steps are at least 1"),
        (
            ["--trl", "--micro-batch-tokens", "3000", "--batch-size", "16"],
            "--trl: a batch of 16 in 3 equal passes? See --micro-batch-tokens",
        ),
        (["--against", "/nowhere"], "--against /nowhere: it has no benchmark/step_arm.py"),
    ],
)
def test_what_is_refused(flags, told, capsys):
    with pytest.raises(SystemExit):
        step.main(flags)
    assert told in capsys.readouterr().err
