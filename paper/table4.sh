# Table 4 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): Llama3-8B-Instruct on two versions of the offline data. Twelve
# runs.
#
# One line is one run, complete: start it from the repository's folder. It leaves runs/NAME with final/ (the model), metrics.jsonl, summary.json and
# outputs.json, the 805 answers; docs/alpaca_eval.md goes on from there to LC-WR, WR and length. The paper's figures stand above the line. Everything
# that a line does not name is a default with --model, which is the paper's setting (Tables 1 and 3). paper/README.md says what the flags are for. None of
# these runs has been made at this scale.
#
# The paper gives no settings for this table: Table 3's are taken for both data sets. It says that the contexts of both are the same, but not which
# 10K: here it is the first 10,000 rows of each, and whether these have the same prompts was not checked.
#
# The same --output-dir in another file of this folder is the same run: where its folder holds one, the line stops with an error and trains nothing.
# One that was interrupted goes on with its script and --resume runs/NAME in the place of all flags.
#
# Each run keeps two checkpoints of about 112 GB: take runs/NAME/checkpoints away when you will not sample again.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json

# Completions by Llama3-8B-Instruct. These six are runs of Table 3.

# KTO offline, Llama3-8B data. Table 4: LC-WR 17.40, no standard error; WR 14.13; length 1658. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline

# KTO offline + humanline, Llama3-8B data. Table 4: LC-WR 22.19, no standard error; WR 14.70; length 1407. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline

# DPO offline, Llama3-8B data. Table 4: LC-WR 18.07, no standard error; WR 16.07; length 1767. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline

# DPO offline + humanline, Llama3-8B data. Table 4: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# GRPO offline, Llama3-8B data. Table 4: LC-WR 15.52, no standard error; WR 12.61; length 1648. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline

# GRPO offline + humanline, Llama3-8B data. Table 4: LC-WR 25.24, no standard error; WR 18.11; length 1488. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline

# Completions by Gemma2-9B-Instruct.

# KTO offline, Gemma2-9B data. Table 4: LC-WR 18.10, no standard error; WR 15.28; length 1698. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-gemma-data

# KTO offline + humanline, Gemma2-9B data. Table 4: LC-WR 22.18, no standard error; WR 20.30; length 1836. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline-gemma-data

# DPO offline, Gemma2-9B data. Table 4: LC-WR 18.63, no standard error; WR 15.44; length 1690. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-gemma-data

# DPO offline + humanline, Gemma2-9B data. Table 4: LC-WR 26.26, no standard error; WR 21.91; length 1642. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline-gemma-data

# GRPO offline, Gemma2-9B data. Table 4: LC-WR 12.64, no standard error; WR 10.84; length 1696. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-gemma-data

# GRPO offline + humanline, Gemma2-9B data. Table 4: LC-WR 24.24, no standard error; WR 18.99; length 1587. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-gemma-data
