"""Index ops of speculative decoding and of the request-to-token table.

req_to_token [requests, max_len] names the KV slot of every position of a request; per-request loops are over
requests, never over tokens of a prompt.
"""
# ruff: noqa: PLR0917  the argument lists are upstream's, and it passes them by position

import ctypes

import torch

from sglang_hetero.errors import HeteroError

# Modes of the tree mask (TreeMaskMode in sglang/kernels/ops/speculative/spec_tree.py).
_FULL_MASK = 0
_QLEN_ONLY = 1


def _windows(req_pool_indices: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> list[tuple[int, int, int]]:
    return list(zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True))


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """req_to_token[row, start:end] takes the next end-start entries of out_cache_loc, for every request."""
    done = 0
    for row, start, end in _windows(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse: pack req_to_token[row, start:end] of all requests into out_cache_loc."""
    done = 0
    for row, start, end in _windows(req_pool_indices, start_offset, end_offset):
        out_cache_loc[done : done + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """out_cache_loc takes, per request, the topk*num_cols slots from position seq_len on."""
    width = topk * num_cols
    columns = seq_lens.long().unsqueeze(1) + torch.arange(width)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """A request-to-token table [n*topk, pool_len] with one row per draft branch.

    Branch j of a request sees its prefix, then its own num_steps slots, which lie behind those of branches 0..j-1.
    """
    table = torch.zeros((req_pool_indices.numel() * topk, pool_len), dtype=req_to_token.dtype)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            out = table[i * topk + branch]
            own = length + branch * num_steps
            out[:length] = req_to_token[row, :length]
            out[length : length + num_steps] = req_to_token[row, own : own + num_steps]
    return table


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """bonus_tokens[i] = the last accepted token of request i; accept_tokens holds accept_stride entries a request."""
    requests = accept_lens.numel()
    last = torch.arange(requests) * accept_stride + accept_lens.flatten().long() - 1
    bonus_tokens[:requests] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack out_cache_loc[i] for the i of accept_index that are not -1, in order."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """Shift each request's input ids left by one and put its new token last (or at select_index), in place."""
    for i, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = int(select_index[i]) if select_index is not None else start + length - 1
        input_ids[last] = topk_index.view(-1)[i].to(input_ids.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor | None,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe the draft tokens of n requests; with topk 1 the tree is a chain of any depth D.

    Written: positions [n*D] = seq_len + t; retrieve_index [n, D] = the flat index; retrieve_next_token [n, D] = t+1,
    -1 for the last; retrieve_next_sibling [n, D] = -1; and tree_mask: per request D rows, causal over the drafts,
    with (mode 0) or without (mode 1) the prefix columns. Raises HeteroError for topk > 1 and for packed masks.
    """
    if topk != 1:
        raise HeteroError(
            f"the CPU reference platform drafts chains only, got topk {topk}; set --speculative-eagle-topk 1"
        )
    steps = torch.arange(draft_token_num)
    lengths = verified_seq_len.view(-1, 1)
    positions.copy_((lengths + steps).flatten())
    retrieve_index.copy_(torch.arange(lengths.numel()).unsqueeze(1) * draft_token_num + steps)
    retrieve_next_token[:, :-1] = steps[1:].to(retrieve_next_token.dtype)
    retrieve_next_token[:, -1] = -1
    retrieve_next_sibling.fill_(-1)
    if tree_mask is None:
        return
    causal = torch.ones(draft_token_num, draft_token_num, dtype=tree_mask.dtype).tril()
    flat = tree_mask.view(-1)
    if tree_mask_mode == _QLEN_ONLY:
        flat[: lengths.numel() * causal.numel()] = causal.flatten().repeat(lengths.numel())
    elif tree_mask_mode == _FULL_MASK:
        done = 0
        for length in verified_seq_len.tolist():
            rows = flat[done : done + draft_token_num * (length + draft_token_num)].view(draft_token_num, -1)
            rows[:, :length] = True
            rows[:, length:] = causal
            done += rows.numel()
    else:
        raise HeteroError(f"tree mask mode {tree_mask_mode} (packed bits) is not supported on CPU")


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept drafts greedily: from the root, step to the child whose token is the target's choice; stop if none is.

    candidates, target_predict, retrive_* int [n, D] (the spelling is upstream's keyword); accept_index int [n, S]
    takes the flat indices of the accepted tokens, the root first; accept_token_num [n] how many drafts were accepted;
    predicts [n*D] the target's token at each accepted index, the last of which is the bonus token. Entries not
    accepted stay as they were.
    """
    limit = accept_index.shape[1]
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        target_predict.tolist(),
        strict=True,
    )
    for request, (tokens, flat, child_of, sibling_of, wanted) in enumerate(rows):
        path = [0]
        while len(path) < limit:
            child = child_of[path[-1]]
            while child != -1 and tokens[child] != wanted[path[-1]]:
                child = sibling_of[child]
            if child == -1:
                break
            path.append(child)
        for position, node in enumerate(path):
            accept_index[request, position] = flat[node]
            predicts[flat[node]] = wanted[node]
        accept_token_num[request] = len(path) - 1


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """In every buffer, copy the slots src_loc to the slots tgt_loc (int [n]).

    data_ptrs uint64 [buffers]: addresses; strides int [buffers]: bytes of one slot. All sources are read before the
    first target is written, because the lists may overlap.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, content in zip(targets, slots, strict=True):
            ctypes.memmove(base + slot * stride, content, stride)
