"""GRPO: loss, gradient and advantages by hand and against TRL, the same numbers for every layout, data."""

import gzip
import json
import math
import shutil
import signal
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ROOT,
    SHARED,
    finish,
    metrics,
    parse_args,
    read_pool,
    refused,
    run_ranks,
    start_ranks,
    tokens_of,
)
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import grpo_humanline
from grpo_humanline import Args, group_advantages, grpo_loss, make_group, read_row, resolve_group_size
from utils import DIVERGED, Example, encode_group

TOY = ROOT / "toy" / "tales"
RUN = ["--num-steps", "4", "--warmup-fraction", "0", "--batch-size", "16", "--lr", "3e-3", "--beta", "0.1"]
RUN += ["--log-epsilon-P", "-0.4", "--log-epsilon-R", "0.3", "--checkpoint-every", "0", "--k", "2"]
RUN += ["--eval-dataset", ""]
ONLINE = ["--online", "--engine", "hf", "--round-prompts", "10", "--max-new-tokens", "40"]
ONLINE += ["--eval-samples", "4", "--num-steps", "5", "--batch-size", "32", "--checkpoint-every", "2"]
ONLINE += ["--k", "2", "--warmup-fraction", "0", "--eval-dataset", ""]
GRPO = ("loss", "grad_norm", "grpo/ratio_mean", "grpo/clip_fraction", "grpo/kl", "grpo/zero_advantage_groups")


