//! Inputs, reproducible and chosen to find what is wrong, and what reductions of them must give.

use std::ops::Range;

use antiphon_collectives::{ReduceOp, reference::reduce_element};
use antiphon_device::host::reduce::reduce;
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut, with_dtype};

/// A small reproducible generator (SplitMix64).
pub struct Bits(u64);

impl Bits {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD129_0B26_8A4C_95A5))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Elements of some dtype, of which only the bits count.
#[derive(Clone)]
pub struct Values {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Values {
    pub fn from_bytes(dtype: DType, bytes: Vec<u8>) -> Self {
        assert!(bytes.len().is_multiple_of(dtype.size()));
        Self { dtype, bytes }
    }

    /// Elements whose bits are the lowest of each number.
    pub fn from_bits(dtype: DType, bits: impl IntoIterator<Item = u64>) -> Self {
        let bytes = bits.into_iter().flat_map(|bits| bits.to_le_bytes().into_iter().take(dtype.size()));
        Self { dtype, bytes: bytes.collect() }
    }

    /// Arbitrary bit patterns: numbers of every magnitude, subnormals, infinities, NaNs with payloads.
    pub fn any_bits(dtype: DType, seed: u64, count: usize) -> Self {
        let (mut bits, mut bytes) = (Bits::new(seed), vec![0; count * dtype.size()]);
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&bits.next().to_le_bytes()[..part.len()]);
        }
        Self { dtype, bytes }
    }

    /// Numbers that no operator drives out of the type's range in the middle of a reduction of eight (but wrapping
    /// integers), so that an f64 reference is close at every step. Those of i64 are exact in f64.
    pub fn moderate(dtype: DType, seed: u64, count: usize) -> Self {
        let mut bits = Bits::new(seed);
        let number = |bits: u64| match dtype {
            dtype if dtype.is_float() => f64::from(bits as i32) / 2f64.powi(29), // −4 to 4
            DType::I64 => (bits as i64 >> 14) as f64,
            DType::I32 => f64::from(bits as i32),
            DType::I8 => f64::from(bits as i8),
            _ => f64::from(bits as u8),
        };
        with_dtype!(dtype, T => {
            Self::of(&(0..count).map(|_| <T as Element>::from_f64(number(bits.next()))).collect::<Vec<T>>())
        })
    }

    pub fn of<T: Element>(elements: &[T]) -> Self {
        Self { dtype: T::DTYPE, bytes: TensorView::from(elements).as_bytes().unwrap().to_vec() }
    }

    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        assert_eq!(T::DTYPE, self.dtype);
        let mut elements = vec![T::default(); self.len()];
        TensorViewMut::from(&mut elements).as_mut_bytes().unwrap().copy_from_slice(&self.bytes);
        elements
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn first(&self, count: usize) -> Self {
        Self { dtype: self.dtype, bytes: self.bytes[..count * self.dtype.size()].to_vec() }
    }

    /// These of the elements.
    pub fn part(&self, elements: std::ops::Range<usize>) -> Self {
        let size = self.dtype.size();
        Self { dtype: self.dtype, bytes: self.bytes[elements.start * size..elements.end * size].to_vec() }
    }

    /// The same with other elements from `start` on.
    pub fn with_part(mut self, start: usize, part: &Self) -> Self {
        self.bytes[start * self.dtype.size()..][..part.bytes.len()].copy_from_slice(&part.bytes);
        self
    }

    pub fn to_f64(&self) -> Vec<f64> {
        with_dtype!(self.dtype, T => self.to_vec::<T>().into_iter().map(|x| x.to_f64()).collect())
    }

    /// The block of a rank, of a row of blocks for `world` ranks.
    pub fn block(&self, rank: usize, world: usize) -> Self {
        let block = self.bytes.len() / world;
        Self { dtype: self.dtype, bytes: self.bytes[rank * block..][..block].to_vec() }
    }

    /// Some of the elements.
    pub fn range(&self, elements: Range<usize>) -> Self {
        let size = self.dtype.size();
        Self { dtype: self.dtype, bytes: self.bytes[elements.start * size..elements.end * size].to_vec() }
    }

    /// With other elements from `start` on.
    pub fn with(mut self, start: usize, others: &Self) -> Self {
        self.bytes[start * self.dtype.size()..][..others.bytes.len()].copy_from_slice(&others.bytes);
        self
    }

    pub fn concat(parts: &[Self]) -> Self {
        let bytes = parts.iter().flat_map(|part| &part.bytes).copied().collect();
        Self { dtype: parts[0].dtype, bytes }
    }

    /// What the promise "same bits" refers to: the single-process reduction in rank order, where all ranks are on one node; else that of
    /// each node's ranks, and then of the nodes' results, in the order of the nodes' first ranks. `nodes` has the node of each rank.
    pub fn reduced(op: ReduceOp, contributions: &[Self], nodes: &[u32]) -> Self {
        assert_eq!(contributions.len(), nodes.len());
        let is_one = nodes.iter().all(|node| *node == nodes[0]);
        match contributions[0].dtype {
            // The order of integers does not matter.
            dtype if is_one || !dtype.is_float() => Self::reduced_in_order(op, contributions),
            DType::F64 => Self::reduced_by_node::<f64>(op, contributions, nodes),
            _ => Self::reduced_by_node::<f32>(op, contributions, nodes),
        }
    }

    /// The reduction by node, with accumulators of type `A`.
    fn reduced_by_node<A: Element>(op: ReduceOp, contributions: &[Self], nodes: &[u32]) -> Self {
        let sum = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        let wide: Vec<Self> = contributions.iter().map(|values| values.to::<A>()).collect();
        let mut of_nodes: Vec<(u32, Vec<Self>)> = Vec::new();
        for (values, &node) in wide.into_iter().zip(nodes) {
            match of_nodes.iter_mut().find(|(seen, _)| *seen == node) {
                Some((_, mates)) => mates.push(values),
                None => of_nodes.push((node, vec![values])),
            }
        }
        let of_nodes: Vec<Self> =
            of_nodes.into_iter().map(|(_, mates)| Self::reduced_in_order(sum, &mates)).collect();
        let mut all = Self::reduced_in_order(sum, &of_nodes).to_vec::<A>();
        if op == ReduceOp::Avg {
            // f64 is so much wider than f32 that the quotient is rounded as if once.
            let mean = |sum: A| A::from_f64(sum.to_f64() / contributions.len() as f64);
            all.iter_mut().for_each(|sum| *sum = mean(*sum));
        }
        let dtype = contributions[0].dtype;
        // A reduction of one source rounds, and makes NaNs canonical.
        with_dtype!(dtype, T => Self::reduced_in_order(ReduceOp::Sum, &[Self::of(&all).to::<T>()]))
    }

    /// As elements of another type; f64 holds all floats of the types here.
    fn to<T: Element>(&self) -> Self {
        with_dtype!(self.dtype, F => {
            Self::of(&self.to_vec::<F>().into_iter().map(|x| T::from_f64(x.to_f64())).collect::<Vec<T>>())
        })
    }

    fn reduced_in_order(op: ReduceOp, contributions: &[Self]) -> Self {
        with_dtype!(contributions[0].dtype, T => {
            let contributions: Vec<Vec<T>> = contributions.iter().map(Self::to_vec).collect();
            let slices: Vec<&[T]> = contributions.iter().map(Vec::as_slice).collect();
            let mut result = vec![T::default(); slices[0].len()];
            reduce(op, &mut result, &slices);
            Self::of(&result)
        })
    }

    /// Panics unless this is what the reference says of a reduction. It knows nothing of the library's arithmetic, but
    /// allows only what the rule about accumulating and rounding may cost.
    pub fn assert_is_reduction(&self, op: ReduceOp, contributions: &[Self]) {
        with_dtype!(self.dtype, T => {
            let contributions: Vec<Vec<T>> = contributions.iter().map(Self::to_vec).collect();
            for (i, actual) in self.to_vec::<T>().into_iter().enumerate() {
                let column: Vec<T> = contributions.iter().map(|values| values[i]).collect();
                let expected = reduce_element(op, &column);
                assert!(
                    expected.accepts(actual.to_f64()),
                    "{op} of {column:?} is {actual:?}, which is not within {expected:?}"
                );
            }
        })
    }
}

