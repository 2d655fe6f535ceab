//! Ranks that call different things: every rank hears both sides.

use antiphon_moe::MoeConfig;
use antiphon_tensor::DType;

use crate::{cases::by_token::Case, harness::MoeBackend, run::Run};

/// The last rank's call differs from the others' in one thing; each needs a communicator of its own, which is of no use after.
pub fn ranks_that_differ_hear_of_it<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = Case::new(world, 8 * world, 2);
    let capacity = Some(vec![99; world]);
    let others = [
        (Case { hidden: 20, ..case.clone() }, "rows of 20 × f32"),
        (Case { dtype: DType::BF16, ..case.clone() }, "rows of 16 × bf16"),
        (Case { num_experts: 4 * world, ..case.clone() }, "experts"),
        (Case { top_k: 3, ..case.clone() }, "top-3"),
        (Case { capacity, ..case.clone() }, "capacity"),
    ];
    for (other, text) in others {
        let group = rank.group(Some(0), 0).unwrap();
        let mut moe = group.moe(MoeConfig::default()).unwrap();
        let case = if group.rank() + 1 == world { &other } else { &case };
        let outcome = Run { case, rank: &group, ranks: case.ranks() }.try_notify(&mut moe);
        let error = group.error_of(&moe, outcome);
        assert!(B::tells(&error, text), "{error}");
    }
}

/// Every rank sees the numbers of all, so that all stay in step.
pub fn instances_that_differ_are_named<B: MoeBackend>(rank: &B) {
    let both = &mut [(); 2].map(|()| rank.opened(MoeConfig::default()));
    let case = Case::new(rank.world_size(), 4, 2);
    let run = Run { case: &case, rank, ranks: case.ranks() };
    let error = run.try_notify(&mut both[rank.rank() % 2]).err().expect("the ranks disagree");
    let text =
        "dispatch: rank 0 called it on the instance number 1 of the communicator, but rank 1 on number 2";
    assert_eq!(error.to_string(), text);
    case.check(rank, &mut both[1]);
}
