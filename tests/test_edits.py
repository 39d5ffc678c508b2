"""What an edit of a script must not break silently on several ranks."""

from conftest import PAIRS, metrics, run_ranks


def test_ranks_train_on_one_batch_and_report_every_metric_whatever_an_edit_does(tmp_path):
    """The edits: batches that are drawn at random on each rank, and metrics that only one rank adds."""
    flags = ["--dataset", PAIRS, "--batch-size", "8", "--num-steps", "3", "--eval-samples", "0"]
    flags += ["--checkpoint-every", "0", "--output-dir", str(tmp_path / "run")]
    run_ranks(2, [flags], worker="edits_worker.py")  # its second rank checks that the batches are equal
    for step in metrics(tmp_path / "run"):
        assert (step["extra/rank_0"], step["extra/rank_1"], step["extra/more"]) == (5.0, 7.0, 3.0)
        assert 0 <= step["humanline/clipped_low"] <= 1 and step["humanline/log_ratio_abs_mean"] < 1
