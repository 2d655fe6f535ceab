//! Every interleaving of mirrored rounds, by an exhaustive search through the states of a small world.
//!
//! The model is coarser than the code in that a step is atomic, and finer in that the network may deliver pieces in any order, reads what it
//! sends at delivery, and tells the sender later. Ranks post rounds, read them in two looks, and leave. In every state: what is
//! read is what its sender posted for this round, no rank takes one for gone whose post is still to come, and some step is possible
//! until all have left. Each rule is also broken on purpose, and must be caught.

use std::collections::HashSet;

/// The rules that can be broken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// A packet is filled again although a send still reads it.
    RefillsEarly,
    /// A head is published with the first piece.
    PublishesEarly,
    /// A rank has one packet.
    OnePacket,
    /// A departure counts at once.
    LeavesEarly,
}

#[derive(Clone, Copy)]
struct World {
    /// The node of each rank; a rank's number in its node times two is less than the number of ranks.
    nodes: &'static [usize],
    rounds: u8,
    pieces: usize,
    broken: Broken,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// It has read the round, or has not begun.
    Idle,
    /// It waits for all packets of the round.
    Waits,
    /// It has looked once at all packets.
    Reads,
    Left,
}

/// A piece or a word under way, or a piece that has arrived while the sender does not know.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Parcel {
    Piece {
        from: u8,
        node: u8,
        round: u8,
        piece: u8,
    },
    Arrived {
        from: u8,
        packet: u8,
    },
    /// To the process of a rank.
    Word {
        from: u8,
        to: u8,
    },
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    rounds: Vec<u8>,
    phases: Vec<Phase>,
    /// What the packets hold: by node, sender, packet and piece the round of the content. The sender's own node has the original.
    content: Vec<u8>,
    /// For each node, sender and packet: the stamp, and how many pieces of a later one are there.
    heads: Vec<(u8, u8)>,
    network: Vec<Parcel>,
    /// For each observer and sender: whether the sender's departure counts there; or has arrived and does not count yet.
    gone: Vec<u8>,
}

impl World {
    fn ranks(&self) -> usize {
        self.nodes.len()
    }

    fn node_count(&self) -> usize {
        self.nodes.iter().max().unwrap() + 1
    }

    fn packet(&self, round: u8) -> usize {
        if self.broken == Broken::OnePacket { 0 } else { round as usize % 2 }
    }

    fn head(&self, node: usize, sender: usize, packet: usize) -> usize {
        (node * self.ranks() + sender) * 2 + packet
    }

    fn start(&self) -> State {
        let packets = self.node_count() * self.ranks() * 2;
        State {
            rounds: vec![0; self.ranks()],
            phases: vec![Phase::Idle; self.ranks()],
            content: vec![0; packets * self.pieces],
            heads: vec![(0, 0); packets],
            network: Vec::new(),
            gone: vec![0; self.ranks() * self.ranks()],
        }
    }

    /// All states after one step.
    fn steps(&self, state: &State) -> Vec<State> {
        let mut after: Vec<State> = (0..self.ranks()).filter_map(|rank| self.step_of(state, rank)).collect();
        for (at, &parcel) in state.network.iter().enumerate() {
            let mut next = state.clone();
            next.network.remove(at);
            self.arrive(&mut next, parcel);
            next.network.sort_unstable();
            after.push(next);
        }
        after
    }

