//! Scales: the position of a value on an axis, and the marked values.

use crate::sizes::Bytes;

/// A marked value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tick {
    pub(super) value: f64,
    /// Empty for a line between the labelled ones.
    pub(super) label: String,
}

/// The values from `low` to `high`, on a logarithmic scale or a linear one.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    log: bool,
    pub(super) ticks: Vec<Tick>,
}

impl Axis {
    /// Message sizes, marked at powers of two.
    pub(super) fn bytes(sizes: impl Iterator<Item = f64> + Clone) -> Self {
        const LABELS: i32 = 8;
        let (low, high) = extent(sizes);
        let (first, last) = (low.log2().floor() as i32, high.log2().ceil() as i32);
        // Steps that meet both 1 KiB and 1 MiB, as long as they do.
        let step = [1, 2, 5, 10, 20].into_iter().find(|step| (last - first) / step < LABELS).unwrap_or(40);
        let powers = (first..=last).filter(|power| power.rem_euclid(step) == 0);
        let ticks =
            powers.map(|power| Tick { value: 2f64.powi(power), label: Bytes(1 << power).to_string() });
        let (low, high) = if low == high { (low / 2.0, high * 2.0) } else { (low, high) };
        let ticks = ticks.filter(|tick| (low..=high).contains(&tick.value)).collect();
        Self { low, high, log: true, ticks }
    }

    /// Times in microseconds, over whole decades.
    pub(super) fn latency(times: impl Iterator<Item = f64> + Clone) -> Self {
        let (low, high) = extent(times);
        let first = low.log10().floor() as i32;
        let last = (high.log10().ceil() as i32).max(first + 1);
        let decades = (first..=last).flat_map(|power| [1.0, 2.0, 5.0].map(|factor| (power, factor)));
        let labelled = |factor: f64| factor == 1.0 || last - first <= 2;
        let ticks = decades.map(|(power, factor)| {
            let value = factor * 10f64.powi(power);
            Tick { value, label: if labelled(factor) { time(value) } else { String::new() } }
        });
        let (low, high) = (10f64.powi(first), 10f64.powi(last));
        let ticks = ticks.filter(|tick| tick.value <= high * 1.001).collect();
        Self { low, high, log: true, ticks }
    }

    /// Bandwidths from zero to a round number.
    pub(super) fn bandwidth(values: impl Iterator<Item = f64> + Clone) -> Self {
        let (_, high) = extent(values);
        let step = round_step(high / 6.0);
        let count = (high / step).ceil().max(1.0) as u32;
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        let tick = |value: f64| Tick { value, label: format!("{value:.decimals$}") };
        let ticks = (0..=count).map(|index| tick(f64::from(index) * step)).collect();
        Self { low: 0.0, high: f64::from(count) * step, log: false, ticks }
    }

    /// Where `value` lies, from 0 at the low end to 1 at the high end.
    pub(super) fn place(&self, value: f64) -> f64 {
        if self.log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        }
    }
}

/// The least and the greatest; 1 and 1 when there are none.
fn extent(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(0.0, f64::max);
    if high > 0.0 { (low, high) } else { (1.0, 1.0) }
}

/// The next of 1, 2 and 5 times a power of ten.
fn round_step(at_least: f64) -> f64 {
    let power = 10f64.powf(at_least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= at_least * 0.999_999);
    factor.unwrap_or(10.0) * power
}

/// Microseconds in their own unit.
pub(super) fn time(microseconds: f64) -> String {
    let (number, unit) = match microseconds {
        us if us < 0.9995 => (us * 1e3, "ns"),
        us if us < 999.5 => (us, "µs"),
        us if us < 999.5e3 => (us / 1e3, "ms"),
        us => (us / 1e6, "s"),
    };
    let decimals = if number < 9.995 { 2 } else { usize::from(number < 99.95) };
    let text = format!("{number:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|tick| tick.label.as_str()).filter(|label| !label.is_empty()).collect()
    }

    #[test]
    fn sizes_are_marked_at_powers_of_two() {
        let axis = Axis::bytes([4.0, 67108864.0].into_iter());
        assert_eq!(labels(&axis), ["32 B", "1 KiB", "32 KiB", "1 MiB", "32 MiB"]);
        let axis = Axis::bytes([1024.0, 65536.0].into_iter());
        assert_eq!(labels(&axis), ["1 KiB", "2 KiB", "4 KiB", "8 KiB", "16 KiB", "32 KiB", "64 KiB"]);
        assert_eq!(labels(&Axis::bytes([48.0].into_iter())), ["32 B", "64 B"]);
    }

    #[test]
    fn times_span_whole_decades() {
        let axis = Axis::latency([3.0, 4000.0].into_iter());
        assert_eq!(labels(&axis), ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]);
        let axis = Axis::latency([3.0, 8.0].into_iter());
        assert_eq!(labels(&axis), ["1 µs", "2 µs", "5 µs", "10 µs"]);
        assert_eq!((axis.place(1.0), axis.place(10.0)), (0.0, 1.0));
    }

    #[test]
    fn bandwidths_start_at_zero_and_end_on_a_round_number() {
        assert_eq!(labels(&Axis::bandwidth([13.4].into_iter())), ["0", "5", "10", "15"]);
        assert_eq!(
            labels(&Axis::bandwidth([0.27, 0.1].into_iter())),
            ["0.00", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30"]
        );
        assert_eq!(Axis::bandwidth([12.0].into_iter()).place(6.0), 0.5);
    }

    #[test]
    fn axes_without_values_have_room() {
        for axis in
            [Axis::bytes([].into_iter()), Axis::latency([].into_iter()), Axis::bandwidth([].into_iter())]
        {
            assert!(axis.place(1.0).is_finite() && !axis.ticks.is_empty());
        }
    }

    #[test]
    fn times_have_units() {
        let shown = [0.5, 1.0, 12.34, 123.4, 999.9, 2500.0, 3e6].map(time);
        assert_eq!(shown, ["500 ns", "1 µs", "12.3 µs", "123 µs", "1 ms", "2.5 ms", "3 s"]);
    }
}
