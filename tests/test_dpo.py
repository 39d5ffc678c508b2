"""The DPO script: loss, clipping, models, what a run leaves, and rounds.

Functions that are the same in all scripts, such as `load_models`, are tested here.
"""

import json
import math
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from helpers import (
    PAIRS,
    TOY,
    kill_and_resume,
    metrics,
    parse_args,
    read_checkpoint,
    read_pool,
    run_here,
    run_ranks,
    toy_rows,
    trl_settings,
)
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dpo_humanline
import utils
from dpo_humanline import Args, chosen_nll, clip_log_ratio, dpo_loss, implicit_rewards
from support import run
from support.sampling import best_and_worst
from utils import Example

SHORT = ["--dataset", PAIRS, "--eval-dataset", "", "--num-steps", "3", "--batch-size", "8"]
SHORT += ["--warmup-fraction", "0", "--max-new-tokens", "12"]

# === Loss ===


def batch():
    generator = torch.Generator().manual_seed(0)
    log_ratio = 2 * torch.randn(6, 6, dtype=torch.float64, generator=generator)
    mask = (torch.arange(6) < torch.tensor([6, 4, 1, 2, 6, 3])[:, None]).double()
    return log_ratio, mask


@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-1.5, 1.5), (-0.5, 2.0)])
def test_loss_equals_equation_6_by_hand_and_its_gradient_finite_differences(bounds):
    log_ratio, mask = batch()
    args = Args(log_epsilon_P=bounds[0], log_epsilon_R=bounds[1])
    clipped = clip_log_ratio(args, log_ratio)
    rewards = []
    for row, row_mask in zip(log_ratio.tolist(), mask.tolist()):
        rewards.append(0.1 * sum(min(max(x, bounds[0]), bounds[1]) for x, m in zip(row, row_mask) if m))
    by_hand = [math.log1p(math.exp(rejected - chosen)) for chosen, rejected in zip(rewards, rewards[3:])]
    assert dpo_loss(clipped, mask, 0.1).tolist() == pytest.approx(by_hand, rel=1e-12)
    found = torch.cat(implicit_rewards(clipped, mask, 0.1)).tolist()
    assert found == pytest.approx(rewards, rel=1e-12)
    variable = log_ratio.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: dpo_loss(clip_log_ratio(args, x), mask, 0.5).sum(), variable, eps=1e-7
    )


def test_the_likelihood_term_is_the_mean_over_the_chosen_tokens_and_enters_loss_and_eval_loss(tmp_path):
    logps, mask = batch()  # of 3 pairs; the values after a row's end must not count
    rows = zip(logps.tolist(), [6, 4, 1])
    by_hand = [-sum(row[:length]) / length for row, length in rows]
    assert chosen_nll(logps, mask).tolist() == pytest.approx(by_hand, rel=1e-12)
    variable = logps.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: chosen_nll(x, mask), variable)

    flags = [*SHORT, "--eval-dataset", PAIRS, "--eval-samples", "0", "--num-steps", "2", "--lr", "0"]
    folder = run_here(dpo_humanline, *flags, "--sft-weight", "0.3", "--output-dir", tmp_path / "run")
    for step in metrics(folder):
        parts = step["loss/dpo"] + 0.3 * step["loss/chosen_nll"]
        assert step["loss"] == pytest.approx(parts, rel=1e-12)
        assert step["loss/dpo"] == pytest.approx(math.log(2)) and step["loss/chosen_nll"] > 0.1
    summary = json.loads((folder / "summary.json").read_text())
    plain = run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "plain")
    assert json.loads((plain / "summary.json").read_text())["after"]["eval/loss"][0] == math.log(2)
    assert summary["after"]["eval/loss"][0] > math.log(2) + 0.03


def test_without_bounds_and_syncs_a_run_is_the_one_without_humanline(tmp_path):
    unbounded = ["--log-epsilon-P=-inf", "--log-epsilon-R=inf", "--k", "0"]
    found = metrics(run_here(dpo_humanline, *SHORT, *unbounded, "--output-dir", tmp_path / "1"), True)
    plain = metrics(run_here(dpo_humanline, *SHORT, "--no-humanline", "--output-dir", tmp_path / "2"), True)
    outside = {"humanline/clipped_low": 0, "humanline/clipped_high": 0}  # no token is
    assert found == [step | outside for step in plain]
    assert plain[2]["humanline/log_ratio_abs_mean"] > 0


