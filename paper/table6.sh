# Table 6 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): bounds of humanline
# clipping, Llama3-8B-Instruct, DPO. Five runs.
#
# Each line is a complete run for 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100.
# paper/README.md says what a run leaves and how to resume it.
#
# The caption says "humanline DPO". Its row with -1.5 and 1.5 has the LC-WR and the length of offline +
# humanline in Table 3, so all five runs are offline.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl

# log ε_P -2.0, log ε_R 1.5. Table 6: LC-WR 23.33 ± 1.35; length 1663; WR not given.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --log-epsilon-P -2.0 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline-P-2.0-R1.5

# log ε_P -1.5, log ε_R 1.5. Table 6: LC-WR 24.82 ± 1.36; length 1637; WR not given. A run of Table 3.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# log ε_P -1.0, log ε_R 1.5. Table 6: LC-WR 24.37 ± 1.33; length 1588; WR not given.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --log-epsilon-P -1.0 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline-P-1.0-R1.5

# log ε_P -1.0, log ε_R 2.0. Table 6: LC-WR 22.55 ± 1.31; length 1619; WR not given.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --log-epsilon-P -1.0 --log-epsilon-R 2.0 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline-P-1.0-R2.0

# log ε_P -1.0, log ε_R 3.0. Table 6: LC-WR 23.98 ± 1.33; length 1636; WR not given.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --log-epsilon-P -1.0 --log-epsilon-R 3.0 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline-P-1.0-R3.0
