//! Dispatch and combine of a mixture of experts, along routes; beside NCCL's all-to-all with a gather before it or a sum behind it.

use std::rc::Rc;

use antiphon::{
    collectives::Communicator,
    device::cuda::{Context, Function, LaunchConfig, StreamRef},
    moe::{
        Combine, Dispatch, Layout, MoeConfig, Routing, RowFormat, Tokens,
        cuda::{CudaByTokenRoutes, CudaMoe, RouteMemory},
    },
    operation::{Call, Operation},
    tensor::{DType, Element},
};

use super::{
    Contenders, Rank,
    collectives::Library,
    tensors::{Plain, Tensor, Tensors},
    timing,
};
use crate::{
    BenchError, Result,
    case::{Case, Collective},
    host::moe::{layouts, shape, wrong_rows, wrong_sums},
    pattern,
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
struct Routes<'a> {
    experts: &'a Experts,
    routes: CudaByTokenRoutes,
    tokens: usize,
    hidden: usize,
    /// Elements that this rank sends to each, and gets from each, in a dispatch.
    sends: Vec<usize>,
    receives: Vec<usize>,
    /// The token of each row that this rank sends.
    order: Tensor,
    /// `[T, R]`: the number of a token's row for a rank among all that this rank sends, or −1.
    places: Tensor,
    /// The rows that this rank sends.
    sent: Tensor,
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
            dtype => Err(BenchError::NotSummed { dtype }),
        }
    }
}

impl<'a> Routes<'a> {
    fn new(rank: &Rank<'_>, experts: &'a Experts, layouts: &[Layout], case: &Case) -> Result<Self> {
        let (me, world_size) = (rank.comm.rank(), rank.comm.world_size());
        let [tokens, hidden] = shape(case);
        let mine = &layouts[me];
        let counts = |from: &Layout, to: usize| from.tokens_per_rank[to] as usize * hidden;
        let (mut order, mut places) = (Vec::new(), vec![-1; tokens * world_size]);
        for to in 0..world_size {
            for token in (0..tokens).filter(|token| mine.is_token_in_rank[token * world_size + to] == 1) {
                places[token * world_size + to] = order.len() as i32;
                order.push(token as i32);
            }
        }
        fn holding<T: Element>(rank: &Rank<'_>, shape: &[usize], content: &[T]) -> Result<Tensor> {
            Tensor::holding(rank.context, rank.stream, shape, content)
        }
        let in_rank = holding(rank, &[tokens, world_size], &mine.is_token_in_rank)?;
        let num_experts = mine.tokens_per_expert.len();
        let per_expert = holding(rank, &[num_experts], &mine.tokens_per_expert)?;
        let routing = Routing {
            num_experts,
            top_k: 0,
            is_token_in_rank: in_rank.view(),
            tokens_per_expert: per_expert.view(),
            format: RowFormat { hidden, dtype: case.dtype, scales: None },
            capacity: None,
        };
        // SAFETY: the layout's tensors live until the call has ended, which waits for the counts.
        let routes = unsafe { experts.moe.notify(&routing, RouteMemory::Own, rank.stream.borrow()) }?;
        Ok(Self {
            experts,
            routes,
            tokens,
            hidden,
            sends: (0..world_size).map(|to| counts(mine, to)).collect(),
            receives: layouts.iter().map(|from| counts(from, me)).collect(),
            sent: Tensor::zeros(rank.context, rank.stream, case.dtype, &[order.len() * hidden])?,
            order: holding(rank, &[order.len()], &order)?,
            places: holding(rank, &[tokens, world_size], &places)?,
        })
    }

    /// Puts one of our calls into the stream.
    ///
    /// # Safety
    /// The tensors are the case's, and live until the stream, and every graph that captured the call, is done with them.
    unsafe fn ours(
        &self,
        collective: Collective,
        from: &Tensor,
        to: &Tensor,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (tokens, rows) = ([self.tokens, self.hidden], [self.routes.rows(), self.hidden]);
        // SAFETY: passed on.
        unsafe {
            if collective == Collective::DISPATCH {
                let received = Tokens::of(to.begin(&rows));
                let call = Dispatch { tokens: Tokens::of(from.begin(&tokens).into_view()), received };
                return Ok(self.experts.moe.dispatch(&self.routes, call, stream)?);
            }
            let call = Combine::of(from.begin(&rows).into_view(), to.begin(&tokens));
            Ok(self.experts.moe.combine(&self.routes, call, stream)?)
        }
    }

