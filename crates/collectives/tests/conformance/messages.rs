//! What messages between ranks promise on the host: tags, any source, started and waited for.

use std::time::{Duration, Instant};

use antiphon_collectives::Collectives;
use antiphon_fabric::{Communicator, FabricError, Source};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    harness::{CollectiveBackend, assert_same_bits},
    operations::Rank,
    values::any_bits,
};

/// The bytes that travel in one packet, and in a whole ring of them.
pub const PACKET: usize = 64 << 10;
const RING: usize = 4 * PACKET;

conformance_on_host_and_nodes! {
    messages_arrive_in_the_order_they_were_sent: any_dtype, [world_1 world_2 world_3];
    small_messages_do_not_wait_for_the_receiver: any_dtype, [world_1 world_2 world_3];
    neighbours_may_exchange_by_starting_to_receive_first: any_dtype, [world_2 world_3 world_5];
    a_started_message_comes_back_with_its_buffer: any_dtype, [world_1 world_2 world_3];
    a_message_moves_on_while_its_receiver_waits_for_something_else: any_dtype, [world_2 world_3];
    a_message_moves_on_while_its_sender_waits_for_something_else: any_dtype, [world_2 world_3];
    a_message_goes_on_without_its_handle: any_dtype, [world_2 world_3];
    a_message_of_another_length_or_dtype_is_a_mismatch: any_dtype, [world_2 world_3];
    messages_go_by_their_tags: any_dtype, [world_1 world_2 world_3];
    a_message_of_any_rank_says_whose_it_is: any_dtype, [world_2 world_3 world_5];
    the_receive_that_was_asked_for_first_gets_the_message: any_dtype, [world_2 world_3];
    a_message_with_the_right_tag_and_another_length_is_a_mismatch: any_dtype, [world_2];
    ranks_that_leave_in_order_end_no_receive_from_any: any_dtype, [world_3 world_5];
    arguments_that_make_no_sense_are_refused: any_dtype, [world_1 world_2];
}

fn next_and_previous(comm: &Communicator) -> (usize, usize) {
    let (rank, world) = (comm.rank(), comm.world_size());
    ((rank + 1) % world, (rank + world - 1) % world)
}

fn messages_arrive_in_the_order_they_were_sent<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let (next, previous) = next_and_previous(&comm);
        let sends: Vec<_> =
            (0..50usize).map(|i| comm.start_send(vec![i as i32; i * i * 11], next).unwrap()).collect();
        for i in 0..50usize {
            let mut got = vec![-1i32; i * i * 11];
            comm.recv(&mut got, previous).unwrap();
            assert!(got.iter().all(|&x| x == i as i32), "message {i}");
        }
        for send in sends {
            send.wait().unwrap();
        }
    });
}

fn small_messages_do_not_wait_for_the_receiver<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let (next, previous) = next_and_previous(&comm);
        let message = any_bits::<u8>(comm.rank() as u64, RING);
        comm.send(&message, next).unwrap();
        let mut got = vec![0u8; RING];
        comm.recv(&mut got, previous).unwrap();
        assert_same_bits(&got, &any_bits::<u8>(previous as u64, RING), "a message");
    });
}

fn neighbours_may_exchange_by_starting_to_receive_first<B: CollectiveBackend>(world: usize) {
    let data = |from: usize, to: usize| any_bits::<f32>((from * 100 + to) as u64, RING);
    B::run(world, |comm| {
        let (me, (next, previous)) = (comm.rank(), next_and_previous(&comm));
        let receives = [previous, next].map(|peer| comm.start_recv(vec![0f32; RING], peer).unwrap());
        for peer in [next, previous] {
            comm.send(&data(me, peer), peer).unwrap();
        }
        for (receive, peer) in receives.into_iter().zip([previous, next]) {
            assert_same_bits(&receive.wait().unwrap(), &data(peer, me), format_args!("from rank {peer}"));
        }
    });
}

fn a_started_message_comes_back_with_its_buffer<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let (next, previous) = next_and_previous(&comm);
        let message = any_bits::<f64>(comm.rank() as u64, RING);
        let mut send = comm.start_send(message.clone(), next).unwrap();
        let mut receive = comm.start_recv(vec![0f64; RING], previous).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !(receive.is_finished() && send.is_finished()) {
            assert!(Instant::now() < deadline, "asking whether it is over does not move a message");
            std::thread::yield_now();
        }
        assert_same_bits(&send.wait().unwrap(), &message, "what was sent");
        assert_same_bits(&receive.wait().unwrap(), &any_bits::<f64>(previous as u64, RING), "what came");
        comm.barrier().unwrap();
    });
}

