"""Sampling and scoring: engines, samples, the KL from the initial policy, and the one door of rewards."""

import copy
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import torch.distributed as dist
from helpers import (
    PAIRS,
    ROOT,
    SHARED,
    TOY,
    agree,
    finish,
    metrics,
    parse_args,
    read_pool,
    read_rows,
    run_here,
    run_main,
    run_ranks,
    start_ranks,
    write_rows,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import dpo_humanline
import grpo_humanline
import grpo_math_humanline
import utils
from paper import armorm
from support import run, sampling
from support.data import load_tokenizer
from utils import Example, InputError

POLICY = str(TOY / "policy")
CPU = torch.device("cpu")

# === Rewards enter at one door ===

FIVE = [1.5, -2.0, 0.1, 1e9 + 0.1, 0.0]
CONTAINERS = {
    "list": FIVE,
    "tuple": tuple(FIVE),
    "strides": np.array(FIVE[::-1])[::-1],  # negative
    "gradient": torch.tensor(FIVE, dtype=torch.float64, requires_grad=True),
    "tensors": [torch.tensor(number, dtype=torch.float64) for number in FIVE],
    "numpy": [np.float64(number) for number in FIVE],
    "series": pandas.Series(FIVE, index=[4, 3, 2, 1, 0]),  # in its order, not in that of its index
    "generator": (number for number in FIVE),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_rewards_keep_their_digits_and_order_in_any_container(name):
    rewards = sampling.as_rewards(CONTAINERS[name], 5)
    assert rewards.dtype == torch.float64 and rewards.tolist() == FIVE
    assert not rewards.requires_grad and rewards.device == CPU


@pytest.mark.parametrize(
    "values",
    [
        [1.0, math.nan, 1.0],
        torch.tensor([1.0, math.inf, -math.inf]),
        np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
        [1.0, 2.0],
        [1.0] * 4,
        [],
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rewards_that_are_not_one_finite_number_for_each_sample_are_refused(values):
    with pytest.raises(InputError, match="the rewards must be 3 finite numbers"):
        sampling.as_rewards(values, 3)


def test_a_function_cannot_change_the_order_of_the_samples(one_rank):
    """Its list was the run's own, so a sort gave the rewards to other samples."""

    def sorts(samples):
        return [len(sample.text) for sample in samples.sort()]

    with pytest.raises(AttributeError, match="sort"):
        sampling.function_rewards(sorts, [Example("", [1], [2], text=text) for text in ("ba", "a")])


# === Functions that give rewards in whole runs ===

ONLINE = ["--online", "--model", POLICY, "--dataset", PAIRS, "--eval-dataset", PAIRS, "--engine", "hf"]
ONLINE += "--reward-model= --eval-samples 2 --round-prompts 2 --batch-size 4 --group-size 2".split()
ONLINE += "--num-steps 3 --max-new-tokens 8 --checkpoint-every 0 --k 2".split()
ONLINE += ["--max-prompt-length", "64", "--max-length", "128"]  # the toy has 128 positions


def score_differently_and_fail(folder: str, calls: int, script, arguments):
    """Is a worker whose SCORE differs between ranks and calls, and fails in one of them."""
    rank = dist.get_rank() if dist.is_initialized() else None

    def score(samples):
        path = Path(folder) / "calls"
        with path.open("a") as file:
            file.write(f"{dist.get_rank()}\n")
        number = len(path.read_text().split())
        if number == calls:
            raise ConnectionError("no answer\nfrom the judge")
        return [len(sample.text) + 0.1 * number for sample in samples]

    assert rank is None
    script.SCORE = score
    run_main(script, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_that_fails_ends_all_ranks(tmp_path, ranks):
    """The other ranks waited. Call 3 is step 1's round."""
    third = partial(score_differently_and_fail, str(tmp_path), 3)
    processes = start_ranks(
        ranks, [[*ONLINE, "--output-dir", str(tmp_path / "run")]], third, "grpo_humanline"
    )
    outputs = finish(processes, timeout=200)
    assert all(process.exitcode for process in processes)
    assert set((tmp_path / "calls").read_text().split()) == {"0"}
    assert "in score" in outputs[0]  # the traceback of the function


JUDGES = """
import concurrent.futures, multiprocessing, os, time

os.register_at_fork(after_in_child=lambda: time.sleep(0.2))  # so that a signal finds the run's handlers

def one(text):
    return 0.1 * len(text)

def endless():
    while True:
        time.sleep(1)

def fork(samples):
    texts = [sample.text for sample in samples]
    with multiprocessing.Pool(2) as pool:
        rewards = pool.map(one, texts)
    process = multiprocessing.Process(target=endless)  # the usual time limit of a judge of programs
    process.start()
    process.terminate()
    process.join()
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        assert list(pool.map(one, texts)) == rewards
    return rewards

def spawn(samples):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(one, [sample.text for sample in samples])

SCORE = """


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_a_judge_may_start_and_end_processes(tmp_path, kind):
    """Forked processes inherited the run's handlers of signals, and could not be ended."""
    text = (ROOT / "grpo_humanline.py").read_text()
    assert text.count("SCORE = None\n") == 1
    (tmp_path / "judged.py").write_text(text.replace("SCORE = None\n", f"{JUDGES}{kind}\n"))
    for name in ("utils.py", "support", "toy"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, tmp_path / "judged.py", *ONLINE, "--eval-samples", "0", "--output-dir", "run"]
    command += ["--num-steps", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(metrics(tmp_path / "run")) == 1


def run_example(folder, monkeypatch, script, page: str, name: str, *flags) -> list[dict]:
    """Runs a script with a page's code block, which sets SCORE or GRADE, and returns the samples."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE
    )
    (block,) = (block for block in blocks if name in block)
    (folder / f"{script.__name__}_example.py").write_text(block)  # a module, which workers can import
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, f"{script.__name__}_example", raising=False)  # of another test
    example = importlib.import_module(f"{script.__name__}_example")
    for variable in ("SCORE", "GRADE"):
        if hasattr(example, variable):
            monkeypatch.setattr(script, variable, getattr(example, variable))
    flags = [*flags, "--engine", "hf", "--num-steps", "2", "--checkpoint-every", "0", "--eval-samples", "8"]
    return read_rows(run_here(script, *flags, "--output-dir", folder / "run") / "samples.jsonl")


@pytest.mark.slow
def test_the_pages_function_gives_the_rewards_of_online_grpo(tmp_path, monkeypatch):
    flags = "--online --reward-model= --round-prompts 16 --batch-size 8 --max-new-tokens 20".split()
    samples = run_example(tmp_path, monkeypatch, grpo_humanline, "grpo.md", "SCORE = short", *flags)
    answers = [sample for sample in samples if sample["greedy"]]
    for answer in answers:
        assert answer["reward"] == pytest.approx(answer["finished"] - 0.1 * answer["tokens"], abs=1e-6)
    assert all(sample["reward"] is None for sample in samples if not sample["greedy"])
    assert metrics(tmp_path / "run")[0]["grad_norm"] > 0


def test_a_function_reads_another_column_of_the_row(tmp_path, monkeypatch):
    def has_words(samples):
        return [sum(word in sample.text for word in sample.row["words"]) for sample in samples]

    monkeypatch.setattr(grpo_humanline, "SCORE", has_words)
    words = [["rose"], ["iris", "lily"], ["fern", "rose", "tulip"], ["daisy"]]
    names = ("king", "queen", "boy", "girl")
    rows = [{"prompt": f"for {name}", "words": words} for name, words in zip(names, words)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    flags = [*ONLINE, "--dataset", data, "--eval-dataset", data, "--max-new-tokens", "12"]
    flags += ["--round-prompts", "4", "--samples-per-prompt", "8", "--eval-samples", "8", "--num-steps", "2"]
    samples = read_rows(run_here(grpo_humanline, *flags, "--output-dir", tmp_path / "run") / "samples.jsonl")
    columns = {row["prompt"]: row["words"] for row in rows}
    answers = [sample for sample in samples if sample["greedy"]]
    for answer in answers:
        assert answer["reward"] == sum(word in answer["sample"] for word in columns[answer["prompt"]])
    assert any(answer["reward"] for answer in answers)


def test_a_function_scores_greedy_answers_and_a_reward_model_scores_samples(one_rank):
    sampler, prompts = make_sampler("--max-new-tokens", "6")
    groups = [(prompt,) for prompt in prompts]
    policy, reference = sharded(), sharded()
    initial_weights = sampling.copy_weights(reference)
    asked = []

    def length(samples):
        asked.extend(samples)
        return torch.tensor([float(len(sample.completion_ids) + sample.finished) for sample in samples])

    sampler.rewards = length
    for score in (None, length):  # a reward model; a function
        sampler.score = score
        asked.clear()
        samples, answers, _ = sampler.evaluate(policy, reference, initial_weights, groups, None)
        baseline = utils.Evaluation({}, samples, answers)
        disturb(policy, 1)
        samples, answers, values = sampler.evaluate(policy, reference, initial_weights, groups, baseline)
        counted, before = (answers, baseline.answers) if score else (samples, baseline.samples)
        rewards = [text.reward for text in counted]
        assert values["eval/reward"].tolist() == rewards
        assert values["eval/length"].tolist() == [len(text.completion_ids) for text in counted]
        pairs = zip(rewards, (text.reward for text in before))
        assert values["eval/win_rate"].tolist() == [(new > old) + 0.5 * (new == old) for new, old in pairs]
        assert asked == [text._replace(reward=None) for text in before + counted]
        assert [text.text for text in answers] != [text.text for text in samples]


@pytest.mark.slow
def test_the_pages_function_grades_in_grpo_math(tmp_path, monkeypatch):
    rows = read_rows(ROOT / "toy/shell_game/problems_train.jsonl.gz")[:16]
    data = write_rows(tmp_path / "data.jsonl", rows)
    flags = ["--prompts-per-step", "4", "--model", ROOT / "toy/shell_game/policy", "--system-prompt", ""]
    flags += ["--dataset", data, "--eval-dataset", data, "--max-new-tokens", "16"]
    samples = run_example(tmp_path, monkeypatch, grpo_math_humanline, "grpo_math.md", "GRADE =", *flags)
    # No sample of the toy ends with "= N", so nothing is right, and only the format is rewarded.
    assert len(samples) == 16 and max(sample["reward"] for sample in samples) <= 2


# === Reward models ===


@pytest.fixture(scope="module")
def reward_model():
    return sampling.load_reward_model(
        dpo_humanline.Args(reward_model=str(TOY / "reward_model"), max_length=128)
    )


def test_a_reward_model_reads_the_rendered_conversation_and_its_last_token(one_rank, reward_model):
    """Against one forward pass for each conversation. Unfinished samples have no end of turn."""
    model, tokenizer = reward_model
    samples = [
        Example("for king", [], text="rose lily", finished=True),
        Example("for queen", [], text="fern", finished=False),
        Example("for boy", [], text="aster iris tulip daisy", finished=True),
    ]
    for part in ("end", "<", "|"):  # of the end of a turn, which is not there
        samples.append(Example("for king", [], text=part, finished=False))
    expected = []
    for sample in samples:
        text = f"<|user|> {sample.prompt} <|end|> <|assistant|> {sample.text}"
        if sample.finished:
            text += " <|end|>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            expected.append(model(input_ids=ids).logits.item())
    pad_id = model.config.pad_token_id
    for model.config.pad_token_id in (None, pad_id):  # a model without a pad token reads one by one
        scores = sampling.model_rewards(model, tokenizer, CPU, False, samples)
        assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_may_drop_the_thought_of_an_unfinished_sample(reward_model):
    """transformers finds no end of such a message, and the run ended."""
    tokenizer = copy.deepcopy(reward_model[1])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}.{% endfor %}"
    sample = Example("for king", [], text="a lily</think>rose", finished=False)
    assert sampling.reward_input(tokenizer, True, sample) == "for king.rose."


SCORED = [Example("for king", [], text="rose " * number, finished=True) for number in range(1, 6)]


def score_in_rank(script, arguments):
    """Is a worker that prints the rewards that a rank gets."""
    dist.init_process_group("gloo")
    sampling.REWARD_TOKENS = 12  # every sample is a batch, so both ranks have some
    model, tokenizer = sampling.load_reward_model(parse_args(script, arguments))
    print(json.dumps(sampling.model_rewards(model, tokenizer, CPU, False, SCORED).tolist()))
    dist.barrier()
    dist.destroy_process_group()


def test_every_rank_has_the_rewards_of_all_samples(one_rank, reward_model):
    expected = sampling.model_rewards(*reward_model, CPU, False, SCORED).tolist()
    flags = ["--reward-model", f"{TOY}/reward_model"]
    for output in finish(start_ranks(2, [flags], score_in_rank)):
        assert json.loads(output.splitlines()[-1]) == pytest.approx(expected, abs=1e-5)


OWN_CODE = """
from types import SimpleNamespace
from transformers import LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LLAMA_INPUTS_DOCSTRING  # as in ArmoRM's code

class Own(LlamaForSequenceClassification):
    def forward(self, **inputs):
        logits = super().forward(**inputs).logits
        return SimpleNamespace(logits=logits.expand(-1, 19), score=2 * logits[:, 0])
"""


def test_the_score_of_a_reward_model_with_its_own_code_is_used(one_rank, reward_model, tmp_path):
    shutil.copytree(TOY / "reward_model", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "modeling_own.Own"}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "modeling_own.py").write_text(OWN_CODE)
    armorm.repair(tmp_path / "own")
    args = dpo_humanline.Args(reward_model=str(tmp_path / "own"), trust_remote_code=True, max_length=128)
    samples = [Example("for king", [], text="rose"), Example("for boy", [], text="iris")]
    own, plain = (
        sampling.model_rewards(*loaded, CPU, False, samples)
        for loaded in (sampling.load_reward_model(args), reward_model)
    )
    assert own.tolist() == pytest.approx((2 * plain).tolist()) and plain[0] != plain[1]


# === Samples ===

FLAGS = ["--model", POLICY, "--dataset", PAIRS, "--engine", "hf", "--max-new-tokens", "12"]


def make_sampler(*flags):
    args = parse_args(dpo_humanline, [*FLAGS, *flags])
    args.dtype = "float32"
    tokenizer, eos_ids = load_tokenizer(args)
    prompts = []
    for row in read_rows(PAIRS)[:8]:
        prompts.append(dpo_humanline.encode_row(args, tokenizer, eos_ids, row)[0])
    return sampling.Sampler(args, tokenizer, eos_ids, CPU), prompts


def sharded():
    return fully_shard(AutoModelForCausalLM.from_pretrained(POLICY), reshard_after_forward=True)


@torch.no_grad()
def disturb(model, seed: int):
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        local = parameter.to_local()
        local += 0.05 * torch.randn(local.shape, generator=noise)


def plain_copy(model):
    """Returns an unsharded copy in float64."""
    copy = AutoModelForCausalLM.from_pretrained(POLICY)
    copy.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    return copy.double()


@torch.no_grad()
def summed_logps(model, sample) -> float:
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return logps[len(sample.prompt_ids) - 1 :].sum().item()


def test_eval_kl_is_the_log_ratio_to_the_initial_policy_and_the_reference_is_as_before(one_rank):
    """Against plain models in float64. The reference is neither the policy nor the initial one by then."""
    sampler, prompts = make_sampler()
    groups = [(prompt,) for prompt in prompts]
    policy, reference = sharded(), sharded()
    initial_weights = sampling.copy_weights(reference)
    samples, _, values = sampler.evaluate(policy, reference, initial_weights, groups, None)
    assert values["eval/kl"].tolist() == [0] * 8
    initial = plain_copy(policy)
    disturb(policy, 1)
    disturb(reference, 2)
    before = [parameter.to_local().clone() for parameter in reference.parameters()]
    baseline = utils.Evaluation({}, samples)
    samples, _, values = sampler.evaluate(policy, reference, initial_weights, groups, baseline)
    trained = plain_copy(policy)
    expected = [summed_logps(trained, sample) - summed_logps(initial, sample) for sample in samples]
    assert values["eval/kl"].tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) > 0.1
    assert all(torch.equal(p.to_local(), old) for p, old in zip(reference.parameters(), before))


def test_answers_are_greedy_and_end_with_an_eos_token_or_are_unfinished(one_rank):
    """The engine has the weights of the last update, which shows in greedy answers."""
    sampler, prompts = make_sampler("--max-new-tokens", "6")
    policy = sharded()
    for seed in (1, 2):
        disturb(policy, seed)
        plain = plain_copy(policy)
        groups, logged = sampler.sample(policy, prompts, 2, None)
        for prompt, (one, two) in zip(prompts, groups, strict=True):
            assert one == two and one.prompt == prompt.prompt
            ids = list(one.completion_ids)
            assert one.finished == (ids[-1] in sampler.eos_ids) and len(ids) <= 6
            logits = plain(torch.tensor([[*prompt.prompt_ids, *ids]])).logits[
                0, len(prompt.prompt_ids) - 1 : -1
            ]
            assert logits.argmax(-1).tolist() == ids
            text = sampler.tokenizer.decode(ids[:-1] if one.finished else ids)
            assert one.text == text and one.reward is None
        lengths = [len(sample.completion_ids) for group in groups for sample in group]
        assert logged["rollout/length_mean"] == pytest.approx(np.mean(lengths))


def test_an_engine_with_other_weights_is_refused(one_rank):
    """vLLM's log-probs of some samples must be the policy's."""
    sampler, prompts = make_sampler()
    policy = sharded()
    plain = plain_copy(policy)
    (samples, _) = sampler.sample(policy, prompts[:2], 1, (1, 1))
    checked = []
    for (sample,) in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        with torch.no_grad():
            logps = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).flatten()
        checked.append((sample, logps[len(sample.prompt_ids) - 1 :].tolist()))
    assert sampler.check_engine(policy, checked) < 1e-6
    disturb(policy, 3)
    with pytest.raises(InputError, match="the engine's model is not the policy"):
        sampler.check_engine(policy, checked)
    checked[0][1][0] = math.nan
    with pytest.raises(InputError, match="nan nats apart"):
        sampler.check_engine(policy, checked)


# === Ranks ===

ROUNDS = ["--online", "--engine", "hf", "--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "4"]
ROUNDS += "--k 3 --round-prompts 20 --batch-size 8 --num-steps 3 --max-new-tokens 12".split()
ROUNDS += "--checkpoint-every 0 --warmup-fraction 0".split()


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds") / "run"
    run_here(dpo_humanline, *ROUNDS, "--output-dir", folder)
    return folder


def with_shared_engines(script, arguments):
    """Is a worker with engines that two ranks share, as vLLM's do under --vllm-tensor-parallel 2."""
    generate = sampling.TransformersEngine.generate

    def generate_alike(engine, batches):
        ranks_batches = run.gather(batches)
        rank = dist.get_rank()
        assert ranks_batches[rank] == ranks_batches[rank - rank % 2] and ranks_batches[0] != ranks_batches[2]
        return generate(engine, batches)

    sampling.TransformersEngine.ranks = 2
    sampling.TransformersEngine.generate = generate_alike
    run_main(script, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "worker"), [(2, run_main), (4, with_shared_engines)])
def test_any_number_of_ranks_and_engines_samples_the_same(rounds, tmp_path, ranks, worker):
    """No prompt is lost or drawn twice, rewards belong to their samples, and the KL is the same."""
    run_ranks(ranks, [[*ROUNDS, "--output-dir", str(tmp_path / "run")]], worker)
    steps, others = metrics(rounds, True), metrics(tmp_path / "run", True)
    agree(steps, others, [key for key in steps[0] if key.startswith("rollout/")], rel=1e-6)
    agree(steps, others, abs=1e-5)
    one, more = (json.loads((folder / "summary.json").read_text()) for folder in (rounds, tmp_path / "run"))
    assert more["after"]["eval/kl"] == pytest.approx(one["after"]["eval/kl"], abs=1e-6)
    assert one["before"]["eval/win_rate"] == [0.5, 0.0, 4] and one["after"]["eval/kl"][0] != 0


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_a_real_model_and_real_prompts_go_through_a_round(tmp_path):
    questions = read_rows(SHARED / "mt_bench" / "question.jsonl")
    prompts = write_rows(tmp_path / "prompts.jsonl", ({"prompt": row["turns"][0]} for row in questions))
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "model-stories260K")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    judge = LlamaForSequenceClassification(LlamaConfig(vocab_size=512, num_labels=1, **sizes))
    judge.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")  # no chat template and no pad token
    flags = ["--online", "--engine", "hf", "--model", SHARED / "model-stories260K", "--lr", "1e-3"]
    flags += ["--reward-model", tmp_path / "rm", "--dataset", prompts, "--eos-token", "<s>"]
    flags += "--max-prompt-length 60 --max-new-tokens 150 --max-length 200 --round-prompts 6".split()
    flags += "--samples-per-prompt 4 --batch-size 4 --num-steps 1 --temperature 1".split()
    flags += ["--reward-threshold", "1e-6", "--checkpoint-every", "1"]
    run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "run")
    (line,) = metrics(tmp_path / "run")
    assert 0 < line["rollout/finished_mean"] <= 1
    for sample in (sample for pair in read_pool(tmp_path / "run", 1) for sample in pair):
        ids = list(sample.completion_ids)
        assert not {1, 2} & set(ids[:-1])  # nothing goes on after the end of the story
        assert ids[-1] in (1, 2) or len(ids) == min(150, 200 - len(sample.prompt_ids))
    final = json.loads((tmp_path / "run" / "final" / "generation_config.json").read_text())
    assert 1 in final["eos_token_id"]