def main(*arguments):
    """The script in this process; returns the folder, its last argument."""
    try:
        grpo_humanline.main(parse_args(grpo_humanline, list(map(str, arguments))))
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's own
        if dist.is_initialized():
            dist.destroy_process_group()
    return arguments[-1]


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files: pairs, groups of four (every eighth with equal scores), of three as conversations, prompts."""
    folder = tmp_path_factory.mktemp("grpo")
    rows = [json.loads(line) for line in gzip.open(TOY / "preferences_train.jsonl.gz", "rt")][:256]
    groups, threes, waiting = [], [], {}
    for row in rows:
        if other := waiting.pop(row["prompt"], None):
            completions = [other["rejected"], row["chosen"], row["rejected"], other["chosen"]]
            scores = [other["score_rejected"], row["score_chosen"]]
            scores += [row["score_rejected"], other["score_chosen"]]
            if len(groups) % 8 == 0:
                scores = [0.5] * 4
            groups.append({"prompt": row["prompt"], "completions": completions, "scores": scores})
            threes.append({"prompt": [{"role": "user", "content": row["prompt"]}], "scores": scores[:3]})
            threes[-1]["completions"] = [[{"role": "assistant", "content": text}] for text in completions[:3]]
        else:
            waiting[row["prompt"]] = row
    (folder / "pairs.jsonl").write_text(lines(rows[:64]))
    (folder / "groups.jsonl").write_text(lines(groups[:32]))
    Dataset.from_list(threes[:16]).to_parquet(folder / "threes.parquet")
    (folder / "prompts.jsonl").write_text(lines({"prompt": row["prompt"]} for row in rows[:64]))
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    if SHARED.exists():
        real = (SHARED / "preferences" / "pairs.jsonl").read_text().splitlines(keepends=True)
        (folder / "real.jsonl").write_text("".join(real[:40]))
    return {path.stem: str(path) for path in folder.iterdir()}


# --- loss and advantages ---

LOW, HIGH, EPSILON, BETA = -1.5, 1.2, 0.15, 0.01
# nats: outside and inside of both clips, on both sides
RATIOS = (-2.0, -1.0, -0.2, -0.1, 0.0, 0.1, 0.2, 1.0, 1.4)


def loss_and_slope(log_ratio, A, low=LOW, high=HIGH, epsilon=EPSILON, beta=BETA):
    """Equation 1 for a token in python floats, and its derivative by log π_θ, case by case."""
    ratio = math.exp(min(max(log_ratio, low), high))
    bounded = min(max(ratio, 1 - epsilon), 1 + epsilon)
    k3 = math.exp(-log_ratio) + log_ratio - 1
    pessimistic = ratio if A * ratio <= A * bounded else bounded
    moves = low < log_ratio < high and pessimistic == ratio
    return beta * k3 - A * pessimistic, beta * (1 - math.exp(-log_ratio)) - A * ratio * moves


def test_loss_and_gradient_equal_equation_1_by_hand():
    log_ratio = torch.tensor([RATIOS] * 3, dtype=torch.float64, requires_grad=True)
    A = torch.tensor([1.3, -0.7, 0.0], dtype=torch.float64)
    loss, ratio, k3, _ = grpo_loss(log_ratio.clamp(LOW, HIGH), log_ratio, A, BETA, EPSILON)
    loss.sum().backward()
    for i in range(3):
        for t, x in enumerate(RATIOS):
            wanted, slope = loss_and_slope(x, A[i].item())
            assert loss[i, t].item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
            assert log_ratio.grad[i, t].item() == pytest.approx(slope, rel=1e-12, abs=1e-15)
            assert ratio[i, t].item() == pytest.approx(math.exp(min(max(x, LOW), HIGH)), rel=1e-12)
            assert k3[i, t].item() == pytest.approx(math.exp(-x) + x - 1, rel=1e-12, abs=1e-15)


def test_gradient_equals_finite_differences():
    log_ratio = torch.tensor([RATIOS] * 2, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0]).double()
    assert torch.autograd.gradcheck(
        lambda x: grpo_loss(x.clamp(LOW, HIGH), x, advantages, 0.5, EPSILON)[0].sum(), log_ratio, eps=1e-7
    )


def test_clip_fraction_marks_the_tokens_whose_gradient_the_epsilon_clip_removes():
    log_ratio = torch.tensor([RATIOS] * 2, dtype=torch.float64, requires_grad=True)
    loss, _, _, removed = grpo_loss(log_ratio, log_ratio, torch.tensor([1.0, -1.0]).double(), 0.0, EPSILON)
    loss.sum().backward()
    assert torch.equal(removed, log_ratio.grad == 0)
    assert removed.tolist() == [[x > 0.15 for x in RATIOS], [x < -0.17 for x in RATIOS]]


def test_with_infinite_bounds_it_is_the_published_ppo_clip_objective():
    """min(ratio·A, g(ε, A)), g = (1 + ε)A for A >= 0 and (1 - ε)A below: the form of OpenAI's Spinning Up."""
    log_ratio = torch.tensor([RATIOS] * 3, dtype=torch.float64)
    A = torch.tensor([1.3, -0.7, 0.0]).double()
    g = torch.where(A >= 0, (1 + EPSILON) * A, (1 - EPSILON) * A)[:, None]
    objective = torch.minimum(log_ratio.exp() * A[:, None], g)
    loss = grpo_loss(log_ratio.clamp(-math.inf, math.inf), log_ratio, A, 0.0, EPSILON)[0]
    assert torch.allclose(loss, -objective, rtol=1e-14, atol=0)


def test_advantages_by_hand():
    assert group_advantages([1.0, 0.0]) == [1, -1]
    assert group_advantages([0.3, 0.3, 0.3]) == [0, 0, 0]
    expected = [x / math.sqrt(3.5) for x in (-2, -1, 0, 3)]
    assert group_advantages([1, 2, 3, 6]) == pytest.approx(expected, rel=1e-12)
    for scores in ([0, 1e-200], [3e307, -3e307], [1, 1 + 1e-15], [0.5, 0.1], [-7.25, -7.5]):
        assert [abs(A) for A in group_advantages(scores)] == [1, 1]


def test_best_and_worst_make_a_group_of_two_and_a_larger_group_keeps_all():
    examples = [Example(1, "x", [1], [10 + i], reward) for i, reward in enumerate((0.1, 0.9, 0.9, 0.0, 0.0))]
    pair = make_group(Args(group_size=2, reward_threshold=0.5), examples)
    assert [(x.completion_ids, x.reward) for x in pair] == [([11], 0.9), ([14], 0.0)]
    assert make_group(Args(group_size=2, reward_threshold=0.91), examples) == ()
    assert make_group(Args(group_size=2, reward_threshold=0.0), examples[:1] * 2) == ()
    whole = make_group(Args(group_size=5, reward_threshold=9.0), examples)
    assert [x.reward for x in whole] == [0.9, 0.9, 0.1, 0.0, 0.0]
    advantages = group_advantages([x.reward for x in whole])
    assert sum(advantages) == pytest.approx(0, abs=1e-12)
    assert sum(A**2 for A in advantages) == pytest.approx(5)


