"""sgl-eval and lm-eval as far as their command lines and files go: run as a program of either name.

They ask a real endpoint. FAKE_HARNESS in the environment makes them fail in a way of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

STAMP = "20261130-120000"


def chosen_fault() -> str:
    return os.environ.get("FAKE_HARNESS", "")


def post(url, body, key):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            return json.load(reply)
    except OSError:
        return None


def begin():
    fault = chosen_fault()
    if fault == "crash":
        sys.exit("x" * 10_000 + "\nLoading\n\n  Traceback: no data set at \x1bhttps://data.example")
    if fault == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["FAKE_HARNESS_CHILD"]).write_text(str(child.pid))
        time.sleep(600)


def sgl_eval(argv):
    parser = argparse.ArgumentParser(prog="sgl-eval", allow_abbrev=False)
    run = parser.add_subparsers(dest="cmd", required=True).add_parser("run", allow_abbrev=False)
    run.add_argument("name")
    for flag, kind in (
        ("base-url", str),
        ("api-key", str),
        ("num-examples", int),
        ("num-threads", int),
        ("n-repeats", int),
        ("max-tokens", int),
        ("temperature", float),
        ("seed", int),
        ("out-dir", str),
    ):
        run.add_argument(f"--{flag}", type=kind, default="EMPTY" if flag == "api-key" else None)
    given = parser.parse_args(argv)
    begin()
    assert given.n_repeats == 1
    assert given.temperature == 0
    folder = Path(given.out_dir) / f"sgl_eval_{given.name}_{STAMP}"
    folder.mkdir(parents=True)
    lines, right = [], 0
    for number in range(given.num_examples):
        reply = post(
            f"{given.base_url}/chat/completions",
            {"messages": [{"role": "user", "content": f"problem {number}"}], "max_tokens": given.max_tokens},
            given.api_key,
        )
        text = reply["choices"][0]["message"]["content"] if reply else ""
        correct = text.endswith(str(number))
        right += correct
        lines.append(
            {
                "generation": text,
                "reasoning_content": None,
                "id": f"{given.name}-{number}",
                "expected_answer": str(number),
                "finish_reason": reply["choices"][0]["finish_reason"] if reply else "error",
                "problem": f"problem {number}",
                "predicted_answer": text[-1:],
                "symbolic_correct": correct,
            }
        )
    fault = chosen_fault()
    metrics = {"name": given.name, "num_examples": given.num_examples, "n_repeats": 1}
    metrics["aggregate"] = {"score": right / given.num_examples, "no_answer": 0.0}
    if fault == "partial":
        metrics["partial"] = True
    if fault == "lost":
        lines.pop()
    written = "\n".join(json.dumps(line) for line in lines) + "\n"
    if fault == "garbage":
        written = '{"id": 7}\n'
    if fault != "nothing":
        (folder / "metrics.json").write_text(json.dumps(metrics))
        (folder / "output-rs0.jsonl").write_text(written)


def lm_eval(argv):
    parser = argparse.ArgumentParser(prog="lm-eval", allow_abbrev=False)
    run = parser.add_subparsers(dest="cmd", required=True).add_parser("run", allow_abbrev=False)
    for flag in ("model", "model_args", "tasks", "gen_kwargs", "output_path"):
        run.add_argument(f"--{flag}")
    run.add_argument("--limit", type=float)
    run.add_argument("--seed", type=int)
    run.add_argument("--log_samples", action="store_true")
    given = parser.parse_args(argv)
    begin()
    assert given.model == "local-completions"
    assert given.log_samples
    model, generation = json.loads(given.model_args), json.loads(given.gen_kwargs)
    assert model["tokenizer_backend"] == "None"
    folder = Path(given.output_path) / model["model"].replace("/", "__")
    folder.mkdir(parents=True)
    lines = []
    for number in range(int(given.limit)):
        body = {"model": model["model"], "prompt": f"problem {number}", "max_tokens": generation["max_gen_toks"]}
        reply = post(model["base_url"], body, os.environ["OPENAI_API_KEY"])
        if reply is None:
            sys.exit("API request failed")
        text = reply["choices"][0]["text"]
        for name in ("flexible-extract", "strict-match"):
            right = float(text.endswith(str(number)) and name == "flexible-extract")
            lines.append(
                {
                    "doc_id": number,
                    "doc": {"question": f"problem {number}"},
                    "target": str(number),
                    "arguments": {},
                    "resps": [[text]],
                    "filtered_resps": [text[-1:]],
                    "filter": name,
                    "metrics": ["exact_match"],
                    "doc_hash": "d",
                    "exact_match": right if chosen_fault() != "bleu" else 0.5,
                }
            )
    (folder / f"results_{STAMP}.json").write_text("{}")
    (folder / f"samples_{given.tasks}_{STAMP}.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")


if __name__ == "__main__":
    {"sgl-eval": sgl_eval, "lm-eval": lm_eval}[Path(sys.argv[0]).name](sys.argv[1:])
