//! Mixed collectives of two machines of two ranks.

use antiphon_collectives::{
    CollectiveError, Communicator,
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp, reference},
};
use antiphon_fabric::FabricError;

const LAYOUTS: [[usize; 2]; 2] = [[2, 1], [1, 2]];

fn handler(comm: &Communicator, [local_tp, inter_tp]: [usize; 2]) -> MixedHandler {
    let layout = MixedLayout::builder(4, comm.rank()).local_size(2).local_tp(local_tp).inter_tp(inter_tp);
    MixedHandler::new(comm, layout.build().unwrap()).unwrap()
}

/// Both fused operations in every mode of equal bits, of even and uneven blocks of any size, against the reference.
pub fn every_layout(comm: &Communicator) -> Result<(), FabricError> {
    let value = |rank: usize, i: usize| (i as f32 * 0.37 + rank as f32 * 1e3).sin() * (rank as f32 + 0.1);
    let order = |all: &[Vec<f32>]| {
        let of_node = |values: &Vec<f32>| values.iter().copied().reduce(|sum, next| sum + next).unwrap();
        all.iter().map(of_node).reduce(|sum, next| sum + next).unwrap()
    };
    for mixed in LAYOUTS.map(|tp| handler(comm, tp)) {
        let layout = *mixed.layout();
        let group_of = |rank: usize| layout.partition(antiphon_topology::MixedGroup::Tp).index_of(rank);
        for counts in [[1, 1], [1000, 1000], [0, 70_001], [200_000, 200_000]] {
            for op in [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce] {
                let len = |rank: usize| match op {
                    MixedOp::AllReduceAllGather => counts[group_of(rank)],
                    _ => counts.iter().sum(),
                };
                let inputs: Vec<Vec<f32>> =
                    (0..4).map(|rank| (0..len(rank)).map(|i| value(rank, i)).collect()).collect();
                let expected = &reference::outputs(op, &layout, &counts, &inputs, order)[comm.rank()];
                for &mode in mixed.valid_modes().iter().filter(|&&mode| mode != MixedMode::Composed) {
                    let mut output = vec![0f32; expected.len()];
                    let call = MixedCall::from(op).mode(mode).counts(&counts[..]);
                    mixed.run(comm, call, &inputs[comm.rank()], &mut output).unwrap();
                    let is_equal = output.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(is_equal, "{op:?} of {counts:?} by {mode}");
                }
            }
        }
    }
    comm.barrier()
}

/// Both fused operations, in the mode with the most hops, until one fails.
pub fn call_for_ever(comm: &Communicator) -> Result<(), FabricError> {
    let mixed = handler(comm, [1, 2]);
    let (mut block, mut row) = (vec![1f32; 40_000], vec![1f32; 80_000]);
    loop {
        let gather = MixedCall::from(MixedOp::AllReduceAllGather).mode(MixedMode::Bytes2);
        let scatter = MixedCall::from(MixedOp::ReduceScatterAllReduce).mode(MixedMode::Bytes2);
        let done = mixed
            .run(comm, gather, &block, &mut row)
            .and_then(|()| mixed.run(comm, scatter, &row, &mut block));
        match done {
            Ok(()) => {}
            Err(CollectiveError::Fabric(error)) => return Err(error),
            Err(other) => panic!("{other}"),
        }
    }
}
