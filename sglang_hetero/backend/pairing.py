"""Which path a prefill and a decode server take together, decided once per pair. Pure: no torch, no SGLang.

Our path needs this package on both sides. Without it a pair can only take upstream's path, and that is right for some
pairs and not for others; where it would be wrong, or would stop SGLang's scheduler with an exception, the pair is
refused. What can be known of a peer without this package differs by side:

* decode knows of a prefill server what its bootstrap route says (`Route`);
* prefill knows of a decode rank what it registers with (`Registration`): sizes of its cache entries.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from sglang_hetero.backend.options import Mode
from sglang_hetero.layout.component import Component, Role
from sglang_hetero.layout.geometry import ModelGeometry
from sglang_hetero.layout.manifest import Manifest


class Path(StrEnum):
    """What becomes of a pair."""

    OURS = "ours"
    UPSTREAM = "upstream"
    REFUSED = "refused"


@dataclass(frozen=True)
class Decision:
    """reason: why, as one line; of a refusal it names both sides, the rule and the remedy."""

    path: Path
    reason: str


class Conv(StrEnum):
    """What upstream's transfer can do with this rank's conv slots between unequal TP sizes (conv_axis.py)."""

    NONE = "none"
    """No linear state."""
    ANNOUNCED = "announced"
    """Cut them right: SGLang itself announces the axis of the channels."""
    REPAIRED = "repaired"
    """Cut them right if both sides announce that axis, which a server without this package does not."""
    UNCUTTABLE = "uncuttable"
    """Only scramble them. The bytes lie in another order than the shape says (CPU with AMX), or the segments of the
    channels are not declared to SGLang (Mamba-2)."""


@dataclass(frozen=True)
class Here:
    """What this rank knows of itself. tp: attention TP size. Lengths are bytes, of one page or slot.

    kv_dtype: SGLang's name, as in its bootstrap route. kv_heads: of the whole model, 0 where every rank has the same
    latent rows. pp: pipeline stages; this rank then has the layers of one of them. kv_buffers_at_decode: with stages,
    how many attention KV buffers a decode rank may have that speculates alike; empty if not known. kv_item_lens: of
    every attention KV buffer, the draft's last. state_item_lens, state_dims: of every buffer of the linear state, as
    SGLang registers them (KVArgs). unsupported: why our path cannot serve this server at all (support.py), empty if it
    can.
    """

    name: str
    tp: int
    page_size: int
    kv_dtype: str
    kv_heads: int
    conv: Conv
    pp: int = 1
    kv_buffers_at_decode: tuple[int, ...] = ()
    kv_item_lens: tuple[int, ...] = ()
    state_item_lens: tuple[int, ...] = ()
    state_dims: tuple[int, ...] = ()
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """What a prefill server's bootstrap routes say of it; None where they do not say.

    repaired: it has this package, if with SGLANG_HETERO=off, and so announces the right axis of its conv slots.
    unsupported: as in `Here`.
    """

    name: str
    tp: int
    page_size: int | None = None
    kv_dtype: str | None = None
    repaired: bool = False
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Registration:
    """What a decode rank registers with at a prefill rank, for its buffers as in `Here`.

    kv_buffers: how many there are. kv_item_lens: empty where it gives that of the first only.
    """

    name: str
    tp: int
    kv_buffers: int
    kv_item_len: int
    kv_item_lens: tuple[int, ...] = ()
    state_item_lens: tuple[int, ...] = ()
    state_dims: tuple[int, ...] = ()


def decide(
    mode: Mode, here: Here, peer: Route | Registration, *, capable: bool, same_layout: bool | None = False
) -> Decision:
    """The path of this pair.

    capable: the peer has this package and offers its path. same_layout: it is capable and the manifests of both sides
    say the same of every byte (`same_layouts`); None where a side that our path cannot serve has shown none.
    """
    if mode is Mode.OFF:
        return _upstream(here, peer, "SGLANG_HETERO=off", "remove SGLANG_HETERO=off")
    if not capable:
        lacks = f"{peer.name} does not offer this package's path"
        remedy = f"install sglang-hetero on {peer.name}, without SGLANG_HETERO=off"
        if mode is Mode.ALWAYS:
            return _refused(here, peer, f"SGLANG_HETERO=always, but {lacks}", f"{remedy}, or set SGLANG_HETERO=auto")
        return _upstream(here, peer, lacks, remedy)
    if mode is Mode.AUTO and same_layout is None and here.tp == peer.tp and (limits := _unsupported(here, peer)):
        # As with a peer that lacks this package; prefill sees from the registration whether their entries differ.
        return _upstream(here, peer, limits[0], "without that this package's path may serve them")
    alike = here.tp == peer.tp and bool(same_layout)
    if mode is Mode.AUTO and alike:
        # A size of a page or slot that differs would be a different layout: nothing is left that could be a fault.
        return Decision(Path.UPSTREAM, f"{here.name} and {peer.name} have TP {here.tp} and the same layout")
    return _ours(here, peer, "SGLANG_HETERO=always" if alike else "TP sizes or layouts differ")


def same_layouts(sources: Sequence[Manifest], destination: Manifest) -> bool:
    """Whether an item of `destination` is, byte for byte, an item of the source of the same TP rank.

    sources: all ranks of the prefill replica. Upstream then copies whole pages, slots and rows, and is right. Releases
    of SGLang count: nobody has shown that the caches, or the messages of its own path, are the same in two of them.
    """
    coordinates = destination.coordinates
    peers = [source for source in sources if source.coordinates.tp_rank == coordinates.tp_rank]
    if any(
        (source.coordinates.tp_size, source.page_size, source.model, source.sglang, source.row)
        != (coordinates.tp_size, destination.page_size, destination.model, destination.sglang, destination.row)
        for source in sources
    ):
        return False
    theirs = dict(entry for source in peers for entry in _by_layer(source))
    return theirs == dict(_by_layer(destination))


def kv_buffers_at_decode(manifest: Manifest, model: ModelGeometry, buffers: int, *, drafts: bool) -> tuple[int, ...]:
    """How many attention KV buffers a decode rank has that speculates as this prefill server does; empty if unknown.

    manifest: of a pipeline stage of prefill, which has `buffers`, the draft's included. drafts: the server speculates.
    """
    own = sum(len(component.layers) for component in manifest.components if component.role in _ONE_PER_LAYER)
    # SGLang's pools keep K and V apart, or latent rows whole, or those in parts: as many buffers for each layer.
    if not own or buffers % own:
        return ()
    per_layer = buffers // own
    if drafts:
        # Of all layers: SGLang's decode has stages, as many as prefill, only where it does not speculate.
        return (per_layer * (len(model.attention_layers) + len(model.draft_layers)),)
    return per_layer * len(model.attention_layers), buffers


_ONE_PER_LAYER = (Role.TARGET_KEY, Role.TARGET_LATENT, Role.DRAFT_KEY, Role.DRAFT_LATENT)


def _by_layer(manifest: Manifest) -> Iterable[tuple[tuple[Role, int], Component]]:
    """Each layer's part of each component, without what may differ: where it lies and how many items there are."""
    for component in manifest.components:
        for layer in component.layers:
            yield (component.role, layer), replace(component, layers=(layer,), addresses=(0,), items=1)


