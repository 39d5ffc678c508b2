"""Make the toy tasks: bouquets and tales (preferences), the shell game (verifiable answers), and variants.

    python toy/make.py                 # rewrites toy/bouquets, toy/tales and toy/shell_game
    python toy/make.py --out /tmp/toy  # the same bytes, somewhere else
    python toy/make.py --tasks tales --seed 3 --out runs/instances/3  # another judge and data
    python toy/make.py --tasks low_entropy  # tales whose words are mostly known beforehand
    python toy/make.py --tasks stories  # sentiment on a real language model: toy/stories.py

Each task is a folder of ordinary files: Hugging Face model folders (`policy`, `reward_model`) and gzipped
JSON lines. Everything is seeded and runs on one torch thread per process, so that a second run writes the
same bytes. The judges, `judge_bouquet`, `judge_tale` and `judge_shell_game`, are pure Python and may be
imported; importing makes nothing.
"""

import gzip
import itertools
import json
import math
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import transformers
import tyro
from scipy.stats import spearmanr
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<pad>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ ('' if loop.first else ' ') + '<|' + m['role'] + '|> ' + m['content'] + ' <|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' <|assistant|>' }}{% endif %}"
)

RECIPIENTS = {
    "royal": "king queen prince duke",
    "folk": "cook baker smith clerk",
    "child": "boy girl pupil twin",
}
FLOWERS = (
    "rose lily tulip daisy iris aster poppy violet orchid peony lotus dahlia clover fern ivy heather lilac "
    "jasmine primrose marigold thistle nettle holly sage"
).split()
BOUQUET_SIZE = 8

TOPICS = {"beast": "cat dog bear frog", "folk": "king girl cook queen", "thing": "boat drum lamp cart"}
NOUNS = " ".join(TOPICS.values()).split()
ADJECTIVES = (
    "old small red plain sad dull kind brave bright gentle sturdy clever shiny noble swift merry".split()
)
VERBS = "sees meets finds helps hits follows loves guards".split()
ADVERBS = "slowly often badly coldly kindly gladly neatly boldly".split()
MAX_SENTENCES = 3

CUPS, NUM_SWAPS = "12345", 5
SWAPS = [a + b for a, b in itertools.combinations(CUPS, 2)]
# The tags carry their line breaks, so that a well-formed completion decodes to the layout of the math format
# reward.
TAGS = ["<think>\n", "\n</think>\n", "<answer>\n", "\n</answer>"]


def hidden_taste(kinds: dict[str, str], words: list[str], seed: int = 0) -> dict[str, dict[str, float]]:
    """The judge's value in [-1, 1] of every word, for each name; names of one kind share their values."""
    rng = random.Random(42 + 1000 * seed)
    tastes = [{word: round(rng.uniform(-1, 1), 2) for word in words} for _ in kinds]
    return {name: taste for names, taste in zip(kinds.values(), tastes) for name in names.split()}


BOUQUET_TASTE = hidden_taste(RECIPIENTS, FLOWERS)
TALE_TASTE = hidden_taste(TOPICS, ADJECTIVES + VERBS + ADVERBS)

# --- judges ---


def judge_bouquet(prompt: str, completion: str, finished: bool = True) -> float:
    """Score a bouquet: the mean value of eight flowers to this recipient.

    A repeated flower counts 0, a word that is no flower -1; every word too few or too many costs 1/8, not
    stopping 1.
    """
    taste, words = BOUQUET_TASTE[prompt.split()[-1]], completion.split()
    total = -abs(len(words) - BOUQUET_SIZE)
    for i, word in enumerate(words[:BOUQUET_SIZE]):
        if word not in words[:i] or word not in taste:
            total += taste.get(word, -1)
    return total / BOUQUET_SIZE - (not finished)


