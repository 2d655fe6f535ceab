//! Every form against the definition.

use antiphon_moe::{Combine, Dispatch, MoeConfig, Tokens, by_token::reference};
use antiphon_tensor::DType;
use antiphon_testing::{Tensor, is_emulated};

use crate::{
    cases::{
        by_token::{Case, Choice},
        ragged,
        tensor::{element, value},
    },
    harness::MoeBackend,
    run::Run,
};

/// A region that few rows fill.
pub const SMALL: MoeConfig = MoeConfig { region_bytes: 64 << 10, num_sms: MoeConfig::NUM_SMS, slots: None };

/// All combinations of three indices. On the emulator only so many that any two indices come together, as calls take far longer
/// there; the last index has the fewest values.
pub fn combinations([a, b, c]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    let all = (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k])));
    all.filter(move |[i, j, k]| !is_emulated() || (i + j + k).is_multiple_of(c))
}

pub fn every_form<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    let tokens = [vec![0; world], vec![1; world], vec![17; world], ragged(world, 0), ragged(world, 3)];
    let choices = [Choice::Spread, Choice::AllTo(world - 1), Choice::Nobody, Choice::Wild, Choice::InHalves];
    let forms = [(4, 2), (2, 5), (1, 1), (8, 8)];
    for [i, j, k] in combinations([tokens.len(), choices.len(), forms.len()]) {
        let (local, top_k) = forms[k];
        let case = Case::new(world, local * world, top_k);
        Case { tokens: tokens[i].clone(), choice: choices[j], biases: top_k % 3, ..case }.check(rank, moe);
    }
}

pub fn every_dtype<B: MoeBackend>(rank: &B) {
    let moe = &mut rank.opened(SMALL);
    for &dtype in B::SUMMED {
        for (biases, ids) in [(0, DType::I64), (1, DType::I32), (2, DType::I64)] {
            let case = Case::new(rank.world_size(), 4 * rank.world_size(), 3);
            Case { dtype, biases, ids, hidden: 24, ..case }.check(rank, moe);
        }
    }
}

pub fn scales_of_either_kind<B: MoeBackend>(rank: &B) {
    let moe = &mut rank.opened(MoeConfig::default());
    for (scales, hidden) in [(DType::F32, 128), (DType::F32, 384), (DType::I32, 512), (DType::I32, 640)] {
        let case = Case::new(rank.world_size(), 8, 3);
        let case = Case { dtype: DType::U8, scales: Some(scales), hidden, ..case };
        let run = Run { case: &case, rank, ranks: case.ranks() };
        let received = reference::dispatch(&run.ranks, case.num_experts, case.top_k);
        let routes = run.notify(moe);
        run.dispatch(moe, &routes, &received, true);
        run.dispatch(moe, &routes, &received, false);
        // What is made of codes may be of another dtype and length.
        let made = Case { dtype: DType::BF16, scales: None, hidden: 64, ..case.clone() };
        Run { case: &made, rank, ranks: run.ranks }.combine(moe, &routes, &received);
    }
}

pub fn special_values<B: MoeBackend>(rank: &B) {
    let moe = &mut rank.opened(SMALL);
    for &dtype in B::SUMMED {
        for biases in 0..3 {
            let case = Case::new(rank.world_size(), 2 * rank.world_size(), 4);
            Case { dtype, biases, special: true, ..case }.check(rank, moe);
        }
    }
}

/// Regions from the size of two records on: every row is in a piece of its own, and the rows of a token come in different pieces.
pub fn regions_of_any_size<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = Case { tokens: ragged(world, 1), biases: 1, ..Case::new(world, 2 * world, 3) };
    let record = 16 + 16 * 4 + 3 * 8; // of a dispatch; those of a combine are shorter
    for records in [2, 4, 6, 10, 34] {
        case.check_in(rank, rank.region_of(records, record));
    }
    // What was in a half is not used again, though calls begin in either one.
    let region_bytes = rank.region_of(9, record);
    let moe = &mut rank.opened(MoeConfig { region_bytes, ..MoeConfig::default() });
    for seed in 0..20 {
        Case { seed, tokens: vec![seed as usize % 7; world], ..case.clone() }.check(rank, moe);
    }
}

pub fn capacities<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
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
        Case { capacity: Some(capacity), ..case.clone() }.check(rank, moe);
    }
}

pub fn as_many_experts_as_ranks<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    for top_k in [1, world, 32] {
        Case { choice: Choice::Wild, ..Case::new(world, world, top_k) }.check(rank, moe);
    }
}

