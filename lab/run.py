"""Makes the runs of a study, as many at a time as there are cores, and keeps a csv row for each run.

    python -m lab.run lab/rate/games.txt             # writes lab/rate/rate.csv
    python -m lab.run lab/rate/stories.txt --score   # also the scores of the toys' hidden judges
    python -m lab.compare rate --metric curve

A line of the file is a run: panel, arm, instance and command, separated by |. A line without | is a command
that prepares data. Such lines are run before all others. # begins a comment:

    python toy/make.py --tasks shell_game --seed 1 --out runs/games/1
    game | humanline | 1 | python grpo_math_humanline.py --model runs/games/1/shell_game/policy --seed 21
    game | no clip | 1 | python grpo_math_humanline.py --no-humanline --epsilon 1e9 --seed 21

Columns of a row, beside those of the line: seed, commit, processor, versions, seconds, `failed` (the error of
a run that did not end well), the evaluation after training, and

    clipped         share of tokens beyond humanline's bounds, clipped or not, mean over steps
    grad_norm_max   largest gradient norm
    NAME@STEP       an evaluation after that number of steps, of eval/accuracy or eval/reward
    curve, late     mean of these evaluations, and of those of the second half

A row with the same command and commit is not made again, so a study that was stopped goes on. A command on
several lines is run once, for the last of them.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
# What a run depends on: the scripts, the toys, the board's draws, and the programs of lab/ that runs call.
CODE = ["*.py", "toy", "lab/board/*.gz", ":!tests", ":!docs", ":!tools", ":!contrib", ":!*.md"]
CODE += [":!lab/frontier", *(f":!lab/{name}.py" for name in ("board", "compare", "numbers", "run"))]


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit(edited: bool = False) -> str:
    """Returns the last commit that changed the code of runs.

    edited: if the code has changes since, add a + to the commit, and do not end the program.
    """
    changes = git("status", "--porcelain", "--untracked-files=no", "--", *CODE)
    if changes and not edited:
        raise SystemExit(
            "error: commit the changes of the code first; a row names the commit that repeats it"
        )
    # Twelve digits, because the length of git's own abbreviation depends on the clone.
    return git("log", "-1", "--format=%H", "--", *CODE)[:12] + "+" * bool(changes)


def processor() -> str:
    """Returns the processor's name, model and instructions. On equal ones a row repeats to the last digit."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = dict(re.findall(r"^(model name|model)\s*: (.+)", text, re.MULTILINE))
    name = found.get("model name", platform.machine())
    return f"{name}, model {found.get('model', '')}, {torch.backends.cpu.get_cpu_capability()}"


def read_study(path: Path) -> tuple[list[str], list[dict]]:
    """Returns the preparing commands, and the panel, arm, instance and command of each run."""
    preparing = []
    runs = []
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        words = [word.strip() for word in line.split("|", 3)]
        if len(words) == 4:
            runs.append(dict(zip(("panel", "arm", "instance", "command"), words)))
        elif line:
            preparing.append(line)
    return preparing, runs


def shell(line: str) -> subprocess.CompletedProcess:
    """Runs a shell line from the root of the repository, with this Python and one thread."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)


def check(done: subprocess.CompletedProcess):
    """Ends the program if a shell line has failed."""
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nerror: exit code {done.returncode}: {done.args}")


def make_row(run: dict, at: str, score: bool) -> dict:
    """Makes a run and returns its csv row. Its folder keeps metrics and samples, but not the model."""
    folder = ROOT / "runs" / "lab" / hashlib.sha256(f"{at} {run['command']}".encode()).hexdigest()[:16]
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    done = shell(f"{run['command']} --output-dir {folder}")
    row = run | {"commit": at, "processor": processor()}
    row |= {name: version(name) for name in ("torch", "transformers")}
    row |= {"seconds": round(time.monotonic() - started, 1), "failed": ""}
    if done.returncode:
        # An error may stand behind a progress bar, in the same line.
        errors = re.findall(r"\w*[eE]rror: .*", done.stderr) or done.stderr.splitlines()
        return row | {"failed": errors[-1] if errors else f"exit code {done.returncode}"}
    if score and (scored := shell(f"{sys.executable} -m lab.score {folder}")).returncode:
        said = scored.stderr.splitlines() or [f"exit code {scored.returncode}"]
        return row | {"failed": f"its score: {said[-1]}"}
    row |= read_run(folder)
    for name in ("final", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return row


def read_run(folder: Path) -> dict:
    """Returns the columns that follow from the files of a finished run."""
    args, summary = (json.loads((folder / f"{name}.json").read_text()) for name in ("args", "summary"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row = {"seed": args["seed"], "lr": args["lr"]}
    row |= {name: mean for name, (mean, *_) in summary["after"].items()}
    if (folder / "score.json").exists():
        row |= json.loads((folder / "score.json").read_text())
    if "humanline/clipped_low" in steps[0]:  # an edited script may have no clip
        row["clipped"] = fmean(
            step["humanline/clipped_low"] + step["humanline/clipped_high"] for step in steps
        )
    row["grad_norm_max"] = max(step["grad_norm"] for step in steps)
    name = "eval/reward" if "eval/reward" in row and "eval/format" not in row else "eval/accuracy"
    curve = {step["step"]: step[name] for step in steps if name in step and step["step"]}
    if curve:
        curve[len(steps)] = row[name]
        row["curve"] = fmean(curve.values())
        row["late"] = fmean(value for step, value in curve.items() if step >= len(steps) / 2)
        row |= {f"{name}@{step}": value for step, value in curve.items()}
    return row


def make_rows(runs: list[dict], at: str, score: bool = False, jobs: int = 0):
    """Makes runs, as many at a time as there are cores (or `jobs`). Yields the row of each, when it ends."""
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        futures = [pool.submit(make_row, run, at, score) for run in runs]
        try:
            for future in tqdm(as_completed(futures), total=len(runs), unit="run"):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, no other run begins


def main(file: tyro.conf.Positional[Path], jobs: int = 0, score: bool = False):
    """Makes the runs that the csv beside the file lacks.

    Args:
        file: a file in lab/NAME; the csv is lab/NAME/NAME.csv.
        jobs: number of runs at a time; 0: as many as there are cores.
        score: also ask the hidden judge of a toy (lab/score.py).
    """
    at = commit()
    preparing, runs = read_study(file)
    out = file.parent / f"{file.resolve().parent.name}.csv"
    rows = pd.read_csv(out, dtype={"commit": str}).to_dict("records") if out.exists() else []
    made = {row["command"] for row in rows if at.startswith(row["commit"])}
    left = {run["command"]: run for run in runs if run["command"] not in made}  # each command once
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        for done in pool.map(shell, preparing if left else []):
            check(done)
    for row in make_rows(list(left.values()), at, score, jobs):
        rows.append(row)
        pd.DataFrame(rows).to_csv(out.with_suffix(".part"), index=False)
        out.with_suffix(".part").replace(out)  # complete at every moment
    print(f"{out}: {len(rows)} rows, of which {len(left)} are new")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
