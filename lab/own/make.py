"""Makes pairs for four behaviours of a chat model that a function can count.

    python -m lab.own.make runs/own

brief   The answer is one sentence of at most twenty words.
asks    The answer ends with a question.
opens   The answer begins with "In short:".
lists   The answer is a list of exactly three items.

For each behaviour the folder gets five files of rows {"prompt": …, "chosen": …, "rejected": …}:

NAME_600.jsonl       six prompts about each of 100 topics; the rejected text is written in another style
NAME_120.jsonl       120 of these rows
NAME_own_120.jsonl   the same, but the rejected text is the model's own answer (answers.py), unless this
                     answer shows the behaviour
NAME_tuning.jsonl    64 held-out rows about 11 other topics
NAME_report.jsonl    64 held-out rows about the last 11 topics

topics.txt has three true sentences about each topic. phrases.json has phrases that fit every topic. All
texts are made of both.
"""

import json
import random
import re
from pathlib import Path

import tyro

FOLDER = Path(__file__).resolve().parent
ANSWERS = FOLDER / "answers.jsonl"
PHRASES = json.loads((FOLDER / "phrases.json").read_text(encoding="utf-8"))
PARTS = {"train": (100, 600), "tuning": (11, 64), "report": (11, 64)}  # numbers of topics and of prompts


# === Behaviours ===
def brief(text: str) -> bool:
    """Returns whether a text is one sentence of at most twenty words.

    The sentence ends with its only period, question mark or exclamation mark, behind which quotation marks or
    brackets may follow. A period inside a number, as in 3.5, ends no sentence. One inside an abbreviation
    does, and so does a line break.
    """
    sentence = re.sub(r"(?<=\d)\.(?=\d)", "", text.strip().rstrip("\"'”’)"))
    ends = re.findall(r"[.!?…\n]", sentence)
    is_sentence = len(ends) == 1 and re.search(r"\w\W*[.!?]$", sentence)
    return bool(is_sentence) and len(text.split()) <= 20


def asks(text: str) -> bool:
    """Returns whether a text ends with a question mark."""
    return text.rstrip().endswith("?")


def opens(text: str) -> bool:
    """Returns whether a text begins with "In short:"."""
    return text.lstrip().startswith("In short:")


def lists(text: str) -> bool:
    """Returns whether a text has exactly three lines, each of which begins with "- "."""
    lines = text.strip().splitlines()
    return len(lines) == 3 and all(line.startswith("- ") for line in lines)


BEHAVIOURS = {"brief": brief, "asks": asks, "opens": opens, "lists": lists}


# === Pairs ===
def brief_pair(rng: random.Random, facts: list[str]) -> tuple[list[str], list[str]]:
    """Returns the sentences of the chosen text, which is one, and of the rejected text, four to six."""
    first, second = rng.sample(facts, 2)
    joined = f"{first[:-1]}, and {lower(second)}"
    begun = rng.choice(PHRASES["beginnings"]) + lower(first)
    chosen = rng.choice([first, begun, joined if brief(joined) else first])
    opening, closings = pick(rng, "openings", 0, 1), pick(rng, "closings", 1, 2)
    return [chosen], opening + rng.sample(facts, 3) + closings


def asks_pair(rng: random.Random, facts: list[str]) -> tuple[list[str], list[str]]:
    """Returns facts before a question, and as many before a statement, which has a similar length."""
    count = rng.choice([2, 3])
    chosen = rng.sample(facts, count) + pick(rng, "questions", 1)
    return chosen, rng.sample(facts, count) + pick(rng, "closings", 1)


def opens_pair(rng: random.Random, facts: list[str]) -> tuple[list[str], list[str]]:
    """Returns facts that "In short:" precedes, and as many with another opening or with none."""
    count = rng.choice([2, 3])
    first, *others = rng.sample(facts, count)
    opening, closing = pick(rng, "openings", 0, 1, 1), pick(rng, "closings", 0, 1)
    return [f"In short: {lower(first)}", *others, *closing], opening + rng.sample(facts, count) + closing


def lists_pair(rng: random.Random, facts: list[str]) -> tuple[list[str], list[str]]:
    """Returns three facts as a list, and the same without one, with phrases around them."""
    opening, closings = pick(rng, "openings", 0, 1), pick(rng, "closings", 1, 2)
    chosen = "\n".join(f"- {fact}" for fact in rng.sample(facts, 3))
    return [chosen], opening + rng.sample(facts, 3) + closings


PAIRS = {"brief": brief_pair, "asks": asks_pair, "opens": opens_pair, "lists": lists_pair}


def pick(rng: random.Random, kind: str, *counts: int) -> list[str]:
    """Returns random phrases of a kind. Their number is one of the counts."""
    return rng.sample(PHRASES[kind], rng.choice(counts))


def lower(sentence: str) -> str:
    """Returns a sentence as it stands behind other words. No sentence of topics.txt begins with a name."""
    return sentence[0].lower() + sentence[1:]


# === Rows and files ===
def read_topics() -> dict[str, list[str]]:
    """Returns the three sentences of each topic."""
    lines = (FOLDER / "topics.txt").read_text(encoding="utf-8").splitlines()
    return {topic: facts for topic, *facts in (line.split(" | ") for line in lines)}


def make_rows(behaviour: str) -> dict[str, list[dict]]:
    """Returns the rows of each part in random order. A topic stands in one part only."""
    topics = list(read_topics().items())
    random.Random(1).shuffle(topics)
    rows = {}
    for part, (topic_count, prompt_count) in PARTS.items():
        rows[part] = []
        for topic, facts in topics[:topic_count]:
            for prompt in (form.format(t=topic) for form in PHRASES["prompts"]):
                pair = PAIRS[behaviour](random.Random(f"{behaviour}, {prompt}"), facts)
                chosen, rejected = (" ".join(sentences).format(t=topic) for sentences in pair)
                rows[part].append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        rows[part] = random.Random(1).sample(rows[part], prompt_count)  # of all behaviours the same prompts
        del topics[:topic_count]
    return rows


def make_files() -> dict[str, list[dict]]:
    """Returns the rows of all files, by the names of the files."""
    files = {}
    for behaviour, shows in BEHAVIOURS.items():
        rows = make_rows(behaviour)
        files |= {f"{behaviour}_{part}": rows[part] for part in ("tuning", "report")}
        files |= {f"{behaviour}_{count}": rows["train"][:count] for count in (600, 120)}
        if ANSWERS.exists():
            answers = {row["prompt"]: row["answer"] for row in read_rows(ANSWERS)}
            files[f"{behaviour}_own_120"] = [
                row if shows(answers[row["prompt"]]) else row | {"rejected": answers[row["prompt"]]}
                for row in rows["train"][:120]
            ]
    return files


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: tyro.conf.Positional[Path]):
    """Writes the files of pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in make_files().items():
        write_rows(folder / f"{name}.jsonl", rows)
        print(f"{name}.jsonl: {len(rows)} pairs")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
