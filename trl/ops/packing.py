"""Ragged rows put together, so that little room is left over."""

from collections import defaultdict
from typing import Any

import torch


def best_fit(lengths: Any, size: int) -> list[list[int]]:
    """Put documents of some lengths (N,) together, longest first, each where it leaves least room.

    Returns the indices of the documents of each pack; equal input gives equal packs. Documents of
    no tokens are left out, and those longer than `size` are a ValueError.
    """
    sizes = torch.as_tensor(lengths, dtype=torch.long)
    if len(sizes) and sizes.max() > size:
        raise ValueError(
            f"Document {sizes.argmax()} has {sizes.max()} tokens, but a pack holds {size}."
        )
    packs: list[list[int]] = []
    with_room: dict[int, list[list[int]]] = defaultdict(list)  # packs by the room they have left
    rooms = 0  # as bits
    order = sizes.argsort(descending=True, stable=True)
    for document, length in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if length == 0:
            break
        if enough := rooms >> length << length:
            room = (enough & -enough).bit_length() - 1  # the lowest bit
            pack = with_room[room].pop()
        else:
            room, pack = size, []
            packs.append(pack)
        pack.append(document)
        if not with_room[room]:
            rooms &= ~(1 << room)
        with_room[room - length].append(pack)
        rooms |= 1 << (room - length)
    return packs
