//! Findings as data.

use serde_json::{Value, json};

use super::Report;
use super::finding::Finding;

impl Report {
    /// All that was found, for programs: the findings in their order, with places that count from 0.
    pub fn to_json(&self) -> Value {
        json!({
            "proved": self.proved,
            "results_judged": self.meaning,
            "chunk_bytes": self.chunk_sizes,
            "largest_chunk_bytes": self.largest_chunk,
            "back_to_back": self.back_to_back,
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
        })
    }
}

fn finding(finding: &Finding) -> Value {
    let places = finding.places.iter().zip(&finding.operations).zip(&finding.origins);
    let places = places.map(|((place, operation), origin)| {
        json!({
            "operation": operation,
            "rank": place.rank,
            "threadblock": place.threadblock,
            "op": place.op,
            "inner": place.inner,
            "origin": origin.as_ref().map(|origin| format!("{}:{}", origin.file, origin.line)),
        })
    });
    let served = finding.served.iter().map(|served| {
        json!({
            "counter": served.counter.to_string(),
            "rank": served.rank,
            "threadblock": served.block,
        })
    });
    json!({
        "severity": finding.severity(),
        "kind": finding.kind.name(),
        "message": finding.kind.to_string(),
        "places": places.collect::<Vec<_>>(),
        "served": served.collect::<Vec<_>>(),
    })
}
