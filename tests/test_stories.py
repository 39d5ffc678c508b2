"""toy/stories.py: the judge, what it draws, and the files of toy/stories."""

import json
import random

import pytest
import torch
from conftest import ROOT, read_rows, run_ranks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import grpo_humanline
import utils
from paper import frontier
from toy import stories

FOLDER = ROOT / "toy" / "stories"


def rows_of(name: str) -> list[dict]:
    return read_rows(FOLDER / f"{name}.jsonl.gz")


@pytest.fixture(scope="module")
def policy():
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "policy").eval()
    return model, AutoTokenizer.from_pretrained(FOLDER / "policy")


# --- the judge ---


def test_the_judge_is_vaders_mean_over_sentences():
    happy, sad = (stories.sentiment(text)["compound"] for text in ("She was happy.", "He was sad."))
    assert (happy, sad) == (0.5719, -0.4767)  # VADER 3.3.2
    assert stories.judge_story("A prompt that is sad", " She was happy.") == happy
    assert stories.judge_story("", " She was happy. He was sad.") == pytest.approx((happy + sad) / 2)
    assert stories.judge_story("", " She was happy.\nIt was a dog. ") == pytest.approx(happy / 2)


def test_the_last_sentence_of_an_unfinished_completion_counts_nothing():
    cut = stories.judge_story("", " She was happy. He was sad", finished=False)
    assert cut == pytest.approx(0.5719 / 2)
    for text in (" She was happy", " She was happy.", "", " ", "\n"):
        assert stories.judge_story("She was happy.", text, finished=False) == 0.0
    for empty in ("", " ", "\n"):
        assert stories.judge_story("She was happy.", empty) == 0.0


def test_sentences_end_where_another_one_begins():
    text = ' and "Hi!" said Tim. "Wow, a dog!" Tom ran... He fell! and cried.'
    wanted = ['and "Hi!" said Tim.', '"Wow, a dog!"', "Tom ran...", "He fell! and cried."]
    assert stories.sentences(text) == wanted


def test_distinct_trigrams_are_a_share():
    assert stories.distinct_trigrams(["a b c", "A b, c.", "a b d"]) == pytest.approx(2 / 3)
    assert stories.distinct_trigrams(["a b", ""]) == 0.0


# --- what is drawn ---


def test_a_draw_is_repeatable_and_holds_no_tie_and_nothing_unfinished(policy):
    model, tokenizer = policy
    counts = {row["prompt"]: 2 for row in rows_of("prompts_test")[:6]}

    def draw(seed):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        authors = {"cool": (model, 0.7), "hot": (model, 1.3)}
        answers = stories.draw_answers(authors, tokenizer, rng, counts)
        return answers, stories.label(rng, answers, 0.2)

    answers, pairs = draw(1)
    assert draw(1) == (answers, pairs)
    assert draw(2)[0] != answers
    assert [pair["prompt"] for pair in pairs] == [prompt for prompt in counts for _ in range(2)]
    for (prompt, *texts), pair in zip(answers, pairs):
        assert sorted(texts) == sorted([pair["chosen"], pair["rejected"]])
        assert abs(pair["score_chosen"] - pair["score_rejected"]) > 0.0099
        assert pair["score_chosen"] == round(stories.judge_story(prompt, pair["chosen"]), 4)


def test_labels_agree_with_the_judge_as_often_as_the_scale_says():
    gaps = [random.Random(i).gauss(0, 0.4) for i in range(2000)]
    tau = stories.find_scale(gaps)
    assert torch.sigmoid(torch.tensor(gaps).abs() / tau).mean() == pytest.approx(0.8, abs=1e-6)
    answers = [("", " She was happy.", " He was sad.")] * 2000
    pairs = stories.label(random.Random(0), answers, tau=1.0486)  # the gap: sigmoid(1) are chosen
    chosen = sum(pair["chosen"] == " She was happy." for pair in pairs) / 2000
    assert chosen == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.03)


# --- judge against KL ---

RUN = f"--model {FOLDER}/policy --dataset {FOLDER}/preferences_test.jsonl.gz --engine hf --dtype float32"
RUN += " --max-prompt-length 32 --max-length 96 --max-new-tokens 48 --batch-size 16 --lr 1e-3"
RUN += " --warmup-fraction 0"


