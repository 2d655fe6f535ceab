//! Operations that go on in the background.

use std::time::{Duration, Instant};

use antiphon_collectives::{CollectiveError, Collectives, Communicator, NonBlocking, ReduceOp};
use antiphon_fabric::{FabricError, Pending};
use antiphon_operation::Call;
use antiphon_tensor::{DType, Element, with_dtype};

use crate::{
    harness::{CollectiveBackend, assert_same_bits},
    operations::{Rank, Way},
    values::{Values, any_bits},
};

conformance_on_host_and_nodes! {
    every_operation_gives_what_its_blocking_form_gives: every_dtype, [world_1 world_2 world_3 world_4];
    many_may_be_in_flight_beside_blocking_calls: any_dtype, [world_1 world_2 world_3 world_4];
    handles_may_be_waited_for_in_any_order: any_dtype, [world_2 world_3];
    a_lost_handle_cancels_nothing: any_dtype, [world_2 world_3];
    a_lost_communicator_cancels_nothing: any_dtype, [world_2 world_3];
    a_handle_says_when_it_is_finished: any_dtype, [world_1 world_2 world_3];
    several_calls_may_go_together: any_dtype, [world_2 world_3];
    messages_and_background_do_not_block_each_other: any_dtype, [world_2 world_3];
    refused_arguments_leave_the_background_usable: any_dtype, [world_2 world_3];
    ranks_that_disagree_in_the_background_are_told: any_dtype, [world_2 world_3];
    background_and_foreground_have_orders_of_their_own: any_dtype, [world_2 world_3];
}

/// What all ranks contribute.
fn inputs(dtype: DType, seed: u64, world: usize, count: usize) -> Vec<Values> {
    (0..world).map(|rank| Values::any_bits(dtype, seed << 8 | rank as u64, count)).collect()
}

fn every_operation_gives_what_its_blocking_form_gives<B: CollectiveBackend>(dtype: DType, world: usize) {
    with_dtype!(dtype, T => B::run(world, |comm| every_operation::<T>(&comm)));
}

fn every_operation<T: Element>(comm: &Communicator) {
    let (rank, world, op) = (comm.rank(), comm.world_size(), ReduceOp::Max);
    let root = world - 1;
    let nodes = comm.nodes();
    let nodes = nodes.of_ranks();
    for count in [0, 1, 10, 1000] {
        let rows = inputs(T::DTYPE, count as u64, world, count * world);
        let column: Vec<Values> = rows.iter().map(|row| row.block(rank, world)).collect();
        let mine = || rows[rank].to_vec::<T>();

        let all_reduce = comm.start_all_reduce(mine(), op).unwrap();
        let all_gather = comm.start_all_gather(mine()).unwrap();
        let reduce_scatter = comm.start_reduce_scatter(mine(), op).unwrap();
        let all_to_all = comm.start_all_to_all(mine()).unwrap();
        let broadcast = comm.start_broadcast(mine(), root).unwrap();
        let reduce = comm.start_reduce(mine(), op, root).unwrap();
        let barrier = comm.start_barrier().unwrap();
        let counts: Vec<usize> = (0..world).map(|rank| rank * count).collect();
        let part = rows[rank].first(counts[rank]);
        let all_gather_v = comm.start_all_gather_v(part.to_vec::<T>(), counts.clone()).unwrap();
        let whole = counts.iter().sum::<usize>();
        let uneven: Vec<Values> = inputs(T::DTYPE, count as u64 + 7, world, whole);
        let reduce_scatter_v =
            comm.start_reduce_scatter_v(uneven[rank].to_vec::<T>(), counts.clone(), op).unwrap();
        let gather = comm.start_gather(mine(), root).unwrap();
        let row = if rank == root { mine() } else { Vec::new() };
        let scatter = comm.start_scatter(row, count, root).unwrap();
        let lengths = |of: &dyn Fn(usize) -> usize| (0..world).map(|peer| of(peer) % 2 * count).collect();
        let sends = |from: usize| -> Vec<usize> { lengths(&|to| from + to / 2) };
        let sent = rows[rank].first(sends(rank).iter().sum()).to_vec::<T>();
        let receives = (0..world).map(|from| sends(from)[rank]).collect();
        let all_to_all_v = comm.start_all_to_all_v(sent, sends(rank), receives).unwrap();

        let gives = |handle: Pending<Vec<T>, CollectiveError>, expected: &Values, what: &str| {
            assert_same_bits(&handle.wait().unwrap(), expected, what);
        };
        let reduced = Values::reduced(op, &rows, nodes);
        gives(all_reduce, &reduced, "start_all_reduce");
        gives(all_gather, &Values::concat(&rows), "start_all_gather");
        gives(reduce_scatter, &Values::reduced(op, &column, nodes), "start_reduce_scatter");
        gives(all_to_all, &Values::concat(&column), "start_all_to_all");
        gives(broadcast, &rows[root], "start_broadcast");
        gives(reduce, if rank == root { &reduced } else { &rows[rank] }, "start_reduce");
        barrier.wait().unwrap();
        let parts: Vec<Values> = rows.iter().zip(&counts).map(|(row, &count)| row.first(count)).collect();
        gives(all_gather_v, &Values::concat(&parts), "start_all_gather_v");
        let start = counts[..rank].iter().sum::<usize>();
        let own: Vec<Values> = uneven.iter().map(|row| row.range(start..start + counts[rank])).collect();
        gives(reduce_scatter_v, &Values::reduced(op, &own, nodes), "start_reduce_scatter_v");
        let gathered = Values::concat(&rows);
        gives(gather, &if rank == root { gathered } else { gathered.first(0) }, "start_gather");
        gives(scatter, &rows[root].block(rank, world), "start_scatter");
        let from_each = |(from, row): (usize, &Values)| {
            let start = sends(from)[..rank].iter().sum();
            row.range(start..start + sends(from)[rank])
        };
        let come: Vec<Values> = rows.iter().enumerate().map(from_each).collect();
        gives(all_to_all_v, &Values::concat(&come), "start_all_to_all_v");
    }
}

