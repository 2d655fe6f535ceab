//! Graphs, eager calls and several communicators, mixed.

use antiphon_collectives::{
    CollectiveError, Collectives, ReduceOp, StreamCollectives,
    cuda::{Algorithm, CudaCollectives},
};
use antiphon_device::cuda::{DeviceMemory, Graph, memory};
use antiphon_tensor::{DType, bf16};

use crate::harness::{At, Outcome, Random, Rank, What, on_gpus, values};

#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    #[error(transparent)]
    Cuda(#[from] antiphon_device::cuda::CudaError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

const SUM: ReduceOp = ReduceOp::Sum;
/// Operations of different kinds, sizes and algorithms; the count is of a block.
const MIX: [(What, usize); 11] = [
    (What::AllReduce(SUM, Some(Algorithm::OneShot)), 7168),
    (What::AllReduce(SUM, Some(Algorithm::TwoShot)), 100),
    (What::AllGather, 3001),
    (What::AllReduce(SUM, Some(Algorithm::TwoShot)), 200_000),
    (What::AllToAll, 57_344),
    (What::Broadcast(1), 77),
    (What::Registered(SUM, Algorithm::TwoShot), 30_000),
    (What::ReduceScatter(SUM), 9000),
    (What::Registered(SUM, Algorithm::OneShot), 7168),
    (What::AllReduce(SUM, Some(Algorithm::OneShot)), 8),
    (What::Broadcast(0), 50_000),
];

/// The calls of the mix, with their memory and what they should give.
pub struct Mix<'a> {
    rank: &'a Rank,
    input: DeviceMemory,
    outputs: Vec<DeviceMemory>,
    expected: Vec<Vec<bf16>>,
}

impl<'a> Mix<'a> {
    /// Mixes of different seeds have different values, so that what is left of one is wrong for the other.
    pub fn new(rank: &'a Rank, seed: usize) -> Outcome<Self> {
        let (me, world_size) = (rank.comm.rank(), rank.comm.world_size());
        let mine = values::<bf16>(me + 100 * seed, 200_000 * world_size);
        let input = rank.upload(&mine)?;
        rank.register(&input)?;
        let (mut outputs, mut expected) = (Vec::new(), Vec::new());
        for (what, count) in MIX {
            let (from, to) = what.counts(count, world_size);
            let mut result = vec![bf16::ZERO; to];
            what.on_host(&rank.comm, &mine[..from], &mut result)?;
            // The root of a broadcast has its buffer right from the beginning.
            let of_root = matches!(what, What::Broadcast(root) if root == me);
            let before = if of_root { result.clone() } else { vec![bf16::ONE; to] };
            let output = rank.upload(&before)?;
            if matches!(what, What::Registered(_, Algorithm::TwoShot)) {
                rank.register(&output)?;
            }
            outputs.push(output);
            expected.push(result);
        }
        Ok(Self { rank, input, outputs, expected })
    }

    /// How many calls there are.
    pub const LEN: usize = MIX.len();

    pub fn queue(&self, which: usize) -> Result<(), CollectiveError> {
        let (what, count) = MIX[which];
        let (from, to) = what.counts(count, self.rank.comm.world_size());
        let at = |memory: &DeviceMemory, count| At(memory.pointer().0, DType::BF16, count);
        self.rank.queue(what, at(&self.input, from), at(&self.outputs[which], to))
    }

    /// Makes every result wrong that only the root of a broadcast has to begin with.
    pub fn spoil(&self) -> Outcome {
        for ((what, _), output) in MIX.iter().zip(&self.outputs) {
            if !matches!(what, What::Broadcast(root) if *root == self.rank.comm.rank()) {
                // SAFETY: the output has as many bytes, and the stream keeps the order.
                unsafe { memory::fill(self.rank.stream.borrow(), output.pointer(), 0x5A, output.len()) }?;
            }
        }
        Ok(())
    }

    pub fn check(&self) -> Outcome {
        for (which, expected) in self.expected.iter().enumerate() {
            let got = self.rank.download(&self.outputs[which], 0, 2 * expected.len())?;
            self.rank.same(&format!("{:?}", MIX[which]), &got, expected)?;
        }
        self.rank.meet()
    }
}

fn graphs_between_eager_calls(world_size: usize) {
    on_gpus(world_size, |rank| {
        let mix = Mix::new(rank, 0)?;
        rank.collectives.prepare(DType::BF16, SUM)?;
        let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
            (0..MIX.len()).try_for_each(|which| mix.queue(which).map_err(GraphError::from))
        })?;
        let graph = graph.instantiate()?;
        rank.meet()?;
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
        let mixes = [Mix::new(rank, 0)?, Mix::new(rank, 1)?];
        let mut random = Random(1);
        for call in 0..100_000 {
            mixes[random.below(2)].queue(random.below(MIX.len()))?;
            random.delay(&rank.comm);
            if call % 2_000 == 1_999 {
                mixes.iter().try_for_each(Mix::spoil)?;
                for which in 0..MIX.len() {
                    mixes.iter().try_for_each(|mix| mix.queue(which))?;
                }
                mixes.iter().try_for_each(Mix::check)?;
            }
        }
        Ok(())
    });
}

