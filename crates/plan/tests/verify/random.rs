//! Random small plans: the verifier and the model checker agree.

use std::cell::RefCell;

use antiphon_plan::verify::{Kind, Options, verify};
use antiphon_plan::*;
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};

use crate::oracle;

/// Two ranks with these blocks; all buffers have two chunks; a memory and a port channel each way; two semaphores.
fn plan(blocks: [&[Vec<OpKind>]; 2]) -> Plan {
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
        4 => (from(), to()).prop_map(move |(src, dst)| copy(CopyKind::Plain, src, dst)),
        2 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::Plain, memory, src, dst)),
        1 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::Plain, port, src, dst)),
        2 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::WithSignal, port, src, dst)),
        1 => (from(), remote()).prop_map(move |(src, dst)| put(PutKind::WithSignalAndFlush, port, src, dst)),
        1 => from().prop_map(move |src| copy(CopyKind::Pack, src, packets)),
        1 => to().prop_map(move |dst| copy(CopyKind::Unpack, packets, dst)),
        2 => from().prop_map(move |src| put(PutKind::Packets, memory, src, (2, 0))),
    ]
}

/// Adds what random plans hardly ever have: as much to every counter as is taken from it.
fn balanced(mut blocks: Vec<Vec<OpKind>>, at: usize) -> Vec<Vec<OpKind>> {
    for rank in 0..2 {
        for of in [ChannelType::Memory, ChannelType::Port] {
            let wait = notify(NotifyKind::Wait, of);
            let waits: usize =
                blocks[2 * rank..2 * rank + 2].iter().flatten().filter(|op| **op == wait).count();
            let signals = blocks[2 - 2 * rank..4 - 2 * rank].iter().flatten().filter(|op| match op {
                OpKind::Notify(notify) => notify.kind == NotifyKind::Signal && notify.channel_type == of,
                OpKind::Put(put) => {
                    of == ChannelType::Port && put.kind != PutKind::Plain && put.channel_type == of
                }
                _ => false,
            });
            for _ in signals.count()..waits {
                blocks[2 - 2 * rank + at % 2].extend([OpKind::Nop, notify(NotifyKind::Signal, of)]);
            }
        }
        for id in 0..2 {
            let count =
                |op| blocks[2 * rank..2 * rank + 2].iter().flatten().filter(|other| **other == op).count();
            for _ in count(semaphore(false, id))..count(semaphore(true, id)) {
                blocks[2 * rank + at % 2].extend([OpKind::Nop, semaphore(false, id)]);
            }
        }
    }
    blocks
}

/// What the model checker found in how many plans; both sides must be there for the comparison to mean anything.
#[derive(Default, Debug)]
struct Seen {
    right: usize,
    right_with_data: usize,
    /// Those in which two blocks take from one semaphore: right, and not.
    contended: [usize; 2],
    bad: std::collections::BTreeMap<String, usize>,
}

/// Whether two blocks of a rank take from one semaphore.
fn contended(plan: &Plan) -> bool {
    let takes = |block: &ThreadBlock, id| block.ops.iter().any(|op| op.kind == semaphore(true, id));
    let several =
        |gpu: &Gpu| (0..2).any(|id| gpu.threadblocks.iter().filter(|block| takes(block, id)).count() > 1);
    plan.gpus.iter().any(several)
}

