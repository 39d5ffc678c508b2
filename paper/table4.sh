# Table 4 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): Llama3-8B-Instruct on two
# versions of the offline data. Twelve runs.
#
# Each line is a complete run for 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100.
# paper/README.md says what a run leaves and how to resume it.
#
# The paper gives no settings for this table, so these are Table 3's for both data sets. The paper says that
# both have the same prompts, but not which 10K. Here they are the first 10,000 rows of each data set. Whether
# these have the same prompts was not checked.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl

# Completions by Llama3-8B-Instruct. These six are runs of Table 3.

# KTO offline, Llama3-8B data. Table 4: LC-WR 17.40, no standard error; WR 14.13; length 1658.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline

# KTO offline + humanline, Llama3-8B data. Table 4: LC-WR 22.19, no standard error; WR 14.70; length 1407.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline

# DPO offline, Llama3-8B data. Table 4: LC-WR 18.07, no standard error; WR 16.07; length 1767.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline

# DPO offline + humanline, Llama3-8B data. Table 4: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# GRPO offline, Llama3-8B data. Table 4: LC-WR 15.52, no standard error; WR 12.61; length 1648.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline

# GRPO offline + humanline, Llama3-8B data. Table 4: LC-WR 25.24, no standard error; WR 18.11; length 1488.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline

# Completions by Gemma2-9B-Instruct.

# KTO offline, Gemma2-9B data. Table 4: LC-WR 18.10, no standard error; WR 15.28; length 1698.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-gemma-data

# KTO offline + humanline, Gemma2-9B data. Table 4: LC-WR 22.18, no standard error; WR 20.30; length 1836.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline-gemma-data

# DPO offline, Gemma2-9B data. Table 4: LC-WR 18.63, no standard error; WR 15.44; length 1690.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-gemma-data

# DPO offline + humanline, Gemma2-9B data. Table 4: LC-WR 26.26, no standard error; WR 21.91; length 1642.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline-gemma-data

# GRPO offline, Gemma2-9B data. Table 4: LC-WR 12.64, no standard error; WR 10.84; length 1696.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-gemma-data

# GRPO offline + humanline, Gemma2-9B data. Table 4: LC-WR 24.24, no standard error; WR 18.99; length 1587.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline-gemma-data
