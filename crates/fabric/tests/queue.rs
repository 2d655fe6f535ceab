//! One order for many callers, interrupts, and messages beside them.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        mpsc::{self, Receiver, Sender},
    },
    time::{Duration, Instant},
};

use antiphon_fabric::{Communicator, FabricError, LocalWorld, Messenger, Pending, Queue, rendezvous::Ticket};
use antiphon_tensor::{TensorView, TensorViewMut};

type Outcome<T = ()> = Result<T, FabricError>;

fn exchange(comm: &Communicator, text: &str) -> Outcome<String> {
    let all = comm.exchange_bytes(text.as_bytes())?;
    Ok(all.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect::<Vec<_>>().join("+"))
}

#[test]
fn what_one_rank_starts_another_may_run() {
    let results = LocalWorld::run(3, |comm| {
        let starts = comm.rank() == 1;
        let queue = Queue::new(comm);
        let mut results = Vec::new();
        for call in 0..20 {
            let text = format!("{call}");
            if starts {
                let pending = queue.start(move |comm| exchange(comm, &text))?;
                if call % 5 == 0 {
                    results.push(pending.wait()?);
                }
            } else {
                let result = queue.run(|comm| exchange(comm, &text))?;
                if call % 5 == 0 {
                    results.push(result);
                }
            }
        }
        queue.run(|comm| comm.barrier())?;
        Ok::<_, FabricError>(results)
    });
    for result in results {
        assert_eq!(result.unwrap(), ["0+0+0", "5+5+5", "10+10+10", "15+15+15"]);
    }
}

#[test]
fn calls_of_several_threads_happen_one_after_the_other() {
    let queue = Queue::new(alone());
    let log = Arc::new(Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (queue, log) = (&queue, &log);
            scope.spawn(move || {
                for _ in 0..25 {
                    let (begin, end) = (log.clone(), log.clone());
                    let pending = queue
                        .start(move |_| {
                            begin.lock().unwrap().push((thread, "begins"));
                            Ok::<_, FabricError>(())
                        })
                        .unwrap();
                    queue
                        .run(|_| {
                            end.lock().unwrap().push((thread, "ends"));
                            Ok::<_, FabricError>(())
                        })
                        .unwrap();
                    pending.wait().unwrap();
                }
            });
        }
    });
    let log = log.lock().unwrap();
    for thread in 0..4 {
        let own: Vec<_> = log.iter().filter(|(by, _)| *by == thread).map(|(_, what)| *what).collect();
        assert_eq!(own, ["begins", "ends"].repeat(25));
    }
}

#[test]
fn a_call_inside_a_call_is_refused_and_not_waited_for() {
    let queue = Queue::new(alone());
    let inner = queue.run(|_| Ok::<_, FabricError>(queue.run(|comm| comm.barrier()))).unwrap();
    assert!(inner.unwrap_err().to_string().contains("inside another one"));
    queue.run(|comm| comm.barrier()).unwrap();
}

#[test]
fn dropping_the_queue_lets_what_was_started_end() {
    let (go, gate): (Sender<()>, Receiver<()>) = mpsc::channel();
    let queue = Queue::new(alone());
    let pending = queue
        .start(move |comm| {
            gate.recv().unwrap();
            comm.barrier()
        })
        .unwrap();
    drop(queue);
    go.send(()).unwrap();
    pending.wait().unwrap();
}

#[test]
fn messages_do_not_wait_for_the_queue() {
    let results = LocalWorld::run(2, |comm| -> Outcome<i32> {
        let queue = Queue::new(comm);
        match queue.messenger().rank() {
            0 => {
                let pending = queue.start(|comm| comm.barrier())?;
                queue.messenger().send(&[7i32], 1)?; // the other rank needs it to come to the barrier
                pending.wait()?;
                Ok(7)
            }
            _ => {
                let mut received = [0i32];
                queue.messenger().recv(&mut received, 0)?;
                queue.run(|comm| comm.barrier())?;
                Ok(received[0])
            }
        }
    });
    assert!(results.into_iter().all(|result| result.unwrap() == 7));
}

#[test]
fn a_transfer_keeps_its_owner_and_hands_it_back() {
    let results = LocalWorld::run(2, |comm| -> Outcome<Vec<u8>> {
        let messenger: Messenger = comm.messenger().clone();
        let mut data = vec![messenger.rank() as u8; 100_000];
        let bytes: *mut [u8] = &mut *data;
        // SAFETY: the vector is the owner.
        let pending = unsafe {
            match messenger.rank() {
                0 => messenger.start_send(TensorView::from(&*bytes), data, 1, 0)?,
                _ => messenger.start_recv(TensorViewMut::from(&mut *bytes), data, 0, 0)?,
            }
        };
        pending.wait()
    });
    assert!(results.into_iter().all(|result| result.unwrap() == vec![0; 100_000]));
}

