"""Stand-in for the CUDA package of this name: the five operations that EAGLE needs, in plain torch.

Names of arguments and tensors written in place are those of the CUDA operations, so that their
callers in SGLang run unchanged. A tree has n nodes per request; node 0 is the last token already
output.
"""

import torch


def build_tree_kernel_efficient(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode=0,
) -> None:
    """Link the selected draft tokens into a tree: mask of ancestors, positions, first child, next
    sibling.

    `selected_index` numbers candidates over all draft steps: the first `topk` hang on the root, and
    each further group of `topk` hangs on the candidate that `parent_list` names for the group.
    """
    nodes = draft_token_num
    with_context = int(tree_mask_mode) == 0
    if int(tree_mask_mode) not in (0, 1):
        raise NotImplementedError("packed tree masks")
    offset = 0
    for row, context in enumerate(verified_seq_len.tolist()):
        chosen, groups = selected_index[row].tolist(), parent_list[row].tolist()
        node_of = {candidate: node for node, candidate in enumerate(chosen, start=1)}
        parents = [-1] * nodes
        for node, candidate in enumerate(chosen, start=1):
            group = candidate // topk
            parents[node] = node_of.get(int(groups[group]), nodes) if group else 0
        width = nodes + (context if with_context else 0)
        block = tree_mask[offset : offset + nodes * width].view(nodes, width)[:, width - nodes :]
        offset += nodes * width
        _fill_tree(block, positions[row * nodes : (row + 1) * nodes], parents, context)
        retrive_index[row] = torch.arange(row * nodes, (row + 1) * nodes)
        children, siblings = _links(parents)
        retrive_next_token[row] = torch.tensor(children)
        retrive_next_sibling[row] = torch.tensor(siblings)


def _fill_tree(
    block: torch.Tensor, positions: torch.Tensor, parents: list[int], context: int
) -> None:
    depths = [0] * len(parents)
    block.zero_()
    block[0, 0] = True
    for node, parent in enumerate(parents):
        if 0 <= parent < node:  # candidates are sorted, so a parent comes before its children
            block[node] = block[parent]
            depths[node] = depths[parent] + 1
        block[node, 0] = block[node, node] = True
    positions.copy_(torch.tensor(depths) + context)


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, -1 for none."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        parent = parents[node]
        if parent < len(parents):  # else its parent was not selected: unreachable, as on the GPU
            sibling[node], child[parent] = child[parent], node
    return child, sibling


def _siblings(first: int, next_sibling: list[int]):
    while first != -1:
        yield first
        first = next_sibling[first]


def verify_tree_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """Walk down from the root while a child is the token that the target predicts."""
    for row, tokens in enumerate(candidates.tolist()):
        flat, child, sibling = (
            links[row].tolist()
            for links in (retrive_index, retrive_next_token, retrive_next_sibling)
        )
        wanted = target_predict.view(len(candidates), -1)[row].tolist()
        node, accepted = 0, 0
        accept_index[row, 0] = flat[0]
        predicts[flat[0]] = wanted[0]
        while accepted + 1 < accept_index.shape[1]:
            node = next(
                (c for c in _siblings(child[node], sibling) if tokens[c] == wanted[node]), -1
            )
            if node == -1:
                break
            accepted += 1
            accept_index[row, accepted] = flat[node]
            predicts[flat[node]] = wanted[node]
        accept_token_num[row] = accepted


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
) -> None:
    """Rejection sampling along the tree: a child is taken with its share of the target's
    probability.

    The siblings of a node share one coin, spent against their cumulated probability; where all are
    refused, the token is drawn from what the target's distribution has left without them.
    """
    for row, tokens in enumerate(candidates.tolist()):
        flat, child, sibling = (
            links[row].tolist()
            for links in (retrive_index, retrive_next_token, retrive_next_sibling)
        )
        coins, target = uniform_samples[row].tolist(), target_probs[row].tolist()
        node, accepted, refused = 0, 0, []
        accept_index[row, 0] = flat[0]
        while accepted + 1 < accept_index.shape[1]:
            taken, mass, refused = -1, 0.0, []
            for option in _siblings(child[node], sibling):
                share = target[node][tokens[option]]
                mass += share
                if coins[node] <= mass / threshold_acc or share >= threshold_single:
                    taken = option
                    break
                refused.append(tokens[option])
            if taken == -1:
                break
            predicts[flat[node]] = tokens[taken]
            accepted += 1
            accept_index[row, accepted] = flat[taken]
            node, refused = taken, []
        accept_token_num[row] = accepted
        remaining = target_probs[row, node].clone()
        remaining[refused] = 0.0
        total = remaining.cumsum(0)
        point = uniform_samples_for_final_sampling[row] * total[-1]
        predicts[flat[node]] = torch.searchsorted(total, point, right=True).clamp_max(
            len(total) - 1
        )


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Keep each row's k most probable tokens and make the row sum to 1."""
    k = top_ks.long().clamp(1, probs.shape[-1]) - 1
    least = probs.sort(-1, descending=True).values.gather(-1, k[:, None])
    kept = probs.masked_fill(probs < least, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Keep each row's most probable tokens up to a mass of p and make the row sum to 1."""
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(probs).scatter(
        -1, order, ordered.masked_fill(before >= top_ps[:, None], 0.0)
    )
    return kept / kept.sum(-1, keepdim=True)
