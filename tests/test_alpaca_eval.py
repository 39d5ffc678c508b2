"""alpaca_eval reads our outputs and our annotator's configuration, with a stand-in for the paid judge."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pandas as pd
import pytest
from conftest import PAIRS, ROOT, TOY, run_ranks

constants = pytest.importorskip("alpaca_eval.constants")
WORDS = "queen clerk baker nurse pilot judge tailor farmer".split()  # of the toy's prompts, or unknown to it
REFERENCE = [
    {"instruction": f"for {word}\n", "output": "aster", "generator": "gpt4_1106_preview"} for word in WORDS
]


class Judge(BaseHTTPRequestHandler):
    """Prefers the output called m with probability 0.75, and keeps what it was asked."""

    asked = []

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        tokens = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in (("m", 0.75), ("M", 0.25))]
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "m"}}
        choice["logprobs"] = {"content": [tokens[0] | {"top_logprobs": tokens}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        text = json.dumps(answer | {"usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of DPO that has sampled for the instructions of the reference file."""
    folder = tmp_path_factory.mktemp("alpaca")
    (folder / "ref.json").write_text(json.dumps(REFERENCE))
    flags = ["--model", str(TOY / "policy"), "--dataset", PAIRS, "--eval-dataset", str(folder / "ref.json")]
    flags += ["--num-steps", "1", "--batch-size", "8", "--max-new-tokens", "16", "--engine", "hf"]
    run_ranks(1, [[*flags, "--eval-samples", str(len(WORDS)), "--output-dir", str(folder / "mine")]])
    return folder


def test_outputs_are_the_reference_files_instructions_in_its_order(run):
    from alpaca_eval.utils import get_generator_name, load_or_convert_to_dataframe

    outputs = load_or_convert_to_dataframe(run / "mine" / "outputs.json")
    assert list(outputs["instruction"]) == [row["instruction"] for row in REFERENCE]
    assert get_generator_name(None, outputs) == "mine" and outputs["output"].map(type).eq(str).all()


def test_the_command_judges_every_output_with_our_annotator_and_the_packages_prompt(run):
    shutil.copytree(ROOT / "paper" / "alpaca_eval", run / "judge")
    prompt = constants.EVALUATORS_CONFIG_DIR / "alpaca_eval_clf_gpt4_turbo" / "alpaca_eval_clf.txt"
    shutil.copy(prompt, run / "judge" / "gpt41")  # as docs/alpaca_eval.md does
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = {"api_key": "none", "base_url": f"http://127.0.0.1:{server.server_port}/v1"}
    (run / "client.yaml").write_text(json.dumps({"default": [client]}))
    command = [sys.executable, "-m", "alpaca_eval.main", "evaluate", "--model_outputs", "mine/outputs.json"]
    command += ["--reference_outputs", "ref.json", "--annotators_config", str(run / "judge" / "gpt41")]
    # The length-controlled win rate needs the Hub.
    command += ["--fn_metric", "get_winrate", "--sort_by", "win_rate"]
    environment = os.environ | {"OPENAI_CLIENT_CONFIG_PATH": str(run / "client.yaml")}
    try:
        done = subprocess.run(command, cwd=run, env=environment, capture_output=True, text=True, timeout=200)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    name, _, *numbers = done.stdout.splitlines()[-1].split()
    assert (name, int(numbers[-2])) == ("mine", len(WORDS)) and len(Judge.asked) == len(WORDS)
    preferences = [row["preference"] for row in json.loads((run / "mine" / "annotations.json").read_text())]
    # The two outputs change places at random, so m is the reference's in some pairs and ours in the others.
    assert sorted({round(preference, 9) for preference in preferences}) == [1.25, 1.75]
    for request in Judge.asked:
        wanted = {"model": "gpt-4.1-2025-04-14", "max_tokens": 1, "logprobs": True, "top_logprobs": 5}
        assert request.items() >= wanted.items()
        assert [message["role"] for message in request["messages"]] == ["system", "user"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of scikit-learn
def test_a_missing_row_gives_the_later_ones_the_difficulty_of_another_instruction(tmp_path, monkeypatch):
    """Why all 805 are needed: alpaca_eval's own regression on made-up preferences (docs/alpaca_eval.md)."""
    from alpaca_eval.metrics import glm_winrate

    rng, sigmoid = np.random.default_rng(0), lambda x: 1 / (1 + np.exp(-x))
    difficulty, baselines = rng.normal(0, 1, 805), []
    for shift in (-1, 1):  # the two models that are in the file on the Hub: concise and verbose
        length = rng.normal(shift, 1, 805)
        columns = {
            "model": "gamed",
            "index": range(805),
            "preference": sigmoid(np.tanh(length) + 0.5 * difficulty),
        }
        columns |= {
            "std_delta_len": length,
            "instruction_difficulty": difficulty,
            "not_gamed_baseline": False,
        }
        baselines.append(pd.DataFrame(columns))
    pd.concat(baselines).to_csv(tmp_path / "df_gamed.csv", index=False)
    monkeypatch.setattr(glm_winrate, "hf_hub_download", lambda **_: tmp_path / "df_gamed.csv")
    lengths = rng.integers(200, 3000, (2, 805))
    wins = sigmoid(1.5 * difficulty - 1 - (lengths[0] - lengths[1]) / 2000)
    pairs = zip(lengths.T, wins)
    rows = [{"output_1": "x" * a, "output_2": "x" * b, "preference": 1 + win} for (a, b), win in pairs]
    rows = [row | {"annotator": "judge", "generator_1": "reference", "generator_2": "mine"} for row in rows]

    def measured(some):
        result = glm_winrate.get_length_controlled_winrate(some, save_weights_dir=None)
        return result["length_controlled_winrate"], result["lc_standard_error"]

    assert measured(rows) == pytest.approx((33.01, 0.76), abs=0.02)
    assert measured(rows[:-1]) == pytest.approx((33.01, 0.76), abs=0.02)
    assert measured(rows[1:]) == pytest.approx((32.96, 0.04), abs=0.02)
