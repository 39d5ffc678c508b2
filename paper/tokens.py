r"""A page of completions in which every token has the colour of its log π_θ/π_ref, at a checkpoint of a run.

    python grpo_humanline.py --engine hf --lr 2e-3 --seed 11 --checkpoint-every 32 --keep-checkpoints 0 \
        --output-dir runs/tokens
    python paper/tokens.py runs/tokens --step 224 --rows 3 --out tokens.html  # docs/tokens.png is a picture of it

Policy and reference are those that the checkpoint holds, so what is struck out is what the next step would do without.
Right after a sync the two are nearly equal: every k steps, a checkpoint has the largest log-ratios. Shown are the first
held-out pairs; without any, the sampled groups that wait in the checkpoint (online, math), or the training data.
The page is one file and loads nothing. With --no-humanline, or --clip other than clip, nothing is struck out.
"""

import html
import importlib
import json
import math
import sys
from pathlib import Path

import pyarrow.parquet
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils  # noqa: E402

ORANGE, BLUE = (230, 97, 1), (75, 143, 214)  # black text can be read on both, and eyes that mix red and green tell them
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto; max-width: 72rem;
  padding: 0 1.5rem; color-scheme: light }
h1 { font-size: 1.35rem; margin: 0 0 .3rem } p { margin: .3rem 0; max-width: 60rem } code { font-size: .92em }
.legend { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 3rem; margin: 1rem 0 1.4rem;
  font-size: .9rem; line-height: 2.1; align-items: end }
.bar { width: 20rem; height: 1rem; border: 1px solid #999 } .ticks { display: flex; width: 20rem;
  justify-content: space-between; font-size: .8rem; line-height: 1.4; font-variant-numeric: tabular-nums }
