//! Where caches are kept.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::TuningError;

/// The folder of this library's caches: `$ANTIPHON_CACHE_DIR`, else `$XDG_CACHE_HOME/antiphon`, else
/// `$HOME/.cache/antiphon`. It need not exist yet.
///
/// As in the XDG base directory specification, an empty variable counts as unset, and so does an
/// `XDG_CACHE_HOME` that is not absolute.
///
/// # Errors
///
/// [`TuningError::NoCacheFolder`] if none of the three variables is of use.
pub fn cache_dir() -> Result<PathBuf, TuningError> {
    resolve(|name| env::var_os(name)).ok_or(TuningError::NoCacheFolder)
}

fn resolve(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("ANTIPHON_CACHE_DIR")
        .or_else(|| Some(path("XDG_CACHE_HOME").filter(|path| path.is_absolute())?.join("antiphon")))
        .or_else(|| Some(path("HOME")?.join(".cache/antiphon")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(variables: &[(&str, &str)]) -> Option<PathBuf> {
        resolve(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn prefers_its_own_variable_then_xdg_then_home() {
        let all = [("ANTIPHON_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(resolved(&all), Some("/a".into()));
        assert_eq!(resolved(&all[1..]), Some("/x/antiphon".into()));
        assert_eq!(resolved(&all[2..]), Some("/h/.cache/antiphon".into()));
        assert_eq!(resolved(&[]), None);
    }

    #[test]
    fn passes_over_variables_of_no_use() {
        let variables = [("ANTIPHON_CACHE_DIR", ""), ("XDG_CACHE_HOME", "not/absolute"), ("HOME", "/h")];
        assert_eq!(resolved(&variables), Some("/h/.cache/antiphon".into()));
    }
}
