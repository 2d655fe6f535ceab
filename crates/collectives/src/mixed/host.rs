//! The modes on host memory that need nothing of nodes but what goes to which; `between` has the others.

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{Communicator, FabricError, Operation, Rounds, Signature, Written};
use antiphon_operation::Call;

use super::{
    MixedLayout,
    call::{Blocks, CheckedMixedCall},
    flow::Flow,
};
use crate::{
    arguments::{Input, Output},
    chunked::{BETWEEN_NODES, chunk_for, copy},
    collectives::call_checked,
    error::Result,
};

/// Bytes of one piece that a rank posts: its two mailboxes stay in L2.
const PIECE: usize = 128 << 10;

/// Every receiver of a block reduces all of it. Ranks of another node get the contributions to the blocks that they receive.
pub(super) fn one_hop(
    rounds: &mut Rounds,
    signature: &Signature,
    flow: &Flow<'_>,
    reducer: &Reducer,
) -> Result<(), FabricError> {
    let (longest, width) = (flow.longest(), flow.width());
    let preferred = if rounds.nodes().is_some() { BETWEEN_NODES } else { PIECE };
    let step = chunk_for(width, preferred) / flow.size;
    let mut start = 0;
    loop {
        let part = start..longest.min(start + step);
        let payload = part.len() * width * flow.size;
        // SAFETY: the outbox has room for the part of each block.
        unsafe { flow.post_packed(&part, rounds.outbox(payload)) };
        let needed = |node| Written::nothing(payload).and(flow.needed_on(node, &part));
        rounds.exchange_by_node(signature, needed)?;
        for group in flow.received() {
            // SAFETY: all ranks have posted this part.
            unsafe { flow.reduce_packed(reducer, group, &part, rounds.inboxes(payload)) };
        }
        start = part.end;
        if start >= longest {
            return Ok(());
        }
    }
}

/// Each rank of a group reduces its share of the group's block and posts the sum for all nodes. All contributors are on the ranks' own
/// node. A round carries the contributions to one piece together with the sums of the piece before.
pub(super) fn two_hops(
    rounds: &mut Rounds,
    signature: &Signature,
    flow: &Flow<'_>,
    reducer: &Reducer,
) -> Result<(), FabricError> {
    let (longest, size, own_group, own_place) =
        (flow.longest(), flow.size, flow.own_group(), flow.own_place());
    let step = chunk_for(flow.width() + 1, PIECE) / size;
    let pieces = longest.div_ceil(step).max(1);
    let piece = |index: usize| index * step..longest.min((index + 1) * step);
    // Behind the slots of contributions, in bytes.
    let sums = flow.width() * step * size;
    for round in 0..=pieces {
        let mut written = Written::nothing(Rounds::CAPACITY);
        if round > 0 {
            let part = flow.clip(own_group, &piece(round - 1));
            written = written.and(sums..sums + flow.share(&part, own_place).len() * size);
        }
        if round < pieces {
            let outbox = rounds.outbox(Rounds::CAPACITY);
            for group in flow.contributed() {
                let part = flow.clip(group, &piece(round));
                // SAFETY: the outbox has a slot for each block.
                unsafe { flow.post(group, &part, outbox, flow.slot(group) * step) };
            }
        }
        rounds.exchange(signature, written)?;
        if round > 0 {
            for group in flow.received() {
                let part = flow.clip(group, &piece(round - 1));
                for place in 0..flow.group_size() {
                    let (peer, share) = (flow.member(group, place), flow.share(&part, place));
                    if peer != flow.rank() {
                        // SAFETY: the peer has put the sum of its share there before it posted this round.
                        unsafe {
                            let from = rounds.inbox(peer, Rounds::CAPACITY).add(sums);
                            copy(from, flow.output(group, share.start), share.len() * size);
                        }
                    }
                }
            }
        }
        if round < pieces {
            let part = flow.clip(own_group, &piece(round));
            let share = flow.share(&part, own_place);
            let next = rounds.outbox(Rounds::CAPACITY);
            let inboxes = rounds.inboxes(Rounds::CAPACITY);
            let place = flow.slot(own_group) * step + share.start - part.start;
            // SAFETY: all contributions to the piece have been posted; the outbox of the next round is free since the wait.
            unsafe {
                let sum = flow.reduce(reducer, own_group, &share, inboxes, place);
                copy(sum, next.add(sums), share.len() * size);
            }
        }
    }
    Ok(())
}

/// Two collectives in the groups.
pub(super) fn composed(
    tp: &Communicator,
    dp: &Communicator,
    layout: &MixedLayout,
    call: &CheckedMixedCall<'_>,
) -> Result<()> {
    let (group, size) = (layout.dp_rank(), call.input.dtype.size());
    let &CheckedMixedCall { blocks, input, output, .. } = call;
    let (start, count) = (blocks.start(group) * size, blocks.len(group));
    if call.gathers {
        // SAFETY: the group's block lies in the row.
        let own = Output { data: unsafe { output.data.add(start) }, count, ..output };
        call_checked(tp, &Call::new(Operation::AllReduce), input, own)?;
        return gather_blocks(dp, call, own);
    }
    scatter_blocks(dp, call)?;
    call_checked(tp, &Call::new(Operation::AllReduce), output.as_input(), output)
}

/// Every rank's block goes to all ranks of its data parallel group.
fn gather_blocks(dp: &Communicator, call: &CheckedMixedCall<'_>, own: Output) -> Result<()> {
    let (blocks, output, size) = (call.blocks, call.output, call.input.dtype.size());
    if let Blocks::Even { .. } = blocks {
        return call_checked(dp, &Call::all_gather(), own.as_input(), output);
    }
    for group in 0..dp.world_size() {
        // SAFETY: the group's block lies in the row.
        let data = unsafe { output.data.add(blocks.start(group) * size) };
        let block = Output { data, count: blocks.len(group), ..output };
        let call = Call::broadcast(group);
        call_checked(dp, &call, block.as_input(), block)?;
    }
    Ok(())
}

/// Every rank gets the sum of its data parallel group's contributions to its block.
fn scatter_blocks(dp: &Communicator, call: &CheckedMixedCall<'_>) -> Result<()> {
    let (blocks, input, output, size) = (call.blocks, call.input, call.output, call.input.dtype.size());
    if let Blocks::Even { .. } = blocks {
        return call_checked(dp, &Call::new(Operation::ReduceScatter), input, output);
    }
    for group in 0..dp.world_size() {
        // SAFETY: the group's block lies in the row.
        let data = unsafe { input.data.add(blocks.start(group) * size) };
        let block = Input { data, count: blocks.len(group), ..input };
        let call = Call::new(Operation::Reduce).with_root(group);
        call_checked(dp, &call, block, output)?;
    }
    Ok(())
}
