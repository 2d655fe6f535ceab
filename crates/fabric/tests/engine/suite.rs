//! What every engine promises.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon_fabric::engine::{Dropped, Engine, EngineError, Flight, Key, Lost, Message, Progress};

use crate::{
    Engines,
    pad::{Pad, pattern, sum, until},
};

pub const COMMUNICATOR: u64 = 7;

pub fn key() -> Key {
    Key::from_bytes(*b"the world's key!")
}

/// A message of `sender` with a payload for this place.
pub fn message(sender: usize, place: usize) -> Message {
    Message { communicator: COMMUNICATOR, sender: sender as u32, place: place as u64, ..Message::default() }
}

/// Connects every engine with every other.
pub fn connect(engines: &[Box<dyn Engine>], key: Key) {
    for (rank, engine) in engines.iter().enumerate() {
        engine.inbox().open(key);
        for peer in (0..engines.len()).filter(|&peer| peer != rank) {
            engine.connect(peer, engines[peer].address()).unwrap();
        }
    }
}

/// Connected engines, each with a pad whose regions have `region` bytes.
struct World {
    // Before the pads' memory: engines may write until they are dropped.
    engines: Vec<Box<dyn Engine>>,
    pads: Vec<(Arc<Pad>, std::sync::mpsc::Receiver<crate::pad::Arrival>)>,
}

/// Sends bytes that live until the engine is dropped, or until the flight is complete.
fn send(from: &dyn Engine, to: usize, message: &Message, payload: &[u8], flight: &Arc<Flight>) {
    // SAFETY: each test keeps its payloads so long.
    unsafe { from.send(to, message, payload, flight) }.unwrap();
}

impl World {
    fn new(engines: Engines, peers: usize, region: usize) -> Option<Self> {
        let engines = engines(peers)?;
        let pads: Vec<_> = engines.iter().map(|_| Pad::new(peers, region)).collect();
        for (engine, (pad, _)) in engines.iter().zip(&pads) {
            engine.inbox().register(COMMUNICATOR, pad.clone());
        }
        connect(&engines, key());
        Some(Self { engines, pads })
    }

    fn all(&self) -> Vec<&dyn Engine> {
        self.engines.iter().map(|engine| &**engine).collect()
    }

    /// Sends bytes that live until the world is dropped, or until the flight is complete.
    fn send(&self, from: usize, to: usize, message: &Message, payload: &[u8], flight: &Arc<Flight>) {
        send(&*self.engines[from], to, message, payload, flight);
    }
}

pub fn data_is_there_before_its_signal(engines: Engines) {
    const REGION: usize = 1 << 20;
    let payloads: Vec<Vec<u8>> =
        (0..24).map(|i| pattern(i, [1, 39, 4097, 70_000, 300_000][i as usize % 5] + i as usize)).collect();
    let Some(world) = World::new(engines, 2, REGION) else { return };
    let flight = Arc::new(Flight::new());
    for round in 0..10 {
        for (i, payload) in payloads.iter().enumerate() {
            let place = (i * 7919 + round) % (REGION - payload.len());
            let words = [i as u64, sum(payload), round as u64, u64::MAX, 0];
            world.send(0, 1, &Message { kind: 3, words, ..message(0, place) }, payload, &flight);
            let arrivals = &world.pads[1].1;
            let mut arrived = None;
            until(&world.all(), || {
                arrived = arrivals.try_recv().ok();
                arrived.is_some()
            });
            let arrived = arrived.unwrap();
            assert_eq!(arrived.message, Message { kind: 3, words, ..message(0, place) });
            assert_eq!(
                (arrived.len, arrived.sum),
                (payload.len(), sum(payload)),
                "payload {i} of round {round}"
            );
        }
    }
    until(&world.all(), || flight.is_complete());
    assert_eq!(world.engines[1].inbox().dropped(), Dropped::default());
}

