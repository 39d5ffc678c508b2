"""contrib/trl_humanline.py: beside TRL's trainers and plain loops; its guards; the page's script.

Everything but the page's script runs on the toy `tales`, in float32. Two processes run this file itself.
"""

import contextlib
import copy
import json
import math
import random
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from helpers import ROOT, read_rows
from peft import LoraConfig, PeftModel, get_peft_model
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

import grpo_humanline
from contrib.trl_humanline import HumanlineDPOTrainer, HumanlineGRPOTrainer, HumanlineKTOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
DPO, KTO, GRPO = HumanlineDPOTrainer, HumanlineKTOTrainer, HumanlineGRPOTrainer
THEIRS = {DPO: DPOTrainer, KTO: KTOTrainer, GRPO: GRPOTrainer}
CONFIGS = {DPO: DPOConfig, KTO: KTOConfig, GRPO: GRPOConfig}
TALES = ROOT / "toy" / "tales"
NAME = str(TALES / "policy")
FILE = ROOT / "contrib" / "trl_humanline.py"
PAGE = (ROOT / "docs" / "elsewhere.md").read_text()
RANK, ALPHA, BETA, EPSILON = 8, 16, 0.5, 0.2
LORA = dict(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
OPEN = dict(log_epsilon_P=-math.inf, log_epsilon_R=math.inf)
TIGHT = dict(log_epsilon_P=-0.1, log_epsilon_R=0.05)
LR = {"whole": 3e-4, "new adapter": 3e-3, "adapter": 3e-3}
ONE_EACH = dict(gradient_accumulation_steps=2)  # one update per generation
SEVERAL = dict(steps_per_generation=4, num_iterations=2, gradient_accumulation_steps=2)  # 4 updates each

slow = pytest.mark.slow
kinds = pytest.mark.parametrize("kind", THEIRS, ids=["DPO", "KTO", "GRPO"])


# === Models, data and trainers ===
def make_base(dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(NAME, dtype=dtype)


def make_adapter(trained=True, dtype=torch.float32, **settings):
    """Returns the toy with an adapter; trained: one that is not 0, as after SFT."""
    set_seed(0)
    model = get_peft_model(make_base(dtype), LoraConfig(**LORA | settings))
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


def record(trainer):
    """Lets a trainer keep the micro-batches that it computes a loss of, in `seen`."""
    compute_loss, trainer.seen = trainer.compute_loss, []

    def recorded(model, inputs, *args, **kwargs):
        if model.training:
            trainer.seen.append({k: v.clone() for k, v in inputs.items() if torch.is_tensor(v)})
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recorded


def make_trainer(kind, model, folder, *, more=None, **settings):
    """Returns a trainer of the file, or TRL's own.

    model: a name of LR, a folder or a model; settings: of the config; more: of the trainer.
    """
    family = next(ours for ours in THEIRS if THEIRS[ours] in kind.__mro__)
    lr = LR.get(model, 3e-4) if isinstance(model, str) else 3e-4
    common = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, seed=1)
    common |= dict(learning_rate=lr, lr_scheduler_type="constant", weight_decay=0.0, adam_epsilon=1e-5)
    common |= dict(bf16=False, use_cpu=True, logging_steps=1, disable_tqdm=True, report_to="none")
    common |= dict(save_strategy="no", gradient_checkpointing=False)
    arguments = {"processing_class": AutoTokenizer.from_pretrained(NAME)}
    arguments["train_dataset"] = Dataset.from_list(toy_rows(family))
    arguments["eval_dataset"] = Dataset.from_list(toy_rows(family)[:8])
    if family is GRPO:
        common |= dict(num_generations=4, max_completion_length=24, use_bias_correction_kl=False)
        arguments["reward_funcs"] = reward
    else:
        common |= dict(max_length=None, beta=BETA)
    if model in LR:
        model = make_model(model)
    trainer = kind(model, args=CONFIGS[family](**common | settings), **arguments | (more or {}))
    trainer.remove_callback(PrinterCallback)
    record(trainer)
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


# === Beside TRL's own trainers: k = 0 and no bounds ===
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, model, settings",
    [
        (DPO, "adapter", dict(gradient_accumulation_steps=2)),
        (DPO, "whole", dict(ld_alpha=0.5, f_divergence_type="js_divergence")),
        (KTO, "whole", dict(undesirable_weight=1.2, gradient_accumulation_steps=2)),
        (KTO, "new adapter", dict(bf16=True)),
    ],
)
def test_without_bounds_and_syncs_dpo_and_kto_are_trls(kind, model, settings, tmp_path):
    """In evaluation too."""
    settings = dict(eval_strategy="steps", eval_steps=6) | settings
    ours = train(kind, model, tmp_path, more=dict(k=0, **OPEN), **settings)
    theirs = train(THEIRS[kind], model, tmp_path, **settings)
    tolerances = dict(loss=2e-6, grad_norm=5e-5, entropy=1e-6, eval_loss=2e-6)
    tolerances |= {"rewards/margins": 5e-6, "eval_rewards/margins": 5e-6}
    if "ld_alpha" not in settings:  # TRL logs sums in which ld_alpha weighs tokens
        tolerances |= {"logps/chosen": 1e-5, "logps/rejected": 1e-5, "eval_logps/chosen": 1e-5}
    assert_equal(ours, theirs, **tolerances)
    assert abs(values(ours)[0] - values(ours)[-1]) > 1e-3  # it trains
    assert max(values(ours, "humanline/log_ratio_abs_mean")) > 0.01


