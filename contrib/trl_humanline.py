"""Humanline for TRL's DPO, KTO and GRPO trainers, with a whole reference model or with adapters (PEFT).

Implements "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207) as two additions to TRL:

    clipping   r_t = min(max(log π_θ(y_t)/π_ref(y_t), log ε_P), log ε_R) for each token, before the loss
    syncing    π_ref ← π_θ at the updates 0, k, 2k, ...: after backward, before the optimizer's step

Copy this file beside your script. The trainers take the arguments of TRL's trainers, and three more:

    trainer = HumanlineDPOTrainer(model, args=DPOConfig(...), train_dataset=..., k=1)
    trainer.train()

The model and `ref_model` are models or names. For a new adapter, pass a `peft_config`, or
`get_peft_model(base, LoraConfig(...))` as the model. For an adapter that was trained before, the model is
`PeftModel.from_pretrained(base, folder, is_trainable=True)`. The reference is then a second adapter, `ref`,
and a sync copies the adapter `default` to it.

The trainers call TRL's own loss with a function in place of the model. This function runs the policy and the
reference, and clips. The losses and metrics are therefore TRL's own. In DPO and KTO `rewards/*` are β times
the sums of clipped log-ratios. The file relies on these private parts of TRL, so it refuses every version of
TRL but one:

    all         a loss calls `model(..., labels=..., fused_lm_head=True)` and reads its `log_probs`
    DPO, KTO    with `precompute_ref_logps`, a loss reads the reference's sums from the batch
    GRPO        `_generate_and_score_completions` draws samples. The loss runs the policy before it reads
                `old_per_token_logps` and `ref_per_token_logps` from the batch. `beta` makes a reference.

Images, tools, quantized models and prompt tuning have not been tried.

    - The loss, `kl`, and DPO's and KTO's `rewards/*` are relative to the reference of that moment, so they do
      not measure progress.
    - bf16 rounds log-ratios. At small learning rates, set bf16=False.
    - A checkpoint also holds k, the bounds, and the reference: in the folder `ref` or in `reference.pt`.
    - Without `ref_model`, the reference starts as the policy that the trainer gets, not as the one on disk.
"""

import copy
import json
import re
import warnings
from pathlib import Path

import torch
import trl
from accelerate.utils import is_peft_model
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer import utils as trl_utils

TRL = "1.16"  # the one supported version
if not trl.__version__.startswith(f"{TRL}."):
    raise ImportError(
        f"trl_humanline.py supports TRL {TRL} and not {trl.__version__}: pip install 'trl=={TRL}.*'"
    )


def require(condition, message: str):
    """Raises ValueError with a message if a condition does not hold."""
    if not condition:
        raise ValueError(f"humanline: {message}")


