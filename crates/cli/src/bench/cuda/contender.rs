//! The implementations that are compared.

use std::ops::Range;

use antiphon::{
    collectives::{
        CollectiveError, Communicator,
        cuda::{Algorithm, AllReduceOptions, CudaCollectives},
        nccl::NcclCollectives,
    },
    device::cuda::{Context, DeviceMemory, Stream, StreamRef, memory},
    operation::Operation,
    tensor::{DType, Device, TensorView, TensorViewMut},
};

use super::{
    super::case::{Case, Collective, ROOT},
    Result,
    mixed::{self, Handler},
    moe::Routes,
};

/// An implementation that is compared.
#[derive(Clone, Copy)]
pub(super) enum Contender<'a> {
    /// Ours, by a given algorithm or as it chooses.
    Ours(&'a CudaCollectives, Option<Algorithm>),
    /// Ours, on registered memory.
    Registered(&'a CudaCollectives, Algorithm),
    Nccl(&'a NcclCollectives),
    /// An operation of a mixed layout, by one of the libraries that offer it.
    Mixed(&'a Handler<'a>, mixed::Variant),
    /// A dispatch or a combine along a handle.
    Experts(&'a Routes<'a>),
    /// The same by NCCL.
    ExpertsByNccl(&'a Routes<'a>),
}

/// A rank's tensors.
pub(super) struct Tensors {
    pub(super) input: DeviceMemory,
    pub(super) output: DeviceMemory,
    /// Elements of the input and of the output.
    pub(super) counts: (usize, usize),
    pub(super) device: Device,
}

impl Contender<'_> {
    /// The algorithm's name in the table.
    pub(super) fn name(self, case: &Case, bytes: usize) -> String {
        match self {
            Self::Ours(ours, None) if case.collective == Collective::ALL_REDUCE => {
                format!("auto={}", ours.algorithm_for(bytes))
            }
            Self::Ours(_, None) if case.is_list() => format!("{} tensors", case.tensors),
            Self::Ours(_, None) => "direct".into(),
            Self::Ours(_, Some(algorithm)) => algorithm.to_string(),
            Self::Registered(_, algorithm) => format!("{algorithm} registered"),
            Self::Nccl(_) | Self::ExpertsByNccl(_) => "nccl".into(),
            Self::Experts(_) => "cached".into(),
            Self::Mixed(handler, variant) => handler.name(case, variant),
        }
    }

    /// Puts one call into the stream.
    ///
    /// # Safety
    /// The tensors live until the stream, and every graph that captured the call, is done with them.
    pub(super) unsafe fn call(self, case: &Case, tensors: &Tensors, stream: StreamRef<'_>) -> Result<()> {
        let (dtype, op) = (case.dtype, case.op);
        let memory = (tensors.input.pointer(), tensors.output.pointer());
        // SAFETY: passed on: both are as large as their counts say.
        let (input, mut output) = unsafe { (tensors.input(dtype), tensors.output(dtype)) };
        let output = &mut output;
        // SAFETY: passed on; all calls of this program are on this stream.
        unsafe {
            let called = match self {
                Self::Experts(routes) => return routes.ours(case.collective, dtype, memory, stream),
                Self::ExpertsByNccl(routes) => return routes.nccl(case.collective, dtype, memory, stream),
                Self::Ours(ours, algorithm) => {
                    let case = Case { algorithm, ..*case };
                    let call = case.call(ours.rank(), ours.world_size());
                    match case.collective {
                        Collective::SEND_RECV => ping_pong(ours, &input, output, stream),
                        Collective::Of(Operation::AllGather) if case.is_list() => {
                            let (inputs, mut outputs) = tensors.lists(&case);
                            ours.all_gather_list(&inputs, &mut outputs, stream)
                        }
                        _ if case.is_list() => {
                            let (inputs, mut outputs) = tensors.lists(&case);
                            ours.reduce_scatter_list(&inputs, &mut outputs, op, stream)
                        }
                        Collective::Of(Operation::Broadcast) => ours.call_in_place(&call, output, stream),
                        _ => ours.call(&call, Some(&input), Some(output), stream),
                    }
                }
                Self::Mixed(handler, variant) => handler.call(case, variant, &input, output, stream),
                Self::Registered(ours, algorithm) => {
                    ours.all_reduce_with(input, output, op, AllReduceOptions::registered(algorithm), stream)
                }
                Self::Nccl(nccl) => {
                    let call = case.call(nccl.rank(), nccl.world_size());
                    match case.collective {
                        Collective::SEND_RECV => ping_pong(nccl, &input, output, stream),
                        _ if case.is_list() => {
                            let (inputs, mut outputs) = tensors.lists(case);
                            nccl.call_list(&call, &inputs, &mut outputs, stream)
                        }
                        Collective::Of(Operation::Broadcast) => nccl.broadcast(output, ROOT, stream),
                        _ => nccl.call(&call, Some(&input), Some(output), stream),
                    }
                }
            };
            Ok(called?)
        }
    }

    /// Whether it is NCCL, beside which ours are shown.
    pub(super) fn is_nccl(self) -> bool {
        matches!(self, Self::Nccl(_) | Self::ExpertsByNccl(_) | Self::Mixed(_, mixed::Variant::Nccl))
    }
}
/// The library that sends messages.
trait Messages {
    fn rank(&self) -> usize;

    /// # Safety
    /// As [`Contender::call`].
    unsafe fn send(
        &self,
        tensor: &TensorView<'_>,
        to: usize,
        stream: StreamRef<'_>,
    ) -> Result<(), CollectiveError>;

    /// # Safety
    /// As [`Contender::call`].
    unsafe fn recv(
        &self,
        tensor: &mut TensorViewMut<'_>,
        from: usize,
        stream: StreamRef<'_>,
    ) -> Result<(), CollectiveError>;
}

macro_rules! messages {
    ($($collectives:ty),*) => {$(
        impl Messages for $collectives {
            fn rank(&self) -> usize {
                self.rank()
            }

            unsafe fn send(
                &self,
                tensor: &TensorView<'_>,
                to: usize,
                stream: StreamRef<'_>,
            ) -> Result<(), CollectiveError> {
                // SAFETY: passed on.
                unsafe { self.send(tensor, to, stream) }
            }

            unsafe fn recv(
                &self,
                tensor: &mut TensorViewMut<'_>,
                from: usize,
                stream: StreamRef<'_>,
            ) -> Result<(), CollectiveError> {
                // SAFETY: passed on.
                unsafe { self.recv(tensor, from, stream) }
            }
        }
    )*};
}

messages!(CudaCollectives, NcclCollectives);

/// Rank 0 sends to rank 1, which sends back; the other ranks do nothing.
///
/// # Safety
/// As [`Contender::call`].
unsafe fn ping_pong(
    by: &impl Messages,
    input: &TensorView<'_>,
    output: &mut TensorViewMut<'_>,
    stream: StreamRef<'_>,
) -> Result<(), CollectiveError> {
    // SAFETY: passed on.
    unsafe {
        match by.rank() {
            0 => {
                by.send(input, 1, stream)?;
                by.recv(output, 1, stream)
            }
            1 => {
                by.recv(output, 0, stream)?;
                by.send(&output.as_view(), 0, stream)
            }
            _ => Ok(()),
        }
    }
}

impl Tensors {
    /// Those of a rank for a case, of zeros.
    pub(super) fn zeros(
        comm: &Communicator,
        context: &Context,
        stream: &Stream,
        case: &Case,
    ) -> Result<Self> {
        let counts = case.counts(comm.rank(), comm.world_size());
        let zeros = |count: usize| -> Result<DeviceMemory> {
            let made = DeviceMemory::allocate(context, (count * case.dtype.size()).max(16))?;
            // SAFETY: `made` has `made.len()` bytes, and the stream is waited for below.
            unsafe { memory::fill(stream.borrow(), made.pointer(), 0, made.len()) }?;
            Ok(made)
        };
        let (input, output) = (zeros(counts.0)?, zeros(counts.1)?);
        stream.borrow().synchronize()?;
        Ok(Self { input, output, counts, device: Device::Cuda(context.device().ordinal()) })
    }

    /// # Safety
    /// The view is not used when `self` is gone.
    unsafe fn input(&self, dtype: DType) -> TensorView<'_> {
        let at = self.input.pointer().0 as usize as *mut u8;
        // SAFETY: `new` allocated `counts.0` elements, every bit pattern is valid, and no other code uses the memory meanwhile.
        unsafe { TensorView::from_raw_parts(at, dtype, &[self.counts.0], None, self.device) }.expect("plain")
    }

    /// # Safety
    /// As [`input`](Self::input).
    unsafe fn output(&self, dtype: DType) -> TensorViewMut<'_> {
        let at = self.output.pointer().0 as usize as *mut u8;
        // SAFETY: as above.
        unsafe { TensorViewMut::from_raw_parts(at, dtype, &[self.counts.1], None, self.device) }
            .expect("plain")
    }

    /// The inputs and the outputs of a list.
    ///
    /// # Safety
    /// As [`input`](Self::input).
    unsafe fn lists(&self, case: &Case) -> (Vec<TensorView<'_>>, Vec<TensorViewMut<'_>>) {
        let at = |memory: &DeviceMemory, part: &Range<usize>| {
            memory.pointer().offset((part.start * case.dtype.size()) as u64).0 as usize as *mut u8
        };
        let view = |memory, part: Range<usize>| {
            // SAFETY: the memory has these elements, apart from those of the other tensors; the rest is passed on.
            unsafe {
                TensorViewMut::from_raw_parts(at(memory, &part), case.dtype, &[part.len()], None, self.device)
            }
            .expect("plain")
        };
        let inputs = case.cut(self.counts.0).map(|part| view(&self.input, part).into_view());
        (inputs.collect(), case.cut(self.counts.1).map(|part| view(&self.output, part)).collect())
    }
}
