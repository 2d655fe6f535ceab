//! A table as it stands in a file: with names instead of indices, for people to read.

use serde::{Deserialize, Serialize};

use super::{Choice, Row, Table, Timing};
use crate::error::TuningError;

/// The serialised form of a [`Table`].
///
/// The choices are what counts; a file may have been edited to pin one. Without them they are derived from
/// the rows once more. The rows' winners are for the reader only.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct TableWire {
    candidates: Vec<String>,
    #[serde(default)]
    choices: Vec<ChoiceWire>,
    #[serde(default)]
    rows: Vec<RowWire>,
}

#[derive(Clone, Serialize, Deserialize)]
struct ChoiceWire {
    from_bytes: usize,
    candidate: String,
}

#[derive(Clone, Serialize, Deserialize)]
struct RowWire {
    bytes: usize,
    #[serde(skip_deserializing)]
    winner: String,
    timings: Vec<TimingWire>,
}

#[derive(Clone, Serialize, Deserialize)]
struct TimingWire {
    candidate: String,
    #[serde(flatten)]
    timing: Timing,
}

impl From<Table> for TableWire {
    fn from(table: Table) -> Self {
        let Table { candidates, rows, choices } = table;
        let name = |candidate: usize| candidates[candidate].clone();
        let choice =
            |choice: &Choice| ChoiceWire { from_bytes: choice.from_bytes, candidate: name(choice.candidate) };
        let timing = |(candidate, timing): (usize, &Option<Timing>)| {
            timing.map(|timing| TimingWire { candidate: name(candidate), timing })
        };
        let row = |row: &Row| RowWire {
            bytes: row.bytes,
            winner: name(row.winner),
            timings: row.timings.iter().enumerate().filter_map(timing).collect(),
        };
        let choices = choices.iter().map(choice).collect();
        let rows = rows.iter().map(row).collect();
        Self { choices, rows, candidates }
    }
}

impl TryFrom<TableWire> for Table {
    type Error = TuningError;

    fn try_from(wire: TableWire) -> Result<Self, TuningError> {
        let TableWire { candidates, choices, rows } = wire;
        let index = |name: String| match candidates.iter().position(|candidate| *candidate == name) {
            Some(index) => Ok(index),
            None => Err(TuningError::CandidateName { name }),
        };
        let rows = rows.into_iter().map(|row| {
            let mut timings = vec![None; candidates.len()];
            for TimingWire { candidate, timing } in row.timings {
                timings[index(candidate)?] = Some(timing);
            }
            Ok((row.bytes, timings))
        });
        let rows = rows.collect::<Result<_, TuningError>>()?;
        let choices = choices
            .into_iter()
            .map(|choice| Ok(Choice { from_bytes: choice.from_bytes, candidate: index(choice.candidate)? }));
        let choices = choices.collect::<Result<Vec<_>, TuningError>>()?;
        Table::new(candidates, rows, (!choices.is_empty()).then_some(choices))
    }
}
