"""alpaca_eval reads our outputs and our annotator's configuration, with a stand-in for the paid judge."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
