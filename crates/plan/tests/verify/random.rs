//! Random small plans: the verifier and the model checker agree.

use std::cell::RefCell;
use std::collections::BTreeMap;

use antiphon_plan::verify::{
    Expectation, Expected, Kind, Memory, Options, Report, Source, verify, verify_at,
};
use antiphon_plan::*;
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};

use crate::oracle;

/// What the thread blocks of each of two ranks do.
type Blocks = [Vec<Vec<OpKind>>; 2];

/// Two ranks with these blocks; all buffers have two chunks; a memory and a port channel each way; two semaphores.
fn plan(blocks: &Blocks) -> Plan {
    let text = r#"{"name": "random", "collective": "custom", "protocol": "LL", "gpus": []}"#;
    let mut plan = Plan::from_json(text.as_bytes()).expect("a plan");
    for rank in 0..2 {
        let peer = Rank(1 - rank);
        let types = [ChannelType::Memory, ChannelType::Port];
        let peers = |channel_type| GpuChannels::Peers { channel_type, connected_to: vec![peer] };
        let buffers = [BufferType::Input, BufferType::Output, BufferType::Scratch];
        let remote = |buffer| RemoteBuffer { rank: peer, buffer, access_channel_types: types.to_vec() };
        let block = |(id, ops): (usize, &Vec<OpKind>)| ThreadBlock {
            id: id as u32,
            ops: ops.iter().cloned().map(Op::from).collect(),
            channels: types
                .map(|channel_type| ChannelRefs { channel_type, channel_ids: vec![ChannelId(0)] })
                .to_vec(),
            remote_buffer_refs: types
                .map(|access_channel_type| RemoteBufferRefs {
                    access_channel_type,
                    remote_buffer_ids: (0..3).map(RemoteBufferId).collect(),
                })
                .to_vec(),
        };
        plan.gpus.push(Gpu {
            id: Rank(rank),
            input_chunks: 2,
            output_chunks: 2,
            scratch_chunks: 4,
            threadblocks: blocks[rank as usize].iter().enumerate().map(block).collect(),
            channels: types.map(peers).to_vec(),
            remote_buffers: buffers.map(remote).to_vec(),
            semaphores: vec![Semaphore { init_value: 0 }, Semaphore { init_value: 1 }],
        });
    }
    plan
}

fn notify(kind: NotifyKind, channel_type: ChannelType) -> OpKind {
    let channels = vec![ChannelIndex(0)];
    OpKind::Notify(Notify { kind, relaxed: false, channels, channel_type, data_sync: DataSync::NONE })
}

fn semaphore(acquire: bool, id: u32) -> OpKind {
    OpKind::Semaphore(SemaphoreOp { acquire, semaphores: vec![SemaphoreId(id)], data_sync: DataSync::NONE })
}

/// Both semaphores in one operation.
fn both(acquire: bool) -> OpKind {
    let semaphores = vec![SemaphoreId(0), SemaphoreId(1)];
    OpKind::Semaphore(SemaphoreOp { acquire, semaphores, data_sync: DataSync::NONE })
}

fn reduce(src: Vec<LocalChunk>, remote_src: Option<(u32, u64)>, dst: LocalChunk) -> OpKind {
    let remote = |(id, index)| RemoteChunk { buffer_id: RemoteBufferIndex(id), index, size: 1 };
    OpKind::Reduce(Box::new(Reduce {
        packets: false,
        src,
        remote_src: remote_src.map(remote).into_iter().collect(),
        dst,
        packet_dst: None,
        remote_dst: Vec::new(),
        channel_type: remote_src.map(|_| ChannelType::Memory),
        op: ReduceOp::Sum,
        group: None,
    }))
}

fn put(kind: PutKind, channel_type: ChannelType, from: LocalChunk, to: (u32, u64)) -> OpKind {
    let port = channel_type == ChannelType::Port;
    OpKind::Put(Put {
        kind,
        src: vec![from],
        dst: vec![RemoteChunk { buffer_id: RemoteBufferIndex(to.0), index: to.1, size: 1 }],
        channels: if port { vec![ChannelIndex(0)] } else { Vec::new() },
        channel_type,
        group: None,
    })
}

