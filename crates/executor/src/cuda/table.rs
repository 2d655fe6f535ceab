//! The steps of a rank's blocks as a table in device memory, which kernels read.

use std::slice;

use antiphon_device::cuda::KernelArgument;
use antiphon_fabric::gpu::kernel_call;

use super::{
    bases::Base,
    listing::{Listed, Listing, Touched},
    memory::Places,
};

kernel_call! {
    /// An operand of a step, or the counter of a channel.
    pub(super) struct PlanItem = "plan_item" align(16) {
        /// Bytes from the base.
        at: u64,
        /// The number of the base of the launch; that of number 0 is 0.
        base: u32,
        /// The rank that sends these packets, or through this channel.
        rank: u32,
    }
}

kernel_call! {
    /// A step of a thread block.
    pub(super) struct PlanStep = "plan_step" align(16) {
        kind: u32,
        /// The operator; or whether a signal is relaxed, how many blocks meet, how many steps a loop has.
        detail: u32,
        /// Of the step's items: plain sources, packets, plain destinations, packets.
        first: u32,
        /// Whether each turn of a loop does a part of the share.
        by_turn: u32,
        counts: [u32; 4],
        /// The block's bytes of the operation; of a loop, the number of turns and the bytes of each.
        share: [u64; 2],
        /// The step's bytes of the operation, of one chunk if chunks are padded as packets.
        span: [u64; 2],
    }
}

kernel_call! {
    /// Where the steps of a thread block are, and their items.
    pub(super) struct PlanBlock = "plan_block" align(16) {
        first_step: u32,
        first_item: u32,
        steps: u32,
        items: u32,
        /// Which case of a compiled kernel does them.
        shape: u32,
        unused: [u32; 3],
    }
}

/// Where something lies that a step touches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) at: u64,
    pub(super) base: Base,
    pub(super) rank: usize,
}

/// The halves of scratch for which a block's part of the table has room.
pub(super) const HALVES: usize = 2;

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
        let apart = if copied.is_some() { &places[..1] } else { places };
        for half in 0..apart.len() {
            let behind = [behind(half, listing.steps.len()), behind(half, listing.items.len())];
            for ((start, steps), shape) in listing.blocks().zip(shapes) {
                let items: u32 = steps.iter().map(Listed::items).sum();
                put(
                    &mut bytes,
                    &PlanBlock {
                        first_step: start as u32 + behind[0],
                        first_item: steps[0].first + behind[1],
                        steps: steps.len() as u32,
                        items,
                        shape: *shape,
                        unused: [0; 3],
                    },
                );
                let Some(most) = copied else { continue };
                let items = &listing.items[steps[0].first as usize..][..items as usize];
                let items_at = bytes.len() + most[0] * size_of::<PlanStep>();
                steps.iter().for_each(|step| put_step(&mut bytes, step, 0));
                for half in 0..HALVES {
                    bytes.resize(items_at + half * most[1] * size_of::<PlanItem>(), 0);
                    let places = places.get(half).into_iter();
                    places
                        .for_each(|places| items.iter().for_each(|item| put_item(&mut bytes, item, places)));
                }
                bytes.resize(items_at + HALVES * most[1] * size_of::<PlanItem>(), 0);
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
    let Listed { kind, detail, first, by_turn, counts, share, span } = *step;
    let (kind, first, by_turn) = (kind as u32, first + behind, by_turn.into());
    put(bytes, &PlanStep { kind, detail, first, by_turn, counts, share, span });
}

fn put_item(bytes: &mut Vec<u8>, touched: &Touched, places: &Places<'_>) {
    let Item { at, base, rank } = item(touched, places);
    put(bytes, &PlanItem { at, base: base.number(rank), rank: rank as u32 });
}

/// Puts what a kernel reads behind some bytes.
fn put<T: KernelArgument>(bytes: &mut Vec<u8>, value: &T) {
    // SAFETY: the structs of this file are numbers without padding.
    bytes.extend_from_slice(unsafe { slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) });
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