@pytest.mark.filterwarnings("ignore")
def test_loss_curve_of_trls_trainer_without_humanline(tmp_path):
    """Both train on the same full batch, TRL on the texts as messages."""
    from datasets import Dataset

    trl = pytest.importorskip("trl")  # takes seconds, which ranks that import this file save

    rows, steps = toy_rows(TOY, 16), 5
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--no-humanline", "--dataset", tmp_path / "data.jsonl", "--batch-size", 16, "--beta", "0.5"]
    flags += ["--lr", "1e-3", "--num-steps", steps, "--warmup-fraction", "0", "--eval-dataset", ""]
    flags += ["--adam-eps", "1e-8", "--weight-decay", "0", "--max-grad-norm", "1.0"]
    ours = metrics(run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "ours"))
    chats = []
    for row in rows:
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        chats.append({key: [{"role": role, "content": row[key]}] for key, role in roles.items()})
    policy, reference = (AutoModelForCausalLM.from_pretrained(TOY / "policy") for _ in range(2))
    config = trl.DPOConfig(beta=0.5, max_length=None, **trl_settings(tmp_path / "trl", 16, steps, 1e-3))
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    rows = Dataset.from_list(chats)
    trainer = trl.DPOTrainer(policy, reference, config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4, rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert mine["rewards/margins"] == pytest.approx(other["rewards/margins"], abs=1e-3)


def test_an_epoch_is_another_order_of_all_rows_but_an_incomplete_batch():
    batches = [dpo_humanline.draw_batch(range(7), number, 2, seed=1) for number in range(6)]
    assert all(len(set(sum(epoch, []))) == 6 for epoch in (batches[:3], batches[3:]))
    assert batches[:3] != batches[3:] and batches[0] != dpo_humanline.draw_batch(range(7), 0, 2, seed=2)


# === Models ===
# Policy and reference are the model in the files, whatever its architecture and dtype.

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {},  # tied, with softcaps and a scaled embedding
    "gpt2": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # tied, absolute positions
    "mixtral": {"num_local_experts": 4},
    "mamba": {"state_size": 8},  # its blocks contain further units
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def load(script, folder: str, dtype: str):
    """Loads policy and reference, which keep the model's own attention."""
    utils.choose_attention = lambda *arguments: ""
    args = parse_args(script, ["--model", folder, "--dataset", "none.jsonl", "--dtype", dtype])
    args.max_length = args.max_prompt_length = args.max_new_tokens = 16
    return script.load_models(args, torch.device("cpu"))


@torch.no_grad()
def compare_models(script, folder: str):
    """Asserts that both models have an unsharded fp32 model's parameters and logits, also after a sync."""
    run.setup(Args(model="any", dataset="any", dtype="float32", batch_size=64))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if getattr(plain.config, "attn_logit_softcapping", None):
        plain.set_attn_implementation("eager")
    policy, reference = load(script, folder, "float32")
    blocks = run.decoder_blocks(policy)
    assert len(blocks) >= plain.config.num_hidden_layers
    assert all(isinstance(block, FSDPModule) for block in blocks)
    input_ids = torch.randint(0, plain.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    assert {p.dtype for p in [*policy.parameters(), *reference.parameters()]} == {torch.float32}
    assert not policy.training and not reference.training
    assert not any(p.requires_grad for p in reference.parameters())
    for factor in (1.0, 1.25):
        for parameter in plain.parameters():
            parameter.mul_(factor)
        for parameter in policy.parameters():
            parameter.to_local().mul_(factor)
        if factor > 1:
            script.sync_reference(reference, policy)
        for name, model in (("policy", policy), ("reference", reference)):
            plain.requires_grad_(name == "policy")  # on some processors mamba's logits depend on it
            for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(parameter.full_tensor(), expected), f"{name} {folder} {factor}"
            assert torch.equal(model(input_ids).logits, plain(input_ids).logits), f"{name} {folder} {factor}"
    half, reference = load(script, folder, "bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert torch.equal(half(input_ids).logits, reference(input_ids).logits)
    torch.distributed.barrier()  # a rank that ends early would break the other one's last exchange
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Each model in a bf16 file, and one whose file is fp32 though its config.json says bf16."""
    found = []
    kinds = [(name, torch.bfloat16) for name in MODELS]
    for name, dtype in [*kinds, ("llama", torch.float32)]:
        torch.manual_seed(0)
        found.append(str(tmp_path_factory.mktemp(name)))
        config = AutoConfig.for_model(name, **SIZES | MODELS[name])
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(found[-1])
    path = Path(found[-1]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    return found


@pytest.mark.slow
def test_sharded_models_have_the_logits_of_the_unsharded_one_bit_for_bit(folders):
    run_ranks(2, folders, compare_models)


def measure_loading(script, folder: str):
    """Prints the peak of the summed memory of all ranks while they load, in bytes beyond what they had."""
    run.setup(Args(model="any", dataset="any", dtype="float32", batch_size=12))
    load(script, f"{folder}-small", "bfloat16")  # for the imports, and what is allocated once
    pids, readings, done = run.gather(os.getpid()), [], threading.Event()

    def read():  # pages that ranks share count once
        rollups = [open(f"/proc/{pid}/smaps_rollup").read() for pid in pids]
        readings.append(sum(int(text.partition("\nPss:")[2].split()[0]) for text in rollups) * 1024)

    def watch():
        while not done.wait(0.02):
            read()

    read()
    torch.distributed.barrier()
    thread = threading.Thread(target=watch)
    thread.start()
    models = load(script, folder, "bfloat16")
    torch.distributed.barrier()
    done.set()
    thread.join()
    parameters = sum(p.numel() for p in models[0].parameters())
    print("\n" + json.dumps({"peak": max(readings) - readings[0], "parameters": parameters}))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_ranks_of_a_machine_share_the_pages_of_the_files(tmp_path):
    """The policy takes 4 bytes a parameter, the reference 2, as the files. A copy on each rank takes more."""
    sizes = SIZES | {"hidden_size": 768, "intermediate_size": 3072, "head_dim": 64, "vocab_size": 8000}
    for name, layers in (("model", 9), ("model-small", 1)):
        config = AutoConfig.for_model("llama", **sizes | {"num_hidden_layers": layers})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name, max_shard_size="80MB")
    said = run_ranks(3, [str(tmp_path / "model")], measure_loading)
    found = json.loads(next(line for line in said.splitlines() if line.startswith('{"peak"')))
    assert found["parameters"] > 7e7 and found["peak"] < 1.2 * (4 + 2 + 2) * found["parameters"]


def test_recomputed_activations_and_other_dtypes_train_the_same_curve(tmp_path):
    kinds = {  # flags and how far the loss may be from that of fp64
        "exact": ([], 0),
        "recomputed": (["--gradient-checkpointing"], 1e-9),
        "fp32": (["--dtype", "float32"], 1e-4),
        "bf16": (["--dtype", "bfloat16"], 0.15),
    }
    for name, (flags, tolerance) in kinds.items():
        run_here(dpo_humanline, *SHORT, "--k", "16", *flags, "--output-dir", tmp_path / name)
        for exact, step in zip(metrics(tmp_path / "exact"), metrics(tmp_path / name), strict=True):
            assert step["loss"] == pytest.approx(exact["loss"], abs=tolerance)


# === What a run leaves ===

NAMES = """loss grad_norm lr
rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected
humanline/clipped_low humanline/clipped_high humanline/log_ratio_abs_mean
perf/step_time perf/tokens_per_second perf/peak_memory""".split()


def test_every_metric_and_both_evaluations_are_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ["--num-steps", "10", "--warmup-fraction", "0.2", "--eval-dataset", PAIRS, "--eval-samples", "8"]
    folder = run_here(dpo_humanline, *SHORT, *flags, "--output-dir", tmp_path)
    steps = metrics(folder)
    assert [step["step"] for step in steps] == list(range(10))
    assert set(NAMES) <= set(steps[0])
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in NAMES:
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx([step[name] for step in steps], rel=1e-5)
    before, after, change = json.loads((tmp_path / "summary.json").read_text()).values()
    assert {"eval/loss", "eval/accuracy", "eval/margin", "eval/reward", "eval/win_rate"} <= set(after)
    for name, (mean, _, count) in after.items():
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == pytest.approx({0: before[name][0], 10: mean}, rel=1e-5)
        assert change[name][0] == pytest.approx(mean - before[name][0], abs=1e-9)
        sampled = ("eval/loss", "eval/accuracy", "eval/margin")
        assert count == (128 if name in sampled else 8)
    rates = [step["lr"] / dpo_humanline.TOY["lr"] for step in steps]
    assert rates == pytest.approx([0.5] + [1.0] * 9)  # linear warmup, then constant


def test_sampling_defaults_of_the_model_neither_leak_nor_break_the_export(tmp_path):
    """A repetition penalty, or a temperature without do_sample, belongs to nobody's experiment."""
    shutil.copytree(TOY / "policy", tmp_path / "odd model")
    path = tmp_path / "odd model" / "generation_config.json"
    odd = {"temperature": 0.9, "repetition_penalty": 5.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    flags = ["--reward-model", TOY / "reward_model", "--eval-dataset", PAIRS, "--eval-samples", "16"]
    flags += ["--dtype", "float64", "--num-steps", "1"]
    for name, model in (("plain", TOY / "policy"), ("odd", tmp_path / "odd model")):
        run_here(dpo_humanline, *SHORT, *flags, "--model", model, "--output-dir", tmp_path / name)
    plain, changed = ((tmp_path / name / "summary.json").read_text() for name in ("plain", "odd"))
    assert plain == changed
    assert "repetition_penalty" not in (tmp_path / "odd/final/generation_config.json").read_text()


OWN_CODE = """
from transformers import LlamaForCausalLM

class Own(LlamaForCausalLM):
    pass
"""


def test_a_trained_model_keeps_its_own_code(tmp_path):
    """Instead, `final` had FSDP's class and files."""
    shutil.copytree(TOY / "policy", tmp_path / "own")
    config = json.loads((tmp_path / "own/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "own/config.json").write_text(json.dumps(config))
    (tmp_path / "own/modeling_own.py").write_text(OWN_CODE)
    flags = ["--trust-remote-code", "--num-steps", "1", "--output-dir", tmp_path / "run"]
    run_here(dpo_humanline, *SHORT, "--model", tmp_path / "own", *flags)
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final", trust_remote_code=True)
    assert type(final).__name__ == "Own"
    assert {path.name for path in (tmp_path / "run/final").glob("*.py")} == {"modeling_own.py"}


# === Rounds ===

ONLINE = ["--online", "--engine", "hf", "--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "4"]
ONLINE += ["--k", "3", "--round-prompts", "20", "--batch-size", "8", "--num-steps", "7"]
ONLINE += ["--max-new-tokens", "12", "--checkpoint-every", "1", "--keep-checkpoints", "0"]
ONLINE += ["--eval-every", "3", "--warmup-fraction", "0"]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """The folder of a run whose rounds begin at steps 0, 2 and 5."""
    return run_here(dpo_humanline, *ONLINE, "--output-dir", tmp_path_factory.mktemp("online") / "run")


def test_best_and_worst_make_a_pair():
    samples = [Example("", [1], [10 + i], reward=reward) for i, reward in enumerate((0.3, 0.9, 0.1))]
    pair = best_and_worst(samples, 0.5)
    assert [(x.completion_ids, x.reward) for x in pair] == [([11], 0.9), ([12], 0.1)]
    assert best_and_worst(samples, 0.81) == () and best_and_worst(samples[:1] * 2, 0) == ()


def test_what_a_round_leaves_over_is_trained_on_before_the_next_one(rounds):
    """Twenty prompts give twenty pairs, and a step takes eight: 20 12, 24 16 8, 20 12, and 4 are left."""
    steps = metrics(rounds)
    assert [step.get("rollout/round") for step in steps] == [1, None, 2, None, None, 3, None]
    assert all(step.get("rollout/filtered", 0) == 0 for step in steps)
    pools = {step: read_pool(rounds, step) for step in (6, 7)}
    assert len(pools[6]) == 12 and pools[7] == pools[6][8:]
    for best, worst in pools[6]:
        assert best.prompt == worst.prompt and best.reward > worst.reward
    assert len({step["lr"] for step in steps}) == 1  # no warmup in this run, and no restart
    moments = read_checkpoint(rounds, 7)["optimizer"]["state"]  # they began anew with every round
    assert {state["step"].item() for state in moments.values()} == {7}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["sample_round 2", "model_rewards 3", "dpo_loss 4"])
def test_a_run_killed_in_a_round_and_resumed_equals_the_uninterrupted_one(rounds, tmp_path, moment):
    kill_and_resume(tmp_path / "cut", rounds, ONLINE, moment)
