"""Runs the scripts on the embedded toys, and makes csv rows of the runs.

There are as many runs at a time as cores, and each has one thread. A finished run stays in runs/miniature and
is used again by every plan that needs it. It is made again only after a change of what it computes: a script,
utils.py, support/, a variant or toy/.
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
from collections.abc import Callable
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
from support.run import write_file  # noqa: E402
from toy import make  # noqa: E402

# What a run computes depends on these files.
CODE = ["dpo_humanline.py", "kto_humanline.py", "grpo_humanline.py", "grpo_math_humanline.py", "support"]
CODE += ["utils.py", "paper/chat.py", "paper/frontier.py", "paper/quartiles.py", "paper/variants.py"]
CODE += ["toy", ":!toy/README.md"]
FIRST_SEED = 11  # of the reported runs; smaller seeds are for tuning
# Some errors are results. Either the policy has collapsed, so that the samples of a prompt, or of all
# prompts, are equal; or training has diverged. Any other error ends the program.
COLLAPSED = r"error: (.*(?:no prompt's rewards differ|the batch has one prompt|lower --lr|nan nats apart).*)"
INSTANCES = (1, 2, 3, 4, 5)  # seeds of toy/make.py: the tales' task with another judge and other data
TASKS = range(11, 31)  # further seeds, for one study
# Kinds of problems of toy/sums.py: the first for tuning, the others for the report.
KINDS = ("plus", "plus_small", "plus_large", "minus", "plus_tens", "times")
# Pairs for a chat model, and their files, which must be in runs/ (toy/chat.py says where they come from)
CHATS = {"polite": "instruction-data-with-preference.json", "harmless": "test.jsonl.gz"}
STORIES = (1, 2, *range(11, 23))  # seeds of the stories' task: two for tuning, twelve for the report
GAMES = range(1, 6)  # seeds of toy/make.py: further shell games, with other problems and another policy
KEPT = None  # a file of finished rows (Path), which are not made again; None: none
# --model starts with Table 3's settings, which differ between variants. All arms of a study have these
# instead.
COMMON = {
    "dpo": "--max-grad-norm 1",
    "kto": "--max-grad-norm 1",
    "grpo": "--max-grad-norm 1 --epsilon 0.15",
    "grpo_math": "",
}


class Arm(NamedTuple):
    panel: str
    name: str
    script: str  # dpo, kto, grpo or grpo_math
    flags: str  # all flags but the learning rate and the seed
    lrs: tuple[float, ...]  # the grid of learning rates; a single rate is not tuned
    options: tuple[str, ...] = ("",)  # flags that are tuned together with the learning rate
    then: tuple[str, ...] = ()  # flags that are tried only with the best rate and option
    variant: str = ""  # a name of paper/variants.py


def arms(panel, script, lrs: tuple, flags: dict[str, str], common="", options: tuple = ("",)) -> list[Arm]:
    """Makes the arms of a panel. All other arms are tested against the first one.

    flags: {name of the arm: its flags}. A word before the first `--` is a name of paper/variants.py.
    """
    made = []
    for name, own in flags.items():
        variant, dashes, own = own.partition("--")
        line = f"{common} {dashes}{own}"
        made.append(Arm(panel, name, script, line, lrs, options, variant=variant.strip()))
    return made


TOPICS = "'\"about (cat|dog|king|girl|boat|drum)\"'"  # half of the topics of each kind, for tuning
PREPARE = {  # {file or folder in an arm's flags: the command that makes it}
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
for i in GAMES:
    PREPARE[f"runs/games/{i}/"] = f"python toy/make.py --tasks shell_game --seed {i} --out runs/games/{i}"
for i in STORIES:
    PREPARE[f"runs/stories/{i}/"] = f"python toy/make.py --tasks stories --seed {i} --out runs/stories/{i}"
PREPARE["runs/smollm2 "] = "python toy/smollm2.py runs/smollm2"
for kind in KINDS:
    PREPARE[f"runs/sums/{kind}/"] = f"python toy/sums.py runs/sums/{kind} --kind {kind} --tuning 32"
for kind, file in CHATS.items():
    PREPARE[f"runs/chat/{kind}/"] = f"python toy/chat.py {kind} runs/{file} runs/chat/{kind}"


def commit() -> str:
    """Returns the last commit that changed what runs compute."""
    if git("status", "--porcelain", "--", *CODE):
        files = ", ".join(CODE)
        raise SystemExit(f"error: {files}: commit the changes first; a row names the commit that repeats it")
    found = git("log", "-1", "--format=%h", "--", *CODE)
    if not found:
        raise SystemExit(f"error: {ROOT} must be a git clone; a row names the commit that repeats it")
    return found


def git(*words: str) -> str:
    """Returns what a git command prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def command(arm: Arm, lr: float, seed: int, more: str = "") -> str:
    """Returns the command that repeats a run from the root of the repository.

    more: flags of this run alone. They come last, so they override the arm's flags.
    """
    program = f"{arm.script}_humanline.py"
    if arm.variant:
        program = f"paper/variants.py {arm.variant} {arm.script}_humanline"
    common = COMMON[arm.script] if "--model " in arm.flags else ""
    flags = f"--engine hf --checkpoint-every 0 --lr {lr:g} --seed {seed} {common} {arm.flags} {more}"
    line = f"python {program} {' '.join(flags.split())}"
    for path, preparation in PREPARE.items():
        if path in line:
            line = f"{preparation} && {line}"
    return line


