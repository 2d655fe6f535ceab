//! What twins do beyond other engines: counts and faults.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon_fabric::engine::{Engine, Flight, Lost, Message, Network, Progress, Traffic, Twin};

use crate::{
    pad::{Pad, pattern, until},
    suite::{COMMUNICATOR, connect, key, message},
};

pub fn engines(peers: usize) -> Option<Vec<Box<dyn Engine>>> {
    let (network, twins) = Twin::network(peers);
    network.reorder(7);
    Some(twins.into_iter().map(|twin| Box::new(twin) as _).collect())
}

fn connected(peers: usize) -> (Network, Vec<Box<dyn Engine>>) {
    let (network, twins) = Twin::network(peers);
    let engines: Vec<Box<dyn Engine>> = twins.into_iter().map(|twin| Box::new(twin) as _).collect();
    connect(&engines, key());
    (network, engines)
}

#[test]
fn traffic_is_counted_by_link() {
    let (network, ends) = connected(3);
    let flight = Arc::new(Flight::new());
    let payload = pattern(1, 100_000);
    for len in [0, 10, 100_000] {
        // SAFETY: the payload outlives the engines.
        unsafe { ends[0].send(2, &message(0, 0), &raw const payload[..len], &flight) }.unwrap();
    }
    ends[2].tell(1, &message(2, 0)).unwrap();
    assert_eq!(network.traffic(0, 2), Traffic { messages: 3, bytes: 100_010 });
    assert_eq!(network.traffic(2, 1), Traffic { messages: 1, bytes: 0 });
    assert_eq!(network.traffic(2, 0), Traffic::default());
}

#[test]
fn a_delayed_message_comes_after_its_delay_and_wakes_the_sleeper() {
    let (network, ends) = connected(2);
    let (pad, arrivals) = Pad::new(2, 8);
    ends[1].inbox().register(COMMUNICATOR, pad);
    network.delay(0, 1, Duration::from_millis(30));
    let start = Instant::now();
    ends[0].tell(1, &message(0, 0)).unwrap();
    while !ends[1].progress() {
        ends[1].sleep(Duration::from_secs(20));
    }
    assert!(arrivals.try_recv().is_ok());
    assert!((30..10_000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
}

#[test]
fn messages_wait_at_a_cut_and_nobody_is_told() {
    let (network, ends) = connected(2);
    let (pad, arrivals) = Pad::new(2, 8);
    ends[1].inbox().register(COMMUNICATOR, pad);
    network.cut(1, 0);
    ends[0].tell(1, &message(0, 0)).unwrap();
    assert!(!ends[1].progress());
    assert_eq!((ends[1].lost(0), ends[0].lost(1)), (None, None));
    network.mend(0, 1);
    until(&[&*ends[1]], || arrivals.try_recv().is_ok());
}

#[test]
fn a_stopped_peer_sends_but_moves_nothing_until_it_resumes() {
    let (network, ends) = connected(2);
    let (pad, arrivals) = Pad::new(2, 8);
    ends[1].inbox().register(COMMUNICATOR, pad);
    network.stop(1);
    ends[0].tell(1, &message(0, 0)).unwrap();
    assert!(!ends[1].progress());
    network.resume(1);
    until(&[&*ends[1]], || arrivals.try_recv().is_ok());
}

#[test]
fn a_killed_peer_is_lost_once_what_it_sent_is_there_and_what_was_lent_is_free() {
    let (network, ends) = connected(3);
    let (pad, arrivals) = Pad::new(3, 8);
    ends[1].inbox().register(COMMUNICATOR, pad);
    let (payload, flight) = (pattern(1, 1 << 20), Arc::new(Flight::new()));
    network.cut(0, 1);
    ends[0].tell(1, &message(0, 0)).unwrap();
    // SAFETY: the payload outlives the engines.
    unsafe { ends[2].send(0, &message(2, 0), &raw const payload[..], &flight) }.unwrap();
    network.kill(0);
    ends[1].progress();
    assert_eq!((ends[1].lost(0), flight.is_complete()), (None, false));
    network.mend(0, 1);
    until(&[&*ends[1], &*ends[2]], || ends[1].lost(0) == Some(Lost::Reset) && flight.is_complete());
    assert!(arrivals.try_recv().is_ok());
    assert_eq!(ends[2].lost(0), Some(Lost::Reset));
    // SAFETY: as before.
    unsafe { ends[2].send(0, &Message::default(), &raw const payload[..], &flight) }.unwrap();
    assert!(flight.is_complete(), "a message to a lost peer is dropped");
}

#[test]
fn a_peer_behind_a_cut_is_unreachable_on_both_sides_and_no_other() {
    let (network, ends) = connected(3);
    let limit = Duration::from_millis(500);
    let ranks: Vec<Progress> =
        ends.into_iter().map(|end| Progress::new(end.into(), limit).unwrap()).collect();
    // Each has heard of each.
    std::thread::sleep(limit);
    assert!(ranks.iter().all(|rank| (0..3).all(|peer| rank.lost(peer).is_none())));
    network.cut(0, 1);
    let start = Instant::now();
    while ranks[0].lost(1).is_none() || ranks[1].lost(0).is_none() {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(start.elapsed() >= limit, "{:?} is sooner than the timeout", start.elapsed());
    assert_eq!((ranks[0].lost(1), ranks[1].lost(0)), (Some(Lost::Unreachable), Some(Lost::Unreachable)));
    assert_eq!((ranks[2].lost(0), ranks[2].lost(1), ranks[0].lost(2)), (None, None, None));
}

#[test]
fn a_peer_without_any_sign_is_unreachable_once_it_is_watched() {
    let (_network, ends) = connected(2);
    let limit = Duration::from_millis(200);
    let [first, _silent] = <[_; 2]>::try_from(ends).unwrap_or_else(|_| unreachable!("there are two"));
    let progress = Progress::new(first.into(), limit).unwrap();
    std::thread::sleep(limit * 2);
    assert_eq!(progress.lost(1), None);
    progress.watch_all();
    let start = Instant::now();
    while progress.lost(1).is_none() {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(start.elapsed() >= limit, "{:?} is sooner than the timeout", start.elapsed());
    assert_eq!(progress.lost(1), Some(Lost::Unreachable));
}
