"""Humanline for TRL's DPO, KTO and GRPO trainers, with a whole reference model or with adapters (PEFT).

Implements "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207) as two additions to TRL:

    clipping   r_t = min(max(log π_θ(y_t)/π_ref(y_t), log ε_P), log ε_R) for each token, before the loss
    syncing    π_ref ← π_θ at the updates 0, k, 2k, ...: after backward, before the optimizer's step

Copy this file beside your script. The trainers take the arguments of TRL's trainers, and three more:

    trainer = HumanlineDPOTrainer(model, args=DPOConfig(...), train_dataset=..., processing_class=..., k=1)
    trainer.train()

For a new adapter, the model is `get_peft_model(base, LoraConfig(...))`. For an adapter that was trained
before, it is `PeftModel.from_pretrained(base, folder, is_trainable=True)`. The reference is then a second
adapter, `ref`, and a sync copies the adapter `default` to it.

The trainers override `compute_loss`, as Trainer's documentation allows. They call TRL's own loss with a
function in place of the model. This function runs the policy and the reference, and clips. The losses and
metrics are therefore TRL's own. In DPO and KTO `rewards/*` are β times the sums of clipped log-ratios. The
file relies on these private parts of TRL, so it refuses every version of TRL but one:

    all         a loss calls `model(..., labels=..., fused_lm_head=True)` and reads its `log_probs`
    DPO, KTO    with `precompute_ref_logps`, a loss reads the reference's sums from the batch
    GRPO        `_generate_and_score_completions` draws samples. The loss runs the policy before it reads
                `old_per_token_logps` and `ref_per_token_logps` from the batch. `beta` makes a reference.

FSDP, DeepSpeed, other losses and the settings in `check_settings` stop with an error. vLLM, images, tools and
quantized models have not been tried.

    - `eval_loss` is relative to the reference of that moment, so it does not measure progress.
    - bf16 rounds log-ratios. At small learning rates, set bf16=False.
    - A checkpoint also holds the reference: in the folder `ref` or in the file `reference.pt`.
    - Without `ref_model`, the reference starts as the policy that the trainer gets, not as the one on disk.
"""

import warnings
from contextlib import contextmanager
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


