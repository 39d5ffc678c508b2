"""Makes the paper's figures on the embedded toys, and the studies: tables of all runs, and pictures.

    pip install -r paper/requirements.txt
    python paper/miniature.py figure8 --seeds 5
    python paper/miniature.py parity            # a study

The plans are in paper/study.py, and paper/trials.py runs the scripts. The files are written into runs/results
or, with --write, over those in paper/results:
    NAME.csv: a row for each run, with the command that repeats it.
    NAME_arms.csv: means and intervals of the arms, and the tests of a figure.
    NAME_tests.csv: the tests of a study.
    NAME.png: the picture.

Each arm has its own learning rate, and sometimes other tuned flags: those with the best mean of the plan's
first metric over the tuning seeds. If the best rate of a study is at an end of the grid, most grids grow by
one rate. Tuning and report have different seeds. The hidden judge has made the toys' data, and no run sees
it.
"""

import json
import os
import re
import sys
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer
from tyro.conf import Positional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paper import pictures, study, trials  # noqa: E402
from paper.trials import RESULTS, ROOT, write_csv  # noqa: E402
from toy import make  # noqa: E402


def make_plan(name: str, plan: study.Plan, out: Path):
    """Makes the csv files of a figure or a study, after making its runs."""
    at = trials.commit()
    _, data = plan.data
    scored = [metric for metric in plan.metrics if metric not in ("clipped", "grad_norm_max")]
    before = trials.untrained([*plan.arms, *plan.tuned], scored, at, plan.before_seeds, data)
    is_study = name in study.STUDIES
    collapsed = before if is_study else {}  # scores of runs that collapse; a figure has no scores for them
    best, rows = tune(plan, collapsed, at)
    arms = without_losers(plan, rows)
    reported = report(plan, [arm for arm in arms if arm.name not in plan.gated], best, collapsed, at)
    if plan.gate and plan.gate(reported):
        reported += report(plan, [arm for arm in arms if arm.name in plan.gated], best, collapsed, at)
    if trials.commit() != at:
        raise SystemExit(f"error: the code has changed during the runs: go back to {at}, or start again")

    if name == "dpo":
        for row in reported:
            if not row["failed"]:
                row["kl"] = divergence(trials.folder_of(row["command"], at))
    table = []
    compared = study.over_instances(reported) if plan.instances else reported
    for metric in plan.metrics:
        for line in study.compare(compared, metric):
            if is_study:  # its tests are in NAME_tests.csv
                line = {key: line[key] for key in line if key not in ("against", "difference", "p", "p_holm")}
            table.append(line)
    for panel, scores in before.items():
        for metric, score in scores.items():
            table.append({"panel": panel, "arm": "untrained", "metric": metric, "mean": score})
    if plan.instances:
        for metric in scored:
            mean = np.mean([before[arm.panel][metric] for arm in plan.arms])
            table.append({"panel": table[0]["panel"], "arm": "untrained", "metric": metric, "mean": mean})
    if name == "chat":
        write_answers(out, rows + reported)
    write_csv(out / f"{name}.csv", rows + reported)
    write_csv(out / f"{name}_arms.csv", table)
    if plan.test:
        write_csv(out / f"{name}_tests.csv", plan.test(reported))


def report(plan: study.Plan, arms: list, best: dict, collapsed: dict, at: str) -> list[dict]:
    """Returns the reported rows of arms, with their best choices."""
    _, data = plan.data
    runs = []
    for arm in arms:
        choice_of = plan.rate_of.get(arm.name, arm.name)
        lr, option = best.get((arm.script, choice_of), (arm.lrs[0], ""))
        seeds = [*plan.seeds, *plan.more_seeds.get(arm.panel, ())]
        runs += [(arm, lr, seed, f"{option} {data}") for seed in seeds]
    return rows_of(runs, collapsed, at)


