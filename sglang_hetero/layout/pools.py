"""A rank's manifest from the cache pools of a running SGLang server.

Nothing here imports torch or SGLang: pools and tensors are read by the few attributes that the protocols name.
"""

from sglang_hetero.errors import ManifestError, TopologyError

from .checks import short
from .component import Component
from .geometry import ModelGeometry
from .known_pools import unwrap
from .kv_pools import attention_components
from .manifest import Coordinates, Manifest, Side
from .row import Column
from .state_pools import LiveRows, state_components, state_layers


def describe(
    *,
    side: Side,
    host: str,
    coordinates: Coordinates,
    model: ModelGeometry,
    fingerprint: str,
    incarnation: str,
    sglang: str,
    target_pool: object,
    draft_pool: object | None = None,
    mamba_pool: object | None = None,
    conv_live_rows: LiveRows = LiveRows.LAST,
    conv_window_axis: int | None = None,
    row: tuple[Column, ...] = (),
) -> Manifest:
    """What every byte of this rank's caches means.

    model: read it from SGLang's own configuration object, not from config.json: on a CPU with more ranks than kv heads
    SGLang pads the heads, and the padded pool has the shape of a replicated one; the object says so and is refused.
    target_pool: the target model's KV pool, a HybridLinearKVPool or, without linear layers, a plain one. draft_pool:
    the MTP module's, None without speculation. mamba_pool: the linear state, None for the one that target_pool names.
    fingerprint: of the model's configuration. sglang: the release that made the pools. conv_live_rows: which rows of a
    conv window with room for draft tokens count. conv_window_axis: which of the two axes of a conv slot's shape is the
    window, needed only where both have one size. row: columns of the metadata that goes with a first token.

    Raises ManifestError, beginning with the rank's name, where a pool is of a kind that is not described, keeps
    something that no role describes, or has another shape than model and TP size give; TopologyError for a TP size
    that cannot shard the heads.
    """
    try:
        pool, layers = unwrap(target_pool)
        state = _state_pool(target_pool, mamba_pool)
        _check_layers(model, coordinates, layers, state_layers(state) if state is not None else ())
        components = [*attention_components(pool, layers, model.attention, coordinates, draft=False)]
        if state is not None and model.linear is not None:
            components += state_components(
                state, model.linear, coordinates, live_rows=conv_live_rows, window_axis=conv_window_axis
            )
        if draft_pool is not None:
            components += _draft(draft_pool, model, coordinates, state)
    except (ManifestError, TopologyError) as error:
        raise type(error)(f"{side} {coordinates} ({host}): {error}") from None
    return Manifest(
        side=side,
        host=host,
        coordinates=coordinates,
        page_size=pool.page_size,
        model=fingerprint,
        incarnation=incarnation,
        sglang=sglang,
        components=tuple(components),
        row=row,
    )


def _state_pool(target_pool: object, mamba_pool: object | None) -> object | None:
    """The pool of the linear state; the target's KV pool has a reference to it, which must not name another one."""
    named: object | None = getattr(target_pool, "mamba_pool", None)
    if named is not None and mamba_pool is not None and named is not mamba_pool:
        raise ManifestError("mamba_pool is not the one that the target's KV pool refers to")
    return mamba_pool if mamba_pool is not None else named


def _check_layers(
    model: ModelGeometry, coordinates: Coordinates, attention: tuple[int, ...], linear: tuple[int, ...]
) -> None:
    """Raise ManifestError unless the pools hold the model's layers, or with PP an unbroken run of them."""
    held = (*attention, *linear)
    if not held:
        raise ManifestError("the pools hold no layer")
    whole = coordinates.pp_size == 1
    for kind, found, layers in (
        ("attention", attention, model.attention_layers),
        ("linear-attention", linear, model.linear_layers),
    ):
        expected = tuple(layer for layer in layers if whole or min(held) <= layer <= max(held))
        if tuple(sorted(found)) != expected:
            raise ManifestError(
                f"{kind} layers: the pools hold {short(found)}, expected {short(expected)}; is this "
                "the configuration of the model that is served?"
            )


def _draft(
    draft_pool: object, model: ModelGeometry, coordinates: Coordinates, state: object | None
) -> tuple[Component, ...]:
    """The MTP module's cache. It has attention of the target's geometry, and no linear state."""
    own = getattr(draft_pool, "mamba_pool", None)
    if own is not None and own is not state and state_layers(own):
        raise ManifestError("the draft keeps linear state of its own, which is not described")
    pool, layers = unwrap(draft_pool)
    if layers != model.draft_layers:
        raise ManifestError(
            f"draft layers: the pool holds {short(layers)}, expected {short(model.draft_layers)}; only the MTP "
            "module that belongs to the checkpoint is described (--speculative-algorithm NEXTN)"
        )
    return attention_components(pool, layers, model.attention, coordinates, draft=True)
