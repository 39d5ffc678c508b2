"""Humanline GRPO on problems with known answers: samples every S steps, a reference synced every k steps.

Implements §5.2.2 and equation 1 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207). Two
lines turn GRPO into humanline GRPO: the clamp in `clip_log_ratio`, and the sync before `optimizer.step()` in
`main`, which replaces the sync at the start of every round.

    python grpo_math_humanline.py  # one process, the embedded toy, a minute
    torchrun --nproc-per-node 4 grpo_math_humanline.py --model ... --dataset ...

To change the method, edit `grpo_loss` or `group_advantages`. To change the rewards, edit the section Grading.
To read other data, edit `encode_row`.

Differences from equation 1:
    - The loss is the mean over all completion tokens of the global batch (C.1.4, for instruction following).
      Equation 1 first takes the mean of each completion.
    - The KL penalty uses the same reference as the ratio (C.1.4). Equation 1 uses a fixed policy.
    - Advantages are divided by std + 1e-4, as in TRL.
    - Log-probs in training use the sampling temperature, as in TRL, because the samples are the policy's own.
      The other scripts use 1, because their data may come from other models.
Differences from the paper and the authors' code (all: docs/grpo_math.md):
    - The reference is synced before the updates of steps 0, k, 2k and so on.
    - Answers that cannot be graded within limits of time and memory count as wrong. Problems whose gold
      answer cannot be graded are dropped.

Notation: B sequences of T tokens; log-probs in nats; a mask is 1 at completion tokens and 0 elsewhere. An
Example is a prompt with at most one completion. A group is a tuple of Examples of one prompt: here the G
samples of a problem or, in a data set, the problem alone.
"""

import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

import run
import utils

# === Args ===
SYSTEM_PROMPT = """Reason step by step before you answer. Write in this format, each tag on a line of its own:
<think>\nyour reasoning\n</think>\n<answer>\nthe final answer\n</answer>"""


@dataclass
class Args:
    # algorithm
    beta: float = 1e-4  # weight of the KL penalty (authors' code)
    epsilon: float = 0.2  # the ratio is clipped to 1 ± ε (TRL's default)
    group_size: int = 8  # samples per problem (G) (Table 2)
    sample_every: int = 64  # optimizer steps between rounds of sampling (S); 1: online (Figure 7: 1 and 64)
    # humanline
    # --no-humanline: no humanline clipping (ε still clips), and syncs only when a round starts.
    humanline: bool = True
    # Optimizer steps between syncs of the reference (Table 2: 12 to 24; 1 collapses); 0: syncs only when a
    # round starts.
    k: int = 16
    log_epsilon_P: float = -1.5  # lower bound of a token's log π_θ/π_ref, in nats (Table 2); -inf: none
    log_epsilon_R: float = 1.5  # upper bound of a token's log π_θ/π_ref, in nats (Table 2); inf: none
    # optimization
    num_steps: int = 1600  # optimizer steps (paper: 1600)
    prompts_per_step: int = 32  # problems per optimizer step, over all ranks (paper: 32)
    micro_batch_tokens: int = 8192  # maximum tokens per micro-batch and rank; 0: unlimited
    lr: float = 1e-6  # AdamW's learning rate after warmup (paper: 1e-6)
    warmup_fraction: float = 0.1  # fraction of the steps with linear warmup (Table 2)
    weight_decay: float = 0.0  # AdamW's weight decay (Table 2)
    adam_eps: float = 1e-8  # AdamW's ε (Table 2)
    max_grad_norm: float = 1.0  # maximum global gradient norm (Table 2)
    # data
    dataset: str = ""  # problems with answers: a file or a Hub name (formats: docs/grpo_math.md)
    dataset_split: str = "train"  # split of a Hub data set, for example train[:10000]
    eval_dataset: str = ""  # held-out data in the same formats; empty: no evaluation
    eval_split: str = "test"  # split of a Hub data set
    # First message of every prompt; empty: none. The words are ours; paper/math_system_prompt.txt has the
    # authors'.
    system_prompt: str = SYSTEM_PROMPT
    max_prompt_length: int = 512  # maximum prompt tokens; longer prompts are skipped
    max_length: int = 2560  # maximum prompt + completion tokens; truncated completions get no EOS token
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
    # sampling
    max_new_tokens: int = 2048  # maximum sampled tokens (paper: 2048); training truncates to --max-length
    temperature: float = 0.7  # temperature of sampling, and of the log-probs in training (paper: 0.7)
    top_p: float = 1.0  # nucleus sampling threshold (Table 2)
    engine: Literal["auto", "vllm", "hf"] = "auto"  # hf: transformers; auto: vLLM if installed, else hf
    vllm_memory: float = 0.3  # fraction of a GPU's memory that vLLM may use
    vllm_tensor_parallel: int = 1  # GPUs per vLLM engine
    generation_batch_size: int = 32  # prompts per batch of the hf engine
    # run
    seed: int = 1  # seed of data order and sampling
    output_dir: str = ""  # run folder; empty: runs/<script>__<seed>__<time>
    resume: str = ""  # run folder to resume; flags given with it override the run's settings
    checkpoint_every: int = 100  # steps between checkpoints, with one at the end; 0: only after a signal
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    eval_every: int = 0  # steps between evaluations; 0: only before and after training
    eval_samples: int = 256  # held-out problems to sample completions for; 0: none
    eval_samples_per_problem: int = 4  # samples per held-out problem, for pass@1


