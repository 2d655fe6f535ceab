//! Rows as a picture: latency and bus bandwidth over the message size.

mod axis;
mod svg;

use std::collections::BTreeSet;

use super::{Machine, Row};
use crate::sizes::Bytes;
use axis::{Axis, time};
use svg::{Anchor, Svg};

const WIDTH: f64 = 1120.0;
const MARGIN: f64 = 24.0;
const TOP: f64 = 112.0;
const PANEL: (f64, f64) = (452.0, 340.0);
const PANEL_LEFT: [f64; 2] = [84.0, 640.0];
const LEGEND_GAP: f64 = 62.0;
const LEGEND_LINE: f64 = 24.0;
/// The length of the sample in the legend with its gap, and a letter's width: no font is at hand to measure.
const LEGEND_SAMPLE: f64 = 46.0;
const LETTER: f64 = 7.4;

/// A self-contained SVG with one curve for each collective and algorithm (and type, reduction and rank count,
/// where rows differ in them). Latency has logarithmic axes; bus bandwidth starts at zero. Rows without a size
/// or a finite positive time are left out.
pub fn plot(machine: &Machine, rows: &[Row]) -> String {
    let rows: Vec<&Row> = rows.iter().filter(|row| drawable(row)).collect();
    let series = series(&rows);
    let columns = legend_columns(&series);
    let height = TOP + PANEL.1 + LEGEND_GAP + series.len().div_ceil(columns) as f64 * LEGEND_LINE + MARGIN;

    let title = title(&rows);
    let mut svg = Svg::new(WIDTH, height, &title);
    svg.text((MARGIN, 38.0), Anchor::Start, "title", &title);
    svg.text((MARGIN, 62.0), Anchor::Start, "quiet", &subtitle(machine));

    let bytes = Axis::bytes(rows.iter().map(|row| row.bytes as f64));
    let latency = Axis::latency(rows.iter().map(|row| row.latency_us));
    let bandwidth = Axis::bandwidth(rows.iter().map(|row| row.busbw_gbs).filter(|value| value.is_finite()));
    let latency = Panel { left: PANEL_LEFT[0], name: "Latency", x: &bytes, y: latency };
    let bandwidth = Panel { left: PANEL_LEFT[1], name: "Bus bandwidth (GB/s)", x: &bytes, y: bandwidth };
    latency.frame(&mut svg);
    bandwidth.frame(&mut svg);
    for (index, Series { rows, .. }) in series.iter().enumerate() {
        latency.curve(&mut svg, index, rows, |row| row.latency_us);
        bandwidth.curve(&mut svg, index, rows, |row| row.busbw_gbs);
    }
    legend(&mut svg, &series, columns);
    svg.finish()
}

fn drawable(row: &Row) -> bool {
    row.bytes > 0 && row.latency_us.is_finite() && row.latency_us > 0.0
}

/// One curve.
struct Series<'a> {
    label: String,
    rows: Vec<&'a Row>,
}

/// The properties that the rows of one curve share.
fn key(row: &Row) -> [&str; 4] {
    [&row.collective, &row.algorithm, &row.dtype, row.op.as_deref().unwrap_or("")]
}

/// The curves in order of appearance, their points by size.
fn series<'a>(rows: &[&'a Row]) -> Vec<Series<'a>> {
    let varying = Varying::of(rows);
    let mut series: Vec<Series<'a>> = Vec::new();
    for &row in rows {
        let same = |one: &&mut Series<'_>| (key(one.rows[0]), one.rows[0].ranks) == (key(row), row.ranks);
        match series.iter_mut().find(same) {
            Some(found) => found.rows.push(row),
            None => series.push(Series { label: varying.label(row), rows: vec![row] }),
        }
    }
    for Series { rows, .. } in &mut series {
        rows.sort_by_key(|row| row.bytes);
    }
    series
}

/// The properties that differ between rows, which the legend shows; the title shows the others.
struct Varying {
    dtype: bool,
    op: bool,
    ranks: bool,
}

impl Varying {
    fn of(rows: &[&Row]) -> Self {
        let ops = rows.iter().filter_map(|row| row.op.as_deref()).collect::<BTreeSet<_>>();
        Self {
            dtype: rows.iter().any(|row| row.dtype != rows[0].dtype),
            op: ops.len() > 1,
            ranks: rows.iter().any(|row| row.ranks != rows[0].ranks),
        }
    }

    fn label(&self, row: &Row) -> String {
        let ranks = format!("{} ranks", row.ranks);
        let extra = [
            self.dtype.then_some(row.dtype.as_str()),
            row.op.as_deref().filter(|_| self.op),
            self.ranks.then_some(ranks.as_str()),
        ];
        let extra: Vec<&str> = extra.into_iter().flatten().collect();
        let name = format!("{} {}", row.collective, row.algorithm);
        if extra.is_empty() { name } else { format!("{name} ({})", extra.join(", ")) }
    }
}

fn title(rows: &[&Row]) -> String {
    let Some(first) = rows.first() else { return "Antiphon: no rows".into() };
    let Varying { dtype, op, ranks } = Varying::of(rows);
    let collectives: BTreeSet<&str> = rows.iter().map(|row| row.collective.as_str()).collect();
    let mut parts = vec![match collectives.len() {
        1 => first.collective.clone(),
        count => format!("{count} collectives"),
    }];
    if !ranks {
        parts.push(format!("{} rank{}", first.ranks, if first.ranks == 1 { "" } else { "s" }));
    }
    if !dtype {
        parts.push(first.dtype.clone());
    }
    parts.extend(rows.iter().find_map(|row| row.op.clone()).filter(|_| !op));
    format!("Antiphon: {}", parts.join(", "))
}

