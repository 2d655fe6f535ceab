"""All-gather around a ring: `antiphon plan build examples/python/plans/all_gather_ring.py -- 4`, for 4 ranks."""

import sys

from antiphon.language import *


def all_gather_ring(size: int) -> str:
    with CollectiveProgram("all_gather_ring", AllGather(size, 1, False), size):
        ends = [(own, other) for own in range(size) for other in {(own + 1) % size, (own - 1) % size}]
        channel = {(own, other): MemoryChannel(other, own) for own, other in ends}
        for own in range(size):
            rank, output = Rank(own), Rank(own).get_output_buffer()
            to_next = channel[own, (own + 1) % size]
            to_previous = channel[own, (own - 1) % size]
            next_output = Rank((own + 1) % size).get_output_buffer()

            to_previous.signal(tb=0, relaxed=True, data_sync=SyncType.none)  # my output may be written
            to_next.wait(tb=0, relaxed=True, data_sync=SyncType.after)
            rank.copy(output[own : own + 1], rank.get_input_buffer()[0:1], tb=0)
            for step in range(size - 1):
                part = (own - step) % size
                to_next.put(next_output[part : part + 1], output[part : part + 1], tb=0)
                to_next.signal(tb=0, data_sync=SyncType.before)
                to_previous.wait(tb=0, data_sync=SyncType.after)
        return JSON()


print(all_gather_ring(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
