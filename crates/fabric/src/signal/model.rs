//! Loom explores every interleaving, and every value that a load may return, of the protocols of this module.
//!
//! The models move data through loom's cells, which report any two accesses that are not ordered, and go by the very
//! rules of production: [`Head`], [`Consumed`], [`Control`], [`Doorbell`], [`parity`], [`place`] and [`has_room`]. To
//! show that they would notice, each rule is also broken on purpose, and must be caught.
//!
//! What takes long is explored with a bound on how often a thread is preempted; most bugs need one or two.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p antiphon-fabric --lib -- model
//! ```

mod given_up;
mod rounds;

use std::sync::Arc;

use antiphon_device::{
    host::wait::Doorbell,
    sync::{AtomicU32, AtomicU64, Ordering},
};
use loom::{cell::UnsafeCell, thread};

use super::{
    Head,
    channel::{has_room, place},
    packet::Consumed,
    rounds::parity,
};
use crate::layout::Control;

/// What the protocols need of a head.
trait Stamp: Default + Send + Sync + 'static {
    fn publish(&self, stamp: u64, words: [u64; 2]);
    fn arrival(&self, stamp: u64) -> Option<[u64; 2]>;
}

impl Stamp for Head {
    fn publish(&self, stamp: u64, words: [u64; 2]) {
        self.publish(stamp, words);
    }

    fn arrival(&self, stamp: u64) -> Option<[u64; 2]> {
        self.arrival(stamp)
    }
}

/// A head that is wrong: its stamp does not order anything.
#[derive(Default)]
struct Unordered {
    stamp: AtomicU64,
    words: [AtomicU64; 2],
}

impl Stamp for Unordered {
    fn publish(&self, stamp: u64, words: [u64; 2]) {
        self.words[0].store(words[0], Ordering::Relaxed);
        self.words[1].store(words[1], Ordering::Relaxed);
        self.stamp.store(stamp, Ordering::Relaxed);
    }

    fn arrival(&self, stamp: u64) -> Option<[u64; 2]> {
        (self.stamp.load(Ordering::Relaxed) == stamp)
            .then(|| [self.words[0].load(Ordering::Relaxed), self.words[1].load(Ordering::Relaxed)])
    }
}

/// A head with data beside it.
struct Packet<S> {
    head: S,
    data: UnsafeCell<u64>,
}

// SAFETY: loom reports a cell that two threads use without order.
unsafe impl<S: Sync> Sync for Packet<S> {}

impl<S: Stamp> Default for Packet<S> {
    fn default() -> Self {
        Self { head: S::default(), data: UnsafeCell::new(0) }
    }
}

