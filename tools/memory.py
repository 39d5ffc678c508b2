"""Will a model fit on N GPUs of M GB? Calculates the peak memory of one GPU from the model's shape.

    python -m tools.memory llama-3-8b --gpus 4 --gb 80 --gradient-checkpointing

The peak of a training step is in its backward pass: in the head, or in the last block. Compute is in bf16,
half of the tokens are scored, and there are gradients of an earlier micro-batch.

Not counted: CUDA's context and libraries, NCCL's buffers, fragmentation, workspaces of kernels, activations
of sampling and of evaluations, a reward model (2 bytes per parameter while the policy samples), loading and
checkpoints. A mixture of experts is counted with the activations of a dense model.
"""

from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM

from support import run
from tools.scripts import read_config
from utils import GPU_BLOCK

GIB = 2**30


def attention_sizes(config) -> tuple[int, int]:
    """Returns how many numbers the queries of a token have, and its keys."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * size, (getattr(config, "num_key_value_heads", None) or heads) * size


def training_step(model, gpus: int, tokens: int, checkpointing: bool) -> dict[str, float]:
    """Returns {part: bytes} of a GPU at the peak of a training step with so many tokens in a micro-batch."""
    config = model.config.get_text_config()
    P, V, D = model.num_parameters(), config.vocab_size, config.hidden_size
    blocks = run.decoder_blocks(model)
    weights = dict(blocks[0].named_parameters())
    block_size = sum(weight.numel() for weight in weights.values())
    Q, K = attention_sizes(config)
    H = getattr(config, "intermediate_size", None) or 4 * D  # hidden vector of the MLP
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight

    # A block keeps these bf16 numbers of a token for backward: of a norm its input (in fp32), the normalized
    # input and its output; of attention its inputs and output; of the MLP four of its hidden vectors.
    norms = sum(weight.shape == (D,) and "norm" in name for name, weight in weights.items())
    kept = 4 * D * norms + 2 * (Q + K) + 4 * H
    if any("q_norm" in name for name in weights):
        kept += 3 * (Q + K)
    activations = 2 * tokens * len(blocks) * (D if checkpointing else kept)  # D: the inputs alone

    # In the head (utils.HeadLogps): logits of a part of the vocabulary in fp32 and bf16, the gradient of the
    # weight and this part of it in fp32, and the gradient of the hidden states.
    scored = max(1, tokens // 2)
    part = min(V, max(256, GPU_BLOCK // scored // 256 * 256))
    in_head = 6 * scored * part + 2 * V * D + 4 * part * D + 4 * scored * D
    gathered_in_head = 2 * V * D

    # In a block: gradients of activations, and what the block keeps if it is computed again. Two blocks are
    # gathered, and fp32 gradients are summed over GPUs: those of a block or, of an untied head, the head's. A
    # tied head stays gathered with its gradient. Gemma 2's attention (eager) has T x T numbers for each head.
    in_block = 2 * tokens * (2 * H + 3 * D + (kept if checkpointing else 0)) + 2 * V * D * tied
    if getattr(config, "attn_logit_softcapping", None):
        in_block += 14 * config.num_attention_heads * tokens * min(tokens, 1250)
    summed = (4 * block_size if tied else 4 * V * D) if gpus > 1 else 0
    gathered_in_block = 4 * block_size + summed + 2 * V * D * tied

    gathered, temporaries = max((gathered_in_head, in_head), (gathered_in_block, in_block), key=sum)
    parts = {"parameters": 4 * P, "gradients": 4 * P, "Adam's moments": 8 * P, "reference": 2 * P}
    parts = {name: count / gpus for name, count in parts.items()}
    return parts | {"activations": activations, "gathered": gathered, "head, temporaries": temporaries}


def main(
    model: tyro.conf.Positional[str],
    gpus: int = 1,
    gb: float = 80,
    micro_batch_tokens: int = 8192,
    gradient_checkpointing: bool = False,
    engine: Literal["none", "hf", "vllm"] = "none",
    vllm_memory: float = 0.3,
    sampled_tokens: int = 32 * (625 + 2048),
):
    """Prints the peak of one GPU in GiB, and whether it fits.

    Args:
        model: a folder or Hub name, whose config.json is read, or llama-3-8b, qwen2.5-1.5b or gemma-2-27b.
        gpus: number of GPUs.
        gb: memory of one GPU.
        micro_batch_tokens: the script's, but at least the tokens of the longest pair or sequence.
        gradient_checkpointing: the script's.
        engine: what samples in evaluations and online rounds; none: there are neither.
        vllm_memory: the script's.
        sampled_tokens: of a batch of the hf engine, prompts included.
    """
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(read_config(model))
    training = training_step(built, gpus, micro_batch_tokens, gradient_checkpointing)
    phases = {"training": training}
    if engine != "none":
        config = built.config.get_text_config()
        weights, (_, K) = 2 * built.num_parameters(), attention_sizes(config)
        sampling = {name: training[name] for name in ("parameters", "Adam's moments", "reference")}
        sampling["gathered"] = 4 * config.vocab_size * config.hidden_size
        if engine == "hf":  # it keeps a copy of the weights while the policy trains
            training["engine"] = weights
            sampling["engine"] = (
                weights + 4 * config.num_hidden_layers * K * sampled_tokens
            )  # keys and values
        else:
            sampling["engine"] = max(weights, vllm_memory * gb * GIB)
        phases["sampling"] = sampling
    for phase, parts in phases.items():
        print(f"{phase}, GiB per GPU")
        for part, count in parts.items():
            print(f"  {part:<18}{count / GIB:8.2f}")
        print(f"  {'peak':<18}{sum(parts.values()) / GIB:8.2f}")
    peak = max(sum(parts.values()) for parts in phases.values()) / GIB
    verdict = "fits" if peak < 0.9 * gb else "does not fit"
    print(f"{model} {verdict} on {gpus} x {gb:g} GB, with a tenth kept free")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
