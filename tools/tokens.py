"""Writes a page that shows what humanline clipping removes from the batches of a run, token by token.

    TALES="--model toy/tales/policy --dataset toy/tales/preferences_train.jsonl.gz --max-prompt-length 64"
    SAVE="--checkpoint-every 4 --keep-checkpoints 100 --output-dir runs/tales"
    python dpo_humanline.py $TALES --max-length 128 --k 4 --lr 1e-3 --num-steps 16 $SAVE
    python tools/tokens.py --run runs/tales  # writes runs/tales/tokens.html

(DPO's default toy has nothing to show, because its log-ratios hardly ever reach a bound.)

The page is one file that loads nothing. It has a slider for the step and one for the bound of the log-ratios.
A token beyond the bound is struck out, and the loss, the margins and the push on every token change at once.
Groups with the most tokens beyond the run's own bounds come first. #step=12&bound=0.5 at the end of the
address sets both sliders.

A checkpoint after N steps holds both models as step N finds them. So this program loads them and scores the
batch of step N again, with the functions of the script. The page has the metrics of metrics.jsonl beside its
own. A step that begins a new online round is skipped, because its samples are in no checkpoint: there, let
--checkpoint-every be no multiple of a round's steps.
"""

import html
import importlib
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils
from support import data
from support.checkpoint import Progress, find_checkpoints
from support.run import load_args, setup

TEMPLATE = Path(__file__).with_suffix(".html")


# === The steps of a run ===
def open_run(folder: Path) -> tuple:
    """Opens a run. Returns its script as a module, its flags and the device."""
    name = json.loads((folder / "args.json").read_text())["script"]
    script = importlib.import_module(name.rpartition("-")[2])  # behind the name of a variant
    args = load_args(script.Args, str(folder), f"{name}.py")
    args.resume = str(folder)  # otherwise `setup` refuses the folder of a run
    args.shard_size = 0  # over the ranks that are there now: one
    _, _, device = setup(args)
    return script, args, device


def algorithm(script) -> str:
    """Returns "dpo", "kto" or "grpo"."""
    return next(name for name in ("dpo", "kto", "grpo") if hasattr(script, f"{name}_loss"))


def read_progress(checkpoint: Path) -> Progress:
    """Reads what a checkpoint holds besides tensors."""
    state = {"progress": ({},)}
    dcp.load(state, checkpoint_id=checkpoint)
    return Progress(**state["progress"][0])


def load_weights(checkpoint: Path, policy, reference):
    """Fills both models with the weights of a checkpoint."""
    dcp.load({"policy": policy.state_dict(), "reference": reference.state_dict()}, checkpoint_id=checkpoint)