MASKED = dict(mask_truncated_completions=True, max_completion_length=13)
GRPO_CASES = [("whole", 1, ONE_EACH | MASKED)]
GRPO_CASES += [pytest.param(*case, marks=slow) for case in [("whole", 1, ONE_EACH), ("adapter", 0, SEVERAL)]]


@pytest.mark.parametrize("model, k, settings", GRPO_CASES)
def test_grpo_is_trls_bit_for_bit(model, k, settings, tmp_path):
    """Without bounds, or where TRL makes one update per generation: nothing is clipped then, and it warns."""
    warned = pytest.warns(UserWarning, match="humanline has no effect") if k else contextlib.nullcontext()
    with warned:
        ours = train(GRPO, model, tmp_path, more=dict(k=k, **(TIGHT if k else OPEN)), **settings)
    theirs = train(GRPOTrainer, model, tmp_path, **settings)
    assert_equal(ours, theirs, loss=0, grad_norm=0, reward=0, **{"completions/mean_length": 0})
    assert max(values(ours, "grad_norm")) > 0.01
    moved = max(values(ours, "humanline/log_ratio_abs_mean"))
    assert moved == 0 if k else moved > 0.001
    if k == 0:  # there is no second model
        assert ours.ref_model is None
        assert not [name for name, _ in ours.model.named_parameters() if ".ref" in name]
    if settings.keys() & MASKED.keys():  # some micro-batches have only truncated samples
        assert {bool(batch["completion_mask"].any()) for batch in ours.seen} == {True, False}


# === Beside plain loops, without TRL and PEFT ===
def read_weights(trainer, name):
    """Returns {weight of the base: (A, B)} of an adapter, or {weight: (W,)} of a whole model, as copies."""
    whole, found = not isinstance(trainer.model, PeftModel), {}
    model = trainer.ref_model if whole and name == "ref" else trainer.model
    for key, weight in model.named_parameters() if model is not None else ():
        if whole or f".{name}." in key:
            layer = key.removeprefix("base_model.model.").split(".lora_")[0].removesuffix(".weight")
            found[layer + ".weight"] = found.get(layer + ".weight", ()) + (weight.detach().clone(),)
    return found


def plain_logps(base, weights, ids):
    """Returns log-probs of the tokens after the first, from W or W + (α/r) B A."""
    used = dict(base.named_parameters())
    for name, factors in weights.items():
        whole = len(factors) == 1
        used[name] = factors[0] if whole else used[name] + ALPHA / RANK * factors[1] @ factors[0]
    logits = functional_call(base, used, (), {"input_ids": ids[None]}).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def sequences(batch, prefix=""):
    """Returns (ids, which of them are the completion's) of each sequence, without padding."""
    if "prompt_ids" in batch:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        completion = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], 1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    else:
        ids, seen, completion = (
            batch[prefix + name] for name in ("input_ids", "attention_mask", "completion_mask")
        )
    return [(row[on.bool()], which[on.bool()].bool()) for row, on, which in zip(ids, seen, completion)]