def folder_of(line: str, at: str) -> Path:
    """Returns the folder of a command's run at a commit."""
    digest = hashlib.sha256(f"{at} {line}".encode()).hexdigest()
    return CACHE / digest[:16]


def run_all(lines: list[str], at: str, finished: Callable[[str], None] = lambda line: None):
    """Runs the commands that have not finished yet. A finished run has an end.json in its folder.

    finished: is called with each command, in their order, when its run and those before it have finished.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / ".lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        lines = list(dict.fromkeys(lines))
        left = [line for line in lines if not (folder_of(line, at) / "end.json").exists()]
        try:
            needed = {line for path, line in PREPARE.items() if any(path in run for run in left)}
            list(pool.map(lambda line: prepare(line, at), needed))
            runs = {line: pool.submit(start, line, folder_of(line, at)) for line in left}
            for line in tqdm(lines, unit="run"):
                if line in runs:
                    runs[line].result()
                finished(line)
        finally:
            pool.shutdown(cancel_futures=True)


def prepare(line: str, at: str):
    """Runs a command that makes data, once for each commit."""
    made = folder_of(line, at).with_suffix(".made")
    if not made.exists():
        check(shell(line))
        write_file(made, line)


def start(line: str, folder: Path):
    """Runs a command and writes end.json, also if the policy collapsed. Any other error ends the program."""
    shutil.rmtree(folder, ignore_errors=True)
    training = f"{line.rpartition('&& ')[2]} --output-dir {folder}"
    started = time.monotonic()
    done = shell(training)
    end = {"seconds": round(time.monotonic() - started, 1), "failed": "", "processor": processor()}
    collapse = re.search(COLLAPSED, done.stderr)
    if done.returncode and collapse:
        end["failed"] = collapse[1]
    else:
        check(done)
        if "/stories/policy" in line:
            check(shell(f"python paper/frontier.py {folder}"))
        if "runs/chat/" in line:
            check(shell(f"python paper/chat.py {folder}"))
        if "runs/smollm2" in line:
            shutil.rmtree(folder / "final")  # half a gigabyte
    write_file(folder / "end.json", json.dumps(end))


def check(done: subprocess.CompletedProcess):
    """Ends the program if a shell line has failed."""
    if done.returncode:
        errors = "\n".join(re.findall("error: .*", done.stderr)) or done.stderr
        raise SystemExit(f"{errors}\nerror: exit code {done.returncode}: {done.args}")


def processor() -> str:
    """Returns the processor's name, model and instructions: "Intel(R) Xeon(R) Processor, model 207, AVX512".

    On processors of one name and model a row repeats to the last digit. Equal instructions are not enough: on
    an AMD and an Intel with AVX512, rows in bf16 differ.
    """
    found = dict(re.findall(r"^(model name|model)\s*: (.+)", cpu_info(), re.MULTILINE))
    name = found.get("model name") or platform.processor() or platform.machine()
    model = f", model {found['model']}" if "model" in found else ""
    return f"{name}{model}, {torch.backends.cpu.get_cpu_capability()}"


def cpu_info() -> str:
    """Returns what Linux says of the processors, or "" on another system."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def shell(line: str) -> subprocess.CompletedProcess:
    """Runs a shell line from the root of the repository, with this Python and one thread."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    return subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)


def rows_of(runs: list[tuple], at: str) -> list[dict]:
    """Returns the csv rows of runs, (arm, learning rate, seed, further flags), after making those runs.

    If KEPT is a file, a row is added to it when its run and those before it have finished. Rows in KEPT of
    the same command and commit are not made again, so a later call continues, on any machine.
    """
    if KEPT is None:
        run_all([command(*one) for one in runs], at)
        return [row_of(*one, at) for one in runs]
    rows = kept_rows()
    missing = {}  # {command: {key_of: the run}}
    for one in runs:
        if key_of(one, at) not in rows:
            missing.setdefault(command(*one), {})[key_of(one, at)] = one

    def keep(line: str):
        with KEPT.open("a") as file:
            for key, one in missing[line].items():
                rows[key] = row_of(*one, at)
                file.write(json.dumps(rows[key]) + "\n")

    run_all(list(missing), at, keep)
    return [rows[key_of(one, at)] for one in runs]


def key_of(one: tuple, at: str) -> tuple:
    """Returns what identifies the row of a run: (command, commit, panel, arm)."""
    return command(*one), at, one[0].panel, one[0].name


def kept_rows() -> dict[tuple, dict]:
    """Returns the rows in KEPT, {key_of: row}."""
    rows = {}
    if KEPT.exists():
        for line in KEPT.read_text().splitlines():
            row = json.loads(line)
            rows[row["command"], row["commit"], row["panel"], row["arm"]] = row
    return rows


def row_of(arm: Arm, lr: float, seed: int, more: str, at: str) -> dict:
    """Returns the csv row of a finished run. Among its columns are:

    clipped: fraction of tokens beyond humanline's bounds, whether clipped or not, mean over steps.
    clip_fraction: of GRPO, fraction of tokens that its ε or a variant's own rule stops, mean over steps.
    grad_norm_max: largest gradient norm of a step.
    curve: mean of the evaluations during and after training.
    late: mean of those from the middle of the training on.
    """
    line = command(arm, lr, seed, more)
    folder = folder_of(line, at)
    row = {"command": line, "seed": seed, "commit": at, "panel": arm.panel, "arm": arm.name}
    row |= {"phase": "reported" if seed >= FIRST_SEED else "tuning", "lr": lr}
    row |= json.loads((folder / "end.json").read_text())
    if row["failed"]:
        return row
    steps = read_steps(folder)
    for key, (mean, *_) in read_summary(folder)["after"].items():
        row[key] = mean
    if (folder / "frontier.json").exists():
        row |= frontier_columns(json.loads((folder / "frontier.json").read_text()))
    else:
        row["judge"] = judged(folder)
    if "grpo/clip_fraction" in steps[0]:
        row["clip_fraction"] = fmean(step["grpo/clip_fraction"] for step in steps)
    if (folder / "chat.json").exists():
        row |= json.loads((folder / "chat.json").read_text())
        if "polite" not in arm.panel:
            row.pop("answers")  # are offensive
    row["clipped"] = fmean(step["humanline/clipped_low"] + step["humanline/clipped_high"] for step in steps)
    row["grad_norm_max"] = max(step["grad_norm"] for step in steps)
    curve = {}  # {column: accuracy after that number of updates}
    for step in steps:
        if "eval/accuracy" in step:
            curve[f"eval/accuracy@{step['step']}"] = step["eval/accuracy"]
    if curve:
        curve[f"eval/accuracy@{len(steps)}"] = row["eval/accuracy"]
        late = [value for key, value in curve.items() if int(key.partition("@")[2]) >= len(steps) / 2]
        row |= {"curve": fmean(curve.values()), "late": fmean(late), **curve}
    return row


def frontier_columns(points: dict[str, dict]) -> dict[str, float]:
    """Returns all values of the last step, and judge and KL of every step: judge@15, kl@15."""
    columns = {}
    for step, point in points.items():
        columns |= {f"{name}@{step}": point[name] for name in ("judge", "kl")}
    return point | columns


def read_steps(folder: Path) -> list[dict]:
    """Returns the metrics of a run's steps."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_summary(folder: Path) -> dict:
    """Returns the evaluations before and after training."""
    return json.loads((folder / "summary.json").read_text())