def bouquet_is_broken(prompt: str, completion: str, finished: bool = True) -> bool:
    """Whether this is anything but eight flowers and a stop."""
    words = completion.split()
    return not finished or len(words) != BOUQUET_SIZE or any(word not in FLOWERS for word in words)


def sentence_values(prompt: str, completion: str, taste=TALE_TASTE) -> list[float | None]:
    """Mean value of each sentence `the ADJECTIVE topic VERB the ADJECTIVE NOUN ADVERB .`; None: broken."""
    topic, values = prompt.split()[-1], []
    slots = [["the"], ADJECTIVES, [topic], VERBS, ["the"], ADJECTIVES, NOUNS, ADVERBS]
    for sentence in completion.split("."):
        words = sentence.split()
        if len(words) == len(slots) and all(word in slot for word, slot in zip(words, slots)):
            values.append(fmean(taste[topic][words[i]] for i in (1, 3, 5, 7)))
        elif words:
            values.append(None)
    return values


def judge_tale(
    prompt: str, completion: str, finished: bool = True, taste=TALE_TASTE, longest=MAX_SENTENCES
) -> float:
    """Score a tale: the mean value of its sentences.

    A broken sentence counts -1, and so does a missing last full stop; each sentence beyond three (`longest`)
    costs 0.5, not stopping 1, and an empty tale 1.
    """
    values = sentence_values(prompt, completion, taste)
    total = sum(-1 if value is None else value for value in values)
    if values and not completion.rstrip().endswith("."):
        total -= 1
    rambling = 0.5 * max(0, len(values) - longest)
    return total / max(1, len(values)) - rambling - (not finished) - (not values)


def tale_is_broken(prompt: str, completion: str, finished: bool = True, longest=MAX_SENTENCES) -> bool:
    """Whether a sentence is broken, there are none or too many, or the tale does not stop at a full stop."""
    values = sentence_values(prompt, completion)
    whole = 1 <= len(values) <= longest and None not in values and completion.rstrip().endswith(".")
    return not finished or not whole


def follow_ball(problem: str) -> list[str]:
    """Where the ball is after each swap of a problem such as `2 45 15 34 24 45`."""
    cup, *swaps = problem.split()
    return [cup := {first: second, second: first}.get(cup, cup) for first, second in swaps]


def judge_shell_game(problem: str, completion: str, finished: bool = True) -> float:
    """1.0 for a well-formed completion that stops and whose answer is the ball's last place, else 0.0."""
    match = re.fullmatch(r"<think>\n[^<]*\n</think>\n<answer>\n([^<]*)\n</answer>", completion)
    return float(bool(match) and finished and match[1] == follow_ball(problem)[-1])


# --- writers ---

Habits = dict[str, dict[str, list[float]]]  # name in the prompt -> slot -> weight of each of the slot's words


@dataclass(frozen=True)
class PreferenceTask:
    """What `make_preference_task` needs to know; `slots` are the words that a writer chooses from."""

    name: str
    opening: str
    kinds: dict[str, str]
    slots: dict[str, list[str]]
    glue: list[str]
    taste: dict[str, dict[str, float]]
    judge: Callable[[str, str, bool], float]
    is_broken: Callable[[str, str, bool], bool]
    write: Callable[[random.Random, str, Habits], str]
    max_new_tokens: int
    pretrain_steps: int
    seed: int = 0  # of another instance: everything that is drawn is drawn anew
    common: int = 1  # texts of the writer whom policy and author share, for one of their own
    steepness: int = 1  # a writer uses the word of rank r with weight 1 / r^steepness

    def prompts(self) -> list[str]:
        """All the prompts there are."""
        return [f"{self.opening} {name}" for name in self.taste]

    def words(self) -> list[str]:
        """The vocabulary, special tokens aside."""
        return list(dict.fromkeys([self.opening, *self.taste, *sum(self.slots.values(), []), *self.glue]))


