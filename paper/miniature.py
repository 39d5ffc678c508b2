"""The paper's figures on the embedded toys: every arm through the scripts themselves, a csv row per run, a picture.

    pip install -r paper/requirements.txt
    python paper/miniature.py figure8 --seeds 5

As many runs at a time as there are cores, one thread each. Finished runs stay in runs/miniature and are not run again,
those of another figure neither, until a script, utils.py or toy/ changes. Written are paper/results/NAME.csv (a row per
run, with the command that repeats it), NAME_arms.csv (means, intervals, tests) and NAME.png.

The learning rate of an arm is the best of its grid on TUNING_SEEDS, by the reward that its user would see after
training (figure7: by the accuracy during training). The hidden judge, which made the toys' data and which no run sees,
is reported beside it. Seeds of tuning and of the report differ; the held-out prompts are the same.
"""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, NamedTuple

import matplotlib
import numpy as np
import tyro
from filelock import FileLock
from scipy.stats import ttest_ind
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402
from paper import curves  # noqa: E402
from toy.make import judge_bouquet, judge_shell_game, judge_tale  # noqa: E402

CODE = "dpo_humanline.py kto_humanline.py grpo_humanline.py grpo_math_humanline.py utils.py toy".split()
TUNING_SEEDS, FIRST_SEED = (1,), 11  # reported are 11, 12, …
# Ends that are results: a prompt's samples differ no more, only those of one prompt do, or training diverged.
COLLAPSED = r"error: (.*(?:no prompt's rewards differ|the batch has one prompt|the update was not made|not finite).*)"


class Arm(NamedTuple):
    panel: str
    name: str
    script: str  # dpo, kto, grpo or grpo_math
    flags: str  # besides the learning rate and the seed
    lrs: tuple[float, ...]  # the grid; a single one is not tuned


def arms(panel: str, script: str, lrs: tuple[float, ...], flags: dict[str, str], common: str = "") -> list[Arm]:
    """The arms of a panel. The first is the one that the others are tested against."""
    return [Arm(panel, name, script, f"{common} {own}".strip(), lrs) for name, own in flags.items()]


DPO, KTO, GRPO, MATH = (3e-4, 1e-3, 3e-3), (1e-4, 3e-4, 1e-3), (1e-4, 3e-4, 1e-3), (3e-4, 1e-3)
OFFLINE, WIDE = "--no-humanline", "--no-humanline --epsilon 0.5"  # GRPO's offline arm has the wider clip (Table 3)
ONLINE = "--online --no-humanline"
CURVE = "--eval-every 32 --eval-samples 128"
CLIPS = {"clipping": "", "sampling (eq. 5)": "--clip sample", "no clipping": "--clip none"}
REGION = "--clip none --sync after_step"
TALES = (
    "--model toy/tales/policy --reward-model toy/tales/reward_model --dataset toy/tales/preferences_train.jsonl.gz "
    "--eval-dataset toy/tales/preferences_test.jsonl.gz --generation-batch-size 256 --max-new-tokens 64 "
    "--num-steps 320 --beta 10 --adam-eps 1e-2 --k 16"
)
QUARTILE = "--dataset runs/quartiles_toy/quartile{}.jsonl"
PREPARE = (
    "python paper/quartiles.py --model toy/bouquets/policy --dataset toy/bouquets/preferences_train.jsonl.gz "
    "--out runs/quartiles_toy && "
)

BOUNDS = {"[-1.5, 1.5]": ""}
for low, high in ((-2.0, 1.5), (-1.0, 1.5), (-1.0, 2.0), (-1.0, 3.0)):
    BOUNDS[f"[{low}, {high}]"] = f"--log-epsilon-P {low} --log-epsilon-R {high}"

