# Figure 1 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): offline (red), offline +
# humanline (orange) and online (blue), Llama3-8B-Instruct. Nine runs, which are all in table3.sh too, as
# complete lines.
#
# A run needs 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100. paper/README.md says
# what a run leaves and how to resume it.
#
# Figure 1 says that online is 1.3 to 1.6 times better than offline, and that offline + humanline is as good.
# Its numbers are Table 3's. They stand above the lines in the order LC-WR, WR, length. §5.2.1 tests the
# differences with Holm-Bonferroni.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl

LLAMA=(--model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm)
OFFLINE=("${LLAMA[@]}" --dataset-split "train[:10000]")
ONLINE=("${LLAMA[@]}" --dataset-split "train[:14000]" --online
    --reward-model runs/armorm --trust-remote-code)
EVAL=(--eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156)

# DPO: offline (18.07, 16.07, 1767), offline + humanline (24.82 ± 1.36 in Table 6, 20.18, 1637), online
# (24.96, 22.99, 1828)
torchrun --nproc-per-node 4 dpo_humanline.py "${OFFLINE[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/dpo-offline
torchrun --nproc-per-node 4 dpo_humanline.py "${OFFLINE[@]}" "${EVAL[@]}" --output-dir runs/dpo-offline-humanline
torchrun --nproc-per-node 4 dpo_humanline.py "${ONLINE[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/dpo-online

# KTO: offline (17.40, 14.13, 1658), offline + humanline (22.19, 14.70, 1407), online (22.45, 19.47, 1744)
torchrun --nproc-per-node 4 kto_humanline.py "${OFFLINE[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/kto-offline
torchrun --nproc-per-node 4 kto_humanline.py "${OFFLINE[@]}" "${EVAL[@]}" --output-dir runs/kto-offline-humanline
torchrun --nproc-per-node 4 kto_humanline.py "${ONLINE[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/kto-online

# GRPO: offline (15.52, 12.61, 1648), offline + humanline (25.24, 18.11, 1488), online (25.05, 18.82, 1529)
torchrun --nproc-per-node 4 grpo_humanline.py "${OFFLINE[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/grpo-offline
torchrun --nproc-per-node 4 grpo_humanline.py "${OFFLINE[@]}" "${EVAL[@]}" --output-dir runs/grpo-offline-humanline
torchrun --nproc-per-node 4 grpo_humanline.py "${ONLINE[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/grpo-online
