# Table 1 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): the settings that all
# instruction-following runs share. Six runs of Table 3, one offline and one online for each objective.
#
# Table 1 has no scores. A line here names every setting of Table 1, although each is the default. Otherwise
# it is the line of table3.sh with the same --output-dir. The run's args.json records all settings, and
# `python dpo_humanline.py --model M --help` prints the defaults. AdamW's β, 0.9 and 0.999, are torch's
# defaults and have no flag.
#
# 10K pairs in batches of 32, or 20K sequences in batches of 64, are 312 steps. 12,288 online prompts are 12
# rounds of 1,024. They come from 14,000 rows, because prompts of more than 625 tokens are skipped.
# Offline too, so that a run begins a second epoch if more than a few of the 10,000 are.
#
# Each line is a complete run for 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100.
# paper/README.md says what a run leaves and how to resume it.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl

# DPO offline + humanline, as in table3.sh. Table 3: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --num-steps 312 --batch-size 32 --adam-eps 1e-5 --weight-decay 1e-2 --warmup-fraction 0.1 --log-epsilon-P -1.5 --log-epsilon-R 1.5 --k 1 --max-new-tokens 2048 --temperature 0.7 --top-p 0.95 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# DPO online + humanline, as in table3.sh. Table 3: LC-WR 26.84, no standard error; WR 23.64; length 1774.
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --num-steps 312 --batch-size 32 --adam-eps 1e-5 --weight-decay 1e-2 --warmup-fraction 0.1 --log-epsilon-P -1.5 --log-epsilon-R 1.5 --k 1 --max-new-tokens 2048 --temperature 0.7 --top-p 0.95 --round-prompts 1024 --samples-per-prompt 8 --reward-threshold 0.01 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-online-humanline

# KTO offline + humanline, as in table3.sh. Table 3: LC-WR 22.19, no standard error; WR 14.70; length 1407.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --num-steps 312 --batch-size 64 --adam-eps 1e-5 --weight-decay 1e-2 --warmup-fraction 0.1 --log-epsilon-P -1.5 --log-epsilon-R 1.5 --k 1 --max-new-tokens 2048 --temperature 0.7 --top-p 0.95 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-offline-humanline

# KTO online + humanline, as in table3.sh. Table 3: LC-WR 22.79, no standard error; WR 18.78; length 1663.
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --num-steps 312 --batch-size 64 --adam-eps 1e-5 --weight-decay 1e-2 --warmup-fraction 0.1 --log-epsilon-P -1.5 --log-epsilon-R 1.5 --k 1 --max-new-tokens 2048 --temperature 0.7 --top-p 0.95 --round-prompts 1024 --samples-per-prompt 8 --reward-threshold 0.01 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-online-humanline

# GRPO offline + humanline, as in table3.sh. Table 3: LC-WR 25.24, no standard error; WR 18.11; length 1488.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --num-steps 312 --batch-size 64 --adam-eps 1e-5 --weight-decay 1e-2 --warmup-fraction 0.1 --log-epsilon-P -1.5 --log-epsilon-R 1.5 --k 1 --max-new-tokens 2048 --temperature 0.7 --top-p 0.95 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-offline-humanline

# GRPO online + humanline, as in table3.sh. Table 3: LC-WR 26.10, no standard error; WR 21.57; length 1647.
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --num-steps 312 --batch-size 64 --adam-eps 1e-5 --weight-decay 1e-2 --warmup-fraction 0.1 --log-epsilon-P -1.5 --log-epsilon-R 1.5 --k 1 --max-new-tokens 2048 --temperature 0.7 --top-p 0.95 --round-prompts 1024 --samples-per-prompt 8 --reward-threshold 0.01 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-online-humanline
