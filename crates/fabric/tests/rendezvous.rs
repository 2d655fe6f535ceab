//! Ranks find each other, whatever way they meet, and say precisely why when they do not.

use std::{
    os::unix::{fs::MetadataExt, net::UnixListener},
    path::Path,
    sync::{Barrier, Mutex},
    time::{Duration, Instant},
};

use antiphon_fabric::{
    Communicator, FabricError,
    rendezvous::{RendezvousError, Secret, Ticket},
};
use antiphon_testing::root;

type Builder = antiphon_fabric::Builder;

/// For meetings that come about: never reached.
const PATIENT: Duration = Duration::from_secs(15);
/// For meetings that do not.
const HASTY: Duration = Duration::from_millis(400);

fn patient() -> Builder {
    Communicator::builder().arena_bytes(1 << 16).timeout(PATIENT)
}

fn hasty() -> Builder {
    patient().timeout(HASTY)
}

/// Each of `ranks`, on a thread of its own, joins and then gives every rank its number.
fn meet(
    ranks: impl IntoIterator<Item = usize>,
    join: impl Fn(usize) -> Result<Communicator, FabricError> + Sync,
) -> Vec<Result<Vec<usize>, FabricError>> {
    let join = &join;
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || join(rank)?.exchange_objects(&rank));
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn assert_met(results: &[Result<Vec<usize>, FabricError>]) {
    for (rank, result) in results.iter().enumerate() {
        let everyone: Vec<usize> = (0..results.len()).collect();
        assert_eq!(result.as_ref().map_err(ToString::to_string), Ok(&everyone), "rank {rank}");
    }
}

fn problem<T: std::fmt::Debug>(result: Result<T, FabricError>) -> RendezvousError {
    match result {
        Err(FabricError::Rendezvous(error)) => error,
        other => panic!("expected a problem with the meeting, got {other:?}"),
    }
}

