//! Dispatch and combine of a mixture of experts, along a handle; beside NCCL's all-to-all with a gather before it or a sum behind it.

use antiphon::{
    collectives::{Communicator, nccl::NcclCollectives},
    device::cuda::{Context, DeviceMemory, DevicePointer, Function, LaunchConfig, Stream, StreamRef},
    moe::{
        Combine, Dispatch, Layout, MoeConfig, Routing, RowFormat, Tokens,
        cuda::{CudaHandle, CudaMoe, HandleMemory},
    },
    operation::{Call, Operation},
    tensor::{DType, Device, TensorView, TensorViewMut},
};

use super::{Result, timing};
use crate::bench::{
    case::{Case, Collective},
    moe::{layout_of, shape},
};

/// Threads of a block of the kernels around NCCL's call, and blocks: enough for every multiprocessor.
const THREADS: u32 = 256;
const BLOCKS: u32 = 1056;

/// What makes the calls of all cases.
pub(super) struct Experts {
    moe: CudaMoe,
    gather: Function,
    /// The kernels that sum rows of f32, f16 and bf16.
    sums: [Function; 3],
}

/// One case: its routes, ours and those that NCCL's calls need.
pub(super) struct Routes<'a> {
    experts: &'a Experts,
    nccl: Option<&'a NcclCollectives>,
    pub(super) layouts: Vec<Layout>,
    handle: CudaHandle,
    tokens: usize,
    hidden: usize,
    /// Elements that this rank sends to each, and gets from each, in a dispatch.
    sends: Vec<usize>,
    receives: Vec<usize>,
    /// i32: the token of each row that this rank sends.
    order: DeviceMemory,
    /// i32 `[T, R]`: the number of a token's row for a rank among all that this rank sends, or −1.
    places: DeviceMemory,
    /// The rows that this rank sends.
    sent: DeviceMemory,
    device: Device,
}

fn bytes(words: &[i32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn uploaded(context: &Context, stream: &Stream, content: &[u8]) -> Result<DeviceMemory> {
    let memory = DeviceMemory::allocate(context, content.len().max(16))?;
    memory.write(stream, 0, content)?;
    Ok(memory)
}

/// # Safety
/// The memory at `at` holds as many elements as `sizes` says, and lives as long as the view, which is its only user.
unsafe fn view<'a>(
    at: DevicePointer,
    dtype: DType,
    sizes: &[usize],
    device: Device,
) -> Result<TensorViewMut<'a>> {
    // SAFETY: passed on.
    Ok(unsafe { TensorViewMut::from_raw_parts(at.0 as usize as *mut u8, dtype, sizes, None, device) }?)
}

impl Experts {
    pub(super) fn new(comm: &Communicator, context: &Context) -> Result<Self> {
        let moe = CudaMoe::new(comm, context, MoeConfig::for_gpus())?;
        let [gather, f32, f16, bf16] =
            timing::kernels(context, ["gather_rows", "sum_rows_f32", "sum_rows_f16", "sum_rows_bf16"])?;
        Ok(Self { moe, gather, sums: [f32, f16, bf16] })
    }

    /// The kernel that sums rows of a dtype.
    fn sum(&self, dtype: DType) -> Result<&Function> {
        match dtype {
            DType::F32 => Ok(&self.sums[0]),
            DType::F16 => Ok(&self.sums[1]),
            DType::BF16 => Ok(&self.sums[2]),
            other => Err(format!("combine on GPUs sums f32, f16 and bf16, not {other}").into()),
        }
    }
}