def log_ratios(base, policy, reference, batch, prefix=""):
    """Returns log π_θ/π_ref of the tokens of each completion."""
    found = []
    for ids, completion in sequences(batch, prefix):
        logps, ref_logps = (plain_logps(base, weights, ids) for weights in (policy, reference))
        found.append((logps - ref_logps.detach())[completion[1:]])
    return found


def sums(ratios, bounds):
    return torch.stack([ratio.clamp(*bounds).sum() for ratio in ratios])


def plain_dpo(batch, ratios, bounds):
    chosen, rejected = sums(ratios(batch), bounds).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def plain_kto(batch, ratios, bounds, weight):
    z_0 = sums(ratios(batch, "KL_"), bounds).mean().clamp(min=0).detach()
    sign = 2.0 * batch["label"] - 1
    weights = torch.where(batch["label"].bool(), weight, 1.0)
    return (weights * (1 - torch.sigmoid(BETA * sign * (sums(ratios(batch), bounds) - z_0)))).mean()


def plain_grpo(batch, ratios, bounds, generation, beta, loss_type):
    """The rewards are computed here, from the samples of four micro-batches."""
    groups, tokens, loss = {}, 0, 0.0
    for other in generation:
        for ids, completion in sequences(other):
            groups.setdefault(tuple(ids[~completion].tolist()), []).append(score(ids[completion].tolist()))
            tokens += completion.sum().item()
    for (ids, completion), log_ratio in zip(sequences(batch), ratios(batch), strict=True):
        rewards = torch.tensor(groups[tuple(ids[~completion].tolist())])
        A = (score(ids[completion].tolist()) - rewards.mean()) / (rewards.std() + 1e-4)
        clipped = log_ratio.clamp(*bounds)
        ratio = clipped.exp()
        k3 = (-log_ratio).exp() + log_ratio - 1
        losses = beta * k3 - torch.minimum(A * ratio, A * ratio.clamp(1 - EPSILON, 1 + EPSILON))
        script = grpo_humanline.grpo_loss(clipped[None], log_ratio[None], A[None], beta, EPSILON)
        torch.testing.assert_close(script[0], losses)
        if loss_type == "dapo":  # the mean over tokens, whose number TRL takes from the generation
            loss = loss + losses.sum() / (tokens / 4)
        else:  # equation 1: the mean of the sequences' means
            loss = loss + losses.mean() / len(batch["prompt_ids"])
    return loss


def plain_loop(trainer, start, lr, loss_of, *, k, bounds):
    """Trains with the paper's loop on the micro-batches of a run, two per update.

    GRPO generates for four micro-batches and uses every generation twice. Returns losses, norms and weights.
    """
    base = make_base().requires_grad_(False)
    policy = {name: tuple(weight.requires_grad_() for weight in factors) for name, factors in start.items()}
    weights = [weight for factors in policy.values() for weight in factors]
    optimizer = torch.optim.AdamW(weights, lr, weight_decay=0.0, eps=1e-5)
    reference, losses, norms = copy.deepcopy(policy), [], []
    for step in range(len(trainer.seen) // 2):
        batches, more = trainer.seen[2 * step : 2 * step + 2], {}
        if isinstance(trainer, GRPOTrainer):
            if step % 4 == 0:  # the policy samples, and so the reference is the policy
                reference, generation = copy.deepcopy(policy), trainer.seen[2 * step : 2 * step + 4]
            more = {"generation": generation}
        ratios = partial(log_ratios, base, policy, reference)
        loss = sum(loss_of(batch, ratios, bounds, **more) for batch in batches) / 2
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights, 1.0).item())
        if k and step % k == 0:
            reference = copy.deepcopy(policy)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": losses, "grad_norm": norms, "default": policy, "ref": reference}


