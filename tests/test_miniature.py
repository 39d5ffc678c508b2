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
# What a figure is about: the only flags in which the arms of a panel may differ, besides the tuned learning rate.
ABOUT = {
    "figure1": {"humanline", "online", "epsilon", "dataset"},  # online takes prompts; Table 3 widens offline GRPO's ε
    "figure5": {"clip", "sync"},
    "figure5_dpo": {"clip"},
    "figure6": {"dataset"},
    "figure7": {"humanline", "sample_every", "k"},
    "figure8": {"k"},
    "figure10": {"clip", "sync", "k"},
    "table6": {"log_epsilon_P", "log_epsilon_R"},
}


def rows_of(name: str) -> list[dict]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ABOUT)
def test_the_arms_of_a_figure_differ_only_in_the_flags_that_it_is_about(name, tmp_path, monkeypatch):
    assert miniature.FIGURES.keys() == ABOUT.keys()
    panels = {}
    for arm in miniature.FIGURES[name]:
        words = shlex.split(miniature.command(arm, arm.lrs[0], 11).rpartition("&& ")[2])
        _, _, args = parse(words, tmp_path, monkeypatch)
        assert args.seed == 11 and args.lr == arm.lrs[0]
        panels.setdefault(arm.panel, []).append((arm.script, args.__dict__))
    for settings in panels.values():
        (script, first), *others = settings
        different = [{key for key in first if first[key] != other[key]} for _, other in others]
        assert all(name == script for name, _ in others) and all(different), "two arms are the same run"
        assert set().union(*different) <= ABOUT[name]


def made_rows(values: dict[tuple, list]) -> list[dict]:
    rows = []
    for (panel, arm), numbers in values.items():
        for seed, number in enumerate(numbers, 11):
            row = {"panel": panel, "arm": arm, "phase": "reported", "lr": 1.0, "seed": seed}
            rows.append(row | ({} if number is None else {"score": number}))
    return rows


def test_intervals_tests_and_holm_are_those_of_the_formulas():
    values = {("A", "ours"): [1.0, 1.2, 0.9, 1.1], ("A", "one"): [0.7, 0.2, 0.6, 0.5]}
    values |= {("A", "two"): [1.0, 1.3, 0.8, 1.2]}
    values |= {("B", "ours"): [2.0, 2.1, 2.2, 2.3], ("B", "three"): [1.0, None, 1.2, 1.1]}
    tuning = {"panel": "A", "arm": "ours", "phase": "tuning", "lr": 1.0, "seed": 1, "score": 99.0}
    table = {(line["panel"], line["arm"]): line for line in miniature.compare([*made_rows(values), tuning], "score")}
    raw = {}
    for key, numbers in values.items():
        numbers = np.array([number for number in numbers if number is not None])
        half = stats.t.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / len(numbers) ** 0.5
        assert table[key]["mean"] == pytest.approx(numbers.mean())
        assert [table[key]["low"], table[key]["high"]] == pytest.approx([numbers.mean() - half, numbers.mean() + half])
        assert (table[key]["runs"], table[key]["collapsed"]) == (4, 4 - len(numbers))
        if key[1] != "ours":  # Welch's t and its degrees of freedom, by hand
            base = np.array(values[key[0], "ours"])
            a, b = numbers.var(ddof=1) / len(numbers), base.var(ddof=1) / len(base)
            freedom = (a + b) ** 2 / (a**2 / (len(numbers) - 1) + b**2 / (len(base) - 1))
            raw[key] = 2 * stats.t.sf(abs(numbers.mean() - base.mean()) / (a + b) ** 0.5, freedom)
            assert table[key]["p"] == pytest.approx(raw[key]) and table[key]["against"] == "ours"
        else:
            assert "p" not in table[key] and not table[key]["against"]
    smallest, largest = 0.0, len(raw)
    for i, key in enumerate(sorted(raw, key=raw.get)):  # Holm: times the number of hypotheses left, never decreasing
        smallest = max(smallest, min(1.0, raw[key] * (largest - i)))
        assert table[key]["p_holm"] == pytest.approx(smallest)


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
    for path in [*miniature.CODE, "paper"]:
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, folder / path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    start(folder)
    return folder


def start(folder):
    return subprocess.run([sys.executable, "-c", TINY], cwd=folder, capture_output=True, text=True, check=True)


