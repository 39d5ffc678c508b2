"""Data as people have it: tool calls, reasoning, begun answers, Arrow's nulls and JSON, other columns.

A row is trained as a person who reads it would expect, or it is refused with a line that says why.
"""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import TOY, write_rows
from test_templates import TEMPLATES, bytes_or_pieces
from transformers import AutoConfig, AutoModelForCausalLM

import dpo_humanline
import grpo_humanline
import grpo_math_humanline
import kto_humanline
import utils
from support import data, grading, sampling
from support.data import SkipRow

U, A = ({"role": role} for role in ("user", "assistant"))
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def texts(prompt, *completions, chat_template=CHATML) -> list[str]:
    """Returns the text of a prompt and of its completions, as they are trained."""
    tokenizer = bytes_or_pieces("bytes", chat_template)
    prompt_ids, all_ids = data.encode(tokenizer, {tokenizer.eos_token_id}, prompt, completions)
    return [tokenizer.decode(ids) for ids in (prompt_ids, *all_ids)]


# --- messages ---


KEYS = ["tool_calls", "reasoning_content", "thinking", "refusal", "function_call", "id", "language", "weight"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("in_prompt", [False, True])
def test_another_part_of_a_message_than_its_text_is_refused_by_name(key, in_prompt):
    """Templates render some of them and lose others."""
    answer = A | {"content": "It is cold.", key: [CALL] if "call" in key else "I look outside."}
    prompt = [U | {"content": "Weather?"}]
    if in_prompt:
        prompt, answer = [*prompt, answer, U | {"content": "And now?"}], A | {"content": "Warm."}
    with pytest.raises(utils.InputError, match=f"only role, content, name here: remove '{key}' from them"):
        texts(prompt, [answer])


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_an_empty_part_of_a_message_changes_nothing(empty):
    prompt = [U | {"content": "Hi"}]
    assert texts(prompt, [A | {"content": "Yes", "tool_calls": empty}]) == texts(prompt, "Yes")
    assert texts(prompt, [A | {"content": "Yes", "name": empty}]) == texts(prompt, "Yes")


@pytest.mark.parametrize("nested", [False, True])
def test_json_columns_are_decoded_at_every_level(tmp_path, nested):
    """They were trained as text, brackets and all."""
    value = [U | {"content": "Hi", "more": {"city": "Oslo"}}]
    column = pyarrow.array([json.dumps(value), None], pyarrow.string()).cast(pyarrow.json_())
    expected = [value, None]
    if nested:  # a list of objects with a JSON value
        objects = pyarrow.StructArray.from_arrays([column], ["arguments"])
        column = pyarrow.ListArray.from_arrays([0, 1, 2], objects)
        expected = [[{"arguments": value}], [{"arguments": None}]]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "id": [1, 2]}), tmp_path / "rows.parquet")
    rows = [row for _, row in data.read_rows(str(tmp_path / "rows.parquet"), "train")]
    assert [row["prompt"] for row in rows] == expected and [row["id"] for row in rows] == [1, 2]


def test_images_of_parquet_files_are_not_decoded(tmp_path):
    """A data set that was saved by `datasets` asks for it, and decoding needs Pillow."""
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.Image()})
    columns = {"prompt": ["What is this?"], "images": [{"bytes": b"no picture", "path": None}]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "rows.parquet")
    ((_, row),) = data.read_rows(str(tmp_path / "rows.parquet"), "train")
    assert row["images"]["bytes"] == b"no picture"


@pytest.mark.parametrize("completions", [[], [" moon rises"]])
def test_a_prompt_that_ends_with_the_assistants_words_is_refused(completions):
    """It would get a second turn of the assistant."""
    with pytest.raises(utils.InputError, match="a prompt must not end with a message of the assistant"):
        texts([U | {"content": "Write a haiku."}, A | {"content": "Autumn"}], *completions)


