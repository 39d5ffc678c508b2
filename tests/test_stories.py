"""Tests toy/stories.py and paper/frontier.py: the judge, the sampling, and the files of toy/stories."""

import json
import random

import pytest
import torch
from conftest import ROOT, read_rows, run_ranks
from test_paper_figures import plain_logps
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import grpo_humanline
from paper import frontier
from support import data, sampling
from toy import stories

FOLDER = ROOT / "toy" / "stories"


def rows_of(name: str) -> list[dict]:
    return read_rows(FOLDER / f"{name}.jsonl.gz")


@pytest.fixture(scope="module")
def policy():
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "policy").eval()
    return model, AutoTokenizer.from_pretrained(FOLDER / "policy")


def test_the_judge_is_vaders_mean_over_sentences():
    happy, sad = (stories.sentiment(text)["compound"] for text in ("She was happy.", "He was sad."))
    assert (happy, sad) == (0.5719, -0.4767)  # VADER 3.3.2
    assert stories.judge_story("A prompt that is sad", " She was happy.") == happy
    assert stories.judge_story("", " She was happy. He was sad.") == pytest.approx((happy + sad) / 2)
    assert stories.judge_story("", " She was happy.\nIt was a dog. ") == pytest.approx(happy / 2)
    # The last sentence of an unfinished completion counts 0.
    cut = stories.judge_story("", " She was happy. He was sad", finished=False)
    assert cut == pytest.approx(happy / 2)
    for text in (" She was happy", " She was happy.", "", " ", "\n"):
        assert stories.judge_story("She was happy.", text, finished=False) == 0.0
    for empty in ("", " ", "\n"):
        assert stories.judge_story("She was happy.", empty) == 0.0


def test_sentences_and_trigrams():
    text = ' and "Hi!" said Tim. "Wow, a dog!" Tom ran... He fell! and cried.'
    wanted = ['and "Hi!" said Tim.', '"Wow, a dog!"', "Tom ran...", "He fell! and cried."]
    assert stories.sentences(text) == wanted
    assert stories.distinct_trigrams(["a b c", "A b, c.", "a b d"]) == pytest.approx(2 / 3)
    assert stories.distinct_trigrams(["a b", ""]) == 0.0


def test_labels_agree_with_the_judge_as_often_as_the_scale_says():
    gaps = [random.Random(i).gauss(0, 0.4) for i in range(2000)]
    tau = stories.find_scale(gaps)
    assert torch.sigmoid(torch.tensor(gaps).abs() / tau).mean() == pytest.approx(0.8, abs=1e-6)
    answers = [("", " She was happy.", " He was sad.")] * 2000
    pairs = stories.label(random.Random(0), answers, tau=1.0486)  # the gap, so P(chosen) is sigmoid(1)
    chosen = sum(pair["chosen"] == " She was happy." for pair in pairs) / 2000
    assert chosen == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.03)


def test_a_checkpoints_point_is_that_of_a_run_that_ends_there(tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "DRAWS", 1)
    folders = {steps: tmp_path / str(steps) for steps in (1, 2)}
    flags = f"--model {FOLDER}/policy --dataset {FOLDER}/preferences_test.jsonl.gz --engine hf --lr 1e-3"
    flags += " --dtype float32 --max-prompt-length 32 --max-length 96 --max-new-tokens 48 --batch-size 16"
    flags += " --warmup-fraction 0 --checkpoint-every 1"
    starts = [f"{flags} --num-steps {steps} --output-dir {folders[steps]}" for steps in folders]
    run_ranks(1, [start.split() for start in starts], script="grpo_humanline")
    points = []
    for folder in folders.values():
        frontier.main(folder)
        points.append(json.loads((folder / "frontier.json").read_text()))
    one, two = points
    assert list(two) == ["0", "1", "2"] and one == {step: two[step] for step in ("0", "1")}
    assert abs(two["0"]["kl"]) < 1e-4 and 0.1 < two["1"]["kl"] < two["2"]["kl"]


def test_a_point_is_what_plain_transformers_finds_in_the_samples(policy, monkeypatch):
    """Judge, finished and fluency come from the first samples, KL from the second, by the sampled ids."""
    initial, tokenizer = policy
    model, _ = stories.load_base()
    prompts = [row["prompt"] for row in rows_of("prompts_test")[:8]]
    drawn = []
    sample_ids = stories.sample_ids

    def sample_and_note(*args, **how):
        completions = sample_ids(*args, **how)
        drawn.append((how, completions))
        return completions

    monkeypatch.setattr(stories, "sample_ids", sample_and_note)
    point = frontier.measure(model, initial, tokenizer, prompts)
    (how, first), (plain, second) = drawn
    assert (how, plain) == ({"temperature": 0.7, "top_p": 0.95}, {}) and len(first) == len(second) == 8
    rows = stories.as_rows(tokenizer, prompts, first)
    assert point["judge"] == pytest.approx(sum(stories.judge_story(*row) for row in rows) / 8)
    assert point["finished"] == sum(row[2] for row in rows) / 8

    def total(folder, completions) -> float:
        """Returns the log-prob of all completions."""
        logps = []
        for prompt, completion in zip(prompts, completions):
            ids = tokenizer(prompt).input_ids
            logps += plain_logps(folder, ids + completion, len(ids))
        return sum(logps)

    before = total(FOLDER / "policy", first)
    assert point["fluency"] == pytest.approx(before / sum(map(len, first)), abs=1e-4)
    kl = total(stories.BASE, second) - total(FOLDER / "policy", second)
    assert point["kl"] == pytest.approx(kl / 8, abs=1e-3)