/// Plain data lies in chunks 2 and 3 of scratch, packets in 0.
fn chunk(buffer: BufferType) -> impl Strategy<Value = LocalChunk> {
    let first = if buffer == BufferType::Scratch { 2 } else { 0 };
    (0..2u64).prop_map(move |at| LocalChunk { buffer, index: first + at, size: 1 })
}

/// Mostly what has been written.
fn from() -> impl Strategy<Value = LocalChunk> {
    use BufferType::*;
    prop_oneof![12 => chunk(Input), 1 => chunk(Output), 1 => chunk(Scratch)]
}

/// Mostly what is not read.
fn to() -> impl Strategy<Value = LocalChunk> {
    use BufferType::*;
    prop_oneof![1 => chunk(Input), 6 => chunk(Output), 3 => chunk(Scratch)]
}

fn remote() -> impl Strategy<Value = (u32, u64)> {
    prop_oneof![1 => (Just(0), 0..2u64), 6 => (Just(1), 0..2u64), 3 => (Just(2), 2..4u64)]
}

fn op() -> impl Strategy<Value = OpKind> {
    let packets = LocalChunk { buffer: BufferType::Scratch, index: 0, size: 1 };
    let copy = |kind, src, dst| OpKind::Copy(Copy { kind, src, dst, group: None });
    let (memory, port) = (ChannelType::Memory, ChannelType::Port);
    prop_oneof![
        6 => Just(OpKind::Nop),
        2 => Just(OpKind::Barrier { barrier: BarrierId(0), num_threadblocks: 2 }),
        4 => Just(notify(NotifyKind::Signal, memory)),
        2 => Just(notify(NotifyKind::Wait, memory)),
        1 => Just(notify(NotifyKind::Signal, port)),
        1 => Just(notify(NotifyKind::Wait, port)),
        1 => Just(notify(NotifyKind::Flush, port)),
        2 => (0..2u32).prop_map(|id| semaphore(false, id)),
        2 => (0..2u32).prop_map(|id| semaphore(true, id)),
        1 => Just(both(true)),
        4 => (from(), to()).prop_map(move |(src, dst)| copy(CopyKind::Plain, src, dst)),
        2 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::Plain, memory, src, dst)),
        1 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::Plain, port, src, dst)),
        2 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::WithSignal, port, src, dst)),
        1 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::WithSignalAndFlush, port, src, dst)),
        1 => (from(), from(), to()).prop_map(|(one, other, dst)| reduce(vec![one, other], None, dst)),
        1 => (from(), (Just(0), 0..2u64), to()).prop_map(|(one, other, dst)| reduce(vec![one], Some(other), dst)),
        1 => from().prop_map(move |src| copy(CopyKind::Pack, src, packets)),
        1 => to().prop_map(move |dst| copy(CopyKind::Unpack, packets, dst)),
        2 => from().prop_map(move |src| put(PutKind::Packets, memory, src, (2, 0))),
    ]
}

/// How often a rank's blocks take from or add to a semaphore.
fn count(blocks: &[Vec<OpKind>], acquire: bool, id: u32) -> usize {
    let times = |op: &OpKind| match op {
        OpKind::Semaphore(op) if op.acquire == acquire => {
            op.semaphores.iter().filter(|other| other.0 == id).count()
        }
        _ => 0,
    };
    blocks.iter().flatten().map(times).sum()
}

/// Adds what random plans hardly ever have: as much to every counter as is taken from it.
fn balanced(mut blocks: Blocks, at: usize) -> Blocks {
    for rank in 0..2 {
        for of in [ChannelType::Memory, ChannelType::Port] {
            let wait = notify(NotifyKind::Wait, of);
            let waits: usize = blocks[rank].iter().flatten().filter(|op| **op == wait).count();
            let signals = blocks[1 - rank].iter().flatten().filter(|op| match op {
                OpKind::Notify(notify) => notify.kind == NotifyKind::Signal && notify.channel_type == of,
                OpKind::Put(put) => {
                    of == ChannelType::Port && put.kind != PutKind::Plain && put.channel_type == of
                }
                _ => false,
            });
            let signaller = at % blocks[1 - rank].len();
            for _ in signals.count()..waits {
                blocks[1 - rank][signaller].extend([OpKind::Nop, notify(NotifyKind::Signal, of)]);
            }
        }
        for id in 0..2 {
            let releaser = at % blocks[rank].len();
            for _ in count(&blocks[rank], false, id)..count(&blocks[rank], true, id) {
                blocks[rank][releaser].extend([OpKind::Nop, semaphore(false, id)]);
            }
        }
    }
    blocks
}

