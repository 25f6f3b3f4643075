"""The tables of the backend and the repair of the conv axis, on the installed SGLang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAIRS = ["2->1", "1->2", "4->2", "2->4", "4->1"]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "PYTHONPATH": str(ROOT),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("sglang_probe.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_symbol_is_there_as_the_table_says(probed):
    assert probed["check"] == []


def test_every_setting_of_the_support_table_exists(probed):
    assert probed["missing_settings"] == []


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_with_defaults_is_served(probed, side):
    assert probed["defaults"][side] == []


def test_a_record_is_taken_away_as_soon_as_sglang_hears_sigterm(probed):
    assert probed["sigterm"] == ["leave", "gracefully_exit = True"]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("when", ["stock", "repaired"])
def test_channels_first_slots_arrive_and_stay_as_they_are(probed, when, pair):
    facts = probed[when]["plain"]
    assert (facts["axis"], facts["dims"], facts["outer"], facts["conv"]) == (0, 32, 1, "announced")
    assert facts["pairs"][pair]["wrong"] == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_npu_slots_are_scrambled_without_the_repair(probed, pair):
    """SGLang's own NPU function makes the slots, its own sender sends them. Upstream's fault: when this fails, the
    repair is no longer needed."""
    facts = probed["stock"]["npu"]
    assert (facts["axis"], facts["dims"], facts["outer"]) == (0, 5, 1)
    assert facts["conv"] == "uncuttable"
    assert facts["pairs"][pair]["wrong"] > 0


@pytest.mark.parametrize("pair", PAIRS)
def test_npu_slots_arrive_byte_by_byte_with_the_repair(probed, pair):
    """Every slot of every rank is compared, rows that hold nothing included."""
    facts = probed["repaired"]["npu"]
    assert (facts["axis"], facts["dims"], facts["outer"], facts["conv"]) == (1, 32, 5, "repaired")
    assert facts["pairs"][pair]["wrong"] == facts["pairs"][pair]["astray"] == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_a_different_number_of_draft_tokens_stays_wrong(probed, pair):
    """Upstream takes the rows of the source for those of the destination: a rule of pairing.py."""
    assert probed["repaired"]["other depth"]["pairs"][pair]["wrong"] > 0


@pytest.mark.parametrize("when", ["stock", "repaired"])
def test_what_no_axis_can_express(probed, when):
    assert probed[when]["amx"] == {"axis": 0, "dims": 32, "outer": 1, "conv": "uncuttable", "undeclared": "uncuttable"}
    assert probed[when]["plain"]["undeclared"] == "uncuttable"
    assert probed[when]["npu"]["undeclared"] == "uncuttable"
