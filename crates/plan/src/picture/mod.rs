//! A simulated plan as a page, and as a trace.
//!
//! [`html`] makes one self-contained page: a timeline for each thread block and each engine, arrows for signals and data,
//! the critical path, the links' use, and [`Mark`]s in place. It fetches nothing, and says so to the browser by a content
//! security policy. [`trace`] makes the same events readable for Perfetto.

mod data;
mod trace;

pub use trace::trace;

use crate::place::Place;
use crate::plan::Plan;
use crate::simulate::{Cluster, Simulation};
use crate::verify::{Finding, Severity};

/// Something to say, such as what the verifier has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// About which operation, if about one.
    pub place: Option<Place>,
    /// How bad it is.
    pub severity: Severity,
    /// What there is to say, as plain text.
    pub text: String,
}

impl From<&Finding> for Mark {
    fn from(finding: &Finding) -> Self {
        let place = finding.places.first().copied();
        Mark { place, severity: finding.severity(), text: finding.kind.to_string() }
    }
}

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const CHART: &str = include_str!("chart.js");
const SCRIPT: &str = include_str!("page.js");

/// The page of a simulation of this very plan, of some 100 bytes for each operation. Panics if it is another plan's.
pub fn html(plan: &Plan, cluster: &Cluster, simulation: &Simulation, marks: &[Mark]) -> String {
    let title = plan.name.as_deref().unwrap_or("plan");
    let data = data::json(plan, cluster, simulation, marks);
    let mut page = String::with_capacity(PAGE.len() + STYLE.len() + CHART.len() + SCRIPT.len() + data.len());
    // Cut at the places rather than replaced one by one, so that no text can bring a place of its own.
    for (at, piece) in PAGE.split("{{").enumerate() {
        let (place, rest) = if at == 0 { ("", piece) } else { piece.split_once("}}").unwrap_or(("", piece)) };
        match place {
            "title" => page += &escape(title),
            "style" => page += STYLE,
            "chart" => page += CHART,
            "script" => page += SCRIPT,
            "data" => page += &data,
            _ => {}
        }
        page += rest;
    }
    page
}

/// Text that is nothing but text in HTML.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            c => safe.push(c),
        }
    }
    safe
}
