//! All-reduce of tensors in symmetric memory, which ranks read and write for each other: the same bits, and not a byte
//! beside them.

use antiphon_collectives::{Collectives, ReduceOp, all_reduce::Algorithm};
use antiphon_fabric::SymmetricBuffer;
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_testing::Alignment;

use crate::{
    harness::{CollectiveBackend, Tensor, assert_same_bits},
    values::Values,
};

conformance_on_host! {
    tensors_may_lie_apart_in_symmetric_memory: [f64 f32 bf16 u8], [world_1 world_2 world_3 world_5];
    the_result_may_replace_the_input: [f64 f32 bf16 u8], [world_1 world_2 world_3 world_5];
    some_ranks_may_work_in_place_and_others_not: [f32 u8], [world_2 world_3 world_5];
    some_ranks_may_keep_their_tensors_elsewhere: [f32 u8], [world_2 world_3 world_5];
    memory_of_another_communicator_serves_too: [f32], [world_2 world_4];
}

const OP: ReduceOp = ReduceOp::Sum;

/// Where a rank keeps a tensor: at an offset in bytes of its copy of the shared buffer, or, for `None`, in memory of its own.
type Kept = Option<usize>;

/// One all-reduce, by some ranks on symmetric memory.
struct Call {
    inputs: Vec<Values>,
    expected: Values,
}

impl Call {
    fn new(dtype: DType, world: usize, count: usize) -> Self {
        let inputs: Vec<Values> =
            (0..world).map(|rank| Values::any_bits(dtype, (count * 8 + rank) as u64, count)).collect();
        Self { expected: Values::reduced(OP, &inputs, &vec![0; inputs.len()]), inputs }
    }

    fn bytes(&self) -> usize {
        self.expected.bytes().len()
    }

    /// Enough for two tensors with something around them.
    fn room(&self) -> usize {
        2 * self.bytes() + 4096
    }

    /// Where tensors may begin: another place on each rank, not aligned on all.
    fn apart(&self, rank: usize) -> (usize, usize) {
        let start = rank * 100 + 1;
        (start, start + self.bytes() + 17)
    }

    /// Both at the same place is in place. The algorithm is chosen unless it is given.
    fn run<B: CollectiveBackend>(
        &self,
        comm: &B,
        buffer: &SymmetricBuffer,
        (input, output): (Kept, Kept),
        algorithm: Option<Algorithm>,
    ) {
        let (mine, own_copy) = (&self.inputs[comm.rank()], buffer.as_mut_ptr(comm.rank()));
        let what = format!(
            "{algorithm:?} of {} × {} on rank {} of {}, input at {input:?}, output at {output:?}",
            mine.len(),
            mine.dtype(),
            comm.rank(),
            comm.world_size()
        );
        // What this rank's copy is to hold before and after.
        let mut before = vec![0x5C; self.room()];
        let put = |at: Kept, values: &Values, space: &mut Vec<u8>| {
            if let Some(at) = at {
                space[at..][..values.bytes().len()].copy_from_slice(values.bytes());
            }
        };
        put(input, mine, &mut before);
        let mut after = before.clone();
        put(output, &self.expected, &mut after);
        // SAFETY: until the next barrier no other rank accesses this copy.
        unsafe { own_copy.copy_from_nonoverlapping(before.as_ptr(), before.len()) };
        comm.barrier().unwrap();

        let (own_input, mut own_output) = (
            Tensor::<B>::holding(comm, mine, Alignment::Aligned),
            Tensor::<B>::unwritten(comm, mine.dtype(), mine.len(), Alignment::Aligned),
        );
        let shape = [mine.len()];
        // SAFETY: the place lies in this rank's copy, which only the collective touches until it returns; input and
        // output are apart, unless only the output is asked for.
        let view = |at: usize| unsafe {
            TensorViewMut::from_raw_parts(own_copy.add(at), mine.dtype(), &shape, None, comm.device())
                .unwrap()
        };
        let done = match (input, output) {
            (Some(input), Some(output)) if input == output => comm.all_reduce_in_place(view(input), OP),
            _ => {
                let input: TensorView<'_> = input.map_or_else(|| own_input.view(), |at| view(at).into_view());
                let output = output.map_or_else(|| own_output.view_mut(), view);
                match algorithm {
                    Some(algorithm) => comm.all_reduce_with(input, output, OP, algorithm.into()),
                    None => comm.all_reduce(input, output, OP),
                }
            }
        };
        done.unwrap_or_else(|error| panic!("{what}: {error}"));

        // No barrier: the result is there when the call returns.
        // SAFETY: no rank accesses this copy before the barrier below.
        let actual = unsafe { std::slice::from_raw_parts(own_copy, before.len()) };
        assert_same_bits(actual, &after, &what);
        if output.is_none() {
            own_output.assert_holds(&self.expected, &what);
        }
        comm.barrier().unwrap();
    }
}

