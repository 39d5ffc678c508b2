# Figure 6 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): DPO offline + humanline
# on each quarter of the data, by the average log-prob of a token under the initial policy. Four runs, and one
# run of table3.sh.
#
# A run needs 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100. paper/README.md says
# what a run leaves and how to resume it.
#
# The first command splits the 10,000 pairs, less those that are skipped, into quarters,
# runs/quartiles/quartile1.jsonl (lowest) to quartile4.jsonl. It scores all pairs once with the model and
# needs the same GPUs. The average is that of the chosen completion; the paper says "the output".
#
# 78 steps of 32 pairs are one epoch of 2,500 pairs, or a little more if rows are skipped. The paper does not
# say how long it trained on a quarter, or on how many pairs.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl

LLAMA=(--model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm)
OFFLINE=("${LLAMA[@]}" --dataset-split "train[:10000]")
EVAL=(--eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing)

torchrun --nproc-per-node 4 paper/quartiles.py "${OFFLINE[@]}" --out runs/quartiles

# Quartiles 1 to 4. Quartile 1 is the lowest (average log-probs -1.03 to -0.36 in the paper). §5.2.1, Figure 6:
# training on the lowest quartile is significantly worse than on the others; no number in the text.
for quartile in 1 2 3 4; do
    torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct \
        --dataset runs/quartiles/quartile$quartile.jsonl --num-steps 78 \
        "${EVAL[@]}" --checkpoint-every 78 --output-dir runs/dpo-quartile$quartile
done

# All data: DPO offline + humanline, 312 steps. Table 3: LC-WR 24.82 ± 1.36 (Table 6), WR 20.18, length 1637.
torchrun --nproc-per-node 4 dpo_humanline.py "${OFFLINE[@]}" \
    "${EVAL[@]}" --checkpoint-every 156 --output-dir runs/dpo-offline-humanline
