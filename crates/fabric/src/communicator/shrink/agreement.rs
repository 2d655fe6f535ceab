//! How the ranks that are left agree on who they are.
//!
//! Each rank keeps the set of ranks that it takes for *lost*, which only grows: by ranks that it finds gone, and by ranks that
//! others have lost, whom it believes. The rest is its [`View`] of who is left. A rank says every loss and every step of its own to all
//! ranks, in the memory of its node and by messages to other nodes:
//!
//! 1. It has *arrived* in a view when it says that. Once all ranks of its node that are in the view have arrived there, they share memory.
//! 2. It is *ready* in the view when it has the memory and takes messages of the new communicator.
//! 3. It *decides* for the view when all ranks of the view have said that they are ready in it; it says so, and goes. A rank that was ready
//!    in a view and hears that somebody decided for it, of whom it has not said that he is lost, decides for it too, even if it has
//!    lost more ranks since.
//!
//! What a rank hears after it has lost the speaker does not count. A rank that hears that it is lost to another takes that one for lost.
//!
//! # Why ranks that decide for each other have the same view
//! Let rank `r` decide for a view with `s`, and `s` for one with `r`. The first to decide for the view of `r`, say `p`, had heard of all its
//! ranks, and so of `s`, that they were ready in it; likewise `q` of all ranks of the view of `s`. So `r` and `s` were ready in both views. Losses
//! only grow, so one view is within the other; let that of `s` be the smaller one, so that `r` was ready in it after
//! its own view. Then `r` did not decide by having heard of all, but because it believed a rank `x`, of whom it had not said that he is lost.
//! Hence `x` is in the smaller view, had been ready in it too, and decided for the larger one because it believed the next, and so on
//! back to `p`. But `p` decided by itself: its losses never grew beyond its view, and it was never ready in the smaller one.
//! This contradicts that `q` has heard it. (So nothing hangs on what the ranks take for lost. If they are wrong, as behind a cut link, each
//! side goes on with those whom it hears.)
//!
//! # Why no rank waits for ever
//! Say that no further rank ends or is cut off. Losses are finite in number, so at some time all that are said have arrived. Take
//! `r`, which has not decided, and a rank `s` of its view. If `s` has not come, or gave up, `r` ends by its time-out, or by
//! that word. If `s` has decided, `r` hears it, and decides or loses `s`: a loss more, which was excluded. If `s` has lost
//! `r`, then `r` hears that and loses `s`, or cannot hear it and finds `s` gone. Else each has heard the losses of the
//! other and believed them. So all ranks of the view have the same one, have arrived in it, get ready, hear that of each other, and decide. The
//! numbers of ranks do not matter, and no rank is special: there is none whose loss ends it.
//!
//! `model.rs` tries that, with kills and cuts at any point, and with each rule broken.

use sha2::{Digest, Sha256};

/// How far a rank has come in its view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Step {
    Arrived,
    Ready,
    /// It has left without a new communicator, for good.
    GaveUp,
}

/// A set of ranks that may be left, as a number: ranks with the same set have the same number. Upper bits count how often the communicator
/// was shrunk before, the lowest two are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct View(u64);

impl View {
    const TURN: u32 = 48;

    /// The view without these ranks, for ranks whose last decision was for this view.
    fn without(lost: &[bool], last: Option<Self>) -> Self {
        let turn = last.map_or(0, Self::turn) + 1;
        let mut hasher = Sha256::new();
        hasher.update(last.map_or(0, |last| last.0).to_le_bytes());
        lost.iter().for_each(|&lost| hasher.update([u8::from(lost)]));
        let hash = hasher.finalize();
        let hash = u64::from_le_bytes(*hash.first_chunk().expect("a hash is longer"));
        Self(turn << Self::TURN | (hash % (1 << Self::TURN)) & !3)
    }

    /// The view of this number; none is none.
    pub(crate) fn of_number(number: u64) -> Option<Self> {
        (number != 0).then_some(Self(number & !3))
    }

    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// The number of the communicator that these ranks get, given that of the one that they shrink.
    pub(super) fn communicator(self, shrunk: u64) -> u64 {
        let hash =
            Sha256::new().chain_update(shrunk.to_le_bytes()).chain_update(self.0.to_le_bytes()).finalize();
        u64::from_le_bytes(*hash.first_chunk().expect("a hash is longer"))
    }

    /// To which shrinking of the communicator it belongs, from 1.
    fn turn(self) -> u64 {
        self.0 >> Self::TURN
    }
}

/// What a rank has said last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Said {
    pub(crate) state: Option<(Step, View)>,
    /// The view for which it has decided last.
    pub(crate) decided: Option<View>,
}

