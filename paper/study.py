"""Studies of what the figures could not answer: arms, seeds, tuning and tests, fixed before they were run.

    python paper/miniature.py stale

An arm's learning rate, and what else is tuned, is the best mean of the primary metric over three tuning
seeds, on prompts or problems that the report does not use. Where the best rate is at an end of its grid, the
grid grows by one rate until it is not. A collapsed run counts as the untrained policy's score.
Written are paper/results/NAME.csv (a row per run), NAME_arms.csv (means, intervals), NAME_tests.csv (the
tests fixed here) and NAME.png.
"""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
import torch
from scipy.stats import ttest_1samp
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW
from transformers import AutoModelForCausalLM, AutoTokenizer

from paper import miniature, pictures
from paper.miniature import GRPO, MAIN, ONLINE, WIDE, Arm, arms
from toy import make

TUNING_SEEDS = (1, 2, 3)
LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # by which grids grow
TUNING_TOPICS = "cat|dog|king|girl|boat|drum"  # half of each kind
INSTANCES = (1, 2, 3, 4, 5)


def preparations() -> dict[str, str]:
    """{file or folder of the flags: the command that makes it}."""
    commands = {
        "runs/problems_tuning.jsonl": (
            "mkdir -p runs && "
            "zcat toy/shell_game/problems_test.jsonl.gz | tail -n 244 > runs/problems_tuning.jsonl"
        )
    }
    topics = f"'\"about ({TUNING_TOPICS})\"'"
    for toy in ("tales", "low_entropy"):
        for part, option in {"tuning": "-E", "report": "-vE"}.items():
            file = f"runs/{toy}_{part}.jsonl"
            rows = f"zcat toy/{toy}/preferences_test.jsonl.gz"
            commands[file] = f"mkdir -p runs && {rows} | grep {option} {topics} > {file}"
    for i in INSTANCES:
        folder = f"runs/instances/{i}"
        commands[f"{folder}/"] = f"python toy/make.py --tasks tales --seed {i} --out {folder}"
    return commands


miniature.PREPARE |= preparations()
ON_TALES = ("--eval-dataset runs/tales_tuning.jsonl", "--eval-dataset runs/tales_report.jsonl")
ON_LOW_ENTROPY = (
    "--eval-dataset runs/low_entropy_tuning.jsonl",
    "--eval-dataset runs/low_entropy_report.jsonl",
)
ON_PROBLEMS = ("--eval-dataset runs/problems_tuning.jsonl", "")  # the report's are the first of the test set
CURVE = "--eval-every 32 --eval-samples 128"
FAST = "--dtype float32"  # a step takes half the time of the toys' float64
OWN_BOUND = "--no-humanline --epsilon 1e9"
MARGIN = 0.05  # of the judge, within which arms are on a par


class Study(NamedTuple):
    arms: list[Arm]
    seeds: range  # of the report
    metrics: tuple[str, ...]  # the first is the primary one, by which arms are tuned
    data: tuple[str, str]  # flags of tuning and of reported runs
    test: Callable[[list[dict]], list[dict]]  # of the reported rows
    tuned: list[Arm] = []  # arms of the same scripts and names to tune in the place of `arms`


# === Tests ===
def values(rows: list[dict], panel: str, arm: str, metric: str) -> np.ndarray:
    """Of an arm's reported runs, in the order of their seeds."""
    return np.array([row[metric] for row in rows if (row["panel"], row["arm"]) == (panel, arm)])


def welch(rows: list[dict], panel: str, first: str, second: str, metric: str) -> dict:
    """First - second, with Welch's 95% interval and test; and, for a margin, the larger p of two one-sided
    tests: below 0.05 the difference is within ±MARGIN."""
    means = CompareMeans(
        DescrStatsW(values(rows, panel, first, metric)),
        DescrStatsW(values(rows, panel, second, metric)),
    )
    low, high = means.tconfint_diff(usevar="unequal")
    _, p, _ = means.ttest_ind(usevar="unequal")
    equivalent, *_ = means.ttost_ind(-MARGIN, MARGIN, usevar="unequal")
    line = {"panel": panel, "first": first, "second": second, "metric": metric}
    line |= {"difference": means.d1.mean - means.d2.mean, "low": low, "high": high, "p": p}
    return line | {"p_equivalent": equivalent}


def holm(lines: list[dict]) -> list[dict]:
    """With p corrected over all of the lines."""
    _, corrected, *_ = multipletests([line["p"] for line in lines], method="holm")
    return [line | {"p_holm": p} for line, p in zip(lines, corrected)]


