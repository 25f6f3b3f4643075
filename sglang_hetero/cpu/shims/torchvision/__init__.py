"""Import-only stand-in for torchvision.

SGLang 0.5.23 imports torchvision.transforms from its config package even for text models, and the torchvision wheels
on PyPI want a CUDA build of torch. Found only through `sglang_hetero_cpu.pth`, behind every real torchvision. Any use
of it raises HeteroError.
"""

from torchvision import transforms

__all__ = ["transforms"]
__version__ = "0.0.0+sglang.hetero.cpu"
IS_HETERO_CPU_REFERENCE = True
