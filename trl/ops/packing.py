"""Bin packing of documents into rows of a fixed size."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def best_fit(lengths: Sequence[int] | Tensor, size: int) -> list[list[int]]:
    """Pack documents with these lengths (N,) by best-fit decreasing.

    The longest documents come first, and each goes to the pack where it leaves the least room.
    Returns the indices of the documents of each pack; the result is deterministic. Empty documents
    are left out; a document longer than `size` raises a ValueError.
    """
    sizes = torch.as_tensor(lengths, dtype=torch.long)
    if len(sizes) and sizes.max() > size:
        raise ValueError(
            f"Document {sizes.argmax()} has {sizes.max()} tokens, but a pack holds {size}."
        )
    packs: list[list[int]] = []
    with_room: dict[int, list[list[int]]] = defaultdict(list)  # packs by the room left in them
    rooms = 0  # bit n is set if a pack has room for exactly n tokens
    order = sizes.argsort(descending=True, stable=True)
    for document, length in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if length == 0:
            break
        if enough := rooms >> length << length:
            room = (enough & -enough).bit_length() - 1  # the lowest bit
            pack = with_room[room].pop()
        else:
            room = size
            pack = []
            packs.append(pack)
        pack.append(document)
        if not with_room[room]:
            rooms &= ~(1 << room)
        with_room[room - length].append(pack)
        rooms |= 1 << (room - length)
    return packs
