//! The table of spellings.

use std::collections::HashMap;

use crate::error::LoweringError;

const TABLE: &str = include_str!("spellings.txt");

/// What an operator is: the words behind it.
pub(super) type Spelling = Vec<String>;

/// The table, with lines of a caller that come before.
pub(super) fn table(more: &[String]) -> Result<HashMap<String, Spelling>, LoweringError> {
    let mut table = HashMap::new();
    for line in TABLE.lines().chain(more.iter().map(String::as_str)) {
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next() {
            Some(target) if !target.starts_with('#') => {
                let spelling: Spelling = words.collect();
                if spelling.is_empty() {
                    return Err(LoweringError::unexpected("spellings", line, "an operator and what it is"));
                }
                table.insert(target, spelling);
            }
            _ => {}
        }
    }
    Ok(table)
}