section { border-top: 1px solid #ccc; padding: .8rem 0 1rem } .prompt { color: #555; font-size: .92rem }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem 2.5rem } .pair > div { min-width: 0 }
h2 { font-size: .85rem; font-weight: 600; margin: .5rem 0 .3rem } h2 span { font-weight: 400; color: #555 }
.tokens { line-height: 2.15 }
.t { font: 15px ui-monospace, "DejaVu Sans Mono", monospace; padding: .18em .3em; margin: 0 1px; border-radius: 3px;
  white-space: pre-wrap; overflow-wrap: anywhere; box-decoration-break: clone; -webkit-box-decoration-break: clone }
.cut { text-decoration: line-through 2px; box-shadow: inset 0 0 0 2px #1a1a1a }
.eps { border-bottom: 3px dotted #1a1a1a }
"""


def open_run(run: Path) -> tuple:
    """The script of a run, its flags, and a process group for its functions."""
    try:
        saved = json.loads((run / "args.json").read_text())
        assert saved["script"].endswith("_humanline"), f"a run of {saved['script']}"
        script = importlib.import_module(saved.pop("script"))
        args = script.Args(**saved)
    except Exception as error:
        raise SystemExit(f"error: {run}: no run is here ({type(error).__name__}: {error})") from None
    args.shard_size = 0  # over the ranks that are here
    return script, args, script.setup()


def load_models(script, args, config, checkpoint: Path, device) -> tuple:
    """Policy and reference of a checkpoint, in the run's dtypes."""
    reference_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    policy, reference = script.load_models(args, config, getattr(torch, args.dtype), reference_dtype, device)
    models = {"policy": policy.eval(), "reference": reference}
    with script.blame(f"{checkpoint} is damaged, or another model's", BaseException):
        weights = {name: dcp_state.get_model_state_dict(model) for name, model in models.items()}
        dcp.load(weights, checkpoint_id=checkpoint)
        for name, model in models.items():
            dcp_state.set_model_state_dict(model, weights[name])
    return policy, reference


def load_examples(script, args, tokens, checkpoint: Path) -> tuple[list[tuple], str]:
    """Groups of completions, the best first, and where they are from."""
    has_pairs, sizes = not hasattr(args, "sample_every"), range(1000)
    if has_pairs and args.eval_dataset:
        groups = script.load_groups(args, "--eval-dataset", args.eval_dataset, args.eval_split, tokens, sizes, {})
        if groups := [group for group in groups if group[0].completion_ids]:
            return groups, "held-out data"
    rows = pyarrow.parquet.read_table(checkpoint / "pool.parquet").to_pylist()
    if rows:
        return [tuple(utils.Example(**x) for x in row["group"]) for row in rows], "samples that wait to be trained on"
    if has_pairs and not args.online:
        return script.load_groups(
            args, "--dataset", args.dataset, args.dataset_split, tokens, sizes, {}
        ), "training data"
    script.fail(f"{checkpoint} has no samples left and the run holds out no pairs: name a --step within a round")


@torch.no_grad()
def score(script, args, models: tuple, group: tuple, tokens, device) -> list[list[dict]]:
    """For every completion of a group its tokens: text, id, log-probs in nats under policy and reference, log-ratio,
    whether it is outside humanline's bounds (cut), whether GRPO's clip to 1 ± ε takes its ratio's gradient (eps), and
    whether without humanline clipping it would have one (alone)."""
    input_ids, mask = utils.pad_batch(group, tokens.pad_id, device)  # (B, T)
    temperature = args.temperature if hasattr(args, "sample_every") else 1.0
    logps, ref_logps = (utils.token_logps(model, input_ids, mask, temperature).double() for model in models)
    log_ratio = clipped = logps - ref_logps
    if args.humanline and args.clip == "clip":
        clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)
    cut, eps = clipped != log_ratio, torch.zeros_like(mask, dtype=torch.bool)
    alone = cut
    if hasattr(script, "grpo_loss"):
        advantages = logps.new_tensor(script.group_advantages([x.reward for x in group]))
        eps = script.grpo_loss(clipped, log_ratio, advantages, args.beta, args.epsilon)[-1]
        alone = cut & ~eps & (advantages != 0)[:, None]
    columns = [input_ids, logps, ref_logps, log_ratio, clipped, cut, eps, alone]
    names, found = ("id", "logp", "ref_logp", "log_ratio", "clipped", "cut", "eps", "alone"), []
    for row in range(len(group)):
        values = zip(*(column[row][mask[row].bool()].tolist() for column in columns))
        found.append([dict(zip(names, value)) | {"text": show(tokens.tokenizer, value[0])} for value in values])
    return found


def show(tokenizer, token: int) -> str:
    """A token's text, line breaks seen; its name if it is a part of a character, or nothing."""
    text = tokenizer.decode([token])
    text = text if text and "�" not in text else tokenizer.convert_ids_to_tokens(token)
    return text.replace("\n", "⏎\n")


def colour(log_ratio: float, scale: float) -> str:
    """From orange (-scale nats and below) by white (0) to blue (scale and above)."""
    share = min(1.0, abs(log_ratio) / scale)
    return "#" + "".join(f"{round(255 + share * (c - 255)):02x}" for c in (ORANGE if log_ratio < 0 else BLUE))


def completion_html(title: str, found: list[dict], scale: float) -> str:
    spans = []
    for token in found:
        logp, ref_logp, log_ratio = token["logp"], token["ref_logp"], token["log_ratio"]
        told = f"log π_θ {logp:.4f}, log π_ref {ref_logp:.4f}, log-ratio {log_ratio:+.4f} nats"
        told += f", id {token['id']}" + ", humanline clips it" * token["cut"] + ", 1 ± ε clips it" * token["eps"]
        kind = "t" + " cut" * token["cut"] + " eps" * token["eps"]
        style = f"background:{colour(log_ratio, scale)}"
        spans.append(f'<span class="{kind}" style="{style}" title="{told}">{html.escape(token["text"])}</span>')
    total, clipped = (sum(token[key] for token in found) for key in ("log_ratio", "clipped"))
    told = f"Σ log-ratio {total:+.2f} nats" + f", clipped {clipped:+.2f}" * (clipped != total)
    return f'<div><h2>{title} <span>{told}</span></h2><div class="tokens">{"<wbr>".join(spans)}</div></div>'


def group_html(script, args, tokens, group: tuple, found: list, scale: float) -> str:
    """A section: the prompt, its completions side by side, and the margin of pairs."""
    prompt, titles = html.escape(tokens.tokenizer.decode(group[0].prompt_ids)), ["chosen", "rejected"]
    if hasattr(script, "group_advantages"):
        advantages = script.group_advantages([x.reward for x in group])
        names = titles if len(group) == 2 else ["sample"] * len(group)
        titles = [f"{name}, A = {A:+.2f}" for name, A in zip(names, advantages)]
    elif len(group) == 1:
        titles = ["desirable" if group[0].reward > 0 else "undesirable"]
    parts = "".join(completion_html(title, part, scale) for title, part in zip(titles, found))
    margin = ""
    if len(found) == 2:
        raw, clipped = (
            sum(x[key] for x in found[0]) - sum(x[key] for x in found[1]) for key in ("log_ratio", "clipped")
        )
        margin = f"<p class=prompt>margin, chosen − rejected: <b>{raw:+.2f} nats</b>"
        margin += f", clipped {clipped:+.2f}" * (clipped != raw)
        if not hasattr(script, "grpo_loss"):
            margin += f"; reward margin, β = {args.beta:g} times that: {args.beta * clipped:+.2f}"
        margin += "</p>"
    return f"<section><div class=prompt><code>{prompt}</code></div><div class=pair>{parts}</div>{margin}</section>"


def page(script, args, state: dict, name: str, source: str, tokens, groups: list, found: list) -> str:
    scale = max(-args.log_epsilon_P, args.log_epsilon_R)
    scale = scale if scale < 20 else 1.5  # bounds that are off
    every = [token for group in found for part in group for token in part]
    gradient = f"linear-gradient(90deg, {colour(-scale, scale)}, #fff, {colour(scale, scale)})"
    ticks = "".join(f"<span>{scale * i / 2:+.3g}</span>" for i in (-2, -1, 0, 1, 2)).replace("+0<", "0<")
    marks = "this run does not clip: nothing is struck out"
    if args.humanline and args.clip == "clip":
        share = sum(token["cut"] for token in every) / len(every)
        marks = f'<span class="t cut">token</span> outside [{args.log_epsilon_P:g}, {args.log_epsilon_R:g}]: '
        marks += f"humanline clipping removes its gradient ({share:.1%} here"
        if hasattr(script, "grpo_loss"):
            alone = sum(token["alone"] for token in every) / len(every)
            marks += f", {alone:.1%} it alone"
        marks += ")"
    about = f"<code>{Path(script.__file__).name}</code>, seed {args.seed}, after {state['step']} optimizer steps; "
    about += f"the reference is the policy after {state['last_sync']}"
    about += f" (k = {args.k})." if args.humanline and args.sync != "none" else "."
    about += f" The first {len(groups)} of the {source}. Hover over a token for its log-probs."
    if hasattr(script, "grpo_loss"):
        share = sum(token["eps"] for token in every) / len(every)
        marks += f'<br><span class="t eps">token</span> the clip to 1 ± {args.epsilon:g} removes its gradient '
        marks += f"({share:.1%})"
        about += " No clip touches the KL penalty."
    sections = "\n".join(group_html(script, args, tokens, *both, scale) for both in zip(groups, found))
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(name)}: log-ratios of tokens</title><style>{STYLE}</style>
<h1>The log-ratio of every token, log π<sub>θ</sub>/π<sub>ref</sub></h1>
<p>{about}</p>
<div class="legend"><div><div class="bar" style="background:{gradient}"></div><div class="ticks">{ticks}</div>
nats; orange: less likely than under the reference</div><div>{marks}</div></div>
{sections}
</html>
"""


def main(run: tyro.conf.Positional[Path], step: int = 0, rows: int = 12, out: Path = Path("tokens.html")) -> None:
    """Writes the page.

    Args:
        run: Folder of a run with checkpoints.
        step: Of the checkpoint, in optimizer steps; 0 is the newest.
        rows: Groups of completions to show.
        out: The page.
    """
    script, args, (rank, _, device) = open_run(run)
    checkpoints = script.find_checkpoints(run / "checkpoints")
    if not checkpoints:
        script.fail(f"{run} has no checkpoints: run it with --checkpoint-every")
    checkpoint = run / "checkpoints" / f"step-{step}" if step else checkpoints[0]
    if checkpoint not in checkpoints:
        known = ", ".join(path.name[5:] for path in reversed(checkpoints))
        script.fail(f"--step {step}: the checkpoints of {run} are {known}; keep more with --keep-checkpoints 0")
    if rows < 1:
        script.fail(f"--rows is {rows}; it must be at least 1")
    with script.blame(f"{checkpoint} is damaged"):
        state = json.loads((checkpoint / "state.json").read_text())
    config, _, tokens = script.load_config(args)
    groups, source = load_examples(script, args, tokens, checkpoint)
    groups = groups[:rows]
    models = load_models(script, args, config, checkpoint, device)
    found = [score(script, args, models, group, tokens, device) for group in groups]
    if not all(math.isfinite(token["log_ratio"]) for group in found for part in group for token in part):
        script.fail(f"{checkpoint}: log-probs are not finite")
    if rank == 0:
        text = page(script, args, state, run.resolve().name, source, tokens, groups, found)
        with script.blame(f"--out {out}", OSError):
            out.write_text(text, encoding="utf-8")
        print(f"wrote {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