def zipf_habits(task: PreferenceTask, style: int) -> Habits:
    """How often an author uses each word: by its rank in the author's order (for flowers, one per kind)."""
    habits = {}
    for kind, names in task.kinds.items():
        weights = {}
        for slot, words in task.slots.items():
            flowers = slot == "flower"
            ranked = list(words)
            own = style + 1000 * task.seed
            random.Random(f"{own}{kind}" if flowers else own).shuffle(ranked)
            first = 2 if flowers else 1
            weights[slot] = [1 / (ranked.index(word) + first) ** task.steepness for word in words]
        habits |= dict.fromkeys(names.split(), weights)
    return habits


def write_bouquet(rng: random.Random, prompt: str, habits: Habits) -> str:
    """Eight flowers, drawn by habit."""
    return " ".join(rng.choices(FLOWERS, habits[prompt.split()[-1]]["flower"], k=BOUQUET_SIZE))


def write_tale(rng: random.Random, prompt: str, habits: Habits, lengths=(1, 2, 2, MAX_SENTENCES)) -> str:
    """Sentences about the topic, as many as one of `lengths`, their words drawn by habit."""
    topic, sentences = prompt.split()[-1], []
    weights = habits[topic]
    for _ in range(rng.choice(lengths)):
        first, second = rng.choices(ADJECTIVES, weights["adjective"], k=2)
        verb, adverb = rng.choices(VERBS, weights["verb"])[0], rng.choices(ADVERBS, weights["adverb"])[0]
        noun = rng.choices(NOUNS, weights["noun"])[0] if "noun" in weights else rng.choice(NOUNS)
        sentences.append(f"the {first} {topic} {verb} the {second} {noun} {adverb} .")
    return " ".join(sentences)


def write_tastefully(
    rng: random.Random, task: PreferenceTask, coldest=0.05, hottest=2.0
) -> tuple[str, str, bool]:
    """A prompt and a completion far better than the models write, for where training leads."""
    prompt, temperature = rng.choice(task.prompts()), coldest * (hottest / coldest) ** rng.random()
    taste = task.taste[prompt.split()[-1]]
    if task is BOUQUETS and rng.random() < 0.75:  # without repeats, which drawing one by one hardly avoids
        ranked = sorted(
            FLOWERS, key=lambda flower: taste[flower] - temperature * math.log(rng.expovariate(1))
        )
        return prompt, " ".join(rng.sample(ranked[-BOUQUET_SIZE:], BOUQUET_SIZE)), True
    weights = {
        slot: [math.exp((taste.get(w, 0) - 1) / temperature) for w in words]
        for slot, words in task.slots.items()
    }
    return prompt, task.write(rng, prompt, {prompt.split()[-1]: weights}), True


def write_work(
    rng: random.Random, problem: str, diligence: float = 1.0, slip: float = 0.0, lapse: float = 0.0
) -> str:
    """A solution of the shell game: the ball's place after each swap but the last, then the answer.

    Before each written place a student goes on writing with probability `diligence`, and otherwise does the
    rest in the head. A written step goes wrong (a random cup) with probability `slip`, one in the head with
    `lapse`.
    """
    cup, *swaps = problem.split()
    written, writing = [], True
    for step, swap in enumerate(swaps, start=1):
        writing = writing and (step == NUM_SWAPS or rng.random() < diligence)
        slipped = rng.random() < (slip if writing else lapse)
        cup = rng.choice(CUPS) if slipped else follow_ball(f"{cup} {swap}")[0]
        if writing and step < NUM_SWAPS:
            written.append(cup)
    return f"<think>\n{' '.join(written)}\n</think>\n<answer>\n{cup}\n</answer>"


def write_as_student(rng: random.Random, problem: str) -> str:
    """6% of the students write everything down; the rest stop early and follow the remaining swaps badly."""
    return write_work(rng, problem, diligence=1.0 if rng.random() < 0.06 else 0.3, slip=0.03, lapse=0.7)


