# Figure 11 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): wall-clock time on
# 4xH100, Llama3-8B-Instruct on UltraFeedback, five seeds. Forty-five runs: offline, offline + humanline and
# online, by seed.
#
# `time` prints the seconds of the whole run, with loading and final/. The seconds of the steps, with sampling
# and scoring of the rounds, are the sum of perf/step_time in runs/NAME/metrics.jsonl. The runs are Table 3's,
# with training alone. They have no evaluation, and therefore no samples.jsonl for paper/alpaca_eval/README.md.
# Each writes one checkpoint, at its end, which `time` includes, and of which 45 need 5 TB: delete them.
#
# The text gives no seconds, only ratios for GRPO. Offline + humanline takes about twice as long as offline,
# and less than 1/6 of online. Online takes over 12 times as long as offline. The text does not say whether
# the figure shows DPO and KTO; they are below. A sync here copies local shards, whereas the authors' sync
# gathers a state dict. So the ratio of offline + humanline to offline may be another one.

[ -e runs/armorm ] || python paper/armorm.py runs/armorm

LLAMA=(--model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm)
OFFLINE=("${LLAMA[@]}" --dataset-split "train[:10000]")
ONLINE=("${LLAMA[@]}" --dataset-split "train[:14000]" --online
    --reward-model runs/armorm --trust-remote-code)
ALONE=(--gradient-checkpointing --checkpoint-every 0)

for seed in 1 2 3 4 5; do
    time torchrun --nproc-per-node 4 grpo_humanline.py "${OFFLINE[@]}" --no-humanline \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-grpo-offline-$seed
    time torchrun --nproc-per-node 4 grpo_humanline.py "${OFFLINE[@]}" \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-grpo-offline-humanline-$seed
    time torchrun --nproc-per-node 4 grpo_humanline.py "${ONLINE[@]}" --no-humanline \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-grpo-online-$seed

    time torchrun --nproc-per-node 4 dpo_humanline.py "${OFFLINE[@]}" --no-humanline \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-dpo-offline-$seed
    time torchrun --nproc-per-node 4 dpo_humanline.py "${OFFLINE[@]}" \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-dpo-offline-humanline-$seed
    time torchrun --nproc-per-node 4 dpo_humanline.py "${ONLINE[@]}" --no-humanline \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-dpo-online-$seed

    time torchrun --nproc-per-node 4 kto_humanline.py "${OFFLINE[@]}" --no-humanline \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-kto-offline-$seed
    time torchrun --nproc-per-node 4 kto_humanline.py "${OFFLINE[@]}" \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-kto-offline-humanline-$seed
    time torchrun --nproc-per-node 4 kto_humanline.py "${ONLINE[@]}" --no-humanline \
        --seed $seed "${ALONE[@]}" --output-dir runs/time-kto-online-$seed
done
