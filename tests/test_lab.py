"""Tests lab/: statistics by hand, the runner, the judges' scores, and timed steps."""

import json
import math
import shutil
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import ROOT, parse_command, read_rows, run_ranks
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab import board, compare, numbers, run, score, step
from lab.frontier import make as frontier
from lab.frontier import report
from toy import make, stories

STORIES = ROOT / "toy" / "stories"


# === compare ===
def test_a_paired_difference_is_students_by_hand():
    leads = pd.Series([0.3, 0.1, 0.2, 0.4, 0.25])
    found = compare.paired(leads, margin=0.1)
    error = leads.std(ddof=1) / np.sqrt(5)
    half = stats.t.ppf(0.975, 4) * error
    assert found[:3] == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    assert found.p == pytest.approx(2 * stats.t.sf(0.25 / error, 4))
    assert found.p_equivalent == pytest.approx(stats.t.cdf((0.25 - 0.1) / error, 4))


@pytest.mark.filterwarnings("ignore")
def test_equal_arms_do_not_differ():
    """Their p was NaN."""
    found = compare.paired(pd.Series([0.0] * 5))
    assert (found.low, found.high, found.p, found.p_equivalent) == (0, 0, 1, 0)


def test_welchs_difference_by_hand():
    first, second = pd.Series([1.0, 2.0, 4.0]), pd.Series([0.5, 0.7, 0.6, 0.9])
    found = compare.welch(first, second, margin=0.5)
    parts = first.var() / 3, second.var() / 4
    error = np.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    mean = first.mean() - second.mean()
    half = stats.t.ppf(0.975, freedom) * error
    assert found[:3] == pytest.approx((mean, mean - half, mean + half))
    assert found.p_equivalent == pytest.approx(stats.t.cdf((mean - 0.5) / error, freedom))


def test_holms_correction_multiplies_and_never_decreases():
    assert compare.holm([0.04, 0.01, 0.03, 0.9]) == pytest.approx([0.09, 0.04, 0.09, 0.9])


def test_arms_are_paired_by_instance_after_seeds_are_averaged():
    rows = pd.read_csv(compare.path_of("sums"))
    rows = rows[(rows.phase == "reported") & rows.arm.isin(["online", "ε 0.2"])]
    means = rows.groupby(["panel", "arm"]).late.mean().unstack()
    leads = means["online"] - means["ε 0.2"]
    assert len(leads) == 5
    found = compare.difference("sums", "sums", "online", "ε 0.2")
    assert found[:3] == pytest.approx((leads.mean(), *stats.ttest_1samp(leads, 0).confidence_interval()))


def test_the_command_prints_every_arm_and_pair(capsys):
    compare.main("gap")
    lines = capsys.readouterr().out.splitlines()
    assert "before training  0.177" in lines[2] and "(online) − (ε 0.2)  0.081 [−0.015, 0.176]" in lines[-1]


def test_every_picture_is_drawn_and_every_committed_picture_is_among_them(tmp_path):
    committed = {path.relative_to(compare.LAB).as_posix() for path in compare.LAB.glob("**/*.png")}
    assert committed == {*compare.PICTURES, "frontier/frontier.png"}
    for draw in (*compare.PICTURES.values(), report.draw):
        figure = draw()
        assert all(ax.has_data() for ax in figure.axes)
        compare.plt.close(figure)


def test_curves_of_mathematics_begin_before_training_and_end_with_the_last_evaluation():
    curves = compare.curves_of_mathematics()
    rows = pd.read_csv(compare.path_of("stale"))
    ends = rows[(rows.phase == "reported") & (rows.arm == "humanline, k=16")]["eval/accuracy"]
    assert sorted(curves["S = 64, humanline, k=16"].iloc[-1]) == sorted(ends) and "S = 1" in curves
    before = compare.before_training("stale", "S = 64", "eval/accuracy")
    assert all((curve.loc[0] == before).all() for curve in curves.values())


