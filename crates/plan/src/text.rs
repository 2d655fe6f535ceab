//! Untrusted text: the limit on its length, and how it is shown in errors.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::PlanError;

/// The longest text of a plan, in bytes. The library's ring all-reduce of 64 ranks and 4 instances has half as many.
pub const MAX_TEXT_BYTES: u64 = 64 << 20;

/// The content of a file with a plan, or about a plan: at most [`MAX_TEXT_BYTES`].
///
/// # Errors
/// [`PlanError::File`] if it cannot be read, [`PlanError::TooLong`].
pub fn read_text(path: impl AsRef<Path>) -> Result<Vec<u8>, PlanError> {
    let path = path.as_ref();
    let mut text = Vec::new();
    // Some files, such as devices, tell no size and have no end.
    let read = |file: File| file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut text);
    File::open(path).and_then(read).map_err(|error| PlanError::File {
        path: path.into(),
        kind: error.kind(),
        message: error.to_string(),
    })?;
    match text.len() as u64 > MAX_TEXT_BYTES {
        true => Err(PlanError::TooLong { limit: MAX_TEXT_BYTES }),
        false => Ok(text),
    }
}

/// A text of one line with its control characters escaped, as Rust writes them: `\u{1b}`. A terminal would obey them.
///
/// ```
/// assert_eq!(antiphon_plan::escaped("two\nlines \u{1b}[2J"), r"two\nlines \u{1b}[2J");
/// ```
pub fn escaped(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}
