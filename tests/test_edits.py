"""What an edit of a script must not break silently on several ranks."""

from types import SimpleNamespace

import pytest
import torch
from conftest import PAIRS, metrics, run_ranks

from support import run


def test_ranks_train_on_one_batch_and_report_every_metric_whatever_an_edit_does(tmp_path):
    """The edits: batches that are drawn at random on each rank, and metrics that only one rank adds."""
    flags = ["--dataset", PAIRS, "--batch-size", "8", "--num-steps", "3", "--eval-samples", "0"]
    flags += ["--checkpoint-every", "0", "--output-dir", str(tmp_path / "run")]
    run_ranks(2, [flags], worker="edits_worker.py")  # its second rank checks that the batches are equal
    for step in metrics(tmp_path / "run"):
        assert (step["extra/rank_0"], step["extra/rank_1"], step["extra/more"]) == (5.0, 7.0, 3.0)
        assert 0 <= step["humanline/clipped_low"] <= 1 and step["humanline/log_ratio_abs_mean"] < 1


@pytest.mark.parametrize("damaged", [False, True])
def test_a_weight_whose_first_gradient_comes_after_a_resume_trains_as_in_a_whole_run(
    damaged, tmp_path, one_rank
):
    """Such as an expert that no token has reached yet. Its moments came back with a step too many.

    damaged: a later checkpoint, which has its moments, is read in part.
    """

    def start():
        torch.manual_seed(0)
        policy = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("early", "late")})
        return policy, torch.nn.Linear(2, 2), torch.optim.AdamW(policy.parameters(), lr=0.1)

    def train(policy, optimizer, names):
        sum(policy[name](torch.ones(1, 2)).pow(2).sum() for name in names).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, reference, optimizer = start()
    train(whole, optimizer, ["early"])
    args = SimpleNamespace(keep_checkpoints=2)
    run.save_checkpoint(args, tmp_path, whole, reference, optimizer, run.Progress("hash", step=1))
    resumed, *others = start()
    if damaged:
        later, later_reference, later_optimizer = start()
        for names in (["early"], ["early", "late"]):
            train(later, later_optimizer, names)
        run.save_checkpoint(
            args, tmp_path, later, later_reference, later_optimizer, run.Progress("hash", step=2)
        )
        run.restore(tmp_path / "checkpoints/step-2", resumed, *others)
        (tmp_path / "checkpoints/step-2/progress.json").unlink()
    assert run.load_checkpoint(tmp_path, resumed, *others, "hash").step == 1
    for policy, its_optimizer in ((whole, optimizer), (resumed, others[1])):
        for _ in range(2):
            train(policy, its_optimizer, ["early", "late"])
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name)), name


def test_a_run_that_ends_before_its_first_step_writes_no_checkpoint(tmp_path, one_rank):
    """Its optimizer has no moments yet; those of a checkpoint would have counted a step."""
    policy = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(policy.parameters())
    args = SimpleNamespace(keep_checkpoints=2)
    run.save_checkpoint(args, tmp_path, policy, torch.nn.Linear(2, 2), optimizer, run.Progress("hash"))
    assert list(tmp_path.iterdir()) == [] and not optimizer.state