pub fn messages_of_four_peers_arrive_once(engines: Engines) {
    const PEERS: usize = 4;
    /// To each of three peers: 10⁵ in all.
    const EACH: usize = 100_000usize.div_ceil(PEERS * (PEERS - 1));
    const LEN: usize = 24;
    let payload = pattern(5, LEN);
    let Some(world) = World::new(engines, PEERS, LEN) else { return };
    let flights: Vec<_> = (0..PEERS).map(|_| Arc::new(Flight::new())).collect();
    std::thread::scope(|scope| {
        for (rank, (engine, flight)) in world.engines.iter().zip(&flights).enumerate() {
            let (engine, payload) = (&**engine, &payload);
            scope.spawn(move || {
                for i in 0..EACH {
                    for peer in (0..PEERS).filter(|&peer| peer != rank) {
                        let words = [i as u64, rank as u64, peer as u64, 0, 0];
                        send(engine, peer, &Message { words, ..message(rank, 0) }, payload, flight);
                    }
                    engine.progress();
                }
            });
        }
    });
    for (rank, (_, arrivals)) in world.pads.iter().enumerate() {
        let mut seen = vec![vec![false; EACH]; PEERS];
        let mut count = 0;
        until(&world.all(), || {
            for arrival in arrivals.try_iter() {
                let [i, from, to, ..] = arrival.message.words.map(|word| word as usize);
                assert_eq!((from, to), (arrival.message.sender as usize, rank));
                assert_eq!((arrival.len, arrival.sum), (LEN, sum(&payload)));
                assert!(!std::mem::replace(&mut seen[from][i], true), "message {i} of {from} came twice");
                count += 1;
            }
            count == EACH * (PEERS - 1)
        });
    }
    until(&world.all(), || flights.iter().all(|flight| flight.is_complete()));
    assert!(world.pads.iter().all(|(_, arrivals)| arrivals.try_recv().is_err()));
}

pub fn empty_and_large_payloads_arrive(engines: Engines) {
    const LARGE: usize = 256 << 20;
    let payload = pattern(9, LARGE);
    let Some(world) = World::new(engines, 2, LARGE) else { return };
    let flight = Arc::new(Flight::new());
    let arrivals = &world.pads[1].1;
    // A place does not matter to a payload without bytes.
    world.send(0, 1, &message(0, usize::MAX), &[], &flight);
    world.engines[0].tell(1, &message(9, 1 << 40)).unwrap();
    world.send(0, 1, &message(0, 0), &payload, &flight);
    let mut arrived = Vec::new();
    until(&world.all(), || {
        arrived.extend(arrivals.try_iter().map(|arrival| (arrival.len, arrival.sum)));
        arrived.len() == 3
    });
    arrived.sort_unstable();
    assert_eq!(arrived, [(0, 0), (0, 0), (LARGE, sum(&payload))]);
    until(&world.all(), || flight.is_complete());
}

pub fn places_outside_of_the_senders_region_are_dropped(engines: Engines) {
    const REGION: usize = 100_000;
    let payload = pattern(2, REGION + 1);
    let Some(world) = World::new(engines, 2, REGION) else { return };
    let flight = Arc::new(Flight::new());
    let (pad, arrivals) = &world.pads[1];
    let mut dropped = 0;
    for len in [1, 39, 20_000, REGION] {
        for place in [REGION - len + 1, REGION, usize::MAX - len + 1, usize::MAX, 1 << 63] {
            world.send(0, 1, &message(0, place), &payload[..len], &flight);
            dropped += 1;
        }
        // A rank that is not there.
        world.send(0, 1, &message(2, 0), &payload[..len], &flight);
        dropped += 1;
    }
    world.send(0, 1, &message(0, 0), &payload, &flight);
    world.send(0, 1, &Message { communicator: 8, ..message(0, 0) }, &payload[..1], &flight);
    let expected = Dropped { place: dropped + 1, communicator: 1, ..Dropped::default() };
    until(&world.all(), || world.engines[1].inbox().dropped() == expected);
    assert!(arrivals.try_recv().is_err());
    assert!(pad.copy(0).iter().chain(&pad.copy(1)).all(|&byte| byte == 0), "nothing was stored");
    // What was dropped is complete all the same, and the next message arrives.
    world.send(0, 1, &message(0, 0), &payload[..REGION], &flight);
    until(&world.all(), || flight.is_complete() && arrivals.try_recv().is_ok());
}

pub fn messages_with_another_key_are_dropped(engines: Engines) {
    let payload = pattern(3, 50_000);
    let Some(engines) = engines(3) else { return };
    let (pad, arrivals) = Pad::new(3, payload.len());
    engines[0].inbox().register(COMMUNICATOR, pad.clone());
    engines[0].inbox().open(key());
    engines[1].inbox().open(key());
    let mut almost = key().to_bytes();
    almost[15] ^= 1;
    engines[2].inbox().open(Key::from_bytes(almost));
    let flight = Arc::new(Flight::new());
    let all: Vec<&dyn Engine> = engines.iter().map(|engine| &**engine).collect();
    for stranger in [2, 1] {
        engines[stranger].connect(0, engines[0].address()).unwrap();
        for len in [0, 8, payload.len()] {
            // SAFETY: the payload outlives the engines.
            unsafe { engines[stranger].send(0, &message(stranger, 0), &raw const payload[..len], &flight) }
                .unwrap();
        }
    }
    let mut count = 0;
    until(&all, || {
        count += arrivals.try_iter().map(|arrival| assert_eq!(arrival.message.sender, 1)).count();
        count == 3 && engines[0].inbox().dropped().key == 3
    });
    assert!(pad.copy(2).iter().all(|&byte| byte == 0));
    drop(engines);
}

