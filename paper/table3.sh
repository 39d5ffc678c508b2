# Table 3 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): Llama3-8B-Instruct on
# AlpacaEval 2, all variants of all objectives. Twelve runs.
#
# Each line is a complete run for 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100.
# paper/README.md says what a run leaves and how to resume it. `--model` starts with the learning rate, the
# gradient norm and ε of the variant in Table 3.
#
# The table gives no standard errors. Table 6 repeats one of its rows with a standard error.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl
[ -e runs/armorm ] || python paper/armorm.py runs/armorm

# KTO offline. Table 3: LC-WR 17.40, no standard error; WR 14.13; length 1658.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline

# KTO offline + humanline. Table 3: LC-WR 22.19, no standard error; WR 14.70; length 1407.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline

# KTO online. Table 3: LC-WR 22.45, no standard error; WR 19.47; length 1744.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-online

# KTO online + humanline. Table 3: LC-WR 22.79, no standard error; WR 18.78; length 1663.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-online-humanline

# DPO offline. Table 3: LC-WR 18.07, no standard error; WR 16.07; length 1767.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline

# DPO offline + humanline. Table 3: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# DPO online. Table 3: LC-WR 24.96, no standard error; WR 22.99; length 1828.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-online

# DPO online + humanline. Table 3: LC-WR 26.84, no standard error; WR 23.64; length 1774.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-online-humanline

# GRPO offline. Table 3: LC-WR 15.52, no standard error; WR 12.61; length 1648.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline

# GRPO offline + humanline. Table 3: LC-WR 25.24, no standard error; WR 18.11; length 1488.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline

# GRPO online. Table 3: LC-WR 25.05, no standard error; WR 18.82; length 1529.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --no-humanline --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-online

# GRPO online + humanline. Table 3: LC-WR 26.10, no standard error; WR 21.57; length 1647.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-online-humanline
