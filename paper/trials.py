"""Runs of the scripts on the embedded toys, and the csv rows that are made of them.

As many run at a time as there are cores, one thread each. Finished runs stay in runs/miniature and are not
made again, whoever asks for them, until a script, run.py, utils.py, a variant or toy/ changes.
"""

import csv
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from filelock import FileLock
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "paper" / "results"
CACHE = ROOT / "runs" / "miniature"
sys.path.insert(0, str(ROOT))
from run import fail, write  # noqa: E402
from toy import make  # noqa: E402

# What a run computes depends on these.
CODE = ["dpo_humanline.py", "kto_humanline.py", "grpo_humanline.py", "grpo_math_humanline.py", "run.py"]
CODE += ["utils.py", "paper/frontier.py", "paper/quartiles.py", "paper/variants.py", "toy", ":!toy/README.md"]
FIRST_SEED = 11  # those below are for tuning
# Ends that are results: a prompt's samples differ no more, only those of one prompt do, or training diverged.
COLLAPSED = r"error: (.*(?:no prompt's rewards differ|the batch has one prompt|lower --lr|differ by nan).*)"
INSTANCES = (1, 2, 3, 4, 5)  # tales drawn anew
TASKS = range(11, 31)  # more of them, which a study reports
STORIES = (1, 2, *range(11, 23))  # stories drawn anew: two to tune on, twelve that a study reports


class Arm(NamedTuple):
    panel: str
    name: str
    script: str  # dpo, kto, grpo or grpo_math
    flags: str  # besides the learning rate and the seed
    lrs: tuple[float, ...]  # the grid; a single one is not tuned
    options: tuple[str, ...] = ("",)  # flags that are tuned together with the rate
    then: tuple[str, ...] = ()  # flags that are tried at the best of these alone
    variant: str = ""  # of paper/variants.py


def arms(panel, script, lrs: tuple, flags: dict[str, str], common="", options: tuple = ("",)) -> list[Arm]:
    """The arms of a panel. The first is the one that the others are tested against.

    flags: by arm. What stands before the first `--` is a name of paper/variants.py.
    """
    made = []
    for name, own in flags.items():
        variant, dashes, own = own.partition("--")
        line = f"{common} {dashes}{own}"
        made.append(Arm(panel, name, script, line, lrs, options, variant=variant.strip()))
    return made


TOPICS = "'\"about (cat|dog|king|girl|boat|drum)\"'"  # half of each kind, to tune on
PREPARE = {  # {file or folder of the flags: the command that makes it}
    "runs/quartiles_toy": (
        "python paper/quartiles.py --model toy/bouquets/policy "
        "--dataset toy/bouquets/preferences_train.jsonl.gz --out runs/quartiles_toy"
    ),
    "runs/problems_tuning.jsonl": (
        "mkdir -p runs && "
        "zcat toy/shell_game/problems_test.jsonl.gz | tail -n 244 > runs/problems_tuning.jsonl"
    ),
}
for toy in ("tales", "low_entropy"):
    chosen = f"mkdir -p runs && zcat toy/{toy}/preferences_test.jsonl.gz | grep"
    PREPARE[f"runs/{toy}_tuning.jsonl"] = f"{chosen} -E {TOPICS} > runs/{toy}_tuning.jsonl"
    PREPARE[f"runs/{toy}_report.jsonl"] = f"{chosen} -vE {TOPICS} > runs/{toy}_report.jsonl"
for i in (*INSTANCES, *TASKS):
    PREPARE[f"runs/instances/{i}/"] = f"python toy/make.py --tasks tales --seed {i} --out runs/instances/{i}"
for i in STORIES:
    PREPARE[f"runs/stories/{i}/"] = f"python toy/make.py --tasks stories --seed {i} --out runs/stories/{i}"


def commit() -> str:
    """The last commit that changed what runs compute."""
    if git("status", "--porcelain", "--", *CODE):
        fail(f"{', '.join(CODE)}: commit the changes first; a row names the commit that repeats it")
    found = git("log", "-1", "--format=%h", "--", *CODE)
    if not found:
        fail(f"{ROOT} is not a git clone; a row names the commit that repeats it")
    return found


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def command(arm: Arm, lr: float, seed: int, more: str = "") -> str:
    """What repeats a run, from the root of the repository. more: flags of this run alone."""
    program = f"{arm.script}_humanline.py"
    if arm.variant:
        program = f"paper/variants.py {arm.variant} {arm.script}_humanline"
    flags = f"--engine hf --checkpoint-every 0 --lr {lr:g} --seed {seed} {arm.flags} {more}"
    line = f"python {program} {' '.join(flags.split())}"
    for path, preparation in PREPARE.items():
        if path in line:
            line = f"{preparation} && {line}"
    return line


def folder_of(line: str, at: str) -> Path:
    digest = hashlib.sha256(f"{at} {line}".encode()).hexdigest()
    return CACHE / digest[:16]


