"""Humanline GRPO on problems with known answers: samples every S steps, a reference synced every k steps.

Implements §5.2.2 and equation 1 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207). Two
lines turn GRPO into humanline GRPO: the clamp in `clip_log_ratio`, and the sync before `optimizer.step()` in
`main`, which replaces the sync at the start of every round.

    python grpo_math_humanline.py  # one process, the embedded toy, a minute
    torchrun --nproc-per-node 4 grpo_math_humanline.py --model ... --dataset ...

To change the method, edit `grpo_loss` or `group_advantages`. To change the rewards, edit the section Rewards.
To read other data, edit `encode_row`.

Differences from equation 1:
    - The loss is the mean over all completion tokens of the global batch (C.1.4, for instruction following).
      Equation 1 first takes the mean of each completion.
    - There is no π_old: the reference is the denominator of the ratio and the target of the KL penalty
      (C.1.4). For the penalty, equation 1 uses a fixed policy.
    - Advantages are divided by std + 1e-4, as in TRL.
    - Log-probs in training use the sampling temperature, as in TRL, because the samples are the policy's own.
      The other scripts use 1, because their data may come from other models.
Differences from the paper and the authors' code (all: docs/grpo_math.md):
    - The reference is synced before the updates of steps 0, k, 2k and so on.
    - Answers that cannot be graded within limits of time and memory count as wrong. Problems whose gold
      answer cannot be graded are dropped.

Notation: B sequences of T tokens; log-probs in nats; a mask is 1 at completion tokens and 0 elsewhere. A
utils.Example is a prompt with at most one completion: prompt (a text or messages), prompt_ids,
completion_ids, reward, answer and so on. A group is a tuple of Examples of one prompt: here the G samples of
a problem or, in a data set, one Example without completion_ids.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoModelForCausalLM

import utils
from support import checkpoint, data, grading, run, sampling

# === Args ===
SYSTEM_PROMPT = """Reason step by step before you answer. Write in this format, each tag on a line of its own:
<think>\nyour reasoning\n</think>\n<answer>\nthe final answer\n</answer>"""


@dataclass
class Args:
    # algorithm
    beta: float = 1e-4  # weight of the KL penalty (authors' code)
    # The ratio is clipped to 1 ± ε (TRL's default). 1e9: no clip, the control to compare humanline with, and
    # ahead of it in shell games at two rates (docs/grpo_math.md).
    epsilon: float = 0.2
    group_size: int = 8  # samples per problem (G) (Table 2)
    sample_every: int = 64  # optimizer steps between rounds of sampling (S); 1: online (Figure 7: 1 and 64)
    # humanline

    # --no-humanline: no humanline clipping (ε still clips), and syncs only when a round starts.
    humanline: bool = True
    # Optimizer steps between syncs of the reference (Table 2: 12 to 24; 1 collapses); 0: syncs only when a
    # round starts.
    k: int = 16
    log_epsilon_P: float = -1.5  # log ε_P, minimum of a token's log π_θ/π_ref, in nats (Table 2); -inf: none
    log_epsilon_R: float = 1.5  # log ε_R, maximum of a token's log π_θ/π_ref, in nats (Table 2); inf: none
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
    dataset: str = ""  # problems with answers: a file or a Hub name (formats: docs/data.md)
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
    resume: str = ""  # run folder to resume; most flags given with it override the run's settings
    checkpoint_every: int = 100  # steps between checkpoints; 0: only one, at the end or after a signal
    keep_checkpoints: int = 2  # number of newest checkpoints to keep; 0: all
    eval_every: int = 0  # steps between evaluations; 0: only before and after training
    eval_samples: int = 256  # held-out problems to sample completions for; 0: none
    eval_samples_per_problem: int = 4  # samples per held-out problem, for pass@1
    track: bool = False  # log to Weights & Biases, too (pip install wandb)


PAPER = {}  # Table 2 has one column for all variants, the defaults above; S and k are flags
FOLDER = Path(__file__).resolve().parent / "toy" / "shell_game"
# Settings of the toy, which replace the defaults above.
TOY = dict(
    model=f"{FOLDER}/policy",
    dataset=f"{FOLDER}/problems_train.jsonl.gz",
    eval_dataset=f"{FOLDER}/problems_test.jsonl.gz",
    dtype="float64",  # results agree to 1e-5 for any number of ranks and micro-batches
    system_prompt="",
    num_steps=256,
    max_prompt_length=64,
    max_length=128,  # the positions of its models
    prompts_per_step=16,
    lr=1e-4,
    temperature=1.0,
    max_new_tokens=32,
    generation_batch_size=256,
)


# === Loss ===
def grpo_loss(clipped_log_ratio, log_ratio, advantages, beta: float, epsilon: float):
    """Computes the negative of equation 1 for every token: β k3 - min(A ratio, A clamp(ratio, 1-ε, 1+ε)).

    ε stops the gradient of tokens that have already moved as A wants. The humanline bounds also stop tokens
    that have moved far against it. Tokens of the prompt and padding get losses too, which `main` masks.

    Args:
        clipped_log_ratio: (B, T) token log π_θ/π_ref in nats, after humanline clipping. It gives the ratio.
        log_ratio: (B, T), without clipping (C.2). It gives the KL penalty.
        advantages: (B,), A of each sequence.

    Returns:
        The losses of the tokens, (B, T).
    """
    A = advantages.unsqueeze(-1)  # (B, 1)
    ratio = clipped_log_ratio.exp()  # (B, T)
    return beta * k3(log_ratio) - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, 1 + epsilon))


def k3(log_ratio):
    """Estimates the KL divergence by π_ref/π_θ + log π_θ/π_ref - 1 (k3 of joschu.net/blog/kl-approx.html)."""
    return torch.expm1(-log_ratio) + log_ratio  # near 0, exp(-x) - 1 would lose digits


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
    grader = grading.start_grader()
    problems, held_out = load_data(args, tokenizer, eos_ids, grader)
    sampler = sampling.Sampler(args, tokenizer, eos_ids, device)
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
    run.print_plan(args, output_dir, policy, tokenizer, problems, args.prompts_per_step)
    # The initial policy is the baseline of all evaluations, also of a resumed run. So it is evaluated, and
    # its weights are copied for eval/kl, before a checkpoint is loaded.
    initial_weights = sampling.copy_weights(reference) if held_out else []  # equal to the policy's until then
    started = time.perf_counter()
    before = evaluate(args, policy, reference, initial_weights, sampler, grader, held_out)
    evaluation_time = time.perf_counter() - started
    # The steps that are done, and the pool of groups that were sampled but not yet used.
    progress = checkpoint.load_checkpoint(output_dir, policy, reference, optimizer)
    # After SIGINT, SIGTERM or SIGHUP, a step or the sampler ends the run with a checkpoint.
    signals = run.Signals()
    state = args, output_dir, policy, reference, optimizer, progress, signals
    sampler.end_after_signal = partial(checkpoint.end_after_signal, *state)
    shown = ["eval/accuracy", "rewards/accuracy"]
    log = run.Log(args, __file__, output_dir, progress.step, before, evaluation_time, shown)

    for step in range(progress.step, args.num_steps):
        run.set_seed(args.seed, step, rank)  # so that a resumed run draws the same random numbers
        metrics = {"step": step}
        if step > 0 and args.eval_every and step % args.eval_every == 0:
            evaluation = evaluate(args, policy, reference, initial_weights, sampler, grader, held_out)
            metrics |= log.write_evaluation(step, evaluation)
        started = time.perf_counter()

        # The global batch, the same on all ranks: groups of the policy's own samples. A round gives the
        # batches of S steps, which wait in the pool.
        if not progress.pool:
            # Without humanline, or with k = 0, the reference is the policy that samples the round, like
            # the old policy of PPO. Otherwise syncs follow k alone.
            if not args.humanline or args.k == 0:
                sync_reference(reference, policy)
            new_groups, round_metrics = sample_round(args, sampler, grader, policy, problems, step)
            progress.pool += new_groups
            metrics |= round_metrics
        batch = progress.pool[: args.prompts_per_step]
        del progress.pool[: args.prompts_per_step]
        examples = [example for group in batch for example in group]

        # The advantages
        rewards = torch.tensor([example.reward for example in examples], dtype=torch.float64, device=device)
        rewards = rewards.view(args.prompts_per_step, args.group_size)  # (groups, G)
        advantages = group_advantages(rewards)  # (groups, G)
        metrics |= sample_metrics(examples, rewards)

        # The gradient. FSDP gathers the weights on all ranks together, so all ranks get the same number
        # of micro-batches. It also sums the gradients over ranks (`shard_model` sets this).
        lengths = [example.length for example in examples]
        micro_batches = utils.make_micro_batches(lengths, world, args.micro_batch_tokens)
        completion_tokens = sum(len(example.completion_ids) for example in examples)
        means = utils.Means()
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        for indices in micro_batches[rank::world]:  # lists of indices; number i is for rank i % world
            # Padded; `token_logps` packs the sequences again, so that padding costs nothing.
            input_ids, mask = utils.pad_batch([examples[i] for i in indices], device)  # (B, T)

            # [:, t] is log π(token t | all tokens before it), in nats, and 0 where mask is 0.
            with torch.no_grad():  # first, because the policy's activations stay in memory until backward
                ref_logps = utils.token_logps(reference, input_ids, mask, args.temperature)  # (B, T)
            logps = utils.token_logps(policy, input_ids, mask, args.temperature)  # (B, T)
            log_ratio = logps - ref_logps  # (B, T)
            clipped_log_ratio = clip_log_ratio(args, log_ratio)  # (B, T)
            A = advantages.flatten()[indices].to(logps.dtype)  # (B,)
            losses = grpo_loss(clipped_log_ratio, log_ratio, A, args.beta, args.epsilon)  # (B, T)
            # Summed over ranks, this is the mean over all completion tokens of the global batch. `view_as`
            # only checks the shape, because the loss is often edited.
            loss = (losses.view_as(mask) * mask).sum() / completion_tokens
            loss.backward()
            total_loss += loss.detach()

            means.add(grpo_metrics(clipped_log_ratio, log_ratio, A, args.epsilon), mask)
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
    after = evaluate(args, policy, reference, initial_weights, sampler, grader, held_out)
    run.export(output_dir / "final", policy, tokenizer, eos_ids)
    log.report(progress.step, after)
    grader.stop()
    grader.join()
    dist.barrier()  # all ranks wait until rank 0 has written everything
    dist.destroy_process_group()


# === Data ===
def load_data(args, tokenizer, eos_ids, grader) -> tuple[list, list]:
    """Reads --dataset and --eval-dataset. Returns the problems of both whose answers can be graded."""
    tools = args, tokenizer, eos_ids
    problems = data.load_groups(*tools, args.dataset, args.dataset_split, encode_row)
    problems = keep_gradable(grader, args.dataset, problems)
    data.check_groups(args.dataset, problems, 1, args.prompts_per_step)
    held_out = []
    if args.eval_dataset:
        held_out = data.load_groups(*tools, args.eval_dataset, args.eval_split, encode_row)
        held_out = keep_gradable(grader, args.eval_dataset, held_out)
    return problems, held_out


def encode_row(args, tokenizer, eos_ids, row):
    """Returns a problem with its gold answer, as a group of one Example. Edit it to read other columns.

    Raises data.SkipRow to skip the row, and utils.InputError to end the run because the row is malformed.
    """
    prompt = row.get("problem") or row.get("question")  # GSM8K
    answer = row.get("answer", row.get("solution"))  # MATH: the solution, in whose box the answer stands
    if prompt is None or answer is None:
        raise utils.InputError(f"no problem (question) or answer (solution) in the columns {', '.join(row)}")
    if not isinstance(answer, str | int | float):
        raise data.SkipRow("the answer is neither a text nor a number")
    answer = str(answer).rpartition("####")[2]  # GSM8K
    # Prose would count as an answer, but no completion would ever equal it.
    marked = any(mark in answer for mark in ("\\boxed", "\\fbox", "<answer>"))
    if "answer" not in row and not marked and len(answer.split()) > 1:
        raise data.SkipRow("the solution has no \\boxed")
    if args.system_prompt:
        system = {"role": "system", "content": args.system_prompt}
        prompt = [system, {"role": "user", "content": prompt}]
    (example,) = data.encode(args, tokenizer, eos_ids, prompt)
    # Some chat templates end the prompt with "<think>\n", which the rewards of the format then count.
    _, opening, rest = tokenizer.decode(example.prompt_ids).rpartition("<think>\n")
    return (example._replace(answer=answer, opening="" if rest else opening),)


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
    sampler.end_after_signal()  # which may have ended programs of the grader
    # The complete samples were graded. Training truncates them.
    samples = [sample.truncate(args.max_length) for sample in graded]
    size = args.group_size
    new_groups = [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]
    for name, numbers in rewards.items():
        metrics[f"rollout/{name}_mean"] = numbers.mean().item()
    metrics["rollout/grading_stopped"] = num_stopped
    metrics["perf/grading_time"] = time.perf_counter() - started
    return new_groups, metrics


def evaluate(
    args, policy, reference, initial_weights, sampler, grader, held_out: list[tuple]
) -> utils.Evaluation:
    """Evaluates the policy on samples for held-out problems: rewards, length, whether they finished, and KL.

    eval/accuracy is pass@1. Values are first averaged over the samples of a problem, so the standard errors
    are over problems. For the KL, the reference gets the initial weights for a moment.
    """
    problems = [problem for (problem,) in held_out[: args.eval_samples]]
    if not problems:
        return utils.Evaluation({}, [])
    count = args.eval_samples_per_problem
    problem_samples, _ = sampler.sample(policy, problems, count, (args.seed, 0))
    samples, values, _ = grade_samples(grader, problem_samples)  # values: {name: (N,)}
    sampler.end_after_signal()
    # This adds length, finished and reward, which is the weighted sum of the rewards in `values`.
    values |= sampling.sample_statistics(samples)
    values["kl"] = sampler.kl_from_initial(policy, reference, initial_weights, samples)
    values = {f"eval/{name}": numbers.view(-1, count).mean(1) for name, numbers in values.items()}
    return utils.Evaluation(values, samples[::count])


# === Rewards ===
# Rewards of samples. To add one, add it to `grade_samples`, and its weight to WEIGHTS.

WEIGHTS = {"accuracy": 8.0, "format": 1.0, "tag_count": 1.0}  # weights of the rewards (Table 2)
# Grades an answer. To grade others, for example programs, replace it by the name of a function with the same
# arguments (docs/grpo_math.md has an example). It runs in a worker with limits: 5 s of CPU time, 100 s of
# wall-clock time, 4 GiB.
GRADE = grading.grade


def keep_gradable(grader, name: str, groups: list[tuple]) -> list[tuple]:
    """Returns the groups whose gold answer can be graded: GRADE does not return None.

    Raises utils.InputError if GRADE fails: it raises an exception or reaches a limit.
    """
    # Every gold answer is compared with a dummy answer, π, only to see whether there is a verdict within the
    # limits. Compared with itself, a gold answer could be found equal without being computed. Problems with
    # the same gold answer share the verdict for one of them.
    problems = {group[0].answer: group[0].question for group in groups}
    jobs = [(group[0].answer, "\\pi", problems[group[0].answer]) for group in groups]
    verdicts = grading.grade_all(grader, GRADE, jobs, name)
    kept = [group for group, verdict in zip(groups, verdicts) if verdict is not None]
    run.print_main(f"{name}: {len(kept)} of {len(groups)} gold answers can be graded")
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
        rewards, {name: (N,)}; and the number of samples that could not be graded, which count as wrong.
    """
    samples = [sample for group in groups for sample in group]
    jobs = [(sample.answer, sample.text, sample.question) for sample in samples]
    verdicts = grading.grade_all(grader, GRADE, jobs)
    correct = [verdict or 0.0 for verdict in verdicts]  # None: wrong
    rewards = {
        "accuracy": correct,
        "format": [format_reward(sample.opening + sample.text) for sample in samples],
        "tag_count": [tag_count_reward(sample.opening + sample.text) for sample in samples],
    }
    rewards = run.broadcast(rewards)  # rank 0's: a reward of your own may differ between ranks
    rewards = {name: sampling.as_rewards(numbers, len(samples)) for name, numbers in rewards.items()}
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


def grpo_metrics(clipped_log_ratio, log_ratio, advantages, epsilon: float):
    """Returns the metrics of each token, (B, T) each.

    Args:
        clipped_log_ratio, log_ratio: (B, T) each, as in `grpo_loss`.
        advantages: (B,), A of each sequence.
    """
    A = advantages.unsqueeze(-1)  # (B, 1)
    ratio = clipped_log_ratio.exp()
    # whether 1 ± ε stops the gradient of a token's min(...)
    stopped = ((A > 0) & (ratio > 1 + epsilon)) | ((A < 0) & (ratio < 1 - epsilon))
    return {
        "grpo/ratio_mean": ratio,
        "grpo/kl": k3(log_ratio),
        "grpo/clip_fraction": stopped.double(),
    }


if __name__ == "__main__":
    main(run.parse_args(Args, __file__, __doc__, toy=TOY, toy_online={}, paper=PAPER))
