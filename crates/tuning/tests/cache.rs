//! Cache files: whole, broken, old, foreign and contended.

use std::fs;
use std::time::Duration;

use antiphon_tuning::{Cache, Key, Plan, Table, TuningError, doubling};
use tempfile::TempDir;

const CANDIDATES: [&str; 2] = ["one_shot", "two_shot"];

fn key(operation: &str) -> Key {
    Key::new(operation, "bf16", 8, "8x H200")
}

/// A measured table.
fn measured() -> Table {
    let run = |candidate: usize, bytes: usize| {
        let nanoseconds = [1_000 + bytes, 4_000 + bytes / 2][candidate];
        Ok::<_, TuningError>(Some(Duration::from_nanos(nanoseconds as u64)))
    };
    Plan::new(CANDIDATES, doubling(1 << 10..=1 << 14)).unwrap().measure(run, |_| Ok(())).unwrap()
}

fn defaults() -> Table {
    Table::from_thresholds(CANDIDATES, [(0, 0), (4_096, 1)]).unwrap()
}

/// A cache in a folder of its own, which goes away with the first value.
fn cache() -> (TempDir, Cache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path().join("new/folder/tuning.json"));
    (folder, cache)
}

/// A cache whose file has this text.
fn cache_with(text: &str) -> (TempDir, Cache) {
    let (folder, cache) = cache();
    fs::create_dir_all(cache.path().parent().unwrap()).unwrap();
    fs::write(cache.path(), text).unwrap();
    (folder, cache)
}

fn text(cache: &Cache) -> String {
    fs::read_to_string(cache.path()).unwrap()
}

#[test]
fn remembers_tables_with_their_measurements() {
    let (_folder, cache) = cache();
    assert_eq!(cache.get(&key("all_reduce"), &CANDIDATES).unwrap(), None);
    assert_eq!(cache.entries().unwrap().len(), 0);
    cache.put(&key("all_reduce"), &measured()).unwrap();
    cache.put(&key("all_gather"), &defaults()).unwrap();
    assert_eq!(cache.get(&key("all_reduce"), &CANDIDATES).unwrap(), Some(measured()));
    assert_eq!(cache.get(&key("all_gather"), &CANDIDATES).unwrap(), Some(defaults()));
    assert_eq!(cache.get(&Key { world_size: 4, ..key("all_reduce") }, &CANDIDATES).unwrap(), None);

    let entries: Vec<_> = cache.entries().unwrap().into_iter().map(Result::unwrap).collect();
    assert_eq!((&entries[0].key, &entries[1].key), (&key("all_reduce"), &key("all_gather")));
    assert_eq!(entries[0].table.rows()[4].timings[1].unwrap().samples, 9);
    assert!(entries[0].recorded_unix_s > 1_700_000_000);
}

#[test]
fn a_later_table_replaces_an_earlier_one() {
    let (_folder, cache) = cache();
    cache.put(&key("all_reduce"), &defaults()).unwrap();
    cache.put(&key("all_reduce"), &measured()).unwrap();
    assert_eq!(cache.entries().unwrap().len(), 1);
    assert_eq!(cache.get(&key("all_reduce"), &CANDIDATES).unwrap(), Some(measured()));
}

#[test]
fn the_file_names_things() {
    let (_folder, cache) = cache();
    cache.put(&key("all_reduce"), &measured()).unwrap();
    let text = text(&cache);
    for line in [
        r#""format": 1"#,
        r#""operation": "all_reduce""#,
        r#""winner": "two_shot""#,
        r#""median_ns": 2024.0"#,
        r#""from_bytes": 6001"#,
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    let others = fs::read_dir(cache.path().parent().unwrap()).unwrap();
    let mut names: Vec<_> = others.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["tuning.json", "tuning.json.lock"]);
}

