"""What used to go wrong without a word: lost text, other attention, ranks with other data, terminals.

What only a whole run shows about folders and checkpoints is in test_reliability.py.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import PAIRS, ROOT, TOY, finish, parse_args, refused, run_ranks, start_ranks, tokens_of
from test_passes import ARGS, SIZES, build
from test_reliability import SHORT
from test_token_logps import EXAMPLES, full_logps
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, Phi3Config, PreTrainedTokenizerFast

import dpo_humanline
from utils import choose_attention, encode_group, load_tokens, pad_batch, strip_prompt, token_logps

LIMITS = SimpleNamespace(max_prompt_length=64, max_length=128)
EACH = "{% for m in messages %}<|user|> {{ m.content }} <|end|> {% endfor %}"
USER = {"role": "user", "content": "for king"}
ANSWER = {"role": "assistant", "content": "rose iris"}


def encode(prompt, completions, template=EACH):
    """What `encode_group` makes of a row with the toy's tokenizer and a template."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    tokenizer.chat_template = template
    tokens = tokens_of(tokenizer, {tokenizer.eos_token_id})
    rewards = [1.0, 0.0][: len(completions)]
    return encode_group(LIMITS, tokens, 1, prompt, completions, rewards)


# --- the text of a row ---

SYSTEM = {"role": "system", "content": "for queen"}
CRITIC = {"role": "critic", "content": "for clerk"}
KNOWN_ROLES = EACH.replace("messages %}", "messages if m.role in ('user', 'assistant') %}")
LAST_TURN = EACH.replace("in messages", "in messages[-1:]")
NO_REPEATS = EACH.replace("in messages", "in (messages[1:] if messages[0] == messages[1] else messages)")
SYSTEM_LAST = """{% for m in messages if m.role != 'system' %}<|user|>
{% if loop.last %}{{ messages[0].content }} {% endif %}{{ m.content }} <|end|>{% endfor %}"""


@pytest.mark.parametrize("completions", [[], [[ANSWER]]])
@pytest.mark.parametrize(
    ("prompt", "template"),
    [
        ([SYSTEM, USER], KNOWN_ROLES),
        ([USER, CRITIC], KNOWN_ROLES),
        ([USER, ANSWER, SYSTEM | {"role": "user"}], LAST_TURN),
        ([USER, USER], NO_REPEATS),
    ],
)
def test_a_prompt_whose_text_the_template_loses_is_dropped(prompt, template, completions):
    assert encode(prompt, completions, template) == ((), "text changed by the chat template")


@pytest.mark.parametrize("template", [EACH, SYSTEM_LAST])
def test_a_system_message_may_stand_elsewhere(template):
    group, note = encode([SYSTEM, USER, ANSWER, CRITIC | {"role": "user"}], [], template)
    assert len(group) == 1 and note == ""


@pytest.mark.parametrize(
    "part", ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"]
)
def test_parts_of_a_message_beside_its_content_are_not_thrown_away(part):
    full = ANSWER | {part: [{"name": "search"}] if "call" in part else "because"}
    dropped = (), "with tool calls or reasoning beside a message's content"
    assert encode([USER], [[full]]) == encode([USER, full, USER], [[ANSWER]]) == dropped
    empty = ANSWER | {part: None if "reason" in part else []}
    assert encode([USER], [[empty]]) == encode([USER], [[ANSWER]])


def test_a_prompt_that_ends_with_an_answer_is_dropped():
    assert encode([USER, ANSWER], [[ANSWER]]) == ((), "prompt ends with an assistant message")


def test_an_empty_chat_template_loses_all_text(tmp_path):
    (tmp_path / "empty.jinja").write_text("")
    said = refused([*SHORT, "--chat-template", str(tmp_path / "empty.jinja")])
    assert "0 rows, 128 dropped; 128 prompt empty or longer than" in said


def test_keys_that_arrow_fills_with_nulls_are_not_rendered():
    strict = "{% for m in messages if 'tool_calls' in m %}{{ raise_exception('one call only') }}{% endfor %}"
    null = {"tool_calls": None, "name": None}
    assert encode([USER | null], [[ANSWER | null]], strict + EACH) == encode([USER], [[ANSWER]])


def test_own_data_do_not_train_the_toy(tmp_path):
    row = {
        "prompt": "What is the capital of France?",
        "chosen": "Paris, as ever.",
        "rejected": "Rome, I guess.",
    }
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    said = refused([*SHORT, "--dataset", str(tmp_path / "mine.jsonl")])
    assert "0 rows, 1 dropped; 1 mostly unknown to the tokenizer of --model" in said


def test_a_completion_gets_no_space_of_the_tokenizers_own():
    """Pieces as in SentencePiece: a space in front of a text, and line breaks that merge."""
    letters = "▁\nabcdefghijklmnopqrstuvwxyz"
    vocab = {token: i for i, token in enumerate([*letters, "\n\n"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("\n", "\n")]))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    raw.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    prompt_ids, text_ids = tokenizer("ask\n").input_ids, tokenizer("ask\n\nsay").input_ids
    assert text_ids[: len(prompt_ids)] != prompt_ids
    ids = strip_prompt(tokenizer, text_ids, prompt_ids, "\nsay")
    assert tokenizer.convert_ids_to_tokens(ids) == ["\n", "s", "a", "y"]


