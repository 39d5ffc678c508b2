"""Tests the board: what it refuses, what it chooses, its numbers by hand, and a run of its program."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import ROOT, read_rows
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab import board, run, score, steps

STORIES = ROOT / "toy" / "stories"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns an empty folder in place of lab/board."""
    monkeypatch.setattr(board, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "commit", lambda edited: "abc1234")
    return tmp_path


def make_rows(name: str, words: str, draws, judge: dict, kl: dict, seed=0, **columns) -> pd.DataFrame:
    """Returns rows with noise. judge, kl: {step: mean}; all other steps have 0 and 99 nats."""
    rng = np.random.default_rng(seed)
    rows = []
    for draw in draws:
        row = {"name": name, "words": words, "draw": draw, "file": "f", "command": f"{words} {draw}"}
        row |= {"commit": "abc1234", "core": 50 + rng.normal(), "processor": "p"}
        for step in board.STEPS:
            row |= {
                f"judge@{step}": judge.get(step, 0.0) + 0.01 * rng.normal(),
                f"kl@{step}": kl.get(step, 99.0),
            }
            row |= {f"finished@{step}": 0.9, f"trigrams@{step}": 0.4}
        rows.append(row | columns)
    return pd.DataFrame(rows)


def method(name: str, judge: dict, kl: dict, seed: int, **columns) -> pd.DataFrame:
    """Returns the rows of a method with one setting, for tuning and report."""
    words = f"{name}.py --lr 1"
    return make_rows(name, words, [*board.TUNING, *board.REPORTED], judge, kl, seed, **columns)


KL = {8: 1.0, 15: 19.0, 30: 21.0, 45: 50.0}


# === Refusals ===
def test_flags_that_the_board_sets_are_refused_by_name(folder):
    words = ["dpo_humanline.py", "--lr", "1", "--num_steps", "9", "--dataset=x"]
    with pytest.raises(SystemExit, match="error: --dataset, --num-steps: the board sets this; leave it out"):
        board.main(board.Args(), words)
    for wrong in ([], ["no_script.py"], ["--lr", "1"]):
        with pytest.raises(SystemExit, match="error: name a script that exists"):
            board.main(board.Args(), wrong)


def test_a_script_that_fails_has_its_line_and_no_row(folder, capsys):
    with pytest.raises(SystemExit, match="error: no run has ended well"):
        board.main(board.Args(draws=1), ["paper/variants.py", "no-clipping", "dpo_humanline", "--k", "-1"])
    assert "draw 31 does not count: error: --k -1: " in capsys.readouterr().err
    assert not (folder / "mine.csv").exists()


def test_a_run_counts_if_it_is_scored_and_takes_at_most_twice_as_long_as_plain_dpo(
    folder, monkeypatch, capsys
):
    """The time of scoring, 10 s here, tells how fast the processor is."""
    monkeypatch.setattr(board, "PLAIN", {False: 1.5, True: 4.0})
    made = []

    def make_runs(runs, at, jobs):
        for line in runs:
            made.append(line["draw"])
            core = {31: 29.0, 32: 31.0, 33: 1.0}[line["draw"]]
            scores = {} if line["draw"] == 33 else {"judge@120": 0.5, "core": core, "scoring": 10.0}
            yield line | {"failed": ""} | scores

    monkeypatch.setattr(run, "make_rows", make_runs)
    runs = [board.plan(["dpo_humanline.py", "--lr", "1"], draw, "mine") for draw in (31, 32, 33)]
    for _ in range(2):  # a row is not made again, but a run that has none is
        assert list(board.make(runs, online=False, jobs=1).draw) == [31]
    assert made == [31, 32, 33, 32, 33]
    said = capsys.readouterr().err
    assert said.count("draw 32 does not count: error: 31 s of CPU time; the limit is 30 s") == 2
    assert said.count("draw 33 does not count: error: its last step has no score") == 2
    assert list(board.make(runs[:2], online=True, jobs=1).draw) == [31, 32]


# === Choices and numbers ===
def test_the_tuning_chooses_setting_and_step_within_the_limit():
    slow = make_rows("m", "slow", board.TUNING, {15: 0.5, 45: 0.6}, KL)
    fast = make_rows("m", "fast", board.TUNING, {8: 0.3, 30: 0.7}, KL)
    missing = make_rows("m", "two draws", board.TUNING[:2], {8: 0.9}, KL)
    tuned = pd.concat([slow, fast, missing])
    assert board.choose(tuned, 20) == ("slow", 15) and board.choose(tuned, math.inf) == ("fast", 30)
    assert board.choose(missing, 20) is None

    reported = make_rows("m", "fast", range(31, 43), {15: 0.8, 30: 0.4}, KL)
    rows = pd.concat([tuned, reported])
    far, note = board.at_choice(rows, math.inf)  # the twelve draws prefer step 15, which does not matter
    assert list(far.judge) == list(reported["judge@30"]) and list(far.index) == list(range(31, 43))
    assert note == "step 30 of fast, as the tuning has chosen"
    near, note = board.at_choice(rows, 20)
    assert near.empty and note.startswith("step 15 of slow")  # which has not been reported
    some = make_rows("m", "slow", range(31, 34), {15: 0.8}, KL)
    assert board.line_of("m", pd.concat([rows, some]))[2][2] == "–"  # three draws of twelve
    assert board.line_of("m", pd.concat([tuned, some]))[2][3:] == ["–"] * 5  # the other choice was not run
    for untuned in (reported, pd.concat([tuned, reported.assign(file="another version")])):
        far, note = board.at_choice(untuned, math.inf)
        assert list(far.judge) == list(reported["judge@120"]) and "nothing was tuned" in note
        assert board.at_choice(untuned, 20)[0].empty  # the last step is 99 nats away


