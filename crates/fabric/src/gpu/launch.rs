//! Putting the kernels of a family into a stream.

use std::cell::RefCell;

use antiphon_device::cuda::{Context, CudaError, Event, LaunchConfig, Stream, StreamRef, relaxed};

use super::{
    Family, Loaded, THREADS, Tenant,
    family::Resident,
    kernel_call,
    staging::{CHANNELS, MAX_BLOCKS},
};
use crate::{FabricError, Signature};

/// How a call is divided: into launches of at most so much, in multiples of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pieces {
    /// The size of the call.
    pub total: usize,
    /// The largest size of a launch.
    pub most: usize,
    /// The size of every launch but the last is a multiple of this.
    pub unit: usize,
}

impl Pieces {
    /// Pieces of `total` bytes (of each block). The unit is such that a launch has whole vectors for each of up to 8 ranks, and whole
    /// rows of 31 vectors.
    pub fn bytes(total: usize, most: usize) -> Self {
        Self { total, most, unit: 496 * 8 }
    }

    /// Where each launch begins, and how much it has, where there are several. They are of one size, so that none is too small
    /// to be worth a channel; but for the first of the second channel, which is half of that, so that the channels take turns
    /// on the links.
    fn split(self) -> impl Iterator<Item = (usize, usize)> {
        let Self { total, most, unit } = self;
        let pieces = total.div_ceil(most / unit * unit).next_multiple_of(CHANNELS);
        let piece = total.div_ceil(pieces).next_multiple_of(unit);
        let half = (piece / 2).next_multiple_of(unit);
        let (mut start, mut index) = (0, 0);
        std::iter::from_fn(move || {
            let len = (total - start).min(if index == 1 { half } else { piece });
            let this = (start, len);
            (start, index) = (start + len, index + 1);
            (len > 0).then_some(this)
        })
    }
}

/// The tensors and the signature of a launch; see `arguments` in slots.cuh.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// The address of the input; 0 for none.
    pub input: usize,
    /// The address of the output; 0 for none.
    pub output: usize,
    /// Elements, or bytes where nothing is reduced: of the tensor, or of one block of it.
    pub count: usize,
    /// Bytes from block to block.
    pub stride: usize,
    /// The root, where there is one.
    pub root: usize,
    /// What the ranks must agree on: it is the tag of the call.
    pub signature: Signature,
}

impl Work {
    /// A call of this signature that has neither tensors nor a root.
    #[inline]
    pub fn new(signature: Signature) -> Self {
        Self { input: 0, output: 0, count: 0, stride: 0, root: 0, signature }
    }
}

/// A kernel to launch.
#[derive(Clone, Copy)]
pub struct Launch<F: Family> {
    /// A kernel of the family.
    pub kernel: F::Kernel,
    /// How many blocks it gets.
    pub grid: Grid,
    /// Its tensors and its signature.
    pub work: Work,
    /// The family's own argument.
    pub arguments: F::Arguments,
}

/// The amount of work, from which the number of blocks follows.
#[derive(Debug, Clone, Copy)]
pub enum Grid {
    /// Items, one for each thread of blocks of [`THREADS`].
    Items(usize),
    /// Items of each peer, where a block serves one peer.
    ItemsByPeer(usize),
    /// The grid that the family names. It has at most as many blocks as the family's kernels are compiled for, in a stream that has
    /// [`multiprocessors_here`](Tenant::multiprocessors_here) multiprocessors.
    Exact {
        /// The blocks, at most 640, and their threads.
        config: LaunchConfig,
        /// Whether half of what runs at once is left free, so that a kernel behind may come at once.
        is_small: bool,
    },
}

impl Grid {
    /// The grid of one of `channels` channels if each of `multiprocessors` multiprocessors runs `resident` blocks; and whether
    /// half of what runs at once is left free.
    #[inline]
    fn config(self, resident: u32, multiprocessors: u32, channels: u32, peers: u32) -> (LaunchConfig, bool) {
        let (items, unit) = match self {
            Self::Items(items) => (items, 1),
            Self::ItemsByPeer(items) => (items, peers),
            Self::Exact { config, is_small } => return (config, is_small),
        };
        let wanted = (items as u64).div_ceil(u64::from(THREADS)) * u64::from(unit);
        let all = (resident * multiprocessors).min(MAX_BLOCKS);
        let few = all / 2;
        // Up to two rounds of a small grid take less time than the start of the kernel behind.
        let (most, is_small) = match wanted <= 2 * u64::from(few) && channels == 1 {
            true => (few, true),
            false => (all / channels, false),
        };
        let blocks = wanted.clamp(1, u64::from(most)) as u32;
        (LaunchConfig::new((blocks / unit).max(1) * unit, THREADS), is_small)
    }
}

