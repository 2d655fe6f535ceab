//! Every operation, compared element by element with an interpreter that does the obvious.

#[path = "../plans/mod.rs"]
mod plans;
mod scalar;

use antiphon_executor::{LoadedPlan, Options, PacketKind};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_plan::{
    Plan, ReduceOp,
    verify::{Options as Proof, VerifiedPlan},
};
use antiphon_tensor::{DType, Element, with_dtype};

use plans::Relay;
use scalar::World;

/// Where tensors lie, and whether input and output are one.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tensors {
    Private,
    Symmetric,
    /// Some ranks' are symmetric memory.
    Mixed,
    PrivateInPlace,
    SymmetricInPlace,
}

impl Tensors {
    const ALL: [Self; 5] =
        [Self::Private, Self::Symmetric, Self::Mixed, Self::PrivateInPlace, Self::SymmetricInPlace];

    fn symmetric(self, rank: usize) -> bool {
        match self {
            Self::Symmetric | Self::SymmetricInPlace => true,
            Self::Mixed => rank.is_multiple_of(2),
            _ => false,
        }
    }

    fn in_place(self) -> bool {
        matches!(self, Self::PrivateInPlace | Self::SymmetricInPlace)
    }
}

/// Small whole numbers, which every dtype holds and whose sums it holds too.
fn input(rank: usize, count: usize, call: usize) -> Vec<f64> {
    (0..count).map(|at| ((at * 7 + rank * 5 + call * 3 + at / 11) % 13) as f64).collect()
}

/// The bytes of an output that is not written.
const UNWRITTEN: f64 = 99.0;

/// What all ranks put in, and what the scalar interpreter makes of it.
struct Call {
    chunk_bytes: usize,
    /// Elements of input and output.
    counts: [usize; 2],
    inputs: Vec<Vec<f64>>,
    outputs: Vec<Vec<Option<f64>>>,
}

impl Call {
    fn new(plan: &Plan, dtype: DType, chunk_bytes: usize, call: usize) -> Self {
        let (gpu, chunk) = (&plan.gpus[0], chunk_bytes / dtype.size());
        let counts = [gpu.input_chunks, gpu.output_chunks].map(|chunks| chunks as usize * chunk);
        let inputs: Vec<_> = (0..plan.num_ranks()).map(|rank| input(rank, counts[0], call)).collect();
        let outputs = World::run(plan, dtype, &inputs);
        Call { chunk_bytes, counts, inputs, outputs }
    }
}

/// One rank's part of a test: calls one after the other, each compared with what it must give.
fn check_rank<T: Element>(
    comm: &Communicator,
    plan: &VerifiedPlan,
    options: Options,
    tensors: Tensors,
    calls: &[Call],
) {
    let mut loaded = LoadedPlan::load(comm, plan, options).unwrap();
    for (call, Call { chunk_bytes, counts, inputs, outputs }) in calls.iter().enumerate() {
        let (counts, expected) = (*counts, &outputs[comm.rank()]);
        let mine: Vec<T> = inputs[comm.rank()].iter().map(|x| T::from_f64(*x)).collect();
        let unwritten = T::from_f64(UNWRITTEN);
        let actual = match tensors.in_place() {
            true => in_place(comm, &mut loaded, tensors, &mine, counts),
            false => apart(comm, &mut loaded, tensors, &mine, vec![unwritten; counts[1]]),
        };
        for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
            let expected = match expected {
                Some(value) => *value,
                None if tensors.in_place() => continue, // what was there before depends on where the input was
                None => unwritten.to_f64(),
            };
            assert_eq!(
                actual.to_f64(),
                expected,
                "element {at} of {} on rank {} of {}, {tensors:?}, call {call} of {chunk_bytes} bytes a chunk of {}",
                T::DTYPE,
                comm.rank(),
                plan.plan().name.as_deref().unwrap_or_default(),
                options.packets.payload(),
            );
        }
    }
    loaded.free(comm).unwrap();
}

fn apart<T: Element>(
    comm: &Communicator,
    plan: &mut LoadedPlan,
    tensors: Tensors,
    input: &[T],
    mut output: Vec<T>,
) -> Vec<T> {
    let size = size_of::<T>();
    let buffers = [input.len(), output.len()].map(|count| comm.symmetric(count * size).unwrap());
    if tensors.symmetric(comm.rank()) {
        let (rank, [from, to]) = (comm.rank(), &buffers);
        // SAFETY: the others touch this rank's copies only within the call.
        let (from, to) = unsafe { (from.slice_mut::<T>(rank), to.slice_mut::<T>(rank)) };
        from.copy_from_slice(input);
        to.copy_from_slice(&output);
        plan.execute(comm, &*from, &mut *to).unwrap();
        assert_eq!(from, input, "the input was written to");
        output.copy_from_slice(to);
    } else {
        plan.execute(comm, input, &mut output).unwrap();
    }
    buffers.into_iter().for_each(|buffer| comm.free(buffer).unwrap());
    output
}

