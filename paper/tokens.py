r"""A page of completions in which every token has the colour of its log π_θ/π_ref, at a checkpoint of a run.

    python grpo_humanline.py --engine hf --lr 2e-3 --seed 11 --checkpoint-every 32 --keep-checkpoints 0 \
        --output-dir runs/tokens
    python paper/tokens.py runs/tokens --step 224 --rows 3 --out tokens.html  # docs/tokens.png shows it

Shown are the first held-out pairs. Policy and reference are those that the checkpoint holds, so what is
struck out is what the next step would do without. Right after a sync the two are nearly equal: every k steps,
a checkpoint has the largest log-ratios. With --no-humanline or --no-clip nothing is struck out. The page is
one file and loads nothing.
"""

import html
import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils  # noqa: E402
from run import exit_on_error, fail, find_checkpoints  # noqa: E402

SCALE = 1.5  # nats, of the full colours; humanline's own bounds
# Black text can be read on both, and eyes that mix red and green can tell them apart.
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
    """The script of a run, its flags, a process group's device, tokenizer, and ids that end a turn."""
    try:
        saved = json.loads((run / "args.json").read_text())
        script = importlib.import_module(saved.pop("script"))
        args = script.Args(**saved)
    except Exception as error:
        raise SystemExit(f"error: {run}: no run is here ({type(error).__name__}: {error})") from None
    args.shard_size = 0  # over the ranks that are here
    _, _, device = script.setup(args)
    with exit_on_error(f"--model {args.model}"):
        names = (args.model, args.chat_template, args.eos_token, args.trust_remote_code)
        tokenizer, eos_ids = utils.load_tokenizer(*names)
    return script, args, device, tokenizer, eos_ids


def find_checkpoint(run: Path, step: int) -> Path:
    """step: 0 is the newest."""
    checkpoints = find_checkpoints(run / "checkpoints")
    for checkpoint in checkpoints:
        if not step or checkpoint.name == f"step-{step}":
            return checkpoint
    known = ", ".join(path.name for path in reversed(checkpoints)) or "none"
    fail(f"--step {step}: of {run}'s checkpoints there are {known}; --keep-checkpoints 0 keeps all")


def load_models(script, args, checkpoint: Path, device) -> tuple:
    """Policy and reference of a checkpoint, in the run's dtypes."""
    reference_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    models = script.load_models(args, reference_dtype, device)
    with exit_on_error(f"{checkpoint} is damaged, or another model's", BaseException):
        for name, model in zip(("policy", "reference"), models):
            weights = dcp_state.get_model_state_dict(model)
            dcp.load({name: weights}, checkpoint_id=checkpoint)  # in place
    return models


def held_out_groups(script, args, tokenizer, eos_ids, rows: int) -> list[tuple]:
    """The first ones that have completions, the best first."""
    groups = []
    if args.eval_dataset:
        groups = script.load_groups(args, tokenizer, eos_ids, args.eval_dataset, args.eval_split)
    groups = [group for group in groups if group[0].completion_ids]
    if not groups:
        fail("the run has no completions as --eval-dataset")
    return groups[: max(1, rows)]


@torch.no_grad()
def score(script, args, models: tuple, group: tuple, tokenizer) -> list[list[dict]]:
    """The tokens of every completion of a group: text, id, log-probs under policy and reference, log-ratio.

    cut: it is outside humanline's bounds. eps: GRPO's clip to 1 ± ε takes its ratio's gradient.
    """
    input_ids, mask = utils.pad_batch(group, models[0].device)  # (B, T)
    logps, ref_logps = (utils.token_logps(model, input_ids, mask).double() for model in models)
    log_ratio = logps - ref_logps
    clipped = script.clip_log_ratio(args, log_ratio)
    cut = clipped != log_ratio
    eps = torch.zeros_like(cut)
    if hasattr(script, "grpo_loss"):
        A = advantages(script, group).to(logps)
        *_, eps = script.grpo_loss(clipped, log_ratio, A, args.beta, args.epsilon)
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
    rewards = torch.tensor([[example.reward for example in group]], dtype=torch.float64)
    return script.group_advantages(rewards)[0]  # (B,)


def show(tokenizer, token: int) -> str:
    """A token's text, line breaks seen; its name if it is a part of a character, or nothing."""
    text = tokenizer.decode([token])
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        text = tokenizer.convert_ids_to_tokens(token)
    return text.replace("\n", "⏎\n")


