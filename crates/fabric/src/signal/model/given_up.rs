//! The mark of a rank that gave up; see the page of `signal::given_up`.

use std::sync::Mutex;

use super::*;
use crate::signal::given_up::Earliest;

/// The memory that the ranks share: their packets of one round, the mark of the rank that gave up, and the ranks whose call returned an error.
struct World {
    packets: Vec<Head>,
    mark: Earliest,
    left: [AtomicU32; 3],
    /// Whether a rank looks at the mark behind the packets, as it must.
    looks_last: bool,
}

const ROUND: u64 = 1;

impl World {
    fn new(world_size: usize, looks_last: bool) -> Self {
        let packets = (0..world_size).map(|_| Head::default()).collect();
        Self { packets, mark: Earliest::default(), left: Default::default(), looks_last }
    }

    fn has_all(&self) -> bool {
        self.packets.iter().all(|packet| packet.arrival(ROUND).is_some())
    }

    /// A call whose deadline passes after one look, if the rank is not patient; whether it has a result.
    fn call(&self, rank: usize, is_patient: bool) -> bool {
        self.packets[rank].publish(ROUND, [1, 0]);
        let marked_before = self.mark.includes(ROUND);
        if is_patient {
            until(|| self.has_all().then_some(()));
        } else if !self.has_all() {
            return self.give_up(rank);
        }
        // The call ends here, so it must notice a rank that has returned with an error before.
        let has_left = self.left.iter().any(|left| left.load(Ordering::Acquire) > 0);
        let marked = if self.looks_last { self.mark.includes(ROUND) } else { marked_before };
        assert!(marked || !has_left, "rank {rank} has a result after another rank gave up");
        if marked { self.give_up(rank) } else { true }
    }

    fn give_up(&self, rank: usize) -> bool {
        self.mark.mark(ROUND);
        self.left[rank].store(1, Ordering::Release);
        false
    }
}

/// All ranks but rank 0 are impatient; returns which sets of ranks had a result.
fn outcomes(world_size: usize, preemptions: Option<usize>, looks_last: bool) -> Vec<Vec<bool>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    explore(preemptions, move || {
        let (world, noted) = (World::new(world_size, looks_last), noted.clone());
        let results = Arc::new(Mutex::new(vec![None; world_size]));
        ranks(world_size, move |rank| {
            let result = world.call(rank, rank == 0);
            let mut results = results.lock().unwrap();
            results[rank] = Some(result);
            if let Some(all) = results.iter().copied().collect::<Option<Vec<bool>>>() {
                let mut seen = noted.lock().unwrap();
                if !seen.contains(&all) {
                    seen.push(all);
                }
            }
        });
    });
    let seen = seen.lock().unwrap().clone();
    seen
}

#[test]
fn of_two_ranks_none_has_a_result_after_the_other_gave_up() {
    let seen = outcomes(2, None, true);
    // The last is a rank that ended before the other one gave up, which no protocol without another wait excludes.
    for possible in [[true, true], [false, false], [true, false]] {
        assert!(seen.contains(&possible.to_vec()), "{possible:?} of {seen:?}");
    }
    assert!(!seen.contains(&vec![false, true]), "{seen:?}");
}

#[test]
fn of_three_ranks_none_has_a_result_after_another_gave_up() {
    outcomes(3, Some(2), true);
}

#[test]
#[should_panic(expected = "has a result after another rank gave up")]
fn looking_at_the_mark_before_the_packets_is_caught() {
    outcomes(2, None, false);
}