fn in_place<T: Element>(
    comm: &Communicator,
    plan: &mut LoadedPlan,
    tensors: Tensors,
    input: &[T],
    counts: [usize; 2],
) -> Vec<T> {
    let (rank, larger) = (comm.rank(), counts[0].max(counts[1]));
    let shift = |count: usize| if count < larger { rank * count } else { 0 };
    let buffer = comm.symmetric(larger * size_of::<T>()).unwrap();
    let mut own = vec![T::from_f64(UNWRITTEN); larger];
    // SAFETY: the others touch this rank's copy only within the call.
    let both = if tensors.symmetric(rank) { unsafe { buffer.slice_mut::<T>(rank) } } else { &mut own[..] };
    both.fill(T::from_f64(UNWRITTEN));
    both[shift(counts[0])..][..counts[0]].copy_from_slice(input);
    plan.execute_in_place(comm, &mut *both).unwrap();
    let output = both[shift(counts[1])..][..counts[1]].to_vec();
    comm.free(buffer).unwrap();
    output
}

fn check(plan: &Plan, dtype: DType, options: Options, tensors: Tensors, bytes: &[usize]) {
    if tensors.in_place() && plan.collective == "test" {
        return;
    }
    let proved = VerifiedPlan::new(plan.clone(), &Proof::default());
    let proved = proved.unwrap_or_else(|report| panic!("{:?}: {report}", plan.name));
    let calls: Vec<Call> =
        bytes.iter().enumerate().map(|(call, &bytes)| Call::new(plan, dtype, bytes, call)).collect();
    LocalWorld::run(plan.num_ranks(), |comm| {
        with_dtype!(dtype, T => check_rank::<T>(&comm, &proved, options, tensors, &calls));
    });
}

/// The tests are of all operations.
#[test]
fn every_operation_has_its_plan() {
    let mut seen = std::collections::BTreeSet::new();
    let mut note = |op: &antiphon_plan::Op| seen.insert(op.kind.name());
    for plan in plans::all(3, ReduceOp::Sum).iter() {
        for op in plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops) {
            note(op);
            if let antiphon_plan::OpKind::Pipeline(pipeline) = &op.kind {
                pipeline.ops.iter().for_each(|op| _ = note(op));
            }
        }
    }
    let expected = "barrier copy cpkt flush get glre glres gstore gstorepkt nop pipeline ppkt put pws pwsf re recpkt \
                    recspkt repkt res respkt rlxsignal rlxwait rppkt rre rres sem_acquire sem_release signal upkt wait";
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected.split_whitespace().collect::<Vec<_>>());
}

#[test]
fn every_algorithm_on_tensors_anywhere() {
    for plan in plans::all(3, ReduceOp::Sum) {
        for tensors in Tensors::ALL {
            check(&plan, DType::F32, Options::default(), tensors, &[16, 64, 16]);
        }
    }
}

#[test]
fn every_dtype_and_reduction() {
    for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
        for plan in [
            plans::two_shot(2, op, true),
            plans::packets(2, op, false),
            plans::packets_two_shot(2, op, Relay::Sent),
            plans::switch_all_reduce(2, op, true),
            plans::local_reduce(2, op),
        ] {
            for &dtype in DType::NUMERIC {
                check(plan.as_ref().unwrap(), dtype, Options::default(), Tensors::Private, &[48]);
            }
        }
    }
}

#[test]
fn both_kinds_of_packets_over_many_launches() {
    for packets in [PacketKind::LL8, PacketKind::LL16] {
        for plan in [
            plans::packets(3, ReduceOp::Sum, false),
            plans::packets(3, ReduceOp::Sum, true),
            plans::packets_two_shot(3, ReduceOp::Sum, Relay::Apart),
            plans::switch_packets(2),
        ] {
            let bytes = [16, 32, 16, 16, 4096, 16, 4096, 48, 0, 16];
            check(&plan.unwrap(), DType::BF16, Options { packets }, Tensors::Private, &bytes);
        }
    }
}

/// Chunks that are no whole number of packets, shares or turns.
#[test]
fn ragged_chunks() {
    for mut plan in plans::all(2, ReduceOp::Sum) {
        plan.buffer_alignment = 4;
        for packets in [PacketKind::LL8, PacketKind::LL16] {
            check(&plan, DType::F32, Options { packets }, Tensors::Private, &[4, 12, 20, 52, 100]);
        }
    }
}

/// The turns of a pipeline cut each thread block's share of plain data, and packets not at all.
#[test]
fn turns_cut_shares_and_no_packets() {
    let plan = plans::turns(1).unwrap();
    for bytes in [16, 48, 128] {
        let call = Call::new(&plan, DType::F32, bytes, 0);
        let copied: Vec<_> = call.inputs[0].iter().copied().map(Some).collect();
        assert_eq!(call.outputs[0], copied, "{bytes} bytes a chunk");
    }
    check(&plan, DType::F32, Options::default(), Tensors::Private, &[16, 48, 128]);
}

/// Messages so large that they go in slices, the last of which is shorter.
#[test]
fn large_messages_go_in_slices() {
    for plan in [
        plans::two_shot(2, ReduceOp::Sum, true),
        plans::packets_two_shot(2, ReduceOp::Sum, Relay::Apart),
        plans::pipelined_all_to_all(2, 64 << 10),
    ] {
        for tensors in [Tensors::Private, Tensors::Mixed, Tensors::SymmetricInPlace] {
            let bytes = [(514 << 10) + 16];
            check(plan.as_ref().unwrap(), DType::F64, Options::default(), tensors, &bytes);
        }
    }
}
