//! Plans run against made-up clocks.

use std::cell::{Cell, RefCell};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use antiphon_tuning::{Sweep, Table, TuningError, doubling, same_on_all_ranks};

const CANDIDATES: [&str; 2] = ["one_shot", "two_shot"];

fn ns(nanoseconds: usize) -> Result<Option<Duration>, TuningError> {
    Ok(Some(Duration::from_nanos(nanoseconds as u64)))
}

/// Latency and bytes per nanosecond: the two meet at 6000 bytes.
fn linear(candidate: usize, bytes: usize) -> Result<Option<Duration>, TuningError> {
    ns([1_000 + bytes, 4_000 + bytes / 2][candidate])
}

/// Agreeing of a world of one rank.
fn alone(_: &mut [f64]) -> Result<(), TuningError> {
    Ok(())
}

/// A world of threads, of which each may agree with the others.
struct World {
    barrier: Barrier,
    shared: Mutex<Vec<f64>>,
}

impl World {
    fn new(ranks: usize) -> Self {
        Self { barrier: Barrier::new(ranks), shared: Mutex::new(Vec::new()) }
    }

    fn agree(&self, local: &mut [f64]) -> Result<(), TuningError> {
        if self.barrier.wait().is_leader() {
            *self.shared.lock().unwrap() = local.to_vec();
        }
        self.barrier.wait();
        let mut shared = self.shared.lock().unwrap();
        shared.iter_mut().zip(&*local).for_each(|(all, &own)| *all = all.max(own));
        drop(shared);
        self.barrier.wait();
        local.copy_from_slice(&self.shared.lock().unwrap());
        self.barrier.wait();
        Ok(())
    }
}

