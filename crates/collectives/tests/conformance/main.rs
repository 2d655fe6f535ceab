//! What every backend does, as the ranks of a world see it.
//!
//! A *behaviour* is a function over a [`Backend`](harness::Backend), mostly a dtype, and a world size.
//! [`conformance!`] makes tests of it for every backend there is, which so all carry the same names:
//! `all_reduce::host_threads::special_values_follow_the_rules::bf16::world_3`. A new backend adds its module there. Where a
//! world costs more to make, one test has all dtypes, and there are fewer worlds:
//! `all_reduce::gpus::special_values_follow_the_rules::world_2`. Tests that lack GPUs are recorded as skipped.
//!
//! On several nodes there are two nodes and up to four ranks: `all_reduce::host_nodes::special_values_follow_the_rules::world_1_and_3`. Reductions go by nodes in tests
//! that say so: `…::world_1_and_3_by_nodes`.
//!
//! A mixed layout has nodes of equally many ranks: two or three nodes, and up to eight ranks.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `harness` | the backends, and tensors that notice a write beside them |
//! | `values` | inputs: any bits, moderate numbers, special values |
//! | `operations` | every operation, called once and compared with what it must give |
//! | the others | the behaviours |

/// Makes a test of every behaviour, dtype and world, for each backend. `every_dtype`, `any_dtype` (the behaviour does not
/// depend on one) and `every_world` stand for lists.
macro_rules! conformance {
    ($($behaviour:ident: $dtypes:tt, $worlds:tt;)*) => {
        conformance_on_host_and_nodes!($($behaviour: $dtypes, $worlds;)*);

        conformance_on_gpus!($($behaviour: $dtypes, $worlds;)*);
    };
}

/// As [`conformance!`], for behaviours of a mixed layout, whose nodes have equally many ranks.
macro_rules! conformance_of_layouts {
    ($($behaviour:ident: $dtypes:tt, $worlds:tt;)*) => {
        conformance_of_layouts_on_host!($($behaviour: $dtypes, $worlds;)*);
        conformance_on_gpus!($($behaviour: $dtypes, $worlds;)*);
    };
}

macro_rules! conformance_of_layouts_on_host {
    ($($behaviour:ident: $dtypes:tt, $worlds:tt;)*) => {
        conformance_on_host!($($behaviour: $dtypes, $worlds;)*);

        mod host_nodes {
            $(mod $behaviour {
                #[allow(unused_imports)]
                use super::super::$behaviour as behaviour;
                for_any_backend!($dtypes);
                worlds_of_equal_nodes!($worlds);
            })*
        }
    };
}

macro_rules! conformance_on_gpus {
    ($($behaviour:ident: $dtypes:tt, $worlds:tt;)*) => {
        mod gpus {
            $(mod $behaviour {
                #[allow(unused_imports)]
                use super::super::$behaviour as behaviour;
                with_all_dtypes!($dtypes, crate::harness::Gpus);
                worlds_of_gpus!($worlds);
            })*
        }
    };
}

/// As [`conformance!`], for what needs memory that all ranks map.
macro_rules! conformance_on_host {
    ($($behaviour:ident: $dtypes:tt, $worlds:tt;)*) => {
        mod host_threads {
            $(mod $behaviour {
                use super::super::$behaviour as behaviour;
                instantiate!($dtypes, $worlds, crate::harness::HostThreads);
            })*
        }

        mod host_processes {
            $(mod $behaviour {
                #[allow(unused_imports)]
                use super::super::$behaviour as behaviour;
                with_all_dtypes!($dtypes, crate::harness::HostProcesses);
                one_world_of_processes!($worlds);
            })*
        }
    };
}

/// As [`conformance_on_host!`], and on several nodes, with one dtype after the other.
macro_rules! conformance_on_host_and_nodes {
    ($($behaviour:ident: $dtypes:tt, $worlds:tt;)*) => {
        conformance_on_host!($($behaviour: $dtypes, $worlds;)*);

        mod host_nodes {
            $(mod $behaviour {
                #[allow(unused_imports)]
                use super::super::$behaviour as behaviour;
                for_any_backend!($dtypes);
                worlds_of_nodes!($worlds);
            })*
        }
    };
}

/// The behaviour with one dtype after the other, on any backend.
macro_rules! for_any_backend {
    (every_dtype) => {
        for_any_backend!([f64 f32 f16 bf16 i64 i32 i8 u8]);
    };
    ([$($dtype:ident)*]) => {
        #[allow(dead_code)]
        fn run<B: crate::harness::Backend>(world: usize) {
            $(behaviour::<B>(crate::harness::dtype(stringify!($dtype)), world);)*
        }
    };
    (any_dtype) => {
        #[allow(dead_code)]
        fn run<B: crate::harness::Backend>(world: usize) {
            behaviour::<B>(world);
        }
    };
}

/// Worlds of up to four ranks, on two nodes.
macro_rules! worlds_of_nodes {
    (every_world) => { worlds_of_nodes!([world_2 world_4]); };
    ([$($world:ident)*]) => { $(world_of_nodes!($world);)* };
}

