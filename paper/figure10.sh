# Figure 10 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): syncing after the
# update, as a trust region, beside humanline syncing, Llama3-8B-Instruct. Seven runs, of which three are in
# table3.sh too.
#
# A run needs 4 GPUs. The paper does not state the hardware here; Figure 11 has 4xH100. paper/README.md says
# what a run leaves and how to resume it.
#
# The caption says that the reference is synced after the update "every 1024 steps", the best of a sweep. 10K
# pairs in batches of 32 are 312 steps. So the caption cannot mean optimizer steps, unless the runs were
# longer than Table 1's or nothing was synced. The paper's listing (C.2.1) counts batches. The public HALOs
# code, from which it is a fork, also counts examples, which its config.yaml calls steps (eval_every). 1,024
# pairs are 32 steps, as long as an online round (C.1.2). The runs with k32 in their names have this reading,
# and the one with k1024 is literal.
#
# The text names no objective. DPO is an assumption for the runs that are compared, and the trust region is
# there for all three objectives. The text does not mention clipping, so the trust region has none. KTO and
# GRPO have the settings of offline + humanline.

[ -e ref.json ] || curl -fL -o ref.json https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json
[ -s ref.jsonl ] || python -c "import json; [print(json.dumps({'prompt': row['instruction']})) for row in json.load(open('ref.json'))]" > ref.jsonl
[ -e runs/armorm ] || python paper/armorm.py runs/armorm

LLAMA=(--model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm)
OFFLINE=("${LLAMA[@]}" --dataset-split "train[:10000]")
ONLINE=("${LLAMA[@]}" --dataset-split "train[:14000]" --online
    --reward-model runs/armorm --trust-remote-code)
EVAL=(--eval-dataset ref.jsonl --eval-samples 805 --gradient-checkpointing --checkpoint-every 156)

# DPO offline. Table 3: LC-WR 18.07, WR 16.07, length 1767.
torchrun --nproc-per-node 4 dpo_humanline.py "${OFFLINE[@]}" --no-humanline "${EVAL[@]}" --output-dir runs/dpo-offline

# Trust region, every 1,024 pairs (32 steps). No number in the text; Figure 10: much worse than humanline
# syncing.
for method in dpo kto grpo; do
    torchrun --nproc-per-node 4 paper/variants.py trust-region ${method}_humanline "${OFFLINE[@]}" \
        --k 32 "${EVAL[@]}" --output-dir runs/$method-trust-region-k32
done

# DPO trust region, every 1,024 steps, literally. There is no sync within 312 steps, so this is offline DPO.
torchrun --nproc-per-node 4 paper/variants.py trust-region dpo_humanline "${OFFLINE[@]}" \
    --k 1024 "${EVAL[@]}" --output-dir runs/dpo-trust-region-k1024

# DPO offline + humanline. Table 3: LC-WR 24.82 ± 1.36 (Table 6), WR 20.18, length 1637.
torchrun --nproc-per-node 4 dpo_humanline.py "${OFFLINE[@]}" "${EVAL[@]}" --output-dir runs/dpo-offline-humanline

# DPO online. Table 3: LC-WR 24.96, WR 22.99, length 1828.
torchrun --nproc-per-node 4 dpo_humanline.py "${ONLINE[@]}" --no-humanline \
    "${EVAL[@]}" --output-dir runs/dpo-online
