# Figure 8 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): GRPO + humanline with k steps between syncs, Llama3-8B-Instruct.
# Seven runs, one of them in table3.sh too.
#
# One line is one run, complete: start it from the repository's folder. It leaves runs/NAME with final/ (the model), metrics.jsonl, summary.json and
# outputs.json, the 805 answers; docs/alpaca_eval.md goes on from there to LC-WR, WR and length. The paper's figures stand above the line. Everything
# that a line does not name is a default with --model, which is the paper's setting (Tables 1 and 3). paper/README.md says what the flags are for. None of
# these runs has been made at this scale.
#
# The text names k=1 and k=4 only, and a log-linear decline beyond; the powers of two up to 64 are ours. It says "humanline GRPO": offline data is an
# assumption, as in Tables 3 and 6.
#
# The same --output-dir in another file of this folder is the same run: where its folder holds one, the line stops with an error and trains nothing.
# One that was interrupted goes on with its script and --resume runs/NAME in the place of all flags.
#
# Each run keeps two checkpoints of about 112 GB: take runs/NAME/checkpoints away when you will not sample again.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json

# k=1: GRPO offline + humanline. Table 3: LC-WR 25.24, no standard error; WR 18.11; length 1488. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline

# k=2. No number in the text; Figure 8: as good as k=1. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --k 2 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-k2

# k=4. No number in the text; Figure 8: as good as k=1. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --k 4 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-k4

# k=8. No number in the text; Figure 8: declining log-linearly. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --k 8 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-k8

# k=16. No number in the text; Figure 8: declining log-linearly. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --k 16 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-k16

# k=32. No number in the text; Figure 8: declining log-linearly. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --k 32 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-k32

# k=64. No number in the text; Figure 8: declining log-linearly. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --k 64 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-k64
