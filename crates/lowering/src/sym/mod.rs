//! Sizes that are not all known when a graph is lowered.

mod parse;
mod range;

use std::{collections::BTreeMap, fmt};

pub use range::Range;
use serde::{Deserialize, Serialize};

/// The most characters that the text of one size may have.
const MAX_TEXT: usize = 4096;
/// The deepest nesting of parentheses in the text of one size, and the most factors of one product.
const MAX_DEPTH: usize = 32;
/// The most products that one size may be a sum of.
const MAX_TERMS: usize = 256;

/// An integer expression over named symbols, such as `2*s0 + 1`, in canonical form: two expressions that are the same
/// polynomial are equal.
///
/// Divisions that round down (`s0 // 2`) and remainders (`s0 % 2`) of what is not constant, and functions that this crate
/// does not know, stand in it as symbols of their own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SymExpr {
    /// What depends on no symbol: the whole of most sizes, so that they need no memory of their own.
    constant: i64,
    /// The coefficient of each product of factors, none of which is 0. No product is empty.
    terms: BTreeMap<Vec<Factor>, i64>,
}

/// A factor of a product: a symbol, or something that is treated as one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Factor {
    Symbol(String),
    FloorDiv(Box<SymExpr>, Box<SymExpr>),
    Mod(Box<SymExpr>, Box<SymExpr>),
    /// A call of a function that this crate does not know, as it was written.
    Unknown(String),
}

/// What is known of a symbol's values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sym {
    /// Its name, such as `s0`.
    pub name: String,
    /// Its least value, which is not negative.
    #[serde(default)]
    pub min: i64,
    /// Its greatest value, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<i64>,
    /// The value that the program was compiled with; the interpreter takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<i64>,
}

/// The quotient, rounded down, or the remainder; none of what is not positive.
fn divided(a: i64, b: i64, floor: bool) -> Option<i64> {
    let value = if floor { a.checked_div_euclid(b) } else { a.checked_rem_euclid(b) };
    value.filter(|_| b > 0)
}

impl SymExpr {
    /// A constant.
    pub fn constant(value: i64) -> Self {
        Self { constant: value, terms: BTreeMap::new() }
    }

    /// A symbol.
    pub fn symbol(name: impl Into<String>) -> Self {
        Self::factor(Factor::Symbol(name.into()))
    }

    fn factor(factor: Factor) -> Self {
        Self { constant: 0, terms: BTreeMap::from([(vec![factor], 1)]) }
    }

    /// The value, if it depends on no symbol.
    pub fn as_constant(&self) -> Option<i64> {
        self.terms.is_empty().then_some(self.constant)
    }

    /// All products of factors with their coefficients, the empty one last.
    fn products(&self) -> impl DoubleEndedIterator<Item = (&[Factor], i64)> {
        let constant = (self.constant != 0).then_some((&[][..], self.constant));
        let terms = self.terms.iter().rev().map(|(factors, coefficient)| (&factors[..], *coefficient));
        terms.chain(constant)
    }

    /// The sum, unless a coefficient overflows or it has too many terms.
    pub fn plus(&self, other: &Self) -> Option<Self> {
        let constant = self.constant.checked_add(other.constant)?;
        let mut terms = self.terms.clone();
        for (factors, coefficient) in &other.terms {
            let sum = terms.get(factors).copied().unwrap_or(0).checked_add(*coefficient)?;
            match sum {
                0 => drop(terms.remove(factors)),
                sum => drop(terms.insert(factors.clone(), sum)),
            }
        }
        (terms.len() <= MAX_TERMS).then_some(Self { constant, terms })
    }

    /// The product, unless a coefficient overflows or it has too many terms.
    pub fn times(&self, other: &Self) -> Option<Self> {
        if let (Some(x), Some(y)) = (self.as_constant(), other.as_constant()) {
            return x.checked_mul(y).map(Self::constant);
        }
        let mut product = Self::constant(0);
        for (a, x) in self.products() {
            for (b, y) in other.products() {
                let mut factors: Vec<Factor> = a.iter().chain(b).cloned().collect();
                if factors.len() > MAX_DEPTH {
                    return None;
                }
                factors.sort();
                let coefficient = x.checked_mul(y)?;
                let term = match factors.is_empty() {
                    true => Self::constant(coefficient),
                    false => Self { constant: 0, terms: BTreeMap::from([(factors, coefficient)]) },
                };
                product = product.plus(&term)?;
            }
        }
        Some(product)
    }

