"""The loss and the gradient norm of a step do not depend on ranks or passes; a repeated run is the same."""

import re
import subprocess
import sys

import pytest
from conftest import PAIRS, ROOT, SHARED, metrics, run_ranks

VARIANTS = {"k1": ["--k", "1"], "k3": ["--k", "3"], "offline": ["--no-humanline"]}
TOY_RUN = ["--num-steps", "8", "--dataset", PAIRS, "--eval-dataset", "", "--warmup-fraction", "0.25"]
TOY_RUN += ["--checkpoint-every", "0"]
PAIR = 28  # tokens of every pair of the toy
# {ranks: --micro-batch-tokens}. The last 0 is a repetition; the last layout of four ranks is HSDP, two copies
# of two shards.
LAYOUTS = {
    1: [f"{8 * PAIR}", "0", "0"],
    2: [f"{4 * PAIR}", "0", "0"],
    4: [f"{4 * PAIR}", f"{4 * PAIR} --shard-size 2"],
}
SAME = ["loss", "grad_norm", "humanline/clipped_low", "humanline/log_ratio_abs_mean"]


def agree(reference, other, also="rewards/margins"):
    for a, b in zip(reference, other, strict=True):
        for key in (*SAME, also):
            assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-12), (key, a["step"])


@pytest.fixture(scope="module")
def toy_runs(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("same"), {}
    for ranks, sizes in LAYOUTS.items():
        jobs = {}
        for name, variant in VARIANTS.items():
            for i, size in enumerate(sizes):
                layout = ["--micro-batch-tokens", *size.split()]
                output = ["--output-dir", str(folder / f"{name}-{ranks}-{i}")]
                jobs[name, ranks, i] = [*TOY_RUN, *variant, *layout, *output]
        run_ranks(ranks, list(jobs.values()))
        runs |= {key: metrics(arguments[-1], True) for key, arguments in jobs.items()}
    return runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_two_and_four_ranks_and_all_layouts_agree_on_the_toy(toy_runs, variant):
    for (name, _, _), steps in toy_runs.items():
        if name == variant:
            agree(toy_runs[variant, 1, 0], steps)
        else:
            assert steps[-1]["loss"] != toy_runs[variant, 1, 0][-1]["loss"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_run_on_the_same_layout_repeats_bit_for_bit(toy_runs, variant):
    for ranks in (1, 2):
        assert toy_runs[variant, ranks, 1] == toy_runs[variant, ranks, 2]


def test_torchrun_starts_two_ranks_that_are_those_of_the_same_layout(toy_runs, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = [ROOT / "dpo_humanline.py", *TOY_RUN, *VARIANTS["k3"], "--output-dir", tmp_path / "run"]
    subprocess.run([*torchrun, *run], check=True, capture_output=True, timeout=280)
    assert metrics(tmp_path / "run", True) == toy_runs["k3", 2, 1]


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
@pytest.mark.parametrize(
    ("script", "file", "metric"),
    [
        ("dpo_humanline", "pairs", "rewards/margins"),
        ("kto_humanline", "unpaired", "kto/z_0"),
        ("grpo_humanline", "pairs", "grpo/kl"),
    ],
)
def test_a_real_model_and_real_rows_agree_over_ranks(tmp_path, script, file, metric):
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    rows = (SHARED / "preferences" / f"{file}.jsonl").open().readlines()[:64]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    real = ["--model", str(SHARED / "model-stories260K"), "--dataset", str(tmp_path / "rows.jsonl")]
    real += ["--chat-template", str(tmp_path / "template.jinja"), "--max-new-tokens", "64"]
    real += ["--max-prompt-length", "128", "--max-length", "256", "--lr", "1e-3", "--dtype", "float64"]
    real += ["--batch-size", "8", "--num-steps", "3", "--adam-eps", "1e-2", "--warmup-fraction", "0"]
    output = run_ranks(1, [[*real, "--output-dir", str(tmp_path / "one")]], script=script)
    assert re.search(r"rows.jsonl: \d+ rows; \d+ left out, the first in line \d+: ", output)
    two = [*real, "--micro-batch-tokens", "1", "--output-dir", str(tmp_path / "two")]
    run_ranks(2, [two], script=script)
    agree(metrics(tmp_path / "one"), metrics(tmp_path / "two"), also=metric)