def test_a_prompt_that_loses_a_space_is_not_chosen(policy):
    """No completion of this prompt would be usable, so drawing pairs would never end."""
    _, tokenizer = policy
    opening = "One day, a squirrel named{}Oreensie went out to play in the sun and saw a big red ball."
    openings = [opening.format("  "), opening.format(" ")]
    (prompt,) = stories.choose_prompts(tokenizer, random.Random(3), openings)
    assert prompt.startswith("One day, a squirrel named Oreensie")


@pytest.mark.slow
def test_a_draw_is_repeatable_and_has_every_file_without_ties(tmp_path, monkeypatch):
    """Runs the whole maker with few data and steps. Its base model is the policy, which writes </s>."""
    optimize, sample_ids = stories.optimize, stories.sample_ids

    def sample_few(model, tokenizer, prompts, **how):
        return sample_ids(model, tokenizer, prompts[:300], **how)

    few = {"train": (12, 3), "tune": (4, 1), "test": (4, 1)}
    monkeypatch.setattr(stories, "BASE", FOLDER / "policy")
    monkeypatch.setattr(stories, "SPLITS", few)
    monkeypatch.setattr(stories, "optimize", lambda model, steps, *rest: optimize(model, 2, *rest))
    monkeypatch.setattr(stories, "sample_ids", sample_few)
    for folder, seed in (("one", 5), ("again", 5), ("other", 6)):
        stories.make_stories(tmp_path / folder, seed)
    prompts = set()
    for name, (count, each) in few.items():
        file = f"preferences_{name}.jsonl.gz"
        rows, again, other = (read_rows(tmp_path / folder / file) for folder in ("one", "again", "other"))
        assert rows == again != other
        of_split = [row["prompt"] for row in read_rows(tmp_path / "one" / f"prompts_{name}.jsonl.gz")]
        assert len(of_split) == count
        assert sorted(row["prompt"] for row in rows) == sorted(of_split * each)
        for row in rows:
            assert row["score_chosen"] == round(stories.judge_story("", row["chosen"]), 4)
            assert abs(row["score_chosen"] - row["score_rejected"]) > 0.0099
        prompts |= set(of_split)
    assert len(prompts) == 20  # no prompt is in two splits


def test_the_scripts_read_every_row_and_its_tokens_are_its_text(one_rank):
    args = grpo_humanline.Args(max_prompt_length=32, max_length=96)
    tokenizer, eos_ids = data.load_tokenizer(grpo_humanline.Args(model=str(FOLDER / "policy")))
    assert eos_ids == {2}
    for name, count in (("train", 8192), ("tune", 256), ("test", 256)):
        path = f"{FOLDER}/preferences_{name}.jsonl.gz"
        groups = grpo_humanline.load_groups(args, tokenizer, eos_ids, path, "train")
        rows = read_rows(path)
        assert len(groups) == len(rows) == count
        for group, row in zip(groups, rows):
            for example, side in zip(group, ("chosen", "rejected")):
                assert example.completion_ids[-1] == 2 and 2 not in example.completion_ids[:-1]
                assert len(example.prompt_ids) <= 25 and example.prompt_ids[0] == 1
                text = sampling.decode_completion(tokenizer, example, example.completion_ids[:-1])
                assert text == row[side]


def test_the_splits_share_no_prompt_and_the_committed_scores_are_the_judges():
    prompts = {}
    for name in ("train", "tune", "test"):
        prompts[name] = {row["prompt"] for row in rows_of(f"prompts_{name}")}
    assert {name: len(texts) for name, texts in prompts.items()} == {"train": 1024, "tune": 256, "test": 256}
    assert len(set.union(*prompts.values())) == 1536
    for name, texts in prompts.items():
        rows = rows_of(f"preferences_{name}")
        assert {row["prompt"] for row in rows} == texts
        for row in rows[:256]:
            for side in ("chosen", "rejected"):
                assert row[f"score_{side}"] == round(stories.judge_story(row["prompt"], row[side]), 4)
    rows = rows_of("preferences_train")
    assert not any(row["score_chosen"] == row["score_rejected"] for row in rows)
    agree = sum(row["score_chosen"] > row["score_rejected"] for row in rows) / len(rows)
    assert agree == pytest.approx(0.8, abs=0.02)


def test_the_reward_model_reads_the_sentiment_of_held_out_pairs(policy):
    _, tokenizer = policy
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER / "reward_model", dtype=torch.float32)
    rows = rows_of("preferences_test")
    scores = []
    for side in ("chosen", "rejected"):
        with torch.inference_mode():
            scores.append(stories.rate(model, tokenizer, [(row["prompt"], row[side], True) for row in rows]))
    wanted = torch.tensor([row["score_chosen"] > row["score_rejected"] for row in rows])
    assert ((scores[0] > scores[1]) == wanted).float().mean() > 0.7