@pytest.mark.parametrize("chat_template", [CHATML, None])
@pytest.mark.parametrize("completion", ["It is<|im_end|> cold.", "<|im_end|>It is cold.", "<|im_end|>"])
def test_a_completion_that_spells_an_eos_token_is_skipped(completion, chat_template):
    """It was trained as its part before the EOS token, and counted as complete."""
    with pytest.raises(SkipRow, match="spells an EOS token|completion empty"):
        texts("Weather?", "Warm.", completion, chat_template=chat_template)


@pytest.mark.parametrize("chat_template", [CHATML, None])
def test_an_eos_token_that_a_completion_ends_with_is_its_end(chat_template):
    whole, spelled = texts("Weather?", "Cold.", "Cold.<|im_end|>", chat_template=chat_template)[1:]
    assert whole == spelled == "Cold.<|im_end|>"


@pytest.mark.parametrize("role", [None, 5, "human", "gpt", "model", "Assistant"])
def test_an_unknown_role_is_refused_with_the_known_ones(role):
    with pytest.raises(utils.InputError, match="every message must have a role: one of system, "):
        texts([{"role": role, "content": "Hi"}], "Yes")


@pytest.mark.parametrize("value", [None, 5, 1.5, True, {"text": "Hi"}, ["Hi"], [U | {"content": "Hi"}]])
def test_a_completion_of_another_type_is_named_and_shown(value):
    with pytest.raises(
        utils.InputError,
        match="must be a text or a list of messages, not |must have a role|one message of the",
    ):
        texts("Hi", value)


# --- columns ---


@pytest.fixture
def load(tmp_path, capsys):
    """Reads rows with a script. Returns the groups, and what was printed."""

    def read(script, rows, **flags):
        tokenizer, eos_ids = data.load_tokenizer(script.Args(model=str(TOY / "policy")))
        args = script.Args(**flags)
        name = write_rows(tmp_path / "rows.jsonl", rows)
        groups = script.load_groups(args, tokenizer, eos_ids, name, "train")
        return groups, capsys.readouterr().out

    return read


PAIR = {"prompt": "for king", "chosen": "rose iris", "rejected": "iris"}


def test_other_columns_change_nothing(load):
    assert load(dpo_humanline, [PAIR | {"source": "x", "margin": 2.0}])[0] == load(dpo_humanline, [PAIR])[0]


@pytest.mark.parametrize(
    "column", ["image", "images", "choices", "options", "tools", "functions", "passage", "audio", "context"]
)
def test_a_column_that_belongs_to_the_prompt_is_refused_by_name(load, column):
    for script in (dpo_humanline, kto_humanline, grpo_humanline):
        with pytest.raises(utils.InputError, match=f"the column '{column}' would be ignored") as error:
            load(script, [PAIR, PAIR | {column: ["something"]}])
        assert error.value.__notes__[0].endswith("line 2")
    problem = {"problem": "2 45 15 34 24 45", "answer": "5", column: "A) 1"}
    with pytest.raises(utils.InputError, match=f"the column '{column}' would be ignored"):
        load(grpo_math_humanline, [problem], system_prompt="")


def test_an_instruction_beside_a_prompt_is_refused_and_a_null_one_is_not(load):
    with pytest.raises(utils.InputError, match="'instruction' beside 'prompt' would be ignored"):
        load(dpo_humanline, [PAIR | {"instruction": "Answer in French."}])
    assert len(load(dpo_humanline, [PAIR | {"instruction": None}])[0]) == 1
    row = PAIR | {"prompt": None, "instruction": "for king"}
    assert load(dpo_humanline, [row])[0][0][0].prompt == "for king"


# --- truncation ---