FIGURES = {
    "figure1": arms("DPO", "dpo", DPO, {"offline + humanline": "", "offline": OFFLINE, "online": ONLINE})
    + arms("KTO", "kto", KTO, {"offline + humanline": "", "offline": OFFLINE, "online": ONLINE})
    + arms("GRPO", "grpo", GRPO, {"offline + humanline": "", "offline": WIDE, "online": ONLINE}),
    "figure5": arms("GRPO, lr 1e-3", "grpo", (1e-3,), CLIPS | {"clipping, no syncing": "--sync none"})
    + arms("GRPO, lr 2e-3", "grpo", (2e-3,), CLIPS)
    + arms("GRPO, lr 4e-3", "grpo", (4e-3,), CLIPS)
    + arms("KTO, lr 1e-3", "kto", (1e-3,), CLIPS | {"clipping, no syncing": "--sync none"})
    + arms("KTO, lr 2e-3", "kto", (2e-3,), CLIPS),
    "figure5_dpo": arms("DPO on tales, lr 3e-4", "dpo", (3e-4,), {"clipping": "", "no clipping": "--clip none"}, TALES)
    + arms("DPO on tales, lr 1e-3", "dpo", (1e-3,), {"clipping": "", "no clipping": "--clip none"}, TALES),
    "figure6": arms("DPO", "dpo", (1e-3, 3e-3), {f"quartile {i}": QUARTILE.format(i) for i in (1, 2, 3, 4)}),
    "figure7": arms(
        "GRPO",
        "grpo_math",
        MATH,
        {
            "S=64 + humanline, k=16": "",
            "S=64 + humanline, k=20": "--k 20",
            "S=64 + humanline, k=1": "--k 1",
            "S=64": "--no-humanline",
            "online, S=1": "--no-humanline --sample-every 1",
        },
        CURVE,
    ),
    "figure8": arms("GRPO", "grpo", GRPO, {f"k={k}": f"--k {k}" if k != 32 else "" for k in (1, 4, 16, 32, 64)}),
    "figure10": arms("DPO", "dpo", DPO, {"offline + humanline": "", "trust region": REGION})
    + arms("GRPO", "grpo", GRPO, {"offline + humanline": "", "trust region": REGION}),
    "table6": arms("DPO on tales", "dpo", (3e-4, 1e-3), BOUNDS, TALES),
}


def commit(name: str) -> str:
    """The last commit that changed what the runs of a figure compute."""
    code = CODE + ["paper/quartiles.py"] * (name == "figure6")
    if subprocess.run(["git", "status", "--porcelain", "--", *code], cwd=ROOT, capture_output=True).stdout:
        raise SystemExit(f"error: {', '.join(code)}: commit the changes first; a row names the commit that repeats it")
    found = subprocess.run(["git", "log", "-1", "--format=%h", "--", *code], cwd=ROOT, capture_output=True, text=True)
    if not found.stdout:
        raise SystemExit(f"error: {ROOT} is not a git clone; a row names the commit that repeats it")
    return found.stdout.strip()


def command(arm: Arm, lr: float, seed: int) -> str:
    """What repeats a run, from the root of the repository."""
    before = PREPARE if "runs/quartiles_toy" in arm.flags else ""
    flags = f"--engine hf --checkpoint-every 0 --lr {lr:g} --seed {seed} {arm.flags}".strip()
    return f"{before}python {arm.script}_humanline.py {flags}"


def folder_of(line: str, at: str) -> Path:
    return ROOT / "runs" / "miniature" / hashlib.sha256(f"{at} {line}".encode()).hexdigest()[:16]


def run(line: str, at: str) -> None:
    """Runs a command of `command` unless it is finished, which `end.json` in its folder says. Both ends of a run count:
    that it trained, and that it collapsed. Any other error ends the program."""
    folder = folder_of(line, at)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # figures share runs
        if not (folder / "end.json").exists():
            start(line, folder)


