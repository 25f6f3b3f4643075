"""Compile Triton kernels to Linalg with triton-ascend: `compile_kernels.py JOBS RESULTS`, both JSON files.

Runs in .venv-ascend, where there is neither torch nor this project, and needs no NPU and no CANN: it takes the stages
of triton-ascend's backend one by one and stops before the one that calls CANN's compiler.

A job is `{"file", "kernel", "element", "aligned", "arguments", "arch", "options"}`: the arguments by name without the
pointers dst and src (to `element`, e.g. "i16") and ids or table (to i64), which are multiples of 16 or not as `aligned`
says.
What Triton makes of such figures at a launch (constants, known divisors) it makes of them here. A result is
`{"linalg"}` or `{"error"}`, in the order of the jobs.
"""

import functools
import importlib.util
import json
import subprocess
import sys
import traceback
from pathlib import Path

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

ELEMENT_POINTERS = ("dst", "src")
INDEX_POINTERS = ("ids", "table")


class Address:
    """Stands for a tensor where Triton only looks at its address."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


@functools.cache
def load(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signature(kernel, element):
    """Name -> type, as the launcher derives it from tensors and annotations."""
    types = dict.fromkeys(ELEMENT_POINTERS, "*" + element) | dict.fromkeys(INDEX_POINTERS, "*i64")
    return {
        param.name: types.get(param.name) or param.annotation_type for param in kernel.params if not param.is_constexpr
    }


def to_linalg(job):
    kernel = getattr(load(job["file"]), job["kernel"])
    target = GPUTarget("npu", job["arch"], 0)
    backend = make_backend(target)
    options = backend.parse_options(job["options"])
    pointer = Address(32 if job["aligned"] else 33)
    arguments = dict.fromkeys((*ELEMENT_POINTERS, *INDEX_POINTERS), pointer) | job["arguments"]
    values = [arguments[param.name] for param in kernel.params]
    known = backend.get_attrs_descriptor(kernel.params, values)
    constants = {
        param.name: value
        for param, value in zip(kernel.params, values, strict=True)
        if param.is_constexpr or param.num in known.get_constants()
    }
    source = ASTSource(kernel, signature(kernel, job["element"]), constants, known)
    stages = {}
    backend.add_stages(stages, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": target, "hash": kernel.__name__, **options.__dict__}
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, metadata)
    return module


def result(job):
    try:
        return {"linalg": to_linalg(job)}
    except subprocess.CalledProcessError as error:  # triton-adapter-opt
        return {"error": error.stderr.decode(errors="replace")}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([result(job) for job in jobs]))
