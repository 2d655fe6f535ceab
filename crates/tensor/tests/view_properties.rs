//! Views against a naive model: a list of all elements in row-major order.
//!
//! Every element of the memory holds its own position, so the value at an index *is* the offset that the index means.

use antiphon_tensor::{DType, Device, Shape, TensorError, TensorView, TensorViewMut};
use proptest::prelude::*;

/// All indices of a shape in row-major order.
fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |prefixes, &size| {
        let extend =
            |prefix: &Vec<usize>| (0..size).map(|at| [&prefix[..], &[at]].concat()).collect::<Vec<_>>();
        prefixes.iter().flat_map(extend).collect()
    })
}

/// What an index means, added up.
fn offset(index: &[usize], strides: &[isize]) -> isize {
    index.iter().zip(strides).map(|(&at, &stride)| at as isize * stride).sum()
}

/// A tensor as the list of its elements.
#[derive(Clone, Debug, PartialEq)]
struct Naive {
    shape: Vec<usize>,
    elements: Vec<f64>,
}

impl Naive {
    fn of(view: TensorView<'_>) -> Naive {
        let elements = indices(view.shape()).iter().map(|index| view.get_f64(index).unwrap()).collect();
        Naive { shape: view.shape().to_vec(), elements }
    }

    fn at(&self, index: &[usize]) -> f64 {
        self.elements[index.iter().zip(&self.shape).fold(0, |row, (at, size)| row * size + at)]
    }

    /// The tensor of this shape whose elements are those of `self` at the index that `from` gives.
    fn gather(&self, shape: Vec<usize>, from: impl Fn(&[usize]) -> Vec<usize>) -> Naive {
        Naive { elements: indices(&shape).iter().map(|index| self.at(&from(index))).collect(), shape }
    }

    fn apply(&self, step: &Step) -> Naive {
        let mut shape = self.shape.clone();
        match *step {
            Step::Narrow(dim, start, len) => {
                shape[dim] = len;
                self.gather(shape, |index| {
                    let mut index = index.to_vec();
                    index[dim] += start;
                    index
                })
            }
            Step::Select(dim, at) => {
                shape.remove(dim);
                self.gather(shape, |index| [&index[..dim], &[at], &index[dim..]].concat())
            }
            Step::Transpose(first, second) => {
                shape.swap(first, second);
                self.gather(shape, |index| {
                    let mut index = index.to_vec();
                    index.swap(first, second);
                    index
                })
            }
            Step::Reshape(ref shape) => Naive { shape: shape.clone(), elements: self.elements.clone() },
        }
    }

    /// Whether the elements lie side by side, by looking at all of them.
    fn is_contiguous(&self) -> bool {
        self.elements.windows(2).all(|pair| pair[1] == pair[0] + 1.0)
    }

    /// Whether some strides give these elements: those that the first step in each dimension shows, or none do.
    fn has_strides(&self) -> bool {
        if self.elements.is_empty() {
            return true;
        }
        let origin = vec![0; self.shape.len()];
        let unit = |dim: usize| {
            let mut index = origin.clone();
            index[dim] = 1;
            index
        };
        let stride = |dim| if self.shape[dim] > 1 { self.at(&unit(dim)) - self.at(&origin) } else { 0.0 };
        let strides: Vec<isize> = (0..self.shape.len()).map(|dim| stride(dim) as isize).collect();
        indices(&self.shape)
            .iter()
            .all(|index| self.at(index) - self.at(&origin) == offset(index, &strides) as f64)
    }
}

/// A change of view whose arguments are right for the tensor.
#[derive(Clone, Debug)]
enum Step {
    Narrow(usize, usize, usize),
    Select(usize, usize),
    Transpose(usize, usize),
    Reshape(Vec<usize>),
}

impl Step {
    /// Makes a right step of arbitrary numbers.
    fn choose([kind, a, b, c]: [usize; 4], shape: &[usize]) -> Option<Step> {
        let rank = shape.len();
        if kind % 4 == 3 {
            return Some(Step::Reshape(factors(shape.iter().product(), [a, b, c])));
        }
        let dim = a.checked_rem(rank)?;
        let size = shape[dim];
        match kind % 4 {
            0 => {
                let start = b % (size + 1);
                Some(Step::Narrow(dim, start, c % (size - start + 1)))
            }
            1 => Some(Step::Select(dim, b.checked_rem(size)?)),
            _ => Some(Step::Transpose(dim, b % rank)),
        }
    }

