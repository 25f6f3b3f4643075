"""`validate` tells on an NPU which operator of SGLang's linear attention is not there; here with stand-ins for them."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hetero.doctor.lines import Line, Status, fail, ok
from sglang_hetero.validate import environment, operators
from sglang_hetero.validate.stage import Settings
from tests.unit.ascend.vendor_surface import NOT_TO_BE_HAD, OPERATORS_OF_OTHERS

USABLE = (environment.AREA, "torch device", "as a test says")
SOURCE = """
import torch
from sgl_kernel_npu.fla.utils import first, second
from other.fla import third

def forward(x):
    y = torch.ops.npu.one(x) + torch.ops.npu.two.default(x)
    return torch.ops.custom.three(y) + self.torch.ops.npu.four(y) + torch.npu.five(y)
"""


def file_of_sglang(name: str) -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / operators.FOLDER / name).read_text(encoding="utf-8")


def test_operators_and_imports_are_read_from_the_source():
    assert operators.called(SOURCE) == {"one", "two"}
    assert operators.imported(SOURCE) == {("sgl_kernel_npu.fla.utils", "first"), ("sgl_kernel_npu.fla.utils", "second")}


def test_of_the_installed_release_they_are_those_of_the_table():
    """The table of docs/ascend.md, found there in another way (tests/unit/ascend/test_vendor_surface.py)."""
    sources = [file_of_sglang(name) for name in operators.ATTENTION]
    assert {f"torch_npu.{name}" for source in sources for name in operators.called(source)} == OPERATORS_OF_OTHERS
    found = {f"{module}.{name}" for source in sources for module, name in operators.imported(source)}
    assert found and found <= NOT_TO_BE_HAD


def test_what_is_absent_is_named():
    def load(module: str) -> SimpleNamespace:
        assert module == "sgl_kernel_npu.fla.utils"
        return SimpleNamespace(first=1)

    here = SimpleNamespace(one=1, two=2)
    assert list(operators.absent(SOURCE, here, load)) == ["sgl_kernel_npu.fla.utils.second"]
    del here.two
    assert list(operators.absent(SOURCE, here, load)) == ["torch.ops.npu.two", "sgl_kernel_npu.fla.utils.second"]


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_a_module_that_cannot_be_loaded_has_nothing(error):
    def load(module: str) -> None:
        raise error("no CANN")

    names = list(operators.absent(SOURCE, SimpleNamespace(one=1, two=2), load))
    assert names == ["sgl_kernel_npu.fla.utils.first", "sgl_kernel_npu.fla.utils.second"]


def test_without_those_of_gated_delta_nets_nothing_can_be_served():
    line = operators.judged("a", {"ascend_gdn_backend.py": ["torch.ops.npu.chunk_gated_delta_rule"]})
    assert line.status is Status.FAIL
    assert "torch.ops.npu.chunk_gated_delta_rule, for Qwen3.5" in line.seen and "sgl-kernel-npu" in line.remedy


def test_without_those_of_kimi_the_others_can_be_served():
    line = operators.judged("a", {"ascend_kda_backend.py": ["torch.ops.npu.chunk_kda_fwd"]})
    assert (line.status, "for Kimi-Linear" in line.seen) == (Status.WARN, True)
    assert operators.judged("a", {}).status is Status.OK


def said(device: str, monkeypatch, usable: Line) -> dict[str, Status]:
    """Lines of the stage. torch's answer is a stand-in's: there is no NPU."""
    monkeypatch.setattr(environment, "_torch_device", lambda kind: usable)
    lines: list[Line] = []
    environment.run(Settings(device=device, count=1, folder="", quick=True), "", lines.append)
    assert [line.name for line in lines] == list(environment.PROMISES)
    assert {line.area for line in lines} == {environment.AREA}
    return {line.name: line.status for line in lines}


@pytest.mark.parametrize(
    ("device", "usable", "status"),
    [
        ("cpu", ok(*USABLE), Status.SKIP),
        ("npu", fail(*USABLE, "mend it"), Status.SKIP),
        ("npu", ok(*USABLE), Status.FAIL),  # this host has none of them
    ],
)
def test_the_stage_keeps_its_promises(device, usable, status, monkeypatch):
    assert said(device, monkeypatch, usable)[operators.NAME] is status