fn a_message_moves_on_while_its_receiver_waits_for_something_else<B: CollectiveBackend>(world: usize) {
    let message = any_bits::<u8>(1, 4 * RING + 1);
    B::run(world, |comm| match comm.rank() {
        0 => {
            comm.send(&message, 1).unwrap();
            comm.barrier().unwrap();
        }
        1 => {
            let receive = comm.start_recv(vec![0u8; message.len()], 0).unwrap();
            comm.barrier().unwrap();
            assert_same_bits(&receive.wait().unwrap(), &message, "the message");
        }
        _ => comm.barrier().unwrap(),
    });
}

fn a_message_moves_on_while_its_sender_waits_for_something_else<B: CollectiveBackend>(world: usize) {
    let message = any_bits::<u8>(1, 4 * RING + 1);
    B::run(world, |comm| match comm.rank() {
        0 => {
            let send = comm.start_send(message.clone(), 1).unwrap();
            comm.barrier().unwrap();
            send.wait().unwrap();
        }
        1 => {
            let mut got = vec![0u8; message.len()];
            comm.recv(&mut got, 0).unwrap();
            assert_same_bits(&got, &message, "the message");
            comm.barrier().unwrap();
        }
        _ => comm.barrier().unwrap(),
    });
}

fn a_message_goes_on_without_its_handle<B: CollectiveBackend>(world: usize) {
    let message = any_bits::<u8>(1, 4 * RING + 1);
    B::run(world, |comm| {
        match comm.rank() {
            0 => drop(comm.start_send(message.clone(), 1).unwrap()),
            1 => {
                drop(comm.start_recv(vec![0u8; message.len()], 0).unwrap());
                // The next message comes after the one for which no call waits.
                let mut got = [0u8];
                comm.recv(&mut got, 0).unwrap();
                assert_eq!(got, [42]);
            }
            _ => {}
        }
        if comm.rank() == 0 {
            comm.send(&[42u8], 1).unwrap();
        }
        comm.barrier().unwrap();
    });
}

fn a_message_of_another_length_or_dtype_is_a_mismatch<B: CollectiveBackend>(world: usize) {
    // Too long for the ring, so that the sender is still there when the receiver finds out.
    let (sent, sent_text) = (vec![0f32; RING], format!("send/recv({RING} × f32)"));
    let shorter = |comm: &Communicator| comm.recv(&mut vec![0f32; 4], 0);
    let integers = |comm: &Communicator| comm.recv(&mut vec![0i32; RING], 0);
    type Receive<'r> = &'r (dyn Fn(&Communicator) -> Result<(), FabricError> + Sync);
    let cases: [(Receive<'_>, String); 2] =
        [(&shorter, "send/recv(4 × f32)".into()), (&integers, format!("send/recv({RING} × i32)"))];
    for (receive, received_text) in cases {
        let start = Instant::now();
        B::run(world, |comm| match comm.rank() {
            0 => {
                let error = comm.send(&sent, 1).unwrap_err();
                assert!(matches!(error, FabricError::Mismatch { rank: 0, peer: 1, .. }), "{error:?}");
                let text = error.to_string();
                assert!(text.contains(&sent_text) && text.contains(&received_text), "{text}");
                let again = comm.send(&[1u8], 1).unwrap_err();
                assert!(matches!(again, FabricError::Failed(_)), "{again:?}");
            }
            1 => {
                let error = receive(&comm).unwrap_err();
                assert!(matches!(error, FabricError::Mismatch { rank: 1, peer: 0, .. }), "{error:?}");
                let text = error.to_string();
                assert!(text.contains(&sent_text) && text.contains(&received_text), "{text}");
                let again = comm.recv(&mut [1u8], 0).unwrap_err();
                assert!(matches!(again, FabricError::Failed(_)), "{again:?}");
            }
            _ => {}
        });
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    }
}

fn messages_go_by_their_tags<B: CollectiveBackend>(world: usize) {
    // Some longer than a ring, so that they are taken out of the way while others are awaited.
    let message =
        |from: usize, tag: u32| any_bits::<u8>(from as u64 * 10 + u64::from(tag), tag as usize * RING / 2);
    B::run(world, |comm| {
        let (next, previous) = next_and_previous(&comm);
        let me = comm.rank();
        for order in [[0u32, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]] {
            std::thread::scope(|scope| {
                let messenger = comm.messenger().clone();
                scope.spawn(move || {
                    for tag in 0..5 {
                        messenger.send_with_tag(&message(me, tag), next, tag).unwrap();
                    }
                });
                for tag in order {
                    let expected = message(previous, tag);
                    let mut got = vec![0u8; expected.len()];
                    assert_eq!(comm.recv_with_tag(&mut got, previous, tag).unwrap(), previous);
                    assert_same_bits(&got, &expected, format_args!("tag {tag} of {order:?}"));
                }
            });
        }
    });
}

fn a_message_of_any_rank_says_whose_it_is<B: CollectiveBackend>(world: usize) {
    let message = |from: usize| any_bits::<f32>(from as u64, RING);
    B::run(world, |comm| {
        if comm.rank() > 0 {
            comm.send_with_tag(&message(comm.rank()), 0, 9).unwrap();
            comm.send(&[comm.rank() as i32], 0).unwrap();
        } else {
            let mut sources = Vec::new();
            for _ in 1..world {
                let mut got = vec![0f32; RING];
                let source = comm.recv_with_tag(&mut got, Source::Any, 9).unwrap();
                assert_same_bits(&got, &message(source), format_args!("from rank {source}"));
                sources.push(source);
            }
            sources.sort_unstable();
            assert_eq!(sources, Vec::from_iter(1..world));
            for _ in 1..world {
                let mut got = [0i32];
                let source = comm.recv_with_tag(&mut got, Source::Any, 0).unwrap();
                assert_eq!(got[0] as usize, source);
            }
        }
        comm.barrier().unwrap();
    });
}

fn the_receive_that_was_asked_for_first_gets_the_message<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        if comm.rank() == 1 {
            comm.barrier().unwrap(); // everything has been asked for
            (0..6i32).for_each(|i| comm.send_with_tag(&[i], 0, u32::from(i == 5)).unwrap());
        } else if comm.rank() == 0 {
            let ask = |source: Source, tag: u32| {
                let buffer = vec![-1i32];
                let elements: *mut [i32] = &mut *Box::leak(buffer.clone().into_boxed_slice());
                // SAFETY: the elements are leaked, and used by the receive alone until it is over.
                let pending = unsafe {
                    comm.messenger().start_recv(TensorViewMut::from(&mut *elements), (), source, tag)
                };
                (pending.unwrap(), elements)
            };
            let (one, any) = (Source::Rank(1), Source::Any);
            let asked = [(any, 0), (one, 0), (one, 1), (any, 0), (one, 0), (any, 0)].map(|(s, t)| ask(s, t));
            comm.barrier().unwrap();
            let got = asked.map(|(mut pending, elements)| {
                while !pending.is_finished() {
                    std::thread::yield_now();
                }
                assert_eq!(pending.source(), Some(1));
                pending.wait().unwrap();
                // SAFETY: the receive is over.
                unsafe { (&*elements)[0] }
            });
            assert_eq!(got, [0, 1, 5, 2, 3, 4]);
        } else {
            comm.barrier().unwrap();
        }
        comm.barrier().unwrap();
    });
}

