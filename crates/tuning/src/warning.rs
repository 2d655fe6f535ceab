//! Words to the user about what the library does without.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Writes `antiphon: warning: ` and the text to standard error, once per text and process.
///
/// A warning about a cache that cannot be used: the library continues without it, slower, and the user can repair it.
pub fn warn_once(text: &str) {
    static SAID: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner); // an insertion is never half done
    if said.get_or_insert_default().insert(text.to_owned()) {
        eprintln!("antiphon: warning: {text}");
    }
}