def read_log(folder: Path) -> dict[int, dict]:
    """Returns {step: its metrics} of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines}


def next_batch(script, args, groups: list[tuple], progress: Progress) -> list[tuple] | None:
    """Returns the groups on which the next step trains; None if it begins a new online round.

    groups: those of the data set; [] online.
    """
    size = getattr(args, "prompts_per_step", None) or args.batch_size  # of grpo_math; of the others
    if algorithm(script) == "kto":
        size //= len(groups[0]) if groups else 2
    elif algorithm(script) == "grpo" and not hasattr(args, "prompts_per_step"):
        size //= args.group_size
    if groups:
        return script.draw_batch(groups, progress.step, size, args.seed)
    return progress.pool[:size] if len(progress.pool) >= size else None


@torch.no_grad()
def score(script, args, policy, reference, batch: list[tuple]) -> tuple[list, list]:
    """Returns the log-probs of every completion under the policy and the reference, a list of lists each.

    The micro-batches are those of training on one rank, because rounding depends on them in bf16.
    """
    kind = algorithm(script)
    temperature = args.temperature if hasattr(args, "sample_every") else 1.0  # grpo_math trains at its own
    units = batch if kind == "dpo" else [(example,) for group in batch for example in group]
    lengths = [sum(example.length for example in unit) for unit in units]
    found = {}
    for indices in utils.make_micro_batches(lengths, 1, args.micro_batch_tokens):
        places = [(i, column) for column in range(len(units[0])) for i in indices]
        input_ids, mask = utils.pad_batch([units[i][column] for i, column in places], policy.device)
        logps, ref_logps = (
            utils.token_logps(model, input_ids, mask, temperature).double() for model in (policy, reference)
        )
        for row, place in enumerate(places):
            inside = mask[row].bool()
            found[place] = (logps[row][inside].tolist(), ref_logps[row][inside].tolist())
    ordered = [found[i, column] for i in range(len(units)) for column in range(len(units[0]))]
    return [pair[0] for pair in ordered], [pair[1] for pair in ordered]


def mismatched_log_ratios(script, args, policy, reference, batch: list[tuple]) -> list[list[float]]:
    """Returns the log-ratios of the sequences from which KTO estimates its reference point z_0."""
    sequences = script.mismatch(batch, args.max_length)
    logps, mask = utils.completion_logps(policy, sequences, args.micro_batch_tokens)
    ref_logps, _ = utils.completion_logps(reference, sequences, args.micro_batch_tokens)
    return [row[inside].tolist() for row, inside in zip(logps - ref_logps, mask.bool())]


def describe_step(
    script, args, tokenizer, models, batch: list[tuple], step: int, log: dict, shown: int
) -> dict:
    """Returns a step of the page: all log-ratios of its batch, and the texts of `shown` of its groups.

    The groups with the most tokens beyond the bounds come first.
    """
    kind = algorithm(script)
    logps, ref_logps = score(script, args, *models, batch)
    titles, A = titles_and_advantages(script, batch)
    rows = iter(zip(logps, ref_logps, titles, A, strict=True))
    of_groups = [(group, [next(rows) for _ in group]) for group in batch]
    of_groups.sort(key=lambda of_group: -count_clipped(args, of_group[1]))
    groups = []
    for number, (group, rows) in enumerate(of_groups):
        described = {"rows": []}
        if number < shown:
            described["prompt"] = tokenizer.decode(group[0].prompt_ids)
        for example, (row_logps, row_ref_logps, title, row_A) in zip(group, rows):
            row = {"A": row_A, "x": [six(a - b) for a, b in zip(row_logps, row_ref_logps)]}
            row["nll"] = six(-sum(row_logps) / len(row_logps))
            if number < shown:
                row |= {"title": title, "texts": spell(tokenizer, example.completion_ids)}
                row["logps"] = [six(logp) for logp in row_logps]
            described["rows"].append(row)
        groups.append(described)
    described = {"step": step, "groups": groups, "log": log}
    if kind == "kto":
        mismatched = mismatched_log_ratios(script, args, *models, batch)
        described["mismatched"] = [[six(x) for x in row] for row in mismatched]
    return described


def count_clipped(args, rows: list[tuple]) -> int:
    """Returns how many tokens of a group are beyond the bounds. rows: (logps, ref_logps, ...) of each."""
    count = 0
    for logps, ref_logps, *_ in rows:
        log_ratios = [logp - ref_logp for logp, ref_logp in zip(logps, ref_logps)]
        count += sum(not args.log_epsilon_P <= x <= args.log_epsilon_R for x in log_ratios)
    return count


def titles_and_advantages(script, batch: list[tuple]) -> tuple[list[str], list[float]]:
    """Returns a title for each completion of a batch, and its A: GRPO's advantage; else 1 or -1."""
    examples = [example for group in batch for example in group]
    if algorithm(script) == "grpo":
        rewards = torch.tensor(
            [[example.reward for example in group] for group in batch], dtype=torch.float64
        )
        A = script.group_advantages(rewards).flatten().tolist()
        return [f"reward {example.reward:g}, A = {a:+.2f}" for example, a in zip(examples, A)], A
    if algorithm(script) == "kto":
        good = [example.desirable for example in examples]
        return ["desirable" if each else "undesirable" for each in good], [1 if each else -1 for each in good]
    return ["chosen", "rejected"] * len(batch), [1, -1] * len(batch)


