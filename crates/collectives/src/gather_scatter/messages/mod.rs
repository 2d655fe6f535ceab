//! Messages between GPUs, and the operations that are made of them; `messages.cuh` has the protocol.

use antiphon_device::cuda::{DevicePointer, LaunchConfig, Program, StreamRef, memory};
use antiphon_fabric::{
    FabricError, Operation, Signature,
    gpu::{Family, Grid, Launch, MAX_WORLD, Pieces, ROWS, Source, THREADS, Work, kernel_call, kernels},
};
use antiphon_operation::Root;
use antiphon_tensor::{TensorView, TensorViewMut};

use super::cuda::{BYTES, ROW_DATA};
use crate::{
    arguments::{CheckedCall, Input, Output, same_dtype},
    cuda::CudaCollectives,
    error::{CollectiveError, Result},
};

kernels! {
    /// The kernel of `messages.cuh`.
    pub(crate) enum Kernel {
        Exchange = "exchange",
    }
}

/// The kernels that carry messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Messaging;

impl Family for Messaging {
    type Kernel = Kernel;
    type Arguments = Messages;
    const NAME: &'static str = "messaging.cuh";
    const SOURCES: &'static [Source] = &[
        ROWS,
        BYTES,
        Messages::SOURCE,
        Source::new("gather_scatter/messages/messages.cuh", include_str!("messages.cuh")),
    ];

    /// A grid has a block for each multiprocessor at most, but a thread needs many registers for the rows under way; and there
    /// is room for what sends beside what receives.
    fn most_blocks(&self, _world_size: usize) -> u32 {
        2
    }

    fn define(&self, program: Program, world_size: usize) -> Program {
        program.define("CHANNELS", rings(world_size))
    }
}

/// The rings from one rank to another: even, and no more than have room for 64 rows each (`RING` in messages.cuh) in
/// [`LEAST_STAGING_BYTES`](antiphon_fabric::gpu::Tenant::LEAST_STAGING_BYTES). Of three and four ranks on GPUs of 132 multiprocessors there is a warp for every ring even where all
/// ranks send to all; with more ranks, fewer rings would slow a message that travels alone.
const fn rings(world_size: usize) -> u32 {
    match world_size {
        ..=2 => 252,
        3 => 132,
        4 => 88,
        5 => 100,
        6 => 82,
        7 => 70,
        _ => 62,
    }
}

kernel_call! {
    /// A rank's messages in a launch, by the peers' ranks.
    #[derive(Debug, Default)]
    pub(crate) struct Messages = "messages" {
        input: [*const u8; MAX_WORLD],
        output: [*mut u8; MAX_WORLD],
        /// The counts in the heads.
        sent_count: [u64; MAX_WORLD],
        received_count: [u64; MAX_WORLD],
        /// Bytes.
        sent: [u32; MAX_WORLD],
        received: [u32; MAX_WORLD],
        /// A bit for each rank that a message goes to.
        to: u32,
        /// A bit for each rank that a message comes from.
        from: u32,
        /// What this rank copies from `own_input` to `own_output`.
        own_bytes: u32,
        own_input: *const u8,
        own_output: *mut u8,
    }
}

/// Bytes of one message at most; a longer one goes in several.
const MOST_BYTES: usize = 1 << 30;
/// Bytes that the kernel itself copies within a rank at most, while messages come; a copy of its own takes 2 µs, and is the faster one
/// for more.
const MOST_KEPT_BYTES: usize = 256 << 10;
/// Bytes of the rows that a block's warps take at once. A peer gets a block more for as many, so that no warp of a short message
/// has a second ring to serve: a ring ends with a release to the peer, which takes microseconds.
const BYTES_PER_BLOCK: usize = THREADS as usize / 32 * ROW_DATA;

/// A message that one rank sends to another, or receives from it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Message {
    peer: usize,
    address: usize,
    bytes: usize,
    /// What both ranks must agree on, beside the signature.
    count: u64,
}

/// The piece of the input that a rank keeps for itself: bytes that are copied from one address to another.
#[derive(Debug, Clone, Copy, Default)]
struct OwnPiece {
    from: usize,
    to: usize,
    bytes: usize,
}

