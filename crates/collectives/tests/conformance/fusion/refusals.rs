//! Calls that make no sense: refused before anything happens, in these words.

use antiphon_collectives::{
    Collectives, ReduceOp,
    fusion::{FusedAllReduce, InPlace, Operand, Quantization, Scale, Source},
};
use antiphon_tensor::{DType, Device, ScaleLayout, TensorView, TensorViewMut, bf16, quantize::TokenRule};

use crate::harness::CollectiveBackend;

conformance_on_host! {
    sources_of_the_wrong_shape: any_dtype, [world_1 world_2];
    rows_that_are_no_whole_vectors: any_dtype, [world_1];
    calls_without_an_output: any_dtype, [world_1];
    tensors_of_the_wrong_length: any_dtype, [world_2];
    tensors_of_the_wrong_dtype: any_dtype, [world_1];
    tensors_that_cannot_be_used: any_dtype, [world_1];
    codes_and_scales_that_are_too_short: any_dtype, [world_1];
    forms_that_do_not_fit: any_dtype, [world_1];
}

/// Refuses calls on every rank of a world, after which the ranks still work together.
fn refusing<B: CollectiveBackend>(
    world: usize,
    calls: impl Fn(&dyn Fn(FusedAllReduce<Operand<'_>>, &str)) + Sync,
) {
    B::run(world, |comm: B| {
        calls(&|call, text| {
            let error = comm.all_reduce_fused(call).expect_err(text).to_string();
            assert_eq!(error, format!("all_reduce_fused: {text}"));
        });
        let mut total = [1i32];
        comm.all_reduce_in_place(&mut total, ReduceOp::Sum).unwrap();
        assert_eq!(total, [world as i32]);
    });
}

static ONES: [f32; 32] = [1.0; 32];
static HALVES: [bf16; 32] = [bf16::ONE; 32];
static INDEX: [i32; 4] = [0; 4];

fn ones(shape: &[usize]) -> TensorView<'static> {
    TensorView::new(&ONES[..shape.iter().product()], shape).unwrap()
}

/// A source, and an output for it.
fn of<'a>(source: Source<TensorView<'a>>, sum: &'a mut [f32; 16]) -> FusedAllReduce<Operand<'a>> {
    FusedAllReduce::of_source(source).sum_out(sum)
}

/// Two tokens of eight elements.
fn plain(sum: &mut [f32; 16]) -> FusedAllReduce<Operand<'_>> {
    of(Source::Tensor { input: ones(&[2, 8]) }, sum)
}

/// The same, with an output in its place.
fn in_place(tensor: &mut [f32; 16], output: InPlace) -> FusedAllReduce<Operand<'_>> {
    FusedAllReduce::of_in_place(TensorViewMut::new(tensor, &[2, 8]).unwrap(), output)
}

/// The same to be normed and quantised.
fn quantized<'a>(
    form: Quantization<TensorView<'a>>,
    codes: &'a mut [u8],
    scales: Option<&'a mut [u8]>,
) -> FusedAllReduce<Operand<'a>> {
    FusedAllReduce::of(TensorView::new(&HALVES, &[2, 16]).unwrap()).rms_norm(None, 0.0).quantize(
        form,
        codes,
        scales.map(TensorViewMut::from),
    )
}

fn nothing() -> [f32; 16] {
    [0.0; 16]
}

fn sources_of_the_wrong_shape<B: CollectiveBackend>(world: usize) {
    let reduction = |experts, scales, shared| Source::MoeReduction { experts, scales, shared };
    let finalize = |rows, index| Source::MoeFinalize {
        rows,
        index,
        scales: Some(ones(&[3])),
        shared: None,
        routed_scaling: 1.0,
    };
    let index = TensorView::new(&INDEX, &[2, 2]).unwrap();
    refusing::<B>(world, |refuse| {
        let wrong = Source::Tensor { input: ones(&[16]) };
        refuse(of(wrong, &mut nothing()), "the input must be [tokens, hidden], not [16]");
        let wrong = reduction(ones(&[2, 2, 4]), ones(&[4]), ones(&[8]));
        refuse(of(wrong, &mut nothing()), "the shared expert's output must be [tokens, hidden], not [8]");
        let wrong = reduction(ones(&[2, 8]), ones(&[2]), ones(&[2, 8]));
        refuse(
            of(wrong, &mut nothing()),
            "the experts' outputs must be [experts, tokens, hidden], not [2, 8]",
        );
        let wrong = reduction(ones(&[1, 4, 4]), ones(&[2]), ones(&[2, 8]));
        refuse(of(wrong, &mut nothing()), "the experts' outputs must be [experts, 2, 8], not [1, 4, 4]");
        let wrong = reduction(ones(&[1, 2, 8]), ones(&[3]), ones(&[2, 8]));
        refuse(
            of(wrong, &mut nothing()),
            "the experts' scales has 3 elements, expected 2 (of 2 tokens of 8 elements)",
        );
        let wrong = finalize(ones(&[16]), index);
        refuse(
            of(wrong, &mut nothing()),
            "the rows and index must be two dimensions each, not [16] and [2, 2]",
        );
        let wrong = finalize(ones(&[2, 8]), index);
        refuse(
            of(wrong, &mut nothing()),
            "the experts' scales has 3 elements, expected 4 (of 2 tokens of 8 elements)",
        );
    });
}

