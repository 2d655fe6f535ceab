//! Every form against the definition.

use antiphon_fabric::Communicator;
use antiphon_moe::{
    Combine, Dispatch, Moe, MoeConfig, Routing, RowFormat, Tokens, by_token::reference, layout,
};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::case::{Case, Choice, Run};

fn moe(comm: &Communicator) -> Moe {
    Moe::new(comm, MoeConfig { region_bytes: 64 << 10, ..MoeConfig::default() }).unwrap()
}

/// Numbers of tokens that differ by rank: of rank `r` the `r + shift`-th.
fn ragged(world: usize, shift: usize) -> Vec<usize> {
    (0..world).map(|rank| [0, 33, 1, 128][(rank + shift) % 4]).collect()
}

pub fn every_form(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = moe(comm);
    for tokens in [vec![0; world], vec![1; world], vec![17; world], ragged(world, 0), ragged(world, 3)] {
        for choice in
            [Choice::Spread, Choice::AllTo(world - 1), Choice::Nobody, Choice::Wild, Choice::InHalves]
        {
            for (local, top_k) in [(4, 2), (2, 5), (1, 1), (8, 8)] {
                let case = Case::new(world, local * world, top_k);
                Case { tokens: tokens.clone(), choice, biases: top_k % 3, ..case }.check(comm, &mut moe);
            }
        }
    }
}

pub fn every_dtype(comm: &Communicator) {
    let mut moe = moe(comm);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        for (biases, ids) in [(0, DType::I64), (1, DType::I32), (2, DType::I64)] {
            let case = Case::new(comm.world_size(), 4 * comm.world_size(), 3);
            Case { dtype, biases, ids, hidden: 24, ..case }.check(comm, &mut moe);
        }
    }
}

pub fn scales_of_either_kind(comm: &Communicator) {
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    for (scales, hidden) in [(DType::F32, 128), (DType::F32, 384), (DType::I32, 512), (DType::I32, 640)] {
        let case = Case::new(comm.world_size(), 8, 3);
        let case = Case { dtype: DType::U8, scales: Some(scales), hidden, ..case };
        let run = Run { case: &case, comm, ranks: case.ranks() };
        let received = reference::dispatch(&run.ranks, case.num_experts, case.top_k);
        let routes = run.notify(&mut moe);
        run.dispatch(&mut moe, &routes, &received, true);
        run.dispatch(&mut moe, &routes, &received, false);
        // What is made of codes may be of another dtype and length.
        let made = Case { dtype: DType::BF16, scales: None, hidden: 64, ..case.clone() };
        Run { case: &made, comm, ranks: run.ranks }.combine(&mut moe, &routes, &received);
    }
}

pub fn special_values(comm: &Communicator) {
    let mut moe = moe(comm);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        for biases in 0..3 {
            let case = Case::new(comm.world_size(), 2 * comm.world_size(), 4);
            Case { dtype, biases, special: true, ..case }.check(comm, &mut moe);
        }
    }
}

/// Regions from the size of two records on: every row is in a piece of its own, and the rows of a token come in different pieces.
pub fn regions_of_any_size(comm: &Communicator) {
    let world = comm.world_size();
    let case = Case { tokens: ragged(world, 1), biases: 1, ..Case::new(world, 2 * world, 3) };
    let record = 16 + 16 * 4 + 3 * 8; // of a dispatch; those of a combine are shorter
    for records in [2, 4, 6, 10, 34] {
        case.check_in(comm, records * (record as usize).next_multiple_of(16));
    }
    // What was in a half is not used again, though calls begin in either one.
    let mut moe = Moe::new(comm, MoeConfig { region_bytes: 1000, ..MoeConfig::default() }).unwrap();
    for seed in 0..20 {
        Case { seed, tokens: vec![seed as usize % 7; world], ..case.clone() }.check(comm, &mut moe);
    }
}

pub fn capacities(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = moe(comm);
    let case = Case { tokens: ragged(world, 1), biases: 1, ..Case::new(world, 2 * world, 3) };
    let all = reference::dispatch(&case.ranks(), case.num_experts, case.top_k);
    let exact: Vec<usize> = all.iter().map(Vec::len).collect();
    let capacities = [
        vec![0; world],
        vec![1; world],
        exact.clone(),
        exact.iter().map(|rows| rows.saturating_sub(1)).collect(),
        exact.iter().map(|rows| rows + 1).collect(),
        (0..world).map(|rank| [5, 40, 200][rank % 3]).collect(),
        vec![case.tokens.iter().sum(); world],
    ];
    for capacity in capacities {
        Case { capacity: Some(capacity), ..case.clone() }.check(comm, &mut moe);
    }
}