def spoil(rng: random.Random, task: PreferenceTask, prompt: str, completion: str, finished: bool):
    """Break a completion in one of eight ways."""
    words, vocabulary = completion.split() or ["<unk>"], task.words()
    i, j, odd = rng.randrange(len(words)), rng.randrange(len(words)), rng.choice(vocabulary)
    match rng.choice(["delete", "insert", "duplicate", "replace", "swap", "truncate", "babble", "repeat"]):
        case "delete":
            del words[i]
        case "insert":
            words.insert(i, odd)
        case "duplicate":
            words.insert(i, words[i])
        case "replace":
            words[i] = odd
        case "swap":
            words[i], words[j] = words[j], words[i]
        case "truncate":
            words, finished = words[: i + 1], False
        case "babble":
            words = rng.choices(vocabulary, k=rng.randint(1, task.max_new_tokens - 1))
        case "repeat":
            words = [odd] * rng.randint(1, task.max_new_tokens - 1)
    return prompt, " ".join(words), finished


BOUQUETS = PreferenceTask(
    name="bouquets",
    opening="for",
    kinds=RECIPIENTS,
    slots={"flower": FLOWERS},
    glue=[],
    taste=BOUQUET_TASTE,
    judge=judge_bouquet,
    is_broken=bouquet_is_broken,
    write=write_bouquet,
    max_new_tokens=12,
    pretrain_steps=400,
)
TALES = PreferenceTask(
    name="tales",
    opening="about",
    kinds=TOPICS,
    slots={"adjective": ADJECTIVES, "verb": VERBS, "adverb": ADVERBS},
    glue=["the", "."],
    taste=TALE_TASTE,
    judge=judge_tale,
    is_broken=tale_is_broken,
    write=write_tale,
    max_new_tokens=36,
    pretrain_steps=500,
)
# Four to six sentences of words that are mostly the writer's first choice, which both models mostly share: so
# what is chosen is likely under the policy, as the paper's better quartiles are.
LOW_ENTROPY = replace(
    TALES,
    name="low_entropy",
    slots=TALES.slots | {"noun": NOUNS},
    judge=partial(judge_tale, longest=6),
    is_broken=partial(tale_is_broken, longest=6),
    write=partial(write_tale, lengths=(4, 5, 5, 6)),
    max_new_tokens=72,
    common=9,
    steepness=3,
)


def another_instance(seed: int) -> PreferenceTask:
    """Tales with another hidden judge, other authors, policy, reward model and pairs; 0: toy/tales."""
    taste = hidden_taste(TOPICS, ADJECTIVES + VERBS + ADVERBS, seed)
    return replace(TALES, seed=seed, taste=taste, judge=partial(judge_tale, taste=taste))


# --- tokenizer ---
# and models


def build_tokenizer(words: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template. Spaces separate words; a tag has its own line breaks."""
    vocab = {word: i for i, word in enumerate(SPECIAL_TOKENS + words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if TAGS[0] in vocab:
        split_tags = pre_tokenizers.Split(Regex("|".join(TAGS)), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split_tags, pre_tokenizers.Split(" ", "removed")])
        # WordPiece joins the tokens with spaces (none begins with ##); then no space stays beside a line
        # break.
        no_space = [decoders.Replace(" \n", "\n"), decoders.Replace("\n ", "\n")]
        backend.decoder = decoders.Sequence(
            [decoders.WordPiece("##", cleanup=False), decoders.Fuse(), *no_space]
        )
    names = {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    options = {"model_max_length": 128, "padding_side": "left", "clean_up_tokenization_spaces": False}
    inputs = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=inputs, **names, **options
    )


def build_model(model_class, tokenizer, seed: int, **kwargs):
    """A fresh Llama of about 0.11 M parameters; heads of 32: vLLM's CPU attention takes none smaller."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    heads = {"num_attention_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    return model_class(
        transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ends, **kwargs)
    )