@pytest.mark.parametrize(
    "kind, model, k, settings",
    [
        (DPO, "whole", 2, {}),
        pytest.param(DPO, "adapter", 1, {}, marks=slow),
        pytest.param(KTO, "whole", 1, {}, marks=slow),
        (KTO, "adapter", 2, {}),
        (GRPO, "whole", 3, dict(loss_type="grpo")),
        pytest.param(GRPO, "adapter", 2, {}, marks=slow),
        pytest.param(GRPO, "whole", 0, {}, marks=slow),
        pytest.param(GRPO, "adapter", 1, dict(beta=0.0), marks=slow),
    ],
)
def test_losses_and_weights_are_those_of_a_plain_loop(kind, model, k, settings, tmp_path):
    own, loss_of = dict(gradient_accumulation_steps=2), plain_dpo
    if kind is GRPO:
        settings = dict(loss_type="dapo", beta=0.1) | settings
        own, loss_of = dict(max_steps=10, **settings, **SEVERAL), partial(plain_grpo, **settings)
    elif kind is KTO:
        own["desirable_weight"] = 1.5
        loss_of = partial(plain_kto, weight=1.5)
    trainer = make_trainer(kind, model, tmp_path, more=dict(k=k, **TIGHT), **own)
    start = read_weights(trainer, "default")
    trainer.train()
    loop = plain_loop(trainer, start, LR[model], loss_of, k=k, bounds=tuple(TIGHT.values()))
    assert values(trainer) == pytest.approx(loop["loss"], rel=0, abs=2e-6)
    assert values(trainer, "grad_norm") == pytest.approx(loop["grad_norm"], rel=1e-5, abs=1e-4)
    for name in ("default", "ref"):
        for layer, factors in read_weights(trainer, name).items():
            for found, expected in zip(factors, loop[name][layer], strict=True):
                assert (found - expected).abs().max() < 2e-5, (name, layer)
    clipped = max(values(trainer, "humanline/clipped_low") + values(trainer, "humanline/clipped_high"))
    assert clipped > 0.03


# === References and syncs ===
class AtSyncs(TrainerCallback):
    """Notes the largest difference of both models' logits at each sync, and after each update."""

    def __init__(self, trainer):
        self.trainer, self.at, self.later = trainer, [], []

    @torch.no_grad()
    def difference(self):
        batch = {"input_ids": torch.arange(6, 30)[None], "labels": torch.arange(6, 30)[None]}
        logps = self.trainer.model(**batch, fused_lm_head=True).log_probs
        return (logps - self.trainer.reference_logps(batch | {"fused_lm_head": True})).abs().max().item()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step % self.trainer.k == 0:
            self.at.append(self.difference())

    def on_step_end(self, args, state, control, **kwargs):
        self.later.append(self.difference())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, adapter, settings",
    [
        (DPO, None, dict(bf16=True)),
        (KTO, {}, ONE_EACH),
        (GRPO, None, ONE_EACH),
        (DPO, dict(use_dora=True), {}),
        (KTO, dict(modules_to_save=["embed_tokens", "norm"]), {}),
        (GRPO, dict(target_modules=["q_proj", "embed_tokens"], use_rslora=True), {}),
        (DPO, dict(dtype=torch.bfloat16), {}),
    ],
)
def test_at_a_sync_both_models_have_equal_log_probs(kind, adapter, settings, tmp_path):
    model = make_base() if adapter is None else make_adapter(**adapter)
    trainer = make_trainer(kind, model, tmp_path, max_steps=4, learning_rate=1e-2, more=dict(k=2), **settings)
    callback = AtSyncs(trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.at == [0, 0] and min(callback.later) > 0.05


@kinds
@pytest.mark.parametrize("model", ["whole", pytest.param("new adapter", marks=slow)])
def test_a_model_by_name_is_the_model(model, kind, tmp_path):
    """The adapter comes from peft_config. GRPO then samples with other random numbers."""
    more = {} if model == "whole" else dict(peft_config=LoraConfig(**LORA))
    settings = dict(seed=0, max_steps=3, learning_rate=LR[model]) | (SEVERAL if kind is GRPO else {})
    named, given = (
        make_trainer(kind, name, tmp_path, more=extra | TIGHT, **settings)
        for name, extra in ((NAME, more), (model, {}))
    )
    for pairs in zip(named.weight_pairs(), given.weight_pairs(), strict=True):
        assert all(torch.equal(weight, pairs[0][0]) for pair in pairs for weight in pair)
    named.train()
    assert max(values(named, "humanline/clipped_low")) > 0.01


@pytest.mark.parametrize("kind", [DPO, KTO], ids=["DPO", "KTO"])
def test_a_reference_by_name_is_the_one_that_is_named(kind, tmp_path):
    reference = make_base()
    reference.model.norm.weight.data += 1
    reference.save_pretrained(tmp_path / "reference")
    for model in (NAME, make_base()):
        trainer = make_trainer(kind, model, tmp_path, more=dict(ref_model=str(tmp_path / "reference")))
        assert torch.equal(trainer.ref_model.model.norm.weight, reference.model.norm.weight)
    trainer.train()
    assert values(trainer, "humanline/log_ratio_abs_mean")[0] > 0.01


@kinds
def test_a_model_that_was_changed_in_memory_is_the_reference(kind, tmp_path):
    """TRL would read the reference from the folder that the model came from."""
    model = make_base()
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=torch.manual_seed(1))
    trainer = make_trainer(kind, model, tmp_path)
    for reference, policy in trainer.weight_pairs():
        assert reference is not policy and torch.equal(reference, policy)


