//! What dispatch and combine do, as the ranks of a world see it.
//!
//! A *behaviour* is what every rank of a world does and asserts. [`behaviours!`] makes tests of it for ranks that are threads
//! and for ranks that are processes, in worlds of several sizes: `host_processes::every_form::world_2`.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `tensor` | tensors of any dtype that notice a write beside them |
//! | `case` | one set of calls with the inputs of all ranks, and what the definition says must come of it |
//! | the others | the behaviours |

use std::time::Duration;

use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_testing::{World, role, say};

/// The deadline of every wait. It is far longer than anything here takes, so that no test passes because a wait ended.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the tests, and the list in which a process finds what it is to do.
macro_rules! behaviours {
    ($($module:ident::$behaviour:ident: [$($world:ident)*], processes [$($process_world:ident)*];)*) => {
        const BEHAVIOURS: &[(&str, fn(&Communicator))] =
            &[$((stringify!($behaviour), $module::$behaviour),)*];

        mod host_threads {
            $(mod $behaviour {
                $(#[test]
                fn $world() {
                    crate::threads(crate::world_size(stringify!($world)), crate::$module::$behaviour);
                })*
            })*
        }

        mod host_processes {
            $(mod $behaviour {
                $(#[test]
                fn $process_world() {
                    crate::processes_do(crate::world_size(stringify!($process_world)), stringify!($behaviour));
                })*
            })*
        }
    };
}

mod by_expert;
mod case;
mod disagreement;
mod forms;
mod refusals;
mod slots;
mod tensor;

behaviours! {
    forms::every_form: [world_1 world_2 world_3 world_4], processes [world_2];
    forms::every_dtype: [world_1 world_2 world_3], processes [world_2];
    forms::scales_of_either_kind: [world_2], processes [world_2];
    forms::special_values: [world_1 world_2 world_4], processes [];
    forms::regions_of_any_size: [world_2 world_3 world_4], processes [world_2];
    forms::capacities: [world_1 world_2 world_3], processes [world_2];
    forms::as_many_experts_as_ranks: [world_2 world_4 world_8], processes [];
    forms::many_tokens: [world_2], processes [world_2];
    forms::routes_of_two_calls_at_once: [world_2 world_3], processes [world_3];
    forms::beside_other_operations: [world_3], processes [];
    forms::dispatch_and_combine_are_adjoint: [world_1 world_3], processes [];
    refusals::arguments_are_refused_with_their_numbers: [world_1 world_2], processes [];
    refusals::routes_of_others_are_refused: [world_2], processes [];
    refusals::limits_are_named: [world_2], processes [];
    disagreement::ranks_that_differ_hear_of_it: [world_2 world_3], processes [world_2];
    slots::slots_and_sums: [world_1 world_2 world_4], processes [world_2];
    slots::every_format: [world_1 world_2 world_3], processes [world_2];
    slots::combines_in_logfmt: [world_1 world_2 world_3 world_4], processes [world_2];
    slots::small_regions: [world_2 world_3], processes [];
    slots::choices_that_are_left_out: [world_2], processes [];
    slots::arguments_that_make_no_sense: [world_1 world_2], processes [];
    slots::ranks_that_differ: [world_2], processes [world_2];
    slots::ranks_that_combine_in_different_formats: [world_2 world_3], processes [world_2];
    by_expert::by_expert_forms: [world_1 world_2 world_4], processes [world_2];
    by_expert::by_expert_dtypes: [world_1 world_2 world_3], processes [world_2];
    by_expert::by_expert_capacities: [world_1 world_2 world_3], processes [world_2];
    by_expert::by_expert_scales_and_probs: [world_2], processes [];
    by_expert::by_expert_small_regions: [world_2 world_3], processes [];
    by_expert::by_expert_is_adjoint: [world_1 world_3], processes [];
    by_expert::by_expert_refusals: [world_1 world_2], processes [];
    by_expert::by_expert_mismatches: [world_2], processes [world_2];
    disagreement::instances_that_differ_are_named: [world_2], processes [];
}

/// The number in a test's name.
fn world_size(name: &str) -> usize {
    name.strip_prefix("world_").and_then(|n| n.parse().ok()).expect("tests are named world_<size>")
}

fn threads(world_size: usize, behaviour: fn(&Communicator)) {
    LocalWorld::run_with(world_size, TIMEOUT, |comm| behaviour(&comm));
}

fn processes_do(world_size: usize, behaviour: &str) {
    let world = World::start(world_size, behaviour, true, TIMEOUT);
    for rank in 0..world_size {
        assert_eq!(world.hear(rank).1, "passed", "rank {rank}");
    }
    world.end(&[]);
}

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let comm = Communicator::from_env().unwrap();
    let (_, behaviour) = BEHAVIOURS.iter().find(|(name, _)| *name == role).expect("a behaviour of that name");
    say("ready");
    behaviour(&comm);
    say("passed");
}