# === run and score ===
SHORT = "--num-steps 2 --batch-size 16 --max-new-tokens 8 --eval-samples 4 --engine hf --checkpoint-every 0"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Returns the folder of a study of two runs, of which one fails, after making its runs."""
    folder = tmp_path_factory.mktemp("study")
    lines = [f"touch {folder}/prepared  # a preparation"]
    command = f"python grpo_humanline.py {SHORT} --eval-every 1"
    lines.append(f"toy | humanline | 3 | {command} --seed 7")
    lines.append("toy | wrong | 3 | python grpo_humanline.py --k -1")
    (folder / "runs.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "commit", lambda: "abc1234")
        run.main(folder / "runs.txt", jobs=1, score=True)
    return folder


@pytest.mark.slow
def test_a_study_has_a_row_for_each_run_with_what_repeats_it(study):
    rows = pd.read_csv(study / f"{study.name}.csv").set_index("arm")
    assert (study / "prepared").exists() and list(rows.index) == ["humanline", "wrong"]
    row = rows.loc["humanline"]
    assert (row.panel, row.instance, row.seed, row.commit) == ("toy", 3, 7, "abc1234")
    assert row.torch == version("torch") and row.processor and pd.isna(row.failed)
    assert row["curve"] == pytest.approx((row["eval/reward@1"] + row["eval/reward"]) / 2)
    assert -4 < row.judge < 1 and row.clipped == 0 and row.grad_norm_max > 0
    assert rows.loc["wrong"].failed.startswith("error: --k -1: ")


@pytest.mark.slow
def test_a_study_that_was_stopped_goes_on(study, monkeypatch, capsys):
    monkeypatch.setattr(run, "commit", lambda: "abc1234")
    monkeypatch.setattr(run, "make_row", None)  # no run is left
    run.main(study / "runs.txt")
    assert "2 rows, of which 0 are new" in capsys.readouterr().out


@pytest.mark.slow
def test_a_score_that_fails_is_a_row():
    """It ended the study, whose other runs were made for nothing."""
    row = run.make_row({"command": "true"}, "abc1234", score=True)
    assert row["failed"].startswith("its score: FileNotFoundError")


def test_the_cause_of_a_failed_run_is_its_error_and_not_the_progress_bar():
    """The error stood behind the bar, which was then drawn once more."""
    said = r"5%% 2/40 error: round 3\n5%% 2/40\n"
    row = run.make_row({"command": f"printf '{said}' >&2; false"}, "abc1234", score=False)
    assert row["failed"] == "error: round 3"


def test_a_command_on_two_lines_is_run_once(tmp_path, monkeypatch):
    """Two runs at a time in one folder removed each other's files, and the failed row was not made again."""
    made = []
    monkeypatch.setattr(run, "commit", lambda: "abc1234")
    monkeypatch.setattr(run, "make_row", lambda line, at, score: made.append(line) or line | {"commit": at})
    (tmp_path / "runs.txt").write_text("toy | arm | 1 | true\n" * 2 + "toy | arm | 2 | false\n")
    run.main(tmp_path / "runs.txt", jobs=2)
    assert sorted(line["command"] for line in made) == ["false", "true"]