def render(tokenizer, prompt: str, completion: str | None = None, finished: bool = True) -> str:
    """The chat rendering: to the assistant's header, or with the completion and, if finished, its end."""
    messages = [{"role": "user", "content": prompt}]
    if completion is None:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": completion})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return text if finished else text.removesuffix(" <|end|>")


def encode(tokenizer, texts: list[str], padding_side: str = "right"):
    """Token ids and attention mask of rendered texts, both (B, T)."""
    return tokenizer(texts, padding=True, padding_side=padding_side, return_tensors="pt")


def completion_logps(
    model, tokenizer, prompts: list[str], completions: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each next token, (B, T - 1), and the mask of the completion's, the end token included."""
    batch = encode(tokenizer, [render(tokenizer, *turn) for turn in zip(prompts, completions)])
    prompt_length = len(
        tokenizer(render(tokenizer, prompts[0]))["input_ids"]
    )  # the same for all prompts of a task
    logps = model(**batch).logits[:, :-1].log_softmax(-1)  # (B, T - 1, V)
    mask = batch["attention_mask"][:, 1:].float()
    mask[:, : prompt_length - 1] = 0
    return logps.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2), mask


def optimize(model, steps: int, warmup: int, loss_at: Callable[[int], torch.Tensor], lr: float = 3e-3):
    """Minimize `loss_at(step)` with AdamW, linear warmup and linear decay; returns the model, to evaluate."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup) * (1 - step / steps)
        loss_at(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def train_language_model(tokenizer, seed: int, steps: int, batch_size: int, warmup: int, draw):
    """Train a fresh model on the completions of `draw(rng, step)`: a prompt and a completion."""
    model, rng = build_model(transformers.LlamaForCausalLM, tokenizer, seed), random.Random(seed + 1)

    def loss_at(step: int) -> torch.Tensor:
        prompts, completions = zip(*[draw(rng, step) for _ in range(batch_size)])
        logps, mask = completion_logps(model, tokenizer, prompts, completions)
        return -(logps * mask).sum() / mask.sum()

    return optimize(model, steps, warmup, loss_at)


@torch.inference_mode()
def sample(
    model, tokenizer, prompts: list[str], max_new_tokens: int, temperature=1.0, top_p=1.0, seed=0
) -> list[tuple]:
    """Rows of (prompt, completion, finished). Special tokens but the last <|end|> stay in the text."""
    torch.manual_seed(seed)
    rows, how = [], {"temperature": temperature, "top_p": top_p, "top_k": 0, "max_new_tokens": max_new_tokens}
    for start in range(0, len(prompts), 4096):
        chunk = prompts[start : start + 4096]
        batch = encode(tokenizer, [render(tokenizer, prompt) for prompt in chunk], padding_side="left")
        ids = model.generate(**batch, do_sample=True, **how)[:, batch["input_ids"].shape[1] :]
        for prompt, row in zip(chunk, ids.tolist()):
            finished = tokenizer.eos_token_id in row
            row = row[: row.index(tokenizer.eos_token_id)] if finished else row
            rows.append((prompt, tokenizer.decode(row), finished))
    return rows


def rate(reward_model, tokenizer, rows: list[tuple], padding_side: str = "right") -> torch.Tensor:
    """The reward model's score of each (prompt, completion, finished), (B,)."""
    texts = [render(tokenizer, *row) for row in rows]
    return reward_model(**encode(tokenizer, texts, padding_side)).logits.squeeze(1)