def six(number: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{number:.6g}")


def spell(tokenizer, ids) -> list[str]:
    """Returns the text of each token, so that all texts together are the text of the completion.

    A character may be spelled by several tokens, for example an emoji. Then the last of them gets it, and the
    others get "". A token is decoded behind the one before it, because some tokenizers drop the space of a
    token that stands alone.
    """
    texts = []
    first, before = 0, ""  # `before` is the text of the tokens from `first` on that are already spelled
    for i in range(len(ids)):
        text = tokenizer.decode(ids[first : i + 1], clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and i + 1 < len(ids):
            texts.append("")
            continue
        texts.append(text.removeprefix(before))
        first, before = i, tokenizer.decode(ids[i : i + 1], clean_up_tokenization_spaces=False)
    return texts


# === The page ===
def page(title: str, settings: dict, steps: list[dict]) -> str:
    """Returns the page, a text of HTML.

    Args:
        settings: "kind" ("dpo", "kto" or "grpo"), "low" and "high" (the bounds in nats; None: no bound), and
            what the loss needs: "beta", "sft_weight" (DPO; may be left out), "epsilon" (GRPO), "lambda_D" and
            "lambda_U" (KTO).
        steps: dicts as `describe_step` returns them.
    """
    content = json.dumps({"title": title, **settings, "steps": steps})
    content = content.replace("<", "\\u003c")  # otherwise a text "</script>" would end the data
    return TEMPLATE.read_text(encoding="utf-8").replace("TITLE", html.escape(title)).replace("DATA", content)


def frame(text: str, height: int) -> str:
    """Returns a page as a frame of a notebook's cell."""
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<div><iframe srcdoc="{html.escape(text)}" style="{style}"></iframe></div>'


def settings_of(script, args) -> dict:
    """Returns what the page needs of a run's flags."""
    names = {"dpo": ["sft_weight"], "kto": ["lambda_D", "lambda_U"], "grpo": ["epsilon"]}
    kind = algorithm(script)
    low, high = (None if math.isinf(bound) else bound for bound in (args.log_epsilon_P, args.log_epsilon_R))
    settings = {"kind": kind, "low": low, "high": high, "clips": args.humanline, "beta": args.beta}
    return settings | {name: getattr(args, name) for name in names[kind]}


def main(run: Path, steps: tuple[int, ...] = (), groups: int = 6):
    """Writes the page of a run, tokens.html in its folder.

    Args:
        run: folder of a run with checkpoints.
        steps: steps to show; none: every step that a checkpoint precedes.
        groups: number of groups of each batch whose texts are shown (pairs, examples, samples of a prompt);
            those with the most clipped tokens.
    """
    script, args, device = open_run(run)
    tokenizer, eos_ids = data.load_tokenizer(args)
    offline = not getattr(args, "online", True)  # grpo_math, which has no such flag, always samples
    rows = []
    if offline:
        rows = data.load_groups(args, tokenizer, eos_ids, args.dataset, args.dataset_split, script.encode_row)
    batches = {}  # {checkpoint: (step, batch)}
    for checkpoint in reversed(find_checkpoints(run)):
        progress = read_progress(checkpoint)
        batch = next_batch(script, args, rows, progress)
        if batch is None:
            print(f"step {progress.step} begins a new round, which is not shown")
        elif not steps or progress.step in steps:
            batches[checkpoint] = (progress.step, batch)
    if not batches:
        raise utils.InputError(f"{run} has no checkpoint before such a step: train with --checkpoint-every N")
    models = script.load_models(args, device)
    log = read_log(run)
    shown = []
    for checkpoint, (step, batch) in batches.items():
        load_weights(checkpoint, *models)
        line = log.get(step, {})
        shown.append(describe_step(script, args, tokenizer, models, batch, step, line, groups))
    out = run / "tokens.html"
    title = f"What humanline clipping removes: {Path(script.__file__).name}, {run}"
    out.write_text(page(title, settings_of(script, args), shown), encoding="utf-8")
    print(f"wrote {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
