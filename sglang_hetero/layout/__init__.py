"""Describe: what the bytes of every cache component mean. No torch, no SGLang, no sockets in here."""

from .component import Axis, AxisName, Component, Item, Role, Segment, Sharding
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
