//! The page and the trace as text; tests/test_plan_show.py looks at them in a browser.

mod builder;

use antiphon_plan::picture::{Mark, html, trace};
use antiphon_plan::simulate::{Cluster, Simulation, play};
use antiphon_plan::verify::Severity;
use antiphon_plan::{Place, Plan, Rank, ThreadBlockId};
use builder::*;
use serde_json::Value;

fn played(plan: &Plan, spec: &str, bytes: u64) -> (Cluster, Simulation) {
    let cluster = Cluster::from_spec(spec).unwrap();
    let (simulation, _) = play(plan, &cluster, bytes).unwrap();
    (cluster, simulation)
}

fn place(rank: u32, block: u32, op: u32) -> Place {
    Place { rank: Rank(rank), threadblock: ThreadBlockId(block), op, inner: None }
}

/// The page's data.
fn data(page: &str) -> Value {
    let begin = page.find(r#"id="data">"#).unwrap() + r#"id="data">"#.len();
    let end = begin + page[begin..].find("</script>").unwrap();
    serde_json::from_str(&page[begin..end]).unwrap()
}

/// Kept in the target folder, to be looked at.
fn keep(name: &str, page: &str) {
    std::fs::write(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), page).unwrap();
}

#[test]
fn a_page_has_every_operation_and_fetches_nothing() {
    let plan = pulled_two_shot(4, 8);
    let (cluster, simulation) = played(&plan, "h200x4", 1 << 20);
    let mark =
        Mark { place: Some(place(2, 1, 2)), severity: Severity::Error, text: "races with itself".into() };
    let page = html(&plan, &cluster, &simulation, &[mark]);
    keep("two_shot.html", &page);
    let data = data(&page);
    assert_eq!(data["lanes"].as_array().unwrap().len(), 4 * 8);
    let spans = &data["spans"];
    assert_eq!(spans["lane"].as_array().unwrap().len(), 4 * 8 * 8);
    let name = |at: usize| &data["texts"][spans["name"][at].as_u64().unwrap() as usize];
    assert_eq!(name(0), "signal");
    assert_eq!(data["marks"][0]["lane"], 2 * 8 + 1);
    assert_eq!(data["path"].as_array().unwrap().len(), simulation.critical_path().len());
    for fetches in ["http:", "https:", "src=", "href=", "@import", "url(", "fetch(", "{{"] {
        assert!(!page.contains(fetches), "{fetches}");
    }
}

#[test]
fn engines_have_lanes_of_their_own() {
    let plan = hierarchical_all_reduce(2, 2);
    let (cluster, simulation) = played(&plan, "h200x2-nodes2", 1 << 20);
    let page = html(&plan, &cluster, &simulation, &[]);
    keep("hierarchical.html", &page);
    let data = data(&page);
    let lanes: Vec<_> =
        data["lanes"].as_array().unwrap().iter().map(|lane| lane["name"].as_str().unwrap()).collect();
    assert_eq!(lanes, ["block 0", "network card"].repeat(4));
}

#[test]
fn what_a_plan_is_called_cannot_become_markup() {
    let mut plan = pulled_two_shot(2, 1);
    let evil = "</title></script><script>alert(1)</script>{{script}}<!-- & \u{2028}\"'";
    plan.name = Some(evil.into());
    plan.collective = evil.into();
    let (cluster, simulation) = played(&plan, "h200x2", 1 << 10);
    let mark = Mark { place: Some(place(9, 9, 9)), severity: Severity::Warning, text: evil.into() };
    let page = html(&plan, &cluster, &simulation, &[mark]);
    assert_eq!(page.matches("<script").count(), 3, "the page's own");
    assert_eq!(page.matches("alert(1)").count(), 4, "as text, in the title and the data");
    assert!(!page.contains("<script>alert") && !page.contains("<!--"));
    let data = data(&page);
    assert_eq!((&data["name"], &data["marks"][0]["text"]), (&evil.into(), &evil.into()));
    assert_eq!(data["marks"][0]["lane"], Value::Null, "there is no such thread block");
}

/// 1,024 thread blocks and more than 100,000 operations: `tests/test_plan_show.py` draws one of this size too.
#[test]
fn a_large_page_stays_small_for_its_size() {
    let plan = hierarchical_all_reduce(64, 4);
    let (cluster, simulation) = played(&plan, "h200x4-nodes64", 1 << 24);
    let page = html(&plan, &cluster, &simulation, &[]);
    keep("large.html", &page);
    let spans = simulation.spans.len();
    assert!(spans > 100_000, "{spans}");
    assert!(page.len() < 130 * spans, "{} bytes for {spans} spans", page.len());
}

#[test]
fn a_trace_has_an_event_for_each_span_and_two_for_each_flow() {
    let plan = hierarchical_all_reduce(2, 2);
    let (_, simulation) = played(&plan, "h200x2-nodes2", 1 << 20);
    let trace: Value = serde_json::from_str(&trace(&plan, &simulation)).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
    assert_eq!(of("X"), simulation.spans.len());
    let flows = simulation.arrows.iter().filter(|arrow| arrow.to.is_some()).count();
    assert_eq!((of("s"), of("f")), (flows, flows));
    let first = events.iter().find(|event| event["ph"] == "X").unwrap();
    assert_eq!((&first["pid"], &first["tid"], &first["name"]), (&0.into(), &0.into(), &"put".into()));
}
