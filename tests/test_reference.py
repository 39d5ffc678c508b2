"""Which policy the reference is at every step, bit for bit, and what a sync costs."""

import json

import pytest
from conftest import PAIRS, TOY, metrics, run_ranks

STEPS = 5
RUN = ["--num-steps", str(STEPS), "--batch-size", "4", "--warmup-fraction", "0", "--dataset", PAIRS]
RUN += ["--checkpoint-every", "0", "--eval-dataset", "", "--lr", "1e-3", "--adam-eps", "1e-2", "--beta", "10"]
EXPECTED = {  # the step whose policy, before its update, is the reference at step t
    "k1": (["--k", "1"], lambda t: max(t - 1, 0)),
    "k2": (["--k", "2"], lambda t: max(t - 1, 0) // 2 * 2),
    "offline": (["--no-humanline", "--sync", "before_step"], lambda t: 0),
    "sync none": (["--sync", "none"], lambda t: 0),
    "after_step k1": (["--k", "1", "--sync", "after_step"], lambda t: t),
    "after_step k2": (["--k", "2", "--sync", "after_step"], lambda t: t // 2 * 2),
}


@pytest.fixture(scope="module", params=["untied", "tied"])
def recorded(request, tmp_path_factory, tied_policy):
    """{variant: (steps of {policy, reference, ...} digests, metrics)} of real runs on two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    model = str(TOY / "policy") if request.param == "untied" else tied_policy
    runs = []
    for name, (flags, _) in EXPECTED.items():
        runs.append([*RUN, "--model", model, *flags, "--output-dir", str(folder / name)])
    run_ranks(2, runs, worker="recording_worker.py")
    found = {}
    for name in EXPECTED:
        record = json.loads((folder / name / "record.json").read_text())
        found[name] = (record, metrics(folder / name))
    return found


@pytest.mark.parametrize("variant", EXPECTED)
def test_reference_is_the_policy_of_the_expected_step(recorded, variant):
    record, _ = recorded[variant]
    assert len(record) == STEPS
    assert len({step["policy_weights"] for step in record}) == STEPS  # it moves every step
    for t, step in enumerate(record):
        source = record[EXPECTED[variant][1](t)]
        assert step["reference_weights"] == source["policy_weights"], t  # embedding and head included
        assert step["reference_logps"] == source["policy_logps"], t
        assert step["reference_passes"] == (step["reference_weights"] != step["policy_weights"]), t


def test_steps_since_sync_tells_the_age_of_the_reference(recorded):
    for name, (_, age) in EXPECTED.items():
        expected = [t - age(t) for t in range(STEPS)]
        assert [step["humanline/steps_since_sync"] for step in recorded[name][1]] == expected, name


def test_after_step_syncing_at_k1_leaves_every_log_ratio_at_zero(recorded):
    assert all(step["humanline/log_ratio_abs_mean"] == 0 for step in recorded["after_step k1"][1])
    assert all(step["humanline/log_ratio_abs_mean"] > 0 for step in recorded["k1"][1][1:])


def test_a_sync_communicates_nothing(recorded):
    for name, (record, _) in recorded.items():
        assert all(step["sync_collectives"] == 0 for step in record), name
        assert all(step["forward_collectives"] > 0 for step in record), name  # the counter does count
        if "none" not in name and name != "offline":
            assert sum(step["syncs"] for step in record) >= 2, name


def test_no_humanline_overrides_the_ablation_flags(tmp_path):
    flags = ["--clip", "sample", "--sync", "after_step", "--k", "1", "--log-epsilon-R", "1e-9"]
    runs = {"plain": ["--no-humanline"], "flags": ["--no-humanline", *flags]}
    run_ranks(1, [[*RUN, *own, "--output-dir", str(tmp_path / name)] for name, own in runs.items()])
    plain, steps = metrics(tmp_path / "plain"), metrics(tmp_path / "flags")
    assert [step["humanline/steps_since_sync"] for step in steps] == list(range(STEPS))
    # Had there been clipping, it would show.
    assert all(step["humanline/clipped_high"] > 0.3 for step in steps[1:])
    for key in ("loss", "grad_norm", "rewards/margins", "humanline/log_ratio_abs_mean"):
        assert [step[key] for step in steps] == [step[key] for step in plain], key
