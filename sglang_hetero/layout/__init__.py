"""Describe: what the bytes of every cache component mean. No torch, no SGLang, no sockets in here."""

from .axes import Axis, AxisName, Segment, Sharding
from .component import Component, Item, Role
from .manifest import Coordinates, Manifest, Side

__all__ = [
    "Axis",
    "AxisName",
    "Component",
    "Coordinates",
    "Item",
    "Manifest",
    "Role",
    "Segment",
    "Sharding",
    "Side",
]
