//! What a rank that shrinks its communicator says to the others; see `communicator/shrink`.

use antiphon_device::sync::{AtomicU64, Ordering};

use crate::communicator::shrink::{Said, Step, View};

/// The state that a rank publishes while it shrinks its communicator.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Notice {
    /// Its view and its step there, or zero.
    state: AtomicU64,
    /// The view for which it has decided last, or zero.
    decided: AtomicU64,
    /// Its mailbox: what names it, what its peers say there, and the network namespace in which it can be seen.
    mailbox: [AtomicU64; 3],
}

/// As two words, which travel to other nodes.
impl Said {
    pub(crate) fn encode(self) -> [u64; 2] {
        let state = |(step, view): (Step, View)| {
            let step = match step {
                Step::Arrived => 1,
                Step::Ready => 2,
                Step::GaveUp => 3,
            };
            view.number() | step
        };
        [self.state.map_or(0, state), self.decided.map_or(0, View::number)]
    }

    pub(crate) fn decode([state, decided]: [u64; 2]) -> Self {
        let step = match state % 4 {
            0 => None,
            1 => Some(Step::Arrived),
            2 => Some(Step::Ready),
            _ => Some(Step::GaveUp),
        };
        Self { state: step.zip(View::of_number(state)), decided: View::of_number(decided) }
    }
}

impl Notice {
    pub(crate) fn said(&self) -> Said {
        // Pairs with the release stores in `say`: the mailbox was written before.
        let state = self.state.load(Ordering::Acquire);
        Said::decode([state, self.decided.load(Ordering::Acquire)])
    }

    pub(crate) fn say(&self, said: Said) {
        let [state, decided] = said.encode();
        self.decided.store(decided, Ordering::Release);
        self.state.store(state, Ordering::Release);
    }

    /// The words that name the mailbox.
    pub(crate) fn mailbox(&self) -> [u64; 3] {
        [0, 1, 2].map(|word| self.mailbox[word].load(Ordering::Relaxed))
    }

    pub(crate) fn set_mailbox(&self, words: [u64; 3]) {
        for (word, value) in self.mailbox.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_survives_the_words() {
        let view = View::of_number(5 << 48 | 1 << 20);
        for step in [Step::Arrived, Step::Ready, Step::GaveUp] {
            for decided in [None, View::of_number(4 << 48 | 8)] {
                let said = Said { state: view.map(|view| (step, view)), decided };
                assert_eq!(Said::decode(said.encode()), said);
            }
        }
        assert_eq!(Said::decode([0, 0]), Said::default());
    }
}
