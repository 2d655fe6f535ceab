//! Ranks that call different things: every rank hears both sides.

use antiphon_fabric::{Communicator, FabricError};
use antiphon_moe::{Moe, MoeConfig, MoeError};
use antiphon_tensor::DType;

use crate::case::{Case, Run};

/// The last rank's call differs from the others' in one thing; each needs a communicator of its own, which is of no use after.
pub fn ranks_that_differ_hear_of_it(comm: &Communicator) {
    let world = comm.world_size();
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
        let group = comm.split(Some(0), 0).unwrap().unwrap();
        let mut moe = Moe::new(&group, MoeConfig::default()).unwrap();
        let case = if group.rank() + 1 == world { &other } else { &case };
        let error = Run { case, comm: &group, ranks: case.ranks() }.try_notify(&mut moe).unwrap_err();
        assert!(
            matches!(error, MoeError::Fabric(FabricError::Mismatch { .. } | FabricError::Aborted { .. })),
            "{error}"
        );
        assert!(error.to_string().contains(text), "{error}");
    }
}

/// Every rank sees the numbers of all, so that all stay in step.
pub fn instances_that_differ_are_named(comm: &Communicator) {
    let mut both = [(); 2].map(|()| Moe::new(comm, MoeConfig::default()).unwrap());
    let case = Case::new(comm.world_size(), 4, 2);
    let run = Run { case: &case, comm, ranks: case.ranks() };
    let error = run.try_notify(&mut both[comm.rank() % 2]).unwrap_err();
    let text =
        "dispatch: rank 0 called it on the instance number 1 of the communicator, but rank 1 on number 2";
    assert_eq!(error.to_string(), text);
    case.check(comm, &mut both[1]);
}