def clipping_test(rows: list[dict]) -> list[dict]:
    """Clipping - none on the mean over both rates, paired by seed."""
    differences = 0
    for panel in ("lr 2e-3", "lr 4e-3"):
        clipping, without = (values(rows, panel, arm, "judge") for arm in miniature.NO_CLIP)
        differences = differences + (clipping - without) / 2
    return [paired("both rates", "clipping", "no clipping", differences)]


def stale_test(rows: list[dict]) -> list[dict]:
    """Humanline against each other arm, at the end and on the mean of the curve."""
    first, *others = STALE
    lines = []
    for metric in ("eval/accuracy", "curve"):
        lines += [welch(rows, "S = 64", first, other, metric) for other in others]
    return holm(lines)


def syncing_test(rows: list[dict]) -> list[dict]:
    """Main effects of syncing, clipping and ε on the judge, by least squares: first - second."""
    data = []
    for row in rows:
        if row["arm"] in PARTS:
            sync, clip, epsilon = row["arm"].split(", ")
            data.append({"judge": row["judge"], "sync": sync, "clip": clip, "epsilon": epsilon})
    formula = "judge ~ C(sync, Treatment('no sync')) + C(clip, Treatment('none')) + C(epsilon)"
    fit = smf.ols(formula, pd.DataFrame(data)).fit()
    intervals = fit.conf_int()
    lines = []
    for first, second in (("k=16", "no sync"), ("clip", "none"), ("ε 0.5", "ε 0.15"), ("ε 2", "ε 0.15")):
        (name,) = [name for name in fit.params.index if name.endswith(f"[T.{first}]")]
        low, high = intervals.loc[name]
        line = {"panel": "GRPO offline", "first": first, "second": second, "metric": "judge"}
        line |= {"difference": fit.params[name], "low": low, "high": high, "p": fit.pvalues[name]}
        lines.append(line)
    return lines


def instances_test(rows: list[dict]) -> list[dict]:
    """Paired by instance, each the mean of its seeds: humanline - offline (Holm over both scripts), and
    online - humanline."""
    lines = []
    for script in ("KTO", "GRPO"):
        means = {}
        for arm in MAIN:
            means[arm] = np.array([values(rows, f"{script} {i}", arm, "judge").mean() for i in INSTANCES])
        humanline, offline, online = (means[arm] for arm in MAIN)
        lines.append(paired(script, "offline + humanline", "offline", humanline - offline))
        lines.append(paired(script, "online", "offline + humanline", online - humanline))
    return holm(lines[::2]) + lines[1::2]


def paired(panel: str, first: str, second: str, differences: np.ndarray) -> dict:
    found = ttest_1samp(differences, 0)
    low, high = found.confidence_interval()
    line = {"panel": panel, "first": first, "second": second, "metric": "judge"}
    return line | {"difference": differences.mean(), "low": low, "high": high, "p": found.pvalue}


def dpo_test(rows: list[dict]) -> list[dict]:
    """Each humanline arm - offline, and online - each."""
    lines = []
    for arm in ("offline + humanline, k=1", "offline + humanline, k=16"):
        lines.append(welch(rows, "DPO", arm, "offline", "judge"))
        lines.append(welch(rows, "DPO", "online", arm, "judge"))
    return holm(lines)


def parity_test(rows: list[dict]) -> list[dict]:
    """Each arm - online, as equivalence."""
    lines = []
    for panel in ("GRPO", "KTO"):
        for arm in PARITY:
            if arm != "online":
                lines.append(welch(rows, panel, arm, "online", "judge"))
    return lines


# === Arms ===
STALE = {  # S = 64 but for the last
    "humanline, k=16": "",
    "ε 0.2": "--no-humanline",
    "ε 0.5": "--no-humanline --epsilon 0.5",
    "ε 0.8": "--no-humanline --epsilon 0.8",
    "clip-higher 1.28": "--no-humanline",
    "clip-higher 1.5": "--no-humanline",
    "CISPO": OWN_BOUND,
    "IcePop": OWN_BOUND,
    "GSPO": "--no-humanline",
    "M2PO": OWN_BOUND,
    "S = 1": "--no-humanline --sample-every 1",
}