impl<S: Stamp> Packet<S> {
    fn fill(&self, value: u64) {
        // SAFETY: whether nobody reads it now is what loom checks.
        self.data.with_mut(|data| unsafe { *data = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: whether nobody writes it now is what loom checks.
        self.data.with(|data| unsafe { *data })
    }

    fn post(&self, stamp: u64, value: u64) {
        self.fill(value);
        self.head.publish(stamp, [value, stamp]);
    }

    /// The data, once it is here.
    fn take(&self, stamp: u64) -> u64 {
        let words = until(|| self.head.arrival(stamp));
        let value = self.read();
        assert_eq!(words, [value, stamp]);
        value
    }
}

/// Polls in a way that loom can explore: another thread must run first. A thread that polls in vain again and again sees nothing
/// new, so that branch is not explored any further. (Without this, three ranks could wait in turns for ever. The models of
/// two ranks hold without it, too.)
fn until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    for looks in 1.. {
        if let Some(value) = ready() {
            return value;
        }
        if looks >= 2 {
            loom::skip_branch();
        }
        thread::yield_now();
    }
    unreachable!()
}

/// Explores every interleaving, or those with at most `preemptions` preemptions.
fn explore(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Runs `rank` on as many threads as there are ranks, this one included.
fn ranks(count: usize, rank: impl Fn(usize) + Send + Sync + 'static) {
    let rank = Arc::new(rank);
    let others: Vec<_> = (1..count)
        .map(|number| {
            let rank = rank.clone();
            thread::spawn(move || rank(number))
        })
        .collect();
    rank(0);
    others.into_iter().for_each(|thread| thread.join().unwrap());
}

mod packets {
    use super::*;

    fn arrives<S: Stamp>() {
        explore(None, || {
            let packet = Packet::<S>::default();
            ranks(2, move |rank| match rank {
                0 => packet.post(1, 42),
                _ => assert_eq!(packet.take(1), 42),
            });
        });
    }

    #[test]
    fn a_reader_of_the_stamp_sees_the_data() {
        arrives::<Head>();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn without_release_and_acquire_it_is_caught() {
        arrives::<Unordered>();
    }
}

mod channel {
    use super::*;

    /// One rank sends `messages` packets to another through a ring of `size`.
    fn in_order(preemptions: Option<usize>, size: usize, messages: u64, room: fn(u64, u64, usize) -> bool) {
        explore(preemptions, move || {
            let ring: Vec<Packet<Head>> = (0..size).map(|_| Packet::default()).collect();
            let consumed = Consumed::default();
            ranks(2, move |rank| {
                for sequence in 0..messages {
                    let packet = &ring[place(sequence, size)];
                    if rank == 0 {
                        until(|| room(sequence, consumed.count(), size).then_some(()));
                        packet.post(sequence + 1, 10 * sequence);
                    } else {
                        assert_eq!(packet.take(sequence + 1), 10 * sequence);
                        consumed.announce(sequence + 1);
                    }
                }
            });
        });
    }

    #[test]
    fn a_ring_of_two_goes_round() {
        in_order(None, 2, 3, has_room);
        in_order(Some(3), 2, 5, has_room);
    }

    #[test]
    fn a_ring_of_four_goes_round() {
        in_order(Some(2), 4, 6, has_room);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn overtaking_the_receiver_is_caught() {
        in_order(None, 2, 3, |sequence, consumed, size| has_room(sequence, consumed, size + 1));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn not_looking_at_the_acknowledgement_is_caught() {
        in_order(None, 2, 3, |_, _, _| true);
    }

    /// Two ranks send to each other before either receives, as the ring of a large all-to-all does.
    #[test]
    fn both_ways_at_once() {
        explore(Some(3), || {
            let ways: Arc<[(Packet<Head>, Consumed); 2]> = Default::default();
            ranks(2, move |rank| {
                let ((out, acknowledged), (inc, consumed)) = (&ways[rank], &ways[1 - rank]);
                for sequence in 0..2 {
                    until(|| has_room(sequence, acknowledged.count(), 1).then_some(()));
                    out.post(sequence + 1, sequence);
                    assert_eq!(inc.take(sequence + 1), sequence);
                    consumed.announce(sequence + 1);
                }
            });
        });
    }
}

mod health {
    use super::*;

    /// A rank that sees that a peer has left also sees what the peer posted before; see `Health::check`.
    #[test]
    fn what_was_sent_before_leaving_counts() {
        explore(None, || {
            let (packet, control) = (Packet::<Head>::default(), Control::default());
            ranks(2, move |rank| match rank {
                0 => {
                    packet.post(1, 42);
                    control.depart();
                }
                _ => {
                    until(|| (packet.head.arrival(1).is_some() || control.has_departed()).then_some(()));
                    assert!(packet.head.arrival(1).is_some(), "one more look is enough");
                    assert_eq!(packet.read(), 42);
                }
            });
        });
    }
}

mod doorbell {
    use super::*;

    /// How a nap of the waiter ended: by the bell, or only by its own end.
    #[derive(Default)]
    struct Naps(std::sync::Mutex<[usize; 2]>);

    impl Naps {
        fn note(&self, rung: bool) {
            self.0.lock().unwrap()[usize::from(rung)] += 1;
        }
    }

    /// A waiter goes to sleep while the packet comes. There is no fence between publishing and ringing, so
    /// * the bell may be missed: then the waiter sleeps until its nap is over (a millisecond), and not longer;
    /// * whether it was rung or not, the packet is there when it looks again: a wake-up can be lost, data cannot.
    #[test]
    fn a_wake_up_can_be_lost_but_data_cannot() {
        let naps = Arc::new(Naps::default());
        let noted = naps.clone();
        explore(None, move || {
            let (packet, bell) = (Packet::<Head>::default(), Doorbell::default());
            let published = AtomicU32::new(0);
            let noted = noted.clone();
            ranks(2, move |rank| match rank {
                0 => {
                    packet.post(1, 42);
                    bell.ring();
                    published.store(1, Ordering::Release);
                }
                _ => {
                    bell.arm();
                    if packet.head.arrival(1).is_none() {
                        // A nap so long that the other is done with ringing.
                        until(|| (published.load(Ordering::Acquire) == 1).then_some(()));
                        noted.note(!bell.is_armed());
                    }
                    assert_eq!(packet.take(1), 42);
                }
            });
        });
        let [missed, rung] = *naps.0.lock().unwrap();
        assert!(rung > 0, "usually the bell wakes");
        assert!(missed > 0, "now and then it does not: this is why naps are short");
    }

    /// Two may wait at one bell, as a rank's foreground and background do for messages.
    #[test]
    fn two_sleepers_both_get_their_data() {
        explore(Some(2), || {
            let (packets, bell) = ([Packet::<Head>::default(), Packet::default()], Doorbell::default());
            ranks(3, move |rank| match rank {
                0 => packets.iter().for_each(|packet| {
                    packet.post(1, 42);
                    bell.ring();
                }),
                _ => until(|| {
                    bell.arm();
                    packets[rank - 1].head.arrival(1)?;
                    assert_eq!(packets[rank - 1].take(1), 42);
                    Some(())
                }),
            });
        });
    }
}
