//! Groups: which rank their errors blame for a loss, and what groups cost.

use std::{
    fs::File,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use antiphon_fabric::{
    Communicator, FabricError, LocalWorld,
    error::Loss,
    rendezvous::{Address, Secret, Ticket},
};
use antiphon_testing::{World, role, say, say_error};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

const LONG: Duration = Duration::from_secs(30);
/// Files that a process may have open where they are counted.
const FEW_FILES: u64 = 64;

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    if role.starts_with("many") {
        let most = Rlimit { current: Some(FEW_FILES), maximum: getrlimit(Resource::Nofile).maximum };
        setrlimit(Resource::Nofile, most).unwrap();
    }
    let comm = Communicator::from_env().unwrap();
    let result = match role.as_str() {
        "mesh" => mesh(&comm),
        "pairs" => pairs(&comm),
        "many groups" => many_groups(&comm),
        "met pairs" => met_pairs(&comm),
        "many met groups" => many_met_groups(&comm),
        "no files" => no_files(&comm),
        other => panic!("{other} is no work"),
    };
    match result {
        Ok(()) => say("done"),
        Err(error) => say_error(&error),
    }
}

fn group(comm: &Communicator, color: usize) -> Result<Communicator, FabricError> {
    Ok(comm.split(Some(color as u64), 0)?.expect("a colour was given"))
}

/// Groups that overlap: rows and columns, and halves of the rows, which are groups of groups.
fn mesh(comm: &Communicator) -> Result<(), FabricError> {
    const COLUMNS: usize = 2;
    let (rank, rows) = (comm.rank(), comm.world_size() / COLUMNS);
    let column = group(comm, rank % COLUMNS)?;
    let row = group(comm, rank / COLUMNS)?;
    let pair = group(&column, rank / COLUMNS / rows.div_ceil(2))?;
    say("ready");
    loop {
        for _ in 0..3 {
            row.barrier()?;
            column.exchange_bytes(&vec![rank as u8; 10_000])?;
            let (next, before) = ((column.rank() + 1) % rows, (column.rank() + rows - 1) % rows);
            column.send_recv(&[1f32; 100], next, &mut [0f32; 100], before)?;
            pair.barrier()?;
        }
        comm.barrier()?;
    }
}

/// Disjoint groups, and the world now and then.
fn pairs(comm: &Communicator) -> Result<(), FabricError> {
    let pair = group(comm, comm.rank() % 2)?;
    say("ready");
    loop {
        (0..100).try_for_each(|_| pair.barrier())?;
        comm.barrier()?;
    }
}

fn many_groups(comm: &Communicator) -> Result<(), FabricError> {
    say("ready");
    let mut groups = Vec::new();
    for number in 0..2 * FEW_FILES as usize {
        let parent = groups.last().filter(|_| number % 2 == 1).unwrap_or(comm);
        groups.push(group(parent, 0)?);
    }
    groups.iter().try_for_each(|group| group.barrier())
}

/// A group of ranks of the world that meet by themselves, as those of `torch.distributed.new_group` do.
fn meet(
    comm: &Communicator,
    ranks: &[usize],
    name: impl std::fmt::Display,
) -> Result<Communicator, FabricError> {
    let rank = ranks.iter().position(|&rank| rank == comm.rank()).unwrap();
    let name = format!("antiphon-groups-{}-{name}-{ranks:?}", std::env::var("TORCHELASTIC_RUN_ID").unwrap());
    let ticket = Ticket { address: Address::Abstract(name), secret: Secret::new("groups") };
    Communicator::builder().parent(comm.messenger()).with_ticket(rank, ranks.len(), &ticket)
}

/// As [`pairs`], in groups that met.
fn met_pairs(comm: &Communicator) -> Result<(), FabricError> {
    let ranks: Vec<usize> = (comm.rank() % 2..comm.world_size()).step_by(2).collect();
    let pair = meet(comm, &ranks, "pair")?;
    say("ready");
    loop {
        (0..100).try_for_each(|_| pair.barrier())?;
        comm.barrier()?;
    }
}

/// Rank 0 is in none.
fn many_met_groups(comm: &Communicator) -> Result<(), FabricError> {
    say("ready");
    if comm.rank() > 0 {
        let ranks: Vec<usize> = (1..comm.world_size()).collect();
        let meet = |number| meet(comm, &ranks, number);
        let groups = (0..2 * FEW_FILES).map(meet).collect::<Result<Vec<_>, _>>()?;
        groups.iter().try_for_each(|group| group.barrier())?;
    }
    comm.barrier()
}