def test_a_figure_is_tuned_run_and_written_and_a_collapse_is_a_result(tiny):
    with (tiny / "paper/results/tiny.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["phase"], row["arm"], row["seed"], row["lr"]) for row in rows] == [
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
        assert bool(row["failed"]) == (row["lr"] == "1e+30") != bool(row["eval/reward"])
    head = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=tiny, capture_output=True, text=True).stdout.strip()
    assert {row["commit"] for row in rows} == {head}
    assert (tiny / "paper/results/tiny.png").read_bytes()[:4] == b"\x89PNG"
    with (tiny / "paper/results/tiny_arms.csv").open(newline="") as file:
        arms = {(line["arm"], line["metric"]): line for line in csv.DictReader(file)}
    judges = [float(row["judge"]) for row in rows if row["phase"] == "reported" and row["arm"] == "offline"]
    assert float(arms["offline", "judge"]["mean"]) == pytest.approx(np.mean(judges))


def test_the_judge_of_a_row_is_the_hidden_one_and_a_command_repeats_its_numbers(tiny):
    with (tiny / "paper/results/tiny.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    command = shlex.split(row["command"])
    assert command[0] == "python"
    again = [sys.executable, *command[1:], "--output-dir", "runs/again"]
    subprocess.run(again, cwd=tiny, check=True, capture_output=True)
    after = json.loads((tiny / "runs/again/summary.json").read_text())["after"]
    assert {key: float(row[key]) for key in after} == {key: mean for key, (mean, _) in after.items()}
    samples = json.loads((tiny / "runs/again/outputs.json").read_text())
    scores = [miniature.judge_bouquet(sample["instruction"], sample["output"]) for sample in samples]
    assert float(row["judge"]) == pytest.approx(np.mean(scores) - (1 - after["eval/finished"][0]))


def test_a_second_call_runs_nothing_and_writes_the_same_and_changed_code_is_refused(tiny):
    runs, csvs = tiny / "runs" / "miniature", tiny / "paper" / "results"
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*.json*")}
    text = (csvs / "tiny.csv").read_text()
    start(tiny)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*.json*")} == before
    assert (csvs / "tiny.csv").read_text() == text
    with (tiny / "utils.py").open("a") as file:
        file.write("\n")
    refused = subprocess.run([sys.executable, "-c", TINY], cwd=tiny, capture_output=True, text=True)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "commit the changes first" in refused.stderr


def test_the_quarters_hold_the_rows_of_their_log_probs(tmp_path):
    toy = ROOT / "toy" / "bouquets"
    rows = gzip.decompress((toy / "preferences_test.jsonl.gz").read_bytes()).decode().splitlines()[:40]
    rows.insert(3, json.dumps({"prompt": "for king", "chosen": "rose", "rejected": "rose"}))  # is dropped
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    flags = ["--model", f"{toy}/policy", "--dataset", tmp_path / "pairs.jsonl", "--out", tmp_path / "out"]
    subprocess.run([sys.executable, ROOT / "paper/quartiles.py", *flags], capture_output=True, check=True)
    quarters = [(tmp_path / "out" / f"quartile{i}.jsonl").read_text().splitlines() for i in (1, 2, 3, 4)]
    assert [len(lines) for lines in quarters] == [10] * 4
    assert sorted(json.dumps(json.loads(line)) for line in sum(quarters, [])) == sorted(
        json.dumps(json.loads(line)) for line in rows[:3] + rows[4:]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(toy / "policy")
    model = transformers.AutoModelForCausalLM.from_pretrained(toy / "policy").double()

    def average(line: str) -> float:
        row = json.loads(line)
        messages = [{"role": "user", "content": row["prompt"]}]
        before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": row["chosen"]}], tokenize=False
        )
        first, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (before, whole))
        with torch.no_grad():
            logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logps.gather(1, torch.tensor(ids[1:])[:, None])[len(first) - 1 :].mean().item()

    averages = [[average(line) for line in lines] for lines in quarters]
    assert all(max(low) <= min(high) for low, high in zip(averages, averages[1:]))