pub fn nothing_moves_before_the_inbox_is_open(engines: Engines) {
    let payload = pattern(4, 100_000);
    let Some(engines) = engines(2) else { return };
    let flight = Arc::new(Flight::new());
    engines[0].inbox().open(key());
    engines[0].connect(1, engines[1].address()).unwrap();
    for len in [0, 8, payload.len()] {
        // SAFETY: the payload outlives the engines.
        unsafe { engines[0].send(1, &message(0, 0), &raw const payload[..len], &flight) }.unwrap();
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        engines[0].progress();
        assert!(!engines[1].progress());
    }
    let (pad, arrivals) = Pad::new(1, payload.len());
    engines[1].inbox().register(COMMUNICATOR, pad);
    engines[1].inbox().open(key());
    let mut count = 0;
    until(&[&*engines[0], &*engines[1]], || {
        count += arrivals.try_iter().count();
        count == 3
    });
    assert_eq!(engines[1].inbox().dropped(), Dropped::default());
    drop(engines);
}

pub fn a_buffer_is_free_when_its_flight_is_complete(engines: Engines) {
    const LEN: usize = 200_000;
    let Some(world) = World::new(engines, 2, 2 * LEN) else { return };
    let flights = [Arc::new(Flight::new()), Arc::new(Flight::new())];
    let mut buffers = [vec![0; LEN], vec![0; LEN]];
    let mut expected = Vec::new();
    assert!(flights[0].is_complete(), "a flight without sends");
    for round in 0..40 {
        let slot = round % 2;
        until(&world.all(), || flights[slot].is_complete());
        // Nobody reads it any more: the next bytes may take its place.
        let len = [LEN, 10, 9000][round % 3];
        buffers[slot][..len].copy_from_slice(&pattern(round as u64, len));
        expected.push((round as u64, sum(&buffers[slot][..len])));
        let words = [round as u64, 0, 0, 0, 0];
        world.send(0, 1, &Message { words, ..message(0, slot * LEN) }, &buffers[slot][..len], &flights[slot]);
    }
    until(&world.all(), || flights.iter().all(|flight| flight.is_complete()));
    let mut arrived = Vec::new();
    until(&world.all(), || {
        arrived.extend(world.pads[1].1.try_iter().map(|a| (a.message.words[0], a.sum)));
        arrived.len() == expected.len()
    });
    arrived.sort_unstable();
    assert_eq!(arrived, expected);
}

pub fn a_peer_that_leaves_is_lost_after_what_it_sent(engines: Engines) {
    const MESSAGES: usize = 500;
    let payload = pattern(6, 4000);
    let Some(mut world) = World::new(engines, 3, payload.len()) else { return };
    let flight = Arc::new(Flight::new());
    // Both ways, so that both have a connection.
    world.send(1, 2, &message(1, 0), &payload, &flight);
    world.send(0, 2, &message(0, 0), &payload, &flight);
    let mut count = 0;
    until(&world.all(), || {
        count += world.pads[2].1.try_iter().count();
        count == 2
    });
    for _ in 0..MESSAGES {
        world.send(2, 0, &message(2, 0), &payload, &flight);
    }
    let start = Instant::now();
    let left = world.engines.pop();
    // It leaves while its peers are there: what it sent may need them.
    let mut count = 0;
    std::thread::scope(|scope| {
        scope.spawn(move || drop(left));
        until(&world.all(), || {
            count += world.pads[0].1.try_iter().count();
            world.engines[0].lost(2).is_some()
        });
    });
    count += world.pads[0].1.try_iter().count();
    assert_eq!((world.engines[0].lost(2), count), (Some(Lost::Reset), MESSAGES));
    // A peer to which nothing is sent notices too; within two seconds, or rather ten where two cores compile.
    until(&world.all(), || world.engines[1].lost(2) == Some(Lost::Reset));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // A message to it is dropped, and complete.
    world.send(0, 2, &message(0, 0), &payload, &flight);
    until(&world.all(), || flight.is_complete());
    // The others are there.
    assert_eq!((world.engines[0].lost(1), world.engines[1].lost(0)), (None, None));
    world.send(0, 1, &message(0, 0), &payload, &flight);
    until(&world.all(), || world.pads[1].1.try_recv().is_ok());
}

