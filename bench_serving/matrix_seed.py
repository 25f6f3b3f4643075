"""The matrix that stands beside ours: figures of others, published elsewhere (data/README.md)."""

import csv
from pathlib import Path

FILE = Path(__file__).with_name("data") / "seed_matrix.csv"
NAME = "seed"
SAID = "xLLM on Ascend NPUs, Qwen3.5-2B with MTP depth 3, one round"
"""What the figures are from, in a few words."""
COLUMNS = {"req_per_s_per_npu": "req_per_s_per_device", "tokens_per_s_per_npu": "tokens_per_s_per_device"}
"""Its names of figures, and ours, where they differ."""


def read(path: Path = FILE) -> dict[tuple[str, int, int], dict[str, float]]:
    """Figures by topology, output tokens and concurrency."""
    found = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            cell = (row.pop("topology"), int(row.pop("output_tokens")), int(row.pop("concurrency")))
            found[cell] = {COLUMNS.get(name, name): float(value) for name, value in row.items()}
    return found
