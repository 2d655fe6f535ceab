//! What every backend does, as the ranks of a world see it.
//!
//! A *behaviour* is a function over a [`Backend`](harness::Backend), mostly a dtype, and a world size.
//! [`conformance!`] makes tests of it for every backend there is, which so all carry the same names:
//! `all_reduce::host_threads::special_values_follow_the_rules::bf16::world_3`. A new backend adds its module there.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `harness` | the backends, and tensors that notice a write beside them |
//! | `values` | inputs: any bits, moderate numbers, special values |
//! | `operations` | every operation, called once and compared with what it must give |
//! | the others | the behaviours |

/// Makes a test of every behaviour, dtype and world. `every_dtype`, `any_dtype` (the behaviour does not depend on one)
/// and `every_world` stand for lists.
macro_rules! conformance {
    ($($behaviour:ident: $dtypes:tt, $worlds:tt;)*) => {
        mod host_threads {
            $(mod $behaviour {
                use super::super::$behaviour as behaviour;
                instantiate!($dtypes, $worlds, crate::harness::HostThreads);
            })*
        }
    };
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

mod harness;
mod operations;
mod values;

mod all_reduce;
mod arguments;
mod disagreement;
mod fusion;
mod gather_scatter;
mod groups;
mod in_step;
mod messages;
mod mixed;
mod non_blocking;
mod properties;
mod rooted;
mod symmetric;
mod uneven;

/// The list in [`instantiate!`] is complete.
#[test]
fn every_dtype_has_its_tests() {
    let names: Vec<&str> = antiphon_tensor::DType::NUMERIC.iter().map(|dtype| dtype.name()).collect();
    assert_eq!(names, ["f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8"]);
}
