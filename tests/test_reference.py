"""Which policy the reference is at every step, bit for bit, and what a sync costs."""

import json

import pytest
from conftest import PAIRS, TOY, metrics, run_ranks

STEPS = 7
RUN = ["--num-steps", str(STEPS), "--batch-size", "4", "--warmup-fraction", "0", "--dataset", PAIRS]
RUN += ["--checkpoint-every", "0", "--eval-dataset", "", "--lr", "1e-3", "--adam-eps", "1e-2", "--beta", "10"]
RUN += ["--max-new-tokens", "64"]
NEVER = [0, 1, 2, 3, 4, 5, 6]
AGES = {  # so many steps before was the policy what the reference is
    "k1": (["--k", "1"], [0, 1, 1, 1, 1, 1, 1]),
    "k3": (["--k", "3"], [0, 1, 2, 3, 1, 2, 3]),
    "no humanline": (["--no-humanline", "--k", "1"], NEVER),
    "k0": (["--k", "0"], NEVER),
}


@pytest.fixture(scope="module", params=["untied", "tied"])
def recorded(request, tmp_path_factory, tied_policy):
    """{variant: (steps of {policy, reference, ...} digests, metrics)} of real runs on two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    model = str(TOY / "policy") if request.param == "untied" else tied_policy
    runs = []
    for name, (flags, _) in AGES.items():
        runs.append([*RUN, "--model", model, *flags, "--output-dir", str(folder / name)])
    run_ranks(2, runs, worker="recording_worker.py")
    found = {}
    for name in AGES:
        record = json.loads((folder / name / "record.json").read_text())
        found[name] = (record, metrics(folder / name))
    return found


@pytest.mark.parametrize("variant", AGES)
def test_reference_is_the_policy_of_the_expected_step(recorded, variant):
    record, _ = recorded[variant]
    _, ages = AGES[variant]
    assert len({step["policy_weights"] for step in record}) == STEPS  # it moves every step
    for t, age in enumerate(ages):
        source = record[t - age]
        assert record[t]["reference_weights"] == source["policy_weights"], t  # embedding and head included
        assert record[t]["reference_logps"] == source["policy_logps"], t


def test_a_log_ratio_is_zero_where_the_reference_is_the_policy_and_only_there(recorded):
    for name, (_, logged) in recorded.items():
        for step, age in zip(logged, AGES[name][1]):
            assert (step["humanline/log_ratio_abs_mean"] == 0) == (age == 0), (name, step["step"])


def test_a_sync_communicates_nothing(recorded):
    syncs = {"k1": 7, "k3": 3}
    for name, (record, _) in recorded.items():
        assert all(step["sync_collectives"] == 0 for step in record), name
        assert all(step["forward_collectives"] > 0 for step in record), name  # the counter does count
        assert sum(step["syncs"] for step in record) == syncs.get(name, 0)
