"""The loss and the gradient norm of a step do not depend on ranks or passes; a repeated run is the same."""

import subprocess
import sys

import pytest
from conftest import PAIRS, ROOT, SHARED, metrics, run_ranks

VARIANTS = {
    "k1": ["--k", "1"],
    "k3": ["--k", "3"],
    "offline": ["--no-humanline"],
    "sample": ["--k", "3", "--clip", "sample"],
}
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
SAME = ["loss", "grad_norm", "rewards/margins", "humanline/clipped_low", "humanline/log_ratio_abs_mean"]


def agree(reference, other, tolerance=1e-5):
    assert len(reference) == len(other) > 0
    for a, b in zip(reference, other):
        for key in SAME:
            rel = max(tolerance, 1e-6) if key == "grad_norm" else tolerance  # the norm is rounded to fp32
            assert b[key] == pytest.approx(a[key], rel=rel, abs=1e-12), (key, a["step"])


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_run_on_the_same_layout_repeats_bit_for_bit(toy_runs, variant):
    for ranks in (1, 2):
        assert toy_runs[variant, ranks, 1] == toy_runs[variant, ranks, 2]


def test_torchrun_starts_two_ranks_that_are_those_of_the_same_layout(toy_runs, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = [ROOT / "dpo_humanline.py", *TOY_RUN, *VARIANTS["k3"], "--output-dir", tmp_path / "run"]
    subprocess.run([*torchrun, *run], check=True, capture_output=True, timeout=280)
    assert metrics(tmp_path / "run", True) == toy_runs["k3", 2, 1]


def test_three_ranks_agree_with_one_although_thirds_are_not_exact(tmp_path):
    """What is clipped by the norm is rounded with it to fp32; all else is in float64."""
    run = [*TOY_RUN, "--batch-size", "12", "--k", "1", "--adam-eps", "1e-8", "--max-grad-norm"]
    for ranks in (1, 3):
        pairs = 4 if ranks == 1 else 2
        layout = ["--micro-batch-tokens", str(pairs * PAIR), "--output-dir"]
        run_ranks(ranks, [[*run, norm, *layout, f"{tmp_path}/{norm}-{ranks}"] for norm in ("1", "1e9")])
    for norm, tolerance in (("1", 1e-5), ("1e9", 1e-9)):
        agree(metrics(tmp_path / f"{norm}-1"), metrics(tmp_path / f"{norm}-3"), tolerance)


def test_the_variants_are_different_runs(toy_runs):
    finals = {toy_runs[variant, 1, 0][-1]["loss"] for variant in VARIANTS}
    assert len(finals) == len(VARIANTS)


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_real_model_and_real_pairs_agree_over_ranks(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    rows = (SHARED / "preferences" / "pairs.jsonl").open().readlines()[:64]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    real = ["--model", str(SHARED / "model-stories260K"), "--dataset", str(tmp_path / "pairs.jsonl")]
    real += ["--chat-template", str(template), "--max-prompt-length", "128", "--max-length", "256"]
    real += ["--lr", "1e-3", "--dtype", "float64"]
    real += ["--batch-size", "8", "--num-steps", "3", "--adam-eps", "1e-2", "--warmup-fraction", "0"]
    run_ranks(1, [[*real, "--output-dir", str(tmp_path / "one")]])
    run_ranks(2, [[*real, "--micro-batch-tokens", "1", "--output-dir", str(tmp_path / "two")]])
    agree(metrics(tmp_path / "one"), metrics(tmp_path / "two"))
