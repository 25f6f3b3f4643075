"""torchvision.transforms, import only."""

from enum import Enum

from torchvision._missing import getattr_of


class InterpolationMode(Enum):
    """Names that configs refer to when they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = getattr_of(__name__)

from torchvision.transforms import functional  # noqa: E402, F401  needs InterpolationMode above
