//! Fused all-reduces on GPUs: the bits of the host, for everything that can be asked for.

use antiphon_collectives::{
    StreamCollectives,
    cuda::Algorithm,
    fusion::{Accumulation, FusedAllReduce, InPlace},
};
use antiphon_tensor::{DType, Device, ScaleLayout, TensorView, TensorViewMut, quantize::TokenRule};
use antiphon_testing::sized;

use crate::{
    fused::{Case, Form, From, Fused, Norm, Residual},
    harness::{Outcome, Rank, on_gpus},
    image::Rows,
};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const SOURCES: [From; 7] = [
    From::Tensor,
    From::Experts(1),
    From::Experts(8),
    From::Rows { top_k: 1, weighted: true, shared: true },
    From::Rows { top_k: 8, weighted: true, shared: true },
    From::Rows { top_k: 8, weighted: false, shared: true },
    From::Rows { top_k: 8, weighted: true, shared: false },
];

fn every_source(world_size: usize) {
    on_gpus(world_size, |rank| {
        for dtype in DTYPES {
            for from in SOURCES {
                for accumulation in [Accumulation::F32, Accumulation::Rounded] {
                    for (tokens, hidden) in [(1, 16), (7, 1024), (33, 7168)] {
                        rank.fuse_by_all(Case { from, accumulation, ..Case::new(dtype, tokens, hidden) })?;
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn every_source_has_the_hosts_bits() {
    every_source(2);
}

#[test]
fn every_source_has_the_hosts_bits_on_4_gpus() {
    every_source(4);
}

#[test]
fn indices_without_a_row_make_their_token_nan() {
    on_gpus(2, |rank| {
        for (from, dtype) in SOURCES.into_iter().skip(3).zip(DTYPES.into_iter().cycle()) {
            rank.fuse_by_all(Case { from, rows: Rows::Astray, ..Case::new(dtype, 40, 1024) })?;
        }
        Ok(())
    });
}

/// Groups of one, of several and of many vectors, that are no powers of two, that end within a vector, of one element, and of a
/// whole row, each with a row it divides.
const GROUPS: [(usize, usize); 18] = [
    (1, 1040),
    (2, 768),
    (3, 768),
    (4, 768),
    (6, 7680),
    (12, 768),
    (20, 1040),
    (128, 7168),
    (32, 4096),
    (8, 1024),
    (192, 6144),
    (56, 7168),
    (104, 1040),
    (208, 1040),
    (256, 8192),
    (512, 16_384),
    (896, 7168),
    (7168, 7168),
];

fn quantizations() -> impl Iterator<Item = (Form, usize)> {
    let plain = [1040, 7168, 8192]
        .into_iter()
        .flat_map(|hidden| [(Form::Fp8, hidden), (Form::Fp8Tokens(TokenRule::Quotient), hidden)]);
    let groups = GROUPS.into_iter().map(|(group, hidden)| (Form::Fp8Groups(group), hidden));
    let of = |hidden| ScaleLayout::ALL.iter().map(move |&layout| (Form::NvFp4(layout), hidden));
    plain.chain(groups).chain([16, 1040, 7168].into_iter().flat_map(of))
}

fn every_quantization(world_size: usize) {
    on_gpus(world_size, |rank| {
        for dtype in DTYPES {
            for (form, hidden) in quantizations() {
                if dtype == DType::F32 && matches!(form, Form::NvFp4(_)) {
                    continue;
                }
                // Below, at and above the rows of a tile of scales.
                for tokens in [1, 5, 129] {
                    let case = Case::quantized(dtype, tokens, hidden, form);
                    let (roomy, norm_out, scale_in_memory) = (tokens == 5, tokens == 1, tokens != 1);
                    rank.fuse_by_all(Case { roomy, norm_out, scale_in_memory, ..case })?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn every_quantization_has_the_hosts_bits() {
    every_quantization(2);
}

#[test]
fn every_quantization_has_the_hosts_bits_on_4_gpus() {
    every_quantization(4);
}

const HIDDEN: [usize; 10] = [16, 1024, 1040, 3072, 4096, 6144, 7168, 8192, 14_336, 16_384];
const TOKENS: [usize; 10] = [1, 2, 3, 7, 16, 33, 64, 129, 600, 2048];

/// Every hidden size with few tokens and some, every number of tokens with rows that one block takes, and several.
fn shapes() -> impl Iterator<Item = (usize, usize)> {
    let by_hidden = HIDDEN.into_iter().flat_map(|hidden| [(1, hidden), (3, hidden), (70, hidden)]);
    by_hidden.chain(TOKENS.into_iter().flat_map(|tokens| [(tokens, 1024), (tokens, 7168)]))
}

fn every_shape(world_size: usize) {
    on_gpus(world_size, |rank| {
        for (tokens, hidden) in shapes() {
            rank.fuse_by_all(Case::new(DType::BF16, tokens, hidden))?;
            rank.fuse_by_all(Case::quantized(
                DType::BF16,
                tokens,
                hidden,
                Form::Fp8Tokens(TokenRule::Quotient),
            ))?;
            if tokens < 600 {
                rank.fuse_by_all(Case::new(DType::F32, tokens, hidden))?;
                rank.fuse_by_all(Case { pre_norm: Norm::Plain, ..Case::new(DType::F16, tokens, hidden) })?;
            }
        }
        Ok(())
    });
}

#[test]
fn every_shape_has_the_hosts_bits() {
    every_shape(2);
}

#[test]
fn every_shape_has_the_hosts_bits_on_3_gpus() {
    every_shape(3);
}

#[test]
fn every_shape_has_the_hosts_bits_on_4_gpus() {
    every_shape(4);
}

/// What can be asked for beside the norm, alone and together.
fn options(dtype: DType, tokens: usize, hidden: usize) -> Vec<Case> {
    let norm = Case::new(dtype, tokens, hidden);
    let fp8 = Case::quantized(dtype, tokens, hidden, Form::Fp8);
    let (no_norm, no_residual) = (Case { norm: Norm::No, norm_out: false, ..norm }, Residual::No);
    vec![
        Case { bias: true, ..norm },
        Case { pre_norm: Norm::Weighted, ..norm },
        Case { pre_norm: Norm::Plain, bias: true, ..norm },
        Case { weight_bias: 1.0, ..norm },
        Case { weight_bias: 1.0, norm: Norm::Plain, ..norm },
        Case { norm: Norm::Plain, ..norm },
        Case { inverse_rms_out: true, ..norm },
        Case { inverse_rms_out: true, norm: Norm::Plain, round_before_weight: true, ..norm },
        Case { inverse_rms_out: true, norm_out: false, ..norm },
        Case { round_before_weight: true, ..norm },
        Case { round_before_weight: true, weight_bias: 1.0, inverse_rms_out: true, ..fp8 },
        Case { residual: Residual::InPlace, ..norm },
        Case { residual: Residual::InPlace, ..fp8 },
        Case { in_place: Some(InPlace::Sum), ..norm },
        Case { in_place: Some(InPlace::Residual), ..norm },
        Case { in_place: Some(InPlace::Norm), residual: Residual::InPlace, sum_out: false, ..norm },
        Case { in_place: Some(InPlace::Norm), norm_out: true, ..fp8 },
        Case { residual: no_residual, ..norm },
        Case { residual: no_residual, residual_out: false, ..norm },
        // Only some of the results, down to one.
        Case { sum_out: false, ..norm },
        Case { sum_out: false, residual_out: false, ..norm },
        Case { sum_out: false, norm_out: false, ..norm },
        Case { residual_out: false, norm_out: false, ..norm },
        Case { residual_out: false, ..fp8 },
        Case { norm_out: true, sum_out: true, ..fp8 },
        // Nothing but the sum, with and without what is added to it.
        Case { residual: no_residual, residual_out: false, ..no_norm },
        no_norm,
        Case { bias: true, residual: no_residual, ..no_norm },
        Case { pre_norm: Norm::Weighted, ..no_norm },
        Case {
            bias: true,
            pre_norm: Norm::Weighted,
            weight_bias: 1.0,
            residual: Residual::InPlace,
            accumulation: Accumulation::Rounded,
            norm_out: true,
            ..fp8
        },
    ]
}

/// Where a row's largest magnitude does not follow from the largest product with a weight.
#[test]
fn rounding_before_the_weight_has_the_hosts_bits_in_every_form() {
    on_gpus(2, |rank| {
        let forms = [
            Form::Fp8Tokens(TokenRule::Quotient),
            Form::Fp8Tokens(TokenRule::Reciprocal),
            Form::Fp8Groups(128),
            Form::NvFp4(ScaleLayout::Swizzled128x4),
        ];
        for (tokens, hidden) in [(1, 7168), (33, 7168), (130, 1024), (300, 7168)] {
            for form in forms {
                let case = Case::quantized(DType::BF16, tokens, hidden, form);
                let case = Case { round_before_weight: true, inverse_rms_out: true, ..case };
                rank.fuse_by_all(case)?;
                rank.fuse_by_all(Case { rows: Rows::Strange, ..case })?;
            }
        }
        Ok(())
    });
}

#[test]
fn every_option_has_the_hosts_bits() {
    on_gpus(2, |rank| {
        // Each is a program of its own, so not all of them for all dtypes.
        let few = [(DType::F32, 5, 1040), (DType::BF16, 130, 7168)];
        few.iter().try_for_each(|&(dtype, tokens, hidden)| {
            options(dtype, tokens, hidden).into_iter().try_for_each(|case| rank.fuse_by_all(case))
        })
    });
}

fn strange_rows(world_size: usize) {
    on_gpus(world_size, |rank| {
        let forms = [
            Form::Fp8,
            Form::Fp8Tokens(TokenRule::Quotient),
            Form::Fp8Tokens(TokenRule::Reciprocal),
            Form::Fp8Groups(128),
            Form::NvFp4(ScaleLayout::Swizzled128x4),
        ];
        for dtype in DTYPES {
            for hidden in [1024, 7168] {
                let norm = Case { rows: Rows::Strange, ..Case::new(dtype, 23, hidden) };
                let experts = Case { from: From::Experts(2), ..norm };
                let sum = Case { residual: Residual::No, norm: Norm::No, norm_out: false, ..norm };
                let pre_norm = Case { pre_norm: Norm::Weighted, ..norm };
                let rounded = Case { accumulation: Accumulation::Rounded, ..norm };
                for case in [norm, experts, sum, pre_norm, rounded] {
                    rank.fuse_by_all(case)?;
                }
                for form in forms {
                    if dtype != DType::F32 || !matches!(form, Form::NvFp4(_)) {
                        rank.fuse_by_all(Case { form: Some(form), ..norm })?;
                    }
                }
            }
        }
        // So many that some teams only reduce.
        let many = Case { rows: Rows::Strange, ..Case::new(DType::BF16, 301, 7168) };
        rank.fuse_by_all(Case { from: From::Experts(2), ..many })?;
        for form in forms {
            rank.fuse_by_all(Case { form: Some(form), ..many })?;
        }
        Ok(())
    });
}

#[test]
fn strange_numbers_have_the_hosts_bits() {
    strange_rows(2);
}

#[test]
fn strange_numbers_have_the_hosts_bits_on_4_gpus() {
    strange_rows(4);
}

/// All at once, one by one, and cut elsewhere: blocks, clusters and algorithms differ, the bits do not.
#[test]
fn a_tokens_bits_do_not_depend_on_the_others() {
    on_gpus(2, |rank| {
        for form in [None, Some(Form::Fp8), Some(Form::Fp8Tokens(TokenRule::Quotient))] {
            for hidden in [1040, 7168, 16_384] {
                let tokens = 70;
                let fused = Fused::new(rank, Case { form, ..Case::new(DType::BF16, tokens, hidden) })?;
                for step in [1, 2, 33, 64, tokens] {
                    fused.reset()?;
                    for first in (0..tokens).step_by(step) {
                        fused.queue_tokens(first, step.min(tokens - first))?;
                    }
                    fused.check()?;
                }
            }
        }
        Ok(())
    });
}

/// More than the lanes take at once.
fn several_pieces(world_size: usize) {
    on_gpus(world_size, |rank| {
        let (tokens, hidden) = (2500, 16_384);
        rank.fuse_by_all(Case::new(DType::BF16, tokens, hidden))?;
        let group = Form::Fp8Groups(128);
        rank.fuse_by_all(Case {
            residual: Residual::InPlace,
            ..Case::quantized(DType::BF16, tokens, hidden, group)
        })?;
        rank.fuse_by_all(Case {
            in_place: Some(InPlace::Norm),
            residual: Residual::InPlace,
            sum_out: false,
            ..Case::new(DType::BF16, tokens, hidden)
        })?;
        let fp4 = Form::NvFp4(ScaleLayout::Swizzled128x4);
        rank.fuse(Case::quantized(DType::F16, 5001, 8192, fp4))?;
        // A number of tokens of which no two pieces are equal, rows that are no multiple of a cache line.
        rank.fuse(Case { from: From::Experts(2), ..Case::new(DType::F32, 9001, 1040) })?;
        rank.fuse(Case { from: SOURCES[4], ..Case::new(DType::BF16, 3001, 7168) })
    });
}

#[test]
fn the_largest_calls() {
    several_pieces(2);
}

#[test]
fn the_largest_calls_on_4_gpus() {
    several_pieces(4);
}

#[test]
fn ranks_may_want_different_things_of_the_sum() {
    on_gpus(2, |rank| {
        let shape = (33, 7168);
        let sum = Case {
            residual: Residual::No,
            norm: Norm::No,
            norm_out: false,
            residual_out: false,
            ..norm(shape)
        };
        let fp8 = Case::quantized(DType::BF16, shape.0, shape.1, Form::Fp8Groups(128));
        let pre_norm = Case { pre_norm: Norm::Weighted, bias: true, ..norm(shape) };
        for wishes in [[norm(shape), sum], [sum, fp8], [fp8, pre_norm], [fp8, norm(shape)]] {
            rank.fuse_by_all(wishes[rank.comm.rank()])?;
        }
        Ok(())
    });
}

fn norm((tokens, hidden): (usize, usize)) -> Case {
    Case::new(DType::BF16, tokens, hidden)
}

#[test]
fn nothing_is_done_for_no_tokens() {
    on_gpus(2, |rank| {
        rank.fuse_by_all(norm((0, 7168)))?;
        rank.fuse(norm((1, 7168)))
    });
}

#[test]
fn arguments_that_make_no_sense_on_gpus_are_refused() {
    on_gpus(2, |rank| {
        refuses(rank, 0, 8 * 7168, None)?;
        refuses(rank, 2, 8 * 7168, Some("a multiple of 16 bytes"))?;
        refuses(rank, 0, 8 * 7169, Some("hidden size"))?;
        let (input, mut sum) = (vec![1.0f32; 64], vec![0.0f32; 64]);
        let call =
            FusedAllReduce::of(TensorView::new(&input, &[4, 16])?).sum_out(TensorViewMut::from(&mut sum));
        // SAFETY: nothing is queued.
        let outcome = unsafe { rank.collectives.all_reduce_fused(call, rank.stream.borrow()) };
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("on host") && text.contains("serve cuda:"), "{text}");
        rank.fuse(norm((4, 64)))
    });
}

/// Fuses eight tokens, whose sum is written `behind` bytes behind the beginning of some memory.
fn refuses(rank: &Rank, behind: usize, elements: usize, why: Option<&str>) -> Outcome {
    let (from, to) = (rank.allocate(2 * elements)?, rank.allocate(2 * elements + 16)?);
    let at = |address: u64| address as usize as *mut u8;
    let (shape, device) = ([8, elements / 8], Device::Cuda(rank.comm.rank() as u32));
    // SAFETY: the memory lives until the stream is done.
    let outcome = unsafe {
        let input = TensorView::from_raw_parts(at(from.pointer().0), DType::BF16, &shape, None, device)?;
        let sum = at(to.pointer().0 + behind as u64);
        let sum = TensorViewMut::from_raw_parts(sum, DType::BF16, &shape, None, device)?;
        rank.collectives.all_reduce_fused(
            FusedAllReduce::of(input).sum_out(sum).algorithm(Algorithm::OneShot),
            rank.stream.borrow(),
        )
    };
    rank.stream.borrow().synchronize()?;
    match (outcome, why) {
        (Ok(()), None) => Ok(()),
        (Err(error), Some(why)) if error.to_string().contains(why) => Ok(()),
        (outcome, _) => Err(format!("{behind} behind, {elements} elements: {outcome:?}").into()),
    }
}

/// Weights, contributions, and the largest magnitudes of a block's groups; with more rows than there are teams.
#[test]
fn what_blocks_keep_serves_several_rows_on_2_gpus() {
    on_gpus(2, |rank| {
        let norm = Case::new(DType::BF16, sized(400, 30), 7168);
        rank.fuse_by_all(Case { residual: Residual::No, residual_out: false, ..norm })?;
        rank.fuse_by_all(Case { from: From::Experts(2), tokens: 7, hidden: 1024, ..norm })?;
        rank.fuse_by_all(Case::quantized(DType::BF16, sized(400, 60), 768, Form::Fp8Groups(12)))
    });
}

#[test]
fn rows_of_one_vector() {
    on_gpus(2, |rank| {
        rank.fuse_by_all(Case::new(DType::F32, 3, 4))?;
        rank.fuse_by_all(Case::quantized(DType::BF16, 1000, 8, Form::Fp8Groups(8)))
    });
}
