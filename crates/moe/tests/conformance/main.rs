//! What dispatch and combine do, as the ranks of a world see it.
//!
//! A *behaviour* is what every rank of a world does and asserts, over a [`MoeBackend`](harness::MoeBackend). [`behaviours!`] makes tests of it
//! for ranks that are threads, for ranks that are processes and for ranks that have a GPU, in worlds of several sizes:
//! `gpus::every_form::world_2`. Tests that lack GPUs are recorded as skipped.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `harness` | the calls of each backend |
//! | `cases` | sets of calls with the inputs of all ranks, and what the definitions say must come of them |
//! | the others | the behaviours |

/// Makes the tests: of threads and of GPUs in the first worlds, of processes in the others. Those of the host alone are of no GPU.
macro_rules! behaviours {
    (
        every backend { $($module:ident::$behaviour:ident: $worlds:tt, processes $process_worlds:tt;)* }
        host alone { $($of_host:ident::$host_behaviour:ident: $host_worlds:tt, processes $host_process_worlds:tt;)* }
    ) => {
        mod host_threads {
            $(behaviour!($module::$behaviour: $worlds of HostThreads);)*
            $(behaviour!($of_host::$host_behaviour: $host_worlds of HostThreads);)*
        }

        mod host_processes {
            $(behaviour!($module::$behaviour: $process_worlds of HostProcesses);)*
            $(behaviour!($of_host::$host_behaviour: $host_process_worlds of HostProcesses);)*
        }

        mod gpus {
            $(behaviour!($module::$behaviour: $worlds of Gpus);)*
        }
    };
}

macro_rules! behaviour {
    ($module:ident::$behaviour:ident: [] of $Backend:ident) => {};
    ($module:ident::$behaviour:ident: [$($world:ident)*] of $Backend:ident) => {
        mod $behaviour {
            fn run(world_size: usize) {
                crate::run::<antiphon_testing::backend::$Backend>(world_size, crate::$module::$behaviour);
            }
            $(world!($world of $Backend);)*
        }
    };
}

macro_rules! world {
    // Blocks of eight GPUs would share the processors of an emulator's machine.
    (world_8 of Gpus) => {};
    ($world:ident of Gpus) => {
        #[test]
        fn $world() {
            antiphon_testing::backend::on_gpus(stringify!($world), run);
        }
    };
    ($world:ident of HostProcesses) => {
        #[test]
        fn $world() {
            antiphon_testing::backend::in_processes(module_path!(), stringify!($world), run);
        }
    };
    ($world:ident of HostThreads) => {
        #[test]
        fn $world() {
            run(antiphon_testing::backend::world_size(stringify!($world)));
        }
    };
}

#[path = "../cases/mod.rs"]
mod cases;

mod by_expert;
mod disagreement;
mod forms;
mod harness;
mod refusals;
mod run;
mod slots;

behaviours! {
    every backend {
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
    }
    host alone {
        // GPUs have no region for calls to slots; an instance there has slots of its own, and its communicator.
        slots::small_regions: [world_2 world_3], processes [];
        refusals::another_communicator_is_refused: [world_2], processes [];
        disagreement::instances_that_differ_are_named: [world_2], processes [];
    }
}

fn run<B: harness::MoeBackend>(world_size: usize, behaviour: fn(&B)) {
    B::run_ranks(world_size, &|rank| behaviour(&rank));
}