PAPER = {}  # Table 2 has one row for all variants, the defaults above; S and k are flags
FOLDER = Path(__file__).resolve().parent / "toy" / "shell_game"
# Settings of the toy, which replace the defaults above.
TOY = dict(
    model=f"{FOLDER}/policy",
    dataset=f"{FOLDER}/problems_train.jsonl.gz",
    eval_dataset=f"{FOLDER}/problems_test.jsonl.gz",
    dtype="float64",  # results agree to 1e-5 for any number of ranks and micro-batches
    system_prompt="",
    num_steps=256,
    prompts_per_step=16,
    lr=1e-4,
    temperature=1.0,
    max_new_tokens=32,
    generation_batch_size=256,
)


# === Loss ===
def grpo_loss(clipped_log_ratio, log_ratio, advantages, beta: float, epsilon: float):
    """Computes the negative of equation 1 for every token: β k3 - min(A ratio, A clamp(ratio, 1-ε, 1+ε)).

    Tokens of the prompt and padding get losses too. The caller multiplies them by the mask.

    Args:
        clipped_log_ratio: (B, T) token log π_θ/π_ref in nats, after humanline clipping. It gives the ratio.
        log_ratio: (B, T), without clipping (C.2). It gives k3 = π_ref/π_θ + log π_θ/π_ref - 1, an estimate of
            the KL divergence.
        advantages: (B,), A of each sequence.

    Returns:
        The losses of the tokens, the ratios, k3, and whether the clip to 1 ± ε stops the gradient of the
        token's min(...), (B, T) each. All but the losses are detached.
    """
    A = advantages.unsqueeze(-1)  # (B, 1)
    ratio = clipped_log_ratio.exp()  # (B, T)
    k3 = torch.expm1(-log_ratio) + log_ratio  # (B, T); exp(-x) - 1 would lose its digits near 0
    losses = beta * k3 - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, 1 + epsilon))
    removed_above = (A > 0) & (ratio > 1 + epsilon)
    removed_below = (A < 0) & (ratio < 1 - epsilon)
    return losses, ratio.detach(), k3.detach(), removed_above | removed_below


def group_advantages(rewards):
    """Computes TRL's advantages within each group, (R - mean) / (std + 1e-4), where the std divides by G - 1.

    For Dr. GRPO's advantages, which are not divided by the std, return `centered`.

    rewards: (groups, G).
    """
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-4)


def clip_log_ratio(args, log_ratio):
    """Clamps token log-ratios to the humanline bounds. Beyond a bound, the result has no gradient."""
    if not args.humanline:
        return log_ratio
    return log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping (§5.1, Figure 4)


@torch.no_grad()
def sync_reference(reference, policy):
    """Copies the policy's weights into the reference: π_ref ← π_θ.

    Both models are sharded in the same way, so every rank copies its own shards without communication. A
    reference that is stored in bf16 gets rounded weights, which are those that the policy computes with.
    """
    for target, source in zip(reference.parameters(), policy.parameters(), strict=True):
        target.to_local().copy_(source.to_local())


