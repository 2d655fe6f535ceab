//! A model of the decision whether ranks meet in a launch, and of the tags by which they do (`begin_launch` in `steps.cuh`, `enter` in
//! fabric's `slots.cuh`): all orders of what 2 and 3 ranks do, and many of 4 and 8. A tag and the number beside it arrive one after the other.
//!
//! Between launches that meet, ranks may be apart by any number of launches: the model lets them end whenever they like, as if they waited
//! for nothing. That is more than any plan allows.

use std::collections::HashSet;

const SLOTS: usize = 3;

/// A size of a plan: its number; the plan, whose sizes share flags; whether its launches may follow back to back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Size {
    number: u8,
    plan: usize,
    back_to_back: bool,
}

const fn size(number: u8, plan: usize, back_to_back: bool) -> Size {
    Size { number, plan, back_to_back }
}
const A: Size = size(1, 0, true);
const OTHER_A: Size = size(2, 0, true);
const B: Size = size(3, 1, true);
const SINGLE: Size = size(4, 2, false);

/// What is told by a tag, and beside it: the size, and the number of the call; each as soon as it has come.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Tag {
    size: Option<u8>,
    call: Option<usize>,
}

impl Tag {
    fn new(size: u8, call: usize) -> Self {
        Self { size: Some(size), call: Some(call) }
    }

    fn is_there(self) -> bool {
        self.size.is_some() && self.call.is_some()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Doing {
    /// Before a call.
    Nothing,
    /// Sends its tag and its number, in either order: the parts of this number, two to each peer, the next rank being 0.
    Sends(usize),
    /// Waits for the tags.
    Meets,
    /// In the launch.
    Runs,
    /// All calls are over, or one has failed.
    Ended,
    Disagreed,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Rank {
    doing: Doing,
    call: usize,
    slot: usize,
    last: u8,
    flags: [u8; 3],
    meets: bool,
    /// For each slot, the tags of all ranks.
    tags: [Vec<Tag>; SLOTS],
}

/// What is changed about the protocol, to see that the model notices.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Nothing,
    /// Launches that do not meet take a slot too, and empty the one before.
    AlwaysTakesSlot,
    /// The launch before may be of another size of the same plan.
    SameForAllSizes,
    /// A launch behind flags that begin anew does not meet.
    IgnoresFlags,
    /// A tag counts before its number has come.
    IgnoresNumbers,
}

/// The calls of each rank, and whether launches that do not meet wait for the other ranks to be in the same call.
struct Model<'a> {
    calls: &'a [Vec<Size>],
    waits: bool,
    first_flag: u8,
    change: Change,
}

/// The last flag, behind which they begin anew with 1.
const LAST_FLAG: u8 = 5;

type State = Vec<Rank>;

impl Model<'_> {
    fn start(&self) -> State {
        let ranks = self.calls.len();
        let rank = Rank {
            doing: Doing::Nothing,
            call: 0,
            slot: 0,
            last: 0,
            flags: [self.first_flag; 3],
            meets: false,
            tags: [const { Vec::new() }; SLOTS].map(|_: Vec<Tag>| vec![Tag::default(); ranks]),
        };
        vec![rank; ranks]
    }

    fn size(&self, state: &State, rank: usize) -> Size {
        self.calls[rank][state[rank].call]
    }