def test_without_group_size_it_is_that_of_the_data_or_2_online():
    cases = [
        (Args(), 4),
        (Args(online=True), 1),
        (Args(online=True, group_size=8), 1),
        (Args(group_size=2), 4),
    ]
    for args, completions in cases:
        resolve_group_size(args, completions)
    assert [args.group_size for args, _ in cases] == [4, 2, 8, 2]


# --- a step of the script against other computations ---


@pytest.fixture(scope="module")
def two_steps(data, tmp_path_factory):
    """Two steps over all 32 groups at k = 1: in the second the policy is θ_1, saved by a run of one step, and
    the reference is θ_0.

    Returns what the second step logged with and without humanline, and the two models in float64.
    """
    folder = tmp_path_factory.mktemp("steps")
    run = [*RUN, "--k", "1", "--batch-size", "128", "--dataset", data["groups"], "--num-steps"]
    main(*run, "1", "--output-dir", folder / "one")
    logged = {flag: metrics(main(*run, "2", flag, "--output-dir", folder / flag)) for flag in HUMANLINE}
    policy = AutoModelForCausalLM.from_pretrained(folder / "one" / "final").double()
    reference = AutoModelForCausalLM.from_pretrained(TOY / "policy").double()
    return {flag: steps[1] for flag, steps in logged.items()}, policy, reference


HUMANLINE = ("--humanline", "--no-humanline")


