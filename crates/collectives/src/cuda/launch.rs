//! Putting kernels into a stream.

use antiphon_device::cuda::{
    Context, CudaError, DevicePointer, Event, KernelArgument, LaunchConfig, Stream, StreamRef,
};
use antiphon_fabric::Signature;
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use super::{
    CHANNELS, CudaCollectives, THREADS, channel_bytes, device,
    kernels::{Family, Kernel, Loaded},
    slot_stride,
};
use crate::{
    arguments::{Input, Output},
    error::{CollectiveError, Result},
};

/// Pieces are multiples of this many bytes: whole rows (kernels.cuh), and whole vectors for each of up to 8 ranks.
const PIECE_UNIT: usize = 496 * 8;

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

/// A kernel to launch, and for how many items: one for each thread, of each peer where blocks serve one peer each.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) kernel: Kernel,
    pub(crate) items: usize,
    pub(crate) by_peer: bool,
    pub(crate) work: Work,
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
    abort: DevicePointer,
    report: DevicePointer,
    input: u64,
    output: u64,
    stride: u64,
    count: u32,
    rank: u32,
    root: u32,
    lane_stride: u32,
    slot_stride: u32,
    is_small: u32,
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

    fn serves(&self) -> Device {
        Device::Cuda(self.context().device().ordinal())
    }

    /// The kernels of a family, and that nothing has failed before.
    #[inline]
    pub(crate) fn ready(&self, family: Family) -> Result<Loaded> {
        self.check_ready()?;
        self.kernels.borrow_mut().load(family)
    }

    /// The most bytes of one rank that a lane takes.
    #[inline]
    pub(crate) fn lane_bytes(&self) -> usize {
        self.lane_stride
    }

    /// How many blocks a launch gets of those that one channel may have, and whether they are few; see `KERNEL` in slots.cuh.
    #[inline]
    fn blocks(&self, launch: &Launch, channels: u32) -> (u32, bool) {
        let unit = if launch.by_peer { self.world_size() as u32 - 1 } else { 1 };
        let wanted = (launch.items as u64).div_ceil(u64::from(THREADS)) * u64::from(unit);
        let few = self.max_blocks / 2;
        // Up to two rounds of a small grid take less time than the start of the kernel behind.
        let (most, is_small) = match wanted <= 2 * u64::from(few) && channels == 1 {
            true => (few, true),
            false => (self.max_blocks / channels, false),
        };
        let blocks = wanted.clamp(1, u64::from(most)) as u32;
        ((blocks / unit).max(1) * unit, is_small)
    }

    /// Runs a call of `bytes` (of each block), cut into pieces of at most `piece`: `of(start, len)` tells what to launch for
    /// each. Several pieces go through both channels in turn.
    ///
    /// # Safety
    /// As the operation that this is of: the addresses are of this rank's device, and good until the stream has passed.
    pub(crate) unsafe fn run(
        &self,
        loaded: &Loaded,
        bytes: usize,
        piece: usize,
        stream: StreamRef<'_>,
        of: impl Fn(usize, usize) -> Launch,
    ) -> Result<()> {
        if bytes <= piece {
            return match bytes {
                0 => Ok(()),
                // SAFETY: passed on.
                _ => unsafe { self.launch(loaded, 0, 1, &of(0, bytes), stream) },
            };
        }
        // Pieces of one size, so that none is too small to be worth a channel; but for the first of the second channel,
        // which is half of that, so that the channels take turns on the links.
        let pieces = bytes.div_ceil(piece / PIECE_UNIT * PIECE_UNIT).next_multiple_of(CHANNELS);
        let piece = bytes.div_ceil(pieces).next_multiple_of(PIECE_UNIT);
        let second = self.second.stream.borrow();
        let (forked, joined) = (&self.second.forked, &self.second.joined);
        forked.record(stream).and_then(|()| second.wait(forked)).map_err(device)?;
        let launches = || {
            let (mut start, mut index) = (0, 0);
            while start < bytes {
                let size = if index == 1 { (piece / 2).next_multiple_of(PIECE_UNIT) } else { piece };
                let (launch, channel) = (of(start, (bytes - start).min(size)), index % CHANNELS);
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
        // The peers count on all pieces, so there is no going on without some.
        launched.and(joined).or_else(|error| match error {
            CollectiveError::Fabric(error) => self.fail(error),
            other => Err(other),
        })
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
        let (blocks, is_small) = self.blocks(launch, channels as u32);
        let config = LaunchConfig::new(blocks, THREADS).programmatic();
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
                            abort: self.board.abort_pointer(),
                            report: self.board.report_pointer(),
                            input: work.input as u64,
                            output: work.output as u64,
                            stride: work.stride as u64,
                            count: work.count as u32,
                            rank: self.rank() as u32,
                            root: work.root as u32,
                            lane_stride: self.lane_stride as u32,
                            slot_stride: slot_stride(self.world_size(), self.lane_stride) as u32,
                            is_small: u32::from(is_small),
                        };
                        // SAFETY: the kernel's own arguments; the arenas live as long as `self`, whose drop waits.
                        unsafe { loaded.get(*kernel).launch(stream, &config, &[(&arguments).into()]) }
                    })*
                    peers => unreachable!("a world with {peers} peers was refused"),
                }
            };
        }
        launch!(1 2 3 4 5 6 7).map_err(device)
    }
}
