//! Values that strong loads may return, and those that they never do.

use super::{Cases, GPUS, THREE_GPUS, on};

/// The first threads of the launches begin together, without order between them; behind MEET all have been there.
fn together(launches: u32, body: &str) -> String {
    let meet = |at| {
        format!(
            "ADD(\"relaxed.sys\", flag + {at}, 1); while (LD(\"relaxed.sys\", flag + {at}) < {launches}) {{}}"
        )
    };
    format!("if (t == 0) {{ {} {} }}", meet(0), body.replace("MEET", &meet(1)))
}

/// The text with an order of STORE and of LOAD.
fn ordered(text: &str, store: &str, load: &str) -> String {
    text.replace("STORE", &format!("\"{store}\"")).replace("LOAD", &format!("\"{load}\""))
}

#[test]
fn messages_may_pass_each_other_unless_they_are_released_and_acquired() {
    let mut cases = Cases::default();
    let text = together(
        2,
        "if (who == 0) { ST(\"relaxed.sys\", data, 1); ST(STORE, data + 1, 1); }
         else { u32 second = LD(LOAD, data + 1); data[16] = second; data[17] = LD(\"relaxed.sys\", data); }",
    );
    let with = |store, load| ordered(&text, store, load);
    let (in_order, any) = ([[0, 0], [0, 1], [1, 1]], [[0, 0], [0, 1], [1, 0], [1, 1]]);
    cases.leaves("mp_relaxed", &with("relaxed.sys", "relaxed.sys"), GPUS, &any);
    cases.leaves("mp_volatile", &with("volatile", "volatile"), GPUS, &any);
    cases.leaves("mp_release_alone", &with("release.sys", "relaxed.sys"), GPUS, &any);
    cases.leaves("mp_acquire_alone", &with("relaxed.sys", "acquire.sys"), GPUS, &any);
    cases.leaves("mp_ordered", &with("release.sys", "acquire.sys"), GPUS, &in_order);
    cases.check();
}

#[test]
fn stores_may_wait_in_a_buffer_unless_a_sequential_fence_is_behind_them() {
    let mut cases = Cases::default();
    let text = together(
        2,
        "ST(\"relaxed.sys\", data + who, 1); FENCE MEET data[16 + who] = LD(\"relaxed.sys\", data + 1 - who);",
    );
    let with = |fence: &str| text.replace("FENCE", fence);
    let any = [[0, 0], [0, 1], [1, 0], [1, 1]];
    cases.leaves("sb_relaxed", &with(""), GPUS, &any);
    cases.leaves("sb_acq_rel", &with("FENCE(\"acq_rel.sys\");"), GPUS, &any);
    cases.leaves("sb_sc", &with("FENCE(\"sc.sys\");"), GPUS, &any[1..]);
    cases.leaves("sb_sc_of_one_gpu", &with("FENCE(\"sc.gpu\");"), GPUS, &any);
    cases.leaves("sb_sc_on_one_gpu", &with("FENCE(\"sc.gpu\");"), &[on(0), on(0)], &any[1..]);
    cases.check();
}

#[test]
fn a_thread_never_sees_an_older_store_again() {
    let mut cases = Cases::default();
    let text = together(
        2,
        "if (who == 0) ST(\"relaxed.sys\", data, 1);
         else { data[16] = LD(\"relaxed.sys\", data); data[17] = LD(\"relaxed.sys\", data); }",
    );
    cases.leaves("corr", &text, GPUS, &[[0, 0], [0, 1], [1, 1]]);
    let text =
        together(2, "if (who == 0) { ST(\"relaxed.sys\", data, 1); data[16] = LD(\"relaxed.sys\", data); }");
    cases.leaves("own_store", &text, GPUS, &[[1]]);
    cases.check();
}

#[test]
fn what_is_known_over_a_third_is_seen() {
    let mut cases = Cases::default();
    let text = together(
        3,
        "if (who == 0) ST(\"relaxed.sys\", data, 1);
         if (who == 1) { data[16] = LD(\"relaxed.sys\", data); ST(STORE, data + 1, 1); }
         if (who == 2) { data[17] = LD(LOAD, data + 1); data[18] = LD(\"relaxed.sys\", data); }",
    );
    let with = |store, load| ordered(&text, store, load);
    let any = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]];
    let known = [any[0], any[1], any[2], any[3], any[4], any[5], any[7]];
    cases.leaves("wrc_relaxed", &with("relaxed.sys", "relaxed.sys"), THREE_GPUS, &any);
    cases.leaves("wrc_ordered", &with("release.sys", "acquire.sys"), THREE_GPUS, &known);
    cases.check();
}

#[test]
fn vectors_arrive_by_element_and_whole_values_at_once() {
    let mut cases = Cases::default();
    let text = |store: &str, load: &str| {
        together(
            2,
            &format!("if (who == 0) {{ {store} }} else {{ u32 a, b; {load} data[16] = a; data[17] = b; }}"),
        )
    };
    let store = "asm volatile(\"st.volatile.v2.u32 [%0], {%1, %2};\" :: \"l\"(data), \"r\"(1), \"r\"(1) : \"memory\");";
    let load = "asm volatile(\"ld.volatile.v2.u32 {%0, %1}, [%2];\" : \"=r\"(a), \"=r\"(b) : \"l\"(data) : \"memory\");";
    cases.leaves("vector", &text(store, load), GPUS, &[[0, 0], [0, 1], [1, 0], [1, 1]]);
    let store =
        "asm volatile(\"st.relaxed.sys.u64 [%0], %1;\" :: \"l\"(data), \"l\"(0x100000001ull) : \"memory\");";
    let load = "unsigned long long both; asm volatile(\"ld.relaxed.sys.u64 %0, [%1];\" : \"=l\"(both) : \"l\"(data) : \"memory\");
                a = (u32)both; b = (u32)(both >> 32);";
    cases.leaves("whole", &text(store, load), GPUS, &[[0, 0], [1, 1]]);
    cases.check();
}

#[test]
fn of_two_stores_that_nothing_orders_either_stays() {
    let mut cases = Cases::default();
    let text =
        together(2, "ST(\"relaxed.sys\", data, who + 1); MEET data[16 + who] = LD(\"relaxed.sys\", data);");
    cases.leaves("coww", &text, GPUS, &[[1, 1], [1, 2], [2, 2]]);
    // A receiver empties a place and says so, and the sender fills it again.
    let text = together(
        2,
        "if (who == 0) { ST(\"relaxed.sys\", data, 7); ST(STORE, data + 1, 1); }
         else { UNTIL(LOAD, data + 1, 1) ST(\"relaxed.sys\", data, 5); data[16] = LD(\"relaxed.sys\", data); }",
    );
    let with = |store, load| ordered(&text, store, load);
    cases.leaves("filled_relaxed", &with("relaxed.sys", "relaxed.sys"), GPUS, &[[5], [7]]);
    cases.leaves("filled_ordered", &with("release.sys", "acquire.sys"), GPUS, &[[5]]);
    cases.check();
}
