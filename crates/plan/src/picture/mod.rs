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

/// Something to say about an operation, such as what a verifier found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Which operation.
    pub place: Place,
    /// How bad it is.
    pub severity: Severity,
    /// What there is to say, as plain text.
    pub text: String,
}

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing.
    Note,
    /// Perhaps not meant.
    Warning,
    /// Wrong.
    Error,
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
