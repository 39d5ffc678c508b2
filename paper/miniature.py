"""The paper's figures on the embedded toys: every arm by the scripts, a csv row per run, and a picture.

    pip install -r paper/requirements.txt
    python paper/miniature.py figure8 --seeds 5
    python paper/miniature.py parity

The second is one of the studies of paper/study.py, which says how they are made.
As many runs at a time as there are cores, one thread each. Finished runs stay in runs/miniature and are not
run again, those of another figure neither, until a script, run.py, utils.py or toy/ changes. Written are
paper/results/NAME.csv (a row per run, with the command that repeats it), NAME_arms.csv (means, intervals,
tests) and NAME.png.

The learning rate of an arm is the best of its grid on TUNING_SEEDS, by the reward that its user would see
after training (figure7: by the accuracy during training). The hidden judge, which made the toys' data and
which no run sees, is reported beside it. Seeds of tuning and of the report differ; the held-out prompts are
the same.
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
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from filelock import FileLock
from scipy.stats import ttest_ind
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from paper import pictures  # noqa: E402
from run import write  # noqa: E402
from toy.make import LOW_ENTROPY, another_instance, judge_bouquet, judge_shell_game  # noqa: E402

SCRIPTS = ["dpo_humanline.py", "kto_humanline.py", "grpo_humanline.py", "grpo_math_humanline.py"]
CODE = [*SCRIPTS, "run.py", "utils.py", "toy/bouquets", "toy/tales", "toy/shell_game"]
MORE_CODE = {
    "figure6": ["paper/quartiles.py"],
    "stale": ["paper/variants.py"],
    "time": ["paper/variants.py"],
    "instances": ["toy/make.py"],
    "parity": ["toy/make.py"],  # as above: they share runs, and syncing too
    "syncing": ["toy/make.py"],
    "dpo": ["toy/low_entropy"],
}
TUNING_SEEDS = (1,)
FIRST_SEED = 11  # reported are 11, 12, …
# Ends that are results: a prompt's samples differ no more, only those of one prompt do, or training diverged.
COLLAPSED = (
    r"error: (.*(?:no prompt's rewards differ|the batch has one prompt|the update was not made|not finite).*)"
)


INTERVAL = ("panel", "arm", "lr", "metric", "runs", "collapsed", "mean", "low", "high")  # of an arm's line


class Arm(NamedTuple):
    panel: str
    name: str
    script: str  # dpo, kto, grpo or grpo_math
    flags: str  # besides the learning rate and the seed
    lrs: tuple[float, ...]  # the grid; a single one is not tuned
    options: tuple[str, ...] = ("",)  # flags that are tuned together with the rate
    program: str = ""  # what is started in the place of the script


def arms(panel: str, script: str, lrs: tuple, flags: dict[str, str], common: str = "") -> list[Arm]:
    """The arms of a panel. The first is the one that the others are tested against."""
    panel_arms = []
    for name, own in flags.items():
        panel_arms.append(Arm(panel, name, script, f"{common} {own}".strip(), lrs))
    return panel_arms


# Grids of learning rates.
DPO = (3e-4, 1e-3, 3e-3)
KTO = (1e-4, 3e-4, 1e-3)
GRPO = (1e-4, 3e-4, 1e-3)
MATH = (3e-4, 1e-3)
OFFLINE = "--no-humanline"
WIDE = "--no-humanline --epsilon 0.5"  # GRPO's offline arm has the wider clip (Table 3)
ONLINE = "--online --no-humanline"
MAIN = {"offline + humanline": "", "offline": OFFLINE, "online": ONLINE}
CURVE = "--eval-every 32 --eval-samples 128"
NO_CLIP = {"clipping": "", "no clipping": "--clip none"}
CLIPS = {"clipping": "", "sampling (eq. 5)": "--clip sample", "no clipping": "--clip none"}
NO_SYNC = CLIPS | {"clipping, no syncing": "--sync none"}
REGION = {"offline + humanline": "", "trust region": "--clip none --sync after_step"}
TALES = (
    "--model toy/tales/policy --reward-model toy/tales/reward_model "
    "--dataset toy/tales/preferences_train.jsonl.gz --eval-dataset toy/tales/preferences_test.jsonl.gz "
    "--generation-batch-size 256 --max-new-tokens 64 "
    "--num-steps 320 --beta 10 --adam-eps 1e-2 --k 16"
)
PREPARE = {  # {file or folder of the flags: the command that makes it}
    "runs/quartiles_toy": (
        "python paper/quartiles.py --model toy/bouquets/policy "
        "--dataset toy/bouquets/preferences_train.jsonl.gz --out runs/quartiles_toy"
    )
}
QUARTERS = {}
for i in (1, 2, 3, 4):
    QUARTERS[f"quartile {i}"] = f"--dataset runs/quartiles_toy/quartile{i}.jsonl"
ROUNDS = {
    "S=64 + humanline, k=16": "",
    "S=64 + humanline, k=20": "--k 20",
    "S=64 + humanline, k=1": "--k 1",
    "S=64": "--no-humanline",
    "S=64, ε 0.5": "--no-humanline --epsilon 0.5",
    "online, S=1": "--no-humanline --sample-every 1",
}
INTERVALS = {"k=1": "--k 1", "k=4": "--k 4", "k=16": "--k 16", "k=32": "", "k=64": "--k 64"}
BOUNDS = {"[-1.5, 1.5]": ""}
for low, high in ((-2.0, 1.5), (-1.0, 1.5), (-1.0, 2.0), (-1.0, 3.0)):
    BOUNDS[f"[{low}, {high}]"] = f"--log-epsilon-P {low} --log-epsilon-R {high}"

FIGURES = {
    "figure1": [
        *arms("DPO", "dpo", DPO, MAIN),
        *arms("KTO", "kto", KTO, MAIN),
        *arms("GRPO", "grpo", GRPO, MAIN | {"offline": WIDE}),
    ],
    "figure5": [
        *arms("GRPO, lr 1e-3", "grpo", (1e-3,), NO_SYNC),
        *arms("GRPO, lr 2e-3", "grpo", (2e-3,), CLIPS),
        *arms("GRPO, lr 4e-3", "grpo", (4e-3,), CLIPS),
        *arms("KTO, lr 1e-3", "kto", (1e-3,), NO_SYNC),
        *arms("KTO, lr 2e-3", "kto", (2e-3,), CLIPS),
    ],
    "figure5_dpo": [
        *arms("DPO on tales, lr 3e-4", "dpo", (3e-4,), NO_CLIP, TALES),
        *arms("DPO on tales, lr 1e-3", "dpo", (1e-3,), NO_CLIP, TALES),
    ],
    "figure6": arms("DPO", "dpo", (1e-3, 3e-3), QUARTERS),
    "figure7": arms("GRPO", "grpo_math", MATH, ROUNDS, CURVE),
    "figure8": arms("GRPO", "grpo", GRPO, INTERVALS),
    "figure10": [*arms("DPO", "dpo", DPO, REGION), *arms("GRPO", "grpo", GRPO, REGION)],
    "table6": arms("DPO on tales", "dpo", (3e-4, 1e-3), BOUNDS, TALES),
}


def commit(name: str) -> str:
    """The last commit that changed what the runs of a figure compute."""
    code = CODE + MORE_CODE.get(name, [])
    if git("status", "--porcelain", "--", *code):
        fail(f"{', '.join(code)}: commit the changes first; a row names the commit that repeats it")
    found = git("log", "-1", "--format=%h", "--", *code)
    if not found:
        fail(f"{ROOT} is not a git clone; a row names the commit that repeats it")
    return found


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def fail(message: str):
    raise SystemExit(f"error: {message}")


def command(arm: Arm, lr: float, seed: int, more: str = "") -> str:
    """What repeats a run, from the root of the repository. more: flags of this run alone."""
    program = arm.program or f"{arm.script}_humanline.py"
    flags = f"--engine hf --checkpoint-every 0 --lr {lr:g} --seed {seed} {arm.flags} {more}"
    line = f"python {program} {' '.join(flags.split())}"
    for path, preparation in PREPARE.items():
        if path in line:
            line = f"{preparation} && {line}"
    return line


def folder_of(line: str, at: str) -> Path:
    digest = hashlib.sha256(f"{at} {line}".encode()).hexdigest()
    return ROOT / "runs" / "miniature" / digest[:16]


def run_once(line: str, at: str):
    """Runs a command of `command` unless it is finished, which `end.json` in its folder says.

    Both ends of a run count: that it trained, and that it collapsed. Any other error ends the program.
    """
    folder = folder_of(line, at)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # figures share runs
        if not (folder / "end.json").exists():
            start(line, folder)


def start(line: str, folder: Path):
    shutil.rmtree(folder, ignore_errors=True)
    *_, training = line.split("&& ")
    training = f"{training} --output-dir {folder}"
    started = time.monotonic()
    done = shell(training)
    end = {"seconds": round(time.monotonic() - started, 1), "failed": ""}
    if done.returncode:
        collapse = re.search(COLLAPSED, done.stderr)
        if not collapse:
            errors = "\n".join(re.findall("error: .*", done.stderr)) or done.stderr
            raise SystemExit(f"{errors}\nerror: exit code {done.returncode}: {training}")
        end["failed"] = collapse[1]
    write(folder / "end.json", json.dumps(end))


def shell(line: str) -> subprocess.CompletedProcess:
    """Runs a line from the root of the repository, with this Python, on one thread."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    return subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)