def _ours(here: Here, peer: Route | Registration, why: str) -> Decision:
    if unequal := _unequal_settings(here, peer):
        return _refused(here, peer, *unequal)
    if unsupported := _unsupported(here, peer):
        remedy = "or give both sides one TP size, and SGLANG_HETERO=auto"
        return _refused(here, peer, f"{why}, but {unsupported[0]}", remedy)
    return Decision(Path.OURS, f"{here.name} and {peer.name}: {why}")


def _unsupported(here: Here, peer: Route | Registration) -> tuple[str, ...]:
    return here.unsupported + (peer.unsupported if isinstance(peer, Route) else ())


def _upstream(here: Here, peer: Route | Registration, why: str, remedy: str) -> Decision:
    """SGLang's path, unless it would be wrong. remedy: what makes ours possible."""
    fault = _fault(here, peer)
    if fault is None:
        return Decision(Path.UPSTREAM, f"{here.name} and {peer.name} take SGLang's own path: {why}")
    rule, own_remedy = fault
    return _refused(here, peer, f"{why}, and SGLang's own path cannot serve this pair: {rule}", own_remedy or remedy)


def _refused(here: Here, peer: Route | Registration, rule: str, remedy: str) -> Decision:
    return Decision(Path.REFUSED, f"{here.name} (TP {here.tp}) and {peer.name} (TP {peer.tp}): {rule}; {remedy}")


def _fault(here: Here, peer: Route | Registration) -> tuple[str, str] | None:
    """Why upstream's path would be wrong, and the remedy; the latter is empty where our path is the remedy."""
    if unequal := _unequal_settings(here, peer):
        return unequal
    rule = _cut_fault(here, peer) if here.tp != peer.tp else None
    if rule is None and isinstance(peer, Registration):
        rule = _entry_fault(here, peer)
    return None if rule is None else (rule, "")


def _unequal_settings(here: Here, peer: Route | Registration) -> tuple[str, str] | None:
    """What no path can serve. Upstream finds it, too, but raises in the decode scheduler's loop (cc:1320)."""
    if not isinstance(peer, Route):
        return None
    if peer.page_size is not None and peer.page_size != here.page_size:
        return (
            f"pages of {here.page_size} tokens here, of {peer.page_size} at {peer.name}",
            "start both with the same --page-size",
        )
    if peer.kv_dtype is not None and peer.kv_dtype != here.kv_dtype:
        return (
            f"KV cache of {here.kv_dtype} here, of {peer.kv_dtype} at {peer.name}",
            "start both with the same --kv-cache-dtype",
        )
    return None


