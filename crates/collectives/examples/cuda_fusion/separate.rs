//! The kernels of `norm.cuh`.

use antiphon_device::cuda::{
    Architecture, Context, DevicePointer, Function, KernelCache, LaunchConfig, Module, Nvrtc, Program,
    StreamRef,
};

use crate::timing::Error;

/// Vectors of 16 bytes that a thread has. Which is fastest depends on the number of rows.
pub const PER_THREAD: [u32; 3] = [1, 2, 4];

/// Residual and norm, with FP8 and without, for each of [`PER_THREAD`].
pub struct Separate {
    hidden: usize,
    norm: [Function; 3],
    fp8: [Function; 3],
}

/// What such a kernel works on.
#[derive(Clone, Copy)]
pub struct Rows {
    pub tokens: usize,
    pub sum: DevicePointer,
    pub residual: DevicePointer,
    pub gamma: DevicePointer,
    pub residual_out: DevicePointer,
    /// The norm, or its codes.
    pub out: DevicePointer,
    pub eps: f32,
    /// That the norm is multiplied by for FP8.
    pub factor: f32,
}

fn program(hidden: usize, architecture: Architecture) -> Program {
    Program::new("norm.cuh", include_str!("norm.cuh"), architecture).define("HIDDEN", hidden)
}

impl Separate {
    /// The kernel for bf16 rows of `hidden` elements.
    pub fn new(context: &Context, hidden: usize) -> Result<Self, Error> {
        let program = program(hidden, context.device().architecture()?);
        let cubin = KernelCache::open().compile(Nvrtc::load()?, &program)?;
        let module = Module::load(context, &cubin.bytes)?;
        let [norm, fp8] = ["norm", "fp8"].map(|kind| {
            let [a, b, c] = PER_THREAD.map(|per| module.function(&format!("{kind}_{per}")));
            Ok::<_, Error>([a?, b?, c?])
        });
        Ok(Self { hidden, norm: norm?, fp8: fp8? })
    }

    /// # Safety
    /// The tensors of `rows` live until the stream has passed the launch.
    pub unsafe fn launch(
        &self,
        fp8: bool,
        variant: usize,
        rows: &Rows,
        stream: StreamRef<'_>,
    ) -> Result<(), antiphon_device::cuda::CudaError> {
        let kernel = if fp8 { &self.fp8[variant] } else { &self.norm[variant] };
        let threads = self.hidden as u32 / 8 / PER_THREAD[variant];
        let config = LaunchConfig::new(rows.tokens as u32, threads).programmatic();
        let Rows { sum, residual, gamma, residual_out, out, eps, factor, .. } = rows;
        let arguments = [
            sum.into(),
            residual.into(),
            gamma.into(),
            residual_out.into(),
            out.into(),
            eps.into(),
            factor.into(),
        ];
        // SAFETY: passed on; the arguments are those of NORM in norm.cuh.
        unsafe { kernel.launch(stream, &config, &arguments) }
    }
}
