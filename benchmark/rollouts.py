"""Tokens per second of both engines, and what an online run spends its time on.

    python benchmark/rollouts.py                                    # DPO on the toy, 20 steps, each installed engine
    python benchmark/rollouts.py --script grpo_math --engine hf --json
    torchrun --nproc-per-node 4 benchmark/rollouts.py --engine vllm --model ... --dataset ... --reward-model ...

All flags but those of `Own` are the script's; `DEFAULTS` come before them. The script's own `main` runs with clocks
around its parts, each engine in a process of its own. The first round has the same prompts for every engine. A round's
seconds are spread over the steps that its groups suffice for, also where the run ends sooner. Training is what is left
of the steps: forward, backward, update, drawing prompts, making pairs. Evaluation, reading, loading and writing are no
part of the steps.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Annotated, Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DEFAULTS = ["--num-steps", "20", "--eval-samples", "32", "--checkpoint-every", "0"]
ROUND = ["sampling", "scoring", "grading", "weight update", "engine check", "rest of rounds"]
STEP = [*ROUND, "sync", "training"]


@dataclass
class Own:
    script: Literal["dpo", "kto", "grpo", "grpo_math"] = "dpo"  # <script>_humanline.py
    engine: Literal["both", "hf", "vllm"] = "both"  # both: vllm only where it is installed
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # print one JSON object, {engine: …}


class Clock:
    """Seconds by part. A part's exclude those of the parts inside it, but nothing inside an evaluation counts apart."""

    def __init__(self):
        self.seconds, self.inside, self.since = Counter(), ["rest of the run"], time.perf_counter()

    def charge(self) -> None:
        """Books the time since the last call."""
        if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_initialized():
            cuda.synchronize()
        now = time.perf_counter()
        self.seconds["evaluation" if "evaluation" in self.inside else self.inside[-1]] += now - self.since
        self.since = now

    def time(self, owner, name: str, part: str, look=None) -> None:
        """From now on `owner.name` is timed; `look` gets arguments, result and seconds outside of evaluations."""
        function = getattr(owner, name)

        @wraps(function)
        def timed(*arguments, **named):
            self.charge()
            started = self.since
            self.inside.append(part)
            result = function(*arguments, **named)
            self.charge()
            self.inside.pop()
            if look and "evaluation" not in self.inside:
                look(arguments, result, self.since - started)
            return result

        setattr(owner, name, timed)


def measure(own: Own, args, script) -> dict:
    """Runs the script. {tokens_per_second: of the first round; rounds: {samples, tokens, seconds} of each; steps;
    per_step: {part: seconds}; shares: {part: of a step}; outside: {part: seconds of the run}}; {} but on rank 0."""
    clock, utils, prompts, rounds = Clock(), script.utils, [], []

    def sampled(arguments, result, seconds):
        rounds.append({"samples": len(result[0]), "tokens": sum(map(len, result[0])), "seconds": seconds})

    clock.time(script, "evaluate", "evaluation")
    clock.time(script, "sync_reference", "sync")
    clock.time(utils.Sampler, "sample", "rest of rounds", lambda arguments, *_: prompts.append(len(arguments[2])))
    clock.time(utils, "start_engine", "rest of the run")
    clock.time(utils, "update_engine", "weight update")
    clock.time(utils, "generate", "sampling", sampled)
    clock.time(utils, "engine_difference", "engine check")
    clock.time(utils, "reward_scores", "scoring")
    if own.script == "grpo_math":
        clock.time(script, "score", "grading")
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir = args.output_dir or f"{folder}/run"
        script.main(args)
        clock.charge()
        if int(os.environ.get("RANK", 0)):
            return {}
        steps = [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]
    seconds = clock.seconds
    seconds["training"] = sum(step["perf/step_time"] for step in steps) - sum(seconds[part] for part in STEP)
    seconds["rest of the run"] -= seconds["training"]
    per_group = {"dpo": 1, "kto": 2, "grpo_math": 1}.get(own.script) or args.group_size or 2
    groups = len(steps) * (args.prompts_per_step if own.script == "grpo_math" else args.batch_size // per_group)
    used = min(1.0, groups / sum(prompts) / mean(1 - step.get("rollout/filtered", 0) for step in steps))
    per_step = {part: seconds[part] * (used if part in ROUND else 1) / len(steps) for part in STEP if seconds[part]}
    found = {"tokens_per_second": rounds[0]["tokens"] / rounds[0]["seconds"], "rounds": rounds, "steps": len(steps)}
    found |= {"per_step": per_step, "shares": {part: s / sum(per_step.values()) for part, s in per_step.items()}}
    return found | {"outside": {part: s for part, s in seconds.items() if part not in STEP}}


def main(flags: list[str]) -> None:
    own, rest = tyro.cli(Own, args=flags, add_help=False, return_unknown_args=True)
    asked, found = {"-h", "--help"} & set(rest), {}
    if asked:
        with contextlib.suppress(SystemExit):
            tyro.cli(Own, args=["--help"], description=__doc__)
    if own.engine == "both" and not asked:
        for engine in ["hf", "vllm"] if find_spec("vllm") else ["hf"]:
            command = [sys.executable, __file__, *flags, "--engine", engine, "--json"]
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if told.returncode:
                raise SystemExit(told.returncode)
            found |= json.loads((told.stdout.splitlines() or ["{}"])[-1])
    else:
        script = importlib.import_module(f"{own.script}_humanline")
        ours = [*DEFAULTS, *([] if own.script == "grpo_math" else ["--online"]), "--engine", own.engine]
        with contextlib.redirect_stdout(sys.stdout if asked else sys.stderr):
            args = script.parse_args(rest if asked else [*ours, *rest])
            found[own.engine] = measure(own, args, script)
    if int(os.environ.get("RANK", 0)):
        return
    if own.json:
        print(json.dumps(found))
        return
    for engine, one in found.items():
        told = "{samples} samples, {tokens} tokens in {seconds:.2f} s".format(**one["rounds"][0])
        print(f"{engine}: {one['tokens_per_second']:,.0f} tokens per second (first round: {told})")
        for part, share in one["shares"].items():
            print(f"{part:20}{1000 * one['per_step'][part]:10.1f} ms of a step{share:8.1%}")
        print("not of the steps: " + ", ".join(f"{part} {value:.1f} s" for part, value in one["outside"].items()))


if __name__ == "__main__":
    main(sys.argv[1:])
