"""Tests that alpaca_eval reads our outputs and our annotator, with a server that replaces the paid judge."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import PAIRS, ROOT, TOY, run_ranks, write_rows

constants = pytest.importorskip("alpaca_eval.constants")
WORDS = "queen clerk baker king prince duke cook smith".split()
ANSWER = {"output": "aster", "generator": "gpt4_1106_preview"}
REFERENCE = [{"instruction": f"for {word}\n"} | ANSWER for word in WORDS]


class Judge(BaseHTTPRequestHandler):
    """Prefers the output called m with probability 0.75, and keeps all requests."""

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


def test_the_command_judges_every_output_with_our_annotator_and_the_packages_prompt(tmp_path):
    (tmp_path / "ref.json").write_text(json.dumps(REFERENCE))
    data = write_rows(tmp_path / "ref.jsonl", REFERENCE)
    run = ["--model", str(TOY / "policy"), "--dataset", PAIRS, "--eval-dataset", data]
    run += ["--num-steps", "1", "--batch-size", "8", "--max-new-tokens", "16"]
    run_ranks(1, [[*run, "--output-dir", str(tmp_path / "mine")]])
    subprocess.run([sys.executable, ROOT / "paper/alpaca_eval/outputs.py", tmp_path / "mine"], check=True)
    outputs = json.loads((tmp_path / "mine" / "outputs.json").read_text())
    assert [row["instruction"] for row in outputs] == [row["instruction"] for row in REFERENCE]

    shutil.copytree(ROOT / "paper" / "alpaca_eval", tmp_path / "judge")
    prompt = constants.EVALUATORS_CONFIG_DIR / "alpaca_eval_clf_gpt4_turbo" / "alpaca_eval_clf.txt"
    shutil.copy(prompt, tmp_path / "judge" / "gpt41")  # as in paper/alpaca_eval/README.md
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = {"api_key": "none", "base_url": f"http://127.0.0.1:{server.server_port}/v1"}
    (tmp_path / "client.yaml").write_text(json.dumps({"default": [client]}))
    command = [sys.executable, "-m", "alpaca_eval.main", "evaluate", "--model_outputs", "mine/outputs.json"]
    command += ["--reference_outputs", "ref.json", "--annotators_config", str(tmp_path / "judge" / "gpt41")]
    # The length-controlled win rate needs the Hub.
    command += ["--fn_metric", "get_winrate", "--sort_by", "win_rate"]
    env = os.environ | {"OPENAI_CLIENT_CONFIG_PATH": str(tmp_path / "client.yaml")}
    try:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    name, _, *numbers = done.stdout.splitlines()[-1].split()
    assert (name, int(numbers[-2])) == ("mine", len(WORDS)) and len(Judge.asked) == len(WORDS)
    annotations = json.loads((tmp_path / "mine" / "annotations.json").read_text())
    # The two outputs are in random order, so m is the reference's in some pairs and ours in the others.
    assert sorted({round(row["preference"], 9) for row in annotations}) == [1.25, 1.75]
    for request in Judge.asked:
        wanted = {"model": "gpt-4.1-2025-04-14", "max_tokens": 1, "logprobs": True, "top_logprobs": 5}
        assert request.items() >= wanted.items()
        assert [message["role"] for message in request["messages"]] == ["system", "user"]