/// Runs `rank` on as many threads as there are ranks.
fn on_all_ranks<T: Send>(ranks: usize, rank: impl Fn(usize, &World) -> T + Sync) -> Vec<T> {
    let world = World::new(ranks);
    std::thread::scope(|scope| {
        let (rank, world) = (&rank, &world);
        let threads: Vec<_> = (0..ranks).map(|r| scope.spawn(move || rank(r, world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn finds_the_crossover_between_measured_sizes() {
    let sweep = Sweep::new(CANDIDATES, doubling(1 << 10..=1 << 16)).unwrap();
    let table = sweep.measure(linear, alone).unwrap();
    assert_eq!(table.rows().iter().map(|row| row.winner).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1, 1]);
    assert_eq!([0, 1, 1_024, 6_000].map(|bytes| table.choose(bytes)), [0; 4]);
    assert_eq!([6_001, 1 << 16, usize::MAX].map(|bytes| table.choose(bytes)), [1; 3]);
    assert_eq!(table.candidates(), CANDIDATES);
}

#[test]
fn keeps_all_measurements() {
    let times = RefCell::new([30, 10, 50, 20, 40].into_iter().cycle());
    let sweep = Sweep::new(["only"], [64]).unwrap().warm_up(5).rounds(5);
    let table = sweep.measure(|_, _| ns(times.borrow_mut().next().unwrap()), alone).unwrap();
    let timing = table.rows()[0].timings[0].unwrap();
    assert_eq!((timing.median_ns, timing.min_ns, timing.max_ns, timing.samples), (30.0, 10.0, 50.0, 5));
}

#[test]
fn interleaves_the_candidates_and_takes_turns_at_beginning() {
    let order = RefCell::new(Vec::new());
    let sweep = Sweep::new(["a", "b", "c"], [8, 4, 8]).unwrap().warm_up(1).rounds(2);
    let run = |candidate, bytes| {
        order.borrow_mut().push((bytes, candidate));
        ns(1)
    };
    sweep.measure(run, alone).unwrap();
    let rounds = [0, 1, 2, 1, 2, 0, 2, 0, 1];
    let expected: Vec<_> =
        [4, 8].iter().flat_map(|&bytes| rounds.map(|candidate| (bytes, candidate))).collect();
    assert_eq!(*order.borrow(), expected);
    assert_eq!(order.borrow().len(), sweep.runs());
}

#[test]
fn drift_hits_all_candidates_alike() {
    // The machine gets slower with every run. The first candidate is the faster one, by less than the drift.
    let runs = Cell::new(0);
    let sweep = Sweep::new(CANDIDATES, [64]).unwrap().warm_up(0).rounds(10);
    let run = |candidate, _| {
        runs.set(runs.get() + 1);
        ns(1_000 + 100 * runs.get() + [0, 400usize][candidate])
    };
    let table = sweep.measure(run, alone).unwrap();
    assert_eq!(table.choose(64), 0);
    let [first, second] = [0, 1].map(|candidate| table.rows()[0].timings[candidate].unwrap().median_ns);
    assert_eq!(second - first, 400.0);
}

#[test]
fn all_ranks_get_the_table_of_the_slowest() {
    // Each rank alone would choose otherwise: the even ones the first candidate, the odd ones the second.
    let tables = on_all_ranks(4, |rank, world| {
        let run = |candidate, bytes| ns([[100, 150], [400, 120]][rank % 2][candidate] + bytes);
        let sweep = Sweep::new(CANDIDATES, doubling(1..=8)).unwrap();
        sweep.measure(run, |samples: &mut [f64]| world.agree(samples)).unwrap()
    });
    assert!(tables.iter().all(|table| *table == tables[0]));
    let medians = tables[0].rows()[0].timings.iter().map(|timing| timing.unwrap().median_ns);
    assert_eq!(medians.collect::<Vec<_>>(), [401.0, 151.0]);
    assert_eq!(tables[0].choose(4), 1);
}

#[test]
fn the_maximum_is_taken_of_each_sample() {
    // In each round another rank is late: every round is late, although each rank's own median is not.
    let tables = on_all_ranks(3, |rank, world| {
        let round = Cell::new(0);
        let run = |_, _| {
            round.set(round.get() + 1);
            ns(if round.get() % 3 == rank { 900 } else { 100 })
        };
        let sweep = Sweep::new(["only"], [1]).unwrap().warm_up(0).rounds(3);
        sweep.measure(run, |samples: &mut [f64]| world.agree(samples)).unwrap()
    });
    assert_eq!(tables[2].rows()[0].timings[0].unwrap().median_ns, 900.0);
}

#[test]
fn ranks_learn_whether_they_hold_the_same_table() {
    let table = |threshold| Table::from_thresholds(CANDIDATES, [(0, 0), (threshold, 1)]).unwrap();
    let same = |tables: [Option<Table>; 3]| {
        let answers = on_all_ranks(3, |rank, world| {
            same_on_all_ranks(tables[rank].as_ref(), |numbers| world.agree(numbers)).unwrap()
        });
        assert!(answers.iter().all(|answer| *answer == answers[0]), "ranks disagree: {answers:?}");
        answers[0]
    };
    assert!(same([Some(table(8)), Some(table(8)), Some(table(8))]));
    assert!(!same([Some(table(8)), Some(table(9)), Some(table(8))]));
    assert!(!same([Some(table(8)), Some(table(8)), None]));
    assert!(!same([None, None, None]));
}

#[test]
fn a_candidate_may_serve_some_sizes_only() {
    // One-shot is always the faster one, but its buffer ends at 4096 bytes.
    let run = |candidate, bytes| match (candidate, bytes) {
        (0, 4_097..) => Ok(None),
        _ => linear(candidate, bytes.min(4_096)),
    };
    let sweep = Sweep::new(CANDIDATES, doubling(1 << 10..=1 << 14)).unwrap();
    let table = sweep.measure(run, alone).unwrap();
    assert_eq!(table.rows()[3].timings[0], None);
    assert_eq!([1_024, 4_096].map(|bytes| table.choose(bytes)), [0, 0]);
    assert_eq!([4_097, 8_192].map(|bytes| table.choose(bytes)), [1, 1]);
}

#[test]
fn a_candidate_that_serves_large_sizes_only_waits_for_them() {
    let run = |candidate, bytes| match (candidate, bytes) {
        (1, ..4_096) => Ok(None),
        _ => ns([1_000, 10][candidate]),
    };
    let table = Sweep::new(CANDIDATES, [1_024, 4_096]).unwrap().measure(run, alone).unwrap();
    assert_eq!([1_024, 4_095, 4_096].map(|bytes| table.choose(bytes)), [0, 0, 1]);
}

#[test]
fn a_candidate_that_does_not_serve_is_not_run_again() {
    let asked = Cell::new(0);
    let run = |candidate, _| {
        if candidate == 1 {
            asked.set(asked.get() + 1);
            return Ok(None);
        }
        ns(1)
    };
    Sweep::new(CANDIDATES, [1, 2, 4]).unwrap().measure(run, alone).unwrap();
    assert_eq!(asked.get(), 3);
}

#[test]
fn errors_state_what_happened() {
    let message = |result: Result<Table, TuningError>| result.unwrap_err().to_string();
    let sweep = Sweep::new(CANDIDATES, [64]).unwrap();
    assert_eq!(message(sweep.clone().rounds(0).measure(linear, alone)), "a sweep needs at least one round");
    assert_eq!(message(sweep.measure(|_, _| Ok(None), alone)), "none of the 2 candidates serves 64 bytes");
    let broken = |samples: &mut [f64]| {
        samples[9] = f64::NAN;
        Ok(())
    };
    assert_eq!(message(sweep.measure(linear, broken)), "candidate \"two_shot\" at 64 bytes took NaN ns");

    let refused = |candidates: &[&str], sizes: &[usize]| {
        Sweep::new(candidates.iter().copied(), sizes.iter().copied()).unwrap_err().to_string()
    };
    assert_eq!(refused(&[], &[1]), "a table needs at least one candidate");
    assert_eq!(refused(&["a"], &[]), "a sweep or a table needs at least one size");
    assert_eq!(refused(&["a", "b", "a"], &[1]), "candidate \"a\" is given twice");
}

#[test]
fn the_callers_errors_pass_through() {
    #[derive(Debug, PartialEq)]
    enum Failure {
        PeerLost(usize),
        Tuning(String),
    }
    impl From<TuningError> for Failure {
        fn from(error: TuningError) -> Self {
            Self::Tuning(error.to_string())
        }
    }
    let sweep = Sweep::new(CANDIDATES, [64]).unwrap();
    let lost = sweep.measure(|_, _| Err(Failure::PeerLost(3)), |_| Ok(()));
    assert_eq!(lost, Err(Failure::PeerLost(3)));
    let lost = sweep.measure(|_, _| Ok(Some(Duration::ZERO)), |_| Err(Failure::PeerLost(5)));
    assert_eq!(lost, Err(Failure::PeerLost(5)));
    let ours = sweep.clone().rounds(0).measure(|_, _| Err(Failure::PeerLost(3)), |_| Ok(()));
    assert_eq!(ours, Err(Failure::Tuning("a sweep needs at least one round".into())));
}

#[test]
fn sizes_double_up_to_the_last() {
    assert_eq!(Vec::from_iter(doubling(3..=24)), [3, 6, 12, 24]);
    assert_eq!(Vec::from_iter(doubling(0..=4)), [1, 2, 4]);
    let (first, last) = (9, 8);
    assert_eq!(doubling(first..=last).count(), 0);
    assert_eq!(doubling(1..=usize::MAX).count(), usize::BITS as usize);
}