/// For each rank the first two of four blocks, and the others.
fn in_pairs(mut blocks: Vec<Vec<OpKind>>) -> Blocks {
    let others = blocks.split_off(2);
    [blocks, others]
}

/// One thread block gives another some data, and that does something with it: what they do each, from right plans.
#[derive(Clone, Debug)]
struct Handover {
    /// Through a memory channel, a port, a semaphore, or as packets; or only a signal back.
    how: usize,
    /// The rank that sends.
    rank: usize,
    /// What is given, where it goes, and where it ends.
    from: LocalChunk,
    at: u64,
    to: LocalChunk,
    /// Whether it is added to something.
    adds: Option<LocalChunk>,
    /// Whether threads meet between data and signals.
    meets: [bool; 2],
}

fn handover() -> impl Strategy<Value = Handover> {
    let input = || chunk(BufferType::Input);
    let meets = [prop::bool::weighted(0.9), prop::bool::weighted(0.9)];
    let to = prop_oneof![8 => chunk(BufferType::Output), 1 => chunk(BufferType::Input)];
    (0..5usize, 0..2usize, input(), 2..4u64, to, prop::option::weighted(0.3, input()), meets)
        .prop_map(|(how, rank, from, at, to, adds, meets)| Handover { how, rank, from, at, to, adds, meets })
}

impl Handover {
    fn append(&self, blocks: &mut [Vec<OpKind>]) {
        let (memory, port) = (ChannelType::Memory, ChannelType::Port);
        let (here, there) = (2 * self.rank, 2 * (1 - self.rank));
        let scratch = |index| LocalChunk { buffer: BufferType::Scratch, index, size: 1 };
        let copy = |kind, src, dst| OpKind::Copy(Copy { kind, src, dst, group: None });
        let taken = match self.adds {
            Some(other) => reduce(vec![other, scratch(self.at)], None, self.to),
            None => copy(CopyKind::Plain, scratch(self.at), self.to),
        };
        let nop = |meets: bool| meets.then_some(OpKind::Nop);
        let mut append =
            |block: usize, ops: Vec<Option<OpKind>>| blocks[block].extend(ops.into_iter().flatten());
        let [before, behind] = self.meets.map(nop);
        match self.how {
            0 => {
                let data = put(PutKind::Plain, memory, self.from, (2, self.at));
                append(here, vec![Some(data), before, Some(notify(NotifyKind::Signal, memory))]);
                append(there, vec![Some(notify(NotifyKind::Wait, memory)), behind, Some(taken)]);
            }
            1 => {
                append(here + 1, vec![before, Some(put(PutKind::WithSignal, port, self.from, (2, self.at)))]);
                append(there + 1, vec![Some(notify(NotifyKind::Wait, port)), behind, Some(taken)]);
            }
            2 => {
                let data = copy(CopyKind::Plain, self.from, scratch(self.at));
                append(here, vec![Some(data), before, Some(semaphore(false, 0))]);
                append(here + 1, vec![Some(semaphore(true, 0)), behind, Some(taken)]);
            }
            3 => {
                append(here, vec![before, Some(put(PutKind::Packets, memory, self.from, (2, 0)))]);
                append(there + 1, vec![Some(copy(CopyKind::Unpack, scratch(0), self.to)), behind]);
            }
            _ => {
                append(there, vec![before, Some(notify(NotifyKind::Signal, memory))]);
                append(here, vec![Some(notify(NotifyKind::Wait, memory)), behind]);
            }
        }
    }
}

/// Some of these, perhaps without one operation.
fn handovers() -> impl Strategy<Value = Blocks> {
    let missing = prop::option::weighted(0.3, (0..4usize, 0..6usize));
    (prop::collection::vec(handover(), 1..4), missing).prop_map(|(all, missing)| {
        let mut blocks = vec![Vec::new(); 4];
        all.iter().for_each(|each| each.append(&mut blocks));
        if let Some((block, op)) = missing
            && op < blocks[block].len()
        {
            blocks[block].remove(op);
        }
        in_pairs(blocks)
    })
}

