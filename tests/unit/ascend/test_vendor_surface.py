"""The table of what is used of the vendors' packages agrees with who uses it and with the real wheels.

A function that a vendor renames, a release that lacks one, or a new use of ours or SGLang's that nobody has looked up
fails a test here, not the first run on an NPU.
"""

import ast
import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
import vendor_calls
import vendor_surface as surface
import vendor_wheels as wheels

import sglang_hetero

PACKAGE = Path(sglang_hetero.__file__).parent
ENGINES = PACKAGE / "transfer" / "engine"
TORCH_NPU = "torch_npu"


@pytest.fixture(scope="module", autouse=True)
def environment():
    if not wheels.PYTHON.exists():
        pytest.fail("there is no .venv-ascend with the vendors' wheels: run `make test` or `make ascend-env`")


@pytest.fixture(scope="module")
def sglang():
    import importlib.util

    found = importlib.util.find_spec("sglang")
    return Path(next(iter(found.submodule_search_locations))) / "srt"


def torch_npu_libraries():
    folder = wheels.SITE / TORCH_NPU
    return sorted(folder.glob("*.so")) + sorted((folder / "lib").glob("*.so"))


def has(name):
    """Whether the wheel has a dotted name of torch_npu or Mooncake."""
    if wheels.defined(name) is not None:
        return True
    package, *path = name.split(".")
    if package == "mooncake":
        libraries = [wheels.SITE / "mooncake" / f"{path[0]}.so"]
        return libraries[0].is_file() and all(
            wheels.in_binaries(libraries, part, tail=part in surface.TAILS) for part in path[1:]
        )
    if path[0] == "_C":
        return all(wheels.in_binaries(torch_npu_libraries(), part) for part in path[1:])
    if path[0] == "npu" and len(path) > 1:
        return False
    return wheels.in_binaries(torch_npu_libraries(), ".".join(path))  # an operator


# --- the table and who uses it ---------------------------------------------------------------------------------------


def test_the_table_has_the_versions_that_are_installed():
    found = {one.name.replace("-", "_"): one.version for one in distributions(path=[str(wheels.SITE)])}
    assert {name: found.get(name) for name in surface.VERSIONS} == surface.VERSIONS


def test_the_table_has_all_that_we_call_of_a_device_module():
    tree = ast.parse((PACKAGE / "device.py").read_text())
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if (isinstance(owner, ast.Name) and owner.id == "module") or getattr(owner, "attr", "") == "_module":
                called.add(node.attr)
    assert called == {call.name.rpartition(".")[2] for call in surface.DEVICE}


def test_the_table_has_all_that_we_ask_of_a_device():
    text = (PACKAGE / "merge" / "chip.py").read_text()
    assert set(re.findall(r'getattr\(found, "(\w+)"', text)) == set(surface.PROPERTIES)


@pytest.mark.parametrize(
    ("file", "named"), [("memfabric.py", set(surface.MEMFABRIC)), ("mooncake.py", set(surface.MOONCAKE))]
)
def test_the_table_has_all_that_we_call_of_an_engine(file, named):
    assert vendor_calls.attributes([ENGINES / "native.py", ENGINES / file], "_native") == named


def test_the_table_has_all_that_sglang_uses(sglang):
    used = vendor_calls.of_files(sglang / name for name in surface.SGLANG_FILES)
    unchecked = surface.NEEDS_TORCH | surface.NOT_TO_BE_HAD | surface.OPERATORS_OF_OTHERS
    assert used == surface.SGLANG | surface.SWITCHES | unchecked
    for file, methods in surface.SGLANG_ENGINES.items():
        assert vendor_calls.attributes([sglang / file], "engine") == methods


# --- the table and the wheels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", (*surface.DEVICE, *surface.OBJECTS), ids=lambda call: call.name)
def test_torch_npu_takes_our_calls(call):
    node = wheels.defined(call.name)
    assert node is not None, f"torch_npu {surface.VERSIONS[TORCH_NPU]} has no {call.name}"
    own = call.name.count(".") > 2  # a method: self
    assert wheels.accepts(node, call.positional + own, call.keywords)


