"""All-reduce in one step, with packets: `antiphon plan build examples/python/plans/all_reduce_one_shot.py -- 4`, for 4
ranks."""

import sys

from antiphon.language import *


def all_reduce_one_shot(size: int) -> str:
    collective = AllReduce(size, 1, False)
    with CollectiveProgram("all_reduce_one_shot", collective, size, protocol="LL", use_double_scratch_buffer=True):
        channel = {(own, peer): MemoryChannel(peer, own) for own in range(size) for peer in range(size) if own != peer}
        # A place for everything that each of the others has.
        scratch = [Buffer(rank, size * size) for rank in range(size)]
        for own in range(size):
            rank, mine = Rank(own), Rank(own).get_input_buffer()[:]
            peers = [peer for peer in range(size) if peer != own]
            for peer in peers:
                channel[own, peer].put_packets(scratch[peer][own * size : (own + 1) * size], mine, tb=0)
            theirs = [scratch[own][peer * size : (peer + 1) * size] for peer in peers]
            rank.reduce(mine, theirs, tb=0, dst_chunk=rank.get_output_buffer()[:], packet=True)
        return JSON()


print(all_reduce_one_shot(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