#[test]
fn waiting_for_a_while_can_be_repeated() {
    LocalWorld::run(2, |comm| -> Outcome {
        if comm.rank() == 0 {
            let mut pending = comm.start_recv(vec![0u8; 3], 1)?;
            assert!(!pending.wait_for(Duration::from_millis(5)));
            comm.barrier()?;
            while !pending.wait_for(Duration::from_millis(5)) {}
            assert_eq!(pending.wait()?, [1, 2, 3]);
            return Ok(());
        }
        comm.barrier()?;
        comm.send(&[1u8, 2, 3], 0)
    })
    .into_iter()
    .for_each(|result| result.unwrap());
}

#[test]
fn a_peer_that_leaves_ends_a_repeated_wait() {
    let results = LocalWorld::run(2, |comm| -> Outcome {
        if comm.rank() == 1 {
            return Ok(());
        }
        let mut pending = comm.start_recv(vec![0u8; 3], 1)?;
        while !pending.wait_for(Duration::from_millis(5)) {}
        pending.wait().map(drop)
    });
    assert!(matches!(results[0], Err(FabricError::PeerLost { rank: 1, .. })), "{:?}", results[0]);
}

/// Both ranks on threads; rank 0 is interrupted `after` it began to wait.
fn interrupted(wait: impl Fn(&Communicator) -> Outcome + Sync) -> [Outcome; 2] {
    let ticket = Ticket::random();
    let (left, gone) = mpsc::channel();
    std::thread::scope(|scope| {
        let (ticket, wait) = (&ticket, &wait);
        let first = scope.spawn(move || {
            let begin = Instant::now();
            let comm = Communicator::builder()
                .interrupt(move || begin.elapsed() > Duration::from_millis(100))
                .with_ticket(0, 2, ticket)?;
            let outcome = wait(&comm);
            left.send(comm).unwrap();
            outcome
        });
        let second = scope.spawn(move || {
            let comm = Communicator::builder().with_ticket(1, 2, ticket)?;
            let _peer = gone.recv().unwrap();
            comm.barrier()?; // rank 0 had come to its barrier
            comm.barrier()
        });
        [first.join().unwrap(), second.join().unwrap()]
    })
}

#[test]
fn an_interrupt_ends_a_wait_and_the_others_hear_of_it() {
    for outcome in [interrupted(|comm| comm.barrier()), interrupted(|comm| comm.recv(&mut [0u8], 1))] {
        let [first, second] = outcome.map(Result::unwrap_err);
        assert!(matches!(first, FabricError::Interrupted { operation: Some(_) }), "{first}");
        assert!(second.to_string().contains("rank 0 was interrupted"), "{second}");
    }
}

#[test]
fn an_interrupt_ends_the_meeting() {
    let begin = Instant::now();
    let error = Communicator::builder()
        .interrupt(move || begin.elapsed() > Duration::from_millis(50))
        .with_ticket(0, 2, &Ticket::random())
        .unwrap_err();
    assert!(error.to_string().contains("interrupted"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_interrupt_while_earlier_calls_go_on_leaves_the_communicator_usable() {
    let stop = Arc::new(Mutex::new(false));
    let asked = stop.clone();
    let comm = Communicator::builder()
        .interrupt(move || *asked.lock().unwrap())
        .with_ticket(0, 1, &Ticket::random())
        .unwrap();
    let queue = Queue::new(comm);
    let (go, gate): (Sender<()>, Receiver<()>) = mpsc::channel();
    let pending = queue
        .start(move |_| {
            gate.recv().unwrap();
            Ok::<_, FabricError>(())
        })
        .unwrap();
    *stop.lock().unwrap() = true;
    let refused = queue.run(|comm| comm.barrier()).unwrap_err();
    assert!(matches!(refused, FabricError::Interrupted { operation: None }), "{refused}");
    *stop.lock().unwrap() = false;
    go.send(()).unwrap();
    pending.wait().unwrap();
    queue.run(|comm| comm.barrier()).unwrap();
}

/// A handler that runs while its thread waits for its turn may not call, and must not hang.
#[test]
fn a_call_from_the_hook_of_a_waiting_call_is_refused() {
    let queue = Arc::new(OnceLock::<Queue>::new());
    let refused = Arc::new(Mutex::new(None));
    let (handle, answer) = (queue.clone(), refused.clone());
    let hook = move || {
        if let Some(queue) = handle.get() {
            let error = queue.run(|comm| comm.barrier()).unwrap_err();
            *answer.lock().unwrap() = Some(error.to_string());
        }
        false
    };
    let comm = Communicator::builder().interrupt(hook).with_ticket(0, 1, &Ticket::random()).unwrap();
    queue.set(Queue::new(comm)).unwrap();
    let queue = queue.get().unwrap();
    let (go, gate): (Sender<()>, Receiver<()>) = mpsc::channel();
    let pending = queue
        .start(move |_| {
            gate.recv().unwrap();
            Ok::<_, FabricError>(())
        })
        .unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while refused.lock().unwrap().is_none() {
                std::thread::yield_now();
            }
            go.send(()).unwrap();
        });
        queue.run(|comm| comm.barrier()).unwrap();
    });
    pending.wait().unwrap();
    assert!(refused.lock().unwrap().as_ref().unwrap().contains("inside another one"));
}

