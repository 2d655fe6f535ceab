//! All-reduce with what follows it in a model: the residual, the RMS norm, and FP8. Behind NCCL's all-reduce a separate kernel does
//! the rest.

use std::rc::Rc;

use antiphon::{
    collectives::{
        StreamCollectives,
        fusion::{FusedAllReduce, Quantization, Scale},
    },
    device::{ReduceOp, cuda::LaunchConfig},
    operation::{Call, Operation},
    tensor::DType,
};

use super::{
    Contenders, Rank,
    collectives::Library,
    tensors::{Plain, Tensor},
    timing,
};
use crate::Result;

const EPS: f32 = 1e-5;
/// Threads of a block of the kernels `add_norm` and `add_norm_fp8`, as kernels.cuh has them.
const NORM_THREADS: u32 = 448;

/// The tensors of a rank.
struct Tensors {
    input: Tensor,
    output: Tensor,
    residual: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    codes: Tensor,
}

/// The contenders for rows of a dtype, which they store as FP8 where `is_fp8`.
pub(super) fn contenders<'a>(
    rank: &'a Rank<'a>,
    is_fp8: bool,
    dtype: DType,
    whole: [usize; 2],
) -> Result<Contenders<'a>> {
    let Rank { context, stream, ours, .. } = *rank;
    ours.prepare(dtype, ReduceOp::Sum)?;
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(context, stream, dtype, shape);
    let tensors = Rc::new(Tensors {
        input: zeros(dtype, &whole)?,
        output: zeros(dtype, &whole)?,
        residual: zeros(dtype, &whole)?,
        residual_out: zeros(dtype, &whole)?,
        weight: zeros(dtype, &whole[1..])?,
        codes: zeros(DType::U8, &whole)?,
    });
    let [norm, norm_fp8] = timing::kernels(context, ["add_norm", "add_norm_fp8"])?;
    let of = tensors.clone();
    let fused = Plain::unchecked("fused", move |stream| {
        let tensors = &of;
        let normed = FusedAllReduce::of(tensors.input.view())
            .residual(tensors.residual.view())
            .residual_out(tensors.residual_out.view_mut())
            .rms_norm(Some(tensors.weight.view()), EPS);
        let form = Quantization::Fp8 { scale: Scale::Value(1.0) };
        let call = match is_fp8 {
            true => normed.quantize(form, tensors.codes.view_mut(), None),
            false => normed.norm_out(tensors.output.view_mut()),
        };
        // SAFETY: the driver waits for the stream before it drops the contender, which has the tensors; here and below.
        Ok(unsafe { ours.all_reduce_fused(call, stream) }?)
    });
    let by_nccl = rank.nccl.map(Library::Nccl).map(|nccl| {
        Plain::unchecked("nccl", move |stream| {
            let sum = Call::new(Operation::AllReduce);
            // SAFETY: as above.
            unsafe { nccl.call(&sum, &tensors.input.view(), &mut tensors.output.view_mut(), stream) }?;
            let (function, out) = match is_fp8 {
                true => (&norm_fp8, tensors.codes.pointer()),
                false => (&norm, tensors.output.pointer()),
            };
            let [sum, residual, weight] =
                [&tensors.output, &tensors.residual_out, &tensors.weight].map(Tensor::pointer);
            let config = LaunchConfig::new(whole[0] as u32, NORM_THREADS);
            let arguments =
                [(&sum).into(), (&residual).into(), (&weight).into(), (&EPS).into(), (&out).into()];
            // SAFETY: the kernel's five arguments: tensors of as many rows.
            Ok(unsafe { function.launch(stream, &config, &arguments) }?)
        })
    });
    Ok(Contenders { ours: vec![fused], nccl: by_nccl })
}