fn subtitle(machine: &Machine) -> String {
    let Machine { cpu, kernel, date, version, .. } = machine;
    format!("{cpu}, {}, Linux {kernel} · antiphon {version}, {date}", machine.cores_in_words())
}

/// One diagram.
struct Panel<'a> {
    left: f64,
    name: &'static str,
    x: &'a Axis,
    y: Axis,
}

impl Panel<'_> {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (self.left + PANEL.0 * self.x.place(x), TOP + PANEL.1 * (1.0 - self.y.place(y)))
    }

    fn frame(&self, svg: &mut Svg) {
        let (right, bottom) = (self.left + PANEL.0, TOP + PANEL.1);
        svg.text((self.left, TOP - 14.0), Anchor::Start, "panel", self.name);
        for tick in &self.x.ticks {
            let x = self.left + PANEL.0 * self.x.place(tick.value);
            svg.line((x, TOP), (x, bottom), "grid");
            svg.text((x, bottom + 20.0), Anchor::Middle, "quiet", &tick.label);
        }
        for tick in &self.y.ticks {
            let y = TOP + PANEL.1 * (1.0 - self.y.place(tick.value));
            svg.line((self.left, y), (right, y), if tick.label.is_empty() { "fine" } else { "grid" });
            svg.text((self.left - 8.0, y + 4.5), Anchor::End, "quiet", &tick.label);
        }
        svg.frame((self.left, TOP), PANEL);
        svg.text((self.left + PANEL.0 / 2.0, bottom + 42.0), Anchor::Middle, "quiet", "message size");
    }

    fn curve(&self, svg: &mut Svg, index: usize, rows: &[&Row], value: fn(&Row) -> f64) {
        let points = rows.iter().filter(|row| value(row).is_finite()).map(|row| {
            let words = format!(
                "{} {}, {}: {}, {:.2} GB/s",
                row.collective,
                row.algorithm,
                Bytes(row.bytes),
                time(row.latency_us),
                row.busbw_gbs
            );
            (self.at(row.bytes as f64, value(row)), words)
        });
        svg.curve(index, &points.collect::<Vec<_>>());
    }
}

fn legend_columns(series: &[Series<'_>]) -> usize {
    let longest = series.iter().map(|one| one.label.chars().count()).max().unwrap_or(0);
    let width = LEGEND_SAMPLE + longest as f64 * LETTER + MARGIN;
    (((WIDTH - PANEL_LEFT[0] - MARGIN) / width) as usize).clamp(1, series.len().max(1))
}

fn legend(svg: &mut Svg, series: &[Series<'_>], columns: usize) {
    let width = (WIDTH - PANEL_LEFT[0] - MARGIN) / columns as f64;
    let width = width.min(280.0);
    for (index, Series { label, .. }) in series.iter().enumerate() {
        let x = PANEL_LEFT[0] + (index % columns) as f64 * width;
        let y = TOP + PANEL.1 + LEGEND_GAP + (index / columns) as f64 * LEGEND_LINE + 10.0;
        let sample = [0.0, 17.0, 34.0].map(|dx| ((x + dx, y), label.clone()));
        svg.curve(index, &sample);
        svg.text((x + LEGEND_SAMPLE, y + 4.5), Anchor::Start, "", label);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{machine, rows};
    use super::*;

    #[test]
    fn each_algorithm_is_a_curve_in_both_panels_and_the_legend() {
        let picture = plot(&machine(), &rows());
        assert_eq!(picture.matches("<polyline").count(), 2 * 3);
        assert!(picture.contains(">all_reduce one_shot</text>"));
        assert!(picture.contains("Antiphon: all_reduce, 4 ranks, float32, sum"));
        assert!(picture.contains("Example &lt;CPU&gt; &amp; Co, 8 cores"));
        assert!(picture.contains(">1 MiB</text>") && picture.contains(">10 µs</text>"));
    }

    #[test]
    fn what_differs_moves_from_the_title_to_the_legend() {
        let mut rows = rows();
        (rows[1].ranks, rows[1].dtype) = (2, "bfloat16".into());
        let picture = plot(&machine(), &rows);
        assert!(picture.contains(">Antiphon: all_reduce, sum</text>"));
        assert!(picture.contains(">all_reduce two_shot (bfloat16, 2 ranks)</text>"));
    }

    #[test]
    fn odd_rows_do_no_harm() {
        let mut rows = rows();
        rows[0].bytes = 0;
        rows[1].latency_us = f64::NAN;
        rows[2].latency_us = 0.0;
        rows[3].busbw_gbs = f64::INFINITY;
        let picture = plot(&machine(), &rows);
        assert!(!picture.contains("NaN,") && !picture.contains("inf,"));
        for few in [&rows[..0], &rows[4..5]] {
            let picture = plot(&machine(), few);
            assert!(picture.ends_with("</svg>\n") && !picture.contains("NaN"), "{picture}");
        }
    }

    #[test]
    fn tags_are_balanced() {
        let picture = plot(&machine(), &rows());
        for tag in ["g", "text", "title", "path", "style", "svg"] {
            let opened =
                picture.matches(&format!("<{tag} ")).count() + picture.matches(&format!("<{tag}>")).count();
            assert_eq!(opened, picture.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }
}
