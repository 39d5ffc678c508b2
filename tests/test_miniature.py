"""paper/miniature.py: the arms, the statistics, real runs of its own, and the committed results of it."""

import csv
import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT
from scipy import stats
from test_commands import parse

sys.path.insert(0, str(ROOT / "paper"))
import miniature  # noqa: E402

RESULTS = ROOT / "paper" / "results"
# What a figure is about: the only flags in which the arms of a panel may differ, besides the tuned learning
# rate. In figure 1 online takes prompts, and Table 3 widens offline GRPO's ε.
ABOUT = {
    "figure1": {"humanline", "online", "epsilon", "dataset"},
    "figure5": {"clip", "sync"},
    "figure5_dpo": {"clip"},
    "figure6": {"dataset"},
    "figure7": {"humanline", "sample_every", "k", "epsilon"},
    "figure8": {"k"},
    "figure10": {"clip", "sync", "k"},
    "table6": {"log_epsilon_P", "log_epsilon_R"},
}


def read_csv(path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def rows_of(name: str) -> list[dict]:
    return read_csv(RESULTS / f"{name}.csv")


@pytest.mark.parametrize("name", ABOUT)
def test_the_arms_of_a_figure_differ_only_in_the_flags_that_it_is_about(name, tmp_path, monkeypatch):
    assert miniature.FIGURES.keys() == ABOUT.keys()
    panels = {}
    for arm in miniature.FIGURES[name]:
        line = miniature.command(arm, arm.lrs[0], 11)
        *_, training = line.split("&& ")
        _, _, args = parse(shlex.split(training), tmp_path, monkeypatch)
        assert args.seed == 11
        assert args.lr == arm.lrs[0]
        settings = panels.setdefault(arm.panel, [])
        settings.append((arm.script, vars(args)))
    for settings in panels.values():
        (script, first), *others = settings
        for other_script, other in others:
            different = {key for key in first if first[key] != other[key]}
            assert other_script == script
            assert different, "two arms are the same run"
            assert different <= ABOUT[name]


def made_rows(values: dict[tuple, list]) -> list[dict]:
    rows = []
    for (panel, arm), numbers in values.items():
        for seed, number in enumerate(numbers, 11):
            row = {
                "panel": panel,
                "arm": arm,
                "phase": "reported",
                "lr": 1.0,
                "seed": seed,
                "failed": "" if number is not None else "diverged",
            }
            if number is not None:
                row["score"] = number
            rows.append(row)
    return rows


VALUES = {  # None: the run collapsed
    ("A", "ours"): [1.0, 1.2, 0.9, 1.1],
    ("A", "one"): [0.7, 0.2, 0.6, 0.5],
    ("A", "two"): [1.0, 1.3, 0.8, 1.2],
    ("B", "ours"): [2.0, 2.1, 2.2, 2.3],
    ("B", "three"): [1.0, None, 1.2, 1.1],
}


@pytest.fixture
def table() -> dict[tuple, dict]:
    """What is made of VALUES, and of a run for tuning, which counts for nothing."""
    rows = made_rows(VALUES)
    rows.append(rows[0] | {"phase": "tuning", "seed": 1, "score": 99.0})
    lines = miniature.compare(rows, "score")
    return {(line["panel"], line["arm"]): line for line in lines}


def without_none(numbers: list) -> np.ndarray:
    return np.array([number for number in numbers if number is not None])


def test_intervals_are_those_of_the_formula(table):
    for key, numbers in VALUES.items():
        whole = without_none(numbers)
        quantile = stats.t.ppf(0.975, len(whole) - 1)
        error = whole.std(ddof=1) / len(whole) ** 0.5
        half = quantile * error
        line = table[key]
        assert line["mean"] == pytest.approx(whole.mean())
        assert line["low"] == pytest.approx(whole.mean() - half)
        assert line["high"] == pytest.approx(whole.mean() + half)
        assert line["runs"] == 4
        assert line["collapsed"] == 4 - len(whole)


def test_tests_are_welchs_and_corrected_by_holm(table):
    raw = {}
    for key, numbers in VALUES.items():
        panel, arm = key
        line = table[key]
        if arm == "ours":
            assert "p" not in line
            assert not line["against"]
            continue
        # Welch's t and its degrees of freedom, by hand
        values = without_none(numbers)
        base = without_none(VALUES[panel, "ours"])
        a = values.var(ddof=1) / len(values)
        b = base.var(ddof=1) / len(base)
        denominator = a**2 / (len(values) - 1)
        denominator += b**2 / (len(base) - 1)
        freedom = (a + b) ** 2 / denominator
        difference = abs(values.mean() - base.mean())
        t = difference / (a + b) ** 0.5
        raw[key] = 2 * stats.t.sf(t, freedom)
        assert line["p"] == pytest.approx(raw[key])
        assert line["against"] == "ours"
    corrected = 0.0
    hypotheses = len(raw)
    for key in sorted(raw, key=raw.get):  # times the number of hypotheses left, never decreasing
        p = min(1.0, raw[key] * hypotheses)
        corrected = max(corrected, p)
        assert table[key]["p_holm"] == pytest.approx(corrected)
        hypotheses -= 1


TINY = """
import sys; sys.path.insert(0, "paper")
import miniature as m
flags = {"humanline": "", "offline": m.OFFLINE}
m.FIGURES["tiny"] = m.arms("DPO", "dpo", (1e-3, 1e30), flags, "--num-steps 2 --eval-samples 8")
m.main("tiny", 2)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A figure of runs of two steps, in a repository of its own; the folder."""
    folder = tmp_path_factory.mktemp("tiny")
    for path in [*miniature.SCRIPTS, "run.py", "utils.py", "toy", "paper"]:
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, folder / path)
        else:
            shutil.copy(ROOT / path, folder / path)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")
    start(folder, check=True)
    return folder


