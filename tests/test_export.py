"""What a run leaves behind: metrics, results, and final/, its dtype and ties."""

import json
import shutil

import pytest
import torch
from conftest import PAIRS, TOY, metrics, run_ranks
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

RUN = ["--dataset", PAIRS, "--num-steps", "3", "--batch-size", "8", "--warmup-fraction", "0"]
RUN += ["--lr", "1e-3", "--adam-eps", "1e-2", "--beta", "10", "--k", "16", "--max-new-tokens", "12"]
JUDGE = str(TOY / "reward_model")
METRICS = """loss grad_norm lr
rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected
humanline/clipped_low humanline/clipped_high humanline/log_ratio_abs_mean
perf/step_time perf/tokens_per_second perf/peak_memory""".split()


def test_final_loads_with_the_dtype_and_the_ties_of_the_initial_model(tmp_path, tied_policy):
    """And it is evaluated as exported: sampling from it agrees with the policy, or the run would stop."""
    initial = AutoModelForCausalLM.from_pretrained(tied_policy, dtype=torch.bfloat16)
    model = str(shutil.copytree(tied_policy, tmp_path / "model"))
    initial.save_pretrained(model)
    evaluation = ["--eval-dataset", str(TOY / "prompts_test.jsonl.gz"), "--eval-samples", "32"]
    evaluation += ["--reward-model", JUDGE]
    run_ranks(2, [[*RUN, "--model", model, *evaluation, "--output-dir", str(tmp_path / "run")]])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"eval/reward", "eval/win_rate"} <= set(summary["after"]) and "eval/margin" not in summary["after"]
    folder = tmp_path / "run" / "final"
    final = AutoModelForCausalLM.from_pretrained(folder)
    assert type(final) is type(initial) and final.dtype == torch.bfloat16
    assert final.lm_head.weight.data_ptr() == final.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(final.lm_head.weight, initial.lm_head.weight)
    files = [load_file(path / "model.safetensors") for path in (tmp_path / "model", folder)]
    assert files[0].keys() == files[1].keys()  # the tied head was written a second time
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder).chat_template


SAMPLED = ("eval/length", "eval/finished", "eval/reward", "eval/win_rate")


def test_every_documented_metric_and_both_evaluations_are_in_tensorboard(tmp_path):
    flags = ["--eval-dataset", PAIRS, "--eval-samples", "8", "--output-dir", str(tmp_path)]
    output = run_ranks(1, [[*RUN, *flags]])
    steps = metrics(tmp_path)
    assert [step["step"] for step in steps] == [0, 1, 2] and all(set(METRICS) <= set(step) for step in steps)
    events = EventAccumulator(str(tmp_path)).Reload()
    for key in METRICS:
        values = [event.value for event in events.Scalars(key)]
        assert values == pytest.approx([step[key] for step in steps], rel=1e-5)
    before, after, change = json.loads((tmp_path / "summary.json").read_text()).values()
    assert {"eval/loss", "eval/accuracy", "eval/margin", "eval/reward", "eval/win_rate"} <= set(after)
    for key, (mean, error, count) in after.items():
        values = {event.step: event.value for event in events.Scalars(key)}
        assert values == pytest.approx({0: before[key][0], 3: mean}, rel=1e-5)
        row = next(line for line in output.splitlines() if line.startswith(f"{key} "))
        columns = f"{mean:10.3f} ± {error:7.3f}{change[key][0]:10.3f} ± {change[key][1]:7.3f}"
        assert row.endswith(f"{columns}   n = {count}")
        assert count == (8 if key in SAMPLED else 128)


def test_sampling_defaults_of_the_model_neither_leak_nor_break_the_export(tmp_path):
    """A repetition penalty, or a temperature without do_sample, belongs to nobody's experiment."""
    odd = shutil.copytree(TOY / "policy", tmp_path / "odd model")
    defaults = json.loads((odd / "generation_config.json").read_text())
    defaults |= {"temperature": 0.9, "repetition_penalty": 5.0}
    (odd / "generation_config.json").write_text(json.dumps(defaults))
    judge = ["--reward-model", JUDGE, "--eval-dataset", PAIRS, "--eval-samples", "16", "--dtype", "float64"]
    models = {"plain": str(TOY / "policy"), "odd": str(odd)}
    runs = [[*RUN, "--model", models[name], *judge, "--output-dir", str(tmp_path / name)] for name in models]
    run_ranks(1, runs)
    plain, changed = ((tmp_path / name / "summary.json").read_text() for name in models)
    assert plain == changed
    assert "repetition_penalty" not in (tmp_path / "odd" / "final" / "generation_config.json").read_text()


def test_recomputed_activations_and_other_dtypes_train_the_same_curve(tmp_path):
    kinds = {  # flags and how far the loss may be from that of fp64
        "exact": ([], 0),
        "recomputed": (["--gradient-checkpointing"], 1e-9),
        "fp32": (["--dtype", "float32"], 1e-4),
        "bf16": (["--dtype", "bfloat16"], 0.15),
    }
    run = [*RUN, "--eval-dataset", ""]
    run_ranks(1, [[*run, *flags, "--output-dir", str(tmp_path / name)] for name, (flags, _) in kinds.items()])
    assert json.loads((tmp_path / "exact" / "summary.json").read_text()) == {
        "before": {},
        "after": {},
        "change": {},
    }
    for name, (_, tolerance) in kinds.items():
        for exact, step in zip(metrics(tmp_path / "exact"), metrics(tmp_path / name), strict=True):
            assert step["loss"] == pytest.approx(exact["loss"], abs=tolerance)