class HumanlineCallback(TrainerCallback):
    """Syncs the reference before updates."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # Trainer calls this once per update, after backward and the clipping of the gradient's norm.
        # `global_step` counts the updates so far. A sync after the update would make both models equal.
        if self.trainer.k > 0 and state.global_step % self.trainer.k == 0:
            self.trainer.sync_reference()  # humanline syncing


class Humanline:
    """Adds a reference, its sync and the clamp to one of TRL's trainers.

    Args:
        k: updates between syncs; 0: no syncs (but GRPO always syncs before it generates).
        log_epsilon_P, log_epsilon_R: bounds of a token's log π_θ/π_ref, in nats; -inf and inf: no clipping.
    """

    supported = {  # {setting: the values that it may have}
        "sync_ref_model": [False],  # copies after the update, where both models would be equal
        "precompute_ref_log_probs": [False],  # the log-probs of a reference that changes later
        "neftune_noise_alpha": [None],  # log-ratios would measure the noise
        "bf16_full_eval": [False],  # this and the next two may round the policy alone
        "fp16_full_eval": [False],
        "use_transformers_continuous_batching": [False],
    }
    relative_metrics = r"(loss|kl|rewards/\w+)$"  # of a reference that may move
    keeps_reference = True

    def __init__(self, model, *, args=None, k=1, log_epsilon_P=-1.5, log_epsilon_R=1.5, **kwargs):
        require(k >= 0, f"k={k} must be a number of updates, 0 or more")
        require(
            log_epsilon_P <= 0 <= log_epsilon_R,
            f"log_epsilon_P={log_epsilon_P} and log_epsilon_R={log_epsilon_R} must be logarithms, below and"
            " above 0",
        )
        self.k, self.bounds = k, (log_epsilon_P, log_epsilon_R)
        self.humanline = {"k": k, "log_epsilon_P": log_epsilon_P, "log_epsilon_R": log_epsilon_R}
        self.check_settings(args)
        ref_model = kwargs.get("ref_model")
        if self.keeps_reference:
            adapter = kwargs.get("peft_config") or getattr(model, "peft_config", {}).get("default")
            check_adapter(adapter, ref_model)
        if isinstance(ref_model, str):
            kwargs["ref_model"] = load_reference(ref_model, model, args)
        super().__init__(model, args=args, **kwargs)
        if self.keeps_reference:
            self.make_reference(passed=ref_model is not None)
        self.check_dropout()
        self.add_callback(HumanlineCallback(self))

    def check_settings(self, args):
        """Stops settings with which training would be wrong without a word, before a model is loaded."""
        for name, values in self.supported.items():
            value = getattr(args, name, values[0])
            choices = " or ".join(map(repr, values))
            require(value in values, f"{name} must be {choices}, and is {value!r}")
        # All decisions of transformers read this name, and some arguments set it to "loss".
        metric = getattr(args, "metric_for_best_model", None) or ""
        moves = self.k > 0 or not self.keeps_reference
        require(
            not (moves and re.search(self.relative_metrics, metric)),
            f"metric_for_best_model={metric!r} is relative to a reference that moves, so it cannot decide for"
            " load_best_model_at_end, save_strategy='best', early stopping or a plateau's lr_scheduler_type:"
            " switch these off, or name another metric",
        )

    def check_dropout(self):
        """Stops dropout that TRL's disable_dropout has left on, such as a module's plain number."""
        for path, module in self.model.named_modules():
            for name, rate in vars(module).items():
                drops = "drop" in f"{type(module).__name__}.{name}".lower()
                require(
                    not (drops and isinstance(rate, float) and rate > 0),
                    f"{path}.{name} is {rate}, and log-ratios would measure this dropout: set it to 0 in the"
                    " model's config, in the LoraConfig, or with disable_dropout=True",
                )

    def make_reference(self, passed):
        """Makes the reference equal to the policy if the user passed none, and checks what a sync copies."""
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        require(not sharded, "use DDP, because no sync reaches the shards of DeepSpeed and FSDP")
        if is_peft_model(self.model) and "ref" not in self.model.peft_config:  # TRL has used `peft_config`
            self.model.add_adapter("ref", self.model.peft_config["default"])
            if self.args.disable_dropout:
                trl_utils.disable_dropout_in_model(self.model)
        if self.ref_model is not None:
            # torch.compile puts a prefix before the names of the reference.
            names = [name.replace("_orig_mod.", "") for name, _ in self.ref_model.named_parameters()]
            same = names == [name for name, _ in self.model.named_parameters()]
            require(same, "the reference has other weights: pass both models by name, or a ref_model")
        for reference, policy in self.weight_pairs():
            if not passed:
                # TRL reads a whole reference from disk, which lacks what was changed in memory. Its copy of
                # an adapter lacks embeddings, and has another dtype with QLoRA.
                reference.data = policy.data.clone()
            same = reference.dtype == policy.dtype
            require(same, f"load ref_model in the policy's {policy.dtype}, and not in {reference.dtype}")
        synced = {id(policy) for _, policy in self.weight_pairs()}
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        require(trained, "no weight trains: call PeftModel.from_pretrained with is_trainable=True")
        for name, weight in trained.items():
            require(id(weight) in synced, f"no sync copies {name}: freeze it, or add it to modules_to_save")

    def save_model(self, output_dir=None, _internal_call=False):
        """Saves the model, and with a checkpoint what a resumed run needs, before older ones are deleted."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir and self.args.should_save:  # a checkpoint
            Path(output_dir).mkdir(parents=True, exist_ok=True)  # with FSDP it is made later
            if self.ref_model is not None:  # PEFT saves the adapter `ref` itself
                torch.save(self.ref_model.state_dict(), Path(output_dir) / "reference.pt")
            (Path(output_dir) / "humanline.json").write_text(json.dumps(self.humanline))

    def weight_pairs(self):
        """Returns (reference, policy) for each weight that a sync copies."""
        if self.ref_model is not None:
            return list(zip(self.ref_model.parameters(), self.model.parameters(), strict=True))
        weights = dict(self.model.named_parameters())
        names = [name for name in weights if ".default" in name]
        return [(weights[name.replace(".default", ".ref")], weights[name]) for name in names]

    @torch.no_grad()
    def sync_reference(self):
        """Copies the policy's weights into the reference: π_ref ← π_θ."""
        for reference, policy in self.weight_pairs():
            reference.copy_(policy)

    @torch.no_grad()
    def reference_logps(self, batch):
        """Returns the reference's log-probs of a batch, (B, T - 1), 0 outside completions."""
        if self.ref_model is not None:
            return self.ref_model(**batch).log_probs
        with trl_utils.use_adapter(self.accelerator.unwrap_model(self.model), "ref"):
            return self.model(**batch).log_probs

    def clip(self, log_ratio, labels):
        """Returns clipped log-ratios (B, T), which have no gradient beyond a bound.

        Logs means over the tokens of a micro-batch, of all processes. Outside completions, labels are -100.
        """
        low, high = self.bounds
        if torch.is_grad_enabled():  # not in evaluation, nor for KTO's mismatched pairs
            values = {
                "log_ratio_abs_mean": log_ratio.detach().abs(),
                "clipped_low": log_ratio < low,
                "clipped_high": log_ratio > high,
            }
            sums = torch.stack([(labels != -100).sum(), *(value.sum() for value in values.values())])
            tokens, *sums = self.accelerator.reduce(sums, "sum").tolist()
            for name, total in zip(values, sums, strict=True):
                # There is no token if GRPO masks every completion of a micro-batch.
                self._metrics["train"][f"humanline/{name}"].append(total / max(tokens, 1))
        return log_ratio.clamp(low, high)  # humanline clipping

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Trains as TRL does. A resumed run reads the reference of its checkpoint."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder:
            file = Path(folder) / "humanline.json"
            require(file.exists(), f"{file} is missing, so the resumed run would have another reference")
            for name, value in json.loads(file.read_text()).items():
                now = self.humanline[name]
                require(now == value, f"{name}={now}, and the run in {folder} has {name}={value}")
            if self.ref_model is not None:
                weights = torch.load(Path(folder) / "reference.pt", map_location="cpu", weights_only=True)
                self.ref_model.load_state_dict(weights)
        return super().train(resume_from_checkpoint, *args, **kwargs)


