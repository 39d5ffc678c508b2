# Table 2 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): Qwen2.5-1.5B-Instruct on
# MATH with verified answers, GRPO. Seven runs with its settings.
#
# Each line is a complete run for 4 GPUs. The paper does not state the hardware; the authors' public job
# script asks for 8xH100. paper/README.md says what a run leaves and how to resume it.
#
# The first command makes the training set from public data: the 12,000 problems of MATH that are not in
# MATH500. You can also pass --dataset simplescaling/openaimath, the name in the authors' recipes.
#
# The range of k is [12, 24] in the table and in §5.2.2, and [12, 20] in the table's caption. The authors'
# recipes have 12, 16, 20 and 25. figure7.sh has the values of the figure.
#
# --system-prompt is the authors' prompt, from the recipes of kawine/open-r1-humanline at 4cef58a. Start the
# lines from the repository's folder.
#
# With --max-prompt-length 1024 all 500 problems of MATH500 are kept. With 512, as in the authors' recipes,
# four problems are skipped with our own prompt (docs/grpo_math.md). It also keeps about one in a hundred
# training problems more, whose samples training cuts to 2,560 tokens with the prompt.

[ -e math_train.jsonl ] || python paper/math_train.py

# Online, S=1. §5.2.2: MATH500 pass@1 0.593 ± 0.019.
torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl --system-prompt "$(cat paper/math_system_prompt.txt)" --no-humanline --sample-every 1 --eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024 --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400 --output-dir runs/math-online

# S=64: 64 times as much data, sampled 64 times less often. §5.2.2: no number, significantly worse (p < 0.05).
torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl --system-prompt "$(cat paper/math_system_prompt.txt)" --no-humanline --eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024 --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400 --output-dir runs/math-s64

# S=64 + humanline, k=12. §5.2.2: MATH500 pass@1 0.593 ± 0.019 "for both the online and humanline runs", k not
# stated.
torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl --system-prompt "$(cat paper/math_system_prompt.txt)" --k 12 --eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024 --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400 --output-dir runs/math-s64-humanline-k12

# S=64 + humanline, k=16 (the default). §5.2.2: MATH500 pass@1 0.593 ± 0.019 "for both the online and
# humanline runs", k not stated.
torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl --system-prompt "$(cat paper/math_system_prompt.txt)" --eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024 --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400 --output-dir runs/math-s64-humanline-k16

# S=64 + humanline, k=20. §5.2.2: MATH500 pass@1 0.593 ± 0.019 "for both the online and humanline runs", k not
# stated; Figure 7: slower but more stable.
torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl --system-prompt "$(cat paper/math_system_prompt.txt)" --k 20 --eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024 --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400 --output-dir runs/math-s64-humanline-k20

# S=64 + humanline, k=24. §5.2.2: MATH500 pass@1 0.593 ± 0.019 "for both the online and humanline runs", k not
# stated.
torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl --system-prompt "$(cat paper/math_system_prompt.txt)" --k 24 --eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024 --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400 --output-dir runs/math-s64-humanline-k24

# S=64 + humanline, k=1. §5.2.2: no number, the reward collapses.
torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset math_train.jsonl --system-prompt "$(cat paper/math_system_prompt.txt)" --k 1 --eval-dataset HuggingFaceH4/MATH-500 --eval-samples 500 --max-prompt-length 1024 --micro-batch-tokens 20480 --gradient-checkpointing --checkpoint-every 400 --output-dir runs/math-s64-humanline-k1