/// Calls of two communicators on two streams, eager ones and graphs, in an order that looks random, with delays of hosts and of GPUs;
/// every result is compared. ANTIPHON_SOAK_CALLS says how many calls there are.
#[test]
fn a_soak_of_two_communicators() {
    let calls = std::env::var("ANTIPHON_SOAK_CALLS").map_or(5000, |calls| calls.parse().expect("a number"));
    on_gpus(2, |rank| {
        let other = rank.comm.split(Some(0), 0)?.ok_or("everybody is in the group")?;
        let context = rank.collectives.context();
        let collectives = CudaCollectives::new(&other, context)?;
        let second = Rank { comm: other, stream: context.stream()?, collectives };
        let ranks = [rank, &second];
        let [delay, _] = crate::streams::kernels(context)?;
        let mixes = [Mix::new(rank, 0)?, Mix::new(&second, 1)?];
        let mut random = Random(7);
        let mut graphs = Vec::new();
        for (rank, mix) in ranks.iter().zip(&mixes) {
            rank.collectives.prepare(DType::BF16, SUM)?;
            let order: Vec<usize> = (0..MIX.len()).map(|_| random.below(MIX.len())).collect();
            let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
                order.iter().try_for_each(|&which| mix.queue(which).map_err(GraphError::from))
            })?;
            graphs.push(graph.instantiate()?);
        }
        let mut call = 0;
        while call < calls {
            let which = random.below(2);
            random.delay(&rank.comm);
            let (late, is_late, ns) = (random.below(2), random.below(20) == 0, random.below(500_000) as u64);
            if is_late && late == rank.comm.rank() {
                let config = antiphon_device::cuda::LaunchConfig::new(1, 1);
                // SAFETY: the kernel takes one number and touches no memory.
                unsafe { delay.launch(&ranks[which].stream, &config, &[(&ns).into()]) }?;
            }
            if random.below(8) == 0 {
                // SAFETY: all memory of the graph lives until the end of the test, which synchronises.
                unsafe { graphs[which].launch(&ranks[which].stream) }?;
                call += MIX.len();
            } else {
                mixes[which].queue(random.below(MIX.len()))?;
                call += 1;
            }
            if random.below(500) == 0 || call >= calls {
                mixes.iter().try_for_each(Mix::spoil)?;
                for which in 0..MIX.len() {
                    mixes.iter().try_for_each(|mix| mix.queue(which))?;
                }
                mixes.iter().try_for_each(Mix::check)?;
            }
        }
        Ok(())
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
        let (first_mix, second_mix) = (Mix::new(rank, 0)?, Mix::new(&second, 1)?);
        for call in 0..2000 {
            first_mix.queue(call % MIX.len())?;
            second_mix.queue((call + 4) % MIX.len())?;
        }
        first_mix.check()?;
        second_mix.check()
    });
}

/// Each fills all the blocks that it may have, in both channels.
#[test]
fn two_communicators_with_large_messages() {
    on_gpus(2, |rank| {
        const COUNT: usize = 40_000_003;
        let other = rank.comm.split(Some(0), 0)?.ok_or("everybody is in the group")?;
        let context = rank.collectives.context();
        let collectives = CudaCollectives::new(&other, context)?;
        let second = Rank { comm: other, stream: context.stream()?, collectives };
        let mine = values::<bf16>(rank.comm.rank(), COUNT);
        let mut expected = vec![bf16::ZERO; COUNT];
        rank.comm.all_reduce(&mine, &mut expected, SUM)?;
        let input = rank.upload(&mine)?;
        let at = |memory: &DeviceMemory| At(memory.pointer().0, DType::BF16, COUNT);
        let outputs = [rank.allocate(2 * COUNT)?, rank.allocate(2 * COUNT)?];
        let turns = [rank, &second];
        for call in 0..20 {
            turns[call % 2].queue(What::AllReduce(SUM, None), at(&input), at(&outputs[call % 2]))?;
        }
        for (turn, output) in turns.iter().zip(&outputs) {
            let got = turn.download(output, 0, 2 * COUNT)?;
            turn.same("a large all_reduce beside another", &got, &expected)?;
        }
        Ok(())
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
        let device = antiphon_tensor::Device::Cuda(context.device().ordinal());
        let at = buffer.pointer().0 as usize as *mut u8;
        collectives.prepare(DType::BF16, SUM)?;
        rank.meet()?;
        // SAFETY: the buffer lives until `download` has waited.
        unsafe {
            let shape = [mine.len()];
            let input = antiphon_tensor::TensorView::from_raw_parts(at, DType::BF16, &shape, None, device)?;
            let mut output =
                antiphon_tensor::TensorViewMut::from_raw_parts(at, DType::BF16, &shape, None, device)?;
            collectives.all_reduce(input, &mut output, SUM, rank.stream.borrow())?;
        }
        let got = rank.download(&buffer, 0, 2 * mine.len())?;
        collectives.check()?;
        rank.meet()?;
        rank.same("all_reduce in a group", &got, &expected)
    });
}
