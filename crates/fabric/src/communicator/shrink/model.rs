//! Survivors in a world that loses ranks and links at any point, by the code of [`Agreement`].
//!
//! Small worlds go through every interleaving, larger ones through many random ones. A node's ranks hear each other at once; a message to
//! another node arrives whenever it does, in any order, or never if its sender was killed or the link is cut. That a rank is gone is
//! noticed some time later, by each for itself; a rank that has decided may leave. When nothing can happen any more, every rank that lives must have
//! decided: a wait without an end would show there. Rules are also broken on purpose, and must be caught.

use std::collections::{HashMap, HashSet};

use super::agreement::{Agreement, Next, Said, Sight, View};

/// The rules that can be broken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// A rank does not believe the losses of others.
    BelievesNobody,
    /// A rank does not say for what it has decided.
    GoesSilently,
    /// An older message replaces a newer one.
    HearsTheOld,
    /// A rank that leaves is gone before all is heard that it said.
    IsGoneEarly,
}

/// A message.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Parcel {
    from: usize,
    to: usize,
    number: u8,
    said: Said,
    lost: Option<usize>,
}

/// A rank, and what it has heard.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Rank {
    part: Agreement,
    has_come: bool,
    lives: bool,
    sent: u8,
    /// The ranks of each view in which it was ready.
    made: Vec<(View, Vec<usize>)>,
    /// For which of them it has decided.
    decided: Option<(View, Vec<usize>)>,
    /// The number of each rank's newest message, and what it said.
    heard: Vec<(u8, Said)>,
    /// The ranks that each rank has lost.
    losses: Vec<Vec<bool>>,
    /// Whether this rank has noticed that each is gone.
    gone: Vec<bool>,
    believes: bool,
}

impl Rank {
    fn takes_part(&self) -> bool {
        self.lives && self.decided.is_none()
    }
}

impl Sight for Rank {
    fn is_gone(&self, rank: usize) -> bool {
        self.gone[rank]
    }

    fn said(&self, rank: usize) -> Said {
        self.heard[rank].1
    }

    fn says_lost(&self, rank: usize, lost: usize) -> bool {
        self.believes && self.losses[rank][lost]
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    ranks: Vec<Rank>,
    network: Vec<Parcel>,
    kills: usize,
    cuts: usize,
}

/// What can happen.
#[derive(Clone, Copy)]
enum Event {
    Look(usize),
    Arrive(usize),
    Notice { by: usize, gone: usize },
    Kill(usize),
    Cut,
}

#[derive(Clone, Copy)]
struct World {
    /// The node of each rank.
    nodes: &'static [usize],
    kills: usize,
    /// The links between nodes that are cut, one after the other.
    cuts: &'static [(usize, usize)],
    broken: Broken,
}

impl World {
    fn start(&self) -> State {
        let size = self.nodes.len();
        let rank = |rank| Rank {
            part: Agreement::new(rank, vec![false; size], None),
            has_come: false,
            lives: true,
            sent: 0,
            made: Vec::new(),
            decided: None,
            heard: vec![(0, Said::default()); size],
            losses: vec![vec![false; size]; size],
            gone: vec![false; size],
            believes: self.broken != Broken::BelievesNobody,
        };
        State { ranks: (0..size).map(rank).collect(), network: Vec::new(), kills: 0, cuts: 0 }
    }

    fn is_cut(&self, state: &State, one: usize, other: usize) -> bool {
        let (one, other) = (self.nodes[one], self.nodes[other]);
        self.cuts[..state.cuts].iter().any(|&cut| cut == (one, other) || cut == (other, one))
    }

    /// All that can happen. What none of the ranks can tell apart is left out.
    fn events(&self, state: &State) -> Vec<Event> {
        let ranks = 0..state.ranks.len();
        let taking_part = ranks.clone().filter(|&rank| state.ranks[rank].takes_part());
        let mut events: Vec<Event> = taking_part.clone().map(Event::Look).collect();
        events.extend((0..state.network.len()).map(Event::Arrive));
        for by in taking_part {
            let may_notice = |&gone: &usize| {
                let other = &state.ranks[gone];
                let is_heard = || state.network.iter().all(|parcel| (parcel.from, parcel.to) != (gone, by));
                let left = || other.decided.is_some() && (is_heard() || self.broken == Broken::IsGoneEarly);
                gone != by
                    && !state.ranks[by].gone[gone]
                    && (!other.lives || self.is_cut(state, by, gone) || left())
            };
            events.extend(ranks.clone().filter(may_notice).map(|gone| Event::Notice { by, gone }));
        }
        if state.kills < self.kills {
            events.extend(ranks.filter(|&rank| state.ranks[rank].lives).map(Event::Kill));
        }
        events.extend((state.cuts < self.cuts.len()).then_some(Event::Cut));
        events
    }