    fn step_of(&self, state: &State, rank: usize) -> Option<State> {
        let (node, round) = (self.nodes[rank], state.rounds[rank]);
        let mut next = state.clone();
        match state.phases[rank] {
            Phase::Left => return None,
            Phase::Idle if round == self.rounds => {
                next.phases[rank] = Phase::Left;
                for other in (0..self.ranks()).filter(|&other| other != rank) {
                    if self.nodes[other] == node {
                        next.gone[other * self.ranks() + rank] = 2;
                    } else {
                        next.network.push(Parcel::Word { from: rank as u8, to: other as u8 });
                    }
                }
            }
            Phase::Idle => {
                let packet = self.packet(round + 1);
                let is_read = |parcel: &Parcel| match *parcel {
                    Parcel::Piece { from, round: of, .. } => {
                        from as usize == rank && self.packet(of) == packet
                    }
                    Parcel::Arrived { from, packet: of } => from as usize == rank && of as usize == packet,
                    Parcel::Word { .. } => false,
                };
                if state.network.iter().any(is_read) {
                    assert!(
                        self.broken != Broken::RefillsEarly,
                        "rank {rank} fills what a send may still read"
                    );
                    return None;
                }
                next.rounds[rank] = round + 1;
                next.phases[rank] = Phase::Waits;
                let head = self.head(node, rank, packet);
                next.content[head * self.pieces..][..self.pieces].fill(round + 1);
                next.heads[head] = (round + 1, 0);
                let (from, round) = (rank as u8, round + 1);
                for node in (0..self.node_count()).filter(|&other| other != node) {
                    let piece = |piece| Parcel::Piece { from, node: node as u8, round, piece: piece as u8 };
                    next.network.extend((0..self.pieces).map(piece));
                }
            }
            Phase::Waits | Phase::Reads => {
                let packet = self.packet(round);
                for sender in 0..self.ranks() {
                    let head = self.head(node, sender, packet);
                    if state.heads[head].0 != round {
                        let is_gone = state.gone[rank * self.ranks() + sender] == 2;
                        assert!(
                            !is_gone,
                            "rank {rank} takes rank {sender} for gone before its round {round}"
                        );
                        assert!(state.phases[rank] == Phase::Waits, "a packet vanishes while it is read");
                        return None;
                    }
                    let content = &state.content[head * self.pieces..][..self.pieces];
                    assert!(
                        content.iter().all(|of| *of == round),
                        "rank {rank} reads {content:?} in round {round}"
                    );
                }
                let waits = state.phases[rank] == Phase::Waits;
                next.phases[rank] = if waits { Phase::Reads } else { Phase::Idle };
            }
        }
        next.network.sort_unstable();
        Some(next)
    }

    fn arrive(&self, state: &mut State, parcel: Parcel) {
        match parcel {
            Parcel::Piece { from, node, round, piece } => {
                let (sender, packet) = (from as usize, self.packet(round));
                let original = self.head(self.nodes[sender], sender, packet) * self.pieces + piece as usize;
                let mirror = self.head(node as usize, sender, packet);
                state.content[mirror * self.pieces + piece as usize] = state.content[original];
                let (stamp, there) = &mut state.heads[mirror];
                *there += 1;
                if *there as usize == self.pieces || self.broken == Broken::PublishesEarly {
                    *stamp = round;
                }
                if *there as usize == self.pieces {
                    *there = 0;
                }
                state.network.push(Parcel::Arrived { from, packet: packet as u8 });
            }
            Parcel::Arrived { .. } => {}
            Parcel::Word { from, to } => state.gone[to as usize * self.ranks() + from as usize] = 1,
        }
        for to in 0..self.ranks() {
            for from in 0..self.ranks() {
                let round = state.rounds[from];
                let head = self.head(self.nodes[to], from, self.packet(round));
                let counts = state.heads[head].0 >= round || self.broken == Broken::LeavesEarly;
                let word = &mut state.gone[to * self.ranks() + from];
                if *word == 1 && counts {
                    *word = 2;
                }
            }
        }
    }

    /// Visits every state that can be reached; how many there are.
    fn explore(&self) -> usize {
        let mut seen = HashSet::from([self.start()]);
        let mut open = vec![self.start()];
        while let Some(state) = open.pop() {
            let after = self.steps(&state);
            let is_over = state.phases.iter().all(|phase| *phase == Phase::Left);
            assert!(!after.is_empty() || is_over, "no step is possible");
            for next in after {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        seen.len()
    }
}

const WHOLE: World = World { nodes: &[0, 1], rounds: 4, pieces: 2, broken: Broken::Nothing };

#[test]
fn no_interleaving_reads_what_was_not_posted_or_stops() {
    let worlds = [
        WHOLE,
        World { nodes: &[0, 1, 1], rounds: 2, pieces: 1, ..WHOLE },
        World { nodes: &[0, 1, 0], rounds: 1, pieces: 2, ..WHOLE },
        World { nodes: &[0, 1, 2], rounds: 2, pieces: 1, ..WHOLE },
        World { nodes: &[0, 0, 1, 1], rounds: 1, pieces: 1, ..WHOLE },
    ];
    for world in worlds {
        let states = world.explore();
        assert!(states > 100, "{:?}: {states} states", world.nodes);
    }
}

fn is_caught(broken: Broken) {
    let world = World { broken, ..WHOLE };
    assert!(std::panic::catch_unwind(|| world.explore()).is_err());
}

#[test]
fn a_packet_that_is_filled_again_too_early_is_caught() {
    is_caught(Broken::RefillsEarly);
}

#[test]
fn a_head_that_is_published_with_the_first_piece_is_caught() {
    is_caught(Broken::PublishesEarly);
}

#[test]
fn a_single_packet_is_caught() {
    is_caught(Broken::OnePacket);
}

#[test]
fn a_departure_that_counts_at_once_is_caught() {
    is_caught(Broken::LeavesEarly);
}