    /// What a rank's next step leads to; none if it waits.
    fn step(&self, state: &State, rank: usize) -> Option<State> {
        let ranks = state.len();
        let mut next = state.clone();
        let own = &mut next[rank];
        match own.doing {
            Doing::Ended | Doing::Disagreed => return None,
            Doing::Nothing if own.call == self.calls[rank].len() => own.doing = Doing::Ended,
            Doing::Nothing => {
                let size = self.calls[rank][own.call];
                let flag = &mut own.flags[size.plan];
                *flag = if *flag == LAST_FLAG { 1 } else { *flag + 1 };
                let is_same = match self.change {
                    Change::SameForAllSizes => own.last != 0 && (own.last <= 2) == (size.number <= 2),
                    _ => own.last == size.number,
                };
                let is_anew = *flag <= 2 && self.change != Change::IgnoresFlags;
                own.meets = !size.back_to_back || !is_same || is_anew;
                own.last = size.number;
                if own.meets {
                    own.doing = Doing::Sends(0);
                } else {
                    own.doing = Doing::Runs;
                    if self.change == Change::AlwaysTakesSlot {
                        own.tags[(own.slot + SLOTS - 1) % SLOTS].fill(Tag::default());
                        own.slot = (own.slot + 1) % SLOTS;
                    }
                }
            }
            Doing::Sends(part) if part / 2 + 1 < ranks => {
                let (tag, slot) = (Tag::new(self.size(state, rank).number, own.call), own.slot);
                own.doing = Doing::Sends(part + 1);
                let theirs = &mut next[(rank + 1 + part / 2) % ranks].tags[slot][rank];
                // Some peers get the tag first, and some the number.
                match (part + rank + part / 2).is_multiple_of(2) {
                    true => theirs.size = tag.size,
                    false => theirs.call = tag.call,
                }
            }
            // Empties the slot of the meeting before, and leaves its own to the next one.
            Doing::Sends(_) => {
                own.tags[(own.slot + SLOTS - 1) % SLOTS].fill(Tag::default());
                own.slot = (own.slot + 1) % SLOTS;
                own.doing = Doing::Meets;
            }
            Doing::Meets => {
                let slot = (own.slot + SLOTS - 1) % SLOTS;
                let tag = Tag::new(self.size(state, rank).number, own.call);
                let others = (0..ranks).filter(|&peer| peer != rank).map(|peer| own.tags[slot][peer]);
                let has_come = |theirs: &Tag| match self.change {
                    Change::IgnoresNumbers => theirs.size.is_some(),
                    _ => theirs.is_there(),
                };
                own.doing = match others.clone().any(|theirs| has_come(&theirs) && theirs != tag) {
                    true => Doing::Disagreed,
                    false if others.clone().any(|theirs| !has_come(&theirs)) => return None,
                    false => Doing::Runs,
                };
            }
            Doing::Runs if self.waits && !self.all_come(state, rank) => {
                if own.meets {
                    return None;
                }
                // A rank that meets in this call, or an earlier one, waits for this rank's tag.
                let slot = own.slot;
                let left = |theirs: &Tag| theirs.is_there() && theirs.call <= Some(own.call);
                let peer = (0..ranks).find(|&peer| peer != rank && left(&own.tags[slot][peer]))?;
                let tag = Tag::new(self.size(state, rank).number, own.call);
                own.doing = Doing::Disagreed;
                next[peer].tags[slot][rank] = tag;
            }
            Doing::Runs => (own.call, own.doing) = (own.call + 1, Doing::Nothing),
        }
        Some(next)
    }

    /// Whether all other ranks have begun this rank's call, with the same size.
    fn all_come(&self, state: &State, rank: usize) -> bool {
        let own = &state[rank];
        state.iter().enumerate().all(|(peer, theirs)| {
            let is_there = theirs.call > own.call
                || theirs.call == own.call
                    && matches!(theirs.doing, Doing::Runs | Doing::Meets | Doing::Sends(_));
            let is_same = self.calls[peer].get(own.call) == Some(&self.size(state, rank));
            peer == rank || is_there && is_same
        })
    }

    /// Whether a rank that is in a launch behind a meeting is there before another has ended its earlier launches.
    fn is_early(&self, state: &State) -> bool {
        state.iter().enumerate().any(|(rank, own)| {
            let met = own.doing == Doing::Runs && own.meets;
            met && state.iter().enumerate().any(|(peer, theirs)| peer != rank && theirs.call < own.call)
        })
    }

    /// Whether two ranks are in launches of which the later must meet, and neither has met since the earlier.
    fn is_mixed(&self, state: &State) -> bool {
        let runs = |rank: &Rank| rank.doing == Doing::Runs && !rank.meets;
        state.iter().enumerate().any(|(rank, own)| {
            runs(own)
                && state.iter().enumerate().any(|(peer, theirs)| {
                    let mut between = self.calls[rank][theirs.call.min(own.call)..own.call].iter();
                    theirs.call < own.call
                        && theirs.doing != Doing::Nothing
                        && between.any(|size| {
                            *size != self.calls[peer][theirs.call] || *size != self.size(state, rank)
                        })
                })
        })
    }

    /// Whether a launch is under way while another rank is in one of the round of flags before, or two behind a common half.
    fn is_round_apart(&self, state: &State) -> bool {
        let plan = |rank: usize| self.size(state, rank).plan;
        let runs: Vec<usize> = (0..state.len()).filter(|&rank| state[rank].doing == Doing::Runs).collect();
        runs.iter().any(|&one| {
            runs.iter().any(|&other| {
                let flags = [one, other].map(|rank| state[rank].flags[plan(rank)]);
                let calls = [one, other].map(|rank| state[rank].call);
                plan(one) == plan(other) && calls[0] < calls[1] && flags[0] >= flags[1]
            })
        })
    }

    fn check(&self, state: &State) -> Result<(), String> {
        let wrong = [
            (self.is_early(state), "a rank has met another that is in an earlier launch"),
            (self.is_mixed(state), "launches of different sizes without a meeting"),
            (self.is_round_apart(state), "launches of two rounds of flags without a meeting"),
        ];
        match wrong.iter().find(|(is, _)| *is) {
            Some((_, what)) => Err(format!("{what}: {state:?}")),
            None => Ok(()),
        }
    }

