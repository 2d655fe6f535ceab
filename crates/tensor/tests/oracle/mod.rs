//! The small floats from their definition, in exact f64 arithmetic: tables of values, and conversion by search.

#![allow(dead_code)] // each test program uses its part

/// A format by its values.
pub struct Table {
    pub name: &'static str,
    /// The finite magnitudes by code.
    pub values: Vec<f64>,
    /// Halfway between each code's value and the next.
    pub midpoints: Vec<f64>,
    /// The magnitude that would come after the largest.
    pub beyond: f64,
    /// The sign's bit in a code.
    pub sign: u8,
    /// What a NaN becomes.
    pub nan: u8,
}

impl Table {
    /// Counts upwards from 0 in steps that double whenever the fraction bits are used up, except the first time.
    fn new(name: &'static str, fraction: u32, smallest: f64, last: u8, sign: u8, nan: u8) -> Table {
        let (mut values, mut step) = (vec![0.0], smallest);
        while values.len() <= usize::from(last) + 1 {
            if values.len() > 2 << fraction && (values.len() - 1).is_multiple_of(1 << fraction) {
                step *= 2.0;
            }
            values.push(values.last().unwrap() + step);
        }
        let midpoints = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        let beyond = values.pop().unwrap();
        Table { name, values, midpoints, beyond, sign, nan }
    }

    pub fn e4m3() -> Table {
        Table::new("e4m3", 3, 1.0 / 512.0, 0x7E, 0x80, 0x7F)
    }

    pub fn e5m2() -> Table {
        Table::new("e5m2", 2, 1.0 / 65536.0, 0x7B, 0x80, 0x7F)
    }

    pub fn e2m1() -> Table {
        Table::new("e2m1", 1, 0.5, 0x7, 0x8, 0x7)
    }

    /// The largest finite code.
    pub fn last(&self) -> u8 {
        (self.values.len() - 1) as u8
    }

    /// The nearest code to a number, ties to even, or `None` if it rounds beyond the largest. Without sign.
    pub fn nearest(&self, value: f64) -> Option<u8> {
        // As many midpoints as lie below the magnitude are passed.
        let passed = self.midpoints.partition_point(|&midpoint| midpoint < value.abs());
        let tie = self.midpoints.get(passed) == Some(&value.abs());
        let code = passed + usize::from(tie && passed % 2 == 1);
        (code < self.values.len()).then_some(code as u8)
    }

    /// The code of a number or NaN, saturated to the largest.
    pub fn encode(&self, value: f64) -> u8 {
        self.encode_or(value, self.last())
    }

    /// The code of a number or NaN, `overflow` for what rounds beyond the largest.
    pub fn encode_or(&self, value: f64, overflow: u8) -> u8 {
        let sign = if value.is_sign_negative() { self.sign } else { 0 };
        if value.is_nan() { self.nan } else { self.nearest(value).unwrap_or(overflow) | sign }
    }

    /// The value of a finite code with its sign.
    pub fn decode(&self, code: u8) -> f64 {
        let magnitude = self.values[usize::from(code & (self.sign - 1))];
        if code & self.sign == 0 { magnitude } else { -magnitude }
    }

    /// Half the distance to the farther neighbour of a finite code.
    pub fn half_step(&self, code: u8) -> f64 {
        let code = usize::from(code & (self.sign - 1));
        self.midpoints[code] - self.values[code]
    }
}