def write_answers(out: Path, rows: list[dict]):
    """Moves the answers of the rows into chat_answers.csv: those of the first seed on polite pairs."""
    table = []
    for row in rows:
        answers = row.pop("answers", ())
        if (row["phase"], row["panel"], row["seed"]) == ("reported", "chat polite", 21):
            for question, before, after in answers:
                table.append({"question": question, "arm": row["arm"], "before": before, "after": after})
    write_csv(out / "chat_answers.csv", table)


def without_losers(plan: study.Plan, rows: list[dict]) -> list:
    """Returns the arms of the report: those of `plan.rivals` only if their best choice is the rivals' best.

    rows: of the tuning.
    """
    scores = {}  # {(rival, choice): scores of its runs}
    for row in rows:
        if row["arm"] in plan.rivals:
            choice = re.sub(r"--seed \d+", "", row["command"])
            scores.setdefault((row["arm"], choice), []).append(row.get(plan.metrics[0], -np.inf))
    if not scores:
        return plan.arms
    winner, _ = max(scores, key=lambda key: np.mean(scores[key]))
    losers = set(plan.rivals) - {winner}
    return [arm for arm in plan.arms if arm.name not in losers]


def tuned_arms(plan: study.Plan) -> list:
    """Returns the arms of a plan that have more than one choice."""
    return [arm for arm in plan.tuned or plan.arms if len(arm.lrs) * len(arm.options) > 1]


def tune(plan: study.Plan, collapsed: dict, at: str) -> tuple:
    """Finds the choice with the best mean for each arm. An arm in several panels is tuned on all of them.

    Returns:
        {(script, arm's name): (learning rate, option)}, and the rows of all tuning runs.
    """
    data, _ = plan.data
    arms = tuned_arms(plan)
    choices = {(arm.script, arm.name): list(product(arm.lrs, arm.options)) for arm in arms}
    best, rows = try_choices(plan, arms, choices, collapsed, at)
    if plan.grows == "once":
        new = set()
        for key, (lr, _) in best.items():
            new |= {*rates_beside(lr, choices[key], plan.ladder)}
        # An arm stands in several panels, but its grid grows once.
        for key, options in {(arm.script, arm.name): arm.options for arm in arms}.items():
            choices[key] += product(sorted(new), options)
        return try_choices(plan, arms, choices, collapsed, at)
    grown = True
    while grown:
        grown = False
        done = set()
        for arm in arms:
            key = (arm.script, arm.name)
            if key in done:  # in another panel
                continue
            done.add(key)
            lr, option = best[key]
            beside = rates_beside(lr, choices[key], plan.ladder)
            more = []
            if plan.test and plan.grows == "by arm" and beside:  # the best rate is at an end of the grid
                more = list(product(beside, arm.options))
            elif option in arm.options:
                more = [(lr, f"{option} {flags}") for flags in arm.then]
            new = [choice for choice in more if choice not in choices[key]]
            choices[key] += new
            grown = grown or bool(new)
        if grown:
            best, rows = try_choices(plan, arms, choices, collapsed, at)
    return best, rows


def try_choices(plan: study.Plan, arms: list, choices: dict, collapsed: dict, at: str) -> tuple:
    """Runs every choice of every arm on the tuning seeds.

    Returns:
        {(script, arm's name): its best choice}, and the rows of all runs.
    """
    data, _ = plan.data
    runs = []
    for arm in arms:
        for lr, option in choices[arm.script, arm.name]:
            runs += [(arm, lr, seed, f"{option} {data}") for seed in plan.tuning_seeds]
    rows = rows_of(runs, collapsed, at)
    scores = {}  # {(script, arm's name): {choice: scores of its runs}}
    for (arm, lr, _, more), row in zip(runs, rows):
        choice = (lr, more.removesuffix(f" {data}"))
        score = row.get(plan.metrics[0], -np.inf)
        scores.setdefault((arm.script, arm.name), {}).setdefault(choice, []).append(score)
    best = {}
    for key, numbers_of in scores.items():
        means = {choice: np.mean(numbers) for choice, numbers in numbers_of.items()}
        best[key] = (min if plan.lowest_is_best else max)(means, key=means.get)
    return best, rows


