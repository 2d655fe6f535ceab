//! What arrives from other nodes.

use std::{
    ptr::NonNull,
    sync::{MutexGuard, PoisonError},
};

use antiphon_device::sync::{Mutex, Ordering};

use super::{KIND_BITS, Kind, Word};
use crate::{
    communicator::shrink::Said,
    engine::{Message, Receiver},
    layout::{BODY, LANES, MESSAGE_BELL, RING, Regions},
    nodes::Nodes,
};

/// The mirrors of remote ranks in the memory of this node, as one process writes them.
pub(crate) struct Mirror {
    rank: usize,
    regions: Regions,
    nodes: Nodes,
    node: usize,
    state: Mutex<State>,
}

struct State {
    /// The pieces of each packet of rounds, by sender, lane and parity.
    packets: Vec<Gathered>,
    /// How many packets of rings are there, by sender.
    received: Vec<u64>,
    /// Words that do not count yet.
    pending: Vec<Pending>,
    /// The number of the last word of each sender that counts.
    numbers: Vec<u64>,
    /// The number of the newest notice of each sender.
    notices: Vec<u64>,
    /// The ranks of this node that are gone: what they would have taken does not come.
    gone: Vec<usize>,
}

/// How much of a packet is there.
#[derive(Clone, Copy, Default)]
struct Gathered {
    round: u64,
    bytes: u64,
}

/// A word that takes effect once the words before it have, its rank's posts up to the rounds `posted` have arrived, and so have `sent`
/// packets.
struct Pending {
    sender: usize,
    word: Word,
    number: u64,
    posted: [u64; LANES],
    sent: u64,
}