fn a_message_with_the_right_tag_and_another_length_is_a_mismatch<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        if comm.rank() == 0 {
            comm.send_with_tag(&[0f32; 3], 1, 5).unwrap();
            comm.send_with_tag(&[0f32; 3], 1, 6).unwrap();
            let _ = comm.barrier();
        } else {
            comm.recv_with_tag(&mut [0f32; 3], 0, 6).unwrap(); // the other is out of the way by now
            let error = comm.recv_with_tag(&mut [0f32; 4], Source::Any, 5).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains("send/recv(4 × f32, tag 5)") && text.contains("send/recv(3 × f32, tag 5)"),
                "{text}"
            );
        }
    });
}

fn ranks_that_leave_in_order_end_no_receive_from_any<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        if comm.rank() > 0 {
            std::thread::sleep(Duration::from_millis(50 * comm.rank() as u64));
            comm.send(&[comm.rank() as i32], 0).unwrap();
            return;
        }
        for _ in 1..world {
            comm.recv_with_tag(&mut [0i32], Source::Any, 0).unwrap();
        }
        // Now no rank is left that could send.
        let error = comm.recv_with_tag(&mut [0i32], Source::Any, 0).unwrap_err();
        assert!(matches!(error, FabricError::PeerLost { .. }), "{error:?}");
    });
}

fn arguments_that_make_no_sense_are_refused<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let (data, mut buffer) = ([0f32; 8], [0f32; 4]);
        let strided = || TensorView::with_strides(&data, &[4], &[2]).unwrap();
        let refusals = [
            (comm.send(&data, world), format!("destination rank {world}")),
            (comm.recv(&mut buffer, world + 5), format!("source rank {}", world + 5)),
            (comm.messenger().send_recv(&data, world, &mut buffer, 0), format!("destination rank {world}")),
            (comm.messenger().send_recv(&data, 0, &mut buffer, world), format!("source rank {world}")),
            (comm.start_send(vec![0u8], world).map(drop), format!("destination rank {world}")),
            (comm.start_recv(vec![0u8], world).map(drop), format!("source rank {world}")),
            (comm.send(strided(), 0), "[4] with strides [2]".into()),
            (comm.messenger().send_recv(strided(), 0, &mut buffer, 0), "[4] with strides [2]".into()),
        ];
        for (result, text) in refusals {
            let error = result.unwrap_err();
            assert!(matches!(error, FabricError::InvalidArgument(_)), "{error:?}");
            assert!(error.to_string().contains(&text), "{error} does not say {text:?}");
        }
        Rank::<B>::new(&comm, DType::F32).ring(100);
        comm.all_gather(&[1u8], &mut vec![0u8; world]).unwrap();
    });
}
