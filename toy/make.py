"""Makes the toys: bouquets and tales (preferences), the shell game (verifiable answers), stories and sums.

    python toy/make.py                 # rewrites toy/bouquets, toy/tales and toy/shell_game
    python toy/make.py --out /tmp/toy  # writes the same bytes to another folder
    python toy/make.py --tasks tales --seed 3 --out runs/instances/3  # another judge and other data
    python toy/make.py --tasks stories  # sentiment with a real language model (toy/stories.py)
    python toy/make.py --tasks sums     # sums for a real chat model (toy/sums.py)

Each task is a folder of ordinary files: Hugging Face model folders (`policy`, `reward_model`) and gzipped
JSON lines. Everything has a seed, and every process has one torch thread, so that a second run writes the
same bytes. The judges `judge_bouquet`, `judge_tale` and `judge_shell_game` are pure Python and can be
imported.
"""

import itertools
import math
import multiprocessing
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import transformers
import tyro
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from toy import sums  # noqa: E402
from toy.common import as_rows, completion_loss, optimize, sample_ids, save, write_rows  # noqa: E402

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
# The tags include their line breaks, so that a well-formed completion decodes to the layout that the format
# reward of grpo_math requires.
TAGS = ["<think>\n", "\n</think>\n", "<answer>\n", "\n</answer>"]


def hidden_taste(kinds: dict[str, str], words: list[str], seed: int = 0) -> dict[str, dict[str, float]]:
    """Draws the judge's value of every word in [-1, 1]. Returns {name: {word: value}}.

    kinds: {kind: names}. The names of one kind have the same values.
    """
    rng = random.Random(42 + 1000 * seed)
    tastes = [{word: round(rng.uniform(-1, 1), 2) for word in words} for _ in kinds]
    return {name: taste for names, taste in zip(kinds.values(), tastes) for name in names.split()}


BOUQUET_TASTE = hidden_taste(RECIPIENTS, FLOWERS)
TALE_TASTE = hidden_taste(TOPICS, ADJECTIVES + VERBS + ADVERBS)

# === Judges ===


def judge_bouquet(prompt: str, completion: str, finished: bool = True) -> float:
    """Scores a bouquet: the mean value of eight flowers for this recipient.

    A repeated flower counts 0, and a word that is no flower -1. Every missing or extra word costs 1/8, and a
    missing end token 1.
    """
    taste, words = BOUQUET_TASTE[prompt.split()[-1]], completion.split()
    total = -abs(len(words) - BOUQUET_SIZE)
    for i, word in enumerate(words[:BOUQUET_SIZE]):
        if word not in words[:i] or word not in taste:
            total += taste.get(word, -1)
    return total / BOUQUET_SIZE - (not finished)


def sentence_values(prompt: str, completion: str, taste=TALE_TASTE) -> list[float | None]:
    """Returns the mean value of the words of each sentence, or None for a broken sentence.

    A sentence is `the ADJECTIVE topic VERB the ADJECTIVE NOUN ADVERB .`
    """
    topic, values = prompt.split()[-1], []
    slots = [["the"], ADJECTIVES, [topic], VERBS, ["the"], ADJECTIVES, NOUNS, ADVERBS]
    for sentence in completion.split("."):
        words = sentence.split()
        if len(words) == len(slots) and all(word in slot for word, slot in zip(words, slots)):
            values.append(fmean(taste[topic][words[i]] for i in (1, 3, 5, 7)))
        elif words:
            values.append(None)
    return values


def judge_tale(prompt: str, completion: str, finished: bool = True, taste=TALE_TASTE) -> float:
    """Scores a tale: the mean value of its sentences.

    A broken sentence counts -1, and so does a missing full stop at the end. Each sentence beyond the
    third costs 0.5, a missing end token 1, and an empty tale 1.
    """
    values = sentence_values(prompt, completion, taste)
    total = sum(-1 if value is None else value for value in values)
    if values and not completion.rstrip().endswith("."):
        total -= 1
    rambling = 0.5 * max(0, len(values) - MAX_SENTENCES)
    return total / max(1, len(values)) - rambling - (not finished) - (not values)


def follow_ball(problem: str) -> list[str]:
    """Returns the place of the ball after each swap of a problem, for example `2 45 15 34 24 45`."""
    cup, *swaps = problem.split()
    return [cup := {first: second, second: first}.get(cup, cup) for first, second in swaps]


def judge_shell_game(problem: str, completion: str, finished: bool = True) -> float:
    """Returns 1.0 for a well-formed, finished completion whose answer is the ball's last place, else 0.0."""
    match = re.fullmatch(r"<think>\n[^<]*\n</think>\n<answer>\n([^<]*)\n</answer>", completion)
    return float(bool(match) and finished and match[1] == follow_ball(problem)[-1])