fn rows_that_are_no_whole_vectors<B: CollectiveBackend>(world: usize) {
    refusing::<B>(world, |refuse| {
        let of_6 = FusedAllReduce::of(ones(&[2, 6]));
        refuse(of_6, "the hidden size must be a multiple of 4 elements of f32, not 6");
        let of_12 = FusedAllReduce::of(TensorView::new(&HALVES[..24], &[2, 12]).unwrap());
        refuse(of_12, "the hidden size must be a multiple of 8 elements of bf16, not 12");
        let of_0 = FusedAllReduce::of(ones(&[2, 0]));
        refuse(of_0, "the hidden size must be a multiple of 4 elements of f32, not 0");
        let endless = FusedAllReduce::of(ones(&[0, 1 << 40]));
        refuse(endless, "the shape must be less than 0 × 1099511627776");
    });
}

fn calls_without_an_output<B: CollectiveBackend>(world: usize) {
    refusing::<B>(world, |refuse| {
        let call = || FusedAllReduce::of(ones(&[2, 8]));
        refuse(call(), "the outputs must be at least one");
        refuse(call().rms_norm(None, 0.0).residual(ones(&[2, 8])), "the outputs must be at least one");
        let missing =
            "the outputs must be a norm for norm_out, inverse_rms_out and codes, as no rms_norm is asked for";
        refuse(call().norm_out(&mut nothing()), missing);
        refuse(call().inverse_rms_out(&mut [0f32; 2]), missing);
        refuse(
            call().quantize(Quantization::Fp8Tokens { rule: TokenRule::default() }, &mut [0u8; 16], None),
            missing,
        );
        let twice = "the residual must be given once: in place, or apart from where the sum with it goes";
        refuse(call().residual_in_place(&mut nothing()).residual_out(&mut nothing()), twice);
        refuse(call().residual(&ONES[..16]).residual_in_place(&mut nothing()), twice);
        refuse(in_place(&mut nothing(), InPlace::Residual).residual_in_place(&mut nothing()), twice);
        refuse(in_place(&mut nothing(), InPlace::Norm), missing);
        let twice = "the outputs must be given once: in the place of the input, or apart from it";
        refuse(in_place(&mut nothing(), InPlace::Sum).sum_out(&mut nothing()), twice);
        refuse(in_place(&mut nothing(), InPlace::Residual).residual_out(&mut nothing()), twice);
        refuse(in_place(&mut nothing(), InPlace::Norm).rms_norm(None, 0.0).norm_out(&mut nothing()), twice);
    });
}

fn tensors_of_the_wrong_length<B: CollectiveBackend>(world: usize) {
    let row = |which: &str| format!("the {which} has 9 elements, expected 8 (of 2 tokens of 8 elements)");
    let matrix =
        |which: &str| format!("the {which} has 15 elements, expected 16 (of 2 tokens of 8 elements)");
    refusing::<B>(world, |refuse| {
        let (nine, short) = (ones(&[9]), ones(&[15]));
        refuse(plain(&mut nothing()).bias(nine), &row("bias"));
        refuse(plain(&mut nothing()).pre_norm(Some(nine), 0.0), &row("pre-norm weight"));
        refuse(plain(&mut nothing()).rms_norm(Some(nine), 0.0), &row("weight"));
        refuse(plain(&mut nothing()).residual(short), &matrix("residual"));
        refuse(plain(&mut nothing()).sum_out(&mut [0f32; 15]), &matrix("sum_out"));
        refuse(plain(&mut nothing()).residual_out(&mut [0f32; 15]), &matrix("residual_out"));
        refuse(plain(&mut nothing()).residual_in_place(&mut [0f32; 15]), &matrix("residual"));
        refuse(plain(&mut nothing()).rms_norm(None, 0.0).norm_out(&mut [0f32; 15]), &matrix("norm_out"));
        refuse(
            plain(&mut nothing()).rms_norm(None, 0.0).inverse_rms_out(&mut [0f32; 3]),
            "the inverse_rms_out has 3 elements, expected 2 (of 2 tokens of 8 elements)",
        );
    });
}

