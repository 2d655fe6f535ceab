//! Rounds and barriers.

use super::*;

/// The mailboxes of all ranks, one lane: as many packets per rank as `slot` tells apart.
struct Mailboxes<S> {
    packets: Vec<[Packet<S>; 2]>,
    slot: fn(u64) -> usize,
    /// How many of the ranks after it each rank waits for: all, if it is right.
    awaited: usize,
}

impl<S: Stamp> Mailboxes<S> {
    fn new(world_size: usize, slot: fn(u64) -> usize) -> Self {
        let packets = (0..world_size).map(|_| Default::default()).collect();
        Self { packets, slot, awaited: world_size - 1 }
    }

    fn packet(&self, rank: usize, round: u64) -> &Packet<S> {
        &self.packets[rank][(self.slot)(round)]
    }

    /// As `Rounds`: fill the outbox, post, wait for all ranks, and only then read.
    fn exchange(&self, rank: usize, round: u64) {
        let value = |rank: usize| 100 * round + rank as u64;
        self.packet(rank, round).post(round, value(rank));
        let peers = || (1..=self.awaited).map(|distance| (rank + distance) % self.packets.len());
        for peer in peers() {
            let words = until(|| self.packet(peer, round).head.arrival(round));
            assert_eq!(words, [value(peer), round]);
        }
        for peer in peers() {
            assert_eq!(self.packet(peer, round).read(), value(peer));
        }
    }
}

fn all_ranks_see_all_packets<S: Stamp>(
    preemptions: Option<usize>,
    world_size: usize,
    rounds: u64,
    slot: fn(u64) -> usize,
) {
    explore(preemptions, move || {
        let mailboxes = Mailboxes::<S>::new(world_size, slot);
        ranks(world_size, move |rank| (1..=rounds).for_each(|round| mailboxes.exchange(rank, round)));
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn waiting_for_one_neighbour_would_not_be_enough() {
    explore(Some(1), || {
        let mailboxes = Mailboxes::<Head> { awaited: 1, ..Mailboxes::new(3, parity) };
        ranks(3, move |rank| (1..=3).for_each(|round| mailboxes.exchange(rank, round)));
    });
}

#[test]
fn two_ranks_reuse_two_packets() {
    all_ranks_see_all_packets::<Head>(None, 2, 4, parity);
}

#[test]
fn three_ranks_reuse_two_packets() {
    all_ranks_see_all_packets::<Head>(Some(1), 3, 3, parity);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_packet_would_not_be_enough() {
    all_ranks_see_all_packets::<Head>(None, 2, 2, |_| 0);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_release_and_acquire_it_is_caught() {
    all_ranks_see_all_packets::<Unordered>(None, 2, 1, parity);
}

/// A barrier is a round without data: it orders what the ranks do to other memory, symmetric buffers say.
fn barriers_order_memory<S: Stamp>(world_size: usize, preemptions: Option<usize>) {
    explore(preemptions, move || {
        let mailboxes = Mailboxes::<S>::new(world_size, parity);
        let buffer = Packet::<S>::default();
        let barrier = move |mailboxes: &Mailboxes<S>, rank: usize, round: u64| {
            mailboxes.packet(rank, round).head.publish(round, [1, 0]);
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                until(|| mailboxes.packet(peer, round).head.arrival(round));
            }
        };
        ranks(world_size, move |rank| {
            if rank == 0 {
                buffer.fill(42);
            }
            barrier(&mailboxes, rank, 1);
            assert_eq!(buffer.read(), 42);
            barrier(&mailboxes, rank, 2);
            if rank == 1 {
                buffer.fill(43);
            }
        });
    });
}

#[test]
fn a_barrier_orders_the_memory_of_two_ranks() {
    barriers_order_memory::<Head>(2, None);
}

#[test]
fn a_barrier_orders_the_memory_of_three_ranks() {
    barriers_order_memory::<Head>(3, Some(1));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_barrier_without_release_and_acquire_is_caught() {
    barriers_order_memory::<Unordered>(2, None);
}
