//! Cache files: whole, broken, old, foreign and contended.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::time::Duration;

use antiphon_testing::{Need, need};
use antiphon_tuning::{Cache, CacheFolder, Key, MAX_FILE_BYTES, Sweep, Table, TuningError, doubling};
use rustix::fs::{CWD, FileType, Mode, mknodat};
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
    Sweep::new(CANDIDATES, doubling(1 << 10..=1 << 14)).unwrap().measure(run, |_| Ok(())).unwrap()
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
    assert!(matches!(error, TuningError::Kind { found: "a regular file", .. }), "{error}");
    let error = Cache::at("/dev/null/cache/tuning.json").put(&key("all_reduce"), &defaults()).unwrap_err();
    assert!(matches!(error, TuningError::Io { action: "open", .. }), "{error}");
}

/// What a writer opened stays what it writes to, even if another folder takes its place in between.
#[test]
fn files_are_made_in_the_folder_that_was_looked_at() {
    let around = tempfile::tempdir().unwrap();
    let (path, moved, other) = (around.path().join("a"), around.path().join("b"), around.path().join("c"));
    let folder = CacheFolder::create(&path).unwrap();
    fs::rename(&path, &moved).unwrap();
    fs::create_dir(&other).unwrap();
    symlink(&other, &path).unwrap();
    folder.replace("file", b"content").unwrap();
    folder.rename("file", "renamed").unwrap();
    folder.subfolder("inner").unwrap().replace("file", b"content").unwrap();
    assert_eq!(fs::read(moved.join("renamed")).unwrap(), b"content");
    assert_eq!(fs::read(moved.join("inner/file")).unwrap(), b"content");
    assert_eq!(fs::metadata(moved.join("inner")).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0, "nothing was made behind the link");
}