def padded_groups(path):
    """Ids and masks of all sequences, prompts padded on the left, completions on the right; advantages."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    tokens = tokens_of(tokenizer, {tokenizer.eos_token_id})
    prompts, completions, advantages = [], [], []
    for number, row in enumerate(map(json.loads, open(path)), 1):
        group, _ = encode_group(Args(), tokens, number, *read_row(row))
        prompts += [torch.tensor(x.prompt_ids) for x in group]
        completions += [torch.tensor(x.completion_ids) for x in group]
        advantages += group_advantages([x.reward for x in group])
    prompt_mask = [torch.ones_like(ids) for ids in prompts]
    completion_mask = [torch.ones_like(ids) for ids in completions]
    return {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence(prompt_mask, batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence(completion_mask, batch_first=True),
        "advantages": torch.tensor(advantages),
    }


def completion_logps(model, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=seen).logits[:, inputs["prompt_ids"].shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]  # (B, T)


@pytest.mark.parametrize("flag", HUMANLINE)
def test_loss_gradient_norm_and_metrics_of_a_step_by_hand(two_steps, data, flag):
    logged, policy, reference = two_steps
    inputs = padded_groups(data["groups"])
    logps = completion_logps(policy, inputs)
    with torch.no_grad():
        log_ratio = (logps - completion_logps(reference, inputs)).tolist()
    low, high = (-0.4, 0.3) if flag == "--humanline" else (-math.inf, math.inf)
    rows = zip(log_ratio, inputs["completion_mask"].tolist(), inputs["advantages"].tolist())
    tokens = [(x, A) if seen else None for row, mask, A in rows for x, seen in zip(row, mask)]
    found = [loss_and_slope(*token, low, high, beta=0.1) if token else (0.0, 0.0) for token in tokens]
    count, real = inputs["completion_mask"].sum().item(), [token for token in tokens if token]
    policy.zero_grad()
    slopes = torch.tensor([slope for _, slope in found], dtype=torch.float64).view_as(logps)
    (logps * slopes / count).sum().backward()
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in policy.parameters()))
    ratios = [(math.exp(min(max(x, low), high)), A) for x, A in real]
    removed = sum(A > 0 and ratio > 1.15 or A < 0 and ratio < 0.85 for ratio, A in ratios)
    by_hand = {
        "loss": sum(loss for loss, _ in found) / count,
        "grad_norm": norm,
        "grpo/ratio_mean": sum(ratio for ratio, _ in ratios) / count,
        "grpo/clip_fraction": removed / count,
        "grpo/kl": sum(math.exp(-x) + x - 1 for x, _ in real) / count,
        "grpo/zero_advantage_groups": 4 / 32,
        "humanline/clipped_low": sum(x < -0.4 for x, _ in real) / count,
        "humanline/clipped_high": sum(x > 0.3 for x, _ in real) / count,
        "humanline/log_ratio_abs_mean": sum(abs(x) for x, _ in real) / count,
    }
    for key, value in by_hand.items():
        assert logged[flag][key] == pytest.approx(value, rel=1e-6), key
    assert by_hand["grpo/clip_fraction"] > 0.01 and by_hand["humanline/clipped_low"] > 0.01


@pytest.mark.filterwarnings("ignore")
def test_no_humanline_equals_trls_dapo_loss_with_the_same_old_log_probs(two_steps, data, tmp_path):
    """GRPOTrainer's own loss function on the same completions.

    Where the definitions differ: TRL multiplies k3 by the ratio unless use_bias_correction_kl is off; it
    divides by the sample standard deviation + 1e-4, so advantages are handed over; and its KL refers to a
    model of its own, while here one reference gives old and KL log-probs.
    """
    logged, policy, reference = two_steps
    config = GRPOConfig(
        output_dir=str(tmp_path),
        loss_type="dapo",
        beta=0.1,
        epsilon=0.15,
        num_generations=4,
        per_device_train_batch_size=128,
        use_bias_correction_kl=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "about cat"}] * 128),
        processing_class=AutoTokenizer.from_pretrained(TOY / "policy"),
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = padded_groups(data["groups"])
    with torch.no_grad():
        inputs["old_per_token_logps"] = inputs["ref_per_token_logps"] = completion_logps(reference, inputs)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    policy.train().zero_grad()
    loss = trainer.compute_loss(policy, inputs)
    loss.backward()
    norm = math.sqrt(sum(parameter.grad.double().square().sum().item() for parameter in policy.parameters()))
    mine, theirs = logged["--no-humanline"], trainer._metrics["train"]
    assert mine["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert mine["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert mine["grpo/kl"] == pytest.approx(theirs["kl"][0], rel=1e-5)
    assert mine["grpo/clip_fraction"] == pytest.approx(theirs["clip_ratio/region_mean"][0], rel=1e-5)


# --- layouts and rounds ---

JOBS = {  # pairs, groups, ... stand for the files of `data`
    "pairs": [*RUN, "--dataset", "pairs"],
    "groups": [*RUN, "--dataset", "groups"],
    "sampling": [*RUN, "--dataset", "groups", "--clip", "sample", "--epsilon", "0.3"],
    "groups, no humanline": [*RUN, "--dataset", "groups", "--no-humanline"],
    "best and worst of groups": [*RUN, "--dataset", "groups", "--group-size", "2"],
    "threes": [*RUN, "--dataset", "threes", "--batch-size", "12", "--num-steps", "2"],
}
ROUNDS = {
    "round of 8": [*ONLINE, "--dataset", "prompts", "--eval-dataset", "groups", "--group-size", "8"],
    "round of 2": [*ONLINE, "--dataset", "groups", "--no-humanline", "--batch-size", "8", "--num-steps", "3"],
}
REAL = [*RUN, "--model", str(SHARED / "model-stories260K"), "--dataset", "real"]
REAL += ["--chat-template", "template", "--max-prompt-length", "128", "--max-length", "256"]
REAL += ["--batch-size", "8", "--num-steps", "2", "--k", "1"]


ALL = JOBS | ROUNDS | ({"real": REAL} if SHARED.exists() else {})
LAYOUTS = (  # ranks, jobs, --micro-batch-tokens: the whole batch, one sequence, four of the toy's
    (1, ALL, "0"),
    (1, ("sampling", "threes"), "1"),
    (2, ("pairs", "sampling", "threes", "round of 8"), "120"),
)
MORE_LAYOUTS = ((1, JOBS, "1"), (2, ALL, "60"), (4, ("pairs", "groups", "sampling"), "1"))


def run_layout(data, folder, ranks, names, size) -> dict:
    """{name: metrics}; the folders are folder/name."""
    batch = []
    for name in names:
        flags = [data.get(flag, flag) for flag in ALL[name]]
        batch.append([*flags, "--micro-batch-tokens", size, "--output-dir", str(folder / name)])
    if ranks == 1:
        for arguments in batch:
            main(*arguments)
    else:
        run_ranks(ranks, batch, script="grpo_humanline")
    return {name: metrics(folder / name, True) for name in names}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """{name: metrics for every layout}, the whole batch on one rank first; and the folder, LAYOUT/NAME."""
    folder, found = tmp_path_factory.mktemp("runs"), defaultdict(list)
    for i, layout in enumerate(LAYOUTS):
        for name, steps in run_layout(data, folder / str(i), *layout).items():
            found[name].append(steps)
    return found, folder


@pytest.mark.parametrize("job", LAYOUTS[-1][1])
def test_one_and_two_ranks_and_all_layouts_agree(runs, job):
    agree(*runs[0][job])


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_more_layouts_agree(runs, data, tmp_path, layout):
    for job, steps in run_layout(data, tmp_path, *layout).items():
        agree(runs[0][job][0], steps)


def agree(expected, *others):
    assert len(expected) >= 2 and any(step["grad_norm"] > 0 for step in expected) and others
    for steps in others:
        for a, b in zip(expected, steps, strict=True):
            assert a.keys() == b.keys()
            told = [key for key in a if key.startswith(("rewards/", "logps/", "humanline/", "rollout/r"))]
            for key in (*GRPO, *told):
                assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-12), (key, a["step"])


def test_samples_that_wait_keep_their_group_size(runs, tmp_path):
    folder = shutil.copytree(runs[1] / "0" / "round of 8", tmp_path / "run")
    said = refused(["--resume", str(folder), "--group-size", "4"], script="grpo_humanline")
    assert said == "error: --group-size: samples in groups of another size wait for a step; keep it\n"


def test_both_clips_and_the_kl_penalty_were_at_work(runs):
    found, _ = runs
    for job in ("pairs", "groups", "sampling"):
        steps = found[job][0]
        for key in ("humanline/clipped_low", "humanline/clipped_high", "grpo/clip_fraction", "grpo/kl"):
            assert max(step[key] for step in steps) > 0.01, (job, key, [step[key] for step in steps])
    assert len({found[job][0][-1]["loss"] for job in JOBS}) == len(JOBS)


def test_metrics_of_a_step_describe_its_groups(runs):
    found, _ = runs
    for step in found["pairs"][0]:
        assert step["rewards/mean"] == 0.5 and step["rewards/std"] == pytest.approx(math.sqrt(16 / 15) / 2)
        assert step["grpo/zero_advantage_groups"] == 0
    first = found["groups"][0][0]
    assert first["grpo/ratio_mean"] == 1 and first["grpo/kl"] == first["grpo/clip_fraction"] == 0
    shares = [step["grpo/zero_advantage_groups"] for step in found["groups"][0]]
    assert 0 < sum(shares) <= 4 / 4 and all(share * 4 % 1 == 0 for share in shares)


def test_infinite_bounds_and_no_sync_are_the_run_without_humanline(data, runs, tmp_path):
    found, _ = runs
    flags = ["--log-epsilon-P=-inf", "--log-epsilon-R=inf", "--sync", "none", "--dataset", data["groups"]]
    free = metrics(main(*RUN, *flags, "--output-dir", tmp_path / "run"), True)
    for step, wanted in zip(free, found["groups, no humanline"][0], strict=True):
        outside = {"humanline/clipped_low": 0, "humanline/clipped_high": 0}  # no token is
        assert step == wanted | outside


def unused(folder) -> list[tuple[Example]]:
    """The groups of a round that wait in the checkpoint after step 2."""
    return read_pool(folder / "checkpoints" / "step-2")


def test_rounds_keep_all_samples_of_a_group_or_the_best_and_the_worst(runs):
    """Ten prompts a round: groups of 8 fill two batches of 32 and a half, which waits for the next round."""
    found, folder = runs
    eight, two = found["round of 8"][0], found["round of 2"][0]
    assert [step["rollout/round"] for step in eight] == [1, 1, 2, 2, 2]
    assert [step["humanline/steps_since_sync"] for step in eight] == [0, 1, 0, 1, 2]
    at_its_start = [step["grpo/kl"] == 0 for step in eight]  # a round sets the reference
    assert at_its_start == [True, False, True, False, False]
    assert all(step["rollout/filtered"] == 0 and step["rewards/std"] > 0 for step in eight)
    assert two[0]["humanline/steps_since_sync"] == 0 and two[0]["grpo/kl"] == 0
    assert [len(group) for group in unused(folder / "0" / "round of 8")] == [8, 8]
    group = unused(folder / "0" / "round of 8")[0]
    assert len({x.row for x in group}) == 1 and len({x.reward for x in group}) > 2
    assert [x.reward for x in group] == sorted((x.reward for x in group), reverse=True)
    assert all(best.reward > worst.reward for best, worst in unused(folder / "0" / "round of 2"))


@pytest.mark.parametrize("job", ["groups", "round of 8"])
def test_a_run_that_is_killed_and_resumed_is_as_if_it_had_not_been(data, runs, tmp_path, monkeypatch, job):
    """Killed in step 3, after the checkpoint of step 2; online that is in the middle of a round."""
    found, folder = runs
    run = [*(data.get(flag, flag) for flag in (JOBS | ROUNDS)[job]), "--checkpoint-every", "2"]
    run += ["--output-dir", str(tmp_path / "cut")]
    monkeypatch.setenv("KILL", "grpo_loss 4")
    (killed,) = start_ranks(1, [run], "killing_worker.py", "grpo_humanline")
    finish([killed])
    assert killed.exitcode == -9 and len(metrics(tmp_path / "cut")) == 3
    main("--resume", tmp_path / "cut")
    assert metrics(tmp_path / "cut", True) == found[job][0]
    for file in ("summary.json", "final/model.safetensors"):
        assert (tmp_path / "cut" / file).read_bytes() == (folder / "0" / job / file).read_bytes()


# --- data ---


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("pairs", {"eval/accuracy", "eval/margin"}),
        ("groups", {"eval/accuracy", "eval/margin"}),
        ("prompts", set()),
    ],
)
def test_every_format_can_be_evaluated(data, tmp_path, kind, keys):
    run = [*RUN, "--num-steps", "1", "--engine", "hf", "--max-new-tokens", "20", "--eval-samples", "4"]
    run += ["--beta", "0"]
    main(*run, "--dataset", data["pairs"], "--eval-dataset", data[kind], "--output-dir", tmp_path / "run")
    after = json.loads((tmp_path / "run" / "summary.json").read_text())["after"]
    assert set(after) == keys | {"eval/reward", "eval/win_rate", "eval/length", "eval/finished"}
    if "eval/margin" in keys:
        assert after["eval/margin"][0] > 0.1


def test_groups_without_any_advantage_give_no_gradient_and_are_counted(data, tmp_path, capsys):
    rows = [json.loads(line) | {"scores": [0.5] * 4} for line in open(data["groups"])]
    (tmp_path / "ties.jsonl").write_text(lines(rows))
    main(*RUN, "--num-steps", "2", "--dataset", tmp_path / "ties.jsonl", "--output-dir", tmp_path / "run")
    assert "\n32 groups of 4\n" in capsys.readouterr().out
    first = metrics(tmp_path / "run")[0]
    assert first["loss"] == first["grad_norm"] == 0 and first["grpo/zero_advantage_groups"] == 1
    assert first["rewards/std"] == 0 and "logps/chosen" not in first


GOOD = {"prompt": "about cat", "completions": ["the old cat .", "the shiny cat ."], "scores": [0.5, 0.1]}


def row(**changes) -> str:
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not ...}) + "\n"


NO_LISTS = "completions and scores must be lists of one length"
NO_NUMBERS = "scores must be numbers from -1e30 to 1e30, not"
NO_PROMPT = "it needs a prompt, with completions"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (row() * 4 + row(scores=None), f"line 5: {NO_LISTS}"),
        (row(completions=...), f"line 1: {NO_LISTS}"),
        (row(scores=0.5), f"line 1: {NO_LISTS}"),
        (row(scores=[1.0]), f"line 1: {NO_LISTS}"),
        (row(completions="the old cat ."), f"line 1: {NO_LISTS}"),
        (row(completions=..., scores=...), f"line 1: {NO_PROMPT}"),
        (row() * 4 + row(prompt=...), f"line 5: {NO_PROMPT}"),
        (row(completions=["the cat ."], scores=[1]), f"line 1: {NO_PROMPT}"),
        (row() * 4 + row(scores=[1.0, math.nan]), f"line 5: {NO_NUMBERS} nan"),
        (row(scores=[1e308, -1e308]), f"line 1: {NO_NUMBERS} 1e+308"),
        (row(scores=[1.0, True]), f"line 1: {NO_NUMBERS} True"),
        (row(scores=["0.5", "0.1"]), f"line 1: {NO_NUMBERS} '0.5'"),
        (row() + row(completions=["a", "b", "c"], scores=[1, 2, 3]), "line 2: not as many completions as in"),
        (row(completions=["the cat .", 5]), "line 1: a message must have a role and a content that are"),
        (row(completions=["the cat .", " "]), "0 rows, 1 dropped; 1 completion empty or "),
        (row(completions=["the cat ."] * 2), "0 rows, 1 dropped; 1 chosen equals rejected: lines 1"),
        (row(scores=[0.5, 0.5]) * 5, "0 rows are left, and a batch takes 4"),
    ],
)
def test_a_data_set_that_cannot_be_trained_on_is_named_with_its_row(tmp_path, capsys, text, said):
    stopped(tmp_path, capsys, text, [], f"--dataset {tmp_path}/data.jsonl", said)


def stopped(folder, capsys, text, flags, *said):
    """The run ends with one paragraph and code 1, and writes nothing. Its model's weights are missing."""
    shutil.copytree(TOY / "policy", folder / "model", ignore=lambda *_: ["model.safetensors"])
    (folder / "data.jsonl").write_text(text)
    before = sorted(folder.rglob("*"))
    run = ["--model", folder / "model", "--dataset", folder / "data.jsonl", "--batch-size", "8"]
    with pytest.raises(SystemExit) as stop:
        main(*run, *flags, "--output-dir", folder / "run")
    message = capsys.readouterr().err
    assert stop.value.code == 1 and message.startswith("error: ") and "\n\n" not in message.strip()
    assert all(part in message for part in said), message
    assert sorted(folder.rglob("*")) == before


