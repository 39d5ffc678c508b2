"""make_micro_batches finds the smallest number of micro-batches, and finds it fast."""

import random
import time

import pytest

from utils import make_micro_batches


def distribute(lengths, count) -> list[list[int]]:
    """Gives each sequence, the longest first, to the micro-batch with the fewest tokens so far."""
    loads = [0] * count
    micro_batches = [[] for _ in range(count)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        smallest = loads.index(min(loads))
        loads[smallest] += lengths[i]
        micro_batches[smallest].append(i)
    return micro_batches


def one_by_one(lengths, ranks, max_tokens) -> list[list[int]]:
    """Tries every number of micro-batches, from one for each rank on, as make_micro_batches did at first."""
    count = ranks
    while True:
        found = distribute(lengths, count)
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens for part in found):
            return found
        count += ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_result_is_that_of_trying_every_number(ranks):
    draw = random.Random(ranks)
    for _ in range(150):
        lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 40))]
        max_tokens = draw.randint(1, 200)  # some sequences are longer
        assert make_micro_batches(lengths, ranks, max_tokens) == one_by_one(lengths, ranks, max_tokens)


def test_without_a_limit_there_is_one_for_each_rank():
    assert make_micro_batches([5, 3, 3], 1, 0) == [[0, 1, 2]]
    assert make_micro_batches([5, 3, 3], 2, 0) == [[0], [1, 2]]
    assert make_micro_batches([], 2, 0) == make_micro_batches([], 2, 100) == [[], []]


@pytest.mark.parametrize("max_tokens", [8192, 1300])
def test_thousands_of_sequences_take_no_time(max_tokens):
    draw = random.Random(0)
    usual = [int(20 + draw.gammavariate(2, 150)) for _ in range(12_000)]
    lengths = [4097] * 6_000 if max_tokens == 8192 else usual
    started = time.process_time()  # other processes do not count
    micro_batches = make_micro_batches(lengths, 4, max_tokens)
    assert time.process_time() - started < 3  # on an idle core about 0.3
    assert sorted(sum(micro_batches, [])) == list(range(len(lengths)))
    if max_tokens == 8192:
        assert [len(indices) for indices in micro_batches] == [1] * 6_000
    else:
        loads = [sum(lengths[i] for i in indices) for indices in micro_batches if len(indices) > 1]
        assert max(loads) <= max_tokens and sum(loads) > 0.95 * max_tokens * len(loads)