def stale_arms() -> list[Arm]:
    made = []
    for arm in arms("S = 64", "grpo_math", (1e-4, 3e-4, 1e-3), STALE, f"{FAST} {CURVE}"):
        variant = arm.name.lower().replace(" ", "-")
        if variant.startswith(("clip-higher", "cispo", "icepop", "gspo", "m2po")):
            arm = arm._replace(program=f"paper/variants.py {variant}")
        if arm.name == "GSPO":  # the paper's is for sequences of thousands of tokens; these have about ten
            arm = arm._replace(options=("--epsilon 4e-4", "--epsilon 0.05", "--epsilon 0.2"))
        made.append(arm)
    return made


def parts() -> dict[str, str]:
    """{name: flags} of the arms of syncing: every combination of its three settings."""
    found = {}
    for sync, flags in {"no sync": "--sync none", "k=16": "--k 16"}.items():
        for clip, unclipped in {"clip": "", "none": "--clip none"}.items():
            for epsilon, wider in {"0.15": "", "0.5": "--epsilon 0.5", "2": "--epsilon 2"}.items():
                found[f"{sync}, {clip}, ε {epsilon}"] = " ".join(f"{flags} {unclipped} {wider}".split())
    return found


PARTS = parts()
PARITY = {
    "offline + humanline, k=16": "--k 16",
    "offline + humanline, k=32": "",  # the default
    "online": ONLINE,
    "online + humanline": "--online",
}

# The toy's settings, which a named --model does not bring.
SETTINGS = {
    "kto": "--num-steps 320 --k 32 --max-new-tokens 64 --generation-batch-size 256 "
    "--beta 2.5 --max-grad-norm 1",
    "grpo": "--num-steps 320 --k 32 --max-new-tokens 64 --generation-batch-size 256",
}


def instance_arms() -> list[Arm]:
    made = []
    for i in INSTANCES:
        folder = f"runs/instances/{i}/tales"
        for arm in MAIN_ARMS:
            rows = "prompts_train" if "--online" in arm.flags else "preferences_train"
            flags = (
                f"--model {folder}/policy --reward-model {folder}/reward_model "
                f"--dataset {folder}/{rows}.jsonl.gz --eval-dataset {folder}/preferences_test.jsonl.gz "
                f"{SETTINGS[arm.script]} {arm.flags}"
            )
            made.append(arm._replace(panel=f"{arm.panel} {i}", flags=flags))
    return made


MAIN_ARMS = [
    *arms("KTO", "kto", (3e-5, 1e-4, 3e-4), MAIN, FAST),
    *arms("GRPO", "grpo", GRPO, MAIN | {"offline": WIDE}, FAST),
]
LOW_ENTROPY = (
    "--model toy/low_entropy/policy --reward-model toy/low_entropy/reward_model "
    f"{FAST} --num-steps 320 --adam-eps 1e-2 --max-new-tokens 80 --generation-batch-size 256"
)
PAIRS = "--dataset toy/low_entropy/preferences_train.jsonl.gz"
PROMPTS = "--dataset toy/low_entropy/prompts_train.jsonl.gz --online"
DPO_ARMS = {
    "offline": f"{PAIRS} --no-humanline",
    "offline + humanline, k=1": f"{PAIRS} --k 1",
    "offline + humanline, k=16": f"{PAIRS} --k 16",
    "online": f"{PROMPTS} --no-humanline",
    "online + humanline, k=16": f"{PROMPTS} --k 16",
}

STUDIES = {
    "instances": Study(
        arms=instance_arms(),
        seeds=range(21, 23),
        metrics=("judge", "eval/reward"),
        data=("--eval-dataset runs/tales_tuning.jsonl", ""),
        test=instances_test,
        tuned=MAIN_ARMS,  # on the committed toy
    ),
    "clipping": Study(
        arms=[
            *arms("lr 2e-3", "grpo", (2e-3,), miniature.NO_CLIP),
            *arms("lr 4e-3", "grpo", (4e-3,), miniature.NO_CLIP),
        ],
        seeds=range(21, 36),
        metrics=("judge", "eval/reward"),
        data=ON_TALES,
        test=clipping_test,
    ),
    "stale": Study(
        arms=stale_arms(),
        seeds=range(21, 31),
        metrics=("curve", "eval/accuracy"),  # at the end two rates may both be near 1
        data=ON_PROBLEMS,
        test=stale_test,
    ),
    "syncing": Study(
        arms=[
            *arms("GRPO offline", "grpo", GRPO, PARTS, FAST),
            *arms("GRPO offline", "grpo", (1e-5, 3e-5, 1e-4), {"k=1": "--k 1"}, FAST),
        ],
        seeds=range(21, 29),
        metrics=("judge", "eval/reward"),
        data=ON_TALES,
        test=syncing_test,
    ),
    "dpo": Study(
        arms=[
            arm._replace(options=("--beta 0.3", "--beta 1", "--beta 10"))
            for arm in arms("DPO", "dpo", (3e-4, 1e-3, 3e-3), DPO_ARMS, LOW_ENTROPY)
        ],
        seeds=range(21, 31),
        metrics=("judge", "eval/reward"),
        data=ON_LOW_ENTROPY,
        test=dpo_test,
    ),
    "parity": Study(
        arms=[
            *arms("GRPO", "grpo", GRPO, PARITY, FAST),
            *arms("KTO", "kto", (3e-5, 1e-4, 3e-4), PARITY, FAST),
        ],
        seeds=range(21, 36),
        metrics=("judge", "eval/reward"),
        data=ON_TALES,
        test=parity_test,
    ),
}