pub fn mistakes_are_named(engines: Engines) {
    let Some(engines) = engines(2) else { return };
    let [one, two] = &engines[..] else { unreachable!() };
    assert!(matches!(one.tell(1, &message(0, 0)), Err(EngineError::Closed)));
    one.inbox().open(key());
    assert!(matches!(one.tell(1, &message(0, 0)), Err(EngineError::NotConnected { peer: 1 })));
    assert_eq!(one.lost(1), None);
    for address in [&b""[..], b"nonsense", &[0xFF; 1000]] {
        let error = one.connect(1, address).unwrap_err();
        assert!(matches!(error, EngineError::Address { .. }), "{error}");
    }
    let cut = &two.address()[..two.address().len() - 1];
    assert!(matches!(one.connect(1, cut), Err(EngineError::Address { .. })));
    one.connect(1, two.address()).unwrap();
    assert!(matches!(one.connect(1, two.address()), Err(EngineError::Connected { peer: 1 })));
    assert!(matches!(one.connect(2, two.address()), Err(EngineError::Address { .. })), "there is no peer 2");
}

pub fn a_receiver_that_was_removed_gets_nothing(engines: Engines) {
    let Some(world) = World::new(engines, 2, 8) else { return };
    let inbox = world.engines[1].inbox();
    inbox.remove(COMMUNICATOR);
    inbox.remove(99);
    world.engines[0].tell(1, &message(0, 0)).unwrap();
    until(&world.all(), || inbox.dropped().communicator == 1);
    assert_eq!(Arc::strong_count(&world.pads[1].0), 1, "the inbox keeps nothing of it");
    inbox.register(COMMUNICATOR, world.pads[1].0.clone());
    world.engines[0].tell(1, &message(0, 0)).unwrap();
    until(&world.all(), || world.pads[1].1.try_recv().is_ok());
}

pub fn a_thread_moves_messages_while_nobody_polls(engines: Engines) {
    const LEN: usize = 300_000;
    let payload = pattern(8, LEN);
    let Some(engines) = engines(2) else { return };
    let pads: Vec<_> = engines.iter().map(|_| Pad::new(2, LEN)).collect();
    engines
        .iter()
        .zip(&pads)
        .for_each(|(engine, (pad, _))| engine.inbox().register(COMMUNICATOR, pad.clone()));
    connect(&engines, key());
    let ranks: Vec<Progress> = engines
        .into_iter()
        .map(|engine| Progress::new(engine.into(), Progress::LINK_TIMEOUT).unwrap())
        .collect();
    let limit = Duration::from_secs(20);
    let flight = Arc::new(Flight::new());
    for round in 0..200 {
        let (from, to) = (round % 2, 1 - round % 2);
        let len = [8, LEN][round / 2 % 2];
        // SAFETY: the payload outlives the engines.
        unsafe { ranks[from].engine().send(to, &message(from, 0), &raw const payload[..len], &flight) }
            .unwrap();
        // A caller has just polled, so the threads may be napping: they are told.
        ranks[from].poll();
        ranks[to].poll();
        ranks[from].hand_over();
        ranks[to].hand_over();
        let arrived =
            pads[to].1.recv_timeout(limit).unwrap_or_else(|_| panic!("message {round} did not come"));
        assert_eq!((arrived.len, arrived.sum), (len, sum(&payload[..len])));
    }
    // Nor does it need to be told when nobody polls any more.
    ranks[0].poll();
    ranks[1].poll();
    ranks[0].engine().tell(1, &message(0, 0)).unwrap();
    assert_eq!(pads[1].1.recv_timeout(limit).unwrap().len, 0);
    let start = Instant::now();
    drop(ranks);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "the threads end at once, not {:?} later",
        start.elapsed()
    );
}

pub fn living_peers_are_never_unreachable(engines: Engines) {
    let Some(engines) = engines(3) else { return };
    connect(&engines, key());
    let limit = Duration::from_millis(500);
    let ranks: Vec<Progress> =
        engines.into_iter().map(|engine| Progress::new(engine.into(), limit).unwrap()).collect();
    let start = Instant::now();
    while start.elapsed() < 4 * limit {
        // Rank 0 spins all the time, so that its thread only naps; the threads of the others do all.
        ranks[0].poll();
        std::thread::yield_now();
    }
    for (rank, progress) in ranks.iter().enumerate() {
        assert!((0..3).all(|peer| progress.lost(peer).is_none()), "rank {rank} has lost a peer");
    }
}
