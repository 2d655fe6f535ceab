//! The choices of a table.

use antiphon_tuning::{Choice, STICKINESS, Table, Timing, TuningError};
use proptest::prelude::*;

fn timing(nanoseconds: f64) -> Option<Timing> {
    Timing::of(&[nanoseconds])
}

/// A table of candidates 0, 1, ... with these times in nanoseconds by size.
fn table(rows: &[(usize, &[f64])]) -> Result<Table, TuningError> {
    let names = (0..rows[0].1.len()).map(|i| format!("candidate {i}")).collect();
    let row = |&(bytes, times): &(usize, &[f64])| (bytes, times.iter().map(|&t| timing(t)).collect());
    Table::from_timings(names, rows.iter().map(row).collect())
}

fn choices(table: &Table) -> Vec<(usize, usize)> {
    table.choices().iter().map(|choice| (choice.from_bytes, choice.candidate)).collect()
}

#[test]
fn the_median_of_an_even_number_lies_between() {
    let timing = Timing::of(&[4.0, 1.0, 3.0, 100.0]).unwrap();
    assert_eq!((timing.median_ns, timing.min_ns, timing.max_ns, timing.samples), (3.5, 1.0, 100.0, 4));
    assert_eq!(Timing::of(&[]), None);
    assert_eq!(Timing::of(&[1.0, f64::INFINITY]), None);
}

#[test]
fn changes_where_the_lines_meet() {
    // 10 + 1/10 n meets 40 + 1/40 n at n = 400.
    let table = table(&[(0, &[10.0, 40.0]), (1_000, &[110.0, 65.0])]).unwrap();
    assert_eq!(choices(&table), [(0, 0), (401, 1)]);
}

#[test]
fn equals_go_to_the_first() {
    let table = table(&[(8, &[7.0, 7.0, 9.0]), (16, &[7.0, 7.0, 9.0])]).unwrap();
    assert_eq!(choices(&table), [(0, 0)]);
}

#[test]
fn noise_does_not_make_it_flap() {
    let slower = 100.0 * (1.0 + STICKINESS);
    let sticks = table(&[(8, &[90.0, 100.0]), (16, &[slower, 100.0]), (32, &[90.0, 100.0])]).unwrap();
    assert_eq!(choices(&sticks), [(0, 0)]);
    // Once it has to go, it does so right above the last size where it held out.
    let gives_up = table(&[(8, &[90.0, 100.0]), (16, &[slower, 100.0]), (32, &[120.0, 100.0])]).unwrap();
    assert_eq!(choices(&gives_up), [(0, 0), (17, 1)]);
}

#[test]
fn three_candidates_take_over_from_each_other() {
    let rows: [(usize, &[f64]); 3] =
        [(100, &[1.0, 2.0, 9.0]), (200, &[3.0, 2.0, 9.0]), (400, &[9.0, 8.0, 2.0])];
    // They meet halfway between 100 and 200, and at 200 + 200 * 7/13.
    assert_eq!(choices(&table(&rows).unwrap()), [(0, 0), (151, 1), (308, 2)]);
}

#[test]
fn thresholds_choose_without_measurements() {
    let table = Table::from_thresholds(["a", "b"], [(0, 1), (4_096, 0), (65_536, 1)]).unwrap();
    assert_eq!([0, 4_095, 4_096, 65_535, 65_536].map(|bytes| table.choose(bytes)), [1, 1, 0, 0, 1]);
    assert!(table.rows().is_empty());
    assert_eq!(table.choices()[1], Choice { from_bytes: 4_096, candidate: 0 });
}

