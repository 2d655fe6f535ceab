//! The layout of a rank's part of the shared memory.
//!
//! The memory is one piece that consists of equal *regions*, one for each rank. All regions have the same layout, so an address is
//! always "base + rank × stride + offset". A region holds, in this order: the control block, the mailboxes of the
//! rounds (per lane and parity a head and a body), the rings of outgoing messages with the counters of consumed
//! incoming ones, and the arena from which symmetric buffers are allocated. Untouched pages cost nothing, so generous
//! sizes are free.

use std::{ptr::NonNull, sync::Arc};

use antiphon_device::{
    host::{memory::SharedMemory, wait::Doorbell},
    sync::{AtomicU32, AtomicU64, Ordering},
};

use crate::{
    nodes::Nodes,
    notice::Notice,
    signal::{
        Head,
        given_up::Earliest,
        packet::{Consumed, INLINE},
    },
    waiting::Wait,
};

/// Independent sequences of rounds: one for the caller's thread, one for work in the background.
pub(crate) const LANES: usize = 2;
/// The doorbell after the lanes' is for messages.
pub(crate) const MESSAGE_BELL: usize = LANES;
/// The body of a mailbox, in bytes.
pub(crate) const BODY: usize = 1 << 20;
/// Packets in a ring of messages.
pub(crate) const RING: usize = 8;
/// The body of a packet in a ring, in bytes.
pub(crate) const RING_BODY: usize = 32 << 10;

const PAGE: usize = 4096;
/// Heads stand alone in two lines: the adjacent-line prefetcher would otherwise fetch the neighbour's too.
const HEAD: usize = 128;

/// A value alone in its pair of cache lines.
#[repr(C, align(128))]
#[derive(Default)]
pub(crate) struct Padded<T>(pub(crate) T);

/// The state that a rank publishes to all ranks while it lives.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Control {
    /// Where it sleeps, for each lane and for messages.
    pub(crate) bells: [Padded<Doorbell>; LANES + 1],
    /// Nonzero once it has dropped its communicator.
    pub(crate) departed: Padded<AtomicU32>,
    /// Why it gave up, if it did (see `health`).
    pub(crate) fault: Padded<AtomicU64>,
    /// Why it gave up in a group of this world, if it did: others ask when it is gone.
    pub(crate) fault_in_group: Padded<AtomicU64>,
    /// In the block of a node's first rank: the earliest round in which a rank gave up, for each lane.
    pub(crate) given_up: [Padded<Earliest>; LANES],
    /// Its state while the communicator shrinks.
    pub(crate) notice: Padded<Notice>,
    /// Its present wait.
    pub(crate) wait: Padded<Wait>,
}

impl Control {
    /// Says that its rank is gone.
    pub(crate) fn depart(&self) {
        // Pairs with the acquire load in `has_departed`: a rank that sees that this one is gone sees what it posted before.
        self.departed.0.store(1, Ordering::Release);
    }

    /// Says why its rank gave up.
    pub(crate) fn say_fault(&self, fault: u64) {
        self.fault.0.store(fault, Ordering::Release);
    }

    /// Says why its rank gave up in a group.
    pub(crate) fn say_fault_in_group(&self, fault: u64) {
        self.fault_in_group.0.store(fault, Ordering::Release);
    }

    pub(crate) fn has_departed(&self) -> bool {
        self.departed.0.load(Ordering::Acquire) != 0
    }
}

/// The offsets within a region, for one world size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) world_size: usize,
    pub(crate) arena: usize,
    pub(crate) arena_bytes: usize,
    pub(crate) stride: usize,
}

const MAILBOXES: usize = PAGE;
const MAILBOX: usize = HEAD + BODY;
const COUNTERS: usize = MAILBOXES + LANES * 2 * MAILBOX;
const RING_PACKET: usize = HEAD + RING_BODY;
/// Where the word about the loss of a rank lies, behind the counter of the packets consumed of it.
const LOSS: usize = 64;