def git(folder, *words) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *author, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def start(folder, check: bool):
    command = [sys.executable, "-c", TINY]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=check)


def test_a_figure_is_tuned_run_and_written_and_a_collapse_is_a_result(tiny):
    rows = read_csv(tiny / "paper/results/tiny.csv")
    runs = []
    for row in rows:
        runs.append((row["phase"], row["arm"], row["seed"], row["lr"]))
    assert runs == [
        ("tuning", "humanline", "1", "0.001"),
        ("tuning", "humanline", "1", "1e+30"),
        ("tuning", "offline", "1", "0.001"),
        ("tuning", "offline", "1", "1e+30"),
        ("reported", "humanline", "11", "0.001"),
        ("reported", "humanline", "12", "0.001"),
        ("reported", "offline", "11", "0.001"),
        ("reported", "offline", "12", "0.001"),
    ]
    for row in rows:
        collapsed = row["lr"] == "1e+30"
        assert bool(row["failed"]) == collapsed
        assert bool(row["eval/reward"]) != collapsed
    head = git(tiny, "log", "-1", "--format=%h")
    assert {row["commit"] for row in rows} == {head}
    assert (tiny / "paper/results/tiny.png").read_bytes()[:4] == b"\x89PNG"
    judges = []
    for row in rows:
        if row["phase"] == "reported" and row["arm"] == "offline":
            judges.append(float(row["judge"]))
    for line in read_csv(tiny / "paper/results/tiny_arms.csv"):
        if line["arm"] == "offline" and line["metric"] == "judge":
            mean = float(line["mean"])
    assert mean == pytest.approx(np.mean(judges))


def test_the_judge_of_a_row_is_the_hidden_one_and_a_command_repeats_its_numbers(tiny):
    row = read_csv(tiny / "paper/results/tiny.csv")[-1]
    program, *words = shlex.split(row["command"])
    assert program == "python"
    again = [sys.executable, *words, "--output-dir", "runs/again"]
    subprocess.run(again, cwd=tiny, check=True, capture_output=True)
    summary = json.loads((tiny / "runs/again/summary.json").read_text())
    after = summary["after"]
    for key, (mean, _) in after.items():
        assert float(row[key]) == mean
    samples = json.loads((tiny / "runs/again/outputs.json").read_text())
    scores = []
    for sample in samples:
        scores.append(miniature.judge_bouquet(sample["instruction"], sample["output"]))
    unfinished = 1 - after["eval/finished"][0]
    expected = np.mean(scores) - unfinished
    assert float(row["judge"]) == pytest.approx(expected)