/// What is changed about a plan.
#[derive(Clone, Debug)]
struct Changes {
    /// The rank's block that signals and releases what is missing.
    at: usize,
    /// For each rank, whether signals and waits through its memory channel are relaxed.
    relaxed: [[bool; 2]; 2],
    /// For each block, whether its operations stand in a pipeline.
    turned: Vec<bool>,
    /// The shares of some operations: of which block, which, and which half.
    shares: Vec<(usize, usize, u32)>,
    /// Whether launches take turns between halves of the scratch.
    double: bool,
    /// What is expected instead of what comes out: which row, and which input is in it that is not, or is not that is.
    wrong: Option<(usize, u32, u64)>,
}

fn changes() -> impl Strategy<Value = Changes> {
    let turned = prop_oneof![
        12 => Just(vec![false; 4]),
        4 => Just(vec![true; 4]),
        1 => prop::collection::vec(any::<bool>(), 4),
    ];
    let relaxed = prop_oneof![2 => Just([[false; 2]; 2]), 1 => any::<[[bool; 2]; 2]>()];
    let shares =
        prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec((0..4usize, 0..5usize, 0..2u32), 1..4)];
    let wrong = prop::option::weighted(0.15, (0..4usize, 0..2u32, 0..2u64));
    (0..2usize, relaxed, turned, shares, any::<bool>(), wrong).prop_map(
        |(at, relaxed, turned, shares, double, wrong)| Changes { at, relaxed, turned, shares, double, wrong },
    )
}

impl Changes {
    fn apply(&self, mut blocks: Blocks) -> Plan {
        for &(block, op, tb_id) in &self.shares {
            let Some(block) = blocks.iter_mut().flatten().nth(block) else { continue };
            let share = Some(GroupShare { tb_id, tbg_size: 2 });
            match block.get_mut(op) {
                Some(OpKind::Copy(copy)) => copy.group = share,
                Some(OpKind::Put(put)) => put.group = share,
                Some(OpKind::Reduce(reduce)) => reduce.group = share,
                _ => {}
            }
        }
        let mut blocks = balanced(blocks, self.at);
        let all = blocks
            .iter_mut()
            .enumerate()
            .flat_map(|(rank, of)| of.iter_mut().map(move |block| (rank, block)));
        for (number, (rank, block)) in all.enumerate() {
            for op in block.iter_mut() {
                if let OpKind::Notify(notify) = op
                    && notify.channel_type == ChannelType::Memory
                {
                    notify.relaxed = self.relaxed[rank][usize::from(notify.kind == NotifyKind::Wait)];
                }
            }
            if self.turned.get(number) == Some(&true) && !block.is_empty() {
                let ops = std::mem::take(block).into_iter().map(Op::from).collect();
                block.push(OpKind::Pipeline(Pipeline { unit_size: UNIT, num_chunks: 1, ops }));
            }
        }
        let mut plan = plan(&blocks);
        plan.buffer_alignment = UNIT;
        plan.use_double_scratch_buffer = self.double;
        plan
    }

    /// What some run delivers, or something else.
    fn expected(&self, plan: &Plan) -> Vec<Expected> {
        let mut rows = oracle::outputs(plan).unwrap_or_default();
        if let Some((row, rank, index)) = self.wrong
            && !rows.is_empty()
        {
            let at = row % rows.len();
            let (from, source) = (&mut rows[at].from, Source { rank: Rank(rank), index });
            match from.iter().position(|from| *from == source) {
                Some(there) if from.len() > 1 => _ = from.remove(there),
                _ => from.push(source),
            }
        }
        rows
    }
}

/// Bytes of the alignment, and of a turn.
const UNIT: u64 = 8;