# === Two processes and resumed runs ===
def table_rollout(prompts, trainer):
    """Draws completions from a table, so that any number of processes sees the same ones."""
    ids = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    completions = []
    for i, prompt in enumerate(prompts):
        draw = random.Random(f"{prompt} {i % 4} {trainer.state.global_step}")
        completions.append([draw.randrange(6, 53) for _ in range(draw.randrange(4, 12))] + [5])
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def train_in(world, kind, model, folder):
    """Trains on the same batches in any number of processes."""
    more = dict(k=2, **TIGHT)
    settings = dict(per_device_train_batch_size=8 // world, gradient_accumulation_steps=2)
    if kind is GRPO:
        more["rollout_func"] = table_rollout
        settings |= dict(num_iterations=2, beta=0.1)
    return train(kind, model, folder, more=more, **settings)


RUNS = {"DPO": (DPO, "adapter"), "GRPO": (GRPO, "whole")}
LOGGED = ("loss", "grad_norm")


def main(folder):
    """Trains both runs in one of two processes, and writes what was logged."""
    logged = {}
    for name, (kind, model) in RUNS.items():
        trainer = train_in(2, kind, model, folder / name)
        weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
        one, two = trainer.accelerator.gather(weights[None])
        assert torch.equal(one, two)
        logged[name] = [values(trainer, key) for key in LOGGED]
    if trainer.accelerator.is_main_process:
        (folder / "logged.json").write_text(json.dumps(logged))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # otherwise gloo's threads can abort the process when it exits


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """KTO has another z_0 in two, because TRL mismatches pairs within a process."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, __file__, tmp_path], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "logged.json").read_text())
    for name, (kind, model) in RUNS.items():
        one = train_in(1, kind, model, tmp_path)
        for key, found, tolerance in zip(LOGGED, two[name], (2e-6, 1e-4)):
            assert found == pytest.approx(values(one, key), rel=0, abs=tolerance), (name, key)
        assert max(values(one, "humanline/clipped_low")) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, model, k", [(DPO, "whole", 3), (KTO, "adapter", 3), (GRPO, "adapter", 3), (GRPO, "whole", 0)]
)
def test_a_resumed_run_is_one_run_bit_for_bit(kind, model, k, tmp_path):
    settings = dict(gradient_accumulation_steps=2, save_strategy="steps", save_steps=4, warmup_steps=2)
    settings |= dict(max_steps=8)
    if kind is GRPO:
        settings |= dict(steps_per_generation=4, beta=0.1)
    make = partial(make_trainer, kind, model, tmp_path, **settings)
    whole = make(more=dict(k=k, **TIGHT))
    whole.train()
    checkpoint = tmp_path / "checkpoint-4"
    resumed = make(more=dict(k=k, **TIGHT))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert values(resumed)[4:] == values(whole)[4:] and len(values(whole)) == 8
    for name in ("default", "ref"):
        found, expected = read_weights(resumed, name), read_weights(whole, name)
        assert all(torch.equal(a, b) for key in expected for a, b in zip(found[key], expected[key]))
    for other in (dict(k=7), dict(log_epsilon_R=0.7)):
        ((name, value),) = other.items()
        with pytest.raises(ValueError, match=f"{name}={value}, and the run in .*checkpoint-4 has {name}="):
            make(more=dict(k=k, **TIGHT) | other).train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / "humanline.json").unlink()  # as in a checkpoint of TRL's own trainer
    with pytest.raises(ValueError, match="humanline.json is missing, so the resumed run"):
        make(more=dict(k=k, **TIGHT)).train(resume_from_checkpoint=str(checkpoint))


def test_an_older_checkpoint_stays_until_the_next_one_has_its_reference(tmp_path, monkeypatch):
    """With a full disk, save_total_limit=1 left only a checkpoint that could not be resumed."""
    settings = dict(save_strategy="steps", save_steps=2, save_total_limit=1, max_steps=4)
    trainer = make_trainer(DPO, "whole", tmp_path, **settings)
    save = torch.save

    def fill_the_disk(state, path):
        if Path(path).parts[-2:] == ("checkpoint-4", "reference.pt"):
            raise OSError("No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    monkeypatch.undo()
    resumed = train(DPO, "whole", tmp_path, resume=str(tmp_path / "checkpoint-2"), **settings)
    assert resumed.state.global_step == 4


# === Guards ===
ALL = (DPO, KTO, GRPO)
EVALUATED = dict(eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2)
MARGINS = EVALUATED | dict(metric_for_best_model="eval_rewards/margins")
BEST = EVALUATED | dict(load_best_model_at_end=True)  # which sets metric_for_best_model, as a plateau does
PLATEAU = EVALUATED | dict(lr_scheduler_type="reduce_lr_on_plateau")
STOPPING = dict(callbacks=[transformers.EarlyStoppingCallback()])
MIXED = dict(gradient_accumulation_steps=3, steps_per_generation=4)
STOPS = [  # kinds, a part of the message, settings of the config, arguments of the trainer
    (ALL, "k=-1 must be a number of updates", {}, dict(k=-1)),
    (ALL, "log_epsilon_P=0.22 and log_epsilon_R=4", {}, dict(log_epsilon_P=0.22, log_epsilon_R=4)),
    (ALL, "sync_ref_model must be False, and is True", dict(sync_ref_model=True, beta=0.5), {}),
    (ALL, "neftune_noise_alpha must be None, and is 5", dict(neftune_noise_alpha=5), {}),
    (ALL, "bf16_full_eval must be False, and is True", dict(bf16_full_eval=True), {}),
    ([DPO], "precompute_ref_log_probs must be False", dict(precompute_ref_log_probs=True), {}),
    ([DPO], "loss_type must be ['sigmoid'], and is ['ipo']", dict(loss_type="ipo"), {}),
    ([KTO], "loss_type must be 'kto', and is", dict(loss_type="apo_zero_unpaired"), {}),
    ([GRPO], "loss_type must be 'grpo' or 'bnpo' or 'dr_grpo' or 'dapo'", dict(loss_type="cispo"), {}),
    ([DPO], "use_weighting must be False, and is True", dict(use_weighting=True), {}),
    ([GRPO], "set use_bias_correction_kl=False", dict(use_bias_correction_kl=True, beta=0.1), {}),
    ([GRPO], "importance_sampling_level must be 'token'", dict(importance_sampling_level="sequence"), {}),
    ([GRPO], "off_policy_mask_threshold must be None", dict(off_policy_mask_threshold=0.1), {}),
    ([GRPO], "set vllm_importance_sampling_correction=False", dict(use_vllm=True), {}),
    ([GRPO], "gradient_accumulation_steps=3 must divide", MIXED, {}),
    (ALL, "metric_for_best_model='loss' is relative to a reference that moves", BEST, {}),
    ([DPO, GRPO], "metric_for_best_model='loss' is relative", PLATEAU, {}),
    (
        [DPO],
        "metric_for_best_model='eval_rewards/margins' is relative",
        MARGINS | dict(save_strategy="best"),
        {},
    ),
    ([KTO], "metric_for_best_model='eval_rewards/margins' is relative", MARGINS, STOPPING),
    ([KTO], "metric_for_best_model='eval_kl' is", EVALUATED | dict(metric_for_best_model="eval_kl"), {}),
    ([GRPO], "metric_for_best_model='loss' is relative", BEST, dict(k=0)),
]
STOPS = [(kind, *rest) for kinds, *rest in STOPS for kind in kinds]


def assert_stops(message, kind, model, folder, **settings):
    with pytest.raises(ValueError) as error:
        make_trainer(kind, model, folder, **settings)
    text = str(error.value)
    assert text.startswith("humanline: ") and message in text and "\n" not in text


@pytest.mark.parametrize("kind, message, settings, more", STOPS)
def test_a_setting_that_would_be_silently_wrong_stops(kind, message, settings, more, tmp_path):
    """It stops before a model is loaded: there is none of this name."""
    assert_stops(message, kind, str(tmp_path / "nowhere"), tmp_path, more=more, **settings)


def test_dropout_stops(tmp_path):
    """A LoRA layer's module, and OPT's plain number, which TRL's disable_dropout leaves on."""
    lora = make_adapter(lora_dropout=0.1)
    assert_stops("lora_dropout.default.p is 0.1", DPO, lora, tmp_path, disable_dropout=False)
    sizes = dict(vocab_size=64, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)
    for name in ("dropout", "layerdrop"):
        rates = dict(dropout=0.0, attention_dropout=0.0, layerdrop=0.0) | {name: 0.1}
        models = [transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **rates)) for _ in range(2)]
        assert_stops(f"model.decoder.{name} is 0.1", DPO, models[0], tmp_path, more=dict(ref_model=models[1]))


