//! Graphs, eager calls and several communicators, mixed.

use std::time::Duration;

use antiphon_collectives::{
    CollectiveError, Collectives, ReduceOp,
    cuda::{Algorithm, CudaCollectives},
};
use antiphon_device::cuda::Graph;
use antiphon_tensor::{DType, bf16};

use crate::harness::{At, Outcome, Rank, What, on_gpus, values};

#[derive(Debug, thiserror::Error)]
enum GraphError {
    #[error(transparent)]
    Cuda(#[from] antiphon_device::cuda::CudaError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

const SUM: ReduceOp = ReduceOp::Sum;
/// Operations of different kinds, sizes and algorithms; the count is of a block.
const MIX: [(What, usize); 9] = [
    (What::AllReduce(SUM, Some(Algorithm::OneShot)), 7168),
    (What::AllReduce(SUM, Some(Algorithm::TwoShot)), 100),
    (What::AllGather, 3001),
    (What::AllReduce(SUM, Some(Algorithm::TwoShot)), 200_000),
    (What::AllToAll, 57_344),
    (What::Broadcast(1), 77),
    (What::ReduceScatter(SUM), 9000),
    (What::AllReduce(SUM, Some(Algorithm::OneShot)), 8),
    (What::Broadcast(0), 50_000),
];

/// The calls of the mix, with their memory and what they should give.
struct Mix<'a> {
    rank: &'a Rank,
    input: antiphon_device::cuda::DeviceMemory,
    outputs: Vec<antiphon_device::cuda::DeviceMemory>,
    expected: Vec<Vec<bf16>>,
}

impl<'a> Mix<'a> {
    fn new(rank: &'a Rank) -> Outcome<Self> {
        let (me, world_size) = (rank.comm.rank(), rank.comm.world_size());
        let mine = values::<bf16>(me, 200_000 * world_size);
        let input = rank.upload(&mine)?;
        let (mut outputs, mut expected) = (Vec::new(), Vec::new());
        for (what, count) in MIX {
            let (from, to) = what.counts(count, world_size);
            let mut result = vec![bf16::ZERO; to];
            what.on_host(&rank.comm, &mine[..from], &mut result)?;
            // The root of a broadcast has its buffer right from the beginning.
            let of_root = matches!(what, What::Broadcast(root) if root == me);
            let before = if of_root { result.clone() } else { vec![bf16::ONE; to] };
            outputs.push(rank.upload(&before)?);
            expected.push(result);
        }
        Ok(Self { rank, input, outputs, expected })
    }

    fn queue(&self, which: usize) -> Result<(), CollectiveError> {
        let (what, count) = MIX[which];
        let (from, to) = what.counts(count, self.rank.comm.world_size());
        let at =
            |memory: &antiphon_device::cuda::DeviceMemory, count| At(memory.pointer().0, DType::BF16, count);
        self.rank.queue(what, at(&self.input, from), at(&self.outputs[which], to))
    }

    fn check(&self) -> Outcome {
        for (which, expected) in self.expected.iter().enumerate() {
            let got = self.rank.download(&self.outputs[which], 0, 2 * expected.len())?;
            self.rank.same(&format!("{:?}", MIX[which]), &got, expected)?;
        }
        Ok(())
    }
}

fn graphs_between_eager_calls(world_size: usize) {
    on_gpus(world_size, |rank| {
        let mix = Mix::new(rank)?;
        rank.collectives.prepare(DType::BF16, SUM)?;
        let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
            (0..MIX.len()).try_for_each(|which| mix.queue(which).map_err(GraphError::from))
        })?;
        let graph = graph.instantiate()?;
        for replay in 0..200 {
            // SAFETY: all memory of the graph lives until the end of the test, which synchronises.
            unsafe { graph.launch(&rank.stream) }?;
            mix.queue(replay % MIX.len())?;
        }
        mix.check()
    });
}

#[test]
fn graphs_are_replayed_between_eager_calls() {
    graphs_between_eager_calls(2);
}

#[test]
fn graphs_are_replayed_between_eager_calls_on_4_gpus() {
    graphs_between_eager_calls(4);
}

/// 100,000 calls in an order that looks random but is the same on all ranks, with delays that are not.
#[test]
fn many_mixed_calls_with_delays() {
    on_gpus(2, |rank| {
        let mix = Mix::new(rank)?;
        let mut state = 1u64;
        let mut next = |range: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % range
        };
        for call in 0..100_000 {
            mix.queue(next(MIX.len()))?;
            let (late, often, delay) = (next(rank.comm.world_size()), next(500), next(300) as u64);
            if often == 0 && late == rank.comm.rank() {
                std::thread::sleep(Duration::from_micros(delay));
            }
            if call % 10_000 == 9_999 {
                mix.check()?;
            }
        }
        mix.check()
    });
}

#[test]
fn two_communicators_at_once() {
    on_gpus(2, |rank| {
        let other = rank.comm.split(Some(0), 0)?.ok_or("everybody is in the group")?;
        let context = rank.collectives.context();
        let collectives = CudaCollectives::new(&other, context)?;
        let stream = context.stream()?;
        let second = Rank { comm: other, stream, collectives };
        let (first_mix, second_mix) = (Mix::new(rank)?, Mix::new(&second)?);
        for call in 0..2000 {
            first_mix.queue(call % MIX.len())?;
            second_mix.queue((call + 4) % MIX.len())?;
        }
        first_mix.check()?;
        second_mix.check()
    });
}

#[test]
fn groups_of_2_on_4_gpus() {
    on_gpus(4, |rank| {
        let me = rank.comm.rank();
        let pair = rank.comm.split(Some(me as u64 % 2), me as i64)?.ok_or("everybody is in a group")?;
        let context = rank.collectives.context();
        let collectives = CudaCollectives::new(&pair, context)?;
        let mine = values::<bf16>(me, 10_000);
        let mut expected = mine.clone();
        pair.all_reduce_in_place(&mut expected, SUM)?;
        let buffer = rank.upload(&mine)?;
        let device = antiphon_tensor::Device::Cuda(me as u32);
        let at = buffer.pointer().0 as usize as *mut u8;
        // SAFETY: the buffer lives until `download` has waited.
        unsafe {
            let shape = [mine.len()];
            let input = antiphon_tensor::TensorView::from_raw_parts(at, DType::BF16, &shape, None, device)?;
            let mut output =
                antiphon_tensor::TensorViewMut::from_raw_parts(at, DType::BF16, &shape, None, device)?;
            collectives.all_reduce(&input, &mut output, SUM, rank.stream.borrow())?;
        }
        let got = rank.download(&buffer, 0, 2 * mine.len())?;
        collectives.check()?;
        rank.same("all_reduce in a group", &got, &expected)
    });
}