    fn apply<'a>(&self, view: TensorView<'a>) -> Result<TensorView<'a>, TensorError> {
        match *self {
            Step::Narrow(dim, start, len) => view.narrow(dim, start, len),
            Step::Select(dim, at) => view.select(dim, at),
            Step::Transpose(first, second) => view.transpose(first, second),
            Step::Reshape(ref shape) => view.reshape(shape),
        }
    }
}

/// Up to four factors of a number, chosen by arbitrary numbers.
fn factors(mut number: usize, choices: [usize; 3]) -> Vec<usize> {
    let mut factors = vec![];
    for choice in choices {
        let divisors: Vec<usize> = (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect();
        let Some(&factor) = choice.checked_rem(divisors.len()).map(|at| &divisors[at]) else { break };
        factors.push(factor);
        number /= factor;
    }
    factors.push(number);
    factors
}

/// A shape with strides that mostly fit into a memory of 64 elements, some overlapping or broadcasting.
fn layouts() -> impl Strategy<Value = (Vec<usize>, Vec<isize>)> {
    prop::collection::vec((0..5_usize, -2..12_isize), 0..5).prop_map(|dims| dims.into_iter().unzip())
}

/// Small shapes, seldom empty.
fn shapes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1 => Just(0_usize), 20 => 1..5_usize], 0..5)
}

/// Memory whose elements hold their positions.
fn positions(len: usize) -> Vec<i32> {
    (0..len).map(|at| at as i32).collect()
}