#[test]
fn other_candidates_make_an_entry_stale() {
    let (_folder, cache) = cache();
    cache.put(&key("all_reduce"), &measured()).unwrap();
    for candidates in [&["one_shot", "two_shot", "ring"][..], &["two_shot", "one_shot"], &["one_shot"]] {
        let error = cache.get(&key("all_reduce"), candidates).unwrap_err();
        assert!(matches!(error, TuningError::Stale { .. }), "{error}");
        let what = "all_reduce of \"bf16\" over 8 ranks on \"8x H200\" was measured with other candidates";
        assert!(error.to_string().starts_with(what), "{error}");
    }
    let ring = Table::from_thresholds(["ring"], [(0, 0)]).unwrap();
    cache.put(&key("all_reduce"), &ring).unwrap();
    assert_eq!(cache.get(&key("all_reduce"), &["ring"]).unwrap(), Some(ring));
    assert_eq!(cache.entries().unwrap().len(), 1);
}

#[test]
fn a_truncated_file_is_an_error_at_any_length() {
    let (_folder, cache) = cache();
    cache.put(&key("all_reduce"), &measured()).unwrap();
    let whole = text(&cache);
    for length in (0..whole.trim_end().len()).step_by(37) {
        fs::write(cache.path(), &whole[..length]).unwrap();
        let error = cache.get(&key("all_reduce"), &CANDIDATES).unwrap_err();
        assert!(matches!(error, TuningError::CorruptFile { .. }), "{length}: {error}");
        assert!(cache.entries().is_err());
    }
}

#[test]
fn a_corrupt_file_is_set_aside_when_a_table_is_recorded() {
    for garbage in
        ["", "{", "null", "17", "\"entries\"", "{\"format\": -1}", "{\"entries\": 3}", "\u{0}\u{0}"]
    {
        let (_folder, cache) = cache_with(garbage);
        let error = cache.get(&key("all_reduce"), &CANDIDATES).unwrap_err();
        assert!(matches!(error, TuningError::CorruptFile { .. }), "{garbage:?}: {error}");
        cache.put(&key("all_reduce"), &defaults()).unwrap();
        assert_eq!(cache.get(&key("all_reduce"), &CANDIDATES).unwrap(), Some(defaults()));
        let aside = cache.path().with_file_name("tuning.json.corrupt");
        assert_eq!(fs::read_to_string(aside).unwrap(), garbage);
    }
    let (_folder, cache) = cache_with("");
    fs::write(cache.path(), [0xff, 0xfe]).unwrap();
    assert!(matches!(cache.entries(), Err(TuningError::CorruptFile { .. })));
}

