r"""Writes a page of completions in which the colour of every token is its log π_θ/π_ref, at a checkpoint.

    python grpo_humanline.py --engine hf --lr 2e-3 --seed 11 --checkpoint-every 32 --keep-checkpoints 0 \
        --output-dir runs/tokens
    python paper/tokens.py runs/tokens --step 224 --rows 3 --out tokens.html  # its pairs: docs/tokens.png

The page shows the first held-out pairs. Policy and reference are those of the checkpoint, so the next step
would clip the tokens that are struck out. Right after a sync policy and reference are nearly equal. The
log-ratios are largest after a multiple of k steps, just before the next sync. With --no-humanline or infinite
bounds no token is struck out. The page is one file and loads nothing.
"""

import html
import importlib
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils  # noqa: E402
from support import data  # noqa: E402
from support.run import (  # noqa: E402
    exit_on_input_error,
    find_checkpoints,
    library_errors,
    setup,
    unwrap_checkpoint_exception,
)
from utils import InputError  # noqa: E402

SCALE = 1.5  # log-ratio in nats of the full colours; also humanline's bound
# Black text can be read on both colours, and colour-blind people can tell them apart.
ORANGE = (230, 97, 1)
BLUE = (75, 143, 214)
PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Log-ratios of tokens</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1.5rem;
  color: #1a1a1a; background: #fff; color-scheme: light }