def test_a_checkpoints_point_is_that_of_a_run_that_ends_there(tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "DRAWS", 1)
    starts = []
    for steps in (1, 2):
        flags = f"{RUN} --num-steps {steps} --checkpoint-every 1 --output-dir {tmp_path}/{steps}"
        starts.append(flags.split())
    run_ranks(1, starts, script="grpo_humanline")
    points = []
    for steps in (1, 2):
        frontier.main(tmp_path / str(steps))
        points.append(json.loads((tmp_path / str(steps) / "frontier.json").read_text()))
    one, two = points
    assert list(two) == ["0", "1", "2"] and list(one) == ["0", "1"]
    assert two["1"] == one["1"] and two["0"] == one["0"]
    assert abs(two["0"]["kl"]) < 1e-4 and 0.1 < two["1"]["kl"] < two["2"]["kl"]


def test_a_point_is_what_plain_transformers_finds_in_the_samples(policy, monkeypatch):
    """Judge, share finished and fluency of the first samples, KL of the second, by the ids as sampled."""
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

    def total(model, completions) -> float:
        """Log-prob of all completions."""
        logp = 0.0
        for prompt, completion in zip(prompts, completions):
            ids = tokenizer(prompt).input_ids + completion
            with torch.no_grad():
                logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            logp += sum(logps[i - 1, ids[i]].item() for i in range(len(ids) - len(completion), len(ids)))
        return logp

    assert point["fluency"] == pytest.approx(total(initial, first) / sum(map(len, first)), abs=1e-4)
    assert point["kl"] == pytest.approx((total(model, second) - total(initial, second)) / 8, abs=1e-3)


def test_a_prompt_that_loses_a_space_is_not_chosen(policy):
    """No completion of it would survive: drawing one would never end."""
    _, tokenizer = policy
    opening = "One day, a squirrel named{}Oreensie went out to play in the sun and saw a big red ball."
    openings = [opening.format("  "), opening.format(" ")]
    (prompt,) = stories.choose_prompts(tokenizer, random.Random(3), openings)
    assert prompt.startswith("One day, a squirrel named Oreensie")


@pytest.mark.slow
def test_a_draw_has_every_file_and_its_pairs_are_what_the_tokenizer_makes_of_them(tmp_path, monkeypatch):
    """The whole maker, which checks its own pairs: fewer of all, and from a policy that ends its stories."""
    optimize, sample_ids = stories.optimize, stories.sample_ids
    few = {"train": (12, 3), "tune": (4, 1), "test": (4, 1)}
    monkeypatch.setattr(stories, "BASE", FOLDER / "policy")
    monkeypatch.setattr(stories, "SPLITS", few)
    monkeypatch.setattr(stories, "optimize", lambda model, steps, *rest: optimize(model, 2, *rest))
    monkeypatch.setattr(
        stories,
        "sample_ids",
        lambda model, tokenizer, prompts, **how: sample_ids(model, tokenizer, prompts[:300], **how),
    )
    stories.make_stories(tmp_path, 5)
    prompts = set()
    for name, (count, each) in few.items():
        rows = read_rows(tmp_path / f"preferences_{name}.jsonl.gz")
        of_split = [row["prompt"] for row in read_rows(tmp_path / f"prompts_{name}.jsonl.gz")]
        assert len(rows) == count * each and sorted(row["prompt"] for row in rows) == sorted(of_split * each)
        assert all(abs(row["score_chosen"] - row["score_rejected"]) > 0.009 for row in rows)
        prompts |= set(of_split)
    assert len(prompts) == 20  # no prompt is in two files
    for name in ("policy", "reward_model"):
        assert (tmp_path / name / "model.safetensors").exists()


# --- the files ---


def test_the_scripts_read_every_row_and_its_tokens_are_its_text(one_rank):
    args = grpo_humanline.Args(max_prompt_length=32, max_length=96)
    tokenizer, eos_ids = utils.load_tokenizer(str(FOLDER / "policy"))
    assert eos_ids == {2}
    for name, count in (("train", 8192), ("tune", 256), ("test", 256)):
        path = f"{FOLDER}/preferences_{name}.jsonl.gz"
        groups = grpo_humanline.load_groups(args, tokenizer, eos_ids, path, "")
        rows = read_rows(path)
        assert len(groups) == len(rows) == count
        for group, row in zip(groups, rows):
            for example, side in zip(group, ("chosen", "rejected")):
                assert example.completion_ids[-1] == 2 and 2 not in example.completion_ids[:-1]
                assert len(example.prompt_ids) <= 25 and example.prompt_ids[0] == 1
                text = utils.decode_completion(tokenizer, example, example.completion_ids)
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
    with torch.inference_mode():
        chosen, rejected = (
            stories.rate(model, tokenizer, [(row["prompt"], row[side], True) for row in rows])
            for side in ("chosen", "rejected")
        )
    right = (chosen > rejected) == torch.tensor([row["score_chosen"] > row["score_rejected"] for row in rows])
    assert right.float().mean() > 0.7


def test_the_folder_is_at_most_three_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 3e6
