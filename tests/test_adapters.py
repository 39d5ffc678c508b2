"""contrib/trl_humanline.py: DPO and KTO train LoRA adapters and whole models as plain loops do, in float64.

The plain loop has neither PEFT nor TRL: its weights are W + (alpha / r) B A, its reference a copy of A and B.
"""

import copy
import itertools
import math
import shutil
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from conftest import TOY, trl_settings
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from test_trl import toy_rows
from test_trl_humanline import CLAMP, MISTAKES, edited
from torch.func import functional_call
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trl import DPOConfig, KTOConfig
from trl.trainer import utils as trl_utils

from contrib import trl_humanline

LR, BETA, STEPS, ROWS = 0.02, 0.5, 5, 4  # rows an update
RANK, ALPHA = 4, 8
BOUNDS, OPEN = (-0.15, 0.1), (-torch.inf, torch.inf)

pytestmark = pytest.mark.filterwarnings("ignore")


class Head:
    """Computes the log-probs in the dtype of the model, where TRL's fused head rounds them to float32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, *rest):
        logps = (hidden @ weight.T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        zeros = torch.zeros_like(logps)  # entropy and others, which TRL logs and this test does not need
        return logps, zeros, zeros, zeros, zeros.bool()


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    """Llama's norm and TRL's head round to float32; here neither does."""

    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Head)


def make_base(dtype=torch.float64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=43, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15)
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=5, pad_token_id=0)
    return LlamaForCausalLM(config).to(dtype)


def make_policy(dtype=torch.float64, targets=("q_proj", "v_proj", "down_proj"), **lora) -> PeftModel:
    """Returns the base with an adapter that is not 0, as after SFT."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM", **lora)
    model = get_peft_model(make_base(dtype), config, autocast_adapter_dtype=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # those that start at 0
            torch.nn.init.normal_(weight, std=0.02)
    return model


def make_trainer(folder, k=1, *, model=None, whole=False, kto=False, file=trl_humanline, **settings):
    """Returns a trainer of the file; whole: without adapters.

    settings: of the config; passes: micro-batches an update; bounds: of humanline.
    """
    bounds, passes = settings.pop("bounds", BOUNDS), settings.pop("passes", 1)
    rows = []
    for i, row in enumerate(toy_rows(TOY, STEPS * ROWS)):
        rows.append({"prompt": [{"role": "user", "content": row["prompt"]}]})
        answers = {side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")}
        if kto:
            answers = {"completion": answers["chosen" if i % 3 else "rejected"], "label": i % 3 > 0}
        rows[-1] |= answers
    common = trl_settings(folder, batch=ROWS // passes, steps=STEPS, lr=LR)
    common |= dict(gradient_accumulation_steps=passes, train_sampling_strategy="sequential")
    common |= dict(beta=BETA, max_length=None)
    if kto:
        settings["desirable_weight"] = 1.5
    config = (KTOConfig if kto else DPOConfig)(**common | settings)
    kind = file.HumanlineKTOTrainer if kto else file.HumanlineDPOTrainer
    trainer = kind(
        make_base() if whole else model or make_policy(),
        make_base() if whole else None,
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(TOY / "policy"),
        k=k,
        log_epsilon_P=bounds[0],
        log_epsilon_R=bounds[1],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def find_sync(trainer):
    """Returns the callback that syncs."""
    (sync,) = (c for c in trainer.callback_handler.callbacks if type(c).__name__ == "SyncReference")
    return sync


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def read_weights(trainer, name) -> dict:
    """Returns {weight of the base: (A, B)} of an adapter, or {weight: (W,)} of a whole model, as copies."""
    found = defaultdict(tuple)
    whole = trainer.ref_model is not None
    model = trainer.ref_model if whole and name == "ref" else trainer.model
    for key, weight in model.named_parameters():
        if whole or f".{name}." in key:
            layer = key.removeprefix("base_model.model.").split(".lora_")[0].removesuffix(".weight")
            found[layer + ".weight"] += (weight.detach().clone(),)
    return found


def token_log_ratios(base, policy, reference, batch, prefix=""):
    """Returns log π_θ/π_ref (B, T) of completion tokens, and 0 elsewhere; and the mask."""
    ids, attention = batch[prefix + "input_ids"], batch[prefix + "attention_mask"]
    logps = []
    for adapter in (policy, reference):
        weights = dict(base.named_parameters())
        for name, factors in adapter.items():
            whole = len(factors) == 1
            weights[name] = factors[0] if whole else weights[name] + ALPHA / RANK * factors[1] @ factors[0]
        inputs = {"input_ids": ids, "attention_mask": attention}
        logits = functional_call(base, weights, (), inputs).logits[:, :-1]
        logps.append(logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0])
    mask = batch[prefix + "completion_mask"][:, 1:]
    return (logps[0] - logps[1].detach()) * mask, mask


def plain_loop(trainer, k, *, bounds=BOUNDS, sync=True, passes=1) -> dict:
    """Trains copies of the trainer's weights on the trainer's batches, before the trainer trains."""
    batches = iter(list(trainer.get_train_dataloader()))
    base = make_base().requires_grad_(False)
    policy, reference = read_weights(trainer, "default"), read_weights(trainer, "default")
    weights = [weight.requires_grad_() for weight in itertools.chain(*policy.values())]
    optimizer = torch.optim.AdamW(weights, LR, weight_decay=0.0)
    losses, clipped = [], []
    for step in range(STEPS):
        loss = 0.0
        for batch in (next(batches) for _ in range(passes)):
            log_ratio, mask = token_log_ratios(base, policy, reference, batch)
            clamped = log_ratio.clamp(*bounds)
            clipped.append(((clamped != log_ratio).sum() / mask.sum()).item())
            sums = clamped.sum(-1)
            if "label" in batch:
                other, _ = token_log_ratios(base, policy, reference, batch, "KL_")
                z_0 = other.clamp(*bounds).sum(-1).mean().clamp(min=0).detach()
                sign = 2.0 * batch["label"] - 1
                weight = torch.where(batch["label"], 1.5, 1.0)
                loss = loss + (weight * (1 - torch.sigmoid(BETA * sign * (sums - z_0)))).mean() / passes
            else:
                chosen, rejected = sums.chunk(2)
                loss = loss - F.logsigmoid(BETA * (chosen - rejected)).mean() / passes
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if sync and step % k == 0:
            reference = copy.deepcopy(policy)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "clipped": clipped, "policy": policy, "reference": reference}


def gap(trainer, loop) -> float:
    """Returns the largest difference of the final weights, of policy and reference, from the loop's."""
    differences = []
    for name, key in (("default", "policy"), ("ref", "reference")):
        ours = read_weights(trainer, name)
        for layer, factors in loop[key].items():
            differences += [(a - b).abs().max().item() for a, b in zip(ours[layer], factors, strict=True)]
    return max(differences)


@pytest.mark.parametrize("kto, whole", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("k", [1, 2])
def test_losses_and_weights_are_those_of_a_plain_loop(k, kto, whole, tmp_path):
    trainer = make_trainer(tmp_path, k, kto=kto, whole=whole)
    loop = plain_loop(trainer, k)
    trainer.train()
    assert losses_of(trainer) == pytest.approx(loop["losses"], abs=1e-6)  # Trainer sums losses in float32
    assert gap(trainer, loop) < 1e-10
    assert sum(loop["clipped"]) / STEPS > 0.05  # the bounds bite


@pytest.mark.parametrize("k", [1, 2])
def test_without_the_clamp_or_the_sync_they_are_those_of_that_loop(k, tmp_path):
    whole = plain_loop(make_trainer(tmp_path, k), k)["losses"]
    for bounds, sync in ((OPEN, True), (BOUNDS, False)):
        trainer = make_trainer(tmp_path, k, bounds=bounds)
        if not sync:
            trainer.remove_callback(find_sync(trainer))
        loop = plain_loop(trainer, k, bounds=bounds, sync=sync)
        trainer.train()
        assert losses_of(trainer) == pytest.approx(loop["losses"], abs=1e-6)
        assert gap(trainer, loop) < 1e-10
        assert max(abs(a - b) for a, b in zip(loop["losses"], whole)) > 0.01


def test_k_of_0_never_syncs(tmp_path):
    trainer = make_trainer(tmp_path, 0)
    loop = plain_loop(trainer, 0, sync=False)
    trainer.train()
    assert gap(trainer, loop) < 1e-10


def test_with_bounds_of_0_the_loss_stays_log_2(tmp_path):
    """The page's check that the clamp is on."""
    trainer = make_trainer(tmp_path, bounds=(0, 0))
    trainer.train()
    assert losses_of(trainer) == pytest.approx([math.log(2)] * STEPS)
    found = [entry.get("humanline/log_ratio_abs_mean") for entry in trainer.state.log_history][:STEPS]
    assert found[0] == 0 and min(found[1:]) > 0


OF_SUMS = [name for name in MISTAKES if "KL" not in name and "generation" not in name]
Z_0 = (CLAMP, f"{CLAMP} if torch.is_grad_enabled() else log_ratio")


@pytest.mark.parametrize("kto", [False, True])
@pytest.mark.parametrize("mistake", OF_SUMS)
def test_a_mistake_in_the_file_is_found(mistake, kto, tmp_path):
    trainer = make_trainer(tmp_path, k=2, kto=kto, file=edited(*MISTAKES[mistake]))
    loop = plain_loop(trainer, k=2)
    trainer.train()
    assert gap(trainer, loop) > 1e-3


def test_a_z_0_that_is_not_clipped_is_found(tmp_path):
    trainer = make_trainer(tmp_path, k=2, kto=True, file=edited(*Z_0))
    loop = plain_loop(trainer, k=2)
    trainer.train()
    assert gap(trainer, loop) > 1e-3


@pytest.mark.parametrize("k", [1, 2])
def test_with_accumulation_the_sync_comes_once_an_update(k, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, k, passes=2)
    loop = plain_loop(trainer, k, passes=2)
    events = []

    def note(event, owner, name):
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            events.append(event)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    weight = trainer.weight_pairs()[0][1]
    weight.register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    note("norm", trainer, "_clip_grad_norm")
    note("sync", find_sync(trainer), "on_pre_optimizer_step")
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(lambda *_: events.append("update"))
    trainer.train()
    assert events == ["backward", "backward", "norm", "sync", "update"] * STEPS
    assert gap(trainer, loop) < 1e-10


@pytest.mark.parametrize("k", [1, 2])
def test_a_resume_keeps_the_reference(k, tmp_path):
    whole = make_trainer(tmp_path / "whole", k)
    whole.train()
    cut = make_trainer(tmp_path / "cut", k, max_steps=3, save_strategy="steps", save_steps=3)
    cut.train()
    checkpoint = tmp_path / "cut" / "checkpoint-3"
    resumed = make_trainer(tmp_path / "cut", k)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses_of(resumed)[3:] == losses_of(whole)[3:]  # bit for bit

    shutil.rmtree(checkpoint / "ref")
    lost = make_trainer(tmp_path / "lost", k)
    with pytest.raises(ValueError, match="ref is missing, so the resumed run would have another reference"):
        lost.train(resume_from_checkpoint=str(checkpoint))


def test_a_sync_copies_the_adapter_only(tmp_path):
    trainer = make_trainer(tmp_path)
    before = []

    def update(*_):
        before[:] = [policy.clone() for _, policy in trainer.weight_pairs()]

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(update)
    trainer.train()
    pairs = trainer.weight_pairs()
    assert len(pairs) == 2 * 2 * 3  # A and B, layers, targets
    assert sum(weight.numel() for _, weight in pairs) == trainer.model.get_nb_trainable_parameters()[0]
    for (reference, policy), value in zip(pairs, before, strict=True):
        assert torch.equal(reference, value) and not torch.equal(reference, policy)  # one update behind
    base = trainer.model.get_base_model().state_dict()
    for name, weight in make_base().state_dict().items():
        found = [key for key in (name, name.replace(".weight", ".base_layer.weight")) if key in base]
        assert torch.equal(base[found[0]], weight), name


@pytest.mark.parametrize("model", [{"targets": ["q_proj", "embed_tokens"]}, {"dtype": torch.bfloat16}])
def test_the_reference_starts_as_the_policy(model, tmp_path):
    """Also where TRL's own copy leaves weights out, or makes them in another dtype, as with QLoRA."""
    trainer = make_trainer(tmp_path, model=make_policy(**model), max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["humanline/log_ratio_abs_mean"] == 0
    for reference, policy in trainer.weight_pairs():
        assert reference.dtype == policy.dtype


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_init_that_changes_the_base_is_switched_off_while_the_trainer_is_made(init, tmp_path):
    ids = torch.arange(6, 20)[None]

    def make(switch):
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"], init_lora_weights=init)
        model = get_peft_model(make_base(torch.float32), config)
        before = model(ids).logits
        if switch:
            model.peft_config["default"].init_lora_weights = True
        trainer = make_trainer(tmp_path, model=model)
        model.peft_config["default"].init_lora_weights = init
        return trainer, (model(ids).logits - before).abs().max()

    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' can change the base"):
        make(switch=False)
    trainer, moved = make(switch=True)
    assert moved == 0
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "policy", selected_adapters=["default"])
    loaded = PeftModel.from_pretrained(make_base(torch.float32), tmp_path / "policy")
    assert (loaded(ids).logits - trainer.model(ids).logits).abs().max() < 1e-5


def test_what_is_saved_and_loaded(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "both")
    trainer.model.save_pretrained(tmp_path / "policy", selected_adapters=["default"])
    assert [(tmp_path / name / "ref").exists() for name in ("both", "policy")] == [True, False]
    ids = torch.arange(6, 20)[None]
    for name in ("both", "policy"):
        loaded = PeftModel.from_pretrained(make_base(), tmp_path / name)
        assert (loaded(ids).logits - trainer.model(ids).logits).abs().max() == 0
    with pytest.raises(ValueError, match="is_trainable=True"):
        make_trainer(tmp_path, model=loaded)
