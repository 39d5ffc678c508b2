"""Humanline DPO: preference optimization against a reference that follows the policy.

Implements equation 6 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207). Two lines turn
DPO into humanline DPO: the clamp in `clip_log_ratio`, and the sync before `optimizer.step()` in `main`.

    python dpo_humanline.py  # one process, the embedded toy, half a minute
    torchrun --nproc-per-node 4 dpo_humanline.py --model ... --dataset ...

To change the method, edit `dpo_loss`; evaluation uses it too. To read other data, edit `encode_row`. Test
another clip on tales (docs/humanline.md#3-one-training-step): the default toy hardly ever reaches a bound.

Main differences from the authors' code (all: docs/dpo.md#differences-from-the-paper):
    - Gradients are clipped by their global norm. In the authors' code each rank uses the norm of its shards.
    - The loss is the mean over the global batch. The authors' code averages the means of micro-batches.

Notation: P pairs are 2P sequences of T tokens; log-probs in nats; a mask is 1 at completion tokens and 0
elsewhere. A utils.Example is a prompt with at most one completion: prompt (a text or messages), prompt_ids,
completion_ids and so on. A group is a tuple of Examples of one prompt: here (chosen, rejected). A row that
has only a prompt gives one Example, without completion_ids.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoModelForCausalLM

import utils
from support import checkpoint, data, run, sampling


# === Args ===
@dataclass
class Args:
    # algorithm
    beta: float = 0.1  # DPO's β (paper: 0.1)
    sft_weight: float = 0.0  # weight of the chosen text's negative log-likelihood in the loss (paper: 0)
    # humanline

    # --no-humanline: no clipping, and syncs only when an online round starts
    humanline: bool = True
    # Optimizer steps between syncs of the reference (paper: 1; docs/first_run.md advises up to 16); 0: syncs
    # only when an online round starts.
    k: int = 1
    log_epsilon_P: float = -1.5  # log ε_P, minimum of a token's log π_θ/π_ref, in nats (Table 1); -inf: none
    log_epsilon_R: float = 1.5  # log ε_R, maximum of a token's log π_θ/π_ref, in nats (Table 1); inf: none
    # optimization
    num_steps: int = 312  # optimizer steps: 10K pairs in batches of 32 (Table 1)
    batch_size: int = 32  # pairs per optimizer step, over all ranks (Table 1)
    micro_batch_tokens: int = 8192  # maximum tokens per micro-batch and rank; 0: unlimited
    lr: float = 5e-6  # AdamW's learning rate after warmup (Table 3; of other variants: PAPER below)
    warmup_fraction: float = 0.1  # fraction of the steps with linear warmup (Table 1)
    weight_decay: float = 1e-2  # AdamW's weight decay (Table 1)
    adam_eps: float = 1e-5  # AdamW's ε (Table 1)
    max_grad_norm: float = 1.0  # maximum global gradient norm (Table 3; of other variants: PAPER below)
    # data
    dataset: str = ""  # pairs, or prompts for --online: a file or a Hub name (formats: docs/data.md)
    dataset_split: str = "train"  # split of a Hub data set, for example train[:10000]
    eval_dataset: str = ""  # held-out data in the same formats; empty: no evaluation
    eval_split: str = "test"  # split of a Hub data set
    max_prompt_length: int = 625  # maximum prompt tokens (625: authors' code); longer prompts are skipped
    # Maximum prompt + completion tokens (1250: authors' code); truncated completions get no EOS token.
    max_length: int = 1250
    # model
    model: str = ""  # folder or Hub name; empty: the toy and its settings
    chat_template: str = ""  # Jinja file; empty: the tokenizer's template
    eos_token: str = ""  # token that ends a turn; empty: the tokenizer's EOS token
    # Dtype of forward and backward; auto: bfloat16 on CUDA, float32 on the CPU. The toy uses float64.
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, more time
    compile: bool = False  # torch.compile the decoder blocks: a minute at first, then faster on a GPU
    shard_size: int = 0  # ranks per model replica (HSDP), for example one node's GPUs; 0: all ranks
    trust_remote_code: bool = False  # run Python code that comes with a model
    # online
    online: bool = False  # train on samples of the policy, drawn in rounds (Algorithm 1)
    # Classifier with one output, a folder or a Hub name; empty: no rewards, or those of SCORE below. --online
    # requires one of the two, and evaluation uses it too.
    reward_model: str = ""
    round_prompts: int = 1024  # prompts per round (Table 1)
    samples_per_prompt: int = 8  # samples per prompt, of which the best and the worst form a pair (Table 1)
    reward_threshold: float = 0.01  # τ: minimum difference of a pair's rewards (Table 1)
    # sampling

    # Maximum sampled tokens (paper: 2048). Training truncates samples to --max-length (authors' code).
    max_new_tokens: int = 2048
    temperature: float = 0.7  # sampling temperature (Table 1); log-probs in training use 1
    top_p: float = 0.95  # nucleus sampling threshold (Table 1)
    engine: Literal["auto", "vllm", "hf"] = "auto"  # hf: transformers; auto: vLLM if installed, else hf
    vllm_memory: float = 0.3  # fraction of a GPU's memory that vLLM may use
    vllm_tensor_parallel: int = 1  # GPUs per vLLM engine
    generation_batch_size: int = 32  # prompts per batch of the hf engine
    # run
    seed: int = 1  # seed of data order and sampling
    output_dir: str = ""  # run folder; empty: runs/<script>__<seed>__<time>
    resume: str = ""  # run folder to resume; most flags given with it override the run's settings
    checkpoint_every: int = 100  # steps between checkpoints; 0: only one, at the end or after a signal
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    eval_every: int = 0  # steps between evaluations; 0: only before and after training
    eval_samples: int = 256  # held-out rows, the first ones, whose prompts get an answer; 0: none
    track: bool = False  # log to Weights & Biases, too (pip install wandb)


# The defaults above are those of offline humanline DPO. With --model, other variants of Table 3 have these
# instead, unless their flags are given. The key is (online, humanline); (False, False) has the defaults.
PAPER = {
    (True, False): dict(lr=2.5e-6, max_grad_norm=0.5),
    (True, True): dict(lr=2.5e-6),
}
FOLDER = Path(__file__).resolve().parent / "toy" / "bouquets"
# Settings of the toy, which replace the defaults above. lr, k and β were chosen on one seed
# (docs/dpo.md#results-on-the-toys). Two limits of the toy: its log-ratios hardly ever reach a humanline
# bound, so it shows syncing alone, and nearly every gradient is clipped to --max-grad-norm.
TOY = dict(
    model=f"{FOLDER}/policy",
    reward_model=f"{FOLDER}/reward_model",
    dataset=f"{FOLDER}/preferences_train.jsonl.gz",
    eval_dataset=f"{FOLDER}/preferences_test.jsonl.gz",
    dtype="float64",  # results agree to 1e-5 for any number of ranks and micro-batches
    num_steps=320,
    max_prompt_length=64,
    max_length=128,  # the positions of its models
    lr=1e-3,
    adam_eps=1e-2,  # so large that weights with tiny, noisy gradients hardly move
    k=16,
    beta=10.0,
    max_new_tokens=64,
    generation_batch_size=256,
)
TOY_ONLINE = dict(dataset=f"{FOLDER}/prompts_train.jsonl.gz")
# A Python function can give the rewards of samples, instead of --reward-model. Replace None by its name
# (docs/first_run.md has an example). It gets a tuple of utils.Example, each with its row of the data set, and
# returns a list of their rewards.
SCORE = None


# === Loss ===
def dpo_loss(log_ratio, mask, beta: float):
    """Computes equation 6, -log σ(r_chosen - r_rejected) with the rewards r = β Σ_t log_ratio.

    Args:
        log_ratio: (2P, T) token log π_θ/π_ref in nats, after humanline clipping. The first P rows are the
            chosen completions, the others the rejected ones.
        mask: (2P, T), 1 at completion tokens.

    Returns:
        The losses of the pairs, (P,).
    """
    chosen, rejected = implicit_rewards(log_ratio, mask, beta)
    return -F.logsigmoid(chosen - rejected)


def chosen_nll(logps, mask):
    """Computes the mean negative log-prob of each chosen completion's tokens, in nats per token, (P,).

    DPO alone may lower the probability of both completions. --sft-weight adds this term, as in iterative
    RPO (arXiv 2404.19733, equation 1). It needs the policy's log-probs, because log-ratios may be clipped.
    """
    return -(logps * mask).sum(-1).chunk(2)[0] / mask.sum(-1).chunk(2)[0]


def implicit_rewards(log_ratio, mask, beta: float):
    """Computes β Σ_t log_ratio of the chosen and of the rejected completions, (P,) each."""
    return (beta * (log_ratio * mask).sum(-1)).chunk(2)


def clip_log_ratio(args, log_ratio):
    """Clamps token log-ratios to the humanline bounds. Beyond a bound, the result has no gradient."""
    if not args.humanline:
        return log_ratio
    return log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping (§5.1, Figure 4)


@torch.no_grad()
def sync_reference(reference, policy):
    """Copies the policy's weights into the reference: π_ref ← π_θ.

    Both models are sharded in the same way, so every rank copies its own shards without communication. If the
    reference is stored in bf16, the copy rounds in the same way as FSDP rounds the policy's weights before
    each forward pass.
    """
    for target, source in zip(reference.parameters(), policy.parameters(), strict=True):
        target.to_local().copy_(source.to_local())


# === Training ===
def main(args: Args):
    rank, world, device = run.setup(args)  # also replaces --dtype auto in args

    # The data is read before the models, so that errors in it appear before minutes of loading.
    tokenizer, eos_ids = data.load_tokenizer(args)
    groups, held_out = load_data(args, tokenizer, eos_ids)
    groups_per_step = args.batch_size
    # for online rounds and for evaluations; its engine starts with the first samples
    sampler = sampling.Sampler(args, tokenizer, eos_ids, device, SCORE)
    policy, reference = load_models(args, device)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=args.lr,
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
        fused=device.type == "cuda",  # the default, foreach, allocates a copy of one of Adam's moments
    )
    warmup_steps = max(1, round(args.warmup_fraction * args.num_steps))

    output_dir = run.open_folder(args, __file__)
    run.print_plan(args, output_dir, policy, tokenizer, groups, groups_per_step)
    # The initial policy is the baseline of all evaluations, also of a resumed run. So it is evaluated, and
    # its weights are copied for eval/kl, before a checkpoint is loaded.
    initial_weights = sampling.copy_weights(reference) if held_out else []  # equal to the policy's until then
    started = time.perf_counter()
    before = evaluate(args, policy, reference, initial_weights, sampler, held_out)
    evaluation_time = time.perf_counter() - started
    # The steps and rounds that are done, and the pool of groups that were sampled but not yet used.
    progress = checkpoint.load_checkpoint(output_dir, policy, reference, optimizer)
    # After SIGINT, SIGTERM or SIGHUP, a step or the sampler ends the run with a checkpoint.
    signals = run.Signals()
    state = args, output_dir, policy, reference, optimizer, progress, signals
    sampler.end_after_signal = partial(checkpoint.end_after_signal, *state)
    shown = ["eval/loss", "rollout/reward_mean", "logps/chosen", "logps/rejected"]
    log = run.Log(args, __file__, output_dir, progress.step, before, evaluation_time, shown)

    for step in range(progress.step, args.num_steps):
        run.set_seed(args.seed, step, rank)  # so that a resumed run draws the same random numbers
        metrics = {"step": step}
        if step > 0 and args.eval_every and step % args.eval_every == 0:
            evaluation = evaluate(args, policy, reference, initial_weights, sampler, held_out, before)
            metrics |= log.write_evaluation(step, evaluation)
        started = time.perf_counter()

        # The global batch, the same on all ranks: pairs of the data set or, online, of the policy's
        # samples.
        if not args.online:
            batch = draw_batch(groups, step, groups_per_step, args.seed)
        else:
            # A round usually gives several batches. The groups that this step does not use wait in the pool.
            while len(progress.pool) < groups_per_step:
                sync_reference(reference, policy)  # Algorithm 1, line 3: with and without humanline
                new_groups, round_metrics = sample_round(args, sampler, policy, groups, progress.round + 1)
                progress.round = round_metrics["rollout/round"]  # only now: a signal may end the run before
                progress.pool += new_groups
                metrics |= round_metrics  # of the newest round
            batch = progress.pool[:groups_per_step]
            del progress.pool[:groups_per_step]

        # The gradient. FSDP gathers the weights on all ranks together, so all ranks get the same number
        # of micro-batches. It also sums the gradients over ranks (`shard_model` sets this).
        lengths = [chosen.length + rejected.length for chosen, rejected in batch]
        micro_batches = utils.make_micro_batches(lengths, world, args.micro_batch_tokens)
        means = utils.Means()
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        for indices in micro_batches[rank::world]:  # lists of indices; number i is for rank i % world
            chosen = [batch[i][0] for i in indices]
            rejected = [batch[i][1] for i in indices]
            # Padded; `token_logps` packs the sequences again, so that padding costs nothing.
            input_ids, mask = utils.pad_batch(chosen + rejected, device)  # (2P, T)

            # [:, t] is log π(token t | all tokens before it), in nats, and 0 where mask is 0.
            with torch.no_grad():  # first, because the policy's activations stay in memory until backward
                ref_logps = utils.token_logps(reference, input_ids, mask)  # (2P, T)
            logps = utils.token_logps(policy, input_ids, mask)  # (2P, T)
            log_ratio = logps - ref_logps  # (2P, T)
            clipped_log_ratio = clip_log_ratio(args, log_ratio)  # (2P, T)
            losses = dpo_loss(clipped_log_ratio, mask, args.beta)  # (P,)
            losses = losses + args.sft_weight * chosen_nll(logps, mask)
            # Summed over ranks, this is the mean over the global batch. `view` only checks the shape, because
            # the loss is often edited.
            loss = losses.view(len(indices)).sum() / args.batch_size
            loss.backward()
            total_loss += loss.detach()

            means.add(pair_metrics(clipped_log_ratio, logps, mask, args.beta))
            means.add(utils.clipping_metrics(log_ratio, args.log_epsilon_P, args.log_epsilon_R), mask)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)

        # Humanline syncs after backward and before the update, at steps 0, k, 2k and so on: the reference
        # takes the weights that produced this gradient, and the update then moves the policy away from
        # them. A sync after the update would make both models equal. With k = 1 every log-ratio would
        # then be 0, and no token would be clipped.
        if args.humanline and args.k > 0 and step % args.k == 0:
            sync_reference(reference, policy)  # humanline syncing (§5.1, Figure 3)

        # The update. The learning rate rises linearly (warmup: Tables 1 and 2) and then stays constant.
        lr = args.lr * min(1.0, (step + 1) / warmup_steps)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        optimizer.step()
        policy.zero_grad()

        dist.all_reduce(total_loss)
        grad_norm = grad_norm.full_tensor()  # global norm before clipping
        metrics |= {"loss": total_loss.item(), "grad_norm": grad_norm.item(), "lr": lr}
        metrics |= means.reduce() | run.perf_metrics(started, sum(lengths))
        utils.check_finite(metrics)
        log.write(metrics)
        progress.step = step + 1
        checkpoint.end_step(*state)

    signals.deadline = 0  # everything is saved, so a signal ends the run at once
    after = evaluate(args, policy, reference, initial_weights, sampler, held_out, before)
    run.export(output_dir / "final", policy, tokenizer, eos_ids)
    log.report(progress.step, after)
    dist.barrier()  # all ranks wait until rank 0 has written everything
    dist.destroy_process_group()


# === Data ===
def load_data(args, tokenizer, eos_ids) -> tuple[list, list]:
    """Reads --dataset and --eval-dataset. Returns the groups of both; [] without --eval-dataset."""
    tools = args, tokenizer, eos_ids
    encode_train = encode_prompt if args.online else encode_row
    groups = data.load_groups(*tools, args.dataset, args.dataset_split, encode_train)
    held_out = []
    if args.eval_dataset:
        held_out = data.load_groups(*tools, args.eval_dataset, args.eval_split, encode_row)
    if not args.online:
        data.check_groups(args.dataset, groups, 2, args.batch_size)
    return groups, held_out


def encode_row(args, tokenizer, eos_ids, row):
    """Returns (chosen, rejected), or (prompt,) of a row without them. Edit it to read other columns.

    Raises data.SkipRow to skip the row, and utils.InputError to end the run because the row is malformed.
    """
    prompt = data.read_prompt(row)
    completions = [] if row.get("chosen") is None else data.read_columns(row, "chosen", "rejected")
    return data.encode(args, tokenizer, eos_ids, prompt, completions, row if SCORE else None)


def encode_prompt(args, tokenizer, eos_ids, row):
    """Returns (prompt,), whatever completions the row has."""
    prompt = data.read_prompt(row)
    return data.encode(args, tokenizer, eos_ids, prompt, row=row if SCORE else None)


def draw_batch(groups, number: int, size: int, seed: int):
    """Returns batch `number` (a step or a round) of an endless sequence of shuffled epochs.

    The order depends only on the seed and the epoch, so a run that is resumed with the same size needs no
    state of the data loader. The last, incomplete batch of an epoch is dropped.
    """
    epoch, batch = divmod(number, len(groups) // size)
    order = np.random.default_rng((seed, epoch)).permutation(len(groups))
    return [groups[i] for i in order[batch * size : (batch + 1) * size]]


# === Models ===
def load_models(args, device):
    """Loads the policy (stored in fp32) and the reference (stored in bf16 if --dtype is, else in fp32).

    Both compute in --dtype. A reference in bf16 loses nothing, because in bf16 the policy computes with
    rounded weights, too.
    """

    def load(dtype):
        model = run.load_pretrained(args, AutoModelForCausalLM, args.model, dtype)
        # Both models stay in eval mode, because dropout would make them differ at step 0.
        return shard_model(args, model, device).eval()

    # The policy is loaded in the dtype of the files, so that the weights stay memory-mapped and all ranks of
    # a machine share them. It is sharded, and then each rank casts its own shards to fp32, which is exact.
    policy = load("auto").to(torch.float32)
    reference = load(run.storage_dtype(args)).requires_grad_(False)
    # Buffers (RoPE's frequencies, Gemma's embed_scale) must be equal in value and dtype, otherwise log-ratios
    # would not be 0 at step 0. The cast changed the policy's, so the policy gets the reference's.
    for name, buffer in policy.named_buffers():
        buffer.data = reference.get_buffer(name).clone()
    # Of files with several dtypes, "auto" has rounded all weights to the first one's dtype.
    for weight, exact in zip(policy.parameters(), reference.parameters()):
        if exact.dtype == torch.float32:
            weight.detach().copy_(exact)
    for model in (policy, reference):
        # Sets the fastest attention that keeps apart the sequences which `token_logps` packs into one row. A
        # short trial compares it with a plain forward pass.
        attention = utils.choose_attention(model, run.longest_sequence(args), getattr(torch, args.dtype))
        for block in run.decoder_blocks(model):
            if args.compile:
                block.forward = torch.compile(block.forward, dynamic=True)
            if args.gradient_checkpointing:
                # Recomputes activations in backward, where FSDP's hooks gather the weights for it.
                # transformers' own checkpointing needs train mode, which would start dropout.
                block.forward = partial(recompute, block.forward, use_reentrant=False)
    run.print_main(f"attention: {attention}")  # of both models
    return policy, reference


def shard_model(args, model, device):
    """Shards a model in place with FSDP2, which also moves it to the device.

    The units are the decoder blocks, an untied embedding and head, and the rest of the model.
    With --shard-size N (HSDP) each group of N ranks holds one replica of the model, sharded over the group.
    """
    world = dist.get_world_size()
    shard_size = args.shard_size or world
    shape = (world // shard_size, shard_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    if shard_size == world:  # one replica: plain FSDP
        mesh = mesh["shard"]
    units = run.decoder_blocks(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # a tied weight belongs to two modules, so the root must hold it
        units += [embedding, head]
    compute_dtype = getattr(torch, args.dtype)
    # Gradients are summed over ranks in fp32 or wider, because bf16 sums over many ranks lose small terms.
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype)
    # Children before parents, as FSDP2 requires. Of nested units (Mamba), `units` has the outer one first.
    for module in [*reversed(units), model]:
        # By default FSDP2 leaves the root gathered after forward, for use in backward. The reference never
        # runs backward, so its next forward would still use the weights from before a sync.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        # By default FSDP2 also averages gradients over ranks. The loss is already divided by the global
        # batch, so they are summed.
        if world > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the only kind of sum that gloo has
    return model


# === Rounds and evaluation ===
def sample_round(args, sampler, policy, groups: list[tuple], first: int):
    """Samples the policy for the next prompts and makes pairs of the samples (Algorithm 1).

    Rewards may be rare, so a round without a pair is followed by the next one, up to ten times.

    Args:
        first: the number of the first round, counted from 1.

    Returns:
        The pairs of those prompts whose rewards differ enough, and metrics of their round.
    """
    size = min(args.round_prompts, len(groups))
    for number in range(first, first + 10):
        prompts = [group[0] for group in draw_batch(groups, number - 1, size, args.seed)]
        samples, metrics = sampler.sample(policy, prompts, args.samples_per_prompt, (args.seed, number))
        pairs = []
        for prompt_samples in samples:
            pair = sampling.best_and_worst(prompt_samples, args.reward_threshold)
            if pair:
                # The rewards are those of the complete samples. Training truncates the samples.
                pairs.append(tuple(sample.truncate(args.max_length) for sample in pair))
        if pairs:
            metrics["rollout/round"] = number
            metrics["rollout/filtered"] = 1 - len(pairs) / len(prompts)
            return pairs, metrics
    raise utils.InputError(
        f"rounds {first} to {number}: no prompt's rewards differ enough: "
        "raise --temperature or lower --reward-threshold"
    )


def evaluate(
    args, policy, reference, initial_weights, sampler, held_out: list[tuple], initial=None
) -> utils.Evaluation:
    """Evaluates the policy on held-out pairs and on samples for the prompts of the first rows.

    The pairs give the loss without humanline clipping, where the reference is the initial policy. The samples
    give their length, whether they finished, their KL from the initial policy and, if they have rewards, the
    reward and the win rate over the initial policy's samples.

    Args:
        initial_weights: the initial policy's. While eval/kl is computed, `reference` holds them.
        initial: the evaluation of the initial policy, or None when this is that evaluation.
    """
    values = {}  # {name: one value for each pair or sample}
    logps = None
    pairs = [group for group in held_out if len(group) == 2]
    if pairs:
        examples = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        logps, mask = utils.completion_logps(policy, examples, args.micro_batch_tokens)  # (2P, T) each
        log_ratio = logps - (initial.logps if initial else logps)  # 0 for the initial policy
        chosen, rejected = implicit_rewards(log_ratio, mask, args.beta)  # (P,) each
        values["eval/loss"] = dpo_loss(log_ratio, mask, args.beta) + args.sft_weight * chosen_nll(logps, mask)
        values["eval/accuracy"] = utils.above(chosen, rejected)  # 1, 0.5 if equal, or 0
        values["eval/margin"] = chosen - rejected  # β · nats
    samples, answers, sample_values = sampler.evaluate(policy, reference, initial_weights, held_out, initial)
    # in this order in the table at the end
    return utils.Evaluation(sample_values | values, samples, answers, logps)


# === Metrics ===
def pair_metrics(clipped_log_ratio, logps, mask, beta: float):
    """Returns both terms of the loss, rewards and log-probs of each pair, (P,) each."""
    chosen, rejected = implicit_rewards(clipped_log_ratio, mask, beta)
    chosen_logps, rejected_logps = logps.sum(-1).chunk(2)
    return {
        "loss/dpo": dpo_loss(clipped_log_ratio, mask, beta),
        "loss/chosen_nll": chosen_nll(logps, mask),
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": utils.above(chosen, rejected),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "logps/chosen": chosen_logps,
        "logps/rejected": rejected_logps,
    }


if __name__ == "__main__":
    main(run.parse_args(Args, __file__, __doc__, toy=TOY, toy_online=TOY_ONLINE, paper=PAPER))