pub fn as_many_experts_as_ranks(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = moe(comm);
    for top_k in [1, world, 32] {
        Case { choice: Choice::Wild, ..Case::new(world, world, top_k) }.check(comm, &mut moe);
    }
}

pub fn many_tokens(comm: &Communicator) {
    let case = Case { tokens: vec![4096, 1000], ..Case::new(2, 8, 2) };
    let run = Run { case: &case, comm, ranks: case.ranks() };
    let received = reference::dispatch(&run.ranks, case.num_experts, case.top_k);
    let mut moe = moe(comm);
    let routes = run.notify(&mut moe);
    run.dispatch(&mut moe, &routes, &received, true);
    run.combine(&mut moe, &routes, &received);
}

pub fn routes_of_two_calls_at_once(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = moe(comm);
    let cases = [1, 2].map(|seed| Case {
        seed,
        tokens: ragged(world, seed as usize),
        ..Case::new(world, 4 * world, 2)
    });
    let runs = cases.each_ref().map(|case| Run { case, comm, ranks: case.ranks() });
    let received =
        runs.each_ref().map(|run| reference::dispatch(&run.ranks, run.case.num_experts, run.case.top_k));
    let routes = runs.each_ref().map(|run| run.notify(&mut moe));
    for index in [0, 1, 1, 0] {
        runs[index].dispatch(&mut moe, &routes[index], &received[index], true);
    }
    for index in [1, 0, 0, 1] {
        runs[index].combine(&mut moe, &routes[index], &received[index]);
    }
}

pub fn beside_other_operations(comm: &Communicator) {
    let mut moe = moe(comm);
    for seed in 0..5 {
        let case = Case { seed, ..Case::new(comm.world_size(), 2 * comm.world_size(), 2) };
        case.check(comm, &mut moe);
        comm.barrier().unwrap();
        let all = comm.exchange_objects(&format!("{seed}")).unwrap();
        assert_eq!(all, vec![seed.to_string(); comm.world_size()]);
    }
}

/// ⟨dispatch x, y⟩ over all ranks is ⟨x, combine y⟩: in small integers, exactly.
pub fn dispatch_and_combine_are_adjoint(comm: &Communicator) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let (tokens, hidden, experts) = (40 + rank, 8, 4 * world);
    let mut moe = moe(comm);
    let number = |salt: usize, index: usize| ((index * 2_654_435_761 + salt * 40_503) >> 7) % 17;
    let ids: Vec<i64> = (0..tokens * 3).map(|i| number(rank, i) as i64 % experts as i64).collect();
    let x: Vec<f64> = (0..tokens * hidden).map(|i| number(rank + 9, i) as f64 - 8.0).collect();
    let layout = layout(&TensorView::new(&ids, &[tokens, 3]).unwrap(), experts, world).unwrap();
    let format = RowFormat { hidden, dtype: DType::F64, scales: None };
    let routes = moe.notify(comm, &Routing::of(&layout, format)).unwrap();
    let rows = routes.rows();
    let y: Vec<f64> = (0..rows * hidden).map(|i| number(rank + 31, i) as f64 - 8.0).collect();
    let (mut dispatched, mut combined) = (vec![0.0; rows * hidden], vec![0.0; tokens * hidden]);
    let [sent, here] = [[tokens, hidden], [rows, hidden]];
    let call = Dispatch {
        tokens: Tokens::of(TensorView::new(&x, &sent).unwrap()),
        received: Tokens::of(TensorViewMut::new(&mut dispatched, &here).unwrap()),
    };
    moe.dispatch(comm, &routes, call).unwrap();
    let output = TensorViewMut::new(&mut combined, &sent).unwrap();
    moe.combine(comm, &routes, Combine::of(TensorView::new(&y, &here).unwrap(), output)).unwrap();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let all = comm.exchange_objects(&format!("{} {}", dot(&dispatched, &y), dot(&x, &combined))).unwrap();
    let total = |part: usize| -> f64 {
        all.iter().map(|pair| pair.split(' ').nth(part).unwrap().parse::<f64>().unwrap()).sum()
    };
    assert_eq!(total(0), total(1));
    assert_ne!(total(0), 0.0);
}