impl Mirror {
    /// For rank `rank` of a communicator with this memory.
    pub(crate) fn new(rank: usize, nodes: Nodes, regions: Regions) -> Self {
        let world_size = nodes.world_size();
        let state = State {
            packets: vec![Gathered::default(); world_size * LANES * 2],
            received: vec![0; world_size],
            pending: Vec::new(),
            numbers: vec![0; world_size],
            notices: vec![0; world_size],
            gone: Vec::new(),
        };
        Self { rank, regions, node: nodes.of(rank), nodes, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_remote(&self, sender: usize) -> bool {
        sender < self.nodes.world_size() && self.nodes.of(sender) != self.node
    }

    /// Counts a piece; publishes the packet if it was the last of it.
    fn post(&self, state: &mut State, sender: usize, message: &Message, len: usize) {
        let [packet, round, words @ .., total] = message.words;
        let (Ok(packet), true) = (usize::try_from(packet), total <= BODY as u64) else { return };
        if packet >= LANES * 2 || round % 2 != packet as u64 % 2 {
            return;
        }
        let gathered = &mut state.packets[sender * LANES * 2 + packet];
        if gathered.round != round {
            if gathered.round > round {
                return;
            }
            *gathered = Gathered { round, bytes: 0 };
        }
        gathered.bytes += len as u64;
        if gathered.bytes != total {
            return;
        }
        let (lane, parity) = (packet / 2, packet % 2);
        self.regions.mailbox(sender, lane, parity).head.publish(round, words);
        self.ring(lane..lane + 1);
    }

    /// Publishes a packet of the ring of messages to this rank.
    fn packet(&self, state: &mut State, sender: usize, message: &Message, len: usize) {
        let [index, stamp, words @ .., total] = message.words;
        if index >= RING as u64 || len as u64 != total {
            return;
        }
        self.regions.ring(sender, self.rank, index as usize).head.publish(stamp, words);
        state.received[sender] += 1;
        self.regions.control(self.rank).bells[MESSAGE_BELL].0.ring();
    }

    /// Notes what a rank has consumed of this rank's ring. It may be older than what is known.
    fn consumed(&self, sender: usize, message: &Message) {
        let [count, expected @ .., _, _] = message.words;
        let consumed = self.regions.consumed(self.rank, sender);
        if expected[0] != 0 {
            consumed.refuse(expected);
        }
        if count > consumed.count() {
            consumed.announce(count);
        }
        self.regions.control(self.rank).bells[MESSAGE_BELL].0.ring();
    }

    /// Notes what a rank says that shrinks the communicator. Notices come in any order: the newest holds, and a loss is never taken back.
    fn notice(&self, state: &mut State, sender: usize, message: &Message) {
        let [number, said @ .., lost, _] = message.words;
        let lost = usize::try_from(lost).ok().and_then(|lost| lost.checked_sub(1));
        if let Some(lost) = lost.filter(|&lost| lost < self.nodes.world_size()) {
            self.regions.loss(sender, lost).store(1, Ordering::Release);
        }
        if number > state.notices[sender] {
            state.notices[sender] = number;
            self.regions.control(sender).notice.0.say(Said::decode(said));
        }
        self.regions.count_notice(sender);
        self.regions.control(self.rank).bells[0].0.ring();
    }

    fn ring(&self, bells: std::ops::Range<usize>) {
        for &rank in self.nodes.ranks(self.node) {
            for bell in bells.clone() {
                self.regions.control(rank).bells[bell].0.ring();
            }
        }
    }

    /// Applies the words that count now.
    fn apply_words(&self, state: &mut State) {
        while let Some(next) = state.pending.iter().position(|pending| self.counts(pending, state)) {
            let Pending { sender, word, number, .. } = state.pending.swap_remove(next);
            state.numbers[sender] = number;
            let control = self.regions.control(sender);
            match word {
                Word::Departed { .. } => control.depart(),
                Word::Fault(fault) => control.say_fault(fault),
                Word::FaultInGroup(fault) => control.say_fault_in_group(fault),
                Word::GivenUp { lane, round } => self.regions.mark_given_up(sender, lane, round),
            }
            self.ring(0..LANES + 1);
        }
    }

    fn counts(&self, pending: &Pending, state: &State) -> bool {
        let has_posted = |lane: usize| {
            let round = pending.posted[lane];
            let packet = self.regions.mailbox(pending.sender, lane, (round % 2) as usize);
            packet.head.stamp() >= round
        };
        pending.number == state.numbers[pending.sender] + 1
            && pending.sent <= state.received[pending.sender]
            && (state.gone.contains(&self.nodes.rail(pending.sender, self.node))
                || (0..LANES).all(has_posted))
    }

    /// Lets words count that wait for what this rank of the node would have taken, as it is gone.
    pub(crate) fn forget_rail(&self, mate: usize) {
        let mut state = self.lock();
        if !state.gone.contains(&mate) {
            state.gone.push(mate);
            self.apply_words(&mut state);
        }
    }
}

// SAFETY: a region is valid for writing as long as the mapping, which `regions` holds; others access it through raw pointers and
// atomics, and read what is written here after the head says that it is there.
unsafe impl Receiver for Mirror {
    fn region(&self, sender: usize) -> Option<NonNull<[u8]>> {
        let region = || {
            let (start, len) = (self.regions.region(sender), self.regions.layout().stride);
            NonNull::slice_from_raw_parts(start, len)
        };
        self.is_remote(sender).then(region)
    }

    fn arrived(&self, message: &Message, len: usize) {
        let sender = message.sender as usize;
        if !self.is_remote(sender) {
            return;
        }
        let mut state = self.lock();
        match Kind::decode(message.kind) {
            Some(Kind::Post) => self.post(&mut state, sender, message, len),
            Some(Kind::Packet) => self.packet(&mut state, sender, message, len),
            Some(Kind::Consumed) => self.consumed(sender, message),
            Some(Kind::Notice) => self.notice(&mut state, sender, message),
            Some(Kind::Word) => {
                let [both, value, posted @ .., sent] = message.words;
                let (kind, number) = (both & ((1 << KIND_BITS) - 1), both >> KIND_BITS);
                if let Some(word) = Word::decode(kind, value) {
                    if let Word::Departed { notices } = word {
                        self.regions.note_leaving(sender, notices);
                        self.regions.control(self.rank).bells[0].0.ring();
                    }
                    state.pending.push(Pending { sender, word, number, posted, sent });
                }
            }
            None => {}
        }
        if !state.pending.is_empty() {
            self.apply_words(&mut state);
        }
    }
}
