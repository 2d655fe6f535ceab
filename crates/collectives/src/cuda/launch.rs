//! Putting kernels into a stream.

use antiphon_device::cuda::{
    Context, CudaError, CudaVersion, DevicePointer, Event, KernelArgument, LaunchConfig, Stream, StreamRef,
};
use antiphon_fabric::Signature;
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use super::{
    CHANNELS, CudaCollectives, MAX_BLOCKS, THREADS, channel_bytes, device,
    kernels::{Family, Kernel, Loaded, Resident},
    slot_stride,
};
use crate::{
    all_reduce::Places,
    arguments::{Input, Output},
    error::{CollectiveError, Result},
    fusion::{Fused, Room, Teams},
};

/// How a call is cut into pieces: of at most so much, in multiples of a unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) total: usize,
    pub(crate) most: usize,
    pub(crate) unit: usize,
}

impl Cut {
    /// Of so many bytes (of each block): whole rows (kernels.cuh), and whole vectors for each of up to 8 ranks.
    pub(crate) fn bytes(total: usize, most: usize) -> Self {
        Self { total, most, unit: 496 * 8 }
    }
}

/// What differs from kernel to kernel; see `arguments` in slots.cuh.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) input: usize,
    pub(crate) output: usize,
    /// Elements, or bytes where nothing is reduced: of the tensor, or of one block of it.
    pub(crate) count: usize,
    /// Bytes from block to block.
    pub(crate) stride: usize,
    pub(crate) root: usize,
    /// What the ranks must agree on.
    pub(crate) signature: Signature,
}

/// What a call of several pieces needs to use both channels: a stream for the second, and what joins it to the caller's.
pub(super) struct Second {
    stream: Stream,
    forked: Event,
    joined: Event,
}

impl Second {
    pub(super) fn new(context: &Context) -> std::result::Result<Self, CudaError> {
        Ok(Self { stream: context.stream()?, forked: Event::new(context)?, joined: Event::new(context)? })
    }
}

/// A kernel to launch.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) kernel: Kernel,
    pub(crate) grid: Grid,
    pub(crate) work: Work,
    pub(crate) more: More,
}

/// What some kernels get as well.
#[derive(Clone, Copy)]
pub(crate) enum More {
    Nothing,
    /// What to do with the sum.
    Epilogue(Fused),
    /// Where tensors in registered memory are.
    Places(Places),
}

/// What there is to do, from which the number of blocks follows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Grid {
    /// Items, one for each thread.
    Items(usize),
    /// Items of each peer, where a block serves one peer.
    ItemsByPeer(usize),
    /// Rows for teams of blocks.
    Teams(Teams),
}

/// `arguments` of slots.cuh.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Arguments<const PEERS: usize> {
    doing: [u64; 2],
    own: DevicePointer,
    peer: [DevicePointer; PEERS],
    other: DevicePointer,
    limit_ns: u64,
    board: DevicePointer,
    input: u64,
    output: u64,
    stride: u64,
    count: u32,
    rank: u32,
    root: u32,
    lane_stride: u32,
    slot_stride: u32,
    dependents: u32,
}

/// When the kernel behind a call may start, if it is launched programmatically; as in slots.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Dependents {
    AtEnd,
    WhenCertain,
    AtStart,
}

/// Whether kernels are launched so that they may start while the one ahead ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Programmatic {
    Never,
    /// Not where they are captured.
    Eager,
    Always,
}

impl Programmatic {
    /// What there is: with Hopper and newer; in graphs since CUDA 12.3.
    pub(super) fn of(capability: (u32, u32), driver: CudaVersion) -> Self {
        match capability {
            (..9, _) => Self::Never,
            _ if driver < CudaVersion::new(12, 3) => Self::Eager,
            _ => Self::Always,
        }
    }
}

// SAFETY: the layout of the kernel's struct: 64-bit words, then those of 32, all aligned to 16.
unsafe impl<const PEERS: usize> KernelArgument for Arguments<PEERS> {}

impl CudaCollectives {
    pub(crate) fn input(&self, signature: &Signature, tensor: &TensorView<'_>) -> Result<Input> {
        Input::on(self.serves(), signature.operation, tensor)
    }

    pub(crate) fn output(&self, signature: &Signature, tensor: &mut TensorViewMut<'_>) -> Result<Output> {
        Output::on(self.serves(), signature.operation, tensor)
    }

    pub(crate) fn serves(&self) -> Device {
        Device::Cuda(self.context().device().ordinal())
    }

