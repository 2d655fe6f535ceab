//! Elements of any dtype.

use antiphon_tensor::{DType, Device, TensorView, TensorViewMut, bf16, f16};
use antiphon_testing::{Tensor, UNWRITTEN, backend::Backend};

/// What a tensor holds, on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array {
    /// Words, so that elements are aligned.
    words: Vec<u64>,
    bytes: usize,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Array {
    pub fn holding(dtype: DType, shape: &[usize], content: &[u8]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        assert_eq!(content.len(), bytes);
        let mut padded = content.to_vec();
        padded.resize(bytes.next_multiple_of(8), 0);
        let words = padded.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
        Self { words: words.collect(), bytes, dtype, shape: shape.to_vec() }
    }

    pub fn unwritten(dtype: DType, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self::holding(dtype, shape, &vec![UNWRITTEN; bytes])
    }

    /// A tensor of a rank that holds it.
    pub fn on<B: Backend>(&self, rank: &B) -> Tensor<B> {
        Tensor::holding(rank, self.dtype, &self.shape, &self.content())
    }

    pub fn view(&self) -> TensorView<'_> {
        let data = self.words.as_ptr().cast::<u8>().cast_mut();
        // SAFETY: the words hold as many elements, and are borrowed as long as the view.
        unsafe { TensorView::from_raw_parts(data, self.dtype, &self.shape, None, Device::Host) }.unwrap()
    }

    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let data = self.words.as_mut_ptr().cast::<u8>();
        // SAFETY: as above, exclusively.
        unsafe { TensorViewMut::from_raw_parts(data, self.dtype, &self.shape, None, Device::Host) }.unwrap()
    }

    pub fn content(&self) -> Vec<u8> {
        let mut content: Vec<u8> = self.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        content.truncate(self.bytes);
        content
    }
}

/// An element of a value, rounded to nearest; any NaN is the canonical one.
pub fn element(dtype: DType, value: f64) -> Vec<u8> {
    let single = value as f32;
    match (dtype, value.is_nan()) {
        (DType::F64, true) => 0x7FF8_0000_0000_0000u64.to_ne_bytes().to_vec(),
        (DType::F32, true) => 0x7FC0_0000u32.to_ne_bytes().to_vec(),
        (DType::F16, true) => 0x7E00u16.to_ne_bytes().to_vec(),
        (DType::BF16, true) => 0x7FC0u16.to_ne_bytes().to_vec(),
        (DType::F64, false) => value.to_ne_bytes().to_vec(),
        (DType::F32, false) => single.to_ne_bytes().to_vec(),
        (DType::F16, false) => f16::from_f32(single).to_ne_bytes().to_vec(),
        (DType::BF16, false) => bf16::from_f32(single).to_ne_bytes().to_vec(),
        (dtype, _) => vec![value as i64 as u8; dtype.size()],
    }
}

/// The value of an element of a floating-point type.
pub fn value(dtype: DType, element: &[u8]) -> f64 {
    match dtype {
        DType::F64 => f64::from_ne_bytes(element.try_into().unwrap()),
        DType::F32 => f64::from(f32::from_ne_bytes(element.try_into().unwrap())),
        DType::F16 => f16::from_ne_bytes(element.try_into().unwrap()).to_f64(),
        DType::BF16 => bf16::from_ne_bytes(element.try_into().unwrap()).to_f64(),
        other => panic!("{other} is no float"),
    }
}

/// A sum as the definition has it: of two f64 in f64, of others in f32.
pub fn add(dtype: DType, a: f64, b: f64) -> f64 {
    match dtype {
        DType::F64 => a + b,
        _ => f64::from(a as f32 + b as f32),
    }
}