# --- the model ---


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more


BY_LAYER = {"full_attention": rope("dynamic"), "sliding_attention": rope("default")}
HALVES = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG = Phi3Config(
    hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=4096,
    original_max_position_embeddings=1024,
    rope_parameters=rope("longrope", **HALVES),
)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (AutoConfig.for_model("llama", max_position_embeddings=1024, rope_parameters=rope("dynamic")), 1024),
        (LONG, 1024),
        (AutoConfig.for_model("mpt", max_seq_len=1024), 1024),
        (AutoConfig.for_model("gemma3_text", max_position_embeddings=1024, rope_parameters=BY_LAYER), 1024),
        (AutoConfig.for_model("gpt2", n_positions=1024), 1024),
        (AutoConfig.for_model("llama", max_position_embeddings=1024, rope_parameters=rope("linear")), None),
    ],
)
def test_positions_that_change_with_the_length_of_a_pass_are_refused(config, positions):
    flags = ["--model", str(TOY / "policy"), "--dataset", PAIRS, "--max-prompt-length", "100"]
    fits = parse_args(dpo_humanline, [*flags, "--max-length", "1024", "--max-new-tokens", "924"])
    load_tokens(fits, config)
    args = parse_args(dpo_humanline, [*flags, "--max-length", "1025", "--max-new-tokens", "924"])
    if positions is None:
        load_tokens(args, config)
    else:
        with pytest.raises(ValueError, match=f"1025 tokens, and it has {positions} positions"):
            load_tokens(args, config)


def test_a_model_that_cannot_be_packed_is_not():
    """Doge's attention adds to its scores what depends on the values."""
    model = build("doge", SIZES | {"keep_window_size": 64})
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            parameter.data.normal_()
    choose_attention(ARGS, model)
    assert model.config._attn_implementation != "packed"
    alone = [full_logps(model, *pad_batch([x], 0, "cpu")) for x in EXAMPLES]
    together = token_logps(model, *pad_batch(EXAMPLES, 0, "cpu"))
    for row, expected in zip(together, alone):
        torch.testing.assert_close(row[: expected.shape[1]], expected[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {"is_decoder": False}),  # reads what it is to predict
        ("granite", {"logits_scaling": 8.0}),
        ("llama", {"attention_dropout": 0.5}),
    ],
)
def test_a_model_whose_log_probs_are_not_its_own_is_refused(name, settings):
    model = build(name, SIZES | {"pad_token_id": 0} | settings).train()
    with pytest.raises(ValueError, match="depends on later tokens, on noise, or on a factor of the logits"):
        choose_attention(ARGS, model)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ([], "float64"),
        (["--model", "mine", "--dataset", PAIRS], "float32"),
        (["--model", "mine", "--dataset", PAIRS, "--dtype", "float64"], "float64"),
    ],
)
def test_on_the_cpu_the_toy_computes_in_float64_and_a_model_in_float32(flags, dtype, monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = parse_args(dpo_humanline, flags)
    dpo_humanline.setup(args)
    assert args.dtype == dtype


# --- ranks and terminals ---


def worker_that(folder, *lines: str) -> str:
    """worker.py, after these lines."""
    path, own = folder / "own_worker.py", ROOT / "tests" / "worker.py"
    run = [f"sys.argv[0] = {str(own)!r}", "runpy.run_path(sys.argv[0], run_name='__main__')"]
    path.write_text("\n".join(["import os, runpy, sys", *lines, *run]))
    return str(path)


def test_ranks_that_read_different_data_stop(tmp_path):
    lines = open(PAIRS).read().splitlines(keepends=True)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "rows.jsonl").write_text("".join(lines[rank : rank + 16]))
    worker = worker_that(tmp_path, f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])")
    processes = start_ranks(2, [[*SHORT, "--dataset", "rows.jsonl", "--output-dir", "run"]], worker)
    processes[0].join(100)
    processes[1].kill()  # as torchrun does; by itself it waits for that
    said, _ = finish(processes)
    assert processes[0].exitcode == 1
    assert "error: the ranks read different data; give all machines the same files" in said


def test_a_terminal_that_lacks_letters_shows_their_codes(tmp_path):
    evaluated = ["--eval-dataset", PAIRS, "--eval-samples", "4", "--output-dir", str(tmp_path / "run")]
    worker = worker_that(tmp_path, "sys.stdout.reconfigure(encoding='ascii', errors='strict')")
    assert "mean \\xb1 standard error" in run_ranks(1, [[*SHORT, *evaluated]], worker)
    assert len(json.loads((tmp_path / "run" / "outputs.json").read_text())) == 4


def test_an_error_that_nobody_reads_goes_to_standard_output(tmp_path):
    closed = ["reader, writer = os.pipe()", "os.close(reader)", "os.dup2(writer, 2)"]
    said = refused(["--lr", "-1"], worker_that(tmp_path, *closed))
    assert said == "error: --lr is -1.0; it must be from 1e-30 to 1e+30\n"
