//! Whatever a plan says, the simulator ends, with times that make sense or an error.

mod builder;

use antiphon_plan::simulate::{Cluster, Lane, Simulation, play};
use antiphon_plan::{CopyKind, GroupShare, Op, OpKind, Pipeline, Plan, PutKind};
use builder::*;
use proptest::prelude::*;

const RANKS: u32 = 3;
const BLOCKS: usize = 2;

/// One operation of a kind, with numbers of which some are far too large.
#[derive(Clone, Debug)]
struct Step {
    kind: u8,
    peer: u32,
    port: bool,
    index: u64,
    size: u64,
    share: Option<(u32, u32)>,
    /// The unit and the number of chunks of the pipeline that the step is in, if it is in one.
    turns: Option<(u64, u64)>,
}

fn step() -> impl Strategy<Value = Step> {
    let number = prop_oneof![60 => 0..8u64, 1 => Just(1 << 40), 1 => Just(u64::MAX / 2)];
    let share = proptest::option::weighted(0.2, (1..4u32).prop_flat_map(|of| (0..of, Just(of))));
    let turns = proptest::option::weighted(0.2, (prop_oneof![100..5000u64, Just(u64::MAX)], number.clone()));
    (0..13u8, 0..RANKS, any::<bool>(), number.clone(), number, share, turns).prop_map(
        |(kind, peer, port, index, size, share, turns)| Step { kind, peer, port, index, size, share, turns },
    )
}

fn write(block_builder: BlockBuilder<'_>, step: &Step) {
    let of = if step.port { Port } else { Memory };
    let chunks = |buffer| (buffer, step.index, step.size);
    match step.kind {
        0 => block_builder.nop(),
        1 => block_builder.barrier(0, 2),
        2 => block_builder.semaphore(step.port),
        3 | 4 => block_builder.signal(of, step.peer),
        5 => block_builder.wait(of, step.peer),
        6 => block_builder.flush(step.peer),
        7 => block_builder.copy(CopyKind::Unpack, chunks(Output), chunks(Scratch)),
        8 => block_builder.put(of, step.peer, chunks(Output), chunks(Input)),
        9 => block_builder.put_as(PutKind::Packets, of, step.peer, chunks(Scratch), chunks(Input)),
        10 => {
            block_builder.put_as(PutKind::WithSignalAndFlush, Port, step.peer, chunks(Output), chunks(Input))
        }
        11 => block_builder.get(step.peer, chunks(Output), chunks(Input)),
        _ => block_builder.reduce_from(chunks(Output), chunks(Input), vec![(step.peer, chunks(Input))]),
    };
}

fn plan(steps: &[(u32, usize, Step)]) -> Plan {
    let mut builder = PlanBuilder::new("allreduce", RANKS, [4, 4, 4]);
    for (rank, block, step) in steps {
        builder.on(*rank, *block);
        write(builder.on(*rank, *block), step);
        let ops = &mut builder.0.gpus[*rank as usize].threadblocks[*block].ops;
        let last: &mut Op = ops.last_mut().unwrap();
        if let Some((tb_id, tbg_size)) = step.share {
            let group = Some(GroupShare { tb_id, tbg_size });
            match &mut last.kind {
                OpKind::Put(put) => put.group = group,
                OpKind::Copy(copy) => copy.group = group,
                OpKind::Reduce(reduce) => reduce.group = group,
                _ => {}
            }
        }
        if let Some((unit_size, num_chunks)) = step.turns {
            let inner = std::mem::replace(last, OpKind::Nop.into());
            *last = OpKind::Pipeline(Pipeline { unit_size, num_chunks, ops: vec![inner] }).into();
        }
    }
    builder.0
}

fn makes_sense(done: &Simulation) {
    assert!(done.time_ns.is_finite() && done.time_ns >= done.launch_ns);
    for span in &done.spans {
        assert!(0.0 <= span.start_ns && span.start_ns <= span.end_ns && span.end_ns <= done.end_ns());
        if let Some(previous) = span.previous {
            let previous = &done.spans[previous.index()];
            assert!(previous.end_ns <= span.start_ns && previous.place.rank == span.place.rank);
        }
    }
    for arrow in &done.arrows {
        assert!(arrow.sent_ns <= arrow.arrived_ns);
    }
    for link in &done.links {
        assert!((0.0..=1.0 + 1e-9).contains(&link.busy), "{link:?}");
    }
    let path = done.critical_path();
    assert!(path.iter().all(|step| step.from_ns <= step.until_ns));
    assert!(path.windows(2).all(|pair| pair[0].until_ns == pair[1].from_ns));
    if let Some(first) = path.first() {
        assert_eq!((first.from_ns, done.spans[first.span.index()].lane), (0.0, Lane::Block));
    }
}

proptest! {
    #[test]
    fn it_ends_with_times_that_make_sense_or_an_error(
        steps in proptest::collection::vec((0..RANKS, 0..BLOCKS, step()), 0..24),
        chunk in prop_oneof![6 => 0..1000u64, 1 => Just(1 << 12), 1 => Just(u64::MAX / 64)],
        spec in prop_oneof![Just("h200x4"), Just("h200x2-nodes2"), Just(r#"{"base": "h200x4", "link": {"multicast": true}}"#)],
    ) {
        let plan = plan(&steps);
        let cluster = Cluster::from_spec(spec).unwrap();
        if let Ok((done, waiting)) = play(&plan, &cluster, chunk * 64) {
            makes_sense(&done);
            prop_assert_eq!(&play(&plan, &cluster, chunk * 64).unwrap(), &(done, waiting), "the same again");
        }
    }
}