    fn after(&self, state: &State, event: Event) -> State {
        let mut next = state.clone();
        match event {
            Event::Look(rank) => self.look(&mut next, rank),
            Event::Arrive(at) => {
                let parcel = next.network.remove(at);
                self.arrive(&mut next, parcel);
            }
            Event::Notice { by, gone } => {
                next.ranks[by].gone[gone] = true;
                let is_lost = |parcel: &Parcel| (parcel.from, parcel.to) == (gone, by);
                next.network.retain(|parcel| !is_lost(parcel) || state.ranks[gone].decided.is_some());
            }
            Event::Kill(rank) => {
                next.ranks[rank].lives = false;
                next.kills += 1;
            }
            Event::Cut => {
                next.cuts += 1;
                let after = next.clone();
                next.network.retain(|parcel| !self.is_cut(&after, parcel.from, parcel.to));
            }
        }
        let State { ranks, network, .. } = &mut next;
        network.retain(|parcel| ranks[parcel.to].takes_part());
        network.sort_unstable();
        next
    }

    /// Gives what a rank says to its node, and to the network for the others.
    fn say(&self, state: &mut State, from: usize, (said, lost): (Said, Option<usize>)) {
        state.ranks[from].sent += 1;
        let number = state.ranks[from].sent;
        for to in (0..self.nodes.len()).filter(|&to| to != from) {
            let parcel = Parcel { from, to, number, said, lost };
            if self.nodes[to] == self.nodes[from] {
                self.arrive(state, parcel);
            } else if !self.is_cut(state, from, to) {
                state.network.push(parcel);
            }
        }
    }

    fn arrive(&self, state: &mut State, Parcel { from, to, number, said, lost }: Parcel) {
        let to = &mut state.ranks[to];
        if let Some(lost) = lost {
            to.losses[from][lost] = true;
        }
        if number > to.heard[from].0 || self.broken == Broken::HearsTheOld {
            to.heard[from] = (number, said);
        }
    }

    /// A rank looks, and gets ready if its node shares memory.
    fn look(&self, state: &mut State, rank: usize) {
        let mut says = Vec::new();
        let this = &mut state.ranks[rank];
        if !std::mem::replace(&mut this.has_come, true) {
            says.push((this.part.said(), None));
        }
        let heard = this.clone();
        let next = this.part.look(&heard, |said, lost| says.push((said, lost)));
        if let Next::Decided(view) = next {
            this.decided = this.made.iter().find(|(made, _)| *made == view).cloned();
            assert!(this.decided.is_some(), "rank {rank} decides for a view in which it is not ready");
            if self.broken == Broken::GoesSilently {
                says.pop();
            }
        } else {
            let is_mate = |&mate: &usize| self.nodes[mate] == self.nodes[rank];
            let shares = this.part.ranks().filter(is_mate).all(|mate| this.part.has_arrived(&heard, mate));
            if shares && !this.part.is_ready() {
                this.made.push((this.part.view(), this.part.ranks().collect()));
                this.part.get_ready(|said, lost| says.push((said, lost)));
            }
        }
        says.into_iter().for_each(|what| self.say(state, rank, what));
    }

    /// Nothing happens any more by itself.
    fn check_end(&self, state: &State) {
        let living = || state.ranks.iter().enumerate().filter(|(_, rank)| rank.lives);
        for (rank, this) in living() {
            let Some((view, group)) = &this.decided else {
                panic!("rank {rank} waits for ever for {:?}", this.part.missing(this));
            };
            for (other, that) in living() {
                let (its, others) = that.decided.as_ref().expect("it was checked, or will be");
                let is_mutual = group.contains(&other) && others.contains(&rank);
                assert!(!is_mutual || view == its, "ranks {rank} and {other} have {group:?} and {others:?}");
                assert!(
                    is_mutual || state.cuts > 0,
                    "rank {rank} has {group:?} without {other}, which lives"
                );
            }
        }
    }

