"""Make the calls in the JSON file argv[1], [[method, arguments], ...], on a MemFabric engine; answers go to argv[2].

Runs in .venv-ascend. Without an NPU the engine cannot be initialised, so that transfers fail; but they fail after the
arguments have been taken. An answer is [what the call returned or raised, the last error's text].
"""

import json
import sys

import memfabric_hybrid

engine = memfabric_hybrid.TransferEngine()
answers = []
with open(sys.argv[1]) as file:
    calls = json.load(file)
for method, arguments in calls:
    try:
        answer = getattr(engine, method)(*arguments)
    except (AttributeError, TypeError) as error:
        answer = type(error).__name__
    answers.append([answer, memfabric_hybrid.get_and_clear_last_err_msg()])
with open(sys.argv[2], "w") as file:
    json.dump(answers, file)
