"""The faults, each of a kind that people have made or could: a wrong rule, a dropped check, an off-by-one."""

from .workshop import Fault

_SHARDING = "sglang_hetero/layout/sharding.py"
_GEOMETRY = "sglang_hetero/layout/geometry.py"
_KV_POOLS = "sglang_hetero/layout/kv_pools.py"
_STATE_POOLS = "sglang_hetero/layout/state_pools.py"
_AXES = "sglang_hetero/layout/axes.py"
_COMPONENT = "sglang_hetero/layout/component.py"
_MANIFEST = "sglang_hetero/layout/manifest.py"
_WIRE = "sglang_hetero/layout/wire.py"
_PLAN = "sglang_hetero/reshard/plan.py"
_COVERAGE = "sglang_hetero/reshard/coverage.py"
_COMPATIBILITY = "sglang_hetero/reshard/compatibility.py"
_ROW = "sglang_hetero/reshard/row.py"
_SHARE = "sglang_hetero/reshard/share.py"
_BIND = "sglang_hetero/reshard/bind.py"
_ASSEMBLE = "sglang_hetero/merge/assemble.py"
_EMPTIES = "items.narrow(0, int(run[0]), len(run)).zero_()"
_CPU = "sglang_hetero/merge/cpu.py"
_KERNEL = "sglang_hetero/merge/triton_kernels.py"
_LAUNCH = "sglang_hetero/merge/triton_ops.py"
_PROGRAM = "sglang_hetero/transfer/pieces/program.py"
_PIECES_COVERAGE = "sglang_hetero/transfer/pieces/coverage.py"
_OUTBOX = "sglang_hetero/transfer/outbox.py"
_DISPATCH = "sglang_hetero/transfer/dispatch.py"
_PREFILL = "sglang_hetero/transfer/prefill.py"
_RECEPTION = "sglang_hetero/transfer/reception.py"
_DECODE = "sglang_hetero/transfer/decode.py"
_FOLLOWER = "sglang_hetero/transfer/follower.py"
_LAYERWISE = "sglang_hetero/backend/layerwise.py"
_FIRST_TOKEN = "sglang_hetero/backend/first_token.py"
_BATCH = "sglang_hetero/merge/batch.py"
_COPIES = "sglang_hetero/merge/copies.py"
_TABLE = "sglang_hetero/merge/triton_batch.py"