def test_the_report_has_the_neighbours_and_students_intervals_by_hand(folder, capsys):
    mine = method("mine", {15: 0.50, 45: 0.7}, KL, seed=1)
    others = [method("above", {15: 0.55}, KL, 2), method("far above", {15: 0.9}, KL, 3)]
    others += [method("below", {15: 0.45}, KL, 4), method("far below", {15: 0.1}, KL, 5)]
    others += [method("repeats", {15: 0.52}, KL, 6, **{"trigrams@15": 0.2})]  # no neighbour
    others += [method("eleven", {15: 0.51}, KL, 7)[:-1]]  # a draw is missing
    others[3].to_csv(folder / "mine.csv", index=False)
    board.show_report(mine, "mine", board.methods(pd.concat([*others, mine]), online=False))
    text = capsys.readouterr().out
    head, above, own, below, *_ = text.splitlines()
    assert [line.split("  ")[0] for line in (above, own, below)] == ["above", "your run", "below"]

    scores, theirs = (rows["judge@15"][3:].to_numpy() for rows in (mine, others[0]))
    half = stats.t.ppf(0.975, 11) * scores.std(ddof=1) / math.sqrt(12)
    assert f"{scores.mean():.2f} [{scores.mean() - half:.2f}, {scores.mean() + half:.2f}]" in own
    assert own.split()[2] == "1" and own.split()[-4:] == ["50.0", "0.90", "0.40", "50"]
    leads = scores - theirs
    error = leads.std(ddof=1) / math.sqrt(12)
    half = stats.t.ppf(0.975, 11) * error
    p = 2 * stats.t.sf(abs(leads.mean()) / error, 11)
    shown = f"{leads.mean():.2f} [{leads.mean() - half:.2f}, {leads.mean() + half:.2f}], p = {p:.1g}"
    chosen = "of mine.py --lr 1, as the tuning has chosen"
    assert (
        f"at ≤ 20 nats: step 15 {chosen}\n  your run − above: {shown.replace('-0.', '−0.')} (12 draws)"
        in text
    )
    assert f"at any distance: step 45 {chosen}\n" in text
    assert (
        "your run − far below: " in text and "far above" not in text
    )  # my own other method, such as a control
    assert "repeats" not in text and "eleven" not in text


def test_the_table_has_both_tracks_and_methods_that_repeat_themselves_last(folder):
    rows = [method("good", {15: 0.5}, KL, 1), method("better", {15: 0.6}, KL, 2)]
    rows.append(method("repeats", {15: 0.9}, KL, 3, **{"trigrams@15": 0.2}))
    online = method("samples", {15: 0.7}, KL, 4)
    online["words"] += " --online"
    only_tuned = make_rows("tuned", "tuned", board.TUNING, {15: 0.7}, KL)
    pd.concat([*rows, online, only_tuned]).to_csv(folder / "board.csv", index=False)
    lines = [line.split(" | ")[0].strip("| ") for line in board.table(board.read("board")).splitlines()]
    order = ["better", "good", "*These repeat themselves:*", "repeats", "samples"]
    assert [line for line in lines if line in {*order, "tuned"}] == order


def test_the_page_has_the_table_of_the_committed_rows():
    _, _, rest = (
        (board.FOLDER / "README.md").read_text().partition("<!-- python -m lab.board --table -->\n\n")
    )
    assert rest.partition("<!-- end -->")[0] == board.table(board.read("board"))


def test_every_draw_is_there_and_lacks_the_judges_scores():
    for draw in (*board.TUNING, *board.REPORTED):
        pairs, train, test = (
            pd.read_json(board.FOLDER / str(draw) / f"{name}.jsonl.gz", lines=True)
            for name in ("preferences_train", "prompts_train", "prompts_test")
        )
        assert list(pairs) == ["prompt", "chosen", "rejected"] and len(pairs) == 8192
        assert set(pairs.prompt) == set(train.prompt) and len(train) == 1024
        assert len(test) == 256 and not set(test.prompt) & set(train.prompt)


# === A run ===
@pytest.mark.slow
def test_a_run_is_scored_at_its_steps_and_stays_the_same(tmp_path):
    for name, file in (("prompts_test", "prompts_test"), ("pairs", "preferences_test")):
        (tmp_path / f"{name}.jsonl.gz").symlink_to(STORIES / f"{file}.jsonl.gz")
    flags = f"dpo_humanline.py {board.FIXED.replace('--num-steps 120', '--num-steps 15')} --batch-size 4"
    flags += f" --lr 1e-3 --dataset {tmp_path}/pairs.jsonl.gz --output-dir"
    run.check(run.shell(f"python {flags} {tmp_path}/plain"))
    run.check(run.shell(f"python -m lab.steps {flags} {tmp_path}/scored"))
    folders = (tmp_path / "plain" / "final", tmp_path / "scored" / "final", STORIES / "policy")
    plain, final, initial = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    assert all((a == b).all() for a, b in zip(plain.parameters(), final.parameters(), strict=True))

    found = json.loads((tmp_path / "scored" / "score.json").read_text())
    wanted = {f"{metric}@{step}" for metric in steps.METRICS for step in (8, 15)}
    assert set(found) == {"core", "scoring", *wanted} and min(found["core"], found["scoring"]) > 1
    prompts = [row["prompt"] for row in read_rows(STORIES / "prompts_test.jsonl.gz")]
    tokenizer = AutoTokenizer.from_pretrained(STORIES / "policy")
    torch.set_num_threads(1)  # as in the run, because other sums could give other samples
    again = score.score_story(final, initial, tokenizer, prompts)
    assert [found[f"{metric}@15"] for metric in steps.METRICS] == [again[metric] for metric in steps.METRICS]
    assert found["kl@15"] > found["kl@8"] > 0.01
