//! Untrusted plan files: any file gives a typed error or a result, in bounded time, and never a panic or
//! an access outside a buffer. The test runs the fuzzer's target on its corpus, and on variations for a bounded time.

#[path = "../fuzz/untrusted.rs"]
mod untrusted;

use std::{fs, path::PathBuf};

use untrusted::{Came, Numbers, mutated, receive};

/// The fuzzer's corpus, in order.
fn corpus() -> Vec<PathBuf> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/plan_file");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

/// What the fuzzer begins with is executed; what it found (`found-*`) does no harm any more.
#[test]
fn the_corpus_is_executed() {
    let mut found = 0;
    for file in corpus() {
        let came = receive(&fs::read(&file).unwrap());
        let is_found = file.file_name().unwrap().to_str().unwrap().starts_with("found-");
        assert!(is_found || matches!(came, Came::Executed { .. }), "{}: {came:?}", file.display());
        found += usize::from(is_found);
    }
    assert!(found < corpus().len() / 2, "{found} found");
}

#[test]
fn mutated_plans_do_no_harm() {
    let (mut numbers, mut ways) = (Numbers(1), [0; 4]);
    for file in corpus() {
        let text = fs::read(file).unwrap();
        for round in 0..100 {
            // Some are changed more than once.
            let changed = (0..=round % 3).fold(text.clone(), |text, _| mutated(&text, &mut numbers));
            ways[match receive(&changed) {
                Came::Nowhere => 0,
                Came::Judged => 1,
                Came::Executed { proved: false } => 2,
                Came::Executed { proved: true } => 3,
            }] += 1;
        }
    }
    assert!(ways.iter().all(|&times| times > 20), "{ways:?}: not all ways were gone");
}

/// One rank with one thread block.
fn alone(channels: &str, refs: &str, ops: &str) -> String {
    format!(
        r#"{{"name": "hostile", "collective": "custom", "protocol": "LL", "gpus": [{{"id": 0, "input_chunks": 1,
            "output_chunks": 1, "scratch_chunks": 1, "channels": [{channels}],
            "threadblocks": [{{"id": 0, "channels": [{refs}], "ops": [{ops}]}}]}}]}}"#
    )
}

/// What a few lines can ask for is refused before it takes the time or the memory.
#[test]
fn much_work_in_few_lines_is_refused() {
    let pack = r#"{"name": "cpkt", "src_buff": [{"type": "i", "index": 0, "size": 1}],
        "dst_buff": [{"type": "s", "index": 0, "size": 1}]}"#;
    let barrier = r#"{"name": "barrier", "barrier_id": 0, "num_threadblocks": 1}"#;
    for (op, chunks) in [(pack, 20_000), (barrier, 1 << 24)] {
        let context = format!(r#"{{"unit_size": 1, "num_chunks": {chunks}}}"#);
        let turns = format!(r#"{{"name": "pipeline", "iter_context": {context}, "ops": [{op}]}}"#);
        assert_eq!(receive(alone("", "", &turns).as_bytes()), Came::Judged, "{op}");
    }
    let (members, store) = (
        "0,".repeat(50_000) + "0",
        r#"{"name": "gstore", "channel_type": "switch", "src_buff": [{"rank": 0, "type": "i", "index": 0, "size": 1}],
            "dst_buff": [{"switch_channel_id": 0, "index": 0, "size": 1}]},"#,
    );
    let group = format!(r#"{{"size": 50001, "ranks": [{members}]}}"#);
    let switch = format!(r#"{{"channel_type": "switch", "buffer_type": "o", "rank_groups": [{group}]}}"#);
    let refs = r#"{"channel_type": "switch", "channel_ids": [0]}"#;
    let ops = store.repeat(1_000) + r#"{"name": "nop"}"#;
    assert_eq!(receive(alone(&switch, refs, &ops).as_bytes()), Came::Judged);
}