    /// The quotient, where it is one of polynomials: by an equal expression, or by a constant that divides every coefficient.
    pub(crate) fn divided(&self, by: &Self) -> Option<Self> {
        if self == by {
            return (*by != Self::constant(0)).then(|| Self::constant(1));
        }
        let by = by.as_constant().filter(|by| *by != 0)?;
        let divided = |x: i64| (x % by == 0).then(|| x / by);
        let terms = self.terms.iter().map(|(factors, x)| Some((factors.clone(), divided(*x)?)));
        Some(Self { constant: divided(self.constant)?, terms: terms.collect::<Option<_>>()? })
    }

    /// The difference, unless a coefficient overflows or it has too many terms.
    pub(crate) fn minus(&self, other: &Self) -> Option<Self> {
        self.plus(&Self::constant(-1).times(other)?)
    }

    /// The product of sizes.
    pub fn product<'a>(sizes: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        let mut product = Self::constant(1);
        for size in sizes {
            match (size.as_constant(), product.terms.is_empty()) {
                (Some(size), true) => product.constant = product.constant.checked_mul(size)?,
                _ => product = product.times(size)?,
            }
        }
        Some(product)
    }

    /// The value for these values of the symbols; `None` if one is missing, a divisor is not positive, or a step overflows.
    pub fn value(&self, of: &impl Fn(&str) -> Option<i64>) -> Option<i64> {
        self.products().try_fold(0i64, |sum, (factors, coefficient)| {
            let product = factors.iter().try_fold(coefficient, |product, factor| {
                let value = match factor {
                    Factor::Symbol(name) => of(name)?,
                    Factor::FloorDiv(a, b) => divided(a.value(of)?, b.value(of)?, true)?,
                    Factor::Mod(a, b) => divided(a.value(of)?, b.value(of)?, false)?,
                    Factor::Unknown(_) => return None,
                };
                product.checked_mul(value)
            })?;
            sum.checked_add(product)
        })
    }

    /// How many parentheses are in each other in its text.
    fn depth(&self) -> usize {
        let of = |factor: &Factor| match factor {
            Factor::FloorDiv(a, b) | Factor::Mod(a, b) => 2 + a.depth().max(b.depth()),
            Factor::Symbol(_) | Factor::Unknown(_) => 0,
        };
        self.terms.keys().flatten().map(of).max().unwrap_or(0)
    }

    /// Whether a function that this crate does not know stands in it.
    pub(crate) fn has_unknown(&self) -> bool {
        self.terms.keys().flatten().any(|factor| match factor {
            Factor::Symbol(_) => false,
            Factor::FloorDiv(a, b) | Factor::Mod(a, b) => a.has_unknown() || b.has_unknown(),
            Factor::Unknown(_) => true,
        })
    }

    /// The names of the symbols that it depends on, in order, each as often as it occurs.
    pub fn symbols(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for factor in self.terms.keys().flatten() {
            match factor {
                Factor::Symbol(name) => names.push(name.as_str()),
                Factor::FloorDiv(a, b) | Factor::Mod(a, b) => {
                    names.extend(a.symbols());
                    names.extend(b.symbols());
                }
                Factor::Unknown(_) => {}
            }
        }
        names
    }

    /// Reads what [`Display`](fmt::Display) writes, and what sympy writes of integers: `+ - * // % **`, parentheses, names,
    /// and calls of functions.
    ///
    /// # Errors
    /// What was found at which character, and what was wanted.
    pub fn parse(text: &str) -> Result<Self, String> {
        check_length(text)?;
        let size = parse::parse(text)?;
        // What is read can be written, and read again.
        if size.as_constant().is_none() && text.contains(['(', '*', '/', '%']) {
            let written = size.to_string();
            check_length(&written)?;
            parse::parse(&written)?;
        }
        Ok(size)
    }
}

