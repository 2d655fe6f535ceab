"""All-reduce in two steps, in place: `antiphon plan build examples/python/plans/all_reduce_two_shot.py -- 4`, for 4
ranks."""

import sys

from antiphon.language import *


def all_reduce_two_shot(size: int, blocks: int = 4) -> str:
    with CollectiveProgram("all_reduce_two_shot", AllReduce(size, 1, True), size, instances=blocks):
        channel = {(own, peer): MemoryChannel(peer, own) for own in range(size) for peer in range(size) if own != peer}
        for own in range(size):
            peers = [peer for peer in range(size) if peer != own]
            part = Rank(own).get_input_buffer()[own : own + 1]
            there = {peer: Rank(peer).get_input_buffer()[own : own + 1] for peer in peers}

            for peer in peers:  # my input may be read and written
                channel[own, peer].signal(tb=0, relaxed=True, data_sync=SyncType.none)
            for peer in peers:
                channel[own, peer].wait(tb=0, relaxed=True, data_sync=SyncType.after)
            for peer in peers:
                channel[own, peer].reduce(part, [there[peer]], tb=0)
            for peer in peers:
                channel[own, peer].put(there[peer], part, tb=0)
            for peer in peers:
                channel[own, peer].signal(tb=0, data_sync=SyncType.before)
            for peer in peers:
                channel[own, peer].wait(tb=0, data_sync=SyncType.after)
        return JSON()


print(all_reduce_two_shot(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