class SyncReference(TrainerCallback):
    """Syncs the reference before updates, and saves a whole reference with each checkpoint."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # Trainer calls this once per update, after backward and the clipping of the gradient's norm.
        # `global_step` counts the updates so far. A sync after the update would make both models equal.
        if self.trainer.k > 0 and state.global_step % self.trainer.k == 0:
            self.trainer.sync_reference()  # humanline syncing

    def on_save(self, args, state, control, **kwargs):
        reference = self.trainer.ref_model
        if reference is not None and args.should_save:  # PEFT saves the adapter `ref` itself
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save(reference.state_dict(), folder / "reference.pt")


class Humanline:
    """Adds a reference, its sync and the clamp to one of TRL's trainers.

    Args:
        k: updates between syncs; 0: no syncs (but GRPO always syncs before it generates).
        log_epsilon_P, log_epsilon_R: bounds of a token's log π_θ/π_ref, in nats; -inf and inf: no clipping.
    """

    # {setting: the values that it may have}
    supported = {
        "sync_ref_model": [False],  # copies after the update, where both models would be equal
        "precompute_ref_log_probs": [False],  # the log-probs of a reference that changes later
        "neftune_noise_alpha": [None],  # log-ratios would measure the noise
    }

    def __init__(self, model, *rest, k=1, log_epsilon_P=-1.5, log_epsilon_R=1.5, **kwargs):
        require(k >= 0 and k == int(k), f"k={k} must be a number of updates, 0 or more")
        require(
            log_epsilon_P <= 0 <= log_epsilon_R,
            f"the bounds {log_epsilon_P} and {log_epsilon_R} must be logarithms, below and above 0",
        )
        require(kwargs.get("peft_config") is None, "pass get_peft_model(base, config) and no peft_config")
        if is_peft_model(model):
            check_adapter(model.peft_config)
        super().__init__(model, *rest, **kwargs)
        self.k, self.bounds = k, (log_epsilon_P, log_epsilon_R)
        self.check_settings()
        if kwargs.get("ref_model", *rest[:1]) is None:
            # TRL reads a whole reference from disk, which lacks what was changed in memory. Its copy of an
            # adapter lacks embeddings, and has another dtype with QLoRA.
            for reference, policy in self.weight_pairs():
                reference.data = policy.data.clone()
        self.check_weights()
        self.add_callback(SyncReference(self))

    def check_settings(self):
        """Stops settings with which training would be wrong without a word."""
        args = self.args
        for name, values in self.supported.items():
            value = getattr(args, name, values[0])
            choices = " or ".join(map(repr, values))
            require(value in values, f"{name} must be {choices}, and is {value!r}")
        require(
            not self.is_deepspeed_enabled, "DeepSpeed updates weights in backward, before a sync: use DDP"
        )
        require(not self.is_fsdp_enabled, "FSDP has not been tried: use DDP, or the repository's scripts")
        best = args.metric_for_best_model if args.load_best_model_at_end else None
        require(
            best not in ("loss", "eval_loss"),
            "load_best_model_at_end needs another metric_for_best_model than eval_loss, which is relative to"
            " a reference that changes",
        )
        require(
            self.ref_model is None or not is_peft_model(self.model),
            "pass no ref_model with adapters, because the reference is the adapter `ref`",
        )

    def check_weights(self):
        """Stops models that would train wrongly without a word."""
        for module in self.model.modules():
            name = "p" if isinstance(module, torch.nn.Dropout) else "attention_dropout"
            rate = getattr(module, name, 0)
            off = not isinstance(rate, float) or rate == 0
            require(off, "log-ratios would measure dropout: set every dropout of the model to 0")
        synced = {id(policy) for _, policy in self.weight_pairs()}
        trained = {name: w for name, w in self.model.named_parameters() if w.requires_grad}
        require(trained, "no weight trains: call PeftModel.from_pretrained with is_trainable=True")
        for name, weight in trained.items():
            require(id(weight) in synced, f"no sync copies {name}: freeze it, or add it to modules_to_save")
        for reference, policy in self.weight_pairs():
            same = reference.dtype == policy.dtype
            require(same, f"load both models in one dtype, not in {policy.dtype} and {reference.dtype}")

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

    @contextmanager
    def reference(self):
        """Yields a model that computes with the reference's weights."""
        if self.ref_model is not None:
            yield self.ref_model
        else:
            with trl_utils.use_adapter(self.accelerator.unwrap_model(self.model), "ref"):
                yield self.model

    def run_both(self, model, batch):
        """Runs the policy and the reference on a batch, and clips.

        Returns:
            The policy's outputs, the reference's log-probs and the clipped log-ratios, (B, T - 1) each. Both
            are 0 outside completions. Beyond a bound, a clipped log-ratio has no gradient.
        """
        # The reference comes first, because the policy's activations stay in memory until backward.
        without_router = {key: value for key, value in batch.items() if key != "output_router_logits"}
        with torch.no_grad(), self.reference() as reference:
            ref_logps = reference(**without_router).log_probs
        outputs = model(**batch)
        log_ratio = outputs.log_probs - ref_logps
        clipped = log_ratio.clamp(*self.bounds)  # humanline clipping
        if torch.is_grad_enabled():  # not in evaluation, nor for KTO's mismatched pairs
            self.log_clipping(log_ratio.detach(), batch["labels"][:, 1:] != -100)
        return outputs, ref_logps, clipped

    def log_clipping(self, log_ratio, mask):
        """Logs means over the completion tokens of a micro-batch, of all processes."""
        low, high = self.bounds
        values = {
            "log_ratio_abs_mean": log_ratio.abs(),
            "clipped_low": log_ratio < low,
            "clipped_high": log_ratio > high,
        }
        sums = torch.stack([mask.sum(), *(value.sum() for value in values.values())])
        tokens, *sums = self.accelerator.reduce(sums, "sum").tolist()
        for name, total in zip(values, sums, strict=True):
            self._metrics["train"][f"humanline/{name}"].append(total / tokens)

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Trains as TRL does. A resumed run reads the reference of its checkpoint."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder:
            saved = Path(folder) / ("ref" if self.ref_model is None else "reference.pt")
            require(saved.exists(), f"{saved} is missing, so the resumed run would have another reference")
            if self.ref_model is not None:
                self.ref_model.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
        return super().train(resume_from_checkpoint, *args, **kwargs)


def check_adapter(configs):
    """Stops adapters of which TRL cannot make a reference; configs: {name of an adapter: its config}."""
    require("default" in configs, f"name the adapter 'default', and not {list(configs)[0]!r}")
    init = getattr(configs["default"], "init_lora_weights", True)
    # TRL makes `ref` with this setting. PEFT would then take a second part out of the base's weights.
    require(
        init in (True, False, "gaussian"),
        f"init_lora_weights={init!r} can change the base: set model.peft_config['default']"
        ".init_lora_weights = True before the trainer is made, and restore it afterwards",
    )


