//! A model of how blocks of between.cuh wait for each other: one block of each rank, which makes calls. All orders of their steps, and of
//! the arrival of puts, for 2, 3 and 4 ranks, and many for 8. A rank may be killed at any moment.
//!
//! What a block writes is the number of its call. A block that has waited for a call's signal and then reads another call's number has
//! found a defect, and so has a put whose source was written again before it was read. Rules are also broken on purpose, and must be
//! caught.

use std::collections::HashSet;

/// A step in which a rank tells others something: inputs and results on its node, sums and parts along its rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hop {
    Inputs,
    Sums,
    Parts,
    Results,
}

use Hop::{Inputs, Parts, Results, Sums};

impl Hop {
    fn is_on_rail(self) -> bool {
        matches!(self, Sums | Parts)
    }
}

/// The hops of calls in each mode.
const ONE: &[Hop] = &[Inputs, Sums];
const TWO: &[Hop] = &[Inputs, Sums, Results];
const THREE: &[Hop] = &[Inputs, Sums, Parts, Results];

/// The rules that can be broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// A mailbox has one slot.
    OneSlot,
    /// In the second call ranks of one node do not hear of each other.
    HearsNotOfNode,
    /// The signal of a put comes before its data.
    SignalsEarly,
}

/// The call whose data and whose signal have come to a mailbox.
type Mail = [u8; 2];

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    ranks: Vec<Rank>,
    /// Mailboxes by hop, receiver, slot and sender.
    mail: Vec<Mail>,
    /// What puts read, by rail hop, sender and slot.
    sources: Vec<u8>,
    puts: Vec<Put>,
    has_killed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Rank {
    lives: bool,
    /// The number of the call, from 1 on; beyond the last when all are done.
    call: u8,
    hop: u8,
    step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Sends,
    Waits,
    Reads,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Put {
    hop: u8,
    from: u8,
    to: u8,
    call: u8,
    /// Whether the first of data and signal has come.
    is_half: bool,
}

/// Ranks on nodes that have equally many, and their calls.
struct Model {
    nodes: usize,
    local: usize,
    calls: Vec<&'static [Hop]>,
    /// Whether stores reach other nodes. Then nothing is put.
    is_near: bool,
    kills: bool,
    broken: Broken,
}

impl Model {
    fn new(nodes: usize, local: usize, calls: &[&'static [Hop]]) -> Self {
        Self { nodes, local, calls: calls.to_vec(), is_near: false, kills: false, broken: Broken::Nothing }
    }

    fn world_size(&self) -> usize {
        self.nodes * self.local
    }

    /// The hops of a call. A rank that is alone on its node tells nobody there.
    fn hops(&self, call: u8) -> Vec<Hop> {
        let of_call = self.calls[usize::from(call) - 1];
        let is_skipped = |hop: Hop| match hop {
            Inputs => self.local == 1 || (self.broken == Broken::HearsNotOfNode && call == 2),
            Results => self.local == 1,
            Sums | Parts => false,
        };
        of_call.iter().copied().filter(|hop| !is_skipped(*hop)).collect()
    }

    /// The ranks that a rank tells something, and hears of, in a hop.
    fn peers(&self, rank: usize, hop: Hop) -> impl Iterator<Item = usize> + use<> {
        let (nodes, local, is_on_rail) = (self.nodes, self.local, hop.is_on_rail());
        (0..nodes * local).filter(move |&other| {
            let is_of_rail = other % local == rank % local;
            other != rank && if is_on_rail { is_of_rail } else { other / local == rank / local }
        })
    }

    fn slot(&self, call: u8) -> usize {
        if self.broken == Broken::OneSlot { 0 } else { usize::from(call % 2) }
    }

    fn mail(&self, hop: Hop, receiver: usize, call: u8, sender: usize) -> usize {
        ((hop as usize * self.world_size() + receiver) * 2 + self.slot(call)) * self.world_size() + sender
    }

    fn source(&self, hop: Hop, sender: usize, call: u8) -> usize {
        (hop as usize * self.world_size() + sender) * 2 + self.slot(call)
    }

    fn start(&self) -> State {
        let world_size = self.world_size();
        let rank = Rank { lives: true, call: 1, hop: 0, step: Step::Sends };
        State {
            ranks: vec![rank; world_size],
            mail: vec![[0; 2]; 4 * world_size * 2 * world_size],
            sources: vec![0; 4 * world_size * 2],
            puts: Vec::new(),
            has_killed: false,
        }
    }

    fn is_over(&self, rank: &Rank) -> bool {
        usize::from(rank.call) > self.calls.len()
    }

    /// The states that may follow.
    fn next(&self, state: &State) -> Result<Vec<State>, String> {
        let mut all = Vec::new();
        for index in 0..self.world_size() {
            let rank = state.ranks[index];
            if !rank.lives || self.is_over(&rank) {
                continue;
            }
            if self.kills && !state.has_killed {
                let mut killed = state.clone();
                (killed.ranks[index].lives, killed.has_killed) = (false, true);
                all.push(killed);
            }
            all.extend(self.step(state, index)?);
        }
        for index in 0..state.puts.len() {
            all.push(self.arrive(state, index)?);
        }
        Ok(all)
    }

    /// A rank's next step, if it can take it.
    fn step(&self, state: &State, index: usize) -> Result<Option<State>, String> {
        let rank = state.ranks[index];
        let (hops, call) = (self.hops(rank.call), rank.call);
        let hop = hops[usize::from(rank.hop)];
        let mut next = state.clone();
        let this = &mut next.ranks[index];
        match rank.step {
            Step::Sends => {
                this.step = Step::Waits;
                next.sources[self.source(hop, index, call)] = call;
                for to in self.peers(index, hop) {
                    match hop.is_on_rail() && !self.is_near {
                        false => next.mail[self.mail(hop, to, call, index)] = [call; 2],
                        true => {
                            let (hop, from, to) = (hop as u8, index as u8, to as u8);
                            next.puts.push(Put { hop, from, to, call, is_half: false });
                            next.puts.sort_unstable();
                        }
                    }
                }
            }
            Step::Waits => {
                let has_come = |from| state.mail[self.mail(hop, index, call, from)][1] == call;
                if !self.peers(index, hop).all(has_come) {
                    return Ok(None);
                }
                this.step = Step::Reads;
            }
            Step::Reads => {
                for from in self.peers(index, hop) {
                    let [found, _] = state.mail[self.mail(hop, index, call, from)];
                    if found != call {
                        return Err(format!(
                            "rank {index} reads call {found} of rank {from} in call {call}, {hop:?}"
                        ));
                    }
                }
                (this.step, this.hop) = (Step::Sends, rank.hop + 1);
                if usize::from(this.hop) == hops.len() {
                    (this.hop, this.call) = (0, call + 1);
                }
            }
        }
        Ok(Some(next))
    }

    /// Half of a put arrives: its data, then its signal.
    fn arrive(&self, state: &State, index: usize) -> Result<State, String> {
        let put = state.puts[index];
        let (hop, from, to) =
            ([Inputs, Sums, Parts, Results][usize::from(put.hop)], put.from.into(), put.to.into());
        let mut next = state.clone();
        let mail = &mut next.mail[self.mail(hop, to, put.call, from)];
        if put.is_half == (self.broken == Broken::SignalsEarly) {
            let source = state.sources[self.source(hop, from, put.call)];
            if source != put.call {
                return Err(format!("rank {from} puts call {} and its source has call {source}", put.call));
            }
            mail[0] = put.call;
        } else {
            mail[1] = put.call;
        }
        match put.is_half {
            false => next.puts[index].is_half = true,
            true => drop(next.puts.remove(index)),
        }
        next.puts.sort_unstable();
        Ok(next)
    }

    /// Of a state in which nothing can happen any more: whether every rank that lives is done, or waits for what has a deadline.
    fn check_end(&self, state: &State) -> Result<(), String> {
        let stuck = state.ranks.iter().position(|rank| rank.lives && !self.is_over(rank));
        match stuck {
            Some(rank) if !state.has_killed => Err(format!("rank {rank} waits for ever")),
            _ => Ok(()),
        }
    }

    /// Every order of steps: how many states there are.
    fn explore(&self) -> Result<usize, String> {
        let (mut known, mut open) = (HashSet::from([self.start()]), vec![self.start()]);
        while let Some(state) = open.pop() {
            let next = self.next(&state)?;
            if next.is_empty() {
                self.check_end(&state)?;
            }
            open.extend(next.into_iter().filter(|state| known.insert(state.clone())));
        }
        Ok(known.len())
    }

    /// Some orders of steps.
    fn wander(&self, walks: u64) -> Result<(), String> {
        let mut random = 0x9E37_79B9_7F4A_7C15u64;
        for _ in 0..walks {
            let mut state = self.start();
            loop {
                let mut next = self.next(&state)?;
                if next.is_empty() {
                    self.check_end(&state)?;
                    break;
                }
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // One rank or put may be far behind the others.
                let count = next.len() as u64;
                let chosen = if random >> 60 < 8 { random % count } else { random % count.min(2) };
                state = next.swap_remove(chosen as usize);
            }
        }
        Ok(())
    }
}

/// Calls in which the slots are used more than once, in all modes.
const CALLS: [&[&[Hop]]; 4] =
    [&[ONE; 5], &[TWO, ONE, TWO, ONE, ONE], &[THREE, ONE, THREE], &[ONE, ONE, TWO, THREE]];

#[test]
fn blocks_of_2_and_3_ranks_end_with_what_they_were_sent_in_every_order() {
    for calls in CALLS {
        for (nodes, local) in [(2, 1), (3, 1)] {
            let longest = if nodes == 2 { calls } else { &calls[..3] };
            let states = Model::new(nodes, local, longest).explore().unwrap();
            Model { kills: true, ..Model::new(nodes, local, &calls[..3]) }.explore().unwrap();
            assert!(states > 100, "{states}");
        }
    }
}

#[test]
fn blocks_of_4_ranks_on_2_nodes_end_in_every_order_of_stores_and_in_many_of_puts() {
    for calls in CALLS {
        Model { is_near: true, ..Model::new(2, 2, &calls[..3]) }.explore().unwrap();
        for (nodes, local) in [(2, 2), (4, 1)] {
            for kills in [false, true] {
                Model { kills, ..Model::new(nodes, local, calls) }.wander(400).unwrap();
            }
        }
    }
}

#[test]
fn blocks_of_8_ranks_end_in_many_orders() {
    for calls in CALLS {
        for (nodes, local) in [(2, 4), (4, 2), (8, 1)] {
            for kills in [false, true] {
                Model { kills, ..Model::new(nodes, local, calls) }.wander(40).unwrap();
            }
        }
    }
}

#[test]
fn a_broken_rule_is_caught() {
    let put = |broken| Model { broken, ..Model::new(2, 1, &[ONE; 4]) }.explore().unwrap_err();
    assert!(put(Broken::SignalsEarly).contains("reads call"));
    put(Broken::OneSlot);
    // They may be more than a call apart then.
    let stores = Model { broken: Broken::HearsNotOfNode, is_near: true, ..Model::new(2, 2, &[ONE; 3]) };
    stores.explore().unwrap_err();
}