def prepare(line: str, at: str):
    """Makes the data of a run, once."""
    made = folder_of(line, at).with_suffix(".made")
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(made.with_suffix(".lock")):
        if not made.exists():
            shell(line).check_returncode()
            write(made, line)


def run_all(lines: list[str], at: str):
    lines = list(dict.fromkeys(lines))
    preparations = set()
    for line in lines:
        before, _, _ = line.rpartition("&& ")
        if before and not (folder_of(line, at) / "end.json").exists():
            preparations.add(before)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            list(pool.map(lambda line: prepare(line, at), preparations))
            ended = pool.map(lambda line: run_once(line, at), lines)
            list(tqdm(ended, total=len(lines), unit="run"))
        finally:
            pool.shutdown(cancel_futures=True)


def judged(script: str, folder: Path, finished: float) -> float:
    """Mean score that the toy's hidden judge gives to the run's last samples."""
    args = json.loads((folder / "args.json").read_text())
    if script == "grpo_math":
        judge = judge_shell_game
        unfinished = 0  # without </answer> nothing is right
    else:
        judge = judge_bouquet if "bouquets" in args["model"] else judge_of_tales(args["model"])
        unfinished = 1 - finished  # it costs 1
    samples = json.loads((folder / "outputs.json").read_text())
    return fmean(judge(sample["instruction"], sample["output"]) for sample in samples) - unfinished