# === Training ===
def main(args: Args):
    # This also replaces --dtype auto in args.
    rank, world, device = run.setup(args, args.prompts_per_step * args.group_size)

    # The data is read before the models, so that errors in it appear before minutes of loading.
    tokenizer, eos_ids = utils.load_tokenizer(args)
    grader = start_grader()
    problems, held_out = load_data(args, tokenizer, eos_ids, grader)
    data_hash = run.hash_data(problems, held_out)  # ends the run if ranks have read different data
    longest = utils.longest_sequence(args, problems + held_out)  # tokens, in training and sampling
    policy, reference = load_models(args, device, longest)
    sampler = utils.Sampler(args, tokenizer, eos_ids, device, longest)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=args.lr,
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
        fused=device.type == "cuda",  # the default, foreach, allocates a copy of one of Adam's moments
    )
    warmup_steps = max(1, round(args.warmup_fraction * args.num_steps))

    output_dir = run.open_folder(args, __file__)
    run.print_plan(args, output_dir, policy, tokenizer, problems, args.prompts_per_step)
    # A resumed run evaluates the initial policy again: it is the baseline of the report.
    before = evaluate(args, policy, sampler, grader, held_out)
    # A new run has no checkpoint and starts at step 0.
    progress = run.load_checkpoint(output_dir, policy, reference, optimizer, data_hash)
    # after the load, so that a failed resume leaves args.json as it was
    run.save_args(args, output_dir, __file__)
    log = run.Log(args, output_dir, progress.step, before)
    signals = run.Signals()  # in the loop, SIGINT and SIGTERM end the run after the current step

    for step in range(progress.step, args.num_steps):
        metrics = {"step": step}
        if step > 0 and args.eval_every and step % args.eval_every == 0:
            metrics |= log.evaluation(step, evaluate(args, policy, sampler, grader, held_out))
        started = time.perf_counter()

        # The global batch, the same on all ranks: groups of the policy's own samples. A round gives the
        # batches of S steps, which wait in the pool.
        if not progress.pool:
            # Without humanline, or with k = 0, the reference is the policy that samples the round, like the
            # old policy of PPO. Otherwise syncs follow k alone.
            if not args.humanline or args.k == 0:
                sync_reference(reference, policy)
            new_groups, round_metrics = sample_round(args, sampler, grader, policy, problems, step)
            progress.pool += new_groups
            metrics |= round_metrics
        batch = progress.pool[: args.prompts_per_step]
        progress.pool = progress.pool[args.prompts_per_step :]
        examples = [example for group in batch for example in group]

        # The advantages
        rewards = torch.tensor([example.reward for example in examples], dtype=torch.float64, device=device)
        rewards = rewards.view(args.prompts_per_step, args.group_size)  # (groups, G)
        advantages = group_advantages(rewards)  # (groups, G)
        run.check_shape("group_advantages", advantages, rewards.shape)
        metrics |= sample_metrics(examples, rewards)

        # The gradient. FSDP gathers the weights on all ranks together, so all ranks get the same number of
        # micro-batches. It also sums the gradients over ranks.
        lengths = [example.length for example in examples]
        micro_batches = utils.make_micro_batches(lengths, world, args.micro_batch_tokens)
        completion_tokens = sum(len(example.completion_ids) for example in examples)
        means = run.Means()
        for indices in micro_batches[rank::world]:
            input_ids, mask = utils.pad_batch([examples[i] for i in indices], device)  # (B, T)

            with torch.no_grad():  # first, because the policy's activations stay in memory until backward
                ref_logps = utils.token_logps(reference, input_ids, mask, args.temperature)  # (B, T)
            logps = utils.token_logps(policy, input_ids, mask, args.temperature)  # (B, T)
            log_ratio = logps - ref_logps  # (B, T)
            clipped_log_ratio = clip_log_ratio(args, log_ratio)  # (B, T)
            A = advantages.flatten()[indices].to(logps.dtype)  # (B,)
            losses, ratio, k3, removed = grpo_loss(  # (B, T) each
                clipped_log_ratio, log_ratio, A, args.beta, args.epsilon
            )
            run.check_shape("grpo_loss", losses, mask.shape)
            # summed over ranks: the mean over all completion tokens of the global batch
            ((losses * mask).sum() / completion_tokens).backward()

            means.add(grpo_metrics(losses, ratio, k3, removed), mask)
            means.add(clipping_metrics(args, log_ratio), mask)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        metrics["grad_norm"] = grad_norm.full_tensor().item()  # global norm before clipping
        metrics |= means.reduce()
        run.check_finite(metrics)

        # Humanline syncs after backward and before the update, at steps 0, k, 2k and so on: the reference
        # takes the weights that produced this gradient, and the update then moves the policy away from them.
        # A sync after the update would make both models equal. With k = 1 every log-ratio would then be 0,
        # and no token would be clipped.
        if args.humanline and args.k > 0 and step % args.k == 0:
            sync_reference(reference, policy)  # humanline syncing (§5.1, Figure 3)

        # The update. The learning rate rises linearly (warmup: Table 2) and then stays constant.
        metrics["lr"] = args.lr * min(1.0, (step + 1) / warmup_steps)
        for param_group in optimizer.param_groups:
            param_group["lr"] = metrics["lr"]
        optimizer.step()
        optimizer.zero_grad()

        progress.step = step + 1
        log.write(metrics | run.perf_metrics(started, sum(lengths)))
        signal_number = signals.received_by_any_rank()
        if signal_number or run.checkpoint_is_due(args, progress.step):
            run.save_checkpoint(args, output_dir, policy, reference, optimizer, progress)
        if signal_number:
            run.exit_after_signal(signal_number, output_dir, progress.step)

    signals.release()
    after = evaluate(args, policy, sampler, grader, held_out)
    run.export(output_dir / "final", policy, tokenizer, eos_ids)
    log.report(before, after)
    grader.stop()
    grader.join()
    dist.barrier()  # all ranks wait until rank 0 has written everything
    dist.destroy_process_group()


# === Data ===
def load_data(args, tokenizer, eos_ids, grader) -> tuple[list, list]:
    """Reads --dataset and --eval-dataset. Returns the problems of both whose answers can be graded."""
    problems = load_groups(args, tokenizer, eos_ids, args.dataset, args.dataset_split)
    held_out = []
    if args.eval_dataset:
        held_out = load_groups(args, tokenizer, eos_ids, args.eval_dataset, args.eval_split)
    run.hash_data(problems, held_out)  # before the ranks share the grading, they must have the same data
    problems = keep_gradable(grader, args.dataset, problems, args.prompts_per_step)
    if held_out:
        held_out = keep_gradable(grader, args.eval_dataset, held_out, 1)
    return problems, held_out


def load_groups(args, tokenizer, eos_ids, name: str, split: str) -> list[tuple]:
    """Reads and tokenizes a data set. Returns the groups of its rows, and prints a summary of them."""
    groups = []
    skipped = []  # [(line number, reason), ...]
    for number, row in run.read_rows(name, split):
        try:
            groups.append(encode_row(args, tokenizer, eos_ids, row))
        except utils.SkipRow as reason:
            skipped.append((number, reason))
        except Exception as error:  # an InputError, or a mistake in `encode_row`
            error.add_note(f"{name}, line {number}")
            raise
    summary = f"{name}: {utils.summarize_groups(eos_ids, groups, skipped)}"
    if not groups:
        raise run.InputError(summary)
    run.print_main(summary)
    return groups