FAULTS = [
    # Who has which heads.
    Fault("replicas are taken for shards", _SHARDING, "return max(1, tp // heads)", "return 1"),
    Fault(
        "ranks are dealt in turn, src % dst, instead of in runs",
        _SHARDING,
        "return shard_interval(heads, tp, rank // replica_count(heads, tp))",
        "return shard_interval(heads, tp, rank % shard_count(heads, tp))",
    ),
    Fault(
        "the size of a rank's cut axis is not checked",
        _MANIFEST,
        "        component.check_sharding(",
        "        (lambda *_: None)(",
    ),
    Fault(
        "a replicated segment is cut by head",
        _PLAN,
        "    if segment.sharding is Sharding.REPLICATED:\n        return [(range(segment.heads), range(tp))]\n",
        "",
    ),
    Fault(
        "a draft is cut at the source as it is at decode",
        _PLAN,
        "for held, ranks in _holders(theirs, theirs_tp):",
        "for held, ranks in _holders(segment, theirs_tp):",
    ),
    Fault(
        "every replica of a whole draft sends it",
        _PLAN,
        "        return [(range(segment.heads), range(tp))]\n",
        "        return [(range(segment.heads), range(rank, rank + 1)) for rank in range(tp)]\n",
    ),
    Fault(
        "a target may be whole on one side",
        _COMPATIBILITY,
        "if not (alike and ours.role.draft):",
        "if not alike:",
    ),
    Fault(
        "ranks of one server may differ",
        _COMPATIBILITY,
        "        if left.segments != right.segments:\n",
        "        if False:\n",
    ),
    # What a rank says of its own pools.
    Fault(
        "a draft with all heads is taken for a sharded one",
        _KV_POOLS,
        "heads, local = attention.whole_segments(coordinates.tp_size), attention.kv_heads",
        "local = attention.kv_heads",
    ),
    Fault(
        "a target with all heads passes for a draft",
        _KV_POOLS,
        "    if draft and _heads_held(",
        "    if _heads_held(",
    ),
    Fault(
        "a single head is replicated on one side and not on the other",
        _GEOMETRY,
        "        if all(segment.local_size(tp, 0) == segment.heads for segment in self.segments):",
        "        if tp == 1:",
    ),
    Fault(
        "the live rows of a pool are the first ones",
        _STATE_POOLS,
        "first = spare if live_rows",
        "first = 0 if live_rows",
    ),
    Fault(
        "the window of a pool is taken for its channels",
        _STATE_POOLS,
        "order = (0, 1, 2) if axis == 1 else (0, 2, 1)",
        "order = (0, 1, 2)",
    ),
    Fault(
        "what is described is not compared with what upstream sends",
        _STATE_POOLS,
        "    check_complete(source, components, _POOL)\n",
        "",
    ),
    # What a plan says.
    Fault(
        "K and V are swapped",
        _PLAN,
        "            if component.role is role:",
        "            swapped = {Role.TARGET_KEY: Role.TARGET_VALUE, Role.TARGET_VALUE: Role.TARGET_KEY}\n"
        "            if component.role is swapped.get(role, role):",
    ),
    Fault(
        "segments of the destination all begin at 0",
        _PLAN,
        "destination=destination_start + (first - wanted.start) * segment.width",
        "destination=(first - wanted.start) * segment.width",
    ),
    Fault(
        "the start of the source's segment is forgotten",
        _PLAN,
        "source=starts[writer] + (first - held.start) * segment.width",
        "source=(first - held.start) * segment.width",
    ),
    Fault(
        "the last head of a block is left out",
        _PLAN,
        "size=(last - first) * segment.width",
        "size=max(1, last - first - 1) * segment.width",
    ),
    Fault(
        "all replicas' work goes to the first one",
        _PLAN,
        "return ranks[(turn + place.tp_rank) % len(ranks)]",
        "return ranks[0]",
    ),
    Fault("the plan is not proved", _PLAN, "    prove(ordered, destination, shares, missing)\n", ""),
    Fault(
        "the plan's fingerprint leaves out the blocks",
        _PLAN,
        "        share.blocks,\n",
        "",
    ),
    Fault("an opaque page is taken apart", _COVERAGE, "share.blocks != whole:", "False:"),
    Fault("elements of another head pass", _COVERAGE, "        if read != written:", "        if False:"),
    Fault("gaps in the coverage pass", _COVERAGE, "if block.destination > end:", "if False:"),
    Fault("double writes pass", _COVERAGE, "if block.destination < end:", "if False:"),
    Fault("the end of the axis is not looked at", _COVERAGE, "    if end < axis.size:", "    if False:"),
    Fault(
        "sizes decide, the order of axes does not",
        _COMPATIBILITY,
        '    yield "axes", _SAME_VERSION,',
        '    () and "axes",',
    ),
    Fault(
        "pages of different sizes pass",
        _COMPATIBILITY,
        "    if first.page_size != destination.page_size:",
        "    if False:",
    ),
    Fault(
        "two releases of SGLang pass",
        _COMPATIBILITY,
        "    if first.sglang != destination.sglang:",
        "    if False:",
    ),
    Fault("different dtypes pass", _COMPATIBILITY, '    yield "dtype", remedy, theirs.dtype, ours.dtype\n', ""),
    Fault("a side without state passes", _COMPATIBILITY, "        if vital:", "        if False:"),
    Fault(
        "the live rows are the first ones",
        _AXES,
        "return self.live if self.live is not None else (0, self.size)",
        "return (0, self.live[1]) if self.live is not None else (0, self.size)",
    ),
    Fault(
        "axes are in listed order in memory",
        _COMPONENT,
        "return tuple(sorted(self.axes, key=lambda axis: (-axis.stride, -axis.size)))",
        "return self.axes",
    ),
    Fault("a manifest of another version is read", _WIRE, "data[len(MAGIC)] != VERSION:", "False:"),
    # Addresses of a request.
    Fault("pages are off by one", _BIND, "return ids.astype(np.uint64) * ", "return (ids - 1).astype(np.uint64) * "),
    Fault(
        "offsets wrap at 2**32",
        _BIND,
        "return ids.astype(np.uint64) * np.uint64(component.item_stride)",
        "return (ids * component.item_stride).astype(np.uint32).astype(np.uint64)",
    ),
    Fault(
        "the last page moves whole",
        _BIND,
        "    last = None if tail == _page_size(share) else share.tail_runs(tail)",
        "    last = None",
    ),
    Fault(
        "a page that a chunk only begins is sent with it",
        _BIND,
        "ends = [end // page_size for end",
        "ends = [-(-end // page_size) for end",
    ),
    Fault("padding page 0 is a page", _BIND, "    if low < 1 or high", "    if low < 0 or high"),
    Fault(
        "runs with a gap between them are joined",
        _SHARE,
        "offsets[1:] != offsets[:-1] + sizes[:-1]",
        "offsets[1:] < offsets[:-1] + sizes[:-1]",
    ),
    Fault(
        "staging begins anew with every run", _BIND, "np.cumsum(runs.sizes) - runs.sizes", "np.zeros_like(runs.sizes)"
    ),
    # What the merge does.
    Fault(
        "shards overlay each other",
        _ASSEMBLE,
        "                offsets.append(destination)\n",
        "                offsets.append(0)\n",
    ),
    Fault("packing takes the first heads", _ASSEMBLE, "pool, pages, block.source, tokens)", "pool, pages, 0, tokens)"),
    Fault(
        "conv blocks go to where they came from",
        _CPU,
        "target[:, :, destination : destination + width]",
        "target[:, :, source : source + width]",
    ),
    Fault(
        "heads go to the front of the page",
        _CPU,
        "Pair(target[:, :, :, offset : offset + shard.shape[3]], shard)",
        "Pair(target[:, :, :, : shard.shape[3]], shard)",
    ),
    Fault("checkpoints are forgotten", _CPU, "_array(pool)[:, ::checkpoint_stride]", "_array(pool)"),
    Fault(
        "rows behind the last token are written",
        _CPU,
        "(len(pages), 0) if tokens is None else divmod(tokens, page)",
        "(len(pages), 0)",
    ),
    Fault(
        "the kernel's offsets wrap at 2**31",
        _KERNEL,
        "dst_place * dst_item + start",
        "(dst_place * dst_item).to(tl.int32) + start",
    ),
    Fault("the kernel writes rows behind the last", _KERNEL, "tl.where(item == last_item, last_rows, rows)", "rows"),
    Fault(
        "the kernel writes columns behind the last",
        _KERNEL,
        "(col < cols - first_col)[None, :]",
        "(col < BLOCK_COLS)[None, :]",
    ),
    Fault(
        "the launcher takes every block from the front",
        _LAUNCH,
        "block = shard.narrow(2, source, width)",
        "block = shard.narrow(2, 0, width)",
    ),
    # What the merge of a batch does.
    Fault(
        "shards overlay each other in a batch", _COPIES, "target=lead + block.destination * cut.stride", "target=lead"
    ),
    Fault("all areas of a piece are the first", _COPIES, "source=area + start *", "source=start *"),
    Fault(
        "copies that are not evenly spaced are joined",
        _COPIES,
        "source=first.source + (end - start) * source\n",
        "source=copies[end].source\n",
    ),
    Fault(
        "a batch writes rows behind the last token",
        _CPU,
        "(len(ids), 0) if rows is None else divmod(rows, pairs[0].pool.shape[1])",
        "(len(ids), 0)",
    ),
    Fault("an item may be written twice", _BATCH, "if len(ids) > 1 and (ids[1:] == ids[:-1]).any():", "if False:"),
    Fault(
        "a batch begins where its arena does",
        _BATCH,
        "return Move(recipe, piece.ids, start, rows)",
        "return Move(recipe, piece.ids, 0, rows)",
    ),
    Fault("the table has rows behind the last token", _TABLE, "rows[-1] -= count * shape.rows - move.rows", "pass"),
    Fault("pages apart are one run of rows", _TABLE, "ids[1:] != ids[:-1] + 1", "ids[1:] < ids[:-1]"),
    Fault("a tile of a long row has the columns of all", _TABLE, "whole[:, COLS] - col", "whole[:, COLS]"),
    Fault(
        "the table's kernel leaves out the last row",
        _KERNEL,
        "(row < rows)[:, None]",
        "(row + 1 < rows)[:, None]",
    ),
    # What goes while prefill computes.
    Fault("every chunk has the state", _PROGRAM, "            elif last:\n", "            else:\n"),
    Fault("the first layer stands for all", _PROGRAM, "bisect_right(self._marks, upto)", "len(self._marks)"),
    Fault("the draft goes with the model", _PROGRAM, "Mark(Group.DRAFT, layer)", "Mark(Group.TARGET, layer)"),
    Fault(
        "push sends the state between the layers",
        _PROGRAM,
        "Group.STATE if role is None and mode is StateMode.PUSH else Group.TARGET",
        "Group.TARGET",
    ),
    Fault(
        "the layer behind goes, too",
        _OUTBOX,
        "chunk.reached = max(chunk.reached, mark)",
        "chunk.reached = max(chunk.reached, Mark(mark.group, mark.layer + 1))",
    ),
    Fault("another chunk than was computed is handed over", _OUTBOX, "elif begun.shape == chunk.shape:", "elif True:"),
    Fault(
        "a page that is not full goes with a chunk in the middle",
        _OUTBOX,
        "if last else end // page_size\n",
        "if last else -(-end // page_size)\n",
    ),
    Fault(
        "every chunk begins at the start",
        _OUTBOX,
        "first_page = self.chunks[-1].end_page if self.chunks else 0",
        "first_page = 0",
    ),
    Fault(
        "closed before SGLang has handed all over",
        _OUTBOX,
        "self.chunks[-1].last and self.chunks[-1].handed_over",
        "self.chunks[-1].last",
    ),
    Fault("a chunk begins where the last one has ended", _OUTBOX, "            destination.entries = 0\n", ""),
    Fault(
        "the chunk of another request is told",
        _OUTBOX,
        "        if not any(chunk is each for each in self.chunks):\n            return False\n",
        "",
    ),
    Fault("the place of a chunk goes back", _OUTBOX, "if not chunk.handed_over and chunk.leaves", "if chunk.leaves"),
    Fault("a place from before the move is used", _OUTBOX, " and chunk.leaves == self.leaves:", ":"),
    Fault("the place of an earlier move counts", _OUTBOX, "if move.leaves != self.leaves:", "if False:"),
    Fault(
        "a move is over with the hand-over",
        _OUTBOX,
        "        # A later chunk that has been begun",
        "        self.moving = False\n        # A later chunk that has been begun",
    ),
    Fault(
        "the first token is told while the request moves",
        _PREFILL,
        "            if outbox.moving:\n",
        "            if False:\n",
    ),
    Fault("only the chunk's own pages move", _OUTBOX, "np.concatenate([ids, self.pages[move.pages :]])", "self.pages"),
    Fault(
        "pages are read while the request moves", _DISPATCH, "if outbox is None or outbox.moving:", "if outbox is None:"
    ),
    Fault(
        "what was read while the request moved is announced",
        _DISPATCH,
        "moved = outbox is not None and outbox.moves != source.moves",
        "moved = False",
    ),
    Fault(
        "nobody waits for the device",
        _OUTBOX,
        "self.reached != COMPLETE and self.ready():",
        "self.reached != COMPLETE:",
    ),
    Fault("begun before all have bound", _PREFILL, "outbox.ended or not outbox.bound:", "outbox.ended:"),
    Fault("notes are told before they are due", _FOLLOWER, "if not self._due(self._notes[0]):", "if False:"),
    Fault(
        "a layer that is written in parts is done with the first",
        _LAYERWISE,
        "len(found) >= _running[-1].tokens",
        "True",
    ),
    Fault("a layer with two kinds is done with one", _LAYERWISE, "layer - (layer in self.owner.double)", "layer"),
    Fault(
        "a request is followed from the middle on",
        _LAYERWISE,
        "self.side.follows(room):\n                sender.hetero_unseen = True\n",
        "self.side.follows(room):\n",
    ),
    Fault("a middle chunk has a slot", _LAYERWISE, "whole, state=last)", "whole, state=True)"),
    # What gets lost, dies or comes again.
    Fault(
        "a repetition keeps a request alive at decode",
        _DECODE,
        "            if machine.news != before:",
        "            if True:",
    ),
    Fault(
        "a repetition keeps a request alive at prefill",
        _PREFILL,
        "            if destination.sending.news != before:",
        "            if True:",
    ),
    Fault("a process counts from 0 again", _RECEPTION, "secrets.randbits(EPOCH_BITS)", "0"),
    Fault(
        "a Bind for a former process is taken",
        _PREFILL,
        "(messages.Register, messages.Bind, messages.Abort)):",
        "(messages.Register, messages.Abort)):",
    ),
    Fault(
        "an Abort for a former process ends the room at its successor",
        _PREFILL,
        "(messages.Register, messages.Bind, messages.Abort)):",
        "(messages.Register, messages.Bind)):",
    ),
    Fault(
        "a registration with a former process displaces a peer of its successor",
        _PREFILL,
        "(messages.Register, messages.Bind, messages.Abort)):",
        "(messages.Bind, messages.Abort)):",
    ),
    Fault(
        "two uses of a room are taken for one",
        _PREFILL,
        "message.rank in outbox.destinations or outbox.use != message.use",
        "message.rank in outbox.destinations",
    ),
    Fault(
        "an old sender lets go of a newer one's request",
        _DISPATCH,
        "            if claim is not None and owner is not None and claim() not in (None, owner):",
        "            if owner is None:",
    ),
    Fault(
        "how a request ended is not said again",
        _DECODE,
        "                self._answer_late(message)",
        "                pass",
    ),
    Fault("the first token is told once", _DISPATCH, "told = outbox.told if again else None", "told = None"),
    Fault(
        "a source that cannot be told again has drained",
        _DECODE,
        "        self._send(outgoing)\n        self._send_again(again)\n",
        "        self._send(outgoing + again)\n",
    ),
    Fault(
        "an Abort is said once",
        _RECEPTION,
        "                outgoing += self._abort(inbox, sorted(inbox.machine.may_write))",
        "                pass",
    ),
    # Only one side drafts.
    Fault("what nobody sends is left as it was", _ASSEMBLE, _EMPTIES, "pass"),
    Fault("a pool is emptied, others' pages too", _ASSEMBLE, _EMPTIES, "items.zero_()"),
    Fault(
        "pages that the device is still emptying are given away",
        _DECODE,
        "while (emptying := not inbox.emptied()) or any(",
        "while (emptying := False) or any(",
    ),
    Fault(
        "pages are emptied beside the forward passes",
        _DECODE,
        "                with self._forward.active():\n                    source_set.assembler.begin_empty(pages)",
        "                source_set.assembler.begin_empty(pages)",
    ),
    Fault(
        "what a failed emptying has enqueued is not waited for",
        _DECODE,
        "            finally:\n                done = self._forward.done()",
        "            finally:\n                pass\n            done = self._forward.done()",
    ),
    Fault("the draft's columns are taken over without its caches", _ROW, "drafts_move or not column.draft", "True"),
    Fault(
        "columns are taken over in their order",
        _ROW,
        "None for column in destination.row)",
        "None for column in sorted(destination.row, key=lambda column: theirs.get(column.name, -1)))",
    ),
    Fault(
        "what nobody sends need not be emptied",
        _PIECES_COVERAGE,
        "            whole = (1 << pages) - 1 if component.item is Item.PAGE else 1\n",
        "            if component.role in plan.missing:\n                continue\n"
        "            whole = (1 << pages) - 1 if component.item is Item.PAGE else 1\n",
    ),
    Fault(
        "a draft begins with the state of another request",
        _FIRST_TOKEN,
        '"output_hidden_states": lambda column, _: column.zero_(),',
        '"output_hidden_states": lambda column, _: None,',
    ),
    Fault(
        "columns of other sizes are taken over", _FIRST_TOKEN, "if size not in (None, tensor[row].nbytes)", "if False"
    ),
    Fault("two kinds of draft caches are one draft", _COMPATIBILITY, "(offered ^ wanted) & _DRAFTS:", "False:"),
    Fault(
        "the first fault of a mover's turn stops its destination",
        _DISPATCH,
        '        except Exception as error:\n            logger.exception("room %d to %s"',
        '        except KeyError as error:\n            logger.exception("room %d to %s"',
    ),
]