# === Runs ===
def tune(study: Study, scores: dict, at: str) -> tuple:
    """{arm: (rate, option)} with the best mean of the primary metric, and the rows of all tuning runs.

    scores: of the untrained policy, {panel: {metric: score}}, for runs that collapse.
    """
    data, _ = study.data
    grids = {}
    for arm in study.tuned or study.arms:
        if len(arm.lrs) * len(arm.options) > 1:
            grids[arm] = list(arm.lrs)
    while True:
        runs = []
        for arm, lrs in grids.items():
            for lr in lrs:
                for option in arm.options:
                    runs += [(arm, lr, seed, f"{option} {data}") for seed in TUNING_SEEDS]
        rows = run_all(runs, scores, at)
        found = {}  # {arm: {(rate, option): scores}}
        for (arm, lr, _, more), row in zip(runs, rows):
            option = more.removesuffix(f" {data}")
            found.setdefault(arm, {}).setdefault((lr, option), []).append(row[study.metrics[0]])
        best = {}
        grown = False
        for arm, means in found.items():
            best[arm] = max(means, key=lambda choice: np.mean(means[choice]))
            wider = neighbour(best[arm][0], grids[arm])
            if wider:
                grids[arm].append(wider)
                grown = True
        if not grown:
            return best, rows


def neighbour(lr: float, grid: list[float]) -> float | None:
    """The ladder's next rate beyond the end of the grid at which lr is; None if it is at none."""
    i = LADDER.index(lr)
    if lr == max(grid) and i + 1 < len(LADDER):
        return LADDER[i + 1]
    if lr == min(grid) and i > 0:
        return LADDER[i - 1]
    return None


def run_all(runs: list[tuple], scores: dict, at: str) -> list[dict]:
    """The csv's rows; a collapsed run has the untrained policy's scores."""
    rows = miniature.run_rows(runs, at)
    return [row | scores[row["panel"]] if row["failed"] else row for row in rows]


def run_study(name: str, seeds: int = 0):
    """Makes the files of a study. seeds: reported runs of an arm, the first of the plan's; 0: all."""
    study = STUDIES[name]
    at = miniature.commit(name)
    _, data = study.data
    scores = miniature.untrained([*study.tuned, *study.arms], study.metrics, at, data)
    found, rows = tune(study, scores, at)
    best = {(arm.script, arm.name): choice for arm, choice in found.items()}
    runs = []
    for arm in study.arms:
        lr, option = best.get((arm.script, arm.name), (arm.lrs[0], ""))
        runs += [(arm, lr, seed, f"{option} {data}") for seed in study.seeds[: seeds or None]]
    reported = run_all(runs, scores, at)
    if miniature.commit(name) != at:
        miniature.fail(f"the code was changed and committed during the runs; go back to {at}, or start again")

    if name == "dpo":
        for row in reported:
            if not row["failed"]:
                row["kl"] = divergence(miniature.folder_of(row["command"], at))
    table = []
    for metric in study.metrics:
        for line in miniature.compare(reported, metric):
            # The tests are the plan's, in NAME_tests.csv.
            table.append({key: line[key] for key in line if key in miniature.INTERVAL})
    table += miniature.untrained_lines(scores)
    results = miniature.ROOT / "paper" / "results"
    miniature.write_csv(results / f"{name}.csv", rows + reported)
    miniature.write_csv(results / f"{name}_arms.csv", table)
    miniature.write_csv(results / f"{name}_tests.csv", study.test(reported))
    pictures.draw(name)