def rates_beside(lr: float, choices: list[tuple], ladder: tuple) -> list[float]:
    """Returns the neighbours of a learning rate on the ladder that are not among the choices."""
    i = ladder.index(lr)
    tried = [rate for rate, _ in choices]
    return [rate for rate in ladder[max(0, i - 1) : i + 2] if rate not in tried]


def rows_of(runs: list[tuple], collapsed: dict, at: str) -> list[dict]:
    """Returns the csv rows of runs. A run that collapsed has the scores of its panel in `collapsed`."""
    rows = trials.rows_of(runs, at)
    return [row | collapsed.get(row["panel"], {}) if row["failed"] else row for row in rows]


def divergence(folder: Path) -> float:
    """Returns the mean log π(y) - log π_0(y) of a run's last samples in nats; π_0 is the initial policy.

    The samples come from the evaluation, with temperature 0.7 and top-p 0.95, so the mean is no exact KL.
    """
    args = json.loads((folder / "args.json").read_text())
    samples = trials.last_samples(folder)
    prompts = [sample["prompt"] for sample in samples]
    completions = [sample["sample"] for sample in samples]
    initial = ROOT / args["model"]
    tokenizer = AutoTokenizer.from_pretrained(initial)
    sums = []
    for path in (folder / "final", initial):
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            logps, mask = make.completion_logps(model, tokenizer, prompts, completions)
        sums.append((logps * mask).sum(1))
    return (sums[0] - sums[1]).mean().item()


# === Quality against time ===
TIMED_STALE = ("humanline, k=16", "ε 0.2", "S = 1")


def timed_rows(seeds: int) -> list[dict]:
    """Returns the reported rows of the arms of parity, and of three arms of stale."""
    rows = pictures.read(RESULTS, "parity")
    rows += [row for row in pictures.read(RESULTS, "stale") if row["arm"] in TIMED_STALE]
    return [row for row in rows if row["phase"] == "reported" and row["seed"] < 21 + seeds]


def make_time(study_rows: list[dict], out: Path):
    """Repeats runs one at a time, on a machine that has nothing else to do, and writes a row per evaluation.

    The score is the reward (in math: the accuracy), because the judge only sees the last samples of a run.
    The time of the evaluations does not count.
    """
    at = trials.commit()
    rows = []
    for row in study_rows:
        rows += timed(row, at)
    write_csv(out / "time.csv", rows)
    write_csv(out / "time_arms.csv", seconds_to_target(rows))


def timed(row: dict, at: str) -> list[dict]:
    """Returns a row for each evaluation of a run: the steps and seconds before it, and the score."""
    line = re.sub(r" --eval-every \d+", "", row["command"]) + " --eval-every 16"
    trials.run_all([line], at)
    folder = trials.folder_of(line, at)
    metric = "eval/accuracy" if "grpo_math" in line else "eval/reward"
    base = {"command": line, "seed": int(row["seed"]), "commit": at, "panel": row["panel"], "arm": row["arm"]}
    summary = trials.read_summary(folder)
    steps = trials.read_steps(folder)
    scores = {0: summary["before"][metric][0], len(steps): summary["after"][metric][0]}  # {step: score}
    seconds = [0.0]  # of the training before each step
    for step in steps:
        seconds.append(seconds[-1] + step["perf/step_time"])
        if metric in step:
            scores[step["step"]] = step[metric]
    rows = []
    for step, score in sorted(scores.items()):
        rows.append(base | {"step": step, "seconds": seconds[step], "metric": metric, "score": score})
    rows[-1]["judge"] = trials.judged(folder)
    return rows


