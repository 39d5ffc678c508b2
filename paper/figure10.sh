# Figure 10 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): syncing after the update, as a trust region, beside humanline
# syncing, Llama3-8B-Instruct. Seven runs, three of them in table3.sh too.
#
# One line is one run, complete: start it from the repository's folder. It leaves runs/NAME with final/ (the model), metrics.jsonl, summary.json and
# outputs.json, the 805 answers; docs/alpaca_eval.md goes on from there to LC-WR, WR and length. The paper's figures stand above the line. Everything
# that a line does not name is a default with --model, which is the paper's setting (Tables 1 and 3). paper/README.md says what the flags are for. None of
# these runs has been made at this scale.
#
# The caption says that the reference is synced after the update "every 1024 steps", the best of a sweep. 10K pairs in batches of 32 are 312 steps, so
# steps of the optimizer cannot be meant, unless the runs were longer than Table 1's or nothing was synced. The paper's listing (C.2.1) counts
# batches; the public HALOs code that it is a fork of also counts examples, which its config.yaml calls steps (eval_every). 1,024 pairs are 32 steps,
# as long as an online round (C.1.2): with that reading the run is first here, then to the letter.
#
# The text names no objective: DPO is assumed for what it is compared with, and the trust region is there for all three. It does not mention clipping:
# there is none here. KTO and GRPO keep the settings of offline + humanline.
#
# The same --output-dir in another file of this folder is the same run: where its folder holds one, the line stops with an error and trains nothing.
# One that was interrupted goes on with its script and --resume runs/NAME in the place of all flags.
#
# Each run keeps two checkpoints of about 112 GB: take runs/NAME/checkpoints away when you will not sample again.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json

# DPO offline. Table 3: LC-WR 18.07, no standard error; WR 16.07; length 1767. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline

# DPO trust region, every 1,024 pairs (32 steps). No number in the text; Figure 10: much worse than humanline syncing. 4 GPUs (4xH100 in Figure 11;
# not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip none --sync after_step --k 32 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-trust-region-k32

# KTO trust region, every 1,024 pairs (32 steps). No number in the text; Figure 10: much worse than humanline syncing. 4 GPUs (4xH100 in Figure 11;
# not stated here).
torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip none --sync after_step --k 32 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/kto-trust-region-k32

# GRPO trust region, every 1,024 pairs (32 steps). No number in the text; Figure 10: much worse than humanline syncing. 4 GPUs (4xH100 in Figure 11;
# not stated here).
torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip none --sync after_step --k 32 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/grpo-trust-region-k32

# DPO trust region, every 1,024 steps, to the letter: there is no sync within 312 steps, so this is offline DPO. No number in the text. 4 GPUs (4xH100
# in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --clip none --sync after_step --k 1024 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-trust-region-k1024

# DPO offline + humanline. Table 3: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline

# DPO online. Table 3: LC-WR 24.96, no standard error; WR 22.99; length 1828. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-online