/// What a rank sees of the others.
pub(crate) trait Sight {
    /// Whether nothing more comes from a rank. All that came from it can be seen then.
    fn is_gone(&self, rank: usize) -> bool;
    fn said(&self, rank: usize) -> Said;
    /// Whether a rank has said that `lost` is lost.
    fn says_lost(&self, rank: usize, lost: usize) -> bool;
}

/// How a look ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// There is more to wait for.
    Waits,
    /// The view has this rank's decision, which it has said: it may go.
    Decided(View),
    /// This rank has given up, and so must all.
    GaveUp { by: usize },
}

/// One rank's part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Agreement {
    rank: usize,
    lost: Vec<bool>,
    last: Option<View>,
    view: View,
    step: Step,
    /// The views in which it has been ready.
    ready_in: Vec<View>,
}

impl Agreement {
    /// The part of a rank that has said these losses before, and has decided last for `last`. To be said first: that it
    /// [has arrived](Self::said).
    pub(crate) fn new(rank: usize, lost: Vec<bool>, last: Option<View>) -> Self {
        let view = View::without(&lost, last);
        Self { rank, lost, last, view, step: Step::Arrived, ready_in: Vec::new() }
    }

    pub(crate) fn view(&self) -> View {
        self.view
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.step == Step::Ready
    }

    /// The ranks of the view.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.lost.len()).filter(|&rank| !self.lost[rank])
    }

    /// What this rank has to say.
    pub(crate) fn said(&self) -> Said {
        Said { state: Some((self.step, self.view)), decided: self.last }
    }

    /// Whether a rank has arrived in the view.
    pub(crate) fn has_arrived(&self, sight: &impl Sight, rank: usize) -> bool {
        rank == self.rank || sight.said(rank).state.is_some_and(|(_, view)| view == self.view)
    }

    fn has_said_ready(&self, sight: &impl Sight, rank: usize) -> bool {
        let said = || sight.said(rank).state == Some((Step::Ready, self.view));
        if rank == self.rank { self.is_ready() } else { said() }
    }

    /// For whom this rank waits.
    pub(crate) fn missing(&self, sight: &impl Sight) -> Vec<usize> {
        let absent: Vec<usize> = self.ranks().filter(|&rank| !self.has_arrived(sight, rank)).collect();
        match absent.is_empty() {
            true => self.ranks().filter(|&rank| !self.has_said_ready(sight, rank)).collect(),
            false => absent,
        }
    }

    /// Looks at the others once. `say` says to all what this rank says now, and which rank it has lost, if it has.
    pub(crate) fn look(&mut self, sight: &impl Sight, mut say: impl FnMut(Said, Option<usize>)) -> Next {
        for other in 0..self.lost.len() {
            if other == self.rank || self.lost[other] {
                continue;
            }
            // Asked first: what a rank said before it went counts.
            let is_gone = sight.is_gone(other);
            let Said { state, decided } = sight.said(other);
            let turn = self.view.turn();
            match decided {
                Some(decided) if self.ready_in.contains(&decided) => return self.decide(decided, say),
                Some(decided) if decided.turn() >= turn => self.lose(other, &mut say),
                _ if state.is_some_and(|(step, _)| step == Step::GaveUp) => {
                    return Next::GaveUp { by: other };
                }
                _ if is_gone => self.lose(other, &mut say),
                _ => {
                    for lost in (0..self.lost.len()).filter(|&lost| sight.says_lost(other, lost)) {
                        self.lose(if lost == self.rank { other } else { lost }, &mut say);
                    }
                }
            }
        }
        let all_are_ready = self.ranks().all(|rank| self.has_said_ready(sight, rank));
        if all_are_ready { self.decide(self.view, say) } else { Next::Waits }
    }

    fn lose(&mut self, rank: usize, say: &mut impl FnMut(Said, Option<usize>)) {
        if std::mem::replace(&mut self.lost[rank], true) {
            return;
        }
        self.view = View::without(&self.lost, self.last);
        self.step = Step::Arrived;
        say(self.said(), Some(rank));
    }

    /// This rank has the memory of its view, and takes messages.
    pub(crate) fn get_ready(&mut self, mut say: impl FnMut(Said, Option<usize>)) {
        self.step = Step::Ready;
        self.ready_in.push(self.view);
        say(self.said(), None);
    }

    fn decide(&mut self, view: View, mut say: impl FnMut(Said, Option<usize>)) -> Next {
        self.last = Some(view);
        say(self.said(), None);
        Next::Decided(view)
    }
}
