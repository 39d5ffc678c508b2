"""Whose settings a run has, what its first line says, the README's edit of a loss, and the learning rate."""

import ast
import importlib
import re
import runpy
import shutil
from dataclasses import asdict

import pytest
import torch
from conftest import PAIRS, ROOT, SCRIPTS, metrics, parse_args, run_ranks

PAPER = {  # Tables 1 to 3, offline + humanline
    "dpo_humanline": dict(lr=5e-6, beta=0.1, k=1, batch_size=32, adam_eps=1e-5, max_grad_norm=1.0),
    "kto_humanline": dict(lr=5e-6, beta=0.25, lambda_D=1.1, lambda_U=1.0, k=1, max_grad_norm=4.0),
    "grpo_humanline": dict(lr=5e-6, beta=0.01, epsilon=0.15, k=1, batch_size=64, max_grad_norm=1.0),
    "grpo_math_humanline": dict(lr=1e-6, prompts_per_step=32, group_size=8, sample_every=64, adam_eps=1e-8),
}
COMMON = dict(log_epsilon_P=-1.5, log_epsilon_R=1.5, temperature=0.7, warmup_fraction=0.1)
COMMON |= dict(max_new_tokens=2048)


@pytest.fixture(params=PAPER)
def script(request):
    return importlib.import_module(request.param)


def test_a_model_of_ones_own_gets_the_papers_settings_and_the_first_line_says_so(script, capsys):
    args = asdict(parse_args(script, ["--model", "mine", "--dataset", "data.jsonl", "--seed", "3"]))
    assert args.items() >= (PAPER[script.__name__] | COMMON).items() and args["eval_dataset"] == ""
    told = capsys.readouterr().out
    assert told.startswith("the paper's settings")
    assert told.endswith("; flags: --model mine --dataset data.jsonl --seed 3\n")
    if script.__name__ in SCRIPTS:
        assert told.startswith("the paper's settings (the defaults); ")
        parse_args(script, ["--model", "mine", "--online"])
        assert f"the paper's settings ({script.PAPER[True, True]}); " in capsys.readouterr().out


TABLE_3 = {  # (online, humanline): learning rate, maximum gradient norm
    "dpo_humanline": {(0, 0): (5e-6, 1.0), (0, 1): (5e-6, 1.0), (1, 0): (2.5e-6, 0.5), (1, 1): (2.5e-6, 1.0)},
    "kto_humanline": {(0, 0): (5e-6, 1.0), (0, 1): (5e-6, 4.0), (1, 0): (2.5e-6, 0.5), (1, 1): (2.5e-6, 0.1)},
    "grpo_humanline": {(0, 0): (5e-6, 1.0), (0, 1): (5e-6, 1.0), (1, 0): (5e-6, 1.0), (1, 1): (5e-6, 0.5)},
}


@pytest.mark.parametrize("name", TABLE_3)
def test_a_variant_has_its_row_of_table_3_and_flags_win(name):
    script = importlib.import_module(name)
    for (online, humanline), (lr, norm) in TABLE_3[name].items():
        flags = ["--model", "mine"] + ["--online"] * online + ["--no-humanline"] * (not humanline)
        args = parse_args(script, flags)
        assert (args.lr, args.max_grad_norm) == (lr, norm)
        if name == "grpo_humanline":
            assert args.epsilon == (0.15 if online or humanline else 0.5)
        assert parse_args(script, [*flags, "--lr", "1", "--max-grad-norm", "2"]).lr == 1


@pytest.mark.parametrize("name", TABLE_3)
def test_the_pages_have_the_rows_of_table_3(name):
    """The published values, and those of the flags: both are the settings that a run of the variant has."""
    script = importlib.import_module(name)
    page = (ROOT / f"docs/{name.removesuffix('_humanline')}.md").read_text(encoding="utf-8")
    header = r"^\| variant \| Table 3: .*? \| (.*) \|\n\|-.*\n"
    flags, rows = re.search(rf"{header}((?:\|.*\n)+)", page, re.MULTILINE).groups()
    names = [flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", flags)]
    found = {}
    for row in rows.splitlines():
        variant, published, ours = row.strip("| ").split(" | ")
        settings = script.Args(**script.PAPER.get(("online" in variant, "humanline" in variant), {}))
        found[variant] = [getattr(settings, name) for name in names]
        assert [float(number) for number in published.split(", ")] == found[variant]
        assert [float(number) for number in ours.split(", ")] == found[variant]
    assert list(found) == ["offline", "offline + humanline", "online", "online + humanline"]


def test_without_a_model_the_toys_settings_apply_whatever_the_data(script, capsys):
    for data in ({}, {"dataset": "data.jsonl"}):
        flags = [part for name, value in data.items() for part in (f"--{name}", value)]
        args = asdict(parse_args(script, ["--k", "5", *flags]))
        assert args.items() >= (script.TOY | {"k": 5} | data).items() and args["dtype"] == "float64"
        assert "the settings of the embedded toy" in capsys.readouterr().out
    if script.__name__ in SCRIPTS:
        assert parse_args(script, ["--online"]).dataset.endswith("prompts_train.jsonl.gz")


def test_ipo_is_one_function(tmp_path):
    """The README's example of an edit: its function in place of the script's."""
    text = (ROOT / "dpo_humanline.py").read_text()
    (old,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "dpo_loss")
    page = (ROOT / "README.md").read_text()
    (new,) = re.findall(r"```python\n(def dpo_loss\(.*?)\n```", page, re.DOTALL)
    (tmp_path / "ipo.py").write_text(text.replace(ast.get_source_segment(text, old), new))
    scope = runpy.run_path(str(tmp_path / "ipo.py"))
    log_ratio, mask = torch.tensor([[0.5, 0.25], [-0.25, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss = scope["dpo_loss"](log_ratio, mask, 0.1)
    assert loss.item() == pytest.approx((0.75 + 0.25 - 5) ** 2)


def test_the_learning_rate_is_constant_after_its_warmup(tmp_path):
    flags = ["--dataset", PAIRS, "--eval-samples", "0", "--batch-size", "8", "--num-steps", "10"]
    flags += ["--lr", "1e-4", "--warmup-fraction", "0.2", "--checkpoint-every", "6"]
    run_ranks(1, [[*flags, "--output-dir", str(tmp_path / "run")]])
    rates = [line["lr"] / 1e-4 for line in metrics(tmp_path / "run")]
    assert rates == pytest.approx([0.5] + [1.0] * 9, abs=1e-9)
    shutil.rmtree(tmp_path / "run/checkpoints/step-10")
    run_ranks(1, [["--resume", str(tmp_path / "run")]])
    assert [line["lr"] / 1e-4 for line in metrics(tmp_path / "run")] == rates