const MEMORY: usize = 64;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 12 } else { 2_000 },
        failure_persistence: None,
        max_global_rejects: 100_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn strides_are_accepted_exactly_if_they_stay_inside((shape, strides) in layouts()) {
        let data = positions(MEMORY);
        let offsets: Vec<isize> = indices(&shape).iter().map(|index| offset(index, &strides)).collect();
        let inside = offsets.iter().all(|at| (0..MEMORY as isize).contains(at));
        let view = TensorView::with_strides(&data, &shape, &strides);
        prop_assert_eq!(view.is_ok(), inside);
        if let Ok(view) = view {
            let naive = Naive::of(view);
            prop_assert!(naive.elements.iter().zip(&offsets).all(|(&found, &at)| found == at as f64));
            prop_assert_eq!(view.is_contiguous(), naive.is_contiguous());
            prop_assert_eq!(view.numel(), offsets.len());
        }
    }

    #[test]
    fn mutable_views_reach_no_element_twice((shape, strides) in layouts()) {
        let mut data = positions(MEMORY);
        let Ok(mut view) = TensorViewMut::with_strides(&mut data, &shape, &strides) else {
            return Ok(());
        };
        let mut expected = positions(MEMORY);
        for (count, index) in indices(&shape).iter().enumerate() {
            let at = offset(index, &strides) as usize;
            prop_assert_eq!(expected[at], at as i32, "reached before");
            expected[at] = -1 - count as i32;
            view.set_f64(index, f64::from(expected[at])).unwrap();
        }
        prop_assert_eq!(data, expected);
    }

    #[test]
    fn steps_do_to_views_what_they_do_to_lists(
        shape in shapes(),
        choices in prop::collection::vec(any::<[usize; 4]>(), 0..6),
    ) {
        let data = positions(shape.iter().product());
        let mut view = TensorView::new(&data, &shape).unwrap();
        let mut naive = Naive::of(view);
        prop_assert!(view.is_contiguous());
        for step in choices {
            let Some(step) = Step::choose(step, view.shape()) else { continue };
            let expected = naive.apply(&step);
            match step.apply(view) {
                Ok(next) => (view, naive) = (next, expected),
                Err(error) => {
                    let needs_copy = matches!(error, TensorError::ReshapeNeedsCopy { .. });
                    prop_assert!(needs_copy && !expected.has_strides(), "{}", error);
                }
            }
            prop_assert_eq!(&Naive::of(view), &naive);
            prop_assert_eq!(view.is_contiguous(), naive.is_contiguous());
            if view.is_contiguous() {
                let elements: Vec<f64> = view.as_slice::<i32>().unwrap().iter().map(|&value| value.into()).collect();
                prop_assert_eq!(elements, naive.elements.clone());
            }
        }
    }

    #[test]
    fn reshape_copies_only_where_it_must((shape, strides) in layouts(), choices in any::<[usize; 3]>()) {
        let data = positions(MEMORY);
        let Ok(view) = TensorView::with_strides(&data, &shape, &strides) else { return Ok(()) };
        let step = Step::Reshape(factors(view.numel(), choices));
        let expected = Naive::of(view).apply(&step);
        let reshaped = step.apply(view);
        prop_assert_eq!(reshaped.is_ok(), expected.has_strides());
        if let Ok(reshaped) = reshaped {
            prop_assert_eq!(Naive::of(reshaped), expected);
        }
    }

    #[test]
    fn halves_are_disjoint_and_complete(shape in shapes(), dim in any::<usize>(), middle in any::<usize>()) {
        prop_assume!(!shape.is_empty());
        let dim = dim % shape.len();
        let middle = middle % (shape[dim] + 1);
        let mut data = positions(shape.iter().product());
        let view = TensorViewMut::new(&mut data, &shape).unwrap();
        let (mut front, mut back) = view.split_at(dim, middle).unwrap();
        for half in [&mut front, &mut back] {
            for index in indices(half.shape()) {
                let value = half.get_f64(&index).unwrap();
                half.set_f64(&index, -1.0 - value).unwrap();
            }
        }
        prop_assert!(front.shape()[dim] == middle && back.shape()[dim] == shape[dim] - middle);
        prop_assert!(data.iter().enumerate().all(|(at, &value)| value == -1 - at as i32));
    }

    #[test]
    fn negative_strides_walk_backwards(shape in shapes(), flips in any::<[bool; 4]>()) {
        let data = positions(shape.iter().product());
        let forwards = Shape::new(&shape).unwrap();
        let strides: Vec<isize> = forwards.row_major().to_vec();
        let last = |dim: usize| shape[dim].saturating_sub(1);
        let flipped: Vec<isize> = strides.iter().zip(flips).map(|(&step, flip)| if flip { -step } else { step }).collect();
        let first: Vec<usize> = (0..shape.len()).map(|dim| if flips[dim] { last(dim) } else { 0 }).collect();
        let start = if data.is_empty() { 0 } else { offset(&first, &strides) as usize };
        let ptr = data.as_ptr().wrapping_add(start).cast();
        // SAFETY: flipped strides from the opposite corner reach exactly the elements of `data`.
        let view = unsafe { TensorView::from_raw_parts(ptr, DType::I32, &shape, Some(&flipped), Device::Host) }.unwrap();
        for index in indices(&shape) {
            let mirrored: Vec<usize> =
                (0..shape.len()).map(|dim| if flips[dim] { last(dim) - index[dim] } else { index[dim] }).collect();
            prop_assert_eq!(view.get_f64(&index), Ok(offset(&mirrored, &strides) as f64));
        }
        prop_assert_eq!(view.is_contiguous(), Naive::of(view).is_contiguous());
    }

    #[test]
    fn shapes_are_accepted_exactly_if_they_fit(shifts in prop::collection::vec((0..64_u32, any::<usize>()), 0..9)) {
        let sizes: Vec<usize> = shifts.iter().map(|&(shift, bits)| bits >> shift).collect();
        let extent = sizes.iter().try_fold(1_u128, |product, &size| product.checked_mul(size.max(1) as u128));
        let fits = extent.is_some_and(|extent| extent <= isize::MAX as u128);
        let shape = Shape::new(&sizes);
        prop_assert_eq!(shape.is_ok(), fits);
        if let Ok(shape) = shape {
            prop_assert_eq!(&*shape, &sizes[..]);
            prop_assert_eq!(shape.numel(), sizes.iter().product::<usize>());
        }
    }

    #[test]
    fn no_strides_make_the_arithmetic_overflow(
        dims in prop::collection::vec((0..6_usize, 0..64_u32, any::<isize>(), 0..64_u32), 0..5),
    ) {
        let data = positions(MEMORY);
        let sizes: Vec<usize> = dims.iter().map(|&(size, shift, ..)| size << (shift % 60)).collect();
        let strides: Vec<isize> = dims.iter().map(|&(.., step, shift)| step >> shift).collect();
        if let Ok(view) = TensorView::with_strides(&data, &sizes, &strides) {
            let last: Vec<usize> = sizes.iter().map(|size| size.saturating_sub(1)).collect();
            prop_assert_eq!(view.get_f64(&last).is_ok(), view.numel() > 0);
            prop_assert_eq!(view.num_bytes(), view.numel() * 4);
        }
    }
}
