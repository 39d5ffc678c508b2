# Figure 5 of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207v2): what each of the two
# changes does, and humanline sampling. Eighteen runs; nine are figure1.sh's: neither change (offline), both,
# online. 4 GPUs a run (4xH100 in Figure 11; not stated here). What a run leaves, and how an interrupted one
# goes on: paper/README.md.
#
# The text does not say which objectives the figure shows; here are all three. It gives no number. Nor does it
# give the ablations' settings: they keep those of offline + humanline (KTO's norm of 4.0, GRPO's ε of 0.15).
# With clipping only the reference is fixed; for such runs of GRPO Table 3 takes --epsilon 0.5. For sampling
# the paper gives neither M nor the Beta distributions: M = 10 and κ = 100 are ours.

source paper/figure1.sh # brings OFFLINE and EVAL too

for method in dpo kto grpo; do
    # left, clipping only. §5.2.1: as bad as offline.
    torchrun --nproc-per-node 4 ${method}_humanline.py "${OFFLINE[@]}" --sync none \
        "${EVAL[@]}" --output-dir runs/$method-clip-only
    # left, syncing only. Figure 5: most of the improvement, not competitive with online.
    torchrun --nproc-per-node 4 ${method}_humanline.py "${OFFLINE[@]}" --no-clip \
        "${EVAL[@]}" --output-dir runs/$method-sync-only
    # right, humanline sampling (equation 5) in the place of clipping. Figure 5: as good.
    torchrun --nproc-per-node 4 paper/variants.py sampling ${method}_humanline "${OFFLINE[@]}" \
        "${EVAL[@]}" --output-dir runs/$method-humanline-sampling
done
