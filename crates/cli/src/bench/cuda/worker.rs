//! The work of a rank: for each size it verifies all contenders, times them in turn, and reports.

use std::io::{self, Write};

use antiphon::{
    collectives::{
        Communicator,
        cuda::{Algorithm, CudaCollectives},
        nccl::NcclCollectives,
    },
    device::cuda::{Context, DeviceMemory, Driver, GraphExec, StreamRef, memory},
    fabric::RegisteredMemory,
    operation::Operation,
    tensor::{Device, Element, TensorView, TensorViewMut, with_dtype},
};

use super::{
    REPLAYS, Result, algorithms, calls, cases,
    contender::{Contender, Tensors},
    mixed::{Handler, Variant},
    moe::{Experts, Routes},
    note,
    timing::Clock,
};
use crate::{
    ExitStatus, FAILURE, SUCCESS,
    bench::{
        Args, Buffers, Which,
        case::{Case, Collective},
        moe::{wrong_rows, wrong_sums},
        pattern::{self, Reference, Wrong},
        worker::{row, slowest, total},
    },
    report::{OnGpu, Row},
};

/// The largest message for which the host's time is taken: beyond, the GPU's hides it.
const HOST_BYTES: u64 = 1 << 20;

pub(in crate::bench) fn execute(args: &Args) -> ExitStatus {
    match measure_all(args) {
        Ok(()) => SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            FAILURE
        }
    }
}

/// All that a rank measures with.
struct Bench<'a> {
    args: &'a Args,
    comm: &'a Communicator,
    ours: &'a CudaCollectives,
    nccl: Option<&'a NcclCollectives>,
    /// The handler of the mixed layout, if one is measured.
    mixed: Option<Handler<'a>>,
    /// The mixture of experts, if one is measured.
    experts: Option<Experts>,
    clock: Clock<'a>,
    launch_us: f64,
}

/// A contender with its measurements so far.
struct Run<'a> {
    contender: Contender<'a>,
    graph: GraphExec,
    wrong: Wrong,
    /// Microseconds of one call on this rank, by replay.
    times: Vec<f64>,
    /// The same without a line-up.
    free_times: Vec<f64>,
    host_us: Option<f64>,
}

fn measure_all(args: &Args) -> Result<()> {
    let comm = Communicator::from_env()?;
    let context = Context::primary(Driver::load()?.device(comm.rank() as u32)?)?;
    let ours = super::collectives(args, &comm, &context)?;
    let nccl = NcclCollectives::new(&comm, &context);
    let nccl = nccl.map_err(|error| note(comm.rank(), format_args!("without NCCL beside it: {error}"))).ok();
    let stream = context.stream()?;
    let clock = Clock::new(&comm, &ours, &stream)?;
    let launch_us = slowest(&comm, &[clock.host_launch()?])?[0];
    let mixed = (args.collective == Which::Mixed)
        .then(|| Handler::new(args, &comm, &ours, nccl.as_ref(), &context))
        .transpose()?;
    let is_of_experts = args.collectives().into_iter().any(Collective::is_of_experts);
    let experts = is_of_experts.then(|| Experts::new(&comm, &context)).transpose()?;
    let bench =
        Bench { args, comm: &comm, ours: &ours, nccl: nccl.as_ref(), mixed, experts, clock, launch_us };
    for case in cases(args) {
        let rows = match &bench.experts {
            Some(experts) => with_dtype!(case.dtype, T => bench.measure_experts::<T>(experts, case)?),
            None => with_dtype!(case.dtype, T => bench.measure::<T>(case)?),
        };
        if comm.rank() == 0 {
            for row in rows {
                let line = serde_json::to_string(&row).expect("a row is plain data");
                // When no process reads any more, the launcher has ended, and this process ends too.
                let _ = writeln!(io::stdout(), "{line}");
            }
        }
    }
    Ok(())
}

impl<'a> Bench<'a> {
    /// All rows of one collective and size.
    fn measure<T: Element>(&self, case: Case) -> Result<Vec<Row>> {
        let tensors = self.tensors::<T>(&case)?;
        let reference = Reference::new::<T>(self.comm, case);
        if case.collective.reduces() {
            self.ours.prepare(case.dtype, case.op)?;
        }
        let contenders = self.contenders(case.collective);
        let rows = self.compare::<T>(case, &tensors, contenders, |result| reference.compare(result))?;
        if self.args.buffers == Buffers::Symmetric {
            for memory in [&tensors.input, &tensors.output] {
                self.ours.unregister(self.comm, memory.pointer())?;
            }
        }
        Ok(rows)
    }