/// The ranks that did not come, as `result` says.
fn missing<T: std::fmt::Debug>(result: Result<T, FabricError>) -> Vec<usize> {
    match problem(result) {
        RendezvousError::Missing { missing, .. } => missing,
        other => panic!("expected ranks to be missing, got {other}"),
    }
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn worlds_of_any_size_join_by_ticket() {
    for world_size in [1, 2, 5, 64] {
        let ticket = Ticket::random();
        assert_met(&meet(0..world_size, |rank| patient().with_ticket(rank, world_size, &ticket)));
    }
}

#[test]
fn ranks_join_in_any_order() {
    let ticket = Ticket::random();
    assert_met(&meet(0..4, |rank| {
        std::thread::sleep(Duration::from_millis(40) * (3 - rank) as u32); // rank 0 comes last
        patient().with_ticket(rank, 4, &ticket)
    }));
}

#[test]
fn a_socket_path_is_removed_after_the_rendezvous() {
    let folder = tempfile::tempdir().unwrap();
    for world_size in [1, 2, 5] {
        let path = folder.path().join("meeting");
        assert_met(&meet(0..world_size, |rank| patient().at_path(rank, world_size, &path, "secret")));
        assert_eq!(files(folder.path()), [] as [&Path; 0]);
    }
    let path = folder.path().join("lonely");
    assert_eq!(missing(hasty().at_path(0, 2, &path, "secret")), [1]);
    assert_eq!(files(folder.path()), [] as [&Path; 0], "nor after a meeting that failed");
}

/// In processes of their own, since a process has one umask.
#[test]
fn a_socket_is_its_users_alone_whatever_the_umask() {
    const PLACE: &str = "ANTIPHON_TEST_PLACE";
    if let Some(path) = std::env::var_os(PLACE) {
        let modes = std::thread::scope(|scope| {
            let root = scope.spawn(|| hasty().at_path(0, 2, &path, "s").map(drop));
            let mut modes = Vec::new();
            while !root.is_finished() {
                let mode = std::fs::symlink_metadata(&path).ok().map(|metadata| metadata.mode() & 0o777);
                modes.extend(mode.filter(|mode| !modes.contains(mode)));
            }
            assert_eq!(missing(root.join().unwrap()), [1]);
            modes
        });
        assert_eq!(modes.last(), Some(&0o600));
        assert!(modes.iter().all(|mode| mode & 0o177 == 0), "{modes:?}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for umask in ["0000", "0022", "0777"] {
        let child = std::process::Command::new("sh")
            .args(["-c", r#"umask $0 && exec "$@""#, umask])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "a_socket_is_its_users_alone_whatever_the_umask"])
            .env(PLACE, folder.path().join("meeting"))
            .output()
            .unwrap();
        assert!(child.status.success(), "umask {umask}: {}", String::from_utf8_lossy(&child.stdout));
    }
}

#[test]
fn the_socket_of_a_killed_run_is_reclaimed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    drop(UnixListener::bind(&path).unwrap()); // closed, but the file stays: as after kill -9
    assert!(path.exists());
    assert_met(&meet(0..3, |rank| patient().at_path(rank, 3, &path, "secret")));
    assert_eq!(files(folder.path()), [] as [&Path; 0]);
}

#[test]
fn a_socket_in_use_is_not_taken_away_even_if_its_queue_is_full() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("busy");
    let open = || rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let (busy, address) = (open(), SocketAddrUnix::new(&path).unwrap());
    rustix::net::bind(&busy, &address).unwrap();
    rustix::net::listen(&busy, 0).unwrap();
    let client = open();
    rustix::net::connect(&client, &address).unwrap(); // there was room for one
    match problem(hasty().at_path(0, 2, &path, "secret")) {
        RendezvousError::Missing { last_refusal: Some(why), .. } => assert!(why.contains("another process")),
        other => panic!("{other}"),
    }
    assert!(path.exists());
}

#[test]
fn a_file_in_the_way_is_named_by_all_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    for rank in [0, 1] {
        match problem(patient().at_path(rank, 2, &path, "secret")) {
            RendezvousError::NotASocket { path: named } => assert_eq!(named, path),
            other => panic!("{other}"),
        }
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
}

#[test]
fn a_path_that_cannot_hold_a_socket_is_an_error_on_all_ranks_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let start = Instant::now();
    let paths = [
        (Path::new("/tmp").join("x".repeat(200)), "name too long"),
        (folder.path().join("no/such/folder"), "No such file"),
        (file.join("meeting"), "Not a directory"),
        (folder.path().to_owned(), "is not a socket"),
    ];
    for (path, why) in &paths {
        for rank in [0, 1] {
            let told = problem(patient().at_path(rank, 2, path, "secret")).to_string();
            assert!(told.contains(why), "{told}");
        }
    }
    assert!(start.elapsed() < HASTY);
}

#[test]
fn a_folder_that_this_user_may_not_use_is_an_error_on_all_ranks() {
    let Some(()) = root() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let _roots = UnixListener::bind(&path).unwrap();
    let told_to_nobody = || {
        let nobody = || {
            // The user of this thread alone changes.
            rustix::thread::set_thread_uid(rustix::fs::Uid::from_raw(65534)).unwrap();
            [0, 1].map(|rank| problem(patient().at_path(rank, 2, &path, "secret")).to_string())
        };
        std::thread::scope(|scope| scope.spawn(nobody).join().unwrap())
    };
    let closed = told_to_nobody();
    assert!(closed.iter().all(|text| text.contains("Permission denied")), "{closed:?}");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let taken = told_to_nobody();
    assert!(taken.iter().all(|text| text.contains("held by user 0")), "{taken:?}");
}

#[test]
fn a_caller_may_carry_the_ticket() {
    const WORLD: usize = 3;
    let (blackboard, everyone_wrote) = (Mutex::new(vec![Vec::new(); WORLD]), Barrier::new(WORLD));
    assert_met(&meet(0..WORLD, |rank| {
        let mut all_gather = |mine: Vec<u8>| {
            blackboard.lock().unwrap()[rank] = mine;
            everyone_wrote.wait();
            Ok(blackboard.lock().unwrap().clone())
        };
        patient().by_exchange(rank, WORLD, &mut all_gather)
    }));
}

#[test]
fn an_exchange_that_fails_or_carries_something_else_is_an_error() {
    let mut broken = |_| Err("the store is down".to_owned());
    let error = problem(hasty().by_exchange(1, 2, &mut broken)).to_string();
    assert!(error.contains("the store is down"), "{error}");
    let mut empty = |_| Ok(vec![]);
    let error = problem(hasty().by_exchange(1, 2, &mut empty)).to_string();
    assert!(error.contains("no contributions"), "{error}");
    let mut garbage = |_| Ok(vec![b"hello".to_vec(), vec![]]);
    let error = problem(hasty().by_exchange(1, 2, &mut garbage)).to_string();
    assert!(error.contains("5 bytes is no ticket"), "{error}");
}

#[test]
fn a_wrong_secret_is_refused_and_keeps_no_rank_from_joining() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let wrong = |rank| match problem(patient().at_path(rank, 3, &path, "guess").map(drop)) {
        RendezvousError::Refused { rank: refused, reason, .. } => {
            assert!(refused == rank && reason.contains("ANTIPHON_SECRET"), "{reason}");
        }
        other => panic!("{other}"),
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| meet(0..1, |rank| patient().at_path(rank, 3, &path, "secret")));
        wrong(1);
        wrong(2);
        let others = scope.spawn(|| meet(1..3, |rank| patient().at_path(rank, 3, &path, "secret")));
        assert_met(&[first.join().unwrap(), others.join().unwrap()].concat());
    });
}