def check_adapter(config, ref_model):
    """Stops an adapter's config of which no reference can be made."""
    require(config is None or ref_model is None, "pass no ref_model with adapters: it is the adapter `ref`")
    init = getattr(config, "init_lora_weights", True)
    # `ref` is made with this setting. PEFT would then take a second part out of the base's weights.
    require(
        init in (True, False, "gaussian"),
        f"init_lora_weights={init!r} can change the base: make the model with get_peft_model, and set"
        " model.peft_config['default'].init_lora_weights = True until the trainer is made",
    )


def load_reference(name, model, args):
    """Loads a reference by its name, as TRL loads a policy or as the policy is."""
    settings = dict(getattr(args, "model_init_kwargs", None) or {}, device_map=None)
    settings.setdefault("trust_remote_code", getattr(args, "trust_remote_code", False))
    if not isinstance(model, str):
        settings |= dict(dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    return trl_utils.create_model_from_path(name, **settings)


class HumanlineOnSums(Humanline):
    """Adds humanline to DPO and KTO.

    TRL's losses use Σ_t log π_θ - Σ_t log π_ref of a sequence. Here the first sum is Σ_t r_t, and the second
    sum is 0. `logps/*` are Σ_t log π_θ as in TRL.
    """

    def __init__(self, model, ref_model=None, args=None, **kwargs):
        super().__init__(model, ref_model=ref_model, args=args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def clipped_log_ratios(**batch):
            nonlocal logps
            if "labels" not in batch:  # TRL's second call, for return_outputs
                return model(**batch)
            # The reference comes first, because the policy's activations stay in memory until backward.
            ref_logps = self.reference_logps(batch)
            outputs = model(**batch)
            logps = outputs.log_probs.detach().sum(-1)
            outputs.log_probs = self.clip(outputs.log_probs - ref_logps, batch["labels"][:, 1:])
            return outputs

        logps = None
        zeros = torch.zeros(len(inputs["input_ids"]) // self.sides, device=inputs["input_ids"].device)
        inputs = {**inputs, **dict.fromkeys(self.reference_sums, zeros)}
        self.precompute_ref_logps = True  # TRL then reads these sums instead of running the reference
        result = super().compute_loss(clipped_log_ratios, inputs, return_outputs, num_items_in_batch)
        self.precompute_ref_logps = False
        chosen = self.is_chosen(inputs)
        for name, rows in (("logps/chosen", chosen), ("logps/rejected", ~chosen)):
            local = torch.stack([logps[rows].sum(), rows.sum()])
            # TRL's KTO averages over fewer ranks at the end of the data.
            gather = self.accelerator.gather if self.sides == 2 else self.accelerator.gather_for_metrics
            total, count = gather(local[None]).sum(0).tolist()
            if count > 0:  # in place of the mean of Σ_t r_t
                self._metrics["train" if self.model.training else "eval"][name][-1] = total / count
        return result


class HumanlineDPOTrainer(HumanlineOnSums, trl.DPOTrainer):
    """Minimizes -log σ(β (Σ_t r_t(chosen) - Σ_t r_t(rejected))), the mean over pairs."""

    supported = Humanline.supported | {"loss_type": [["sigmoid"]], "use_weighting": [False]}
    reference_sums = ("ref_chosen_logps", "ref_rejected_logps")
    sides = 2  # a batch is [chosen, rejected]

    def is_chosen(self, inputs):
        rows = len(inputs["input_ids"])
        return torch.arange(rows, device=inputs["input_ids"].device) < rows // 2


class HumanlineKTOTrainer(HumanlineOnSums, trl.KTOTrainer):
    """Minimizes λ (1 - σ(±β (Σ_t r_t - z_0))), the mean over sequences.

    z_0 is the mean of Σ_t r_t over mismatched pairs, or 0 if this mean is negative. TRL takes the mean over
    one micro-batch of all processes. The paper's λ_D is desirable_weight=1.1.
    """

    supported = Humanline.supported | {"loss_type": ["kto"]}
    reference_sums = ("ref_logps", "ref_KL_logps")
    sides = 1

    def is_chosen(self, inputs):
        return torch.as_tensor(inputs["label"], dtype=torch.bool, device=inputs["input_ids"].device)


class HumanlineGRPOTrainer(Humanline, trl.GRPOTrainer):
    """Minimizes -min(A ρ_t, A clamp(ρ_t, 1-ε, 1+ε)) + β (exp(-s_t) + s_t - 1), the mean over tokens.

    Here ρ_t is exp(r_t), and s_t is the log-ratio before clipping. The reference takes the place of π_old: it
    is the policy at sampling (Algorithm 1, line 3) or at the last sync, whichever came later. The KL penalty
    uses the same reference (C.1.4, C.2). Samples, rewards, advantages and means are TRL's:

    - TRL makes one update per generation by default. Both models are then equal in every loss, and humanline
      has no effect. Set steps_per_generation above gradient_accumulation_steps, or num_iterations above 1.
    - With k=0 the reference is TRL's π_old. There is no second model, so FSDP and DeepSpeed are not refused.
    - With loss_type="dapo", the default, the mean is that of C.1.4; "grpo" is equation 1.
    - TRL divides advantages by the sample's std + 1e-4, and logits by the temperature, in training too.
    - Resume from a step at which TRL generates. From another step, TRL generates anew.
    """

    supported = Humanline.supported | {
        "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo"],
        "importance_sampling_level": ["token"],
        "off_policy_mask_threshold": [None],
    }
    relative_metrics = r"(loss|kl)$"  # rewards are of samples

    def __init__(self, model, reward_funcs=None, args=None, *, k=1, **kwargs):
        require(args is not None, "pass a GRPOConfig as args")
        require(args.beta == 0 or not args.use_bias_correction_kl, "set use_bias_correction_kl=False")
        self.keeps_reference = k > 0
        require(
            k == 0 or not (args.use_vllm and args.vllm_importance_sampling_correction),
            "set vllm_importance_sampling_correction=False, because humanline has no such weights",
        )
        accumulated = args.gradient_accumulation_steps
        generated = args.steps_per_generation * args.num_iterations
        if accumulated % generated == 0:
            warnings.warn(
                "humanline has no effect with one update per generation: set steps_per_generation above"
                " gradient_accumulation_steps, or num_iterations above 1",
                stacklevel=2,
            )
        require(
            k == 0 or generated % accumulated == 0 or accumulated % generated == 0,
            f"gradient_accumulation_steps={accumulated} must divide steps_per_generation · num_iterations ="
            f" {generated}, or an update would mix two references",
        )
        made = copy.copy(args)
        made.beta = 1.0 if k > 0 else 0.0  # TRL makes a reference only if beta is not 0
        super().__init__(model, reward_funcs=reward_funcs, args=made, k=k, **kwargs)
        self.beta = made.beta = args.beta

    def _generate_and_score_completions(self, inputs):
        if self.keeps_reference and self.model.training:
            self.sync_reference()  # Algorithm 1, line 3: the reference is the policy that samples
        self.beta = 0.0  # TRL would run a reference here, whose log-probs would not be used
        samples = super()._generate_and_score_completions(inputs)
        self.beta = self.args.beta
        return samples

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)  # a copy, because TRL uses the same samples in several steps
        completions = slice(-inputs["completion_ids"].size(1), None)

        def policy(**batch):
            # The reference comes first, because the policy's activations stay in memory until backward.
            ref_logps = inputs.get("old_per_token_logps")
            if self.keeps_reference:
                ref_logps = self.reference_logps(batch)[:, completions]
            outputs = model(**batch)
            logps = outputs.log_probs[:, completions]
            if ref_logps is None:  # TRL keeps none if there is one update per generation
                ref_logps = logps.detach()
            clipped = self.clip(logps - ref_logps, batch["labels"][:, completions])
            # TRL's log-ratio is log π_θ - log π_old. With this π_old it is r_t, and its gradient that of r_t.
            inputs["old_per_token_logps"] = logps - clipped
            inputs["ref_per_token_logps"] = ref_logps
            return outputs

        return super().compute_loss(policy, inputs, return_outputs, num_items_in_batch)
