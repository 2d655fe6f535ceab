//! A model of the requests to copy engines (`Ports::Engines`): blocks push them into a FIFO in the host's memory, a thread of the host hands them to a
//! stream, and the stream copies, raises the counts of peers, and tells how many requests are done. All orders of what one or two ranks do, and
//! many of 3, 4 and 8. Of a rank's blocks the first copies and signals, and the second only signals.

use std::collections::{HashSet, VecDeque};

/// Slots of the FIFO: fewer than a launch has requests, so that it is full and begins anew.
const SLOTS: usize = 2;
const BLOCKS: usize = 2;

/// A request: the number of a block's copy, or of the signal behind it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Request {
    block: usize,
    launch: usize,
    is_signal: bool,
}

/// What a stream does, in order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Job {
    Do(Request),
    /// So many requests are done.
    Tell(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    /// Takes a number for its copy or its signal.
    Takes {
        is_signal: bool,
    },
    /// Has this number, and waits for room.
    Waits {
        is_signal: bool,
        number: usize,
    },
    /// Has written the request, and not yet its number, or where that is changed the other way around.
    Half {
        is_signal: bool,
        number: usize,
    },
    /// Waits for the signal of the rank before.
    Listens {
        last: usize,
    },
    /// Waits until its own requests up to this number are done.
    Flushes {
        last: usize,
    },
    Ended,
    /// Has given up, with or without a number.
    Dead,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Rank {
    blocks: [(At, usize); BLOCKS],
    /// In device memory: how many numbers are taken, how many requests are done, and the signals of each block of the rank before.
    taken: usize,
    done: usize,
    signals: [usize; BLOCKS],
    /// In the host's memory.
    slots: [(Option<Request>, usize); SLOTS],
    /// Of the thread: how many requests it has read, and has told that they are done.
    read: usize,
    told: usize,
    stream: VecDeque<Job>,
    /// Copies that are done.
    copies: usize,
    /// Whether the thread has ended, and the memory is gone.
    dropped: bool,
}

/// What is changed about the protocol, to see that the model notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Nothing,
    /// A block writes without waiting for room.
    IgnoresRoom,
    /// A block writes the number ahead of the request.
    NumberFirst,
    /// The thread itself tells that requests are done, as soon as it has read them.
    TellsAtOnce,
    /// The thread tells of a whole FIFO only.
    TellsOfWhole,
    /// A launch ends without waiting for its requests.
    EndsAtOnce,
    /// The plan is dropped without waiting for the stream.
    DropsAtOnce,
}

struct Model {
    ranks: usize,
    launches: usize,
    /// A block of rank 0 that may give up at any time.
    dies: bool,
    change: Change,
}

type State = Vec<Rank>;

/// How a block begins a launch.
fn first(block: usize) -> At {
    At::Takes { is_signal: block == 1 }
}

/// The part of the model that takes the next step.
#[derive(Clone, Copy)]
enum Who {
    Block(usize),
    Thread,
    Stream,
    Dies,
    Drop,
}

impl Model {
    fn start(&self) -> State {
        let rank = Rank {
            blocks: [0, 1].map(|block| (first(block), 0)),
            taken: 0,
            done: 0,
            signals: [0; BLOCKS],
            slots: [(None, 0); SLOTS],
            read: 0,
            told: 0,
            stream: VecDeque::new(),
            copies: 0,
            dropped: false,
        };
        vec![rank; self.ranks]
    }