/// Of every plan that the model checker can judge, the verifier says the same.
fn agree<T: std::fmt::Debug>(cases: u32, plans: impl Strategy<Value = T>, plan: impl Fn(T) -> Plan) -> Seen {
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
    let agree = TestRunner::new(config).run(&plans, |parts| {
        let plan = plan(parts);
        let report = verify(&plan, &Options::default());
        let undecided = |kind: &Kind| matches!(kind, Kind::TooLarge { .. });
        prop_assert!(!report.errors().any(|error| undecided(&error.kind)), "{}\n{}", report, plan.to_json());
        let Ok(bad) = oracle::judge(&plan) else { return Ok(()) };
        prop_assert_eq!(bad.is_none(), report.proved, "{:?}, but {}\n{}", bad, report, plan.to_json());
        let mut seen = seen.borrow_mut();
        seen.contended[usize::from(bad.is_some())] += usize::from(contended(&plan));
        let data = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
        let data = data.filter(|op| matches!(op.kind, OpKind::Copy(_) | OpKind::Put(_))).count();
        match bad {
            None => {
                seen.right += 1;
                seen.right_with_data += usize::from(data > 1);
            }
            Some(bad) => *seen.bad.entry(format!("{bad:?}")).or_default() += 1,
        }
        Ok(())
    });
    agree.unwrap_or_else(|error| panic!("{error}"));
    let seen = seen.into_inner();
    println!("{seen:?}");
    assert!(seen.right_with_data > 10 && seen.bad.values().all(|&bad| bad > 5), "{seen:?}");
    seen
}

#[test]
fn the_verifier_says_what_the_model_checker_says() {
    let blocks = (prop::collection::vec(prop::collection::vec(op(), 0..5), 4), 0..2usize);
    agree(2_000, blocks, |(blocks, at)| {
        let blocks = balanced(blocks, at);
        plan([&blocks[..2], &blocks[2..]])
    });
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
    (0..4u32, data, meets, (0..2u32, 0..2u32)).prop_map(|(kind, data, meets, (from, to))| {
        let mut ops = Vec::new();
        if kind != 1 {
            ops.push(semaphore(true, if kind == 0 { 1 } else { from }));
        }
        let nop = |meets: bool| meets.then_some(OpKind::Nop);
        ops.extend(nop(meets[0]));
        if kind != 3 {
            ops.extend([data]);
        }
        ops.extend(nop(meets[1]));
        if kind != 2 {
            ops.push(semaphore(false, if kind == 0 { 1 } else { to }));
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
    let seen = agree(2_000, blocks, |(mut own, other, at)| {
        for id in 0..2 {
            let count = |op| own.iter().flatten().filter(|other| **other == op).count();
            let (added, taken) = (count(semaphore(false, id)), count(semaphore(true, id)));
            for _ in added..taken {
                own[at].extend([OpKind::Nop, semaphore(false, id)]);
            }
            for _ in taken..added {
                own[(at + 1) % 3].extend([semaphore(true, id), OpKind::Nop]);
            }
        }
        plan([&own, &[other]])
    });
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

/// Whether some bytes of scratch are packets and plain data.
fn mixes(plan: &Plan) -> bool {
    let mut used = [Vec::new(), Vec::new()];
    for block in Block::all(plan) {
        for op in &block.get().ops {
            block.accesses(&op.kind, |access| {
                if access.buffer == BufferType::Scratch {
                    let times = if access.packets { 2 } else { 1 };
                    let bytes = times * access.chunks.start..times * access.chunks.end;
                    used[usize::from(access.packets)].extend(bytes.map(|at| (access.rank, at)));
                }
            });
        }
    }
    used[0].iter().any(|at| used[1].contains(at))
}

#[test]
fn the_same_where_packets_and_plain_data_share_scratch() {
    let seen = RefCell::new([0, 0]);
    let block = |len| prop::collection::vec(mixed(), len).prop_map(|each| each.concat());
    let blocks = ([block(1..5), block(0..3), block(0..3), block(0..1)], 0..2usize);
    let all = agree(2_000, blocks, |(blocks, at)| {
        let blocks = balanced(blocks.to_vec(), at);
        let plan = plan([&blocks[..2], &blocks[2..]]);
        if mixes(&plan) {
            let proved = verify(&plan, &Options::default()).proved;
            seen.borrow_mut()[usize::from(proved)] += 1;
        }
        plan
    });
    let seen = seen.into_inner();
    println!("{seen:?} of these mix");
    assert!(seen.iter().all(|&plans| plans > 20) && all.bad["Mistaken"] > 20, "{seen:?}");
}