fn tensors_of_the_wrong_dtype<B: CollectiveBackend>(world: usize) {
    refusing::<B>(world, |refuse| {
        let integers = TensorView::new(&INDEX, &[1, 4]).unwrap();
        refuse(FusedAllReduce::of(integers).sum_out(&mut [0i32; 4]), "the dtype i32 cannot be reduced");
        refuse(plain(&mut nothing()).bias(&HALVES[..8]), "the bias must be elements of f32, not bf16");
        refuse(
            plain(&mut nothing()).residual_out(&mut [bf16::ZERO; 16]),
            "the residual_out must be elements of f32, not bf16",
        );
        let finalize = Source::MoeFinalize {
            rows: ones(&[2, 8]),
            index: ones(&[2, 1]),
            scales: None,
            shared: None,
            routed_scaling: 1.0,
        };
        refuse(of(finalize, &mut nothing()), "the index must be elements of i32, not f32");
        let scale = Scale::Tensor(TensorView::from(&HALVES[..1]));
        refuse(
            quantized(Quantization::Fp8 { scale }, &mut [0; 32], None),
            "the scale must be elements of f32, not bf16",
        );
    });
}

fn tensors_that_cannot_be_used<B: CollectiveBackend>(world: usize) {
    refusing::<B>(world, |refuse| {
        let strided = ones(&[8, 2]).transpose(0, 1).unwrap();
        refuse(
            of(Source::Tensor { input: strided }, &mut nothing()),
            "input: a tensor of shape [2, 8] with strides [1, 2] is not contiguous: \
             make it contiguous (row-major) first",
        );
        refuse(
            plain(&mut nothing()).residual(strided).bias(ones(&[8])),
            "residual: a tensor of shape [2, 8] with strides [1, 2] is not contiguous: \
             make it contiguous (row-major) first",
        );
        let (at, elsewhere) = (ONES.as_ptr().cast(), Device::Cuda(77));
        // SAFETY: the memory is refused for where it is said to be, and never touched.
        let there = unsafe { TensorView::from_raw_parts(at, DType::F32, &[16], None, elsewhere) }.unwrap();
        refuse(
            plain(&mut nothing()).residual(there),
            "the residual is on cuda:77, these collectives serve host",
        );
    });
}

fn codes_and_scales_that_are_too_short<B: CollectiveBackend>(world: usize) {
    let (scale, layout) = (Scale::Value(1.0), ScaleLayout::Swizzled128x4);
    refusing::<B>(world, |refuse| {
        let fp8 = Quantization::Fp8 { scale };
        refuse(quantized(fp8, &mut [0; 31], None), "the codes must be at least 32 bytes, not 31");
        let fp4 = Quantization::NvFp4 { scale, layout };
        refuse(quantized(fp4, &mut [0; 15], None), "the codes must be at least 16 bytes, not 15");
        refuse(
            quantized(fp4, &mut [0; 16], Some(&mut [0; 511])),
            "the scales must be at least 512 bytes, not 511",
        );
        refuse(quantized(fp4, &mut [0; 16], None), "the scales must be 512 bytes, not nothing");
        let tokens = Quantization::Fp8Tokens { rule: TokenRule::default() };
        refuse(
            quantized(tokens, &mut [0; 32], Some(&mut [0; 7])),
            "the scales must be at least 8 bytes, not 7",
        );
        let groups = Quantization::Fp8Groups { group: 8 };
        refuse(quantized(groups, &mut [0; 32], None), "the scales must be 8 bytes, not nothing");
    });
}

fn forms_that_do_not_fit<B: CollectiveBackend>(world: usize) {
    let fp4 = Quantization::NvFp4 { scale: Scale::Value(1.0), layout: ScaleLayout::Linear };
    let groups = |group| Quantization::Fp8Groups { group };
    refusing::<B>(world, |refuse| {
        let mut sum = nothing();
        let f32s = plain(&mut sum).rms_norm(None, 0.0);
        refuse(f32s.quantize(fp4, &mut [0u8; 8], None), "the dtype must be f16 or bf16 for FP4, not f32");
        let of_24 = FusedAllReduce::of(TensorView::new(&HALVES[..24], &[1, 24]).unwrap()).rms_norm(None, 0.0);
        refuse(
            of_24.quantize(fp4, &mut [0u8; 12], None),
            "codes: rows of 24 elements do not divide into blocks of 16",
        );
        for group in [0, 12] {
            refuse(
                quantized(groups(group), &mut [0; 32], None),
                &format!("codes: rows of 16 elements do not divide into blocks of {group}"),
            );
        }
        refuse(
            quantized(groups(24), &mut [0; 32], None),
            "codes: rows of 16 elements do not divide into blocks of 24",
        );
        let scale = Scale::Tensor(ones(&[2]));
        refuse(
            quantized(Quantization::Fp8 { scale }, &mut [0; 32], None),
            "the scale has 2 elements, expected 1 (of 2 tokens of 16 elements)",
        );
    });
}