impl Message {
    /// The part of it that goes in the launch of this number; none once all is sent. A message of nothing has one part.
    fn part(&self, number: usize) -> Option<Self> {
        let start = number * MOST_BYTES;
        (number == 0 || start < self.bytes).then(|| Self {
            address: self.address + start,
            bytes: (self.bytes - start).min(MOST_BYTES),
            ..*self
        })
    }
}

impl Messages {
    fn new(sends: impl Iterator<Item = Message>, receives: impl Iterator<Item = Message>) -> Self {
        let mut messages = Self::default();
        for Message { peer, address, bytes, count } in sends {
            messages.input[peer] = address as u64;
            messages.sent[peer] = bytes as u32;
            messages.sent_count[peer] = count;
            messages.to |= 1 << peer;
        }
        for Message { peer, address, bytes, count } in receives {
            messages.output[peer] = address as u64;
            messages.received[peer] = bytes as u32;
            messages.received_count[peer] = count;
            messages.from |= 1 << peer;
        }
        messages
    }

    fn keep(&mut self, kept: OwnPiece) {
        self.own_input = kept.from as u64;
        self.own_output = kept.to as u64;
        self.own_bytes = kept.bytes as u32;
    }

    /// Bytes of the longest one.
    fn longest(&self) -> usize {
        self.sent.iter().chain(&self.received).copied().max().unwrap_or(0).max(self.own_bytes) as usize
    }
}

/// The grid for messages whose longest has `longest` bytes: each of the `count` messages, those that are sent and those that are
/// received, has an equal number of blocks, and all blocks run at once.
fn grid(longest: usize, count: u32, world_size: usize, multiprocessors: u32) -> Option<u32> {
    let wanted = longest.div_ceil(BYTES_PER_BLOCK).max(1) as u64;
    let most = multiprocessors / count;
    // A warp for each ring.
    let all_rings = rings(world_size).div_ceil(THREADS / 32);
    (most > 0).then(|| wanted.min(u64::from(most.min(all_rings))) as u32 * count)
}

