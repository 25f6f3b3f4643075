"""Describe: what the bytes of every cache component mean. No torch, no SGLang, no sockets in here."""

from .axes import Axis, AxisName, Segment, Sharding
from .component import Component, Item, Role
from .config import config_fingerprint, geometry_from_config
from .geometry import ModelGeometry
from .manifest import Coordinates, Manifest, Side
from .window import ConvLayout

__all__ = [
    "Axis",
    "AxisName",
    "Component",
    "ConvLayout",
    "Coordinates",
    "Item",
    "Manifest",
    "ModelGeometry",
    "Role",
    "Segment",
    "Sharding",
    "Side",
    "config_fingerprint",
    "geometry_from_config",
]
