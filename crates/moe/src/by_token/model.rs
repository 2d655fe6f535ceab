//! Rings of records between ranks, as region.cuh has them: whether all that waits goes on in the end.
//!
//! A step of a warp or a block is one action. Of those that can happen a random one does, so a rank, a warp or a block may be late for
//! any time. When none can happen, all must be sent and read: a circle of waits would show there. A record that is written over
//! before it is read shows at once. Rules are also broken on purpose, and must be caught.

use std::collections::HashSet;

/// The rules that can be broken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// A receiver reads the first records of all peers, then their second ones.
    ReadsInOneOrder,
    /// A warp sends what it has claimed last before what it has claimed first.
    SendsTheLastFirst,
    /// A sender does not wait for a free place.
    WaitsForNoPlace,
    /// A warp that sums counts what it has read at the end of a batch, but not before it waits.
    CountsAtTheEnd,
}

/// A small generator: the same worlds for a seed everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// The ring from a rank to another one.
#[derive(Default)]
struct Ring {
    half: usize,
    /// Records that are there and not read.
    there: HashSet<usize>,
    read: HashSet<usize>,
    /// Records of even and of odd halves whose reading is counted.
    counted: [usize; 2],
}

impl Ring {
    fn has_come(&self, number: usize) -> bool {
        self.there.contains(&number) || self.read.contains(&number)
    }

    fn is_free(&self, number: usize) -> bool {
        self.counted[number / self.half % 2] >= number / (2 * self.half) * self.half
    }

    fn send(&mut self, number: usize) {
        let before = number.checked_sub(2 * self.half);
        assert!(
            before.is_none_or(|before| self.read.contains(&before)),
            "record {number} is written over one"
        );
        self.there.insert(number);
    }

    fn read(&mut self, number: usize) {
        assert!(self.there.remove(&number), "record {number} is not there");
        self.read.insert(number);
    }

    fn count(&mut self, half: usize, records: usize) {
        self.counted[half % 2] += records;
    }
}

/// What the ranks have: a ring for each pair, `[from][to]`.
fn rings(world: usize, half: usize) -> Vec<Vec<Ring>> {
    (0..world).map(|_| (0..world).map(|_| Ring { half, ..Ring::default() }).collect()).collect()
}

/// The number of each token of a rank among those for each rank.
fn numbers(random: &mut Random, world: usize, tokens: usize) -> Vec<Vec<Option<usize>>> {
    let (mut next, kind) = (vec![0; world], random.below(3));
    let favourite = random.below(world);
    (0..tokens)
        .map(|token| {
            let mut goes = |rank: usize| match kind {
                0 => random.below(2) == 0,
                1 => rank == favourite || random.below(8) == 0,
                _ => rank == (if token < tokens / 2 { 0 } else { world - 1 }),
            };
            let goes: Vec<bool> = (0..world).map(&mut goes).collect();
            (0..world).map(|rank| goes[rank].then(|| (next[rank] += 1, next[rank] - 1).1)).collect()
        })
        .collect()
}

fn count_to(numbers: &[Vec<Option<usize>>], rank: usize) -> usize {
    numbers.iter().filter(|of_token| of_token[rank].is_some()).count()
}

/// Does random actions until none is possible; an action says whether it was.
fn run<S>(
    random: &mut Random,
    state: &mut S,
    actions: usize,
    act: impl Fn(&mut S, usize, &mut Random) -> bool,
) {
    loop {
        let first = random.below(actions);
        // One action may happen many times while the others are late.
        let often = if random.below(8) == 0 { 20 } else { 1 };
        let happened = (0..actions).map(|n| (first + n) % actions).find(|&action| act(state, action, random));
        let Some(action) = happened else { return };
        (1..often).take_while(|_| act(state, action, random)).count();
    }
}