def last_samples(folder: Path) -> list[dict]:
    """Returns the samples of a run's last evaluation, with the keys "prompt" and "sample"."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] == lines[-1]["step"]]


def judged(folder: Path) -> float:
    """Returns the mean score that the toy's hidden judge gives to a run's last samples."""
    model = json.loads((folder / "args.json").read_text())["model"]
    if "smollm2" in model:
        mean, *_ = read_summary(folder)["after"]["eval/accuracy"]
        return mean
    judge = judge_of(model)
    score = fmean(judge(sample["prompt"], sample["sample"]) for sample in last_samples(folder))
    if "shell_game" in model:  # its judge gives 0 to an unfinished sample
        return score
    finished, *_ = read_summary(folder)["after"].get("eval/finished", (1.0, None))
    return score - (1 - finished)  # an unfinished sample costs 1


def judge_of(model: str):
    """Returns the hidden judge of a policy's toy; for runs/instances/3/tales/policy that of instance 3."""
    if "shell_game" in model:
        return make.judge_shell_game
    if "bouquets" in model:
        return make.judge_bouquet
    if "low_entropy" in model:
        return make.LOW_ENTROPY.judge
    instance = re.search(r"instances/(\d+)/", model)
    return make.another_instance(int(instance[1]) if instance else 0).judge


def untrained(arms: list[Arm], metrics: list[str], at: str, seeds: tuple, more: str = "") -> dict[str, dict]:
    """Returns {panel: {metric: score before training}}, means over the seeds of the evaluation.

    The runs make one step with a learning rate of 1e-30, which changes no weight.
    """
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
            key = "eval/accuracy" if metric in ("curve", "late") else metric
            scores[panel][metric] = fmean(row[key] for row in rows if row["panel"] == panel)
    return scores


def write_csv(path: Path, rows: list[dict]):
    """Writes rows. Columns stand in the order in which the rows have them first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {}
    for row in rows:
        columns |= row
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
