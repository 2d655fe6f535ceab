//! Message passing, in each order and scope, through barriers, and by way of a third thread.

use super::{BLOCK, BLOCKS, Cases, GPUS, Launch, THREE_GPUS, on};

/// Message passing from launch 0 to launch 1.
fn passing(store: &str, load: &str) -> String {
    format!("if (t == 0) {{ if (who == 0) {{ data[0] = 1; {store} }} else {{ {load} data[1] = data[0]; }} }}")
}

/// Message passing from block 0 to block 1.
fn between_blocks(store: &str, load: &str) -> String {
    passing(store, load).replace("who", "blockIdx.x")
}

const EDGE: &str = "no release behind the first access";

#[test]
fn a_release_and_an_acquire_order() {
    let mut cases = Cases::default();
    let text = passing(r#"ST("release.sys", flag, 1);"#, r#"UNTIL("acquire.sys", flag, 1)"#);
    cases.is_right("mp_release_acquire", &text, GPUS);
    let text = passing(r#"ADD("release.sys.global", flag, 1);"#, r#"UNTIL("acquire.sys", flag, 1)"#);
    cases.is_right("mp_red_release", &text, GPUS);
    cases.check();
}

#[test]
fn relaxed_flags_order_nothing_without_fences() {
    let mut cases = Cases::default();
    let text = passing(r#"ST("relaxed.sys", flag, 1);"#, r#"UNTIL("relaxed.sys", flag, 1)"#);
    cases.is_wrong("mp_relaxed", &text, GPUS, EDGE);
    let text = passing(r#"ST("volatile", flag, 1);"#, r#"UNTIL("volatile", flag, 1)"#);
    cases.is_wrong("mp_volatile", &text, GPUS, EDGE);
    let text = passing(r#"*(volatile u32*)flag = 1;"#, r#"while (LD("acquire.sys", flag) != 1) {}"#);
    cases.is_wrong("mp_volatile_cpp", &text, GPUS, EDGE);
    let text = passing(r#"ST("relaxed.sys", flag, 1);"#, r#"UNTIL("acquire.sys", flag, 1)"#);
    cases.is_wrong("mp_acquire_alone", &text, GPUS, EDGE);
    let text = passing(r#"ST("release.sys", flag, 1);"#, r#"UNTIL("relaxed.sys", flag, 1)"#);
    cases.is_wrong("mp_release_alone", &text, GPUS, "read the release without acquiring it");
    cases.check();
}

#[test]
fn fences_make_relaxed_flags_order() {
    let mut cases = Cases::default();
    let (store, load) = (r#"ST("relaxed.sys", flag, 1);"#, r#"UNTIL("relaxed.sys", flag, 1)"#);
    let fenced = |first: &str, second: &str| {
        passing(&format!("FENCE(\"{first}\"); {store}"), &format!("{load} FENCE(\"{second}\");"))
    };
    cases.is_right("mp_fences", &fenced("acq_rel.sys", "acq_rel.sys"), GPUS);
    cases.is_right("mp_fences_sc", &fenced("sc.sys", "acq_rel.sys"), GPUS);
    cases.is_wrong("mp_fence_of_gpu", &fenced("acq_rel.gpu", "acq_rel.sys"), GPUS, EDGE);
    cases.is_wrong(
        "mp_acquiring_fence_of_gpu",
        &fenced("acq_rel.sys", "acq_rel.gpu"),
        GPUS,
        "fence.acq_rel.sys",
    );
    let text =
        passing(&format!("__threadfence_system(); {store}"), &format!("{load} __threadfence_system();"));
    cases.is_right("mp_threadfence_system", &text, GPUS);
    let late =
        passing(&format!("{store} FENCE(\"acq_rel.sys\");"), &format!("{load} FENCE(\"acq_rel.sys\");"));
    cases.is_wrong("mp_fence_behind_the_flag", &late, GPUS, EDGE);
    cases.check();
}

#[test]
fn a_scope_must_have_both_threads() {
    let mut cases = Cases::default();
    for (scope, launches, is_enough) in [
        ("cta", BLOCKS, false),
        ("gpu", BLOCKS, true),
        ("sys", BLOCKS, true),
        ("cta", GPUS, false),
        ("gpu", GPUS, false),
    ] {
        let text = if launches.len() == 1 { between_blocks } else { passing };
        let text = text(
            &format!("ST(\"release.{scope}\", flag, 1);"),
            &format!("UNTIL(\"acquire.{scope}\", flag, 1)"),
        );
        let name = format!("mp_scope_{scope}_{}", launches.len());
        match is_enough {
            true => cases.is_right(&name, &text, launches),
            false => cases.is_wrong(&name, &text, launches, &format!("at scope {scope} only")),
        }
    }
    // Within a block the smallest scope is enough.
    let text = r#"if (t == 0) { data[0] = 1; ST("release.cta", flag, 1); } if (t == 33) { UNTIL("acquire.cta", flag, 1) data[1] = data[0]; }"#;
    cases.is_right("mp_within_a_block", text, BLOCK);
    // Both sides' scopes count.
    let text = passing(r#"ST("release.sys", flag, 1);"#, r#"UNTIL("acquire.gpu", flag, 1)"#);
    cases.is_wrong("mp_scope_of_the_load", &text, GPUS, "at scope gpu only");
    cases.check();
}

#[test]
fn atomics_are_of_their_gpu() {
    let mut cases = Cases::default();
    let text = "if (t == 0) atomicAdd(data, 1u);";
    cases.is_right("atomics_of_a_gpu", text, BLOCKS);
    cases.is_wrong("atomics_of_two_gpus", text, GPUS, "at scope gpu only");
    cases.is_right("atomics_of_the_system", "if (t == 0) atomicAdd_system(data, 1u);", GPUS);
    cases.is_wrong(
        "an_atomic_and_a_weak_store",
        "if (t == 0) { if (blockIdx.x) atomicAdd(data, 1u); else data[0] = 1; }",
        BLOCKS,
        EDGE,
    );
    cases.check();
}

#[test]
fn barriers_order_their_block() {
    let mut cases = Cases::default();
    let text = |barrier: &str| format!("data[t] = t; {barrier} data[64 + t] = data[t ^ 33];");
    cases.is_right("a_barrier", &text("__syncthreads();"), BLOCK);
    cases.is_right("a_barrier_that_votes", &text("__syncthreads_and(1);"), BLOCK);
    cases.is_wrong("no_barrier", &text(""), BLOCK, EDGE);
    cases.is_wrong("a_barrier_of_warps", &text("__syncwarp();"), BLOCK, EDGE);
    let shared =
        |barrier: &str| format!("__shared__ u32 box[64]; box[t] = t; {barrier} data[t] = box[t ^ 33];");
    cases.is_right("a_barrier_for_shared_memory", &shared("__syncthreads();"), BLOCK);
    cases.is_wrong("no_barrier_for_shared_memory", &shared(""), BLOCK, EDGE);
    cases.is_wrong(
        "other_blocks_have_no_barrier",
        "data[(t + blockIdx.x) % 64] = t; __syncthreads();",
        BLOCKS,
        EDGE,
    );
    cases.check();
}

#[test]
fn shuffles_and_votes_order_nothing() {
    let mut cases = Cases::default();
    let text = |meeting: &str| format!("data[t] = t; {meeting} data[64 + t] = data[t ^ 1];");
    cases.is_right("a_warps_barrier", &text("__syncwarp();"), BLOCK);
    cases.is_wrong("a_shuffle", &text("data[128 + t] = __shfl_sync(~0u, t, 0);"), BLOCK, EDGE);
    cases.is_wrong("a_vote", &text("data[128 + t] = __any_sync(~0u, 1);"), BLOCK, EDGE);
    cases.is_wrong("a_ballot", &text("data[128 + t] = __ballot_sync(~0u, 1);"), BLOCK, EDGE);
    cases.check();
}

#[test]
fn a_release_is_of_all_that_its_block_did_before_a_barrier() {
    let mut cases = Cases::default();
    let text = |before: &str, behind: &str| {
        format!(
            "if (who == 0) {{ data[t] = 1; {before} if (t == 0) ST(\"release.sys\", flag, 1); }}
             else {{ if (t == 0) UNTIL(\"acquire.sys\", flag, 1) {behind} data[64 + t] = data[t]; }}"
        )
    };
    cases.is_right("cumulative", &text("__syncthreads();", "__syncthreads();"), GPUS);
    cases.is_wrong("not_cumulative_before", &text("", "__syncthreads();"), GPUS, EDGE);
    cases.is_wrong("not_cumulative_behind", &text("__syncthreads();", ""), GPUS, EDGE);
    cases.check();
}

#[test]
fn a_count_carries_the_releases_of_all_who_have_counted() {
    let mut cases = Cases::default();
    // Two warps of one block, which do not know each other.
    let text = |count: &str| {
        format!(
            "if (who == 0 && t % 32 == 0) {{ data[t] = 1; {count} }}
             if (who == 1 && t == 0) {{ UNTIL(\"acquire.sys\", flag, 2) data[64] = data[0] + data[32]; }}"
        )
    };
    cases.is_right("count", &text("ADD(\"release.sys.global\", flag, 1);"), GPUS);
    cases.is_wrong("count_relaxed", &text("ADD(\"relaxed.sys.global\", flag, 1);"), GPUS, EDGE);
    cases.is_wrong(
        "count_half_relaxed",
        &text("if (t) ADD(\"relaxed.sys.global\", flag, 1); else ADD(\"release.sys.global\", flag, 1);"),
        GPUS,
        EDGE,
    );
    cases.check();
}

#[test]
fn a_third_thread_passes_the_message_on() {
    let mut cases = Cases::default();
    let text = |load: &str, store: &str| {
        format!(
            "if (t == 0) {{
                if (who == 0) {{ data[0] = 1; ST(\"release.sys\", flag, 1); }}
                if (who == 1) {{ UNTIL(\"{load}\", flag, 1) ST(\"{store}\", flag + 16, 1); }}
                if (who == 2) {{ UNTIL(\"acquire.sys\", flag + 16, 1) data[1] = data[0]; }} }}"
        )
    };
    cases.is_right("wrc", &text("acquire.sys", "release.sys"), THREE_GPUS);
    cases.is_wrong("wrc_relaxed_load", &text("relaxed.sys", "release.sys"), THREE_GPUS, EDGE);
    cases.is_wrong("wrc_relaxed_store", &text("acquire.sys", "relaxed.sys"), THREE_GPUS, EDGE);
    // An atomic goes on with the release that it read; a store does not. The third thread cannot see the first
    // one's store any more, as the second one has released its own; of the first one it knows nothing by that.
    let text = |second: &str| {
        format!(
            "if (t == 0) {{
                if (who == 0) {{ data[0] = 1; ST(\"release.sys\", flag, 1); }}
                if (who == 1) {{ UNTIL(\"relaxed.sys\", flag, 1) {second} ST(\"release.sys\", flag + 16, 1); }}
                if (who == 2) {{ UNTIL(\"acquire.sys\", flag + 16, 1) UNTIL(\"acquire.sys\", flag, 2) data[1] = data[0]; }} }}"
        )
    };
    cases.is_right("release_sequence", &text(r#"ADD("relaxed.sys.global", flag, 1);"#), THREE_GPUS);
    cases.is_wrong("no_release_sequence", &text(r#"ST("relaxed.sys", flag, 2);"#), THREE_GPUS, EDGE);
    cases.check();
}

#[test]
fn streams_and_events_order() {
    let mut cases = Cases::default();
    let text = "if (who == 0) data[t] = 1; else data[64 + t] = data[t];";
    cases.is_right("stream_order", text, &[on(0), Launch { behind: Some(0), ..on(0) }]);
    cases.is_right("event_order", text, &[on(0), Launch { after: Some(0), ..on(1) }]);
    cases.is_wrong("no_stream_order", text, GPUS, EDGE);
    cases.check();
}

#[test]
fn a_programmatic_grid_waits_for_the_one_ahead() {
    let mut cases = Cases::default();
    let text = |wait: &str| {
        format!(
            "if (who == 1) {{ {wait} data[64 + t] = data[t]; }} else {{ asm volatile(\"griddepcontrol.launch_dependents;\"); data[t] = 1; }}"
        )
    };
    let programmatic = &[on(0), Launch { behind: Some(0), is_programmatic: true, ..on(0) }];
    cases.is_right("pdl_wait", &text(r#"asm volatile("griddepcontrol.wait;" ::: "memory");"#), programmatic);
    cases.is_wrong("no_pdl_wait", &text(""), programmatic, EDGE);
    // Only the threads that wait.
    let one = r#"if (t == 0) asm volatile("griddepcontrol.wait;" ::: "memory");"#;
    cases.is_wrong("pdl_wait_of_one_thread", &text(one), programmatic, EDGE);
    cases.is_right(
        "pdl_wait_of_one_thread_and_a_barrier",
        &text(&format!("{one} __syncthreads();")),
        programmatic,
    );
    cases.is_right("not_programmatic", &text(""), &[on(0), Launch { behind: Some(0), ..on(0) }]);
    cases.check();
}

#[test]
fn clusters_order_at_their_barrier() {
    let mut cases = Cases::default();
    let text = |barrier: &str| {
        format!(
            "__shared__ unsigned long long box[64]; u32 rank = blockIdx.x;
             asm volatile(\"{{ .reg .b32 place; mapa.shared::cluster.u32 place, %0, %1; st.shared::cluster.u64 [place], %2; }}\"
                 :: \"r\"(ADDRESS(box + t)), \"r\"(1 - rank), \"l\"((unsigned long long)t) : \"memory\");
             {barrier} data[rank * 64 + t] = (u32)box[t];"
        )
    };
    let arrive = |order: &str| {
        format!(
            "asm volatile(\"barrier.cluster.arrive.{order}.aligned;\" ::: \"memory\");
             asm volatile(\"barrier.cluster.wait.acquire.aligned;\" ::: \"memory\");"
        )
    };
    let cluster = &[Launch { blocks: 2, cluster: 2, ..on(0) }];
    cases.is_right("a_clusters_barrier", &text(&arrive("release")), cluster);
    cases.is_wrong("a_clusters_barrier_that_releases_nothing", &text(&arrive("relaxed")), cluster, EDGE);
    cases.check();
}