#[test]
fn refuses_tables_that_could_not_choose() {
    let thresholds = |thresholds: &[(usize, usize)]| {
        Table::from_thresholds(["a", "b"], thresholds.iter().copied()).unwrap_err().to_string()
    };
    assert_eq!(thresholds(&[]), "a sweep or a table needs at least one size");
    assert_eq!(thresholds(&[(8, 0)]), "the first threshold must be 0 bytes, but it is 8");
    assert_eq!(thresholds(&[(0, 0), (9, 1), (9, 0)]), "sizes must ascend, but 9 bytes follow 9 bytes");
    assert_eq!(thresholds(&[(0, 2)]), "there is no candidate 2: there are 2");

    let timings = |rows: &[(usize, &[f64])]| table(rows).unwrap_err().to_string();
    assert_eq!(timings(&[(8, &[1.0]), (4, &[1.0])]), "sizes must ascend, but 4 bytes follow 8 bytes");
    assert_eq!(
        timings(&[(4, &[1.0]), (8, &[1.0, 2.0])]),
        "the row of 8 bytes has 2 timings for 1 candidates"
    );
    assert_eq!(timings(&[(4, &[-1.0])]), "candidate \"candidate 0\" at 4 bytes took -1 ns");
    assert_eq!(timings(&[(4, &[f64::INFINITY])]), "none of the 1 candidates serves 4 bytes");
    assert!(matches!(Table::from_timings(vec![], vec![(1, vec![])]), Err(TuningError::NoCandidates)));
    assert!(matches!(Table::from_timings(vec!["a".into()], vec![]), Err(TuningError::NoSizes)));
}

#[test]
fn the_fingerprint_is_of_what_is_chosen() {
    let of = |names: [&str; 2], threshold| {
        Table::from_thresholds(names, [(0, 0), (threshold, 1)]).unwrap().fingerprint()
    };
    assert_eq!(of(["a", "b"], 8), of(["a", "b"], 8));
    assert_ne!(of(["a", "b"], 8), of(["a", "b"], 9));
    assert_ne!(of(["a", "b"], 8), of(["a", "c"], 8));
    let slow = table(&[(0, &[10.0, 40.0]), (1_000, &[110.0, 65.0])]).unwrap();
    let slower = table(&[(0, &[20.0, 80.0]), (1_000, &[220.0, 130.0])]).unwrap();
    assert_ne!(slow, slower);
    assert_eq!(slow.fingerprint(), slower.fingerprint());
}

/// Rows of three candidates with times from 0 to 100 ns; the first candidate serves every size.
fn rows() -> impl Strategy<Value = Vec<(usize, Vec<Option<Timing>>)>> {
    let time = || (0..=100u32).prop_map(|t| timing(f64::from(t)));
    let served = || prop_oneof![4 => time(), 1 => Just(None)];
    let row = (time(), served(), served()).prop_map(|(a, b, c)| vec![a, b, c]);
    prop::collection::btree_map(0..5_000usize, row, 1..8).prop_map(Vec::from_iter)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_choice_is_about_the_best_at_each_measured_size(rows in rows()) {
        let table = Table::from_timings(["a", "b", "c"].map(String::from).to_vec(), rows).unwrap();
        for row in table.rows() {
            prop_assert_eq!(table.choose(row.bytes), row.winner);
            let times = row.timings.iter().flatten().map(|timing| timing.median_ns);
            let best = times.fold(f64::INFINITY, f64::min);
            prop_assert!(row.timings[row.winner].unwrap().median_ns <= best * (1.0 + STICKINESS));
        }
    }

    #[test]
    fn between_two_sizes_it_is_one_of_their_winners(rows in rows(), bytes in 0..6_000usize) {
        let table = Table::from_timings(["a", "b", "c"].map(String::from).to_vec(), rows).unwrap();
        let above = table.rows().partition_point(|row| row.bytes <= bytes);
        let neighbours = &table.rows()[above.saturating_sub(1)..(above + 1).min(table.rows().len())];
        let chosen = table.choose(bytes);
        prop_assert!(neighbours.iter().any(|row| row.winner == chosen));
        let changes = table.choices();
        prop_assert!(changes.is_sorted_by(|a, b| a.from_bytes < b.from_bytes && a.candidate != b.candidate));
    }

    #[test]
    fn choosing_is_finding_the_last_threshold(
        thresholds in prop::collection::btree_map(1..1_000usize, 0..3usize, 0..20),
        first in 0..3usize,
        bytes in 0..1_100usize,
    ) {
        let thresholds = Vec::from_iter(std::iter::once((0, first)).chain(thresholds));
        let expected = thresholds.iter().rfind(|(from, _)| *from <= bytes).unwrap().1;
        let table = Table::from_thresholds(["a", "b", "c"], thresholds).unwrap();
        prop_assert_eq!(table.choose(bytes), expected);
    }
}