def divergence(folder: Path) -> float:
    """Mean log π(y) - log π_0(y) of a run's last samples, nats: how far the policy is from the initial one.

    The samples are drawn as in the evaluation (T 0.7, top-p 0.95), so it is no exact KL.
    """
    args = json.loads((folder / "args.json").read_text())
    samples = json.loads((folder / "outputs.json").read_text())
    prompts = [sample["instruction"] for sample in samples]
    completions = [sample["output"] for sample in samples]
    initial = miniature.ROOT / args["model"]
    tokenizer = AutoTokenizer.from_pretrained(initial)
    sums = []
    for path in (folder / "final", initial):
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            logps, mask = make.completion_logps(model, tokenizer, prompts, completions)
        sums.append((logps * mask).sum(1))
    return (sums[0] - sums[1]).mean().item()


# === Quality against time ===
TIMED = {"parity": ("GRPO", "KTO"), "stale": ("S = 64",)}  # {study: panels}
TIMED_STALE = ("humanline, k=16", "ε 0.2", "S = 1")
EVERY = 16  # steps between evaluations


def run_time(seeds: int = 3):
    """What quality costs: the arms of parity, and three of stale, at the rates that those studies found.

    One run at a time on a machine with nothing else to do; evaluations are not counted. A row is an
    evaluation, by the reward (math: accuracy), since the judge sees a run's last samples alone. _arms.csv:
    seconds until the score that online (S = 1) has at half of its steps, by run, and the judge's score.
    """
    at = miniature.commit("time")
    rows = []
    for name, panels in TIMED.items():
        _, data = STUDIES[name].data
        chosen = {}  # {(panel, arm): command of its first seed}
        for row in read_rows(name):
            chosen.setdefault((row["panel"], row["arm"]), row)
        for (panel, arm), row in chosen.items():
            if panel in panels and (name == "parity" or arm in TIMED_STALE):
                for seed in STUDIES[name].seeds[:seeds]:
                    rows += timed(row, seed, at)
    results = miniature.ROOT / "paper" / "results"
    miniature.write_csv(results / "time.csv", rows)
    table = seconds_to_target(rows)
    miniature.write_csv(results / "time_arms.csv", table)
    pictures.draw("time")


def read_rows(name: str) -> list[dict]:
    """The reported rows of a study that was made."""
    path = miniature.ROOT / "paper" / "results" / f"{name}.csv"
    if not path.exists():
        miniature.fail(f"{path} is missing; run `python paper/miniature.py {name}` first")
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["phase"] == "reported"]


def timed(row: dict, seed: int, at: str) -> list[dict]:
    """A row for each evaluation of a run, in its seconds of training."""
    line = re.sub(r"--seed \d+", f"--seed {seed}", row["command"])
    line = re.sub(r" --eval-every \d+", "", line) + f" --eval-every {EVERY}"
    miniature.run_all([line], at)
    folder = miniature.folder_of(line, at)
    metric = "eval/accuracy" if row["panel"] == "S = 64" else "eval/reward"
    summary = json.loads((folder / "summary.json").read_text())
    finished, _ = summary["after"].get("eval/finished", (1.0, None))
    judge = miniature.judged("grpo_math" if row["panel"] == "S = 64" else "", folder, finished)
    points = [(0, 0.0, summary["before"][metric][0])]
    seconds = 0.0
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(text)
        seconds += step["perf/step_time"]
        if metric in step:
            points.append((step["step"] + 1, seconds, step[metric]))
    base = {"command": line, "seed": seed, "commit": at, "panel": row["panel"], "arm": row["arm"]}
    rows = [base | {"step": n, "seconds": s, "metric": metric, "score": score} for n, s, score in points]
    rows[-1]["judge"] = judge
    return rows


def seconds_to_target(rows: list[dict]) -> list[dict]:
    """By run, from the first evaluation at which it is reached; empty where it never is."""
    lines = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        online = "S = 1" if panel == "S = 64" else "online"
        of_online = [row for row in rows if (row["panel"], row["arm"]) == (panel, online)]
        half = max(row["step"] for row in of_online) // 2
        target = np.mean([row["score"] for row in of_online if row["step"] == half])
        runs = {}
        for row in rows:
            if row["panel"] == panel:
                runs.setdefault((row["arm"], row["seed"]), []).append(row)
        for (arm, seed), points in runs.items():
            reached = [row["seconds"] for row in points if row["score"] >= target]
            line = {"panel": panel, "arm": arm, "seed": seed, "target": target}
            line |= {"seconds": min(reached, default=""), "all_seconds": points[-1]["seconds"]}
            line["judge"] = points[-1]["judge"]
            lines.append(line)
    return lines
