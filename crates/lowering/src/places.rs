//! Where the elements of a tensor are: affine maps of indices.

use crate::{
    sym::{Sym, SymExpr},
    types::Type,
};

/// The places of a sequence of elements: the one with the index `(i₀, i₁, …)` is at `offset + Σ iₖ · strideₖ`. The sequence is in
/// row-major order of the indices.
///
/// Dimensions of one element are left out, and neighbours that are one dimension are joined, so that two maps of known sizes
/// give equal sequences of places exactly if they are equal. (Of symbolic sizes some equal ones are not found to be.)
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Places {
    offset: SymExpr,
    dims: Vec<Dim>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Dim {
    extent: SymExpr,
    stride: SymExpr,
}

/// A digit of a place: places are sums of digits below their extents, times their units. What stands for one unit is the
/// image.
struct Digit {
    extent: SymExpr,
    unit: SymExpr,
    image: SymExpr,
}

fn zero() -> SymExpr {
    SymExpr::constant(0)
}

fn one() -> SymExpr {
    SymExpr::constant(1)
}

impl Places {
    /// The places of extents with strides, from an offset on; none if a number overflows.
    pub(crate) fn new<'e>(
        offset: SymExpr,
        dims: impl IntoIterator<Item = (&'e SymExpr, SymExpr)>,
    ) -> Option<Self> {
        let mut places = Self { offset, dims: Vec::new() };
        for (extent, stride) in dims {
            places.push(extent.clone(), stride)?;
        }
        Some(places)
    }

    /// Adds a dimension inside of the others.
    fn push(&mut self, extent: SymExpr, stride: SymExpr) -> Option<()> {
        if extent == one() {
            return Some(());
        }
        if let Some(last) = self.dims.last_mut()
            && last.stride == extent.times(&stride)?
        {
            *last = Dim { extent: last.extent.times(&extent)?, stride };
            return Some(());
        }
        self.dims.push(Dim { extent, stride });
        Some(())
    }

    /// A value's places in its storage.
    pub(crate) fn of(ty: &Type) -> Option<Self> {
        let Type { dtype: _, shape, strides, offset } = ty;
        match strides {
            None => Some(Self { offset: offset.clone(), ..Self::all(&SymExpr::product(shape)?) }),
            Some(strides) => Self::new(offset.clone(), shape.iter().zip(strides.iter().cloned())),
        }
    }

    /// The places of `count` elements, one behind the other.
    pub(crate) fn all(count: &SymExpr) -> Self {
        let dims =
            if *count == one() { Vec::new() } else { vec![Dim { extent: count.clone(), stride: one() }] };
        Self { offset: zero(), dims }
    }

    /// The elements of a tensor of the shape `from`, repeated to the shape `to`: as places of its elements in row-major order.
    pub(crate) fn broadcast(from: &[SymExpr], to: &[SymExpr]) -> Option<Self> {
        Self::repeated(from, &row_major(from)?, zero(), to)
    }

    /// The places of a tensor of these extents and strides, repeated to a shape.
    pub(crate) fn repeated(
        from: &[SymExpr],
        strides: &[SymExpr],
        offset: SymExpr,
        to: &[SymExpr],
    ) -> Option<Self> {
        let lead = to.len().checked_sub(from.len())?;
        let stride = |dim: usize| match dim.checked_sub(lead) {
            Some(own) if from[own] == to[dim] => strides[own].clone(),
            _ => zero(),
        };
        Self::new(offset, to.iter().enumerate().map(|(dim, extent)| (extent, stride(dim))))
    }

    /// The elements of a row-major tensor with its dimensions in another order.
    pub(crate) fn permuted(shape: &[SymExpr], order: impl IntoIterator<Item = usize>) -> Option<Self> {
        let strides = row_major(shape)?;
        Self::new(zero(), order.into_iter().map(|dim| (&shape[dim], strides[dim].clone())))
    }

    /// How many places these are; none if that overflows.
    pub(crate) fn count(&self) -> Option<SymExpr> {
        self.dims.iter().try_fold(one(), |count, dim| count.times(&dim.extent))
    }

    /// The same from the first place on.
    pub(crate) fn with_offset_zero(&self) -> Self {
        Self { offset: zero(), ..self.clone() }
    }

    /// Whether these are all places of a sequence of `count` elements, in its order.
    pub(crate) fn is_all(&self, count: &SymExpr) -> bool {
        *self == Self::all(count)
    }

    /// How many elements the memory has at least that these places lie in; none if that overflows.
    pub(crate) fn reach(&self) -> Option<SymExpr> {
        let mut last = self.offset.clone();
        for Dim { extent, stride } in &self.dims {
            if *extent == zero() {
                return Some(zero());
            }
            last = last.plus(&extent.minus(&one())?.times(stride)?)?;
        }
        last.plus(&one())
    }

    /// Whether all places are shown to be apart.
    pub(crate) fn are_apart(&self, syms: &[Sym]) -> bool {
        let mut left: Vec<&Dim> = self.dims.iter().collect();
        let mut reach = zero();
        while !left.is_empty() {
            // The dimension with the least stride, as far as that is known.
            let is_least = |dim: &&Dim| {
                let above = |other: &&Dim| other.stride.minus(&dim.stride);
                left.iter().all(|other| above(other).is_some_and(|more| more.is_at_least(0, syms)))
            };
            let Some(at) = left.iter().position(is_least) else { return false };
            let Dim { extent, stride } = left.swap_remove(at);
            let is_apart = stride.minus(&reach).is_some_and(|room| room.is_at_least(1, syms));
            let next = extent.minus(&one()).and_then(|steps| steps.times(stride)?.plus(&reach));
            match next {
                Some(next) if is_apart => reach = next,
                _ => return false,
            }
        }
        true
    }

    /// These places of a sequence that itself has the places `inner`: as places of what `inner` are places of.
    pub(crate) fn of_places(&self, inner: &Self, syms: &[Sym]) -> Option<Self> {
        let units = row_major(&inner.dims.iter().map(|dim| dim.extent.clone()).collect::<Vec<_>>())?;
        let digits = inner.dims.iter().zip(units).map(|(dim, unit)| Digit {
            extent: dim.extent.clone(),
            unit,
            image: dim.stride.clone(),
        });
        self.imaged(&digits.collect::<Vec<_>>(), self.offset.clone(), inner.offset.clone(), syms)
    }

    /// These places as indices into the sequence of elements that has the places `layout`, if all are among those.
    pub(crate) fn within(&self, layout: &Self, syms: &[Sym]) -> Option<Self> {
        let images = row_major(&layout.dims.iter().map(|dim| dim.extent.clone()).collect::<Vec<_>>())?;
        let digits = layout.dims.iter().zip(images).map(|(dim, image)| Digit {
            extent: dim.extent.clone(),
            unit: dim.stride.clone(),
            image,
        });
        let mut digits: Vec<Digit> = digits.collect();
        digits.sort_by_key(|digit| std::cmp::Reverse(digit.unit.as_constant().unwrap_or(i64::MAX)));
        self.imaged(&digits, self.offset.minus(&layout.offset)?, zero(), syms)
    }

    /// The images of places by their digits, of which the largest units come first.
    fn imaged(&self, digits: &[Digit], offset: SymExpr, image: SymExpr, syms: &[Sym]) -> Option<Self> {
        let (mut rest, mut image, mut used) = (offset, image, vec![zero(); digits.len()]);
        for (digit, used) in digits.iter().zip(&mut used) {
            if rest == zero() {
                break;
            }
            let (Some(left), Some(unit)) = (rest.as_constant(), digit.unit.as_constant()) else { continue };
            if unit <= 0 || left < 0 {
                continue;
            }
            let most = digit.extent.as_constant().map_or(i64::MAX, |extent| extent - 1);
            *used = SymExpr::constant((left / unit).min(most));
            rest = rest.minus(&used.times(&digit.unit)?)?;
            image = image.plus(&used.times(&digit.image)?)?;
        }
        if rest != zero() {
            return None;
        }
        let mut places = Self { offset: image, dims: Vec::new() };
        for Dim { extent, stride } in &self.dims {
            places.push_image(digits, &mut used, extent.clone(), stride.clone(), syms)?;
        }
        // A digit that nothing but the offset takes has a bound too, and one that nothing takes has a place for its 0.
        let is_below = |(digit, used): (&Digit, &SymExpr)| {
            digit.extent.minus(used).is_some_and(|room| room.is_at_least(1, syms))
        };
        digits.iter().zip(&used).all(is_below).then_some(places)
    }

    fn push_image(
        &mut self,
        digits: &[Digit],
        used: &mut [SymExpr],
        extent: SymExpr,
        stride: SymExpr,
        syms: &[Sym],
    ) -> Option<()> {
        if stride == zero() {
            return self.push(extent, zero());
        }
        for (digit, used) in digits.iter().zip(used.iter_mut()) {
            let times = stride.divided(&digit.unit).filter(|times| times.is_at_least(0, syms));
            let Some(times) = times else { continue };
            let most = used.plus(&extent.minus(&one())?.times(&times)?)?;
            if digit.extent.minus(&most)?.is_at_least(1, syms) {
                *used = most;
                return self.push(extent, times.times(&digit.image)?);
            }
        }
        // The dimension goes over several digits: the last of them, and what is left.
        let at = digits.iter().position(|digit| digit.unit == stride)?;
        let digit = &digits[at];
        let count = extent.divided(&digit.extent).filter(|_| used[at] == zero())?;
        used[at] = digit.extent.minus(&one())?;
        self.push_image(digits, used, count, stride.times(&digit.extent)?, syms)?;
        self.push(digit.extent.clone(), digit.image.clone())
    }
}

/// The strides of a row-major tensor.
pub(crate) fn row_major(shape: &[SymExpr]) -> Option<Vec<SymExpr>> {
    let mut strides = vec![one(); shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].times(&shape[dim])?;
    }
    Some(strides)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All places, one by one.
    fn listed(places: &Places) -> Vec<i64> {
        listed_at(places, 0)
    }

    /// The same for a value of `s0`.
    fn listed_at(places: &Places, s0: i64) -> Vec<i64> {
        let number = |size: &SymExpr| size.value(&|_| Some(s0)).unwrap();
        let mut list = vec![number(&places.offset)];
        for dim in &places.dims {
            let steps = 0..number(&dim.extent);
            list =
                list.iter().flat_map(|at| steps.clone().map(move |i| at + i * number(&dim.stride))).collect();
        }
        list
    }

    fn random(next: &mut impl FnMut(i64) -> i64, most: i64) -> Places {
        let dims: Vec<(SymExpr, SymExpr)> = (0..next(4))
            .map(|_| ((1 + next(4)).into(), [0, 1, 2, 3, 4, 6, 8, 12][next(8) as usize].into()))
            .collect();
        let places =
            Places::new(next(4).into(), dims.iter().map(|(extent, stride)| (extent, stride.clone())))
                .unwrap();
        match places.reach().unwrap().as_constant().unwrap() <= most {
            true => places,
            false => random(next, most),
        }
    }

    #[test]
    fn maps_are_equal_exactly_if_their_places_are() {
        let mut state = 11u64;
        let mut next = |limit: i64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % limit as u64) as i64
        };
        let (mut equal, mut composed, mut inverted) = (0, 0, 0);
        for _ in 0..20_000 {
            let (a, b) = (random(&mut next, 24), random(&mut next, 24));
            assert_eq!(a == b, listed(&a) == listed(&b), "{a:?} {b:?}");
            equal += u32::from(a == b);
            let (x, y) = (listed(&a), listed(&b));
            assert_eq!(Some(a.reach().unwrap()), x.iter().max().map(|most| SymExpr::constant(most + 1)));
            let mut sorted = x.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert!(!a.are_apart(&[]) || sorted.len() == x.len(), "{a:?}");
            if x.iter().all(|at| *at < y.len() as i64)
                && let Some(both) = a.of_places(&b, &[])
            {
                composed += 1;
                assert_eq!(
                    listed(&both),
                    x.iter().map(|at| y[*at as usize]).collect::<Vec<_>>(),
                    "{a:?} of {b:?}"
                );
            }
            if let Some(inside) = a.within(&b, &[]) {
                inverted += 1;
                let found: Vec<i64> = listed(&inside).iter().map(|at| y[*at as usize]).collect();
                assert_eq!(found, x, "{a:?} within {b:?}");
            }
        }
        assert!(equal > 100 && composed > 500 && inverted > 500, "{equal} {composed} {inverted}");
    }

    #[test]
    fn maps_of_symbolic_sizes_hold_for_every_size() {
        let mut state = 5u64;
        let mut next = |limit: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % limit as u64) as usize
        };
        let size = |text: &str| SymExpr::parse(text).unwrap();
        let extents = ["1", "2", "3", "4", "s0", "s0", "s0+1", "2*s0", "s0//2"].map(size);
        let strides = ["0", "1", "2", "4", "8", "s0", "2*s0", "16", "s0+1", "100"].map(size);
        let offsets = ["0", "0", "1", "3", "5", "16", "s0", "8*s0"].map(size);
        let mut random = || {
            let dims: Vec<(&SymExpr, SymExpr)> = (0..next(4))
                .map(|_| (&extents[next(extents.len())], strides[next(strides.len())].clone()))
                .collect();
            Places::new(offsets[next(offsets.len())].clone(), dims).unwrap()
        };
        let (mut composed, mut inverted, mut symbolic) = (0, 0, 0);
        for round in 0..60_000 {
            let least = [0, 1, 2, 6][round % 4];
            let syms = [Sym { name: "s0".into(), min: least, max: Some(9), hint: None }];
            let (a, b) = (random(), random());
            let (both, inside) = (a.of_places(&b, &syms), a.within(&b, &syms));
            composed += u32::from(both.is_some());
            inverted += u32::from(inside.is_some());
            symbolic +=
                u32::from(both.as_ref().is_some_and(|both| both.reach().unwrap().as_constant().is_none()));
            for s0 in least..=9 {
                let (x, y) = (listed_at(&a, s0), listed_at(&b, s0));
                let of =
                    |places: &[i64]| places.iter().map(|at| y.get(*at as usize).copied()).collect::<Vec<_>>();
                if let Some(both) = &both {
                    let found: Vec<_> = listed_at(both, s0).into_iter().map(Some).collect();
                    assert_eq!(found, of(&x), "{a:?} of {b:?} at {s0}");
                }
                if let Some(inside) = &inside {
                    let found: Vec<_> = x.iter().copied().map(Some).collect();
                    assert_eq!(of(&listed_at(inside, s0)), found, "{a:?} within {b:?} at {s0}");
                }
                let mut sorted = x.clone();
                sorted.sort_unstable();
                sorted.dedup();
                assert!(!a.are_apart(&syms) || sorted.len() == x.len(), "{a:?} at {s0}");
            }
        }
        assert!(composed > 500 && inverted > 500 && symbolic > 200, "{composed} {inverted} {symbolic}");
    }

    #[test]
    fn symbolic_rows_are_cut_and_put_back() {
        let size = |text: &str| SymExpr::parse(text).unwrap();
        let whole = Places::all(&size("s0*8"));
        let left = Places::new(0.into(), [(&size("s0"), 8.into()), (&size("4"), 1.into())]).unwrap();
        assert_eq!(left.within(&whole, &[]), Some(left.clone()));
        let beyond = Places::new(8.into(), [(&size("s0"), 8.into()), (&size("4"), 1.into())]).unwrap();
        assert_eq!(beyond.within(&whole, &[]), None);
        let turned = Places::permuted(&[size("s0"), size("8")], [1, 0]).unwrap();
        let back = Places::permuted(&[size("8"), size("s0")], [1, 0]).unwrap();
        assert_eq!(back.of_places(&turned, &[]).map(|places| places.is_all(&size("8*s0"))), Some(true));
    }
}