kernel_call! {
    /// What every kernel of a family takes, of a rank with as many peers; or with one, where it is alone.
    #[repr(align(16))]
    pub(super) struct Arguments<const PEER_PLACES: usize> = "arguments" {
        doing: [u64; 2] as tag,
        /// This rank's arena.
        own: *mut u8,
        /// The others' arenas, beginning with the next rank's.
        peer: [*mut u8; PEER_PLACES],
        /// This rank's other channel.
        other: *mut u8,
        limit_ns: u64,
        board: *mut wait_board,
        input: *const u8,
        output: *mut u8,
        /// Bytes from block to block, where a tensor has one for each rank.
        stride: u64,
        /// Elements, or bytes where nothing is reduced: of the tensor, or of one block of it.
        count: u32,
        rank: u32,
        root: u32,
        /// Bytes from lane to lane.
        lane_stride: u32,
        /// Bytes from slot to slot.
        slot_stride: u32,
        /// When the kernel behind may start: `Dependents`.
        dependents: u32,
    }
}

/// When the kernel behind a call may start, if it is launched programmatically; as in slots.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Dependents {
    AtEnd,
    WhenCertain,
    AtStart,
}

/// What a call of several pieces needs to use both channels: a stream for the second one, and events that join it to the
/// caller's.
struct SideStream {
    stream: Stream,
    forked: Event,
    joined: Event,
}

/// A side stream for calls that run, and one for each capture that is open at the same time: a stream that was forked into a capture
/// belongs to it until it ends.
pub(super) struct SideStreams {
    context: Context,
    streams: RefCell<Vec<SideStream>>,
}

impl SideStreams {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        let first = SideStream::new(context)?;
        Ok(Self { context: context.clone(), streams: RefCell::new(vec![first]) })
    }

    /// Calls `work` with the side stream for a call on `stream`.
    fn with<T>(
        &self,
        stream: StreamRef<'_>,
        work: impl FnOnce(&SideStream) -> Result<T, FabricError>,
    ) -> Result<T, FabricError> {
        let capture = stream.capture()?;
        let mut streams = self.streams.borrow_mut();
        for side in streams.iter() {
            let of_side = side.stream.borrow().capture()?;
            if of_side.is_none() || of_side == capture {
                return work(side);
            }
        }
        // A capture that is open may forbid what a new stream needs.
        streams.push(relaxed(|| SideStream::new(&self.context))??);
        work(streams.last().expect("it was pushed"))
    }
}

impl SideStream {
    fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self { stream: context.stream()?, forked: Event::new(context)?, joined: Event::new(context)? })
    }
}