/// Dispatch: warps claim tokens and send each to all its receivers; and by turns read records, of which a warp holds one of each peer.
fn dispatch(seed: u64, world: usize, half: usize, broken: Broken) -> bool {
    const TOKENS: usize = 40;
    const WARPS: usize = 3;
    const BLOCKS: usize = 2;
    struct State {
        rings: Vec<Vec<Ring>>,
        claimed: Vec<usize>,
        held: Vec<Vec<Vec<usize>>>,
        /// The record of a block's that is claimed next, for each rank, block and peer; and the records that each warp holds.
        next: Vec<[Vec<usize>; BLOCKS]>,
        taking: Vec<[Vec<Vec<Option<usize>>>; BLOCKS]>,
        /// How many records are read and not counted, for each rank, peer, block and kind of half.
        read: Vec<Vec<[[usize; 2]; BLOCKS]>>,
    }
    let mut random = Random(seed * 2 + 1);
    let numbers: Vec<_> = (0..world).map(|_| numbers(&mut random, world, TOKENS)).collect();
    let count = |from: usize, to: usize| count_to(&numbers[from], to);
    // The first tokens are shared out, two for each warp.
    let shared_out = |warp| vec![warp, warp + WARPS];
    let mut state = State {
        rings: rings(world, half),
        claimed: vec![2 * WARPS; world],
        held: vec![(0..WARPS).map(shared_out).collect(); world],
        next: vec![std::array::from_fn(|_| vec![0; world]); world],
        taking: vec![std::array::from_fn(|_| vec![vec![None; world]; WARPS]); world],
        read: vec![vec![[[0; 2]; BLOCKS]; world]; world],
    };
    let send = |state: &mut State, rank: usize, warp: usize| {
        let held = &state.held[rank][warp];
        let place = if broken == Broken::SendsTheLastFirst { held.len().saturating_sub(1) } else { 0 };
        let Some(&token) = held.get(place) else { return false };
        let receivers =
            || numbers[rank][token].iter().enumerate().filter_map(|(to, number)| Some((to, (*number)?)));
        let is_free = |(to, number): (usize, usize)| to == rank || state.rings[rank][to].is_free(number);
        if broken != Broken::WaitsForNoPlace && !receivers().all(is_free) {
            return false;
        }
        receivers().filter(|&(to, _)| to != rank).for_each(|(to, number)| state.rings[rank][to].send(number));
        state.held[rank][warp].remove(place);
        if state.claimed[rank] < TOKENS {
            state.held[rank][warp].push(state.claimed[rank]);
            state.claimed[rank] += 1;
        }
        true
    };
    let below = |block: usize, end: usize| (block..end).step_by(BLOCKS).count();
    let take = |state: &mut State, rank: usize, block: usize, warp: usize, peer: usize| {
        if peer == rank {
            return false;
        }
        let State { next, taking, .. } = state;
        let held = &mut taking[rank][block][warp];
        let is_new = held[peer].is_none();
        let number = *held[peer].get_or_insert_with(|| {
            next[rank][block][peer] += 1;
            block + (next[rank][block][peer] - 1) * BLOCKS
        });
        // The records of a block come, for a warp, when all before them are there.
        let has_come = |number: usize| state.rings[peer][rank].has_come(number);
        if number >= count(peer, rank) || !(block..=number).step_by(BLOCKS).all(has_come) {
            return is_new;
        }
        let is_behind = |other: usize| {
            other != rank && held[other].is_some_and(|its| its < number && its < count(other, rank))
        };
        if broken == Broken::ReadsInOneOrder && (0..world).any(is_behind) {
            return is_new;
        }
        held[peer] = None;
        state.rings[peer][rank].read(number);
        let of_half = number / half;
        if (of_half + 2) * half < count(peer, rank) {
            let read = &mut state.read[rank][peer][block][of_half % 2];
            *read += 1;
            if *read == below(block, (of_half + 1) * half) - below(block, of_half * half) {
                state.rings[peer][rank].count(of_half, std::mem::take(read));
            }
        }
        true
    };
    const ACTIONS: usize = WARPS + BLOCKS * WARPS;
    run(&mut random, &mut state, world * ACTIONS, |state, action, random| {
        let (rank, which) = (action / ACTIONS, action % ACTIONS);
        if which < WARPS {
            return send(state, rank, which);
        }
        let (block, warp, first) = ((which - WARPS) / WARPS, which % WARPS, random.below(world));
        (0..world).any(|n| take(state, rank, block, warp, (first + n) % world))
    });
    let all = |from: usize, to: usize| from == to || state.rings[from][to].read.len() == count(from, to);
    (0..world).all(|from| (0..world).all(|to| all(from, to)))
}