def start(line: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    started, line = time.monotonic(), f"{line.rpartition('&& ')[2]} --output-dir {folder}"
    done = subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    collapse = re.search(COLLAPSED, done.stderr) if done.returncode else None
    if done.returncode and not collapse:
        told = "\n".join(re.findall("error: .*", done.stderr)) or done.stderr
        raise SystemExit(f"{told}\nerror: exit code {done.returncode}: {line}")
    end = {"seconds": round(time.monotonic() - started, 1), "failed": collapse[1] if collapse else ""}
    utils.write(folder / "end.json", json.dumps(end))


def run_all(lines: list[str], at: str) -> None:
    lines = list(dict.fromkeys(lines))
    missing = [line for line in lines if not (folder_of(line, at) / "end.json").exists()]
    for before in {line.rpartition("&& ")[0] for line in missing} - {""}:
        subprocess.run([sys.executable, *before.split()[1:]], cwd=ROOT, check=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            list(tqdm(pool.map(lambda line: run(line, at), lines), total=len(lines), unit="run"))
        finally:
            pool.shutdown(cancel_futures=True)


def judged(script: str, folder: Path, finished: float) -> float:
    """Mean score that the toy's hidden judge gives to the run's last samples."""
    tales = json.loads((folder / "args.json").read_text())["eval_dataset"].count("toy/tales")
    judge = judge_shell_game if script == "grpo_math" else judge_tale if tales else judge_bouquet
    rows = json.loads((folder / "outputs.json").read_text())
    unfinished = 0 if script == "grpo_math" else 1 - finished  # it costs 1; without </answer> nothing is right
    return fmean(judge(row["instruction"], row["output"]) for row in rows) - unfinished


def result(arm: Arm, lr: float, seed: int, at: str) -> dict:
    """The csv's row of a finished run. clipped: share of tokens outside the bounds, clipped or not, mean over steps;
    grad_norm_max: the largest gradient norm of a step; curve: mean of the evaluations during training."""
    line = command(arm, lr, seed)
    folder = folder_of(line, at)
    phase = "reported" if seed >= FIRST_SEED else "tuning"
    row = {"command": line, "seed": seed, "commit": at, "panel": arm.panel, "arm": arm.name, "phase": phase, "lr": lr}
    row |= json.loads((folder / "end.json").read_text())
    if row["failed"]:
        return row
    row |= {key: mean for key, (mean, _) in json.loads((folder / "summary.json").read_text())["after"].items()}
    steps = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    row["judge"] = judged(arm.script, folder, row.get("eval/finished", 1.0))
    row["clipped"] = fmean(step["humanline/clipped_low"] + step["humanline/clipped_high"] for step in steps)
    row["grad_norm_max"] = max(step["grad_norm"] for step in steps)
    curve = [step["eval/accuracy"] for step in steps if "eval/accuracy" in step]
    return row | ({"curve": fmean(curve)} if curve else {})


def compare(rows: list[dict], metric: str) -> list[dict]:
    """A row per arm: mean over seeds with its 95% t interval, and Welch's t-test against the first arm of the panel,
    with Holm's correction over the tests of this metric in this figure. Collapsed runs are counted and left out."""
    found, tests = {}, []
    for row in rows:
        if row["phase"] == "reported":
            found.setdefault((row["panel"], row["arm"]), []).append(row)
    table = []
    for (panel, name), runs in found.items():
        values = [row[metric] for row in runs if metric in row]
        first = next(arm for where, arm in found if where == panel)
        low, high = DescrStatsW(values).tconfint_mean() if len(values) > 1 else (np.nan, np.nan)
        line = {"panel": panel, "arm": name, "lr": runs[0]["lr"], "metric": metric, "runs": len(runs)}
        line |= {"collapsed": len(runs) - len(values), "mean": np.mean(values) if values else np.nan, "low": low}
        line |= {"high": high, "against": "" if name == first else first}
        base = [row[metric] for row in found[panel, first] if metric in row]
        if name != first and len(values) > 1 and len(base) > 1:
            line["difference"] = np.mean(values) - np.mean(base)
            p = ttest_ind(values, base, equal_var=False).pvalue
            line["p"] = np.nan_to_num(p, nan=1.0)  # the same without variance
            tests.append(line)
        table.append(line)
    for line, p in zip(tests, multipletests([line["p"] for line in tests], method="holm")[1] if tests else []):
        line["p_holm"] = p
    return table


def write_csv(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, rows: list[dict], table: list[dict], folders: dict[str, list]) -> None:
    """Points are runs, bars 95% intervals of the mean over seeds; the p of the first metric stands beside the arm. With
    `folders`, {arm: its runs}, there are learning curves too."""
    panels, metrics = (list(dict.fromkeys(line[key] for line in table)) for key in ("panel", "metric"))
    tall = 1 + 0.42 * max(sum(line["panel"] == panel for line in table) for panel in panels)
    count = len(panels) + bool(folders)
    size = (1 + 3.4 * count, max(tall, 3.5 * bool(folders)))
    figure, axes = plt.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    if folders:
        curves.draw(axes[0, -1], folders, metrics[0])
        axes[0, -1].legend(fontsize=6)
    for ax, panel in zip(axes[0], panels):
        names = list(dict.fromkeys(line["arm"] for line in table if line["panel"] == panel))
        labels = dict.fromkeys(names, "")
        for line in (line for line in table if line["panel"] == panel):
            second, color = metrics.index(line["metric"]), f"C{metrics.index(line['metric'])}"
            at = names.index(line["arm"]) + 0.3 * second
            runs = [row for row in rows if (row["panel"], row["arm"]) == (panel, line["arm"])]
            values = [row[line["metric"]] for row in runs if row["phase"] == "reported" and line["metric"] in row]
            ax.plot(values, [at] * len(values), "o", color=color, alpha=0.3, markersize=3)
            label = line["metric"] if at == 0.3 * second else None
            bar = [[line["mean"] - line["low"]], [line["high"] - line["mean"]]]
            ax.errorbar([line["mean"]], [at], xerr=bar, fmt="s", color=color, capsize=3, markersize=4, label=label)
            if not second:
                p = f"\np = {line['p_holm']:.2g}" if "p_holm" in line else ""
                gone = f", {line['collapsed']} of {line['runs']} collapsed" if line["collapsed"] else ""
                labels[line["arm"]] = f"{line['arm']}\nlr {line['lr']:g}{gone}{p}"
        ax.set_yticks(range(len(names)), labels.values(), fontsize=7)
        ax.set(title=panel, ylim=(len(names) - 0.4, -0.4))
        ax.grid(axis="x", alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main(
    name: Annotated[Literal[tuple(FIGURES)], tyro.conf.Positional],
    seeds: int = 5,
) -> None:
    """Args:
    name: the figure or table.
    seeds: reported runs of an arm.
    """
    if seeds < 1:
        raise SystemExit(f"error: --seeds is {seeds}; it must be at least 1, and 2 for intervals and tests")
    at = commit(name)
    tuned = [arm for arm in FIGURES[name] if len(arm.lrs) > 1]
    grid = [(arm, lr, seed) for arm in tuned for lr in arm.lrs for seed in TUNING_SEEDS]
    run_all([command(*one) for one in grid], at)
    rows = [result(*one, at) for one in grid]
    metric = "eval/accuracy" if name == "figure7" else "eval/reward"
    tuned_by = "curve" if name == "figure7" else metric  # two rates may both end near 1
    best = {arm: arm.lrs[0] for arm in FIGURES[name]}
    for arm in tuned:
        scores = [(row.get(tuned_by, -np.inf), row["lr"]) for (other, *_), row in zip(grid, rows) if other is arm]
        best[arm] = max(scores)[1]
    reported = [(arm, lr, seed) for arm, lr in best.items() for seed in range(FIRST_SEED, FIRST_SEED + seeds)]
    run_all([command(*one) for one in reported], at)
    rows += [result(*one, at) for one in reported]
    if commit(name) != at:
        raise SystemExit(f"error: the code was changed and committed during the runs; go back to {at}, or start again")
    shown = [metric, "judge"]
    metrics = [*shown, "clipped", "grad_norm_max", *["curve"] * (name == "figure7")]
    table = [line for key in metrics for line in compare(rows, key)]
    results = ROOT / "paper" / "results"
    write_csv(results / f"{name}.csv", rows)
    write_csv(results / f"{name}_arms.csv", table)
    folders = {}
    for row in rows * (name == "figure7"):
        if row["phase"] == "reported" and "curve" in row:
            folders.setdefault(row["arm"], []).append(folder_of(row["command"], at))
    plot(results / f"{name}.png", rows, [line for line in table if line["metric"] in shown], folders)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
