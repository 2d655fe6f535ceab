//! UCX, over TCP and shared memory, between processes and between machines.

use std::{
    fmt::Write as _,
    io::{BufRead, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon_device::library::LibraryError;
use antiphon_fabric::engine::{Engine, EngineError, Flight, Progress, Ucx};
use antiphon_testing::{Machines, Need, need};

use crate::{
    pad::{Pad, pattern, sum, until},
    suite::{COMMUNICATOR, key, message},
};

pub const TCP: &[(&str, &str)] = &[("TLS", "tcp")];
pub const SHARED_MEMORY: &[(&str, &str)] = &[("TLS", "sm")];

/// What a process that is a peer does: "TRANSPORT ROLE", and its address goes to standard output.
const PEER: &str = "TEST_ENGINE_PEER";
/// Signs of life are told sooner here than users want it.
const LINK_TIMEOUT: Duration = Duration::from_millis(1000);
/// What marks a peer's lines among those of the test harness.
const MARK: &str = "@@ ";

pub fn tcp(peers: usize) -> Option<Vec<Box<dyn Engine>>> {
    engines(peers, TCP)
}

pub fn shared_memory(peers: usize) -> Option<Vec<Box<dyn Engine>>> {
    engines(peers, SHARED_MEMORY)
}

fn engines(peers: usize, settings: &[(&str, &str)]) -> Option<Vec<Box<dyn Engine>>> {
    let first = open(0, peers, settings)?;
    let rest = (1..peers).map(|rank| Ucx::with(rank, peers, settings).unwrap());
    Some([first].into_iter().chain(rest).map(|engine| Box::new(engine) as _).collect())
}

/// An engine, if there is UCX. One that is there and does not work is a defect.
fn open(rank: usize, peers: usize, settings: &[(&str, &str)]) -> Option<Ucx> {
    let found = match Ucx::with(rank, peers, settings) {
        Err(EngineError::Library(error @ LibraryError::Missing { .. })) => Err(error),
        opened => Ok(opened.unwrap()),
    };
    need(Need::Ucx, found)
}

/// The settings of a transport, of which this process is a peer.
fn settings(transport: &str) -> &'static [(&'static str, &'static str)] {
    match transport {
        "tcp" => TCP,
        "sm" => SHARED_MEMORY,
        _ => &[("TLS", "tcp"), ("NET_DEVICES", Machines::CABLE)],
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// A process with the engine of one peer.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts this test's binary again, by `launcher`.
    fn start(mut launcher: Command, transport: &str, rank: usize) -> Self {
        let mut child = launcher
            .args(["--exact", "ucx::peer_process", "--nocapture"])
            .env(PEER, format!("{transport} {rank}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    fn here(transport: &str, rank: usize) -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()), transport, rank)
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    #[track_caller]
    fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(said) = line.trim_end().strip_prefix(MARK) {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("the peer has ended");
    }

    /// Connects two peers.
    fn connect(one: &mut Self, two: &mut Self) {
        let addresses = [one.hear(), two.hear()];
        one.say(&addresses[1]);
        two.say(&addresses[0]);
        assert_eq!([one.hear(), two.hear()], ["connected", "connected"]);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test of its own: a peer of the tests below. It answers each line on standard input: `send BYTES`, `receive`, `lost`, `end`.
#[test]
fn peer_process() {
    let Ok(role) = std::env::var(PEER) else { return };
    let (transport, rank) = role.split_once(' ').unwrap();
    let rank: usize = rank.parse().unwrap();
    let engine: Arc<dyn Engine> = Arc::new(Ucx::with(rank, 2, settings(transport)).unwrap());
    let (pad, arrivals) = Pad::new(2, 1 << 20);
    engine.inbox().register(COMMUNICATOR, pad);
    engine.inbox().open(key());
    let say = |line: &str| println!("\n{MARK}{line}");
    say(&hex(engine.address()));
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    engine.connect(1 - rank, &unhex(&lines.next().unwrap())).unwrap();
    let progress = Progress::new(engine.clone(), LINK_TIMEOUT).unwrap();
    while engine.lost(1 - rank).is_none() && !progress.has_heard_of(1 - rank) {
        std::thread::sleep(Duration::from_millis(1));
    }
    say("connected");
    let (payload, flight) = (pattern(1, 1 << 20), Arc::new(Flight::new()));
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["send", len] => {
                let len: usize = len.parse().unwrap();
                // SAFETY: the payload lives until the flight is complete.
                unsafe { engine.send(1 - rank, &message(rank, 0), &raw const payload[..len], &flight) }
                    .unwrap();
                until(&[&*engine], || flight.is_complete());
                say("sent");
            }
            ["receive", len] => {
                let mut arrived = None;
                until(&[&*engine], || {
                    arrived = arrivals.try_recv().ok();
                    arrived.is_some() || engine.lost(1 - rank).is_some()
                });
                let expected = sum(&payload[..len.parse().unwrap()]);
                say(if arrived.is_some_and(|arrived| arrived.sum == expected) { "received" } else { "lost" });
            }
            ["lost"] => {
                until(&[&*engine], || progress.lost(1 - rank).is_some());
                say(&format!("{:?}", progress.lost(1 - rank).unwrap()));
            }
            _ => break,
        }
    }
}

/// A killed peer is told within two seconds, at rest and in the middle of messages.
fn a_killed_peer_is_told(transport: &str, how: &str) {
    if open(0, 2, settings(transport)).is_none() {
        return;
    }
    for len in ["0", "100", "1000000"] {
        let (mut one, mut two) = (Peer::here(transport, 0), Peer::here(transport, 1));
        Peer::connect(&mut one, &mut two);
        for _ in 0..2 {
            one.say(&format!("send {len}"));
            two.say(&format!("receive {len}"));
            assert_eq!((one.hear(), two.hear()), ("sent".into(), "received".into()));
            std::mem::swap(&mut one, &mut two);
        }
        one.say("lost");
        std::thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        two.child.kill().unwrap();
        assert_eq!(one.hear(), how);
        let took = start.elapsed();
        eprintln!("{transport}: told after {took:?}");
        assert!(took < Duration::from_secs(2), "told after {took:?}");
    }
}

#[test]
fn a_killed_peer_is_told_by_tcp() {
    a_killed_peer_is_told("tcp", "Reset");
}

#[test]
fn a_killed_peer_is_told_by_shared_memory() {
    a_killed_peer_is_told("sm", "Unreachable");
}

/// Two machines with a cable, and a peer on each, which are connected; where there is no UCX, or no right to make machines, none.
fn peers_on_two_machines() -> Option<(Machines, [Peer; 2])> {
    open(0, 2, TCP)?;
    let machines = Machines::make()?;
    let program = std::env::current_exe().unwrap();
    let [mut one, mut two] = [0, 1].map(|rank| Peer::start(machines.command(rank, &program), "cable", rank));
    Peer::connect(&mut one, &mut two);
    Some((machines, [one, two]))
}

#[test]
fn machines_send_to_each_other_and_hear_of_a_death() {
    let Some((machines, [mut one, mut two])) = peers_on_two_machines() else { return };
    for len in [0, 1, 100, 10_000, 1_000_000] {
        one.say(&format!("send {len}"));
        two.say(&format!("receive {len}"));
        assert_eq!((one.hear(), two.hear()), ("sent".into(), "received".into()));
    }
    // What is sent while the cable is out arrives when it is back: TCP tries again.
    machines.cut();
    one.say("send 100");
    assert_eq!(one.hear(), "sent");
    std::thread::sleep(LINK_TIMEOUT / 5);
    machines.mend();
    two.say("receive 100");
    assert_eq!(two.hear(), "received");
    let start = Instant::now();
    one.child.kill().unwrap();
    two.say("lost");
    assert_eq!(two.hear(), "Reset");
    assert!(start.elapsed() < Duration::from_secs(2), "told after {:?}", start.elapsed());
}

#[test]
fn peers_without_a_common_transport_are_told_what_there_is() {
    let Some(one) = open(0, 2, TCP) else { return };
    let two = Ucx::with(1, 2, &[("TLS", "self")]).unwrap();
    let error = one.connect(1, two.address()).unwrap_err();
    assert!(matches!(error, EngineError::NoRoute { peer: 1, .. }), "{error}");
    assert!(error.to_string().contains("tcp/lo"), "{error}");
    assert!(error.to_string().contains("UCX_NET_DEVICES"), "{error}");
}

#[test]
fn a_setting_that_ucx_does_not_know_is_an_error() {
    if open(0, 1, &[]).is_none() {
        return;
    }
    let error = Ucx::with(0, 1, &[("ANTIPHON", "1")]).unwrap_err();
    assert!(matches!(error, EngineError::Call { function: "ucp_config_modify", .. }), "{error}");
}

#[test]
fn the_survey_lists_devices() {
    if open(0, 1, &[]).is_none() {
        return;
    }
    let survey = Ucx::survey().unwrap();
    assert!(survey.version.starts_with("1."), "{survey:?}");
    assert!(
        survey.devices.iter().any(|(transport, device)| transport == "tcp" && device == "lo"),
        "{survey:?}"
    );
}

#[test]
fn a_cut_cable_is_noticed_on_both_sides() {
    let Some((machines, [mut one, mut two])) = peers_on_two_machines() else { return };
    machines.cut();
    let start = Instant::now();
    one.say("lost");
    two.say("lost");
    assert_eq!([one.hear(), two.hear()], ["Unreachable", "Unreachable"]);
    assert!(start.elapsed() < 3 * LINK_TIMEOUT, "told after {:?}", start.elapsed());
}
