"""contrib/trl_humanline.py: beside TRL's trainers, a plain GRPO loop and grpo_humanline.py; and its guards.

test_adapters.py has plain loops of DPO and KTO, and test_elsewhere.py compares both with their scripts. Here
everything runs on the toy `tales`, in float32.
"""

import copy
import json
import math
import random
import sys
import types

import pytest
import torch
import transformers
from conftest import ROOT, finish, read_rows, start_ranks
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from test_grpo import data, padded_groups, two_steps  # noqa: F401
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

from contrib import trl_humanline
from contrib.trl_humanline import HumanlineDPOTrainer, HumanlineGRPOTrainer, HumanlineKTOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
DPO, KTO, GRPO = HumanlineDPOTrainer, HumanlineKTOTrainer, HumanlineGRPOTrainer
THEIRS = {DPO: DPOTrainer, KTO: KTOTrainer, GRPO: GRPOTrainer}
CONFIGS = {DPO: DPOConfig, KTO: KTOConfig, GRPO: GRPOConfig}
TALES = ROOT / "toy" / "tales"
FILE = ROOT / "contrib" / "trl_humanline.py"
RANK, ALPHA = 8, 16
OPEN = dict(log_epsilon_P=-math.inf, log_epsilon_R=math.inf)
TIGHT = dict(log_epsilon_P=-0.3, log_epsilon_R=0.2)
LR = {"whole": 3e-4, "new adapter": 3e-3, "adapter": 3e-3}
SEVERAL = dict(steps_per_generation=4, num_iterations=2, gradient_accumulation_steps=2)  # 4 updates each

kinds = pytest.mark.parametrize("kind", THEIRS, ids=["DPO", "KTO", "GRPO"])
models = pytest.mark.parametrize("model", ["whole", "adapter"])


