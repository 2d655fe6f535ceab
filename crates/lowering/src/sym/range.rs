//! Bounds of sizes.

use super::{Factor, Sym, SymExpr};

/// The least and the greatest value of an expression, where there are bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The least value.
    pub min: Option<i64>,
    /// The greatest value.
    pub max: Option<i64>,
}

impl Range {
    const UNKNOWN: Self = Self { min: None, max: None };

    fn of(value: i64) -> Self {
        Self { min: Some(value), max: Some(value) }
    }

    fn plus(self, other: Self) -> Self {
        let sum = |a: Option<i64>, b: Option<i64>| a.zip(b).and_then(|(a, b)| a.checked_add(b));
        Self { min: sum(self.min, other.min), max: sum(self.max, other.max) }
    }

    fn times(self, other: Self) -> Self {
        let product = |a: Option<i64>, b: Option<i64>| a.zip(b).and_then(|(a, b)| a.checked_mul(b));
        let is_positive = |range: Self| range.min.is_some_and(|min| min >= 0);
        match (self, other) {
            (a, b) if is_positive(a) && is_positive(b) => {
                Self { min: product(a.min, b.min), max: product(a.max, b.max) }
            }
            // A number that is not positive turns the bounds round.
            (Self { min: Some(a), max: Some(b) }, range) | (range, Self { min: Some(a), max: Some(b) })
                if a == b && a <= 0 =>
            {
                let by = Some(a);
                match a {
                    0 => Self::of(0),
                    _ => Self { min: product(range.max, by), max: product(range.min, by) },
                }
            }
            (Self { min: Some(a), max: Some(b) }, Self { min: Some(c), max: Some(d) }) => {
                let ends = [(a, c), (a, d), (b, c), (b, d)].map(|(x, y)| x.checked_mul(y));
                match ends.into_iter().collect::<Option<Vec<i64>>>() {
                    Some(ends) => Self { min: ends.iter().min().copied(), max: ends.iter().max().copied() },
                    None => Self::UNKNOWN,
                }
            }
            _ => Self::UNKNOWN,
        }
    }

    /// The range of quotients that are rounded down.
    fn divided(self, by: Self) -> Self {
        let Some(least) = by.min.filter(|least| *least > 0) else { return Self::UNKNOWN };
        // The quotient of the largest divisor, which may have no bound, is the nearest to 0.
        let far = |x: i64| x.div_euclid(least);
        let near = |x: i64| by.max.map_or(if x < 0 { -1 } else { 0 }, |most| x.div_euclid(most));
        Self {
            min: self.min.map(|min| if min < 0 { far(min) } else { near(min) }),
            max: self.max.map(|max| if max < 0 { near(max) } else { far(max) }),
        }
    }

    /// The range of remainders of quotients that are rounded down.
    fn remainder(self, by: Self) -> Self {
        match by.min {
            Some(least) if least > 0 => Self { min: Some(0), max: by.max.map(|most| most - 1) },
            _ => Self::UNKNOWN,
        }
    }
}

impl SymExpr {
    /// The bounds that follow from those of the symbols. A symbol that is not among them has no bounds but 0, and a division has
    /// bounds where its divisor is positive.
    pub fn range(&self, syms: &[Sym]) -> Range {
        let factor = |factor: &Factor| match factor {
            Factor::Symbol(name) => syms
                .iter()
                .find(|sym| sym.name == *name)
                .map_or(Range { min: Some(0), max: None }, |sym| Range { min: Some(sym.min), max: sym.max }),
            Factor::FloorDiv(a, b) => a.range(syms).divided(b.range(syms)),
            Factor::Mod(a, b) => a.range(syms).remainder(b.range(syms)),
            Factor::Unknown(_) => Range::UNKNOWN,
        };
        self.products().fold(Range::of(0), |sum, (factors, coefficient)| {
            sum.plus(
                factors.iter().map(factor).fold(Range::of(1), Range::times).times(Range::of(coefficient)),
            )
        })
    }

    /// Whether this is at least `least` for all values of the symbols.
    pub(crate) fn is_at_least(&self, least: i64, syms: &[Sym]) -> bool {
        self.range(syms).min.is_some_and(|min| min >= least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> SymExpr {
        SymExpr::parse(text).unwrap()
    }

    #[test]
    fn bounds_follow_from_those_of_the_symbols() {
        let sym = |name: &str, min, max| Sym { name: name.into(), min, max, hint: None };
        let syms = [sym("s0", 1, Some(8)), sym("s1", 0, None)];
        let range = |text| parse(text).range(&syms);
        assert_eq!(range("2*s0 - 1"), Range { min: Some(1), max: Some(15) });
        assert_eq!(range("10 - s0"), Range { min: Some(2), max: Some(9) });
        assert_eq!(range("s0*s1"), Range { min: Some(0), max: None });
        assert_eq!(range("s1 % 4 + s0 // 2"), Range { min: Some(0), max: Some(7) });
        assert_eq!(range("Max(s0, 3)"), Range { min: None, max: None });
        assert_eq!(range("(s0 - 5) // 2"), Range { min: Some(-2), max: Some(1) });
        assert_eq!(range("(s0 - 9) // (s1 + 2)"), Range { min: Some(-4), max: Some(-1) });
        assert_eq!(range("s0 % -4"), Range { min: None, max: None });
        assert_eq!(range("s1 // s1"), Range { min: None, max: None }, "it may be divided by 0");
        assert_eq!(range("(s0 - 4) * (s0 - 9)"), Range { min: Some(-67), max: Some(87) });
        assert_eq!(parse("s0**2 // 3").value(&|_| Some(4)), Some(5));
    }

    #[test]
    fn no_value_is_out_of_bounds() {
        let sym = |name: &str, min, max| Sym { name: name.into(), min, max: Some(max), hint: None };
        let syms = [sym("s0", 1, 9), sym("s1", -3, 4)];
        let parts = ["s0", "s1", "(s0-5)", "(s1*s0)", "((s0-7)//2)", "(s1%3)", "(3-s1)", "(s0//(s1+4))"];
        for (a, b) in parts.iter().flat_map(|a| parts.iter().map(move |b| (a, b))) {
            for text in
                [format!("{a}*{b}-2*{a}"), format!("{a}//{b}"), format!("{a}%{b}"), format!("{b}-4*{a}")]
            {
                let (size, mut known) = (parse(&text), 0);
                let Range { min, max } = size.range(&syms);
                for (x, y) in (1..=9).flat_map(|x| (-3..=4).map(move |y| (x, y))) {
                    let of = |name: &str| Some(if name == "s0" { x } else { y });
                    let Some(value) = size.value(&of) else { continue };
                    assert!(
                        min.is_none_or(|min| min <= value) && max.is_none_or(|max| value <= max),
                        "{text}"
                    );
                    known += 1;
                }
                assert!(known > 0, "{text}");
            }
        }
    }
}