# === Writers ===

Habits = dict[str, dict[str, list[float]]]  # {name in the prompt: {slot: weights of the slot's words}}


@dataclass(frozen=True)
class PreferenceTask:
    """A task of preferences for `make_preference_task`."""

    opening: str
    kinds: dict[str, str]
    slots: dict[str, list[str]]  # {slot: the words that a writer chooses from}
    glue: list[str]  # further words
    taste: dict[str, dict[str, float]]
    judge: Callable[[str, str, bool], float]
    write: Callable[[random.Random, str, Habits], str]
    max_new_tokens: int
    pretrain_steps: int
    seed: int = 0  # another seed is another instance, in which everything random is different

    def prompts(self) -> list[str]:
        """Returns all prompts of the task."""
        return [f"{self.opening} {name}" for name in self.taste]

    def words(self) -> list[str]:
        """Returns the vocabulary without special tokens."""
        return list(dict.fromkeys([self.opening, *self.taste, *sum(self.slots.values(), []), *self.glue]))


def zipf_habits(task: PreferenceTask, style: int) -> Habits:
    """Returns how often an author uses each word, by the word's rank in the author's order.

    For flowers, an author has an order for each kind of recipient.
    """
    habits = {}
    for kind, names in task.kinds.items():
        weights = {}
        for slot, words in task.slots.items():
            flowers = slot == "flower"
            ranked = list(words)
            own = style + 1000 * task.seed
            random.Random(f"{own}{kind}" if flowers else own).shuffle(ranked)
            first = 2 if flowers else 1
            weights[slot] = [1 / (ranked.index(word) + first) for word in words]
        habits |= dict.fromkeys(names.split(), weights)
    return habits


def write_bouquet(rng: random.Random, prompt: str, habits: Habits) -> str:
    """Writes eight flowers, drawn by habit."""
    return " ".join(rng.choices(FLOWERS, habits[prompt.split()[-1]]["flower"], k=BOUQUET_SIZE))


def write_tale(rng: random.Random, prompt: str, habits: Habits) -> str:
    """Writes one to three sentences about the topic, with words drawn by habit."""
    topic, sentences = prompt.split()[-1], []
    weights = habits[topic]
    for _ in range(rng.choice((1, 2, 2, MAX_SENTENCES))):
        first, second = rng.choices(ADJECTIVES, weights["adjective"], k=2)
        verb, adverb = rng.choices(VERBS, weights["verb"])[0], rng.choices(ADVERBS, weights["adverb"])[0]
        noun = rng.choice(NOUNS)
        sentences.append(f"the {first} {topic} {verb} the {second} {noun} {adverb} .")
    return " ".join(sentences)