@pytest.mark.parametrize("name", surface.PROPERTIES)
def test_torch_npu_says_what_we_ask_of_a_device(name):
    assert wheels.in_binaries(torch_npu_libraries(), name)


@pytest.mark.parametrize("name", sorted(name for name in surface.SGLANG if not name.startswith("memfabric_hybrid.")))
def test_the_wheel_has_what_sglang_uses(name):
    assert has(name)


@pytest.mark.parametrize("name", sorted(surface.SWITCHES))
def test_the_wheel_has_the_switches_that_sglang_sets(name):
    owner, _, switch = name.rpartition(".")
    assert wheels.defined(owner) is not None
    assert f'"{switch}"' in wheels.source("torch_npu.npu.npu_config").read_text()


def test_memfabric_has_what_is_used_of_it():
    methods = {*surface.MEMFABRIC, *surface.SGLANG_ENGINES["disaggregation/ascend/transfer_engine.py"]}
    names = [name for name in surface.SGLANG if name.startswith("memfabric_hybrid.")]
    names += [f"memfabric_hybrid.TransferEngine.{method}" for method in methods]
    names += [f"memfabric_hybrid.TransferEngine.TransDataOpType.{kind}" for kind in ("SDMA", "DEVICE_RDMA")]
    names += ["memfabric_hybrid.get_and_clear_last_err_msg"]
    found = wheels.documents(names)
    assert not [name for name, text in found.items() if text is None]
    for method, count in surface.MEMFABRIC.items():
        assert needed(found[f"memfabric_hybrid.TransferEngine.{method}"]) == count
    assert (
        needed(found["memfabric_hybrid.TransferEngine.initialize"]) == 4
    )  # and the kind of transfer, which has a default


def needed(signature):
    """Arguments without a default that pybind11's signature names, but for self."""
    inside = re.sub(r"\[[^\]]*\]", "", signature[signature.index("(") + 1 : signature.rindex(") ->")])
    return sum("=" not in argument for argument in inside.split(", ")) - 1


def test_mooncake_for_npus_has_what_is_used_of_it():
    methods = {
        *surface.MOONCAKE,
        *surface.SGLANG_ENGINES["distributed/device_communicators/mooncake_transfer_engine.py"],
    }
    missing = {method for method in methods if not has(f"mooncake.engine.TransferEngine.{method}")}
    assert not missing


def test_triton_for_npus_has_what_is_used_of_it():
    for name in surface.TRITON:
        node = wheels.defined(f"triton.backends.ascend.driver.{name}")
        assert isinstance(node, ast.FunctionDef)
    assert '"num_vectorcore"' in wheels.source("triton.backends.ascend.driver").read_text()
    for name in surface.KERNEL:
        assert isinstance(wheels.defined(f"triton.compiler.compiler.{name}"), ast.FunctionDef)


# --- the reader ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "torch_npu.npu.set_the_device",
        "torch_npu.npu.Event.asks",
        "torch_npu.npu.config.allow_external_format",
        "torch_npu.npu_scatter_nd_updates_",
        "torch_npu._C._weak_reference",
        "torch_npu.profiler.ProfilerLevel.Level9",
        "mooncake.engine.TransferEngine.transfer_submit",
        "mooncake.no_engine.TransferEngine",
        *sorted(surface.OPERATORS_OF_OTHERS),
    ],
)
def test_a_name_that_is_not_there_is_found_out(name):
    assert not has(name)


def test_a_name_that_an_importable_package_lacks_is_found_out():
    assert wheels.documents(["memfabric_hybrid.TransferEngine.batch_unregister_memory"]) == {
        "memfabric_hybrid.TransferEngine.batch_unregister_memory": None
    }


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ("f(1)", True),
        ("f(1, c=2)", True),
        ("f()", False),
        ("f(1, 2, 3)", False),
        ("f(1, d=2)", False),
        ("f(1, a=2)", False),
    ],
)
def test_the_form_of_a_call_is_compared(call, fits):
    node = ast.parse("def f(a, b=1, *, c=2): ...").body[0]
    made = ast.parse(call).body[0].value
    assert wheels.accepts(node, len(made.args), tuple(one.arg for one in made.keywords)) is fits
