"""What a run leaves behind: final/, its dtype and ties, and the files beside it."""

import json
import shutil

import pytest
import torch
from conftest import PAIRS, TOY, metrics, run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

RUN = ["--dataset", PAIRS, "--num-steps", "3", "--batch-size", "8", "--warmup-fraction", "0"]
RUN += ["--checkpoint-every", "3"]
RUN += ["--lr", "1e-3", "--adam-eps", "1e-2", "--beta", "10", "--k", "16", "--max-new-tokens", "12"]
RUN += ["--engine", "hf"]
UNEVALUATED = [*RUN, "--eval-dataset", ""]
JUDGE = str(TOY / "reward_model")
METRICS = """loss grad_norm lr
rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected
humanline/clipped_low humanline/clipped_high humanline/log_ratio_abs_mean humanline/steps_since_sync
perf/step_time perf/tokens_per_second perf/peak_memory""".split()


@pytest.fixture(scope="module")
def bf16_policy(tmp_path_factory, tied_policy):
    folder = tmp_path_factory.mktemp("bf16")
    AutoModelForCausalLM.from_pretrained(tied_policy, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tied_policy).save_pretrained(folder)
    return str(folder)


def test_final_loads_with_the_dtype_and_the_ties_of_the_initial_model(tmp_path, bf16_policy):
    """And it is evaluated as exported: sampling from it agrees with the policy, or the run would stop."""
    evaluation = ["--eval-dataset", str(TOY / "prompts_test.jsonl.gz"), "--eval-samples", "32"]
    evaluation += ["--reward-model", JUDGE]
    run_ranks(2, [[*RUN, "--model", bf16_policy, *evaluation, "--output-dir", str(tmp_path / "run")]])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"eval/reward", "eval/win_rate"} <= set(summary["after"]) and "eval/margin" not in summary["after"]
    folder = tmp_path / "run" / "final"
    initial = AutoModelForCausalLM.from_pretrained(bf16_policy)
    final = AutoModelForCausalLM.from_pretrained(folder)
    assert type(final) is type(initial) and final.dtype == torch.bfloat16
    assert final.lm_head.weight.data_ptr() == final.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(final.lm_head.weight, initial.lm_head.weight)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_every_documented_metric_is_logged_from_step_0(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(1, [[*RUN, "--output-dir", str(tmp_path / "run")]])
    steps = metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [0, 1, 2] and all(set(METRICS) <= set(step) for step in steps)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    for key in METRICS:
        values = [event.value for event in events.Scalars(key)]
        assert values == pytest.approx([step[key] for step in steps], rel=1e-5)
    assert (tmp_path / "run" / "checkpoints" / "step-3" / "state.json").exists()


def test_sampling_defaults_of_the_model_neither_leak_nor_break_the_export(tmp_path):
    """A repetition penalty, or a temperature without do_sample, belongs to nobody's experiment."""
    odd = tmp_path / "odd"
    shutil.copytree(TOY / "policy", odd)
    defaults = json.loads((odd / "generation_config.json").read_text())
    defaults |= {"temperature": 0.9, "repetition_penalty": 5.0}
    (odd / "generation_config.json").write_text(json.dumps(defaults))
    judge = ["--reward-model", JUDGE, "--eval-dataset", PAIRS, "--eval-samples", "16", "--dtype", "float64"]
    for name, model in (("plain", str(TOY / "policy")), ("odd", str(odd))):
        run_ranks(1, [[*RUN, "--model", model, *judge, "--output-dir", str(tmp_path / name)]])
    plain, changed = ((tmp_path / name / "summary.json").read_text() for name in ("plain", "odd"))
    assert plain == changed
    assert "repetition_penalty" not in (tmp_path / "odd" / "final" / "generation_config.json").read_text()


def test_gradient_checkpointing_changes_nothing(tmp_path):
    kinds = ([], ["--gradient-checkpointing"])
    run_ranks(1, [[*UNEVALUATED, *flag, "--output-dir", str(tmp_path / f"{len(flag)}")] for flag in kinds])
    for plain, recomputed in zip(metrics(tmp_path / "0"), metrics(tmp_path / "1"), strict=True):
        assert recomputed["loss"] == pytest.approx(plain["loss"], rel=1e-9)
        assert recomputed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_compute_dtypes_train_the_same_curve(tmp_path, dtype):
    runs = [[*UNEVALUATED, "--dtype", d, "--output-dir", str(tmp_path / d)] for d in ("float64", dtype)]
    run_ranks(1, runs)
    tolerance = {"float32": 1e-4, "bfloat16": 0.15}[dtype]
    for exact, rounded in zip(metrics(tmp_path / "float64"), metrics(tmp_path / dtype), strict=True):
        assert rounded["loss"] == pytest.approx(exact["loss"], abs=tolerance)


def test_outputs_and_samples_tell_what_was_trained(tmp_path):
    prompts = ["for king", "for king", "for queen", "for king", "for boy", "for girl", "for queen", "for man"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    folder = tmp_path / "run"
    output = run_ranks(1, [[*RUN, "--eval-dataset", str(tmp_path / "p.jsonl"), "--output-dir", str(folder)]])
    outputs = json.loads((folder / "outputs.json").read_text())
    assert [row["instruction"] for row in outputs] == prompts
    assert {row["generator"] for row in outputs} == {"run"}
    shown = [line.removeprefix("prompt: ") for line in output.splitlines() if line.startswith("prompt: ")]
    assert shown == prompts[:4]
    after = [line for line in output.splitlines() if line.startswith("after: ")]
    first = [row["output"] for row in outputs[:4]]
    assert [line.removeprefix("after: ").partition("  [reward")[0] for line in after] == first
    summary = json.loads((folder / "summary.json").read_text())
    for key, (mean, error) in summary["after"].items():
        row = next(line for line in output.splitlines() if line.startswith(f"{key} "))
        assert row.endswith(f"{mean:10.3f} ± {error:7.3f}")


def test_without_evaluation_there_is_no_table_of_results(tmp_path):
    output = run_ranks(1, [[*UNEVALUATED, "--output-dir", str(tmp_path / "run")]])
    assert "standard error" not in output and "\nprompt: " not in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"before": {}, "after": {}}
    assert not (tmp_path / "run" / "outputs.json").exists()
