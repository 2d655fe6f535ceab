//! The command `antiphon lower` on files: what one call writes, the next one reads and proves.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn antiphon(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_antiphon")).arg("lower").args(args).output().unwrap()
}

fn says(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

fn example(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/lowering").join(name).display().to_string()
}

fn written(folder: &Path, name: &str, bytes: &[u8]) -> String {
    let path: PathBuf = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

#[test]
fn a_block_is_fused_proved_and_run() {
    let block = example("block.txt");
    let report = antiphon(&[&block, "--device", "h200", "--run", "7"]);
    let (out, err) = says(&report);
    assert!(report.status.success(), "{out}{err}");
    assert!(out.contains("fuse: one call gives residual, norm (start, hidden, norm)"), "{out}");
    assert!(out.contains("1 calls became 1"), "{out}");
    assert!(err.contains("results differ by at most"), "{err}");

    let folder = tempfile::tempdir().unwrap();
    let plan = written(folder.path(), "plan.json", &antiphon(&[&block, "--emit", "plan"]).stdout);
    let after = antiphon(&[&block, "--emit", "text"]).stdout;
    let text = String::from_utf8(after.clone()).unwrap();
    let after = written(folder.path(), "after.txt", &after);
    assert!(antiphon(&[&block, "--check", &plan, &after]).status.success());

    let wrong = written(
        folder.path(),
        "wrong.txt",
        text.replace("return %fused_all_reduce_norm", "return %partial").as_bytes(),
    );
    let refused = antiphon(&[&block, "--check", &plan, &wrong]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(says(&refused).0.contains("output 0 has another meaning than norm"), "{}", says(&refused).0);
}

#[test]
fn json_is_the_same_program() {
    let folder = tempfile::tempdir().unwrap();
    let block = example("block.txt");
    let json = written(folder.path(), "lowered.json", &antiphon(&[&block, "--emit", "json"]).stdout);
    let (again, _) = says(&antiphon(&[&json, "--emit", "text"]));
    let (text, _) = says(&antiphon(&[&block, "--emit", "text"]));
    assert_eq!(again, text);
}

#[test]
fn what_cannot_be_read_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let broken = written(folder.path(), "broken.txt", b"%x: f32[4] = input()\n%y = nothing");
    for (args, because) in [
        (vec![broken.as_str()], "broken.txt: line 2: found = nothing, wanted `:`"),
        (vec!["no-such-file.txt"], "no-such-file.txt"),
        (vec![broken.as_str(), "--device", "h9000"], "unknown device"),
        (vec![broken.as_str(), "--from", "torch"], "line 1 column 1"),
    ] {
        let output = antiphon(&args);
        assert!(!output.status.success());
        assert!(says(&output).1.contains(because), "{:?}", says(&output));
    }
}
