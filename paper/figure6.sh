# Figure 6 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): DPO offline + humanline on each quarter of the data, by the
# average log-prob of a token under the initial policy. Four runs, and one of table3.sh.
#
# The first command cuts the 10,000 pairs into quarters, runs/quartiles/quartile1.jsonl (lowest) to quartile4.jsonl. It reads all pairs once with the
# model and takes the same GPUs.
#
# One line is one run, complete: start it from the repository's folder. It leaves runs/NAME with final/ (the model), metrics.jsonl, summary.json and
# outputs.json, the 805 answers; docs/alpaca_eval.md goes on from there to LC-WR, WR and length. The paper's figures stand above the line. Everything
# that a line does not name is a default with --model, which is the paper's setting (Tables 1 and 3). paper/README.md says what the flags are for. None of
# these runs has been made at this scale.
#
# The average is that of the chosen completion; the paper says "the output".
#
# 78 steps of 32 are one pass over 2,500 pairs. The paper does not say how long it trained on a quarter, or on how many pairs.
#
# The same --output-dir in another file of this folder is the same run: where its folder holds one, the line stops with an error and trains nothing.
# One that was interrupted goes on with its script and --resume runs/NAME in the place of all flags.
#
# Each run keeps two checkpoints of about 112 GB: take runs/NAME/checkpoints away when you will not sample again.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json

torchrun --nproc-per-node 4 paper/quartiles.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --out runs/quartiles

# Quartile 1, the lowest, average log-probs -1.03 to -0.36 in the paper. §5.2.1, Figure 6: training on it is significantly worse than on the rest, no
# number in the text. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset runs/quartiles/quartile1.jsonl --num-steps 78 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 78 --output-dir runs/dpo-quartile1

# Quartile 2, the second. §5.2.1, Figure 6: no number in the text; better than the lowest. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset runs/quartiles/quartile2.jsonl --num-steps 78 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 78 --output-dir runs/dpo-quartile2

# Quartile 3, the third. §5.2.1, Figure 6: no number in the text; better than the lowest. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset runs/quartiles/quartile3.jsonl --num-steps 78 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 78 --output-dir runs/dpo-quartile3

# Quartile 4, the highest. §5.2.1, Figure 6: no number in the text; better than the lowest. 4 GPUs (4xH100 in Figure 11; not stated here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset runs/quartiles/quartile4.jsonl --num-steps 78 --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 78 --output-dir runs/dpo-quartile4

# The whole: DPO offline + humanline, 312 steps. Table 3: LC-WR 24.82 ± 1.36 (Table 6); WR 20.18; length 1637. 4 GPUs (4xH100 in Figure 11; not stated
# here).
torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --eval-dataset ref.json --eval-samples 805 --gradient-checkpointing --checkpoint-every 156 --output-dir runs/dpo-offline-humanline