def _cut_fault(here: Here, peer: Route | Registration) -> str | None:
    """What upstream does wrong between unequal TP sizes, whatever the sizes of the entries."""
    if max(here.tp, peer.tp) % min(here.tp, peer.tp):
        return f"neither of TP {here.tp} and {peer.tp} divides the other, which it does not check"
    if here.conv is Conv.UNCUTTABLE:
        return "it has no axis along which these conv slots could be cut, and would copy them as if it had"
    # A decode rank says by its dimensions which axis it cuts (_entry_fault). A prefill server says nothing, and SGLang
    # without this package cuts the window.
    if here.conv is Conv.REPAIRED and isinstance(peer, Route) and not peer.repaired:
        return "conv slots are window-first, and it takes the window for the channels: other requests are overwritten"
    return None


def _entry_fault(here: Here, peer: Registration) -> str | None:
    """What upstream would copy to the wrong place, or fail at in its transfer thread, as the sizes of entries show."""
    known = here.kv_buffers_at_decode if here.pp > 1 else (len(here.kv_item_lens),)
    if known and peer.kv_buffers not in known:
        return (
            f"{known[0]} attention KV buffers here{' in all stages' if here.pp > 1 else ''}, {peer.kv_buffers} at "
            f"{peer.name}: is speculative decoding the same on both sides?"
        )
    theirs = peer.kv_item_lens or (peer.kv_item_len,)
    wanted = [_page_bytes_at(peer.tp, mine, here) for mine in here.kv_item_lens]
    if here.pp == 1:
        wanted = wanted[: len(theirs)]
    if wrong := _unlike(wanted, theirs, here.pp):
        return (
            f"pages of an attention KV buffer have {wrong[1]} bytes at {peer.name}, expected {wrong[0]}: page size, KV "
            "dtype or model differ"
        )
    return _state_fault(here, peer)


def _page_bytes_at(tp: int, mine: int, here: Here) -> int:
    """Bytes that a page of `mine` bytes here has on a rank of TP `tp`."""
    if not here.kv_heads:
        return mine
    # With more ranks than heads each rank has one.
    return mine // max(1, here.kv_heads // here.tp) * max(1, here.kv_heads // tp)


def _unlike(wanted: Sequence[int], found: Sequence[int], stages: int) -> tuple[int, int | str] | None:
    """The first size that is not as wanted, and what is there instead.

    With pipeline stages this side has some of the other's buffers, and only their sizes can be looked for.
    """
    if stages == 1:
        return next(((mine, other) for mine, other in zip(wanted, found, strict=False) if mine != other), None)
    sizes = sorted(set(found))
    return next(((mine, " or ".join(map(str, sizes))) for mine in wanted if mine not in sizes), None)


def _state_fault(here: Here, peer: Registration) -> str | None:
    if here.pp == 1 and len(here.state_item_lens) != len(peer.state_item_lens):
        return (
            f"{len(here.state_item_lens)} linear-state buffers here, {len(peer.state_item_lens)} at {peer.name}: are "
            "the models the same?"
        )
    cut = here.tp != peer.tp
    if cut and (len(here.state_dims), len(peer.state_dims)) != (len(here.state_item_lens), len(peer.state_item_lens)):
        return f"{here.name} or {peer.name} does not say along which axis its linear state is cut"
    if cut and (wrong := _unlike([_at(peer.tp, dim, here) for dim in here.state_dims], peer.state_dims, here.pp)):
        return (
            f"a linear-state buffer is cut along an axis of {wrong[1]} elements at {peer.name}, expected {wrong[0]}: "
            "it takes the window for the channels, or the models differ"
        )
    # A slot is cut along one axis. What else is in it is whole: the rows of a conv window with room for drafts.
    known = len(here.state_dims) == len(here.state_item_lens)
    dims = here.state_dims if known else (1,) * len(here.state_item_lens)
    wanted = [
        _at(peer.tp, length, here) if dim else length for length, dim in zip(here.state_item_lens, dims, strict=True)
    ]
    if wrong := _unlike(wanted, peer.state_item_lens, here.pp):
        return (
            f"slots of a linear-state buffer have {wrong[1]} bytes at {peer.name}, expected {wrong[0]}: number of "
            "draft tokens, dtype or model differ"
        )
    return None


def _at(tp: int, size: int, here: Here) -> int:
    """What `size` elements or bytes here, cut over the ranks, are on a rank of TP `tp`."""
    return size * here.tp // tp