# === Models, data and trainers ===
def make_base(dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(TALES / "policy", dtype=dtype)


def make_adapter(trained=True, dtype=torch.float32, **settings):
    """Returns the toy with an adapter; trained: one that is not 0, as after SFT."""
    set_seed(0)
    lora = dict(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM") | settings
    model = get_peft_model(make_base(dtype), LoraConfig(**lora))
    for name, weight in model.named_parameters():
        if trained and "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return model


def make_model(name):
    return make_base() if name == "whole" else make_adapter(trained=name == "adapter")


def message(role, text):
    return [{"role": role, "content": text}]


def toy_rows(kind, count=96):
    pairs = read_rows(TALES / "preferences_train.jsonl.gz")
    if kind is GRPO:  # different prompts, so that each of them is a group of its own
        return [{"prompt": message("user", prompt)} for prompt in sorted({row["prompt"] for row in pairs})]
    rows = []
    for number, pair in enumerate(pairs[:count]):
        row = {"prompt": message("user", pair["prompt"])}
        answers = {side: message("assistant", pair[side]) for side in ("chosen", "rejected")}
        if kind is KTO:
            good = number % 3 > 0
            answers = {"completion": answers["chosen" if good else "rejected"], "label": good}
        rows.append(row | answers)
    return rows


def score(completion_ids):
    """Rewards short texts that repeat little, from the tokens alone."""
    return len(set(completion_ids)) / 10 - abs(len(completion_ids) - 9) / 20


def reward(completion_ids, **kwargs):
    return [score(ids) for ids in completion_ids]


def make_trainer(kind, model, folder, *, more=None, **settings):
    """Returns a trainer of the file, or TRL's own.

    model: a name or a model; settings: of the config; more: of the trainer.
    """
    lr = LR[model] if isinstance(model, str) else LR["whole"]
    model = make_model(model) if isinstance(model, str) else model
    family = next(ours for ours in THEIRS if THEIRS[ours] in kind.__mro__)
    common = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, seed=1)
    common |= dict(learning_rate=lr, lr_scheduler_type="constant", weight_decay=0.0, adam_epsilon=1e-5)
    common |= dict(bf16=False, use_cpu=True, logging_steps=1, disable_tqdm=True, report_to="none")
    common |= dict(save_strategy="no")
    arguments = {"processing_class": AutoTokenizer.from_pretrained(TALES / "policy")}
    arguments["train_dataset"] = Dataset.from_list(toy_rows(family))
    if family is GRPO:
        common |= dict(num_generations=4, max_completion_length=24, use_bias_correction_kl=False)
        arguments["reward_funcs"] = reward
    else:
        common |= dict(max_length=None, beta=0.5)
    trainer = kind(model, args=CONFIGS[family](**common | settings), **arguments | (more or {}))
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(*args, resume=None, **kwargs):
    trainer = make_trainer(*args, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def values(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_equal(ours, theirs, **tolerances):
    """Compares what two trainers logged at each step."""
    for key, tolerance in tolerances.items():
        found, expected = values(ours, key), values(theirs, key)
        assert found and found == pytest.approx(expected, rel=0, abs=tolerance), key


def read_weights(trainer, name):
    """Returns {weight of the base: (A, B)} of an adapter, or {weight: (W,)} of a whole model, as copies."""
    whole, found = trainer.ref_model is not None, {}
    model = trainer.ref_model if whole and name == "ref" else trainer.model
    for key, weight in model.named_parameters():
        if whole or f".{name}." in key:
            layer = key.removeprefix("base_model.model.").split(".lora_")[0].removesuffix(".weight")
            found[layer + ".weight"] = found.get(layer + ".weight", ()) + (weight.detach().clone(),)
    return found


def plain_logps(base, weights, ids):
    """Returns log-probs of the tokens after the first, from W or W + (α/r) B A, without PEFT and TRL."""
    used = dict(base.named_parameters())
    for name, factors in weights.items():
        whole = len(factors) == 1
        used[name] = factors[0] if whole else used[name] + ALPHA / RANK * factors[1] @ factors[0]
    logits = functional_call(base, used, (), {"input_ids": ids}).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


# === Beside TRL's own trainers: k = 0 and no bounds ===
PAIR_CASES = [  # kind, model, settings
    (DPO, "whole", {}),
    (DPO, "adapter", dict(gradient_accumulation_steps=2)),
    (DPO, "new adapter", dict(bf16=True)),
    (DPO, "whole", dict(ld_alpha=0.5, f_divergence_type="js_divergence")),
    (KTO, "whole", dict(undesirable_weight=1.2)),
    (KTO, "adapter", dict(gradient_accumulation_steps=2)),
    (KTO, "new adapter", dict(bf16=True)),
]
FAST = (1, 4)
PAIR_CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (number not in FAST))
    for number, case in enumerate(PAIR_CASES)
]


@pytest.mark.parametrize("kind, model, settings", PAIR_CASES)
def test_without_bounds_and_syncs_dpo_and_kto_are_trls(kind, model, settings, tmp_path):
    ours = train(kind, model, tmp_path, more=dict(k=0, **OPEN), **settings)
    theirs = train(THEIRS[kind], model, tmp_path, **settings)
    assert_equal(ours, theirs, loss=2e-6, grad_norm=5e-5, entropy=1e-6, **{"rewards/margins": 5e-6})
    assert abs(values(ours)[0] - values(ours)[-1]) > 1e-3  # it trains
    assert max(values(ours, "humanline/log_ratio_abs_mean")) > 0.01


ONE_EACH = dict(gradient_accumulation_steps=2)  # one update per generation
GRPO_CASES = [
    ("whole", 1, ONE_EACH),
    ("adapter", 0, SEVERAL),
    pytest.param("adapter", 1, ONE_EACH, marks=pytest.mark.slow),
    pytest.param("whole", 0, SEVERAL, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("model, k, settings", GRPO_CASES)
def test_without_bounds_grpo_is_trls_bit_for_bit(model, k, settings, tmp_path):
    """With k = 1 where TRL makes one update per generation, and without syncs amid four updates."""
    ours = train(GRPO, model, tmp_path, more=dict(k=k, **OPEN), **settings)
    theirs = train(GRPOTrainer, model, tmp_path, **settings)
    assert_equal(ours, theirs, loss=0, grad_norm=0, reward=0, **{"completions/mean_length": 0})
    assert max(values(ours, "grad_norm")) > 0.01
    moved = max(values(ours, "humanline/log_ratio_abs_mean"))
    assert moved == 0 if k else moved > 0.001


def test_with_one_update_per_generation_nothing_is_clipped_and_it_warns(tmp_path):
    with pytest.warns(UserWarning, match="humanline has no effect with one update per generation"):
        ours = train(GRPO, "whole", tmp_path, more=dict(log_epsilon_P=-0.01, log_epsilon_R=0.01))
    assert_equal(ours, train(GRPOTrainer, "whole", tmp_path), loss=0, grad_norm=0)


# === Beside grpo_humanline.py ===
@pytest.mark.slow
def test_grpo_has_the_loss_of_the_script(two_steps, data, tmp_path):  # noqa: F811
    """The same completions, advantages, policy and reference: loss, norm and clipped tokens of a step."""
    logged, policy, reference = two_steps
    config = dict(beta=0.1, epsilon=0.15, per_device_train_batch_size=128, steps_per_generation=2)
    bounds = dict(log_epsilon_P=-0.4, log_epsilon_R=0.3)
    trainer = make_trainer(GRPO, policy, tmp_path, more=bounds, gradient_checkpointing=False, **config)
    trainer.ref_model.load_state_dict(reference.state_dict())
    trainer.current_gradient_accumulation_steps = 1
    inputs = padded_groups(data["groups"])
    inputs["num_items_in_batch"] = 2 * inputs["completion_mask"].sum()  # of two steps per generation
    policy.train().zero_grad()
    loss = trainer.compute_loss(policy, inputs)
    loss.backward()
    norm = math.sqrt(sum(weight.grad.double().square().sum().item() for weight in policy.parameters()))
    found = {"loss": loss.item(), "grad_norm": norm, "grpo/kl": trainer._metrics["train"]["kl"][0]}
    for name in ("clipped_low", "clipped_high", "log_ratio_abs_mean"):
        found[f"humanline/{name}"] = trainer._metrics["train"][f"humanline/{name}"][0]
    for key, value in found.items():
        assert value == pytest.approx(logged["--humanline"][key], rel=1e-5), key
    assert found["humanline/clipped_low"] > 0.01 and found["humanline/clipped_high"] > 0.01


# === Beside a plain loop of GRPO ===
class Recorder:
    """Keeps the micro-batches that a trainer computes a loss of."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.__dict__.setdefault("seen", []).append({k: v.clone() for k, v in inputs.items()})
        return super().compute_loss(model, inputs, *args, **kwargs)


def plain_grpo(trainer, policy, lr, loss_type, *, k, bounds, beta, epsilon=0.2):
    """Trains with the paper's loop on the tokens of a TRL run, one sequence at a time.

    There are two micro-batches per update, four per generation, and every generation is used twice. Rewards,
    advantages, log-probs and losses are computed here. Returns losses, norms and both models' weights.
    """
    base = make_base().requires_grad_(False)
    policy = {name: tuple(w.clone().requires_grad_() for w in factors) for name, factors in policy.items()}
    weights = [weight for factors in policy.values() for weight in factors]
    optimizer = torch.optim.AdamW(weights, lr, weight_decay=0.0, eps=1e-5)
    losses, norms = [], []
    for step in range(len(trainer.seen) // 2):
        batches = trainer.seen[2 * step : 2 * step + 2]
        if step % 4 == 0:  # the policy samples, and so the reference is the policy
            reference = copy.deepcopy(policy)
            groups, tokens = {}, 0
            for batch in trainer.seen[2 * step : 2 * step + 4]:
                columns = (batch["prompt_ids"], batch["completion_ids"], batch["completion_mask"])
                for prompt, ids, mask in zip(*columns):
                    groups.setdefault(tuple(prompt.tolist()), []).append(score(ids[mask.bool()].tolist()))
                    tokens += mask.sum().item()
        loss = 0.0
        for batch in batches:
            for i, prompt in enumerate(batch["prompt_ids"]):
                ids = batch["completion_ids"][i][batch["completion_mask"][i].bool()]
                rewards = torch.tensor(groups[tuple(prompt.tolist())])
                A = (score(ids.tolist()) - rewards.mean()) / (rewards.std() + 1e-4)
                sequence = torch.cat([prompt[batch["prompt_mask"][i].bool()], ids])[None]
                logps = plain_logps(base, policy, sequence)[0, -len(ids) :]
                ref_logps = plain_logps(base, reference, sequence)[0, -len(ids) :]
                log_ratio = logps - ref_logps.detach()
                ratio = log_ratio.clamp(*bounds).exp()
                k3 = (-log_ratio).exp() + log_ratio - 1
                token_losses = beta * k3 - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, 1 + epsilon))
                if loss_type == "dapo":  # the mean over tokens, whose number TRL takes from the generation
                    loss = loss + token_losses.sum() / (tokens / 2)
                else:  # equation 1: the mean of the sequences' means
                    loss = loss + token_losses.mean() / len(batch["prompt_ids"]) / 2
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights, 1.0).item())
        if k and step % k == 0:
            reference = copy.deepcopy(policy)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": losses, "grad_norm": norms, "default": policy, "ref": reference}


def both_grpos(model, folder, file=trl_humanline, *, k=2, beta=0.1, bounds=(-0.1, 0.05), loss_type="dapo"):
    """Trains a trainer of a file and the plain loop, four updates per generation; returns both."""
    kind = type("Recorded", (Recorder, file.HumanlineGRPOTrainer), {})
    more = dict(k=k, log_epsilon_P=bounds[0], log_epsilon_R=bounds[1])
    settings = dict(max_steps=10, loss_type=loss_type, beta=beta, **SEVERAL)
    trainer = make_trainer(kind, model, folder, more=more, **settings)
    start = read_weights(trainer, "default")
    trainer.train()
    return trainer, plain_grpo(trainer, start, LR[model], loss_type, k=k, bounds=bounds, beta=beta)


PLAIN_CASES = [  # model, k, β, bounds, loss type
    ("adapter", 2, 0.1, (-0.1, 0.05), "dapo"),
    ("whole", 3, 0.1, (-0.1, 0.05), "dapo"),
    ("whole", 1, 0.0, (-0.1, 0.05), "dapo"),
    ("whole", 2, 0.1, (-0.1, 0.05), "grpo"),
    ("adapter", 0, 0.0, (-0.1, 0.05), "grpo"),
    ("adapter", 1, 0.01, (-1.5, 1.5), "dapo"),
]
PLAIN_CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (number > 0)) for number, case in enumerate(PLAIN_CASES)
]


@pytest.mark.parametrize("model, k, beta, bounds, loss_type", PLAIN_CASES)
def test_grpo_is_a_plain_loop(model, k, beta, bounds, loss_type, tmp_path):
    trainer, loop = both_grpos(model, tmp_path, k=k, beta=beta, bounds=bounds, loss_type=loss_type)
    assert values(trainer) == pytest.approx(loop["loss"], rel=0, abs=2e-6)
    assert values(trainer, "grad_norm") == pytest.approx(loop["grad_norm"], rel=0, abs=1e-4)
    for name in ("default", "ref"):
        for layer, factors in read_weights(trainer, name).items():
            for found, expected in zip(factors, loop[name][layer], strict=True):
                assert (found - expected).abs().max() < 5e-6, (name, layer)
    clipped = max(values(trainer, "humanline/clipped_low") + values(trainer, "humanline/clipped_high"))
    assert clipped > 0.03 or bounds == (-1.5, 1.5)


def edited(old, new):
    """Returns the module with one edit in it."""
    text = FILE.read_text()
    assert text.count(old) == 1, old
    module = types.ModuleType("edited_trl_humanline")
    exec(compile(text.replace(old, new), str(FILE), "exec"), vars(module))
    return module


CLAMP = "clipped = log_ratio.clamp(*self.bounds)"
WHEN = "global_step % self.trainer.k == "
MISTAKES = {
    "the sync comes after the update": ("def on_pre_optimizer_step", "def on_step_end"),
    "the sync comes one step late": (f"{WHEN}0", f"{WHEN}1"),
    "nothing is clipped": (CLAMP, "clipped = log_ratio"),
    "clipped tokens have a gradient": (
        CLAMP,
        "clipped = log_ratio + (log_ratio.clamp(*self.bounds) - log_ratio).detach()",
    ),
    "the KL penalty is clipped": (
        "ref_logps[:, completions]",
        "(outputs.log_probs - clipped)[:, completions]",
    ),
    "no sync before a generation": ("self.sync_reference()  # Algorithm 1", "pass  # Algorithm 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_is_found(mistake, tmp_path):
    trainer, loop = both_grpos("adapter", tmp_path, edited(*MISTAKES[mistake]))
    assert max(abs(a - b) for a, b in zip(values(trainer), loop["loss"], strict=True)) > 1e-3


# === Syncs ===
class AtSyncs(TrainerCallback):
    """Notes the largest difference of both models' log-probs at each sync and after each update."""

    def __init__(self, trainer, difference):
        self.trainer, self.difference = trainer, difference
        self.at, self.later = [], []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step % self.trainer.k == 0:
            self.at.append(self.difference(self.trainer))

    def on_step_end(self, args, state, control, **kwargs):
        self.later.append(self.difference(self.trainer))


IDS = torch.arange(6, 30)[None]


@torch.no_grad()
def plain_difference(trainer):
    base = make_base()
    policy, reference = (plain_logps(base, read_weights(trainer, name), IDS) for name in ("default", "ref"))
    return (policy - reference).abs().max().item()


@torch.no_grad()
def forward_difference(trainer):
    """Compares PEFT's own forward with both adapters."""
    logps = trainer.model(IDS).logits.log_softmax(-1)
    with trainer.reference() as reference:
        return (logps - reference(IDS).logits.log_softmax(-1)).abs().max().item()


def assert_synced(trainer, difference, syncs):
    callback = AtSyncs(trainer, difference)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.at == [0] * syncs and min(callback.later) > 0.1


@pytest.mark.slow
@models
@kinds
@pytest.mark.parametrize("k, settings", [(1, dict(gradient_accumulation_steps=2)), (2, dict(bf16=True))])
def test_at_a_sync_both_models_have_equal_log_probs(k, settings, kind, model, tmp_path):
    trainer = make_trainer(kind, model, tmp_path, more=dict(k=k), **settings)
    assert_synced(trainer, plain_difference, syncs=6 // k)


ADAPTERS = {
    "DoRA": dict(use_dora=True),
    "rsLoRA": dict(use_rslora=True),
    "embeddings": dict(target_modules=["q_proj", "embed_tokens"]),
    "modules_to_save": dict(modules_to_save=["embed_tokens", "norm"]),
    "token indices": dict(trainable_token_indices=[7, 8]),
    "bfloat16": dict(dtype=torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DPO, GRPO], ids=["DPO", "GRPO"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_other_adapters_are_synced_and_evaluated(adapter, kind, tmp_path):
    more = {"eval_dataset": Dataset.from_list(toy_rows(kind)[:8])}
    model = make_adapter(**ADAPTERS[adapter])
    trainer = make_trainer(kind, model, tmp_path, max_steps=3, learning_rate=1e-2, more=more)
    assert_synced(trainer, forward_difference, syncs=3)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@kinds
def test_a_model_that_was_changed_in_memory_is_the_reference(kind, tmp_path):
    """TRL would read the reference from the folder that the model came from."""
    model = make_base()
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=torch.manual_seed(1))
    trainer = make_trainer(kind, model, tmp_path)
    for reference, policy in trainer.weight_pairs():
        assert reference is not policy and torch.equal(reference, policy)


def test_a_reference_that_is_passed_is_kept(tmp_path):
    reference = make_base()
    reference.lm_head.weight.data += 1
    expected = reference.lm_head.weight.clone()
    trainer = make_trainer(DPO, "whole", tmp_path, more=dict(ref_model=reference))
    assert torch.equal(trainer.ref_model.lm_head.weight, expected)


# === Two processes and resumed runs ===
def table_rollout(prompts, trainer):
    """Draws completions from a table, so that any number of processes sees the same ones."""
    ids = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    completions = []
    for i, prompt in enumerate(prompts):
        draw = random.Random(f"{prompt} {i % 4} {trainer.state.global_step}")
        completions.append([draw.randrange(6, 53) for _ in range(draw.randrange(4, 12))] + [5])
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def train_in(world, kind, model, folder, more):
    """Trains on the same batches in any number of processes."""
    settings = dict(per_device_train_batch_size=8 // world, gradient_accumulation_steps=2)
    if kind is GRPO:
        more = more | {"rollout_func": table_rollout}
        settings |= dict(num_iterations=2, beta=0.1)
    if kind is KTO or kind is KTOTrainer:
        settings["undesirable_weight"] = 1.2
    return train(kind, model, folder, more=more, **settings)


TIGHTER = dict(k=2, log_epsilon_P=-0.1, log_epsilon_R=0.05)
RUNS = {  # name: (kind, model, arguments); the last two are compared with one another
    "DPO whole": (DPO, "whole", TIGHTER),
    "DPO adapter": (DPO, "adapter", TIGHTER),
    "GRPO whole": (GRPO, "whole", TIGHTER),
    "GRPO adapter": (GRPO, "adapter", TIGHTER),
    "KTO": (KTO, "adapter", dict(k=0, **OPEN)),
    "TRL's KTO": (KTOTrainer, "adapter", {}),
}
LOGGED = ("loss", "grad_norm", "humanline/clipped_low", "humanline/clipped_high")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Returns {name of a run: what two processes logged, and whether their weights were equal}."""
    folder = tmp_path_factory.mktemp("two")
    processes = start_ranks(2, [[str(folder)]], "trl_worker.py")
    outputs = finish(processes, timeout=560)
    assert [process.exitcode for process in processes] == [0, 0], outputs[0][-3000:]
    return json.loads((folder / "logged.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if "KTO" not in name])
def test_two_processes_equal_one(name, two_processes, tmp_path):
    kind, model, more = RUNS[name]
    one, two = train_in(1, kind, model, tmp_path, more), two_processes[name]
    # Fractions are means over micro-batches, and TRL shuffles GRPO's micro-batches within a process.
    fraction = 1e-2 if kind is GRPO else 1e-6
    for key, tolerance in zip(LOGGED, (2e-6, 1e-4, fraction, fraction)):
        assert values(one, key) == pytest.approx(two[key], rel=0, abs=tolerance), key
    assert two["equal weights"]
    assert max(two["humanline/clipped_low"] + two["humanline/clipped_high"]) > 0.01


@pytest.mark.slow
def test_kto_in_two_processes_is_trls(two_processes):
    """TRL mismatches pairs within a process, so two processes and one have another z_0."""
    ours, theirs = two_processes["KTO"], two_processes["TRL's KTO"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0, abs=2e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0, abs=1e-4)
    assert ours["equal weights"]


@pytest.mark.slow
@models
@kinds
def test_a_resumed_run_is_one_run_bit_for_bit(kind, model, tmp_path):
    settings = dict(gradient_accumulation_steps=2, save_strategy="steps", save_steps=4, warmup_steps=2)
    settings |= dict(more=dict(k=3, **TIGHT), max_steps=8)
    if kind is GRPO:
        settings |= dict(steps_per_generation=4, beta=0.1)
    whole = train(kind, model, tmp_path, **settings)
    checkpoint = tmp_path / "checkpoint-4"
    resumed = train(kind, model, tmp_path, resume=str(checkpoint), **settings)
    assert values(resumed)[4:] == values(whole)[4:] and len(values(whole)) == 8
    for pairs in zip(whole.weight_pairs(), resumed.weight_pairs(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*pairs))
    saved = checkpoint / ("reference.pt" if model == "whole" else "ref")
    saved.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{saved.name} is missing, so the resumed run"):
        make_trainer(kind, model, tmp_path, **settings).train(resume_from_checkpoint=str(checkpoint))


# === Guards ===
BEST = dict(load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps")
SETTINGS = [  # kinds, a part of the message, settings
    ((DPO, KTO, GRPO), "sync_ref_model must be False, and is True", dict(sync_ref_model=True, beta=0.5)),
    ((DPO, KTO, GRPO), "neftune_noise_alpha must be None, and is 5", dict(neftune_noise_alpha=5)),
    ((DPO, KTO, GRPO), "another metric_for_best_model", BEST | dict(eval_steps=2, save_steps=2)),
    ((DPO,), "loss_type must be ['sigmoid'], and is ['ipo']", dict(loss_type="ipo")),
    ((KTO,), "loss_type must be 'kto', and is 'apo_zero_unpaired'", dict(loss_type="apo_zero_unpaired")),
    ((GRPO,), "loss_type must be 'grpo' or 'bnpo' or 'dr_grpo' or 'dapo', and", dict(loss_type="cispo")),
    ((DPO,), "use_weighting must be False, and is True", dict(use_weighting=True)),
    ((GRPO,), "set use_bias_correction_kl=False", dict(use_bias_correction_kl=True, beta=0.1)),
    ((GRPO,), "importance_sampling_level must be 'token'", dict(importance_sampling_level="sequence")),
    ((GRPO,), "off_policy_mask_threshold must be None, and is 0.1", dict(off_policy_mask_threshold=0.1)),
    ((GRPO,), "set vllm_importance_sampling_correction=False", dict(use_vllm=True)),
]
SETTINGS = [(kind, *rest) for kinds, *rest in SETTINGS for kind in kinds]


def assert_stops(message, kind, model, folder, **settings):
    with pytest.raises(ValueError) as error:
        make_trainer(kind, model, folder, **settings)
    text = str(error.value)
    assert text.startswith("humanline: ") and message in text and "\n" not in text


@pytest.mark.parametrize("kind, message, settings", SETTINGS)
def test_a_setting_that_would_be_silently_wrong_stops(kind, message, settings, tmp_path):
    more = {"eval_dataset": Dataset.from_list(toy_rows(kind, 8))} if settings.get("eval_steps") else {}
    assert_stops(message, kind, "whole", tmp_path, more=more, **settings)


@pytest.mark.parametrize("kind", [DPO, KTO], ids=["DPO", "KTO"])
def test_log_probs_of_a_reference_that_changes_are_not_precomputed(kind, tmp_path):
    message = "precompute_ref_log_probs must be False, and is True"
    assert_stops(message, kind, "adapter", tmp_path, precompute_ref_log_probs=True)


@kinds
@pytest.mark.parametrize("name", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_deepspeed_and_fsdp_stop(name, kind, tmp_path, monkeypatch):
    """Neither is available here, so the trainer is told that one is on."""
    create = transformers.Trainer.create_accelerator_and_postprocess

    def pretend(self):
        create(self)
        setattr(self, name, True)

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", pretend)
    message = "DeepSpeed updates weights in backward" if "deepspeed" in name else "FSDP has not been tried"
    assert_stops(message, kind, "adapter", tmp_path)


ARGUMENTS = [
    ("k=-1 must be a number of updates", dict(k=-1)),
    ("k=1.5 must be a number of updates", dict(k=1.5)),
    ("the bounds 0.22 and 4.48 must be logarithms", dict(log_epsilon_P=0.22, log_epsilon_R=4.48)),
    ("pass get_peft_model(base, config) and no peft_config", dict(peft_config=LoraConfig())),
]


@kinds
@pytest.mark.parametrize("message, more", ARGUMENTS)
def test_a_wrong_argument_stops(message, more, kind, tmp_path):
    assert_stops(message, kind, "whole", tmp_path, more=more)


@kinds
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_init_that_changes_the_base_stops(init, kind, tmp_path):
    model = make_adapter(trained=False, init_lora_weights=init)
    assert_stops(f"init_lora_weights={init!r} can change the base", kind, model, tmp_path)


@kinds
def test_base_weights_that_train_beside_the_adapter_stop(kind, tmp_path):
    model = make_adapter()
    model.base_model.model.model.norm.weight.requires_grad_()
    assert_stops("no sync copies base_model.model.model.norm.weight", kind, model, tmp_path)


@kinds
def test_an_adapter_that_does_not_train_stops(kind, tmp_path):
    make_adapter().save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(make_base(), tmp_path / "adapter")
    assert_stops("no weight trains: call PeftModel.from_pretrained", kind, model, tmp_path)


@kinds
def test_an_adapter_of_another_name_stops(kind, tmp_path):
    make_adapter().save_pretrained(tmp_path / "adapter")
    named = dict(adapter_name="mine", is_trainable=True)
    model = PeftModel.from_pretrained(make_base(), tmp_path / "adapter", **named)
    assert_stops("name the adapter 'default', and not 'mine'", kind, model, tmp_path)


@kinds
def test_dropout_stops(kind, tmp_path):
    model = make_adapter(lora_dropout=0.1)
    assert_stops("log-ratios would measure dropout", kind, model, tmp_path, disable_dropout=False)


@pytest.mark.parametrize("kind", [DPO, KTO], ids=["DPO", "KTO"])
def test_a_reference_that_a_sync_could_not_reach_stops(kind, tmp_path):
    more = {"ref_model": make_base()}
    assert_stops("pass no ref_model with adapters", kind, "adapter", tmp_path, more=more)
    more = {"ref_model": make_base(torch.bfloat16)}
    assert_stops("load both models in one dtype", kind, "whole", tmp_path, more=more)


def test_grpo_needs_its_config(tmp_path):
    with pytest.raises(ValueError, match="humanline: pass a GRPOConfig as args"):
        GRPO(make_base(), reward)


def test_another_version_of_trl_is_refused_in_one_line(monkeypatch):
    """Even a version that lacks everything that the file needs."""
    for name in ("trl", "trl.trainer", "trl.trainer.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["trl.trainer"].utils = sys.modules["trl.trainer.utils"]
    sys.modules["trl"].__version__ = "1.17.0"
    with pytest.raises(ImportError) as error:
        exec(FILE.read_text(), {})
    message = f"trl_humanline.py supports TRL {trl_humanline.TRL} and not 1.17.0"
    assert str(error.value) == f"{message}: pip install 'trl=={trl_humanline.TRL}.*'"
