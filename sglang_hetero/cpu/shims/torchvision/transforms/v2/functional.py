"""torchvision.transforms.v2.functional, import only."""

from torchvision._missing import getattr_of
from torchvision.transforms import InterpolationMode  # noqa: F401

__getattr__ = getattr_of(__name__)