/// What the model checker found in how many plans; both sides must be there for the comparison to mean anything.
#[derive(Default, Debug)]
struct Seen {
    right: usize,
    right_with_data: usize,
    /// Those in which two blocks take from one semaphore: right, and not.
    contended: [usize; 2],
    /// Those in which packets and plain data share bytes of scratch: right, and not.
    mixed: [usize; 2],
    /// Those that are right on a host and wrong in device memory.
    only_on_host: usize,
    /// Those that are right back to back: in launches with one scratch and with two halves.
    back_to_back: [usize; 2],
    /// What goes wrong in launches back to back.
    needs_meeting: BTreeMap<String, usize>,
    /// With outputs that are judged; those of several inputs; with relaxed signals that are waited for, which are right
    /// or would be without; with pipelines; with groups.
    right_with: BTreeMap<&'static str, usize>,
    bad_with: BTreeMap<&'static str, usize>,
    bad: BTreeMap<String, usize>,
}

/// What there is in a plan, flat.
fn ops(plan: &Plan) -> impl Iterator<Item = &OpKind> {
    let blocks = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks);
    let ops = blocks.flat_map(|block| &block.ops).flat_map(|op| match &op.kind {
        OpKind::Pipeline(pipeline) => &pipeline.ops[..],
        _ => std::slice::from_ref(op),
    });
    ops.map(|op| &op.kind)
}

/// The same with nothing relaxed.
fn strict(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    for op in plan.gpus.iter_mut().flat_map(|gpu| &mut gpu.threadblocks).flat_map(|block| &mut block.ops) {
        let ops = match &mut op.kind {
            OpKind::Pipeline(pipeline) => &mut pipeline.ops[..],
            _ => std::slice::from_mut(op),
        };
        for op in ops {
            if let OpKind::Notify(notify) = &mut op.kind {
                notify.relaxed = false;
            }
        }
    }
    plan
}

/// Whether two blocks of a rank take from one semaphore.
fn contended(plan: &Plan) -> bool {
    let takes = |block: &ThreadBlock, id| {
        let ops = block.ops.iter().flat_map(|op| match &op.kind {
            OpKind::Pipeline(pipeline) => &pipeline.ops[..],
            _ => std::slice::from_ref(op),
        });
        let ops: Vec<_> = ops.map(|op| op.kind.clone()).collect();
        count(&[ops], true, id) > 0
    };
    let several =
        |gpu: &Gpu| (0..2).any(|id| gpu.threadblocks.iter().filter(|block| takes(block, id)).count() > 1);
    plan.gpus.iter().any(several)
}

/// Whether some bytes of scratch are packets and plain data.
fn mixes(plan: &Plan) -> bool {
    let mut used = [Vec::new(), Vec::new()];
    for block in Block::all(plan) {
        for op in &block.get().ops {
            let ops = match &op.kind {
                OpKind::Pipeline(pipeline) => &pipeline.ops[..],
                _ => std::slice::from_ref(op),
            };
            for op in ops {
                block.accesses(&op.kind, |access| {
                    if access.buffer == BufferType::Scratch {
                        let times = if access.packets { 2 } else { 1 };
                        let bytes = times * access.chunks.start..times * access.chunks.end;
                        used[usize::from(access.packets)].extend(bytes.map(|at| (access.rank, at)));
                    }
                });
            }
        }
    }
    used[0].iter().any(|at| used[1].contains(at))
}

/// The same for launches back to back of a plan that is right.
fn agree_back_to_back(
    plan: &Plan,
    report: &Report,
    units: u64,
    expected: &[Expected],
    memory: Memory,
    seen: &mut Seen,
) -> Result<(), TestCaseError> {
    let launches = 2 + u8::from(plan.use_double_scratch_buffer);
    let Ok(bad) = oracle::judge_launches(plan, units, expected, memory, launches) else { return Ok(()) };
    let plan_text = || format!("{report}\n{}", plan.to_json());
    prop_assert!(bad.is_none() || !report.back_to_back, "{:?}: {:?}, but {}", memory, bad, plan_text());
    // Where packets and plain data share bytes, the verifier does not look.
    let is_right = bad.is_none() == report.back_to_back || mixes(plan);
    prop_assert!(is_right, "{:?}: right back to back, but {}", memory, plan_text());
    match bad {
        None => seen.back_to_back[usize::from(plan.use_double_scratch_buffer)] += 1,
        Some(bad) => *seen.needs_meeting.entry(format!("{bad:?}")).or_default() += 1,
    }
    Ok(())
}