def train_reward_model(
    task: PreferenceTask, tokenizer, pool: list[tuple], steps: int = 1500, batch_size: int = 128
):
    """Regress a fresh classifier onto the judge: half samples, half tasteful ones; a third is spoiled."""
    seed = 1000 * task.seed
    model = build_model(transformers.LlamaForSequenceClassification, tokenizer, seed=2 + seed, num_labels=1)
    rng = random.Random(3 + seed)

    def loss_at(step: int) -> torch.Tensor:
        rows = [
            rng.choice(pool) if rng.random() < 0.5 else write_tastefully(rng, task) for _ in range(batch_size)
        ]
        rows = [spoil(rng, task, *row) if rng.random() < 1 / 3 else row for row in rows]
        targets = torch.tensor([task.judge(*row) for row in rows])
        return torch.nn.functional.mse_loss(rate(model, tokenizer, rows), targets)

    return optimize(model, steps, 50, loss_at)


# --- tasks ---


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write gzipped JSON lines, without the time and name that gzip would put into the file."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as archive:
        archive.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def save(folder: Path, model, tokenizer) -> None:
    """Save an ordinary model folder, with the tokenizer's class by a name that transformers 4 knows too."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def reload_and_check(folder: Path, turns: list[tuple[str, str]]):
    """Load policy and tokenizer from disk as any script would, raise unless every turn survives, and return
    both.

    A turn survives if text -> ids -> text gives it back, with one end token after it, in context and out of
    it.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|end|>", "<pad>", None)
    for prompt, completion in turns:
        rendered, header = render(tokenizer, prompt, completion), render(tokenizer, prompt)
        ids, header_ids, completion_ids = tokenizer([rendered, header, completion])["input_ids"]
        assert rendered.startswith(header), f"the template does not preserve the prefix {header!r}"
        assert ids == header_ids + completion_ids + [tokenizer.eos_token_id], f"tokens change in {rendered!r}"
        assert tokenizer.unk_token_id not in ids, f"unknown word in {rendered!r}"
        assert tokenizer.decode(ids) == rendered, f"{rendered!r} does not survive"
        assert tokenizer.decode(ids[len(header_ids) :], skip_special_tokens=True) == completion
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def best_against_worst(task: PreferenceTask, author, tokenizer, num_pairs: int) -> list[dict]:
    """Preferences as in the paper: 8 completions a prompt at T 0.7, top-p 0.95; best against worst, gap at
    least 0.01.

    Not eligible is a completion that did not stop or holds a special token: a row of text cannot tell it.
    """
    rng, pairs = random.Random(9 + 1000 * task.seed), []
    prompts = [
        rng.choice(task.prompts()) for _ in range(num_pairs + num_pairs // 20)
    ]  # a few prompts give no pair
    rows = sample(
        author, tokenizer, [p for p in prompts for _ in range(8)], task.max_new_tokens, 0.7, 0.95, seed=9
    )
    for i, prompt in enumerate(prompts):
        eligible = [text for _, text, finished in rows[8 * i : 8 * i + 8] if finished and "<" not in text]
        scored = sorted((round(task.judge(prompt, text), 5), text) for text in eligible)
        if scored and scored[-1][0] - scored[0][0] >= 0.01:
            row = {"prompt": prompt, "chosen": scored[-1][1], "rejected": scored[0][1]}
            pairs.append(row | {"score_chosen": scored[-1][0], "score_rejected": scored[0][0]})
    assert len(pairs) >= num_pairs, f"only {len(pairs)} pairs of {num_pairs}"
    return pairs[:num_pairs]


def make_preference_task(task: PreferenceTask, folder: Path) -> list[str]:
    """Make bouquets or tales in `folder`; returns the lines of a report."""
    tokenizer, prompts, rng = (
        build_tokenizer(task.words()),
        task.prompts(),
        random.Random(10 + 1000 * task.seed),
    )

    def train(model: int):
        habits = [zipf_habits(task, 100)] * task.common + [zipf_habits(task, 101 + model)]
        seed = model + 1000 * task.seed

        def draw(rng: random.Random, step: int) -> tuple[str, str]:
            prompt = rng.choice(prompts)
            return prompt, task.write(rng, prompt, rng.choice(habits))

        return train_language_model(tokenizer, seed, task.pretrain_steps, batch_size=64, warmup=50, draw=draw)

    policy, author = train(0), train(1)
    settings = {"T 0.7, top-p 0.95": (0.7, 0.95), "T 1": (1.0, 1.0)}

    def sample_both(repeats: int, seed: int) -> dict[str, list[tuple]]:
        return {
            f"{name} at {setting}": sample(
                model, tokenizer, prompts * repeats, task.max_new_tokens, *how, seed + i
            )
            for i, (name, model) in enumerate({"policy": policy, "author": author}.items())
            for setting, how in settings.items()
        }

    reward_model = train_reward_model(task, tokenizer, sum(sample_both(500, seed=100).values(), []))
    pairs = best_against_worst(task, author, tokenizer, 10_240 + 512)
    save(folder / "policy", policy, tokenizer)
    save(folder / "reward_model", reward_model, tokenizer)
    write_rows(folder / "preferences_train.jsonl.gz", pairs[:10_240])
    write_rows(folder / "preferences_test.jsonl.gz", pairs[10_240:])
    write_rows(folder / "prompts_train.jsonl.gz", [{"prompt": rng.choice(prompts)} for _ in range(12_288)])
    write_rows(folder / "prompts_test.jsonl.gz", [{"prompt": rng.choice(prompts)} for _ in range(256)])

    turns = [(pair["prompt"], pair[side]) for pair in pairs for side in ("chosen", "rejected")]
    policy, tokenizer = reload_and_check(folder / "policy", turns)
    reward_model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "reward_model"
    ).eval()
    report, held_out = (
        [f"{policy.num_parameters():,} parameters, {len(tokenizer)} tokens"],
        sample_both(100, seed=200),
    )
    for name, rows in held_out.items():
        broken = fmean(task.is_broken(*row) for row in rows)
        report.append(f"{name}: judge {fmean(task.judge(*row) for row in rows):.3f}, broken {broken:.3f}")
    groups = {"sampled": sum(held_out.values(), [])}
    groups["near-optimal"] = [write_tastefully(rng, task, 0.05, 0.2) for _ in range(2000)]
    for name, rows in list(groups.items()):
        groups[f"{name}, a third spoiled"] = [
            spoil(rng, task, *row) if rng.random() < 1 / 3 else row for row in rows
        ]
    with torch.inference_mode():
        for name, rows in groups.items():
            judged, rated = [task.judge(*row) for row in rows], rate(reward_model, tokenizer, rows)
            assert torch.allclose(rated, rate(reward_model, tokenizer, rows, "left"), atol=1e-3)
            report.append(f"reward model, {name}: Spearman {spearmanr(judged, rated).statistic:.3f}")
            report[-1] += f", mean of the judge {fmean(judged):.3f}, of the model {rated.mean():.3f}"
        for side in ("chosen", "rejected"):
            prompts, texts = zip(*[(pair["prompt"], pair[side]) for pair in pairs[10_240:]])
            logps, mask = completion_logps(policy, tokenizer, prompts, texts)
            report.append(f"{side}: mean score {fmean(pair['score_' + side] for pair in pairs):.3f}")
            report[-1] += f", mean token log p under the policy {(logps * mask).sum() / mask.sum():.3f}"
    return report + [str(pair) for pair in pairs[:3]]


