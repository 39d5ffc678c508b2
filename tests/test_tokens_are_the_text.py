"""Tests that move to test_sampling.py: the text of a sample."""

from test_data import CHATML, bytes_or_pieces

from support import sampling
from utils import Example


def test_tags_that_are_special_tokens_stay_in_a_samples_text():
    """They vanished before the grader and the reward model, which read thought and answer as one text."""
    tokenizer = bytes_or_pieces("bytes", CHATML)
    tags = ["<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    text = "<think>17 + 25 = 42</think>\\boxed{42}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert {*tokenizer.convert_tokens_to_ids(tags)} == {*ids} & {*tokenizer.all_special_ids}
    prompt = Example("17 + 25", tokenizer("17 + 25", add_special_tokens=False).input_ids)
    for template in (CHATML, None):  # the sample begins a new turn, or continues the prompt's text
        tokenizer.chat_template = template
        sample = prompt._replace(text=sampling.decode_completion(tokenizer, prompt, ids))
        assert sample.text == text
        assert text in sampling.reward_input(tokenizer, "", sample)