/// Checks that the verifier and the model checker agree on every plan that the model checker can judge.
fn agree(cases: u32, blocks: impl Strategy<Value = Blocks>) -> Seen {
    // Other plans: PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test …
    let config = match std::env::var("PROPTEST_CASES") {
        Ok(_) => ProptestConfig { failure_persistence: None, ..ProptestConfig::default() },
        Err(_) => ProptestConfig {
            cases,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(1),
            ..ProptestConfig::default()
        },
    };
    let seen = RefCell::new(Seen::default());
    let agree = TestRunner::new(config).run(&(blocks, changes()), |(blocks, changes)| {
        let plan = changes.apply(blocks);
        let expected = changes.expected(&plan);
        let options = Options { expectation: Some(Expectation::Table(expected.clone())), ..Options::default() };
        let whole = verify(&plan, &options);
        for units in 1..3 {
            let report = verify_at(&plan, &options, units * UNIT);
            let undecided = |kind: &Kind| matches!(kind, Kind::TooLarge { .. });
            prop_assert!(!report.errors().any(|error| undecided(&error.kind)), "{}\n{}", report, plan.to_json());
            let Ok(bad) = oracle::judge_at(&plan, units, &expected, Memory::Host) else { continue };
            prop_assert_eq!(
                bad.is_none(),
                report.proved,
                "{} units: {:?}, but {}\n{}",
                units,
                bad,
                report,
                plan.to_json()
            );
            prop_assert!(bad.is_none() || !whole.proved, "{} units: {:?}\n{}", units, bad, plan.to_json());
            if let Ok(bad_on_device) = oracle::judge_at(&plan, units, &expected, Memory::Device) {
                let report = verify_at(&plan, &Options { memory: Memory::Device, ..options.clone() }, units * UNIT);
                prop_assert_eq!(
                    bad_on_device.is_none(),
                    report.proved,
                    "{} units in device memory: {:?}, but {}\n{}",
                    units,
                    bad_on_device,
                    report,
                    plan.to_json()
                );
                prop_assert!(bad.is_none() || !report.proved, "right in device memory alone\n{}", plan.to_json());
                seen.borrow_mut().only_on_host += usize::from(bad.is_none() && bad_on_device.is_some());
            }
            let mut seen = seen.borrow_mut();
            if units == 1 {
                for memory in [Memory::Host, Memory::Device] {
                    let report = verify_at(&plan, &Options { memory, ..options.clone() }, units * UNIT);
                    if report.proved {
                        agree_back_to_back(&plan, &report, units, &expected, memory, &mut seen)?;
                    }
                }
            }
            let wrong = usize::from(bad.is_some());
            seen.contended[wrong] += usize::from(contended(&plan));
            seen.mixed[wrong] += usize::from(mixes(&plan));
            let data = |op: &&OpKind| matches!(op, OpKind::Copy(_) | OpKind::Put(_) | OpKind::Reduce(_));
            let relaxed = ops(&plan).any(
                |op| matches!(op, OpKind::Notify(notify) if notify.relaxed && notify.kind == NotifyKind::Wait),
            );
            let with = [
                ("values", !expected.is_empty()),
                ("sums", expected.iter().any(|row| row.from.len() > 1)),
                // Only what is relaxed is wrong about it.
                ("relaxed", relaxed && (bad.is_none() || oracle::judge_at(&strict(&plan), units, &expected, Memory::Host) == Ok(None))),
                ("pipeline", changes.turned.contains(&true) && ops(&plan).filter(data).count() > 1),
                ("group", !changes.shares.is_empty() && ops(&plan).filter(data).count() > 1),
            ];
            let of = if bad.is_none() { &mut seen.right_with } else { &mut seen.bad_with };
            with.into_iter().for_each(|(what, has)| *of.entry(what).or_default() += usize::from(has));
            match bad {
                None => {
                    seen.right += 1;
                    seen.right_with_data += usize::from(ops(&plan).filter(data).count() > 1);
                }
                Some(bad) => *seen.bad.entry(format!("{bad:?}")).or_default() += 1,
            }
        }
        Ok(())
    });
    agree.unwrap_or_else(|error| panic!("{error}"));
    let seen = seen.into_inner();
    println!("{seen:?}");
    seen
}

/// Whether there are more than `least` plans on both sides.
fn enough(with: &BTreeMap<impl Ord, usize>, least: usize) -> bool {
    with.values().all(|&plans| plans > least)
}

