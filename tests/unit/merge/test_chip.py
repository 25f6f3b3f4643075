"""How many programs are started, and how large their tiles are, by what a device says of itself."""

import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from sglang_hetero.merge import chip, triton_ops

NPU = "privateuseone"
"""What torch_npu calls npu."""


@pytest.fixture
def says(monkeypatch):
    """Sets what the vendor's module says of a device."""
    chip._chip.cache_clear()

    def set_properties(**figures):
        """A figure that is a list has one for each number of a device."""

        def get_device_properties(device):
            return SimpleNamespace(
                **{name: told[device.index] if isinstance(told, list) else told for name, told in figures.items()}
            )

        module = SimpleNamespace(get_device_properties=get_device_properties)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    yield set_properties
    chip._chip.cache_clear()


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("Ascend910B1", 32),
        ("Ascend910B4-1", 32),
        ("Ascend910_9382", 32),
        ("Ascend910_9579", 64),
        ("Ascend950PR_9589", 64),
        ("Ascend310P3", 32),
        ("", 32),
    ],
)
def test_a_tile_twice_fills_no_more_than_half_of_a_vector_core(says, name, tile):
    says(name=name, vector_core_num=48)
    found = chip.chip(torch.device(NPU, 0))
    assert found == chip.Chip(programs=48, tile_bytes=tile * 1024)


def test_every_chip_that_is_named_has_tiles_of_whole_rows():
    for core in (*chip.ASCEND.values(), chip.UNKNOWN):
        assert core.on_chip >= chip.UNKNOWN.on_chip, "a chip of an unknown name must do with what it is given"
    for name, core in chip.ASCEND.items():
        tile = chip.npu(name, 0).tile_bytes
        assert tile & (tile - 1) == 0
        assert tile * chip.BUFFERS_PER_TILE * chip.SPARE <= core.on_chip < 2 * tile * chip.BUFFERS_PER_TILE * chip.SPARE


def test_a_gpu_has_its_warps_filled(says):
    says(name="NVIDIA H200", multi_processor_count=132)
    assert chip.chip(torch.device("cuda", 0)) == chip.Chip(programs=528, tile_bytes=32 * 1024)


def test_an_npu_whose_vendor_says_no_number_is_asked_through_triton(says, monkeypatch):
    says(name="Ascend910B2")
    driver = SimpleNamespace(
        get_current_device=lambda: 3,
        utils=SimpleNamespace(get_device_properties=lambda index: {"num_aicore": 24, "num_vectorcore": 45 + index}),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: driver), raising=False)
    assert chip.chip(torch.device(NPU, 3)).programs == 48


def test_where_nobody_says_a_number_the_smallest_chip_is_meant(says, monkeypatch):
    says(name="Ascend910B2")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert chip.chip(torch.device(NPU, 0)).programs == 40


def test_each_device_is_asked_for_itself(says):
    says(name="Ascend910B2", vector_core_num=[48, 40])
    assert [chip.chip(torch.device(NPU, number)).programs for number in (0, 1)] == [48, 40]


def test_a_device_is_asked_once(says):
    says(name="Ascend910B2", vector_core_num=48)
    first = chip.chip(torch.device(NPU, 1))
    says(name="Ascend910B2", vector_core_num=40)
    assert chip.chip(torch.device(NPU, 1)) is first
    assert chip.chip(torch.device(NPU, 2)).programs == 40


@pytest.mark.parametrize(("cores", "started"), [(20, 20), (48, 48), (64, 48)])
def test_as_many_programs_start_as_the_chip_has_cores_and_no_more_than_tiles(monkeypatch, cores, started):
    """Three layers of two pages of 128 tokens of 2 KiB: 48 tiles of 32 KiB."""
    grids = []

    class Kernels:
        class copy_blocks:
            def __class_getitem__(cls, grid):
                return lambda *_, **figures: grids.append((grid, figures["tasks"]))

    monkeypatch.setattr(triton_ops, "triton_kernels", Kernels)
    monkeypatch.setattr(triton_ops, "chip", lambda device: chip.npu("Ascend910B2", cores))
    shard = torch.zeros(3, 2, 128, 4, 256, dtype=torch.bfloat16)
    triton_ops.merge_kv(shard, [shard], torch.tensor([0, 1]), [0])
    assert grids == [((started,), 48)]
