"""docs/curves.md says what the logs in docs/reference show, and its pictures are drawn from these logs."""

import math

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, read_rows

from paper import curves

PAGE = (ROOT / "docs" / "curves.md").read_text(encoding="utf-8")
K = {"dpo": 16, "grpo": 32}
RATIO = "humanline/log_ratio_abs_mean"
BEYOND = ["humanline/clipped_low", "humanline/clipped_high"]


def log(name: str) -> pd.DataFrame:
    """Returns the first 160 steps of a log."""
    return pd.DataFrame(read_rows(ROOT / "docs" / "reference" / f"{name}.jsonl.gz")).head(160)


def rewards(script: str) -> list[float]:
    """Returns the rewards of the default runs at step 128."""
    lines = curves.reference_lines(script, "reward", 128)
    assert len(lines) == 3 and all(steps[-1] == 128 for steps, _ in lines)
    return [values[-1] for _, values in lines]


def says(row: str, *texts: str):
    """Checks that a row of the table of faults has some texts."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    for text in texts:
        assert text.replace("-", "−") in line, (text, line)


@pytest.mark.parametrize("script", ["dpo", "grpo"])
def test_a_late_sync_makes_the_log_ratio_zero_in_the_step_after_it(script):
    after_a_sync = log(script).step % K[script] == 1
    late, default = log(f"{script}_late"), log(script)
    assert (late[RATIO] == 0).equals(after_a_sync | (late.step == 0))
    assert default[after_a_sync][RATIO].between(0.00075, 0.01405).all()
    says("sync after the update", "0.0008 to 0.0140", "0.66 or less")
    if script == "dpo":
        assert (late[after_a_sync].loss == round(math.log(2), 4)).all()
        assert round(default[after_a_sync].loss.max(), 2) == 0.66


def test_a_reference_that_is_never_synced_lowers_the_loss_and_the_reward():
    losses = [log(name).loss.tail(32).mean() for name in ("dpo_never", "dpo")]
    says("reference never synced", "{:.2f} instead of {:.2f} over".format(*losses))
    for script in ("dpo", "grpo"):
        broken = log(f"{script}_never").set_index("step")["eval/reward"][128]
        default = rewards(script)
        says("reference never synced", f"{broken:.2f} instead of {min(default):.2f} to {max(default):.2f}")
        ratios = log(f"{script}_never")[RATIO]
        assert ratios[120:].min() > ratios[: K[script]].max()


def test_a_learning_rate_that_is_too_large_shows_in_the_log_ratios():
    dpo, grpo = log("dpo_lr"), log("grpo_lr")
    last = dpo.tail(32)
    beyond = last[BEYOND].sum(axis=1).mean()
    at_128 = dpo.set_index("step").loc[128]
    texts = [
        f"of {last[RATIO].mean():.1f} nats",
        f"{beyond:.0%} of the tokens",
        f"loss of {last.loss.mean():.0f}.",
    ]
    texts += [f"reward is {at_128['eval/reward']:.2f}", f"`eval/finished` {at_128['eval/finished']:.2f}"]
    texts += [f"{grpo.set_index('step')['eval/reward'][128]:.2f}, because"]
    texts += [f"of {grpo.tail(32)[RATIO].mean():.2f} nats show"]
    says("learning rate ten times too large", *texts)


@pytest.mark.slow
def test_the_pictures_are_drawn_from_the_logs(tmp_path, monkeypatch):
    drawn = {}
    draw_row = curves.draw_row

    def keep(axes, name, last, **style):
        draw_row(axes, name, last, **style)
        drawn[name] = axes[2].get_lines()[-1].get_data()

    monkeypatch.setattr(curves, "draw_row", keep)
    monkeypatch.setattr(curves, "PICTURES", tmp_path)
    curves.main(reference=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken_dpo.png",
        "broken_grpo.png",
        "curves.png",
    ]
    assert len(drawn) == 10
    for name, (steps, values) in drawn.items():
        rows = read_rows(ROOT / "docs" / "reference" / f"{name}.jsonl.gz")
        np.testing.assert_array_equal(values, [row[RATIO] for row in rows if row["step"] <= steps[-1]])