const _: () = assert!(size_of::<Consumed>() <= LOSS);

impl Layout {
    /// The layout for `world_size` ranks with `arena_bytes` each (rounded up to whole pages).
    pub(crate) fn new(world_size: usize, arena_bytes: usize) -> Option<Self> {
        // No address space holds more ranks; below, the first sums cannot overflow.
        let world_size = Some(world_size).filter(|&size| size <= 1 << 20)?;
        let arena = (Self::rings(world_size) + world_size * RING * RING_PACKET).next_multiple_of(PAGE);
        let arena_bytes = arena_bytes.checked_next_multiple_of(PAGE)?;
        let stride = arena.checked_add(arena_bytes)?.checked_next_multiple_of(2 << 20)?;
        stride.checked_mul(world_size).filter(|&total| total <= isize::MAX as usize)?;
        Some(Self { world_size, arena, arena_bytes, stride })
    }

    pub(crate) fn total(&self) -> usize {
        self.stride * self.world_size
    }

    fn rings(world_size: usize) -> usize {
        (COUNTERS + world_size * size_of::<Padded<AtomicU64>>()).next_multiple_of(PAGE)
    }
}

/// The shared memory, seen through its layout. This is the only place that turns offsets into references. Clones share the mapping.
#[derive(Clone)]
pub(crate) struct Regions {
    memory: Arc<SharedMemory>,
    /// The base of the memory, which is here so that an access needs not look there.
    base: NonNull<u8>,
    layout: Layout,
    /// The first rank of this node.
    first: usize,
    /// What ranks of other nodes say of themselves, if there are any.
    elsewhere: Option<Arc<Elsewhere>>,
}

/// The control blocks of ranks on other nodes. They are this process's own: a process knows for itself when a rank's word counts, as
/// messages of that rank to other processes of the node may still be under way.
struct Elsewhere {
    nodes: Nodes,
    node: usize,
    controls: Vec<Control>,
    /// One more than the notices that a rank which leaves had sent to this rank before; 0 for a rank that has not said that it leaves.
    leaving: Vec<AtomicU64>,
    /// How many notices have come from each rank.
    notices: Vec<AtomicU64>,
    /// The marks of these ranks, by lane. They count together with the reasons in `controls`.
    given_up: [Earliest; LANES],
}

// SAFETY: `base` is the address of `memory`, which any thread may use; see there.
unsafe impl Send for Regions {}
// SAFETY: as for Send.
unsafe impl Sync for Regions {}

impl Regions {
    pub(crate) fn new(memory: SharedMemory, layout: Layout) -> Self {
        assert_eq!(memory.len(), layout.total());
        Self { base: memory.base(), memory: Arc::new(memory), layout, first: 0, elsewhere: None }
    }

    /// The memory of the node of `rank`, one of several.
    pub(crate) fn on_node(memory: SharedMemory, layout: Layout, nodes: Nodes, rank: usize) -> Self {
        let node = nodes.of(rank);
        let first = nodes.ranks(node)[0];
        let controls = (0..layout.world_size).map(|_| Control::default()).collect();
        let counters = || (0..layout.world_size).map(|_| AtomicU64::new(0)).collect();
        let (leaving, notices) = (counters(), counters());
        let given_up = Default::default();
        let elsewhere = Some(Arc::new(Elsewhere { nodes, node, controls, leaving, notices, given_up }));
        Self { first, elsewhere, ..Self::new(memory, layout) }
    }

    /// Whether a rank of another node has said that it leaves, which does not count yet.
    pub(crate) fn is_leaving(&self, rank: usize) -> bool {
        self.elsewhere.as_ref().is_some_and(|elsewhere| {
            elsewhere.leaving[rank].load(Ordering::Acquire) != 0 && !elsewhere.controls[rank].has_departed()
        })
    }

