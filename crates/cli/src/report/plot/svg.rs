//! The few SVG elements that a plot needs, and its colours.

use std::fmt::{Display, Write};

/// How many colours there are.
const COLORS: usize = 8;

/// Each colour on a light background and on a dark one.
const PALETTE: [(&str, &str); COLORS] = [
    ("#1f6fb4", "#6db3f2"),
    ("#c8500a", "#ff9d5c"),
    ("#1a8f5a", "#5fd39a"),
    ("#8a4fbf", "#c59bf2"),
    ("#b8336a", "#ff8ab0"),
    ("#7a6a00", "#e0cc4f"),
    ("#0f8b8d", "#5fd6d8"),
    ("#5a5a5a", "#c0c0c0"),
];

/// Light by default, dark where the reader's system is. Both paint their own background, so that the picture
/// stays readable in a viewer that knows no dark mode.
const BASE: &str = "\
text { font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #24292f; }
.title { font-size: 18px; font-weight: 600; }
.panel { font-size: 14px; font-weight: 600; }
.quiet { fill: #57606a; }
.paper { fill: #ffffff; }
.grid { stroke: #d8dee4; stroke-width: 1; }
.fine { stroke: #eef1f4; stroke-width: 1; }
.frame { stroke: #8c959f; stroke-width: 1; fill: none; }
.line { stroke: currentColor; stroke-width: 2; stroke-linejoin: round; fill: none; }
.mark { fill: currentColor; }
";

const DARK: &str = "\
text { fill: #e6edf3; }
.quiet { fill: #9198a1; }
.paper { fill: #0d1117; }
.grid { stroke: #30363d; }
.fine { stroke: #1c2128; }
.frame { stroke: #6e7681; }
";

/// Where a text is tied to its point.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture under construction.
pub(super) struct Svg(String);

impl Svg {
    pub(super) fn new(width: f64, height: f64, title: &str) -> Self {
        let mut svg = Self(String::new());
        svg.add(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\">"
        ));
        svg.add(format_args!("<title>{}</title>", escape(title)));
        svg.add(format_args!("<style>\n{}</style>", style()));
        svg.add(format_args!("<rect class=\"paper\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>"));
        svg
    }

    pub(super) fn text(&mut self, at: (f64, f64), anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.add(format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{text}</text>",
            at.0, at.1
        ));
    }

    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        self.add(format_args!(
            "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    pub(super) fn frame(&mut self, at: (f64, f64), size: (f64, f64)) {
        self.add(format_args!(
            "<rect class=\"frame\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            at.0, at.1, size.0, size.1
        ));
    }

    /// A curve of the colour, dashes and marks of series number `index`; each point says its words when the
    /// pointer rests on it.
    pub(super) fn curve(&mut self, index: usize, points: &[((f64, f64), String)]) {
        let path: Vec<String> = points.iter().map(|((x, y), _)| format!("{x:.1},{y:.1}")).collect();
        self.add(format_args!("<g class=\"c{}\">", index % COLORS));
        self.add(format_args!("<polyline class=\"line\"{} points=\"{}\"/>", dashes(index), path.join(" ")));
        for (at, words) in points {
            let shape = mark(index, *at);
            self.add(format_args!(
                "<path class=\"mark\" d=\"{shape}\"><title>{}</title></path>",
                escape(words)
            ));
        }
        self.add("</g>");
    }

    pub(super) fn finish(mut self) -> String {
        self.add("</svg>");
        self.0
    }

    fn add(&mut self, element: impl Display) {
        let _ = writeln!(self.0, "{element}"); // a String takes all
    }
}

fn style() -> String {
    let colors = |pick: fn(&(&'static str, &'static str)) -> &'static str| {
        let rules = PALETTE.iter().enumerate();
        rules.map(|(index, pair)| format!(".c{index} {{ color: {}; }}\n", pick(pair))).collect::<String>()
    };
    let (light, dark) = (colors(|pair| pair.0), colors(|pair| pair.1));
    format!("{BASE}{light}@media (prefers-color-scheme: dark) {{\n{DARK}{dark}}}\n")
}

/// Once the colours are used up, dashes tell the next round apart.
fn dashes(index: usize) -> &'static str {
    match index / COLORS % 3 {
        0 => "",
        1 => " stroke-dasharray=\"7 4\"",
        _ => " stroke-dasharray=\"2 4\"",
    }
}

/// A circle, square, triangle, diamond or cross: five shapes on eight colours, so that no two series of forty are
/// alike, and neighbours differ to readers who see no colours.
fn mark(index: usize, (x, y): (f64, f64)) -> String {
    let body = match index % 5 {
        0 => "m-3.6,0 a3.6,3.6 0 1,0 7.2,0 a3.6,3.6 0 1,0 -7.2,0 z",
        1 => "m-3.2,-3.2 h6.4 v6.4 h-6.4 z",
        2 => "m0,-4.4 l4.2,7.4 h-8.4 z",
        3 => "m0,-4.8 l4.8,4.8 l-4.8,4.8 l-4.8,-4.8 z",
        _ => "m-1.4,-4.4 h2.8 v3 h3 v2.8 h-3 v3 h-2.8 v-3 h-3 v-2.8 h3 z",
    };
    format!("M{x:.1},{y:.1} {body}")
}

fn escape(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;");
    escaped.replace(|c: char| c.is_control(), " ")
}
