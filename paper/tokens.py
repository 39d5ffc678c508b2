r"""A page of completions in which every token has the colour of its log π_θ/π_ref, at a checkpoint of a run.

    python grpo_humanline.py --engine hf --lr 2e-3 --seed 11 --checkpoint-every 32 --keep-checkpoints 0 \
        --output-dir runs/tokens
    python paper/tokens.py runs/tokens --step 224 --rows 3 --out tokens.html  # docs/tokens.png shows it

Policy and reference are those that the checkpoint holds, so what is struck out is what the next step would do
without. Right after a sync the two are nearly equal: every k steps, a checkpoint has the largest log-ratios.
Shown are the first held-out pairs; without any, the sampled groups that wait in the checkpoint (online,
math), or the training data. The page is one file and loads nothing. With --no-humanline, or --clip other than
clip, nothing is struck out.
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
import torch.distributed.checkpoint.state_dict as dcp_state
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils  # noqa: E402
from run import exit_on_error, fail, find_checkpoints  # noqa: E402

# Black text can be read on both, and eyes that mix red and green can tell them apart.
ORANGE = (230, 97, 1)
BLUE = (75, 143, 214)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto;
  max-width: 72rem; padding: 0 1.5rem; color-scheme: light }
h1 { font-size: 1.35rem; margin: 0 0 .3rem } p { margin: .3rem 0; max-width: 60rem } code { font-size: .92em }
.legend { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 3rem; margin: 1rem 0 1.4rem;
  font-size: .9rem; line-height: 2.1; align-items: end }
.bar { width: 20rem; height: 1rem; border: 1px solid #999 } .ticks { display: flex; width: 20rem;
  justify-content: space-between; font-size: .8rem; line-height: 1.4; font-variant-numeric: tabular-nums }
section { border-top: 1px solid #ccc; padding: .8rem 0 1rem } .prompt { color: #555; font-size: .92rem }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem 2.5rem } .pair > div { min-width: 0 }
h2 { font-size: .85rem; font-weight: 600; margin: .5rem 0 .3rem } h2 span { font-weight: 400; color: #555 }
.tokens { line-height: 2.15 }
.t { font: 15px ui-monospace, "DejaVu Sans Mono", monospace; padding: .18em .3em; margin: 0 1px;
  border-radius: 3px; white-space: pre-wrap; overflow-wrap: anywhere; box-decoration-break: clone;
  -webkit-box-decoration-break: clone }
.cut { text-decoration: line-through 2px; box-shadow: inset 0 0 0 2px #1a1a1a }
.eps { border-bottom: 3px dotted #1a1a1a }
"""


def open_run(run: Path) -> tuple:
    """The script of a run, its flags, and a process group for its functions."""
    try:
        saved = json.loads((run / "args.json").read_text())
        name = saved.pop("script")
        if not name.endswith("_humanline"):
            raise ValueError(f"a run of {name}")
        script = importlib.import_module(name)
        args = script.Args(**saved)
    except Exception as error:
        raise SystemExit(f"error: {run}: no run is here ({type(error).__name__}: {error})") from None
    args.shard_size = 0  # over the ranks that are here
    return script, args, script.setup(args)


def load_models(script, args, config, checkpoint: Path, device) -> tuple:
    """Policy and reference of a checkpoint, in the run's dtypes."""
    reference_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    policy, reference = script.load_models(args, config, reference_dtype, device)
    models = {"policy": policy.eval(), "reference": reference}
    with exit_on_error(f"{checkpoint} is damaged, or another model's", BaseException):
        weights = {name: dcp_state.get_model_state_dict(model) for name, model in models.items()}
        dcp.load(weights, checkpoint_id=checkpoint)
        for name, model in models.items():
            dcp_state.set_model_state_dict(model, weights[name])
    return policy, reference


def load_examples(script, args, tokens, checkpoint: Path, state: dict) -> tuple[list[tuple], str]:
    """Groups of completions, the best first, and where they are from."""
    has_pairs = not hasattr(args, "sample_every")
    sizes = range(1000)  # numbers of completions that a row may have
    if has_pairs and args.eval_dataset:
        groups, _ = script.load_groups(
            args, "--eval-dataset", args.eval_dataset, args.eval_split, tokens, sizes
        )
        groups = [group for group in groups if group[0].completion_ids]
        if groups:
            return groups, "held-out data"
    if state["pool"]:
        groups = []
        for group in state["pool"]:
            groups.append(tuple(utils.Example(*values) for values in group))
        return groups, "samples that wait to be trained on"
    if has_pairs and not args.online:
        groups, _ = script.load_groups(args, "--dataset", args.dataset, args.dataset_split, tokens, sizes)
        return groups, "training data"
    fail(f"{checkpoint} has no samples left and the run holds out no pairs: name a --step within a round")


