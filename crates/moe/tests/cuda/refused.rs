//! Refusals between the halves of a call to slots. They change nothing: the right call follows, and gives the right bits.

use std::cell::RefCell;

use antiphon_device::cuda::Graph;
use antiphon_moe::{
    MoeConfig, MoeError,
    cuda::CudaMoe,
    slots::{
        SlotLimits,
        cuda::{CudaReceive, CudaSlots},
    },
};

use antiphon_moe::SlotFormat;

use crate::{
    Outcome, Rank,
    cases::{
        by_token::Case,
        slots::{SMALL, SlotCase},
    },
    on_gpus,
    slots::Calls,
};

/// Cases that differ, one for each call.
fn case(world: usize, seed: u64) -> SlotCase {
    let format = if seed.is_multiple_of(2) { SlotFormat::Bf16 } else { SlotFormat::Fp8 };
    let tokens = (0..world).map(|rank| [9, 1, 32, 0][(rank + seed as usize) % 4]).collect();
    SlotCase::new(Case { tokens, hidden: 256, seed, ..Case::new(world, 4 * world, 3) }, format)
}

/// Every way in which a second half is refused.
fn misuse(rank: &Rank, moe: &CudaSlots, other: &CudaSlots, half: &CudaReceive) -> Outcome {
    let aside = rank.context.stream()?;
    // SAFETY: nothing is launched, here and below.
    let receive =
        |on: &CudaSlots, stream: &antiphon_device::cuda::Stream| unsafe { on.receive(half, stream.borrow()) };
    let error = receive(other, &rank.stream).expect_err("it is of another instance");
    assert!(error.to_string().contains("of another instance"), "{error}");
    // In a capture that has not the first half.
    let graph = Graph::capture(&aside, |_| receive(moe, &aside));
    assert!(matches!(graph.map(drop), Err(MoeError::Captured { .. })));
    // Behind a call whose stream is being captured.
    let mut refused = None;
    Graph::capture(&rank.stream, |_| -> Outcome {
        refused = receive(moe, &aside).err();
        Ok(())
    })?;
    let error = refused.expect("it cannot be put behind the first half").to_string();
    assert!(error.contains("the call before is being captured"), "{error}");
    Ok(())
}

/// The ranks in turn make calls in halves, and misuse the second one; the others call as usual.
fn refusals_between_halves(world: usize) {
    on_gpus(world, SMALL, |rank| {
        let most = SlotLimits { max_tokens: 8, hidden: 128, num_experts: world, top_k: 2 };
        let small = MoeConfig { region_bytes: 0, slots: Some(most), ..MoeConfig::default() };
        let other = CudaMoe::new(&rank.comm, &rank.context, small)?;
        let (moe, other) = (rank.moe.slots()?, other.slots()?);
        for seed in 0..2 * world as u64 {
            let case = case(world, seed);
            let between = |half: &mut Option<CudaReceive>| {
                let half = half.as_ref().expect("it has not been received");
                // A call that is refused in its turn draws no number: later combines are along the same routes on all ranks.
                let error =
                    Calls::new(rank, &case)?.dispatch(rank, moe).map(drop).expect_err("a half is missing");
                assert!(error.to_string().contains("has sent and not received yet"), "{error}");
                misuse(rank, moe, other, half)
            };
            let mut calls = Calls::new(rank, &case)?;
            calls.halves = seed as usize % world == rank.comm.rank();
            calls.between = Some(&between);
            calls.make(rank, moe)?;
        }
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn a_refused_second_half_may_be_made_on_2_gpus() {
    refusals_between_halves(2);
}

#[test]
fn a_refused_second_half_may_be_made_on_3_gpus() {
    refusals_between_halves(3);
}

#[test]
fn a_half_is_received_once_on_2_gpus() {
    on_gpus(2, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let case = case(2, 1);
        let between = |half: &mut Option<CudaReceive>| {
            let half = half.take().expect("it has not been received");
            // SAFETY: the tensors live until the stream has been waited for.
            unsafe { moe.receive(&half, rank.stream.borrow()) }?;
            // SAFETY: nothing is launched.
            let again = unsafe { moe.receive(&half, rank.stream.borrow()) };
            let error = again.expect_err("it has been received").to_string();
            assert!(error.contains("has received already"), "{error}");
            Ok(())
        };
        let mut calls = Calls::new(rank, &case)?;
        calls.halves = true;
        calls.between = Some(&between);
        calls.make(rank, moe)
    });
}

/// A half that is dropped: the next call empties the slot, so that later ones find nothing old there.
fn dropped_halves(world: usize) {
    on_gpus(world, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        for seed in 0..6 {
            let is_mine = seed as usize % world == rank.comm.rank();
            let drop_it = |half: &mut Option<CudaReceive>| -> Outcome {
                *half = None;
                Ok(())
            };
            let case = case(world, seed);
            let mut calls = Calls::new(rank, &case)?;
            calls.halves = is_mine;
            calls.between = Some(&drop_it);
            let routes = calls.dispatch(rank, moe)?;
            if is_mine {
                let mut whole = Calls::new(rank, &case)?; // along the same routes
                whole.combine(rank, moe, &routes)?;
            } else {
                calls.combine(rank, moe, &routes)?;
                calls.compare(rank, moe, 1)?;
            }
            let mut calls = Calls::new(rank, &case)?;
            let routes = calls.dispatch(rank, moe)?;
            let drops_combine = (seed as usize + 1) % world == rank.comm.rank();
            calls.halves = drops_combine;
            calls.between = Some(&drop_it);
            calls.combine(rank, moe, &routes)?;
            if !drops_combine {
                calls.compare(rank, moe, 1)?;
            }
        }
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn a_dropped_half_leaves_nothing_behind_on_2_gpus() {
    dropped_halves(2);
}

#[test]
fn a_dropped_half_leaves_nothing_behind_on_4_gpus() {
    dropped_halves(4);
}

/// The half of a dispatch, which has been received, outlives that of its combine, which is dropped.
#[test]
fn halves_are_dropped_in_any_order_on_2_gpus() {
    on_gpus(2, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let received = RefCell::new(None);
        let receive = |half: &mut Option<CudaReceive>| -> Outcome {
            let half = half.take().expect("it has not been received");
            // SAFETY: the tensors live until the stream has been waited for.
            unsafe { moe.receive(&half, rank.stream.borrow()) }?;
            *received.borrow_mut() = Some(half);
            Ok(())
        };
        let drop_it = |half: &mut Option<CudaReceive>| -> Outcome {
            *half = None;
            *received.borrow_mut() = None;
            Ok(())
        };
        let case = case(2, 1);
        let mut calls = Calls::new(rank, &case)?;
        calls.halves = true;
        calls.between = Some(&receive);
        let routes = calls.dispatch(rank, moe)?;
        calls.between = Some(&drop_it);
        calls.combine(rank, moe, &routes)?;
        let mut calls = Calls::new(rank, &case)?;
        calls.make(rank, moe)
    });
}
