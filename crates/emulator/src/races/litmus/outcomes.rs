//! Store buffering, load buffering, independent readers and coherence: strong accesses do not race, and weak ones do.

use super::{BLOCKS, Cases, GPUS, Launch, on};

const FOUR_GPUS: &[Launch] = &[on(0), on(1), on(2), on(3)];

/// Each text with strong accesses of the system, which may be in any order but do not race; at the GPU's scope, which is too small; and
/// with one of them weak.
fn all(cases: &mut Cases, name: &str, text: &str, launches: &[Launch]) {
    cases.is_right(&format!("{name}_strong"), &text.replace("ORDER", "\"relaxed.sys\""), launches);
    cases.is_right(&format!("{name}_volatile"), &text.replace("ORDER", "\"volatile\""), launches);
    cases.is_wrong(
        &format!("{name}_gpu"),
        &text.replace("ORDER", "\"relaxed.gpu\""),
        launches,
        "at scope gpu only",
    );
    cases.is_wrong(
        &format!("{name}_weak"),
        &text.replacen("ORDER", "\"weak\"", 1).replace("ORDER", "\"relaxed.sys\""),
        launches,
        "no release",
    );
}

#[test]
fn store_buffering() {
    let mut cases = Cases::default();
    all(
        &mut cases,
        "sb",
        "if (t == 0) { ST(ORDER, data + who, 1); data[16 + who] = LD(ORDER, data + 1 - who); }",
        GPUS,
    );
    cases.check();
}

#[test]
fn load_buffering() {
    let mut cases = Cases::default();
    all(
        &mut cases,
        "lb",
        "if (t == 0) { data[16 + who] = LD(ORDER, data + who); ST(ORDER, data + 1 - who, 1); }",
        GPUS,
    );
    cases.check();
}

#[test]
fn independent_reads_of_independent_writes() {
    let mut cases = Cases::default();
    let text = "if (t == 0) { if (who < 2) ST(ORDER, data + who, 1);
                else { data[16 + who] = LD(ORDER, data + who % 2); data[32 + who] = LD(ORDER, data + 1 - who % 2); } }";
    all(&mut cases, "iriw", text, FOUR_GPUS);
    cases.check();
}

#[test]
fn coherence() {
    let mut cases = Cases::default();
    all(&mut cases, "coww", "if (t == 0) ST(ORDER, data, who);", GPUS);
    all(
        &mut cases,
        "corr",
        "if (t == 0) { if (who) { data[16] = LD(ORDER, data); data[17] = LD(ORDER, data); } else ST(ORDER, data, 1); }",
        GPUS,
    );
    // A strong store that a strong load has seen is ordered before what follows, though it releases nothing.
    let seen =
        "if (t == 0) { if (who) { UNTIL(ORDER, data, 1) data[0] = 2; } else ST(\"relaxed.sys\", data, 1); }";
    cases.is_right("observed", &seen.replace("ORDER", "\"relaxed.sys\""), GPUS);
    cases.is_wrong(
        "not_observed",
        "if (t == 0) { if (who) data[0] = 2; else ST(\"relaxed.sys\", data, 1); }",
        GPUS,
        "no release",
    );
    // Its own accesses are in order, strong or not.
    cases.is_right(
        "own_accesses",
        "if (blockIdx.x == 0) { data[t] = 1; data[64 + t] = data[t]; ST(\"relaxed.sys\", data + t, 2); }",
        BLOCKS,
    );
    // Bytes of one word are places of their own.
    cases.is_right("bytes_of_a_word", "if (t < 4) ((unsigned char*)data)[t] = t;", BLOCKS_OF_ONE);
    cases.is_wrong(
        "bytes_and_their_word",
        "if (t == 0) { if (blockIdx.x) ((unsigned char*)data)[3] = 1; else data[0] = 1; }",
        BLOCKS,
        "no release",
    );
    cases.check();
}

const BLOCKS_OF_ONE: &[Launch] = &[on(0)];

#[test]
fn constant_loads_need_memory_that_nobody_writes() {
    let mut cases = Cases::default();
    let text = "if (who == 0) data[t] = 1; else { u32 got; asm volatile(\"ld.global.nc.u32 %0, [%1];\" : \"=r\"(got) : \"l\"(data + t)); data[64 + t] = got; }";
    cases.is_right("nc_behind_a_grid", text, &[on(0), Launch { behind: Some(0), ..on(0) }]);
    let own = "data[t] = 1; u32 got; asm volatile(\"ld.global.nc.u32 %0, [%1];\" : \"=r\"(got) : \"l\"(data + t)); data[64 + t] = got;";
    cases.is_wrong("nc_of_own_writes", own, BLOCKS_OF_ONE, "ld.global.nc");
    let later = "u32 got; asm volatile(\"ld.global.nc.u32 %0, [%1];\" : \"=r\"(got) : \"l\"(data + t)); data[64 + t] = got; __syncthreads(); data[t ^ 1] = 2;";
    cases.is_wrong("nc_and_later_writes", later, BLOCKS_OF_ONE, "ld.global.nc");
    cases.check();
}

#[test]
fn a_line_that_says_why_may_race() {
    let mut cases = Cases::default();
    cases.is_right("allowed", "if (t == 0) {\n data[0] = who; // races: a hint\n }", GPUS);
    cases.is_wrong("not_allowed", "if (t == 0) {\n data[0] = who; // a hint\n }", GPUS, "no release");
    cases.check();
}