def judge_of_tales(model: str):
    """The hidden judge of a policy's tales: that of runs/instances/3/tales/policy is of instance 3."""
    if "low_entropy" in model:
        return LOW_ENTROPY.judge
    instance = re.search(r"instances/(\d+)/", model)
    return another_instance(int(instance[1]) if instance else 0).judge


def result(arm: Arm, lr: float, seed: int, more: str, at: str) -> dict:
    """The csv's row of a finished run.

    clipped: share of tokens outside the bounds, clipped or not, mean over steps. grad_norm_max: the largest
    gradient norm of a step. curve: mean of the evaluations during training.
    """
    line = command(arm, lr, seed, more)
    folder = folder_of(line, at)
    row = {
        "command": line,
        "seed": seed,
        "commit": at,
        "panel": arm.panel,
        "arm": arm.name,
        "phase": "reported" if seed >= FIRST_SEED else "tuning",
        "lr": lr,
    }
    row |= json.loads((folder / "end.json").read_text())
    if row["failed"]:
        return row
    summary = json.loads((folder / "summary.json").read_text())
    for key, (mean, _) in summary["after"].items():
        row[key] = mean
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(text) for text in lines]
    row["judge"] = judged(arm.script, folder, row.get("eval/finished", 1.0))
    row["clipped"] = fmean(step["humanline/clipped_low"] + step["humanline/clipped_high"] for step in steps)
    row["grad_norm_max"] = max(step["grad_norm"] for step in steps)
    curve = {}  # {column: accuracy after so many steps}
    for step in steps:
        if "eval/accuracy" in step:
            curve[f"{pictures.AT_STEP}{step['step'] + 1}"] = step["eval/accuracy"]
    if curve:
        row |= {"curve": fmean(curve.values()), **curve}
    return row


def compare(rows: list[dict], metric: str) -> list[dict]:
    """A row per arm: mean over seeds with its 95% t interval, and Welch's t-test against the panel's first
    arm.

    Holm's correction is over the tests of this metric in this figure. Collapsed runs are counted and left
    out.
    """
    runs_of = {}  # {(panel, arm): runs}
    first_of = {}  # {panel: the arm that the others are tested against}
    for row in rows:
        if row["phase"] == "reported":
            runs_of.setdefault((row["panel"], row["arm"]), []).append(row)
            first_of.setdefault(row["panel"], row["arm"])
    table = []
    tests = []
    for (panel, name), runs in runs_of.items():
        first = first_of[panel]
        values = [row[metric] for row in runs if metric in row]
        base = [row[metric] for row in runs_of[panel, first] if metric in row]
        low = high = np.nan
        if len(values) > 1:
            low, high = DescrStatsW(values).tconfint_mean()
        line = {
            "panel": panel,
            "arm": name,
            "lr": runs[0]["lr"],
            "metric": metric,
            "runs": len(runs),
            "collapsed": sum(bool(row.get("failed")) for row in runs),
            "mean": np.mean(values) if values else np.nan,
            "low": low,
            "high": high,
            "against": "" if name == first else first,
        }
        if name != first and len(values) > 1 and len(base) > 1:
            line["difference"] = np.mean(values) - np.mean(base)
            p = ttest_ind(values, base, equal_var=False).pvalue
            line["p"] = np.nan_to_num(p, nan=1.0)  # the same without variance
            tests.append(line)
        table.append(line)
    if tests:
        _, corrected, *_ = multipletests([line["p"] for line in tests], method="holm")
        for line, p in zip(tests, corrected):
            line["p_holm"] = p
    return table


