//! The choice of the mode on the host, by size: measured, and equal on all ranks.

use std::{ops::RangeInclusive, time::Instant};

use antiphon_fabric::{Communicator, Operation};
use antiphon_tuning::Key;

use super::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp, operation_of};
use crate::{
    AlgorithmTable,
    algorithm_table::host_key,
    error::{CollectiveError, Result},
};

/// The bytes of a block from which on [`MixedMode::Bytes1`] is faster in spite of its second hop; `tune` measures a machine's own number.
const BYTES1_FROM: usize = 32 << 10;
/// Where there are several nodes, the bytes from which on the mode that sends the fewest bytes between them is faster: as an all-reduce's
/// two-shot.
pub(super) const FEWEST_BYTES_FROM: usize = 128 << 10;

/// A table for each fused operation of the layout.
pub(super) struct Tables {
    /// What they choose from.
    modes: &'static [MixedMode],
    tables: Vec<(Operation, AlgorithmTable)>,
}

impl Tables {
    pub(super) fn load(comm: &Communicator, layout: &MixedLayout) -> Result<Self> {
        let from = if layout.use_inter() { FEWEST_BYTES_FROM } else { BYTES1_FROM };
        Self::load_with(comm, layout, |operation| key(operation, layout), from)
    }

    /// Loads the tables of these keys. The built-in tables choose the mode with the fewest bytes from `bytes_from` bytes on.
    pub(super) fn load_with(
        comm: &Communicator,
        layout: &MixedLayout,
        key: impl Fn(Operation) -> Key,
        bytes_from: usize,
    ) -> Result<Self> {
        let modes = MixedMode::fused_in(layout);
        let table = |op: MixedOp| {
            let operation = operation_of(op);
            let built_in = [(0, 0), (bytes_from, fewest_bytes(op, layout))];
            Ok((operation, AlgorithmTable::load(comm, &key(operation), &names(layout), &built_in)?))
        };
        Ok(Self { modes, tables: fused(layout).map(table).collect::<Result<_>>()? })
    }

    /// The table of an operation becomes another.
    pub(super) fn replace(&mut self, operation: Operation, table: AlgorithmTable) {
        let known = self.tables.iter_mut().filter(|(known, _)| *known == operation);
        known.for_each(|(_, old)| *old = table.clone());
    }

    pub(super) fn choose(&self, operation: Operation, bytes: usize) -> MixedMode {
        let table = self.tables.iter().find(|(known, _)| *known == operation);
        let (_, table) = table.expect("every fused operation of the layout has a table");
        self.modes[table.choose(bytes)]
    }
}

/// The index of the fused mode that sends the fewest bytes, of f32, and among several the one with the fewest hops: through the busiest
/// link between nodes, or on one node between ranks.
pub(super) fn fewest_bytes(op: MixedOp, layout: &MixedLayout) -> usize {
    let modes = MixedMode::fused_in(layout);
    if !layout.use_inter() {
        return modes.len() - 1;
    }
    // In blocks, for each group of a node.
    let contributors =
        if op == MixedOp::AllReduceAllGather { layout.local_tp_size() } else { layout.local_size() };
    let sent = |mode: &MixedMode| match mode {
        MixedMode::Waits => contributors as f64,
        MixedMode::Bytes1 => 1.0,
        _ => 2.0 / layout.inter_tp_size() as f64, // sums and results
    };
    let least = modes.iter().map(sent).fold(f64::INFINITY, f64::min);
    modes.iter().position(|mode| sent(mode) == least).expect("one of them is the least")
}

/// The operations of a layout that have modes of their own.
pub(super) fn fused(layout: &MixedLayout) -> impl Iterator<Item = MixedOp> + use<> {
    let ops: &[MixedOp] = if layout.use_mixed() { layout.valid_ops() } else { &[] };
    ops.iter().copied()
}