def test_truncated_rows_are_counted_and_pairs_that_became_equal_are_skipped(load):
    """The prompt has 5 tokens, and 2 tokens of each completion remain."""
    rows = [
        PAIR | {"chosen": "rose", "rejected": "iris"},
        PAIR | {"chosen": "rose iris lily", "rejected": "iris"},
        PAIR | {"chosen": "rose iris lily", "rejected": "iris rose rose"},
        PAIR | {"chosen": "rose iris lily", "rejected": "rose iris rose"},
    ]
    for script in (dpo_humanline, kto_humanline, grpo_humanline):
        groups, told = load(script, rows, max_length=7)
        assert len(groups) == 3
        assert told.endswith("; 3 of 6 completions truncated by --max-length\n")
        assert (
            "1 skipped, the first in line 4: both completions are equal, maybe because they were trunc"
            in told
        )
    assert " truncated " not in load(dpo_humanline, rows)[1]


def test_reasons_of_skipped_prompts_are_separate(load):
    long = PAIR | {"prompt": "for king queen king queen king queen"}
    groups, told = load(dpo_humanline, [PAIR, long, PAIR, long], max_prompt_length=6)
    assert (
        len(groups) == 2 and "2 skipped, the first in line 2: prompt longer than --max-prompt-length" in told
    )
    _, told = load(dpo_humanline, [PAIR, long], max_length=8)
    assert "1 skipped, the first in line 2: prompt leaves no room for a completion in --max-length" in told


# --- edits ---


def test_an_adapter_or_a_head_that_is_no_linear_layer_is_refused_early():
    settings = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **settings))

    class Adapter(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden)

    head, adapter = model.lm_head, Adapter(16, 64, bias=False)
    model.lm_head = adapter
    with pytest.raises(utils.InputError, match="adapters .*see docs/elsewhere.md.* are not supported"):
        utils.choose_attention(model, 32)
    model.lm_head = head
    utils.choose_attention(model, 32)
    model.peft_config = {"default": None}
    with pytest.raises(utils.InputError, match="adapters .*see docs/elsewhere.md.* are not supported"):
        utils.choose_attention(model, 32)


# --- rounding ---


@pytest.mark.parametrize("script", [grpo_humanline, grpo_math_humanline])
def test_k3_keeps_its_digits_near_zero(script):
    """exp(-x) + x - 1 was off by 17% for log-ratios of 1e-3 in fp32, and 0 or negative for smaller ones."""
    log_ratio = torch.logspace(-5, -2, 200).repeat(2, 1)
    log_ratio[1] *= -1
    k3 = script.k3(log_ratio)
    exact = torch.expm1(-log_ratio.double()) + log_ratio.double()
    assert (k3 >= 0).all() and ((k3 - exact).abs() <= 2e-7 * log_ratio.abs() + 2e-2 * exact).all()
    plain = (-log_ratio).exp() + log_ratio - 1
    assert (plain - exact).abs().mean() > 3 * (k3 - exact).abs().mean()


@pytest.mark.parametrize("group_size", [2, 3])
def test_scores_that_differ_by_rounding_have_no_advantage(load, group_size):
    scores = [0.3, 0.1 + 0.2, 0.3][:group_size]
    row = {"prompt": "for king", "completions": ["rose", "iris", "lily"][:group_size], "scores": scores}
    good = row | {"scores": [1.0, 0.5, 0.0][:group_size]}
    groups, _ = load(grpo_humanline, [good, row], group_size=group_size)
    rewards = [[example.reward for example in group] for group in groups if len(group) == group_size]
    advantages = grpo_humanline.group_advantages(torch.tensor(rewards, dtype=torch.float64))
    assert (advantages[0] != 0).any() and (advantages[1:] == 0).all()


# --- the format of an answer that the template has begun ---