@torch.no_grad()
def score(script, args, models: tuple, group: tuple, tokens, device) -> list[list[dict]]:
    """The tokens of every completion of a group: text, id, log-probs under policy and reference, log-ratio.

    cut: it is outside humanline's bounds. eps: GRPO's clip to 1 ± ε takes its ratio's gradient. alone:
    without humanline clipping it would have one.
    """
    input_ids, mask = utils.pad_batch(group, tokens.pad_id, device)  # (B, T)
    temperature = args.temperature if hasattr(args, "sample_every") else 1.0
    logps, ref_logps = (utils.token_logps(model, input_ids, mask, temperature).double() for model in models)
    log_ratio = logps - ref_logps
    clipped = log_ratio
    if args.humanline and args.clip == "clip":
        clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)
    cut = clipped != log_ratio
    eps = torch.zeros_like(cut)
    alone = cut
    if hasattr(script, "grpo_loss"):
        advantages = logps.new_tensor(script.group_advantages([x.reward for x in group]))
        *_, eps = script.grpo_loss(clipped, log_ratio, advantages, args.beta, args.epsilon)
        alone = cut & ~eps & (advantages != 0)[:, None]
    columns = {
        "id": input_ids,
        "logp": logps,
        "ref_logp": ref_logps,
        "log_ratio": log_ratio,
        "clipped": clipped,
        "cut": cut,
        "eps": eps,
        "alone": alone,
    }
    completions = []
    for row, inside in enumerate(mask.bool()):
        lists = [column[row][inside].tolist() for column in columns.values()]
        completion = [dict(zip(columns, values)) for values in zip(*lists)]
        for token in completion:
            token["text"] = show(tokens.tokenizer, token["id"])
        completions.append(completion)
    return completions


def show(tokenizer, token: int) -> str:
    """A token's text, line breaks seen; its name if it is a part of a character, or nothing."""
    text = tokenizer.decode([token])
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        text = tokenizer.convert_ids_to_tokens(token)
    return text.replace("\n", "⏎\n")


def colour(log_ratio: float, scale: float) -> str:
    """From orange (-scale nats and below) by white (0) to blue (scale and above)."""
    share = min(1.0, abs(log_ratio) / scale)
    end = ORANGE if log_ratio < 0 else BLUE
    code = "#"
    for channel in end:
        code += f"{round(255 + share * (channel - 255)):02x}"
    return code


def completion_html(title: str, completion: list[dict], scale: float) -> str:
    spans = []
    for token in completion:
        numbers = f"log π_θ {token['logp']:.4f}, log π_ref {token['ref_logp']:.4f}, "
        numbers += f"log-ratio {token['log_ratio']:+.4f} nats, id {token['id']}"
        kind = "t"
        if token["cut"]:
            numbers += ", humanline clips it"
            kind += " cut"
        if token["eps"]:
            numbers += ", 1 ± ε clips it"
            kind += " eps"
        style = f"background:{colour(token['log_ratio'], scale)}"
        text = html.escape(token["text"])
        spans.append(f'<span class="{kind}" style="{style}" title="{numbers}">{text}</span>')
    total = sum(token["log_ratio"] for token in completion)
    clipped = sum(token["clipped"] for token in completion)
    sums = f"Σ log-ratio {total:+.2f} nats"
    if clipped != total:
        sums += f", clipped {clipped:+.2f}"
    heading = f"<h2>{title} <span>{sums}</span></h2>"
    return f'<div>{heading}<div class="tokens">{"<wbr>".join(spans)}</div></div>'


def group_html(script, args, tokens, group: tuple, completions: list, scale: float) -> str:
    """A section: the prompt, its completions side by side, and the margin of pairs."""
    prompt = html.escape(tokens.tokenizer.decode(group[0].prompt_ids))
    parts = []
    for title, completion in zip(group_titles(script, group), completions):
        parts.append(completion_html(title, completion, scale))
    margin = ""
    if len(completions) == 2:
        margin = margin_html(script, args, *completions)
    columns = f"<div class=pair>{''.join(parts)}</div>"
    return f"<section><div class=prompt><code>{prompt}</code></div>{columns}{margin}</section>"


def group_titles(script, group: tuple) -> list[str]:
    names = ["chosen", "rejected"]
    if not hasattr(script, "group_advantages"):
        if len(group) == 1:
            names = ["desirable" if group[0].reward > 0 else "undesirable"]
        return names
    if len(group) != 2:
        names = ["sample"] * len(group)
    advantages = script.group_advantages([x.reward for x in group])
    return [f"{name}, A = {A:+.2f}" for name, A in zip(names, advantages)]


