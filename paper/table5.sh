# Table 5 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): Gemma2-27B-Instruct with
# DPO, on two versions of the offline data and online. Five runs, and the untrained model. Figure 9 shows this
# model too.
#
# Each line is a complete run for 8 GPUs with 141 GB. paper/README.md says what a run leaves and how to resume
# it.
#
# The table does not say whether its standard error (`error` below) is that of LC-WR or of WR.
#
# The learning rate and β are the table's; β 0.1 is the default. The table gives no maximum gradient norm, so
# all runs have 1.0. It does not say how the untrained model was sampled; here it is sampled like the others.
# The caption of Figure 9 also mentions KTO and GRPO with this model, but the paper gives no settings for
# them.
#
# The paper does not state the hardware. Each rank samples with a complete copy of the model (50.7 GiB), which
# is why the GPUs need 141 GB. tools/memory.py calculates 73 GiB in training and 119 GiB while sampling. Online,
# the reward model adds 14 GiB while sampling. Offline training alone, with --eval-samples 0 and without
# --eval-dataset, needs 73 GiB. A checkpoint is about 380 GB. All 805 prompts stay within 625 tokens of Gemma's
# tokenizer (of a copy of it, with Gemma's template).

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl
[ -e runs/armorm ] || python paper/armorm.py runs/armorm

# The untrained model: one step with a learning rate of 1e-30, which changes nothing. Table 5: LC-WR 45.90;
# WR 35.45; error 1.54; length not given.
torchrun --nproc-per-node 8 dpo_humanline.py --model google/gemma-2-27b-it --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --num-steps 1 --lr 1e-30 --vllm-memory 0.5 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/27b-baseline

# Offline, Llama3-8B completions. Table 5: LC-WR 48.59; WR 32.36; error 1.58; length not given.
torchrun --nproc-per-node 8 dpo_humanline.py --model google/gemma-2-27b-it --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --lr 2.5e-6 --beta 0.3 --vllm-memory 0.5 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/27b-offline-llama-data

# Offline + humanline, Llama3-8B completions. Table 5: LC-WR 56.27; WR 44.49; error 1.67; length not given.
torchrun --nproc-per-node 8 dpo_humanline.py --model google/gemma-2-27b-it --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --lr 2.5e-6 --beta 0.3 --vllm-memory 0.5 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/27b-offline-humanline-llama-data

# Offline, Gemma2-9B completions. Table 5: LC-WR 56.58; WR 45.17; error 1.68; length not given.
torchrun --nproc-per-node 8 dpo_humanline.py --model google/gemma-2-27b-it --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --lr 2.5e-6 --vllm-memory 0.5 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/27b-offline-gemma-data

# Offline + humanline, Gemma2-9B completions. Table 5: LC-WR 67.45; WR 61.37; error 1.64; length not given.
torchrun --nproc-per-node 8 dpo_humanline.py --model google/gemma-2-27b-it --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:10000]" --lr 2.5e-6 --vllm-memory 0.5 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/27b-offline-humanline-gemma-data

# Online, with the prompts of the Gemma2-9B data. Table 5: LC-WR 66.49; WR 74.22; error 1.48; length not given.
torchrun --nproc-per-node 8 dpo_humanline.py --model google/gemma-2-27b-it --dataset princeton-nlp/gemma2-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model runs/armorm --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 1.0 --vllm-memory 0.5 --eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/27b-online
