//! Plans that MSCCL++ 0.9.0 prints (tests/golden/mscclpp/generate.py makes them), read and written again.

use std::path::Path;

use antiphon_plan::Plan;

#[test]
fn plans_are_the_same_bytes_after_reading_and_writing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/mscclpp/plans");
    let mut seen = 0;
    for file in std::fs::read_dir(&folder).expect("the folder is part of the repository") {
        let path = file.expect("a readable folder").path();
        let text = std::fs::read_to_string(&path).expect("a readable file");
        let plan =
            Plan::from_json(text.as_bytes()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(plan.to_json(), text.trim_end(), "{}", path.display());
        seen += 1;
    }
    assert_eq!(seen, 37);
}