def make_shell_game(folder: Path) -> list[str]:
    """Make the shell game in `folder`; returns the lines of a report."""
    tokenizer, rng, steps = build_tokenizer([*CUPS, *SWAPS, *TAGS]), random.Random(777), 900

    def draw_problem(rng: random.Random) -> str:
        return " ".join([rng.choice(CUPS), *rng.choices(SWAPS, k=NUM_SWAPS)])

    test = list(dict.fromkeys(draw_problem(rng) for _ in range(550)))[:500]
    train = [problem for problem in (draw_problem(rng) for _ in range(8300)) if problem not in test][:8192]

    def draw(rng: random.Random, step: int) -> tuple[str, str]:
        problem = test[0]
        while problem in unseen:
            problem = draw_problem(rng)
        in_textbook = step < 0.7 * steps  # first complete and right solutions, then the students'
        return problem, (write_work if in_textbook else write_as_student)(rng, problem)

    unseen = set(test)
    policy = train_language_model(tokenizer, 0, steps, batch_size=128, warmup=100, draw=draw)
    save(folder / "policy", policy, tokenizer)
    for name, problems in (("train", train), ("test", test)):
        rows = [{"problem": problem, "answer": follow_ball(problem)[-1]} for problem in problems]
        write_rows(folder / f"problems_{name}.jsonl.gz", rows)

    full_work = [(problem, write_work(rng, problem)) for problem in test]
    turns = full_work + [(problem, write_as_student(rng, problem)) for problem in test]
    policy, tokenizer = reload_and_check(folder / "policy", turns)
    rows = sample(policy, tokenizer, test * 4, max_new_tokens=16, seed=300)
    scores = [judge_shell_game(*row) for row in rows]
    report = [f"{policy.num_parameters():,} parameters, {len(tokenizer)} tokens"]
    report.append(
        f"policy at T 1: accuracy {fmean(scores):.3f}, unfinished {fmean(not row[2] for row in rows):.3f}"
    )
    written = [len(completion.split("\n</think>")[0].split()) - 1 for _, completion, _ in rows]
    for count in range(NUM_SWAPS):
        group = [score for score, length in zip(scores, written) if length == count]
        report.append(
            f"{count} places written in {len(group) / len(rows):.3f}, "
            f"of which right {fmean(group or [0]):.3f}"
        )
    with torch.inference_mode():
        ids = encode(tokenizer, [render(tokenizer, *turn) for turn in full_work])[
            "input_ids"
        ]  # (B, T), all full
        cups = torch.tensor(tokenizer.convert_tokens_to_ids(list(CUPS)))
        likeliest = cups[policy(ids[:, :-1]).logits[:, :, cups].argmax(-1)]  # (B, T - 1)
        places = torch.isin(ids[:, 1:], cups)
        places[:, :NUM_SWAPS] = False  # the start cup, which the prompt gives
        right = ((likeliest == ids[:, 1:]) | ~places).all(1).float().mean()
    report.append(
        f"all places and the answer right when held to full work, the likeliest cup each time: {right:.3f}"
    )
    return report + [f"{row} {score}" for row, score in zip(rows[:4], scores)]


