//! The steps of a rank's blocks as a table in device memory, which kernels read.

use super::{
    bases::Base,
    listing::{Listed, Listing, Touched},
    memory::Places,
};

/// `plan_item` of ops.cuh.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) at: u64,
    pub(super) base: Base,
    pub(super) rank: usize,
}

/// The bytes of a table: where the steps of each block are, the steps, and their items.
pub(super) struct Table {
    pub(super) bytes: Vec<u8>,
    pub(super) steps_at: usize,
    pub(super) items_at: usize,
}

impl Table {
    /// The table of steps whose memory is where `places` says: for each half of the scratch, one behind the other. Block `b` has the shape
    /// `shapes[b]`.
    pub(super) fn new(listing: &Listing, shapes: &[u32], places: &[Places<'_>]) -> Self {
        let mut bytes = Vec::new();
        let behind = |half: usize, all: usize| (half * all) as u32;
        for half in 0..places.len() {
            let behind = [behind(half, listing.steps.len()), behind(half, listing.items.len())];
            for ((start, steps), shape) in listing.blocks().zip(shapes) {
                let items: u32 = steps.iter().map(Listed::items).sum();
                let first = [start as u32 + behind[0], steps[0].first + behind[1]];
                let words = [first[0], first[1], steps.len() as u32, items, *shape, 0, 0, 0];
                bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            }
        }
        let steps_at = bytes.len();
        for half in 0..places.len() {
            for step in &listing.steps {
                let Listed { kind, detail, first, by_turn, counts: [a, b, c, d], share, span } = *step;
                let first = first + behind(half, listing.items.len());
                let words = [kind as u32, detail, first, by_turn.into(), a, b, c, d];
                bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
                bytes.extend([share, span].as_flattened().iter().flat_map(|word| word.to_le_bytes()));
            }
        }
        let items_at = bytes.len();
        for touched in places.iter().flat_map(|of| listing.items.iter().map(move |each| item(each, of))) {
            let Item { at, base, rank } = touched;
            bytes.extend(at.to_le_bytes());
            bytes.extend([base.number(rank), rank as u32].map(u32::to_le_bytes).as_flattened());
        }
        Self { bytes, steps_at, items_at }
    }
}

/// Where something lies that a step touches.
fn item(touched: &Touched, places: &Places<'_>) -> Item {
    let own = places.rank;
    let counter = |at, rank| Item { at, base: Base::Absolute, rank };
    match *touched {
        Touched::Signals { rank, channel } => counter(places.channel(rank, channel), rank),
        Touched::Awaited { channel } => counter(places.channel(own, channel), places.peer(channel)),
        Touched::Semaphore(id) => counter(places.semaphore(id), own),
        Touched::Barrier(id) => counter(places.barrier(id), own),
        Touched::Cleared => counter(places.cleared(), own),
        Touched::Bytes { operand, start } => places.operand(operand, start),
    }
}
