//! A plan that is proved for chunks of some sizes only.

use antiphon_plan::Plan;

/// One rank that copies its input in turns, through scratch, of which the second thread block empties nothing before all is
/// there: right as long as there are no more turns than there is `room`, and proved for some of these.
pub fn in_turns(alignment: u64, unit: u64, turns: u64, room: i64) -> Plan {
    let copy = |from: &str, to: &str| {
        format!(
            r#"{{"name": "copy", "src_buff": [{{"type": "{from}", "index": 0, "size": 1}}],
                "dst_buff": [{{"type": "{to}", "index": 0, "size": 1}}]}}, {{"name": "nop"}}"#
        )
    };
    let semaphore =
        |name: &str, id: u32| format!(r#"{{"name": "{name}", "semaphore_ids": [{id}]}}, {{"name": "nop"}}"#);
    let pipeline = |ops: &[String]| {
        format!(
            r#"{{"name": "pipeline", "iter_context": {{"unit_size": {unit}, "num_chunks": {turns}}},
                "ops": [{}]}}"#,
            ops.join(",")
        )
    };
    let there = [semaphore("sem_acquire", 1), copy("i", "s"), semaphore("sem_release", 0)];
    let there = pipeline(&there);
    let all = pipeline(&[semaphore("sem_acquire", 0)]);
    let here = pipeline(&[copy("s", "o"), semaphore("sem_release", 1)]);
    let block = r#""channels": [], "remote_buffer_refs": []"#;
    let text = format!(
        r#"{{"name": "turns", "collective": "copy", "buffer_alignment": {alignment}, "gpus": [{{"id": 0,
            "input_chunks": 1, "output_chunks": 1, "scratch_chunks": 1, "channels": [],
            "semaphores": [{{"init_value": 0}}, {{"init_value": {room}}}], "threadblocks": [
            {{"id": 0, {block}, "ops": [{there}]}}, {{"id": 1, {block}, "ops": [{all}, {here}]}}]}}]}}"#
    );
    Plan::from_json(text.as_bytes()).unwrap()
}
