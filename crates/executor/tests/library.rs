//! Every plan of the library is executed, and compared with the result that the collective must have.

use antiphon_executor::{LoadedPlan, Options};
use antiphon_fabric::LocalWorld;
use antiphon_language::ReduceOp;
use antiphon_language::library::{ALGORITHMS, Algorithm, Setting};
use antiphon_plan::verify::{Options as Proof, VerifiedPlan};

/// Small whole numbers, whose sums f32 holds.
fn value(rank: usize, index: usize) -> f32 {
    ((index * 7 + rank * 5 + index / 11) % 13) as f32
}

fn reduce(op: ReduceOp, values: impl Iterator<Item = f32>) -> f32 {
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Min => values.fold(f32::INFINITY, f32::min),
        ReduceOp::Max => values.fold(f32::NEG_INFINITY, f32::max),
        op => panic!("plans do not reduce by {op}"),
    }
}

/// What a rank must get, if every rank has `input` elements.
fn expected(collective: &str, op: ReduceOp, [rank, ranks, input]: [usize; 3]) -> Vec<f32> {
    let part = input / ranks;
    let reduced = |index| reduce(op, (0..ranks).map(|from| value(from, index)));
    match collective {
        "allreduce" => (0..input).map(reduced).collect(),
        "reducescatter" => (0..part).map(|index| reduced(rank * part + index)).collect(),
        "allgather" => (0..ranks * input).map(|index| value(index / input, index % input)).collect(),
        "alltoall" => (0..input).map(|index| value(index / part, rank * part + index % part)).collect(),
        "sendrecv" => (0..input).map(|index| value((rank + ranks - 1) % ranks, index)).collect(),
        _ => panic!("{collective}"),
    }
}

/// The outputs of all ranks, of `chunk` elements in a chunk; twice, since a call leaves what the next one finds.
fn check(algorithm: &Algorithm, setting: &Setting, chunks: &[usize]) {
    let plan = algorithm.plan(setting).unwrap();
    let proved = VerifiedPlan::new(plan, &Proof::default()).unwrap_or_else(|report| panic!("{report}"));
    let (gpu, ranks) = (&proved.plan().gpus[0], setting.ranks as usize);
    let counts = [gpu.input_chunks, gpu.output_chunks].map(|chunks| chunks as usize);
    LocalWorld::run(ranks, |comm| {
        let rank = comm.rank();
        let mut plan = LoadedPlan::load(&comm, &proved, Options::default()).unwrap();
        for &chunk in chunks.iter().chain(chunks) {
            let [given, got] = counts.map(|count| count * chunk);
            let input: Vec<f32> = (0..given).map(|index| value(rank, index)).collect();
            let output = if setting.inplace {
                let at = |count: usize| if count < given.max(got) { rank * count } else { 0 };
                let mut both = vec![f32::NAN; given.max(got)];
                both[at(given)..][..given].copy_from_slice(&input);
                plan.execute_in_place(&comm, &mut both).unwrap();
                both[at(got)..][..got].to_vec()
            } else {
                let mut output = vec![f32::NAN; got];
                plan.execute(&comm, &input, &mut output).unwrap();
                output
            };
            let right = expected(algorithm.collective, setting.op, [rank, ranks, given]);
            assert!(
                output == right,
                "{}, {:?}, in place: {}, rank {rank} of {ranks}, {chunk} elements a chunk",
                algorithm.name,
                setting.op,
                setting.inplace
            );
        }
        plan.free(&comm).unwrap();
    });
}

/// Every algorithm, out of place and, where it works, in place.
fn all(ranks: u32) -> impl Iterator<Item = (&'static Algorithm, Setting)> {
    let places = move |algorithm: &'static Algorithm| {
        let places = [false, true].into_iter().filter(|&inplace| algorithm.inplace || !inplace);
        places.map(move |inplace| (algorithm, Setting { inplace, unit_size: 48, ..Setting::new(ranks) }))
    };
    ALGORITHMS.iter().flat_map(places)
}

#[test]
fn results_are_right_at_every_size() {
    for ranks in [2, 4] {
        for (algorithm, setting) in all(ranks) {
            check(algorithm, &setting, &[4, 12, 100, 0, 1024]);
        }
    }
}

#[test]
fn every_reduction_is_right() {
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for (algorithm, setting) in all(4).filter(|(algorithm, _)| algorithm.reduces) {
            check(algorithm, &Setting { op, ..setting }, &[20]);
        }
    }
}

#[test]
fn instances_share_the_work() {
    for (algorithm, mut setting) in all(2) {
        setting.options.instances = 3;
        check(algorithm, &setting, &[4, 36]);
    }
}

/// Chunks that are no whole number of packets or turns.
#[test]
fn ragged_chunks_are_right() {
    for (algorithm, mut setting) in all(3).filter(|(algorithm, _)| !algorithm.nodes) {
        setting.options.buffer_alignment = 4;
        check(algorithm, &setting, &[1, 3, 13, 25]);
    }
}

/// Sums that depend on their order are in the same order on all ranks, and in that of the ranks if the proof says so.
#[test]
fn all_ranks_get_the_same_bits() {
    let value = |rank: usize, index: usize| 1.0 / (value(rank, index) + 0.1 * (rank + 1) as f32);
    let in_rank_order = |index: usize| (1..4).fold(value(0, index), |sum, rank| sum + value(rank, index));
    let in_rank_order: Vec<u32> = (0..256).map(|index| in_rank_order(index).to_bits()).collect();
    let mut of_rank_order = Vec::new();
    for (algorithm, mut setting) in all(4).filter(|(algorithm, _)| algorithm.collective == "allreduce") {
        setting.nodes = 4;
        let proved = VerifiedPlan::new(algorithm.plan(&setting).unwrap(), &Proof::default()).unwrap();
        let outputs = LocalWorld::run(4, |comm| {
            let mut plan = LoadedPlan::load(&comm, &proved, Options::default()).unwrap();
            let mut both: Vec<f32> = (0..256).map(|index| value(comm.rank(), index)).collect();
            match setting.inplace {
                true => plan.execute_in_place(&comm, &mut both).unwrap(),
                false => plan.execute(&comm, &both.clone(), &mut both).unwrap(),
            }
            both.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(outputs.iter().all(|bits| *bits == outputs[0]), "{}", algorithm.name);
        assert!(!proved.report().in_rank_order || outputs[0] == in_rank_order, "{}", algorithm.name);
        of_rank_order.extend(proved.report().in_rank_order.then_some(algorithm.name));
    }
    of_rank_order.dedup();
    // Of four nodes with a rank each, the order of the nodes is that of the ranks.
    let expected =
        ["one-shot", "push-two-shot", "hierarchical", "switch"].map(|name| format!("{name}-all-reduce"));
    assert_eq!(of_rank_order, expected);
}