def encode_row(args, tokenizer, eos_ids, row):
    """Returns a problem with its gold answer, as a group of one Example. Edit it to read other columns.

    Raises utils.SkipRow to skip the row, and run.InputError to end the run because the row is malformed.
    """
    utils.check_row(row)
    prompt = row.get("problem")
    if prompt is None:
        prompt = row.get("question")  # GSM8K
    if not isinstance(prompt, str):
        raise run.InputError(f"no text in 'problem' or 'question', in the columns {', '.join(row)}")
    if args.system_prompt:
        system = {"role": "system", "content": args.system_prompt}
        prompt = [system, {"role": "user", "content": prompt}]
    prompt_ids, _ = utils.encode(tokenizer, eos_ids, prompt)
    utils.check_prompt(args, prompt_ids)
    # Some chat templates end the prompt with "<think>\n", which the rewards of the format then count. It has
    # 8 characters, so at most 8 tokens.
    end = tokenizer.decode(prompt_ids[-8:])
    opening = end[end.rindex("<think>") :] if end.rstrip().endswith("<think>") else ""
    return (utils.Example(prompt, prompt_ids, answer=gold_answer(row), opening=opening),)


def gold_answer(row) -> str:
    """Returns a row's `answer`, or else its `solution`, whose last box `extract_answer` will find.

    Returns "" if the solution has no box or the answer is not finite. `keep_gradable` then drops the problem.
    """
    answer, solution = row.get("answer"), row.get("solution")
    if answer is None and isinstance(solution, str):
        return solution if "\\boxed" in solution else ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):  # a bool is an int, too
        raise run.InputError("a problem needs an answer (a text or a number) or a solution (a text)")
    if isinstance(answer, float):  # str would write 0.00001 as 1e-05, which is not LaTeX
        return np.format_float_positional(answer, trim="-") if math.isfinite(answer) else ""
    return str(answer)


def draw_batch(groups, number: int, size: int, seed: int):
    """Returns batch `number` (a step or a round) of an endless sequence of shuffled epochs.

    The order depends only on the seed and the epoch, so a run that is resumed with the same size needs no
    state of the data loader. The last, incomplete batch of an epoch is dropped.
    """
    batches_per_epoch = len(groups) // size
    epoch, batch = divmod(number, batches_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(groups))
    return [groups[i] for i in order[batch * size : (batch + 1) * size]]


# === Models ===
def load_models(args, device, longest: int):
    """Loads the policy (stored in fp32) and the reference (stored in bf16 if --dtype is, else in fp32).

    Both compute in --dtype. A reference in bf16 loses nothing, because in bf16 the policy computes with
    rounded weights, too.

    longest: the maximum length of a sequence, in tokens.
    """

    def load(dtype):
        model = utils.load_pretrained(AutoModelForCausalLM, args.model, dtype, args.trust_remote_code)
        utils.check_positions(model.config, longest)
        # Both models stay in eval mode, because dropout would make them differ at step 0.
        return shard_model(args, model, device).eval()

    # "auto" is the dtype of the files: the weights stay memory-mapped, and all ranks of a machine share them.
    # The cast comes after sharding, so that each rank converts only its shards.
    policy = load("auto").to(torch.float32)
    # Loaded in its storage dtype, because a cast to bf16 would also round its buffers (RoPE's frequencies).
    reference = load(utils.storage_dtype(args)).requires_grad_(False)
    # Loading rounds some buffers (Gemma's embed_scale) to the dtype of loading, which may differ between the
    # two models. Both must use the same values.
    for name, buffer in policy.named_buffers():
        buffer.copy_(reference.get_buffer(name))
    if args.gradient_checkpointing:
        for block in decoder_blocks(policy):
            # Not transformers' own checkpointing, because it needs train mode, which would start dropout.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for name, model in (("policy", policy), ("reference", reference)):
        # If sequences that are packed together attended to each other, log-probs would be wrong without any
        # error. Therefore `choose_attention` compares packed log-probs with a plain forward pass.
        attention = utils.choose_attention(model, longest)
        run.print_main(f"attention of the {name}: {attention}")
        if args.compile:
            for block in decoder_blocks(model):
                block.compile(dynamic=True)
    return policy, reference


def shard_model(args, model, device):
    """Shards a model in place with FSDP2, which also moves it to the device.

    The units are the decoder blocks, an untied embedding and head, and the rest of the model.
    With --shard-size N (HSDP) each group of N ranks holds one replica of the model, sharded over the group.
    """
    world = dist.get_world_size()
    shard_size = args.shard_size or world
    if shard_size == world:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    else:
        shape = (world // shard_size, shard_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    units = decoder_blocks(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # a tied weight belongs to two modules, so the root must hold it
        units += [embedding, head]
    compute_dtype = getattr(torch, args.dtype)
    # Gradients are summed over ranks in fp32 or wider, because bf16 sums over many ranks lose small terms.
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype)
    for module in [*units, model]:
        # By default FSDP2 leaves the root gathered after forward, for use in backward. The reference never
        # runs backward, so its next forward would still use the weights from before a sync.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        # FSDP divides gradients by the number of ranks. The loss is already divided by the global batch, so
        # the divisor must be 1.
        module.set_gradient_divide_factor(1.0)
        # With a divisor of its own, even 1, FSDP2 reduces with PREMUL_SUM, which gloo does not have. This
        # call makes it use a plain sum.
        module.set_force_sum_reduction_for_comms(True)
    return model


def decoder_blocks(model):
    """Returns the decoder layers, whose classes transformers lists in `_no_split_modules`."""
    names = model._no_split_modules or ()
    # `fully_shard` puts "FSDP" before the class names.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