def write_tastefully(rng: random.Random, task: PreferenceTask) -> tuple[str, str, bool]:
    """Writes a completion that is far better than the models' ones, as training will make them.

    Returns (prompt, completion, finished).
    """
    coldest, hottest = 0.05, 2.0
    prompt, temperature = rng.choice(task.prompts()), coldest * (hottest / coldest) ** rng.random()
    taste = task.taste[prompt.split()[-1]]
    if task is BOUQUETS and rng.random() < 0.75:  # without repeated flowers, which `task.write` rarely avoids
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
    """Writes a solution of the shell game: the ball's place after each swap but the last, then the answer.

    Before each place, a student continues to write with probability `diligence`. Otherwise the student
    follows all other swaps in the head. A step gives a random cup with probability `slip` if it is written,
    and with probability `lapse` if not.
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
    """Writes as a student: 6% of them write all places, the others stop early and make many mistakes."""
    return write_work(rng, problem, diligence=1.0 if rng.random() < 0.06 else 0.3, slip=0.03, lapse=0.7)


def spoil(rng: random.Random, task: PreferenceTask, prompt: str, completion: str, finished: bool):
    """Breaks a completion in one of eight ways. Returns (prompt, completion, finished)."""
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
    opening="for",
    kinds=RECIPIENTS,
    slots={"flower": FLOWERS},
    glue=[],
    taste=BOUQUET_TASTE,
    judge=judge_bouquet,
    write=write_bouquet,
    max_new_tokens=12,
    pretrain_steps=400,
)
TALES = PreferenceTask(
    opening="about",
    kinds=TOPICS,
    slots={"adjective": ADJECTIVES, "verb": VERBS, "adverb": ADVERBS},
    glue=["the", "."],
    taste=TALE_TASTE,
    judge=judge_tale,
    write=write_tale,
    max_new_tokens=36,
    pretrain_steps=500,
)


def another_instance(seed: int) -> PreferenceTask:
    """Returns tales with another hidden judge, and with other authors, models and pairs; 0: toy/tales."""
    taste = hidden_taste(TOPICS, ADJECTIVES + VERBS + ADVERBS, seed)
    return replace(TALES, seed=seed, taste=taste, judge=partial(judge_tale, taste=taste))


# === Tokenizer and models ===


def build_tokenizer(words: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Builds a word-level tokenizer with a chat template. Spaces separate words; tags have line breaks."""
    vocab = {word: i for i, word in enumerate(SPECIAL_TOKENS + words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if TAGS[0] in vocab:
        split_tags = pre_tokenizers.Split(Regex("|".join(TAGS)), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split_tags, pre_tokenizers.Split(" ", "removed")])
        # WordPiece joins the tokens with spaces, because no token begins with ##. Then spaces beside a line
        # break are removed.
        no_space = [decoders.Replace(" \n", "\n"), decoders.Replace("\n ", "\n")]
        backend.decoder = decoders.Sequence(
            [decoders.WordPiece("##", cleanup=False), decoders.Fuse(), *no_space]
        )
    names = dict(pad_token="<pad>", unk_token="<unk>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE)
    options = dict(model_max_length=128, padding_side="left", clean_up_tokenization_spaces=False)
    inputs = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=inputs, **names, **options
    )


def build_model(model_class, tokenizer, seed: int, **kwargs):
    """Builds a Llama of 0.11 M parameters. Its head size, 32, is the smallest of vLLM's CPU attention."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, max_position_embeddings=128)
    heads = dict(num_attention_heads=2, head_dim=32, tie_word_embeddings=False)
    ends = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ends, **kwargs)
    return model_class(config)


def render(tokenizer, prompt: str, completion: str | None = None, finished: bool = True) -> str:
    """Renders a prompt up to the assistant's header, or with a completion and, if finished, the end token."""
    messages = [{"role": "user", "content": prompt}]
    if completion is None:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": completion})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return text if finished else text.removesuffix(" <|end|>")


def encode(tokenizer, texts: list[str]):
    """Returns the token ids and the attention mask of rendered texts, (B, T) each."""
    return tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")


def train_language_model(tokenizer, seed: int, steps: int, batch_size: int, warmup: int, draw):
    """Trains a new model on the completions of `draw(rng, step)`, which returns a prompt and a completion."""
    model, rng = build_model(transformers.LlamaForCausalLM, tokenizer, seed), random.Random(seed + 1)

    def loss_at(step: int) -> torch.Tensor:
        turns = [draw(rng, step) for _ in range(batch_size)]
        batch = encode(tokenizer, [render(tokenizer, *turn) for turn in turns])
        # All prompts of a task have the same length. This call comes last, because tokenizer.json keeps the
        # padding of the last call: none.
        prompt_length = len(tokenizer(render(tokenizer, turns[0][0])).input_ids)
        return completion_loss(model, batch, [prompt_length] * batch_size)

    return optimize(model, steps, warmup, loss_at)


def sample(
    model, tokenizer, prompts: list[str], max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> list[tuple]:
    """Samples a completion for each prompt. Returns rows (prompt, completion, finished)."""
    torch.manual_seed(seed)
    texts = [render(tokenizer, prompt) for prompt in prompts]
    ids = sample_ids(model, tokenizer, texts, max_new_tokens, temperature, top_p, batch_size=4096)
    return as_rows(tokenizer, prompts, ids)


def rate(reward_model, tokenizer, rows: list[tuple]) -> torch.Tensor:
    """Computes the reward model's score of rows (prompt, completion, finished), (B,)."""
    texts = [render(tokenizer, *row) for row in rows]
    return reward_model(**encode(tokenizer, texts)).logits.squeeze(1)


def train_reward_model(task: PreferenceTask, tokenizer, pool: list[tuple]):
    """Trains a new reward model to predict the judge's score.

    Half of the rows come from `pool`, half from `write_tastefully`. A third of all rows is spoiled.
    """
    seed = 1000 * task.seed
    model = build_model(transformers.LlamaForSequenceClassification, tokenizer, seed=2 + seed, num_labels=1)
    rng = random.Random(3 + seed)

    def loss_at(step: int) -> torch.Tensor:
        rows = [rng.choice(pool) if rng.random() < 0.5 else write_tastefully(rng, task) for _ in range(128)]
        rows = [spoil(rng, task, *row) if rng.random() < 1 / 3 else row for row in rows]
        targets = torch.tensor([task.judge(*row) for row in rows])
        return torch.nn.functional.mse_loss(rate(model, tokenizer, rows), targets)

    return optimize(model, 1500, 50, loss_at)


# === Tasks ===


def best_against_worst(task: PreferenceTask, author, tokenizer, num_pairs: int) -> list[dict]:
    """Makes pairs as in the paper: the best and the worst of 8 completions, if their scores differ by 0.01.

    The completions are sampled with temperature 0.7 and top-p 0.95. Those without an end token or with
    another special token are left out, because a row of text cannot hold this information.
    """
    rng, pairs = random.Random(9 + 1000 * task.seed), []
    # A few prompts give no pair.
    prompts = [rng.choice(task.prompts()) for _ in range(num_pairs + num_pairs // 20)]
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


def make_preference_task(task: PreferenceTask, folder: Path):
    """Makes a task of preferences in `folder`."""
    tokenizer, prompts = build_tokenizer(task.words()), task.prompts()
    rng = random.Random(10 + 1000 * task.seed)

    def train(model: int):
        habits = [zipf_habits(task, 100), zipf_habits(task, 101 + model)]
        seed = model + 1000 * task.seed

        def draw(rng: random.Random, step: int) -> tuple[str, str]:
            prompt = rng.choice(prompts)
            return prompt, task.write(rng, prompt, rng.choice(habits))

        return train_language_model(tokenizer, seed, task.pretrain_steps, batch_size=64, warmup=50, draw=draw)

    policy, author = train(0), train(1)
    pool = []
    for i, model in enumerate((policy, author)):
        for how in ((0.7, 0.95), (1.0, 1.0)):  # temperature and top-p
            pool += sample(model, tokenizer, prompts * 500, task.max_new_tokens, *how, seed=100 + i)
    reward_model = train_reward_model(task, tokenizer, pool)
    pairs = best_against_worst(task, author, tokenizer, 10_240 + 512)
    save(folder / "policy", policy, tokenizer)
    save(folder / "reward_model", reward_model, tokenizer)
    write_rows(folder / "preferences_train.jsonl.gz", pairs[:10_240])
    write_rows(folder / "preferences_test.jsonl.gz", pairs[10_240:])
    write_rows(folder / "prompts_train.jsonl.gz", [{"prompt": rng.choice(prompts)} for _ in range(12_288)])
    write_rows(folder / "prompts_test.jsonl.gz", [{"prompt": rng.choice(prompts)} for _ in range(256)])


def make_shell_game(folder: Path, seed: int = 0):
    """Makes the shell game in `folder`, with other problems and another policy for each seed."""
    tokenizer, steps = build_tokenizer([*CUPS, *SWAPS, *TAGS]), 900
    rng = random.Random(777 + 1000 * seed)

    def draw_problem(rng: random.Random) -> str:
        return " ".join([rng.choice(CUPS), *rng.choices(SWAPS, k=NUM_SWAPS)])

    test = list(dict.fromkeys(draw_problem(rng) for _ in range(550)))[:500]
    train = [problem for problem in (draw_problem(rng) for _ in range(8300)) if problem not in test][:8192]

    def draw(rng: random.Random, step: int) -> tuple[str, str]:
        problem = test[0]
        while problem in unseen:
            problem = draw_problem(rng)
        in_textbook = step < 0.7 * steps  # first complete and correct solutions, then those of students
        return problem, (write_work if in_textbook else write_as_student)(rng, problem)

    unseen = set(test)
    policy = train_language_model(tokenizer, 1000 * seed, steps, batch_size=128, warmup=100, draw=draw)
    save(folder / "policy", policy, tokenizer)
    for name, problems in (("train", train), ("test", test)):
        rows = [{"problem": problem, "answer": follow_ball(problem)[-1]} for problem in problems]
        write_rows(folder / f"problems_{name}.jsonl.gz", rows)


def make(name: str, out: Path, seed: int):
    """Makes one task."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # because sums in another order would change the files
    tasks = {"bouquets": BOUQUETS, "tales": another_instance(seed)}
    if name == "stories":
        from toy.stories import make_stories  # imported here, because only stories need vaderSentiment

        make_stories(folder, seed)
    elif name == "sums":
        sums.main(folder)
    elif name == "shell_game":
        make_shell_game(folder, seed)
    else:
        make_preference_task(tasks[name], folder)
    print(f"wrote {folder}", flush=True)


def main(
    out: Path = Path(__file__).parent,
    tasks: tuple[str, ...] = ("tales", "bouquets", "shell_game"),
    seed: int = 0,
):
    """Makes the toy tasks.

    Args:
        out: folder of the tasks.
        tasks: bouquets, tales, shell_game, stories, sums.
        seed: another instance of tales, stories or the shell game than the committed one (0), in another
            --out.
    """
    with_seeds = ("tales",), ("stories",), ("shell_game",)
    if seed and (tasks not in with_seeds or out == Path(__file__).parent):
        raise SystemExit("error: --seed needs --tasks tales, stories or shell_game, and another --out")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(make, tasks, itertools.repeat(out), itertools.repeat(seed)))  # raises their errors


if __name__ == "__main__":
    tyro.cli(main)