h1 { font-size: 1.35rem } h2 { font-size: .85rem; font-weight: 400; margin: .5rem 0 .3rem; color: #555 }
.bar { width: 20rem; border: 1px solid #999; display: flex; justify-content: space-between; padding: 0 .3rem }
section { border-top: 1px solid #ccc; padding: .8rem 0 1rem } .prompt { color: #555; font-size: .92rem }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem 2.5rem } .tokens { line-height: 2.15 }
.t { font: 15px ui-monospace, "DejaVu Sans Mono", monospace; padding: .18em .3em; margin: 0 1px;
  border-radius: 3px; white-space: pre-wrap; overflow-wrap: anywhere; box-decoration-break: clone;
  -webkit-box-decoration-break: clone }
.cut { text-decoration: line-through 2px; box-shadow: inset 0 0 0 2px #1a1a1a }
.eps { border-bottom: 3px dotted #1a1a1a }
</style>
<h1>The log-ratio of every token, log π<sub>θ</sub>/π<sub>ref</sub></h1>
"""


# === Runs ===
def open_run(run: Path) -> tuple:
    """Opens a run: returns its script, its flags, the device, the tokenizer and the ids of its EOS tokens."""
    with library_errors(f"{run} is no run"):
        saved = json.loads((run / "args.json").read_text())
        script = importlib.import_module(saved.pop("script"))
        args = script.Args(**saved)
    args.shard_size = 0  # sharded over all ranks that are there now
    _, _, device = setup(args, batch_size=int(os.environ.get("WORLD_SIZE", 1)))
    tokenizer, eos_ids = data.load_tokenizer(args)
    return script, args, device, tokenizer, eos_ids


def find_checkpoint(run: Path, step: int) -> Path:
    """Finds the checkpoint of a step; 0: the newest one."""
    checkpoints = find_checkpoints(run)
    for checkpoint in checkpoints:
        if not step or checkpoint.name == f"step-{step}":
            return checkpoint
    known = ", ".join(path.name for path in reversed(checkpoints)) or "none"
    raise InputError(f"--step {step}: the checkpoints of {run} are {known}; --keep-checkpoints 0 keeps all")


def load_models(script, args, checkpoint: Path, device, groups: list[tuple]) -> tuple:
    """Loads the policy and the reference of a checkpoint, for the sequences of `groups`."""
    models = script.load_models(args, device, data.longest_sequence(args, groups))
    with library_errors(f"{checkpoint} is damaged, or of another model"), unwrap_checkpoint_exception():
        for name, model in zip(("policy", "reference"), models):
            weights = dcp_state.get_model_state_dict(model)
            dcp.load({name: weights}, checkpoint_id=checkpoint)  # fills the weights in place
    return models


def held_out_groups(script, args, tokenizer, eos_ids, rows: int) -> list[tuple]:
    """Returns the first held-out groups that have completions, with the best completion first."""
    groups = []
    if args.eval_dataset:
        groups = script.load_groups(args, tokenizer, eos_ids, args.eval_dataset, args.eval_split)
    groups = [group for group in groups if group[0].completion_ids]
    if not groups:
        raise InputError("the --eval-dataset of the run has no completions")
    return groups[: max(1, rows)]


@torch.no_grad()
def score(script, args, models: tuple, group: tuple, tokenizer) -> list[list[dict]]:
    """Returns a list for each completion of a group, with a dict for each token.

    The dict has the token's text and id, its log-probs under policy and reference, its log-ratio before and
    after clipping, and whether the token is outside humanline's bounds (cut) and whether GRPO's clip to 1 ± ε
    removes the gradient of its ratio (eps).
    """
    input_ids, mask = utils.pad_batch(group, models[0].device)  # (B, T)
    logps, ref_logps = (utils.token_logps(model, input_ids, mask).double() for model in models)
    log_ratio = logps - ref_logps
    clipped = script.clip_log_ratio(args, log_ratio)
    cut = clipped != log_ratio
    eps = torch.zeros_like(cut)
    if hasattr(script, "grpo_loss"):
        A = advantages(script, group).to(logps)
        of_tokens = script.grpo_metrics(cut, clipped, log_ratio, A, args.epsilon)
        eps = of_tokens["grpo/clip_fraction"].bool()
    columns = {"id": input_ids, "logp": logps, "ref_logp": ref_logps, "log_ratio": log_ratio}
    columns |= {"clipped": clipped, "cut": cut, "eps": eps}
    completions = []
    for row, inside in enumerate(mask.bool()):
        lists = [column[row][inside].tolist() for column in columns.values()]
        completion = [dict(zip(columns, values)) for values in zip(*lists)]
        for token in completion:
            token["text"] = show(tokenizer, token["id"])
        completions.append(completion)
    return completions


def advantages(script, group: tuple):
    """Computes GRPO's advantages of a group, (B,)."""
    rewards = torch.tensor([[example.reward for example in group]], dtype=torch.float64)
    return script.group_advantages(rewards)[0]


def describe(script, group: tuple, number: int) -> str:
    """Says what training makes of a completion of a group."""
    if hasattr(script, "grpo_loss"):
        return f"reward {group[number].reward:g}, A = {advantages(script, group)[number]:+.2f}"
    if hasattr(script, "kto_loss"):
        return "desirable" if group[number].desirable else "undesirable"
    return ("chosen", "rejected")[number]


def show(tokenizer, token: int) -> str:
    """Returns the text of a token with visible line breaks. A token without text is shown by its name."""
    text = tokenizer.decode([token])
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        text = tokenizer.convert_ids_to_tokens(token)
    return text.replace("\n", "⏎\n")


# === Page ===
def colour(log_ratio: float) -> str:
    """Returns the colour of a log-ratio: orange at -SCALE and below, white at 0, blue at SCALE and above."""
    share = min(1.0, abs(log_ratio) / SCALE)
    end = ORANGE if log_ratio < 0 else BLUE
    return "#" + "".join(f"{round(255 + share * (channel - 255)):02x}" for channel in end)


def token_html(token: dict) -> str:
    """Writes a token. Its numbers appear when the mouse is over it."""
    numbers = f"log π_θ {token['logp']:.4f}, log π_ref {token['ref_logp']:.4f}, "
    numbers += f"log-ratio {token['log_ratio']:+.4f} nats, id {token['id']}"
    kind = "t"
    if token["cut"]:
        numbers += ", clipped by humanline"
        kind += " cut"
    if token["eps"]:
        numbers += ", clipped by 1 ± ε"
        kind += " eps"
    style = f"background:{colour(token['log_ratio'])}"
    return f'<span class="{kind}" style="{style}" title="{numbers}">{html.escape(token["text"])}</span>'


def group_html(script, tokenizer, group: tuple, completions: list) -> str:
    """Writes a section of the page: a prompt and its completions side by side."""
    prompt = html.escape(tokenizer.decode(group[0].prompt_ids))
    columns = ""
    for i, completion in enumerate(completions):
        title = describe(script, group, i)
        total = sum(token["log_ratio"] for token in completion)
        clipped = sum(token["clipped"] for token in completion)
        columns += f"<div><h2>{title}; Σ log-ratio {total:+.2f} nats, clipped {clipped:+.2f}</h2>"
        columns += f'<div class="tokens">{"<wbr>".join(map(token_html, completion))}</div></div>'
    heading = f"<div class=prompt><code>{prompt}</code></div>"
    return f"<section>{heading}<div class=pair>{columns}</div></section>\n"


def describe_reference(args, step: int) -> str:
    """Says which policy the reference is, after that number of steps."""
    if getattr(args, "online", True):  # grpo_math, which has no such flag, always samples
        return f"the reference is synced every {args.k} steps and when a round starts"
    if not args.humanline or args.k == 0:
        return "the reference is the initial policy"
    return f"the reference is the policy after {(step - 1) // args.k * args.k} (k = {args.k})"


def page(script, args, step: int, tokenizer, groups: list, scored: list) -> str:
    """Writes the page."""
    gradient = f"linear-gradient(90deg, {colour(-SCALE)}, #fff, {colour(SCALE)})"
    text = f"""{PAGE}
<p><code>{Path(script.__file__).name}</code>, seed {args.seed}, after {step} optimizer steps;
{describe_reference(args, step)}. These are the first {len(groups)} groups of the held-out data.
Hold the mouse over a token to see its log-probs. The colour is the log-ratio in nats:</p>
<div class="bar" style="background:{gradient}"><span>{-SCALE}</span><span>0</span><span>+{SCALE}</span></div>
"""
    if args.humanline and min(-args.log_epsilon_P, args.log_epsilon_R) < math.inf:
        bounds = f"[{args.log_epsilon_P:g}, {args.log_epsilon_R:g}]"
        text += f'<p><span class="t cut">token</span> outside {bounds}: humanline clipping removes its '
        text += f"gradient ({share(scored, 'cut')} here)</p>\n"
    if hasattr(script, "grpo_loss"):
        text += f'<p><span class="t eps">token</span> the clip to 1 ± {args.epsilon:g} removes its gradient '
        text += f"({share(scored, 'eps')} here)</p>\n"
        text += "<p>Neither clip removes the gradient of the KL penalty.</p>\n"
    for group, completions in zip(groups, scored):
        text += group_html(script, tokenizer, group, completions)
    return f"{text}</html>\n"


def share(scored: list, mark: str) -> str:
    """Returns the fraction of tokens with a mark, in percent."""
    tokens = sum(sum(scored, []), [])
    marks = [token[mark] for token in tokens]
    return f"{sum(marks) / len(marks):.1%}"


def main(run: tyro.conf.Positional[Path], step: int = 0, rows: int = 12, out: Path = Path("tokens.html")):
    """Writes the page.

    Args:
        run: folder of a run with checkpoints.
        step: number of optimizer steps of the checkpoint; 0: the newest checkpoint.
        rows: number of held-out groups to show.
        out: file of the page.
    """
    script, args, device, tokenizer, eos_ids = open_run(run)
    checkpoint = find_checkpoint(run, step)
    groups = held_out_groups(script, args, tokenizer, eos_ids, rows)
    models = load_models(script, args, checkpoint, device, groups)
    scored = [score(script, args, models, group, tokenizer) for group in groups]
    if dist.get_rank() == 0:
        steps = int(checkpoint.name.removeprefix("step-"))
        text = page(script, args, steps, tokenizer, groups, scored)
        with library_errors(f"--out {out}"):
            out.write_text(text, encoding="utf-8")
        print(f"wrote {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_on_input_error():
        tyro.cli(main, description=__doc__)