    /// The same by NCCL.
    ///
    /// # Safety
    /// As [`ours`](Self::ours).
    unsafe fn nccl(
        &self,
        nccl: Library<'_>,
        case: &Case,
        (from, to): (&Tensor, &Tensor),
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let vectors = (self.hidden * case.dtype.size() / 16) as u64;
        let (sent, ranks) = (self.sends.iter().sum::<usize>(), self.sends.len() as u64);
        let received = [self.receives.iter().sum()];
        let (rows, tokens) = ((sent / self.hidden) as u64, self.tokens as u64);
        let [at, order, places] = [&self.sent, &self.order, &self.places].map(Tensor::pointer);
        let config = LaunchConfig::new(BLOCKS, THREADS);
        let call = Call::new(Operation::AllToAllV);
        let (source, target) = (from.pointer(), to.pointer());
        // SAFETY: passed on; the kernels' arguments are those of kernels.cuh.
        unsafe {
            if case.collective == Collective::DISPATCH {
                let arguments =
                    [(&source).into(), (&order).into(), (&at).into(), (&rows).into(), (&vectors).into()];
                self.experts.gather.launch(stream, &config, &arguments)?;
                let call = call.with_counts(&*self.sends).with_receives(&*self.receives);
                return Ok(nccl.call(&call, &self.sent.view(), &mut to.begin(&received), stream)?);
            }
            let call = call.with_counts(&*self.receives).with_receives(&*self.sends);
            nccl.call(&call, &from.begin(&received).into_view(), &mut self.sent.view_mut(), stream)?;
            let arguments = [
                (&at).into(),
                (&places).into(),
                (&target).into(),
                (&tokens).into(),
                (&vectors).into(),
                (&ranks).into(),
            ];
            Ok(self.experts.sum(case.dtype)?.launch(stream, &config, &arguments)?)
        }
    }
}

/// The contenders of a dispatch, or of a combine that takes back what a dispatch has brought.
pub(super) fn contenders<'a, T: Element>(
    rank: &'a Rank<'a>,
    experts: &'a Experts,
    case: Case,
) -> Result<Contenders<'a>> {
    if case.collective == Collective::COMBINE {
        experts.sum(case.dtype)?;
    }
    let (me, world_size) = (rank.comm.rank(), rank.comm.world_size());
    let layouts = layouts(shape(&case)[0], world_size)?;
    let routes = Rc::new(Routes::new(rank, experts, &layouts, &case)?);
    let dispatch = Case { collective: Collective::DISPATCH, ..case };
    let received = routes.routes.rows() * routes.hidden;
    let sent = Tensors::new::<T>(rank, &dispatch, move |output| {
        experts.moe.check()?;
        Ok(wrong_rows(&dispatch, &layouts, me, &output[..received]))
    })?;
    // SAFETY: the tensors live until the stream has been waited for.
    unsafe { routes.ours(Collective::DISPATCH, &sent.input, &sent.output, rank.stream.borrow()) }?;
    rank.stream.borrow().synchronize()?;
    let tensors = Rc::new(match case.collective {
        Collective::DISPATCH => sent,
        // The tensors change their places.
        _ => {
            let Tensors { input, output, .. } = sent;
            let layouts = self::layouts(shape(&case)[0], world_size)?;
            let tokens = pattern::input::<T>(case.op, me, case.counts(me, world_size).1);
            Tensors::of::<T>(output, input, &case, move |output| {
                experts.moe.check()?;
                Ok(wrong_sums(&layouts[me], &tokens, output))
            })
        }
    });
    let along = routes.clone();
    let ours = Plain::on(&tensors, "cached", move |tensors, stream| {
        // SAFETY: the driver waits for the stream before it drops the contender, which has the tensors; here and below.
        unsafe { along.ours(case.collective, &tensors.input, &tensors.output, stream) }
    });
    let by_nccl = rank.nccl.map(Library::Nccl).map(|nccl| {
        Plain::on(&tensors, "nccl", move |tensors, stream| {
            // SAFETY: as above.
            unsafe { routes.nccl(nccl, &case, (&tensors.input, &tensors.output), stream) }
        })
    });
    Ok(Contenders { ours: vec![ours], nccl: by_nccl })
}