#[test]
fn one_corrupt_entry_does_not_spoil_the_others() {
    let (_folder, cache) = cache();
    cache.put(&key("all_reduce"), &measured()).unwrap();
    cache.put(&key("all_gather"), &defaults()).unwrap();
    let whole = text(&cache);
    let corruptions = [
        ("\"median_ns\": 2024.0", "\"median_ns\": -2024.0", "took -2024 ns"),
        ("\"median_ns\": 2024.0", "\"median_ns\": \"fast\"", "invalid type"),
        (
            "\"candidates\": [\n          \"one_shot\",",
            "\"candidates\": [",
            "\"one_shot\" is not in the table's list",
        ),
        ("\"from_bytes\": 6001", "\"from_bytes\": 0", "sizes must ascend, but 0 bytes follow 0 bytes"),
        ("\"bytes\": 2048", "\"bytes\": 1024", "sizes must ascend, but 1024 bytes follow 1024 bytes"),
        ("\"checksum\": \"", "\"checksum\": \"0", "but its candidates have"),
    ];
    for (from, to, reason) in corruptions {
        let broken = whole.replacen(from, to, 1);
        assert_ne!(broken, whole, "{from} is not in {whole}");
        fs::write(cache.path(), broken).unwrap();
        let error = cache.get(&key("all_reduce"), &CANDIDATES).unwrap_err();
        assert!(matches!(error, TuningError::CorruptEntry { index: 0, .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!(cache.get(&key("all_gather"), &CANDIDATES).unwrap(), Some(defaults()));
        assert!(matches!(&cache.entries().unwrap()[..], [Err(_), Ok(_)]));
    }
    cache.put(&key("all_reduce"), &measured()).unwrap();
    assert!(cache.entries().unwrap().iter().all(Result::is_ok));
}

#[test]
fn what_older_files_lack_gets_a_default() {
    // No format, no time, no dtype, no choices, no winner; and fields that are not known any more.
    let (_folder, cache) = cache_with(
        r#"{
            "comment": "by hand",
            "entries": [{
                "key": {"operation": "all_reduce", "world_size": 2},
                "checksum": "CHECKSUM",
                "table": {
                    "candidates": ["one_shot", "two_shot"],
                    "rows": [
                        {"bytes": 0, "timings": [
                          {"candidate":"one_shot","median_ns":10,"min_ns":9,"max_ns":11,"samples":3},
                          {"candidate":"two_shot","median_ns":40,"min_ns":40,"max_ns":40,"samples":1}]},
                        {"bytes": 1000, "color": "blue", "timings": [
                          {"candidate":"two_shot","median_ns":65,"min_ns":60,"max_ns":70,"samples":3},
                          {"candidate":"one_shot","median_ns":110,"min_ns":100,"max_ns":120,"samples":3}]}
                    ]
                }
            }]
        }"#
        .replace("CHECKSUM", &checksum())
        .as_str(),
    );
    let old = Key { operation: "all_reduce".into(), world_size: 2, ..Key::default() };
    let table = cache.get(&old, &CANDIDATES).unwrap().unwrap();
    assert_eq!([400, 401].map(|bytes| table.choose(bytes)), [0, 1]);
    cache.put(&key("all_gather"), &defaults()).unwrap();
    assert_eq!(cache.get(&old, &CANDIDATES).unwrap(), Some(table));
}

/// The checksum of [`CANDIDATES`], as a file shows it.
fn checksum() -> String {
    let (_folder, cache) = cache();
    cache.put(&key("any"), &defaults()).unwrap();
    cache.entries().unwrap().remove(0).unwrap().checksum
}

#[test]
fn the_checksum_never_changes() {
    // If it does, every cache of every user is stale.
    assert_eq!(checksum(), "bfa0f267acf4d3df");
}

#[test]
fn choices_may_be_pinned_by_hand() {
    let (_folder, cache) = cache();
    cache.put(&key("all_reduce"), &measured()).unwrap();
    fs::write(cache.path(), text(&cache).replace("\"from_bytes\": 6001", "\"from_bytes\": 9")).unwrap();
    let table = cache.get(&key("all_reduce"), &CANDIDATES).unwrap().unwrap();
    assert_eq!([8, 9].map(|bytes| table.choose(bytes)), [0, 1]);
    assert_eq!(table.rows(), measured().rows());
}

#[test]
fn a_newer_file_is_left_alone() {
    let newer = r#"{"format": 99, "entries": []}"#;
    let (_folder, cache) = cache_with(newer);
    let errors = [
        cache.get(&key("all_reduce"), &CANDIDATES).unwrap_err(),
        cache.put(&key("all_reduce"), &defaults()).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, TuningError::NewerFormat { found: 99, supported: 1, .. }), "{error}");
        assert!(
            error.to_string().contains("has format 99, but this version reads formats up to 1"),
            "{error}"
        );
    }
    assert_eq!(text(&cache), newer);
}

#[test]
fn a_place_that_cannot_be_written_is_an_error() {
    let (folder, _) = cache();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let cache = Cache::at(file.join("tuning.json"));
    let error = cache.put(&key("all_reduce"), &defaults()).unwrap_err();
    assert!(matches!(error, TuningError::Io { action: "create the folder of", .. }), "{error}");
}

#[test]
fn writers_do_not_lose_each_others_entries() {
    const WRITERS: usize = 8;
    const EACH: usize = 4;
    let (_folder, cache) = cache();
    let name = |writer, n| key(&format!("operation {writer}.{n}"));
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (cache, name) = (&cache, &name);
            scope.spawn(move || {
                for n in 0..EACH {
                    cache.put(&name(writer, n), &measured()).unwrap();
                    // A reader in the midst of writers finds whole files only.
                    assert_eq!(cache.get(&name(writer, n), &CANDIDATES).unwrap(), Some(measured()));
                }
            });
        }
    });
    let entries = cache.entries().unwrap();
    assert_eq!(entries.len(), WRITERS * EACH);
    assert!(entries.iter().all(Result::is_ok));
}