/// The names of what the tables of a layout choose from.
pub(super) fn names(layout: &MixedLayout) -> Vec<&'static str> {
    MixedMode::fused_in(layout).iter().map(|mode| mode.name()).collect()
}

/// What the key of a table says of its operation: the layout, with its nodes if there are several.
pub(super) fn of_layout(operation: Operation, layout: &MixedLayout) -> String {
    let of = format!("{operation}, tp {} × dp {}", layout.local_tp_size(), layout.local_dp_size());
    match layout.use_inter() {
        true => {
            format!("{of} on each of tp {} × dp {} nodes", layout.inter_tp_size(), layout.inter_dp_size())
        }
        false => of,
    }
}

fn key(operation: Operation, layout: &MixedLayout) -> Key {
    let key = host_key(of_layout(operation, layout), layout.world_size());
    match layout.inter_size() {
        1 => key,
        nodes => key.on_nodes(std::iter::repeat_n(layout.local_size(), nodes)),
    }
}

impl MixedHandler {
    /// Measures the modes that give the same bits, for every fused operation of the layout and blocks of `sizes` bytes; from then on
    /// [`select`](Self::select) goes by what was measured, here and in every handler of such a layout that is made on this machine.
    /// All ranks call it together. A layout without fused operations has nothing to measure.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`CollectiveError::Tuning`] when the cache file cannot be written.
    pub fn tune(&mut self, comm: &Communicator, sizes: RangeInclusive<usize>) -> Result<()> {
        let (layout, most) = (self.layout, sizes.end() / size_of::<f32>() + 1);
        let (groups, mut block) = (layout.dp_size(), vec![1f32; most]);
        let mut row = vec![1f32; most * groups];
        for op in fused(&layout) {
            let (operation, handler) = (operation_of(op), &*self);
            let key = key(operation, &layout);
            let time = |candidate: usize, bytes: usize| {
                let count = (bytes / size_of::<f32>()).max(1);
                let call = MixedCall::from(op).mode(MixedMode::fused_in(&layout)[candidate]);
                let calls = (1 << 20) / (bytes + 1024) + 1; // about a megabyte, so that small calls are timed in numbers
                let (block, row) = (&mut block[..count], &mut row[..count * groups]);
                comm.barrier()?;
                let start = Instant::now();
                for _ in 0..calls {
                    match op {
                        MixedOp::AllReduceAllGather => handler.run(comm, call, &*block, &mut *row)?,
                        _ => handler.run(comm, call, &*row, &mut *block)?,
                    }
                }
                Ok::<_, CollectiveError>(Some(start.elapsed() / calls as u32))
            };
            let table = AlgorithmTable::measure(comm, &key, &names(&layout), sizes.clone(), time)?;
            self.tables.replace(operation, table);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_blocks_go_by_the_mode_with_the_fewest_bytes_between_nodes() {
        use MixedMode::{Bytes1, Bytes2, Waits};
        let chosen = |local: [usize; 2], inter: [usize; 2]| {
            let layout = MixedLayout::builder(local.into_iter().chain(inter).product(), 0)
                .local_size(local.into_iter().product())
                .local_tp(local[0])
                .inter_tp(inter[0])
                .build()
                .unwrap();
            let ops = [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce];
            ops.map(|op| MixedMode::fused_in(&layout)[fewest_bytes(op, &layout)])
        };
        assert_eq!(chosen([2, 2], [1, 1]), [Bytes1, Bytes1]);
        assert_eq!(chosen([2, 1], [1, 2]), [Bytes1, Bytes1]);
        // Halves of sums and of results are as much as the sums, which take a hop less.
        assert_eq!(chosen([2, 2], [2, 1]), [Bytes1, Bytes1]);
        assert_eq!(chosen([1, 2], [2, 1]), [Waits, Bytes2]);
        assert_eq!(chosen([1, 1], [2, 2]), [Waits, Waits]);
        assert_eq!(chosen([2, 2], [4, 1]), [Bytes2, Bytes2]);
    }
}
