//! Every kernel against an independent f64 reference, and all levels of vector instructions against each other.

use antiphon_tensor::{DType, Element, bf16, f16, with_dtype};

use super::*;

/// A small reproducible generator (SplitMix64): random bits are the point, not their quality.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

fn run(dtype: DType, op: ReduceOp, simd: Simd, sources: &[Vec<u8>], shift: usize) -> Vec<u8> {
    let bytes = sources[0].len() - shift;
    let mut out = vec![0xA5; bytes + 1];
    let pointers: Vec<_> = sources.iter().map(|s| s[shift..].as_ptr()).collect();
    // SAFETY: all buffers hold `bytes` bytes, and the output is apart from the inputs.
    unsafe {
        Reducer::with_simd(dtype, op, simd).run(out.as_mut_ptr(), &pointers, bytes / dtype.size());
    }
    assert_eq!(out.pop(), Some(0xA5), "wrote past the end");
    out
}

/// Arbitrary bit patterns (NaNs, infinities, subnormals and all), odd lengths and misaligned starts: the bits must
/// not depend on the instructions used.
#[test]
fn all_vector_widths_give_the_same_bits() {
    let mut bits = Bits(1);
    for &dtype in DType::NUMERIC {
        for op in ReduceOp::ARITHMETIC {
            for (world, count) in [(1, 1), (2, 63), (2, 129), (3, 517), (5, 1031), (8, 200)] {
                let sources: Vec<_> = (0..world).map(|_| bits.bytes(count * dtype.size() + 1)).collect();
                for shift in [0, 1] {
                    let trimmed: Vec<_> =
                        sources.iter().map(|s| s[..count * dtype.size() + shift].to_vec()).collect();
                    let expected = run(dtype, op, Simd::Baseline, &trimmed, shift);
                    for simd in Simd::available() {
                        let got = run(dtype, op, simd, &trimmed, shift);
                        assert_eq!(got, expected, "{dtype} {op} world {world} count {count} {simd:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_destination_may_be_a_source() {
    let mut bits = Bits(2);
    for &dtype in DType::NUMERIC {
        let count = 1000;
        let sources: Vec<_> = (0..3).map(|_| bits.bytes(count * dtype.size())).collect();
        for simd in Simd::available() {
            let expected = run(dtype, ReduceOp::Sum, simd, &sources, 0);
            for own in 0..3 {
                let mut sources = sources.clone();
                let destination = sources[own].as_mut_ptr();
                let pointers: Vec<_> = sources.iter().map(|s| s.as_ptr()).collect();
                // SAFETY: the destination is exactly one source.
                unsafe { Reducer::with_simd(dtype, ReduceOp::Sum, simd).run(destination, &pointers, count) };
                assert_eq!(sources[own], expected, "{dtype} {simd:?}");
            }
        }
    }
}

/// Exact where the arithmetic is exact: small integers in every dtype.
#[test]
fn small_integers_are_exact_in_every_dtype() {
    for &dtype in DType::NUMERIC {
        with_dtype!(dtype, T => {
            let columns: Vec<Vec<f64>> =
                (0..4).map(|r| (0..77).map(|i| ((i * 7 + r * 3) % 4 + 1) as f64).collect()).collect();
            let sources: Vec<Vec<T>> =
                columns.iter().map(|c| c.iter().map(|&x| <T as Element>::from_f64(x)).collect()).collect();
            let slices: Vec<&[T]> = sources.iter().map(Vec::as_slice).collect();
            for op in ReduceOp::ARITHMETIC {
                let mut out = vec![T::default(); 77];
                reduce(op, &mut out, &slices);
                for i in 0..77 {
                    let column = columns.iter().map(|c| c[i]);
                    let expected = match op {
                        ReduceOp::Sum => column.sum(),
                        ReduceOp::Prod => wrapped(dtype, column.product()),
                        ReduceOp::Min => column.fold(f64::INFINITY, f64::min),
                        ReduceOp::Max => column.fold(f64::NEG_INFINITY, f64::max),
                        ReduceOp::Avg if dtype.is_float() => column.sum::<f64>() / 4.0,
                        ReduceOp::Avg => (column.sum::<f64>() / 4.0).trunc(),
                        _ => unreachable!("on bits"),
                    };
                    assert_eq!(Element::to_f64(out[i]), expected, "{dtype} {op} element {i}");
                }
            }
        });
    }
}

/// The product of four numbers up to 4 is at most 256, which only 8-bit integers wrap.
fn wrapped(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::I8 => value as i64 as i8 as f64,
        DType::U8 => value as i64 as u8 as f64,
        _ => value,
    }
}

#[test]
fn sixteen_bit_floats_are_rounded_once() {
    // In bf16, 256 + 1 rounds back to 256 each time; accumulated in f32 the ones add up.
    let (big, one) = (bf16::from_f32(256.0), bf16::from_f32(1.0));
    let mut out = [bf16::ZERO];
    reduce(ReduceOp::Sum, &mut out, &[&[big], &[one], &[one]]);
    assert_eq!(out[0].to_f32(), 258.0);

    let (big, one) = (f16::from_f32(2048.0), f16::from_f32(1.0));
    let mut out = [f16::ZERO];
    reduce(ReduceOp::Sum, &mut out, &[&[big], &[one], &[one]]);
    assert_eq!(out[0].to_f32(), 2050.0);
}

#[test]
fn the_order_is_ascending() {
    // Only ((1e30 − 1e30) + 1) is 1; any other order loses it.
    let mut out = [0f32];
    reduce(ReduceOp::Sum, &mut out, &[&[1e30], &[-1e30], &[1.0]]);
    assert_eq!(out, [1.0]);
}

#[test]
fn zeros_keep_their_sign_and_nans_win() {
    for simd in Simd::available() {
        for count in [1usize, 64] {
            let check = |op: ReduceOp, a: f32, b: f32, expected: u32| {
                let (a, b) = (vec![a; count], vec![b; count]);
                let mut out = vec![0f32; count];
                // SAFETY: three separate vectors of `count` elements.
                unsafe {
                    Reducer::with_simd(DType::F32, op, simd).run(
                        out.as_mut_ptr().cast(),
                        &[a.as_ptr().cast(), b.as_ptr().cast()],
                        count,
                    );
                }
                for x in out {
                    assert_eq!(x.to_bits(), expected, "{op} of {} and {} with {simd:?}", a[0], b[0]);
                }
            };
            let negative_zero = (-0.0f32).to_bits();
            check(ReduceOp::Sum, -0.0, -0.0, negative_zero);
            check(ReduceOp::Min, 0.0, -0.0, negative_zero);
            check(ReduceOp::Min, -0.0, 0.0, negative_zero);
            check(ReduceOp::Max, 0.0, -0.0, 0);
            check(ReduceOp::Max, -0.0, 0.0, 0);
            for op in ReduceOp::ARITHMETIC {
                check(op, f32::NAN, 1.0, 0x7FC0_0000);
                check(op, 1.0, f32::from_bits(0xFFA0_1234), 0x7FC0_0000);
            }
            check(ReduceOp::Sum, f32::INFINITY, f32::NEG_INFINITY, 0x7FC0_0000);
            check(ReduceOp::Sum, f32::from_bits(1), f32::from_bits(1), 2); // subnormals are not flushed
        }
    }
}

#[test]
fn integer_sums_wrap() {
    let mut out = [0i8];
    reduce(ReduceOp::Sum, &mut out, &[&[100], &[100]]);
    assert_eq!(out, [-56]);
    let mut out = [0i8];
    reduce(ReduceOp::Avg, &mut out, &[&[100], &[101]]);
    assert_eq!(out, [100]); // the mean is taken of the unwrapped sum, and truncated
    let mut out = [0i64];
    reduce(ReduceOp::Sum, &mut out, &[&[i64::MAX], &[1]]);
    assert_eq!(out, [i64::MIN]);
}

/// Arbitrary bits, in every integer type and with every level of vector instructions.
#[test]
fn bitwise_operators_combine_bits() {
    let mut bits = Bits(9);
    let sources: Vec<_> = (0..3).map(|_| bits.bytes(8 * 131)).collect();
    let column = |i: usize| sources.iter().map(move |source| source[i]);
    for (op, combine) in [
        (ReduceOp::Band, (|a, b| a & b) as fn(u8, u8) -> u8),
        (ReduceOp::Bor, |a, b| a | b),
        (ReduceOp::Bxor, |a, b| a ^ b),
    ] {
        let expected: Vec<u8> = (0..8 * 131).map(|i| column(i).reduce(combine).unwrap()).collect();
        for dtype in [DType::I64, DType::I32, DType::I8, DType::U8] {
            for simd in Simd::available() {
                assert_eq!(run(dtype, op, simd, &sources, 0), expected, "{dtype} {op} {simd:?}");
            }
        }
    }
}

/// The nodes' sums by the plain reduction in the accumulator's own type, then their sum.
#[test]
fn sources_of_nodes_are_accumulated_by_themselves() {
    let mut bits = Bits(7);
    let nodes = [1, 0, 1, 7, 0];
    let count = 700;
    let mut differ = false;
    for simd in Simd::available() {
        let sources: Vec<Vec<f32>> = (0..nodes.len())
            .map(|_| (0..count).map(|_| bits.next() as i32 as f32 * (bits.next() % 1000) as f32).collect())
            .collect();
        let pointers: Vec<*const u8> = sources.iter().map(|s| s.as_ptr().cast()).collect();
        let expected = |i: usize| {
            let x = |source: usize| sources[source][i];
            ((x(0) + x(2)) + (x(1) + x(4))) + x(3)
        };
        let (mut sum, mut flat, mut mean) = (vec![0f32; count], vec![0f32; count], vec![0f32; count]);
        // SAFETY: all buffers have `count` elements, and the outputs are apart.
        unsafe {
            let reducer = Reducer::with_simd(DType::F32, ReduceOp::Sum, simd);
            reducer.run_by_node(sum.as_mut_ptr().cast(), &pointers, &nodes, count);
            reducer.run(flat.as_mut_ptr().cast(), &pointers, count);
            let reducer = Reducer::with_simd(DType::F32, ReduceOp::Avg, simd);
            reducer.run_by_node(mean.as_mut_ptr().cast(), &pointers, &nodes, count);
        }
        for i in 0..count {
            assert_eq!(sum[i].to_bits(), expected(i).to_bits(), "{simd:?} {i}");
            assert_eq!(mean[i].to_bits(), (expected(i) / 5.0).to_bits(), "{simd:?} {i}");
        }
        differ |= sum != flat;
    }
    assert!(differ, "the order of the sums matters here");
}

#[test]
fn ranks_of_one_node_give_the_bits_of_the_plain_reduction() {
    let mut bits = Bits(8);
    for &dtype in DType::NUMERIC {
        for op in ReduceOp::ARITHMETIC {
            let count = 517;
            let sources: Vec<_> = (0..3).map(|_| bits.bytes(count * dtype.size())).collect();
            let pointers: Vec<_> = sources.iter().map(|s| s.as_ptr()).collect();
            for simd in Simd::available() {
                let expected = run(dtype, op, simd, &sources, 0);
                let mut own = sources[1].clone();
                let mut pointers = pointers.clone();
                pointers[1] = own.as_ptr();
                // SAFETY: all buffers have `count` elements; the destination is exactly one source.
                unsafe {
                    let reducer = Reducer::with_simd(dtype, op, simd);
                    reducer.run_by_node(own.as_mut_ptr(), &pointers, &[4, 4, 4], count);
                }
                assert_eq!(own, expected, "{dtype} {op} {simd:?}");
            }
        }
    }
}

/// Every dtype, operator and level: the accumulators of each node, then their conclusion.
#[test]
fn the_two_halves_give_the_bits_of_the_reduction_by_node() {
    let mut bits = Bits(9);
    let (nodes, of_nodes) = ([0, 1, 0, 2, 1], [&[0, 2][..], &[1, 4], &[3]]);
    for &dtype in DType::NUMERIC {
        let operators = ReduceOp::ALL.into_iter().filter(|op| !op.is_bitwise() || !dtype.is_float());
        for op in operators {
            let count = 1100;
            let sources: Vec<_> = nodes.iter().map(|_| bits.bytes(count * dtype.size())).collect();
            let pointers: Vec<_> = sources.iter().map(|s| s.as_ptr()).collect();
            for simd in Simd::available() {
                let reducer = Reducer::with_simd(dtype, op, simd);
                let (mut whole, mut halves) = (sources[0].clone(), sources[0].clone());
                let mut sums = vec![vec![0u8; count * reducer.accumulator_size()]; of_nodes.len()];
                // SAFETY: all buffers have `count` elements or accumulators, and the outputs are apart.
                unsafe {
                    reducer.run_by_node(whole.as_mut_ptr(), &pointers, &nodes, count);
                    for (sums, ranks) in sums.iter_mut().zip(of_nodes) {
                        let of_node: Vec<_> = ranks.iter().map(|&rank| pointers[rank]).collect();
                        reducer.accumulate(sums.as_mut_ptr(), &of_node, count);
                    }
                    let sums: Vec<_> = sums.iter().map(|sums| sums.as_ptr()).collect();
                    reducer.conclude(halves.as_mut_ptr(), &sums, nodes.len(), count);
                }
                assert_eq!(halves, whole, "{dtype} {op} {simd:?}");
            }
        }
    }
}
