//! Every form around captures and launches of graphs.

use std::cell::RefCell;

use antiphon_device::cuda::Stream;
use antiphon_moe::{MoeConfig, SlotFormat};
use antiphon_tensor::DType;

use crate::{
    Calls, Outcome, Rank, by_expert,
    cases::{
        by_expert::ByExpertCase,
        by_token::Case,
        slots::{SMALL, SlotCase},
    },
    on_gpus, on_host, slots,
};
use antiphon_testing::orders::Calls as Orders;

/// Makes calls with the stream of a rank in the place of `stream`.
fn on(rank: &RefCell<&mut Rank>, stream: &Stream, call: impl FnOnce(&Rank) -> Outcome) -> Outcome {
    let mut rank = rank.borrow_mut();
    let own = std::mem::replace(&mut rank.stream, stream.clone());
    let outcome = call(&rank);
    rank.stream = own;
    outcome
}

fn in_every_order<C>(
    rank: &mut Rank,
    calls: [C; 3],
    make: impl Fn(&mut C, &Rank) -> Outcome,
    compare: impl Fn(&mut C, &Rank) -> Outcome,
) -> Outcome {
    let calls = calls.map(RefCell::new);
    let (context, (me, world)) = (rank.context.clone(), (rank.comm.rank(), rank.comm.world_size()));
    for calls in &calls {
        make(&mut calls.borrow_mut(), rank)?; // loads the kernels
        compare(&mut calls.borrow_mut(), rank)?;
    }
    rank.comm.barrier()?;
    {
        let rank = RefCell::new(&mut *rank);
        let call = |which: usize, stream: &Stream| {
            on(&rank, stream, |rank| make(&mut calls[which].borrow_mut(), rank))
        };
        let check = |which: usize| compare(&mut calls[which].borrow_mut(), &rank.borrow());
        let be_late = |number: usize| {
            if number % world == me {
                std::thread::sleep(std::time::Duration::from_millis(3));
            }
        };
        Orders { context: &context, call: &call, check: &check, be_late: &be_late }.in_every_order()?;
    }
    rank.comm.barrier()?;
    Ok(())
}

fn three<T>(make: impl Fn() -> Outcome<T>) -> Outcome<[T; 3]> {
    Ok([make()?, make()?, make()?])
}

fn rows(world: usize) {
    on_gpus(world, MoeConfig::for_gpus(), |rank| {
        let case = Case { dtype: DType::BF16, tokens: vec![40; world], ..Case::new(world, 2 * world, 2) };
        let (layout, received, sums) = on_host(rank, &case)?;
        let calls = three(|| Calls::new(rank, &case, &layout))?;
        in_every_order(
            rank,
            calls,
            |calls, rank| calls.run(rank),
            |calls, rank| {
                calls.compare(rank, &case, &received, &sums)?;
                calls.received.iter().chain(&calls.sums).try_for_each(|tensor| rank.spoil(tensor))
            },
        )
    });
}

fn by_expert_rows(world: usize) {
    on_gpus(world, MoeConfig::for_gpus(), |rank| {
        let case = ByExpertCase { tokens: vec![40; world], ..ByExpertCase::new(world, 2) };
        let expected = by_expert::on_host(rank, &case)?;
        let calls = three(|| by_expert::Calls::new(rank, &case))?;
        in_every_order(
            rank,
            calls,
            |calls, rank| calls.run(rank),
            |calls, rank| {
                calls.compare(rank, &expected)?;
                calls.sums.iter().try_for_each(|tensor| rank.spoil(tensor))
            },
        )
    });
}

/// In one, and in halves.
fn few_tokens(world: usize, halves: bool) {
    on_gpus(world, SMALL, |rank| {
        let case = Case { tokens: vec![17; world], ..Case::new(world, 2 * world, 2) };
        let case = SlotCase::new(case, SlotFormat::Bf16);
        let calls = three(|| {
            let mut calls = slots::Calls::new(rank, &case)?;
            calls.halves = halves;
            calls.overwrites = false;
            Ok((calls, Vec::new()))
        })?;
        in_every_order(
            rank,
            calls,
            |(calls, kept), rank| {
                let moe = rank.moe.slots()?;
                let routes = calls.dispatch(rank, moe)?;
                calls.combine(rank, moe, &routes)?;
                kept.push(routes); // a graph uses it
                Ok(())
            },
            |(calls, _), rank| {
                calls.compare_sums(rank, rank.moe.slots()?)?;
                rank.spoil(&calls.sums)
            },
        )
    });
}

#[test]
fn rows_keep_their_order_around_captures_on_2_gpus() {
    rows(2);
}

#[test]
fn rows_keep_their_order_around_captures_on_3_gpus() {
    rows(3);
}

#[test]
fn by_expert_rows_keep_their_order_around_captures_on_2_gpus() {
    by_expert_rows(2);
}

#[test]
fn slot_calls_keep_their_order_around_captures_on_2_gpus() {
    few_tokens(2, false);
}

#[test]
fn slot_halves_keep_their_order_around_captures_on_3_gpus() {
    few_tokens(3, true);
}
