"""Runs `sglang.benchmark.serving` as its command line does, once for each line of arguments in a JSON file.

A script and no module of ours: it is started with nothing of this repository on its path. One process for warm-up and
measurement, because importing SGLang takes longer than a small measurement.
"""

import importlib.machinery
import importlib.util
import json
import sys
import types


def _stand_in_for_datasets() -> None:
    """SGLang imports Hugging Face's `datasets` for data sets that we do not use; the CPU set-up leaves it out."""
    if importlib.util.find_spec("datasets") is not None:
        return

    def load_dataset(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("the package `datasets` is not installed")

    module = types.ModuleType("datasets")
    module.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    sys.modules["datasets"] = module


def main() -> None:
    with open(sys.argv[1]) as file:
        lines: list[list[str]] = json.load(file)
    _stand_in_for_datasets()
    from sglang.benchmark import serving

    for number, line in enumerate(lines, 1):
        print(f"[{number}/{len(lines)}] python -m sglang.benchmark.serving {' '.join(line)}", flush=True)
        sys.argv = ["sglang.benchmark.serving", *line]
        serving.cli_main()


if __name__ == "__main__":
    main()