macro_rules! world_of_nodes {
    (world_2) => {
        world_of_nodes!(@ world_1_and_1: Halves, 2);
        world_of_nodes!(@ world_1_and_1_by_nodes: ByNodes<crate::harness::Halves>, 2);
    };
    (world_3) => {
        world_of_nodes!(@ world_3_interleaved: Interleaved, 3);
        world_of_nodes!(@ world_3_interleaved_by_nodes: ByNodes<crate::harness::Interleaved>, 3);
    };
    (world_4) => {
        world_of_nodes!(@ world_2_and_2: Halves, 4);
        world_of_nodes!(@ world_1_and_3: OneAndRest, 4);
        world_of_nodes!(@ world_4_interleaved: Interleaved, 4);
        world_of_nodes!(@ world_2_and_2_by_nodes: ByNodes<crate::harness::Halves>, 4);
        world_of_nodes!(@ world_1_and_3_by_nodes: ByNodes<crate::harness::OneAndRest>, 4);
        world_of_nodes!(@ world_4_interleaved_by_nodes: ByNodes<crate::harness::Interleaved>, 4);
    };
    (@ $name:ident: $layout:ident $(<$inner:ty>)?, $world:literal) => {
        #[test]
        fn $name() {
            run::<crate::harness::HostNodes<crate::harness::$layout $(<$inner>)?>>($world);
        }
    };
    ($other:ident) => {};
}

/// Worlds of up to eight ranks, on two or three nodes of equally many.
macro_rules! worlds_of_equal_nodes {
    ([$($world:ident)*]) => { $(world_of_equal_nodes!($world);)* };
}

macro_rules! world_of_equal_nodes {
    (world_2) => { world_of_nodes!(@ world_1_and_1: Halves, 2); };
    (world_3) => { world_of_nodes!(@ world_1_and_1_and_1: Thirds, 3); };
    (world_4) => { world_of_nodes!(@ world_2_and_2: Halves, 4); };
    (world_6) => {
        world_of_nodes!(@ world_3_and_3: Halves, 6);
        world_of_nodes!(@ world_2_and_2_and_2: Thirds, 6);
    };
    (world_8) => { world_of_nodes!(@ world_4_and_4: Halves, 8); };
    ($other:ident) => {};
}

macro_rules! instantiate {
    (every_dtype, $worlds:tt, $backend:ty) => {
        instantiate!([f64 f32 f16 bf16 i64 i32 i8 u8], $worlds, $backend);
    };
    ([$($dtype:ident)*], $worlds:tt, $backend:ty) => {$(
        mod $dtype {
            fn run(world: usize) {
                super::behaviour::<$backend>(crate::harness::dtype(stringify!($dtype)), world);
            }
            for_worlds!($worlds);
        }
    )*};
    (any_dtype, $worlds:tt, $backend:ty) => {
        fn run(world: usize) {
            behaviour::<$backend>(world);
        }
        for_worlds!($worlds);
    };
}

macro_rules! for_worlds {
    (every_world) => {
        for_worlds!([world_1 world_2 world_3 world_4 world_5 world_8]);
    };
    ([$($world:ident)*]) => {$(
        #[test]
        fn $world() {
            run(crate::harness::world_size(stringify!($world)));
        }
    )*};
}

/// The behaviour with one dtype after the other, which some lists of worlds have no test for.
macro_rules! with_all_dtypes {
    (every_dtype, $backend:ty) => {
        with_all_dtypes!([f64 f32 f16 bf16 i64 i32 i8 u8], $backend);
    };
    ([$($dtype:ident)*], $backend:ty) => {
        #[allow(dead_code)]
        fn run(world: usize) {
            $(behaviour::<$backend>(crate::harness::dtype(stringify!($dtype)), world);)*
        }
    };
    (any_dtype, $backend:ty) => {
        #[allow(dead_code)]
        fn run(world: usize) {
            behaviour::<$backend>(world);
        }
    };
}

/// Three processes, or two, or four: what the list has.
macro_rules! one_world_of_processes {
    (every_world) => { one_world_of_processes!(@ world_3); };
    ([world_2 world_3 $($others:ident)*]) => { one_world_of_processes!(@ world_3); };
    ([world_2 $($others:ident)*]) => { one_world_of_processes!(@ world_2); };
    ([world_3 $($others:ident)*]) => { one_world_of_processes!(@ world_3); };
    ([world_4 $($others:ident)*]) => { one_world_of_processes!(@ world_4); };
    ([$other:ident $($others:ident)*]) => { one_world_of_processes!([$($others)*]); };
    ([]) => {};
    (@ $world:ident) => {
        #[test]
        fn $world() {
            crate::harness::in_processes(module_path!(), stringify!($world), run);
        }
    };
}

/// Worlds of up to four ranks.
macro_rules! worlds_of_gpus {
    (every_world) => { worlds_of_gpus!([world_1 world_2 world_3 world_4]); };
    ([$($world:ident)*]) => { $(world_of_gpus!($world);)* };
}

macro_rules! world_of_gpus {
    (world_1) => { world_of_gpus!(@ world_1); };
    (world_2) => { world_of_gpus!(@ world_2); };
    (world_3) => { world_of_gpus!(@ world_3); };
    (world_4) => { world_of_gpus!(@ world_4); };
    (@ $world:ident) => {
        #[test]
        fn $world() {
            crate::harness::on_gpus(stringify!($world), run);
        }
    };
    ($other:ident) => {};
}

#[macro_use]
#[path = "../by_name/mod.rs"]
mod by_name;
#[path = "../../../fabric/tests/processes/mod.rs"]
mod processes;

mod harness;
mod operations;
mod values;

mod all_reduce;
mod arguments;
mod disagreement;
mod exchange;
mod failures;
mod fusion;
mod gather_scatter;
mod groups;
mod in_step;
mod messages;
mod mixed;
mod named;
mod non_blocking;
mod properties;
mod symmetric;
mod uneven;

/// The list in [`instantiate!`] is complete.
#[test]
fn every_dtype_has_its_tests() {
    let names: Vec<&str> = antiphon_tensor::DType::NUMERIC.iter().map(|dtype| dtype.name()).collect();
    assert_eq!(names, ["f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8"]);
}