    /// All rows of a dispatch or a combine at one size.
    fn measure_experts<T: Element>(&self, experts: &Experts, case: Case) -> Result<Vec<Row>> {
        let rank = self.comm.rank();
        let routes = Routes::new(experts, self.nccl, (self.comm, self.clock.stream), &case)?;
        let dispatch = Case { collective: Collective::DISPATCH, ..case };
        let sent = self.tensors::<T>(&dispatch)?;
        let tokens = pattern::input::<T>(case.op, rank, sent.counts.0);
        let contenders =
            [Some(Contender::Experts(&routes)), self.nccl.map(|_| Contender::ExpertsByNccl(&routes))];
        let contenders = contenders.into_iter().flatten().collect();
        // SAFETY: the tensors live until the stream has been waited for, here and below.
        unsafe { Contender::Experts(&routes).call(&dispatch, &sent, self.clock.stream.borrow()) }?;
        self.clock.stream.borrow().synchronize()?;
        if case.collective == Collective::DISPATCH {
            let count = routes.received();
            return self.compare::<T>(case, &sent, contenders, |result| {
                wrong_rows(&case, &routes.layouts, rank, &result[..count])
            });
        }
        // What a dispatch brings is what a combine takes back.
        let Tensors { input, output, counts, device } = sent;
        let back = Tensors { input: output, output: input, counts: (counts.1, counts.0), device };
        self.compare::<T>(case, &back, contenders, |result| {
            wrong_sums(&routes.layouts[rank], &tokens, result)
        })
    }

    /// Verifies and times contenders.
    fn compare<T: Element>(
        &self,
        case: Case,
        tensors: &Tensors,
        contenders: Vec<Contender<'_>>,
        check: impl Fn(&[T]) -> Wrong,
    ) -> Result<Vec<Row>> {
        let calls = self.args.iterations.unwrap_or_else(|| calls(case.bytes)).max(1);
        let mut runs = Vec::new();
        for contender in contenders {
            runs.push(self.start::<T>(contender, &case, tensors, &check, calls)?);
        }
        // In turn, so that whatever drifts hits all alike.
        for _ in 0..REPLAYS {
            for run in &mut runs {
                // SAFETY: the tensors and the collectives live until the end, and the replay is waited for.
                let took = unsafe { self.clock.replay(&run.graph) }?;
                run.times.push(took / f64::from(calls));
                // SAFETY: as above.
                let took = unsafe { self.clock.replay_freely(&run.graph) }?;
                run.free_times.push(took / f64::from(calls));
            }
        }
        self.rows(case, tensors, runs, calls)
    }