# === Rounds and evaluation ===
def sample_round(args, sampler, grader, policy, problems: list[tuple], step: int):
    """Samples and grades completions for the problems of the next S steps.

    Returns:
        The groups of samples, in the order in which the steps use them, and metrics.
    """
    drawn = []
    for number in range(step, min(step + args.sample_every, args.num_steps)):
        batch = draw_batch(problems, number, args.prompts_per_step, args.seed)
        drawn += [problem for (problem,) in batch]
    seed = (args.seed, step + 1)  # evaluations use (args.seed, 0)
    problem_samples, metrics = sampler.sample(policy, drawn, args.group_size, seed)
    started = time.perf_counter()
    graded, rewards, num_stopped = grade_samples(grader, problem_samples)
    # The complete samples were graded. Training truncates them.
    samples = [sample.truncate(args.max_length) for sample in graded]
    size = args.group_size
    new_groups = [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]
    for name, numbers in rewards.items():
        metrics[f"rollout/{name}_mean"] = numbers.mean().item()
    metrics["rollout/grading_stopped"] = num_stopped
    metrics["perf/grading_time"] = time.perf_counter() - started
    return new_groups, metrics


class Evaluation(NamedTuple):
    statistics: dict  # {name: (mean, standard error, n)}
    samples: list  # one sample for each of the first --eval-samples problems


def evaluate(args, policy, sampler, grader, held_out: list[tuple]) -> Evaluation:
    """Evaluates the policy on samples for held-out problems: rewards, length, and whether they finished.

    eval/accuracy is pass@1. Values are first averaged over the samples of a problem, so the standard errors
    are over problems.
    """
    problems = [problem for (problem,) in held_out[: args.eval_samples]]
    if not problems:
        return Evaluation({}, [])
    count = args.eval_samples_per_problem
    problem_samples, _ = sampler.sample(policy, problems, count, (args.seed, 0))
    samples, values, _ = grade_samples(grader, problem_samples)  # values: {name: (N,)}
    # This adds length, finished and reward, which is the weighted sum of the rewards in `values`.
    values |= utils.sample_statistics(samples)
    values = {f"eval/{name}": numbers.view(-1, count).mean(1) for name, numbers in values.items()}
    return Evaluation(utils.mean_and_error(values), samples[::count])


# === Grading ===
# Rewards of samples. As in Open-R1, math_verify compares answers. To grade other answers, for example
# programs, replace `grade`. It must set the time limit itself, and return None for a gold answer that it
# cannot grade (`keep_gradable` asks with the answer "\\pi"). To add a reward, add it to `grade_samples`, and
# its weight to WEIGHTS.
#
# math_verify gets one expression, the one that `extract_answer` finds, as a box. Only if a text has formulas
# and neither a box nor "the answer is", math_verify chooses the last formula. Left alone, it would look for a
# part of a text that it can parse, and read "4 or maybe 5" as 5. A policy would learn to exploit this.

WEIGHTS = {"accuracy": 8.0, "format": 1.0, "tag_count": 1.0}  # weights of the rewards (Table 2)
TIME_LIMIT = 5.0  # CPU seconds for grading one answer
# Words before an answer without a box: "The answer is 5", "Answer: 5", "A: 5" and "#### 5". "answer" may be
# followed by up to 30 characters of the same sentence, then by " is", " are", a colon or a line break: "The
# answer (in cm) is 5".
ANSWER_IS = r"(?i:answer)[^.\n]{0,30}?(?: is| are|[:\n])|\bA:|####"
# A number, maybe in dollars (`rewrite` has made "$$" of "$") or with a unit.
NUMBER = r"(-?\$*\d[\d.,/]*)(?: [a-z]+)?"
# Words with which a sentence takes back its result.
TAKES_BACK = r"(?i)\b(?:or|not|if|maybe|perhaps|either|neither|between|than|could|guess|wrong|incorrect)\b"
# What two spellings of a formula may differ in: white space, braces, the size of fractions and parentheses.
SPELLING = r"\s|[{}]|\\left|\\right|\\displaystyle|\\[!,; ]|(?<=\\)[dt](?=frac|binom)"
# A formula with an operator or a function is a computation.
COMPUTATION = r"[+*/^!]|[\w)}]\s*-|\\(?:times|cdot|div|[dt]?frac|sqrt|[dt]?binom|log|ln|a?r?c?(?:sin|cos|tan)"
COMPUTATION += r"|sec|csc|cot|lceil|lfloor|sum|prod|int|lim|gcd|max|min|[bp]mod)"
# What `is_numeral` removes: LaTeX spaces, $, %, degrees, \text{...}, the comma of 24,000, and a last word in
# lower case.
MARKS_AND_UNITS = r"\\[!,; ]|\\?\$|\\?%|\^?\{?\\circ\}?|\\text\{.*|(?<=\d),(?=\d{3})| ?[a-z]*$"
# Parts of an answer that math_verify would misread, and what replaces them.
REWRITES = {
    # \(x = 5.\) -> $$x = 5$$. Each mark of a formula, \( \) \[ \] $ or $$, becomes $$, and a full stop before
    # it is removed. After a backslash it is no such mark: \$ is a currency, \\[ breaks a line of a matrix.
    r"(?:\.\s*|(?<!\\))(?:\\[()\[\]]|\$\$?)": "$$",
    # 24{,}000 -> 24000, and the same for 24\,000 and 24 000.
    r"(?<=\d)(?:,\\!|\\[,; ]|\{,\}| )(?=\d{3}(?!\d))": "",
    # \frac\pi 4 -> \frac{\pi} 4.
    r"(?<=frac)\\(?!sqrt)[a-z]+": r"{\g<0>}",
    # AB = 5 -> \text{AB} = 5. Otherwise it would be an equation for A and B.
    r"(?<![\\A-Za-z])[A-Za-z]{2,}(?= ?=)": r"\\text{\g<0>}",
    # no solution -> \text{no solution}. Otherwise the words would be products of letters.
    r"^[A-Za-z ]{3,}$": r"\\text{\g<0>}",
    # 5 \text{ or 4} -> 5 { or 4}. math_verify drops text after a number as its unit. Text with "or", "is" or
    # "not" before another word is no unit, and must stay. This undoes the rule above: "a or b" is the set of
    # a and b.
    r"\\text(?=\{[^{}]*\b(?:or|is|isn't|not)\b[^{}]*\w)": "",
}