pub fn many_tokens<B: MoeBackend>(rank: &B) {
    let moe = &mut rank.opened(SMALL);
    let few = Case { tokens: vec![4096, 1000], ..Case::new(2, 8, 2) };
    let many = Case { dtype: DType::BF16, hidden: 64, num_experts: 256, top_k: 8, ..few.clone() };
    for case in [few, Case { capacity: Some(vec![4000, 3000]), biases: 2, ..many.clone() }, many] {
        let run = Run { case: &case, rank, ranks: case.ranks() };
        let received = reference::dispatch(&run.ranks, case.num_experts, case.top_k);
        let routes = run.notify(moe);
        run.dispatch(moe, &routes, &received, true);
        run.combine(moe, &routes, &received);
    }
}

pub fn routes_of_two_calls_at_once<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    let cases = [1, 2].map(|seed| Case {
        seed,
        tokens: ragged(world, seed as usize),
        ..Case::new(world, 4 * world, 2)
    });
    let runs = cases.each_ref().map(|case| Run { case, rank, ranks: case.ranks() });
    let received =
        runs.each_ref().map(|run| reference::dispatch(&run.ranks, run.case.num_experts, run.case.top_k));
    let routes = runs.each_ref().map(|run| run.notify(moe));
    for index in [0, 1, 1, 0] {
        runs[index].dispatch(moe, &routes[index], &received[index], true);
    }
    for index in [1, 0, 0, 1] {
        runs[index].combine(moe, &routes[index], &received[index]);
    }
}

pub fn beside_other_operations<B: MoeBackend>(rank: &B) {
    let moe = &mut rank.opened(SMALL);
    for seed in 0..5 {
        let case = Case { seed, ..Case::new(rank.world_size(), 2 * rank.world_size(), 2) };
        case.check(rank, moe);
        rank.barrier().unwrap();
        let all = rank.exchange_objects(&format!("{seed}")).unwrap();
        assert_eq!(all, vec![seed.to_string(); rank.world_size()]);
    }
}

/// ⟨dispatch x, y⟩ over all ranks is ⟨x, combine y⟩: in small integers, exactly.
pub fn dispatch_and_combine_are_adjoint<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = Case {
        tokens: (0..world).map(|rank| 40 + rank).collect(),
        hidden: 8,
        ..Case::new(world, 4 * world, 3)
    };
    let moe = &mut rank.opened(SMALL);
    let routes = Run { case: &case, rank, ranks: case.ranks() }.notify(moe);
    let number = |salt: usize, index: usize| {
        (((index * 2_654_435_761 + (rank.rank() + salt) * 40_503) >> 7) % 17) as f64 - 8.0
    };
    let numbers = |salt: usize, rows: usize| {
        let content: Vec<u8> =
            (0..rows * case.hidden).flat_map(|index| element(case.dtype, number(salt, index))).collect();
        Tensor::holding(rank, case.dtype, &[rows, case.hidden], &content)
    };
    let (x, y) = (numbers(9, case.tokens[rank.rank()]), numbers(31, B::rows(&routes)));
    let [mut dispatched, mut combined] =
        [&y, &x].map(|like| Tensor::unwritten(rank, case.dtype, like.shape()));
    let call = Dispatch { tokens: Tokens::of(x.view()), received: Tokens::of(dispatched.view_mut()) };
    rank.dispatch(moe, &routes, call).unwrap();
    rank.combine(moe, &routes, Combine::of(y.view(), combined.view_mut())).unwrap();
    assert_adjoint(rank, &[(&dispatched, &y)], &[(&x, &combined)]);
}

/// Over all ranks, the products of the tensors of each pair have the same sum there and here, and it is not 0.
pub fn assert_adjoint<B: MoeBackend>(rank: &B, there: &[Pair<'_, B>], here: &[Pair<'_, B>]) {
    let values = |tensor: &Tensor<B>| -> Vec<f64> {
        tensor.content().chunks(tensor.dtype().size()).map(|cell| value(tensor.dtype(), cell)).collect()
    };
    let dot = |(a, b): &Pair<'_, B>| values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum::<f64>();
    let own = [there, here].map(|pairs| pairs.iter().map(dot).sum::<f64>());
    let all = rank.exchange_objects(&own).unwrap();
    let [there, here] = [0, 1].map(|side| all.iter().map(|sums| sums[side]).sum::<f64>());
    assert_eq!(there, here);
    assert_ne!(there, 0.0);
}

type Pair<'a, B> = (&'a Tensor<B>, &'a Tensor<B>);
