"""Collective algorithms as programs, under the names of ``mscclpp.language``.

    from antiphon.language import *

    with CollectiveProgram("all_gather", AllGather(2, 1, False), 2):
        for own, peer in (0, 1), (1, 0):
            rank, channel = Rank(own), MemoryChannel(peer, own)
            part = slice(own, own + 1)
            channel.signal(tb=0, relaxed=True, data_sync=SyncType.none)
            channel.wait(tb=0, relaxed=True, data_sync=SyncType.after)
            channel.put(Rank(peer).get_output_buffer()[part], rank.get_input_buffer()[0:1], tb=0)
            channel.signal(tb=0, data_sync=SyncType.before)
            rank.copy(rank.get_output_buffer()[part], rank.get_input_buffer()[0:1], tb=0)
            channel.wait(tb=0, data_sync=SyncType.after)
        print(JSON())

A program becomes an execution plan: JSON that says for every thread block of every rank what it does, for messages of any
size. The submodules have the names that scripts import from those of MSCCL++ 0.9.0; this package has them all.
"""

from antiphon.language.channel import *
from antiphon.language.collectives import *
from antiphon.language.general import *
from antiphon.language.loop import *
from antiphon.language.program import CollectiveProgram as CollectiveProgram
from antiphon.language.rank import *
from antiphon.language.thread_block_group import *
from antiphon.language.utils import *
