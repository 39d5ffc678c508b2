"""Tests tools/: memory, faults that the check of a GPU finds, two runs side by side, and curves."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import PAIRS, ROOT, metrics, read_rows, run_here, run_ranks, write_rows
from transformers import AutoModelForCausalLM

import dpo_humanline
import utils
from support import run
from tools import compare, cuda_check, curves, memory, questions, scripts

PARAMETERS = {  # published
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-1.5b": 1_543_714_304,
    "gemma-2-27b": 27_227_128_320,
}
GIB = 2**30


# === memory ===
@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_published_parameters(preset):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scripts.read_config(preset))
    assert model.num_parameters() == PARAMETERS[preset]


@pytest.mark.parametrize("preset", PARAMETERS)
def test_the_page_has_the_calculated_peaks(preset, capsys):
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(rf"^\| {preset}, .*?(\d) GPUs \| ([\d,]+) .*\| ([\d.]+) \|$", page, re.M | re.I)
    assert rows
    for gpus, tokens, peak in rows:
        settings = dict(gpus=int(gpus), micro_batch_tokens=int(tokens.replace(",", "")))
        memory.main(preset, gradient_checkpointing=True, **settings)
        said = capsys.readouterr().out
        assert re.search(r"peak +(\S+)", said)[1] == peak and " fits on " in said


def test_an_engine_has_its_weights_and_its_cache(capsys):
    memory.main("llama-3-8b", gpus=4, engine="hf", sampled_tokens=1000)
    training, sampling = capsys.readouterr().out.split("sampling")
    weights = 2 * PARAMETERS["llama-3-8b"]
    keys_and_values = 2 * 32 * 8 * 128 * 1000  # layers, heads, their size, tokens
    assert f"engine            {weights / GIB:8.2f}" in training
    assert f"engine            {(weights + 2 * keys_and_values) / GIB:8.2f}" in sampling
    memory.main("llama-3-8b", gpus=4, gb=24, engine="vllm", vllm_memory=0.9)
    training, sampling = capsys.readouterr().out.split("sampling")
    assert "engine" not in training and f"engine            {0.9 * 24:8.2f}" in sampling
    assert "does not fit on 4 x 24 GB" in sampling


# === cuda_check ===
LOOP, PRODUCT, SETUP = utils.ATTENTION["loop"], utils.matmul_fp32, run.setup


def off_by_a_tenth(*args, **options):
    output, _ = LOOP(*args, **options)
    return 1.1 * output, None


def other_product(a, b):
    return PRODUCT(a, b) * (1.05 if a.dtype == torch.bfloat16 else 1)


def setup_with_tf32(*arguments):
    torch.set_float32_matmul_precision("high")
    return SETUP(*arguments)


WRONG = {
    "attention": (utils, "ATTENTION", utils.ATTENTION | {"loop": off_by_a_tenth}, "loop|are off by"),
    "head": (utils, "matmul_fp32", other_product, "bf16 off fp32 by"),
    "precision": (run, "setup", setup_with_tf32, "not in full fp32"),
    "sync": (cuda_check.DPO, "sync_reference", lambda *models: None, "the reference is .* nats off"),
}


@pytest.mark.parametrize("row", WRONG)
def test_a_part_that_is_wrong_is_found_and_is_right_here(row, monkeypatch):
    place, name, instead, told = WRONG[row]
    try:
        assert getattr(cuda_check, row)()
        monkeypatch.setattr(place, name, instead)
        with pytest.raises(AssertionError, match=told):
            getattr(cuda_check, row)()
    finally:
        torch.set_float32_matmul_precision("highest")
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("loss", [1.0, 1.001])
def test_a_layout_with_another_loss_is_wrong(loss, tmp_path, monkeypatch):
    same = {"grad_norm": 2, "humanline/log_ratio_abs_mean": 0}
    runs = iter(([{"step": 0, "loss": 1.0} | same], [{"step": 0, "loss": loss} | same]))
    monkeypatch.setattr(cuda_check, "start", lambda *_: next(runs))
    if loss == 1:
        assert "differ by" in cuda_check.same("dpo", tmp_path)
    else:
        with pytest.raises(AssertionError, match="differ by 1e-03"):
            cuda_check.same("dpo", tmp_path)


@pytest.mark.slow
def test_a_run_in_parts_and_its_launches_are_right_here(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cuda_check.main(only=("launches", "dpo"))
    rows = re.findall(r"^\| (\S+).*\| ok \|", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["launches", "dpo,"]


# === curves ===
def test_curves_need_the_folders_of_runs(tmp_path):
    for runs, said in (((), "pass the folder of a run"), ((str(tmp_path),), "has no metrics.jsonl")):
        with pytest.raises(SystemExit, match=said):
            curves.main(runs)


def test_curves_have_what_runs_wrote_and_evaluations_at_both_ends(tmp_path, capsys):
    flags = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--num-steps", "4", "--eval-every", "2"]
    flags += ["--batch-size", "16", "--eval-samples", "0", "--checkpoint-every", "0", "--engine", "hf"]
    folders = [tmp_path / f"run{seed}" for seed in (1, 2)]
    run_ranks(1, [[*flags, "--seed", folder.name[-1], "--output-dir", str(folder)] for folder in folders])
    after = [json.loads((f / "summary.json").read_text())["after"]["eval/margin"][0] for f in folders]
    margins = curves.curve(folders[0], "eval/margin")
    assert margins.to_dict() == {0: 0.0, 2: metrics(folders[0])[2]["eval/margin"], 4: after[0]}
    losses = curves.curve(folders[0], "loss")
    assert losses.tolist() == [line["loss"] for line in metrics(folders[0])]
    curves.main((f"{tmp_path}/run*",), ("eval/margin",), out=tmp_path / "curves.png")
    assert f"{sum(after) / 2:.3f} ± " in capsys.readouterr().out and (tmp_path / "curves.png").exists()
    with pytest.raises(SystemExit, match="has no metric eval/acuracy"):
        curves.curve(folders[0], "eval/acuracy")


# === compare and questions ===
def fake_run(folder: Path, texts: list[tuple], kl: float, by_model: bool = False) -> Path:
    """Writes what a finished run leaves. texts: [(step, prompt, answer, reward, finished), ...]."""
    folder.mkdir()
    lines = []
    for number, prompt, answer, reward, finished in texts:
        row = {"step": number, "prompt": prompt, "finished": finished, "tokens": len(answer)}
        lines.append(row | {"sample": answer, "greedy": not by_model, "reward": reward})
        lines.append(row | {"sample": "other", "greedy": by_model, "reward": None})
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    after = {"eval/reward": [0.0, 0.0, 1], "eval/kl": [kl, 0.3, 40], "eval/accuracy": [0.9, 0.04, 40]}
    summary = {"before": {"eval/kl": [0.0, 0.0, 40]}, "after": after}
    (folder / "summary.json").write_text(json.dumps(summary))
    steps = [{"step": i, "logps/chosen": -50.0 - i, "logps/rejected": -70.0} for i in range(3)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    return folder


def compare_runs(tmp_path, rewards: list[list[float]], kls=(1.0, 2.0)) -> tuple:
    """Returns the table and the verdict of two runs with these rewards, and their folders."""
    folders = []
    for name, scores, kl in zip("ab", rewards, kls):
        texts = [(0, f"p{i}", "before", 0.0, True) for i in range(len(scores))]
        texts += [(3, f"p{i}", f"{name}<{i}", score, i > 0) for i, score in enumerate(scores)]
        folders.append(fake_run(tmp_path / name, texts, kl))
    runs = [compare.read_run(folder) for folder in folders]
    table = compare.differences(*runs)
    return table, compare.verdict(*runs, table), folders


def test_the_error_of_a_difference_of_scores_is_paired_by_prompt(tmp_path):
    first, second = [i % 7 / 7 for i in range(40)], [i % 7 / 7 + 0.1 + 0.01 * (i % 2) for i in range(40)]
    table, said, folders = compare_runs(tmp_path, [first, second])
    leads = np.subtract(second, first)
    error = leads.std(ddof=1) / math.sqrt(40)
    wanted = [np.mean(first), np.std(first, ddof=1) / math.sqrt(40), np.mean(second)]
    wanted += [np.std(second, ddof=1) / math.sqrt(40), leads.mean(), error]
    assert table.loc["eval/reward"].tolist() == pytest.approx(wanted)
    assert table.loc["eval/finished", "first"] == 39 / 40
    assert table.loc["eval/kl"].tolist() == pytest.approx([1, 0.3, 2, 0.3, 1, 0.3 * math.sqrt(2)])
    assert said == f"{folders[1]} scores 0.10 ± 0.00 more than {folders[0]}"


@pytest.mark.parametrize(
    ("second", "kls", "words"),
    [
        ([1.0] * 40, (1, 30), "went 30.0 nats from the initial model and not 1.0"),
        ([0.0] * 40, (1, 1), "keep the simpler run"),
        ([0.0] * 38 + [1.0, 1.0], (1, 1), "a difference must be above 0.07, two standard errors"),
        ([1.0] * 29, (1, 1), "29 prompts are too few"),
        ([None] * 40, (1, 1), "without SCORE or --reward-model nothing is counted"),
    ],
)
def test_the_verdict_follows_the_rule_of_the_page(second, kls, words, tmp_path):
    first = [None if score is None else 0.0 for score in second]
    _, said, _ = compare_runs(tmp_path, [first, second], kls)
    assert words in said


def test_the_page_of_a_comparison_has_all_answers_escaped_and_the_picture(tmp_path, capsys):
    _, _, folders = compare_runs(tmp_path, [[0.0] * 40, [0.5] * 40])
    for folder, right in zip(folders, ([1, 1, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0, 0, 0])):
        (folder / "questions.json").write_text(json.dumps({"before": [1] * 8, "after": right}))
    compare.main(*folders)
    page = (folders[1] / "compare.html").read_text()
    for i in range(40):
        assert f"<td>a&lt;{i}{' <span' if i == 0 else ''}" in page and f"<td>b&lt;{i}" in page
    assert page.count("data:image/png;base64,iVBOR") == 1 and "other" not in page
    said = capsys.readouterr().out
    assert re.search(r"^right answers +0.875 .* -0.500 ± +0.189$", said, re.MULTILINE)
    assert re.search(r"^… before training +1.000 .* 0.000 ± +0.000$", said, re.MULTILINE)
    assert re.search(r"^verdict: .* but its right answers fell from 1.00 to 0.38$", said, re.MULTILINE)
    assert f"{folders[0]}: a<0\n" in said


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    first = fake_run(tmp_path / "first", [(0, "p0", "x", 0.0, True)], 1.0)
    other = fake_run(tmp_path / "other", [(0, "q", "x", 0.0, True)], 1.0)
    with pytest.raises(utils.InputError, match="other held-out prompts"):
        compare.main(first, other)
    by_model = fake_run(tmp_path / "model", [(0, "p0", "x", 0.0, True)], 1.0, by_model=True)
    with pytest.raises(utils.InputError, match="scored by a reward model"):
        compare.main(first, by_model)
    more = fake_run(tmp_path / "more", [(0, "p0", "x", 0, True), *((3, p, "x", 0, True) for p in "ab")], 1.0)
    with pytest.raises(utils.InputError, match="1 texts before training and 2 after it"):
        compare.main(more, more)
    (first / "summary.json").unlink()
    with pytest.raises(utils.InputError, match="no summary.json"):
        compare.main(first, other)


def test_an_answer_is_right_if_an_accepted_word_stands_in_it_as_a_whole():
    assert questions.is_right(["seven", "7"], "There are 7.") and questions.is_right(["h2o"], "It is H2O")
    assert not questions.is_right(["7"], "There are 17.") and not questions.is_right(["late"], "Chocolate")


def test_no_question_holds_its_answer():
    rows = read_rows(questions.QUESTIONS)
    assert len({row["prompt"] for row in rows}) == 40
    for row in rows:
        assert row["answers"] == [word.lower() for word in row["answers"]]
        assert not questions.is_right(row["answers"], row["prompt"])


def test_right_answers_are_counted_before_and_after_a_run(tmp_path, capsys, monkeypatch):
    """The toy knows one word of an answer by chance; the final model is the initial one."""
    flags = ["--dataset", PAIRS, "--num-steps", "1", "--lr", "0", "--eval-samples", "2"]
    flags += ["--max-prompt-length", "9", "--max-new-tokens", "64"]  # not the limits of the questions
    folder = run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "run")
    rows = [{"prompt": f"for {name}", "answers": ["poppy", "holly"]} for name in ("boy", "queen", "clerk")]
    monkeypatch.setattr(questions, "QUESTIONS", Path(write_rows(tmp_path / "questions.jsonl", rows)))
    questions.main(folder)
    found = json.loads((folder / "questions.json").read_text())
    assert found["before"] == found["after"] and set(found["before"]) == {0, 1}
    mean = sum(found["after"]) / 3
    said = capsys.readouterr().out
    assert f"right answers of 3: {mean:.2f} before, {mean:.2f} after, 0.00 ± 0.00 change" in said
