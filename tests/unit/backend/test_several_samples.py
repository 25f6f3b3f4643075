"""What SGLang does with several samples of one prompt (`n`) that are to be handed over: why the router refuses them.

Upstream's fault: when this fails, the router may pass them on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import asyncio, json
from types import SimpleNamespace
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

ROOM, PROMPTS, SAMPLES = 1000, 2, 3
sent = []

class Manager:
    def __init__(self):
        self.rid_to_state = {}
    def _init_req_state(self, one):
        self.rid_to_state[one.rid] = SimpleNamespace(
            time_stats=SimpleNamespace(set_finished_time=lambda: None), lora_released=False
        )
    async def _tokenize_one_request(self, one):
        return SimpleNamespace(
            rid=one.rid, sampling_params=SimpleNamespace(max_new_tokens=8), bootstrap_room=one.bootstrap_room
        )
    async def _send_one_request(self, tokenized):
        sent.append(tokenized.bootstrap_room)
    async def _wait_one_response(self, one, request):
        yield {"meta_info": {"id": one.rid}}
    async def _collect_batch_responses(self, generators):
        return []

async def run():
    manager = Manager()
    body = GenerateReqInput(
        text=["a"] * PROMPTS, sampling_params={"n": SAMPLES}, bootstrap_host="h", bootstrap_port=1, bootstrap_room=ROOM
    )
    body.normalize_batch_and_arguments()
    states = {}
    for rid in body.rid:
        one = SimpleNamespace(rid=rid)
        manager._init_req_state(one)
        states[rid] = manager.rid_to_state[rid]
    async for _ in TokenizerManager._handle_batch_request(manager, body, None, states):
        pass

asyncio.run(run())
print(json.dumps(sent))
"""


def test_all_samples_of_a_prompt_have_the_same_room():
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_PLUGINS": "none"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rooms = json.loads(done.stdout.splitlines()[-1])
    # First each prompt once, for the prefix cache; then its samples.
    assert rooms == [1000, 1001, *[1000] * 3, *[1001] * 3]
