//! The prelude's reductions over a block, in the order that it promises, and its splitting of work.

use antiphon_device::cuda::{Context, DeviceMemory, LaunchConfig};

use crate::{gpu, kernel};

pub const SOURCE: &str = include_str!("kernels/reductions.cu");

/// Halves with halves, quarters with quarters and so on, as the lanes of a warp.
fn warp<A: Copy>(values: &[A; 32], op: impl Fn(A, A) -> A) -> A {
    let mut values = values.to_vec();
    while values.len() > 1 {
        let (low, high) = values.split_at(values.len() / 2);
        values = low.iter().zip(high).map(|(&a, &b)| op(a, b)).collect();
    }
    values[0]
}

/// Each warp's, then those of the warps.
fn block<A: Copy>(values: &[A], neutral: A, op: impl Fn(A, A) -> A) -> A {
    let mut of_warps = [neutral; 32];
    for (of_warp, values) in of_warps.iter_mut().zip(values.chunks_exact(32)) {
        *of_warp = warp(values.try_into().unwrap(), &op);
    }
    warp(&of_warps, op)
}

/// What the kernel makes of the values: sum, product, minimum and maximum for every thread.
fn run<const N: usize>(context: &Context, name: &str, values: &[[u8; N]]) -> Option<Vec<[u8; N]>> {
    let function = kernel(context, "reductions.cu", SOURCE, name)?;
    let stream = context.stream().unwrap();
    let from = DeviceMemory::allocate(context, values.len() * N).unwrap();
    let to = DeviceMemory::allocate(context, values.len() * N * 4).unwrap();
    from.write(&stream, 0, values.as_flattened()).unwrap();
    let pointers = [to.pointer(), from.pointer()];
    let given = [(&pointers[0]).into(), (&pointers[1]).into()];
    // SAFETY: the kernel reads one value and writes four for each thread of its one block.
    unsafe { function.launch(&stream, &LaunchConfig::new(1, values.len() as u32), &given) }.unwrap();
    let mut bytes = vec![0; to.len()];
    to.read(&stream, 0, &mut bytes).unwrap();
    Some(bytes.chunks_exact(N).map(|chunk| chunk.try_into().unwrap()).collect())
}

/// Numbers whose sum depends on the order, then special ones.
fn inputs() -> Vec<Vec<f64>> {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f64 / 2f64.powi(31) - 0.5) * 2f64.powi((state % 40) as i32 - 20)
    };
    let mut inputs: Vec<Vec<f64>> =
        [32, 64, 256, 1024].map(|threads| (0..threads).map(|_| random()).collect()).into();
    inputs.push(vec![-0.0; 96]);
    inputs.push((0..64).map(|index| if index == 40 { 0.0 } else { -0.0 }).collect());
    inputs.push((0..64).map(|index| if index == 17 { f64::NAN } else { 1.0 }).collect());
    inputs.push((0..64).map(|index| if index == 3 { f64::NEG_INFINITY } else { 2.0 }).collect());
    inputs
}

macro_rules! floats {
    ($name:ident, $t:ty, $kernel:literal) => {
        #[test]
        fn $name() {
            let Some(context) = gpu() else { return };
            // IEEE 754-2019 minimum and maximum: a NaN wins, and −0 < +0.
            let min = |a: $t, b: $t| match () {
                () if a.is_nan() || b.is_nan() => <$t>::NAN,
                () if a == b => <$t>::from_bits(a.to_bits() | b.to_bits()),
                () => a.min(b),
            };
            let max = |a: $t, b: $t| match () {
                () if a.is_nan() || b.is_nan() => <$t>::NAN,
                () if a == b => <$t>::from_bits(a.to_bits() & b.to_bits()),
                () => a.max(b),
            };
            for input in inputs() {
                let values: Vec<$t> = input.iter().map(|&value| value as $t).collect();
                let bytes: Vec<_> = values.iter().map(|value| value.to_le_bytes()).collect();
                let Some(results) = run(&context, $kernel, &bytes) else { return };
                let expected = [
                    block(&values, -0.0, |a, b| a + b),
                    block(&values, 1.0, |a, b| a * b),
                    block(&values, <$t>::INFINITY, min),
                    block(&values, <$t>::NEG_INFINITY, max),
                ];
                for results in results.chunks_exact(4) {
                    for (result, expected) in results.iter().zip(expected) {
                        let result = <$t>::from_le_bytes(*result);
                        let same =
                            result.to_bits() == expected.to_bits() || (result.is_nan() && expected.is_nan());
                        assert!(same, "{result:e} instead of {expected:e} of {} threads", values.len());
                    }
                }
            }
        }
    };
}

floats!(floats_are_reduced_in_one_order, f32, "reduce_f32");
floats!(doubles_are_reduced_in_one_order, f64, "reduce_f64");

#[test]
fn integers_wrap() {
    let Some(context) = gpu() else { return };
    let values: Vec<i64> = (0..256).map(|index| i64::MAX / 3 - index * index).collect();
    let bytes: Vec<_> = values.iter().map(|value| value.to_le_bytes()).collect();
    let Some(results) = run(&context, "reduce_i64", &bytes) else { return };
    let expected = [
        values.iter().fold(0, |a: i64, b| a.wrapping_add(*b)),
        values.iter().fold(1, |a: i64, b| a.wrapping_mul(*b)),
        *values.iter().min().unwrap(),
        *values.iter().max().unwrap(),
    ];
    assert!(results.chunks_exact(4).all(|four| four == expected.map(i64::to_le_bytes)));
}

#[test]
fn the_blocks_shares_cover_everything_once() {
    let Some(context) = gpu() else { return };
    let Some(split) = kernel(&context, "reductions.cu", SOURCE, "split") else { return };
    let stream = context.stream().unwrap();
    for (count, blocks) in [(0u64, 4u32), (1, 4), (7, 4), (8, 4), (1000, 7), (u64::from(u32::MAX) + 5, 132)] {
        let to = DeviceMemory::allocate(&context, 16 * blocks as usize).unwrap();
        let pointer = to.pointer();
        // SAFETY: the kernel writes two words of 8 bytes per block.
        unsafe {
            split.launch(&stream, &LaunchConfig::new(blocks, 32), &[(&pointer).into(), (&count).into()])
        }
        .unwrap();
        let mut bytes = vec![0; to.len()];
        to.read(&stream, 0, &mut bytes).unwrap();
        let numbers: Vec<u64> =
            bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap())).collect();
        let mut next = 0;
        for share in numbers.chunks_exact(2) {
            assert_eq!(share[0], next, "{count} over {blocks}");
            let size = share[1] - share[0];
            assert!(size == count / u64::from(blocks) || size == count / u64::from(blocks) + 1);
            next = share[1];
        }
        assert_eq!(next, count);
    }
}