def test_a_second_call_runs_nothing_and_writes_the_same_and_changed_code_is_refused(tiny):
    def times() -> dict:
        files = (tiny / "runs/miniature").rglob("*.json*")
        return {file: file.stat().st_mtime_ns for file in files}

    before = times()
    text = (tiny / "paper/results/tiny.csv").read_text()
    start(tiny, check=True)
    assert times() == before
    assert (tiny / "paper/results/tiny.csv").read_text() == text
    with (tiny / "utils.py").open("a") as file:
        file.write("\n")
    refused = start(tiny, check=False)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "commit the changes first" in refused.stderr


def test_the_quarters_hold_the_rows_of_their_log_probs(tmp_path):
    toy = ROOT / "toy" / "bouquets"
    with gzip.open(toy / "preferences_test.jsonl.gz", "rt") as file:
        rows = file.read().splitlines()[:40]
    dropped = json.dumps({"prompt": "for king", "chosen": "rose", "rejected": "rose"})
    lines = [*rows[:3], dropped, *rows[3:]]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    command = [sys.executable, ROOT / "paper/quartiles.py"]
    command += ["--model", toy / "policy"]
    command += ["--dataset", tmp_path / "pairs.jsonl"]
    command += ["--out", tmp_path / "out"]
    subprocess.run(command, capture_output=True, check=True)
    quarters = []
    for i in (1, 2, 3, 4):
        file = tmp_path / "out" / f"quartile{i}.jsonl"
        quarters.append(file.read_text().splitlines())
    assert [len(lines) for lines in quarters] == [10] * 4
    written = []
    for lines in quarters:
        written += [json.dumps(json.loads(line)) for line in lines]
    expected = [json.dumps(json.loads(line)) for line in rows]
    assert sorted(written) == sorted(expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(toy / "policy")
    model = transformers.AutoModelForCausalLM.from_pretrained(toy / "policy").double()
    averages = []
    for lines in quarters:
        rows = [json.loads(line) for line in lines]
        averages.append([average_logp(model, tokenizer, row) for row in rows])
    for low, high in zip(averages, averages[1:]):
        assert max(low) <= min(high)


@torch.no_grad()
def average_logp(model, tokenizer, row: dict) -> float:
    """Of the tokens of the chosen completion."""
    messages = [{"role": "user", "content": row["prompt"]}]
    before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    messages.append({"role": "assistant", "content": row["chosen"]})
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    first = len(tokenizer(before, add_special_tokens=False).input_ids)
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    logits = model(torch.tensor([ids])).logits[0, :-1]
    targets = torch.tensor(ids[1:])[:, None]
    logps = logits.log_softmax(-1).gather(1, targets)
    return logps[first - 1 :].mean().item()


NUMBER = r"[−-]?\d*\.\d+"


def rounds_to(word: str, value: float) -> bool:
    """Whether a number as it is written is the value, to as many places."""
    places = len(word.partition(".")[2])
    written = float(word.replace("−", "-"))
    return abs(written - value) <= 0.5000001 * 10.0**-places


def stray_numbers(text: str, names: list[str]) -> list[str]:
    """The numbers with a decimal point of a text that are not of these figures.

    `a ± b` must be the mean of an arm and half of its interval, any other number the mean of an arm, a
    corrected p, seconds or a score of a timed run, or a number of a study's tests, to as many places.
    """
    known = []
    intervals = []  # (mean, half)
    for name in names:
        for line in read_csv(RESULTS / f"{name}_arms.csv"):
            mean = float(line.get("mean") or "nan")
            low = float(line.get("low") or "nan")
            high = float(line.get("high") or "nan")
            intervals.append((mean, (high - low) / 2))
            for key in ("mean", "p_holm", "target", "seconds", "all_seconds", "judge"):
                known.append(float(line.get(key) or "nan"))
        tests = RESULTS / f"{name}_tests.csv"
        for line in read_csv(tests) if tests.exists() else []:
            for key in ("difference", "low", "high", "p", "p_holm", "p_equivalent"):
                known.append(float(line.get(key) or "nan"))

    text = re.sub(r"`[^`]*`|\([^)\s]*\.\w+\)", "", text)  # code and links
    stray = []
    pattern = rf"({NUMBER}) ± ({NUMBER})"
    for word, width in re.findall(pattern, text):
        halves = [half for mean, half in intervals if rounds_to(word, mean)]
        if not any(rounds_to(width, half) for half in halves):
            stray.append(f"{word} ± {width}")
    rest = re.sub(pattern, "", text)
    for word in re.findall(rf"(?<![\w.]){NUMBER}", rest):
        if not any(rounds_to(word, value) for value in known):
            stray.append(word)
    return stray


def table_rows(page: str) -> list[list[str]]:
    rows = []
    text = (ROOT / page).read_text(encoding="utf-8")
    links = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))  # [f1]: where it leads
    for line in text.splitlines():
        if line.startswith("| "):
            line = re.sub(r"\[(\w+)\](?= \|$)", lambda link: links[link[1]], line)
            cells = line.strip("| ").split(" | ")
            rows.append([cell.strip() for cell in cells])
    return rows