    /// The kernels of a family, for a call that comes after the one before it; and that nothing has failed before.
    #[inline]
    pub(crate) fn ready(&self, family: Family, stream: StreamRef<'_>) -> Result<Loaded> {
        self.enter(stream)?;
        self.load(family)
    }

    /// Begins a call, which comes after the one before it, if nothing has failed.
    #[inline]
    pub(crate) fn enter(&self, stream: StreamRef<'_>) -> Result<()> {
        self.check_ready()?;
        self.told(self.order.enter(stream).map_err(device))
    }

    /// The kernels of a family.
    #[inline]
    pub(crate) fn load(&self, family: Family) -> Result<Loaded> {
        self.told(self.kernels.borrow_mut().load(family))
    }

    /// A failure of this rank's alone, which it tells to the peers: they count on the call.
    #[inline]
    fn told<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.or_else(|error| match error {
            CollectiveError::Fabric(error) => self.fail(error),
            refused => Err(refused),
        })
    }

    /// The most bytes of one rank that a lane takes.
    #[inline]
    pub(crate) fn lane_bytes(&self) -> usize {
        self.lane_stride
    }

    /// What a call with an epilogue may use of every rank's GPU, in one channel.
    #[inline]
    pub(crate) fn room_for_teams(&self, channels: usize) -> Room {
        let (world_size, multiprocessors) = (self.world_size(), self.multiprocessors);
        Room { world_size, multiprocessors, has_clusters: self.has_clusters, channels }
    }

    /// What it may use in the stream that the call comes on. Where that has a part of the GPU's multiprocessors, they may not be
    /// such as run clusters.
    #[inline]
    pub(crate) fn room_here(&self, channels: usize) -> Room {
        let (all, here) = (self.room_for_teams(channels), self.multiprocessors_here());
        Room { multiprocessors: here, has_clusters: all.has_clusters && here == all.multiprocessors, ..all }
    }

    /// The multiprocessors that the kernels of every rank may use.
    pub(crate) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The multiprocessors of the stream that the call comes on, of those that every rank's GPU has.
    #[inline]
    pub(crate) fn multiprocessors_here(&self) -> u32 {
        self.order.multiprocessors().min(self.multiprocessors)
    }

    /// How many blocks a launch gets of those that one channel may have, and when the kernel behind may start.
    #[inline]
    fn blocks(&self, launch: &Launch, resident: u32, channels: u32) -> (u32, Dependents) {
        let (blocks, is_small) = self.blocks_of_grid(launch, resident, channels);
        let dependents = match is_small {
            true if self.starts_dependents.get() => Dependents::AtStart,
            true => Dependents::WhenCertain,
            false => Dependents::AtEnd,
        };
        (blocks, dependents)
    }

    #[inline]
    fn blocks_of_grid(&self, launch: &Launch, resident: u32, channels: u32) -> (u32, bool) {
        let (items, unit) = match launch.grid {
            Grid::Items(items) => (items, 1),
            Grid::ItemsByPeer(items) => (items, self.world_size() as u32 - 1),
            Grid::Teams(teams) => return (teams.blocks(), teams.is_small),
        };
        let wanted = (items as u64).div_ceil(u64::from(THREADS)) * u64::from(unit);
        let all = (resident * self.multiprocessors_here()).min(MAX_BLOCKS);
        let few = all / 2;
        // Up to two rounds of a small grid take less time than the start of the kernel behind.
        let (most, is_small) = match wanted <= 2 * u64::from(few) && channels == 1 {
            true => (few, true),
            false => (all / channels, false),
        };
        let blocks = wanted.clamp(1, u64::from(most)) as u32;
        ((blocks / unit).max(1) * unit, is_small)
    }

    /// Runs a call in pieces: `of(start, len, channels)` tells what to launch for each. Several pieces go through both
    /// channels in turn.
    ///
    /// # Safety
    /// As the operation that this is of: the addresses are of this rank's device, and good until the stream has passed.
    #[inline]
    pub(crate) unsafe fn run(
        &self,
        loaded: &Loaded,
        cut: Cut,
        stream: StreamRef<'_>,
        of: impl Fn(usize, usize, usize) -> Launch,
    ) -> Result<()> {
        self.told(match cut.total {
            0 => Ok(()),
            // SAFETY: passed on.
            total if total <= cut.most => unsafe { self.launch(loaded, 0, 1, &of(0, total, 1), stream) },
            // SAFETY: passed on.
            _ => unsafe { self.run_in_pieces(loaded, cut, stream, of) },
        })
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_in_pieces(
        &self,
        loaded: &Loaded,
        Cut { total, most, unit }: Cut,
        stream: StreamRef<'_>,
        of: impl Fn(usize, usize, usize) -> Launch,
    ) -> Result<()> {
        // Pieces of one size, so that none is too small to be worth a channel; but for the first of the second channel,
        // which is half of that, so that the channels take turns on the links.
        let pieces = total.div_ceil(most / unit * unit).next_multiple_of(CHANNELS);
        let piece = total.div_ceil(pieces).next_multiple_of(unit);
        let second = self.second.stream.borrow();
        let (forked, joined) = (&self.second.forked, &self.second.joined);
        forked.record(stream).and_then(|()| second.wait(forked)).map_err(device)?;
        let launches = || {
            let (mut start, mut index) = (0, 0);
            while start < total {
                let size = if index == 1 { (piece / 2).next_multiple_of(unit) } else { piece };
                let (launch, channel) = (of(start, (total - start).min(size), CHANNELS), index % CHANNELS);
                let stream = if channel == 0 { stream } else { second };
                // SAFETY: passed on.
                unsafe { self.launch(loaded, channel, CHANNELS, &launch, stream) }?;
                (start, index) = (start + size, index + 1);
            }
            Ok(())
        };
        let launched = launches();
        // Whatever happened: a capture may not end with a stream that was forked and not joined.
        let joined = joined.record(second).and_then(|()| stream.wait(joined)).map_err(device);
        launched.and(joined)
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn launch(
        &self,
        loaded: &Loaded,
        channel: usize,
        channels: usize,
        launch: &Launch,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let Launch { kernel, work, .. } = launch;
        let Resident { function, blocks: resident, .. } = loaded.get(*kernel);
        let (blocks, dependents) = self.blocks(launch, *resident, channels as u32);
        let config = match launch.grid {
            Grid::Teams(teams) => teams.config(),
            _ => LaunchConfig::new(blocks, THREADS),
        };
        let is_programmatic = match self.programmatic {
            Programmatic::Always => true,
            Programmatic::Never => false,
            Programmatic::Eager => !stream.is_capturing().map_err(device)?,
        };
        let config = if is_programmatic { config.programmatic() } else { config };
        let at = |channel: usize| (channel * channel_bytes(self.world_size(), self.lane_stride)) as u64;
        let (channel, other) = (at(channel), at(CHANNELS - 1 - channel));
        macro_rules! launch {
            ($($peers:literal)*) => {
                match self.world_size() - 1 {
                    $($peers => {
                        let arguments = Arguments::<$peers> {
                            doing: work.signature.to_words(),
                            own: self.arena.pointer(self.rank()).offset(channel),
                            peer: std::array::from_fn(|k| {
                                self.arena.pointer((self.rank() + 1 + k) % self.world_size()).offset(channel)
                            }),
                            other: self.arena.pointer(self.rank()).offset(other),
                            limit_ns: self.limit_ns,
                            board: self.board.pointer(),
                            input: work.input as u64,
                            output: work.output as u64,
                            stride: work.stride as u64,
                            count: work.count as u32,
                            rank: self.rank() as u32,
                            root: work.root as u32,
                            lane_stride: self.lane_stride as u32,
                            slot_stride: slot_stride(self.world_size(), self.lane_stride) as u32,
                            dependents: dependents as u32,
                        };
                        // SAFETY: the kernel's own arguments; the arenas live as long as `self`, whose drop waits.
                        unsafe {
                            let first = (&arguments).into();
                            match &launch.more {
                                More::Nothing => function.launch(stream, &config, &[first]),
                                More::Epilogue(fused) => function.launch(stream, &config, &[first, fused.into()]),
                                More::Places(places) => function.launch(stream, &config, &[first, places.into()]),
                            }
                        }
                    })*
                    peers => unreachable!("a world with {peers} peers was refused"),
                }
            };
        }
        launch!(1 2 3 4 5 6 7).map_err(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programmatic_launch_is_asked_for_where_it_exists() {
        let of = |capability, major, minor| Programmatic::of(capability, CudaVersion::new(major, minor));
        assert_eq!(of((8, 0), 13, 0), Programmatic::Never);
        assert_eq!(of((8, 9), 12, 8), Programmatic::Never);
        assert_eq!(of((9, 0), 12, 0), Programmatic::Eager);
        assert_eq!(of((9, 0), 12, 2), Programmatic::Eager);
        assert_eq!(of((9, 0), 12, 3), Programmatic::Always);
        assert_eq!(of((10, 0), 13, 0), Programmatic::Always);
    }
}
