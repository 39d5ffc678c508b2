# Figure 5 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): what clipping and syncing
# do alone, and humanline sampling. Nine runs. The figure's nine others are in table3.sh: offline with neither
# change, offline with both, and online.
#
# A run needs 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100. paper/README.md says
# what a run leaves and how to resume it.
#
# The text does not say which objectives the figure shows; here are all three. It gives no numbers, and no
# settings for the ablations. So the ablations keep the settings of offline + humanline: KTO's norm of 4.0 and
# GRPO's ε of 0.15. With clipping alone the reference is fixed; Table 3 has --epsilon 0.5 for other runs of
# GRPO with a fixed reference. For sampling the paper gives neither M nor the Beta distributions. M = 10 and κ
# = 100 are ours.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl

LLAMA=(--model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm)
OFFLINE=("${LLAMA[@]}" --dataset-split "train[:10000]")
EVAL=(--eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156)

for method in dpo kto grpo; do
    # Left, clipping alone. §5.2.1: as bad as offline.
    torchrun --nproc-per-node 4 ${method}_humanline.py "${OFFLINE[@]}" --k 0 \
        "${EVAL[@]}" --output-dir runs/$method-clip-only
    # Left, syncing alone. Figure 5: most of the improvement, not competitive with online.
    torchrun --nproc-per-node 4 ${method}_humanline.py "${OFFLINE[@]}" --log-epsilon-P=-inf --log-epsilon-R=inf \
        "${EVAL[@]}" --output-dir runs/$method-sync-only
    # Right, humanline sampling (equation 5) instead of clipping. Figure 5: as good.
    torchrun --nproc-per-node 4 paper/variants.py sampling ${method}_humanline "${OFFLINE[@]}" \
        "${EVAL[@]}" --output-dir runs/$method-humanline-sampling
done
