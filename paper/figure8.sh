# Figure 8 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): GRPO + humanline with k
# steps between syncs, Llama3-8B-Instruct. Seven runs, of which one is in table3.sh too.
#
# A run needs 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100. paper/README.md says
# what a run leaves and how to resume it.
#
# The text only names k=1 and k=4, and a log-linear decline beyond. The powers of two up to 64 are ours. The
# text says "humanline GRPO". That the data are offline is an assumption, as in Tables 3 and 6.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl

LLAMA=(--model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm)
OFFLINE=("${LLAMA[@]}" --dataset-split "train[:10000]")
EVAL=(--eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156)

# k=1, the default: GRPO offline + humanline. Table 3: LC-WR 25.24, WR 18.11, length 1488.
torchrun --nproc-per-node 4 grpo_humanline.py "${OFFLINE[@]}" "${EVAL[@]}" --output-dir runs/grpo-offline-humanline

# The text has no numbers. Figure 8: up to k=4 as good as k=1, and then a log-linear decline.
for k in 2 4 8 16 32 64; do
    torchrun --nproc-per-node 4 grpo_humanline.py "${OFFLINE[@]}" --k $k \
        "${EVAL[@]}" --output-dir runs/grpo-offline-humanline-k$k
done