def test_the_row_of_a_run_is_read_from_its_files(tmp_path):
    """Tests `read_run`. The evaluation before training is no part of the curve."""
    steps = []
    for i, (norm, high, accuracy) in enumerate([(1, 0, 0.1), (5, 0.5, 0.2), (2, 0, 0.5), (3, 0, None)]):
        step = {"step": i, "grad_norm": norm, "humanline/clipped_low": 0.25, "humanline/clipped_high": high}
        steps.append(step | ({"eval/accuracy": accuracy} if accuracy else {}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (tmp_path / "args.json").write_text(json.dumps({"seed": 3, "lr": 0.1}))
    (tmp_path / "summary.json").write_text(json.dumps({"after": {"eval/accuracy": [0.8, 0.7, 0.9]}}))
    wanted = {"seed": 3, "lr": 0.1, "eval/accuracy": 0.8, "clipped": 0.375, "grad_norm_max": 5}
    wanted |= {"curve": 0.5, "late": 0.65}
    wanted |= {"eval/accuracy@1": 0.2, "eval/accuracy@2": 0.5, "eval/accuracy@4": 0.8}
    assert run.read_run(tmp_path) == pytest.approx(wanted)


def test_the_score_of_samples_is_the_judges_mean_and_an_unfinished_bouquet_costs_1(tmp_path):
    """Tests `score_samples` with the samples of the last evaluation alone, without greedy answers."""
    flowers = ["rose lily tulip daisy iris aster poppy violet", "ivy ivy"]
    last = {"step": 4, "prompt": "for queen", "greedy": False, "finished": True}
    samples = [last | {"step": 0, "sample": "ivy"}, last | {"sample": "ivy", "greedy": True}]
    samples += [last | {"sample": flowers[0]}, last | {"sample": flowers[1], "finished": False}]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    wanted = fmean(make.judge_bouquet("for queen", text) for text in flowers) - 0.5
    assert score.score_samples(tmp_path, "toy/bouquets/policy") == {"judge": pytest.approx(wanted)}
    game = {
        "step": 4,
        "prompt": "2 45",
        "sample": "<think>\n\n</think>\n<answer>\n2\n</answer>",
        "greedy": False,
    }
    (tmp_path / "samples.jsonl").write_text(json.dumps(game))  # the judge gives 0 to an unfinished sample
    assert score.score_samples(tmp_path, "toy/shell_game/policy") == {"judge": 1}


def test_the_judge_of_a_run_is_that_of_its_instance():
    tale = ("about cat", "the old cat sees the red dog slowly .")
    judges = [score.judge_of(f"runs/instances/{seed}/tales/policy")(*tale) for seed in (3, 0)]
    assert judges == [make.another_instance(3).judge(*tale), make.judge_tale(*tale)]
    assert judges[0] != judges[1]


def plain_logps(folder, ids: list[int], first: int) -> list[float]:
    """Computes the log-probs of ids[first:] with transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logps[:-1].gather(1, torch.tensor(ids[1:])[:, None])[first - 1 :, 0].tolist()


def test_the_score_of_a_story_is_what_plain_transformers_finds_in_the_samples(monkeypatch):
    """Judge and finished come from the first samples, KL from the second, by the sampled ids."""
    initial = AutoModelForCausalLM.from_pretrained(STORIES / "policy").eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES / "policy")
    model, _ = stories.load_base()
    prompts = [row["prompt"] for row in read_rows(STORIES / "prompts_test.jsonl.gz")[:8]]
    drawn = []
    sample_ids = stories.sample_ids

    def sample_and_note(*args, **how):
        drawn.append((how, sample_ids(*args, **how)))
        return drawn[-1][1]

    monkeypatch.setattr(stories, "sample_ids", sample_and_note)
    found = score.score_story(model, initial, tokenizer, prompts)
    (how, first), (plain, second) = drawn
    assert (how, plain) == ({"temperature": 0.7, "top_p": 0.95}, {}) and len(first) == len(second) == 8
    rows = stories.as_rows(tokenizer, prompts, first)
    assert found["judge"] == pytest.approx(fmean(stories.judge_story(*row) for row in rows))
    assert found["finished"] == fmean(row[2] for row in rows)

    def total(folder, completions) -> float:
        """Returns the log-prob of all completions."""
        pairs = [(tokenizer(prompt).input_ids, ids) for prompt, ids in zip(prompts, completions)]
        return sum(sum(plain_logps(folder, prompt + ids, len(prompt))) for prompt, ids in pairs)

    kl = total(stories.BASE, second) - total(STORIES / "policy", second)
    assert found["kl"] == pytest.approx(kl / 8, abs=1e-3)


@pytest.mark.slow
def test_a_run_on_stories_is_scored(tmp_path):
    flags = f"--model {STORIES}/policy --dataset {STORIES}/preferences_test.jsonl.gz --lr 1e-3 --engine hf"
    flags += " --max-prompt-length 32 --max-length 96 --max-new-tokens 48 --batch-size 16 --num-steps 2"
    run_ranks(1, [f"{flags} --output-dir {tmp_path}/run".split()], script="grpo_humanline")
    score.main(tmp_path / "run")
    found = json.loads((tmp_path / "run" / "score.json").read_text())
    assert 0 < found["kl"] < 5 and 0 < found["judge"] < 1 and found["finished"] > 0.5


# === step ===
RUN = [
    "--model",
    str(ROOT / "toy" / "bouquets" / "policy"),
    "--pairs",
    "8",
    "--lr",
    "1e-3",
    "--beta",
    "0.5",
    "--max-grad-norm",
    "1",
]
RUN += ["--rounds", "1", "--steps", "1"]


def measure(monkeypatch, *flags) -> dict[str, list[dict]]:
    """Measures steps. Returns {arm: the metrics of its steps}."""
    found = {}
    run_arm = step.run_arm

    def keep(own, kind, checkout, *rest):
        name = kind if checkout == ROOT else "other"
        found[name] = run_arm(own, kind, checkout, *rest)
        return found[name]

    monkeypatch.setattr(step, "run_arm", keep)
    monkeypatch.setattr(step, "__spec__", step.__spec__)
    step.measure(*step.parse([*RUN, *flags]))
    return found


def test_an_arm_is_the_script_with_its_flags(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "launch", lambda ranks, words, folder: words)
    own, _, flags = step.parse([*RUN, "--script", "kto"])
    for arm, added in (("offline", ["--no-humanline"]), ("k=4", ["--humanline", "--k=4"])):
        script, *words = step.run_arm(own, arm, Path("/old"), flags, tmp_path)
        assert script == "/old/kto_humanline.py" and words[: len(flags)] == flags
        assert words[len(flags) :] == [f"--output-dir={tmp_path}", *added]


@pytest.fixture
def other_checkout(tmp_path):
    """Returns a checkout in which DPO's loss is doubled."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "support", tmp_path / "support")
    loss = "-F.logsigmoid(chosen - rejected)"
    text = (tmp_path / "dpo_humanline.py").read_text()
    assert text.count(loss) == 1
    (tmp_path / "dpo_humanline.py").write_text(text.replace(loss, f"2 * {loss}"))
    return str(tmp_path)


@pytest.mark.slow
def test_trl_trains_on_the_same_tokens_and_another_checkout_runs_its_own_code(
    monkeypatch, capsys, other_checkout
):
    """The first gradient depends on every token, mask and weight. The second loss depends on the update."""
    arms = measure(monkeypatch, "--arms", "k=1", "--trl", "--against", other_checkout)
    ours, theirs, trl = arms["k=1"], arms["other"], arms["TRL 4"]
    assert trl[0]["grad_norm"] == pytest.approx(ours[0]["grad_norm"], rel=1e-5) and ours[0]["grad_norm"] > 0.1
    for step_of_trl, step_of_ours in zip(trl, ours, strict=True):
        assert step_of_trl["loss"] == pytest.approx(step_of_ours["loss"], rel=1e-3)
    assert theirs[0]["loss"] == pytest.approx(2 * ours[0]["loss"], rel=1e-6)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = ["| k=1", f"| k=1 in {other_checkout}", "| TRL, 4 pairs"]
    assert [line.split(" | ")[0] for line in table[1:]] == names
    assert " | 1.000 | 1.000 |" in table[1]


# === frontier ===
def test_every_arm_of_frontier_has_nine_settings_that_its_script_takes(tmp_path, monkeypatch, capsys):
    for objective, arm in frontier.ARMS:
        chosen = frontier.settings(objective, arm)
        assert len(set(chosen)) == 9
        assert Counter(words.split("--lr ")[1] for words in chosen) == dict.fromkeys(frontier.RATES, 3)
        for line in frontier.lines(objective, arm, chosen[0], [3]):
            words = line.split(" | ", 3)[3].split()[3:]  # after `python -m lab.steps`
            if words[0] == "paper/variants.py":
                words = [f"{words[2]}.py", *words[3:]]
            _, args = parse_command(["python", *words], tmp_path, monkeypatch)
            assert args.num_steps == 120 and args.dataset.startswith("lab/board/3/")
            assert args.humanline == (arm not in ("plain", "online"))
            assert args.online == (arm == "online")


def test_frontier_chooses_setting_and_step_by_the_mean_judge_within_the_limit():
    rows = []
    runs = (("a", (0.5, 0.6, 0.7), 10), ("b", (0.9, 0.9, 0.3), 19), ("c", (0.9, 0.9, 0.9), 21))
    for words, judges, kl in runs:
        for draw, judge in zip((3, 4, 5), judges):
            row = {"words": words, "instance": draw}
            for at in board.STEPS:
                row |= {f"judge@{at}": judge - abs(at - 60) / 1000, f"kl@{at}": kl}
            rows.append(row)
    one_draw = {f"{name}@{at}": 1.0 for at in board.STEPS for name in ("judge", "kl")}
    table = pd.DataFrame([*rows, {"words": "d", "instance": 3} | one_draw])
    assert frontier.ranked(table, (3, 4, 5), 20)[0][1:] == ("b", 60)
    far = frontier.ranked(table, (3, 4, 5), math.inf)
    assert [words for _, words, _ in far] == ["c", "b", "a"]
    assert far[0] == (pytest.approx(0.9), "c", 60)
    assert {words for _, words, _ in frontier.ranked(table, [3], 20)} == {"a", "b", "d"}


@pytest.fixture
def clear():
    """Lets lab.frontier.report read its rows anew, before a test, after it and when it is called."""

    def clear():
        for cached in (frontier.rows_of, report.choice, report.values, report.tests):
            cached.cache_clear()

    clear()
    yield clear
    clear()


def test_frontier_compares_arms_at_their_choices_and_a_broken_run_as_the_untrained_policy(
    tmp_path, monkeypatch, capsys, clear
):
    """In made-up rows, judge and KL grow over the steps. KL passes 20 nats at step 60.

    A draw changes the judge by an amount whose mean over the twelve draws is 0.
    """
    monkeypatch.setattr(frontier, "FOLDER", tmp_path)
    monkeypatch.setattr(compare, "LAB", tmp_path)
    monkeypatch.setattr(board, "FOLDER", tmp_path)
    (tmp_path / "board.csv").write_text(",".join(board.COLUMNS) + "\n")
    slopes = {"plain": 2, "sync only": 3, "both": 3, "online": 4}
    rows = []

    def add(objective, arm, words, draws, slope):
        for line in frontier.lines(objective, arm, words, draws):
            panel, arm, draw, command = line.split(" | ", 3)
            row = {"panel": panel, "arm": arm, "instance": int(draw), "command": command}
            row |= {"commit": "HEAD", "failed": ""}
            change = slope * ((int(draw) // 2 if arm == "both" else int(draw)) % 2 - 0.5) / 100
            for at in board.STEPS:
                row |= {f"judge@{at}": 0.3 + slope * at / 1000 + change, f"kl@{at}": at / 3.0}
                row |= {f"finished@{at}": 1.0, f"trigrams@{at}": 0.5}
            rows.append(row)

    for objective, arm in frontier.ARMS:
        for words in frontier.settings(objective, arm):
            add(objective, arm, words, board.TUNING, slopes.get(arm, 1) + ("1e-3" in words) / 10)
        best = [words for words in frontier.settings(objective, arm) if "1e-3" in words]
        for words in best:
            add(objective, arm, words, board.REPORTED, slopes.get(arm, 1))
    for (objective, arm), words in frontier.PAPER.items():
        add(objective, arm, words, board.REPORTED, 1)
    add("all", "before training", frontier.UNTRAINED, board.REPORTED, 0)
    rows = list({row["command"]: row for row in rows}.values())  # as lab.run makes a command once
    broken = [row for row in rows if (row["panel"], row["arm"], row["instance"]) == ("KTO", "plain", 31)]
    for row in broken:
        row["failed"] = "error: broken"
        row |= {f"{metric}@{at}": math.nan for metric in board.METRICS for at in board.STEPS}
    pd.DataFrame(rows).to_csv(tmp_path / "frontier.csv", index=False)

    with pytest.raises(SystemExit, match="error: 1 runs of the part 'first' have no row yet"):
        pd.DataFrame(rows[1:]).to_csv(tmp_path / "frontier.csv", index=False)
        frontier.main("second")
    pd.DataFrame(rows).to_csv(tmp_path / "frontier.csv", index=False)
    for part in ("first", "second", "fixed", "online", "rest"):
        frontier.main(part)
        commands = [line["command"] for line in run.read_study(tmp_path / f"{part}.txt")[1]]
        assert len(commands) == len(set(commands)) and set(commands) <= {row["command"] for row in rows}
    without_online = [row for row in rows if row["arm"] != "online" or row["instance"] < 10]
    pd.DataFrame(without_online).to_csv(tmp_path / "frontier.csv", index=False)
    assert set("ABC") == {letter for letter, _ in report.tests()}
    assert report.cells("DPO", "online", "far") == ["–"] * 4
    clear()
    pd.DataFrame(rows).to_csv(tmp_path / "frontier.csv", index=False)
    report.main()
    found = report.tests()
    assert found["A", "DPO"][0].mean == pytest.approx(0.060) and found["B", "DPO"][0].mean == pytest.approx(
        0.120
    )
    assert found["B", "KTO"][0].mean == pytest.approx(0.120 + 0.250 / 12)
    assert found["C", "GRPO"][0].mean == pytest.approx(0) and found["D", "GRPO"][0].mean == pytest.approx(
        0.120
    )
    printed = capsys.readouterr().out
    assert "broken: KTO, plain, draw 31: error: broken" in printed
    assert "| DPO, plain | `dpo_humanline.py --no-humanline --beta 0.1 --lr 1e-3`, step 60 |" in printed
    assert "| KTO, paper, humanline |" in printed and (tmp_path / "frontier.png").exists()
    made_up = {name: numbers.Number(*value[:4]) for name, value in report.numbers().items()}
    monkeypatch.setattr(numbers, "look_up", made_up.__getitem__)
    links = numbers.LINKED.findall(printed)
    assert len(links) > 80 and numbers.wrong_numbers(printed) == []
    assert '[**+0.060**](../numbers.csv "frontier/A/DPO")' in printed
    assert numbers.wrong_numbers(printed.replace("**+0.060**", "**+0.061**", 1)) != []
    reported = board.read("board")
    twice = sum(
        words in frontier.settings(objective, "plain" if "plain" in arm else "both")
        for (objective, arm), words in frontier.PAPER.items()
    )
    assert len(broken) == 3 and len(reported) == len(rows) - 3 + 12 * twice
    assert "DPO, sync only" in board.methods(reported, online=False) and "DPO, sync only" in board.table(
        reported
    )