impl CudaCollectives {
    /// Sends a tensor to another rank, which must [`recv`](Self::recv) one of the same dtype and number of elements, in the
    /// order of the stream. A short message does not wait for that.
    ///
    /// # Errors
    /// As [`call`](crate::StreamCollectives::call); [`FabricError::InvalidArgument`] for a rank that is none, or this one.
    ///
    /// # Safety
    /// As [`call`](crate::StreamCollectives::call).
    pub unsafe fn send(&self, input: &TensorView<'_>, to: usize, stream: StreamRef<'_>) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.exchange(Some((input, to)), None, stream) }
    }

    /// Receives a tensor that another rank [sends](Self::send), in the order of the stream.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// As [`call`](crate::StreamCollectives::call).
    pub unsafe fn recv(
        &self,
        output: &mut TensorViewMut<'_>,
        from: usize,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.exchange(None, Some((output, from)), stream) }
    }

    /// [`send`](Self::send) and [`recv`](Self::recv) at once, so that ranks may send each other messages of any length. Both
    /// ranks may be this one.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// As [`call`](crate::StreamCollectives::call); and the tensors do not overlap.
    pub unsafe fn send_recv(
        &self,
        input: &TensorView<'_>,
        to: usize,
        output: &mut TensorViewMut<'_>,
        from: usize,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.exchange(Some((input, to)), Some((output, from)), stream) }
    }

    /// # Safety
    /// As [`call`](crate::StreamCollectives::call).
    unsafe fn exchange(
        &self,
        input: Option<(&TensorView<'_>, usize)>,
        output: Option<(&mut TensorViewMut<'_>, usize)>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        const OPERATION: Operation = Operation::Message;
        let (rank, world_size) = (self.rank(), self.world_size());
        let destination = input.iter().map(|(_, to)| ("destination", *to));
        let source = output.iter().map(|(_, from)| ("source", *from));
        for (role, peer) in destination.chain(source) {
            if peer >= world_size {
                return Err(FabricError::no_such_rank(role, peer, world_size).into());
            }
        }
        let to_self = input.as_ref().is_some_and(|(_, to)| *to == rank);
        let from_self = output.as_ref().is_some_and(|(_, from)| *from == rank);
        if to_self != from_self {
            let text =
                format!("on CUDA rank {rank} sends to itself by send_recv alone, with itself on both sides");
            return Err(FabricError::InvalidArgument(text).into());
        }
        let message = |tensor: Input, peer: usize| Message {
            peer,
            address: tensor.data.addr(),
            bytes: tensor.count * tensor.dtype.size(),
            count: tensor.count as u64,
        };
        let (serves, mut sent, mut received) = (self.serves(), None, None);
        if let Some((tensor, to)) = input {
            sent = Some((Input::on(serves, OPERATION, tensor)?, to));
        }
        if let Some((tensor, from)) = output {
            received = Some((Output::on(serves, OPERATION, tensor)?, from));
        }
        if let (Some((input, _)), Some((output, _))) = (&sent, &received) {
            same_dtype(OPERATION, input, output)?;
            if to_self {
                OPERATION.block(input.count, output.count, world_size).map_err(CollectiveError::from)?;
                self.messages.check_ready()?;
                let (from, to) = (input.data.addr(), output.data.addr());
                // SAFETY: as many elements of one type; the rest is passed on.
                return unsafe { copy(from, to, input.count * input.dtype.size(), stream) };
            }
        }
        let received = received.map(|(tensor, from)| (tensor.as_input(), from));
        let Some((Input { dtype, .. }, _)) = sent.or(received) else { return Ok(()) };
        let signature = Signature { dtype: Some(dtype), ..Signature::new(OPERATION) };
        let one = |side: Option<(Input, usize)>| side.map(|(tensor, peer)| message(tensor, peer));
        // SAFETY: passed on.
        unsafe {
            let (sent, received) = (one(sent), one(received));
            self.run_messages(signature, OwnPiece::default(), sent.as_slice(), received.as_slice(), stream)
        }
    }

    /// Carries out a call in which each rank sends each peer a piece of its input, and gets one of its output from each.
    ///
    /// # Safety
    /// As [`call`](crate::StreamCollectives::call).
    pub(crate) unsafe fn call_by_messages(
        &self,
        call: &CheckedCall<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (rank, size) = (call.rank, call.dtype.size());
        let (sent, received) = (call.input_layout(), call.output_layout());
        let (row, root) = (call.signature.operation.row(), call.call.root);
        // Whether elements go from a rank to another: not to those that get nothing, nor from those that give nothing.
        let moves = |from: usize, to: usize| {
            (row.root != Some(Root::Gives) || from == root) && (row.root != Some(Root::Gets) || to == root)
        };
        let message = |peer: usize, start: Option<usize>, piece: std::ops::Range<usize>, moves: bool| {
            let count = if moves { piece.len() } else { 0 };
            let address = start.map_or(0, |start| start + piece.start * size);
            // The number on which all ranks agree, or else the two ranks of the message.
            let agreed = if call.signature.count == 0 { count as u64 } else { call.signature.count };
            Message { peer, address, bytes: count * size, count: agreed }
        };
        let input = call.input.map(|input| input.data.addr());
        let output = call.output.map(|output| output.data.addr());
        let to = |peer| {
            message(peer, input, sent.piece(if sent.is_divided() { peer } else { rank }), moves(rank, peer))
        };
        let from = |peer| message(peer, output, received.piece(peer), moves(peer, rank));
        let (mut sends, mut receives) = ([Message::default(); MAX_WORLD], [Message::default(); MAX_WORLD]);
        for (index, peer) in (0..call.world_size).filter(|&peer| peer != rank).enumerate() {
            (sends[index], receives[index]) = (to(peer), from(peer));
        }
        let peers = call.world_size - 1;
        let (own, place) = (to(rank), from(rank));
        let mut kept = OwnPiece { from: own.address, to: place.address, bytes: own.bytes };
        if !moves(rank, rank) || kept.from == kept.to {
            kept = OwnPiece::default();
        }
        self.messages.check_ready()?;
        if call.world_size == 1 || kept.bytes > MOST_KEPT_BYTES {
            // SAFETY: the own piece has one length on both sides; the rest is passed on.
            unsafe { copy(kept.from, kept.to, kept.bytes, stream) }?;
            kept = OwnPiece::default();
        }
        // SAFETY: passed on.
        unsafe { self.run_messages(call.signature, kept, &sends[..peers], &receives[..peers], stream) }
    }

    /// # Safety
    /// As [`call`](crate::StreamCollectives::call): the messages lie in tensors.
    unsafe fn run_messages(
        &self,
        signature: Signature,
        kept: OwnPiece,
        sends: &[Message],
        receives: &[Message],
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let tenant = &self.messages;
        let multiprocessors = stream.multiprocessors()?.min(tenant.multiprocessors());
        // Of a call of all ranks, all refuse or none.
        let most = match signature.operation {
            Operation::Message => sends.len() + receives.len(),
            _ => 2 * (self.world_size() - 1),
        } as u32;
        let too_few = || {
            let text = format!("{multiprocessors} multiprocessors are too few for {most} messages at once");
            FabricError::InvalidArgument(text)
        };
        grid(0, most, self.world_size(), multiprocessors).ok_or_else(too_few)?; // before the call takes its turn
        // Sending and receiving use different words of a ring's state, and so have an order each: two ranks may both send,
        // on one stream, before they receive, on another.
        let (sends_any, receives_any) = (!sends.is_empty(), !receives.is_empty());
        if signature.operation == Operation::Message {
            tenant.enter_message(stream, sends_any, receives_any)?;
        } else {
            // A call that all ranks make.
            if sends_any {
                tenant.enter(stream)?;
            }
            if receives_any {
                tenant.enter_second(stream)?;
            }
        }
        let loaded = tenant.load(Messaging)?;
        for number in 0.. {
            let part = |message: &Message| message.part(number);
            let mut messages = Messages::new(sends.iter().filter_map(part), receives.iter().filter_map(part));
            if number == 0 {
                messages.keep(kept);
            }
            if messages.to | messages.from == 0 {
                break;
            }
            let count = messages.to.count_ones() + messages.from.count_ones();
            let blocks =
                grid(messages.longest(), count, self.world_size(), multiprocessors).ok_or_else(too_few)?;
            let config = LaunchConfig::new(blocks, THREADS);
            let work = Work::new(Signature { count: 0, ..signature });
            let launch = |_, _, _| Launch {
                kernel: Kernel::Exchange,
                // At most one of the four blocks that a multiprocessor has room for.
                grid: Grid::Exact { config, is_small: true },
                work,
                arguments: messages,
            };
            // SAFETY: the kernel keeps to the messages, and sends no more than there is room for; the rest is passed on.
            unsafe { tenant.run(&loaded, Pieces { total: 1, most: 1, unit: 1 }, stream, launch) }?;
        }
        Ok(())
    }
}

/// Copies bytes of one place to another that does not overlap it, unless it is the same.
///
/// # Safety
/// Both are addresses of the stream's device, valid for `bytes` bytes until the stream has passed the copy.
unsafe fn copy(from: usize, to: usize, bytes: usize, stream: StreamRef<'_>) -> Result<()> {
    if bytes == 0 || from == to {
        return Ok(());
    }
    let at = |address: usize| DevicePointer(address as u64);
    // SAFETY: passed on.
    Ok(unsafe { memory::copy(stream, at(to), at(from), bytes) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_goes_in_parts_and_an_empty_one_in_one() {
        let message = |bytes| Message { peer: 1, address: 16, bytes, count: 7 };
        let parts = |bytes| {
            (0..4).map_while(|n| message(bytes).part(n)).map(|p| (p.address, p.bytes)).collect::<Vec<_>>()
        };
        assert_eq!(parts(0), [(16, 0)]);
        assert_eq!(parts(MOST_BYTES), [(16, MOST_BYTES)]);
        assert_eq!(parts(MOST_BYTES + 5), [(16, MOST_BYTES), (16 + MOST_BYTES, 5)]);
    }

    #[test]
    fn every_message_has_as_many_blocks_that_run_at_once() {
        assert_eq!(grid(0, 2, 2, 132), Some(2));
        assert_eq!(grid(1 << 30, 2, 2, 132), Some(126)); // all rings
        assert_eq!(grid(1 << 30, 1, 4, 132), Some(22)); // all rings
        assert_eq!(grid(1 << 30, 14, 8, 132), Some(126));
        assert_eq!(grid(40 << 10, 6, 4, 132), Some(126));
        assert_eq!(grid(4000, 6, 4, 132), Some(18)); // a row for each of three blocks' warps
        assert_eq!(grid(1, 14, 8, 13), None);
    }
}