fn many_may_be_in_flight_beside_blocking_calls<B: CollectiveBackend>(world: usize) {
    let inputs = |i: usize| inputs(DType::F32, i as u64, world, 1 + i * 997 % 50_000);
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, DType::F32).seeded(1);
        let pending: Vec<_> = (0..40)
            .map(|i| {
                let mine = inputs(i)[comm.rank()].to_vec::<f32>();
                let handle = comm.start_all_reduce(mine, ReduceOp::Sum).unwrap();
                rank.all_reduce(i * 100, ReduceOp::Sum, Way::Automatic);
                rank.call(&Call::broadcast(i % world), i);
                handle
            })
            .collect();
        for (i, handle) in pending.into_iter().enumerate() {
            let expected = Values::reduced(ReduceOp::Sum, &inputs(i), &B::nodes(world));
            assert_same_bits(&handle.wait().unwrap(), &expected, format_args!("start_all_reduce {i}"));
        }
    });
}

fn handles_may_be_waited_for_in_any_order<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let start = |i: i32| comm.start_all_reduce(vec![i; 1000], ReduceOp::Sum).unwrap();
        let mut pending: Vec<_> = (0..10).map(|i| (i, start(i))).collect();
        if comm.rank() % 2 == 1 {
            pending.reverse();
        }
        for (i, handle) in pending {
            assert_eq!(handle.wait().unwrap(), vec![i * world as i32; 1000]);
        }
    });
}

fn a_lost_handle_cancels_nothing<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        for i in 0..10i32 {
            let handle = comm.start_all_reduce(vec![i; 100_000], ReduceOp::Sum).unwrap();
            match (i as usize + comm.rank()) % 2 {
                0 => drop(handle),
                _ => assert_eq!(handle.wait().unwrap(), vec![i * world as i32; 100_000]),
            }
        }
        comm.start_barrier().unwrap().wait().unwrap();
        comm.barrier().unwrap();
    });
}

/// Rank 0 is gone at once; what it started is still done.
fn a_lost_communicator_cancels_nothing<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let start = |i: i32| comm.start_all_reduce(vec![i; 100_000], ReduceOp::Sum).unwrap();
        let pending: Vec<_> = (0..5).map(start).collect();
        let rank = comm.rank();
        drop(comm);
        if rank > 0 {
            for (i, handle) in pending.into_iter().enumerate() {
                assert_eq!(handle.wait().unwrap(), vec![i as i32 * world as i32; 100_000]);
            }
        }
    });
}

fn a_handle_says_when_it_is_finished<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        // The others start only when rank 0 has seen that it is not over.
        if comm.rank() > 0 {
            comm.recv(&mut [0u8], 0).unwrap();
        }
        let mut handle = comm.start_all_reduce(vec![1i32; 10], ReduceOp::Sum).unwrap();
        if comm.rank() == 0 {
            assert!(world == 1 || !handle.is_finished(), "finished alone");
            (1..world).for_each(|peer| comm.send(&[0u8], peer).unwrap());
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while !handle.is_finished() {
            assert!(Instant::now() < deadline, "never finished");
            std::thread::yield_now();
        }
        assert!(handle.is_finished(), "finished is finished");
        assert_eq!(handle.wait().unwrap(), [world as i32; 10]);
    });
}

