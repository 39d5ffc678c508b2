"""Makes the stories task: controlled sentiment with a real language model, as in the DPO paper (6.1).

    python toy/make.py --tasks stories  # writes toy/stories (toy/README.md)

The base model in `toy/stories/base` is karpathy's stories260K. A prompt is the beginning of one of its
stories, and a completion continues it. The judge is a public measure, VADER's sentiment. A row is (prompt,
completion, finished), with a text as prompt and as completion. A completion begins with a space.
"""

import copy
import math
import random
import re
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from toy import common
from toy.common import as_rows, completion_loss, optimize, save, write_rows

BASE = Path(__file__).parent / "stories" / "base"
NEW_TOKENS = 48  # maximum tokens of a completion, with its </s>
SPLITS = {"train": (1024, 8), "tune": (256, 1), "test": (256, 1)}  # {split: (prompts, pairs per prompt)}
AGREEMENT = 0.8  # expected fraction of labels that agree with the judge
MINIMUM_GAP = 0.01  # between the scores of a pair, as in the other toys, because ties would get random labels
ANIMALS = (
    "cat|dog|bird|bear|bunny|rabbit|frog|fish|duck|mouse|lion|fox|cow|pig|horse|sheep|kitty|puppy|animal"
)
SENTENCE_END = r'[.!?]"?(?=\s|$)'

sentiment = SentimentIntensityAnalyzer().polarity_scores

# === Judge ===


def sentences(text: str) -> list[str]:
    """Splits a text after .!? if a capital or a quotation mark follows: `"Hi!" said Tim.` is one sentence."""
    parts = re.split(r'(?:(?<=[.!?])|(?<=[.!?]"))\s+(?=["A-Z])', text.strip())
    return [part for part in parts if part]


def judge_story(prompt: str, completion: str, finished: bool = True) -> float:
    """Scores a completion: the mean of VADER's compound score, in [-1, 1], over its sentences.

    The last sentence of an unfinished completion counts 0. An empty completion scores 0. The prompt does not
    count.
    """
    values = [sentiment(sentence)["compound"] for sentence in sentences(completion)]
    if values and not finished:
        values[-1] = 0.0
    return fmean(values or [0.0])


def distinct_trigrams(texts: list[str]) -> float:
    """Returns the number of different word trigrams, divided by the number of all word trigrams."""
    trigrams = []
    for text in texts:
        words = re.findall(r"[a-z']+", text.lower())
        trigrams += zip(words, words[1:], words[2:])
    return len(set(trigrams)) / max(1, len(trigrams))


# === Texts ===


def sample_ids(model, tokenizer, prompts: list[str], max_new_tokens=NEW_TOKENS, **how) -> list[list[int]]:
    """Samples a completion for each prompt. Returns its token ids up to the first </s>, inclusive."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # by length, for less padding
    ids = common.sample_ids(model, tokenizer, [prompts[i] for i in order], max_new_tokens, **how)
    return [row for _, row in sorted(zip(order, ids))]


def sample(model, tokenizer, prompts: list[str], **how) -> list[tuple]:
    """Samples a row for each prompt, with the options of `sample_ids`."""
    return as_rows(tokenizer, prompts, sample_ids(model, tokenizer, prompts, **how))


def encode(tokenizer, rows: list[tuple]):
    """Returns the token ids and the attention mask of rows, (B, T) each. Finished rows end with </s>."""
    texts = [prompt + completion + tokenizer.eos_token * finished for prompt, completion, finished in rows]
    return tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")


def cut_prompt(tokenizer, rng: random.Random, story: str) -> str:
    """Returns 5 to 12 words from the start of a story; "" if they end a sentence or exceed 24 tokens."""
    words = story.split(" ")
    length = rng.randint(5, 12)
    prompt = " ".join(words[:length])
    plain = length < len(words) and re.fullmatch(r"[A-Za-z', .!?]*[A-Za-z,]", prompt)
    return prompt if plain and len(tokenizer(prompt).input_ids) <= 25 else ""


def choose_prompts(tokenizer, rng: random.Random, openings: list[str]) -> list[str]:
    """Cuts prompts from openings. Returns the different ones that survive, in random order."""
    prompts = [cut_prompt(tokenizer, rng, opening) for opening in openings]
    prompts = list(dict.fromkeys(filter(None, prompts)))
    rng.shuffle(prompts)
    return [prompt for prompt in prompts if survives(tokenizer, prompt)]


def survives(tokenizer, text: str) -> bool:
    """Returns whether a text is the same after encoding and decoding, which add one space at the front.

    The tokenizer loses one of two adjacent spaces. No pair of such a prompt would be usable.
    """
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == " " + text


def cut_completion(tokenizer, prompt: str, story: str) -> str:
    """Returns what follows the prompt, up to the last end of a sentence that leaves room for </s>.

    Returns "" if this has less than 8 tokens, or if the story contains special tokens. Such a text is several
    stories, or broken.
    """
    rest = story[len(prompt) :]
    start = len(tokenizer(prompt).input_ids)
    for end in reversed([match.end() for match in re.finditer(SENTENCE_END, rest)]):
        length = len(tokenizer(prompt + rest[:end]).input_ids) - start
        if length < NEW_TOKENS:
            return rest[:end] if length >= 8 and "<" not in rest[:end] else ""
    return ""


# === Models ===


def load_base():
    """Loads stories260K in fp32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(BASE)


