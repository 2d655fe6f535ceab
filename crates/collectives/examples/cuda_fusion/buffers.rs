//! The tensors of a layer, on one GPU.

use antiphon_collectives::cuda::CudaCollectives;
use antiphon_device::cuda::{Context, DeviceMemory, Stream, memory};
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut, bf16};

use crate::timing::Error;

/// Experts of a token; here all of them are on this rank, which has most to add up.
pub const EXPERTS: usize = 8;

/// The tensors of a fused call, allocated once for the largest number of tokens.
pub struct Buffers {
    context: Context,
    hidden: usize,
    pub input: DeviceMemory,
    /// `[EXPERTS, tokens, hidden]`, or `[EXPERTS · tokens, hidden]`.
    pub experts: DeviceMemory,
    pub expert_scales: DeviceMemory,
    pub index: DeviceMemory,
    pub weights: DeviceMemory,
    pub residual: DeviceMemory,
    pub gamma: DeviceMemory,
    pub sum: DeviceMemory,
    pub residual_out: DeviceMemory,
    pub norm: DeviceMemory,
    pub codes: DeviceMemory,
    pub scales: DeviceMemory,
}

impl Buffers {
    pub fn new(
        collectives: &CudaCollectives,
        stream: &Stream,
        hidden: usize,
        most: usize,
    ) -> Result<Self, Error> {
        let context = collectives.context();
        let allocate = |bytes: usize| DeviceMemory::allocate(context, bytes);
        let bytes = 2 * most * hidden;
        let buffers = Self {
            context: context.clone(),
            hidden,
            input: allocate(bytes)?,
            experts: allocate(EXPERTS * bytes)?,
            expert_scales: allocate(4 * EXPERTS * most)?,
            index: allocate(4 * EXPERTS * most)?,
            weights: allocate(2 * EXPERTS * most)?,
            residual: allocate(bytes)?,
            gamma: allocate(2 * hidden)?,
            sum: allocate(bytes)?,
            residual_out: allocate(bytes)?,
            norm: allocate(bytes)?,
            codes: allocate(bytes / 2)?,
            // A byte for each 16 elements, or f32 for a token, in tiles of 128 tokens.
            scales: allocate(most.next_multiple_of(128) * (hidden / 16).next_multiple_of(4))?,
        };
        let Self { input, experts, expert_scales, weights, residual, gamma, .. } = &buffers;
        for (k, memory) in [input, experts, residual, weights, gamma].into_iter().enumerate() {
            fill::<bf16>(memory, stream, collectives.rank() + 10 * k)?;
        }
        fill::<f32>(expert_scales, stream, 0)?;
        Ok(buffers)
    }

    /// Sends each of a token's experts another row.
    pub fn index_rows(&self, stream: &Stream, tokens: usize) -> Result<(), Error> {
        let rows: Vec<i32> =
            (0..EXPERTS * tokens).map(|i| (i % EXPERTS * tokens + i / EXPERTS) as i32).collect();
        Ok(self.index.write(stream, 0, TensorView::from(&rows).as_bytes()?)?)
    }

    /// Makes NaN of every output, so that what is not written is seen.
    pub fn spoil(&self, stream: &Stream) -> Result<(), Error> {
        for memory in [&self.sum, &self.residual_out, &self.norm, &self.codes, &self.scales] {
            // SAFETY: the memory has as many bytes, and outlives the stream's work.
            unsafe { memory::fill(stream.borrow(), memory.pointer(), 0xFF, memory.len()) }?;
        }
        Ok(())
    }

    pub fn read(&self, memory: &DeviceMemory, stream: &Stream, count: usize) -> Result<Vec<bf16>, Error> {
        let mut bytes = vec![0; 2 * count];
        memory.read(stream, 0, &mut bytes)?;
        Ok(bytes
            .chunks_exact(2)
            .map(|pair| bf16::from_bits(u16::from_le_bytes([pair[0], pair[1]])))
            .collect())
    }

    /// The beginning of some memory, as a tensor. Valid as long as the memory, which is the callers' affair.
    pub fn view<'a>(&self, memory: &DeviceMemory, dtype: DType, shape: &[usize]) -> TensorView<'a> {
        // SAFETY: as said; the memory is on this device, and has room for all shapes that are asked for.
        unsafe { TensorView::from_raw_parts(self.start(memory), dtype, shape, None, self.device()) }
            .expect("plain")
    }

    /// [`view`](Self::view), to write into.
    pub fn view_mut<'a>(&self, memory: &DeviceMemory, dtype: DType, shape: &[usize]) -> TensorViewMut<'a> {
        // SAFETY: as for `view`; the stream keeps calls apart.
        unsafe { TensorViewMut::from_raw_parts(self.start(memory), dtype, shape, None, self.device()) }
            .expect("plain")
    }

    /// `[tokens, hidden]`.
    pub fn matrix<'a>(&self, memory: &DeviceMemory, tokens: usize) -> TensorView<'a> {
        self.view(memory, DType::BF16, &[tokens, self.hidden])
    }

    /// [`matrix`](Self::matrix), to write into.
    pub fn matrix_mut<'a>(&self, memory: &DeviceMemory, tokens: usize) -> TensorViewMut<'a> {
        self.view_mut(memory, DType::BF16, &[tokens, self.hidden])
    }

    fn start(&self, memory: &DeviceMemory) -> *mut u8 {
        memory.pointer().0 as usize as *mut u8
    }

    fn device(&self) -> Device {
        Device::Cuda(self.context.device().ordinal())
    }
}

/// Values between -2 and 2 that differ from seed to seed.
fn fill<T: Element>(memory: &DeviceMemory, stream: &Stream, seed: usize) -> Result<(), Error> {
    let value = |i: usize| ((i * 2_654_435_761 + seed * 40_503) % 509) as f64 / 127.0 - 2.0;
    let pattern: Vec<T> = (0..65_521).map(|i| T::from_f64(value(i))).collect();
    let bytes = TensorView::from(&pattern).as_bytes()?.to_vec();
    let values: Vec<u8> = bytes.iter().copied().cycle().take(memory.len()).collect();
    Ok(memory.write(stream, 0, &values)?)
}
