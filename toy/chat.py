"""Makes pairs for a chat model from a file of another repository. The pairs are not part of this one.

    python toy/chat.py polite instruction-data-with-preference.json runs/chat/polite
    python toy/chat.py harmless test.jsonl.gz runs/chat/harmless

polite:   rasbt/LLMs-from-scratch (Apache-2.0), ch07/04_preference-tuning-with-dpo/. A language model (Llama
          3.1 70B) has rewritten one of the answers to an instruction, more or less politely than the other.
harmless: anthropics/hh-rlhf (MIT), harmless-base/. People have chosen between two answers of a model, which
          ends a conversation. Many of these texts are offensive.
"""

import gzip
import json
import random
import re
import sys
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.run import write_file  # noqa: E402

PARTS = {"tuning": 200, "held_out": 300}  # rows; all others are in train.jsonl
LONGEST = 800  # characters of a conversation, which are at most 256 tokens of SmolLM2 with few exceptions


def polite_rows(file) -> list[dict]:
    """Reads the json of polite."""
    rows = []
    for row in json.load(file):
        question = f"{row['instruction']}\n{row['input']}".strip()
        pair = {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
        rows.append({"prompt": [{"role": "user", "content": question}], **pair})
    return rows


def harmless_rows(file) -> list[dict]:
    """Reads the jsonl of harmless. Conversations that differ before the last answer are no pair."""
    rows = []
    for line in file:
        pair = {key: as_messages(conversation) for key, conversation in json.loads(line).items()}
        chosen, rejected = pair["chosen"], pair["rejected"]
        if chosen[:-1] == rejected[:-1]:
            rows.append({"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]})
    return rows


def as_messages(conversation: str) -> list[dict]:
    r"""Splits a text of hh-rlhf, "\n\nHuman: …\n\nAssistant: …", into messages."""
    _, *parts = re.split(r"\n\n(Human|Assistant):", conversation)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[name], "content": text.strip()} for name, text in zip(parts[::2], parts[1::2])]


def selected_rows(rows: list[dict]) -> list[dict]:
    """Returns the rows with two different answers and at most LONGEST characters.

    Of rows with the same first question only the first row stays: no conversation stands in two parts.
    """
    first_of = {}  # {first question: its first row}
    for row in rows:
        question = [message["content"] for message in row["prompt"]]
        answers = {row["chosen"][0]["content"], row["rejected"][0]["content"]}
        roles = [message["role"] for message in row["prompt"]]
        # A conversation of hh-rlhf may lack a turn.
        takes_turns = roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        has_texts = all(question) and all(answers) and len(answers) == 2
        length = len("".join(question)) + max(map(len, answers))
        if takes_turns and has_texts and length <= LONGEST:
            first_of.setdefault(question[0], row)
    return list(first_of.values())


def main(kind: Positional[Literal["polite", "harmless"]], file: Positional[Path], out: Positional[Path]):
    """Writes train.jsonl, tuning.jsonl and held_out.jsonl, in an order that does not depend on the run.

    Args:
        kind: which of the two.
        file: the file of that repository, as it is there or after gunzip.
        out: the folder.
    """
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as opened:
        rows = polite_rows(opened) if kind == "polite" else harmless_rows(opened)
    rows = selected_rows(rows)
    random.Random(0).shuffle(rows)
    out.mkdir(parents=True, exist_ok=True)
    start = 0
    for part, count in [*PARTS.items(), ("train", len(rows))]:
        lines = [json.dumps(row) for row in rows[start : start + count]]
        write_file(out / f"{part}.jsonl", "\n".join(lines) + "\n")
        start += count
    print(f"{out}: {len(rows)} pairs, of which {len(rows) - sum(PARTS.values())} are for training")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