def finetune(model, tokenizer, rng: random.Random, rows: list[tuple], steps: int, lr: float):
    """Fine-tunes a copy of the model on completions, in batches of 64. Returns the copy."""
    model = copy.deepcopy(model)

    def loss_at(step: int) -> torch.Tensor:
        chosen = rng.choices(rows, k=64)
        batch = encode(tokenizer, chosen)
        prompt_lengths = [len(tokenizer(prompt).input_ids) for prompt, *_ in chosen]
        return completion_loss(model, batch, prompt_lengths)

    return optimize(model, steps, steps // 10 + 1, loss_at, lr)


def train_authors(policy, tokenizer, rng: random.Random, rows: list[tuple]) -> dict[str, tuple]:
    """Makes the authors of the pairs. Returns {name: (model, temperature)}.

    Three authors are fine-tuned on one part of the stories each, for at most eight epochs. The fourth is the
    policy with temperature 1.3. So the pairs are not samples of the policy as it is trained.
    """
    words_a_sentence = [len(text.split()) / len(sentences(text)) for _, text, _ in rows]
    long = sorted(words_a_sentence)[len(rows) * 6 // 10]
    parts = {"dialogue": [], "animals": [], "long": []}
    for row, words in zip(rows, words_a_sentence):
        if '"' in row[1]:
            parts["dialogue"].append(row)
        elif re.search(rf"\b({ANIMALS})s?\b", row[1]):
            parts["animals"].append(row)
        elif words > long:
            parts["long"].append(row)
    authors = {"hot": (policy, 1.3)}
    for name, part in parts.items():
        authors[name] = finetune(policy, tokenizer, rng, part, min(60, len(part) // 8), 1e-3), 1.0
    return authors


def rate(reward_model, tokenizer, rows: list[tuple]) -> torch.Tensor:
    """Computes the reward model's score of each row, (B,)."""
    return reward_model(**encode(tokenizer, rows)).logits.squeeze(1)


def train_reward_model(reward_model, tokenizer, rng: random.Random, pairs: list[dict]):
    """Trains a Bradley-Terry model on the labels of the pairs, for two epochs. It never sees the judge."""
    order = [pair for _ in range(2) for pair in rng.sample(pairs, len(pairs))]

    def loss_at(step: int) -> torch.Tensor:
        batch = order[64 * step : 64 * step + 64]
        rows = [(pair["prompt"], pair[side], True) for side in ("chosen", "rejected") for pair in batch]
        chosen, rejected = rate(reward_model, tokenizer, rows).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    steps = len(order) // 64
    return optimize(reward_model, steps, steps // 10 + 1, loss_at, 1e-3)


# === Pairs ===


def draw_answers(authors, tokenizer, rng: random.Random, counts: dict[str, int]) -> list[tuple]:
    """Draws pairs by two different authors. Returns (prompt, completion, completion) for each pair.

    A pair is drawn again if a completion has no </s> (a row of text cannot hold this information), is empty,
    or has other tokens than its text, or if the scores of both completions are nearly equal.

    counts: {prompt: number of pairs}.
    """

    def is_usable(prompt: str, text: str, finished: bool) -> bool:
        prompt_ids, ids = tokenizer([prompt, prompt + text]).input_ids
        half_character = "\ufffd" in text
        spanning_token = ids[: len(prompt_ids)] != prompt_ids
        broken = half_character or spanning_token or not survives(tokenizer, prompt + text)
        return bool(finished and text.strip() and not broken)

    found = {prompt: [] for prompt in counts}
    while wanted := [prompt for prompt, n in counts.items() for _ in range(n - len(found[prompt]))]:
        writers = [rng.sample(list(authors), 2) for _ in wanted]
        drawn = [[None, None] for _ in wanted]
        for name, (model, temperature) in authors.items():
            slots = [(i, side) for i, two in enumerate(writers) for side in (0, 1) if two[side] == name]
            rows = sample(model, tokenizer, [wanted[i] for i, _ in slots], temperature=temperature)
            for (i, side), row in zip(slots, rows):
                drawn[i][side] = row
        for two in drawn:
            (prompt, a, _), (_, b, _) = two
            gap = abs(judge_story(prompt, a) - judge_story(prompt, b))
            if gap >= MINIMUM_GAP and all(is_usable(*row) for row in two):
                found[prompt].append((prompt, a, b))
    return [answers for prompt_answers in found.values() for answers in prompt_answers]


def find_scale(gaps: list[float]) -> float:
    """Finds the τ for which the mean of sigmoid(gap / τ) is AGREEMENT, by bisection on log τ."""
    low, high = 1e-3, 10.0
    gaps = torch.tensor(gaps).double().abs()
    for _ in range(60):
        tau = math.sqrt(low * high)
        low, high = (tau, high) if (gaps / tau).sigmoid().mean() > AGREEMENT else (low, tau)
    return tau


def label(rng: random.Random, answers: list[tuple], tau: float) -> list[dict]:
    """Labels pairs by Bradley and Terry: P(first is chosen) = sigmoid((first score - second score) / τ)."""
    pairs = []
    for prompt, *texts in answers:
        scores = [judge_story(prompt, text) for text in texts]
        first = rng.random() < torch.tensor((scores[0] - scores[1]) / tau).sigmoid().item()
        pair = {"prompt": prompt}
        for side, i in (("chosen", int(not first)), ("rejected", int(first))):
            pair |= {side: texts[i], f"score_{side}": round(scores[i], 4)}
        pairs.append(pair)
    return pairs


def draw_texts(base, tokenizer, rng: random.Random) -> tuple[list[tuple], list[str]]:
    """Draws stories of the base model. Returns rows to fine-tune on, and prompts from other stories."""
    stories = [
        text.strip() for _, text, _ in sample(base, tokenizer, [""] * 4096, max_new_tokens=24 + NEW_TOKENS)
    ]
    openings = [text.strip() for _, text, _ in sample(base, tokenizer, [""] * 8192, max_new_tokens=32)]
    rows = []
    for story in stories:
        prompt = cut_prompt(tokenizer, rng, story)
        completion = cut_completion(tokenizer, prompt, story) if prompt else ""
        if completion:
            rows.append((prompt, completion, True))
    prompts = choose_prompts(tokenizer, rng, openings)
    assert len(prompts) >= sum(count for count, _ in SPLITS.values()), f"only {len(prompts)} prompts"
    return rows, prompts


def draw_pairs(policy, tokenizer, rng: random.Random, rows: list[tuple], prompts: list[str]) -> tuple:
    """Makes authors of the rows, and their labelled pairs. Returns {split: prompts} and {split: pairs}."""
    authors = train_authors(policy, tokenizer, rng, rows)
    prompts_of, answers_of, first = {}, {}, 0
    for split, (count, each) in SPLITS.items():
        prompts_of[split] = prompts[first : first + count]
        first += count
        counts = dict.fromkeys(prompts_of[split], each)
        answers_of[split] = draw_answers(authors, tokenizer, rng, counts)
    gaps = [judge_story(prompt, a) - judge_story(prompt, b) for prompt, a, b in answers_of["train"]]
    tau = find_scale(gaps)
    return prompts_of, {split: label(rng, answers, tau) for split, answers in answers_of.items()}


# === Task ===


def make_stories(folder: Path, seed: int):
    """Makes the stories in `folder`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    base, tokenizer = load_base()
    rows, prompts = draw_texts(base, tokenizer, rng)
    policy = finetune(base, tokenizer, rng, rows, 200, 5e-4)  # writes </s>, which the base model never does
    prompts_of, pairs = draw_pairs(policy, tokenizer, rng, rows, prompts)
    save(folder / "policy", policy, tokenizer)
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1)
    train_reward_model(reward_model, tokenizer, rng, pairs["train"])
    save(folder / "reward_model", reward_model.half(), tokenizer)  # half the size
    for split in ("train", "test"):  # nothing reads "tune", but without its draws "test" would be another one
        write_rows(folder / f"preferences_{split}.jsonl.gz", pairs[split])
        write_rows(folder / f"prompts_{split}.jsonl.gz", [{"prompt": prompt} for prompt in prompts_of[split]])
