//! Copies that are complete later, and the proxies.

use super::{BLOCK, Cases, Launch, on};

/// A bulk store of 256 bytes of shared memory, which all threads have written.
fn bulk_store(before: &str, behind: &str) -> String {
    format!(
        "alignas(16) __shared__ u32 box[64]; box[t] = t; {before}
         if (t == 0) {{
             asm volatile(\"cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\" :: \"l\"(data), \"r\"(ADDRESS(box)), \"r\"(256) : \"memory\");
             asm volatile(\"cp.async.bulk.commit_group;\" ::: \"memory\");
             {behind}
         }}"
    )
}

const FENCE: &str = "FENCE(\"proxy.async.shared::cta\");";
const READ: &str = "asm volatile(\"cp.async.bulk.wait_group.read %0;\" :: \"n\"(0) : \"memory\");";
const DONE: &str = "asm volatile(\"cp.async.bulk.wait_group %0;\" :: \"n\"(0) : \"memory\");";

#[test]
fn a_bulk_store_reads_behind_a_proxy_fence() {
    let mut cases = Cases::default();
    cases.is_right("bulk_fence_then_barrier", &bulk_store(&format!("{FENCE} __syncthreads();"), DONE), BLOCK);
    cases.is_right("bulk_barrier_then_fence", &bulk_store(&format!("__syncthreads(); {FENCE}"), DONE), BLOCK);
    cases.is_wrong("bulk_no_fence", &bulk_store("__syncthreads();", DONE), BLOCK, "no fence.proxy.async");
    cases.is_wrong(
        "bulk_fence_of_global",
        &bulk_store("FENCE(\"proxy.async.global\"); __syncthreads();", DONE),
        BLOCK,
        "no fence.proxy.async",
    );
    cases.is_wrong("bulk_no_barrier", &bulk_store(FENCE, DONE), BLOCK, "no release");
    cases.check();
}

#[test]
fn a_bulk_store_is_waited_for() {
    let mut cases = Cases::default();
    let before = format!("{FENCE} __syncthreads();");
    cases.is_right("bulk_source_read", &bulk_store(&before, &format!("{READ} box[0] = 1;")), BLOCK);
    cases.is_wrong(
        "bulk_source_not_read",
        &bulk_store(&before, "box[0] = 1;"),
        BLOCK,
        "a wait for the first",
    );
    cases.is_right("bulk_source_read_at_the_end", &bulk_store(&before, READ), BLOCK);
    cases.is_wrong(
        "bulk_source_not_read_at_the_end",
        &bulk_store(&before, ""),
        BLOCK,
        "the end of the thread",
    );
    cases.is_right("bulk_target_done", &bulk_store(&before, &format!("{DONE} data[64] = data[0];")), BLOCK);
    cases.is_wrong(
        "bulk_target_read_only",
        &bulk_store(&before, &format!("{READ} data[64] = data[0];")),
        BLOCK,
        "a wait for the first",
    );
    cases.check();
}

/// A bulk load of 256 bytes into shared memory.
fn bulk_load(wait: &str) -> String {
    format!(
        "alignas(16) __shared__ u32 box[64]; __shared__ unsigned long long arrived;
         if (t == 0) {{
             asm volatile(\"mbarrier.init.shared::cta.b64 [%0], 1;\" :: \"r\"(ADDRESS(&arrived)) : \"memory\");
             FENCE(\"mbarrier_init.release.cluster\");
         }}
         __syncthreads();
         if (t == 0) {{
             asm volatile(\"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\" :: \"r\"(ADDRESS(&arrived)), \"r\"(256) : \"memory\");
             asm volatile(\"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\"
                 :: \"r\"(ADDRESS(box)), \"l\"(data), \"r\"(256), \"r\"(ADDRESS(&arrived)) : \"memory\");
         }}
         {wait}"
    )
}

#[test]
fn a_bulk_load_is_waited_for_at_its_barrier() {
    let mut cases = Cases::default();
    const WAIT: &str = "for (u32 is = 0; !is;)
        asm volatile(\"{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\"
            : \"=r\"(is) : \"r\"(ADDRESS(&arrived)), \"r\"(0) : \"memory\");";
    cases.is_right("bulk_load_waited", &bulk_load(&format!("{WAIT} data[64 + t] = box[t];")), BLOCK);
    let early = format!("if (t == 32) data[64 + t] = box[t]; {WAIT}");
    cases.is_wrong("bulk_load_read_early", &bulk_load(&early), BLOCK, "missing");
    // Other threads' waits are no barrier of this one.
    let one = format!("if (t == 0) {{ {WAIT} }} if (t == 33) data[64 + t] = box[t]; __syncthreads();");
    cases.is_wrong("bulk_load_waited_by_another", &bulk_load(&one), BLOCK, "missing");
    let all = format!("if (t == 0) {{ {WAIT} }} __syncthreads(); data[64 + t] = box[t];");
    cases.is_right("bulk_load_waited_by_one_and_a_barrier", &bulk_load(&all), BLOCK);
    // Written by the generic proxy before: a fence lies between.
    let written = |fence: &str| {
        bulk_load(WAIT).replace("__syncthreads();", &format!("box[t] = 1; {fence} __syncthreads();"))
    };
    cases.is_right("bulk_load_over_fenced_writes", &written(FENCE), BLOCK);
    cases.is_wrong("bulk_load_over_writes", &written(""), BLOCK, "no fence.proxy.async");
    cases.check();
}

#[test]
fn small_copies_are_waited_for() {
    let mut cases = Cases::default();
    let text = |wait: &str| {
        format!(
            "alignas(16) __shared__ u32 box[64];
             if (t < 16) asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16;\" :: \"r\"(ADDRESS(box + 4 * t)), \"l\"(data + 4 * t) : \"memory\");
             {wait}"
        )
    };
    const ALL: &str = "asm volatile(\"cp.async.wait_all;\" ::: \"memory\");";
    cases.is_right("small_copies", &text(&format!("{ALL} __syncthreads(); data[64 + t] = box[t];")), BLOCK);
    cases.is_wrong(
        "small_copies_without_a_wait",
        &text("if (t < 16) data[64 + t] = box[4 * t];"),
        BLOCK,
        "a wait for the first",
    );
    cases.is_wrong(
        "small_copies_without_a_barrier",
        &text(&format!("{ALL} data[64 + t] = box[63 - t];")),
        BLOCK,
        "missing",
    );
    // They are of the generic proxy: no fence lies between.
    let over = text(ALL).replace("if (t < 16)", "box[t] = 1; __syncthreads(); if (t < 16)");
    cases.is_right("small_copies_over_writes", &over, BLOCK);
    cases.check();
}

#[test]
fn what_a_copy_has_seen_may_be_overwritten_behind_it_if_the_copy_may_race() {
    let mut cases = Cases::default();
    let text = |why: &str| {
        format!(
            "alignas(16) __shared__ u32 box[4];
             if (t == 0 && who == 0) {{ ST(\"volatile\", data, 1); ST(\"volatile\", data + 1, 1); ST(\"volatile\", data + 2, 1); ST(\"volatile\", data + 3, 1); }}
             if (t == 0 && who == 1) do {{
                 asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16;\" :: \"r\"(ADDRESS(box)), \"l\"(data) : \"memory\");{why}
                 asm volatile(\"cp.async.wait_all;\" ::: \"memory\");
             }} while (!(box[0] && box[1] && box[2] && box[3]));
             if (t == 0 && who == 2) data[0] = data[1] = data[2] = data[3] = 2;"
        )
    };
    let launches = [on(0), on(1), Launch { behind: Some(1), ..on(1) }];
    cases.is_right("seen_by_a_copy", &text(" // races: each word tells whether it came"), &launches);
    cases.is_wrong("seen_by_a_copy_that_races", &text(""), &launches, "no release");
    // The reason is about what the copy reads.
    let early = "alignas(16) __shared__ u32 box[4];
        if (t == 0) {
            asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16;\" :: \"r\"(ADDRESS(box)), \"l\"(data) : \"memory\"); // races: each word tells whether it came
            data[8] = box[0];
        }";
    cases.is_wrong("a_copy_that_may_race_is_waited_for", early, BLOCK, "a wait for the first");
    cases.check();
}