def stray_numbers(text: str, names: list[str]) -> list[str]:
    """The numbers with a decimal point of a text that are not of these figures: `a ± b` must be the mean of an arm and
    half of its interval, any other number the mean of an arm or a corrected p, to as many places."""
    lines = []
    for name in names:
        with (RESULTS / f"{name}_arms.csv").open(newline="") as file:
            lines += list(csv.DictReader(file))
    number = r"[−-]?\d*\.\d+"

    def equal(word: str, value: float) -> bool:
        return abs(float(word.replace("−", "-")) - value) <= 0.5000001 * 10.0 ** -len(word.partition(".")[2])

    def half(line: dict) -> float:
        return (float(line["high"]) - float(line["low"])) / 2

    text = re.sub(r"`[^`]*`|\([^)\s]*\.\w+\)", "", text)  # code and links
    stray = []
    for mean, width in re.findall(rf"({number}) ± ({number})", text):
        if not any(equal(mean, float(line["mean"])) and equal(width, half(line)) for line in lines):
            stray.append(f"{mean} ± {width}")
    for word in re.findall(rf"(?<![\w.]){number}", re.sub(rf"{number} ± {number}", "", text)):
        if not any(equal(word, float(line[key])) for line in lines for key in ("mean", "p_holm") if line[key]):
            stray.append(word)
    return stray


def table_rows(page: str) -> list[list[str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]


@pytest.mark.parametrize(("page", "least", "ours"), [("docs/replication.md", 12, 2), ("README.md", 4, 1)])
def test_every_number_of_our_results_is_in_a_csv_that_its_row_links(page, least, ours):
    rows = [cells for cells in table_rows(page) if "results/" in cells[-1]]
    assert len(rows) >= least
    for cells in rows:
        names, here = re.findall(r"results/(\w+?)(?:_arms)?\.csv", cells[-1]), " ".join(cells[ours:-1])
        assert names and re.search(r"\d\.\d", here), cells[0]
        assert not stray_numbers(here, names), cells[0]


def test_a_number_that_is_in_no_csv_is_noticed():
    line = next(csv.DictReader((RESULTS / "figure1_arms.csv").open(newline="")))
    mean, half = float(line["mean"]), (float(line["high"]) - float(line["low"])) / 2
    right = f"{mean:.2f} ± {half:.2f}"
    assert stray_numbers(f"{right}, `0.123`", ["figure1"]) == []
    assert stray_numbers(f"{mean:.2f} ± {half + 0.3:.2f}, 0.55", ["figure1"]) == [
        f"{mean:.2f} ± {half + 0.3:.2f}",
        "0.55",
    ]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*_arms.csv")), ids=lambda path: path.stem)
def test_the_committed_results_are_of_the_figures_as_they_are_defined(path):
    name = path.stem.removesuffix("_arms")
    rows = rows_of(name)
    reported = [row for row in rows if row["phase"] == "reported"]
    arms = {(arm.panel, arm.name): arm for arm in miniature.FIGURES[name]}
    assert {(row["panel"], row["arm"]) for row in reported} == arms.keys() and len(reported) == 5 * len(arms)
    seeds = {row["phase"]: set() for row in rows}
    for row in rows:
        arm = arms[row["panel"], row["arm"]]
        assert row["command"] == miniature.command(arm, float(row["lr"]), int(row["seed"]))
        seeds[row["phase"]].add(row["seed"])
    assert not seeds["reported"] & seeds.get("tuning", set())
    metric, by = ("eval/accuracy", "curve") if name == "figure7" else ("eval/reward", "eval/reward")
    for arm in arms.values():
        mine = [row for row in rows if (row["panel"], row["arm"]) == (arm.panel, arm.name)]
        tuned = {float(row["lr"]): float(row[by] or "-inf") for row in mine if row["phase"] == "tuning"}
        (lr,) = {float(row["lr"]) for row in mine if row["phase"] == "reported"}
        assert lr == (max(tuned, key=lambda lr: (tuned[lr], lr)) if len(arm.lrs) > 1 else arm.lrs[0])
        assert set(tuned) == (set(arm.lrs) if len(arm.lrs) > 1 else set())
    with path.open(newline="") as file:
        saved = list(csv.DictReader(file))
    metrics = list(dict.fromkeys(line["metric"] for line in saved))
    assert metrics[:2] == [metric, "judge"]
    typed = [{key: float(value) if key in metrics else value for key, value in row.items() if value} for row in rows]
    again = [line for key in metrics for line in miniature.compare(typed, key)]
    for line, other in zip(again, saved, strict=True):
        for key in ("mean", "low", "high", "p", "p_holm"):
            assert float(other[key] or "nan") == pytest.approx(float(line.get(key, "nan")), nan_ok=True)