def test_a_model_that_no_sync_would_reach_stops(tmp_path):
    beside = make_adapter()
    beside.base_model.model.model.norm.weight.requires_grad_()
    assert_stops("no sync copies base_model.model.model.norm.weight", KTO, beside, tmp_path)
    make_adapter().save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(make_base(), tmp_path / "adapter")
    assert_stops("call PeftModel.from_pretrained with is_trainable=True", GRPO, frozen, tmp_path)
    assert_stops("pass no ref_model with adapters", DPO, "adapter", tmp_path, more={"ref_model": make_base()})
    other = {"ref_model": make_base(torch.bfloat16)}
    assert_stops("load ref_model in the policy's torch.float32", DPO, "whole", tmp_path, more=other)
    assert_stops("init_lora_weights='pissa'", GRPO, make_adapter(False, init_lora_weights="pissa"), tmp_path)


# === The script of the page ===
def test_the_script_of_the_page_runs_on_the_toy(tmp_path, monkeypatch):
    """In a folder with the file beside it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (text,) = (block for block in blocks if "HumanlineGRPOTrainer" in block)
    words = sorted({row["prompt"].split()[-1] for row in read_rows(TALES / "preferences_train.jsonl.gz")})
    rows = [{"prompt": message("user", f"about {word}"), "answer": "small"} for word in words]
    edits = [(r'^NAME = ".*"$', f"NAME = {NAME!r}"), (r"^rows = \[\n.*?^\]$", f"rows = {rows!r}")]
    edits += [(r"max_steps=\d+", "max_steps=8"), (r"learning_rate=[-e\d]+", "learning_rate=3e-3")]
    for old, new in edits:
        text, count = re.subn(old, lambda _, new=new: new, text, flags=re.DOTALL | re.MULTILINE)
        assert count == 1, old
    (tmp_path / "train.py").write_text(text)
    shutil.copy(FILE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = runpy.run_path("train.py")
    ids = torch.arange(6, 30)[None]
    merged, base = (AutoModelForCausalLM.from_pretrained(name) for name in ("merged", NAME))
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    assert (merged(ids).logits - base(ids).logits).abs().max() > 1e-3
    assert (merged(ids).logits - names["merged"](ids).logits).abs().max() < 1e-4
    AutoTokenizer.from_pretrained("merged")
    moved = values(names["trainer"], "humanline/log_ratio_abs_mean")
    assert len(moved) == 8 and moved[0] == moved[4] == 0  # two generations, four updates each
    assert moved[2] > moved[1] and moved[3] < moved[2]  # k = 2: the sync before update 2 is seen in update 3
    assert values(names["trainer"], "reward")[0] > 0 and values(names["trainer"], "grad_norm")[0] > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
