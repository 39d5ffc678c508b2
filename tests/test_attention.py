"""Which attention a model gets, what is said of it, and compiled blocks."""

import random

import pytest
import torch
import torch.nn.functional as F
import varlen_kernel
from conftest import PAIRS, TOY, metrics, parse_args
from test_passes import EXAMPLES, PADDED, SIZES, build
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import run_here

import dpo_humanline
import utils

FLAGS = ["--dataset", PAIRS, "--num-steps", "2", "--batch-size", "8", "--eval-samples", "0"]
FLAGS += ["--checkpoint-every", "0"]


def varlen_by_hand(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What `varlen_attn` promises, a sequence and a head at a time. Raises if it is called otherwise."""
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and cu_q[0] == 0 and cu_q[-1] == len(query)
    assert type(max_q) is int and max_q == max_k == cu_q.diff().max()
    assert window_size == (-1, 0) and (enable_gqa or query.shape == key.shape == value.shape)
    outputs = []
    for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist()):
        heads = []
        for head in range(query.shape[1]):
            shared = head * key.shape[1] // query.shape[1]
            scores = query[begin:end, head] @ key[begin:end, shared].T * scale
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            heads.append(weights @ value[begin:end, shared])
        outputs.append(torch.stack(heads, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("shared", [{}, {"enable_gqa": True}])  # without and with shared key heads
def test_the_kernels_arguments_are_the_sequences(shared, monkeypatch):
    model = build("llama", SIZES)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    utils.choose_attention(model, 32)
    input_ids, mask = utils.pad_batch(EXAMPLES, "cpu")
    expected = utils.token_logps(model, input_ids, mask)
    monkeypatch.setattr(utils, "varlen_attn", varlen_by_hand)
    monkeypatch.setattr(utils, "SHARED_HEADS", shared)
    model.set_attn_implementation("varlen")
    logps = utils.token_logps(model, input_ids, mask)
    torch.testing.assert_close(logps, expected, rtol=1e-9, atol=1e-9)


def test_a_kernel_that_lacks_a_head_size_is_left_for_the_next_and_the_run_says_so(
    tmp_path, monkeypatch, capsys
):
    def lacks(*arguments, **options):
        raise RuntimeError("no head size of 4")

    run_here(dpo_humanline, *FLAGS, "--output-dir", tmp_path / "loop")
    assert "\nattention: loop\n" in capsys.readouterr().out
    monkeypatch.setitem(utils.ATTENTION, "loop", lacks)
    run_here(dpo_humanline, *FLAGS, "--output-dir", tmp_path / "padded")
    assert "\nattention: sdpa; loop: no head size of 4\n" in capsys.readouterr().out
    loop, padded = metrics(tmp_path / "loop"), metrics(tmp_path / "padded")
    assert [line["loss"] for line in padded] == pytest.approx([line["loss"] for line in loop], rel=1e-9)


def test_a_gpu_that_is_left_with_the_loop_says_that_it_is_slow(monkeypatch):
    def lacks(*arguments, **options):
        raise RuntimeError("no head size of 4")

    model = build("llama", SIZES)
    monkeypatch.setitem(utils.ATTENTION, "varlen", lacks)
    monkeypatch.setattr(utils, "attention_candidates", lambda *_: (["varlen", "loop"], []))
    assert utils.choose_attention(model, 32) == "loop; varlen: no head size of 4"
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    told = utils.choose_attention(model, 32)
    assert told.endswith("; slow on a GPU, one call for each sequence, and no faster with --compile")


def test_an_attention_that_is_off_is_left_and_all_that_are_off_end_the_run(monkeypatch):
    model = build("llama", SIZES)

    def off(module, query, key, value, mask, **options):
        return query.transpose(1, 2) * 100, None

    monkeypatch.setitem(utils.ATTENTION, "loop", off)
    assert utils.choose_attention(model, 32).startswith("sdpa; loop: ")
    model = build(*PADDED["a short window"])
    assert utils.choose_attention(model, 48).startswith("sdpa; no packing")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_and_routers_are_those_of_evaluation(checkpointing, tmp_path):
    """PhiMoE's router draws noise in training; a dropout would too. The policy is still the reference."""
    model = build("phimoe", SIZES | {"router_jitter_noise": 0.2, "num_local_experts": 4})
    model.config.attention_dropout = 0.3
    model.config.dtype = torch.float32
    model.float().save_pretrained(tmp_path / "policy")
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path / "policy")
    flags = [*FLAGS, "--model", tmp_path / "policy", "--dtype", "float32", "--lr", "0", "--eval-dataset", ""]
    flags += ["--max-prompt-length", "40", "--max-length", "60", "--max-new-tokens", "8"]
    flags += ["--gradient-checkpointing"] if checkpointing else []
    run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "run")
    for line in metrics(tmp_path / "run"):
        assert line["humanline/log_ratio_abs_mean"] < 1e-6 and line["grad_norm"] > 0
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert final.config.router_jitter_noise == 0.2 and final.config.attention_dropout == 0.3


@pytest.mark.parametrize("attention", ["loop", "varlen"])
def test_compiled_blocks_give_the_same_and_are_compiled_once(attention, one_rank, monkeypatch):
    """Also with varlen, the kernel of a GPU. test_cuda_check.py tests that a block then is one graph."""
    varlen_kernel.register()
    args = parse_args(dpo_humanline, ["--dtype", "float32"])
    torch._dynamo.reset()
    models = []
    for args.compile in (False, True):
        policy, _ = dpo_humanline.load_models(args, torch.device("cpu"), 100)  # with the loop
        models.append(policy)
        monkeypatch.setattr(utils, "attention_candidates", lambda *_: ([attention], []))
    draw = random.Random(0)
    graphs = []
    for step in range(10):
        examples = []
        for _ in range(4 + step):
            ids = [draw.randrange(5, 30) for _ in range(draw.randrange(6, 40))]
            examples.append(utils.Example("", ids[:3], ids[3:]))
        input_ids, mask = utils.pad_batch(examples, "cpu")
        results = []
        for model in models:
            logps = utils.token_logps(model, input_ids, mask)
            F.softplus(logps).mean().backward()
            gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
            results.append([logps.detach(), *gradients])
            model.zero_grad()
        for plain, compiled in zip(*results):
            torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[1]


def test_a_model_that_cannot_run_has_its_traceback(tmp_path):
    build("mixtral", SIZES | {"num_local_experts": 4}).float().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path)
    flags = ["--dataset", PAIRS, "--max-prompt-length", "30", "--max-length", "40", "--max-new-tokens", "8"]
    flags += ["--model", str(tmp_path), "--dtype", "float64", "--output-dir", str(tmp_path / "run")]
    with pytest.raises(RuntimeError, match="got Double"):
        run_here(dpo_humanline, *flags)
