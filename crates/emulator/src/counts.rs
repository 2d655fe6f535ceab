//! How much has run: with `ANTIPHON_EMULATOR_COUNTS=FILE` a process appends a line with its number of grids to the file when it ends.

use std::{
    fs::OpenOptions,
    io::Write,
    sync::{
        Once,
        atomic::{AtomicU64, Ordering},
    },
};

static GRIDS: AtomicU64 = AtomicU64::new(0);

/// A grid runs.
pub(crate) fn grid() {
    static AT_EXIT: Once = Once::new();
    // SAFETY: a function of this library, which stays loaded.
    AT_EXIT.call_once(|| _ = unsafe { libc::atexit(ends) });
    GRIDS.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn ends() {
    let Some(path) = std::env::var_os("ANTIPHON_EMULATOR_COUNTS") else { return };
    let line = format!("{}\n", GRIDS.load(Ordering::Relaxed));
    // Nobody hears of an error here; a count that is too low is noticed.
    let _ = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(line.as_bytes()));
}
