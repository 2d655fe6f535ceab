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

/// A table for each fused operation of the layout.
pub(super) struct Tables(Vec<(Operation, AlgorithmTable)>);

impl Tables {
    pub(super) fn load(comm: &Communicator, layout: &MixedLayout) -> Result<Self> {
        Self::load_with(comm, layout, |operation| key(operation, layout), BYTES1_FROM)
    }

    /// Loads the tables of these keys. The built-in tables choose [`MixedMode::Bytes1`] from `bytes1_from` bytes on.
    pub(super) fn load_with(
        comm: &Communicator,
        layout: &MixedLayout,
        key: impl Fn(Operation) -> Key,
        bytes1_from: usize,
    ) -> Result<Self> {
        let table = |operation: Operation| {
            let built_in = [(0, 0), (bytes1_from, 1)];
            Ok((operation, AlgorithmTable::load(comm, &key(operation), &names(), &built_in)?))
        };
        fused(layout).map(|op| table(operation_of(op))).collect::<Result<_>>().map(Self)
    }

    /// The table of an operation becomes another.
    pub(super) fn replace(&mut self, operation: Operation, table: AlgorithmTable) {
        let known = self.0.iter_mut().filter(|(known, _)| *known == operation);
        known.for_each(|(_, old)| *old = table.clone());
    }

    pub(super) fn choose(&self, operation: Operation, bytes: usize) -> MixedMode {
        let table = self.0.iter().find(|(known, _)| *known == operation);
        let (_, table) = table.expect("every fused operation of the layout has a table");
        MixedMode::FUSED[table.choose(bytes)]
    }
}

/// The operations of a layout that have modes of their own.
pub(super) fn fused(layout: &MixedLayout) -> impl Iterator<Item = MixedOp> + use<> {
    let ops: &[MixedOp] = if layout.use_mixed() { layout.valid_ops() } else { &[] };
    ops.iter().copied()
}

pub(super) fn names() -> [&'static str; 2] {
    MixedMode::FUSED.map(MixedMode::name)
}

fn key(operation: Operation, layout: &MixedLayout) -> Key {
    let of = format!("{operation}, tp {} × dp {}", layout.tp_size(), layout.dp_size());
    host_key(of, layout.world_size())
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
                let call = MixedCall::from(op).mode(MixedMode::FUSED[candidate]);
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
            let table = AlgorithmTable::measure(comm, &key, &names(), sizes.clone(), time)?;
            self.tables.replace(operation, table);
        }
        Ok(())
    }
}