def run_all(lines: list[str], at: str):
    """Runs those commands of `command` that are not finished, which end.json in a folder says."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / ".lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        lines = list(dict.fromkeys(lines))
        left = [line for line in lines if not (folder_of(line, at) / "end.json").exists()]
        try:
            list(pool.map(lambda data: prepare(data, at), {line.rpartition("&& ")[0] for line in left}))
            ended = pool.map(lambda line: start(line, folder_of(line, at)), left)
            list(tqdm(ended, initial=len(lines) - len(left), total=len(lines), unit="run"))
        finally:
            pool.shutdown(cancel_futures=True)


def prepare(line: str, at: str):
    """Makes the data of a run, once."""
    made = folder_of(line, at).with_suffix(".made")
    if line and not made.exists():
        shell(line).check_returncode()
        write(made, line)


def start(line: str, folder: Path):
    """A run. Both ends of it count: that it trained, and that it collapsed. Others end the program."""
    shutil.rmtree(folder, ignore_errors=True)
    training = f"{line.rpartition('&& ')[2]} --output-dir {folder}"
    started = time.monotonic()
    done = shell(training)
    end = {"seconds": round(time.monotonic() - started, 1), "failed": "", "processor": processor()}
    if done.returncode:
        collapse = re.search(COLLAPSED, done.stderr)
        if not collapse:
            errors = "\n".join(re.findall("error: .*", done.stderr)) or done.stderr
            raise SystemExit(f"{errors}\nerror: exit code {done.returncode}: {training}")
        end["failed"] = collapse[1]
    elif "/stories/policy" in line:
        shell(f"python paper/frontier.py {folder}").check_returncode()
    write(folder / "end.json", json.dumps(end))


def processor() -> str:
    """On what a row repeats to the last digit: "x86_64 AVX2". Other instructions round otherwise."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def shell(line: str) -> subprocess.CompletedProcess:
    """Runs a line from the root of the repository, with this Python, on one thread."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    return subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)


def rows_of(runs: list[tuple], at: str) -> list[dict]:
    """The csv's rows of (arm, learning rate, seed, more flags), all of which are run first if need be."""
    run_all([command(*one) for one in runs], at)
    return [row_of(*one, at) for one in runs]


def row_of(arm: Arm, lr: float, seed: int, more: str, at: str) -> dict:
    """Of a finished run.

    clipped: share of tokens outside the bounds, clipped or not, mean over steps. grad_norm_max: the largest
    gradient norm of a step. curve: mean of the evaluations during training.
    """
    line = command(arm, lr, seed, more)
    folder = folder_of(line, at)
    row = {"command": line, "seed": seed, "commit": at, "panel": arm.panel, "arm": arm.name}
    row |= {"phase": "reported" if seed >= FIRST_SEED else "tuning", "lr": lr}
    row |= json.loads((folder / "end.json").read_text())
    if row["failed"]:
        return row
    steps = read_steps(folder)
    for key, (mean, _) in read_summary(folder)["after"].items():
        row[key] = mean
    if (folder / "frontier.json").exists():
        row |= frontier_columns(json.loads((folder / "frontier.json").read_text()))
    else:
        row["judge"] = judged(folder)
    row["clipped"] = fmean(step["humanline/clipped_low"] + step["humanline/clipped_high"] for step in steps)
    row["grad_norm_max"] = max(step["grad_norm"] for step in steps)
    curve = {}  # {column: accuracy after so many steps}
    for step in steps:
        if "eval/accuracy" in step:
            curve[f"eval/accuracy@{step['step'] + 1}"] = step["eval/accuracy"]
    if curve:
        row |= {"curve": fmean(curve.values()), **curve}
    return row


def frontier_columns(points: dict[str, dict]) -> dict[str, float]:
    """Of the last step all, of the others the two that make a picture: judge@15, kl@15."""
    columns = {}
    for step, point in points.items():
        columns |= {f"{name}@{step}": point[name] for name in ("judge", "kl")}
    return point | columns


def read_steps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def judged(folder: Path) -> float:
    """Mean score that the toy's hidden judge gives to a run's last samples."""
    model = json.loads((folder / "args.json").read_text())["model"]
    samples = json.loads((folder / "outputs.json").read_text())
    judge = judge_of(model)
    score = fmean(judge(sample["instruction"], sample["output"]) for sample in samples)
    if "shell_game" in model:  # without </answer> nothing is right
        return score
    finished, _ = read_summary(folder)["after"].get("eval/finished", (1.0, None))
    return score - (1 - finished)  # an unfinished one costs 1


def judge_of(model: str):
    """The hidden judge of a toy's policy: that of runs/instances/3/tales/policy is of instance 3."""
    if "shell_game" in model:
        return make.judge_shell_game
    if "bouquets" in model:
        return make.judge_bouquet
    if "low_entropy" in model:
        return make.LOW_ENTROPY.judge
    instance = re.search(r"instances/(\d+)/", model)
    return make.another_instance(int(instance[1]) if instance else 0).judge


def untrained(arms: list[Arm], metrics: list[str], at: str, seeds: tuple, more: str = "") -> dict[str, dict]:
    """{panel: {metric: score before training}}, each the mean over seeds of the evaluation."""
    first_of = {}
    for arm in arms:
        first_of.setdefault(arm.panel, arm._replace(name="untrained"))
    runs = []
    for arm in first_of.values():
        runs += [(arm, 1e-30, seed, f"--num-steps 1 {more}") for seed in seeds]
    rows = rows_of(runs, at)
    scores = {}
    for panel in first_of:
        scores[panel] = {}
        for metric in metrics:
            key = "eval/accuracy" if metric == "curve" else metric
            scores[panel][metric] = fmean(row[key] for row in rows if row["panel"] == panel)
    return scores


def write_csv(path: Path, rows: list[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {}  # in the order in which rows bring them
    for row in rows:
        columns |= row
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