    /// All of Antiphon's contenders, then NCCL.
    fn contenders(&self, collective: Collective) -> Vec<Contender<'_>> {
        if let (Collective::Mixed(mixed), Some(handler)) = (collective, &self.mixed) {
            let all = Variant::all(mixed).chain(self.nccl.map(|_| Variant::Nccl));
            return all.map(|variant| Contender::Mixed(handler, variant)).collect();
        }
        let ours = algorithms(self.args, collective).into_iter();
        let ours = ours.map(|algorithm: Option<Algorithm>| match (self.args.buffers, algorithm) {
            (Buffers::Symmetric, Some(algorithm)) => Contender::Registered(self.ours, algorithm),
            _ => Contender::Ours(self.ours, algorithm),
        });
        ours.chain(self.nccl.map(Contender::Nccl)).collect()
    }

    fn tensors<T: Element>(&self, case: &Case) -> Result<Tensors> {
        let counts = case.counts(self.comm.rank(), self.comm.world_size());
        let context = self.ours.context();
        let memory = |count: usize| DeviceMemory::allocate(context, count * case.dtype.size());
        let (input, output) = (memory(counts.0)?, memory(counts.1)?);
        let values = pattern::input::<T>(case.op, self.comm.rank(), counts.0);
        input.write(self.clock.stream, 0, TensorView::from(&values).as_bytes()?)?;
        if self.args.buffers == Buffers::Symmetric {
            for memory in [&input, &output] {
                let len = memory.len() as u64;
                let memory = RegisteredMemory::new(self.comm, context, memory.pointer(), len)?;
                self.ours.register(memory)?;
            }
        }
        Ok(Tensors { input, output, counts, device: Device::Cuda(context.device().ordinal()) })
    }

    /// Makes the graph, and checks what it computes.
    fn start<'b, T: Element>(
        &self,
        contender: Contender<'b>,
        case: &Case,
        tensors: &Tensors,
        check: impl Fn(&[T]) -> Wrong,
        calls: u32,
    ) -> Result<Run<'b>> {
        let stream = self.clock.stream;
        let call = |stream: StreamRef<'_>| -> Result<()> {
            // SAFETY: the tensors outlive all that is made here, and every use of the stream is waited for.
            unsafe { contender.call(case, tensors, stream) }
        };
        call(stream.borrow())?; // NCCL connects the ranks on the first call, which should not be captured
        stream.borrow().synchronize()?;
        let graph = self.clock.graph(calls, call)?;
        self.spoil(case, tensors)?;
        // SAFETY: as above.
        unsafe { self.clock.replay(&graph) }?;
        let mut result = vec![T::default(); tensors.counts.1];
        tensors.output.read(stream, 0, TensorViewMut::from(&mut result[..]).as_mut_bytes()?)?;
        let wrong = total(self.comm, &[check(&result)])?;
        if let (true, 1..) = (contender.is_nccl(), wrong.elements) {
            let (name, elements) = (case.collective.name(), wrong.elements);
            let text = format_args!("NCCL: {elements} elements of {name} are not as expected");
            note(self.comm.rank(), text);
        }
        // This depends on the case and not on this rank's tensors, so either all ranks do it or none.
        let small = case.bytes <= HOST_BYTES;
        let host_us = small.then(|| self.clock.host(call)).transpose()?;
        Ok(Run { contender, graph, wrong, times: Vec::new(), free_times: Vec::new(), host_us })
    }

    /// Puts into the output what is no result; a broadcast gives the root's input, so there every rank has its own input.
    fn spoil(&self, case: &Case, tensors: &Tensors) -> Result<()> {
        let (stream, to, len) = (self.clock.stream.borrow(), tensors.output.pointer(), tensors.output.len());
        if case.collective == Collective::Of(Operation::Broadcast) {
            // SAFETY: two memories of that size, and the stream is waited for before anybody else uses them.
            unsafe { memory::copy(stream, to, tensors.input.pointer(), len) }?;
        } else {
            // SAFETY: as above.
            unsafe { memory::fill(stream, to, 0xFF, len) }?;
        }
        Ok(stream.synchronize()?)
    }

    fn rows(&self, case: Case, tensors: &Tensors, runs: Vec<Run<'_>>, calls: u32) -> Result<Vec<Row>> {
        let count = tensors.counts.0.max(tensors.counts.1);
        let mut measured = Vec::new();
        for Run { contender, wrong, times, free_times, host_us, .. } in runs {
            let times = self.sorted(&times)?;
            let free = self.sorted(&free_times)?;
            let host = slowest(self.comm, &Vec::from_iter(host_us))?;
            measured.push((contender, wrong, times, free[free.len() / 2], host.first().copied()));
        }
        let nccl = measured.pop_if(|(contender, ..)| contender.is_nccl());
        let rows = measured.into_iter().map(|(contender, wrong, times, free_us, host_us)| {
            let name = contender.name(&case, count * case.dtype.size());
            let gpu = OnGpu {
                calls,
                host_us,
                free_us,
                launch_us: self.launch_us,
                nccl_us: nccl.as_ref().map(|(_, _, times, ..)| times[times.len() / 2]),
                nccl_free_us: nccl.as_ref().map(|&(.., free_us, _)| free_us),
                nccl_host_us: nccl.as_ref().and_then(|(.., host)| *host),
            };
            Row { gpu: Some(gpu), ..row(self.comm, case, name, count, &times, wrong) }
        });
        Ok(rows.collect())
    }

    /// The times of the slowest rank, in ascending order.
    fn sorted(&self, times: &[f64]) -> Result<Vec<f64>> {
        let mut times = slowest(self.comm, times)?;
        times.sort_by(f64::total_cmp);
        Ok(times)
    }
}