#[test]
fn the_verifier_says_what_the_model_checker_says() {
    let random = prop::collection::vec(prop::collection::vec(op(), 0..5), 4).prop_map(in_pairs);
    let seen = agree(4_000, prop_oneof![random, handovers()]);
    assert!(seen.right_with_data > 100 && seen.bad.len() == 6 && enough(&seen.bad, 50), "{seen:?}");
    assert!(enough(&seen.right_with, 50) && enough(&seen.bad_with, 50), "{seen:?}");
}

/// Some of an operation between taking and giving back, with the meetings of threads that this needs, mostly.
fn section() -> impl Strategy<Value = Vec<OpKind>> {
    let (memory, packets) =
        (ChannelType::Memory, LocalChunk { buffer: BufferType::Scratch, index: 0, size: 1 });
    let copy = |kind, src, dst| OpKind::Copy(Copy { kind, src, dst, group: None });
    let data = prop_oneof![
        6 => (from(), to()).prop_map(move |(src, dst)| copy(CopyKind::Plain, src, dst)),
        1 => from().prop_map(move |src| copy(CopyKind::Pack, src, packets)),
        1 => to().prop_map(move |dst| copy(CopyKind::Unpack, packets, dst)),
        1 => Just(notify(NotifyKind::Signal, memory)),
        1 => Just(notify(NotifyKind::Wait, memory)),
    ];
    let meets = prop::collection::vec(prop::bool::weighted(0.8), 3);
    (0..4u32, data, meets, (0..3u32, 0..3u32)).prop_map(|(kind, data, meets, (from, to))| {
        let some = |acquire, id| if id == 2 { both(acquire) } else { semaphore(acquire, id) };
        let mut ops = Vec::new();
        if kind != 1 {
            ops.push(some(true, if kind == 0 { 1 } else { from }));
        }
        let nop = |meets: bool| meets.then_some(OpKind::Nop);
        ops.extend(nop(meets[0]));
        if kind != 3 {
            ops.extend([data]);
        }
        ops.extend(nop(meets[1]));
        if kind != 2 {
            ops.push(some(false, if kind == 0 { 1 } else { to }));
        }
        ops.extend(nop(meets[2]));
        ops
    })
}

/// Three blocks of one rank with the same semaphores, and one of the other rank.
#[test]
fn the_same_where_blocks_take_from_one_semaphore() {
    let block = |sections| prop::collection::vec(section(), sections).prop_map(|each| each.concat());
    let blocks = (prop::collection::vec(block(0..3), 3), block(0..2), 0..3usize);
    let blocks = blocks.prop_map(|(mut own, other, at)| {
        for id in 0..2 {
            let (added, taken) = (count(&own, false, id), count(&own, true, id));
            for _ in added..taken {
                own[at].extend([OpKind::Nop, semaphore(false, id)]);
            }
            for _ in taken..added {
                own[(at + 1) % 3].extend([semaphore(true, id), OpKind::Nop]);
            }
        }
        [own, vec![other]]
    });
    let seen = agree(1_500, blocks);
    assert!(seen.contended.iter().all(|&plans| plans > 50), "{seen:?}");
}

