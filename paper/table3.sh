# Table 3 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): Llama3-8B-Instruct on AlpacaEval 2, all variants of all
# objectives. Twelve runs.
#
# One line is one run, complete: start it from the repository's folder. It leaves runs/NAME with final/ (the model), metrics.jsonl, summary.json and
# outputs.json, the 805 answers; docs/alpaca_eval.md goes on from there to LC-WR, WR and length. The paper's figures stand above the line. Everything
# that a line does not name is a default with --model, which is the paper's setting (Tables 1 and 3). paper/README.md says what the flags are for. None of
# these runs has been made at this scale.
#
# The table gives no standard errors; Table 6 repeats one of its rows with one.
#
# The same --output-dir in another file of this folder is the same run: where its folder holds one, the line stops with an error and trains nothing.
# One that was interrupted goes on with its script and --resume runs/NAME in the place of all flags.
#
# Each run keeps two checkpoints of about 112 GB: take runs/NAME/checkpoints away when you will not sample again.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json

# KTO offline. Table 3: LC-WR 17.40, no standard error; WR 14.13; length 1658. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline

# KTO offline + humanline. Table 3: LC-WR 22.19, no standard error; WR 14.70; length 1407. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline

# KTO online. Table 3: LC-WR 22.45, no standard error; WR 19.47; length 1744. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-online

# KTO online + humanline. Table 3: LC-WR 22.79, no standard error; WR 18.78; length 1663. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --lr 2.5e-6 --max-grad-norm 0.1 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-online-humanline

# DPO offline. Table 3: LC-WR 18.07, no standard error; WR 16.07; length 1767. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline

# DPO offline + humanline. Table 3: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# DPO online. Table 3: LC-WR 24.96, no standard error; WR 22.99; length 1828. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-online

# DPO online + humanline. Table 3: LC-WR 26.84, no standard error; WR 23.64; length 1774. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --lr 2.5e-6 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-online-humanline

# GRPO offline. Table 3: LC-WR 15.52, no standard error; WR 12.61; length 1648. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline

# GRPO offline + humanline. Table 3: LC-WR 25.24, no standard error; WR 18.11; length 1488. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline

# GRPO online. Table 3: LC-WR 25.05, no standard error; WR 18.82; length 1529. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-online

# GRPO online + humanline. Table 3: LC-WR 26.10, no standard error; WR 21.57; length 1647. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --max-grad-norm 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-online-humanline
