//! What becomes of a program's operations on the way to its plan.

use antiphon_language::{
    BufferType, Chunk, Collective, DataSync, MemoryChannel, Options, Plan, Program, ReduceOp, Result,
};
use antiphon_plan::{OpKind, PlanError, passes};

const NONE: DataSync = DataSync::NONE;
const BEFORE: DataSync = DataSync::BEFORE;
const AFTER: DataSync = DataSync::AFTER;
const BOTH: DataSync = DataSync::BOTH;

/// Three ranks with eight chunks each of input, output and scratch; what is tested is thread block 0 of rank 0.
struct Bench {
    program: Program,
    scratch: [antiphon_language::Buffer; 3],
}

impl Bench {
    fn new(options: Options) -> Self {
        let program = Program::new("bench", &Collective::custom("test", 3, 8, 8), options);
        let scratch = [0, 1, 2].map(|rank| program.rank(rank).unwrap().scratch(8).unwrap());
        Bench { program, scratch }
    }

    fn input(&self, rank: u32, index: u64) -> Chunk {
        self.program.rank(rank).unwrap().input().chunk(index).unwrap()
    }

    fn output(&self, rank: u32, index: u64) -> Chunk {
        self.program.rank(rank).unwrap().output().chunk(index).unwrap()
    }

    fn scratch(&self, rank: usize, index: u64) -> Chunk {
        self.scratch[rank].chunk(index).unwrap()
    }

    fn channel(&self, dst: u32) -> MemoryChannel<'_> {
        self.program.memory_channel(dst, 0).unwrap()
    }

    fn plan(&self) -> Plan {
        self.program.plan_unpaired().unwrap()
    }
}

fn names(plan: &Plan) -> Vec<String> {
    let blocks = &plan.gpus[0].threadblocks;
    blocks.first().map_or(Vec::new(), |block| block.ops.iter().map(|op| show(&op.kind)).collect())
}

fn show(op: &OpKind) -> String {
    match op {
        OpKind::Pipeline(pipeline) => {
            let inner: Vec<_> = pipeline.ops.iter().map(|op| show(&op.kind)).collect();
            format!("pipeline({})", inner.join(" "))
        }
        _ => op.name().to_owned(),
    }
}

fn becomes(body: impl FnOnce(&Bench) -> Result<()>, expected: &str) {
    let bench = Bench::new(Options { auto_sync: false, ..Options::default() });
    body(&bench).unwrap();
    assert_eq!(names(&bench.plan()).join(" "), expected);
}

#[test]
fn signals_of_different_channels_happen_at_once() {
    becomes(
        |b| {
            b.channel(1).signal(0, NONE)?;
            b.channel(2).signal(0, NONE)
        },
        "signal",
    );
}

#[test]
fn signals_of_one_channel_stay_two() {
    becomes(
        |b| {
            let channel = b.channel(1);
            channel.signal(0, NONE)?;
            channel.signal(0, NONE)
        },
        "signal signal",
    );
}

#[test]
fn threads_meet_once_between_neighbours() {
    let both = |b: &Bench| {
        let channel = b.channel(1);
        channel.signal(0, BOTH)?;
        channel.wait(0, BOTH)
    };
    becomes(both, "nop signal nop wait nop");
    let bench = Bench::new(Options { instr_fusion: false, ..Options::default() });
    both(&bench).unwrap();
    assert_eq!(names(&bench.plan()).join(" "), "nop signal nop nop wait nop");
}

#[test]
fn a_barrier_is_where_threads_meet() {
    becomes(
        |b| {
            b.program.rank(0)?.barrier(&[0])?;
            b.program.rank(0)?.barrier(&[0, 1])?;
            b.channel(1).signal(0, BEFORE)
        },
        "barrier signal",
    );
}

#[test]
fn a_pipeline_begins_with_its_first_operation_and_ends_with_its_last() {
    let body = |b: &Bench| {
        b.program.rank(0)?.copy(b.output(0, 0), b.input(0, 0), 0)?;
        b.program.rank(0)?.barrier(&[0])
    };
    becomes(
        |b| {
            b.program.rank(0)?.barrier(&[0])?;
            b.program.pipeline(64, 1, || body(b))?;
            b.program.rank(0)?.barrier(&[0])
        },
        "nop pipeline(copy nop)",
    );
    becomes(
        |b| {
            b.channel(1).signal(0, BOTH)?;
            b.program.pipeline(64, 1, || b.channel(2).wait(0, BEFORE))
        },
        "nop signal pipeline(nop wait)",
    );
}

#[test]
fn a_pipeline_is_fused_inside_wherever_it_stands() {
    becomes(
        |b| {
            let rank = b.program.rank(0)?;
            rank.barrier(&[0])?;
            b.program.pipeline(64, 1, || {
                rank.barrier(&[0])?;
                rank.reduce(b.input(0, 0), &[b.input(0, 1)], 0, b.output(0, 0), ReduceOp::Sum)?;
                b.channel(1).put(b.output(1, 0), b.output(0, 0), 0)
            })
        },
        "pipeline(nop res)",
    );
}

#[test]
fn a_reduction_reads_from_many_and_sends_to_many() {
    let bench = Bench::new(Options::default());
    let own = bench.input(0, 0);
    let channels = [bench.channel(1), bench.channel(2)];
    for (peer, channel) in [1, 2].into_iter().zip(&channels) {
        channel.reduce(own, &[bench.input(peer, 0)], 0, own, ReduceOp::Max).unwrap();
    }
    for (peer, channel) in [1, 2].into_iter().zip(&channels) {
        channel.put(bench.output(peer, 3), own, 0).unwrap();
    }
    let plan = bench.plan();
    let [op] = &plan.gpus[0].threadblocks[0].ops[..] else { panic!("{:?}", names(&plan)) };
    let OpKind::Reduce(reduce) = &op.kind else { panic!("{}", op.kind.name()) };
    assert_eq!((reduce.name(), reduce.op), ("rres", ReduceOp::Max));
    assert_eq!((reduce.src.len(), reduce.remote_src.len(), reduce.remote_dst.len()), (1, 2, 2));
}

