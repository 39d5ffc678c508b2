# Figure 11 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): wall-clock time on 4xH100, Llama3-8B-Instruct on UltraFeedback,
# five seeds. Forty-five runs.
#
# One line is one run, complete: start it from the repository's folder. `time` prints the seconds of the whole, with loading and final/. Those of the
# steps, with sampling and scoring of the rounds, are the sum of perf/step_time in runs/NAME/metrics.jsonl. The runs are Table 3's with nothing that
# is not training: no evaluation, so there is no outputs.json for docs/alpaca_eval.md, and no checkpoints. None of these runs has been made at this
# scale.
#
# The text gives ratios, for GRPO: offline + humanline about twice offline, and under 1/6 of online; online over 12 times offline. It does not say
# whether the figure shows DPO and KTO; they are below. A sync here copies local shards, where the authors' gathers a state dict, so the ratio of
# offline + humanline to offline need not be theirs.

# GRPO offline, seed 1. Figure 11: no seconds in the text; the unit of the other two. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-1

# GRPO offline, seed 2. Figure 11: no seconds in the text; the unit of the other two. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-2

# GRPO offline, seed 3. Figure 11: no seconds in the text; the unit of the other two. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-3

# GRPO offline, seed 4. Figure 11: no seconds in the text; the unit of the other two. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-4

# GRPO offline, seed 5. Figure 11: no seconds in the text; the unit of the other two. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --epsilon 0.5 --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-5

# GRPO offline + humanline, seed 1. Figure 11: no seconds in the text; about 2x offline, under 1/6 of online. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-humanline-1

# GRPO offline + humanline, seed 2. Figure 11: no seconds in the text; about 2x offline, under 1/6 of online. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-humanline-2

# GRPO offline + humanline, seed 3. Figure 11: no seconds in the text; about 2x offline, under 1/6 of online. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-humanline-3

# GRPO offline + humanline, seed 4. Figure 11: no seconds in the text; about 2x offline, under 1/6 of online. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-humanline-4

# GRPO offline + humanline, seed 5. Figure 11: no seconds in the text; about 2x offline, under 1/6 of online. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-offline-humanline-5

# GRPO online, seed 1. Figure 11: no seconds in the text; over 12x offline. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-online-1

# GRPO online, seed 2. Figure 11: no seconds in the text; over 12x offline. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-online-2

# GRPO online, seed 3. Figure 11: no seconds in the text; over 12x offline. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-online-3

# GRPO online, seed 4. Figure 11: no seconds in the text; over 12x offline. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-online-4

# GRPO online, seed 5. Figure 11: no seconds in the text; over 12x offline. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 grpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-grpo-online-5

# DPO offline, seed 1. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-1

# DPO offline, seed 2. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-2

# DPO offline, seed 3. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-3

# DPO offline, seed 4. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-4

# DPO offline, seed 5. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-5

# DPO offline + humanline, seed 1. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-humanline-1

# DPO offline + humanline, seed 2. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-humanline-2

# DPO offline + humanline, seed 3. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-humanline-3

# DPO offline + humanline, seed 4. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-humanline-4

# DPO offline + humanline, seed 5. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-offline-humanline-5

# DPO online, seed 1. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-online-1

# DPO online, seed 2. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-online-2

# DPO online, seed 3. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-online-3

# DPO online, seed 4. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-online-4

# DPO online, seed 5. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 dpo_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-dpo-online-5

# KTO offline, seed 1. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-1

# KTO offline, seed 2. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-2

# KTO offline, seed 3. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-3

# KTO offline, seed 4. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-4

# KTO offline, seed 5. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --no-humanline --max-grad-norm 1.0 --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-5

# KTO offline + humanline, seed 1. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-humanline-1

# KTO offline + humanline, seed 2. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-humanline-2

# KTO offline + humanline, seed 3. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-humanline-3

# KTO offline + humanline, seed 4. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-humanline-4

# KTO offline + humanline, seed 5. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-offline-humanline-5

# KTO online, seed 1. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 1 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-online-1

# KTO online, seed 2. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 2 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-online-2

# KTO online, seed 3. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 3 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-online-3

# KTO online, seed 4. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 4 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-online-4

# KTO online, seed 5. Figure 11: no number in the text. 4 GPUs, 4xH100 in the paper.
time torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:14000]" --online --reward-model RLHFlow/ArmoRM-Llama3-8B-v0.1 --trust-remote-code --no-humanline --lr 2.5e-6 --max-grad-norm 0.5 --seed 5 --gradient-checkpointing --checkpoint-every 0 --output-dir runs/time-kto-online-5