/// Rank 0 expects a world of 3 with 64 KiB each; rank 1 comes with `builder` and another idea of the world.
fn refusal(builder: Builder, world_size: usize) -> String {
    let ticket = Ticket::random();
    std::thread::scope(|scope| {
        let root = scope.spawn(|| hasty().with_ticket(0, 3, &ticket).map(drop));
        let refused = problem(builder.with_ticket(1, world_size, &ticket).map(drop));
        assert_eq!(missing(root.join().unwrap()), [1, 2]);
        match refused {
            RendezvousError::Refused { rank: 1, reason, .. } => reason,
            other => panic!("{other}"),
        }
    })
}

#[test]
fn ranks_with_different_world_sizes_are_told_both() {
    let reason = refusal(patient(), 4);
    assert!(reason.contains("world of 4") && reason.contains("rank 0 of 3"), "{reason}");
    let reason = refusal(patient().arena_bytes(1 << 20), 3);
    assert!(reason.contains("1048576 bytes") && reason.contains("rank 0 has 65536"), "{reason}");
}

#[test]
fn a_rank_beyond_the_world_size_is_refused() {
    let invalid = problem(hasty().with_ticket(2, 2, &Ticket::random()));
    assert!(matches!(invalid, RendezvousError::InvalidRank { rank: 2, world_size: 2 }), "{invalid}");
}

#[test]
fn the_second_of_two_equal_ranks_is_told_of_the_first() {
    let ticket = Ticket::random();
    let mut results = meet([0, 1, 1], |rank| hasty().with_ticket(rank, 3, &ticket));
    assert_eq!(missing(results.remove(0)), [2]);
    let told = results.into_iter().map(problem).filter(|error| match error {
        RendezvousError::Missing { missing, last_refusal: Some(reason), .. } => {
            let first = format!("rank 1 has already joined, as process {}", std::process::id());
            missing == &[0] && reason == &first
        }
        RendezvousError::Missing { missing, last_refusal: None, .. } => {
            assert_eq!(missing, &[2], "the first one");
            false
        }
        other => panic!("{other}"),
    });
    assert_eq!(told.count(), 1);
}

#[test]
fn a_rank_that_stays_joined_twice_is_an_error_in_seconds() {
    let (ticket, start) = (Ticket::random(), Instant::now());
    let long = || patient().timeout(Duration::from_secs(40));
    std::thread::scope(|scope| {
        let root = scope.spawn(|| meet([0], |rank| long().with_ticket(rank, 3, &ticket)));
        let twice = scope.spawn(|| meet([1, 1], |rank| long().with_ticket(rank, 3, &ticket)));
        while !twice.is_finished() && start.elapsed() < Duration::from_secs(12) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let last = scope.spawn(|| meet([2], |rank| long().with_ticket(rank, 3, &ticket)));
        let (mut met, mut refused) = (root.join().unwrap(), Vec::new());
        for result in twice.join().unwrap() {
            match result {
                Err(_) => refused.push(problem(result).to_string()),
                Ok(_) => met.push(result),
            }
        }
        met.extend(last.join().unwrap());
        assert_met(&met);
        assert!(refused.len() == 1 && refused[0].contains("rank 1 has already joined"), "{refused:?}");
    });
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn ranks_that_joined_name_the_missing_ones_at_the_deadline() {
    let ticket = Ticket::random();
    let start = Instant::now();
    for result in meet([0, 1, 3], |rank| hasty().with_ticket(rank, 5, &ticket)) {
        let error = problem(result);
        assert!(error.to_string().contains("ranks [2, 4] never arrived"), "{error}");
    }
    for result in meet([1, 2], |rank| hasty().with_ticket(rank, 3, &Ticket::random())) {
        assert_eq!(missing(result), [0], "nobody listens: that is all a rank can know");
    }
    assert!(start.elapsed() < 2 * (HASTY + Duration::from_secs(2)));
}

#[test]
fn a_rank_that_gave_up_may_join_again() {
    let ticket = Ticket::random();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| meet(0..1, |rank| patient().with_ticket(rank, 3, &ticket)));
        // As if killed: it leaves without a word, without knowing which ranks are missing.
        assert_eq!(missing(hasty().with_ticket(1, 3, &ticket)), [] as [usize; 0]);
        let others = scope.spawn(|| meet(1..3, |rank| patient().with_ticket(rank, 3, &ticket)));
        assert_met(&[first.join().unwrap(), others.join().unwrap()].concat());
    });
}

#[test]
fn rendezvous_may_follow_each_other_at_one_address() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let ticket = Ticket::random();
    assert_met(&meet(0..3, |rank| {
        for _ in 0..10 {
            patient().with_ticket(rank, 3, &ticket)?;
            patient().at_path(rank, 3, &path, "secret")?;
        }
        patient().with_ticket(rank, 3, &ticket)
    }));
}

#[test]
fn a_secret_is_not_shown_by_accident() {
    let ticket = Ticket { secret: Secret::new("hunter2"), ..Ticket::random() };
    assert!(!format!("{ticket:?}").contains("hunter2"));
}
