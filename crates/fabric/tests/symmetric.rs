//! Symmetric memory: the same offset everywhere, zeroed, reused, and refused alike on all ranks.

use antiphon_fabric::{Communicator, FabricError, SymmetricBuffer, rendezvous::Ticket};
use proptest::prelude::*;

/// A world with an arena of `arena_bytes` per rank.
fn run<T: Send>(world_size: usize, arena_bytes: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let (ticket, rank) = (&Ticket::random(), &rank);
    std::thread::scope(|scope| {
        let start = |place| {
            let builder = Communicator::builder().arena_bytes(arena_bytes);
            scope.spawn(move || rank(builder.with_ticket(place, world_size, ticket).unwrap()))
        };
        let threads: Vec<_> = (0..world_size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_reaches_every_copy_at_the_same_offset() {
    const WORLD: usize = 3;
    let offsets = run(WORLD, 1 << 20, |comm| {
        let _first = comm.symmetric(5000).unwrap();
        let buffer = comm.symmetric(WORLD).unwrap();
        for rank in 0..WORLD {
            // SAFETY: of each copy, each rank writes its own byte.
            unsafe { buffer.as_mut_ptr(rank).add(comm.rank()).write(10 * rank as u8 + comm.rank() as u8) };
        }
        comm.barrier().unwrap();
        // SAFETY: after the barrier all only read.
        let copy = unsafe { buffer.slice_mut::<u8>(comm.rank()) };
        let base = 10 * comm.rank() as u8;
        assert_eq!(copy, [base, base + 1, base + 2]);
        assert!(buffer.as_mut_ptr(comm.rank()).addr().is_multiple_of(4096));
        buffer.offset()
    });
    assert_eq!(offsets, [8192; WORLD]);
}

#[test]
fn a_buffer_is_zero_when_made_even_where_another_lay() {
    run(2, 1 << 20, |comm| {
        for round in 0..10 {
            let buffer = comm.symmetric(100_000).unwrap();
            assert_eq!(buffer.offset(), 0, "the place is free again");
            // SAFETY: each rank uses its own copy only.
            let copy = unsafe { buffer.slice_mut::<u8>(comm.rank()) };
            assert!(copy.iter().all(|&byte| byte == 0), "round {round}");
            copy.fill(0xFF);
            comm.free(buffer).unwrap();
        }
    });
}

#[test]
fn what_does_not_fit_is_refused_on_every_rank_and_does_no_harm() {
    run(3, 10 * 4096, |comm| {
        let first = comm.symmetric(6 * 4096).unwrap();
        for _ in 0..3 {
            match comm.symmetric(5 * 4096) {
                Err(FabricError::ArenaFull {
                    asked: 20480,
                    free: 16384,
                    largest: 16384,
                    capacity: 40960,
                }) => {}
                other => panic!("{other:?}"),
            }
        }
        let second = comm.symmetric(4 * 4096).unwrap();
        assert!(matches!(comm.symmetric(0), Err(FabricError::ArenaFull { free: 0, .. })));
        comm.free(first).unwrap();
        comm.free(second).unwrap();
        let whole = comm.symmetric(10 * 4096).unwrap();
        comm.free(whole).unwrap();
    });
}

#[test]
fn sizes_that_differ_are_a_mismatch() {
    let results = run(2, 1 << 20, |comm| comm.symmetric(1000 + comm.rank()).map(drop));
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("(1000 bytes)") && error.contains("(1001 bytes)"), "{error}");
    }
}

#[test]
fn freeing_different_buffers_is_a_mismatch() {
    let results = run(2, 1 << 20, |comm| {
        let mut buffers = [comm.symmetric(1)?, comm.symmetric(1)?].into_iter();
        comm.free(buffers.nth(comm.rank()).unwrap())
    });
    assert!(results.iter().all(|result| matches!(result, Err(FabricError::Mismatch { .. }))), "{results:?}");
}

#[test]
fn a_buffer_is_freed_where_it_was_made() {
    run(2, 1 << 20, |comm| {
        let group = comm.split(Some(0), 0).unwrap().unwrap();
        let buffer = group.symmetric(1).unwrap();
        assert!(matches!(comm.free(buffer), Err(FabricError::InvalidArgument(_))));
        comm.barrier().unwrap();
    });
}

#[test]
fn buffers_come_and_go_in_the_foreground_only() {
    run(2, 1 << 20, |comm| {
        let refused = comm.spawn(|comm| comm.symmetric(1).map(drop)).unwrap().wait();
        assert!(matches!(refused, Err(FabricError::InvalidArgument(_))), "{refused:?}");
        comm.barrier().unwrap();
    });
}

#[test]
fn a_buffer_outlives_its_communicator() {
    let buffers = run(2, 1 << 20, |comm| {
        let buffer = comm.symmetric(4096).unwrap();
        // SAFETY: each rank uses its own copy only.
        unsafe { buffer.slice_mut::<u8>(comm.rank()) }.fill(comm.rank() as u8 + 1);
        comm.barrier().unwrap();
        buffer
    });
    for buffer in &buffers {
        for rank in [0, 1] {
            // SAFETY: the ranks are gone, and no thread writes.
            assert_eq!(unsafe { buffer.as_mut_ptr(rank).add(4095).read() }, rank as u8 + 1);
        }
    }
}

/// What a rank may do with its memory.
#[derive(Debug, Clone)]
enum Step {
    Create(usize),
    Free(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![(0..40_000usize).prop_map(Step::Create), any::<prop::sample::Index>().prop_map(Step::Free)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    /// Whatever comes and goes: buffers are zero at first, keep what was written, and lie at the same place everywhere.
    #[test]
    fn buffers_keep_their_contents(steps in proptest::collection::vec(step(), 1..40)) {
        let places = run(2, 30 * 4096, |comm| {
            let (mut live, mut places) = (Vec::<(SymmetricBuffer, u8)>::new(), Vec::new());
            for (number, step) in steps.iter().enumerate() {
                match step {
                    Step::Create(len) => {
                        let Ok(buffer) = comm.symmetric(*len) else { continue };
                        // SAFETY: each rank uses its own copy only.
                        let copy = unsafe { buffer.slice_mut::<u8>(comm.rank()) };
                        assert!(copy.iter().all(|&byte| byte == 0));
                        copy.fill(number as u8 + 1);
                        places.push((buffer.offset(), buffer.len()));
                        live.push((buffer, number as u8 + 1));
                    }
                    Step::Free(_) if live.is_empty() => {}
                    Step::Free(index) => {
                        let (buffer, value) = live.swap_remove(index.index(live.len()));
                        // SAFETY: as above.
                        assert!(unsafe { buffer.slice_mut::<u8>(comm.rank()) }.iter().all(|&byte| byte == value));
                        comm.free(buffer).unwrap();
                    }
                }
            }
            places
        });
        prop_assert_eq!(&places[0], &places[1]);
    }
}
