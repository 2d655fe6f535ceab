//! Mixed collectives in graphs between other calls, and memory that is released and restored under a graph.

use antiphon_collectives::{CollectiveError, ReduceOp, mixed::MixedCall};
use antiphon_device::cuda::{CudaError, DeviceMemory, Graph, memory};
use antiphon_tensor::{DType, bf16};

use crate::{
    graphs::{GraphError, Mix},
    harness::{At, Outcome, Random, Rank, on_gpus, values},
    mixed::Mixed,
};

/// Calls of one handler, with their memory and what they should give.
struct Calls<'a> {
    mixed: Mixed<'a>,
    input: DeviceMemory,
    calls: Vec<(MixedCall<'static>, usize, DeviceMemory, Vec<bf16>)>,
}

impl<'a> Calls<'a> {
    /// All operations of the layout, in one mode after the other, of several sizes.
    fn new(rank: &'a Rank, tp: usize) -> Outcome<Self> {
        let mixed = Mixed::new(rank, tp)?;
        mixed.gpus.prepare(&rank.collectives, DType::BF16)?;
        let mine = values::<bf16>(rank.comm.rank() + tp, 100_000 * rank.comm.world_size());
        let (input, mut calls) = (rank.upload(&mine)?, Vec::new());
        let modes = mixed.gpus.valid_modes();
        for (index, count) in [7168, 100_000, 9, 1].into_iter().enumerate() {
            for &op in mixed.gpus.valid_ops() {
                let call = MixedCall::from(op).mode(modes[index % modes.len()]);
                let (from, to) = mixed.lengths(&call, count);
                let mut expected = vec![bf16::ZERO; to];
                mixed.host.run(&rank.comm, call, &mine[..from], &mut expected)?;
                calls.push((call, from, rank.allocate(2 * to)?, expected));
            }
        }
        Ok(Self { mixed, input, calls })
    }

    fn queue(&self, index: usize) -> Result<(), CollectiveError> {
        let (call, from, output, expected) = &self.calls[index];
        let at = |memory: &DeviceMemory, count| At(memory.pointer().0, DType::BF16, count);
        self.mixed.queue(*call, at(&self.input, *from), at(output, expected.len()))
    }

    fn queue_all(&self) -> Result<(), CollectiveError> {
        (0..self.calls.len()).try_for_each(|index| self.queue(index))
    }

    fn spoil(&self) -> Outcome {
        for (_, _, output, _) in &self.calls {
            // SAFETY: the output has as many bytes, and the stream keeps the order.
            unsafe { memory::fill(self.mixed.rank.stream.borrow(), output.pointer(), 0x5A, output.len()) }?;
        }
        Ok(())
    }

    fn check(&self) -> Outcome {
        for (call, _, output, expected) in &self.calls {
            let got = self.mixed.rank.download(output, 0, 2 * expected.len())?;
            self.mixed.rank.same(&format!("{call:?}"), &got, expected)?;
        }
        self.mixed.rank.meet()
    }
}

/// Two handlers of different layouts and every other collective, all in graphs, with eager calls between the replays and ranks
/// that are late.
fn graphs_of_two_handlers(world_size: usize) {
    on_gpus(world_size, |rank| {
        let handlers = [Calls::new(rank, 2)?, Calls::new(rank, 1)?];
        let mix = Mix::new(rank, 0)?;
        rank.collectives.prepare(DType::BF16, ReduceOp::Sum)?;
        let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
            handlers.iter().try_for_each(Calls::queue_all)?;
            Ok((0..Mix::LEN).try_for_each(|which| mix.queue(which))?)
        })?;
        let graph = graph.instantiate()?;
        rank.meet()?;
        let mut random = Random(5);
        for replay in 0..300 {
            random.delay_once_in(2, &rank.comm);
            if replay % 100 == 0 {
                handlers.iter().try_for_each(Calls::spoil)?;
                mix.spoil()?;
            }
            // SAFETY: all memory of the graph lives until the end of the test, which synchronises.
            unsafe { graph.launch(&rank.stream) }?;
            if replay % 100 == 99 {
                handlers.iter().try_for_each(Calls::check)?;
                mix.check()?;
            }
            let calls = &handlers[random.below(2)];
            calls.queue(random.below(calls.calls.len()))?;
        }
        Ok(())
    });
}

#[test]
fn mixed_calls_of_two_handlers_in_graphs_on_2_gpus() {
    graphs_of_two_handlers(2);
}

#[test]
fn mixed_calls_of_two_handlers_in_graphs_on_4_gpus() {
    graphs_of_two_handlers(4);
}

/// Memory is given back and restored under a graph of everything, which goes on as if nothing had been.
fn checkpoint_under_a_graph(world_size: usize) {
    on_gpus(world_size, |rank| {
        let (calls, mix) = (Calls::new(rank, 2)?, Mix::new(rank, 0)?);
        let collectives = &rank.collectives;
        collectives.prepare(DType::BF16, ReduceOp::Sum)?;
        let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
            calls.queue_all()?;
            Ok((0..Mix::LEN).try_for_each(|which| mix.queue(which))?)
        })?;
        let graph = graph.instantiate()?;
        rank.meet()?;
        let free = || Ok::<_, CudaError>(collectives.context().memory()?.free_bytes);
        for _ in 0..3 {
            calls.spoil()?;
            mix.spoil()?;
            // SAFETY: all memory of the graph lives until the end of the test, which synchronises.
            unsafe { graph.launch(&rank.stream) }?;
            calls.queue_all()?;
            calls.check()?;
            mix.check()?;
            let before = free()?;
            collectives.release_memory(&rank.comm)?;
            collectives.release_memory(&rank.comm)?;
            let given = free()? - before;
            assert!(given >= 300 << 20, "{given} bytes were given back");
            let text = calls.queue(0).unwrap_err().to_string();
            assert!(text.contains("memory for calls is released: restore_memory comes first"), "{text}");
            collectives.restore_memory(&rank.comm)?;
            collectives.restore_memory(&rank.comm)?;
        }
        Ok(())
    });
}

#[test]
fn a_checkpoint_under_a_graph_of_mixed_calls_on_2_gpus() {
    checkpoint_under_a_graph(2);
}

#[test]
fn a_checkpoint_under_a_graph_of_mixed_calls_on_4_gpus() {
    checkpoint_under_a_graph(4);
}

/// While one rank's GPU is full, no rank is restored, and all get the error; later it succeeds.
#[test]
fn a_restore_that_fails_on_one_rank_fails_on_all_and_can_be_repeated() {
    on_gpus(2, |rank| {
        let calls = Calls::new(rank, 2)?;
        let (context, me) = (rank.collectives.context(), rank.comm.rank());
        rank.collectives.release_memory(&rank.comm)?;
        let most = context.memory()?.free_bytes as usize - (200 << 20);
        let hog = (me == 1).then(|| DeviceMemory::allocate(context, most)).transpose()?;
        let text = rank.collectives.restore_memory(&rank.comm).unwrap_err().to_string();
        let expected = if me == 1 { "CUDA_ERROR_OUT_OF_MEMORY" } else { "rank 1 has no memory to share" };
        assert!(text.contains(expected), "{text}");
        assert!(calls.queue(0).is_err(), "nothing is restored");
        drop(hog);
        rank.collectives.restore_memory(&rank.comm)?;
        rank.meet()?;
        calls.queue_all()?;
        calls.check()
    });
}
