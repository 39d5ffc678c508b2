"""The loss and the gradient norm of every step do not depend on ranks, microbatches, padding or sorting."""

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
TOY_RUN = ["--num-steps", "8", "--dataset", PAIRS, "--warmup-fraction", "0.25", "--checkpoint-every", "0"]
LAYOUTS = {
    1: [[], ["--micro-batch-size", "8", "--pad-to-multiple-of", "16"]],
    2: [["--micro-batch-size", "4"], ["--no-group-by-length"]],
    4: [["--micro-batch-size", "4", "--pad-to-multiple-of", "7"]],
}


def agree(reference, other, tolerance=1e-5):
    assert len(reference) == len(other) > 0
    for a, b in zip(reference, other):
        for key in ("loss", "grad_norm", "rewards/margins", "humanline/clipped_low", "humanline/log_ratio_abs_mean"):
            assert b[key] == pytest.approx(a[key], rel=tolerance, abs=1e-12), (key, a["step"])


@pytest.fixture(scope="module")
def toy_runs(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("same"), {}
    for ranks, layouts in LAYOUTS.items():
        jobs = {
            (name, ranks, i): [*TOY_RUN, *flags, *layout, "--output-dir", str(folder / f"{name}-{ranks}-{i}")]
            for name, flags in VARIANTS.items()
            if ranks < 4 or name != "sample"
            for i, layout in enumerate(layouts)
        }
        run_ranks(ranks, list(jobs.values()))
        runs |= {key: metrics(arguments[-1]) for key, arguments in jobs.items()}
    return runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_two_and_four_ranks_and_all_layouts_agree_on_the_toy(toy_runs, variant):
    for (name, _, _), steps in toy_runs.items():
        if name == variant:
            agree(toy_runs[variant, 1, 0], steps)


def test_torchrun_starts_two_ranks_that_agree_with_one_process(toy_runs, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = [ROOT / "dpo_humanline.py", *TOY_RUN, *VARIANTS["k3"], "--output-dir", tmp_path / "run"]
    subprocess.run([*torchrun, *run], check=True, capture_output=True, timeout=280)
    agree(toy_runs["k3", 1, 0], metrics(tmp_path / "run"))


def test_three_ranks_agree_with_one_although_thirds_are_not_exact(tmp_path):
    run = [*TOY_RUN, "--batch-size", "12", "--k", "1", "--adam-eps", "1e-8"]
    run_ranks(1, [[*run, "--output-dir", str(tmp_path / "one")]])
    run_ranks(3, [[*run, "--micro-batch-size", "2", "--output-dir", str(tmp_path / "three")]])
    agree(metrics(tmp_path / "one"), metrics(tmp_path / "three"), tolerance=1e-9)


def test_the_variants_are_different_runs(toy_runs):
    finals = {toy_runs[variant, 1, 0][-1]["loss"] for variant in VARIANTS}
    assert len(finals) == len(VARIANTS)


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_real_model_and_real_pairs_agree_over_ranks(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (tmp_path / "pairs.jsonl").write_text("".join((SHARED / "preferences" / "pairs.jsonl").open().readlines()[:64]))
    real = ["--model", str(SHARED / "model-stories260K"), "--dataset", str(tmp_path / "pairs.jsonl")]
    real += [
        "--chat-template",
        str(template),
        "--pad-token",
        "<unk>",
        "--max-prompt-length",
        "128",
        "--max-length",
        "256",
    ]
    real += ["--batch-size", "8", "--num-steps", "3", "--beta", "0.1", "--warmup-fraction", "0", "--k", "1"]
    run_ranks(1, [[*real, "--output-dir", str(tmp_path / "one")]])
    run_ranks(2, [[*real, "--micro-batch-size", "1", "--output-dir", str(tmp_path / "two")]])
    agree(metrics(tmp_path / "one"), metrics(tmp_path / "two"))