/// Something goes through scratch as packets or plain, in the same bytes; of that the first half, the second or both.
fn mixed() -> impl Strategy<Value = Vec<OpKind>> {
    let copy = |kind, src, dst| OpKind::Copy(Copy { kind, src, dst, group: None });
    let half = prop_oneof![4 => Just([true, true]), 1 => Just([true, false]), 1 => Just([false, true])];
    let meets = (prop::bool::weighted(0.9), prop::bool::weighted(0.9));
    let ends = (chunk(BufferType::Input), chunk(BufferType::Output));
    let through = prop_oneof![
        3 => (0..2u64, half.clone(), ends, meets).prop_map(move |(index, half, (from, to), meets)| {
            let packets = LocalChunk { buffer: BufferType::Scratch, index, size: 1 };
            (half, [copy(CopyKind::Pack, from, packets), copy(CopyKind::Unpack, packets, to)], meets)
        }),
        2 => (0..4u64, half, (from(), to()), meets).prop_map(move |(index, half, (from, to), meets)| {
            let plain = LocalChunk { buffer: BufferType::Scratch, index, size: 1 };
            (half, [copy(CopyKind::Plain, from, plain), copy(CopyKind::Plain, plain, to)], meets)
        }),
    ];
    let through = through.prop_map(|(half, ops, meets)| {
        let ops = half.into_iter().zip(ops).zip([meets.0, meets.1]);
        let each = ops
            .filter(|((here, _), _)| *here)
            .flat_map(|((_, op), meets)| [op].into_iter().chain(meets.then_some(OpKind::Nop)));
        each.collect()
    });
    let packets = (chunk(BufferType::Input), 0..2u64)
        .prop_map(|(src, at)| vec![put(PutKind::Packets, ChannelType::Memory, src, (2, at)), OpKind::Nop]);
    prop_oneof![
        8 => through,
        1 => packets,
        1 => Just(vec![OpKind::Barrier { barrier: BarrierId(0), num_threadblocks: 2 }]),
        1 => (0..2u32, any::<bool>()).prop_map(|(id, acquire)| vec![semaphore(acquire, id), OpKind::Nop]),
        1 => Just(vec![notify(NotifyKind::Signal, ChannelType::Memory)]),
        1 => Just(vec![notify(NotifyKind::Wait, ChannelType::Memory), OpKind::Nop]),
    ]
}

#[test]
fn the_same_where_packets_and_plain_data_share_scratch() {
    let block = |len| prop::collection::vec(mixed(), len).prop_map(|each| each.concat());
    let blocks = [block(1..5), block(0..3), block(0..3), block(0..1)];
    let seen = agree(1_500, blocks.prop_map(|blocks| in_pairs(blocks.to_vec())));
    assert!(seen.mixed.iter().all(|&plans| plans > 20) && seen.bad["Mistaken"] > 20, "{seen:?}");
}

/// A rank stores plain data at the other, then packets, which announce them on a host alone; perhaps a signal does it too. The other
/// takes the packets, then the data, or stores data in their place.
fn announced() -> impl Strategy<Value = Blocks> {
    let packets = LocalChunk { buffer: BufferType::Scratch, index: 0, size: 1 };
    let data = |at| LocalChunk { buffer: BufferType::Scratch, index: at, size: 1 };
    let copy = |kind, src, dst| OpKind::Copy(Copy { kind, src, dst, group: None });
    let (memory, mostly) = (ChannelType::Memory, || prop::bool::weighted(0.9));
    let chunks = || (chunk(BufferType::Input), chunk(BufferType::Input), chunk(BufferType::Output), 2..4u64);
    let steps = move || (prop::option::of(0..3usize), 0..3u32, [mostly(), mostly(), mostly(), mostly()]);
    let side = move || {
        (chunks(), steps()).prop_map(move |((plain, packed, out, at), (signal, then, meets))| {
            let nop = |meets: bool| meets.then_some(OpKind::Nop);
            let mut sends = vec![put(PutKind::Plain, memory, plain, (2, at))];
            sends.extend(nop(meets[0]));
            sends.push(put(PutKind::Packets, memory, packed, (2, 0)));
            let mut takes = vec![copy(CopyKind::Unpack, packets, LocalChunk { index: 1 - out.index, ..out })];
            takes.extend(nop(meets[1]));
            if let Some(place) = signal {
                sends.insert(place.min(sends.len()), notify(NotifyKind::Signal, memory));
                takes.extend([notify(NotifyKind::Wait, memory)]);
                takes.extend(nop(meets[2]));
            }
            match then {
                0 => takes.push(copy(CopyKind::Plain, plain, data(at))),
                1 => takes.push(copy(CopyKind::Plain, data(at), out)),
                _ => takes.push(copy(CopyKind::Plain, data(5 - at), out)), // look-alikes, which nobody wrote
            }
            sends.extend(nop(meets[3]));
            (sends, takes)
        })
    };
    (side(), prop::option::of(side())).prop_map(|((sends, takes), other)| {
        let (back, gets) = other.unwrap_or_default();
        [vec![sends, gets], vec![takes, back]]
    })
}

#[test]
fn the_same_where_only_packets_announce_data() {
    let seen = agree(600, announced());
    assert!(seen.only_on_host > 100 && seen.right - seen.only_on_host > 20, "{seen:?}");
}