def start_grader():
    """Starts worker processes for grading.

    Some answers, for example 9^{9^{9^9}}, let sympy compute forever, use up the memory or crash. Then only
    the worker ends, and a new one replaces it.
    """
    from pebble import ProcessPool

    context = multiprocessing.get_context("forkserver")  # a fork would inherit threads of CUDA and gloo
    # Every worker imports this script, because `grade` is in it, and with it these modules, which takes
    # seconds. The fork server imports them once, and workers inherit them. (transformers imports lazily, so
    # the module of AutoModelForCausalLM is named.)
    context.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "math_verify"])
    cores = os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    workers = max(1, min(cores, 8))
    # A worker is replaced after 1000 answers, because the parser's caches grow.
    return ProcessPool(workers, max_tasks=1000, initializer=start_worker, context=context)


def start_worker():
    """Sets the memory limit of a worker."""
    logging.disable(logging.WARNING)  # math_verify warns that its own time limit is off
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))  # 4 GiB, of which the imports take an eighth


def extract_answer(text: str) -> str:
    """Returns the LaTeX of the answer in a text, in a box or, of a text with formulas, between "$$".

    If there is an <answer> tag, only the text in the last one counts. The answer is the first that exists of
        1. the content of the last box,
        2. the sentence after the last "answer is" (ANSWER_IS; also inside a box),
        3. the last formula, which math_verify finds by itself,
        4. the result that the last sentence states (`stated_result`), or else the complete text.
    2, 3 and 4 also apply to the content of a box.
    """
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    before, box, after = text.rpartition("\\boxed")
    # Neighboring boxes are one answer: \boxed{4} or \boxed{5} -> 4,5. extract_boxed_content would also join
    # boxes up to 70 characters apart. Therefore everything before the last box is removed, unless a box may
    # end right before it, as in "\boxed{4}$, and $\boxed{5}".
    may_follow_box = "}" in before[-9:]  # "}$, and $" has 9 characters
    if not may_follow_box:
        text = box + after
    text = extract_boxed_content(text, "last")  # returns the text if it has no box
    *introductions, text = re.split(ANSWER_IS, text)
    is_introduced = bool(introductions)
    if is_introduced:
        text = re.split(r"\.\s|\n\n", text.strip())[0]
    text = text.strip(" \n:*").rstrip(".*")  # ": **5.**" -> "5"
    text = rewrite(text)
    # math_verify parses all of a box, but only the last formula ("$$" twice) of another text.
    if is_introduced:
        return f"\\boxed{{{text}}}"
    if text.count("$$") < 2:  # no formula; also the content of a box
        return f"\\boxed{{{stated_result(text)}}}"
    return text


def rewrite(text: str) -> str:
    """Applies all REWRITES to a text."""
    for pattern, replacement in REWRITES.items():
        text = re.sub(pattern, replacement, text)
    return text


def stated_result(text: str) -> str:
    """Returns what the last sentence of a plain text states, if it states the result of a computation.

    "17 + 25 is 42." and "So, 17 + 25 = 42." give "17 + 25 = 42", in which both sides will be compared with
    the gold answer. "The sum is 42." gives "42". All other texts are returned unchanged.
    """
    sentence = re.split(r"(?<=[.!?])\s|\n", text.strip())[-1].strip(" .*!")
    computation, *results = re.split(r"=|\b(?:is|are|equals)\b", sentence)
    result = re.fullmatch(NUMBER, results[0].strip()) if len(results) == 1 else None
    if not result or re.search(TAKES_BACK, sentence):
        return text
    # "So, 17 + 25 " -> "17 + 25 ": without everything up to the last word
    numbers = re.sub(r"^.*[A-Za-z]{2}[,:]?(?: |$)", "", computation)
    if re.search(r"[A-Za-z]", numbers):  # an equation for an unknown number
        return text
    return f"{numbers} = {result[1]}" if numbers.strip() else result[1]


@lru_cache  # the samples of a problem have the same gold answer
def parse_answer(text: str):
    """Returns the value of the answer in a text, or None if it has none.

    The value is an object of sympy, or a string if math_verify cannot parse the answer.
    """
    from math_verify import LatexExtractionConfig, parse

    # [value, LaTeX]; [LaTeX] if it cannot be parsed; [] if there is none. `grade` has set the time limit.
    found = parse(extract_answer(text), [LatexExtractionConfig()], parsing_timeout=None)
    if not found:
        return None
    # math_verify accepts [5] and \{5\} as 5, so lists and sets of one number get no value here. A bracket
    # before \begin is that of a matrix.
    opening = r"\[(?! *\\begin)|\\\{"  # [ or \{
    if re.match(rf"(?:{opening})[^,]*$", str(found[-1])):
        return None
    return found[0]