#[test]
fn a_folder_of_a_folder_is_trusted_like_it() {
    let around = tempfile::tempdir().unwrap();
    let folder = CacheFolder::create(&around.path().join("outer")).unwrap();
    let inner = folder.path("inner");
    symlink(around.path(), &inner).unwrap();
    let error = folder.subfolder("inner").unwrap_err().to_string();
    assert_eq!(error, format!("{} is a symbolic link, not a folder", inner.display()));
    fs::remove_file(&inner).unwrap();
    folder.subfolder("inner").unwrap();
    fs::set_permissions(&inner, fs::Permissions::from_mode(0o777)).unwrap();
    let error = folder.subfolder("inner").unwrap_err().to_string();
    assert!(error.starts_with(&format!("others may write {}", inner.display())), "{error}");
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

/// A cache with one table, and its folder.
fn with_a_table() -> (TempDir, Cache) {
    let (folder, cache) = cache();
    cache.put(&key("all_reduce"), &defaults()).unwrap();
    (folder, cache)
}

/// The warnings of reading and writing.
fn refusals(cache: &Cache) -> [String; 3] {
    [
        cache.get(&key("all_reduce"), &CANDIDATES).unwrap_err(),
        cache.entries().unwrap_err(),
        cache.put(&key("all_gather"), &defaults()).unwrap_err(),
    ]
    .map(|error| error.to_string())
}

#[test]
fn symbolic_links_are_not_followed_and_what_they_point_to_stays() {
    for name in ["tuning.json", "tuning.json.lock"] {
        let (folder, cache) = with_a_table();
        let target = folder.path().join("target");
        fs::write(&target, "precious").unwrap();
        let link = cache.path().with_file_name(name);
        fs::remove_file(&link).unwrap();
        symlink(&target, &link).unwrap();
        let error = cache.put(&key("all_gather"), &defaults()).unwrap_err().to_string();
        assert_eq!(error, format!("{} is a symbolic link, not a regular file", link.display()));
        assert_eq!(fs::read_to_string(target).unwrap(), "precious");
    }
    let (folder, cache) = with_a_table();
    let link = folder.path().join("link");
    symlink(cache.path().parent().unwrap(), &link).unwrap();
    for path in
        [link.join("tuning.json"), link.join("./tuning.json"), folder.path().join("link//tuning.json")]
    {
        for error in refusals(&Cache::at(path)) {
            assert_eq!(error, format!("{} is a symbolic link, not a folder", link.display()));
        }
    }
}

#[test]
fn what_is_no_regular_file_is_refused_without_waiting() {
    let (_folder, cache) = with_a_table();
    fs::remove_file(cache.path()).unwrap();
    mknodat(CWD, cache.path(), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    for error in refusals(&cache) {
        assert_eq!(error, format!("{} is a FIFO, not a regular file", cache.path().display()));
    }
    fs::remove_file(cache.path()).unwrap();
    fs::create_dir(cache.path()).unwrap();
    for error in refusals(&cache) {
        assert!(error.ends_with("is a folder, not a regular file"), "{error}");
    }
    // A file that never ends, and one that others may write at that.
    for error in refusals(&Cache::at("/dev/zero")) {
        assert!(
            error.ends_with("/dev/zero is a device, not a regular file")
                || error.contains("others may write")
        );
    }
}

#[test]
fn a_file_that_is_too_large_is_refused_before_it_is_read() {
    let (_folder, cache) = with_a_table();
    fs::File::options().write(true).open(cache.path()).unwrap().set_len(1 << 40).unwrap();
    for error in refusals(&cache) {
        assert!(
            error.ends_with(&format!("is larger than {MAX_FILE_BYTES} bytes, the most that is read")),
            "{error}"
        );
    }
}

#[test]
fn what_others_may_write_is_refused() {
    let (_folder, cache) = with_a_table();
    let folder = cache.path().parent().unwrap();
    for (path, mode, private) in
        [(cache.path(), 0o620, 0o600), (folder, 0o777, 0o700), (folder, 0o1777, 0o700)]
    {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        for error in refusals(&cache) {
            assert!(
                error.starts_with(&format!("others may write {} (its mode is", path.display())),
                "{error}"
            );
        }
        fs::set_permissions(path, fs::Permissions::from_mode(private)).unwrap();
    }
    assert_eq!(cache.get(&key("all_reduce"), &CANDIDATES).unwrap(), Some(defaults()));
}

#[test]
fn what_belongs_to_another_user_is_refused() {
    let (_folder, cache) = with_a_table();
    for path in [cache.path(), cache.path().parent().unwrap()] {
        let Some(()) = need(Need::Root, chown(path, Some(12_345), None)) else { return };
        for error in refusals(&cache) {
            assert!(error.starts_with(&format!("{} belongs to user 12345", path.display())), "{error}");
        }
        chown(path, Some(0), None).unwrap();
    }
}

#[test]
fn folders_are_created_for_the_user_alone() {
    let (folder, cache) = with_a_table();
    for name in ["new", "new/folder"] {
        let mode = fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{name}");
    }
    assert_eq!(fs::metadata(cache.path()).unwrap().permissions().mode() & 0o022, 0);
}

#[test]
fn control_characters_in_a_file_are_escaped_in_errors() {
    let (_folder, cache) = with_a_table();
    let whole = text(&cache);
    // Valid JSON that holds the character ESC, in names of several kinds.
    for (from, to) in [
        ("\"candidate\": \"one_shot\"", "\"candidate\": \"\\u001b[2J\""),
        ("\"checksum\": \"", "\"checksum\": \"\\u001b[2J"),
        ("\"from_bytes\": 0", "\"from_bytes\": \"\\u001b[2J\""),
    ] {
        let broken = whole.replacen(from, to, 1);
        assert_ne!(broken, whole);
        fs::write(cache.path(), broken).unwrap();
        let error = cache.get(&key("all_reduce"), &CANDIDATES).unwrap_err().to_string();
        assert!(error.contains("\\u{1b}[2J") && !error.contains('\u{1b}'), "{error:?}");
    }
    let odd = Key::new("\u{1b}[2J", "\u{9b}", 2, "a\nb");
    assert_eq!(odd.to_string(), r#"\u{1b}[2J of "\u{9b}" over 2 ranks on "a\nb""#);
}