#[test]
fn packets_are_reduced_kept_and_sent_in_one() {
    becomes(
        |b| {
            let rank = b.program.rank(0)?;
            rank.reduce_packets(b.input(0, 0), &[b.scratch(0, 0)], 0, b.input(0, 0), ReduceOp::Sum)?;
            rank.copy_packets(b.scratch(0, 1), b.input(0, 0), 0)?;
            b.channel(1).read_put_packets(b.scratch(1, 0), b.scratch(0, 1), 0)?;
            b.channel(2).put_packets(b.scratch(2, 0), b.input(0, 0), 0)
        },
        "recspkt",
    );
}

#[test]
fn what_another_kind_of_channel_sends_is_not_taken_in() {
    becomes(
        |b| {
            let rank = b.program.rank(0)?;
            rank.reduce(b.input(0, 0), &[b.input(0, 1)], 0, b.output(0, 0), ReduceOp::Sum)?;
            b.program.port_channel(1, 0)?.put(b.output(1, 0), b.output(0, 0), 0)
        },
        "re put",
    );
}

#[test]
fn the_switch_stores_where_the_broadcast_says() {
    let bench = Bench::new(Options::default());
    let channel = bench.program.switch_channel(&[0, 1, 2], BufferType::Input).unwrap();
    let view = channel.at_rank(0).unwrap();
    view.reduce(bench.input(0, 0), 0..1, 0, ReduceOp::Sum).unwrap();
    view.broadcast(bench.input(0, 0), 5..6, 0).unwrap();
    let plan = bench.plan();
    let OpKind::SwitchReduceBroadcast(op) = &plan.gpus[0].threadblocks[0].ops[0].kind else {
        panic!("{:?}", names(&plan));
    };
    assert_eq!((op.src.index, op.dst.index), (0, 5));
}

#[test]
fn signals_and_waits_must_match_pair_by_pair() {
    let bench = Bench::new(Options::default());
    let line = line!() + 1;
    bench.channel(1).signal(0, NONE).unwrap();
    let back = bench.program.memory_channel(0, 1).unwrap();
    let unpaired = passes::check_pairing(&bench.program.draft());
    let Err(error @ PlanError::Pairing { signals: 1, waits: 0, .. }) = &unpaired else {
        panic!("{unpaired:?}")
    };
    assert!(error.to_string().ends_with(&format!("; the signals are made at {}:{line}", file!())), "{error}");
    assert!(bench.program.check_pairing().is_err_and(|found| found.to_string() == error.to_string()));
    // In a loop it counts once, and a relaxed wait is one too.
    bench.program.pipeline(64, 4, || back.relaxed_wait(0, AFTER)).unwrap();
    bench.program.plan().unwrap();
    // A port channel's signal is not for a memory channel's wait, and behind a put it is one.
    let port = bench.program.port_channel(1, 0).unwrap();
    port.put_with_signal(bench.output(1, 0), bench.input(0, 0), 0).unwrap();
    back.wait(0, NONE).unwrap();
    assert!(bench.program.plan().is_err());
}

#[test]
fn instances_are_blocks_with_channels_chunks_and_barriers_of_their_own() {
    let bench = Bench::new(Options { instances: 2, ..Options::default() });
    bench.channel(2);
    bench.channel(1).put(bench.output(1, 3), bench.input(0, 2), 1).unwrap();
    bench.program.rank(0).unwrap().barrier(&[0, 1]).unwrap();
    let plan = bench.plan();
    let gpu = &plan.gpus[0];
    assert_eq!((gpu.input_chunks, gpu.scratch_chunks, gpu.threadblocks.len()), (16, 16, 4));
    let peers: Vec<_> = gpu.peers(antiphon_plan::ChannelType::Memory).iter().map(|peer| peer.0).collect();
    assert_eq!(peers, [2, 2, 1, 1]);
    for (instance, block) in [(0, &gpu.threadblocks[2]), (1, &gpu.threadblocks[3])] {
        assert_eq!((block.id, block.channels[0].channel_ids[0].0), (2 + instance, 2 + instance));
        let OpKind::Put(put) = &block.ops[0].kind else { panic!("{:?}", block.ops) };
        let instance = u64::from(instance);
        assert_eq!((put.src[0].index, put.dst[0].index), (4 + instance, 6 + instance));
        let OpKind::Barrier { barrier, num_threadblocks: 2 } = block.ops[1].kind else { panic!() };
        assert_eq!(u64::from(barrier.0), instance);
    }
}

#[test]
fn instances_beyond_reason_are_refused() {
    let far = |instances| Options { instances, ..Options::default() };
    for options in [far(u32::MAX), far(65_537)] {
        let bench = Bench::new(options);
        bench.program.rank(0).unwrap().copy(bench.output(0, 0), bench.input(0, 0), 0).unwrap();
        assert!(bench.program.plan().is_err());
    }
    let bench = Bench::new(far(65_536));
    bench.program.rank(0).unwrap().copy(bench.output(0, 0), bench.input(0, 0), 100).unwrap();
    assert!(bench.program.plan().is_err(), "101 blocks, 65,536 times");
    assert!(Bench::new(far(0)).program.plan().is_ok());
}