def margin_html(script, args, chosen: list[dict], rejected: list[dict]) -> str:
    margins = {}
    for key in ("log_ratio", "clipped"):
        margins[key] = sum(x[key] for x in chosen) - sum(x[key] for x in rejected)
    raw, clipped = margins["log_ratio"], margins["clipped"]
    text = f"margin, chosen − rejected: <b>{raw:+.2f} nats</b>"
    if clipped != raw:
        text += f", clipped {clipped:+.2f}"
    if not hasattr(script, "grpo_loss"):
        text += f"; reward margin, β = {args.beta:g} times that: {args.beta * clipped:+.2f}"
    return f"<p class=prompt>{text}</p>"


def page(script, args, state: dict, name: str, source: str, tokens, groups: list, scored: list) -> str:
    scale = max(-args.log_epsilon_P, args.log_epsilon_R)
    if scale >= 20:  # bounds that are off
        scale = 1.5
    gradient = f"linear-gradient(90deg, {colour(-scale, scale)}, #fff, {colour(scale, scale)})"
    ticks = "<span>{:+.3g}</span><span>{:+.3g}</span><span>0</span><span>{:+.3g}</span><span>{:+.3g}</span>"
    ticks = ticks.format(-scale, -scale / 2, scale / 2, scale)
    sections = []
    for group, completions in zip(groups, scored):
        sections.append(group_html(script, args, tokens, group, completions, scale))
    sections = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(name)}: log-ratios of tokens</title>
<style>{STYLE}</style>
<h1>The log-ratio of every token, log π<sub>θ</sub>/π<sub>ref</sub></h1>
<p>{about_html(script, args, state, source, len(groups))}</p>
<div class="legend"><div><div class="bar" style="background:{gradient}"></div><div class="ticks">{ticks}</div>
nats; orange: less likely than under the reference</div><div>{marks_html(script, args, scored)}</div></div>
{sections}
</html>
"""


def about_html(script, args, state: dict, source: str, count: int) -> str:
    file = Path(script.__file__).name
    text = f"<code>{file}</code>, seed {args.seed}, after {state['step']} optimizer steps; "
    text += f"the reference is the policy after {state['last_sync']}"
    if args.humanline and args.sync != "none":
        text += f" (k = {args.k})"
    text += f". The first {count} of the {source}. Hover over a token for its log-probs."
    if hasattr(script, "grpo_loss"):
        text += " No clip touches the KL penalty."
    return text


def marks_html(script, args, scored: list) -> str:
    """What the marks mean, and on how many of the tokens they are."""
    every = []
    for completions in scored:
        for completion in completions:
            every += completion

    def share(mark: str) -> str:
        return f"{sum(token[mark] for token in every) / len(every):.1%}"

    marks = "this run does not clip: nothing is struck out"
    if args.humanline and args.clip == "clip":
        marks = f'<span class="t cut">token</span> outside [{args.log_epsilon_P:g}, {args.log_epsilon_R:g}]: '
        marks += f"humanline clipping removes its gradient ({share('cut')} here"
        if hasattr(script, "grpo_loss"):
            marks += f", {share('alone')} it alone"
        marks += ")"
    if hasattr(script, "grpo_loss"):
        marks += (
            f'<br><span class="t eps">token</span> the clip to 1 ± {args.epsilon:g} removes its gradient '
        )
        marks += f"({share('eps')})"
    return marks


def main(run: tyro.conf.Positional[Path], step: int = 0, rows: int = 12, out: Path = Path("tokens.html")):
    """Writes the page.

    Args:
        run: Folder of a run with checkpoints.
        step: Of the checkpoint, in optimizer steps; 0 is the newest.
        rows: Groups of completions to show.
        out: The page.
    """
    script, args, (rank, _, device) = open_run(run)
    checkpoints = find_checkpoints(run / "checkpoints")
    if not checkpoints:
        fail(f"{run} has no checkpoints: run it with --checkpoint-every")
    checkpoint = checkpoints[0]
    if step:
        checkpoint = run / "checkpoints" / f"step-{step}"
    if checkpoint not in checkpoints:
        known = ", ".join(path.name[5:] for path in reversed(checkpoints))
        fail(f"--step {step}: the checkpoints of {run} are {known}; keep more with --keep-checkpoints 0")
    if rows < 1:
        fail(f"--rows is {rows}; it must be at least 1")
    with exit_on_error(f"{checkpoint} is damaged"):
        state = json.loads((checkpoint / "state.json").read_text())
    config, _, tokens = script.load_config(args)
    groups, source = load_examples(script, args, tokens, checkpoint, state)
    groups = groups[:rows]
    models = load_models(script, args, config, checkpoint, device)
    scored = []
    for group in groups:
        completions = score(script, args, models, group, tokens, device)
        for completion in completions:
            if not all(math.isfinite(token["log_ratio"]) for token in completion):
                fail(f"{checkpoint}: log-probs are not finite")
        scored.append(completions)
    if rank == 0:
        text = page(script, args, state, run.resolve().name, source, tokens, groups, scored)
        with exit_on_error(f"--out {out}", OSError):
            out.write_text(text, encoding="utf-8")
        print(f"wrote {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