#[test]
fn a_message_that_was_started_goes_on_while_its_rank_does_something_else() {
    let (arrived, until_arrived) = mpsc::channel();
    let until_arrived = Mutex::new(until_arrived);
    LocalWorld::run_with(2, Duration::from_secs(20), |comm| -> Outcome {
        if comm.rank() == 0 {
            let pending = comm.start_send(vec![1u8; 4 << 20], 1)?; // much more than is buffered
            // It does not look after its message before the peer has all of it.
            until_arrived
                .lock()
                .unwrap()
                .recv_timeout(Duration::from_secs(30))
                .expect("the peer has received it");
            return pending.wait().map(drop);
        }
        let mut received = vec![0u8; 4 << 20];
        comm.recv(&mut received, 0)?;
        assert!(received.iter().all(|&byte| byte == 1));
        arrived.send(()).unwrap();
        Ok(())
    })
    .into_iter()
    .for_each(|result| result.unwrap());
}

#[test]
fn a_caller_that_only_polls_notices_a_lost_peer() {
    let results = LocalWorld::run(2, |comm| -> Outcome {
        if comm.rank() == 1 {
            return Ok(());
        }
        let mut pending = comm.start_recv(vec![0u8; 3], 1)?;
        let start = Instant::now();
        while !pending.is_finished() {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        pending.wait().map(drop)
    });
    assert!(matches!(results[0], Err(FabricError::PeerLost { rank: 1, .. })), "{:?}", results[0]);
}

#[test]
fn flushing_waits_for_what_is_being_sent() {
    LocalWorld::run(2, |comm| -> Outcome {
        if comm.rank() == 0 {
            let pending = comm.start_send(vec![1u8; 4 << 20], 1)?;
            comm.messenger().flush()?;
            drop((pending, comm)); // leaves at once
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
        comm.recv(&mut vec![0u8; 4 << 20], 0)
    })
    .into_iter()
    .for_each(|result| result.unwrap());
}

/// The owner of a buffer is dropped without any lock held: it may be anything, and call us.
#[test]
fn an_owner_may_use_the_messages_when_it_is_dropped() {
    struct Owner(Vec<u8>, Messenger);
    impl Drop for Owner {
        fn drop(&mut self) {
            drop(self.1.send(&[9u8], 1));
        }
    }
    LocalWorld::run(2, |comm| -> Outcome {
        if comm.rank() == 0 {
            let owner = Owner(vec![1u8; 100_000], comm.messenger().clone());
            let bytes: *const [u8] = &*owner.0;
            // SAFETY: the owner owns the bytes.
            drop(unsafe { comm.messenger().start_send(TensorView::from(&*bytes), owner, 1, 0)? });
            return comm.barrier();
        }
        comm.recv(&mut vec![0u8; 100_000], 0)?;
        comm.recv(&mut [0u8], 0)?;
        comm.barrier()
    })
    .into_iter()
    .for_each(|result| result.unwrap());
}

fn alone() -> Communicator {
    Communicator::builder().with_ticket(0, 1, &Ticket::random()).unwrap()
}

/// This wait would never end: the awaited work begins only when the waiting work is over.
#[test]
fn work_that_waits_for_work_behind_it_is_an_error_and_not_a_wait() {
    fn assert_told(result: Result<(), FabricError>) {
        match result {
            Err(FabricError::InvalidArgument(why)) => assert!(why.contains("given later"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    type Handover = (Sender<Pending<()>>, Receiver<Pending<()>>);
    LocalWorld::run(1, |comm| {
        let (give, take): Handover = mpsc::channel();
        let first = comm.spawn(move |_| take.recv().unwrap().wait()).unwrap();
        give.send(comm.spawn(|_| Ok(())).unwrap()).unwrap();
        assert_told(first.wait());

        let queue = Queue::new(comm);
        let (give, take): Handover = mpsc::channel();
        let first = queue.start(move |_| take.recv().unwrap().wait()).unwrap();
        give.send(queue.start(|_| Ok(())).unwrap()).unwrap();
        assert_told(first.wait());
        queue.run(|comm| comm.barrier()).expect("the queue goes on");
    });
}
