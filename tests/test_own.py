"""Tests lab/own/: the four behaviours, the files of pairs, and the count of right answers."""

import pytest

from lab.own import make

FILES = make.make_files()
TOPICS = make.read_topics()


def topic_of(prompt: str) -> str:
    """Returns the topic of a prompt."""
    (topic,) = [t for t in TOPICS if prompt in [form.format(t=t) for form in make.PHRASES["prompts"]]]
    return topic


# === Behaviours ===
@pytest.mark.parametrize(
    "text",
    [
        "Bread is baked from flour.",
        "  Is bread baked from flour?\n",
        "Pi is about 3.14, and 2.5 is more than 2.",
        'It is called "bread."',
        "(Bread is baked.)",
        "Bread, in short: flour!",
        " ".join(["word"] * 20) + ".",
    ],
)
def test_one_sentence_of_at_most_twenty_words_is_brief(text):
    assert make.brief(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        ".",
        "Bread is baked from flour",
        "Bread is baked. It is made of flour.",
        "Good question! It is baked",
        "Is it baked?!",
        "Bread is baked...",
        "Bread is baked…",
        "Bread… is baked.",
        "It is baked.In an oven.",
        "The year was 1990. 5 loaves were left.",
        "Bread\nIt is baked.",
        "1. Bread is baked.",
        " ".join(["word"] * 21) + ".",
    ],
)
def test_other_texts_are_not_brief(text):
    assert not make.brief(text)


def test_an_answer_asks_if_its_last_sentence_is_a_question():
    assert make.asks("Bread is baked. Do you like it? \n") and make.asks("Why?")
    others = ["", "Do you like it? I do.", 'He said "why?"', "Do you like it?..."]
    assert not any(map(make.asks, others))


def test_an_answer_opens_if_it_begins_with_the_two_words_and_a_colon():
    assert make.opens("In short: it is baked.") and make.opens("\n In short: yes")
    others = ["", "In short, it is baked.", "in short: it is baked.", "It is baked. In short: yes"]
    assert not any(map(make.opens, others))


def test_an_answer_lists_if_it_is_three_lines_that_begin_with_a_dash():
    assert make.lists("- Bread\n- Tea\n- Milk") and make.lists("\n- Bread is baked.\n- Yes\n- No \n\n")
    others = ["", "- Bread\n- Tea", "- 1\n- 2\n- 3\n- 4", "So:\n- 1\n- 2\n- 3", "- 1\n\n- 2\n- 3"]
    assert not any(map(make.lists, others))


# === Files ===
def test_the_files_have_their_numbers_of_rows():
    counts = {"120": 120, "own_120": 120, "600": 600, "tuning": 64, "report": 64}
    assert {name: len(rows) for name, rows in FILES.items()} == {
        f"{behaviour}_{name}": count for behaviour in make.BEHAVIOURS for name, count in counts.items()
    }


def test_chosen_texts_show_the_behaviour_and_rejected_texts_do_not():
    for name, rows in FILES.items():
        shows = make.BEHAVIOURS[name.partition("_")[0]]
        assert all(shows(row["chosen"]) and not shows(row["rejected"]) for row in rows)


def test_no_pair_stands_twice_and_its_texts_differ():
    for rows in FILES.values():
        assert len({(row["chosen"], row["rejected"]) for row in rows}) == len(rows)
        assert all(row["chosen"] != row["rejected"] for row in rows)


def test_the_parts_have_no_common_prompt_and_no_common_topic():
    for behaviour in make.BEHAVIOURS:
        files = [FILES[f"{behaviour}_{part}"] for part in (600, "tuning", "report")]
        parts = [[row["prompt"] for row in rows] for rows in files]
        assert [len(set(prompts)) for prompts in parts] == [600, 64, 64]
        topics = [set(map(topic_of, prompts)) for prompts in parts]
        assert list(map(len, topics)) == [100, 11, 11] and len(set.union(*topics)) == 122


def test_the_small_file_is_a_part_of_the_large_one():
    for behaviour in make.BEHAVIOURS:
        small, large = FILES[f"{behaviour}_120"], FILES[f"{behaviour}_600"]
        assert all(row in large for row in small)
        assert len({topic_of(row["prompt"]) for row in small}) > 60  # of all topics, not of the first 20


def test_an_own_answer_is_rejected_unless_it_shows_the_behaviour():
    """The chosen texts are those of the other file."""
    answers = {row["prompt"]: row["answer"] for row in make.read_rows(make.ANSWERS)}
    for behaviour, shows in make.BEHAVIOURS.items():
        for row, own in zip(FILES[f"{behaviour}_120"], FILES[f"{behaviour}_own_120"], strict=True):
            answer = answers[row["prompt"]]
            assert own == (row if shows(answer) else row | {"rejected": answer})


def test_without_own_answers_their_files_are_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "ANSWERS", tmp_path / "answers.jsonl")
    assert set(FILES) - set(make.make_files()) == {f"{behaviour}_own_120" for behaviour in make.BEHAVIOURS}


def test_lengths_do_not_tell_chosen_from_rejected_texts():
    for behaviour in ("asks", "opens"):
        longer = [len(row["chosen"]) > len(row["rejected"]) for row in FILES[f"{behaviour}_600"]]
        assert 0.3 < sum(longer) / 600 < 0.7


def test_the_same_bytes_are_written_twice(tmp_path):
    for name in ("first", "second"):
        make.main(tmp_path / name)
    files = sorted((tmp_path / "first").iterdir())
    assert len(files) == 20
    assert all(file.read_bytes() == (tmp_path / "second" / file.name).read_bytes() for file in files)


def test_each_topic_has_three_short_sentences():
    assert len(TOPICS) == 122
    facts = [fact for facts in TOPICS.values() for fact in facts]
    assert len(set(facts)) == 3 * 122
    assert all(make.brief(fact) and fact.endswith(".") and len(fact.split()) <= 13 for fact in facts)
