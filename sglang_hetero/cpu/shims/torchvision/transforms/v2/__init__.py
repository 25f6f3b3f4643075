"""torchvision.transforms.v2, import only."""

from torchvision._missing import getattr_of
from torchvision.transforms import InterpolationMode  # noqa: F401
from torchvision.transforms.v2 import functional  # noqa: F401

__getattr__ = getattr_of(__name__)