# === Page ===
def colour(log_ratio: float) -> str:
    """From orange (-SCALE and below) by white (0) to blue (SCALE and above)."""
    share = min(1.0, abs(log_ratio) / SCALE)
    end = ORANGE if log_ratio < 0 else BLUE
    return "#" + "".join(f"{round(255 + share * (channel - 255)):02x}" for channel in end)


def token_html(token: dict) -> str:
    numbers = f"log π_θ {token['logp']:.4f}, log π_ref {token['ref_logp']:.4f}, "
    numbers += f"log-ratio {token['log_ratio']:+.4f} nats, id {token['id']}"
    kind = "t"
    if token["cut"]:
        numbers += ", humanline clips it"
        kind += " cut"
    if token["eps"]:
        numbers += ", 1 ± ε clips it"
        kind += " eps"
    style = f"background:{colour(token['log_ratio'])}"
    return f'<span class="{kind}" style="{style}" title="{numbers}">{html.escape(token["text"])}</span>'


def group_html(script, tokenizer, group: tuple, completions: list) -> str:
    """A section: the prompt, and its completions side by side."""
    prompt = html.escape(tokenizer.decode(group[0].prompt_ids))
    columns = ""
    for i, completion in enumerate(completions):
        title = f"reward {group[i].reward:g}"
        if hasattr(script, "grpo_loss"):
            title += f", A = {advantages(script, group)[i]:+.2f}"
        total = sum(token["log_ratio"] for token in completion)
        clipped = sum(token["clipped"] for token in completion)
        columns += f"<div><h2>{title}; Σ log-ratio {total:+.2f} nats, clipped {clipped:+.2f}</h2>"
        columns += f'<div class="tokens">{"<wbr>".join(map(token_html, completion))}</div></div>'
    heading = f"<div class=prompt><code>{prompt}</code></div>"
    return f"<section>{heading}<div class=pair>{columns}</div></section>\n"


def page(script, args, progress: dict, tokenizer, groups: list, scored: list) -> str:
    gradient = f"linear-gradient(90deg, {colour(-SCALE)}, #fff, {colour(SCALE)})"
    text = f"""{PAGE}
<p><code>{Path(script.__file__).name}</code>, seed {args.seed}, after {progress["step"]} optimizer steps; the
reference is the policy after {progress["last_sync"]} (k = {args.k}). The first {len(groups)} of the
held-out data. Hover over a token for its log-probs. Orange: less likely than under the reference, nats:</p>
<div class="bar" style="background:{gradient}"><span>{-SCALE}</span><span>0</span><span>+{SCALE}</span></div>
"""
    if args.humanline and args.clip:
        bounds = f"[{args.log_epsilon_P:g}, {args.log_epsilon_R:g}]"
        text += f'<p><span class="t cut">token</span> outside {bounds}: humanline clipping removes its '
        text += f"gradient ({share(scored, 'cut')} here)</p>\n"
    if hasattr(script, "grpo_loss"):
        text += f'<p><span class="t eps">token</span> the clip to 1 ± {args.epsilon:g} removes its gradient '
        text += f"({share(scored, 'eps')}), but not that of the KL penalty.</p>\n"
    for group, completions in zip(groups, scored):
        text += group_html(script, tokenizer, group, completions)
    return f"{text}</html>\n"


def share(scored: list, mark: str) -> str:
    """Of the tokens with a mark."""
    tokens = sum(sum(scored, []), [])
    marks = [token[mark] for token in tokens]
    return f"{sum(marks) / len(marks):.1%}"


def main(run: tyro.conf.Positional[Path], step: int = 0, rows: int = 12, out: Path = Path("tokens.html")):
    """Writes the page.

    Args:
        run: Folder of a run with checkpoints.
        step: Of the checkpoint, in optimizer steps; 0 is the newest.
        rows: Groups of completions to show.
        out: The page.
    """
    script, args, device, tokenizer, eos_ids = open_run(run)
    checkpoint = find_checkpoint(run, step)
    with exit_on_error(f"{checkpoint} is damaged"):
        progress = json.loads((checkpoint / "state.json").read_text())
    groups = held_out_groups(script, args, tokenizer, eos_ids, rows)
    models = load_models(script, args, checkpoint, device)
    scored = [score(script, args, models, group, tokenizer) for group in groups]
    if dist.get_rank() == 0:
        text = page(script, args, progress, tokenizer, groups, scored)
        with exit_on_error(f"--out {out}", OSError):
            out.write_text(text, encoding="utf-8")
        print(f"wrote {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