/// Rank 1 cannot open another file.
fn no_files(comm: &Communicator) -> Result<(), FabricError> {
    say("ready");
    let mut files = Vec::new();
    if comm.rank() == 1 {
        let most = Rlimit { current: Some(FEW_FILES), maximum: getrlimit(Resource::Nofile).maximum };
        setrlimit(Resource::Nofile, most).unwrap();
        files.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
    }
    let start = Instant::now();
    for attempt in [group(comm, 0).map(drop), comm.exchange_descriptors(std::io::stdin().as_fd()).map(drop)] {
        let error = attempt.unwrap_err().to_string();
        assert!(error.contains("Too many open files"), "{error}");
        assert!(comm.rank() == 1 || error.contains("rank 1 "), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    files.clear();
    group(comm, 0)?.barrier() // the world is as it was
}

/// Kills ranks of worlds whose groups overlap; every survivor names the rank, whichever of its groups it was in.
fn kill_among_groups(role: &str, kills: u32) {
    for seed in 0..kills {
        let moment = seed.wrapping_add(1).wrapping_mul(0x9E37_79B1);
        let (world_size, victim) = (4 + seed as usize % 2 * 2, moment as usize >> 8);
        let victim = victim % world_size;
        let world = World::start(world_size, role, false, LONG);
        std::thread::sleep(Duration::from_micros(u64::from(moment >> 18)));
        let killed = world.signal(victim, Signal::KILL);
        for rank in world.others(victim) {
            let (heard, said) = world.hear(rank);
            assert_eq!(said, format!("lost {victim}"), "rank {rank} of {world_size}, seed {seed}");
            assert!(heard - killed < Duration::from_secs(2), "rank {rank} knew after {:?}", heard - killed);
        }
        world.end(&[victim]);
    }
}

/// More of them: `KILLS=200 cargo test -p antiphon-fabric --test groups killed`.
fn kills() -> u32 {
    std::env::var("KILLS").map_or(40, |kills| kills.parse().unwrap())
}

#[test]
fn a_rank_killed_in_a_group_is_named_by_all() {
    kill_among_groups("pairs", kills());
}

#[test]
fn a_rank_killed_in_one_of_many_groups_is_named_by_all() {
    kill_among_groups("mesh", kills());
}

#[test]
fn a_rank_killed_in_a_group_that_met_is_named_by_all() {
    kill_among_groups("met pairs", kills() / 2);
}

fn end_well(role: &str, world_size: usize) {
    let world = World::start(world_size, role, false, LONG);
    for rank in 0..world_size {
        assert_eq!(world.hear(rank).1, "done", "rank {rank}");
    }
    world.end(&[]);
}

#[test]
fn a_group_takes_no_descriptor() {
    end_well("many groups", 3);
}

#[test]
fn a_group_that_met_takes_no_descriptor() {
    end_well("many met groups", 3);
}

/// Ranks that are threads, of two worlds: what can be known of the others tells them apart.
#[test]
fn groups_of_different_parents_are_refused() {
    let places = |parents: &[Option<usize>]| {
        let (ticket, world_size) = (Ticket::random(), parents.len());
        let attempt = |comm: Communicator| {
            let builder = Communicator::builder().timeout(LONG);
            let builder = match parents[comm.rank()] {
                None => builder,
                Some(0) => builder.parent(comm.messenger()),
                Some(_) => builder.parent(group(&comm, comm.rank())?.messenger()),
            };
            builder.with_ticket(comm.rank(), world_size, &ticket).map(drop)
        };
        let results = LocalWorld::run_with(world_size, LONG, attempt);
        results.into_iter().map(|result| result.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    for text in places(&[Some(0), None, Some(0)]) {
        assert_eq!(text, "rank 0 of the group gives a parent, and rank 1 gives none");
    }
    for text in places(&[Some(1), Some(1)]) {
        assert!(text.ends_with("ranks 0 and 1 are both rank 0 of their parent"), "{text}");
    }
}

#[test]
fn a_rank_without_descriptors_is_named_by_all_and_nothing_is_broken() {
    end_well("no files", 3);
}

/// Rank 3 leaves everything; rank 1 misses it in their group and leaves; ranks 0 and 2 learn which rank was the first to leave.
#[test]
fn a_rank_that_leaves_because_of_another_is_not_to_blame() {
    let results = LocalWorld::run_with(4, LONG, |comm| {
        let pair = group(&comm, comm.rank() % 2)?;
        let row = group(&comm, comm.rank() / 2)?;
        match comm.rank() {
            3 => Ok(()),
            1 => pair.barrier(),
            0 => row.barrier(),
            _ => {
                drop((pair, row));
                comm.barrier()
            }
        }
    });
    let errors: Vec<_> = results.iter().take(3).map(|result| result.as_ref().unwrap_err()).collect();
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.lost_world_rank(), Some(3), "rank {rank}: {error}");
    }
    let text = errors[1].to_string();
    assert!(text.starts_with("rank 1 of the group, 3 of the world, was lost during barrier"), "{text}");
    match errors[0] {
        FabricError::PeerLost { rank: 1, how: Loss::Followed { world_rank: 3 }, .. } => {}
        other => panic!("{other:?}"),
    }
    assert!(errors[0].to_string().contains("it went because rank 3 of the world was lost"), "{}", errors[0]);
}

#[test]
fn a_deadline_in_a_group_names_the_missing_both_ways() {
    let results = LocalWorld::run_with(4, Duration::from_millis(300), |comm| {
        let pair = group(&comm, comm.rank() % 2)?;
        if comm.rank() == 3 {
            std::thread::sleep(Duration::from_millis(600));
            return Ok(());
        }
        pair.barrier()
    });
    let text = results[1].as_ref().unwrap_err().to_string();
    assert!(text.ends_with("still waiting for ranks [1] of 2 in the group, [3] of the world"), "{text}");
    assert!(results[0].is_ok() && results[2].is_ok(), "{results:?}");
}
