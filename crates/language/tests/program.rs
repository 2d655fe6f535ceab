//! What programs refuse, what they number, and what they remember.

use antiphon_language::{
    Blocks, BufferType, Chunk, Collective, DataSync, LanguageError, Options, Program, ReduceOp,
    ThreadBlockGroup,
};
use antiphon_plan::{OpKind, REDUCE_OPS, Rank};

fn program() -> Program {
    Program::new("test", &Collective::custom("test", 2, 4, 4), Options::default())
}

fn input(program: &Program, rank: u32, index: u64) -> Chunk {
    program.rank(rank).unwrap().input().chunk(index).unwrap()
}

#[test]
fn ranks_must_exist() {
    let program = program();
    let missing = LanguageError::NoSuchRank { what: "MemoryChannel", rank: 2, num_ranks: 2 };
    assert_eq!(program.memory_channel(2, 0).err(), Some(missing));
    assert!(program.port_channel(0, 2).is_err() && program.rank(2).is_err());
    assert!(program.semaphore(2, 0).is_err() && program.switch_channel(&[0, 2], BufferType::Input).is_err());
}

#[test]
fn chunks_must_be_in_their_buffer() {
    let program = program();
    let rank = program.rank(0).unwrap();
    assert!(rank.input().chunks(4..4).is_ok(), "there may be none");
    assert!(matches!(rank.input().chunks(2..5), Err(LanguageError::BeyondBuffer { size: 4, end: 5, .. })));
    #[expect(clippy::reversed_empty_ranges, reason = "that is the mistake")]
    let backward = rank.input().chunks(3..2);
    assert_eq!(backward, Err(LanguageError::BackwardRange { start: 3, end: 2 }));
    assert!(rank.input().chunk(u64::MAX).is_err());
    let (first, second) = (rank.scratch(3).unwrap(), rank.scratch(2).unwrap());
    assert_eq!((first.chunks(..).unwrap().index, second.chunks(1..).unwrap().index), (0, 4));
    assert!(second.chunks(0..3).is_err() && rank.scratch(u64::MAX).is_err());
}

#[test]
fn operations_check_whose_chunks_they_get_and_how_large() {
    let program = program();
    let channel = program.memory_channel(1, 0).unwrap();
    let (own, theirs) = (input(&program, 0, 0), input(&program, 1, 0));
    let two = program.rank(1).unwrap().input().chunks(0..2).unwrap();
    let wrong = |what, rank, expected| LanguageError::WrongRank { op: "put", what, rank, expected };
    assert_eq!(channel.put(own, own, 0), Err(wrong("dst_chunk", 0, 1)));
    assert_eq!(channel.put(theirs, theirs, 0), Err(wrong("src_chunk", 1, 0)));
    let sizes = LanguageError::SizesDiffer { op: "put", what: "dst_chunk", size: 2, expected: 1 };
    assert_eq!(channel.put(two, own, 0), Err(sizes));
    let plain = channel.put_packets(theirs, own, 0);
    assert!(matches!(plain, Err(LanguageError::NotScratch { buffer: BufferType::Input, .. })));
    let nothing = program.rank(0).unwrap().reduce(own, &[], 0, own, ReduceOp::Sum);
    assert_eq!(nothing, Err(LanguageError::NothingToReduce));
    assert!(program.plan().unwrap().gpus[0].threadblocks.is_empty(), "what was refused left nothing");
}

#[test]
fn plans_reduce_by_the_operators_they_know() {
    for op in ReduceOp::ARITHMETIC {
        let program = program();
        let (to, from) = (input(&program, 0, 0), input(&program, 0, 1));
        program.rank(0).unwrap().reduce(to, &[from], 0, to, op).unwrap();
        let checked = program.plan().unwrap().check().map_err(|error| error.to_string());
        match REDUCE_OPS.contains(&op) {
            true => assert_eq!(checked, Ok(())),
            false => {
                let text = checked.unwrap_err();
                assert!(text.contains(&format!("reduces by {op}, but plans know sum, min, max")), "{text}");
            }
        }
    }
}

#[test]
fn switch_channels_check_members_and_buffers() {
    let program = Program::new("test", &Collective::custom("test", 3, 4, 4), Options::default());
    let channel = program.switch_channel(&[0, 1], BufferType::Scratch).unwrap();
    assert!(matches!(channel.at_rank(2).err(), Some(LanguageError::NotAMember { rank: 2, .. })));
    let (own, outside) = (input(&program, 0, 0), input(&program, 2, 0));
    let early = channel.reduce(0, own, 0..1, 0, ReduceOp::Sum);
    assert!(matches!(early, Err(LanguageError::BeyondSwitchBuffer { size: 0, .. })), "no scratch yet");
    for rank in 0..2 {
        program.rank(rank).unwrap().scratch(1).unwrap();
    }
    channel.reduce(0, own, 0..1, 0, ReduceOp::Sum).unwrap();
    assert!(channel.reduce(0, outside, 0..1, 0, ReduceOp::Sum).is_err());
    let no_end = channel.reduce(2, own, 0..1, 0, ReduceOp::Sum);
    assert!(matches!(no_end, Err(LanguageError::NoSwitchEnd { rank: 2, .. })));
}

