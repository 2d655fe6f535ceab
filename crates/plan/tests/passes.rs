//! The passes on plans at random, beside the obvious way to say what they do.

use antiphon_plan::{
    BufferType, Copy, CopyKind, Gpu, LocalChunk, OpKind, Plan, Protocol, Rank, ThreadBlock,
    passes::{ReplicationPolicy, insert_dependency_sync, replicate},
};
use proptest::prelude::*;

const CHUNKS: u64 = 12;

/// Copies of chunks `(source, destination, size)` in one buffer.
fn plan(copies: &[(u64, u64, u64)]) -> Plan {
    let chunk = |index, size| LocalChunk { buffer: BufferType::Input, index, size };
    let copy = |&(src, dst, size): &(u64, u64, u64)| {
        let (src, dst) = (chunk(src, size), chunk(dst, size));
        OpKind::Copy(Copy { kind: CopyKind::Plain, src, dst, group: None }).into()
    };
    let ops = copies.iter().map(copy).collect();
    let block = ThreadBlock { id: 0, ops, channels: Vec::new(), remote_buffer_refs: Vec::new() };
    let gpu = Gpu {
        id: Rank(0),
        input_chunks: CHUNKS,
        output_chunks: 0,
        scratch_chunks: 0,
        threadblocks: vec![block],
        channels: Vec::new(),
        remote_buffers: Vec::new(),
        semaphores: Vec::new(),
    };
    Plan {
        name: None,
        collective: "custom".into(),
        protocol: Protocol::Simple,
        inplace: false,
        reuse_resources: false,
        gpus: vec![gpu],
        num_threads_per_block: 1024,
        use_double_scratch_buffer: false,
        buffer_alignment: 16,
        min_message_size: 0,
        max_message_size: u64::MAX,
        origins: Vec::new(),
    }
}

/// Before which copies the threads must meet, chunk by chunk: each chunk remembers which thread block accessed it last, and
/// whether that was a write.
fn meetings(copies: &[(u64, u64, u64)]) -> Vec<bool> {
    let mut last = [None::<(usize, bool)>; CHUNKS as usize];
    let mut meets = Vec::new();
    for (owner, &(src, dst, size)) in copies.iter().enumerate() {
        meets.push(false);
        for (start, write) in [(src, false), (dst, true)] {
            let touched = start as usize..(start + size) as usize;
            let other =
                |at: &Option<(usize, bool)>| at.is_some_and(|(who, wrote)| who != owner && (write || wrote));
            if last[touched.clone()].iter().any(other) {
                last = [None; CHUNKS as usize];
                meets[owner] = true;
            }
            last[touched].fill(Some((owner, write)));
        }
    }
    meets
}

fn copies() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    let copy = (0..=4u64).prop_flat_map(|size| (0..=CHUNKS - size, 0..=CHUNKS - size, Just(size)));
    proptest::collection::vec(copy, 0..12)
}

proptest! {
    #[test]
    fn threads_meet_between_copies_that_touch_the_same_chunks(copies in copies()) {
        let ordered = insert_dependency_sync(plan(&copies));
        let mut expected = Vec::new();
        for meets in meetings(&copies) {
            expected.extend(meets.then_some("nop"));
            expected.push("copy");
        }
        let names: Vec<_> = ordered.gpus[0].threadblocks[0].ops.iter().map(|op| op.kind.name()).collect();
        prop_assert_eq!(names, expected);
    }

    /// Together, instances touch exactly the finer chunks that the one chunk became.
    #[test]
    fn instances_divide_chunks_without_gap_or_overlap(copies in copies(), instances in 1..5u32) {
        let replicated = replicate(plan(&copies), instances, ReplicationPolicy::Interleaved).unwrap();
        prop_assert!(replicated.check().is_ok());
        for (at, &(_, dst, size)) in copies.iter().enumerate() {
            let mut touched: Vec<u64> = Vec::new();
            for block in &replicated.gpus[0].threadblocks {
                let OpKind::Copy(copy) = &block.ops[at].kind else { panic!("{:?}", block.ops[at]) };
                touched.extend(copy.dst.index..copy.dst.index + copy.dst.size);
            }
            touched.sort_unstable();
            let n = u64::from(instances);
            prop_assert_eq!(touched, (dst * n..(dst + size) * n).collect::<Vec<_>>());
        }
    }
}