    /// Visits every state that can be reached; how many there are.
    fn explore(&self) -> usize {
        let mut seen = HashSet::from([self.start()]);
        let mut open = vec![self.start()];
        while let Some(state) = open.pop() {
            let mut goes_on = false;
            for event in self.events(&state) {
                let next = self.after(&state, event);
                goes_on |= next != state && !matches!(event, Event::Kill(_) | Event::Cut);
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
            if !goes_on {
                self.check_end(&state);
            }
        }
        seen.len()
    }

    /// One random schedule; how many ranks lived to its end.
    fn play(&self, seed: u64) -> usize {
        let mut random = Random(seed);
        let mut state = self.start();
        // A look that changes nothing may be repeated; what is bounded is the number of changes.
        for _ in 0..100_000 {
            let mut events = self.events(&state);
            loop {
                if events.is_empty() {
                    self.check_end(&state);
                    return state.ranks.iter().filter(|rank| rank.lives).count();
                }
                let event = events.swap_remove(random.below(events.len()));
                // So that kills come at any point, and not all at the beginning.
                if matches!(event, Event::Kill(_) | Event::Cut) && random.below(20) > 0 {
                    continue;
                }
                let next = self.after(&state, event);
                if next != state {
                    state = next;
                    break;
                }
            }
        }
        panic!("there is no end");
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) % limit as u64) as usize
    }
}

const PAIR: World = World { nodes: &[0, 1], kills: 1, cuts: &[], broken: Broken::Nothing };

#[test]
fn no_interleaving_of_few_ranks_disagrees_or_stops() {
    let worlds = [
        PAIR,
        World { cuts: &[(0, 1)], ..PAIR },
        World { nodes: &[0, 0], ..PAIR },
        World { nodes: &[0, 0, 0], kills: 2, ..PAIR },
        World { nodes: &[0, 1, 1], ..PAIR },
    ];
    for world in worlds {
        let states = world.explore();
        eprintln!("{:?}: {states} states", world.nodes);
        assert!(states > 20, "{:?}: {states} states", world.nodes);
    }
}

#[test]
fn no_schedule_of_more_ranks_disagrees_or_stops() {
    let mut lived = HashMap::new();
    let worlds = [
        World { nodes: &[0, 1, 2], ..PAIR },
        World { nodes: &[0, 1, 2], cuts: &[(0, 1)], ..PAIR },
        World { nodes: &[0, 0, 1, 1], ..PAIR },
        World { nodes: &[0, 1, 0, 1], cuts: &[(0, 1)], ..PAIR },
        World { nodes: &[0, 1, 2, 3], cuts: &[(0, 1), (2, 3)], ..PAIR },
        World { nodes: &[0, 0, 0, 0, 1, 1, 1, 1], ..PAIR },
        World { nodes: &[0, 1, 2, 0, 1, 2, 0, 1], cuts: &[(0, 1)], ..PAIR },
        World { nodes: &[0, 0, 1, 2, 2, 3, 3, 3], cuts: &[(0, 2), (0, 3), (1, 2)], ..PAIR },
    ];
    for world in worlds {
        for seed in 0..150 {
            let world = World { kills: seed as usize % world.nodes.len(), ..world };
            *lived.entry(world.play(seed)).or_insert(0) += 1;
        }
    }
    eprintln!("schedules by the number of ranks that lived: {lived:?}");
}

/// Some schedule shows the fault.
fn is_caught(world: World) {
    let play = || (0..3000).map(|seed| world.play(seed)).sum::<usize>();
    assert!(std::panic::catch_unwind(play).is_err());
}

#[test]
fn a_rank_that_believes_nobody_is_caught() {
    is_caught(World { nodes: &[0, 1, 2], kills: 0, cuts: &[(0, 1)], broken: Broken::BelievesNobody });
}

#[test]
fn a_rank_that_goes_silently_is_caught() {
    is_caught(World { nodes: &[0, 1, 2], broken: Broken::GoesSilently, ..PAIR });
}

#[test]
fn a_rank_that_hears_the_old_is_caught() {
    is_caught(World { broken: Broken::HearsTheOld, ..PAIR });
}

#[test]
fn a_rank_that_is_gone_before_it_is_heard_is_caught() {
    is_caught(World { kills: 0, broken: Broken::IsGoneEarly, ..PAIR });
}