def test_every_number_of_our_results_is_in_a_csv_that_its_row_links():
    rows = [cells for cells in table_rows("docs/replication.md") if "results/" in cells[-1]]
    assert len(rows) >= 12
    for cells in rows:
        names = re.findall(r"results/(\w+?)(?:_arms)?\.csv", cells[-1])
        here = cells[-3]  # then the verdict and the link
        assert names, cells[0]
        assert re.search(r"\d\.\d", here), cells[0]
        assert not stray_numbers(here, names), cells[0]


def test_a_number_that_is_in_no_csv_is_noticed():
    line = read_csv(RESULTS / "figure1_arms.csv")[0]
    mean = float(line["mean"])
    half = float(line["high"]) - mean
    right = f"{mean:.2f} ± {half:.2f}"
    wrong = f"{mean:.2f} ± {half + 0.3:.2f}"
    assert stray_numbers(f"{right}, `0.123`", ["figure1"]) == []
    assert stray_numbers(f"{wrong}, 0.55", ["figure1"]) == [wrong, "0.55"]


COMMITTED = []  # of the studies: test_study.py
for path in sorted(RESULTS.glob("*_arms.csv")):
    name = path.stem.removesuffix("_arms")
    if name in miniature.FIGURES:
        COMMITTED.append(name)


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_results_are_of_the_arms_and_seeds_as_they_are_defined(name):
    rows = rows_of(name)
    arms = {(arm.panel, arm.name): arm for arm in miniature.FIGURES[name]}
    reported = [row for row in rows if row["phase"] == "reported"]
    run = {(row["panel"], row["arm"]) for row in reported}
    assert run == arms.keys()
    assert len(reported) == 5 * len(arms)
    seeds = {"tuning": set(), "reported": set()}
    for row in rows:
        arm = arms[row["panel"], row["arm"]]
        lr = float(row["lr"])
        seed = int(row["seed"])
        assert row["command"] == miniature.command(arm, lr, seed)
        seeds[row["phase"]].add(row["seed"])
    assert not seeds["reported"] & seeds["tuning"]


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_learning_rates_are_the_best_of_their_grids(name):
    tuned_by = "curve" if name == "figure7" else "eval/reward"
    for arm in miniature.FIGURES[name]:
        tuned = {}  # {learning rate: score}
        reported = set()
        for row in rows_of(name):
            if row["panel"] != arm.panel or row["arm"] != arm.name:
                continue
            lr = float(row["lr"])
            if row["phase"] == "tuning":
                tuned[lr] = float(row[tuned_by] or "-inf")
            else:
                reported.add(lr)
        (lr,) = reported
        if len(arm.lrs) == 1:
            assert (lr,) == arm.lrs
            assert not tuned
        else:
            assert lr == max(tuned, key=lambda lr: (tuned[lr], lr))
            assert set(tuned) == set(arm.lrs)


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_statistics_are_those_of_the_committed_rows(name):
    saved = [line for line in read_csv(RESULTS / f"{name}_arms.csv") if line["arm"] != "untrained"]
    metrics = list(dict.fromkeys(line["metric"] for line in saved))
    metric = "eval/accuracy" if name == "figure7" else "eval/reward"
    assert metrics[:2] == [metric, "judge"]
    typed = []
    for row in rows_of(name):
        values = {key: value for key, value in row.items() if value}
        for key in metrics:
            if key in values:
                values[key] = float(values[key])
        typed.append(values)
    again = []
    for key in metrics:
        again += miniature.compare(typed, key)
    for line, other in zip(again, saved, strict=True):
        for key in ("mean", "low", "high", "p", "p_holm"):
            value = float(line.get(key, "nan"))
            committed = float(other[key] or "nan")
            assert committed == pytest.approx(value, nan_ok=True)
