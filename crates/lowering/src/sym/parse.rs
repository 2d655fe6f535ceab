//! Sizes from their texts.

use super::{Factor, MAX_DEPTH, SymExpr, divided};

pub(super) fn parse(text: &str) -> Result<SymExpr, String> {
    let mut parser = Parser { text: text.as_bytes(), at: 0 };
    let expr = parser.sum(0)?;
    match parser.peek() {
        None => Ok(expr),
        Some(_) => Err(parser.wanted("an operator or the end")),
    }
}

/// Parses by the rules of Python: `*`, `//` and `%` bind equally, `**` binds more strongly.
struct Parser<'t> {
    text: &'t [u8],
    at: usize,
}

impl Parser<'_> {
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn take(&mut self, symbol: &str) -> bool {
        let found = self.peek().is_some() && self.text[self.at..].starts_with(symbol.as_bytes());
        self.at += if found { symbol.len() } else { 0 };
        found
    }

    fn wanted(&self, what: &str) -> String {
        let rest = String::from_utf8_lossy(&self.text[self.at.min(self.text.len())..]);
        let found: String = rest.chars().take(12).collect();
        format!(
            "found {found:?} at character {} of {:?}, wanted {what}",
            self.at,
            String::from_utf8_lossy(self.text)
        )
    }

    fn sum(&mut self, depth: usize) -> Result<SymExpr, String> {
        let mut sum = self.product(depth)?;
        loop {
            let sign = match self.peek() {
                Some(b'+') => 1,
                Some(b'-') => -1,
                _ => return Ok(sum),
            };
            self.at += 1;
            let term = SymExpr::constant(sign).times(&self.product(depth)?);
            sum = term.and_then(|term| sum.plus(&term)).ok_or("a size too large to be told")?;
        }
    }

    fn product(&mut self, depth: usize) -> Result<SymExpr, String> {
        let mut product = self.power(depth)?;
        loop {
            if self.take("//") {
                product = divide(product, self.power(depth)?, true)?;
            } else if self.take("%") {
                product = divide(product, self.power(depth)?, false)?;
            } else if !self.text[self.at.min(self.text.len())..].starts_with(b"**") && self.take("*") {
                product = product.times(&self.power(depth)?).ok_or("a size too large to be told")?;
            } else {
                return Ok(product);
            }
        }
    }

    fn power(&mut self, depth: usize) -> Result<SymExpr, String> {
        let base = self.atom(depth)?;
        if !self.take("**") {
            return Ok(base);
        }
        let exponent = self.atom(depth)?.as_constant().filter(|exponent| (0..=16).contains(exponent));
        let exponent = exponent.ok_or_else(|| self.wanted("an exponent from 0 to 16"))?;
        let power = (0..exponent).try_fold(SymExpr::constant(1), |power, _| power.times(&base));
        power.ok_or_else(|| "a size too large to be told".to_owned())
    }

    fn atom(&mut self, depth: usize) -> Result<SymExpr, String> {
        if depth > MAX_DEPTH {
            return Err(format!("a size with more than {MAX_DEPTH} parentheses in each other"));
        }
        match self.peek() {
            Some(b'(') => {
                self.at += 1;
                let inner = self.sum(depth + 1)?;
                if self.take(")") { Ok(inner) } else { Err(self.wanted("`)`")) }
            }
            Some(b'-') => {
                self.at += 1;
                let inner = self.power(depth + 1)?;
                SymExpr::constant(-1).times(&inner).ok_or_else(|| "a size too large to be told".to_owned())
            }
            Some(c) if c.is_ascii_digit() => {
                let digits = self.word(|c| c.is_ascii_digit());
                let value = digits.parse().map_err(|_| format!("{digits} is no 64-bit integer"))?;
                Ok(SymExpr::constant(value))
            }
            Some(c) if c.is_ascii_alphabetic() || c == b'_' => {
                let start = self.at;
                let name = self.word(|c| c.is_ascii_alphanumeric() || c == b'_' || c == b'.');
                if self.peek() != Some(b'(') {
                    return Ok(SymExpr::symbol(name));
                }
                self.arguments()?;
                let text = String::from_utf8_lossy(&self.text[start..self.at]);
                Ok(SymExpr::factor(Factor::Unknown(text.split_whitespace().collect())))
            }
            _ => Err(self.wanted("a number, a name or `(`")),
        }
    }

    fn word(&mut self, belongs: impl Fn(u8) -> bool) -> String {
        let start = self.at;
        while self.text.get(self.at).is_some_and(|c| belongs(*c)) {
            self.at += 1;
        }
        String::from_utf8_lossy(&self.text[start..self.at]).into_owned()
    }

    /// Everything up to the parenthesis that closes the next one.
    fn arguments(&mut self) -> Result<(), String> {
        let mut open = 0usize;
        while let Some(c) = self.peek() {
            self.at += 1;
            match c {
                b'(' => open += 1,
                b')' => open -= 1,
                _ => {}
            }
            if open == 0 {
                return Ok(());
            }
        }
        Err(self.wanted("`)`"))
    }
}

fn divide(a: SymExpr, b: SymExpr, floor: bool) -> Result<SymExpr, String> {
    if let (Some(x), Some(y)) = (a.as_constant(), b.as_constant()) {
        let value = divided(x, y, floor).map(SymExpr::constant);
        return value.ok_or_else(|| format!("{x} cannot be divided by {y}"));
    }
    // What is read can be written, and read again.
    if 2 + a.depth().max(b.depth()) > MAX_DEPTH {
        return Err(format!("a size with more than {} divisions in each other", MAX_DEPTH / 2));
    }
    let (a, b) = (Box::new(a), Box::new(b));
    Ok(SymExpr::factor(if floor { Factor::FloorDiv(a, b) } else { Factor::Mod(a, b) }))
}