JUDGED = ["--online", "--reward-model", str(TOY / "reward_model")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch-size", "7"], "--batch-size 7 is not a multiple of 2, the sequences of a group"),
        (["--batch-size", "12"], "data.jsonl: 5 rows are left, and a batch takes 6"),
        (["--group-size", "3"], "--group-size 3 must be 2 or more, and offline 2 or the data's 2"),
        ([*JUDGED, "--group-size", "3"], "--batch-size 8 is not a multiple of 3, the sequences of a group"),
        ([*JUDGED, "--group-size", "8", "--batch-size", "48"], "5 rows are left, and a batch takes 6"),
    ],
)
def test_flags_that_cannot_work_are_named(tmp_path, capsys, flags, said):
    stopped(tmp_path, capsys, row() * 5, flags, said)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (math.nan, f"the scores of --reward-model JUDGE are {DIVERGED}"),
        (0, "round 1: no prompt's rewards differ"),
    ],
)
def test_rewards_that_are_not_finite_or_all_equal_stop_the_round(data, tmp_path, capsys, factor, said):
    judge = shutil.copytree(TOY / "reward_model", tmp_path / "judge")
    weights = load_file(judge / "model.safetensors")
    weights["score.weight"] *= factor
    save_file(weights, judge / "model.safetensors", {"format": "pt"})
    flags = ["--group-size", "4", "--dataset", data["prompts"], "--reward-model", judge]
    with pytest.raises(SystemExit):
        main(*ONLINE, *flags, "--output-dir", tmp_path / "run")
    assert said.replace("JUDGE", str(judge)) in capsys.readouterr().err