def write_csv(path: Path, rows: list[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {}  # in the order in which rows bring them
    for row in rows:
        columns |= row
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def main(name: Annotated[str, tyro.conf.Positional], seeds: int = 0):
    """Args:
    name: a figure or table (FIGURES), or a study (paper/study.py).
    seeds: reported runs of an arm; 0: 5 of a figure, all that a study plans.
    """
    from paper import study  # here, since it imports this file

    if seeds < 0:
        fail(f"--seeds is {seeds}; it must be at least 1, and 2 for intervals and tests")
    if name == "time":
        return study.run_time(seeds or 3)
    if name in study.STUDIES:
        return study.run_study(name, seeds)
    if name not in FIGURES:
        fail(f"{name!r} is none of {', '.join([*FIGURES, *study.STUDIES, 'time'])}")
    seeds = seeds or 5
    at = commit(name)
    tuned_by = "eval/reward"
    metrics = ["eval/reward", "judge", "clipped", "grad_norm_max"]
    if name == "figure7":
        tuned_by = "curve"  # two rates may both end near 1
        metrics = ["eval/accuracy", "judge", "clipped", "grad_norm_max", "curve"]

    grid = []
    for arm in FIGURES[name]:
        if len(arm.lrs) > 1:
            grid += [(arm, lr, seed, "") for lr in arm.lrs for seed in TUNING_SEEDS]
    rows = run_rows(grid, at)
    best = {}
    for arm in FIGURES[name]:
        scores = []
        for (other, lr, *_), row in zip(grid, rows):
            if other is arm:
                scores.append((row.get(tuned_by, -np.inf), lr))
        best[arm] = max(scores)[1] if scores else arm.lrs[0]
    reported = []
    for arm, lr in best.items():
        reported += [(arm, lr, seed, "") for seed in range(FIRST_SEED, FIRST_SEED + seeds)]
    rows += run_rows(reported, at)
    if commit(name) != at:
        fail(f"the code was changed and committed during the runs; go back to {at}, or start again")

    table = []
    for key in metrics:
        table += compare(rows, key)
    scored = [metric for metric in metrics if metric not in ("clipped", "grad_norm_max")]
    table += untrained_lines(untrained(FIGURES[name], scored, at))
    results = ROOT / "paper" / "results"
    write_csv(results / f"{name}.csv", rows)
    write_csv(results / f"{name}_arms.csv", table)
    pictures.draw(name)


def untrained(arms: list[Arm], metrics: list[str], at: str, more: str = "") -> dict[str, dict]:
    """{panel: {metric: score before training}}, each the mean over three seeds of the evaluation."""
    first_of = {}
    for arm in arms:
        first_of.setdefault(arm.panel, arm._replace(name="untrained"))
    runs = []
    for arm in first_of.values():
        runs += [(arm, 1e-30, seed, f"--num-steps 1 {more}") for seed in (1, 2, 3)]
    rows = run_rows(runs, at)
    scores = {}
    for panel in first_of:
        scores[panel] = {}
        for metric in metrics:
            key = "eval/accuracy" if metric == "curve" else metric
            scores[panel][metric] = fmean(row[key] for row in rows if row["panel"] == panel)
    return scores


def untrained_lines(scores: dict[str, dict]) -> list[dict]:
    """Their lines in NAME_arms.csv."""
    lines = []
    for panel, of_panel in scores.items():
        for metric, score in of_panel.items():
            lines.append({"panel": panel, "arm": "untrained", "metric": metric, "mean": score})
    return lines


def run_rows(runs: list[tuple], at: str) -> list[dict]:
    """The csv's rows of (arm, learning rate, seed, more flags), all of which are run first if need be."""
    run_all([command(*one) for one in runs], at)
    return [result(*one, at) for one in runs]


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
