"""Plan once per destination, bind once per request. Python and numpy: no torch, no SGLang, no I/O."""

from .bind import Binding, Descriptors, Piece, bind, bind_pages, bind_slot
from .compatibility import STRICT, UNEQUAL_DRAFTS, Policy
from .plan import Plan, plan
from .row import RowPlan
from .share import Block, Share

__all__ = [
    "STRICT",
    "UNEQUAL_DRAFTS",
    "Binding",
    "Block",
    "Descriptors",
    "Piece",
    "Plan",
    "Policy",
    "RowPlan",
    "Share",
    "bind",
    "bind_pages",
    "bind_slot",
    "plan",
]