def answer_formula(text: str) -> str:
    """Returns the LaTeX of the answer in a text: the content of the box, or the last formula."""
    latex = extract_answer(text)
    return latex.split("$$")[-2] if latex.count("$$") > 1 else latex[len("\\boxed{") : -1]


def is_copied(gold: str, text: str, problem: str) -> bool:
    """Returns whether the answer in a text stands in the problem, but is not the gold answer's text."""
    formulas = []
    for formula in (answer_formula(gold), answer_formula(text), problem):
        formula = re.sub(SPELLING, "", formula)
        formulas.append(re.sub(r"\\times|\\cdot", "*", formula).strip(".+"))
    gold, answer, problem = formulas
    # In 17 + 25 = 42 only one side is copied. In x = 17 + 25 the only side with a digit or a command is.
    sides = [side.strip(".+") for side in answer.split("=") if re.search(r"\d|\\", side)]
    sides = [re.sub(r"^\((.*)\)$", r"\1", side) for side in sides]  # (17 + 25) -> 17 + 25
    # A side does not count if it is only a part of a longer number.
    copied = [re.search(rf"(?<![\d.]){re.escape(side)}(?!\.?\d)", problem) is not None for side in sides]
    return answer != gold and bool(sides) and all(copied)


def is_numeral(latex: str) -> bool:
    """Returns whether an answer is one number and no computation. A unit is ignored.

    3/4 is a number, but 10/4, which is not in lowest terms, is a computation.
    """
    latex = re.sub(MARKS_AND_UNITS, "", latex).strip()
    fraction = re.fullmatch(r"-?(?:\\[dt]?frac\{?(\d+?)\}?\{?(\d+)\}?|(\d+)/(\d+))", latex)
    if fraction:
        numbers = [int(number) for number in fraction.groups() if number]
        return math.gcd(*numbers) == 1
    return re.fullmatch(r"[-+]?\d*\.?\d+", latex) is not None


def is_identical(gold_value, value) -> bool:
    """Returns whether two numbers are equal and of the same kind. 0.75 and 3/4 are not, but 3.0 and 3 are."""
    from sympy import Float, Integer

    whole = [Integer(x) if isinstance(x, Float) and x == int(x) else x for x in (gold_value, value)]
    return whole[0] == whole[1]


def is_same_number(gold_value, value) -> bool:
    """Returns whether two numbers that math_verify found equal really are: math_verify rounds to 6 decimals.

    Rational numbers must be equal exactly, and others to 5 digits. The same holds for the numbers in tuples,
    sets and intervals. Returns True for everything else.
    """
    from sympy import Expr, FiniteSet, Float, Interval, Tuple

    if isinstance(gold_value, Tuple | FiniteSet | Interval) and type(gold_value) is type(value):
        return all(is_same_number(*pair) for pair in zip(gold_value.args, value.args))
    numbers = (gold_value, value)
    if not all(isinstance(number, Expr) and number.is_number and number.is_real for number in numbers):
        return True
    if not gold_value.has(Float) and not value.has(Float):
        gold_value, value = gold_value.doit(), value.doit()
        if gold_value.is_Rational and value.is_Rational:
            return gold_value == value
    return abs(gold_value.evalf() - value.evalf()) <= 1e-5 * abs(gold_value.evalf())


def grade(gold: str, text: str, problem: str) -> bool | None:
    """Returns whether the answer in a text equals the gold answer; None if the gold answer has no value.

    Runs in a worker.
    """
    from math_verify import verify
    from sympy import And, Eq

    # After TIME_LIMIT seconds of CPU time, the signal SIGPROF ends this worker. It has no handler, because
    # Python would run one only after the current operation, which may be an endless multiplication. CPU time
    # makes the verdict independent of the machine's load. The next call sets the timer again.
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
    gold_value, value = parse_answer(gold), parse_answer(text)
    if gold_value is None:
        return None
    # What is copied from the problem is no answer, unless the gold answer is the same text. A number of the
    # gold answer's value and kind is never a copy: 90^\circ is right for 90, wherever it stands. But 0.75 for
    # \frac{3}{4} may be one.
    formula = answer_formula(text)
    if is_numeral(formula):
        may_be_copy = not is_identical(gold_value, value)
    else:
        may_be_copy = re.search(COMPUTATION, formula) is not None
    if may_be_copy and is_copied(gold, text, problem):
        return False
    # 10_2 is another number than 10, but math_verify drops the base.
    both = (extract_answer(gold), extract_answer(text))
    gold_bases, bases = [re.findall(r"\d_\{?(\d+)", answer) for answer in both]
    if bases and bases != gold_bases:
        return False
    # Of an equation, math_verify would compare one side alone. Here every side must equal the gold answer,
    # unless this is an equation itself. Names such as x and f(2) are skipped. So x = 4 is 4. And x = 4 = 5,
    # for sympy (x = 4) and (4 = 5), is neither 4 nor 5.
    values = [value]
    if isinstance(value, And | Eq) and not isinstance(gold_value, Eq):
        sides = [side for equation in value.atoms(Eq) for side in equation.args]
        sides = [side for side in sides if not (side.is_Symbol or side.is_Function)]
        values = sides or [value]  # x = y has only names, and 0 ≤ x < 1 no equation
    options = dict(allow_set_relation_comp=True, timeout_seconds=None)  # 0 ≤ x < 1 equals [0, 1)
    return all(verify(gold_value, each, **options) and is_same_number(gold_value, each) for each in values)