/// Counts around the size from which on ranks ask each other (32 KiB), and beyond a mailbox.
fn counts(dtype: DType) -> Vec<usize> {
    let of = |bytes: usize| bytes / dtype.size();
    vec![0, 7, of(32 << 10) - 1, of(32 << 10), of(32 << 10) + 1, of(64 << 10) + 3, of(1 << 20) + 5]
}

/// Runs calls of all counts, where `kept` says where a rank keeps its input and its output.
fn all_counts<B: CollectiveBackend>(
    dtype: DType,
    world: usize,
    algorithms: &[Option<Algorithm>],
    kept: impl Fn(&Call, usize) -> (Kept, Kept) + Sync,
) {
    let calls: Vec<Call> = counts(dtype).into_iter().map(|count| Call::new(dtype, world, count)).collect();
    B::run(world, |comm| {
        for call in &calls {
            let buffer = comm.symmetric(call.room()).unwrap();
            for algorithm in algorithms {
                call.run::<B>(&comm, &buffer, kept(call, comm.rank()), *algorithm);
            }
            comm.free(buffer).unwrap();
        }
    });
}

const EVERY_WAY: [Option<Algorithm>; 3] = [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot)];

fn tensors_may_lie_apart_in_symmetric_memory<B: CollectiveBackend>(dtype: DType, world: usize) {
    all_counts::<B>(dtype, world, &EVERY_WAY, |call, rank| {
        let (input, output) = call.apart(rank);
        (Some(input), Some(output))
    });
}

fn the_result_may_replace_the_input<B: CollectiveBackend>(dtype: DType, world: usize) {
    all_counts::<B>(dtype, world, &[None], |call, rank| {
        let (place, _) = call.apart(rank);
        (Some(place), Some(place))
    });
}

fn some_ranks_may_work_in_place_and_others_not<B: CollectiveBackend>(dtype: DType, world: usize) {
    all_counts::<B>(dtype, world, &[None], |call, rank| {
        let (input, output) = call.apart(rank);
        (Some(input), Some(if rank % 2 == 0 { input } else { output }))
    });
}

fn some_ranks_may_keep_their_tensors_elsewhere<B: CollectiveBackend>(dtype: DType, world: usize) {
    for outsider in [0, world - 1] {
        for (own_input, own_output) in [(true, true), (true, false), (false, true)] {
            all_counts::<B>(dtype, world, &[None, Some(Algorithm::TwoShot)], |call, rank| {
                let (input, output) = call.apart(rank);
                let strange = rank == outsider;
                ((!strange || !own_input).then_some(input), (!strange || !own_output).then_some(output))
            });
        }
    }
}

/// It is symmetric, but not here.
fn memory_of_another_communicator_serves_too<B: CollectiveBackend>(dtype: DType, world: usize) {
    let call = Call::new(dtype, world, 20_000);
    B::run(world, |comm| {
        let group = comm.split(Some(comm.rank() as u64 / 2), 0).unwrap().expect("a pair");
        let buffer = group.symmetric(call.room()).unwrap();
        let own = buffer.as_mut_ptr(group.rank());
        let (mine, shape) = (&call.inputs[comm.rank()], [20_000]);
        // SAFETY: the place lies in this rank's copy, which no other rank accesses.
        let tensor = || unsafe {
            own.copy_from_nonoverlapping(mine.bytes().as_ptr(), call.bytes());
            TensorViewMut::from_raw_parts(own, dtype, &shape, None, comm.device()).unwrap()
        };
        comm.all_reduce_in_place(tensor(), OP).unwrap();
        // SAFETY: as above.
        let actual = unsafe { std::slice::from_raw_parts(own, call.bytes()) };
        assert_same_bits(actual, call.expected.bytes(), "the sum");
        comm.barrier().unwrap();
    });
}