fn several_calls_may_go_together<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let together = comm
            .spawn(|comm| {
                let mut sum = [comm.rank() as i64];
                comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
                let mut product = [sum[0] + 1];
                comm.all_reduce_in_place(&mut product, ReduceOp::Prod)?;
                Ok::<_, CollectiveError>((sum[0], product[0]))
            })
            .unwrap();
        comm.barrier().unwrap();
        let sum = (0..world as i64).sum::<i64>();
        assert_eq!(together.wait().unwrap(), (sum, (sum + 1).pow(world as u32)));
    });
}

/// A message that needs its receiver's help, while that one waits for the background, and the other way round.
fn messages_and_background_do_not_block_each_other<B: CollectiveBackend>(world: usize) {
    let message = any_bits::<u8>(1, 1 << 20);
    B::run(world, |comm| {
        let start = |comm: &Communicator| comm.start_all_reduce(vec![1i32; 1000], ReduceOp::Sum).unwrap();
        let sum = match comm.rank() {
            0 => {
                comm.send(&message, 1).unwrap();
                start(&comm).wait().unwrap()
            }
            1 => {
                let receive = comm.start_recv(vec![0u8; message.len()], 0).unwrap();
                let sum = start(&comm).wait().unwrap();
                assert_same_bits(&receive.wait().unwrap(), &message, "the message");
                sum
            }
            _ => start(&comm).wait().unwrap(),
        };
        assert_eq!(sum, [world as i32; 1000]);
    });
}

fn refused_arguments_leave_the_background_usable<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let odd = vec![0f32; world + 1];
        let refusals = [
            (comm.start_reduce_scatter(odd.clone(), ReduceOp::Sum), world + 1),
            (comm.start_all_to_all(odd.clone()), world + 1),
            (comm.start_broadcast(odd.clone(), world + 7), world + 7),
            (comm.start_reduce(odd, ReduceOp::Sum, world + 7), world + 7),
        ];
        for (handle, number) in refusals {
            let error = handle.unwrap().wait().unwrap_err();
            assert!(
                matches!(
                    error,
                    CollectiveError::Count { .. } | CollectiveError::Fabric(FabricError::InvalidArgument(_))
                ),
                "{error:?}"
            );
            assert!(error.to_string().contains(&number.to_string()), "{error} does not say {number}");
        }
        assert_eq!(comm.start_all_gather(vec![1u8]).unwrap().wait().unwrap(), vec![1; world]);
    });
}

fn ranks_that_disagree_in_the_background_are_told<B: CollectiveBackend>(world: usize) {
    let start = Instant::now();
    B::run(world, |comm| {
        let count = if comm.rank() == 0 { 7 } else { 8 };
        let error = comm.start_broadcast(vec![0f32; count], 0).unwrap().wait().unwrap_err();
        let CollectiveError::Fabric(error @ (FabricError::Mismatch { .. } | FabricError::Aborted { .. })) =
            error
        else {
            panic!("{error:?}")
        };
        if matches!(error, FabricError::Mismatch { .. }) {
            let text = error.to_string();
            assert!(text.contains("broadcast(7 × f32") && text.contains("broadcast(8 × f32"), "{text}");
        }
        // It may be refused at once, or by the background.
        let again = match comm.start_barrier() {
            Ok(handle) => handle.wait().unwrap_err(),
            Err(CollectiveError::Fabric(error)) => error,
            Err(other) => panic!("{other:?}"),
        };
        assert!(matches!(again, FabricError::Failed(_)), "{again:?}");
    });
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
}

/// Equal calls, started in another order relative to the blocking ones on each rank.
fn background_and_foreground_have_orders_of_their_own<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        for i in 0..20i32 {
            let blocking = || {
                let mut sum = [i];
                comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [i * world as i32]);
            };
            let start = || comm.start_all_gather(vec![i; 10]).unwrap();
            let handle = if comm.rank() % 2 == 0 {
                blocking();
                start()
            } else {
                let handle = start();
                blocking();
                handle
            };
            assert_eq!(handle.wait().unwrap(), vec![i; 10 * world]);
        }
    });
}
