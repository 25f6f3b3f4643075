"""torchvision.io, import only."""

from torchvision._missing import getattr_of

__getattr__ = getattr_of(__name__)
