# Figure 5 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): what each of the two changes does, and humanline sampling.
# Eighteen runs, nine of them in table3.sh too.
#
# One line is one run, complete: start it from the repository's folder. It leaves runs/NAME with final/ (the model), metrics.jsonl, summary.json and
# outputs.json, the 805 answers; docs/alpaca_eval.md goes on from there to LC-WR, WR and length. The paper's figures stand above the line. Everything
# that a line does not name is a default with --model, which is the paper's setting (Tables 1 and 3). paper/README.md says what the flags are for. None of
# these runs has been made at this scale.
#
# The text does not say which objectives the figure shows; here are all three. Nor does it give the ablations' settings: they keep those of offline +
# humanline (KTO's norm of 4.0, GRPO's ε of 0.15). With clipping only the reference is fixed; for such runs of GRPO Table 3 takes --epsilon 0.5. For
# sampling the paper gives neither M nor the Beta distributions: --M 10 and --kappa 100 are ours.
#
# The same --output-dir in another file of this folder is the same run: where its folder holds one, the line stops with an error and trains nothing.
# One that was interrupted goes on with its script and --resume runs/NAME in the place of all flags.
#
# Each run keeps two checkpoints of about 112 GB: take runs/NAME/checkpoints away when you will not sample again.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json

# Left: both changes, one of them, neither, and online.

# DPO, neither: offline. Table 3: LC-WR 18.07, no standard error; WR 16.07; length 1767. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline

# DPO, clipping only. No number in the text; §5.2.1: as bad as offline. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --sync none --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-clip-only

# DPO, syncing only. No number in the text; Figure 5: most of the improvement, not competitive with online. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip none --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-sync-only

# DPO, both: offline + humanline. Table 3: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# DPO, online. Table 3: LC-WR 24.96, no standard error; WR 22.99; length 1828. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-online

# KTO, neither: offline. Table 3: LC-WR 17.40, no standard error; WR 14.13; length 1658. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline

# KTO, clipping only. No number in the text; §5.2.1: as bad as offline. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --sync none --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-clip-only

# KTO, syncing only. No number in the text; Figure 5: most of the improvement, not competitive with online. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip none --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-sync-only

# KTO, both: offline + humanline. Table 3: LC-WR 22.19, no standard error; WR 14.70; length 1407. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline

# KTO, online. Table 3: LC-WR 22.45, no standard error; WR 19.47; length 1744. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-online

# GRPO, neither: offline. Table 3: LC-WR 15.52, no standard error; WR 12.61; length 1648. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline

# GRPO, clipping only. No number in the text; §5.2.1: as bad as offline. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --sync none --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-clip-only

# GRPO, syncing only. No number in the text; Figure 5: most of the improvement, not competitive with online. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip none --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-sync-only

# GRPO, both: offline + humanline. Table 3: LC-WR 25.24, no standard error; WR 18.11; length 1488. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline

# GRPO, online. Table 3: LC-WR 25.05, no standard error; WR 18.82; length 1529. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-online

# Right: humanline sampling (equation 5) in the place of clipping; beside them stand the runs with both changes, above.

# DPO, humanline sampling. No number in the text; Figure 5: as good as clipping. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip sample --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-humanline-sampling

# KTO, humanline sampling. No number in the text; Figure 5: as good as clipping. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip sample --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-humanline-sampling

# GRPO, humanline sampling. No number in the text; Figure 5: as good as clipping. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip sample --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-humanline-sampling