@pytest.mark.parametrize("begun", ["<think>", "<think>\n"])
def test_the_tag_that_the_template_has_opened_counts_for_the_rewards(begun):
    """Without it the reward had a ceiling of 8.75, and a second <think> was paid."""
    begins = CHATML.replace("assistant\n{%", f"assistant\n{begun}{{%")
    tokenizer = bytes_or_pieces("bytes", begins)
    row = {"problem": "What is 1 + 1?", "answer": "2"}
    args = grpo_math_humanline.Args(system_prompt="")
    ((problem),) = grpo_math_humanline.encode_row(args, tokenizer, {tokenizer.eos_token_id}, row)
    assert problem.opening == begun
    thinking = "\n" * (begun == "<think>") + "so\n</think>\n<answer>\n2\n</answer>"
    rewards = []
    for text in (thinking, "<think>\n" + thinking.lstrip()):
        full = problem.opening + text
        rewards.append(grpo_math_humanline.format_reward(full) + grpo_math_humanline.tag_count_reward(full))
    assert rewards[0] == 2 and rewards[1] < 2


@pytest.mark.parametrize(
    "row",
    [
        {"question": "How many? 2 45 15 34", "answer": "He has 3 * 24 = <<3*24=72>>72 clips.\n#### 72"},
        {"problem": "2 45 15 34", "solution": "Adding, we get $\\boxed{72}$."},
        {"problem": "2 45 15 34", "answer": 72, "level": "Level 5", "type": "Algebra"},
    ],
)
def test_rows_of_gsm8k_and_math_are_read_as_they_come(one_rank, row):
    tokenizer = bytes_or_pieces("bytes", CHATML)
    args = grpo_math_humanline.Args()
    (problem,) = grpo_math_humanline.encode_row(args, tokenizer, {tokenizer.eos_token_id}, row)
    assert problem.question == row.get("problem", row.get("question"))
    grader = grading.start_grader()  # in this process, the time limit would stay
    answers = ["The answer is 72.", "The answer is 73."]
    jobs = [(problem.answer, answer, problem.question) for answer in answers]
    assert grading.grade_all(grader, grading.grade, jobs) == [True, False]
    grader.stop()
    grader.join()


# --- what a reward model reads ---


class NoModel(torch.nn.Module):
    """Scores every text with 0."""

    def __init__(self):
        super().__init__()
        self.config = AutoConfig.for_model("llama", max_position_embeddings=100, pad_token_id=0)
        self.embedding = torch.nn.Embedding(1000, 1)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask):
        return type("Output", (), {"logits": torch.zeros(len(input_ids), 1)})


def test_the_first_text_that_a_reward_model_reads_is_printed_once(one_rank, capsys):
    """Question and answer were glued together if the policy had a template and the reward model had none."""
    sample = utils.Example([U | {"content": "What is 2 + 2?"}], [1], text="Four.", finished=False)
    model, tokenizer = NoModel(), bytes_or_pieces("bytes", None)
    for _ in range(2):
        sampling.reward_scores(model, tokenizer, torch.device("cpu"), "\n", [sample, sample])
    assert capsys.readouterr().out == "the reward model reads 'What is 2 + 2?\\nFour.'\n"
    long = sample._replace(text="x" * 100)
    with pytest.raises(utils.InputError, match="114|115 tokens, but the model has 100 positions"):
        sampling.reward_scores(model, tokenizer, torch.device("cpu"), "\n", [long])


def test_a_reward_model_may_return_a_score_alone(one_rank):
    """ArmoRM's own code returns a score beside the logits, and another model's may have no logits."""

    class Scores(NoModel):
        def forward(self, input_ids, attention_mask):
            return type("Output", (), {"score": torch.ones(len(input_ids))})

    sample = utils.Example("What is 2 + 2?", [1], text="Four.")
    tokenizer = bytes_or_pieces("bytes", None)
    assert sampling.reward_scores(Scores(), tokenizer, torch.device("cpu"), "", [sample]).tolist() == [1]


def test_an_edit_that_returns_a_wrong_shape_is_told():
    said = "dpo_loss returned a tensor of shape \\(2, 2\\) instead of \\(2,\\)"
    with pytest.raises(ValueError, match=said):
        utils.check_shape("dpo_loss", torch.zeros(2, 2), (2,))
    utils.check_shape("dpo_loss", torch.zeros(2, 2), (2, 2))