    /// The states in which nothing goes on, of all orders of steps.
    fn ends(&self, agrees: bool) -> Result<Vec<State>, String> {
        let (mut seen, mut todo, mut ends) = (HashSet::new(), vec![self.start()], Vec::new());
        while let Some(state) = todo.pop() {
            if agrees {
                self.check(&state)?;
            }
            let next: Vec<State> = (0..state.len()).filter_map(|rank| self.step(&state, rank)).collect();
            if next.is_empty() {
                ends.push(state);
            }
            todo.extend(next.into_iter().filter(|state| seen.insert(state.clone())));
        }
        Ok(ends)
    }

    /// The end of one order of steps.
    fn walk(&self, mut random: u64) -> Result<State, String> {
        let mut state = self.start();
        let ranks = state.len();
        let mut last = 0;
        loop {
            self.check(&state)?;
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Mostly the same rank goes on, so that it gets far ahead.
            let first = if random >> 60 < 13 { last } else { (random >> 33) as usize % ranks };
            let mut in_turn = (0..ranks).map(|ahead| (first + ahead) % ranks);
            let Some((rank, next)) = in_turn.find_map(|rank| Some((rank, self.step(&state, rank)?))) else {
                return Ok(state);
            };
            (last, state) = (rank, next);
        }
    }
}

fn all_end(state: &State) -> Result<(), String> {
    match state.iter().all(|rank| rank.doing == Doing::Ended) {
        true => Ok(()),
        false => Err(format!("stuck: {state:?}")),
    }
}

/// Calls of one size in a row, between others; with a round of flags in them.
const ROWS: [&[Size]; 5] = [
    &[A, A, A, A, OTHER_A, A, A],
    &[A, A, B, B, B, A, A, B],
    &[SINGLE, A, A, A, SINGLE, SINGLE, A, A],
    &[A, A, A, A, A, A, A, A, B],
    &[A, B, A, B, OTHER_A, SINGLE, B, B],
];

fn agreeing(ranks: usize, change: Change) -> Result<(), String> {
    for row in ROWS {
        let calls = vec![row.to_vec(); ranks];
        for first_flag in [0, 3] {
            let model = Model { calls: &calls, waits: false, first_flag, change };
            if ranks <= 3 {
                // What is cut off for 3 ranks is among the orders that are tried at random.
                let cut = if ranks == 2 { row.len() } else { 3 };
                let calls: Vec<_> = calls.iter().map(|row| row[..cut].to_vec()).collect();
                let model = Model { calls: &calls, ..model };
                model.ends(true)?.iter().try_for_each(all_end)?;
            }
            (0..100).try_for_each(|seed| all_end(&model.walk(seed * 77_747 + 1)?))?;
        }
    }
    Ok(())
}

#[test]
fn ranks_that_agree_come_to_an_end_and_meet_where_they_must() {
    for ranks in [2, 3, 4, 8] {
        agreeing(ranks, Change::Nothing).unwrap_or_else(|wrong| panic!("{ranks} ranks: {wrong}"));
    }
}

#[test]
fn the_model_notices_changes() {
    use Change::{AlwaysTakesSlot, IgnoresFlags, IgnoresNumbers, SameForAllSizes};
    for change in [AlwaysTakesSlot, SameForAllSizes, IgnoresFlags, IgnoresNumbers] {
        assert!(agreeing(2, change).is_err() && agreeing(4, change).is_err(), "change {}", change as u8);
    }
}

/// A rank that calls something else, or something more or less, and whose peers wait for it in their launches: it and a rank that it
/// waits for find that they disagree, in every order.
#[test]
fn ranks_that_disagree_find_it() {
    let rows: [(&[Size], &[Size]); 5] = [
        (&[A, A, A], &[A, A, B]),
        (&[A, A, A], &[A, B, B]),
        (&[A, A, B], &[A, A, A]),
        (&[A, B], &[A, A, B]),
        (&[A, A, A, B], &[A, A, B]),
    ];
    for ranks in [2, 3] {
        for (row, odd) in rows {
            let mut calls = vec![row.to_vec(); ranks];
            calls[ranks - 1] = odd.to_vec();
            let model = Model { calls: &calls, waits: true, first_flag: 2, change: Change::Nothing };
            for end in model.ends(false).unwrap() {
                let told = end.iter().filter(|rank| rank.doing == Doing::Disagreed).count();
                let odd = end[ranks - 1].doing == Doing::Disagreed;
                assert!(odd && told >= 2, "{ranks} ranks, {row:?} and {odd:?}: {end:?}");
            }
        }
    }
}