impl<'a> Routes<'a> {
    pub(super) fn new(
        experts: &'a Experts,
        nccl: Option<&'a NcclCollectives>,
        (comm, stream): (&Communicator, &Stream),
        case: &Case,
    ) -> Result<Self> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let context = experts.moe.context();
        let device = experts.moe.device();
        let [tokens, hidden] = shape(case);
        if case.collective == Collective::COMBINE {
            experts.sum(case.dtype)?;
        }
        let layouts: Vec<Layout> = (0..world_size)
            .map(|rank| layout_of(rank, tokens, world_size))
            .collect::<std::result::Result<_, _>>()?;
        let mine = &layouts[rank];
        let counts = |from: &Layout, to: usize| from.tokens_per_rank[to] as usize * hidden;
        let (mut order, mut places) = (Vec::new(), vec![-1; tokens * world_size]);
        for to in 0..world_size {
            for token in (0..tokens).filter(|token| mine.is_token_in_rank[token * world_size + to] == 1) {
                places[token * world_size + to] = order.len() as i32;
                order.push(token as i32);
            }
        }
        let in_rank = uploaded(context, stream, &mine.is_token_in_rank)?;
        let per_expert = uploaded(context, stream, &bytes(&mine.tokens_per_expert))?;
        let experts_of_all = mine.tokens_per_expert.len();
        // SAFETY: both have these elements, and live until the call has ended, which waits for the counts.
        let handle = unsafe {
            let routing = Routing {
                num_experts: experts_of_all,
                top_k: 0,
                is_token_in_rank: view(in_rank.pointer(), DType::U8, &[tokens, world_size], device)?
                    .into_view(),
                tokens_per_expert: view(per_expert.pointer(), DType::I32, &[experts_of_all], device)?
                    .into_view(),
                format: RowFormat { hidden, dtype: case.dtype, scales: None },
                capacity: None,
            };
            experts.moe.notify(&routing, HandleMemory::Own, stream.borrow())?
        };
        Ok(Self {
            experts,
            nccl,
            handle,
            tokens,
            hidden,
            sends: (0..world_size).map(|to| counts(mine, to)).collect(),
            receives: layouts.iter().map(|from| counts(from, rank)).collect(),
            sent: DeviceMemory::allocate(context, (order.len() * hidden * case.dtype.size()).max(16))?,
            order: uploaded(context, stream, &bytes(&order))?,
            places: uploaded(context, stream, &bytes(&places))?,
            layouts,
            device,
        })
    }

    /// The number of elements that a dispatch brings to this rank.
    pub(super) fn received(&self) -> usize {
        self.handle.rows() * self.hidden
    }

    /// The error of a call of ours that failed on the GPU.
    pub(super) fn check(&self) -> Result<()> {
        Ok(self.experts.moe.check()?)
    }

    /// Puts one of our calls into the stream.
    ///
    /// # Safety
    /// The memory has the case's elements, and lives until the stream has passed.
    pub(super) unsafe fn ours(
        &self,
        collective: Collective,
        dtype: DType,
        (from, to): (DevicePointer, DevicePointer),
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (tokens, rows) = ([self.tokens, self.hidden], [self.handle.rows(), self.hidden]);
        // SAFETY: passed on.
        unsafe {
            if collective == Collective::DISPATCH {
                let x = view(from, dtype, &tokens, self.device)?.into_view();
                let received = Tokens::of(view(to, dtype, &rows, self.device)?);
                let call = Dispatch { tokens: Tokens::of(x), received };
                return Ok(self.experts.moe.dispatch(&self.handle, call, stream)?);
            }
            let rows = view(from, dtype, &rows, self.device)?.into_view();
            let call = Combine::of(rows, view(to, dtype, &tokens, self.device)?);
            Ok(self.experts.moe.combine(&self.handle, call, stream)?)
        }
    }

    /// The same by NCCL.
    ///
    /// # Safety
    /// As [`ours`](Self::ours).
    pub(super) unsafe fn nccl(
        &self,
        collective: Collective,
        dtype: DType,
        (from, to): (DevicePointer, DevicePointer),
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let Some(nccl) = self.nccl else { return Err("there is no NCCL".into()) };
        let vectors = (self.hidden * dtype.size() / 16) as u64;
        let (sent, ranks) = (self.sends.iter().sum::<usize>(), self.sends.len() as u64);
        let received: usize = self.receives.iter().sum();
        let (rows, tokens) = ((sent / self.hidden) as u64, self.tokens as u64);
        let (at, order, places) = (self.sent.pointer(), self.order.pointer(), self.places.pointer());
        let config = LaunchConfig::new(BLOCKS, THREADS);
        let call = Call::new(Operation::AllToAllV);
        // SAFETY: passed on; the kernels' arguments are those of kernels.cuh.
        unsafe {
            let staged = || view(at, dtype, &[sent], self.device);
            if collective == Collective::DISPATCH {
                let arguments =
                    [(&from).into(), (&order).into(), (&at).into(), (&rows).into(), (&vectors).into()];
                self.experts.gather.launch(stream, &config, &arguments)?;
                let call = call.with_counts(&*self.sends).with_receives(&*self.receives);
                let mut output = view(to, dtype, &[received], self.device)?;
                return Ok(nccl.call(&call, Some(&staged()?.into_view()), Some(&mut output), stream)?);
            }
            let call = call.with_counts(&*self.receives).with_receives(&*self.sends);
            let input: TensorView<'_> = view(from, dtype, &[received], self.device)?.into_view();
            nccl.call(&call, Some(&input), Some(&mut staged()?), stream)?;
            let arguments = [
                (&at).into(),
                (&places).into(),
                (&to).into(),
                (&tokens).into(),
                (&vectors).into(),
                (&ranks).into(),
            ];
            Ok(self.experts.sum(dtype)?.launch(stream, &config, &arguments)?)
        }
    }
}