impl<'v> From<&'v Values> for TensorView<'v> {
    fn from(values: &'v Values) -> Self {
        let (ptr, dtype, shape) = (values.bytes.as_ptr(), values.dtype, [values.len()]);
        // SAFETY: the bytes are borrowed for 'v, and any are valid elements.
        unsafe { Self::from_raw_parts(ptr, dtype, &shape, None, Device::Host) }.unwrap()
    }
}

/// Arbitrary bits for calls that take vectors.
pub fn any_bits<T: Element>(seed: u64, count: usize) -> Vec<T> {
    Values::any_bits(T::DTYPE, seed, count).to_vec()
}

/// The bits of the values at which arithmetic goes wrong.
fn special(dtype: DType) -> Vec<u64> {
    let (exponent, fraction) = match dtype {
        DType::F64 => (11, 52),
        DType::F32 => (8, 23),
        DType::F16 => (5, 10),
        DType::BF16 => (8, 7),
        _ => {
            let lowest = 1u64 << (8 * dtype.size() - 1);
            return vec![0, 1, 2, 3, u64::MAX, u64::MAX - 1, lowest, lowest + 1, lowest - 1, lowest - 2];
        }
    };
    let infinity = ((1u64 << exponent) - 1) << fraction;
    let one = infinity >> 1 & infinity;
    let (least, greatest_subnormal, least_normal) = (1, (1 << fraction) - 1, 1 << fraction);
    let (signalling_nan, quiet_nan) = (infinity | 1, infinity | 5 << (fraction - 3));
    // One and a bit makes ties.
    let numbers = [0, least, greatest_subnormal, least_normal, one, one + 1, infinity - 1];
    let positive = numbers.into_iter().chain([infinity, signalling_nan, quiet_nan]);
    positive.flat_map(|bits| [bits, bits | 1 << (exponent + fraction)]).collect()
}

/// What each rank contributes so that each combination of special values occurs (in the first three ranks; the others
/// go on through the list).
pub fn special_combinations(dtype: DType, world: usize) -> Vec<Values> {
    let special = special(dtype);
    let k = special.len();
    let pick = |rank: usize, i: usize| match rank {
        0..3 => i / k.pow(rank as u32) % k,
        _ => (i * (2 * rank + 1) + i / k) % k,
    };
    let count = k.pow(world.min(3) as u32);
    (0..world).map(|rank| Values::from_bits(dtype, (0..count).map(|i| special[pick(rank, i)]))).collect()
}
