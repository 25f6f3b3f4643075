"""Small models for the tests of the orchestration."""

from sglang_hetero.layout import Role
from tests.reshard_oracle.model import Segment, conv, heads_kv, latent_kv, ssm

ATTENTION, LINEAR = (1, 3), (0, 2)
SIX = (
    heads_kv(Role.TARGET_KEY, 6, 4, ATTENTION),
    heads_kv(Role.TARGET_VALUE, 6, 2, ATTENTION),
    conv((Segment("q", 6, 2), Segment("k", 6, 2), Segment("v", 12, 3)), 4, LINEAR),
    ssm(12, 3, 2, LINEAR),
    heads_kv(Role.DRAFT_KEY, 6, 4, (0,)),
    heads_kv(Role.DRAFT_VALUE, 6, 2, (0,)),
)
FOUR = (
    heads_kv(Role.TARGET_KEY, 4, 4, ATTENTION),
    heads_kv(Role.TARGET_VALUE, 4, 4, ATTENTION, "int8"),
    conv((Segment("q", 4, 2), Segment("k", 4, 2), Segment("v", 8, 3)), 4, LINEAR),
    ssm(8, 3, 2, LINEAR),
    heads_kv(Role.DRAFT_KEY, 4, 4, (0,)),
    heads_kv(Role.DRAFT_VALUE, 4, 4, (0,)),
)
TWO = (
    heads_kv(Role.TARGET_KEY, 2, 4, ATTENTION),
    heads_kv(Role.TARGET_VALUE, 2, 4, ATTENTION),
    conv((Segment("x", 8, 2), Segment("B", 1, 3, True), Segment("C", 1, 3, True)), 4, LINEAR),
    ssm(8, 3, 2, LINEAR),
)
PLAIN = (heads_kv(Role.TARGET_KEY, 2, 4, (0, 1, 2)), heads_kv(Role.TARGET_VALUE, 2, 4, (0, 1, 2)))
MLA = (
    latent_kv(Role.TARGET_LATENT, {"latent": 6}, ATTENTION),
    latent_kv(Role.TARGET_ROPE, {"rope": 2}, ATTENTION),
    conv(tuple(Segment(name, 4, 2) for name in "qkv"), 4, LINEAR),
    ssm(4, 2, 2, LINEAR),
)
