# Figure 7 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): sampling every step and
# every 64 steps, with and without humanline. Five runs. They are all in table2.sh too, as complete lines with
# an explanation of the flags.
#
# A run is for 4 GPUs. The paper does not state the hardware; the authors' public job script asks for 8xH100.
# paper/README.md says what a run leaves and how to resume it.
#
# The figure's curves over optimizer steps are in metrics.jsonl (rewards/mean, or rewards/accuracy). Blue
# is online, orange S=64, green humanline, violet humanline with k=20. The text does not give green's k. Here
# it is 16, in the middle of its range. The text mentions k=1, but does not say that the figure shows it.

[ -e math_train.jsonl ] || python paper/math_train.py

MATH=(--model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl
    --system-prompt "$(cat paper/math_system_prompt.txt)")
EVAL=(--eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024
    --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400)

# Online, S=1. §5.2.2: MATH500 pass@1 0.593 ± 0.019.
torchrun --nproc-per-node 4 grpo_math_humanline.py "${MATH[@]}" --no-humanline --sample-every 1 \
    "${EVAL[@]}" --output-dir runs/math-online

# S=64: 64 times as much data, sampled 64 times less often. §5.2.2: no number, significantly worse (p < 0.05).
torchrun --nproc-per-node 4 grpo_math_humanline.py "${MATH[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/math-s64

# S=64 + humanline, k=16 (the default). §5.2.2: pass@1 0.593 ± 0.019 "for both the online and humanline runs",
# k not stated.
torchrun --nproc-per-node 4 grpo_math_humanline.py "${MATH[@]}" "${EVAL[@]}" --output-dir runs/math-s64-humanline-k16

# k=20, with the result above; Figure 7: slower but more stable. k=1. §5.2.2: no number, the reward collapses.
for k in 20 1; do
    torchrun --nproc-per-node 4 grpo_math_humanline.py "${MATH[@]}" --k $k \
        "${EVAL[@]}" --output-dir runs/math-s64-humanline-k$k
done