def seconds_to_target(rows: list[dict]) -> list[dict]:
    """Returns for each run the seconds until it reaches the target: online's score after half of its steps.

    In math, online is S = 1. The seconds of a run that never reaches the target are empty.
    """
    lines = []
    for panel, panel_rows in pd.DataFrame(rows).groupby("panel", sort=False):
        online = panel_rows[panel_rows.arm.isin(("S = 1", "online"))]
        target = online.score[online.step == online.step.max() // 2].mean()
        for (arm, seed), points in panel_rows.groupby(["arm", "seed"], sort=False):
            reached = points.seconds[points.score >= target]
            line = {"panel": panel, "arm": arm, "seed": seed, "target": target}
            line |= {"seconds": min(reached, default=""), "all_seconds": points.seconds.iloc[-1]}
            lines.append(line | {"judge": points.judge.iloc[-1]})
    return lines


# === Command ===
PLANS = study.FIGURES | study.STUDIES
Name = Literal[*PLANS, "time"]


def main(name: Positional[Name], seeds: int = 0, panels: int = 0, write: bool = False, keep: bool = False):
    """Makes the files of a plan.

    Args:
        name: the figure, table or study; time: quality against time.
        seeds: number of reported runs of an arm (intervals and tests need two); 0: all of the plan.
        panels: number of reported panels, in the order of the plan; 0: all of the plan.
        write: replace the files in paper/results, instead of writing into runs/results.
        keep: add finished rows to paper/results/NAME.jsonl; a later call makes only the rows that are missing
            there. Nobody reads this file before the last run.
    """
    trials.KEPT = RESULTS / f"{name}.jsonl" if keep else None
    if keep:
        others = {at for _, at, *_ in trials.kept_rows()} - {trials.commit()}
        if others:
            print(f"{trials.KEPT.name} also has rows of {', '.join(sorted(others))}, which are not used.")
    out = RESULTS if write else ROOT / "runs" / "results"
    if name == "time":
        rows = timed_rows(seeds or 3)
        count = len(rows)
        minutes = sum(row["seconds"] for row in rows) / 60
    else:
        plan = PLANS[name]
        if seeds:
            plan = plan._replace(seeds=range(plan.seeds.start, plan.seeds.start + seeds))
        if panels:
            chosen = list(dict.fromkeys(arm.panel for arm in plan.arms))[:panels]
            made = [arm for arm in plan.arms if arm.panel in chosen]
            needed = {(arm.script, arm.name) for arm in made}
            tuned = [arm for arm in plan.tuned if (arm.script, arm.name) in needed]
            plan = plan._replace(arms=made, tuned=tuned)
        count = count_runs(plan)
        minutes = count / os.cpu_count()  # a minute for each run, unless the committed rows know better
        if (RESULTS / f"{name}.csv").exists():
            minutes *= np.mean([row["seconds"] for row in pictures.read(RESULTS, name)]) / 60
    print(f"{name}: {count} runs, about {minutes:.0f} minutes without the making of data")
    print("Runs that runs/miniature already has are not made again.")
    print(f"results: {out / name}.csv, {name}_arms.csv, {name}.png", flush=True)
    if name == "time":
        make_time(rows, out)
    else:
        make_plan(name, plan, out)
    pictures.draw(name, out)


def count_runs(plan: study.Plan) -> int:
    """Returns the number of runs, for the untrained policies, tuning and report, if no grid grows."""
    panels = {arm.panel for arm in [*plan.tuned, *plan.arms]}
    grids = sum(len(arm.lrs) * len(arm.options) + len(arm.then) for arm in tuned_arms(plan))
    reported = 0
    for panel in dict.fromkeys(arm.panel for arm in plan.arms):
        names = {(arm.script, arm.name) for arm in plan.arms if arm.panel == panel}
        count = len(names) - max(0, len(plan.rivals) - 1)
        reported += count * (len(plan.seeds) + len(plan.more_seeds.get(panel, ())))
    return len(plan.before_seeds) * len(panels) + grids * len(plan.tuning_seeds) + reported


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