def make(name: str, out: Path, seed: int) -> str:
    """Make one task; returns the report."""
    started, folder = time.time(), out / name
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # sums in another order would change the files
    tasks = {"bouquets": BOUQUETS, "tales": another_instance(seed), "low_entropy": LOW_ENTROPY}
    if name == "stories":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from toy.stories import make_stories  # here, since it imports this file

        report = make_stories(folder, seed)
    else:
        report = make_preference_task(tasks[name], folder) if name in tasks else make_shell_game(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [f"{path.stat().st_size:8,} bytes  {path.relative_to(out)}" for path in files]
    return "\n  ".join([f"{name}, made in {time.time() - started:.0f} s", *report, *sizes])


def main(
    out: Path = Path(__file__).parent,
    tasks: tuple[str, ...] = ("tales", "bouquets", "shell_game"),
    jobs: int = 2,
    seed: int = 0,
):
    """Make the toy tasks in `out`, `jobs` of them at a time, and print what they are like.

    seed: another instance of tales or stories than the committed one, 0; it needs its own --out.
    """
    if seed and (tasks not in (("tales",), ("stories",)) or out == Path(__file__).parent):
        raise SystemExit("error: --seed needs --tasks tales or --tasks stories, and an --out of its own")
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for report in pool.map(make, tasks, itertools.repeat(out), itertools.repeat(seed)):
            print(report, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
