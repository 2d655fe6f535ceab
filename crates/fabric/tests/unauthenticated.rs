//! Peers that do not know the secret: whatever they send, they join no world, learn nothing and delay no rank.

use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::mpsc,
    time::{Duration, Instant},
};

use antiphon_fabric::{
    Builder, Communicator, FabricError,
    rendezvous::{Address, Card, RendezvousError, Ticket, frame::Frame},
};
use antiphon_testing::root;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

fn builder(timeout: Duration) -> Builder {
    Communicator::builder().arena_bytes(1 << 16).timeout(timeout)
}

fn socket_address(ticket: &Ticket) -> SocketAddr {
    let Address::Abstract(name) = &ticket.address else { unreachable!("a random ticket") };
    SocketAddr::from_abstract_name(name).unwrap()
}

/// Connects as soon as rank 0 listens.
fn connect(ticket: &Ticket) -> UnixStream {
    let start = Instant::now();
    loop {
        match UnixStream::connect_addr(&socket_address(ticket)) {
            Ok(stream) => return stream,
            Err(error) if start.elapsed() > Duration::from_secs(10) => panic!("nobody listens: {error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Rank 0 of a world of 3 listens; `peers` connect, then the other two ranks. Returns how long these two took to join.
fn join_despite<T>(peers: impl FnOnce(&Ticket) -> T) -> (Duration, T) {
    let ticket = Ticket::random();
    std::thread::scope(|scope| {
        let join = |rank| {
            let ticket = &ticket;
            scope.spawn(move || {
                let comm = builder(Duration::from_secs(15)).with_ticket(rank, 3, ticket)?;
                comm.exchange_objects(&rank)
            })
        };
        let root = join(0);
        drop(connect(&ticket)); // it listens
        let visit = peers(&ticket);
        let start = Instant::now();
        let members = [join(1), join(2)];
        for member in members {
            assert_eq!(member.join().unwrap().unwrap(), [0, 1, 2]);
        }
        let took = start.elapsed();
        assert_eq!(root.join().unwrap().unwrap(), [0, 1, 2]);
        (took, visit)
    })
}

fn card(rank: usize) -> Card {
    Card {
        rank,
        world_size: 3,
        pid: 1,
        pid_namespace: 1,
        cores: vec![0],
        arena_bytes: 1 << 16,
        parent_rank: None,
        place: None,
    }
}

/// A request to join that a peer can make up without the secret.
fn join_request() -> Vec<u8> {
    Frame::Join { card: card(1), nonce: "00".repeat(32), proof: "00".repeat(32) }.encode()
}

fn frame_header(length: u32) -> Vec<u8> {
    let mut bytes = join_request()[..12].to_vec();
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// All frames that rank 0 sends until it closes the connection.
fn hear(mut stream: UnixStream) -> Vec<Frame> {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    // A reset ends the connection as a close does.
    while let Ok(1..) = stream.read(&mut piece).inspect(|&n| bytes.extend_from_slice(&piece[..n])) {}
    let mut frames = Vec::new();
    while let Some((frame, length)) = Frame::decode(&bytes).unwrap() {
        frames.push(frame);
        bytes.drain(..length);
    }
    assert!(bytes.is_empty());
    frames
}

#[test]
fn invalid_frames_end_the_connection() {
    let deep = "[".repeat(100_000);
    let messages: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", (0..5000u32).map(|i| (i * 7919 / 8) as u8).collect()),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("a huge length", frame_header(u32::MAX)),
        ("a frame that is no JSON", [&frame_header(5)[..], b"hello"].concat()),
        ("deep JSON", [&frame_header(deep.len() as u32)[..], deep.as_bytes()].concat()),
        (
            "rank 0's part",
            Frame::Welcome {
                cards: vec![card(0); 3],
                handles: vec![],
                random: String::new(),
                proof: String::new(),
            }
            .encode(),
        ),
        ("a join without the secret", join_request()),
        ("two joins", join_request().repeat(2)),
    ];
    join_despite(|ticket| {
        for (what, bytes) in messages {
            let mut stream = connect(ticket);
            // It may hang up before everything is said.
            let _ = stream.write_all(&bytes);
            let answers = hear(stream);
            assert!(matches!(answers[0], Frame::Challenge { .. }), "{what}: {answers:?}");
            match &answers[1..] {
                [] => {}
                [Frame::Refusal { reason, .. }] => {
                    assert!(what.contains("join") && reason.contains("secret"))
                }
                more => panic!("{what}: {more:?}"),
            }
        }
    });
}

#[test]
fn silent_and_incomplete_connections_delay_no_rank() {
    let (took, _held) = join_despite(|ticket| {
        let whole = join_request();
        let half = whole.len() / 2;
        let messages = [&[][..], &whole[..3], &whole[..12], &whole[..half], &frame_header(1 << 20)];
        let say = |bytes: &[u8]| {
            let mut stream = connect(ticket);
            stream.write_all(bytes).unwrap();
            stream
        };
        messages.map(say)
    });
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
fn a_slow_sender_delays_no_rank() {
    std::thread::scope(|scope| {
        let (took, ()) = join_despite(|ticket| {
            let mut stream = connect(ticket);
            scope.spawn(move || {
                for byte in join_request() {
                    if stream.write_all(&[byte]).is_err() {
                        return; // the meeting is over
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
        });
        assert!(took < Duration::from_secs(3), "{took:?}");
    });
}

#[test]
fn ten_thousand_connections_keep_no_rank_from_joining() {
    let (took, _held) = join_despite(|ticket| {
        let mut held = std::collections::VecDeque::new();
        for _ in 0..10_000 {
            held.push_back(connect(ticket));
            if held.len() > 900 {
                held.pop_front();
            }
        }
        held
    });
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// The error of a rank that meets an impostor in rank 0's place, and how soon it comes; `host` talks to each process that connects.
fn deceived(
    timeout: Duration,
    host: impl Fn(UnixStream) + Send + Sync,
) -> (Result<(), RendezvousError>, Duration) {
    let ticket = Ticket::random();
    let listener = UnixListener::bind_addr(&socket_address(&ticket)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (over, is_over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let host = &host;
        scope.spawn(move || {
            while is_over.try_recv() == Err(mpsc::TryRecvError::Empty) {
                match listener.accept() {
                    Ok((stream, _)) => drop(scope.spawn(move || host(stream))),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        let start = Instant::now();
        let result = builder(timeout).with_ticket(1, 3, &ticket).map(drop);
        drop(over);
        let result = result.map_err(|error| match error {
            FabricError::Rendezvous(error) => error,
            other => panic!("{other}"),
        });
        (result, start.elapsed())
    })
}

const HASTY: Duration = Duration::from_millis(300);

#[track_caller]
fn assert_false_root(found: (Result<(), RendezvousError>, Duration), problem: &str) {
    match found.0 {
        Err(RendezvousError::Impostor { problem: seen, .. }) => assert!(seen.contains(problem), "{seen}"),
        other => panic!("expected an impostor that {problem:?}, got {other:?}"),
    }
    assert!(found.1 < Duration::from_secs(2), "it is known as soon as it gives itself away");
}

/// Sends a frame with a descriptor beside it, as rank 0 sends the memory.
fn send_with_memory(stream: &UnixStream, frame: &Frame) {
    let memory = rustix::fs::memfd_create("trap", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [memory.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    rustix::net::sendmsg(stream, &[IoSlice::new(&frame.encode())], &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn a_listener_without_the_secret_is_refused() {
    let garbage = |mut stream: UnixStream| stream.write_all(b"SSH-2.0-OpenSSH_9.6\r\n").unwrap();
    assert_false_root(deceived(HASTY, garbage), "not a frame");

    let peer = |mut stream: UnixStream| stream.write_all(&join_request()).unwrap();
    assert_false_root(deceived(HASTY, peer), "asks to join");

    let welcome = || Frame::Welcome {
        cards: (0..3).map(card).collect(),
        handles: vec![],
        random: "00".into(),
        proof: "00".repeat(32),
    };
    let eager = |stream: UnixStream| send_with_memory(&stream, &welcome());
    assert_false_root(deceived(HASTY, eager), "does not know the secret");

    let careful = |mut stream: UnixStream| {
        stream.write_all(&Frame::Challenge { nonce: "00".repeat(32) }.encode()).unwrap();
        send_with_memory(&stream, &welcome());
    };
    assert_false_root(deceived(HASTY, careful), "does not know the secret");
}

#[test]
fn a_false_rank_0_cannot_hold_a_rank_beyond_its_deadline() {
    let limit = HASTY + Duration::from_secs(2);
    let silent = |mut stream: UnixStream| drop(stream.read(&mut [0]));
    let (result, took) = deceived(HASTY, silent);
    assert!(matches!(result, Err(RendezvousError::Missing { ref missing, .. }) if missing == &[0]));
    assert!(took < limit, "{took:?}");

    let rude = |stream: UnixStream| drop(stream); // hangs up, again and again
    let (result, took) = deceived(HASTY, rude);
    assert!(matches!(result, Err(RendezvousError::Missing { ref missing, .. }) if missing == &[0]));
    assert!(took < limit, "{took:?}");

    for (endless, problem) in [
        (Frame::Noted { proof: "00".into() }, "does not know the secret"),
        (Frame::Challenge { nonce: "00".into() }, "twice"),
    ] {
        let bytes = endless.encode().repeat(100);
        let chatty = |mut stream: UnixStream| {
            let start = Instant::now();
            while stream.write_all(&bytes).is_ok() && start.elapsed() < Duration::from_secs(5) {}
        };
        assert_false_root(deceived(HASTY, chatty), problem);
    }
}

/// A process of the same user that knows the name but not the secret: whatever it says, all ranks fail in seconds.
#[test]
fn a_process_that_takes_the_address_is_named_by_all_ranks_long_before_the_deadline() {
    let deadline = Duration::from_secs(60);
    let silent = |_: &mut UnixStream| {};
    let talkative = |stream: &mut UnixStream| {
        for frame in [Frame::Challenge { nonce: "00".into() }, Frame::Noted { proof: "00".into() }] {
            let _ = stream.write_all(&frame.encode());
        }
    };
    type Speech = fn(&mut UnixStream);
    let speakers: [(Speech, &str); 2] =
        [(silent, "has not answered"), (talkative, "does not know the secret")];
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (speak, seen_by_others) in speakers {
            let ticket = Ticket::random();
            let listener = UnixListener::bind_addr(&socket_address(&ticket)).unwrap();
            scope.spawn(move || {
                let mut held = Vec::new();
                listener.set_nonblocking(true).unwrap();
                while start.elapsed() < Duration::from_secs(12) {
                    match listener.accept() {
                        Ok((mut stream, _)) => {
                            speak(&mut stream);
                            held.push(stream);
                        }
                        Err(_) => std::thread::sleep(Duration::from_millis(1)),
                    }
                }
            });
            for (rank, seen) in [(0, "does not know the secret, or does not answer"), (1, seen_by_others)] {
                let ticket = ticket.clone();
                scope.spawn(move || {
                    let error = builder(deadline).with_ticket(rank, 2, &ticket).unwrap_err().to_string();
                    assert!(error.contains(seen), "rank {rank}: {error}");
                    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
                });
            }
        }
    });
}

/// Another user is not believed at all, whatever it knows.
#[test]
fn connections_of_another_user_get_no_answer() {
    let Some(()) = root() else { return };
    // The user of the calling thread alone changes.
    let become_nobody = || rustix::thread::set_thread_uid(rustix::fs::Uid::from_raw(65534)).unwrap();
    let ticket = Ticket::random();
    std::thread::scope(|scope| {
        let impostor = scope.spawn(|| {
            become_nobody();
            let listener = UnixListener::bind_addr(&socket_address(&ticket)).unwrap();
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0]);
            }
        });
        await_listener(&ticket);
        for rank in [1, 0] {
            let start = Instant::now();
            let patient = builder(Duration::from_secs(15));
            let error = patient.with_ticket(rank, 2, &ticket).unwrap_err().to_string();
            assert!(error.contains("user 65534"), "{error}");
            assert!(start.elapsed() < Duration::from_secs(2), "rank {rank} waited {:?}", start.elapsed());
        }
        impostor.join().unwrap();
    });
    join_despite(|ticket| {
        std::thread::scope(|scope| {
            let peer = scope.spawn(|| {
                become_nobody();
                hear(connect(ticket))
            });
            assert_eq!(peer.join().unwrap(), [], "not even a challenge");
        });
    });
    let told = std::thread::scope(|scope| {
        let ticket = Ticket::random();
        let peer = scope.spawn({
            let ticket = ticket.clone();
            move || {
                become_nobody();
                hear(connect(&ticket))
            }
        });
        let error = builder(Duration::from_secs(1)).with_ticket(0, 2, &ticket).unwrap_err();
        peer.join().unwrap();
        error.to_string()
    });
    assert!(told.ends_with("; turned away: 1 process of another user"), "{told}");
}

/// A rank that waits in vain may have turned its peer away itself, with another secret or as another user.
#[test]
fn a_time_out_tells_who_was_turned_away() {
    let ticket = Ticket::random();
    let told = std::thread::scope(|scope| {
        let root = scope
            .spawn(|| builder(Duration::from_secs(1)).with_ticket(0, 3, &ticket).unwrap_err().to_string());
        for _ in 0..3 {
            let mut stream = connect(&ticket);
            stream.write_all(&join_request()).unwrap();
            assert!(matches!(&hear(stream)[1..], [Frame::Refusal { .. }]));
        }
        root.join().unwrap()
    });
    // This process, which tried three times.
    assert!(
        told.ends_with("ranks [1, 2] never arrived; turned away: 1 process with a wrong secret"),
        "{told}"
    );
}

/// Waits until a process listens.
fn await_listener(ticket: &Ticket) {
    let Address::Abstract(name) = &ticket.address else { unreachable!("a random ticket") };
    while !std::fs::read_to_string("/proc/net/unix").unwrap().contains(name) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