impl Tenant {
    /// Runs a call in pieces. `launch(start, len, channels)` returns what to launch for a piece, while `channels` channels work at once.
    /// Several pieces go through both channels in turn. A call of nothing launches nothing.
    ///
    /// # Errors
    /// [`FabricError::Device`], which is reported to the peers and ends the communicator.
    ///
    /// # Safety
    /// The kernels may be launched with these arguments: the addresses are of this rank's device and serve what the kernels do
    /// with them until the stream has passed, a launch sends at most [`lane_bytes`](Self::lane_bytes) to a peer, and an
    /// [exact](Grid::Exact) grid has no more blocks than run at once. The stream was [entered](Self::enter) for this call. All
    /// ranks launch the same kernels for equal signatures.
    #[inline]
    pub unsafe fn run<F: Family>(
        &self,
        loaded: &Loaded<F>,
        pieces: Pieces,
        stream: StreamRef<'_>,
        launch: impl Fn(usize, usize, usize) -> Launch<F>,
    ) -> Result<(), FabricError> {
        self.fail_if_err(match pieces.total {
            0 => Ok(()),
            // SAFETY: passed on.
            total if total <= pieces.most => unsafe {
                self.launch(loaded, (0, 1), &launch(0, total, 1), stream)
            },
            // SAFETY: passed on.
            _ => unsafe { self.run_in_pieces(loaded, pieces, stream, launch) },
        })
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_in_pieces<F: Family>(
        &self,
        loaded: &Loaded<F>,
        pieces: Pieces,
        stream: StreamRef<'_>,
        launch: impl Fn(usize, usize, usize) -> Launch<F>,
    ) -> Result<(), FabricError> {
        let channels = self.staging().channels;
        self.sides().with(stream, |SideStream { stream: second, forked, joined }| {
            let second = second.borrow();
            forked.record(stream).and_then(|()| second.wait(forked))?;
            let launched = pieces.split().enumerate().try_for_each(|(index, (start, len))| {
                let channel = index % channels;
                let stream = if channel == 0 { stream } else { second };
                // SAFETY: passed on.
                unsafe { self.launch(loaded, (channel, channels), &launch(start, len, channels), stream) }
            });
            // Whatever happened: a capture may not end with a stream that was forked and not joined.
            let joined = joined.record(second).and_then(|()| stream.wait(joined)).map_err(FabricError::from);
            launched.and(joined)
        })
    }

    /// Launches a kernel in one of `channels` channels.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn launch<F: Family>(
        &self,
        loaded: &Loaded<F>,
        (channel, channels): (usize, usize),
        launch: &Launch<F>,
        stream: StreamRef<'_>,
    ) -> Result<(), FabricError> {
        let Launch { kernel, grid, work, arguments } = launch;
        let Resident { function, blocks: resident, .. } = loaded.get(*kernel);
        let (rank, world_size) = (self.rank(), self.world_size());
        let (config, is_small) = grid.config(
            *resident,
            self.multiprocessors_here(),
            channels as u32,
            (world_size as u32 - 1).max(1),
        );
        let dependents = match is_small {
            true if self.starts_dependents() => Dependents::AtStart,
            true => Dependents::WhenCertain,
            false => Dependents::AtEnd,
        };
        let config = if self.programmatic().applies(stream)? { config.programmatic() } else { config };
        macro_rules! launch {
            ($($peers:literal)*) => {
                // A rank that is alone has one address, which no kernel uses.
                match (world_size - 1).max(1) {
                    $($peers => {
                        let first = Arguments::<$peers> {
                            doing: work.signature.to_words(),
                            own: self.channel(rank, channel).0,
                            peer: std::array::from_fn(|k| self.channel((rank + 1 + k) % world_size, channel).0),
                            other: self.channel(rank, CHANNELS - 1 - channel).0,
                            limit_ns: self.limit_ns(),
                            board: self.board().pointer().0,
                            input: work.input as u64,
                            output: work.output as u64,
                            stride: work.stride as u64,
                            count: work.count as u32,
                            rank: rank as u32,
                            root: work.root as u32,
                            lane_stride: self.staging().lane_stride as u32,
                            slot_stride: self.staging().slot_stride() as u32,
                            dependents: dependents as u32,
                        };
                        let first = (&first).into();
                        // SAFETY: the kernel's own arguments; the arenas live as long as `self`, whose drop waits.
                        unsafe {
                            match size_of::<F::Arguments>() {
                                0 => function.launch(stream, &config, &[first]),
                                _ => function.launch(stream, &config, &[first, arguments.into()]),
                            }
                        }
                    })*
                    peers => unreachable!("a world with {peers} peers was refused"),
                }
            };
        }
        launch!(1 2 3 4 5 6 7).map_err(FabricError::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(grid: Grid, channels: u32) -> (u32, bool) {
        let (config, is_small) = grid.config(4, 132, channels, 3);
        ((config.threads() / u64::from(THREADS)) as u32, is_small)
    }

    #[test]
    fn a_grid_has_a_thread_for_each_item_as_far_as_blocks_run_at_once() {
        assert_eq!(blocks(Grid::Items(0), 1), (1, true));
        assert_eq!(blocks(Grid::Items(129), 1), (2, true));
        // Two rounds of half of the 528 blocks that run at once, and then one of all of them.
        assert_eq!(blocks(Grid::Items(528 * 128), 1), (264, true));
        assert_eq!(blocks(Grid::Items(528 * 128 + 1), 1), (528, false));
        assert_eq!(blocks(Grid::Items(usize::MAX / 2), 1), (528, false));
        // Each of two channels has half of them.
        assert_eq!(blocks(Grid::Items(1 << 30), 2), (264, false));
    }

    #[test]
    fn every_peer_has_as_many_blocks() {
        assert_eq!(blocks(Grid::ItemsByPeer(1), 1), (3, true));
        assert_eq!(blocks(Grid::ItemsByPeer(1 << 30), 1), (528, false));
        assert_eq!(blocks(Grid::ItemsByPeer(1 << 30), 2), (264, false));
        let five = Grid::ItemsByPeer(1 << 30).config(4, 132, 1, 5).0;
        assert_eq!(five.threads() / u64::from(THREADS), 525);
    }

    #[test]
    fn pieces_cover_a_call_once_in_whole_units() {
        for (total, most, unit) in [(100, 10, 1), (1_000_001, 65_536, 16), (7, 2, 2), (40_000, 3_968, 3_968)]
        {
            let pieces: Vec<_> = Pieces { total, most, unit }.split().collect();
            let mut next = 0;
            for (index, &(start, len)) in pieces.iter().enumerate() {
                assert_eq!(start, next, "{pieces:?}");
                assert!(len <= most && (len.is_multiple_of(unit) || index + 1 == pieces.len()), "{pieces:?}");
                next += len;
            }
            assert_eq!(next, total);
            // The first of the second channel is half as long.
            assert!(pieces[1].1 <= pieces[0].1.div_ceil(2).next_multiple_of(unit), "{pieces:?}");
        }
    }
}