#[test]
fn groups_have_each_block_once_and_share_in_their_order() {
    assert!(matches!(
        ThreadBlockGroup::new([0, 1, 0]),
        Err(LanguageError::DuplicateThreadBlock { tb: 0, .. })
    ));
    let (program, group) = (program(), ThreadBlockGroup::new([2, 1]).unwrap());
    let rank = program.rank(0).unwrap();
    let (dst, src) = (rank.output().chunk(0).unwrap(), rank.input().chunk(0).unwrap());
    rank.copy(dst, src, &group).unwrap();
    let foreign = rank.copy(dst, src, Blocks::Member(5, &group));
    assert_eq!(foreign, Err(LanguageError::NotInGroup { tb: 5, group: vec![2, 1] }));
    let plan = program.plan().unwrap();
    let share = |tb: usize| match &plan.gpus[0].threadblocks[tb].ops[..] {
        [op] => match &op.kind {
            OpKind::Copy(copy) => copy.group.map(|share| (share.tb_id, share.tbg_size)),
            _ => None,
        },
        _ => None,
    };
    assert_eq!([share(0), share(1), share(2)], [None, Some((1, 2)), Some((0, 2))]);
}

#[test]
fn pipelines_do_not_nest_and_end_after_an_error() {
    let program = program();
    let rank = program.rank(0).unwrap();
    let nested = program.pipeline(64, 1, || {
        rank.barrier(&[0])?;
        program.pipeline(64, 1, || Ok(()))
    });
    assert_eq!(nested, Err(LanguageError::NestedPipeline));
    rank.barrier(&[0]).unwrap();
    let ops = program.draft().gpus[0].threadblocks[0].ops.clone();
    assert_eq!(ops.iter().map(|op| op.kind.name()).collect::<Vec<_>>(), ["pipeline", "nop"]);
    assert_eq!(program.end_pipeline(), Err(LanguageError::NoPipeline));
}

#[test]
fn thread_blocks_beyond_reason_are_refused() {
    let program = program();
    let channel = program.memory_channel(1, 0).unwrap();
    let far = channel.signal(u32::MAX, DataSync::NONE);
    assert!(matches!(far, Err(LanguageError::TooMany { what: "thread block", .. })));
}

#[test]
fn a_channel_is_its_programs() {
    let (one, other) = (program(), program());
    let id = one.memory_channel(1, 0).unwrap().id();
    let foreign = antiphon_language::MemoryChannel::existing(&other, 1, 0, id);
    assert_eq!(foreign.err(), Some(LanguageError::ForeignChannel { rank: 0 }));
}

#[test]
fn the_plan_can_be_made_again_and_again() {
    let mut program =
        Program::new("twice", &Collective::all_gather(2, 1), Options { instances: 3, ..Options::default() });
    for (own, peer) in [(0, 1), (1, 0)] {
        let channel = program.memory_channel(peer, own).unwrap();
        channel.signal(0, DataSync::BOTH).unwrap();
        channel.wait(0, DataSync::BOTH).unwrap();
    }
    let plan = program.plan().unwrap();
    program.check_pairing().unwrap();
    assert_eq!(program.plan().unwrap(), plan);
    assert_eq!(plan.gpus[1].output_chunks, 6);
    program.options.instances = 1;
    assert_eq!(program.plan().unwrap().gpus[1].output_chunks, 2);
}

#[test]
fn operations_know_the_line_that_asked_for_them() {
    let program = program();
    let rank = program.rank(0).unwrap();
    rank.barrier(&[0, 1]).unwrap();
    let line = line!() - 1;
    program.set_origin("script.py", 7);
    rank.barrier(&[2]).unwrap();
    let plan = program.plan().unwrap();
    let of = |tb: usize| {
        let origin = plan.origin(plan.gpus[0].threadblocks[tb].ops[0].origin).unwrap();
        (origin.file.as_str(), origin.line)
    };
    assert_eq!(of(1), (file!(), line));
    assert_eq!(of(2), ("script.py", 7));
}

#[test]
fn remote_buffers_are_numbered_as_they_are_used() {
    let program = program();
    let (memory, port) = (program.memory_channel(1, 0).unwrap(), program.port_channel(1, 0).unwrap());
    let there = program.rank(1).unwrap();
    let (output, theirs) = (there.output().chunk(0).unwrap(), input(&program, 1, 0));
    port.put(output, input(&program, 0, 0), 2).unwrap();
    memory.put(theirs, input(&program, 0, 0), 2).unwrap();
    memory.put(output, input(&program, 0, 0), 1).unwrap();
    let gpu = &program.plan().unwrap().gpus[0];
    let buffers: Vec<_> = gpu.remote_buffers.iter().map(|remote| (remote.rank, remote.buffer)).collect();
    assert_eq!(buffers, [(Rank(1), BufferType::Output), (Rank(1), BufferType::Input)]);
    assert_eq!(gpu.remote_buffers[0].access_channel_types.len(), 2);
    let ids =
        |tb: usize| gpu.threadblocks[tb].remote_buffer_refs.iter().map(|refs| refs.remote_buffer_ids[0].0);
    assert_eq!((ids(2).collect::<Vec<_>>(), ids(1).collect::<Vec<_>>()), (vec![0, 1], vec![0]));
}