def grade_all(grader, jobs: list[tuple]) -> list:
    """Returns the verdict of `grade` for every (gold answer, text, problem). The ranks share the work.

    The verdict is also None if the worker reached a limit or crashed.
    """
    from pebble import ProcessExpired

    rank, world = dist.get_rank(), dist.get_world_size()
    distinct = list(dict.fromkeys(jobs))
    # Seconds of wall-clock time, far above TIME_LIMIT. They end a worker that waits for something: it uses no
    # CPU time, so TIME_LIMIT would never end it.
    futures = [grader.schedule(grade, job, timeout=20 * TIME_LIMIT) for job in distinct[rank::world]]
    verdicts = []
    for future in futures:
        try:
            verdicts.append(future.result())
        except (ProcessExpired, TimeoutError, MemoryError):
            verdicts.append(None)
    ranks_verdicts = run.gather(verdicts)
    # Rank r has graded the jobs r, r + world, r + 2 · world and so on.
    by_job = {job: ranks_verdicts[i % world][i // world] for i, job in enumerate(distinct)}
    return [by_job[job] for job in jobs]


def keep_gradable(grader, name: str, groups: list[tuple], minimum: int) -> list[tuple]:
    """Returns the groups whose gold answer can be graded, of which at least `minimum` are needed."""
    golds = [group[0].answer for group in groups]
    # Every gold answer is compared with a dummy answer, π, only to see whether there is a verdict within the
    # limits. Compared with itself, a gold answer could be found equal without being computed.
    verdicts = grade_all(grader, [(gold, "\\pi", "") for gold in golds])
    kept = [group for group, verdict in zip(groups, verdicts) if verdict is not None]
    dropped = [gold for gold, verdict in zip(golds, verdicts) if verdict is None]
    summary = f"{name}: {len(kept)} of {len(groups)} gold answers can be graded"
    if dropped:
        summary += f", the first that cannot is {dropped[0]!r:.60}"
    if len(kept) < minimum:
        raise run.InputError(f"{summary}; at least {minimum} are needed")
    run.print_main(summary)
    return kept


def format_reward(text: str) -> float:
    """Returns 1 for a text of the form <think>⏎…⏎</think>⏎<answer>⏎…⏎</answer>, else 0. ⏎ is a line break."""
    thinking, _, answer = text.partition("\n</think>\n<answer>\n")
    return float(thinking.startswith("<think>\n") and answer.endswith("\n</answer>"))


def tag_count_reward(text: str) -> float:
    """Returns 1/4 for each of the four tags that occurs exactly once with its line breaks (Open-R1)."""
    tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return sum(text.count(tag) == 1 for tag in tags) / 4


def grade_samples(grader, groups: list):
    """Grades the samples of all groups.

    Returns:
        The samples, each with its weighted sum of rewards and whether its answer is correct; the single
        rewards, {name: (N,)}; and the number of samples whose grading reached a limit or crashed, which count
        as wrong.
    """
    samples = [sample for group in groups for sample in group]
    verdicts = grade_all(grader, [(sample.answer, sample.text, sample.question) for sample in samples])
    correct = [bool(verdict) for verdict in verdicts]
    rewards = {
        "accuracy": correct,
        "format": [format_reward(sample.opening + sample.text) for sample in samples],
        "tag_count": [tag_count_reward(sample.opening + sample.text) for sample in samples],
    }
    rewards = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in rewards.items()}
    totals = sum(WEIGHTS[name] * numbers for name, numbers in rewards.items()).tolist()
    graded = []
    for sample, total, is_correct in zip(samples, totals, correct):
        graded.append(sample._replace(reward=total, correct=is_correct))
    return graded, rewards, verdicts.count(None)


# === Metrics ===
def sample_metrics(examples, rewards):
    """Returns the metrics of a step's samples. rewards: (groups, G)."""
    return {
        "grpo/zero_advantage_groups": (rewards.amax(1) == rewards.amin(1)).double().mean().item(),
        "rewards/mean": rewards.mean().item(),
        "rewards/accuracy": sum(example.correct for example in examples) / len(examples),
    }


def grpo_metrics(losses, ratio, k3, removed):
    """Returns the metrics of each token, (B, T) each."""
    return {
        "loss": losses,
        "grpo/ratio_mean": ratio,
        "grpo/kl": k3,
        "grpo/clip_fraction": removed.double(),
    }


def clipping_metrics(args, log_ratio):
    """Returns for each token whether its log-ratio is beyond a bound, and |log-ratio|.

    With --no-humanline, which clips nothing, tokens beyond a bound are counted all the same.
    """
    return {
        "humanline/clipped_low": (log_ratio < args.log_epsilon_P).double(),
        "humanline/clipped_high": (log_ratio > args.log_epsilon_R).double(),
        "humanline/log_ratio_abs_mean": log_ratio.abs(),
    }


if __name__ == "__main__":
    with run.exit_on_input_error():
        main(run.parse_args(Args, __file__, __doc__, toy=TOY, toy_online={}, paper=PAPER))