fn check_length(text: &str) -> Result<(), String> {
    match text.len() {
        0..=MAX_TEXT => Ok(()),
        length => Err(format!("a size of {length} characters: at most {MAX_TEXT} are read")),
    }
}

impl fmt::Display for SymExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(value) = self.as_constant() {
            return write!(f, "{value}");
        }
        // The constant comes last, as in `s0 + 1`.
        for (index, (factors, coefficient)) in self.products().enumerate() {
            let magnitude = coefficient.unsigned_abs();
            match (index, coefficient < 0) {
                (0, false) => {}
                (0, true) => f.write_str("-")?,
                (_, false) => f.write_str("+")?,
                (_, true) => f.write_str("-")?,
            }
            if factors.is_empty() || magnitude != 1 {
                write!(f, "{magnitude}{}", if factors.is_empty() { "" } else { "*" })?;
            }
            for (index, factor) in factors.iter().enumerate() {
                f.write_str(if index == 0 { "" } else { "*" })?;
                match factor {
                    Factor::Symbol(name) | Factor::Unknown(name) => f.write_str(name)?,
                    Factor::FloorDiv(a, b) => write!(f, "(({a})//({b}))")?,
                    Factor::Mod(a, b) => write!(f, "(({a})%({b}))")?,
                }
            }
        }
        Ok(())
    }
}

impl From<i64> for SymExpr {
    fn from(value: i64) -> Self {
        Self::constant(value)
    }
}

impl Serialize for SymExpr {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.as_constant() {
            Some(value) => serializer.serialize_i64(value),
            None => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for SymExpr {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Size;

        impl serde::de::Visitor<'_> for Size {
            type Value = SymExpr;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit integer, or an expression of symbols")
            }

            fn visit_i64<E>(self, value: i64) -> Result<SymExpr, E> {
                Ok(value.into())
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<SymExpr, E> {
                let unexpected = serde::de::Unexpected::Unsigned(value);
                i64::try_from(value).map(Into::into).map_err(|_| E::invalid_value(unexpected, &self))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<SymExpr, E> {
                SymExpr::parse(text).map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> SymExpr {
        SymExpr::parse(text).unwrap()
    }

    #[test]
    fn the_same_polynomial_is_the_same_expression() {
        assert_eq!(parse("(s0 + 1)*(s0 - 1)"), parse("s0**2 - 1"));
        assert_eq!(parse("s0*s1 - s1*s0"), SymExpr::constant(0));
        assert_ne!(parse("(s0//2)*2"), parse("s0"));
        for text in ["0", "-3", "2*s0*s1-1", "((s0+1)//(2))", "((s0)%(4))*s1", "Max(1,s0)"] {
            assert_eq!(parse(&parse(text).to_string()), parse(text), "{text}");
        }
    }

    #[test]
    fn what_is_no_expression_says_where() {
        let error = |text: &str| SymExpr::parse(text).unwrap_err();
        assert!(error("2*").contains("wanted a number, a name or `(`"));
        assert!(error("(s0").contains("wanted `)`"));
        assert!(error("s0 s1").contains("at character 3"));
        assert!(error("1//0").contains("cannot be divided by 0"));
        assert!(error("99999999999999999999").contains("no 64-bit integer"));
        assert!(error(&"(".repeat(100)).contains("parentheses"));
        assert!(error(&"s".repeat(5000)).contains("5000 characters"));
        assert!(error("s0**17").contains("exponent"));
        let nested = |divisions: usize| (0..divisions).fold("s0".to_owned(), |text, _| format!("{text}//7"));
        assert_eq!(parse(&parse(&nested(16)).to_string()), parse(&nested(16)));
        assert!(error(&nested(17)).contains("more than 16 divisions in each other"));
        assert!(
            error(&format!("9+(-{})", nested(16))).contains("more than 32 parentheses"),
            "as it is written"
        );
        let names: Vec<String> = (0..20).map(|index| format!("{}{index}", "s".repeat(16))).collect();
        assert!(error(&format!("({0})*({0})", names.join("+"))).contains("characters: at most 4096"));
        assert!(error("7//-2").contains("7 cannot be divided by -2"));
    }
}