    /// Notes that a rank of another node has said that it leaves, and how many notices it has sent before.
    pub(crate) fn note_leaving(&self, rank: usize, notices: u64) {
        if let Some(elsewhere) = &self.elsewhere {
            // Pairs with the acquire load in `is_leaving`.
            elsewhere.leaving[rank].store(notices.saturating_add(1), Ordering::Release);
        }
    }

    /// Counts a notice of a rank of another node, which can be seen by now. One thread at a time does.
    pub(crate) fn count_notice(&self, rank: usize) {
        if let Some(elsewhere) = &self.elsewhere {
            let count = &elsewhere.notices[rank];
            // Pairs with the acquire load in `has_left`.
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
    }

    /// Whether a rank has dropped its communicator, so that no notice of it will come. (What else it sent to a rank of another node
    /// may still be under way, or lost with the rank that would have received it for that node.)
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        let Some(elsewhere) = self.elsewhere.as_ref().filter(|_| self.is_elsewhere(rank)) else {
            return self.control(rank).has_departed();
        };
        let leaving = elsewhere.leaving[rank].load(Ordering::Acquire);
        leaving != 0 && elsewhere.notices[rank].load(Ordering::Acquire) >= leaving - 1
    }

    /// Whether a rank is on another node.
    #[inline]
    pub(crate) fn is_elsewhere(&self, rank: usize) -> bool {
        self.elsewhere.as_ref().is_some_and(|elsewhere| elsewhere.nodes.of(rank) != elsewhere.node)
    }

    /// A number that is the memory's alone on this machine, and equal on all ranks.
    #[cfg(not(loom))]
    pub(crate) fn number(&self) -> u64 {
        self.memory.number()
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The address of a byte of a rank's region.
    #[inline]
    fn at(&self, rank: usize, offset: usize) -> *mut u8 {
        debug_assert!(rank < self.layout.world_size && offset < self.layout.stride);
        // SAFETY: rank and offset lie inside the mapping, whose size the constructor checked.
        unsafe { self.base.as_ptr().add(rank * self.layout.stride + offset) }
    }

    /// Where a rank's region begins.
    pub(crate) fn region(&self, rank: usize) -> NonNull<u8> {
        NonNull::new(self.at(rank, 0)).expect("a mapping is not at null")
    }

    #[inline]
    pub(crate) fn control(&self, rank: usize) -> &Control {
        if let Some(elsewhere) = &self.elsewhere
            && elsewhere.nodes.of(rank) != elsewhere.node
        {
            return &elsewhere.controls[rank];
        }
        // SAFETY: a region begins, page-aligned, with its control block; all-zero bytes are a valid one, and it
        // consists of atomics only.
        unsafe { &*self.at(rank, 0).cast() }
    }

    /// Marks a round of a lane in which a rank gave up, whose [reason](Control::say_fault) is in its control block.
    pub(crate) fn mark_given_up(&self, rank: usize, lane: usize, round: u64) {
        match self.elsewhere.as_ref().filter(|_| self.is_elsewhere(rank)) {
            None => self.nodes_mark(lane).mark(round),
            // The reason is this process's own, and so must the mark be: another process of the node may not have it yet.
            Some(elsewhere) => elsewhere.given_up[lane].mark(round),
        }
    }

    /// Whether a rank gave up in this round of a lane or before.
    #[inline]
    pub(crate) fn has_given_up(&self, lane: usize, round: u64) -> bool {
        let elsewhere = self.elsewhere.as_ref();
        self.nodes_mark(lane).includes(round)
            || elsewhere.is_some_and(|elsewhere| elsewhere.given_up[lane].includes(round))
    }

    /// The mark of this node's ranks in a lane.
    #[inline]
    fn nodes_mark(&self, lane: usize) -> &Earliest {
        &self.control(self.first).given_up[lane].0
    }

    #[inline]
    fn head(&self, rank: usize, offset: usize) -> &Head {
        debug_assert!(offset.is_multiple_of(64));
        // SAFETY: callers pass the offset of a head; zero bytes are a valid head, and `Head` is Sync.
        unsafe { &*self.at(rank, offset).cast() }
    }

    #[inline]
    pub(crate) fn mailbox(&self, rank: usize, lane: usize, parity: usize) -> Packet<'_> {
        let offset = MAILBOXES + (lane * 2 + parity) * MAILBOX;
        Packet { head: self.head(rank, offset), body: self.at(rank, offset + HEAD) }
    }