class HumanlineOnSums(Humanline):
    """Adds humanline to DPO and KTO.

    TRL's losses use Σ_t log π_θ - Σ_t log π_ref of a sequence. Here the first sum is Σ_t r_t, and the second
    sum is 0. The metrics `logps/*` would then be Σ_t r_t, so they are not logged.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def clipped_log_ratios(**batch):
            if "labels" not in batch:  # TRL's second call, for return_outputs
                return model(**batch)
            outputs, _, outputs.log_probs = self.run_both(model, batch)
            return outputs

        zeros = torch.zeros(len(inputs["input_ids"]) // self.sides, device=inputs["input_ids"].device)
        inputs = {**inputs, **dict.fromkeys(self.reference_sums, zeros)}
        self.precompute_ref_logps = True  # TRL then reads these sums instead of running the reference
        try:
            result = super().compute_loss(clipped_log_ratios, inputs, return_outputs, num_items_in_batch)
        finally:
            self.precompute_ref_logps = False
        for name in ("logps/chosen", "logps/rejected"):
            self._metrics["train" if self.model.training else "eval"].pop(name, None)
        return result


class HumanlineDPOTrainer(HumanlineOnSums, trl.DPOTrainer):
    """Minimizes -log σ(β (Σ_t r_t(chosen) - Σ_t r_t(rejected))), the mean over pairs."""

    supported = Humanline.supported | {"loss_type": [["sigmoid"]], "use_weighting": [False]}
    reference_sums = ("ref_chosen_logps", "ref_rejected_logps")
    sides = 2  # a batch is [chosen, rejected]


class HumanlineKTOTrainer(HumanlineOnSums, trl.KTOTrainer):
    """Minimizes λ (1 - σ(±β (Σ_t r_t - z_0))), the mean over sequences.

    z_0 is the mean of Σ_t r_t over mismatched pairs, or 0 if this mean is negative. TRL takes the mean over
    one micro-batch of all processes. The paper's λ_D is desirable_weight=1.1.
    """

    supported = Humanline.supported | {"loss_type": ["kto"]}
    reference_sums = ("ref_logps", "ref_KL_logps")
    sides = 1


class HumanlineGRPOTrainer(Humanline, trl.GRPOTrainer):
    """Minimizes -min(A ρ_t, A clamp(ρ_t, 1-ε, 1+ε)) + β (exp(-s_t) + s_t - 1), the mean over tokens.

    Here ρ_t is exp(r_t), and s_t is the log-ratio before clipping. The reference takes the place of π_old: it
    is the policy at sampling (Algorithm 1, line 3) or at the last sync, whichever came later. The KL penalty
    uses the same reference (C.1.4, C.2). Samples, rewards, advantages and means are TRL's:

    - TRL makes one update per generation by default. Both models are then equal in every loss, and humanline
      has no effect. Set steps_per_generation above gradient_accumulation_steps, or num_iterations above 1.
    - With loss_type="dapo", the default, the mean is that of C.1.4; "grpo" is equation 1.
    - TRL divides advantages by the sample's std + 1e-4, and logits by the temperature, in training too.
    - Resume from a step at which TRL generates. From another step, TRL generates anew.
    """

    supported = Humanline.supported | {
        "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo"],
        "importance_sampling_level": ["token"],
        "off_policy_mask_threshold": [None],
    }

    def __init__(self, model, reward_funcs=None, args=None, **kwargs):
        require(args is not None, "pass a GRPOConfig as args")
        beta = args.beta
        require(beta == 0 or not args.use_bias_correction_kl, "set use_bias_correction_kl=False")
        require(
            not (args.use_vllm and args.vllm_importance_sampling_correction),
            "set vllm_importance_sampling_correction=False, because humanline has no such weights",
        )
        args.beta = beta or 1.0  # TRL makes a reference only if beta is not 0
        try:
            super().__init__(model, reward_funcs=reward_funcs, args=args, **kwargs)
        finally:
            args.beta = beta
        self.beta = beta
        if args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0:
            warnings.warn(
                "humanline has no effect with one update per generation: set steps_per_generation above"
                " gradient_accumulation_steps, or num_iterations above 1",
                stacklevel=2,
            )

    def _generate_and_score_completions(self, inputs):
        if self.model.training:
            self.sync_reference()  # Algorithm 1, line 3: the reference is the policy that samples
        return super()._generate_and_score_completions(inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)  # a copy, because TRL uses the same samples in several steps

        def policy(**batch):
            outputs, ref_logps, clipped = self.run_both(model, batch)
            completions = slice(-inputs["completion_ids"].size(1), None)
            # TRL's log-ratio is log π_θ - log π_old. With this π_old it is r_t, and its gradient that of r_t.
            inputs["old_per_token_logps"] = (outputs.log_probs - clipped)[:, completions]
            inputs["ref_per_token_logps"] = ref_logps[:, completions]
            return outputs

        return super().compute_loss(policy, inputs, return_outputs, num_items_in_batch)
