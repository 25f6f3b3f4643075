"""The hand-shake of running servers, without a request: what each says of itself, and what becomes of a pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_hetero.discovery.record import MAX_DESCRIPTION_BYTES, Instance, clean_url, decode_description
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.component import Item
from sglang_hetero.layout.manifest import Manifest, Side
from sglang_hetero.reshard import plan
from sglang_hetero.reshard.bind import chunk_pages
from sglang_hetero.reshard.explain import Request, explain
from sglang_hetero.router.pairing import Fit, Known, Pairing, described
from sglang_hetero.state import ask as server

from .lines import Line, fail, ok, one_line, skip, warn

AREA = "peers"
INSTANCE_PATH = "/hetero/instance"
TOKENS = 4096
"""Of the request that is explained."""
SLOT = 1
MIB = 1 << 20


def ask(url: str, key: str | None) -> Known:
    """What a server says of itself. Raises PeerAway or RecordError, with the remedy."""
    address = clean_url(url)
    said = decode_description(server.ask(address, INSTANCE_PATH, key, MAX_DESCRIPTION_BYTES))
    return described(Instance(role=said.instance.role, url=address), said)


def examine(urls: Sequence[str], key: str | None, local: Known | None, tokens: int = TOKENS) -> list[Line]:
    """A line for each server, then one for each pair of a prefill and a decode server; `local` is the configuration of
    one that does not run yet."""
    if not urls:
        return [skip(AREA, "none", "no --peer was given", "give the URL of a running prefill or decode server")]
    lines, known = [], []
    for url in urls:
        try:
            found = ask(url, key)
        except HeteroError as error:
            lines.append(fail(AREA, one_line(url), str(error), "start it, or correct its URL"))
            continue
        lines.append(_of(found))
        known.append(found)
    known += [local] if local else []
    pairing = Pairing()
    pairs = [
        (one, other)
        for one in known
        for other in known
        if one.instance.role is Side.PREFILL and other.instance.role is Side.DECODE
    ]
    if not pairs and known:
        role = known[0].instance.role
        lines.append(
            skip(
                AREA,
                "pairs",
                f"there are only {role} servers",
                "give one of the other role, too, or the options of one behind --",
            )
        )
    for prefill, decode in pairs:
        lines += _pair(pairing, prefill, decode, tokens)
    return lines


def _of(one: Known) -> Line:
    said, name = one.instance, one.instance.label
    words = f"model {said.model or '(not told)'}, release {said.release}, messages of version {said.messages}"
    if not one.told:
        return warn(AREA, name, f"{words}; it has not told all: {one.why}", "ask again when it is ready")
    if not one.ours:
        return warn(AREA, name, f"{words}; it takes SGLang's own path only: {one.why}", "see docs/support.md")
    return ok(
        AREA,
        name,
        f"{words}, SGLang {one.ranks[0].sglang}, {len(one.ranks)} ranks, TP {one.ranks[0].coordinates.tp_size}, "
        f"backend {one.backend}",
    )


def _pair(pairing: Pairing, prefill: Known, decode: Known, tokens: int) -> list[Line]:
    name = f"{prefill.instance.url} to {decode.instance.url}"
    verdict = pairing.judge(prefill, decode)
    if verdict.fit is Fit.PENDING:
        return [warn(AREA, name, verdict.reason, "ask again when both are ready")]
    if verdict.fit is Fit.NO:
        return [fail(AREA, name, verdict.reason, "as the reason says")]
    lines = [ok(AREA, name, verdict.reason)]
    if prefill.ranks and decode.ranks:
        lines += [ok(AREA, f"{name}, {what}", said) for what, said in in_words(prefill.ranks, decode.ranks, tokens)]
    return lines


def in_words(prefill: Sequence[Manifest], decode: Sequence[Manifest], tokens: int) -> list[tuple[str, str]]:
    """What each prefill rank sends of a request of `tokens`, and what SGLang's own path would do. Of replicas of one
    server the first ones are meant. Raises what `plan` raises."""
    sources = [rank for rank in prefill if rank.coordinates.dp_rank == prefill[0].coordinates.dp_rank]
    targets = [rank for rank in decode if rank.coordinates.dp_rank == decode[0].coordinates.dp_rank]
    page = targets[0].page_size
    room = min(c.items for rank in (*sources, *targets) for c in rank.components if c.item is Item.PAGE)
    tokens = min(tokens, (room - 1) * page)
    chunks = chunk_pages(tokens, -(-tokens // page) * page, page)
    pages = np.arange(1, chunks[-1].stop + 1)
    found = explain([plan(sources, rank) for rank in targets], Request(pages, SLOT, tokens, chunks))
    words = []
    for source in found.sources:
        ranks = ", ".join(str(route.decode_rank) for route in source.to)
        ways = {"as it is" if not route.staged else "gathered" if source.packed else "staged" for route in source.to}
        roles = sorted({part.role for route in source.to for part in route.parts})
        count = source.kv_descriptors + source.state_descriptors
        stage = f", stage {source.stage}" if len({one.stage for one in found.sources}) > 1 else ""
        words.append(
            (
                f"prefill {source.rank}{stage}",
                f"of {tokens} tokens {source.bytes / MIB:.2f} MiB in {count} descriptors to decode {ranks or 'none'}, "
                f"{' and '.join(sorted(ways)) or 'nothing'}: {', '.join(roles)}",
            )
        )
    stock = found.upstream
    faults = "; wrong there: " + "; ".join(stock.faults) if stock.faults else ""
    words.append(
        ("SGLang's own path", f"{stock.kv_descriptors + stock.state_descriptors} descriptors from each rank{faults}")
    )
    return words