    /// The packet of the ring of messages from one rank to another.
    pub(crate) fn ring(&self, from: usize, to: usize, index: usize) -> Packet<'_> {
        let offset = Layout::rings(self.layout.world_size) + (to * RING + index) * RING_PACKET;
        Packet { head: self.head(from, offset), body: self.at(from, offset + HEAD) }
    }

    /// How many packets of messages from `from` the rank `to` has consumed; `to` writes it.
    pub(crate) fn consumed(&self, from: usize, to: usize) -> &Consumed {
        let offset = COUNTERS + from * size_of::<Padded<AtomicU64>>();
        // SAFETY: the offset is a counter's, aligned to 128 bytes.
        unsafe { &*self.at(to, offset).cast() }
    }

    /// Not 0 once the rank `by`, which shrinks the communicator, has lost `rank`. In the part of a rank of another node it is what that has told
    /// to any rank of this one.
    pub(crate) fn loss(&self, by: usize, rank: usize) -> &AtomicU32 {
        // The second line beside the counter of consumed packets is nobody's.
        let offset = COUNTERS + rank * size_of::<Padded<AtomicU64>>() + LOSS;
        // SAFETY: the offset is aligned, and inside of a counter's two lines; zero bytes are a valid word.
        unsafe { &*self.at(by, offset).cast() }
    }

    /// The address of an offset of a rank's arena.
    pub(crate) fn arena(&self, rank: usize, offset: usize) -> *mut u8 {
        self.at(rank, self.layout.arena + offset)
    }

    /// The offset in a rank's arena of `len` bytes at `pointer`, if that is where they lie.
    #[inline]
    pub(crate) fn arena_offset(&self, rank: usize, pointer: *const u8, len: usize) -> Option<usize> {
        let offset = (pointer as usize).checked_sub(self.arena(rank, 0) as usize)?;
        (offset < self.layout.arena_bytes && len <= self.layout.arena_bytes - offset).then_some(offset)
    }

    /// Gives pages of a rank's arena back.
    pub(crate) fn release_arena(
        &self,
        rank: usize,
        offset: usize,
        len: usize,
    ) -> Result<(), antiphon_device::DeviceError> {
        self.memory.release(rank * self.layout.stride + self.layout.arena + offset, len)
    }
}

/// A head and the data beside it.
#[derive(Clone, Copy)]
pub(crate) struct Packet<'a> {
    pub(crate) head: &'a Head,
    pub(crate) body: *mut u8,
}

impl Packet<'_> {
    /// Where a payload of `len` bytes lies: in the head if it fits, else in the body.
    #[inline]
    pub(crate) fn payload(&self, len: usize) -> *mut u8 {
        #[cfg(not(loom))]
        if len <= INLINE {
            return self.head.inline.get().cast();
        }
        let _ = (len, INLINE);
        self.body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for world_size in [1, 2, 3, 64, 1000] {
            let layout = Layout::new(world_size, 12345).unwrap();
            assert!(size_of::<Control>() <= MAILBOXES);
            let rings = Layout::rings(world_size);
            assert!(COUNTERS + world_size * 128 <= rings);
            assert!(rings + world_size * RING * RING_PACKET <= layout.arena);
            assert!(layout.arena_bytes >= 12345 && layout.arena + layout.arena_bytes <= layout.stride);
            assert!(
                MAILBOX.is_multiple_of(128) && RING_PACKET.is_multiple_of(128) && rings.is_multiple_of(PAGE)
            );
        }
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused() {
        assert!(Layout::new(2, usize::MAX).is_none());
        assert!(Layout::new(1 << 20, 1 << 60).is_none());
    }
}
