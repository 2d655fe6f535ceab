//! What warm calls on host memory take: how often they allocate memory and lock a mutex. README and the crates' documentation
//! give these numbers.

mod calls;

use std::time::Instant;

use antiphon_collectives::{
    Collectives, NonBlocking, ReduceOp,
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp},
};
use antiphon_device::{host::wait::NAP, sync::locks_taken};
use antiphon_fabric::{LocalWorld, Queue};
use antiphon_operation::Operation;
use antiphon_tensor::{TensorView, TensorViewMut};
use antiphon_testing::{CountingAllocator, Taken};
use calls::call_of;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const CALLS: u64 = 1000;

/// Every operation of the table, in one piece and in several.
fn every_operation(world: usize) {
    for operation in Operation::ALL.iter().copied().filter(|operation| operation.is_call()) {
        for count in [1000, 40_001] {
            let taken = LocalWorld::run(world, |comm| {
                let me = comm.rank();
                let call = call_of(operation, count, me, world);
                let input = vec![1.0f32; call.input_layout(count, me, world).elements()];
                let mut output = vec![0.0f32; call.output_layout(count, me, world).elements()];
                Taken::by_each_of(CALLS, || {
                    let (input, output) = (TensorView::from(&input), TensorViewMut::from(&mut output));
                    comm.call(&call, Some(input), Some(output)).unwrap();
                })
            });
            assert_eq!(taken, vec![Taken::new(0, 0); world], "{operation:?} of {count} elements");
        }
    }
}

#[test]
fn every_operation_takes_nothing_on_2_ranks() {
    every_operation(2);
}

#[test]
fn every_operation_takes_nothing_on_3_ranks() {
    every_operation(3);
}

#[test]
fn a_barrier_takes_nothing() {
    let taken = LocalWorld::run(3, |comm| Taken::by_each_of(CALLS, || comm.barrier().unwrap()));
    assert_eq!(taken, [Taken::new(0, 0); 3]);
}

/// Calls of even and uneven blocks, which are short, as four ranks share few cores.
#[test]
fn mixed_collectives_take_nothing() {
    for mode in [MixedMode::Waits, MixedMode::Bytes1] {
        for counts in [[1000, 1000], [7, 1000]] {
            let taken = LocalWorld::run(4, |comm| {
                let layout = MixedLayout::builder(4, comm.rank()).local_tp(2).build().unwrap();
                let mixed = MixedHandler::new(&comm, layout).unwrap();
                let (mut block, mut row) =
                    (vec![1f32; counts[layout.dp_rank()]], vec![1f32; counts.iter().sum()]);
                let call = |op| MixedCall::from(op).mode(mode).counts(&counts[..]);
                let gathers = Taken::by_each_of(CALLS, || {
                    mixed.run(&comm, call(MixedOp::AllReduceAllGather), &block, &mut row).unwrap();
                });
                let scatters = Taken::by_each_of(CALLS, || {
                    mixed.run(&comm, call(MixedOp::ReduceScatterAllReduce), &row, &mut block).unwrap();
                });
                [gathers, scatters]
            });
            assert_eq!(taken, [[Taken::new(0, 0); 2]; 4], "{mode} of {counts:?}");
        }
    }
}

/// As a call from Python, which also locks once to find the queue.
#[test]
fn a_call_through_a_queue_takes_four_locks() {
    let taken = LocalWorld::run(2, |comm| {
        let queue = Queue::new(comm);
        let mut buffer = [1.0f32; 100];
        Taken::by_each_of(CALLS, || {
            queue.run(|comm| comm.all_reduce_in_place(&mut buffer, ReduceOp::Max)).unwrap();
        })
    });
    assert_eq!(taken, [Taken::new(0, 4); 2]);
}

/// A message allocates nothing, unless it comes before its receive, which the barrier prevents here. It locks once for each look at
/// it, and how many there are is up to the peer.
#[test]
fn messages_allocate_nothing_and_lock() {
    let locks = LocalWorld::run(2, |comm| {
        let (peer, mine, mut theirs) = (1 - comm.rank(), [1.0f32; 1000], [0.0f32; 1000]);
        (0..3).for_each(|_| comm.send_recv(&mine, peer, &mut theirs, peer).unwrap());
        let before = locks_taken();
        for _ in 0..CALLS {
            comm.barrier().unwrap();
            let allocations = antiphon_testing::allocations();
            let start = Instant::now();
            comm.send_recv(&mine, peer, &mut theirs, peer).unwrap();
            if start.elapsed() < NAP {
                assert_eq!(antiphon_testing::allocations(), allocations);
            }
        }
        locks_taken().zip(before).map(|(after, before)| after - before)
    });
    assert!(locks.iter().flatten().all(|&locks| locks >= 2 * CALLS), "{locks:?} locks of {CALLS} exchanges");
}

/// A started call goes to a thread, with a handle.
#[test]
fn started_calls_allocate() {
    LocalWorld::run(1, |comm| {
        let before = antiphon_testing::allocations();
        (0..CALLS).for_each(|_| comm.start_barrier().unwrap().wait().unwrap());
        let allocations = antiphon_testing::allocations() - before;
        assert!(
            allocations >= CALLS,
            "{allocations} allocations of {CALLS} calls: the documentation may promise more"
        );
    });
}