/// Combine: a rank sends each peer the rows of its tokens, by a counter for each peer; warps sum tokens, some at a time.
fn combine(seed: u64, world: usize, half: usize, broken: Broken) -> bool {
    const TOKENS: usize = 40;
    const SENDING: usize = 2;
    const SUMMING: usize = 3;
    const BATCH: usize = 4;
    struct State {
        rings: Vec<Vec<Ring>>,
        claimed: Vec<Vec<usize>>,
        /// The record that a warp holds, for each rank, warp and peer.
        held: Vec<Vec<Vec<Option<usize>>>>,
        /// How many tokens a warp has summed, and the records that it has read and not counted, for each rank and warp.
        summed: Vec<[usize; SUMMING]>,
        read: Vec<Vec<Vec<(usize, usize)>>>,
    }
    let mut random = Random(seed * 2 + 1);
    let numbers: Vec<_> = (0..world).map(|_| numbers(&mut random, world, TOKENS)).collect();
    let count = |from: usize, to: usize| count_to(&numbers[to], from); // rows of `to`'s tokens
    let mut state = State {
        rings: rings(world, half),
        claimed: vec![vec![0; world]; world],
        held: vec![vec![vec![None; world]; SENDING]; world],
        summed: vec![[0; SUMMING]; world],
        read: vec![vec![Vec::new(); SUMMING]; world],
    };
    let send = |state: &mut State, rank: usize, warp: usize, random: &mut Random| {
        let first = random.below(world);
        (0..world).map(|n| (first + n) % world).filter(|&to| to != rank).any(|to| {
            let held = &mut state.held[rank][warp][to];
            if held.is_none() && state.claimed[rank][to] < count(rank, to) {
                *held = Some(state.claimed[rank][to]);
                state.claimed[rank][to] += 1;
                return true;
            }
            let Some(number) = *held else { return false };
            let ring = &mut state.rings[rank][to];
            if broken != Broken::WaitsForNoPlace && !ring.is_free(number) {
                return false;
            }
            ring.send(number);
            *held = None;
            true
        })
    };
    let count_read = |state: &mut State, rank: usize, warp: usize| {
        let read = std::mem::take(&mut state.read[rank][warp]);
        for &(peer, number) in &read {
            if (number / half + 2) * half < count(peer, rank) {
                state.rings[peer][rank].count(number / half, 1);
            }
        }
        !read.is_empty()
    };
    let sum = |state: &mut State, rank: usize, warp: usize| {
        let summed = state.summed[rank][warp];
        let token = warp + summed * SUMMING;
        if token >= TOKENS {
            return count_read(state, rank, warp);
        }
        let records = || {
            let of_token = numbers[rank][token].iter().enumerate();
            of_token.filter_map(|(peer, number)| (peer != rank).then_some((peer, (*number)?)))
        };
        if !records().all(|(peer, number)| state.rings[peer][rank].there.contains(&number)) {
            return broken != Broken::CountsAtTheEnd && count_read(state, rank, warp);
        }
        for (peer, number) in records() {
            state.rings[peer][rank].read(number);
            state.read[rank][warp].push((peer, number));
        }
        state.summed[rank][warp] += 1;
        if (summed + 1).is_multiple_of(BATCH) {
            count_read(state, rank, warp);
        }
        true
    };
    run(&mut random, &mut state, world * (SENDING + SUMMING), |state, action, random| {
        let (rank, which) = (action / (SENDING + SUMMING), action % (SENDING + SUMMING));
        if which < SENDING { send(state, rank, which, random) } else { sum(state, rank, which - SENDING) }
    });
    state
        .summed
        .iter()
        .all(|warps| warps.iter().enumerate().all(|(warp, &summed)| warp + summed * SUMMING >= TOKENS))
}

type Call = fn(u64, usize, usize, Broken) -> bool;

/// The runs of many worlds that did not end.
fn stopped(call: Call, worlds: &[usize], broken: Broken) -> usize {
    let runs = worlds
        .iter()
        .flat_map(|&world| (1..=3).flat_map(move |half| (0..300).map(move |seed| (seed, world, half))));
    runs.filter(|&(seed, world, half)| !call(seed, world, half, broken)).count()
}

#[test]
fn rings_never_wait_in_a_circle() {
    for call in [dispatch as Call, combine] {
        assert_eq!(stopped(call, &[2, 3, 4, 8], Broken::Nothing), 0);
    }
}

#[test]
fn a_receiver_that_reads_all_peers_in_one_order_stops_three_ranks() {
    assert_ne!(stopped(dispatch, &[3, 4, 8], Broken::ReadsInOneOrder), 0);
}

#[test]
fn a_warp_that_sends_the_last_first_stops_ranks() {
    assert_ne!(stopped(dispatch, &[3, 4, 8], Broken::SendsTheLastFirst), 0);
}

#[test]
fn a_warp_that_counts_at_the_end_of_a_batch_stops_ranks() {
    assert_ne!(stopped(combine, &[2, 3, 4], Broken::CountsAtTheEnd), 0);
}

#[test]
fn a_sender_that_waits_for_no_place_writes_over_records() {
    for call in [dispatch as Call, combine] {
        assert!(std::panic::catch_unwind(|| stopped(call, &[2], Broken::WaitsForNoPlace)).is_err());
    }
}
