//! The command `antiphon bench` with real processes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

fn bench(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_antiphon"));
    command.args(["bench", "all-reduce", "--ranks", "2", "--seconds", "0.01"]).args(arguments);
    command.envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn a_cache_that_others_may_write_is_warned_of_and_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let cache = [("ANTIPHON_CACHE_DIR", folder.path().to_str().unwrap())];
    let silent = bench(&["--sizes", "64"], &cache);
    assert_eq!((silent.status.code(), &silent.stderr[..]), (Some(0), &b""[..]));
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let warned = bench(&["--sizes", "64,128"], &cache);
    let said = String::from_utf8_lossy(&warned.stderr);
    assert_eq!(warned.status.code(), Some(0), "{said}");
    let path = folder.path().display();
    let warning = format!(
        "antiphon: warning: the table of algorithms in {path}/tuning.json is not used: others may write {path} \
         (its mode is 0777): `chmod go-w` it"
    );
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort();
    assert_eq!(lines, [format!("[0] {warning}"), format!("[1] {warning}")], "once on each rank");
}