    /// What one step leads to; none if there is none. An error if something is wrong then.
    fn step(&self, state: &State, rank: usize, who: Who) -> Result<Option<State>, String> {
        let mut next = state.clone();
        let own = &mut next[rank];
        match who {
            Who::Block(block) => {
                let failed = own.blocks.iter().any(|(at, _)| *at == At::Dead);
                let (at, launch) = own.blocks[block];
                own.blocks[block].0 = match at {
                    At::Ended | At::Dead => return Ok(None),
                    // A wait ends when another block has given up, too.
                    At::Waits { .. } | At::Listens { .. } | At::Flushes { .. } if failed => At::Dead,
                    At::Takes { is_signal } => {
                        own.taken += 1;
                        At::Waits { is_signal, number: own.taken - 1 }
                    }
                    At::Waits { number, .. }
                        if number >= own.done + SLOTS && self.change != Change::IgnoresRoom =>
                    {
                        return Ok(None);
                    }
                    At::Waits { is_signal, number } | At::Half { is_signal, number } => {
                        let is_first = matches!(at, At::Waits { .. });
                        let slot = &mut own.slots[number % SLOTS];
                        if is_first == (self.change != Change::NumberFirst) {
                            slot.0 = Some(Request { block, launch, is_signal });
                        } else {
                            slot.1 = number + 1;
                        }
                        match (is_first, is_signal) {
                            (true, _) => At::Half { is_signal, number },
                            (false, false) => At::Takes { is_signal: true },
                            (false, true) => At::Listens { last: number + 1 },
                        }
                    }
                    At::Listens { .. } if own.signals[block] <= launch => return Ok(None),
                    At::Listens { last } => At::Flushes { last },
                    At::Flushes { last } if own.done < last && self.change != Change::EndsAtOnce => {
                        return Ok(None);
                    }
                    At::Flushes { .. } => {
                        if block == 0 && own.copies <= launch {
                            return Err("a launch has ended ahead of its copies".into());
                        }
                        own.blocks[block].1 += 1;
                        match launch + 1 == self.launches {
                            true => At::Ended,
                            false => first(block),
                        }
                    }
                };
            }
            Who::Thread if own.dropped => return Ok(None),
            Who::Thread => {
                let (request, number) = own.slots[own.read % SLOTS];
                let behind = own.read - own.told;
                let most = if self.change == Change::TellsOfWhole { SLOTS } else { SLOTS / 2 };
                if number == own.read + 1 && behind < most {
                    own.read += 1;
                    let request = request.ok_or("a number without a request")?;
                    own.stream.push_back(Job::Do(request));
                    if self.change == Change::TellsAtOnce {
                        (own.done, own.told) = (own.read, own.read);
                    }
                } else if behind > 0 && (behind == most || self.change != Change::TellsOfWhole) {
                    own.stream.push_back(Job::Tell(own.read));
                    own.told = own.read;
                } else {
                    return Ok(None);
                }
            }
            Who::Stream => match own.stream.pop_front() {
                None => return Ok(None),
                Some(_) if own.dropped => return Err("the memory is gone that a copy uses".into()),
                Some(Job::Tell(done)) => own.done = done,
                Some(Job::Do(Request { launch, is_signal: false, .. })) => {
                    if own.copies != launch {
                        return Err(format!("{} copies are done, and now launch {launch}'s", own.copies));
                    }
                    own.copies += 1;
                }
                Some(Job::Do(Request { block, launch, is_signal: true })) => {
                    if block == 0 && own.copies != launch + 1 {
                        return Err("a signal ahead of its copy".into());
                    }
                    let peer = &mut next[(rank + 1) % self.ranks];
                    if peer.signals[block] != launch {
                        return Err("a signal twice, or none".into());
                    }
                    peer.signals[block] += 1;
                }
            },
            Who::Dies => match own.blocks[0] {
                (At::Waits { .. } | At::Takes { .. } | At::Flushes { .. }, _) if self.dies && rank == 0 => {
                    own.blocks[0].0 = At::Dead;
                }
                _ => return Ok(None),
            },
            // Kernels are over; the thread is told to end, and waits for its stream.
            Who::Drop => {
                let is_over = own.blocks.iter().all(|(at, _)| matches!(at, At::Ended | At::Dead));
                let is_idle = own.stream.is_empty() || self.change == Change::DropsAtOnce;
                if own.dropped || !is_over || !is_idle {
                    return Ok(None);
                }
                own.dropped = true;
            }
        }
        Ok(Some(next))
    }

    fn actors(&self) -> Vec<(usize, Who)> {
        let of_rank = |rank| {
            let blocks = (0..BLOCKS).map(Who::Block);
            blocks.chain([Who::Thread, Who::Stream, Who::Dies, Who::Drop]).map(move |who| (rank, who))
        };
        (0..self.ranks).flat_map(of_rank).collect()
    }

    /// Whether it may end so: all plans are dropped, or a rank has given up, for which the others wait until their deadline.
    fn check_end(&self, state: &State) -> Result<(), String> {
        let has_failed = state.iter().any(|rank| rank.blocks.iter().any(|(at, _)| *at == At::Dead));
        match has_failed || state.iter().all(|rank| rank.dropped) {
            true if state.iter().all(|rank| !rank.dropped || rank.stream.is_empty()) => Ok(()),
            _ => Err(format!("stuck: {state:?}")),
        }
    }

    /// All orders.
    fn explore(&self) -> Result<(), String> {
        let (mut seen, mut todo) = (HashSet::new(), vec![self.start()]);
        while let Some(state) = todo.pop() {
            let mut is_end = true;
            for (rank, who) in self.actors() {
                if let Some(next) = self.step(&state, rank, who)? {
                    is_end = false;
                    if seen.insert(next.clone()) {
                        todo.push(next);
                    }
                }
            }
            if is_end {
                self.check_end(&state)?;
            }
        }
        Ok(())
    }

    /// One order.
    fn walk(&self, mut random: u64) -> Result<(), String> {
        let (mut state, actors) = (self.start(), self.actors());
        loop {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let first = (random >> 33) as usize % actors.len();
            let mut found = None;
            for ahead in 0..actors.len() {
                let (rank, who) = actors[(first + ahead) % actors.len()];
                found = self.step(&state, rank, who)?;
                if found.is_some() {
                    break;
                }
            }
            match found {
                Some(next) => state = next,
                None => return self.check_end(&state),
            }
        }
    }
}

fn run(ranks: usize, launches: usize, dies: bool, change: Change) -> Result<(), String> {
    let model = Model { ranks, launches, dies, change };
    (0..300).try_for_each(|seed| model.walk(seed * 77_747 + 1))
}

#[test]
fn requests_come_to_an_end_in_every_order() {
    for (ranks, launches, dies) in [(1, 3, false), (1, 2, true), (2, 1, false)] {
        let model = Model { ranks, launches, dies, change: Change::Nothing };
        model.explore().unwrap_or_else(|wrong| panic!("{ranks} ranks: {wrong}"));
    }
}

#[test]
fn requests_of_many_ranks_come_to_an_end() {
    for ranks in [2, 3, 4, 8] {
        for dies in [false, true] {
            run(ranks, 4, dies, Change::Nothing).unwrap_or_else(|wrong| panic!("{ranks} ranks: {wrong}"));
        }
    }
}

#[test]
fn the_model_notices_changes() {
    use Change::{DropsAtOnce, EndsAtOnce, IgnoresRoom, NumberFirst, TellsAtOnce, TellsOfWhole};
    for change in [IgnoresRoom, NumberFirst, TellsAtOnce, TellsOfWhole, EndsAtOnce, DropsAtOnce] {
        for ranks in [2, 4] {
            let dies = change == DropsAtOnce;
            assert!(run(ranks, 4, dies, change).is_err(), "{ranks} ranks, {change:?}");
        }
    }
}
