//! The steps of a rank's blocks as a table in device memory, which kernels read.

use super::{
    bases::Base,
    listing::{Listed, Listing, Touched},
    memory::Places,
};

/// `plan_item` of table.cuh.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) at: u64,
    pub(super) base: Base,
    pub(super) rank: usize,
}

/// The bytes of a table: where the steps of each block are, the steps, and their items. If blocks copy their parts, the steps and items of a
/// block lie behind the place that says so (`block_table` of compiled.cuh).
pub(super) struct Table {
    pub(super) bytes: Vec<u8>,
    pub(super) steps_at: usize,
    pub(super) items_at: usize,
}

impl Table {
    /// The table of steps whose memory is where `places` says: for each half of the scratch, one behind the other. Block `b` has the shape
    /// `shapes[b]`. Parts that are `copied` have room for so many steps and items.
    pub(super) fn new(
        listing: &Listing,
        shapes: &[u32],
        copied: Option<[usize; 2]>,
        places: &[Places<'_>],
    ) -> Self {
        let mut bytes = Vec::new();
        let behind = |half: usize, all: usize| (half * all) as u32;
        for (half, places) in places.iter().enumerate() {
            let behind = [behind(half, listing.steps.len()), behind(half, listing.items.len())];
            for ((start, steps), shape) in listing.blocks().zip(shapes) {
                let items: u32 = steps.iter().map(Listed::items).sum();
                let first = [start as u32 + behind[0], steps[0].first + behind[1]];
                let words = [first[0], first[1], steps.len() as u32, items, *shape, 0, 0, 0];
                bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
                let Some(most) = copied else { continue };
                let items = &listing.items[steps[0].first as usize..][..items as usize];
                let items_at = bytes.len() + most[0] * Listed::BYTES;
                steps.iter().for_each(|step| put_step(&mut bytes, step, behind[1]));
                bytes.resize(items_at, 0);
                items.iter().for_each(|touched| put_item(&mut bytes, touched, places));
                bytes.resize(items_at + most[1] * Listed::ITEM_BYTES, 0);
            }
        }
        let steps_at = bytes.len();
        let apart = if copied.is_some() { &[] } else { places };
        for half in 0..apart.len() {
            let behind = behind(half, listing.items.len());
            listing.steps.iter().for_each(|step| put_step(&mut bytes, step, behind));
        }
        let items_at = bytes.len();
        for places in apart {
            listing.items.iter().for_each(|touched| put_item(&mut bytes, touched, places));
        }
        Self { bytes, steps_at, items_at }
    }
}

/// A step whose items are `behind` those that the listing has.
fn put_step(bytes: &mut Vec<u8>, step: &Listed, behind: u32) {
    let Listed { kind, detail, first, by_turn, counts: [a, b, c, d], share, span } = *step;
    let words = [kind as u32, detail, first + behind, by_turn.into(), a, b, c, d];
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend([share, span].as_flattened().iter().flat_map(|word| word.to_le_bytes()));
}

fn put_item(bytes: &mut Vec<u8>, touched: &Touched, places: &Places<'_>) {
    let Item { at, base, rank } = item(touched, places);
    bytes.extend(at.to_le_bytes());
    bytes.extend([base.number(rank), rank as u32].map(u32::to_le_bytes).as_flattened());
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
